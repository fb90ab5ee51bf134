//! Bits rot anywhere on the devices: what is asked for is right or refused, and nothing that
//! was not hit is lost. Data itself has no checksums, so flipped bits of data show as such.

use crate::world::World;
use base::canary::Canary;
use base::rng::Rng;
use device::sim::Snapshot;
use fs::{Caller, FileSystem, Ino, ROOT};
use std::collections::BTreeMap;

/// Bytes of each path's content (files), target (links) or nothing (directories).
type Contents = BTreeMap<Vec<u8>, Vec<u8>>;

fn who() -> Caller {
    Caller::root()
}

/// Batches of the journal after what must not go unnoticed: more than rot hits in a round.
const SYNCS: u64 = 5;

/// A tree with something of every kind of node in it. Returns what was in it when half of it was there, and synced: behind
/// that are batches that tell if the journal does not lead to them.
fn build(fs: &FileSystem) -> Contents {
    let mut rng = Rng::new(42);
    let big = fs.mkdir(&who(), ROOT, b"big", 0o755).unwrap().ino;
    for i in 0..1500 {
        let name = format!("name-{i}").into_bytes();
        fs.mknod(&who(), big, &name, libc::S_IFREG | 0o644, 0)
            .unwrap();
    }
    let dir = fs.mkdir(&who(), ROOT, b"files", 0o755).unwrap().ino;
    fs.symlink(&who(), dir, b"link", b"file-3").unwrap();
    let mut half = Contents::new();
    for i in 0..40u64 {
        if i >= 20 && (i - 20).is_multiple_of(20 / SYNCS) {
            fs.sync().unwrap();
        }
        if i == 20 {
            half = read_all(fs).0;
        }
        let name = format!("file-{i}").into_bytes();
        let (attr, file) = fs.create(&who(), dir, &name, 0o644, libc::O_RDWR).unwrap();
        let mut bytes = vec![0; (i * i * 61) as usize];
        rng.fill(&mut bytes);
        // Every other page of some, so that they have many extents.
        let step = if i % 8 == 7 { 2 } else { 1 };
        for (page, piece) in bytes.chunks(4096).enumerate().step_by(step) {
            fs.write(&file, page as u64 * 4096, piece).unwrap();
        }
        if i % 5 == 0 {
            fs.setxattr(
                &who(),
                attr.ino,
                b"user.x",
                &vec![i as u8; i as usize * 300],
                0,
            )
            .unwrap();
        }
    }
    half
}

/// Reads everything that can be read, and counts what cannot; an unreadable directory hides
/// what is below it.
fn read_all(fs: &FileSystem) -> (Contents, usize) {
    let mut found = Contents::new();
    let mut errors = 0;
    let mut todo: Vec<(Vec<u8>, Ino)> = vec![(Vec::new(), ROOT)];
    while let Some((path, dir)) = todo.pop() {
        let mut names = Vec::new();
        let outcome = fs.readdir(dir, 0, &mut |entry| {
            names.push(entry.name.to_vec());
            true
        });
        errors += usize::from(outcome.is_err());
        for name in names {
            if name == b"." || name == b".." {
                continue;
            }
            let Ok(attr) = fs.lookup(dir, &name) else {
                errors += 1;
                continue;
            };
            let path = [&path[..], b"/", &name].concat();
            let content = match attr.mode & libc::S_IFMT {
                libc::S_IFDIR => {
                    todo.push((path.clone(), attr.ino));
                    Ok(Vec::new())
                }
                libc::S_IFLNK => fs.readlink(attr.ino),
                _ => read_file(fs, attr.ino, attr.size),
            };
            match content {
                Ok(content) => {
                    found.insert(path, content);
                }
                Err(_) => errors += 1,
            }
        }
    }
    (found, errors)
}

fn read_file(fs: &FileSystem, ino: Ino, size: u64) -> Result<Vec<u8>, fs::Error> {
    let file = fs.open_file(ino, libc::O_RDONLY)?;
    let mut bytes = vec![0; size as usize];
    let len = fs.read(&file, 0, &mut bytes)?;
    bytes.truncate(len);
    match fs.getxattr(ino, b"user.x") {
        Ok(value) => bytes.extend_from_slice(&value),
        Err(error) if error.errno() == libc::ENODATA => {}
        Err(error) => return Err(error),
    }
    Ok(bytes)
}

