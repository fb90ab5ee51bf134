//! The model of an atomic write: what it has staged, over whatever its file holds by then.

use crate::op::{Atomic, pattern};
use crate::tree::Id;

/// A step that was staged.
#[derive(Clone, Debug)]
enum Piece {
    Write { offset: u64, bytes: Vec<u8> },
    Cut(u64),
}

/// What was staged, in its order. To do all of it again on what the file holds now is what its commit does: what it did not write, and did not cut, is
/// the file's.
#[derive(Clone, Debug)]
pub struct Staged {
    pub file: Id,
    pieces: Vec<Piece>,
}

impl Staged {
    pub fn new(file: Id) -> Staged {
        Staged {
            file,
            pieces: Vec::new(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// A step that stages something, where `shown` is what the file holds with what was staged before.
    pub fn add(&mut self, step: &Atomic, shown: &[u8]) {
        match step {
            Atomic::Write { at, len, tag } => {
                let offset = at.unwrap_or(shown.len() as u64);
                let bytes = pattern(*tag, offset, *len);
                self.pieces.push(Piece::Write { offset, bytes });
            }
            Atomic::Truncate(size) => self.pieces.push(Piece::Cut(*size)),
            Atomic::Start(_) | Atomic::Commit | Atomic::Drop => {}
        }
    }

    /// The newest write: where, and what.
    pub fn newest(&self) -> Option<(u64, &[u8])> {
        match self.pieces.last()? {
            Piece::Write { offset, bytes } => Some((*offset, bytes)),
            Piece::Cut(_) => None,
        }
    }

    /// What a file with these bytes becomes.
    pub fn over(&self, base: &[u8]) -> Vec<u8> {
        let mut all = base.to_vec();
        for piece in &self.pieces {
            match piece {
                Piece::Cut(size) => all.resize(*size as usize, 0),
                Piece::Write { offset, bytes } => {
                    let (start, end) = (*offset as usize, *offset as usize + bytes.len());
                    all.resize(all.len().max(end), 0);
                    all[start..end].copy_from_slice(bytes);
                }
            }
        }
        all
    }
}
