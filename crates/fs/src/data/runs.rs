//! Runs of requests through one handle: each goes on where one before it ended.
//!
//! Threads that share a handle go through the file at several places at once. So a handle knows up to [`RUNS`] of each sort, by where they go on; a request
//! that goes on with none begins another, in place of one that has just begun, if there is such a one, or else of any.
//!
//! Threads that take large requests in turn from one file come out of their order. A large request that begins near where a run goes on is that run's, too, as
//! long as what was left out comes soon after: a run has at most [`LEFT_MOST`] requests' worth of *gaps*. One that leaves out more strides over the file, and for a while
//! the handle's runs are in order or none.
//!
//! These are hints only: threads that note at once may lose one's note, which costs a wrong guess.

use super::stream::Reader;
use base::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
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
const LEFT_MOST: u64 = 64;
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

#[derive(Debug, Default)]
struct Run<R> {
    /// The byte where it goes on.
    next: AtomicU64,
    /// Bytes before that which were left out so far.
    gaps: AtomicU64,
    /// Some of that came later.
    filled: AtomicBool,
    known: R,
}

impl<R> Run<R> {
    /// Goes on with a large request, wherever it begins.
    fn go_on_near(&self, bytes: &Range<u64>) {
        let next = self.next.fetch_max(bytes.end, Ordering::Relaxed);
        if bytes.start > next {
            let more = |gaps: u64| {
                let most = LEFT_MOST * (bytes.end - bytes.start);
                Some((gaps + (bytes.start - next)).min(most))
            };
            // It has a new value whatever it was.
            let _ = self
                .gaps
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
            return;
        }
        let filled = bytes.end.min(next) - bytes.start;
        if filled > 0 {
            self.filled.store(true, Ordering::Relaxed);
            let less = |gaps: u64| Some(gaps.saturating_sub(filled));
            let _ = self
                .gaps
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }

    fn nearness(&self, bytes: &Range<u64>) -> Nearness {
        let len = bytes.end - bytes.start;
        let next = self.next.load(Ordering::Relaxed);
        let gaps = self.gaps.load(Ordering::Relaxed);
        let (ahead, behind) = (bytes.start.checked_sub(next), next.checked_sub(bytes.end));
        match (ahead, behind) {
            // Nothing has come before it.
            _ if next == NOWHERE || next == 0 => Nearness::Far,
            (Some(gap), _) if gap > GAP_MOST * len => Nearness::Far,
            (Some(gap), _) if gaps + gap > LEFT_MOST * len => Nearness::Strides,
            (Some(_), _) => Nearness::Near,
            // It must have been left out.
            (None, Some(behind)) if behind <= LEFT_MOST * 2 * len && gaps >= len => Nearness::Near,
            (None, _) => Nearness::Far,
        }
    }

    fn begin(&self, next: u64) {
        self.next.store(next, Ordering::Relaxed);
        self.gaps.store(0, Ordering::Relaxed);
        self.filled.store(false, Ordering::Relaxed);
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
            gaps: AtomicU64::new(0),
            filled: AtomicBool::new(false),
            known: R::default(),
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

    /// As [`go_on`](Self::go_on), of a large request that goes on with none in order: the run that it is near to. `strides`: one that leaves out much is one, too.
    #[cold]
    fn go_on_near(&self, bytes: Range<u64>, strides: bool) -> Option<&R> {
        let strict = self.strict.load(Ordering::Relaxed);
        if strict > 0 {
            self.strict.store(strict - 1, Ordering::Relaxed);
            return None;
        }
        let mut refused = false;
        for run in self.iter() {
            match run.nearness(&bytes) {
                Nearness::Strides if !strides => refused = true,
                Nearness::Near | Nearness::Strides => {
                    run.go_on_near(&bytes);
                    return Some(&run.known);
                }
                Nearness::Far => {}
            }
        }
        if refused && !self.iter().any(|run| run.filled.load(Ordering::Relaxed)) {
            self.strict.store(STRICT, Ordering::Relaxed);
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
            None if len >= near_min() => self.0.go_on_near(offset..end, false)?,
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
        let near = || (near && len >= near_min()).then(|| self.0.go_on_near(offset..end, true))?;
        let run = match self.0.go_on(offset, end).or_else(near) {
            Some(run) => run,
            None => {
                // What is one request as this is has gone on with none.
                let is_new = |run: &AtomicU64| run.load(Ordering::Relaxed) <= len;
                let run = self.0.begin(end, is_new);
                run.store(0, Ordering::Relaxed);
                run
            }
        };
        let before = run.load(Ordering::Relaxed);
        run.store(before + len, Ordering::Relaxed);
        before
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
            let near = (STRICT as usize + 1) * 1000 / (STRICT + LEFT_MOST as u32) as usize;
            assert!(missed + 200 > near, "{missed} by {stride}");
        }
        // Nor is what has been read already left out.
        let again = [0, 1, 2, 3, 2, 2, 2];
        assert_eq!(read_at(&ReadRuns::default(), again).0, 3);
        // Nor what lies far away.
        assert_eq!(read_at(&ReadRuns::default(), [0, 1, 30, 300]).0, 2);
    }

    #[test]
    fn writes_over_a_file_may_stride() {
        let writes = WriteRuns::default();
        for step in 0..300 {
            let before = writes.go_on(2 * step * LARGE, LARGE as usize, true);
            assert_eq!(before, step * LARGE);
        }
        // Behind it is what was left out, as much of it as is remembered.
        let before = writes.go_on(501 * LARGE, LARGE as usize, true);
        assert_eq!(before, 300 * LARGE);
        // In order or none.
        assert_eq!(writes.go_on(503 * LARGE, LARGE as usize, false), 0);
    }
}
