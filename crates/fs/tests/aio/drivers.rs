//! The driver of futures: that there is one, and none after the end.

use super::*;
use base::clock::Clock;
use base::thread::parallel;
use device::{Latency, LatencyDevice};
use fs::FsOptions;
use std::sync::Barrier;

/// Each thread made a driver, and all but one of these were left alone, with the file system open until they had ended by themselves: the next
/// who opened the devices found them in use.
#[test]
fn nothing_is_open_after_a_close_whoever_made_the_first_future() {
    for round in 0..200 {
        let world = world(round);
        let fs = world.open();
        let ino = make(&fs, b"file");
        let start = Barrier::new(8);
        parallel(8, |_| {
            let file = fs.open_file(ino, DIRECT).unwrap();
            start.wait();
            let (_, result) = block_on(fs.read_future(&file, 0, AlignedBuf::zeroed(PAGE)));
            assert_eq!(result.unwrap(), 0);
        });
        fs.close().unwrap();
        drop(fs);
        let users = Arc::strong_count(&world.devices[0]);
        assert_eq!(users, 1, "round {round}");
    }
}

#[test]
fn a_first_future_after_the_close_is_cancelled() {
    let world = world(1);
    let fs = world.open();
    let ino = make(&fs, b"file");
    let file = fs.open_file(ino, DIRECT).unwrap();
    fs.close().unwrap();
    let (_, result) = block_on(fs.read_future(&file, 0, AlignedBuf::zeroed(PAGE)));
    assert!(matches!(result, Err(Error::Cancelled)), "{result:?}");
    drop((file, fs));
    assert_eq!(Arc::strong_count(&world.devices[0]), 1);
}

#[test]
fn a_context_waits_as_long_as_a_duration_tells() {
    let mut world = world(2);
    let fs = world.open();
    let (fs, ino) = cold(&mut world, fs, b"file", &noise(2, 4 * PAGE));
    let file = fs.open_file(ino, DIRECT).unwrap();
    let mut context = fs.io_context(4).unwrap();
    // So long that their nanoseconds, as a number of 64 bits, are more than there are; of the second one they were none.
    let longer = Duration::from_nanos(u64::MAX) + Duration::from_nanos(1);
    for patience in [Duration::MAX, longer] {
        world.devices.iter().for_each(|device| device.stick());
        for page in 0..4 {
            submit(&mut context, page, read(&file, page * PAGE as u64, PAGE));
        }
        let devices = world.devices.clone();
        let release = move || devices.iter().for_each(|device| device.release());
        let other = base::thread::spawn("releases", release).unwrap();
        let mut out = Vec::new();
        assert_eq!(context.wait(4, &mut out, Some(patience)), 4);
        other.join().unwrap();
        assert!(out.iter().all(|done| done.result.is_ok()));
    }
}

/// Their own number was one that callers use, too.
#[test]
fn a_number_that_is_cancelled_means_no_request_with_a_callback() {
    let mut world = world(3);
    let fs = world.open();
    let (fs, ino) = cold(&mut world, fs, b"file", &noise(3, 64 * PAGE));
    let file = fs.open_file(ino, DIRECT).unwrap();
    let mut context = fs.io_context(64).unwrap();
    for device in &world.devices {
        device.stick();
    }
    let good = Arc::new(AtomicUsize::new(0));
    for page in 0..32 {
        let good = Arc::clone(&good);
        let then = move |_: &mut IoContext, done: Completion| {
            good.fetch_add(usize::from(done.result.is_ok()), Ordering::SeqCst);
        };
        let request = read(&file, page * PAGE as u64, PAGE);
        context.submit_with(request, then).unwrap();
    }
    submit(&mut context, 0, read(&file, 32 * PAGE as u64, PAGE));
    context.cancel(0);
    for device in &world.devices {
        device.release();
    }
    let done = finish(&mut context);
    assert!(matches!(done[&0].result, Err(Error::Cancelled)));
    assert_eq!(good.load(Ordering::SeqCst), 32);
}

/// Each took a place of the driver, for good; behind those that there are even what needs no device waited, and grew.
#[test]
fn reads_that_nobody_waits_for_any_more_keep_nobody_else_waiting() {
    let mut world = world(5);
    let fs = world.open();
    let (fs, ino) = cold(&mut world, fs, b"file", &noise(5, 64 * PAGE));
    let file = fs.open_file(ino, DIRECT).unwrap();
    world.devices.iter().for_each(|device| device.stick());
    let mut task = std::task::Context::from_waker(std::task::Waker::noop());
    for round in 0..3_000 {
        let offset = (round % 64) * PAGE as u64;
        let buf = AlignedBuf::zeroed(PAGE);
        let mut read = Box::pin(fs.read_future(&file, offset, buf));
        assert!(read.as_mut().poll(&mut task).is_pending());
    }
    let buf = AlignedBuf::zeroed(PAGE);
    let mut behind = Box::pin(fs.read_future(&file, 1 << 30, buf));
    let ends = (0..1_000_000).any(|_| {
        base::thread::yield_now();
        behind.as_mut().poll(&mut task).is_ready()
    });
    world.devices.iter().for_each(|device| device.release());
    assert!(ends, "a read behind the end of the file");
    let is_free = (0..1_000_000).any(|_| {
        base::thread::yield_now();
        Arc::strong_count(&file) == 1
    });
    assert!(is_free, "none has the file any more");
}

/// The driver slept until the end of what was in flight, where devices say when that is, whatever was sent to it.
#[test]
fn a_future_does_not_wait_for_the_end_of_another() {
    let mut world = world(4);
    world.options = FsOptions::default();
    let latency = Latency {
        service: Duration::ZERO,
        flush: Duration::ZERO,
        depth: 32,
    };
    let slow = |below: &Arc<SimDevice>| {
        Arc::new(LatencyDevice::new(below.clone(), latency, Clock::real()))
    };
    let devices: Vec<_> = world.devices.iter().map(slow).collect();
    let members = devices.iter().map(|device| device.clone() as _).collect();
    let array = Arc::new(Array::assemble(members, false).unwrap());
    let fs = FileSystem::open(array, world.options.clone()).unwrap();
    let file = fs.open_file(make(&fs, b"file"), DIRECT).unwrap();
    fs.write(&file, 0, &noise(4, PAGE)).unwrap();
    let set = |time| devices.iter().for_each(|device| device.set_service(time));
    set(Duration::from_secs(3));
    let transfers = || -> u64 { world.devices.iter().map(|device| device.io_count()).sum() };
    let before = transfers();
    let mut long = pin!(fs.read_future(&file, 0, AlignedBuf::zeroed(PAGE)));
    let mut look = || long.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(look().is_pending());
    // A device begins with the transfer, and then looks how long that shall take.
    while transfers() == before {
        base::thread::yield_now();
    }
    // There is nothing there.
    let (_, read) = block_on(fs.read_future(&file, 1 << 20, AlignedBuf::zeroed(PAGE)));
    assert_eq!(read.unwrap(), 0);
    assert!(look().is_pending(), "it came after the other one");
    set(Duration::ZERO);
    let (data, read) = block_on(long);
    assert_eq!(read.unwrap(), PAGE);
    assert!(data[..] == noise(4, PAGE));
    fs.close().unwrap();
}
