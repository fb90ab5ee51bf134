//! What threads do in one window, on a file system or on the device itself; each operation is timed.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::clock::process_cpu_ns;
use base::rng::Rng;
use base::sync::{Mutex, rank};
use device::{AlignedBuf, BlockDevice, Durability, OpenOptions};

use super::Kind;
use crate::Error;
use crate::runner::{Background, Load, Operation, Stop};
use crate::target::{Side, Slow};
use crate::timing::Latencies;

pub const PAGE: usize = 4096;
/// What an entry of a small log takes.
pub const ENTRY: usize = 100;
/// Written at once by who fills files, and by the competing writer.
pub const LARGE: usize = 1 << 20;
/// Of the file that each thread overwrites.
pub const FILE_BYTES: u64 = 64 << 20;
/// What the competing writer writes before it begins anew.
pub const STREAM_BYTES: u64 = 1 << 30;
/// Letters of `varmail` that are there at the start, as filebench has it by default.
pub const LETTERS: u64 = 1000;
/// What is added to a letter, at most, and the mean of one that is there at the start, in bytes.
const LETTER: usize = 16 << 10;

/// Bytes that a round of `varmail` adds, to a new letter and to an answered one.
fn added(choices: &mut Rng) -> [u64; 2] {
    [(); 2].map(|()| choices.range(1, LETTER as u64))
}

/// The workloads on a file system.
pub struct OnFiles<'a, S: Side> {
    pub side: &'a S,
    pub kind: Kind,
    pub latencies: &'a Latencies,
    pub letters: Letters,
}

/// Names of letters that no thread has in hands. Who takes one has it alone, so no other removes it meanwhile.
#[derive(Debug)]
pub struct Letters {
    there: Mutex<Vec<String>>,
    named: AtomicU64,
}

impl Letters {
    pub fn new() -> Letters {
        Letters {
            there: Mutex::new(rank::LEAF, Vec::new()),
            named: AtomicU64::new(0),
        }
    }

    fn next_name(&self) -> String {
        format!("letter{:09}", self.named.fetch_add(1, Ordering::Relaxed))
    }

    /// Any of them. There are many more than threads take.
    fn take(&self, choices: &mut Rng) -> String {
        let mut there = self.there.lock();
        let which = choices.below(there.len() as u64) as usize;
        there.swap_remove(which)
    }

    fn put(&self, names: [String; 3]) {
        self.there.lock().extend(names);
    }
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

    /// A mail server's round over a folder that all threads share: one letter goes, one comes, one is answered and one is
    /// only read.
    fn varmail(&self, thread: usize) -> Operation<'_> {
        let (mut choices, mut own) = (Rng::new(thread as u64), self.latencies.own());
        let letter = vec![0x5a; 2 * LETTER];
        let mut read = vec![0; LARGE];
        Box::new(move || {
            let (gone, answered, seen) = (
                self.letters.take(&mut choices),
                self.letters.take(&mut choices),
                self.letters.take(&mut choices),
            );
            let sizes = added(&mut choices);
            let new = self.letters.next_name();
            let done = own.time(|| {
                let (side, root) = (self.side, &self.side.root());
                side.unlink(root, &gone)?;
                let file = side.create(root, &new)?;
                side.write(&file, 0, &letter[..sizes[0] as usize])?;
                side.fsync(&file)?;
                drop(file);
                let file = side.open(root, &answered)?;
                let size = self.read_whole(&file, &mut read)?;
                side.write(&file, size, &letter[..sizes[1] as usize])?;
                side.fsync(&file)?;
                drop(file);
                let file = side.open(root, &seen)?;
                self.read_whole(&file, &mut read).map(drop)
            });
            self.letters.put([new, answered, seen]);
            done
        })
    }

    /// Returns the file's size.
    fn read_whole(&self, file: &S::File, buf: &mut [u8]) -> Result<u64, Error> {
        let size = self.side.fstat(file)?;
        for at in (0..size).step_by(buf.len()) {
            let here = (size - at).min(buf.len() as u64) as usize;
            self.side.read(file, at, &mut buf[..here])?;
        }
        Ok(size)
    }

    /// The letters that are there when the window begins. They are made first and told then: no lock is held in a call of the
    /// file system's.
    fn letters(&self, stop: &Stop) -> Result<(), Error> {
        let mut made = Vec::new();
        let mut sizes = Rng::new(LETTERS);
        let letter = vec![0x5a; 2 * LETTER];
        for _ in 0..LETTERS {
            stop.check()?;
            let name = self.letters.next_name();
            let file = self.side.create(&self.side.root(), &name)?;
            let size = sizes.range(1, 2 * LETTER as u64) as usize;
            self.side.write(&file, 0, &letter[..size])?;
            made.push(name);
        }
        self.letters.there.lock().extend(made);
        Ok(())
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
            Kind::Varmail => {
                // No thread takes one before all are ready.
                if thread == 0 {
                    self.letters(stop)?;
                }
                Ok(self.varmail(thread))
            }
        }
    }

    fn settle(&self) -> Result<(), Error> {
        self.side.sync()
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        self.side.cpu_ns()
    }

    fn background(&self) -> Option<Background> {
        self.side.background()
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
    /// One write to devices of this process that is durable at once.
    Durable,
    /// A write to them, then a flush.
    Flushed,
}

