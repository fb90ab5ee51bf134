//! Requests beside any number of others, and long runs of many threads and contexts in one file.

use super::*;
use base::clock::{Clock, now_ns};
use device::{Latency, LatencyDevice};
use fs::FsOptions;
use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;

fn slow(world: &World, service: Duration) -> Arc<FileSystem> {
    let latency = Latency {
        service,
        flush: service,
        depth: 32,
    };
    let device = |d: &Arc<SimDevice>| {
        let below = Arc::clone(d) as Arc<dyn BlockDevice>;
        Arc::new(LatencyDevice::new(below, latency, Clock::real())) as Arc<dyn BlockDevice>
    };
    let devices = world.devices.iter().map(device).collect();
    let array = Arc::new(Array::assemble(devices, false).unwrap());
    FileSystem::open(array, world.options.clone()).unwrap()
}

fn since(begin: u64) -> Duration {
    Duration::from_nanos(now_ns() - begin)
}

fn after(time: Duration) -> u64 {
    now_ns() + time.as_nanos() as u64
}

/// What nothing but time ends: when devices begin to fail.
fn rest(time: Duration) {
    base::clock::nap(time.as_nanos() as u64);
}

/// Begins `what`, on a file that is no other's, while more durable writes wait all the time than there may be threads, for 6 s at most.
fn beside_durable_writes<T: Send>(
    seed: u64,
    what: impl Fn(&Arc<FileSystem>, Arc<OpenFile>) -> T + Sync,
) -> T {
    let mut world = world(seed);
    world.options = FsOptions::default();
    let fs = slow(&world, Duration::from_millis(1));
    let durable = fs
        .open_file(make(&fs, b"durable"), DIRECT | libc::O_DSYNC)
        .unwrap();
    fs.write(&durable, 0, &noise(1, 512 * PAGE)).unwrap();
    let file = fs.open_file(make(&fs, b"log"), libc::O_RDWR).unwrap();
    let (begun, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let begin = now_ns();
    let mut done = base::thread::parallel(2, |thread| {
        if thread == 1 {
            while !begun.load(Ordering::SeqCst) {
                base::thread::yield_now();
            }
            let done = what(&fs, Arc::clone(&file));
            over.store(true, Ordering::SeqCst);
            return Some(done);
        }
        let (mut context, mut out) = (fs.io_context(2000).unwrap(), Vec::new());
        let mut at = 0;
        while !over.load(Ordering::SeqCst) && since(begin) < Duration::from_secs(6) {
            let write = |_| {
                at += 1;
                let request = Request::Write {
                    file: Arc::clone(&durable),
                    offset: at % 512 * PAGE as u64,
                    buf: AlignedBuf::zeroed(PAGE),
                };
                (at, request)
            };
            let mut requests = (context.in_flight()..2000).map(write).collect();
            assert!(context.submit(&mut requests) <= 2000);
            context.wait(1, &mut out, None);
            out.clear();
            begun.store(true, Ordering::SeqCst);
        }
        None
    });
    done.pop().flatten().unwrap()
}

fn append(file: Arc<OpenFile>) -> Request {
    let buf = AlignedBuf::zeroed(100);
    Request::Append { file, buf }
}

#[test]
fn appends_are_done_beside_any_number_of_durable_writes() {
    let done = beside_durable_writes(91, |fs, file| {
        let mut context = fs.io_context(1).unwrap();
        submit(&mut context, 0, append(file));
        context.wait(1, &mut Vec::new(), Some(Duration::from_secs(4)))
    });
    assert_eq!(done, 1, "the append was not done for 4 s");
}

/// Whoever closes it waits for what was handed over before, and not for what still is.
#[test]
fn a_file_system_ends_beside_any_number_of_durable_writes() {
    let took = beside_durable_writes(92, |fs, file| {
        let mut context = fs.io_context(1).unwrap();
        submit(&mut context, 0, append(file));
        let begin = now_ns();
        fs.close().unwrap();
        since(begin)
    });
    assert!(took < Duration::from_secs(4), "{took:?}");
}

const THREADS: usize = 4;
const OWN: u64 = 48;
const REGION: u64 = THREADS as u64 * OWN;

/// Devices fail: what was synced is there, and what is there was written.
static FAULTS: AtomicBool = AtomicBool::new(false);

fn faulty() -> bool {
    FAULTS.load(Ordering::SeqCst)
}

/// True: it went well.
fn went<T>(result: Result<T, Error>) -> bool {
    match result {
        Ok(_) => true,
        Err(error) => {
            assert!(faulty(), "{error}");
            false
        }
    }
}

struct Slot {
    issued: AtomicU64,
    done: AtomicU64,
    synced: AtomicU64,
    zeros: Mutex<BTreeSet<u64>>,
}

impl Default for Slot {
    fn default() -> Slot {
        let none = || AtomicU64::new(0);
        Slot {
            issued: none(),
            done: none(),
            synced: none(),
            zeros: Mutex::new(rank::LEAF, BTreeSet::new()),
        }
    }
}

fn content(page: u64, seq: u64) -> Vec<u8> {
    let mut bytes = vec![(seq as u8).wrapping_mul(31) ^ page as u8; PAGE];
    for (sector, bytes) in bytes.chunks_mut(512).enumerate() {
        bytes[..8].copy_from_slice(&(page | 0x5EEF << 48).to_le_bytes());
        bytes[8..16].copy_from_slice(&seq.to_le_bytes());
        bytes[16..24].copy_from_slice(&(sector as u64).to_le_bytes());
    }
    bytes
}

/// The number of the write that a sector is of; 0: zeros.
fn seq_of(page: u64, sector: usize, bytes: &[u8]) -> u64 {
    if bytes.iter().all(|&b| b == 0) {
        return 0;
    }
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let seq = word(8);
    let whole = &content(page, seq)[sector * 512..][..512];
    assert!(
        whole == bytes,
        "page {page} sector {sector} is nobody's: {:x} {} {}",
        word(0),
        word(8),
        word(16)
    );
    seq
}

impl Slot {
    fn may_be(&self, seq: u64, low: u64, high: u64) -> bool {
        match seq {
            0 => low == 0 || self.zeros.lock().range(low..=high).next().is_some(),
            _ => low <= seq && seq <= high,
        }
    }

    fn check(&self, what: &str, page: u64, bytes: &[u8], low: u64) {
        let first = seq_of(page, 0, &bytes[..512]);
        let low = match faulty() {
            true => low.min(self.synced.load(Ordering::SeqCst)),
            false => low,
        };
        for (sector, bytes) in bytes.chunks(512).enumerate() {
            let seq = seq_of(page, sector, bytes);
            let high = self.issued.load(Ordering::SeqCst);
            assert!(seq == first || faulty(), "{what}: page {page} is torn");
            assert!(
                self.may_be(seq, 0, high),
                "{what}: page {page} has {seq}, above {high}"
            );
        }
        if faulty() {
            return;
        }
        let high = self.issued.load(Ordering::SeqCst);
        assert!(
            self.may_be(first, low, high),
            "{what}: page {page} has {first}, not {low}..={high}"
        );
    }
}

fn lows(slots: &[Slot], first: u64, n: u64) -> Vec<u64> {
    let low = |page: u64| slots[page as usize].done.load(Ordering::SeqCst);
    (first..first + n).map(low).collect()
}

fn check_read(what: &str, slots: &[Slot], first: u64, bytes: &[u8], lows: &[u64]) {
    for (i, bytes) in bytes.chunks(PAGE).enumerate() {
        let page = first + i as u64;
        slots[page as usize].check(what, page, bytes, lows[i]);
    }
}

fn sync(fs: &FileSystem, file: &OpenFile, slots: &[Slot], data_only: bool) {
    let lows = lows(slots, 0, REGION);
    if !went(fs.fsync(file, data_only)) {
        return;
    }
    for (slot, low) in slots.iter().zip(lows) {
        slot.synced.fetch_max(low, Ordering::SeqCst);
    }
}

/// What each of the threads with pages of its own does however slow the machine is.
const TURNS: u32 = 300;

/// A thread that has pages of its own, and reads those of all.
fn owner(fs: &Arc<FileSystem>, ino: fs::Ino, slots: &[Slot], thread: u64, seed: u64, end: u64) {
    let mut rng = Rng::new(seed * 100 + thread);
    let open = |flags| fs.open_file(ino, flags).unwrap();
    let handles = [
        open(libc::O_RDWR),
        open(DIRECT),
        open(DIRECT | libc::O_DSYNC),
    ];
    let mut context = fs.io_context(1 + rng.below(32) as u32).unwrap();
    let (mut out, mut busy) = (Vec::new(), BTreeSet::new());
    // Of what is in flight: first page, pages, number or lows of a read.
    let mut flying: BTreeMap<u64, (u64, u64, Option<u64>, Vec<u64>)> = BTreeMap::new();
    let mut next = 1;
    let base = thread * OWN;
    let mut turns = 0;
    while turns < TURNS || now_ns() < end {
        turns += 1;
        let n = *rng.pick(&[1, 1, 1, 2, 3, 8]);
        let first = base + rng.below(OWN - n + 1);
        let pages = first..first + n;
        let is_free = pages.clone().all(|page| !busy.contains(&page));
        let file = rng.pick(&handles).clone();
        let offset = first * PAGE as u64;
        let begin = |next: &mut u64, zero: bool| {
            let seq = *next;
            *next += 1;
            for page in pages.clone() {
                let slot = &slots[page as usize];
                if zero {
                    slot.zeros.lock().insert(seq);
                }
                slot.issued.store(seq, Ordering::SeqCst);
            }
            seq
        };
        let end_of = |seq: u64| {
            for page in pages.clone() {
                slots[page as usize].done.store(seq, Ordering::SeqCst);
            }
        };
        let bytes_of = |seq: u64| {
            pages
                .clone()
                .flat_map(|page| content(page, seq))
                .collect::<Vec<u8>>()
        };
        match rng.below(20) {
            0..=3 if is_free => {
                let seq = begin(&mut next, false);
                let bytes = bytes_of(seq);
                let written = match rng.below(3) {
                    0 => {
                        let (a, b) = bytes.split_at(rng.below(bytes.len() as u64) as usize);
                        fs.write_vectored(
                            &file,
                            offset,
                            &[std::io::IoSlice::new(a), std::io::IoSlice::new(b)],
                        )
                    }
                    _ => fs.write(&file, offset, &AlignedBuf::from_slice(&bytes)),
                };
                if went(written.clone()) {
                    match written.unwrap() == bytes.len() {
                        true => end_of(seq),
                        false => assert!(faulty()),
                    }
                }
            }
            4 if is_free => {
                let seq = begin(&mut next, true);
                let mode = match rng.below(2) {
                    0 => libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                    _ => libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
                };
                if went(fs.fallocate(&file, mode, offset, n * PAGE as u64)) {
                    end_of(seq);
                }
            }
            5 if rng.one_in(3) => sync(fs, &file, slots, rng.one_in(2)),
            6 if rng.one_in(6) => drop(went(fs.sync())),
            6 => drop(went(fs.write_range(
                &file,
                offset,
                n * PAGE as u64,
                rng.one_in(2),
            ))),
            7 if rng.one_in(4) && !faulty() => fs.close_file(open(libc::O_RDWR)),
            8..=10 => {
                let first = rng.below(REGION - n + 1);
                let lows = lows(slots, first, n);
                let mut buf = AlignedBuf::zeroed((n * PAGE as u64) as usize);
                let len = fs.read(&file, first * PAGE as u64, &mut buf);
                if !went(len.clone()) {
                    continue;
                }
                assert_eq!(len.unwrap(), buf.len());
                check_read("call", slots, first, &buf, &lows);
            }
            11..=14 if is_free => {
                let seq = begin(&mut next, false);
                let request = Request::Write {
                    file,
                    offset,
                    buf: AlignedBuf::from_slice(&bytes_of(seq)),
                };
                let mut requests = vec![(seq, request)];
                while context.submit(&mut requests) == 0 && !requests.is_empty() {
                    context.wait(1, &mut out, None);
                }
                busy.extend(pages.clone());
                flying.insert(seq, (first, n, Some(seq), Vec::new()));
            }
            15..=18 => {
                let first = rng.below(REGION - n + 1);
                let seq = next;
                next += 1;
                let lows = lows(slots, first, n);
                let mut requests = vec![(
                    seq,
                    read(&file, first * PAGE as u64, (n * PAGE as u64) as usize),
                )];
                while context.submit(&mut requests) == 0 && !requests.is_empty() {
                    context.wait(1, &mut out, None);
                }
                flying.insert(seq, (first, n, None, lows));
            }
            _ => {
                let least = rng.below(2) as usize;
                context.wait(least, &mut out, Some(Duration::from_millis(2)));
            }
        }
        for done in out.drain(..) {
            let (first, n, write, lows) = flying.remove(&done.user).unwrap();
            let is_short = faulty()
                && write.is_some()
                && done
                    .result
                    .as_ref()
                    .is_ok_and(|len| *len < (n * PAGE as u64) as usize);
            if !went(done.result.clone()) || is_short {
                if write.is_some() {
                    busy.retain(|page| !(first..first + n).contains(page));
                }
                continue;
            }
            assert_eq!(
                done.result.unwrap(),
                (n * PAGE as u64) as usize,
                "{first} {n} {write:?}"
            );
            match write {
                Some(seq) => {
                    for page in first..first + n {
                        busy.remove(&page);
                        slots[page as usize].done.store(seq, Ordering::SeqCst);
                    }
                }
                None => check_read("request", slots, first, &done.buf, &lows),
            }
        }
        if rng.one_in(400) && !faulty() {
            // What it had is done, as far as anybody knows: none of it may be before what follows.
            let left: Vec<_> = flying.values().filter(|f| f.2.is_some()).cloned().collect();
            if rng.one_in(2) {
                context = fs.io_context(1 + rng.below(32) as u32).unwrap();
                flying.clear();
                busy.clear();
                out.clear();
                for (first, n, seq, _) in left {
                    for page in first..first + n {
                        slots[page as usize]
                            .done
                            .store(seq.unwrap(), Ordering::SeqCst);
                    }
                }
            }
        }
    }
    context.wait(usize::MAX, &mut out, None);
    for done in out {
        let (first, n, write, lows) = flying.remove(&done.user).unwrap();
        let is_short = faulty()
            && write.is_some()
            && (done.result.as_ref()).is_ok_and(|len| *len < (n * PAGE as u64) as usize);
        if !went(done.result.clone()) || is_short {
            continue;
        }
        assert_eq!(done.result.unwrap(), (n * PAGE as u64) as usize);
        match write {
            Some(seq) => (first..first + n)
                .for_each(|page| slots[page as usize].done.store(seq, Ordering::SeqCst)),
            None => check_read("request", slots, first, &done.buf, &lows),
        }
    }
}

/// What lies behind the region grows and is cut by one thread alone.
fn tail(fs: &Arc<FileSystem>, ino: fs::Ino, seed: u64, end: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed * 100 + 99);
    let open = |flags| fs.open_file(ino, flags).unwrap();
    let handles = [
        open(libc::O_RDWR),
        open(DIRECT),
        open(libc::O_RDWR | libc::O_APPEND),
    ];
    let base = REGION * PAGE as u64;
    let mut model: Vec<u8> = Vec::new();
    let mut context = fs.io_context(4).unwrap();
    while now_ns() < end {
        let file = rng.pick(&handles).clone();
        match rng.below(8) {
            0 if model.len() < 300 * PAGE => {
                let len = match rng.below(3) {
                    0 => rng.below(20_000) as usize + 1,
                    _ => PAGE * (1 + rng.below(8) as usize),
                };
                let bytes = noise(rng.next_u64(), len);
                let at = match rng.below(2) {
                    0 => fs.append(&file, &bytes).unwrap(),
                    _ => {
                        let buf = AlignedBuf::from_slice(&bytes);
                        submit(&mut context, 1, Request::Append { file, buf });
                        let done = finish(&mut context).remove(&1).unwrap();
                        (done.offset, done.result.unwrap())
                    }
                };
                assert_eq!(at, (base + model.len() as u64, len));
                model.extend(bytes);
            }
            1 => {
                let size = match rng.below(3) {
                    0 => rng.below(model.len() as u64 + 1) as usize,
                    1 => model.len() + rng.below(5 * PAGE as u64) as usize,
                    _ => model.len() / PAGE * PAGE,
                };
                if size > 400 * PAGE {
                    continue;
                }
                fs.truncate(&Caller::root(), ino, base + size as u64)
                    .unwrap();
                model.resize(size, 0);
            }
            2 if !model.is_empty() => {
                let at = rng.below(model.len() as u64) as usize / PAGE * PAGE;
                let len = PAGE * (1 + rng.below(3) as usize);
                let bytes = AlignedBuf::from_slice(&noise(rng.next_u64(), len));
                assert_eq!(
                    fs.write(&file.clone(), base + at as u64, &bytes)
                        .unwrap_or_default(),
                    len
                );
                if file.flags() & libc::O_APPEND != 0 {
                    model.extend(&bytes[..]);
                } else {
                    model.resize(model.len().max(at + len), 0);
                    model[at..at + len].copy_from_slice(&bytes);
                }
            }
            3 => fs.fsync(&file, rng.one_in(2)).unwrap(),
            _ => {
                let at = rng.below(model.len() as u64 + 1) as usize;
                let want = PAGE * (1 + rng.below(8) as usize);
                let mut buf = vec![0; want];
                let len = match rng.below(2) {
                    0 => fs.read(&file, base + at as u64, &mut buf).unwrap(),
                    _ => {
                        submit(&mut context, 1, read(&file, base + at as u64, want));
                        let done = finish(&mut context).remove(&1).unwrap();
                        buf.copy_from_slice(&done.buf);
                        done.result.unwrap()
                    }
                };
                assert_eq!(len, want.min(model.len() - at));
                assert!(
                    buf[..len] == model[at..at + len],
                    "behind the region, at {at}"
                );
            }
        }
    }
    model
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum On {
    Sim,
    Slow,
    Files,
    Faults,
    /// The file system is closed meanwhile.
    Closing,
    /// There is no room for all of it.
    Full,
}

fn on_files(
    world: &World,
    options: &device::OpenOptions,
) -> (Vec<std::path::PathBuf>, Arc<FileSystem>) {
    let mut paths = Vec::new();
    for (i, device) in world.devices.iter().enumerate() {
        let path = std::env::temp_dir().join(format!("sheaf-crowds-{}-{i}", std::process::id()));
        let bytes = device.info().bytes;
        drop(std::fs::remove_file(&path));
        device::create_image(&path, bytes).unwrap();
        let mut content = vec![0; bytes as usize];
        device.peek(0, &mut content);
        std::fs::write(&path, content).unwrap();
        paths.push(path);
    }
    let fs = open_files(&paths, options, world.options.clone());
    (paths, fs)
}

fn open_files(
    paths: &[std::path::PathBuf],
    options: &device::OpenOptions,
    fs: FsOptions,
) -> Arc<FileSystem> {
    let devices = device::open_devices(paths, options).unwrap();
    FileSystem::open(Arc::new(Array::assemble(devices, false).unwrap()), fs).unwrap()
}

/// Faults begin after up to so long, and not before something is synced.
fn before_faults(slots: &[Slot], rng: &mut Rng, most: Duration) {
    let is_synced = |slot: &Slot| slot.synced.load(Ordering::SeqCst) > 0;
    let patience = after(Duration::from_secs(20));
    while !slots.iter().any(is_synced) && now_ns() < patience {
        base::thread::yield_now();
    }
    rest(Duration::from_nanos(rng.below(most.as_nanos() as u64)));
    FAULTS.store(true, Ordering::SeqCst);
}

fn break_things(world: &World, slots: &[Slot], seed: u64, time: Duration, end: u64) {
    let mut rng = Rng::new(seed * 100 + 77);
    before_faults(slots, &mut rng, time / 2);
    let mut turns = 0;
    while now_ns() < end || turns < 20 {
        turns += 1;
        let device = rng.pick(&world.devices);
        match rng.below(12) {
            // Mostly not what makes the file system fail.
            0..=3 => {
                let bytes = device.info().bytes;
                let all = seed.is_multiple_of(4) && rng.one_in(4);
                device.fail_writes(Times::Next(1), Some(if all { 0 } else { bytes / 4 }..bytes));
            }
            4 => device.fail_reads(Times::Next(1), None),
            5 if seed.is_multiple_of(2) => device.fail_flushes(Times::Next(1)),
            _ => {}
        }
        rest(Duration::from_micros(rng.below(20_000)));
    }
    world.devices.iter().for_each(|device| device.heal());
}

fn stress(seed: u64, time: Duration, on: On) {
    let mut rng = Rng::new(seed);
    let count = 1 + rng.below(3) as usize;
    let mut world = World::new(count, (96 << 20) / count as u64, seed);
    world.options = FsOptions::default();
    world.options.data.cache_bytes = *rng.pick(&[64, 256, 4096]) * PAGE;
    if rng.one_in(2) {
        world.topology = Topology::PerDevice;
    }
    let slots: Vec<Slot> = (0..REGION).map(|_| Slot::default()).collect();
    let options = device::OpenOptions {
        topology: world.topology,
        direct: rng.one_in(2),
        ..device::OpenOptions::default()
    };
    let (paths, fs) = match on {
        On::Slow => (Vec::new(), slow(&world, Duration::from_micros(300))),
        On::Files => on_files(&world, &options),
        _ => (Vec::new(), world.open()),
    };
    FAULTS.store(false, Ordering::SeqCst);
    let ino = make(&fs, b"file");
    fs.truncate(&Caller::root(), ino, REGION * PAGE as u64)
        .unwrap();
    if rng.one_in(2) {
        fs.fallocate(
            &fs.open_file(ino, libc::O_RDWR).unwrap(),
            0,
            0,
            REGION / 2 * PAGE as u64,
        )
        .unwrap();
    }
    fs.sync().unwrap();
    if on == On::Full {
        let filler = fs.open_file(make(&fs, b"filler"), DIRECT).unwrap();
        let keep = rng.below(150);
        let room = fs.statfs().blocks_free.saturating_sub(keep) as usize;
        drop(fs.write(&filler, 0, &AlignedBuf::from_slice(&vec![1; room * PAGE])));
        FAULTS.store(true, Ordering::SeqCst);
    }
    let end = after(time);
    let mut tails = base::thread::parallel(THREADS + 1, |thread| match thread {
        THREADS if on == On::Faults => {
            break_things(&world, &slots, seed, time, end);
            Vec::new()
        }
        THREADS if on == On::Closing => {
            before_faults(&slots, &mut Rng::new(seed), time / 2);
            fs.close().unwrap();
            Vec::new()
        }
        THREADS if on == On::Full => Vec::new(),
        THREADS => tail(&fs, ino, seed, end),
        _ => {
            owner(&fs, ino, &slots, thread as u64, seed, end);
            Vec::new()
        }
    });
    let model = tails.pop().unwrap();
    let cut = on == On::Faults || (!matches!(on, On::Files | On::Closing) && rng.one_in(2));
    let fs = if cut {
        world.switch.cut_now();
        drop(fs);
        world.switch.restore();
        world.devices = world.devices.iter().map(|d| d.restart(&mut rng)).collect();
        world.check();
        world.open()
    } else {
        fs.close().unwrap();
        drop(fs);
        if on == On::Files {
            let devices = device::open_devices(&paths, &options).unwrap();
            let array = Arc::new(Array::assemble(devices, true).unwrap());
            let report = fs::fsck::fsck(array, &fs::fsck::FsckOptions::default(), &|_| {}).unwrap();
            assert!(report.is_sound(), "{:?}", report.findings);
            open_files(&paths, &options, world.options.clone())
        } else {
            world.devices = world.devices.iter().map(|d| d.reopen()).collect();
            world.check();
            world.open()
        }
    };
    let was_faulty = faulty();
    FAULTS.store(false, Ordering::SeqCst);
    let file = fs.open_file(ino, libc::O_RDWR).unwrap();
    let mut bytes = vec![0; REGION as usize * PAGE];
    assert_eq!(fs.read(&file, 0, &mut bytes).unwrap(), bytes.len());
    let (mut ops, mut synced) = (0, 0);
    for (page, bytes) in bytes.chunks(PAGE).enumerate() {
        let slot = &slots[page];
        let (done, issued) = (
            slot.done.load(Ordering::SeqCst),
            slot.issued.load(Ordering::SeqCst),
        );
        ops += done;
        if !cut && !was_faulty {
            slot.check("at the end", page as u64, bytes, done);
            continue;
        }
        let low = match cut {
            true => slot.synced.load(Ordering::SeqCst),
            false => done,
        };
        synced += low;
        for (sector, bytes) in bytes.chunks(512).enumerate() {
            let seq = seq_of(page as u64, sector, bytes);
            assert!(
                slot.may_be(seq, low, issued),
                "seed {seed}: page {page}.{sector} has {seq}, not {low}..={done}, {issued}"
            );
        }
    }
    if !cut && !was_faulty {
        let mut found = vec![0; model.len() + 1];
        assert_eq!(
            fs.read(&file, REGION * PAGE as u64, &mut found).unwrap(),
            model.len()
        );
        assert!(
            found[..model.len()] == model,
            "behind the region, at the end"
        );
    }
    drop(file);
    fs.close().unwrap();
    for path in paths {
        std::fs::remove_file(path).unwrap();
    }
    println!("seed {seed} {on:?}: {ops}, {synced} synced, cut {cut}, {was_faulty}");
    assert!(ops > 0, "seed {seed} {on:?}: nothing was done");
    assert!(
        synced > 0 || !cut,
        "seed {seed} {on:?}: nothing was synced before the cut"
    );
}

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{name}: {text:?} is no number")),
        Err(_) => default,
    }
}

