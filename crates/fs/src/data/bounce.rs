//! Memory between devices and the cache, kept for the next who needs some: that the kernel makes memory that was never used costs
//! more than a copy of the same size, and to take a page from the heap, aligned and zeroed, as much as all else that a read of one does.
//!
//! Invariants:
//! 1. A piece holds whatever its last user left there. Who takes one fills what it shows to anybody.
//! 2. What is kept is at most [`Bounces::new`]'s bound, and one small piece of each length (60 KiB in all) for each of up to [`LANES`] threads.
//!
//! Small pieces stay with the thread that used them ([`lane`]): threads that read at the same time have no lock in common.
//! Pieces from [`LARGE`] on lie in large pages, as far as there is room to keep them: of a transfer of 1 MiB the kernel looks up each page.
//! One that finds no room when it comes back is let go of, but its memory stays as long as the other half of its large page: at most as much again as is in use.

use base::mapping;
use base::sync::{Latch, Mutex, rank};
use base::thread::lane;
use device::AlignedBuf;
use format::BLOCK_SIZE;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// What is smaller is a small piece.
const LEAST: usize = 64 << 10;
/// The length of the smallest ones; the others' are powers of two up to [`LEAST`].
const SMALLEST: usize = BLOCK_SIZE;
const SMALL_CLASSES: usize = (LEAST / SMALLEST).ilog2() as usize;
/// Threads beyond so many share small pieces.
const LANES: usize = 64;
/// What fills large pages, alone or with others of its length.
const LARGE: usize = 1 << 20;
/// Lengths of kept pieces: powers of two from [`LEAST`] on.
const CLASSES: usize = 7;

/// Pieces that nobody uses at the moment.
#[derive(Debug)]
pub(super) struct Bounces {
    lanes: Box<[Lane]>,
    kept: Mutex<Kept>,
    most: usize,
}

/// Small pieces of a thread, on cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Lane(Latch<[Option<AlignedBuf>; SMALL_CLASSES]>);

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

/// The class of small pieces that have at least so many bytes.
fn small_class_of(bytes: usize) -> Option<usize> {
    let class = bytes.div_ceil(SMALLEST).next_power_of_two().ilog2() as usize;
    (bytes > 0 && class < SMALL_CLASSES).then_some(class)
}

/// The class of pieces that have at least so many bytes.
fn class_of(bytes: usize) -> Option<usize> {
    let class = bytes.div_ceil(LEAST).next_power_of_two().ilog2() as usize;
    (bytes >= LEAST && class < CLASSES).then_some(class)
}

impl Bounces {
    /// Keeps up to `most` bytes.
    pub fn new(most: usize) -> Bounces {
        let lane = |_| Lane(Latch::new(rank::LEAF, Default::default()));
        Bounces {
            lanes: (0..LANES).map(lane).collect(),
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
        if let Some(class) = small_class_of(bytes) {
            let kept = self.lane().lock()[class].take();
            return kept.unwrap_or_else(|| AlignedBuf::zeroed(SMALLEST << class));
        }
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

    fn lane(&self) -> &Latch<[Option<AlignedBuf>; SMALL_CLASSES]> {
        &self.lanes[lane() % LANES].0
    }

    /// Keeps a piece that nobody uses any more, if there is room for it.
    pub fn give(&self, memory: AlignedBuf) {
        if let Some(class) = small_class_of(memory.len()) {
            if SMALLEST << class == memory.len() {
                let _other = self.lane().lock()[class].replace(memory);
            }
            return;
        }
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
    fn a_thread_has_its_small_pieces_again() {
        let bounces = Bounces::new(0);
        for (bytes, len) in [
            (1, 4096),
            (4096, 4096),
            (4097, 8192),
            (LEAST / 2, LEAST / 2),
        ] {
            let mut first = bounces.take_out(bytes);
            assert_eq!(first.len(), len);
            first.fill(9);
            bounces.give(first);
            // A longer one has others.
            assert!(bounces.take_out(2 * len).iter().all(|&b| b == 0));
            let again = bounces.take(bytes);
            assert_eq!((&again[..], again.len()), (&vec![9; bytes][..], bytes));
        }
        // What nobody else could use.
        bounces.give(AlignedBuf::zeroed(5000));
        assert!(bounces.take(5000).iter().any(|&b| b != 0));
        assert_eq!(bounces.kept.lock().bytes, 0);
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
