//! `cargo xtask rig`: measurements in a virtual machine, of what the host's kernel lacks.
//!
//! The machine itself is no part of the project: a folder with a script `rig.sh`, which builds a kernel
//! and an initial RAM disk from Debian packages (`rig.sh build`), and boots them under qemu to run one job
//! (`rig.sh run [--icount] … -- JOB ARGUMENTS`). With `--icount` one virtual nanosecond passes with each
//! instruction, of programs and of the kernel alike, so that time on the guest's one CPU counts instructions.
//! Time in which the CPU is idle passes too; it is reported beside.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::{Fallible, process};

const JOB: &str = "xtask/rig/fxmark.sh";
/// The only one that the machine is built for.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Runs without installed libraries, and is small enough to be copied into the guest.
const FLAGS: &str = "-C target-feature=+crt-static -C strip=debuginfo";
/// Names the folder with the machine.
const VARIABLE: &str = "SHEAF_RIG";
/// (program that shows that the package is there, Debian package).
const PACKAGES: &[(&str, &str)] = &[
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("mkfs.xfs", "xfsprogs"),
    ("mkfs.f2fs", "f2fs-tools"),
    ("mkfs.ext4", "e2fsprogs"),
    ("cpio", "cpio"),
    ("zstd", "zstd"),
    ("depmod", "kmod"),
    ("bc", "bc"),
];
const BUILD_LIMIT: Duration = Duration::from_secs(3600);

#[derive(Args, Clone)]
pub struct RigArgs {
    #[command(subcommand)]
    measurement: Measurement,
}

#[derive(Subcommand, Clone)]
enum Measurement {
    /// FxMark on Sheaf and on the kernel's file systems on the same null_blk device: throughput, and
    /// instructions of an operation with everything that it causes until all is at the device
    Fxmark(FxmarkArgs),
}

#[derive(Args, Clone)]
struct FxmarkArgs {
    /// The virtual machine's folder, with rig.sh; without it the environment variable SHEAF_RIG
    #[arg(long, value_name = "FOLDER")]
    rig: Option<PathBuf>,
    /// Where the machine is built (0.7 GB); without it the environment variable RIG_WORK, or a folder
    /// in target/
    #[arg(long, value_name = "FOLDER")]
    work: Option<PathBuf>,
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
    /// Most seconds that one start of the machine may take
    #[arg(long, value_name = "SECONDS", default_value_t = 7200)]
    limit: u64,
    /// Use this statically linked sheaf binary instead of building one
    #[arg(long, value_name = "FILE")]
    sheaf: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the measurement in the foreground.
pub fn run(args: &RigArgs) -> Fallible<bool> {
    match &args.measurement {
        Measurement::Fxmark(args) => fxmark(args).map(|()| true),
    }
}

fn fxmark(args: &FxmarkArgs) -> Fallible<()> {
    check_packages()?;
    let commit = commit();
    let sheaf = match &args.sheaf {
        Some(path) => path.clone(),
        None => build_static()?,
    };
    let rig = Rig::new(args)?;
    rig.build()?;
    rig.bring(&sheaf)?;
    let timed = match args.runs {
        0 => None,
        runs => Some(rig.timed(args, runs)?),
    };
    let counted = (1..=args.counts)
        .map(|number| rig.counted(args, number))
        .collect::<Fallible<Vec<Value>>>()?;
    let results = Results {
        commit,
        timed,
        counted,
    };
    match args.json {
        true => println!("{:#}", results.json()),
        false => print!("{}", results.text()),
    }
    Ok(())
}

fn check_packages() -> Fallible<()> {
    let missing: Vec<&str> = PACKAGES
        .iter()
        .filter(|(program, _)| !process::on_path(program))
        .map(|&(_, package)| package)
        .collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "the virtual machine needs more Debian packages: apt-get install --no-install-recommends {}",
            missing.join(" ")
        )),
    }
}

/// The release build without dynamic libraries. A target that is named leaves build scripts and
/// procedural macros, which are dynamic libraries, as they are.
fn build_static() -> Fallible<PathBuf> {
    eprintln!("Building a static sheaf");
    let mut build = Command::new("cargo");
    build
        .args(["build", "--release", "--package", "sheaf-cli", "--target"])
        .arg(TARGET)
        .env("RUSTFLAGS", FLAGS)
        .current_dir(process::source_dir());
    process::run("rig-sheaf", &mut build, BUILD_LIMIT)?.check("cargo build of a static sheaf")?;
    Ok(process::target_dir().join(TARGET).join("release/sheaf"))
}

