//! The lock order of the whole project, outermost first.
//!
//! Ranks marked *owned* may be taken in any order among themselves: they belong to an
//! object whose own lock (of a lower rank) is held meanwhile.

/// A position in the lock order. Small: each node in memory has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    pub(super) level: u16,
    /// Locks of this rank may be taken in any order among themselves.
    pub(super) owned: bool,
}

impl Rank {
    /// What locks of this rank are for.
    pub fn name(self) -> &'static str {
        let named = NAMES.iter().find(|(level, _)| *level == self.level);
        named.map_or("lock of a test", |(_, name)| name)
    }
}

/// Constants of ranks, and the list of their names.
macro_rules! ranks {
    ($($(#[$doc:meta])* $constant:ident = $kind:ident($level:expr, $name:literal);)*) => {
        $($(#[$doc])* pub const $constant: Rank = $kind($level);)*
        const NAMES: &[(u16, &str)] = &[$(($level, $name)),*];
    };
}

const fn ranked(level: u16) -> Rank {
    Rank {
        level,
        owned: false,
    }
}
const fn owned(level: u16) -> Rank {
    Rank { level, owned: true }
}

ranks! {
    MOUNT_SESSION = ranked(10, "mount session");
    MOUNT_HANDLES = ranked(12, "mount handle table");
    MOUNT_ATOMIC = ranked(14, "files with an atomic write");
    /// Held over the commit.
    ATOMIC_WRITE = ranked(16, "atomic write of a file");
    /// Held while it ends.
    FILE_SYSTEM_END = ranked(20, "end of a file system");
    STORE_END = ranked(22, "end of a store");
    /// Held while the context of all futures is made.
    FUTURES = ranked(28, "driver of futures");
    RENAME = ranked(30, "directory rename");
    IO_CONTEXT = ranked(32, "what somebody has in flight");
    /// Tried, never waited for.
    FILE_STREAM = ranked(34, "seat of a reader");
    FILE_BALANCE = ranked(36, "dirty page balance");
    FILE_FLUSH = ranked(38, "file write-back");
    FILE_IO = ranked(39, "file data range");
    /// A thread holds at most one.
    FILE_BEHIND = ranked(40, "seat of a writer");
    /// Held only while the table of ranges is searched or changed; the owner of a range holds no lock for it.
    FILE_RANGES = ranked(41, "ranges of files");
    FILE_TURN = ranked(42, "turn of write-back beside syncs");
    /// After all that a transaction takes before it begins; held while that waits for a checkpoint.
    LARGE_OPERATION = ranked(43, "large operation");
    COOKIES = ranked(44, "change cookies");
    /// After the file locks: an operation may have to wait for a checkpoint while it holds
    /// them, and a checkpoint takes none of them.
    CHECKPOINT = ranked(45, "checkpoint");
    /// Held while a run of free space is discarded.
    TRIM = ranked(46, "trim of free space");
    INODE = ranked(50, "inode node");
    OWNED_NODE = owned(60, "node owned by an inode");
    SPACE_MAP = ranked(70, "space map node");
    FILE_STATE = ranked(80, "open file state");
    FILE_TABLE = ranked(82, "open file table shard");
    PAGE_SET = ranked(84, "page cache set");
    DIRTY_PAGES = ranked(86, "dirty page index shard");
    NID_LEASE = ranked(96, "nid lease");
    NODE_SHARD = ranked(100, "node cache shard");
    HELD_NODES = ranked(102, "nodes held by a core");
    TABLE = ranked(110, "node table region");
    TABLE_REGIONS = ranked(111, "node table regions in memory");
    TABLE_MAPS = ranked(112, "node table map pages");
    SPACE_LEASE = ranked(116, "chunk lease");
    SPACE_RELEASE = ranked(118, "release of freed blocks");
    SEGMENT_GROWTH = ranked(119, "growth of the segment table");
    ALLOCATOR = ranked(120, "chunk allocator");
    CHUNK_BITS = ranked(122, "available blocks of a chunk");
    SPACE_PENDING = ranked(124, "blocks freed and not yet durable");
    SEGMENTS = ranked(130, "segment table");
    GATHER = ranked(140, "journal gather");
    STAGING = ranked(150, "journal staging shard");
    DIRTY_LIST = ranked(160, "dirty list shard");
    COMMIT_STATE = ranked(170, "commit state");
    DEVICE_DOUBT = ranked(190, "durable writes under way");
    DEVICE_FLUSH = ranked(200, "device flush");
    DEVICE_STATE = ranked(220, "device state");
    TALLY = ranked(240, "pending changes of a directory");
    LEDGER = ranked(300, "ledger of a simulated task");
    /// A lock that is never held while another is taken.
    LEAF = ranked(u16::MAX, "leaf");
}
