//! Reads through the cache: what is not there flies, and is there when it has landed; and what still takes threads.

use super::*;
use fs::Advice;

fn write(file: &Arc<OpenFile>, offset: u64, bytes: &[u8]) -> Request {
    Request::Write {
        file: Arc::clone(file),
        offset,
        buf: AlignedBuf::from_slice(bytes),
    }
}

/// Nothing of a file that is not dirty stays cached.
fn forget(fs: &FileSystem, file: &OpenFile) {
    fs.advise(file, 0, 0, Advice::DontNeed).unwrap();
}

fn all(fs: &FileSystem, file: &Arc<OpenFile>, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let len = fs.read(file, 0, &mut bytes).unwrap();
    bytes.truncate(len);
    bytes
}

fn is_all(bytes: &[u8], value: u8) -> bool {
    bytes.iter().all(|&b| b == value)
}

/// As many threads as requests a stuck device has would be needed.
#[test]
fn a_device_that_does_not_answer_holds_up_its_own_misses_alone() {
    let mut world = world(41);
    let fs = world.open();
    let bytes = noise(41, 256 * PAGE);
    let (fs, ino) = cold(&mut world, fs, b"file", &bytes);
    let file = fs.open_file(ino, libc::O_RDWR).unwrap();
    let mut context = fs.io_context(256).unwrap();
    world.devices[0].stick();
    // From the end, so that none goes on where another ended; within pages, and whole ones.
    for i in (0..256u64).rev() {
        let request = match i % 2 {
            0 => read(&file, i * PAGE as u64, PAGE),
            _ => read(&file, i * PAGE as u64 + 100, 1000),
        };
        submit(&mut context, i, request);
    }
    let mut out = Vec::new();
    context.wait(usize::MAX, &mut out, Some(Duration::from_millis(20)));
    let (landed, stuck) = (out.len(), context.in_flight());
    assert!(
        landed > 50 && stuck > 50 && landed + stuck == 256,
        "{landed} {stuck}"
    );
    // Nobody waits for who has them in flight, and what has landed is cached.
    for done in &out {
        let at = done.user as usize * PAGE;
        let mut page = vec![0; PAGE];
        assert_eq!(fs.read(&file, at as u64, &mut page).unwrap(), PAGE);
        assert!(page == bytes[at..at + PAGE], "page {}", done.user);
    }
    world.devices[0].release();
    for (i, done) in finish(&mut context) {
        let (at, len) = match i % 2 {
            0 => (i as usize * PAGE, PAGE),
            _ => (i as usize * PAGE + 100, 1000),
        };
        assert_eq!(done.result.unwrap(), len);
        assert_eq!(done.buf.len(), len);
        assert!(done.buf[..] == bytes[at..at + len], "page {i}");
    }
    let before = device_reads(&fs);
    assert!(all(&fs, &file, bytes.len()) == bytes);
    assert_eq!(device_reads(&fs), before, "all of it is cached");
}

/// Ends, holes, what is cached beside what is not, in requests of any length.
#[test]
fn what_is_missing_is_read_beside_what_is_there() {
    for seed in 0..20 {
        let mut rng = Rng::new(seed);
        let mut world = world(seed);
        let fs = world.open();
        let mut bytes = noise(seed, 40 * PAGE + rng.below(PAGE as u64) as usize);
        let (fs, ino) = cold(&mut world, fs, b"file", &bytes);
        let file = fs.open_file(ino, libc::O_RDWR).unwrap();
        let hole = rng.below(30);
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        fs.fallocate(&file, punch, hole * PAGE as u64, 5 * PAGE as u64)
            .unwrap();
        bytes[hole as usize * PAGE..][..5 * PAGE].fill(0);
        fs.sync().unwrap();
        let mut context = fs.io_context(16).unwrap();
        for _ in 0..10 {
            forget(&fs, &file);
            let mut expected = BTreeMap::new();
            for number in 0..16 {
                let offset = rng.below(42 * PAGE as u64) as usize;
                let offset = if rng.one_in(2) {
                    offset
                } else {
                    offset / PAGE * PAGE
                };
                let len = 1 + rng.below(9 * PAGE as u64) as usize;
                submit(&mut context, number, read(&file, offset as u64, len));
                let end = bytes.len().min(offset + len);
                expected.insert(number, offset.min(end)..end);
            }
            for (number, done) in finish(&mut context) {
                let expected = &bytes[expected[&number].clone()];
                assert_eq!(done.result.unwrap(), expected.len(), "seed {seed}");
                assert!(done.buf[..expected.len()] == *expected, "seed {seed}");
            }
            assert!(all(&fs, &file, bytes.len() + PAGE) == bytes, "seed {seed}");
        }
    }
}

