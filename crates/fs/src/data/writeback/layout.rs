//! Where write-back puts pages: over the blocks that they have, or in new ones.

use crate::Error;
use crate::content::{FileExtent, FsNode};
use crate::data::Files;
use crate::data::bounce::Shared;
use crate::data::extents::{self, CHANGES_MAX, Change, Mapped, PAGE_LIMIT};
use crate::data::file::FileState;
use base::canary::{Canary, planted};
use base::counted::Counted;
use device::{Durability, Io};
use engine::{Extent, Kept, NewData, Reservation, Store};
use format::{BLOCK_SIZE, Block};
use smallvec::SmallVec;
use std::ops::Range;

/// Pages at consecutive offsets that go to consecutive blocks.
#[derive(Debug)]
pub(in crate::data) struct Segment {
    pub(super) pages: Range<u64>,
    pub(super) block: Block,
    pub(super) kind: Target,
}

impl Segment {
    pub(super) fn bytes(&self) -> usize {
        (self.pages.end - self.pages.start) as usize * BLOCK_SIZE
    }

    pub(super) fn blocks(&self) -> Extent {
        Extent {
            block: self.block,
            len: (self.pages.end - self.pages.start) as u32,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::data) enum Target {
    /// Written blocks: overwritten in place, nothing to log.
    InPlace,
    /// Allocated blocks that hold nothing yet.
    Unwritten,
    /// Blocks just reserved.
    Fresh,
}

/// Where the leading pages of a batch go.
pub(in crate::data) struct Layout<'s> {
    pub(in crate::data) segments: Vec<Segment>,
    pub(super) reservations: Vec<Reservation<'s, FsNode>>,
    /// Pages covered, from the front of the batch.
    pub(in crate::data) covered: usize,
    /// Failed flushes of the array before anything was written.
    pub(super) flush_failures: u64,
    /// `Durable`: what is written in place needs no flush. `Checked`: it is written with the record, which vouches for it.
    pub(super) durability: Durability,
    /// A small sync waits for it, or a direct write: it is written at once, and not at the pace of write-back.
    pub(super) at_once: bool,
}

/// A layout without a borrow of the store, from one call to the next.
pub(in crate::data) struct Parts {
    segments: Vec<Segment>,
    kept: Vec<Kept<FsNode>>,
    flush_failures: u64,
}

impl Layout<'_> {
    /// Blocks in the order of the pages.
    pub(in crate::data) fn blocks(&self) -> impl Iterator<Item = Extent> {
        self.segments.iter().map(Segment::blocks)
    }

    /// How many of them are reserved.
    pub(in crate::data) fn reserved(&self) -> u64 {
        let blocks = |r: &Reservation<'_, FsNode>| u64::from(r.extent().len);
        self.reservations.iter().map(blocks).sum()
    }

    pub(in crate::data) fn keep(self) -> Parts {
        Parts {
            segments: self.segments,
            kept: self
                .reservations
                .into_iter()
                .map(Reservation::keep)
                .collect(),
            flush_failures: self.flush_failures,
        }
    }
}

impl Parts {
    /// The block behind the last one.
    pub(in crate::data) fn end(&self) -> Option<Block> {
        let last = self.segments.last()?.blocks();
        Some(Block(last.block.0 + u64::from(last.len)))
    }

    pub(in crate::data) fn layout(self, store: &Store<FsNode>) -> Layout<'_> {
        let covered = self.segments.iter().map(Segment::bytes).sum::<usize>() / BLOCK_SIZE;
        let adopt = |kept| store.adopt_reservation(kept);
        Layout {
            segments: self.segments,
            reservations: self.kept.into_iter().map(adopt).collect(),
            covered,
            flush_failures: self.flush_failures,
            durability: Durability::Volatile,
            at_once: true,
        }
    }
}

