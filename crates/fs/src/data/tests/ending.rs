//! The end of a file system, in the middle of calls that change content.

use super::*;
use crate::data::transact::InlineRoom;
use crate::namespace::meanwhile::{nobody_does, others_do};
use crate::tx::content::Content;
use base::thread::{self, parallel};
use device::sim::Times as Strikes;
use device::{Operation, Request};
use format::Block;
use std::io::{self, IoSlice};

const OLD: u8 = 1;
const NEW: u8 = 2;
const PAGES: u64 = 8;

/// A file of pages that are home.
fn mounted(world: &World) -> (Mounted, Ino) {
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &[OLD; (PAGES * PAGE) as usize]);
    m.files.write_back_all().unwrap();
    m.commit_more();
    (m, ino)
}

/// As `FileSystem::close`.
fn end(files: &Files, store: &Store<FsNode>) -> Result<(), Error> {
    files.finish_writes();
    let written = files.end();
    store.close()?;
    written
}

/// What devices hold, durable and not. A write that fails may have changed a part of what it was for.
fn held(devices: &[Arc<SimDevice>]) -> Vec<(u64, Vec<Range<u64>>)> {
    let held = |device: &Arc<SimDevice>| (device.contents_hash(), device.cached_writes());
    devices.iter().map(held).collect()
}

/// They had been let in before, and changed bytes on the devices of a file system that had ended well; or in the cache, from where an fsync took them there.
#[test]
fn who_was_let_in_before_the_end_changes_nothing_after_it() {
    type Call = fn(&Files, &OpenFile) -> Result<(), Error>;
    const PAGE_NEW: [u8; PAGE as usize] = [NEW; PAGE as usize];
    let calls: [(i32, Call); 9] = [
        (libc::O_DIRECT, |files, file| {
            files.write(file, 0, &PAGE_NEW).map(drop)
        }),
        (libc::O_DIRECT, |files, file| {
            let data = [NEW; 2 * PAGE as usize];
            files.write(file, (PAGES - 1) * PAGE, &data).map(drop)
        }),
        (0, |files, file| {
            files.write(file, 100, &[NEW; 100]).map(drop)
        }),
        (0, |files, file| {
            let data = [NEW; 2 * PAGE as usize];
            files.write(file, 100, &data).map(drop)
        }),
        (0, |files, file| files.append(file, &[NEW; 100]).map(drop)),
        (0, |files, file| {
            files.write_now(file, PAGE, &PAGE_NEW).map(drop)
        }),
        (0, |files, file| {
            let part = [NEW; 400 << 10];
            let parts = [IoSlice::new(&part), IoSlice::new(&part)];
            files.write_vectored(file, 0, &parts).map(drop)
        }),
        (0, |files, file| {
            files.fallocate(file, libc::FALLOC_FL_ZERO_RANGE, 100, PAGE)
        }),
        (0, |files, file| files.truncate(file.ino(), 100)),
    ];
    for (i, (flags, call)) in calls.into_iter().enumerate() {
        let world = World::new(50, 64, 4096);
        let (m, ino) = mounted(&world);
        let file = m.files.open(&m.owners, ino, libc::O_RDWR | flags).unwrap();
        let (files, store) = (Arc::clone(&m.files), Arc::clone(&m.store));
        let (devices, at_end) = (world.devices.clone(), Arc::new(OnceLock::new()));
        let ended = Arc::clone(&at_end);
        others_do(move || {
            if ended.get().is_none() {
                end(&files, &store).unwrap();
                ended.set(held(&devices)).unwrap();
            }
        });
        let changed = call(&m.files, &file);
        nobody_does();
        assert!(matches!(changed, Err(Error::ReadOnly)), "{i}: {changed:?}");
        assert_eq!(m.files.dirty_pages(), 0, "{i}");
        drop(m.files.fsync(&file, true));
        drop(file);
        drop(m);
        assert!(Some(&held(&world.devices)) == at_end.get(), "{i}");
        let m = world.mount();
        assert!(m.contents(ino) == [OLD; (PAGES * PAGE) as usize], "{i}");
    }
}

/// A later fsync wrote what the end could not.
#[test]
fn what_could_not_be_written_at_the_end_is_not_written_later() {
    let world = World::new(51, 64, 4096);
    let (m, ino) = mounted(&world);
    let file = m.open(ino);
    m.write(&file, PAGE, &[NEW; PAGE as usize]);
    let block = m.files.mapped(&file.state, 1..2).unwrap()[0].block;
    let geometry = m.store.array().geometry();
    geometry.pieces(block.byte(), BLOCK_SIZE, |piece| {
        let range = piece.offset..piece.offset + piece.len as u64;
        world.devices[piece.device].fail_writes(Strikes::Always, Some(range));
    });
    assert_eq!(end(&m.files, &m.store).unwrap_err().errno(), libc::EIO);
    for device in &world.devices {
        device.heal();
    }
    let at_end = held(&world.devices);
    for data_only in [true, false] {
        assert!(m.files.fsync(&file, data_only).is_err());
    }
    drop(file);
    drop(m);
    assert!(held(&world.devices) == at_end);
}

