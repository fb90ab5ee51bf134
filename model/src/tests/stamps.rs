//! Times of files: those who look at a file and then read it, without a lock, beside those who change its content.

use super::check;
use crate::meta::MetaLock;
use crate::present::{Present, shown_before};
use crate::times::{Shown, Stamp, Times};
use base::atomic::{
    AtomicBool, AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use base::clock::{Clock, Timestamp};
use format::Nid;
use loom::thread::spawn;
use std::sync::Arc;

const NO_PANIC: &str = "no thread of a model panics";
const PAGES: usize = 2;

/// A file of two pages, which are words. No time passes but what the floor gains.
struct File {
    times: Times,
    meta: MetaLock,
    pages: [AtomicU32; PAGES],
}

/// What somebody was shown, and what the pages held after that.
type Look = (Timestamp, [u32; PAGES]);

impl File {
    fn new() -> File {
        File {
            times: Times::new(Clock::real()),
            meta: MetaLock::new(Nid(1)),
            pages: [AtomicU32::new(0), AtomicU32::new(0)],
        }
    }

    /// As `Files::volatile_shown`, and then a read of cached pages.
    fn look(&self) -> Look {
        let of_inode = Timestamp::from_ns(10);
        let shown = {
            let mut meta = self.meta.lock();
            meta.look(of_inode);
            meta.times.ctime.unwrap_or(of_inode)
        };
        (
            shown,
            [0, 1].map(|page: usize| self.pages[page].load(Relaxed)),
        )
    }

    /// As `Files::overwrite`.
    fn write(&self, page: usize, content: u32) {
        let now = self.times.now();
        self.meta.stamp(now, &self.times, || 0);
        self.pages[page].store(content, Relaxed);
        self.meta.stamp_again(now, &self.times, || 0);
    }

    /// Who has seen this, and looks once more when nobody changes the file, sees by the time whether it has changed.
    fn assert_told(&self, seen: Look) {
        let now = self.look();
        assert!(now.1 == seen.1 || now.0 > seen.0, "{seen:?} became {now:?}");
    }
}

/// Those who look beside those who write, each to a page, after what came before; the last of those who look does in the thread that made the file.
fn beside(before: fn(&File), lookers: usize, writers: usize) {
    check(3, move || {
        let file = Arc::new(File::new());
        before(&file);
        let writers: Vec<_> = (0..writers)
            .map(|page| {
                let file = Arc::clone(&file);
                spawn(move || file.write(page, 1))
            })
            .collect();
        let lookers: Vec<_> = (1..lookers)
            .map(|_| {
                let file = Arc::clone(&file);
                spawn(move || file.look())
            })
            .collect();
        let mut seen = vec![file.look()];
        seen.extend(
            lookers
                .into_iter()
                .map(|looker| looker.join().expect(NO_PANIC)),
        );
        for writer in writers {
            writer.join().expect(NO_PANIC);
        }
        seen.into_iter().for_each(|seen| file.assert_told(seen));
    });
}

/// What a file was before it is looked at: new; written, so that a write finds it stamped; and shown besides.
const BEFORE: [fn(&File); 3] = [
    |_| {},
    |file| file.write(0, 9),
    |file| {
        file.write(0, 9);
        file.look();
    },
];

/// Found when broken: either fence left out; that of who looks before the time is taken away; that of who writes after its second look at the stamp; a second look left out, or before
/// the page changes; who reads before it looks; a look that does not count, or leaves a time that is as old as what it shows; a change that may get the time that was shown.
#[test]
fn who_read_old_content_after_a_look_is_shown_another_time_later() {
    for before in BEFORE {
        beside(before, 1, 1);
    }
}

/// The second of two who look at once finds that the first has taken the time away: it needs no fence.
///
/// Found when broken: as above.
#[test]
fn each_of_two_who_look_is_shown_another_time_later() {
    for before in BEFORE {
        beside(before, 2, 1);
    }
}

/// One of two who write may find the file stamped by the other.
///
/// Found when broken: as above.
#[test]
fn who_looks_beside_two_who_write_is_shown_another_time_later() {
    for before in BEFORE {
        beside(before, 1, 2);
    }
}

/// A change that begins when another has ended gets no older time, of whichever files they are; and none is handed out that the floor has not
/// come to.
///
/// Found when broken: an exact time to which the floor is not raised, or is set; one that may be as old as what was shown.
#[test]
fn a_change_that_comes_later_gets_no_older_time() {
    check(3, || {
        let times = Arc::new(Times::new(Clock::real()));
        let ended = Arc::new(AtomicBool::new(false));
        let shown = times.now();
        let spawned = {
            let (times, ended) = (Arc::clone(&times), Arc::clone(&ended));
            spawn(move || {
                let first = times.after(shown.into());
                ended.store(true, Release);
                first
            })
        };
        let other = {
            let times = Arc::clone(&times);
            spawn(move || {
                let first = times.after(shown.into());
                (first, times.after(first.into()))
            })
        };
        let later = ended.load(Acquire).then(|| times.now());
        let first = spawned.join().expect(NO_PANIC);
        assert!(first > shown);
        assert!(later.is_none_or(|later| later >= first));
        let (one, next) = other.join().expect(NO_PANIC);
        assert!(one > shown && next > one);
        assert_eq!(times.floor(), times.now().ns());
        assert!(times.now() >= next.max(first), "the floor goes back");
    });
}

/// What many were shown is the newest of it, and a stamp that lies in the future goes away only if nobody was shown a newer one since.
///
/// Found when broken: `show` that stores the stamp; `forget_beyond` that stores it.
#[test]
fn an_inode_counts_as_shown_with_the_newest_stamp() {
    check(3, || {
        let stamp = |ns| Stamp::from(Timestamp::from_ns(ns));
        let shown = Arc::new(Shown::never());
        shown.show(stamp(90));
        let others = [91, 92].map(|ns| {
            let shown = Arc::clone(&shown);
            spawn(move || shown.show(stamp(ns)))
        });
        shown.forget_beyond(stamp(90), Timestamp::from_ns(20));
        for other in others {
            other.join().expect(NO_PANIC);
        }
        assert_eq!(shown.get(), stamp(92));
    });
}

/// Who shows a file's inode finds that it may have a state, or whoever makes one knows what was shown: as `FileSystem::show` and `Files::enter`, under the
/// inode's shared lock. That a second one, who finds it marked, sees the same follows from the order in which all sequentially consistent accesses are,
/// of which the checker does not know.
///
/// Found when broken: `may_have_after` that looks before it marks; `shown_before` without its fence, or before the state is counted; `may_have` relaxed.
#[test]
fn who_makes_a_files_state_knows_what_was_shown_to_those_who_saw_none() {
    check(3, || {
        const NID: u64 = 7;
        let stamp = Stamp::from(Timestamp::from_ns(90));
        let inode = Arc::new((Shown::never(), Present::default()));
        let looker = {
            let inode = Arc::clone(&inode);
            spawn(move || {
                let (shown, present) = &*inode;
                present.may_have_after(NID, || shown.show(stamp))
            })
        };
        let known = {
            let (shown, present) = &*inode;
            present.count(NID);
            shown_before(|| shown.get())
        };
        let saw = looker.join().expect(NO_PANIC);
        assert!(saw || known == stamp, "shown, and the state does not know");
    });
}

/// A state leaves the table when the inode has all that it had: who then finds none sees that.
///
/// Found when broken: `uncount` relaxed; `may_have` relaxed.
#[test]
fn who_sees_no_state_sees_what_the_last_one_left_in_the_inode() {
    check(3, || {
        const NID: u64 = 7;
        let file = Arc::new((AtomicU32::new(0), Present::default()));
        file.1.count(NID);
        let looker = {
            let file = Arc::clone(&file);
            spawn(move || file.1.may_have(NID) || file.0.load(Relaxed) == 1)
        };
        file.0.store(1, Relaxed);
        file.1.uncount(NID);
        assert!(looker.join().expect(NO_PANIC));
        assert!(file.1.agrees(std::iter::empty()), "counted twice");
    });
}
