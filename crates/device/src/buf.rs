//! Heap buffers that direct I/O accepts as they are, and memory that is lent to I/O in flight.
//!
//! 1. A [`Segment`] is the only way to its bytes from when it is lent until it is given back: it cannot be copied, and who
//!    lent it does not look at them ([`Lent`]) or has them borrowed ([`Loans`]).
//! 2. Memory with a segment out is neither freed nor handed out. Whoever gives it up all the same leaks it ([`Lent`]), or
//!    ends the process ([`scope`]): a segment that is dropped never comes back, and the kernel may write there for ever.

use base::mapping::Mapping;
use base::racy;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;

/// Alignment of every [`AlignedBuf`], in bytes: enough for any device.
pub const BUFFER_ALIGN: usize = 4096;

/// Length from which a buffer is cut out of a longer allocation that asks for no alignment: the
/// allocator hands out fresh zero pages for that as they are, and would clear aligned ones.
const LARGE: usize = 128 << 10;

/// A fixed-size buffer whose address is a multiple of [`BUFFER_ALIGN`], on the heap unless it is one of several in a mapping.
pub struct AlignedBuf {
    /// What was allocated; dangles when `len` is 0. Not looked at where `mapping` is there.
    memory: NonNull<u8>,
    /// In which it lies, with others that own their own parts of it.
    mapping: Option<Arc<Mapping>>,
    start: NonNull<u8>,
    len: usize,
}

/// Gives empty buffers an aligned address too.
#[repr(align(4096))]
struct Aligned;

const _: () = assert!(align_of::<Aligned>() == BUFFER_ALIGN);

impl AlignedBuf {
    /// A buffer of `len` zero bytes.
    pub fn zeroed(len: usize) -> AlignedBuf {
        let memory = match Self::layout(len) {
            None => NonNull::<Aligned>::dangling().cast(),
            Some(layout) => {
                // SAFETY: the layout's size is not zero.
                let memory = unsafe { alloc_zeroed(layout) };
                NonNull::new(memory).unwrap_or_else(|| handle_alloc_error(layout))
            }
        };
        let at = memory.as_ptr() as usize;
        let skip = at.next_multiple_of(BUFFER_ALIGN) - at;
        // SAFETY: aligned memory is skipped by nothing, and a large allocation is longer than
        // `len` by more than what can be skipped.
        let start = unsafe { memory.add(skip) };
        AlignedBuf {
            memory,
            mapping: None,
            start,
            len,
        }
    }

    /// So many buffers of `len` zero bytes each, side by side in memory behind which the kernel puts large pages at their first use, if it has some:
    /// it then looks up a page for each of 2 MiB that a device reads or writes, not one for each of 4 KiB. For who keeps them.
    ///
    /// # Panics
    /// They have no place in the address space. Without memory the process is aborted, as by any allocation.
    pub fn in_large_pages(len: usize, count: usize) -> Vec<AlignedBuf> {
        let all = len.checked_next_multiple_of(BUFFER_ALIGN);
        let all = all.and_then(|step| step.checked_mul(count));
        let layout = all.and_then(|all| Layout::from_size_align(all, BUFFER_ALIGN).ok());
        let layout = layout.expect("below the address space");
        Self::try_in_large_pages(len, count).unwrap_or_else(|| handle_alloc_error(layout))
    }

    /// The same; `None`: there is no memory for so many.
    pub fn try_in_large_pages(len: usize, count: usize) -> Option<Vec<AlignedBuf>> {
        // Each begins as direct I/O wants it.
        let step = len.checked_next_multiple_of(BUFFER_ALIGN)?;
        let all = step.checked_mul(count)?;
        let mut made = Vec::new();
        made.try_reserve_exact(count).ok()?;
        if all == 0 {
            made.extend((0..count).map(|_| AlignedBuf::zeroed(0)));
            return Some(made);
        }
        let mapping = Arc::new(Mapping::try_new(all)?);
        mapping.ask_for_large();
        let part = |at: usize| {
            // SAFETY: `count` times `step` bytes are mapped.
            let start = unsafe { mapping.start().add(at * step) };
            AlignedBuf {
                memory: start,
                mapping: Some(Arc::clone(&mapping)),
                start,
                len,
            }
        };
        made.extend((0..count).map(part));
        Some(made)
    }

