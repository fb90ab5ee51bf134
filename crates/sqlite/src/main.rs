//! SQLite on Sheaf, for tests and measurements: see the library of this crate.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use base::clock::Clock;
use clap::{Parser, Subcommand, ValueEnum};
use sqlite::database::{Database, Journal};
use sqlite::ledger::Ledger;
use sqlite::{Fallible, kills, served};

#[derive(Parser)]
#[command(
    name = "sheaf-sqlite",
    about = "SQLite on Sheaf, for tests and measurements"
)]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Serve the file system in an image until it is unmounted
    Serve { image: PathBuf, at: PathBuf },
    /// Add rows to a ledger for ever, and print the number of each that is durable
    Fill { file: PathBuf },
    /// Kill who fills a ledger, and every other time the daemon below it
    Kills {
        /// How often
        #[arg(long, default_value_t = 200)]
        runs: u32,
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Time transactions of one row in a new database; prints how many there were, nanoseconds, and how many there were with
    /// those before, which are not timed
    Rows {
        file: PathBuf,
        #[arg(long, value_enum)]
        journal: JournalName,
        #[arg(long, default_value_t = 2000)]
        milliseconds: u64,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum JournalName {
    Rollback,
    Wal,
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Task::Serve { image, at } => served::serve(&image, &at),
        Task::Fill { file } => fill(&file),
        Task::Kills { runs, seed } => kill(runs, seed),
        Task::Rows {
            file,
            journal,
            milliseconds,
        } => rows(&file, journal, Duration::from_millis(milliseconds)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("sheaf-sqlite: {message}");
            ExitCode::FAILURE
        }
    }
}

fn fill(file: &std::path::Path) -> Fallible<()> {
    let ledger = Ledger::open(file, Journal::Rollback)?;
    let mut out = std::io::stdout().lock();
    ledger.fill(|number| {
        let told = writeln!(out, "{number}").and_then(|()| out.flush());
        told.map_err(|error| error.to_string())
    })
}

fn kill(runs: u32, seed: u64) -> Fallible<()> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let outcome = kills::run(&kills::this_program()?, folder.path(), runs, seed)?;
    println!(
        "{} kills, {} rows durable before them, all there; {} transactions were durable and not told; {} atomic writes",
        outcome.runs, outcome.rows, outcome.untold, outcome.commits
    );
    Ok(())
}

/// Bytes of a row.
const ROW: &[u8] = &[42; 100];
/// Rows before those that are timed.
const FIRST: i64 = 200;

/// Transactions that are timed, and how long they took.
struct Timed {
    count: i64,
    ns: u64,
    /// With those before.
    all: i64,
}

fn rows(file: &std::path::Path, journal: JournalName, time: Duration) -> Fallible<()> {
    let Timed { count, ns, all } = timed(file, journal, time)?;
    println!("{count} {ns} {all}");
    Ok(())
}

fn timed(file: &std::path::Path, journal: JournalName, time: Duration) -> Fallible<Timed> {
    let journal = match journal {
        JournalName::Rollback => Journal::Rollback,
        JournalName::Wal => Journal::Wal,
    };
    let database = Database::open(file, journal)?;
    database.execute("CREATE TABLE line(number INTEGER PRIMARY KEY, bytes BLOB)")?;
    let mut line = database.prepare("INSERT INTO line VALUES(?1, ?2)")?;
    line.bind_bytes(2, ROW)?;
    let clock = Clock::real();
    let (mut number, mut start) = (0, clock.monotonic_ns());
    loop {
        number += 1;
        line.bind(1, number)?;
        line.run()?;
        let now = clock.monotonic_ns();
        if number == FIRST {
            start = now;
        }
        if number > FIRST && now - start >= time.as_nanos() as u64 {
            return Ok(Timed {
                count: number - FIRST,
                ns: now - start,
                all: number,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_transactions_are_told_beside_those_that_are_timed() {
        let home = tempfile::tempdir().unwrap();
        for journal in [JournalName::Rollback, JournalName::Wal] {
            let file = home.path().join(format!("{}.db", journal as u8));
            let timed = timed(&file, journal, Duration::from_millis(1)).unwrap();
            assert!(timed.count > 0 && timed.ns >= 1_000_000);
            assert_eq!(timed.all, timed.count + FIRST);
            let database = Database::open(&file, Journal::Rollback).unwrap();
            assert_eq!(database.number("SELECT count(*) FROM line"), Ok(timed.all));
        }
    }
}
