//! `sheaf bench fxmark` in the machine: throughput, and instructions of an operation.

use std::fmt::Write as _;

use clap::Args;
use serde_json::{Value, json};

use super::{MachineArgs, Needs, Program, Rig, number, rows};
use crate::Fallible;

const NEEDS: Needs = Needs {
    packages: &[
        ("mkfs.xfs", "xfsprogs"),
        ("mkfs.f2fs", "f2fs-tools"),
        ("mkfs.ext4", "e2fsprogs"),
    ],
    programs: &["mkfs.f2fs", "mkfs.ext4", "mkfs.xfs"],
    // The device is the kernel's own null_blk.
    timed_device: false,
};

#[derive(Args, Clone)]
pub struct FxmarkArgs {
    #[command(flatten)]
    machine: MachineArgs,
    /// Workloads, separated by commas
    #[arg(long, value_name = "LIST", default_value = "MWCL,MWUL,MWUM,MWRL")]
    workload: String,
    /// Kernel file systems to compare with, separated by commas
    #[arg(long, value_name = "LIST", default_value = "f2fs,ext4,xfs")]
    against: String,
    /// Files that are created, unlinked or renamed in each window
    #[arg(long, value_name = "COUNT", default_value_t = 20_000)]
    pool: u64,
    /// Runs of each side for the throughput; the median counts. 0: no throughput
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    runs: u32,
    /// Numbers of threads for the throughput, separated by commas; the machine has as many CPUs
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,2"
    )]
    threads: Vec<u32>,
    /// How often the machine is started to count instructions, by one thread. 0: they are not counted
    #[arg(long, value_name = "COUNT", default_value_t = 2)]
    counts: u32,
    /// Size of the device in MiB
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    device: u32,
    /// Memory of the guest, the device's content included, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 4096)]
    memory: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Measures, and prints what came of it.
pub fn run(args: &FxmarkArgs) -> Fallible<()> {
    let program = Program::of(&args.machine);
    let rig = Rig::ready(&args.machine, "fxmark.sh", &NEEDS)?;
    let timed = match args.runs {
        0 => None,
        runs => Some(rig.timed(args, runs)?),
    };
    let counted = (1..=args.counts)
        .map(|number| rig.counted(args, number))
        .collect::<Fallible<Vec<Value>>>()?;
    let results = Results {
        program,
        timed,
        counted,
    };
    match args.json {
        true => println!("{:#}", results.json()),
        false => print!("{}", results.text()),
    }
    Ok(())
}

impl Rig {
    /// The throughput, on as many CPUs as there are threads at most.
    fn timed(&self, args: &FxmarkArgs, runs: u32) -> Fallible<Value> {
        eprintln!("Measuring the throughput");
        let threads: Vec<String> = args.threads.iter().map(u32::to_string).collect();
        let cpus = args.threads.iter().copied().max().unwrap_or(1).to_string();
        let bench = ["--runs", &runs.to_string(), "--threads", &threads.join(",")];
        self.fxmark(args, "rig-timed", &["--smp", &cpus], &bench)
    }

    /// Instructions: one run, which repeats.
    fn counted(&self, args: &FxmarkArgs, number: u32) -> Fallible<Value> {
        eprintln!("Counting instructions, {number} of {}", args.counts);
        let name = format!("rig-counted{number}");
        let bench = ["--runs", "1", "--threads", "1"];
        self.fxmark(args, &name, &["--icount"], &bench)
    }

    /// Starts the machine with `machine` options for one `sheaf bench fxmark` with `bench` options.
    fn fxmark(
        &self,
        args: &FxmarkArgs,
        name: &str,
        machine: &[&str],
        bench: &[&str],
    ) -> Fallible<Value> {
        let (pool, memory) = (args.pool.to_string(), args.memory.to_string());
        let mut job = vec![args.device.to_string()];
        let options = [
            ["--workload", &args.workload, "--against", &args.against],
            ["--pool", &pool, "--operations", &pool],
        ];
        job.extend(options.as_flattened().iter().map(|&word| word.to_owned()));
        job.extend(["--seconds", "3600"].map(str::to_owned));
        job.extend(bench.iter().map(|&word| word.to_owned()));
        let machine = [machine, &["--mem", &memory]].concat();
        self.run(name, &machine, &job)
    }
}

/// What came of it.
struct Results {
    program: Program,
    /// Reports of `sheaf bench fxmark`.
    timed: Option<Value>,
    counted: Vec<Value>,
}

impl Results {
    fn json(&self) -> Value {
        json!({
            "suite": "rig-fxmark",
            "commit": self.program.commit(),
            "program": self.program.given(),
            "timed": self.timed,
            "counted": self.counted,
        })
    }

    fn text(&self) -> String {
        let mut text = String::new();
        let program = self.program.text();
        let first = self.timed.iter().chain(&self.counted).next();
        let kernel = first.and_then(|report| report["machine"]["kernel"].as_str());
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{program}; Linux {} in the guest",
            kernel.unwrap_or("?")
        );
        if let Some(io) = first.and_then(io) {
            let _ = writeln!(text, "Sheaf in-process reaches the device by {io}");
        }
        if let Some(report) = &self.timed {
            text.push_str(&throughput(report));
        }
        if !self.counted.is_empty() {
            text.push_str(&instructions(&self.counted));
        }
        text
    }
}

/// How Sheaf does its I/O.
fn io(report: &Value) -> Option<&str> {
    rows(report)
        .iter()
        .find_map(|row| row["extra"]["io"].as_str())
}

