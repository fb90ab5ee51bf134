//! Writes in flight: direct ones over what the file has.

use super::*;

fn write(file: &Arc<OpenFile>, page: u64, bytes: &[u8]) -> Request {
    Request::Write {
        file: Arc::clone(file),
        offset: page * PAGE as u64,
        buf: AlignedBuf::from_slice(bytes),
    }
}

fn page(fs: &FileSystem, ino: fs::Ino, number: u64) -> Vec<u8> {
    let file = fs.open_file(ino, libc::O_RDONLY).unwrap();
    let mut bytes = vec![0; PAGE];
    let len = fs.read(&file, number * PAGE as u64, &mut bytes).unwrap();
    bytes.truncate(len);
    bytes
}

fn is_all(bytes: &[u8], value: u8) -> bool {
    bytes.len() == PAGE && bytes.iter().all(|&b| b == value)
}

/// Sixteen threads of the pool could not be at so many that a stuck device has.
#[test]
fn a_device_that_does_not_answer_holds_up_its_own_writes_alone() {
    let mut world = world(21);
    let fs = world.open();
    let (fs, ino) = cold(&mut world, fs, b"file", &noise(21, 256 * PAGE));
    let file = fs.open_file(ino, DIRECT).unwrap();
    let mut context = fs.io_context(256).unwrap();
    world.devices[0].stick();
    for i in 0..256u64 {
        submit(&mut context, i, write(&file, i, &[i as u8; PAGE]));
    }
    let mut out = Vec::new();
    context.wait(usize::MAX, &mut out, Some(Duration::from_millis(20)));
    let (landed, stuck) = (out.len(), context.in_flight());
    assert!(
        landed > 50 && stuck > 50 && landed + stuck == 256,
        "{landed} {stuck}"
    );
    // What has landed is there, and nobody else has to wait for the rest.
    for done in &out {
        assert_eq!(done.result.as_ref().unwrap(), &PAGE);
        let mut bytes = AlignedBuf::zeroed(PAGE);
        fs.read(&file, done.user * PAGE as u64, &mut bytes).unwrap();
        assert!(is_all(&bytes, done.user as u8));
    }
    world.devices[0].release();
    for done in finish(&mut context).into_values() {
        assert_eq!(done.result.unwrap(), PAGE);
    }
    fs.fsync(&file, true).unwrap();
    let fs = world.remount(fs);
    for i in 0..256 {
        assert!(is_all(&page(&fs, ino, i), i as u8), "page {i}");
    }
}

/// The owner of the writes does nothing more, and their blocks become another file's.
#[test]
fn who_cuts_a_file_waits_until_its_writes_have_landed() {
    for by_owner in [true, false] {
        let mut world = World::new(2, 40 << 20, 22);
        let fs = world.open();
        let (fs, ino) = cold(&mut world, fs, b"file", &vec![1u8; 1000 * PAGE]);
        let file = fs.open_file(ino, DIRECT).unwrap();
        let mut context = fs.io_context(1000).unwrap();
        let mut requests: Vec<_> = (0..1000)
            .map(|i| (i, write(&file, i, &[2; PAGE])))
            .collect();
        assert_eq!(context.submit(&mut requests), 1000);
        let others = Arc::clone(&fs);
        let cut = move || others.truncate(&Caller::root(), ino, 0).unwrap();
        match by_owner {
            true => cut(),
            false => base::thread::spawn("cuts", cut).unwrap().join().unwrap(),
        }
        fs.sync().unwrap();
        let other = fs.open_file(make(&fs, b"other"), libc::O_RDWR).unwrap();
        let (mut at, theirs) = (0, vec![3u8; 256 * PAGE]);
        while let Ok(written) = fs.write(&other, at, &theirs)
            && written > 0
        {
            at += written as u64;
        }
        fs.sync().unwrap();
        for done in finish(&mut context).into_values() {
            assert_eq!(done.result.unwrap(), PAGE);
        }
        let direct = fs.open_file(other.ino(), DIRECT).unwrap();
        let mut bytes = AlignedBuf::zeroed(256 * PAGE);
        let mut seen = 0;
        while seen < at {
            let len = fs.read(&direct, seen, &mut bytes).unwrap();
            assert!(bytes[..len].iter().all(|&b| b == 3), "beyond {seen}");
            seen += len as u64;
        }
    }
}

