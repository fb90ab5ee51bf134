//! Memory of what some threads end, for what others begin.
//!
//! Why: an allocator has memory go back to the threads that took it, under a lock that both take for each piece. Here it goes from one to
//! the other by the batch.
//!
//! A thread has a lane of its own, and hands batches over to those of others by a list of all.
//!
//! Invariants:
//! 1. Nobody refers to a spare, and nothing is in it.
//! 2. A lane has less than two batches, the list no more than [`BATCHES`]: what goes beyond goes back to the allocator. So there are a few
//!    hundred spares, and 2,240 at most.

use crate::sync::{Arc, Mutex, rank};
use crate::thread::lane;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads beyond so many share lanes.
const LANES: usize = 64;
/// Spares that change hands at a time.
const BATCH: usize = 16;
/// Batches in the list.
const BATCHES: usize = 16;

type Batch<T> = Vec<Arc<MaybeUninit<T>>>;

/// On cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Lane<T>(Mutex<Batch<T>>);

#[derive(Debug)]
#[repr(align(128))]
struct Shared<T> {
    batches: Mutex<Vec<Batch<T>>>,
    /// How many there are, for who has none: a hint.
    count: AtomicUsize,
}

#[derive(Debug)]
pub struct Spares<T> {
    lanes: Box<[Lane<T>]>,
    shared: Shared<T>,
}

impl<T> Default for Spares<T> {
    fn default() -> Self {
        let lane = |_| Lane(Mutex::new(rank::LEAF, Vec::new()));
        Spares {
            lanes: (0..LANES).map(lane).collect(),
            shared: Shared {
                batches: Mutex::new(rank::LEAF, Vec::new()),
                count: AtomicUsize::new(0),
            },
        }
    }
}

impl<T> Spares<T> {
    fn mine(&self) -> &Mutex<Batch<T>> {
        &self.lanes[lane() % LANES].0
    }

    /// As [`Arc::new`] of what `value` makes, in memory that was given back if there is some.
    #[inline]
    pub fn make(&self, value: impl FnOnce() -> T) -> Arc<T> {
        let own = self.mine().lock().pop();
        filled(own.or_else(|| self.fetch()), value)
    }

    /// One of a batch of others'.
    #[inline(never)]
    fn fetch(&self) -> Option<Arc<MaybeUninit<T>>> {
        if self.shared.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let mut batch = {
            let mut batches = self.shared.batches.lock();
            let batch = batches.pop()?;
            self.shared.count.store(batches.len(), Ordering::Relaxed);
            batch
        };
        let one = batch.pop();
        // What is there is another thread's, and few: of one that shares the lane.
        let _few = std::mem::replace(&mut *self.mine().lock(), batch);
        one
    }

    /// Drops a reference. If it was the last one the memory is for [`make`](Self::make).
    fn give_back(&self, reference: Arc<T>) {
        let Some(spare) = emptied(reference) else {
            return;
        };
        let full = {
            let mut own = self.mine().lock();
            own.push(spare);
            let half = own.len() >= 2 * BATCH;
            half.then(|| own.split_off(BATCH))
        };
        let Some(full) = full else {
            return;
        };
        let mut batches = self.shared.batches.lock();
        if batches.len() < BATCHES {
            batches.push(full);
            self.shared.count.store(batches.len(), Ordering::Relaxed);
        }
    }
}

/// A reference that is given back when it is dropped.
#[derive(Debug)]
pub struct Borrowed<'a, T> {
    spares: &'a Spares<T>,
    reference: ManuallyDrop<Arc<T>>,
}

impl<'a, T> Borrowed<'a, T> {
    pub fn new(spares: &'a Spares<T>, reference: Arc<T>) -> Borrowed<'a, T> {
        let reference = ManuallyDrop::new(reference);
        Borrowed { spares, reference }
    }
}

impl<T> Deref for Borrowed<'_, T> {
    type Target = Arc<T>;
    fn deref(&self) -> &Arc<T> {
        &self.reference
    }
}

impl<T> Drop for Borrowed<'_, T> {
    fn drop(&mut self) {
        // SAFETY: nobody uses it after this.
        let reference = unsafe { ManuallyDrop::take(&mut self.reference) };
        self.spares.give_back(reference);
    }
}

