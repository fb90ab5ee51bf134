//! Block devices and image files: opening, claiming, and their place in a backend.
//!
//! 1. A device opened exclusively is claimed until it is dropped or the claim is released:
//!    `O_EXCL` on block devices, `flock` on files (shared when read-only).
//! 2. Whoever opens a block device exclusively also locks it, until the device is dropped, and
//!    nothing else ends that: a claim that was handed to the kernel may end while its first owner
//!    still writes, and the next one must be kept out even then.
//! 3. Loop devices over the same bytes of a file, and that file, are claimed together ([`loops`]).
//! 4. What is opened for writing takes writes: a block device that does not is refused, before anything is done to it.
//! 5. I/O is direct where the host allows it; what that needs of alignment is found out at
//!    open and stated by `logical_block` and `memory_align`. A file whose array was made for smaller blocks than direct I/O
//!    takes here, on another host say, is read and written through the page cache, which takes all: so it is from before the
//!    first transfer that needs it until the end.

use crate::block::{BlockDevice, DeviceInfo, Operation, Request};
use crate::buf::AlignedBuf;
use crate::error::Error;
use crate::loops;
use crate::queue::{Bell, Blocking, DeviceQueue, Own};
use crate::reap::{Reaped, Reaper, Reaping};
use crate::threads;
use crate::topology::Topology;
use crate::uring;
use crate::uring::polled::ReapRing;
use crate::vectored::{self, Vectored};
use base::atomic::{AtomicBool, Ordering};
use base::sync::{Mutex, rank};
use base::sys;
use base::thread::Pool;
use format::BLOCK_SIZE;
use std::fs::{self, File, TryLockError};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// No unit of I/O is smaller, in bytes.
const LEAST_BLOCK: u32 = 512;

/// Which system interface carries the I/O.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// io_uring, or the thread pool where io_uring is blocked.
    #[default]
    Auto,
    IoUring,
    /// `preadv2`/`pwritev2` on a small thread pool, and for what is in flight one for each device.
    Threads,
}

/// How devices are opened.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    pub read_only: bool,
    /// Refuse devices that are in use, and keep others from using them.
    pub exclusive: bool,
    pub backend: Backend,
    /// Bypass the page cache where the host allows it.
    pub direct: bool,
    pub topology: Topology,
    /// How threads wait for what they have in flight.
    pub reap: Reaping,
    /// On which ring those that look have it.
    pub reap_ring: ReapRing,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions {
            read_only: false,
            exclusive: true,
            backend: Backend::Auto,
            direct: true,
            topology: Topology::PerCore,
            reap: Reaping::default(),
            reap_ring: ReapRing::default(),
        }
    }
}

/// The backend in use.
pub(crate) enum Engine {
    Uring,
    Threads(Arc<Pool>),
    /// The calling thread: for a look at a device or a claim of it, not for an array.
    Caller,
}

/// An open block device or file.
pub(crate) struct FileDevice {
    /// Distinguishes this device in per-thread ring tables; shared so that they can see
    /// when it is gone.
    pub id: Arc<()>,
    pub file: File,
    logical_block: u32,
    physical_block: u32,
    name: String,
    bytes: u64,
    pub block_device: bool,
    /// As it was opened; see [`direct`](Self::direct).
    opened_direct: bool,
    /// Set once: a file's array needs smaller blocks than direct I/O takes (invariant 5).
    through_cache: AtomicBool,
    /// Transfers that are looked for are on a ring that polls the device.
    pub polled: bool,
    read_only: bool,
    rotational: Option<bool>,
    /// It has no volatile cache, as far as the kernel says.
    write_through: bool,
    numa_node: Option<usize>,
    engine: Engine,
    has_writer: AtomicBool,
    /// For owners of queues who have no ring; made when there is one.
    own_pool: OnceLock<Arc<Pool>>,
    /// In flight by threads of a pool.
    pub waiting: Arc<Mutex<threads::Waiting>>,
    /// Invariant 2: open of its own, because the claim goes with the opening of `file`.
    _lock: Option<File>,
    /// Claims of the same storage by its other names.
    _also: Vec<File>,
    pub reaper: Arc<Reaper>,
    /// The next plain call does.
    #[cfg(test)]
    pub panics: AtomicBool,
}

