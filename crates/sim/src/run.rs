//! Runs modes within a budget of time, on all cores, and reports.

use crate::aimed;
use crate::explore::{Base, Effort, Explorer, Failure, Seen};
use crate::op::Op;
use crate::random::{self, Generator, Ran, Source, Step};
use crate::sequences::{self, Plan};
use crate::setting::Setting;
use crate::threads;
use crate::world::Shape;
use base::canary::{Canary, plant};
use base::clock::Clock;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What the program `sheaf-sim` exits with when something was found; what kept it from looking has other codes.
pub const VIOLATED: u8 = 3;

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
        Budget {
            clock,
            end_ns,
            count: u64::MAX,
        }
    }

    /// So many sequences, or seeds, however long they take.
    pub fn count(count: u64) -> Budget {
        Budget {
            clock: Clock::real(),
            end_ns: u64::MAX,
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

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n{}", self.replay, self.failure)
    }
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

/// Calls `body` with a canary planted, or none.
fn with_canary<T>(canary: Option<Canary>, body: impl FnOnce() -> T) -> T {
    plant(canary);
    let outcome = body();
    plant(None);
    outcome
}

/// How a mode is run: until the budget is spent, or a worker has found `most` violations.
#[derive(Clone)]
pub struct Search {
    pub workers: usize,
    pub budget: Budget,
    pub seen: Arc<Seen>,
    pub most: usize,
    pub canary: Option<Canary>,
}

/// What a search did.
#[derive(Clone, Debug, Default)]
pub struct Searched {
    /// Sequences run to their end, or seeds.
    pub runs: u64,
    pub violations: Vec<Violation>,
}

impl Search {
    /// Runs the plan's sequences from `first` on.
    pub fn exhaustive(&self, plan: &Plan, first: usize) -> Result<Searched, String> {
        with_canary(self.canary, || {
            let bases = bases()?;
            let mut done = self.each(first as u64, "sequences", 64, |number| {
                let base = &bases[number as usize % bases.len()];
                let explored = explore(base, &self.seen, &plan.sequence(number as usize));
                let failure = explored.err()?;
                let replay = format!("cargo run -p sheaf-sim -- replay sequence {number}");
                Some(Violation { replay, failure })
            });
            done.runs -= done.violations.len() as u64;
            Ok(done)
        })
    }

    /// Runs seeds of the random mode from `first` on.
    pub fn random(&self, first: u64) -> Searched {
        with_canary(self.canary, || {
            self.each(first, "seeds", 1, |seed| {
                told(seed, random::run_seed(seed, &self.seen), self.canary)
            })
        })
    }

    /// Runs seeds of the threaded mode from `first` on, on the calling thread: each run has threads
    /// of its own, of which one goes on at a time.
    pub fn threads(&self, first: u64) -> Searched {
        let mut done = Searched::default();
        with_canary(self.canary, || {
            for seed in first.. {
                if self.budget.is_over(done.runs) || done.violations.len() >= self.most {
                    break;
                }
                let plan = threads::Plan::new(seed);
                done.runs += 1;
                match threads::run(&plan, false) {
                    Ok(outcome) => outcome.states.iter().for_each(|s| self.seen.count(*s)),
                    Err(failure) => {
                        let shorter = match self.canary {
                            None => threads::shrink(&plan),
                            Some(_) => plan,
                        };
                        let replay = shorter.replay();
                        done.violations.push(Violation { replay, failure });
                    }
                }
            }
        });
        done
    }

    /// Calls `one` with successive numbers on all workers, and tells of the progress at about
    /// every `pace`th; `what` the numbers count.
    fn each(
        &self,
        first: u64,
        what: &str,
        pace: u64,
        one: impl Fn(u64) -> Option<Violation> + Sync,
    ) -> Searched {
        let next = AtomicU64::new(first);
        let (runs, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        let results = base::thread::parallel(self.workers, |worker| {
            let mut violations = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if self.budget.is_over(number - first) {
                    break;
                }
                violations.extend(one(number));
                runs.fetch_add(1, Ordering::Relaxed);
                if violations.len() >= self.most {
                    stop.store(true, Ordering::Relaxed);
                }
                let due = number % pace < self.workers as u64;
                if worker == 0 && due && self.canary.is_none() {
                    eprint!(
                        "\r{:>5} s: {} {what}, {} states ",
                        self.budget.spent(),
                        runs.load(Ordering::Relaxed),
                        self.seen.states()
                    );
                }
            }
            violations
        });
        Searched {
            runs: runs.into_inner(),
            violations: results.into_iter().flatten().collect(),
        }
    }
}

fn explore(base: &Arc<Base>, seen: &Arc<Seen>, operations: &[Op]) -> Result<(), Failure> {
    let mut explorer = Explorer::new(Arc::clone(base), Arc::clone(seen), Effort::USUAL);
    guarded(|| explorer.explore(operations))
}

/// Tries of the shrinker.
const SHRINK_TRIES: u32 = 150;

/// What went wrong in a run, as short as it can be made; with a canary planted nobody wants to
/// know.
fn told(seed: u64, ran: Ran, canary: Option<Canary>) -> Option<Violation> {
    let mut failure = ran.failure?;
    if canary.is_none() {
        let steps = random::shrink(&Setting::of(seed), ran.steps, SHRINK_TRIES);
        let text: Vec<String> = steps.iter().map(Step::to_string).collect();
        failure.trail = vec![format!("shrunk: --steps '{}'", text.join("; "))];
    }
    let replay = format!("cargo run -p sheaf-sim -- replay random {seed}");
    Some(Violation { replay, failure })
}

/// Runs one sequence of a plan again.
pub fn replay_sequence(plan: &Plan, number: usize, canary: Option<Canary>) -> Result<(), Failure> {
    let bad = |what: String| Failure {
        what,
        trail: Vec::new(),
    };
    with_canary(canary, || {
        let bases = bases().map_err(bad)?;
        let base = &bases[number % bases.len()];
        explore(base, &Arc::default(), &plan.sequence(number))
    })
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
    Ok(with_canary(canary, || {
        random::run(&setting, source, &Seen::default())
    }))
}

/// Runs rounds of the aimed scenarios, from round `first` on, until the budget is spent, at least
/// one; returns their number, and what went wrong.
pub fn aimed(
    budget: &Budget,
    seen: &Arc<Seen>,
    plan: &aimed::Plan,
    first: u64,
) -> (u64, Option<Violation>) {
    with_canary(plan.canary, || {
        let mut rounds = 0;
        loop {
            let outcome = aimed::run(first + rounds, plan, seen);
            rounds += 1;
            if outcome.is_err() || budget.is_over(rounds) {
                return (rounds, outcome.err());
            }
        }
    })
}
