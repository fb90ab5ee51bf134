//! Runs of requests through one handle: each goes on where one before it ended.
//!
//! Threads that share a handle go through the file at several places at once. So a handle knows up to [`RUNS`] of each sort, by where they go on; a request
//! that goes on with none begins another, in place of one that has just begun, if there is such a one, or else of any.
//!
//! Threads that take large requests in turn from one file come out of their order. A large request that begins near where a run goes on is that run's, too, as
//! long as all requests are of one length and what was left out comes soon after: of the last [`KNOWN`] requests' worth before that place a run knows which were left out, and what comes behind
//! must be among them. Reads here and there meet such places by chance: nothing is done for a run by being near before it has had [`SURE`] requests, and at most
//! one left out for two that came. One that leaves out more than [`LEFT_MOST`] strides over the file, and for a while the handle's runs are in order or none.
//!
//! These are hints only: threads that note at once may lose one's note, which costs a wrong guess.

use super::stream::Reader;
use base::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use base::sync::{Mutex, rank};
use base::tight;
use format::BLOCK_SIZE;
use std::ops::Range;
use std::sync::OnceLock;

/// Of each sort.
const RUNS: usize = 4;
/// Bytes of a request that may come out of its order, at least.
const NEAR_MIN: usize = 64 << 10;
/// So many requests may be left out at once, and in all: a thread that has to wait for a CPU loses some ms to the others.
const GAP_MOST: u64 = 16;
const LEFT_MOST: u32 = 48;
/// So many requests before the next one are known, each by a bit.
const KNOWN: u32 = u128::BITS;
const SURE: u32 = 16;
/// So many requests of a handle are no run's by being near, after a run that came back for nothing that it had left out.
const STRICT: u32 = 256;
/// Where no request begins.
const NOWHERE: u64 = u64::MAX;

fn near_min() -> u64 {
    tight::limit(NEAR_MIN, 2 * BLOCK_SIZE) as u64
}

/// Runs of one sort, each with what is known of it. Most handles have one.
#[derive(Debug, Default)]
struct Runs<R> {
    first: Run<R>,
    /// Where the one went on that gave way last, while there are no more: who goes on there after all shows that there should be.
    gone: AtomicU64,
    more: OnceLock<Box<More<R>>>,
    /// Requests that have to be in order.
    strict: AtomicU32,
}

#[derive(Debug)]
struct Run<R> {
    /// The byte where it goes on.
    next: AtomicU64,
    /// What is known of large requests.
    near: Mutex<Near>,
    known: R,
}

impl<R: Default> Default for Run<R> {
    fn default() -> Run<R> {
        Run {
            next: AtomicU64::new(0),
            near: Mutex::new(rank::LEAF, Near::default()),
            known: R::default(),
        }
    }
}

/// What of the requests before some byte was left out.
#[derive(Clone, Copy, Debug, Default)]
struct Near {
    next: u64,
    /// Of each request.
    len: u64,
    /// The lowest bit is the last request's before `next`. 1: it was left out.
    left: u128,
    /// Requests that came, up to [`KNOWN`].
    came: u32,
    /// Some that were left out have come later.
    filled: bool,
}

impl Near {
    /// So many requests came in order.
    fn go_on(&mut self, next: u64, requests: u64) {
        self.left = match requests < u64::from(KNOWN) {
            true => self.left << requests,
            false => 0,
        };
        self.came = (u64::from(self.came) + requests).min(u64::from(KNOWN)) as u32;
        self.next = next;
    }

    /// Follows what the run did in order since.
    fn follow(&mut self, next: u64, len: u64) {
        let since = next.wrapping_sub(self.next);
        if self.len != len || next < self.next || !since.is_multiple_of(len) {
            *self = Near {
                next,
                len,
                ..Near::default()
            };
        } else if since > 0 {
            self.go_on(next, since / len);
        }
    }

    /// Goes on with a request, if it is near.
    fn take(&mut self, bytes: &Range<u64>) -> Nearness {
        if let Some(gap) = bytes.start.checked_sub(self.next) {
            let gaps = gap / self.len;
            if !gap.is_multiple_of(self.len) || gaps > GAP_MOST {
                return Nearness::Far;
            }
            let mut after = *self;
            after.go_on(bytes.end, gaps + 1);
            after.came = (self.came + 1).min(KNOWN);
            after.left |= ((1 << gaps) - 1) << 1;
            if after.left.count_ones() > LEFT_MOST {
                return Nearness::Strides;
            }
            *self = after;
            return Nearness::Near;
        }
        let Some(behind) = self.next.checked_sub(bytes.end) else {
            return Nearness::Far;
        };
        let place = behind / self.len;
        let known = behind.is_multiple_of(self.len) && place < u64::from(KNOWN);
        if !known || self.left >> place & 1 == 0 {
            return Nearness::Far;
        }
        self.left &= !(1 << place);
        self.came = (self.came + 1).min(KNOWN);
        self.filled = true;
        Nearness::Near
    }

