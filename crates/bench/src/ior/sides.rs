//! What a thread does in a window: on the devices themselves, in Sheaf, and in a file system of the kernel.

use super::kind::{Access, Deed, Kind, Walk, Way};
use super::{FILL, Options, open_buffered};
use crate::counted::Counters;
use crate::runner::{Counts, Load, Operation, Stop};
use crate::target::{
    InProcess, Interface, Queue, Side, Transfer, check_stamp, keep_busy, open_direct, stamp, whole,
};
use crate::{Error, interrupt};
use base::clock::process_cpu_ns;
use device::{AlignedBuf, Completion};
use fs::OpenFile;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What a window does, wherever.
#[derive(Clone, Copy)]
pub(super) struct Plan<'a> {
    pub(super) options: &'a Options,
    pub(super) kind: Kind,
    pub(super) counters: &'a Counters,
}

impl Plan<'_> {
    /// Writes one file, each request's place in its first bytes.
    pub(super) fn fill(
        &self,
        mut write: impl FnMut(u64, &[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (bytes, request) = (
            self.kind.file_bytes(self.options),
            self.kind.request as usize,
        );
        let mut piece = AlignedBuf::zeroed(FILL);
        let mut at = 0;
        while at < bytes {
            interrupt::check()?;
            let here = (bytes - at).min(FILL as u64) as usize;
            for within in (0..here).step_by(request) {
                stamp(&mut piece[within..], at + within as u64);
            }
            write(at, &piece[..here])?;
            at += here as u64;
        }
        Ok(())
    }

    fn walk(&self, thread: usize, once: bool) -> Walk {
        Walk::new(self.kind, self.options, thread, once)
    }

    /// As many at a time as the options say.
    fn many_at_once<'t>(
        &self,
        thread: usize,
        once: bool,
        queue: Box<dyn Queue>,
        write: bool,
    ) -> Operation<'t>
    where
        Self: 't,
    {
        let mut walk = self.walk(thread, once);
        let bytes = self.kind.request as usize;
        let next = move |slot| {
            let (file, offset) = walk.next()?;
            Some(Transfer {
                slot,
                file,
                offset,
                bytes,
                write,
            })
        };
        keep_busy(queue, self.options.depth, true, next)
    }

    /// One transfer after the other: `transfer` is told the file, the place, and the memory.
    fn one_by_one<'t>(
        &self,
        thread: usize,
        once: bool,
        write: bool,
        transfer: impl Fn(usize, u64, &mut [u8]) -> Result<(), Error> + Send + 't,
    ) -> Operation<'t> {
        let mut walk = self.walk(thread, once);
        let mut buf = AlignedBuf::zeroed(self.kind.request as usize);
        Box::new(move || {
            let Some((file, at)) = walk.next() else {
                return Ok(0);
            };
            if write {
                stamp(&mut buf, at);
            }
            transfer(file, at, &mut buf)?;
            if !write {
                check_stamp(&buf, at)?;
            }
            Ok(1)
        })
    }
}

/// On the devices themselves: requests are striped over them, and a device's are as far apart as in a file.
pub(super) struct OnDevices<'a> {
    pub(super) plan: Plan<'a>,
    pub(super) paths: &'a [PathBuf],
    pub(super) write: bool,
}

impl Load for OnDevices<'_> {
    fn prepare(&self, thread: usize, _: &Stop) -> Result<Operation<'_>, Error> {
        let (plan, count) = (self.plan, self.paths.len() as u64);
        let (slots, request) = (plan.options.depth, plan.kind.request);
        let files = open_direct(self.paths)?;
        let interface = Interface::Uring(Completion::Deferred);
        let queue = interface.queue(files, slots, request as usize)?;
        // In order each request is made once, as by the sides that are judged by this: one sync follows all of them.
        let once = plan.kind.access == Access::Sequential;
        let (mut walk, write) = (plan.walk(thread, once), self.write);
        // Each thread's files follow each other on the devices.
        let file_units = plan.kind.file_bytes(plan.options) / request;
        let next = move |slot| {
            let (file, at) = walk.next()?;
            let unit = file as u64 * file_units + at / request;
            Some(Transfer {
                slot,
                file: (unit % count) as usize,
                offset: unit / count * request,
                bytes: request as usize,
                write,
            })
        };
        Ok(keep_busy(queue, slots, false, next))
    }

    fn settle(&self) -> Result<(), Error> {
        sync(&open_direct(self.paths)?)
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        Ok(process_cpu_ns())
    }

    fn counts(&self) -> Counts {
        self.plan.counters.read()
    }
}

