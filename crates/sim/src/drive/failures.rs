//! What an operation may leave that has failed.

use super::{Driver, Stop};
use crate::look;
use crate::op::{Atomic, Op};
use crate::tree::Change;
use device::sim::{FaultKind, Struck};
use format::BLOCK_SIZE;
use fs::{Caller, FileSystem, OpenFile, ROOT, SetAttr};
use std::sync::Arc;

/// Blocks beyond those that its data needs for want of which an operation may find no room: transactions and atomic writes have some promised besides.
const LITTLE_ROOM: u64 = 8;

/// A file system that has failed takes no change more, of whatever kind, through whatever handle: else it would be acknowledged, and lost.
pub fn refuses_changes<'a>(
    fs: &Arc<FileSystem>,
    handles: impl Iterator<Item = &'a Arc<OpenFile>>,
) -> Result<(), String> {
    let (who, name) = (Caller::root(), b"refused");
    let mode = SetAttr {
        mode: Some(0o700),
        ..SetAttr::default()
    };
    let mut tried = vec![
        ("a mkdir", fs.mkdir(&who, ROOT, name, 0o700).map(drop)),
        (
            "a mknod",
            fs.mknod(&who, ROOT, name, libc::S_IFREG | 0o600, 0)
                .map(drop),
        ),
        (
            "a symlink",
            fs.symlink(&who, ROOT, name, b"nowhere").map(drop),
        ),
        ("a chmod", fs.setattr(&who, ROOT, &mode).map(drop)),
        (
            "a setxattr",
            fs.setxattr(&who, ROOT, b"user.refused", b"1", 0),
        ),
        ("a sync", fs.sync()),
    ];
    for file in handles {
        if file.flags() & libc::O_ACCMODE == libc::O_RDONLY {
            continue;
        }
        tried.extend([
            ("a write", fs.write(file, 0, b"refused").map(drop)),
            ("a truncation", fs.truncate(&who, file.ino(), 1)),
            ("an allocation", fs.fallocate(file, 0, 0, 1 << 20)),
            ("an atomic write", fs.atomic_write(&who, file).map(drop)),
            ("an fsync", fs.fsync(file, false)),
        ]);
    }
    for (what, tried) in tried {
        match tried.map_err(|error| error.errno()) {
            Err(libc::EIO | libc::EROFS) => {}
            Err(errno) => return Err(format!("errno {errno} of {what} after a failure")),
            Ok(()) => return Err(format!("{what} succeeds after a failure")),
        }
    }
    Ok(())
}

impl Driver {
    /// Where devices work, what is accepted on a full array is stored. Where they fail, at least it does not fail for want of room.
    pub(super) fn is_broken_promise(&self, error: &fs::Error) -> bool {
        let no_room = fs::Error::NoSpace.to_string();
        !self.faulty || error.to_string().contains(&no_room)
    }

