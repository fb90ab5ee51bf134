//! Discards of free space beside those who need it.

use crate::world::{TestStore, World, free, take_all};
use base::sync::{Mutex, rank};
use base::thread::{parallel, yield_now};
use device::sim::SimDevice;
use device::{Array, BlockDevice, Request};
use engine::{Error, Need, Store, StoreOptions};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

type Hook = Box<dyn FnMut() -> io::Result<()> + Send>;

/// Calls back while it discards, once or for as long as that fails, and fails with it.
struct Discards {
    device: Arc<SimDevice>,
    hook: Arc<Mutex<Option<Hook>>>,
}

impl BlockDevice for Discards {
    device::described_by!(device);

    fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        self.device.run(requests, meanwhile);
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let hook = self.hook.lock().take();
        if let Some(mut hook) = hook
            && let Err(error) = hook()
        {
            *self.hook.lock() = Some(hook);
            return Err(error);
        }
        self.device.discard(offset, len)
    }
}

/// A store on a device that calls back.
fn open(seed: u64) -> (Arc<Mutex<Option<Hook>>>, Arc<TestStore>) {
    open_with(seed, World::options())
}

fn open_with(seed: u64, options: StoreOptions) -> (Arc<Mutex<Option<Hook>>>, Arc<TestStore>) {
    let world = World::new(seed, &[64]);
    let hook = Arc::new(Mutex::new(rank::LEAF, None));
    let device = Discards {
        device: Arc::clone(&world.devices[0]),
        hook: Arc::clone(&hook),
    };
    let array = Array::assemble(vec![Arc::new(device)], false).unwrap();
    let (store, _) = Store::open(Arc::new(array), options).unwrap();
    (hook, store)
}

/// An array is full but for some runs; a promise stands for a part of them, and is redeemed while others
/// are discarded.
#[test]
fn promises_hold_while_free_space_is_discarded() {
    let (hook, store) = open(25);
    let mut held = take_all(&store, 32);
    // Nor is there any of the reserve that data gets as a last resort.
    let mut spent = store.promise(0).unwrap();
    while let Ok(reservation) = store.reserve(&mut spent, 32, None) {
        let mut op = store.begin(Need::Reclaim).unwrap();
        op.take(reservation);
        op.commit();
    }
    drop(spent);
    held.sort();
    // Eight runs of one chunk.
    let holes: Vec<_> = held.iter().copied().take(16).step_by(2).collect();
    free(&store, holes.iter().copied());
    store.sync().unwrap();
    for promised in [8, 5, 1] {
        let blocks = store.promise(32 * promised).unwrap().into_blocks();
        let redeeming = Arc::clone(&store);
        *hook.lock() = Some(Box::new(move || {
            let mut promise = redeeming.adopt_promise(blocks);
            let mut reservations = Vec::new();
            while promise.blocks() > 0 {
                let reservation = redeeming.reserve(&mut promise, 32, None);
                reservations.push(reservation.expect("a promise holds"));
            }
            Ok(())
        }) as Hook);
        store.trim(0..u64::MAX, 1).unwrap();
        assert!(hook.lock().is_none(), "nothing is discarded");
    }
    assert!(store.failed().is_none());
}

/// A run of 32 free blocks is being discarded, and nothing else is free: who wants one block is not told that the array is
/// full.
#[test]
fn space_that_is_being_discarded_is_not_missing() {
    let (hook, store) = open(27);
    let mut held = take_all(&store, 32);
    take_all(&store, 1);
    held.sort();
    free(&store, [held[0]]);
    store.sync().unwrap();
    let begun = Arc::new(AtomicBool::new(false));
    let begins = Arc::clone(&begun);
    // Time enough to be told, were it not made to wait.
    *hook.lock() = Some(Box::new(move || {
        begins.store(true, Ordering::SeqCst);
        base::clock::nap(50_000_000);
        Ok(())
    }) as Hook);
    let outcomes = parallel(2, |me| {
        if me == 0 {
            return store.trim(0..u64::MAX, 1).map(drop);
        }
        while !begun.load(Ordering::SeqCst) {
            yield_now();
        }
        store.promise(1).map(drop)
    });
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
}

/// A device that refused all of it was said to have discarded everything.
#[test]
fn what_could_not_be_discarded_is_not_told_as_discarded() {
    let (hook, store) = open(28);
    let mut held = take_all(&store, 32);
    take_all(&store, 1);
    held.sort();
    free(&store, [held[0], held[2]]);
    store.sync().unwrap();
    let all = store.trim(0..u64::MAX, 32).unwrap();
    let refuse = |times: u32| {
        let mut asked = 0;
        *hook.lock() = Some(Box::new(move || {
            asked += 1;
            match asked <= times {
                true => Err(io::Error::other("refused")),
                false => Ok(()),
            }
        }) as Hook);
    };
    // Free runs of data chunks come first.
    refuse(1);
    assert_eq!(store.trim(0..u64::MAX, 32).unwrap(), all - 32 * 4096);
    refuse(u32::MAX);
    let outcome = store.trim(0..u64::MAX, 32);
    assert!(matches!(outcome, Err(Error::Device(_))), "{outcome:?}");
    *hook.lock() = None;
    assert_eq!(store.trim(0..u64::MAX, 32).unwrap(), all);
    assert!(store.failed().is_none());
}

