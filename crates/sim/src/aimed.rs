//! Short scenarios that aim at one mechanism each: what takes random runs long to come across.

use crate::atomic_files;
use crate::atomics;
use crate::beside;
use crate::crowd;
use crate::drive::Driver;
use crate::explore::{Base, Effort, Explorer, Failure, Seen, hash_of, mixed};
use crate::flights;
use crate::forgiven;
use crate::noticed;
use crate::op::{Op, parse_list};
use crate::pages;
use crate::random::{self, Generator, Source, Step, run_steps};
use crate::reclaim;
use crate::run::{Violation, guarded};
use crate::scans;
use crate::sequences;
use crate::setting::{Setting, Trouble};
use crate::shared;
use crate::sparse;
use crate::stamps;
use crate::streams;
use crate::transacted;
use crate::unreadable;
use crate::versioned;
use crate::world::{Image, Machine, Shape};
use base::canary::Canary;
use base::clock::Clock;
use base::rng::Rng;
use base::{sched, thread};
use device::sim::{Survival, Times};
use fs::{Caller, ROOT, SetAttr};
use std::sync::Arc;
use std::time::Duration;

/// Sequences that have broken file systems before, after the usual set-up.
const CLASSICS: &[&str] = &[
    // An overwrite in place needs a flush of its own when no commit does it.
    "write A/foo 0 4096 1; fsync A/foo; write A/foo 0 4096 2; fsync A/foo; write A/foo 0 4096 3; fdatasync A/foo; sync",
    "write A/foo 4096 4096 1; fdatasync A/foo; write A/foo 0 100 2; fdatasync A/foo; sync",
    // What lies behind a shorter end must not come back.
    "truncate A/foo 5000; truncate A/foo 20000; sync; remount",
    "truncate A/foo 5000; sync; write A/foo 20000 100 1; sync; remount; truncate A/foo 30000; sync",
    // New content of a file that was cut to nothing takes no old content away before it is there as a whole.
    "truncate A/foo 0; write-direct A/foo 0 4096 1; fsync B; write-direct A/foo 4096 4096 2; fsync B; write A/foo end 500 3; fsync A/foo; sync",
    "truncate A/foo 0; write A/foo 0 9000 1; write-range A/foo 0 9000; fsync B; write A/foo end 9000 2; fsync B; sync",
    // The replacement of a file by rename, with and without fsync.
    "create A/new; write A/new 0 6000 1; rename A/new A/foo 0; sync; checkpoint",
    "create A/new; write A/new 0 6000 1; fsync A/new; rename A/new A/foo 0; fsync A; checkpoint",
    "create A/new; write A/new 0 6000 1; rename A/new A/foo 0; fsync B; sync",
    // Two files that change places, each cut to nothing, rewritten or appended to before.
    "rewrite A/bar 9000 1; checkpoint; rename A/foo A/bar 2; checkpoint; sync; checkpoint",
    "truncate A/bar 0; rewrite A/foo 9000 1; checkpoint; tx-relaxed rename A/foo A/bar 2 + chmod B 448; checkpoint; sync",
    "create A/new; write A/new 0 6000 1; write A/foo end 9000 2; rename A/foo A/new 2; fsync B; checkpoint",
    // A size must not be durable before what it covers.
    "create foo; write foo 0 20000 1; fsync B; fsync foo; sync",
    "write A/foo end 20000 1; fsync B; fdatasync A/foo; sync",
    // Synced appends are logged, and go home later; what is there then must not be what was logged once.
    "write A/foo end 200 1; fdatasync A/foo; write A/foo end 100 2; fdatasync A/foo; tick 6000; write A/foo end 90 3; fsync A/foo; sync",
    "write A/foo end 200 1; fdatasync A/foo; tick 6000; write A/foo 8200 300 2; fdatasync A/foo; tick 6000; remount",
    "write A/foo end 200 1; fdatasync A/foo; truncate A/foo 8500; sync; truncate A/foo 9500; fsync A/foo; remount",
    "write A/foo end 200 1; fdatasync A/foo; truncate A/foo 8000; write A/foo end 400 2; fdatasync A/foo; checkpoint; tick 6000; sync",
    "write A/foo end 200 1; fdatasync A/foo; checkpoint; tick 6000; write A/foo 8192 4096 2; fdatasync A/foo; checkpoint; remount",
    "write A/foo 20000 100 1; fdatasync A/foo; write A/foo 20050 100 2; fdatasync A/foo; write A/foo 0 100 3; fdatasync A/foo; remount",
    "create foo; write foo 0 4000 1; fsync foo; write foo end 50 2; fsync foo; tick 6000; write foo 10 20 3; fsync foo; remount",
    "create B/new; write B/new 0 4000 1; fsync B/new; rename B/new A/foo 0; write A/foo 0 100 2; fsync B; sync",
    // What a batch vouches for is written over, cut, and given to another file.
    "create foo; write foo 0 9000 1; fsync foo; write foo 100 50 2; fsync foo; write foo 5000 4096 3; fdatasync foo; sync",
    "create foo; write foo 0 9000 1; fsync foo; truncate foo 5000; write foo 8000 3000 2; fsync foo; checkpoint; write foo 0 9000 3; fsync foo; remount",
    "create foo; write foo 0 9000 1; fsync foo; unlink foo; fsync A; create B/new; write B/new 0 9000 2; fsync B/new; sync",
    "write A/foo end 200 1; fdatasync A/foo; write A/foo end 9000 2; rename A/foo A/bar 0; unlink A/bar; sync; create B/new; write B/new 0 12000 3; fsync B/new; remount",
    // A nid that is used again.
    "write A/foo 0 9000 1; sync; unlink A/foo; create B/foo; truncate B/foo 9000; sync",
    // What must be refused.
    "rmdir A; rename A A/C 0; mkdir A/C; rename A A/C/D 0; rename B A/C 0; rmdir A; sync",
    // A checkpoint after a checkpoint, with commits around.
    "chmod A 448; sync; checkpoint; chmod A 449; sync; checkpoint; chmod A 450; sync; checkpoint",
    // Names that come and go.
    "unlink A/foo; checkpoint; create A/foo; write A/foo 0 3000 1; sync; checkpoint; unlink A/foo; sync",
    "hold A/foo; unlink A/foo; sync; checkpoint",
    // What a transaction changes comes and goes together, whatever was dirty before it and is written after it.
    "write A/foo 100 5000 1; write A/bar 0 90 2; tx write A/foo 4000 200 3 + write A/bar 50 100 4; write A/foo 0 50 5; sync",
    "create foo; write foo 0 9000 1; tx write foo 4096 4096 2 + write A/foo 0 4096 3; tx write foo 0 4096 4 + write A/foo 4096 4096 5; sync; remount",
    "write A/foo end 200 1; fdatasync A/foo; tx write A/foo end 100 2 + truncate A/bar 100; write A/foo end 90 3; fsync A/foo; remount",
    "tx-relaxed create foo + write foo 0 20000 1; tx-relaxed write foo 5000 100 2 + rename foo A/foo 0; fsync B; checkpoint",
    "tx-relaxed write A/foo 0 4096 1 + chmod A/bar 448; write A/foo 4096 4096 2; sync; tx-relaxed write A/foo 4096 4096 3 + chmod A/bar 420; write-direct A/foo 0 4096 4; write A/foo 5000 100 5; truncate A/foo 8500; sync",
    "rewrite A/foo 5000 1; tx write A/foo 10000 10 2 + unlink A/bar; tx truncate A/foo 20000; remount",
    "hold A/foo; tx unlink A/foo + create A/foo + write A/foo 0 300 1; release A/foo; sync",
    "tx write A/foo 0 9000 1 + chmod A 448 + create A/C; unlink A/foo; tx create A/foo + write A/foo 0 9000 2; checkpoint; tx write A/foo 0 9000 3; sync",
    "fallocate A/foo 1 0 40000; tx write A/foo 12000 8000 1 + write A/bar 4000 4096 2; truncate A/foo 0; tx write A/foo 0 10 3; remount",
];