#[test]
fn what_overlaps_a_write_in_flight_comes_after_it() {
    let mut world = world(23);
    let fs = world.open();
    let (fs, ino) = cold(&mut world, fs, b"file", &vec![1u8; 64 * PAGE]);
    let direct = fs.open_file(ino, DIRECT).unwrap();
    let plain = fs.open_file(ino, libc::O_RDWR).unwrap();
    let mut context = fs.io_context(8).unwrap();
    for round in 0..30u8 {
        let at = u64::from(round % 7);
        submit(&mut context, 1, write(&direct, at + 1, &[100; 2 * PAGE]));
        submit(&mut context, 2, write(&direct, at + 3, &[101; PAGE]));
        let (file, pages) = match round % 3 {
            0 => (&plain, 1..2),
            1 => (&plain, 0..4),
            _ => (&direct, 2..4),
        };
        let data = vec![round; (pages.end - pages.start) as usize * PAGE];
        fs.write(file, (at + pages.start) * PAGE as u64, &data)
            .unwrap();
        assert_eq!(context.in_flight(), 2, "nobody is told yet");
        for number in 0..5 {
            let found = page(&fs, ino, at + number);
            let expected = match number {
                n if pages.contains(&n) => round,
                1 | 2 => 100,
                3 => 101,
                _ => found[0],
            };
            assert!(is_all(&found, expected), "round {round}, page {number}");
        }
        for done in finish(&mut context).into_values() {
            done.result.unwrap();
        }
        let found = page(&fs, ino, at + pages.start);
        assert!(is_all(&found, round), "round {round}");
    }
}

#[test]
fn a_write_in_flight_that_fails_says_so_and_takes_nothing_with_it() {
    let mut world = world(24);
    let fs = world.open();
    let (fs, ino) = cold(&mut world, fs, b"file", &vec![1u8; 64 * PAGE]);
    let direct = fs.open_file(ino, DIRECT).unwrap();
    let plain = fs.open_file(ino, libc::O_RDWR).unwrap();
    let mut context = fs.io_context(8).unwrap();
    // Only in memory yet.
    fs.write(&plain, 7 * PAGE as u64, &[9; PAGE]).unwrap();
    world
        .devices
        .iter()
        .for_each(|d| d.fail_writes(Times::Always, None));
    submit(&mut context, 7, write(&direct, 7, &[2; PAGE]));
    let failed = finish(&mut context).remove(&7).unwrap();
    assert_eq!(failed.result.unwrap_err().errno(), libc::EIO);
    assert_eq!(failed.buf.len(), PAGE);
    world.devices.iter().for_each(|d| d.heal());
    assert!(is_all(&page(&fs, ino, 7), 9));
    submit(&mut context, 8, write(&direct, 8, &[8; PAGE]));
    finish(&mut context).remove(&8).unwrap().result.unwrap();
    drop(plain);
    drop(direct);
    let fs = world.remount(fs);
    assert!(is_all(&page(&fs, ino, 7), 9));
    assert!(is_all(&page(&fs, ino, 8), 8));
}

/// What was in flight while a flush failed may be lost with it.
#[test]
fn a_flush_that_fails_meanwhile_fails_the_write() {
    let mut world = world(25);
    world.options.data.cache_bytes = 1024 * PAGE;
    let fs = world.open();
    let (fs, ino) = cold(&mut world, fs, b"file", &vec![1u8; 64 * PAGE]);
    let direct = fs.open_file(ino, DIRECT).unwrap();
    let other = fs.open_file(make(&fs, b"other"), libc::O_RDWR).unwrap();
    fs.write(&other, 0, &vec![1; 8 << 20]).unwrap();
    let mut context = fs.io_context(8).unwrap();
    submit(&mut context, 1, write(&direct, 1, &[2; PAGE]));
    world
        .devices
        .iter()
        .for_each(|d| d.fail_flushes(Times::Always));
    fs.fsync(&other, false).unwrap_err();
    world.devices.iter().for_each(|d| d.heal());
    finish(&mut context).remove(&1).unwrap().result.unwrap_err();
}

