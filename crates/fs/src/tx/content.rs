//! What a transaction makes of one file's content: pages over what the file holds.
//!
//! Invariants:
//! 1. Of what the file holds nothing from `cut` on counts: the transaction has cut it there. It is no more than any size that the
//!    transaction has set.
//! 2. A page that was written in part says which of its bytes; the others are the file's, as they are when the transaction
//!    commits, and zeros where that has none. A whole page depends on nothing.
//! 3. Ranges of a page are in order, not empty, and neither overlap nor touch.
//! 4. Pages come, change their kind and go by [`Content::set`] and [`Content::take_from`], which count them.

use super::stored::Place;
use format::BLOCK_SIZE;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

const PAGE: u64 = BLOCK_SIZE as u64;

/// Bytes of a page that were written.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    bytes: Box<[u8]>,
    /// Small: they may be half as many as the bytes.
    ranges: Vec<Range<u16>>,
}

impl Part {
    fn new() -> Part {
        Part {
            bytes: vec![0; BLOCK_SIZE].into(),
            ranges: Vec::new(),
        }
    }

    fn put(&mut self, at: usize, data: &[u8]) {
        self.bytes[at..at + data.len()].copy_from_slice(data);
        let (mut start, mut end) = (at as u16, (at + data.len()) as u16);
        self.ranges.retain(|range| {
            let apart = range.end < start || end < range.start;
            if !apart {
                start = start.min(range.start);
                end = end.max(range.end);
            }
            apart
        });
        let place = self.ranges.partition_point(|range| range.end < start);
        self.ranges.insert(place, start..end);
    }

    fn is_whole(&self) -> bool {
        (self.ranges.first()).is_some_and(|range| *range == (0..BLOCK_SIZE as u16))
    }

    fn cut(&mut self, end: usize) {
        self.ranges.retain_mut(|range| {
            range.end = range.end.min(end as u16);
            range.start < range.end
        });
    }

    /// Puts what was written over what the page holds besides.
    pub fn over(&self, page: &mut [u8]) {
        for range in &self.ranges {
            let range = usize::from(range.start)..usize::from(range.end);
            page[range.clone()].copy_from_slice(&self.bytes[range]);
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) enum Page {
    Part(Part),
    Whole(Box<[u8]>),
    /// It is in a block already.
    Stored(Place),
}

impl Page {
    /// Where it is, if it is in a block.
    pub fn place(&self) -> Option<Place> {
        match self {
            Page::Stored(place) => Some(*place),
            Page::Part(_) | Page::Whole(_) => None,
        }
    }
}

/// Pages of one file, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub in_memory: usize,
    /// Those of them that are whole.
    pub whole: usize,
    /// Where pages follow each other, and one of them is in a block, but they are not in blocks that do.
    pub breaks: usize,
}

impl Counts {
    /// One part of these was `before`, and is `after`.
    pub fn change(&mut self, before: Counts, after: Counts) {
        self.in_memory = self.in_memory + after.in_memory - before.in_memory;
        self.whole = self.whole + after.whole - before.whole;
        self.breaks = self.breaks + after.breaks - before.breaks;
    }
}

/// Whether there is a break between two pages: of each its place if it is in a block, and nothing if it was not written.
fn is_break(before: Option<Option<Place>>, after: Option<Option<Place>>) -> bool {
    match (before, after) {
        (None, _) | (_, None) | (Some(None), Some(None)) => false,
        (Some(Some(before)), Some(Some(after))) => !before.is_before(after),
        _ => true,
    }
}

/// See the module's head.
#[derive(Clone, Debug, Default)]
pub(crate) struct Content {
    /// Invariant 1.
    pub cut: Option<u64>,
    /// The size, once it follows from what the transaction did alone.
    size: Option<u64>,
    /// Where the last byte written ends.
    end: u64,
    /// Invariant 4.
    pub pages: BTreeMap<u64, Page>,
    /// Whole ones in memory.
    whole: BTreeSet<u64>,
    in_memory: usize,
    breaks: usize,
    /// Written or cut later than a time of modification was set.
    pub is_newer: bool,
}

impl Content {
    /// Of a file that the transaction makes.
    pub fn empty() -> Content {
        Content {
            cut: Some(0),
            size: Some(0),
            ..Content::default()
        }
    }

    /// Whether anything was done to it.
    pub fn is_changed(&self) -> bool {
        !self.pages.is_empty() || self.size.is_some()
    }

