//! The content of files in a transaction (`tx/`): brought home, merged with what was staged, written to fresh blocks, and
//! named by the transaction's operation.
//!
//! Invariants:
//! 1. All of this happens under the file's exclusive I/O lock, which is held until its pages in the cache, its state and its inode agree
//!    again. Who has a state shown without that lock, `stat`, does so under the inode's, which the operation holds.
//! 2. A file is *home* when its inode says all there is: no dirty page, no pending cut, size and logged size the same. Then a page is
//!    the tail, or what its block holds, or a hole, or the inline body. A tail stays where it is, since on a full array it has no block to go
//!    to: the operation ends it where its page is cut off or written, and cuts it where the file is cut within it.
//! 3. Blocks are fresh ones only. They are written with the batch of the operation that names them, which vouches for them, or were before that
//!    began to change anything; then its batch is preceded by a flush, and no flush failed since the first was written.
//! 4. Where the file's old end lies within a page, and the file goes on behind it, that page is written anew with zeros behind that end (R16).

use super::extents::{self, CHANGES_MAX, Change, PAGE_LIMIT};
use super::file::FileState;
use super::table::StateUse;
use super::writeback::Writes;
use super::{Files, PAGE, tail};
use crate::content::inode::INLINE_DATA_MAX;
use crate::content::{AttrChange, Body, Delta, FileExtent, FsNode, Inode, TreeId};
use crate::tx::content::{Content, Page};
use crate::tx::stored::Place;
use crate::{Error, Ino, tree};
use base::atomic::Ordering;
use base::clock::Timestamp;
use base::counted::Counted;
use base::sync::{Condvar, Mutex, WriteGuard, rank};
use engine::{Epoch, Extent, NewData, Node, Op, Promise, Reservation, Slot, Store, Touched};
use format::table::LEAF_NIDS;
use format::{BLOCK_SIZE, Block, Nid};
use std::collections::BTreeSet;
use std::ops::Range;

/// Bytes of the change that puts content into an inode, beside that, at most.
const INLINE_BESIDE: usize = 32;

/// Bytes for which an operation vouches at most, and runs of blocks, as for a sync.
const VOUCHED_MAX: usize = 128 << 10;
const VOUCHED_RUNS: usize = 16;

/// Bytes of memory that a leaf of extents has, about, at most: one whose list has grown may have twice as much.
const LEAF_MEMORY: usize = extents::LEAF_MAX * size_of::<FileExtent>();
/// The inode, and an index node for leaves that are split.
const BESIDE_LEAVES: usize = 2;

/// A file whose I/O lock a transaction has.
pub(crate) struct LockedFile<'a> {
    state: &'a Counted<FileState>,
    _exclusive: WriteGuard<'a, ()>,
}

impl LockedFile<'_> {
    pub fn ino(&self) -> Ino {
        self.state.ino()
    }

    pub fn generation(&self) -> u64 {
        self.state.key.generation
    }
}

/// A use of a file for as long as a transaction commits.
pub(crate) type FileUse<'a> = StateUse<'a>;

/// Content that a transaction may put into inodes, which is logged and stays dirty with them. What finds no room in it goes to blocks, however small it is.
#[derive(Debug)]
pub(crate) struct InlineRoom(pub usize);

impl InlineRoom {
    fn take(&mut self, size: u64) -> bool {
        let left = self.0.checked_sub(size as usize + INLINE_BESIDE);
        self.0 = left.unwrap_or(self.0);
        left.is_some() || size == 0
    }
}

/// Writes of transactions to blocks that are nobody's, and so under no file's lock: who ends the file system waits for those under way.
#[derive(Debug)]
pub(super) struct Staging {
    under_way: Mutex<usize>,
    none: Condvar,
}

impl Staging {
    pub fn new() -> Staging {
        Staging {
            under_way: Mutex::new(rank::LEAF, 0),
            none: Condvar::new(),
        }
    }

    /// From now on a write is under way, until this is dropped. Whether any may be is to be looked at after that.
    fn begin(&self) -> Staged<'_> {
        *self.under_way.lock() += 1;
        Staged(self)
    }

    /// The caller has said that none may be: waits until none is.
    pub fn finish(&self) {
        let mut under_way = self.under_way.lock();
        while *under_way > 0 {
            self.none.wait(&mut under_way);
        }
    }
}

struct Staged<'a>(&'a Staging);

