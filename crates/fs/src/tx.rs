//! Transactions: changes of many files that are made in one step, or not at all.
//!
//! ```text
//! stage: steps on names and attributes ─┐                       ┌─► all nodes, in one operation ─► one batch
//!        pages over files               ├─► commit: locks, looks again ┤
//!        what it relied on              ┘                       └─► all pages, to fresh blocks before that
//! ```
//!
//! Invariants ([decision 0028](../../../docs/decisions/0028-transactions-are-one-large-operation.md)):
//! 1. Until the commit nothing is changed that anybody else could see, and all that is reserved goes back when the transaction is
//!    dropped: promised blocks, blocks written already, numbers of inodes.
//! 2. What it relied on is kept: each name that was looked at with what it meant before the transaction, and the change time of each file and
//!    directory that it has read. The commit looks at all of it again, under the locks, before its first change; and as it makes an inode at which the
//!    transaction has looked, whether that gets from its directory what it was seen to get ([`Gets`]).
//! 3. Steps are carried out in their order on the real nodes ([`carry`]). Since all names mean what they meant, and no step failed when it
//!    was staged on that, one that fails then met a change by others that no name shows: that is a conflict, too.
//! 4. A page that was staged has a promised block, or one that is reserved.
//! 5. Content changes by [`Transaction::edit`], which counts.

pub(crate) mod atomic;
mod carry;
mod commit;
pub(crate) mod content;
mod names;
pub(crate) mod stored;

use crate::Error;
use crate::acl::{ACCESS, Inherited};
use crate::api::{Attr, Caller, Ino, SetAttr};
use crate::attr::{attr_change, without_privileges};
use crate::content::{FsNode, Inode, Xattr};
use crate::data::{OpenFile, SIZE_MAX};
use crate::filesystem::FileSystem;
use crate::xattr::{CAPABILITY, Space, XATTR_CREATE, XATTR_REPLACE, check_space, space_of};
use base::clock::Timestamp;
use content::{Content, Counts, Page};
use engine::{Extensive, Extent, FreshNid, Growth, Promise};
use format::xattr::VALUE_MAX;
use format::{BLOCK_SIZE, Block};
use names::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use stored::{Place, Stored};

const PAGE: u64 = BLOCK_SIZE as u64;
/// Bytes of staged whole pages in memory, at most: what is more is written to its blocks.
const MEMORY_MAX: usize = 8 << 20;
/// Pages that are written so at once, at most.
const STORED_AT_ONCE: usize = 1024;
/// Tries of [`FileSystem::transact`].
const TRIES: u32 = 64;

/// What steps are expected to log, and to leave dirty: if it is more in the end, the commit begins anew with what it is.
const STEP_LOGGED: usize = 80;
const STEP_DIRTY: usize = 256;
const INODE_LOGGED: usize = 80;
const INODE_DIRTY: usize = 1024;
const RUN_LOGGED: usize = 64;
/// Attributes and times of a file whose content changes.
const FILE_LOGGED: usize = 96;
/// Bytes of pages that were written in part, and stay in memory.
const PARTS_MAX: usize = 64 << 20;

fn memory_max() -> usize {
    base::tight::limit(MEMORY_MAX, 4 * BLOCK_SIZE)
}

/// A step on names and attributes.
#[derive(Clone, Debug)]
enum Step {
    Make {
        dir: Ino,
        name: Box<[u8]>,
        ino: Ino,
        mode: u32,
        rdev: u32,
        body: Box<[u8]>,
    },
    Link {
        ino: Ino,
        dir: Ino,
        name: Box<[u8]>,
    },
    Remove {
        dir: Ino,
        name: Box<[u8]>,
        victim: Ino,
        directory: bool,
    },
    Rename {
        from: (Ino, Box<[u8]>),
        to: (Ino, Box<[u8]>),
        source: Ino,
        target: Option<Ino>,
        exchange: bool,
    },
    SetAttr(Ino, SetAttr),
    SetXattr {
        ino: Ino,
        name: Box<[u8]>,
        value: Box<[u8]>,
    },
    RemoveXattr(Ino, Box<[u8]>),
}

