//! A report as one HTML page that needs nothing else: tables, and plots as inline SVG.

use std::collections::BTreeSet;
use std::fmt::Write;

use serde_json::Value;

use crate::contract::{Check, Report, Row};
use crate::text::{columns, extra, number, pool};

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1b1f24;--paper:#fff;--faint:#d0d7de;--soft:#656d76}\
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--paper:#0d1117;--faint:#30363d;--soft:#8d96a0}}\
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:2rem auto;\
max-width:72rem;padding:0 1rem}\
table{border-collapse:collapse;margin:1rem 0}\
th,td{padding:.25rem .75rem;border-bottom:1px solid var(--faint);text-align:left}\
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}\
.plots{display:flex;flex-wrap:wrap;gap:1.5rem}figure{margin:0}figcaption{font-weight:600}\
svg text{fill:var(--soft);font:11px system-ui,sans-serif}.axis{stroke:var(--faint)}\
.ok{color:#1a7f37}.missed{color:#cf222e}.key{display:inline-block;width:.8em;height:.8em;\
margin:0 .4em 0 1em;border-radius:50%}";

/// Told apart on light and dark ground, by most colour-blind people too.
const COLOURS: [&str; 14] = [
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6d31", "#7f7f7f",
    "#9467bd", "#17becf", "#b5bd00", "#a50026", "#1b6e3c", "#f4a6b8",
];

const WIDTH: f64 = 340.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 56.0;
const BOTTOM: f64 = 190.0;
const TOP: f64 = 12.0;
const RIGHT: f64 = 328.0;

/// What a plot has on its horizontal axis.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Axis {
    Threads,
    Pool,
    /// Threads that make checkpoints.
    Workers,
    /// Of an array.
    Devices,
}

impl Axis {
    fn name(self) -> &'static str {
        match self {
            Axis::Threads => "threads",
            Axis::Pool => "pool size",
            Axis::Workers => "workers",
            Axis::Devices => "devices",
        }
    }

    fn of(self, row: &Row) -> u64 {
        match self {
            Axis::Threads => row.threads as u64,
            Axis::Pool => pool_of(row),
            Axis::Workers | Axis::Devices => self.number(row).unwrap_or(0),
        }
    }

    /// Of a row that is about a number of them: such rows are plotted by nothing else.
    fn number(self, row: &Row) -> Option<u64> {
        let key = match self {
            Axis::Workers => "workers",
            Axis::Devices => "members",
            Axis::Threads | Axis::Pool => return None,
        };
        row.extra.get(key).and_then(Value::as_u64)
    }

    fn is_own(self) -> bool {
        matches!(self, Axis::Workers | Axis::Devices)
    }
}

fn pool_of(row: &Row) -> u64 {
    row.extra.get("pool").and_then(Value::as_u64).unwrap_or(0)
}

/// The whole page.
pub fn render(report: &Report) -> String {
    let machine = &report.machine;
    let suite = escape(report.suite);
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <title>sheaf bench {suite}</title><style>{STYLE}</style></head><body>\n\
         <h1>sheaf bench {suite}</h1>\n<p>Sheaf {}; {}, {} CPUs, Linux {}; {}</p>\n",
        escape(report.version),
        escape(&machine.cpu),
        machine.cores,
        escape(&machine.kernel),
        escape(&machine.load()),
    );
    let measured = report.rows.iter().filter(|row| !row.is_quotient());
    let targets = distinct(measured.map(|row| row.target.as_str()));
    checks(&mut page, &report.checks);
    plots(&mut page, report, &targets, Axis::Threads);
    plots(&mut page, report, &targets, Axis::Pool);
    plots(&mut page, report, &targets, Axis::Workers);
    plots(&mut page, report, &targets, Axis::Devices);
    rows(&mut page, &report.rows);
    notes(&mut page, &report.notes);
    report.rows.iter().for_each(|row| lines(&mut page, row));
    page.push_str("</body></html>\n");
    page
}

/// In the order of their first appearance.
fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut seen = BTreeSet::new();
    names.filter(|name| seen.insert(*name)).collect()
}

fn colour(targets: &[&str], target: &str) -> &'static str {
    let place = targets.iter().position(|&other| other == target);
    COLOURS[place.unwrap_or(0) % COLOURS.len()]
}