/// Changes all over the tree; any of them may fail, none may panic or hang.
fn change_all(fs: &FileSystem, rng: &mut Rng) -> usize {
    let mut failed = 0;
    let mut note = |outcome: Result<(), fs::Error>| failed += usize::from(outcome.is_err());
    let dir = |name: &[u8]| fs.lookup(ROOT, name).map(|a| a.ino);
    for i in 0..60 {
        let name = format!("name-{}", rng.below(1500)).into_bytes();
        let new = format!("new-{i}").into_bytes();
        let file = format!("file-{}", rng.below(40)).into_bytes();
        note(dir(b"big").and_then(|d| fs.unlink(&who(), d, &name)));
        note(dir(b"big").and_then(|d| {
            fs.mknod(&who(), d, &new, libc::S_IFREG | 0o600, 0)
                .map(|_| ())
        }));
        note(dir(b"files").and_then(|d| {
            let ino = fs.lookup(d, &file)?.ino;
            let open = fs.open_file(ino, libc::O_RDWR)?;
            fs.write(&open, rng.below(100_000), b"changed")?;
            fs.truncate(&who(), ino, rng.below(50_000))?;
            fs.setxattr(&who(), ino, b"user.y", &[1; 2000], 0)?;
            fs.fsync(&open, false)
        }));
        note(dir(b"files").and_then(|d| fs.rename(&who(), d, &file, ROOT, &new, 0)));
    }
    note(fs.sync());
    failed
}

/// Flips bits in places that hold something; returns how many bits at most.
fn rot(world: &World, used: &[Vec<u64>], rng: &mut Rng) -> usize {
    let places = rng.range(1, 4) as usize;
    for _ in 0..places {
        let device = rng.below(world.devices.len() as u64) as usize;
        let page = *rng.pick(&used[device]);
        let len = *rng.pick(&[1, 64, 4096]);
        let at = page * 4096 + rng.below(4096 / len) * len;
        world.devices[device].corrupt(at, len, rng);
    }
    places * 16
}

fn used_pages(world: &World) -> Vec<Vec<u64>> {
    let mut page = vec![0; 4096];
    let per_device = world.devices.iter().map(|device| {
        (0..(64 << 20) / 4096)
            .filter(|number| {
                device.peek(number * 4096, &mut page);
                page.iter().any(|b| *b != 0)
            })
            .collect()
    });
    per_device.collect()
}

fn differing(a: &[u8], b: &[u8]) -> usize {
    let bytes = a.iter().zip(b).filter(|(x, y)| x != y).count();
    bytes + a.len().abs_diff(b.len())
}

fn run(rounds: u64, clean: bool) {
    let world = World::new(2, 64 << 20, 9);
    let fs = world.open();
    let half = build(&fs);
    let (before, errors) = read_all(&fs);
    assert_eq!(errors, 0);
    match clean {
        true => fs.close().unwrap(),
        // The journal holds it all; nothing was checkpointed since mkfs.
        false => fs.sync().unwrap(),
    }
    let snapshots: Vec<Snapshot> = world.devices.iter().map(|d| d.snapshot()).collect();
    drop(fs);
    let used = used_pages(&world);
    let (mut refused, mut told, mut changed) = (0, 0, 0);
    for round in 0..rounds {
        let mut rng = Rng::new(round);
        for (device, snapshot) in world.devices.iter().zip(&snapshots) {
            device.restore(snapshot);
        }
        let bits = rot(&world, &used, &mut rng);
        let Ok(fs) = world.try_open() else {
            refused += 1;
            continue;
        };
        let (after, errors) = read_all(&fs);
        told += u64::from(errors > 0);
        // A damaged end of the journal may look like one that was never finished; all else
        // that is missing is reported.
        let due = if clean { &before } else { &half };
        assert!(
            errors > 0 || due.keys().all(|path| after.contains_key(path)),
            "round {round}: something is gone without a word"
        );
        for (path, content) in &after {
            let expected = before.get(path).unwrap_or_else(|| {
                panic!("round {round}: {} came from nowhere", path.escape_ascii())
            });
            let wrong = differing(expected, content);
            changed += usize::from(wrong > 0);
            assert!(
                wrong <= bits,
                "round {round}: {} has {wrong} wrong bytes after {bits} flipped bits",
                path.escape_ascii()
            );
        }
        change_all(&fs, &mut rng);
        // Whatever was latched meanwhile is reported here; the point is that it ends.
        drop(fs.close());
    }
    let tally = format!(
        "{rounds} rounds: {refused} refused, {told} with errors, {changed} files with flipped bits of data"
    );
    eprintln!("{tally}");
    let is_fair = match clean {
        true => told > 0 && refused <= rounds / 10,
        // What is not data is in the journal, and damage of that is refused.
        false => refused > 0 && refused <= rounds / 2,
    };
    assert!(is_fair && changed > 0, "{tally}");
}

fn rounds() -> u64 {
    let rounds = std::env::var("SHEAF_ROUNDS").ok();
    rounds.map_or(60, |n| n.parse().unwrap())
}

#[test]
fn bit_rot_after_a_clean_unmount_is_refused_or_contained() {
    run(rounds(), true);
}

#[test]
fn bit_rot_before_recovery_is_refused_or_contained() {
    run(rounds(), false);
}

/// It went unnoticed as long as nothing was asked of what a power cut had left.
#[test]
#[should_panic(expected = "something is gone without a word")]
fn a_journal_that_ends_where_it_is_damaged_is_found() {
    base::canary::plant(Some(Canary::SilentTruncation));
    run(60, false);
}
