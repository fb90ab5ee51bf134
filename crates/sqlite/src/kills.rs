//! SIGKILL at random moments: to a process that fills a ledger on a mount, and in every other run to the daemon below it. No row that was
//! told to be durable may be missing, no transaction half there, and nobody may have needed a journal.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use base::clock::Clock;
use base::rng::Rng;

use crate::database::Journal;
use crate::ledger::Ledger;
use crate::served::Served;
use crate::{Fallible, context};

/// When the kill comes, at the latest, after the first row.
const DELAY_MAX_US: u64 = 60_000;
/// A ledger that has become so long makes place for a new one, so that checks stay quick.
const LINES_MAX: i64 = 4000;
/// Damage is looked for after so many kills of the daemon.
const FSCK_EVERY: u32 = 10;

/// What was done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    pub runs: u32,
    /// Rows that were told to be durable before a kill.
    pub rows: u64,
    /// Runs in which a transaction had become durable that nobody was told of.
    pub untold: u32,
    /// Of atomic writes, as far as the daemons told before they were killed.
    pub commits: u64,
}

/// Kills so many times, on a file system that is made in `folder`. `program` is the one of this crate.
///
/// # Errors
/// The first thing that was wrong, with the number of its run.
pub fn run(program: &Path, folder: &Path, runs: u32, seed: u64) -> Fallible<Outcome> {
    let mut served = Served::make(program, folder)?;
    served.mount()?;
    let mut rng = Rng::new(seed);
    let mut outcome = Outcome::default();
    let mut known = 0;
    let mut ledger = 0;
    for run in 0..runs {
        let path = served.at().join(format!("ledger{ledger}"));
        let one = one_run(
            program,
            &mut served,
            &path,
            known,
            run,
            &mut rng,
            &mut outcome,
        );
        known = context(one, format!("run {run}, seed {seed}"))?;
        outcome.runs += 1;
        if known > LINES_MAX {
            context(fs::remove_file(&path), path.display())?;
            (known, ledger) = (0, ledger + 1);
        }
    }
    outcome.commits += served.commits()?;
    served.unmount()?;
    Ok(outcome)
}

/// When names were last made or removed in the folder of a file.
fn names_changed(path: &Path) -> Fallible<(i64, i64)> {
    let folder = path.parent().ok_or("a file without a folder")?;
    let stat = context(fs::metadata(folder), folder.display())?;
    Ok((stat.mtime(), stat.mtime_nsec()))
}

fn one_run(
    program: &Path,
    served: &mut Served,
    path: &Path,
    known: i64,
    run: u32,
    rng: &mut Rng,
    outcome: &mut Outcome,
) -> Fallible<i64> {
    // Made with a journal: a database that is empty cannot do without.
    drop(Ledger::open(path, Journal::Rollback)?);
    let before = (names_changed(path)?, served.commits()?);
    let mut command = Command::new(program);
    command.arg("fill").arg(path);
    let filler = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut filler = context(filler.spawn(), "start who fills")?;
    let out = filler.stdout.take().ok_or("who fills has no output")?;
    let mut lines = BufReader::new(out).lines();
    let mut told = known;
    let number = |line: Result<String, std::io::Error>| -> Fallible<i64> {
        context(context(line, "read")?.parse::<i64>(), "who fills")
    };
    if let Some(line) = lines.next() {
        told = number(line)?;
    }
    let clock = Clock::real();
    let delay = Duration::from_micros(rng.below(DELAY_MAX_US));
    clock.sleep_until(clock.monotonic_ns() + delay.as_nanos() as u64);
    let of_daemon = run % 2 == 1;
    match of_daemon {
        true => {
            outcome.commits += served.commits()?;
            served.kill()?;
        }
        false => context(filler.kill(), "kill who fills")?,
    }
    for line in lines {
        told = number(line)?;
    }
    let ended = context(filler.wait_with_output(), "wait for who fills")?;
    if of_daemon {
        served.clean_up()?;
        if (run / 2).is_multiple_of(FSCK_EVERY) {
            served.check()?;
        }
        served.mount()?;
    } else if served.commits()? < before.1 + (told - known) as u64 {
        return Err("fewer atomic writes were committed than transactions".to_owned());
    }
    if told == known {
        let error = String::from_utf8_lossy(&ended.stderr).into_owned();
        return Err(format!("no row before the kill: {error}"));
    }
    if names_changed(path)? != before.0 {
        return Err("a journal was made".to_owned());
    }
    let last = Ledger::open(path, Journal::Rollback)?.check(known)?;
    if last < told {
        return Err(format!(
            "row {told} was durable; {last} is the last one now"
        ));
    }
    if last > told + 1 {
        return Err(format!(
            "row {last} is there, and {told} the last one told of"
        ));
    }
    outcome.rows += (told - known) as u64;
    outcome.untold += u32::from(last > told);
    Ok(last)
}

/// The program of this crate, when it runs.
pub fn this_program() -> Fallible<PathBuf> {
    context(std::env::current_exe(), "this program")
}
