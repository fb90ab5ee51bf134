//! Pages that go home before somebody needs their frames.

use super::*;
use base::atomic::{AtomicBool, Ordering};
use base::counted::Counted;
use base::thread;
use device::sim::Times as Strikes;
use engine::cache::{Backing, PageState};
use std::time::Duration;

/// Pages of the cache, and of a file that is much larger.
const FRAMES: usize = 256;
const PAGES: u64 = 1024;

/// A file of whole pages that is home, and open.
fn at_home(m: &Mounted) -> Arc<OpenFile> {
    let file = m.open(m.make());
    for page in (0..PAGES).step_by(16) {
        m.write(&file, page * PAGE, &[1; 16 * PAGE as usize]);
    }
    m.files.write_back_all().unwrap();
    m.store.sync().unwrap();
    m.commit_more();
    file
}

/// The device that a page of a file is on.
fn device_of(m: &Mounted, file: &OpenFile, page: u64) -> usize {
    let found = m.files.block_of(&file.state, &(page..page + 1));
    m.files.place_of(found.unwrap().unwrap().1, 1).0
}

fn content(page: u64, turn: u64) -> Vec<u8> {
    pattern(page << 20 | turn, PAGE as usize)
}

/// Makes a set crowded, and one more; returns the pages.
fn crowd(m: &Mounted, file: &OpenFile, turn: u64) -> Vec<u64> {
    let set = |page: u64| m.files.pages.set_of(file.state.key, page);
    let pages: Vec<u64> = (0..PAGES).filter(|&p| set(p) == set(0)).take(13).collect();
    for &page in &pages {
        m.write(file, page * PAGE, &content(page, turn));
    }
    assert_eq!((m.files.pages.crowded(), m.files.pages.dirty()), (1, 13));
    pages
}

/// What a remount finds.
fn is_found(world: &World, ino: Ino, expected: &[u64]) {
    let m = world.mount();
    let all = m.contents(ino);
    for (page, (found, &turn)) in all.chunks(PAGE as usize).zip(expected).enumerate() {
        match turn {
            0 => assert_eq!(found, [1; PAGE as usize], "page {page}"),
            _ => assert_eq!(found, content(page as u64, turn), "page {page}"),
        }
    }
}

#[test]
fn overwrites_at_random_places_always_find_room_where_crowded_sets_are_cleaned() {
    let world = World::new(60, 64, FRAMES);
    let m = world.mount();
    let file = at_home(&m);
    let (mut turns, mut rng) = (vec![0; PAGES as usize], Rng::new(60));
    // As if by threads.
    m.files.cleaning.set_running();
    let (before, alone) = (m.files.page_counters(), file.state.exclusives());
    for turn in 1..6000 {
        let page = rng.below(PAGES);
        m.write(&file, page * PAGE, &content(page, turn));
        turns[page as usize] = turn;
        if turn % 2 == 0 {
            m.files.clean_now();
        }
    }
    let counted = m.files.page_counters();
    assert_eq!(counted.no_room, before.no_room);
    assert_eq!(file.state.exclusives(), alone, "none needed the file alone");
    let [cleaned, writes, waits] = m.files.cleaning_counts();
    assert!(cleaned > 3000 && writes < cleaned, "{cleaned} in {writes}");
    assert_eq!(waits, 0);
    let ino = file.ino();
    m.files.fsync(&file, true).unwrap();
    drop(file);
    m.close();
    is_found(&world, ino, &turns);
}

#[test]
fn neighbours_that_are_dirty_go_home_in_one_write() {
    let world = World::new(61, 64, FRAMES);
    let m = world.mount();
    let file = at_home(&m);
    let pages = crowd(&m, &file, 2);
    for page in pages {
        let first = page / 4 * 4;
        (first..first + 4).for_each(|p| m.write(&file, p * PAGE, &content(p, 3)));
    }
    m.files.clean_now();
    let [cleaned, writes, _] = m.files.cleaning_counts();
    assert!(
        writes >= 2 && cleaned == 4 * writes,
        "{cleaned} in {writes}"
    );
}

