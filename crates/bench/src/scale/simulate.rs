//! A discrete-event simulation: cores that replay recorded operations, and threads in the
//! background that replay what those operations make.
//!
//! 1. Time never runs backwards: the next step is always that of the thread that is due first.
//! 2. A line is where its last writer is, and with whoever has read it since. Reading it from
//!    elsewhere fetches it; writing it fetches it, takes all copies away, and nobody else fetches
//!    it meanwhile. So a line that all write is handed on one after the other.
//!    What is asked for ahead comes meanwhile, [`Costs::fills`] lines at once; who asks for more waits until one of these is there.
//! 3. A lock is as `parking_lot`'s: who comes while it is free has it, whoever waits. Who waits spins
//!    for a while, then sleeps. Releasing hands it to the first that spins; if none does it is free.
//!    The first that sleeps is woken in any case, and comes again when it runs; by who held it exclusively all
//!    sharers that sleep are, up to the first that wants it exclusively, and that (`RawRwLock::wake_parked_threads`).
//!    Sharers hold it together, but none gets in past one that spins for it exclusively. Who wants it exclusively while it is
//!    shared is next, spinning or asleep: no sharer gets in any more, and the last that leaves hands it over
//!    (`RawRwLock::wait_for_readers`). Who tries to share it and finds
//!    it taken goes on without it, as the code does; it waits when it has let go of what it held meanwhile, since then it
//!    asks for what it did not get.
//! 4. A thread in the background takes its time from the core it is on: from one that no operations
//!    run on, where there is one, else from all in turn. The operation that runs there is later by
//!    that time; that it may hold a lock meanwhile is not modelled.
//! 5. Each job is made once for each of its cycles of operations. Operations wait when two of them are not done.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use super::costs::{Costs, Time};
use super::steps::{PRIVATE, Step, Trace};

/// Cycles that a run simulates, and those at its beginning that are not counted.
const CYCLES: u64 = 6;
const WARM_UP: u64 = 2;
/// Cycles that may be begun and not done (invariant 5).
const BEHIND: u64 = 2;
/// Lines that a core has asked for, as far as anybody remembers.
const ASKED: usize = 256;
/// Time that a thread in the background spends on one core before it moves to the next.
const SLICE: Time = 50_000_000;

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

/// A set of cores.
type Cores = u128;
/// Most cores, threads in the background included.
pub const CORES_MAX: usize = 128;

#[derive(Clone, Copy, Default)]
struct Line {
    /// That have a copy.
    sharers: Cores,
    /// Nobody else fetches it before.
    free: Time,
}

/// What a core has asked for ahead, and when it comes.
#[derive(Clone, Default)]
struct Ahead {
    lines: HashMap<u32, Time>,
    /// What locks protect.
    locks: HashMap<u32, Time>,
    /// The lines that are on their way, those that come first in front.
    under_way: VecDeque<Time>,
}

impl Ahead {
    /// When one more can be asked for.
    fn free(&mut self, now: Time, fills: usize) -> Time {
        while self.under_way.front().is_some_and(|comes| *comes <= now) {
            self.under_way.pop_front();
        }
        match self.under_way.len() < fills {
            true => now,
            false => self.under_way.pop_front().unwrap_or(now),
        }
    }

    /// Forgets what nobody came for.
    fn tidy(&mut self, now: Time) {
        if self.lines.len() + self.locks.len() > ASKED {
            self.lines.retain(|_, comes| *comes > now);
            self.locks.retain(|_, comes| *comes > now);
        }
    }

    fn send(&mut self, comes: Time) {
        let at = self.under_way.partition_point(|other| *other <= comes);
        self.under_way.insert(at, comes);
    }

    /// When what the core has been told it has is there.
    fn comes(of: &mut HashMap<u32, Time>, number: u32, now: Time) -> Time {
        match of.is_empty() {
            true => now,
            false => of.remove(&number).map_or(now, |comes| comes.max(now)),
        }
    }
}

/// A thread that waits for a lock.
#[derive(Clone, Copy)]
struct Waiter {
    thread: usize,
    exclusive: bool,
    since: Time,
}

