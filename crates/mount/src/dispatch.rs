//! One request from bytes to answer: decode, call the operation, encode, reply.
//!
//! Where references that the kernel gives back wait, those who ask for the space that is free, or find none, have them done first. An answer that carries a reference (an entry, an
//! open handle) and cannot be delivered is taken back, so that no node or handle leaks when
//! a request is aborted.

use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

use base::clock::{now_ns, ns_of};
use zerocopy::{Immutable, IntoBytes, KnownLayout};

use crate::abi::{self, opcode};
use crate::decode::{Malformed, Operation, Request, decode};
use crate::dirent::{DirectoryReply, counted_nodes};
use crate::encode;
use crate::mounting::{IOC_CALLER, IOC_DAEMON_PID};
use crate::ops::{Entry, Errno, Opened, Operations, Result, Span};
use crate::transport::backlog::Backlog;

/// Where the answer to one request goes.
pub trait Reply {
    /// Sends one message made of `parts`. `Ok(false)`: nobody waits for it any more.
    fn send(&mut self, parts: &[IoSlice<'_>]) -> std::io::Result<bool>;

    /// The way for an answer that is given when the handler has returned; `None`: the handler gives it.
    fn detached(&self) -> Option<Box<dyn Reply + Send>> {
        None
    }
}

/// Turns requests into calls of `operations`.
#[derive(Debug)]
pub struct Dispatcher<O> {
    pub operations: O,
    /// The INIT flags both sides agreed on.
    pub negotiated: u64,
    /// References given back that are not done, if any may wait.
    pub backlog: Option<Arc<Backlog>>,
}

/// So long a request that finds no space is tried again, whatever gives space back meanwhile: others may unlink without end.
const TRIED_FOR: Duration = Duration::from_secs(1);

/// One request being answered.
struct Exchange<'a> {
    unique: u64,
    reply: &'a mut dyn Reply,
}

impl Exchange<'_> {
    fn send(&mut self, error: i32, parts: &[&[u8]]) -> bool {
        let body: usize = parts.iter().map(|part| part.len()).sum();
        let header = abi::OutHeader {
            len: (size_of::<abi::OutHeader>() + body) as u32,
            error,
            unique: self.unique,
        };
        let empty = IoSlice::new(&[]);
        let mut slices = [IoSlice::new(header.as_bytes()), empty, empty];
        for (slot, part) in slices[1..].iter_mut().zip(parts) {
            *slot = IoSlice::new(part);
        }
        match self.reply.send(&slices[..1 + parts.len()]) {
            Ok(delivered) => delivered,
            Err(error) => {
                tracing::warn!(unique = self.unique, %error, "a reply was refused by the kernel");
                false
            }
        }
    }

    fn error(&mut self, errno: Errno) {
        self.send(-errno.0, &[]);
    }

    fn value<T: IntoBytes + Immutable + KnownLayout>(&mut self, value: &T) -> bool {
        self.send(0, &[value.as_bytes()])
    }

    fn unit(&mut self, result: Result<()>) {
        match result {
            Ok(()) => {
                self.send(0, &[]);
            }
            Err(errno) => self.error(errno),
        }
    }

    fn encoded<T, E: IntoBytes + Immutable + KnownLayout>(
        &mut self,
        result: Result<T>,
        encode: impl FnOnce(&T) -> E,
    ) {
        match result {
            Ok(value) => {
                self.value(&encode(&value));
            }
            Err(errno) => self.error(errno),
        }
    }

    fn written(&mut self, result: Result<usize>) {
        self.encoded(result, |&n| abi::WriteOut {
            size: n as u32,
            padding: 0,
        });
    }

    /// Extended attributes: the size alone when the kernel asks with an empty buffer.
    fn sized(&mut self, result: Result<Vec<u8>>, size: u32) {
        match result {
            Err(errno) => self.error(errno),
            Ok(value) if size == 0 => {
                self.value(&abi::GetxattrOut {
                    size: value.len() as u32,
                    padding: 0,
                });
            }
            Ok(value) if value.len() > size as usize => self.error(Errno(libc::ERANGE)),
            Ok(value) => {
                self.send(0, &[&value]);
            }
        }
    }
}

