//! Read-ahead by threads: what they bring is what a reader would have read, and nobody waits for them for ever.

use super::*;
use crate::data::Advice;
use crate::data::ahead::{Ahead, Found, TASKS};

/// A file that is home, and a mount that has none of it in memory.
fn cold(seed: u64, frames: usize, pages: u64) -> (World, Mounted, Ino) {
    let world = World::new(seed, 64, frames);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    for page in 0..pages {
        m.write(&file, page * PAGE, &pattern(page, PAGE as usize));
    }
    drop(file);
    m.close();
    let m = world.mount();
    (world, m, ino)
}

#[test]
fn a_sequential_reader_finds_what_threads_have_brought() {
    const PAGES: u64 = 1500;
    for step in [1024, 4096, 16 << 10, 1 << 20] {
        let (_world, m, ino) = cold(81, 4096, PAGES);
        m.files.start_ahead().unwrap();
        let file = m.open(ino);
        let mut buf = vec![0; step];
        for at in (0..PAGES * PAGE).step_by(step) {
            let len = m.files.read(&file, at, &mut buf).unwrap();
            for (page, content) in (at / PAGE..).zip(buf[..len].chunks(PAGE as usize)) {
                let expected = pattern(page, PAGE as usize);
                let within = (at % PAGE) as usize;
                assert!(content == &expected[within..][..content.len()], "{page}");
            }
        }
        let counters = m.files.page_counters();
        assert!(counters.inserted >= PAGES, "{counters:?}");
        m.files.stop();
        m.close();
    }
}

/// Each page that a read wants is a hit or a miss, and each that is brought a miss or read ahead; direct reads are none of it.
#[test]
fn pages_are_counted_as_found_or_brought() {
    const PAGES: u64 = 600;
    let (_world, m, ino) = cold(83, 4096, PAGES);
    let counted = |flags, step: u64| {
        let before = m.files.page_counters();
        let file = m.files.open(&m.owners, ino, flags).unwrap();
        let mut buf = vec![0; (step * PAGE) as usize];
        for page in (0..PAGES).step_by(step as usize) {
            m.files.read(&file, page * PAGE, &mut buf).unwrap();
        }
        let now = m.files.page_counters();
        [
            now.hits - before.hits,
            now.misses - before.misses,
            now.ahead - before.ahead,
        ]
    };
    assert_eq!(counted(libc::O_RDONLY | libc::O_DIRECT, 8), [0; 3]);
    let [hits, misses, ahead] = counted(libc::O_RDONLY, 8);
    assert_eq!((hits + misses, misses + ahead), (PAGES, PAGES));
    assert!(hits > 0 && misses > 0, "{hits} {misses}");
    assert_eq!(counted(libc::O_RDONLY, 8), [PAGES, 0, 0]);
    m.close();
}

/// A task that a thread has not begun is the reader's, with all its pages; one that loads is waited for.
#[test]
fn a_reader_takes_over_what_is_not_begun() {
    let key = |nid| FileKey {
        nid: Nid(nid),
        generation: 1,
    };
    let ahead = Ahead::new();
    assert!(!ahead.ask(1, key(1), 0..8), "nobody reads");
    ahead.tasks.lock().open = true;
    assert!(
        ahead.ask(1, key(1), 0..8) && ahead.ask(1, key(1), 8..24) && ahead.ask(2, key(2), 0..8)
    );
    assert_eq!(ahead.look_for(1, key(1), 24), Found::Free(25));
    assert_eq!(
        ahead.look_for(7, key(1), 9),
        Found::Free(10),
        "another's stays"
    );
    assert_eq!(ahead.look_for(1, key(1), 9), Found::Free(24));
    assert_eq!(ahead.look_for(1, key(1), 9), Found::Free(10));
    let taken = ahead.take().unwrap();
    assert_eq!((taken.key, taken.pages.clone()), (key(1), 0..8));
    assert_eq!(ahead.look_for(1, key(1), 0), Found::Free(8));
    assert!(!ahead.begin(taken.number), "it is the reader's by now");
    ahead.end(taken.number);
    ahead.give_up(2);
    assert_eq!(ahead.tasks.lock().list.len(), 0);
    for i in 0..TASKS as u64 {
        assert!(ahead.ask(3, key(3), i..i + 1));
    }
    assert!(!ahead.ask(3, key(3), 99..100), "there is no room");
    ahead.close();
    assert!(ahead.take().is_none() && !ahead.ask(3, key(3), 0..1));
}

/// Pages of a file that are cached, without a use of them.
fn cached(m: &Mounted, ino: Ino, pages: u64) -> u64 {
    let key = m.open(ino).state.key;
    let is_cached = |page: &u64| m.files.pages.absence(key, *page).is_none();
    (0..pages).filter(is_cached).count() as u64
}