/// One scenario. Adding one to [`SCENARIOS`] is all it takes to have it run, and for canaries to name it.
#[derive(Debug)]
pub struct Scenario {
    pub name: &'static str,
    /// How often in a round, with another order each time.
    times: u32,
    body: Body,
}

#[derive(Debug)]
enum Body {
    /// Makes a machine of its own.
    Alone(fn(u64) -> Result<(), String>),
    /// Begins with what others of its round begin with.
    Based(fn(&Base, u64) -> Result<(), String>),
    /// Uses more of what its round's scenarios share.
    Shared(fn(&Ground, u64) -> Result<(), Failure>),
}
use Body::{Alone, Based, Shared};

/// What scenarios of a round share.
struct Ground {
    base: Arc<Base>,
    seen: Arc<Seen>,
    /// What is planted.
    canary: Option<Canary>,
}

const fn scenario(name: &'static str, times: u32, body: Body) -> Scenario {
    Scenario { name, times, body }
}

/// All of them, in the order in which they run.
pub const SCENARIOS: &[Scenario] = &[
    scenario("classics", 1, Shared(classics)),
    scenario("interposed", 1, Based(interposed)),
    scenario("forged", 1, Based(forged)),
    scenario("stale", 1, Based(stale)),
    scenario("untold", 1, Alone(untold)),
    scenario("stamps", 40, Alone(stamps::run)),
    scenario("directory-times", 30, Alone(stamps::crowd)),
    scenario("crowd", 30, Alone(crowd::run)),
    scenario("scans", 10, Alone(scans::run)),
    scenario("streams", 30, Alone(streams::run)),
    scenario("pages", 30, Alone(pages::run)),
    scenario("noticed", 40, Alone(noticed::run)),
    scenario("reclaim", 2, Alone(reclaim::run)),
    scenario("sparse", 2, Alone(sparse::run)),
    scenario("flights", 2, Alone(flights::run)),
    scenario("one-file", 300, Alone(shared::run)),
    scenario("transactions", 40, Alone(transacted::run)),
    scenario("failing-reads", 4, Alone(unreadable::run)),
    scenario("versions", 40, Alone(versioned::run)),
    scenario("atomic-writes", 2, Shared(atomic_writes)),
    scenario("atomic-errors", 4, Alone(atomics::failing)),
    scenario("atomic-files", 30, Alone(atomic_files::run)),
    scenario("crossing-moves", 20, Based(crossing)),
    scenario("rot", 2, Shared(rot)),
    scenario("failing", 2, Shared(failing)),
    scenario("forgiven", 2, Based(forgiven::run)),
    scenario("beside", 200, Alone(beside::run)),
    scenario("full", 2, Shared(full)),
    scenario("flood", 1, Shared(flood)),
];

