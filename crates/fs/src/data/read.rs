//! Reading: cache hits are copied; misses are read in clusters, with read-ahead.

use super::extents::{self, PAGE_LIMIT};
use super::file::{FileState, OpenFile};
use super::{Files, PAGE};
use crate::content::Body;
use crate::{AtimePolicy, Error};
use base::clock::Timestamp;
use base::sync::Arc;
use device::{AlignedBuf, Io};
use format::BLOCK_SIZE;
use std::ops::Range;

/// Pages that one device batch reads.
const CLUSTER: u64 = 256;
const DAY_SECONDS: i64 = 24 * 60 * 60;

impl Files {
    /// Reads up to `buf.len()` bytes at `offset`; fewer only at the end of the file.
    pub fn read(&self, file: &OpenFile, offset: u64, buf: &mut [u8]) -> Result<usize, Error> {
        let direct = file.has(libc::O_DIRECT);
        let most = if direct {
            0
        } else {
            self.options.read_ahead / PAGE
        };
        let ahead = file.read_ahead(offset, buf.len() as u64, most);
        let _shared = file.state.lock_shared()?;
        let size = file.state.size();
        if offset >= size || buf.is_empty() {
            return Ok(0);
        }
        let end = size.min(offset.saturating_add(buf.len() as u64));
        let len = (end - offset) as usize;
        self.read_range(&file.state, offset, &mut buf[..len], ahead, !direct)?;
        self.touch_atime(&file.state)?;
        Ok(len)
    }

    /// Reads bytes that lie below the end of the file. The caller holds the I/O lock.
    pub(super) fn read_range(
        &self,
        state: &Arc<FileState>,
        offset: u64,
        buf: &mut [u8],
        ahead: u64,
        keep: bool,
    ) -> Result<(), Error> {
        let end = offset + buf.len() as u64;
        let last = end.div_ceil(PAGE);
        let mut at = offset;
        while at < end {
            let (page, within) = (at / PAGE, (at % PAGE) as usize);
            let len = (BLOCK_SIZE - within).min((end - at) as usize);
            let out = &mut buf[(at - offset) as usize..][..len];
            if self.pages.read(state.key, page, within, out) {
                at += len as u64;
                continue;
            }
            let mut missing = self.missing_run(state, page, last, ahead);
            let loaded = match self.load_pages(state, missing.clone()) {
                // What cannot be read may be a neighbour that nobody asked for.
                Err(_) if missing.end > page + 1 => {
                    missing = page..page + 1;
                    self.load_pages(state, missing.clone())?
                }
                other => other?,
            };
            if keep {
                for (i, content) in loaded.chunks(BLOCK_SIZE).enumerate() {
                    self.pages
                        .insert(state.key, missing.start + i as u64, content);
                }
            }
            let stop = end.min(missing.end * PAGE);
            let len = (stop - at) as usize;
            buf[(at - offset) as usize..][..len].copy_from_slice(&loaded[within..within + len]);
            at = stop;
        }
        Ok(())
    }

    /// Pages from `page` on that are not cached: as far as `last`, and `ahead` more inside
    /// the file. They were absent before their mapping is looked up, so nothing newer than
    /// the device's content can exist for them while the I/O lock is held.
    fn missing_run(&self, state: &Arc<FileState>, page: u64, last: u64, ahead: u64) -> Range<u64> {
        let eof = state.size().div_ceil(PAGE);
        let wanted = last.max((page + 1).saturating_add(ahead)).min(eof);
        // Read-ahead must not push out what it brought in itself.
        let room = CLUSTER.min(self.pages.capacity() as u64 / 4).max(1);
        let most = wanted.min(page + room).max(page + 1);
        let mut end = page + 1;
        while end < most && self.pages.state(state.key, end).is_none() {
            end += 1;
        }
        page..end
    }

