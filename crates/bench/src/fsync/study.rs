//! What a published study of coarse times found, in rows beside the same quotients of this run.

use std::time::Duration;

use serde_json::{Map, Value};

use super::{Kind, Who};
use crate::contract::{Row, Spread};

/// Y. Son, S. Lee, Y. Won, IC-NIDC 2016, overwrites on ext4: (interval that 1 s is compared with, in milliseconds, bytes written with 1 s compared with that,
/// throughput likewise).
const STUDY: [(u64, f64, f64); 2] = [(1, 0.25, 3.1), (10, 0.72, 1.2)];
const SOURCE: &str = "Y. Son, S. Lee, Y. Won, IC-NIDC 2016, ext4";
/// The target of rows that were not measured here.
const PUBLISHED: &str = "published";

const BYTES: &str = "of the bytes";
const RATE: &str = "of the rate";

/// Says what these rows are.
pub fn note() -> String {
    format!("rows of \"{PUBLISHED}\" were not measured here, but are of a study: {SOURCE}")
}

/// The study's figures, and ours of the same intervals.
pub fn rows(measured: &[Row]) -> Vec<Row> {
    let find = |kind: Kind, interval: u64| {
        let target = Who::Persisting(Duration::from_millis(interval)).name();
        let mut all = measured.iter();
        all.find(|row| row.name == kind.name() && row.target == target)
    };
    let bytes = |row: &Row| row.extra.get("written_bytes_per_op")?.as_f64();
    let one = |value: f64| Spread::of([value]);
    let mut rows = Vec::new();
    for (interval, study_bytes, study_rate) in STUDY {
        for kind in [Kind::Overwrite, Kind::OverwriteStat] {
            let name = format!("{}, times after 1 s against {interval} ms", kind.name());
            let mut add = |target: &str, unit, quotient: Spread, runs| {
                let mut extra = Map::new();
                if target == PUBLISHED {
                    extra.insert(PUBLISHED.to_owned(), Value::from(SOURCE));
                }
                rows.push(Row {
                    name: name.clone(),
                    target: target.to_owned(),
                    threads: 1,
                    unit,
                    median: quotient.median,
                    min: quotient.min,
                    max: quotient.max,
                    runs,
                    extra,
                });
            };
            if kind == Kind::Overwrite {
                add(PUBLISHED, BYTES, one(study_bytes), 0);
                add(PUBLISHED, RATE, one(study_rate), 0);
            }
            if let (Some(coarse), Some(fine)) = (find(kind, 1000), find(kind, interval)) {
                if let (Some(own), Some(other)) = (bytes(coarse), bytes(fine)) {
                    add("sheaf", BYTES, one(own / other), coarse.runs);
                }
                add("sheaf", RATE, coarse.quotients(fine), coarse.runs);
            }
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{html, text};

    fn measured(interval: u64, bytes: f64, rates: &[f64]) -> Row {
        let mut extra = Map::new();
        extra.insert("written_bytes_per_op".to_owned(), Value::from(bytes));
        Row::note_rates(&mut extra, rates.iter().copied());
        let Spread { median, min, max } = Spread::of(rates.iter().copied());
        Row {
            name: Kind::Overwrite.name().to_owned(),
            target: Who::Persisting(Duration::from_millis(interval)).name(),
            threads: 1,
            unit: "ops/s",
            median,
            min,
            max,
            runs: rates.len(),
            extra,
        }
    }

    #[test]
    fn the_published_table_is_beside_ours() {
        let all = [
            measured(1, 8000.0, &[100.0, 200.0]),
            measured(1000, 4000.0, &[150.0, 400.0]),
        ];
        let rows = rows(&all);
        let figures: Vec<_> = rows
            .iter()
            .map(|row| (row.target.as_str(), row.unit, row.median, row.runs))
            .collect();
        let expected = [
            (PUBLISHED, BYTES, 0.25, 0),
            (PUBLISHED, RATE, 3.1, 0),
            ("sheaf", BYTES, 0.5, 2),
            ("sheaf", RATE, 1.75, 2),
            // Nothing was measured after 10 ms.
            (PUBLISHED, BYTES, 0.72, 0),
            (PUBLISHED, RATE, 1.2, 0),
        ];
        assert_eq!(figures, expected);
        assert_eq!((rows[3].min, rows[3].max), (1.5, 2.0));
        // They are in every form of the report, and in none of its plots.
        let report = crate::contract::Report::new("mtime", rows, Vec::new()).with_notes([note()]);
        let name = "overwrite, times after 1 s against 1 ms";
        let (table, page, json) = (text::render(&report), html::render(&report), report.json());
        assert!(
            table.contains(&format!("| {name} | 1 | published | of the rate | 3.10 |")),
            "{table}"
        );
        assert!(table.contains(SOURCE) && page.contains(SOURCE) && json.contains(SOURCE));
        assert!(
            page.contains(&format!("<tr><td>{name}")) && !page.contains("<svg"),
            "{page}"
        );
    }
}