impl Scenario {
    pub fn from_name(name: &str) -> Option<&'static Scenario> {
        SCENARIOS.iter().find(|s| s.name == name)
    }

    /// The orders of each scenario are its own: they stay what they are whatever runs before it.
    fn run(&self, ground: &Ground, round: u64) -> Result<(), Failure> {
        let mut rng = Rng::new(mixed(round, hash_of(self.name)));
        for _ in 0..self.times {
            let order = rng.next_u64();
            let plain = |what| failure(what, Vec::new());
            let run = || match self.body {
                Alone(run) => run(order).map_err(plain),
                Based(run) => run(&ground.base, order).map_err(plain),
                Shared(run) => run(ground, order),
            };
            guarded(run).map_err(|found| {
                let what = format!("{}, order {order}: {}", self.name, found.what);
                failure(what, found.trail)
            })?;
        }
        Ok(())
    }
}

fn failure(what: String, trail: Vec<String>) -> Failure {
    Failure { what, trail }
}

/// How rounds of scenarios go.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plan {
    /// Rounds have this one alone.
    pub only: Option<&'static Scenario>,
    /// Tells how long each scenario takes.
    pub verbose: bool,
    /// What is planted meanwhile.
    pub canary: Option<Canary>,
}

/// All scenarios, once, with the randomness of `round`, up to the first that fails.
pub fn run(round: u64, plan: &Plan, seen: &Arc<Seen>) -> Result<(), Violation> {
    let replay = format!("cargo run -p sheaf-sim -- aimed --round {round}");
    let ground = match Ground::new(plan, seen) {
        Ok(ground) => ground,
        Err(what) => {
            let failure = failure(what, Vec::new());
            return Err(Violation { replay, failure });
        }
    };
    let scenarios = plan.only.map_or(SCENARIOS, std::slice::from_ref);
    for scenario in scenarios {
        let clock = Clock::real();
        let began_ns = clock.monotonic_ns();
        let outcome = scenario.run(&ground, round);
        if plan.verbose {
            let seconds = (clock.monotonic_ns() - began_ns) as f64 / 1e9;
            eprintln!("{}: {seconds:.2} s", scenario.name);
        }
        outcome.map_err(|failure| Violation {
            replay: format!("{replay} --only {}", scenario.name),
            failure,
        })?;
    }
    Ok(())
}

