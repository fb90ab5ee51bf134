//! `sheaf fsck`: verification of an array that is not mounted, findings, and exit codes as
//! fsck(8) has them.

use std::path::PathBuf;
use std::sync::Arc;

use device::Array;
use engine::Severity;
use format::checkpoint::CheckpointRecord;
use fs::fsck::{Finding, FsckOptions, Phase, Progress, Report};
use fs::{FileSystem, FsOptions};
use indicatif::ProgressBar;
use serde::Serialize;

use crate::args::Fsck;
use crate::devices::{self, Access};
use crate::failure::{Failure, Outcome};
use crate::output::harmless;
use crate::{output, progress, size};

const CLEAN: u8 = 0;
const CORRECTED: u8 = 1;
const UNCORRECTED: u8 = 4;

/// The report as `--json` shows it.
#[derive(Serialize)]
struct Shown {
    uuid: String,
    label: String,
    /// 0 sound, 1 all that was wrong is corrected, 4 errors are left.
    exit_code: u8,
    unmounted_cleanly: bool,
    journal_records_replayed: u64,
    findings: Vec<ShownFinding>,
    more_findings: u64,
    repaired: Vec<String>,
    files: u64,
    folders: u64,
    symlinks: u64,
    special_files: u64,
    orphans: u64,
    names: u64,
    nodes: u64,
    /// In bytes, as the next.
    data_size: u64,
    metadata_size: u64,
}

#[derive(Serialize)]
struct ShownFinding {
    severity: &'static str,
    object: String,
    path: Option<String>,
    what: String,
}

pub fn run(args: &Fsck) -> Outcome {
    let paths = devices::find(&args.devices)?;
    if args.quick {
        return quick(&paths);
    }
    let array = open(&paths)?;
    let report = examine(&array)?;
    let (uuid, label) = (array.uuid(), device::label_name(array.label()));
    drop(array);
    let repaired = match args.repair {
        true => repair(&paths, &report)?,
        false => Vec::new(),
    };
    let exit_code = match (report.is_sound(), repaired.is_empty()) {
        (false, _) => UNCORRECTED,
        (true, true) => CLEAN,
        (true, false) => CORRECTED,
    };
    let shown = Shown {
        uuid: device::uuid_text(&uuid),
        label,
        exit_code,
        unmounted_cleanly: report.clean,
        journal_records_replayed: report.recovery.records,
        findings: findings(&report),
        more_findings: report.more_findings,
        repaired,
        files: report.files,
        folders: report.directories,
        symlinks: report.symlinks,
        special_files: report.specials,
        orphans: report.orphans,
        names: report.names,
        nodes: report.nodes,
        data_size: report.blocks * format::BLOCK_SIZE as u64,
        metadata_size: report.metadata_bytes,
    };
    match args.json {
        true => output::json(&shown)?,
        false => output::print(text(&shown))?,
    }
    Ok(exit_code)
}

/// The full check of an open array, with progress.
pub fn examine(array: &Arc<Array>) -> Result<Report, Failure> {
    let bar = Bar::new();
    let report = fs::fsck::fsck(
        Arc::clone(array),
        &FsckOptions::default(),
        &|now: Progress| bar.show(now),
    );
    bar.0.finish_and_clear();
    Ok(report?)
}

/// Opens the array for a check.
pub fn open(paths: &[PathBuf]) -> Result<Arc<Array>, Failure> {
    let access = Access {
        read_only: true,
        ..Access::default()
    };
    devices::open(paths, access)
}

/// All devices are there, and what is on them opens.
fn quick(paths: &[PathBuf]) -> Outcome {
    let fs = FileSystem::open(open(paths)?, FsOptions::default().read_only())?;
    fs.close()?;
    Ok(CLEAN)
}

/// Progress on a terminal.
struct Bar(ProgressBar);

impl Bar {
    fn new() -> Self {
        Bar(progress::bar("Checking nodes", 1))
    }

    fn show(&self, now: Progress) {
        self.0.set_message(match now.phase {
            Phase::Nodes => "Checking nodes",
            Phase::Names => "Checking names",
            Phase::Sums => "Adding up",
        });
        self.0.set_length(now.total.max(1));
        self.0.set_position(now.done);
    }
}

fn findings(report: &Report) -> Vec<ShownFinding> {
    let shown = |f: &Finding| ShownFinding {
        severity: severity(f.severity),
        object: f.object.to_string(),
        path: f.path.clone(),
        what: f.what.clone(),
    };
    report.findings.iter().map(shown).collect()
}

fn severity(severity: Severity) -> &'static str {
    match severity {
        Severity::Notice => "notice",
        Severity::Error => "error",
        Severity::Fatal => "fatal",
    }
}

/// Writes damaged copies of labels and checkpoint records again from the good ones.
/// Returns what it wrote.
fn repair(paths: &[PathBuf], report: &Report) -> Result<Vec<String>, Failure> {
    let array = devices::open(paths, Access::default())?;
    let mut repaired: Vec<String> = array
        .label_repairs()
        .iter()
        .map(|r| format!("label copy {} of device {}", r.copy, r.device))
        .collect();
    array.repair_labels()?;
    for &(slot, copy, _) in &report.recovery.damaged_copies {
        let good = array.read_slot(slot, 1 - copy.min(1));
        if let Ok(good) = good
            && CheckpointRecord::parse(&good, &array.uuid()).is_ok()
        {
            array.write_slot(slot, &good)?;
            repaired.push(format!("copy {copy} of checkpoint record {slot}"));
        }
    }
    array.flush()?;
    Ok(repaired)
}

fn text(shown: &Shown) -> String {
    let mut text = String::new();
    for finding in &shown.findings {
        let place = match &finding.path {
            Some(path) => format!("{} ({})", harmless(path.as_bytes()), finding.object),
            None => finding.object.clone(),
        };
        text += &format!("{}: {place}: {}\n", finding.severity, finding.what);
    }
    if shown.more_findings > 0 {
        text += &format!("and {} more\n", shown.more_findings);
    }
    for repaired in &shown.repaired {
        text += &format!("repaired: {repaired}\n");
    }
    if !shown.unmounted_cleanly {
        text += &format!(
            "not unmounted cleanly; {} journal records were replayed in memory, the next mount writes them\n",
            shown.journal_records_replayed
        );
    }
    text += &format!(
        "{} files, {} folders, {} symbolic links, {} special files; {} of data, {} of metadata\n",
        shown.files,
        shown.folders,
        shown.symlinks,
        shown.special_files,
        size::text(shown.data_size),
        size::text(shown.metadata_size),
    );
    text += match shown.exit_code {
        CLEAN => "no errors\n",
        CORRECTED => "all errors corrected\n",
        _ => "ERRORS LEFT: copy what you need out of the file system, make it anew, copy back\n",
    };
    text
}
