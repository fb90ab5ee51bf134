//! Requests as the kernel sends them, decoded without trusting a byte.
//!
//! Decoding is total: any sequence of bytes gives a [`Request`] or a [`Malformed`], never a
//! panic, and never reads beyond the message. Names are borrowed from the message.

use zerocopy::{FromBytes, Immutable, KnownLayout};

use crate::abi::{self, fattr, init, opcode};
use crate::ops::{Context, CopySide, NewNode, SetAttributes, SetTime, Span};
use base::clock::Timestamp;

/// A message that is not a well-formed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("a message of {0} bytes is too short for a request header")]
    NoHeader(usize),
    #[error("request {unique} (opcode {opcode}) is truncated or garbled")]
    Body { unique: u64, opcode: u32 },
}

/// One request.
#[derive(Debug)]
pub struct Request<'a> {
    pub unique: u64,
    pub opcode: u32,
    pub node: u64,
    pub context: Context,
    pub operation: Operation<'a>,
}

/// What is asked, with its arguments. The node it concerns is in [`Request::node`].
#[derive(Debug)]
pub enum Operation<'a> {
    Init {
        major: u32,
        minor: u32,
        max_readahead: u32,
        flags: u64,
    },
    Destroy,
    Interrupt,
    Lookup(&'a [u8]),
    Forget(u64),
    /// Pairs of node and lookups.
    BatchForget(Vec<(u64, u64)>),
    Getattr(Option<u64>),
    Statx(Option<u64>),
    Setattr(SetAttributes),
    Readlink,
    Symlink {
        name: &'a [u8],
        target: &'a [u8],
    },
    Mknod(NewNode, &'a [u8]),
    Mkdir(NewNode, &'a [u8]),
    Unlink(&'a [u8]),
    Rmdir(&'a [u8]),
    Rename {
        name: &'a [u8],
        new_parent: u64,
        new_name: &'a [u8],
        flags: u32,
    },
    Link {
        node: u64,
        new_name: &'a [u8],
    },
    Open {
        flags: u32,
    },
    Create {
        new: NewNode,
        flags: u32,
        name: &'a [u8],
    },
    Tmpfile {
        new: NewNode,
        flags: u32,
    },
    Read {
        span: Span,
        size: u32,
    },
    Write {
        span: Span,
        data: &'a [u8],
    },
    Flush(u64),
    Release(u64),
    Fsync {
        handle: u64,
        data_only: bool,
    },
    Opendir(u32),
    Releasedir(u64),
    Readdir {
        offset: u64,
        size: u32,
        plus: bool,
    },
    Fsyncdir {
        data_only: bool,
    },
    Statfs,
    Syncfs,
    Setxattr {
        name: &'a [u8],
        value: &'a [u8],
        flags: u32,
        acl_kill_sgid: bool,
    },
    Getxattr {
        name: &'a [u8],
        size: u32,
    },
    Listxattr {
        size: u32,
    },
    Removexattr(&'a [u8]),
    Access(u32),
    Fallocate {
        handle: u64,
        mode: u32,
        offset: u64,
        length: u64,
    },
    Lseek {
        handle: u64,
        offset: u64,
        whence: u32,
    },
    CopyFileRange {
        from: CopySide,
        to: CopySide,
        length: u64,
        /// The answer is a 64-bit count.
        wide: bool,
    },
    Ioctl {
        handle: u64,
        command: u32,
        input: &'a [u8],
        out_size: u32,
    },
    Unknown,
}

/// The rest of a message, consumed from the front.
struct Body<'a>(&'a [u8]);

impl<'a> Body<'a> {
    fn get<T: FromBytes + KnownLayout + Immutable>(&mut self) -> Option<T> {
        let (value, rest) = T::read_from_prefix(self.0).ok()?;
        self.0 = rest;
        Some(value)
    }

    /// A string ended by a zero byte.
    fn string(&mut self) -> Option<&'a [u8]> {
        let end = self.0.iter().position(|&b| b == 0)?;
        let (string, rest) = self.0.split_at(end);
        self.0 = &rest[1..];
        Some(string)
    }

    /// A name within a directory: not empty, without a slash.
    fn name(&mut self) -> Option<&'a [u8]> {
        let name = self.string()?;
        (!name.is_empty() && !name.contains(&b'/')).then_some(name)
    }

    fn bytes(&mut self, len: u32) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len as usize)?;
        self.0 = rest;
        Some(bytes)
    }
}

