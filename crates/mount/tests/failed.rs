//! A change that fails after it was made: what the kernel shows is what the file system has.
//!
//! Needs /dev/fuse and root, or `fusermount3`; without them each test says so and passes.

mod common;
#[path = "common/mapping.rs"]
mod mapping;
#[path = "common/world.rs"]
mod world;

use std::fs::{self, File, OpenOptions};
use std::io::Error;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ::fs::Clock;
use common::pattern;
use device::{BlockDevice, Durability, Operation, Request};
use mapping::Mapping;
use world::World;

const PAGE: usize = 4096;
const BYTES: usize = 16 * PAGE;

/// How often something that comes soon is looked for.
const LOOKS: u32 = 20_000;

/// A device on which nothing becomes durable once it is broken.
struct Breaking {
    below: Arc<dyn BlockDevice>,
    is_broken: Arc<AtomicBool>,
}

impl BlockDevice for Breaking {
    device::described_by!(below);

    fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        self.below.run(requests, meanwhile);
        if !self.is_broken.load(Ordering::SeqCst) {
            return;
        }
        for request in requests {
            let fails = match &request.operation {
                Operation::Flush => true,
                Operation::Write { durability, .. } => *durability == Durability::Durable,
                Operation::Read { .. } => false,
            };
            if fails {
                request.error = Some(Error::from_raw_os_error(libc::EIO));
            }
        }
    }

    fn discard(&self, offset: u64, len: u64) -> std::io::Result<()> {
        self.below.discard(offset, len)
    }
}

/// A device that takes no write once it is broken.
struct Refusing {
    below: Arc<dyn BlockDevice>,
    is_broken: Arc<AtomicBool>,
}

impl BlockDevice for Refusing {
    device::described_by!(below);

    fn run(&self, requests: &mut [Request<'_>], mut meanwhile: Option<&mut dyn FnMut()>) {
        if !self.is_broken.load(Ordering::SeqCst) {
            return self.below.run(requests, meanwhile);
        }
        if let Some(meanwhile) = meanwhile.take() {
            meanwhile();
        }
        for request in requests {
            match request.operation {
                Operation::Write { .. } => {
                    request.error = Some(Error::from_raw_os_error(libc::EIO));
                }
                _ => self.below.run(std::slice::from_mut(request), None),
            }
        }
    }

    fn discard(&self, offset: u64, len: u64) -> std::io::Result<()> {
        self.below.discard(offset, len)
    }
}

/// Changes the file, whose other handle is another file's with as much in it.
type Change = fn(&File, &File) -> bool;

fn punch(file: &File, _: &File) -> bool {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: a descriptor and numbers.
    unsafe { libc::fallocate(file.as_raw_fd(), mode, 0, PAGE as i64) == 0 }
}

fn lengthen(file: &File, _: &File) -> bool {
    // SAFETY: a descriptor and numbers.
    unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, 2 * BYTES as i64) == 0 }
}

fn copy(file: &File, other: &File) -> bool {
    let (from, to) = (other.as_raw_fd(), file.as_raw_fd());
    let (mut start, mut target) = (0, 0);
    // SAFETY: the pointers name live offsets; all else are numbers.
    unsafe { libc::copy_file_range(from, &raw mut start, to, &raw mut target, PAGE, 0) >= 0 }
}

fn cut(file: &File, _: &File) -> bool {
    file.set_len(100).is_ok()
}

/// The kernel drops nothing of what it has cached where it reads of an error: it showed what had been there, for up to an hour, and a store to a mapping
/// brought that back.
#[test]
fn a_change_that_does_not_become_durable_shows_what_it_made() {
    let changes: [(&str, &str, Change); 4] = [
        ("punch", "", punch),
        ("lengthen", "", lengthen),
        ("copy", "", copy),
        ("cut", "sync", cut),
    ];
    for (what, options, change) in changes {
        let Some(world) = World::new() else { return };
        let m = world.mount("");
        for (name, seed) in [("f", 1), ("other", 2)] {
            fs::write(m.path(name), pattern(BYTES, seed)).unwrap();
        }
        m.end();
        let is_broken = Arc::new(AtomicBool::new(false));
        let m = world.mount_over(options, |below| {
            let is_broken = Arc::clone(&is_broken);
            Arc::new(Breaking { below, is_broken })
        });
        let open = |name, flags| {
            let mut options = OpenOptions::new();
            let options = options.read(true).write(true).custom_flags(flags);
            options.open(m.path(name)).unwrap()
        };
        let (file, other) = (open("f", libc::O_DSYNC), open("other", 0));
        let mut cached = vec![0; BYTES];
        file.read_exact_at(&mut cached, 0).unwrap();
        assert!(cached == pattern(BYTES, 1));
        // The kernel has asked for attributes now, and need not again.
        assert_eq!(file.metadata().unwrap().len(), BYTES as u64);
        is_broken.store(true, Ordering::SeqCst);
        assert!(!change(&file, &other), "{what}");
        let error = Error::last_os_error().raw_os_error();
        assert!(
            matches!(error, Some(libc::EIO | libc::EROFS)),
            "{what}: {error:?}"
        );

        let attr = m.fs.lookup(::fs::ROOT, b"f").unwrap();
        let inside = m.fs.open_file(attr.ino, libc::O_RDONLY).unwrap();
        let mut has = vec![0; attr.size as usize];
        m.fs.read(&inside, 0, &mut has).unwrap();
        assert!(has != pattern(BYTES, 1), "{what} has changed nothing");
        let mut shown = vec![0; 4 * BYTES];
        let len = file.read_at(&mut shown, 0).unwrap();
        assert!(shown[..len] == has, "{what}: {len} of {} bytes", has.len());
        assert_eq!(file.metadata().unwrap().len(), attr.size, "{what}");
        drop((file, other, inside));
        // It could not write everything.
        drop(m.session.result());
        drop(m.fs.close());
    }
}

