//! `cargo xtask rig`: measurements in a virtual machine, of what the host's kernel lacks.
//!
//! The machine itself is no part of the project: a folder with a script `rig.sh`, which builds a kernel
//! and an initial RAM disk from Debian packages (`rig.sh build`), and boots them under qemu to run one job
//! (`rig.sh run [--icount] … -- JOB ARGUMENTS`). With `--icount` one virtual nanosecond passes with each
//! instruction, of programs and of the kernel alike, so that time on the guest's one CPU counts instructions.
//! Time in which the CPU is idle passes too; it is reported beside.

mod fxmark;
mod reap;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::Value;

use crate::{Fallible, process};

/// The jobs.
const JOBS: &str = "xtask/rig";
/// The only one that the machine is built for.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Runs without installed libraries, and is small enough to be copied into the guest.
const FLAGS: &str = "-C target-feature=+crt-static -C strip=debuginfo";
/// Names the folder with the machine.
const VARIABLE: &str = "SHEAF_RIG";
/// (program that shows that the package is there, Debian package), whatever is measured.
const PACKAGES: &[(&str, &str)] = &[
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("cpio", "cpio"),
    ("zstd", "zstd"),
    ("depmod", "kmod"),
    ("bc", "bc"),
];
/// The module of a device that takes a set time for each transfer, which the machine's script makes of the kernel's null_blk.
const TIMED_DEVICE: &str = "null_blk_t.ko";
const BUILD_LIMIT: Duration = Duration::from_secs(3600);

#[derive(Args, Clone)]
pub struct RigArgs {
    #[command(subcommand)]
    measurement: Measurement,
}

#[derive(Subcommand, Clone)]
enum Measurement {
    /// FxMark on Sheaf and on the kernel's file systems on the same null_blk device: throughput, and
    /// instructions of an operation with everything that it causes until all is at the device
    Fxmark(fxmark::FxmarkArgs),
    /// How threads wait for a device that takes a set time, in virtual time that repeats: each policy, and fio
    Reap(reap::ReapArgs),
}

/// What all measurements take.
#[derive(Args, Clone)]
struct MachineArgs {
    /// The virtual machine's folder, with rig.sh; without it the environment variable SHEAF_RIG
    #[arg(long, value_name = "FOLDER")]
    rig: Option<PathBuf>,
    /// Where the machine is built (0.7 GB); without it the environment variable RIG_WORK, or a folder
    /// in target/
    #[arg(long, value_name = "FOLDER")]
    work: Option<PathBuf>,
    /// Most seconds that one start of the machine may take
    #[arg(long, value_name = "SECONDS", default_value_t = 7200)]
    limit: u64,
    /// Use this statically linked sheaf binary instead of building one
    #[arg(long, value_name = "FILE")]
    sheaf: Option<PathBuf>,
}

/// What a measurement needs of the machine beside what each does.
struct Needs {
    /// As [`PACKAGES`].
    packages: &'static [(&'static str, &'static str)],
    /// Programs in the guest.
    programs: &'static [&'static str],
    /// The module [`TIMED_DEVICE`], for which the script needs a compiler.
    timed_device: bool,
}

/// Runs the measurement in the foreground.
pub fn run(args: &RigArgs) -> Fallible<bool> {
    match &args.measurement {
        Measurement::Fxmark(args) => fxmark::run(args)?,
        Measurement::Reap(args) => reap::run(args)?,
    }
    Ok(true)
}

fn check_packages(needs: &Needs) -> Fallible<()> {
    let missing: Vec<&str> = PACKAGES
        .iter()
        .chain(needs.packages)
        .filter(|(program, _)| !process::on_path(program))
        .map(|&(_, package)| package)
        .collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "the virtual machine needs more Debian packages: apt-get install --no-install-recommends {}",
            missing.join(" ")
        )),
    }
}

/// The release build without dynamic libraries. A target that is named leaves build scripts and
/// procedural macros, which are dynamic libraries, as they are.
fn build_static() -> Fallible<PathBuf> {
    eprintln!("Building a static sheaf");
    let mut build = Command::new("cargo");
    build
        .args(["build", "--release", "--package", "sheaf-cli", "--target"])
        .arg(TARGET)
        .env("RUSTFLAGS", FLAGS)
        .current_dir(process::source_dir());
    process::run("rig-sheaf", &mut build, BUILD_LIMIT)?.check("cargo build of a static sheaf")?;
    Ok(process::target_dir().join(TARGET).join("release/sheaf"))
}

