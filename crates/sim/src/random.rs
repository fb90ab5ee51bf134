//! Long random runs of one thread: small journals and caches, full disks, faults, power cuts.
//!
//! A run is a list of steps. Whatever is random in a step is written down in it, so that a list
//! can be run again, and made shorter.

use crate::drive::{Driver, Stop};
use crate::explore::{Failure, Seen};
use crate::faults::Fault;
use crate::lies::{Judged, Lies};
use crate::look;
use crate::op::{Atomic, How, Op};
use crate::oracle::Oracle;
use crate::run::guarded;
use crate::sequences::OLD;
use crate::setting::{Setting, Trouble};
use crate::tree::{Id, Kind, Tree};
use crate::unreadable;
use crate::world::{Image, Machine};
use base::rng::Rng;
use device::sim::{Survival, Times};
use fs::{Caller, FileSystem, ROOT};
use std::collections::BTreeMap;
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
            _ => text.parse().map(Step::Op),
        }
    }
}

/// Makes up steps as a run goes on.
pub struct Generator {
    rng: Rng,
    setting: Setting,
    tag: u64,
    left_in_cycle: u64,
    cycles: u64,
    /// What belongs behind the last operation.
    queued: Vec<Op>,
    /// The files of atomic writes, by their numbers.
    atomic: BTreeMap<u64, String>,
}

impl Generator {
    pub fn new(seed: u64, setting: &Setting) -> Generator {
        Generator {
            rng: Rng::new(seed),
            setting: setting.clone(),
            tag: 1000,
            left_in_cycle: 0,
            cycles: 0,
            queued: Vec::new(),
            atomic: BTreeMap::new(),
        }
    }

    /// The next step, for the state that the model is in; `None` at the end.
    pub fn next(&mut self, oracle: &Oracle, devices: u64) -> Option<Step> {
        let tree = oracle.now();
        let rng = &mut self.rng;
        if self.left_in_cycle == 0 {
            if self.cycles == self.setting.cycles {
                return None;
            }
            self.cycles += 1;
            self.left_in_cycle = 2 + rng.below(2 * self.setting.steps);
            if rng.one_in(2) {
                return Some(Step::CutAfter(rng.below(self.setting.steps * 2)));
            }
        }
        self.left_in_cycle -= 1;
        if self.left_in_cycle == 0 {
            self.atomic.clear();
            return Some(Step::Recover(rng.next_u64() >> 16));
        }
        if self.setting.trouble == Trouble::Rot && self.left_in_cycle == 1 {
            return Some(Step::Fault(Fault::RotJournal, 0, rng.next_u64() >> 16));
        }
        if let Some(step) = fault(rng, &self.setting, devices) {
            return Some(step);
        }
        if self.setting.trouble != Trouble::Lies && rng.one_in(12) {
            return Some(Step::Probe(rng.next_u64() >> 16));
        }
        if let Some(op) = self.queued.pop() {
            return Some(Step::Op(op));
        }
        if self.rng.one_in(8) {
            return Some(Step::Op(self.transaction(tree)));
        }
        if self.rng.one_in(8) {
            return Some(Step::Op(self.atomic_write(tree)));
        }
        let orphans = oracle.orphans();
        if !orphans.is_empty() && self.rng.one_in(5) {
            let orphan = *self.rng.pick(&orphans);
            return Some(Step::Op(self.without_name(orphan)));
        }
        let op = self.op(tree);
        if op == Op::Remount {
            self.atomic.clear();
        }
        if let Op::Hold(path) = &op
            && self.rng.one_in(2)
        {
            self.queued.push(Op::Unlink(path.clone()));
        }
        if let Op::Write { path, .. } = &op
            && self.rng.one_in(4)
        {
            let path = path.clone();
            self.log_to(&path);
        } else if let Op::Write { path, .. } = &op
            && self.rng.one_in(3)
        {
            // Written, synced, and written once more, as databases do.
            let sync = match self.rng.one_in(2) {
                true => Op::Fsync(path.clone()),
                false => Op::Fdatasync(path.clone()),
            };
            if self.rng.one_in(2) {
                self.queued.push(sync.clone());
                self.tag += 1;
                self.queued.push(crate::sequences::tagged(&op, self.tag));
            }
            self.queued.push(sync);
        }
        Some(Step::Op(op))
    }