/// The commit of the sources that are there now, with a plus sign when they differ from it.
fn commit() -> Option<String> {
    let git = |arguments: &[&str]| {
        let mut git = Command::new("git");
        let output = git.args(arguments).current_dir(process::source_dir());
        let output = output.output().ok().filter(|o| o.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short", "HEAD"])?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    let mark = if changed.is_empty() { "" } else { "+" };
    Some(commit + mark)
}

/// The machine.
struct Rig {
    script: PathBuf,
    work: PathBuf,
    /// What the guest sees of the host: the job and the program.
    share: PathBuf,
    limit: Duration,
}

impl Rig {
    fn new(args: &FxmarkArgs) -> Fallible<Rig> {
        let folder = args.rig.clone();
        let folder = folder.or_else(|| std::env::var_os(VARIABLE).map(PathBuf::from));
        let folder = folder.ok_or_else(|| {
            format!(
                "the virtual machine is no part of the project: name its folder, the one with \
                 rig.sh, by --rig or the environment variable {VARIABLE}"
            )
        })?;
        let script = folder.join("rig.sh");
        let script = script.canonicalize().map_err(|e| {
            format!(
                "{}: {e}; --rig takes the folder of the virtual machine",
                script.display()
            )
        })?;
        let work = args.work.clone();
        let work = work.or_else(|| std::env::var_os("RIG_WORK").map(PathBuf::from));
        let work = work.unwrap_or_else(|| process::work_dir().join("rig"));
        let work = std::path::absolute(&work).map_err(|e| format!("{}: {e}", work.display()))?;
        Ok(Rig {
            script,
            work,
            share: process::work_dir().join("rig-fxmark"),
            limit: Duration::from_secs(args.limit),
        })
    }

    fn command(&self) -> Command {
        let mut command = Command::new("bash");
        command.arg(&self.script).env("RIG_WORK", &self.work);
        command
    }

    /// Builds kernel and initial RAM disk unless they are there. The device is the kernel's own
    /// null_blk: the script's variant of it, which needs a compiler, is left out.
    fn build(&self) -> Fallible<()> {
        if self.is_built() {
            return Ok(());
        }
        eprintln!("Building the virtual machine");
        let mut build = self.command();
        build.arg("build").env("NO_NULLBLK_T", "1");
        std::fs::create_dir_all(&self.work).map_err(|e| format!("{}: {e}", self.work.display()))?;
        let built = process::run("rig-build", &mut build, BUILD_LIMIT)?;
        built.check("rig.sh build")?;
        match self.is_built() {
            true => Ok(()),
            false => Err(format!(
                "rig.sh build made no machine\n{}",
                process::tail(&built.output, 30)
            )),
        }
    }

    fn is_built(&self) -> bool {
        let folders = std::fs::read_dir(&self.work)
            .into_iter()
            .flatten()
            .flatten();
        folders.into_iter().any(|entry| {
            let parts = ["vmlinux", "initrd.cpio"].map(|name| entry.path().join(name));
            parts.iter().all(|part| part.is_file())
        })
    }

    fn bring(&self, sheaf: &Path) -> Fallible<()> {
        let fail = |path: &Path, e: std::io::Error| format!("{}: {e}", path.display());
        std::fs::create_dir_all(&self.share).map_err(|e| fail(&self.share, e))?;
        let job = process::source_dir().join(JOB);
        for (from, name) in [(job.as_path(), "fxmark.sh"), (sheaf, "sheaf")] {
            std::fs::copy(from, self.share.join(name)).map_err(|e| fail(from, e))?;
        }
        Ok(())
    }

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
        let mut run = self.command();
        run.arg("run").args(machine).args(["--mem", &memory]);
        run.args(["--timeout", &self.limit.as_secs().to_string()]);
        run.arg("--").arg(self.share.join("fxmark.sh"));
        run.arg(args.device.to_string());
        run.args(["--workload", &args.workload, "--against", &args.against]);
        run.args(["--pool", &pool, "--operations", &pool, "--seconds", "3600"]);
        run.args(bench);
        // The script has a time limit of its own, and ends in order.
        let outcome = process::run(name, &mut run, self.limit + Duration::from_secs(60))?;
        outcome.check("the job in the virtual machine")?;
        report_in(&outcome.output).ok_or_else(|| {
            let end = process::tail(&outcome.output, 30);
            format!("the virtual machine printed no report\n{end}")
        })
    }
}

/// The report that the job has printed.
fn report_in(output: &str) -> Option<Value> {
    let (_, rest) = output.split_once("FXMARK-BEGIN\n")?;
    let (text, _) = rest.split_once("FXMARK-END")?;
    serde_json::from_str(text).ok()
}

/// What came of it.
struct Results {
    commit: Option<String>,
    /// Reports of `sheaf bench fxmark`.
    timed: Option<Value>,
    counted: Vec<Value>,
}

impl Results {
    fn json(&self) -> Value {
        json!({
            "suite": "rig-fxmark",
            "commit": self.commit,
            "timed": self.timed,
            "counted": self.counted,
        })
    }

    fn text(&self) -> String {
        let mut text = String::new();
        let commit = self.commit.as_deref().unwrap_or("unknown");
        let first = self.timed.iter().chain(&self.counted).next();
        let kernel = first.and_then(|report| report["machine"]["kernel"].as_str());
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "Commit {commit}; Linux {} in the guest",
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

fn rows(report: &Value) -> &[Value] {
    report["rows"].as_array().map_or(&[], Vec::as_slice)
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

fn number(row: &Value, what: &str) -> Option<f64> {
    row["extra"][what].as_f64()
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
    fn the_report_is_found_in_what_the_machine_says() {
        let output = format!(
            "boot\nFXMARK-BEGIN\n{:#}\nFXMARK-END\n\nRIG-RC:0",
            report(6.0)
        );
        assert_eq!(report_in(&output), Some(report(6.0)));
        assert_eq!(report_in("boot\nRIG-RC:1"), None);
        assert_eq!(report_in("FXMARK-BEGIN\nno object\nFXMARK-END"), None);
    }

    #[test]
    fn tables_have_what_is_known() {
        let results = Results {
            commit: Some("abc".to_owned()),
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

    #[test]
    fn a_machine_that_is_not_there_is_said_plainly() {
        use clap::Parser;

        #[derive(Parser)]
        struct Cli {
            #[command(flatten)]
            args: FxmarkArgs,
        }
        let cli = Cli::parse_from(["rig", "--rig", "/no/such/folder"]);
        let error = Rig::new(&cli.args).err().unwrap_or_default();
        assert!(error.contains("/no/such/folder/rig.sh"), "{error}");
        assert!(error.contains("--rig"), "{error}");
    }
}