/// What a new inode's directory and the caller make of it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Gets {
    mode: u32,
    gid: u32,
    lists: Vec<Xattr>,
}

impl Gets {
    fn new(inode: &Inode, lists: &Inherited) -> Gets {
        Gets {
            mode: inode.mode,
            gid: inode.gid,
            lists: lists.attributes().to_vec(),
        }
    }
}

/// An inode that a transaction has to do with.
struct Staged<'fs> {
    generation: u64,
    /// The inode as the transaction found or made it, with changes of attributes, links and parent since; its content and
    /// its names are elsewhere. One that it makes has the lists here that it gets from its directory as that is now.
    model: Box<Inode>,
    /// Attributes that were set.
    set: SetAttr,
    /// Of one that the transaction makes.
    fresh: Option<FreshNid<'fs, FsNode>>,
    /// What that one gets from its directory, and whether somebody has looked at it.
    gets: Gets,
    has_looked: bool,
    content: Content,
    /// For reading what the file holds.
    handle: Option<Arc<OpenFile>>,
    /// Its change time when the model was made.
    known: Option<Timestamp>,
    /// Its change time when it was first read.
    looked: Option<Timestamp>,
    xattrs: BTreeMap<Box<[u8]>, Option<Box<[u8]>>>,
    /// Capabilities that it has, or was given before, go with a step on its attributes. Their name counts all the same among those that can be listed.
    loses_capability: bool,
    /// It may lose its last name.
    unlinked: bool,
    /// Blocks for pages that have to be written besides are promised, or none has to.
    has_besides: bool,
    /// What a change of content takes away is taken, and no later step gives it back.
    is_stripped: bool,
}

/// Changes of any number of files and directories that [`commit`](Transaction::commit) makes in one step: a crash, and whoever
/// looks meanwhile, finds all of them or none. Made by [`FileSystem::transaction`]. Calls within it see what it has staged.
///
/// Isolation: a commit fails with [`Error::Conflict`], and has done nothing, if meanwhile a name means something else that the transaction has
/// looked up, made or removed (that it is missing counts), or if a file or directory has changed that it has read, by
/// [`read`](Self::read), [`getattr`](Self::getattr), [`list`](Self::list) or [`getxattr`](Self::getxattr), other transactions' changes
/// and single calls' alike; or if a new inode that it has looked at would get another mode, group or list from its directory than it was seen to get. So transactions that commit could have run one after the other. What was only written was relied on by nobody: of two that write the same
/// bytes the later commit wins. Reads within a transaction are not of one moment; who acted on two moments does not commit.
///
/// Limits: data without gaps as much as there is free space. Room for it, and for names and attributes, is found when they are staged ([`Error::NoSpace`]), and kept until the commit. Changes of names and attributes count about 200 bytes each, and
/// runs of pages some 60, with 100 more for the first in a file that was there before; access lists that new inodes get from their directory count besides, and content of up to 2 KiB goes to a block where the
/// inode has no room within the limits: together at most 4 MiB, or about a sixth of the journal if that is less; and what they leave dirty is bounded by the array's size: 2,800 creates
/// or 9,000 scattered pages fit one of 256 MiB, 20,000 or 65,000 one of 2 GiB and more ([`Error::TransactionTooLarge`]; such a transaction can only be
/// dropped). Access control lists cannot be set.
///
/// Memory, which no limit of the file system's includes ([`FsOptions::with_memory`](crate::FsOptions::with_memory)), and each transaction has of its own: 8 MiB of whole pages and a call's, 64 MiB of pages that were
/// written in part, a few bytes or 4 KiB alike, and some hundred bytes for each step and inode. A commit has what is left of the pages up to three times.
///
/// Dropped without a commit it leaves nothing.
#[must_use = "dropped without a commit it changes nothing"]
pub struct Transaction<'fs> {
    fs: &'fs FileSystem,
    who: Caller,
    steps: Vec<Step>,
    names: BTreeMap<Ino, BTreeMap<Box<[u8]>, Entry>>,
    inodes: BTreeMap<Ino, Staged<'fs>>,
    /// Blocks for staged pages that have none yet.
    promise: Promise<'fs, FsNode>,
    /// Room for what staged steps make metadata grow.
    growth: Growth<'fs, FsNode>,
    stored: Stored<'fs>,
    /// Of all files. Each page in memory has a promised block.
    counts: Counts,
    /// Files with whole pages in memory.
    with_whole: BTreeSet<Ino>,
    /// Blocks that are promised for pages that have to be written besides.
    besides: u64,
    expected: Extensive,
    /// A call has failed that had staged a part already: there is nothing to commit.
    broken: Option<Error>,
}

