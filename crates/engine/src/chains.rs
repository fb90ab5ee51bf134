//! Chains: what a run of the journal says of each node, as far as it matters.
//!
//! The journal has some fifty million changes in a gibibyte, and most nodes that it makes it also deletes. So a change is not
//! copied, and is decoded only if its node has a use for it: it becomes a link of twelve bytes that says where its entry
//! lies. A chain of links grows in the order of the log, and is cut where its node is deleted.
//!
//! Changes come in sections, which are whole batches. Nodes are divided among several [`Chains`], by number, so that
//! several threads work at once and none waits for another: a section is first read by several threads, each of which
//! leaves a list for every [`Chains`] of what concerns its nodes, and then each [`Chains`] takes its lists in their order.
//!
//! Invariants:
//! 1. A section has all changes of some consecutive epochs, and what follows on a node never has a smaller one. So at the
//!    end of a section a chain has all changes of its node up to its newest version, but for merges into that one.
//! 2. At the end of a section the links of a chain are in the order of [`Order`]: versions grow by one, merges into a version
//!    follow what made it; and each change finds what it needs, a node that exists or, to create one, none. A chain
//!    of which that cannot be said is damaged, whatever is in it: nothing that comes later makes it good. That much is checked of
//!    all changes, those that were cut off too.
//! 3. Within a section changes may come in another order, as cores log apart. Of a chain that sees one out of order, the links
//!    that the section has added are sorted at its end, and go on from what the chain was at its beginning: a large directory
//!    that several cores share is so in every section.
//! 4. A chain is cut at the end of a section only (by invariant 1 nothing older comes then), behind the newest deletion. What is
//!    cut off has no meaning any more but that the node is gone with the version of `cut`.
//!    Its bytes are never decoded: nonsense in them that has a right checksum stays unnoticed, and harms nobody.

use crate::batches::Records;
use crate::node::NidMap;
use base::canary::{Canary, planted};
use base::prefetch;
use format::journal::{Action, Entry, parse_entry};
use format::{Damage, Nid};
use std::collections::BTreeMap;

/// A change's place among those of its node: the version and, in the lowest bit, whether it is a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct Order(u64);

const _: () = assert!(format::COUNTER_MAX <= u64::MAX >> 1);

impl Order {
    pub fn new(version: u64, action: Action) -> Order {
        Order(version << 1 | u64::from(action == Action::Merge))
    }

    pub fn version(self) -> u64 {
        self.0 >> 1
    }

    pub fn is_merge(self) -> bool {
        self.0 & 1 == 1
    }

    /// Whether a run that begins with this has all changes that an image of this version does not have.
    pub fn follows(self, version: u64) -> bool {
        self.version() <= version + u64::from(!self.is_merge())
    }

    /// Whether it is the first change of an image of this version.
    pub fn is_next(self, version: u64) -> bool {
        self.version() == version + u64::from(!self.is_merge())
    }
}

/// Where an entry lies: the batch's number, where in the batch, and what it does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct At(u64);

const OFFSET_BITS: u32 = 32;
const ACTION_BITS: u32 = 8;
/// Batches that can be told apart.
pub(crate) const BATCHES_MAX: usize = 1 << (u64::BITS - OFFSET_BITS - ACTION_BITS);

impl At {
    fn batch(self) -> usize {
        (self.0 >> (OFFSET_BITS + ACTION_BITS)) as usize
    }

    fn offset(self) -> usize {
        (self.0 >> ACTION_BITS) as u32 as usize
    }

    fn action(self) -> u8 {
        self.0 as u8
    }

    fn is(self, action: Action) -> bool {
        self.action() == action as u8
    }
}

/// A change, as a section's reader leaves it for who has the node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Logged {
    nid: u64,
    version: u64,
    at: At,
}

impl Logged {
    pub fn new(batch: usize, offset: usize, entry: &Entry<'_>) -> Logged {
        debug_assert!(batch < BATCHES_MAX && offset as u64 >> OFFSET_BITS == 0);
        let place = (batch as u64) << OFFSET_BITS | offset as u64;
        Logged {
            nid: entry.nid,
            version: entry.version,
            at: At(place << ACTION_BITS | entry.action as u64),
        }
    }
}

