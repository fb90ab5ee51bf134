//! What syncs may find before them on the devices.

use super::*;
use crate::data::pace::piece_pages;
use base::atomic::Ordering;
use base::sync::{Mutex, rank};
use base::thread;
use device::sim::Times as Strikes;
use device::{Durability, Operation, Request};
use std::io;

const PIECE: u64 = 64 * PAGE;
/// Write-back has taken this much at once since before there was a pace.
const BATCH: u64 = 1024 * PAGE;
const FRAMES: usize = 66 << 10;
/// What a sync gets at least while a piece waits for it.
const YIELDS: usize = 300_000;

/// What is on its way to the devices of one world, and what came.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    now: u64,
    /// The most there was at a time.
    most: u64,
    /// Written since the last flush, and the most there was.
    unflushed: u64,
    unflushed_most: u64,
    flushes: u64,
}

pub(super) type Account = Arc<Mutex<Traffic>>;
/// Called with each write of several pages while it is on its way.
pub(super) type Hook = Arc<dyn Fn() + Send + Sync>;

/// A device that keeps account.
struct Watched {
    below: Arc<SimDevice>,
    traffic: Account,
    hook: Hook,
}

impl BlockDevice for Watched {
    device::described_by!(below);

    fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        let written = |r: &Request<'_>| match &r.operation {
            Operation::Write { buf, .. } => buf.len() as u64,
            _ => 0,
        };
        let bytes = requests.iter().map(written).sum::<u64>();
        {
            let mut traffic = self.traffic.lock();
            traffic.now += bytes;
            traffic.most = traffic.most.max(traffic.now);
            traffic.unflushed += bytes;
            traffic.unflushed_most = traffic.unflushed_most.max(traffic.unflushed);
        }
        if bytes > 2 * PAGE {
            (self.hook)();
        }
        self.below.run(requests, meanwhile);
        let flushes = requests.iter().any(|r| match &r.operation {
            Operation::Write { durability, .. } => *durability == Durability::Durable,
            operation => matches!(operation, Operation::Flush),
        });
        let mut traffic = self.traffic.lock();
        traffic.now -= bytes;
        if flushes {
            traffic.unflushed = 0;
            traffic.flushes += 1;
        }
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.below.discard(offset, len)
    }
}

/// Mounts a world with devices that keep account. The hook is called without a lock of theirs.
pub(super) fn watch(world: &World, hook: Hook) -> (Mounted, Account) {
    let traffic = Account::new(Mutex::new(rank::LEAF, Traffic::default()));
    let watched = |below: &Arc<SimDevice>| {
        let (below, traffic, hook) = (Arc::clone(below), Arc::clone(&traffic), Arc::clone(&hook));
        let device = Watched {
            below,
            traffic,
            hook,
        };
        Arc::new(device) as Arc<dyn BlockDevice>
    };
    let m = world.mount_on(world.devices.iter().map(watched).collect());
    (m, traffic)
}

/// What came since the last look.
fn taken(traffic: &Account) -> Traffic {
    std::mem::take(&mut *traffic.lock())
}

/// A file of one page that is synced.
fn sync_one(m: &Mounted, file: &OpenFile, seed: u64) {
    m.write(file, 8 * PAGE, &pattern(seed, BLOCK_SIZE));
    m.files.fsync(file, true).unwrap();
}

/// A file with blocks of its own, so that syncs of its pages overwrite.
fn synced_file(m: &Mounted) -> Arc<OpenFile> {
    let file = m.open(m.make());
    m.write(&file, 0, &pattern(1, 16 * BLOCK_SIZE));
    m.files.write_back_all().unwrap();
    m.store.sync().unwrap();
    file
}

/// What a sync would wait for was 4 MiB for each thread that wrote back, and in the flush all that had been written since the
/// last one.
#[test]
fn beside_syncs_write_back_is_one_piece_at_a_time_and_flushed_now_and_then() {
    assert_eq!(piece_pages() as u64 * PAGE, PIECE);
    let world = World::new(91, 512, FRAMES);
    let (m, traffic) = watch(&world, Arc::new(|| {}));
    let (small, large) = (synced_file(&m), m.open(m.make()));
    let bytes = pattern(2, 12 << 20);
    let write_back = || {
        m.write(&large, 0, &bytes);
        taken(&traffic);
        m.files.write_back(large.ino()).unwrap();
        taken(&traffic)
    };
    // Nobody syncs: whole batches, and no flush.
    let alone = write_back();
    assert_eq!((alone.most, alone.flushes), (BATCH, 0));
    sync_one(&m, &small, 3);
    let beside = write_back();
    assert_eq!(beside.most, PIECE);
    assert!(beside.unflushed_most <= (1 << 20) + PIECE, "{beside:?}");
    assert!(beside.flushes >= 11, "{beside:?}");
    // Still, a moment later: there may be more of them.
    world.clock.advance(Duration::from_millis(1500));
    assert_eq!(write_back().most, PIECE);
    world.clock.advance(Duration::from_millis(600));
    let alone = write_back();
    assert_eq!((alone.most, alone.flushes), (BATCH, 0));
    // Its own sync is none that anything is to wait for: it has more than a piece to write.
    m.write(&large, 0, &bytes);
    taken(&traffic);
    m.files.fsync(&large, true).unwrap();
    assert_eq!(taken(&traffic).most, BATCH);
}

