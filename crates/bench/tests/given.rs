//! Devices that are given (`--device`): what somebody else uses is left as it is.

use std::fs::{File, Metadata};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bench::ior::{Access, Layout, Way};
use bench::reap::Part;
use bench::target::{Kernel, Place, Remedies, Storage, Target};
use bench::{Error, array, fsync, ior, reap};

const MIB: u64 = 1 << 20;
const PIECE: usize = 1 << 20;
/// Of a database on the bare device, say: no signature that anybody knows.
const UNKNOWN: u8 = 0xaa;

/// A file of such bytes.
struct Data {
    path: PathBuf,
    then: Metadata,
    /// So many bytes at its beginning and as many at its end; a hole is between.
    ends: u64,
}

impl Data {
    fn make(path: PathBuf, bytes: u64) -> Data {
        let mut file = File::create_new(&path).unwrap();
        file.set_len(bytes).unwrap();
        let ends = bytes.min(64 * MIB) / 2;
        for start in [0, bytes - ends] {
            file.seek(SeekFrom::Start(start)).unwrap();
            for _ in 0..ends / MIB {
                file.write_all(&[UNKNOWN; PIECE]).unwrap();
            }
        }
        file.sync_all().unwrap();
        let then = file.metadata().unwrap();
        Data { path, then, ends }
    }