/// Free chunks were discarded whatever the least run was.
#[test]
fn runs_shorter_than_the_least_are_left_alone() {
    let world = World::new(26, &[64]);
    let store = world.open().unwrap();
    let chunk = u64::from(store.array().geometry().chunk_blocks);
    // One chunk with data at its beginning; those behind it are free but for metadata at the end.
    let mut promise = store.promise(8).unwrap();
    let reservation = store.reserve(&mut promise, 8, None).unwrap();
    let mut op = store.begin(Need::Reclaim).unwrap();
    op.take(reservation);
    op.commit();
    let all = store.trim(0..u64::MAX, 1).unwrap();
    let rest = (chunk - 8) * 4096;
    assert!(all > rest + 2 * chunk * 4096, "{all} bytes");
    assert_eq!(store.trim(0..u64::MAX, chunk - 8).unwrap(), all);
    assert_eq!(store.trim(0..u64::MAX, chunk - 7).unwrap(), all - rest);
    let chunks = (all - rest) / (chunk * 4096);
    assert_eq!(store.trim(0..u64::MAX, chunks * chunk).unwrap(), all - rest);
    assert_eq!(store.trim(0..u64::MAX, chunks * chunk + 1).unwrap(), 0);
    assert_eq!(store.trim(0..u64::MAX, u64::MAX).unwrap(), 0);
}

/// All free space was discarded whatever range was asked for.
#[test]
fn what_is_outside_the_range_is_left_alone() {
    let world = World::new(29, &[64]);
    let store = world.open().unwrap();
    let geometry = store.array().geometry();
    let chunk = u64::from(geometry.chunk_blocks);
    let mut promise = store.promise(8).unwrap();
    let reservation = store.reserve(&mut promise, 8, None).unwrap();
    let (data, _) = geometry.chunk_of(reservation.extent().block).unwrap();
    let taken = reservation.extent().block.0 - geometry.chunk_start.0;
    let mut op = store.begin(Need::Reclaim).unwrap();
    op.take(reservation);
    op.commit();
    let trim = |range: std::ops::Range<u64>, least| store.trim(range, least).unwrap() / 4096;
    let all = trim(0..u64::MAX, 1);
    // Chunk by chunk, and in pieces that are cut out of chunks, it comes to the same.
    let count = u64::from(geometry.chunk_count);
    let total = count * chunk;
    for piece in [chunk, 3 * chunk, 1000, total] {
        let starts = (0..total).step_by(piece as usize);
        let sum: u64 = starts.map(|start| trim(start..start + piece, 1)).sum();
        assert_eq!(sum, all, "pieces of {piece}");
    }
    assert_eq!(trim(total..u64::MAX, 1), 0);
    assert_eq!(trim(taken..taken + 8, 1), 0);
    // A run in a data chunk is as long as it is in the range.
    let first = u64::from(data) * chunk;
    assert_eq!(trim(taken..taken + 8 + 20, 1), 20);
    assert_eq!(trim(taken..taken + 8 + 20, 20), 20);
    assert_eq!(trim(taken..taken + 8 + 20, 21), 0);
    assert_eq!(trim(first..first + chunk, 1), chunk - 8);
    // And so is one of free chunks.
    let free = (0..count).find(|c| trim(c * chunk..(c + 2) * chunk, 1) == 2 * chunk);
    let end = (free.unwrap() + 1) * chunk;
    assert_eq!(trim(end - 5..end + 6, 11), 11);
    assert_eq!(trim(end - 5..end + 6, 12), 0);
}

/// What discards do beside the end of their store.
#[derive(Default)]
struct Beside {
    begun: AtomicBool,
    ended: AtomicBool,
    /// One began, or had not returned, when the store had ended.
    late: AtomicBool,
}

impl Beside {
    /// Each discard from now on is noted, and fails; the first one gives the end all the time that it may want.
    fn watch(beside: &Arc<Beside>, hook: &Mutex<Option<Hook>>) {
        let beside = Arc::clone(beside);
        *hook.lock() = Some(Box::new(move || {
            if !beside.begun.swap(true, Ordering::SeqCst) {
                let waits = |turn: &u32| *turn < 100_000 && !beside.ended.load(Ordering::SeqCst);
                (0..).take_while(waits).for_each(|_| yield_now());
            }
            let ended = beside.ended.load(Ordering::SeqCst);
            beside.late.fetch_or(ended, Ordering::SeqCst);
            Err(io::Error::other("refused"))
        }) as Hook);
    }

    /// Closes a store in the middle of the first discard of what others do.
    fn close<T: Send>(&self, store: &TestStore, others: impl Fn() -> T + Sync) -> Option<T> {
        let mut outcomes = parallel(2, |me| {
            if me == 0 {
                return Some(others());
            }
            while !self.begun.load(Ordering::SeqCst) {
                yield_now();
            }
            store.close().unwrap();
            self.ended.store(true, Ordering::SeqCst);
            None
        });
        assert!(!self.late.load(Ordering::SeqCst));
        outcomes.swap_remove(0)
    }
}

/// It went on when others may have had the devices, and have written there.
#[test]
fn a_trim_discards_nothing_once_its_store_has_ended() {
    let (hook, store) = open(29);
    let mut held = take_all(&store, 32);
    held.sort();
    free(&store, held.iter().copied().take(16).step_by(2));
    store.sync().unwrap();
    let beside = Arc::new(Beside::default());
    Beside::watch(&beside, &hook);
    let outcome = beside.close(&store, || store.trim(0..u64::MAX, 1)).unwrap();
    assert!(matches!(outcome, Err(Error::ReadOnly)), "{outcome:?}");
}

/// So did what was freed.
#[test]
fn what_is_freed_is_not_discarded_once_its_store_has_ended() {
    let options = StoreOptions {
        discard: true,
        ..World::options()
    };
    let (hook, store) = open_with(30, options);
    let mut held = take_all(&store, 32);
    held.sort();
    free(&store, held.iter().copied().take(16).step_by(2));
    let beside = Arc::new(Beside::default());
    Beside::watch(&beside, &hook);
    let outcome = beside.close(&store, || store.sync()).unwrap();
    assert!(outcome.is_ok(), "{outcome:?}");
}