impl Ground {
    fn new(plan: &Plan, seen: &Arc<Seen>) -> Result<Ground, String> {
        let base = Base::new(&Shape::small(2), &sequences::set_up())?;
        Ok(Ground {
            base: Arc::new(base),
            seen: Arc::clone(seen),
            canary: plan.canary,
        })
    }
}

/// Each of the classics, cut at every I/O.
fn classics(ground: &Ground, _: u64) -> Result<(), Failure> {
    let bad = |what| failure(what, Vec::new());
    let (base, seen) = (Arc::clone(&ground.base), Arc::clone(&ground.seen));
    let mut explorer = Explorer::new(base, seen, Effort::NONE);
    CLASSICS
        .iter()
        .try_for_each(|text| explorer.explore(&parse_list(text).map_err(bad)?))
}

/// Somebody commits while a checkpoint writes its record, and then the power goes.
fn interposed(base: &Base, _: u64) -> Result<(), String> {
    for skip in 0..4 {
        let mut driver = base.driver(1)?;
        let run = |driver: &mut Driver, op: &Op| driver.run(op).map_err(|s| format!("{s:?}"));
        run(&mut driver, &Op::Chmod("A".into(), 0o700))?;
        run(&mut driver, &Op::Sync)?;
        let fs = Arc::clone(driver.fs());
        // Names that begin with a dot are not part of the model.
        let made = fs.mknod(&Caller::root(), ROOT, b".between", libc::S_IFREG | 0o644, 0);
        let between = made.map_err(|e| e.to_string())?.ino;
        driver.learn_top()?;
        run(&mut driver, &Op::Sync)?;
        let commit = move || {
            // The outcome shows after the cut.
            let set = SetAttr {
                mode: Some(0o600),
                ..SetAttr::default()
            };
            let changed = fs.setattr(&Caller::root(), between, &set);
            let done = fs.store().commit_through(fs.store().epoch());
            debug_assert!(changed.is_ok() && done.is_ok());
        };
        driver
            .machine
            .tap
            .interpose_at_label(skip, Box::new(commit));
        driver.machine.tap.collect(true);
        run(&mut driver, &Op::Checkpoint)?;
        let mut points = driver.machine.tap.take();
        points.push(driver.machine.point());
        let mut rng = Rng::new(skip);
        for (number, point) in points.iter().enumerate() {
            for survival in [Survival::None, Survival::Subset, Survival::All] {
                let crashed = point.crash(survival, &mut rng);
                let now_ns = driver.machine.now_ns();
                let machine = Machine::after(base.shape(), crashed, now_ns);
                Driver::recover(machine, &driver.oracle)
                    .and_then(|driver| driver.machine.fsck())
                    .map_err(|what| {
                        format!("a commit in a checkpoint, {skip}, cut at {number}, {survival:?}: {what}")
                    })?;
            }
        }
    }
    Ok(())
}