#[test]
fn what_needs_a_record_is_left_to_write_back() {
    let mut world = World::new(62, 64, FRAMES);
    // All pages are in one set.
    world.options.cache_bytes = 16 * BLOCK_SIZE;
    let m = world.mount();
    // As if by threads.
    m.files.cleaning.set_running();
    let is_dirty = |file: &OpenFile, page| {
        let state = m.files.pages.state(file.state.key, page);
        state == Some(PageState::Dirty(Backing::Allocated))
    };
    let clean = |file: &OpenFile| {
        assert!(m.files.pages.crowded() > 0);
        m.files.clean_now();
        let files = m.files.cleaning.take_files();
        (0..13).filter(|&p| is_dirty(file, p)).count() == 13 && files.contains(&file.ino())
    };
    // Blocks that nobody has written.
    let file = m.open(m.make());
    (m.files).fallocate(&file, 0, 0, 16 * PAGE).unwrap();
    (0..13).for_each(|p| m.write(&file, p * PAGE, &[3; PAGE as usize]));
    assert!(clean(&file), "unwritten blocks");
    m.files.write_back_all().unwrap();
    m.store.sync().unwrap();
    m.commit_more();
    // A file that something has failed of.
    (0..13).for_each(|p| m.write(&file, p * PAGE, &[4; PAGE as usize]));
    let long_ago = m.files.now_ns() - 2_000_000_000;
    (file.state.meta.lock()).fail_write_back("so the test has it".into(), long_ago);
    assert!(clean(&file), "a failed file");
    m.files.write_back_all().unwrap();
    // What the newest batch vouches for.
    let file = m.open(m.make());
    m.write(&file, 0, &[5; 13 * PAGE as usize]);
    m.files.fsync(&file, true).unwrap();
    assert!(m.store.vouches());
    (0..13).for_each(|p| m.write(&file, p * PAGE, &[6; PAGE as usize]));
    assert!(clean(&file), "what is vouched for");
    m.commit_more();
    m.commit_more();
    assert!(!m.store.vouches());
    m.files.clean_now();
    assert_eq!(m.files.pages.crowded(), 0, "no more");
}

#[test]
fn a_page_that_cannot_be_cleaned_stays_and_its_file_knows() {
    let world = World::new(63, 64, FRAMES);
    let m = world.mount();
    let file = at_home(&m);
    let pages = crowd(&m, &file, 7);
    for device in &world.devices {
        device.fail_writes(Strikes::Always, None);
    }
    m.files.clean_now();
    assert_eq!(m.files.pages.dirty(), 13);
    for device in &world.devices {
        device.heal();
    }
    assert_eq!(m.files.fsync(&file, true).unwrap_err().errno(), libc::EIO);
    let mut page = vec![0; PAGE as usize];
    m.files.read(&file, pages[3] * PAGE, &mut page).unwrap();
    assert_eq!(page, content(pages[3], 7));
    assert_eq!(m.files.pages.dirty(), 0, "the sync has written it");
}

/// Write-back was tried again as often as the set was looked at, some hundred times a second; and once all was well, the file was cleaned
/// no more.
#[test]
fn a_failed_file_in_a_crowded_set_is_tried_once_in_a_while_until_it_is_home() {
    let world = World::new(72, 64, FRAMES);
    let m = world.mount();
    let file = at_home(&m);
    // As if by threads.
    m.files.cleaning.set_running();
    crowd(&m, &file, 7);
    for device in &world.devices {
        device.fail_writes(Strikes::Always, None);
    }
    let failures = || file.state.meta.lock().failure.count;
    let look_often = || {
        let before = failures();
        for _ in 0..50 {
            m.files.clean_now();
            let _ = m.files.tick();
        }
        failures() - before
    };
    // A piece for each page, perhaps.
    let first = look_often();
    assert!((1..=13).contains(&first), "{first} failures");
    // Until it is old, too.
    for _ in 0..6 {
        world.clock.advance(Duration::from_millis(1100));
        assert_eq!(look_often(), 1);
    }
    for device in &world.devices {
        device.heal();
    }
    assert_eq!(m.files.pages.dirty(), 13);
    world.clock.advance(Duration::from_millis(1100));
    assert_eq!((look_often(), m.files.pages.dirty()), (0, 0));
    crowd(&m, &file, 8);
    m.files.clean_now();
    assert_eq!(m.files.pages.crowded(), 0, "it is cleaned again");
    assert_eq!(m.files.fsync(&file, true).unwrap_err().errno(), libc::EIO);
}

#[test]
fn a_flush_that_fails_meanwhile_counts_for_what_was_cleaned() {
    let world = World::new(64, 64, FRAMES);
    let m = world.mount();
    let file = at_home(&m);
    let wanted: Vec<_> = crowd(&m, &file, 7)
        .into_iter()
        .map(|page| (file.state.key, page))
        .collect();
    for device in 0..world.devices.len() {
        m.files.clean(device, &wanted);
    }
    assert_eq!(m.files.pages.dirty(), 0, "the sync has nothing to write");
    for device in &world.devices {
        device.fail_flushes(Strikes::Always);
    }
    assert_eq!(m.files.fsync(&file, true).unwrap_err().errno(), libc::EIO);
}

