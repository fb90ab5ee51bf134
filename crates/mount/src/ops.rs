//! What a file system answers: one trait, in terms of nodes, handles and plain values.
//!
//! The protocol layer decodes requests, calls [`Operations`] and encodes the answers; it
//! owns no state of the file system. Every method may be called from many threads at
//! once. A method blocks its caller's system call for as long as it runs, and must never
//! touch the mount it serves.

use std::ops::Range;
use std::time::Duration;

use base::clock::Timestamp;

use crate::dirent::DirectoryReply;
use crate::notify::Notifier;

/// An error number as system calls return it, positive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

impl Errno {
    pub const NOSYS: Errno = Errno(libc::ENOSYS);
    pub const NOTTY: Errno = Errno(libc::ENOTTY);
    pub const INVAL: Errno = Errno(libc::EINVAL);
    pub const IO: Errno = Errno(libc::EIO);
    pub const NOSPC: Errno = Errno(libc::ENOSPC);
}

pub type Result<T> = std::result::Result<T, Errno>;

/// A node id: what the kernel calls an inode by. The root is [`crate::abi::ROOT_ID`].
pub type NodeId = u64;

/// Who asks. Permissions are checked by the kernel (`default_permissions`), supplementary
/// groups included, before the request is sent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Context {
    pub uid: u32,
    pub gid: u32,
    /// Zero for requests of the kernel itself (write-back, read-ahead).
    pub pid: u32,
}

/// The attributes of a node.
#[derive(Clone, Copy, Debug, Default)]
pub struct Attributes {
    pub ino: u64,
    /// Bytes.
    pub size: u64,
    /// Allocated space in units of 512 bytes.
    pub blocks: u64,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    pub btime: Timestamp,
    /// Type and permission bits.
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    /// In the kernel's encoding, as `mknod` passed it.
    pub rdev: u32,
    /// Preferred size of I/O in bytes.
    pub blksize: u32,
    /// How long the kernel may keep these attributes without asking again.
    pub valid: Duration,
}

/// A node found or made under a name. Each one returned counts as one lookup, which the
/// kernel gives back through [`Operations::forget`].
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Zero: the name does not exist, and the kernel may remember that.
    pub node: NodeId,
    /// Together with `node` never used for anything else.
    pub generation: u64,
    pub attributes: Attributes,
    /// How long the kernel may keep the name.
    pub valid: Duration,
}

/// An open file.
#[derive(Clone, Copy, Debug)]
pub struct Opened {
    pub handle: u64,
    /// Bits of [`crate::abi::fopen`].
    pub flags: u32,
}

/// A time that `utimensat` sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    Now,
    At(Timestamp),
}

/// The attributes to change; `None` leaves one alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct SetAttributes {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<SetTime>,
    pub mtime: Option<SetTime>,
    pub ctime: Option<Timestamp>,
    /// The open file the change came through (`ftruncate`).
    pub handle: Option<u64>,
    /// With `size`: the caller may not keep suid and sgid.
    pub kill_suid_sgid: bool,
}

/// How a new node shall look.
#[derive(Clone, Copy, Debug, Default)]
pub struct NewNode {
    /// Type and permission bits, before umask and default ACL.
    pub mode: u32,
    /// To be applied unless the directory has a default ACL.
    pub umask: u32,
    pub rdev: u32,
}

/// A part of a file to read or write.
#[derive(Clone, Copy, Debug, Default)]
pub struct Span {
    /// The kernel's number of the request: later ones have greater numbers.
    pub request: u64,
    pub handle: u64,
    /// Bytes from the start of the file; below 2^63.
    pub offset: u64,
    /// The open flags of the file (`O_DIRECT`, `O_SYNC` …) as they are now.
    pub open_flags: u32,
    /// Sent by the kernel's write-back of a memory mapping; the handle is a guess.
    pub from_page_cache: bool,
    /// A read that goes to its caller's memory, past the page cache. Faults of mappings and read-ahead come with the flags of the open file, too.
    pub past_page_cache: bool,
    /// The caller may not keep suid and sgid.
    pub kill_suid_sgid: bool,
}

