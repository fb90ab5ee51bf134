//! Telling the kernel that what it has cached of a file is not so any more.
//!
//! The kernel takes such a message only when it has locked the pages that it drops, and a locked page may wait for an answer of this very
//! process. Invariants:
//! 1. Nobody sends one who holds a lock that a request may wait for.
//! 2. Whoever waits in one leaves a worker that waits for requests, and at most half of all that there can be do: the others serve what those pages
//!    wait for. Nor more than half of the requests that the kernel sends in the background at a time, which read-ahead shares with releases. What comes
//!    beyond that is left to who is at it already ([`Notifier::drop_pages`]), who answers its own request first ([`Notifier::answered`]); the first is
//!    never refused.
//!    Likewise the answers that wait for a drop ([`Notifier::drop_written`]): those pages may be locked by read-ahead that the kernel has not sent yet.
//! 3. What is dropped while a write of it is on its way is dropped again after that write ([`crate::rereads`]).
//! 4. Who waits for one that another sends ([`Notifier::wait`]) leaves a worker besides that one, or waits for a short time only: the drop may need
//!    that worker.
//! 5. A worker that has requests of some queue for itself alone sends none at all: a page may be locked until that very worker gives its next
//!    answer. What it has to drop is left at once to a thread that serves no requests ([`Notifier::set_helper`]).

use std::cell::Cell;
use std::collections::VecDeque;
use std::io::IoSlice;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use base::clock::now_ns;
use base::sync::{Condvar, Mutex, MutexGuard, rank};
use zerocopy::IntoBytes;

use crate::abi;
use crate::ops::NodeId;
use crate::rereads::{Race, Rereads, Writing};
use crate::session::BACKGROUND_MAX;
use crate::transport::Bell;

/// Workers that may be at it at a time, however many there are: invariant 2.
const BUSY_MAX: usize = BACKGROUND_MAX as usize / 2;

/// How long somebody waits for pages to be dropped: they wait for answers of this daemon, which others give.
const WAIT_MAX: Duration = Duration::from_secs(5);
/// Until another worker has been started, which is no more than a thread to begin: so many times so long, in nanoseconds.
const START_NAPS: usize = 20;
const START_NAP_NS: u64 = 100_000;

thread_local! {
    /// Invariant 5.
    static ALONE: Cell<bool> = const { Cell::new(false) };
}

/// The calling thread is the only worker that some requests come to.
pub(crate) fn works_alone() {
    ALONE.set(true);
}

/// The workers of a session, who wait for requests or are at some.
#[derive(Clone, Debug)]
pub struct Hands {
    /// So many there can be.
    pub most: usize,
    /// Those that wait for requests. Whoever takes one as the last of them starts another first, if there can be more.
    pub idle: Arc<AtomicUsize>,
}

impl Hands {
    /// Whether requests that come next are served, whatever the one who asks waits for.
    fn are_free(&self) -> bool {
        self.idle.load(Ordering::Relaxed) > 0
    }
}

/// Bytes of a file whose pages are dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pages {
    node: NodeId,
    bytes: Range<u64>,
    race: Race,
}

impl Pages {
    pub fn all(node: NodeId) -> Pages {
        let bytes = 0..u64::MAX;
        let race = Race::Any;
        Pages { node, bytes, race }
    }

    /// Those that a write was made of after somebody had read them back.
    pub fn outdated(node: NodeId, bytes: Range<u64>) -> Pages {
        let race = Race::Overtaking;
        Pages { node, bytes, race }
    }

    /// All, and the request that asks for it has the kernel's lock of the file, which writes wait for.
    pub fn all_unwritten(node: NodeId) -> Pages {
        Pages {
            race: Race::None,
            ..Pages::all(node)
        }
    }

    /// These bytes', and the request that asks for it has that lock.
    pub fn unwritten(node: NodeId, bytes: Range<u64>) -> Pages {
        let race = Race::None;
        Pages { node, bytes, race }
    }

    /// Those that were changed past the page cache, after somebody may have read them back.
    pub fn changed_past(node: NodeId, bytes: Range<u64>) -> Pages {
        let race = Race::Any;
        Pages { node, bytes, race }
    }

    pub fn is_of(&self, node: NodeId) -> bool {
        self.node == node
    }

    fn has(&self, other: &Pages) -> bool {
        let (mine, others) = (&self.bytes, &other.bytes);
        self.node == other.node && mine.start <= others.start && others.end <= mine.end
    }

