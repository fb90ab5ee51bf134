//! Many threads in one file: overwrites of its blocks beside reads, write-back, fsync, growth and cuts.

use super::*;
use crate::data::ranges::Mode;
use crate::data::read::Reading;
use base::clock::now_ns;
use base::sync::{Mutex, rank};
use base::{sched, thread};
use device::sim::Times as Strikes;
use std::collections::BTreeSet;
use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A file of whole pages that is home, and open.
fn at_home(m: &Mounted, pages: u64) -> (Ino, Arc<OpenFile>) {
    let ino = m.make();
    let file = m.open(ino);
    for page in 0..pages {
        m.write(&file, page * PAGE, &[1; PAGE as usize]);
    }
    m.files.write_back_all().unwrap();
    m.store.sync().unwrap();
    (ino, file)
}

/// What a call does while somebody else is at the file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Due {
    Ends,
    Waits,
}
use Due::{Ends, Waits};

/// Calls `work` in another thread while this one holds the file's data, shared. True when it did what is due.
fn does_beside_a_reader(m: &Mounted, ino: Ino, due: Due, work: impl Fn() + Sync) -> bool {
    does_beside(m, ino, None, due, work)
}

/// The same while it holds a range of pages, too.
fn does_beside(
    m: &Mounted,
    ino: Ino,
    range: Option<(std::ops::Range<u64>, Mode)>,
    due: Due,
    work: impl Fn() + Sync,
) -> bool {
    // Its end is waited for, whatever else the machine does; it cannot be seen that it waits.
    let patience_ns = match due {
        Ends => 60_000_000_000,
        Waits => 10_000_000,
    };
    let (held, ended) = (AtomicBool::new(false), AtomicBool::new(false));
    let seen = thread::parallel(2, |t| {
        if t == 1 {
            while !held.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            work();
            ended.store(true, Ordering::SeqCst);
            return false;
        }
        let file = m.open(ino);
        let hold = |(pages, mode)| m.files.ranges.hold(ino.0, pages, mode, || ());
        let _range = range.clone().map(hold);
        let shared = file.state.io.read();
        held.store(true, Ordering::SeqCst);
        let begun = now_ns();
        while !ended.load(Ordering::SeqCst) && now_ns() - begun < patience_ns {
            thread::yield_now();
        }
        let seen = ended.load(Ordering::SeqCst);
        drop(shared);
        seen == (due == Ends)
    });
    seen[0]
}

fn past(m: &Mounted, ino: Ino) -> Arc<OpenFile> {
    let flags = libc::O_RDWR | libc::O_DIRECT;
    m.files.open(&m.owners, ino, flags).unwrap()
}

#[test]
fn a_direct_write_over_what_is_there_waits_only_for_who_is_at_its_pages() {
    let world = World::new(73, 64, 256);
    let m = world.mount();
    let (ino, file) = at_home(&m, 12);
    let pages = |n: u64| vec![n as u8; (n * PAGE) as usize];
    let direct = |page: u64, n: u64| m.write(&past(&m, ino), page * PAGE, &pages(n));
    let beside = |due, page, n| does_beside_a_reader(&m, ino, due, || direct(page, n));
    assert!(beside(Ends, 2, 3), "a reader");
    assert!(beside(Waits, 11, 2), "one that makes the file longer");
    m.files.truncate(ino, 40 * PAGE).unwrap();
    assert!(beside(Waits, 14, 1), "the first behind what is logged");
    assert!(beside(Ends, 16, 1) && beside(Ends, 17, 3), "a hole");
    assert!(beside(Waits, 15, 2), "a hole before what holds something");
    m.files.fallocate(&file, 0, 20 * PAGE, 4 * PAGE).unwrap();
    assert!(
        beside(Ends, 21, 1) && beside(Ends, 22, 4),
        "what is allocated"
    );
    m.write(&file, 30 * PAGE, &[9]);
    assert!(beside(Waits, 30, 1), "what has a block only promised");
    // Beside whom it writes is what counts.
    let among = |due, mode, page| does_beside(&m, ino, Some((4..8, mode)), due, || direct(page, 2));
    for mode in [Mode::Load, Mode::Store, Mode::Direct, Mode::Home] {
        assert!(
            among(Ends, mode, 2) && among(Ends, mode, 8),
            "{mode:?} elsewhere"
        );
        assert!(
            among(Waits, mode, 3) && among(Waits, mode, 6),
            "{mode:?} there"
        );
    }
    // Others wait for it, or do not.
    let meets = |due, page: u64, work: &(dyn Fn() + Sync)| {
        let range = Some((page..page + 2, Mode::Direct));
        let mut storing = None;
        if page == 4 {
            storing = Some(file.state.stores.begin());
        }
        let done = does_beside(&m, ino, range, due, work);
        drop(storing);
        done
    };
    let read_at = |page: u64| {
        let len = m.files.read(&m.open(ino), page * PAGE, &mut [0; 9]);
        assert_eq!(len.unwrap(), 9);
    };
    let (read, elsewhere) = (|| read_at(5), || read_at(7));
    let write = || m.write(&m.open(ino), 5 * PAGE, &[1; 9]);
    assert!(meets(Waits, 4, &read) && meets(Waits, 4, &write));
    assert!(meets(Ends, 4, &elsewhere));
    m.write(&file, 9 * PAGE, &[1]);
    let sync = || m.files.fsync(&m.open(ino), true).unwrap();
    assert!(meets(Waits, 4, &sync), "its pages may be on their way home");
    assert!(meets(Ends, 4, &sync), "there is nothing to take home");
    drop(file);
    m.check(ino);
    m.close();
}

