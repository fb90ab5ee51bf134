//! What threads do in one window, on a file system or on the device itself; each operation is timed.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use base::clock::process_cpu_ns;
use base::rng::Rng;
use device::{AlignedBuf, BlockDevice, Durability, OpenOptions};

use super::Kind;
use crate::Error;
use crate::runner::{Load, Operation, Stop};
use crate::target::Side;
use crate::timing::Latencies;

pub const PAGE: usize = 4096;
/// What an entry of a small log takes.
pub const ENTRY: usize = 100;
/// Written at once by who fills files, and by the competing writer.
const LARGE: usize = 1 << 20;
/// Of the file that each thread overwrites.
pub const FILE_BYTES: u64 = 64 << 20;
/// What the competing writer writes before it begins anew.
pub const STREAM_BYTES: u64 = 1 << 30;
/// The workloads on a file system.
pub struct OnFiles<'a, S: Side> {
    pub side: &'a S,
    pub kind: Kind,
    pub latencies: &'a Latencies,
}

impl<S: Side> OnFiles<'_, S> {
    /// A file whose blocks are all written.
    fn filled(&self, name: &str, bytes: u64, stop: &Stop) -> Result<S::File, Error> {
        let file = self.side.create(&self.side.root(), name)?;
        let piece = vec![0x5a; LARGE];
        for at in (0..bytes).step_by(LARGE) {
            stop.check()?;
            self.side.write(&file, at, &piece)?;
        }
        Ok(file)
    }

    fn overwrite(&self, thread: usize, stop: &Stop) -> Result<Operation<'_>, Error> {
        let file = self.filled(&format!("file{thread}"), FILE_BYTES, stop)?;
        let (mut pages, mut own) = (Rng::new(thread as u64), self.latencies.own());
        let page = vec![0xa5; PAGE];
        let looks = self.kind == Kind::OverwriteStat;
        Ok(Box::new(move || {
            let at = pages.below(FILE_BYTES / PAGE as u64) * PAGE as u64;
            own.time(|| {
                self.side.write(&file, at, &page)?;
                if looks {
                    self.side.fstat(&file)?;
                }
                self.side.fsync(&file)
            })
        }))
    }

    fn append(&self, thread: usize) -> Result<Operation<'_>, Error> {
        let file = self
            .side
            .create(&self.side.root(), &format!("log{thread}"))?;
        let (mut end, mut own) = (0, self.latencies.own());
        Ok(Box::new(move || {
            let done = own.time(|| {
                self.side.write(&file, end, &[0x5a; ENTRY])?;
                self.side.fdatasync(&file)
            });
            end += ENTRY as u64;
            done
        }))
    }

    fn create(&self, thread: usize) -> Result<Operation<'_>, Error> {
        let folder = self
            .side
            .make_dir(&self.side.root(), &format!("folder{thread}"))?;
        let (mut made, mut own) = (0u64, self.latencies.own());
        let page = vec![0xa5; PAGE];
        Ok(Box::new(move || {
            made += 1;
            own.time(|| {
                let file = self.side.create(&folder, &format!("file{made}"))?;
                self.side.write(&file, 0, &page)?;
                self.side.fsync(&file)
            })
        }))
    }

    /// Writes one large file from its beginning to its end, and again.
    fn stream(&self) -> Result<Operation<'_>, Error> {
        let file = self.side.create(&self.side.root(), "stream")?;
        let piece = vec![0x3c; LARGE];
        let mut at = 0;
        Ok(Box::new(move || {
            self.side.write(&file, at, &piece)?;
            at = (at + LARGE as u64) % STREAM_BYTES;
            Ok(1)
        }))
    }
}

impl<S: Side> Load for OnFiles<'_, S> {
    fn prepare(&self, thread: usize, stop: &Stop) -> Result<Operation<'_>, Error> {
        match self.kind {
            Kind::Overwrite | Kind::OverwriteStat => self.overwrite(thread, stop),
            Kind::Append => self.append(thread),
            Kind::Create => self.create(thread),
            Kind::Competing if thread == 0 => self.overwrite(thread, stop),
            Kind::Competing => self.stream(),
        }
    }

    fn settle(&self) -> Result<(), Error> {
        self.side.sync()
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        self.side.cpu_ns()
    }
}