/// Where syncs flush often enough, nothing is flushed besides.
#[test]
fn what_syncs_have_flushed_is_not_flushed_again() {
    let world = World::new(96, 512, FRAMES);
    let m = world.mount();
    let (small, large) = (synced_file(&m), m.open(m.make()));
    let flushes = || {
        let stats = m.store.array().stats();
        stats.devices.iter().map(|d| d.flushes).sum::<u64>()
    };
    m.write(&large, 0, &pattern(2, 13 << 19));
    let step = |part: u64| {
        // Two places, so that a flush follows the writes.
        m.write(&small, 0, &pattern(part, BLOCK_SIZE));
        sync_one(&m, &small, part);
        let bytes = part << 19..(part + 1) << 19;
        m.files.write_range(&large, bytes, true).unwrap();
    };
    step(0);
    let before = flushes();
    (1..13).for_each(step);
    // Of both devices, which have some of each part.
    assert_eq!(flushes() - before, 12 * 2);
    m.close();
}

/// One turn for all: writers that make room, the timer, syncs of large files and groups of small ones.
#[test]
fn all_that_is_written_back_beside_syncs_has_a_turn() {
    let world = World::new(92, 512, FRAMES);
    let looked: Arc<OnceLock<Weak<Files>>> = Arc::default();
    let untaken = Arc::new(AtomicU64::new(0));
    let hook = {
        let (looked, untaken) = (Arc::clone(&looked), Arc::clone(&untaken));
        move || {
            if let Some(files) = looked.get().and_then(Weak::upgrade)
                && !files.pace.is_taken()
            {
                untaken.fetch_add(1, Ordering::Relaxed);
            }
        }
    };
    let (m, traffic) = watch(&world, Arc::new(hook));
    let small = synced_file(&m);
    let files: Vec<_> = (0..3).map(|_| m.open(m.make())).collect();
    let group: Vec<_> = (0..40).map(|_| m.open(m.make())).collect();
    sync_one(&m, &small, 1);
    looked.set(Arc::downgrade(&m.files)).unwrap();
    let bytes = pattern(2, 6 << 20);
    taken(&traffic);
    for round in 0..3u64 {
        for file in &files {
            m.write(file, round * PAGE, &bytes);
        }
        for file in &group {
            m.write(file, 0, &bytes[..8 * BLOCK_SIZE]);
        }
        m.files.fsync(&files[0], true).unwrap();
        thread::parallel(2, |t| match t {
            0 => m.files.write_back(files[1].ino()).unwrap(),
            _ => m.files.write_back_all().unwrap(),
        });
    }
    assert_eq!(untaken.load(Ordering::Relaxed), 0);
    let traffic = taken(&traffic);
    // Batches of the journal are beside it.
    assert!(traffic.most < PIECE + (1 << 20), "{traffic:?}");
    assert!(traffic.flushes > 10, "{traffic:?}");
    assert_eq!(m.contents(files[2].ino())[2 * BLOCK_SIZE..], bytes);
    m.close();
}

