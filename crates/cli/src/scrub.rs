//! `sheaf scrub`: has the daemon of a mount read and verify its metadata, step by step, at the
//! pace that the user chose.
//!
//! The position lives here, not in the daemon: in a file for each file system, written about
//! once a second and removed at the end, so that it survives an interruption of the scrub, of
//! the daemon and of the machine. What was found before is kept along with it.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use base::clock::Clock;
use mount::scrub::{Answer, Finding, Scrub};
use serde::{Deserialize, Serialize};

use crate::args;
use crate::devices::pause;
use crate::failure::{Failure, OPERATIONAL, Outcome, USAGE};
use crate::output::{one_line, shown, tell};
use crate::{logging, output, progress, size};

const ERRORS: u8 = 4;
/// Where the position is kept unless another folder is given.
const STATE: &str = "/var/lib/sheaf";
/// Bytes that one step reads, about.
const STEP: u64 = 4 << 20;
const STEP_LEAST: u64 = 16 << 10;
/// How often the position is written, in nanoseconds.
const SAVE_NS: u64 = 1_000_000_000;
/// Findings that are kept; more are counted.
const FINDINGS_MAX: usize = 10_000;

/// How far a scrub has come.
#[derive(Default, Serialize, Deserialize)]
struct State {
    position: u64,
    nodes: u64,
    pages: u64,
    bytes: u64,
    findings: Vec<Shown>,
    more_findings: u64,
}

#[derive(Clone, Serialize, Deserialize)]
struct Shown {
    severity: String,
    class: String,
    object: String,
    what: String,
}

/// The result as `--json` shows it.
#[derive(Serialize)]
struct Report<'a> {
    mountpoint: String,
    uuid: String,
    /// 0: no errors; 4: errors were found.
    exit_code: u8,
    /// An interrupted scrub was continued; counts and findings include its.
    continued: bool,
    findings: &'a [Shown],
    more_findings: u64,
    nodes: u64,
    pages: u64,
    /// Read from the devices.
    bytes: u64,
    /// Of this call.
    seconds: f64,
}

pub fn run(args: &args::Scrub) -> Outcome {
    logging::start(logging::Target::Terminal)?;
    let scrub = Scrub::new(&args.mountpoint)?;
    let clock = Clock::real();
    // The first step also tells which file system it is.
    let first = scrub.step(0, 0)?;
    let folder = args.state.as_deref().unwrap_or(Path::new(STATE));
    let file = StateFile::new(folder, &first.uuid);
    let found = match args.restart {
        true => None,
        false => file.read(),
    };
    let continued = found.is_some();
    let state = match found {
        Some(state) => state,
        None => State::default().after(first.clone()),
    };
    let kept = file.write(&state);
    if let Err(error) = &kept {
        refuse_or_warn(args, folder, error)?;
    }
    let state = go_on(args, &scrub, state, &file, &clock)?;
    // An earlier one's, or one that could be kept later.
    file.remove();
    let errors = state.findings.iter().any(|f| f.severity != "notice");
    let errors_found = errors || state.more_findings > 0;
    let exit_code = if errors_found { ERRORS } else { 0 };
    let report = Report {
        mountpoint: args.mountpoint.display().to_string(),
        uuid: device::uuid_text(&first.uuid),
        exit_code,
        continued,
        findings: &state.findings,
        more_findings: state.more_findings,
        nodes: state.nodes,
        pages: state.pages,
        bytes: state.bytes,
        seconds: clock.monotonic_ns() as f64 / 1e9,
    };
    let told = match args.json {
        true => output::json(&report),
        false => output::print(text(&report)),
    };
    let untold = if errors_found { ERRORS } else { OPERATIONAL };
    output::verdict(told, exit_code, untold)
}

/// Who has named the folder wants the position kept; others learn that it is not, once.
fn refuse_or_warn(args: &args::Scrub, folder: &Path, error: &io::Error) -> Result<(), Failure> {
    let folder = shown(folder);
    if args.state.is_some() {
        let failure = Failure::new(format!(
            "--state {folder}: the position of the scrub cannot be kept there: {error}; give a folder that can be written"
        ));
        return Err(match error.kind() {
            ErrorKind::AlreadyExists | ErrorKind::NotADirectory => failure.with_code(USAGE),
            _ => failure,
        });
    }
    tell(format!(
        "sheaf: the position of this scrub cannot be kept in {folder}: {error}; if it is interrupted the next one begins \
         anew, unless --state names a folder that can be written"
    ));
    Ok(())
}

