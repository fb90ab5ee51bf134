//! Inodes without a name: unlinked while in use, made by O_TMPFILE, or too large to be deleted
//! in the record of their unlink.
//!
//! Invariants:
//! 1. An inode with link count 0 is in the orphan directory of its nid, from the record that
//!    took its last name to the record that deletes it. So a crash never leaks one.
//! 2. An orphan that may still be in use is in [`OrphanSet`] from before that record's locks are
//!    released; whoever takes it out of the set deletes it, or puts it back. The last reference goes before the
//!    set is looked at, and the set is filled before references are looked at, so one of the
//!    two sees the other.
//! 3. An inode with a name is not in [`OrphanSet`] when the record of that name ends: who puts one back holds its shared
//!    lock, and has seen there that it has none.
//! 4. Space that an unlink will free comes late: the kernel gives an inode back some time after it. An orphan that was made lately, or that is being deleted, is
//!    leaving. Whoever takes one out of the set counts it as such before it is no member, and one that is deleted is counted as gone before it is leaving no more: who sees none leaving
//!    and none gone lately need not wait.

use crate::api::{Attr, Ino};
use crate::content::{Body, Delta, Inode, Orphan, TreeId};
use crate::filesystem::FileSystem;
use crate::list::{self, Addition, Deletion, Emptied};
use crate::tree;
use crate::{Error, content::FsNode, xattr};
use base::atomic::{AtomicU64, AtomicUsize, Ordering};
use base::canary::{Canary, planted};
use base::clock::{nap, now_ns, ns_of};
use base::map::HashSet;
use base::sync::{Mutex, rank};
use engine::{Extent, Need, Node, Op, Slot};
use format::Nid;
use format::inode::{FIRST_ORPHANS, ORPHAN_DIRECTORIES};
use std::time::Duration;

/// Leaves that one operation frees.
const LEAVES_AT_ONCE: usize = 16;

/// The orphans that this mount knows of: as many as are unlinked and in use. In parts, and each with
/// a count that is read without its lock: nearly every inode whose last reference goes is none.
#[derive(Debug)]
pub struct OrphanSet(Box<[Part]>);

/// On a cache line of its own.
#[repr(align(128))]
#[derive(Debug)]
struct Part {
    /// Members. Changes under the lock; who reads 0 without it has looked before any later `add`.
    count: AtomicUsize,
    /// When the newest one was added.
    added_ns: AtomicU64,
    /// Taken out, and not deleted yet.
    leaving: AtomicUsize,
    /// Deleted, and when the last one was.
    gone: AtomicU64,
    gone_ns: AtomicU64,
    members: Mutex<HashSet<Ino>>,
}

/// One that is out of the set, and is deleted or put back.
struct Leaving<'a>(&'a Part);

impl Leaving<'_> {
    fn ended(self) {
        self.0.gone_ns.store(now_ns(), Ordering::SeqCst);
        self.0.gone.fetch_add(1, Ordering::SeqCst);
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.leaving.fetch_sub(1, Ordering::SeqCst);
    }
}

const PARTS: usize = 64;
/// So long after an unlink the kernel may have to give the inode back. Most are back within milliseconds; those that programs have open stay.
const LATELY: Duration = Duration::from_millis(250);
/// In which some of what is deleted is.
const STEPS: Duration = Duration::from_millis(50);

impl OrphanSet {
    pub fn new() -> OrphanSet {
        let part = |_| Part {
            count: AtomicUsize::new(0),
            added_ns: AtomicU64::new(0),
            leaving: AtomicUsize::new(0),
            gone: AtomicU64::new(0),
            gone_ns: AtomicU64::new(0),
            members: Mutex::new(rank::LEAF, HashSet::default()),
        };
        OrphanSet((0..PARTS).map(part).collect())
    }

    fn part(&self, ino: Ino) -> &Part {
        &self.0[ino.0 as usize % PARTS]
    }

