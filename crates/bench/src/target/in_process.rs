//! Sheaf in this process: a fresh file system over the storage, opened as a program that
//! links the library opens it, with journal, checkpoints and checksums.

use std::path::PathBuf;
use std::sync::Arc;

use base::clock::process_cpu_ns;
use device::{Array, OpenOptions, Reaped, Reaping, Topology};
use engine::RecoveryReport;
use format::geometry::{Geometry, GeometryOptions};
use fs::{At, Caller, Dir, FileSystem, FsOptions, Ino, MkfsOptions, OpenFile, ROOT};

use super::{ContextQueue, Side, Slow, short};
use crate::Error;
use crate::runner::Background;

/// Permission bits of what is made, as FxMark has them.
const MODE: u32 = 0o700;

/// A directory: by its number, and by a handle where calls are relative to open directories.
#[derive(Clone)]
pub struct Folder {
    ino: Ino,
    handle: Option<Arc<Dir>>,
}

impl Folder {
    fn at(&self) -> At<'_> {
        match &self.handle {
            Some(dir) => At::from(&**dir),
            None => At::from(self.ino),
        }
    }
}

/// How a file system is made where not as by default.
#[derive(Clone, Debug, Default)]
pub struct Arrangement {
    /// Size of the journal in bytes.
    pub journal: Option<u64>,
    /// Devices are as slow as that.
    pub slow: Option<Slow>,
    pub topology: Topology,
    pub reap: Reaping,
}

/// An open file system.
pub struct InProcess {
    fs: Arc<FileSystem>,
    root: Folder,
    who: Caller,
    io: String,
    closed: bool,
}

impl InProcess {
    /// Makes a file system on the devices and opens it with `memory` bytes for all it takes.
    pub fn make(devices: &[PathBuf], memory: usize) -> Result<InProcess, Error> {
        Self::with(devices, FsOptions::default().with_memory(memory))
    }

    /// Makes a file system on the devices and opens it so.
    pub fn with(devices: &[PathBuf], options: FsOptions) -> Result<InProcess, Error> {
        Self::arranged(devices, options, &Arrangement::default())
    }

    /// Makes a file system as it shall be arranged, and opens it so.
    pub fn arranged(
        devices: &[PathBuf],
        options: FsOptions,
        arrangement: &Arrangement,
    ) -> Result<InProcess, Error> {
        mkfs(devices, arrangement)?;
        Self::open_slow(devices, options, arrangement)
    }

    /// Opens a file system that is on the devices.
    pub fn open(devices: &[PathBuf], options: FsOptions) -> Result<InProcess, Error> {
        Self::open_slow(devices, options, &Arrangement::default())
    }

    fn open_slow(
        devices: &[PathBuf],
        options: FsOptions,
        arrangement: &Arrangement,
    ) -> Result<InProcess, Error> {
        let how = OpenOptions {
            // Below a slow device nothing is waited for.
            reap: match arrangement.slow {
                Some(_) => Reaping::Interrupt,
                None => arrangement.reap,
            },
            ..OpenOptions::default()
        };
        let mut opened = device::open_devices(devices, &how)?;
        if let Some(slow) = &arrangement.slow {
            opened = slow.reaping(arrangement.reap).over_all(opened);
        }
        opened = arrangement.topology.over(opened)?;
        let io = opened.first().map_or(String::new(), |device| {
            let info = device.info();
            let direct = if info.direct { "direct" } else { "buffered" };
            format!("{}, {direct}", info.backend)
        });
        let array = Arc::new(Array::assemble(opened, false)?);
        let fs = FileSystem::open(array, options)?;
        let root = Folder {
            ino: ROOT,
            handle: None,
        };
        Ok(InProcess {
            fs,
            root,
            who: Caller::root(),
            io,
            closed: false,
        })
    }

    /// Opens a file with these flags besides those for reading and writing: `O_DIRECT`, as a rule.
    pub fn open_with(&self, dir: &Folder, name: &str, flags: i32) -> Result<Arc<OpenFile>, Error> {
        let ino = self.fs.lookup(dir.at(), name.as_bytes())?.ino;
        Ok(self.fs.open_file(ino, libc::O_RDWR | flags)?)
    }

