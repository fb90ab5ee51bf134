//! Instructions that threads retire, by the processor's own counter.
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
        let mut attributes: Attributes = [0; 8];
        attributes[0] = HARDWARE;
        attributes[1] = INSTRUCTIONS;
        attributes[4] = TIMES;
        attributes[5] = INHERIT | EXCLUDE_HYPERVISOR | without;
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
        let counter = unsafe { File::from_raw_fd(fd as libc::c_int) };
        Ok(Instructions { counter, kernel })
    }

    /// Whether what the kernel does for these threads counts.
    pub fn with_kernel(&self) -> bool {
        self.kernel
    }

    /// Instructions so far. Where counters are fewer than those who want one, an estimate.
    pub fn read(&self) -> io::Result<u64> {
        let mut bytes = [0; 24];
        (&self.counter).read_exact(&mut bytes)?;
        let word = |i: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[8 * i..8 * i + 8]);
            u64::from_le_bytes(word)
        };
        let (value, enabled, running) = (word(0), word(1), word(2));
        match running {
            0 => Err(io::Error::other("the processor counts no instructions")),
            _ if running == enabled => Ok(value),
            _ => Ok((value as u128 * enabled as u128 / running as u128) as u64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A counter counts more for more work, of threads started later as well.
    #[test]
    fn work_is_counted_where_there_is_a_counter() {
        let Ok(counter) = Instructions::count() else {
            return;
        };
        let work = |times: u64| (0..times).fold(1u64, |x, i| std::hint::black_box(x ^ i));
        let Ok(start) = counter.read() else { return };
        work(1_000_000);
        let one = counter.read().unwrap() - start;
        let worked = crate::thread::parallel(2, |_| work(5_000_000));
        assert_eq!(worked.len(), 2);
        let more = counter.read().unwrap() - start - one;
        assert!(one >= 1_000_000, "{one}");
        assert!(more > one, "{more} after {one}");
    }
}
