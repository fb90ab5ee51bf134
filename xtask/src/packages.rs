//! What the suites need from outside: Debian packages, two tools from the Rust registry, a
//! user, and rights. Installed when that is possible, otherwise explained.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::{Fallible, process};

/// (program that shows that the package is there, Debian package).
const PACKAGES: &[(&str, &str)] = &[
    (MOUNT_HELPER, "fuse3"),
    ("sqlite3", "sqlite3"),
    ("fio", "fio"),
    ("stress-ng", "stress-ng"),
    ("dbench", "dbench"),
    ("setfattr", "attr"),
    ("setfacl", "acl"),
    ("git", "git"),
    ("pgrep", "procps"),
    ("mkfs.xfs", "xfsprogs"),
    ("mkfs.ext4", "e2fsprogs"),
];

/// (crate, version): installed with the dependencies its own lock file names.
const TOOLS: &[(&str, &str)] = &[("pjdfstest", "0.2.2"), ("fsx", "0.3.2")];

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Checks the rights that the mounted suites need.
pub fn require_mount_rights() -> Fallible<()> {
    if !is_root() {
        return Err(
            "the mounted suites switch users and mount: run as root, or skip them with --quick"
                .to_owned(),
        );
    }
    if !std::path::Path::new("/dev/fuse").exists() {
        return Err(
            "there is no /dev/fuse: load the kernel module (modprobe fuse), in a container give \
             it the device and CAP_SYS_ADMIN, or skip the mounted suites with --quick"
                .to_owned(),
        );
    }
    Ok(())
}

/// The helper by which unit tests mount, where the kernel can.
pub const MOUNT_HELPER: &str = "fusermount3";

/// Installs the Debian packages that are missing.
pub fn install_packages() -> Fallible<()> {
    install(|_| true)
}

/// Installs what unit tests need to mount, if they can at all.
pub fn install_mount_helper() -> Fallible<()> {
    match std::path::Path::new("/dev/fuse").exists() {
        true => install(|program| program == MOUNT_HELPER),
        false => Ok(()),
    }
}

fn install(wanted: impl Fn(&str) -> bool) -> Fallible<()> {
    let missing: Vec<&str> = PACKAGES
        .iter()
        .filter(|(program, _)| wanted(program) && !process::on_path(program))
        .map(|&(_, package)| package)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    if !is_root() || !process::on_path("apt-get") {
        return Err(format!(
            "please install: {} (names of Debian packages)",
            missing.join(" ")
        ));
    }
    println!("Installing {}", missing.join(" "));
    let limit = Duration::from_secs(300);
    let mut update = Command::new("apt-get");
    update.args(["-q", "update"]);
    process::run("apt-update", &mut update, limit)?.check("apt-get update")?;
    let mut install = Command::new("apt-get");
    install
        .args(["-q", "-y", "--no-install-recommends", "install"])
        .args(&missing)
        .env("DEBIAN_FRONTEND", "noninteractive");
    process::run("apt-install", &mut install, limit)?.check("apt-get install")
}

/// Where a registry tool is installed.
pub fn tool(name: &str) -> PathBuf {
    tools_dir().join("bin").join(name)
}

fn tools_dir() -> PathBuf {
    process::target_dir().join("tools")
}

/// Installs pjdfstest and fsx from the Rust registry unless these versions are there.
pub fn install_tools() -> Fallible<()> {
    for (name, version) in TOOLS {
        let mark = tools_dir().join(format!("{name}-{version}.installed"));
        if mark.exists() && tool(name).exists() {
            continue;
        }
        println!("Installing {name} {version} from the Rust registry");
        let mut install = Command::new("cargo");
        install
            .args(["install", "--locked", "--force", "--quiet", "--root"])
            .arg(tools_dir())
            .arg("--version")
            .arg(format!("={version}"))
            .arg(name)
            .env("CARGO_TARGET_DIR", tools_dir().join("build"));
        let log = format!("install-{name}");
        process::run(&log, &mut install, Duration::from_secs(600))?
            .check(&format!("cargo install {name}"))?;
        std::fs::write(&mark, "").map_err(|e| format!("{}: {e}", mark.display()))?;
    }
    Ok(())
}

/// User and group id of the user `tests`.
pub fn test_user() -> Fallible<(u32, u32)> {
    let users = std::fs::read_to_string("/etc/passwd").map_err(|e| format!("/etc/passwd: {e}"))?;
    let ids = users.lines().find_map(|line| {
        let mut fields = line.strip_prefix("tests:")?.split(':').skip(1);
        Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
    });
    ids.ok_or_else(|| "there is no user tests".to_owned())
}

/// Makes the user and group `tests`, between which and `nobody` pjdfstest switches.
pub fn make_test_user() -> Fallible<()> {
    let users = std::fs::read_to_string("/etc/passwd").map_err(|e| format!("/etc/passwd: {e}"))?;
    if users.lines().any(|line| line.starts_with("tests:")) {
        return Ok(());
    }
    let mut useradd = Command::new("useradd");
    useradd.args([
        "--no-create-home",
        "--user-group",
        "--shell",
        "/usr/sbin/nologin",
        "tests",
    ]);
    process::run("useradd", &mut useradd, Duration::from_secs(30))?.check("useradd tests")
}
