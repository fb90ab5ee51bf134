//! Atomic writes in short sequences: what is staged, what is done to the file beside it, and how it ends; cut at every I/O, or
//! with one I/O after the other that fails.

use crate::drive::{Driver, Stop};
use crate::explore::{Base, Effort, Explorer, Failure};
use crate::op::{Op, parse_list};
use crate::sequences::{set_up, tagged};
use crate::world::{Machine, Shape};
use base::rng::Rng;
use device::sim::{Survival, Times};
use std::sync::Arc;

const FILES: [&str; 2] = ["A/foo", "A/bar"];

/// Sequences of one run.
const SAMPLES: usize = 8;

/// What one stages: parts of pages, whole ones, the tail, what lies behind the end, holes, cuts, and what is cut again. One of the files has two
/// pages and a tail, the other lies in its inode.
const STAGED: [&str; 11] = [
    "write 0 100 1",
    "write 0 4096 1; write 8192 4096 2",
    "write 4000 200 1; write 8900 300 2",
    "write end 200 1; write 50 10 2",
    "write 30000 500 1",
    "truncate 5000",
    "truncate 0; write 0 300 1",
    "truncate 20000; write 10000 100 1",
    "write 0 12288 1; truncate 4500; write end 50 2",
    "write 20000 5000 1; truncate 8192",
    // More than is written under the file's locks, where the limits are small.
    "write 100 40000 1",
];

/// What is done beside it, to its file (`F`) and to others (`O`).
const BESIDE: [&str; 21] = [
    "write F 50 20 1",
    "write F end 5000 1",
    "write-direct F 4096 4096 1",
    "write-sync F end 100 1",
    "truncate F 100",
    "truncate F 0; write F 0 50 1",
    "truncate F 25000",
    "rewrite F 700 1",
    "fallocate F 3 4096 4096",
    "fallocate F 1 0 30000",
    "chmod F 448; fsync A",
    "rename F foo 0",
    "rename O F 0",
    "unlink F",
    "fsync F",
    "write F end 60 1; fdatasync F",
    "checkpoint",
    "sync",
    "tick 6000",
    "write O 0 9000 1; fsync O",
    "tx write F 100 5000 1 + write O 0 50 2",
];

/// How these go together, and what is behind it: `S` is staged, `B` is done beside it.
const SHAPES: [&str; 8] = [
    "atomic 0 start F; S; B; atomic 0 commit; sync",
    "B; atomic 1 start F; S; atomic 1 commit; checkpoint",
    "atomic 1 start F; S; B; atomic 1 drop; sync",
    "atomic 0 start F; S; atomic 0 commit; B; sync",
    "atomic 1 start F; S; atomic 1 commit; B; remount",
    // Two of them.
    "atomic 0 start F; atomic 2 start F; atomic 2 write 3000 6000 9; S; B; atomic 2 commit; atomic 0 commit; remount",
    "atomic 0 start F; atomic 2 start F; atomic 2 write 0 200 9; S; atomic 0 commit; B; atomic 2 drop; sync",
    "atomic 0 start F; S; atomic 0 commit; atomic 0 start F; B; S; atomic 0 commit; checkpoint",
];

/// A shape filled in, every write with a tag of its own.
fn filled(shape: &str, file: usize, staged: &str, beside: &str) -> Vec<Op> {
    let (name, other) = (FILES[file], FILES[1 - file]);
    let number = if shape.contains("atomic 1") { 1 } else { 0 };
    let staged: Vec<String> = staged
        .split("; ")
        .map(|step| format!("atomic {number} {step}"))
        .collect();
    let parts = shape.split("; ").map(|part| match part {
        "S" => staged.join("; "),
        "B" => beside.to_owned(),
        _ => part.to_owned(),
    });
    let text = parts.collect::<Vec<String>>().join("; ");
    let word = |word: &str| match word {
        "F" => name.to_owned(),
        "O" => other.to_owned(),
        _ => word.to_owned(),
    };
    let ops = text.split("; ").map(|op| {
        let words: Vec<String> = op.split(' ').map(word).collect();
        words.join(" ")
    });
    let list = ops.collect::<Vec<String>>().join(";");
    let ops = parse_list(&list).expect("what is written here can be read");
    let tagged = (100..).zip(&ops).map(|(tag, op)| tagged(op, tag));
    tagged.collect()
}