/// Opens the devices and files at `paths`, in that order. A process that forks to run in the
/// background does so first: neither rings nor threads follow into the child.
pub fn open_devices(
    paths: &[PathBuf],
    options: &OpenOptions,
) -> Result<Vec<Arc<dyn BlockDevice>>, Error> {
    let uring = match options.backend {
        Backend::Threads => false,
        Backend::Auto => uring::probe().is_ok(),
        Backend::IoUring => {
            let source = uring::probe().map_err(Arc::new);
            source.map_err(|source| Error::NoIoUring { source })?;
            true
        }
    };
    // A file's lock would report the second opening as "in use", so look first.
    check_distinct(paths)?;
    let pool = if uring || paths.is_empty() {
        None
    } else {
        let pool = Pool::start("sheaf-io", threads::pool_size(paths.len()));
        Some(Arc::new(pool.map_err(|e| Error::Threads {
            source: Arc::new(e),
        })?))
    };
    let mut devices: Vec<Arc<dyn BlockDevice>> = Vec::new();
    for path in paths {
        let engine = pool.clone().map_or(Engine::Uring, Engine::Threads);
        devices.push(Arc::new(FileDevice::open(path, options, engine)?));
    }
    options.topology.over(devices)
}

/// Keeps others from devices and files until it is dropped, as whoever opens them to write does.
pub struct Claim {
    _devices: Vec<FileDevice>,
}

/// Claims the devices and files at `paths`, all or none, without any transfer: no threads, no ring. They have to be such that they
/// could be written to.
pub fn claim(paths: &[PathBuf]) -> Result<Claim, Error> {
    check_distinct(paths)?;
    let options = OpenOptions {
        direct: false,
        ..OpenOptions::default()
    };
    let open = |path: &PathBuf| FileDevice::open(path, &options, Engine::Caller);
    Ok(Claim {
        _devices: paths.iter().map(open).collect::<Result<_, _>>()?,
    })
}

/// Opens one device for reading a few blocks: no lock, no threads, no ring.
pub(crate) fn open_to_look(path: &Path, direct: bool) -> Result<FileDevice, Error> {
    let options = OpenOptions {
        read_only: true,
        exclusive: false,
        backend: Backend::Threads,
        direct,
        topology: Topology::PerCore,
        reap: Reaping::Interrupt,
        reap_ring: ReapRing::Ordinary,
    };
    FileDevice::open(path, &options, Engine::Caller)
}

/// What lies behind a path.
pub(crate) enum Storage {
    Device(u64),
    File(loops::Part),
}

impl Storage {
    pub fn of(path: &Path) -> io::Result<Storage> {
        Ok(Storage::behind(&fs::metadata(path)?))
    }

    fn behind(meta: &fs::Metadata) -> Storage {
        let is_block = meta.file_type().is_block_device();
        // A loop device is what it shows of the file behind it.
        match is_block.then(|| loops::behind(meta.rdev())).flatten() {
            Some((_, part)) => Storage::File(part),
            None if is_block => Storage::Device(meta.rdev()),
            None => Storage::File(loops::Part::whole(meta)),
        }
    }

    pub fn overlaps(&self, other: &Storage) -> bool {
        match (self, other) {
            (Storage::Device(a), Storage::Device(b)) => a == b,
            (Storage::File(a), Storage::File(b)) => a.overlaps(b),
            _ => false,
        }
    }
}

/// What devices lie on, by which each of them is known again under any other name that it has.
pub struct Occupied(Vec<Storage>);

impl Occupied {
    /// By the devices at these paths.
    pub fn by(paths: &[PathBuf]) -> Result<Occupied, Error> {
        let storage = |path: &PathBuf| Storage::of(path).map_err(|e| Error::open(path, e));
        Ok(Occupied(
            paths.iter().map(storage).collect::<Result<_, _>>()?,
        ))
    }

