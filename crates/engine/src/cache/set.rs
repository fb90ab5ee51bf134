//! One set of the page cache: what its frames hold, and which of them gives way.
//!
//! What a hit reads lies in three cache lines: the prints with the uses, the numbers of the frames, and one of the tags. It
//! takes no lock, and once a page has the uses that are remembered it writes nothing here. Of the rest those who change something make
//! use, under the set's lock.
//!
//! Invariants:
//! 1. Everything here changes under the set's lock, but [`Uses`].
//! 2. The print of a way is that of its page, and 0 exactly when it is empty; its tag then names no page. Without the lock prints are
//!    hints: what they lead to is said by the tag.
//! 3. A way has a frame from when it first holds a page, or has one set aside, and keeps it; but for one that it leaves to
//!    guards, for which it gets another within a change of its tag.
//! 4. A way whose frame is set aside is empty to everybody else, and given to nobody, until its page is published or given up.
//!    At most [`ASIDE_MAX`] are.
//! 5. `departed` counts the frames that lost their page to another one and had been written since that page came.
//! 6. A frame is written, or set aside, only if it has no guards ([`guards`](super::guards)): the way gets another one before.

use super::frames::Frames;
use super::policy::{Policy, Uses};
use super::tags::{Look, Name, Tag};
use super::{Backing, WAYS};
use base::atomic::{AtomicU32, AtomicU64, Ordering};
use base::canary::{Canary, planted};
use base::prefetch;
use base::sync::{Latch, LatchGuard, rank};

/// Frame of a way that has never held a page.
pub(super) const NO_FRAME: u32 = u32::MAX;

/// Frames of a set that are set aside at a time: the others are for who cannot do without.
const ASIDE_MAX: u32 = 3;

/// How often a hit without the lock is tried.
const TRIES: u32 = 2;

#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Set {
    prints: Prints,
    pub uses: Uses,
    numbers: Numbers,
    tags: [Tag; WAYS],
    inner: Latch<Inner>,
}

/// At most one and a half of a hundred of what the frames take.
const _: () = assert!(size_of::<Set>() <= 960 && WAYS == 16);
const _: () = assert!(std::mem::offset_of!(Set, numbers) == 64);

/// Some bits of the hash of what each way holds, four to a word.
#[derive(Debug)]
struct Prints([AtomicU64; WAYS / PER_WORD]);

const PER_WORD: usize = 4;
/// One in each print of a word.
const ONES: u64 = 0x0001_0001_0001_0001;
/// All bits but the highest of each print.
const LOW: u64 = 0x7FFF * ONES;

/// The frames of the ways.
#[derive(Debug)]
#[repr(align(64))]
struct Numbers([AtomicU32; WAYS]);

/// What the lock protects.
#[derive(Debug)]
pub(super) struct Inner {
    /// The ways whose pages are dirty, a bit each, and those among them behind which a promised block stands.
    dirty: u16,
    promised: u16,
    /// Its place among the sets.
    index: u32,
    /// See [`super::crowd`].
    pub crowded: bool,
    next_stamp: u64,
    /// Ways whose frames are set aside, a bit each (invariant 4).
    aside: u16,
    /// Guards of the frames that the ways have.
    guards: [u8; WAYS],
    /// Invariant 5.
    pub departed: u64,
    /// When each page was last written; 0: not since it came.
    stamps: [u64; WAYS],
    policy: Policy,
}

impl Prints {
    fn new() -> Prints {
        Prints(std::array::from_fn(|_| AtomicU64::new(0)))
    }

    fn set(&self, way: usize, print: u16) {
        let (word, shift) = (&self.0[way / PER_WORD], way % PER_WORD * 16);
        let others = word.load(Ordering::Relaxed) & !(0xFFFF << shift);
        word.store(others | u64::from(print) << shift, Ordering::Relaxed);
    }

    fn get(&self, way: usize) -> u16 {
        (self.0[way / PER_WORD].load(Ordering::Relaxed) >> (way % PER_WORD * 16)) as u16
    }