/// It superseded what the cache had, but all of the file went home first.
#[test]
fn direct_writes_fill_a_file_in_any_order() {
    let world = World::new(73, 64, 256);
    let m = world.mount();
    let ino = m.make();
    let file = past(&m, ino);
    const PAGES: u64 = 2600;
    m.files.truncate(ino, PAGES * PAGE).unwrap();
    m.files.fallocate(&file, 0, 100 * PAGE, 900 * PAGE).unwrap();
    let mut rng = base::rng::Rng::new(7);
    // Every other page first, so that there are more extents than the inode and one leaf take.
    let mut order: Vec<u64> = (0..PAGES).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, rng.below(i as u64 + 1) as usize);
    }
    order.sort_by_key(|page| page % 2);
    let bytes = |page: u64| vec![page as u8 | 1; PAGE as usize];
    for &page in &order[..PAGES as usize * 3 / 4] {
        m.write(&file, page * PAGE, &bytes(page));
    }
    let written: BTreeSet<u64> = order[..PAGES as usize * 3 / 4].iter().copied().collect();
    m.files.fsync(&file, false).unwrap();
    let blocks = m.check(ino);
    let allocated = (0..PAGES).filter(|page| written.contains(page) || (100..1000).contains(page));
    assert_eq!(blocks, allocated.count() as u64);
    drop(file);
    drop(m);
    let m = world.mount();
    let file = m.open(ino);
    for page in 0..PAGES {
        let mut found = vec![0; PAGE as usize];
        m.files.read(&file, page * PAGE, &mut found).unwrap();
        let due = match written.contains(&page) {
            true => bytes(page),
            false => vec![0; PAGE as usize],
        };
        assert!(found == due, "page {page}");
    }
}

/// Where the record would change the shape of the file's tree the write is done anew, and nobody sees a part of it meanwhile.
#[test]
fn a_direct_write_that_fills_is_seen_whole() {
    let extents_in_the_inode = 16;
    for seed in 0..200 {
        let world = World::new(900 + seed, 64, 256);
        let m = world.mount();
        let ino = m.make();
        let file = past(&m, ino);
        m.files.truncate(ino, 40 * PAGE).unwrap();
        for i in 0..extents_in_the_inode {
            m.write(&file, 2 * i * PAGE, &[1; PAGE as usize]);
        }
        m.files.fsync(&file, false).unwrap();
        let (page, old) = match seed % 2 {
            0 => (2, 1),
            _ => (34, 0),
        };
        let seen = sched::run("whole", seed, &world.clock, || {
            let over = AtomicBool::new(false);
            let seen = thread::parallel(3, |t| {
                let file = past(&m, ino);
                let mut torn = None;
                if t == 0 {
                    m.write(&file, page * PAGE, &[2; 2 * PAGE as usize]);
                    over.store(true, Ordering::SeqCst);
                }
                while t > 0 && !over.load(Ordering::SeqCst) {
                    let mut bytes = vec![0; 2 * PAGE as usize];
                    m.files.read(&file, page * PAGE, &mut bytes).unwrap();
                    let found = (bytes[0], bytes[PAGE as usize]);
                    if found != (old, 0) && found != (2, 2) {
                        torn = Some(found);
                    }
                    thread::yield_now();
                }
                torn
            });
            seen.into_iter().flatten().next()
        });
        assert_eq!(seen, None, "seed {seed}");
        assert!(matches!(m.inode(ino).body, Body::Tree(_)));
    }
}