/// What `statfs` reports.
#[derive(Clone, Copy, Debug, Default)]
pub struct Statistics {
    /// In units of `fragment_size`.
    pub blocks: u64,
    pub blocks_free: u64,
    pub blocks_available: u64,
    pub files: u64,
    pub files_free: u64,
    pub block_size: u32,
    pub fragment_size: u32,
    pub name_max: u32,
}

/// One side of `copy_file_range`.
#[derive(Clone, Copy, Debug)]
pub struct CopySide {
    pub node: NodeId,
    pub handle: u64,
    pub offset: u64,
}

/// The operations of a mounted file system. Those with a body need not be provided.
pub trait Operations: Send + Sync {
    /// Called once, before any other, when kernel and server agreed on `flags`
    /// ([`crate::abi::init`]). `notifier` is good until the session ends.
    fn init(&self, _flags: u64, _notifier: Notifier) {}

    /// The mount goes away; when this returns, `umount` may (block devices only).
    fn destroy(&self) {}

    /// Also asked for `.` and `..`, of nodes the kernel never looked up, when a file handle
    /// is opened.
    fn lookup(&self, context: &Context, parent: NodeId, name: &[u8]) -> Result<Entry>;
    /// Gives back lookups. A node that was never looked up is ignored.
    fn forget(&self, node: NodeId, lookups: u64);
    fn getattr(&self, context: &Context, node: NodeId, handle: Option<u64>) -> Result<Attributes>;
    fn setattr(
        &self,
        context: &Context,
        node: NodeId,
        changes: &SetAttributes,
    ) -> Result<Attributes>;

    fn readlink(&self, context: &Context, node: NodeId) -> Result<Vec<u8>>;
    fn symlink(
        &self,
        context: &Context,
        parent: NodeId,
        name: &[u8],
        target: &[u8],
    ) -> Result<Entry>;
    fn mknod(&self, context: &Context, parent: NodeId, name: &[u8], new: &NewNode)
    -> Result<Entry>;
    fn mkdir(&self, context: &Context, parent: NodeId, name: &[u8], new: &NewNode)
    -> Result<Entry>;
    fn unlink(&self, context: &Context, parent: NodeId, name: &[u8]) -> Result<()>;
    fn rmdir(&self, context: &Context, parent: NodeId, name: &[u8]) -> Result<()>;
    /// `flags` are those of `renameat2`.
    fn rename(
        &self,
        context: &Context,
        from: (NodeId, &[u8]),
        to: (NodeId, &[u8]),
        flags: u32,
    ) -> Result<()>;
    fn link(
        &self,
        context: &Context,
        node: NodeId,
        new_parent: NodeId,
        new_name: &[u8],
    ) -> Result<Entry>;

    /// `flags` are those of open(2); for `O_TRUNC` the kernel asks by a change of size afterwards.
    fn open(&self, context: &Context, node: NodeId, flags: u32) -> Result<Opened>;
    fn create(
        &self,
        context: &Context,
        parent: NodeId,
        name: &[u8],
        new: &NewNode,
        flags: u32,
    ) -> Result<(Entry, Opened)>;
    /// An open file without a name, in the file system of `parent`.
    fn tmpfile(
        &self,
        context: &Context,
        parent: NodeId,
        new: &NewNode,
        flags: u32,
    ) -> Result<(Entry, Opened)>;
    /// Fills the front of `out`; returns the bytes read, less than asked only at the end.
    fn read(&self, context: &Context, node: NodeId, span: &Span, out: &mut [u8]) -> Result<usize>;
    /// Returns the bytes written.
    fn write(&self, context: &Context, node: NodeId, span: &Span, data: &[u8]) -> Result<usize>;
    /// Whether the kernel may have cached some of what a write of this node has changed, as it was before: it is answered by [`drop_written`](Self::drop_written) then.
    fn is_outdated(&self, _node: NodeId, _span: &Span) -> bool {
        false
    }
    /// Has the kernel drop what it has of these bytes of a node, and then calls `answer`, by another thread.
    fn drop_written(&self, _node: NodeId, _bytes: Range<u64>, answer: Box<dyn FnOnce() + Send>) {
        answer();
    }
    /// A write of this node was answered, or a change of its attributes; the answer may be on its way only when this has returned. So it waits for nothing that waits for that.
    fn wrote(&self, _node: NodeId) {}
    /// Asked after a request that found no space: a mark of what has given space back so far, if more may do so soon, or has lately.
    fn space_to_come(&self) -> Option<u64> {
        None
    }
    /// Waits for space to be given back since that mark, so long at most. False: it is not worth it to try again.
    fn await_space(&self, _mark: u64, _most: Duration) -> bool {
        false
    }
    /// close(2) of one descriptor. ENOSYS: the kernel need not ask again.
    fn flush(&self, _context: &Context, _node: NodeId, _handle: u64) -> Result<()> {
        Err(Errno::NOSYS)
    }
    /// The last descriptor of the open file is gone. Its result reaches nobody.
    fn release(&self, node: NodeId, handle: u64);
    fn fsync(&self, context: &Context, node: NodeId, handle: u64, data_only: bool) -> Result<()>;