    /// Makes these writes, each (file, offset, bytes), in one step, durably.
    pub fn transaction<'a>(
        &self,
        writes: impl Iterator<Item = (&'a OpenFile, u64, &'a [u8])>,
    ) -> Result<(), Error> {
        let mut transaction = self.fs.transaction(&self.who)?;
        for (file, offset, data) in writes {
            transaction.write(file.ino(), offset, data)?;
        }
        Ok(transaction.commit()?)
    }

    /// What waits for the devices came to so far.
    pub fn reaped(&self) -> Reaped {
        self.fs.store().array().reaped()
    }

    /// Transfers in flight on files of Sheaf's, by a context of their own; each slot has memory for `bytes`.
    pub fn queue(
        &self,
        files: Vec<Arc<OpenFile>>,
        slots: usize,
        bytes: usize,
    ) -> Result<ContextQueue, Error> {
        let depth = u32::try_from(slots).unwrap_or(u32::MAX);
        let context = self.fs.io_context(depth)?;
        Ok(ContextQueue::new(context, files, slots, bytes)?)
    }

    /// Reads and writes of all devices so far, for whatever reason.
    pub fn device_requests(&self) -> u64 {
        let stats = self.fs.store().array().stats();
        stats.devices.iter().map(|d| d.reads + d.writes).sum()
    }

    /// Pages that were cleaned so far, the writes that took, and how often an overwrite waited for that.
    pub fn cleaning(&self) -> [u64; 3] {
        let metrics = self.fs.metrics();
        let names = [
            "sheaf_precleaned_pages_total",
            "sheaf_precleaning_writes_total",
            "sheaf_room_waits_total",
        ];
        names.map(|name| {
            let found = metrics.iter().find(|metric| metric.name == name);
            match found.map(|metric| &metric.value) {
                Some(fs::Value::Counter(count)) => *count as u64,
                _ => 0,
            }
        })
    }

    /// What opening found to recover.
    pub fn recovery(&self) -> &RecoveryReport {
        self.fs.recovery()
    }

    /// Ends the use as a cut of power does: nothing is written any more.
    pub fn cut(mut self) {
        self.closed = true;
        self.fs.store().latch("a benchmark cuts it off");
        // That it is cut off is what closing reports.
        let _ = self.fs.close();
    }

    /// From now on directories are open, and calls go by their handles.
    pub fn relative(mut self) -> Result<InProcess, Error> {
        self.root.handle = Some(Arc::new(self.fs.open_dir(ROOT)?));
        Ok(self)
    }

    /// Makes durable what was done, by a commit.
    pub fn commit(&self) -> Result<(), Error> {
        Ok(self.fs.sync()?)
    }

    /// Makes all operations so far durable, and not the data of files: what the store does by itself.
    pub fn commit_operations(&self) -> Result<(), Error> {
        Ok(self.fs.store().sync().map_err(fs::Error::from)?)
    }

    /// Makes a checkpoint.
    pub fn checkpoint(&self) -> Result<(), Error> {
        Ok(self.fs.store().checkpoint().map_err(fs::Error::from)?)
    }

    /// Leaves nothing to commit and nothing to checkpoint.
    pub fn settle(&self) -> Result<(), Error> {
        self.commit()?;
        self.checkpoint()
    }

    /// The newest checkpoint's number; each has the next one.
    pub fn newest_checkpoint(&self) -> u64 {
        self.fs.store().newest_checkpoint()
    }

    /// Bytes logged in the journal since it was opened.
    pub fn logged_bytes(&self) -> u64 {
        self.fs.store().journal_bytes()
    }

    /// Bytes written to all devices so far, for whatever reason.
    pub fn written_bytes(&self) -> u64 {
        written(self.fs.store().array())
    }

    /// Bytes of metadata written so far, by cause.
    pub fn written_by_cause(&self) -> engine::BytesWritten {
        self.fs.store().bytes_written()
    }

    /// Removes a directory of the root and all below it by up to `threads` threads; returns the files in it.
    pub fn remove_all(&self, name: &str, threads: usize) -> Result<u64, Error> {
        let (name, progress) = (name.as_bytes(), |_| {});
        let removed = self
            .fs
            .remove_all(&self.who, ROOT, name, threads, &progress);
        Ok(removed?.files)
    }

    /// How the devices are reached: by which system interface, and whether past the page cache.
    pub fn io(&self) -> String {
        self.io.clone()
    }

    /// Ends the use, and tells the bytes written to all devices until then.
    pub fn close_counting(self) -> Result<u64, Error> {
        let array = Arc::clone(self.fs.store().array());
        self.close()?;
        Ok(written(&array))
    }

    /// Ends the use; an error is one of writing back.
    pub fn close(mut self) -> Result<(), Error> {
        self.closed = true;
        Ok(self.fs.close()?)
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        if !self.closed
            && let Err(error) = self.fs.close()
        {
            tracing::warn!("a file system that a benchmark gives up: {error}");
        }
    }
}

fn written(array: &Array) -> u64 {
    let stats = array.stats();
    let bytes = stats.devices.iter().map(|device| device.written_bytes);
    bytes.sum()
}