/// Decodes one message; `negotiated` are the INIT flags both sides agreed on.
pub fn decode(message: &[u8], negotiated: u64) -> Result<Request<'_>, Malformed> {
    let (header, _) =
        abi::InHeader::read_from_prefix(message).map_err(|_| Malformed::NoHeader(message.len()))?;
    let garbled = Malformed::Body {
        unique: header.unique,
        opcode: header.opcode,
    };
    let extensions = usize::from(header.total_extlen) * 8;
    let end = (header.len as usize).checked_sub(extensions);
    let body = end
        .and_then(|end| message.get(size_of::<abi::InHeader>()..end))
        .ok_or(garbled)?;
    let operation = operation(&header, Body(body), negotiated).ok_or(garbled)?;
    Ok(Request {
        unique: header.unique,
        opcode: header.opcode,
        node: header.nodeid,
        context: Context {
            uid: header.uid,
            gid: header.gid,
            pid: header.pid,
        },
        operation,
    })
}

fn operation<'a>(
    header: &abi::InHeader,
    mut body: Body<'a>,
    negotiated: u64,
) -> Option<Operation<'a>> {
    let body = &mut body;
    Some(match header.opcode {
        opcode::INIT => init_request(body)?,
        opcode::DESTROY => Operation::Destroy,
        opcode::INTERRUPT => Operation::Interrupt,
        opcode::LOOKUP => Operation::Lookup(body.name()?),
        opcode::FORGET => Operation::Forget(body.get::<abi::ForgetIn>()?.nlookup),
        opcode::BATCH_FORGET => batch_forget(body)?,
        opcode::GETATTR => {
            let input: abi::GetattrIn = body.get()?;
            Operation::Getattr((input.getattr_flags & abi::GETATTR_FH != 0).then_some(input.fh))
        }
        opcode::STATX => {
            let input: abi::StatxIn = body.get()?;
            Operation::Statx((input.getattr_flags & abi::GETATTR_FH != 0).then_some(input.fh))
        }
        opcode::SETATTR => Operation::Setattr(setattr(&body.get()?)),
        opcode::READLINK => Operation::Readlink,
        opcode::SYMLINK => Operation::Symlink {
            name: body.name()?,
            target: body.string()?,
        },
        opcode::MKNOD => {
            let input: abi::MknodIn = body.get()?;
            let new = NewNode {
                mode: input.mode,
                umask: input.umask,
                rdev: input.rdev,
            };
            Operation::Mknod(new, body.name()?)
        }
        opcode::MKDIR => {
            let input: abi::MkdirIn = body.get()?;
            let new = NewNode {
                mode: (input.mode & 0o7777) | libc::S_IFDIR,
                umask: input.umask,
                rdev: 0,
            };
            Operation::Mkdir(new, body.name()?)
        }
        opcode::UNLINK => Operation::Unlink(body.name()?),
        opcode::RMDIR => Operation::Rmdir(body.name()?),
        opcode::RENAME => {
            let input: abi::RenameIn = body.get()?;
            rename(body, input.newdir, 0)?
        }
        opcode::RENAME2 => {
            let input: abi::Rename2In = body.get()?;
            rename(body, input.newdir, input.flags)?
        }
        opcode::LINK => Operation::Link {
            node: body.get::<abi::LinkIn>()?.oldnodeid,
            new_name: body.name()?,
        },
        opcode::STATFS => Operation::Statfs,
        opcode::SYNCFS => Operation::Syncfs,
        opcode::ACCESS => Operation::Access(body.get::<abi::AccessIn>()?.mask),
        opcode::SETXATTR => setxattr(body, negotiated)?,
        opcode::GETXATTR => Operation::Getxattr {
            size: body.get::<abi::GetxattrIn>()?.size,
            name: body.string()?,
        },
        opcode::LISTXATTR => Operation::Listxattr {
            size: body.get::<abi::GetxattrIn>()?.size,
        },
        opcode::REMOVEXATTR => Operation::Removexattr(body.string()?),
        opcode::IOCTL => {
            let input: abi::IoctlIn = body.get()?;
            Operation::Ioctl {
                handle: input.fh,
                command: input.cmd,
                input: body.bytes(input.in_size)?,
                out_size: input.out_size,
            }
        }
        _ => return file_operation(header, body),
    })
}