impl<O: Operations> Dispatcher<O> {
    /// Answers one message. `scratch` holds the data of answers and bounds their size.
    pub fn handle(&self, message: &[u8], scratch: &mut [u8], reply: &mut dyn Reply) {
        match decode(message, self.negotiated) {
            Ok(request) => {
                tracing::trace!(opcode = request.opcode, node = request.node, "request");
                let written = match request.operation {
                    Operation::Write { .. } | Operation::Setattr(_) => Some(request.node),
                    _ => None,
                };
                let mut exchange = Exchange {
                    unique: request.unique,
                    reply,
                };
                self.answer(request, scratch, &mut exchange);
                if let Some(node) = written {
                    self.operations.wrote(node);
                }
            }
            Err(malformed) => {
                tracing::warn!(%malformed, "ignored");
                if let Malformed::Body { unique, opcode } = malformed
                    && !opcode::has_no_reply(opcode)
                {
                    Exchange { unique, reply }.error(Errno::INVAL);
                }
            }
        }
    }

    /// Has references done that were given back. True: there were some.
    fn catch_up(&self) -> bool {
        self.backlog
            .as_ref()
            .is_some_and(|waiting| waiting.catch_up())
    }

    /// Tries what finds no space again as long as there may be some by then, for a second: when references that were given back are done, and whenever a file has gone that was unlinked just
    /// before. What fails so has changed nothing, or what a second try finds as it needs it: blocks that stay allocated, a size that is set.
    fn with_space<T>(&self, attempt: impl Fn(&O) -> Result<T>) -> Result<T> {
        let ops = &self.operations;
        let mut tried = attempt(ops);
        if matches!(tried, Err(Errno::NOSPC)) && self.catch_up() {
            tried = attempt(ops);
        }
        let mut until_ns = None;
        while matches!(tried, Err(Errno::NOSPC))
            && let Some(mark) = ops.space_to_come()
        {
            let until_ns = *until_ns.get_or_insert_with(|| now_ns() + ns_of(TRIED_FOR));
            // Some may have come before the mark.
            tried = attempt(ops);
            let left = Duration::from_nanos(until_ns.saturating_sub(now_ns()));
            let is_full = matches!(tried, Err(Errno::NOSPC));
            if !is_full || left.is_zero() || !ops.await_space(mark, left) {
                break;
            }
        }
        tried
    }

    fn answer(&self, request: Request<'_>, scratch: &mut [u8], x: &mut Exchange<'_>) {
        let ops = &self.operations;
        let (ctx, node) = (&request.context, request.node);
        match request.operation {
            Operation::Interrupt => {}
            Operation::Forget(lookups) => ops.forget(node, lookups),
            Operation::BatchForget(items) => {
                for (node, lookups) in items {
                    ops.forget(node, lookups);
                }
            }
            Operation::Destroy => {
                ops.destroy();
                x.unit(Ok(()));
            }
            // INIT is answered by the session before any worker runs.
            Operation::Init { .. } => x.error(Errno::IO),
            Operation::Unknown => {
                if !opcode::has_no_reply(request.opcode) {
                    x.error(Errno::NOSYS);
                }
            }
            Operation::Lookup(name) => self.entry(x, ops.lookup(ctx, node, name)),
            Operation::Symlink { name, target } => {
                let made = self.with_space(|ops| ops.symlink(ctx, node, name, target));
                self.entry(x, made);
            }
            Operation::Mknod(new, name) => {
                let made = self.with_space(|ops| ops.mknod(ctx, node, name, &new));
                self.entry(x, made);
            }
            Operation::Mkdir(new, name) => {
                let made = self.with_space(|ops| ops.mkdir(ctx, node, name, &new));
                self.entry(x, made);
            }
            Operation::Link {
                node: old,
                new_name,
            } => {
                let made = self.with_space(|ops| ops.link(ctx, old, node, new_name));
                self.entry(x, made);
            }
            Operation::Unlink(name) => x.unit(ops.unlink(ctx, node, name)),
            Operation::Rmdir(name) => x.unit(ops.rmdir(ctx, node, name)),
            Operation::Rename {
                name,
                new_parent,
                new_name,
                flags,
            } => x.unit(
                self.with_space(|ops| ops.rename(ctx, (node, name), (new_parent, new_name), flags)),
            ),
            Operation::Getattr(handle) => {
                x.encoded(ops.getattr(ctx, node, handle), encode::attr_out);
            }
            Operation::Statx(handle) => x.encoded(ops.getattr(ctx, node, handle), encode::statx),
            Operation::Setattr(changes) => {
                let set = self.with_space(|ops| ops.setattr(ctx, node, &changes));
                x.encoded(set, encode::attr_out);
            }
            Operation::Readlink => match ops.readlink(ctx, node) {
                Ok(target) => {
                    x.send(0, &[&target]);
                }
                Err(errno) => x.error(errno),
            },
            Operation::Statfs => {
                self.catch_up();
                x.encoded(ops.statfs(ctx, node), encode::statfs);
            }
            Operation::Syncfs => x.unit(ops.syncfs(ctx)),
            Operation::Setxattr {
                name,
                value,
                flags,
                acl_kill_sgid,
            } => x.unit(
                self.with_space(|ops| ops.setxattr(ctx, node, name, value, flags, acl_kill_sgid)),
            ),
            Operation::Getxattr { name, size } => x.sized(ops.getxattr(ctx, node, name), size),
            Operation::Listxattr { size } => x.sized(ops.listxattr(ctx, node), size),
            Operation::Removexattr(name) => x.unit(ops.removexattr(ctx, node, name)),
            Operation::Access(mask) => x.unit(ops.access(ctx, node, mask)),
            Operation::Open { .. }
            | Operation::Create { .. }
            | Operation::Tmpfile { .. }
            | Operation::Read { .. }
            | Operation::Write { .. }
            | Operation::Flush(_)
            | Operation::Release(_)
            | Operation::Fsync { .. }
            | Operation::Opendir(_)
            | Operation::Releasedir(_)
            | Operation::Readdir { .. }
            | Operation::Fsyncdir { .. }
            | Operation::Fallocate { .. }
            | Operation::Lseek { .. }
            | Operation::CopyFileRange { .. }
            | Operation::Ioctl { .. } => self.answer_file(request, scratch, x),
        }
    }

