//! Requests that are handed over: contexts, callbacks and futures on a simulated array.
//!
//! A simulated device has a request in its hands until it is asked for what has ended, so a test decides what happens meanwhile.

mod cached;
mod crowds;
mod drivers;
mod machine;
mod syncs;
mod turns;
mod untold;
mod writing;

use base::rng::Rng;
use base::sync::{Condvar, Mutex, rank};
use cached::device_reads;
use device::{AlignedBuf, Array, BlockDevice, Operation, Topology, sim::SimDevice, sim::Times};
use fs::{Caller, Completion, Error, FileSystem, IoContext, OpenFile, ROOT, Request};
use machine::World;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

const PAGE: usize = 4096;
const DIRECT: i32 = libc::O_RDWR | libc::O_DIRECT;

fn world(seed: u64) -> World {
    World::new(2, 48 << 20, seed)
}

/// The same in either submission topology.
fn worlds(seed: u64) -> impl Iterator<Item = World> {
    let reached = move |topology| World {
        topology,
        ..world(seed)
    };
    Topology::ALL.into_iter().map(reached)
}

fn make(fs: &FileSystem, name: &[u8]) -> fs::Ino {
    let made = fs.create(&Caller::root(), ROOT, name, 0o644, libc::O_RDWR);
    made.unwrap().0.ino
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Rng::new(seed).fill(&mut bytes);
    bytes
}

/// A file with these bytes, of which nothing is cached.
fn cold(
    world: &mut World,
    fs: Arc<FileSystem>,
    name: &[u8],
    bytes: &[u8],
) -> (Arc<FileSystem>, fs::Ino) {
    let ino = make(&fs, name);
    let file = fs.open_file(ino, libc::O_RDWR).unwrap();
    assert_eq!(fs.write(&file, 0, bytes).unwrap(), bytes.len());
    drop(file);
    (world.remount(fs), ino)
}

fn read(file: &Arc<OpenFile>, offset: u64, len: usize) -> Request {
    Request::Read {
        file: Arc::clone(file),
        offset,
        buf: AlignedBuf::zeroed(len),
    }
}

fn submit(context: &mut IoContext, user: u64, request: Request) {
    let mut requests = vec![(user, request)];
    assert_eq!(context.submit(&mut requests), 1);
}

/// All that is in flight, by number.
fn finish(context: &mut IoContext) -> BTreeMap<u64, Completion> {
    let mut out = Vec::new();
    context.wait(usize::MAX, &mut out, None);
    assert_eq!(context.in_flight(), 0);
    let count = out.len();
    let by_number: BTreeMap<u64, Completion> = out.into_iter().map(|c| (c.user, c)).collect();
    assert_eq!(by_number.len(), count, "one was completed twice");
    by_number
}

#[test]
fn cached_pages_are_there_at_once_and_direct_reads_fly_in_batches() {
    for mut world in worlds(1) {
        let bytes = noise(1, 300 * PAGE);
        let fs = world.open();
        let (fs, ino) = cold(&mut world, fs, b"file", &bytes);
        let mut context = fs.io_context(64).unwrap();
        let direct = fs.open_file(ino, DIRECT).unwrap();
        let mut requests: Vec<(u64, Request)> = (0..300u64)
            .map(|i| (i, read(&direct, i * PAGE as u64, PAGE)))
            .collect();
        let before = device_reads(&fs);
        let (mut out, mut submitted) = (Vec::new(), 0);
        while submitted < 300 {
            let taken = context.submit(&mut requests);
            assert!(taken > 0 || context.in_flight() == 64);
            submitted += taken;
            context.wait(1, &mut out, None);
        }
        context.wait(usize::MAX, &mut out, None);
        assert_eq!(out.len(), 300);
        for completion in &out {
            let at = completion.user as usize * PAGE;
            assert_eq!(completion.result.as_ref().unwrap(), &PAGE);
            assert!(
                completion.buf[..] == bytes[at..at + PAGE],
                "page {}",
                completion.user
            );
        }
        assert_eq!(
            device_reads(&fs) - before,
            300,
            "each is one request of one device"
        );
        // Buffered ones bring the pages into the cache, by a thread; then no device and no wait is needed.
        let file = fs.open_file(ino, libc::O_RDONLY).unwrap();
        submit(&mut context, 1, read(&file, 5, 200 * PAGE));
        let loaded = &finish(&mut context)[&1];
        assert!(loaded.buf[..] == bytes[5..5 + 200 * PAGE]);
        let before = device_reads(&fs);
        submit(&mut context, 2, read(&file, 100, 3 * PAGE));
        submit(&mut context, 3, read(&direct, 0, PAGE));
        out.clear();
        assert_eq!(context.poll(&mut out), 2);
        assert!(out[0].buf[..] == bytes[100..100 + 3 * PAGE]);
        assert!(out[1].buf[..] == bytes[..PAGE]);
        assert_eq!(device_reads(&fs), before);
    }
}

