//! Sections of replay: batches that are verified and read together, by several readers.
//!
//! 1. Readers share a section's batches without a gap and in their order: the first of a reader follows the last of the one before.
//! 2. Of what follows a batch that is not whole a reader has read nothing, and of what follows one that says nothing sensible no
//!    entries; other readers may have, so how far the section counts is known when all are done.

use crate::ahead::Found;
use crate::chains::{Logged, part_of};
use base::tight;
use format::journal::{Action, DataSum, each_entry};
use format::{Damage, Nid};
use std::ops::Range;

/// Bytes of batches for one of a section's readers, at least.
fn reader_bytes() -> usize {
    tight::limit(64 << 10, 256)
}

/// Some batches of a section, and their entries in lists for each of the chains.
#[derive(Default)]
pub(super) struct Reader {
    pub(super) lists: Vec<Vec<Logged>>,
    pub(super) records: u64,
    pub(super) deltas: u64,
    /// The first batch that is not whole, by number; nothing of those behind it was read.
    torn: Option<usize>,
    /// The first whose records say nothing sensible: those behind it were not read, either.
    pub(super) damage: Option<(usize, Damage)>,
    /// Of data for which batches vouch.
    sums: Vec<(usize, Nid, Result<DataSum, Damage>)>,
    pub(super) verify_ns: u64,
}

impl Reader {
    pub(super) fn new(parts: usize) -> Reader {
        Reader {
            lists: vec![Vec::new(); parts],
            ..Reader::default()
        }
    }

    fn clear(&mut self) {
        let mut lists = std::mem::take(&mut self.lists);
        lists.iter_mut().for_each(Vec::clear);
        *self = Reader {
            lists,
            ..Reader::default()
        };
    }

    /// Reads batches, the first of which has the number `first`. `is_whole` looks at a batch that was not verified.
    pub(super) fn read(
        &mut self,
        found: &[Found],
        first: usize,
        is_whole: &impl Fn(&Found) -> bool,
        now: &impl Fn() -> u64,
    ) {
        for (number, found) in (first..).zip(found) {
            let began = now();
            let whole = is_whole(found);
            self.verify_ns += now().saturating_sub(began);
            if !whole {
                self.torn = Some(number);
                return;
            }
            if self.damage.is_none() {
                self.parse(number, found);
            }
        }
    }

    fn parse(&mut self, number: usize, found: &Found) {
        let parts = self.lists.len();
        let vouches = found.batch.header.checked.get() > 0;
        let parsed = each_entry(&found.batch.records, |at, entry| {
            if entry.action == Action::Sum {
                if vouches {
                    let sum = DataSum::decode(entry.body);
                    self.sums.push((number, Nid(entry.nid), sum));
                }
                return;
            }
            self.deltas += 1;
            self.lists[part_of(entry.nid, parts)].push(Logged::new(number, at, &entry));
        });
        match parsed {
            Ok(records) => self.records += u64::from(records),
            Err(damage) => self.damage = Some((number, damage)),
        }
    }

    /// The checksums of data in a batch's records, and the nodes that it belongs to.
    fn sums_of(&self, number: usize) -> Result<Vec<(Nid, DataSum)>, Damage> {
        match &self.damage {
            Some((at, damage)) if *at == number => Err(damage.clone()),
            _ => {
                let sums = self.sums.iter().filter(|(at, ..)| *at == number);
                sums.map(|(_, nid, sum)| Ok((*nid, sum.clone()?))).collect()
            }
        }
    }
}

/// Batches that are read together.
pub(super) struct Section {
    /// The number of the first.
    pub(super) first: usize,
    pub(super) found: Vec<Found>,
    pub(super) verified: bool,
    /// What each reader reads.
    shares: Vec<Range<usize>>,
    pub(super) readers: Vec<Reader>,
}

impl Section {
    /// Divides batches, the first of which has this number, among readers.
    pub(super) fn new(
        first: usize,
        found: Vec<Found>,
        verified: bool,
        readers: Vec<Reader>,
    ) -> Section {
        let mut section = Section {
            first,
            found,
            verified,
            shares: Vec::new(),
            readers,
        };
        section.divide();
        section
    }

    fn divide(&mut self) {
        let found = self.found.iter();
        let lens: Vec<usize> = found.map(|found| found.batch.records.len()).collect();
        let wanted = lens.iter().sum::<usize>() / reader_bytes();
        self.shares = shares(&lens, wanted.clamp(1, self.readers.len()));
        self.readers.iter_mut().for_each(Reader::clear);
    }

    /// Only its first batches, which were verified, count. They are to be read again.
    pub(super) fn keep(&mut self, count: usize) {
        self.found.truncate(count);
        self.verified = true;
        self.divide();
    }

    /// What each reader reads, and the number of the first batch of that.
    pub(super) fn parts(&mut self) -> impl Iterator<Item = (&mut Reader, usize, &[Found])> {
        let (first, found) = (self.first, &self.found);
        let readers = self.readers.iter_mut().zip(&self.shares);
        readers.map(move |(reader, share)| (reader, first + share.start, &found[share.clone()]))
    }

    pub(super) fn reading(&self) -> impl Iterator<Item = &Reader> {
        self.readers.iter().take(self.shares.len())
    }

    /// How many batches are whole, from the first on.
    pub(super) fn whole(&self) -> usize {
        let torn = self.reading().filter_map(|reader| reader.torn).min();
        torn.map_or(self.found.len(), |number| number - self.first)
    }

    pub(super) fn sums_of(&self, i: usize) -> Result<Vec<(Nid, DataSum)>, Damage> {
        let reader = self.shares.iter().position(|share| share.contains(&i));
        reader.map_or(Ok(Vec::new()), |r| self.readers[r].sums_of(self.first + i))
    }
}

/// Divides batches of these lengths into so many runs at most, of about the same bytes. The last takes what is left: batches that are
/// empty, too.
fn shares(lens: &[usize], most: usize) -> Vec<Range<usize>> {
    let share = lens.iter().sum::<usize>().div_ceil(most).max(1);
    let (mut shares, mut from, mut bytes) = (Vec::with_capacity(most), 0, 0);
    for (at, len) in lens.iter().enumerate() {
        bytes += len;
        if bytes >= share && shares.len() + 1 < most {
            shares.push(from..at + 1);
            (from, bytes) = (at + 1, 0);
        }
    }
    if from < lens.len() {
        shares.push(from..lens.len());
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::shares;

    /// Equal batches, as many as readers or a multiple, and empty ones behind them: no more readers are wanted than there are.
    #[test]
    fn what_is_left_of_a_section_is_the_last_readers() {
        let full = |count: usize| vec![1000; count];
        for most in 1..9 {
            for count in 0..40 {
                for empty in 0..3 {
                    let lens = [full(count), vec![0; empty]].concat();
                    let shares = shares(&lens, most);
                    assert!(shares.len() <= most, "{count} and {empty} for {most}");
                    let all: Vec<usize> = shares.into_iter().flatten().collect();
                    assert!(all.into_iter().eq(0..lens.len()));
                }
            }
        }
        assert_eq!(shares(&full(8), 4), [0..2, 2..4, 4..6, 6..8]);
    }
}
