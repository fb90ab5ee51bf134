//! Running other programs: with a time limit, in a process group of their own, output to a
//! log file, and stopped when the user interrupts.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use crate::Fallible;

static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From here on SIGINT, SIGTERM and SIGHUP only set a flag that [`interrupted`] reports, so
/// that mounts are taken down before the process ends. A second signal ends it at once.
pub fn catch_interrupts() -> Fallible<()> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [
        signal_hook::consts::SIGINT,
        signal_hook::consts::SIGTERM,
        signal_hook::consts::SIGHUP,
    ] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&flag))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&flag)))
            .map_err(|e| format!("cannot install a signal handler: {e}"))?;
    }
    INTERRUPTED.get_or_init(|| flag);
    Ok(())
}

pub fn interrupted() -> bool {
    INTERRUPTED
        .get()
        .is_some_and(|flag| flag.load(Ordering::Relaxed))
}

/// How a program ended.
pub struct Outcome {
    pub status: Option<ExitStatus>,
    pub output: String,
    pub seconds: f64,
}

impl Outcome {
    pub fn success(&self) -> bool {
        self.status.is_some_and(|s| s.success())
    }

    /// An error that tells how the program failed and shows the end of its output.
    pub fn check(&self, what: &str) -> Fallible<()> {
        if self.success() {
            return Ok(());
        }
        let ending = match self.status {
            Some(status) => status.to_string(),
            None => format!("stopped after {:.0} s, its time limit", self.seconds),
        };
        Err(format!("{what}: {ending}\n{}", tail(&self.output, 30)))
    }
}

/// The last `count` lines of `text`, indented.
pub fn tail(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..]
        .iter()
        .map(|line| format!("    {line}"))
        .collect::<Vec<_>>()
        .join("\n")
}

/// The folder for everything a test run leaves behind.
pub fn work_dir() -> PathBuf {
    target_dir().join("xtask")
}

/// Cargo's target folder of this workspace.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => source_dir().join(dir),
        None => source_dir().join("target"),
    }
}

/// The workspace's root.
pub fn source_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies inside the workspace")
        .to_owned()
}

/// Runs `command` for at most `limit`, its output to `log_name` in the log folder.
pub fn run(log_name: &str, command: &mut Command, limit: Duration) -> Fallible<Outcome> {
    let log_path = work_dir().join("logs").join(format!("{log_name}.log"));
    std::fs::create_dir_all(log_path.parent().expect("the log has a folder"))
        .map_err(|e| format!("{}: {e}", log_path.display()))?;
    let log = File::create(&log_path).map_err(|e| format!("{}: {e}", log_path.display()))?;
    let again = log
        .try_clone()
        .map_err(|e| format!("{}: {e}", log_path.display()))?;
    let start = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(again)
        .process_group(0)
        .spawn()
        .map_err(|e| format!("cannot start {:?}: {e}", command.get_program()))?;
    let status = wait(&mut child, limit)?;
    let bytes = std::fs::read(&log_path).map_err(|e| format!("{}: {e}", log_path.display()))?;
    Ok(Outcome {
        status,
        output: String::from_utf8_lossy(&bytes).into_owned(),
        seconds: start.elapsed().as_secs_f64(),
    })
}

