//! `sheaf rm`: removes files, and folders with everything in them by many threads, without a
//! mount.

use std::path::Path;

use base::clock::Clock;
use fs::Removed;
use serde::Serialize;

use crate::args::Rm;
use crate::failure::{Failure, Outcome};
use crate::offline::{Offline, bytes, inside, last_name, parent};
use crate::output::{self, harmless};
use crate::progress;

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
    let offline = Offline::open(&args.source.devices, false)?;
    let mut report = Report::default();
    let bar = progress::bar("Removed:", 0);
    // What was removed stays removed, and must be on the devices, if a later path fails.
    let outcome = args.paths.iter().try_for_each(|path| {
        let removed = remove(args, &offline, path, &|n| bar.inc(n))?;
        report.files += removed.files;
        report.directories += removed.directories;
        Ok::<_, Failure>(())
    });
    bar.finish_and_clear();
    let closed = offline.close();
    let text = format!(
        "{} files and {} folders removed",
        report.files, report.directories
    );
    outcome.map_err(|failure| failure.after(&text))?;
    closed?;
    report.seconds = clock.monotonic_ns() as f64 / 1e9;
    match args.json {
        true => output::json(&report)?,
        false => output::line(text)?,
    }
    Ok(0)
}

fn remove(
    args: &Rm,
    offline: &Offline,
    path: &Path,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Removed, Failure> {
    let path = inside(path).unwrap_or(bytes(path));
    let name = last_name(path);
    if name.is_empty() {
        return Err(Failure::usage("the root folder cannot be removed"));
    }
    let folder = offline.find(parent(path))?.ino;
    let workers = args.jobs.unwrap_or_else(base::thread::cpu_count);
    match offline.remove(folder, name, args.recursive, workers, progress) {
        Err(fs::Error::IsADirectory) => Err(Failure::new(format!(
            "{} is a folder; to remove it with everything in it give --recursive",
            harmless(path)
        ))),
        other => other.map_err(|error| crate::offline::named(path, error)),
    }
}
