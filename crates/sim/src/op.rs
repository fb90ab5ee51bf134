//! The operations that the simulator runs, and how they are written down.
//!
//! Paths are from the root, without a leading slash; the root is `/`. Contents are not written
//! down: they follow from an operation's `tag`, so that no two writes have bytes in common.

use base::rng::Rng;
use std::fmt;
use std::str::FromStr;

/// How a write reaches the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum How {
    Buffered,
    /// With `O_DIRECT`.
    Direct,
    /// With `O_SYNC`.
    Synced,
}

/// What is done with an atomic write of a file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Atomic {
    /// Of this file, unless there is one of that number.
    Start(String),
    /// Staged at an offset, or at the end that it sees.
    Write {
        at: Option<u64>,
        len: u64,
        tag: u64,
    },
    Truncate(u64),
    Commit,
    /// It ends without a commit.
    Drop,
}

/// One call, or a few that programs make in one breath.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    Create(String),
    Mkdir(String),
    Symlink(String),
    /// Of this type and mode, with this device number.
    Mknod(String, u32, u32),
    Link(String, String),
    /// With the flags of `renameat2`.
    Rename(String, String, u32),
    Unlink(String),
    Rmdir(String),
    /// At an offset, or at the end.
    Write {
        path: String,
        at: Option<u64>,
        len: u64,
        tag: u64,
        how: How,
    },
    /// Opened with `O_TRUNC` and written.
    Rewrite {
        path: String,
        len: u64,
        tag: u64,
    },
    Truncate(String, u64),
    /// With the mode of `fallocate`.
    Fallocate {
        path: String,
        mode: i32,
        at: u64,
        len: u64,
    },
    Chmod(String, u32),
    /// To a user and a group.
    Chown(String, u32, u32),
    /// Sets the time of the last change of content, in nanoseconds; `None`: to now.
    SetTime(String, Option<u64>),
    SetXattr {
        path: String,
        name: String,
        len: u64,
        tag: u64,
    },
    RemoveXattr(String, String),
    Fsync(String),
    Fdatasync(String),
    /// The hint that a range will be synced, waited for.
    WriteRange {
        path: String,
        at: u64,
        len: u64,
    },
    Sync,
    Checkpoint,
    /// Time passes, in milliseconds, and background work is done.
    Tick(u64),
    /// `O_TMPFILE`, written, linked.
    TmpLink {
        path: String,
        len: u64,
        tag: u64,
    },
    /// Opened, and kept open until the next `Release`. Operations name the file by its path, or by `@` and its number once it has none.
    Hold(String),
    Release(String),
    /// Closed cleanly and opened again.
    Remount,
    /// A transaction of operations on names, attributes and contents; durable when it has committed, or atomic alone.
    Tx {
        durable: bool,
        ops: Vec<Op>,
    },
    /// A step of the atomic write of this number; those with an odd one keep their file open.
    Atomic {
        number: u64,
        step: Atomic,
    },
}

impl Op {
    /// Whether this writes to a file that exists.
    pub fn changes_content(&self) -> bool {
        match self {
            Op::Write { .. }
            | Op::Rewrite { .. }
            | Op::Truncate(..)
            | Op::Fallocate { .. }
            | Op::Atomic { .. } => true,
            Op::Tx { ops, .. } => ops.iter().any(Op::changes_content),
            _ => false,
        }
    }

    /// Whether this only makes things durable.
    pub fn is_sync(&self) -> bool {
        matches!(
            self,
            Op::Fsync(_)
                | Op::Fdatasync(_)
                | Op::WriteRange { .. }
                | Op::Sync
                | Op::Checkpoint
                | Op::Tick(_)
                | Op::Remount
        )
    }
}