    /// Whether a file or block device is, or shows, some of it.
    pub fn has(&self, other: &fs::Metadata) -> bool {
        let kind = other.file_type();
        // What else has an inode number in common is on no device of ours.
        (kind.is_file() || kind.is_block_device()) && {
            let other = Storage::behind(other);
            self.0.iter().any(|storage| storage.overlaps(&other))
        }
    }
}

/// That no two paths lead to the same storage.
pub fn check_distinct(paths: &[PathBuf]) -> Result<(), Error> {
    let mut seen: Vec<(Storage, &Path)> = Vec::new();
    for path in paths {
        let storage = Storage::of(path).map_err(|e| Error::open(path, e))?;
        if let Some((_, first)) = seen.iter().find(|(other, _)| storage.overlaps(other)) {
            return Err(Error::GivenTwice {
                first: first.display().to_string(),
                second: path.display().to_string(),
            });
        }
        seen.push((storage, path));
    }
    Ok(())
}

/// Creates a sparse image file of `bytes` bytes, and tells which file that is. Fails if something is there already.
pub fn create_image(path: &Path, bytes: u64) -> Result<fs::Metadata, Error> {
    let fail = |e: io::Error| Error::Image {
        path: path.display().to_string(),
        source: Arc::new(e),
    };
    let file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(fail)?;
    // Nobody makes a file system on it before it has its size.
    let locked = file.try_lock().is_ok();
    let sized = file.set_len(bytes).and_then(|()| file.sync_all());
    if sized.is_err() && locked && is_still(path, &file) {
        // Leave no half-made image behind; the first error is the one to report.
        let removed = fs::remove_file(path);
        tracing::debug!(?removed, "removed a half-made image");
    }
    // A child that is being started has the descriptor for a moment, and the lock with it.
    if let Err(error) = file.unlock() {
        tracing::debug!(%error, "unlock of a new image");
    }
    sized.and_then(|()| file.metadata()).map_err(fail)
}

/// Whether a path still leads to the file that was opened by it.
fn is_still(path: &Path, opened: &File) -> bool {
    let id = |meta: fs::Metadata| (meta.dev(), meta.ino());
    let (now, then) = (fs::metadata(path), opened.metadata());
    matches!((now.map(id), then.map(id)), (Ok(now), Ok(then)) if now == then)
}

impl FileDevice {
    pub(crate) fn open(
        path: &Path,
        options: &OpenOptions,
        engine: Engine,
    ) -> Result<FileDevice, Error> {
        let fail = |e: io::Error| match options.read_only {
            true => Error::open(path, e),
            false => Error::open_to_write(path, e),
        };
        let meta = fs::metadata(path).map_err(fail)?;
        let block_device = meta.file_type().is_block_device();
        if !block_device && !meta.is_file() {
            return Err(Error::NotADevice {
                device: path.display().to_string(),
            });
        }
        let exclusive = block_device && options.exclusive;
        let (file, direct) = open_file(path, options, exclusive).map_err(fail)?;
        let opened = file.metadata().map_err(fail)?;
        if opened.file_type().is_block_device() != block_device {
            return Err(fail(io::Error::other("the file was replaced meanwhile")));
        }
        // Invariant 4.
        if block_device && !options.read_only && sys::is_write_protected(&file).map_err(fail)? {
            return Err(Error::write_protected(path));
        }
        if options.exclusive && !block_device {
            lock_file(&file, path, options.read_only)?;
        }
        let also = match (options.exclusive, block_device) {
            (false, _) => Vec::new(),
            (true, false) => loops::claim_of_file(path, &opened, options.read_only)?,
            (true, true) => loops::claim_of_device(path, opened.rdev(), options.read_only)?,
        };
        let lock = exclusive.then(|| lock_device(path, opened.rdev(), options.read_only));
        let bytes = match block_device {
            true => (&file).seek(SeekFrom::End(0)).map_err(fail)?,
            false => opened.len(),
        };
        let logical_block = logical_block(&file, block_device, direct).map_err(fail)?;
        let polled = options.reap_ring == ReapRing::Iopoll && {
            let reached = direct && matches!(engine, Engine::Uring);
            let why = why_unpolled(&file, &opened, options, reached);
            if let Some(why) = &why {
                let device = path.display();
                tracing::warn!(
                    "{device}: reap_ring=iopoll does not apply, the ordinary ring is used: {why}"
                );
            }
            why.is_none()
        };
        let disk = match block_device {
            true => opened.rdev(),
            false => opened.dev(),
        };
        Ok(FileDevice {
            id: Arc::new(()),
            file,
            logical_block,
            physical_block: physical_block(of_queue(disk, "physical_block_size").as_deref()),
            name: path.display().to_string(),
            bytes,
            block_device,
            opened_direct: direct,
            through_cache: AtomicBool::new(false),
            polled,
            read_only: options.read_only,
            rotational: block_device.then(|| rotational(opened.rdev())).flatten(),
            write_through: block_device && direct && writes_through(opened.rdev()),
            numa_node: numa_node(disk),
            engine,
            has_writer: AtomicBool::new(false),
            own_pool: OnceLock::new(),
            waiting: Arc::new(Mutex::new(rank::LEAF, threads::Waiting::default())),
            _lock: lock.transpose()?,
            _also: also,
            reaper: Arc::new(Reaper::new(options.reap)),
            #[cfg(test)]
            panics: AtomicBool::new(false),
        })
    }
}

