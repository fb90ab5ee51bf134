//! Makes up the steps of random runs.

use super::Step;
use crate::faults::Fault;
use crate::op::{Atomic, How, Op};
use crate::oracle::Oracle;
use crate::sequences::OLD;
use crate::setting::{Setting, Trouble};
use crate::tree::{Id, Kind, Tree};
use base::rng::Rng;
use std::collections::BTreeMap;

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
    /// Decides when all is looked at, and nothing else: without these steps a run has the same ones.
    looks: Rng,
    /// Operations between two looks, on average; 0: none is looked at.
    look_every: u64,
    /// The last step, if more than that is to be known of it.
    last: Option<Step>,
}

impl Generator {
    pub fn new(seed: u64, setting: &Setting) -> Generator {
        let mut looks = Rng::new(seed ^ 0x0F00_100C);
        Generator {
            rng: Rng::new(seed),
            setting: setting.clone(),
            tag: 1000,
            left_in_cycle: 0,
            cycles: 0,
            queued: Vec::new(),
            atomic: BTreeMap::new(),
            look_every: match looks.one_in(LOOKING) {
                true => LOOK_EVERY,
                false => 0,
            },
            looks,
            last: None,
        }
    }

    /// The next step, for the state that the model is in; `None` at the end.
    pub fn next(&mut self, oracle: &Oracle, devices: u64) -> Option<Step> {
        let step = match self.is_look_due() {
            true => Some(Step::Verify),
            false => self.next_change(oracle, devices),
        };
        self.last.clone_from(&step);
        step
    }

    /// Whether to look at all that there is: now and then, before the power goes at last, and while reads fail.
    fn is_look_due(&mut self) -> bool {
        // What lies have changed is judged when all is over.
        if self.setting.trouble == Trouble::Lies {
            return false;
        }
        match &self.last {
            None | Some(Step::Verify | Step::Probe(_) | Step::Recover(_)) => false,
            Some(Step::Fault(Fault::Reads, ..)) => self.looks.one_in(2),
            Some(_) if self.left_in_cycle == 1 => self.looks.one_in(2),
            Some(_) => self.look_every > 0 && self.looks.one_in(self.look_every),
        }
    }

    fn next_change(&mut self, oracle: &Oracle, devices: u64) -> Option<Step> {
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

/// One run in so many is looked at now and then.
const LOOKING: u64 = 4;
/// Steps between two looks in such a run, on average.
const LOOK_EVERY: u64 = 30;

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