    /// As the kernel wants them: where they begin and how many they are, 0 for all.
    fn span(&self) -> (i64, i64) {
        let len = i64::try_from(self.bytes.end - self.bytes.start);
        (self.bytes.start as i64, len.unwrap_or(0))
    }
}

/// What follows the drop of a file's pages.
type Then = Box<dyn FnOnce() + Send>;

/// Has a thread that serves no requests call [`Notifier::answered`].
type Helper = Box<dyn Fn() + Send + Sync>;

/// See the module's head. Its copies are one.
#[derive(Clone)]
pub struct Notifier(Arc<Inner>);

struct Inner {
    bell: Option<Arc<dyn Bell>>,
    hands: Hands,
    turns: Mutex<Turns>,
    /// [`Turns::owing`], for a look without the lock: who owes sees it, for it has stored it itself.
    owing: AtomicUsize,
    /// Answers that wait for pages to be dropped.
    withheld: AtomicUsize,
    rereads: Rereads,
    helper: OnceLock<Helper>,
}

#[derive(Default)]
struct Turns {
    /// Workers in a drop, or about to answer and to do what is left.
    dropping: usize,
    /// The latter of these.
    owing: usize,
    /// Workers that wait for one.
    waiting: usize,
    /// Left to those who drop.
    left: VecDeque<Left>,
    /// Of the next one that is left.
    ticket: u64,
}

struct Left {
    pages: Pages,
    then: Then,
    ticket: u64,
    /// Somebody else counts on it.
    is_relied_on: bool,
}

impl Turns {
    /// For somebody else, who has no lock of the kernel's.
    fn leave(&mut self, pages: Pages, then: Then) -> u64 {
        let race = match pages.race {
            Race::None => Race::Any,
            race => race,
        };
        let (pages, ticket) = (Pages { race, ..pages }, self.ticket);
        self.ticket += 1;
        self.left.push_back(Left {
            pages,
            then,
            ticket,
            is_relied_on: false,
        });
        ticket
    }

    /// Who left it needs it no more.
    fn withdraw(&mut self, ticket: u64) {
        self.left
            .retain(|left| left.ticket != ticket || left.is_relied_on);
    }
}

impl std::fmt::Debug for Notifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Notifier").finish_non_exhaustive()
    }
}

impl Notifier {
    /// For a session with these workers.
    pub fn new(bell: Option<Arc<dyn Bell>>, hands: Hands) -> Notifier {
        Notifier(Arc::new(Inner {
            bell,
            hands,
            turns: Mutex::new(rank::LEAF, Turns::default()),
            owing: AtomicUsize::new(0),
            withheld: AtomicUsize::new(0),
            rereads: Rereads::new(),
            helper: OnceLock::new(),
        }))
    }

    /// Where a worker serves a queue alone: invariant 5. For the first caller.
    pub(crate) fn set_helper(&self, helper: Helper) {
        self.0.helper.get_or_init(|| helper);
    }

    /// The kernel asks for attributes of a file anew, and takes no answer to what it has asked before this. Waits for nothing.
    pub fn drop_attributes(&self, node: NodeId) {
        self.send(node, (-1, 0));
    }

    /// The kernel drops what it has cached of a directory's listing. Waits for nothing: no answer of this process fills such a page.
    pub fn drop_listing(&self, node: NodeId) {
        self.send(node, (0, 0));
    }

    /// The kernel drops these pages; then does `then`. This is so when the call returns, unless too many workers are at
    /// others: then soon. Whoever calls this in a request calls [`answered`](Self::answered) after the answer.
    pub(crate) fn drop_pages(&self, pages: Pages, then: Then) {
        self.drop_or_leave(pages, then);
    }

    /// The same; returns under which number it was left to others.
    fn drop_or_leave(&self, pages: Pages, then: Then) -> Option<u64> {
        {
            let mut turns = self.0.turns.lock();
            let most = (self.0.hands.most / 2).min(BUSY_MAX);
            let is_crowded = turns.dropping + turns.waiting >= most || !self.0.hands.are_free();
            // Who else would do what is left?
            if turns.dropping > 0 && is_crowded {
                return Some(turns.leave(pages, then));
            }
            turns.dropping += 1;
            if ALONE.get() {
                let ticket = turns.leave(pages, then);
                turns.owing += 1;
                self.0.owing.store(turns.owing, Ordering::Relaxed);
                drop(turns);
                // Without one it comes after the answer.
                self.0.helper.get().inspect(|helper| helper());
                return Some(ticket);
            }
        }
        self.send_drop(&pages);
        then();
        let mut turns = self.0.turns.lock();
        match turns.left.is_empty() {
            true => turns.dropping -= 1,
            false => {
                turns.owing += 1;
                self.0.owing.store(turns.owing, Ordering::Relaxed);
            }
        }
        None
    }

