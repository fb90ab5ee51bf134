//! `sheaf rm`: removes files, and folders with everything in them by many threads, without a
//! mount.

use std::path::Path;

use base::clock::Clock;
use fs::Removed;
use serde::Serialize;

use crate::args::Rm;
use crate::failure::{Failure, Outcome};
use crate::offline::{Offline, bytes, inside, last_name, named, parent};
use crate::output::{self, harmless};
use crate::{progress, size};

/// What was removed, as `--json` shows it.
#[derive(Default, Serialize)]
struct Report {
    /// Names of everything but folders.
    files: u64,
    directories: u64,
    seconds: f64,
}

pub fn run(args: &Rm) -> Outcome {
    let clock = Clock::real();
    for path in &args.paths {
        check(inside(path).unwrap_or(bytes(path)))?;
    }
    let offline = Offline::open(&args.source.devices, false)?;
    let mut report = Report::default();
    let bar = progress::bar("Removed:", 0);
    // As with rm(1), a path that fails keeps no other from being removed.
    let mut failures = Vec::new();
    for path in &args.paths {
        match remove(args, &offline, path, &|n| bar.inc(n)) {
            Ok(removed) => {
                report.files += removed.files;
                report.directories += removed.directories;
            }
            Err(failure) => failures.push(failure),
        }
    }
    bar.finish_and_clear();
    // What was removed must be on the devices, whatever failed.
    failures.extend(offline.close().err());
    let text = format!(
        "{} and {} removed",
        size::counted(report.files, "file"),
        size::counted(report.directories, "folder")
    );
    let mut reasons = failures.iter().filter_map(Failure::message);
    if let Some(first) = reasons.next() {
        let rest: Vec<&str> = reasons.collect();
        let all = Failure::new(first).followed_by(&rest.join("\n"));
        return Err(all.after(&text));
    }
    report.seconds = clock.monotonic_ns() as f64 / 1e9;
    let told = match args.json {
        true => output::json(&report),
        false => output::line(&text),
    };
    told.map_err(|failure| failure.after(&text))?;
    Ok(0)
}

/// Refuses paths that name nothing which could be removed, before anything is.
fn check(path: &[u8]) -> Result<(), Failure> {
    match last_name(path) {
        b"" => Err(Failure::usage("the root folder cannot be removed")),
        b"." | b".." => Err(Failure::usage(format!(
            "{}: a path that ends in . or .. names no folder to remove; give the name that it has",
            harmless(path)
        ))),
        _ => Ok(()),
    }
}

fn remove(
    args: &Rm,
    offline: &Offline,
    path: &Path,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Removed, Failure> {
    let path = inside(path).unwrap_or(bytes(path));
    let (folder, name) = (offline.find(parent(path))?.ino, last_name(path));
    let failed = |error| named(path, error);
    // A slash at the end means a folder, and no link to one.
    if path.ends_with(b"/") && !offline.fs.lookup(folder, name).map_err(failed)?.is_dir() {
        return Err(failed(fs::Error::NotADirectory));
    }
    let asked = args.jobs.map(|jobs| jobs as usize);
    let workers = asked.unwrap_or_else(base::thread::cpu_count);
    match offline.remove(folder, name, args.recursive, workers, progress) {
        Err(fs::Error::IsADirectory) => Err(Failure::new(format!(
            "{} is a folder; to remove it with everything in it give --recursive",
            harmless(path)
        ))),
        other => other.map_err(failed),
    }
}
