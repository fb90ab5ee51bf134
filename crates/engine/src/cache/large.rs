//! Large pages behind what the cache has filled: a read of a page that it did not read lately waits for the address of its
//! set and of its frame otherwise, for each by walks of tables that lie in memory themselves.
//!
//! A thread of its own has them made of small pages that are in use already. Small pages made large as a whole take no more memory than
//! they did, but for one large page while it is found and copied: so the limit holds ([decision 0023](../../../../docs/decisions/0023-large-pages-behind-frames-in-use.md)).
//!
//! Invariants:
//! 1. A chunk of the frames is made large when all its frames have been given to ways, and those of the sets at once, as all are in use.
//! 2. Nothing is made large while frames are given out faster than [`CALM_FRAMES`] in [`CALM`]: a first use would wait for it. Nor,
//!    but once in [`PATIENCE`], while devices have more to do than [`CALM_TRANSFERS`] in that time: a kernel that is not preempted copies a
//!    chunk in one go, and what completes a transfer on that CPU waits for it, and so does a sync.
//!    It is looked again after the large page was found, which takes a while.
//! 3. After each chunk there is a pause of [`REST`] times as long as its readers had to wait, and at least as long as all of it took: who reads pages all over the cache soon meets
//!    the one that is being made large, and waits while 512 pages are copied. That the host of a virtual machine has memory for them, which takes ten times as long, is seen to
//!    before ([`Warmer`]).
//! 4. Who makes a frame the last of its chunk wakes the thread; it sleeps while there is nothing to do.

use super::PageCache;
use super::standby::Standby;
use base::atomic::{AtomicU64, Ordering};
use base::clock::Clock;
use base::mapping::{LARGE, Mapping, Warmer, large_pages_allowed, large_pages_are_usual};
use format::BLOCK_SIZE;
use std::io;
use std::time::Duration;

/// Frames of a chunk.
const CHUNK: usize = LARGE / BLOCK_SIZE;
/// Invariant 2.
const CALM: Duration = Duration::from_millis(20);
const CALM_FRAMES: usize = 64;
const CALM_TRANSFERS: u64 = 2;
const PATIENCE: Duration = Duration::from_secs(4);
/// Invariant 3.
const REST: u32 = 4;
const REST_MAX: Duration = Duration::from_secs(1);
/// Until it is tried again when the kernel has no large page, or somebody has the small ones in hands; twice as long each time, up to the second.
const AGAIN: Duration = Duration::from_millis(100);
const AGAIN_MAX: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct Large {
    standby: Standby,
    /// Bytes that were made large.
    bytes: AtomicU64,
}

impl Large {
    pub fn new() -> Large {
        Large {
            standby: Standby::new(),
            bytes: AtomicU64::new(0),
        }
    }

    /// A frame was given out, by this number (invariant 4).
    #[inline]
    pub fn given(&self, frame: usize) {
        if (frame + 1).is_multiple_of(CHUNK) {
            self.standby.notify();
        }
    }

    pub fn stop(&self) {
        self.standby.stop();
    }
}

/// What was known when it was last looked.
#[derive(Debug, Default)]
struct Calm {
    given: usize,
    transfers: u64,
    /// When the last chunk was made large.
    since_ns: u64,
}

impl Calm {
    /// Whether few frames were given since it was last asked, and the devices had little to do or that has lasted for long.
    fn is_calm(&mut self, given: usize, transfers: u64, passed: Duration) -> bool {
        let frames = given - std::mem::replace(&mut self.given, given);
        let before = std::mem::replace(&mut self.transfers, transfers);
        let moved = transfers.saturating_sub(before);
        frames < CALM_FRAMES && (moved < CALM_TRANSFERS || passed >= PATIENCE)
    }
}

/// The pause after a chunk that took that long, of which readers of it waited for a part.
fn rest(took: Duration, waited: Duration) -> Duration {
    (waited * REST).max(took).min(REST_MAX)
}

impl PageCache {
    /// Whether [`keep_large`](Self::keep_large) has anything to do, ever.
    pub fn may_be_large(&self) -> bool {
        self.capacity() >= CHUNK && large_pages_allowed()
    }