/// Steps until the end, at the pace asked for.
fn go_on(
    args: &args::Scrub,
    scrub: &Scrub,
    mut state: State,
    file: &StateFile,
    clock: &Clock,
) -> Result<State, Failure> {
    let bar = progress::bar("Verifying nodes", 1);
    let (start_ns, start_bytes) = (clock.monotonic_ns(), state.bytes);
    let step = match args.rate {
        Some(rate) => (rate / 4).clamp(STEP_LEAST, STEP),
        None => STEP,
    };
    let mut saved_ns = start_ns;
    while state.position != 0 {
        let now = clock.monotonic_ns();
        if now - saved_ns >= SAVE_NS {
            // That it can be kept is known, or that it cannot was told.
            if let Err(error) = file.write(&state) {
                tracing::debug!("{}: {error}", file.0.display());
            }
            saved_ns = now;
        }
        let answer = scrub.step(state.position, step)?;
        bar.set_length(answer.nodes_total.max(state.nodes).max(1));
        state = state.after(answer);
        bar.set_position(state.nodes);
        if let Some(rate) = args.rate {
            let due_ns = u128::from(state.bytes - start_bytes) * 1_000_000_000 / u128::from(rate);
            let past_ns = u128::from(clock.monotonic_ns() - start_ns);
            let wait_ns = due_ns.saturating_sub(past_ns).min(u128::from(u64::MAX)) as u64;
            if wait_ns > 0 && state.position != 0 {
                pause(Duration::from_nanos(wait_ns));
            }
        }
    }
    bar.finish_and_clear();
    Ok(state)
}

impl State {
    /// The state after one more step. Position 0 is the end, too.
    fn after(mut self, answer: Answer) -> Self {
        self.position = answer.next.unwrap_or(0);
        self.nodes += answer.nodes;
        self.pages += answer.pages;
        self.bytes += answer.bytes;
        self.more_findings += answer.findings_left_out;
        for finding in answer.findings {
            match self.findings.len() < FINDINGS_MAX {
                true => self.findings.push(kept(finding)),
                false => self.more_findings += 1,
            }
        }
        self
    }
}

fn kept(finding: Finding) -> Shown {
    Shown {
        severity: finding.severity,
        class: finding.class,
        object: finding.object,
        what: finding.what,
    }
}

/// Where the position is kept. Without the right to write there, a scrub cannot be continued,
/// but works.
struct StateFile(PathBuf);

impl StateFile {
    fn new(folder: &Path, uuid: &[u8; 16]) -> Self {
        StateFile(folder.join(format!("scrub-{}.json", device::uuid_text(uuid))))
    }

    /// The state of an interrupted scrub. What cannot be understood is none.
    fn read(&self) -> Option<State> {
        let file = File::open(&self.0).ok()?;
        let state = serde_json::from_reader::<_, State>(io::BufReader::new(file)).ok()?;
        (state.position != 0).then_some(state)
    }

    fn write(&self, state: &State) -> io::Result<()> {
        let new = self.0.with_extension("new");
        self.0
            .parent()
            .map_or(Ok(()), fs::create_dir_all)
            .and_then(|()| serde_json::to_vec(state).map_err(io::Error::other))
            .and_then(|text| fs::write(&new, text))
            .and_then(|()| fs::rename(&new, &self.0))
    }

    fn remove(&self) {
        match fs::remove_file(&self.0) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                tracing::warn!("{}: {error}", self.0.display());
            }
            _ => {}
        }
    }
}

fn text(report: &Report<'_>) -> String {
    let mut text = String::new();
    for finding in report.findings {
        text += &format!(
            "{}: {}: {}\n",
            finding.severity,
            finding.object,
            one_line(&finding.what)
        );
    }
    if report.more_findings > 0 {
        text += &format!("and {} more\n", report.more_findings);
    }
    if report.continued {
        text += "continued where it was interrupted, with what was found before that; --restart begins anew\n";
    }
    text += &format!(
        "{} nodes, {} pages, {} read in {:.1} s: ",
        report.nodes,
        report.pages,
        size::text(report.bytes),
        report.seconds
    );
    text += match report.exit_code {
        0 => "no errors\n",
        _ => {
            "ERRORS FOUND: unmount, and check with `sheaf fsck`, which names the files concerned by path, as far as their \
             folders can be read. A node is a file's or folder's inode, of that inode number, or a part of one, which \
             has no name: `find MOUNTPOINT -xdev -inum NUMBER` finds the former, unless it or a folder above it is what \
             is damaged\n"
        }
    };
    text
}
