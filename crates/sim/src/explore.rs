//! Cuts the power wherever it can be cut, and looks at what is left each time.
//!
//! A *state* is what is on the devices after a cut. One that was seen before, at the same point
//! of the same operations, is not looked at again: recovery decides by what is on the devices
//! alone, and the oracle by the operations.

use crate::drive::{Driver, Stop};
use crate::op::Op;
use crate::oracle::Oracle;
use crate::tree::Id;
use crate::world::{CrashPoint, Crashed, Image, Machine, Shape};
use base::rng::Rng;
use base::sync::{Mutex, rank};
use device::sim::Survival;
use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// The classes of what survives of unflushed writes.
const CLASSES: [Survival; 5] = [
    Survival::None,
    Survival::All,
    Survival::Prefix,
    Survival::Subset,
    Survival::Mixed,
];

/// Cuts during a recovery from a cut, and again during that: no deeper.
const DEPTH_MAX: u32 = 2;

/// How much is looked at beyond the states that a sequence itself leaves.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// One in so many states is recovered from with cuts at each I/O of the recovery.
    pub recovery_one_in: u64,
    /// One in so many goes on for a few operations after its recovery, and is cut again.
    pub go_on_one_in: u64,
    /// One in so many is checked before its recovery too.
    pub fsck_before_one_in: u64,
}

impl Effort {
    /// Only the states that the sequence itself leaves.
    pub const NONE: Effort = Effort {
        recovery_one_in: u64::MAX,
        go_on_one_in: u64::MAX,
        fsck_before_one_in: u64::MAX,
    };
    pub const USUAL: Effort = Effort {
        recovery_one_in: 6,
        go_on_one_in: 4,
        fsck_before_one_in: 4,
    };
}

/// What all workers of a run share.
pub struct Seen {
    states: Vec<Mutex<HashSet<u64>>>,
    looks: Vec<Mutex<HashSet<u64>>>,
}

impl Default for Seen {
    fn default() -> Seen {
        let shards = || {
            (0..16)
                .map(|i| Mutex::keyed(rank::LEAF, i, HashSet::new()))
                .collect()
        };
        Seen {
            states: shards(),
            looks: shards(),
        }
    }
}

impl Seen {
    /// Notes a state; false when it was seen at this point before.
    fn note(&self, state: u64, point: u64) -> bool {
        self.count(state);
        let look = mixed(state, point);
        self.looks[(look >> 60) as usize].lock().insert(look)
    }

    /// Notes a state that somebody else looks at.
    pub fn count(&self, state: u64) {
        self.states[(state >> 60) as usize].lock().insert(state);
    }

    /// Distinct contents of all devices that recovery began with.
    pub fn states(&self) -> usize {
        self.states.iter().map(|s| s.lock().len()).sum()
    }
}

pub fn mixed(a: u64, b: u64) -> u64 {
    let mut hasher = DefaultHasher::new();
    (a, b).hash(&mut hasher);
    hasher.finish()
}

pub fn hash_of(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// A file system with durable contents, at rest, from which sequences begin.
pub struct Base {
    image: Image,
    oracle: Oracle,
    inos: BTreeMap<Id, fs::Ino>,
}

impl Base {
    pub fn new(shape: &Shape, set_up: &[Op]) -> Result<Base, String> {
        let image = Image::format(shape)?;
        let mut driver = Driver::fresh(Machine::new(&image, 1), true)?;
        for op in set_up {
            driver.run(op).map_err(|stop| format!("set-up: {stop:?}"))?;
        }
        driver.fs().close().map_err(|e| format!("set-up: {e}"))?;
        driver.oracle.all_durable();
        let (oracle, inos) = (driver.oracle.clone(), driver.inos().clone());
        let image = driver.stop().image();
        Ok(Base {
            image,
            oracle,
            inos,
        })
    }

    pub fn machine(&self, seed: u64) -> Machine {
        Machine::new(&self.image, seed)
    }

    pub fn driver(&self, seed: u64) -> Result<Driver, String> {
        let machine = self.machine(seed);
        Driver::resume(machine, self.oracle.clone(), self.inos.clone())
    }

    pub fn shape(&self) -> &Shape {
        &self.image.shape
    }
}

/// Where in a run something went wrong.
#[derive(Clone, Debug)]
pub struct Failure {
    pub what: String,
    /// Power cuts and operations that led there.
    pub trail: Vec<String>,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for step in &self.trail {
            writeln!(f, "    {step}")?;
        }
        write!(f, "  {}", self.what)
    }
}

/// One worker's exploration.
pub struct Explorer {
    pub base: Arc<Base>,
    pub seen: Arc<Seen>,
    pub effort: Effort,
    /// States looked at.
    pub looked_at: u64,
    trail: Vec<String>,
}

/// What is known at a point, and what tells it from other points.
struct Known<'a> {
    oracle: &'a Oracle,
    point: u64,
    depth: u32,
    now_ns: u64,
}

impl Explorer {
    pub fn new(base: Arc<Base>, seen: Arc<Seen>, effort: Effort) -> Explorer {
        Explorer {
            base,
            seen,
            effort,
            looked_at: 0,
            trail: Vec::new(),
        }
    }

