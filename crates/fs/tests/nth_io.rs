//! Every I/O of a scripted day in the life of a file system fails: once, and from there on.
//!
//! Whatever fails, whoever asked is told by an error number of the devices' or of a file system
//! that has turned read-only; nothing panics; and after the machine has restarted with healthy
//! devices fsck finds nothing and everything is there that was synced when it was said to be.
//!
//! `SHEAF_FULL=1` makes every single I/O fail; without it, a part of them that is spread evenly.

#[path = "names/world.rs"]
mod world;

use base::canary::Canary;
use base::rng::Rng;
use device::sim::{PowerSwitch, SimDevice, Times};
use fs::{Caller, Error, FileSystem, OpenFile, ROOT, SetAttr};
use std::collections::BTreeMap;
use std::sync::Arc;
use world::{World, list};

const SECTOR: usize = 512;

/// What a name may refer to: contents, oldest first; `None`: nothing.
#[derive(Debug)]
struct Entry {
    states: Vec<Option<Vec<u8>>>,
    /// Every operation since the last sync worked, so the last state is what programs see.
    certain: bool,
}

impl Entry {
    fn now(&self) -> Option<&Vec<u8>> {
        self.states.last().and_then(Option::as_ref)
    }

    fn allows(&self, found: Option<&[u8]>) -> Result<(), String> {
        let Some(found) = found else {
            return match self.states.contains(&None) {
                true => Ok(()),
                false => Err("is gone".into()),
            };
        };
        let known: Vec<&Vec<u8>> = self.states.iter().flatten().collect();
        let (least, most) = (
            known.iter().map(|s| s.len()).min().unwrap_or(usize::MAX),
            known.iter().map(|s| s.len()).max().unwrap_or(0),
        );
        if !(least..=most).contains(&found.len()) {
            return Err(format!("has {} bytes, not {least} to {most}", found.len()));
        }
        for (i, sector) in found.chunks(SECTOR).enumerate() {
            let byte = |state: &[u8], at| state.get(at).copied().unwrap_or(0);
            let fits = |state: &&Vec<u8>| {
                (0..sector.len()).all(|j| sector[j] == byte(state, i * SECTOR + j))
            };
            if !known.iter().any(fits) {
                return Err(format!("sector {i} holds what was never written there"));
            }
        }
        Ok(())
    }
}

/// The script as it runs.
struct Day {
    fs: Arc<FileSystem>,
    names: BTreeMap<&'static str, Entry>,
    failures: usize,
    /// Of what fails, for messages.
    context: String,
}

impl Day {
    fn new(fs: Arc<FileSystem>) -> Day {
        Day {
            fs,
            names: BTreeMap::new(),
            failures: 0,
            context: String::new(),
        }
    }

    /// Notes how an operation ended. After a failure, what depended on it may fail too.
    fn told<T>(&mut self, what: &str, outcome: Result<T, Error>) -> Option<T> {
        match outcome {
            Ok(value) => Some(value),
            Err(error) => {
                let number = error.errno();
                let clean = [libc::EIO, libc::EROFS].contains(&number);
                let follows = self.failures > 0 && [libc::ENOENT, libc::EEXIST].contains(&number);
                assert!(clean || follows, "{what}: {error} ({number})");
                if std::env::var("SHEAF_TRACE").is_ok() {
                    println!("{what}: {error}");
                }
                self.failures += 1;
                None
            }
        }
    }

    fn entry(&mut self, name: &'static str) -> &mut Entry {
        self.names.entry(name).or_insert_with(|| Entry {
            states: vec![None],
            certain: true,
        })
    }

    /// An operation that would make `name` refer to `state`.
    fn change<T>(
        &mut self,
        name: &'static str,
        state: Option<Vec<u8>>,
        operation: impl FnOnce(&FileSystem) -> Result<T, Error>,
    ) {
        let outcome = operation(&self.fs);
        let ok = self.told(name, outcome).is_some();
        let entry = self.entry(name);
        entry.states.push(state);
        entry.certain &= ok;
    }

    fn create(&mut self, name: &'static str) {
        self.change(name, Some(Vec::new()), |fs| {
            let (dir, last) = place(fs, name)?;
            fs.create(&Caller::root(), dir, last, 0o644, libc::O_RDWR)
        });
    }

