//! The kernel's FUSE ABI: message structures, opcodes and flags.
//!
//! Written from the UAPI header `linux/fuse.h` (7.38) and its published protocol
//! changelog up to 7.45. Every structure is a plain value without hidden padding
//! (`zerocopy` derives refuse it) and its size is asserted beside its definition.
//! Fields keep the header's names so that the two can be compared line by line.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The only major version that exists.
pub const KERNEL_VERSION: u32 = 7;
/// The newest minor version this crate understands.
pub const KERNEL_MINOR_VERSION: u32 = 45;
/// The oldest minor version it works with (7.31, Linux 5.4).
pub const KERNEL_MINOR_VERSION_MIN: u32 = 31;

/// The node id of the root directory.
pub const ROOT_ID: u64 = 1;

/// The kernel refuses to read requests into anything smaller.
pub const MIN_READ_BUFFER: usize = 8192;

/// Derives shared by everything that crosses /dev/fuse, and a check of its size.
macro_rules! abi {
    ($(#[$meta:meta])* $name:ident[$size:literal] { $($(#[$field_meta:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
        }
        const _: () = assert!(size_of::<$name>() == $size);
    };
}

abi!(InHeader[40] {
    len: u32,
    opcode: u32,
    unique: u64,
    nodeid: u64,
    uid: u32,
    gid: u32,
    pid: u32,
    /// Length of the extensions at the message's end, in units of 8 bytes.
    total_extlen: u16,
    padding: u16,
});

abi!(OutHeader[16] {
    len: u32,
    /// Zero or a negated errno.
    error: i32,
    unique: u64,
});

abi!(Attr[88] {
    ino: u64,
    size: u64,
    /// In units of 512 bytes.
    blocks: u64,
    atime: i64,
    mtime: i64,
    ctime: i64,
    atimensec: u32,
    mtimensec: u32,
    ctimensec: u32,
    mode: u32,
    nlink: u32,
    uid: u32,
    gid: u32,
    rdev: u32,
    blksize: u32,
    flags: u32,
});

abi!(StatxTime[16] {
    tv_sec: i64,
    tv_nsec: u32,
    reserved: i32,
});

abi!(Statx[256] {
    mask: u32,
    blksize: u32,
    attributes: u64,
    nlink: u32,
    uid: u32,
    gid: u32,
    mode: u16,
    spare0: u16,
    ino: u64,
    size: u64,
    blocks: u64,
    attributes_mask: u64,
    atime: StatxTime,
    btime: StatxTime,
    ctime: StatxTime,
    mtime: StatxTime,
    rdev_major: u32,
    rdev_minor: u32,
    dev_major: u32,
    dev_minor: u32,
    spare2: [u64; 14],
});

abi!(StatxIn[24] {
    getattr_flags: u32,
    reserved: u32,
    fh: u64,
    sx_flags: u32,
    sx_mask: u32,
});

abi!(StatxOut[288] {
    attr_valid: u64,
    attr_valid_nsec: u32,
    flags: u32,
    spare: [u64; 2],
    stat: Statx,
});

abi!(Kstatfs[80] {
    blocks: u64,
    bfree: u64,
    bavail: u64,
    files: u64,
    ffree: u64,
    bsize: u32,
    namelen: u32,
    frsize: u32,
    padding: u32,
    spare: [u32; 6],
});

abi!(EntryOut[128] {
    nodeid: u64,
    generation: u64,
    entry_valid: u64,
    attr_valid: u64,
    entry_valid_nsec: u32,
    attr_valid_nsec: u32,
    attr: Attr,
});

abi!(ForgetIn[8] {
    nlookup: u64,
});

abi!(ForgetOne[16] {
    nodeid: u64,
    nlookup: u64,
});

abi!(BatchForgetIn[8] {
    count: u32,
    dummy: u32,
});

abi!(GetattrIn[16] {
    getattr_flags: u32,
    dummy: u32,
    fh: u64,
});

abi!(AttrOut[104] {
    attr_valid: u64,
    attr_valid_nsec: u32,
    dummy: u32,
    attr: Attr,
});