    pub(crate) fn add(&self, ino: Ino) {
        let part = self.part(ino);
        let mut members = part.members.lock();
        members.insert(ino);
        part.added_ns.store(now_ns(), Ordering::SeqCst);
        part.count.store(members.len(), Ordering::SeqCst);
    }

    /// Whether it may be a member, told without a lock and without writing anything. Invariant 2 holds as with the lock: of `add` and the
    /// last reference's end the second to take the file table's lock sees what came before the first took it.
    #[inline]
    pub(crate) fn may_have(&self, ino: Ino) -> bool {
        self.part(ino).count.load(Ordering::Acquire) > 0
    }

    /// For the one caller that took it out.
    fn take(&self, ino: Ino) -> Option<Leaving<'_>> {
        let part = self.part(ino);
        if !self.may_have(ino) {
            return None;
        }
        let mut members = part.members.lock();
        let taken = members.remove(&ino).then(|| {
            part.leaving.fetch_add(1, Ordering::SeqCst);
            Leaving(part)
        });
        part.count.store(members.len(), Ordering::SeqCst);
        taken
    }

    fn gone(&self) -> u64 {
        self.0
            .iter()
            .map(|part| part.gone.load(Ordering::SeqCst))
            .sum()
    }

    fn some_went_lately(&self) -> bool {
        let now = now_ns();
        let is_late = |part: &Part| {
            part.gone.load(Ordering::SeqCst) > 0
                && now.saturating_sub(part.gone_ns.load(Ordering::SeqCst)) < ns_of(LATELY)
        };
        self.0.iter().any(is_late)
    }

    fn are_deleted(&self) -> bool {
        let deleted = |part: &Part| part.leaving.load(Ordering::SeqCst) > 0;
        self.0.iter().any(deleted)
    }

    fn are_leaving(&self) -> bool {
        let now = now_ns();
        let is_leaving = |part: &Part| {
            let newest = part.added_ns.load(Ordering::SeqCst);
            // In this order: whoever is taken out is the other by then.
            let lately =
                part.count.load(Ordering::SeqCst) > 0 && now.saturating_sub(newest) < ns_of(LATELY);
            lately || part.leaving.load(Ordering::SeqCst) > 0
        };
        self.0.iter().any(is_leaving)
    }

    fn has(&self, ino: Ino) -> bool {
        self.part(ino).members.lock().contains(&ino)
    }
}

/// What happens to an inode that loses a link.
pub(crate) enum Disposal<'s> {
    /// It has others.
    Linked,
    /// Nobody uses it and it is small: it goes in this record. Its blocks are freed already. It has no state, and gets none: it is locked.
    Delete,
    /// It goes to its orphan directory, unless it is listed there for a pending truncate.
    Orphan(Option<Box<Addition<'s, Orphan>>>),
}

/// The nid of the orphan directory for an inode.
pub(crate) fn directory_of(ino: Ino) -> Nid {
    Nid(FIRST_ORPHANS + ino.0 % ORPHAN_DIRECTORIES)
}

fn orphan_spot(op: &mut Op<'_, FsNode>, dir: Slot, ino: Ino) -> Result<list::Spot<Orphan>, Error> {
    list::spot::<Orphan>(op, dir, ino.0, |orphan| orphan.nid == ino)
}

/// The blocks of an inode that one record can free whole; `None`: it takes more than that.
fn small(inode: &Inode) -> Option<Vec<Extent>> {
    // With a cut that stopped half way it is listed already.
    let plain = inode.seldom.pending_truncate.is_none()
        && inode.seldom.xattr_root.is_none()
        && xattr::is_plain(&inode.seldom.xattrs);
    if !plain || inode.blocks > crate::data::FREE_MAX {
        return None;
    }
    match &inode.body {
        Body::Inline(_) => Some(Vec::new()),
        Body::Entries(list) if list.is_empty() => Some(Vec::new()),
        Body::Extents(list) => Some(
            list.iter()
                .map(|e| Extent {
                    block: e.block,
                    len: e.len,
                })
                .collect(),
        ),
        _ => None,
    }
}

