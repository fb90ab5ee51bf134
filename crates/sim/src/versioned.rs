//! Transactions that each bring one version of everything: content, size, mode, time of modification, an extended attribute, a name, and a
//! file that takes another's place; and single calls that look at one of these at a time.
//!
//! What holds: a call that looks later, at whatever it looks, shows no older version than one before it did, or than a commit that
//! has returned; what one call shows is of one version. After a power cut everything is of one version, no older than the newest whose durable
//! commit had returned.

use crate::explore::mixed;
use crate::world::{Image, Machine, Shape, Tap};
use base::atomic::{AtomicU64, Ordering};
use base::clock::Timestamp;
use base::rng::Rng;
use base::sync::{Mutex, rank};
use base::{sched, thread};
use device::sim::Survival;
use fs::{Caller, Error, FileSystem, Ino, ROOT, SetAttr, SetTime, Transaction};

const TASKS: usize = 3;
/// What each thread does so often; all of them together reach no version that the mode cannot tell.
const STEPS: u64 = 14;
const _: () = assert!(TASKS as u64 * STEPS < 0o777);
/// Cuts at the first write after a durable commit has returned, and others.
const CUTS_AFTER: usize = 3;
const CUTS: usize = 2;
const ATTRIBUTE: &[u8] = b"user.version";

struct World<'m> {
    body: Ino,
    dir: Ino,
    /// The newest version that anybody was shown, or whose commit has returned.
    known: AtomicU64,
    /// Crash points there were when durable commits returned, and their versions.
    returned: Mutex<Vec<(usize, u64)>>,
    tap: &'m Tap,
}

/// A version's bytes: its number, and as many of its own as make sizes go up and down.
fn bytes_of(version: u64) -> Vec<u8> {
    let len = 8 + (version * 2711 % 9000) as usize;
    let mut bytes = vec![version as u8; len];
    bytes[..8].copy_from_slice(&version.to_le_bytes());
    bytes
}

fn version_of(bytes: &[u8]) -> Result<u64, String> {
    let number = bytes.first_chunk().map(|head| u64::from_le_bytes(*head));
    match number {
        Some(version) if bytes == bytes_of(version) => Ok(version),
        found => Err(format!(
            "{} bytes that begin as version {found:?} are of none",
            bytes.len()
        )),
    }
}

fn name_of(version: u64) -> Vec<u8> {
    format!("version {version}").into_bytes()
}

/// Brings everything to a version.
fn stage(tx: &mut Transaction<'_>, world: (Ino, Ino), version: u64) -> Result<(), Error> {
    let (body, dir) = world;
    let bytes = bytes_of(version);
    tx.truncate(body, bytes.len() as u64)?;
    tx.write(body, 0, &bytes)?;
    let marks = SetAttr {
        mode: Some(version as u32),
        mtime: Some(SetTime::At(Timestamp::new(version as i64, 0))),
        ..SetAttr::default()
    };
    tx.setattr(body, &marks)?;
    tx.setxattr(body, ATTRIBUTE, &version.to_le_bytes(), 0)?;
    match version {
        0 => drop(tx.create(dir, &name_of(0), 0o644)?),
        _ => tx.rename(dir, &name_of(version - 1), dir, &name_of(version), 0)?,
    }
    let next = tx.create(ROOT, b"next", 0o600)?;
    tx.write(next, 0, &bytes)?;
    tx.rename(ROOT, b"next", ROOT, b"current", 0)
}

fn all_of(fs: &FileSystem, ino: Ino) -> Result<Vec<u8>, Error> {
    let file = fs.open_file(ino, libc::O_RDONLY)?;
    let mut bytes = vec![0; 16 << 10];
    let len = fs.read(&file, 0, &mut bytes)?;
    bytes.truncate(len);
    Ok(bytes)
}

