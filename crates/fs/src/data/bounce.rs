//! Memory between devices and the cache. Large pieces are kept for the next who needs one: that the kernel makes memory that was
//! never used costs more than a copy of the same size.
//!
//! Invariants:
//! 1. A piece holds whatever its last user left there. Who takes one fills what it shows to anybody.
//! 2. What is kept is at most [`Bounces::new`]'s bound.
//!
//! Pieces from [`LARGE`] on lie in large pages, as far as there is room to keep them: of a transfer of 1 MiB the kernel looks up each page.
//! One that finds no room when it comes back is let go of, but its memory stays as long as the other half of its large page: at most as much again as is in use.

use base::mapping;
use base::sync::{Mutex, rank};
use device::AlignedBuf;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// What is smaller is taken from the heap as it is.
const LEAST: usize = 64 << 10;
/// What fills large pages, alone or with others of its length.
const LARGE: usize = 1 << 20;
/// Lengths of kept pieces: powers of two from [`LEAST`] on.
const CLASSES: usize = 7;

/// Pieces that nobody uses at the moment.
#[derive(Debug)]
pub(super) struct Bounces {
    kept: Mutex<Kept>,
    most: usize,
}

#[derive(Debug, Default)]
struct Kept {
    classes: [Vec<AlignedBuf>; CLASSES],
    bytes: usize,
}

/// A piece, until it is dropped.
#[derive(Debug)]
pub(super) struct Bounce<'a> {
    home: &'a Bounces,
    memory: Option<AlignedBuf>,
    len: usize,
}

/// The class of pieces that have at least so many bytes.
fn class_of(bytes: usize) -> Option<usize> {
    let class = bytes.div_ceil(LEAST).next_power_of_two().ilog2() as usize;
    (bytes >= LEAST && class < CLASSES).then_some(class)
}

impl Bounces {
    /// Keeps up to `most` bytes.
    pub fn new(most: usize) -> Bounces {
        Bounces {
            kept: Mutex::new(rank::LEAF, Kept::default()),
            most,
        }
    }

    /// So many bytes, of any content, aligned as direct I/O wants them.
    pub fn take(&self, bytes: usize) -> Bounce<'_> {
        Bounce {
            home: self,
            memory: Some(self.take_out(bytes)),
            len: bytes,
        }
    }

    /// The same, or more bytes, for somebody who may [`give`](Self::give) them back.
    pub fn take_out(&self, bytes: usize) -> AlignedBuf {
        let Some(class) = class_of(bytes) else {
            return AlignedBuf::zeroed(bytes);
        };
        let len = LEAST << class;
        let mut kept = self.kept.lock();
        if let Some(memory) = kept.classes[class].pop() {
            kept.bytes -= memory.len();
            return memory;
        }
        // The others are kept, and this one will be.
        let all = len.next_multiple_of(mapping::LARGE);
        if len < LARGE || kept.bytes + all > self.most {
            drop(kept);
            return AlignedBuf::zeroed(len);
        }
        let mut made = AlignedBuf::in_large_pages(len, all / len);
        let memory = made.pop();
        for other in made {
            kept.bytes += other.len();
            kept.classes[class].push(other);
        }
        memory.expect("one at least")
    }

    /// Keeps a piece that nobody uses any more, if there is room for it.
    pub fn give(&self, memory: AlignedBuf) {
        let Some(class) = class_of(memory.len()).filter(|&class| LEAST << class == memory.len())
        else {
            return;
        };
        let mut kept = self.kept.lock();
        if kept.bytes + memory.len() <= self.most {
            kept.bytes += memory.len();
            kept.classes[class].push(memory);
        }
    }
}

impl Bounce<'_> {
    /// The same for several who only read it; the last of them has it kept in `home`, where it is from.
    pub fn into_shared(mut self, home: &Arc<Bounces>) -> Arc<Shared> {
        Arc::new(Shared {
            home: Arc::clone(home),
            memory: self.memory.take(),
            len: self.len,
        })
    }
}

/// A piece that nobody changes any more.
#[derive(Debug)]
pub(super) struct Shared {
    home: Arc<Bounces>,
    memory: Option<AlignedBuf>,
    len: usize,
}

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        let memory = self.memory.as_deref();
        &memory.expect("it is there until the drop")[..self.len]
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.home.give(memory);
        }
    }
}

impl Drop for Bounce<'_> {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.home.give(memory);
        }
    }
}

impl Deref for Bounce<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory.as_deref().expect("it is there until the drop")[..self.len]
    }
}

impl DerefMut for Bounce<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory.as_deref_mut().expect("as above")[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_used_again_and_bounded() {
        let bounces = Bounces::new(1 << 20);
        for (bytes, kept) in [
            (0, 0),
            (4096, 0),
            (LEAST, LEAST),
            (LEAST + 1, 2 * LEAST),
            (1 << 20, 1 << 20),
            ((1 << 20) + 1, 0),
            (4 << 20, 0),
            ((4 << 20) + 1, 0),
        ] {
            let before = bounces.kept.lock().bytes;
            let mut first = bounces.take(bytes);
            assert_eq!(first.len(), bytes);
            first.fill(7);
            drop(first);
            let added = bounces.kept.lock().bytes - before;
            assert_eq!(added, if before + kept <= 1 << 20 { kept } else { 0 });
        }
        // Both of the small ones, and no others.
        assert_eq!(bounces.kept.lock().bytes, 3 * LEAST);
        let again = bounces.take(LEAST - 1 + LEAST);
        assert!(again.iter().all(|&b| b == 7 || b == 0));
        assert_eq!(bounces.kept.lock().bytes, LEAST);
        drop(again);
        assert_eq!(bounces.kept.lock().bytes, 3 * LEAST);
        let bounces = Arc::new(bounces);
        let mut first = bounces.take(LEAST);
        first.fill(8);
        let shared = first.into_shared(&bounces);
        let other = Arc::clone(&shared);
        drop(shared);
        assert_eq!((*other).as_ref(), [8; LEAST]);
        assert_eq!(bounces.kept.lock().bytes, 2 * LEAST);
        drop(other);
        assert_eq!(bounces.kept.lock().bytes, 3 * LEAST);
    }

    #[test]
    fn large_pieces_share_large_pages_and_are_kept() {
        let bounces = Bounces::new(2 * mapping::LARGE);
        let mut first = bounces.take(LARGE);
        // The other half.
        assert_eq!(bounces.kept.lock().bytes, LARGE);
        let mut second = bounces.take(LARGE - 1);
        assert_eq!(bounces.kept.lock().bytes, 0);
        assert_eq!(
            first.as_ptr().addr().abs_diff(second.as_ptr().addr()),
            LARGE
        );
        first.fill(1);
        second.fill(2);
        assert!(first.iter().all(|&b| b == 1) && second.iter().all(|&b| b == 2));
        drop(first);
        assert!(second.iter().all(|&b| b == 2));
        drop(second);
        assert_eq!(bounces.kept.lock().bytes, 2 * LARGE);
        // No room for another two.
        let full = Bounces::new(mapping::LARGE);
        drop(full.take(LARGE + 1));
        assert_eq!(full.kept.lock().bytes, mapping::LARGE);
        drop(full.take(LARGE));
        assert_eq!(full.kept.lock().bytes, mapping::LARGE);
    }
}