/// The requests that concern an open file or directory.
fn file_operation<'a>(header: &abi::InHeader, body: &mut Body<'a>) -> Option<Operation<'a>> {
    Some(match header.opcode {
        opcode::OPEN => {
            let input: abi::OpenIn = body.get()?;
            Operation::Open { flags: input.flags }
        }
        opcode::OPENDIR => Operation::Opendir(body.get::<abi::OpenIn>()?.flags),
        opcode::CREATE | opcode::TMPFILE => {
            let input: abi::CreateIn = body.get()?;
            let new = NewNode {
                mode: (input.mode & 0o7777) | libc::S_IFREG,
                umask: input.umask,
                rdev: 0,
            };
            let flags = input.flags;
            if header.opcode == opcode::TMPFILE {
                Operation::Tmpfile { new, flags }
            } else {
                let name = body.name()?;
                Operation::Create { new, flags, name }
            }
        }
        opcode::READ => {
            let input: abi::ReadIn = body.get()?;
            Operation::Read {
                span: Span {
                    request: header.unique,
                    handle: input.fh,
                    offset: offset(input.offset)?,
                    open_flags: input.flags,
                    from_page_cache: false,
                    past_page_cache: input.read_flags & abi::READ_LOCKOWNER != 0
                        && input.flags & libc::O_DIRECT as u32 != 0,
                    kill_suid_sgid: false,
                },
                size: input.size,
            }
        }
        opcode::WRITE => {
            let input: abi::WriteIn = body.get()?;
            Operation::Write {
                span: Span {
                    request: header.unique,
                    handle: input.fh,
                    offset: offset(input.offset)?,
                    open_flags: input.flags,
                    from_page_cache: input.write_flags & abi::WRITE_CACHE != 0,
                    past_page_cache: false,
                    kill_suid_sgid: input.write_flags & abi::WRITE_KILL_SUIDGID != 0,
                },
                data: body.bytes(input.size)?,
            }
        }
        opcode::FLUSH => Operation::Flush(body.get::<abi::FlushIn>()?.fh),
        opcode::RELEASE => Operation::Release(body.get::<abi::ReleaseIn>()?.fh),
        opcode::RELEASEDIR => Operation::Releasedir(body.get::<abi::ReleaseIn>()?.fh),
        opcode::FSYNC => {
            let input: abi::FsyncIn = body.get()?;
            Operation::Fsync {
                handle: input.fh,
                data_only: input.fsync_flags & abi::FSYNC_FDATASYNC != 0,
            }
        }
        opcode::FSYNCDIR => Operation::Fsyncdir {
            data_only: body.get::<abi::FsyncIn>()?.fsync_flags & abi::FSYNC_FDATASYNC != 0,
        },
        opcode::READDIR | opcode::READDIRPLUS => {
            let input: abi::ReadIn = body.get()?;
            Operation::Readdir {
                // A position, not a byte offset: any value is legal.
                offset: input.offset,
                size: input.size,
                plus: header.opcode == opcode::READDIRPLUS,
            }
        }
        opcode::FALLOCATE => {
            let input: abi::FallocateIn = body.get()?;
            offset(input.offset.checked_add(input.length)?)?;
            Operation::Fallocate {
                handle: input.fh,
                mode: input.mode,
                offset: input.offset,
                length: input.length,
            }
        }
        opcode::LSEEK => {
            let input: abi::LseekIn = body.get()?;
            Operation::Lseek {
                handle: input.fh,
                // The kernel hands on what programs ask for. A negative one lies behind every end here, which is the same error.
                offset: input.offset,
                whence: input.whence,
            }
        }
        opcode::COPY_FILE_RANGE | opcode::COPY_FILE_RANGE_64 => copy_file_range(header, body)?,
        _ => Operation::Unknown,
    })
}

