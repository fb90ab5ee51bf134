//! Recording: one real thread plays all threads, one after the other, on all CPUs.
//!
//! 1. Logical threads take turns on as many CPUs as are to be modelled, as far as the code can tell, and the store has
//!    as many shards: what the recording shares is what as many cores would share. There are some forty of them
//!    however few CPUs there are: so few do the same work as many, in directories as large, and what is recorded of it comes from
//!    memory that is as cold.
//! 2. Nothing runs beside it: commits and checkpoints are made by the same thread afterwards, of
//!    what the operations left, and recorded as jobs: the last commit of those that come before a checkpoint.
//! 3. Operations are recorded after others of the same thread, so that some of what it uses is in caches.
//! 4. Before each thread's turn all of them do one operation each, and before the first turn many: what the code
//!    makes of several cores that come one after the other, it has made.

use base::clock::Clock;
use base::trace::{self, Event, Kind};

use super::global_lock::GlobalLock;
use super::steps::{Owner, Scale, Span, Trace, steps};
use crate::fxmark::{BRANCHES, Run, Scale as Pool, Workload};
use crate::runner::{Load, Operation, Stop};
use crate::target::InProcess;
use crate::{Error, interrupt};

/// Operations of a thread right before those that are recorded.
const WARM_UP: u64 = 16;
/// Events of one operation that there is room for.
const EVENTS_EXPECTED: usize = 300;

/// What to record.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub threads: usize,
    /// That threads take turns on: no more than these.
    pub cpus: usize,
    /// Of each thread, between two commits.
    pub operations: u64,
    /// Of all threads from one checkpoint to the next, about; one commit's at least.
    pub cycle: u64,
    /// Of each thread, before the recording: its directory has some entries then.
    pub before: u64,
}

/// Of so many files of a thread one is left at the end. Leaves of the shared directory that unlinks empty go then, in what is
/// recorded, as often as from the first unlink to the last: once for each that there are names in a leaf. To the very end it would be
/// ten times as often.
const LEFT: u64 = 50;

impl Plan {
    /// Operations of a thread, recorded or not.
    pub fn share(&self) -> u64 {
        let used = self.before + self.passes() * self.each();
        used + used.div_ceil(LEFT)
    }

    /// Of each thread between two commits.
    fn each(&self) -> u64 {
        self.threads as u64 + WARM_UP + self.operations
    }

    /// The CPU of a thread.
    fn cpu(&self, thread: usize) -> usize {
        thread % self.cpus
    }

    /// Commits of a checkpoint.
    fn passes(&self) -> u64 {
        (self.cycle / (self.each() * self.threads as u64)).max(1)
    }
}

/// How long a tick is, and what storing an event takes on this machine.
pub fn calibrate() -> Scale {
    let clock = Clock::real();
    let (tick, ns) = (trace::ticks(), clock.monotonic_ns());
    let mut gaps: Vec<u64> = Vec::new();
    while clock.monotonic_ns() - ns < 20_000_000 {
        trace::start(4096);
        for _ in 0..4096 {
            trace::record(Kind::Note, 0, "", 0);
        }
        let events = trace::stop();
        gaps.extend(events.windows(2).map(|pair| pair[1].tick - pair[0].tick));
    }
    let ns_per_tick = (clock.monotonic_ns() - ns) as f64 / (trace::ticks() - tick).max(1) as f64;
    gaps.sort_unstable();
    // The mean of the middle half: a single gap is a few ticks, and interruptions are long.
    let middle = &gaps[gaps.len() / 4..gaps.len() * 3 / 4];
    let ticks = middle.iter().sum::<u64>() as f64 / middle.len() as f64;
    Scale {
        ns_per_tick,
        event_ns: ticks * ns_per_tick,
    }
}

/// Has the calling thread be on one of the CPUs as long as this lives.
struct Playing;

impl Playing {
    fn on(cpu: usize) -> Playing {
        trace::set_cpu(Some(cpu));
        Playing
    }
}

impl Drop for Playing {
    fn drop(&mut self) {
        trace::set_cpu(None);
    }
}

/// Notes where an operation begins and ends; they are no part of it.
const BEGIN: usize = 1;
const END: usize = 2;

fn note(what: usize) {
    trace::record(Kind::Note, what, "", 0);
}

/// Repeats an operation.
fn repeat(operation: &mut Operation<'_>, count: u64) -> Result<(), Error> {
    for _ in 0..count {
        if operation()? == 0 {
            return Err(Error::Unable("a recording ran out of files".to_owned()));
        }
    }
    Ok(())
}

