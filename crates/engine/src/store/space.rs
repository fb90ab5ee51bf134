//! Blocks for data: promised, reserved, freed, given out again; chunks on their way from free to data and back.

use super::Store;
use crate::checkpoint::CheckpointState;
use crate::claims::{Kept, Promise, Reservation};
use crate::content::Content;
use crate::error::Error;
use crate::node::{Body, Node};
use crate::op::{Need, Op};
use crate::space::{Conversion, Extent, Source, TRIES_MAX, Tried};
use base::atomic::Ordering;
use base::sync::MutexGuard;
use format::Block;
use format::table::{SPACE_MAP_FIRST, space_map_nid};
use std::ops::Range;

/// So often one search for promised blocks has chunks of metadata emptied that others may get before it.
const EMPTIED_MAX: u32 = 4;

/// Free and total space, in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceInfo {
    pub total_blocks: u64,
    pub free_blocks: u64,
    /// Blocks that data has been promised and does not have yet.
    pub promised_blocks: u64,
    /// Nodes in the table as of the last checkpoint.
    pub nodes: u64,
    /// Nodes that there are; in a store that is only read, those in the table.
    pub nodes_now: u64,
    /// By so many bytes metadata may grow; it may take some of what is free for data.
    pub growth_bytes: u64,
}

impl<C: Content> Store<C> {
    /// Makes freed blocks available and empty chunks free, for callers that found none.
    pub(super) fn reclaim(&self) -> Result<(), Error> {
        self.settle_freed()?;
        self.space.end_empty_leases();
        self.retire_chunks(&self.checkpoint_state.lock());
        self.settle_freed()?;
        self.checkpoint_now()
    }

    /// Commits, and makes everything available that was freed until then.
    fn settle_freed(&self) -> Result<(), Error> {
        self.sync()?;
        self.confirm_all()?;
        self.release_freed(true);
        Ok(())
    }

    pub(super) fn release_freed(&self, wait: bool) {
        if self.space.pending_blocks() == 0 {
            return;
        }
        let settled = self.settled_epoch();
        self.space.release_through(settled, wait, |extent| {
            // Who ends the store waits for whoever has begun to release.
            if self.options.discard && !self.at_rest.load(Ordering::SeqCst) {
                // A device that cannot discard loses speed, not data: warned of, not failed.
                let _: Result<_, _> = self.discard(extent);
            }
        });
    }

    fn discard(&self, extent: Extent) -> Result<(), Error> {
        let bytes = extent.len as u64 * format::BLOCK_SIZE as u64;
        let done = self.array.discard(extent.block.byte(), bytes);
        done.map_err(|error| {
            tracing::warn!("discard of {extent:?} failed: {error}");
            error.into()
        })
    }

