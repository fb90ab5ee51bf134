//! Scrubbing a file system in use: nothing is found where nothing is wrong, however busy it is,
//! and what is wrong is found and nothing else.

#[path = "names/world.rs"]
mod world;

use base::rng::Rng;
use fs::scrub::{ScrubFinding, Severity};
use fs::{Caller, FileSystem, ROOT};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use world::{World, list};

fn create(fs: &FileSystem, name: &str, content: &[u8]) {
    let root = Caller::root();
    let (_, file) = fs
        .create(&root, ROOT, name.as_bytes(), 0o644, libc::O_RDWR)
        .unwrap();
    fs.write(&file, 0, content).unwrap();
}

/// Scrubs from a position to the end in steps of `bytes`; nodes and findings.
fn scrub(fs: &FileSystem, bytes: u64) -> (u64, Vec<ScrubFinding>) {
    let (mut position, mut nodes, mut findings) = (Some(0), 0, Vec::new());
    while let Some(at) = position {
        let step = fs.scrub(at, bytes).unwrap();
        assert!(step.next.is_none_or(|next| next > at));
        position = step.next;
        nodes += step.nodes;
        findings.extend(step.findings);
    }
    (nodes, findings)
}

#[test]
fn nothing_is_found_while_checkpoints_move_everything() {
    let mut world = World::new(2, 64 << 20, 1);
    world.options.store.background = true;
    world.options.store.clock = base::clock::Clock::real();
    world.options.store.checkpoint_interval = Duration::from_millis(2);
    world.options.store.commit_interval = Duration::from_millis(1);
    world.options.store.node_cache_bytes = 64 << 10;
    let fs = world.open();
    let writing = AtomicUsize::new(2);
    base::thread::parallel(3, |t| {
        if t == 2 {
            let mut passes = 0;
            while writing.load(Ordering::SeqCst) > 0 || passes < 3 {
                let (_, findings) = scrub(&fs, 64 << 10);
                assert_eq!(findings, [], "pass {passes}");
                passes += 1;
            }
            return;
        }
        let mut rng = Rng::new(t as u64);
        let root = Caller::root();
        let mut there = vec![false; 400];
        for _ in 0..3000 {
            let which = rng.below(400) as usize;
            let name = format!("t{t}-{which}");
            match there[which] {
                true => fs.unlink(&root, ROOT, name.as_bytes()).unwrap(),
                false => create(&fs, &name, &vec![t as u8; rng.below(3000) as usize + 1]),
            }
            there[which] = !there[which];
        }
        writing.fetch_sub(1, Ordering::SeqCst);
    });
    fs.sync().unwrap();
    world.switch.cut_now();
    drop(fs);
    world.restart(&mut Rng::new(1));
}

#[test]
fn a_scrub_goes_on_where_it_was_after_a_remount() {
    let mut world = World::new(2, 64 << 20, 2);
    let fs = world.open();
    for i in 0..3000 {
        create(&fs, &format!("f{i}"), b"something");
    }
    let fs = world.remount(fs);
    let (all, findings) = scrub(&fs, u64::MAX);
    assert!(all > 3000 && findings.is_empty());
    let mut fs = Some(fs);
    let (mut position, mut nodes, mut steps) = (Some(0), 0, 0);
    while let Some(at) = position {
        let step = fs.as_ref().unwrap().scrub(at, 1).unwrap();
        position = step.next;
        nodes += step.nodes;
        steps += 1;
        if steps % 5 == 0 {
            fs = fs.take().map(|fs| world.remount(fs));
        }
    }
    assert!(steps > 10, "{steps} steps");
    assert_eq!(nodes, all);
    let fs = fs.unwrap();
    assert_eq!(list(&fs, ROOT, 100).len(), 3000);
    fs.close().unwrap();
    world.check();
}

/// The record was not that of the checkpoint before the one that a mount for writing would have made first.
#[test]
fn nothing_is_found_in_a_mount_for_reading_after_a_crash() {
    let mut world = World::new(2, 64 << 20, 4);
    let fs = world.open();
    create(&fs, "f", b"something");
    fs.sync().unwrap();
    world.switch.cut_now();
    drop(fs);
    world.restart(&mut Rng::new(4));
    world.options = world.options.clone().read_only();
    let fs = world.open();
    let (_, findings) = scrub(&fs, u64::MAX);
    assert_eq!(findings, []);
    assert_eq!(list(&fs, ROOT, 100).len(), 1);
}

/// Where `pattern` lies on the devices.
fn places(world: &World, pattern: &[u8]) -> Vec<(usize, u64)> {
    let mut found = Vec::new();
    for (i, device) in world.devices.iter().enumerate() {
        let mut bytes = vec![0; 64 << 20];
        device.peek(0, &mut bytes);
        let hits = bytes.windows(pattern.len()).enumerate();
        let hits = hits.filter(|(_, window)| *window == pattern);
        found.extend(hits.map(|(at, _)| (i, at as u64)));
    }
    found
}

#[test]
fn damage_is_found_though_the_cache_is_good() {
    let mut world = World::new(2, 64 << 20, 3);
    let fs = world.open();
    let pattern = b"the content that will be damaged";
    for i in 0..500 {
        create(&fs, &format!("f{i}"), b"something");
    }
    create(&fs, "victim", pattern);
    let fs = world.remount(fs);
    // Now in memory, where it stays whole.
    let victim = fs.lookup(ROOT, b"victim").unwrap().ino;
    for (device, at) in places(&world, pattern) {
        world.devices[device].poke(at, b"THE");
    }
    world.devices[0].poke(10, b"no label");
    let (_, findings) = scrub(&fs, u64::MAX);
    let found: Vec<_> = findings.iter().map(|f| (f.severity, f.class)).collect();
    let expected = [(Severity::Notice, "label"), (Severity::Error, "node")];
    assert_eq!(found, expected, "{findings:?}");
    assert_eq!(findings[1].object, format!("node {victim}"));
    // Whoever looked for an inode of that number must know whether it is one.
    assert!(
        findings[1].what.ends_with("; it is the inode of a file"),
        "{findings:?}"
    );
    // A change writes the node anew, and the next checkpoint is sound.
    let file = fs.open_file(victim, libc::O_RDWR).unwrap();
    fs.write(&file, 0, b"new").unwrap();
    drop(file);
    fs.sync().unwrap();
    fs.store().checkpoint().unwrap();
    let (_, findings) = scrub(&fs, u64::MAX);
    assert!(findings.iter().all(|f| f.class == "label"), "{findings:?}");
    fs.close().unwrap();
    drop(fs);
    world.open().close().unwrap();
}