/// Nodes whose chains lie together: most have neighbours, which come at the same time.
const NEIGHBOURS: usize = 16;

/// Places that are found without a search.
const RECENT: usize = 32;
/// No place: nids divided by their neighbours are less.
const NOWHERE: u64 = u64::MAX;
/// So many links ahead of the one that is followed its entry is asked for.
const AHEAD: usize = 8;

/// The number of the one of so many [`Chains`] that has a node; a power of two.
pub(crate) fn part_of(nid: u64, parts: usize) -> usize {
    let hash = (nid / NEIGHBOURS as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    hash as usize & (parts - 1)
}

const NONE: u32 = u32::MAX;

/// What a node's chain is, besides its links.
#[derive(Clone, Copy, Debug, Default)]
struct Chain {
    /// Its first change of all, whatever was cut off.
    first: Order,
    /// The node's version after the last change.
    version: u64,
    /// The version of the newest deletion that was cut off, and of the newest in this section.
    cut: u64,
    cutting: u64,
    /// The first link and the last.
    head: u32,
    tail: u32,
    /// The link of the newest deletion that is not cut off yet.
    cut_link: u32,
    flags: u32,
    /// The last section that added a link; and of the time before it the last link, the node's version, and whether
    /// there was a change and a node.
    section: u32,
    before_link: u32,
    before_version: u64,
    before_flags: u32,
}

/// There has been a change.
const SEEN: u32 = 1;
/// The node exists after the last one.
const EXISTS: u32 = 2;
/// A deletion is to be cut off.
const CUTTING: u32 = 4;
/// Something was cut off.
const CUT: u32 = 8;
/// Something came out of order in this section.
const UNORDERED: u32 = 16;
/// The first of all changes does not create the node.
const CHANGES_FIRST: u32 = 32;
/// Invariant 2 is broken.
const DAMAGED: u32 = 64;

impl Chain {
    fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    fn set(&mut self, flag: u32, on: bool) {
        self.flags = self.flags & !flag | if on { flag } else { 0 };
    }

    /// A section adds its first link.
    fn begin(&mut self, section: u32) {
        self.section = section;
        self.before_link = self.tail;
        (self.before_version, self.before_flags) = (self.version, self.flags & (SEEN | EXISTS));
    }

    /// Takes a change if it follows on what is there (invariant 2).
    fn follow(&mut self, version: u64, at: At) -> bool {
        if !self.has(SEEN) {
            self.first = Order(version << 1 | u64::from(at.is(Action::Merge)));
            self.set(SEEN | EXISTS, true);
            self.set(CHANGES_FIRST, !at.is(Action::Create));
        } else {
            let next = self.version + u64::from(!at.is(Action::Merge));
            let follows = version == next && self.has(EXISTS) != at.is(Action::Create);
            let gap = version > self.version && planted(Canary::VersionGapAccepted);
            if !follows && !gap {
                return false;
            }
        }
        self.version = version;
        self.set(EXISTS, !at.is(Action::Delete));
        true
    }
}

/// What the journal says of some nodes.
#[derive(Debug)]
pub(crate) struct Chains {
    /// Chains of neighbours, and which nids they are of.
    chains: Vec<[Chain; NEIGHBOURS]>,
    places: NidMap<u32>,
    /// Those met last: a place and its index, by the place's lowest bits.
    recent: [(u64, u32); RECENT],
    /// Links: where an entry lies, and which link follows. None is used again: those that are free by then lie far apart,
    /// and finding them takes longer than what they save.
    at: Vec<At>,
    next: Vec<u32>,
    /// Chains to be cut, and to be sorted, at the section's end.
    cutting: Vec<u64>,
    unordered: Vec<u64>,
    /// The number of the section, from 1 on.
    section: u32,
    damages: BTreeMap<u64, Damage>,
    #[cfg(test)]
    pub sorted: usize,
}

/// A node that the journal has changed.
pub(crate) struct Changed<'c> {
    pub nid: Nid,
    chain: &'c Chain,
    chains: &'c Chains,
}

