//! `sheaf demo`: the whole promise on real files. An array of four devices is made and
//! mounted, a tree is copied to it, and the daemon is killed while a writer is writing;
//! afterwards everything that was synced must be there and fsck must find nothing.
//!
//! [`Stage`] is where the files live: a mount ([`mounted`]), or, where mounting is not
//! possible, this program's own process ([`unmounted`]).

mod mounted;
mod record;
mod tree;
mod unmounted;

use std::path::{Path, PathBuf};

use base::clock::Clock;
use bench::interrupt;

use crate::args::{Demo, Mkfs};
use crate::failure::{Failure, OPERATIONAL, Outcome};
use crate::{fsck, logging, mkfs, output, size};

pub use mounted::why_not;
use tree::Tree;

const DEVICES: usize = 4;
const DEVICE_BYTES: u64 = 512 << 20;

/// The two ways to use the array.
trait Stage {
    /// Copies the tree into the array and makes it durable.
    fn copy(&mut self, tree: &Tree) -> Result<(), Failure>;
    /// Reads the copy and compares checksums.
    fn verify(&mut self, tree: &Tree) -> Result<(), Failure>;
    /// Lets a writer append records, kills whoever serves it with SIGKILL, and returns how
    /// many records had been synced before.
    fn write_and_kill(&mut self) -> Result<u64, Failure>;
    /// Opens the array again; returns how many whole records are there.
    fn reopen_and_count(&mut self) -> Result<u64, Failure>;
    /// Ends the use in good order.
    fn finish(&mut self) -> Result<(), Failure>;
}

pub fn run(args: &Demo) -> Outcome {
    logging::start(logging::Target::Terminal)?;
    if args.victim {
        return unmounted::victim(args);
    }
    // From here on a signal ends the demo by an error, which leaves nothing behind.
    interrupt::catch()?;
    let folder = Folder::new(args)?;
    let clock = Clock::real();
    let mut report = Report { clock: &clock };
    let devices = make_array(&folder, &mut report)?;
    let tree = Tree::find(args.tree.as_deref())?;
    let mut stage = choose_stage(args, &folder, &devices, &mut report)?;
    tell(stage.as_mut(), &tree, &mut report)?;
    drop(stage);
    check(&devices, &mut report)?;
    report.step(
        "Done",
        format!(
            "everything that was synced survived, in {}",
            report.seconds(0)
        ),
    )?;
    Ok(0)
}

/// The story itself.
fn tell(stage: &mut dyn Stage, tree: &Tree, report: &mut Report) -> Result<(), Failure> {
    let files = tree.files.len();
    let bytes = size::text(tree.bytes());
    let start = report.now();
    stage.copy(tree)?;
    let time = report.seconds(start);
    report.step(
        "Copied",
        format!("{files} files, {bytes}, synced, in {time}"),
    )?;

    let start = report.now();
    stage.verify(tree)?;
    let time = report.seconds(start);
    report.step("Verified", format!("{files} checksums in {time}"))?;

    let synced = stage.write_and_kill()?;
    report.step(
        "Killed",
        format!("the process that serves the files (SIGKILL), after {synced} synced records of a running writer"),
    )?;

    let start = report.now();
    let found = stage.reopen_and_count()?;
    let time = report.seconds(start);
    report.step("Recovered", format!("in {time}; {found} records are there"))?;
    compare(synced, found)?;

    let start = report.now();
    stage.verify(tree)?;
    let time = report.seconds(start);
    report.step("Verified", format!("{files} checksums again in {time}"))?;
    stage.finish()
}

fn compare(synced: u64, found: u64) -> Result<(), Failure> {
    match (synced, found) {
        (0, _) => Err(Failure::new(
            "no record was synced before the kill, so that nothing was shown; try again, or elsewhere (--dir)",
        )),
        _ if found < synced => Err(Failure::new(format!(
            "{synced} records were synced, but only {found} are there"
        ))),
        _ => Ok(()),
    }
}

/// Prints what was done.
struct Report<'a> {
    clock: &'a Clock,
}