impl Drop for Staged<'_> {
    fn drop(&mut self) {
        let mut under_way = self.0.under_way.lock();
        *under_way -= 1;
        if *under_way == 0 {
            self.0.none.notify_all();
        }
    }
}

/// Reads a page that is in a block already.
pub(crate) type ReadStored<'a> = dyn Fn(Place, &mut [u8]) -> Result<(), Error> + 'a;

/// Pages of a file in fresh blocks that follow each other.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    pub pages: Range<u64>,
    pub block: Block,
}

/// What a file is to become.
#[derive(Debug, Default)]
pub(crate) struct Intended {
    /// What it had, and how much of that stays: nothing behind that, if it was cut.
    base: u64,
    left: u64,
    cut: bool,
    pub size: u64,
    /// All of it, if that goes into the inode.
    pub inline: Option<Vec<u8>>,
    /// Pages composed of what was staged and what the file holds, ascending.
    pub pages: Vec<(u64, Vec<u8>)>,
    /// Pages that are in blocks already, ascending.
    pub stored: Vec<(u64, Place)>,
    /// Where pages are in the end.
    placed: Vec<Placed>,
}

impl Intended {
    /// What becomes of a tail, if anything.
    fn change_of_tail(&self, inode: &Inode) -> Option<Delta> {
        let page = inode.tail.as_ref()?.page;
        let is_placed = self.placed.iter().any(|run| run.pages.contains(&page));
        match is_placed || self.inline.is_some() {
            true => Some(Delta::EndTail),
            false => tail::cut(inode, self.left),
        }
    }
}

/// Blocks of a transaction, and what of them is written with its operation, which vouches for it; the rest has been.
#[derive(Default)]
pub(crate) struct Written<'s> {
    /// Each of one file, by its place among those that were written.
    pub reservations: Vec<(usize, Reservation<'s, FsNode>)>,
    pub new: Vec<(usize, NewData)>,
}

/// What new blocks for pages of a file will change of what maps these pages now.
#[derive(Debug, Default)]
pub(crate) struct Reach {
    leaves: BTreeSet<Nid>,
    /// Pages of the node table that name the leaves.
    table_pages: BTreeSet<u64>,
    /// Those of blocks that will be free.
    chunks: BTreeSet<u32>,
    /// Pieces of them.
    freed: usize,
}

impl Reach {
    fn add(&mut self, store: &Store<FsNode>, mapped: &[FileExtent]) {
        self.freed += mapped.len();
        for extent in mapped {
            let last = Block(extent.block.0 + u64::from(extent.len).saturating_sub(1));
            let chunk = |block| store.array().geometry().chunk_of(block);
            if let (Some((first, _)), Some((last, _))) = (chunk(extent.block), chunk(last)) {
                self.chunks.extend(first..=last);
            }
        }
    }

    pub fn merge(&mut self, other: Reach) {
        self.leaves.extend(other.leaves);
        self.table_pages.extend(other.table_pages);
        self.chunks.extend(other.chunks);
        self.freed += other.freed;
    }

    /// With another one's, and the inode, a node above the leaves, and the blocks of as many runs of pages.
    pub fn touched_with(&self, other: &Reach, runs: usize) -> Touched {
        fn all<T: Ord>(one: &BTreeSet<T>, other: &BTreeSet<T>) -> usize {
            one.len() + other.iter().filter(|each| !one.contains(each)).count()
        }
        Touched {
            nodes: all(&self.leaves, &other.leaves) + BESIDE_LEAVES,
            table_pages: all(&self.table_pages, &other.table_pages) + BESIDE_LEAVES,
            chunks: all(&self.chunks, &other.chunks) + 1,
            pieces: self.freed + other.freed + runs,
            memory: LEAF_MEMORY,
        }
    }

    /// The most that so many pages reach: each is in a leaf and a chunk of its own.
    pub fn touched_most(pages: usize) -> Touched {
        Touched {
            nodes: pages + BESIDE_LEAVES,
            table_pages: pages + BESIDE_LEAVES,
            chunks: 2 * pages,
            pieces: 2 * pages,
            memory: LEAF_MEMORY,
        }
    }
}

