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
//! 5. Between sections chains are sifted, so that the memory of batches can be used again: of a chain that is young, made since
//!    its node was created or deleted and never carried on, the entries are copied and it goes on from there, as most such nodes
//!    are deleted soon; any other is applied to its node, and begins anew. So no entry is copied twice.

use crate::node::NidMap;
use crate::ring_reader::Records;
use base::canary::{Canary, planted};
use base::prefetch;
use device::AlignedBuf;
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

/// Records that chains refer to, by number: those that were carried on, of one of the [`Chains`] each, and batches in their order.
#[derive(Default)]
pub(crate) struct Logs {
    pub carried: Vec<Records>,
    /// Batches, the first of which has this number.
    pub first: usize,
    pub batches: Vec<Records>,
}

impl Logs {
    /// For so many [`Chains`].
    pub fn new(parts: usize) -> Logs {
        Logs {
            carried: (0..parts).map(|_| Records::default()).collect(),
            first: parts,
            batches: Vec::new(),
        }
    }

    /// The number that the next batch gets.
    pub fn next(&self) -> usize {
        self.first + self.batches.len()
    }

    #[inline]
    fn at(&self, at: At) -> &[u8] {
        let records = match self.carried.get(at.batch()) {
            Some(records) => records,
            None => &self.batches[at.batch() - self.first],
        };
        &records[at.offset()..]
    }

    fn ask_for(&self, at: At) {
        let bytes = self.at(at);
        match bytes.first_chunk::<ENTRY_USUAL>() {
            Some(start) => prefetch::object(start),
            None => prefetch::object(&bytes[0]),
        }
    }

    fn entry(&self, at: At) -> Entry<'_> {
        self.entry_and_len(at).0
    }

    fn entry_and_len(&self, at: At) -> (Entry<'_>, usize) {
        let bytes = self.at(at);
        let (entry, rest) = parse_entry(bytes).expect("a section's reader found it whole");
        (entry, bytes.len() - rest.len())
    }
}

/// Memory for entries that are carried on.
pub(crate) struct Arena {
    pub bytes: AlignedBuf,
    pub used: usize,
}

impl Arena {
    fn has_room(&self, len: usize) -> bool {
        self.bytes.len() - self.used >= len
    }

    fn put(&mut self, bytes: &[u8]) -> usize {
        let start = self.used;
        self.used += bytes.len();
        self.bytes[start..self.used].copy_from_slice(bytes);
        start
    }
}

/// Where an entry lies: the batch's number, where in the batch, and what it does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct At(u64);

const OFFSET_BITS: u32 = 32;
const ACTION_BITS: u32 = 3;
/// Batches that can be told apart: those of any ring.
pub(crate) const BATCHES_MAX: usize = 1 << (u64::BITS - OFFSET_BITS - ACTION_BITS);

impl At {
    fn batch(self) -> usize {
        (self.0 >> (OFFSET_BITS + ACTION_BITS)) as usize
    }

    fn offset(self) -> usize {
        (self.0 >> ACTION_BITS) as u32 as usize
    }

    fn new(batch: usize, offset: usize, action: u8) -> At {
        debug_assert!(batch < BATCHES_MAX && offset as u64 >> OFFSET_BITS == 0);
        let place = (batch as u64) << OFFSET_BITS | offset as u64;
        At(place << ACTION_BITS | u64::from(action))
    }

