//! How long transfers take: a low quantile of the last few of each class, and how each class is best waited for.
//!
//! Owns what one thread, or one owner of queues, has learnt of one device. Nobody else touches it.
//!
//! 1. A prediction is a time that was seen among the last [`SEEN`] of its class: never less than all of them, nor more.
//!    It follows up when all but [`LOW`] of them are of the new kind, and down when [`LOW`] and one are.
//! 2. A class whose sleeps end too late, whose spins find nothing, or whose waits gain nothing over those that block, rests: it blocks
//!    for a while, longer each time, unless its prediction changes.

use super::costs::Costs;
use super::plan::{self, Plan};
use crate::block::{Durability, Operation};
use crate::queue::Kind;

/// Times that are remembered of a class.
pub(super) const SEEN: usize = 16;
/// How many of them lie below the prediction.
const LOW: usize = 2;
/// Times without which nothing is predicted.
const FEW: usize = 4;
/// Of so many waits of a class the last few block, to see what that takes. The first of them does not tell: a CPU that was awake all
/// the time before goes to rest by more than one that has done so lately.
const AUDIT: u32 = 256;
const AUDITED: u32 = 4;
/// Waits for which a class rests, at first and at most.
const REST: u32 = 64;
const REST_MAX: u32 = 4096;
/// Of so many waits of a rest one is looked at, which is enough to see that the device has become another one.
const DOZED: u32 = 4;
/// A wait gains nothing if it is not shorter by one part of so many of a wake-up than one that blocks: it took its CPU time for nothing.
const GAIN: i64 = 8;
/// Good waits by which the next rest becomes shorter by a factor of e.
const FORGOTTEN: u32 = 512;
/// What is later than so many wake-ups is the machine's doing, and not the wait's, beyond them.
const LATE: u64 = 8;
/// How much what a wait took counts in the mean of its kind: one part of so many.
const SHARE: i64 = 64;
/// Waits without which a mean says nothing.
const MEANT: u32 = 32;
/// The first that block to see what that takes are those after so many that did not.
const FIRST: u32 = 2 * MEANT;

/// The last times of a class, in nanoseconds, as they came and in their order.
#[derive(Clone, Debug, Default)]
pub(super) struct Window {
    came: [u32; SEEN],
    sorted: [u32; SEEN],
    len: usize,
    next: usize,
}

impl Window {
    pub fn add(&mut self, ns: u64) {
        let ns = u32::try_from(ns).unwrap_or(u32::MAX);
        let old = std::mem::replace(&mut self.came[self.next], ns);
        self.next = (self.next + 1) % SEEN;
        let gone = match self.len < SEEN {
            true => {
                self.len += 1;
                self.len - 1
            }
            false => self.sorted.iter().position(|&t| t == old).unwrap_or(0),
        };
        // In order but for that one, which goes where it belongs.
        let sorted = &mut self.sorted[..self.len];
        let mut at = gone;
        while at > 0 && sorted[at - 1] > ns {
            sorted[at] = sorted[at - 1];
            at -= 1;
        }
        while at + 1 < sorted.len() && sorted[at + 1] < ns {
            sorted[at] = sorted[at + 1];
            at += 1;
        }
        sorted[at] = ns;
    }

    /// The low quantile; `None` of too few.
    pub fn low(&self) -> Option<u64> {
        let at = LOW.min(self.len / 4);
        (self.len >= FEW).then(|| u64::from(self.sorted[at]))
    }
}

/// What transfers have in common that take about as long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Class {
    op: u8,
    /// Of the bytes, in powers of two.
    size: u8,
    /// Of transfers in flight, in powers of two.
    depth: u8,
}

const OPS: usize = 4;
const SIZES: usize = 13;
const DEPTHS: usize = 6;
/// From here on a transfer is large: 128 KiB.
const LARGE: u8 = 8;

