//! Threads in the background: they do the jobs that operations make, in time that they take from cores.
//!
//! 1. A thread in the background takes its time from the core it is on: from one that no operations
//!    run on, where there is one, else from all in turn, [`SLICE`] by slice. The operation that runs there stops where it is, with
//!    the locks that it holds, and goes on after that time. One that waits loses nothing.
//! 2. Each job is made once for each of its cycles of operations. Operations wait when two of them are not done.

use super::super::costs::Time;
use super::{Run, Work};

/// Cycles that may be begun and not done (invariant 2).
const BEHIND: u64 = 2;
/// Time that a thread in the background spends on one core before it moves to the next.
const SLICE: Time = 50_000_000;

/// A thread in the background that leads a job, and how far it is.
pub(super) struct Leader {
    done: u64,
    /// Helpers that still work on parts, and the part that the next free one begins.
    busy: usize,
    next: usize,
    helpers: Vec<usize>,
    running: bool,
    /// When the stage that it is at began, and how long each lasted so far.
    since: Time,
    pub(super) lasted: Vec<Time>,
}

impl Leader {
    /// Of a job of so many stages; the first of these threads is the leader itself.
    pub(super) fn new(helpers: Vec<usize>, stages: usize) -> Leader {
        Leader {
            done: 0,
            busy: 0,
            next: 0,
            helpers,
            running: false,
            since: 0,
            lasted: vec![0; stages],
        }
    }
}

impl Run<'_> {
    /// A thread takes time from its core (invariant 1).
    pub(super) fn steal(&mut self, thread: usize, time: Time) {
        let workers = self.trace.threads.len();
        self.spent.background_all += if self.counting() { time } else { 0 };
        let at = &mut self.threads[thread];
        at.slice += time;
        let core = at.core;
        if at.slice > SLICE {
            let slice = std::mem::take(&mut at.slice);
            self.next_core += 1;
            at.core = match workers < self.machine.cpus {
                true => workers + self.next_core % (self.machine.cpus - workers),
                false => self.next_core % self.machine.cpus,
            };
            if core < workers && !self.threads[core].waits() {
                self.stolen[core] += slice;
            }
        }
    }

    /// What the background took of an operation's core (invariant 1).
    pub(super) fn taken_from(&mut self, thread: usize) -> Time {
        let at = &self.threads[thread];
        if at.job.is_some() {
            return 0;
        }
        let stolen = std::mem::take(&mut self.stolen[at.core]);
        self.spent.background += if self.counting() { stolen } else { 0 };
        stolen
    }

    /// Begins an operation, or waits for the background (invariants 1 and 2).
    pub(super) fn next_operation(&mut self, thread: usize, now: Time) {
        let mut jobs = self.leaders.iter().zip(&self.trace.jobs);
        if jobs.any(|(leader, job)| self.begun >= (leader.done + BEHIND) * job.cycle) {
            self.threads[thread].behind_since.get_or_insert(now);
            self.waiting_for_background.push(thread);
            return;
        }
        self.begun += 1;
        if let Some(since) = self.threads[thread].behind_since.take()
            && self.counting()
        {
            self.spent.behind += now - since.max(self.from.unwrap_or(0));
        }
        self.at(now, thread);
    }

    pub(super) fn begin_job(&mut self, job: usize, now: Time) {
        let leader = &mut self.leaders[job];
        if leader.running || self.finished / self.trace.jobs[job].cycle <= leader.done {
            return;
        }
        leader.running = true;
        leader.since = now;
        let thread = leader.helpers[0];
        self.threads[thread].work = Work::Serial { stage: 0, step: 0 };
        self.at(now, thread);
    }

    pub(super) fn end_serial(&mut self, thread: usize, stage: usize, now: Time) {
        let Some(job) = self.threads[thread].job else {
            return;
        };
        let parts = self.trace.jobs[job].stages[stage].parts.len();
        if parts == 0 {
            return self.end_stage(thread, job, stage, now);
        }
        let helpers = self.leaders[job].helpers.clone();
        self.leaders[job].busy = helpers.len();
        self.leaders[job].next = 0;
        for helper in helpers {
            self.next_part(helper, stage, now);
        }
    }

    /// A helper takes the next part, or has none any more.
    pub(super) fn next_part(&mut self, thread: usize, stage: usize, now: Time) {
        let Some(job) = self.threads[thread].job else {
            return;
        };
        let leader = &mut self.leaders[job];
        if leader.next < self.trace.jobs[job].stages[stage].parts.len() {
            let part = leader.next;
            leader.next += 1;
            self.threads[thread].work = Work::Part {
                stage,
                part,
                step: 0,
            };
            return self.at(now, thread);
        }
        self.threads[thread].work = Work::Idle;
        leader.busy -= 1;
        if leader.busy == 0 {
            let first = leader.helpers[0];
            self.end_stage(first, job, stage, now);
        }
    }

    /// What one thread did in a stage and the parts that followed are done.
    fn end_stage(&mut self, thread: usize, job: usize, stage: usize, now: Time) {
        let (counting, from) = (self.counting(), self.from.unwrap_or(0));
        let leader = &mut self.leaders[job];
        let since = std::mem::replace(&mut leader.since, now);
        leader.lasted[stage] += match counting {
            true => now - since.max(from),
            false => 0,
        };
        if stage + 1 < self.trace.jobs[job].stages.len() {
            self.threads[thread].work = Work::Serial {
                stage: stage + 1,
                step: 0,
            };
            return self.at(now, thread);
        }
        self.threads[thread].work = Work::Idle;
        self.leaders[job].running = false;
        self.leaders[job].done += 1;
        self.begin_job(job, now);
        for waiting in std::mem::take(&mut self.waiting_for_background) {
            self.at(now, waiting);
        }
    }
}