    fn write(&mut self, name: &'static str, offset: usize, byte: u8, len: usize) {
        let mut content = self.entry(name).now().cloned().unwrap_or_default();
        content.resize(content.len().max(offset + len), 0);
        content[offset..offset + len].fill(byte);
        self.change(name, Some(content), |fs| {
            let file = fs.open_file(fs.resolve(name.as_bytes())?.ino, libc::O_RDWR)?;
            let mut done = 0;
            while done < len {
                done += fs.write(&file, (offset + done) as u64, &vec![byte; len - done])?;
            }
            Ok(())
        });
    }

    fn truncate(&mut self, name: &'static str, size: usize) {
        let mut content = self.entry(name).now().cloned().unwrap_or_default();
        content.resize(size, 0);
        // What is cut may also be what was there before a write that failed.
        let entry = self.entry(name);
        let mut cut: Vec<_> = entry.states.iter().flatten().cloned().collect();
        cut.iter_mut().for_each(|state| state.resize(size, 0));
        entry.states.extend(cut.into_iter().map(Some));
        self.change(name, Some(content), |fs| {
            let set = SetAttr {
                size: Some(size as u64),
                ..SetAttr::default()
            };
            fs.setattr(&Caller::root(), fs.resolve(name.as_bytes())?.ino, &set)
        });
    }

    fn unlink(&mut self, name: &'static str) {
        self.change(name, None, |fs| {
            let (dir, last) = place(fs, name)?;
            fs.unlink(&Caller::root(), dir, last)
        });
    }

    fn rename(&mut self, old: &'static str, new: &'static str) {
        let moved = self.entry(old).now().cloned();
        let certain = self.entry(old).certain;
        self.change(new, moved, |fs| {
            let (from, name) = place(fs, old)?;
            let (to, new_name) = place(fs, new)?;
            fs.rename(&Caller::root(), from, name, to, new_name, 0)
        });
        let ok = self.names[new].certain;
        // What the old name may have held, the new one may hold now.
        let held: Vec<_> = self.names[old].states.clone();
        let target = self.entry(new);
        target.certain &= certain;
        let last = target.states.pop().expect("pushed above");
        target.states.extend(held.into_iter().flatten().map(Some));
        target.states.push(last);
        let source = self.entry(old);
        source.states.push(None);
        source.certain &= ok;
    }

    fn fsync(&mut self, name: &'static str) {
        let sync = |fs: &FileSystem| {
            let file = fs.open_file(fs.resolve(name.as_bytes())?.ino, libc::O_RDONLY)?;
            fsync(fs, &file)
        };
        let outcome = sync(&self.fs);
        if self.told(name, outcome).is_some() {
            self.settle(name);
        }
    }

    /// Overwrites two pages of a file twice and syncs it each time; the second sync takes no commit, but a flush: one page
    /// alone would be durable by its write.
    fn overwrite(&mut self, name: &'static str, pages: [usize; 2], byte: u8) {
        let mut content = self.entry(name).now().cloned().unwrap_or_default();
        let places = pages.map(|page| page * 4096..(page + 1) * 4096);
        for first in 0..4 {
            let place = places[first % 2].clone();
            content[place].fill(if first < 2 { 0xEE } else { byte });
            self.entry(name).states.push(Some(content.clone()));
        }
        let failures = self.failures;
        self.change(name, Some(content), |fs| {
            let file = fs.open_file(fs.resolve(name.as_bytes())?.ino, libc::O_RDWR)?;
            for byte in [0xEE, byte] {
                for place in &places {
                    fs.write(&file, place.start as u64, &[byte; 4096])?;
                }
                fsync(fs, &file)?;
            }
            Ok(())
        });
        if self.failures == failures {
            self.settle(name);
        }
    }

    fn settle(&mut self, name: &'static str) {
        let entry = self.entry(name);
        if entry.certain {
            entry.states.drain(..entry.states.len() - 1);
        }
    }

    fn sync(&mut self) {
        let outcome = self.fs.sync();
        if self.told("sync", outcome).is_some() {
            self.settle_all();
        }
    }