/// The file is cut and grown again while its pages are read; what these blocks held is in no page that is cached then.
#[test]
fn what_was_cut_off_meanwhile_is_neither_read_nor_cached() {
    for cut in [0u64, 700, 1999] {
        let mut world = World::new(2, 40 << 20, cut);
        let fs = world.open();
        let (fs, ino) = cold(&mut world, fs, b"file", &vec![1u8; 2000 * PAGE]);
        let file = fs.open_file(ino, libc::O_RDWR).unwrap();
        let mut context = fs.io_context(2048).unwrap();
        let mut requests: Vec<(u64, Request)> = (0..2000)
            .rev()
            .map(|i| match i % 2 {
                0 => (i, read(&file, i * PAGE as u64, PAGE)),
                _ => (i, read(&file, i * PAGE as u64 + 1, PAGE - 1)),
            })
            .collect();
        assert_eq!(context.submit(&mut requests), 2000);
        let size = cut * PAGE as u64;
        fs.truncate(&Caller::root(), ino, size).unwrap();
        fs.truncate(&Caller::root(), ino, 2000 * PAGE as u64)
            .unwrap();
        for (page, done) in finish(&mut context) {
            done.result.unwrap();
            let value = u8::from(page < cut);
            assert!(is_all(&done.buf, value), "page {page} of {cut}");
        }
        let after = all(&fs, &file, 2000 * PAGE);
        assert!(is_all(&after[..size as usize], 1), "{cut}");
        assert!(is_all(&after[size as usize..], 0), "{cut}");
    }
}

/// What was written after the read began is what is cached when it has landed, though the page has left the cache meanwhile.
#[test]
fn what_was_written_meanwhile_stays() {
    for past in [false, true] {
        let mut world = world(43);
        let fs = world.open();
        let (fs, ino) = cold(&mut world, fs, b"file", &vec![1u8; 64 * PAGE]);
        let file = fs.open_file(ino, libc::O_RDWR).unwrap();
        let writer = fs
            .open_file(ino, if past { DIRECT } else { libc::O_RDWR })
            .unwrap();
        let mut context = fs.io_context(64).unwrap();
        for page in (0..64u64).rev() {
            submit(&mut context, page, read(&file, page * PAGE as u64 + 8, 64));
        }
        for page in (0..64).step_by(2) {
            fs.write(&writer, page * PAGE as u64, &[2; PAGE]).unwrap();
        }
        fs.write(&writer, 10 * PAGE as u64, &[3; 5 * PAGE]).unwrap();
        fs.sync().unwrap();
        forget(&fs, &file);
        let value = |page: usize| match page {
            10..15 => 3,
            page if page % 2 == 0 => 2,
            _ => 1,
        };
        for (page, done) in finish(&mut context) {
            assert_eq!(done.result.unwrap(), 64);
            let before = done.buf[0];
            assert!(is_all(&done.buf, before) && (before == 1 || before == value(page as usize)));
        }
        let after = all(&fs, &file, 64 * PAGE);
        for (page, bytes) in after.chunks(PAGE).enumerate() {
            assert!(is_all(bytes, value(page)), "page {page}, past {past}");
        }
    }
}