/// A batch is taken out of the journal and the chain is closed over the gap: no crash does that,
/// and recovery must refuse it.
fn forged(base: &Base, _: u64) -> Result<(), String> {
    let mut driver = base.driver(1)?;
    for mode in [0o701, 0o702, 0o703] {
        for op in [Op::Chmod("A".into(), mode), Op::Sync] {
            driver.run(&op).map_err(|s| format!("{s:?}"))?;
        }
    }
    let crashed = driver.machine.cut(Survival::None, &mut Rng::new(1));
    let machine = Machine::after(base.shape(), crashed, driver.machine.now_ns());
    machine.lose_batch(true)?;
    match machine.open() {
        Err(_) => Ok(()),
        Ok(_) => Err("a journal with a change missing is replayed".into()),
    }
}

/// Two batches were in flight, and only the later one arrived. The next mount writes one of the
/// same length where the other is missing; the old one behind it must stay forgotten.
fn stale(base: &Base, _: u64) -> Result<(), String> {
    let mut driver = base.driver(1)?;
    let run = |driver: &mut Driver, op: &Op| driver.run(op).map_err(|s| format!("{s:?}"));
    let before = driver.oracle.clone();
    for mode in [0o701, 0o702] {
        run(&mut driver, &Op::Chmod("A".into(), mode))?;
        run(&mut driver, &Op::Sync)?;
    }
    let mut rng = Rng::new(1);
    let crashed = driver.machine.cut(Survival::None, &mut rng);
    let machine = Machine::after(base.shape(), crashed, driver.machine.now_ns());
    machine.lose_batch(false)?;
    let mut driver = Driver::recover(machine, &before)?;
    run(&mut driver, &Op::Chmod("A".into(), 0o703))?;
    run(&mut driver, &Op::Sync)?;
    let crashed = driver.machine.cut(Survival::None, &mut rng);
    let machine = Machine::after(base.shape(), crashed, driver.machine.now_ns());
    Driver::recover(machine, &driver.oracle)?.machine.fsck()
}

/// Two directories are each moved into the other, at once: one of them must be refused, or
/// neither can be reached.
fn crossing(base: &Base, order: u64) -> Result<(), String> {
    let machine = base.machine(1);
    let outcome = sched::run("crossing moves", order, &machine.clock, || {
        let fs = machine.open()?;
        let dir = |name: &[u8]| Ok::<_, fs::Error>(fs.lookup(ROOT, name)?.ino);
        let (a, b) = (dir(b"A")?, dir(b"B")?);
        let moves = thread::parallel(2, |task| {
            let (name, into) = match task {
                0 => (b"A", b),
                _ => (b"B", a),
            };
            fs.rename(&Caller::root(), ROOT, name, into, name, 0)
        });
        fs.close()?;
        Ok::<_, fs::Error>(moves)
    });
    let moves = outcome.map_err(|e| e.to_string())?;
    let made = moves.iter().filter(|moved| moved.is_ok()).count();
    if made != 1 {
        return Err(format!("directories moved into each other: {moves:?}"));
    }
    machine.fsck()
}

/// Sequences with atomic writes, cut at every I/O.
fn atomic_writes(_: &Ground, seed: u64) -> Result<(), Failure> {
    atomics::explored(seed)
}

fn steps(text: &str) -> Result<Vec<Step>, Failure> {
    let parts = text.split(';').map(str::trim).filter(|p| !p.is_empty());
    let steps = parts.map(str::parse).collect::<Result<_, String>>();
    steps.map_err(|what| failure(what, Vec::new()))
}

fn try_steps(setting: &Setting, text: &str, seen: &Seen) -> Result<(), Failure> {
    match run_steps(setting, steps(text)?, seen).failure {
        None => Ok(()),
        Some(found) => Err(failure(found.what, vec![text.to_owned()])),
    }
}

/// Bits of the journal rot, in any of many batches.
fn rot(ground: &Ground, seed: u64) -> Result<(), Failure> {
    let mut setting = Setting::with(seed, Trouble::Rot);
    setting.shape = Shape::small(1 + seed % 3);
    setting.calm = true;
    let mut text = String::from("mkdir d; sync;");
    for i in 0..12 {
        text.push_str(&format!(
            "create d/f{i}; sync; chmod d/f{i} {}; sync;",
            0o600 + i
        ));
    }
    text.push_str(&format!("rot-journal 0 {}", seed >> 16));
    try_steps(&setting, &text, &ground.seen)
}