/// File offsets are signed in the kernel; a negative one is garbage.
fn offset(raw: u64) -> Option<u64> {
    (raw <= i64::MAX as u64).then_some(raw)
}

fn init_request<'a>(body: &mut Body<'a>) -> Option<Operation<'a>> {
    let input: abi::InitIn = body.get()?;
    let mut flags = u64::from(input.flags);
    if flags & init::INIT_EXT != 0 {
        flags |= u64::from(body.get::<u32>()?) << 32;
    }
    Some(Operation::Init {
        major: input.major,
        minor: input.minor,
        max_readahead: input.max_readahead,
        flags,
    })
}

fn batch_forget<'a>(body: &mut Body<'a>) -> Option<Operation<'a>> {
    let count = body.get::<abi::BatchForgetIn>()?.count as usize;
    // The count is checked against what is really there before anything is allocated.
    let list = body
        .0
        .get(..count.checked_mul(size_of::<abi::ForgetOne>())?)?;
    let items = list
        .chunks_exact(size_of::<abi::ForgetOne>())
        .filter_map(|chunk| abi::ForgetOne::read_from_bytes(chunk).ok())
        .map(|one| (one.nodeid, one.nlookup))
        .collect();
    Some(Operation::BatchForget(items))
}

fn setattr(input: &abi::SetattrIn) -> SetAttributes {
    let has = |bit: u32| input.valid & bit != 0;
    let time = |bit: u32, now_bit: u32, sec: i64, nsec: u32| {
        if !has(bit) {
            None
        } else if has(now_bit) {
            Some(SetTime::Now)
        } else {
            Some(SetTime::At(Timestamp::new(sec, nsec)))
        }
    };
    SetAttributes {
        mode: has(fattr::MODE).then_some(input.mode & 0o7777),
        uid: has(fattr::UID).then_some(input.uid),
        gid: has(fattr::GID).then_some(input.gid),
        size: has(fattr::SIZE).then_some(input.size),
        atime: time(fattr::ATIME, fattr::ATIME_NOW, input.atime, input.atimensec),
        mtime: time(fattr::MTIME, fattr::MTIME_NOW, input.mtime, input.mtimensec),
        ctime: has(fattr::CTIME).then_some(Timestamp::new(input.ctime, input.ctimensec)),
        handle: has(fattr::FH).then_some(input.fh),
        kill_suid_sgid: has(fattr::KILL_SUIDGID),
    }
}

fn rename<'a>(body: &mut Body<'a>, new_parent: u64, flags: u32) -> Option<Operation<'a>> {
    Some(Operation::Rename {
        name: body.name()?,
        new_parent,
        new_name: body.name()?,
        flags,
    })
}

fn setxattr<'a>(body: &mut Body<'a>, negotiated: u64) -> Option<Operation<'a>> {
    let input = if negotiated & init::SETXATTR_EXT != 0 {
        body.get::<abi::SetxattrIn>()?
    } else {
        let short: abi::SetxattrInShort = body.get()?;
        abi::SetxattrIn {
            size: short.size,
            flags: short.flags,
            ..Default::default()
        }
    };
    Some(Operation::Setxattr {
        name: body.string()?,
        value: body.bytes(input.size)?,
        flags: input.flags,
        acl_kill_sgid: input.setxattr_flags & abi::SETXATTR_ACL_KILL_SGID != 0,
    })
}