impl Class {
    /// Of `count` transfers that are waited for together, by the one that takes longest.
    pub fn of(kind: Kind, bytes: usize, count: usize) -> Class {
        let op = match kind {
            Kind::Read => 0,
            Kind::Write(Durability::Volatile | Durability::Checked) => 1,
            Kind::Write(Durability::Durable) => 2,
            Kind::Flush => 3,
        };
        let log = |n: usize| usize::BITS - 1 - n.max(1).leading_zeros();
        Class {
            op,
            size: log(bytes.div_ceil(512).next_power_of_two()).min(SIZES as u32 - 1) as u8,
            depth: log(count).min(DEPTHS as u32 - 1) as u8,
        }
    }

    pub fn of_operations<'a: 'b, 'b>(all: impl Iterator<Item = &'b Operation<'a>>) -> Class {
        let (mut op, mut bytes, mut count) = (Kind::Read, 0, 0);
        for operation in all {
            count += 1;
            bytes = bytes.max(operation.bytes());
            op = match (op, operation) {
                (Kind::Flush, _) | (_, Operation::Flush) => Kind::Flush,
                (op, Operation::Read { .. }) => op,
                (Kind::Write(Durability::Durable), _) => op,
                (_, Operation::Write { durability, .. }) => Kind::Write(*durability),
            };
        }
        Class::of(op, bytes, count)
    }

    fn index(self) -> usize {
        (usize::from(self.op) * SIZES + usize::from(self.size)) * DEPTHS + usize::from(self.depth)
    }

    fn is_large(self) -> bool {
        self.size >= LARGE
    }
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It was there before anybody waited.
    Found,
    /// The caller blocked, because it chose to.
    Blocked,
    /// Something woke the sleeper before its time.
    Early,
    /// It was there at the first look after a sleep, which ended so many nanoseconds after it should.
    Overslept { late: u64 },
    /// A spin found it, after so many nanoseconds.
    Caught { spun: u64 },
    /// A spin of so many did not, or none was tried because it was too late for that; the caller blocked.
    Late { spun: u64 },
}

/// What is known of a class.
#[derive(Clone, Debug, Default)]
pub(crate) struct Line {
    window: Window,
    /// Waits that are still to block, how many the next rest has, and the prediction that led to it.
    rest: u32,
    next_rest: u32,
    rests_at: u64,
    /// What is forgotten of the next rest, in parts of [`FORGOTTEN`].
    good: u32,
    turns: u32,
    /// Who is awake looks on a ring of its own, where nothing tells of completions but looks.
    pub looked: bool,
    /// The wait before blocked, too.
    has_blocked: bool,
    /// Of 256 waits those that spun for nothing, about.
    failing: u32,
    /// What waits took beside what was predicted: those that block, and the others.
    blocked: Mean,
    lazy: Mean,
}

/// The mean of quotients, so that it means the same when the device has become another one.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    /// In units of 2^-16.
    value: i64,
    count: u32,
}

impl Mean {
    /// Of a wait that took so long; what is beyond `most` is not the wait's.
    fn add(&mut self, took: u64, most: u64, prediction: u64) {
        let took = took.min(most);
        let quotient = ((took.min(1 << 40) << 16) / prediction.max(1)) as i64;
        self.count = self.count.saturating_add(1);
        let share = i64::from(self.count).min(SHARE);
        self.value += (quotient - self.value) / share;
    }
}

impl Line {
    pub fn prediction(&self) -> Option<u64> {
        self.window.low()
    }

    /// Nobody waits for such transfers but by blocking.
    pub fn is_long(&self, costs: &Costs) -> bool {
        self.prediction().is_some_and(|ns| plan::is_long(costs, ns))
    }