    /// Queues what programs do with their logs: small writes at the end, some of them over what is there, each synced.
    fn log_to(&mut self, path: &str) {
        for _ in 0..1 + self.rng.below(12) {
            let rng = &mut self.rng;
            let op = match rng.below(12) {
                0 => Op::Tick(rng.below(8000)),
                1 => Op::Checkpoint,
                2 => Op::Truncate(path.to_owned(), rng.below(9000)),
                kind => {
                    self.tag += 1;
                    self.queued.push(match rng.one_in(6) {
                        true => Op::Fsync(path.to_owned()),
                        false => Op::Fdatasync(path.to_owned()),
                    });
                    Op::Write {
                        path: path.to_owned(),
                        at: (kind == 3).then(|| rng.below(9000)),
                        len: 1 + rng.below(*rng.clone().pick(&[60, 600, 2500])),
                        tag: self.tag,
                        how: How::Buffered,
                    }
                }
            };
            self.queued.push(op);
        }
    }

    fn new_name(&mut self, dir: &str) -> String {
        let i = self.rng.below(self.setting.names);
        // Some names are long, so that buckets fill.
        let name = format!(
            "n{i}{}",
            "x".repeat((i * 53 % 120) as usize * (i % 3 == 2) as usize)
        );
        match dir {
            "" => name,
            dir => format!("{dir}/{name}"),
        }
    }

    /// A few operations that are one step, each of which makes sense after those before it, mostly.
    fn transaction(&mut self, tree: &Tree) -> Op {
        let mut tree = tree.clone();
        let mut ops = Vec::new();
        for _ in 0..1 + self.rng.below(8) {
            let mut op = self.op(&tree);
            if let Op::Write { how, .. } = &mut op {
                *how = How::Buffered;
            }
            let staged = matches!(
                op,
                Op::Create(_)
                    | Op::Mkdir(_)
                    | Op::Symlink(_)
                    | Op::Link(..)
                    | Op::Rename(..)
                    | Op::Unlink(_)
                    | Op::Rmdir(_)
                    | Op::Chmod(..)
                    | Op::Chown(..)
                    | Op::SetTime(..)
                    | Op::SetXattr { .. }
                    | Op::RemoveXattr(..)
                    | Op::Write { .. }
                    | Op::Rewrite { .. }
                    | Op::Truncate(..)
            );
            if staged && (tree.apply(&op).is_ok() || self.rng.one_in(10)) {
                ops.push(op);
            }
        }
        if ops.is_empty() {
            return Op::Sync;
        }
        Op::Tx {
            durable: !self.rng.one_in(3),
            ops,
        }
    }

    /// A step of an atomic write, and mostly some more behind it, and others of its file.
    fn atomic_write(&mut self, tree: &Tree) -> Op {
        let number = self.rng.below(ATOMIC_WRITES);
        let Some(path) = self.atomic.get(&number).cloned() else {
            let paths = tree.paths().into_iter();
            let files = paths.filter(|(_, id)| tree.at(*id).kind == Kind::File);
            let files: Vec<String> = files.map(|(path, _)| path).collect();
            let path = match files.is_empty() {
                true => "nothing".to_owned(),
                false => self.rng.pick(&files).clone(),
            };
            self.atomic.insert(number, path.clone());
            return Op::Atomic {
                number,
                step: Atomic::Start(path),
            };
        };
        for _ in 0..self.rng.below(4) {
            let op = match self.rng.below(4) {
                0 => self.beside(&path),
                _ => Op::Atomic {
                    number,
                    step: self.staged(),
                },
            };
            self.queued.push(op);
        }
        let step = match self.rng.below(6) {
            0 | 1 => Atomic::Commit,
            2 if self.rng.one_in(2) => Atomic::Drop,
            _ => self.staged(),
        };
        if matches!(step, Atomic::Commit | Atomic::Drop) {
            // What is queued comes before it.
            self.atomic.remove(&number);
            self.queued.insert(0, Op::Atomic { number, step });
            return self.queued.pop().expect("it has just been queued");
        }
        Op::Atomic { number, step }
    }

    fn staged(&mut self) -> Atomic {
        self.tag += 1;
        let rng = &mut self.rng;
        let largest = *rng.pick(&[100, 5000, self.setting.largest]);
        match rng.below(6) {
            0 => Atomic::Truncate(rng.below(*rng.clone().pick(&[1, 5000, 70_000]))),
            1 => Atomic::Write {
                at: Some(4096 * rng.below(8)),
                len: 4096 * (1 + rng.below(3)),
                tag: self.tag,
            },
            kind => Atomic::Write {
                at: (kind > 2).then(|| rng.below(largest + 1)),
                len: 1 + rng.below(largest),
                tag: self.tag,
            },
        }
    }

    /// An operation on a file that has an atomic write.
    fn beside(&mut self, path: &str) -> Op {
        self.tag += 1;
        let (rng, path) = (&mut self.rng, path.to_owned());
        match rng.below(8) {
            0 => Op::Truncate(path, rng.below(9000)),
            1 => Op::Fsync(path),
            2 => Op::Unlink(path),
            3 => Op::Checkpoint,
            4 => Op::Rename(path, self.new_name(""), 0),
            _ => Op::Write {
                path,
                at: (!rng.one_in(3)).then(|| rng.below(9000)),
                len: 1 + rng.below(5000),
                tag: self.tag,
                how: How::Buffered,
            },
        }
    }

