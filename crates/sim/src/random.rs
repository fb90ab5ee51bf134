//! Long random runs of one thread: small journals and caches, full disks, faults, power cuts.
//!
//! A run is a list of steps. Whatever is random in a step is written down in it, so that a list
//! can be run again, and made shorter.

mod generator;

pub use generator::Generator;

use crate::drive::{Driver, Stop};
use crate::explore::{Failure, Seen};
use crate::faults::Fault;
use crate::lies::{Judged, Lies};
use crate::look::{self, Amiss};
use crate::op::Op;
use crate::oracle::Oracle;
use crate::run::guarded;
use crate::setting::{Setting, Trouble};
use crate::unreadable;
use crate::world::{Image, Machine};
use base::rng::Rng;
use device::sim::{Survival, Times};
use fs::{Caller, FileSystem, ROOT};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Op(Op),
    /// The power goes during the I/O after so many more.
    CutAfter(u64),
    /// The power goes if it has not yet, comes back, and the file system with it; the number
    /// decides what survives and where recovery is cut.
    Recover(u64),
    /// Looks at what a cut within the next operation would leave, and goes on.
    Probe(u64),
    /// Looks at all that there is, with what is in caches and what is not.
    Verify,
    /// On a device, this often (0: always), or as the fault says.
    Fault(Fault, u64, u64),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Op(op) => op.fmt(f),
            Step::CutAfter(ios) => write!(f, "cut-after {ios}"),
            Step::Recover(seed) => write!(f, "recover {seed}"),
            Step::Probe(seed) => write!(f, "probe {seed}"),
            Step::Verify => f.write_str("verify"),
            Step::Fault(fault, device, times) => {
                write!(f, "{fault} {device} {times}")
            }
        }
    }
}

impl FromStr for Step {
    type Err = String;

    fn from_str(text: &str) -> Result<Step, String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let number = |i: usize| -> Result<u64, String> {
            let word: Option<&&str> = words.get(i);
            word.and_then(|w| w.parse().ok())
                .ok_or_else(|| format!("a number is missing in {text:?}"))
        };
        let verb = words.first().copied().unwrap_or_default();
        if let Some(fault) = Fault::from_name(verb) {
            return Ok(Step::Fault(fault, number(1)?, number(2)?));
        }
        match verb {
            "cut-after" => Ok(Step::CutAfter(number(1)?)),
            "recover" => Ok(Step::Recover(number(1)?)),
            "probe" => Ok(Step::Probe(number(1)?)),
            "verify" => Ok(Step::Verify),
            _ => text.parse().map(Step::Op),
        }
    }
}

/// A run: where its steps come from, and what has come of them.
struct Run<'a> {
    setting: Setting,
    seen: &'a Seen,
    driver: Option<Driver>,
    /// The power cut that a fault or the switch has made necessary.
    halted: bool,
    /// What was known before each of the last syncs, for damage that may have hit their batch;
    /// a sync that finds nothing new writes none.
    earlier: Vec<Oracle>,
    lies: Lies,
    probe: Option<u64>,
}

/// Where steps come from.
pub enum Source {
    Made(Box<Generator>),
    Listed(std::vec::IntoIter<Step>),
}

/// What a run did.
#[derive(Clone, Debug, Default)]
pub struct Ran {
    pub steps: Vec<Step>,
    pub failure: Option<Failure>,
    /// A hash of everything that the devices were asked for.
    pub trace: u64,
}

/// Runs the steps of a source.
pub fn run(setting: &Setting, mut source: Source, seen: &Seen) -> Ran {
    let mut ran = Ran::default();
    let Ran { steps, trace, .. } = &mut ran;
    let outcome = guarded(|| {
        let mut run = Run::start(setting, seen).map_err(plain)?;
        loop {
            let step = match &mut source {
                Source::Made(generator) => {
                    let driver = run.driver.as_ref().expect("between steps there is one");
                    let devices = driver.machine.devices.len() as u64;
                    generator.next(&driver.oracle, devices)
                }
                Source::Listed(list) => list.next(),
            };
            let Some(step) = step else {
                break;
            };
            steps.push(step.clone());
            let done = run.step(&step);
            let hash = run.trace();
            *trace = trace.rotate_left(7) ^ hash;
            match done {
                Ok(true) => {}
                Ok(false) => break,
                Err(what) => return Err(plain(what)),
            }
        }
        Ok(())
    });
    ran.failure = outcome.err();
    ran
}

fn plain(what: String) -> Failure {
    Failure {
        what,
        trail: Vec::new(),
    }
}

