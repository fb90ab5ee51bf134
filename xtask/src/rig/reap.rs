//! `sheaf bench reap device` in the machine: how threads wait for a device that takes a set time.

use std::fmt::Write as _;

use clap::Args;
use serde_json::{Value, json};

use super::{MachineArgs, Needs, Program, Rig, number, rows};
use crate::Fallible;

const NEEDS: Needs = Needs {
    packages: &[("fio", "fio"), ("gcc-12", "gcc-12"), ("make", "make")],
    programs: &["fio"],
    timed_device: true,
};

#[derive(Args, Clone)]
pub struct ReapArgs {
    #[command(flatten)]
    machine: MachineArgs,
    /// What the device takes for a transfer, in microseconds, separated by commas: a start of the machine for each. An
    /// instruction takes a nanosecond, and programs three to nine times as long as on a machine of today
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "10,40,90"
    )]
    service: Vec<u64>,
    /// How many reads are waited for together, separated by commas
    #[arg(long, value_name = "LIST", default_value = "1,8,32")]
    depth: String,
    /// Write to the device, too
    #[arg(long)]
    writes: bool,
    /// Virtual time of one measurement
    #[arg(long, default_value_t = 0.1)]
    seconds: f64,
    /// How often each side runs; the median counts
    #[arg(long, value_name = "COUNT", default_value_t = 3)]
    runs: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Measures, and prints what came of it.
pub fn run(args: &ReapArgs) -> Fallible<()> {
    let program = Program::of(&args.machine);
    let rig = Rig::ready(&args.machine, "reap.sh", &NEEDS)?;
    let mut reports = Vec::new();
    for &us in &args.service {
        eprintln!("Measuring on a device of {us} µs");
        let (seconds, runs) = (args.seconds.to_string(), args.runs.to_string());
        let mut job = vec![(us * 1000).to_string()];
        job.extend(["--seconds", &seconds, "--runs", &runs].map(str::to_owned));
        job.extend(["--depth", &args.depth].map(str::to_owned));
        job.extend(args.writes.then(|| "--overwrite".to_owned()));
        let report = rig.run(&format!("rig-reap{us}"), &["--icount"], &job)?;
        reports.push((us, report));
    }
    let results = Results { program, reports };
    match args.json {
        true => println!("{:#}", results.json()),
        false => print!("{}", results.text()),
    }
    Ok(())
}

struct Results {
    program: Program,
    /// By microseconds that the device takes: reports of `sheaf bench reap`.
    reports: Vec<(u64, Value)>,
}

impl Results {
    fn json(&self) -> Value {
        let report = |(us, report): &(u64, Value)| {
            let bars = bars(*us, report);
            let bars: Vec<Value> = bars.iter().map(Bar::json).collect();
            json!({"service_us": us, "report": report, "bars": bars})
        };
        json!({
            "suite": "rig-reap",
            "commit": self.program.commit(),
            "program": self.program.given(),
            "devices": self.reports.iter().map(report).collect::<Vec<Value>>(),
        })
    }

    fn text(&self) -> String {
        let program = self.program.text();
        let kernel = self.reports.first();
        let kernel = kernel.and_then(|(_, report)| report["machine"]["kernel"].as_str());
        let mut text = format!(
            "{program}; Linux {} in the guest, one instruction a nanosecond\n",
            kernel.unwrap_or("?")
        );
        for (us, report) in &self.reports {
            text.push_str(&table(*us, report));
            for bar in bars(*us, report) {
                text.push_str(&bar.line());
            }
        }
        text
    }
}

fn text_of<'a>(row: &'a Value, what: &str) -> &'a str {
    row[what].as_str().unwrap_or_default()
}

fn find<'a>(report: &'a Value, name: &str, target: &str) -> Option<&'a Value> {
    let mut rows = rows(report).iter();
    rows.find(|row| text_of(row, "name") == name && text_of(row, "target") == target)
}

/// The side that polls in the same way to the device.
fn poll_of(target: &str) -> &'static str {
    match target.ends_with("-iopoll") {
        true => "poll-iopoll",
        false => "poll",
    }
}

/// What of a row is compared.
fn figures(row: &Value) -> [f64; 4] {
    let of = |what| number(row, what).unwrap_or(f64::NAN);
    let rate = row["median"].as_f64().unwrap_or(f64::NAN);
    [of("p50_us"), of("p99_us"), rate, of("cpu_percent")]
}

/// A line for each side; beside what it did, its share of what polling did, of the median, the rate and the CPU time.
fn table(us: u64, report: &Value) -> String {
    let mut text = format!(
        "\n| {us} µs | | p50, µs | p99, µs | transfers a second | of a CPU | p50 by poll's | rate | CPU time |\n\
         |---|---|---:|---:|---:|---:|---:|---:|---:|\n"
    );
    let mut before = "";
    for row in rows(report) {
        let (name, target) = (text_of(row, "name"), text_of(row, "target"));
        let shown = if name == before { "" } else { name };
        before = name;
        let [p50, p99, rate, cpu] = figures(row);
        // Writing to a string does not fail.
        let _ = write!(
            text,
            "| {shown} | {target} | {p50:.1} | {p99:.1} | {rate:.0} | {cpu:.0} % |"
        );
        if let Some(poll) = find(report, name, poll_of(target)) {
            let [poll_p50, _, poll_rate, poll_cpu] = figures(poll);
            let quotients = [p50 / poll_p50, rate / poll_rate, cpu / poll_cpu];
            for quotient in quotients {
                let _ = write!(text, " {quotient:.3} |");
            }
        }
        text.push('\n');
    }
    text
}

