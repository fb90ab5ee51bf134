//! pjdfstest: POSIX semantics of every system call that names files, as root.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::Context;
use crate::exclusions::Exclusions;
use crate::process::Outcome;
use crate::report::Suite;
use crate::world::World;
use crate::{Fallible, packages, process};

/// Timestamps on Linux may be as coarse as a tick (4 ms); the naps must be longer.
const CONFIGURATION: &str = r#"
[features]
posix_fallocate = {}
rename_ctime = {}
stat_st_birthtime = {}
utime_now = {}
utimensat = {}

[settings]
naptime = 0.02
allow_remount = false

[dummy_auth]
entries = [["nobody", "nogroup"], ["tests", "tests"]]
"#;

/// Fewer tests than this means that the output was not understood.
const LEAST: usize = 390;

pub fn run(context: &Context, world: &mut World, suite: &mut Suite) -> Fallible<()> {
    let side = world.side_dir().to_owned();
    let configuration = side.join("pjdfstest.toml");
    let groups = std::fs::read_to_string("/etc/group").map_err(|e| format!("/etc/group: {e}"))?;
    let nobody = match groups.lines().any(|line| line.starts_with("nogroup:")) {
        true => CONFIGURATION.to_owned(),
        false => CONFIGURATION.replace("\"nogroup\"", "\"nobody\""),
    };
    std::fs::write(&configuration, nobody)
        .map_err(|e| format!("{}: {e}", configuration.display()))?;
    let mnt = ShortPath::new(&world.mnt)?;
    let mut command = Command::new(packages::tool("pjdfstest"));
    command
        .arg("-c")
        .arg(&configuration)
        .arg("-s")
        .arg(&side)
        .arg("-p")
        .arg(&mnt.0)
        .env("NO_COLOR", "1")
        .env("RUST_BACKTRACE", "0");
    let outcome = process::run("pjdfstest", &mut command, Duration::from_secs(300))?;
    tally(&outcome, context.exclusions, suite);
    Ok(())
}

/// Tests by how they ended.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    failed: usize,
    skipped: usize,
    passed: usize,
}

impl Counts {
    fn all(&self) -> usize {
        self.failed + self.skipped + self.passed
    }
}

/// Counts each test, and that there is one for each that the program itself has counted: one that ends early, or says what is not
/// understood, fails whatever it has said before.
fn tally(outcome: &Outcome, exclusions: &Exclusions, suite: &mut Suite) {
    let mut seen = Counts::default();
    let mut lines = outcome.output.lines().peekable();
    while let Some(line) = lines.next() {
        let mut words = line.split_whitespace();
        let (Some(name), Some(verdict)) = (words.next(), words.next()) else {
            continue;
        };
        let detail = lines.peek().map_or("", |l| l.trim());
        match verdict {
            "ok" => {
                seen.passed += 1;
                suite.passed += 1;
            }
            "skipped" => {
                seen.skipped += 1;
                match exclusions.reason("pjdfstest", name) {
                    Some(reason) => suite.exclude(name, reason),
                    None => suite.fail(format!("{name} was skipped: {detail}")),
                }
            }
            "FAILED" => {
                seen.failed += 1;
                match exclusions.reason("pjdfstest", name) {
                    Some(reason) => suite.exclude(name, reason),
                    None => suite.fail(format!("{name}: {detail}")),
                }
            }
            _ => {}
        }
    }
    if seen.all() < LEAST {
        let tests = seen.all();
        suite.fail(format!("only {tests} tests ran, at least {LEAST} expected"));
    }
    match summary(&outcome.output) {
        Some((counts, total)) if counts == seen && total == seen.all() => {}
        Some((counts, total)) => suite.fail(format!(
            "pjdfstest counts {total} tests, {counts:?}; it told of {seen:?}"
        )),
        None => suite.fail("pjdfstest ended without a summary".to_owned()),
    }
    // It says the same again by its exit status.
    let explained = seen.failed > 0 && outcome.status.and_then(|status| status.code()) == Some(1);
    if !explained {
        let ended = outcome.check("pjdfstest");
        let denied = match ended {
            Ok(()) if seen.failed > 0 => Err("pjdfstest succeeded though tests failed".to_owned()),
            ended => ended,
        };
        if let Err(error) = denied {
            suite.fail(error);
        }
    }
}

