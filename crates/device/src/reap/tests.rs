//! What is learnt and decided, without any time that passes.

use super::costs::Costs;
use super::estimate::{Class, Line, Margin, Outcome, SEEN, Times, Window};
use super::plan::{Plan, is_long, plan};
use super::{Group, Mode, Reaper, Reaping, Seen, Source};
use crate::block::Durability;
use crate::queue::Kind;
use base::{clock, thread};
use proptest::prelude::*;

const US: u64 = 1000;
const COSTS: Costs = Costs {
    wake_ns: 50 * US,
    cpu_ns: 30 * US,
    shortest_ns: 20 * US,
};

fn class() -> Class {
    Class::of(Kind::Read, 4096, 1)
}

/// Requests until the prediction is within a quarter of what they take, and stays there.
fn settles(window: &mut Window, times: &[u64]) -> Option<usize> {
    let near = |window: &Window, ns: u64| {
        let told = window.low()?;
        (told.abs_diff(ns) <= ns / 4).then_some(())
    };
    let mut since = None;
    for (at, &ns) in times.iter().enumerate() {
        window.add(ns);
        since = match near(window, ns) {
            Some(()) => since.or(Some(at + 1)),
            None => None,
        };
    }
    since
}

proptest! {
    #[test]
    fn a_step_of_the_service_time_is_followed_within_100_requests_both_ways(
        base in 5 * US..2_000 * US,
        noise in prop::collection::vec(0u64..12, 300),
    ) {
        let mut window = Window::default();
        let times = |ns: u64, of: usize| -> Vec<u64> {
            noise[of * 100..of * 100 + 100].iter().map(|n| ns + ns * n / 100).collect()
        };
        for (of, ns) in [(0, base), (1, 8 * base), (2, base)] {
            let settled = settles(&mut window, &times(ns, of));
            prop_assert!(settled.is_some_and(|at| at < 100), "{settled:?}");
        }
    }

    #[test]
    fn a_prediction_is_a_time_among_the_last_that_were_seen(
        times in prop::collection::vec(1u64..10_000_000, 1..200),
    ) {
        let mut window = Window::default();
        for (at, &ns) in times.iter().enumerate() {
            window.add(ns);
            let mut last = times[(at + 1).saturating_sub(SEEN)..=at].to_vec();
            last.sort_unstable();
            if let Some(told) = window.low() {
                let place = last.iter().position(|&t| t == told);
                prop_assert!(place.is_some_and(|place| place <= 2), "{told} of {last:?}");
            } else {
                prop_assert!(at < 3);
            }
        }
    }

    #[test]
    fn nobody_spins_but_around_the_predicted_end(
        finish in 0u64..10_000_000,
        margin in 0u64..500_000,
        grace in 0u64..500_000,
        now in 0u64..12_000_000,
    ) {
        match plan(&COSTS, finish, margin, grace, now) {
            Plan::Block => prop_assert!(now >= finish + grace),
            Plan::Sleep { until } => {
                prop_assert!(until > now + COSTS.shortest_ns);
                prop_assert_eq!(until, finish - margin);
            }
            Plan::Spin { until } => {
                prop_assert!(until > now);
                prop_assert!(until - now <= margin + grace + COSTS.shortest_ns);
            }
        }
    }
}

#[test]
fn who_has_many_in_flight_spins_for_none_of_them() {
    let mut times = Times::default();
    (0..SEEN).for_each(|_| times.line(class()).sample(1_000 * US));
    for (in_flight, dense) in [(1, false), (5, false), (6, true), (32, true)] {
        assert_eq!(
            times.is_dense(&COSTS, class(), in_flight),
            dense,
            "{in_flight}"
        );
    }
}

/// A device that does at once what it is told to: a call does not sleep, and a ring has nothing to gain.
#[test]
fn what_takes_less_than_a_wake_is_not_waited_for_awake() {
    let mut line = known(5 * US);
    let wait = |line: &mut Line| {
        let lazy = line.chooses_lazy(&COSTS);
        match lazy {
            true => line.learn(&COSTS, Outcome::Caught { spun: 25 * US }, 30 * US),
            false => line.learn(&COSTS, Outcome::Blocked, 5 * US),
        }
        lazy
    };
    let tried = (0..10_000).filter(|_| wait(&mut line)).count();
    assert!(tried < 1_000, "{tried}");
}

