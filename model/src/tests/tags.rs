//! Readers that copy a page without the lock of its set, beside who overwrites it and who gives its frame to another page.

use super::check;
use crate::tags::{Look, Name, Tag};
use base::atomic::{
    AtomicBool, AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use loom::sync::Mutex;
use loom::sync::atomic::{Ordering::SeqCst, fence};
use std::cell::Cell;
use std::sync::Arc;

const FIRST: Name = Name {
    nid: 1,
    generation: 5,
    page: 9,
};
/// Another use of the number, so that it differs in one word alone.
const SECOND: Name = Name {
    generation: 6,
    ..FIRST
};

const NO_PANIC: &str = "no thread of a model panics";

/// Two ways, whose frames are two words. Both of a word are equal in each content.
struct Set {
    tags: [Tag; 2],
    frames: [[AtomicU32; 2]; 2],
    lock: Mutex<()>,
}

impl Set {
    /// The first page is in the first way, and holds 10.
    fn new() -> Arc<Set> {
        let word = || AtomicU32::new(0);
        let set = Set {
            tags: [Tag::new(), Tag::new()],
            frames: [[word(), word()], [word(), word()]],
            lock: Mutex::new(()),
        };
        set.fill(0, FIRST, 10);
        Arc::new(set)
    }

    fn write(&self, way: usize, content: u32) {
        self.frames[way]
            .iter()
            .for_each(|word| word.store(content, Relaxed));
    }

    fn fill(&self, way: usize, name: Name, content: u32) {
        let tag = &self.tags[way];
        tag.change(|| {
            tag.set_name(name);
            self.write(way, content);
        });
    }

    /// If the page is there.
    fn overwrite(&self, name: Name, content: u32) {
        let _held = self.lock.lock().expect(NO_PANIC);
        if let Some(way) = (0..2).find(|&way| self.tags[way].is(&name)) {
            self.tags[way].change(|| self.write(way, content));
        }
    }

    /// The first way is emptied, and then given to another page.
    fn replace(&self, name: Name, content: u32) {
        let _held = self.lock.lock().expect(NO_PANIC);
        let tag = &self.tags[0];
        tag.change(|| tag.set_name(Name::NONE));
        self.fill(0, name, content);
    }

    /// The first way is emptied and its frame set aside; what comes from a device gets there without the lock, and is shown then.
    fn load(&self, name: Name, content: u32) {
        {
            let _held = self.lock.lock().expect(NO_PANIC);
            let tag = &self.tags[0];
            tag.change(|| tag.set_name(Name::NONE));
        }
        self.write(0, content);
        let _held = self.lock.lock().expect(NO_PANIC);
        self.tags[0].change(|| self.tags[0].set_name(name));
    }

    fn read(&self, name: Name) -> Option<u32> {
        let copy = [Cell::new(0), Cell::new(0)];
        for (tag, frame) in self.tags.iter().zip(&self.frames) {
            let look = tag.look(&name, || {
                let words = copy.iter().zip(frame);
                words.for_each(|(to, from)| to.set(from.load(Relaxed)));
            });
            if look == Look::Found {
                let [first, second] = copy;
                assert_eq!(first.get(), second.get(), "parts of two contents");
                return Some(first.get());
            }
        }
        None
    }
}

/// A reader of one page beside whoever changes something.
fn beside(
    name: Name,
    change: impl Fn(&Set) + Sync + Send + Copy + 'static,
    allowed: &'static [u32],
) {
    check(3, move || {
        let set = Set::new();
        let reader = {
            let set = Arc::clone(&set);
            loom::thread::spawn(move || set.read(name))
        };
        change(&set);
        let read = reader.join().expect(NO_PANIC);
        assert!(
            read.is_none_or(|content| allowed.contains(&content)),
            "{read:?}"
        );
    });
}

/// Whatever happens meanwhile, a reader gets one content of the page that it asked for, or finds nothing.
///
/// Found when broken: `look` without its fence, without its second look at the version, with a first look that is
/// relaxed, or one that takes an odd version; `change` without its fence, with a first store of the version after the bytes, or with
/// a last one that is relaxed.
#[test]
fn a_copy_is_of_one_moment() {
    beside(FIRST, |set| set.overwrite(FIRST, 11), &[10, 11]);
    let twice = |set: &Set| {
        set.overwrite(FIRST, 11);
        set.overwrite(FIRST, 12);
    };
    beside(FIRST, twice, &[10, 11, 12]);
}

/// As above, and nothing of another page.
///
/// Found when broken: as above; and a look that does not compare generations.
#[test]
fn a_copy_is_of_the_page_that_was_asked_for() {
    beside(FIRST, |set| set.replace(SECOND, 20), &[10]);
    beside(SECOND, |set| set.replace(SECOND, 20), &[20]);
}

/// A frame is filled without the lock, while it is nobody's.
///
/// Found when broken: as above; a frame that is filled before its page has gone, or shown before it is filled.
#[test]
fn a_copy_is_none_of_a_frame_that_is_being_loaded() {
    beside(FIRST, |set| set.load(SECOND, 20), &[10]);
    beside(SECOND, |set| set.load(SECOND, 20), &[20]);
    beside(FIRST, |set| set.load(FIRST, 11), &[10, 11]);
}

/// Two who change pages of one set, beside a reader of one of them.
#[test]
fn a_copy_is_of_one_moment_beside_two_writers() {
    check(2, || {
        let set = Set::new();
        set.fill(1, SECOND, 20);
        let reader = {
            let set = Arc::clone(&set);
            loom::thread::spawn(move || set.read(SECOND))
        };
        let other = {
            let set = Arc::clone(&set);
            loom::thread::spawn(move || set.overwrite(SECOND, 21))
        };
        set.overwrite(FIRST, 11);
        set.overwrite(SECOND, 22);
        let read = reader.join().expect(NO_PANIC);
        assert!(matches!(read, None | Some(20..=22)), "{read:?}");
        other.join().expect(NO_PANIC);
        assert_eq!(set.read(FIRST), Some(11));
    });
}

/// What a reader did before, and told everybody with a fence, is seen by whoever overwrote what it read, after a fence: so a file that
/// was looked at before its old content was read gets another time (`fs::data::write`).
///
/// Found when broken: either fence left out.
#[test]
fn who_overwrites_what_was_read_sees_what_the_reader_did_before() {
    check(3, || {
        let set = Set::new();
        let looked = Arc::new(AtomicBool::new(false));
        let reader = {
            let (set, looked) = (Arc::clone(&set), Arc::clone(&looked));
            loom::thread::spawn(move || {
                looked.store(true, Release);
                fence(SeqCst);
                set.read(FIRST)
            })
        };
        set.overwrite(FIRST, 11);
        fence(SeqCst);
        let seen = looked.load(Acquire);
        let old = reader.join().expect(NO_PANIC) == Some(10);
        assert!(seen || !old);
    });
}

/// A way whose frame somebody has a guard of, and a spare frame; another way gets the frame when that has ended.
struct Guarded {
    tags: [Tag; 2],
    /// The frames of the ways.
    numbers: [AtomicU32; 2],
    frames: [[AtomicU32; 2]; 2],
    /// The first frame has a guard.
    lock: Mutex<bool>,
}

impl Guarded {
    /// The first page is in the first frame, holds 10 and has a guard; the second way is empty.
    fn new() -> Arc<Guarded> {
        let word = || AtomicU32::new(0);
        let set = Guarded {
            tags: [Tag::new(), Tag::new()],
            numbers: [AtomicU32::new(0), AtomicU32::new(0)],
            frames: [[word(), word()], [word(), word()]],
            lock: Mutex::new(true),
        };
        set.tags[0].change(|| {
            set.tags[0].set_name(FIRST);
            set.write(0, 10);
        });
        Arc::new(set)
    }

    fn write(&self, frame: usize, content: u32) {
        (self.frames[frame].iter()).for_each(|word| word.store(content, Relaxed));
    }

    /// The page gets the spare frame if its own has a guard.
    fn overwrite(&self, content: u32) {
        let guarded = self.lock.lock().expect(NO_PANIC);
        self.tags[0].change(|| {
            let frame = usize::from(*guarded);
            self.numbers[0].store(frame as u32, Relaxed);
            self.write(frame, content);
        });
    }

    /// Another page, in the second way, gets the first frame, if that is nobody's by now.
    fn reuse(&self, content: u32) {
        let guarded = self.lock.lock().expect(NO_PANIC);
        if *guarded || self.numbers[0].load(Relaxed) == 0 {
            return;
        }
        self.tags[1].change(|| {
            self.tags[1].set_name(SECOND);
            self.write(0, content);
        });
    }

    fn read(&self) -> Option<u32> {
        let copy = [Cell::new(0), Cell::new(0)];
        let look = self.tags[0].look(&FIRST, || {
            let frame = self.numbers[0].load(Relaxed) as usize;
            let words = copy.iter().zip(&self.frames[frame]);
            words.for_each(|(to, from)| to.set(from.load(Relaxed)));
        });
        let [first, second] = copy.map(Cell::into_inner);
        (look == Look::Found).then(|| {
            assert_eq!(first, second, "parts of two contents");
            first
        })
    }

    /// What the guard shows, and its end.
    fn end_guard(&self) {
        for word in &self.frames[0] {
            assert_eq!(word.load(Relaxed), 10, "a guarded frame is written");
        }
        *self.lock.lock().expect(NO_PANIC) = false;
    }
}

/// A page that has a guard is overwritten, and its old frame used for another page when the guard has gone: the guard shows what the page was, and
/// who copies gets one content of it.
///
/// Found when broken: a look that chooses the frame before it reads the version; a frame that is written over under its guard; one that is
/// used again before the guard has gone.
#[test]
fn a_guard_shows_one_content_and_nobody_reads_a_frame_that_was_left() {
    check(2, || {
        let set = Guarded::new();
        let spawn = |act: fn(&Guarded)| {
            let set = Arc::clone(&set);
            loom::thread::spawn(move || act(&set))
        };
        let guard = spawn(Guarded::end_guard);
        let reader = spawn(|set| {
            let read = set.read();
            assert!(
                read.is_none_or(|content| [10, 11].contains(&content)),
                "{read:?}"
            );
        });
        set.overwrite(11);
        set.reuse(20);
        guard.join().expect(NO_PANIC);
        reader.join().expect(NO_PANIC);
    });
}
