//! Syncs of one file that are in flight at once: one call does for all that were handed over before it began.
//!
//! Where each had a thread, all threads that there may be waited for each other at one file, and syncs of other files for a thread.
//!
//! Invariants:
//! 1. A sync is done by a call that begins after it was handed over. If any that the call is for wants times, too, all have them.
//! 2. Threads that are at syncs of a file, or were asked for, are [`AT_ONCE`] at most. What comes beyond waits for one of them, which does all that
//!    waits then in one call. Before the next call it goes behind what others have asked for.
//! 3. Where something waits, a thread is at the file, or was asked for. So it is after a call that panicked.

use super::context::Done;
use super::waiting::Answer;
use crate::data::OpenFile;
use base::canary::{Canary, planted};
use base::map::HashMap;
use base::sync::{Condvar, Mutex, rank};
use base::thread::{GrowingPool, Needs};
use device::AlignedBuf;
use std::sync::Arc;

/// Threads at syncs of one file: while one waits for devices, the next begins. With 256 in flight on one file two had 1.2 times as many as one, and as
/// many as four.
const AT_ONCE: usize = 2;

/// Those of a file system.
#[derive(Debug)]
pub(super) struct Syncs {
    state: Mutex<State>,
    /// Some are done.
    done: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// By [`OpenFile::identity`]: who waits here keeps it from becoming another file's.
    files: HashMap<usize, AtFile>,
    /// Syncs that were handed over.
    given: u64,
}

#[derive(Debug, Default)]
struct AtFile {
    threads: usize,
    /// In the order of their numbers.
    waiting: Vec<Sync>,
    /// The first of each call.
    under_way: Vec<u64>,
}

#[derive(Debug)]
struct Sync {
    number: u64,
    file: Arc<OpenFile>,
    data_only: bool,
    answer: Answer,
}

impl Syncs {
    pub fn new() -> Arc<Syncs> {
        Arc::new(Syncs {
            state: Mutex::new(rank::LEAF, State::default()),
            done: Condvar::new(),
        })
    }

    /// Has the pool make a file durable, and answer.
    pub fn ask(
        self: &Arc<Self>,
        pool: &Arc<GrowingPool>,
        file: Arc<OpenFile>,
        data_only: bool,
        answer: Answer,
    ) {
        let key = file.identity();
        {
            let mut state = self.state.lock();
            let number = state.given;
            state.given += 1;
            let at = state.files.entry(key).or_default();
            at.waiting.push(Sync {
                number,
                file,
                data_only,
                answer,
            });
            if at.threads == AT_ONCE {
                return;
            }
            at.threads += 1;
        }
        self.give(pool, key);
    }

    fn give(self: &Arc<Self>, pool: &Arc<GrowingPool>, key: usize) {
        let turn = Turn {
            syncs: Arc::clone(self),
            pool: Arc::clone(pool),
            key,
            first: None,
        };
        pool.give(Needs::Wait, move || turn.run());
    }

    /// Waits until all that were handed over before are done.
    pub fn finish(&self) {
        let mut state = self.state.lock();
        let given = state.given;
        while !state.is_done(given) {
            self.done.wait(&mut state);
        }
    }
}

impl State {
    /// All syncs with numbers below this one.
    fn is_done(&self, number: u64) -> bool {
        self.files.values().all(|at| {
            let waiting = at.waiting.first().map(|sync| &sync.number);
            let mut left = at.under_way.iter().chain(waiting);
            left.all(|other| *other >= number)
        })
    }
}

/// Of a thread, at the syncs of a file.
struct Turn {
    syncs: Arc<Syncs>,
    pool: Arc<GrowingPool>,
    key: usize,
    /// The first sync that it does.
    first: Option<u64>,
}

impl Turn {
    fn run(mut self) {
        let mut all = self.take();
        let Some(first) = all.first() else {
            // A thread that was faster has done it.
            return;
        };
        let data_only = all.iter().all(|sync| sync.data_only);
        let handles: Vec<&OpenFile> = all.iter().map(|sync| &*sync.file).collect();
        let mut told = first.file.files().fsync_together(&handles, data_only);
        if planted(Canary::SyncJoined)
            && let Some(at) = self.syncs.state.lock().files.get_mut(&self.key)
        {
            told.extend(
                at.waiting
                    .iter()
                    .map(|_| told[0].clone())
                    .collect::<Vec<_>>(),
            );
            all.append(&mut at.waiting);
        }
        for (sync, result) in all.into_iter().zip(told) {
            let Sync {
                file, mut answer, ..
            } = sync;
            // That may delete the file.
            drop(file);
            answer.tell(Done {
                buf: AlignedBuf::zeroed(0),
                offset: None,
                result: result.map(|()| 0),
            });
        }
    }

    fn take(&mut self) -> Vec<Sync> {
        let mut state = self.syncs.state.lock();
        let at = state.files.entry(self.key).or_default();
        let all = std::mem::take(&mut at.waiting);
        self.first = all.first().map(|sync| sync.number);
        at.under_way.extend(self.first);
        all
    }
}

/// Invariant 3.
impl Drop for Turn {
    fn drop(&mut self) {
        let goes_on = {
            let mut state = self.syncs.state.lock();
            let Some(at) = state.files.get_mut(&self.key) else {
                return;
            };
            at.under_way.retain(|first| Some(*first) != self.first);
            let goes_on = !at.waiting.is_empty();
            if !goes_on {
                at.threads -= 1;
                if at.threads == 0 {
                    state.files.remove(&self.key);
                }
            }
            goes_on
        };
        self.syncs.done.notify_all();
        if goes_on {
            self.syncs.give(&self.pool, self.key);
        }
    }
}
