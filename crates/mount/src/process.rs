//! What `/proc` tells of the task that a request came from.
//!
//! Both readings are of a task that waits for the answer to its request, and is there as long as it waits.

/// The process that a task belongs to; `None` where it cannot be told: a task outside of this daemon's namespace, or no `/proc`.
pub(crate) fn of_task(task: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{task}/status")).ok()?;
    group(&status)
}

/// Whether a task is at its end, and its descriptors are closed one after the other. Not, where it cannot be told.
pub(crate) fn is_exiting(task: u32) -> bool {
    let stat = std::fs::read(format!("/proc/{task}/stat")).unwrap_or_default();
    flags(&stat).is_some_and(|flags| flags & PF_EXITING != 0)
}

/// As in the kernel's `sched.h`.
const PF_EXITING: u32 = 4;

fn group(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
    line.trim().parse().ok().filter(|&group| group != 0)
}

/// The seventh field behind the name, which is in brackets and may have any bytes in it.
fn flags(stat: &[u8]) -> Option<u32> {
    let name_ends = stat.iter().rposition(|&byte| byte == b')')?;
    let fields = std::str::from_utf8(&stat[name_ends + 1..]).ok()?;
    fields.split_whitespace().nth(6)?.parse().ok()
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
            assert_eq!(of_task(number), Some(this));
            assert!(!is_exiting(number));
        });
        task.unwrap().join().unwrap();
        assert_eq!(of_task(0), None);
    }

    #[test]
    fn names_of_programs_do_not_confuse() {
        let stat = b"12 (a) b \xff (c) S 1 12 12 0 -1 4194308 99 0";
        assert_eq!(flags(stat), Some(0x40_0004));
        assert_eq!(flags(b"12 (a"), None);
        assert_eq!(group("Name:\tTgid\nTgid:\t42\nPid:\t43\n"), Some(42));
    }
}
