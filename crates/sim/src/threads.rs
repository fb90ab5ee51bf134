//! Several threads at once on one file system, in an order that a seed decides, until the
//! power is cut: what each of them was promised must be there afterwards.
//!
//! Every name and every file belongs to one task, and tasks work in each other's directories,
//! so that their operations meet in buckets, inodes, batches and checkpoints while each task's
//! own history stays a simple list. After a crash
//!
//! 1. the entries of a task are those after some prefix of its operations, and that prefix
//!    contains every operation that a sync covered, its own or another task's, or one of the inode or of a directory;
//! 2. if an operation is there, so is every operation of any task that had returned before it
//!    was called;
//! 3. a file holds, sector by sector, what its owner wrote since the last sync that covered
//!    it, and at least what that sync covered.
//!
//! In some rounds devices fail besides. Then an operation on names that failed has changed nothing,
//! and a file may have lost what was written before somebody was told of a failure, by its fsync or
//! by a sync: not before that, and not what was written and synced since.
//!
//! In others devices lie. Then errors are no surprise, and neither are bytes that a lie left in a
//! file, nor a missing end of the journal that devices lied about (`deceit`): but 1 and 2 hold for
//! what is there, and so does 3 for all other bytes.
//!
//! Besides, all tasks move a few directories into one another: whatever comes of that must be
//! one tree.

mod check;
mod deceit;
mod ledger;
mod rounds;
mod tasks;

use crate::explore::Failure;
use crate::run::guarded;
use base::sync::{Mutex, rank};
use std::sync::Arc;

/// Directories that all tasks use.
const DIRS: usize = 3;
/// Directories that all tasks move into one another.
const JUGGLED: u64 = 4;
const MARK: &[u8] = b"user.mark";

/// What one run does, beside what its seed decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    pub seed: u64,
    pub tasks: usize,
    /// Power cuts.
    pub cycles: u64,
    /// Operations of each task between two cuts, at most.
    pub steps: u64,
}

impl Plan {
    pub fn new(seed: u64) -> Plan {
        Plan {
            seed,
            tasks: 3,
            cycles: 4,
            steps: 400,
        }
    }

    /// The command that runs it again.
    pub fn replay(&self) -> String {
        let Plan {
            seed,
            tasks,
            cycles,
            steps,
        } = self;
        format!(
            "cargo run -p sheaf-sim -- replay threads {seed} --tasks {tasks} --cycles {cycles} --steps {steps}"
        )
    }
}

/// What a run came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Times that one thread handed over to another.
    pub steps: u64,
    pub cuts: u64,
    /// Cuts after devices had lied.
    pub lied: u64,
    /// Hash of all that the devices were asked and answered.
    pub trace: u64,
    /// Hashes of what the cuts left.
    pub states: Vec<u64>,
}

/// Runs a plan; with `trail`, a failure lists what the tasks did since the last cut.
pub fn run(plan: &Plan, trail: bool) -> Result<Outcome, Failure> {
    let mut outcome = Outcome::default();
    let trail = trail.then(|| Arc::new(Mutex::new(rank::LEAF, Vec::new())));
    let done = guarded(|| {
        rounds::run(plan, trail.clone(), &mut outcome).map_err(|what| Failure {
            what,
            trail: Vec::new(),
        })
    });
    match done {
        Ok(()) => Ok(outcome),
        Err(failure) => Err(Failure {
            trail: trail.map_or_else(Vec::new, |trail| trail.lock().clone()),
            ..failure
        }),
    }
}

/// The smallest plan found that fails as this one does, at all: fewer cuts, operations, tasks.
pub fn shrink(plan: &Plan) -> Plan {
    let mut smallest = *plan;
    let fails = |plan: &Plan| run(plan, false).is_err();
    for cycles in 1..plan.cycles {
        let fewer = Plan { cycles, ..smallest };
        if fails(&fewer) {
            smallest = fewer;
            break;
        }
    }
    for tasks in 1..plan.tasks {
        let fewer = Plan { tasks, ..smallest };
        if fails(&fewer) {
            smallest = fewer;
            break;
        }
    }
    let (mut passes, mut steps) = (0, smallest.steps);
    while passes + 1 < steps {
        let middle = passes.midpoint(steps);
        if fails(&Plan {
            steps: middle,
            ..smallest
        }) {
            steps = middle;
        } else {
            passes = middle;
        }
    }
    Plan { steps, ..smallest }
}