    /// Discards the free space among `range` in runs of at least `least_blocks`; returns the bytes discarded. The range is of blocks, counted from the first
    /// one of the first chunk; a run counts as far as it is in there. It ends where
    /// chunks with and without data meet. Space whose freeing is not durable yet is made so before; what promises need is left out.
    /// Maps that are read for it do not stay in memory.
    ///
    /// # Errors
    /// The first one of a device, when it discarded nothing; what fails beside others is not among the bytes. [`Error::ReadOnly`] when the store ends meanwhile, though
    /// a part is discarded by then: others may have the devices after that.
    pub fn trim(&self, range: Range<u64>, least_blocks: u64) -> Result<u64, Error> {
        if self.options.read_only {
            return Err(Error::ReadOnly);
        }
        self.settle_freed()?;
        // Chunks that a checkpoint is about to list as free are in no list.
        self.await_retired()?;
        let chunk_blocks = self.array.geometry().chunk_blocks;
        let within = |chunk: &u32| {
            let part = part_of(&range, *chunk, chunk_blocks);
            (!part.is_empty()).then_some((*chunk, part))
        };
        let (unloaded, free) = self.space.unloaded_and_free();
        let mut tried = Tried::default();
        let (mut blocks, mut failed) = (0, None);
        let mut count = |done: Result<(), Error>, len: u32| match done {
            Ok(()) => blocks += len as u64,
            Err(error) => _ = failed.get_or_insert(error),
        };
        let least = least_blocks.max(1);
        let mut discard_in = |chunk: u32, part: Range<u32>| {
            let mut from = part.start;
            while let Some((run, end, done)) = self.discard_next(chunk, from..part.end, least)? {
                count(done, run);
                from = end;
            }
            Ok::<_, Error>(())
        };
        let loaded = self.space.loaded_chunks();
        for (chunk, part) in loaded.iter().filter_map(within) {
            discard_in(chunk, part)?;
        }
        for (chunk, part) in unloaded.iter().filter_map(within) {
            // Somebody else may have loaded it meanwhile.
            if loaded.binary_search(&chunk).is_ok() || tried.is_passed_over(chunk) {
                continue;
            }
            match self.load_space(chunk) {
                Ok(()) => discard_in(chunk, part)?,
                Err((chunks, error)) => {
                    tried.pass_over(chunks, error);
                    continue;
                }
            }
            let _nobody_discards = self.trimming.lock();
            self.space.unload_unused(chunk);
        }
        let parts: Vec<(u32, Range<u32>)> = free.iter().filter_map(within).collect();
        for (chunk, part) in in_long_runs(&parts, least_blocks) {
            // A checkpoint may need the last free chunk.
            let _none = self.checkpoint_state.lock();
            let _promises_wait = self.begin_discard()?;
            if self.space.take_free_chunk(chunk) {
                let first = self.array.geometry().chunk_block(chunk).0;
                let done = self.discard(Extent {
                    block: Block(first + u64::from(part.start)),
                    len: part.len() as u32,
                });
                self.space.give_free_chunk(chunk);
                count(done, part.len() as u32);
            }
        }
        match failed {
            Some(error) if blocks == 0 => Err(error),
            _ => Ok(blocks * format::BLOCK_SIZE as u64),
        }
    }

