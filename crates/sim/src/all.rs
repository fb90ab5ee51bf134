//! Every mode within one budget, and what all of them found together.

use crate::aimed;
use crate::canaries::{self, Verdict};
use crate::explore::Seen;
use crate::run::{self, Budget, Search, Searched, Violation};
use crate::sequences::Plan;
use base::canary::Canary;
use std::fmt;
use std::sync::Arc;

/// Of the time that is left for the modes, in percent.
const EXHAUSTIVE: u64 = 55;
const RANDOM: u64 = 30;
/// Violations after which a mode ends early.
const ENOUGH: usize = 5;
/// The seed of the order in which sequences come.
pub const PLAN_SEED: u64 = 1;

#[derive(Debug, Default)]
pub struct Whole {
    /// Distinct contents of all devices that recovery began with.
    pub crash_states: usize,
    /// Sequences run to the end, cut everywhere.
    pub sequences: u64,
    /// Seeds of the random and the threaded mode.
    pub seeds: u64,
    /// Modes that came to nothing: they have not shown that nothing is wrong.
    pub idle: Vec<&'static str>,
    pub violations: Vec<Violation>,
    pub verdicts: Vec<Verdict>,
    pub seconds: u64,
}

/// How long everything may take.
#[derive(Clone, Copy, Debug)]
pub enum Extent {
    /// About so many seconds, the canaries included.
    Seconds(u64),
    /// Every sequence of one and of two operations, and of an atomic write with one beside it, and so many seeds of the random mode, with a
    /// tenth of them in the threaded mode.
    Complete { seeds: u64 },
}

impl Extent {
    /// The budget of a mode that begins now: so many percent of `left` seconds, or the count.
    fn budget(self, left: u64, percent: u64, count: u64) -> Budget {
        match self {
            Extent::Seconds(_) => Budget::seconds(left * percent / 100),
            Extent::Complete { .. } => Budget::count(count),
        }
    }
}

/// Runs everything, on `workers` cores.
pub fn run(
    extent: Extent,
    workers: usize,
    canary_seconds: u64,
    first: u64,
) -> Result<Whole, String> {
    let whole = Budget::seconds(0);
    let (seconds, seeds) = match extent {
        Extent::Seconds(seconds) => (seconds, 0),
        Extent::Complete { seeds } => (0, seeds),
    };
    let mut done = Whole::default();
    if canary_seconds > 0 {
        done.verdicts = canaries::hunt(Canary::ALL, workers, canary_seconds)?;
    }
    let left = seconds.saturating_sub(whole.spent()).max(10);
    let seen = Arc::new(Seen::default());
    let (_, found) = run::aimed(&Budget::seconds(0), &seen, &aimed::Plan::default(), 1);
    done.violations.extend(found);
    let search = |percent: u64, count: u64| Search {
        workers,
        budget: extent.budget(left, percent, count),
        seen: Arc::clone(&seen),
        most: ENOUGH,
        canary: None,
    };
    let plan = Plan::new(PLAN_SEED);
    let sequences = plan.count() as u64;
    let exhausted = search(EXHAUSTIVE, sequences).exhaustive(&plan, first as usize)?;
    done.sequences = done.note("exhaustive", vec![exhausted]);
    let random = vec![search(RANDOM, seeds).random(first)];
    done.seeds += done.note("random", random);
    let share = (seeds / 10).div_ceil(workers as u64);
    let threaded = search(100 - EXHAUSTIVE - RANDOM, share);
    // Each worker has seeds of its own; far apart, so that they do not meet.
    let threaded = base::thread::parallel(workers, |worker| {
        threaded.threads(first + 1 + ((worker as u64) << 32))
    });
    done.seeds += done.note("threads", threaded);
    eprintln!();
    done.crash_states = seen.states();
    done.seconds = whole.spent();
    Ok(done)
}

impl Whole {
    /// Takes over what the parts of a mode have found; returns how many sequences or seeds they ran.
    fn note(&mut self, mode: &'static str, parts: Vec<Searched>) -> u64 {
        let runs = parts.iter().map(|part| part.runs).sum();
        if runs == 0 {
            self.idle.push(mode);
        }
        self.violations
            .extend(parts.into_iter().flat_map(|part| part.violations));
        runs
    }

    fn survivors(&self) -> Vec<&'static str> {
        let survived = self.verdicts.iter().filter(|v| v.caught.is_none());
        survived.map(|v| v.canary.name()).collect()
    }

    /// Every mode ran, and nothing was found that must not be, and everything that was planted.
    pub fn is_good(&self) -> bool {
        self.idle.is_empty() && self.violations.is_empty() && self.survivors().is_empty()
    }

    pub fn json(&self) -> serde_json::Value {
        let survived = self.survivors();
        let planted = self.verdicts.len();
        serde_json::json!({
            "crash_states": self.crash_states,
            "sequences_exhausted": self.sequences,
            "seeds": self.seeds,
            "idle": self.idle,
            "violations": self.violations.len(),
            "canaries": {
                "planted": planted,
                "caught": planted - survived.len(),
                "survived": survived,
            },
            "seconds": self.seconds,
        })
    }
}

impl fmt::Display for Whole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let survived = self.survivors();
        write!(
            f,
            "{} crash states, {} sequences exhausted, {} seeds, {} violations in {} s; {} canaries planted, {} caught",
            self.crash_states,
            self.sequences,
            self.seeds,
            self.violations.len(),
            self.seconds,
            self.verdicts.len(),
            self.verdicts.len() - survived.len(),
        )?;
        let slowest = self.verdicts.iter();
        let slowest = slowest.max_by(|a, b| a.seconds.total_cmp(&b.seconds));
        if let Some(slowest) = slowest {
            write!(f, ", {} in {:.0} s", slowest.canary.name(), slowest.seconds)?;
        }
        if !self.idle.is_empty() {
            write!(f, "; nothing was run of: {}", self.idle.join(" "))?;
        }
        match survived.is_empty() {
            true => Ok(()),
            false => write!(f, "; survived: {}", survived.join(" ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing was wrong with what had not been run, and that counted as good.
    #[test]
    fn what_has_not_run_is_not_good() {
        let mut whole = Whole::default();
        let ran = |runs| Searched {
            runs,
            violations: Vec::new(),
        };
        assert_eq!(whole.note("random", vec![ran(0), ran(2)]), 2);
        assert!(whole.is_good());
        assert_eq!(whole.note("threads", vec![ran(0), ran(0)]), 0);
        assert!(!whole.is_good());
        assert!(whole.to_string().ends_with("nothing was run of: threads"));
    }
}
