//! A file that is open and durable; one thread that changes its attributes and names, or fills a hole of it, one step after the other; and another
//! one that looks until it sees the step, then overwrites a page, or nothing, and syncs the file.
//!
//! What holds: after a power cut at the first write after the sync has returned, what was seen before it is there (R7), whether whoever
//! changed it had come back from its call or not.

use crate::explore::mixed;
use crate::world::{Image, Machine, Shape};
use base::atomic::{AtomicU64, Ordering};
use base::rng::Rng;
use base::{sched, thread};
use device::sim::Survival;
use fs::{Caller, Error, FileSystem, Ino, OpenFile, ROOT, SetAttr};
use std::sync::Arc;

const STEPS: u64 = 12;
const PAGE: u64 = 4096;
/// In place of a step: one of the two has ended, and the other must not wait for it for ever.
const ENDED: u64 = u64::MAX;
const ATTRIBUTE: &[u8] = b"user.step";

/// What a step changes. Each kind shows the newest step of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Mode,
    Attribute,
    Rename,
    Exchange,
    Link,
    Unlink,
    /// The owner, by a transaction that is not durable.
    Transaction,
    /// A page, by a direct write.
    Fill,
}
use Kind::*;

const KINDS: [Kind; 8] = [
    Mode,
    Attribute,
    Rename,
    Exchange,
    Link,
    Unlink,
    Transaction,
    Fill,
];

fn name(kind: &str, step: u64) -> Vec<u8> {
    format!("{kind} {step}").into_bytes()
}

/// The steps in whose names of this kind the file, or anything, is.
fn named(fs: &FileSystem, ino: Option<Ino>, kind: &str) -> Result<Vec<u64>, Error> {
    let mut steps = Vec::new();
    fs.readdir(ROOT, 0, &mut |entry| {
        let text = String::from_utf8_lossy(entry.name);
        if let Some((found, step)) = text.split_once(' ')
            && found == kind
            && ino.is_none_or(|ino| ino == entry.ino)
        {
            steps.extend(step.parse::<u64>().ok());
        }
        true
    })?;
    Ok(steps)
}

struct Run<'a> {
    fs: &'a FileSystem,
    ino: Ino,
    /// What each step changes, the first one at 1.
    kinds: &'a [Kind],
}

impl Run<'_> {
    /// The newest step of this kind before `step`, or 0.
    fn before(&self, step: u64) -> u64 {
        let kind = self.kinds[step as usize];
        let same = |s: &u64| self.kinds[*s as usize] == kind;
        (1..step).rev().find(same).unwrap_or(0)
    }

    fn prepare(&self) -> Result<(), Error> {
        let (fs, who) = (self.fs, Caller::root());
        for step in 1..=STEPS {
            match self.kinds[step as usize] {
                Unlink => drop(fs.link(&who, self.ino, ROOT, &name("gone", step))?),
                Exchange => drop(fs.mknod(
                    &who,
                    ROOT,
                    &name("exchanged", step),
                    libc::S_IFREG | 0o644,
                    0,
                )?),
                _ => {}
            }
        }
        fs.link(&who, self.ino, ROOT, &name("renamed", 0))?;
        fs.link(&who, self.ino, ROOT, &name("exchanged", 0))?;
        fs.setattr(&who, self.ino, &mode(0)).map(drop)
    }

    fn take(&self, step: u64) -> Result<(), Error> {
        let (fs, who, ino) = (self.fs, Caller::root(), self.ino);
        let before = self.before(step);
        match self.kinds[step as usize] {
            Mode => fs.setattr(&who, ino, &mode(step)).map(drop),
            Attribute => fs.setxattr(&who, ino, ATTRIBUTE, &step.to_le_bytes(), 0),
            Rename => {
                let (old, new) = (name("renamed", before), name("renamed", step));
                fs.rename(&who, ROOT, &old, ROOT, &new, 0)
            }
            Exchange => {
                let (old, new) = (name("exchanged", before), name("exchanged", step));
                fs.rename(&who, ROOT, &old, ROOT, &new, fs::RENAME_EXCHANGE)
            }
            Link => fs.link(&who, ino, ROOT, &name("link", step)).map(drop),
            Unlink => fs.unlink(&who, ROOT, &name("gone", step)),
            Transaction => {
                let owner = SetAttr {
                    uid: Some(step as u32),
                    ..SetAttr::default()
                };
                let mut tx = fs.transaction(&who)?;
                tx.setattr(ino, &owner)?;
                tx.commit_relaxed()
            }
            Fill => {
                let file = fs.open_file(ino, libc::O_RDWR | libc::O_DIRECT)?;
                let page = [step as u8; PAGE as usize];
                fs.write(&file, step * PAGE, &page).map(drop)
            }
        }
    }

    /// The newest step of the kind of `step` that one look shows.
    fn look(&self, step: u64) -> Result<u64, Error> {
        let (fs, ino) = (self.fs, self.ino);
        let newest = |steps: Vec<u64>| steps.into_iter().max().unwrap_or(0);
        Ok(match self.kinds[step as usize] {
            Mode => u64::from(fs.getattr(ino)?.mode & 0o777),
            Attribute => match fs.getxattr(ino, ATTRIBUTE) {
                Ok(value) => value.try_into().map_or(0, u64::from_le_bytes),
                Err(Error::NoAttribute) => 0,
                Err(error) => return Err(error),
            },
            Rename => newest(named(fs, Some(ino), "renamed")?),
            Exchange => newest(named(fs, Some(ino), "exchanged")?),
            Link => newest(named(fs, Some(ino), "link")?),
            Unlink => {
                let left = named(fs, None, "gone")?;
                let gone = |s: &u64| self.kinds[*s as usize] == Unlink && !left.contains(s);
                (1..=step).rev().find(gone).unwrap_or(0)
            }
            Transaction => u64::from(fs.getattr(ino)?.uid),
            // The first page has a block, and each that was filled.
            Fill => {
                let filled = (fs.getattr(ino)?.blocks * 512 / PAGE).saturating_sub(1);
                let fills = (1..=STEPS).filter(|s| self.kinds[*s as usize] == Fill);
                fills.take(filled as usize).last().unwrap_or(0)
            }
        })
    }
}

