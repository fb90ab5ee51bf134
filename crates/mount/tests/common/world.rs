//! A file system over image files, and its mount.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::fs::{Clock, FileSystem, FsOptions, MkfsOptions};
use device::Array;
use format::geometry::{Geometry, GeometryOptions};
use mount::{MountOptions, Unmounter};

use crate::common::{Session, has_fuse};

const DEVICE_BYTES: u64 = 256 << 20;

type Device = Arc<dyn device::BlockDevice>;
type Ready<'a> = &'a dyn Fn(Unmounter);

/// Two image files with a file system on them, and a folder to mount at.
pub struct World {
    pub dir: tempfile::TempDir,
    /// Bytes of its page cache; `None`: as many as it likes.
    pub cache: Option<usize>,
    /// What the file system goes by, which then does nothing by itself: whoever has this sets it forward, and ticks. `None`: the machine's.
    pub clock: Option<Clock>,
}

pub struct Mounted {
    pub at: PathBuf,
    pub session: Session,
    pub fs: Arc<FileSystem>,
}

impl World {
    /// `None` where this machine has no FUSE.
    pub fn new() -> Option<World> {
        if !has_fuse() {
            return None;
        }
        let world = World {
            dir: tempfile::tempdir().unwrap(),
            cache: None,
            clock: None,
        };
        // Some tests are other users.
        fs::set_permissions(world.dir.path(), Permissions::from_mode(0o755)).unwrap();
        for image in world.images() {
            device::create_image(&image, DEVICE_BYTES).unwrap();
        }
        fs::create_dir(world.dir.path().join("mnt")).unwrap();
        let geometry = Geometry::plan(&[DEVICE_BYTES; 2], GeometryOptions::default()).unwrap();
        let devices = world.devices();
        let array = Array::create(devices, geometry, "test", [7; 16], [9; 16]).unwrap();
        let array = Arc::new(array);
        FileSystem::mkfs(&array, &MkfsOptions::default()).unwrap();
        array.write_labels().unwrap();
        Some(world)
    }

    fn images(&self) -> [PathBuf; 2] {
        ["a.img", "b.img"].map(|name| self.dir.path().join(name))
    }

    fn devices(&self) -> Vec<Device> {
        device::open_devices(&self.images(), &device::OpenOptions::default()).unwrap()
    }

    pub fn mount(&self, options: &str) -> Mounted {
        self.mount_over(options, |device| device)
    }

    /// With something before each of the devices.
    pub fn mount_over(&self, options: &str, before: impl Fn(Device) -> Device) -> Mounted {
        self.mount_by(options, before, |fs, path, options, ready| {
            mount::mount(fs, path, options, None, None, ready)
        })
    }

    /// Served by somebody else.
    pub fn mount_by<S>(&self, options: &str, before: impl Fn(Device) -> Device, serve: S) -> Mounted
    where
        S: FnOnce(Arc<FileSystem>, &Path, &MountOptions, Ready<'_>) -> Result<(), mount::Error>
            + Send
            + 'static,
    {
        let devices = self.devices().into_iter().map(before).collect();
        let array = Array::assemble(devices, false).unwrap();
        let options = MountOptions::parse(options).unwrap();
        let mut wanted = FsOptions::default();
        if let Some(cache) = self.cache {
            wanted.data.cache_bytes = cache;
        }
        if let Some(clock) = &self.clock {
            wanted = wanted.without_threads(clock.clone());
        }
        let fs = FileSystem::open(Arc::new(array), wanted).unwrap();
        let at = self.dir.path().join("mnt");
        let (served, path) = (Arc::clone(&fs), at.clone());
        let session = Session::start(move |ready| serve(served, &path, &options, ready));
        Mounted { at, session, fs }
    }
}

impl Mounted {
    pub fn path(&self, name: &str) -> PathBuf {
        self.at.join(name)
    }

    /// Unmounts, waits until the session is over, and closes.
    pub fn end(self) {
        self.session.end();
        self.fs.close().unwrap();
        assert_eq!(Arc::strong_count(&self.fs), 1, "something is still open");
    }
}