#[test]
fn an_error_is_its_requests_and_nothing_that_failed_is_cached() {
    let mut world = world(44);
    let fs = world.open();
    let bytes = noise(44, 256 * PAGE);
    let (fs, ino) = cold(&mut world, fs, b"file", &bytes);
    let file = fs.open_file(ino, libc::O_RDWR).unwrap();
    let mut context = fs.io_context(256).unwrap();
    world.devices[1].fail_reads(Times::Next(9), None);
    for i in (0..256u64).rev() {
        submit(&mut context, i, read(&file, i * PAGE as u64 + 7, 100));
    }
    let mut failed = 0;
    for (page, done) in finish(&mut context) {
        assert_eq!(done.buf.len(), 100, "the request's own");
        match done.result {
            Ok(len) => {
                assert_eq!(len, 100);
                assert!(done.buf[..] == bytes[page as usize * PAGE + 7..][..100]);
            }
            Err(error) => {
                assert_eq!(error.errno(), libc::EIO);
                failed += 1;
            }
        }
    }
    assert_eq!(failed, 9);
    assert!(all(&fs, &file, bytes.len()) == bytes);
}

/// Cancelled, given up with a handle, or with their context.
#[test]
fn misses_that_are_given_up_leave_nothing_behind() {
    let mut world = world(45);
    let fs = world.open();
    let bytes = noise(45, 64 * PAGE);
    let (fs, ino) = cold(&mut world, fs, b"file", &bytes);
    let [file, closed] = [0; 2].map(|_| fs.open_file(ino, libc::O_RDWR).unwrap());
    world.devices.iter().for_each(|d| d.stick());
    let mut context = fs.io_context(128).unwrap();
    for i in (0..32u64).rev() {
        submit(&mut context, i, read(&file, i * PAGE as u64 + 7, 100));
        submit(&mut context, 100 + i, read(&closed, i * PAGE as u64, PAGE));
    }
    (0..16).for_each(|i| context.cancel(i));
    fs.close_file(Arc::clone(&closed));
    let mut out = Vec::new();
    context.wait(48, &mut out, None);
    assert_eq!((out.len(), context.in_flight()), (48, 16));
    for done in &out {
        assert!(done.user < 16 || done.user >= 100);
        assert!(matches!(done.result, Err(Error::Cancelled)));
        assert_eq!(done.buf.len(), if done.user < 16 { 100 } else { PAGE });
    }
    out.clear();
    drop(context);
    assert_eq!(Arc::strong_count(&file), 1);
    assert_eq!(Arc::strong_count(&closed), 1);
    world.devices.iter().for_each(|d| d.release());
    assert!(all(&fs, &file, bytes.len()) == bytes);
}

/// Who goes through a file in order has it read ahead: in far fewer transfers than requests, however many are in flight.
#[test]
fn requests_in_order_are_read_ahead_of() {
    let mut world = world(46);
    world.options.data.cache_bytes = 16 << 20;
    let fs = world.open();
    let bytes = noise(46, 1024 * PAGE);
    let (fs, ino) = cold(&mut world, fs, b"file", &bytes);
    let file = fs.open_file(ino, libc::O_RDWR).unwrap();
    let before = device_reads(&fs);
    let mut context = fs.io_context(16).unwrap();
    for first in (0..1024u64).step_by(16) {
        for page in first..first + 16 {
            submit(&mut context, page, read(&file, page * PAGE as u64, PAGE));
        }
        for (page, done) in finish(&mut context) {
            assert_eq!(done.result.unwrap(), PAGE);
            assert!(done.buf[..] == bytes[page as usize * PAGE..][..PAGE]);
        }
    }
    let reads = device_reads(&fs) - before;
    assert!(reads < 200, "{reads}");
}

