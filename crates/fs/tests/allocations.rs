//! Reads take no memory of their own: requests in flight have what a context has from its beginning, and a read that waits for its device goes to
//! the caller's memory, or by memory that its thread keeps.

use base::allocations::{Counting, of_this_thread};
use device::{AlignedBuf, Array, OpenOptions, create_image, open_devices};
use format::geometry::{Geometry, GeometryOptions};
use fs::{Caller, Completion, FileSystem, FsOptions, MkfsOptions, OpenFile, ROOT, Request};
use std::path::PathBuf;
use std::sync::Arc;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const PAGE: usize = 4096;
const PAGES: u64 = 512;
const DEPTH: u64 = 32;

fn file_system() -> (tempfile::TempDir, Arc<FileSystem>) {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = (0..2).map(|i| dir.path().join(i.to_string())).collect();
    for path in &paths {
        create_image(path, 64 << 20).unwrap();
    }
    let devices = open_devices(&paths, &OpenOptions::default()).unwrap();
    let geometry = Geometry::plan(&[64 << 20; 2], GeometryOptions::default()).unwrap();
    let array = Array::create(devices, geometry, "test", [7; 16], [9; 16]).unwrap();
    let array = Arc::new(array);
    FileSystem::mkfs(&array, &MkfsOptions::default()).unwrap();
    array.write_labels().unwrap();
    (dir, FileSystem::open(array, FsOptions::default()).unwrap())
}

/// One that is read past the cache, with all its pages on the devices.
fn large_file(fs: &FileSystem) -> Arc<OpenFile> {
    let flags = libc::O_RDWR | libc::O_DIRECT;
    let (_, file) = fs
        .create(&Caller::root(), ROOT, b"file", 0o644, flags)
        .unwrap();
    let written = fs.write(&file, 0, &AlignedBuf::zeroed(PAGES as usize * PAGE));
    assert_eq!(written.unwrap(), PAGES as usize * PAGE);
    fs.fsync(&file, false).unwrap();
    file
}

#[test]
fn a_read_that_waits_for_its_device_allocates_nothing() {
    let (_dir, fs) = file_system();
    let file = large_file(&fs);
    let mut page = AlignedBuf::zeroed(PAGE);
    // Of part of a page, and of a whole one.
    let mut read = |number: u64| {
        let at = number * 7 % PAGES * PAGE as u64;
        assert_eq!(fs.read(&file, at, &mut page).unwrap(), PAGE);
        assert_eq!(fs.read(&file, at + 100, &mut page[..500]).unwrap(), 500);
    };
    (0..10).for_each(&mut read);
    let before = of_this_thread();
    (10..110).for_each(&mut read);
    assert_eq!(of_this_thread() - before, 0);
}

#[test]
fn a_read_in_flight_or_of_cached_pages_allocates_nothing() {
    let (_dir, fs) = file_system();
    let file = large_file(&fs);
    let cached = fs.open_file(file.ino(), libc::O_RDONLY).unwrap();
    fs.read(&cached, 0, &mut [0; 16 * PAGE]).unwrap();
    let mut context = fs.io_context(DEPTH as u32).unwrap();
    let mut requests: Vec<(u64, Request)> = Vec::with_capacity(DEPTH as usize);
    let mut out: Vec<Completion> = Vec::with_capacity(DEPTH as usize);
    let mut bufs: Vec<AlignedBuf> = (0..DEPTH).map(|_| AlignedBuf::zeroed(PAGE)).collect();
    let mut round = |number: u64| {
        for (i, buf) in bufs.drain(..).enumerate() {
            let nth = number * DEPTH + i as u64;
            let (file, page) = match nth % 4 {
                0 => (&cached, nth % 16),
                _ => (&file, 16 + nth * 7 % (PAGES - 16)),
            };
            let request = Request::Read {
                file: Arc::clone(file),
                offset: page * PAGE as u64,
                buf,
            };
            requests.push((nth, request));
        }
        assert_eq!(context.submit(&mut requests), DEPTH as usize);
        context.wait(DEPTH as usize, &mut out, None);
        for completion in out.drain(..) {
            assert_eq!(completion.result.unwrap(), PAGE);
            bufs.push(completion.buf);
        }
        assert_eq!(bufs.len(), DEPTH as usize);
    };
    let reads = |fs: &FileSystem| {
        let stats = fs.store().array().stats();
        stats.devices.iter().map(|device| device.reads).sum::<u64>()
    };
    // What grows to its size does so at first.
    (0..50).for_each(&mut round);
    let read = reads(&fs);
    let before = of_this_thread();
    (50..150).for_each(&mut round);
    let allocated = of_this_thread() - before;
    // A device without io_uring has a job of a pool's for each.
    let uring = fs.store().array().stats().devices[0].backend == "io_uring";
    assert!(reads(&fs) - read > 100 * DEPTH / 2);
    assert!(!uring || allocated == 0, "{allocated} allocations");
}