    /// The ways with this print, a bit each.
    #[inline]
    fn with(&self, print: u16) -> u16 {
        let wanted = u64::from(print) * ONES;
        let words = self.0.iter().enumerate();
        words.fold(0, |all, (i, word)| {
            let unlike = word.load(Ordering::Relaxed) ^ wanted;
            // The highest bit of each print that is zero now, and of no other: the sum does not carry from one to the next.
            let like = !(((unlike & LOW) + LOW) | unlike | LOW) >> 15;
            // The four bits side by side, above all else.
            let bits = like.wrapping_mul(1 << 48 | 1 << 33 | 1 << 18 | 1 << 3) >> 48;
            all | ((bits & 0xF) as u16) << (i * PER_WORD)
        })
    }

    fn all(&self) -> [u16; WAYS] {
        std::array::from_fn(|way| self.get(way))
    }
}

/// Where frames come from.
pub(super) trait Sources {
    /// One for a way that has none.
    fn give(&self) -> u32;
    /// One in place of one that is left to so many guards.
    fn take_apart(&self, frame: u32, guards: u8) -> u32;
    /// Makes one that was taken so hold what the other does.
    fn copy(&self, from: u32, to: u32);
}

/// A set whose lock is held.
#[derive(Debug)]
pub(super) struct Locked<'a> {
    pub set: &'a Set,
    pub inner: LatchGuard<'a, Inner>,
}

/// The ways in a word, the first first.
fn ways(mut bits: u16) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let way = bits.trailing_zeros() as usize;
        bits &= bits.checked_sub(1)?;
        Some(way)
    })
}

impl Set {
    /// Asks for the lines that a look-up of an absent page reads.
    pub fn ask_for(&self) {
        prefetch::object(&self.prints);
        let looked_at = std::mem::offset_of!(Inner, departed) + size_of::<u64>();
        prefetch::start(std::ptr::from_ref(&self.inner).cast(), looked_at);
    }

    /// Asks for the lines that are read and changed when a page comes. Which tag will be its own is not known yet.
    pub fn ask_to_change(&self) {
        prefetch::object(self);
    }

    pub fn new(number: usize) -> Set {
        let inner = Inner {
            dirty: 0,
            promised: 0,
            aside: 0,
            guards: [0; WAYS],
            index: number as u32,
            crowded: false,
            next_stamp: 0,
            departed: 0,
            stamps: [0; WAYS],
            policy: Policy::new(),
        };
        Set {
            prints: Prints::new(),
            uses: Uses::new(),
            numbers: Numbers(std::array::from_fn(|_| AtomicU32::new(NO_FRAME))),
            tags: std::array::from_fn(|_| Tag::new()),
            inner: Latch::keyed(rank::PAGE_SET, number as u64, inner),
        }
    }

    pub fn lock(&self) -> Locked<'_> {
        Locked {
            set: self,
            inner: self.inner.lock(),
        }
    }

    pub fn try_lock(&self) -> Option<Locked<'_>> {
        Some(Locked {
            set: self,
            inner: self.inner.try_lock()?,
        })
    }

    /// The way's frame; [`NO_FRAME`]: none yet.
    pub fn number(&self, way: usize) -> u32 {
        self.numbers.0[way].load(Ordering::Relaxed)
    }

    /// Copies from a page without the lock, and counts the use. False: it was not found, or others changed it all the time.
    #[inline]
    pub fn hit(
        &self,
        print: u16,
        page: &Name,
        frames: &Frames,
        (offset, out): (usize, &mut [u8]),
    ) -> bool {
        // Which of them is wanted is not known yet, but all of them are on one line.
        prefetch::object(&self.numbers);
        for _ in 0..TRIES {
            let mut changed = false;
            for way in ways(self.prints.with(print)) {
                let frame = self.number(way);
                if frame == NO_FRAME {
                    continue;
                }
                frames.prefetch(frame, offset, out.len());
                // Which frame it is now; before was a hint for the line above (invariant 3).
                let copy = || frames.copy_out(self.number(way), offset, out);
                match self.tags[way].look(page, copy) {
                    Look::Found => {
                        self.uses.used(way);
                        return true;
                    }
                    Look::Other => {}
                    Look::Changed => changed = true,
                }
            }
            if !changed {
                break;
            }
        }
        false
    }

    /// What is needed of it to change a page.
    pub fn prefetch(&self) {
        prefetch::object(&self.prints);
        prefetch::object(&self.numbers);
    }
}

