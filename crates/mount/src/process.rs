//! What the system tells of the task that a request came from.
//!
//! All that is read is of a task that waits for the answer to its request, and is there as long as it waits.

use crate::sys;
use std::sync::atomic::{AtomicU32, Ordering};

/// Tasks whose processes are remembered at a time.
const REMEMBERED: usize = 64;

/// Which processes tasks belong to. `/proc` says so in ten system calls, some 50 µs; whether a task is of a process that it is likely to be of, one says.
///
/// What is remembered is a guess that is asked about each time: numbers go to others.
#[derive(Debug)]
pub(crate) struct Processes([AtomicU32; REMEMBERED]);

impl Default for Processes {
    fn default() -> Self {
        Processes([const { AtomicU32::new(0) }; REMEMBERED])
    }
}

impl Processes {
    /// The process that a task belongs to; `None` where it cannot be told: a task outside of this daemon's namespace, or no `/proc`.
    pub(crate) fn of(&self, task: u32) -> Option<u32> {
        let last = &self.0[task as usize % REMEMBERED];
        // A process has the number of its first task.
        let guesses = [task, last.load(Ordering::Relaxed)].into_iter();
        let mut guesses = guesses.filter(|&guess| guess != 0);
        if let Some(process) = guesses.find(|&guess| sys::is_of_process(task, guess)) {
            return Some(process);
        }
        let status = std::fs::read_to_string(format!("/proc/{task}/status")).ok()?;
        let process = group(&status)?;
        last.store(process, Ordering::Relaxed);
        Some(process)
    }
}

/// Whether a group is among a task's supplementary ones. Not, where it cannot be told.
pub(crate) fn is_in_group(task: u32, group: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{task}/status"));
    status.is_ok_and(|status| has_group(&status, group))
}

fn has_group(status: &str, group: u32) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("Groups:"));
    let mut groups = line.into_iter().flat_map(str::split_ascii_whitespace);
    groups.any(|one| one.parse() == Ok(group))
}

/// Whether a task is at its end, or at that of its program, and its descriptors are closed one after the other. Not, where it cannot be told.
///
/// Its flags would tell, but they are in `stat`, which nobody can read between two programs: the kernel holds a lock that this waits for until the
/// request is answered. Nor does this read what lies in the task's memory, whose lock may wait for an answer as well.
pub(crate) fn is_ending(task: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{task}/status"));
    status.is_ok_and(|status| ends(&status))
}

/// At its end a task has no memory any more; between two programs it has the new one's, in which there is no code yet.
fn ends(status: &str) -> bool {
    let code = status.lines().find_map(|line| line.strip_prefix("VmExe:"));
    code.is_none_or(|code| code.trim() == "0 kB") && group(status).is_some()
}

fn group(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
    line.trim().parse().ok().filter(|&group| group != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_is_of_its_process_and_not_at_its_end() {
        let this = std::process::id();
        let task = || std::fs::read_link("/proc/thread-self").unwrap();
        let task = base::thread::spawn("task", move || {
            let number = task().file_name().unwrap().to_str().unwrap().parse();
            let number: u32 = number.unwrap();
            assert_ne!(number, this);
            let processes = Processes::default();
            // Read, and then asked about.
            assert!(!sys::is_of_process(number, number));
            assert_eq!(processes.of(number), Some(this));
            assert_eq!(processes.of(number), Some(this));
            assert!(sys::is_of_process(number, this));
            // A wrong guess, of a process that is there.
            processes.0[number as usize % REMEMBERED].store(1, Ordering::Relaxed);
            assert_eq!(processes.of(number), Some(this));
            assert!(!is_ending(number));
        });
        task.unwrap().join().unwrap();
        let processes = Processes::default();
        assert_eq!(processes.of(this), Some(this));
        assert_eq!(processes.of(0), None);
        // Nobody's number: beyond the largest that Linux gives.
        assert_eq!(processes.of(1 << 23), None);
    }

    #[test]
    fn who_has_no_code_is_at_an_end() {
        let head = "Name:\tTgid\nTgid:\t42\nPid:\t43\n";
        assert_eq!(group(head), Some(42));
        assert!(ends(head));
        assert!(ends(&format!(
            "{head}VmExe:\t       0 kB\nVmLib:\t       0 kB\n"
        )));
        assert!(!ends(&format!("{head}VmExe:\t      20 kB\n")));
        assert!(!ends(""));
    }

    #[test]
    fn a_task_is_in_the_groups_that_are_listed() {
        let status = "Name:\tx\nGroups:\t4 1000 2000 \nVmExe:\t8 kB\n";
        assert!(has_group(status, 4) && has_group(status, 2000));
        assert!(!has_group(status, 200) && !has_group(status, 8));
        assert!(!has_group("Groups:\t \n", 0) && !has_group("", 0));
    }
}
