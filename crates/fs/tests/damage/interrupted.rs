//! A repair that is interrupted, wherever that is, ends like one that is not.

use crate::images::*;
use crate::repair::{copies, hit, newest_record, try_repair, walk};
use base::rng::Rng;
use device::sim::{PowerSwitch, SimDevice, Survival, Times};
use fs::fsck::repair::{ActionKind, Outcome, RepairReport};
use fs::{Caller, ROOT};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Files of all kinds, hard links, attributes and an unlinked file; what the journal alone knows, if the power went.
fn small(dirty: u8) -> Image {
    let devices = make(&[DEVICE_BYTES; DEVICES]);
    let fs = open(&devices, false).unwrap();
    let mut model = Model::default();
    let who = Caller::root();
    for dir in ["/a", "/a/b", "/many"] {
        model.add(&fs, dir, Thing::Dir);
    }
    for i in 0..300usize {
        let thing = Thing::File(vec![i as u8; i * 5 % 900]);
        model.add(&fs, &format!("/many/number {i}"), thing);
    }
    for i in 0..20usize {
        model.add(
            &fs,
            &format!("/a/b/{i}"),
            Thing::File(vec![i as u8 + 1; i * 3000]),
        );
    }
    model.add(&fs, "/a/large", Thing::File(vec![0x5A; 3 << 20]));
    model.add(&fs, "/a/link", Thing::Link(b"large".to_vec()));
    for (from, to) in [("/a/large", "/a/b/large too"), ("/many/number 9", "/nine")] {
        let ino = fs.resolve(from.as_bytes()).unwrap().ino;
        let (dir, name) = to.rsplit_once('/').unwrap();
        let dir = fs.resolve(dir.as_bytes()).unwrap().ino;
        fs.link(&who, ino, dir, name.as_bytes()).unwrap();
        let thing = model.things[from.as_bytes()].clone();
        model.things.insert(to.into(), thing);
    }
    for (path, len) in [("/a/b/3", 40), ("/a", 5000), ("/many", 40_000)] {
        let ino = fs.resolve(path.as_bytes()).unwrap().ino;
        fs.setxattr(&who, ino, b"user.mark", &vec![7; len], 0)
            .unwrap();
    }
    model.add_fragments(&fs, 300);
    if dirty == 0 {
        fs.close().unwrap();
        return image(&devices, model, None);
    }
    if dirty == 1 {
        fs.sync().unwrap();
        fs.store().checkpoint().unwrap();
    } else {
        fs.close().unwrap();
    }
    let fs = match dirty {
        1 => fs,
        _ => {
            drop(fs);
            open(&devices, false).unwrap()
        }
    };
    let mut open_files = Vec::new();
    for i in 0..4usize {
        let name = format!("gone {i}");
        let (_, file) = fs
            .create(&who, ROOT, name.as_bytes(), 0o644, libc::O_RDWR)
            .unwrap();
        fs.write(&file, 0, &vec![0xCC; i * 50_000 + 10]).unwrap();
        fs.fsync(&file, false).unwrap();
        fs.unlink(&who, ROOT, name.as_bytes()).unwrap();
        open_files.push(file);
    }
    for i in 0..12 {
        model.add(&fs, &format!("/a/b/later {i}"), Thing::File(vec![i; 5000]));
        fs.sync().unwrap();
    }
    let ino = fs.resolve(b"/many").unwrap().ino;
    for i in 0..40 {
        let name = format!("number {i}");
        fs.unlink(&who, ino, name.as_bytes()).unwrap();
        model.things.remove(format!("/many/{name}").as_bytes());
    }
    fs.sync().unwrap();
    let copies: Vec<_> = devices.iter().map(|d| d.clone_state(1)).collect();
    image(&copies, model, None)
}

type Walk = BTreeMap<Vec<u8>, Thing>;

