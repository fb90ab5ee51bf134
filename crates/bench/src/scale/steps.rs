//! From what a recorder stored to what the model replays.
//!
//! One real thread plays all logical threads, one after the other, each on a CPU of its own as far
//! as the code can tell; so what two logical threads touch both, at whatever address, is shared,
//! and nothing else is.
//!
//! 1. A line, or a lock, is what lies at an address from the moment something counted is put
//!    there until something else is.
//! 2. Of lines the steps name those alone that at least two threads touch and one writes; of locks
//!    those that at least two threads take. What the rest costs is in the time between steps.
//!    Whoever made a lock waits for nobody there until it is done: nobody else knows of it. In a recording that is
//!    replayed again and again others would, and wait for each other.
//!    What [`PASSING`] operations in a row touch, and no others but jobs, stands for something else each time these are
//!    replayed: other files are made or removed then, which no job has seen lately. So nobody has it then ([`Step::Anew`]).
//! 3. The time between two steps is what passed, less what storing an event takes, less what a
//!    device took. Where less passed than that, what is missing is taken from the time that follows: what storing takes is a mean,
//!    and all events of an operation together took so many times as much. A pause of [`INTERRUPTION_NS`] in an operation is the machine's doing: it
//!    counts as much as what usually passes there. A piece of a job, from one mark to the next, took no more than its
//!    thread's processor time, without what of that went to devices which are files in memory: so what a part of a job
//!    lost to other processes stands in no part.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use base::trace::{Event, Kind};

use super::costs::Time;
use super::names::Site;

/// Operations of one thread, one after the other, that may touch something before it counts as lasting: files that were made
/// one after the other share lines.
const PASSING: usize = 8;
/// Longer than an operation takes between two events, and no longer than a time slice.
pub const INTERRUPTION_NS: f64 = 20_000.0;
const LINE_BYTES: usize = 64;

/// What a thread does next. Numbers of lines and locks are those of [`Trace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Compute(Time),
    Read(u32),
    Write(u32),
    /// This line, which an operation is about to touch, is one that nobody has touched before.
    Anew(u32),
    /// The same of what a lock protects.
    AnewLock(u32),
    /// The line is asked for and not waited for.
    Ahead {
        line: u32,
        write: bool,
    },
    /// The same of what a lock protects.
    AheadLock(u32),
    Lock {
        lock: u32,
        line: u32,
        exclusive: bool,
        /// It is not waited for: who finds it taken does something else, and waits for it later.
        tried: bool,
    },
    Unlock {
        lock: u32,
        line: u32,
    },
    /// A lock that the thread has just made is taken, or given back.
    Own {
        lock: u32,
        line: u32,
    },
    /// `here` is how long this machine's devices took.
    Device {
        bytes: u64,
        here: Time,
    },
}

/// A line that only one thread touches, as a lock's.
pub const PRIVATE: u32 = u32::MAX;

/// Work in the background that a number of operations make.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Job {
    /// Operations that make it once.
    pub cycle: u64,
    /// At least one, done one after the other.
    pub stages: Vec<Stage>,
}

/// What one thread does, and then many do at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stage {
    /// Of its parts.
    pub name: &'static str,
    pub serial: Vec<Step>,
    pub parts: Vec<Vec<Step>>,
}

/// What the model replays.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// Of each thread its operations.
    pub threads: Vec<Vec<Vec<Step>>>,
    /// Each by a thread of its own.
    pub jobs: Vec<Job>,
    /// Operations of the shortest stretch that says something, where there is no job.
    pub counted: u64,
    pub lines: Vec<Named>,
    pub locks: Vec<Named>,
    /// Pauses that were not counted.
    pub interruptions: u64,
    /// What recording cost, as far as that was measured.
    pub recording: Recording,
}