/// Random reads and writes, each awaited, beside a plain model: ends of files, holes, bodies in the inode, logged tails,
/// unaligned places.
#[test]
fn requests_do_what_calls_do() {
    for seed in 0..30 {
        let mut rng = Rng::new(seed);
        let mut world = world(seed);
        world.topology = Topology::ALL[seed as usize % 2];
        let fs = world.open();
        let ino = make(&fs, b"file");
        let handles = [
            fs.open_file(ino, libc::O_RDWR).unwrap(),
            fs.open_file(ino, DIRECT).unwrap(),
        ];
        let mut context = fs.io_context(4).unwrap();
        let mut model: Vec<u8> = Vec::new();
        for step in 0..120 {
            let file = rng.pick(&handles);
            let mut place = |most: usize| match rng.one_in(2) {
                true => rng.below(most as u64 / PAGE as u64) as usize * PAGE,
                false => rng.below(most as u64) as usize,
            };
            let (offset, len) = (place(40 * PAGE), place(8 * PAGE).max(1));
            match rng.below(10) {
                0..=2 => {
                    let data = noise(seed * 1000 + step, len);
                    if model.len() < offset + len {
                        model.resize(offset + len, 0);
                    }
                    model[offset..offset + len].copy_from_slice(&data);
                    let request = Request::Write {
                        file: Arc::clone(file),
                        offset: offset as u64,
                        buf: AlignedBuf::from_slice(&data),
                    };
                    submit(&mut context, step, request);
                    assert_eq!(finish(&mut context)[&step].result.as_ref().unwrap(), &len);
                }
                3 => {
                    model.resize(offset, 0);
                    fs.truncate(&Caller::root(), ino, offset as u64).unwrap();
                }
                4 => {
                    let file = Arc::clone(file);
                    let data_only = rng.one_in(2);
                    submit(&mut context, step, Request::Fsync { file, data_only });
                    finish(&mut context)[&step].result.as_ref().unwrap();
                }
                5 => fs.sync().unwrap(),
                _ => {
                    submit(&mut context, step, read(file, offset as u64, len));
                    let done = finish(&mut context).remove(&step).unwrap();
                    let end = model.len().min(offset + len);
                    let expected = &model[offset.min(end)..end];
                    assert_eq!(
                        done.result.unwrap(),
                        expected.len(),
                        "seed {seed}, step {step}"
                    );
                    assert!(
                        done.buf[..expected.len()] == *expected,
                        "seed {seed}, step {step}"
                    );
                }
            }
        }
    }
}

/// The blocks that a read in flight reads are cut off, and hold another file's secrets when it lands.
#[test]
fn a_read_in_flight_never_brings_what_was_another_files() {
    for cut in [0u64, 700, 1999] {
        let mut world = World::new(2, 40 << 20, cut);
        let fs = world.open();
        let (fs, ino) = cold(&mut world, fs, b"file", &vec![1u8; 2000 * PAGE]);
        let file = fs.open_file(ino, DIRECT).unwrap();
        let mut context = fs.io_context(2048).unwrap();
        let mut requests: Vec<(u64, Request)> = (0..2000)
            .map(|i| (i, read(&file, i * PAGE as u64, PAGE)))
            .collect();
        assert_eq!(context.submit(&mut requests), 2000);
        fs.truncate(&Caller::root(), ino, cut * PAGE as u64)
            .unwrap();
        fs.sync().unwrap();
        // All space there is gets other bytes.
        let other = fs.open_file(make(&fs, b"other"), libc::O_RDWR).unwrap();
        let secret = vec![2u8; 256 * PAGE];
        let mut at = 0;
        while let Ok(written) = fs.write(&other, at, &secret)
            && written > 0
        {
            at += written as u64;
        }
        fs.sync().unwrap();
        for (page, done) in finish(&mut context) {
            let len = done.result.unwrap();
            assert_eq!(
                len,
                if page < cut { PAGE } else { 0 },
                "page {page} of {cut}"
            );
            assert!(
                done.buf.iter().all(|&b| b != 2),
                "page {page} of {cut} is another file's"
            );
            assert!(
                done.buf[..len].iter().all(|&b| b == 1),
                "page {page} of {cut}"
            );
        }
    }
}

type Between = Box<dyn FnOnce() + Send>;

/// A device that is slow with a page: somebody is let in when half of it has been read.
struct Tearing {
    below: Arc<SimDevice>,
    between: Mutex<Option<Between>>,
}