#[test]
fn a_direct_write_leaves_what_is_dirty_elsewhere_where_it_is() {
    let world = World::new(74, 64, 256);
    let m = world.mount();
    let (ino, file) = at_home(&m, 8);
    for page in 0..8 {
        m.write(&file, page * PAGE + 7, &[9; 100]);
    }
    let key = file.state.key;
    let direct = past(&m, ino);
    m.write(&direct, 2 * PAGE, &[5; 3 * PAGE as usize]);
    let dirty = || m.files.pages.dirty_pages(key, 0..99, 99);
    assert_eq!(dirty(), [0, 1, 5, 6, 7]);
    assert_eq!(
        m.contents(ino)[2 * PAGE as usize..][..3 * PAGE as usize],
        [5; 3 * PAGE as usize]
    );
    // One that makes the file longer takes home what is not logged, and its own.
    m.write(&file, 8 * PAGE, &[6; PAGE as usize]);
    m.write(&direct, 10 * PAGE, &[7; PAGE as usize]);
    assert_eq!(dirty(), [0, 1, 5, 6, 7]);
    assert_eq!(m.inode(ino).size, 11 * PAGE);
    // What is dirty behind it holds back the size.
    m.files.truncate(ino, 20 * PAGE).unwrap();
    m.write(&file, 15 * PAGE, &[8; PAGE as usize]);
    m.write(&direct, 12 * PAGE, &[7; PAGE as usize]);
    assert_eq!(dirty(), [0, 1, 5, 6, 7, 15]);
    assert_eq!(m.inode(ino).size, 15 * PAGE);
    m.files.fsync(&file, true).unwrap();
    assert_eq!((m.inode(ino).size, m.files.pages.dirty()), (20 * PAGE, 0));
    let contents = m.contents(ino);
    for (page, first) in [
        (1, 1),
        (3, 5),
        (5, 1),
        (8, 6),
        (9, 0),
        (10, 7),
        (12, 7),
        (15, 8),
    ] {
        assert_eq!(contents[(page * PAGE) as usize], first, "page {page}");
    }
    assert_eq!(contents[7], 9);
    m.check(ino);
    drop((file, direct));
    m.close();
    assert_eq!(world.mount().contents(ino), contents);
}

/// What was written before it, and acknowledged, is all there is of these pages then.
#[test]
fn a_direct_write_that_fails_supersedes_nothing_that_is_dirty() {
    let world = World::new(75, 64, 256);
    let m = world.mount();
    let (ino, file) = at_home(&m, 4);
    m.write(&file, PAGE, &[9; PAGE as usize]);
    for device in &world.devices {
        device.fail_writes(Strikes::Always, None);
    }
    let failed = m.files.write(&past(&m, ino), 0, &[5; 3 * PAGE as usize]);
    assert_eq!(failed.unwrap_err().errno(), libc::EIO);
    assert_eq!(m.files.pages.dirty_pages(file.state.key, 0..9, 9), [1]);
    for device in &world.devices {
        device.fail_writes(Strikes::Next(0), None);
    }
    assert!(file.state.stores.quiet().is_some());
    m.files.fsync(&file, true).unwrap();
    assert_eq!(
        m.contents(ino)[PAGE as usize..][..PAGE as usize],
        [9; PAGE as usize]
    );
    // The one that comes next is none the worse for it, and durable by a flush.
    m.write(&past(&m, ino), 0, &[6; 3 * PAGE as usize]);
    assert!(file.state.meta.lock().in_place.unflushed());
    m.files.fsync(&file, true).unwrap();
    assert!(!file.state.meta.lock().in_place.unflushed());
    drop(file);
    m.close();
}

