//! The full set of operations over a few names, and every short sequence of them: the method of
//! ACE (Mohan et al., OSDI 2018), whose finding is that crash bugs need three operations at most.

use crate::atomics;
use crate::op::{Atomic, How, Op};
use base::rng::Rng;

/// What exists, durably, before a sequence begins.
pub fn set_up() -> Vec<Op> {
    let mut tags = 1..;
    let mut tag = || tags.next().unwrap_or(0);
    vec![
        Op::Mkdir("A".into()),
        Op::Mkdir("B".into()),
        Op::Create("A/foo".into()),
        write("A/foo", Some(0), 9000, tag()),
        Op::Create("A/bar".into()),
        write("A/bar", Some(0), 300, tag()),
        xattr("A/foo", "user.old", 20, tag()),
        Op::Sync,
    ]
}

fn write(path: &str, at: Option<u64>, len: u64, tag: u64) -> Op {
    Op::Write {
        path: path.into(),
        at,
        len,
        tag,
        how: How::Buffered,
    }
}

fn xattr(path: &str, name: &str, len: u64, tag: u64) -> Op {
    Op::SetXattr {
        path: path.into(),
        name: name.into(),
        len,
        tag,
    }
}

/// Every operation that sequences are made of. Tags differ by place in this list; a sequence
/// gives each its own.
pub fn full_set() -> Vec<Op> {
    let mut set = Vec::new();
    names(&mut set);
    contents(&mut set);
    attributes(&mut set);
    syncs(&mut set);
    transactions(&mut set);
    set
}

/// One or a few operations that a crash leaves together.
fn transactions(set: &mut Vec<Op>) {
    let all = [
        "tx write A/foo 0 100 1",
        "tx write A/foo 4096 8192 1 + write A/bar 10 20 2",
        "tx write A/foo 1000 20000 1 + write A/bar end 9000 2",
        "tx-relaxed write A/foo end 5000 1 + chmod A/bar 448",
        "tx truncate A/foo 5000 + truncate A/bar 0 + write A/bar 100 50 1",
        "tx rewrite A/foo 300 1 + rewrite A/bar 9000 2",
        "tx create B/foo + write B/foo 0 5000 1 + rename B/foo A/foo 0",
        "tx create foo + write foo 0 300 1 + link foo B/foo + unlink A/bar",
        "tx mkdir C + rename A/foo C/foo 0 + rename A/bar C/bar 0 + rmdir A",
        "tx-relaxed rename A/foo A/bar 2 + setxattr A/bar user.new 3000 1 + removexattr A/bar user.old",
        "tx symlink foo + unlink A/foo + create A/foo + settime A/bar 1000000000123456789",
        "tx rename A B/A 0 + write B/A/foo 8000 4000 1",
    ];
    set.extend(all.iter().filter_map(|text| text.parse().ok()));
}

/// A time long before any operation, as archivers set it, in nanoseconds.
pub const OLD: u64 = 1_000_000_000_123_456_789;

const FILES: [&str; 4] = ["A/foo", "A/bar", "B/foo", "foo"];

fn names(set: &mut Vec<Op>) {
    set.extend(FILES.map(|path| Op::Create(path.into())));
    set.extend(["C", "A/C"].map(|path| Op::Mkdir(path.into())));
    set.extend(["foo", "B/foo"].map(|path| Op::Symlink(path.into())));
    set.push(Op::Mknod(
        "B/foo".into(),
        libc::S_IFBLK | 0o644,
        0x1234_5678,
    ));
    let links = [
        ("A/foo", "B/foo"),
        ("A/foo", "foo"),
        ("A/bar", "B/foo"),
        ("A/bar", "foo"),
        ("foo", "A/bar"),
    ];
    set.extend(links.map(|(from, to)| Op::Link(from.into(), to.into())));
    for from in FILES {
        for to in FILES.iter().filter(|to| **to != from) {
            set.push(Op::Rename(from.into(), (*to).into(), 0));
        }
    }
    for (from, to) in [("A", "B"), ("A", "C"), ("B", "A/C"), ("C", "B")] {
        set.push(Op::Rename(from.into(), to.into(), 0));
    }
    let exchanges = [
        ("A/foo", "A/bar"),
        ("A/foo", "B/foo"),
        ("A/bar", "foo"),
        ("A", "B"),
    ];
    for (from, to) in exchanges {
        set.push(Op::Rename(from.into(), to.into(), fs::RENAME_EXCHANGE));
    }
    for (from, to) in [("A/foo", "B/foo"), ("A/foo", "A/bar")] {
        set.push(Op::Rename(from.into(), to.into(), fs::RENAME_NOREPLACE));
    }
    set.extend(FILES.map(|path| Op::Unlink(path.into())));
    set.extend(["A", "B", "C"].map(|path| Op::Rmdir(path.into())));
}