pub(super) fn sync(files: &[File]) -> Result<(), Error> {
    let synced = files.iter().try_for_each(File::sync_data);
    synced.map_err(|e| Error::io(Path::new("a sync"), e))
}

/// In files of Sheaf in this process.
pub(super) struct OnSheaf<'a> {
    pub(super) plan: Plan<'a>,
    pub(super) side: &'a InProcess,
    pub(super) files: &'a [Arc<OpenFile>],
    pub(super) way: Way,
    pub(super) deed: Deed,
}

impl Load for OnSheaf<'_> {
    fn prepare(&self, thread: usize, _: &Stop) -> Result<Operation<'_>, Error> {
        let write = self.deed.writes();
        let transfer = move |file: usize, at, buf: &mut [u8]| match write {
            true => self.side.write(&self.files[file], at, buf),
            false => self.side.read(&self.files[file], at, buf),
        };
        let once = self.way.is_buffered() || self.deed == Deed::WriteNew;
        if matches!(self.way, Way::Aio | Way::AioBuffered) {
            let (slots, request) = (self.plan.options.depth, self.plan.kind.request as usize);
            let queue = self.side.queue(self.files.to_vec(), slots, request)?;
            return Ok((self.plan).many_at_once(thread, once, Box::new(queue), write));
        }
        Ok(self.plan.one_by_one(thread, once, write, transfer))
    }

    fn settle(&self) -> Result<(), Error> {
        self.side.sync()
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        Ok(process_cpu_ns())
    }

    fn counts(&self) -> Counts {
        Counts {
            requests: Some(self.side.device_requests()),
            ..self.plan.counters.read()
        }
    }
}

/// In files of a file system of the kernel.
pub(super) struct OnKernel<'a> {
    pub(super) plan: Plan<'a>,
    pub(super) way: Way,
    pub(super) paths: &'a [PathBuf],
    pub(super) files: &'a [File],
    pub(super) deed: Deed,
}

impl Load for OnKernel<'_> {
    fn prepare(&self, thread: usize, _: &Stop) -> Result<Operation<'_>, Error> {
        let (plan, write) = (self.plan, self.deed.writes());
        let request = plan.kind.request as usize;
        let once = self.way.is_buffered() || self.deed == Deed::WriteNew;
        let in_flight = match self.way {
            Way::Buffered | Way::Direct => None,
            Way::Aio => Some((Interface::Aio, open_direct(self.paths)?)),
            Way::AioBuffered => {
                let interface = Interface::Uring(Completion::Deferred);
                Some((interface, open_buffered(self.paths)?))
            }
        };
        if let Some((interface, files)) = in_flight {
            let queue = interface.queue(files, plan.options.depth, request)?;
            return Ok(plan.many_at_once(thread, once, queue, write));
        }
        let transfer = move |file: usize, at, buf: &mut [u8]| {
            // The kernel ends a call early now and then.
            let done = match write {
                true => self.files[file].write_all_at(buf, at),
                false => self.files[file].read_exact_at(buf, at),
            };
            whole(done.map(|()| request), request, "a file")
        };
        Ok(plan.one_by_one(thread, once, write, transfer))
    }

    fn settle(&self) -> Result<(), Error> {
        sync(self.files)
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        Ok(process_cpu_ns())
    }

    fn counts(&self) -> Counts {
        self.plan.counters.read()
    }
}

#[cfg(test)]
mod tests {
    use super::super::kind::Layout;
    use super::super::tests::options;
    use super::*;

    /// As the sides have it, whose one sync is for each byte once.
    #[test]
    fn the_floor_goes_once_over_a_file_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let options = options(dir.path());
        let paths = [0, 1].map(|i| dir.path().join(i.to_string()));
        for path in &paths {
            device::create_image(path, 16 << 20).unwrap();
        }
        let kind = Kind {
            layout: Layout::Shared,
            access: Access::Sequential,
            request: 1 << 20,
            threads: 2,
        };
        let counters = Counters::start();
        let plan = Plan {
            options: &options,
            kind,
            counters: &counters,
        };
        let floor = OnDevices {
            plan,
            paths: &paths,
            write: true,
        };
        let mut operation = floor.prepare(1, &Stop::default()).unwrap();
        let mut made = 0;
        while let count @ 1.. = operation().unwrap() {
            made += count;
        }
        assert_eq!(made, kind.units(&options));
    }
}