#[test]
fn what_is_long_or_unknown_blocks() {
    assert!(!is_long(&COSTS, 24_000 * US));
    assert!(is_long(&COSTS, 26_000 * US));
    let mut line = Line::default();
    for (ns, lazy) in [(26_000 * US, false), (300 * US, true)] {
        for _ in 0..SEEN {
            line.sample(ns);
        }
        assert_eq!(line.chooses_lazy(&COSTS), lazy);
    }
    let mut unknown = Line::default();
    assert!(!unknown.chooses_lazy(&COSTS));
    let plan = unknown.plan(&COSTS, &Margin::default(), (class(), 0), 0);
    assert_eq!(plan, Plan::Block);
}

/// A line whose transfers take so long.
fn known(ns: u64) -> Line {
    let mut line = Line::default();
    (0..SEEN).for_each(|_| line.sample(ns));
    assert!(line.chooses_lazy(&COSTS));
    line
}

#[test]
fn who_oversleeps_sleeps_less_soon_and_who_spins_sleeps_more_slowly() {
    let (ns, line) = (1_000 * US, known(1_000 * US));
    let mut margin = Margin::default();
    let sleep = |margin: &Margin| match line.plan(&COSTS, margin, (class(), 0), 0) {
        Plan::Sleep { until } => until,
        other => panic!("{other:?}"),
    };
    let caught = Outcome::Caught { spun: 50 * US };
    let first = sleep(&margin);
    let gone = Outcome::Overslept { late: 2_000 * US };
    margin.learn(&COSTS, class(), gone, ns);
    assert_eq!(sleep(&margin), first);
    margin.learn(&COSTS, class(), Outcome::Overslept { late: 90 * US }, ns);
    let before = sleep(&margin);
    let shorter = first - before;
    assert!(shorter > 0);
    margin.learn(&COSTS, class(), caught, ns);
    let longer = sleep(&margin) - before;
    assert!(longer > 0 && 8 * longer < shorter, "{longer}, {shorter}");
    for _ in 0..10_000 {
        margin.learn(&COSTS, class(), caught, ns);
    }
    assert!(sleep(&margin) <= ns - COSTS.wake_ns / 2);
    for _ in 0..10_000 {
        margin.learn(&COSTS, class(), Outcome::Overslept { late: 90 * US }, ns);
    }
    assert!(sleep(&margin) >= ns / 2);
}

/// Of waits that end so, how many of the next `count` do not block.
fn lazy_after(line: &mut Line, outcome: Outcome, took: u64, count: usize) -> usize {
    let wait = |_: &usize| {
        let lazy = line.chooses_lazy(&COSTS);
        match lazy {
            true => line.learn(&COSTS, outcome, took),
            false => line.learn(&COSTS, Outcome::Blocked, 400 * US),
        }
        lazy
    };
    (0..count).filter(wait).count()
}

#[test]
fn spins_that_find_nothing_or_are_slower_than_sleeps_rest() {
    let late = Outcome::Late { spun: 100 * US };
    let mut line = known(300 * US);
    let tried = lazy_after(&mut line, late, 500 * US, 10_000);
    assert!((1..200).contains(&tried), "{tried}");
    // What is slower than blocking rests, though spins find it.
    let caught = Outcome::Caught { spun: 50 * US };
    let mut line = known(300 * US);
    let tried = lazy_after(&mut line, caught, 550 * US, 20_000);
    assert!((1..5_000).contains(&tried), "{tried}");
    let mut line = known(300 * US);
    let tried = lazy_after(&mut line, caught, 310 * US, 10_000);
    assert!(tried > 9_500, "{tried}");
    // What is as fast as blocking takes CPU time for nothing; now and then it is tried again.
    let mut line = known(300 * US);
    let tried = lazy_after(&mut line, caught, 398 * US, 20_000);
    assert!((100..800).contains(&tried), "{tried}");
    // Though who is woken is later by less than a wake-up, and how much less is not known.
    let mut line = known(100 * US);
    let wait = |line: &mut Line| {
        let lazy = line.chooses_lazy(&COSTS);
        let (outcome, took) = match lazy {
            true => (caught, 100 * US),
            false => (Outcome::Blocked, line.woken(&COSTS, 100 * US)),
        };
        line.learn(&COSTS, outcome, 100 * US);
        line.sample(took);
        lazy
    };
    let tried = (0..20_000).filter(|_| wait(&mut line)).count();
    assert!((100..800).contains(&tried), "{tried}");
    // Nor does it matter that what a spin finds is later than who is woken.
    let mut line = known(100 * US);
    let wait = |line: &mut Line| {
        let lazy = line.chooses_lazy(&COSTS);
        let (outcome, took) = match lazy {
            true => (caught, 104 * US),
            false => (Outcome::Blocked, line.woken(&COSTS, 100 * US)),
        };
        line.learn(&COSTS, outcome, if lazy { 104 * US } else { 100 * US });
        line.sample(took);
        lazy
    };
    let tried = (0..20_000).filter(|_| wait(&mut line)).count();
    assert!((100..800).contains(&tried), "{tried}");
    // A rest ends when the device has become another one.
    let mut line = known(300 * US);
    lazy_after(&mut line, late, 500 * US, 10);
    assert!(!line.chooses_lazy(&COSTS));
    for _ in 0..SEEN {
        line.sample(900 * US);
    }
    assert!(line.chooses_lazy(&COSTS));
}