    /// Whether the next wait of this class sleeps and spins; else it blocks. To be asked once for each.
    pub fn chooses_lazy(&mut self, costs: &Costs) -> bool {
        let Some(prediction) = self.prediction() else {
            return false;
        };
        if plan::is_long(costs, prediction) {
            return false;
        }
        if self.rest > 0 {
            let changed = prediction.abs_diff(self.rests_at) > self.rests_at / 4;
            self.rest = match changed {
                true => 0,
                false => self.rest - 1,
            };
            if self.rest > 0 {
                return false;
            }
            self.lazy = Mean::default();
        }
        self.turns += 1;
        (self.turns + AUDIT - AUDITED - FIRST) % AUDIT < AUDIT - AUDITED
    }

    /// Whether the next wait is one of a rest that is not looked at. To be asked once for each, before [`chooses_lazy`](Self::chooses_lazy),
    /// which need not be if so.
    fn dozes(&mut self) -> bool {
        let dozes = self.rest > 1 && !self.rest.is_multiple_of(DOZED);
        self.rest -= u32::from(dozes);
        dozes
    }

    /// For how many waits that were not looked at one tells that was, with itself.
    pub fn told(&self) -> u64 {
        match self.rest {
            0 => 1,
            _ => u64::from(DOZED),
        }
    }

    /// What is to be done at this moment of a wait that began at `since`.
    pub(super) fn plan(
        &self,
        costs: &Costs,
        margin: &Margin,
        (class, since): (Class, u64),
        now: u64,
    ) -> Plan {
        match self.prediction() {
            Some(ns) => {
                let grace = match class.is_large() {
                    true => ns / LARGE_SHARE,
                    false => 2 * costs.wake_ns,
                };
                plan::plan(costs, since + ns, margin.get(costs, class), grace, now)
            }
            None => Plan::Block,
        }
    }

    /// Remembers a time that a transfer took.
    pub fn sample(&mut self, ns: u64) {
        self.window.add(ns);
    }

    /// Learns from how a wait ended that took so long.
    pub fn learn(&mut self, costs: &Costs, outcome: Outcome, took: u64) {
        let Some(prediction) = self.prediction() else {
            return;
        };
        if self.window.len < SEEN {
            // The first of a class take longer, in memory that nobody has touched, and few others would be beside them for long.
            return;
        }
        // With looks that take what is there out comes what that takes, on top of what is predicted.
        let looks = if self.looked { prediction / 2 } else { 0 };
        let most = prediction + looks + LATE * costs.wake_ns;
        match outcome {
            Outcome::Found => return,
            Outcome::Blocked if std::mem::replace(&mut self.has_blocked, true) => {
                return self.blocked.add(took, most, prediction);
            }
            Outcome::Blocked => return,
            _ => self.lazy.add(took, most, prediction),
        }
        self.has_blocked = false;
        self.failing -= self.failing / 8;
        if let Outcome::Late { .. } = outcome {
            self.failing += 32;
        } else {
            // One by one, so that short ones are forgotten, too.
            self.good += self.next_rest;
            self.next_rest -= self.good / FORGOTTEN;
            self.good %= FORGOTTEN;
        }
        if self.failing > 128 || self.gains_nothing(costs, prediction) {
            self.rest = self.next_rest.max(REST);
            self.next_rest = (2 * self.rest).min(REST_MAX);
            self.rests_at = prediction;
            self.failing = 0;
        }
    }
}

impl Line {
    /// What a transfer took whose waiter was woken after so long: less, by a wake-up at most. What is predicted, if that agrees, or is more by
    /// little, as what a spin finds is; else the least, since of a prediction that is too high there would be no better one: a sleep that is too
    /// long tells nothing.
    pub fn woken(&self, costs: &Costs, took: u64) -> u64 {
        // What took less than a wake-up did not sleep.
        let least = took.checked_sub(costs.wake_ns).unwrap_or(took).max(1);
        let predicted = self.prediction();
        let agrees = |ns: &u64| (least..=took + took / 8).contains(ns);
        predicted.filter(agrees).map_or(least, |ns| ns.min(took))
    }

