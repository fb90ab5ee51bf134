//! Reads and writes of several parts of memory, and of more than there is.

use crate::create;
use crate::machine::World;
use base::rng::Rng;
use fs::{Caller, Error, FileSystem, OpenFile, ROOT};
use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, Ordering};

/// The largest file.
const SIZE_MAX: u64 = i64::MAX as u64;
/// More than passes through one piece of memory.
const MUCH: usize = 20 << 20;

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Rng::new(seed).fill(&mut bytes);
    bytes
}

/// Parts of odd lengths, some of them empty.
fn cut(bytes: &[u8]) -> Vec<IoSlice<'_>> {
    let mut parts = vec![IoSlice::new(&[])];
    let mut rest = bytes;
    for len in [1, 4095, 0, 1 << 20, 5, 9 << 20].into_iter().cycle() {
        let (here, behind) = rest.split_at(len.min(rest.len()));
        parts.push(IoSlice::new(here));
        rest = behind;
        if rest.is_empty() {
            return parts;
        }
    }
    parts
}

fn read_in_parts(fs: &FileSystem, file: &OpenFile, offset: u64, len: usize) -> Vec<u8> {
    let mut all = vec![0; len];
    let (first, rest) = all.split_at_mut(len / 3);
    let (second, third) = rest.split_at_mut(5);
    let mut parts = [first, second, &mut [], third].map(IoSliceMut::new);
    let read = fs.read_vectored(file, offset, &mut parts).unwrap();
    all.truncate(read);
    all
}

/// As many parts as writev(2) takes, of one buffer: 64 GiB, which were copied before anything was looked at.
#[test]
fn parts_that_are_more_than_memory_are_refused_or_written_as_far_as_it_goes() {
    let world = World::new(2, 64 << 20, 3);
    let fs = world.open();
    let buf = vec![1u8; 64 << 20];
    let parts = vec![IoSlice::new(&buf); 1024];
    let file = create(&fs, b"file", libc::O_RDWR);
    let beyond = fs.write_vectored(&file, SIZE_MAX, &parts);
    assert!(matches!(beyond, Err(Error::FileTooLarge)), "{beyond:?}");
    let reader = fs.open_file(file.ino(), libc::O_RDONLY).unwrap();
    let refused = fs.write_vectored(&reader, 0, &parts);
    assert!(matches!(refused, Err(Error::BadHandle)), "{refused:?}");
    // Up to the largest size.
    let short = fs.write_vectored(&file, SIZE_MAX - 10, &parts).unwrap();
    assert_eq!(short, 10);
    fs.truncate(&Caller::root(), file.ino(), 0).unwrap();
    // Until the array is full.
    for (name, flags) in [
        (&b"plain"[..], 0),
        (b"append", libc::O_APPEND),
        (b"direct", libc::O_DIRECT),
    ] {
        let file = create(&fs, name, libc::O_RDWR | flags);
        let mut size = 0;
        // What write-back was promised and has not taken is room again, a few times at most.
        let full = (0..4).find_map(|_| {
            let written = match fs.write_vectored(&file, size, &parts) {
                Ok(written) => written as u64,
                Err(full) => return Some(full),
            };
            size += written;
            assert_eq!(fs.getattr(file.ino()).unwrap().size, size);
            assert!((50 << 20..128 << 20).contains(&size), "{written} of {size}");
            None
        });
        assert!(matches!(full, Some(Error::NoSpace)), "{name:?}: {full:?}");
        drop(file);
        fs.unlink(&Caller::root(), ROOT, name).unwrap();
    }
    fs.close().unwrap();
    let closed = fs.write_vectored(&file, 0, &parts);
    assert!(matches!(closed, Err(Error::ReadOnly)), "{closed:?}");
    drop((file, reader, fs));
    world.check();
}

