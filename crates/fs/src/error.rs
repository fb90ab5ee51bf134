//! Why an operation failed. [`Error::errno`] is the only place where an error becomes a number.

use crate::Ino;
use format::Damage;

/// The caller's mistakes are variants of their own; the environment's come from the store.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error("no such file or directory")]
    NotFound,
    #[error("file exists")]
    Exists,
    #[error("not a directory")]
    NotADirectory,
    #[error("is a directory")]
    IsADirectory,
    #[error("directory not empty")]
    NotEmpty,
    #[error("name longer than 255 bytes")]
    NameTooLong,
    #[error("invalid argument: {0}")]
    Invalid(&'static str),
    #[error("operation not permitted")]
    NotPermitted,
    #[error("permission denied")]
    AccessDenied,
    #[error("too many links")]
    TooManyLinks,
    #[error("too many levels of symbolic links")]
    TooManySymlinks,
    #[error("no space left on the devices")]
    NoSpace,
    #[error("file too large")]
    FileTooLarge,
    #[error("no such attribute")]
    NoAttribute,
    #[error("attribute value too large")]
    AttributeTooLarge,
    #[error("operation not supported: {0}")]
    Unsupported(&'static str),
    /// The inode number is not in use, or is used by another file than the one meant.
    #[error("inode {0} is gone")]
    Stale(Ino),
    #[error("file handle not open for this")]
    BadHandle,
    /// Seek past the last data or hole.
    #[error("no data or hole there")]
    NoSuchOffset,
    #[error("the file system is read-only")]
    ReadOnly,
    #[error("busy")]
    Busy,
    /// What a transaction relied on has changed: nothing of it has happened, and it may be tried again.
    #[error("in conflict with another change: {0}")]
    Conflict(String),
    #[error("a transaction larger than the journal takes in one step")]
    TransactionTooLarge,
    /// The process may have too little memory.
    #[error(
        "no room for a page cache of {} MiB in the address space that the process may have (`ulimit -v`, `ulimit -d`): choose a smaller cache_size",
        bytes >> 20
    )]
    NoRoom { bytes: usize },
    /// Given up on the caller's demand.
    #[error("cancelled")]
    Cancelled,
    #[error("a write to inode {ino} failed: {why}")]
    WriteFailed { ino: Ino, why: String },
    #[error(
        "a flush failed while the transaction was written, and may have lost some of that: begin it again; the log names the device"
    )]
    TransactionNotWritten,
    #[error("inode {ino}: {damage}")]
    Damaged { ino: Ino, damage: Damage },
    #[error(transparent)]
    Damage(#[from] Damage),
    /// The store or a device below it failed.
    #[error(transparent)]
    Store(engine::Error),
}

impl From<engine::Error> for Error {
    fn from(error: engine::Error) -> Self {
        match error {
            engine::Error::Gone(nid) => Error::Stale(nid),
            engine::Error::NoSpace => Error::NoSpace,
            engine::Error::TooLarge => Error::TransactionTooLarge,
            engine::Error::ReadOnly => Error::ReadOnly,
            engine::Error::DamagedNode { nid, damage } => Error::Damaged { ino: nid, damage },
            engine::Error::Damaged(damage) => Error::Damage(damage),
            other => Error::Store(other),
        }
    }
}

impl Error {
    /// Whether what was read is not what was written; errors of devices are others.
    pub(crate) fn is_damage(&self) -> bool {
        matches!(self, Error::Damage(_) | Error::Damaged { .. })
    }

    /// The errno that a system call reports for this.
    pub fn errno(&self) -> i32 {
        match self {
            Error::NotFound => libc::ENOENT,
            Error::Exists => libc::EEXIST,
            Error::NotADirectory => libc::ENOTDIR,
            Error::IsADirectory => libc::EISDIR,
            Error::NotEmpty => libc::ENOTEMPTY,
            Error::NameTooLong => libc::ENAMETOOLONG,
            Error::Invalid(_) => libc::EINVAL,
            Error::NotPermitted => libc::EPERM,
            Error::AccessDenied => libc::EACCES,
            Error::TooManyLinks => libc::EMLINK,
            Error::TooManySymlinks => libc::ELOOP,
            Error::NoSpace => libc::ENOSPC,
            Error::FileTooLarge => libc::EFBIG,
            Error::NoAttribute => libc::ENODATA,
            Error::AttributeTooLarge => libc::E2BIG,
            Error::Unsupported(_) => libc::EOPNOTSUPP,
            Error::Stale(_) => libc::ESTALE,
            Error::BadHandle => libc::EBADF,
            Error::NoSuchOffset => libc::ENXIO,
            Error::ReadOnly => libc::EROFS,
            Error::Busy => libc::EBUSY,
            Error::Conflict(_) => libc::EAGAIN,
            Error::TransactionTooLarge => libc::E2BIG,
            Error::NoRoom { .. } => libc::ENOMEM,
            Error::Cancelled => libc::ECANCELED,
            Error::WriteFailed { .. } | Error::TransactionNotWritten => libc::EIO,
            Error::Damaged { .. } | Error::Damage(_) => libc::EIO,
            Error::Store(engine::Error::Failed(_)) => libc::EROFS,
            Error::Store(error) => lacking(error).unwrap_or(libc::EIO),
        }
    }
}

/// The errno of a lack of something that there may be again. A flush that failed is an error of I/O, whatever the reason.
fn lacking(error: &engine::Error) -> Option<i32> {
    use device::Error::{InUse, Io, NoIoUring, Open, Threads};
    let (source, begun) = match error {
        engine::Error::Thread(source) => (source, false),
        engine::Error::Device(error) => match &**error {
            InUse { .. } => return Some(libc::EBUSY),
            Open { source, .. } | Threads { source } | NoIoUring { source } => (source, false),
            Io { source, .. } => (source, true),
            _ => return None,
        },
        _ => return None,
    };
    match source.raw_os_error()? {
        number @ (libc::EMFILE | libc::ENFILE | libc::ENOMEM) => Some(number),
        // A program takes it for a call that it should make again.
        libc::EAGAIN if !begun => Some(libc::EAGAIN),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::Arc;

    /// A program that reads EIO gives up, and blames a device.
    #[test]
    fn a_lack_of_resources_is_told_from_a_failed_device() {
        let source = |number| Arc::new(io::Error::from_raw_os_error(number));
        let errno = |error: device::Error| Error::from(engine::Error::from(error)).errno();
        for number in [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EAGAIN] {
            let source = || source(number);
            assert_eq!(errno(device::Error::NoIoUring { source: source() }), number);
            assert_eq!(errno(device::Error::Threads { source: source() }), number);
            let thread = engine::Error::Thread(source());
            assert_eq!(Error::from(thread).errno(), number);
            let device = "a.img".to_owned();
            let flush = device::Error::Flush {
                device: device.clone(),
                source: source(),
            };
            assert_eq!(errno(flush), libc::EIO);
            let read = device::Error::Io {
                device,
                operation: "read",
                offset: 0,
                len: 4096,
                source: source(),
            };
            let passes = number != libc::EAGAIN;
            assert_eq!(errno(read), if passes { number } else { libc::EIO });
        }
        let source = source(libc::EINVAL);
        assert_eq!(errno(device::Error::NoIoUring { source }), libc::EIO);
        let device = "a.img".to_owned();
        assert_eq!(errno(device::Error::InUse { device }), libc::EBUSY);
    }
}