    /// Reads pages that are not cached: holes, unwritten extents and whatever lies beyond the
    /// end of the file are zeros. The caller holds the I/O lock.
    pub(super) fn load_pages(
        &self,
        state: &Arc<FileState>,
        pages: Range<u64>,
    ) -> Result<AlignedBuf, Error> {
        let mut buf = AlignedBuf::zeroed((pages.end - pages.start) as usize * BLOCK_SIZE);
        let (size, replaced) = {
            let meta = state.meta.lock();
            (meta.size, meta.replaced)
        };
        if replaced || pages.start * PAGE >= size {
            return Ok(buf);
        }
        let (mapped, tail) = {
            let content = state.node.read()?;
            let inode = content.inode()?;
            let tail = inode.tail.as_ref().filter(|t| pages.contains(&t.page));
            let mapped = if let Body::Inline(bytes) = &inode.body {
                if pages.start == 0 {
                    let len = bytes.len().min(buf.len());
                    buf[..len].copy_from_slice(&bytes[..len]);
                }
                Vec::new()
            } else {
                extents::lookup(&self.store, inode, pages.clone(), usize::MAX)?
            };
            (mapped, tail.cloned())
        };
        // What the block behind a tail holds, or whether it can be read, is of no account.
        let mapped = match &tail {
            Some(tail) => {
                let mut others = extents::clip(&mapped, &(0..tail.page));
                others.extend(extents::clip(&mapped, &(tail.page + 1..PAGE_LIMIT)));
                others
            }
            None => mapped,
        };
        let mut ios = Vec::with_capacity(mapped.len());
        let mut rest: &mut [u8] = &mut buf;
        let mut at = pages.start;
        for extent in mapped.iter().filter(|e| e.written) {
            let (_, tail) = rest.split_at_mut((extent.page - at) as usize * BLOCK_SIZE);
            let (part, tail) = tail.split_at_mut(extent.len as usize * BLOCK_SIZE);
            ios.push(Io::Read {
                byte: extent.block.byte(),
                buf: part,
            });
            rest = tail;
            at = extent.end();
        }
        if !ios.is_empty() {
            let done = self.store.array().execute(&mut ios);
            done.map_err(engine::Error::from)?;
        }
        drop(ios);
        if let Some(tail) = tail {
            tail.overlay(pages.start, &mut buf);
        }
        let valid = size.saturating_sub(pages.start * PAGE);
        if valid < buf.len() as u64 {
            buf[valid as usize..].fill(0);
        }
        Ok(buf)
    }

    /// Notes an access time if the policy wants one; it reaches the inode with its next record.
    fn touch_atime(&self, state: &Arc<FileState>) -> Result<(), Error> {
        if self.options.atime == AtimePolicy::Never || self.store.read_only() {
            return Ok(());
        }
        let content = state.node.read()?;
        let inode = content.inode()?;
        let mut meta = state.meta.lock();
        let atime = meta.times.atime.unwrap_or(inode.atime);
        let changed = |new: Option<Timestamp>, old: Timestamp| atime <= new.unwrap_or(old);
        let due = self.options.atime == AtimePolicy::Always
            || changed(meta.times.mtime, inode.mtime)
            || changed(meta.times.ctime, inode.ctime)
            || self.store.clock().now().sec - atime.sec >= DAY_SECONDS;
        if due {
            meta.times.atime = Some(self.now());
            meta.ahead(self.now_ns());
        }
        Ok(())
    }

    /// The first page at or after `page` that is written to its block or in the inode, and where such pages end.
    pub(super) fn next_written(
        &self,
        state: &Arc<FileState>,
        mut page: u64,
    ) -> Result<Option<Range<u64>>, Error> {
        loop {
            let content = state.node.read()?;
            let inode = content.inode()?;
            if let Body::Inline(bytes) = &inode.body {
                let data = page == 0 && !bytes.is_empty();
                return Ok(data.then_some(0..1));
            }
            let tail = inode.tail.as_ref().map(|t| t.page..t.page + 1);
            let tail = tail.filter(|tail| tail.start >= page);
            let found = extents::lookup(&self.store, inode, page..PAGE_LIMIT, 64)?;
            if let Some(extent) = found.iter().find(|e| e.written) {
                let run = extent.page..extent.end();
                return Ok(Some(tail.filter(|t| t.start < run.start).unwrap_or(run)));
            }
            match found.last() {
                // Unwritten up to there, but for the tail.
                Some(last) if tail.as_ref().is_none_or(|tail| tail.start >= last.end()) => {
                    page = last.end();
                }
                _ => return Ok(tail),
            }
        }
    }
}