impl std::fmt::Debug for Transaction<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transaction")
            .field("steps", &self.steps.len())
            .field("inodes", &self.inodes.len())
            .finish_non_exhaustive()
    }
}

impl FileSystem {
    /// Begins a transaction on behalf of a caller. Nothing is locked until it commits.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], or what turned the file system read-only.
    pub fn transaction(&self, who: &Caller) -> Result<Transaction<'_>, Error> {
        self.files.check_writable()?;
        Ok(Transaction {
            fs: self,
            who: *who,
            steps: Vec::new(),
            names: BTreeMap::new(),
            inodes: BTreeMap::new(),
            promise: self.store.adopt_promise(0),
            growth: self.store.growth(),
            stored: Stored::default(),
            counts: Counts::default(),
            with_whole: BTreeSet::new(),
            besides: 0,
            expected: Extensive::default(),
            broken: None,
        })
    }

    /// Stages a transaction by `body` and commits it, durably; again from the start, with a new one, as long as the outcome is a
    /// conflict, up to 64 times. An error of `body` is a conflict, too, if what it relied on up to then has changed: it may have seen two moments.
    ///
    /// # Errors
    /// Those of `body` and of [`Transaction::commit`]; [`Error::Conflict`] if each try met one.
    pub fn transact<T>(
        &self,
        who: &Caller,
        mut body: impl FnMut(&mut Transaction<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut tries = TRIES;
        loop {
            tries -= 1;
            let mut transaction = self.transaction(who)?;
            let outcome = match body(&mut transaction) {
                Ok(value) => transaction.commit().map(|()| value),
                Err(Error::Conflict(what)) => Err(Error::Conflict(what)),
                Err(error) => Err(match transaction.look_back() {
                    Err(Error::Conflict(what)) => Error::Conflict(what),
                    _ => error,
                }),
            };
            match outcome {
                Err(Error::Conflict(_)) if tries > 0 => {}
                outcome => return outcome,
            }
        }
    }
}

impl<'fs> Transaction<'fs> {
    /// Writes at `offset`, all of `data`: in memory, or, when there is much, to blocks that are nobody else's. As by any change of a content,
    /// a caller without privileges takes set-id bits and capabilities away with it.
    ///
    /// # Errors
    /// [`Error::NoSpace`], with nothing staged of this call: the transaction goes on, and can be committed, with exactly what was staged before. But a call of more than 8 MiB may be
    /// staged in part, and what goes to blocks may find no room there after all: then [`commit`](Self::commit) fails with that error, and the transaction can only be dropped. Those of a file that is
    /// not there or is none. [`Error::TransactionTooLarge`] also when there are more than 64 MiB of pages that were written in part.
    pub fn write(&mut self, ino: Ino, offset: u64, data: &[u8]) -> Result<(), Error> {
        if data.is_empty() {
            return Ok(());
        }
        let end = offset.checked_add(data.len() as u64);
        let end = end.filter(|end| *end <= SIZE_MAX);
        let bytes = offset..end.ok_or(Error::FileTooLarge)?;
        // Nothing is written any more once the file system has failed, or is closed.
        self.fs.files.check_writable()?;
        self.file(ino)?;
        let mut at = bytes.start;
        while at < bytes.end {
            // As much as memory takes at once.
            let stop = (at / PAGE * PAGE + memory_max() as u64).min(bytes.end);
            let part = &data[(at - offset) as usize..(stop - offset) as usize];
            if let Err(error) = self.write_part(ino, at, part) {
                if at > bytes.start {
                    // It is staged in part.
                    self.broken.get_or_insert_with(|| error.clone());
                }
                return Err(error);
            }
            at = stop;
        }
        self.strip(ino)
    }

