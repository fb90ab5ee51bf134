//! A database whose rows tell whether any is missing or half there.
//!
//! Row `n` has bytes that follow from `n`, and a total in another table counts rows and bytes. Invariants after each commit:
//! 1. Rows are 1 to the last one, without a gap.
//! 2. The total is that of the rows.

use std::path::Path;

use base::rng::Rng;

use crate::Fallible;
use crate::database::{Database, Journal};

/// Bytes of a row at most: some take pages of their own.
const ROW_MAX: u64 = 9000;

fn row(number: i64) -> Vec<u8> {
    let mut rng = Rng::new(number as u64);
    // Most are small.
    let most = if rng.one_in(8) { ROW_MAX } else { 200 };
    let mut bytes = vec![0; rng.range(1, most) as usize];
    rng.fill(&mut bytes);
    bytes
}

/// See the module's head.
#[derive(Debug)]
pub struct Ledger(Database);

impl Ledger {
    /// Opens one, and makes it if there is none.
    pub fn open(path: &Path, journal: Journal) -> Fallible<Ledger> {
        let database = Database::open(path, journal)?;
        database.execute(
            "BEGIN IMMEDIATE;
             CREATE TABLE IF NOT EXISTS line(number INTEGER PRIMARY KEY, bytes BLOB);
             CREATE TABLE IF NOT EXISTS total(lines INTEGER, bytes INTEGER);
             INSERT INTO total SELECT 0, 0 WHERE NOT EXISTS (SELECT 1 FROM total);
             COMMIT",
        )?;
        Ok(Ledger(database))
    }

    /// Adds rows for ever, each by a transaction of its own, and tells of each that is durable.
    pub fn fill(&self, mut tell: impl FnMut(i64) -> Fallible<()>) -> Fallible<()> {
        let mut line = self.0.prepare("INSERT INTO line VALUES(?1, ?2)")?;
        let mut total = self
            .0
            .prepare("UPDATE total SET lines = lines + 1, bytes = bytes + ?1")?;
        let mut number = self.lines()?;
        loop {
            number += 1;
            let bytes = row(number);
            self.0.execute("BEGIN IMMEDIATE")?;
            line.bind(1, number)?;
            line.bind_bytes(2, &bytes)?;
            line.run()?;
            total.bind(1, bytes.len() as i64)?;
            total.run()?;
            self.0.execute("COMMIT")?;
            tell(number)?;
        }
    }

    pub fn lines(&self) -> Fallible<i64> {
        self.0.number("SELECT lines FROM total")
    }

    /// Looks at everything, with SQLite's own check first; returns the number of the last row. Rows up to `known` are not read again.
    pub fn check(&self, known: i64) -> Fallible<i64> {
        let verdict = self.0.text("PRAGMA integrity_check")?;
        if verdict != "ok" {
            return Err(format!("integrity_check: {verdict}"));
        }
        let last = self.lines()?;
        let count = self.0.number("SELECT count(*) FROM line")?;
        let greatest = self.0.number("SELECT ifnull(max(number), 0) FROM line")?;
        let bytes = self
            .0
            .number("SELECT ifnull(sum(length(bytes)), 0) FROM line")?;
        let told = self.0.number("SELECT bytes FROM total")?;
        if (count, greatest, bytes) != (last, last, told) {
            return Err(format!(
                "{count} rows up to {greatest} with {bytes} bytes; the total says {last} rows, {told} bytes"
            ));
        }
        let mut lines = self
            .0
            .prepare("SELECT number, bytes FROM line WHERE number > ?1 ORDER BY number")?;
        lines.bind(1, known)?;
        let mut next = known + 1;
        while lines.step()? {
            let number = lines.column(0);
            if number != next || lines.column_bytes(1) != row(number) {
                return Err(format!(
                    "row {number} is not what it was, or {next} is missing"
                ));
            }
            next += 1;
        }
        Ok(last)
    }
}