impl Files {
    /// Adds what new blocks for these pages will change. A file that is gone has none.
    ///
    /// # Errors
    /// Those of reading what maps the pages.
    pub(crate) fn reach(
        &self,
        (ino, generation): (Ino, u64),
        pages: Range<u64>,
        reach: &mut Reach,
    ) -> Result<(), Error> {
        let content = match self.store.get(ino).and_then(Node::into_read) {
            Err(engine::Error::Gone(_)) => return Ok(()),
            content => content?,
        };
        let inode = match content.inode() {
            Ok(inode) if inode.generation == generation => inode,
            // Its number is another's.
            _ => return Ok(()),
        };
        match &inode.body {
            Body::Extents(list) => reach.add(&self.store, &extents::clip(list, &pages)),
            Body::Tree(root) => tree::walk(&self.store, root, pages.start, |content, leaf| {
                let mapped = extents::clip(content.extents()?, &pages);
                reach.leaves.insert(leaf.node.nid());
                reach.table_pages.insert(leaf.node.nid().0 / LEAF_NIDS);
                reach.add(&self.store, &mapped);
                Ok(leaf.high.is_some_and(|high| high < pages.end))
            })?,
            _ => {}
        }
        Ok(())
    }

    /// A file that is there, for as long as this is kept.
    pub(crate) fn use_for_commit(&self, ino: Ino) -> Result<FileUse<'_>, Error> {
        self.use_file(ino)
    }

    /// Locks a file for a transaction; others in the order of their numbers.
    pub(crate) fn lock_for_commit<'a>(
        &self,
        file: &'a FileUse<'_>,
    ) -> Result<LockedFile<'a>, Error> {
        let state: &'a Counted<FileState> = file;
        Ok(LockedFile {
            _exclusive: self.lock_to_change(state)?,
            state,
        })
    }

    /// Invariant 2.
    pub(crate) fn bring_home(&self, file: &LockedFile<'_>) -> Result<(), Error> {
        let state = file.state;
        if state.meta.lock().cutting {
            self.finish_cut(state)?;
        }
        let (size, logged_size, replaced) = {
            let meta = state.meta.lock();
            (meta.size, meta.logged_size, meta.replaced)
        };
        if replaced || size != logged_size || self.pages.is_dirty(state.key) {
            self.flush_locked(state)?;
        }
        let home = {
            let meta = state.meta.lock();
            meta.size == meta.logged_size && !meta.replaced && !meta.cutting
        };
        let content = state.node.read()?;
        let inode = content.inode()?;
        let cutting = inode.seldom.pending_truncate.is_some();
        match home && !cutting && !self.pages.is_dirty(state.key) {
            true => Ok(()),
            // What failed is latched; what is in the way goes when it is tried again.
            false => Err(Error::Busy),
        }
    }

    /// What a page holds of the first `left` bytes of a file that is home.
    fn page_of(&self, state: &Counted<FileState>, page: u64, left: u64) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; BLOCK_SIZE];
        let valid = left.saturating_sub(page * PAGE).min(PAGE) as usize;
        if valid > 0 {
            if !self.pages.look(state.key, page, 0, &mut bytes) {
                let loaded = self.load_pages(state, page..page + 1)?;
                bytes.copy_from_slice(&loaded);
            }
            bytes[valid..].fill(0);
        }
        Ok(bytes)
    }

    /// What a file that is home becomes by what was staged. `stored` shows pages that are in blocks already, which stay there unless all goes
    /// into the inode, which it does while there is `room`.
    pub(crate) fn intend(
        &self,
        file: &LockedFile<'_>,
        content: &Content,
        stored: &ReadStored<'_>,
        room: &mut InlineRoom,
    ) -> Result<Intended, Error> {
        let state = file.state;
        let (base, keep_extents) = {
            let meta = state.meta.lock();
            (meta.size, meta.keep_extents)
        };
        let left = content.left_of(base);
        let mut intended = Intended {
            base,
            left,
            // One to its size frees what is allocated behind it.
            cut: content.cut.is_some_and(|cut| cut <= base),
            size: content.size(base),
            ..Intended::default()
        };
        let inline = self.is_inline(state)?;
        let size = intended.size;
        let is_small = size <= INLINE_DATA_MAX as u64 && !keep_extents;
        if is_small && (inline || (left == 0 && base > 0)) && room.take(size) {
            let mut bytes = vec![0; size as usize];
            let old = self.page_of(state, 0, left)?;
            let known = (left as usize).min(bytes.len());
            bytes[..known].copy_from_slice(&old[..known]);
            content.over(0, &mut bytes, stored)?;
            intended.inline = Some(bytes);
            return Ok(intended);
        }
        let mut add = |page: u64, part: Option<&Page>| -> Result<(), Error> {
            let bytes = match part {
                Some(Page::Whole(bytes)) => bytes.to_vec(),
                Some(Page::Part(part)) => {
                    let mut bytes = self.page_of(state, page, left)?;
                    part.over(&mut bytes);
                    bytes
                }
                Some(Page::Stored(place)) => {
                    intended.stored.push((page, *place));
                    return Ok(());
                }
                None => self.page_of(state, page, left)?,
            };
            intended.pages.push((page, bytes));
            Ok(())
        };
        let mut besides = Vec::new();
        if inline && left > 0 && !content.pages.is_empty() {
            besides.push(0);
        }
        // Invariant 4.
        let last = left / PAGE;
        if !left.is_multiple_of(PAGE) && size > left && !inline {
            let mapped = self.mapped(state, last..last + 1)?;
            besides.extend(mapped.iter().any(|e| e.written).then_some(last));
        }
        besides.retain(|page| !content.pages.contains_key(page));
        for (&page, part) in &content.pages {
            while besides.first().is_some_and(|first| *first < page) {
                add(besides.remove(0), None)?;
            }
            add(page, Some(part))?;
        }
        for page in besides {
            add(page, None)?;
        }
        Ok(intended)
    }

    /// The same of a file that the transaction makes.
    pub(crate) fn intend_new(
        &self,
        content: &Content,
        stored: &ReadStored<'_>,
        room: &mut InlineRoom,
    ) -> Result<Intended, Error> {
        let size = content.size(0);
        let mut intended = Intended {
            size,
            ..Intended::default()
        };
        if size <= INLINE_DATA_MAX as u64 && room.take(size) {
            let mut bytes = vec![0; size as usize];
            content.over(0, &mut bytes, stored)?;
            intended.inline = Some(bytes);
            return Ok(intended);
        }
        for (&page, part) in &content.pages {
            let mut bytes = vec![0; BLOCK_SIZE];
            match part {
                Page::Whole(whole) => bytes.copy_from_slice(whole),
                Page::Part(part) => part.over(&mut bytes),
                Page::Stored(place) => {
                    intended.stored.push((page, *place));
                    continue;
                }
            }
            intended.pages.push((page, bytes));
        }
        Ok(intended)
    }

    /// Writes the pages of all files to fresh blocks, as one batch, and notes where they and those that are stored are. Few are left to
    /// the operation that follows.
    pub(crate) fn write_intended<'s>(
        &'s self,
        promise: &mut Promise<'_, FsNode>,
        files: &mut [(Ino, Intended)],
    ) -> Result<Written<'s>, Error> {
        let total: usize = files.iter().map(|(_, file)| file.pages.len()).sum();
        let mut written = Written::default();
        let mut data = self.memory.take(total * BLOCK_SIZE);
        let pages = files.iter().flat_map(|(_, file)| &file.pages);
        for ((_, bytes), out) in pages.zip(data.chunks_mut(BLOCK_SIZE)) {
            out.copy_from_slice(bytes);
        }
        let mut blocks = Vec::with_capacity(total);
        let mut run: Option<Reservation<'s, FsNode>> = None;
        for (place, (_, file)) in files.iter().enumerate() {
            let mut left = file.pages.len() as u32;
            while left > 0 {
                let mut rest = match run.take().filter(|run| run.extent().len > 0) {
                    Some(rest) => rest,
                    None => {
                        let want = (total - blocks.len()).min(u32::MAX as usize) as u32;
                        self.store.reserve(promise, want, None)?
                    }
                };
                let piece = rest.split_off(left.min(rest.extent().len));
                let Extent { block, len } = piece.extent();
                blocks.extend((0..u64::from(len)).map(|i| Block(block.0 + i)));
                written.reservations.push((place, piece));
                left -= len;
                run = Some(rest);
            }
        }
        let (mut at, mut pieces) = (0, Vec::new());
        for (place, (_, file)) in files.iter_mut().enumerate() {
            let first = at;
            at += file.pages.len();
            let new = file.pages.iter().map(|(page, _)| *page);
            let old = file.stored.iter().map(|(page, place)| (*page, place.0));
            let mut all: Vec<(u64, Block)> = new.zip(blocks[first..at].iter().copied()).collect();
            all.extend(old);
            all.sort_unstable();
            for (page, block) in all {
                note_placed(&mut file.placed, page, block);
            }
            let runs = blocks[first..at].chunk_by(|a, b| a.0 + 1 == b.0);
            let mut from = first;
            for run in runs {
                let blocks = Extent {
                    block: run[0],
                    len: run.len() as u32,
                };
                pieces.push((place, blocks, from * BLOCK_SIZE));
                from += run.len();
            }
        }
        if total == 0 {
            return Ok(written);
        }
        let little = data.len() <= VOUCHED_MAX && pieces.len() <= VOUCHED_RUNS;
        if little && self.store.may_vouch() {
            let memory = data.into_shared(&self.memory);
            let new = |(place, blocks, at)| {
                let memory = std::sync::Arc::clone(&memory);
                (place, NewData::new(blocks, memory, at))
            };
            written.new = pieces.into_iter().map(new).collect();
            return Ok(written);
        }
        let mut writes = Writes::new(&data);
        let runs = written.reservations.iter().map(|(_, run)| run.extent());
        writes.add(0, runs.map(|run| (run.block, u64::from(run.len))));
        let _counted = self.staging.begin();
        self.write_at_once(writes)?;
        Ok(written)
    }

    /// Writes whole pages to fresh blocks, which follow each other, before a transaction commits: as many as one run of blocks has.
    pub(crate) fn write_staged<'s>(
        &'s self,
        promise: &mut Promise<'_, FsNode>,
        pages: &[&[u8]],
    ) -> Result<Reservation<'s, FsNode>, Error> {
        let reservation = self.store.reserve(promise, pages.len() as u32, None)?;
        let Extent { block, len } = reservation.extent();
        let mut data = self.memory.take(len as usize * BLOCK_SIZE);
        for (page, out) in pages.iter().zip(data.chunks_mut(BLOCK_SIZE)) {
            out.copy_from_slice(page);
        }
        let mut writes = Writes::new(&data);
        writes.add(0, [(block, u64::from(len))]);
        let _counted = self.staging.begin();
        self.write_out(writes)?;
        Ok(reservation)
    }

    /// Writes a page again to the block where it was written so.
    pub(crate) fn write_staged_again(&self, block: Block, page: &[u8]) -> Result<(), Error> {
        let mut data = self.memory.take(BLOCK_SIZE);
        data.copy_from_slice(page);
        let mut writes = Writes::new(&data);
        writes.add(0, [(block, 1)]);
        let _counted = self.staging.begin();
        self.write_out(writes)
    }

    /// An operation has committed that writes this.
    pub(crate) fn left_to_commit(&self, written: &Written<'_>) {
        let bytes = written
            .new
            .iter()
            .map(|(_, data)| data.bytes().len() as u64);
        (self.counts.data_bytes).fetch_add(bytes.sum(), Ordering::Relaxed);
    }

    /// Fails when a flush failed since `before` (invariant 3). The operation has begun: one that fails from here on finds it.
    pub(crate) fn check_written(&self, before: Option<u64>) -> Result<(), Error> {
        match before {
            Some(before) if self.flush_failed_since(before) => Err(Error::TransactionNotWritten),
            _ => Ok(()),
        }
    }

    /// Makes a file what is intended within an operation that holds its inode exclusively and can be undone. Returns the change of its
    /// attributes, which is to be applied.
    pub(crate) fn change_content(
        &self,
        op: &mut Op<'_, FsNode>,
        slot: Slot,
        intended: &Intended,
        now: Option<Timestamp>,
    ) -> Result<AttrChange, Error> {
        let inode = op.peek(slot).inode()?;
        if inode.seldom.pending_truncate.is_some() {
            return Err(Error::Busy);
        }
        if let Some(change) = intended.change_of_tail(inode) {
            op.apply(slot, change);
        }
        let inode = op.peek(slot).inode()?;
        let mut blocks = inode.blocks as i64;
        let inline = matches!(inode.body, Body::Inline(_));
        if intended.cut || (intended.inline.is_some() && !inline) {
            blocks -= self.cut_in(op, slot, intended.left)? as i64;
        }
        if let Some(bytes) = &intended.inline {
            op.apply(slot, Delta::Body(Body::Inline(bytes.clone())));
        } else {
            blocks += self.map_in(op, slot, &intended.placed)?;
        }
        Ok(AttrChange {
            size: Some(intended.size),
            blocks: Some(blocks.max(0) as u64),
            mtime: now,
            ..AttrChange::default()
        })
    }

    /// Takes everything from byte `left` on away from a file; returns the blocks freed.
    fn cut_in(&self, op: &mut Op<'_, FsNode>, slot: Slot, left: u64) -> Result<u64, Error> {
        let mut freed = 0;
        loop {
            let step = extents::plan_cut(op, slot, left.div_ceil(PAGE))?;
            let done = step.done;
            freed += step.freed;
            step.apply(op);
            if op.is_excessive() {
                return Err(Error::TransactionTooLarge);
            }
            if done {
                break;
            }
        }
        match &op.peek(slot).inode()?.body {
            Body::Inline(bytes) if bytes.len() as u64 > left => {
                op.apply(slot, Delta::InlineLen(left as u32));
            }
            Body::Extents(_) if left == 0 => {
                op.apply(slot, Delta::Body(Body::Inline(Vec::new())));
            }
            _ => {}
        }
        Ok(freed)
    }

    /// Maps pages to blocks; returns how many blocks more the file has.
    fn map_in(&self, op: &mut Op<'_, FsNode>, slot: Slot, placed: &[Placed]) -> Result<i64, Error> {
        let mut gained = 0;
        let mut rest: Vec<Placed> = placed.iter().rev().cloned().collect();
        while let Some(first) = rest.last() {
            let start = first.pages.start;
            let bound = match &op.peek(slot).inode()?.body {
                Body::Tree(_) => tree::high_in(op, slot, TreeId::Body, start)?,
                _ => None,
            };
            let bound = bound.unwrap_or(PAGE_LIMIT);
            let mut changes = Vec::new();
            while changes.len() < CHANGES_MAX
                && let Some(next) = rest.pop_if(|next| next.pages.start < bound)
            {
                let Range { start, end } = next.pages;
                let here = end.min(bound);
                if here < end {
                    rest.push(Placed {
                        pages: here..end,
                        block: Block(next.block.0 + (here - start)),
                    });
                }
                changes.push(Change {
                    pages: start..here,
                    with: vec![FileExtent {
                        page: start,
                        block: next.block,
                        len: (here - start) as u32,
                        written: true,
                    }],
                    same_blocks: false,
                });
            }
            let plan = extents::plan(op.store(), op, slot, changes)?;
            gained += plan.gained();
            plan.apply(op);
            if op.is_excessive() {
                return Err(Error::TransactionTooLarge);
            }
        }
        Ok(gained)
    }

    /// The newest stamp that a file was shown with, as far as its state knows.
    pub(crate) fn looked_at(&self, file: &LockedFile<'_>) -> crate::times::Stamp {
        file.state.meta.lock().looked
    }

    /// The file is what was intended from when the operation commits, which it does next (invariant 1).
    pub(crate) fn content_changed(&self, file: &LockedFile<'_>, intended: &Intended) {
        let mut meta = file.state.meta.lock();
        (meta.size, meta.logged_size) = (intended.size, intended.size);
        meta.persisted_ns = self.now_ns();
        if intended.size == 0 {
            meta.keep_extents = false;
        }
        if !meta.is_ahead() {
            meta.ahead_since_ns = None;
        }
    }

    /// The operation has committed: the cache has nothing of what was there before (invariant 1), but what is there now.
    pub(crate) fn content_logged(&self, file: &LockedFile<'_>, intended: &Intended, epoch: Epoch) {
        let (state, key) = (file.state, file.state.key);
        if intended.cut {
            let pages = intended.left / PAGE..intended.base.div_ceil(PAGE);
            self.pages
                .invalidate(key, pages.start..pages.end.max(pages.start));
        }
        if intended.inline.is_some() {
            self.pages.invalidate(key, 0..1);
        }
        for placed in &intended.placed {
            self.pages.invalidate(key, placed.pages.clone());
        }
        for (page, bytes) in &intended.pages {
            self.pages.keep(key, *page, bytes);
        }
        let mut meta = state.meta.lock();
        meta.changed = meta.changed.max(epoch);
        meta.times_changed();
    }
}

/// Adds a page that is in this block.
fn note_placed(placed: &mut Vec<Placed>, page: u64, block: Block) {
    match placed.last_mut() {
        Some(last)
            if last.pages.end == page
                && last.block.0 + (last.pages.end - last.pages.start) == block.0 =>
        {
            last.pages.end += 1;
        }
        _ => placed.push(Placed {
            pages: page..page + 1,
            block,
        }),
    }
}