impl BlockDevice for Tearing {
    device::described_by!(below);
    fn run(&self, requests: &mut [device::Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        if let [request] = &mut *requests
            && let Operation::Read { offset, buf } = &mut request.operation
        {
            let between = self.between.lock().take();
            if let Some(between) = between {
                let (first, second) = buf.split_at_mut(PAGE / 2);
                let middle = *offset + first.len() as u64;
                self.below.read(*offset, first).unwrap();
                between();
                self.below.read(middle, second).unwrap();
                return;
            }
        }
        self.below.run(requests, meanwhile);
    }
    fn discard(&self, offset: u64, len: u64) -> std::io::Result<()> {
        self.below.discard(offset, len)
    }
}

#[test]
fn a_page_that_is_written_meanwhile_is_seen_whole() {
    let mut world = World::new(1, 96 << 20, 3);
    let fs = world.open();
    let (fs, ino) = cold(&mut world, fs, b"file", &vec![1u8; 64 * PAGE]);
    fs.close().unwrap();
    drop(fs);
    let device = Arc::new(Tearing {
        below: world.devices[0].reopen(),
        between: Mutex::new(rank::LEAF, None),
    });
    let devices = vec![Arc::clone(&device) as Arc<dyn BlockDevice>];
    let array = Arc::new(Array::assemble(devices, false).unwrap());
    let fs = FileSystem::open(array, world.options.clone()).unwrap();
    let file = fs.open_file(ino, DIRECT).unwrap();
    let mut context = fs.io_context(4).unwrap();
    let writer = Arc::clone(&fs);
    let between = move || {
        let file = writer.open_file(ino, libc::O_RDWR).unwrap();
        writer.write(&file, 5 * PAGE as u64, &[2; PAGE]).unwrap();
        writer.fsync(&file, false).unwrap();
        writer.sync().unwrap();
    };
    *device.between.lock() = Some(Box::new(between));
    submit(&mut context, 1, read(&file, 5 * PAGE as u64, PAGE));
    let done = finish(&mut context).remove(&1).unwrap();
    assert!(device.between.lock().is_none());
    assert_eq!(done.result.unwrap(), PAGE);
    assert!(done.buf.iter().all(|&b| b == 2));
}

#[test]
fn an_error_of_a_device_is_that_of_its_request() {
    let mut world = world(5);
    let fs = world.open();
    let bytes = noise(5, 256 * PAGE);
    let (fs, ino) = cold(&mut world, fs, b"file", &bytes);
    let file = fs.open_file(ino, DIRECT).unwrap();
    let mut context = fs.io_context(256).unwrap();
    world.devices[1].fail_reads(Times::Next(3), None);
    for i in 0..256u64 {
        submit(&mut context, i, read(&file, i * PAGE as u64, PAGE));
    }
    let mut failed = 0;
    for (page, done) in finish(&mut context) {
        match done.result {
            Ok(len) => {
                assert_eq!(len, PAGE);
                let at = page as usize * PAGE;
                assert!(done.buf[..] == bytes[at..at + PAGE]);
            }
            Err(error) => {
                assert_eq!(error.errno(), libc::EIO);
                failed += 1;
            }
        }
    }
    assert_eq!(failed, 3);
    // What cannot be done at all.
    let reader = fs.open_file(ino, libc::O_RDONLY).unwrap();
    let request = Request::Write {
        file: reader,
        offset: 0,
        buf: AlignedBuf::zeroed(PAGE),
    };
    submit(&mut context, 1, request);
    assert_eq!(
        finish(&mut context)[&1]
            .result
            .as_ref()
            .unwrap_err()
            .errno(),
        libc::EBADF
    );
}

#[test]
fn a_device_that_does_not_answer_holds_up_its_own_reads_alone() {
    let mut world = world(6);
    let fs = world.open();
    let bytes = noise(6, 256 * PAGE);
    let (fs, ino) = cold(&mut world, fs, b"file", &bytes);
    let file = fs.open_file(ino, DIRECT).unwrap();
    let mut context = fs.io_context(256).unwrap();
    world.devices[0].stick();
    for i in 0..256u64 {
        submit(&mut context, i, read(&file, i * PAGE as u64, PAGE));
    }
    let mut out = Vec::new();
    // Nothing more comes, and who has patience for a while only is not held up.
    context.wait(usize::MAX, &mut out, Some(Duration::from_millis(20)));
    let (landed, stuck) = (out.len(), context.in_flight());
    assert!(
        landed > 50 && stuck > 50 && landed + stuck == 256,
        "{landed} {stuck}"
    );
    // Others cut the file meanwhile: nobody waits for who has reads in flight.
    fs.truncate(&Caller::root(), ino, 300 * PAGE as u64)
        .unwrap();
    // One is given up, the others end when the device answers again.
    let done: Vec<u64> = out.iter().map(|c| c.user).collect();
    let gone = (0..256u64).find(|i| !done.contains(i)).unwrap();
    context.cancel(gone);
    out.clear();
    assert_eq!(context.wait(1, &mut out, None), 1);
    assert_eq!(out[0].user, gone);
    assert!(matches!(out[0].result, Err(Error::Cancelled)));
    world.devices[0].release();
    for (page, done) in finish(&mut context) {
        assert_eq!(done.result.unwrap(), PAGE);
        let at = page as usize * PAGE;
        assert!(done.buf[..] == bytes[at..at + PAGE]);
    }
    // A context goes while a device is stuck.
    world.devices[0].stick();
    for i in 0..256u64 {
        submit(&mut context, i, read(&file, i * PAGE as u64, PAGE));
    }
    drop(context);
    assert_eq!(Arc::strong_count(&file), 1);
    world.devices[0].release();
}

/// Its owner waits meanwhile, or does something else.
#[test]
fn a_handle_that_is_closed_gives_up_its_reads() {
    for waits in [true, false] {
        let mut world = world(7);
        let fs = world.open();
        let (fs, ino) = cold(&mut world, fs, b"file", &noise(7, 64 * PAGE));
        let [closed, other] = [0; 2].map(|_| fs.open_file(ino, DIRECT).unwrap());
        let mut context = fs.io_context(128).unwrap();
        world.devices.iter().for_each(|d| d.stick());
        for i in 0..32u64 {
            submit(&mut context, i, read(&closed, i * PAGE as u64, PAGE));
            submit(&mut context, 64 + i, read(&other, i * PAGE as u64, PAGE));
        }
        let closer = Arc::clone(&fs);
        let close = Arc::clone(&closed);
        let mut out = Vec::new();
        if waits {
            let closing = base::thread::spawn("closes", move || {
                // Whether before the wait or in it makes no difference.
                closer.close_file(close);
            });
            assert!(context.wait(32, &mut out, None) >= 32);
            closing.unwrap().join().unwrap();
        } else {
            closer.close_file(close);
            context.wait(32, &mut out, None);
        }
        assert_eq!((out.len(), context.in_flight()), (32, 32));
        for done in &out {
            assert!(done.user < 64, "another handle's");
            assert!(matches!(done.result, Err(Error::Cancelled)));
        }
        submit(&mut context, 200, read(&closed, 0, PAGE));
        out.clear();
        assert_eq!(context.poll(&mut out), 1);
        assert_eq!(out[0].result.as_ref().unwrap_err().errno(), libc::EBADF);
        world.devices.iter().for_each(|d| d.release());
        assert!(
            finish(&mut context)
                .values()
                .all(|done| done.result.is_ok())
        );
        assert_eq!(Arc::strong_count(&closed), 1);
    }
}

#[test]
fn appends_that_were_handed_over_tell_where_they_are() {
    for world in worlds(11) {
        let fs = world.open();
        let file = fs.open_file(make(&fs, b"log"), libc::O_RDWR).unwrap();
        let mut context = fs.io_context(100).unwrap();
        for i in 0..100u64 {
            let buf = AlignedBuf::from_slice(&vec![i as u8; 1 + i as usize * 37]);
            let file = Arc::clone(&file);
            submit(&mut context, i, Request::Append { file, buf });
        }
        let done = finish(&mut context);
        let mut places: Vec<(u64, u64, u64)> = done
            .iter()
            .map(|(number, done)| {
                let len = *done.result.as_ref().unwrap() as u64;
                assert_eq!(len, 1 + number * 37);
                (done.offset, len, *number)
            })
            .collect();
        places.sort_unstable();
        let (ours, bytes) = base::thread::parallel(1, |_| {
            let buf = AlignedBuf::from_slice(&[0xAB; 77]);
            let (buf, placed) = block_on(fs.append_future(&file, buf));
            (placed.unwrap(), buf.len())
        })[0];
        let mut end = 0;
        for (offset, len, number) in places {
            assert_eq!(offset, end);
            let mut bytes = vec![0; len as usize];
            fs.read(&file, offset, &mut bytes).unwrap();
            assert!(bytes.iter().all(|&b| b == number as u8));
            end += len;
        }
        assert_eq!((ours, bytes), ((end, 77), 77));
    }
}

#[test]
fn a_context_goes_on_in_another_thread() {
    for mut world in worlds(8) {
        let fs = world.open();
        let bytes = noise(8, 64 * PAGE);
        let (fs, ino) = cold(&mut world, fs, b"file", &bytes);
        let (send, receive) = mpsc::channel();
        let theirs = Arc::clone(&fs);
        let begun = base::thread::spawn("begins", move || {
            let file = theirs.open_file(ino, DIRECT).unwrap();
            let mut context = theirs.io_context(128).unwrap();
            for i in 0..64u64 {
                submit(&mut context, i, read(&file, i * PAGE as u64, PAGE));
                let request = Request::Write {
                    file: Arc::clone(&file),
                    offset: (100 + i) * PAGE as u64,
                    buf: AlignedBuf::from_slice(&[i as u8; PAGE]),
                };
                submit(&mut context, 100 + i, request);
            }
            send.send(context).unwrap();
        });
        let mut context = receive.recv().unwrap();
        begun.unwrap().join().unwrap();
        let done = finish(&mut context);
        assert_eq!(done.len(), 128);
        for (user, done) in done {
            assert_eq!(done.result.unwrap(), PAGE, "{user}");
            if user < 64 {
                let at = user as usize * PAGE;
                assert!(done.buf[..] == bytes[at..at + PAGE]);
            }
        }
        let file = fs.open_file(ino, libc::O_RDONLY).unwrap();
        let mut page = vec![0; PAGE];
        for i in 0..64u64 {
            fs.read(&file, (100 + i) * PAGE as u64, &mut page).unwrap();
            assert!(page.iter().all(|&b| b == i as u8));
        }
    }
}

#[test]
fn callbacks_may_submit_what_follows() {
    for world in worlds(9) {
        let fs = world.open();
        let file = fs.open_file(make(&fs, b"file"), libc::O_RDWR).unwrap();
        let mut context = fs.io_context(2).unwrap();
        let rounds = Arc::new(AtomicUsize::new(0));
        fn round(context: &mut IoContext, file: Arc<OpenFile>, rounds: Arc<AtomicUsize>, i: u64) {
            let request = Request::Write {
                file: Arc::clone(&file),
                offset: i * 100,
                buf: AlignedBuf::from_slice(&[i as u8; 100]),
            };
            let then = move |context: &mut IoContext, done: Completion| {
                assert_eq!(done.result.unwrap(), 100);
                let request = Request::Read {
                    file: Arc::clone(&file),
                    offset: i * 100,
                    buf: done.buf,
                };
                let then = move |context: &mut IoContext, done: Completion| {
                    assert_eq!(done.result.unwrap(), 100);
                    assert!(done.buf.iter().all(|&b| b == i as u8));
                    rounds.fetch_add(1, Ordering::SeqCst);
                    if i < 50 {
                        round(context, file, rounds, i + 1);
                    }
                };
                context.submit_with(request, then).unwrap();
            };
            context.submit_with(request, then).unwrap();
        }
        round(&mut context, Arc::clone(&file), Arc::clone(&rounds), 0);
        let mut out = Vec::new();
        assert_eq!(context.wait(usize::MAX, &mut out, None), 102);
        assert_eq!((out.len(), rounds.load(Ordering::SeqCst)), (0, 51));
        assert_eq!(Arc::strong_count(&file), 1);
        // A full context gives the request back.
        for i in 0..2 {
            submit(&mut context, i, read(&file, 0, 10));
        }
        let refused = context.submit_with(read(&file, 0, 77), |_, _| panic!("it was not taken"));
        let Request::Read { buf, .. } = *refused.unwrap_err() else {
            panic!("another request");
        };
        assert_eq!(buf.len(), 77);
    }
}

/// The last reference to an unlinked file goes with a request.
#[test]
fn a_file_that_only_a_request_holds_is_deleted_when_that_ends() {
    let mut world = world(10);
    let fs = world.open();
    let (fs, ino) = cold(&mut world, fs, b"file", &noise(10, 4 << 20));
    let free = |fs: &FileSystem| {
        fs.sync().unwrap();
        fs.statfs().blocks_free
    };
    let before = free(&fs);
    let mut context = fs.io_context(8).unwrap();
    submit(
        &mut context,
        1,
        read(&fs.open_file(ino, DIRECT).unwrap(), 0, PAGE),
    );
    fs.unlink(&Caller::root(), ROOT, b"file").unwrap();
    fs.forget(ino, u64::MAX);
    assert_eq!(finish(&mut context)[&1].result.as_ref().unwrap(), &PAGE);
    // A thread of the pool deletes it.
    let mut tries = 0;
    while free(&fs) < before + 1000 {
        tries += 1;
        assert!(tries < 1_000_000, "it is still there");
        base::thread::yield_now();
    }
}

/// Everything at once, with everything going wrong: nothing hangs, nothing is lost, nothing is held afterwards.
#[test]
fn nothing_leaks_and_nothing_hangs_whatever_fails() {
    let (mut good, mut bad, mut cancelled) = (0, 0, 0);
    for seed in 0..60 {
        let mut rng = Rng::new(seed);
        let mut world = world(seed);
        world.options.data.cache_bytes = 256 * PAGE;
        let fs = world.open();
        let (fs, ino) = cold(&mut world, fs, b"file", &noise(seed, 512 * PAGE));
        let handles = [
            fs.open_file(ino, libc::O_RDWR).unwrap(),
            fs.open_file(ino, DIRECT).unwrap(),
        ];
        let mut context = fs.io_context(1 + rng.below(64) as u32).unwrap();
        let (mut out, mut taken, mut ended) = (Vec::new(), 0u64, 0);
        for step in 0..400u64 {
            // What cannot fail for good, or takes a thread that nobody releases, is not stuck.
            let device = rng.pick(&world.devices);
            match rng.below(20) {
                0 => device.fail_reads(Times::Next(1), None),
                1 => {
                    let some = context.in_flight() as u64;
                    context.cancel(step.saturating_sub(rng.below(some + 1)));
                }
                2 => drop(fs.truncate(&Caller::root(), ino, rng.below(600) * PAGE as u64)),
                3..=6 => {
                    context.poll(&mut out);
                }
                7 if seed % 5 == 4 && step > 300 => world.switch.cut_now(),
                7 if seed % 5 == 3 && step > 350 => device.vanish_after(0),
                _ => {
                    let file = Arc::clone(rng.pick(&handles));
                    let offset = rng.below(600) * PAGE as u64;
                    let len = PAGE * (1 + rng.below(4) as usize);
                    let buf = AlignedBuf::zeroed(len);
                    let request = match rng.below(12) {
                        0 => Request::Write { file, offset, buf },
                        1 => Request::Fsync {
                            file,
                            data_only: true,
                        },
                        _ => Request::Read { file, offset, buf },
                    };
                    taken += context.submit(&mut vec![(step, request)]) as u64;
                }
            }
            for completion in out.drain(..) {
                ended += 1;
                match completion.result {
                    Ok(_) => good += 1,
                    Err(Error::Cancelled) => cancelled += 1,
                    Err(_) => bad += 1,
                }
            }
            assert_eq!(taken - ended, context.in_flight() as u64);
        }
        if seed % 2 == 0 {
            context.wait(usize::MAX, &mut out, None);
            assert_eq!(out.len() as u64, taken - ended);
        }
        drop(context);
        for file in &handles {
            assert_eq!(Arc::strong_count(file), 1, "seed {seed}");
        }
    }
    assert!(
        good > 3000 && bad > 50 && cancelled > 5,
        "{good} {bad} {cancelled}"
    );
}

/// Polls a future in the calling thread, which sleeps until it is woken.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Signal(Mutex<bool>, Condvar);
    impl Wake for Signal {
        fn wake(self: Arc<Self>) {
            *self.0.lock() = true;
            self.1.notify_one();
        }
    }
    let signal = Arc::new(Signal(Mutex::new(rank::LEAF, false), Condvar::new()));
    let waker = Waker::from(Arc::clone(&signal));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(done) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return done;
        }
        let mut woken = signal.0.lock();
        while !std::mem::take(&mut *woken) {
            signal.1.wait(&mut woken);
        }
    }
}