/// Makes a value where there is none, or in new memory.
#[cfg(not(feature = "trace"))]
#[inline]
fn filled<T>(spare: Option<Arc<MaybeUninit<T>>>, value: impl FnOnce() -> T) -> Arc<T> {
    let mut place = spare.unwrap_or_else(Arc::new_uninit);
    // Invariant 1.
    Arc::get_mut(&mut place)
        .expect("nobody refers to it")
        .write(value());
    // SAFETY: it has just been written.
    unsafe { place.assume_init() }
}

/// Drops a reference, and what it refers to if nobody else does: then its memory is left.
#[cfg(not(feature = "trace"))]
fn emptied<T>(mut reference: Arc<T>) -> Option<Arc<MaybeUninit<T>>> {
    Arc::get_mut(&mut reference)?;
    let raw = Arc::into_raw(reference);
    // SAFETY: it is the only reference, and is not used as one to a value any more. A value that may be missing has the size and
    // alignment of one that is there. If dropping it panics its memory is leaked.
    unsafe {
        std::ptr::drop_in_place(raw.cast_mut());
        Some(Arc::from_raw(raw.cast::<MaybeUninit<T>>()))
    }
}

/// Where references are recorded, each is made by the allocator.
#[cfg(feature = "trace")]
fn filled<T>(_: Option<Arc<MaybeUninit<T>>>, value: impl FnOnce() -> T) -> Arc<T> {
    Arc::new(value())
}

#[cfg(feature = "trace")]
fn emptied<T>(_: Arc<T>) -> Option<Arc<MaybeUninit<T>>> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Counted<'a>(&'a AtomicUsize, u64);

    impl<'a> Counted<'a> {
        fn new(alive: &'a AtomicUsize, value: u64) -> Counted<'a> {
            alive.fetch_add(1, Ordering::Relaxed);
            Counted(alive, value)
        }
    }

    impl Drop for Counted<'_> {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn memory_is_used_again_once_nobody_refers_to_it() {
        let (alive, spares) = (AtomicUsize::new(0), Spares::default());
        let first = spares.make(|| Counted::new(&alive, 1));
        let (second, place) = (Arc::clone(&first), Arc::as_ptr(&first));
        drop(Borrowed::new(&spares, first));
        assert_eq!((alive.load(Ordering::Relaxed), second.1), (1, 1));
        let second = Borrowed::new(&spares, second);
        assert_eq!(second.1, 1);
        drop(second);
        assert_eq!(alive.load(Ordering::Relaxed), 0);
        let third = spares.make(|| Counted::new(&alive, 3));
        assert_eq!(
            (
                third.1,
                Arc::strong_count(&third),
                alive.load(Ordering::Relaxed)
            ),
            (3, 1, 1)
        );
        if cfg!(not(feature = "trace")) {
            assert_eq!(Arc::as_ptr(&third), place);
        }
    }

    #[test]
    fn what_one_thread_ends_another_one_begins_and_no_more_is_kept_than_told() {
        let (alive, spares) = (AtomicUsize::new(0), Spares::default());
        let few = 100_000 / if cfg!(miri) { 100 } else { 1 };
        let (sender, receiver) = std::sync::mpsc::sync_channel(1000);
        let (sender, receiver) = (
            Mutex::new(rank::LEAF, Some(sender)),
            Mutex::new(rank::LEAF, Some(receiver)),
        );
        crate::thread::parallel(2, |thread| match thread {
            0 => {
                let sender = sender.lock().take().unwrap();
                (0..few).for_each(|i| {
                    sender
                        .send(spares.make(|| Counted::new(&alive, i)))
                        .unwrap()
                });
            }
            _ => {
                let receiver = receiver.lock().take().unwrap();
                for (i, sent) in receiver.into_iter().enumerate() {
                    assert_eq!(sent.1, i as u64);
                    drop(Borrowed::new(&spares, sent));
                }
            }
        });
        assert_eq!(alive.load(Ordering::Relaxed), 0);
        let kept = |batches: &[Batch<Counted<'_>>]| batches.iter().map(Vec::len).sum::<usize>();
        assert!(kept(&spares.shared.batches.lock()) <= BATCHES * BATCH);
        assert!(
            spares
                .lanes
                .iter()
                .all(|lane| lane.0.lock().len() < 2 * BATCH)
        );
    }
}
