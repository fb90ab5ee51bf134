//! Everything that is done to the source tree rather than by it: `cargo xtask test` checks
//! and tests the whole project, `cargo xtask docs` writes generated documentation.

mod dist;
mod docs;
mod exclusions;
mod packages;
mod process;
mod report;
mod rig;
mod simulate;
mod source;
mod sqlite;
mod suites;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

/// What went wrong, in words for whoever runs the command.
pub type Fallible<T> = Result<T, String>;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Checks, tests and measures Sheaf")]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Pass all tests: formatting, lints, unit tests, documents, and the suites on a real mount
    Test(TestArgs),
    /// Write the generated parts of docs/
    Docs {
        /// Change nothing; fail when something would change
        #[arg(long)]
        check: bool,
    },
    /// Build the program for who installs it, optimized by what a training takes: root, /dev/fuse, a quarter of an hour
    Dist,
    /// Crash the file system in simulation, in as many ways as the time allows, and plant canaries
    Sim(simulate::SimArgs),
    /// Kill SQLite on a mount, and the daemon below it, and look for what was lost
    Sqlite(sqlite::SqliteArgs),
    /// Measure in a virtual machine, beside file systems that the host's kernel may lack
    Rig(rig::RigArgs),
}

#[derive(Args, Clone)]
pub struct TestArgs {
    /// Skip the suites that need a mount (and root)
    #[arg(long)]
    quick: bool,
    /// Run only these suites (may be repeated or separated by commas)
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Run the mounted suites in this mounted folder of any file system instead of on Sheaf
    #[arg(long, value_name = "PATH")]
    against: Option<PathBuf>,
    /// How often the kill suite kills the daemon
    #[arg(long, default_value_t = 50)]
    kills: u32,
    /// How often the mount suite mounts and unmounts in a row
    #[arg(long, default_value_t = 30)]
    mounts: u32,
    /// Seed of the randomness of the kill, mount and fuzz suites
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds that the fuzz suite gives mutations of each target's corpus
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Use this sheaf binary instead of building one
    #[arg(long, value_name = "FILE")]
    sheaf: Option<PathBuf>,
    /// More mount options for the mounted suites
    #[arg(short = 'o', value_name = "OPTIONS")]
    options: Option<String>,
    /// Keep images and logs of passed suites too
    #[arg(long)]
    keep: bool,
}

impl TestArgs {
    /// Suites on a mount follow the tests, of the binary as users run it.
    fn needs_release(&self) -> bool {
        self.only.is_empty() && !self.quick && self.against.is_none() && self.sheaf.is_none()
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = process::catch_interrupts().and_then(|()| match cli.command {
        Task::Test(args) => suites::run(&args),
        Task::Dist => dist::run(),
        Task::Docs { check } => docs::run(check).map(|()| true),
        Task::Sim(args) => simulate::run(&args),
        Task::Sqlite(args) => sqlite::run(&args),
        Task::Rig(args) => rig::run(&args),
    });
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}