    fn is_unchanged(&self) -> bool {
        let mut file = File::open(&self.path).unwrap();
        let now = file.metadata().unwrap();
        let mut piece = vec![0; PIECE];
        let mut is_unknown = |start| {
            file.seek(SeekFrom::Start(start)).unwrap();
            (0..self.ends / MIB).all(|_| {
                file.read_exact(&mut piece).unwrap();
                piece.iter().all(|&byte| byte == UNKNOWN)
            })
        };
        is_unknown(0) && is_unknown(now.len() - self.ends) && now.blocks() == self.then.blocks()
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The device is named, and what helps.
fn assert_in_use<T>(done: Result<T, Error>, path: &Path, suite: &str) {
    let Err(error) = done else {
        panic!("{suite} ran on what is in use");
    };
    let told = error.to_string();
    let path = path.to_str().unwrap();
    assert!(
        told.contains(path) && told.contains("is in use") && told.contains("close it first"),
        "{suite}: {told}"
    );
}

fn run_array(devices: &[PathBuf]) -> Result<(), Error> {
    let options = array::Options {
        devices: vec![devices.len()],
        depth: 4,
        threads: 1,
        time: Duration::from_millis(10),
        runs: 1,
        bytes: 64 * MIB,
        against: Vec::new(),
        storage: Storage::Devices(devices.to_vec()),
        latency: None,
        reap: device::Reaping::default(),
        memory: 32 << 20,
    };
    array::run(&options, &|_| {}).map(drop)
}

fn run_ior(devices: &[PathBuf]) -> Result<(), Error> {
    let options = ior::Options {
        layouts: vec![Layout::Shared],
        accesses: vec![Access::Random],
        ways: vec![Way::Direct],
        requests: Vec::new(),
        threads: vec![1],
        devices: devices.len(),
        depth: 2,
        bytes: 8 * MIB,
        time: Duration::from_millis(10),
        runs: 1,
        against: Vec::new(),
        storage: Storage::Devices(devices.to_vec()),
        memory: 64 << 20,
    };
    ior::run(&options, &|_| {}).map(drop)
}

fn run_fsync(device: &Path, against: Vec<Target>) -> Result<(), Error> {
    let options = fsync::Options {
        kinds: vec![fsync::Kind::Append],
        threads: vec![1],
        time: Duration::from_millis(10),
        runs: 1,
        against,
        storage: Storage::Devices(vec![device.to_owned()]),
        slow: None,
        reap: device::Reaping::default(),
        memory: 64 << 20,
    };
    fsync::run(&options, &|_| {}).map(drop)
}

fn run_reap(device: &Path) -> Result<(), Error> {
    let options = reap::Options {
        parts: vec![Part::Device],
        time: Duration::from_millis(10),
        runs: 1,
        dir: None,
        device: Some(device.to_owned()),
        depths: vec![1],
        overwrite: true,
    };
    reap::run(&options, &|_| {}).map(drop)
}

/// Zeros were written to its ends, or to all of it, after the suite had failed, or before it did.
#[test]
fn a_file_that_somebody_has_locked_is_refused_and_stays_as_it_is() {
    let home = tempfile::tempdir().unwrap();
    let file = |name: &str| Data::make(home.path().join(name), 2048 * MIB);
    let [free, used] = ["free", "used"].map(file);
    let owner = File::open(&used.path).unwrap();
    owner.try_lock().unwrap();
    let both = [free.path.clone(), used.path.clone()];
    assert_in_use(run_array(&both), &used.path, "array");
    assert_in_use(run_ior(&both), &used.path, "ior");
    assert_in_use(run_reap(&used.path), &used.path, "reap");
    if is_root() {
        assert_in_use(run_fsync(&used.path, Vec::new()), &used.path, "fsync");
    }
    assert!(used.is_unchanged());
    // Nor does anything happen to one that could be had, while another one cannot.
    assert!(free.is_unchanged());
}

/// A file system's journal elsewhere, or what a mapped device lies on: nothing is mounted from it.
#[test]
fn a_block_device_that_somebody_has_claimed_is_refused_and_stays_as_it_is() {
    if !is_root() || !Path::new("/dev/loop-control").exists() {
        return base::skip("loop devices");
    }
    let home = tempfile::tempdir().unwrap();
    let data = Data::make(home.path().join("data"), 2048 * MIB);
    let image = File::options().read(true).write(true).open(&data.path);
    let (disk, _attached) = base::sys::attach_loop(&image.unwrap()).unwrap();
    let mut options = File::options();
    options.read(true).custom_flags(libc::O_EXCL);
    let _owner = options.open(&disk).unwrap();
    let disks = std::slice::from_ref(&disk);
    assert_in_use(run_array(disks), &disk, "array");
    assert_in_use(run_ior(disks), &disk, "ior");
    assert_in_use(run_fsync(&disk, Vec::new()), &disk, "fsync");
    assert_in_use(run_reap(&disk), &disk, "reap");
    assert!(data.is_unchanged());
}

/// Each claims what it writes to, and nobody is in the way of whoever comes next.
#[test]
fn devices_that_nobody_uses_are_measured_and_wiped() {
    let home = tempfile::tempdir().unwrap();
    let all = ["a", "b"].map(|name| Data::make(home.path().join(name), 512 * MIB));
    let paths = all.each_ref().map(|data| data.path.clone());
    run_reap(&paths[0]).unwrap();
    run_array(&paths).unwrap();
    run_ior(&paths).unwrap();
    for path in &paths {
        assert_eq!(device::probe(path), None);
    }
    if !is_root() || !Path::new("/dev/loop-control").exists() {
        return base::skip("loop devices");
    }
    let data = Data::make(home.path().join("c"), 2048 * MIB);
    let image = File::options().read(true).write(true).open(&data.path);
    let (disk, _attached) = base::sys::attach_loop(&image.unwrap()).unwrap();
    let ext4 = Target::Kernel(Kernel::Ext4);
    let against: Vec<Target> = [ext4].into_iter().filter(|t| t.check().is_ok()).collect();
    run_fsync(&disk, against).unwrap();
    run_array(std::slice::from_ref(&disk)).unwrap();
    run_ior(std::slice::from_ref(&disk)).unwrap();
    assert_eq!(device::probe(&disk), None);
    assert!(!data.is_unchanged());
}

fn place(devices: &[&Data]) -> Place {
    let paths = devices.iter().map(|data| data.path.clone());
    let storage = Storage::Devices(paths.collect());
    Place::new(&storage, 2 * MIB, false, Remedies::less("")).unwrap()
}

#[test]
fn only_devices_that_a_side_got_are_wiped() {
    let home = tempfile::tempdir().unwrap();
    let [first, second] = ["a", "b"].map(|name| Data::make(home.path().join(name), 8 * MIB));
    drop(place(&[&first, &second]));
    assert!(first.is_unchanged() && second.is_unchanged());
    let place = place(&[&first, &second]);
    drop(place.single().unwrap());
    drop(place);
    assert!(!first.is_unchanged() && second.is_unchanged());
    let content = std::fs::read(&first.path).unwrap();
    let zeros = |part: &[u8]| part.iter().all(|&byte| byte == 0);
    assert!(zeros(&content[..PIECE]) && zeros(&content[content.len() - PIECE..]));
}

#[test]
fn a_device_that_somebody_takes_meanwhile_is_handed_to_no_side_and_not_wiped() {
    let home = tempfile::tempdir().unwrap();
    let data = Data::make(home.path().join("a"), 8 * MIB);
    let locked = || {
        let owner = File::open(&data.path).unwrap();
        owner.try_lock().unwrap();
        owner
    };
    // Before the first side.
    let before = place(&[&data]);
    let owner = locked();
    assert_in_use(before.array(), &data.path, "a place");
    drop(owner);
    drop(before);
    assert!(data.is_unchanged());
    // After the last one.
    let after = place(&[&data]);
    drop(after.array().unwrap());
    let _owner = locked();
    drop(after);
    assert!(data.is_unchanged());
}