#[test]
fn an_overwrite_runs_beside_readers_and_what_changes_the_file_does_not() {
    let world = World::new(70, 64, 256);
    let m = world.mount();
    let (ino, file) = at_home(&m, 8);
    let beside = |due, offset: u64, data: &[u8]| {
        does_beside_a_reader(&m, ino, due, || m.write(&m.open(ino), offset, data))
    };
    let page = [2; PAGE as usize];
    assert!(beside(Ends, 0, &page), "of a clean page with a block");
    assert!(beside(Ends, 0, &page), "of a dirty page");
    assert!(beside(Ends, 3 * PAGE + 100, &[3; 200]), "of a part of one");
    assert!(beside(Waits, 7 * PAGE + 1, &page), "beyond the end");
    assert!(beside(Ends, PAGE, &[4; 2 * PAGE as usize]), "of two pages");
    assert!(
        beside(Waits, 7 * PAGE, &[4; PAGE as usize + 2]),
        "of one and a byte beyond the end"
    );
    m.files.truncate(ino, 20 * PAGE).unwrap();
    m.files.read(&file, 15 * PAGE, &mut [0; 9]).unwrap();
    assert!(beside(Waits, 15 * PAGE, &page), "of a hole");
    assert!(
        beside(Ends, 15 * PAGE, &page),
        "of a page that has a promised block"
    );
    m.files.pages.invalidate(file.state.key, 2..7);
    assert!(
        beside(Ends, 2 * PAGE, &page),
        "of a page that is not cached"
    );
    assert!(beside(Ends, 3 * PAGE + 100, &[3; 200]), "of a part of one");
    assert!(
        beside(Ends, 4 * PAGE + 100, &[4; 2 * PAGE as usize]),
        "of three"
    );
    let appends = || {
        let file = m
            .files
            .open(&m.owners, ino, libc::O_WRONLY | libc::O_APPEND);
        m.write(&file.unwrap(), 0, &page);
    };
    assert!(does_beside_a_reader(&m, ino, Waits, appends), "an append");
    m.files.write_back_all().unwrap();
    m.check(ino);
    let contents = m.contents(ino);
    assert_eq!(contents.len() as u64, 21 * PAGE);
    assert_eq!(contents[3 * PAGE as usize + 100], 3);
    drop(file);
    m.close();
    assert_eq!(world.mount().contents(ino), contents);
}

#[test]
fn who_appends_learns_where_and_nobody_else_is_there() {
    const EACH: usize = 20;
    for seed in 0..20 {
        let world = World::new(seed, 64, 64);
        let m = world.mount();
        let ino = m.make();
        let places = sched::run("appends", seed, &world.clock, || {
            thread::parallel(3, |me| {
                let (file, mut rng) = (m.open(ino), Rng::new(seed ^ me as u64));
                let append = |i: usize| {
                    let data = vec![(me * EACH + i + 1) as u8; 1 + rng.below(6000) as usize];
                    let (at, len) = m.files.append(&file, &data).unwrap();
                    assert_eq!(len, data.len());
                    (at, data)
                };
                (0..EACH).map(append).collect::<Vec<_>>()
            })
        });
        let mut places: Vec<_> = places.into_iter().flatten().collect();
        places.sort();
        let contents = m.contents(ino);
        let mut end = 0;
        for (at, data) in places {
            assert_eq!(at, end as u64, "seed {seed}");
            end += data.len();
            assert!(contents[at as usize..end] == data, "seed {seed}");
        }
        assert_eq!(contents.len(), end);
        m.close();
    }
}

