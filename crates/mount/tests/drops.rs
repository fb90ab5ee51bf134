//! Pages that the kernel has cached are dropped while others read the file.
//!
//! Needs /dev/fuse and root, or `fusermount3`; without them each test says so and passes.

mod common;
#[path = "common/world.rs"]
mod world;

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use base::clock::now_ns;
use base::rng::Rng;
use common::pattern;
use mount::Insist;
use world::{Mounted, World};

/// What the cache of the file system cannot keep.
const LEN: u64 = 4 * CACHE as u64;
const CACHE: usize = 48 << 20;
const READ: usize = 128 << 10;
const ROUNDS: u64 = 12;
/// About so many reads for each drop.
const READS: u64 = 100;
/// Bytes from the reader to what is written over.
const AHEAD: u64 = 5 * READ as u64;
/// Nobody takes as long for one read.
const PATIENCE: Duration = Duration::from_secs(40);

#[repr(align(4096))]
struct Page([u8; 4096]);

/// A worker that had begun read-ahead dropped pages then, which another one's read had locked. That waited for just this read-ahead, of which the kernel told nothing while the first one
/// waited for the lock: programs hung for ever, and could not be killed.
#[test]
fn who_reads_on_waits_for_no_drop_of_pages() {
    let Some(mut world) = World::new() else {
        return;
    };
    world.cache = Some(CACHE);
    let m = world.mount("");
    let path = m.path("f");
    let open = |flags| {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true);
        options.custom_flags(flags).open(&path).unwrap()
    };
    let mut file = open(0);
    let piece = pattern(1 << 20, 5);
    (0..LEN >> 20).for_each(|_| file.write_all(&piece).unwrap());
    file.sync_all().unwrap();
    let (tell, told) = mpsc::channel();
    let (drops, goes): (Vec<_>, Vec<_>) = (0..3).map(|_| mpsc::channel::<u64>()).unzip();
    let reads = move || {
        let is_read = read_in_order(&file, &tell, &drops);
        // Whoever asks is there until this one has ended.
        let _ = tell.send(is_read);
    };
    let mut threads = vec![base::thread::spawn("reads", reads).unwrap()];
    for (n, goes) in goes.into_iter().enumerate() {
        let file = open(if n == 2 { libc::O_DIRECT } else { 0 });
        let drops = move || {
            let page = Page([7; 4096]);
            for at in goes {
                let went_well = match n {
                    2 => file.write_all_at(&page.0, (at + AHEAD) % LEN).is_ok(),
                    _ => has_data(&file, at),
                };
                if !went_well {
                    return;
                }
            }
        };
        threads.push(base::thread::spawn("drops", drops).unwrap());
    }
    watch(&m, &told);
    for thread in threads {
        thread.join().unwrap();
    }
    m.end();
}

/// Until those who tell have ended.
fn watch(m: &Mounted, told: &mpsc::Receiver<bool>) {
    loop {
        match told.recv_timeout(PATIENCE) {
            Ok(went_well) => assert!(went_well, "a transfer failed"),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                m.session.unmounter.unmount(Insist::Abort).unwrap();
                panic!("nothing moves any more");
            }
        }
    }
}

/// Requests in the background at a time, of which INIT asks for 256.
const FEW: usize = 8;
/// Direct writes at a time.
const WRITES: usize = 2 * FEW;
const READERS: usize = 3;
const FEW_LEN: u64 = 64 << 20;
/// How long they go on.
const FEW_NS: u64 = 15_000_000_000;