/// How something is written to a device and made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// One pwritev2(2) with RWF_DSYNC.
    Dsync,
    /// pwrite(2), then fdatasync(2).
    Fdatasync,
    /// A write and a flush by io_uring, as Sheaf's device layer does them.
    Uring,
}

impl Method {
    pub const ALL: [Method; 3] = [Method::Dsync, Method::Fdatasync, Method::Uring];

    /// As rows have it.
    pub fn name(self) -> &'static str {
        match self {
            Method::Dsync => "raw-dsync",
            Method::Fdatasync => "raw-fdatasync",
            Method::Uring => "raw-io_uring",
        }
    }
}

/// The same writes and flushes on the device, with no file system: the floor.
pub struct OnDevice<'a> {
    pub kind: Kind,
    pub method: Method,
    pub latencies: &'a Latencies,
    direct: File,
    ring: Arc<dyn BlockDevice>,
}

impl<'a> OnDevice<'a> {
    pub fn open(
        path: &Path,
        kind: Kind,
        method: Method,
        latencies: &'a Latencies,
    ) -> Result<OnDevice<'a>, Error> {
        let mut options = File::options();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        let direct = options.open(path).map_err(|e| Error::io(path, e))?;
        let mut opened = device::open_devices(&[path.to_owned()], &OpenOptions::default())?;
        let ring = opened
            .pop()
            .ok_or_else(|| Error::Usage("a device is needed".to_owned()))?;
        Ok(OnDevice {
            kind,
            method,
            latencies,
            direct,
            ring,
        })
    }

    fn write(&self, at: u64, bytes: &[u8]) -> std::io::Result<()> {
        match self.method {
            Method::Dsync => match base::sys::pwrite_dsync(&self.direct, bytes, at)? {
                moved if moved == bytes.len() => Ok(()),
                _ => Err(std::io::ErrorKind::WriteZero.into()),
            },
            Method::Fdatasync => {
                self.direct.write_all_at(bytes, at)?;
                self.direct.sync_data()
            }
            Method::Uring => self.ring.write(at, bytes, Durability::Durable),
        }
    }

    /// Overwrites `unit` bytes somewhere in the thread's part of the device, or one after the other.
    fn writes(&self, thread: usize, unit: usize, anywhere: bool) -> Operation<'_> {
        let base = thread as u64 * FILE_BYTES;
        let units = FILE_BYTES / unit as u64;
        let (mut places, mut next, mut own) = (Rng::new(thread as u64), 0, self.latencies.own());
        let bytes = AlignedBuf::zeroed(unit);
        Box::new(move || {
            let place = match anywhere {
                true => places.below(units),
                false => next % units,
            };
            next += 1;
            own.time(|| {
                let written = self.write(base + place * unit as u64, &bytes);
                written.map_err(|e| Error::io(Path::new(self.ring.name()), e))
            })
        })
    }

    fn stream(&self) -> Operation<'_> {
        let bytes = AlignedBuf::zeroed(LARGE);
        let mut at = 0;
        Box::new(move || {
            let written = self.direct.write_all_at(&bytes, FILE_BYTES + at);
            written.map_err(|e| Error::io(Path::new(self.ring.name()), e))?;
            at = (at + LARGE as u64) % STREAM_BYTES;
            Ok(1)
        })
    }
}

impl Load for OnDevice<'_> {
    fn prepare(&self, thread: usize, _stop: &Stop) -> Result<Operation<'_>, Error> {
        Ok(match self.kind {
            // As a journal has them.
            Kind::Append => self.writes(thread, self.ring.logical_block() as usize, false),
            Kind::Competing if thread > 0 => self.stream(),
            _ => self.writes(thread, PAGE, true),
        })
    }

    fn settle(&self) -> Result<(), Error> {
        let synced = self.direct.sync_data();
        synced.map_err(|e| Error::io(Path::new(self.ring.name()), e))
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        Ok(process_cpu_ns())
    }
}