/// Which figure a row is about.
fn key(row: &Value) -> (&str, u64, &str) {
    (
        row["name"].as_str().unwrap_or_default(),
        row["threads"].as_u64().unwrap_or_default(),
        row["target"].as_str().unwrap_or_default(),
    )
}

/// Thousands of operations a second: one line for workload and threads, one column for a side.
fn throughput(report: &Value) -> String {
    let mut targets: Vec<&str> = Vec::new();
    let mut lines: Vec<(&str, u64)> = Vec::new();
    for row in rows(report) {
        let (name, threads, target) = key(row);
        if !targets.contains(&target) {
            targets.push(target);
        }
        if lines.last() != Some(&(name, threads)) {
            lines.push((name, threads));
        }
    }
    let runs = rows(report).first().and_then(|row| row["runs"].as_u64());
    let mut text = format!(
        "\nThroughput, thousands of operations a second: median of {} (least–most)\n\n\
         | workload | threads | {} |\n|---|---:|{}\n",
        runs.unwrap_or(0),
        targets.join(" | "),
        "---:|".repeat(targets.len())
    );
    for (name, threads) in lines {
        let _ = write!(text, "| {name} | {threads} |");
        for &target in &targets {
            let cell = rows(report)
                .iter()
                .find(|row| key(row) == (name, threads, target));
            let _ = write!(text, " {} |", cell.map_or("–".to_owned(), rate));
        }
        text.push('\n');
    }
    text
}

fn rate(row: &Value) -> String {
    let thousands = |what: &str| row[what].as_f64().unwrap_or(f64::NAN) / 1e3;
    let (median, min, max) = (thousands("median"), thousands("min"), thousands("max"));
    format!("{median:.2} ({min:.2}–{max:.2})")
}

/// Thousands of instructions of an operation, all in: one line for a workload and side. Of several
/// counts the first, and how far the others are off.
fn instructions(reports: &[Value]) -> String {
    let mut text = format!(
        "\nThousands of instructions of an operation, programs and kernel: to the end of the last one, of the \
         sync after it, and of the unmount after that; counted {} times\n\n\
         | workload | file system | operations | to the sync | of it idle | bytes written \
         | to the unmount | of it idle | bytes written | largest difference |\n\
         |---|---|---:|---:|---:|---:|---:|---:|---:|---:|\n",
        reports.len()
    );
    for row in reports.first().map_or(&[][..], rows) {
        let (name, _, target) = key(row);
        let alone = row["median"].as_f64().map(|rate| 1e6 / rate);
        let _ = write!(text, "| {name} | {target} | {} ", thousands(alone));
        for end in ["synced", "unmounted"] {
            let number = |what: &str| number(row, &format!("{end}_{what}_per_op"));
            let all = number("us");
            // What runs at the start is booked when it stops: busy may be more than all.
            let idle = all
                .zip(number("busy_us"))
                .map(|(all, busy)| (all - busy).max(0.0));
            let bytes = number("written_bytes").map_or("–".to_owned(), |n| format!("{n:.0}"));
            let (all, idle) = (thousands(all), thousands(idle));
            let _ = write!(text, "| {all} | {idle} | {bytes} ");
        }
        let percent = difference(reports, row).map(|part| format!("{:.2} %", part * 100.0));
        let _ = writeln!(text, "| {} |", percent.as_deref().unwrap_or("–"));
    }
    text
}

/// Virtual microseconds are thousands of instructions.
fn thousands(us: Option<f64>) -> String {
    us.map_or("–".to_owned(), |us| format!("{us:.1}"))
}

/// How far the other counts are from this row's, at most, as a part of it.
fn difference(reports: &[Value], row: &Value) -> Option<f64> {
    let same = |report| rows(report).iter().find(|other| key(other) == key(row));
    let of = |row| number(row, "synced_us_per_op");
    let first = of(row)?;
    let others = reports.iter().skip(1).filter_map(same).filter_map(of);
    others
        .map(|other| (other - first).abs() / first)
        .reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(us: f64) -> Value {
        let row = |target: &str, threads: u64, us: f64| {
            json!({
                "name": "MWCL", "target": target, "threads": threads, "unit": "ops/s",
                "median": 2000.0, "min": 1000.0, "max": 3000.0, "runs": 5,
                "extra": {
                    "synced_us_per_op": us, "synced_busy_us_per_op": us - 1.0,
                    "synced_written_bytes_per_op": 300.4, "io": "io_uring, direct",
                },
            })
        };
        json!({
            "suite": "fxmark",
            "machine": {"cpu": "", "cores": 1, "kernel": "6.12"},
            "rows": [row("sheaf", 1, us), row("f2fs", 1, us * 2.0), row("sheaf", 2, us)],
        })
    }

    #[test]
    fn tables_have_what_is_known() {
        let results = Results {
            program: Program::Built(Some("abc".to_owned())),
            timed: Some(report(6.0)),
            counted: vec![report(6.0), report(6.06)],
        };
        let text = results.text();
        let has = |line: &str| assert!(text.contains(line), "{line} is not in\n{text}");
        has("Commit abc; Linux 6.12");
        has("by io_uring, direct");
        has("| MWCL | 1 | 2.00 (1.00–3.00) | 2.00 (1.00–3.00) |");
        has("| MWCL | 2 | 2.00 (1.00–3.00) | – |");
        has("| MWCL | sheaf | 500.0 | 6.0 | 1.0 | 300 | – | – | – | 1.00 % |");
        has("| MWCL | f2fs | 500.0 | 12.0 | 1.0 | 300 |");
    }
}