impl Changed<'_> {
    /// The version with which the node was gone, if it was; the changes are those after that.
    pub fn cut(&self) -> Option<u64> {
        self.chain.has(CUT).then_some(self.chain.cut)
    }

    /// Of all changes, those that were cut off too.
    pub fn first(&self) -> Order {
        self.chain.first
    }

    /// Whether the first of them all finds a node.
    pub fn finds_node(&self) -> bool {
        self.chain.has(CHANGES_FIRST)
    }

    /// The entries of the changes, in their order (invariant 2).
    pub fn entries<'a>(&self, batches: &'a [Records]) -> impl Iterator<Item = Entry<'a>> {
        let place = |link: u32| self.chains.at[link as usize];
        let mut later = self.chains.links(self.chain.head).skip(AHEAD);
        let links = self.chains.links(self.chain.head);
        links.map(move |link| {
            if let Some(later) = later.next() {
                let at = place(later);
                prefetch::object(&batches[at.batch()][at.offset()]);
            }
            entry_at(batches, place(link))
        })
    }
}

fn entry_at(batches: &[Records], at: At) -> Entry<'_> {
    let parsed = parse_entry(&batches[at.batch()][at.offset()..]);
    parsed.expect("a section's reader found it whole").0
}

impl Chains {
    pub fn new() -> Chains {
        Chains {
            chains: Vec::new(),
            places: NidMap::default(),
            recent: [(NOWHERE, 0); RECENT],
            at: Vec::new(),
            next: Vec::new(),
            cutting: Vec::new(),
            unordered: Vec::new(),
            section: 1,
            damages: BTreeMap::new(),
            #[cfg(test)]
            sorted: 0,
        }
    }

    /// Forgets everything but its memory.
    pub fn clear(&mut self) {
        self.chains.clear();
        self.places.clear();
        self.recent = [(NOWHERE, 0); RECENT];
        self.at.clear();
        self.next.clear();
        self.damages.clear();
    }

    #[inline]
    fn chain(&mut self, nid: u64) -> &mut Chain {
        let place = nid / NEIGHBOURS as u64;
        let (recent, index) = self.recent[place as usize % RECENT];
        let index = match recent == place {
            true => index,
            false => self.find(place),
        };
        &mut self.chains[index as usize][nid as usize % NEIGHBOURS]
    }

    #[inline(never)]
    fn find(&mut self, place: u64) -> u32 {
        let fresh = self.chains.len() as u32;
        let index = *self.places.entry(place).or_insert(fresh);
        if index == fresh {
            let empty = Chain {
                head: NONE,
                tail: NONE,
                cut_link: NONE,
                ..Chain::default()
            };
            self.chains.push([empty; NEIGHBOURS]);
        }
        self.recent[place as usize % RECENT] = (place, index);
        index
    }

    fn links(&self, head: u32) -> impl Iterator<Item = u32> {
        let follow = |link: &u32| Some(self.next[*link as usize]).filter(|next| *next != NONE);
        std::iter::successors((head != NONE).then_some(head), follow)
    }

    /// Takes a change, the next one in the log of the nodes that are these chains'.
    #[inline]
    pub fn push(&mut self, one: &Logged) {
        let link = self.at.len() as u32;
        self.at.push(one.at);
        self.next.push(NONE);
        let section = self.section;
        let chain = self.chain(one.nid);
        if chain.section != section {
            chain.begin(section);
        }
        let before = std::mem::replace(&mut chain.tail, link);
        if before == NONE {
            chain.head = link;
        }
        let (mut cutting, mut unordered) = (false, false);
        if !chain.has(UNORDERED) {
            if !chain.follow(one.version, one.at) {
                chain.set(UNORDERED, true);
                unordered = true;
            } else if one.at.is(Action::Delete) {
                cutting = !chain.has(CUTTING);
                chain.set(CUTTING, true);
                (chain.cutting, chain.cut_link) = (one.version, link);
            }
        }
        if before != NONE {
            self.next[before as usize] = link;
        }
        if cutting {
            self.cutting.push(one.nid);
        }
        if unordered {
            self.unordered.push(one.nid);
        }
    }