    /// What is free stays so for a discard, and none begins once the store ends, which waits for those that have (`come_to_rest`).
    fn begin_discard(&self) -> Result<MutexGuard<'_, ()>, Error> {
        let discarding = self.trimming.lock();
        match self.refused() {
            Some(error) => Err(error),
            None => Ok(discarding),
        }
    }

    /// Discards the next run of at least `least` free blocks in a part of a chunk, if there is one.
    fn discard_next(
        &self,
        chunk: u32,
        part: Range<u32>,
        least: u64,
    ) -> Result<Option<Discarded>, Error> {
        let _promises_wait = self.begin_discard()?;
        let Some((run, end)) = self.space.take_run(chunk, part, least) else {
            return Ok(None);
        };
        let done = self.discard(run);
        self.space.give(run);
        Ok(Some((run.len, end, done)))
    }

    /// Sets space aside for data to be allocated later.
    ///
    /// # Errors
    /// [`Error::NoSpace`], after a commit and a second look, and when no chunk of metadata can be emptied either.
    pub fn promise(&self, blocks: u64) -> Result<Promise<'_, C>, Error> {
        if self.options.read_only {
            return Err(Error::ReadOnly);
        }
        // Who asks for nothing has it, though more may be promised than there is for a moment.
        if blocks > 0 && !self.space.try_promise(blocks) {
            if self.space.pending_blocks() > 0 || self.journal.outstanding() {
                self.settle_freed()?;
            }
            // What checkpoints keep beyond their reserve is for whoever needs it.
            if !self.space.try_promise(blocks) {
                self.await_retired()?;
                self.give_way()?;
                let try_promise = || {
                    let _all_is_there = self.trimming.lock();
                    self.space.try_promise(blocks)
                };
                if !try_promise() && !self.empty_until(try_promise)? {
                    return Err(Error::NoSpace);
                }
            }
        }
        Ok(Promise {
            store: self,
            blocks,
        })
    }

    /// Takes over a promise left by [`Promise::into_blocks`].
    pub fn adopt_promise(&self, blocks: u64) -> Promise<'_, C> {
        Promise {
            store: self,
            blocks,
        }
    }

    /// The reservation that was [kept](Reservation::keep).
    pub fn adopt_reservation(&self, Kept { extent, map }: Kept<C>) -> Reservation<'_, C> {
        Reservation {
            store: self,
            extent,
            map,
            taken: false,
        }
    }

    /// Reserves one run of 1 to `blocks` contiguous blocks, at `goal` if possible, out of `promise`.
    /// May commit a record of its own; the caller holds no node lock.
    ///
    /// # Errors
    /// [`Error::NoSpace`]; the error of a device, or damage, when there is free space that it keeps from being found.
    /// After a device's error the next call tries everything again.
    pub fn reserve(
        &self,
        promise: &mut Promise<'_, C>,
        blocks: u32,
        goal: Option<Block>,
    ) -> Result<Reservation<'_, C>, Error> {
        let shard = self.shard();
        let blocks = blocks.min(self.array.geometry().chunk_blocks);
        let (mut committed, mut last, mut emptied) = (false, false, 0);
        let mut tried = Tried::default();
        loop {
            if let Some(extent) = self.space.take(shard, blocks, goal, &tried) {
                // Before a device may have to return the map: what is taken and promised still is missing for others twice.
                let consumed = promise.consume(extent.len as u64);
                match self.map_of(extent) {
                    Ok(map) => {
                        return Ok(Reservation {
                            store: self,
                            extent,
                            map,
                            taken: false,
                        });
                    }
                    Err((chunk, error)) => {
                        promise.restore(consumed);
                        self.not_taken(extent, chunk, &error);
                        tried.changing(chunk, error);
                    }
                }
                continue;
            }
            let source = match last {
                true => self.last_source(shard, &mut tried),
                false => self.space.next_source(shard, &tried),
            };
            match source {
                Source::Loaded => {}
                Source::Load(chunk) => match self.load_space(chunk) {
                    Ok(()) => tried.made(chunk),
                    Err((chunks, error)) => {
                        self.space.load_from(chunks.end);
                        tried.loading(chunks, error);
                    }
                },
                Source::Convert(chunk) => {
                    let conversion = Conversion::of(&self.space, chunk);
                    match self.convert_chunk(chunk) {
                        Ok(()) => {
                            conversion.succeed();
                            tried.made(chunk);
                        }
                        Err(error) => {
                            drop(conversion);
                            let (chunks, error) = self.unmade(chunk, error)?;
                            tried.converting(chunks, error);
                        }
                    }
                }
                Source::Converting => self.space.await_conversion(),
                Source::None if !committed => {
                    committed = true;
                    self.settle_freed()?;
                    self.release_retired();
                    self.give_way()?;
                }
                Source::None if promise.blocks() > 0 && !last => last = true,
                // Others who look for the last chunks may have what was emptied.
                Source::None
                    if promise.blocks() > 0
                        && emptied < EMPTIED_MAX
                        && self.empty_until(|| self.may_lend())? =>
                {
                    emptied += 1;
                }
                Source::None => {
                    let error = tried.into_error().or_else(|| self.space.why_mapless());
                    return Err(error.unwrap_or(Error::NoSpace));
                }
            }
        }
    }

    /// Of what data leaves alone it gets a chunk for a promise that nothing else is left for, if metadata has as much room without
    /// that as cleaning is content with (`clean_up`): what it took since the promise was made may be free segments. Otherwise chunks of it are
    /// emptied until it has.
    fn last_source(&self, shard: usize, tried: &mut Tried) -> Source {
        // A checkpoint has planned with all the room there was when it began.
        let _no_checkpoint = self.checkpoint_state.lock();
        let _one_looks_and_takes = self.trimming.lock();
        tried.take_last(self.may_lend());
        self.space.next_source(shard, tried)
    }

    /// Metadata has a free chunk, and room enough without it.
    fn may_lend(&self) -> bool {
        let without_it = self.free_meta_bytes_without_one();
        self.space.free_chunks() > 0 && without_it >= self.clean_room() * 3 / 4
    }

    /// The space map that governs blocks taken just now.
    fn map_of(&self, extent: Extent) -> Result<Node<C>, (u32, Error)> {
        let geometry = self.array.geometry();
        let (chunk, _) = geometry.chunk_of(extent.block).expect("space is in chunks");
        self.load_map(chunk).map_err(|error| (chunk, error))
    }

    /// Blocks taken just now are available again when their map cannot be read now, or unusable with the rest of their
    /// chunk when it is damaged. They are promised before that.
    fn not_taken(&self, extent: Extent, chunk: u32, why: &Error) {
        if may_pass(why) {
            self.space.give(extent);
        } else {
            not_used(&(chunk..chunk + 1), why);
            self.space.unusable(chunk);
        }
    }

    /// A chunk got no map: the chunks that the same cause keeps from getting one, and that cause; or the error, if it is another.
    fn unmade(&self, chunk: u32, error: Error) -> Result<(Range<u32>, Error), Error> {
        if !matches!(error, Error::Device(_) | Error::Damaged(_)) {
            return Err(error);
        }
        let (chunks, error) = self.concerned(chunk, error);
        if !may_pass(&error) {
            tracing::error!("no data gets to chunks {chunks:?} while they are free: {error}");
            self.space.mapless(chunks.clone(), error.clone());
        }
        Ok((chunks, error))
    }

    /// Chunks whose maps cannot be had for the same cause as this one's, and that cause: the newest, if it lies in the table.
    fn concerned(&self, chunk: u32, error: Error) -> (Range<u32>, Error) {
        match self.table.unread_with(space_map_nid(chunk)) {
            Some((nids, error)) => {
                let count = self.array.geometry().chunk_count;
                let chunk_of = |nid: u64| nid.saturating_sub(SPACE_MAP_FIRST).min(count as u64);
                let chunks = chunk_of(nids.start) as u32..chunk_of(nids.end) as u32;
                (chunks, error)
            }
            None => (chunk..chunk + 1, error),
        }
    }

    /// Makes the free blocks of a data chunk available, if there are any. Otherwise tells the chunks that the same cause
    /// keeps from being loaded, and that cause; damage takes their free space away.
    fn load_space(&self, chunk: u32) -> Result<(), (Range<u32>, Error)> {
        let Err(error) = self.read_space(chunk) else {
            return Ok(());
        };
        let (chunks, error) = self.concerned(chunk, error);
        if !may_pass(&error) {
            if self.space.unloadable(chunks.clone()) == 0 {
                // One that others have retired meanwhile has no map, and that is right.
                return Ok(());
            }
            not_used(&chunks, &error);
        }
        Err((chunks, error))
    }

    fn read_space(&self, chunk: u32) -> Result<(), Error> {
        let map = self.load_map(chunk)?;
        let state = map.0.read();
        match &state.body {
            Body::Space(map) => {
                self.space.loaded(chunk, map.words());
                Ok(())
            }
            _ => Err(Error::Gone(space_map_nid(chunk))),
        }
    }

    /// Gives a free chunk a space map, in a record of its own.
    fn convert_chunk(&self, chunk: u32) -> Result<(), Error> {
        let nid = space_map_nid(chunk);
        let last_version = self.last_version(nid)?;
        // The map that was there before may be in memory without its leaf.
        self.table.prepare(nid)?;
        let mut op = self.begin(Need::Reclaim)?;
        op.create_map(chunk, last_version);
        op.commit();
        Ok(())
    }

    /// Turns data chunks without data into free ones, in records of their own; they can be
    /// used again once those are durable. No checkpoint runs meanwhile (checkpoint, invariant 5).
    pub(crate) fn retire_chunks(&self, _none_runs: &CheckpointState) {
        let mut failures = 0;
        for chunk in self.space.take_empty_chunks(64) {
            // The others will be looked at another time, and empty still.
            let retired = (failures < TRIES_MAX).then(|| self.retire_chunk(chunk));
            if matches!(retired, Some(Ok(true))) {
                continue;
            }
            self.space.unretired(chunk);
            match retired {
                Some(Err(error)) if may_pass(&error) => {
                    self.space.load_from(chunk + 1);
                    failures += 1;
                }
                Some(_) => _ = self.load_space(chunk),
                None => {}
            }
        }
        self.release_retired();
    }

    /// False when the chunk is in use again, or the journal has no room now: the checkpoint
    /// that makes room may be what calls this, so it must not wait for one.
    fn retire_chunk(&self, chunk: u32) -> Result<bool, Error> {
        let map = self.load_map(chunk)?;
        if self.journal.failed().is_some() {
            return Ok(false);
        }
        let Some(credit) = self.journal.try_credit(self.shard()) else {
            return Ok(false);
        };
        let mut op = Op::new(self, credit);
        if !op.delete_map(&map) {
            return Ok(false);
        }
        let epoch = op.commit();
        self.retired.lock().push((epoch.0, chunk));
        Ok(true)
    }

    /// Empty chunks that were on their way to the free ones are there when this returns.
    fn await_retired(&self) -> Result<(), Error> {
        // Who takes them out of what can be promised has this until they are listed.
        drop(self.checkpoint_state.lock());
        if !self.retired.lock().is_empty() {
            self.settle_freed()?;
            self.release_retired();
        }
        Ok(())
    }

    /// Chunks whose space map is durably gone become free.
    pub(crate) fn release_retired(&self) {
        let mut retired = self.retired.lock();
        if retired.is_empty() {
            return;
        }
        let settled = self.settled_epoch();
        let ready = retired.extract_if(.., |(epoch, _)| *epoch <= settled);
        let chunks: Vec<u32> = ready.map(|(_, chunk)| chunk).collect();
        drop(retired);
        self.space.chunks_freed(&chunks);
    }

    pub fn space(&self) -> SpaceInfo {
        let geometry = self.array.geometry();
        let retired = self.retired.lock().len();
        let free_blocks = self.space.free_blocks(retired as i64);
        // What the next checkpoint will take beyond the reserve.
        let soon = self.dirty.beyond_reserve() / format::BLOCK_SIZE as i64;
        let chunk_blocks = geometry.chunk_blocks as u64;
        let sparse = self.sparse_chunks() * chunk_blocks;
        let promised = self.growth_promised.load(Ordering::SeqCst);
        SpaceInfo {
            total_blocks: geometry.chunk_count as u64 * chunk_blocks,
            free_blocks: (free_blocks + sparse).saturating_sub(soon as u64),
            promised_blocks: self.space.promised_blocks().max(0) as u64,
            nodes: self.table.node_count(),
            nodes_now: self.nodes_now(),
            growth_bytes: self
                .growth_limit()
                .saturating_sub(self.metadata_about() + promised),
        }
    }

    /// Nodes that there are, made and deleted ones counted.
    pub(crate) fn nodes_now(&self) -> u64 {
        (self.nodes_opened).saturating_add_signed(self.nodes_made.exact())
    }

    /// For each chunk, whether segments of metadata lie in it.
    pub fn meta_chunks(&self) -> Vec<bool> {
        let live = self.segments.live();
        let count = self.array.geometry().chunk_count;
        (0..count).map(|chunk| live.contains_key(&chunk)).collect()
    }

    /// A run of blocks is inside the data area; fsck and readers check before use.
    pub fn is_data_extent(&self, extent: Extent) -> bool {
        let geometry = self.array.geometry();
        let last = Block(
            extent
                .block
                .0
                .saturating_add(extent.len.saturating_sub(1) as u64),
        );
        extent.len > 0
            && geometry.chunk_of(extent.block).is_some()
            && geometry.chunk_of(last).is_some()
    }
}

