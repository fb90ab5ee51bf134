//! `sheaf fsck`: verification of an array that is not mounted, findings, and exit codes as
//! fsck(8) has them.

use std::path::PathBuf;
use std::sync::Arc;

use device::Array;
use engine::Severity;
use fs::fsck::repair::{self, Action, ActionKind, RepairOptions, repair};
use fs::fsck::{Finding, FsckOptions, Phase, Progress, Report};
use fs::{FileSystem, FsOptions};
use indicatif::ProgressBar;
use serde::Serialize;

use crate::args::Fsck;
use crate::devices::{self, Access};
use crate::failure::{self, Failure, OPERATIONAL, Outcome};
use crate::output::{harmless, one_line};
use crate::relabel::{self, Relabelled};
use crate::{output, progress, size};

const CLEAN: u8 = 0;
const CORRECTED: u8 = 1;
const UNCORRECTED: u8 = failure::DAMAGED;

/// What to do of devices that were put back to old copies, and what it is once a repair has begun to write.
const OLD_LOST: &str = "the latest states of the old devices no longer fit";
const REATTACH: &str = "attach the latest state of each device, which is worthless once a repair has begun to write; `sheaf fsck --repair` only if that is gone";

/// Whether a device is older than the array: then it does not open, and a repair would lose what the latest state of that device has.
pub fn is_outdated(array: &Array) -> bool {
    !engine::outdated(array).is_empty()
}

/// That a file system with such a device does not open, with the remedy. Where there is a checkpoint record the error itself tells that.
pub fn with_remedy(failure: Failure, error: &fs::Error) -> Failure {
    match error {
        fs::Error::Damage(damage) if damage.structure == "label" => failure,
        _ => failure.after(REATTACH),
    }
}

/// The report as `--json` shows it.
#[derive(Serialize)]
struct Shown {
    uuid: String,
    label: String,
    /// 0 sound, 1 all that was wrong is corrected, 4 errors are left, or something is to be repaired (`-n`).
    exit_code: u8,
    /// `null`, as all counts, if nothing could be read.
    unmounted_cleanly: Option<bool>,
    journal_records_replayed: Option<u64>,
    #[serde(skip)]
    refuses_writes: bool,
    /// A device was put back to an old copy.
    #[serde(skip)]
    is_outdated: bool,
    findings: Vec<ShownFinding>,
    more_findings: u64,
    /// The actions were carried out; else they would be.
    repaired: bool,
    /// Something is to be repaired, and nothing was written, as asked for.
    #[serde(skip)]
    planned: bool,
    /// Labels that were written again.
    labels_written: usize,
    actions: Vec<ShownAction>,
    more_actions: u64,
    refused: Option<Refused>,
    /// What was to be repaired is, as far as the actions say, and this kept the rest from being done.
    unfinished: Option<Unfinished>,
    /// It is repaired, and this kept the check after it from its end.
    unchecked: Option<String>,
    files: Option<u64>,
    folders: Option<u64>,
    symlinks: Option<u64>,
    special_files: Option<u64>,
    orphans: Option<u64>,
    names: Option<u64>,
    nodes: Option<u64>,
    /// In bytes, as the next.
    data_size: Option<u64>,
    metadata_size: Option<u64>,
}

#[derive(Serialize)]
struct ShownFinding {
    severity: &'static str,
    object: String,
    path: Option<String>,
    what: String,
}

#[derive(Clone, Serialize)]
struct ShownAction {
    kind: &'static str,
    object: String,
    path: Option<String>,
    what: String,
    /// Something is gone for good.
    lost: bool,
}

/// Why nothing was repaired.
#[derive(Serialize)]
struct Refused {
    why: String,
    remedy: String,
    /// Writing had begun: old states of devices were to be accepted, and their latest ones no longer fit.
    begun: bool,
}

/// Why a repair did not come to its end once it was written.
#[derive(Serialize)]
struct Unfinished {
    why: String,
    remedy: String,
    /// Whether the devices hold the repair is not known; else they do.
    in_doubt: bool,
}

