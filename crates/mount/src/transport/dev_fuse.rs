//! /dev/fuse: blocking reads, one cloned descriptor per worker.
//!
//! A clone has its own queue of requests being processed, so that workers do not contend
//! for one; it dies with its worker, or with the last answer that is owed there. Requests
//! that nobody can answer any more are lost: workers therefore end only between requests.

use std::fs::{File, OpenOptions};
use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use base::clock::nap;

use super::{Bell, Channel, Handler, RequestBuffer, Scratch, Transport};
use crate::dispatch::Reply;
use crate::sys;

const PATH: &str = "/dev/fuse";
/// Before another request is read where there was no memory for one, in nanoseconds.
const NO_MEMORY_NAP_NS: u64 = 10_000_000;

/// A mounted /dev/fuse descriptor.
#[derive(Debug)]
pub struct DevFuse {
    main: Arc<File>,
}

/// Opens /dev/fuse, for mount(2).
pub fn open() -> std::io::Result<OwnedFd> {
    let file = OpenOptions::new().read(true).write(true).open(PATH)?;
    Ok(file.into())
}

impl DevFuse {
    /// `fd` is the descriptor the file system was mounted with.
    pub fn new(fd: OwnedFd) -> Self {
        DevFuse {
            main: Arc::new(File::from(fd)),
        }
    }
}

impl DevFuse {
    /// The descriptor that the file system was mounted with.
    pub(super) fn file(&self) -> Arc<File> {
        Arc::clone(&self.main)
    }
}

impl Transport for DevFuse {
    type Channel = DevFuseChannel;

    fn channel(&self, _queue: usize) -> std::io::Result<DevFuseChannel> {
        let clone = open().and_then(|fd| {
            sys::fuse_clone(fd.as_fd(), self.main.as_fd())?;
            Ok(Arc::new(File::from(fd)))
        });
        let file = clone.unwrap_or_else(|error| {
            // Workers may share a descriptor; they only contend a little more.
            tracing::debug!(%error, "cannot clone the FUSE descriptor");
            Arc::clone(&self.main)
        });
        Ok(DevFuseChannel {
            file,
            buffer: RequestBuffer::new()?,
            scratch: Scratch::new()?,
        })
    }

    fn bell(&self) -> Option<Arc<dyn Bell>> {
        Some(Arc::new(DevFuseBell(Arc::clone(&self.main))))
    }
}

/// The descriptor of the mount, for messages without a request.
struct DevFuseBell(Arc<File>);

impl Bell for DevFuseBell {
    fn ring(&self, parts: &[IoSlice<'_>]) -> std::io::Result<bool> {
        (&*self.0).send(parts)
    }
}

/// See [`DevFuse`].
pub struct DevFuseChannel {
    file: Arc<File>,
    buffer: RequestBuffer,
    scratch: Scratch,
}

impl DevFuseChannel {
    /// From now on it serves nothing where it would wait for a request: for who knows otherwise when there is one. A descriptor that
    /// others share waits as before, for their sake.
    pub(super) fn set_nonblocking(&self, shared: &Arc<File>) -> std::io::Result<()> {
        match Arc::ptr_eq(&self.file, shared) {
            true => Ok(()),
            false => sys::set_nonblocking(self.file.as_fd()),
        }
    }
}

impl Channel for DevFuseChannel {
    fn serve_one(&mut self, handler: &mut Handler<'_>) -> std::io::Result<bool> {
        let len = match receive(&self.file, self.buffer.room())? {
            Received::Message(len) => len,
            Received::Nothing => return Ok(true),
            Received::End => return Ok(false),
        };
        let mut reply = Way(&self.file);
        handler(
            self.buffer.message(len),
            self.scratch.bytes_mut(),
            &mut reply,
        );
        Ok(true)
    }
}

/// What came of a read.
enum Received {
    Message(usize),
    /// The descriptor does not wait, and there is no message.
    Nothing,
    /// After an unmount or an abort.
    End,
}

/// Reads one request.
fn receive(mut file: &File, room: &mut [u8]) -> std::io::Result<Received> {
    loop {
        match file.read(room) {
            Ok(0) => return Ok(Received::End),
            Ok(len) => return Ok(Received::Message(len)),
            Err(error) => match error.raw_os_error() {
                // The request was interrupted before it could be read; take the next.
                Some(libc::ENOENT | libc::EINTR) => {}
                Some(libc::EAGAIN) => return Ok(Received::Nothing),
                // There was no memory for that request, which has failed: the next may find some.
                Some(libc::ENOMEM) => nap(NO_MEMORY_NAP_NS),
                Some(libc::ENODEV | libc::ECONNABORTED) => return Ok(Received::End),
                _ => return Err(error),
            },
        }
    }
}

/// Where answers go to requests that were read there.
struct Way<'a>(&'a Arc<File>);

impl Reply for Way<'_> {
    fn send(&mut self, parts: &[IoSlice<'_>]) -> std::io::Result<bool> {
        (&**self.0).send(parts)
    }

    fn detached(&self) -> Option<Box<dyn Reply + Send>> {
        Some(Box::new(KeptWay(Arc::clone(self.0))))
    }
}

/// As [`Way`]: the descriptor stays open, whatever becomes of the worker.
struct KeptWay(Arc<File>);

impl Reply for KeptWay {
    fn send(&mut self, parts: &[IoSlice<'_>]) -> std::io::Result<bool> {
        (&*self.0).send(parts)
    }

    fn detached(&self) -> Option<Box<dyn Reply + Send>> {
        Some(Box::new(KeptWay(Arc::clone(&self.0))))
    }
}

impl Reply for &File {
    fn send(&mut self, parts: &[IoSlice<'_>]) -> std::io::Result<bool> {
        let whole: usize = parts.iter().map(|part| part.len()).sum();
        loop {
            match self.write_vectored(parts) {
                Ok(sent) if sent == whole => return Ok(true),
                // The kernel takes a reply whole or not at all.
                Ok(_) => return Err(std::io::ErrorKind::WriteZero.into()),
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // The request was aborted, or the mount is gone.
                    Some(libc::ENOENT | libc::ENODEV | libc::ECONNABORTED | libc::EPERM) => {
                        return Ok(false);
                    }
                    _ => return Err(error),
                },
            }
        }
    }
}
