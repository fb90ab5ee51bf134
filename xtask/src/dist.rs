//! `cargo xtask dist`: the program for who installs it, optimized by what it does.
//!
//! Three steps, as the compiler's guide has it (The rustc book, "Profile-guided Optimization"): a build that counts how often each branch is taken, the
//! [`TRAINING`], and a build that knows. Code that no training reaches is made small rather than fast, so the training has what users wait for most.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::{Fallible, packages, process};

/// What the counting program does: names and data by one thread and two, in this process and through a mount, many files, durable writes,
/// large files, and recovery.
const TRAINING: [&str; 6] = [
    "fxmark --threads 1,2 --seconds 0.3 --pool 20000 --against sheaf-mount",
    "pool --live 10000,300000 --pairs 200000 --against none",
    "files --count 20000 --against none",
    "fsync --workload overwrite,overwrite-stat,append,create --threads 1,4 --seconds 0.5 --against none",
    "ior --threads 1 --seconds 0.3 --size 64M --against none",
    "recovery --journal-size 64M --files 20000 --cache-size 512M",
];

const BUILD: Duration = Duration::from_secs(3600);
const TRAINED: Duration = Duration::from_secs(1200);

/// The tool that brings counts together comes with the compiler.
const MERGER: &str = "llvm-profdata";
const COMPONENT: &str = "llvm-tools";
/// Flags of the compiler, one behind the other.
const ENCODED_FLAGS: &str = "CARGO_ENCODED_RUSTFLAGS";
const BETWEEN_FLAGS: &str = "\x1f";

/// Builds it, and says where it is.
pub fn run() -> Fallible<bool> {
    if !packages::is_root() || !Path::new("/dev/fuse").exists() {
        return Err(
            "the training mounts: run as root, with /dev/fuse; or build without one \
             (cargo build --profile dist --package sheaf-cli)"
                .to_owned(),
        );
    }
    let host = compiler(&["--version", "--verbose"])?;
    let host = host
        .lines()
        .find_map(|line| line.strip_prefix("host: "))
        .ok_or("rustc does not name its host")?;
    let merger = merger(host)?;
    let dir = process::target_dir().join("xtask/dist");
    let counts = dir.join("counts");
    forget(&counts)?;

    say("building the program that counts");
    let flag = format!("-Cprofile-generate={}", counts.display());
    let counting = build("dist-counting", host, &dir.join("counting"), &flag)?;
    for training in TRAINING {
        train(&counting, training, &counts)?;
    }
    let profile = dir.join("profile");
    let mut merge = Command::new(merger);
    merge.arg("merge").arg("-o").arg(&profile).arg(&counts);
    process::run("dist-merge", &mut merge, TRAINED)?.check(MERGER)?;
    forget(&counts)?;

    say("building the program that knows");
    let flag = format!("-Cprofile-use={}", profile.display());
    let program = build("dist", host, &dir.join("knowing"), &flag)?;
    let home = process::target_dir().join("dist/sheaf");
    place(&program, &home)?;
    say(&format!("{} is built", home.display()));
    Ok(true)
}

fn say(what: &str) {
    eprintln!("xtask: {what}");
}

fn forget(dir: &Path) -> Fallible<()> {
    match std::fs::remove_dir_all(dir) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(format!("{}: {e}", dir.display())),
        _ => Ok(()),
    }
}

/// Has the program do it, and add to `counts`.
fn train(counting: &Path, training: &str, counts: &Path) -> Fallible<()> {
    say(&format!("training: bench {training}"));
    let mut command = Command::new(counting);
    command
        .arg("bench")
        .args(training.split_whitespace())
        .args(["--runs", "1"])
        // Processes add to one of four files when they end.
        .env("LLVM_PROFILE_FILE", counts.join("%4m.profraw"));
    let suite = training.split_whitespace().next().unwrap_or_default();
    process::run(&format!("dist-{suite}"), &mut command, TRAINED)?.check("the training fails")?;
    match counts.is_dir() {
        true => Ok(()),
        false => Err(format!("{} counts nothing", counting.display())),
    }
}

/// Puts a copy of the program there at once: one that runs goes on, and one that cargo has elsewhere as well stays as it is.
fn place(program: &Path, home: &Path) -> Fallible<()> {
    let new = home.with_extension("new");
    let parent = home.parent().expect("it lies in a folder");
    std::fs::create_dir_all(parent)
        .and_then(|()| std::fs::copy(program, &new))
        .and_then(|_| std::fs::rename(&new, home))
        .map_err(|e| {
            format!(
                "{} cannot become {}: {e}",
                program.display(),
                home.display()
            )
        })
}

/// What the compiler prints.
fn compiler(arguments: &[&str]) -> Fallible<String> {
    let output = Command::new("rustc")
        .args(arguments)
        .current_dir(process::source_dir())
        .output()
        .map_err(|e| format!("rustc: {e}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(format!("rustc: {}", text(&output.stderr))),
    }
}

/// The compiler's own tool, as another version's may not read its counts; installed where it is missing.
fn merger(host: &str) -> Fallible<PathBuf> {
    let root = PathBuf::from(compiler(&["--print", "sysroot"])?);
    let path = root.join("lib/rustlib").join(host).join("bin").join(MERGER);
    if path.exists() {
        return Ok(path);
    }
    say(&format!("installing {COMPONENT} beside the compiler"));
    let mut install = Command::new("rustup");
    install
        .args(["component", "add", COMPONENT])
        .current_dir(process::source_dir());
    let installed = process::run("dist-install", &mut install, TRAINED)
        .and_then(|outcome| outcome.check("rustup component add"));
    match path.exists() {
        true => Ok(path),
        false => Err(format!(
            "{} is missing; install the compiler's {COMPONENT}: {}",
            path.display(),
            installed.err().unwrap_or_default()
        )),
    }
}

/// Builds `sheaf` with one more flag of the compiler, for this host alone: so build scripts are built without it. Flags that only a
/// configuration file of cargo has do not apply.
fn build(log: &str, host: &str, target: &Path, flag: &str) -> Fallible<PathBuf> {
    let mut flags: Vec<String> = match std::env::var(ENCODED_FLAGS) {
        Ok(flags) if flags.is_empty() => Vec::new(),
        Ok(flags) => flags.split(BETWEEN_FLAGS).map(str::to_owned).collect(),
        Err(_) => {
            let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
            flags.split_whitespace().map(str::to_owned).collect()
        }
    };
    flags.push(flag.to_owned());
    let mut cargo = Command::new("cargo");
    cargo
        .args(["build", "--profile", "dist", "--package", "sheaf-cli"])
        .args(["--target", host])
        .env(ENCODED_FLAGS, flags.join(BETWEEN_FLAGS))
        .env("CARGO_TARGET_DIR", target)
        .current_dir(process::source_dir());
    process::run(log, &mut cargo, BUILD)?.check("cargo build")?;
    Ok(target.join(host).join("dist/sheaf"))
}
