//! pjdfstest: POSIX semantics of every system call that names files, as root.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::Context;
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
    let mut lines = outcome.output.lines().peekable();
    let mut seen = 0;
    while let Some(line) = lines.next() {
        let mut words = line.split_whitespace();
        let (Some(name), Some(verdict)) = (words.next(), words.next()) else {
            continue;
        };
        let detail = lines.peek().map_or("", |l| l.trim());
        match verdict {
            "ok" => suite.passed += 1,
            "skipped" => match context.exclusions.reason("pjdfstest", name) {
                Some(reason) => suite.exclude(name, reason),
                None => suite.fail(format!("{name} was skipped: {detail}")),
            },
            "FAILED" => match context.exclusions.reason("pjdfstest", name) {
                Some(reason) => suite.exclude(name, reason),
                None => suite.fail(format!("{name}: {detail}")),
            },
            _ => continue,
        }
        seen += 1;
    }
    if seen < LEAST {
        suite.check("pjdfstest", outcome.check("pjdfstest"));
        suite.fail(format!("only {seen} tests ran, at least {LEAST} expected"));
    }
    Ok(())
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
