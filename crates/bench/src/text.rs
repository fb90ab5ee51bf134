//! A report as a table for people.

use std::fmt::Write;

use crate::contract::{Report, Row};

/// Rows and checks as Markdown tables.
pub fn render(report: &Report) -> String {
    let machine = &report.machine;
    let mut text = format!(
        "{}; {}, {} CPUs, Linux {}; {}\n\n",
        report.suite,
        machine.cpu,
        machine.cores,
        machine.kernel,
        machine.load()
    );
    let columns = columns(&report.rows);
    let headings: String = columns
        .iter()
        .map(|(_, heading)| format!(" {heading} |"))
        .collect();
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "| workload | threads | target | unit | median | min | max |{headings} pool |"
    );
    let _ = writeln!(
        text,
        "|---|---:|---|---|---:|---:|---:|{}---|",
        "---:|".repeat(columns.len())
    );
    for row in &report.rows {
        let extras: String = columns
            .iter()
            .map(|(key, _)| format!(" {} |", extra(row, key)))
            .collect();
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} |{extras} {} |",
            row.name,
            row.threads,
            row.target,
            row.unit,
            number(row.median),
            number(row.min),
            number(row.max),
            pool(row),
        );
    }
    if !report.checks.is_empty() {
        text.push_str("\n| check | value | bar | |\n|---|---:|---:|---|\n");
    }
    for check in &report.checks {
        let _ = writeln!(
            text,
            "| {} | {} | {} {} | {} |",
            check.name,
            check.figures(),
            check.op.symbol(),
            check.bar,
            check.verdict(),
        );
    }
    if !report.notes.is_empty() {
        text.push('\n');
    }
    for note in &report.notes {
        let _ = writeln!(text, "- {note}");
    }
    for row in &report.rows {
        lines(&mut text, row);
    }
    text
}

/// What rows may have besides that makes a column, and its heading.
const COLUMNS: [(&str, &str); 22] = [
    ("workers", "workers"),
    ("members", "devices"),
    ("in_flight", "in flight"),
    ("written_bytes_per_op", "bytes/op"),
    ("logged_bytes_per_op", "logged bytes/op"),
    ("flushes_per_op", "flushes/op"),
    ("commits", "commits"),
    ("sync_commits", "of syncs"),
    ("checkpoints", "checkpoints"),
    ("p50_us", "p50 µs"),
    ("p99_us", "p99 µs"),
    ("p999_us", "p99.9 µs"),
    ("mib_per_s", "MiB/s"),
    ("cpu_us_per_op", "CPU µs/op"),
    ("machine_us_per_op", "machine's CPU µs/op"),
    ("instructions_per_op", "instructions/op"),
    ("calls_per_op", "system calls/op"),
    ("requests_per_op", "device requests/op"),
    ("synced_us_per_op", "µs/op with sync"),
    ("opened_s", "opened in s"),
    ("records", "records"),
    ("records_per_s", "records/s"),
];

/// Those that any of the rows has.
pub(crate) fn columns(rows: &[Row]) -> Vec<(&'static str, &'static str)> {
    let any = |key: &str| rows.iter().any(|row| row.extra.contains_key(key));
    COLUMNS.into_iter().filter(|(key, _)| any(key)).collect()
}

/// What a modelled row says of the lines that its operations share: what costs most comes first.
fn lines(text: &mut String, row: &Row) {
    let Some(lines) = row.extra.get("lines").and_then(|value| value.as_array()) else {
        return;
    };
    let _ = write!(
        text,
        "\nShared lines and locks of {}, {}, at {} cores, for an operation\n\n\
         | line or lock | instances | writes | transfers | ns |\n|---|---:|---:|---:|---:|\n",
        row.name, row.target, row.threads
    );
    for line in lines {
        let get = |key: &str| {
            line.get(key)
                .and_then(|value| value.as_f64())
                .unwrap_or(0.0)
        };
        let name = line.get("name").and_then(|value| value.as_str());
        let _ = writeln!(
            text,
            "| {} | {} | {:.2} | {:.2} | {} |",
            name.unwrap_or_default(),
            get("instances"),
            get("writes_per_op"),
            get("transfers_per_op"),
            number(get("ns_per_op")),
        );
    }
}

/// One of these as a cell.
pub(crate) fn extra(row: &Row, key: &str) -> String {
    let value = row.extra.get(key).and_then(|value| value.as_f64());
    value.map_or(String::new(), number)
}

/// The size of the row's pool, with its unit.
pub fn pool(row: &Row) -> String {
    let size = row.extra.get("pool").and_then(|value| value.as_u64());
    let unit = row.extra.get("pool_unit").and_then(|value| value.as_str());
    match size {
        Some(size) => format!("{} {}", number(size as f64), unit.unwrap_or_default()),
        None => String::new(),
    }
}

/// Thousands apart; small values with two digits after the point.
pub fn number(value: f64) -> String {
    if !value.is_finite() {
        return "-".to_owned();
    }
    if value.abs() < 100.0 && value.fract() != 0.0 {
        return format!("{value:.2}");
    }
    let digits = format!("{:.0}", value.abs());
    let mut text = String::new();
    if value < 0.0 {
        text.push('-');
    }
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tails_checkpoints_and_logged_bytes_have_columns() {
        let extra = ["p999_us", "checkpoints", "logged_bytes_per_op"];
        let extra = extra.map(|key| (key.to_owned(), serde_json::Value::from(7.25)));
        let row = Row {
            name: "append".to_owned(),
            target: "sheaf".to_owned(),
            threads: 1,
            unit: "ops/s",
            median: 1.0,
            min: 1.0,
            max: 1.0,
            runs: 1,
            extra: extra.into_iter().collect(),
        };
        let report = Report::new("fsync", vec![row], Vec::new());
        let report = report.with_notes(["<noted>".to_owned()]);
        let (text, page) = (render(&report), crate::html::render(&report));
        for heading in ["p99.9 µs", "checkpoints", "logged bytes/op"] {
            assert!(
                text.contains(heading) && page.contains(heading),
                "{heading}"
            );
        }
        assert_eq!(text.matches("7.25").count(), 3);
        assert!(text.contains("- <noted>") && page.contains("<li>&lt;noted&gt;"));
    }

    #[test]
    fn numbers_are_legible() {
        assert_eq!(number(1_234_567.4), "1,234,567");
        assert_eq!(number(999.0), "999");
        assert_eq!(number(1.5), "1.50");
        assert_eq!(number(0.0), "0");
        assert_eq!(number(-12_345.0), "-12,345");
        assert_eq!(number(f64::NAN), "-");
    }
}