/// All of them.
pub fn sequences() -> Vec<Vec<Op>> {
    let mut all = Vec::new();
    for shape in SHAPES {
        for file in 0..FILES.len() {
            for staged in STAGED {
                all.extend(BESIDE.map(|beside| filled(shape, file, staged, beside)));
            }
        }
    }
    all
}

fn one_of<'t>(rng: &mut Rng, texts: &[&'t str]) -> &'t str {
    texts[rng.below(texts.len() as u64) as usize]
}

/// One of them.
fn sampled(rng: &mut Rng) -> Vec<Op> {
    let file = rng.below(FILES.len() as u64) as usize;
    let shape = one_of(rng, &SHAPES);
    filled(shape, file, one_of(rng, &STAGED), one_of(rng, &BESIDE))
}

/// Some of them, cut at every I/O; with small limits or without.
pub fn explored(seed: u64) -> Result<(), Failure> {
    let plain = |what| Failure {
        what,
        trail: Vec::new(),
    };
    let mut rng = Rng::new(seed);
    let base = Arc::new(base(rng.one_in(2)).map_err(plain)?);
    let mut explorer = Explorer::new(base, Arc::default(), Effort::NONE);
    (0..SAMPLES).try_for_each(|_| explorer.explore(&sampled(&mut rng)))
}

fn base(tight: bool) -> Result<Base, String> {
    let mut shape = Shape::small(2);
    shape.tight = tight;
    Base::new(&shape, &set_up())
}

/// A commit meets errors, once or from then on, at one I/O after the other: it has happened, or the file is what it was, or nothing can be changed any
/// more. Then the power goes.
pub fn failing(seed: u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let file = rng.below(FILES.len() as u64) as usize;
    let base = base(rng.one_in(2))?;
    let shape = "hold F; B; atomic 1 start F; S; atomic 1 commit";
    let beside = [
        "write F 50 20 1",
        "write F end 5000 1",
        "fsync F",
        "truncate F 100",
    ];
    let ops = filled(
        shape,
        file,
        one_of(&mut rng, &STAGED),
        one_of(&mut rng, &beside),
    );
    let times = *rng.pick(&[Times::Next(1), Times::Next(2), Times::Always]);
    let mut after = 0;
    let told = |after, what: String| {
        let ops: Vec<String> = ops.iter().map(Op::to_string).collect();
        format!("{}: I/O {after} fails, {times:?}: {what}", ops.join("; "))
    };
    while fails_at(&base, &ops, (after, times), &mut rng).map_err(|what| told(after, what))? {
        after += 1;
    }
    Ok(())
}

/// False: nothing was left that could fail.
fn fails_at(
    base: &Base,
    ops: &[Op],
    (after, times): (u64, Times),
    rng: &mut Rng,
) -> Result<bool, String> {
    let mut driver = base.driver(1)?;
    let (commit, before) = ops.split_last().ok_or("no operations")?;
    for op in before {
        driver.run(op).map_err(|stop| format!("{op}: {stop:?}"))?;
    }
    driver.faulty = true;
    let switch = Arc::clone(&driver.machine.switch);
    let begun = switch.operations();
    switch.fail_after(after, times);
    let expected = driver.begin(commit);
    let result = driver.perform(commit, expected.as_ref().ok());
    let done = switch.operations() - begun;
    switch.restore();
    let outcome = driver.end(commit, expected, result);
    match outcome {
        Err(Stop::Violation(what)) => return Err(what),
        // It has failed, and made no difference.
        Err(Stop::Environment(_)) if driver.fs().store().failed().is_none() => {
            let synced = driver.run(&Op::Sync);
            if let Err(Stop::Violation(what)) = synced {
                return Err(what);
            }
        }
        _ => {}
    }
    let crashed = driver.machine.cut(*rng.pick(&Survival::ALL), rng);
    let machine = Machine::after(base.shape(), crashed, driver.machine.now_ns());
    Driver::recover(machine, &driver.oracle)?.machine.fsck()?;
    Ok(done > after)
}