/// The kernel writes back nothing of a mapping before it has blocks allocated, and no byte changes by that: what had been stored over a hole went with the page, which could not be
/// written back any more.
#[test]
fn blocks_that_cannot_be_allocated_cost_no_store_to_a_mapping() {
    for mode in [0, libc::FALLOC_FL_KEEP_SIZE] {
        let Some(world) = World::new() else { return };
        let is_broken = Arc::new(AtomicBool::new(false));
        let m = world.mount_over("", |below| {
            let is_broken = Arc::clone(&is_broken);
            Arc::new(Breaking { below, is_broken })
        });
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true);
        let options = options.custom_flags(libc::O_DSYNC);
        let file = options.open(m.path("f")).unwrap();
        file.set_len(BYTES as u64).unwrap();
        let mut map = Mapping::of(&file, BYTES);
        // One that has its block, and one that is not written back yet.
        map.store(2 * PAGE, &[6]);
        map.sync();
        map.store(PAGE, &[7]);
        is_broken.store(true, Ordering::SeqCst);
        // SAFETY: a descriptor and numbers.
        let done = unsafe { libc::fallocate(file.as_raw_fd(), mode, 0, BYTES as i64) };
        let error = Error::last_os_error().raw_os_error();
        assert!(
            done < 0 && matches!(error, Some(libc::EIO | libc::EROFS)),
            "{mode}: {error:?}"
        );
        assert_eq!([PAGE, 2 * PAGE].map(|at| map.load(at)), [7, 6], "{mode}");
        drop((map, file));
        // It could not write everything.
        drop(m.session.result());
        drop(m.fs.close());
    }
}

/// The kernel showed the size that had been written for a minute after that was given up, or for an hour, and the pages that it had cached until it needed their memory.
#[test]
fn what_is_given_up_is_shown_by_nobody_any_more() {
    // By the last close, or some time after it.
    for fails_before_close in [true, false] {
        let Some(mut world) = World::new() else {
            return;
        };
        let clock = Clock::manual(1_000_000_000_000_000_000);
        world.clock = Some(clock.clone());
        let is_broken = Arc::new(AtomicBool::new(false));
        let m = world.mount_over("", |below| {
            let is_broken = Arc::clone(&is_broken);
            Arc::new(Refusing { below, is_broken })
        });
        let path = m.path("f");
        // So much more that a sync writes it before it commits: what goes with a commit fails the file system.
        let (old, new) = (pattern(BYTES, 1), pattern(5 * BYTES, 2));
        fs::write(&path, &old).unwrap();
        m.fs.sync().unwrap();

        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&new, 0).unwrap();
        assert!(fs::read(&path).unwrap() == new);
        assert_eq!(fs::metadata(&path).unwrap().len(), new.len() as u64);
        is_broken.store(true, Ordering::SeqCst);
        if fails_before_close {
            assert!(file.sync_all().is_err());
        }
        drop(file);

        // The close, and the drop of what the kernel has, take a while to come.
        let comes = |is_so: &dyn Fn() -> bool| {
            (0..LOOKS).any(|_| {
                clock.advance(Duration::from_secs(1));
                // What fails is latched on the file.
                let _ = m.fs.tick();
                base::thread::yield_now();
                is_so()
            })
        };
        let inside = || m.fs.lookup(::fs::ROOT, b"f").unwrap().size as usize;
        assert!(comes(&|| inside() == old.len()), "it is given up");
        let len = || fs::metadata(&path).unwrap().len() as usize;
        assert!(comes(&|| len() == old.len()), "{} bytes are shown", len());
        assert!(comes(&|| fs::read(&path).unwrap() == old), "old pages stay");
        // It could not write everything.
        drop(m.session.result());
        drop(m.fs.close());
    }
}