fn mkfs(paths: &[PathBuf], arrangement: &Arrangement) -> Result<(), Error> {
    let devices = device::open_devices(paths, &OpenOptions::default())?;
    let sizes: Vec<u64> = devices.iter().map(|d| d.bytes()).collect();
    let options = GeometryOptions {
        journal_bytes: arrangement.journal,
        journal_align: device::journal_align(&devices),
        ..GeometryOptions::default()
    };
    let geometry = Geometry::plan(&sizes, options)?;
    let uuid = device::new_uuid().map_err(Error::no_entropy)?;
    let key = base::rng::entropy().map_err(Error::no_entropy)?;
    let array = Arc::new(Array::create(devices, geometry, "bench", uuid, key)?);
    FileSystem::mkfs(&array, &MkfsOptions::default())?;
    array.write_labels()?;
    Ok(())
}

impl Side for InProcess {
    type Dir = Folder;
    type File = Arc<OpenFile>;

    fn root(&self) -> Folder {
        self.root.clone()
    }

    fn make_dir(&self, parent: &Folder, name: &str) -> Result<Folder, Error> {
        let name = name.as_bytes();
        let ino = self.fs.mkdir(&self.who, parent.at(), name, MODE)?.ino;
        let handle = match &self.root.handle {
            Some(_) => Some(Arc::new(self.fs.open_dir(ino)?)),
            None => None,
        };
        Ok(Folder { ino, handle })
    }

    fn create(&self, dir: &Folder, name: &str) -> Result<Arc<OpenFile>, Error> {
        let name = name.as_bytes();
        let made = self
            .fs
            .create(&self.who, dir.at(), name, MODE, libc::O_RDWR);
        Ok(made?.1)
    }

    fn open(&self, dir: &Folder, name: &str) -> Result<Arc<OpenFile>, Error> {
        let ino = self.fs.lookup(dir.at(), name.as_bytes())?.ino;
        Ok(self.fs.open_file(ino, libc::O_RDWR)?)
    }

    fn unlink(&self, dir: &Folder, name: &str) -> Result<(), Error> {
        Ok(self.fs.unlink(&self.who, dir.at(), name.as_bytes())?)
    }

    fn rename(
        &self,
        dir: &Folder,
        name: &str,
        new_dir: &Folder,
        new_name: &str,
    ) -> Result<(), Error> {
        let (name, new_name) = (name.as_bytes(), new_name.as_bytes());
        let renamed = self
            .fs
            .rename(&self.who, dir.at(), name, new_dir.at(), new_name, 0);
        Ok(renamed?)
    }

    fn stat(&self, dir: &Folder, path: &str) -> Result<u64, Error> {
        Ok(self.fs.stat_at(dir.at(), path.as_bytes())?.size)
    }

    fn truncate(&self, dir: &Folder, name: &str, size: u64) -> Result<(), Error> {
        let ino = self.fs.lookup(dir.at(), name.as_bytes())?.ino;
        Ok(self.fs.truncate(&self.who, ino, size)?)
    }

    fn list(&self, dir: &Folder, each: &mut dyn FnMut() -> bool) -> Result<(), Error> {
        Ok(self.fs.readdir(dir.at(), 0, &mut |_| each())?)
    }

    fn read(&self, file: &Arc<OpenFile>, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        short(self.fs.read(file, offset, buf)?, buf.len())
    }

    fn write(&self, file: &Arc<OpenFile>, offset: u64, data: &[u8]) -> Result<(), Error> {
        short(self.fs.write(file, offset, data)?, data.len())
    }

    fn fsync(&self, file: &Arc<OpenFile>) -> Result<(), Error> {
        Ok(self.fs.fsync(file, false)?)
    }

    fn fdatasync(&self, file: &Arc<OpenFile>) -> Result<(), Error> {
        Ok(self.fs.fsync(file, true)?)
    }

    fn fstat(&self, file: &Arc<OpenFile>) -> Result<u64, Error> {
        Ok(self.fs.getattr(file.ino())?.size)
    }

    fn sync(&self) -> Result<(), Error> {
        Ok(self.fs.sync()?)
    }

    fn cpu_ns(&self) -> Result<u64, Error> {
        Ok(process_cpu_ns())
    }

    fn background(&self) -> Option<Background> {
        let store = self.fs.store().counters();
        let metrics = self.fs.metrics().into_iter();
        let mut synced = metrics.filter(|metric| metric.name == "sheaf_fsync_waits_total");
        let commits = synced.find(|metric| {
            let label = metric.label.as_ref();
            label.is_some_and(|(_, value)| value == "commit")
        });
        let sync_commits = match commits?.value {
            fs::Value::Counter(value) => value as u64,
            _ => return None,
        };
        Some(Background {
            commits: store.batches.count,
            sync_commits,
            checkpoints: store.checkpoints.count,
            logged_bytes: self.logged_bytes(),
            waited_ns: store.paced.ns + store.stalled.ns,
        })
    }
}