    /// The content changes: of a caller without privileges, set-id bits and capabilities go, as they are when the transaction commits.
    fn strip(&mut self, ino: Ino) -> Result<(), Error> {
        let staged = &self.inodes[&ino];
        // Nobody else gives these to a file that nobody knows of yet.
        let has_none = staged.fresh.is_some()
            && without_privileges(staged.model.mode, true) == staged.model.mode
            && !staged.xattrs.contains_key(CAPABILITY);
        if self.who.privileged || staged.is_stripped || has_none {
            return Ok(());
        }
        self.stage_attributes(ino, SetAttr::STRIP)?;
        let staged = self.inodes.get_mut(&ino).expect("it was looked up");
        staged.is_stripped = true;
        Ok(())
    }

    fn write_part(&mut self, ino: Ino, offset: u64, data: &[u8]) -> Result<(), Error> {
        let bytes = offset..offset + data.len() as u64;
        let pages = bytes.start / PAGE..bytes.end.div_ceil(PAGE);
        let staged = &self.inodes[&ino].content.pages;
        // Together with the page before.
        let is_run = (staged.range(pages.start.saturating_sub(1)..pages.end))
            .next()
            .is_none();
        self.make_ready(ino, pages, &bytes)?;
        let staged = &self.inodes[&ino];
        let is_first = staged.fresh.is_none() && !staged.content.is_changed();
        self.edit(ino, |content| content.write(offset, data));
        if is_first {
            self.expect(FILE_LOGGED, INODE_DIRTY)?;
        }
        if is_run {
            self.expect(RUN_LOGGED, RUN_LOGGED)?;
        }
        let mut stored = Ok(());
        if self.counts.whole * BLOCK_SIZE > memory_max() {
            stored = self.store_whole();
        }
        let parts = self.counts.in_memory - self.counts.whole;
        if stored.is_ok() && parts * BLOCK_SIZE > PARTS_MAX {
            stored = Err(Error::TransactionTooLarge);
        }
        stored.inspect_err(|error| {
            self.broken.get_or_insert_with(|| error.clone());
        })?;
        self.expect(0, 0)
    }

    /// Changes a file's content, and counts what that makes of its pages.
    fn edit<R>(&mut self, ino: Ino, change: impl FnOnce(&mut Content) -> R) -> R {
        let content = &mut self.inodes.get_mut(&ino).expect("it was looked up").content;
        let before = content.counts();
        let result = change(content);
        let after = content.counts();
        self.counts.change(before, after);
        match after.whole > 0 {
            true => self.with_whole.insert(ino),
            false => self.with_whole.remove(&ino),
        };
        result
    }

    /// Promises blocks for pages that are about to be written, and takes those back to memory that are stored and are written in part. What a stored
    /// page that changes was in is promised again: it takes no more space than before.
    fn make_ready(&mut self, ino: Ino, pages: Range<u64>, bytes: &Range<u64>) -> Result<(), Error> {
        let here = self.inodes[&ino].content.pages.range(pages.clone());
        let more = (pages.end - pages.start) as usize - here.count();
        self.promise_for(ino, self.counts.in_memory + more)?;
        for page in [pages.start, pages.end - 1] {
            let whole = bytes.start <= page * PAGE && (page + 1) * PAGE <= bytes.end;
            let staged = self.inodes[&ino].content.pages.get(&page);
            if let (Some(place), false) = (staged.and_then(Page::place), whole) {
                let mut copy = vec![0; BLOCK_SIZE];
                self.stored.read(&self.fs.store, place, &mut copy)?;
                let copy = Page::Whole(copy.into());
                self.edit(ino, |content| content.set(page, Some(copy)));
                self.promise_again(place);
            }
        }
        // Those that are written whole count as new.
        let here = self.inodes[&ino].content.pages.range(pages);
        let gone: Vec<(u64, Place)> = here
            .filter_map(|(number, page)| Some((*number, page.place()?)))
            .collect();
        for (page, place) in gone {
            self.edit(ino, |content| content.set(page, None));
            self.promise_again(place);
        }
        Ok(())
    }