impl Shown {
    fn new(array: &Array, report: &Report, exit_code: u8) -> Shown {
        // Of what did not open nothing is known.
        let opened = report.worst() != Some(Severity::Fatal);
        let known = |count: u64| opened.then_some(count);
        Shown {
            uuid: device::uuid_text(&array.uuid()),
            label: device::label_name(array.label()),
            exit_code,
            unmounted_cleanly: opened.then_some(report.clean),
            journal_records_replayed: known(report.recovery.records),
            refuses_writes: report.refuses_writes,
            is_outdated: !opened && is_outdated(array),
            findings: findings(report),
            more_findings: report.more_findings,
            repaired: false,
            planned: false,
            labels_written: 0,
            actions: Vec::new(),
            more_actions: 0,
            refused: None,
            unfinished: None,
            unchecked: None,
            files: known(report.files),
            folders: known(report.directories),
            symlinks: known(report.symlinks),
            special_files: known(report.specials),
            orphans: known(report.orphans),
            names: known(report.names),
            nodes: known(report.nodes),
            data_size: known(report.blocks * format::BLOCK_SIZE as u64),
            metadata_size: known(report.metadata_bytes),
        }
    }
}

fn shown_action(action: &Action) -> ShownAction {
    ShownAction {
        kind: action.kind.name(),
        object: action.object.to_string(),
        path: action.path.clone(),
        what: action.what.clone(),
        lost: action.lost,
    }
}

pub fn run(args: &Fsck) -> Outcome {
    if args.relabel && !relabel::are_named(&args.devices) {
        return Err(Failure::usage(
            "`--relabel` takes all devices one by one, not by UUID= or LABEL=",
        ));
    }
    let paths = devices::find(&args.devices)?;
    if args.quick {
        return quick(&paths);
    }
    let shown = match (args.relabel, args.repair || args.preen) {
        (true, _) => relabelled(&paths, args)?,
        (false, true) => repaired(&paths, args)?,
        (false, false) => checked(&paths)?,
    };
    let told = match args.json {
        true => output::json(&shown),
        false => output::print(text(&shown)),
    };
    // To fsck(8) codes are bits.
    let ended = output::verdict(told, shown.exit_code, shown.exit_code | OPERATIONAL);
    if let Some(why) = &shown.unchecked {
        output::tell(format!("sheaf: {why}"));
    }
    ended
}

fn checked(paths: &[PathBuf]) -> Result<Shown, Failure> {
    let array = open(paths)?;
    let report = examine(&array)?;
    let exit_code = match report.is_sound() {
        true => CLEAN,
        false => UNCORRECTED,
    };
    Ok(Shown::new(&array, &report, exit_code))
}

/// Writes labels that are gone, and nothing else, and checks.
fn relabelled(paths: &[PathBuf], args: &Fsck) -> Result<Shown, Failure> {
    let access = Access {
        read_only: args.dry_run,
        ..Access::default()
    };
    let devices = devices::claim(paths, access)?;
    let assembled = Array::assemble(devices.clone(), access.read_only);
    let (mut array, relabelled) = match assembled {
        Ok(array) => {
            drop((array, devices));
            return checked(paths);
        }
        Err(device::Error::LabelLost(_)) => relabel::restore(&devices, args.dry_run)?,
        Err(error) => return Err(error.into()),
    };
    drop(devices);
    let after = |failure: Failure| match args.dry_run {
        true => failure,
        false => failure.at("the label is written again, but the check after it did not end"),
    };
    if !args.dry_run {
        drop(array);
        array = open(paths).map_err(after)?;
    }
    let report = examine(&array).map_err(after)?;
    let exit_code = match report.is_sound() && !args.dry_run {
        true => CORRECTED,
        false => UNCORRECTED,
    };
    let mut shown = Shown::new(&array, &report, exit_code);
    shown.actions = relabelled.iter().map(shown_label).collect();
    shown.planned = args.dry_run;
    shown.repaired = !args.dry_run;
    if !args.dry_run {
        shown.labels_written = relabelled.len();
    }
    Ok(shown)
}

fn shown_label(label: &Relabelled) -> ShownAction {
    ShownAction {
        kind: "label",
        object: format!("label of device {}", label.index),
        path: None,
        what: format!(
            "both copies were gone on {}; written again, since {}",
            label.device, label.proof
        ),
        lost: false,
    }
}

