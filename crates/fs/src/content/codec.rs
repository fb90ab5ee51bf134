//! Reading on-disk structures from byte strings that may hold anything.

use base::clock::Timestamp;
use format::{Damage, packed};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A cursor over the bytes of one structure; running out of them is damage.
pub struct Reader<'a> {
    structure: &'static str,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub fn new(structure: &'static str, bytes: &'a [u8]) -> Self {
        Reader {
            structure,
            rest: bytes,
        }
    }

    pub fn damage(&self, what: impl Into<String>) -> Damage {
        Damage::new(self.structure, what)
    }

    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub fn left(&self) -> usize {
        self.rest.len()
    }

    /// What is left, which stays.
    pub fn peek(&self) -> &'a [u8] {
        self.rest
    }

    /// All that is left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    pub fn take(&mut self, len: usize) -> Result<&'a [u8], Damage> {
        match self.rest.split_at_checked(len) {
            Some((head, tail)) => {
                self.rest = tail;
                Ok(head)
            }
            None => Err(self.damage("cut short")),
        }
    }

    /// A reader over the next `len` bytes.
    pub fn part(&mut self, len: usize) -> Result<Reader<'a>, Damage> {
        Ok(Reader::new(self.structure, self.take(len)?))
    }

    pub fn get<T: FromBytes + KnownLayout + Immutable>(&mut self) -> Result<T, Damage> {
        let bytes = self.take(size_of::<T>())?;
        T::read_from_bytes(bytes).map_err(|_| self.damage("cut short"))
    }

    pub fn u8(&mut self) -> Result<u8, Damage> {
        Ok(self.take(1)?[0])
    }

    pub fn u32(&mut self) -> Result<u32, Damage> {
        Ok(self.get::<format::U32>()?.get())
    }

    pub fn u64(&mut self) -> Result<u64, Damage> {
        Ok(self.get::<format::U64>()?.get())
    }

    /// A number of variable length.
    pub fn number(&mut self) -> Result<u64, Damage> {
        let (number, rest) = packed::number(self.rest).ok_or_else(|| self.damage("no number"))?;
        self.rest = rest;
        Ok(number)
    }

    /// The same, below 2^32.
    pub fn small_number(&mut self) -> Result<u32, Damage> {
        let number = self.number()?;
        u32::try_from(number).map_err(|_| self.damage("number out of range"))
    }

    /// A packed time.
    pub fn time(&mut self) -> Result<Timestamp, Damage> {
        let ((sec, nsec), rest) = packed::time(self.rest)?;
        self.rest = rest;
        Ok(Timestamp::new(sec, nsec))
    }

    /// Damage when anything is left over.
    pub fn finish(self) -> Result<(), Damage> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(self.damage(format!("{} bytes too long", self.rest.len())))
        }
    }
}

/// Appends a structure's bytes.
pub fn put<T: IntoBytes + Immutable>(out: &mut Vec<u8>, value: &T) {
    out.extend_from_slice(value.as_bytes());
}

pub fn put_time(out: &mut Vec<u8>, time: Timestamp) {
    packed::put_time(out, time.sec(), time.nsec());
}

pub fn put_u32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_le_bytes());
}

pub fn put_u64(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_le_bytes());
}
