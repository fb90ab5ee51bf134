//! How a thread waits for completions: the one place that knows.
//!
//! Owns the policy of a device, what waits for it came to, and, for each thread, what that has learnt of the device.
//!
//! 1. The policy decides when a thread looks and how it sleeps, never what has completed: a wait ends early at most, and whoever waits
//!    looks again.
//! 2. A wait spins only from the moment when its transfers should nearly be there to a short time after (`plan`): whatever
//!    becomes of the device, a wait costs no more CPU time than that. Nobody spins without transfers in flight.
//! 3. No more threads spin at a time than there are CPUs; that one that spins keeps a CPU from who completes its transfer shows in
//!    what its waits take, and has them rest ([`estimate`], invariant 2). That holds for `lazy`; who asks for `poll` gets it.
//! 4. Under the seeded scheduler a wait is a plain one, whatever the policy.
//!
//! 5. What a transfer took ends with the look that began to find it: what looks do about completions, where they do, is not the device's
//!    time. Else a prediction that was too high would be found to be true for ever where nothing ends a sleep early.
//!
//! Transfers that are waited for together are one group with one predicted finish, that of those like its slowest: one sleep, one look.
//! The technique is that of lazy polling (NIO 2022): sleep until just before the predicted end, then poll.

mod costs;
mod counts;
pub(crate) mod enter;
mod estimate;
mod plan;
#[cfg(test)]
mod tests;

pub use costs::Costs;
pub use counts::{Histogram, Reaped};
pub(crate) use estimate::{Class, Times};

use crate::kept::Kept;
use crate::queue::Kind;
use base::atomic::{AtomicUsize, Ordering};
use base::clock;
use base::thread;
use counts::{CPU_EACH, Counts};
use estimate::{Line, Outcome};
use plan::Plan;
use std::cell::{Cell, RefCell};
use std::sync::Arc;

/// How threads wait for what they have in flight on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reaping {
    /// Asleep, until the kernel wakes them.
    #[default]
    Interrupt,
    /// Awake: they look again and again.
    Poll,
    /// Asleep until shortly before it should be there, then awake.
    Lazy,
}

impl Reaping {
    pub const ALL: [Reaping; 3] = [Reaping::Interrupt, Reaping::Poll, Reaping::Lazy];

    pub fn name(self) -> &'static str {
        match self {
            Reaping::Interrupt => "interrupt",
            Reaping::Poll => "poll",
            Reaping::Lazy => "lazy",
        }
    }

    /// The one that is called so.
    pub fn parse(name: &str) -> Option<Reaping> {
        Reaping::ALL.into_iter().find(|r| r.name() == name)
    }
}

/// What is waited for.
pub(crate) trait Source {
    /// Whether it is there. Does not wait, and asks the kernel only if that has something to tell.
    fn is_there(&mut self) -> bool;

    /// Hands to the kernel what it does not have yet.
    fn start(&mut self) {}

    /// Starts what is not started, and sleeps until it is there, or that moment of [`clock::now_ns`] has come; or less.
    fn sleep(&mut self, until: Option<u64>);

    /// How much of it looks have taken out so far, where they do the work of the completions: there one that finds something takes time, in
    /// which nothing was waited for.
    fn found(&self) -> Option<usize> {
        None
    }

    /// Between two looks. Who waits for another thread, of the kernel's or of this process, lets that go first.
    fn pause(&mut self) {
        thread::relax();
    }

    /// Whether what was said to be there is something else than transfers, from which nothing is learnt about these.
    fn is_other(&mut self) -> bool {
        false
    }
}

/// Transfers that are waited for together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    class: Class,
    since: u64,
    mode: Mode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Block,
    /// As `Block`, and nothing is learnt.
    Doze,
    Spin,
    Lazy,
}

impl Group {
    /// Who waits for it sleeps, as by a plain call.
    pub fn blocks(&self) -> bool {
        matches!(self.mode, Mode::Block | Mode::Doze)
    }
}