    /// Has large pages made until [`stop_keeping`](Self::stop_keeping), or the kernel refuses: for a thread that does nothing else.
    /// `transfers`: how many the devices have had.
    pub fn keep_large(&self, transfers: impl Fn() -> u64) {
        let (sets, frames) = (self.sets.mapping(), self.frames.mapping());
        // Those behind them are seldom used.
        let all = sets.chunks() + self.capacity() / CHUNK;
        let mut calm = Calm {
            since_ns: Clock::real().monotonic_ns(),
            ..Calm::default()
        };
        // Where all who touch memory get large pages there is nothing to find.
        let mut warmer = match large_pages_are_usual() {
            true => None,
            false => Warmer::new(),
        };
        for done in 0..all {
            let (mapping, chunk) = match done.checked_sub(sets.chunks()) {
                None => (sets, done),
                Some(chunk) => (frames, chunk),
            };
            let needed = match std::ptr::eq(mapping, frames) {
                true => (chunk + 1) * CHUNK,
                false => 0,
            };
            if !self.await_given(needed) {
                return;
            }
            let made = self.make_large(mapping, chunk, &mut calm, &mut warmer, &transfers);
            if made.is_none_or(|rest| self.large.standby.pause(rest)) {
                return;
            }
        }
    }

    /// Bytes that large pages were put behind.
    pub fn large_bytes(&self) -> u64 {
        self.large.bytes.load(Ordering::Relaxed)
    }

    /// Waits until so many frames are given. False: it is stopped.
    fn await_given(&self, frames: usize) -> bool {
        let given = || self.given.load(Ordering::Relaxed);
        self.large.standby.await_that(|| given() >= frames)
    }

    /// Waits until nobody is in the way (invariant 2). False: it is stopped.
    fn await_calm(&self, calm: &mut Calm, transfers: &impl Fn() -> u64) -> bool {
        while !self.large.standby.is_stopped() {
            if self.is_calm(calm, transfers) {
                return true;
            }
            self.large.standby.pause(CALM);
        }
        false
    }

    fn is_calm(&self, calm: &mut Calm, transfers: &impl Fn() -> u64) -> bool {
        let given = self.given.load(Ordering::Relaxed);
        let passed_ns = Clock::real().monotonic_ns().saturating_sub(calm.since_ns);
        calm.is_calm(given, transfers(), Duration::from_nanos(passed_ns))
    }

    /// For how long to rest then. `None`: it is stopped, or the kernel does not do that.
    fn make_large(
        &self,
        mapping: &Mapping,
        chunk: usize,
        calm: &mut Calm,
        warmer: &mut Option<Warmer>,
        transfers: &impl Fn() -> u64,
    ) -> Option<Duration> {
        let (clock, mut again) = (Clock::real(), AGAIN);
        while self.await_calm(calm, transfers) {
            let began_ns = clock.monotonic_ns();
            if let Some(Err(error)) = warmer.as_mut().map(Warmer::warm) {
                tracing::debug!("large pages are not found ahead: {error}");
                *warmer = None;
            }
            // That takes a while.
            if warmer.is_some() && !self.is_calm(calm, transfers) {
                continue;
            }
            let warm_ns = clock.monotonic_ns();
            match mapping.make_large(chunk) {
                Ok(()) => {
                    self.large.bytes.fetch_add(LARGE as u64, Ordering::Relaxed);
                    calm.since_ns = clock.monotonic_ns();
                    let waited = Duration::from_nanos(calm.since_ns - warm_ns);
                    let took = Duration::from_nanos(calm.since_ns - began_ns);
                    return Some(rest(took, waited));
                }
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                    tracing::info!("no large pages for the page cache: {error}");
                    return None;
                }
                Err(error) => {
                    tracing::debug!("no large page for the page cache now: {error}");
                    self.large.standby.pause(again);
                    again = (again * 2).min(AGAIN_MAX);
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_rests_after_a_chunk_for_readers_and_for_the_cpu() {
        let ms = Duration::from_millis;
        assert_eq!(rest(ms(5), ms(5)), ms(20));
        assert_eq!(rest(ms(5), ms(1)), ms(5));
        assert_eq!(rest(ms(5000), ms(900)), REST_MAX);
    }

    #[test]
    fn neither_first_uses_nor_transfers_wait_for_a_large_page() {
        let mut calm = Calm::default();
        let soon = Duration::from_millis(20);
        assert!(!calm.is_calm(1000, 0, soon));
        assert!(calm.is_calm(1000 + CALM_FRAMES - 1, 1, soon));
        assert!(!calm.is_calm(1100, 1 + CALM_TRANSFERS, soon));
        assert!(calm.is_calm(1100, 1 + CALM_TRANSFERS, soon));
        // Devices that always have something to do hold it up, and do not prevent it; first uses do.
        assert!(calm.is_calm(1100, 1_000, PATIENCE));
        assert!(!calm.is_calm(2000, 1_000, PATIENCE));
    }
}