/// It was told that nothing can be written any more, though nothing had to be.
#[test]
fn a_sync_after_a_good_end_succeeds() {
    let world = World::new(53, 64, 4096);
    let (m, ino) = mounted(&world);
    let file = m.open(ino);
    m.write(&file, 100, &[NEW; 100]);
    end(&m.files, &m.store).unwrap();
    for data_only in [true, false] {
        m.files.fsync(&file, data_only).unwrap();
    }
    let written = m.files.write(&file, 0, &[NEW]);
    assert!(matches!(written, Err(Error::ReadOnly)), "{written:?}");
    drop(file);
    drop(m);
    let m = world.mount();
    assert_eq!(m.contents(ino)[100..200], [NEW; 100]);
}

/// What a page begins with whose write waits.
const MARK: [u8; 16] = *b"waits for an end";

/// What a write does beside the end of its file system.
#[derive(Default)]
struct Beside {
    begun: AtomicBool,
    ended: AtomicBool,
    late: AtomicBool,
}

/// A device that gives the end all the time that it may want before it writes what is marked.
struct Slow {
    below: Arc<SimDevice>,
    beside: Arc<Beside>,
}

impl BlockDevice for Slow {
    device::described_by!(below);

    fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        let marked = |request: &Request<'_>| match &request.operation {
            Operation::Write { buf, .. } => buf.starts_with(&MARK),
            _ => false,
        };
        if requests.iter().any(marked) {
            let beside = &self.beside;
            beside.begun.store(true, Ordering::SeqCst);
            let waits = |turn: &u32| *turn < 100_000 && !beside.ended.load(Ordering::SeqCst);
            (0..).take_while(waits).for_each(|_| thread::yield_now());
            let ended = beside.ended.load(Ordering::SeqCst);
            beside.late.fetch_or(ended, Ordering::SeqCst);
        }
        self.below.run(requests, meanwhile);
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.below.discard(offset, len)
    }
}

/// It holds no file's lock, and came to blocks that could be somebody else's by then.
#[test]
fn what_transactions_stage_is_written_before_the_end_or_not_at_all() {
    const STAGED: u64 = 40;
    type Stage = fn(&Mounted, Block, &[u8]) -> Result<(), Error>;
    let stages: [Stage; 3] = [
        |m, _, page| {
            let mut promise = m.store.promise(STAGED).unwrap();
            let pages = [page; STAGED as usize];
            m.files.write_staged(&mut promise, &pages).map(drop)
        },
        |m, block, page| m.files.write_staged_again(block, page),
        // Of a file that is being made, and more than a commit takes with it.
        |m, _, page| {
            let mut promise = m.store.promise(STAGED).unwrap();
            let mut content = Content::empty();
            content.write(0, &page.repeat(STAGED as usize));
            let stored = |_, _: &mut [u8]| unreachable!("it is all in memory");
            let mut room = InlineRoom(0);
            let made = m.files.intend_new(&content, &stored, &mut room).unwrap();
            let mut files = [(Nid(FIRST_ORPHANS), made)];
            m.files.write_intended(&mut promise, &mut files).map(drop)
        },
    ];
    for (i, stage) in stages.into_iter().enumerate() {
        let world = World::new(52, 64, 4096);
        let beside = Arc::new(Beside::default());
        let slow = |below: &Arc<SimDevice>| {
            let (below, beside) = (Arc::clone(below), Arc::clone(&beside));
            Arc::new(Slow { below, beside }) as Arc<dyn BlockDevice>
        };
        let m = world.mount_on(world.devices.iter().map(slow).collect());
        let mut promise = m.store.promise(1).unwrap();
        let staged = m.store.reserve(&mut promise, 1, None).unwrap();
        let block = staged.extent().block;
        let mut page = [NEW; BLOCK_SIZE];
        page[..MARK.len()].copy_from_slice(&MARK);
        parallel(2, |me| {
            if me == 0 {
                return stage(&m, block, &page).unwrap();
            }
            while !beside.begun.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            end(&m.files, &m.store).unwrap();
            beside.ended.store(true, Ordering::SeqCst);
        });
        assert!(!beside.late.load(Ordering::SeqCst), "{i}");
        let at_end = held(&world.devices);
        let refused = stage(&m, block, &page);
        assert!(matches!(refused, Err(Error::ReadOnly)), "{i}: {refused:?}");
        assert!(held(&world.devices) == at_end, "{i}");
    }
}