fn copy_file_range<'a>(header: &abi::InHeader, body: &mut Body<'a>) -> Option<Operation<'a>> {
    let input: abi::CopyFileRangeIn = body.get()?;
    if input.flags != 0 {
        return None;
    }
    Some(Operation::CopyFileRange {
        from: CopySide {
            node: header.nodeid,
            handle: input.fh_in,
            offset: offset(input.off_in)?,
        },
        to: CopySide {
            node: input.nodeid_out,
            handle: input.fh_out,
            offset: offset(input.off_out)?,
        },
        length: input.len,
        wide: header.opcode == opcode::COPY_FILE_RANGE_64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::rng::Rng;
    use zerocopy::IntoBytes;

    fn message(opcode: u32, body: &[u8]) -> Vec<u8> {
        let header = abi::InHeader {
            len: (size_of::<abi::InHeader>() + body.len()) as u32,
            opcode,
            unique: 77,
            nodeid: 1,
            ..Default::default()
        };
        [header.as_bytes(), body].concat()
    }

    fn every_opcode() -> impl Iterator<Item = u32> {
        (0..64).chain([4096, 1 << 20, 436_207_616, u32::MAX])
    }

    #[test]
    fn a_write_carries_its_data() {
        let input = abi::WriteIn {
            fh: 3,
            offset: 4096,
            size: 5,
            write_flags: abi::WRITE_KILL_SUIDGID,
            ..Default::default()
        };
        let bytes = message(opcode::WRITE, &[input.as_bytes(), b"hello"].concat());
        let request = decode(&bytes, 0).unwrap();
        let Operation::Write { span, data } = request.operation else {
            panic!("{request:?}");
        };
        assert_eq!((span.handle, span.offset, data), (3, 4096, &b"hello"[..]));
        assert!(span.kill_suid_sgid && !span.from_page_cache);
    }

    #[test]
    fn every_truncation_of_a_request_is_reported() {
        let input = abi::Rename2In {
            newdir: 9,
            flags: 1,
            padding: 0,
        };
        let whole = message(
            opcode::RENAME2,
            &[input.as_bytes(), b"from\0", b"to\0"].concat(),
        );
        assert!(decode(&whole, 0).is_ok());
        for cut in 0..whole.len() {
            assert!(decode(&whole[..cut], 0).is_err(), "cut at {cut}");
            // Also when the header admits to the shorter length.
            let mut honest = whole[..cut].to_vec();
            if cut >= 4 {
                honest[..4].copy_from_slice(&(cut as u32).to_ne_bytes());
            }
            assert!(decode(&honest, 0).is_err(), "honest cut at {cut}");
        }
    }

    #[test]
    fn names_with_slashes_or_nothing_in_them_are_refused() {
        for bad in [&b"\0"[..], b"a/b\0", b"no end"] {
            assert!(decode(&message(opcode::LOOKUP, bad), 0).is_err());
        }
    }

    #[test]
    fn a_batch_of_forgets_does_not_believe_its_count() {
        let head = abi::BatchForgetIn {
            count: u32::MAX,
            dummy: 0,
        };
        let one = abi::ForgetOne {
            nodeid: 5,
            nlookup: 2,
        };
        let lying = message(
            opcode::BATCH_FORGET,
            &[head.as_bytes(), one.as_bytes()].concat(),
        );
        assert!(decode(&lying, 0).is_err());
        let head = abi::BatchForgetIn { count: 1, dummy: 0 };
        let honest = message(
            opcode::BATCH_FORGET,
            &[head.as_bytes(), one.as_bytes()].concat(),
        );
        let request = decode(&honest, 0).unwrap();
        assert!(matches!(request.operation, Operation::BatchForget(v) if v == [(5, 2)]));
    }

    #[test]
    fn garbage_never_panics() {
        let mut rng = Rng::new(0x5eed);
        for round in 0..200_000u64 {
            let len = rng.below(160) as usize;
            let mut body = vec![0u8; len];
            rng.fill(&mut body);
            if rng.one_in(2) {
                // Mostly small numbers and zero bytes, so that lengths come out plausible.
                body.iter_mut().for_each(|b| *b &= *b >> 5);
            }
            let opcode = every_opcode().nth(rng.below(68) as usize).unwrap_or(0);
            let mut bytes = message(opcode, &body);
            if rng.one_in(3) {
                let at = rng.below(bytes.len() as u64) as usize;
                bytes[at] ^= rng.next_u64() as u8;
            }
            let cut = bytes.len() - rng.below(bytes.len() as u64 + 1) as usize;
            let flags = if round % 2 == 0 { 0 } else { u64::MAX };
            let _unused = decode(&bytes[..cut], flags);
            let _unused = decode(&bytes, flags);
        }
    }
}