impl On {
    const ALL: [(&str, On); 6] = [
        ("sim", On::Sim),
        ("slow", On::Slow),
        ("files", On::Files),
        ("faults", On::Faults),
        ("closing", On::Closing),
        ("full", On::Full),
    ];
}

/// What it runs on, by `SHEAF_ON`, or everything; the first seed, by `SHEAF_SEED`; for how many seconds at least, by `SHEAF_STRESS`.
/// With the seed that is usual the power is cut in one of the two runs of `sim`, and of `slow`, and not in the other.
fn chosen() -> (Vec<On>, u64, u64) {
    let only = std::env::var("SHEAF_ON").ok();
    let is_chosen = |name: &str| only.as_deref().is_none_or(|only| only == name);
    let these = On::ALL.into_iter().filter(|(name, _)| is_chosen(name));
    let these: Vec<On> = these.map(|(_, on)| on).collect();
    assert!(!these.is_empty(), "SHEAF_ON: there is no {only:?}");
    (these, number("SHEAF_SEED", 8), number("SHEAF_STRESS", 0))
}

/// Each mode ran only for who asked for it by name.
#[test]
fn many_threads_and_contexts_in_one_file() {
    let (modes, first, seconds) = chosen();
    let end = after(Duration::from_secs(seconds));
    let time = match seconds {
        0 => Duration::from_millis(300),
        _ => Duration::from_millis(1500),
    };
    for (run, on) in modes.iter().cycle().enumerate() {
        if run >= modes.len() + 2 && now_ns() >= end {
            break;
        }
        stress(first + run as u64, time, *on);
    }
}