impl World<'_> {
    fn known(&self) -> u64 {
        self.known.load(Ordering::SeqCst)
    }

    fn know(&self, version: u64) {
        self.known.fetch_max(version, Ordering::SeqCst);
    }

    /// One look at one thing by a single call; says what was not as it must be.
    fn look(&self, fs: &FileSystem, what: u64) -> Result<(), String> {
        let before = self.known();
        let text = |error: Error| error.to_string();
        let seen = match what {
            0 => version_of(&all_of(fs, self.body).map_err(text)?)?,
            1 => {
                let attr = fs.getattr(self.body).map_err(text)?;
                let version = attr.mtime.sec() as u64;
                let found = (u64::from(attr.mode & 0o777), attr.size);
                if found != (version, bytes_of(version).len() as u64) {
                    return Err(format!("mode and size {found:?} with time {version}"));
                }
                version
            }
            2 => {
                let value = fs.getxattr(self.body, ATTRIBUTE).map_err(text)?;
                u64::from_le_bytes(value.try_into().map_err(|_| "a value of another length")?)
            }
            3 => match before.checked_sub(1) {
                // An older name must not be there any more.
                Some(old) => match fs.lookup(self.dir, &name_of(old)) {
                    Err(Error::NotFound) => before,
                    found => return Err(format!("after version {before}: {found:?}")),
                },
                None => before,
            },
            _ => {
                let ino = fs.lookup(ROOT, b"current").map_err(text)?.ino;
                match all_of(fs, ino) {
                    Ok(bytes) => version_of(&bytes)?,
                    // It has been replaced since.
                    Err(Error::Stale(_) | Error::NotFound) => before,
                    Err(error) => return Err(text(error)),
                }
            }
        };
        self.know(seen);
        match seen >= before {
            true => Ok(()),
            false => Err(format!(
                "look {what} shows version {seen} after {before} was seen"
            )),
        }
    }

    fn bring(&self, fs: &FileSystem, durable: bool) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let mut tx = fs.transaction(&Caller::root()).map_err(text)?;
        let version = (|| {
            let mut word = [0; 8];
            tx.read(self.body, 0, &mut word)?;
            let version = u64::from_le_bytes(word) + 1;
            stage(&mut tx, (self.body, self.dir), version)?;
            Ok(version)
        })();
        let done = version.and_then(|version| {
            match durable {
                true => tx.commit()?,
                false => tx.commit_relaxed()?,
            }
            Ok(version)
        });
        match done {
            Ok(version) => {
                self.know(version);
                if durable {
                    let count = self.tap.count();
                    self.returned.lock().push((count, version));
                }
                Ok(())
            }
            // What was looked up in two steps may be gone in between.
            Err(Error::Conflict(_) | Error::Stale(_) | Error::NotFound) => Ok(()),
            Err(error) => Err(text(error)),
        }
    }

    fn work(&self, fs: &FileSystem, rng: &mut Rng, me: u64, step: u64) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let who = Caller::root();
        match rng.below(10) {
            0..=2 => self.bring(fs, rng.one_in(2)),
            3..=6 => (0..3).try_for_each(|_| self.look(fs, rng.below(5))),
            7 => {
                // The same directory, the same inode, by single calls.
                let name = format!("of {me} at {step}").into_bytes();
                let own = format!("user.of {me}").into_bytes();
                let value = step.to_le_bytes();
                fs.mknod(&who, self.dir, &name, libc::S_IFREG | 0o600, 0)
                    .and_then(|_| fs.setxattr(&who, self.body, &own, &value, 0))
                    .and_then(|()| fs.unlink(&who, self.dir, &name))
                    .map_err(text)
            }
            8 => fs.tick().map_err(text),
            _ => {
                let file = fs.open_file(self.body, libc::O_RDWR).map_err(text)?;
                fs.fsync(&file, rng.one_in(2)).map_err(text)
            }
        }
    }
}

