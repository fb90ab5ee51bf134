//! Runs modes within a budget of time, on all cores, and reports.

use crate::aimed;
use crate::explore::{Base, Effort, Explorer, Failure, Seen};
use crate::random::{self, Generator, Ran, Setting, Source, Step};
use crate::sequences::{self, Plan};
use crate::threads;
use crate::world::Shape;
use base::canary::{Canary, plant};
use base::clock::Clock;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// When a run must end.
#[derive(Clone, Debug)]
pub struct Budget {
    clock: Clock,
    end_ns: u64,
    count: u64,
}

impl Budget {
    pub fn seconds(seconds: u64) -> Budget {
        let clock = Clock::real();
        let end_ns = clock.monotonic_ns() + seconds * 1_000_000_000;
        let count = u64::MAX;
        Budget {
            clock,
            end_ns,
            count,
        }
    }

    /// So many sequences, or seeds, however long they take.
    pub fn count(count: u64) -> Budget {
        let clock = Clock::real();
        let end_ns = u64::MAX;
        Budget {
            clock,
            end_ns,
            count,
        }
    }

    /// Whether nothing more may begin after so many sequences or seeds.
    pub fn is_over(&self, begun: u64) -> bool {
        begun >= self.count || self.clock.monotonic_ns() >= self.end_ns
    }

    /// Seconds since it began.
    pub fn spent(&self) -> u64 {
        self.clock.monotonic_ns() / 1_000_000_000
    }
}

/// A sequence, or a seed, that went wrong.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The command that shows it again.
    pub replay: String,
    pub failure: Failure,
}

/// The shapes of arrays that sequences run on, by turns.
pub fn shapes() -> Vec<Shape> {
    let mut wrapping = Shape::small(2);
    wrapping.age = 8150;
    let mut unequal = Shape::small(3);
    unequal.devices = vec![20 << 20, 36 << 20, 12 << 20];
    unequal.stripe = 4096;
    vec![Shape::small(2), wrapping, unequal]
}

pub fn bases() -> Result<Vec<Arc<Base>>, String> {
    let base = |shape: &Shape| Ok(Arc::new(Base::new(shape, &sequences::set_up())?));
    shapes().iter().map(base).collect()
}

/// Calls `body`; a panic is a failure like others.
pub fn guarded(body: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(outcome) => outcome,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(Failure {
                what: format!("panic: {}", text.unwrap_or("without a message")),
                trail: Vec::new(),
            })
        }
    }
}

/// What an exhaustive run did.
#[derive(Clone, Debug, Default)]
pub struct Exhausted {
    /// Sequences run to their end.
    pub sequences: u64,
    pub violations: Vec<Violation>,
}

/// Runs the plan's sequences from `first` on, on `workers` threads, until the budget is spent or
/// `most` violations are found.
pub fn exhaustive(
    plan: &Plan,
    first: usize,
    workers: usize,
    budget: &Budget,
    seen: &Arc<Seen>,
    most: usize,
    canary: Option<Canary>,
) -> Result<Exhausted, String> {
    plant(canary);
    let bases = bases();
    plant(None);
    let bases = bases?;
    let next = AtomicUsize::new(first);
    let (done, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let results = base::thread::parallel(workers, |worker| {
        plant(canary);
        let mut violations = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if budget.is_over((number - first) as u64) {
                break;
            }
            let operations = plan.sequence(number);
            let base = Arc::clone(&bases[number % bases.len()]);
            let mut explorer = Explorer::new(base, Arc::clone(seen), Effort::USUAL);
            match guarded(|| explorer.explore(&operations)) {
                Ok(()) => {
                    done.fetch_add(1, Ordering::Relaxed);
                }
                Err(failure) => {
                    let replay = format!("cargo run -p sheaf-sim -- replay sequence {number}");
                    violations.push(Violation { replay, failure });
                    if violations.len() >= most {
                        stop.store(true, Ordering::Relaxed);
                    }
                }
            }
            if worker == 0 && number % 64 < workers && canary.is_none() {
                eprint!(
                    "\r{:>5} s: {} sequences, {} states ",
                    budget.spent(),
                    done.load(Ordering::Relaxed),
                    seen.states()
                );
            }
        }
        plant(None);
        violations
    });
    Ok(Exhausted {
        sequences: done.into_inner(),
        violations: results.into_iter().flatten().collect(),
    })
}