    fn is_sure(&self) -> bool {
        self.came >= SURE && 2 * self.left.count_ones() <= self.came
    }
}

impl<R> Run<R> {
    /// Goes on with a large request that is near, and whether that is sure.
    fn go_on_near(&self, bytes: &Range<u64>) -> (Nearness, bool) {
        let mut near = self.near.lock();
        let next = self.next.load(Ordering::Relaxed);
        // Nothing has come before it.
        if next == NOWHERE || next == 0 {
            return (Nearness::Far, false);
        }
        near.follow(next, bytes.end - bytes.start);
        let mut nearness = near.take(bytes);
        if nearness == Nearness::Strides && near.filled {
            nearness = Nearness::Far;
        }
        if near.next > next {
            self.next.fetch_max(near.next, Ordering::Relaxed);
        }
        (nearness, near.is_sure())
    }

    fn begin(&self, next: u64) {
        let mut near = self.near.lock();
        self.next.store(next, Ordering::Relaxed);
        *near = Near::default();
    }
}

/// How a request lies to a run that does not go on with it in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Nearness {
    Near,
    /// It would be, if less had been left out before.
    Strides,
    Far,
}

#[derive(Debug)]
struct More<R> {
    runs: [Run<R>; RUNS - 1],
    /// Which one gives way next.
    turn: AtomicUsize,
}

impl<R: Default> More<R> {
    fn new() -> Box<More<R>> {
        let run = |_| Run {
            next: AtomicU64::new(NOWHERE),
            ..Run::default()
        };
        Box::new(More {
            runs: std::array::from_fn(run),
            turn: AtomicUsize::new(0),
        })
    }
}

impl<R: Default> Runs<R> {
    fn iter(&self) -> impl Iterator<Item = &Run<R>> {
        let more = self.more.get().into_iter();
        std::iter::once(&self.first).chain(more.flat_map(|more| &more.runs))
    }

    /// What goes on here, and does so up to `end`.
    #[inline]
    fn go_on(&self, offset: u64, end: u64) -> Option<&R> {
        let is_here = |run: &&Run<R>| {
            let next = run.next.load(Ordering::Relaxed);
            next == offset && next != NOWHERE
        };
        let run = match (is_here(&&self.first), self.more.get()) {
            (true, _) => &self.first,
            (false, Some(more)) => more.runs.iter().find(is_here)?,
            (false, None) if self.gone.load(Ordering::Relaxed) == offset && offset > 0 => {
                &self.more.get_or_init(More::new).runs[0]
            }
            (false, None) => return None,
        };
        run.next.store(end, Ordering::Relaxed);
        Some(&run.known)
    }

    /// As [`go_on`](Self::go_on), of a large request that goes on with none in order: the run that it is near to, and whether that is sure.
    #[cold]
    fn go_on_near(&self, bytes: Range<u64>) -> Option<(&R, bool)> {
        let strict = self.strict.load(Ordering::Relaxed);
        if strict > 0 {
            self.strict.store(strict - 1, Ordering::Relaxed);
            return None;
        }
        for run in self.iter() {
            match run.go_on_near(&bytes) {
                (Nearness::Near, sure) => return Some((&run.known, sure)),
                (Nearness::Strides, _) => {
                    self.strict.store(STRICT, Ordering::Relaxed);
                    return None;
                }
                (Nearness::Far, _) => {}
            }
        }
        None
    }

    /// A run that begins takes the place of one that is new, or else of another, in turn.
    fn begin(&self, end: u64, is_new: impl Fn(&R) -> bool) -> &R {
        // A request may begin more than once: at each place where it has to wait.
        let again = |run: &&Run<R>| run.next.load(Ordering::Relaxed) == end && is_new(&run.known);
        if let Some(run) = self.iter().find(again) {
            return &run.known;
        }
        let run = match self.more.get() {
            None if is_new(&self.first.known) => {
                let gone = self.first.next.load(Ordering::Relaxed);
                self.gone.store(gone, Ordering::Relaxed);
                &self.first
            }
            more => {
                let more = more.unwrap_or_else(|| self.more.get_or_init(More::new));
                let turn = more.turn.load(Ordering::Relaxed);
                more.turn.store(turn.wrapping_add(1), Ordering::Relaxed);
                let place = |at: usize| match at % RUNS {
                    0 => &self.first,
                    at => &more.runs[at - 1],
                };
                // The first one goes last: it was there before.
                let mut places = (turn + 1..turn + 1 + RUNS).map(place);
                let new = places.find(|run| is_new(&run.known));
                new.unwrap_or_else(|| place(turn + 1))
            }
        };
        run.begin(end);
        &run.known
    }
}

