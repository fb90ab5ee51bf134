//! Threads that each bring a file to the next version of its content by an atomic write, in several steps, beside others that do the same, cut the
//! file to nothing, read it, unlink it, make it anew and rename it over another.
//!
//! What holds of each file, at every moment and after each cut: it has the content of one version, or none; and none that was superseded: by one whose
//! commit, or cut, began after that one had ended, and was over, or was seen. After a power cut the same of commits that had returned.
//!
//! And of each name: it is where some operation on names put it, and none that was superseded. Such operations are durable once a commit has returned that
//! began after they had ended, whatever file that was of.

use crate::explore::mixed;
use crate::world::{Image, Machine, Shape};
use base::rng::Rng;
use base::sync::{Mutex, rank};
use base::{sched, thread};
use device::sim::Survival;
use fs::{Caller, Error, FileSystem, Ino, ROOT};
use std::sync::Arc;

const TASKS: usize = 3;
/// What each thread does so often.
const STEPS: u64 = 16;
const NAMES: [&[u8]; 2] = [b"first", b"second"];
const MODE: u32 = libc::S_IFREG | 0o644;
/// Cuts at the first write after a commit has returned, and others.
const CUTS_AFTER: usize = 3;
const CUTS: usize = 2;
const NEVER: u64 = u64::MAX;

/// A file: its number may be used again.
type Key = (Ino, u64);

/// Something that gives a file all its content; its number is the version.
struct Event {
    file: Key,
    empties: bool,
    began: u64,
    ended: u64,
}

/// Something that gives a name another file, or none.
struct Naming {
    /// Its place among the names.
    name: usize,
    to: To,
    began: u64,
    ended: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum To {
    Nothing,
    This(Key),
    /// Any that had a name: what another name stood for, or one that is being made.
    Some,
}

#[derive(Default)]
struct Ledger {
    now: u64,
    events: Vec<Event>,
    namings: Vec<Naming>,
    /// Versions of which a read has shown that they are there.
    seen: Vec<u64>,
    /// Crash points there were when commits returned, and their versions.
    returned: Vec<(usize, u64)>,
}

impl Ledger {
    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// One that has not begun.
    fn add(&mut self, file: Key, empties: bool) -> u64 {
        self.events.push(Event {
            file,
            empties,
            began: NEVER,
            ended: NEVER,
        });
        self.events.len() as u64 - 1
    }

    fn begin(&mut self, version: u64) {
        self.events[version as usize].began = self.tick();
    }

    fn end(&mut self, version: u64) {
        self.events[version as usize].ended = self.tick();
    }

    /// Begins to give names other files; the numbers of these events.
    fn begin_naming(&mut self, names: &[(usize, To)]) -> std::ops::Range<usize> {
        let (first, began) = (self.namings.len(), self.tick());
        self.namings.extend(names.iter().map(|&(name, to)| Naming {
            name,
            to,
            began,
            ended: NEVER,
        }));
        first..self.namings.len()
    }

    /// It has happened, or has changed nothing.
    fn end_naming(&mut self, events: std::ops::Range<usize>, happened: bool) {
        let ended = self.tick();
        for naming in &mut self.namings[events] {
            match happened {
                true => naming.ended = ended,
                false => naming.began = NEVER,
            }
        }
    }

    /// Whether a name may stand for this, if all that ended by `durable` is there.
    fn explain_name(&self, name: usize, found: Option<Key>, durable: u64) -> Result<(), String> {
        let begun = |naming: &&Naming| naming.name == name && naming.began < NEVER;
        let all = || self.namings.iter().filter(begun);
        let there = all().filter(|naming| naming.ended <= durable);
        let floor = there.map(|naming| naming.began).max().unwrap_or(0);
        let is = |to: To| match found {
            None => to == To::Nothing,
            Some(file) => to == To::This(file) || to == To::Some,
        };
        match all().any(|naming| naming.ended >= floor && is(naming.to)) {
            true => Ok(()),
            false => Err(format!(
                "{:?} stands for {found:?}, which was superseded, or never was",
                NAMES[name]
            )),
        }
    }