/// How waits for one device are made; see the module's head.
#[derive(Debug)]
pub(crate) struct Reaper {
    policy: Reaping,
    counts: Counts,
    /// Distinguishes the device in tables of threads.
    id: Arc<()>,
}

/// Of so many transfers in flight by themselves one is timed, if nothing is learnt from them.
const TIMED_EACH: u64 = 16;

/// Who spins looks at a bell once in so many looks.
pub(crate) const BELL_EACH: u32 = 16;

/// Threads that spin in this process.
static SPINNING: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static TIMES: RefCell<Kept<Times>> = const { RefCell::new(Kept::new()) };
    /// Waits, to take the CPU time of some.
    static WAITS: Cell<u64> = const { Cell::new(0) };
}

impl Reaper {
    pub fn new(policy: Reaping) -> Reaper {
        Reaper {
            policy,
            counts: Counts::new(),
            id: Arc::new(()),
        }
    }

    pub fn policy(&self) -> Reaping {
        match thread::is_scheduled() {
            true => Reaping::Interrupt,
            false => self.policy,
        }
    }

    /// Whether it is of use to know how long transfers take.
    pub fn learns(&self) -> bool {
        self.policy() == Reaping::Lazy
    }

    pub fn reaped(&self) -> Reaped {
        self.counts.get()
    }

    /// What the calling thread knows of the device, until it is [kept](Reaper::keep).
    pub fn take(&self) -> Times {
        if self.policy != Reaping::Lazy {
            return Times::default();
        }
        let kept = TIMES.try_with(|all| all.borrow_mut().take(&self.id));
        // While a thread ends its table is gone.
        kept.ok().flatten().unwrap_or_default()
    }

    pub fn keep(&self, times: Times) {
        if self.policy == Reaping::Lazy {
            let kept = TIMES.try_with(|all| all.borrow_mut().keep(&self.id, times));
            tracing::trace!(kept = kept.is_ok(), "times");
        }
    }

    /// When the transfer of that number, in flight by itself, is started, if its time is taken.
    pub fn start(&self, number: u64) -> Option<u64> {
        let taken = self.learns() || number.is_multiple_of(TIMED_EACH);
        taken.then(clock::now_ns)
    }

    /// A wait for whatever ends first, where nothing is learnt.
    pub fn begin_any(&self) -> Group {
        let mode = match self.policy() {
            Reaping::Poll => Mode::Spin,
            Reaping::Interrupt | Reaping::Lazy => Mode::Block,
        };
        let (class, since) = (Class::of(Kind::Read, 0, 1), 0);
        Group { class, since, mode }
    }

    /// A group that is started at this moment, and how it will be waited for.
    pub fn begin(&self, times: &mut Times, class: Class) -> Group {
        match self.learns() && times.dozes(class) {
            true => Group {
                class,
                since: 0,
                mode: Mode::Doze,
            },
            false => self.begin_at(times, class, clock::now_ns()),
        }
    }

    /// The same of one that was started then.
    pub fn begin_at(&self, times: &mut Times, class: Class, since: u64) -> Group {
        let mode = match self.policy() {
            Reaping::Interrupt => Mode::Block,
            Reaping::Poll => Mode::Spin,
            Reaping::Lazy => match times.line(class).chooses_lazy(Costs::get()) {
                true => Mode::Lazy,
                false => Mode::Block,
            },
        };
        Group { class, since, mode }
    }

    /// The same of the first of so many parts in flight, each by itself. With many something ends all the time: who sleeps as by an
    /// interrupt finds several at once, and who spins spins for each.
    pub fn begin_first(
        &self,
        times: &mut Times,
        (class, since): (Class, u64),
        in_flight: usize,
    ) -> Group {
        let mode = match self.policy() {
            Reaping::Lazy if times.is_dense(Costs::get(), class, in_flight) => Mode::Block,
            _ => return self.begin_at(times, class, since),
        };
        Group { class, since, mode }
    }

