//! Pages that the kernel has cached are dropped while others read the file.
//!
//! Needs /dev/fuse and root, or `fusermount3`; without them each test says so and passes.

mod common;
#[path = "common/world.rs"]
mod world;

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::mpsc;
use std::time::Duration;

use base::rng::Rng;
use common::pattern;
use mount::Insist;
use world::World;

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
    loop {
        match told.recv_timeout(PATIENCE) {
            Ok(went_well) => assert!(went_well, "a read failed"),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                m.session.unmounter.unmount(Insist::Abort).unwrap();
                panic!("nothing moves any more");
            }
        }
    }
    for thread in threads {
        thread.join().unwrap();
    }
    m.end();
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
