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
//! 5. In each turn a fifth of the operations are timed with the recorder off: those at its ends, with the recorded ones between them, or
//!    the other way round in every second turn. By how much longer the recorded ones took, for each of their events, is what storing an event takes: it is that time, and
//!    not that of events which are stored one after the other and nothing else, as the processor does other things meanwhile, or has to wait
//!    because of it. So what the operations of a recording compute is, all together, what the same operations take when nobody records.

use base::clock::Clock;
use base::trace::{self, Event, Kind};

use super::global_lock::GlobalLock;
use super::steps::{INTERRUPTION_NS, Owner, Recording, Scale, Span, Trace, steps};
use crate::fxmark::{BRANCHES, Run, Scale as Pool, Workload};
use crate::runner::{Load, Operation, Stop};
use crate::target::InProcess;
use crate::{Error, interrupt};

/// Operations of a thread right before those that are recorded.
const WARM_UP: u64 = 16;
/// Events of one operation that there is room for.
const EVENTS_EXPECTED: usize = 300;
/// Of the store with one lock, of which an unlink looks at each row of a table.
const EVENTS_EXPECTED_BAD: usize = 1_100;

/// What to record.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub threads: usize,
    /// That threads take turns on: no more than these.
    pub cpus: usize,
    /// Of each thread, recorded in a turn: a multiple of eight. A quarter as many are timed.
    pub operations: u64,
    /// Turns of each thread between two commits.
    pub turns: u64,
    /// Further ones of each thread between two commits.
    pub rest: u64,
    /// Commits of a checkpoint.
    pub passes: u64,
    /// Of each thread, before the recording: its directory has some entries then.
    pub before: u64,
    /// Files of a thread at least.
    pub files: u64,
    /// Of commits and checkpoints those that are recorded: the first ones of these two.
    pub jobs: usize,
}

/// Of so many files of a thread one is left at the end. Leaves of the shared directory that unlinks empty go then, in what is
/// recorded, as often as from the first unlink to the last: once for each that there are names in a leaf. To the very end it would be
/// ten times as often.
const LEFT: u64 = 50;

/// Operations that are recorded in a turn, at most: what the recorder stores pushes what the operations use out of caches, and those
/// that are timed feel that, too.
const LONG_TURN: u64 = 2_000;

impl Plan {
    /// Operations of a thread, recorded or not.
    pub fn share(&self) -> u64 {
        let used = self.before + self.passes * self.each();
        self.files.max(used + used.div_ceil(LEFT))
    }

    /// Of each thread between two commits.
    pub fn each(&self) -> u64 {
        self.rest + self.turns * (self.round() + self.operations / 4 * 5)
    }

    /// Operations of a thread in each turn, of all of them, that are neither recorded nor timed.
    fn round(&self) -> u64 {
        self.threads as u64 + WARM_UP
    }

    /// With so many operations of each thread between two commits, if that are enough for those that are recorded and timed; these are
    /// no more than `most`.
    pub fn spread(self, each: u64, most: u64) -> Plan {
        let turns = (each / 5 * 4).min(most).div_ceil(LONG_TURN).max(1);
        let free = (each / turns).saturating_sub(self.round());
        let longest = LONG_TURN.min(most / turns);
        let plan = Plan {
            operations: ((free / 10).min(longest / 8) * 8).max(self.operations),
            turns,
            rest: 0,
            ..self
        };
        Plan {
            rest: each.saturating_sub(plan.each()),
            ..plan
        }
    }

    /// The CPU of a thread.
    fn cpu(&self, thread: usize) -> usize {
        thread % self.cpus
    }
}

/// How long a tick is.
pub fn ns_per_tick() -> f64 {
    let clock = Clock::real();
    let (tick, ns) = (trace::ticks(), clock.monotonic_ns());
    while clock.monotonic_ns() - ns < 20_000_000 {
        std::hint::spin_loop();
    }
    (clock.monotonic_ns() - ns) as f64 / (trace::ticks() - tick).max(1) as f64
}

/// What recordings have so far.
#[derive(Default)]
struct Recorded {
    spans: Vec<Span>,
    /// Ticks of each operation that was timed.
    plain: Vec<u64>,
}