/// Two flights of one page are two reads, and one page.
#[test]
fn a_page_that_flies_twice_is_there_once() {
    let mut world = world(47);
    let fs = world.open();
    let bytes = noise(47, 8 * PAGE);
    let (fs, ino) = cold(&mut world, fs, b"file", &bytes);
    let file = fs.open_file(ino, libc::O_RDWR).unwrap();
    let mut context = fs.io_context(32).unwrap();
    for i in 0..32 {
        submit(&mut context, i, read(&file, 5 * PAGE as u64 + i, 64));
    }
    // A call that waits for a device reads it, too.
    assert!(all(&fs, &file, bytes.len()) == bytes);
    for (i, done) in finish(&mut context) {
        assert_eq!(done.result.unwrap(), 64);
        assert!(done.buf[..] == bytes[5 * PAGE + i as usize..][..64]);
    }
}

/// A device whose reads end when so many are at it together.
struct Gathering {
    below: Arc<SimDevice>,
    wanted: AtomicUsize,
    here: Mutex<usize>,
    all: Condvar,
}

impl BlockDevice for Gathering {
    device::described_by!(below);
    fn run(&self, requests: &mut [device::Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        let wanted = self.wanted.load(Ordering::SeqCst);
        let reads =
            |request: &device::Request<'_>| matches!(request.operation, Operation::Read { .. });
        if wanted > 0 && requests.iter().any(reads) {
            let mut here = self.here.lock();
            *here += 1;
            while *here < wanted {
                let late = self.all.wait_for(&mut here, Duration::from_secs(30));
                assert!(!late, "{} of {wanted} are at it", *here);
            }
            self.all.notify_all();
        }
        self.below.run(requests, meanwhile);
    }
    fn discard(&self, offset: u64, len: u64) -> std::io::Result<()> {
        self.below.discard(offset, len)
    }
}

#[test]
fn requests_that_wait_do_so_together() {
    let mut world = World::new(1, 96 << 20, 48);
    let mut fs = world.open();
    let mut inos = Vec::new();
    for file in 0..64 {
        let (again, ino) = cold(&mut world, fs, format!("{file}").as_bytes(), &[1; 4 * PAGE]);
        (fs, inos) = (again, [inos, vec![ino]].concat());
    }
    fs.close().unwrap();
    drop(fs);
    let device = Arc::new(Gathering {
        below: world.devices[0].reopen(),
        wanted: AtomicUsize::new(0),
        here: Mutex::new(rank::LEAF, 0),
        all: Condvar::new(),
    });
    let devices = vec![Arc::clone(&device) as Arc<dyn BlockDevice>];
    let array = Arc::new(Array::assemble(devices, false).unwrap());
    let fs = FileSystem::open(array, world.options.clone()).unwrap();
    let open = |ino: &fs::Ino| fs.open_file(*ino, libc::O_RDWR).unwrap();
    let files: Vec<_> = inos.iter().map(open).collect();
    let mut context = fs.io_context(64).unwrap();
    device.wanted.store(64, Ordering::SeqCst);
    // Each has to read the page that it changes a part of.
    for (number, file) in files.iter().enumerate() {
        submit(&mut context, number as u64, write(file, 5000, &[2; 100]));
    }
    for done in finish(&mut context).into_values() {
        assert_eq!(done.result.unwrap(), 100);
    }
    device.wanted.store(0, Ordering::SeqCst);
    for (number, file) in files.iter().enumerate() {
        let file = Arc::clone(file);
        let request = Request::Fsync {
            file,
            data_only: number % 2 == 0,
        };
        submit(&mut context, number as u64, request);
    }
    assert!(
        finish(&mut context)
            .into_values()
            .all(|done| done.result.is_ok())
    );
    for file in &files {
        let bytes = all(&fs, file, 4 * PAGE);
        assert!(is_all(&bytes[5000..5100], 2) && is_all(&bytes[5100..], 1));
    }
}

/// Transfers that devices were asked for.
pub fn device_reads(fs: &FileSystem) -> u64 {
    let stats = fs.store().array().stats();
    stats.devices.iter().map(|device| device.reads).sum()
}