/// Reads, one behind the other.
#[derive(Debug, Default)]
pub(super) struct ReadRun {
    /// Pages to read ahead.
    ahead: AtomicU64,
    /// Up to this page the threads that read ahead have been asked; 0: they have not.
    pub(super) asked: AtomicU64,
    pub(super) reader: Reader,
}

impl ReadRun {
    /// Tells it from others that there are.
    pub fn id(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}

/// Those of a handle.
#[derive(Debug, Default)]
pub(super) struct ReadRuns(Runs<ReadRun>);

impl ReadRuns {
    /// The run that a request goes on with, and the pages to read beyond it: they double while reading goes on so, up to `most`; `all`: that many at once.
    /// `None`: it begins elsewhere. That is noted if it misses ([`jumped`](Self::jumped)) and not before: who reads here and there
    /// what is cached writes nothing that others with this handle read.
    #[inline]
    pub fn go_on(&self, offset: u64, len: u64, most: u64, all: bool) -> Option<(&ReadRun, u64)> {
        let end = offset.saturating_add(len);
        let run = match self.0.go_on(offset, end) {
            Some(run) => run,
            None if len >= near_min() => match self.0.go_on_near(offset..end)? {
                (run, true) => run,
                (run, false) => return Some((run, 0)),
            },
            None => return None,
        };
        let before = run.ahead.load(Ordering::Relaxed);
        let window = match all {
            true => most,
            false => (before * 2).max(8).min(most),
        };
        if window != before {
            run.ahead.store(window, Ordering::Relaxed);
            if before == 0 {
                run.reader.begin(offset);
            }
        }
        Some((run, window))
    }

    /// A request that began elsewhere waits for a device: one that begins at its end goes on from there.
    pub fn jumped(&self, end: u64) {
        let is_new = |run: &ReadRun| run.ahead.load(Ordering::Relaxed) == 0;
        let run = self.0.begin(end, is_new);
        run.reader.begin(end);
        run.ahead.store(0, Ordering::Relaxed);
        // What was asked for is of a run that has ended.
        run.asked.store(0, Ordering::Relaxed);
    }

    pub fn iter(&self) -> impl Iterator<Item = &ReadRun> {
        self.0.iter().map(|run| &run.known)
    }

    /// Where each goes on, and what is read ahead of it.
    #[cfg(test)]
    pub fn shown(&self) -> Vec<(u64, u64)> {
        let read = |number: &AtomicU64| number.load(Ordering::Relaxed);
        let shown = self
            .0
            .iter()
            .map(|run| (read(&run.next), read(&run.known.ahead)));
        shown.filter(|(next, _)| *next != NOWHERE).collect()
    }
}

/// Large writes, one behind the other: the bytes of each run.
#[derive(Debug, Default)]
pub(super) struct WriteRuns(Runs<AtomicU64>);

impl WriteRuns {
    /// A large write begins here; returns the bytes of its run before it. `near`: it may be out of its order.
    pub fn go_on(&self, offset: u64, len: usize, near: bool) -> u64 {
        let (end, len) = (offset + len as u64, len as u64);
        let run = match self.0.go_on(offset, end) {
            Some(run) => run,
            None if near && len >= near_min() => match self.0.go_on_near(offset..end) {
                Some((run, true)) => run,
                Some((_, false)) => return 0,
                None => self.begin(end, len),
            },
            None => self.begin(end, len),
        };
        let before = run.load(Ordering::Relaxed);
        run.store(before + len, Ordering::Relaxed);
        before
    }

