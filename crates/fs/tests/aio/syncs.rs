//! Syncs of one file that are in flight at once.

use super::*;
use fs::Value;
use std::sync::atomic::AtomicU64;

const PAGES: u64 = 64;

/// Calls that syncs took.
fn calls(fs: &FileSystem) -> u64 {
    let all = fs.metrics();
    let found = all.iter().find(|m| m.name == "sheaf_fsync_seconds");
    match found.expect("it is listed").value {
        Value::Summary(quantiles) => quantiles.count,
        ref other => panic!("{other:?}"),
    }
}

/// A file with blocks, all of them durable.
fn filled(fs: &Arc<FileSystem>, name: &[u8]) -> Arc<OpenFile> {
    let file = fs.open_file(make(fs, name), libc::O_RDWR).unwrap();
    fs.write(&file, 0, &noise(1, PAGES as usize * PAGE))
        .unwrap();
    fs.sync().unwrap();
    file
}

fn fsync(file: &Arc<OpenFile>, data_only: bool) -> Request {
    let file = Arc::clone(file);
    Request::Fsync { file, data_only }
}

/// The power goes, and comes back.
fn after_a_cut(world: &mut World, fs: Arc<FileSystem>, rng: &mut Rng) -> Arc<FileSystem> {
    world.switch.cut_now();
    drop(fs);
    world.switch.restore();
    world.devices = world.devices.iter().map(|d| d.restart(rng)).collect();
    world.check();
    world.open()
}

/// As many as there may be threads waited for each other at one file, and syncs of others for a thread.
#[test]
fn syncs_of_one_file_hold_up_no_other_and_share_calls() {
    const SYNCS: u64 = 300;
    for seed in 0..4 {
        let (mut world, mut rng) = (world(seed), Rng::new(seed));
        let fs = world.open();
        let (file, other) = (filled(&fs, b"file"), filled(&fs, b"other"));
        let before = calls(&fs);
        world.devices.iter().for_each(|device| device.stick());
        let mut context = fs.io_context(SYNCS as u32).unwrap();
        let mut written = BTreeMap::new();
        for n in 0..SYNCS {
            let page = n % PAGES;
            let data = noise(n, PAGE);
            fs.write(&file, page * PAGE as u64, &data).unwrap();
            written.insert(page, data);
            submit(&mut context, n, fsync(&file, seed % 2 == 0));
        }
        let mut others = fs.io_context(1).unwrap();
        submit(&mut others, 0, fsync(&other, false));
        let (mut out, mut early) = (Vec::new(), Vec::new());
        others.wait(1, &mut out, Some(Duration::from_secs(10)));
        context.poll(&mut early);
        world.devices.iter().for_each(|device| device.release());
        assert_eq!((out.len(), early.len()), (1, 0), "who waits for whom");
        out.remove(0).result.unwrap();
        for (n, done) in finish(&mut context) {
            assert_eq!(done.result.unwrap(), 0, "{n}");
        }
        let took = calls(&fs) - before;
        assert!(took < 10, "{took} calls");
        // All of it is durable.
        drop((context, others, file, other));
        let fs = after_a_cut(&mut world, fs, &mut rng);
        let ino = fs.lookup(ROOT, b"file").unwrap().ino;
        let file = fs.open_file(ino, libc::O_RDONLY).unwrap();
        for (page, data) in written {
            let mut seen = vec![0; PAGE];
            assert_eq!(fs.read(&file, page * PAGE as u64, &mut seen).unwrap(), PAGE);
            assert!(seen == data, "page {page}");
        }
    }
}

#[test]
fn each_of_those_that_shared_a_call_is_told_what_failed_since_its_handle_was_opened() {
    let world = world(7);
    let fs = world.open();
    let file = filled(&fs, b"file");
    let second = fs.open_file(file.ino(), libc::O_RDONLY).unwrap();
    let fail = |times| {
        for device in &world.devices {
            device.fail_writes(times, None);
        }
    };
    let mut context = fs.io_context(64).unwrap();
    fs.write(&file, 0, &noise(2, PAGE)).unwrap();
    fail(Times::Always);
    for n in 0..60 {
        let handle = [&file, &second][n as usize % 2];
        submit(&mut context, n, fsync(handle, true));
    }
    for (n, done) in finish(&mut context) {
        assert!(done.result.is_err(), "{n}");
    }
    fail(Times::Next(0));
    let third = fs.open_file(file.ino(), libc::O_RDWR).unwrap();
    fs.write(&third, 0, &noise(3, PAGE)).unwrap();
    for (n, handle) in [&file, &second, &third].into_iter().enumerate() {
        submit(&mut context, n as u64, fsync(handle, true));
    }
    let told: Vec<bool> = finish(&mut context)
        .into_values()
        .map(|done| done.result.is_ok())
        .collect();
    assert_eq!(told, [false, false, true]);
}

/// Threads that sync through contexts of their own, one file and many: what a sync was handed over for is durable when it is done.
#[test]
fn what_was_written_before_a_sync_is_durable_when_that_is_done() {
    for seed in 0..6 {
        let (mut world, mut rng) = (world(100 + seed), Rng::new(seed));
        let fs = world.open();
        let files: Vec<_> = (0..3u8).map(|n| filled(&fs, &[b'a' + n])).collect();
        let durable: Vec<_> = (0..files.len() as u64 * PAGES)
            .map(|_| AtomicU64::new(0))
            .collect();
        base::thread::parallel(4, |thread| {
            let mut rng = Rng::new(seed * 10 + thread as u64);
            let mut context = fs.io_context(16).unwrap();
            let (mut out, mut asked) = (Vec::new(), BTreeMap::new());
            for n in 1..200u64 {
                // A page of its own.
                let page = rng.below(PAGES / 4) * 4 + thread as u64;
                let at = rng.below(files.len() as u64) as usize;
                let data = noise(n, PAGE);
                fs.write(&files[at], page * PAGE as u64, &data).unwrap();
                asked.insert(n, (at as u64 * PAGES + page, n));
                while context.in_flight() == 16 {
                    context.wait(1, &mut out, None);
                }
                submit(&mut context, n, fsync(&files[at], rng.one_in(2)));
                context.poll(&mut out);
                for done in out.drain(..) {
                    done.result.unwrap();
                    let (slot, mark) = asked[&done.user];
                    durable[slot as usize].fetch_max(mark, Ordering::SeqCst);
                }
            }
            if seed % 2 == 0 {
                for (number, done) in finish(&mut context) {
                    done.result.unwrap();
                    let (slot, mark) = asked[&number];
                    durable[slot as usize].fetch_max(mark, Ordering::SeqCst);
                }
            }
        });
        drop(files);
        let fs = after_a_cut(&mut world, fs, &mut rng);
        for (slot, mark) in durable.iter().enumerate() {
            let (name, page) = (b'a' + (slot as u64 / PAGES) as u8, slot as u64 % PAGES);
            let ino = fs.lookup(ROOT, &[name]).unwrap().ino;
            let file = fs.open_file(ino, libc::O_RDONLY).unwrap();
            let mut seen = vec![0; PAGE];
            fs.read(&file, page * PAGE as u64, &mut seen).unwrap();
            let mark = mark.load(Ordering::SeqCst);
            let is_there = mark == 0 || (mark..200).any(|n| noise(n, PAGE) == seen);
            assert!(is_there, "slot {slot}: {mark} was durable");
        }
    }
}