    /// Whether waits take about as long as those that block, as far as is known.
    fn gains_nothing(&self, costs: &Costs, prediction: u64) -> bool {
        let gain = self.blocked.value - self.lazy.value;
        let gained_ns = gain.saturating_mul(prediction.min(1 << 32) as i64) >> 16;
        self.lazy.count >= MEANT
            && self.blocked.count >= 2
            && gained_ns < costs.wake_ns as i64 / GAIN
    }
}

/// Parts in flight are dense if they end at intervals below so many wake-ups.
const DENSE: u64 = 4;

/// A large transfer's wait spins for one part of so many of its time at most, about: what polling gains is little there.
const LARGE_SHARE: u64 = 40;

/// How long before the predicted end sleeps end, in nanoseconds: of small transfers and of large ones. What wakes cost is the
/// machine's matter and not that of a class.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Margin([u64; 2]);

impl Margin {
    pub(super) fn get(&self, costs: &Costs, class: Class) -> u64 {
        match self.0[usize::from(class.is_large())] {
            // Nothing was learnt yet.
            0 => costs.wake_ns * 3 / 2,
            margin => margin,
        }
    }

    /// Grows at once by a sleep that was too long, and shrinks slowly by spins: few sleeps shall be too long. Of large transfers more
    /// may be, as what their spins take is bounded.
    pub(super) fn learn(&mut self, costs: &Costs, class: Class, outcome: Outcome, prediction: u64) {
        let (wake, margin) = (costs.wake_ns, self.get(costs, class));
        let margin = match (outcome, class.is_large()) {
            // The machine did something else: no margin is enough for that.
            (Outcome::Overslept { late }, _) if late > 4 * wake => margin,
            (Outcome::Overslept { .. }, false) => margin + wake / 2,
            (Outcome::Overslept { .. }, true) => margin + wake / 8,
            (Outcome::Caught { spun }, false) => margin.saturating_sub(spun / 64),
            (Outcome::Caught { spun }, true) => {
                let above = spun.saturating_sub(prediction / LARGE_SHARE);
                margin.saturating_sub(spun / 64 + above / 4)
            }
            _ => margin,
        };
        self.0[usize::from(class.is_large())] = margin.clamp(wake / 2, 8 * wake);
    }
}

/// What is known of a device's classes.
#[derive(Debug, Default)]
pub(crate) struct Times {
    lines: Vec<Option<Box<Line>>>,
    margin: Margin,
}

impl Times {
    pub fn line(&mut self, class: Class) -> &mut Line {
        self.line_and_margin(class).0
    }

    pub(super) fn line_and_margin(&mut self, class: Class) -> (&mut Line, &mut Margin) {
        if self.lines.is_empty() {
            self.lines.resize_with(OPS * SIZES * DEPTHS, || None);
        }
        let line = self.lines[class.index()].get_or_insert_default();
        (line, &mut self.margin)
    }

    /// Whether what is in flight ends at intervals too short to spin for each, as far as is known.
    pub(super) fn is_dense(&self, costs: &Costs, class: Class, in_flight: usize) -> bool {
        let prediction = self.prediction(class).unwrap_or(0);
        in_flight > 1 && prediction / (in_flight as u64) < DENSE * costs.wake_ns
    }

    /// See [`Line::dozes`].
    pub fn dozes(&mut self, class: Class) -> bool {
        let line = self.lines.get_mut(class.index());
        line.and_then(Option::as_mut)
            .is_some_and(|line| line.dozes())
    }

    /// As if transfers of a class had always taken so long.
    #[cfg(test)]
    pub fn teach(&mut self, class: Class, ns: u64) {
        let line = self.line(class);
        (0..SEEN).for_each(|_| line.sample(ns));
    }

    pub fn prediction(&self, class: Class) -> Option<u64> {
        self.lines.get(class.index())?.as_ref()?.prediction()
    }
}
