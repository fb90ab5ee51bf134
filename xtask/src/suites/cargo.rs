//! What cargo checks: formatting, lints, the unit tests; and the release build.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::exclusions::Exclusions;
use crate::report::Suite;
use crate::{Fallible, TestArgs, process};

/// Two to three times what the longest of these takes on two quiet CPUs: a hang is ended, a slow machine is not.
const LIMIT: Duration = Duration::from_secs(1800);

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
pub fn unit_tests(args: &TestArgs, suite: &mut Suite) -> Fallible<()> {
    // Without a mount tests under one are skipped.
    if !args.quick {
        crate::packages::install_mount_helper()?;
    }
    let expected = Expected {
        exclusions: Exclusions::load()?,
        root: crate::packages::is_root(),
        mounts: !args.quick,
    };
    // Compilers and tests leave a CPU idle now and then: time enough for the build that the suites on a mount begin with.
    let _release = match args.needs_release() {
        true => Some(Aside::start(&RELEASE)?),
        false => None,
    };
    let skipped = process::target_dir().join("xtask/skipped");
    let all = ["test", "--workspace", "--no-fail-fast"];
    tests(suite, "unit", &all, &expected, &skipped)?;
    // What a build that records does otherwise: all else has passed, and takes a minute.
    let recording = "test -p sheaf-base -p sheaf-bench --features trace --lib --no-fail-fast -- atomic:: scale:: spares:: sync:: thread:: trace::";
    let recording: Vec<&str> = recording.split(' ').collect();
    tests(suite, "unit-trace", &recording, &expected, &skipped)
}

/// A build of what is needed later, by whatever CPU time others leave. Who needs it builds it again, which tells whether it
/// succeeded; this ends with the wait for it.
struct Aside(std::process::Child);

impl Aside {
    fn start(arguments: &[&str]) -> Fallible<Aside> {
        let mut command = Command::new("nice");
        command
            .args(["-n", "19", "cargo"])
            .args(arguments)
            .current_dir(process::source_dir())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0);
        let started = command.spawn();
        Ok(Aside(
            started.map_err(|e| format!("cannot start nice: {e}"))?,
        ))
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        if let Err(error) = process::wait(&mut self.0, LIMIT) {
            eprintln!("xtask: a build aside: {error}");
        }
    }
}

/// What tests may be expected to find.
struct Expected {
    exclusions: Exclusions,
    /// Users without it lack much.
    root: bool,
    /// Without `--quick`.
    mounts: bool,
}

/// What tests under a mount say that they lack.
const FOR_MOUNTS: [&str; 3] = ["mounts", "/dev/fuse", crate::packages::MOUNT_HELPER];

/// A test that was not run for want of something has not passed; one that is not expected to lack it fails.
fn count_skipped(expected: &Expected, suite: &mut Suite, notes: &str) {
    let tests: BTreeMap<&str, &str> = notes.lines().filter_map(|l| l.split_once('\t')).collect();
    suite.passed = suite.passed.saturating_sub(tests.len());
    for (test, lack) in tests {
        match expected.exclusions.reason("unit", test) {
            Some(reason) => suite.exclude(test, &format!("no {lack}: {reason}")),
            None if !expected.mounts && FOR_MOUNTS.contains(&lack) => {
                suite.exclude(test, &format!("no {lack}, which --quick does without"));
            }
            None if expected.root => suite.fail(format!("{test}: skipped, there is no {lack}")),
            None => suite.exclude(test, &format!("no {lack}, maybe for want of root")),
        }
    }
}

fn tests(
    suite: &mut Suite,
    name: &str,
    arguments: &[&str],
    expected: &Expected,
    skipped: &Path,
) -> Fallible<()> {
    let notes = |error| format!("{}: {error}", skipped.display());
    std::fs::write(skipped, "").map_err(notes)?;
    let mut command = cargo(arguments);
    command.env(base::SKIPPED, skipped);
    let outcome = process::run(name, &mut command, LIMIT)?;
    let (passed, failed) = count(&outcome.output);
    suite.passed += passed;
    let skipped = std::fs::read_to_string(skipped).map_err(notes)?;
    count_skipped(expected, suite, &skipped);
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

/// Arguments of cargo.
const RELEASE: [&str; 4] = ["build", "--release", "--package", "sheaf-cli"];

/// Builds the binary as users run it and returns its path.
pub fn build_release() -> Fallible<PathBuf> {
    println!("Building sheaf");
    let mut command = cargo(&RELEASE);
    process::run("build", &mut command, LIMIT)?.check("cargo build --release")?;
    Ok(process::target_dir().join("release/sheaf"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_is_skipped_fails_unless_that_is_expected() {
        let mut expected = Expected {
            exclusions: Exclusions::load().unwrap(),
            root: true,
            mounts: true,
        };
        let mut suite = Suite::new("unit");
        suite.passed = 9;
        let known = "sheaf-base::counter::tests::work_is_counted_where_there_is_a_counter";
        let notes = format!("a::b\troot\n{known}\tcounter of instructions\na::b\troot\n");
        count_skipped(&expected, &mut suite, &notes);
        assert_eq!((suite.passed, suite.failed, suite.excluded), (7, 1, 1));
        assert!(suite.failures[0].contains("a::b: skipped, there is no root"));
        expected.root = false;
        count_skipped(&expected, &mut suite, &notes);
        assert_eq!((suite.passed, suite.failed, suite.excluded), (5, 1, 3));
    }

    /// It wanted the package fuse3, and ran no test without.
    #[test]
    fn only_quick_does_without_mounts() {
        let counted = |mounts, lack: &str| {
            let expected = Expected {
                exclusions: Exclusions::load().unwrap(),
                root: true,
                mounts,
            };
            let mut suite = Suite::new("unit");
            count_skipped(&expected, &mut suite, &format!("a::b\t{lack}\n"));
            (suite.failed, suite.excluded)
        };
        for lack in FOR_MOUNTS {
            assert_eq!(counted(true, lack), (1, 0), "{lack}");
            assert_eq!(counted(false, lack), (0, 1), "{lack}");
        }
        assert_eq!(counted(false, "io_uring"), (1, 0));
    }

    #[test]
    fn test_results_are_summed() {
        let output = "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured\n\
                      test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured\n";
        assert_eq!(count(output), (4, 2));
    }
}