/// Checks, repairs, and checks again.
fn repaired(paths: &[PathBuf], args: &Fsck) -> Result<Shown, Failure> {
    let access = Access {
        read_only: args.dry_run,
        ..Access::default()
    };
    let array = devices::open(paths, access)?;
    let options = RepairOptions {
        dry_run: args.dry_run,
        lossless: args.preen,
        ..RepairOptions::default()
    };
    // Nobody is there who would know whether the latest state is still to be had.
    if (args.unattended || args.preen) && is_outdated(&array) {
        // Without a checkpoint record nothing else tells what there is.
        let plan = RepairOptions {
            dry_run: true,
            ..RepairOptions::default()
        };
        let report = repair(&array, &plan, &|_| {})?;
        let mut shown = Shown::new(&array, &report.before, UNCORRECTED);
        shown.refused = Some(Refused {
            why:
                "the old state of a device would be accepted, and what was written to it since lost"
                    .into(),
            remedy: REATTACH.into(),
            begun: false,
        });
        return Ok(shown);
    }
    let bar = Bar::new();
    let report = repair(&array, &options, &|now: Progress| bar.show(now));
    bar.0.finish_and_clear();
    // Whatever is lost is part of the report.
    let report = report.map_err(|error| {
        let context = "the repair did not come to its end; the array is as it was, or repaired, and nothing is lost by that";
        Failure::from(error).at(context)
    })?;
    let sound = report.before.is_sound();
    let exit_code = if sound { CLEAN } else { UNCORRECTED };
    let mut shown = Shown::new(&array, &report.before, exit_code);
    shown.actions = report.actions.iter().map(shown_action).collect();
    shown.more_actions = report.more_actions;
    match report.outcome {
        repair::Outcome::Sound => {}
        repair::Outcome::Planned => {
            shown.planned = true;
            shown.exit_code = UNCORRECTED;
        }
        repair::Outcome::Refused { why, remedy } => {
            let begun = false;
            shown.refused = Some(Refused { why, remedy, begun });
        }
        repair::Outcome::Begun { why, remedy } => {
            let begun = true;
            shown.refused = Some(Refused { why, remedy, begun });
        }
        repair::Outcome::Repaired => {
            // What was read before the repair says nothing of what is there now.
            drop(array);
            let after = open(paths).and_then(|array| Ok((examine(&array)?, array)));
            shown = after_repair(shown, after, false);
        }
        repair::Outcome::Unfinished {
            why,
            remedy,
            in_doubt,
        } => {
            drop(array);
            let after = open(paths).and_then(|array| Ok((examine(&array)?, array)));
            shown = unfinished(
                after_repair(shown, after, in_doubt),
                Unfinished {
                    why,
                    remedy,
                    in_doubt,
                },
            );
        }
    }
    Ok(shown)
}

/// A repair that failed once it was written. What it lost is told now or never: no other check finds it.
fn unfinished(after: Shown, unfinished: Unfinished) -> Shown {
    Shown {
        repaired: !unfinished.in_doubt,
        unfinished: Some(unfinished),
        exit_code: UNCORRECTED | OPERATIONAL,
        ..after
    }
}