    /// ENOSYS: directories are read without a handle, and the kernel need not ask again.
    fn opendir(&self, _context: &Context, _node: NodeId, _flags: u32) -> Result<Opened> {
        Err(Errno::NOSYS)
    }
    fn releasedir(&self, _node: NodeId, _handle: u64) {}
    /// Lists the entries after the position `offset` (0: from the start) until `reply` is
    /// full. [`DirectoryReply::wants_attributes`] tells READDIRPLUS from READDIR.
    fn readdir(
        &self,
        context: &Context,
        node: NodeId,
        offset: u64,
        reply: &mut DirectoryReply<'_>,
    ) -> Result<()>;
    fn fsyncdir(&self, context: &Context, node: NodeId, data_only: bool) -> Result<()>;

    fn statfs(&self, context: &Context, node: NodeId) -> Result<Statistics>;
    /// Everything accepted so far reaches the devices.
    fn syncfs(&self, context: &Context) -> Result<()>;

    /// `flags` are `XATTR_CREATE` and `XATTR_REPLACE`.
    fn setxattr(
        &self,
        context: &Context,
        node: NodeId,
        name: &[u8],
        value: &[u8],
        flags: u32,
        acl_kill_sgid: bool,
    ) -> Result<()>;
    fn getxattr(&self, context: &Context, node: NodeId, name: &[u8]) -> Result<Vec<u8>>;
    /// Names, each ended by a zero byte.
    fn listxattr(&self, context: &Context, node: NodeId) -> Result<Vec<u8>>;
    fn removexattr(&self, context: &Context, node: NodeId, name: &[u8]) -> Result<()>;
    /// ENOSYS: permissions are the kernel's business.
    fn access(&self, _context: &Context, _node: NodeId, _mask: u32) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// `mode` is that of fallocate(2).
    fn fallocate(
        &self,
        context: &Context,
        node: NodeId,
        handle: u64,
        mode: u32,
        offset: u64,
        length: u64,
    ) -> Result<()>;
    /// `SEEK_DATA` and `SEEK_HOLE` only.
    fn lseek(
        &self,
        context: &Context,
        node: NodeId,
        handle: u64,
        offset: u64,
        whence: u32,
    ) -> Result<u64>;
    /// Returns the bytes copied.
    fn copy_file_range(
        &self,
        _context: &Context,
        _from: &CopySide,
        _to: &CopySide,
        _length: u64,
    ) -> Result<u64> {
        Err(Errno::NOSYS)
    }
    /// Reads `input`, fills the front of `output`, returns the length filled. The handle is one of an open file; of a directory it means nothing.
    fn ioctl(
        &self,
        _context: &Context,
        _node: NodeId,
        _handle: u64,
        _command: u32,
        _input: &[u8],
        _output: &mut [u8],
    ) -> Result<usize> {
        Err(Errno::NOTTY)
    }
}