#[test]
fn parts_are_read_and_written_as_one() {
    let world = World::new(76, 64, 64);
    let m = world.mount();
    let (ino, file) = at_home(&m, 6);
    let (mut truth, mut rng) = (m.contents(ino), Rng::new(76));
    for step in 0..300 {
        let offset = rng.below(6 * PAGE);
        let mut lens: Vec<usize> = (0..rng.below(5))
            .map(|_| rng.below(3000) as usize)
            .collect();
        let handle = match rng.one_in(3) {
            true => &past(&m, ino),
            false => &file,
        };
        if rng.one_in(2) {
            // Not beyond what direct handles keep to as well.
            let mut room = (6 * PAGE - offset) as usize;
            for len in &mut lens {
                *len = room.min(*len);
                room -= *len;
            }
            let data: Vec<Vec<u8>> = lens.iter().map(|len| pattern(step, *len)).collect();
            let parts: Vec<_> = data.iter().map(|part| IoSlice::new(part)).collect();
            let written = m.files.write_vectored(handle, offset, &parts).unwrap();
            let all = data.concat();
            assert_eq!(written, all.len());
            truth[offset as usize..][..written].copy_from_slice(&all);
        }
        let mut data: Vec<Vec<u8>> = lens.iter().map(|len| vec![0xEE; *len]).collect();
        let mut parts: Vec<_> = data.iter_mut().map(|part| IoSliceMut::new(part)).collect();
        let len = m.files.read_vectored(handle, offset, &mut parts).unwrap();
        let all = data.concat();
        let expected = &truth[offset as usize..];
        assert_eq!(len, all.len().min(expected.len()));
        assert!(all[..len] == expected[..len], "step {step}");
        assert!(all[len..].iter().all(|b| *b == 0xEE), "beyond the end");
    }
    m.check(ino);
    drop(file);
    m.close();
}

/// Who reads from a device and is held up finds out that the page was another one meanwhile.
#[test]
fn what_was_read_from_a_device_is_not_taken_for_what_was_written_since() {
    let world = World::new(71, 64, 64);
    let m = world.mount();
    let (_, file) = at_home(&m, 300);
    let state = &file.state;
    let mut byte = [0];
    let mut push_out = |wanted: u64| {
        // Pages that are used once do not push out one that was used again.
        let others = || (0..300).filter(|page| page / 64 != wanted / 64);
        for page in others().chain(others()).flat_map(|page| [page; 2]) {
            m.files.read(&file, page * PAGE, &mut byte).unwrap();
        }
        assert_eq!(m.files.pages.state(state.key, wanted), None);
    };
    push_out(5);
    let reading = |alone| Reading {
        ahead: 0,
        by: None,
        in_turn: false,
        keep: true,
        alone,
        counts: false,
    };
    let missing = m.files.missing_run(state, 5..6).unwrap();
    let loaded = m.files.load_pages(state, missing.pages.clone()).unwrap();
    let admit = |alone| m.files.admit(state, &missing, &loaded, &reading(alone));
    // Somebody else loads it, overwrites it, takes it home and loses it.
    m.files.read(&file, 5 * PAGE, &mut [0]).unwrap();
    assert_eq!(admit(false), 5..6, "it is the same");
    m.write(&file, 5 * PAGE, &[9; PAGE as usize]);
    assert_eq!(admit(false), 5..5, "it has been written");
    m.files.fsync(&file, true).unwrap();
    assert_eq!(admit(false), 5..5, "it is home");
    push_out(5);
    assert_eq!(admit(false), 5..5, "it is gone");
    let mut byte = [0];
    m.files.read(&file, 5 * PAGE, &mut byte).unwrap();
    assert_eq!(byte, [9]);
    // Its frame was needed for others: nobody who reads alone asks.
    assert_eq!(admit(true), 5..6);
}

/// A read of what is cached writes nothing that others with the handle read, unless it goes on where the last one ended; one that
/// misses says where reading goes on.
#[test]
fn a_hit_elsewhere_leaves_no_trace_in_the_handle() {
    let world = World::new(73, 64, 256);
    let m = world.mount();
    let (_, file) = at_home(&m, 40);
    let runs = || file.reads.shown();
    let read = |page: u64| m.files.read(&file, page * PAGE, &mut [0; PAGE as usize]);
    (0..4).for_each(|page| assert_eq!(read(page).unwrap(), PAGE as usize));
    let before = runs();
    assert!(matches!(before[..], [(next, window)] if next == 4 * PAGE && window > 0));
    for page in [30, 2, 9] {
        read(page).unwrap();
        assert_eq!(runs(), before);
    }
    m.files.pages.invalidate(file.state.key, 20..40);
    read(20).unwrap();
    assert_eq!(runs(), [before[0], (21 * PAGE, 0)]);
    assert!(m.files.pages.absence(file.state.key, 22).is_some());
    read(21).unwrap();
    assert_eq!(runs()[1].0, 22 * PAGE);
    assert!(
        m.files.pages.absence(file.state.key, 29).is_none(),
        "it reads ahead"
    );
}