    /// An operation on a file that is held and has no name.
    fn without_name(&mut self, orphan: Id) -> Op {
        self.tag += 1;
        let (rng, path) = (&mut self.rng, format!("@{orphan}"));
        let largest = *rng.pick(&[100, 5000, self.setting.largest]);
        match rng.below(12) {
            0 => Op::Release(path),
            1 | 2 => Op::Fsync(path),
            3 => Op::Fdatasync(path),
            4 => Op::Truncate(path, rng.below(*rng.clone().pick(&[1, 5000, 70_000]))),
            5 => Op::Fallocate {
                path,
                mode: *rng.pick(&[0, 1, libc::FALLOC_FL_PUNCH_HOLE | 1]),
                at: rng.below(30_000),
                len: 1 + rng.below(30_000),
            },
            _ => Op::Write {
                path,
                at: (!rng.one_in(3)).then(|| rng.below(largest + 1)),
                len: 1 + rng.below(largest),
                tag: self.tag,
                how: How::Buffered,
            },
        }
    }

    /// An operation that makes sense for the tree, mostly.
    pub fn op(&mut self, tree: &Tree) -> Op {
        self.tag += 1;
        let tag = self.tag;
        let paths = tree.paths();
        let of = |kind: fn(&Kind) -> bool| -> Vec<&String> {
            let all = paths.iter();
            all.filter(|(_, id)| kind(&tree.at(*id).kind))
                .map(|(path, _)| path)
                .collect()
        };
        let files = of(|k| *k == Kind::File);
        let root = String::new();
        let mut dirs = of(|k| *k == Kind::Dir);
        dirs.push(&root);
        let dir = match self.rng.one_in(3) {
            true => root.clone(),
            false => (*self.rng.pick(&dirs)).clone(),
        };
        let fresh = self.new_name(&dir);
        let any = |rng: &mut Rng| match paths.is_empty() {
            true => "nothing".to_owned(),
            false => rng.pick(&paths).0.clone(),
        };
        let file = |rng: &mut Rng| match files.is_empty() {
            true => "nothing".to_owned(),
            false => (*rng.pick(&files)).clone(),
        };
        let rng = &mut self.rng;
        match rng.below(63) {
            0..=6 => Op::Create(fresh),
            7 => Op::Mkdir(fresh),
            8 if tag.is_multiple_of(2) => Op::Symlink(fresh),
            8 => {
                let (kind, rdev) = SPECIAL[(tag / 2) as usize % SPECIAL.len()];
                Op::Mknod(fresh, kind | 0o644, rdev)
            }
            9 => Op::Link(file(rng), fresh),
            10..=12 => Op::Rename(any(rng), fresh, 0),
            13..=15 => Op::Rename(file(rng), file(rng), 0),
            16 => Op::Rename(any(rng), any(rng), *rng.pick(&[0, 1, 2])),
            17..=19 => Op::Unlink(file(rng)),
            20 => Op::Unlink(any(rng)),
            21 => Op::Rmdir(any(rng)),
            22 => Op::Chmod(any(rng), 0o600 + rng.below(0o177) as u32),
            23 => {
                let (path, owners) = (any(rng), rng.below(9) as u32);
                Op::Chown(path, owners % 3, owners / 3)
            }
            24..=25 => Op::SetXattr {
                path: any(rng),
                name: format!("user.{}", rng.below(3)),
                len: rng.below(*rng.clone().pick(&[20, 600, 6000])) + 1,
                tag,
            },
            26 => Op::RemoveXattr(any(rng), format!("user.{}", rng.below(3))),
            27..=40 => {
                let largest = *rng.pick(&[100, 3000, self.setting.largest]);
                let (len, how) = match rng.below(8) {
                    0 => (4096 * (1 + rng.below(4)), How::Direct),
                    1 => (1 + rng.below(largest), How::Synced),
                    _ => (1 + rng.below(largest), How::Buffered),
                };
                let at = match rng.below(4) {
                    0 => Some(0),
                    1 => None,
                    _ if how == How::Direct => Some(4096 * rng.below(8)),
                    _ => Some(rng.below(largest + 1)),
                };
                Op::Write {
                    path: file(rng),
                    at,
                    len,
                    tag,
                    how,
                }
            }
            41..=42 => Op::Rewrite {
                path: file(rng),
                len: 1 + rng.below(self.setting.largest),
                tag,
            },
            43..=44 => Op::Truncate(file(rng), rng.below(*rng.clone().pick(&[1, 5000, 70_000]))),
            45 => {
                let (punch, zero) = (libc::FALLOC_FL_PUNCH_HOLE | 1, libc::FALLOC_FL_ZERO_RANGE);
                Op::Fallocate {
                    path: file(rng),
                    mode: *rng.pick(&[0, 1, punch, zero, zero | 1]),
                    at: rng.below(30_000),
                    len: 1 + rng.below(30_000),
                }
            }
            46 => Op::TmpLink {
                path: fresh,
                len: 1 + rng.below(9000),
                tag,
            },
            47 => Op::Hold(file(rng)),
            48 => Op::Release(file(rng)),
            49..=51 => Op::Fsync(any(rng)),
            52 => Op::Fdatasync(file(rng)),
            53 => Op::Fsync(dir),
            54..=55 => Op::Sync,
            56 => Op::Checkpoint,
            57 if rng.one_in(3) => Op::Remount,
            58 => {
                // Before everything: later than now is no time that a model of stamps can tell.
                let old = OLD + rng.below(OLD / 2);
                Op::SetTime(any(rng), (!rng.one_in(3)).then_some(old))
            }
            59..=60 => Op::WriteRange {
                path: file(rng),
                at: rng.below(30_000),
                len: rng.below(*rng.clone().pick(&[2, 5000, 60_000])),
            },
            _ => Op::Tick(rng.below(8000)),
        }
    }
}

