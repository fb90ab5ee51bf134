//! Writes that fail when nobody waits for them any more, and the end of a file system beside requests.

use crate::machine::World;
use device::AlignedBuf;
use device::sim::Times;
use fs::{Caller, FileSystem, FsOptions, OpenFile, ROOT, Request};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Waker};

const LOOKS: usize = 100_000;
const LEN: usize = 8192;

fn past(fs: &FileSystem, flags: i32) -> Arc<OpenFile> {
    let flags = libc::O_RDWR | flags;
    fs.create(&Caller::root(), ROOT, b"a", 0o644, flags)
        .unwrap()
        .1
}

/// Has a write fail by `write`, and returns what an fsync of another handle, and a sync, say then.
fn fails(write: impl FnOnce(&Arc<FileSystem>, &Arc<OpenFile>, AlignedBuf)) -> (bool, bool) {
    let world = World::new(2, 64 << 20, 11);
    let fs = world.open();
    let file = past(&fs, libc::O_DIRECT);
    fs.write(&file, 0, &vec![1; 1 << 20]).unwrap();
    fs.fsync(&file, false).unwrap();
    let other = fs.open_file(file.ino(), libc::O_RDWR).unwrap();
    let fail = |times| {
        for device in &world.devices {
            device.fail_writes(times, None);
        }
    };
    fail(Times::Always);
    write(&fs, &file, AlignedBuf::from_slice(&[7; LEN]));
    fail(Times::Next(0));
    // A thread that has the request may be about to say that it failed.
    let told = (0..LOOKS).any(|_| {
        base::thread::yield_now();
        fs.fsync(&other, false).is_err()
    });
    let told = (told, fs.sync().is_err());
    drop((file, other));
    fs.sync().unwrap();
    fs.close().unwrap();
    told
}

fn request(file: &Arc<OpenFile>, buf: AlignedBuf) -> Request {
    let file = Arc::clone(file);
    Request::Write {
        file,
        offset: 0,
        buf,
    }
}

#[test]
fn a_write_that_failed_and_nobody_waited_for_is_told_by_fsync_and_by_sync() {
    let told = fails(|fs, file, buf| {
        let mut context = fs.io_context(4).unwrap();
        assert_eq!(context.submit(&mut vec![(0, request(file, buf))]), 1);
    });
    assert_eq!(told, (true, true), "a context that is dropped");
    let told = fails(|fs, file, buf| {
        let mut context = fs.io_context(4).unwrap();
        let given = context.submit_with(request(file, buf), |_, _| ());
        given.unwrap();
    });
    assert_eq!(told, (true, true), "a callback that is not called");
    let told = fails(|fs, file, buf| {
        let mut future = Box::pin(fs.write_future(file, 0, buf));
        let first = future
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()));
        assert!(first.is_pending());
        drop(future);
        // The driver does one after the other.
        let next = fs.fsync_future(file, true);
        let mut next = std::pin::pin!(next);
        while next
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
            .is_pending()
        {
            base::thread::yield_now();
        }
    });
    assert!(told.1, "a future that is dropped");
}