    /// Does what blocks until a group is there, which is all of its wait.
    pub fn block(&self, times: &mut Times, group: Group, body: impl FnOnce()) {
        let wait = Wait::begin(group);
        body();
        match group.mode {
            Mode::Doze => self.counts.add(Outcome::Blocked, false, wait.cpu()),
            _ => {
                let seen = self.end(times, wait, Outcome::Blocked, End::Whole);
                self.judge(times, group, seen, seen.now);
            }
        }
    }

    /// Waits for a group; the time that it took is known then, if all of it is there.
    pub fn wait(&self, times: &mut Times, group: Group, source: &mut dyn Source) -> Seen {
        let seen = self.wait_for(times, group, source, true);
        self.judge(times, group, seen, seen.now);
        seen
    }

    /// The same, but whether it paid is [judged](Reaper::judge) by the caller, who has more to do for it than a plain call.
    pub fn wait_within(&self, times: &mut Times, group: Group, source: &mut dyn Source) -> Seen {
        self.wait_for(times, group, source, true)
    }

    /// The same; if it is the first of several groups, what each took is [told](Reaper::ended) by who finds it.
    pub fn wait_for_first(&self, times: &mut Times, group: Group, source: &mut dyn Source) -> Seen {
        let seen = self.wait_for(times, group, source, false);
        self.judge(times, group, seen, seen.now);
        seen
    }

    /// Learns whether it paid to wait so, by how long it took until all was done that a wait of its kind needs beside a plain call.
    pub fn judge(&self, times: &mut Times, group: Group, seen: Seen, now: u64) {
        if self.learns() && seen.tells {
            let took = now.saturating_sub(group.since);
            times
                .line(group.class)
                .learn(Costs::get(), seen.outcome, took);
        }
    }

    fn wait_for(
        &self,
        times: &mut Times,
        group: Group,
        source: &mut dyn Source,
        whole: bool,
    ) -> Seen {
        let mut wait = Wait::begin(group);
        let outcome = match group.mode {
            Mode::Block => {
                source.sleep(None);
                Outcome::Blocked
            }
            Mode::Doze => {
                source.sleep(None);
                let outcome = Outcome::Blocked;
                self.counts.add(outcome, false, wait.cpu());
                return Seen {
                    outcome,
                    now: clock::now_ns(),
                    by_look: false,
                    tells: false,
                };
            }
            Mode::Spin => {
                let begin = clock::now_ns();
                source.start();
                while !source.is_there() {
                    source.pause();
                }
                let spun = clock::now_ns() - begin;
                Outcome::Caught { spun }
            }
            Mode::Lazy => wait.lazily(times, source),
        };
        let there = whole && (outcome != Outcome::Blocked || source.is_there());
        let end = match there {
            // It may take a lock to tell.
            _ if self.learns() && source.is_other() => End::Other,
            true => End::Whole,
            false => End::Part,
        };
        self.end(times, wait, outcome, end)
    }

    /// Counts a wait, and learns from what was waited for.
    fn end(&self, times: &mut Times, wait: Wait, outcome: Outcome, end: End) -> Seen {
        let (group, now) = (wait.group, clock::now_ns());
        let took = now.saturating_sub(group.since);
        self.counts.add(outcome, wait.slept, wait.cpu());
        let seen = Seen {
            outcome,
            now: wait.there.unwrap_or(now),
            by_look: wait.there.is_some(),
            tells: end != End::Other,
        };
        if !self.learns() {
            if end == End::Whole {
                self.counts.add_time(took, 1);
            }
            return seen;
        }
        let (line, margin) = times.line_and_margin(group.class);
        if end == End::Whole {
            // Those that doze take as long.
            self.counts.add_time(took, line.told());
        }
        if end != End::Other
            && let Some(prediction) = line.prediction()
        {
            margin.learn(Costs::get(), group.class, outcome, prediction);
        }
        if end == End::Whole {
            Self::note(line, group.since, seen);
        }
        seen
    }