    /// The requests that concern an open file or directory.
    fn answer_file(&self, request: Request<'_>, scratch: &mut [u8], x: &mut Exchange<'_>) {
        let ops = &self.operations;
        let (ctx, node) = (&request.context, request.node);
        match request.operation {
            Operation::Open { flags } => match ops.open(ctx, node, flags) {
                Ok(opened) => {
                    if !x.value(&encode::opened(&opened)) {
                        ops.release(node, opened.handle);
                    }
                }
                Err(errno) => x.error(errno),
            },
            Operation::Create { new, flags, name } => {
                let made = self.with_space(|ops| ops.create(ctx, node, name, &new, flags));
                self.created(x, made);
            }
            Operation::Tmpfile { new, flags } => {
                let made = self.with_space(|ops| ops.tmpfile(ctx, node, &new, flags));
                self.created(x, made);
            }
            Operation::Read { span, size } => {
                let out = front(scratch, size);
                match ops.read(ctx, node, &span, out) {
                    Ok(n) => {
                        x.send(0, &[&out[..n]]);
                    }
                    Err(errno) => x.error(errno),
                }
            }
            Operation::Write { span, data } => {
                let written = self.write(&request, &span, data);
                if !ops.is_outdated(node, &span) {
                    return x.written(written);
                }
                let bytes = span.offset..span.offset.saturating_add(data.len() as u64);
                let unique = x.unique;
                match x.reply.detached() {
                    Some(mut reply) => {
                        let reply = move || {
                            let reply = &mut *reply;
                            Exchange { unique, reply }.written(written);
                        };
                        ops.drop_written(node, bytes, Box::new(reply));
                    }
                    None => {
                        ops.drop_written(node, bytes, Box::new(|| {}));
                        x.written(written);
                    }
                }
            }
            Operation::Flush(handle) => x.unit(ops.flush(ctx, node, handle)),
            Operation::Release(handle) => {
                ops.release(node, handle);
                x.unit(Ok(()));
            }
            Operation::Fsync { handle, data_only } => {
                x.unit(ops.fsync(ctx, node, handle, data_only));
            }
            Operation::Opendir(flags) => {
                let opened = ops.opendir(ctx, node, flags);
                if let Ok(opened) = opened {
                    if !x.value(&encode::opened(&opened)) {
                        ops.releasedir(node, opened.handle);
                    }
                } else {
                    x.unit(opened.map(drop));
                }
            }
            Operation::Releasedir(handle) => {
                ops.releasedir(node, handle);
                x.unit(Ok(()));
            }
            Operation::Readdir { offset, size, plus } => {
                self.readdir(&request, front(scratch, size), (offset, plus), x);
            }
            Operation::Fsyncdir { data_only } => x.unit(ops.fsyncdir(ctx, node, data_only)),
            Operation::Fallocate {
                handle,
                mode,
                offset,
                length,
            } => x.unit(
                self.with_space(|ops| ops.fallocate(ctx, node, handle, mode, offset, length)),
            ),
            Operation::Lseek {
                handle,
                offset,
                whence,
            } => x.encoded(ops.lseek(ctx, node, handle, offset, whence), |&offset| {
                abi::LseekOut { offset }
            }),
            Operation::CopyFileRange {
                from,
                to,
                length,
                wide,
            } => {
                // The narrow answer has 32 bits; one request moves what fits in them.
                let length = length.min(if wide { i64::MAX as u64 } else { 0x7fff_f000 });
                let copied = self.with_space(|ops| ops.copy_file_range(ctx, &from, &to, length));
                if wide {
                    x.encoded(copied, |&bytes_copied| abi::CopyFileRangeOut {
                        bytes_copied,
                    });
                } else {
                    x.written(copied.map(|n| n as usize));
                }
            }
            Operation::Ioctl {
                handle,
                command,
                input,
                out_size,
            } => {
                let out = front(scratch, out_size);
                let result = match command {
                    IOC_DAEMON_PID => number(std::process::id(), out),
                    IOC_CALLER => number(ctx.pid, out),
                    _ => ops.ioctl(ctx, node, handle, command, input, out),
                };
                match result {
                    Ok(n) => {
                        let head = abi::IoctlOut::default();
                        x.send(0, &[head.as_bytes(), &out[..n]]);
                    }
                    Err(errno) => x.error(errno),
                }
            }
            // Those of `answer`, by name, so that none is forgotten in both.
            Operation::Init { .. }
            | Operation::Destroy
            | Operation::Interrupt
            | Operation::Lookup(_)
            | Operation::Forget(_)
            | Operation::BatchForget(_)
            | Operation::Getattr(_)
            | Operation::Statx(_)
            | Operation::Setattr(_)
            | Operation::Readlink
            | Operation::Symlink { .. }
            | Operation::Mknod(..)
            | Operation::Mkdir(..)
            | Operation::Unlink(_)
            | Operation::Rmdir(_)
            | Operation::Rename { .. }
            | Operation::Link { .. }
            | Operation::Statfs
            | Operation::Syncfs
            | Operation::Setxattr { .. }
            | Operation::Getxattr { .. }
            | Operation::Listxattr { .. }
            | Operation::Removexattr(_)
            | Operation::Access(_)
            | Operation::Unknown => x.error(Errno::NOSYS),
        }
    }