/// Three of four waits of a rest are not looked at, and it ends as soon as if they were, or the device has become another one.
#[test]
fn most_waits_of_a_rest_are_not_looked_at() {
    let late = Outcome::Late { spun: 100 * US };
    let mut times = Times::default();
    *times.line(class()) = known(300 * US);
    assert!(!times.dozes(class()));
    lazy_after(times.line(class()), late, 500 * US, 6);
    let mut looked = 0;
    let waits = (0..1_000).take_while(|_| {
        if times.dozes(class()) {
            return true;
        }
        looked += 1;
        !times.line(class()).chooses_lazy(&COSTS)
    });
    let waits = waits.count();
    assert!((50..=64).contains(&waits), "{waits}");
    assert!((waits / 4..=waits / 4 + 2).contains(&looked), "{looked}");
    assert!(!times.dozes(class()));
    // A reaper counts them all.
    let reaper = Reaper::new(Reaping::Lazy);
    *times.line(class()) = known(300 * US);
    lazy_after(times.line(class()), late, 500 * US, 6);
    let mut slept = 0;
    for _ in 0..4 {
        let group = reaper.begin(&mut times, class());
        assert!(group.blocks());
        reaper.block(&mut times, group, || slept += 1);
    }
    let reaped = reaper.reaped();
    assert_eq!((slept, reaped.waits, reaped.blocked), (4, 4, 4));
    // The one that was looked at counts for all.
    assert_eq!(reaped.timed, 4);
}

#[test]
fn a_large_transfer_spins_for_a_small_part_of_its_time() {
    let large = Class::of(Kind::Read, 128 << 10, 1);
    let (line, margin) = (known(1_000 * US), Margin::default());
    let late = 1_000 * US + 30 * US;
    let at = |class| line.plan(&COSTS, &margin, (class, 0), late);
    assert_eq!(at(large), Plan::Block);
    assert!(matches!(at(class()), Plan::Spin { .. }));
}

#[test]
fn classes_differ_by_what_is_done_how_much_and_how_many() {
    let durable = Kind::Write(Durability::Durable);
    let volatile = Kind::Write(Durability::Volatile);
    let mut times = Times::default();
    let mut seen = Vec::new();
    for kind in [Kind::Read, volatile, durable, Kind::Flush] {
        for bytes in [512, 4096, 128 << 10, 1 << 20] {
            for count in [1, 2, 8, 32] {
                seen.push(Class::of(kind, bytes, count));
            }
        }
    }
    for (at, &class) in seen.iter().enumerate() {
        (0..4).for_each(|_| times.line(class).sample(1 + at as u64));
    }
    for (at, &class) in seen.iter().enumerate() {
        assert_eq!(times.prediction(class), Some(1 + at as u64));
    }
    let most = Class::of(durable, 1 << 30, 1 << 20);
    assert_eq!(times.prediction(most), None);
}

/// There once it was looked at, or slept for, so often.
struct Scripted {
    looks: u32,
    sleeps: u32,
    slept: u32,
}