/// The same operations with the recorder on and off, in nanoseconds: what it costs to record.
#[derive(Clone, Copy, Debug, Default)]
pub struct Recording {
    /// An operation with the recorder off, and on.
    pub plain_ns: f64,
    pub recorded_ns: f64,
    /// Events of an operation, and what storing one of them takes.
    pub events: f64,
    pub event_ns: f64,
}

impl Trace {
    /// The longest cycle of all jobs.
    pub fn cycle(&self) -> u64 {
        let cycles = self.jobs.iter().map(|job| job.cycle);
        cycles.max().unwrap_or(self.counted)
    }
}

/// A shared line or lock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Named {
    pub name: String,
    /// By operations, in the recording.
    pub writes: u64,
    /// Of a lock, how often operations took it exclusively.
    pub exclusive: u64,
}

/// Whose events they are, in the order in which they came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// An operation of this thread.
    Thread(usize),
    /// The job of this number.
    Job(usize),
}

/// One operation's, or one job's, events.
#[derive(Debug)]
pub struct Span {
    pub owner: Owner,
    /// When it began.
    pub begin: u64,
    pub events: Vec<Event>,
    pub end: u64,
}

/// How ticks become time.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    pub ns_per_tick: f64,
    /// What storing an event takes, among what is recorded.
    pub event_ns: f64,
}

/// A step with a line or a lock that may turn out private.
enum Raw {
    /// Less than nothing where storing the event took less time than it usually does.
    Compute(f64),
    Touch {
        line: u32,
        write: bool,
    },
    /// `None`: it writes no line of the lock's.
    Lock {
        lock: u32,
        line: Option<u32>,
        exclusive: bool,
        tried: bool,
    },
    Unlock {
        lock: u32,
        line: Option<u32>,
    },
    Own {
        lock: u32,
        line: u32,
    },
    Ahead {
        line: u32,
        write: bool,
    },
    AheadLock(u32),
    Device {
        bytes: u64,
        ns: f64,
    },
    Mark(&'static str),
    Joined,
}

/// Who touches something, and the number of its span.
#[derive(Clone, Copy, Debug)]
struct Toucher {
    owner: Owner,
    span: usize,
}

/// What is known of a line or a lock.
#[derive(Default)]
struct Known {
    /// The first to touch it; `None` before.
    first: Option<Owner>,
    shared: bool,
    /// The first operation to do so, and whether others did than those right after it.
    operation: Option<Toucher>,
    lasting: bool,
    written: bool,
    writes: u64,
    exclusive: u64,
    sites: HashMap<Site, u64>,
}

impl Known {
    fn touch(&mut self, toucher: Toucher, write: bool, site: Site) {
        match self.first {
            None => self.first = Some(toucher.owner),
            Some(first) => self.shared |= first != toucher.owner,
        }
        self.written |= write;
        if !matches!(toucher.owner, Owner::Thread(_)) {
            return;
        }
        let first = *self.operation.get_or_insert(toucher);
        self.lasting |= toucher.owner != first.owner || toucher.span - first.span >= PASSING;
        if write {
            self.writes += 1;
            *self.sites.entry(site).or_default() += 1;
        }
    }

    /// Whether it is no lasting thing, and this operation the first to touch it.
    fn begins_with(&self, span: usize) -> bool {
        !self.lasting && self.operation.is_some_and(|first| first.span == span)
    }

    fn named(&self) -> Named {
        let most = self
            .sites
            .iter()
            .max_by_key(|(site, count)| (**count, **site));
        Named {
            name: most.map_or_else(|| "background".to_owned(), |(site, _)| site.name()),
            writes: self.writes,
            exclusive: self.exclusive,
        }
    }
}

/// Invariant 1.
#[derive(Default)]
struct Places {
    lines: HashMap<usize, u32>,
    locks: BTreeMap<usize, u32>,
    known_lines: Vec<Known>,
    known_locks: Vec<Known>,
}

fn next_number(known: &mut Vec<Known>) -> u32 {
    known.push(Known::default());
    known.len() as u32 - 1
}

impl Places {
    fn line(&mut self, address: usize) -> u32 {
        let known = &mut self.known_lines;
        let line = self.lines.entry(address / LINE_BYTES);
        *line.or_insert_with(|| next_number(known))
    }