impl FileDevice {
    /// Whether transfers bypass the page cache.
    pub fn direct(&self) -> bool {
        self.opened_direct && !self.through_cache.load(Ordering::Relaxed)
    }

    /// Why an operation that writes, or one that does not, is not tried.
    pub fn refuses(&self, reads: bool) -> Option<io::Error> {
        let refused = !reads && self.read_only;
        refused.then(|| io::Error::from_raw_os_error(libc::EROFS))
    }

    /// Threads for this device alone: all that is in flight on it by a pool is on one. What hangs there keeps none from another device's.
    pub fn own_pool(&self) -> io::Result<Arc<Pool>> {
        if let Some(pool) = self.own_pool.get() {
            return Ok(Arc::clone(pool));
        }
        let pool = Pool::start("sheaf-io", threads::WORKERS)?;
        // Another one's is as good.
        Ok(Arc::clone(self.own_pool.get_or_init(|| Arc::new(pool))))
    }
}

/// Opens for direct I/O, or buffered where the host refuses that.
fn open_file(path: &Path, options: &OpenOptions, exclusive: bool) -> io::Result<(File, bool)> {
    let excl = if exclusive { libc::O_EXCL } else { 0 };
    let open = |flags: i32| {
        fs::OpenOptions::new()
            .read(true)
            .write(!options.read_only)
            .custom_flags(flags | excl)
            .open(path)
    };
    if options.direct {
        match open(libc::O_DIRECT) {
            // Some file systems accept the flag and refuse the I/O.
            Ok(file) if direct_read_works(&file) => return Ok((file, true)),
            Ok(_) => {}
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
            Err(e) => return Err(e),
        }
    }
    Ok((open(0)?, false))
}

fn direct_read_works(file: &File) -> bool {
    use std::os::unix::fs::FileExt;
    let mut buf = AlignedBuf::zeroed(4096);
    !matches!(file.read_at(&mut buf, 0), Err(e) if e.raw_os_error() == Some(libc::EINVAL))
}

fn lock_file(file: &File, path: &Path, shared: bool) -> Result<(), Error> {
    let locked = if shared {
        file.try_lock_shared()
    } else {
        file.try_lock()
    };
    match locked {
        // Who had it until now may have removed it: what is written to it then is in no file of that name.
        Ok(()) if !is_still(path, file) => {
            let why = "it was removed or replaced meanwhile";
            Err(Error::open(path, io::Error::other(why)))
        }
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(Error::InUse {
            device: path.display().to_string(),
        }),
        Err(TryLockError::Error(e)) => Err(Error::open(path, e)),
    }
}

/// Opens the claimed block device once more, for nothing but its lock.
fn lock_device(path: &Path, number: u64, shared: bool) -> Result<File, Error> {
    let fail = |e: io::Error| Error::open(path, e);
    let opened = fs::OpenOptions::new()
        .read(true)
        .write(!shared)
        .open(path)
        .map_err(fail)?;
    if opened.metadata().map_err(fail)?.rdev() != number {
        return Err(fail(io::Error::other("the device was replaced meanwhile")));
    }
    match sys::try_lock_open_file(&opened, !shared).map_err(fail)? {
        true => Ok(opened),
        false => Err(Error::InUse {
            device: path.display().to_string(),
        }),
    }
}