#[derive(Default)]
struct Lock {
    /// Threads that hold it.
    holders: usize,
    exclusive: bool,
    /// Wants it exclusively, and has it when those who share it are out.
    next: Option<Waiter>,
    /// The first of them may have fallen asleep meanwhile.
    spinning: VecDeque<Waiter>,
    asleep: VecDeque<Waiter>,
    /// Cores that have what the lock protects as it is now.
    fresh: Cores,
    /// Cores that have asked for the first line of it, the one that lies beside the lock.
    asked: Cores,
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
    fn gives_back(&mut self, lock: u32) {
        let at = self.held.iter().rposition(|held| *held == lock);
        self.held.remove(at.expect("who gives a lock back has it"));
    }
}

/// A lock that was tried in vain (invariant 3).
#[derive(Clone, Copy)]
struct Missed {
    lock: u32,
    line: u32,
    stage: MissedStage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum MissedStage {
    /// The thread is where it would hold the lock.
    Skipped,
    /// It may hold another that it took right before.
    Passed,
    /// It waits for the lock.
    Due,
    /// It has it.
    Held,
}

/// A thread in the background that leads a job, and how far it is.
struct Leader {
    done: u64,
    /// Helpers that still work on parts, and the part that the next free one begins.
    busy: usize,
    next: usize,
    helpers: Vec<usize>,
    running: bool,
    /// When the stage that it is at began, and how long each lasted so far.
    since: Time,
    lasted: Vec<Time>,
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

fn bit(core: usize) -> Cores {
    1 << core
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
            leaders.push(Leader {
                done: 0,
                busy: 0,
                next: 0,
                helpers: (leader..leader + helpers).collect(),
                running: false,
                since: 0,
                lasted: vec![0; job.stages.len()],
            });
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

    /// Which locks threads wait for, and what they hold.
    fn waits(&self) -> String {
        let name = |lock: &u32| format!("{} {lock}", self.trace.locks[*lock as usize].name);
        let mut text = String::new();
        for (number, lock) in (0..).zip(&self.locks) {
            let waiters = lock.spinning.iter().chain(&lock.asleep);
            for waiter in waiters.chain(&lock.next) {
                let held = self.threads[waiter.thread].held.iter().map(name);
                let held: Vec<String> = held.collect();
                let how = match waiter.exclusive {
                    true => "exclusive",
                    false => "shared",
                };
                let (thread, wanted) = (waiter.thread, name(&number));
                text += &format!("{thread} wants {wanted} {how}, has {held:?}; ");
            }
        }
        text
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
        if self.threads[thread].behind_since.is_some() {
            return self.next_operation(thread, now);
        }
        let operation = self.threads[thread].job.is_none();
        let counted = operation && self.counting();
        let core = self.threads[thread].core;
        if let Some(missed) = self.threads[thread].missed
            && matches!(missed.stage, MissedStage::Due | MissedStage::Held)
        {
            return self.make_up(thread, missed, now, counted);
        }
        let step = self.step(thread);
        if let Some(missed) = &mut self.threads[thread].missed
            && missed.stage == MissedStage::Passed
            && matches!(step, None | Some(Step::Lock { .. }))
        {
            missed.stage = MissedStage::Due;
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
                let at = &mut self.locks[lock as usize];
                (at.fresh, at.asked) = (0, 0);
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
            } if tried && self.threads[thread].missed.is_none() && !self.is_free(lock, false) => {
                self.threads[thread].missed = Some(Missed {
                    lock,
                    line,
                    stage: MissedStage::Skipped,
                });
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
            Step::Unlock { lock, line } => {
                use MissedStage::{Due, Passed, Skipped};
                let at = &mut self.threads[thread];
                match &mut at.missed {
                    Some(missed) if missed.stage == Skipped && missed.lock == lock => {
                        missed.stage = Passed;
                        now
                    }
                    missed => {
                        if let Some(missed) = missed
                            && missed.stage == Passed
                        {
                            missed.stage = Due;
                        }
                        at.gives_back(lock);
                        self.unlock(core, lock, line, now, counted)
                    }
                }
            }
            Step::Own { lock, line } => {
                let at = &mut self.locks[lock as usize];
                (at.fresh, at.asked) = (bit(core), 0);
                self.touch(core, line, true, now, counted)
            }
            Step::Device { bytes, here } => self.device(thread, bytes, here, now, counted),
        };
        self.advance(thread);
        self.at(until, thread);
    }

    /// Whether who comes gets the lock at once.
    fn is_free(&self, lock: u32, exclusive: bool) -> bool {
        let at = &self.locks[lock as usize];
        let barred = !exclusive && at.spinning.iter().any(|waiter| waiter.exclusive);
        at.next.is_none() && (at.holders == 0 || (!exclusive && !at.exclusive && !barred))
    }

    /// A thread waits for the lock that it tried in vain, or gives it back.
    fn make_up(&mut self, thread: usize, missed: Missed, now: Time, counted: bool) {
        let Missed { lock, line, .. } = missed;
        let core = self.threads[thread].core;
        if missed.stage == MissedStage::Held {
            self.threads[thread].missed = None;
            self.threads[thread].gives_back(lock);
            let until = self.unlock(core, lock, line, now, counted);
            return self.at(until, thread);
        }
        if let Some(until) = self.lock(thread, lock, line, false, now, counted) {
            self.got(thread);
            self.at(until, thread);
        }
    }

    /// The thread has a lock: the one of its step, or the one that it missed.
    fn got(&mut self, thread: usize) {
        match &mut self.threads[thread].missed {
            Some(missed) if missed.stage == MissedStage::Due => missed.stage = MissedStage::Held,
            _ => self.advance(thread),
        }
    }

    fn socket(&self, core: usize) -> usize {
        core / self.costs.socket_cores
    }

    /// What fetching costs a core from the nearest, or taking away from the farthest, of others.
    fn transfer(&self, core: usize, others: Cores, farthest: bool) -> Time {
        let first = self.socket(core) * self.costs.socket_cores;
        let width = self.costs.socket_cores.min(CORES_MAX - first);
        let socket = match width {
            CORES_MAX => Cores::MAX,
            width => ((1 << width) - 1) << first,
        };
        let far = match farthest {
            true => others & !socket != 0,
            false => others & socket == 0,
        };
        match far {
            true => self.costs.far_line,
            false => self.costs.line,
        }
    }

    /// Invariant 2. Returns when the core has the line.
    fn touch(&mut self, core: usize, line: u32, write: bool, now: Time, counted: bool) -> Time {
        if line == PRIVATE {
            return now;
        }
        let at = self.lines[line as usize];
        let others = at.sharers & !bit(core);
        let has = at.sharers & bit(core) != 0;
        let asked = self.ahead[core].lines.contains_key(&line);
        let comes = Ahead::comes(&mut self.ahead[core].lines, line, now);
        if at.sharers == 0 || (has && (!write || others == 0)) {
            self.lines[line as usize].sharers |= bit(core);
            if counted && asked {
                self.spent.lines[line as usize] += comes - now;
                self.spent.transfers[line as usize] += 1;
            }
            return comes;
        }
        let until = now.max(at.free) + self.transfer(core, others, write);
        let at = &mut self.lines[line as usize];
        if write {
            at.sharers = bit(core);
            at.free = until;
        } else {
            at.sharers |= bit(core);
        }
        if counted {
            self.spent.lines[line as usize] += until - now;
            self.spent.transfers[line as usize] += 1;
        }
        until
    }

    /// A core asks for a line. Returns when it goes on.
    fn ask_line(&mut self, core: usize, line: u32, write: bool, now: Time) -> Time {
        let at = self.lines[line as usize];
        let others = at.sharers & !bit(core);
        let has = at.sharers & bit(core) != 0;
        if at.sharers == 0 || (has && (!write || others == 0)) {
            return now;
        }
        let asked = self.ahead[core].free(now, self.costs.fills);
        let comes = asked.max(at.free) + self.transfer(core, others, write);
        let at = &mut self.lines[line as usize];
        if write {
            at.sharers = bit(core);
            at.free = comes;
        } else {
            at.sharers |= bit(core);
        }
        self.ahead[core].tidy(now);
        self.ahead[core].send(comes);
        self.ahead[core].lines.insert(line, comes);
        asked
    }

    /// A core asks for the first line of what a lock protects: what that refers to it does not know. Returns when it goes on.
    fn ask_protected(&mut self, core: usize, lock: u32, now: Time) -> Time {
        let Lock { fresh, asked, .. } = self.locks[lock as usize];
        if fresh == 0 || (fresh | asked) & bit(core) != 0 || self.costs.protected_lines == 0 {
            return now;
        }
        let free = self.ahead[core].free(now, self.costs.fills);
        let comes = free + self.transfer(core, fresh, false);
        self.locks[lock as usize].asked |= bit(core);
        self.ahead[core].tidy(now);
        self.ahead[core].send(comes);
        self.ahead[core].locks.insert(lock, comes);
        free
    }

    /// Invariant 3. `None`: the thread waits.
    fn lock(
        &mut self,
        thread: usize,
        lock: u32,
        line: u32,
        exclusive: bool,
        now: Time,
        counted: bool,
    ) -> Option<Time> {
        let core = self.threads[thread].core;
        let free = self.is_free(lock, exclusive);
        let at = &mut self.locks[lock as usize];
        if !free {
            let waiter = Waiter {
                thread,
                exclusive,
                since: now,
            };
            match exclusive && !at.exclusive && at.next.is_none() {
                true => at.next = Some(waiter),
                false => at.spinning.push_back(waiter),
            }
            self.threads[thread].locked_out_since.get_or_insert(now);
            // It looks at the lock, and says in it that it waits.
            self.touch(core, line, true, now, false);
            return None;
        }
        at.holders += 1;
        at.exclusive = exclusive;
        self.threads[thread].held.push(lock);
        if let Some(since) = self.threads[thread].locked_out_since.take()
            && counted
        {
            self.spent.locks[lock as usize] += now - since;
        }
        let fetched = self.touch(core, line, true, now, counted);
        Some(self.protected(core, lock, exclusive, fetched, counted))
    }

    /// What the lock protects comes to the core.
    fn protected(
        &mut self,
        core: usize,
        lock: u32,
        exclusive: bool,
        now: Time,
        counted: bool,
    ) -> Time {
        let Lock { fresh, asked, .. } = self.locks[lock as usize];
        let comes = Ahead::comes(&mut self.ahead[core].locks, lock, now);
        let line = self.transfer(core, fresh, false);
        let time = match (fresh == 0 || fresh & bit(core) != 0, asked & bit(core) != 0) {
            (true, _) => 0,
            (false, true) => comes - now + (self.costs.protected_lines - 1) * line,
            (false, false) => self.costs.protected_lines * line,
        };
        let at = &mut self.locks[lock as usize];
        (at.fresh, at.asked) = match exclusive {
            true => (bit(core), 0),
            false => (fresh | bit(core), asked & !bit(core)),
        };
        if counted {
            self.spent.locks[lock as usize] += time;
        }
        now + time
    }

    fn unlock(&mut self, core: usize, lock: u32, line: u32, now: Time, counted: bool) -> Time {
        let released = self.touch(core, line, true, now, counted);
        let spin = self.costs.spin;
        let at = &mut self.locks[lock as usize];
        let was_exclusive = at.exclusive;
        if was_exclusive {
            // What others asked for meanwhile was changed.
            (at.fresh, at.asked) = (bit(core), 0);
        }
        at.holders -= 1;
        if at.holders > 0 {
            return released;
        }
        if let Some(waiter) = at.next.take() {
            (at.holders, at.exclusive) = (1, true);
            let asleep = released.saturating_sub(waiter.since) > spin;
            let (runs, called) = match asleep {
                true => (released + self.costs.wake, released + self.costs.wake_call),
                false => (released, released),
            };
            self.give(waiter, core, (lock, line), runs);
            return called;
        }
        while let Some(waiter) = at.spinning.front()
            && released.saturating_sub(waiter.since) > spin
        {
            at.asleep.push_back(*waiter);
            at.spinning.pop_front();
        }
        // The first, and if it shares, those that share after it.
        let count = match at.spinning.front() {
            Some(first) if first.exclusive => 1,
            _ => {
                let waiters = at.spinning.iter();
                waiters.take_while(|waiter| !waiter.exclusive).count()
            }
        };
        let sharers = at.asleep.iter().take_while(|waiter| !waiter.exclusive);
        let woken = match was_exclusive {
            true => at.asleep.len().min(sharers.count() + 1),
            false => at.asleep.len().min(1),
        };
        let woken: Vec<Waiter> = at.asleep.drain(..woken).collect();
        let next: Vec<Waiter> = at.spinning.drain(..count).collect();
        at.holders = count;
        at.exclusive = next.first().is_some_and(|first| first.exclusive);
        for waiter in next {
            self.give(waiter, core, (lock, line), released);
        }
        // One after the other.
        let mut called = released;
        for waiter in woken {
            self.at(called + self.costs.wake, waiter.thread);
            called += self.costs.wake_call;
        }
        called
    }

    /// A thread goes on with a lock that is its now.
    fn give(&mut self, waiter: Waiter, from: usize, (lock, line): (u32, u32), runs: Time) {
        let given = self.hand_over(waiter, from, lock, runs);
        if line != PRIVATE {
            self.lines[line as usize].sharers = bit(self.threads[waiter.thread].core);
        }
        self.threads[waiter.thread].held.push(lock);
        self.got(waiter.thread);
        self.at(given, waiter.thread);
    }

    /// A thread that spins is given the lock that `from` has released; returns when it goes on.
    fn hand_over(&mut self, waiter: Waiter, from: usize, lock: u32, released: Time) -> Time {
        let Waiter {
            thread, exclusive, ..
        } = waiter;
        let to = self.threads[thread].core;
        let given = released + 2 * self.transfer(to, bit(from), false);
        let since = self.threads[thread].locked_out_since.take();
        let counted = self.threads[thread].job.is_none() && self.counting();
        if counted {
            self.spent.locks[lock as usize] += given - since.unwrap_or(waiter.since);
        }
        self.protected(to, lock, exclusive, given, counted)
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

    /// Invariant 4.
    fn steal(&mut self, thread: usize, time: Time) {
        let workers = self.trace.threads.len();
        self.spent.background_all += if self.counting() { time } else { 0 };
        let at = &mut self.threads[thread];
        at.slice += time;
        let core = at.core;
        if at.slice > SLICE {
            at.slice = 0;
            self.next_core += 1;
            at.core = match workers < self.machine.cpus {
                true => workers + self.next_core % (self.machine.cpus - workers),
                false => self.next_core % self.machine.cpus,
            };
        }
        if core < workers {
            self.stolen[core] += time;
        }
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

    /// Begins an operation, or waits for the background (invariants 4 and 5).
    fn next_operation(&mut self, thread: usize, now: Time) {
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
        let stolen = std::mem::take(&mut self.stolen[self.threads[thread].core]);
        if self.counting() {
            self.spent.background += stolen;
        }
        self.at(now + stolen, thread);
    }

    fn begin_job(&mut self, job: usize, now: Time) {
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

    fn end_serial(&mut self, thread: usize, stage: usize, now: Time) {
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
    fn next_part(&mut self, thread: usize, stage: usize, now: Time) {
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

#[cfg(test)]
mod tests {
    use super::super::costs::ns;
    use super::super::steps::{Job, Named, Stage};
    use super::*;

    /// Costs that are easy to reckon with: one socket, nobody sleeps, nothing is protected.
    const PLAIN: Costs = Costs {
        line: ns(100),
        far_line: ns(300),
        socket_cores: 128,
        spin: Time::MAX,
        wake: ns(5_000),
        wake_call: ns(1_000),
        protected_lines: 0,
        fills: 10,
        device_rate: 1e9,
    };

    fn machine(cpus: usize) -> Machine {
        Machine {
            costs: PLAIN,
            cpus,
            devices: Devices::Modelled,
        }
    }

    #[test]
    fn lines_that_are_asked_for_come_at_once() {
        let trace = trace(2, &[Step::Compute(ns(1))], 3, 1);
        let machine = |fills| Machine {
            costs: Costs {
                fills,
                protected_lines: 2,
                ..PLAIN
            },
            ..machine(2)
        };
        let run = |machine: &Machine, ask: bool| {
            let mut run = Run::new(&trace, machine);
            run.lines.iter_mut().for_each(|line| line.sharers = bit(1));
            run.locks[0].fresh = bit(1);
            let mut now = 0;
            for line in 0..3 {
                now = if ask {
                    run.ask_line(0, line, true, now)
                } else {
                    now
                };
            }
            now = if ask {
                run.ask_protected(0, 0, now)
            } else {
                now
            };
            for line in 0..3 {
                now = run.touch(0, line, true, now, false);
            }
            now = run.protected(0, 0, false, now, false);
            // What is there costs nothing more.
            assert_eq!(run.touch(0, 0, true, now, false), now);
            assert_eq!(run.protected(0, 0, true, now, false), now);
            now
        };
        assert_eq!(run(&machine(10), false), ns(500));
        // All but what the lock's first line refers to.
        assert_eq!(run(&machine(10), true), ns(200));
        assert_eq!(run(&machine(4), true), ns(200));
        // Two at once: the third and fourth come after the first two.
        assert_eq!(run(&machine(2), true), ns(300));
        assert_eq!(run(&machine(1), true), ns(500));
    }

    #[test]
    fn what_is_asked_for_while_another_changes_it_comes_again() {
        let trace = trace(2, &[Step::Compute(ns(1))], 0, 1);
        let machine = Machine {
            costs: Costs {
                protected_lines: 2,
                ..PLAIN
            },
            ..machine(2)
        };
        let mut run = Run::new(&trace, &machine);
        let lock = |run: &mut Run<'_>, thread, now| run.lock(thread, 0, PRIVATE, true, now, false);
        assert_eq!(lock(&mut run, 0, 0), Some(0));
        run.ask_protected(1, 0, ns(10));
        run.unlock(0, 0, PRIVATE, ns(500), false);
        assert_eq!(lock(&mut run, 1, ns(500)), Some(ns(700)));
    }

    #[test]
    fn what_another_took_meanwhile_comes_again() {
        let (trace, machine) = (trace(2, &[Step::Compute(ns(1))], 1, 0), machine(2));
        let mut run = Run::new(&trace, &machine);
        run.lines[0].sharers = bit(1);
        assert_eq!(run.ask_line(0, 0, true, 0), 0);
        assert_eq!(run.touch(1, 0, true, ns(50), false), ns(200));
        assert_eq!(run.touch(0, 0, true, ns(300), false), ns(400));
    }

    #[test]
    fn what_is_new_each_time_costs_no_transfer() {
        let operation = |anew: bool| {
            let anew = anew.then_some(Step::Anew(0));
            let steps = [Step::Write(0), Step::Compute(ns(100))];
            anew.into_iter().chain(steps).collect::<Vec<_>>()
        };
        let rate = |anew| simulate(&trace(2, &operation(anew), 1, 0), &machine(2)).rate;
        assert!((rate(true) / 2e7 - 1.0).abs() < 0.01);
        assert!(rate(false) < 1.1e7);
    }

    /// So many threads that repeat one operation, with this many lines and locks.
    fn trace(threads: usize, operation: &[Step], lines: usize, locks: usize) -> Trace {
        Trace {
            threads: vec![vec![operation.to_vec()]; threads],
            counted: 200 * threads as u64,
            lines: vec![Named::default(); lines],
            locks: vec![Named::default(); locks],
            ..Trace::default()
        }
    }

    /// Operations a second.
    fn rate(trace: &Trace, machine: &Machine) -> f64 {
        simulate(trace, machine).rate
    }

    fn close(value: f64, expected: f64) {
        let off = (value / expected - 1.0).abs();
        assert!(off < 0.02, "{value} and not {expected}");
    }

    #[test]
    fn private_work_is_linear() {
        for threads in [1, 2, 40, 128] {
            let trace = trace(threads, &[Step::Compute(ns(1000))], 0, 0);
            close(rate(&trace, &machine(threads)), threads as f64 * 1e6);
        }
    }

    #[test]
    fn one_lock_bounds_all_by_hold_and_hand_off() {
        let operation = [
            Step::Compute(ns(500)),
            Step::Lock {
                lock: 0,
                line: PRIVATE,
                exclusive: true,
                tried: false,
            },
            Step::Compute(ns(1000)),
            Step::Unlock {
                lock: 0,
                line: PRIVATE,
            },
        ];
        close(rate(&trace(1, &operation, 0, 1), &machine(1)), 1e9 / 1500.0);
        for threads in [4, 40] {
            let trace = trace(threads, &operation, 0, 1);
            // A hand-off is two lines.
            close(rate(&trace, &machine(threads)), 1e9 / 1200.0);
        }
        // Those that have waited too long are asleep. Who comes meanwhile has the lock.
        let mut sleepers = machine(40);
        sleepers.costs.spin = 0;
        let slept = rate(&trace(40, &operation, 0, 1), &sleepers);
        assert!((1e9 / 6000.0..1e9 / 1000.0).contains(&slept), "{slept}");
        // Of two, each finds the other asleep or gone: it sleeps through one hold, at least.
        let two = rate(&trace(2, &operation, 0, 1), &sleepers);
        assert!((1e9 / 3500.0..1e9 / 1000.0).contains(&two), "{two}");
    }

    #[test]
    fn sharers_of_a_lock_do_not_wait_for_each_other() {
        let operation = [
            Step::Lock {
                lock: 0,
                line: PRIVATE,
                exclusive: false,
                tried: false,
            },
            Step::Compute(ns(1000)),
            Step::Unlock {
                lock: 0,
                line: PRIVATE,
            },
        ];
        close(rate(&trace(16, &operation, 0, 1), &machine(16)), 16e6);
    }

    #[test]
    fn sharers_that_slept_behind_one_hold_are_all_woken_by_its_end() {
        let hold = |exclusive, time| {
            let (lock, line) = (0, PRIVATE);
            [
                Step::Compute(time),
                Step::Lock {
                    lock,
                    line,
                    exclusive,
                    tried: false,
                },
                Step::Compute(ns(1000)),
                Step::Unlock { lock, line },
            ]
        };
        let mut trace = trace(16, &hold(false, ns(1000)), 0, 1);
        let mut writer = hold(true, ns(100_000)).to_vec();
        writer.insert(2, Step::Compute(ns(9000)));
        trace.threads[0] = vec![writer];
        let mut sleepers = machine(16);
        sleepers.costs = Costs {
            spin: ns(3000),
            wake: ns(2500),
            wake_call: ns(1000),
            ..PLAIN
        };
        // In each 110 us or so 15 sharers lose 10 us and what it takes until their turn to be woken, 15 us at most. Each
        // sees some sharer in, so that none would be woken by the last to leave.
        let shared = rate(&trace, &sleepers);
        assert!((5.5e6..7.5e6).contains(&shared), "{shared}");
    }

    #[test]
    fn a_line_that_all_write_is_handed_on_one_after_the_other() {
        let operation = [Step::Compute(ns(1000)), Step::Write(0)];
        close(rate(&trace(1, &operation, 1, 0), &machine(1)), 1e6);
        close(rate(&trace(2, &operation, 1, 0), &machine(2)), 2e9 / 1100.0);
        close(
            rate(&trace(64, &operation, 1, 0), &machine(64)),
            1e9 / 100.0,
        );
        // Over two sockets some transfers are far.
        let mut two = machine(64);
        two.costs.socket_cores = 32;
        let far = rate(&trace(64, &operation, 1, 0), &two);
        assert!((1e9 / 300.0..1e9 / 100.0).contains(&far), "{far}");
    }

    #[test]
    fn a_line_that_all_read_costs_nothing_until_it_is_written() {
        let operation = [Step::Compute(ns(1000)), Step::Read(0)];
        let read = trace(32, &operation, 1, 0);
        close(rate(&read, &machine(32)), 32e6);
        let mut written = read.clone();
        written.threads[0] = vec![vec![Step::Compute(ns(1000)), Step::Write(0)]];
        let outcome = simulate(&written, &machine(32));
        assert!(outcome.rate < 31.9e6 * 0.95, "{}", outcome.rate);
        assert!(outcome.spent.transfers[0] > 0);
    }

    #[test]
    fn sharers_keep_nobody_out_who_wants_a_lock_alone() {
        // Seven threads always share the lock, in turns that overlap; the eighth wants it alone.
        let of = |exclusive| {
            [
                Step::Lock {
                    lock: 0,
                    line: PRIVATE,
                    exclusive,
                    tried: false,
                },
                Step::Compute(ns(1000)),
                Step::Unlock {
                    lock: 0,
                    line: PRIVATE,
                },
            ]
        };
        let mut shared = trace(8, &of(false), 0, 1);
        shared.threads[7] = vec![of(true).to_vec()];
        let outcome = simulate(&shared, &machine(8));
        // A turn of those who share and one of the other, each with its hand-off.
        close(outcome.rate, 8e9 / 2_400.0);
    }

    #[test]
    fn who_tries_a_lock_lets_go_of_what_it_holds_before_it_waits() {
        let lock = |lock, tried: bool| Step::Lock {
            lock,
            line: PRIVATE,
            exclusive: !tried,
            tried,
        };
        let unlock = |lock| Step::Unlock {
            lock,
            line: PRIVATE,
        };
        let work = Step::Compute(ns(1000));
        // One takes the locks in one order, the other in the other, but for its trying.
        let mut both = trace(
            2,
            &[lock(0, false), work, lock(1, true), unlock(1), unlock(0)],
            0,
            2,
        );
        both.threads[1] = vec![vec![
            lock(1, false),
            work,
            lock(0, false),
            unlock(0),
            unlock(1),
        ]];
        assert!(rate(&both, &machine(2)) > 0.5e6);
    }

    #[test]
    fn the_background_takes_cores_and_holds_operations_up() {
        // 100 operations of 1 µs make 100 µs of work that one thread does.
        let mut busy = trace(1, &[Step::Compute(ns(1000))], 0, 0);
        let job = |cycle, serial, parts| Job {
            cycle,
            stages: vec![Stage {
                serial,
                parts,
                ..Stage::default()
            }],
        };
        let work = |cycle, ns_all| job(cycle, vec![Step::Compute(ns(ns_all))], Vec::new());
        busy.jobs = vec![work(100, 100_000)];
        // On one core both take turns; with another core neither waits.
        close(rate(&busy, &machine(1)), 0.5e6);
        close(rate(&busy, &machine(2)), 1e6);
        // Eight cores make work for eight threads, but one does it all.
        let mut many = trace(8, &[Step::Compute(ns(1000))], 0, 0);
        many.jobs = vec![work(800, 800_000)];
        close(rate(&many, &machine(8)), 1e6);
        // As much, of which a job does a quarter.
        many.jobs.push(work(200, 50_000));
        close(rate(&many, &machine(8)), 1e6);
        many.jobs[0].stages[0].serial.clear();
        many.jobs[1] = work(200, 200_000);
        close(rate(&many, &machine(8)), 1e6);
        // In parts it is spread, and only takes its share.
        let parts = vec![vec![Step::Compute(ns(1000))]; 800];
        many.jobs = vec![job(800, Vec::new(), parts.clone())];
        close(rate(&many, &machine(8)), 4e6);
        // The same in stages, one of which has work for three threads only.
        let few = parts[..3].to_vec();
        let stage = |parts: &[Vec<Step>]| job(800, Vec::new(), parts.to_vec()).stages;
        let stages = [stage(&parts[..400]), stage(&few), stage(&parts[403..])].concat();
        many.jobs = vec![Job { cycle: 800, stages }];
        close(rate(&many, &machine(8)), 4e6);
    }

    #[test]
    fn devices_bound_what_makes_bytes_for_them() {
        let mut writing = trace(16, &[Step::Compute(ns(1000))], 0, 0);
        // 1000 bytes an operation, at 1 GB/s.
        let device = Step::Device {
            bytes: 1_600_000,
            here: 0,
        };
        writing.jobs = vec![Job {
            cycle: 1600,
            stages: vec![Stage {
                serial: vec![device],
                ..Stage::default()
            }],
        }];
        let outcome = simulate(&writing, &machine(16));
        close(outcome.rate, 1e6);
        close(outcome.device_busy, 1.0);
    }
}