    /// Something in flight by itself, which was [started](Reaper::start) then, has done what it should, and was found so.
    pub fn ended(&self, times: &mut Times, (class, since): (Class, u64), seen: Seen) {
        let count = match self.learns() {
            true => 1,
            false => TIMED_EACH,
        };
        self.counts.add_time(seen.now.saturating_sub(since), count);
        if self.learns() {
            Self::note(times.line(class), since, seen);
        }
    }

    /// Notes that something was found by a wait that was started then.
    fn note(line: &mut Line, since: u64, seen: Seen) {
        let took = seen.now.saturating_sub(since);
        let woken = line.woken(Costs::get(), took);
        // Who blocks has it on another ring, where it takes another time.
        line.looked |= seen.by_look;
        let took = match seen.outcome {
            // Of what is long all waits block: there is nothing else by which it would be known that it is so no more.
            Outcome::Blocked if line.looked && !line.is_long(Costs::get()) => return,
            Outcome::Blocked | Outcome::Late { .. } | Outcome::Early => woken,
            Outcome::Caught { .. } => took,
            // It was there some time before.
            Outcome::Found if line.prediction().is_some_and(|ns| took < ns) => took,
            // If nothing ends a sleep early that may have been any time.
            Outcome::Overslept { .. }
                if seen.by_look && line.prediction().is_some_and(|ns| took < ns) =>
            {
                took
            }
            Outcome::Found | Outcome::Overslept { .. } => return,
        };
        line.sample(took);
    }
}

/// What a wait ended with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// All that was waited for.
    Whole,
    /// A part of it, or one of several.
    Part,
    /// Nothing of it: somebody rang, or the owner's patience was at its end.
    Other,
}

/// What is known of completions that a wait has found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    outcome: Outcome,
    now: u64,
    /// What was there by then looks took out (invariant 5).
    by_look: bool,
    /// Something is learnt from how long the wait took.
    tells: bool,
}

impl Seen {
    /// Whether something is to be learnt from how long the wait took.
    pub fn tells(self) -> bool {
        self.tells
    }

    /// Of what was there when somebody looked.
    pub fn found() -> Seen {
        Seen {
            outcome: Outcome::Found,
            now: clock::now_ns(),
            by_look: false,
            tells: false,
        }
    }
}

/// A wait under way.
struct Wait {
    group: Group,
    slept: bool,
    /// CPU time of the thread at the beginning, of some waits.
    cpu_ns: Option<u64>,
    /// When the look began that began to find it, if looks tell (invariant 5).
    there: Option<u64>,
}

impl Wait {
    fn begin(group: Group) -> Wait {
        let number = WAITS.try_with(|waits| waits.replace(waits.get() + 1));
        let taken = number.is_ok_and(|number| number.is_multiple_of(CPU_EACH));
        Wait {
            group,
            slept: false,
            cpu_ns: taken.then(clock::thread_cpu_ns),
            there: None,
        }
    }

    /// What all waits took, if this one tells.
    fn cpu(&self) -> u64 {
        let of_this = self.cpu_ns.map(|begin| clock::thread_cpu_ns() - begin);
        of_this.map_or(0, |ns| ns * CPU_EACH)
    }

