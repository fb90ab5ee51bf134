//! The content of a small file goes to its inode, and what of it has changed is what is logged.

use super::Copies;
use crate::Error;
use crate::content::inode::INLINE_DATA_MAX;
use crate::content::{AttrChange, Body, Delta, FsNode};
use crate::data::file::FileState;
use crate::data::tail::{How, changed};
use crate::data::{Files, PAGE};
use base::counted::Counted;
use engine::Need;
use format::Damage;

impl Files {
    /// What it takes to log the content of a small file in its inode. `None`: it goes to the block that its page was promised, for metadata may not grow by it.
    pub(super) fn need_inline(
        &self,
        state: &Counted<FileState>,
        size: u64,
    ) -> Result<Option<Need>, Error> {
        let has = match &state.node.read()?.inode()?.body {
            Body::Inline(bytes) => bytes.len() as u64,
            _ => 0,
        };
        Ok(match size <= has {
            true => Some(Need::Reclaim),
            false => self.store.room_to_grow().then_some(Need::Accepted),
        })
    }

    /// Logs the content of a small file as part of its inode: what of it has changed.
    pub(super) fn flush_inline(
        &self,
        state: &Counted<FileState>,
        size: u64,
        need: Need,
    ) -> Result<(), Error> {
        let copies = self.copy_pages(state, self.pages.dirty_pages(state.key, 0..1, 1))?;
        let delta = match &copies {
            Some(copies) => inline_change(&*state.node.read()?, &copies.data[..size as usize])?,
            None => None,
        };
        if delta.is_some() || size != state.meta.lock().logged_size {
            let (mut op, slot) = self.begin(state, need)?;
            if let Some(delta) = delta {
                op.apply(slot, delta);
            }
            self.commit_attrs(state, op, slot, AttrChange::default(), Some(size));
        }
        self.inlined(state, copies, size);
        Ok(())
    }

    /// The inode has the content of a small file. If it is too large to stay there, its page stays dirty.
    pub(super) fn inlined(
        &self,
        state: &Counted<FileState>,
        copies: Option<Copies<'_>>,
        size: u64,
    ) {
        let Some(copies) = copies else { return };
        if size > INLINE_DATA_MAX as u64 {
            return self.stays_logged(state);
        }
        for (&page, &stamp) in copies.pages.iter().zip(&copies.stamps) {
            self.pages.inlined(state.key, page, stamp);
        }
        self.not_logged(state);
    }
}

/// The largest file whose content goes to its inode.
pub(super) fn inline_max(how: How) -> u64 {
    match how {
        How::Home | How::Early => INLINE_DATA_MAX as u64,
        How::Blocks => 0,
        How::Logged | How::Alone => PAGE,
    }
}

/// What makes an inline body this one, if anything must.
pub(super) fn inline_change(node: &FsNode, bytes: &[u8]) -> Result<Option<Delta>, Error> {
    let old = match &node.inode()?.body {
        Body::Inline(old) => old,
        _ => return Err(Damage::new("inode", "a small file that is not in its inode").into()),
    };
    if old.is_empty() || old.len() > bytes.len() {
        let differs = old != bytes;
        return Ok(differs.then(|| Delta::Body(Body::Inline(bytes.to_vec()))));
    }
    let change = changed(old, bytes);
    Ok(change.map(|range| Delta::InlineWrite {
        offset: range.start as u32,
        data: bytes[range].to_vec(),
    }))
}