fn checks(page: &mut String, checks: &[Check]) {
    if checks.is_empty() {
        return;
    }
    page.push_str("<h2>Checks</h2><table><tr><th>check<th class=n>value<th class=n>bar<th>\n");
    for check in checks {
        let verdict = if check.ok { "ok" } else { "missed" };
        // Writing to a string does not fail, here and below.
        let _ = writeln!(
            page,
            "<tr><td>{}<td class=n>{}<td class=n>{} {}<td class={verdict}>{}",
            escape(&check.name),
            escape(&check.figures()),
            escape(check.op.symbol()),
            check.bar,
            check.verdict(),
        );
    }
    page.push_str("</table>\n");
}

fn rows(page: &mut String, rows: &[Row]) {
    let columns = columns(rows);
    let headings: String = columns
        .iter()
        .map(|(_, text)| format!("<th class=n>{text}"))
        .collect();
    let _ = writeln!(
        page,
        "<h2>Figures</h2><table><tr><th>workload<th class=n>threads<th>target<th>unit\
         <th class=n>median<th class=n>min<th class=n>max{headings}<th class=n>runs<th>pool"
    );
    for row in rows {
        let cell = |(key, _): &(&str, &str)| format!("<td class=n>{}", extra(row, key));
        let extras: String = columns.iter().map(cell).collect();
        let _ = writeln!(
            page,
            "<tr><td>{}<td class=n>{}<td>{}<td>{}<td class=n>{}<td class=n>{}<td class=n>{}\
             {extras}<td class=n>{}<td>{}",
            escape(&row.name),
            row.threads,
            escape(&row.target),
            escape(row.unit),
            number(row.median),
            number(row.min),
            number(row.max),
            row.runs,
            escape(&pool(row)),
        );
    }
    page.push_str("</table>\n");
}

fn notes(page: &mut String, notes: &[String]) {
    if notes.is_empty() {
        return;
    }
    page.push_str("<h2>Notes</h2><ul>\n");
    for note in notes {
        let _ = writeln!(page, "<li>{}", escape(note));
    }
    page.push_str("</ul>\n");
}

/// The lines that a modelled row's operations share.
fn lines(page: &mut String, row: &Row) {
    let Some(lines) = row.extra.get("lines").and_then(Value::as_array) else {
        return;
    };
    let _ = writeln!(
        page,
        "<h2>Shared lines and locks of {}, {}, at {} cores, for an operation</h2><table><tr>\
         <th>line or lock<th class=n>instances<th class=n>writes<th class=n>transfers\
         <th class=n>ns",
        escape(&row.name),
        escape(&row.target),
        row.threads,
    );
    for line in lines {
        let get = |key: &str| line.get(key).and_then(Value::as_f64).unwrap_or(0.0);
        let name = line.get("name").and_then(Value::as_str);
        let _ = writeln!(
            page,
            "<tr><td>{}<td class=n>{}<td class=n>{:.2}<td class=n>{:.2}<td class=n>{}",
            escape(name.unwrap_or_default()),
            get("instances"),
            get("writes_per_op"),
            get("transfers_per_op"),
            number(get("ns_per_op")),
        );
    }
    page.push_str("</table>\n");
}

/// One plot for each workload. By threads, of the largest pool; by pool, of the most threads
/// and of those workloads alone that have several; by workers of those that have any, and these by nothing else.
fn plots(page: &mut String, report: &Report, targets: &[&str], axis: Axis) {
    let (mut figures, mut all_rates) = (String::new(), true);
    let measured = report.rows.iter().filter(|row| !row.is_quotient());
    for name in distinct(measured.map(|row| row.name.as_str())) {
        let all = || report.rows.iter().filter(|row| row.name == name);
        let own = [Axis::Workers, Axis::Devices].into_iter();
        let own = own.filter(|own| all().any(|row| own.number(row).is_some()));
        let shown_by = own.reduce(|first, _| first);
        if shown_by.is_some_and(|own| own != axis) || shown_by.is_none() && axis.is_own() {
            continue;
        }
        let fixed = match axis {
            Axis::Threads => Some(Axis::Pool),
            Axis::Pool | Axis::Workers => Some(Axis::Threads),
            // Each side has as many threads as it takes.
            Axis::Devices => None,
        };
        let most = |fixed: Axis| all().map(|row| fixed.of(row)).max();
        let shown = |row: &&Row| fixed.is_none_or(|fixed| Some(fixed.of(row)) == most(fixed));
        let shown: Vec<&Row> = all().filter(shown).collect();
        let numbered = |row: &&&Row| !axis.is_own() || axis.number(row).is_some();
        let places: BTreeSet<u64> = shown
            .iter()
            .filter(numbered)
            .map(|row| axis.of(row))
            .collect();
        if axis == Axis::Pool && places.len() < 2 {
            continue;
        }
        let places: Vec<u64> = places.into_iter().collect();
        plot(&mut figures, name, &shown, &places, targets, axis);
        all_rates &= shown.iter().all(|row| row.unit.ends_with("/s"));
    }
    if figures.is_empty() {
        return;
    }
    let what = match all_rates {
        true => "Throughput",
        false => "Figures",
    };
    let _ = write!(page, "<h2>{what} by {}</h2><p>", axis.name());
    for target in targets {
        let colour = colour(targets, target);
        let target = escape(target);
        let _ = write!(
            page,
            "<span class=key style=background:{colour}></span>{target}"
        );
    }
    let _ = writeln!(page, "</p><div class=plots>\n{figures}</div>");
}

