//! Telling the kernel that what it has cached of a file is not so any more.
//!
//! The kernel takes such a message only when it has locked the pages that it drops, and a locked page may wait for an answer of this very
//! process. Until then it takes no signal, and so runs nothing for the thread that has sent the message: what that thread has submitted to a ring that others wait at
//! (`device`, `queue/flights.rs`) is told to nobody. A worker that had begun read-ahead and then dropped pages kept it from the worker that served the read which had these pages locked, for
//! ever. Invariants:
//! 1. No thread that may have submitted anything has pages dropped. Threads do that which do nothing else ([`Notifier::start`]); others leave it to them, and
//!    may wait where they can be woken, without a lock that a request may wait for.
//! 2. So what waits for such a drop is no read and no write-back of a page, nor a SETATTR, which holds up write-back: the drop may wait for these.
//! 3. Who waits for one leaves a worker to serve what those pages wait for, or waits for a short time only ([`Notifier::wait`]). A worker that has requests of some queue for
//!    itself alone does not wait.
//!    Answers that wait for a drop ([`Notifier::drop_written`]) are at most half of the requests that INIT has the kernel send in the background at a time, which read-ahead shares
//!    with releases: those pages may be locked by read-ahead that the kernel has not sent yet. It may send fewer at a time (`max_user_bgreq`, `max_background`), and then none
//!    before it has such an answer: so a thread that does nothing else gives those that have waited for [`WAIT_MAX`], before the drop.
//! 4. Of the threads that drop pages at most a part is at one file ([`OF_A_FILE_MAX`]): one whose pages stay locked, or are written back one by one, does not hold up all others.
//! 5. What is left is bounded: who waits no more takes it back, and many outdated ranges of a file become all of it.
//! 6. What is dropped while a write of it is on its way is dropped again after that write ([`crate::rereads`]).

use std::cell::Cell;
use std::collections::VecDeque;
use std::io::IoSlice;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base::clock::now_ns;
use base::sync::{Condvar, Mutex, MutexGuard, rank};
use base::thread;
use zerocopy::IntoBytes;

use crate::abi;
use crate::ops::NodeId;
use crate::rereads::{Race, Rereads, Writing};
use crate::session::BACKGROUND_MAX;
use crate::transport::Bell;

/// Workers that may wait at a time, however many there are, and answers that are withheld: invariant 3.
const BUSY_MAX: usize = BACKGROUND_MAX as usize / 2;

/// Threads that drop pages. They wait, mostly.
const DROPPERS_MAX: usize = 32;
/// Of these at one file.
const OF_A_FILE_MAX: usize = 2;
/// Ranges of a file that are left, before all of it is.
const RANGES_MAX: usize = 64;

/// How long somebody waits for pages to be dropped: they wait for answers of this daemon, which others give.
const WAIT_MAX: Duration = Duration::from_secs(5);
/// Until another worker has been started, which is no more than a thread to begin: so many times so long, in nanoseconds.
const START_NAPS: usize = 20;
const START_NAP_NS: u64 = 100_000;