/// A page that goes to the inode, and is overwritten on the way there, gets a block when the file grows.
#[test]
fn a_small_file_that_is_overwritten_on_its_way_home_keeps_its_promise() {
    let world = World::new(72, 64, 256);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &[1; 300]);
    let key = file.state.key;
    let mut copy = [0; PAGE as usize];
    let (stamp, _) = m.files.pages.copy_dirty(key, 0, &mut copy).unwrap();
    m.write(&file, 100, &[2; 100]);
    assert!(!m.files.pages.inlined(key, 0, stamp));
    assert_eq!(m.files.pages.promised(key), 1);
    m.write(&file, 300, &[3; 9000]);
    m.files.fsync(&file, false).unwrap();
    assert_eq!(m.check(ino), 3);
    drop(file);
    m.close();
    assert_eq!(
        world.mount().contents(ino)[99..301],
        [&[1][..], &[2; 100], &[1; 100], &[3]].concat()
    );
}

/// Written by its own task alone, one value after the other: half a page.
const UNIT: u64 = PAGE / 2;
const PAGES: u64 = 24;
const TASKS: usize = 4;

/// What tasks did to the units of a file.
struct Ledger {
    begun: Vec<AtomicU64>,
    ended: Vec<AtomicU64>,
    /// What a sync that has returned had to make durable.
    durable: Mutex<Vec<u64>>,
    size: AtomicU64,
    durable_size: AtomicU64,
}

impl Ledger {
    fn new() -> Ledger {
        let units = || (0..2 * PAGES).map(|_| AtomicU64::new(1)).collect();
        Ledger {
            begun: units(),
            ended: units(),
            durable: Mutex::new(rank::LEDGER, vec![1; 2 * PAGES as usize]),
            size: AtomicU64::new(PAGES * PAGE),
            durable_size: AtomicU64::new(PAGES * PAGE),
        }
    }

    fn ended(&self) -> Vec<u64> {
        self.ended
            .iter()
            .map(|u| u.load(Ordering::SeqCst))
            .collect()
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes
        .chunks(8)
        .map(|word| u64::from_le_bytes(word.try_into().unwrap()))
}

struct Task<'a> {
    me: u64,
    m: &'a Mounted,
    ino: Ino,
    file: Arc<OpenFile>,
    ledger: &'a Ledger,
    rng: Rng,
    /// Cuts what it has appended.
    cuts: bool,
}