    fn lock(&mut self, address: usize) -> u32 {
        let known = &mut self.known_locks;
        let lock = self.locks.entry(address);
        *lock.or_insert_with(|| next_number(known))
    }

    /// What of these bytes was touched before: lines and locks.
    fn ahead(&self, bytes: Range<usize>, write: bool) -> Vec<Raw> {
        let lines = bytes.start / LINE_BYTES..bytes.end.div_ceil(LINE_BYTES);
        let lines = lines.filter_map(|line| self.lines.get(&line));
        let lines = lines.map(|&line| Raw::Ahead { line, write });
        let locks = self.locks.range(bytes);
        lines
            .chain(locks.map(|(_, &lock)| Raw::AheadLock(lock)))
            .collect()
    }

    fn born(&mut self, address: usize, bytes: usize) {
        for line in address / LINE_BYTES..(address + bytes).div_ceil(LINE_BYTES) {
            self.lines.remove(&line);
        }
        let locks = self.locks.range(address..address + bytes);
        let locks: Vec<usize> = locks.map(|(&place, _)| place).collect();
        for place in locks {
            self.locks.remove(&place);
        }
    }
}

/// Usual time before an event at a site.
fn usual(spans: &[Span], scale: Scale) -> HashMap<Site, f64> {
    let mut sums: HashMap<Site, (f64, u64)> = HashMap::new();
    for span in spans {
        let mut last = span.begin;
        for event in &span.events {
            let passed = (event.tick - last) as f64 * scale.ns_per_tick;
            last = event.tick;
            if passed < INTERRUPTION_NS {
                let sum = sums.entry(Site::of(event)).or_default();
                *sum = (sum.0 + passed, sum.1 + 1);
            }
        }
    }
    let mean = |(site, (sum, count))| (site, sum / count as f64);
    sums.into_iter().map(mean).collect()
}

/// Makes steps of everything that was recorded, in the order in which it came.
///
/// `cycles`: how many operations make each job once; without jobs, how many are counted.
pub fn steps(spans: &[Span], threads: usize, cycles: &[u64], scale: Scale) -> Trace {
    let usual = usual(spans, scale);
    let mut places = Places::default();
    let mut interruptions = 0;
    let mut raw: Vec<Vec<Raw>> = Vec::with_capacity(spans.len());
    for (number, span) in spans.iter().enumerate() {
        raw.push(raw_steps(
            (number, span),
            scale,
            &usual,
            &mut places,
            &mut interruptions,
        ));
    }
    let shared = |known: &Known| known.shared && known.written;
    let numbers = Numbers {
        lines: renumber(&places.known_lines, shared),
        locks: renumber(&places.known_locks, |known| known.shared),
        places: &places,
    };
    let mut trace = Trace {
        threads: vec![Vec::new(); threads],
        counted: cycles.iter().copied().max().unwrap_or(1),
        interruptions,
        ..Trace::default()
    };
    let named = |known: &[Known], numbers: &[u32]| {
        let shared = known.iter().zip(numbers);
        let shared = shared.filter(|(_, number)| **number != PRIVATE);
        shared.map(|(known, _)| known.named()).collect()
    };
    trace.lines = named(&places.known_lines, &numbers.lines);
    trace.locks = named(&places.known_locks, &numbers.locks);
    let mut jobs: BTreeMap<usize, Job> = BTreeMap::new();
    for (number, (span, raw)) in spans.iter().zip(&raw).enumerate() {
        match span.owner {
            Owner::Thread(thread) => {
                trace.threads[thread].push(operation(number, raw, &numbers));
            }
            Owner::Job(number) => {
                jobs.insert(number, job(raw, cycles[number], &numbers));
            }
        }
    }
    trace.jobs = jobs.into_values().collect();
    trace
}

fn renumber(known: &[Known], keep: impl Fn(&Known) -> bool) -> Vec<u32> {
    let mut next = 0;
    let number = |known: &Known| match keep(known) {
        true => {
            next += 1;
            next - 1
        }
        false => PRIVATE,
    };
    known.iter().map(number).collect()
}

fn raw_steps(
    (number, span): (usize, &Span),
    scale: Scale,
    usual: &HashMap<Site, f64>,
    places: &mut Places,
    interruptions: &mut u64,
) -> Vec<Raw> {
    let mut raw = Vec::with_capacity(span.events.len() * 2);
    let (mut last, mut waiting) = (span.begin, None);
    let mut piece: Option<Piece> = None;
    let operation = matches!(span.owner, Owner::Thread(_));
    let toucher = Toucher {
        owner: span.owner,
        span: number,
    };
    let mut born: Vec<Range<usize>> = Vec::new();
    // The lines that their holders wrote, if they did.
    let mut taken: HashMap<u32, Option<u32>> = HashMap::new();
    for event in &span.events {
        let mut passed = (event.tick - last) as f64 * scale.ns_per_tick;
        last = event.tick;
        if event.kind == Kind::Processor {
            // What passed went into asking.
            let now = event.address as f64;
            if let Some(piece) = piece {
                shrink(&mut raw[piece.from..], (now - piece.cpu_ns).max(0.0));
            }
            let from = raw.len();
            piece = Some(Piece { from, cpu_ns: now });
            continue;
        }
        if event.kind == Kind::Tried {
            // Part of the lock's event.
            if let Some(Raw::Lock { tried, .. }) = raw.last_mut() {
                *tried = true;
            }
            continue;
        }
        if let Some(piece) = &mut piece {
            // Storing the event was the processor's, too.
            piece.cpu_ns += scale.event_ns;
        }
        let site = Site::of(event);
        if operation && waiting.is_none() && passed >= INTERRUPTION_NS {
            *interruptions += 1;
            passed = usual.get(&site).copied().unwrap_or(0.0);
        }
        let compute = passed - scale.event_ns;
        match &mut waiting {
            Some((_, ns)) => *ns += compute,
            None => raw.push(Raw::Compute(compute)),
        }
        let write = event.kind != Kind::Read;
        let own = |address| born.iter().any(|range| range.contains(&address));
        match event.kind {
            Kind::LockExclusive | Kind::LockShared | Kind::LockEntered | Kind::Unlock
                if own(event.address) =>
            {
                let (line, lock) = (places.line(event.address), places.lock(event.address));
                places.known_lines[line as usize].touch(toucher, true, site);
                places.known_locks[lock as usize].touch(toucher, true, site);
                raw.push(Raw::Own { lock, line });
            }
            Kind::Read | Kind::Write => {
                let line = places.line(event.address);
                places.known_lines[line as usize].touch(toucher, write, site);
                raw.push(Raw::Touch { line, write });
            }
            Kind::LockExclusive | Kind::LockShared => {
                let exclusive = event.kind == Kind::LockExclusive;
                let (line, lock) = (places.line(event.address), places.lock(event.address));
                places.known_lines[line as usize].touch(toucher, true, site);
                places.known_locks[lock as usize].touch(toucher, true, site);
                places.known_locks[lock as usize].exclusive += u64::from(exclusive && operation);
                taken.insert(lock, Some(line));
                raw.push(Raw::Lock {
                    lock,
                    line: Some(line),
                    exclusive,
                    tried: false,
                });
            }
            Kind::LockEntered => {
                // What that wrote comes by itself.
                let lock = places.lock(event.address);
                places.known_locks[lock as usize].touch(toucher, true, site);
                taken.insert(lock, None);
                raw.push(Raw::Lock {
                    lock,
                    line: None,
                    exclusive: false,
                    tried: false,
                });
            }
            Kind::Unlock => {
                let lock = places.lock(event.address);
                // Not one that was taken before the recording began.
                if let Some(line) = taken.remove(&lock) {
                    raw.push(Raw::Unlock { lock, line });
                }
            }
            Kind::Born => {
                places.born(event.address, event.line as usize);
                born.push(event.address..event.address + event.line as usize);
            }
            Kind::Ahead | Kind::AheadToChange => {
                let bytes = event.address..event.address + event.line as usize;
                raw.extend(places.ahead(bytes, event.kind == Kind::AheadToChange));
            }
            Kind::DeviceBegin => waiting = Some((event.address as u64, 0.0)),
            Kind::DeviceEnd => {
                if let Some(piece) = &mut piece {
                    piece.cpu_ns += event.address as f64;
                }
                if let Some((bytes, ns)) = waiting.take() {
                    raw.push(Raw::Device { bytes, ns });
                }
            }
            Kind::Mark => raw.push(Raw::Mark(event.name)),
            Kind::Joined => raw.push(Raw::Joined),
            Kind::Tried | Kind::Processor | Kind::Note => {}
        }
    }
    let rest = (span.end - last) as f64 * scale.ns_per_tick;
    if !operation || rest < INTERRUPTION_NS {
        raw.push(Raw::Compute(rest - scale.event_ns));
    }
    raw
}

/// What came since the thread's processor time was asked for.
#[derive(Clone, Copy)]
struct Piece {
    /// The first of its steps.
    from: usize,
    /// The processor time then, with what was spent since on no step of its own.
    cpu_ns: f64,
}

/// Takes from the time between steps what cannot have been the processor's: from the longest pauses, which are those in
/// which something else ran.
fn shrink(raw: &mut [Raw], cpu_ns: f64) {
    let spent = |raw: &Raw| match raw {
        Raw::Compute(ns) => *ns,
        _ => 0.0,
    };
    let mut pauses: Vec<f64> = raw.iter().map(spent).collect();
    let mut excess = pauses.iter().sum::<f64>() - cpu_ns;
    if excess <= 0.0 {
        return;
    }
    pauses.push(0.0);
    pauses.sort_unstable_by(|a, b| b.total_cmp(a));
    // All pauses above this are cut down to it.
    let mut most = 0.0;
    for (longer, pair) in (1..).zip(pauses.windows(2)) {
        let step = (pair[0] - pair[1]) * longer as f64;
        if step >= excess {
            most = pair[0] - excess / longer as f64;
            break;
        }
        excess -= step;
    }
    for step in raw {
        if let Raw::Compute(ns) = step {
            *ns = ns.min(most);
        }
    }
}

/// Lines and locks as the model counts them.
struct Numbers<'a> {
    lines: Vec<u32>,
    locks: Vec<u32>,
    places: &'a Places,
}

