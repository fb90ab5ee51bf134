//! Rows of what was measured, and the bars.

use super::kind::{Access, Deed, Kind, Layout};
use super::{MIB, Options, PAGE, Series};
use crate::contract::{Check, Comparison, Row, Spread};
use crate::counted;
use crate::runner::Measured;
use serde_json::{Map, Value};

/// Requests in a second: of writes up to the end of the sync after them.
fn rate(measured: &Measured, write: bool) -> f64 {
    match write {
        true => measured.operations as f64 / measured.synced.seconds.max(1e-9),
        false => measured.rate(),
    }
}

/// Of each deed.
pub(super) fn rows(options: &Options, series: &Series) -> Vec<Row> {
    let row = |&deed: &Deed| {
        let all = series.turns.iter().flat_map(|turn| &turn.windows);
        let windows: Vec<Measured> = all
            .filter(|(of, _)| *of == deed)
            .map(|(_, window)| *window)
            .collect();
        if windows.is_empty() {
            return None;
        }
        let rate = |window| rate(window, deed.writes());
        let rates: Vec<f64> = windows.iter().map(rate).collect();
        let Spread { median, min, max } = Spread::of(rates.iter().copied());
        let mut extra = Map::new();
        let mut put = |key: &str, value: Value| {
            extra.insert(key.to_owned(), value);
        };
        put("request_bytes", Value::from(series.kind.request));
        put(
            "mib_per_s",
            Value::from(median * series.kind.request as f64 / MIB),
        );
        put("buffered", Value::from(series.who.is_buffered()));
        let peak = series.turns.iter().filter_map(|turn| turn.peak).max();
        if let Some(peak) = peak.filter(|_| series.who.is_sheaf()) {
            put("peak_bytes", Value::from(peak));
            put("memory_bytes", Value::from(options.memory));
        }
        counted::put(&mut extra, &windows);
        Row::note_rates(&mut extra, rates);
        Some(Row {
            name: series.kind.name(deed),
            target: series.who.name(),
            threads: series.kind.threads,
            unit: "requests/s",
            median,
            min,
            max,
            runs: windows.len(),
            extra,
        })
    };
    series.kind.deeds().iter().filter_map(row).collect()
}

/// The fastest of some rows.
fn best<'r>(rows: impl Iterator<Item = &'r Row>) -> Option<&'r Row> {
    rows.max_by(|a, b| a.median.total_cmp(&b.median))
}

/// The rows of one workload.
struct Cell<'a> {
    name: String,
    rows: Vec<&'a Row>,
}

impl<'a> Cell<'a> {
    fn of(rows: &'a [Row], kind: Kind, deed: Deed) -> Cell<'a> {
        let name = kind.name(deed);
        let same = |row: &&Row| row.name == name && row.threads == kind.threads;
        let rows = rows.iter().filter(same).collect();
        Cell { name, rows }
    }

    /// Those whose target is so.
    fn whose(&self, is: impl Fn(&str) -> bool) -> impl Iterator<Item = &'a Row> {
        let rows = self.rows.iter().copied();
        rows.filter(move |row| is(&row.target))
    }

    /// The best of Sheaf's ways past its cache.
    fn direct(&self) -> Option<&'a Row> {
        best(self.whose(|target| ["sheaf-direct", "sheaf-aio"].contains(&target)))
    }

    /// The best of btrfs and XFS by the same ways.
    fn direct_rival(&self) -> Option<&'a Row> {
        let rivals = [
            "btrfs-raid0-aio",
            "btrfs-raid0-direct",
            "xfs-aio",
            "xfs-direct",
        ];
        best(self.whose(|target| rivals.contains(&target)))
    }

    /// Through its cache.
    fn cached(&self) -> Option<&'a Row> {
        best(self.whose(|target| target == "sheaf"))
    }

    /// One of Sheaf's rows beside another; nothing where a side is missing.
    fn at_least(&self, own: Option<&Row>, other: Option<&Row>, bar: f64) -> Option<Check> {
        let (own, other) = (own?, other?);
        let (threads, name) = (own.threads, &self.name);
        let name = format!("{name}/{threads}, {} vs {}", own.target, other.target);
        Some(Check::new(
            name,
            own.quotients(other),
            Comparison::AtLeast,
            bar,
        ))
    }
}

/// One shared file, 4 KiB at random places, past the caches; sequential files beside the devices and through caches; and memory.
pub(super) fn checks(options: &Options, rows: &[Row]) -> Vec<Check> {
    let mut checks = Vec::new();
    for kind in options.kinds() {
        for &deed in kind.deeds() {
            let cell = Cell::of(rows, kind, deed);
            let small = kind.access == Access::Random && kind.request == PAGE;
            if small && kind.layout == Layout::Shared {
                let bar = if deed.writes() { 2.0 } else { 1.2 };
                checks.extend(cell.at_least(cell.direct(), cell.direct_rival(), bar));
            }
            if kind.access == Access::Sequential {
                let raw = best(cell.whose(|target| target == "raw-io_uring"));
                checks.extend(cell.at_least(cell.cached(), raw, 0.9));
                let cached = best(cell.whose(|target| ["ext4", "xfs"].contains(&target)));
                checks.extend(cell.at_least(cell.cached(), cached, 1.0));
            }
        }
    }
    let peaks = rows
        .iter()
        .filter_map(|row| row.extra.get("peak_bytes")?.as_f64());
    checks.extend(peaks.reduce(f64::max).map(|peak| {
        let name = "memory of the process vs its limit";
        Check::new(name, peak / options.memory as f64, Comparison::AtMost, 1.05)
    }));
    checks
}