/// Content that tells whose it is.
fn marked(id: u64, page: u64) -> Vec<u8> {
    let mut bytes = vec![id as u8 | 1; PAGE];
    for bytes in bytes.chunks_mut(512) {
        bytes[..8].copy_from_slice(&id.to_le_bytes());
        bytes[8..16].copy_from_slice(&page.to_le_bytes());
    }
    bytes
}

fn check_marked(id: u64, first: u64, bytes: &[u8]) {
    for (i, bytes) in bytes.chunks(PAGE).enumerate() {
        let own = marked(id, first + i as u64);
        let is_own = bytes == &own[..bytes.len()];
        let none = bytes.iter().all(|&b| b == 0);
        assert!(
            is_own || none,
            "file {id} page {} is another's",
            first + i as u64
        );
    }
}

fn come_and_go(fs: &Arc<FileSystem>, thread: u64, seed: u64, end: u64) {
    let mut rng = Rng::new(seed * 100 + thread);
    let mut context = fs.io_context(64).unwrap();
    let (mut out, mut reads) = (Vec::new(), BTreeMap::new());
    let mut number = 0;
    let mut round = 0;
    while now_ns() < end {
        round += 1;
        let id = (thread + 1) << 32 | round;
        let name = format!("{thread}-{round}");
        let ino = make(fs, name.as_bytes());
        let open = |flags| fs.open_file(ino, flags).unwrap();
        let handles = [open(libc::O_RDWR), open(DIRECT), open(DIRECT)];
        let pages = rng.range(1, 300);
        if rng.one_in(2) {
            fs.truncate(&Caller::root(), ino, pages * PAGE as u64)
                .unwrap();
        }
        if rng.one_in(3) {
            let len = rng.range(1, pages + 1) * PAGE as u64;
            drop(fs.fallocate(&handles[0], libc::FALLOC_FL_KEEP_SIZE, 0, len));
        }
        if rng.one_in(3) {
            drop(fs.fsync(&handles[0], false));
        }
        for _ in 0..rng.below(80) {
            let file = rng.pick(&handles).clone();
            let n = rng.range(1, 9).min(pages);
            let first = rng.below(pages - n + 1);
            let offset = first * PAGE as u64;
            let bytes: Vec<u8> = (first..first + n)
                .flat_map(|page| marked(id, page))
                .collect();
            number += 1;
            match rng.below(12) {
                0..=5 => {
                    let buf = AlignedBuf::from_slice(&bytes);
                    let write = Request::Write { file, offset, buf };
                    assert!(context.submit(&mut vec![(number, write)]) <= 1);
                }
                6..=8 => {
                    let taken =
                        context.submit(&mut vec![(number, read(&file, offset, bytes.len()))]);
                    if taken == 1 {
                        reads.insert(number, (id, first));
                    }
                }
                9 => {
                    let size = rng.below(pages + 1) * PAGE as u64;
                    drop(fs.truncate(&Caller::root(), ino, size));
                }
                10 if rng.one_in(3) => {
                    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                    drop(fs.fallocate(&file, mode, offset, n * PAGE as u64));
                }
                10 if rng.one_in(3) => drop(fs.fsync(&file, true)),
                _ => drop(fs.write(&file, offset, &AlignedBuf::from_slice(&bytes))),
            }
            context.poll(&mut out);
            for done in out.drain(..) {
                if let (Some((id, first)), Ok(len)) = (reads.remove(&done.user), done.result) {
                    check_marked(id, first, &done.buf[..len]);
                }
            }
        }
        if rng.one_in(2) {
            let mut bytes = vec![0; pages as usize * PAGE];
            let len = fs.read(&handles[0], 0, &mut bytes).unwrap();
            check_marked(id, 0, &bytes[..len]);
        }
        if rng.one_in(2) {
            handles.into_iter().for_each(drop);
        } else {
            handles.into_iter().for_each(|file| fs.close_file(file));
        }
        fs.unlink(&Caller::root(), ROOT, name.as_bytes()).unwrap();
        if rng.one_in(10) {
            context = fs.io_context(64).unwrap();
            reads.clear();
        }
    }
}