/// The bytes that the write with this tag puts at `offset` of a file. No byte is zero.
pub fn pattern(tag: u64, offset: u64, len: u64) -> Vec<u8> {
    // Each aligned piece has bytes of its own, whatever part of it is written.
    let mut bytes = Vec::with_capacity(len as usize + 16);
    let start = offset / 8 * 8;
    let mut at = start;
    while at < offset + len {
        let mut rng = Rng::new(tag.wrapping_mul(0x9E37_79B9).wrapping_add(at / 64));
        for _ in 0..(at % 64) / 8 {
            rng.next_u64();
        }
        loop {
            bytes.extend(rng.next_u64().to_le_bytes().map(|b| b.max(1)));
            at += 8;
            if at >= offset + len || at.is_multiple_of(64) {
                break;
            }
        }
    }
    let skip = (offset - start) as usize;
    bytes[skip..skip + len as usize].to_vec()
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Create(p) => write!(f, "create {p}"),
            Op::Mkdir(p) => write!(f, "mkdir {p}"),
            Op::Symlink(p) => write!(f, "symlink {p}"),
            Op::Mknod(p, mode, rdev) => write!(f, "mknod {p} {mode} {rdev}"),
            Op::Link(from, to) => write!(f, "link {from} {to}"),
            Op::Rename(from, to, flags) => write!(f, "rename {from} {to} {flags}"),
            Op::Unlink(p) => write!(f, "unlink {p}"),
            Op::Rmdir(p) => write!(f, "rmdir {p}"),
            Op::Write {
                path,
                at,
                len,
                tag,
                how,
            } => {
                let how = match how {
                    How::Buffered => "write",
                    How::Direct => "write-direct",
                    How::Synced => "write-sync",
                };
                match at {
                    Some(at) => write!(f, "{how} {path} {at} {len} {tag}"),
                    None => write!(f, "{how} {path} end {len} {tag}"),
                }
            }
            Op::Rewrite { path, len, tag } => write!(f, "rewrite {path} {len} {tag}"),
            Op::Truncate(p, size) => write!(f, "truncate {p} {size}"),
            Op::Fallocate {
                path,
                mode,
                at,
                len,
            } => write!(f, "fallocate {path} {mode} {at} {len}"),
            Op::Chmod(p, mode) => write!(f, "chmod {p} {mode}"),
            Op::Chown(p, uid, gid) => write!(f, "chown {p} {uid} {gid}"),
            Op::SetTime(p, Some(time)) => write!(f, "settime {p} {time}"),
            Op::SetTime(p, None) => write!(f, "settime {p} now"),
            Op::SetXattr {
                path,
                name,
                len,
                tag,
            } => write!(f, "setxattr {path} {name} {len} {tag}"),
            Op::RemoveXattr(p, name) => write!(f, "removexattr {p} {name}"),
            Op::Fsync(p) => write!(f, "fsync {p}"),
            Op::Fdatasync(p) => write!(f, "fdatasync {p}"),
            Op::WriteRange { path, at, len } => write!(f, "write-range {path} {at} {len}"),
            Op::Sync => f.write_str("sync"),
            Op::Checkpoint => f.write_str("checkpoint"),
            Op::Tick(ms) => write!(f, "tick {ms}"),
            Op::TmpLink { path, len, tag } => write!(f, "tmplink {path} {len} {tag}"),
            Op::Hold(p) => write!(f, "hold {p}"),
            Op::Release(p) => write!(f, "release {p}"),
            Op::Remount => f.write_str("remount"),
            Op::Tx { durable, ops } => {
                let kind = if *durable { "tx" } else { "tx-relaxed" };
                write!(f, "{kind}")?;
                for (i, op) in ops.iter().enumerate() {
                    write!(f, "{} {op}", if i > 0 { " +" } else { "" })?;
                }
                Ok(())
            }
            Op::Atomic { number, step } => {
                write!(f, "atomic {number} ")?;
                match step {
                    Atomic::Start(path) => write!(f, "start {path}"),
                    Atomic::Write {
                        at: Some(at),
                        len,
                        tag,
                    } => write!(f, "write {at} {len} {tag}"),
                    Atomic::Write { at: None, len, tag } => write!(f, "write end {len} {tag}"),
                    Atomic::Truncate(size) => write!(f, "truncate {size}"),
                    Atomic::Commit => f.write_str("commit"),
                    Atomic::Drop => f.write_str("drop"),
                }
            }
        }
    }
}

impl FromStr for Op {
    type Err = String;

