//! A discrete-event simulation: cores that replay recorded operations, and threads in the
//! background that replay what those operations make.
//!
//! This module has the events: which thread is due, and what its next step is. What a step costs is the
//! machine's to say: of cache lines [`lines`], of locks [`locks`]. What operations make is done in the
//! [`background`].
//!
//! 1. Time never runs backwards: the next step is always that of the thread that is due first.

mod background;
mod lines;
mod locks;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::costs::{Costs, Time};
use super::steps::{Step, Trace};
use background::Leader;
pub use lines::CORES_MAX;
use lines::{Ahead, Line};
use locks::{Lock, Missed};

/// Cycles that a run simulates, and those at its beginning that are not counted.
const CYCLES: u64 = 6;
const WARM_UP: u64 = 2;

/// Whose time a device takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Devices {
    /// The devices' own; see [`Costs::device_rate`].
    Modelled,
    /// This machine's: they are files in memory, and the caller's processor moves the bytes.
    Here,
}

/// What is simulated.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    pub costs: Costs,
    /// Threads of operations run on the first of them, one on each as far as they go.
    pub cpus: usize,
    pub devices: Devices,
}

/// Where the time of operations went; picoseconds of all of them.
#[derive(Clone, Debug, Default)]
pub struct Spent {
    pub compute: Time,
    /// For each line, and for each lock.
    pub lines: Vec<Time>,
    pub locks: Vec<Time>,
    /// Transfers of each line.
    pub transfers: Vec<u64>,
    /// Core time that went to the background.
    pub background: Time,
    /// The same, with that of cores that no operations run on.
    pub background_all: Time,
    /// Waiting for the background.
    pub behind: Time,
    pub device: Time,
}

#[derive(Clone, Debug)]
pub struct Outcome {
    /// In a second.
    pub rate: f64,
    /// Operations that were counted, and the time of all threads meanwhile.
    pub operations: u64,
    pub spent: Spent,
    /// Share of the time that the devices were busy.
    pub device_busy: f64,
    /// How long each stage of each job lasted in all that were counted, what was waited for included; picoseconds.
    pub lasted: Vec<Vec<Time>>,
}

/// Simulates the threads of a trace.
pub fn simulate(trace: &Trace, machine: &Machine) -> Outcome {
    let mut run = Run::new(trace, machine);
    run.go();
    run.outcome()
}

/// What a thread is at.
enum Work {
    /// Operation and step.
    Operation {
        operation: usize,
        step: usize,
    },
    Idle,
    /// What one thread does in a stage of a job.
    Serial {
        stage: usize,
        step: usize,
    },
    /// A part of a stage.
    Part {
        stage: usize,
        part: usize,
        step: usize,
    },
}

struct Thread {
    core: usize,
    work: Work,
    /// In the background: the job it serves.
    job: Option<usize>,
    /// Time spent on this core in the background.
    slice: Time,
    /// Waits for the background since.
    behind_since: Option<Time>,
    /// Waits for a lock since.
    locked_out_since: Option<Time>,
    /// Locks that it holds.
    held: Vec<u32>,
    /// A lock that it tried in vain.
    missed: Option<Missed>,
}

impl Thread {
    /// For others.
    fn waits(&self) -> bool {
        self.behind_since.is_some() || self.locked_out_since.is_some()
    }
}

struct Run<'a> {
    trace: &'a Trace,
    machine: &'a Machine,
    costs: Costs,
    queue: BinaryHeap<Reverse<(Time, u64, usize)>>,
    order: u64,
    threads: Vec<Thread>,
    leaders: Vec<Leader>,
    lines: Vec<Line>,
    locks: Vec<Lock>,
    /// Of each core.
    ahead: Vec<Ahead>,
    /// Time taken from each core by the background, not yet given back.
    stolen: Vec<Time>,
    next_core: usize,
    device_free: Time,
    device_busy: Time,
    waiting_for_background: Vec<usize>,
    begun: u64,
    finished: u64,
    /// When counting began, and ended.
    from: Option<Time>,
    to: Option<Time>,
    spent: Spent,
}

