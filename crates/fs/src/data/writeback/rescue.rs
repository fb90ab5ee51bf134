//! A batch of write-back fails: that is latched on the file, and what of it can go home all the same does.
//!
//! One block that cannot be written must not keep gigabytes behind it in memory, to be dropped at the last close. So write-back goes on, but only
//! with what needs no record: overwrites of blocks that the file has, below its logged size. Growth waits for what is before it, and new content
//! for all of it. Nothing is written any more once the store has failed, or a flush: what that is worth is not known (R17).

use super::layout::{Segment, Target, part_of};
use super::{Copies, Take, Writes};
use crate::Error;
use crate::data::Files;
use crate::data::clean::needs_no_record;
use crate::data::file::FileState;
use crate::data::meta::Failure;
use crate::data::tail::How;
use base::counted::Counted;
use format::{BLOCK_SIZE, Block};
use std::ops::Range;

/// Pages that are tried together once so many have failed alone: a device that refuses all of them is not asked for each.
const PIECE: usize = 32;
const ALONE_MAX: usize = 1024;

/// A write-back that has failed.
pub(super) struct Rescue {
    /// What failed first.
    error: Error,
    /// Flushes that had failed before.
    flush_failures: u64,
    /// Pages that have failed alone.
    failed: usize,
}

impl Rescue {
    /// What its caller is told of a write-back that has ended.
    pub(super) fn outcome(rescue: Option<Rescue>) -> Result<(), Error> {
        rescue.map_or(Ok(()), |rescue| Err(rescue.error))
    }
}

impl Files {
    /// One batch of these pages, of all, or, if one before has failed, of overwrites. Returns where to go on.
    pub(super) fn flush_or_rescue(
        &self,
        state: &Counted<FileState>,
        range: Range<u64>,
        (how, take): (How, Take),
        failed: &mut Option<Rescue>,
    ) -> Option<u64> {
        if let Some(rescue) = failed {
            return match take {
                Take::Dirty => self.rescue_batch(state, range, rescue),
                Take::Nothing => None,
            };
        }
        let flush_failures = self.store.array().flush_failures();
        match self.flush_pass(state, range.clone(), how, take) {
            Ok(next) => next,
            Err(error) => {
                *failed = Some(Rescue {
                    error,
                    flush_failures,
                    failed: 0,
                });
                Some(range.start)
            }
        }
    }

    /// One batch of these pages; returns where to go on, which may be before them. A failure is latched.
    pub(in super::super) fn flush_pass(
        &self,
        state: &Counted<FileState>,
        range: Range<u64>,
        how: How,
        take: Take,
    ) -> Result<Option<u64>, Error> {
        let outcome = match self.try_flush_pass(state, range, how, take) {
            // Deleted after this state was made for it: nothing is left to write.
            Err(Error::Stale(ino)) if ino == state.ino() => {
                state.meta.lock().dead = true;
                Ok(None)
            }
            outcome => outcome,
        };
        if let Err(error) = &outcome {
            let now_ns = self.now_ns();
            (state.meta.lock()).fail_write_back(error.to_string(), now_ns);
            if let Some(left_out) = self.told.failed.may_say(now_ns) {
                let ino = state.ino();
                tracing::error!(left_out, "write-back of inode {ino} failed: {error}");
            }
        }
        self.trim_promise(state);
        outcome
    }

    /// All that was dirty in a file has gone home: what failed before has passed. If nothing was lost, and nobody has the file open who was
    /// promised to hear of it, nobody need be told.
    pub(in crate::data) fn fails_no_more(&self, state: &FileState) {
        let mut meta = state.meta.lock();
        if meta.failing_ns.is_some() {
            meta.fails_no_more();
        }
        let Failure {
            count,
            reported,
            lost,
            ..
        } = meta.failure;
        // Whoever opens it is counted before looking at what is forgiven, behind this lock.
        if count > 0 && !reported && !lost && !self.table.is_open(state.ino()) {
            meta.failure.reported = true;
        }
    }

    /// Writes home what it can of the next dirty pages. What cannot be written stays dirty; that the file has failed is latched.
    fn rescue_batch(
        &self,
        state: &Counted<FileState>,
        range: Range<u64>,
        rescue: &mut Rescue,
    ) -> Option<u64> {
        if self.in_doubt(rescue) {
            return None;
        }
        let most = self.batch_pages();
        let pages = self.pages.dirty_pages(state.key, range, most);
        let last = *pages.last()?;
        let segments = self.overwrites(state, &pages);
        let found = segments.iter().flat_map(|s| s.pages.clone()).collect();
        if let Ok(Some(copies)) = self.copy_pages(state, found) {
            self.write_apart(state, &segments, &copies, rescue);
            self.trim_promise(state);
        }
        (pages.len() == most).then_some(last + 1)
    }

    fn in_doubt(&self, rescue: &Rescue) -> bool {
        self.store.failed().is_some() || self.flush_failed_since(rescue.flush_failures)
    }

    /// Where those of these pages lie that need no record.
    fn overwrites(&self, state: &Counted<FileState>, pages: &[u64]) -> Vec<Segment> {
        let Ok(tail) = self.tail_page(state) else {
            return Vec::new();
        };
        let plain: Vec<u64> = {
            let meta = state.meta.lock();
            let plain = |page: &u64| needs_no_record(&meta, *page) && Some(*page) != tail;
            pages.iter().copied().filter(plain).collect()
        };
        let mut segments = Vec::new();
        for run in plain.chunk_by(|a, b| a + 1 == *b) {
            let run = run[0]..run[0] + run.len() as u64;
            // Damage there is nothing to the others.
            let mapped = self.mapped(state, run.clone()).unwrap_or_default();
            for extent in mapped.iter().filter(|extent| extent.written) {
                let pages = run.start.max(extent.page)..run.end.min(extent.end());
                if !pages.is_empty() {
                    segments.push(Segment {
                        block: Block(extent.block.0 + (pages.start - extent.page)),
                        pages,
                        kind: Target::InPlace,
                    });
                }
            }
        }
        segments
    }

    /// Writes pages in place: all at once, or those halves of them that can be, and of the others the halves.
    fn write_apart(
        &self,
        state: &Counted<FileState>,
        segments: &[Segment],
        copies: &Copies<'_>,
        rescue: &mut Rescue,
    ) {
        let mut parts = Vec::new();
        parts.push(0..copies.pages.len());
        while let Some(part) = parts.pop() {
            let bytes = part.start * BLOCK_SIZE..part.end * BLOCK_SIZE;
            let mut writes = Writes::new(&copies.data[bytes]);
            writes.add_segments(0, &part_of(segments, part.clone()));
            let written = self.write_out(writes);
            if (written.and_then(|()| self.wrote_in_place(state, rescue.flush_failures))).is_ok() {
                self.complete_pages(state, &copies.pages[part.clone()], &copies.stamps[part]);
                continue;
            }
            if self.in_doubt(rescue) {
                return;
            }
            if part.len() == 1 {
                rescue.failed += 1;
            } else if part.len() > PIECE || rescue.failed < ALONE_MAX {
                let middle = part.start + part.len() / 2;
                parts.extend([middle..part.end, part.start..middle]);
            }
        }
    }
}
