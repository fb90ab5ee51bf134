//! The types that callers of [`FileSystem`](crate::FileSystem) exchange with it.

use base::clock::Timestamp;

/// An inode number: the nid of the inode's node.
pub type Ino = format::Nid;

/// The root directory.
pub const ROOT: Ino = format::Nid(format::inode::ROOT_INO);

/// On whose behalf an operation runs. Access permission is checked by the kernel (or not at
/// all, in-process); this decides ownership of new files and the set-id rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
    /// Permission bits that new files do not get, unless a default ACL says otherwise.
    pub umask: u32,
    /// May do what root may: keeps set-id bits.
    pub privileged: bool,
    /// The file's group is among the caller's supplementary groups, as far as known.
    pub in_group: bool,
    /// Keeps the attributes that an operation returns, as those of a look: what is changed after it gets newer
    /// times than these. Without that, changes that follow an operation at once may have its times.
    pub keeps_attributes: bool,
}

impl Caller {
    /// Whether set-group-ID bits of a file of this group are the caller's to keep.
    pub(crate) fn is_in(&self, group: u32) -> bool {
        self.privileged || self.in_group || self.gid == group
    }

    /// The superuser with umask 022.
    pub fn root() -> Caller {
        Caller {
            uid: 0,
            gid: 0,
            umask: 0o022,
            privileged: true,
            in_group: true,
            keeps_attributes: false,
        }
    }

    /// A caller without privileges and supplementary groups, umask 022.
    pub fn user(uid: u32, gid: u32) -> Caller {
        Caller {
            uid,
            gid,
            umask: 0o022,
            privileged: uid == 0,
            in_group: false,
            keeps_attributes: false,
        }
    }
}

/// What `stat` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    pub ino: Ino,
    /// Tells successive uses of an inode number apart. A use that a crash takes back leaves its generation to the next one: who keeps it for
    /// longer than a mount keeps [`handle_generation`](Self::handle_generation).
    pub generation: u64,
    /// File type and permission bits.
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u32,
    /// In bytes.
    pub size: u64,
    /// In units of 512 bytes.
    pub blocks: u64,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    pub btime: Timestamp,
}

impl Attr {
    /// What tells uses of an inode number apart in a handle that outlives mounts, as those of NFS do. It stays the same as long as the file is there.
    ///
    /// It is made of the time of birth, too: generations repeat after a crash, and the 32 bits that handles have of them after a repair. Two uses that were
    /// born at different times have the same by a chance of 2^-32, those born at one time never. The root's is 0, as the kernel has it.
    pub fn handle_generation(&self) -> u32 {
        if self.ino == ROOT {
            return 0;
        }
        // As splitmix64 ends: each bit of the time changes half of them.
        let mut mixed = self.btime.ns() as u64;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        mixed.wrapping_add(self.generation) as u32
    }

    pub fn is_dir(&self) -> bool {
        self.mode & libc::S_IFMT == libc::S_IFDIR
    }

    pub fn is_symlink(&self) -> bool {
        self.mode & libc::S_IFMT == libc::S_IFLNK
    }
}

/// A timestamp to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    Now,
    At(Timestamp),
}

/// Attributes to change; `None` leaves one as it is. All change in one atomic step, except
/// that a new size is a step of its own and comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permission bits (the low 12; the type bits are ignored).
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<SetTime>,
    pub mtime: Option<SetTime>,
    /// Clear set-user-ID, and set-group-ID where the group may execute or the caller is outside of it, as a write would.
    pub kill_suidgid: bool,
}

impl SetAttr {
    /// What is left to do when the size is set, which brings the time of change: servers of NFS ask for both.
    pub(crate) fn without_size(&self) -> SetAttr {
        let comes_with_size = self.size.is_some() && self.mtime == Some(SetTime::Now);
        SetAttr {
            size: None,
            mtime: self.mtime.filter(|_| !comes_with_size),
            ..*self
        }
    }

    /// Takes privileges away, and nothing else.
    pub(crate) const STRIP: SetAttr = SetAttr {
        mode: None,
        uid: None,
        gid: None,
        size: None,
        atime: None,
        mtime: None,
        kill_suidgid: true,
    };
}

/// One entry that `readdir` hands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirEntry<'a> {
    pub ino: Ino,
    pub name: &'a [u8],
    /// As in `d_type`.
    pub kind: u8,
    /// Where to resume after this entry; a positive `off_t`.
    pub next: u64,
}

/// What `statfs` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatFs {
    /// Bytes in a block.
    pub block_size: u32,
    pub blocks: u64,
    pub blocks_free: u64,
    /// Free blocks that users may fill.
    pub blocks_available: u64,
    /// Inodes and other nodes in use, plus those that could still be made.
    pub files: u64,
    pub files_free: u64,
    pub name_max: u32,
}

/// When reading a file updates its access time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AtimePolicy {
    /// If it is not newer than the other times, or older than a day.
    #[default]
    Relative,
    Never,
    Always,
}
