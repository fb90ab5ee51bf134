//! What there is to clean, which device's thread has it, and who waits for room.
//!
//! Owns the lists of wanted pages and the threads' condition variables; knows no file and writes nothing. The invariants are in [`super`].

use crate::Ino;
use base::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use base::map::{HashMap, HashSet};
use base::sync::{Condvar, Mutex, rank};
use base::thread::lane;
use engine::cache::{FileKey, PageCache};
use engine::sum::Padded;
use std::collections::VecDeque;
use std::time::Duration;

/// Pieces in a batch.
pub(super) const BATCH: usize = 32;
const BATCH_BESIDE_READS: usize = 2;
/// Pages that a device's list has room for.
const LIST: usize = 2 * BATCH;
/// What is late: so many times as long as usual, and a little more.
const LATE: u64 = 3;
const LATE_NS: u64 = 1_000_000;
/// Before sets that had nothing to be cleaned are looked at again.
const NAP: Duration = Duration::from_millis(2);
/// How long who waits for room sleeps at most, and how often.
const WAIT: Duration = Duration::from_millis(5);
const PATIENCE: u32 = 400;
/// Beside others that make progress, how many batches end before he gives up.
const ROUNDS: u32 = 8000;
/// More threads share a count of reads.
const LANES: usize = 16;

pub(super) type Wanted = (FileKey, u64);

/// What there is to clean, and who waits for it.
#[derive(Debug)]
pub(in crate::data) struct Cleaning {
    pages: std::sync::Arc<PageCache>,
    pub(super) work: Mutex<Work>,
    /// Something is to be done.
    news: Condvar,
    /// Something was cleaned.
    pub(super) eased: Condvar,
    /// There are to be no threads any more.
    over: Condvar,
    /// A thread sleeps until it is woken; a hint.
    idle: AtomicBool,
    /// There are threads.
    running: AtomicBool,
    /// The set to look at next.
    pub(super) next_set: AtomicUsize,
    /// Reads that wait for devices, as threads count them; a hint.
    reading: [Padded<AtomicUsize>; LANES],
    /// Pages that were written home, and the writes that took; how often somebody waited for room.
    pub(super) cleaned: AtomicU64,
    pub(super) writes: AtomicU64,
    waits: AtomicU64,
}

#[derive(Debug)]
pub(super) struct Work {
    pub(super) open: bool,
    /// By device.
    pub(super) lists: Vec<VecDeque<Wanted>>,
    /// What is on a list or in a batch, and of which device.
    pub(super) taken: HashMap<Wanted, usize>,
    /// By device.
    pub(super) batches: Vec<Batch>,
    pub(super) asked: Vec<Asked>,
    next_ticket: u64,
    /// Batches that have ended while somebody waited.
    rounds: u64,
    pub(super) sweeps: HashMap<FileKey, Sweep>,
    /// Files with pages in crowded sets that need write-back.
    pub(super) files: HashSet<Ino>,
}

/// How long a device takes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Batch {
    pub(super) began_ns: Option<u64>,
    /// For a batch, as a rule.
    usual_ns: u64,
}

impl Batch {
    /// It takes so much longer than usual that who wants room must not count on it.
    fn is_late(&self, now_ns: u64) -> bool {
        let late = |began| now_ns.saturating_sub(began) > LATE * self.usual_ns + LATE_NS;
        self.began_ns.is_some_and(late)
    }

    fn end(&mut self, now_ns: u64) {
        let Some(began) = self.began_ns.take() else {
            return;
        };
        let (took, usual) = (now_ns.saturating_sub(began), self.usual_ns);
        // One that was late says little.
        self.usual_ns = match took > usual {
            true => usual + (took - usual) / 16,
            false => usual - (usual - took) / 2,
        };
    }
}

/// Somebody waits for room in a set.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) ticket: u64,
    pub(super) set: usize,
    /// Nobody has looked at it since something was cleaned.
    pub(super) fresh: bool,
    pub(super) hopeless: bool,
}

/// A file all of whose pages go home.
#[derive(Clone, Debug)]
pub(super) struct Sweep {
    pub(super) began_ns: u64,
    /// Where each device's thread goes on; `None`: it is through.
    pub(super) next: Vec<Option<u64>>,
    /// A page was passed by.
    pub(super) missed: bool,
}