/// The smallest unit of I/O: a block device's logical block; of a file what direct I/O to
/// it needs.
fn logical_block(file: &File, block_device: bool, direct: bool) -> io::Result<u32> {
    let size = if block_device {
        sys::logical_block_size(file)?
    } else if direct {
        // Unknown on old kernels: 4,096 suits every host.
        sys::direct_io_offset_align(file).unwrap_or(4096)
    } else {
        LEAST_BLOCK
    };
    Ok(if size <= LEAST_BLOCK {
        LEAST_BLOCK
    } else {
        size.next_power_of_two()
    })
}

/// The kernel's word on a block device's queue; partitions ask their disk.
fn of_queue(device: u64, what: &str) -> Option<String> {
    let (major, minor) = (libc::major(device), libc::minor(device));
    let base = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let text = fs::read_to_string(base.join("queue").join(what))
        .or_else(|_| fs::read_to_string(base.join("../queue").join(what)));
    text.ok().map(|text| text.trim().to_owned())
}

/// What a disk writes as one, by what the kernel says of it; 512 bytes where it says nothing. Who says more than 4,096 bytes means what suits it best.
fn physical_block(told: Option<&str>) -> u32 {
    let told = told.and_then(|told| told.parse::<u32>().ok());
    let told = told.filter(|bytes| bytes.is_power_of_two());
    told.map_or(LEAST_BLOCK, |bytes| {
        bytes.clamp(LEAST_BLOCK, BLOCK_SIZE as u32)
    })
}

/// Whether it spins, as far as that is known.
fn rotational(device: u64) -> Option<bool> {
    of_queue(device, "rotational").map(|told| told == "1")
}

fn writes_through(device: u64) -> bool {
    of_queue(device, "write_cache").is_some_and(|told| told == "write through")
}

/// Why a device that is reached by direct transfers on rings, or is not, is not polled; `None`: it is.
fn why_unpolled(
    file: &File,
    opened: &fs::Metadata,
    options: &OpenOptions,
    reached: bool,
) -> Option<String> {
    let why = if options.reap == Reaping::Interrupt {
        "with reap=interrupt nobody looks"
    } else if options.topology == Topology::PerDevice {
        "with topology=per-device all is on the rings of drivers"
    } else if !reached {
        "it is not reached by direct transfers of io_uring"
    } else if !opened.file_type().is_block_device() {
        "it is a file, and not a block device"
    } else if !polls(opened.rdev()) {
        "it has no queues that are polled (its queue/io_poll in /sys/block is 0; drivers make them as they are loaded, nvme by \
         poll_queues=N)"
    } else {
        let tried = uring::polled::try_read(file);
        return tried.err().map(|e| format!("a polled read fails: {e}"));
    };
    Some(why.to_owned())
}

/// Whether that is a block device with queues that are polled, as far as the kernel says.
pub fn has_poll_queues(path: &Path) -> bool {
    let device = fs::metadata(path)
        .ok()
        .filter(|meta| meta.file_type().is_block_device());
    device.is_some_and(|device| polls(device.rdev()))
}

/// The same of a block device.
fn polls(device: u64) -> bool {
    of_queue(device, "io_poll").is_some_and(|told| told == "1")
}

/// The NUMA node that a block device is attached to; partitions ask their disk. -1 is none.
fn numa_node(device: u64) -> Option<usize> {
    let (major, minor) = (libc::major(device), libc::minor(device));
    let base = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let places = [
        "device/numa_node",
        "device/device/numa_node",
        "../device/numa_node",
        "../device/device/numa_node",
    ];
    let texts = places
        .iter()
        .map(|place| fs::read_to_string(base.join(place)));
    let text = texts.flatten().next()?;
    text.trim().parse().ok()
}

