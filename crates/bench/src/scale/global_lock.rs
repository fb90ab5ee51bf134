//! A store that scales badly on purpose: one table of free numbers for all, under one lock, that
//! every unlink scans from its beginning, as the node address table of stock F2FS is. What the
//! published study says of that (REFERENCES in `docs/performance.md`) the model must say of this.
//!
//! It is no part of a file system: names are in a map for each directory, and an inode is a block
//! in memory with a checksum. Creating takes the number that the last scan found; unlinking gives
//! one back and counts what is free.

use base::atomic::{AtomicU64, Ordering};
use base::map::HashMap;
use base::sync::{Mutex, rank};

use crate::Error;

/// Words of a row's numbers.
const WORDS: usize = 7;
/// Rows of the table: 64 KiB, 458,752 numbers.
const ROWS: usize = 1024;
pub const NUMBERS: usize = ROWS * WORDS * 64;
const INODE_BYTES: usize = 512;

/// A cache line of the table.
#[derive(Debug)]
#[repr(align(64))]
struct Row {
    /// Changes so far: what the recorder sees of a look at the row, and of a change.
    changes: AtomicU64,
    /// A set bit is a free number.
    free: [u64; WORDS],
}

impl Row {
    fn count(&self) -> u64 {
        self.changes.load(Ordering::Relaxed);
        self.free.iter().map(|word| word.count_ones() as u64).sum()
    }
}

#[derive(Debug)]
struct Table {
    rows: Vec<Row>,
    free: u64,
    /// Where the last search for a free number ended.
    next: usize,
}

impl Table {
    fn change(&mut self, number: usize, free: bool) {
        let row = &mut self.rows[number / (WORDS * 64)];
        row.changes.fetch_add(1, Ordering::Relaxed);
        let (word, bit) = (number / 64 % WORDS, 1 << (number % 64));
        match free {
            true => row.free[word] |= bit,
            false => row.free[word] &= !bit,
        }
    }

    fn take(&mut self) -> Option<usize> {
        for step in 0..ROWS {
            let at = (self.next + step) % ROWS;
            let row = &self.rows[at];
            row.changes.load(Ordering::Relaxed);
            if let Some(word) = row.free.iter().position(|word| *word != 0) {
                let bit = row.free[word].trailing_zeros() as usize;
                self.next = at;
                let number = (at * WORDS + word) * 64 + bit;
                self.change(number, false);
                return Some(number);
            }
        }
        None
    }

    fn put(&mut self, number: usize) {
        self.change(number, true);
        self.free = self.rows.iter().map(Row::count).sum();
    }
}

/// A directory of one thread; on cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Directory(Mutex<HashMap<u64, Inode>>);

#[derive(Debug)]
struct Inode {
    number: usize,
    block: Box<[u8; INODE_BYTES]>,
}

impl Inode {
    fn new(number: usize, name: u64) -> Inode {
        let mut block = Box::new([0; INODE_BYTES]);
        block[..8].copy_from_slice(&name.to_le_bytes());
        let mut inode = Inode { number, block };
        inode.seal();
        inode
    }

    fn seal(&mut self) {
        let crc = format::checksum(self.number as u32, &self.block[..INODE_BYTES - 4]);
        self.block[INODE_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    }
}

/// See the module's head.
#[derive(Debug)]
pub struct GlobalLock {
    table: Mutex<Table>,
    directories: Vec<Directory>,
}

impl GlobalLock {
    pub fn new(threads: usize) -> GlobalLock {
        let row = || Row {
            changes: AtomicU64::new(0),
            free: [u64::MAX; WORDS],
        };
        let table = Table {
            rows: (0..ROWS).map(|_| row()).collect(),
            free: NUMBERS as u64,
            next: 0,
        };
        let directory = || Directory(Mutex::new(rank::LEAF, HashMap::default()));
        GlobalLock {
            table: Mutex::new(rank::LEAF, table),
            directories: (0..threads).map(|_| directory()).collect(),
        }
    }

    pub fn create(&self, thread: usize, name: u64) -> Result<(), Error> {
        let number = self.table.lock().take();
        let number = number.ok_or_else(|| Error::Unable("no number is free".to_owned()))?;
        let inode = Inode::new(number, name);
        self.directories[thread].0.lock().insert(name, inode);
        Ok(())
    }

    pub fn unlink(&self, thread: usize, name: u64) -> Result<(), Error> {
        let inode = self.directories[thread].0.lock().remove(&name);
        let mut inode = inode.ok_or_else(|| Error::Unable("no such name".to_owned()))?;
        inode.block[8] += 1;
        inode.seal();
        self.table.lock().put(inode.number);
        Ok(())
    }

    #[cfg(test)]
    fn free(&self) -> u64 {
        self.table.lock().free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_and_run_out() {
        let store = GlobalLock::new(2);
        for name in 0..1000 {
            store.create((name % 2) as usize, name).unwrap();
        }
        for name in 0..1000 {
            store.unlink((name % 2) as usize, name).unwrap();
        }
        assert_eq!(store.free(), NUMBERS as u64);
        assert!(store.unlink(0, 1).is_err());
        let mut table = store.table.lock();
        let taken: std::collections::HashSet<usize> =
            (0..NUMBERS).filter_map(|_| table.take()).collect();
        assert_eq!((taken.len(), table.take()), (NUMBERS, None));
    }
}
