//! Random operations on names, compared with a plain model: outcome by outcome, and the
//! whole tree now and then, also after remounts.

use crate::tree::{Kind, Model, Outcome};
use crate::world::{World, list};
use base::rng::Rng;
use fs::{Attr, Caller, FileSystem, Ino, ROOT};

fn check(fs: &FileSystem, model: &Model, rng: &mut Rng) {
    for (ino, thing) in &model.things {
        let attr = fs.getattr(*ino).unwrap();
        assert_eq!(attr.nlink, thing.nlink, "links of {ino}: {thing:?}");
        assert_eq!(attr.is_dir(), thing.kind == Kind::Dir);
        if thing.kind != Kind::Dir {
            continue;
        }
        let mut found = list(fs, *ino, rng.range(1, 40) as usize);
        found.sort();
        let expected: Vec<_> = thing.names.clone().into_iter().collect();
        assert_eq!(found, expected);
        assert_eq!(fs.lookup(*ino, b"..").unwrap().ino, thing.parent);
        for (name, child) in &thing.names {
            assert_eq!(fs.lookup(*ino, name).unwrap().ino, *child);
        }
    }
}

/// One random operation on both; panics when they disagree.
fn step(fs: &FileSystem, model: &mut Model, rng: &mut Rng, names: u64) {
    let who = Caller::root();
    let all: Vec<Ino> = model.things.keys().copied().collect();
    let dirs: Vec<Ino> = all
        .iter()
        .copied()
        .filter(|i| model.things[i].kind == Kind::Dir)
        .collect();
    // A third of the time in one directory, so that it grows.
    let pick_dir = |rng: &mut Rng| {
        if rng.one_in(3) {
            ROOT
        } else {
            *rng.pick(&dirs)
        }
    };
    let pick_name = |rng: &mut Rng| {
        let i = rng.below(names);
        format!("{i}{}", "-".repeat((i * 37 % 200) as usize)).into_bytes()
    };
    let (dir, name) = (pick_dir(rng), pick_name(rng));
    let (dir2, name2) = (pick_dir(rng), pick_name(rng));
    let made = |r: Result<Attr, fs::Error>| r.map(|a| a.ino).map_err(|e| e.errno());
    let done = |r: Result<(), fs::Error>| r.map_err(|e| e.errno());
    let create = |model: &mut Model, kind: Kind, got: Outcome<Ino>| {
        assert_eq!(got.map(|_| ()), model.can_add(dir, &name));
        if let Ok(ino) = got {
            model.add(dir, &name, ino, kind);
        }
    };
    match rng.below(20) {
        0..=5 => {
            let got = made(fs.mknod(&who, dir, &name, libc::S_IFREG | 0o644, 0));
            create(model, Kind::File, got);
        }
        6..=7 => {
            let got = made(fs.mkdir(&who, dir, &name, 0o755));
            create(model, Kind::Dir, got);
        }
        8 => {
            let got = made(fs.symlink(&who, dir, &name, b"target"));
            create(model, Kind::Link, got);
        }
        9..=10 => {
            let ino = *rng.pick(&all);
            let got = made(fs.link(&who, ino, dir, &name)).map(|_| ());
            assert_eq!(got, model.link(ino, dir, &name), "link");
        }
        11..=12 => {
            let got = done(fs.unlink(&who, dir, &name));
            assert_eq!(got, model.remove(dir, &name, false), "unlink");
        }
        13 => {
            let got = done(fs.rmdir(&who, dir, &name));
            assert_eq!(got, model.remove(dir, &name, true), "rmdir");
        }
        _ => {
            let flags = *rng.pick(&[0, 0, 0, fs::RENAME_NOREPLACE, fs::RENAME_EXCHANGE]);
            let got = done(fs.rename(&who, dir, &name, dir2, &name2, flags));
            let expected = model.rename((dir, &name), (dir2, &name2), flags);
            assert_eq!(
                got, expected,
                "rename {flags} {dir}/{name:?} to {dir2}/{name2:?}"
            );
        }
    }
}

fn run(seed: u64, hash_mask: Option<u64>, names: u64, steps: u64) {
    eprintln!("seed {seed}");
    let mut rng = Rng::new(seed);
    let mut world = World::new(1, 64 << 20, seed);
    world.options.hash_mask = hash_mask;
    let mut fs = world.open();
    let mut model = Model::new();
    for i in 0..steps {
        step(&fs, &mut model, &mut rng, names);
        if i % (steps / 8) == 0 {
            check(&fs, &model, &mut rng);
            if rng.one_in(2) {
                fs = world.remount(fs);
                check(&fs, &model, &mut rng);
            }
        }
    }
    check(&fs, &model, &mut rng);
    // Everything can be removed again, and leaves nothing behind.
    let who = Caller::root();
    while model.things.len() > 1 {
        let dirs: Vec<Ino> = model.things.keys().copied().collect();
        for dir in dirs {
            let Some(thing) = model.things.get(&dir).cloned() else {
                continue;
            };
            for (name, child) in thing.names {
                let directory = model.things[&child].kind == Kind::Dir;
                if model.remove(dir, &name, directory).is_ok() {
                    match directory {
                        true => fs.rmdir(&who, dir, &name).unwrap(),
                        false => fs.unlink(&who, dir, &name).unwrap(),
                    }
                }
            }
        }
    }
    check(&fs, &model, &mut rng);
    assert_eq!(
        nodes(&fs),
        17,
        "only the root and the orphan directories are left"
    );
    fs.close().unwrap();
}

/// Nodes there are, of all kinds.
fn nodes(fs: &FileSystem) -> u64 {
    fs.store().checkpoint().unwrap();
    fs.store().space().nodes
}

#[test]
fn names_agree_with_the_model() {
    for seed in 1..=6 {
        run(seed, None, 300, 6_000);
    }
}

#[test]
fn names_agree_with_the_model_when_hashes_collide() {
    // Eight hashes for all names.
    for seed in 11..=14 {
        run(seed, Some(7 << 61), 150, 6_000);
    }
}

#[test]
fn names_agree_with_the_model_when_all_hashes_are_equal() {
    run(21, Some(0), 100, 4_000);
}