fn contents(set: &mut Vec<Op>) {
    for path in ["A/foo", "A/bar"] {
        let writes = [
            (Some(0), 100),
            (None, 200),
            (Some(1000), 20_000),
            (Some(0), 12_288),
            (Some(30_000), 500),
        ];
        set.extend(writes.map(|(at, len)| write(path, at, len, 0)));
        for len in [700, 9000] {
            set.push(Op::Rewrite {
                path: path.into(),
                len,
                tag: 0,
            });
        }
    }
    for path in ["B/foo", "foo"] {
        set.extend([(None, 200), (Some(0), 9000)].map(|(at, len)| write(path, at, len, 0)));
        set.push(Op::TmpLink {
            path: path.into(),
            len: 5000,
            tag: 0,
        });
    }
    for how in [How::Direct, How::Synced] {
        set.push(Op::Write {
            path: "A/foo".into(),
            at: Some(4096),
            len: 4096,
            tag: 0,
            how,
        });
    }
    for size in [0, 100, 4096, 5000, 20_000] {
        set.push(Op::Truncate("A/foo".into(), size));
    }
    for size in [0, 100, 3000] {
        set.push(Op::Truncate("A/bar".into(), size));
    }
    let (keep, punch, zero) = (
        libc::FALLOC_FL_KEEP_SIZE,
        libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
        libc::FALLOC_FL_ZERO_RANGE,
    );
    let modes = [
        ("A/foo", 0, 0, 20_000),
        ("A/foo", keep, 8192, 20_000),
        ("A/foo", punch, 4096, 4096),
        ("A/foo", punch, 100, 4900),
        ("A/foo", zero, 100, 4900),
        ("A/foo", zero, 8000, 8000),
        ("A/foo", zero | keep, 0, 8192),
        ("A/bar", 0, 0, 10_000),
        ("A/bar", keep, 0, 10_000),
        ("A/bar", punch, 50, 100),
    ];
    for (path, mode, at, len) in modes {
        set.push(Op::Fallocate {
            path: path.into(),
            mode,
            at,
            len,
        });
    }
}

fn attributes(set: &mut Vec<Op>) {
    set.extend(["A/foo", "A/bar", "A"].map(|path| Op::Chmod(path.into(), 0o750)));
    set.push(Op::Chown("A/foo".into(), 5, 7));
    set.push(Op::Chown("A".into(), 0, 7));
    set.extend(["A/foo", "A"].map(|path| Op::SetTime(path.into(), Some(OLD))));
    set.push(Op::SetTime("A/bar".into(), None));
    for (path, len) in [("A/foo", 30), ("A/bar", 5000), ("B", 10)] {
        set.push(xattr(path, "user.new", len, 0));
    }
    set.push(xattr("A/foo", "user.old", 40, 0));
    set.push(Op::RemoveXattr("A/foo".into(), "user.old".into()));
}

fn syncs(set: &mut Vec<Op>) {
    for path in ["A/foo", "A/bar", "B/foo", "foo", "A", "B", ""] {
        set.push(Op::Fsync(if path.is_empty() { "/" } else { path }.into()));
    }
    set.extend(["A/foo", "A/bar", "foo"].map(|path| Op::Fdatasync(path.into())));
    set.push(Op::Sync);
    set.push(Op::Checkpoint);
    set.push(Op::Tick(6000));
}

/// What is done between the operations of a sequence, and how it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joint {
    /// Nothing in between; a sync and a checkpoint at the end.
    Plain,
    /// A sync after each operation.
    Synced,
    /// A checkpoint after each operation.
    Checkpointed,
}

pub const JOINTS: [Joint; 3] = [Joint::Plain, Joint::Synced, Joint::Checkpointed];

/// A sequence with everything that goes between, every write with a tag of its own.
pub fn whole(operations: &[&Op], joint: Joint) -> Vec<Op> {
    let mut all = Vec::new();
    for (i, op) in operations.iter().enumerate() {
        all.push(tagged(op, 100 + i as u64));
        match joint {
            Joint::Plain => {}
            Joint::Synced => all.push(Op::Sync),
            Joint::Checkpointed => all.push(Op::Checkpoint),
        }
    }
    all.push(Op::Sync);
    all.push(Op::Checkpoint);
    all.dedup_by(|a, b| a == b && a.is_sync());
    all
}

