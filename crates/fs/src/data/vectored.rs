//! Reads and writes of several parts of memory, as one.
//!
//! 1. Bytes up to [`GATHERED_MAX`] pass through one piece of memory, and are one read or write like any other.
//! 2. What is more goes step by step under the exclusive I/O lock: so it needs no memory of its size, and nobody sees, or changes, a part
//!    of it meanwhile.
//! 3. Whether it can be done at all is known before memory is taken for it.

use super::bounce::Bounce;
use super::file::OpenFile;
use super::ranges::Mode;
use super::read::Reading;
use super::write::is_whole;
use super::{Files, PAGE, SIZE_MAX, pages_of};
use crate::Error;
use base::moves;
use std::io::{IoSlice, IoSliceMut};

/// Bytes of all parts together, at most: 2 GiB less a page, as in Linux.
const PARTS_MAX: usize = (i32::MAX as usize) & !(PAGE as usize - 1);
/// Bytes that are copied to one piece of memory.
const GATHERED_MAX: usize = 16 << 20;
/// Bytes that are copied at a time of what is more.
const STEP: usize = 1 << 20;
/// What a file may grow by between a look at its size and a second read of what it has.
const GROWTH: u64 = 1 << 20;

fn gathered_max() -> usize {
    base::tight::limit(GATHERED_MAX, 16 << 10)
}

/// Bytes of all parts, as many as are taken.
fn len_of<'a>(parts: impl Iterator<Item = &'a [u8]>) -> usize {
    let add = |sum: usize, part: &[u8]| sum.saturating_add(part.len());
    parts.fold(0, add).min(PARTS_MAX)
}

/// Parts that are copied one behind the other.
struct Gather<'a, 'p> {
    parts: std::slice::Iter<'p, IoSlice<'a>>,
    rest: &'p [u8],
}

impl<'a, 'p> Gather<'a, 'p> {
    fn new(parts: &'p [IoSlice<'a>]) -> Gather<'a, 'p> {
        Gather {
            parts: parts.iter(),
            rest: &[],
        }
    }

    /// Fills `out`; the parts have as many bytes.
    fn fill(&mut self, mut out: &mut [u8]) {
        while !out.is_empty() {
            while self.rest.is_empty() {
                self.rest = self.parts.next().expect("as many bytes as were counted");
            }
            let len = self.rest.len().min(out.len());
            let (here, behind) = out.split_at_mut(len);
            here.copy_from_slice(&self.rest[..len]);
            (self.rest, out) = (&self.rest[len..], behind);
        }
    }
}