    fn write(&self, request: &Request<'_>, span: &Span, data: &[u8]) -> Result<usize> {
        self.with_space(|ops| ops.write(&request.context, request.node, span, data))
    }

    fn readdir(
        &self,
        request: &Request<'_>,
        out: &mut [u8],
        (offset, plus): (u64, bool),
        x: &mut Exchange<'_>,
    ) {
        let ops = &self.operations;
        let mut listing = DirectoryReply::new(out, plus);
        let result = ops.readdir(&request.context, request.node, offset, &mut listing);
        let len = listing.len();
        // An error after some entries is met again, alone, by the next request.
        let delivered = match result {
            Err(errno) if len == 0 => return x.error(errno),
            _ => x.send(0, &[&out[..len]]),
        };
        if !delivered && plus {
            for node in counted_nodes(&out[..len]) {
                ops.forget(node, 1);
            }
        }
    }

    fn entry(&self, x: &mut Exchange<'_>, result: Result<Entry>) {
        match result {
            Ok(entry) => {
                if !x.value(&encode::entry(&entry)) && entry.node != 0 {
                    self.operations.forget(entry.node, 1);
                }
            }
            Err(errno) => x.error(errno),
        }
    }

    fn created(&self, x: &mut Exchange<'_>, result: Result<(Entry, Opened)>) {
        match result {
            Ok((entry, opened)) => {
                let (entry_out, open_out) = (encode::entry(&entry), encode::opened(&opened));
                if !x.send(0, &[entry_out.as_bytes(), open_out.as_bytes()]) {
                    self.operations.release(entry.node, opened.handle);
                    self.operations.forget(entry.node, 1);
                }
            }
            Err(errno) => x.error(errno),
        }
    }
}

/// The answer to an ioctl that asks for a number.
fn number(number: u32, out: &mut [u8]) -> Result<usize> {
    let bytes = number.to_ne_bytes();
    out.get_mut(..bytes.len())
        .ok_or(Errno::INVAL)?
        .copy_from_slice(&bytes);
    Ok(bytes.len())
}

fn front(scratch: &mut [u8], size: u32) -> &mut [u8] {
    let len = scratch.len().min(size as usize);
    &mut scratch[..len]
}
