//! How a thread sleeps in a ring: the calls of the kernel, and what they may end with.

use io_uring::{IoUring, types};
use std::io;
use std::time::Duration;

/// Submits what is queued and waits until `want` completions are there, or fewer if a signal
/// or the kernel's shortage of memory cuts the wait short: the caller looks and comes back.
///
/// Aborts the process when the ring itself is unusable, which takes somebody closing its
/// descriptor: the kernel may still write to buffers that the caller is about to give up.
pub(crate) fn wait(ring: &mut IoUring, want: usize) {
    waited(ring.submit_and_wait(want));
}

/// As [`wait`], and no longer than `patience`.
pub(crate) fn wait_for(ring: &mut IoUring, want: usize, patience: Option<Duration>) {
    let Some(patience) = patience else {
        return wait(ring, want);
    };
    let time = types::Timespec::from(patience);
    let until = types::SubmitArgs::new().timespec(&time);
    match ring.submitter().submit_with_args(want, &until) {
        Err(e) if e.raw_os_error() == Some(libc::ETIME) => {}
        // Kernels before 5.11 wait without an end, or not at all.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            start(ring);
            base::thread::yield_now();
        }
        done => waited(done),
    }
}

fn waited(done: io::Result<usize>) {
    if let Err(e) = done {
        match e.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => base::thread::yield_now(),
            _ => unusable(&e),
        }
    }
}

/// Submits what is queued without waiting, and has the kernel write the completions that wait for a call. What the kernel
/// does not take now, the next [`wait`] submits.
pub(crate) fn start(ring: &mut IoUring) {
    if let Err(e) = ring.submit() {
        match e.raw_os_error() {
            Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => {}
            _ => unusable(&e),
        }
    }
}

fn unusable(error: &io::Error) -> ! {
    tracing::error!(%error, "io_uring_enter failed with I/O in flight");
    std::process::abort()
}
