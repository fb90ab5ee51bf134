//! What the report is judged by: bars beside the device itself and beside file systems of the kernel.
//!
//! Flushes and bytes have bounds on either side: who syncs without a flush, or without what was written, is fast, and has made nothing
//! durable.

use super::Kind;
use super::load::{Method, PAGE};
use crate::contract::{Check, Comparison, Row, Spread};

/// The rows of one workload with so many threads.
struct Cell<'a> {
    rows: &'a [Row],
    kind: Kind,
    threads: usize,
}

impl Cell<'_> {
    fn row(&self, target: &str) -> Option<&Row> {
        let same = |row: &&Row| {
            row.name == self.kind.name() && row.threads == self.threads && row.target == target
        };
        self.rows.iter().find(same)
    }

    /// Sheaf's rate divided by another's.
    fn quotient(&self, target: &str) -> Option<Spread> {
        Some(self.row("sheaf")?.quotients(self.row(target)?))
    }

    fn extra(&self, target: &str, key: &str) -> Option<f64> {
        self.row(target)?.extra.get(key)?.as_f64()
    }

    /// Sheaf's rate divided by that of the fastest of these.
    fn quotient_to_best<'r>(&self, rows: impl Iterator<Item = &'r Row>) -> Option<Spread> {
        let best = rows.max_by(|a, b| a.median.total_cmp(&b.median))?;
        Some(self.row("sheaf")?.quotients(best))
    }

    /// By the best of the kernel's that a log is measured by; nothing unless all of them took part.
    fn quotient_to_kernels(&self) -> Option<Spread> {
        let all: Option<Vec<&Row>> = LOGS.iter().map(|target| self.row(target)).collect();
        self.quotient_to_best(all?.into_iter())
    }

    /// By the fastest way of writing to the device.
    fn quotient_to_raw(&self) -> Option<Spread> {
        let all = Method::ALL.into_iter();
        self.quotient_to_best(all.filter_map(|method| self.row(method.name())))
    }

    /// The smallest of the device's figures under this key.
    fn raw_least(&self, key: &str) -> Option<f64> {
        let all = Method::ALL.map(Method::name);
        let all = all.iter().filter_map(|target| self.extra(target, key));
        all.reduce(f64::min)
    }

    /// Flushes of an overwrite by Sheaf: one, and one more for each interval of the window after which times are persisted:
    /// 1 / (rate x interval) an operation. Nothing of a window shorter than that interval, in which no times may come due; nor on a device
    /// that counts no flushes of the device's own ways of writing either.
    fn flushes(&self) -> Option<Check> {
        let counted = |method: Method| self.extra(method.name(), "flushes_per_op");
        if !Method::ALL.into_iter().filter_map(counted).any(|f| f > 0.0) {
            return None;
        }
        let sheaf = |key| self.extra("sheaf", key);
        let (window, interval) = (sheaf("window_s")?, sheaf("mtime_persist_s")?);
        if interval <= 0.0 || window < interval * WHOLE {
            return None;
        }
        let operations = self.row("sheaf")?.median * window;
        let due = (window / interval - (1.0 - WHOLE)).ceil() / operations.max(1.0);
        let of = sheaf("flushes_per_op");
        self.at_most("flushes, with times due", of, Some(1.0), 1.0 + due)
    }

    /// Flushes of one thread, which shares none with anybody: no fewer than of the device's own way of writing that takes fewest.
    /// Nothing on a device that counts none of one of these: that one, and so Sheaf, may have forced its writes.
    fn flushed(&self) -> Option<Check> {
        let raw = self.raw_least("flushes_per_op").filter(|&f| f > 0.0)?;
        let of = self.extra("sheaf", "flushes_per_op")? / raw;
        self.at_least("flushes vs raw's", Some(Spread::of([of])), WHOLE)
    }

    /// All that the user writes reaches the device.
    fn written(&self) -> Option<Check> {
        let user = self.kind.bytes()? as f64;
        let of = self.extra("sheaf", "written_bytes_per_op")? / user;
        self.at_least(
            "device bytes, all of the user's",
            Some(Spread::of([of])),
            1.0,
        )
    }

    /// A quotient that must be at least the bar; nothing where a side is missing.
    fn at_least(&self, what: &str, quotient: Option<Spread>, bar: f64) -> Option<Check> {
        let name = format!("{}/{} {what}", self.kind.name(), self.threads);
        Some(Check::new(name, quotient?, Comparison::AtLeast, bar))
    }

    fn at_most(&self, what: &str, of: Option<f64>, to: Option<f64>, bar: f64) -> Option<Check> {
        let name = format!("{}/{} {what}", self.kind.name(), self.threads);
        Some(Check::new(name, of? / to?, Comparison::AtMost, bar))
    }
}

