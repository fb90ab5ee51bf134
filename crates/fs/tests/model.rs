//! Random operations on names, compared with a plain model: outcome by outcome, and the
//! whole tree now and then, also after remounts.

mod common;

use base::rng::Rng;
use common::{World, list};
use fs::{Attr, Caller, FileSystem, Ino, ROOT};
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    File,
    Dir,
    Link,
}

#[derive(Clone, Debug)]
struct Thing {
    kind: Kind,
    nlink: u32,
    names: BTreeMap<Vec<u8>, Ino>,
    parent: Ino,
}

#[derive(Clone, Debug)]
struct Model {
    things: BTreeMap<Ino, Thing>,
}

type Outcome<T> = Result<T, i32>;

fn thing(kind: Kind, parent: Ino) -> Thing {
    Thing {
        kind,
        nlink: if kind == Kind::Dir { 2 } else { 1 },
        names: BTreeMap::new(),
        parent,
    }
}

impl Model {
    fn new() -> Model {
        Model {
            things: BTreeMap::from([(ROOT, thing(Kind::Dir, ROOT))]),
        }
    }

    fn at(&mut self, ino: Ino) -> &mut Thing {
        self.things.get_mut(&ino).unwrap()
    }

    fn find(&self, dir: Ino, name: &[u8]) -> Option<Ino> {
        self.things[&dir].names.get(name).copied()
    }

    fn can_add(&self, dir: Ino, name: &[u8]) -> Outcome<()> {
        match self.find(dir, name) {
            Some(_) => Err(libc::EEXIST),
            None => Ok(()),
        }
    }

    fn add(&mut self, dir: Ino, name: &[u8], ino: Ino, kind: Kind) {
        self.things.insert(ino, thing(kind, dir));
        self.at(dir).names.insert(name.to_vec(), ino);
        self.at(dir).nlink += (kind == Kind::Dir) as u32;
    }

    fn link(&mut self, ino: Ino, dir: Ino, name: &[u8]) -> Outcome<()> {
        if self.things[&ino].kind == Kind::Dir {
            return Err(libc::EPERM);
        }
        self.can_add(dir, name)?;
        self.at(dir).names.insert(name.to_vec(), ino);
        self.at(ino).nlink += 1;
        Ok(())
    }

    fn drop_link(&mut self, ino: Ino, parent: Ino) {
        if self.things[&ino].kind == Kind::Dir {
            self.at(parent).nlink -= 1;
            self.things.remove(&ino);
        } else {
            self.at(ino).nlink -= 1;
            if self.things[&ino].nlink == 0 {
                self.things.remove(&ino);
            }
        }
    }

    fn remove(&mut self, dir: Ino, name: &[u8], directory: bool) -> Outcome<()> {
        let ino = self.find(dir, name).ok_or(libc::ENOENT)?;
        match (directory, self.things[&ino].kind == Kind::Dir) {
            (true, false) => return Err(libc::ENOTDIR),
            (false, true) => return Err(libc::EISDIR),
            (true, true) if !self.things[&ino].names.is_empty() => return Err(libc::ENOTEMPTY),
            _ => {}
        }
        self.at(dir).names.remove(name);
        self.drop_link(ino, dir);
        Ok(())
    }

    fn is_above(&self, upper: Ino, mut lower: Ino) -> bool {
        while lower != upper && lower != ROOT {
            lower = self.things[&lower].parent;
        }
        lower == upper
    }

    fn rename(
        &mut self,
        (from, name): (Ino, &[u8]),
        (to, new_name): (Ino, &[u8]),
        flags: u32,
    ) -> Outcome<()> {
        let source = self.find(from, name).ok_or(libc::ENOENT)?;
        let target = self.find(to, new_name);
        let exchange = flags == fs::RENAME_EXCHANGE;
        match target {
            None if exchange => return Err(libc::ENOENT),
            Some(_) if flags == fs::RENAME_NOREPLACE => return Err(libc::EEXIST),
            Some(target) if target == source => return Ok(()),
            _ => {}
        }
        let is_dir = |ino: Ino| self.things[&ino].kind == Kind::Dir;
        if from != to && is_dir(source) && self.is_above(source, to) {
            return Err(libc::EINVAL);
        }
        if let Some(target) = target
            && from != to
            && is_dir(target)
            && (exchange || is_dir(source))
            && self.is_above(target, from)
        {
            return Err(if exchange {
                libc::EINVAL
            } else {
                libc::ENOTEMPTY
            });
        }
        if exchange {
            let target = target.unwrap();
            let (up, down) = (is_dir(source) as u32, is_dir(target) as u32);
            self.at(from).names.insert(name.to_vec(), target);
            self.at(to).names.insert(new_name.to_vec(), source);
            self.at(from).nlink = self.at(from).nlink + down - up;
            self.at(to).nlink = self.at(to).nlink + up - down;
            self.at(source).parent = to;
            self.at(target).parent = from;
            return Ok(());
        }
        if let Some(target) = target {
            match (is_dir(source), is_dir(target)) {
                (true, false) => return Err(libc::ENOTDIR),
                (false, true) => return Err(libc::EISDIR),
                (true, true) if !self.things[&target].names.is_empty() => {
                    return Err(libc::ENOTEMPTY);
                }
                _ => {}
            }
        }
        let up = is_dir(source) as u32;
        if let Some(target) = target {
            self.drop_link(target, to);
        }
        self.at(from).names.remove(name);
        self.at(to).names.insert(new_name.to_vec(), source);
        self.at(from).nlink -= up;
        self.at(to).nlink += up;
        self.at(source).parent = to;
        Ok(())
    }
}

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
