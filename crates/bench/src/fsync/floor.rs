//! The floor of a mail server's rounds: the same bytes of the two syncs of a round, in whole pages, each written to the device and
//! flushed, with no file system. The fastest way of doing that counts.
//!
//! Each thread flushes for itself, as it does in `fsync`'s ways of writing raw; the kernel may join flushes on their way. A file system may share a flush among threads that wait at
//! the same time, so with many of them it can do more rounds than this floor; with one only by writing less than whole pages.

use serde_json::Value;

use super::{Kind, Method};
use crate::contract::Row;
use crate::text::number;

/// Marks the row that is it, adds a row of each file system beside it, and says in a sentence for each number of threads what it is.
pub(super) fn put(rows: &mut Vec<Row>) -> Vec<String> {
    let is_raw = |row: &Row| Method::ALL.iter().any(|m| m.name() == row.target);
    let name = Kind::Varmail.name();
    let mut counts: Vec<usize> = rows.iter().map(|row| row.threads).collect();
    counts.dedup();
    let (mut beside, mut notes) = (Vec::new(), Vec::new());
    for threads in counts {
        let same = |row: &&mut Row| row.name == name && row.threads == threads;
        let (raw, others): (Vec<&mut Row>, Vec<&mut Row>) =
            rows.iter_mut().filter(same).partition(|row| is_raw(row));
        let Some(floor) = raw.into_iter().max_by(|a, b| a.median.total_cmp(&b.median)) else {
            continue;
        };
        floor.extra.insert("floor".to_owned(), Value::from(true));
        beside.extend(others.iter().map(|row| row.beside_floor(floor, &[])));
        notes.push(format!(
            "the floor with {threads} thread{} is {}, {} rounds a second: what a round's two syncs add, in whole pages, written and \
             flushed by each thread for itself, without names, times and reads; who shares flushes among threads can be above it",
            if threads == 1 { "" } else { "s" },
            floor.target,
            number(floor.median)
        ));
    }
    rows.extend(beside);
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Report;
    use crate::{html, text};
    use serde_json::Map;

    #[test]
    fn the_fastest_way_of_writing_raw_is_the_floor_of_each_number_of_threads() {
        let row = |target: &str, threads: usize, rates: [f64; 2]| {
            let mut extra = Map::new();
            Row::note_rates(&mut extra, rates);
            Row {
                name: Kind::Varmail.name().to_owned(),
                target: target.to_owned(),
                threads,
                unit: "ops/s",
                median: (rates[0] + rates[1]) / 2.0,
                min: rates[0],
                max: rates[1],
                runs: 2,
                extra,
            }
        };
        let mut rows = vec![
            row("raw-dsync", 1, [100.0, 200.0]),
            row("raw-io_uring", 1, [200.0, 400.0]),
            row("sheaf", 1, [100.0, 100.0]),
            row("xfs", 1, [50.0, 100.0]),
            row("raw-dsync", 4, [500.0, 500.0]),
            row("raw-io_uring", 4, [400.0, 400.0]),
            row("sheaf", 4, [1000.0, 500.0]),
        ];
        let notes = put(&mut rows);
        let floors: Vec<(&str, usize)> = rows
            .iter()
            .filter(|row| row.extra.contains_key("floor"))
            .map(|row| (row.target.as_str(), row.threads))
            .collect();
        assert_eq!(floors, [("raw-io_uring", 1), ("raw-dsync", 4)]);
        let beside: Vec<(&str, usize, f64)> = rows[7..]
            .iter()
            .map(|row| (row.target.as_str(), row.threads, row.median))
            .collect();
        // Turn by turn.
        assert_eq!(
            beside,
            [("sheaf", 1, 0.375), ("xfs", 1, 0.25), ("sheaf", 4, 1.5)]
        );
        assert!(rows[7..].iter().all(Row::is_quotient));
        assert!(
            notes[0].contains("1 thread is raw-io_uring, 300 rounds"),
            "{notes:?}"
        );
        let report = Report::new("varmail", rows, Vec::new()).with_notes(notes);
        for shown in [text::render(&report), html::render(&report), report.json()] {
            assert!(shown.contains("varmail, beside the floor"), "{shown}");
            assert!(shown.contains("the floor with 4 threads is raw-dsync"));
        }
    }

    #[test]
    fn without_raw_sides_there_is_no_floor() {
        assert!(put(&mut Vec::new()).is_empty());
    }
}