impl Source for Scripted {
    fn is_there(&mut self) -> bool {
        self.looks = self.looks.saturating_sub(1);
        self.looks == 0 || self.sleeps == 0
    }

    fn sleep(&mut self, _until: Option<u64>) {
        self.slept += 1;
        self.sleeps = self.sleeps.saturating_sub(1);
    }
}

#[test]
fn each_policy_ends_its_wait_and_counts_it() {
    for policy in Reaping::ALL {
        let reaper = Reaper::new(policy);
        let mut times = reaper.take();
        let group = reaper.begin(&mut times, class());
        let mut source = Scripted {
            looks: 100,
            sleeps: 1,
            slept: 0,
        };
        reaper.wait(&mut times, group, &mut source);
        // Nothing is known yet: lazy blocks, too.
        assert_eq!(source.slept, u32::from(policy != Reaping::Poll));
        let reaped = reaper.reaped();
        assert_eq!(
            (reaped.waits, reaped.caught),
            (1, u64::from(policy == Reaping::Poll))
        );
        assert_eq!(reaped.blocked, u64::from(policy != Reaping::Poll));
        assert_eq!(reaped.timed, 1);
        reaper.keep(times);
        assert_eq!(Reaping::parse(policy.name()), Some(policy));
    }
    assert_eq!(Reaping::parse("nap"), None);
}

#[test]
fn a_signal_that_ends_a_sleep_does_not_end_the_wait() {
    let reaper = Reaper::new(Reaping::Lazy);
    let mut times = Times::default();
    // It should be there in a thousand years: many sleeps, no spin.
    let since = clock::now_ns() + (1 << 62);
    (0..SEEN).for_each(|_| times.line(class()).sample(1_000 * US));
    let group = Group {
        class: class(),
        since,
        mode: Mode::Lazy,
    };
    let mut source = Scripted {
        looks: u32::MAX,
        sleeps: 5,
        slept: 0,
    };
    reaper.wait_for_first(&mut times, group, &mut source);
    assert_eq!(source.slept, 5);
    let reaped = reaper.reaped();
    assert_eq!((reaped.sleeps, reaped.early, reaped.spins), (1, 1, 0));
}

#[test]
fn a_stalled_transfer_blocks_once_its_time_is_over() {
    let reaper = Reaper::new(Reaping::Lazy);
    let mut times = Times::default();
    (0..SEEN).for_each(|_| times.line(class()).sample(1_000 * US));
    let group = Group {
        class: class(),
        since: 0,
        mode: Mode::Lazy,
    };
    let mut source = Scripted {
        looks: u32::MAX,
        sleeps: 1,
        slept: 0,
    };
    reaper.wait_for_first(&mut times, group, &mut source);
    let reaped = reaper.reaped();
    assert_eq!((source.slept, reaped.blocked, reaped.spins), (1, 1, 0));
}

/// A wait that is over for another reason than that a transfer has ended.
struct Rung;

impl Source for Rung {
    fn is_there(&mut self) -> bool {
        true
    }

    fn sleep(&mut self, _until: Option<u64>) {}

    fn is_other(&mut self) -> bool {
        true
    }
}

#[test]
fn who_is_called_away_learns_nothing_of_the_device() {
    let reaper = Reaper::new(Reaping::Lazy);
    let mut times = Times::default();
    (0..SEEN).for_each(|_| times.line(class()).sample(1_000 * US));
    let before = times.prediction(class());
    for _ in 0..100 {
        let group = Group {
            class: class(),
            since: clock::now_ns(),
            mode: Mode::Block,
        };
        reaper.wait(&mut times, group, &mut Rung);
    }
    assert_eq!(times.prediction(class()), before);
    let reaped = reaper.reaped();
    assert_eq!((reaped.waits, reaped.timed), (100, 0));
}

#[test]
fn a_class_of_which_nothing_is_known_has_no_mean() {
    let mut line = Line::default();
    for _ in 0..200 {
        line.learn(&COSTS, Outcome::Blocked, 100 * US);
    }
    (0..SEEN).for_each(|_| line.sample(100 * US));
    // Were those waits taken to have been as long as predicted, these would be slower than they.
    let caught = Outcome::Caught { spun: 50 * US };
    let mut tried = 0;
    for _ in 0..200 {
        if line.chooses_lazy(&COSTS) {
            line.learn(&COSTS, caught, 110 * US);
            tried += 1;
        } else {
            line.learn(&COSTS, Outcome::Blocked, 150 * US);
        }
    }
    assert!(tried > 150, "{tried}");
}