impl Method {
    pub const ALL: [Method; 5] = [
        Method::Dsync,
        Method::Fdatasync,
        Method::Uring,
        Method::Durable,
        Method::Flushed,
    ];
    /// On block devices.
    pub const KERNEL: [Method; 3] = [Method::Dsync, Method::Fdatasync, Method::Uring];
    /// On devices of this process.
    pub const SLOW: [Method; 2] = [Method::Durable, Method::Flushed];

    /// As rows have it.
    pub fn name(self) -> &'static str {
        match self {
            Method::Dsync => "raw-dsync",
            Method::Fdatasync => "raw-fdatasync",
            Method::Uring => "raw-io_uring",
            Method::Durable => "raw-durable",
            Method::Flushed => "raw-write-flush",
        }
    }
}

/// The same writes and flushes on the devices, with no file system: the floor.
pub struct OnDevice<'a> {
    pub kind: Kind,
    pub method: Method,
    pub latencies: &'a Latencies,
    /// The one device past the page cache, where it is the kernel's.
    direct: Option<File>,
    devices: Vec<Arc<dyn BlockDevice>>,
}

impl<'a> OnDevice<'a> {
    /// On a block device.
    pub fn open(
        path: &Path,
        kind: Kind,
        method: Method,
        latencies: &'a Latencies,
    ) -> Result<OnDevice<'a>, Error> {
        let mut options = File::options();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        let direct = options.open(path).map_err(|e| Error::io(path, e))?;
        Ok(OnDevice {
            kind,
            method,
            latencies,
            direct: Some(direct),
            devices: device::open_devices(&[path.to_owned()], &OpenOptions::default())?,
        })
    }

    /// On devices of this process, which are as slow as that; threads take them in turn.
    pub fn slow(
        paths: &[PathBuf],
        slow: &Slow,
        kind: Kind,
        method: Method,
        latencies: &'a Latencies,
    ) -> Result<OnDevice<'a>, Error> {
        let below = device::open_devices(paths, &OpenOptions::default())?;
        Ok(OnDevice {
            kind,
            method,
            latencies,
            direct: None,
            devices: slow.over_all(below),
        })
    }

    fn write(&self, device: &dyn BlockDevice, at: u64, bytes: &[u8]) -> std::io::Result<()> {
        match (self.method, &self.direct) {
            (Method::Dsync, Some(direct)) => match base::sys::pwrite_dsync(direct, bytes, at)? {
                moved if moved == bytes.len() => Ok(()),
                _ => Err(std::io::ErrorKind::WriteZero.into()),
            },
            (Method::Fdatasync, Some(direct)) => {
                direct.write_all_at(bytes, at)?;
                direct.sync_data()
            }
            (Method::Flushed, _) => {
                device.write(at, bytes, Durability::Volatile)?;
                device.flush()
            }
            _ => device.write(at, bytes, Durability::Durable),
        }
    }

    /// A thread's device, and where its part of that begins.
    fn part(&self, thread: usize) -> (&dyn BlockDevice, u64) {
        let count = self.devices.len();
        let base = (thread / count) as u64 * FILE_BYTES;
        (&*self.devices[thread % count], base)
    }

    /// Overwrites `unit` bytes somewhere in the thread's part of its device, or one after the other.
    fn writes(&self, thread: usize, unit: usize, anywhere: bool) -> Operation<'_> {
        let (device, base) = self.part(thread);
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
                let written = self.write(device, base + place * unit as u64, &bytes);
                written.map_err(|e| Error::io(Path::new(device.name()), e))
            })
        })
    }

    /// What a round of `varmail` adds, in whole pages, one after the other in the thread's part of its device: what its two
    /// syncs take where there is no file system.
    fn rounds(&self, thread: usize) -> Operation<'_> {
        let (device, base) = self.part(thread);
        let (mut choices, mut next, mut own) = (Rng::new(thread as u64), 0, self.latencies.own());
        let bytes = AlignedBuf::zeroed(LETTER.next_multiple_of(PAGE));
        Box::new(move || {
            let sizes = added(&mut choices).map(|size| size.next_multiple_of(PAGE as u64));
            own.time(|| {
                sizes.into_iter().try_for_each(|size| {
                    if next + size > FILE_BYTES {
                        next = 0;
                    }
                    let at = base + next;
                    next += size;
                    let written = self.write(device, at, &bytes[..size as usize]);
                    written.map_err(|e| Error::io(Path::new(device.name()), e))
                })
            })
        })
    }

    /// Large writes that nobody syncs, to all devices in turn, beside the first thread's part of them.
    fn stream(&self) -> Operation<'_> {
        let bytes = AlignedBuf::zeroed(LARGE);
        let count = self.devices.len() as u64;
        let room = self.devices[0].bytes().saturating_sub(FILE_BYTES) / LARGE as u64 * count;
        let pieces = room.clamp(1, STREAM_BYTES / LARGE as u64);
        let mut next = 0;
        Box::new(move || {
            let device = &*self.devices[(next % count) as usize];
            let at = FILE_BYTES + next / count * LARGE as u64;
            let written = match &self.direct {
                Some(direct) => direct.write_all_at(&bytes, at),
                None => device.write(at, &bytes, Durability::Volatile),
            };
            written.map_err(|e| Error::io(Path::new(device.name()), e))?;
            next = (next + 1) % pieces;
            Ok(1)
        })
    }
}