thread_local! {
    /// Invariant 3.
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

    /// When another thread drops them, at a time that nobody knows: whoever asked may have the kernel's lock no more.
    fn later(self) -> Pages {
        let race = match self.race {
            Race::None => Race::Any,
            race => race,
        };
        Pages { race, ..self }
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

fn nothing() -> Then {
    Box::new(|| {})
}

/// See the module's head. Its copies are one.
#[derive(Clone)]
pub struct Notifier(Arc<Inner>);

struct Inner {
    bell: Option<Arc<dyn Bell>>,
    hands: Hands,
    turns: Mutex<Turns>,
    /// Something is left, or it is over: for threads that drop pages.
    called: Condvar,
    /// Answers that wait for pages to be dropped.
    withheld: AtomicUsize,
    /// There is such an answer, or it is over: for the thread that gives late ones.
    due: Condvar,
    rereads: Rereads,
}

#[derive(Default)]
struct Turns {
    /// Workers that wait for a drop.
    waiting: usize,
    /// In the order in which it came.
    left: VecDeque<Left>,
    /// Of the next one that is left.
    ticket: u64,
    /// Under way: one for each thread that is at it.
    going: Vec<Going>,
    /// Threads that drop pages, or are being started; 0: nobody drops any yet.
    threads: usize,
    /// Those of them that sleep and were not called.
    idle: usize,
    /// Those that were, and have not looked yet.
    called: usize,
    handles: Vec<thread::JoinHandle>,
    /// The thread that gives late answers sleeps until it is called.
    awaits_answers: bool,
    is_over: bool,
}

struct Left {
    pages: Pages,
    then: Then,
    /// When that is done without the drop, by the clock; `None`: never.
    due_ns: Option<u64>,
    ticket: u64,
    /// Somebody else counts on it.
    is_relied_on: bool,
}

struct Going {
    node: NodeId,
    then: Then,
    due_ns: Option<u64>,
    ticket: u64,
    /// Who waited with the kernel's lock does so no more, and has begun a window that ends with the drop.
    is_raced: bool,
}

impl Turns {
    fn add(&mut self, pages: Pages, then: Then, due_ns: Option<u64>) -> u64 {
        let ticket = self.ticket;
        self.ticket += 1;
        self.left.push_back(Left {
            pages,
            then,
            due_ns,
            ticket,
            is_relied_on: false,
        });
        ticket
    }

    /// The next to be dropped, under which number: invariant 4.
    fn take(&mut self) -> Option<(Pages, u64)> {
        let going = &self.going;
        let may_be = |left: &Left| {
            let at_it = going.iter().filter(|going| left.pages.is_of(going.node));
            at_it.count() < OF_A_FILE_MAX
        };
        let place = self.left.iter().position(may_be)?;
        let left = self.left.remove(place)?;
        self.going.push(Going {
            node: left.pages.node,
            then: left.then,
            due_ns: left.due_ns,
            ticket: left.ticket,
            is_raced: false,
        });
        Some((left.pages, left.ticket))
    }

    /// A drop came to its end; what follows it, and whether a window ends with it.
    fn end(&mut self, ticket: u64) -> Option<(Then, bool)> {
        let place = self.going.iter().position(|going| going.ticket == ticket);
        let ended = self.going.swap_remove(place?);
        Some((ended.then, ended.is_raced))
    }

    /// When an answer is late next.
    fn next_due_ns(&self) -> Option<u64> {
        // Of those that are left the first is.
        let left = self.left.iter().find_map(|left| left.due_ns);
        let going = self.going.iter().filter_map(|going| going.due_ns);
        going.chain(left).min()
    }

    /// An answer that is late, and, if nobody has come to it yet, its drop.
    fn take_late(&mut self, now_ns: u64) -> Option<(Then, Option<Pages>)> {
        let is_late = |due_ns: Option<u64>| due_ns.is_some_and(|due_ns| due_ns <= now_ns);
        if let Some(going) = self.going.iter_mut().find(|going| is_late(going.due_ns)) {
            going.due_ns = None;
            let then = std::mem::replace(&mut going.then, nothing());
            return Some((then, None));
        }
        let place = self.left.iter().position(|left| is_late(left.due_ns))?;
        let left = self.left.remove(place)?;
        Some((left.then, Some(left.pages)))
    }

    /// Who left it needs it no more; whether it is under way.
    fn withdraw(&mut self, ticket: u64) -> bool {
        self.left
            .retain(|left| left.ticket != ticket || left.is_relied_on);
        if let Some(left) = self.left.iter_mut().find(|left| left.ticket == ticket) {
            left.pages.race = Race::Any;
        }
        self.going.iter().any(|going| going.ticket == ticket)
    }

    /// Somebody goes on without waiting for its end any more; false: it has come.
    fn race(&mut self, ticket: u64) -> bool {
        let going = self.going.iter_mut().find(|going| going.ticket == ticket);
        going.map(|going| going.is_raced = true).is_some()
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
            called: Condvar::new(),
            withheld: AtomicUsize::new(0),
            due: Condvar::new(),
            rereads: Rereads::new(),
        }))
    }

    /// Starts the first thread that drops pages; further ones come when they are needed. Until then, what is left stays. They end with what this returns, and so does the one that
    /// gives late answers.
    pub(crate) fn start(&self) -> std::io::Result<Droppers> {
        let droppers = Droppers(self.clone());
        self.0.turns.lock().threads = 1;
        self.start_one()?;
        let handle = self.start_thread("fuse-late", Notifier::serve_late)?;
        self.0.turns.lock().handles.push(handle);
        Ok(droppers)
    }

    fn start_thread(
        &self,
        name: &str,
        serve: fn(&Notifier),
    ) -> std::io::Result<thread::JoinHandle> {
        let notifier = self.clone();
        thread::spawn(name, move || {
            if catch_unwind(AssertUnwindSafe(|| serve(&notifier))).is_err() {
                tracing::error!(
                    "a drop of cached pages panicked; aborting so that no caller hangs"
                );
                std::process::abort();
            }
        })
    }

    /// One that is counted already.
    fn start_one(&self) -> std::io::Result<()> {
        let started = self.start_thread("fuse-drops", Notifier::serve);
        let mut turns = self.0.turns.lock();
        match started {
            Ok(handle) => {
                turns.handles.push(handle);
                Ok(())
            }
            Err(error) => {
                turns.threads -= 1;
                Err(error)
            }
        }
    }

    /// Drops what is left until it is over.
    fn serve(&self) {
        let mut turns = self.0.turns.lock();
        while !turns.is_over {
            if let Some((pages, ticket)) = turns.take() {
                drop(turns);
                self.do_one(&pages, ticket);
                turns = self.0.turns.lock();
                continue;
            }
            turns.idle += 1;
            while turns.called == 0 && !turns.is_over {
                self.0.called.wait(&mut turns);
            }
            turns.called = turns.called.saturating_sub(1);
        }
    }

    fn do_one(&self, pages: &Pages, ticket: u64) {
        self.send_drop(pages);
        let ended = self.0.turns.lock().end(ticket);
        let Some((then, is_raced)) = ended else {
            return;
        };
        if is_raced {
            self.0.rereads.end(pages.node, now_ns());
        }
        then();
    }

    /// Gives answers that have waited for too long until it is over.
    fn serve_late(&self) {
        let mut turns = self.0.turns.lock();
        while !turns.is_over {
            let Some(due_ns) = turns.next_due_ns() else {
                turns.awaits_answers = true;
                self.0.due.wait(&mut turns);
                continue;
            };
            turns.awaits_answers = false;
            let now_ns = now_ns();
            if let Some(late) = turns.take_late(now_ns) {
                drop(turns);
                self.answer_late(late);
                turns = self.0.turns.lock();
                continue;
            }
            let left = Duration::from_nanos(due_ns.saturating_sub(now_ns));
            self.0.due.wait_for(&mut turns, left);
        }
    }

    fn answer_late(&self, (answer, undropped): (Then, Option<Pages>)) {
        answer();
        if let Some(pages) = undropped {
            self.drop_outdated(pages);
        }
    }

    /// Has a thread drop pages that does nothing else. Returns under which number.
    fn leave(&self, pages: Pages, then: Then, due_ns: Option<u64>) -> u64 {
        let (ticket, needs_another) = {
            let mut turns = self.0.turns.lock();
            if turns.is_over {
                // The kernel has nothing cached any more.
                return turns.ticket;
            }
            let ticket = turns.add(pages, then, due_ns);
            if due_ns.is_some() && turns.awaits_answers {
                turns.awaits_answers = false;
                self.0.due.notify_one();
            }
            let needs_another = turns.idle == 0 && (1..DROPPERS_MAX).contains(&turns.threads);
            if needs_another {
                turns.threads += 1;
            } else if turns.idle > 0 {
                turns.idle -= 1;
                turns.called += 1;
                self.0.called.notify_one();
            }
            (ticket, needs_another)
        };
        if needs_another && let Err(error) = self.start_one() {
            // There is one.
            tracing::debug!(%error, "cannot start another thread to drop cached pages");
        }
        ticket
    }

    /// The kernel asks for attributes of a file anew, and takes no answer to what it has asked before this. Waits for nothing.
    pub fn drop_attributes(&self, node: NodeId) {
        self.send(node, (-1, 0));
    }

    /// The kernel drops what it has cached of a directory's listing. Waits for nothing: no answer of this process fills such a page.
    pub fn drop_listing(&self, node: NodeId) {
        self.send(node, (0, 0));
    }

    /// The kernel drops these pages soon; then `then` is done, by the thread that has dropped them.
    pub(crate) fn drop_pages(&self, pages: Pages, then: Then) {
        self.leave(pages.later(), then, None);
    }

    /// The kernel drops pages that it may have as they were before a direct write, which is then answered. Of too many of these at a time some are answered
    /// before, and so is one that has waited for [`WAIT_MAX`] (invariant 3).
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
        let due_ns = now_ns() + WAIT_MAX.as_nanos() as u64;
        let pages = Pages::changed_past(node, bytes);
        self.leave(pages, Box::new(answer), Some(due_ns));
    }

    /// The kernel drops pages that are not what a write has made. Once for all such writes that nobody has come to yet.
    pub(crate) fn drop_outdated(&self, pages: Pages) {
        let mut pages = pages.later();
        {
            let mut turns = self.0.turns.lock();
            if let Some(left) = turns.left.iter_mut().find(|left| left.pages.has(&pages)) {
                left.is_relied_on = true;
                left.pages.race = left.pages.race.max(pages.race);
                return;
            }
            let of_file = turns
                .left
                .iter()
                .filter(|left| left.pages.is_of(pages.node));
            if of_file.count() >= RANGES_MAX {
                pages.bytes = 0..u64::MAX;
            }
        }
        self.drop_pages(pages, nothing());
    }

    /// The same before the answer, if that does not take too long.
    pub(crate) fn drop_outdated_and_wait(&self, pages: Pages) {
        if !self.drop_pages_and_wait(pages.clone()) {
            self.drop_outdated(pages);
        }
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

    /// As [`drop_pages`](Self::drop_pages), and waits until it is so, as well as can be; so the kernel's lock of the file, if the request has it, is kept meanwhile: false, it may not be, and nobody does it later for this caller's sake.
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
        let node = pages.node;
        let ticket = self.leave(pages, Box::new(then), None);
        let (is_done, told) = &*dropped;
        let is_dropped = self.wait(Duration::ZERO, |most| {
            wait_at_most(most, told, &mut is_done.lock(), |is_done| *is_done)
        });
        if !is_dropped {
            // Who asks again and again would fill the memory with these.
            let is_going = self.0.turns.lock().withdraw(ticket);
            if is_going {
                // The caller's answer gives back the kernel's lock in the middle of it.
                self.0.rereads.begin(node, Race::Any, now_ns());
                let is_raced = self.0.turns.lock().race(ticket);
                if !is_raced {
                    self.0.rereads.end(node, now_ns());
                }
            }
        }
        is_dropped
    }

    /// Waits for a drop, or what else other requests bring: `waiting` does, for so long at most. That is `crowded` if too few workers would be left, who may be what the
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
        let is_first = {
            let mut turns = self.0.turns.lock();
            if turns.waiting + 1 >= self.0.hands.most.min(BUSY_MAX) {
                return None;
            }
            turns.waiting += 1;
            turns.waiting == 1
        };
        let turn = Turn(self);
        // Whoever takes a request as the last starts another worker then. All others are at requests now, if this is the first that waits.
        let mut naps = 0;
        while !is_first && !self.0.hands.are_free() {
            if naps == START_NAPS {
                return None;
            }
            naps += 1;
            base::clock::nap(START_NAP_NS);
        }
        Some(turn)
    }

    /// Drops what is left, where no thread does.
    #[cfg(test)]
    pub(crate) fn drop_left(&self) {
        loop {
            let next = self.0.turns.lock().take();
            let Some((pages, ticket)) = next else { break };
            self.do_one(&pages, ticket);
        }
    }

    /// Workers that wait for a drop.
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

