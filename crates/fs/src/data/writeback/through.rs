//! A write that finds no block on a full disk, of bytes that have room in the inode: they are logged at once, as write-back would do
//! later. So who has a small file can write over it for ever (decision 0007).
//!
//! Its page does not become dirty: nothing is promised for it, and write-back must not meet a full disk. Nor has the file another
//! dirty page, which would need a block for the first one when it goes home. A file that was cut to nothing has its old content until
//! the record that has the new one, as always.

use super::inline::inline_change;
use crate::Error;
use crate::content::inode::INLINE_DATA_MAX;
use crate::content::{AttrChange, Body};
use crate::data::Files;
use crate::data::file::FileState;
use base::counted::Counted;
use engine::Need;

/// What the inode has of a file's content, as far as new data sees it.
struct Inline {
    bytes: Vec<u8>,
    /// So many bytes of content may be in the inode, and it grows by none.
    room: usize,
}

impl Files {
    /// Writes into a file whose content is in its inode, or that has none. False, with nothing changed: the bytes have no room there, or
    /// metadata has none to grow. The caller holds the I/O lock exclusively, and the pages of these bytes are not dirty.
    pub(in super::super) fn write_through(
        &self,
        state: &Counted<FileState>,
        offset: u64,
        data: &[u8],
    ) -> Result<bool, Error> {
        let end = offset + data.len() as u64;
        let (size, replaced, keep_extents) = {
            let meta = state.meta.lock();
            (meta.size.max(end), meta.replaced, meta.keep_extents)
        };
        if keep_extents || self.pages.is_dirty(state.key) {
            return Ok(false);
        }
        let Some(Inline { mut bytes, room }) = self.inline_of(state, replaced)? else {
            return Ok(false);
        };
        let most = bytes.len().max(INLINE_DATA_MAX) as u64;
        if end > most {
            return Ok(false);
        }
        let (start, end) = (offset as usize, end as usize);
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        bytes[start..end].copy_from_slice(data);
        let need = match bytes.len() > room {
            true => Need::Grow,
            false => Need::Reclaim,
        };
        let logged = match replaced {
            true => self.log_replacement(state, Body::Inline(bytes), size, need),
            false => self.log_inline(state, &bytes, size, need),
        };
        match logged {
            Ok(()) => {}
            Err(Error::NoSpace) => return Ok(false),
            Err(error) => return Err(error),
        }
        // Before the size shows: who finds bytes cached finds those of this write.
        self.drop_pages(state, 0..1);
        let mut meta = state.meta.lock();
        meta.size = meta.size.max(size);
        Ok(true)
    }

    /// `None`: there is content elsewhere.
    fn inline_of(
        &self,
        state: &Counted<FileState>,
        replaced: bool,
    ) -> Result<Option<Inline>, Error> {
        let content = state.node.read()?;
        Ok(match (&content.inode()?.body, replaced) {
            (Body::Inline(old), _) => Some(Inline {
                bytes: match replaced {
                    true => Vec::new(),
                    false => old.clone(),
                },
                room: old.len(),
            }),
            (_, true) => Some(Inline {
                bytes: Vec::new(),
                room: 0,
            }),
            (_, false) => None,
        })
    }

    fn log_inline(
        &self,
        state: &Counted<FileState>,
        bytes: &[u8],
        size: u64,
        need: Need,
    ) -> Result<(), Error> {
        let (mut op, slot) = self.begin(state, need)?;
        if let Some(delta) = inline_change(op.peek(slot), bytes)? {
            op.apply(slot, delta);
        }
        self.commit_attrs(state, op, slot, AttrChange::default(), Some(size));
        Ok(())
    }
}