impl Task<'_> {
    fn step(&mut self) -> Result<(), Error> {
        match self.rng.below(20) {
            0..9 => self.overwrite(),
            9..15 => self.read(),
            15 | 16 => self.sync(),
            17 => {
                self.m.files.tick()?;
                self.m.files.write_back(self.ino)
            }
            18 => self.grow(),
            _ => self.beyond(),
        }
    }

    /// Both halves of a page, or one, of those that are this task's.
    fn overwrite(&mut self) -> Result<(), Error> {
        let page = self.rng.below(PAGES / TASKS as u64) * TASKS as u64 + self.me;
        // Every third page is only written as a whole, so that half a write is seen.
        let units = match page.is_multiple_of(3) || self.rng.one_in(2) {
            true => 2 * page..2 * page + 2,
            false => {
                let unit = 2 * page + self.rng.below(2);
                unit..unit + 1
            }
        };
        let mut data = Vec::new();
        for unit in units.clone() {
            let value = self.ledger.begun[unit as usize].load(Ordering::SeqCst) + 1;
            self.ledger.begun[unit as usize].store(value, Ordering::SeqCst);
            data.extend((0..UNIT / 8).flat_map(|_| value.to_le_bytes()));
        }
        let written = self.m.files.write(&self.file, units.start * UNIT, &data)?;
        assert_eq!(written, data.len());
        for unit in units {
            let value = self.ledger.begun[unit as usize].load(Ordering::SeqCst);
            self.ledger.ended[unit as usize].store(value, Ordering::SeqCst);
        }
        Ok(())
    }

    fn read(&mut self) -> Result<(), Error> {
        let first = self.rng.below(PAGES);
        let pages = 1 + self.rng.below(6.min(PAGES - first));
        let ended = self.ledger.ended();
        let mut buf = vec![0xEE; (pages * PAGE) as usize];
        assert_eq!(
            self.m.files.read(&self.file, first * PAGE, &mut buf)?,
            buf.len()
        );
        for (page, bytes) in (first..).zip(buf.chunks(PAGE as usize)) {
            let mut values = [0; 2];
            for (half, bytes) in bytes.chunks(UNIT as usize).enumerate() {
                let unit = 2 * page as usize + half;
                let value = words(bytes).next().unwrap();
                assert!(words(bytes).all(|v| v == value), "unit {unit} is torn");
                let begun = self.ledger.begun[unit].load(Ordering::SeqCst);
                let known = ended[unit]..=begun;
                assert!(
                    known.contains(&value),
                    "unit {unit}: {value}, not {known:?}"
                );
                values[half] = value;
            }
            assert!(
                values[0] == values[1] || !page.is_multiple_of(3),
                "page {page} is torn"
            );
        }
        Ok(())
    }

    fn sync(&mut self) -> Result<(), Error> {
        let (ended, size) = (self.ledger.ended(), self.ledger.size.load(Ordering::SeqCst));
        self.m.files.fsync(&self.file, self.rng.one_in(2))?;
        let mut durable = self.ledger.durable.lock();
        for (durable, ended) in durable.iter_mut().zip(ended) {
            *durable = ended.max(*durable);
        }
        if !self.cuts {
            self.ledger.durable_size.fetch_max(size, Ordering::SeqCst);
        }
        Ok(())
    }

    /// The first task's alone: the file gets longer, or as short as it was.
    fn grow(&mut self) -> Result<(), Error> {
        if self.me != 0 {
            return Ok(());
        }
        let size = self.file.state.size();
        if self.cuts && self.rng.one_in(3) {
            let size = PAGES * PAGE + self.rng.below(PAGE);
            return self.m.files.truncate(self.ino, size);
        }
        if size > 3 * PAGES * PAGE {
            return Ok(());
        }
        if self.rng.one_in(3) {
            self.m
                .files
                .truncate(self.ino, size + self.rng.below(3 * PAGE))?;
        } else {
            let len = self.rng.below(5 * PAGE) as usize + 1;
            self.m.files.write(&self.file, size, &vec![7; len])?;
        }
        self.ledger
            .size
            .store(self.file.state.size(), Ordering::SeqCst);
        Ok(())
    }

    /// Overwrites what others make longer and shorter.
    fn beyond(&mut self) -> Result<(), Error> {
        if self.cuts && self.me == 0 {
            return Ok(());
        }
        let at = PAGES * PAGE + self.rng.below(PAGE);
        let len = 1 + self.rng.below(200);
        if at + len <= self.file.state.size() {
            let data = vec![8; len as usize];
            self.m.files.write(&self.file, at, &data)?;
        }
        Ok(())
    }
}

