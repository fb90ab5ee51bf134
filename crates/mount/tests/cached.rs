//! What the kernel caches of a mounted file, and what programs that read, write and map it make of that, is one content.
//!
//! Needs /dev/fuse and root, or `fusermount3`; without them each test says so and passes.

mod common;
#[path = "common/mapping.rs"]
mod mapping;
#[path = "common/paths.rs"]
mod paths;
#[path = "common/world.rs"]
mod world;

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use base::sync::{Mutex, rank};
use mapping::Mapping;
use paths::c_path;
use world::World;

const PAGE: usize = 4096;
/// As in the kernel's `linux/f2fs.h`.
const START: libc::Ioctl = 0xf501;
const ABORT: libc::Ioctl = 0xf505;

fn create(path: &Path, content: &[u8]) -> File {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)
        .unwrap();
    file.write_all(content).unwrap();
    file
}

fn read_at(file: &File, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, at).unwrap();
    bytes
}

fn ioctl(file: &File, command: libc::Ioctl) {
    // SAFETY: the command takes no argument.
    assert_eq!(unsafe { libc::ioctl(file.as_raw_fd(), command) }, 0);
}

#[test]
fn direct_buffered_and_mapped_access_agree() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("f");
    fs::write(&path, vec![1u8; 65536]).unwrap();
    let open = |flags| {
        OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(flags)
            .open(&path)
            .unwrap()
    };
    let (buffered, direct) = (open(0), open(libc::O_DIRECT));
    #[repr(align(4096))]
    struct Page([u8; 4096]);
    let mut page = Page([2; 4096]);
    direct.write_all_at(&page.0, 4096).unwrap();
    let mut got = [0u8; 8192];
    buffered.read_exact_at(&mut got, 0).unwrap();
    assert!(got[..4096].iter().all(|&b| b == 1) && got[4096..].iter().all(|&b| b == 2));
    buffered.write_all_at(&[3; 100], 4096).unwrap();
    direct.read_exact_at(&mut page.0, 4096).unwrap();
    assert!(page.0[..100].iter().all(|&b| b == 3) && page.0[100..].iter().all(|&b| b == 2));
    let mut map = Mapping::of(&buffered, 65536);
    map.store(8192, &[9]);
    map.sync();
    drop(map);
    direct.read_exact_at(&mut page.0, 8192).unwrap();
    assert_eq!(page.0[..2], [9, 1]);
    drop((buffered, direct));
    m.end();
}

/// The kernel has such pages to itself until it writes them back, and asks where data is all the same.
#[test]
fn what_a_living_mapping_has_stored_is_data_for_everybody() {
    let Some(world) = World::new() else { return };
    let m = world.mount("noatime");
    let path = m.path("f");
    let len = 8 << 20;
    let mapper = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    mapper.set_len(len as u64).unwrap();
    let reader = File::open(&path).unwrap();
    let seek = |whence: i32, from: i64| {
        // SAFETY: the descriptor is open.
        let found = unsafe { libc::lseek(reader.as_raw_fd(), from, whence) };
        (found >= 0).then_some(found as u64)
    };
    assert_eq!(seek(libc::SEEK_DATA, 0), None);
    let mut map = Mapping::of(&mapper, len);
    for at in [1 << 20, 5 << 20] {
        map.store(at, &[7]);
        assert_eq!(seek(libc::SEEK_DATA, at as i64 - 8192), Some(at as u64));
        assert_eq!(seek(libc::SEEK_HOLE, at as i64), Some(at as u64 + 4096));
        assert_eq!(seek(libc::SEEK_DATA, at as i64 + 4096), None);
    }
    // What it stores where it has stored before.
    map.store(1 << 20, &[8]);
    assert_eq!([1, 5].map(|mib| map.load(mib << 20)), [8, 7]);
    drop(map);
    drop(mapper);
    let mut bytes = vec![0; len];
    reader.read_exact_at(&mut bytes, 0).unwrap();
    let stored: Vec<_> = bytes.iter().enumerate().filter(|(_, b)| **b > 0).collect();
    assert_eq!(stored, [(1 << 20, &8), (5 << 20, &7)]);
    drop(reader);
    m.end();
}

