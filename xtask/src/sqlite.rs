//! `cargo xtask sqlite`: SQLite on a mount, killed over and over.

use std::process::Command;

use clap::Args;

use crate::{Fallible, process};

#[derive(Args, Clone)]
pub struct SqliteArgs {
    /// How often
    #[arg(long, default_value_t = 200)]
    kills: u32,
    /// Seed of the randomness
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

pub fn run(args: &SqliteArgs) -> Fallible<bool> {
    let mut command = Command::new("cargo");
    command
        .args(["run", "--quiet", "--release", "--package", "sheaf-sqlite"])
        .args(["--", "kills", "--runs", &args.kills.to_string()])
        .args(["--seed", &args.seed.to_string()])
        .current_dir(process::source_dir());
    let status = command.status().map_err(|e| format!("cargo: {e}"))?;
    Ok(status.success())
}