    /// The size of a file that has `base` bytes.
    pub fn size(&self, base: u64) -> u64 {
        self.size.unwrap_or(base.max(self.end))
    }

    /// What of a file that has `base` bytes is still there: so many, from its beginning on.
    pub fn left_of(&self, base: u64) -> u64 {
        self.cut.map_or(base, |cut| cut.min(base))
    }

    pub fn counts(&self) -> Counts {
        Counts {
            in_memory: self.in_memory,
            whole: self.whole.len(),
            breaks: self.breaks,
        }
    }

    /// Numbers of the whole pages in memory, growing.
    pub fn whole(&self) -> impl Iterator<Item = u64> {
        self.whole.iter().copied()
    }

    /// A page becomes this, or goes.
    pub fn set(&mut self, number: u64, page: Option<Page>) {
        let mut around = [None; 3];
        let first = number.saturating_sub(1);
        for (other, page) in self.pages.range(first..=number.saturating_add(1)) {
            around[(other + 1 - number) as usize] = Some(page.place());
        }
        let [before, was, after] = around;
        let is = page.as_ref().map(Page::place);
        let breaks =
            |here| usize::from(is_break(before, here)) + usize::from(is_break(here, after));
        self.breaks = self.breaks + breaks(is) - breaks(was);
        let in_memory = |here| usize::from(here == Some(None));
        self.in_memory = self.in_memory + in_memory(is) - in_memory(was);
        match &page {
            Some(Page::Whole(_)) => self.whole.insert(number),
            _ => self.whole.remove(&number),
        };
        match page {
            Some(page) => drop(self.pages.insert(number, page)),
            None => drop(self.pages.remove(&number)),
        }
    }

    /// Takes the pages from this one on away.
    pub fn take_from(&mut self, number: u64) -> BTreeMap<u64, Page> {
        let last = self.pages.range(..number).next_back();
        let mut before = last.map(|(number, page)| (*number, page.place()));
        let behind = self.pages.split_off(&number);
        for (number, page) in &behind {
            let place = page.place();
            let left = before.filter(|(before, _)| before + 1 == *number);
            self.breaks -= usize::from(is_break(left.map(|(_, place)| place), Some(place)));
            self.in_memory -= usize::from(place.is_none());
            before = Some((*number, place));
        }
        self.whole.split_off(&number);
        behind
    }

    /// These bytes are written; pages of them that are stored have been fetched.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let (mut at, end) = (offset, offset + data.len() as u64);
        while at < end {
            let (number, within) = (at / PAGE, (at % PAGE) as usize);
            let len = (BLOCK_SIZE - within).min((end - at) as usize);
            let part = &data[(at - offset) as usize..][..len];
            self.put(number, within, part);
            at += len as u64;
        }
        self.end = self.end.max(end);
        if let Some(size) = &mut self.size {
            *size = (*size).max(end);
        }
        self.is_newer = true;
    }

    fn put(&mut self, number: u64, within: usize, data: &[u8]) {
        if data.len() == BLOCK_SIZE {
            self.set(number, Some(Page::Whole(data.into())));
            return;
        }
        if !self.pages.contains_key(&number) {
            self.set(number, Some(Page::Part(Part::new())));
        }
        let whole = match self.pages.get_mut(&number) {
            Some(Page::Whole(bytes)) => {
                bytes[within..within + data.len()].copy_from_slice(data);
                return;
            }
            Some(Page::Part(part)) => {
                part.put(within, data);
                part.is_whole().then(|| std::mem::take(&mut part.bytes))
            }
            Some(Page::Stored(_)) | None => unreachable!("it was fetched"),
        };
        if let Some(bytes) = whole {
            self.set(number, Some(Page::Whole(bytes)));
        }
    }

    /// Sets the size; the page that the new end lies in has zeros behind it if it is stored. Returns the pages behind it.
    pub fn truncate(&mut self, size: u64) -> BTreeMap<u64, Page> {
        let behind = self.take_from(size.div_ceil(PAGE));
        let within = (size % PAGE) as usize;
        if within > 0
            && let Some(page) = self.pages.get_mut(&(size / PAGE))
        {
            match page {
                Page::Part(part) => part.cut(within),
                Page::Whole(bytes) => bytes[within..].fill(0),
                Page::Stored(_) => {}
            }
        }
        self.cut = Some(self.cut.map_or(size, |cut| cut.min(size)));
        self.size = Some(size);
        self.is_newer = true;
        behind
    }