/// After a cut: all of one version.
fn found(fs: &FileSystem, body: Ino, dir: Ino) -> Result<u64, String> {
    let text = |error: Error| error.to_string();
    let version = version_of(&all_of(fs, body).map_err(text)?)?;
    let current = fs.lookup(ROOT, b"current").map_err(text)?.ino;
    let replaced = version_of(&all_of(fs, current).map_err(text)?)?;
    let attr = fs.getattr(body).map_err(text)?;
    let marks = (attr.mtime.sec() as u64, u64::from(attr.mode & 0o777));
    let value = fs.getxattr(body, ATTRIBUTE).map_err(text)?;
    let mut names = Vec::new();
    fs.readdir(dir, 0, &mut |entry| {
        if entry.name.starts_with(b"version") {
            names.push(entry.name.to_vec());
        }
        true
    })
    .map_err(text)?;
    let whole = replaced == version
        && marks == (version, version)
        && value == version.to_le_bytes()
        && names == [name_of(version)];
    match whole {
        true => Ok(version),
        false => Err(format!(
            "content {version}, replaced file {replaced}, time and mode {marks:?}, attribute {value:?}, names {names:?}"
        )),
    }
}

/// One run; an error says what was not as it must be.
pub fn run(seed: u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let shape = Shape::of_two_threads(seed);
    let machine = Machine::new(&Image::format(&shape)?, seed);
    let text = |error: Error| error.to_string();
    let (body, dir, mut returned) = sched::run("versions", seed, &machine.clock, || {
        let fs = machine.open().map_err(text)?;
        let who = Caller::root();
        let make = |tx: &mut Transaction<'_>| {
            let body = tx.create(ROOT, b"body", 0o644)?;
            let dir = tx.mkdir(ROOT, b"dir", 0o755)?;
            tx.create(ROOT, b"current", 0o644)?;
            stage(tx, (body, dir), 0)?;
            Ok((body, dir))
        };
        let (body, dir) = fs.transact(&who, make).map_err(text)?;
        let world = World {
            body,
            dir,
            known: AtomicU64::new(0),
            returned: Mutex::new(rank::LEAF, Vec::new()),
            tap: &machine.tap,
        };
        machine.tap.collect(true);
        let worked = thread::parallel(TASKS, |me| {
            let mut rng = Rng::new(seed ^ (me as u64 + 1) << 32);
            (0..STEPS).try_for_each(|step| world.work(&fs, &mut rng, me as u64, step))
        });
        machine.tap.collect(false);
        worked.into_iter().collect::<Result<(), String>>()?;
        (0..5).try_for_each(|what| world.look(&fs, what))?;
        found(&fs, body, dir)?;
        fs.close().map_err(text)?;
        Ok::<_, String>((body, dir, world.returned.into_inner()))
    })?;
    machine.fsck()?;
    let points = machine.tap.take();
    returned.sort_unstable();
    let mut cuts: Vec<usize> = (0..CUTS)
        .filter(|_| !points.is_empty())
        .map(|_| rng.below(points.len() as u64) as usize)
        .collect();
    let after = |_| (!returned.is_empty()).then(|| rng.pick(&returned).0);
    let after: Vec<usize> = (0..CUTS_AFTER).filter_map(after).collect();
    cuts.extend(after.into_iter().filter(|cut| *cut < points.len()));
    for number in cuts {
        let classes = [Survival::None, Survival::Subset, Survival::Mixed];
        let survival = *rng.pick(&classes);
        let salt = mixed(seed, number as u64);
        let crashed = points[number].crash(survival, &mut Rng::new(salt));
        let machine = Machine::after(&shape, crashed, machine.now_ns());
        let fs = machine.open().map_err(text)?;
        let place = |what| {
            format!(
                "cut at write {number} of {}, {survival:?}: {what}",
                points.len()
            )
        };
        let version = found(&fs, body, dir).map_err(place)?;
        let before = returned.iter().filter(|(count, _)| *count <= number);
        let durable = before.map(|(_, version)| *version).max().unwrap_or(0);
        if version < durable {
            let what = format!("version {version}, where {durable} was durable");
            return Err(place(what));
        }
        fs.close().map_err(text)?;
        drop(fs);
        machine.fsck()?;
    }
    Ok(())
}