#[test]
fn a_context_that_goes_leaves_nothing_behind_that_others_wait_for() {
    let mut world = world(26);
    let fs = world.open();
    let (fs, ino) = cold(&mut world, fs, b"file", &vec![1u8; 64 * PAGE]);
    let direct = fs.open_file(ino, DIRECT).unwrap();
    let mut context = fs.io_context(64).unwrap();
    for i in 0..32 {
        submit(&mut context, i, write(&direct, i, &[2; PAGE]));
    }
    drop(context);
    assert_eq!(Arc::strong_count(&direct), 1);
    assert!((0..32).all(|i| is_all(&page(&fs, ino, i), 2)));
    fs.write(&direct, 0, &vec![3; 64 * PAGE]).unwrap();
    assert!((0..64).all(|i| is_all(&page(&fs, ino, i), 3)));
    // Closing waits for what is in flight.
    let mut context = fs.io_context(64).unwrap();
    for i in 0..64 {
        submit(&mut context, i, write(&direct, i, &[4; PAGE]));
    }
    fs.close().unwrap();
    world.devices = world.devices.iter().map(|d| d.reopen()).collect();
    world.check();
    let again = world.open();
    assert!((0..64).all(|i| is_all(&page(&again, ino, i), 4)));
    drop(context);
}

#[test]
fn reads_in_flight_beside_writes_elsewhere_are_read_once() {
    let mut world = world(27);
    // Sets of the cache are shared by many of the file's pages.
    world.options.data.cache_bytes = 64 * PAGE;
    let fs = world.open();
    let bytes = noise(27, 128 * PAGE);
    let (fs, ino) = cold(&mut world, fs, b"file", &bytes);
    let direct = fs.open_file(ino, DIRECT).unwrap();
    let mut context = fs.io_context(256).unwrap();
    let before = device_reads(&fs);
    for i in 0..64 {
        submit(&mut context, i, read(&direct, i * PAGE as u64, PAGE));
        submit(&mut context, 64 + i, write(&direct, 64 + i, &[7; PAGE]));
    }
    for (number, done) in finish(&mut context) {
        assert_eq!(done.result.unwrap(), PAGE);
        let at = number as usize * PAGE;
        assert!(number >= 64 || done.buf[..] == bytes[at..at + PAGE]);
    }
    assert_eq!(device_reads(&fs) - before, 64);
    // Where they overlap, all of a write is seen or nothing.
    for round in 0..50u8 {
        submit(&mut context, 0, write(&direct, 4, &[round; 4 * PAGE]));
        submit(&mut context, 1, read(&direct, 4 * PAGE as u64, 4 * PAGE));
        submit(&mut context, 2, read(&direct, 5 * PAGE as u64, 2 * PAGE));
        let done = finish(&mut context);
        for number in [1, 2] {
            let found = &done[&number].buf;
            assert!(
                found.chunks(PAGE).all(|page| page == &found[..PAGE]),
                "round {round}"
            );
        }
    }
}

/// What an owner has begun is started by who needs it to end, also in the middle of a call of the owner's own.
#[test]
fn a_callback_may_wait_for_what_the_same_call_has_begun() {
    let mut world = world(28);
    let fs = world.open();
    let (fs, ino) = cold(&mut world, fs, b"file", &vec![1u8; 64 * PAGE]);
    let direct = fs.open_file(ino, DIRECT).unwrap();
    let mut context = fs.io_context(8).unwrap();
    let (theirs, called) = (Arc::clone(&fs), Arc::new(AtomicUsize::new(0)));
    let counts = Arc::clone(&called);
    let then = move |_: &mut IoContext, done: Completion| {
        done.result.unwrap();
        theirs
            .truncate(&Caller::root(), ino, 3 * PAGE as u64)
            .unwrap();
        counts.fetch_add(1, Ordering::SeqCst);
    };
    context
        .submit_with(write(&direct, 0, &[2; PAGE]), then)
        .unwrap();
    let mut out = Vec::new();
    while called.load(Ordering::SeqCst) == 0 {
        let mut requests = vec![(1, write(&direct, 2, &[3; PAGE]))];
        context.submit_and_wait(&mut requests, 1, &mut out, None);
    }
    finish(&mut context);
    assert!(is_all(&page(&fs, ino, 2), 3));
    assert!(page(&fs, ino, 3).is_empty());
}