/// How many blocks were to be discarded, where to go on, and what came of it.
type Discarded = (u32, u32, Result<(), Error>);

/// What cannot be read for this cause may be readable later.
fn may_pass(error: &Error) -> bool {
    matches!(error, Error::Device(_))
}

fn not_used(chunks: &Range<u32>, error: &Error) {
    tracing::error!("free space of chunks {chunks:?} is not used: {error}");
}

/// The blocks of a chunk that are in a range, which counts from the first block of chunk 0.
fn part_of(range: &Range<u64>, chunk: u32, chunk_blocks: u32) -> Range<u32> {
    let first = u64::from(chunk) * u64::from(chunk_blocks);
    let place = |at: u64| at.saturating_sub(first).min(chunk_blocks.into()) as u32;
    place(range.start)..place(range.end)
}

/// Those parts of sorted chunks that make at least `least` blocks with their neighbours.
fn in_long_runs(
    parts: &[(u32, Range<u32>)],
    least: u64,
) -> impl Iterator<Item = (u32, Range<u32>)> {
    // Of a chunk with a neighbour in the range the part goes up to that.
    let runs = parts.chunk_by(|(a, _), (b, _)| a + 1 == *b);
    let blocks =
        |run: &[(u32, Range<u32>)]| -> u64 { run.iter().map(|(_, p)| p.len() as u64).sum() };
    runs.filter(move |run| blocks(run) >= least)
        .flatten()
        .cloned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreOptions;
    use crate::testing::{TestStore, format, options};
    use base::atomic::AtomicBool;
    use base::thread::{parallel, yield_now};
    use device::sim::SimDevice;
    use format::BLOCK_SIZE;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    fn open() -> Arc<TestStore> {
        open_with(options())
    }

    fn open_with(options: StoreOptions) -> Arc<TestStore> {
        let array = format(SimDevice::new(64 << 20, 1));
        TestStore::open(array, options).unwrap().0
    }

    fn next(store: &TestStore, shard: usize) -> Source {
        store.space.next_source(shard, &Tried::default())
    }

    /// Its map may have to wait for a checkpoint. Until it had one the chunk counted nowhere: promises were refused, and those who
    /// had one found nothing.
    #[test]
    fn a_chunk_that_becomes_data_is_there_for_all_who_want_blocks() {
        let store = open();
        let space = &store.space;
        store.give_way().unwrap();
        let spare = space.free_chunks() - space.reserve_chunks();
        assert_eq!(
            space.take_free_chunks(spare as usize - 1).len() as i64,
            spare - 1
        );
        // With what is there for promises that metadata took chunks of.
        let mut converting = Vec::new();
        while let Source::Convert(chunk) = next(&store, 0) {
            converting.push(chunk);
        }
        assert!(!converting.is_empty());
        assert!(matches!(next(&store, 0), Source::Converting));
        let blocks = store.promise(1).expect("a chunk is to come").into_blocks();
        let told = AtomicBool::new(false);
        let found = parallel(2, |worker| {
            if worker == 0 {
                let mut promise = store.adopt_promise(blocks);
                let reserved = store.reserve(&mut promise, 1, None).map(|r| r.extent());
                told.store(true, Ordering::SeqCst);
                return Some(reserved);
            }
            // Time enough to be told, were it not made to wait.
            for _ in 0..100_000 {
                if told.load(Ordering::SeqCst) {
                    break;
                }
                yield_now();
            }
            for chunk in &converting {
                store.convert_chunk(*chunk).unwrap();
                space.converted(*chunk);
            }
            None
        });
        let found = found[0].clone().unwrap().expect("a promise holds");
        assert!(store.is_data_extent(found));
    }

    /// On a small array the cores' leases are all chunks that there are: metadata found none although nothing was in them.
    #[test]
    fn chunks_that_cores_have_leased_go_back_to_metadata_when_nothing_is_in_them() {
        let store = open_with(StoreOptions {
            shards: 32,
            ..options()
        });
        let space = &store.space;
        store.give_way().unwrap();
        let before = (space.free_chunks(), store.growth_limit());
        let mut promise = store.promise(1).unwrap();
        let mut leased = 0;
        for shard in 0..32 {
            match next(&store, shard) {
                Source::Convert(chunk) => {
                    store.convert_chunk(chunk).unwrap();
                    space.converted(chunk);
                    assert!(matches!(next(&store, shard), Source::Loaded));
                    leased += 1;
                }
                // The others share these.
                _ => break,
            }
        }
        assert!(leased > 16, "{leased}");
        // One of them has data in it.
        let reservation = store.reserve(&mut promise, 1, None).unwrap();
        drop(promise);
        store.find_room().unwrap();
        store.sync().unwrap();
        store.release_retired();
        assert_eq!(space.free_chunks(), before.0 - 1);
        drop(reservation);
        store.find_room().unwrap();
        store.sync().unwrap();
        store.release_retired();
        assert_eq!((space.free_chunks(), store.growth_limit()), before);
    }

    /// A conversion that fails leaves a free chunk to who waits for its end, however it ends.
    #[test]
    fn who_waits_for_a_conversion_goes_on_when_it_fails() {
        let store = open();
        let space = &store.space;
        let before = (space.free_chunks(), space.unpromised());
        for panics in [false, true] {
            let Source::Convert(chunk) = next(&store, 0) else {
                panic!("there are free chunks");
            };
            let meanwhile = (space.free_chunks(), space.unpromised());
            assert_eq!(meanwhile, (before.0 - 1, before.1));
            parallel(2, |worker| match worker {
                0 => space.await_conversion(),
                _ => {
                    let conversion = Conversion::of(space, chunk);
                    let work = AssertUnwindSafe(move || {
                        let _conversion = conversion;
                        assert!(!panics, "meant to fail");
                    });
                    assert_eq!(catch_unwind(work).is_err(), panics);
                }
            });
            space.await_conversion();
            assert_eq!((space.free_chunks(), space.unpromised()), before);
        }
    }

    /// One trim of an array with many chunks in part in use left 8 KiB for each in memory until the unmount.
    #[test]
    fn a_trim_leaves_no_chunk_in_memory_that_nobody_else_has_loaded() {
        let device = SimDevice::new(64 << 20, 1);
        let array = format(Arc::clone(&device) as Arc<dyn device::BlockDevice>);
        let chunk_blocks = array.geometry().chunk_blocks;
        let (store, _) = TestStore::open(array, options()).unwrap();
        let mut promise = store.promise(4 * u64::from(chunk_blocks)).unwrap();
        let mut held = Vec::new();
        while promise.blocks() > 0 {
            let reservation = store.reserve(&mut promise, 8, None).unwrap();
            let mut op = store.begin(Need::Reclaim).unwrap();
            held.push(op.take(reservation));
            op.commit();
        }
        drop(promise);
        for extent in held.into_iter().step_by(2) {
            let mut op = store.begin(Need::Reclaim).unwrap();
            op.free(extent).unwrap();
            op.commit();
        }
        store.close().unwrap();
        drop(store);

        let array = device::Array::assemble(vec![device], false).unwrap();
        let (store, _) = TestStore::open(Arc::new(array), options()).unwrap();
        let space = &store.space;
        let before = (space.unpromised(), space.free_chunks());
        let free = u64::from(chunk_blocks) * BLOCK_SIZE as u64 * (2 + before.1 as u64);
        assert_eq!(store.trim(0..u64::MAX, 0).unwrap(), free);
        assert_eq!(space.loaded_chunks(), []);
        assert_eq!((space.unpromised(), space.free_chunks()), before);
        // What somebody has taken blocks of stays, with what else is free there.
        let mut promise = store.promise(1).unwrap();
        let reservation = store.reserve(&mut promise, 1, None).unwrap();
        let loaded = space.loaded_chunks();
        assert_eq!(loaded.len(), 1);
        store.trim(0..u64::MAX, 0).unwrap();
        assert_eq!(space.loaded_chunks(), loaded);
        drop((reservation, promise));
        // And what was taken out of memory is to be had.
        let all = 2 * u64::from(chunk_blocks);
        let mut promise = store.promise(all).unwrap();
        let mut taken = Vec::new();
        while promise.blocks() > 0 {
            taken.push(store.reserve(&mut promise, 8, None).unwrap());
        }
        assert_eq!(space.loaded_chunks().len(), 4);
    }

    #[test]
    fn neighbours_are_one_run() {
        let parts = [0, 1, 3, 5, 6, 7, 9].map(|chunk| (chunk, 0..8));
        let of = |least| -> Vec<u32> { in_long_runs(&parts, least).map(|(c, _)| c).collect() };
        assert_eq!(of(0), [0, 1, 3, 5, 6, 7, 9]);
        assert_eq!(of(8), [0, 1, 3, 5, 6, 7, 9]);
        assert_eq!(of(9), [0, 1, 5, 6, 7]);
        assert_eq!(of(16), [0, 1, 5, 6, 7]);
        assert_eq!(of(17), [5, 6, 7]);
        assert!(of(25).is_empty());
        // Cut at both ends.
        let parts = [(5, 6..8), (6, 0..8), (7, 0..1)];
        assert_eq!(in_long_runs(&parts, 11).count(), 3);
        assert_eq!(in_long_runs(&parts, 12).count(), 0);
    }

    #[test]
    fn a_range_is_a_part_of_each_chunk() {
        assert_eq!(part_of(&(0..u64::MAX), 3, 8), 0..8);
        assert_eq!(part_of(&(13..14), 1, 8), 5..6);
        assert_eq!(part_of(&(13..30), 1, 8), 5..8);
        assert_eq!(part_of(&(13..30), 3, 8), 0..6);
        assert!(part_of(&(13..30), 0, 8).is_empty() && part_of(&(13..30), 4, 8).is_empty());
        assert!(part_of(&(13..13), 1, 8).is_empty());
    }
}