/// Were it to take a turn, it would wait for the end of the piece, which here waits for it.
#[test]
fn a_small_sync_goes_on_while_a_piece_is_on_its_way() {
    let world = World::new(93, 512, FRAMES);
    let begun = Arc::new(AtomicU64::new(0));
    let synced = Arc::new(AtomicU64::new(0));
    let late = Arc::new(AtomicU64::new(0));
    let hook = {
        let (begun, synced, late) = (Arc::clone(&begun), Arc::clone(&synced), Arc::clone(&late));
        move || {
            // Only the pieces that are counted wait; what was written before went on at once.
            if begun.load(Ordering::SeqCst) == 0 {
                return;
            }
            let before = synced.load(Ordering::SeqCst);
            begun.fetch_add(1, Ordering::SeqCst);
            // A sync that waits for this piece does not come to its end; the test does.
            let ended = (0..YIELDS).any(|_| {
                thread::yield_now();
                synced.load(Ordering::SeqCst) != before
            });
            late.fetch_add(u64::from(!ended), Ordering::SeqCst);
        }
    };
    let (m, _) = watch(&world, Arc::new(hook));
    let (small, large) = (synced_file(&m), m.open(m.make()));
    sync_one(&m, &small, 1);
    m.write(&large, 0, &pattern(2, 3 * PIECE as usize));
    begun.store(1, Ordering::SeqCst);
    let (last, end) = (AtomicU64::new(0), u64::MAX);
    thread::parallel(2, |t| {
        if t == 0 {
            m.files.write_back(large.ino()).unwrap();
            last.store(end, Ordering::SeqCst);
            return;
        }
        let mut seen = 1;
        while last.load(Ordering::SeqCst) != end {
            let pieces = begun.load(Ordering::SeqCst);
            if pieces > seen {
                seen = pieces;
                assert!(m.files.pace.is_taken());
                sync_one(&m, &small, pieces);
                synced.fetch_add(1, Ordering::SeqCst);
            }
            thread::yield_now();
        }
    });
    assert_eq!(late.load(Ordering::SeqCst), 0);
    assert!(synced.load(Ordering::SeqCst) >= 3);
    begun.store(0, Ordering::SeqCst);
    m.close();
}

/// The one who syncs found half of the cache dirty, by others, and wrote all of that back before its page was written to.
#[test]
fn who_syncs_does_not_make_room_for_others() {
    let world = World::new(94, 64, 2048);
    let (m, traffic) = watch(&world, Arc::new(|| {}));
    let (small, large) = (synced_file(&m), m.open(m.make()));
    sync_one(&m, &small, 1);
    m.write(&large, 0, &pattern(2, 1200 * BLOCK_SIZE));
    assert!(m.files.dirty_pages() > 1024);
    taken(&traffic);
    sync_one(&m, &small, 2);
    let own = taken(&traffic);
    assert!(own.most <= 2 * PAGE, "{own:?}");
    assert!(m.files.dirty_pages() >= 1200);
    // Who has more to write does.
    m.write(&large, 0, &pattern(3, BLOCK_SIZE));
    assert!(m.files.dirty_pages() <= 1024);
}

/// A thread that copies all the time kept who syncs waiting for its CPU.
#[test]
fn who_copies_much_into_the_cache_beside_syncs_offers_its_cpu_now_and_then() {
    const MIB: usize = 1 << 20;
    let world = World::new(95, 64, FRAMES);
    let m = world.mount();
    let (small, large) = (synced_file(&m), m.open(m.make()));
    // What this thread has written until now counts as well: it begins anew with the next.
    m.files.give_way(MIB);
    assert!(!m.files.give_way(MIB), "nobody syncs");
    sync_one(&m, &small, 1);
    m.files.give_way(MIB);
    assert!(!m.files.give_way(MIB - BLOCK_SIZE));
    assert!(m.files.give_way(BLOCK_SIZE));
    // Every way to write counts.
    let rest = || m.files.give_way(BLOCK_SIZE);
    let part = pattern(2, MIB - BLOCK_SIZE);
    m.write(&large, 0, &part);
    assert!(rest() && !rest());
    m.files.give_way(MIB);
    m.files.append(&large, &part).unwrap();
    assert!(rest());
    for page in 0..255 {
        m.write(&large, page * PAGE, &part[..BLOCK_SIZE]);
    }
    assert!(rest() && !rest());
    world.clock.advance(Duration::from_secs(3));
    assert!(!m.files.give_way(MIB));
    m.close();
}

/// A flush that fails in a turn is one that failed for whoever wrote in place before: the next sync tells them.
#[test]
fn a_flush_between_pieces_that_fails_is_told_to_all_that_wrote_before() {
    let world = World::new(95, 512, FRAMES);
    let (m, _) = watch(&world, Arc::new(|| {}));
    let (small, large) = (synced_file(&m), m.open(m.make()));
    let other = synced_file(&m);
    m.write(&large, 0, &pattern(2, 5 << 20));
    sync_one(&m, &small, 1);
    m.write(&other, 0, &pattern(3, BLOCK_SIZE));
    m.files.write_back(other.ino()).unwrap();
    for device in &world.devices {
        device.fail_flushes(Strikes::Next(1));
    }
    assert!(m.files.write_back(large.ino()).is_err());
    assert!(matches!(
        m.files.fsync(&other, true),
        Err(Error::WriteFailed { .. })
    ));
}
