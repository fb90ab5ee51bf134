//! What cargo checks: formatting, lints, the unit tests; and the release build.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::exclusions::Exclusions;
use crate::report::Suite;
use crate::{Fallible, process};

const LIMIT: Duration = Duration::from_secs(900);

fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command
        .args(arguments)
        .current_dir(process::source_dir())
        .env("CARGO_TERM_COLOR", "never");
    command
}

pub fn fmt(suite: &mut Suite) -> Fallible<()> {
    let outcome = process::run("fmt", &mut cargo(&["fmt", "--all", "--check"]), LIMIT)?;
    suite.check("cargo fmt", outcome.check("cargo fmt --check"));
    Ok(())
}

pub fn clippy(suite: &mut Suite) -> Fallible<()> {
    let arguments = [
        "clippy",
        "--workspace",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ];
    let outcome = process::run("clippy", &mut cargo(&arguments), LIMIT)?;
    suite.check("cargo clippy", outcome.check("cargo clippy"));
    // A build that records has types of its own for atomics and counted references.
    let recording = ["clippy", "-p", "sheaf-cli", "--features", "trace"];
    let arguments = [&recording[..], &["--", "-D", "warnings"]].concat();
    let outcome = process::run("clippy-trace", &mut cargo(&arguments), LIMIT)?;
    suite.check("cargo clippy, recording", outcome.check("cargo clippy"));
    Ok(())
}

/// `cargo test` in the development profile: optimised a little, with debug assertions, so
/// that lock ranks are checked in every test.
pub fn unit_tests(suite: &mut Suite) -> Fallible<()> {
    crate::packages::install_mount_helper()?;
    let skipped = process::target_dir().join("xtask/skipped");
    // Absolute, as each test runs in the folder of its crate.
    std::fs::write(&skipped, "").map_err(|e| format!("{}: {e}", skipped.display()))?;
    let all = ["test", "--workspace", "--no-fail-fast"];
    tests(suite, "unit", &all, &skipped)?;
    let recording = "test -p sheaf-base -p sheaf-bench --features trace --no-fail-fast";
    let recording: Vec<&str> = recording.split(' ').collect();
    tests(suite, "unit-trace", &recording, &skipped)?;
    let notes = std::fs::read_to_string(&skipped).map_err(|e| format!("skipped tests: {e}"))?;
    count_skipped(&Exclusions::load()?, suite, &notes);
    Ok(())
}

/// A test that was not run for want of something has not passed; one that is not expected to lack it fails.
fn count_skipped(exclusions: &Exclusions, suite: &mut Suite, notes: &str) {
    let tests: BTreeSet<&str> = notes.lines().collect();
    for (test, lack) in tests.iter().filter_map(|line| line.split_once('\t')) {
        match exclusions.reason("unit", test) {
            Some(reason) => suite.exclude(test, &format!("no {lack}: {reason}")),
            None => suite.fail(format!("{test}: skipped, there is no {lack}")),
        }
    }
}

fn tests(suite: &mut Suite, name: &str, arguments: &[&str], skipped: &Path) -> Fallible<()> {
    let mut command = cargo(arguments);
    command.env(base::SKIPPED, skipped);
    let outcome = process::run(name, &mut command, LIMIT)?;
    let (passed, failed) = count(&outcome.output);
    suite.passed += passed;
    let mut named = 0;
    for line in outcome.output.lines() {
        if let Some(name) = line
            .strip_prefix("test ")
            .and_then(|l| l.strip_suffix(" ... FAILED"))
        {
            suite.fail(name.to_owned());
            named += 1;
        }
    }
    if failed != named || (failed == 0 && !outcome.success()) {
        suite.check("cargo test", outcome.check("cargo test"));
    }
    if passed == 0 {
        suite.fail("cargo test ran no test".to_owned());
    }
    Ok(())
}

/// Sums the "test result:" lines.
fn count(output: &str) -> (usize, usize) {
    let mut sums = (0, 0);
    for line in output.lines().filter(|l| l.starts_with("test result:")) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let before = |label: &str| {
            words
                .iter()
                .position(|w| w.starts_with(label))
                .and_then(|i| words[i - 1].parse::<usize>().ok())
                .unwrap_or(0)
        };
        sums.0 += before("passed");
        sums.1 += before("failed");
    }
    sums
}

/// Builds the binary as users run it and returns its path.
pub fn build_release() -> Fallible<PathBuf> {
    println!("Building sheaf");
    let mut command = cargo(&["build", "--release", "--package", "sheaf-cli"]);
    process::run("build", &mut command, LIMIT)?.check("cargo build --release")?;
    Ok(process::target_dir().join("release/sheaf"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_is_skipped_fails_unless_that_is_expected() {
        let exclusions = Exclusions::load().unwrap();
        let mut suite = Suite::new("unit");
        let known = "counter::tests::work_is_counted_where_there_is_a_counter";
        let notes = format!("a::b\troot\n{known}\tcounter of instructions\na::b\troot\n");
        count_skipped(&exclusions, &mut suite, &notes);
        assert_eq!((suite.failed, suite.excluded), (1, 1));
        assert!(suite.failures[0].contains("a::b: skipped, there is no root"));
    }

    #[test]
    fn test_results_are_summed() {
        let output = "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured\n\
                      test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured\n";
        assert_eq!(count(output), (4, 2));
    }
}
