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