/// Invariant 2, of an operation.
fn operation(span: usize, raw: &[Raw], numbers: &Numbers<'_>) -> Vec<Step> {
    let mut steps = Vec::new();
    let (mut lines, mut locks) = (HashSet::new(), HashSet::new());
    for step in raw {
        let (line, lock) = match *step {
            Raw::Touch { line, .. } => (Some(line), None),
            Raw::Lock { lock, line, .. } | Raw::Unlock { lock, line } => (line, Some(lock)),
            Raw::Own { lock, line } => (Some(line), Some(lock)),
            _ => continue,
        };
        let begins = |known: &[Known], number: u32| known[number as usize].begins_with(span);
        if let Some(line) = line
            && numbers.lines[line as usize] != PRIVATE
            && begins(&numbers.places.known_lines, line)
            && lines.insert(line)
        {
            steps.push(Step::Anew(numbers.lines[line as usize]));
        }
        if let Some(lock) = lock
            && numbers.locks[lock as usize] != PRIVATE
            && begins(&numbers.places.known_locks, lock)
            && locks.insert(lock)
        {
            steps.push(Step::AnewLock(numbers.locks[lock as usize]));
        }
    }
    steps.extend(lower(raw, numbers));
    steps
}

/// Invariant 2.
fn lower(raw: &[Raw], numbers: &Numbers<'_>) -> Vec<Step> {
    let Numbers { lines, locks, .. } = numbers;
    let mut steps = Vec::new();
    let mut compute = 0.0;
    let of = |line: Option<u32>| line.map_or(PRIVATE, |line| lines[line as usize]);
    for step in raw {
        let step = match *step {
            Raw::Compute(ns) => {
                compute += ns;
                continue;
            }
            Raw::Mark(_) | Raw::Joined => continue,
            Raw::Touch { line, write } => match (lines[line as usize], write) {
                (PRIVATE, _) => continue,
                (line, true) => Step::Write(line),
                (line, false) => Step::Read(line),
            },
            Raw::Lock {
                lock,
                line,
                exclusive,
                tried,
            } => match (locks[lock as usize], of(line)) {
                (PRIVATE, PRIVATE) => continue,
                (PRIVATE, line) => Step::Write(line),
                (lock, line) => Step::Lock {
                    lock,
                    line,
                    exclusive,
                    tried,
                },
            },
            Raw::Unlock { lock, line } => match (locks[lock as usize], of(line)) {
                (PRIVATE, PRIVATE) => continue,
                (PRIVATE, line) => Step::Write(line),
                (lock, line) => Step::Unlock { lock, line },
            },
            Raw::Own { lock, line } => match (locks[lock as usize], lines[line as usize]) {
                (PRIVATE, PRIVATE) => continue,
                (PRIVATE, line) => Step::Write(line),
                (lock, line) => Step::Own { lock, line },
            },
            Raw::Ahead { line, write } => match lines[line as usize] {
                PRIVATE => continue,
                line => Step::Ahead { line, write },
            },
            Raw::AheadLock(lock) => match locks[lock as usize] {
                PRIVATE => continue,
                lock => Step::AheadLock(lock),
            },
            Raw::Device { bytes, ns } => Step::Device {
                bytes,
                here: picoseconds(ns),
            },
        };
        flush(&mut steps, &mut compute);
        steps.push(step);
    }
    flush(&mut steps, &mut compute);
    steps
}

