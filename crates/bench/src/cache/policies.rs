//! Caches that know only which pages they hold: Sheaf's own, and what it could be instead.
//!
//! [`Engine`] is the page cache as the file system uses it, frames and all. The others are models of one decision each, what
//! leaves, with as many pages. [`ExactLru`] is what a set-associative cache is compared with; those in sets have Sheaf's sets.

use std::collections::BTreeMap;

use base::map::HashMap;
use base::rng::Rng;
use engine::cache::{FileKey, PageCache, WAYS};
use format::{BLOCK_SIZE, Nid};

/// What a load asks.
pub(super) trait Cache {
    /// Whether the page is there. It is afterwards.
    fn get(&mut self, page: u64) -> bool;
}

/// Every cache that is compared, for so many pages.
pub(super) const NAMES: [&str; 6] = [SHEAF, LRU, "lru-in-sets", "clock", "s3-fifo", "lfu"];
pub(super) const SHEAF: &str = "sheaf";
pub(super) const LRU: &str = "exact-lru";

/// The cache of that name.
pub(super) fn make(name: &str, pages: u64) -> Box<dyn Cache> {
    let in_sets = |rule| Box::new(InSets::new(pages, rule));
    match name {
        SHEAF => Box::new(Engine::new(pages)),
        "lru-in-sets" => in_sets(Rule::Lru),
        "clock" => in_sets(Rule::Clock),
        "s3-fifo" => in_sets(Rule::TwoQueues),
        "lfu" => in_sets(Rule::Lfu),
        _ => Box::new(ExactLru::new(pages)),
    }
}

/// Sheaf's page cache. What it does not have is read and kept, as files do.
struct Engine {
    pages: PageCache,
    content: Box<[u8]>,
}

const FILE: FileKey = FileKey {
    nid: Nid(1),
    generation: 1,
};

impl Engine {
    fn new(pages: u64) -> Engine {
        Engine {
            pages: PageCache::new(pages as usize * BLOCK_SIZE),
            content: vec![0; BLOCK_SIZE].into_boxed_slice(),
        }
    }
}

impl Cache for Engine {
    fn get(&mut self, page: u64) -> bool {
        if self.pages.read(FILE, page, 0, &mut [0]) {
            return true;
        }
        if let Some(absence) = self.pages.absence(FILE, page) {
            self.pages.admit(FILE, page, absence, &self.content, true);
        }
        false
    }
}

/// The page whose last use is the oldest leaves, of all.
struct ExactLru {
    capacity: usize,
    now: u64,
    uses: HashMap<u64, u64>,
    by_use: BTreeMap<u64, u64>,
}

impl ExactLru {
    fn new(pages: u64) -> ExactLru {
        ExactLru {
            capacity: pages as usize,
            now: 0,
            uses: HashMap::default(),
            by_use: BTreeMap::new(),
        }
    }
}

impl Cache for ExactLru {
    fn get(&mut self, page: u64) -> bool {
        self.now += 1;
        self.by_use.insert(self.now, page);
        if let Some(last) = self.uses.insert(page, self.now) {
            self.by_use.remove(&last);
            return true;
        }
        if self.uses.len() > self.capacity
            && let Some((_, oldest)) = self.by_use.pop_first()
        {
            self.uses.remove(&oldest);
        }
        false
    }
}

/// What leaves a set.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// What was used longest ago.
    Lru,
    /// What a hand comes to that has no use left, of up to three; it takes one away in passing.
    Clock,
    /// S3-FIFO: two ways for what is new, and sixteen pages remembered that were used once.
    TwoQueues,
    /// What was used least, of up to fifteen uses, which are halved each 256 arrivals; sixteen are remembered.
    Lfu,
}

const USES_MAX: u8 = 3;
const NEW_MAX: usize = 2;
const LFU_USES_MAX: u8 = 15;
const LFU_HALVED_EACH: u64 = 256;

