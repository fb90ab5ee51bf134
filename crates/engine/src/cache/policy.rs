//! Which page of a set makes room for another one.
//!
//! The pages of a set are in two queues, each in the order in which its pages came. A new page is *on trial*; if it has been
//! used again by the time it is the oldest there, it is *kept*: it goes to the other queue, from which it leaves when it has
//! come to the front as often as it was used, and once more. So what is used once passes through few ways, however much of it
//! there is, and what is used often stays. Uses of the page that came last are not counted: a page that is read or written piece by piece,
//! or was read ahead of who asks for it, is used once. (Yang et al., FIFO Queues are All You Need for Cache Eviction, SOSP 2023.)
//!
//! How many ways are for pages on trial follows from what comes back: one more when a page returns that has lately left from
//! there, one fewer when one returns that was kept. So the set adapts to loads whose pages are used soon or not at all, for which
//! a small trial would be a small cache. (Megiddo, Modha: ARC, FAST 2003.)
//!
//! Measured against the clock that was here before, and others, in docs/performance.md.
//!
//! Uses are counted without a lock, so one that meets another, or a change of the set, may be lost. That changes what is found by
//! nothing that can be measured.
//!
//! Invariants:
//! 1. `order` has each way once.
//! 2. A use changes one byte, and none once there are [`USES_MAX`], nor of the page that came last: who only reads what is used
//!    often writes no line that others read.
//! 3. [`Policy::victim`] returns a way of those that are allowed, if any is: each step that does not end it takes a use away.

use super::WAYS;
use base::atomic::{AtomicU8, Ordering};

/// Uses that are remembered.
const USES_MAX: u8 = 3;
/// Ways for pages on trial, at first, at least and at most.
const TRIAL_FIRST: u8 = 2;
const TRIAL_LEAST: u8 = 1;
const TRIAL_MOST: u8 = WAYS as u8 - 2;

/// How often each page was used since it came, or came to the front of its queue.
#[derive(Debug)]
pub(super) struct Uses {
    of: [AtomicU8; WAYS],
    /// The way whose page came last.
    newest: AtomicU8,
}

impl Uses {
    pub fn new() -> Uses {
        Uses {
            of: std::array::from_fn(|_| AtomicU8::new(0)),
            newest: AtomicU8::new(0),
        }
    }

    /// The page of a way is used again. No lock is needed.
    #[inline]
    pub fn used(&self, way: usize) {
        let uses = self.get(way);
        if uses < USES_MAX && way != usize::from(self.newest.load(Ordering::Relaxed)) {
            self.set(way, uses + 1);
        }
    }

    /// Whether a page has been used again since it came.
    pub fn any(&self, way: usize) -> bool {
        self.get(way) > 0
    }

    fn get(&self, way: usize) -> u8 {
        self.of[way].load(Ordering::Relaxed)
    }

    fn set(&self, way: usize, uses: u8) {
        self.of[way].store(uses, Ordering::Relaxed);
    }
}

#[derive(Debug)]
pub(super) struct Policy {
    /// The ways, in the order in which their pages came, the oldest first.
    order: [u8; WAYS],
    /// Those whose pages are on trial, a bit each.
    trial: u16,
    /// Ways that are for pages on trial.
    share: u8,
    /// What has left each of the two queues.
    tried: Departed,
    kept: Departed,
}

/// Prints of the last pages that left a queue; 0: none.
#[derive(Debug, Default)]
struct Departed {
    prints: [u16; WAYS],
    next: u8,
}

impl Departed {
    fn push(&mut self, print: u16) {
        self.prints[self.next as usize] = print;
        self.next = (self.next + 1) % WAYS as u8;
    }

    /// Whether the page is among them; it is not any more then.
    fn take(&mut self, print: u16) -> bool {
        let found = self.prints.iter_mut().find(|p| **p == print);
        found.map(|p| *p = 0).is_some()
    }
}

impl Policy {
    pub fn new() -> Policy {
        Policy {
            order: std::array::from_fn(|way| way as u8),
            trial: 0,
            share: TRIAL_FIRST,
            tried: Departed::default(),
            kept: Departed::default(),
        }
    }

    /// A page with this print has come, to a way that was empty. It is on trial unless it was here lately.
    pub fn came(&mut self, uses: &Uses, way: usize, print: u16) {
        let on_trial = !self.returns(print);
        uses.set(way, 0);
        uses.newest.store(way as u8, Ordering::Relaxed);
        self.set_trial(way, on_trial);
        self.move_last(way);
    }

    /// Whether the page has left lately; from where moves the bound.
    fn returns(&mut self, print: u16) -> bool {
        if self.tried.take(print) {
            self.share = (self.share + 1).min(TRIAL_MOST);
            return true;
        }
        if self.kept.take(print) {
            self.share = (self.share - 1).max(TRIAL_LEAST);
            return true;
        }
        false
    }