/// What `lazy` should hold at one transfer at a time.
struct Bar {
    what: String,
    value: f64,
    /// Least, or most.
    least: bool,
    bar: f64,
}

impl Bar {
    fn holds(&self) -> bool {
        match self.least {
            true => self.value >= self.bar,
            false => self.value <= self.bar,
        }
    }

    fn json(&self) -> Value {
        let op = if self.least { ">=" } else { "<=" };
        json!({
            "name": self.what, "value": self.value, "op": op, "bar": self.bar,
            "ok": self.holds(),
        })
    }

    fn line(&self) -> String {
        let op = if self.least { "least" } else { "most" };
        let holds = if self.holds() { "" } else { ": MISSED" };
        format!(
            "{}: {:.3}, at {op} {}{holds}\n",
            self.what, self.value, self.bar
        )
    }
}

/// Of a device that is fast, and of one for which a sleep is short: both by what a program is slower here.
const FAST_US: u64 = 10;
const SLOW_US: u64 = 90;

fn bars(us: u64, report: &Value) -> Vec<Bar> {
    const NAME: &str = "device, 4 KiB read, depth 1";
    let mut bars = Vec::new();
    let Some(interrupt) = find(report, NAME, "interrupt") else {
        return bars;
    };
    for target in ["lazy", "lazy-iopoll"] {
        let polls = find(report, NAME, poll_of(target));
        let (Some(lazy), Some(poll)) = (find(report, NAME, target), polls) else {
            continue;
        };
        let [p50, _, rate, cpu] = figures(lazy);
        let [poll_p50, _, poll_rate, poll_cpu] = figures(poll);
        let mut bar = |what: &str, value: f64, least: bool, bar: f64| {
            let what = format!("{us} µs, {target}: {what}");
            bars.push(Bar {
                what,
                value,
                least,
                bar,
            });
        };
        if us <= FAST_US {
            bar("p50 by poll's", p50 / poll_p50, false, 1.05);
            bar("CPU time by poll's", cpu / poll_cpu, false, 0.7);
        }
        if us >= SLOW_US {
            bar("rate by poll's", rate / poll_rate, true, 0.99);
            bar("percent of a CPU", cpu, false, 25.0);
        }
        let [other_p50, _, _, other_cpu] = figures(interrupt);
        let better = (p50 / other_p50).min(cpu / other_cpu);
        bar(
            "the better of median and CPU time by interrupt's",
            better,
            false,
            1.0,
        );
    }
    bars
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Value {
        let row = |target: &str, p50: f64, cpu: f64| {
            json!({
                "name": "device, 4 KiB read, depth 1", "target": target, "median": 1e6 / p50,
                "extra": {"p50_us": p50, "p99_us": p50 + 1.0, "cpu_percent": cpu},
            })
        };
        json!({
            "machine": {"kernel": "6.12"},
            "rows": [
                row("interrupt", 20.0, 50.0), row("poll", 20.0, 100.0), row("lazy", 21.0, 80.0),
                row("poll-iopoll", 16.0, 100.0), row("lazy-iopoll", 16.0, 60.0),
            ],
        })
    }

    #[test]
    fn sides_are_shown_beside_who_polls_in_the_same_way() {
        let text = table(10, &report());
        let has = |line: &str| assert!(text.contains(line), "{line} is not in\n{text}");
        has("| lazy | 21.0 | 22.0 | 47619 | 80 % | 1.050 | 0.952 | 0.800 |");
        has("| lazy-iopoll | 16.0 | 17.0 | 62500 | 60 % | 1.000 | 1.000 | 0.600 |");
    }

    #[test]
    fn bars_are_told_held_or_missed() {
        let held = |us| -> Vec<bool> { bars(us, &report()).iter().map(Bar::holds).collect() };
        assert_eq!(held(10), [true, false, false, true, true, true]);
        assert_eq!(held(40), [false, true]);
        assert_eq!(held(90), [false, false, false, true, false, true]);
        let results = Results {
            program: Program::Given("/tmp/sheaf".into()),
            reports: vec![(90, report())],
        };
        assert_eq!(results.json()["commit"], Value::Null);
        assert_eq!(results.json()["program"], "/tmp/sheaf");
        assert_eq!(results.json()["devices"][0]["bars"][0]["ok"], false);
        let text = results.text();
        assert!(
            text.contains("rate by poll's: 0.952, at least 0.99: MISSED"),
            "{text}"
        );
    }
}
