//! Answers in the kernel's form.

use std::time::Duration;

use base::clock::Timestamp;

use crate::abi;
use crate::ops::{Attributes, Entry, Opened, Statistics};

fn valid(duration: Duration) -> (u64, u32) {
    (duration.as_secs(), duration.subsec_nanos())
}

pub fn attr(a: &Attributes) -> abi::Attr {
    abi::Attr {
        ino: a.ino,
        size: a.size,
        blocks: a.blocks,
        atime: a.atime.sec(),
        mtime: a.mtime.sec(),
        ctime: a.ctime.sec(),
        atimensec: a.atime.nsec(),
        mtimensec: a.mtime.nsec(),
        ctimensec: a.ctime.nsec(),
        mode: a.mode,
        nlink: a.nlink,
        uid: a.uid,
        gid: a.gid,
        rdev: a.rdev,
        blksize: a.blksize,
        flags: 0,
    }
}

pub fn attr_out(a: &Attributes) -> abi::AttrOut {
    let (attr_valid, attr_valid_nsec) = valid(a.valid);
    abi::AttrOut {
        attr_valid,
        attr_valid_nsec,
        dummy: 0,
        attr: attr(a),
    }
}

pub fn entry(e: &Entry) -> abi::EntryOut {
    let (entry_valid, entry_valid_nsec) = valid(e.valid);
    let (attr_valid, attr_valid_nsec) = valid(e.attributes.valid);
    abi::EntryOut {
        nodeid: e.node,
        generation: e.generation,
        entry_valid,
        attr_valid,
        entry_valid_nsec,
        attr_valid_nsec,
        attr: attr(&e.attributes),
    }
}

pub fn opened(o: &Opened) -> abi::OpenOut {
    abi::OpenOut {
        fh: o.handle,
        open_flags: o.flags,
        backing_id: 0,
    }
}

fn statx_time(t: Timestamp) -> abi::StatxTime {
    abi::StatxTime {
        tv_sec: t.sec(),
        tv_nsec: t.nsec(),
        reserved: 0,
    }
}

pub fn statx(a: &Attributes) -> abi::StatxOut {
    let (attr_valid, attr_valid_nsec) = valid(a.valid);
    abi::StatxOut {
        attr_valid,
        attr_valid_nsec,
        flags: 0,
        spare: [0; 2],
        stat: abi::Statx {
            mask: libc::STATX_BASIC_STATS | libc::STATX_BTIME,
            blksize: a.blksize,
            nlink: a.nlink,
            uid: a.uid,
            gid: a.gid,
            mode: a.mode as u16,
            ino: a.ino,
            size: a.size,
            blocks: a.blocks,
            atime: statx_time(a.atime),
            btime: statx_time(a.btime),
            ctime: statx_time(a.ctime),
            mtime: statx_time(a.mtime),
            // The kernel's 32-bit device encoding: minor bits 0–7 and 20–31, major 8–19.
            rdev_major: (a.rdev >> 8) & 0xfff,
            rdev_minor: (a.rdev & 0xff) | ((a.rdev >> 12) & 0xfff00),
            ..Default::default()
        },
    }
}

pub fn statfs(s: &Statistics) -> abi::Kstatfs {
    abi::Kstatfs {
        blocks: s.blocks,
        bfree: s.blocks_free,
        bavail: s.blocks_available,
        files: s.files,
        ffree: s.files_free,
        bsize: s.block_size,
        namelen: s.name_max,
        frsize: s.fragment_size,
        ..Default::default()
    }
}
