//! The examples in contrib/, checked by the programs that read them, and the licences of what
//! Sheaf is built from. What a machine has no checker for is excluded.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::report::Suite;
use crate::{Fallible, process};

const LIMIT: Duration = Duration::from_secs(120);

pub fn run(suite: &mut Suite) -> Fallible<()> {
    match process::on_path("systemd-analyze") {
        true => suite.check("systemd unit", systemd_unit()),
        false => suite.exclude("systemd unit", "systemd-analyze is not installed"),
    }
    let mut probe = Command::new("udevadm");
    let verifies = process::on_path("udevadm")
        && process::run("udevadm", probe.args(["verify", "--help"]), LIMIT)?.success();
    match verifies {
        true => suite.check("udev rule", udev_rule()),
        false => suite.exclude(
            "udev rule",
            "no udevadm that verifies (systemd 254 or later)",
        ),
    }
    match process::on_path("cargo-deny") {
        true => suite.check("licences", licences()),
        false => suite.exclude("licences", "cargo-deny is not installed"),
    }
    Ok(())
}

fn contrib() -> std::path::PathBuf {
    process::source_dir().join("contrib")
}

/// The unit as installed, but with a program that is there.
fn systemd_unit() -> Fallible<()> {
    let dir = process::work_dir().join("units");
    std::fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let source = contrib().join("systemd/sheaf@.service");
    let text =
        std::fs::read_to_string(&source).map_err(|e| format!("{}: {e}", source.display()))?;
    let unit = dir.join("sheaf@.service");
    std::fs::write(&unit, text.replace("/usr/local/bin/sheaf", "/bin/true"))
        .map_err(|e| format!("{}: {e}", unit.display()))?;
    let mut analyze = Command::new("systemd-analyze");
    analyze
        .args(["verify", "--man=no"])
        .arg(dir.join("sheaf@data.service"));
    let outcome = process::run("systemd-analyze", &mut analyze, LIMIT)?;
    outcome.check("systemd-analyze verify")?;
    // What it only warns of has exit status 0.
    match outcome.output.lines().find(|l| l.contains("sheaf@")) {
        Some(warning) => Err(warning.to_owned()),
        None => Ok(()),
    }
}

fn udev_rule() -> Fallible<()> {
    let rule: &Path = &contrib().join("udev/64-sheaf.rules");
    let mut verify = Command::new("udevadm");
    verify.arg("verify").arg(rule);
    process::run("udevadm", &mut verify, LIMIT)?.check("udevadm verify")
}

/// Without the list of known vulnerabilities, which is downloaded.
fn licences() -> Fallible<()> {
    let mut deny = Command::new("cargo-deny");
    deny.args(["check", "bans", "licenses", "sources"])
        .current_dir(process::source_dir());
    process::run("cargo-deny", &mut deny, LIMIT)?.check("cargo deny check")
}