/// The kernel does not look whether a write of a page is on its way where it drops what it has cached of a file that is opened.
#[test]
fn what_was_written_last_is_read_whoever_opens_the_file_meanwhile() {
    const ROUNDS: u32 = 300;
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("page");
    let file = create(&path, &[0; PAGE]);
    let [over, wanted] = [false; 2].map(AtomicBool::new);
    let at_it = AtomicU32::new(0);
    let wait = |until: &dyn Fn() -> bool| {
        while !until() {
            base::thread::yield_now();
        }
    };
    let opens = || {
        loop {
            wait(&|| wanted.load(Ordering::SeqCst) || over.load(Ordering::SeqCst));
            if over.load(Ordering::SeqCst) {
                return 0;
            }
            at_it.fetch_add(1, Ordering::SeqCst);
            while wanted.load(Ordering::SeqCst) {
                read_at(&File::open(&path).unwrap(), 0, PAGE);
            }
            at_it.fetch_sub(1, Ordering::SeqCst);
        }
    };
    // The first round that ends with an old page, counted from one; 0: none.
    let writes = || {
        let is_stale = |round: &u32| {
            wanted.store(true, Ordering::SeqCst);
            wait(&|| at_it.load(Ordering::SeqCst) == 2);
            let mut last = 0;
            for n in 0..30 {
                last = (round * 30 + n) as u8;
                file.write_all_at(&[last; PAGE], 0).unwrap();
                if read_at(&file, 0, 1) != [last] {
                    break;
                }
            }
            wanted.store(false, Ordering::SeqCst);
            wait(&|| at_it.load(Ordering::SeqCst) == 0);
            read_at(&file, 0, 1) != [last]
        };
        let found = (1..=ROUNDS).find(is_stale).unwrap_or(0);
        over.store(true, Ordering::SeqCst);
        found
    };
    let found = base::thread::parallel(3, |n| if n == 0 { writes() } else { opens() });
    assert_eq!(found, [0; 3], "the kernel keeps an old page");
    drop(file);
    m.end();
}

/// What a mapping has stored may be on its way here when somebody cuts the file as it opens it.
#[test]
fn a_file_cut_as_it_is_opened_has_nothing_of_what_mappings_had_stored() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("cut");
    let len = 1 << 20;
    let file = create(&path, b"");
    for round in 0..100 {
        file.set_len(len as u64).unwrap();
        let mut map = Mapping::of(&file, len);
        map.store(0, &vec![b'A'; len]);
        // SAFETY: takes a descriptor and numbers only. It begins to write back, and does not wait.
        let begun = unsafe {
            libc::sync_file_range(file.as_raw_fd(), 0, len as i64, libc::SYNC_FILE_RANGE_WRITE)
        };
        assert_eq!(begun, 0);
        let mut cut = OpenOptions::new();
        let mut cut = cut.write(true).truncate(true).open(&path).unwrap();
        assert_eq!(cut.metadata().unwrap().len(), 0, "round {round}");
        cut.write_all(b"new").unwrap();
        drop((cut, map));
        assert_eq!(fs::read(&path).unwrap(), b"new", "round {round}");
    }
    drop(file);
    m.end();
}

#[test]
fn an_abort_takes_nothing_that_mappings_stored_before_the_start() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("atomic");
    let old = common::pattern(8 * PAGE, 1);
    let file = create(&path, &old);
    let other = File::options().read(true).write(true).open(&path).unwrap();
    let mut map = Mapping::of(&other, 8 * PAGE);
    map.store(0, b"mmm");
    map.store(5 * PAGE, b"MMM");
    ioctl(&file, START);
    file.write_all_at(b"sss", 100).unwrap();
    file.set_len(2 * PAGE as u64).unwrap();
    ioctl(&file, ABORT);
    assert_eq!(read_at(&other, 0, 4), [b"mmm", &old[3..4]].concat());
    assert_eq!(read_at(&other, 100, 3), old[100..103]);
    let fifth = 5 * PAGE;
    assert_eq!(read_at(&other, fifth as u64, 3), b"MMM");
    assert_eq!(
        read_at(&other, fifth as u64 + 3, 9),
        old[fifth + 3..fifth + 12]
    );
    drop((map, file, other));
    m.end();
}

/// The inode number that a listing of a directory has for "..".
fn parent_listed(path: &Path) -> u64 {
    let path = c_path(path);
    // SAFETY: the stream is used here alone and closed; an entry is read before the next one is asked for, and its name ends with a zero.
    unsafe {
        let stream = libc::opendir(path.as_ptr());
        assert!(!stream.is_null());
        let mut found = 0;
        loop {
            let entry = libc::readdir(stream);
            if entry.is_null() {
                break;
            }
            if std::ffi::CStr::from_ptr((*entry).d_name.as_ptr()) == c".." {
                found = (*entry).d_ino;
            }
        }
        libc::closedir(stream);
        found
    }
}

#[test]
fn a_moved_directory_is_listed_with_its_new_parent() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let [a, b] = ["a", "b"].map(|name| m.path(name));
    fs::create_dir_all(a.join("s")).unwrap();
    fs::create_dir_all(b.join("t")).unwrap();
    fs::write(a.join("s/f"), b"").unwrap();
    let ino = |path: &Path| fs::metadata(path).unwrap().ino();
    // The kernel keeps a listing that it was asked for more than once.
    for _ in 0..4 {
        assert_eq!(parent_listed(&a.join("s")), ino(&a));
        assert_eq!(parent_listed(&b.join("t")), ino(&b));
    }
    fs::rename(a.join("s"), b.join("s")).unwrap();
    for _ in 0..4 {
        assert_eq!(parent_listed(&b.join("s")), ino(&b));
    }
    fs::create_dir(a.join("u")).unwrap();
    (0..4).for_each(|_| assert_eq!(parent_listed(&a.join("u")), ino(&a)));
    let [one, other] = [a.join("u"), b.join("s")].map(|path| c_path(&path));
    // SAFETY: two paths that live through the call.
    let exchanged = unsafe {
        libc::renameat2(
            libc::AT_FDCWD,
            one.as_ptr(),
            libc::AT_FDCWD,
            other.as_ptr(),
            libc::RENAME_EXCHANGE,
        )
    };
    assert_eq!(exchanged, 0);
    assert_eq!(parent_listed(&a.join("u")), ino(&a));
    assert_eq!(parent_listed(&b.join("s")), ino(&b));
    m.end();
}

