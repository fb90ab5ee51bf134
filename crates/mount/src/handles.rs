//! The open files of a mount, by the number the kernel knows each by.
//!
//! Owns a table in shards, each a slab under its own lock. Invariants:
//!
//! 1. A handle is in the table from [`Handles::insert`] to [`Handles::remove`]; its number is
//!    reused only after that.
//! 2. A shard's lock is never held while a file is opened, used or dropped.

use std::sync::atomic::{AtomicUsize, Ordering};

use base::sync::{Mutex, rank};

const SHARDS: usize = 64;

#[derive(Debug)]
struct Slab<T> {
    slots: Vec<Option<T>>,
    free: Vec<usize>,
}

/// See the module's description. `T` is cheap to clone (an `Arc`).
#[derive(Debug)]
pub struct Handles<T> {
    shards: Vec<Mutex<Slab<T>>>,
    /// Spreads handles over the shards.
    next: AtomicUsize,
}

impl<T: Clone> Default for Handles<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Clone> Handles<T> {
    pub fn new() -> Self {
        let shard = |i| {
            let slab = Slab {
                slots: Vec::new(),
                free: Vec::new(),
            };
            Mutex::keyed(rank::MOUNT_HANDLES, i as u64, slab)
        };
        Handles {
            shards: (0..SHARDS).map(shard).collect(),
            next: AtomicUsize::new(0),
        }
    }

    /// Keeps `value`; returns its number.
    pub fn insert(&self, value: T) -> u64 {
        let shard = self.next.fetch_add(1, Ordering::Relaxed) % SHARDS;
        let mut slab = self.shards[shard].lock();
        let index = match slab.free.pop() {
            Some(index) => {
                slab.slots[index] = Some(value);
                index
            }
            None => {
                slab.slots.push(Some(value));
                slab.slots.len() - 1
            }
        };
        (index * SHARDS + shard) as u64
    }

    pub fn get(&self, handle: u64) -> Option<T> {
        let (shard, index) = Self::place(handle);
        self.shards[shard].lock().slots.get(index)?.clone()
    }

    pub fn remove(&self, handle: u64) -> Option<T> {
        let (shard, index) = Self::place(handle);
        let mut slab = self.shards[shard].lock();
        let value = slab.slots.get_mut(index)?.take()?;
        slab.free.push(index);
        Some(value)
    }

    /// Empties the table.
    pub fn clear(&self) {
        for shard in &self.shards {
            let dropped = {
                let mut slab = shard.lock();
                slab.free.clear();
                std::mem::take(&mut slab.slots)
            };
            drop(dropped);
        }
    }

    fn place(handle: u64) -> (usize, usize) {
        let handle = usize::try_from(handle).unwrap_or(usize::MAX);
        (handle % SHARDS, handle / SHARDS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_number_is_reused_only_after_its_handle_is_gone() {
        let handles = Handles::new();
        let numbers: Vec<u64> = (0..1000).map(|n| handles.insert(Arc::new(n))).collect();
        for (n, &number) in numbers.iter().enumerate() {
            assert_eq!(*handles.get(number).unwrap(), n);
        }
        assert_eq!(*handles.remove(numbers[5]).unwrap(), 5);
        assert!(handles.get(numbers[5]).is_none());
        assert!(handles.remove(numbers[5]).is_none());
        assert!(handles.get(u64::MAX).is_none());
        for _ in 0..SHARDS {
            handles.insert(Arc::new(7));
        }
        assert_eq!(*handles.get(numbers[5]).unwrap(), 7);
        handles.clear();
        assert!(handles.get(numbers[6]).is_none());
    }
}