/// The tree, after everything that must hold.
fn sound(devices: &[Arc<SimDevice>], context: &str) -> Walk {
    let again = try_repair(devices, false).unwrap();
    assert_eq!(
        again.outcome,
        Outcome::Sound,
        "{context}: {:#?}",
        again.actions
    );
    assert_eq!(fsck(devices).findings, [], "{context}");
    let fs = open(devices, false).unwrap_or_else(|e| panic!("{context}: {e}"));
    let now = walk(&fs, context);
    match fs.mkdir(&Caller::root(), ROOT, b"after", 0o755) {
        Ok(_) => fs.rmdir(&Caller::root(), ROOT, b"after").unwrap(),
        Err(fs::Error::NoSpace) => {}
        Err(error) => panic!("{context}: {error}"),
    }
    fs.close().unwrap();
    assert_eq!(fsck(devices).findings, [], "{context}: after use");
    now
}

fn shown(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

/// What is in `before` and not in `after`: names count, not only what they name.
fn missing(before: &Walk, after: &Walk) -> Vec<String> {
    let gone = before
        .iter()
        .filter(|(path, thing)| after.get(*path) != Some(thing));
    gone.map(|(path, _)| shown(path)).collect()
}

fn forked(devices: &[Arc<SimDevice>], switch: &Arc<PowerSwitch>) -> Vec<Arc<SimDevice>> {
    devices.iter().map(|d| d.fork(switch)).collect()
}

/// Cuts the power at each of some writes of the repair, and repairs again.
fn cut(damaged: &[Arc<SimDevice>], step: u64, rng: &mut Rng, context: &str) -> Result<u64, String> {
    let switch = PowerSwitch::new();
    let whole = forked(damaged, &switch);
    let planned = try_repair(&whole, true).map_err(|e| e.to_string())?;
    let decided = switch.operations();
    let report = try_repair(&whole, false).map_err(|e| format!("{context}: {e}"))?;
    let ends = switch.operations() - decided;
    if !matches!(report.outcome, Outcome::Repaired) {
        return Ok(0);
    }
    let expected = sound(&whole, context);
    let outdated = |r: &RepairReport| {
        r.actions
            .iter()
            .filter(|a| a.kind == ActionKind::Outdated)
            .count()
    };
    // It reads first as a dry run does.
    let start = decided.saturating_sub(4).min(ends);
    let (mut cuts, mut wrong) = (0, Vec::new());
    let mut at = start + rng.below(step);
    while at < ends {
        let context = format!("{context}, cut at {at} of {start}..{ends}");
        let switch = PowerSwitch::new();
        let mut devices = forked(damaged, &switch);
        let mut times = 0;
        loop {
            switch.restore();
            switch.cut_after(at + times);
            drop(try_repair(&devices, false));
            switch.cut_now();
            devices = devices.iter().map(|d| d.restart(rng)).collect();
            switch.restore();
            cuts += 1;
            times += 1;
            if !rng.one_in(3) {
                break;
            }
        }
        match try_repair(&devices, false) {
            Err(error) => wrong.push(format!("{context}: {error}")),
            Ok(again) => {
                if let Outcome::Refused { why, .. } = &again.outcome {
                    wrong.push(format!("{context}: refused: {why}"));
                } else {
                    if outdated(&again) > outdated(&planned) {
                        wrong.push(format!("{context}: devices are called outdated"));
                    }
                    let found = sound(&devices, &context);
                    let gone = missing(&expected, &found);
                    if !gone.is_empty() {
                        let lost: Vec<_> = again
                            .actions
                            .iter()
                            .filter(|a| a.lost)
                            .take(4)
                            .map(ToString::to_string)
                            .collect();
                        wrong.push(format!(
                            "{context} ({times} times): {} lost: {:?} {lost:?}",
                            gone.len(),
                            &gone[..gone.len().min(4)]
                        ));
                    }
                }
            }
        }
        at += 1 + rng.below(2 * step - 1);
    }
    match wrong.is_empty() {
        true => Ok(cuts),
        false => Err(format!(
            "{} of {cuts}: {}",
            wrong.len(),
            wrong[..wrong.len().min(3)].join("\n")
        )),
    }
}

/// Fails operations of the repair, and repairs again.
fn fail(
    damaged: &[Arc<SimDevice>],
    step: u64,
    rng: &mut Rng,
    context: &str,
) -> Result<u64, String> {
    let switch = PowerSwitch::new();
    let whole = forked(damaged, &switch);
    let report = try_repair(&whole, false).map_err(|e| format!("{context}: {e}"))?;
    let ends = switch.operations();
    if !matches!(report.outcome, Outcome::Repaired) {
        return Ok(0);
    }
    let expected = sound(&whole, context);
    let (mut fails, mut wrong) = (0, Vec::new());
    let mut at = ends.saturating_sub(300) + rng.below(step);
    while at < ends {
        let times = *rng.pick(&[
            Times::Next(1),
            Times::Next(1),
            Times::Next(3),
            Times::Always,
        ]);
        let context = format!("{context}, failing at {at} of {ends} {times:?}");
        let switch = PowerSwitch::new();
        let mut devices = forked(damaged, &switch);
        switch.fail_after(at, times);
        let done = try_repair(&devices, false);
        fails += 1;
        let whole = matches!(&done, Ok(r) if r.outcome == Outcome::Repaired);
        let told = match &done {
            Ok(report) => match &report.outcome {
                Outcome::Refused { why, .. } => why.clone(),
                other => format!("{other:?}"),
            },
            Err(error) => error.to_string(),
        };
        if !whole && !told.contains("sim") {
            wrong.push(format!("{context}: {told}"));
        }
        switch.restore();
        devices = match rng.below(3) {
            0 => devices.iter().map(|d| d.reopen()).collect(),
            1 => devices,
            _ => {
                switch.cut_now();
                let d = devices.iter().map(|d| d.restart(rng)).collect();
                switch.restore();
                d
            }
        };
        match try_repair(&devices, false) {
            Err(error) => wrong.push(format!("{context}: again: {error}")),
            Ok(again) => {
                if let Outcome::Refused { why, .. } = &again.outcome {
                    wrong.push(format!("{context}: refused: {why}"));
                } else {
                    let found = sound(&devices, &context);
                    if found != expected {
                        let gone = missing(&expected, &found);
                        wrong.push(format!("{context}: differs, {told}: {gone:?}"));
                    }
                }
            }
        }
        at += 1 + rng.below(2 * step - 1);
    }
    match wrong.is_empty() {
        true => Ok(fails),
        false => Err(format!(
            "{} of {fails}: {}",
            wrong.len(),
            wrong[..wrong.len().min(4)].join("\n")
        )),
    }
}

fn slots(devices: &[Arc<SimDevice>]) {
    for (device, block) in &copies()[4..] {
        devices[*device].poke(block * BLOCK + 100, &[0xEE; 8]);
    }
}

type Damage<'d> = dyn Fn(&[Arc<SimDevice>], &mut Rng) + 'd;
type Trial = fn(&[Arc<SimDevice>], u64, &mut Rng, &str) -> Result<u64, String>;

/// Tries images of some kinds, each damaged in `count` ways.
fn trials(trial: Trial, image: &Image, kinds: &[(&str, &Damage)], (count, step): (u64, u64)) {
    let mut wrong = Vec::new();
    for (what, damage) in kinds {
        for i in 0..count {
            let mut rng = Rng::new(seed(31) << 32 | i);
            let devices = image.devices();
            damage(&devices, &mut rng);
            let done = trial(&devices, step, &mut rng, &format!("{what} {i}"));
            wrong.extend(done.err());
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Without any record a repair goes by what it finds, which was in part what the interrupted one had written.
#[test]
fn a_repair_without_a_record_may_be_interrupted_too() {
    for dirty in [1, 2] {
        let image = small(dirty);
        let nodes = nodes(&image);
        let fragments = open(&image.devices(), true).unwrap();
        let ino = fragments.resolve(b"/fragments").unwrap().ino;
        drop(fragments);
        let near: Vec<_> = nodes
            .iter()
            .filter(|n| (ino.0..ino.0 + 20).contains(&n.2.0))
            .copied()
            .collect();
        let kinds: [(&str, &Damage); 2] = [
            ("slots", &|d, _| slots(d)),
            ("slots and nodes", &|d, rng| {
                slots(d);
                forge(d, &near, rng);
            }),
        ];
        trials(cut, &image, &kinds, (2, 3));
    }
}

/// The directory was durable and the buckets were not that it got for its rotten one, and no repair after that found a name of it.
#[test]
fn a_repair_without_a_record_that_is_interrupted_loses_no_other_names_of_a_directory() {
    let devices = make(&[DEVICE_BYTES; DEVICES]);
    let mut model = Model::default();
    let fs = open(&devices, false).unwrap();
    model.add(&fs, "/many", Thing::Dir);
    for i in 0..300 {
        model.add(&fs, &format!("/many/number {i}"), Thing::File(Vec::new()));
    }
    fs.close().unwrap();
    drop(fs);
    // The journal of this mount does not make the bucket anew.
    let fs = open(&devices, false).unwrap();
    model.add(&fs, "/later", Thing::Dir);
    fs.close().unwrap();
    let image = image(&devices, model, None);
    let damaged = image.devices();
    slots(&damaged);
    rot(&damaged, &nodes(&image), bucket(&image, b"/many"));

    let switch = PowerSwitch::new();
    let whole = forked(&damaged, &switch);
    try_repair(&whole, true).unwrap();
    let decided = switch.operations();
    try_repair(&whole, false).unwrap();
    let ends = switch.operations() - decided;
    let expected = sound(&whole, "not interrupted");
    let left = |path: &&Vec<u8>| path.starts_with(b"/many/");
    let left = expected.keys().filter(left).count();
    assert!((1..300).contains(&left), "{left} names");
    let mut rng = Rng::new(seed(33));
    for at in decided.saturating_sub(4).min(ends)..ends {
        let switch = PowerSwitch::new();
        let devices = forked(&damaged, &switch);
        switch.cut_after(at);
        drop(try_repair(&devices, false));
        switch.cut_now();
        if devices.iter().all(|device| device.volatile_bytes() == 0) {
            continue;
        }
        for time in 0..6 {
            let context = format!("cut at {at} of {ends}, {time}");
            let restarted = |d: &Arc<SimDevice>| d.restart_with(Survival::Subset, &mut rng);
            let devices: Vec<_> = devices.iter().map(restarted).collect();
            switch.restore();
            try_repair(&devices, false).unwrap();
            let gone = missing(&expected, &sound(&devices, &context));
            assert!(gone.is_empty(), "{context}: {} lost", gone.len());
            switch.cut_now();
        }
    }
}

/// The newest record is lost, and an interrupted repair has noted in the labels which mount it would be.
#[test]
fn an_interrupted_repair_makes_no_device_an_old_one() {
    let image = small(2);
    let kinds: [(&str, &Damage); 1] = [("record", &|d, _| {
        for (device, block) in newest_record(&image) {
            d[device].poke(block * BLOCK + 100, &[0xEE; 8]);
        }
    })];
    trials(cut, &image, &kinds, (2, 3));
}

/// A page of the table that a device did not return for a moment counted as empty, and what it has was nameless or gone.
#[test]
fn a_read_that_fails_during_a_repair_changes_nothing() {
    let image = small(0);
    let kinds: [(&str, &Damage); 1] = [("items", &|d, rng| {
        for _ in 0..1 + rng.below(4) {
            hit(&image, d, rng);
        }
    })];
    trials(fail, &image, &kinds, (6, 8));
}