/// Who has the turn beside syncs may wait for a device that does not answer, and others for the file.
#[test]
fn who_cleans_beside_syncs_waits_for_no_turn() {
    let world = World::new(71, 64, FRAMES);
    let m = world.mount();
    let file = at_home(&m);
    crowd(&m, &file, 7);
    m.files.pace.note_sync(m.files.now_ns());
    assert!(m.files.keeps_pace());
    let (held, done) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::parallel(2, |t| {
        if t == 1 {
            let _turn = m.files.pace.try_turn().unwrap();
            held.store(true, Ordering::SeqCst);
            while !done.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            return;
        }
        while !held.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        m.files.clean_now();
        let dirty = m.files.pages.dirty();
        // Also if that is wrong.
        done.store(true, Ordering::SeqCst);
        assert_eq!(dirty, 13);
    });
    m.files.clean_now();
    assert!(m.files.pages.dirty() < 13);
}

#[test]
fn writers_wait_for_threads_that_clean_and_never_for_the_file_alone() {
    let world = World::new(65, 64, FRAMES);
    let m = world.mount();
    let file = at_home(&m);
    m.files.start_cleaning().unwrap();
    let alone = file.state.exclusives();
    let turns: Vec<Vec<u64>> = thread::parallel(3, |t| {
        let (mut turns, mut rng) = (vec![0; PAGES as usize], Rng::new(t as u64));
        for turn in 1..6000 {
            // Of its own, and now and then of several pages.
            let page = rng.below(PAGES / 3 - 2) * 3 + t as u64;
            m.write(&file, page * PAGE, &content(page, turn));
            turns[page as usize] = turn;
        }
        turns
    });
    assert_eq!(file.state.exclusives(), alone);
    assert!(m.files.cleaning_counts()[0] > 3000);
    m.files.stop();
    assert!(!m.files.cleaning.is_running());
    let ino = file.ino();
    m.files.fsync(&file, true).unwrap();
    drop(file);
    m.close();
    let last = |page: usize| turns.iter().map(|t| t[page]).max().unwrap();
    is_found(
        &world,
        ino,
        &(0..PAGES as usize).map(last).collect::<Vec<_>>(),
    );
}

#[test]
fn writes_of_several_pages_wait_for_room_and_stay_whole() {
    let world = World::new(66, 64, FRAMES);
    let m = world.mount();
    let file = at_home(&m);
    m.files.start_cleaning().unwrap();
    let alone = file.state.exclusives();
    thread::parallel(3, |t| {
        let mut rng = Rng::new(t as u64);
        for turn in 0..1500u64 {
            let page = rng.below(PAGES - 8);
            let mut bytes = vec![0; 5 * PAGE as usize];
            match t {
                0 => {
                    m.files.read(&file, page * PAGE, &mut bytes).unwrap();
                }
                _ => {
                    bytes.fill((turn + t as u64) as u8);
                    m.write(&file, page * PAGE, &bytes);
                }
            }
        }
    });
    // Who never finds room between the others' turns takes the file alone at last.
    let alone = file.state.exclusives() - alone;
    assert!(alone < 3000 / 50, "{alone} of 3000 did not wait");
    m.files.stop();
}

/// Its error was told though half of it was written.
#[test]
fn a_write_that_fails_when_it_goes_on_tells_how_far_it_came() {
    const WIDE: u64 = 8;
    let world = World::new(70, 64, FRAMES);
    let m = world.mount();
    let file = at_home(&m);
    let key = file.state.key;
    // As if by threads.
    m.files.cleaning.set_running();
    // The set of a page in the midst takes no dirty one more.
    let full = m.files.pages.set_of(key, WIDE / 2);
    let mut others = (2 * WIDE..PAGES).filter(|&page| m.files.pages.set_of(key, page) == full);
    while m.files.pages.has_room(full) {
        let page = others.next().unwrap();
        m.write(&file, page * PAGE, &content(page, 1));
    }
    let bytes = vec![9; (WIDE * PAGE) as usize + 100];
    let waits = || m.files.cleaning_counts()[2];
    let before = waits();
    let done = thread::parallel(2, |t| {
        if t == 0 {
            return Some(m.files.write(&file, 0, &bytes));
        }
        while waits() == before {
            thread::yield_now();
        }
        m.files.pages.forget(key, WIDE..WIDE + 1, false);
        for device in &world.devices {
            device.fail_reads(Strikes::Always, None);
        }
        m.files.clean_now();
        None
    });
    world.devices.iter().for_each(|device| device.heal());
    let struck: usize = world.devices.iter().map(|d| d.struck().len()).sum();
    assert!(struck > 0, "it was read again");
    let written = done.into_iter().flatten().next().unwrap().unwrap();
    assert!(written >= (WIDE / 2 * PAGE) as usize && written < bytes.len());
    let found = m.contents(file.ino());
    assert!(found[..written] == bytes[..written]);
    assert!(found[(WIDE * PAGE) as usize..][..100] == [1; 100]);
}

