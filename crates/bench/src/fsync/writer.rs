//! What the writer beside the syncs of `competing` got through: syncs that are fast because it was starved are no gain.

use serde_json::Map;

use super::load::Method;
use super::{Kind, Series};
use crate::contract::{Row, Spread};

const MIB: f64 = (1 << 20) as f64;

fn name() -> String {
    format!("{}, its writer", Kind::Competing.name())
}

/// Of a side, if there was one.
pub(super) fn row(series: &Series) -> Option<Row> {
    let rates = series
        .windows
        .iter()
        .map(|window| Some(window.writer? / MIB));
    let rates: Vec<f64> = rates.collect::<Option<_>>()?;
    Some(of(&series.who.name(), &rates))
}

fn of(target: &str, rates: &[f64]) -> Row {
    let Spread { median, min, max } = Spread::of(rates.iter().copied());
    let mut extra = Map::new();
    Row::note_rates(&mut extra, rates.iter().copied());
    Row {
        name: name(),
        target: target.to_owned(),
        threads: 1,
        unit: "MiB/s",
        median,
        min,
        max,
        runs: rates.len(),
        extra,
    }
}

/// Sheaf's writer beside that of the device's way of writing by whose p99 Sheaf's is judged; or of the one whose syncs are fastest, where there are too
/// few of them for a p99.
pub(super) fn note(rows: &[Row]) -> Option<String> {
    let (syncs, writer) = (Kind::Competing.name(), name());
    let p99 = |row: &Row| row.extra.get("p99_us").and_then(|value| value.as_f64());
    let raw = |row: &&Row| {
        let mut raw = Method::ALL.iter();
        row.name == syncs && raw.any(|method| method.name() == row.target)
    };
    let raw: Vec<&Row> = rows.iter().filter(raw).collect();
    let judged = raw.iter().filter_map(|row| Some((p99(row)?, *row)));
    let judged = judged.min_by(|a, b| a.0.total_cmp(&b.0));
    let fastest = raw.iter().max_by(|a, b| a.median.total_cmp(&b.median));
    let (judged, why) = match judged {
        Some((_, row)) => (row, "by whose p99 sheaf's is judged"),
        None => (*fastest?, "whose syncs are the fastest"),
    };
    let judged = &judged.target;
    let find = |target: &str| {
        let mut all = rows.iter();
        all.find(|row| row.name == writer && row.target == target)
    };
    let (own, other) = (find("sheaf")?, find(judged)?);
    let Spread { median, min, max } = own.quotients(other);
    Some(format!(
        "{writer}: {:.0} MiB/s in sheaf's cache and below, {median:.2} of that beside {judged} ({min:.2} to {max:.2} in the turns), {why}",
        own.median
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn a_starved_writer_is_told_beside_the_raw_side_that_the_tail_is_judged_by() {
        let syncs = |target: &str, p99: f64| {
            let mut row = of(target, &[1.0]);
            row.name = Kind::Competing.name().to_owned();
            row.extra.insert("p99_us".to_owned(), Value::from(p99));
            row
        };
        let rows = [
            syncs("raw-dsync", 900.0),
            syncs("raw-io_uring", 700.0),
            syncs("sheaf", 300.0),
            of("raw-dsync", &[50.0, 50.0]),
            of("raw-io_uring", &[100.0, 200.0]),
            of("sheaf", &[25.0, 20.0]),
        ];
        let told = note(&rows).unwrap();
        assert!(
            told.contains("0.17 of that beside raw-io_uring (0.10 to 0.25"),
            "{told}"
        );
        assert_eq!(note(&rows[..3]), None);
        // Without a p99 the fastest syncs say whom it is compared with.
        let mut rows = rows;
        rows[..3].iter_mut().for_each(|row| row.extra.clear());
        rows[0].median = 2.0;
        let told = note(&rows).unwrap();
        assert!(told.contains("0.45 of that beside raw-dsync"), "{told}");
    }
}