/// All requests in the background were direct writes whose answers waited for pages that read-ahead had locked, and its requests for one of these answers. Whoever runs without privileges
/// has as few as the kernel likes, and root may set the number at any time.
#[test]
fn a_kernel_that_sends_few_requests_at_a_time_goes_on() {
    let Some(mut world) = World::new() else {
        return;
    };
    world.cache = Some(CACHE);
    let m = world.mount("");
    if !sends_few(&m.at) {
        return m.end();
    }
    let path = m.path("f");
    fs::write(&path, vec![1; FEW_LEN as usize]).unwrap();
    let place = Arc::new(AtomicU64::new(0));
    let is_over = Arc::new(AtomicBool::new(false));
    let (tell, told) = mpsc::channel();
    let mut threads = Vec::new();
    for _ in 0..READERS {
        let file = File::open(&path).unwrap();
        let (place, is_over, tell) = (Arc::clone(&place), Arc::clone(&is_over), tell.clone());
        let reads = move || {
            let mut bytes = vec![0; READ];
            while !is_over.load(Ordering::Relaxed) {
                let at = place.fetch_add(READ as u64, Ordering::Relaxed) % FEW_LEN;
                let is_read = file.read_exact_at(&mut bytes, at).is_ok();
                if tell.send(is_read).is_err() || !is_read {
                    return;
                }
            }
        };
        threads.push(base::thread::spawn("reads", reads).unwrap());
    }
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).custom_flags(libc::O_DIRECT);
    let file = options.open(&path).unwrap();
    let writes = move || {
        let went_well = write_ahead(file, &place, &tell);
        is_over.store(true, Ordering::Relaxed);
        let _ = tell.send(went_well);
    };
    threads.push(base::thread::spawn("writes", writes).unwrap());
    watch(&m, &told);
    for thread in threads {
        thread.join().unwrap();
    }
    m.end();
}

/// Has the kernel send few requests of a mount in the background at a time.
fn sends_few(at: &Path) -> bool {
    const CONTROL: &str = "/sys/fs/fuse/connections";
    let device = fs::metadata(at).unwrap().dev();
    let number = u64::from(libc::major(device)) << 20 | u64::from(libc::minor(device));
    let limit = Path::new(CONTROL).join(format!("{number}/max_background"));
    let set = fs::write(&limit, FEW.to_string());
    if let Err(error) = &set {
        base::skip(&format!("{}: {error}", limit.display()));
    }
    set.is_ok()
}

/// Direct writes that nobody waits for, of what is read next.
fn write_ahead(file: File, place: &AtomicU64, tell: &mpsc::Sender<bool>) -> bool {
    const PAGE: u64 = 4096;
    let mut queue = base::aio::Queue::new(vec![file], WRITES, PAGE as usize).unwrap();
    let mut rng = Rng::new(5);
    let mut idle: Vec<usize> = (0..WRITES).collect();
    let (begun, mut ended) = (now_ns(), Vec::new());
    while now_ns() - begun < FEW_NS {
        for slot in idle.drain(..) {
            let near = place.load(Ordering::Relaxed) + PAGE * rng.below(256);
            queue.start(slot, 0, near % FEW_LEN, PAGE as usize, true);
        }
        if queue.wait(1, &mut ended).is_err() {
            return false;
        }
        for (slot, written) in ended.drain(..) {
            if written.ok() != Some(PAGE as usize) || tell.send(true).is_err() {
                return false;
            }
            idle.push(slot);
        }
    }
    true
}

/// Asks for data where there is some.
fn has_data(file: &File, at: u64) -> bool {
    // SAFETY: the descriptor is open.
    let found = unsafe { libc::lseek(file.as_raw_fd(), at as i64, libc::SEEK_DATA) };
    found == at as i64
}

/// Says now and then how far it is; whether all went well.
fn read_in_order(file: &File, tell: &mpsc::Sender<bool>, drops: &[mpsc::Sender<u64>]) -> bool {
    let mut bytes = vec![0; READ];
    let mut rng = Rng::new(3);
    for n in 0..ROUNDS * LEN / READ as u64 {
        let at = n * READ as u64 % LEN;
        if file.read_exact_at(&mut bytes, at).is_err() {
            return false;
        }
        if tell.send(true).is_err() {
            return false;
        }
        for to in drops {
            if rng.one_in(READS) && to.send(at).is_err() {
                return false;
            }
        }
    }
    true
}