    /// What ended before this is superseded, by what was over or seen.
    fn floor(&self, file: Key) -> u64 {
        let over = self.events.iter().filter(|event| event.ended < NEVER);
        let seen = self
            .seen
            .iter()
            .map(|version| &self.events[*version as usize]);
        let all = over.chain(seen).filter(|event| event.file == file);
        all.map(|event| event.began).max().unwrap_or(0)
    }

    /// Whether a file may hold this; if it is a version's, which.
    fn explain(&self, file: Key, bytes: &[u8], floor: u64) -> Result<Option<u64>, String> {
        let stands =
            |event: &Event| event.file == file && event.began < NEVER && event.ended >= floor;
        if bytes.is_empty() {
            // As it was made, unless that was superseded.
            let mut events = self.events.iter();
            let empty = floor == 0 || events.any(|event| event.empties && stands(event));
            return match empty {
                true => Ok(None),
                false => Err("a file is empty that was not cut".to_owned()),
            };
        }
        let head = bytes.first_chunk().map(|head| u64::from_le_bytes(*head));
        let version = head.filter(|version| bytes == bytes_of(*version));
        let event = version.and_then(|version| self.events.get(version as usize));
        match (version, event) {
            (Some(version), Some(event)) if stands(event) => Ok(Some(version)),
            (Some(version), Some(_)) => {
                Err(format!("version {version} was superseded, or never was"))
            }
            _ => Err(format!(
                "{} bytes that begin as {head:?} are of no version",
                bytes.len()
            )),
        }
    }
}

/// A version's bytes: its number, and as many of its own as make sizes go up and down.
fn bytes_of(version: u64) -> Vec<u8> {
    let len = 8 + (version * 2711 % 9000) as usize;
    let mut bytes = vec![version as u8; len];
    bytes[..8].copy_from_slice(&version.to_le_bytes());
    bytes
}

struct World<'m> {
    fs: &'m Arc<FileSystem>,
    machine: &'m Machine,
    ledger: Mutex<Ledger>,
}

