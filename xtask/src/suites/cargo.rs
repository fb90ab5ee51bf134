//! What cargo checks: formatting, lints, the unit tests; and the release build.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

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
    tests(suite, "unit", &["test", "--workspace", "--no-fail-fast"])?;
    let recording = "test -p sheaf-base -p sheaf-bench --features trace --no-fail-fast";
    let recording: Vec<&str> = recording.split(' ').collect();
    tests(suite, "unit-trace", &recording)
}

fn tests(suite: &mut Suite, name: &str, arguments: &[&str]) -> Fallible<()> {
    let outcome = process::run(name, &mut cargo(arguments), LIMIT)?;
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
    #[test]
    fn test_results_are_summed() {
        let output = "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured\n\
                      test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured\n";
        assert_eq!(super::count(output), (4, 2));
    }
}
