//! `cargo xtask sim`: the simulator, built and run.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use clap::Args;

use crate::report::Suite;
use crate::{Fallible, process};

#[derive(Args, Clone)]
pub struct SimArgs {
    /// How long it may take, in seconds (s) or minutes (m)
    #[arg(long, default_value = "10m", value_parser = seconds)]
    budget: u64,
    /// Instead: every sequence of one and two operations, and so many seeds of the random mode
    #[arg(long, value_name = "SEEDS", conflicts_with = "budget")]
    complete: Option<u64>,
    /// Threads that simulate; the number of CPUs by default
    #[arg(long)]
    workers: Option<usize>,
    /// Number of the first sequence and seed
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Leave the canaries out
    #[arg(long)]
    no_canaries: bool,
    /// Print one JSON object on standard output
    #[arg(long)]
    json: bool,
}

fn seconds(text: &str) -> Result<u64, String> {
    let (number, unit) = match text.strip_suffix('m') {
        Some(number) => (number, 60),
        None => (text.strip_suffix('s').unwrap_or(text), 1),
    };
    let number: u64 = number
        .parse()
        .map_err(|_| format!("{text:?} is no time, as 90s or 10m are"))?;
    Ok(number * unit)
}

fn build() -> Command {
    let mut command = Command::new("cargo");
    command
        .args([
            "build",
            "--quiet",
            "--profile",
            "sim",
            "--package",
            "sheaf-sim",
        ])
        .current_dir(process::source_dir());
    command
}

fn simulate(program: &Path, workers: Option<usize>) -> Command {
    let workers = workers.unwrap_or_else(base::thread::cpu_count);
    let mut command = Command::new(program);
    command.arg("all").args(["--workers", &workers.to_string()]);
    command
}

/// Runs the simulator in the foreground. True when it found nothing.
pub fn run(args: &SimArgs) -> Fallible<bool> {
    let started = build().status().map_err(|e| format!("cargo build: {e}"))?;
    if !started.success() {
        return Err("the simulator does not build".to_owned());
    }
    let program = process::target_dir().join("sim/sheaf-sim");
    let mut command = simulate(&program, args.workers);
    match args.complete {
        Some(seeds) => command.args(["--complete", &seeds.to_string()]),
        None => command.args(["--seconds", &args.budget.to_string()]),
    };
    command.args(["--first", &args.first.to_string()]);
    if args.no_canaries {
        command.args(["--canary-seconds", "0"]);
    }
    if args.json {
        command.arg("--json");
    }
    let status = command
        .stdin(Stdio::null())
        .status()
        .map_err(|e| format!("the simulator: {e}"))?;
    Ok(status.success())
}

/// Seconds that the suite simulates, canaries included and aimed scenarios aside.
const SUITE_SECONDS: u64 = 50;
/// Number of the suite's first seed.
const SUITE_FIRST: u64 = 2000;

const LIMIT: Duration = Duration::from_secs(900);

/// A program of the simulator's package as the unit tests use it: with debug assertions, and as fast as in the profile
/// `sim`. It is built with a test of that package, as these are, so that after them there is nothing left to build: what
/// a package is built with by itself differs.
pub fn tested(program: &str) -> Fallible<PathBuf> {
    let mut command = Command::new("cargo");
    command
        .args(["test", "--workspace", "--test", "fuzz", "--no-run"])
        .current_dir(process::source_dir());
    let outcome = process::run(&format!("{program}-build"), &mut command, LIMIT)?;
    outcome.check("cargo test --no-run")?;
    Ok(process::target_dir().join("debug").join(program))
}

/// The suite of `cargo xtask test`.
pub fn suite(suite: &mut Suite) -> Fallible<()> {
    let mut command = simulate(&tested("sheaf-sim")?, None);
    command.args(["--seconds", &SUITE_SECONDS.to_string()]);
    // The slowest take 20 s where they are looked for first.
    command.args(["--canary-seconds", "120"]);
    command.args(["--first", &SUITE_FIRST.to_string()]);
    let outcome = process::run("sim", &mut command, LIMIT)?;
    if let Some(line) = outcome.output.lines().last() {
        println!("  {line}");
    }
    suite.check("simulator", outcome.check("sheaf-sim"));
    Ok(())
}