/// Overwrites through the cache that need nothing are done when they are handed over, while no device answers; and whoever else writes and reads the page
/// sees them in that order.
#[test]
fn overwrites_that_the_cache_takes_are_complete_at_once() {
    let mut world = world(24);
    let fs = world.open();
    let (fs, ino) = cold(&mut world, fs, b"file", &[1; 64 * PAGE]);
    let file = fs.open_file(ino, libc::O_RDWR).unwrap();
    // Half of the pages are cached.
    let mut bytes = vec![0; 32 * PAGE];
    fs.read(&file, 0, &mut bytes).unwrap();
    let mut context = fs.io_context(256).unwrap();
    for device in &world.devices {
        device.stick();
    }
    let part = |context: &mut IoContext, page: u64, bytes: &[u8]| {
        let request = Request::Write {
            file: Arc::clone(&file),
            offset: page * PAGE as u64 + 100,
            buf: AlignedBuf::from_slice(bytes),
        };
        submit(context, page, request);
    };
    // Whole pages, of which none has to be known, and parts of those that are.
    for number in 0..64 {
        submit(&mut context, number, write(&file, number, &[2; PAGE]));
    }
    (0..32).for_each(|number| part(&mut context, number, &[3; 100]));
    let mut out = Vec::new();
    assert_eq!(context.poll(&mut out), 96);
    assert!(out.iter().all(|done| done.result.is_ok()));
    let whole = [2; PAGE];
    let mut parted = whole;
    parted[100..200].fill(3);
    for number in 0..64 {
        let found = page(&fs, ino, number);
        let expected = match number < 32 {
            true => parted,
            false => whole,
        };
        assert!(found == expected, "page {number}");
    }
    // What makes the file longer, or is to be durable, is not.
    submit(&mut context, 64, write(&file, 64, &[4; PAGE]));
    let durable = fs.open_file(ino, libc::O_RDWR | libc::O_DSYNC).unwrap();
    submit(&mut context, 65, write(&durable, 0, &[5; PAGE]));
    for device in &world.devices {
        device.release();
    }
    let done = finish(&mut context);
    assert!(done.values().all(|done| done.result.is_ok()));
    drop((file, durable));
    let fs = world.remount(fs);
    assert!(is_all(&page(&fs, ino, 0), 5));
    assert!(page(&fs, ino, 1) == parted);
    assert!(is_all(&page(&fs, ino, 64), 4));
}

/// With the cache a quarter full of what has to go home, writes are for threads, which wait for room.
#[test]
fn overwrites_that_fill_the_cache_wait_for_room() {
    let mut world = world(25);
    let fs = world.open();
    let pages = 4096u64;
    let (fs, ino) = cold(&mut world, fs, b"file", &vec![1; pages as usize * PAGE]);
    let file = fs.open_file(ino, libc::O_RDWR).unwrap();
    let mut context = fs.io_context(256).unwrap();
    let mut out = Vec::new();
    for round in 0..4u8 {
        for number in 0..pages {
            let value = (number as u8) ^ round;
            submit(&mut context, number, write(&file, number, &[value; PAGE]));
            while context.in_flight() > 200 {
                context.wait(1, &mut out, None);
            }
        }
    }
    finish(&mut context);
    assert!(out.iter().all(|done| done.result.is_ok()));
    drop(file);
    let fs = world.remount(fs);
    // Two writes of one page that are in flight at once come in any order; these are rounds apart.
    for number in 0..pages {
        assert!(
            is_all(&page(&fs, ino, number), (number as u8) ^ 3),
            "{number}"
        );
    }
}