    /// The page of a block is in memory again, or is about to be.
    fn promise_again(&mut self, place: Place) {
        if let Some(block) = self.stored.forget(place) {
            self.promise.take_back(block);
        }
    }

    /// Promises blocks for so many pages in memory, when a file is about to be changed.
    fn promise_for(&mut self, ino: Ino, in_memory: usize) -> Result<(), Error> {
        // The file's last page, and what lies in its inode, may have to be written besides.
        let besides = match self.inodes[&ino].has_besides {
            true => self.besides,
            false => self.besides + 2,
        };
        let wanted = in_memory as u64 + besides;
        self.promise_more(wanted.saturating_sub(self.promise.blocks()))?;
        self.besides = besides;
        let staged = self.inodes.get_mut(&ino).expect("it was looked up");
        staged.has_besides = true;
        Ok(())
    }

    fn promise_more(&mut self, blocks: u64) -> Result<(), Error> {
        if blocks > 0 {
            self.fs.store.accept(self.expected().dirty as u64)?;
        }
        let more = self.fs.store.promise(blocks)?.into_blocks();
        let none = self.fs.store.adopt_promise(0);
        let had = std::mem::replace(&mut self.promise, none).into_blocks();
        self.promise = self.fs.store.adopt_promise(had + more);
        Ok(())
    }

    /// Writes the whole pages that are in memory to blocks, all files' together: few have many.
    fn store_whole(&mut self) -> Result<(), Error> {
        let mut all = Vec::new();
        for ino in &self.with_whole {
            let whole = self.inodes[ino].content.whole();
            all.extend(whole.map(|number| (*ino, number)));
        }
        let mut rest = &all[..];
        while !rest.is_empty() {
            let most = rest.len().min(STORED_AT_ONCE);
            let bytes = |(ino, number): &(Ino, u64)| match &self.inodes[ino].content.pages[number] {
                Page::Whole(bytes) => &bytes[..],
                _ => unreachable!("only whole ones were picked"),
            };
            let bytes: Vec<&[u8]> = rest[..most].iter().map(bytes).collect();
            self.stored.begin(&self.fs.store);
            let run = self.fs.files.write_staged(&mut self.promise, &bytes)?;
            let Extent { block, len } = run.extent();
            self.stored.add(run);
            let (now, later) = rest.split_at(len as usize);
            for (block, (ino, number)) in (block.0..).zip(now) {
                let page = Page::Stored(Place(Block(block)));
                self.edit(*ino, |content| content.set(*number, Some(page)));
            }
            rest = later;
        }
        Ok(())
    }

    /// Reads up to `buf.len()` bytes at `offset`, with what was staged; fewer only at the end of the file. The transaction relies on the file
    /// from then on.
    pub fn read(&mut self, ino: Ino, offset: u64, buf: &mut [u8]) -> Result<usize, Error> {
        self.file(ino)?;
        let base = self.look(ino)?.size;
        let fs = self.fs;
        let staged = self.inodes.get_mut(&ino).expect("it was looked up");
        let size = staged.content.size(base);
        if offset >= size {
            return Ok(0);
        }
        let len = buf.len().min((size - offset) as usize);
        let buf = &mut buf[..len];
        buf.fill(0);
        let left = staged.content.left_of(base);
        if offset < left {
            if staged.handle.is_none() {
                staged.handle = Some(fs.open_file(ino, libc::O_RDONLY)?);
            }
            let known = ((left - offset) as usize).min(len);
            if let Some(file) = &staged.handle {
                fs.read(file, offset, &mut buf[..known])?;
            }
        }
        let stored = &self.stored;
        (staged.content).over(offset, buf, |place, out| stored.read(&fs.store, place, out))?;
        Ok(len)
    }