    /// Whether somebody owes that.
    pub fn owes(&self) -> bool {
        self.0.owing.load(Ordering::Relaxed) > 0
    }

    /// A request was answered: does what was left to it meanwhile, and comes until then.
    pub fn answered(&self) {
        if self.0.owing.load(Ordering::Relaxed) == 0 || ALONE.get() {
            return;
        }
        let mut turns = self.0.turns.lock();
        if turns.owing == 0 {
            return;
        }
        turns.owing -= 1;
        self.0.owing.store(turns.owing, Ordering::Relaxed);
        while let Some(Left { pages, then, .. }) = turns.left.pop_front() {
            drop(turns);
            self.send_drop(&pages);
            then();
            turns = self.0.turns.lock();
        }
        turns.dropping -= 1;
    }

    /// The kernel drops pages that it may have as they were before a direct write, which is then answered. Of too many of these at a time some are answered
    /// before (invariant 2).
    pub(crate) fn drop_written(&self, node: NodeId, bytes: Range<u64>, answer: Then) {
        if self.0.withheld.fetch_add(1, Ordering::SeqCst) >= BUSY_MAX {
            self.0.withheld.fetch_sub(1, Ordering::SeqCst);
            answer();
            // One for all, or there would be more and more of them.
            return self.drop_outdated(Pages::all(node));
        }
        let inner = Arc::clone(&self.0);
        let answer = move || {
            answer();
            inner.withheld.fetch_sub(1, Ordering::SeqCst);
        };
        self.drop_pages(Pages::changed_past(node, bytes), Box::new(answer));
    }

    /// The kernel drops pages that are not what a write has made. Once for all such writes that nobody has come to yet.
    pub(crate) fn drop_outdated(&self, pages: Pages) {
        {
            let mut turns = self.0.turns.lock();
            let mut left = turns.left.iter_mut();
            if let Some(left) = left.find(|left| left.pages.has(&pages)) {
                left.is_relied_on = true;
                return;
            }
        }
        self.drop_pages(pages, Box::new(|| {}));
    }

    /// These bytes of a file are about to be read for the kernel's request of this number.
    pub fn reads(&self, node: NodeId, bytes: Range<u64>, request: u64) {
        self.0.rereads.reads(node, bytes, request, now_ns);
    }

