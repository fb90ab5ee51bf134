//! Runs of requests through one handle: each goes on where one before it ended.
//!
//! Threads that share a handle go through the file at several places at once. So a handle knows up to [`RUNS`] of each sort, by where they go on; a request
//! that goes on with none begins another, in place of one that has just begun, if there is such a one, or else of any.
//!
//! These are hints only: threads that note at once may lose one's note, which costs a wrong guess.

use super::stream::Reader;
use base::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::OnceLock;

/// Of each sort.
const RUNS: usize = 4;
/// Where no request begins.
const NOWHERE: u64 = u64::MAX;

/// Runs of one sort, each with what is known of it. Most handles have one.
#[derive(Debug, Default)]
struct Runs<R> {
    first: Run<R>,
    /// Where the one went on that gave way last, while there are no more: who goes on there after all shows that there should be.
    gone: AtomicU64,
    more: OnceLock<Box<More<R>>>,
}

#[derive(Debug, Default)]
struct Run<R> {
    /// The byte where it goes on.
    next: AtomicU64,
    known: R,
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
        run.next.store(end, Ordering::Relaxed);
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
        let run = self.0.go_on(offset, offset.saturating_add(len))?;
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
    /// A large write begins here; returns the bytes of its run before it.
    pub fn go_on(&self, offset: u64, len: usize) -> u64 {
        let (end, len) = (offset + len as u64, len as u64);
        let run = match self.0.go_on(offset, end) {
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
        let go_on = |offset| writes.go_on(offset, 100);
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
}