    /// Runs a sequence, cut at every I/O with every class of survival.
    pub fn explore(&mut self, operations: &[Op]) -> Result<(), Failure> {
        self.trail.clear();
        let base = Arc::clone(&self.base);
        let outcome = base
            .driver(1)
            .and_then(|driver| self.run_cut_everywhere(driver, operations));
        outcome.map_err(|what| Failure {
            what,
            trail: std::mem::take(&mut self.trail),
        })
    }

    fn run_cut_everywhere(&mut self, mut driver: Driver, all: &[Op]) -> Result<(), String> {
        driver.machine.tap.collect(true);
        let mut point = 0;
        for op in all {
            self.trail.push(op.to_string());
            let expected = driver.begin(op);
            let result = driver.perform(op, expected.as_ref().ok());
            point = mixed(point, hash_of(op));
            let known = Known {
                oracle: &driver.oracle,
                point,
                depth: 0,
                now_ns: driver.machine.now_ns(),
            };
            let points = driver.machine.tap.take();
            self.cut_at(&points, &known)?;
            match driver.end(op, expected, result) {
                Ok(()) => {}
                Err(Stop::Environment(what) | Stop::Violation(what)) => return Err(what),
            }
        }
        driver.verify_now()?;
        let known = Known {
            oracle: &driver.oracle,
            point: mixed(point, 1),
            depth: 0,
            now_ns: driver.machine.now_ns(),
        };
        self.cut_at(&[driver.machine.point()], &known)
    }

    fn cut_at(&mut self, points: &[CrashPoint], known: &Known<'_>) -> Result<(), String> {
        for (number, point) in points.iter().enumerate() {
            // Below a first cut one class each: there are many more of those.
            let drawn = mixed(known.point, number as u64 ^ 0xC1A55) as usize % CLASSES.len();
            let classes = match known.depth {
                0 => &CLASSES[..],
                _ => &CLASSES[drawn..=drawn],
            };
            for &survival in classes {
                let seed = mixed(known.point, number as u64 * 8 + survival as u64);
                let crashed = point.crash(survival, &mut Rng::new(seed));
                if !self.seen.note(crashed.hash, known.point) {
                    continue;
                }
                let depth = self.trail.len();
                let state = crashed.hash;
                self.trail.push(format!(
                    "cut at I/O {number} of {}, {survival:?}: state {state:016x}",
                    points.len()
                ));
                self.look_at(crashed, known)?;
                self.trail.truncate(depth);
            }
        }
        Ok(())
    }

    /// Recovers, checks, compares, goes on.
    fn look_at(&mut self, crashed: Crashed, known: &Known<'_>) -> Result<(), String> {
        self.looked_at += 1;
        let state = crashed.hash;
        let machine = Machine::after(self.base.shape(), crashed, known.now_ns);
        let mut rng = Rng::new(mixed(state, known.point));
        if rng.one_in(self.effort.fsck_before_one_in) {
            machine.fsck()?;
        }
        let deeper = known.depth < DEPTH_MAX;
        let rarer = 1 + 7 * known.depth as u64;
        let cut_recovery = deeper && rng.one_in(self.effort.recovery_one_in.saturating_mul(rarer));
        let go_on = deeper && rng.one_in(self.effort.go_on_one_in.saturating_mul(rarer));
        machine.tap.collect(cut_recovery);
        let tap = Arc::clone(&machine.tap);
        let recovered = Driver::recover(machine, known.oracle);
        tap.collect(false);
        let mut driver = recovered?;
        driver.machine.fsck()?;
        if cut_recovery {
            let known = Known {
                oracle: known.oracle,
                point: mixed(known.point, 2),
                depth: known.depth + 1,
                now_ns: known.now_ns,
            };
            self.trail.push("recovery".into());
            self.cut_at(&tap.take(), &known)?;
            self.trail.pop();
        }
        if go_on {
            self.go_on(
                &mut driver,
                mixed(state, known.point),
                known.depth,
                &mut rng,
            )?;
        }
        Ok(())
    }

    /// A few operations on what was recovered, then another cut.
    fn go_on(
        &mut self,
        driver: &mut Driver,
        mut point: u64,
        depth: u32,
        rng: &mut Rng,
    ) -> Result<(), String> {
        let start = self.trail.len();
        driver.machine.tap.collect(true);
        let set = crate::sequences::full_set();
        let more = rng.range(1, 4);
        for i in 0..=more {
            let op = match i {
                _ if i == more => Op::Sync,
                _ => crate::sequences::tagged(rng.pick(&set), 200 + i),
            };
            self.trail.push(op.to_string());
            let expected = driver.begin(&op);
            let result = driver.perform(&op, expected.as_ref().ok());
            point = mixed(point, hash_of(&op));
            let points = driver.machine.tap.take();
            if !points.is_empty() && rng.one_in(2) {
                let known = Known {
                    oracle: &driver.oracle,
                    point,
                    depth: depth + 1,
                    now_ns: driver.machine.now_ns(),
                };
                let chosen = rng.pick(&points);
                let survival = *rng.pick(&CLASSES);
                let crashed = chosen.crash(survival, rng);
                if self.seen.note(crashed.hash, point) {
                    let depth = self.trail.len();
                    self.trail.push(format!("cut, {survival:?}"));
                    self.look_at(crashed, &known)?;
                    self.trail.truncate(depth);
                }
            }
            match driver.end(&op, expected, result) {
                Ok(()) => {}
                Err(Stop::Environment(what) | Stop::Violation(what)) => return Err(what),
            }
        }
        driver.verify_now()?;
        self.trail.truncate(start);
        Ok(())
    }
}