#[test]
fn of_transfers_by_themselves_some_are_timed_and_count_for_all() {
    let reaper = Reaper::new(Reaping::Interrupt);
    let mut times = Times::default();
    for number in 0..160 {
        if let Some(since) = reaper.start(number) {
            reaper.ended(&mut times, (class(), since), Seen::found());
        }
    }
    let reaped = reaper.reaped();
    assert_eq!((reaped.waits, reaped.timed), (0, 160));
}

/// Transfers on a ring that polls: nothing ends a sleep early, and a look takes one out at a time, which takes time.
struct Polled {
    ready_at: u64,
    taken: usize,
}

impl Polled {
    const PARTS: usize = 3;
    const EACH: u64 = 40 * US;
}

fn busy_until(ns: u64) {
    while clock::now_ns() < ns {
        thread::relax();
    }
}

impl Source for Polled {
    fn is_there(&mut self) -> bool {
        if clock::now_ns() >= self.ready_at && self.taken < Polled::PARTS {
            busy_until(clock::now_ns() + Polled::EACH);
            self.taken += 1;
        }
        self.taken == Polled::PARTS
    }

    fn sleep(&mut self, until: Option<u64>) {
        busy_until(until.unwrap_or(self.ready_at));
        while until.is_none() && !self.is_there() {}
    }

    fn found(&self) -> Option<usize> {
        Some(self.taken)
    }
}

/// 32 reads on a ring that polls the device came to half of what polling did: they had been there for long when a sleep ended, but to take them out
/// took several looks. That looked like a sleep that had ended in time, and the prediction grew by what the looks took, each time.
#[test]
fn what_looks_take_is_not_the_time_of_the_device() {
    const READY: u64 = 20 * US;
    let reaper = Reaper::new(Reaping::Lazy);
    let mut times = Times::default();
    let first = READY + 3 * Polled::EACH;
    (0..SEEN).for_each(|_| times.line(class()).sample(first));
    for _ in 0..100 {
        let since = clock::now_ns();
        let group = Group {
            class: class(),
            since,
            mode: Mode::Lazy,
        };
        let mut source = Polled {
            ready_at: since + READY,
            taken: 0,
        };
        reaper.wait(&mut times, group, &mut source);
        assert_eq!(source.taken, Polled::PARTS);
    }
    let prediction = times.prediction(class());
    assert!(
        prediction.is_some_and(|ns| ns <= first),
        "{prediction:?}, {first}"
    );
    let spun = reaper.reaped().spun_ns / 100;
    assert!(spun < 10 * Polled::EACH, "{spun}");
}

/// A thread that read by itself took twice the CPU time of one that blocked, and longer: what a ring takes beside a call came after the
/// moment up to which waits were compared.
#[test]
fn a_wait_is_judged_by_all_that_it_takes() {
    let reaper = Reaper::new(Reaping::Lazy);
    let costs = Costs::get();
    let (predicted, wake) = (300 * US, costs.wake_ns);
    let begin = |since| Group {
        class: class(),
        since,
        mode: Mode::Lazy,
    };
    let seen = Seen {
        outcome: Outcome::Caught { spun: 50 * US },
        now: 0,
        by_look: false,
        tells: true,
    };
    for (detour, rests) in [(0, false), (wake, true)] {
        let mut times = Times::default();
        *times.line(class()) = known(predicted);
        for _ in 0..10 {
            let line = times.line(class());
            line.learn(costs, Outcome::Blocked, predicted + wake);
        }
        for since in 0..64 {
            reaper.judge(&mut times, begin(since), seen, since + predicted + detour);
        }
        // A rest is of so many waits at least.
        let mut waits = 0..32;
        assert_eq!(
            !waits.any(|_| times.line(class()).chooses_lazy(costs)),
            rests
        );
    }
}