/// One run of a seed, up to a power cut or to the end.
fn shared_file(seed: u64) {
    let mut rng = Rng::new(seed);
    // So few that pages come and go all the time.
    let frames = *rng.pick(&[32, 64, 128]);
    let mut world = World::new(seed, 64, frames);
    let (cut, cuts) = (rng.one_in(2), rng.one_in(2));
    let ino = {
        let m = world.mount();
        let ino = m.make();
        let file = m.open(ino);
        let ones: Vec<u8> = (0..PAGES * PAGE / 8)
            .flat_map(|_| 1u64.to_le_bytes())
            .collect();
        m.write(&file, 0, &ones);
        drop(file);
        m.close();
        ino
    };
    let ledger = Ledger::new();
    let m = world.mount();
    if cut {
        world.switch.cut_after(rng.below(600));
    }
    sched::run(&format!("seed {seed}"), seed, &world.clock, || {
        thread::parallel(TASKS, |t| {
            let Ok(file) = m.files.open(&m.owners, ino, libc::O_RDWR) else {
                return;
            };
            let mut task = Task {
                me: t as u64,
                m: &m,
                ino,
                file,
                ledger: &ledger,
                rng: Rng::new(seed ^ (t as u64 + 1)),
                cuts,
            };
            for _ in 0..120 {
                if let Err(error) = task.step() {
                    assert!(cut, "seed {seed}: {error}");
                    return;
                }
            }
        });
    });
    let m = if cut {
        world.switch.cut_now();
        drop(m);
        world.restart(&mut rng);
        world.mount()
    } else {
        let (contents, inode) = (m.contents(ino), m.inode(ino));
        let last = m.files.volatile(ino, inode.generation);
        m.files.write_back_all().unwrap();
        m.check(ino);
        assert_eq!(m.files.pages.dirty(), 0);
        m.close();
        let m = world.mount();
        assert_eq!(m.contents(ino), contents, "seed {seed}");
        let mtime = last.and_then(|v| v.times.mtime).unwrap_or(inode.mtime);
        assert!(m.inode(ino).mtime >= mtime, "seed {seed}");
        m
    };
    m.check(ino);
    let found = m.contents(ino);
    let size = ledger.durable_size.load(Ordering::SeqCst);
    assert!(
        found.len() as u64 >= size,
        "seed {seed}: {} of {size} bytes",
        found.len()
    );
    let durable = ledger.durable.lock().clone();
    for (unit, bytes) in found.chunks(UNIT as usize).enumerate().take(durable.len()) {
        let known = durable[unit]..=ledger.begun[unit].load(Ordering::SeqCst);
        // What was not synced is torn by sectors.
        for value in words(bytes) {
            assert!(
                known.contains(&value),
                "seed {seed}: unit {unit} has {value}, not {known:?}"
            );
        }
    }
}

#[test]
fn tasks_share_a_file_in_any_order() {
    for seed in 0..60 {
        shared_file(seed);
    }
}

/// Cuts in the middle of a page that others overwrite, and makes the file as long as it was.
fn cut_and_overwritten(seed: u64) {
    let world = World::new(seed, 64, 64);
    let m = world.mount();
    let (ino, file) = at_home(&m, 2);
    let (begun, ended) = (AtomicU64::new(0), AtomicU64::new(0));
    let overwrite = |rng: &mut Rng| {
        begun.fetch_add(1, Ordering::SeqCst);
        let at = PAGE + rng.below(PAGE - 200);
        if at + 200 <= file.state.size() {
            m.write(&file, at, &[8; 200]);
        }
        ended.fetch_add(1, Ordering::SeqCst);
    };
    let cut = |rng: &mut Rng| {
        let short = PAGE + rng.below(PAGE);
        m.files.truncate(ino, short).unwrap();
        let before = begun.load(Ordering::SeqCst);
        // One that was not over yet may come after the cut, and make the file longer.
        let idle = ended.load(Ordering::SeqCst) == before && file.state.size() == short;
        m.files.truncate(ino, 2 * PAGE).unwrap();
        let mut added = vec![0xEE; (2 * PAGE - short) as usize];
        m.files.read(&file, short, &mut added).unwrap();
        if idle && begun.load(Ordering::SeqCst) == before {
            assert!(added.iter().all(|&b| b == 0), "seed {seed}: it is there");
        }
    };
    sched::run(&format!("seed {seed}"), seed, &world.clock, || {
        thread::parallel(3, |t| {
            let mut rng = Rng::new(seed ^ (t as u64 + 1));
            for _ in 0..40 {
                match t {
                    0 => cut(&mut rng),
                    _ => overwrite(&mut rng),
                }
            }
        });
    });
    m.files.write_back_all().unwrap();
    m.check(ino);
}

#[test]
fn what_is_cut_off_is_gone_whoever_overwrites_it() {
    for seed in 0..60 {
        cut_and_overwritten(seed);
    }
}