    fn lazily(&mut self, times: &mut Times, source: &mut dyn Source) -> Outcome {
        let Group { class, since, .. } = self.group;
        if source.is_there() {
            return Outcome::Found;
        }
        let (line, margin) = times.line_and_margin(class);
        let costs = Costs::get();
        let mut looks = Looks::new(source);
        // When the last sleep ended, and when it should have.
        let mut awake = None;
        if looks.found > Some(0) && looks.go_on() {
            return self.found_by(&looks, awake, Outcome::Caught { spun: 0 });
        }
        loop {
            let now = clock::now_ns();
            match line.plan(costs, margin, (class, since), now) {
                Plan::Sleep { until } => {
                    looks.source.sleep(Some(until));
                    self.slept = true;
                    let now = clock::now_ns();
                    awake = Some((now, until));
                    if looks.look(now) || looks.there.is_some() && looks.go_on() {
                        return self.found_by(&looks, awake, Outcome::Early);
                    }
                }
                Plan::Spin { until } => {
                    let outcome = match spin(&mut looks, now, until) {
                        Some((spun, true)) => {
                            return self.found_by(&looks, awake, Outcome::Caught { spun });
                        }
                        Some((spun, false)) => Outcome::Late { spun },
                        None => Outcome::Blocked,
                    };
                    source.sleep(None);
                    return outcome;
                }
                Plan::Block => {
                    source.sleep(None);
                    // It is no wait that was to block, and is not compared as one.
                    return Outcome::Late { spun: 0 };
                }
            }
        }
    }

    /// How a wait ended whose last look found it, `outcome` if that was not the first one after a sleep, or that ended before its time. Looks
    /// of which each found something are one.
    fn found_by(
        &mut self,
        looks: &Looks<'_>,
        awake: Option<(u64, u64)>,
        outcome: Outcome,
    ) -> Outcome {
        self.there = looks.there;
        match (awake, outcome, looks.there) {
            (Some((now, until)), Outcome::Early, _) if now >= until => {
                Outcome::Overslept { late: now - until }
            }
            (Some((now, until)), Outcome::Caught { .. }, Some(there)) if there <= now => {
                Outcome::Overslept {
                    late: now.saturating_sub(until),
                }
            }
            _ => outcome,
        }
    }
}

/// Looks of a wait, and what they found.
struct Looks<'a> {
    source: &'a mut dyn Source,
    found: Option<usize>,
    /// When the first look began of those after the last that found nothing, if looks tell.
    there: Option<u64>,
}

impl Looks<'_> {
    fn new(source: &mut dyn Source) -> Looks<'_> {
        Looks {
            found: source.found(),
            source,
            there: None,
        }
    }

    /// Whether it is there, at this moment.
    fn look(&mut self, now: u64) -> bool {
        let is_there = self.source.is_there();
        let found = self.source.found();
        if found.is_some() {
            self.there = match is_there || found > self.found {
                true => self.there.or(Some(now)),
                false => None,
            };
            self.found = found;
        }
        is_there
    }

    /// Looks as long as something is found, and whether it is all there then: who finds something does not wait, however long that takes.
    fn go_on(&mut self) -> bool {
        loop {
            let is_there = self.look(clock::now_ns());
            if is_there || self.there.is_none() {
                return is_there;
            }
        }
    }
}

/// Looks until it is there or the time has come: how long it looked in vain, and whether it is there. `None`: others spin.
fn spin(looks: &mut Looks<'_>, begin: u64, until: u64) -> Option<(u64, bool)> {
    let _one = Spinner::start()?;
    looks.source.start();
    let mut now = begin;
    loop {
        let is_there = looks.look(now);
        now = clock::now_ns();
        // See `Looks::go_on`.
        if is_there || now >= until && looks.there.is_none() {
            let end = looks.there.filter(|_| is_there).unwrap_or(now);
            return Some((end.saturating_sub(begin), is_there));
        }
        looks.source.pause();
    }
}

/// One of those who spin (invariant 3).
struct Spinner;

impl Spinner {
    fn start() -> Option<Spinner> {
        let one = Spinner;
        // A hint: nothing but CPU time depends on it.
        let others = SPINNING.fetch_add(1, Ordering::Relaxed);
        (others < cpus()).then_some(one)
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        SPINNING.fetch_sub(1, Ordering::Relaxed);
    }
}

fn cpus() -> usize {
    static CPUS: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    *CPUS.get_or_init(thread::cpu_count)
}
