//! Sparse contents, shared between copies until changed, with hashes of pages that are computed
//! once.

use super::SECTOR;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(super) const PAGE: usize = 4096;

/// Sparse contents: absent pages are zeros.
pub(super) type Pages = BTreeMap<u64, Arc<Page>>;

/// A page, and its hash once somebody asked for it (0: not yet).
#[derive(Debug)]
pub(super) struct Page {
    bytes: [u8; PAGE],
    hash: AtomicU64,
}

impl Page {
    fn zeroed() -> Arc<Page> {
        Arc::new(Page {
            bytes: [0; PAGE],
            hash: AtomicU64::new(0),
        })
    }

    pub fn is_zero(&self) -> bool {
        self.bytes.iter().all(|b| *b == 0)
    }

    /// 512 bytes of it.
    pub fn sector(&self, index: usize) -> &[u8] {
        &self.bytes[index * SECTOR..(index + 1) * SECTOR]
    }

    /// Never 0, and [`ZERO_PAGE`] for zeros alone; computed once for all copies of the page.
    fn hash(&self) -> u64 {
        let known = self.hash.load(Ordering::Relaxed);
        if known != 0 {
            return known;
        }
        let hash = match self.is_zero() {
            true => ZERO_PAGE,
            false => hash_bytes(&self.bytes) | 1 << 63,
        };
        self.hash.store(hash, Ordering::Relaxed);
        hash
    }
}

impl Clone for Page {
    /// For a change: the copy has no hash yet.
    fn clone(&self) -> Page {
        Page {
            bytes: self.bytes,
            hash: AtomicU64::new(0),
        }
    }
}

impl PartialEq for Page {
    fn eq(&self, other: &Page) -> bool {
        self.bytes == other.bytes
    }
}

impl Eq for Page {}

/// The hash of a page of zeros, which counts like an absent one.
const ZERO_PAGE: u64 = 1;

/// Spreads every bit of a word over all of them.
pub(super) fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    (word ^ (word >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

/// A hash of bytes, for telling contents apart; not for secrets.
pub(super) fn hash_bytes(bytes: &[u8]) -> u64 {
    let mut hash = 0xCBF2_9CE4_8422_2325 ^ bytes.len() as u64;
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |w, b| w << 8 | *b as u64);
    // Four lanes, which do not wait for each other.
    let mut lanes = [hash, hash ^ 1, hash ^ 2, hash ^ 3];
    let blocks = bytes.chunks_exact(32);
    for bytes in blocks.remainder().chunks(8) {
        hash = mix(hash ^ word(bytes));
    }
    for block in blocks {
        for (lane, bytes) in lanes.iter_mut().zip(block.chunks_exact(8)) {
            *lane = (*lane ^ word(bytes)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
            *lane ^= *lane >> 32;
        }
    }
    lanes.into_iter().fold(hash, |hash, lane| mix(hash ^ lane))
}

/// A hash of contents: equal for equal ones, whichever zero pages are present. Pages that were
/// hashed before and have not changed cost nothing.
pub(super) fn hash_pages(pages: &Pages) -> u64 {
    pages
        .iter()
        .fold(0, |hash: u64, (number, page)| match page.hash() {
            ZERO_PAGE => hash,
            page => hash.wrapping_add(mix(page ^ mix(*number))),
        })
}

pub(super) fn page_mut(pages: &mut Pages, number: u64) -> &mut [u8; PAGE] {
    let page = Arc::make_mut(pages.entry(number).or_insert_with(Page::zeroed));
    *page.hash.get_mut() = 0;
    &mut page.bytes
}

pub(super) fn load(pages: &Pages, offset: u64, buf: &mut [u8]) {
    let end = offset + buf.len() as u64;
    let mut done = 0;
    for (number, page) in pages.range(offset / PAGE as u64..end.div_ceil(PAGE as u64)) {
        let start = number * PAGE as u64;
        // The overlap of page and buffer, as offsets in the buffer.
        let from = start.saturating_sub(offset) as usize;
        let to = (start + PAGE as u64).min(end).saturating_sub(offset) as usize;
        let within = offset.saturating_sub(start) as usize;
        buf[done..from].fill(0);
        buf[from..to].copy_from_slice(&page.bytes[within..within + (to - from)]);
        done = to;
    }
    buf[done..].fill(0);
}

pub(super) fn store(pages: &mut Pages, mut offset: u64, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let (number, within) = (offset / PAGE as u64, (offset % PAGE as u64) as usize);
        let take = (PAGE - within).min(bytes.len());
        page_mut(pages, number)[within..within + take].copy_from_slice(&bytes[..take]);
        bytes = &bytes[take..];
        offset += take as u64;
    }
}

/// Whether anything was ever stored in a range of bytes.
pub(super) fn any_in(pages: &Pages, range: Range<u64>) -> bool {
    let numbers = range.start / PAGE as u64..range.end.div_ceil(PAGE as u64);
    pages.range(numbers).next().is_some()
}