abi!(MknodIn[16] {
    mode: u32,
    rdev: u32,
    umask: u32,
    padding: u32,
});

abi!(MkdirIn[8] {
    mode: u32,
    umask: u32,
});

abi!(RenameIn[8] {
    newdir: u64,
});

abi!(Rename2In[16] {
    newdir: u64,
    flags: u32,
    padding: u32,
});

abi!(LinkIn[8] {
    oldnodeid: u64,
});

abi!(SetattrIn[88] {
    valid: u32,
    padding: u32,
    fh: u64,
    size: u64,
    lock_owner: u64,
    atime: i64,
    mtime: i64,
    ctime: i64,
    atimensec: u32,
    mtimensec: u32,
    ctimensec: u32,
    mode: u32,
    unused4: u32,
    uid: u32,
    gid: u32,
    unused5: u32,
});

abi!(OpenIn[8] {
    flags: u32,
    open_flags: u32,
});

abi!(CreateIn[16] {
    flags: u32,
    mode: u32,
    umask: u32,
    open_flags: u32,
});

abi!(OpenOut[16] {
    fh: u64,
    open_flags: u32,
    backing_id: i32,
});

abi!(ReleaseIn[24] {
    fh: u64,
    flags: u32,
    release_flags: u32,
    lock_owner: u64,
});

abi!(FlushIn[24] {
    fh: u64,
    unused: u32,
    padding: u32,
    lock_owner: u64,
});

abi!(ReadIn[40] {
    fh: u64,
    offset: u64,
    size: u32,
    read_flags: u32,
    lock_owner: u64,
    flags: u32,
    padding: u32,
});

abi!(WriteIn[40] {
    fh: u64,
    offset: u64,
    size: u32,
    write_flags: u32,
    lock_owner: u64,
    flags: u32,
    padding: u32,
});

abi!(WriteOut[8] {
    size: u32,
    padding: u32,
});

abi!(FsyncIn[16] {
    fh: u64,
    fsync_flags: u32,
    padding: u32,
});

abi!(
    /// What the kernel sends unless SETXATTR_EXT was negotiated.
    SetxattrInShort[8] {
    size: u32,
    flags: u32,
});

abi!(SetxattrIn[16] {
    size: u32,
    flags: u32,
    setxattr_flags: u32,
    padding: u32,
});

abi!(GetxattrIn[8] {
    size: u32,
    padding: u32,
});

abi!(GetxattrOut[8] {
    size: u32,
    padding: u32,
});

abi!(AccessIn[8] {
    mask: u32,
    padding: u32,
});

abi!(
    /// The part of INIT that every 7.x kernel sends; `flags2` follows when `INIT_EXT` is set.
    InitIn[16] {
    major: u32,
    minor: u32,
    max_readahead: u32,
    flags: u32,
});

abi!(InitOut[64] {
    major: u32,
    minor: u32,
    max_readahead: u32,
    flags: u32,
    max_background: u16,
    congestion_threshold: u16,
    max_write: u32,
    time_gran: u32,
    max_pages: u16,
    map_alignment: u16,
    flags2: u32,
    max_stack_depth: u32,
    request_timeout: u16,
    unused16: u16,
    unused: [u32; 5],
});

abi!(InterruptIn[8] {
    unique: u64,
});

abi!(IoctlIn[32] {
    fh: u64,
    flags: u32,
    cmd: u32,
    arg: u64,
    in_size: u32,
    out_size: u32,
});

abi!(IoctlOut[16] {
    result: i32,
    flags: u32,
    in_iovs: u32,
    out_iovs: u32,
});

abi!(
    /// A message without a request: cached pages, from `off` on, are dropped (`len` 0: all of them), and attributes; with a negative
    /// `off` attributes alone.
    NotifyInvalInodeOut[24] {
    ino: u64,
    off: i64,
    len: i64,
});

abi!(FallocateIn[32] {
    fh: u64,
    offset: u64,
    length: u64,
    mode: u32,
    padding: u32,
});