impl Files {
    /// A layout over these blocks, which the pages have, and which hold something.
    pub(in crate::data) fn lay_out_over(
        &self,
        pages: Range<u64>,
        runs: impl IntoIterator<Item = (Block, u64)>,
    ) -> Layout<'_> {
        let mut at = pages.start;
        let segments = runs.into_iter().map(|(block, len)| {
            let start = at;
            at += len;
            Segment {
                pages: start..at,
                block,
                kind: Target::InPlace,
            }
        });
        Layout {
            segments: segments.collect(),
            reservations: Vec::new(),
            covered: (pages.end - pages.start) as usize,
            flush_failures: self.store.array().flush_failures(),
            durability: Durability::Volatile,
            at_once: true,
        }
    }

    /// Decides where pages go, and reserves blocks for those that have none, as far as one
    /// record reaches. `fresh`: ignore what is mapped, all pages get new blocks.
    pub(in crate::data) fn lay_out(
        &self,
        state: &Counted<FileState>,
        pages: &[u64],
        fresh: bool,
    ) -> Result<Layout<'_>, Error> {
        self.lay_out_from(state, pages, fresh, None)
    }

    /// The same; the first of them that have no block are best put behind those before `goal`, if what is mapped does not tell.
    pub(in crate::data) fn lay_out_from(
        &self,
        state: &Counted<FileState>,
        pages: &[u64],
        fresh: bool,
        goal: Option<Block>,
    ) -> Result<Layout<'_>, Error> {
        if planted(Canary::TailEndedEarly) {
            self.drop_tail(state, &(0..PAGE_LIMIT))?;
            self.store.commit_through(self.store.epoch())?;
        }
        let mut layout = Layout {
            segments: Vec::new(),
            reservations: Vec::new(),
            covered: 0,
            flush_failures: self.store.array().flush_failures(),
            durability: Durability::Volatile,
            at_once: false,
        };
        let bound = if fresh {
            PAGE_LIMIT
        } else {
            let content = state.node.read()?;
            extents::leaf_end(&self.store, content.inode()?, pages[0])?
        };
        let inside = &pages[..pages.partition_point(|&p| p < bound)];
        for run in inside.chunk_by(|a, b| a + 1 == *b) {
            let run = run[0]..run[0] + run.len() as u64;
            // The page before tells where the file goes on.
            let around = run.start.saturating_sub(1)..run.end;
            let mapped = match fresh {
                true => Ok(Mapped::new()),
                false => match self.mapped(state, around) {
                    // Damage there is nothing to these pages.
                    Err(error) if error.is_damage() => self.mapped(state, run.clone()),
                    mapped => mapped,
                },
            };
            let laid = mapped.and_then(|mapped| {
                self.lay_out_run(state, run.clone(), (&mapped, goal), &mut layout)
            });
            let reached;
            (reached, layout) = self.or_unreserve(state, layout, laid)?;
            layout.covered += (reached - run.start) as usize;
            if reached < run.end {
                break;
            }
        }
        Ok(layout)
    }

    /// Lays out one run of pages; returns the page at which the record is full.
    fn lay_out_run<'s>(
        &'s self,
        state: &Counted<FileState>,
        run: Range<u64>,
        (mapped, goal): (&[FileExtent], Option<Block>),
        layout: &mut Layout<'s>,
    ) -> Result<u64, Error> {
        let mut at = run.start;
        while at < run.end {
            if layout.segments.len() >= CHANGES_MAX {
                break;
            }
            let here = mapped.iter().find(|e| e.end() > at);
            match here {
                Some(extent) if extent.page <= at => {
                    let pages = at..extent.end().min(run.end);
                    at = pages.end;
                    layout.segments.push(Segment {
                        block: Block(extent.block.0 + (pages.start - extent.page)),
                        pages,
                        kind: match extent.written {
                            true => Target::InPlace,
                            false => Target::Unwritten,
                        },
                    });
                }
                next => {
                    let end = next.map_or(run.end, |e| e.page.min(run.end));
                    let before = mapped.iter().find(|e| e.end() == at);
                    let goal = match layout.segments.last() {
                        Some(last) => {
                            Some(Block(last.block.0 + (last.pages.end - last.pages.start)))
                        }
                        None => before.map(|e| Block(e.block.0 + e.len as u64)).or(goal),
                    };
                    let want = (end - at).min(u32::MAX as u64) as u32;
                    let reservation = self.reserve(state, want, goal)?;
                    let Extent { block, len } = reservation.extent();
                    layout.segments.push(Segment {
                        pages: at..at + len as u64,
                        block,
                        kind: Target::Fresh,
                    });
                    layout.reservations.push(reservation);
                    at += len as u64;
                }
            }
        }
        Ok(at)
    }

    /// Blocks out of the file's promise.
    pub(in crate::data) fn reserve(
        &self,
        state: &Counted<FileState>,
        want: u32,
        goal: Option<Block>,
    ) -> Result<Reservation<'_, FsNode>, Error> {
        // Nobody else changes the count meanwhile; stat goes on seeing it.
        let blocks = state.meta.lock().promised;
        let mut promise = self.store.adopt_promise(blocks);
        let outcome = self.store.reserve(&mut promise, want, goal);
        state.meta.lock().promised = promise.into_blocks();
        Ok(outcome?)
    }

    /// Gives a layout's blocks back to the promise they came from.
    pub(in crate::data) fn unreserve(&self, state: &Counted<FileState>, layout: Layout<'_>) {
        self.take_back(state, layout.reservations);
    }

    /// Reserved blocks are not used: the pages they were for have them promised again, and nobody else gets them in between.
    pub(in crate::data) fn take_back<'s>(
        &'s self,
        state: &Counted<FileState>,
        reservations: impl IntoIterator<Item = Reservation<'s, FsNode>>,
    ) {
        let mut promise = self.store.adopt_promise(0);
        for reservation in reservations {
            promise.take_back(reservation);
        }
        if planted(Canary::PromiseLeaked)
            && let Ok(again) = self.store.promise(promise.blocks())
        {
            again.into_blocks();
        }
        state.meta.lock().promised += promise.into_blocks();
    }

    /// What came of a step on the way to store a layout. After an error its blocks are given back.
    pub(in crate::data) fn or_unreserve<'s, T>(
        &self,
        state: &Counted<FileState>,
        layout: Layout<'s>,
        step: Result<T, Error>,
    ) -> Result<(T, Layout<'s>), Error> {
        match step {
            Ok(value) => Ok((value, layout)),
            Err(error) => {
                self.unreserve(state, layout);
                Err(error)
            }
        }
    }
}

