//! Options of any value.

use crate::create;
use crate::machine::World;
use base::rng::Rng;
use device::AlignedBuf;
use fs::fsck::FsckOptions;
use fs::{Caller, FileSystem, FsOptions, ROOT};
use std::sync::Arc;
use std::time::Duration;

type Change = fn(&mut FsOptions);

const CASES: [(&str, Change); 25] = [
    ("nothing", |_| {}),
    ("memory 0", |o| *o = o.clone().with_memory(0)),
    ("memory 1", |o| *o = o.clone().with_memory(1)),
    ("memory max", |o| *o = o.clone().with_memory(usize::MAX)),
    ("cache 0", |o| o.data.cache_bytes = 0),
    ("cache 1", |o| o.data.cache_bytes = 1),
    ("cache max", |o| o.data.cache_bytes = usize::MAX),
    ("read-ahead 0", |o| o.data.read_ahead = 0),
    ("read-ahead max", |o| o.data.read_ahead = u64::MAX),
    ("ages 0", |o| ages(o, Duration::ZERO)),
    ("ages max", |o| ages(o, Duration::MAX)),
    ("nodes 0", |o| o.store.node_cache_bytes = 0),
    ("nodes max", |o| o.store.node_cache_bytes = usize::MAX),
    ("dirty 0", |o| o.store.dirty_bytes = Some(0)),
    ("dirty max", |o| o.store.dirty_bytes = Some(usize::MAX)),
    ("staging 0", |o| o.store.staging_bytes = 0),
    ("staging max", |o| o.store.staging_bytes = usize::MAX),
    ("workers 0", |o| o.store.workers = 0),
    ("workers max", |o| o.store.workers = usize::MAX),
    ("shards 0", |o| o.store.shards = 0),
    ("shards max", |o| o.store.shards = usize::MAX),
    ("intervals 0", |o| intervals(o, Duration::ZERO)),
    ("intervals max", |o| intervals(o, Duration::MAX)),
    ("commits max", |o| o.store.commit_interval = Duration::MAX),
    ("all of them", |o| {
        ages(o, Duration::MAX);
        intervals(o, Duration::MAX);
        (o.data.cache_bytes, o.data.read_ahead) = (usize::MAX, u64::MAX);
        o.store.node_cache_bytes = usize::MAX;
        (o.store.dirty_bytes, o.store.staging_bytes) = (Some(usize::MAX), usize::MAX);
        (o.store.workers, o.store.shards) = (usize::MAX, usize::MAX);
    }),
];

fn ages(options: &mut FsOptions, age: Duration) {
    let data = &mut options.data;
    (data.write_back_age, data.settle_age, data.mtime_persist) = (age, age, age);
}

fn intervals(options: &mut FsOptions, interval: Duration) {
    let store = &mut options.store;
    (store.commit_interval, store.checkpoint_interval) = (interval, interval);
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 50_000) as u8 + 1).collect()
}

/// Some of everything.
fn work(fs: &Arc<FileSystem>) {
    let (who, all) = (Caller::root(), pattern(2_000_000));
    let file = create(fs, b"file", libc::O_RDWR);
    for (part, bytes) in all.chunks(50_000).enumerate() {
        let written = fs.write(&file, part as u64 * 50_000, bytes);
        assert_eq!(written.unwrap(), bytes.len());
    }
    fs.fsync(&file, false).unwrap();
    // Written over, which leaves its times in memory.
    fs.write(&file, 5, &all[5..10]).unwrap();
    fs.fsync(&file, true).unwrap();
    let names: Vec<String> = (0..1000).map(|i| format!("n{i}")).collect();
    for made in fs.create_many(&who, ROOT, &names, 0o644) {
        made.unwrap();
    }
    let made = fs.transact(&who, |tx| {
        let ino = tx.create(ROOT, b"t", 0o644)?;
        tx.write(ino, 0, &all)?;
        Ok(ino)
    });
    made.unwrap();
    let mut atomic = fs.atomic_write(&who, &file).unwrap();
    atomic.write(100, &all[100..100_000]).unwrap();
    atomic.commit().unwrap();
    for gone in fs.unlink_many(&who, ROOT, &names) {
        gone.unwrap();
    }
    fs.tick().unwrap();
    fs.sync().unwrap();
    fs.checkpoint().unwrap();
    // In the journal alone.
    create(fs, b"last", libc::O_RDWR);
    fs.sync().unwrap();
}

fn look(fs: &Arc<FileSystem>) {
    let all = pattern(2_000_000);
    for name in [&b"file"[..], b"t"] {
        let ino = fs.lookup(ROOT, name).unwrap().ino;
        let file = fs.open_file(ino, libc::O_RDONLY).unwrap();
        let mut read = vec![0; all.len()];
        for (part, buf) in read.chunks_mut(100_000).enumerate() {
            let len = fs.read(&file, part as u64 * 100_000, buf).unwrap();
            assert_eq!(len, buf.len());
        }
        assert!(read == all);
        drop(fs.read_guards(&file, 0, u64::MAX).unwrap());
    }
    fs.lookup(ROOT, b"last").unwrap();
}

/// A file system that did not open panicked in the thread that said so, or in one of its own.
#[test]
fn every_value_of_an_option_opens_works_and_recovers() {
    for (what, change) in CASES {
        for threads in [false, true] {
            println!("{what}, with threads: {threads}");
            let mut world = World::new(2, 64 << 20, 3);
            if threads {
                world.options = FsOptions::default();
            }
            change(&mut world.options);
            let fs = world.open();
            work(&fs);
            look(&fs);
            world.switch.cut_now();
            drop(fs);
            let mut rng = Rng::new(3);
            world.devices = world.devices.iter().map(|d| d.restart(&mut rng)).collect();
            world.switch.restore();
            let fs = world.open();
            look(&fs);
            fs.close().unwrap();
            drop(fs);
            world.check();
        }
    }
}

#[test]
fn every_value_of_a_check_s_options_checks() {
    let world = World::new(2, 64 << 20, 3);
    let fs = world.open();
    work(&fs);
    fs.close().unwrap();
    drop(fs);
    for (cache_bytes, workers) in [(0, 0), (0, 3), (usize::MAX, 1), (usize::MAX, usize::MAX)] {
        let options = FsckOptions {
            cache_bytes,
            workers,
            ..FsckOptions::default()
        };
        world.check_by(&options);
    }
}

/// They were expected below the address space: others ended the program.
#[test]
fn buffers_that_no_memory_has_room_for_are_an_error() {
    let world = World::new(1, 64 << 20, 3);
    let fs = world.open();
    for depth in [0, 1, u32::MAX] {
        let mut context = fs.io_context(depth).unwrap();
        let (most, half) = (usize::MAX, usize::MAX / 2);
        for (len, count) in [
            (most, most),
            (most, 1),
            (1, most),
            (0, most),
            (half, 1),
            (1 << 50, 1),
        ] {
            assert!(context.buffers(len, count).is_err(), "{count} of {len}");
        }
        assert_eq!(
            context.buffers(most, 0).map(|all| all.len()).unwrap_or(0),
            0
        );
        let all: Vec<AlignedBuf> = context.buffers(4096, 3).unwrap();
        assert!(all.len() == 3 && all.iter().all(|buf| buf.len() == 4096));
        assert_eq!(context.buffers(0, 3).unwrap().len(), 3);
    }
}