abi!(
    /// The fixed part of a directory entry; the name follows, padded to 8 bytes.
    Dirent[24] {
    ino: u64,
    off: u64,
    namelen: u32,
    kind: u32,
});

abi!(LseekIn[24] {
    fh: u64,
    offset: u64,
    whence: u32,
    padding: u32,
});

abi!(LseekOut[8] {
    offset: u64,
});

abi!(CopyFileRangeIn[56] {
    fh_in: u64,
    off_in: u64,
    nodeid_out: u64,
    fh_out: u64,
    off_out: u64,
    len: u64,
    flags: u64,
});

abi!(CopyFileRangeOut[8] {
    bytes_copied: u64,
});

/// Request numbers. Those not listed are answered ENOSYS.
pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const IOCTL: u32 = 39;
    pub const NOTIFY_REPLY: u32 = 41;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const SYNCFS: u32 = 50;
    pub const TMPFILE: u32 = 51;
    pub const STATX: u32 = 52;
    pub const COPY_FILE_RANGE_64: u32 = 53;

    /// Messages the kernel does not expect an answer to.
    pub const fn has_no_reply(opcode: u32) -> bool {
        matches!(opcode, FORGET | BATCH_FORGET | INTERRUPT | NOTIFY_REPLY)
    }
}

/// The code of a [`NotifyInvalInodeOut`], where answers have an error.
pub const NOTIFY_INVAL_INODE: i32 = 2;

/// INIT flags; bits 32 and up travel in `flags2`.
pub mod init {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const POSIX_LOCKS: u64 = 1 << 1;
    pub const ATOMIC_O_TRUNC: u64 = 1 << 3;
    pub const EXPORT_SUPPORT: u64 = 1 << 4;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const DONT_MASK: u64 = 1 << 6;
    pub const FLOCK_LOCKS: u64 = 1 << 10;
    pub const HAS_IOCTL_DIR: u64 = 1 << 11;
    pub const AUTO_INVAL_DATA: u64 = 1 << 12;
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const WRITEBACK_CACHE: u64 = 1 << 16;
    pub const NO_OPEN_SUPPORT: u64 = 1 << 17;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const POSIX_ACL: u64 = 1 << 20;
    pub const ABORT_ERROR: u64 = 1 << 21;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    pub const NO_OPENDIR_SUPPORT: u64 = 1 << 24;
    pub const EXPLICIT_INVAL_DATA: u64 = 1 << 25;
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub const SETXATTR_EXT: u64 = 1 << 29;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const OVER_IO_URING: u64 = 1 << 41;
}

/// Bits of [`SetattrIn::valid`].
pub mod fattr {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const FH: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const CTIME: u32 = 1 << 10;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

/// Bits of [`OpenOut::open_flags`].
pub mod fopen {
    pub const KEEP_CACHE: u32 = 1 << 1;
    pub const NOFLUSH: u32 = 1 << 5;
}

/// GETATTR and STATX: the file handle is valid.
pub const GETATTR_FH: u32 = 1 << 0;
/// READ: names whose locks it respects, which one that fills the page cache does not.
pub const READ_LOCKOWNER: u32 = 1 << 1;
/// WRITE: from the page cache (memory mapping); the handle is a guess.
pub const WRITE_CACHE: u32 = 1 << 0;
/// WRITE: clear suid, and sgid if executable by group.
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// FSYNC: data only.
pub const FSYNC_FDATASYNC: u32 = 1 << 0;
/// SETXATTR of `system.posix_acl_access`: clear sgid.
pub const SETXATTR_ACL_KILL_SGID: u32 = 1 << 0;
/// IOCTL: on a directory.
pub const IOCTL_DIR: u32 = 1 << 4;
/// `_IOR(229, 0, u32)`: makes a freshly opened /dev/fuse serve an existing connection.
pub const DEV_IOC_CLONE: u64 = 0x8004_E500;

/// Length of a directory entry with a name of `name_len` bytes.
pub const fn dirent_size(name_len: usize) -> usize {
    (size_of::<Dirent>() + name_len).next_multiple_of(8)
}