/// What is measured.
enum Program {
    /// Built of the sources that are there, of this commit if that is known.
    Built(Option<String>),
    /// Somebody else's, which says nothing of what it was built of.
    Given(PathBuf),
}

impl Program {
    /// The one that [`Rig::ready`] brings; to be asked before that, which takes a while.
    fn of(args: &MachineArgs) -> Program {
        match &args.sheaf {
            Some(path) => Program::Given(path.clone()),
            None => Program::Built(commit()),
        }
    }

    /// For reports.
    fn commit(&self) -> Option<&str> {
        match self {
            Program::Built(commit) => commit.as_deref(),
            Program::Given(_) => None,
        }
    }

    fn given(&self) -> Option<&Path> {
        match self {
            Program::Built(_) => None,
            Program::Given(path) => Some(path),
        }
    }

    /// For people.
    fn text(&self) -> String {
        match self {
            Program::Built(commit) => format!("Commit {}", commit.as_deref().unwrap_or("unknown")),
            Program::Given(path) => format!("Program {}, commit unknown", path.display()),
        }
    }
}

/// The commit of the sources that are there now, with a plus sign when they differ from it.
fn commit() -> Option<String> {
    let git = |arguments: &[&str]| {
        let mut git = Command::new("git");
        let output = git.args(arguments).current_dir(process::source_dir());
        let output = output.output().ok().filter(|o| o.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short", "HEAD"])?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    let mark = if changed.is_empty() { "" } else { "+" };
    Some(commit + mark)
}

/// The machine.
struct Rig {
    script: PathBuf,
    work: PathBuf,
    /// What the guest sees of the host: the job and the program.
    share: PathBuf,
    /// The script that is run, of [`JOBS`].
    job: &'static str,
    limit: Duration,
}

impl Rig {
    /// The machine with what the job needs, built if need be, and the program.
    fn ready(args: &MachineArgs, job: &'static str, needs: &Needs) -> Fallible<Rig> {
        check_packages(needs)?;
        let sheaf = match &args.sheaf {
            Some(path) => path.clone(),
            None => build_static()?,
        };
        let rig = Rig::new(args, job)?;
        rig.build(needs)?;
        rig.bring(&sheaf)?;
        Ok(rig)
    }

    fn new(args: &MachineArgs, job: &'static str) -> Fallible<Rig> {
        let folder = args.rig.clone();
        let folder = folder.or_else(|| std::env::var_os(VARIABLE).map(PathBuf::from));
        let folder = folder.ok_or_else(|| {
            format!(
                "the virtual machine is no part of the project: name its folder, the one with \
                 rig.sh, by --rig or the environment variable {VARIABLE}"
            )
        })?;
        let script = folder.join("rig.sh");
        let script = script.canonicalize().map_err(|e| {
            format!(
                "{}: {e}; --rig takes the folder of the virtual machine",
                script.display()
            )
        })?;
        let work = args.work.clone();
        let work = work.or_else(|| std::env::var_os("RIG_WORK").map(PathBuf::from));
        let work = work.unwrap_or_else(|| process::work_dir().join("rig"));
        let work = std::path::absolute(&work).map_err(|e| format!("{}: {e}", work.display()))?;
        Ok(Rig {
            script,
            work,
            share: process::work_dir()
                .join("rig")
                .join(job.trim_end_matches(".sh")),
            job,
            limit: Duration::from_secs(args.limit),
        })
    }

    fn command(&self) -> Command {
        let mut command = Command::new("bash");
        command.arg(&self.script).env("RIG_WORK", &self.work);
        command
    }

    /// Builds kernel and initial RAM disk unless they are there with all that is needed. A device that takes a set time is left out
    /// where nobody needs it.
    fn build(&self, needs: &Needs) -> Fallible<()> {
        if self.is_built(needs) {
            return Ok(());
        }
        eprintln!("Building the virtual machine");
        let mut build = self.command();
        build.arg("build");
        if !needs.timed_device {
            build.env("NO_NULLBLK_T", "1");
        }
        std::fs::create_dir_all(&self.work).map_err(|e| format!("{}: {e}", self.work.display()))?;
        let built = process::run("rig-build", &mut build, BUILD_LIMIT)?;
        built.check("rig.sh build")?;
        match self.is_built(needs) {
            true => Ok(()),
            false => Err(format!(
                "rig.sh build made no machine with all that is needed\n{}",
                process::tail(&built.output, 30)
            )),
        }
    }

    fn is_built(&self, needs: &Needs) -> bool {
        let images = entries(&self.work);
        images.iter().any(|image| {
            let parts = ["vmlinux", "initrd.cpio"].map(|name| image.join(name));
            let programs = image.join("root/bin");
            // A folder for each kernel.
            let kernels = entries(&image.join("root/lib/modules"));
            let device = |kernel: &PathBuf| kernel.join(TIMED_DEVICE).is_file();
            parts.iter().all(|part| part.is_file())
                && needs
                    .programs
                    .iter()
                    .all(|name| programs.join(name).exists())
                && (!needs.timed_device || kernels.iter().any(device))
        })
    }

    fn bring(&self, sheaf: &Path) -> Fallible<()> {
        let fail = |path: &Path, e: std::io::Error| format!("{}: {e}", path.display());
        std::fs::create_dir_all(&self.share).map_err(|e| fail(&self.share, e))?;
        let job = process::source_dir().join(JOBS).join(self.job);
        for (from, name) in [(job.as_path(), self.job), (sheaf, "sheaf")] {
            std::fs::copy(from, self.share.join(name)).map_err(|e| fail(from, e))?;
        }
        Ok(())
    }

    /// Starts the machine with these options for one run of the job; the report that it prints.
    fn run(&self, name: &str, machine: &[&str], job: &[String]) -> Fallible<Value> {
        let mut run = self.command();
        run.arg("run").args(machine);
        run.args(["--timeout", &self.limit.as_secs().to_string()]);
        run.arg("--").arg(self.share.join(self.job)).args(job);
        // The script has a time limit of its own, and ends in order.
        let outcome = process::run(name, &mut run, self.limit + Duration::from_secs(60))?;
        outcome.check("the job in the virtual machine")?;
        report_in(&outcome.output).ok_or_else(|| {
            let end = process::tail(&outcome.output, 30);
            format!("the virtual machine printed no report\n{end}")
        })
    }
}

/// What is in a folder; nothing in one that is not there.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// The report that the job has printed.
fn report_in(output: &str) -> Option<Value> {
    let (_, rest) = output.split_once("REPORT-BEGIN\n")?;
    let (text, _) = rest.split_once("REPORT-END")?;
    serde_json::from_str(text).ok()
}

fn rows(report: &Value) -> &[Value] {
    report["rows"].as_array().map_or(&[], Vec::as_slice)
}

fn number(row: &Value, what: &str) -> Option<f64> {
    row["extra"][what].as_f64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn report() -> Value {
        json!({"rows": [{"extra": {"us": 6.0}}]})
    }

    #[test]
    fn the_report_is_found_in_what_the_machine_says() {
        let output = format!("boot\nREPORT-BEGIN\n{:#}\nREPORT-END\n\nRIG-RC:0", report());
        assert_eq!(report_in(&output), Some(report()));
        assert_eq!(report_in("boot\nRIG-RC:1"), None);
        assert_eq!(report_in("REPORT-BEGIN\nno object\nREPORT-END"), None);
    }

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: MachineArgs,
    }

    /// The commit of the sources was told of any program.
    #[test]
    fn of_a_program_that_is_given_no_commit_is_told() {
        use clap::Parser;

        let program = |words: &[&str]| Program::of(&Cli::parse_from(words).args);
        let given = program(&["rig", "--sheaf", "/tmp/sheaf"]);
        assert_eq!(given.commit(), None);
        assert_eq!(given.given(), Some(Path::new("/tmp/sheaf")));
        assert_eq!(given.text(), "Program /tmp/sheaf, commit unknown");
        let built = program(&["rig"]);
        assert_eq!(built.commit(), commit().as_deref());
        assert_eq!(built.given(), None);
        assert_eq!(Program::Built(None).text(), "Commit unknown");
    }

    #[test]
    fn a_machine_that_is_not_there_is_said_plainly() {
        use clap::Parser;

        let cli = Cli::parse_from(["rig", "--rig", "/no/such/folder"]);
        let error = Rig::new(&cli.args, "fxmark.sh").err().unwrap_or_default();
        assert!(error.contains("/no/such/folder/rig.sh"), "{error}");
        assert!(error.contains("--rig"), "{error}");
    }
}