fn flush(steps: &mut Vec<Step>, compute: &mut f64) {
    let time = picoseconds(*compute);
    if time > 0 {
        *compute = 0.0;
        steps.push(Step::Compute(time));
    }
}

fn picoseconds(ns: f64) -> Time {
    (ns * 1000.0).round() as Time
}

/// Cuts a job into stages: each mark begins a part, and one thread goes on when they are joined.
fn job(raw: &[Raw], cycle: u64, numbers: &Numbers<'_>) -> Job {
    let mut stages = vec![Stage::default()];
    // Where the steps begin that are not cut yet, and whether they are a part.
    let (mut from, mut in_part) = (0, false);
    for (at, step) in raw.iter().enumerate() {
        let name = match step {
            Raw::Mark(name) => Some(*name),
            Raw::Joined => None,
            _ => continue,
        };
        // A stage begins where parts are joined, and where others follow them at once.
        let last = stages.len() - 1;
        end_piece(&mut stages[last], lower(&raw[from..at], numbers), in_part);
        if in_part && name != Some(stages[last].name) {
            stages.push(Stage::default());
        }
        if let (Some(name), Some(stage)) = (name, stages.last_mut()) {
            stage.name = name;
        }
        (from, in_part) = (at, name.is_some());
    }
    let last = stages.len() - 1;
    end_piece(&mut stages[last], lower(&raw[from..], numbers), in_part);
    Job { cycle, stages }
}

fn end_piece(stage: &mut Stage, steps: Vec<Step>, in_part: bool) {
    match in_part {
        true => stage.parts.push(steps),
        false => stage.serial.extend(steps),
    }
}

#[cfg(test)]
mod tests;