/// What the program says at its end, and of how many tests.
fn summary(output: &str) -> Option<(Counts, usize)> {
    let mut lines = output.lines().rev();
    let line = lines.find_map(|line| line.strip_prefix("Summary: "))?;
    let count = |label: &str| {
        let mut parts = line.split(", ");
        let part = parts.find_map(|part| part.strip_suffix(label))?;
        part.trim().parse::<usize>().ok()
    };
    let counts = Counts {
        failed: count(" failed")?,
        skipped: count(" skipped")?,
        passed: count(" passed")?,
    };
    Some((counts, count(" total")?))
}

/// A short path of a folder, wherever the checkout lies: the tests bind sockets below it, and
/// the address of one holds 107 bytes.
struct ShortPath(PathBuf);

impl ShortPath {
    fn new(folder: &Path) -> Fallible<ShortPath> {
        let path = std::env::temp_dir().join(format!("sheaf-{}", std::process::id()));
        let made = match path.is_symlink() {
            true => std::fs::remove_file(&path).and_then(|()| symlink(folder, &path)),
            false => symlink(folder, &path),
        };
        made.map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(ShortPath(path))
    }
}

impl Drop for ShortPath {
    fn drop(&mut self) {
        if let Err(e) = std::fs::remove_file(&self.0) {
            eprintln!("{}: {e}", self.0.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    const EXCLUDED: &str = "link::link_count_max";

    fn output(passed: usize, failed: usize, summary: &str) -> String {
        let mut output = String::new();
        for number in 0..passed {
            output += &format!("chmod::test{number}      ok\n");
        }
        output += &format!("{EXCLUDED}    skipped\n\tno LINK_MAX\n");
        for number in 0..failed {
            output += &format!("open::test{number}    FAILED\n\tEIO\n");
        }
        format!("{output}\n{summary}\n")
    }

    /// Exit code, or none at the time limit, to how many passed and what failed.
    fn tallied(code: Option<i32>, output: String) -> (usize, Vec<String>) {
        let outcome = Outcome {
            status: code.map(|code| ExitStatus::from_raw(code << 8)),
            output,
            seconds: 300.0,
        };
        let mut suite = Suite::new("pjdfstest");
        tally(&outcome, &Exclusions::load().unwrap(), &mut suite);
        assert_eq!(suite.failures.len(), suite.failed);
        (suite.passed, suite.failures)
    }

    #[test]
    fn the_programs_own_count_is_the_same() {
        let whole = "Summary: 0 failed, 1 skipped, 400 passed, 0 expected failures, 401 total";
        assert_eq!(tallied(Some(0), output(400, 0, whole)), (400, Vec::new()));
        let failed = "Summary: 1 failed, 1 skipped, 400 passed, 0 expected failures, 402 total\n\
                      Error: Some tests have failed";
        let (passed, failures) = tallied(Some(1), output(400, 1, failed));
        assert_eq!(
            (passed, &failures[..]),
            (400, &["open::test0: EIO".to_owned()][..])
        );
    }

    /// What was cut after 390 tests was taken for a success, however it had ended.
    #[test]
    fn an_output_that_is_cut_is_no_success() {
        let fails = |code, output, told: &[&str]| {
            let (_, failures) = tallied(code, output);
            assert_eq!(failures.len(), told.len(), "{failures:?}");
            for (failure, told) in failures.iter().zip(told) {
                assert!(failure.contains(told), "{told} is not in {failures:?}");
            }
        };
        let whole = "Summary: 0 failed, 1 skipped, 400 passed, 0 expected failures, 401 total";
        fails(Some(0), output(400, 0, ""), &["without a summary"]);
        fails(
            None,
            output(400, 0, ""),
            &["without a summary", "its time limit"],
        );
        fails(
            Some(101),
            output(400, 0, ""),
            &["without a summary", "exit status: 101"],
        );
        fails(
            Some(101),
            output(400, 1, ""),
            &["open::test0", "without a summary", "101"],
        );
        fails(Some(0), output(399, 0, whole), &["counts 401 tests"]);
        fails(Some(1), output(400, 0, whole), &["exit status: 1"]);
        fails(None, output(400, 0, whole), &["its time limit"]);
        let few = "Summary: 0 failed, 1 skipped, 20 passed, 0 expected failures, 21 total";
        fails(Some(0), output(20, 0, few), &["only 21 tests"]);
    }
}
