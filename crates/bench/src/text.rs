//! A report as a table for people.

use std::fmt::Write;

use crate::contract::{Report, Row};

/// Rows and checks as Markdown tables.
pub fn render(report: &Report) -> String {
    let machine = &report.machine;
    let mut text = format!(
        "{}; {}, {} CPUs, Linux {}\n\n",
        report.suite, machine.cpu, machine.cores, machine.kernel
    );
    text.push_str(
        "| workload | threads | target | unit | median | min | max | CPU µs/op | µs/op with sync | pool |\n",
    );
    text.push_str("|---|---:|---|---|---:|---:|---:|---:|---:|---|\n");
    for row in &report.rows {
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            row.name,
            row.threads,
            row.target,
            row.unit,
            number(row.median),
            number(row.min),
            number(row.max),
            extra(row, "cpu_us_per_op"),
            extra(row, "synced_us_per_op"),
            pool(row),
        );
    }
    if !report.checks.is_empty() {
        text.push_str("\n| check | value | bar | |\n|---|---:|---:|---|\n");
    }
    for check in &report.checks {
        let _ = writeln!(
            text,
            "| {} | {:.2} | {} {} | {} |",
            check.name,
            check.value,
            check.op.symbol(),
            check.bar,
            if check.ok { "holds" } else { "missed" },
        );
    }
    for row in &report.rows {
        lines(&mut text, row);
    }
    text
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

fn extra(row: &Row, key: &str) -> String {
    let value = row.extra.get(key);
    value.map_or(String::new(), |value| value.to_string())
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
    fn numbers_are_legible() {
        assert_eq!(number(1_234_567.4), "1,234,567");
        assert_eq!(number(999.0), "999");
        assert_eq!(number(1.5), "1.50");
        assert_eq!(number(0.0), "0");
        assert_eq!(number(-12_345.0), "-12,345");
        assert_eq!(number(f64::NAN), "-");
    }
}