impl FileSystem {
    /// The orphan directory that an operation which takes the last name of `ino` must lock.
    pub(crate) fn orphan_node(&self, ino: Ino) -> Result<Node<FsNode>, Error> {
        Ok(self.store.get(directory_of(ino))?)
    }

    /// Whether taking the inode's last name will need its orphan directory, as far as can be
    /// told without locks.
    pub(crate) fn needs_orphanage(&self, ino: Ino, inode: &Inode) -> bool {
        small(inode).is_none() || self.is_active(ino, inode)
    }

    /// Somebody uses the inode, or work on it may be under way.
    fn is_active(&self, ino: Ino, inode: &Inode) -> bool {
        self.files.is_active(ino, inode.generation)
    }

    /// Decides what becomes of a locked inode whose link count drops to `nlink` (phase 1).
    /// `None`: it needs the orphan directory, which is not locked.
    pub(crate) fn plan_disposal<'s>(
        &self,
        op: &mut Op<'s, FsNode>,
        victim: Slot,
        nlink: u32,
        orphans: Option<Slot>,
    ) -> Result<Option<Disposal<'s>>, Error> {
        if nlink > 0 {
            return Ok(Some(Disposal::Linked));
        }
        let ino = op.nid(victim);
        let inode = op.peek(victim).inode()?;
        let generation = inode.generation;
        if let Some(extents) = small(inode).filter(|_| !self.is_active(ino, inode)) {
            for extent in extents {
                op.free(extent)?;
            }
            return Ok(Some(Disposal::Delete));
        }
        let Some(dir) = orphans else { return Ok(None) };
        let spot = orphan_spot(op, dir, ino)?;
        let orphan = Orphan {
            nid: ino,
            generation,
        };
        let addition = match spot.found {
            Some(_) => None,
            None => Some(spot.put(op, orphan)?),
        };
        Ok(Some(Disposal::Orphan(addition.map(Box::new))))
    }

    /// Carries a disposal out (phase 2); `change` is the victim's new link count and ctime.
    /// True: after the commit, [`FileSystem::settle_orphan`] must be called.
    pub(crate) fn dispose(
        &self,
        op: &mut Op<'_, FsNode>,
        victim: Slot,
        disposal: Disposal<'_>,
        change: Delta,
    ) -> bool {
        let orphaned = Self::dispose_of(op, victim, disposal, change);
        if orphaned {
            self.orphans.add(op.nid(victim));
        }
        orphaned
    }

    /// The same in an operation that can be undone: of an orphan, which this tells by true, [`FileSystem::note_orphan`] is called when it cannot
    /// any more.
    pub(crate) fn dispose_of(
        op: &mut Op<'_, FsNode>,
        victim: Slot,
        disposal: Disposal<'_>,
        change: Delta,
    ) -> bool {
        match disposal {
            Disposal::Linked => op.apply(victim, change),
            Disposal::Delete => op.delete(victim),
            Disposal::Orphan(addition) => {
                op.apply(victim, change);
                if let Some(addition) = addition
                    && !planted(Canary::OrphanIntentDropped)
                {
                    addition.finish(op);
                }
                return true;
            }
        }
        false
    }

    /// Plans an orphan entry for an inode that is about to be created without a name.
    pub(crate) fn plan_nameless<'s>(
        &self,
        op: &mut Op<'s, FsNode>,
        dir: Slot,
        orphan: Orphan,
    ) -> Result<Addition<'s, Orphan>, Error> {
        let spot = orphan_spot(op, dir, orphan.nid)?;
        spot.put(op, orphan)
    }

    /// Notes a nameless inode that is in use, before the record that makes it so ends.
    pub(crate) fn note_orphan(&self, ino: Ino) {
        self.orphans.add(ino);
    }

    /// Plans to take an orphan that gets a name out of its directory. Only one that this mount
    /// holds on to can get a name. `None`: it stays listed until its truncation is done.
    pub(crate) fn plan_adoption(
        &self,
        op: &mut Op<'_, FsNode>,
        dir: Slot,
        inode: Slot,
    ) -> Result<Option<Deletion<Orphan>>, Error> {
        let ino = op.nid(inode);
        if !self.orphans.has(ino) {
            return Err(Error::NotFound);
        }
        if op.peek(inode).inode()?.seldom.pending_truncate.is_some() {
            return Ok(None);
        }
        let spot = orphan_spot(op, dir, ino)?;
        Ok(Some(spot.remove(op, Emptied::Goes)?))
    }

    /// The inode has a name again; its record is about to be appended.
    pub(crate) fn adopted(&self, ino: Ino) {
        drop(self.orphans.take(ino));
    }

    /// Deletes an inode that was made an orphan, if nobody uses it (any more). The
    /// operation is over: no lock is held.
    pub(crate) fn settle_orphan(&self, ino: Ino) {
        if !self.files.is_referenced(ino) {
            self.unreferenced(ino);
        }
    }

    /// One more reference by the kernel, which keeps an unlinked inode alive.
    pub fn ref_inode(&self, ino: Ino) {
        self.files.ref_inode(ino);
    }

    /// The same of an inode that was found without a lock that keeps it. False: it is being deleted, or was in part, which no reference ends. If its number is another one's by
    /// now, that is what is referred to.
    pub fn ref_found(&self, found: &Attr) -> bool {
        self.files.ref_found(found.ino, found.generation)
    }

    /// `count` references fewer; an unlinked inode without references is deleted.
    /// Takes locks: the caller holds none but perhaps the rename lock.
    pub fn forget(&self, ino: Ino, count: u64) {
        if self.files.forget(ino, count) {
            self.unreferenced(ino);
        }
    }

    /// For who has found no space: how many unlinked inodes are deleted so far, if others may be soon, or one was within a quarter of a second.
    pub fn orphans_leaving(&self) -> Option<u64> {
        let gone = self.orphans.gone();
        let may_help = self.orphans.are_leaving() || self.orphans.some_went_lately();
        may_help.then_some(gone)
    }

    /// For who has found no space after [`orphans_leaving`](Self::orphans_leaving) said so many, and holds no lock: waits while inodes that were unlinked
    /// within a quarter of a second are still referred to, or are being deleted, for `most`, until one is gone. One that is being deleted gives space back step by step: a twentieth of a second
    /// is enough then. True: there may be space now.
    pub fn await_orphan(&self, gone: u64, most: Duration) -> bool {
        let (begun, most) = (now_ns(), ns_of(most));
        while self.orphans.gone() == gone {
            let waited = now_ns() - begun;
            let some_are_deleted = self.orphans.are_deleted();
            if some_are_deleted && waited >= most.min(ns_of(STEPS)) {
                return true;
            }
            if waited >= most || !(some_are_deleted || self.orphans.are_leaving()) {
                // It may have gone between the looks.
                return self.orphans.gone() != gone;
            }
            nap(ns_of(Duration::from_millis(1)));
        }
        true
    }

    /// The last reference is gone. What fails here stays in its orphan directory, and the next
    /// open tries again.
    pub(crate) fn unreferenced(&self, ino: Ino) {
        while let Some(leaving) = self.orphans.take(ino) {
            match self.delete_unreferenced(ino) {
                Ok(true) => return leaving.ended(),
                Ok(false) => {}
                // It got a name, and lost it.
                Err(Error::Stale(gone)) if gone == ino => return,
                Err(error) => {
                    if !self.store.read_only() {
                        tracing::warn!(
                            "unlinked inode {ino} is not deleted before the next mount: {error}"
                        );
                    }
                    return;
                }
            }
            // Whoever refers to it may have stopped before it was in the set again.
            if self.files.is_referenced(ino) {
                return;
            }
        }
    }

    /// Deletes an unlinked inode unless somebody refers to it: then it is in the set again (false). From the moment when
    /// nobody does nobody may open it: its blocks go one by one. True: it is gone, or has a name by now.
    fn delete_unreferenced(&self, ino: Ino) -> Result<bool, Error> {
        let generation = self.store.get(ino)?.into_read()?.inode()?.generation;
        if !self.files.condemn(ino, generation) {
            return Ok(!self.put_back(ino, generation)?);
        }
        // When it fails the blocks may be gone all the same: it opens no more.
        self.delete_orphan(ino)?;
        self.files.pardon(ino, generation);
        Ok(true)
    }

    /// Puts an inode that was taken out of the set back, if it has no name (invariant 3).
    fn put_back(&self, ino: Ino, generation: u64) -> Result<bool, Error> {
        let node = self.store.get(ino)?.into_read()?;
        let same = |inode: &&Inode| inode.generation == generation;
        let nameless = (node.inode().ok().filter(same)).is_some_and(|inode| inode.nlink == 0);
        if nameless {
            self.orphans.add(ino);
        }
        Ok(nameless)
    }

    /// Frees all that an unlinked inode has, in as many records as it takes, then the inode.
    fn delete_orphan(&self, ino: Ino) -> Result<(), Error> {
        {
            let node = self.store.get(ino)?.into_read()?;
            let inode = node.inode()?;
            if inode.nlink > 0 {
                // Listed because it was being cut.
                drop(node);
                return self.files.finish_chain(&self.store.get(ino)?);
            }
            let file = inode.is_file();
            drop(node);
            if file {
                self.files.release_data(ino)?;
            }
        }
        self.empty_attributes(ino)?;
        self.empty_directory(ino)?;
        let (node, orphans) = (self.store.get(ino)?, self.orphan_node(ino)?);
        let mut op = self.store.begin(Need::Reclaim)?;
        let slots = op.lock_sorted(&[&node, &orphans])?;
        let inode = op.peek(slots[0]).inode()?;
        if inode.nlink > 0 {
            return Ok(());
        }
        let extents =
            small(inode).ok_or_else(|| format::Damage::new("inode", "does not become empty"))?;
        for extent in extents {
            op.free(extent)?;
        }
        let removal = orphan_spot(&mut op, slots[1], ino)?.remove(&mut op, Emptied::Goes)?;
        removal.finish(&mut op);
        op.delete(slots[0]);
        op.commit();
        Ok(())
    }

    /// Frees an attribute tree and all values outside the inode.
    fn empty_attributes(&self, ino: Ino) -> Result<(), Error> {
        loop {
            let node = self.store.get(ino)?;
            let mut op = self.store.begin(Need::Reclaim)?;
            let slot = op.lock(&node)?;
            let inode = op.peek(slot).inode()?;
            if inode.seldom.xattr_root.is_none() {
                if xattr::is_plain(&inode.seldom.xattrs) {
                    return Ok(());
                }
                let list = inode.seldom.xattrs.clone();
                let values = xattr::lock_values(&mut op, &list)?;
                values.into_iter().for_each(|value| op.delete(value));
                op.apply(slot, Delta::InlineXattrs(Vec::new()));
                op.commit();
                continue;
            }
            // One leaf at a time: its values are up to 64 KiB each.
            let (removal, leaves) = tree::plan_tail(&mut op, slot, TreeId::Xattrs, 1)?;
            let mut values = Vec::new();
            for leaf in leaves {
                let list = op.peek(leaf).xattrs()?.to_vec();
                values.extend(xattr::lock_values(&mut op, &list)?);
            }
            values.into_iter().for_each(|value| op.delete(value));
            removal.finish(&mut op, None);
            op.commit();
        }
    }

    /// Frees the (empty) buckets of a removed directory.
    fn empty_directory(&self, ino: Ino) -> Result<(), Error> {
        loop {
            let node = self.store.get(ino)?;
            let mut op = self.store.begin(Need::Reclaim)?;
            let slot = op.lock(&node)?;
            let inode = op.peek(slot).inode()?;
            if !inode.is_dir() || inode.root(TreeId::Body).is_none() {
                return Ok(());
            }
            let (removal, _) = tree::plan_tail(&mut op, slot, TreeId::Body, LEAVES_AT_ONCE)?;
            removal.finish(&mut op, Some(Body::Entries(Box::default())));
            op.commit();
        }
    }

    /// Deletes what a crash left without names; part of opening, nobody uses anything yet. What is damaged stays, for a repair.
    pub(crate) fn finish_orphans(&self) {
        for i in 0..ORPHAN_DIRECTORIES {
            let dir = Nid(FIRST_ORPHANS + i);
            if let Err(error) = self.finish_list(dir) {
                tracing::error!("unlinked inodes in list {dir} stay: {error}");
            }
        }
    }

    fn finish_list(&self, dir: Nid) -> Result<(), Error> {
        let mut from = Some(0);
        while let Some(key) = from {
            let (run, next) = {
                let node = self.store.get(dir)?.into_read()?;
                let inode = node.inode()?;
                match list::run_from::<Orphan>(&self.store, inode, key) {
                    Ok(found) => found,
                    Err(error) => {
                        tracing::error!(
                            "a part of the unlinked inodes in list {dir} stays: {error}"
                        );
                        let next = list::behind::<Orphan>(&self.store, inode, key);
                        (Vec::new(), next)
                    }
                }
            };
            for orphan in run {
                if let Err(error) = self.delete_orphan(orphan.nid) {
                    tracing::error!("unlinked inode {} stays: {error}", orphan.nid);
                }
            }
            from = next;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{Caller, ROOT};
    use crate::namespace::meanwhile::{nobody_does, others_do};
    use crate::rename::tests::file_system;
    use std::sync::Arc;

    /// The last reference of a nameless file was gone, somebody opened it by its number and gives it a name just then: it counted
    /// as nameless from then on, and could not be opened for a moment when it was closed the next time.
    #[test]
    fn a_file_that_gets_a_name_beside_its_last_close_is_nameless_no_more() {
        let (fs, who) = (file_system(), Caller::root());
        let (attr, file) = fs.tmpfile(&who, ROOT, 0o600, libc::O_RDWR).unwrap();
        let (others, closing) = (Arc::clone(&fs), Arc::new(Mutex::new(rank::LEAF, None)));
        let begun = Arc::clone(&closing);
        others_do(move || {
            let fs = Arc::clone(&others);
            let close = base::thread::spawn("closes", move || fs.unreferenced(attr.ino));
            *begun.lock() = Some(close.unwrap());
            while others.orphans.has(attr.ino) {
                base::thread::yield_now();
            }
        });
        fs.link(&who, attr.ino, ROOT, b"file").unwrap();
        nobody_does();
        let close = closing.lock().take().unwrap();
        close.join().unwrap();
        assert!(!fs.orphans.has(attr.ino));
        drop(file);
        assert_eq!(fs.lookup(ROOT, b"file").unwrap().ino, attr.ino);
        fs.close().unwrap();
    }

    #[test]
    fn who_finds_no_space_waits_for_what_leaves_and_for_nothing_else() {
        let (fs, who) = (file_system(), Caller::root());
        let unlinked = || {
            let attr = fs.mknod(&who, ROOT, b"file", libc::S_IFREG, 0).unwrap();
            fs.ref_inode(attr.ino);
            fs.unlink(&who, ROOT, b"file").unwrap();
            attr.ino
        };
        const LONG: Duration = Duration::from_secs(100);
        assert_eq!(fs.orphans_leaving(), None);
        assert!(!fs.await_orphan(0, LONG), "there is none");

        let ino = unlinked();
        let kernel = Arc::clone(&fs);
        let forget = base::thread::spawn("forgets", move || kernel.forget(ino, 1)).unwrap();
        assert!(fs.await_orphan(0, LONG));
        forget.join().unwrap();
        assert!(fs.await_orphan(0, LONG), "it is gone already");
        assert!(!fs.await_orphan(1, LONG), "and was the last");

        // One that somebody has open.
        let ino = unlinked();
        assert!(!fs.await_orphan(1, LONG), "it stays");
        fs.forget(ino, 1);
        fs.close().unwrap();
    }
}