    /// What a handle's fsync said once it says again, until the file is opened anew.
    pub(super) fn remember(
        &mut self,
        path: &str,
        result: &Result<(), fs::Error>,
    ) -> Result<(), Stop> {
        let file = self.file(path);
        let Some(id) = file.filter(|id| self.held.contains_key(id)) else {
            return Ok(());
        };
        let flush = |error: &engine::Error| match error {
            engine::Error::Device(error) => matches!(**error, device::Error::Flush { .. }),
            _ => false,
        };
        match result {
            Ok(()) if self.told.contains(&id) => Err(Stop::Violation(format!(
                "fsync of {path} succeeds through a handle that has lost data"
            ))),
            Err(fs::Error::WriteFailed { .. }) => {
                self.told.insert(id);
                Ok(())
            }
            Err(fs::Error::Store(error)) if flush(error) => {
                self.told.insert(id);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// An atomic write's commit has failed: its file is what it was, or the file system takes no more changes, and a crash leaves all of it or nothing.
    pub(super) fn commit_failed(&mut self, error: &fs::Error, change: &Change) -> Result<(), Stop> {
        if !self.faulty {
            // Space and size were for staging to find out.
            return Err(Stop::Violation(format!(
                "an atomic write's commit fails: {error}"
            )));
        }
        let stop = Stop::Environment(error.to_string());
        if self.fs().store().failed().is_some() {
            return Err(stop);
        }
        self.oracle.undo(change);
        for id in &change.written {
            let Some(ino) = self.inos.get(id).copied() else {
                continue;
            };
            // Whoever gives up what could not be written, at the last close, says so by the file's time.
            let at_once = self.fs().getattr(ino).map(|attr| look::shown(&attr).mtime);
            let look = || {
                let bytes = look::content(self.fs(), ino)?;
                Ok::<_, fs::Error>((bytes, look::shown(&self.fs().getattr(ino)?)))
            };
            // The last close may let go of what could not be written.
            let left = look().and_then(|_| look());
            let Ok((bytes, shown)) = left else {
                // Nobody knows yet, and the power goes next.
                self.oracle.may_lose(*id, self.began);
                continue;
            };
            if self.lied() {
                continue;
            }
            if bytes == **self.oracle.content(*id) {
                if at_once.is_ok_and(|mtime| mtime < self.began) {
                    continue;
                }
                return Err(Stop::Violation(format!(
                    "a commit that failed ({error}) has changed its file's time"
                )));
            }
            // What was written before it may be lost, as after an fsync that has failed.
            self.oracle.allows_content(*id, &bytes).map_err(|what| {
                Stop::Violation(format!(
                    "a commit that failed ({error}) has changed its file: {what}"
                ))
            })?;
            self.oracle.lose(*id, bytes, shown, self.began);
        }
        Err(stop)
    }

    /// Whether a device has done other things than it said.
    pub(super) fn lied(&self) -> bool {
        let told = |struck: &Struck| {
            matches!(
                struck.kind,
                FaultKind::ReadError | FaultKind::WriteError | FaultKind::FlushError
            )
        };
        let devices = &self.machine.devices;
        devices
            .iter()
            .any(|device| !device.struck().iter().all(told))
    }

    /// Whether there is a file system to go on with although this failed.
    pub(super) fn goes_on_after(&self, op: &Op) -> bool {
        op.is_sync() && *op != Op::Remount && !self.machine.switch.is_cut()
    }

    /// What the file has whose content an operation is about to change.
    pub(super) fn content_before(&self, op: &Op) -> Option<Arc<Vec<u8>>> {
        let id = self.oracle.file(file_changed(op)?)?;
        Some(Arc::clone(self.oracle.content(id)))
    }

    /// Whether so little is free that an operation may find no room.
    pub(super) fn may_lack_room(&self, op: &Op) -> bool {
        let Some(fs) = self.opened() else {
            return false;
        };
        // Metadata of so few files is nowhere near its limit.
        fs.statfs().blocks_available < blocks_needed(op) + LITTLE_ROOM
    }

    /// When a sync has brought home all that was written, no block is promised any more: one that is would be gone until the next mount.
    pub(super) fn check_promises(&self, op: &Op) -> Result<(), Stop> {
        // What atomic writes have staged has blocks promised still.
        if *op != Op::Sync || !self.writing.is_empty() {
            return Ok(());
        }
        let promised = self.fs().store().space().promised_blocks;
        match promised > 0 {
            true => Err(Stop::Violation(format!(
                "{promised} blocks are promised to nobody"
            ))),
            false => Ok(()),
        }
    }

    /// An operation on names did not happen; one on contents did in part.
    pub(super) fn out_of_space(&mut self, op: &Op, change: &Change) -> Result<(), Stop> {
        let file = file_changed(op).and_then(|path| self.file(path));
        let whole = file.map(|id| Arc::clone(self.oracle.content(id)));
        self.oracle.undo(change);
        let (Some(path), Some(id), Some(whole)) = (file_changed(op), file, whole) else {
            return Ok(());
        };
        let left = self.handle(path, 0).and_then(|file| {
            let file = file.ok_or(fs::Error::NotFound)?;
            let shown = look::shown(&self.fs().getattr(file.ino())?);
            Ok((look::content_of(self.fs(), &file)?, shown))
        });
        let (bytes, shown) = match left {
            Ok(left) => left,
            Err(error) if self.faulty || self.machine.switch.is_cut() => {
                return Err(Stop::Environment(error.to_string()));
            }
            Err(error) => {
                let what = format!("what {op} has left cannot be read: {error}");
                return Err(Stop::Violation(what));
            }
        };
        let before = self.before.take().unwrap_or_default();
        let lost = || self.faulty && self.oracle.allows_content(id, &bytes).is_ok();
        if !may_be_left(op, &before, &whole, &bytes) && !lost() && !self.lied() {
            return Err(Stop::Violation(format!(
                "{op} finds no room, and leaves {} bytes that are neither what was there nor what it writes, where there were {}",
                bytes.len(),
                before.len(),
            )));
        }
        self.oracle.observe(id, bytes, shown, self.began);
        Ok(())
    }
}

/// The file whose content an operation changes by itself.
fn file_changed(op: &Op) -> Option<&str> {
    match op {
        Op::Write { path, .. }
        | Op::Rewrite { path, .. }
        | Op::Fallocate { path, .. }
        | Op::Truncate(path, _) => Some(path),
        _ => None,
    }
}

/// Blocks of data that an operation may need.
fn blocks_needed(op: &Op) -> u64 {
    // It may begin and end within a block.
    let blocks = |len: u64| len / BLOCK_SIZE as u64 + 2;
    match op {
        Op::Write { len, .. }
        | Op::Rewrite { len, .. }
        | Op::TmpLink { len, .. }
        | Op::Fallocate { len, .. } => blocks(*len),
        Op::Atomic {
            step: Atomic::Write { len, .. },
            ..
        } => blocks(*len),
        Op::Truncate(..) => 1,
        Op::Tx { ops, .. } => ops.iter().map(blocks_needed).sum(),
        _ => 0,
    }
}

/// Whether an operation that found no room half-way may leave this of a file.
fn may_be_left(op: &Op, before: &[u8], whole: &[u8], left: &[u8]) -> bool {
    if left == before || left == whole {
        return true;
    }
    let rest = match op {
        Op::Write { .. } => before,
        // It cuts the file first.
        Op::Rewrite { .. } => &[],
        Op::Fallocate { .. } => {
            let byte = |bytes: &[u8], at| bytes.get(at).copied().unwrap_or(0);
            let is_either = |at| [byte(before, at), byte(whole, at)].contains(&byte(left, at));
            let sizes = before.len().min(whole.len())..=before.len().max(whole.len());
            return sizes.contains(&left.len()) && (0..left.len()).all(is_either);
        }
        _ => return false,
    };
    // A write goes on from its beginning.
    let same = left.iter().zip(whole).take_while(|(left, new)| left == new);
    let done = same.count();
    left[done..] == *rest.get(done..).unwrap_or_default()
}