/// Runs one sequence of a plan again.
pub fn replay_sequence(plan: &Plan, number: usize, canary: Option<Canary>) -> Result<(), Failure> {
    let bad = |what: String| Failure {
        what,
        trail: Vec::new(),
    };
    plant(canary);
    let outcome = bases().map_err(bad).and_then(|bases| {
        let base = Arc::clone(&bases[number % bases.len()]);
        let mut explorer = Explorer::new(base, Arc::default(), Effort::USUAL);
        let operations = plan.sequence(number);
        guarded(|| explorer.explore(&operations))
    });
    plant(None);
    outcome
}

/// What a random run did.
#[derive(Clone, Debug, Default)]
pub struct Randomly {
    pub seeds: u64,
    pub violations: Vec<Violation>,
}

/// Tries of the shrinker.
const SHRINK_TRIES: u32 = 150;

/// Runs seeds from `first` on until the budget is spent or `most` violations are found.
pub fn random(
    first: u64,
    workers: usize,
    budget: &Budget,
    seen: &Arc<Seen>,
    most: usize,
    canary: Option<Canary>,
) -> Randomly {
    let next = AtomicU64::new(first);
    let (done, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let results = base::thread::parallel(workers, |worker| {
        plant(canary);
        let mut violations = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if budget.is_over(seed - first) {
                break;
            }
            let ran = random::run_seed(seed, seen);
            done.fetch_add(1, Ordering::Relaxed);
            if ran.failure.is_some() {
                violations.push(told(seed, ran, canary));
                if violations.len() >= most {
                    stop.store(true, Ordering::Relaxed);
                }
            }
            if worker == 0 && canary.is_none() {
                eprint!(
                    "\r{:>5} s: {} seeds, {} states ",
                    budget.spent(),
                    done.load(Ordering::Relaxed),
                    seen.states()
                );
            }
        }
        plant(None);
        violations
    });
    Randomly {
        seeds: done.into_inner(),
        violations: results.into_iter().flatten().collect(),
    }
}

/// A failed run, as short as it can be made; with a canary planted nobody wants to know.
fn told(seed: u64, ran: Ran, canary: Option<Canary>) -> Violation {
    let mut failure = ran.failure.unwrap_or_else(|| Failure {
        what: "nothing wrong".into(),
        trail: Vec::new(),
    });
    if canary.is_none() {
        let steps = random::shrink(&Setting::of(seed), ran.steps, SHRINK_TRIES);
        let text: Vec<String> = steps.iter().map(Step::to_string).collect();
        failure.trail = vec![format!("shrunk: --steps '{}'", text.join("; "))];
    }
    Violation {
        replay: format!("cargo run -p sheaf-sim -- replay random {seed}"),
        failure,
    }
}

/// Runs a seed again, or other steps in its setting.
pub fn replay_random(
    seed: u64,
    steps: Option<&str>,
    canary: Option<Canary>,
) -> Result<Ran, String> {
    let setting = Setting::of(seed);
    let source = match steps {
        None => Source::Made(Box::new(Generator::new(seed, &setting))),
        Some(text) => {
            let parts = text.split([';', '\n']).map(str::trim);
            let steps = parts.filter(|p| !p.is_empty()).map(str::parse);
            let steps: Vec<Step> = steps.collect::<Result<_, _>>()?;
            Source::Listed(steps.into_iter())
        }
    };
    plant(canary);
    let ran = random::run(&setting, source, &Seen::default());
    plant(None);
    Ok(ran)
}

/// Runs seeds of the threaded mode, one after the other: a process has one scheduler.
pub fn threads(
    first: u64,
    budget: &Budget,
    seen: &Seen,
    most: usize,
    canary: Option<Canary>,
) -> Randomly {
    let mut done = Randomly::default();
    plant(canary);
    for seed in first.. {
        if budget.is_over(seed - first) || done.violations.len() >= most {
            break;
        }
        let plan = threads::Plan::new(seed);
        done.seeds += 1;
        match threads::run(&plan, false) {
            Ok(outcome) => outcome.states.iter().for_each(|state| seen.count(*state)),
            Err(failure) => {
                let shorter = match canary {
                    None => threads::shrink(&plan),
                    Some(_) => plan,
                };
                let replay = shorter.replay();
                done.violations.push(Violation { replay, failure });
            }
        }
    }
    plant(None);
    done
}

/// Runs the aimed scenarios until the budget is spent, at least once; returns the rounds, and
/// what went wrong.
pub fn aimed(budget: &Budget, seen: &Arc<Seen>, canary: Option<Canary>) -> (u64, Option<Failure>) {
    plant(canary);
    let mut rounds = 0;
    let found = loop {
        rounds += 1;
        if let Err(failure) = guarded(|| aimed::run(rounds, seen)) {
            break Some(failure);
        }
        if budget.is_over(rounds) {
            break None;
        }
    };
    plant(None);
    (rounds, found)
}