#[test]
fn much_in_parts_is_written_and_read_as_in_one() {
    let mut world = World::new(2, 128 << 20, 4);
    let fs = world.open();
    let mut expected = Vec::new();
    for (at, flags) in [0, libc::O_DIRECT, libc::O_APPEND, libc::O_DSYNC]
        .into_iter()
        .enumerate()
    {
        let file = create(&fs, format!("f{at}").as_bytes(), libc::O_RDWR | flags);
        let before = noise(at as u64, MUCH + 10_000);
        assert_eq!(
            fs.write_vectored(&file, 0, &cut(&before)).unwrap(),
            before.len()
        );
        // Over it, from anywhere and in whole pages.
        let mut all = before;
        for (offset, len) in [(4097, MUCH), (8192, MUCH / 4096 * 4096 + 4096)] {
            let new = noise(7 + offset, len);
            assert_eq!(fs.write_vectored(&file, offset, &cut(&new)).unwrap(), len);
            let offset = match flags {
                libc::O_APPEND => all.len(),
                _ => offset as usize,
            };
            all.resize(all.len().max(offset + len), 0);
            all[offset..offset + len].copy_from_slice(&new);
            if flags == libc::O_APPEND {
                break;
            }
        }
        assert!(
            read_in_parts(&fs, &file, 0, all.len() + 10) == all,
            "{flags:o}"
        );
        assert!(read_in_parts(&fs, &file, 5, MUCH) == all[5..5 + MUCH]);
        assert!(read_in_parts(&fs, &file, all.len() as u64 - 7, MUCH) == all[all.len() - 7..]);
        assert!(read_in_parts(&fs, &file, u64::MAX, MUCH).is_empty());
        fs.fsync(&file, false).unwrap();
        expected.push((file.ino(), all));
        drop(file);
        if at == 1 {
            // Two of them fit.
            let who = Caller::root();
            for (name, (ino, all)) in [b"f0", b"f1"].iter().zip(expected.drain(..)) {
                let file = fs.open_file(ino, libc::O_RDONLY).unwrap();
                assert!(read_in_parts(&fs, &file, 0, all.len()) == all);
                drop(file);
                fs.unlink(&who, ROOT, *name).unwrap();
            }
        }
    }
    let fs = world.remount(fs);
    for (ino, all) in expected {
        let file = fs.open_file(ino, libc::O_RDONLY | libc::O_DIRECT).unwrap();
        assert!(read_in_parts(&fs, &file, 0, all.len() + 10) == all);
    }
    fs.close().unwrap();
}

/// Each stamps all of the file's pages; who reads sees one stamp.
#[test]
fn much_in_parts_is_seen_whole_or_not_at_all() {
    let mut world = World::new(2, 64 << 20, 5);
    world.options = fs::FsOptions::default();
    let fs = world.open();
    let file = create(&fs, b"file", libc::O_RDWR);
    let stamped = |stamp: u8| vec![stamp; MUCH];
    fs.write_vectored(&file, 0, &cut(&stamped(1))).unwrap();
    let done = AtomicBool::new(false);
    base::thread::parallel(2, |thread| {
        if thread == 0 {
            for stamp in 2..8 {
                let bytes = stamped(stamp);
                assert_eq!(fs.write_vectored(&file, 0, &cut(&bytes)).unwrap(), MUCH);
            }
            done.store(true, Ordering::Relaxed);
            return;
        }
        for in_parts in [false, true].into_iter().cycle() {
            let mut all = vec![0; MUCH];
            match in_parts {
                true => all = read_in_parts(&fs, &file, 0, MUCH),
                false => assert_eq!(fs.read(&file, 0, &mut all).unwrap(), MUCH),
            }
            assert!(
                all.iter().all(|byte| *byte == all[0]),
                "torn, in parts: {in_parts}"
            );
            if done.load(Ordering::Relaxed) {
                break;
            }
        }
    });
    fs.close().unwrap();
}

/// It began again for as long as the file had grown meanwhile.
#[test]
fn a_read_in_parts_at_the_end_of_a_growing_file_ends() {
    let mut world = World::new(2, 128 << 20, 6);
    world.options = fs::FsOptions::default();
    let fs = world.open();
    let log = create(&fs, b"log", libc::O_RDWR);
    fs.append(&log, &[2; 512]).unwrap();
    let stop = AtomicBool::new(false);
    base::thread::parallel(2, |thread| {
        if thread == 0 {
            let most = 60 << 20;
            while !stop.load(Ordering::Relaxed) && fs.getattr(log.ino()).unwrap().size < most {
                fs.append(&log, &[2; 512]).unwrap();
            }
            return;
        }
        for _ in 0..300 {
            let size = fs.getattr(log.ino()).unwrap().size;
            let read = read_in_parts(&fs, &log, size / 512 * 512 - 512, 64 << 20);
            // All that there was at some moment.
            assert!(read.len() >= 512 && read.len().is_multiple_of(512));
        }
        stop.store(true, Ordering::Relaxed);
    });
    fs.close().unwrap();
}