    /// Sets a file's size; what is added reads as zeros. A cut takes no space.
    pub fn truncate(&mut self, ino: Ino, size: u64) -> Result<(), Error> {
        if size > SIZE_MAX {
            return Err(Error::FileTooLarge);
        }
        // It may write to a block of the transaction's.
        self.fs.files.check_writable()?;
        self.file(ino)?;
        let staged = &self.inodes[&ino];
        let is_first = staged.content.cut.is_none();
        // A cut takes no block, so that a full array can be emptied.
        if size > staged.content.left_of(staged.model.size) {
            self.promise_for(ino, self.counts.in_memory)?;
        }
        if is_first {
            self.expect(STEP_LOGGED, STEP_DIRTY)?;
        }
        // The last that can fail and leave all as it was: it changes what is staged.
        self.cut_stored(ino, size)?;
        let gone = self.edit(ino, |content| content.truncate(size));
        for place in gone.values().filter_map(Page::place) {
            drop(self.stored.forget(place));
        }
        self.strip(ino)
    }

    /// A file is about to be cut within a page that is stored, if it is: what lies behind the cut becomes zeros where it is, which takes no other block.
    fn cut_stored(&mut self, ino: Ino, size: u64) -> Result<(), Error> {
        let within = (size % PAGE) as usize;
        let page = self.inodes[&ino].content.pages.get(&(size / PAGE));
        let Some(place) = page.and_then(Page::place).filter(|_| within > 0) else {
            return Ok(());
        };
        let mut bytes = vec![0; BLOCK_SIZE];
        self.stored.read(&self.fs.store, place, &mut bytes)?;
        bytes[within..].fill(0);
        let written = self.fs.files.write_staged_again(place.0, &bytes);
        written.inspect_err(|error| {
            // The block may hold a part of each.
            self.broken.get_or_insert_with(|| error.clone());
        })
    }

    /// What `stat` would show, with what was staged but for blocks and times. The transaction relies on it from then on.
    pub fn getattr(&mut self, ino: Ino) -> Result<Attr, Error> {
        self.inode(ino)?;
        let mut attr = self.look_at_model(ino)?;
        let names = self.names_gained(ino);
        let staged = &self.inodes[&ino];
        let model = &staged.model;
        attr.mode = model.mode;
        (attr.uid, attr.gid) = (model.uid, model.gid);
        if model.is_dir() {
            attr.nlink = attr.nlink.saturating_add_signed(names.1);
        } else {
            attr.nlink = model.nlink;
        }
        if model.is_file() {
            attr.size = staged.content.size(attr.size);
        }
        if let Some(crate::SetTime::At(time)) = staged.set.mtime
            && !staged.content.is_newer
        {
            attr.mtime = time;
        }
        if let Some(crate::SetTime::At(time)) = staged.set.atime {
            attr.atime = time;
        }
        Ok(attr)
    }

    /// Changes attributes; a new size as by [`truncate`](Self::truncate).
    ///
    /// # Errors
    /// [`Error::NoSpace`], with nothing staged, on an array on which metadata can hardly grow any more; never where privileges are only taken away.
    pub fn setattr(&mut self, ino: Ino, set: &SetAttr) -> Result<(), Error> {
        self.inode(ino)?;
        let rest = set.without_size();
        if rest != SetAttr::default() && rest != SetAttr::STRIP {
            // First: who is refused has no new size staged.
            self.fs.store.accept(self.expected().dirty as u64)?;
        }
        if let Some(size) = set.size {
            self.truncate(ino, size)?;
        }
        match rest == SetAttr::default() {
            true => Ok(()),
            false => self.stage_attributes(ino, rest),
        }
    }

    /// Stages a change of all but the size. What it adds was accepted.
    fn stage_attributes(&mut self, ino: Ino, set: SetAttr) -> Result<(), Error> {
        let now = self.fs.times.now();
        let staged = self.inodes.get_mut(&ino).expect("it was looked up");
        let change = attr_change(&self.who, &staged.model, &set, now);
        let model = &mut staged.model;
        if let (Some(mode), Some(_)) = (set.mode, &staged.fresh) {
            crate::acl::chmod_in(model, mode)?;
        }
        model.mode = change.mode.unwrap_or(model.mode);
        model.uid = change.uid.unwrap_or(model.uid);
        model.gid = change.gid.unwrap_or(model.gid);
        staged.is_stripped &= set.mode.is_none();
        let takes = set.uid.is_some() || set.gid.is_some() || set.kill_suidgid;
        staged.loses_capability |= takes && model.is_file();
        staged.set.mode = set.mode.or(staged.set.mode);
        staged.set.atime = set.atime.or(staged.set.atime);
        if set.mtime.is_some() {
            staged.set.mtime = set.mtime;
            staged.content.is_newer = false;
        }
        self.step(Step::SetAttr(ino, set))
    }