#[derive(Clone, Copy)]
struct Held {
    page: u64,
    uses: u8,
    /// When it came, or, for LRU and LFU, was used.
    at: u64,
    new: bool,
}

#[derive(Default)]
struct Set {
    held: Vec<Held>,
    hand: usize,
    arrivals: u64,
    /// Pages that left, the oldest first.
    gone: Vec<u64>,
}

struct InSets {
    rule: Rule,
    now: u64,
    sets: Vec<Set>,
}

impl InSets {
    fn new(pages: u64, rule: Rule) -> InSets {
        let sets = (pages as usize / WAYS).max(1);
        InSets {
            rule,
            now: 0,
            sets: (0..sets).map(|_| Set::default()).collect(),
        }
    }

    /// As in Sheaf's: pages of a run have a set each.
    fn set(&self, page: u64) -> usize {
        let sets = self.sets.len() as u64;
        let first = Rng::new(page / sets).below(sets);
        ((first + page % sets) % sets) as usize
    }
}

impl Set {
    /// The way, of those that `wanted` names, with the least of a value.
    fn least<T: Ord>(&self, wanted: impl Fn(&Held) -> bool, of: impl Fn(&Held) -> T) -> usize {
        let ways = (0..self.held.len()).filter(|&way| wanted(&self.held[way]));
        ways.min_by_key(|&way| of(&self.held[way])).unwrap_or(0)
    }

    fn remember(&mut self, way: usize) {
        self.gone.push(self.held[way].page);
        if self.gone.len() > WAYS {
            self.gone.remove(0);
        }
    }

    fn victim(&mut self, rule: Rule, now: &mut u64) -> usize {
        match rule {
            Rule::Lru => self.least(|_| true, |held| held.at),
            Rule::Clock => loop {
                let way = self.hand;
                self.hand = (way + 1) % WAYS;
                match &mut self.held[way].uses {
                    0 => return way,
                    uses => *uses -= 1,
                }
            },
            Rule::Lfu => {
                let way = self.least(|_| true, |held| (held.uses, held.at));
                self.remember(way);
                way
            }
            Rule::TwoQueues => loop {
                let new = self.held.iter().filter(|held| held.new).count();
                let from_new = new >= NEW_MAX;
                let way = self.least(|held| held.new == from_new, |held| held.at);
                let held = &mut self.held[way];
                if held.uses == 0 {
                    if from_new {
                        self.remember(way);
                    }
                    return way;
                }
                held.uses = if from_new { 0 } else { held.uses - 1 };
                held.new = false;
                *now += 1;
                held.at = *now;
            },
        }
    }
}

impl Cache for InSets {
    fn get(&mut self, page: u64) -> bool {
        self.now += 1;
        let place = self.set(page);
        let (rule, set) = (self.rule, &mut self.sets[place]);
        let uses_max = match rule {
            Rule::Lfu => LFU_USES_MAX,
            _ => USES_MAX,
        };
        if let Some(held) = set.held.iter_mut().find(|held| held.page == page) {
            held.uses = (held.uses + 1).min(uses_max);
            if matches!(rule, Rule::Lru | Rule::Lfu) {
                held.at = self.now;
            }
            return true;
        }
        set.arrivals += 1;
        if rule == Rule::Lfu && set.arrivals.is_multiple_of(LFU_HALVED_EACH) {
            set.held.iter_mut().for_each(|held| held.uses /= 2);
        }
        let remembered = set.gone.iter().position(|&gone| gone == page);
        if let Some(at) = remembered {
            set.gone.remove(at);
        }
        let uses = match (rule, remembered) {
            (Rule::Lfu, Some(_)) => LFU_USES_MAX / 2,
            _ => 0,
        };
        let full = set.held.len() == WAYS;
        let way = full.then(|| set.victim(rule, &mut self.now));
        let held = Held {
            page,
            uses,
            at: self.now,
            new: remembered.is_none(),
        };
        match way {
            Some(way) => set.held[way] = held,
            None => set.held.push(held),
        }
        false
    }
}