#[test]
fn relative_access_times_follow_the_first_read_after_a_change() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("mail");
    fs::write(&path, "new").unwrap();
    let times = || {
        let meta = fs::metadata(&path).unwrap();
        (
            (meta.atime(), meta.atime_nsec()),
            (meta.mtime(), meta.mtime_nsec()),
        )
    };
    // The data is in the kernel's cache, and still the read is noticed.
    fs::read(&path).unwrap();
    let (first, mtime) = times();
    assert!(first >= mtime);
    let mut log = OpenOptions::new().append(true).open(&path).unwrap();
    // Stamps are of the machine's last tick, so the next one may take some writes.
    while times().1 <= first {
        log.write_all(b"er").unwrap();
    }
    let (atime, mtime) = times();
    assert!(atime == first && atime < mtime);
    fs::read(&path).unwrap();
    let (atime, mtime) = times();
    assert!(atime >= mtime);
    drop(log);
    m.end();
}

/// Backups read so, and what they have read is old as before.
#[test]
fn reads_through_a_handle_without_access_time_leave_it() {
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("backed-up");
    drop(create(&path, &[7; PAGE]));
    let atime = || {
        let meta = fs::metadata(&path).unwrap();
        (meta.atime(), meta.atime_nsec())
    };
    let before = atime();
    for flags in [libc::O_NOATIME, libc::O_NOATIME | libc::O_DIRECT] {
        let mut quiet = OpenOptions::new();
        let quiet = quiet.read(true).custom_flags(flags).open(&path).unwrap();
        #[repr(align(4096))]
        struct Page([u8; PAGE]);
        let mut page = Page([0; PAGE]);
        quiet.read_exact_at(&mut page.0, 0).unwrap();
        assert!(page.0 == [7; PAGE] && atime() == before);
    }
    fs::read(&path).unwrap();
    assert!(atime() >= before);
    // Once it is due by more than a tick of the machine's clock, the next reader renews it.
    let old = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1000);
    let times = fs::FileTimes::new().set_accessed(old);
    File::open(&path).unwrap().set_times(times).unwrap();
    fs::read(&path).unwrap();
    assert!(atime() >= before);
    m.end();
}

/// The kernel drops pages when it is handed a direct write, and where that is asynchronous not again once it is made: what was read back before
/// it came here stayed, and so did attributes.
#[test]
fn what_an_asynchronous_direct_write_has_made_is_read_by_everybody() {
    const ROUNDS: u32 = 2000;
    let Some(world) = World::new() else { return };
    let m = world.mount("");
    let path = m.path("page");
    let reader = create(&path, &[0; PAGE]);
    let over = AtomicBool::new(false);
    let outdated = Mutex::new(rank::LEAF, Vec::new());
    let write = || {
        let direct = OpenOptions::new()
            .write(true)
            .custom_flags(libc::O_DIRECT)
            .open(&path)
            .unwrap();
        let mut queue = base::aio::Queue::new(vec![direct], 1, PAGE).unwrap();
        let time = |file: &File| {
            let of = file.metadata().unwrap();
            (of.mtime(), of.mtime_nsec())
        };
        let mut changed = time(&reader);
        for round in 1..=ROUNDS {
            queue.memory(0)[..4].copy_from_slice(&round.to_le_bytes());
            queue.start(0, 0, 0, PAGE, true);
            let mut ended = Vec::new();
            queue.wait(1, &mut ended).unwrap();
            assert!(matches!(ended[..], [(0, Ok(PAGE))]), "{ended:?}");
            let before = std::mem::replace(&mut changed, time(&reader));
            if read_at(&reader, 0, 4) != round.to_le_bytes() {
                outdated.lock().push((round, "content"));
            }
            if changed <= before {
                outdated.lock().push((round, "times"));
            }
        }
    };
    /// Also if an assertion fails.
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    base::thread::parallel(3, |thread| match thread {
        0 => {
            let _over = Over(&over);
            write();
        }
        _ => {
            while !over.load(Ordering::Relaxed) {
                read_at(&reader, 0, PAGE);
                reader.metadata().unwrap();
            }
        }
    });
    assert_eq!(*outdated.lock(), []);
    drop(reader);
    m.end();
}