    /// The value of an extended attribute. The transaction relies on the file from then on.
    pub fn getxattr(&mut self, ino: Ino, name: &[u8]) -> Result<Vec<u8>, Error> {
        let staged = self.inode(ino)?;
        if name == CAPABILITY && staged.loses_capability {
            return Err(Error::NoAttribute);
        }
        let chmod = staged.set.mode.filter(|_| name == ACCESS);
        match staged.xattrs.get(name) {
            Some(Some(value)) => Ok(value.to_vec()),
            Some(None) => Err(Error::NoAttribute),
            None if staged.fresh.is_some() => {
                staged.has_looked = true;
                let value = self.fs.attribute(&self.inodes[&ino].model, name)?;
                value.ok_or(Error::NoAttribute)
            }
            None => {
                self.look(ino)?;
                let value = self.fs.getxattr(ino, name)?;
                match chmod {
                    Some(mode) => crate::acl::chmod_of(value, mode),
                    None => Ok(value),
                }
            }
        }
    }

    /// Sets an extended attribute; `flags`: [`XATTR_CREATE`], [`XATTR_REPLACE`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] for access control lists; [`Error::NoSpace`] also when the file has as many names as can be listed.
    pub fn setxattr(
        &mut self,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: i32,
    ) -> Result<(), Error> {
        self.plain_space(ino, name)?;
        if value.len() > VALUE_MAX {
            return Err(Error::AttributeTooLarge);
        }
        if flags & (XATTR_CREATE | XATTR_REPLACE) != 0 {
            match (self.getxattr(ino, name), flags) {
                (Ok(_), flags) if flags & XATTR_CREATE != 0 => return Err(Error::Exists),
                (Ok(_), _) => {}
                (Err(Error::NoAttribute), flags) if flags & XATTR_REPLACE == 0 => {}
                (Err(error), _) => return Err(error),
            }
        }
        self.grow(value.len() * 9 / 8, value.len() * 2)?;
        let staged = self.inodes.get_mut(&ino).expect("it was looked up");
        let before = staged.xattrs.insert(name.into(), Some(value.into()));
        let staged = &self.inodes[&ino];
        let can_list = self.can_list_now(ino, staged);
        let staged = self.inodes.get_mut(&ino).expect("it was looked up");
        if !matches!(can_list, Ok(true)) {
            match before {
                Some(before) => drop(staged.xattrs.insert(name.into(), before)),
                None => drop(staged.xattrs.remove(name)),
            }
            return can_list.and(Err(Error::NoSpace));
        }
        let gives = name == CAPABILITY;
        staged.is_stripped &= !gives;
        staged.loses_capability &= !gives;
        self.step(Step::SetXattr {
            ino,
            name: name.into(),
            value: value.into(),
        })
    }

    /// Removes an extended attribute.
    pub fn removexattr(&mut self, ino: Ino, name: &[u8]) -> Result<(), Error> {
        self.plain_space(ino, name)?;
        self.getxattr(ino, name)?;
        let staged = self.inodes.get_mut(&ino).expect("it was looked up");
        staged.xattrs.insert(name.into(), None);
        self.step(Step::RemoveXattr(ino, name.into()))
    }

    fn plain_space(&mut self, ino: Ino, name: &[u8]) -> Result<(), Error> {
        self.inode(ino)?;
        let space = space_of(name)?;
        check_space(space, &self.inodes[&ino].model)?;
        match space {
            Space::User | Space::Guarded => Ok(()),
            Space::AccessAcl | Space::DefaultAcl => Err(Error::Unsupported(
                "access control lists within a transaction",
            )),
        }
    }