    /// A copy of `bytes`.
    pub fn from_slice(bytes: &[u8]) -> AlignedBuf {
        let mut buf = AlignedBuf::zeroed(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What it is a part of, if it is one of several.
    pub(crate) fn mapping(&self) -> Option<&Arc<Mapping>> {
        self.mapping.as_ref()
    }

    fn layout(len: usize) -> Option<Layout> {
        let layout = match len < LARGE {
            true => Layout::from_size_align(len, BUFFER_ALIGN),
            false => Layout::from_size_align(len.saturating_add(BUFFER_ALIGN), 16),
        };
        (len > 0).then(|| layout.expect("a buffer is smaller than the address space"))
    }
}

// SAFETY: the buffer owns its memory alone, as a `Box<[u8]>` would.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared references give only shared access to plain bytes.
unsafe impl Sync for AlignedBuf {}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if self.mapping.is_some() {
            return;
        }
        if let Some(layout) = Self::layout(self.len) {
            // SAFETY: `memory` came from `alloc_zeroed` with this very layout.
            unsafe { dealloc(self.memory.as_ptr(), layout) }
        }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `start` names `len` initialised bytes (or dangles with `len` 0), owned by self, and mapped as long as `mapping` is there.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl AsMut<[u8]> for AlignedBuf {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl AsRef<[u8]> for AlignedBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Clone for AlignedBuf {
    fn clone(&self) -> Self {
        AlignedBuf::from_slice(self)
    }
}

impl std::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AlignedBuf")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// True when direct I/O that wants `align`-byte alignment can use `bytes` in place.
pub(crate) fn is_aligned(bytes: &[u8], align: usize) -> bool {
    (bytes.as_ptr() as usize).is_multiple_of(align)
}

/// Memory that was lent, for one transfer. Whoever has it may use the bytes, nobody else.
pub struct Segment {
    start: NonNull<u8>,
    len: usize,
    /// The mapping that it lies in, if one is known: to be told from others, not to be followed.
    mapping: Option<NonNull<Mapping>>,
    /// Not of memory that is borrowed to be looked at.
    writable: bool,
}

// SAFETY: a segment is the only way to its bytes (invariant 1), like a `&mut [u8]`, or a `&[u8]` if it is not writable.
unsafe impl Send for Segment {}

impl Segment {
    /// Nothing: what an operation has that moves no bytes.
    pub(crate) fn empty() -> Segment {
        Segment {
            start: NonNull::<Aligned>::dangling().cast(),
            len: 0,
            mapping: None,
            writable: true,
        }
    }

    /// Whether it is memory of this mapping.
    pub(crate) fn is_of(&self, mapping: &Arc<Mapping>) -> bool {
        self.mapping
            .is_some_and(|own| std::ptr::eq(own.as_ptr(), Arc::as_ptr(mapping)))
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: initialised memory that is there until the segment is given back (invariants 1 and 2).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// # Panics
    /// The memory was lent to be looked at only.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(self.writable, "memory that is only looked at");
        // SAFETY: as in `bytes`; nobody else has a way to it (invariant 1).
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Where it begins, for the kernel.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl std::fmt::Debug for Segment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Segment({})", self.len)
    }
}

/// A buffer of which parts are lent; see the module's head.
#[derive(Debug)]
pub(crate) struct Lent {
    /// `None` once it was taken back.
    buf: Option<AlignedBuf>,
    /// What lies before was lent already, so that no byte is lent twice.
    next: usize,
    out: usize,
}

impl Lent {
    pub fn new(buf: AlignedBuf) -> Lent {
        Lent {
            buf: Some(buf),
            next: 0,
            out: 0,
        }
    }

    /// Lends a range that lies behind all those lent before.
    ///
    /// # Panics
    /// It does not, or not within the buffer.
    pub fn lend(&mut self, range: Range<usize>) -> Segment {
        let buf = self.buf.as_ref().expect("a buffer that is lent is there");
        assert!(self.next <= range.start, "bytes are lent once");
        assert!(
            range.start <= range.end && range.end <= buf.len,
            "bytes of the buffer"
        );
        (self.next, self.out) = (range.end, self.out + 1);
        Segment {
            // SAFETY: within the buffer, as was just looked at. No reference is made of it: others are lent of it.
            start: unsafe { buf.start.add(range.start) },
            len: range.end - range.start,
            mapping: buf
                .mapping
                .as_ref()
                .map(|mapping| NonNull::from(&**mapping)),
            writable: true,
        }
    }

    /// # Panics
    /// The segment is of another buffer.
    pub fn give_back(&mut self, segment: Segment) {
        let buf = self.buf.as_ref().expect("a buffer that is lent is there");
        let (start, end) = (
            buf.start.as_ptr() as usize,
            buf.start.as_ptr() as usize + buf.len,
        );
        let at = segment.start.as_ptr() as usize;
        assert!(
            start <= at && at + segment.len <= end,
            "memory of another buffer"
        );
        self.out -= 1;
    }

    /// The buffer, when everything is back.
    ///
    /// # Panics
    /// Something is not.
    pub fn into_inner(mut self) -> AlignedBuf {
        assert!(self.out == 0, "memory is in flight");
        self.buf.take().expect("a buffer that is lent is there")
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if self.out > 0 {
            // Invariant 2.
            std::mem::forget(self.buf.take());
        }
    }
}

/// Borrowed memory that is lent within a [`scope`].
pub(crate) struct Loans<'a> {
    out: usize,
    of: PhantomData<&'a mut [u8]>,
}

/// Calls `body`, which may lend what is borrowed for longer than the call and has everything back when it ends, well or by
/// panic. The process is aborted if not: the memory is about to be used by others.
pub(crate) fn scope<'a, R>(body: impl FnOnce(&mut Loans<'a>) -> R) -> R {
    let mut loans = Loans {
        out: 0,
        of: PhantomData,
    };
    body(&mut loans)
}

