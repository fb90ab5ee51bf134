//! Directory listings as READDIR and READDIRPLUS carry them.

use zerocopy::IntoBytes;

use crate::abi;
use crate::encode;
use crate::ops::Entry;

/// A listing under construction, bounded by what the kernel asked for.
#[derive(Debug)]
pub struct DirectoryReply<'a> {
    out: &'a mut [u8],
    len: usize,
    plus: bool,
}

impl<'a> DirectoryReply<'a> {
    /// A listing that fills `out`; `plus`: with attributes.
    pub fn new(out: &'a mut [u8], plus: bool) -> Self {
        DirectoryReply { out, len: 0, plus }
    }

    /// Each entry brings its attributes and counts as one lookup ([`Self::add_with`]).
    pub fn wants_attributes(&self) -> bool {
        self.plus
    }

    /// Whether an entry with a name of `name_len` bytes still fits. Asked before a lookup is
    /// counted, so that none is counted in vain.
    pub fn has_room(&self, name_len: usize) -> bool {
        self.size(name_len) <= self.room()
    }

    /// Bytes left.
    pub fn room(&self) -> usize {
        self.out.len() - self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes filled.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes that an entry with a name of `name_len` bytes takes.
    pub fn size(&self, name_len: usize) -> usize {
        let head = if self.plus {
            size_of::<abi::EntryOut>()
        } else {
            0
        };
        head + abi::dirent_size(name_len)
    }

    /// Adds an entry without attributes; `mode` gives its type, `next` is the position after
    /// it. False, and nothing added, when it does not fit.
    pub fn add(&mut self, ino: u64, mode: u32, name: &[u8], next: u64) -> bool {
        if !self.has_room(name.len()) {
            return false;
        }
        if self.plus {
            // Node 0: the kernel learns the name only.
            self.put(abi::EntryOut::default().as_bytes());
        }
        self.put_dirent(ino, mode, name, next);
        true
    }

    /// Adds an entry with its attributes; the caller has counted one lookup of it. False, and
    /// nothing added, when it does not fit.
    pub fn add_with(&mut self, entry: &Entry, name: &[u8], next: u64) -> bool {
        if !self.plus {
            return self.add(entry.attributes.ino, entry.attributes.mode, name, next);
        }
        if !self.has_room(name.len()) {
            return false;
        }
        self.put(encode::entry(entry).as_bytes());
        self.put_dirent(entry.attributes.ino, entry.attributes.mode, name, next);
        true
    }

    fn put_dirent(&mut self, ino: u64, mode: u32, name: &[u8], next: u64) {
        let dirent = abi::Dirent {
            ino,
            off: next,
            namelen: name.len() as u32,
            // The DT_ constants are the type bits of the mode, shifted.
            kind: (mode & libc::S_IFMT) >> 12,
        };
        self.put(dirent.as_bytes());
        self.put(name);
        let padded = self.len.next_multiple_of(8);
        self.out[self.len..padded].fill(0);
        self.len = padded;
    }

    fn put(&mut self, bytes: &[u8]) {
        self.out[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }
}

/// The nodes a READDIRPLUS listing counted as looked up, to be given back when it could not
/// be delivered.
pub fn counted_nodes(listing: &[u8]) -> Vec<u64> {
    use zerocopy::FromBytes;
    let mut nodes = Vec::new();
    let mut rest = listing;
    while let Ok((entry, after)) = abi::EntryOut::read_from_prefix(rest) {
        let Ok((dirent, _)) = abi::Dirent::read_from_prefix(after) else {
            break;
        };
        if entry.nodeid != 0 {
            nodes.push(entry.nodeid);
        }
        let Some(next) = after.get(abi::dirent_size(dirent.namelen as usize)..) else {
            break;
        };
        rest = next;
    }
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Attributes;
    use std::time::Duration;

    #[test]
    fn entries_are_padded_and_stop_at_the_end_of_the_buffer() {
        let mut out = vec![0xffu8; 70];
        let mut reply = DirectoryReply::new(&mut out, false);
        assert!(reply.add(7, libc::S_IFREG, b"abc", 1));
        assert_eq!(reply.len(), 32);
        assert!(reply.add(8, libc::S_IFDIR, b"abcdefgh", 2));
        assert_eq!(reply.len(), 64);
        assert!(!reply.add(9, libc::S_IFDIR, b"x", 3));
        assert_eq!(reply.len(), 64);
        assert_eq!(&out[24..32], b"abc\0\0\0\0\0");
        assert_eq!(out[20], 8, "DT_REG");
    }

    #[test]
    fn counted_nodes_are_those_with_attributes() {
        let mut out = vec![0u8; 1024];
        let mut reply = DirectoryReply::new(&mut out, true);
        let entry = Entry {
            node: 42,
            generation: 1,
            attributes: Attributes::default(),
            valid: Duration::ZERO,
        };
        assert!(reply.add(1, libc::S_IFDIR, b".", 1));
        assert!(reply.add_with(&entry, b"name", 2));
        let len = reply.len();
        assert_eq!(counted_nodes(&out[..len]), [42]);
        for cut in 0..len {
            counted_nodes(&out[..cut]);
        }
    }
}