impl<'a> Run<'a> {
    fn start(setting: &Setting, seen: &'a Seen) -> Result<Run<'a>, String> {
        let image = Image::format(&setting.shape)?;
        let machine = Machine::new(&image, 7);
        let mut driver = Driver::fresh(machine, setting.calm)?;
        driver.faulty = setting.trouble.has_errors() || setting.trouble == Trouble::Lies;
        if setting.trouble.is_full() {
            fill(driver.fs(), setting.room).map_err(|e| format!("filling: {e}"))?;
            driver.learn_top()?;
        }
        Ok(Run {
            setting: setting.clone(),
            seen,
            driver: Some(driver),
            halted: false,
            earlier: Vec::new(),
            lies: Lies::default(),
            probe: None,
        })
    }

    fn driver(&mut self) -> &mut Driver {
        self.driver.as_mut().expect("between steps there is one")
    }

    fn trace(&self) -> u64 {
        let devices = self.driver.iter().flat_map(|d| &d.machine.devices);
        devices.fold(0, |hash, d| hash.rotate_left(9) ^ d.trace_hash())
    }

    /// False when the run has come to a good end.
    fn step(&mut self, step: &Step) -> Result<bool, String> {
        if self.halted && !matches!(step, Step::Recover(_) | Step::Fault(Fault::RotJournal, ..)) {
            return Ok(true);
        }
        match step {
            Step::Op(op) => return self.op(op),
            Step::CutAfter(ios) => self.driver().machine.switch.cut_after(*ios),
            Step::Probe(seed) => self.probe = Some(*seed),
            Step::Verify => return self.verify(),
            Step::Fault(Fault::RotJournal, _, seed) => return self.rot(*seed),
            Step::Fault(Fault::Heal, ..) if self.setting.trouble == Trouble::FullErrors => {
                return self.heal();
            }
            Step::Fault(fault, device, times) => {
                let machine = &self.driver().machine;
                fault.inject(machine, *device, *times, Some(&machine.clock));
            }
            Step::Recover(seed) => return self.recover(*seed),
        }
        Ok(true)
    }

    fn op(&mut self, op: &Op) -> Result<bool, String> {
        let probe = self.probe.take();
        let lies = self.setting.trouble == Trouble::Lies;
        let before = lies || self.setting.trouble == Trouble::Rot;
        let earlier = before.then(|| self.driver().oracle.clone());
        let driver = self.driver.as_mut().expect("between steps there is one");
        let batches = driver.batches();
        driver.machine.tap.collect(probe.is_some());
        let expected = driver.begin(op);
        let result = driver.perform(op, expected.as_ref().ok());
        driver.machine.tap.collect(false);
        if let Some(seed) = probe {
            self.look_into(seed)?;
        }
        let driver = self.driver();
        // Its batch may have been cut off, or never written.
        let failed = result.is_err();
        match driver.end(op, expected, result) {
            Ok(()) => {}
            Err(Stop::Environment(_)) => self.halted = true,
            Err(Stop::Violation(what)) => return Err(what),
        }
        let wrote = self.driver().batches() != batches;
        if lies && let Some(before) = earlier {
            self.note_lies(wrote.then_some((before, failed)));
        } else if wrote {
            self.earlier.extend(earlier);
            let drop = self.earlier.len().saturating_sub(LAST_BATCHES);
            self.earlier.drain(..drop);
        }
        if *op == Op::Remount && !self.halted {
            // Nothing is in a cache now.
            return self.verify();
        }
        Ok(true)
    }

    /// All devices work again. What has been accepted and could not be written has its room still, however full the array is.
    fn heal(&mut self) -> Result<bool, String> {
        for device in &self.driver().machine.devices {
            device.heal();
        }
        // What failed is told once.
        if !self.op(&Op::Sync)? || self.halted {
            return Ok(true);
        }
        let driver = self.driver();
        let fs = driver.fs();
        match fs.sync() {
            Err(error) if !driver.machine.switch.is_cut() && fs.store().failed().is_none() => {
                Err(format!("on devices that work again a sync fails: {error}"))
            }
            _ => Ok(true),
        }
    }

    /// Takes note of what devices have lied about since the last time.
    fn note_lies(&mut self, wrote: Option<(Oracle, bool)>) {
        let driver = self.driver.as_ref().expect("between steps there is one");
        let (machine, fs) = (&driver.machine, driver.opened());
        let fs = fs.map(|fs| &**fs);
        self.lies.after(machine, fs, driver.inos(), wrote);
    }

    /// Compares everything with the newest state of the model; injected faults are no excuse for
    /// anything else that is shown, but one for errors.
    fn verify(&mut self) -> Result<bool, String> {
        if self.lies.ever() {
            return self.compare();
        }
        let outcome = self.driver().verify_now();
        if self.driver().machine.switch.is_cut() {
            self.halted = true;
            return Ok(true);
        }
        match outcome {
            Err(Amiss::Failed(_)) if self.setting.trouble.has_errors() => Ok(true),
            Err(amiss) => Err(amiss.to_string()),
            Ok(()) => Ok(true),
        }
    }

    /// Compares everything with what may be there after lies.
    fn compare(&mut self) -> Result<bool, String> {
        let driver = self.driver.as_ref().expect("between steps there is one");
        let found = match look::look_below(driver.fs(), ROOT) {
            Ok(found) => found,
            Err(_) => {
                self.halted = true;
                return Ok(true);
            }
        };
        let (machine, oracle) = (&driver.machine, &driver.oracle);
        match self.lies.judge(machine, driver.fs(), &found, oracle)? {
            Judged::Right(..) => Ok(true),
            Judged::Shorter => Ok(false),
        }
    }

    /// Cuts the power of copies of the machine at some of the moments that the tap has seen.
    fn look_into(&mut self, seed: u64) -> Result<(), String> {
        let driver = self.driver.as_ref().expect("between steps there is one");
        let points = driver.machine.tap.take();
        let mut rng = Rng::new(seed);
        for _ in 0..points.len().min(3) {
            let point = rng.pick(&points);
            let class = *rng.pick(&SURVIVALS);
            let crashed = point.crash(class, &mut rng);
            self.seen.count(crashed.hash);
            let machine = Machine::after(&self.setting.shape, crashed, driver.machine.now_ns());
            let copy = Driver::recover(machine, &driver.oracle)
                .map_err(|what| format!("probe, {class:?}: {what}"))?;
            copy.machine
                .fsck()
                .map_err(|what| format!("probe, {class:?}: {what}"))?;
        }
        Ok(())
    }

    /// False: what devices have lied about is noticed, or cannot be, and there is no more to do.
    fn recover(&mut self, seed: u64) -> Result<bool, String> {
        let mut rng = Rng::new(seed);
        if self.setting.trouble == Trouble::Lies {
            // Bits may have rotted after the last operation.
            self.note_lies(None);
        }
        let driver = self.driver.take().expect("between steps there is one");
        let (oracle, faulty) = (driver.oracle.clone(), driver.faulty);
        let mut machine = driver.stop();
        // Where they harm nobody they are no excuse.
        let lies = self.lies.ever() && !self.lies.are_harmless(machine.devices.len());
        loop {
            let now_ns = machine.now_ns();
            let crashed = machine.cut(*rng.pick(&SURVIVALS), &mut rng);
            self.seen.count(crashed.hash);
            let next = Machine::after(&self.setting.shape, crashed, now_ns);
            if self.setting.trouble == Trouble::Lies && rng.one_in(3) {
                self.lies.rot_end(&next, &mut rng);
            }
            match next.fsck() {
                Err(_) if lies => return Ok(false),
                sound => sound?,
            }
            machine = Arc::new(next);
            if self.setting.trouble.has_errors() && rng.one_in(3) {
                hinder(&machine, &mut rng)?;
                continue;
            }
            if !rng.one_in(3) {
                break;
            }
            // The power goes again while recovery runs.
            machine.switch.cut_after(rng.below(40));
            if let Err(error) = machine.open()
                && !machine.switch.is_cut()
                && !lies
            {
                return Err(format!("recovery: {error}"));
            }
        }
        let opened = machine.open().map_err(|e| format!("recovery: {e}"));
        let (fs, found) = match opened.and_then(|fs| Ok((look::look_below(&fs, ROOT)?, fs))) {
            Err(_) if lies => return Ok(false),
            opened => opened.map(|(found, fs)| (fs, found))?,
        };
        let (oracle, pairs) = match self.lies.judge(&machine, &fs, &found, &oracle)? {
            Judged::Right(oracle, pairs) => (*oracle, pairs),
            Judged::Shorter => return Ok(false),
        };
        let mut driver = Driver::judged(machine, fs, ROOT, &found, oracle, &pairs);
        match driver.machine.fsck() {
            Err(_) if lies => return Ok(false),
            sound => sound?,
        }
        if !self.setting.trouble.is_full() && !self.lies.ever() && rng.one_in(3) {
            unreadable::look(&driver.machine, &self.setting.shape, &found, &mut rng)?;
        }
        if !self.lies.ever() && rng.one_in(3) {
            let (machine, shape) = (&driver.machine, &self.setting.shape);
            unreadable::look_while_a_read_fails(machine, shape, &found, &mut rng)?;
        }
        driver.faulty = faulty;
        self.driver = Some(driver);
        self.halted = false;
        self.earlier.clear();
        self.lies.forget();
        Ok(true)
    }

    /// Bits of the journal rot while the power is off. Either that is noticed, or nothing that
    /// was synced is lost, but for the very last sync: a damaged end of the journal cannot be
    /// told from one that the power cut off. Files that it had deleted are back then, and what
    /// they hold is nobody's promise: their blocks may have been written by others since.
    fn rot(&mut self, seed: u64) -> Result<bool, String> {
        let mut rng = Rng::new(seed);
        let driver = self.driver.take().expect("between steps there is one");
        let oracle = driver.oracle.clone();
        let machine = driver.stop();
        machine.switch.cut_now();
        for _ in 0..ROTTEN {
            let crashed = machine.point().crash(Survival::None, &mut rng);
            self.seen.count(crashed.hash);
            let copy = Machine::after(&self.setting.shape, crashed, machine.now_ns());
            copy.rot_journal(&mut rng);
            let Ok(fs) = copy.open() else {
                continue;
            };
            let copy = Arc::new(copy);
            let found = look::look_below(&fs, ROOT)?;
            let newest = Driver::recovered(Arc::clone(&copy), Arc::clone(&fs), ROOT, &oracle);
            if let Err(what) = newest
                && !self
                    .earlier
                    .iter()
                    .any(|earlier| earlier.allows_names(&found))
            {
                return Err(format!("rot in the journal goes unnoticed: {what}"));
            }
        }
        Ok(false)
    }
}

/// Opens while devices fail or are not there: that works, or is refused, and does no harm.
fn hinder(machine: &Machine, rng: &mut Rng) -> Result<(), String> {
    let devices = machine.devices.len() as u64;
    let device = rng.below(devices) as usize;
    match rng.below(3) {
        0 if devices > 1 => {
            if machine.open_without(device).is_ok() {
                return Err("an array is opened although a device is missing".into());
            }
        }
        1 => machine.devices[device].vanish_after(rng.below(60)),
        _ => {
            let often = *rng.pick(&[Times::Next(1), Times::Next(3), Times::Always]);
            machine.switch.fail_after(rng.below(60), often);
        }
    }
    // An error is as good as none: the power goes next.
    drop(machine.open());
    Ok(())
}

/// Operations that wrote batches of which the newest may rot unnoticed: one, and another whose
/// batch was the last before it was known to be durable.
const LAST_BATCHES: usize = 2;

/// Copies of a machine whose journals rot, each in another place.
const ROTTEN: u32 = 24;

pub const SURVIVALS: [Survival; 6] = [
    Survival::Mixed,
    Survival::Mixed,
    Survival::None,
    Survival::All,
    Survival::Subset,
    Survival::Prefix,
];

/// Leaves little free space, so that freed blocks are wanted again at once.
fn fill(fs: &FileSystem, room: u64) -> Result<(), fs::Error> {
    let (_, file) = fs.create(&Caller::root(), ROOT, b".filler", 0o644, libc::O_RDWR)?;
    let mut at = 0;
    loop {
        let more = fs.statfs().blocks_available.saturating_sub(room);
        if more == 0 {
            break;
        }
        // In pieces, so that what cannot be had is small.
        let take = more.div_ceil(2).min(1000) * 4096;
        match fs.fallocate(&file, libc::FALLOC_FL_KEEP_SIZE, at, take) {
            Ok(()) => at += take,
            Err(fs::Error::NoSpace) => break,
            Err(error) => return Err(error),
        }
    }
    drop(file);
    fs.sync()
}

/// Runs a seed.
pub fn run_seed(seed: u64, seen: &Seen) -> Ran {
    let setting = Setting::of(seed);
    let generator = Generator::new(seed, &setting);
    run(&setting, Source::Made(Box::new(generator)), seen)
}

/// Runs listed steps.
pub fn run_steps(setting: &Setting, steps: Vec<Step>, seen: &Seen) -> Ran {
    run(setting, Source::Listed(steps.into_iter()), seen)
}

/// Makes a failing list of steps shorter, by leaving out what is not needed.
pub fn shrink(setting: &Setting, steps: Vec<Step>, mut tries: u32) -> Vec<Step> {
    let seen = Seen::default();
    let mut best = steps;
    let mut piece = best.len().div_ceil(2);
    while piece > 0 && tries > 0 {
        let mut at = 0;
        while at < best.len() && tries > 0 {
            let mut shorter = best.clone();
            shorter.drain(at..(at + piece).min(best.len()));
            tries -= 1;
            let ran = run_steps(setting, shorter, &seen);
            match ran.failure {
                // What ran is a prefix of what was listed.
                Some(_) => best = ran.steps,
                None => at += piece,
            }
        }
        piece /= 2;
    }
    best
}
