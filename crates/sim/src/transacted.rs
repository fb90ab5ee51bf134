//! Several threads with transactions and single calls on the same files, in an order that a seed decides, and power cuts at some
//! points of that.
//!
//! What holds at every moment, as a transaction that reads it sees it, and after each cut: what is moved between accounts stays the same in
//! all; two files that are only written together hold the same; a name is in one of two directories, and a file
//! says in which. And each thread finds what it wrote itself, by single calls, into pages that transactions write other parts of.

use crate::explore::mixed;
use crate::world::{Image, Machine, Shape};
use base::rng::Rng;
use base::{sched, thread};
use device::sim::Survival;
use fs::{Caller, Error, FileSystem, Ino, ROOT, Transaction};

const TASKS: usize = 3;
/// What each thread does so often.
const STEPS: u64 = 16;
const ACCOUNTS: u64 = 3;
const START: u64 = 1000;
/// Where in an account its sum is, and, behind that, what threads write by themselves.
const SUM: u64 = 100;
const OWN: u64 = 200;
/// Cuts that are looked at.
const CUTS: usize = 3;

struct Files {
    accounts: Vec<Ino>,
    pair: [Ino; 2],
    dirs: [Ino; 2],
    place: Ino,
}

impl Files {
    fn make(fs: &FileSystem) -> Result<Files, Error> {
        fs.transact(&Caller::root(), |tx| {
            let mut file = |name: &str, bytes: &[u8]| -> Result<Ino, Error> {
                let ino = tx.create(ROOT, name.as_bytes(), 0o644)?;
                tx.write(ino, 0, bytes)?;
                Ok(ino)
            };
            let mut account = vec![0; 5000];
            account[SUM as usize..][..8].copy_from_slice(&START.to_le_bytes());
            let accounts = (0..ACCOUNTS).map(|i| file(&format!("account{i}"), &account));
            let accounts = accounts.collect::<Result<_, _>>()?;
            let pair = [file("left", b"same")?, file("right", b"same")?];
            let place = file("place", &[0])?;
            let dirs = [
                tx.mkdir(ROOT, b"dir0", 0o755)?,
                tx.mkdir(ROOT, b"dir1", 0o755)?,
            ];
            tx.create(dirs[0], b"token", 0o644)?;
            Ok(Files {
                accounts,
                pair,
                dirs,
                place,
            })
        })
    }

    /// What must hold in one transaction's eyes; it commits if these saw one moment.
    fn check(&self, tx: &mut Transaction<'_>) -> Result<Result<(), String>, Error> {
        let mut sum = 0;
        for ino in &self.accounts {
            sum += number(tx, *ino)?;
        }
        let mut pair = [Vec::new(), Vec::new()];
        for (ino, bytes) in self.pair.iter().zip(&mut pair) {
            bytes.resize(tx.getattr(*ino)?.size as usize, 0);
            tx.read(*ino, 0, bytes)?;
        }
        let mut place = [0];
        tx.read(self.place, 0, &mut place)?;
        let there = |tx: &mut Transaction<'_>, dir| match tx.lookup(dir, b"token") {
            Ok(_) => Ok(true),
            Err(Error::NotFound) => Ok(false),
            Err(error) => Err(error),
        };
        let found = [there(tx, self.dirs[0])?, there(tx, self.dirs[1])?];
        Ok(if sum != ACCOUNTS * START {
            Err(format!("the accounts have {sum}"))
        } else if pair[0] != pair[1] {
            Err("two files that are written together differ".into())
        } else if found != [place[0] == 0, place[0] == 1] {
            Err(format!(
                "the name is there: {found:?}, and {} is said",
                place[0]
            ))
        } else {
            Ok(())
        })
    }

    /// Looks at all while others work; false: they are too fast.
    fn look_beside(&self, fs: &FileSystem) -> Result<bool, String> {
        let looked = fs.transact(&Caller::root(), |tx| self.check(tx));
        match looked {
            Ok(found) => found.map(|()| true),
            Err(Error::Conflict(_)) => Ok(false),
            Err(error) => Err(error.to_string()),
        }
    }

    /// The same while nobody else does anything: nothing is in conflict then.
    fn look(&self, fs: &FileSystem) -> Result<(), String> {
        match self.look_beside(fs)? {
            true => Ok(()),
            false => Err("whoever is alone meets a conflict".into()),
        }
    }
}

fn number(tx: &mut Transaction<'_>, ino: Ino) -> Result<u64, Error> {
    let mut word = [0; 8];
    tx.read(ino, SUM, &mut word)?;
    Ok(u64::from_le_bytes(word))
}