impl Cleaning {
    pub(in crate::data) fn new(pages: &std::sync::Arc<PageCache>, devices: usize) -> Cleaning {
        Cleaning {
            pages: std::sync::Arc::clone(pages),
            work: Mutex::new(
                rank::LEAF,
                Work {
                    open: true,
                    lists: (0..devices).map(|_| VecDeque::new()).collect(),
                    taken: HashMap::default(),
                    batches: vec![Batch::default(); devices],
                    asked: Vec::new(),
                    next_ticket: 0,
                    rounds: 0,
                    sweeps: HashMap::default(),
                    files: HashSet::default(),
                },
            ),
            news: Condvar::new(),
            eased: Condvar::new(),
            over: Condvar::new(),
            idle: AtomicBool::new(false),
            running: AtomicBool::new(false),
            next_set: AtomicUsize::new(0),
            reading: std::array::from_fn(|_| Padded::default()),
            cleaned: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            waits: AtomicU64::new(0),
        }
    }

    /// Whether threads clean.
    pub(in crate::data) fn is_running(&self) -> bool {
        self.running.load(Ordering::Relaxed)
    }

    /// From now on threads clean.
    pub(in crate::data) fn set_running(&self) {
        self.running.store(true, Ordering::Relaxed);
    }

    /// Pages that were cleaned, the writes that took, and how often somebody waited for room.
    pub(in crate::data) fn counts(&self) -> [u64; 3] {
        [&self.cleaned, &self.writes, &self.waits].map(|count| count.load(Ordering::Relaxed))
    }

    /// A page has become dirty: threads that sleep look whether that is too many.
    #[inline]
    pub(in crate::data) fn note_dirty(&self) {
        if self.pages.crowded() > 0 && self.idle.load(Ordering::Relaxed) {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        self.idle.store(false, Ordering::Relaxed);
        let work = self.work.lock();
        self.news.notify_all();
        drop(work);
    }

    /// No thread begins anything from now on, and nobody waits for one.
    pub(in crate::data) fn close(&self) {
        self.work.lock().open = false;
        self.running.store(false, Ordering::Relaxed);
        self.news.notify_all();
        self.eased.notify_all();
        self.over.notify_all();
    }

    /// A read waits for devices as long as this lives.
    pub(in crate::data) fn beside_read(&self) -> Reading<'_> {
        let reading = &self.reading[lane() % LANES];
        reading.fetch_add(1, Ordering::Relaxed);
        Reading(reading)
    }

    /// How many pieces a batch may have (invariant 4).
    pub(super) fn most_pieces(&self) -> usize {
        let reads = self
            .reading
            .iter()
            .any(|count| count.load(Ordering::Relaxed) > 0);
        match reads && self.work.lock().asked.is_empty() {
            true => BATCH_BESIDE_READS,
            false => BATCH,
        }
    }

    /// Sleeps until there may be something for a device's thread.
    pub(super) fn rest(&self, device: usize, fruitless: bool) {
        let mut work = self.work.lock();
        // Who makes a set crowded after the look below finds this; neither is the lock's, so the next write does at the latest.
        self.idle.store(true, Ordering::SeqCst);
        let crowded = self.pages.crowded() > 0;
        if !work.open || work.is_due(device) || crowded && !fruitless {
            return;
        }
        match crowded {
            true => {
                // One that naps wakes the others as soon as there is something for them.
                self.idle.store(false, Ordering::Relaxed);
                self.news.wait_for(&mut work, NAP);
            }
            false => self.news.wait(&mut work),
        }
    }

    /// Others have what there is to clean, as a sync of its file or a write in flight. Nobody tells when that is over.
    pub(super) fn nap(&self) {
        let mut work = self.work.lock();
        if work.open {
            self.over.wait_for(&mut work, NAP);
        }
    }

    /// Puts a page on its device's list. False: it has enough to do.
    pub(super) fn want(&self, device: usize, wanted: Wanted, now_ns: u64) -> bool {
        let mut work = self.work.lock();
        if work.lists[device].len() >= LIST || work.batches[device].is_late(now_ns) {
            return false;
        }
        if work.taken.insert(wanted, device).is_none() {
            work.lists[device].push_back(wanted);
            if work.lists[device].len() == 1 {
                self.news.notify_all();
            }
        }
        true
    }