impl<'a> Loans<'a> {
    pub fn lend(&mut self, bytes: &'a mut [u8]) -> Segment {
        self.out += 1;
        Segment {
            len: bytes.len(),
            start: NonNull::from(bytes).cast(),
            mapping: None,
            writable: true,
        }
    }

    /// Memory that I/O only looks at.
    pub fn show(&mut self, bytes: &'a [u8]) -> Segment {
        self.out += 1;
        Segment {
            len: bytes.len(),
            start: NonNull::from(bytes).cast(),
            mapping: None,
            writable: false,
        }
    }

    pub fn give_back(&mut self, segment: Segment) {
        // It is gone with this call; one that came from elsewhere would be counted for one of ours.
        let Segment { .. } = segment;
        self.out -= 1;
    }
}

impl Drop for Loans<'_> {
    fn drop(&mut self) {
        if self.out > 0 {
            tracing::error!(
                segments = self.out,
                "memory was given up that I/O may be using"
            );
            std::process::abort();
        }
    }
}

/// Memory that is filled while others may look at it by racing copies ([`base::racy`]): no reference is made of it.
#[derive(Debug)]
pub struct Shared<'a> {
    start: NonNull<u8>,
    len: usize,
    of: PhantomData<&'a [u8]>,
}

// SAFETY: it is accessed by racing copies and by the kernel alone, from whatever thread.
unsafe impl Send for Shared<'_> {}

