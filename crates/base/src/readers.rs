//! Readers of a lock that write no line of memory that another core writes: each says in a line of its
//! core's that it reads, and a writer looks into the lines of all cores. After BRAVO (Dice and Kogan,
//! *BRAVO: Biased Locking for Reader-Writer Locks*, USENIX ATC 2019), which puts the same in front of any
//! lock. Checked by `model/`.
//!
//! A core is a number that the caller gives: `base::thread::lane`, which each running thread has for itself.
//!
//! A lock has an underlying lock and a [`Bias`]. As long as the bias is on, a reader *enters*: it names
//! the bias in a place of its core's, and looks whether it is on still. Else it takes the underlying lock
//! shared, and counts.
//!
//! Invariants:
//! 1. The bias goes on under the underlying lock, and goes off under its exclusive hold alone. So who holds it
//!    exclusively and finds, or makes, the bias off, finds it off until it lets go.
//! 2. Whoever turns the bias off waits until no place names it. An entry made after that look finds the
//!    bias off (both sides write first and look afterwards), and is taken back.
//! 3. The bias goes on when readers of other cores than the last have come, without a writer between them,
//!    once for each core that has ever entered anything, and [`CORES_LEAST`] times. Each of those reads took a line or two from elsewhere, one
//!    after the other, as a revocation does for each core. So revocations never take more than what reading took,
//!    which is the best that can be said without knowing what comes, and an inode that is read and written in turn has no bias.

use base::atomic::{AtomicU32, AtomicUsize, Ordering};
use base::tight::limit;

/// Locks that the threads of one core can have entered at once; for more there is the underlying lock.
const PLACES: usize = 8;
/// As if there were so many cores at least (invariant 3).
pub const CORES_LEAST: usize = 16;
// The word of a bias: whether it is on; how often another core than before has read; above both, the core that read
// last, and one.
const ON: u32 = 1;
const READ: u32 = 2;
const CORE_SHIFT: u32 = 16;
const CORE: u32 = u32::MAX << CORE_SHIFT;

/// What a core's threads have entered; 0: nothing. On a line of its own, and the next one, which
/// processors fetch with it.
#[derive(Debug)]
#[repr(align(128))]
struct Places([AtomicUsize; PLACES]);

/// The places of all cores, for all locks of the process.
#[derive(Debug)]
pub struct Readers {
    cores: Box<[Places]>,
    /// Places of this many cores have ever been used.
    used: AtomicU32,
}

/// One place that names a lock, until it is dropped: then the reader is done.
#[derive(Debug)]
pub struct Entry<'r>(&'r AtomicUsize);

impl Readers {
    /// Places for so many cores; others share them.
    pub fn new(cores: usize) -> Readers {
        let places = |_| Places(std::array::from_fn(|_| AtomicUsize::new(0)));
        Readers {
            cores: (0..cores).map(places).collect(),
            used: AtomicU32::new(0),
        }
    }

    fn used(&self) -> usize {
        self.used.load(Ordering::SeqCst) as usize
    }
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

/// Whether readers enter, and what decides that, in one word; see the module's head. It does not move while anybody
/// has entered.
#[derive(Debug)]
pub struct Bias(AtomicU32);

#[inline]
fn mark(core: usize) -> u32 {
    (core as u32).wrapping_add(1) << CORE_SHIFT
}

impl Bias {
    /// Off, as if this core had read already: whoever makes a lock mostly is the first to take it.
    pub fn of(core: usize) -> Bias {
        Bias(AtomicU32::new(mark(core)))
    }

    /// A hint.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed) & ON != 0
    }

    /// The bias is off and this core read last: it takes the underlying lock, and counts nothing. A hint.
    #[inline]
    pub fn is_left_to(&self, core: usize) -> bool {
        (self.0.load(Ordering::Relaxed) ^ mark(core)) & (CORE | ON) == 0
    }

    fn name(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// The caller reads until the entry is dropped; `None`: it has to take the underlying lock.
    pub fn enter<'r>(&self, readers: &'r Readers, core: usize) -> Option<Entry<'r>> {
        let core = core % readers.cores.len();
        // Before the place is used, so that whoever turns the bias off looks there.
        if core >= readers.used() {
            readers.used.fetch_max(core as u32 + 1, Ordering::SeqCst);
        }
        let free = |place: &&AtomicUsize| {
            place.load(Ordering::Relaxed) == 0
                && place
                    .compare_exchange(0, self.name(), Ordering::SeqCst, Ordering::Relaxed)
                    .is_ok()
        };
        let entry = Entry(readers.cores[core].0.iter().find(free)?);
        // Invariant 2.
        (self.0.load(Ordering::SeqCst) & ON != 0).then_some(entry)
    }

    /// Counts a reader that holds the underlying lock shared (invariant 3).
    pub fn count(&self, core: usize, readers: &Readers) {
        let seen = self.0.load(Ordering::Relaxed);
        if (seen ^ mark(core)) & CORE == 0 {
            return;
        }
        let reads = (seen & !CORE) / READ + 1;
        // What is small depends on nothing that others in the process do: a seed decides all.
        let enough = limit(readers.used().max(CORES_LEAST), 2);
        let counted = match reads as usize >= enough {
            true => ON,
            false => reads * READ + (seen & ON),
        };
        // Of two that count at once one is not counted. A bias goes off for no count, nor on twice (invariant 1).
        let next = mark(core) | counted;
        let _ = self
            .0
            .compare_exchange(seen, next, Ordering::SeqCst, Ordering::Relaxed);
    }

    /// A writer has got the underlying lock exclusively (invariant 3); true if it must turn the bias off before it writes.
    /// Nobody else changes the word until it lets go.
    #[inline]
    pub fn is_written(&self) -> bool {
        let word = self.0.load(Ordering::Relaxed);
        if word & !(CORE | ON) != 0 {
            self.0.store(word & (CORE | ON), Ordering::Release);
        }
        word & ON != 0
    }

    fn set(&self, on: bool) {
        let word = self.0.load(Ordering::Relaxed);
        let word = if on { word | ON } else { word & !ON };
        self.0.store(word, Ordering::SeqCst);
    }

    /// Turns the bias off, and returns when nobody reads who has entered; `wait` is called again and again until then.
    #[cold]
    pub fn turn_off(&self, readers: &Readers, mut wait: impl FnMut()) {
        self.set(false);
        for place in self.places(readers) {
            while place.load(Ordering::SeqCst) == self.name() {
                wait();
            }
        }
    }

    /// [`Bias::turn_off`] without waiting: false when somebody reads; then nothing has changed.
    #[cold]
    pub fn try_turn_off(&self, readers: &Readers) -> bool {
        self.set(false);
        let free = !self.is_entered(readers);
        if !free {
            // Whoever entered before is in, and the caller changes nothing.
            self.set(true);
        }
        free
    }

    /// Whether a place names it, if only for a moment.
    pub fn is_entered(&self, readers: &Readers) -> bool {
        let named = |place: &AtomicUsize| place.load(Ordering::SeqCst) == self.name();
        self.places(readers).any(named)
    }

    fn places<'r>(&self, readers: &'r Readers) -> impl Iterator<Item = &'r AtomicUsize> {
        let cores = readers.cores[..readers.used()].iter();
        cores.flat_map(|places| places.0.iter())
    }
}