    fn begin(&self, end: u64, len: u64) -> &AtomicU64 {
        // What is one request as this has gone on with none.
        let is_new = |run: &AtomicU64| run.load(Ordering::Relaxed) <= len;
        let run = self.0.begin(end, is_new);
        run.store(0, Ordering::Relaxed);
        run
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_one_handle_go_on_beside_each_other() {
        let reads = ReadRuns::default();
        let window = |offset| {
            reads
                .go_on(offset, 10, 64, false)
                .map(|(run, window)| (run.id(), window))
        };
        let first = window(0).unwrap();
        assert_eq!(
            (window(10).unwrap(), window(20).unwrap().1),
            ((first.0, 16), 32)
        );
        assert!(window(1000).is_none());
        reads.jumped(1010);
        let second = window(1010).unwrap();
        assert_ne!(first.0, second.0);
        assert_eq!(
            (window(30), window(1020)),
            (Some((first.0, 64)), Some((second.0, 16)))
        );
        // Reads here and there push out each other.
        for offset in (5000..9000).step_by(100) {
            assert!(window(offset).is_none());
            reads.jumped(offset + 10);
        }
        assert_eq!(
            (window(40), window(1030)),
            (Some((first.0, 64)), Some((second.0, 32)))
        );
        // More than there is place for: one of them ends.
        for start in [20_000, 30_000, 40_000] {
            reads.jumped(start);
            assert!(window(start).is_some());
        }
        let left = [50, 1040, 20_010, 30_010, 40_010].map(|at| window(at).is_some());
        assert_eq!(left.iter().filter(|&&left| left).count(), RUNS, "{left:?}");
    }

    #[test]
    fn writes_of_one_handle_are_runs_each_by_itself() {
        let writes = WriteRuns::default();
        let go_on = |offset| writes.go_on(offset, 100, true);
        assert_eq!([go_on(0), go_on(10_000)], [0; 2]);
        for step in 1..5 {
            let runs = [go_on(step * 100), go_on(10_000 + step * 100)];
            assert_eq!(runs, [(step - 1) * 100, step * 100]);
        }
        for offset in (50_000..90_000).step_by(1000) {
            assert_eq!(go_on(offset), 0);
        }
        assert_eq!(go_on(500), 400, "it gave way once");
        assert_eq!(go_on(10_500), 500);
    }

    const LARGE: u64 = NEAR_MIN as u64;

    /// Reads at these places, each by one request; returns how many were none of a run, and the runs that the others were of.
    fn read_at(reads: &ReadRuns, places: impl IntoIterator<Item = u64>) -> (usize, Vec<usize>) {
        let (mut missed, mut runs) = (0, Vec::new());
        for place in places {
            let offset = place * LARGE;
            match reads.go_on(offset, LARGE, 64, false) {
                Some((run, _)) => runs.push(run.id()),
                None => {
                    missed += 1;
                    reads.jumped(offset + LARGE);
                }
            }
        }
        runs.dedup();
        (missed, runs)
    }

    #[test]
    fn large_requests_in_turn_are_one_run_whatever_their_order() {
        let pairs = (0..500).flat_map(|pair| [2 * pair + 1, 2 * pair]);
        let (missed, runs) = read_at(&ReadRuns::default(), pairs);
        // The first two may be each other's.
        assert!(missed <= 2 && runs.len() <= 3, "{missed}, {runs:?}");
        // One of two is behind, and comes back, over and over.
        let behind = (0..10).flat_map(|round| {
            let first = round * 60;
            let (one, other) = (first..first + 60).partition::<Vec<u64>, _>(|at| at % 2 == 0);
            one.into_iter().chain(other)
        });
        let (missed, runs) = read_at(&ReadRuns::default(), behind);
        assert!(missed == 0 && runs.len() == 1, "{missed}, {runs:?}");
        // Small ones are not.
        let reads = ReadRuns::default();
        assert!(reads.go_on(0, 10, 64, false).is_some());
        assert!(reads.go_on(20, 10, 64, false).is_none());
    }

    #[test]
    fn who_comes_back_for_nothing_has_no_run() {
        for stride in [2, 5] {
            let strides = (0..1000).map(|at| at * stride);
            let (missed, _) = read_at(&ReadRuns::default(), strides);
            assert!(missed >= 750, "{missed} by {stride}");
        }
        // Nor is what has been read already left out.
        let again = [0, 1, 2, 3, 2, 2, 2];
        assert_eq!(read_at(&ReadRuns::default(), again).0, 3);
        // Nor what lies far away.
        assert_eq!(read_at(&ReadRuns::default(), [0, 1, 30, 300]).0, 2);
    }

    #[test]
    fn requests_here_and_there_are_no_runs() {
        for (slots, most) in [(64, 10), (256, 2), (1024, 2)] {
            let (reads, writes) = (ReadRuns::default(), WriteRuns::default());
            let mut rng = base::rng::Rng::new(slots);
            let (mut ahead, mut past) = (0, 0);
            for _ in 0..5000 {
                let offset = rng.below(slots) * LARGE;
                match reads.go_on(offset, LARGE, 64, false) {
                    Some((_, window)) => ahead += u32::from(window > 0),
                    None => reads.jumped(offset + LARGE),
                }
                let run = writes.go_on(offset, LARGE as usize, true);
                past += u32::from(run >= 64 * LARGE);
            }
            let found = (ahead / 50, past / 50);
            assert!(found.0 <= most + 8 && found.1 <= most, "{found:?} of 100");
        }
    }
}