/// Devices fail at what a fsync needs; a handle that was told so must be told again. What a sync could not write has its blocks when they work again, and no others.
fn failing(ground: &Ground, seed: u64) -> Result<(), Failure> {
    let mut setting = Setting::with(seed, Trouble::Errors);
    setting.shape = Shape::small(1);
    for fault in ["fail-flushes", "fail-writes", "fail-journal-writes"] {
        for sync in ["fsync", "fdatasync"] {
            for before in ["fdatasync f", "chmod f 384"] {
                let text = format!(
                    "create f; write f 0 9000 1; sync; hold f; write f 0 4096 2; fdatasync f; \
                     write f 4096 4096 3; {before}; write f 0 4096 4; {fault} 0 1; {sync} f; \
                     {sync} f; {sync} f; recover {}",
                    seed >> 16
                );
                try_steps(&setting, &text, &ground.seen)?;
            }
        }
    }
    for fault in ["fail-data-writes", "fail-writes"] {
        let text = format!(
            "create f; write f 0 60000 1; {fault} 0 1; sync; heal 0 0; sync; recover {}",
            seed >> 16
        );
        try_steps(&setting, &text, &ground.seen)?;
    }
    Ok(())
}

/// A flush fails in the background for a file that nobody has open: whoever syncs next is told.
fn untold(seed: u64) -> Result<(), String> {
    let text = |error: fs::Error| error.to_string();
    let mut shape = Shape::small(1);
    // No record of its times comes along with what is overwritten.
    shape.options.data.mtime_persist = Duration::from_secs(3600);
    let machine = Machine::new(&Image::format(&shape)?, seed);
    let fs = machine.open().map_err(text)?;
    let made = fs.create(&Caller::root(), ROOT, b"f", 0o644, libc::O_RDWR);
    let (_, file) = made.map_err(text)?;
    fs.write(&file, 0, &[1; 9000]).map_err(text)?;
    fs.sync().map_err(text)?;
    fs.write(&file, 0, &[2; 9000]).map_err(text)?;
    drop(file);
    machine.advance(6000);
    machine.devices[0].fail_flushes(Times::Next(1));
    if fs.tick().is_ok() {
        return Err("a flush that fails is no error".into());
    }
    match fs.sync() {
        Err(_) => Ok(()),
        Ok(()) => Err("a sync succeeds after a flush may have lost what it covers".into()),
    }
}

/// A nearly full array, where freed blocks are wanted again at once.
fn full(ground: &Ground, seed: u64) -> Result<(), Failure> {
    let setting = Setting::with(seed, Trouble::Full);
    let generator = Generator::new(seed, &setting);
    let ran = random::run(&setting, Source::Made(Box::new(generator)), &ground.seen);
    match ran.failure {
        None => Ok(()),
        Some(found) => {
            // With a canary planted nobody wants to know.
            let steps = match ground.canary {
                Some(_) => ran.steps,
                None => random::shrink(&setting, ran.steps, SHRINK_TRIES),
            };
            let text: Vec<String> = steps.iter().map(Step::to_string).collect();
            Err(failure(found.what, vec![text.join("; ")]))
        }
    }
}

const SHRINK_TRIES: u32 = 600;

/// More is logged than the ring holds, by changes of one file.
fn flood(ground: &Ground, seed: u64) -> Result<(), Failure> {
    let mut setting = Setting::with(seed, Trouble::None);
    setting.shape = Shape::small(1);
    setting.shape.logical_block = 4096;
    setting.calm = true;
    let mut text = String::from("create f; sync;");
    for i in 0..1100 {
        text.push_str(&format!("chmod f {}; fsync f;", 384 + i % 64));
    }
    text.push_str(&format!("recover {}", seed >> 16));
    try_steps(&setting, &text, &ground.seen)
}