    fn settle_all(&mut self) {
        let names: Vec<_> = self.names.keys().copied().collect();
        names.into_iter().for_each(|name| self.settle(name));
    }

    /// Reads everything, right after an open; what can be read is right, and is durable.
    fn look(&mut self) {
        let names: Vec<_> = self.names.keys().copied().collect();
        for name in names {
            let outcome = match content(&self.fs, name) {
                Err(Error::NotFound) => Ok(None),
                other => other.map(Some),
            };
            let Some(found) = self.told(name, outcome) else {
                self.entry(name).certain = false;
                continue;
            };
            if let Err(what) = self.names[name].allows(found.as_deref()) {
                panic!("{} {name} {what}", self.context);
            }
            let entry = self.entry(name);
            (entry.states, entry.certain) = (vec![found], true);
        }
    }
}

/// Syncs an open file. When that fails, so does every later one with the same handle.
fn fsync(fs: &FileSystem, file: &OpenFile) -> Result<(), Error> {
    let outcome = fs.fsync(file, false);
    if outcome.is_err() {
        let again = fs.fsync(file, false);
        assert!(again.is_err(), "fsync forgets that it failed: {outcome:?}");
    }
    outcome
}

/// The directory and the last name of a path.
fn place<'a>(fs: &FileSystem, path: &'a str) -> Result<(fs::Ino, &'a [u8]), Error> {
    match path.rsplit_once('/') {
        Some((dir, last)) => Ok((fs.resolve(dir.as_bytes())?.ino, last.as_bytes())),
        None => Ok((ROOT, path.as_bytes())),
    }
}

fn content(fs: &FileSystem, name: &str) -> Result<Vec<u8>, Error> {
    let attr = fs.resolve(name.as_bytes())?;
    let file = fs.open_file(attr.ino, libc::O_RDONLY)?;
    let mut bytes = vec![0; attr.size as usize];
    let mut done = 0;
    while done < bytes.len() {
        match fs.read(&file, done as u64, &mut bytes[done..])? {
            0 => break,
            n => done += n,
        }
    }
    bytes.truncate(done);
    Ok(bytes)
}

const SMALL: [&str; 6] = ["d/s0", "d/s1", "d/s2", "d/s3", "d/s4", "d/s5"];

fn first_half(day: &mut Day) {
    let made = day.fs.mkdir(&Caller::root(), ROOT, b"d", 0o755);
    day.told("mkdir", made);
    for (name, byte, len) in [
        ("inline", 1, 700),
        ("pages", 2, 9000),
        ("many", 3, 200_000),
        ("target", 4, 5000),
    ] {
        day.create(name);
        day.write(name, 0, byte, len);
    }
    day.fsync("inline");
    day.fsync("many");
    let root = day.fs.fsync_inode(ROOT, false);
    day.told("fsync of a directory", root);
    // Over a file that is there, with content that was never synced.
    day.rename("pages", "target");
    day.fsync("target");
    day.write("many", 50_000, 5, 30_000);
    day.fsync("many");
    day.overwrite("many", [2, 26], 13);
    day.truncate("many", 20_001);
    day.write("many", 100_000, 6, 5000);
    day.fsync("many");
    for name in SMALL {
        day.create(name);
        day.write(name, 0, 7, 3000);
    }
    day.sync();
    let checkpoint = day.fs.store().checkpoint().map_err(Error::from);
    day.told("checkpoint", checkpoint);
    day.unlink("d/s0");
    day.rename("d/s1", "moved");
    let unlinked = day.fs.resolve(b"inline").and_then(|attr| {
        let file = day.fs.open_file(attr.ino, libc::O_RDWR)?;
        Ok((attr.ino, file))
    });
    let held = day.told("open", unlinked);
    day.unlink("inline");
    if let Some((ino, file)) = held {
        let synced = day.fs.write(&file, 0, &[8; 5000]).map(|_| ());
        let synced = synced.and_then(|()| day.fs.fsync(&file, true));
        day.told("fsync of an unlinked file", synced);
        drop(file);
        assert!(day.failures > 0 || day.fs.getattr(ino).is_err());
    }
    let unmounted = day.fs.close();
    if day.told("unmount", unmounted).is_some() {
        day.settle_all();
    }
}