impl Load for OnDevice<'_> {
    fn prepare(&self, thread: usize, _stop: &Stop) -> Result<Operation<'_>, Error> {
        Ok(match self.kind {
            // As a journal has them.
            Kind::Append => {
                let block = self.devices[0].physical_block() as usize;
                self.writes(thread, block, false)
            }
            Kind::Competing if thread > 0 => self.stream(),
            Kind::Varmail => self.rounds(thread),
            _ => self.writes(thread, PAGE, true),
        })
    }

    fn settle(&self) -> Result<(), Error> {
        for device in &self.devices {
            let flushed = match &self.direct {
                Some(direct) => direct.sync_data(),
                None => device.flush(),
            };
            flushed.map_err(|e| Error::io(Path::new(device.name()), e))?;
        }
        Ok(())
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        Ok(process_cpu_ns())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meter::Meter;
    use crate::runner::{self, Window};
    use crate::target::{InProcess, Posix};

    /// Rounds by two threads: as many letters as before are there then.
    fn rounds<S: Side>(side: &S) {
        let latencies = Latencies::new();
        let load = OnFiles {
            side,
            kind: Kind::Varmail,
            latencies: &latencies,
            letters: Letters::new(),
        };
        let window = Window {
            time: std::time::Duration::from_secs(600),
            threads: 2,
            operations: 20,
            cpus: Vec::new(),
        };
        let measured = runner::measure(&window, &load, &Meter::new(&[]).unwrap()).unwrap();
        let mut there = load.letters.there.lock().clone();
        there.sort_unstable();
        there.dedup();
        assert_eq!(there.len() as u64, LETTERS);
        let mut found = 0;
        let counted = side.list(&side.root(), &mut || {
            found += 1;
            true
        });
        counted.unwrap();
        // The folder and its parent are listed, too.
        assert_eq!(found, LETTERS + 2);
        assert!(
            there
                .iter()
                .all(|name| side.open(&side.root(), name).is_ok())
        );
        drop(load);
        assert!(measured.operations >= 20);
        assert_eq!(latencies.summary().operations, measured.operations);
    }

    #[test]
    fn letters_come_and_go_and_stay_as_many() {
        let folder = tempfile::tempdir().unwrap();
        rounds(&Posix::new(folder.path(), None).unwrap());
        // In this process, where locks are looked at.
        let image = folder.path().join("image");
        device::create_image(&image, 256 << 20).unwrap();
        rounds(&InProcess::make(&[image], 64 << 20).unwrap());
    }

    #[test]
    fn every_way_of_writing_counts_its_flushes_on_slow_devices() {
        let folder = tempfile::tempdir().unwrap();
        let slow = Slow::new(device::Latency {
            service: std::time::Duration::from_micros(1),
            flush: std::time::Duration::from_micros(1),
            depth: 4,
        });
        let paths: Vec<_> = (0..2).map(|i| folder.path().join(i.to_string())).collect();
        for path in &paths {
            device::create_image(path, 2 * FILE_BYTES).unwrap();
        }
        let latencies = Latencies::new();
        for method in Method::SLOW {
            let load = OnDevice::slow(&paths, &slow, Kind::Create, method, &latencies).unwrap();
            // The last thread has the second half of the second device.
            for thread in 0..4 {
                let before = (slow.writes.bytes(), slow.writes.flushes());
                let mut write = load.prepare(thread, &Stop::default()).unwrap();
                for _ in 0..50 {
                    write().unwrap();
                }
                assert_eq!(slow.writes.bytes() - before.0, 50 * PAGE as u64);
                assert_eq!(slow.writes.flushes() - before.1, 50);
            }
        }
        // A round has two flushes, and whole pages of up to 16 KiB before each; the part is written from its beginning again.
        let load = OnDevice::slow(&paths, &slow, Kind::Varmail, Method::Durable, &latencies);
        let load = load.unwrap();
        let before = (slow.writes.bytes(), slow.writes.flushes());
        let mut round = load.prepare(3, &Stop::default()).unwrap();
        let rounds = FILE_BYTES / LETTER as u64;
        for _ in 0..rounds {
            round().unwrap();
        }
        let bytes = slow.writes.bytes() - before.0;
        assert_eq!(slow.writes.flushes() - before.1, 2 * rounds);
        assert!(
            bytes.is_multiple_of(PAGE as u64) && bytes > FILE_BYTES,
            "{bytes}"
        );
        drop(round);
        drop(load);
        let load = OnDevice::slow(&paths, &slow, Kind::Competing, Method::Durable, &latencies);
        let load = load.unwrap();
        let mut stream = load.prepare(1, &Stop::default()).unwrap();
        for _ in 0..2 * (FILE_BYTES / LARGE as u64) + 3 {
            stream().unwrap();
        }
    }
}