#[test]
fn nobody_reads_ahead_of_who_does_not_want_it_or_finds_all_in_memory() {
    let (mut world, m, ino) = cold(82, 4096, 600);
    m.files.start_ahead().unwrap();
    let scan = |m: &Mounted, flags, end: u64| {
        let file = m
            .files
            .open(&m.owners, ino, libc::O_RDONLY | flags)
            .unwrap();
        let mut buf = vec![0; 16 << 10];
        for at in (0..end * PAGE).step_by(buf.len()) {
            m.files.read(&file, at, &mut buf).unwrap();
        }
        let asked = file
            .reads
            .iter()
            .map(|run| run.asked.load(base::atomic::Ordering::Relaxed));
        asked.max().unwrap_or(0)
    };
    assert_eq!(scan(&m, libc::O_DIRECT, 600), 0);
    assert_eq!(cached(&m, ino, 600), 0, "past the cache");
    assert!(scan(&m, 0, 600) > 0);
    assert_eq!(cached(&m, ino, 600), 600);
    assert_eq!(scan(&m, 0, 600), 0, "all is in memory");
    m.files.stop();
    m.close();
    world.options.read_ahead = 0;
    let m = world.mount();
    scan(&m, 0, 40);
    assert_eq!(cached(&m, ino, 600), 40);
    m.close();
}

/// Does what was asked for, in place of the threads.
fn follow(m: &Mounted) {
    let count = m.files.ahead.tasks.lock().list.len();
    for _ in 0..count {
        let task = m.files.ahead.take().unwrap();
        m.files.read_task(&task).unwrap();
        m.files.ahead.end(task.number);
    }
}

#[test]
fn what_a_program_says_it_needs_is_brought_and_what_it_does_not_need_leaves() {
    const PAGES: u64 = 600;
    let (_world, m, ino) = cold(83, 4096, PAGES);
    m.files.ahead.tasks.lock().open = true;
    let file = m.open(ino);
    let advise = |pages: std::ops::Range<u64>, advice| {
        let bytes = pages.start * PAGE..pages.end * PAGE;
        m.files.advise(&file, bytes, advice).unwrap();
    };
    advise(100..200, Advice::WillNeed);
    follow(&m);
    assert_eq!(cached(&m, ino, PAGES), 100);
    advise(0..1 << 40, Advice::WillNeed);
    follow(&m);
    assert_eq!(cached(&m, ino, PAGES), PAGES);
    advise(0..1 << 40, Advice::WillNeed);
    assert!(m.files.ahead.tasks.lock().list.is_empty(), "all is there");
    // Parts of pages stay, and what is dirty.
    m.write(&file, 300 * PAGE, &pattern(300, PAGE as usize));
    let bytes = 250 * PAGE + 1..400 * PAGE - 1;
    m.files.advise(&file, bytes, Advice::DontNeed).unwrap();
    assert_eq!(cached(&m, ino, PAGES), PAGES - (400 - 250 - 2) + 1);
    advise(0..PAGES, Advice::DontNeed);
    assert_eq!(cached(&m, ino, PAGES), 1);
    let mut buf = vec![0; PAGE as usize];
    for page in [0, 300, PAGES - 1] {
        m.files.read(&file, page * PAGE, &mut buf).unwrap();
        assert_eq!(buf, pattern(page, PAGE as usize));
    }
    drop(file);
    m.close();
}

#[test]
fn a_handle_is_read_ahead_of_as_its_program_says() {
    let (_world, m, ino) = cold(84, 4096, 600);
    let scan = |advice, end: u64| {
        let file = m.open(ino);
        m.files.advise(&file, 0..0, advice).unwrap();
        let mut buf = vec![0; 16 << 10];
        for at in (0..end * PAGE).step_by(buf.len()) {
            m.files.read(&file, at, &mut buf).unwrap();
        }
        let found = cached(&m, ino, 600);
        m.files
            .advise(&file, 0..u64::MAX, Advice::DontNeed)
            .unwrap();
        found
    };
    assert_eq!(scan(Advice::Random, 40), 40);
    let (normal, most) = (scan(Advice::Normal, 8), scan(Advice::Sequential, 8));
    assert!(most > normal && normal > 8, "{most}, {normal}");
    // What came before another page of its set did, and was read after that, looks as if it was used again.
    let left = scan(Advice::NoReuse, 600);
    assert!(left < 150, "{left}");
    // What others have brought stays, unless it came last.
    let other = m.open(ino);
    let mut page = vec![0; PAGE as usize];
    for at in 0..600 {
        m.files.read(&other, at * PAGE, &mut page).unwrap();
    }
    drop(other);
    let kept = scan(Advice::NoReuse, 600);
    assert!((200..600).contains(&kept), "{kept}");
    m.close();
}