    fn from_str(text: &str) -> Result<Op, String> {
        if let Some((kind @ ("tx" | "tx-relaxed"), ops)) = text.trim().split_once(' ') {
            return Ok(Op::Tx {
                durable: kind == "tx",
                ops: ops.split('+').map(str::parse).collect::<Result<_, _>>()?,
            });
        }
        let mut words = text.split_whitespace();
        let mut word = || {
            let next = words.next();
            next.map(str::to_owned)
                .ok_or_else(|| format!("{text:?} is cut short"))
        };
        let verb = word()?;
        let number = |word: String| -> Result<u64, String> {
            word.parse().map_err(|_| format!("{word:?} is no number"))
        };
        let place = |word: String| match word.as_str() {
            "end" => Ok(None),
            _ => number(word).map(Some),
        };
        let op = match verb.as_str() {
            "create" => Op::Create(word()?),
            "mkdir" => Op::Mkdir(word()?),
            "symlink" => Op::Symlink(word()?),
            "mknod" => Op::Mknod(word()?, number(word()?)? as u32, number(word()?)? as u32),
            "link" => Op::Link(word()?, word()?),
            "rename" => Op::Rename(word()?, word()?, number(word()?)? as u32),
            "unlink" => Op::Unlink(word()?),
            "rmdir" => Op::Rmdir(word()?),
            "write" | "write-direct" | "write-sync" => {
                let how = match verb.as_str() {
                    "write" => How::Buffered,
                    "write-direct" => How::Direct,
                    _ => How::Synced,
                };
                let path = word()?;
                Op::Write {
                    path,
                    at: place(word()?)?,
                    len: number(word()?)?,
                    tag: number(word()?)?,
                    how,
                }
            }
            "rewrite" => Op::Rewrite {
                path: word()?,
                len: number(word()?)?,
                tag: number(word()?)?,
            },
            "truncate" => Op::Truncate(word()?, number(word()?)?),
            "fallocate" => Op::Fallocate {
                path: word()?,
                mode: number(word()?)? as i32,
                at: number(word()?)?,
                len: number(word()?)?,
            },
            "chmod" => Op::Chmod(word()?, number(word()?)? as u32),
            "chown" => Op::Chown(word()?, number(word()?)? as u32, number(word()?)? as u32),
            "settime" => Op::SetTime(
                word()?,
                match word()? {
                    now if now == "now" => None,
                    time => Some(number(time)?),
                },
            ),
            "setxattr" => Op::SetXattr {
                path: word()?,
                name: word()?,
                len: number(word()?)?,
                tag: number(word()?)?,
            },
            "removexattr" => Op::RemoveXattr(word()?, word()?),
            "fsync" => Op::Fsync(word()?),
            "fdatasync" => Op::Fdatasync(word()?),
            "write-range" => Op::WriteRange {
                path: word()?,
                at: number(word()?)?,
                len: number(word()?)?,
            },
            "sync" => Op::Sync,
            "checkpoint" => Op::Checkpoint,
            "tick" => Op::Tick(number(word()?)?),
            "tmplink" => Op::TmpLink {
                path: word()?,
                len: number(word()?)?,
                tag: number(word()?)?,
            },
            "hold" => Op::Hold(word()?),
            "release" => Op::Release(word()?),
            "remount" => Op::Remount,
            "atomic" => Op::Atomic {
                number: number(word()?)?,
                step: match word()?.as_str() {
                    "start" => Atomic::Start(word()?),
                    "write" => Atomic::Write {
                        at: place(word()?)?,
                        len: number(word()?)?,
                        tag: number(word()?)?,
                    },
                    "truncate" => Atomic::Truncate(number(word()?)?),
                    "commit" => Atomic::Commit,
                    "drop" => Atomic::Drop,
                    other => return Err(format!("an atomic write has no step {other:?}")),
                },
            },
            other => return Err(format!("there is no operation {other:?}")),
        };
        match words.next() {
            None => Ok(op),
            Some(more) => Err(format!("{more:?} is too much in {text:?}")),
        }
    }
}

/// Operations, one after the other, separated by semicolons or line ends.
pub fn parse_list(text: &str) -> Result<Vec<Op>, String> {
    text.split([';', '\n'])
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .map(str::parse)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_read_back_as_written() {
        for op in crate::sequences::full_set() {
            assert_eq!(op.to_string().parse::<Op>().unwrap(), op);
        }
        for op in crate::atomics::sequences().into_iter().flatten() {
            assert_eq!(op.to_string().parse::<Op>().unwrap(), op);
        }
        assert!("rename a".parse::<Op>().is_err());
        assert!("sync now".parse::<Op>().is_err());
    }

    #[test]
    fn a_pattern_depends_on_place_and_tag_alone() {
        let whole = pattern(7, 0, 5000);
        assert_eq!(whole.len(), 5000);
        assert_eq!(pattern(7, 1234, 777), whole[1234..1234 + 777]);
        assert_ne!(pattern(8, 0, 64), whole[..64]);
        assert!(!whole.contains(&0));
    }
}