    /// A buffered write of a file is about to be made; over when what this returns is dropped.
    pub(crate) fn writes(&self, node: NodeId) -> Writing<'_> {
        self.0.rereads.writes(node)
    }

    /// Whether the kernel may have any of these bytes, which its request of this number has just written, as they were before. That was `is_buffered` or direct.
    pub fn may_be_outdated(
        &self,
        node: NodeId,
        bytes: &Range<u64>,
        (request, is_buffered): (u64, bool),
    ) -> bool {
        self.0
            .rereads
            .wrote(node, bytes, (request, is_buffered), now_ns)
    }

    fn send_drop(&self, pages: &Pages) {
        if pages.race == Race::None {
            return self.send(pages.node, pages.span());
        }
        self.0.rereads.begin(pages.node, pages.race, now_ns());
        self.send(pages.node, pages.span());
        self.0.rereads.end(pages.node, now_ns());
    }

    /// As [`drop_pages`](Self::drop_pages), and waits until it is so, as well as can be: false, it may not be, and nobody does it later for this caller's sake.
    pub(crate) fn drop_pages_and_wait(&self, pages: Pages) -> bool {
        let dropped = Arc::new((Mutex::new(rank::LEAF, false), Condvar::new()));
        let then = {
            let dropped = Arc::clone(&dropped);
            move || {
                let (is_done, told) = &*dropped;
                *is_done.lock() = true;
                told.notify_all();
            }
        };
        let Some(ticket) = self.drop_or_leave(pages, Box::new(then)) else {
            return true;
        };
        let (is_done, told) = &*dropped;
        let is_dropped = self.wait(Duration::ZERO, |most| {
            wait_at_most(most, told, &mut is_done.lock(), |is_done| *is_done)
        });
        if !is_dropped {
            // Who asks again and again would fill the memory with these.
            self.0.turns.lock().withdraw(ticket);
        }
        is_dropped
    }

    /// Waits for what others drop: `waiting` does, for so long at most. That is `crowded` if too few workers would be left, who may be what the
    /// drop waits for.
    pub(crate) fn wait<T>(&self, crowded: Duration, waiting: impl FnOnce(Duration) -> T) -> T {
        let turn = self.turn();
        waiting(turn.as_ref().map_or(crowded, |_| WAIT_MAX))
    }

    /// Leave to wait; `None`: there would be too few workers left.
    fn turn(&self) -> Option<Turn<'_>> {
        if ALONE.get() {
            return None;
        }
        {
            let mut turns = self.0.turns.lock();
            let busy = turns.waiting + turns.dropping.max(1);
            if busy + 1 >= self.0.hands.most.min(BUSY_MAX) {
                return None;
            }
            turns.waiting += 1;
        }
        let turn = Turn(self);
        // Whoever takes a request as the last starts another worker then.
        let mut naps = 0;
        while !self.0.hands.are_free() {
            if naps == START_NAPS {
                return None;
            }
            naps += 1;
            base::clock::nap(START_NAP_NS);
        }
        Some(turn)
    }

    /// Workers that wait for what others drop.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.0.turns.lock().waiting
    }

    /// Whether a buffered write of a file is under way.
    #[cfg(test)]
    pub(crate) fn is_written(&self, node: NodeId) -> bool {
        self.0.rereads.is_written(node)
    }

    /// Somebody reads another file, so much later.
    #[cfg(test)]
    pub(crate) fn look_later(&self, by_ns: u64) {
        (self.0.rereads).reads(NodeId::MAX, 0..1, 0, || now_ns() + by_ns);
    }

    fn send(&self, node: NodeId, (off, len): (i64, i64)) {
        let Some(bell) = &self.0.bell else { return };
        let message = abi::NotifyInvalInodeOut {
            ino: node,
            off,
            len,
        };
        let header = abi::OutHeader {
            len: (size_of::<abi::OutHeader>() + size_of_val(&message)) as u32,
            error: abi::NOTIFY_INVAL_INODE,
            unique: 0,
        };
        let parts = [
            IoSlice::new(header.as_bytes()),
            IoSlice::new(message.as_bytes()),
        ];
        if let Err(error) = bell.ring(&parts) {
            tracing::error!(node, %error, "the kernel keeps what it has cached of a file");
        }
    }
}

/// Waits until something is as it should be, and says whether it is.
pub(crate) fn wait_at_most<T>(
    most: Duration,
    told: &Condvar,
    state: &mut MutexGuard<'_, T>,
    is_so: impl Fn(&T) -> bool,
) -> bool {
    let end = now_ns() + most.as_nanos() as u64;
    while !is_so(state) {
        let left = end.saturating_sub(now_ns());
        if left == 0 {
            return false;
        }
        told.wait_for(state, Duration::from_nanos(left));
    }
    true
}