impl Report<'_> {
    fn step(&mut self, what: &str, how: String) -> Result<(), Failure> {
        output::unheard(output::line(format!("{what:>10}  {how}")))?;
        Ok(interrupt::check()?)
    }

    fn now(&self) -> u64 {
        self.clock.monotonic_ns()
    }

    fn seconds(&self, since: u64) -> String {
        format!("{:.2} s", (self.now() - since) as f64 / 1e9)
    }
}

/// The folder of the demo's files, removed with the value.
struct Folder {
    path: PathBuf,
    keep: bool,
}

impl Folder {
    fn new(args: &Demo) -> Result<Self, Failure> {
        let parent = args.dir.clone().unwrap_or_else(std::env::temp_dir);
        let path = parent.join(format!("sheaf-demo-{}", std::process::id()));
        std::fs::create_dir(&path).map_err(|e| Failure::io(path.display(), &e))?;
        Ok(Folder {
            path,
            keep: args.keep,
        })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            tracing::warn!("{}: cannot remove: {error}", self.path.display());
        }
    }
}

fn make_array(folder: &Folder, report: &mut Report) -> Result<Vec<PathBuf>, Failure> {
    let devices: Vec<PathBuf> = (0..DEVICES)
        .map(|i| folder.path.join(format!("device{i}.img")))
        .collect();
    let start = report.now();
    let made = mkfs::make(&Mkfs {
        devices: devices.clone(),
        label: "demo".to_owned(),
        stripe_unit: None,
        journal_size: None,
        size: Some(DEVICE_BYTES),
        uuid: None,
        force: false,
        no_discard: false,
        quiet: true,
        json: false,
    })?;
    let time = report.seconds(start);
    report.step(
        "Made",
        format!(
            "a file system of {} on {DEVICES} devices (files in {}) in {time}",
            size::text(made.size),
            folder.path.display()
        ),
    )?;
    Ok(devices)
}

/// A mount where that is possible, otherwise this process; says which and why.
fn choose_stage(
    args: &Demo,
    folder: &Folder,
    devices: &[PathBuf],
    report: &mut Report,
) -> Result<Box<dyn Stage>, Failure> {
    let reason = match (args.no_mount, mounted::why_not()) {
        (true, _) => "as asked (--no-mount)".to_owned(),
        (false, Some(reason)) => reason,
        (false, None) => match mounted::Mounted::new(&folder.path, devices) {
            Ok(stage) => {
                let place = folder.path.join(mounted::MOUNT_POINT);
                report.step("Mounted", format!("at {}", place.display()))?;
                return Ok(Box::new(stage));
            }
            Err(failure) if interrupt::requested() => return Err(failure),
            Err(failure) => match failure.message() {
                Some(message) => format!("mounting failed: {message}"),
                None => "mounting failed, as said above".to_owned(),
            },
        },
    };
    report.step("In-process", format!("without a mount: {reason}"))?;
    Ok(Box::new(unmounted::Unmounted::new(devices)))
}

fn check(devices: &[PathBuf], report: &mut Report) -> Result<(), Failure> {
    let start = report.now();
    let found = fsck::examine(&fsck::open(devices)?)?;
    if let Some(finding) = found.findings.first() {
        return Err(Failure::new(format!(
            "fsck found {} errors, the worst: {finding}",
            found.findings.len()
        )));
    }
    let time = report.seconds(start);
    report.step(
        "Checked",
        format!(
            "{} files in {} folders: fsck found no error in {time}",
            found.files, found.directories
        ),
    )
}

/// A host error with its path.
fn at(path: &Path) -> impl FnOnce(std::io::Error) -> Failure + '_ {
    move |error| Failure::io(path.display(), &error)
}

/// An exit code of a child as a failure.
fn child_failed(what: &str, status: std::process::ExitStatus) -> Failure {
    match status.code() {
        // It has told why.
        Some(_) => Failure::silent(OPERATIONAL),
        None => Failure::new(format!("{what} ended with {status}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of no record none is lost.
    #[test]
    fn what_was_synced_must_be_there_and_be_something() {
        assert!(compare(0, 0).is_err());
        assert!(compare(0, 1).is_err());
        assert!(compare(2, 1).is_err());
        assert!(compare(2, 2).is_ok());
        assert!(compare(2, 3).is_ok());
    }
}