impl Locked<'_> {
    pub fn find(&self, print: u16, page: &Name) -> Option<usize> {
        ways(self.set.prints.with(print)).find(|&way| self.set.tags[way].is(page))
    }

    /// The ways that hold a page.
    pub fn held(&self) -> impl Iterator<Item = usize> + use<> {
        ways(!self.set.prints.with(0))
    }

    pub fn name(&self, way: usize) -> Name {
        self.set.tags[way].name()
    }

    /// `None`: the page of this way is clean.
    pub fn backing(&self, way: usize) -> Option<Backing> {
        match (self.inner.dirty >> way & 1, self.inner.promised >> way & 1) {
            (0, _) => None,
            (_, 0) => Some(Backing::Allocated),
            _ => Some(Backing::Promised),
        }
    }

    pub fn set_backing(&mut self, way: usize, backing: Option<Backing>) {
        let put = |word: &mut u16, bit: bool| *word = *word & !(1 << way) | u16::from(bit) << way;
        put(&mut self.inner.dirty, backing.is_some());
        put(&mut self.inner.promised, backing == Some(Backing::Promised));
    }

    pub fn index(&self) -> usize {
        self.inner.index as usize
    }

    /// How many pages are dirty.
    pub fn dirty(&self) -> u32 {
        self.inner.dirty.count_ones()
    }

    /// Whether a frame can be had for a new page.
    pub fn has_frame(&self) -> bool {
        self.inner.dirty | self.inner.aside != u16::MAX
    }

    /// The ways with dirty pages that have blocks of their own, the coldest first.
    pub fn cold(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.inner.dirty & !self.inner.promised;
        self.inner.policy.coldest(&self.set.uses, own)
    }

    pub fn stamp(&self, way: usize) -> u64 {
        self.inner.stamps[way]
    }

    pub fn used(&self, way: usize) {
        self.set.uses.used(way);
    }

    /// Puts a page, clean, into a way that is empty or has it already. `fill` makes the content; later changes go through
    /// [`change`](Self::change).
    pub fn fill(
        &mut self,
        way: usize,
        (print, page): (u16, Name),
        sources: &impl Sources,
        fill: impl FnOnce(u32),
    ) {
        self.have_frame(way, sources);
        let set = self.set;
        let tag = &set.tags[way];
        tag.change(|| {
            self.leave_to_guards(way, sources);
            tag.set_name(page);
            fill(set.number(way));
        });
        self.set.prints.set(way, print);
        self.inner.stamps[way] = 0;
        self.set_backing(way, None);
    }

    /// Changes bytes of a page that the way holds.
    pub fn change(&mut self, way: usize, sources: &impl Sources, change: impl FnOnce(u32)) {
        let set = self.set;
        let before = set.number(way);
        set.tags[way].change(|| {
            self.leave_to_guards(way, sources);
            let frame = set.number(way);
            if frame != before {
                sources.copy(before, frame);
            }
            change(frame);
        });
        self.written(way);
    }

    fn have_frame(&self, way: usize, sources: &impl Sources) {
        if self.set.number(way) == NO_FRAME {
            self.set.numbers.0[way].store(sources.give(), Ordering::Relaxed);
        }
    }

    /// Invariant 6. Within a change of the way's tag, so that who looks reads no frame that the way has no more.
    #[inline]
    fn leave_to_guards(&mut self, way: usize, sources: &impl Sources) {
        if self.inner.guards[way] > 0 && !planted(Canary::GuardOverwritten) {
            let guards = std::mem::take(&mut self.inner.guards[way]);
            let spare = sources.take_apart(self.set.number(way), guards);
            self.set.numbers.0[way].store(spare, Ordering::Relaxed);
        }
    }

    /// Whether the way has this frame.
    pub fn has(&self, way: usize, frame: u32) -> bool {
        self.set.number(way) == frame
    }

    pub fn guards(&self, way: usize) -> u8 {
        self.inner.guards[way]
    }

    /// The frame of a way gets a guard more. False: it has too many.
    pub fn add_guard(&mut self, way: usize) -> bool {
        let guards = self.inner.guards[way].checked_add(1);
        self.inner.guards[way] = guards.unwrap_or(u8::MAX);
        guards.is_some()
    }

    /// The frame of a way loses one. True: it was the last.
    pub fn end_guard(&mut self, way: usize) -> bool {
        debug_assert!(self.inner.guards[way] > 0, "it had a guard");
        self.inner.guards[way] -= 1;
        self.inner.guards[way] == 0
    }

    /// The content is another one than when the page came.
    pub fn written(&mut self, way: usize) {
        self.inner.next_stamp += 1;
        self.inner.stamps[way] = self.inner.next_stamp;
    }

    pub fn empty(&mut self, way: usize) {
        let tag = &self.set.tags[way];
        tag.change(|| tag.set_name(Name::NONE));
        self.set.prints.set(way, 0);
        self.inner.stamps[way] = 0;
        self.set_backing(way, None);
    }

    /// A way for a new page with this print: an empty one, else that of a clean page, and whether that is lost; none when all are
    /// dirty. The way is empty on return.
    pub fn room_for(&mut self, print: u16) -> Option<(usize, bool)> {
        let empty = self.set.prints.with(0) & !self.inner.aside;
        let (way, evicted) = match empty {
            0 => (self.evict()?, true),
            _ => (empty.trailing_zeros() as usize, false),
        };
        self.inner.policy.came(&self.set.uses, way, print);
        Some((way, evicted))
    }

    /// Sets the frame of a way aside for a page that is on its way. The way, its frame, and
    /// whether a page is lost by that. `None`: there is none, or enough are set aside.
    pub fn set_aside(&mut self, print: u16, sources: &impl Sources) -> Option<(usize, u32, bool)> {
        if self.inner.aside.count_ones() >= ASIDE_MAX {
            return None;
        }
        let (way, evicted) = self.room_for(print)?;
        self.have_frame(way, sources);
        if self.inner.guards[way] > 0 {
            let set = self.set;
            set.tags[way].change(|| self.leave_to_guards(way, sources));
        }
        self.inner.aside |= 1 << way;
        Some((way, self.set.number(way), evicted))
    }

    /// Ends that. With a page: the way holds it from now on, clean, and what the frame has is its content.
    pub fn end_aside(&mut self, way: usize, page: Option<(u16, Name)>) {
        debug_assert!(self.inner.aside >> way & 1 == 1, "invariant 4");
        self.inner.aside &= !(1 << way);
        if let Some((print, page)) = page {
            let tag = &self.set.tags[way];
            tag.change(|| tag.set_name(page));
            self.set.prints.set(way, print);
            self.inner.stamps[way] = 0;
            self.set_backing(way, None);
        }
    }

    fn evict(&mut self) -> Option<usize> {
        let (allowed, prints) = (
            !(self.inner.dirty | self.inner.aside),
            self.set.prints.all(),
        );
        let way = self.inner.policy.victim(&self.set.uses, allowed, &prints)?;
        self.lose(way);
        Some(way)
    }

    /// The page of a way, which is clean, leaves the cache.
    pub fn lose(&mut self, way: usize) {
        self.inner.departed += u64::from(self.inner.stamps[way] != 0);
        self.empty(way);
    }

    pub fn is_used_again(&self, way: usize) -> bool {
        self.set.uses.any(way)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::rng::Rng;

    /// As one by one, whatever stands beside it.
    #[test]
    fn prints_are_found_where_they_are() {
        let mut rng = Rng::new(5);
        let few = [0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0xFFFE];
        for _ in 0..20_000 {
            let prints = Prints::new();
            let truth: [u16; WAYS] = std::array::from_fn(|_| *rng.pick(&few));
            (0..WAYS).for_each(|way| prints.set(way, truth[way]));
            assert_eq!(prints.all(), truth);
            for print in few {
                let bits = truth.iter().enumerate();
                let expected = bits.fold(0, |all, (way, &p)| all | u16::from(p == print) << way);
                assert_eq!(prints.with(print), expected, "{truth:x?}");
            }
        }
    }

    #[test]
    fn ways_are_those_whose_bits_are_set() {
        assert_eq!(ways(0).count(), 0);
        assert!(ways(0b1000_0000_0000_0101).eq([0, 2, 15]));
        assert!(ways(u16::MAX).eq(0..WAYS));
    }
}