#[test]
fn futures_end_wherever_they_are_polled() {
    let mut world = world(11);
    let fs = world.open();
    let bytes = noise(11, 64 * PAGE);
    let (fs, ino) = cold(&mut world, fs, b"file", &bytes);
    let file = fs.open_file(ino, DIRECT).unwrap();
    block_on(async {
        let reads: Vec<_> = (0..64)
            .map(|i| fs.read_future(&file, i * PAGE as u64, AlignedBuf::zeroed(PAGE)))
            .collect();
        for (i, future) in reads.into_iter().enumerate() {
            let (buf, result) = future.await;
            assert_eq!(result.unwrap(), PAGE);
            assert!(buf[..] == bytes[i * PAGE..][..PAGE]);
        }
        let data = AlignedBuf::from_slice(&noise(12, PAGE));
        let (data, result) = fs.write_future(&file, 70 * PAGE as u64, data).await;
        assert_eq!(result.unwrap(), PAGE);
        fs.fsync_future(&file, false).await.1.unwrap();
        let (buf, result) = fs
            .read_future(&file, 70 * PAGE as u64, AlignedBuf::zeroed(PAGE))
            .await;
        assert_eq!(result.unwrap(), PAGE);
        assert!(buf[..] == data[..]);
    });
    // Several threads, each with its own executor; and futures that nobody waits for any more.
    base::thread::parallel(4, |thread| {
        for i in 0..200u64 {
            let page = (i * 7 + thread as u64) % 64;
            let mut future = fs.read_future(&file, page * PAGE as u64, AlignedBuf::zeroed(PAGE));
            if i % 3 == 0 {
                let polled = pin!(&mut future).poll(&mut Context::from_waker(Waker::noop()));
                assert!(polled.is_pending() || polled.is_ready());
                continue;
            }
            let (buf, result) = block_on(future);
            assert_eq!(result.unwrap(), PAGE);
            assert!(buf[..] == bytes[page as usize * PAGE..][..PAGE]);
        }
    });
    drop(file);
    fs.close().unwrap();
}