/// Waits for `child`, which leads its process group; ends the group at the limit (then
/// there is no status) and on interruption (then it is an error).
pub fn wait(child: &mut Child, limit: Duration) -> Fallible<Option<ExitStatus>> {
    let start = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(status) = child.try_wait().map_err(|e| e.to_string())? {
            return Ok(Some(status));
        }
        if interrupted() || start.elapsed() > limit {
            kill_group(child);
            return match interrupted() {
                true => Err("interrupted".to_owned()),
                false => Ok(None),
            };
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// How long who is told to end may clean up.
const GRACE: Duration = Duration::from_secs(5);

/// Ends the process group that `child` leads and what descends from it (timeout(1) has a group of its
/// own), and reaps the child: by SIGTERM, so that scripts take their mounts away, and then by SIGKILL. It may be
/// stuck in a file system that no longer answers: then it is left behind after ten seconds.
pub fn kill_group(child: &mut Child) {
    let mut descendants = descendants(child.id());
    signal(child, &descendants, Signal::TERM);
    let start = Instant::now();
    let alive = |process: &Process| process.is_alive();
    while start.elapsed() < GRACE
        && (matches!(child.try_wait(), Ok(None)) || descendants.iter().any(alive))
    {
        std::thread::sleep(Duration::from_millis(10));
    }
    descendants.retain(alive);
    descendants.extend(stop_descendants(child.id()));
    signal(child, &descendants, Signal::KILL);
    for _ in 0..200 {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    eprintln!("xtask: process {} does not end", child.id());
}

/// To the group and to the descendants. Those that ended meanwhile get none.
fn signal(child: &Child, descendants: &[Process], signal: Signal) {
    if let Some(group) = Pid::from_raw(child.id() as i32) {
        let _ = rustix::process::kill_process_group(group, signal);
    }
    for process in descendants {
        process.signal(signal);
    }
}

/// Stops what descends from `pid`, and `pid`, so that they cannot fork meanwhile; they are to be killed.
fn stop_descendants(pid: u32) -> Vec<Process> {
    let mut stopped: Vec<Process> = Vec::new();
    loop {
        let mut found = descendants(pid);
        found.extend(Process::find(pid));
        found.retain(|process| !stopped.contains(process));
        if found.is_empty() {
            return stopped;
        }
        for process in found {
            process.signal(Signal::STOP);
            stopped.push(process);
        }
    }
}

/// A process, told from a later one of the same number by when it was started.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Process {
    pid: u32,
    parent: u32,
    /// In clock ticks since the machine's start.
    started: u64,
}

impl Process {
    /// One that has ended and waits for its parent to ask how is none.
    fn find(pid: u32) -> Option<Process> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The program's name, in parentheses, may hold anything; its state and parent follow.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        if matches!(fields.first(), None | Some(&"Z" | &"X")) {
            return None;
        }
        Some(Process {
            pid,
            parent: fields.get(1)?.parse().ok()?,
            started: fields.get(19)?.parse().ok()?,
        })
    }

    /// Its parent may be another by now.
    fn is_alive(&self) -> bool {
        Process::find(self.pid).is_some_and(|now| now.started == self.started)
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = Pid::from_raw(self.pid as i32)
            && self.is_alive()
        {
            // It may end between the look and the signal.
            let _ = rustix::process::kill_process(pid, signal);
        }
    }
}

/// Children of `pid`, theirs, and so on.
fn descendants(pid: u32) -> Vec<Process> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let processes: Vec<Process> = numbers.filter_map(Process::find).collect();
    let mut found: Vec<Process> = Vec::new();
    let mut next = Some(pid);
    let mut looked = 0;
    while let Some(parent) = next {
        found.extend(processes.iter().filter(|p| p.parent == parent));
        next = found.get(looked).map(|process| process.pid);
        looked += 1;
    }
    found
}

/// Whether a program of this name is on the PATH.
pub fn on_path(name: &str) -> bool {
    let extra = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::var_os("PATH")
        .map(|path| std::env::split_paths(&path).collect::<Vec<_>>())
        .unwrap_or_default()
        .into_iter()
        .chain(extra)
        .any(|dir| dir.join(name).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Read};
    use std::process::ChildStdout;

    /// A program that leads its group and has said that it is up, and what it says from then on.
    fn up(command: &mut Command) -> (Child, BufReader<ChildStdout>) {
        let command = command.stdout(Stdio::piped()).process_group(0);
        let mut child = command.spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut said = String::new();
        output.read_line(&mut said).unwrap();
        assert_eq!(said, "up\n");
        (child, output)
    }

    #[test]
    fn what_leaves_the_group_is_killed_too() {
        // timeout(1) makes a group of its own; the pipe ends when nobody has it any more.
        let script = "timeout 600 sh -c 'echo up; sleep 600; :'; :";
        let (mut child, mut output) = up(Command::new("sh").args(["-c", script]));
        kill_group(&mut child);
        assert_eq!(output.read_to_end(&mut Vec::new()).unwrap(), 0);
    }

    /// The mounts of a script stayed, for what it does when it ends was left out.
    #[test]
    fn who_is_ended_may_clean_up() {
        let script = "trap 'echo clean' EXIT; echo up; sleep 600; :";
        let (mut child, mut output) = up(Command::new("bash").args(["-c", script]));
        kill_group(&mut child);
        let mut said = String::new();
        output.read_to_string(&mut said).unwrap();
        assert_eq!(said, "clean\n");
    }
}