/// Files that go while requests of theirs are in flight, on a small array: nobody finds another's content, and no block is lost.
#[test]
fn files_come_and_go_beside_their_requests() {
    let last = after(Duration::from_secs(number("SHEAF_STRESS", 2)));
    let first = number("SHEAF_SEED", 1);
    for seed in first.. {
        let mut world = World::new(2, 36 << 20, seed);
        world.options = FsOptions::default();
        world.options.data.cache_bytes = [64, 4096][seed as usize % 2] * PAGE;
        let fs = match seed % 3 {
            0 => slow(&world, Duration::from_micros(200)),
            _ => world.open(),
        };
        let filler = fs.open_file(make(&fs, b"filler"), DIRECT).unwrap();
        let room = fs.statfs().blocks_free.saturating_sub(900) as usize;
        fs.write(&filler, 0, &AlignedBuf::from_slice(&vec![1; room * PAGE]))
            .unwrap();
        fs.sync().unwrap();
        let free = fs.statfs().blocks_free;
        let end = after(Duration::from_millis(1500));
        base::thread::parallel(4, |thread| come_and_go(&fs, thread as u64, seed, end));
        let begin = now_ns();
        loop {
            drop(fs.sync());
            let now = fs.statfs().blocks_free;
            if now >= free {
                println!("seed {seed}: {free}, {now} free");
                break;
            }
            assert!(
                since(begin) < Duration::from_secs(5),
                "seed {seed}: {now} blocks of {free} are free again"
            );
        }
        drop(filler);
        drop(fs.close());
        drop(fs);
        world.devices = world.devices.iter().map(|d| d.reopen()).collect();
        world.check();
        if now_ns() >= last {
            break;
        }
    }
}
