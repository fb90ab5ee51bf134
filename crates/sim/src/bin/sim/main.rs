//! `sheaf-sim`: crashes the file system in simulation, and says what that found.

mod replay;
mod search;

use base::canary::Canary;
use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "sheaf-sim", about = "Crashes the file system in simulation")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Every short sequence of operations, cut at every I/O
    Exhaustive(search::Parallel),
    /// Long random runs, with faults
    Random(search::Parallel),
    /// Every mode in turn, and the canaries: the whole answer to whether crashes are safe
    All(search::All),
    /// Scenarios that aim at one mechanism each
    Aimed(search::Aimed),
    /// Plants each canary and searches for it
    Canaries(search::Canaries),
    /// Several threads at once, in an order that each seed decides
    Threads(search::Limits),
    /// Runs what went wrong again
    Replay(replay::Replay),
}

/// A canary by its name on command lines.
fn canary(name: &str) -> Result<Canary, String> {
    Canary::from_name(name).ok_or_else(|| format!("no canary {name}"))
}

/// Whether nothing is wrong.
fn execute(command: Command) -> Result<bool, String> {
    match command {
        Command::Exhaustive(args) => search::exhaustive(&args),
        Command::Random(args) => search::random(&args),
        Command::All(args) => search::all(&args),
        Command::Aimed(args) => Ok(search::aimed(&args)),
        Command::Canaries(args) => search::canaries(&args),
        Command::Threads(args) => search::threads(&args),
        Command::Replay(args) => replay::run(&args),
    }
}

fn main() -> ExitCode {
    match execute(Cli::parse().command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(sim::run::VIOLATED),
        Err(what) => {
            eprintln!("sheaf-sim: {what}");
            ExitCode::FAILURE
        }
    }
}
