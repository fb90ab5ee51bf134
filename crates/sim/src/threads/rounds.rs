//! Rounds: an array is used by all tasks until its power goes, and looked at when it is back.

use super::check::check;
use super::deceit::Deceit;
use super::ledger::{Entries, Known, Ledger};
use super::tasks::Task;
use super::{DIRS, JUGGLED, Outcome, Plan};
use crate::setting::Trouble;
use crate::world::{Image, Machine, Shape};
use base::rng::Rng;
use base::sync::{Mutex, rank};
use base::{sched, thread};
use device::Topology;
use device::sim::Survival;
use fs::{Caller, FileSystem, Ino, ROOT};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// The array and the options that a seed asks for.
fn shape(rng: &mut Rng) -> Shape {
    let mut shape = Shape::small(rng.range(1, 4));
    if rng.one_in(3) {
        // Batches of one length, so that old ones lie where new ones end.
        shape.logical_block = 4096;
    }
    shape.has_cache = !rng.one_in(6);
    let store = &mut shape.options.store;
    store.background = true;
    store.discard = rng.one_in(3);
    store.workers = rng.range(1, 4) as usize;
    store.shards = rng.range(1, 5) as usize;
    store.dirty_bytes = Some(*rng.pick(&[32 << 10, 256 << 10, 4 << 20]));
    store.node_cache_bytes = *rng.pick(&[64 << 10, 16 << 20]);
    shape.options.data.cache_bytes = *rng.pick(&[256 << 10, 8 << 20]);
    if rng.one_in(2) {
        // Few hashes: buckets split late, and names collide.
        shape.options.hash_mask = Some(0xF << 60);
    }
    shape
}

/// Makes the directories that all tasks use.
fn set_up(fs: &FileSystem, known: &mut Known) -> Result<Vec<Ino>, fs::Error> {
    let who = Caller::root();
    for i in 0..JUGGLED {
        let name = format!("j{i}");
        let made = fs.mkdir(&who, ROOT, name.as_bytes(), 0o755)?;
        known.juggled.push(made.ino);
    }
    let make = |i| {
        let name = format!("dir{i}");
        Ok(fs.mkdir(&who, ROOT, name.as_bytes(), 0o755)?.ino)
    };
    let dirs = (0..DIRS).map(make).collect();
    fs.sync()?;
    dirs
}

/// What is wrong with the devices, round by round.
const TROUBLES: [Trouble; 10] = [
    Trouble::None,
    Trouble::None,
    Trouble::None,
    Trouble::None,
    Trouble::None,
    Trouble::Errors,
    Trouble::Errors,
    Trouble::Slow,
    Trouble::Lies,
    Trouble::Lies,
];

/// Operations of a task between two faults in a round that has any, on average. Lies are rarer: a
/// few are enough for all that follows to be an error.
const FAULT_EVERY: u64 = 25;
const LIE_EVERY: [u64; 3] = [100, 400, 1500];

/// When the power goes.
#[derive(Clone, Copy, Debug)]
enum Cut {
    /// After so many operations of the devices.
    After(u64),
    /// So many operations after a checkpoint record begins to be written, the one after so
    /// many others: that is when a checkpoint decides what counts.
    AtRecord(u64, u64),
}

/// Lets all tasks work until the power goes.
fn work(plan: &Plan, machine: &Machine, dirs: &[Ino], known: &Known, order: u64, cut: Cut) -> u64 {
    let what = format!("{} (order {order:#x})", plan.replay());
    sched::run(&what, order, &machine.clock, || {
        let fs = machine.open().expect("the array opens");
        let switch = &machine.switch;
        match cut {
            Cut::After(operations) => switch.cut_after(operations),
            Cut::AtRecord(skip, after) => {
                let switch = Arc::clone(switch);
                let cut = move || switch.cut_after(after);
                machine.tap.interpose_at_label(skip, Box::new(cut));
            }
        }
        thread::parallel(plan.tasks, |me| {
            let mut task = Task {
                me,
                machine,
                fs: &fs,
                dirs,
                known,
                rng: Rng::new(order ^ (me as u64 + 1)),
            };
            for _ in 0..plan.steps {
                if let Err(error) = task.step() {
                    assert!(task.is_excused(&error), "task {me}: {error}");
                    if task.is_halted() {
                        return;
                    }
                }
            }
        });
        switch.cut_now();
        assert!(fs.close().is_err(), "a file system closes without power");
        sched::steps()
    })
}