/// What of an interval, or over one, is a whole one: windows end in time but for so much.
const WHOLE: f64 = 0.99;

/// What an append and a create are measured by.
pub const LOGS: [&str; 3] = ["ext4", "ext4-fast_commit", "xfs"];

/// Numbers of threads with which Sheaf did this.
fn row_threads(rows: &[Row], kind: Kind) -> Vec<usize> {
    let own = rows.iter();
    let own = own.filter(|row| row.name == kind.name() && row.target == "sheaf");
    own.map(|row| row.threads).collect()
}

pub fn checks(rows: &[Row]) -> Vec<Check> {
    let cell = |kind, threads| Cell {
        rows,
        kind,
        threads,
    };
    let bytes = |cell: &Cell<'_>| cell.extra("sheaf", "written_bytes_per_op");
    let mut checks = Vec::new();
    for kind in [Kind::Overwrite, Kind::OverwriteStat] {
        let cell = cell(kind, 1);
        let written = Some(PAGE as f64);
        checks.push(cell.at_least("vs raw", cell.quotient_to_raw(), 0.95));
        checks.push(cell.at_most("device bytes vs user's", bytes(&cell), written, 1.01));
        checks.push(cell.flushes());
    }
    for kind in [
        Kind::Overwrite,
        Kind::OverwriteStat,
        Kind::Append,
        Kind::Create,
    ] {
        let cell = cell(kind, 1);
        checks.push(cell.flushed());
        checks.push(cell.written());
    }
    let stat = cell(Kind::OverwriteStat, 1);
    checks.push(stat.at_least("vs ext4", stat.quotient("ext4"), 3.1));
    checks.push(stat.at_least("vs xfs", stat.quotient("xfs"), 2.0));
    let append = cell(Kind::Append, 1);
    checks.push(append.at_least("vs raw", append.quotient_to_raw(), 0.9));
    checks.push(append.at_least("vs the best kernel", append.quotient_to_kernels(), 1.8));
    checks.push(append.at_most("device bytes", bytes(&append), Some(1.0), 1100.0));
    let create = cell(Kind::Create, 1);
    checks.push(create.at_least("vs the best kernel", create.quotient_to_kernels(), 1.8));
    checks.push(create.at_most("device bytes", bytes(&create), Some(1.0), 10_000.0));
    let many = cell(Kind::Create, 32);
    checks.push(many.at_least("vs ext4", many.quotient("ext4"), 2.2));
    for threads in row_threads(rows, Kind::Varmail) {
        let mail = cell(Kind::Varmail, threads);
        checks.push(mail.at_least("vs ext4", mail.quotient("ext4"), 1.81));
        checks.push(mail.at_least("vs xfs", mail.quotient("xfs"), 1.5));
    }
    let competing = cell(Kind::Competing, 1);
    // Without enough samples there is no number, and nothing holds.
    let own = competing.row("sheaf").map(|_| {
        let p99 = competing.extra("sheaf", "p99_us");
        p99.unwrap_or(f64::NAN)
    });
    let raw = competing.raw_least("p99_us").unwrap_or(f64::NAN);
    let check = competing.at_most("p99 vs raw's", own, Some(raw), 1.2);
    checks.push(check.map(Check::of_samples));
    checks.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value};

    use super::*;

    fn row(kind: Kind, target: &str, median: f64, bytes: f64) -> Row {
        let mut extra = Map::new();
        extra.insert("written_bytes_per_op".to_owned(), Value::from(bytes));
        extra.insert("flushes_per_op".to_owned(), Value::from(1.0));
        extra.insert("p99_us".to_owned(), Value::from(100.0));
        extra.insert("window_s".to_owned(), Value::from(2.0));
        extra.insert("mtime_persist_s".to_owned(), Value::from(1.0));
        Row {
            name: kind.name().to_owned(),
            target: target.to_owned(),
            threads: 1,
            unit: "ops/s",
            median,
            min: median,
            max: median,
            runs: 5,
            extra,
        }
    }

    #[test]
    fn sides_are_compared_turn_by_turn() {
        let rated = |target: &str, rates: [f64; 3]| {
            let mut row = row(Kind::Overwrite, target, Spread::of(rates).median, 4096.0);
            Row::note_rates(&mut row.extra, rates);
            row
        };
        // By medians of all turns it would be 950 to 1000.
        let found = checks(&[
            rated("raw-dsync", [800.0, 900.0, 950.0]),
            rated("raw-io_uring", [1000.0, 2000.0, 500.0]),
            rated("sheaf", [950.0, 1880.0, 470.0]),
        ]);
        assert_eq!(found[0].name, "overwrite/1 vs raw");
        assert!((found[0].value - 0.94).abs() < 1e-9, "{:?}", found[0]);
    }

    #[test]
    fn the_best_way_of_writing_raw_is_the_floor() {
        let rows = [
            row(Kind::Overwrite, "raw-dsync", 900.0, 4096.0),
            row(Kind::Overwrite, "raw-io_uring", 1000.0, 4096.0),
            row(Kind::Overwrite, "sheaf", 940.0, 4200.0),
        ];
        let checks = checks(&rows);
        let check = |name: &str| checks.iter().find(|c| c.name == name).unwrap();
        assert!(!check("overwrite/1 vs raw").ok);
        assert!(!check("overwrite/1 device bytes vs user's").ok);
        assert!(check("overwrite/1 flushes, with times due").ok);
        assert!(!checks.iter().any(|check| check.name.starts_with("append")));
    }

    #[test]
    fn a_flush_more_is_allowed_for_times_that_come_due_and_judged_where_they_do() {
        let raw = |flushes: f64| {
            let mut raw = row(Kind::Overwrite, "raw-fdatasync", 1000.0, 4096.0);
            raw.extra
                .insert("flushes_per_op".to_owned(), Value::from(flushes));
            raw
        };
        let judged = |raw: Row, window: f64, flushes: f64| {
            let mut sheaf = row(Kind::Overwrite, "sheaf", 1000.0, 4096.0);
            sheaf
                .extra
                .insert("window_s".to_owned(), Value::from(window));
            sheaf
                .extra
                .insert("flushes_per_op".to_owned(), Value::from(flushes));
            let checks = checks(&[raw, sheaf]);
            ["flushes, with times due", "flushes vs raw's"].map(|what| {
                let mut checks = checks.iter().filter(|check| check.name.ends_with(what));
                checks.next().cloned()
            })
        };
        let most = |raw, window, flushes| judged(raw, window, flushes)[0].clone();
        let two = most(raw(1.0), 2.0, 1.001).unwrap();
        assert!(two.ok && (two.bar - 1.001).abs() < 1e-9, "{two:?}");
        assert!(!most(raw(1.0), 2.0, 1.0011).unwrap().ok);
        // Two intervals begin in it.
        assert!(most(raw(1.0), 1.5, 1.001).unwrap().bar > 1.0013);
        assert!(most(raw(1.0), 0.3, 1.0).is_none());
        // A window that ended a moment early.
        assert!(most(raw(1.0), 0.999, 1.0).is_some());
        assert!(judged(raw(0.0), 2.0, 0.0).iter().all(Option::is_none));
        // A sync without a flush was as good as one.
        let least = |raw, window, flushes| judged(raw, window, flushes)[1].as_ref().unwrap().ok;
        assert!(!least(raw(1.0), 2.0, 0.0) && !least(raw(1.0), 0.3, 0.98));
        assert!(least(raw(1.0), 2.0, 1.0) && least(raw(1.0), 0.3, 0.995));
        let mut forced = row(Kind::Overwrite, "raw-dsync", 1000.0, 4096.0);
        forced
            .extra
            .insert("flushes_per_op".to_owned(), Value::from(0.0));
        let sheaf = row(Kind::Overwrite, "sheaf", 1000.0, 4096.0);
        let found = checks(&[raw(1.0), forced, sheaf]);
        assert!(!found.iter().any(|check| check.name.ends_with("vs raw's")));
    }

    /// A sync that leaves what was written in memory was as good as one.
    #[test]
    fn all_that_the_user_writes_reaches_the_device() {
        let judged = |kind, bytes| {
            let found = checks(&[row(kind, "sheaf", 1000.0, bytes)]);
            let mut found = found
                .iter()
                .filter(|check| check.name.ends_with("all of the user's"));
            found.next().map(|check| check.ok)
        };
        assert_eq!(judged(Kind::Overwrite, 4096.0), Some(true));
        assert_eq!(judged(Kind::OverwriteStat, 4095.0), Some(false));
        assert_eq!(judged(Kind::Append, 99.0), Some(false));
        assert_eq!(judged(Kind::Create, 10_000.0), Some(true));
        assert_eq!(judged(Kind::Varmail, 0.0), None);
    }

    #[test]
    fn the_best_kernel_is_the_best_of_all_of_them() {
        let mut rows = vec![
            row(Kind::Append, "sheaf", 900.0, 700.0),
            row(Kind::Append, "ext4", 300.0, 4096.0),
            row(Kind::Append, "xfs", 400.0, 4096.0),
        ];
        let vs_best = |rows: &[Row]| {
            let found = checks(rows).into_iter();
            let mut found = found.filter(|check| check.name == "append/1 vs the best kernel");
            found.next().map(|check| check.value)
        };
        assert_eq!(vs_best(&rows), None);
        rows.push(row(Kind::Append, "ext4-fast_commit", 450.0, 4096.0));
        assert_eq!(vs_best(&rows), Some(2.0));
    }
}