    fn action(self) -> u8 {
        self.0 as u8 & ((1 << ACTION_BITS) - 1)
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
        Logged {
            nid: entry.nid,
            version: entry.version,
            at: At::new(batch, offset, entry.action as u8),
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
/// So many places ahead of the one whose chains are looked at.
const BLOCKS_AHEAD: usize = 2;
/// Bytes of an entry that are asked for: most have no more.
const ENTRY_USUAL: usize = 96;

/// The number of the one of so many [`Chains`] that has a node; a power of two.
pub(crate) fn part_of(nid: u64, parts: usize) -> usize {
    let hash = (nid / NEIGHBOURS as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    hash as usize & (parts - 1)
}

const NONE: u32 = u32::MAX;

const LINK_BYTES: usize = size_of::<At>() + size_of::<u32>();

/// What a node's chain is, besides its links.
#[derive(Clone, Copy, Debug)]
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
/// What is there was carried on.
const CARRIED: u32 = 128;
/// There are merges in it.
const MERGES: u32 = 256;

impl Chain {
    const EMPTY: Chain = Chain {
        first: Order(0),
        version: 0,
        cut: 0,
        cutting: 0,
        head: NONE,
        tail: NONE,
        cut_link: NONE,
        flags: 0,
        section: 0,
        before_link: NONE,
        before_version: 0,
        before_flags: 0,
    };

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
        if at.is(Action::Merge) {
            self.flags |= MERGES;
        }
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
    /// Memory of links that were carried on.
    spare: (Vec<At>, Vec<u32>),
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
    pub fn entries<'a>(&self, logs: &'a Logs) -> impl Iterator<Item = Entry<'a>> {
        let place = |link: u32| self.chains.at[link as usize];
        let mut later = self.chains.links(self.chain.head).skip(AHEAD);
        let links = self.chains.links(self.chain.head);
        links.map(move |link| {
            if let Some(later) = later.next() {
                prefetch::object(&logs.at(place(later))[0]);
            }
            logs.entry(place(link))
        })
    }
}

impl Chains {
    pub fn new() -> Chains {
        Chains {
            chains: Vec::new(),
            places: NidMap::default(),
            recent: [(NOWHERE, 0); RECENT],
            at: Vec::new(),
            next: Vec::new(),
            spare: Default::default(),
            cutting: Vec::new(),
            unordered: Vec::new(),
            section: 1,
            damages: BTreeMap::new(),
            #[cfg(test)]
            sorted: 0,
        }
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
            self.chains.push([Chain::EMPTY; NEIGHBOURS]);
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
    pub fn end_section(&mut self, logs: &Logs) {
        for nid in std::mem::take(&mut self.unordered) {
            if let Err(what) = self.sort(nid, logs) {
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
    fn sort(&mut self, nid: u64, logs: &Logs) -> Result<(), Damage> {
        let mut chain = *self.chain(nid);
        let added = match chain.before_link {
            NONE => chain.head,
            before => self.next[before as usize],
        };
        let links: Vec<u32> = self.links(added).collect();
        let of_link = |link: &u32| {
            let at = self.at[*link as usize];
            let entry = logs.entry(at);
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
        chain.set(CUTTING | CARRIED | MERGES, false);
        chain.set(CUT, true);
        if chain.tail == last {
            chain.tail = NONE;
        }
        self.chain(nid).head = self.next[last as usize];
    }

    /// Calls `apply` with the nodes that were changed, in the order of their numbers, and forgets them; but young chains
    /// are carried on, into the arena that has that number from then on (invariant 5).
    pub fn sift<E>(
        &mut self,
        logs: &Logs,
        mut arena: Option<(usize, &mut Arena)>,
        mut apply: impl FnMut(&Changed<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut at, mut next) = std::mem::take(&mut self.spare);
        let mut places: Vec<(u64, u32)> = self.places.iter().map(|(at, i)| (*at, *i)).collect();
        places.sort_unstable();
        for (k, (place, index)) in places.iter().enumerate() {
            self.ask_ahead(logs, &places[k..]);
            for i in 0..NEIGHBOURS {
                let chain = &self.chains[*index as usize][i];
                // Of a node that is gone nothing is in the way.
                let stays = arena.is_some() && chain.has(CUT) && chain.head == NONE;
                if !chain.has(SEEN) || stays {
                    continue;
                }
                let carried = match &mut arena {
                    Some((into, arena)) if Self::is_young(chain) => {
                        self.carry(chain, logs, (*into, arena), (&mut at, &mut next))
                    }
                    _ => None,
                };
                if carried.is_none() && !chain.has(DAMAGED) {
                    apply(&Changed {
                        nid: Nid(place * NEIGHBOURS as u64 + i as u64),
                        chain,
                        chains: self,
                    })?;
                }
                self.chains[*index as usize][i] = carried.unwrap_or(Chain::EMPTY);
            }
        }
        std::mem::swap(&mut self.at, &mut at);
        std::mem::swap(&mut self.next, &mut next);
        at.clear();
        next.clear();
        self.spare = (at, next);
        self.damages.clear();
        if arena.is_none() {
            self.chains.clear();
            self.places.clear();
            self.recent = [(NOWHERE, 0); RECENT];
        }
        Ok(())
    }

    /// Asks for what will be looked at soon: chains lie anywhere, and so do their first links, and so do entries.
    #[inline]
    fn ask_ahead(&self, logs: &Logs, places: &[(u64, u32)]) {
        if let Some((_, index)) = places.get(3 * BLOCKS_AHEAD) {
            prefetch::object(&self.chains[*index as usize]);
        }
        if let Some((_, index)) = places.get(2 * BLOCKS_AHEAD) {
            for chain in &self.chains[*index as usize] {
                if let Some(at) = self.at.get(chain.head as usize) {
                    prefetch::object(at);
                }
            }
        }
        if let Some((_, index)) = places.get(BLOCKS_AHEAD) {
            for chain in &self.chains[*index as usize] {
                if let Some(at) = self.at.get(chain.head as usize) {
                    logs.ask_for(*at);
                }
            }
        }
    }

    /// A directory that gets merges lives long, and their sum is shorter than they are.
    fn is_young(chain: &Chain) -> bool {
        let made = chain.has(CUT) || !chain.has(CHANGES_FIRST);
        made && !chain.has(CARRIED | DAMAGED | MERGES)
    }

    /// Copies a chain; `None`: there is no room for it.
    fn carry(
        &self,
        chain: &Chain,
        logs: &Logs,
        (into, arena): (usize, &mut Arena),
        (at, next): (&mut Vec<At>, &mut Vec<u32>),
    ) -> Option<Chain> {
        let (links, used) = (at.len(), arena.used);
        for link in self.links(chain.head) {
            let from = self.at[link as usize];
            let len = logs.entry_and_len(from).1;
            if !arena.has_room(len) {
                arena.used = used;
                at.truncate(links);
                next.truncate(links);
                return None;
            }
            let offset = arena.put(&logs.at(from)[..len]);
            at.push(At::new(into, offset, from.action()));
            next.push(at.len() as u32);
        }
        *next.last_mut()? = NONE;
        Some(Chain {
            head: links as u32,
            tail: at.len() as u32 - 1,
            flags: chain.flags | CARRIED,
            ..*chain
        })
    }

    /// Bytes that links and what is known of nodes take.
    pub fn bytes(&self) -> usize {
        self.at.len() * LINK_BYTES + self.node_bytes()
    }

    /// Bytes that what is known of nodes takes.
    pub fn node_bytes(&self) -> usize {
        self.chains.len() * size_of::<[Chain; NEIGHBOURS]>()
    }

    /// Nodes whose chain is damaged (invariant 2).
    pub fn damages(&self) -> &BTreeMap<u64, Damage> {
        &self.damages
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