/// Runs a plan's rounds.
pub(super) fn run(
    plan: &Plan,
    trail: Option<Arc<Mutex<Vec<String>>>>,
    outcome: &mut Outcome,
) -> Result<(), String> {
    let mut rng = Rng::new(plan.seed);
    let mut shape = shape(&mut rng);
    shape.tight = Rng::new(plan.seed ^ 0x0716_4117).one_in(2);
    if Rng::new(plan.seed ^ 0x70B0_1067).one_in(4) {
        shape.topology = Topology::PerDevice;
    }
    let mut others = Rng::new(plan.seed ^ 0x0F0A_F1A6);
    shape.forces_writes = others.one_in(2);
    shape.told_late = others.one_in(2);
    let mut machine = Machine::new(&Image::format(&shape)?, plan.seed);
    let ledger = || Mutex::new(rank::LEDGER, Ledger::new(Entries::new()));
    let mut known = Known {
        moment: AtomicU64::new(0),
        trouble: Trouble::None,
        deceit: None,
        lied: false,
        fault_every: FAULT_EVERY,
        syncing: AtomicU64::new(0),
        trail,
        names: *rng.pick(&[8, 40]),
        name_len: *rng.pick(&[1, 180]),
        mark_max: *rng.pick(&[100, 30_000]),
        juggled: Vec::new(),
        ledgers: (0..plan.tasks).map(|_| ledger()).collect(),
    };
    let setting_up = |machine: &Machine, known: &mut Known| {
        sched::run("set-up", 1, &machine.clock, || {
            let fs = machine.open()?;
            let dirs = set_up(&fs, known)?;
            fs.close()?;
            Ok::<_, fs::Error>(dirs)
        })
    };
    // Of its own, so that rounds without faults are what they would be without the others.
    let mut fortune = Rng::new(plan.seed ^ 0x0F0B_7E5E);
    let dirs = setting_up(&machine, &mut known).map_err(|e| e.to_string())?;
    for _ in 0..plan.cycles {
        let most = *rng.pick(&[50, 400, 2500]);
        let mut cut = match rng.one_in(2) {
            true => Cut::After(rng.below(most)),
            false => Cut::AtRecord(rng.below(8), rng.below(8)),
        };
        let order = rng.next_u64();
        known.trouble = *fortune.pick(&TROUBLES);
        if known.trouble == Trouble::Errors {
            cut = Cut::After(fortune.below(2500));
        }
        (known.deceit, known.fault_every) = (None, FAULT_EVERY);
        if known.trouble == Trouble::Lies {
            known.fault_every = *fortune.pick(&LIE_EVERY);
            known.deceit = Some(Deceit::watch(&machine));
        }
        if let Some(trail) = &known.trail {
            trail.lock().clear();
        }
        let worked = work(plan, &machine, &dirs, &known, order, cut);
        outcome.steps += worked;
        known.lied = known.lied();
        outcome.cuts += 1;
        outcome.lied += u64::from(known.lied);
        for device in &machine.devices {
            outcome.trace = outcome.trace.rotate_left(1) ^ device.trace_hash();
        }
        let survival = *rng.pick(&Survival::ALL);
        let now_ns = machine.now_ns();
        let crashed = machine.cut(survival, &mut rng);
        outcome.states.push(crashed.hash);
        machine = Machine::after(&shape, crashed, now_ns);
        let lied = known.lied;
        if !lied && fortune.one_in(3) {
            machine = cut_in_recovery(machine, &shape, order, &mut fortune);
        }
        let settled = settle(&machine, &dirs, known, order);
        known = match settled {
            Ok(Some(known)) => known,
            Ok(None) => return Ok(()),
            // Devices have lied, and that is noticed.
            Err(Stop::Noticed(_)) if lied => return Ok(()),
            Err(Stop::Noticed(what) | Stop::Violation(what)) => return Err(what),
        };
    }
    Ok(())
}

/// The power goes again while several workers recover, or a little later.
fn cut_in_recovery(machine: Machine, shape: &Shape, order: u64, rng: &mut Rng) -> Machine {
    machine.switch.cut_after(rng.below(80));
    sched::run("recovery that is cut", !order, &machine.clock, || {
        // Whatever comes of it without power, the next one has to find all there is.
        if let Ok(fs) = machine.open() {
            let _ = fs.close();
        }
    });
    let now_ns = machine.now_ns();
    let crashed = machine.cut(*rng.pick(&Survival::ALL), rng);
    Machine::after(shape, crashed, now_ns)
}

/// Why a round ends a run.
pub(super) enum Stop {
    /// The file system says that something is wrong.
    Noticed(String),
    /// It does not say so.
    Violation(String),
}

impl Stop {
    pub fn noticed(what: &str, error: &dyn std::fmt::Display) -> Stop {
        Stop::Noticed(format!("{what}: {error}"))
    }
}

/// What is known when the power is back; `None`: nothing, the end of the journal is missing.
fn settle(
    machine: &Machine,
    dirs: &[Ino],
    known: Known,
    order: u64,
) -> Result<Option<Known>, Stop> {
    machine.fsck().map_err(Stop::Noticed)?;
    let known = sched::run("recovery", order, &machine.clock, || {
        let fs = machine.open();
        let fs = fs.map_err(|error| Stop::noticed("recovery", &error))?;
        let checked = check(&fs, dirs, known);
        // Whatever was found: its threads end with the file system.
        let closed = fs.close();
        let known = checked?;
        closed.map_err(|error| Stop::noticed("close", &error))?;
        Ok(known)
    })?;
    machine.fsck().map_err(Stop::Noticed)?;
    Ok(known)
}