    /// Puts what was written over bytes from `offset` on that are the file's. `stored` shows pages that are.
    pub fn over<E>(
        &self,
        offset: u64,
        out: &mut [u8],
        mut stored: impl FnMut(Place, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let end = offset + out.len() as u64;
        for (&number, page) in self.pages.range(offset / PAGE..end.div_ceil(PAGE)) {
            let start = number * PAGE;
            let (from, to) = (start.max(offset), (start + PAGE).min(end));
            let here = (from - start) as usize..(to - start) as usize;
            let out = &mut out[(from - offset) as usize..(to - offset) as usize];
            match page {
                Page::Whole(bytes) => out.copy_from_slice(&bytes[here]),
                Page::Part(part) => {
                    for range in &part.ranges {
                        let (start, end) = (usize::from(range.start), usize::from(range.end));
                        let (a, b) = (start.max(here.start), end.min(here.end));
                        if a < b {
                            out[a - here.start..b - here.start].copy_from_slice(&part.bytes[a..b]);
                        }
                    }
                }
                Page::Stored(place) => {
                    let mut all = vec![0; BLOCK_SIZE];
                    stored(*place, &mut all)?;
                    out.copy_from_slice(&all[here]);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::rng::Rng;
    use format::Block;

    /// Against a plain vector, with a file whose content is known.
    #[test]
    fn what_was_written_lies_over_what_the_file_holds() {
        let mut rng = Rng::new(7);
        for round in 0..300 {
            let base: Vec<u8> = (0..rng.below(20_000))
                .map(|i| (i % 251) as u8 + 1)
                .collect();
            let (mut content, mut model) = (Content::default(), base.clone());
            for step in 0..rng.range(1, 12) {
                if rng.one_in(4) {
                    let size = rng.below(24_000);
                    drop(content.truncate(size));
                    model.resize(size as usize, 0);
                    continue;
                }
                let (at, len) = (rng.below(20_000), rng.range(1, 9000));
                let data = vec![(100 + step) as u8; len as usize];
                content.write(at, &data);
                let end = (at + len) as usize;
                if model.len() < end {
                    model.resize(end, 0);
                }
                model[at as usize..end].copy_from_slice(&data);
            }
            let size = content.size(base.len() as u64);
            assert_eq!(size, model.len() as u64, "round {round}");
            let mut shown = vec![0; size as usize];
            let left = content.left_of(base.len() as u64).min(size) as usize;
            shown[..left].copy_from_slice(&base[..left]);
            let none = |_, _: &mut [u8]| -> Result<(), ()> { unreachable!("nothing is stored") };
            content.over(0, &mut shown, none).unwrap();
            assert!(shown == model, "round {round}");
            let (a, b) = (rng.below(size + 1), rng.below(size + 1));
            let (a, b) = (a.min(b), a.max(b));
            let mut part = vec![0; (b - a) as usize];
            let known = left.min(b as usize).saturating_sub(a as usize);
            if known > 0 {
                part[..known].copy_from_slice(&base[a as usize..a as usize + known]);
            }
            content.over(a, &mut part, none).unwrap();
            assert!(part == model[a as usize..b as usize]);
        }
    }

    /// Against a count of all pages.
    #[test]
    fn pages_are_counted_as_they_come_and_go() {
        let mut rng = Rng::new(8);
        for _ in 0..200 {
            let mut content = Content::default();
            for _ in 0..60 {
                let number = rng.below(12);
                match rng.below(8) {
                    0 => drop(content.take_from(number)),
                    1 => content.set(number, None),
                    // In blocks that mostly follow each other.
                    2..5 => {
                        let place = Place(Block(100 + number + rng.below(2)));
                        content.set(number, Some(Page::Stored(place)));
                    }
                    5 => content.set(number, Some(Page::Part(Part::new()))),
                    _ => content.set(number, Some(Page::Whole(vec![0; BLOCK_SIZE].into()))),
                }
                let pages = &content.pages;
                let count = |is: &dyn Fn(&u64, &Page) -> bool| {
                    pages
                        .iter()
                        .filter(|(number, page)| is(number, page))
                        .count()
                };
                let wanted = Counts {
                    in_memory: count(&|_, page| page.place().is_none()),
                    whole: count(&|_, page| matches!(page, Page::Whole(_))),
                    breaks: count(&|number, page| {
                        let next = pages.get(&(number + 1));
                        is_break(Some(page.place()), next.map(Page::place))
                    }),
                };
                assert_eq!(content.counts(), wanted);
                assert_eq!(content.whole().count(), wanted.whole);
            }
        }
    }
}