/// A line for each target through its medians, with strokes from least to most.
fn plot(
    page: &mut String,
    name: &str,
    rows: &[&Row],
    places: &[u64],
    targets: &[&str],
    axis: Axis,
) {
    let top = nice(rows.iter().map(|row| row.max).fold(0.0, f64::max));
    let unit = rows.first().map_or("", |row| row.unit);
    let x = |place: u64| {
        let index = places.iter().position(|&other| other == place).unwrap_or(0);
        LEFT + (RIGHT - LEFT) * (index as f64 + 0.5) / places.len() as f64
    };
    let y = |value: f64| BOTTOM - (BOTTOM - TOP) * (value / top).clamp(0.0, 1.0);
    let _ = write!(
        page,
        "<figure><figcaption>{}, {}</figcaption><svg width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         role=\"img\" aria-label=\"{} by {}\">",
        escape(name),
        escape(unit),
        escape(name),
        axis.name(),
    );
    for quarter in 0..=4 {
        let value = top * f64::from(quarter) / 4.0;
        let height = y(value);
        let _ = write!(
            page,
            "<line class=axis x1={LEFT} x2={RIGHT} y1={height:.1} y2={height:.1} />\
             <text x={:.1} y={:.1} text-anchor=end>{}</text>",
            LEFT - 6.0,
            height + 4.0,
            brief(value),
        );
    }
    for &place in places {
        let _ = write!(
            page,
            "<text x={:.1} y={:.1} text-anchor=middle>{}</text>",
            x(place),
            BOTTOM + 18.0,
            brief(place as f64),
        );
    }
    for target in targets {
        let mut points: Vec<&&Row> = rows.iter().filter(|row| row.target == *target).collect();
        points.sort_by_key(|row| axis.of(row));
        let colour = colour(targets, target);
        // What has no number of workers is the same beside any.
        for row in points.iter().filter(|_| axis.is_own()) {
            if axis.number(row).is_none() {
                let height = y(row.median);
                let _ = write!(
                    page,
                    "<line x1={LEFT} x2={RIGHT} y1={height:.1} y2={height:.1} stroke={colour} \
                     stroke-dasharray=\"6 4\"><title>{}: {}</title></line>",
                    escape(target),
                    number(row.median),
                );
            }
        }
        points.retain(|row| !axis.is_own() || axis.number(row).is_some());
        let line: Vec<String> = points
            .iter()
            .map(|row| format!("{:.1},{:.1}", x(axis.of(row)), y(row.median)))
            .collect();
        let line = line.join(" ");
        let _ = write!(
            page,
            "<polyline points=\"{line}\" fill=none stroke={colour} stroke-width=2 />"
        );
        for row in points {
            let at = x(axis.of(row));
            let _ = write!(
                page,
                "<line x1={at:.1} x2={at:.1} y1={:.1} y2={:.1} stroke={colour} />\
                 <circle cx={at:.1} cy={:.1} r=3.5 fill={colour}><title>{}: {}</title></circle>",
                y(row.min),
                y(row.max),
                y(row.median),
                escape(target),
                number(row.median),
            );
        }
    }
    page.push_str("</svg></figure>\n");
}

/// The next round number.
fn nice(value: f64) -> f64 {
    if value.is_nan() || value <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 4.0, 6.0, 8.0, 10.0];
    let fitting = steps.into_iter().find(|step| value <= step * power);
    fitting.unwrap_or(10.0) * power
}

/// Three digits at most, with a letter for the power of a thousand.
fn brief(value: f64) -> String {
    let (value, letter) = match value {
        value if value >= 1e6 => (value / 1e6, "M"),
        value if value >= 1e3 => (value / 1e3, "K"),
        value => (value, ""),
    };
    match value.fract() == 0.0 {
        true => format!("{value:.0}{letter}"),
        false => format!("{value:.1}{letter}"),
    }
}

fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            c => safe.push(c),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Comparison;
    use serde_json::Map;

    fn row(name: &str, target: &str, threads: usize, pool: u64) -> Row {
        let mut extra = Map::new();
        extra.insert("pool".to_owned(), Value::from(pool));
        Row {
            name: name.to_owned(),
            target: target.to_owned(),
            threads,
            unit: "ops/s",
            median: 1500.0,
            min: 1000.0,
            max: 1700.0,
            runs: 5,
            extra,
        }
    }

    #[test]
    fn a_page_holds_a_plot_for_each_workload_and_nothing_from_elsewhere() {
        let rows = vec![
            row("MWCL", "sheaf", 2, 10),
            row("MWCL", "sheaf", 2, 20),
            row("MWCL", "/mnt/<x>", 2, 20),
            row("DRBH", "sheaf", 1, 0),
        ];
        let check = Check::new("a < b", 1.0, Comparison::AtLeast, 2.0);
        let page = render(&Report::new("fxmark", rows, vec![check]));
        assert_eq!(page.matches("<svg").count(), 3);
        assert!(page.contains("Throughput by threads") && page.contains("/mnt/&lt;x&gt;"));
        assert!(page.contains("a &lt; b") && page.contains("missed"));
        for outside in ["http:", "https:", "src=", "href=", "<script", "@import"] {
            assert!(!page.contains(outside), "{outside}");
        }
    }

    #[test]
    fn workers_are_the_axis_of_their_plot() {
        let mut rows: Vec<Row> = [1, 2, 4, 8]
            .map(|workers: u64| {
                let mut row = row("creates and unlinks", "sheaf", 2, 0);
                row.extra.insert("workers".to_owned(), Value::from(workers));
                row
            })
            .into();
        rows.push(row("creates and unlinks", "sheaf-no-checkpoint", 2, 0));
        let page = render(&Report::new("checkpoint", rows, vec![]));
        assert_eq!(page.matches("<svg").count(), 1);
        assert!(page.contains("Throughput by workers") && !page.contains("by threads"));
        assert_eq!(page.matches("<circle").count(), 4);
        assert_eq!(page.matches("stroke-dasharray").count(), 1);
    }

    #[test]
    fn devices_are_the_axis_of_their_plot_whatever_number_of_threads_a_side_has() {
        let rows = [
            (1, "raw", 1),
            (2, "raw", 1),
            (1, "sheaf-file", 32),
            (2, "sheaf-file", 64),
        ];
        let rows = rows.map(|(members, target, threads)| {
            let mut row = row("random read", target, threads, 0);
            row.extra.insert("members".to_owned(), Value::from(members));
            row
        });
        let page = render(&Report::new("array", rows.into(), vec![]));
        assert_eq!(page.matches("<svg").count(), 1);
        assert!(page.contains("Throughput by devices") && !page.contains("by threads"));
        assert_eq!(page.matches("<circle").count(), 4);
    }

    #[test]
    fn no_two_of_the_most_targets_share_a_colour() {
        // Devices in four ways, Sheaf's two in two topologies, ext4 and XFS in two ways each, and btrfs.
        let names: Vec<String> = (0..13).map(|i| i.to_string()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let colours: BTreeSet<&str> = names.iter().map(|name| colour(&names, name)).collect();
        assert_eq!(colours.len(), names.len());
    }

    #[test]
    fn plots_by_pool_need_several_pools() {
        let page = render(&Report::new(
            "fxmark",
            vec![row("MWCL", "sheaf", 1, 10)],
            vec![],
        ));
        assert!(!page.contains("Throughput by pool"));
    }

    /// Processor time, and parts of a floor, were throughput.
    #[test]
    fn what_is_no_rate_is_not_called_throughput() {
        let of = |unit: &'static str| Row {
            unit,
            ..row("modelled", "sheaf", 2, 0)
        };
        let titles = |rows: Vec<Row>| {
            let page = render(&Report::new("scale", rows, vec![]));
            let title = |what: &str| page.contains(&format!("{what} by threads"));
            (title("Throughput"), title("Figures"))
        };
        assert_eq!(titles(vec![of("files/s"), of("MiB/s")]), (true, false));
        assert_eq!(titles(vec![of("ops/s"), of("ns")]), (false, true));
    }

    #[test]
    fn axes_end_at_round_numbers() {
        assert_eq!(nice(0.0), 1.0);
        assert_eq!(nice(1.0), 1.0);
        assert_eq!(nice(1234.0), 2000.0);
        assert_eq!(nice(99.0), 100.0);
        assert_eq!(
            (brief(1500.0), brief(2e6)),
            ("1.5K".to_owned(), "2M".to_owned())
        );
    }
}
