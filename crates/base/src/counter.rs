//! Instructions that threads retire, by the processor's own counter, and calls that they make of the kernel.
//!
//! `perf_event_open(2)`; a machine may have no counter, or not let this process use it.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::FromRawFd;

/// Of the calling thread, and of threads that it, or they, start from then on; other threads of the process
/// count nothing.
#[derive(Debug)]
pub struct Instructions {
    counter: File,
    kernel: bool,
}

/// `struct perf_event_attr` as of its first version, in words; not in the `libc` crate.
type Attributes = [u64; 8];

/// `PERF_TYPE_HARDWARE`, and the size of the attributes above it.
const HARDWARE: u64 = (size_of::<Attributes>() as u64) << 32;
/// `PERF_TYPE_TRACEPOINT`, likewise.
const TRACEPOINT: u64 = HARDWARE | 2;
/// Where the number of the event of a system call's begin may be.
const EVENT_NUMBERS: [&str; 2] = [
    "/sys/kernel/tracing/events/raw_syscalls/sys_enter/id",
    "/sys/kernel/debug/tracing/events/raw_syscalls/sys_enter/id",
];
/// `PERF_COUNT_HW_INSTRUCTIONS`.
const INSTRUCTIONS: u64 = 1;
/// `PERF_FORMAT_TOTAL_TIME_ENABLED` and `PERF_FORMAT_TOTAL_TIME_RUNNING`.
const TIMES: u64 = 3;
const INHERIT: u64 = 1 << 1;
const EXCLUDE_KERNEL: u64 = 1 << 5;
const EXCLUDE_HYPERVISOR: u64 = 1 << 6;

impl Instructions {
    /// Starts to count: in the kernel, too, where this process may; else in user space alone.
    ///
    /// # Errors
    /// There is no counter, or it must not be used.
    pub fn count() -> io::Result<Instructions> {
        Self::open(true).or_else(|_| Self::open(false))
    }

    fn open(kernel: bool) -> io::Result<Instructions> {
        let without = match kernel {
            true => 0,
            false => EXCLUDE_KERNEL,
        };
        let counter = open(HARDWARE, INSTRUCTIONS, EXCLUDE_HYPERVISOR | without)?;
        Ok(Instructions { counter, kernel })
    }

    /// Whether what the kernel does for these threads counts.
    pub fn with_kernel(&self) -> bool {
        self.kernel
    }

    /// Instructions so far. Where counters are fewer than those who want one, an estimate.
    pub fn read(&self) -> io::Result<u64> {
        read(&self.counter)
    }
}

/// Of the same threads; the numbers that the kernel gives its events are in the tracing file system.
#[derive(Debug)]
pub struct SystemCalls {
    counter: File,
}

impl SystemCalls {
    /// Starts to count.
    ///
    /// # Errors
    /// The tracing file system is not mounted, or this process may not use it.
    pub fn count() -> io::Result<SystemCalls> {
        let number = || {
            EVENT_NUMBERS
                .iter()
                .find_map(|path| std::fs::read_to_string(path).ok())
        };
        let number = number().and_then(|text| text.trim().parse().ok());
        let number = number.ok_or(io::ErrorKind::NotFound)?;
        let counter = open(TRACEPOINT, number, 0)?;
        Ok(SystemCalls { counter })
    }

    /// Calls so far.
    pub fn read(&self) -> io::Result<u64> {
        read(&self.counter)
    }
}

/// Opens a counter of the calling thread and those that it starts.
fn open(kind: u64, event: u64, flags: u64) -> io::Result<File> {
    let mut attributes: Attributes = [0; 8];
    attributes[0] = kind;
    attributes[1] = event;
    attributes[4] = TIMES;
    attributes[5] = INHERIT | flags;
    const CLOEXEC: libc::c_ulong = 8;
    let (this_thread, any_cpu, no_group) = (0, -1, -1);
    // SAFETY: the attributes have the size that they name, and the kernel only reads them.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            attributes.as_ptr(),
            this_thread as libc::pid_t,
            any_cpu as libc::c_int,
            no_group as libc::c_int,
            CLOEXEC,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call returned a new descriptor that nobody else owns.
    Ok(unsafe { File::from_raw_fd(fd as libc::c_int) })
}

fn read(mut counter: &File) -> io::Result<u64> {
    let mut bytes = [0; 24];
    counter.read_exact(&mut bytes)?;
    let word = |i: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[8 * i..8 * i + 8]);
        u64::from_le_bytes(word)
    };
    let (value, enabled, running) = (word(0), word(1), word(2));
    match running {
        0 => Err(io::Error::other("the machine counts nothing of the kind")),
        _ if running == enabled => Ok(value),
        _ => Ok((value as u128 * enabled as u128 / running as u128) as u64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_the_kernel_are_counted_where_they_may_be() {
        let Ok(counter) = SystemCalls::count() else {
            return crate::skip("counter of system calls");
        };
        let Ok(start) = counter.read() else {
            return crate::skip("counter of system calls");
        };
        let call = || std::fs::metadata("/").map(|found| found.is_dir());
        (0..1000).for_each(|_| assert!(call().unwrap()));
        let one = counter.read().unwrap() - start;
        let called = crate::thread::parallel(2, |_| (0..1000).all(|_| call().unwrap()));
        assert_eq!(called, [true; 2]);
        let more = counter.read().unwrap() - start - one;
        assert!((1000..1100).contains(&one), "{one}");
        assert!((2000..2500).contains(&more), "{more}");
    }

    /// A counter counts more for more work, of threads started later as well.
    #[test]
    fn work_is_counted_where_there_is_a_counter() {
        let Ok(counter) = Instructions::count() else {
            return crate::skip("counter of instructions");
        };
        let work = |times: u64| (0..times).fold(1u64, |x, i| std::hint::black_box(x ^ i));
        let Ok(start) = counter.read() else {
            return crate::skip("counter of instructions");
        };
        work(1_000_000);
        let one = counter.read().unwrap() - start;
        let worked = crate::thread::parallel(2, |_| work(5_000_000));
        assert_eq!(worked.len(), 2);
        let more = counter.read().unwrap() - start - one;
        assert!(one >= 1_000_000, "{one}");
        assert!(more > one, "{more} after {one}");
    }
}