/// What is gone meanwhile is no surprise.
fn there<T>(done: Result<T, Error>) -> Result<Option<T>, String> {
    match done {
        Ok(value) => Ok(Some(value)),
        Err(Error::Stale(_) | Error::NotFound | Error::Exists) => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

fn all_of(fs: &FileSystem, ino: Ino) -> Result<(Key, Vec<u8>), Error> {
    let file = fs.open_file(ino, libc::O_RDONLY)?;
    let mut bytes = vec![0; 16 << 10];
    let len = fs.read(&file, 0, &mut bytes)?;
    bytes.truncate(len);
    Ok(((ino, fs.getattr(ino)?.generation), bytes))
}

impl World<'_> {
    fn make(&self, name: usize) -> Result<(), Error> {
        let who = Caller::root();
        let events = self.ledger.lock().begin_naming(&[(name, To::Some)]);
        let made = (self.fs).mknod(&who, ROOT, NAMES[name], MODE, 0);
        let mut ledger = self.ledger.lock();
        if let Ok(attr) = &made {
            ledger.namings[events.start].to = To::This((attr.ino, attr.generation));
        }
        ledger.end_naming(events, made.is_ok());
        made.map(drop)
    }

    /// Does what gives names other files; what is gone meanwhile is no surprise.
    fn rename(
        &self,
        names: &[(usize, To)],
        change: impl FnOnce(&Caller) -> Result<(), Error>,
    ) -> Result<(), String> {
        let events = self.ledger.lock().begin_naming(names);
        let done = change(&Caller::root());
        self.ledger.lock().end_naming(events, done.is_ok());
        there(done).map(drop)
    }

    fn read(&self, ino: Ino) -> Result<(), String> {
        let generation = match there(self.fs.getattr(ino))? {
            Some(attr) => attr.generation,
            None => return Ok(()),
        };
        let floor = self.ledger.lock().floor((ino, generation));
        let Some((file, bytes)) = there(all_of(self.fs, ino))? else {
            return Ok(());
        };
        if file.1 == generation {
            let mut ledger = self.ledger.lock();
            let version = ledger.explain(file, &bytes, floor)?;
            ledger.seen.extend(version);
        }
        Ok(())
    }

    /// Stages a version in steps, some of which undo others, and commits it, or does not.
    fn bring(&self, ino: Ino, rng: &mut Rng) -> Result<(), String> {
        let Some(file) = there(self.fs.open_file(ino, libc::O_RDWR))? else {
            return Ok(());
        };
        let Some(mut write) = there(self.fs.atomic_write(&Caller::root(), &file))? else {
            return Ok(());
        };
        let Some(attr) = there(self.fs.getattr(ino))? else {
            return Ok(());
        };
        let version = self.ledger.lock().add((ino, attr.generation), false);
        let bytes = bytes_of(version);
        let len = bytes.len() as u64;
        let middle = rng.below(len) as usize;
        let staged = (|| {
            if rng.one_in(2) {
                write.write(rng.below(20_000), &[0xEE; 3000])?;
            }
            write.truncate(rng.below(len))?;
            write.write(middle as u64, &bytes[middle..])?;
            if rng.one_in(2) {
                write.write(len, &[0xEE; 5000])?;
            }
            write.write(0, &bytes[..middle])?;
            write.truncate(len)
        })();
        staged.map_err(|error| format!("staging: {error}"))?;
        if rng.one_in(3) {
            // It ends without its handle.
            drop(file);
        }
        if rng.one_in(2) {
            self.read(ino)?;
        }
        if rng.one_in(6) {
            return Ok(());
        }
        self.ledger.lock().begin(version);
        let committed = write.commit();
        let count = self.machine.tap.count();
        if there(committed)?.is_some() {
            let mut ledger = self.ledger.lock();
            ledger.end(version);
            ledger.returned.push((count, version));
        }
        Ok(())
    }

    fn work(&self, rng: &mut Rng) -> Result<(), String> {
        let who = Caller::root();
        let name = rng.below(NAMES.len() as u64) as usize;
        let Some(attr) = there(self.fs.lookup(ROOT, NAMES[name]))? else {
            return there(self.make(name)).map(drop);
        };
        let ino = attr.ino;
        match rng.below(12) {
            0..=4 => self.bring(ino, rng),
            5..=6 => (0..3).try_for_each(|_| self.read(ino)),
            7..=8 => {
                let version = self.ledger.lock().add((ino, attr.generation), true);
                self.ledger.lock().begin(version);
                if there(self.fs.truncate(&who, ino, 0))?.is_some() {
                    self.ledger.lock().end(version);
                }
                Ok(())
            }
            9 => {
                self.rename(&[(name, To::Nothing)], |who| {
                    self.fs.unlink(who, ROOT, NAMES[name])
                })?;
                there(self.make(name)).map(drop)
            }
            10 => {
                let [first, second] = NAMES;
                self.rename(&[(0, To::Nothing), (1, To::Some)], |who| {
                    self.fs.rename(who, ROOT, first, ROOT, second, 0)
                })
            }
            _ => match rng.one_in(2) {
                true => self.fs.tick().map_err(|e| e.to_string()),
                false => there(self.fs.fsync_inode(ino, true)).map(drop),
            },
        }
    }
}

/// What there is after a cut at this write.
fn left(fs: &FileSystem, ledger: &Ledger, number: usize) -> Result<(), String> {
    let returned = || ledger.returned.iter().filter(|(count, _)| *count <= number);
    let began = |version: &u64| ledger.events[*version as usize].began;
    let durable = match number {
        // Nothing was cut.
        usize::MAX => ledger.now,
        _ => returned()
            .map(|(_, version)| began(version))
            .max()
            .unwrap_or(0),
    };
    let mut named = Vec::new();
    for (place, name) in NAMES.into_iter().enumerate() {
        let found = there(fs.lookup(ROOT, name))?;
        let key = found.as_ref().map(|attr| (attr.ino, attr.generation));
        ledger.explain_name(place, key, durable)?;
        let Some(attr) = found else {
            continue;
        };
        if (attr.mode, attr.nlink) != (MODE, 1) || named.contains(&attr.ino) {
            return Err(format!(
                "{name:?} has mode {:o}, {} links, and may be there twice",
                attr.mode, attr.nlink
            ));
        }
        named.push(attr.ino);
        let (file, bytes) = all_of(fs, attr.ino).map_err(|e| e.to_string())?;
        let durable = returned().map(|(_, version)| &ledger.events[*version as usize]);
        let durable = durable.filter(|event| event.file == file);
        let floor = durable.map(|event| event.began).max().unwrap_or(0);
        ledger.explain(file, &bytes, floor)?;
    }
    Ok(())
}

/// One run; an error says what was not as it must be.
pub fn run(seed: u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let mut shape = Shape::of_two_threads(seed);
    shape.tight = rng.one_in(3);
    let machine = Machine::new(&Image::format(&shape)?, seed);
    let text = |error: Error| error.to_string();
    let ledger = sched::run("atomic files", seed, &machine.clock, || {
        let fs = machine.open().map_err(text)?;
        let world = World {
            fs: &fs,
            machine: &machine,
            ledger: Mutex::new(rank::LEDGER, Ledger::default()),
        };
        (0..NAMES.len())
            .try_for_each(|name| world.make(name))
            .map_err(text)?;
        fs.sync().map_err(text)?;
        machine.tap.collect(true);
        let worked = thread::parallel(TASKS, |me| {
            let mut rng = Rng::new(seed ^ (me as u64 + 1) << 32);
            (0..STEPS).try_for_each(|_| world.work(&mut rng))
        });
        machine.tap.collect(false);
        worked.into_iter().collect::<Result<(), String>>()?;
        let ledger = world.ledger.into_inner();
        left(&fs, &ledger, usize::MAX)?;
        fs.close().map_err(text)?;
        Ok::<_, String>(ledger)
    })?;
    machine.fsck()?;
    let points = machine.tap.take();
    if points.is_empty() {
        return Ok(());
    }
    let mut cuts: Vec<usize> = (0..CUTS)
        .map(|_| rng.below(points.len() as u64) as usize)
        .collect();
    if !ledger.returned.is_empty() {
        let after = (0..CUTS_AFTER).map(|_| rng.pick(&ledger.returned).0);
        cuts.extend(after.filter(|cut| *cut < points.len()));
    }
    for number in cuts {
        let classes = [Survival::None, Survival::Subset, Survival::Mixed];
        let survival = *rng.pick(&classes);
        let crashed = points[number].crash(survival, &mut Rng::new(mixed(seed, number as u64)));
        let machine = Machine::after(&shape, crashed, machine.now_ns());
        let fs = machine.open().map_err(text)?;
        left(&fs, &ledger, number).map_err(|what| {
            format!(
                "cut at write {number} of {}, {survival:?}: {what}",
                points.len()
            )
        })?;
        fs.close().map_err(text)?;
        drop(fs);
        machine.fsck()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cut could bring back a name that had gone before a commit that was durable, or take one that was there: contents alone were looked at.
    #[test]
    fn a_name_is_where_what_is_durable_left_it() {
        let mut ledger = Ledger::default();
        let key = |number| (Ino { 0: number }, 1);
        let made = ledger.begin_naming(&[(0, To::This(key(5)))]);
        ledger.end_naming(made, true);
        let unlinked = ledger.begin_naming(&[(0, To::Nothing)]);
        assert!(ledger.explain_name(0, Some(key(5)), ledger.now).is_ok());
        assert!(ledger.explain_name(0, None, ledger.now).is_ok());
        assert!(ledger.explain_name(0, Some(key(6)), ledger.now).is_err());
        assert!(ledger.explain_name(1, Some(key(5)), ledger.now).is_err());
        ledger.end_naming(unlinked, true);
        assert!(ledger.explain_name(0, Some(key(5)), ledger.now).is_err());
        assert!(ledger.explain_name(0, Some(key(5)), ledger.now - 1).is_ok());
        let renamed = ledger.begin_naming(&[(0, To::Some)]);
        ledger.end_naming(renamed, false);
        assert!(ledger.explain_name(0, Some(key(5)), ledger.now).is_err());
    }
}