/// A fault, now and then, of the kind that the run is in.
fn fault(rng: &mut Rng, setting: &Setting, devices: u64) -> Option<Step> {
    let (rarely, faults): (u64, &[Fault]) = match setting.trouble {
        Trouble::Errors => (25, &ERRORS),
        Trouble::FullErrors => (25, &ERRORS_OF_DATA),
        // Few, so that not all of them are found out at once.
        Trouble::Lies => (setting.steps, &LIES),
        Trouble::Slow => (25, &[Fault::Slow, Fault::Slow, Fault::Stall]),
        Trouble::None | Trouble::Full | Trouble::Rot => return None,
    };
    if !rng.one_in(rarely) {
        return None;
    }
    let fault = *rng.pick(faults);
    let times = match fault {
        Fault::Slow => *rng.pick(&[0, 1, 30, 700]),
        Fault::Stall => *rng.pick(&[2000, 40_000, 600_000]),
        Fault::Rot | Fault::RotEnd => rng.next_u64() >> 16,
        Fault::Misdirect => rng.range(1, 3),
        _ => *rng.pick(&[0, 1, 1, 1, 2]),
    };
    Some(Step::Fault(fault, rng.below(devices), times))
}

/// Atomic writes at a time, at most.
const ATOMIC_WRITES: u64 = 3;

/// What is no file, directory or link, with a device number where it has one.
const SPECIAL: [(u32, u32); 4] = [
    (libc::S_IFCHR, 0x103),
    (libc::S_IFBLK, 0xFFF0_1234),
    (libc::S_IFIFO, 0),
    (libc::S_IFSOCK, 0),
];

const ERRORS: [Fault; 8] = [
    Fault::Reads,
    Fault::Writes,
    Fault::Writes,
    Fault::Journal,
    Fault::Flushes,
    Fault::Flushes,
    Fault::Vanish,
    Fault::Heal,
];

/// Mostly such as a file system goes on after.
const ERRORS_OF_DATA: [Fault; 8] = [
    Fault::Reads,
    Fault::Writes,
    Fault::Data,
    Fault::Data,
    Fault::Data,
    Fault::Flushes,
    Fault::Heal,
    Fault::Heal,
];

const LIES: [Fault; 8] = [
    Fault::Lose,
    Fault::LoseJournal,
    Fault::Misdirect,
    Fault::Misdirect,
    Fault::Rot,
    Fault::RotEnd,
    Fault::RotEnd,
    Fault::Heal,
];

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
        driver.trouble = !matches!(setting.trouble, Trouble::None | Trouble::Slow);
        driver.faulty = driver.trouble && setting.trouble != Trouble::Full;
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
        if *op == Op::Remount && !self.halted && !self.driver().given_up {
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
    /// other contents, but one for errors.
    fn verify(&mut self) -> Result<bool, String> {
        if self.lies.ever() {
            return self.compare();
        }
        let outcome = self.driver().verify_now();
        let no_power = self.driver().machine.switch.is_cut();
        match outcome {
            Err(_) if no_power || self.setting.trouble.has_errors() => {
                self.halted = true;
                Ok(true)
            }
            other => other.map(|()| true),
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
        let (oracle, trouble) = (driver.oracle.clone(), (driver.trouble, driver.faulty));
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
        (driver.trouble, driver.faulty) = trouble;
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