/// One operation of each thread.
fn round(plan: &Plan, operations: &mut [Operation<'_>]) -> Result<(), Error> {
    interrupt::check()?;
    for (thread, operation) in operations.iter_mut().enumerate() {
        let _playing = Playing::on(plan.cpu(thread));
        repeat(operation, 1)?;
    }
    Ok(())
}

fn record_operations(
    plan: &Plan,
    thread: usize,
    operation: &mut Operation<'_>,
    spans: &mut Vec<Span>,
) -> Result<(), Error> {
    let _playing = Playing::on(plan.cpu(thread));
    repeat(operation, WARM_UP)?;
    trace::start(plan.operations as usize * EVENTS_EXPECTED);
    let mut outcome = Ok(());
    for _ in 0..plan.operations {
        note(BEGIN);
        outcome = repeat(operation, 1);
        note(END);
        if outcome.is_err() {
            break;
        }
    }
    let events = trace::stop();
    outcome?;
    spans.extend(cut(events, Owner::Thread(plan.cpu(thread))));
    Ok(())
}

/// A span for each pair of notes.
fn cut(events: Vec<Event>, owner: Owner) -> Vec<Span> {
    let mut spans = Vec::new();
    let mut open: Option<(u64, Vec<Event>)> = None;
    for event in events {
        match (event.kind, event.address) {
            (Kind::Note, BEGIN) => open = Some((event.tick, Vec::new())),
            (Kind::Note, _) => {
                if let Some((begin, mut events)) = open.take() {
                    events.shrink_to_fit();
                    spans.push(Span {
                        owner,
                        begin,
                        events,
                        end: event.tick,
                    });
                }
            }
            _ => {
                if let Some((_, events)) = &mut open {
                    events.push(event);
                }
            }
        }
    }
    spans
}

fn record_job(
    number: usize,
    expected: usize,
    job: impl FnOnce() -> Result<(), Error>,
) -> Result<Option<Span>, Error> {
    let _playing = Playing::on(0);
    trace::start(expected);
    note(BEGIN);
    trace::processor();
    let outcome = job();
    trace::processor();
    note(END);
    let events = trace::stop();
    outcome?;
    Ok(cut(events, Owner::Job(number)).pop())
}

/// A workload on a fresh Sheaf, which has no threads of its own and a shard for each thread.
pub fn sheaf(
    side: &InProcess,
    workload: &'static Workload,
    plan: &Plan,
    scale: Scale,
) -> Result<Trace, Error> {
    let pool = Pool {
        threads: plan.threads,
        pool: plan.share() * plan.threads as u64,
        branches: BRANCHES.min(4),
    };
    let run = Run::prepare(side, workload, pool)?;
    let stop = Stop::default();
    let mut operations = Vec::with_capacity(plan.threads);
    let threads = 0..plan.threads;
    // Threads fill a directory that they share in turns, as they do at once elsewhere.
    let mut filling: Vec<_> = threads.filter_map(|i| run.filling(i)).collect();
    for _ in 0..plan.share() {
        round(plan, &mut filling)?;
    }
    for thread in 0..plan.threads {
        interrupt::check()?;
        let _playing = Playing::on(plan.cpu(thread));
        operations.push(match filling.is_empty() {
            true => run.prepare(thread, &stop)?,
            false => run.filled(thread),
        });
    }
    for _ in 0..plan.before {
        round(plan, &mut operations)?;
    }
    side.settle()?;
    let newest = side.newest_checkpoint();
    let mut spans = Vec::new();
    for pass in 0..plan.passes() {
        if pass > 0 {
            side.commit_operations()?;
        }
        for thread in 0..plan.threads {
            round(plan, &mut operations)?;
            record_operations(plan, thread, &mut operations[thread], &mut spans)?;
        }
    }
    if side.newest_checkpoint() != newest {
        return Err(Error::Unable(
            "a recording made a checkpoint before its end: its operations log too much".to_owned(),
        ));
    }
    let count = plan.each() * plan.threads as u64;
    let cycles = [count, count * plan.passes()];
    let commit = record_job(0, cycles[0] as usize * 4, || side.commit_operations())?;
    let writes = |event: &Event| event.kind == Kind::DeviceBegin && event.address > 0;
    // Operations that change nothing make neither.
    if commit
        .as_ref()
        .is_some_and(|span| span.events.iter().any(writes))
    {
        spans.extend(commit);
        let expected = cycles[1] as usize * 40;
        spans.extend(record_job(1, expected, || side.checkpoint())?);
    }
    Ok(steps(&spans, plan.cpus, &cycles, scale))
}

/// What the store with one lock is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bad {
    Create,
    Unlink,
}

impl Bad {
    /// The workload of FxMark that it stands for.
    pub fn of(workload: &str) -> Option<Bad> {
        match workload {
            "MWCL" => Some(Bad::Create),
            "MWUL" => Some(Bad::Unlink),
            _ => None,
        }
    }

    /// One thread's share of files.
    pub fn prepare(self, store: &GlobalLock, thread: usize, share: u64) -> Result<(), Error> {
        match self {
            Bad::Create => Ok(()),
            Bad::Unlink => (0..share).try_for_each(|name| store.create(thread, name)),
        }
    }

    pub fn operation(self, store: &GlobalLock, thread: usize, share: u64) -> Operation<'_> {
        let mut names = 0..share;
        Box::new(move || {
            let Some(name) = names.next() else {
                return Ok(0);
            };
            match self {
                Bad::Create => store.create(thread, name)?,
                Bad::Unlink => store.unlink(thread, name)?,
            }
            Ok(1)
        })
    }
}

/// The same of the store with one lock.
pub fn global_lock(bad: Bad, plan: &Plan, scale: Scale) -> Result<Trace, Error> {
    let store = GlobalLock::new(plan.threads);
    let mut operations = Vec::with_capacity(plan.threads);
    for thread in 0..plan.threads {
        bad.prepare(&store, thread, plan.share())?;
        operations.push(bad.operation(&store, thread, plan.share()));
    }
    let mut spans = Vec::new();
    for (thread, operation) in operations.iter_mut().enumerate() {
        interrupt::check()?;
        repeat(operation, plan.before)?;
        record_operations(plan, thread, operation, &mut spans)?;
    }
    let count = plan.threads as u64 * plan.operations;
    Ok(steps(&spans, plan.cpus, &[count], scale))
}