impl BlockDevice for FileDevice {
    fn has_cache(&self) -> bool {
        !self.write_through
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn logical_block(&self) -> u32 {
        match self.through_cache.load(Ordering::Relaxed) {
            true => LEAST_BLOCK,
            false => self.logical_block,
        }
    }

    fn physical_block(&self) -> u32 {
        self.logical_block().max(self.physical_block)
    }

    fn take_smaller_blocks(&self, bytes: u32) -> io::Result<()> {
        if self.block_device || !self.direct() || bytes < LEAST_BLOCK {
            return Ok(());
        }
        sys::end_direct_io(&self.file)?;
        self.through_cache.store(true, Ordering::Relaxed);
        tracing::info!(
            "{}: read and written through the page cache of the host, where direct I/O to it takes {} bytes and more: the \
             file system was made for blocks of {bytes}",
            self.name,
            self.logical_block
        );
        Ok(())
    }

    fn memory_align(&self) -> usize {
        if self.direct() {
            self.logical_block as usize
        } else {
            1
        }
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: self.name.clone(),
            backend: match self.engine {
                Engine::Uring => "io_uring",
                Engine::Threads(_) => "preadv2+pool",
                Engine::Caller => "preadv2",
            },
            kind: if self.block_device {
                "block device"
            } else {
                "file"
            },
            direct: self.direct(),
            bytes: self.bytes,
            logical_block: self.logical_block(),
            rotational: self.rotational,
            topology: Topology::PerCore,
            reap: match self.engine {
                Engine::Uring => self.reaper.policy(),
                Engine::Threads(_) | Engine::Caller => Reaping::Interrupt,
            },
            polled: self.polled,
            numa_node: self.numa_node,
        }
    }

    fn has_writer(&self) -> &AtomicBool {
        &self.has_writer
    }

    fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        for request in requests.iter_mut() {
            let reads = matches!(request.operation, Operation::Read { .. });
            if let Some(error) = self.refuses(reads) {
                request.error = Some(error);
            }
        }
        match &self.engine {
            Engine::Uring => uring::run(self, requests, meanwhile),
            Engine::Threads(pool) => threads::run(self, pool, requests, meanwhile),
            Engine::Caller => {
                if let Some(meanwhile) = meanwhile {
                    meanwhile();
                }
                for request in requests {
                    threads::perform(self, request);
                }
            }
        }
    }

    fn read_vectored(&self, requests: &mut [Vectored<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        match &self.engine {
            Engine::Uring => uring::vectored::run(self, requests, meanwhile),
            Engine::Threads(_) | Engine::Caller => vectored::copied(self, requests, meanwhile),
        }
    }

    fn queue(self: Arc<Self>, bell: &Arc<Bell>) -> DeviceQueue {
        match &self.engine {
            Engine::Uring => DeviceQueue(Own::OnRing(self)),
            Engine::Threads(_) => DeviceQueue(Own::Alone(threads::queue(&self, bell))),
            Engine::Caller => DeviceQueue::alone(Blocking::new(self)),
        }
    }

    fn reaped(&self) -> Option<Reaped> {
        Some(self.reaper.reaped())
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let done = if self.block_device {
            sys::discard_blocks(&self.file, offset, len)
        } else {
            sys::punch_hole(&self.file, offset, len)
        };
        match done {
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
            done => done,
        }
    }

    /// Opens the same device anew without `O_EXCL` and puts that in the old one's place, so
    /// that there is no moment at which it is not open. Devices and files keep their lock.
    fn release_claim(&self) -> io::Result<()> {
        use std::os::fd::AsRawFd;
        if !self.block_device {
            return Ok(());
        }
        // Through /proc, so that it is this device whatever the path means by now.
        let path = PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        let direct = if self.direct() { libc::O_DIRECT } else { 0 };
        let again = fs::OpenOptions::new()
            .read(true)
            .write(!self.read_only)
            .custom_flags(direct)
            .open(path)?;
        sys::replace_descriptor(&self.file, again.into())
    }
}

