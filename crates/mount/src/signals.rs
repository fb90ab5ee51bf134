//! SIGTERM and SIGINT end a mount cleanly; SIGHUP (a terminal that goes away) is ignored.
//!
//! The first signal unmounts, lazily if the mount is in use; the second breaks the
//! connection, so that even a user that never lets go cannot keep the daemon alive. Once the
//! file system is being closed there is nothing left to hurry: signals are logged then, because
//! whoever breaks the connection of a block device's mount makes the kernel let go of a device
//! that is still written to, and whoever ends the process leaves the rest unwritten.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::mounting::{Insist, Unmounter};
use crate::sys::{self, ForwardedSignals};

const WATCHED: &[libc::c_int] = &[libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// Whether the file system is being closed.
#[derive(Clone, Debug, Default)]
pub struct Closing(Arc<AtomicBool>);

impl Closing {
    /// From now on it is.
    pub fn begin(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn has_begun(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Signals turned into unmounts while this lives. Of several mounts in one process the
/// first is the one that signals end.
#[derive(Debug)]
pub struct SignalWatch {
    /// Dropped first, so that no signal is lost to a thread that has ended.
    _forwarded: ForwardedSignals,
    /// Its end, when dropped, ends the watching thread.
    _end: UnixStream,
}

impl SignalWatch {
    /// `None` when this process has one already.
    pub fn start(unmounter: Unmounter, closing: Closing) -> std::io::Result<Option<Self>> {
        let Some((forwarded, signals)) = ForwardedSignals::new(WATCHED)? else {
            return Ok(None);
        };
        let (end, ended) = UnixStream::pair()?;
        let body = move || watch(&unmounter, &closing, &signals, &ended);
        let watcher = base::thread::spawn("fuse-signals", body)?;
        // It ends by itself when `end` is dropped.
        drop(watcher);
        Ok(Some(SignalWatch {
            _forwarded: forwarded,
            _end: end,
        }))
    }
}

fn watch(unmounter: &Unmounter, closing: &Closing, signals: &UnixStream, ended: &UnixStream) {
    let mut received = 0u32;
    loop {
        let (signalled, over) = match sys::wait_readable(signals.as_fd(), ended.as_fd()) {
            Ok(readable) => readable,
            Err(error) => {
                tracing::error!(%error, "signals are no longer watched");
                return;
            }
        };
        if over {
            return;
        }
        if !signalled {
            continue;
        }
        let signal = match sys::take_signal(signals) {
            Ok(Some(signal)) => signal,
            Ok(None) => continue,
            Err(error) => {
                tracing::error!(%error, "signals are no longer watched");
                return;
            }
        };
        if signal == libc::SIGHUP {
            continue;
        }
        if closing.has_begun() {
            tracing::info!(
                "asked to end by a signal: everything is being written, which takes its time"
            );
            continue;
        }
        received += 1;
        end_mount(unmounter, received);
    }
}

fn end_mount(unmounter: &Unmounter, received: u32) {
    let attempts: &[Insist] = if received == 1 {
        &[Insist::No, Insist::Lazy]
    } else {
        &[Insist::Abort]
    };
    for &insist in attempts {
        match unmounter.unmount(insist) {
            Ok(()) => return,
            Err(error) => tracing::warn!(%error, ?insist, "asked to end by a signal"),
        }
    }
}