    /// The inode as the transaction has it.
    fn inode(&mut self, ino: Ino) -> Result<&mut Staged<'fs>, Error> {
        if !self.inodes.contains_key(&ino) {
            let (model, known) = {
                let node = self.fs.inode(ino)?;
                let inode = node.inode()?;
                let mut model = inode.clone();
                if inode.is_dir() {
                    model.nlink = inode.dir_links();
                }
                // Shown, so that what is changed after it has another one.
                let attr = self.fs.show(ino, inode);
                if inode.is_file() {
                    model.size = attr.size;
                }
                (model, attr.ctime)
            };
            if model.nlink == 0 {
                // Somebody has removed its last name.
                return Err(Error::Stale(ino));
            }
            let staged = Staged {
                generation: model.generation,
                model: Box::new(model),
                set: SetAttr::default(),
                fresh: None,
                gets: Gets::default(),
                has_looked: false,
                content: Content::default(),
                handle: None,
                known: Some(known),
                looked: None,
                xattrs: BTreeMap::new(),
                loses_capability: false,
                unlinked: false,
                has_besides: false,
                is_stripped: false,
            };
            self.inodes.insert(ino, staged);
        }
        let staged = self.inodes.get_mut(&ino).expect("it is there");
        match staged.model.nlink {
            // Unlinked by this transaction.
            0 => Err(Error::NotFound),
            _ => Ok(staged),
        }
    }

    /// The same of a regular file.
    fn file(&mut self, ino: Ino) -> Result<&mut Staged<'fs>, Error> {
        let staged = self.inode(ino)?;
        match staged.model.kind() {
            libc::S_IFREG => Ok(staged),
            libc::S_IFDIR => Err(Error::IsADirectory),
            _ => Err(Error::Invalid("not a regular file")),
        }
    }

    /// Shows what an inode is outside of the transaction, which relies on that from now on; of one that it makes, its beginning, which follows from its
    /// directory.
    fn look(&mut self, ino: Ino) -> Result<Attr, Error> {
        let staged = self.inodes.get_mut(&ino).expect("it was looked up");
        if staged.fresh.is_some() {
            staged.has_looked = true;
            return Ok(crate::attr::attr_of_new(ino, &staged.model));
        }
        let attr = self.fs.getattr(ino)?;
        if attr.generation != staged.generation {
            return Err(Error::Stale(ino));
        }
        if *staged.looked.get_or_insert(attr.ctime) != attr.ctime {
            return Err(changed(ino));
        }
        Ok(attr)
    }

    /// The same for who uses the model, too: both must be of one moment.
    fn look_at_model(&mut self, ino: Ino) -> Result<Attr, Error> {
        let attr = self.look(ino)?;
        match self.inodes[&ino].known {
            Some(known) if known != attr.ctime => Err(changed(ino)),
            _ => Ok(attr),
        }
    }

    fn step(&mut self, step: Step) -> Result<(), Error> {
        self.steps.push(step);
        self.expect(STEP_LOGGED, STEP_DIRTY)
    }

    /// What the commit is expected to log and to leave dirty. Where pages follow each other, and their blocks do not, another run begins.
    fn expected(&self) -> Extensive {
        let breaks = self.counts.breaks * RUN_LOGGED;
        self.expected.plus(Extensive {
            logged: breaks,
            dirty: breaks,
        })
    }

    /// As [`expect`](Self::expect), for a step that makes metadata grow: there is room for it, and will be at the commit.
    fn grow(&mut self, logged: usize, dirty: usize) -> Result<(), Error> {
        self.growth
            .cover(self.expected().dirty + dirty + STEP_DIRTY)?;
        self.expect(logged, dirty)
    }

    /// The commit will log, and leave dirty, about so much more.
    fn expect(&mut self, logged: usize, dirty: usize) -> Result<(), Error> {
        self.expected.logged += logged;
        self.expected.dirty += dirty;
        if !self.fs.store.large_most().covers(self.expected()) {
            self.broken.get_or_insert(Error::TransactionTooLarge);
            return Err(Error::TransactionTooLarge);
        }
        Ok(())
    }
}

fn changed(ino: Ino) -> Error {
    Error::Conflict(format!("inode {ino} has changed since it was read"))
}
