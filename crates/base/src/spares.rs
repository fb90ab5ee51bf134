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

use crate::counted::Counted;
use crate::sync::{Latch, rank};
use crate::thread::lane;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Threads beyond so many share lanes.
const LANES: usize = 64;
/// Spares that change hands at a time.
const BATCH: usize = 16;
/// Batches in the list.
const BATCHES: usize = 16;

type Batch<T> = Vec<Counted<MaybeUninit<T>>>;

/// On cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Lane<T> {
    spares: Latch<Batch<T>>,
    /// Whether there are some, for whose lane it is: a hint, as others may share that.
    any: AtomicBool,
}

#[derive(Debug)]
#[repr(align(128))]
struct Shared<T> {
    batches: Latch<Vec<Batch<T>>>,
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
        let lane = |_| Lane {
            spares: Latch::new(rank::LEAF, Vec::new()),
            any: AtomicBool::new(false),
        };
        Spares {
            lanes: (0..LANES).map(lane).collect(),
            shared: Shared {
                batches: Latch::new(rank::LEAF, Vec::with_capacity(BATCHES)),
                count: AtomicUsize::new(0),
            },
        }
    }
}

impl<T> Lane<T> {
    /// What `change` does to the spares.
    fn with<R>(&self, change: impl FnOnce(&mut Batch<T>) -> R) -> R {
        let mut spares = self.spares.lock();
        let done = change(&mut spares);
        let any = !spares.is_empty();
        if self.any.load(Ordering::Relaxed) != any {
            self.any.store(any, Ordering::Relaxed);
        }
        done
    }
}

impl<T> Spares<T> {
    fn mine(&self) -> &Lane<T> {
        &self.lanes[lane() % LANES]
    }

    /// As [`Counted::new`] of what `value` makes, in memory that was given back if there is some.
    #[inline]
    pub fn make(&self, value: impl FnOnce() -> T) -> Counted<T> {
        let mine = self.mine();
        let own = match mine.any.load(Ordering::Relaxed) {
            true => mine.with(Vec::pop),
            false => None,
        };
        filled(own.or_else(|| self.fetch()), value)
    }

    /// One of a batch of others'.
    #[inline(never)]
    fn fetch(&self) -> Option<Counted<MaybeUninit<T>>> {
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
        let _few = self.mine().with(|own| std::mem::replace(own, batch));
        one
    }

    /// Drops a reference. If it was the last one the memory is for [`make`](Self::make).
    fn give_back(&self, reference: Counted<T>) {
        let Some(spare) = emptied(reference) else {
            return;
        };
        let full = self.mine().with(|own| {
            own.push(spare);
            let half = own.len() >= 2 * BATCH;
            half.then(|| own.split_off(BATCH))
        });
        let Some(full) = full else {
            return;
        };
        let mut batches = self.shared.batches.lock();
        let room = batches.len() < BATCHES;
        if room {
            batches.push(full);
            self.shared.count.store(batches.len(), Ordering::Relaxed);
            return;
        }
        drop(batches);
        // Memory of none goes back to the allocator with no lock held.
        drop(full);
    }
}

/// A reference that is given back when it is dropped.
#[derive(Debug)]
pub struct Borrowed<'a, T> {
    spares: &'a Spares<T>,
    reference: ManuallyDrop<Counted<T>>,
}

impl<'a, T> Borrowed<'a, T> {
    pub fn new(spares: &'a Spares<T>, reference: Counted<T>) -> Borrowed<'a, T> {
        let reference = ManuallyDrop::new(reference);
        Borrowed { spares, reference }
    }
}

impl<T> Deref for Borrowed<'_, T> {
    type Target = Counted<T>;
    fn deref(&self) -> &Counted<T> {
        &self.reference
    }
}

impl<T> DerefMut for Borrowed<'_, T> {
    fn deref_mut(&mut self) -> &mut Counted<T> {
        &mut self.reference
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
#[inline]
fn filled<T>(spare: Option<Counted<MaybeUninit<T>>>, value: impl FnOnce() -> T) -> Counted<T> {
    // Invariant 1.
    Counted::filled(spare.unwrap_or_else(Counted::<T>::room), value)
}

/// Drops a reference, and what it refers to if nobody else does: then its memory is left. Where references are recorded each is made by the
/// allocator.
fn emptied<T>(reference: Counted<T>) -> Option<Counted<MaybeUninit<T>>> {
    match cfg!(feature = "trace") {
        true => None,
        false => reference.emptied(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counted::tests::Alive;
    use crate::sync::Mutex;

    #[test]
    fn memory_is_used_again_once_nobody_refers_to_it() {
        let (alive, spares) = (AtomicUsize::new(0), Spares::default());
        let first = spares.make(|| Alive::new(&alive, 1));
        let (second, place) = (Counted::clone(&first), Counted::as_ptr(&first));
        drop(Borrowed::new(&spares, first));
        assert_eq!((alive.load(Ordering::Relaxed), second.1), (1, 1));
        let second = Borrowed::new(&spares, second);
        assert_eq!(second.1, 1);
        drop(second);
        assert_eq!(alive.load(Ordering::Relaxed), 0);
        let third = spares.make(|| Alive::new(&alive, 3));
        assert_eq!(
            (
                third.1,
                Counted::references(&third),
                alive.load(Ordering::Relaxed)
            ),
            (3, 1, 1)
        );
        if cfg!(not(feature = "trace")) {
            assert_eq!(Counted::as_ptr(&third), place);
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
                (0..few).for_each(|i| sender.send(spares.make(|| Alive::new(&alive, i))).unwrap());
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
        let kept = |batches: &[Batch<Alive<'_>>]| batches.iter().map(Vec::len).sum::<usize>();
        assert!(kept(&spares.shared.batches.lock()) <= BATCHES * BATCH);
        assert!(
            spares
                .lanes
                .iter()
                .all(|lane| lane.spares.lock().len() < 2 * BATCH)
        );
    }
}
