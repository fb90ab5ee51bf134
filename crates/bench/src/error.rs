//! Why a benchmark could not run.

use std::io;
use std::path::Path;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// SIGINT, SIGTERM or SIGHUP came.
    #[error("interrupted")]
    Interrupted,
    /// The caller asked for what makes no sense.
    #[error("{0}")]
    Usage(String),
    /// The machine, or the caller's rights, do not allow it. The message names the remedy.
    #[error("{0}")]
    Unable(String),
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
    #[error("{program} failed ({status}): {output}")]
    Program {
        program: String,
        status: String,
        output: String,
    },
    /// A call of the file system under test, in this process.
    #[error(transparent)]
    Fs(#[from] fs::Error),
    /// A system call on the file system under test.
    #[error(transparent)]
    Call(#[from] rustix::io::Errno),
    #[error(transparent)]
    Device(#[from] device::Error),
    #[error(transparent)]
    Geometry(#[from] format::Damage),
    /// One side of the comparison failed in one workload.
    #[error("{name} on {target}: {source}")]
    Side {
        name: String,
        target: String,
        source: Box<Error>,
    },
}

impl Error {
    /// The threads of a load cannot be started.
    pub fn threads(error: io::Error) -> Error {
        Error::Unable(format!(
            "cannot start a thread: {error}: want fewer (--threads), or raise the limit of memory or processes (ulimit -v, -u)"
        ))
    }

    pub fn io(what: &Path, source: io::Error) -> Error {
        Error::Io {
            what: what.display().to_string(),
            source,
        }
    }

    /// The kernel gives no random bytes, as the error says.
    pub fn no_entropy(error: io::Error) -> Error {
        Error::Unable(error.to_string())
    }

    /// The file system under test is full.
    pub fn is_no_space(&self) -> bool {
        match self {
            Error::Call(errno) => *errno == rustix::io::Errno::NOSPC,
            Error::Fs(error) => error.errno() == libc::ENOSPC,
            _ => false,
        }
    }

    /// As the failure of `name` on `target`; an interruption stays one.
    pub fn on(self, name: &str, target: &str) -> Error {
        match self {
            Error::Interrupted => Error::Interrupted,
            source => Error::Side {
                name: name.to_owned(),
                target: target.to_owned(),
                source: Box::new(source),
            },
        }
    }
}