/// The operation with another tag.
pub fn tagged(op: &Op, new: u64) -> Op {
    let mut op = op.clone();
    match &mut op {
        Op::Write { tag, .. }
        | Op::Rewrite { tag, .. }
        | Op::SetXattr { tag, .. }
        | Op::TmpLink { tag, .. } => *tag = new,
        Op::Tx { ops, .. } => {
            let each = (0..).zip(ops);
            each.for_each(|(i, op)| *op = tagged(op, new * 100 + i));
        }
        Op::Atomic {
            step: Atomic::Write { tag, .. },
            ..
        } => *tag = new,
        _ => {}
    }
    op
}

/// Of the sequences behind those of one operation, one in so many is of an atomic write, until all were.
const ATOMIC_ONE_IN: usize = 8;

/// All sequences in the order in which they are run: those of one operation, those of two and those of atomic writes, then
/// for ever samples of three.
#[derive(Clone, Debug)]
pub struct Plan {
    set: Vec<Op>,
    /// Which sequence of two comes when: their order is drawn once, so that a short run sees all
    /// kinds.
    order: Vec<u32>,
    /// With atomic writes.
    atomics: Vec<Vec<Op>>,
    seed: u64,
}

impl Plan {
    pub fn new(seed: u64) -> Plan {
        let set = full_set();
        let pairs = set.len() * set.len() * JOINTS.len();
        let mut order: Vec<u32> = (0..pairs as u32).collect();
        let mut rng = Rng::new(seed);
        shuffle(&mut order, &mut rng);
        // Without anything in between first: that is what programs do.
        order.sort_by_key(|pair| (pair % JOINTS.len() as u32).min(1));
        let mut atomics = atomics::sequences();
        shuffle(&mut atomics, &mut rng);
        Plan {
            set,
            order,
            atomics,
            seed,
        }
    }

    /// How many there are before samples begin.
    pub fn count(&self) -> usize {
        self.singles() + self.atomics.len() + self.pairs()
    }

    fn singles(&self) -> usize {
        self.set.len() * JOINTS.len()
    }

    fn pairs(&self) -> usize {
        self.order.len()
    }

    /// The sequence with this number.
    pub fn sequence(&self, number: usize) -> Vec<Op> {
        let joint = |n: usize| JOINTS[n % JOINTS.len()];
        if number < self.singles() {
            return whole(&[&self.set[number / JOINTS.len()]], joint(number));
        }
        let number = number - self.singles();
        let place = number / ATOMIC_ONE_IN;
        if number % ATOMIC_ONE_IN == ATOMIC_ONE_IN - 1
            && let Some(sequence) = self.atomics.get(place)
        {
            return sequence.clone();
        }
        let before = ((number + 1) / ATOMIC_ONE_IN).min(self.atomics.len());
        let number = number - before;
        let count = self.set.len();
        if number < self.pairs() {
            let pair = self.order[number] as usize;
            let operations = pair / JOINTS.len();
            let (a, b) = (operations / count, operations % count);
            return whole(&[&self.set[a], &self.set[b]], joint(pair));
        }
        let mut rng = Rng::new(self.seed ^ (number as u64) << 20);
        let picked: Vec<&Op> = (0..3).map(|_| rng.pick(&self.set)).collect();
        whole(&picked, joint(rng.below(3) as usize))
    }
}

fn shuffle<T>(list: &mut [T], rng: &mut Rng) {
    for i in (1..list.len()).rev() {
        list.swap(i, rng.below(i as u64 + 1) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// They come between the pairs, each once, and no pair is left out for them.
    #[test]
    fn sequences_of_atomic_writes_come_once() {
        let plan = Plan::new(1);
        let is_atomic = |op: &Op| matches!(op, Op::Atomic { .. });
        let all = (0..plan.count()).map(|number| plan.sequence(number));
        let (mut atomic, mut others, mut last) = (Vec::new(), 0, Vec::new());
        for ops in all {
            match ops.iter().any(is_atomic) {
                true => atomic.push(ops),
                false => {
                    others += 1;
                    last = ops;
                }
            }
        }
        assert_eq!(others, plan.singles() + plan.pairs());
        assert!(atomic == plan.atomics);
        let newest = *plan.order.last().expect("there are pairs") as usize;
        let (a, b) = {
            let pair = newest / JOINTS.len();
            (pair / plan.set.len(), pair % plan.set.len())
        };
        let joint = JOINTS[newest % JOINTS.len()];
        assert!(last == whole(&[&plan.set[a], &plan.set[b]], joint));
    }
}