impl Recorded {
    fn steps(&self, plan: &Plan, cycles: &[u64], ns_per_tick: f64) -> Trace {
        let recording = recording(&self.spans, &self.plain, ns_per_tick);
        let scale = Scale {
            ns_per_tick,
            event_ns: recording.event_ns,
        };
        Trace {
            recording,
            ..steps(&self.spans, plan.cpus, cycles, scale)
        }
    }
}

/// Invariant 5. Operations with a pause that is the machine's doing count on neither side.
fn recording(spans: &[Span], plain: &[u64], ns_per_tick: f64) -> Recording {
    let pause = (INTERRUPTION_NS / ns_per_tick) as u64;
    let (mut ticks, mut events, mut counted) = (0, 0, 0u64);
    for span in spans {
        let ends = span.events.iter().map(|event| event.tick);
        let ends: Vec<u64> = ends.chain([span.end]).collect();
        let begins = [span.begin].into_iter().chain(ends.iter().copied());
        let undisturbed = begins.zip(&ends).all(|(begin, end)| end - begin < pause);
        if matches!(span.owner, Owner::Thread(_)) && undisturbed {
            ticks += span.end - span.begin;
            // The note of its begin was stored, too.
            events += ends.len() as u64;
            counted += 1;
        }
    }
    let mean = |sum: u64, count: u64| sum as f64 / count.max(1) as f64;
    let mut sorted = plain.to_vec();
    sorted.sort_unstable();
    let longest = sorted
        .get(sorted.len() / 2)
        .map_or(0, |usual| usual + pause);
    let undisturbed = &sorted[..sorted.partition_point(|ticks| *ticks < longest)];
    let plain_ns = mean(undisturbed.iter().sum(), undisturbed.len() as u64) * ns_per_tick;
    let recorded_ns = mean(ticks, counted) * ns_per_tick;
    let events = mean(events, counted);
    Recording {
        plain_ns,
        recorded_ns,
        events,
        event_ns: ((recorded_ns - plain_ns) / events.max(1.0)).max(0.0),
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

/// A thread's turn (invariant 5).
fn turn(
    plan: &Plan,
    thread: usize,
    recorder_first: bool,
    operation: &mut Operation<'_>,
    recorded: &mut Recorded,
) -> Result<(), Error> {
    // What it takes to have room comes before all of it, and what follows from it after all of it.
    trace::reserve(plan.operations as usize * EVENTS_EXPECTED);
    recorded.plain.reserve(plan.operations as usize / 4);
    let playing = Playing::on(plan.cpu(thread));
    repeat(operation, WARM_UP)?;
    for recorder in [
        recorder_first,
        !recorder_first,
        !recorder_first,
        recorder_first,
    ] {
        match recorder {
            true => record_operations(plan.operations / 2, operation)?,
            false => time_operations(plan.operations / 8, operation, &mut recorded.plain)?,
        }
    }
    let events = trace::stop();
    drop(playing);
    let spans = cut(events, Owner::Thread(plan.cpu(thread)));
    recorded.spans.extend(spans);
    Ok(())
}

fn record_operations(count: u64, operation: &mut Operation<'_>) -> Result<(), Error> {
    trace::start(0);
    let mut outcome = Ok(());
    for _ in 0..count {
        note(BEGIN);
        outcome = repeat(operation, 1);
        note(END);
        if outcome.is_err() {
            break;
        }
    }
    trace::pause();
    outcome
}

fn time_operations(
    count: u64,
    operation: &mut Operation<'_>,
    times: &mut Vec<u64>,
) -> Result<(), Error> {
    let mut last = trace::ticks();
    for _ in 0..count {
        repeat(operation, 1)?;
        let now = trace::ticks();
        times.push(now - last);
        last = now;
    }
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
    ns_per_tick: f64,
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
    let mut recorded = Recorded::default();
    for pass in 0..plan.passes {
        if pass > 0 {
            side.commit_operations()?;
        }
        for _ in 0..plan.rest {
            round(plan, &mut operations)?;
        }
        for number in 0..plan.turns * plan.threads as u64 {
            let thread = number as usize % plan.threads;
            round(plan, &mut operations)?;
            let turn_of_it = number / plan.threads as u64;
            let recorder_first = (pass + turn_of_it + thread as u64) % 2 == 1;
            let operation = &mut operations[thread];
            turn(plan, thread, recorder_first, operation, &mut recorded)?;
        }
    }
    if side.newest_checkpoint() != newest {
        return Err(Error::Unable(
            "a recording made a checkpoint before its end: its operations log too much".to_owned(),
        ));
    }
    let count = plan.each() * plan.threads as u64;
    let cycles = [count, count * plan.passes];
    if plan.jobs == 0 {
        return Ok(recorded.steps(plan, &cycles, ns_per_tick));
    }
    let commit = record_job(0, cycles[0] as usize * 4, || side.commit_operations())?;
    let writes = |event: &Event| event.kind == Kind::DeviceBegin && event.address > 0;
    // Operations that change nothing make neither.
    if commit
        .as_ref()
        .is_some_and(|span| span.events.iter().any(writes))
    {
        recorded.spans.extend(commit);
        if plan.jobs > 1 {
            let expected = cycles[1] as usize * 40;
            let checkpoint = record_job(1, expected, || side.checkpoint())?;
            recorded.spans.extend(checkpoint);
        }
    }
    Ok(recorded.steps(plan, &cycles, ns_per_tick))
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
pub fn global_lock(bad: Bad, plan: &Plan, ns_per_tick: f64) -> Result<Trace, Error> {
    let store = GlobalLock::new(plan.threads);
    let mut operations = Vec::with_capacity(plan.threads);
    for thread in 0..plan.threads {
        bad.prepare(&store, thread, plan.share())?;
        operations.push(bad.operation(&store, thread, plan.share()));
    }
    let mut recorded = Recorded::default();
    for (thread, operation) in operations.iter_mut().enumerate() {
        interrupt::check()?;
        repeat(operation, plan.before)?;
        trace::reserve(plan.operations as usize * EVENTS_EXPECTED_BAD);
        turn(plan, thread, thread % 2 == 1, operation, &mut recorded)?;
    }
    let count = plan.threads as u64 * plan.operations;
    Ok(recorded.steps(plan, &[count], ns_per_tick))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of operations with so many pauses between events.
    fn span(pauses: &[u64]) -> Span {
        let mut tick = 1000;
        let mut events = Vec::new();
        let (last, before) = pauses.split_last().unwrap();
        for pause in before {
            tick += pause;
            events.push(Event {
                tick,
                address: 0,
                name: "",
                line: 0,
                kind: Kind::Write,
            });
        }
        Span {
            owner: Owner::Thread(0),
            begin: 1000,
            events,
            end: tick + last,
        }
    }

    #[test]
    fn an_event_takes_what_operations_take_longer_for_it() {
        // Two ticks are a nanosecond.
        let spans = [span(&[100, 300, 200]), span(&[200, 400, 400, 400])];
        let found = recording(&spans, &[500, 700], 0.5);
        assert_eq!((found.recorded_ns, found.plain_ns), (500.0, 300.0));
        assert_eq!((found.events, found.event_ns), (3.5, 200.0 / 3.5));
        // It never is negative.
        assert_eq!(recording(&spans, &[5000, 7000], 0.5).event_ns, 0.0);
    }

    #[test]
    fn what_was_interrupted_does_not_tell_what_an_event_takes() {
        let long = INTERRUPTION_NS as u64;
        let spans = [span(&[100, 300]), span(&[100, long])];
        let found = recording(&spans, &[200, 200, 200 + long], 1.0);
        assert_eq!((found.recorded_ns, found.plain_ns), (400.0, 200.0));
        assert_eq!((found.events, found.event_ns), (2.0, 100.0));
    }

    #[test]
    fn operations_between_commits_are_recorded_as_far_as_wanted() {
        let plan = Plan {
            threads: 4,
            cpus: 4,
            operations: 80,
            turns: 1,
            rest: 0,
            passes: 1,
            before: 0,
            files: 0,
            jobs: 0,
        };
        assert_eq!(plan.each(), 4 + WARM_UP + 80 + 20);
        let wide = plan.spread(1000, 203);
        assert_eq!((wide.operations, wide.each()), (200, 1000));
        let narrow = plan.spread(1000, 10_000);
        assert_eq!((narrow.operations, narrow.each()), (784, 1000));
        let long = plan.spread(10_000, 10_000);
        assert_eq!((long.turns, long.each()), (4, 10_000));
        assert!(long.operations > LONG_TURN * 9 / 10);
        assert_eq!(plan.spread(10, 10_000).each(), plan.each());
    }
}