    /// The way, of those in `allowed`, whose page leaves a set that is full; `prints` are those of all its pages.
    pub fn victim(&mut self, uses: &Uses, allowed: u16, prints: &[u16; WAYS]) -> Option<usize> {
        if allowed == 0 {
            return None;
        }
        // Readers without the set's lock add uses meanwhile, to a page as fast as they are taken away.
        let mut steps = 0..WAYS * (usize::from(USES_MAX) + 1);
        loop {
            let preferred = match self.trial.count_ones() >= u32::from(self.share) {
                true => self.trial,
                false => !self.trial,
            };
            let from = match preferred & allowed {
                0 => allowed,
                some => some,
            };
            let oldest = self.order.iter().find(|&&way| from >> way & 1 == 1);
            let way = usize::from(*oldest?);
            let on_trial = self.trial >> way & 1 == 1;
            let used = match steps.next() {
                Some(_) => uses.get(way),
                None => 0,
            };
            match (used, on_trial) {
                (0, true) => self.tried.push(prints[way]),
                (0, false) => self.kept.push(prints[way]),
                (some, _) => {
                    uses.set(way, if on_trial { 0 } else { some - 1 });
                    self.set_trial(way, false);
                    self.move_last(way);
                    continue;
                }
            }
            return Some(way);
        }
    }

    /// The ways of `some`, those whose pages would leave soonest first.
    pub fn coldest(&self, uses: &Uses, some: u16) -> impl Iterator<Item = usize> + use<> {
        let mut ways = self.order;
        ways.sort_by_key(|&way| uses.get(usize::from(way)));
        let ways = ways.into_iter().map(usize::from);
        ways.filter(move |&way| some >> way & 1 == 1)
    }

    fn set_trial(&mut self, way: usize, on_trial: bool) {
        self.trial = self.trial & !(1 << way) | u16::from(on_trial) << way;
    }

    fn move_last(&mut self, way: usize) {
        if let Some(at) = self.order.iter().position(|&w| usize::from(w) == way) {
            self.order[at..].rotate_left(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::rng::Rng;

    fn prints() -> [u16; WAYS] {
        std::array::from_fn(|way| way as u16 + 100)
    }

    /// A full set of pages on trial that came in the order of their ways.
    fn full() -> (Policy, Uses) {
        let (mut policy, uses) = (Policy::new(), Uses::new());
        (0..WAYS).for_each(|way| policy.came(&uses, way, 1000 + way as u16));
        (policy, uses)
    }

    #[test]
    fn the_oldest_leaves_unless_it_was_used_since_it_came() {
        let (mut policy, uses) = full();
        uses.used(0);
        uses.used(2);
        assert_eq!(policy.victim(&uses, !0, &prints()), Some(1));
        policy.came(&uses, 1, 1);
        assert_eq!(policy.victim(&uses, !0, &prints()), Some(3));
        assert_eq!(policy.trial >> 2 & 1, 0, "what was used is kept");
    }

    #[test]
    fn the_coldest_are_those_least_used_the_oldest_first() {
        let (_, uses) = full();
        let policy = full().0;
        uses.used(0);
        uses.used(2);
        uses.used(2);
        let ways: Vec<usize> = policy.coldest(&uses, 0b10111).collect();
        assert_eq!(ways, [1, 4, 0, 2]);
    }

    #[test]
    fn what_is_used_before_another_page_comes_is_used_once() {
        let (mut policy, uses) = full();
        uses.used(WAYS - 1);
        assert_eq!(uses.get(WAYS - 1), 0);
        assert_eq!(policy.victim(&uses, !0, &prints()), Some(0));
        policy.came(&uses, 0, 1);
        uses.used(WAYS - 1);
        assert_eq!(uses.get(WAYS - 1), 1);
    }

    #[test]
    fn what_is_kept_comes_to_the_front_once_for_each_use_before_it_leaves() {
        let (mut policy, uses) = full();
        (0..9).for_each(|_| uses.used(5));
        policy.trial = 0;
        let victims = std::iter::from_fn(|| {
            let way = policy.victim(&uses, !0, &prints())?;
            // As it has just left, it is kept.
            policy.came(&uses, way, prints()[way]);
            Some(way)
        });
        let others = victims.take_while(|&way| way != 5).count();
        assert_eq!(others, 5 + usize::from(USES_MAX) * (WAYS - 1));
    }

    #[test]
    fn what_comes_back_is_kept_and_moves_the_bound_between_the_queues() {
        let (mut policy, uses) = full();
        assert_eq!(policy.victim(&uses, !0, &prints()), Some(0));
        policy.came(&uses, 0, 100);
        assert_eq!(policy.trial & 1, 0, "it has just left");
        assert_eq!(policy.share, TRIAL_FIRST + 1);
        assert_eq!(policy.victim(&uses, 1, &prints()), Some(0));
        policy.came(&uses, 0, 100);
        assert_eq!((policy.trial & 1, policy.share), (0, TRIAL_FIRST));
        policy.came(&uses, 0, 100);
        assert_eq!(policy.trial & 1, 1, "it is remembered once");
    }

    /// Whatever was used, a way is found if one is allowed, and it is one of those (invariants 1 and 3).
    #[test]
    fn a_victim_is_among_the_allowed() {
        for seed in 0..50 {
            let mut rng = Rng::new(seed);
            let (mut policy, uses) = full();
            for _ in 0..500 {
                let way = rng.below(WAYS as u64) as usize;
                match rng.below(3) {
                    0 => uses.used(way),
                    1 => assert_eq!(policy.victim(&uses, 0, &prints()), None),
                    _ => {
                        let allowed = rng.next_u64() as u16 | 1 << way;
                        let victim = policy.victim(&uses, allowed, &prints()).unwrap();
                        assert_eq!(allowed >> victim & 1, 1);
                        policy.came(&uses, victim, prints()[way]);
                    }
                }
                let mut order = policy.order;
                order.sort_unstable();
                assert_eq!(order, std::array::from_fn(|way| way as u8));
                assert!((TRIAL_LEAST..=TRIAL_MOST).contains(&policy.share));
            }
        }
    }
}