    /// All of a section came: sorts what came out of order, and cuts off what has no meaning any more.
    pub fn end_section(&mut self, batches: &[Records]) {
        for nid in std::mem::take(&mut self.unordered) {
            if let Err(what) = self.sort(nid, batches) {
                self.chain(nid).set(DAMAGED, true);
                self.damages.entry(nid).or_insert(what);
            }
        }
        for nid in std::mem::take(&mut self.cutting) {
            self.cut(nid);
        }
        self.section += 1;
    }

    /// Sorts what a section has added to a chain by [`Order`], and checks it (invariants 2 and 3).
    fn sort(&mut self, nid: u64, batches: &[Records]) -> Result<(), Damage> {
        let mut chain = *self.chain(nid);
        let added = match chain.before_link {
            NONE => chain.head,
            before => self.next[before as usize],
        };
        let links: Vec<u32> = self.links(added).collect();
        let of_link = |link: &u32| {
            let at = self.at[*link as usize];
            let entry = entry_at(batches, at);
            (Order::new(entry.version, entry.action), at)
        };
        let mut sorted: Vec<(Order, At)> = links.iter().map(of_link).collect();
        sorted.sort_by_key(|(order, _)| *order);
        #[cfg(test)]
        {
            self.sorted += sorted.len();
        }
        chain.version = chain.before_version;
        chain.flags = chain.flags & !(UNORDERED | SEEN | EXISTS) | chain.before_flags;
        let was_cutting = chain.has(CUTTING);
        let mut follows = Ok(());
        for (link, (order, at)) in links.into_iter().zip(sorted) {
            self.at[link as usize] = at;
            let (before, version) = (chain.version, order.version());
            if follows.is_err() {
                continue;
            }
            if !chain.follow(version, at) {
                follows = Err(break_of(nid, before, version, at));
            } else if at.is(Action::Delete) {
                chain.set(CUTTING, true);
                (chain.cutting, chain.cut_link) = (version, link);
            }
        }
        *self.chain(nid) = chain;
        if chain.has(CUTTING) && !was_cutting {
            self.cutting.push(nid);
        }
        follows
    }

    /// Cuts a chain behind its newest deletion.
    fn cut(&mut self, nid: u64) {
        let chain = self.chain(nid);
        if chain.has(DAMAGED) {
            return;
        }
        let last = chain.cut_link;
        (chain.cut, chain.cut_link) = (chain.cutting, NONE);
        chain.set(CUTTING, false);
        chain.set(CUT, true);
        if chain.tail == last {
            chain.tail = NONE;
        }
        self.chain(nid).head = self.next[last as usize];
    }

    /// Bytes that links and what is known of nodes take.
    pub fn bytes(&self) -> usize {
        let links = self.at.len() * (size_of::<At>() + size_of::<u32>());
        links + self.chains.len() * size_of::<[Chain; NEIGHBOURS]>()
    }

    /// Nodes whose chain is damaged (invariant 2).
    pub fn damages(&self) -> &BTreeMap<u64, Damage> {
        &self.damages
    }

    /// The other nodes that were changed, in the order of their numbers.
    pub fn changed(&self) -> impl Iterator<Item = Changed<'_>> {
        let mut places: Vec<(u64, u32)> = self.places.iter().map(|(at, i)| (*at, *i)).collect();
        places.sort_unstable();
        let chains = places.into_iter().flat_map(|(place, i)| {
            let first = place * NEIGHBOURS as u64;
            let chains = (0..).zip(&self.chains[i as usize]);
            chains.map(move |(i, chain): (u64, _)| (first + i, chain))
        });
        let changed = chains.filter(|(_, chain)| chain.has(SEEN) && !chain.has(DAMAGED));
        changed.map(|(nid, chain)| Changed {
            nid: Nid(nid),
            chain,
            chains: self,
        })
    }
}

fn break_of(nid: u64, version: u64, to: u64, at: At) -> Damage {
    let merge = at.is(Action::Merge);
    let what = match to == version + u64::from(!merge) {
        true if at.is(Action::Create) => format!("node {nid} is created and exists"),
        true => format!("node {nid} is changed and does not exist"),
        false if merge => format!("node {nid} merges at version {to}, but is at {version}"),
        false => format!("node {nid} goes from version {version} to {to}"),
    };
    Damage::new("journal", what)
}