/// What a repair did, which is told whether or not the check after it came to its end, and what that found; in doubt: or did not.
fn after_repair(
    before: Shown,
    after: Result<(Report, Arc<Array>), Failure>,
    in_doubt: bool,
) -> Shown {
    let (after, array) = match after {
        Ok(after) => after,
        Err(failure) => {
            let failure = failure.at(match in_doubt {
                true => "the check after the repair did not end",
                false => "the array is repaired, but the check after it did not end",
            });
            return Shown {
                repaired: true,
                unchecked: Some(failure.message().unwrap_or_default().to_owned()),
                exit_code: UNCORRECTED | OPERATIONAL,
                ..before
            };
        }
    };
    let (exit_code, findings, more_findings) = match after.is_sound() {
        true => (CORRECTED, before.findings, before.more_findings),
        false => (UNCORRECTED, findings(&after), after.more_findings),
    };
    Shown {
        findings,
        more_findings,
        actions: before.actions,
        more_actions: before.more_actions,
        repaired: true,
        ..Shown::new(&array, &after, exit_code)
    }
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

/// All devices are there, and what is on them opens, also for writing, as far as that can be told without.
fn quick(paths: &[PathBuf]) -> Outcome {
    let array = open(paths)?;
    match FileSystem::open(Arc::clone(&array), FsOptions::default().read_only()) {
        Ok(fs) => {
            // A mount that may write refuses both.
            let unread = fs.store().unread().map(|unread| {
                format!("{unread}; `sheaf fsck` names what is concerned, `sheaf fsck --repair` keeps files as they are and goes on without the rest")
            });
            let unreplayed = fs.store().unreplayed().map(|why| {
                format!("the journal cannot be replayed: {why}; `sheaf fsck` names what is concerned, `sheaf fsck --repair` corrects what can be corrected")
            });
            fs.close()?;
            match unread.or(unreplayed) {
                None => Ok(CLEAN),
                Some(why) => Err(Failure::damaged(why)),
            }
        }
        Err(error @ (fs::Error::Damage(_) | fs::Error::Damaged { .. })) => {
            let failure = Failure::damaged(error.to_string());
            Err(match is_outdated(&array) {
                true => with_remedy(failure, &error),
                false => failure.after("`sheaf fsck --repair` corrects what can be corrected"),
            })
        }
        Err(error) => Err(error.into()),
    }
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
            Phase::Mending => "Mending",
            Phase::Writing => "Writing",
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

fn text(shown: &Shown) -> String {
    let mut text = String::new();
    let place = |path: &Option<String>, object: &String| match path {
        Some(path) => format!("{} ({object})", harmless(path.as_bytes())),
        None => object.clone(),
    };
    for finding in &shown.findings {
        let place = place(&finding.path, &finding.object);
        text += &format!(
            "{}: {place}: {}\n",
            finding.severity,
            one_line(&finding.what)
        );
    }
    if shown.more_findings > 0 {
        text += &format!("and {} more\n", shown.more_findings);
    }
    for action in &shown.actions {
        let in_doubt = shown.unfinished.as_ref().is_some_and(|u| u.in_doubt);
        let what = match (shown.repaired, action.lost) {
            (_, true) if in_doubt => "may be LOST",
            (_, false) if in_doubt => "may be repaired",
            (true, true) => "LOST",
            (true, false) => "repaired",
            (false, true) => "would be LOST",
            (false, false) => "would be repaired",
        };
        let place = place(&action.path, &action.object);
        text += &format!("{what}: {place}: {}\n", one_line(&action.what));
    }
    if shown.more_actions > 0 {
        text += &format!("and {} more\n", shown.more_actions);
    }
    if let Some(refused) = &shown.refused {
        let written = match refused.begun {
            true => format!("but writing had begun, and {OLD_LOST}"),
            false => "and nothing was written".to_owned(),
        };
        text += &format!(
            "NOT REPAIRED, {written}: {}\nremedy: {}\n",
            refused.why, refused.remedy
        );
    }
    if let Some(unfinished) = &shown.unfinished {
        let written = match unfinished.in_doubt {
            true => "whether the devices hold it is in doubt",
            false => "what is said above is done",
        };
        let kind = ActionKind::Outdated.name();
        let lost = match shown.actions.iter().any(|action| action.kind == kind) {
            true => format!(", and {OLD_LOST}"),
            false => String::new(),
        };
        text += &format!(
            "NOT FINISHED, {written}{lost}: {}\nremedy: {}\n",
            unfinished.why, unfinished.remedy
        );
    }
    if let (Some(false), Some(records)) = (shown.unmounted_cleanly, shown.journal_records_replayed)
    {
        let then = match shown.refuses_writes {
            true => "no mount writes them before a repair",
            false => "the next mount writes them",
        };
        text += &format!(
            "not unmounted cleanly; {records} journal records were replayed in memory, {then}\n"
        );
    }
    text += &counts(shown).unwrap_or_default();
    text += &verdict(shown);
    text
}

/// What there is; nothing of what could not be read.
fn counts(shown: &Shown) -> Option<String> {
    Some(format!(
        "{}, {}, {}, {}; {} of data, {} of metadata\n",
        size::counted(shown.files?, "file"),
        size::counted(shown.folders?, "folder"),
        size::counted(shown.symlinks?, "symbolic link"),
        size::counted(shown.special_files?, "special file"),
        size::text(shown.data_size?),
        size::text(shown.metadata_size?),
    ))
}

/// The last line.
fn verdict(shown: &Shown) -> String {
    let text = match shown.exit_code {
        CLEAN => "no errors\n",
        CORRECTED => "all errors corrected\n",
        _ if shown.unfinished.is_some() => {
            "THE REPAIR FAILED, for the reason above; keep what it says, which no other check finds\n"
        }
        _ if shown.unchecked.is_some() => "REPAIRED, and not checked since\n",
        _ if shown.repaired && shown.labels_written == 0 => "ERRORS LEFT by the repair\n",
        _ if shown.is_outdated && shown.planned => {
            return format!(
                "TO BE REPAIRED: nothing was written; before you do without `-n` {REATTACH}\n"
            );
        }
        _ if shown.refused.is_some() => "ERRORS LEFT, for the reason above\n",
        _ if shown.is_outdated => return format!("ERRORS LEFT: {REATTACH}\n"),
        _ if shown.planned && shown.actions.iter().all(|action| action.kind == "label") => {
            "TO BE REPAIRED: nothing was written; without `-n` labels are written again, and nothing else\n"
        }
        _ if shown.planned => {
            "TO BE REPAIRED: nothing was written; without `-n` what is said above is done\n"
        }
        _ => {
            "ERRORS LEFT: `sheaf fsck --repair` corrects what can be corrected, `-n` with it shows what that is\n"
        }
    };
    text.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(actions: Vec<ShownAction>) -> Shown {
        Shown {
            uuid: String::new(),
            label: String::new(),
            exit_code: UNCORRECTED,
            unmounted_cleanly: None,
            journal_records_replayed: None,
            refuses_writes: false,
            is_outdated: false,
            findings: Vec::new(),
            more_findings: 0,
            repaired: false,
            planned: false,
            labels_written: 0,
            actions,
            more_actions: 0,
            refused: None,
            unfinished: None,
            unchecked: None,
            files: None,
            folders: None,
            symlinks: None,
            special_files: None,
            orphans: None,
            names: None,
            nodes: None,
            data_size: None,
            metadata_size: None,
        }
    }

    fn action(lost: bool, what: &str) -> ShownAction {
        ShownAction {
            kind: "name",
            object: "node 7".to_owned(),
            path: None,
            what: what.to_owned(),
            lost,
        }
    }

    /// What the repair had lost was told nowhere.
    #[test]
    fn what_a_repair_did_is_told_though_nobody_can_look_at_it_after() {
        let before = shown(vec![
            action(true, "a name is gone"),
            action(false, "put in order"),
        ]);
        let after = after_repair(before, Err(Failure::new("/dev/a is in use")), false);
        let told = text(&after);
        assert!(told.contains("LOST: node 7: a name is gone\n"), "{told}");
        assert!(
            !told.contains("would be") && !told.contains("corrected"),
            "{told}"
        );
        let json = serde_json::to_value(&after).unwrap();
        assert_eq!(json["repaired"], true);
        assert_eq!(json["exit_code"], UNCORRECTED | OPERATIONAL);
        let why = json["unchecked"].as_str().unwrap();
        assert!(
            why.contains("is repaired") && why.contains("in use"),
            "{why}"
        );
    }

    #[test]
    fn what_a_repair_lost_is_told_though_it_failed_once_it_was_written() {
        for in_doubt in [false, true] {
            let end = Unfinished {
                why: "/dev/a: cannot write".to_owned(),
                remedy: "copy that device".to_owned(),
                in_doubt,
            };
            let before = shown(vec![action(true, "a name is gone")]);
            let check = Err(Failure::new("/dev/a: cannot read"));
            let after = unfinished(after_repair(before, check, in_doubt), end);
            let unchecked = after.unchecked.as_ref().unwrap();
            assert!(unchecked.contains("cannot read"), "{unchecked}");
            assert_eq!(unchecked.contains("is repaired"), !in_doubt);
            let told = text(&after);
            let line = match in_doubt {
                true => "may be LOST: node 7: a name is gone\n",
                false => "LOST: node 7: a name is gone\n",
            };
            assert!(told.contains(line), "{told}");
            assert!(told.contains("cannot write\nremedy: copy"), "{told}");
            assert!(!told.contains("corrected"), "{told}");
            let json = serde_json::to_value(&after).unwrap();
            assert_eq!(json["exit_code"], UNCORRECTED | OPERATIONAL);
            assert_eq!(json["repaired"], !in_doubt);
            assert_eq!(json["actions"][0]["lost"], true);
        }
    }
}