impl<'a> Shared<'a> {
    /// # Safety
    /// As long as it is there, the memory is valid for reads and writes of `len` bytes, all initialised, and others access it through
    /// [`base::racy`] only, and do not write it.
    pub unsafe fn new(start: NonNull<u8>, len: usize) -> Shared<'a> {
        let of = PhantomData;
        Shared { start, len, of }
    }

    /// Memory that is the caller's alone.
    pub fn of(bytes: &'a mut [u8]) -> Shared<'a> {
        let len = bytes.len();
        // SAFETY: borrowed for as long as it is there, so nobody else accesses it.
        unsafe { Shared::new(NonNull::from(bytes).cast(), len) }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first `at` bytes, and the others.
    fn split_at(self, at: usize) -> (Shared<'a>, Shared<'a>) {
        assert!(at <= self.len, "within the memory");
        let of = PhantomData;
        let first = Shared {
            start: self.start,
            len: at,
            of,
        };
        let second = Shared {
            // SAFETY: within the memory, or at its end.
            start: unsafe { self.start.add(at) },
            len: self.len - at,
            of,
        };
        (first, second)
    }

    /// The first `most` bytes, and the others if there are any.
    pub(crate) fn split_at_most(self, most: usize) -> (Shared<'a>, Option<Shared<'a>>) {
        if self.len <= most {
            return (self, None);
        }
        let (first, second) = self.split_at(most);
        (first, Some(second))
    }

    /// Makes one of two that lie one behind the other; else gives the other one back.
    pub(crate) fn join(&mut self, next: Shared<'a>) -> Option<Shared<'a>> {
        if self.start.addr().get() + self.len != next.start.addr().get() {
            return Some(next);
        }
        self.len += next.len;
        None
    }

    /// Where it begins, for the kernel.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn copy_from(&mut self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len, "as many bytes");
        // SAFETY: valid for that (`new`); nobody else writes it, and who reads it does so by racing copies.
        unsafe { racy::copy_in(bytes.as_ptr(), self.start(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_in_large_pages_are_apart_and_outlive_each_other() {
        let mut all = AlignedBuf::in_large_pages(8192, 3);
        assert!(
            all.iter()
                .all(|buf| buf.len() == 8192 && is_aligned(buf, BUFFER_ALIGN))
        );
        for (value, buf) in (1u8..).zip(&mut all) {
            assert!(buf.iter().all(|&b| b == 0));
            buf.fill(value);
        }
        let last = all.pop().unwrap();
        drop(all);
        assert!(last.iter().all(|&b| b == 3));
        assert_eq!(&*last.clone(), &*last);
        for (len, count) in [(1, 3), (4097, 2), (0, 2), (4096, 0)] {
            let mut all = AlignedBuf::in_large_pages(len, count);
            assert_eq!(all.len(), count);
            for (value, buf) in (1u8..).zip(&mut all) {
                assert!(buf.len() == len && is_aligned(buf, BUFFER_ALIGN));
                buf.fill(value);
            }
            for (value, buf) in (1u8..).zip(&all) {
                assert!(buf.iter().all(|&b| b == value));
            }
        }
    }

    #[test]
    fn a_segment_is_of_the_mapping_that_its_buffer_is_a_part_of() {
        let (mut ours, theirs) = (
            AlignedBuf::in_large_pages(4096, 2),
            AlignedBuf::in_large_pages(4096, 2),
        );
        let mapping = Arc::clone(ours[0].mapping().unwrap());
        let other = Arc::clone(theirs[0].mapping().unwrap());
        let mut lent = Lent::new(ours.remove(1));
        let segment = lent.lend(512..1024);
        assert!(segment.is_of(&mapping) && !segment.is_of(&other));
        lent.give_back(segment);
        let mut plain = Lent::new(AlignedBuf::zeroed(4096));
        let segment = plain.lend(0..512);
        assert!(!segment.is_of(&mapping) && !Segment::empty().is_of(&mapping));
        plain.give_back(segment);
    }

    #[test]
    fn a_buffer_is_aligned_zeroed_and_copied() {
        for len in [0, 1, 512, 4096, 100_000, LARGE - 1, LARGE, 1_000_000] {
            let mut buf = AlignedBuf::zeroed(len);
            assert!(is_aligned(&buf, BUFFER_ALIGN));
            assert_eq!(buf.len(), len);
            assert!(buf.iter().all(|&b| b == 0));
            buf.as_mut().fill(7);
            assert_eq!(&*buf.clone(), &*buf);
        }
    }

    #[test]
    fn what_is_lent_is_used_through_its_segments_and_comes_back() {
        let mut lent = Lent::new(AlignedBuf::zeroed(8192));
        let mut first = lent.lend(0..4096);
        let mut second = lent.lend(4096..8192);
        first.bytes_mut().fill(1);
        second.bytes_mut().fill(2);
        lent.give_back(second);
        lent.give_back(first);
        let buf = lent.into_inner();
        assert!(buf[..4096].iter().all(|&b| b == 1) && buf[4096..].iter().all(|&b| b == 2));
        let (mut page, shown) = (AlignedBuf::zeroed(512), [7u8; 512]);
        scope(|loans| {
            let mut to = loans.lend(&mut page);
            let from = loans.show(&shown);
            to.bytes_mut().copy_from_slice(from.bytes());
            loans.give_back(from);
            loans.give_back(to);
        });
        assert_eq!(page[..], shown);
    }

    #[test]
    #[should_panic(expected = "memory is in flight")]
    fn a_buffer_with_a_part_in_flight_is_not_taken_back() {
        let mut lent = Lent::new(AlignedBuf::zeroed(4096));
        let _out = lent.lend(0..512);
        drop(lent.into_inner());
    }

    #[test]
    #[should_panic(expected = "bytes are lent once")]
    fn no_byte_is_lent_twice() {
        let mut lent = Lent::new(AlignedBuf::zeroed(4096));
        let _out = lent.lend(0..1024);
        let _again = lent.lend(512..2048);
    }

    #[test]
    #[should_panic(expected = "only looked at")]
    fn what_is_shown_is_not_written() {
        let shown = [0u8; 512];
        scope(|loans| {
            let mut segment = loans.show(&shown);
            let written = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                segment.bytes_mut().fill(1);
            }));
            loans.give_back(segment);
            std::panic::resume_unwind(written.unwrap_err());
        });
    }
}
