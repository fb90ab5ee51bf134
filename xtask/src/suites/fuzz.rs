//! The fuzz targets over their corpora and seeded mutations, on the compiler at hand.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::report::Suite;
use crate::{Fallible, TestArgs, process};

const TARGETS: &[&str] = &[
    "image",
    "journal_bytes",
    "journal_records",
    "bucket",
    "delta",
];
const BUILD_LIMIT: Duration = Duration::from_secs(900);

pub fn run(args: &TestArgs, suite: &mut Suite) -> Fallible<()> {
    let program = build()?;
    for target in TARGETS {
        let mut command = Command::new(&program);
        command
            .args(["--target", target, "--seconds", &args.seconds.to_string()])
            .args(["--seed", &args.seed.to_string()]);
        // One input may be slow, and the corpus comes before the clock is looked at.
        let limit = Duration::from_secs(args.seconds + 120);
        let outcome = process::run(&format!("fuzz-{target}"), &mut command, limit)?;
        suite.check(target, outcome.check("sheaf-fuzz"));
    }
    Ok(())
}

/// With debug assertions, as the unit tests are. It is built with that test of its package, as these are, so that after them
/// there is nothing left to build: what a package is built with by itself differs.
fn build() -> Fallible<PathBuf> {
    let mut command = Command::new("cargo");
    command
        .args(["test", "--workspace", "--test", "fuzz", "--no-run"])
        .current_dir(process::source_dir());
    process::run("fuzz-build", &mut command, BUILD_LIMIT)?.check("cargo test --no-run")?;
    Ok(process::target_dir().join("debug/sheaf-fuzz"))
}
