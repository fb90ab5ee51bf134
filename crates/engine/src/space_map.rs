//! The space map of one data chunk: which of its blocks are allocated.
//!
//! A space map is a node like any other, so an allocation is logged in the same record as
//! the change that needs it. Its existence is what makes a chunk a data chunk.

use format::Damage;

/// A run of blocks within a chunk that becomes allocated or free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpaceDelta {
    pub allocate: bool,
    pub start: u32,
    pub len: u32,
}

/// Allocation bitmap of a chunk (bit set: allocated).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpaceMap {
    words: Vec<u64>,
    blocks: u32,
    free: u32,
}

fn damage(what: impl Into<String>) -> Damage {
    Damage::new("space map", what)
}

impl SpaceMap {
    pub(crate) fn new(blocks: u32) -> Self {
        SpaceMap {
            words: vec![0; (blocks as usize).div_ceil(64)],
            blocks,
            free: blocks,
        }
    }

    /// A map with these blocks allocated; words beyond the chunk's end are cut, missing ones zero.
    pub(crate) fn of_words(words: &[u64], blocks: u32) -> Self {
        let mut map = SpaceMap::new(blocks);
        for (to, from) in map.words.iter_mut().zip(words) {
            *to = *from;
        }
        let tail = blocks % 64;
        if tail != 0
            && let Some(last) = map.words.last_mut()
        {
            *last &= (1 << tail) - 1;
        }
        let used: u32 = map.words.iter().map(|w| w.count_ones()).sum();
        map.free = blocks - used;
        map
    }

    pub fn free(&self) -> u32 {
        self.free
    }

    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    pub fn is_allocated(&self, block: u32) -> bool {
        self.words[block as usize / 64] >> (block % 64) & 1 == 1
    }

    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.blocks.to_le_bytes());
        for word in &self.words {
            out.extend_from_slice(&word.to_le_bytes());
        }
    }

    pub(crate) fn decode(body: &[u8]) -> Result<Self, Damage> {
        let (head, rest) = body
            .split_first_chunk::<4>()
            .ok_or_else(|| damage("shorter than its header"))?;
        let blocks = u32::from_le_bytes(*head);
        if blocks == 0 || rest.len() != (blocks as usize).div_ceil(64) * 8 {
            return Err(damage("size does not match the chunk"));
        }
        let words: Vec<u64> = rest
            .chunks_exact(8)
            .map(|c| u64::from_le_bytes(c.try_into().expect("chunks of 8")))
            .collect();
        let used: u32 = words.iter().map(|w| w.count_ones()).sum();
        if used > blocks {
            return Err(damage("more blocks allocated than the chunk has"));
        }
        Ok(SpaceMap {
            words,
            blocks,
            free: blocks - used,
        })
    }

    /// Every block of the run must be in the opposite state before.
    pub(crate) fn apply(&mut self, delta: &SpaceDelta) -> Result<(), Damage> {
        let end = delta
            .start
            .checked_add(delta.len)
            .filter(|&e| e <= self.blocks);
        let Some(end) = end else {
            return Err(damage(format!("run {delta:?} reaches past the chunk")));
        };
        for block in delta.start..end {
            if self.is_allocated(block) == delta.allocate {
                let state = if delta.allocate { "allocated" } else { "freed" };
                return Err(damage(format!("block {block} is {state} twice")));
            }
            self.words[block as usize / 64] ^= 1 << (block % 64);
        }
        if delta.allocate {
            self.free -= delta.len;
        } else {
            self.free += delta.len;
        }
        Ok(())
    }
}

impl SpaceDelta {
    /// Whether `next` does the same to the blocks right behind.
    pub(crate) fn ends_at(&self, next: &SpaceDelta) -> bool {
        self.allocate == next.allocate && self.start + self.len == next.start
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.push(self.allocate as u8);
        out.extend_from_slice(&self.start.to_le_bytes());
        out.extend_from_slice(&self.len.to_le_bytes());
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Damage> {
        let bytes: &[u8; 9] = bytes
            .try_into()
            .map_err(|_| damage("delta has the wrong size"))?;
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        if bytes[0] > 1 {
            return Err(damage("delta of unknown direction"));
        }
        Ok(SpaceDelta {
            allocate: bytes[0] == 1,
            start: word(1),
            len: word(5),
        })
    }
}