/// See [`Notifier::turn`].
struct Turn<'a>(&'a Notifier);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.0.turns.lock().waiting -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Weak;

    /// Asks, while it is rung, for three drops more.
    #[derive(Default)]
    struct Nested {
        notifier: Later,
        rung: AtomicUsize,
    }

    type Later = std::sync::OnceLock<Weak<Inner>>;

    impl Bell for Nested {
        fn ring(&self, parts: &[IoSlice<'_>]) -> std::io::Result<bool> {
            let bytes: usize = parts.iter().map(|part| part.len()).sum();
            assert_eq!(bytes, 40);
            let rung = self.rung.fetch_add(1, Ordering::Relaxed);
            let notifier = self.notifier.get().and_then(Weak::upgrade);
            if let (0, Some(inner)) = (rung, notifier) {
                (0..3).for_each(|n| {
                    Notifier(Arc::clone(&inner)).drop_pages(Pages::all(n), Box::new(|| {}))
                });
                assert_eq!(
                    self.rung.load(Ordering::Relaxed),
                    1,
                    "they are left to the first"
                );
            }
            Ok(true)
        }
    }

    /// Of a CPU that came after the mount: the drop waited for a page that was locked until the same worker had served another request.
    #[test]
    fn a_worker_that_is_alone_has_others_drop() {
        let bell = Arc::new(Nested::default());
        let rung = || bell.rung.load(Ordering::Relaxed);
        let hands = Hands {
            most: 8,
            idle: Arc::new(AtomicUsize::new(1)),
        };
        let notifier = Notifier::new(Some(Arc::clone(&bell) as Arc<dyn Bell>), hands);
        let called = Arc::new(AtomicUsize::new(0));
        let calls = Arc::clone(&called);
        notifier.set_helper(Box::new(move || {
            calls.fetch_add(1, Ordering::Relaxed);
        }));
        let its = notifier.clone();
        let worker = move || {
            works_alone();
            its.drop_pages(Pages::all(7), Box::new(|| {}));
            its.answered();
            // Who looks for data in a loop had each of these remembered.
            for _ in 0..100 {
                assert!(!its.drop_pages_and_wait(Pages::all_unwritten(8)));
            }
            assert_eq!(its.0.turns.lock().left.len(), 1);
            // But not what a write counts on, whose pages these are.
            let left = its.drop_or_leave(Pages::all_unwritten(9), Box::new(|| {}));
            its.drop_outdated(Pages::outdated(9, 0..4096));
            its.0.turns.lock().withdraw(left.unwrap());
            assert_eq!(its.0.turns.lock().left.len(), 2);
            assert!(its.owes());
        };
        base::thread::spawn("alone", worker)
            .unwrap()
            .join()
            .unwrap();
        assert_eq!((rung(), called.load(Ordering::Relaxed)), (0, 4));
        while notifier.owes() {
            notifier.answered();
        }
        assert_eq!((rung(), notifier.owes()), (2, false));
        assert_eq!(notifier.0.turns.lock().dropping, 0);
    }

    #[test]
    fn what_comes_while_as_many_wait_as_may_is_done_by_one_of_them() {
        let bell = Arc::new(Nested::default());
        let idle = Arc::new(AtomicUsize::new(1));
        let with = |most| {
            let idle = Arc::clone(&idle);
            let hands = Hands { most, idle };
            Notifier::new(Some(Arc::clone(&bell) as Arc<dyn Bell>), hands)
        };
        let notifier = with(2);
        bell.notifier.set(Arc::downgrade(&notifier.0)).unwrap();
        notifier.drop_pages(Pages::all(7), Box::new(|| {}));
        // Who had asked for the first one waited for those of others before it got an answer.
        assert_eq!(bell.rung.load(Ordering::Relaxed), 1);
        assert_eq!(notifier.0.turns.lock().dropping, 1);
        notifier.answered();
        assert_eq!(bell.rung.load(Ordering::Relaxed), 4);
        assert_eq!(notifier.0.turns.lock().dropping, 0);
        notifier.answered();
        notifier.drop_pages(Pages::all(7), Box::new(|| {}));
        assert_eq!(bell.rung.load(Ordering::Relaxed), 5);

        // An answer comes after the drop that it waits for, but of too many.
        let answered = Arc::new(AtomicUsize::new(0));
        let held = Arc::clone(&bell);
        let notifier = with(2);
        notifier.0.turns.lock().dropping = 1;
        for _ in 0..BUSY_MAX + 2 {
            let answered = Arc::clone(&answered);
            let answer = move || {
                answered.fetch_add(1, Ordering::Relaxed);
            };
            notifier.drop_written(7, 0..4096, Box::new(answer));
        }
        assert_eq!(answered.load(Ordering::Relaxed), 2);
        assert_eq!(notifier.0.turns.lock().left.len(), BUSY_MAX + 1);
        notifier.0.turns.lock().owing = 1;
        notifier.0.owing.store(1, Ordering::Relaxed);
        notifier.answered();
        assert_eq!(answered.load(Ordering::Relaxed), BUSY_MAX + 2);
        assert_eq!(notifier.0.withheld.load(Ordering::SeqCst), 0);
        held.rung.store(5, Ordering::Relaxed);

        // One drops, one waits for it, and one is left.
        assert!(notifier.turn().is_none());
        let notifier = with(3);
        let turn = notifier.turn().unwrap();
        assert!(notifier.turn().is_none());
        notifier.drop_pages(Pages::all(7), Box::new(|| {}));
        assert_eq!(bell.rung.load(Ordering::Relaxed), 6);
        drop(turn);
        // No further one could be started.
        idle.store(0, Ordering::Relaxed);
        assert!(notifier.turn().is_none());
        assert!(notifier.drop_pages_and_wait(Pages::all(7)));
        idle.store(1, Ordering::Relaxed);
        let notifier = with(1000);
        let turns: Vec<_> = std::iter::from_fn(|| notifier.turn()).collect();
        assert_eq!(turns.len(), BUSY_MAX - 2);
        drop(turns);
        assert_eq!(notifier.0.turns.lock().waiting, 0);
    }
}