fn mode(step: u64) -> SetAttr {
    SetAttr {
        mode: Some(step as u32),
        ..SetAttr::default()
    }
}

/// One run; an error says what was not as it must be.
pub fn run(seed: u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let shape = Shape::of_two_threads(seed);
    let machine = Machine::new(&Image::format(&shape)?, seed);
    let text = |error: Error| error.to_string();
    let kinds: Vec<Kind> = (0..=STEPS).map(|_| *rng.pick(&KINDS)).collect();
    // Crash points there were when the sync after each step had returned.
    let (ino, returned) = sched::run("noticed", seed, &machine.clock, || {
        let fs = machine.open().map_err(text)?;
        let (attr, file) = fs
            .create(&Caller::root(), ROOT, b"file", 0o644, libc::O_RDWR)
            .map_err(text)?;
        let run = Run {
            fs: &fs,
            ino: attr.ino,
            kinds: &kinds,
        };
        run.prepare().map_err(text)?;
        fs.write(&file, 0, &[1; PAGE as usize]).map_err(text)?;
        fs.truncate(&Caller::root(), attr.ino, (STEPS + 1) * PAGE)
            .map_err(text)?;
        fs.sync().map_err(text)?;
        machine.tap.collect(true);
        let synced = AtomicU64::new(0);
        let returned = thread::parallel(2, |t| match t {
            0 => {
                let done = take_steps(&run, &synced).map(|()| Vec::new());
                synced.store(ENDED, Ordering::SeqCst);
                done
            }
            _ => {
                let mut rng = Rng::new(seed ^ 1 << 32);
                let done = sync_steps(&run, &file, &synced, &mut rng, || machine.tap.count());
                synced.store(ENDED, Ordering::SeqCst);
                done
            }
        });
        fs.sync().map_err(text)?;
        machine.tap.collect(false);
        drop(file);
        fs.close().map_err(text)?;
        let returned: Result<Vec<_>, Error> = returned.into_iter().collect();
        Ok::<_, String>((attr.ino, returned.map_err(text)?.concat()))
    })?;
    machine.fsck()?;
    let points = machine.tap.take();
    for (step, count) in (1..).zip(returned) {
        let Some(point) = points.get(count) else {
            continue;
        };
        let survival = *rng.pick(&[Survival::None, Survival::Subset, Survival::Mixed]);
        let crashed = point.crash(survival, &mut Rng::new(mixed(seed, step)));
        let machine = Machine::after(&shape, crashed, machine.now_ns());
        let fs = machine.open().map_err(text)?;
        let run = Run {
            fs: &fs,
            ino,
            kinds: &kinds,
        };
        for past in 1..=step {
            let found = run.look(past).map_err(text)?;
            if found < past {
                let kind = kinds[past as usize];
                return Err(format!(
                    "step {past}, {kind:?}, was seen before a sync after step {step}: after a cut, {survival:?}, it is {found}"
                ));
            }
        }
        fs.close().map_err(text)?;
        drop(fs);
        machine.fsck()?;
    }
    Ok(())
}

fn take_steps(run: &Run<'_>, synced: &AtomicU64) -> Result<(), Error> {
    for step in 1..=STEPS {
        run.take(step)?;
        while synced.load(Ordering::SeqCst) < step {
            thread::yield_now();
        }
    }
    Ok(())
}

/// Returns how many crash points there were after each sync.
fn sync_steps(
    run: &Run<'_>,
    file: &Arc<OpenFile>,
    synced: &AtomicU64,
    rng: &mut Rng,
    points: impl Fn() -> usize,
) -> Result<Vec<usize>, Error> {
    let mut returned = Vec::new();
    for step in 1..=STEPS {
        while run.look(step)? < step {
            if synced.load(Ordering::SeqCst) == ENDED {
                return Ok(returned);
            }
            thread::yield_now();
        }
        if rng.one_in(2) {
            run.fs.write(file, 0, &[step as u8; PAGE as usize])?;
        }
        run.fs.fsync(file, rng.one_in(2))?;
        returned.push(points());
        synced.store(step, Ordering::SeqCst);
    }
    Ok(returned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::canary::{Canary, plant};

    /// An operation unlocked what it had changed and noted that afterwards, so that whoever came in between synced the file for nothing.
    #[test]
    fn each_kind_of_change_is_lost_if_it_is_noted_late() {
        let mut kept: Vec<String> = KINDS.iter().map(|kind| format!("{kind:?}")).collect();
        plant(Some(Canary::ChangeNotedLate));
        for seed in 0..1000 {
            if let Err(why) = run(seed) {
                kept.retain(|kind| !why.contains(kind));
            }
            if kept.is_empty() {
                break;
            }
        }
        plant(None);
        assert_eq!(kept, [""; 0], "these are noted in time");
        for seed in 0..20 {
            run(seed).unwrap();
        }
    }
}