impl Files {
    /// As [`write`](Self::write) of all of `parts`, one behind the other: one write. Of more than 2 GiB less a page the rest is not written.
    pub fn write_vectored(
        &self,
        file: &OpenFile,
        offset: u64,
        parts: &[IoSlice<'_>],
    ) -> Result<usize, Error> {
        if let [only] = parts {
            return self.write(file, offset, &only[..only.len().min(PARTS_MAX)]);
        }
        if !file.writable() {
            return Err(Error::BadHandle);
        }
        self.check_writable()?;
        let mut len = len_of(parts.iter().map(|part| &part[..]));
        if !file.has(libc::O_APPEND) && len > 0 {
            if offset >= SIZE_MAX {
                return Err(Error::FileTooLarge);
            }
            len = len.min((SIZE_MAX - offset) as usize);
        }
        if len <= gathered_max() {
            // A page that two of them share changes once.
            let mut all = self.memory.take(len);
            Gather::new(parts).fill(&mut all);
            return self.write(file, offset, &all);
        }
        self.balance(&file.state)?;
        let written = self.write_parts(file, offset, parts, len)?;
        self.give_way(written);
        if file.has(libc::O_DSYNC) {
            self.fsync(file, !file.has(libc::O_SYNC))?;
        }
        Ok(written)
    }

    /// Invariant 2.
    #[cold]
    fn write_parts(
        &self,
        file: &OpenFile,
        offset: u64,
        parts: &[IoSlice<'_>],
        len: usize,
    ) -> Result<usize, Error> {
        let state = &file.state;
        let (append, direct) = (file.has(libc::O_APPEND), file.has(libc::O_DIRECT));
        let mut parts = Gather::new(parts);
        let mut memory = self.memory.take(STEP);
        let (start, mut at, past) = {
            let _exclusive = self.lock_to_change(state)?;
            let start = if append { state.size() } else { offset };
            let end = start.saturating_add(len as u64).min(SIZE_MAX);
            if end <= start {
                return Err(Error::FileTooLarge);
            }
            let whole = is_whole(start, (end - start) as usize);
            let kept = self.is_kept_together(state, (end - start) / PAGE);
            let past = direct && !append && whole && !kept;
            if past {
                self.make_way(state, pages_of(start..end))?;
            }
            let mut at = start;
            let mut outcome = Ok(());
            while at < end {
                // Steps end at multiples of the step, so that the next ones are whole pages.
                let stop = (at / STEP as u64 * STEP as u64).saturating_add(STEP as u64);
                let piece = &mut memory[..(stop.min(end) - at) as usize];
                parts.fill(piece);
                let written = match past {
                    true => self.direct_step(state, at / PAGE, piece),
                    false => self.write_locked(state, at, piece),
                };
                match written {
                    Ok(written) => at += written as u64,
                    Err(ref error) => outcome = Err(error.clone()),
                }
                if !written.is_ok_and(|written| written == piece.len()) {
                    break;
                }
            }
            if past {
                self.note_ahead(state);
            }
            if at == start {
                outcome.inspect_err(|_| self.spare_inline(state))?;
            }
            (start, at, past)
        };
        if direct && !past {
            self.flush_range(state, pages_of(start..at))?;
        }
        at -= start;
        Ok(at as usize)
    }

    /// As [`read`](Self::read) into all of `parts`, one behind the other: one read, of 2 GiB less a page at most.
    pub fn read_vectored(
        &self,
        file: &OpenFile,
        offset: u64,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<usize, Error> {
        if let [only] = parts {
            let len = only.len().min(PARTS_MAX);
            return self.read(file, offset, &mut only[..len]);
        }
        file.check_readable()?;
        let wanted = len_of(parts.iter().map(|part| &part[..]));
        // A page that two of them share is read once.
        for growth in [0, GROWTH] {
            let left = file.state.size().saturating_sub(offset);
            let most = left.saturating_add(growth).min(wanted as u64) as usize;
            if most > gathered_max() {
                break;
            }
            let mut all = self.memory.take(most);
            let len = self.read(file, offset, &mut all)?;
            // A file that has grown ends elsewhere by now.
            if len < most || len == wanted || offset + len as u64 >= file.state.size() {
                scatter(&all, len, parts);
                return Ok(len);
            }
        }
        self.read_parts(file, offset, parts, wanted)
    }

    /// Invariant 2: a file whose end is looked for does not grow meanwhile.
    #[cold]
    fn read_parts(
        &self,
        file: &OpenFile,
        offset: u64,
        parts: &mut [IoSliceMut<'_>],
        wanted: usize,
    ) -> Result<usize, Error> {
        let state = &file.state;
        let pages = pages_of(offset..offset.saturating_add(wanted as u64));
        let _range = self.hold(state, pages, Mode::Load);
        let _exclusive = self.lock_exclusive(state)?;
        let how = Reading {
            keep: !file.has(libc::O_DIRECT),
            alone: true,
            in_turn: true,
            counts: !file.has(libc::O_NOATIME),
            ..Reading::beside()
        };
        let mut done = 0;
        for part in parts {
            let part_len = part.len().min(wanted - done);
            let part = &mut part[..part_len];
            let at = offset.saturating_add(done as u64);
            let len = match self.read_locked(state, at, part, &how) {
                Ok(len) => len.unwrap_or(0),
                // What was read is told; the next read fails at once.
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            };
            done += len;
            if len < part.len() || done == wanted {
                break;
            }
        }
        Ok(done)
    }
}

/// Copies the first `len` bytes of `all` to parts, one behind the other.
fn scatter(all: &Bounce<'_>, len: usize, parts: &mut [IoSliceMut<'_>]) {
    let mut rest = &all[..len];
    for part in parts {
        let (here, behind) = rest.split_at(part.len().min(rest.len()));
        moves::copy(here, &mut part[..here.len()]);
        rest = behind;
    }
}
