//! Operations of the model, staged in a transaction.

use crate::look;
use crate::op::{Op, pattern};
use crate::tree::link_target;
use fs::{Ino, SetAttr, SetTime, Transaction};

/// What the transaction has at a path below a directory.
fn find(tx: &mut Transaction<'_>, root: Ino, path: &str) -> Result<Ino, fs::Error> {
    let mut at = root;
    for name in path.split('/').filter(|name| !name.is_empty()) {
        at = tx.lookup(at, name.as_bytes())?;
    }
    Ok(at)
}

/// Where a path's last name is: the directory, and the name.
fn place<'p>(
    tx: &mut Transaction<'_>,
    root: Ino,
    path: &'p str,
) -> Result<(Ino, &'p [u8]), fs::Error> {
    let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
    Ok((find(tx, root, dir)?, name.as_bytes()))
}

/// A regular file at a path; the model writes to nothing else.
fn file(tx: &mut Transaction<'_>, root: Ino, path: &str) -> Result<Option<Ino>, fs::Error> {
    let Ok(ino) = find(tx, root, path) else {
        return Ok(None);
    };
    let mode = tx.getattr(ino)?.mode;
    Ok((mode & libc::S_IFMT == libc::S_IFREG).then_some(ino))
}

/// Stages an operation; returns what it makes.
pub fn stage(tx: &mut Transaction<'_>, root: Ino, op: &Op) -> Result<Option<Ino>, fs::Error> {
    match op {
        Op::Create(path) => {
            let (dir, name) = place(tx, root, path)?;
            return tx.create(dir, name, 0o644).map(Some);
        }
        Op::Mkdir(path) => {
            let (dir, name) = place(tx, root, path)?;
            return tx.mkdir(dir, name, 0o755).map(Some);
        }
        Op::Symlink(path) => {
            let (dir, name) = place(tx, root, path)?;
            return tx.symlink(dir, name, &link_target(path)).map(Some);
        }
        Op::Link(from, to) => {
            let ino = find(tx, root, from)?;
            let (dir, name) = place(tx, root, to)?;
            tx.link(ino, dir, name)?;
        }
        Op::Rename(from, to, flags) => {
            let (from, name) = place(tx, root, from)?;
            let (to, new_name) = place(tx, root, to)?;
            tx.rename(from, name, to, new_name, *flags)?;
        }
        Op::Unlink(path) => {
            let (dir, name) = place(tx, root, path)?;
            tx.unlink(dir, name)?;
        }
        Op::Rmdir(path) => {
            let (dir, name) = place(tx, root, path)?;
            tx.rmdir(dir, name)?;
        }
        Op::SetXattr {
            path,
            name,
            len,
            tag,
        } => {
            let ino = find(tx, root, path)?;
            tx.setxattr(ino, name.as_bytes(), &pattern(*tag, 0, *len), 0)?;
        }
        Op::RemoveXattr(path, name) => {
            let ino = find(tx, root, path)?;
            tx.removexattr(ino, name.as_bytes())?;
        }
        Op::Chmod(..) | Op::Chown(..) | Op::SetTime(..) => mark(tx, root, op)?,
        _ => data(tx, root, op)?,
    }
    Ok(None)
}

fn mark(tx: &mut Transaction<'_>, root: Ino, op: &Op) -> Result<(), fs::Error> {
    let mut set = SetAttr::default();
    let path = match op {
        Op::Chmod(path, mode) => {
            set.mode = Some(*mode);
            path
        }
        Op::Chown(path, uid, gid) => {
            (set.uid, set.gid) = (Some(*uid), Some(*gid));
            path
        }
        Op::SetTime(path, time) => {
            set.mtime = Some(time.map_or(SetTime::Now, |ns| SetTime::At(look::timestamp(ns))));
            path
        }
        _ => return Ok(()),
    };
    let ino = find(tx, root, path)?;
    tx.setattr(ino, &set)
}

fn data(tx: &mut Transaction<'_>, root: Ino, op: &Op) -> Result<(), fs::Error> {
    match op {
        Op::Write {
            path, at, len, tag, ..
        } => {
            if let Some(ino) = file(tx, root, path)? {
                let at = match at {
                    Some(at) => *at,
                    None => tx.getattr(ino)?.size,
                };
                tx.write(ino, at, &pattern(*tag, at, *len))?;
            }
        }
        Op::Rewrite { path, len, tag } => {
            if let Some(ino) = file(tx, root, path)? {
                tx.truncate(ino, 0)?;
                tx.write(ino, 0, &pattern(*tag, 0, *len))?;
            }
        }
        Op::Truncate(path, size) => {
            if let Some(ino) = file(tx, root, path)? {
                tx.truncate(ino, *size)?;
            }
        }
        _ => {}
    }
    Ok(())
}