fn second_half(day: &mut Day) {
    day.look();
    day.write("target", 1000, 9, 2000);
    day.fsync("target");
    day.write("moved", 0, 10, 100);
    day.rename("moved", "d/back");
    day.create("late");
    day.write("late", 0, 11, 70_000);
    let ticked = day.fs.tick();
    day.told("write-back", ticked);
    day.sync();
    day.write("late", 4096, 12, 4096);
    day.overwrite("late", [0, 9], 14);
    let checkpoint = day.fs.store().checkpoint().map_err(Error::from);
    day.told("checkpoint", checkpoint);
    // The day ends without an unmount.
    day.fsync("late");
}

/// The whole script, on devices that may fail; what it knows at the end, if it could begin.
fn run(world: &mut World) -> Option<Day> {
    let mut failures = 0;
    let mut open = |world: &World| match world.try_open() {
        Ok(fs) => Some(fs),
        Err(error) => {
            let number = error.errno();
            assert!([libc::EIO, libc::EROFS].contains(&number), "open: {error}");
            failures += 1;
            None
        }
    };
    let mut day = Day::new(open(world)?);
    first_half(&mut day);
    world.devices = world.devices.iter().map(|d| d.reopen()).collect();
    if let Some(fs) = open(world) {
        day.fs = fs;
        second_half(&mut day);
    }
    day.failures += failures;
    Some(day)
}

/// The same array on devices of its own.
fn copy_of(world: &World) -> World {
    let switch = PowerSwitch::new();
    let devices: Vec<Arc<SimDevice>> = world.devices.iter().map(|d| d.fork(&switch)).collect();
    World {
        devices,
        switch,
        clock: world.clock.clone(),
        options: world.options.clone(),
    }
}

fn fail_at(fresh: &World, n: u64, times: Times) {
    let mut world = copy_of(fresh);
    world.switch.fail_after(n, times);
    let day = run(&mut world);
    // Threads share work by chance: there may have been some operations less than there are mostly.
    let struck = world.switch.operations() > n;
    // Without an unmount, and the devices lose what they need not keep.
    world.switch.cut_now();
    world.restart(&mut Rng::new(n));
    let Some(mut day) = day else {
        drop(world.open());
        return;
    };
    assert!(day.failures > 0 || times != Times::Always || !struck);
    day.fs = world.open();
    let known = day.names.keys().filter(|name| !name.contains('/'));
    for (name, _) in list(&day.fs, ROOT, 7) {
        let name = String::from_utf8(name).unwrap();
        assert!(name == "d" || known.clone().any(|k| *k == name), "{name}");
    }
    day.failures = 0;
    day.context = format!("after operation {n} failed {times:?}:");
    day.look();
    assert_eq!(day.failures, 0, "healthy devices fail nothing");
    drop(world.remount(day.fs));
}

/// Makes every `stride`-th operation of the script fail.
fn fail_each(stride: usize) {
    let mut fresh = World::new(2, 64 << 20, 1);
    fresh.options.data.cache_bytes = 512 << 10;
    let mut healthy = copy_of(&fresh);
    let day = run(&mut healthy).expect("healthy devices open");
    assert_eq!(day.failures, 0);
    let count = healthy.switch.operations();
    drop(day);
    for n in (0..count).step_by(stride) {
        fail_at(&fresh, n, Times::Next(1));
        fail_at(&fresh, n, Times::Always);
    }
}

#[test]
fn whatever_io_fails_nothing_synced_is_lost() {
    fail_each(match std::env::var("SHEAF_FULL").as_deref() {
        Ok("1") => 1,
        Err(_) => 3,
        Ok(other) => panic!("SHEAF_FULL is 1 or not set, not {other:?}"),
    });
}

/// The script would notice: each of these breakages makes it fail.
#[test]
fn a_failure_that_is_ignored_is_found() {
    for canary in [
        Canary::FailedWriteIgnored,
        Canary::FailedBatchIgnored,
        Canary::FailedFlushForgotten,
    ] {
        base::canary::plant(Some(canary));
        let survived = std::panic::catch_unwind(|| fail_each(1)).is_ok();
        base::canary::plant(None);
        assert!(!survived, "{} was not found", canary.name());
    }
}