/// The threads that drop pages of a session. When this goes, they end with what they are at; the rest is forgotten, as the kernel has nothing cached any more.
pub(crate) struct Droppers(Notifier);

impl Drop for Droppers {
    fn drop(&mut self) {
        let inner = &self.0.0;
        let (left, handles) = {
            let mut turns = inner.turns.lock();
            turns.is_over = true;
            inner.called.notify_all();
            inner.due.notify_all();
            let left = std::mem::take(&mut turns.left);
            (left, std::mem::take(&mut turns.handles))
        };
        drop(left);
        for handle in handles {
            if handle.join().is_err() {
                tracing::error!("a thread that drops cached pages panicked");
            }
        }
    }
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

    /// A kernel that drops pages of file 0 when it is told to go on, and others at once; and who has told it what.
    struct Kernel {
        told: Mutex<Vec<(thread::Id, NodeId)>>,
        goes_on: Mutex<bool>,
        changed: Condvar,
    }

    impl Kernel {
        fn new() -> Arc<Kernel> {
            Arc::new(Kernel {
                told: Mutex::new(rank::LEAF, Vec::new()),
                goes_on: Mutex::new(rank::LEAF, false),
                changed: Condvar::new(),
            })
        }

        fn go_on(&self) {
            *self.goes_on.lock() = true;
            self.changed.notify_all();
        }