/// The failure counted as told, and who opened the file later heard nothing of it.
#[test]
fn a_sync_that_failed_and_nobody_waited_for_has_told_nobody() {
    let by_future = |fs: &Arc<FileSystem>, file: &Arc<OpenFile>| {
        let mut future = Box::pin(fs.fsync_future(file, false));
        let mut task = Context::from_waker(Waker::noop());
        assert!(future.as_mut().poll(&mut task).is_pending());
    };
    let by_context = |fs: &Arc<FileSystem>, file: &Arc<OpenFile>| {
        let mut context = fs.io_context(4).unwrap();
        let (file, data_only) = (Arc::clone(file), false);
        let mut requests = vec![(0, Request::Fsync { file, data_only })];
        assert_eq!(context.submit(&mut requests), 1);
    };
    type Asks<'a> = &'a dyn Fn(&Arc<FileSystem>, &Arc<OpenFile>);
    for (name, asks) in [("future", &by_future as Asks<'_>), ("context", &by_context)] {
        let world = World::new(2, 64 << 20, 12);
        let fs = world.open();
        let file = past(&fs, libc::O_DIRECT);
        fs.write(&file, 0, &vec![1; 1 << 20]).unwrap();
        fs.fsync(&file, false).unwrap();
        let mut context = fs.io_context(4).unwrap();
        for device in &world.devices {
            device.fail_writes(Times::Always, None);
        }
        let write = request(&file, AlignedBuf::from_slice(&[7; LEN]));
        assert_eq!(context.submit(&mut vec![(0, write)]), 1);
        drop(context);
        for device in &world.devices {
            device.heal();
        }
        asks(&fs, &file);
        let ino = file.ino();
        while Arc::strong_count(&file) > 1 {
            base::thread::yield_now();
        }
        drop(file);
        let fresh = fs.open_file(ino, libc::O_RDWR).unwrap();
        // A thread may still be about to let the completion go.
        let told = (0..LOOKS).any(|_| {
            base::thread::yield_now();
            fs.fsync(&fresh, false).is_err()
        });
        assert!(told, "{name}");
    }
}

#[test]
fn whoever_is_told_by_a_completion_is_told_once() {
    let told = fails(|fs, file, buf| {
        let mut context = fs.io_context(4).unwrap();
        assert_eq!(context.submit(&mut vec![(0, request(file, buf))]), 1);
        let mut done = Vec::new();
        context.wait(1, &mut done, None);
        assert!(done[0].result.is_err());
    });
    assert_eq!(told, (false, false));
}

#[test]
fn a_file_system_ends_while_somebody_goes_on_handing_over_requests() {
    let mut world = World::new(2, 64 << 20, 5);
    world.options = FsOptions::default();
    let fs = world.open();
    let file = past(&fs, libc::O_DSYNC);
    let (begun, over) = (AtomicBool::new(false), AtomicBool::new(false));
    base::thread::parallel(2, |thread| {
        if thread == 0 {
            let (mut context, mut done) = (fs.io_context(64).unwrap(), Vec::new());
            while !over.load(Ordering::Relaxed) {
                let append = |_| {
                    let (file, buf) = (Arc::clone(&file), AlignedBuf::zeroed(100));
                    (0, Request::Append { file, buf })
                };
                let mut requests = (context.in_flight()..64).map(append).collect();
                assert!(context.submit(&mut requests) <= 64);
                context.wait(1, &mut done, None);
                done.clear();
                begun.store(true, Ordering::Relaxed);
            }
            return;
        }
        while !begun.load(Ordering::Relaxed) {
            base::thread::yield_now();
        }
        // Requests are refused, or part of it.
        fs.close().unwrap();
        over.store(true, Ordering::Relaxed);
    });
}

/// A device that has room for a part of it.
#[test]
fn what_of_a_write_found_no_room_and_nobody_waited_for_is_told() {
    let world = World::new(2, 36 << 20, 12);
    let fs = world.open();
    let caller = Caller::root();
    let file = fs
        .create(&caller, ROOT, b"a", 0o644, libc::O_RDWR)
        .unwrap()
        .1;
    fs.fsync(&file, false).unwrap();
    let free = fs.statfs().blocks_free;
    let buf = AlignedBuf::from_slice(&vec![7; free as usize * 4096 + (4 << 20)]);
    let len = buf.len();
    let mut context = fs.io_context(4).unwrap();
    assert_eq!(context.submit(&mut vec![(0, request(&file, buf))]), 1);
    drop(context);
    let size = fs.getattr(file.ino()).unwrap().size;
    assert!(size > 0 && size < len as u64, "{size} of {len}");
    assert!(
        fs.fsync(&file, false).is_err(),
        "{size} bytes of {len} are there, and nobody was told"
    );
}

/// Whoever opens the devices next would find them in use.
#[test]
fn a_future_of_a_write_that_failed_keeps_no_device_open() {
    let world = World::new(2, 64 << 20, 13);
    let fs = world.open();
    let file = past(&fs, libc::O_DIRECT);
    fs.write(&file, 0, &vec![1; 1 << 20]).unwrap();
    fs.fsync(&file, false).unwrap();
    let fail = |times| {
        for device in &world.devices {
            device.fail_writes(times, None);
        }
    };
    fail(Times::Always);
    let mut future = Box::pin(fs.write_future(&file, 0, AlignedBuf::from_slice(&[7; LEN])));
    let mut poll = || {
        let noop = &mut Context::from_waker(Waker::noop());
        future.as_mut().poll(noop)
    };
    assert!(poll().is_pending());
    // The request has it until it is done.
    while Arc::strong_count(&file) > 1 {
        base::thread::yield_now();
    }
    fail(Times::Next(0));
    drop(file);
    fs.close().unwrap();
    drop(fs);
    assert_eq!(Arc::strong_count(&world.devices[0]), 1);
    let std::task::Poll::Ready((_, result)) = poll() else {
        panic!("it is done");
    };
    assert!(result.is_err());
}