/// What is to be in each segment, one after the other in memory.
pub(super) fn new_data(segments: &[Segment], memory: &std::sync::Arc<Shared>) -> Vec<NewData> {
    let mut at = 0;
    let new = |segment: &Segment| {
        let memory = std::sync::Arc::clone(memory);
        let data = NewData::new(segment.blocks(), memory, at);
        at += segment.bytes();
        data
    };
    segments.iter().map(new).collect()
}

/// The blocks that a transfer of whole ones touches.
pub(super) fn blocks_written(io: &Io<'_>) -> Extent {
    Extent {
        block: Block(io.byte() / BLOCK_SIZE as u64),
        len: (io.bytes() / BLOCK_SIZE as u64) as u32,
    }
}

/// The segments of the pages at these places of the list that `segments` cover in order.
pub(super) fn part_of(segments: &[Segment], places: Range<usize>) -> Vec<Segment> {
    let mut part = Vec::new();
    let mut first = 0;
    for segment in segments {
        let last = first + (segment.pages.end - segment.pages.start) as usize;
        let (from, to) = (places.start.max(first), places.end.min(last));
        if from < to {
            let skip = (from - first) as u64;
            let start = segment.pages.start + skip;
            part.push(Segment {
                pages: start..start + (to - from) as u64,
                block: Block(segment.block.0 + skip),
                kind: segment.kind,
            });
        }
        first = last;
    }
    part
}

/// What segments change in a file's mapping.
pub(super) fn changes_of(segments: &[Segment]) -> Vec<Change> {
    let changed = segments.iter().filter(|s| s.kind != Target::InPlace);
    let change = |s: &Segment| Change {
        pages: s.pages.clone(),
        with: vec![FileExtent {
            page: s.pages.start,
            block: s.block,
            len: (s.pages.end - s.pages.start) as u32,
            written: true,
        }],
        same_blocks: s.kind == Target::Unwritten,
    };
    changed.map(change).collect()
}

/// Writes of pages that lie next to each other in `data`: those that continue the one before become one
/// with it.
pub(in crate::data) struct Writes<'a> {
    data: &'a [u8],
    pub(super) ios: SmallVec<[Io<'a>; 1]>,
    pub(in crate::data) durability: Durability,
    /// Where the last one goes, and what it writes.
    pub(super) last: Option<(u64, Range<usize>)>,
}

impl<'a> Writes<'a> {
    pub fn new(data: &'a [u8]) -> Self {
        Writes {
            data,
            ios: SmallVec::new(),
            durability: Durability::Volatile,
            last: None,
        }
    }

    /// Adds runs of blocks that take what lies from `at` on.
    pub fn add(&mut self, mut at: usize, runs: impl IntoIterator<Item = (Block, u64)>) {
        for (block, blocks) in runs {
            let (byte, end) = (block.byte(), at + blocks as usize * BLOCK_SIZE);
            match &mut self.last {
                Some((first, bytes)) if bytes.end == at && *first + bytes.len() as u64 == byte => {
                    bytes.end = end;
                }
                _ => {
                    let done = self.last.replace((byte, at..end));
                    self.push(done);
                }
            }
            at = end;
        }
    }

    pub fn add_segments(&mut self, at: usize, segments: &[Segment]) {
        let run = |s: &Segment| (s.block, s.pages.end - s.pages.start);
        self.add(at, segments.iter().map(run));
    }

    pub(super) fn push(&mut self, write: Option<(u64, Range<usize>)>) {
        self.ios.extend(write.map(|(byte, bytes)| Io::Write {
            byte,
            buf: &self.data[bytes],
            durability: self.durability,
        }));
    }
}
