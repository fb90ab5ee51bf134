//! A lock that is held for a moment, and looks at what another lock protects, which it keeps from changing.

use super::check;
use crate::latch::Word;
use base::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use base::sync::{Mutex, rank};
use std::sync::Arc;

/// Both halves change under a lock; neither has an order of its own.
#[derive(Default)]
struct Halves([AtomicU32; 2]);

impl Halves {
    fn read(&self) -> u32 {
        let [first, second] = [0, 1].map(|half: usize| self.0[half].load(Ordering::Relaxed));
        assert_eq!(first, second);
        first
    }

    fn change(&self) {
        let next = self.read() + 1;
        for half in &self.0 {
            half.store(next, Ordering::Relaxed);
        }
    }
}

fn word() -> Word {
    Word {
        taken: AtomicBool::new(false),
        sleeping: AtomicU32::new(0),
    }
}

/// Changes what a latch protects, if it is free; nobody waits for it here, as that is a loop without an end to the checker.
fn try_change((word, halves): &(Word, Halves)) -> u32 {
    if !word.try_take() {
        return 0;
    }
    halves.change();
    word.give_back(|| unreachable!("nobody sleeps"));
    1
}

/// Found when broken: `try_take` or `give_back` relaxed.
#[test]
fn a_latch_is_one_threads_at_a_time() {
    check(3, || {
        let latched = Arc::new((word(), Halves::default()));
        let others = [(); 2].map(|()| {
            let latched = Arc::clone(&latched);
            loom::thread::spawn(move || try_change(&latched))
        });
        let own = try_change(&latched);
        let changes = others.map(|other| other.join().unwrap());
        assert!(latched.0.try_take());
        assert_eq!(latched.1.read(), own + changes.iter().sum::<u32>());
    });
}

/// Found when broken: `sleep` that says so afterwards.
#[test]
fn who_sleeps_is_woken_by_who_sees_that() {
    check(3, || {
        let word = word();
        assert!(word.try_take());
        let mut woken = false;
        word.sleep(|| word.give_back(|| woken = true));
        assert!(woken);
        assert_eq!(word.sleeping.load(Ordering::Relaxed), 0);
    });
}

/// A node, and the latch of the table that it is in.
struct Node {
    lock: Word,
    latch: Mutex<()>,
    halves: Halves,
}

impl Node {
    /// As `base::sync::RwLock::look`, under the latch.
    fn look(&self) -> Option<u32> {
        let _latch = self.latch.lock();
        let free = !self.lock.is_taken();
        free.then(|| {
            fence(Ordering::Acquire);
            self.halves.read()
        })
    }

    /// As `write_past`.
    fn write(&self) {
        assert!(self.lock.try_take(), "there is one writer");
        drop(self.latch.lock());
        self.halves.change();
        self.lock.give_back(|| unreachable!("nobody sleeps"));
    }
}

/// Who looks twice beside a writer sees what was before or what is after, and never that first.
///
/// Found when broken: a writer that does not take the latch, or takes it before the lock; a look without its fence.
#[test]
fn a_look_without_the_lock_sees_no_half_of_a_change() {
    check(3, || {
        let node = Arc::new(Node {
            lock: word(),
            latch: Mutex::new(rank::LEAF, ()),
            halves: Halves::default(),
        });
        let writer = {
            let node = Arc::clone(&node);
            loom::thread::spawn(move || node.write())
        };
        let seen = [node.look(), node.look()];
        if let [Some(first), Some(second)] = seen {
            assert!(first <= second && second <= 1);
        }
        writer.join().unwrap();
        assert_eq!(node.look(), Some(1));
    });
}