impl<'a> Run<'a> {
    fn new(trace: &'a Trace, machine: &'a Machine) -> Run<'a> {
        let workers = trace.threads.len();
        assert!(machine.cpus <= CORES_MAX && machine.cpus >= 1);
        let operation = |core| Thread {
            core: core % machine.cpus,
            work: Work::Operation {
                operation: 0,
                step: 0,
            },
            job: None,
            slice: 0,
            behind_since: None,
            locked_out_since: None,
            held: Vec::new(),
            missed: None,
        };
        let mut threads: Vec<Thread> = (0..workers).map(operation).collect();
        let mut leaders = Vec::new();
        for (number, job) in trace.jobs.iter().enumerate() {
            let background = |core| Thread {
                core,
                work: Work::Idle,
                job: Some(number),
                slice: 0,
                behind_since: None,
                locked_out_since: None,
                held: Vec::new(),
                missed: None,
            };
            // The leader does parts too.
            let leader = threads.len();
            let parts = job.stages.iter().map(|stage| stage.parts.len()).max();
            let helpers = machine.cpus.min(parts.unwrap_or(0)).max(1);
            threads.extend((0..helpers).map(|i| background(i % machine.cpus)));
            let helpers = (leader..leader + helpers).collect();
            leaders.push(Leader::new(helpers, job.stages.len()));
        }
        Run {
            trace,
            machine,
            costs: machine.costs,
            queue: BinaryHeap::new(),
            order: 0,
            threads,
            leaders,
            lines: vec![Line::default(); trace.lines.len()],
            locks: (0..trace.locks.len()).map(|_| Lock::default()).collect(),
            ahead: vec![Ahead::default(); machine.cpus],
            stolen: vec![0; machine.cpus],
            next_core: 0,
            device_free: 0,
            device_busy: 0,
            waiting_for_background: Vec::new(),
            begun: 0,
            finished: 0,
            from: None,
            to: None,
            spent: Spent {
                lines: vec![0; trace.lines.len()],
                transfers: vec![0; trace.lines.len()],
                locks: vec![0; trace.locks.len()],
                ..Spent::default()
            },
        }
    }

    fn go(&mut self) {
        for worker in 0..self.trace.threads.len() {
            if !self.trace.threads[worker].is_empty() {
                // Not all at the same moment: each begins a little later than the last.
                self.begun += 1;
                self.at(worker as Time * 10_000, worker);
            }
        }
        while self.to.is_none() {
            let Some(Reverse((now, _, thread))) = self.queue.pop() else {
                assert!(self.begun == 0, "all wait for each other: {}", self.waits());
                return;
            };
            self.turn(thread, now);
        }
    }

    fn outcome(self) -> Outcome {
        let (from, to) = (self.from.unwrap_or(0), self.to.unwrap_or(0));
        let seconds = (to - from).max(1) as f64 / 1e12;
        let operations = (CYCLES - WARM_UP) * self.trace.cycle();
        Outcome {
            rate: operations as f64 / seconds,
            operations,
            spent: self.spent,
            device_busy: self.device_busy as f64 / 1e12 / seconds,
            lasted: self.leaders.into_iter().map(|l| l.lasted).collect(),
        }
    }

    /// Invariant 1.
    fn at(&mut self, time: Time, thread: usize) {
        self.order += 1;
        self.queue.push(Reverse((time, self.order, thread)));
    }

    fn counting(&self) -> bool {
        self.from.is_some()
    }

    /// The step that a thread is at.
    fn step(&self, thread: usize) -> Option<Step> {
        let of = |job: usize, stage: usize| &self.trace.jobs[job].stages[stage];
        let at = &self.threads[thread];
        match (&at.work, at.job) {
            (Work::Operation { operation, step }, _) => {
                self.trace.threads[thread][*operation].get(*step).copied()
            }
            (Work::Serial { stage, step }, Some(job)) => of(job, *stage).serial.get(*step).copied(),
            (Work::Part { stage, part, step }, Some(job)) => {
                of(job, *stage).parts[*part].get(*step).copied()
            }
            _ => None,
        }
    }

    fn advance(&mut self, thread: usize) {
        match &mut self.threads[thread].work {
            Work::Operation { step, .. } | Work::Serial { step, .. } | Work::Part { step, .. } => {
                *step += 1
            }
            Work::Idle => {}
        }
    }

    /// What a thread does from now on until it has to wait for time to pass, or for others.
    fn turn(&mut self, thread: usize, now: Time) {
        let taken = self.taken_from(thread);
        if taken > 0 {
            return self.at(now + taken, thread);
        }
        if self.threads[thread].behind_since.is_some() {
            return self.next_operation(thread, now);
        }
        let operation = self.threads[thread].job.is_none();
        let counted = operation && self.counting();
        let core = self.threads[thread].core;
        if let Some(missed) = self.threads[thread].missed
            && missed.is_due()
        {
            return self.make_up(thread, missed, now, counted);
        }
        let step = self.step(thread);
        if let Some(missed) = &mut self.threads[thread].missed
            && missed.falls_due(step)
        {
            return self.at(now, thread);
        }
        let Some(step) = step else {
            return self.end(thread, now);
        };
        let until = match step {
            Step::Compute(time) => {
                if operation {
                    self.spent.compute += if counted { time } else { 0 };
                } else {
                    self.steal(thread, time);
                }
                now + time
            }
            Step::Read(line) => self.touch(core, line, false, now, counted),
            Step::Write(line) => self.touch(core, line, true, now, counted),
            Step::Anew(line) => {
                self.lines[line as usize] = Line::default();
                now
            }
            Step::AnewLock(lock) => {
                self.locks[lock as usize].comes_anew();
                now
            }
            Step::Ahead { line, write } => {
                let asked = self.ask_line(core, line, write, now);
                if counted {
                    self.spent.lines[line as usize] += asked - now;
                }
                asked
            }
            Step::AheadLock(lock) => {
                let asked = self.ask_protected(core, lock, now);
                if counted {
                    self.spent.locks[lock as usize] += asked - now;
                }
                asked
            }
            Step::Lock {
                lock, line, tried, ..
            } if tried && self.misses(thread, lock, line) => {
                self.touch(core, line, false, now, counted)
            }
            Step::Lock {
                lock,
                line,
                exclusive,
                ..
            } => {
                match self.lock(thread, lock, line, exclusive, now, counted) {
                    Some(until) => until,
                    // Whoever unlocks goes on with it.
                    None => return,
                }
            }
            Step::Unlock { lock, line } => self.leave(thread, lock, line, now, counted),
            Step::Own { lock, line } => {
                self.locks[lock as usize].is_changed_by(core);
                self.touch(core, line, true, now, counted)
            }
            Step::Device { bytes, here } => self.device(thread, bytes, here, now, counted),
        };
        self.advance(thread);
        self.at(until, thread);
    }

    fn device(&mut self, thread: usize, bytes: u64, here: Time, now: Time, counted: bool) -> Time {
        let until = match self.machine.devices {
            Devices::Here => {
                if self.threads[thread].job.is_some() {
                    self.steal(thread, here);
                }
                now + here
            }
            Devices::Modelled => {
                let time = (bytes as f64 / self.costs.device_rate * 1e12) as Time;
                self.device_free = self.device_free.max(now) + time;
                self.device_busy += if self.counting() { time } else { 0 };
                self.device_free
            }
        };
        if counted {
            self.spent.device += until - now;
        }
        until
    }

    /// The thread has no step left.
    fn end(&mut self, thread: usize, now: Time) {
        match self.threads[thread].work {
            Work::Operation { .. } => self.end_operation(thread, now),
            Work::Idle => {}
            Work::Part { stage, .. } => self.next_part(thread, stage, now),
            Work::Serial { stage, .. } => self.end_serial(thread, stage, now),
        }
    }

    fn end_operation(&mut self, thread: usize, now: Time) {
        self.finished += 1;
        let cycle = self.trace.cycle();
        if self.finished == WARM_UP * cycle {
            self.from = Some(now);
        }
        if self.finished == CYCLES * cycle {
            self.to = Some(now);
            return;
        }
        for job in 0..self.leaders.len() {
            if self.finished.is_multiple_of(self.trace.jobs[job].cycle) {
                self.begin_job(job, now);
            }
        }
        if let Work::Operation { operation, step } = &mut self.threads[thread].work {
            *operation = (*operation + 1) % self.trace.threads[thread].len();
            *step = 0;
        }
        self.next_operation(thread, now);
    }
}