    /// Whether a page is on its way, and whether that is soon.
    pub(super) fn is_taken(&self, wanted: &Wanted, now_ns: u64) -> Option<bool> {
        let work = self.work.lock();
        let device = *work.taken.get(wanted)?;
        Some(!work.batches[device].is_late(now_ns))
    }

    /// The next pages of a device's list: a batch of it begins, if there are any.
    pub(super) fn take(&self, device: usize, most: usize, now_ns: u64, out: &mut Vec<Wanted>) {
        let mut work = self.work.lock();
        let some = most.min(work.lists[device].len());
        out.extend(work.lists[device].drain(..some));
        work.batches[device].began_ns = (some > 0).then_some(now_ns);
    }

    /// A batch has ended, of these pages; if in vain, it could have none of them.
    pub(super) fn end(&self, device: usize, wanted: &[Wanted], in_vain: bool, now_ns: u64) {
        let mut work = self.work.lock();
        for one in wanted {
            work.taken.remove(one);
        }
        if in_vain {
            // That says nothing of the device, and no set has changed.
            work.batches[device].began_ns = None;
            return;
        }
        work.batches[device].end(now_ns);
        if work.asked.is_empty() {
            return;
        }
        work.rounds += 1;
        work.asked.iter_mut().for_each(|asked| asked.fresh = true);
        self.eased.notify_all();
        self.news.notify_all();
    }

    /// Waits until a set has room for an overwrite (invariant 5). The caller holds no lock.
    pub(in crate::data) fn wait_for_room(&self, set: usize) -> bool {
        if !self.is_running() {
            return false;
        }
        self.waits.fetch_add(1, Ordering::Relaxed);
        let asking = Asking::new(self, set);
        let mut quiet = 0;
        for _ in 0..ROUNDS {
            if quiet == PATIENCE {
                return false;
            }
            let seen = self.work.lock().rounds;
            if self.pages.has_room(set) {
                return true;
            }
            let mut work = self.work.lock();
            while work.rounds == seen {
                if !work.open || work.is_hopeless(asking.ticket) {
                    return false;
                }
                if self.eased.wait_for(&mut work, WAIT) {
                    // What was begun for this may be with a device that does not answer.
                    work.look_again(asking.ticket);
                    self.news.notify_all();
                    quiet += 1;
                    break;
                }
            }
        }
        false
    }

    /// Has a file cleaned whole, if it is not being so.
    pub(in crate::data) fn sweep(&self, key: FileKey, began_ns: u64) {
        let mut work = self.work.lock();
        let devices = work.lists.len();
        let sweep = || Sweep {
            began_ns,
            next: vec![Some(0); devices],
            missed: false,
        };
        work.sweeps.entry(key).or_insert_with(sweep);
        self.news.notify_all();
    }

    /// Files that write-back has to take, so that sets are crowded no more.
    pub(in crate::data) fn take_files(&self) -> HashSet<Ino> {
        std::mem::take(&mut self.work.lock().files)
    }
}

impl Work {
    /// Whether a device's thread has something to look at, whatever sets are crowded.
    fn is_due(&self, device: usize) -> bool {
        !self.lists[device].is_empty()
            || self.asked.iter().any(|asked| asked.fresh)
            || self.sweeps.values().any(|s| s.next[device].is_some())
    }

    fn look_again(&mut self, ticket: u64) {
        let asked = self.asked.iter_mut().find(|a| a.ticket == ticket);
        asked.into_iter().for_each(|asked| asked.fresh = true);
    }

    fn is_hopeless(&self, ticket: u64) -> bool {
        self.asked.iter().any(|a| a.ticket == ticket && a.hopeless)
    }
}

/// A read that waits for devices.
pub(in crate::data) struct Reading<'a>(&'a AtomicUsize);

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Somebody waits.
struct Asking<'a> {
    cleaning: &'a Cleaning,
    ticket: u64,
}

impl<'a> Asking<'a> {
    fn new(cleaning: &'a Cleaning, set: usize) -> Asking<'a> {
        let mut work = cleaning.work.lock();
        work.next_ticket += 1;
        let ticket = work.next_ticket;
        work.asked.push(Asked {
            ticket,
            set,
            fresh: true,
            hopeless: false,
        });
        cleaning.news.notify_all();
        Asking { cleaning, ticket }
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let mut work = self.cleaning.work.lock();
        work.asked.retain(|asked| asked.ticket != self.ticket);
    }
}
