//! Memory that is a mapping of its own, behind which the kernel can put large pages.
//!
//! Invariants:
//! 1. It is zeroed, private, and begins at a multiple of [`LARGE`]. It is charged to the process page by page, as it is touched; by large pages
//!    where the system gives them to all who touch (`enabled` is `always`), or it was asked for them ([`Mapping::ask_for_large`]).
//!    Or ahead of that, where somebody has it put there ([`Mapping::touch`]), which changes nothing either that is seen of it.
//! 2. [`Mapping::make_large`] changes nothing that is seen of it but how fast it is read: who reads or writes it meanwhile waits.

#[cfg(all(target_arch = "x86_64", not(miri)))]
use crate::racy;
#[cfg(miri)]
use std::alloc::Layout;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;

/// Bytes of a large page.
pub const LARGE: usize = 2 << 20;
/// No kernel has smaller ones.
const PAGE: usize = 4096;

/// What the kernel says of large pages.
#[cfg(not(miri))]
const SETTINGS: &str = "/sys/kernel/mm/transparent_hugepage";
/// Not every C library names it (asm-generic/mman-common.h).
#[cfg(not(miri))]
const MADV_COLLAPSE: libc::c_int = 25;
#[cfg(not(any(target_arch = "x86_64", miri)))]
const MADV_POPULATE_WRITE: libc::c_int = 23;

/// Has the kernel find a large page before one is made of a chunk, and the host of a virtual machine put memory behind it, while nobody waits for it: what was
/// given back last is, as a rule, what the same CPU is given next.
#[derive(Debug)]
pub struct Warmer(Mapping);

impl Warmer {
    /// `None`: there is no room for it.
    pub fn new() -> Option<Warmer> {
        let mapping = Mapping::map(LARGE)?;
        mapping.ask_for_large();
        Some(Warmer(mapping))
    }

    /// # Errors
    /// When the kernel does not take it back: it is kept, and there is no use in another try.
    pub fn warm(&mut self) -> io::Result<()> {
        // By a fault, which keeps nobody from changing other mappings of the process (see `Mapping::touch`).
        // SAFETY: it lies in the mapping, of which nobody else knows.
        unsafe { self.0.start.as_ptr().write_volatile(1) };
        self.0.discard()
    }
}

#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory that this value owns; who makes references to it answers for them.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// Whether [`Mapping::make_large`] has a chance: the kernel has large pages of this size, and whoever runs the system has not forbidden them.
#[cfg(not(miri))]
pub fn large_pages_allowed() -> bool {
    // What is simulated does not depend on the machine.
    #[cfg(feature = "simulate")]
    if crate::sched::active() {
        return false;
    }
    let setting = |name: &str| std::fs::read_to_string(format!("{SETTINGS}/{name}"));
    let size = setting("hpage_pmd_size").is_ok_and(|size| size.trim().parse() == Ok(LARGE));
    size && setting("enabled").is_ok_and(|enabled| !enabled.contains("[never]"))
}

#[cfg(miri)]
pub fn large_pages_allowed() -> bool {
    false
}

/// Whether the kernel puts a large page wherever somebody touches memory, without being asked.
pub fn large_pages_are_usual() -> bool {
    #[cfg(not(miri))]
    return std::fs::read_to_string(format!("{SETTINGS}/enabled"))
        .is_ok_and(|enabled| enabled.contains("[always]"));
    #[cfg(miri)]
    false
}

impl Mapping {
    /// At least `len` bytes, which are more than none. `None`: the address space that the process may have has no room for them.
    pub fn try_new(len: usize) -> Option<Mapping> {
        assert!(len > 0, "a mapping has bytes");
        Self::map(len)
    }