impl Drop for FileDevice {
    fn drop(&mut self) {
        // The kernel may hold the file a moment longer than the descriptor; its lock must
        // not keep the next opener out. Without a lock this does nothing.
        if let Err(error) = self.file.unlock() {
            tracing::debug!(%error, "unlock at close");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::Array;
    use crate::block::Durability;
    use crate::buf::AlignedBuf;
    use crate::queue::{Flight, Kind, Queues, Run};
    use format::geometry::{Geometry, GeometryOptions};
    use std::os::fd::AsRawFd;
    use std::time::Duration;

    const BYTES: u64 = 64 << 20;

    /// An array of two image files for blocks of 512 bytes, and what lies at its beginning.
    fn made(home: &Path) -> [PathBuf; 2] {
        let paths = ["a", "b"].map(|name| home.join(name));
        for path in &paths {
            create_image(path, BYTES).unwrap();
        }
        let options = GeometryOptions {
            journal_align: Some(LEAST_BLOCK),
            ..GeometryOptions::default()
        };
        let geometry = Geometry::plan(&[BYTES; 2], options).unwrap();
        let devices = open_devices(&paths, &OpenOptions::default()).unwrap();
        let array = Array::create(devices, geometry, "test", [1; 16], [7; 16]).unwrap();
        array.write_labels().unwrap();
        array.write(512, &[5; 1024], Durability::Durable).unwrap();
        paths
    }

    /// As on a host where direct I/O takes so many bytes.
    fn open_on_host(path: &Path, options: &OpenOptions, direct_bytes: u32) -> FileDevice {
        let engine = match options.backend {
            Backend::Threads => Engine::Threads(Arc::new(Pool::start("test-io", 2).unwrap())),
            Backend::Auto | Backend::IoUring => Engine::Uring,
        };
        let mut device = FileDevice::open(path, options, engine).unwrap();
        device.logical_block = direct_bytes;
        device
    }

    /// As the kernel has it.
    fn is_direct(file: &File) -> bool {
        let info = format!("/proc/self/fdinfo/{}", file.as_raw_fd());
        let text = fs::read_to_string(info).unwrap();
        let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = i32::from_str_radix(flags.unwrap().trim(), 8).unwrap();
        flags & libc::O_DIRECT != 0
    }

    #[test]
    fn a_physical_block_is_what_the_kernel_says_between_512_and_4096_bytes() {
        for (told, bytes) in [
            (None, 512),
            (Some("512"), 512),
            (Some("4096"), 4096),
            (Some("16384"), 4096),
            (Some("0"), 512),
            (Some("much"), 512),
        ] {
            assert_eq!(physical_block(told), bytes, "{told:?}");
        }
        // It is no less than what transfers need.
        let home = tempfile::tempdir().unwrap();
        create_image(&home.path().join("a"), BYTES).unwrap();
        let device = open_on_host(&home.path().join("a"), &OpenOptions::default(), 4096);
        assert_eq!(device.physical_block(), 4096);
    }

    /// It was refused, for blocks that an image file does not have.
    #[test]
    fn an_image_that_came_from_a_host_with_smaller_direct_io_is_used_through_the_cache() {
        let home = tempfile::tempdir().unwrap();
        let paths = made(home.path());
        let mut backends = vec![Backend::Threads];
        if uring::probe().is_ok() {
            backends.push(Backend::IoUring);
        }
        for (number, backend) in (0u8..).zip(backends) {
            for topology in Topology::ALL {
                for (read_only, hosts) in [
                    (false, [4096, 4096]),
                    (false, [512, 4096]),
                    (true, [4096, 512]),
                ] {
                    let options = OpenOptions {
                        backend,
                        topology,
                        read_only,
                        ..OpenOptions::default()
                    };
                    let devices: Vec<Arc<FileDevice>> = paths
                        .iter()
                        .zip(hosts)
                        .map(|(path, bytes)| Arc::new(open_on_host(path, &options, bytes)))
                        .collect();
                    let was_direct: Vec<bool> = devices.iter().map(|d| d.direct()).collect();
                    let members = devices.iter().map(|d| Arc::clone(d) as _).collect();
                    let members = topology.over(members).unwrap();
                    let array = Array::assemble(members, read_only).unwrap();
                    for ((device, bytes), was_direct) in devices.iter().zip(hosts).zip(was_direct) {
                        let direct = was_direct && bytes == 512;
                        assert_eq!(is_direct(&device.file), direct, "{options:?}");
                        assert_eq!(device.info().direct, direct);
                        assert_eq!(device.info().logical_block, 512);
                    }
                    if !read_only {
                        // On both members, and neither at a multiple of 4,096 bytes.
                        let data = vec![number + 1; 1 << 20];
                        array.write(1536, &data, Durability::Volatile).unwrap();
                        array.flush().unwrap();
                        array.write(1536, &[9; 512], Durability::Durable).unwrap();
                        assert_eq!(array.flush_failures(), 0);
                    }
                    let mut read = vec![0; (1 << 20) + 1024];
                    array.read(512, &mut read).unwrap();
                    assert!(read[..1024].iter().all(|&byte| byte == 5));
                    assert!(read[1024..1536].iter().all(|&byte| byte == 9));
                    assert!(read[1536..].iter().all(|&byte| byte == number + 1));
                }
            }
        }
    }

    #[test]
    fn an_image_for_which_direct_io_is_good_enough_has_it() {
        let home = tempfile::tempdir().unwrap();
        let paths = made(home.path());
        let options = OpenOptions::default();
        let device = open_on_host(&paths[0], &options, LEAST_BLOCK);
        if !device.direct() {
            return base::skip("direct I/O in the folder of temporary files");
        }
        let other = open_on_host(&paths[1], &options, LEAST_BLOCK);
        let devices: [Arc<FileDevice>; 2] = [device, other].map(Arc::new);
        let members = devices.iter().map(|d| Arc::clone(d) as _).collect();
        let array = Array::assemble(members, false).unwrap();
        assert!(devices.iter().all(|device| is_direct(&device.file)));
        assert_eq!(array.memory_align(), 512);
    }

    /// They had the threads of all devices, which one that hung kept from the others.
    #[test]
    fn what_is_in_flight_needs_none_of_the_threads_that_all_devices_have() {
        let home = tempfile::tempdir().unwrap();
        let paths = made(home.path());
        let pool = Arc::new(Pool::start("test-io", 2).unwrap());
        let open = |path| {
            let engine = Engine::Threads(Arc::clone(&pool));
            Arc::new(FileDevice::open(path, &OpenOptions::default(), engine).unwrap()) as _
        };
        let devices: Vec<Arc<dyn BlockDevice>> = paths.iter().map(|path| open(path)).collect();
        let array = Arc::new(Array::assemble(devices, false).unwrap());
        let gate = Arc::new(std::sync::Barrier::new(3));
        for _ in 0..2 {
            let gate = Arc::clone(&gate);
            pool.give(move || _ = gate.wait());
        }
        let mut queues = Queues::new(&array, 1, 1).unwrap();
        let flight = Flight {
            kind: Kind::Read,
            memory: AlignedBuf::zeroed(512),
            tag: 0,
        };
        let run = Run {
            byte: 1024,
            at: 0,
            len: 512,
        };
        let rung = queues.bell().rung();
        queues.submit(flight, &[run]).unwrap();
        queues.ring();
        queues.wait(Some(rung), Some(Duration::from_secs(10)));
        let mut landed = Vec::new();
        queues.reap(&mut landed);
        gate.wait();
        let landed = landed.pop().expect("it waits for those threads");
        landed.result.unwrap();
        assert!(landed.memory.iter().all(|&byte| byte == 5));
    }

    /// It wrote to a file that the process before it had removed, and said that all had gone well.
    #[test]
    fn who_gets_the_lock_of_a_removed_image_does_not_use_it() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("image");
        let created = create_image(&path, 1 << 20).unwrap();
        let file = File::open(&path).unwrap();
        assert_eq!(created.ino(), file.metadata().unwrap().ino());
        lock_file(&file, &path, false).unwrap();
        fs::remove_file(&path).unwrap();
        let error = lock_file(&file, &path, false).unwrap_err();
        assert!(error.to_string().contains("removed or replaced"), "{error}");
        create_image(&path, 1 << 20).unwrap();
        assert!(lock_file(&file, &path, false).is_err());
    }
}