/// One run; an error says what was not as it must be.
pub fn run(seed: u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let shape = Shape::of_two_threads(seed);
    let machine = Machine::new(&Image::format(&shape)?, seed);
    let text = |error: Error| error.to_string();
    let files = sched::run("transactions", seed, &machine.clock, || {
        let fs = machine.open().map_err(text)?;
        let files = Files::make(&fs).map_err(text)?;
        fs.sync().map_err(text)?;
        machine.tap.collect(true);
        let worked = thread::parallel(TASKS, |me| {
            let mut rng = Rng::new(seed ^ (me as u64 + 1) << 32);
            let mut own = vec![0; files.accounts.len()];
            (0..STEPS).try_fold(0, |committed, step| {
                let done = work(&fs, &files, &mut rng, me as u64, step, &mut own)?;
                Ok::<_, String>(committed + u64::from(done))
            })
        });
        machine.tap.collect(false);
        let committed = worked.into_iter().sum::<Result<u64, String>>()?;
        // Each of a few threads has most of what it tries.
        if committed == 0 {
            return Err("every transaction meets a conflict".into());
        }
        files.look(&fs)?;
        fs.close().map_err(text)?;
        Ok::<_, String>(files)
    })?;
    machine.fsck()?;
    let points = machine.tap.take();
    for _ in 0..CUTS.min(points.len()) {
        let number = rng.below(points.len() as u64);
        let classes = [
            Survival::None,
            Survival::All,
            Survival::Subset,
            Survival::Mixed,
        ];
        let survival = *rng.pick(&classes);
        let crashed = points[number as usize].crash(survival, &mut Rng::new(mixed(seed, number)));
        let machine = Machine::after(&shape, crashed, machine.now_ns());
        let fs = machine.open().map_err(text)?;
        let found = files.look(&fs);
        found.map_err(|what| {
            format!(
                "cut at I/O {number} of {}, {survival:?}: {what}",
                points.len()
            )
        })?;
        fs.close().map_err(text)?;
        drop(fs);
        machine.fsck()?;
    }
    Ok(())
}

/// One step; whether it was a transaction that has committed.
fn work(
    fs: &FileSystem,
    files: &Files,
    rng: &mut Rng,
    me: u64,
    step: u64,
    own: &mut [u64],
) -> Result<bool, String> {
    let who = Caller::root();
    let done = match rng.below(12) {
        0..=3 => {
            let (from, to) = (rng.below(ACCOUNTS), rng.below(ACCOUNTS));
            let amount = rng.below(50);
            fs.transact(&who, |tx| {
                for (account, amount) in [(from, -(amount as i64)), (to, amount as i64)] {
                    let ino = files.accounts[account as usize];
                    let sum = number(tx, ino)?.wrapping_add_signed(amount);
                    tx.write(ino, SUM, &sum.to_le_bytes())?;
                }
                Ok(())
            })
        }
        4 | 5 => {
            let bytes = vec![(me * STEPS + step) as u8; 1 + rng.below(9000) as usize];
            let mut tx = fs.transaction(&who).map_err(|e| e.to_string())?;
            let staged = files.pair.iter().try_for_each(|ino| {
                tx.truncate(*ino, bytes.len() as u64 / 2)?;
                tx.write(*ino, 0, &bytes)
            });
            staged.and_then(|()| match rng.one_in(2) {
                true => tx.commit(),
                false => tx.commit_relaxed(),
            })
        }
        6 | 7 => fs.transact(&who, |tx| {
            let at = tx.lookup(files.dirs[0], b"token").is_err() as usize;
            let (from, to) = (files.dirs[at], files.dirs[1 - at]);
            tx.rename(from, b"token", to, b"token", 0)?;
            tx.write(files.place, 0, &[1 - at as u8])
        }),
        8..=10 => return own_bytes(fs, files, rng, me, own).map(|()| false),
        _ => match rng.one_in(2) {
            true => return fs.tick().map(|()| false).map_err(|e| e.to_string()),
            false => return files.look_beside(fs),
        },
    };
    match done {
        Ok(()) => Ok(true),
        Err(Error::Conflict(_)) => Ok(false),
        Err(error) => Err(error.to_string()),
    }
}

/// A thread's own bytes in an account are what it wrote last.
fn own_bytes(
    fs: &FileSystem,
    files: &Files,
    rng: &mut Rng,
    me: u64,
    own: &mut [u64],
) -> Result<(), String> {
    let account = rng.below(ACCOUNTS) as usize;
    let sync = rng.one_in(3);
    let go = || -> Result<u64, Error> {
        let file = fs.open_file(files.accounts[account], libc::O_RDWR)?;
        let (mut word, at) = ([0; 8], OWN + 8 * me);
        fs.read(&file, at, &mut word)?;
        let found = u64::from_le_bytes(word);
        fs.write(&file, at, &(own[account] + 1).to_le_bytes())?;
        if sync {
            fs.fsync(&file, true)?;
        }
        Ok(found)
    };
    let (expected, found) = (own[account], go().map_err(|e| e.to_string())?);
    own[account] += 1;
    match found == expected {
        true => Ok(()),
        false => Err(format!(
            "thread {me} finds {found} in account {account}, where it wrote {expected}"
        )),
    }
}