        fn told(&self) -> usize {
            self.told.lock().len()
        }
    }

    impl Bell for Kernel {
        fn ring(&self, parts: &[IoSlice<'_>]) -> std::io::Result<bool> {
            use zerocopy::FromBytes;
            let message = abi::NotifyInvalInodeOut::read_from_bytes(&parts[1]).unwrap();
            self.told.lock().push((thread::Id::current(), message.ino));
            let mut goes_on = self.goes_on.lock();
            while message.ino == 0 && !*goes_on {
                self.changed.wait(&mut goes_on);
            }
            Ok(true)
        }
    }

    /// Has the kernel go on where a test ends early, as its threads end before it does.
    struct AtEnd<'a>(&'a Kernel);

    impl Drop for AtEnd<'_> {
        fn drop(&mut self) {
            self.0.go_on();
        }
    }

    fn with(kernel: &Arc<Kernel>, most: usize, idle: usize) -> Notifier {
        let idle = Arc::new(AtomicUsize::new(idle));
        let bell = Arc::clone(kernel) as Arc<dyn Bell>;
        Notifier::new(Some(bell), Hands { most, idle })
    }

    /// A worker had begun read-ahead, and dropped pages that another one's read of just that had locked: neither came back.
    #[test]
    fn no_worker_drops_pages() {
        let kernel = Kernel::new();
        let notifier = with(&kernel, 8, 1);
        let droppers = notifier.start().unwrap();
        let answered = Arc::new(AtomicUsize::new(0));
        let its = notifier.clone();
        let (count, dropped) = (Arc::clone(&answered), Arc::clone(&kernel));
        let worker = move || {
            its.drop_pages(Pages::all(1), nothing());
            assert!(its.drop_pages_and_wait(Pages::all_unwritten(2)));
            let answer = move || {
                count.fetch_add(1, Ordering::SeqCst);
            };
            its.drop_written(3, 0..4096, Box::new(answer));
            its.drop_outdated(Pages::all(4));
            its.drop_outdated_and_wait(Pages::unwritten(5, 0..4096));
            while dropped.told() < 5 || answered.load(Ordering::SeqCst) == 0 {
                thread::yield_now();
            }
            let told = dropped.told.lock();
            assert!(told.iter().all(|(by, _)| !by.is_ours()), "{told:?}");
        };
        let worker = thread::spawn("fuse", worker).unwrap();
        worker.join().unwrap();
        drop(droppers);
    }

    /// Its pages are locked until somebody reads on, or it has gigabytes that mappings have stored.
    #[test]
    fn one_file_holds_up_no_other() {
        let kernel = Kernel::new();
        let notifier = with(&kernel, 8, 1);
        let droppers = notifier.start().unwrap();
        let _at_end = AtEnd(&kernel);
        for _ in 0..3 * DROPPERS_MAX {
            notifier.drop_pages(Pages::all(0), nothing());
        }
        assert!(notifier.drop_pages_and_wait(Pages::all(1)));
        // The last thread of those at file 0 may have just begun.
        while kernel.told() < OF_A_FILE_MAX + 1 {
            thread::yield_now();
        }
        {
            let turns = notifier.0.turns.lock();
            assert_eq!(turns.left.len(), 3 * DROPPERS_MAX - OF_A_FILE_MAX);
            assert!(turns.threads <= DROPPERS_MAX);
        }
        kernel.go_on();
        while kernel.told() < 3 * DROPPERS_MAX + 1 {
            thread::yield_now();
        }
        drop(droppers);
        assert!(notifier.0.turns.lock().going.is_empty());
    }

    /// At the end of a session nobody waits for what is left, nor for a thread.
    #[test]
    fn what_is_left_at_the_end_is_forgotten() {
        let kernel = Kernel::new();
        let notifier = with(&kernel, 8, 1);
        let droppers = notifier.start().unwrap();
        let kept = Arc::new(());
        for _ in 0..4 {
            let kept = Arc::clone(&kept);
            notifier.drop_pages(Pages::all(0), Box::new(move || drop(kept)));
        }
        while kernel.told() < OF_A_FILE_MAX {
            thread::yield_now();
        }
        thread::parallel(2, |part| match part {
            0 => {
                while !notifier.0.turns.lock().is_over {
                    thread::yield_now();
                }
                kernel.go_on();
            }
            _ => drop(Droppers(notifier.clone())),
        });
        assert_eq!(Arc::strong_count(&kept), 1);
        assert_eq!(kernel.told(), OF_A_FILE_MAX);
        notifier.drop_pages(Pages::all(1), nothing());
        assert!(notifier.0.turns.lock().left.is_empty());
        drop(droppers);
    }

    /// Of a CPU that came after the mount: the drop waited for a page that was locked until the same worker had served another request.
    #[test]
    fn a_worker_that_is_alone_does_not_wait() {
        let kernel = Kernel::new();
        let notifier = with(&kernel, 8, 1);
        let its = notifier.clone();
        let worker = move || {
            works_alone();
            its.drop_pages(Pages::all(7), nothing());
            // Who looks for data in a loop had each of these remembered.
            for _ in 0..100 {
                assert!(!its.drop_pages_and_wait(Pages::all_unwritten(8)));
            }
            assert_eq!(its.0.turns.lock().left.len(), 1);
            // But not what a write counts on, whose pages these are.
            let left = its.leave(Pages::all_unwritten(9), nothing(), None);
            its.drop_outdated(Pages::outdated(9, 0..4096));
            its.0.turns.lock().withdraw(left);
            let turns = its.0.turns.lock();
            assert_eq!(turns.left.len(), 2);
            assert_eq!(turns.left[1].pages.race, Race::Any);
        };
        thread::spawn("alone", worker).unwrap().join().unwrap();
        assert_eq!(kernel.told(), 0);
        notifier.drop_left();
        assert_eq!(kernel.told(), 2);
        assert!(notifier.0.turns.lock().going.is_empty());
    }

    #[test]
    fn what_is_left_is_bounded() {
        let kernel = Kernel::new();
        let notifier = with(&kernel, 8, 1);
        for page in 0..10 * RANGES_MAX as u64 {
            notifier.drop_outdated(Pages::outdated(7, page * 4096..(page + 1) * 4096));
        }
        assert_eq!(notifier.0.turns.lock().left.len(), RANGES_MAX + 1);
        notifier.drop_left();

        // An answer comes after the drop that it waits for, but of too many.
        let answered = Arc::new(AtomicUsize::new(0));
        for _ in 0..BUSY_MAX + 2 {
            let answered = Arc::clone(&answered);
            let answer = move || {
                answered.fetch_add(1, Ordering::Relaxed);
            };
            notifier.drop_written(7, 0..4096, Box::new(answer));
        }
        assert_eq!(answered.load(Ordering::Relaxed), 2);
        assert_eq!(notifier.0.turns.lock().left.len(), BUSY_MAX + 1);
        notifier.drop_left();
        assert_eq!(answered.load(Ordering::Relaxed), BUSY_MAX + 2);
        assert_eq!(notifier.0.withheld.load(Ordering::SeqCst), 0);
    }

    /// Of requests in the background the kernel may send fewer than answers are withheld, and then none before one is answered, which waited for pages that were locked for such a request.
    #[test]
    fn an_answer_waits_for_no_drop_for_ever() {
        // One's pages stay locked, and what is of its file waits with them.
        const WRITES: usize = OF_A_FILE_MAX + RANGES_MAX + 8;
        let kernel = Kernel::new();
        let notifier = with(&kernel, 8, 1);
        let droppers = notifier.start().unwrap();
        let _at_end = AtEnd(&kernel);
        let (tell, told) = std::sync::mpsc::channel();
        let begun_ns = now_ns();
        for n in 0..WRITES as u64 {
            let tell = tell.clone();
            let answer = Box::new(move || tell.send(n).unwrap());
            notifier.drop_written(0, n * 4096..(n + 1) * 4096, answer);
        }
        let most = 4 * WAIT_MAX;
        let mut answered: Vec<u64> = (0..WRITES)
            .map(|_| told.recv_timeout(most).unwrap())
            .collect();
        assert!(now_ns() - begun_ns >= WAIT_MAX.as_nanos() as u64);
        answered.sort_unstable();
        assert!(answered.iter().copied().eq(0..WRITES as u64));
        // The last of them leaves its drop after its answer.
        let is_left = |page: u64| {
            let turns = notifier.0.turns.lock();
            let pages = Pages::changed_past(0, page * 4096..(page + 1) * 4096);
            turns.left.iter().any(|left| left.pages.has(&pages))
        };
        let withheld = || notifier.0.withheld.load(Ordering::SeqCst);
        while withheld() > 0 || !is_left(WRITES as u64 - 1) {
            thread::yield_now();
        }
        assert!((OF_A_FILE_MAX as u64..WRITES as u64).all(is_left));
        assert!(notifier.0.turns.lock().left.len() <= RANGES_MAX + 1);
        kernel.go_on();
        while !notifier.0.turns.lock().left.is_empty() {
            thread::yield_now();
        }
        drop(droppers);
        assert!(told.try_recv().is_err(), "answered twice");
    }

    #[test]
    fn of_workers_that_wait_one_is_left() {
        let kernel = Kernel::new();
        let notifier = with(&kernel, 2, 1);
        let turn = notifier.turn().unwrap();
        assert!(notifier.turn().is_none());
        drop(turn);
        // All others are busy, or no further one could be started.
        let notifier = with(&kernel, 8, 0);
        let turn = notifier.turn().unwrap();
        assert!(notifier.turn().is_none());
        drop(turn);
        let notifier = with(&kernel, 1000, 1);
        let turns: Vec<_> = std::iter::from_fn(|| notifier.turn()).collect();
        assert_eq!(turns.len(), BUSY_MAX - 1);
        drop(turns);
        assert_eq!(notifier.0.turns.lock().waiting, 0);
    }

    /// The kernel's lock of the file was given back in the middle of a drop that nobody noted: a page that came back before a write stayed.
    #[test]
    fn a_drop_that_is_waited_for_no_more_is_one_beside_writes() {
        let kernel = Kernel::new();
        let notifier = with(&kernel, 8, 1);
        let droppers = notifier.start().unwrap();
        let left = notifier.leave(Pages::all_unwritten(0), nothing(), None);
        while kernel.told() == 0 {
            thread::yield_now();
        }
        assert!(notifier.0.turns.lock().withdraw(left));
        notifier.0.rereads.begin(0, Race::Any, now_ns());
        assert!(notifier.0.turns.lock().race(left));
        kernel.go_on();
        while !notifier.0.turns.lock().going.is_empty() {
            thread::yield_now();
        }
        assert!(!notifier.0.turns.lock().race(left));
        drop(droppers);
    }
}