/// As long as a device does not answer, pages of the other one are cleaned, and who writes to them goes on.
#[test]
fn a_device_that_does_not_answer_holds_up_its_own_pages_alone() {
    let world = World::new(67, 64, FRAMES);
    let m = world.mount();
    let file = at_home(&m);
    let (slow, fast): (Vec<u64>, Vec<u64>) =
        (0..PAGES).partition(|&page| device_of(&m, &file, page) == 1);
    assert!(slow.len() > 300 && fast.len() > 300, "{}", slow.len());
    m.files.start_cleaning().unwrap();
    let alone = file.state.exclusives();
    world.devices[1].stick();
    // More than a set is crowded with, but not so many that nothing else has room.
    let mut rng = Rng::new(67);
    for _ in 0..2 * FRAMES / 5 {
        let page = *rng.pick(&slow);
        m.write(&file, page * PAGE, &content(page, 1));
    }
    let mut turns = vec![0; PAGES as usize];
    for turn in 2..5000 {
        let page = *rng.pick(&fast);
        m.write(&file, page * PAGE, &content(page, turn));
        turns[page as usize] = turn;
    }
    assert!(m.files.cleaning_counts()[0] > 2000);
    assert_eq!(file.state.exclusives(), alone);
    let dirty = m.files.pages.dirty_pages(file.state.key, 0..PAGES, 9999);
    assert!(
        dirty.iter().any(|page| slow.contains(page)),
        "it has answered nothing"
    );
    world.devices[1].release();
    m.files.stop();
    let ino = file.ino();
    m.files.fsync(&file, true).unwrap();
    drop(file);
    m.close();
    let m = world.mount();
    let all = m.contents(ino);
    for page in fast.into_iter().filter(|&page| turns[page as usize] > 0) {
        let at = (page * PAGE) as usize;
        assert_eq!(
            all[at..at + PAGE as usize],
            content(page, turns[page as usize])
        );
    }
}

/// A file that is old goes home page by page, though it is written over all the time, and is young again then.
#[test]
fn an_old_file_is_cleaned_whole_without_its_write_back() {
    let world = World::new(68, 64, 2048);
    let m = world.mount();
    let file = at_home(&m);
    m.files.start_cleaning().unwrap();
    for page in 0..PAGES / 2 {
        m.write(&file, page * 2 * PAGE, &content(page, 1));
    }
    assert_eq!(m.files.pages.crowded(), 0);
    let began = m.files.now_ns();
    world
        .clock
        .advance(m.files.options.write_back_age + Duration::from_secs(1));
    let turn = Counted::clone(&file.state);
    // Its write-back would wait for this.
    let _turn = turn.flusher.lock();
    m.files.tick().unwrap();
    for _ in 0..1_000_000 {
        if m.files.pages.dirty() == 0 {
            break;
        }
        m.write(&file, 0, &content(0, 2));
        thread::yield_now();
    }
    assert!(m.files.pages.dirty() <= 1, "{}", m.files.pages.dirty());
    if let Some(since) = m.files.pages.dirty_since(file.state.key) {
        assert!(since > began);
    }
    m.files.stop();
}

/// One that had nothing of the file seemed to be at a batch, and after a while to be late.
#[test]
fn a_device_that_has_nothing_of_an_old_file_is_at_no_batch() {
    let world = World::new(69, 64, 2048);
    let m = world.mount();
    let file = at_home(&m);
    let on_first = |page: &u64| device_of(&m, &file, *page) == 0;
    let page = (0..PAGES).find(on_first).unwrap();
    for turn in 1..3 {
        m.write(&file, page * PAGE, &content(page, turn));
        assert!(!m.files.sweep_once(1, file.state.key));
        assert_eq!(m.files.pages.dirty(), 1);
        assert!(!m.files.sweep_once(0, file.state.key));
        assert_eq!(m.files.pages.dirty(), 0);
    }
}