/// On a fast device a class that gained nothing spun for thousands of waits: one of its first, which blocked, had taken three times as long
/// as the others, and of each 256 no more than three others were counted with it.
#[test]
fn a_class_that_gains_nothing_rests_soon_after_its_first_waits() {
    let mut line = Line::default();
    let mut lazy = 0;
    for wait in 0..400 {
        // What is so late blocks, though it was not to.
        let cold = if wait < 8 { 200 * US } else { 0 };
        let outcome = match line.chooses_lazy(&COSTS) && cold == 0 {
            true => Outcome::Caught { spun: 50 * US },
            false => Outcome::Blocked,
        };
        lazy += u32::from(outcome != Outcome::Blocked);
        line.sample(100 * US);
        line.learn(&COSTS, outcome, 104 * US + cold);
    }
    assert!((50..150).contains(&lazy), "{lazy}");
}

/// Waits of a rest, on the ordinary ring, taught what a polled ring should take: who looked again after it slept too long, and rested again.
#[test]
fn who_blocks_on_another_ring_tells_nothing_of_one_that_polls() {
    let reaper = Reaper::new(Reaping::Lazy);
    let mut times = Times::default();
    let seen = |outcome, by_look, ns| Seen {
        outcome,
        now: ns,
        by_look,
        tells: true,
    };
    // Longer by more than any machine is taken to need to wake somebody: that is taken off.
    let blocked = seen(Outcome::Blocked, false, 1_000 * US);
    let caught = seen(Outcome::Caught { spun: 0 }, true, 100 * US);
    (0..SEEN).for_each(|_| reaper.ended(&mut times, (class(), 0), blocked));
    assert!(times.prediction(class()) > Some(100 * US));
    (0..SEEN).for_each(|_| reaper.ended(&mut times, (class(), 0), caught));
    (0..SEEN).for_each(|_| reaper.ended(&mut times, (class(), 0), blocked));
    assert_eq!(times.prediction(class()), Some(100 * US));
}

/// All waits of what is long block, and those that block taught nothing where a look had once found something: it stayed long for ever.
#[test]
fn a_device_that_was_slow_for_a_while_is_followed_down_on_a_ring_that_polls() {
    let reaper = Reaper::new(Reaping::Lazy);
    let mut times = Times::default();
    let wake = Costs::get().wake_ns;
    let seen = |outcome, by_look, now| Seen {
        outcome,
        now,
        by_look,
        tells: true,
    };
    let ends = |times: &mut Times, lazy: Outcome, ns: u64| {
        let group = reaper.begin_at(times, class(), 0);
        let (outcome, by_look) = match group.mode {
            Mode::Lazy => (lazy, matches!(lazy, Outcome::Caught { .. })),
            _ => (Outcome::Blocked, false),
        };
        reaper.ended(times, (class(), 0), seen(outcome, by_look, ns));
        group.mode == Mode::Lazy
    };
    let (short, long) = (20 * wake, 1_000 * wake);
    (0..SEEN).for_each(|_| times.line(class()).sample(short));
    let lazy = (0..16).filter(|_| ends(&mut times, Outcome::Caught { spun: 0 }, short));
    assert_eq!(lazy.count(), 16);
    for _ in 0..SEEN {
        ends(&mut times, Outcome::Late { spun: 0 }, long);
    }
    assert!(
        !ends(&mut times, Outcome::Late { spun: 0 }, long),
        "it is long"
    );
    let lazy = (0..100).filter(|_| ends(&mut times, Outcome::Caught { spun: 0 }, short));
    assert!(lazy.count() > 50);
}

/// Where looks take completions out the wait goes on for long after what is predicted: then both that polled and that blocked counted as the most
/// that counts at all, and polling seemed to gain nothing.
#[test]
fn what_looks_take_does_not_hide_what_polling_gains() {
    let costs = Costs {
        wake_ns: 5 * US,
        ..COSTS
    };
    let mut line = known(218 * US);
    line.looked = true;
    let wait = |line: &mut Line| {
        let lazy = line.chooses_lazy(&costs);
        match lazy {
            true => line.learn(&costs, Outcome::Caught { spun: 0 }, 260 * US),
            false => line.learn(&costs, Outcome::Blocked, 284 * US),
        }
        lazy
    };
    let tried = (0..1_000).filter(|_| wait(&mut line)).count();
    assert!(tried > 900, "{tried}");
}