    #[cfg(not(miri))]
    fn map(len: usize) -> Option<Mapping> {
        let len = len.checked_next_multiple_of(PAGE)?;
        let all = len.checked_add(LARGE)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping where the kernel likes; nothing that is there is replaced.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), all, protection, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return None;
        }
        let mapped = mapped.cast::<u8>();
        let before = mapped.addr().next_multiple_of(LARGE) - mapped.addr();
        // What is not needed before and behind it goes back; that it cannot is no harm, for nobody touches it.
        // SAFETY: all of it lies in what was just mapped, and nobody knows of it.
        let start = unsafe {
            let start = mapped.add(before);
            if before > 0 {
                libc::munmap(mapped.cast(), before);
            }
            if before < LARGE {
                libc::munmap(start.add(len).cast(), LARGE - before);
            }
            start
        };
        Some(Mapping {
            start: NonNull::new(start)?,
            len,
        })
    }

    #[cfg(miri)]
    fn map(len: usize) -> Option<Mapping> {
        let layout = Layout::from_size_align(len, LARGE).ok()?;
        // SAFETY: the layout has a size.
        let start = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?;
        Some(Mapping { start, len })
    }

    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Its bytes.
    pub fn size(&self) -> usize {
        self.len
    }

    /// How many large pages it has room for.
    pub fn chunks(&self) -> usize {
        self.len / LARGE
    }

    /// Has the kernel put large pages behind chunks at their first use, where it has some and is allowed to.
    pub fn ask_for_large(&self) {
        // Where it refuses there are small ones, as without asking.
        #[cfg(not(miri))]
        // SAFETY: it lies in the mapping. What its bytes are does not change.
        unsafe {
            libc::madvise(self.start.as_ptr().cast(), self.len, libc::MADV_HUGEPAGE);
        }
    }

    /// Has its pages come from all nodes of memory in turn, of a machine that has several: else they come from the node of the thread that touches
    /// them first. What the process was told of its memory (`numactl`) goes before that.
    pub fn interleave(&self) {
        #[cfg(not(miri))]
        {
            let nodes = crate::sys::memory_nodes();
            if nodes.len() > 1 && crate::sys::memory_policy_is_usual() {
                // Where the kernel refuses, memory comes as it always does.
                let _ = self.interleave_over(nodes);
            }
        }
    }

    #[cfg(not(miri))]
    fn interleave_over(&self, nodes: &[usize]) -> io::Result<()> {
        const BITS: usize = libc::c_ulong::BITS as usize;
        let words = nodes.iter().max().map_or(1, |last| last / BITS + 1);
        let mut mask: Vec<libc::c_ulong> = vec![0; words];
        for node in nodes {
            mask[node / BITS] |= 1 << (node % BITS);
        }
        // SAFETY: it lies in the mapping, no page of which changes, and the kernel reads as many bits of the mask as are told, less one.
        let done = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.start.as_ptr(),
                self.len.next_multiple_of(PAGE),
                libc::MPOL_INTERLEAVE,
                mask.as_ptr(),
                words * BITS + 1,
                0,
            )
        };
        match done {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Has the kernel put memory behind the pages of these bytes where there is none yet, if it has some, and changes none of them, whoever reads or
    /// writes them meanwhile. On x86-64 as a write to each does, which keeps nobody from changing other mappings of the process, as
    /// heaps do that grow (Linux 6.4); the call that does so elsewhere keeps them waiting while it runs.
    pub fn touch(&self, bytes: Range<usize>) {
        assert!(
            bytes.start <= bytes.end && bytes.end <= self.len,
            "of the mapping"
        );
        // Miri knows no such thing.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        for at in (bytes.start / PAGE * PAGE..bytes.end).step_by(PAGE) {
            // SAFETY: all of the page lies in the mapping.
            unsafe { racy::touch(self.start.as_ptr().add(at)) };
        }
        #[cfg(not(any(target_arch = "x86_64", miri)))]
        // SAFETY: it lies in the mapping. What its bytes are does not change. Where the kernel has none, or does not know the call, the first use will do.
        unsafe {
            let first = bytes.start / PAGE * PAGE;
            let start = self.start.as_ptr().add(first);
            libc::madvise(start.cast(), bytes.end - first, MADV_POPULATE_WRITE);
        }
    }

    /// Gives back what is behind all of it; it is zeroed again.
    #[cfg(not(miri))]
    pub fn discard(&mut self) -> io::Result<()> {
        // SAFETY: it is the mapping, and nobody refers to it while it is borrowed so.
        let done =
            unsafe { libc::madvise(self.start.as_ptr().cast(), self.len, libc::MADV_DONTNEED) };
        match done {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    #[cfg(miri)]
    pub fn discard(&mut self) -> io::Result<()> {
        // SAFETY: all of it is allocated, and nobody refers to it while it is borrowed so.
        unsafe { self.start.write_bytes(0, self.len) };
        Ok(())
    }

    /// Has the kernel put one large page behind a chunk, in place of small ones: it copies them, and takes up to that much more
    /// memory meanwhile. Where nobody has touched the chunk it takes that for good.
    ///
    /// # Errors
    /// `InvalidInput`: it does not do that, and never will. Others: not now.
    #[cfg(not(miri))]
    pub fn make_large(&self, chunk: usize) -> io::Result<()> {
        assert!(chunk < self.chunks(), "a chunk of the mapping");
        // SAFETY: it lies in the mapping. What its bytes are does not change.
        let done = unsafe {
            let start = self.start.as_ptr().add(chunk * LARGE);
            libc::madvise(start.cast(), LARGE, MADV_COLLAPSE)
        };
        match done {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    #[cfg(miri)]
    pub fn make_large(&self, _chunk: usize) -> io::Result<()> {
        Err(io::ErrorKind::InvalidInput.into())
    }
}

impl Drop for Mapping {
    #[cfg(not(miri))]
    fn drop(&mut self) {
        // SAFETY: mapped in `map`, with this length; nobody refers to it any more.
        let done = unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert_eq!(done, 0, "it was mapped");
    }

    #[cfg(miri)]
    fn drop(&mut self) {
        let layout = Layout::from_size_align(self.len, LARGE).expect("it was allocated");
        // SAFETY: allocated in `map`, with this layout; nobody refers to it any more.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_stay_what_they_are_when_pages_become_large() {
        for len in [1, 4096, LARGE - 1, LARGE, 3 * LARGE + 5] {
            let mapping = Mapping::try_new(len).unwrap();
            let start = mapping.start().as_ptr();
            assert!(start.addr().is_multiple_of(LARGE));
            assert_eq!(mapping.chunks(), len.next_multiple_of(4096) / LARGE);
            // SAFETY: the mapping has `len` bytes, of which nobody else knows.
            let bytes = unsafe { std::slice::from_raw_parts_mut(start, len) };
            assert!(bytes.iter().all(|&byte| byte == 0));
            bytes
                .iter_mut()
                .zip(0..)
                .for_each(|(b, i)| *b = (i % 251) as u8);
            for chunk in 0..mapping.chunks() {
                // Whether the kernel has a large page to give is its own affair.
                if let Err(refused) = mapping.make_large(chunk) {
                    assert_ne!(refused.raw_os_error(), Some(libc::EFAULT));
                }
            }
            assert!(bytes.iter().zip(0..).all(|(b, i)| *b == (i % 251) as u8));
        }
    }

    #[test]
    #[cfg(not(miri))]
    fn pages_come_from_the_nodes_that_were_told() {
        let mapping = Mapping::try_new(8 * 4096).unwrap();
        mapping.interleave();
        match mapping.interleave_over(&[crate::sys::memory_nodes()[0]]) {
            // A kernel without nodes of memory.
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => return,
            done => done.unwrap(),
        }
        mapping.touch(0..8 * 4096);
        let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
        let start = format!("{:x} interleave", mapping.start().as_ptr().addr());
        assert!(maps.lines().any(|line| line.starts_with(&start)), "{maps}");
        assert!(mapping.interleave_over(&[1000]).is_err(), "no such node");
    }

    #[test]
    fn memory_that_comes_early_changes_no_byte_and_what_is_given_back_is_zeroed() {
        let mut mapping = Mapping::try_new(16 * 4096).unwrap();
        let start = mapping.start().as_ptr();
        // SAFETY: it lies in the mapping, of which nobody else knows.
        unsafe { start.add(5000).write(7) };
        mapping.touch(5000..4 * 4096);
        mapping.touch(0..0);
        #[cfg(not(miri))]
        {
            let mut there = [0u8; 16];
            // SAFETY: the mapping has 16 pages, and the array a byte for each.
            let told = unsafe { libc::mincore(start.cast(), 16 * 4096, there.as_mut_ptr()) };
            assert_eq!(told, 0);
            let there: Vec<usize> = (0..16).filter(|&i| there[i] & 1 == 1).collect();
            assert!(there == [1, 2, 3] || large_pages_are_usual(), "{there:?}");
        }
        // SAFETY: as above.
        let bytes = |mapping: &Mapping| unsafe {
            std::slice::from_raw_parts(mapping.start().as_ptr(), 16 * 4096).to_vec()
        };
        let set = bytes(&mapping).into_iter().enumerate();
        let set: Vec<(usize, u8)> = set.filter(|(_, byte)| *byte != 0).collect();
        assert_eq!(set, [(5000, 7)]);
        mapping.discard().unwrap();
        assert!(bytes(&mapping).iter().all(|&byte| byte == 0));
        if large_pages_allowed() {
            Warmer::new().unwrap().warm().unwrap();
        }
    }
}