#[test]
fn futures_of_a_runtime_that_is_shut_down_leave_nothing_behind() {
    let mut world = world(13);
    let fs = world.open();
    let bytes = Arc::new(noise(13, 64 * PAGE));
    let (fs, ino) = cold(&mut world, fs, b"file", &bytes);
    let file = fs.open_file(ino, DIRECT).unwrap();
    let task = |i: u64| {
        let (fs, file, bytes) = (Arc::clone(&fs), Arc::clone(&file), Arc::clone(&bytes));
        async move {
            let page = i % 64;
            let future = fs.read_future(&file, page * PAGE as u64, AlignedBuf::zeroed(PAGE));
            let (buf, result) = future.await;
            assert_eq!(result.unwrap(), PAGE);
            assert!(buf[..] == bytes[page as usize * PAGE..][..PAGE]);
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .build()
        .unwrap();
    runtime.block_on(async {
        let tasks: Vec<_> = (0..200).map(|i| tokio::spawn(task(i))).collect();
        for task in tasks {
            task.await.unwrap();
        }
    });
    // A hundred in flight on a device that does not answer.
    world.devices.iter().for_each(|device| device.stick());
    for i in 0..100 {
        runtime.spawn(task(i));
    }
    runtime.block_on(async {
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
    });
    runtime.shutdown_background();
    world.devices.iter().for_each(|device| device.release());
    // The driver lets go of the file when the devices have done with its memory.
    let mut tries = 0;
    while Arc::strong_count(&file) > 1 {
        tries += 1;
        assert!(tries < 100_000_000, "somebody holds the file still");
        base::thread::yield_now();
    }
    drop(file);
    fs.close().unwrap();
    let left = Arc::into_inner(fs);
    assert!(left.is_some(), "somebody holds the file system still");
}

#[test]
fn a_waker_that_panics_harms_no_other_future() {
    struct Bad;
    impl Wake for Bad {
        fn wake(self: Arc<Self>) {
            panic!("what a waker of a test does");
        }
    }
    let mut world = world(14);
    let fs = world.open();
    let bytes = noise(14, 8 * PAGE);
    let (fs, ino) = cold(&mut world, fs, b"file", &bytes);
    let file = fs.open_file(ino, DIRECT).unwrap();
    for page in 0..4 {
        let at = page as u64 * PAGE as u64;
        let mut future = fs.read_future(&file, at, AlignedBuf::zeroed(PAGE));
        let waker = Waker::from(Arc::new(Bad));
        let polled = pin!(&mut future).poll(&mut Context::from_waker(&waker));
        assert!(polled.is_pending());
        let (buf, result) = block_on(fs.read_future(&file, 0, AlignedBuf::zeroed(PAGE)));
        assert_eq!(result.unwrap(), PAGE);
        assert!(buf[..] == bytes[..PAGE]);
        let (buf, result) = block_on(future);
        assert_eq!(result.unwrap(), PAGE);
        assert!(buf[..] == bytes[page * PAGE..][..PAGE]);
    }
    drop(file);
    fs.close().unwrap();
}

/// The thread that calls it is the one that closing waits for otherwise.
#[test]
fn a_waker_may_close_the_file_system() {
    struct Closing(Arc<FileSystem>, Mutex<mpsc::Sender<Result<(), Error>>>);
    impl Wake for Closing {
        fn wake(self: Arc<Self>) {
            let closed = self.0.close();
            self.1.lock().send(closed).unwrap();
        }
    }
    let mut world = world(15);
    let fs = world.open();
    let bytes = noise(15, 4 * PAGE);
    let (fs, ino) = cold(&mut world, fs, b"file", &bytes);
    let file = fs.open_file(ino, DIRECT).unwrap();
    let (sender, closed) = mpsc::channel();
    let waker = Waker::from(Arc::new(Closing(
        Arc::clone(&fs),
        Mutex::new(rank::LEAF, sender),
    )));
    let mut future = fs.read_future(&file, 0, AlignedBuf::zeroed(PAGE));
    let polled = pin!(&mut future).poll(&mut Context::from_waker(&waker));
    assert!(polled.is_pending());
    drop(waker);
    closed.recv().unwrap().unwrap();
    let (buf, result) = block_on(future);
    assert!(result.unwrap() == PAGE && buf[..] == bytes[..PAGE]);
    let late = block_on(fs.read_future(&file, 0, AlignedBuf::zeroed(PAGE)));
    assert!(matches!(late.1, Err(Error::Cancelled)));
    drop(file);
    fs.close().unwrap();
    drop(fs);
    world.check();
}

/// Another thread is at it, and waits for the one that the waker runs on.
#[test]
fn a_waker_does_not_wait_for_another_who_closes_the_file_system() {
    struct Closing(Arc<FileSystem>, AtomicBool);
    impl Wake for Closing {
        fn wake(self: Arc<Self>) {
            while !self.1.load(Ordering::SeqCst) {
                base::thread::yield_now();
            }
            // Time enough for the other one to begin.
            base::clock::nap(10_000_000);
            let closed = self.0.close();
            assert!(matches!(closed, Ok(()) | Err(Error::Busy)), "{closed:?}");
        }
    }
    let mut world = world(16);
    let fs = world.open();
    let bytes = noise(16, 4 * PAGE);
    let (fs, ino) = cold(&mut world, fs, b"file", &bytes);
    let file = fs.open_file(ino, DIRECT).unwrap();
    let closing = Arc::new(Closing(Arc::clone(&fs), AtomicBool::new(false)));
    let waker = Waker::from(Arc::clone(&closing));
    let mut future = fs.read_future(&file, 0, AlignedBuf::zeroed(PAGE));
    let polled = pin!(&mut future).poll(&mut Context::from_waker(&waker));
    assert!(polled.is_pending());
    closing.1.store(true, Ordering::SeqCst);
    fs.close().unwrap();
    assert!(block_on(future).1.is_ok());
    drop((file, waker, closing, fs));
    world.check();
}

#[test]
fn what_was_handed_over_is_there_when_the_file_system_is_closed() {
    for seed in 0..20 {
        let mut world = world(100 + seed);
        let fs = world.open();
        let ino = make(&fs, b"file");
        let bytes = noise(seed, 16 * PAGE);
        let file = fs.open_file(ino, libc::O_RDWR).unwrap();
        for (page, content) in (0..).zip(bytes.chunks(PAGE)) {
            let content = AlignedBuf::from_slice(content);
            let future = fs.write_future(&file, page * PAGE as u64, content);
            assert!(
                pin!(future)
                    .poll(&mut Context::from_waker(Waker::noop()))
                    .is_pending()
            );
        }
        // Nobody waits for them, and the last handle is theirs.
        let late = fs.fsync_future(&file, false);
        drop(file);
        fs.close().unwrap();
        let (_, result) = block_on(late);
        assert!(matches!(result, Err(Error::Cancelled)), "{result:?}");
        let fs = world.remount(fs);
        let file = fs.open_file(ino, libc::O_RDONLY).unwrap();
        let mut found = vec![0; bytes.len() + 1];
        assert_eq!(fs.read(&file, 0, &mut found).unwrap(), bytes.len());
        assert!(found[..bytes.len()] == bytes);
        drop(file);
        fs.close().unwrap();
    }
}

/// The files have the same number, so that each request would be done to the other one.
#[test]
fn requests_by_handles_of_another_file_system_are_refused() {
    let (fs, other) = (world(21).open(), world(22).open());
    let ino = make(&fs, b"file");
    assert_eq!(make(&other, b"file"), ino);
    let file = other.open_file(ino, DIRECT).unwrap();
    let write = |file| Request::Write {
        file,
        offset: 0,
        buf: AlignedBuf::zeroed(PAGE),
    };
    let append = Request::Append {
        file: Arc::clone(&file),
        buf: AlignedBuf::zeroed(PAGE),
    };
    let fsync = Request::Fsync {
        file: Arc::clone(&file),
        data_only: false,
    };
    let mut context = fs.io_context(8).unwrap();
    let requests = [
        read(&file, 0, PAGE),
        write(Arc::clone(&file)),
        append,
        fsync,
    ];
    for (user, request) in requests.into_iter().enumerate() {
        submit(&mut context, user as u64, request);
    }
    let done = finish(&mut context);
    assert_eq!(done.len(), 4);
    for completion in done.values() {
        assert!(matches!(completion.result, Err(Error::Invalid(_))));
    }
    let future = pin!(fs.write_future(&file, 0, AlignedBuf::zeroed(PAGE)));
    let (buf, result) = block_on(future);
    assert!(buf.len() == PAGE && matches!(result, Err(Error::Invalid(_))));
    for fs in [&fs, &other] {
        assert_eq!(fs.getattr(ino).unwrap().size, 0);
    }
    drop((context, file));
    fs.close().unwrap();
    other.close().unwrap();
}
