//! Records on their way into a batch: one staging buffer per shard and epoch. Checked by `model/`.
//!
//! Invariants:
//! 1. A record is staged under a pin of its epoch; an epoch is gathered only when it is closed
//!    and its pins are gone. So a batch holds all records of its epoch, and no others but those of invariant 5.
//! 2. Only two staging slots exist: epoch e+2 opens after e was gathered, because one caller at a
//!    time closes and gathers.
//! 3. `bytes` is the payload of all staging slots, but for what threads have added, or taken, and not handed over.
//! 4. In each shard and epoch the first record that comes with a credit pays for header and padding of the batch: so
//!    every batch is paid for at least once, whichever records get into it.
//! 5. A record without a credit pays for nothing. Those of an epoch that has no others are kept, and come first in the
//!    batch of the next epoch that is paid for, or asked for: a batch of none but these would be as long as one of
//!    many, and nobody has counted how often others close an epoch meanwhile. It follows that they are durable with
//!    some later epoch than theirs, so they are records that nobody waits for; and as an operation that builds on
//!    one has a credit, none of theirs is in an earlier batch.

use crate::epoch::{EpochPin, OpenEpoch, Pins};
use crate::sum::Sum;
use base::canary::{Canary, planted};
use base::sync::{Latch, rank};
use base::thread::lane;

/// One shard's staging; on cache lines of its own.
#[repr(align(128))]
#[derive(Debug)]
struct Shard {
    pins: Pins,
    staged: Latch<[Records; 2]>,
}

/// Records of one or more shards and one epoch, in pieces, so that staging many moves none of them.
#[derive(Debug, Default)]
pub(crate) struct Records {
    pub pieces: Vec<Vec<u8>>,
    pub count: u32,
    /// Shards that have paid for header and padding of the batch (invariant 4).
    pub paid: u32,
    /// Checksums of data in them.
    pub sums: u32,
}

/// Capacity of a piece that takes several records.
const PIECE: usize = 64 << 10;

impl Records {
    fn push(&mut self, record: &[u8], sums: u32) {
        self.sums += sums;
        let fits = |piece: &Vec<u8>| piece.capacity() - piece.len() >= record.len();
        match self.pieces.last_mut().filter(|piece| fits(piece)) {
            Some(piece) => piece.extend_from_slice(record),
            None => {
                // The first piece is small: with frequent commits it is the only one.
                let least = if self.pieces.is_empty() {
                    PIECE / 16
                } else {
                    PIECE
                };
                let mut piece = Vec::with_capacity(least.max(record.len()));
                piece.extend_from_slice(record);
                self.pieces.push(piece);
            }
        }
        self.count += 1;
    }

    /// Bytes of all records.
    pub fn payload(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len() as u64).sum()
    }
}

/// A pinned epoch; unpinned on drop.
#[derive(Debug)]
pub(crate) struct Pin<'a> {
    shard: &'a Shard,
    pin: EpochPin<'a>,
}

impl Pin<'_> {
    pub fn epoch(&self) -> u64 {
        self.pin.epoch
    }
}

#[derive(Debug)]
pub(crate) struct Staging {
    epoch: OpenEpoch,
    shards: Vec<Shard>,
    bytes: Sum,
}

impl Staging {
    /// Staging for so many shards, with [`bytes`](Self::bytes) at most `slack` away.
    pub fn new(epoch: u64, shards: usize, slack: u64) -> Staging {
        let shard = |i| Shard {
            pins: Pins::new(),
            staged: Latch::keyed(rank::STAGING, i as u64, Default::default()),
        };
        Staging {
            epoch: OpenEpoch::new(epoch),
            shards: (0..shards).map(shard).collect(),
            bytes: Sum::new(shards, slack as i64),
        }
    }

    /// The open epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch.get()
    }

    /// Bytes of memory that staged records take, roughly.
    pub fn bytes(&self) -> u64 {
        self.bytes.about().max(0) as u64
    }

    /// Pins the open epoch. Nothing may block until the pin is dropped.
    pub fn pin(&self, shard: usize) -> Pin<'_> {
        let shard = &self.shards[shard % self.shards.len()];
        let pin = self.epoch.pin(&shard.pins);
        Pin { shard, pin }
    }

    /// Stages a record, which has so many checksums of data, under a pin (invariant 1). Returns whether it pays for the
    /// batch, if it can (invariant 4).
    pub fn push(&self, pin: &Pin<'_>, record: &[u8], sums: u32, can_pay: bool) -> bool {
        let mut staged = pin.shard.staged.lock();
        let slot = &mut staged[(pin.epoch() % 2) as usize];
        slot.push(record, sums);
        let pays = can_pay && slot.paid == 0;
        slot.paid += pays as u32;
        self.bytes.add(lane(), record.len() as i64);
        pays
    }

    /// Whether records are staged that nobody has gathered.
    pub fn has_records(&self) -> bool {
        let staged = |shard: &Shard| shard.staged.lock().iter().any(|records| records.count > 0);
        self.shards.iter().any(staged)
    }

    /// Closes the open epoch and takes its records, behind what was `kept`; keeps them if they pay for no batch, unless
    /// one is asked for (invariant 5). One caller at a time (invariant 2).
    pub fn close(&self, kept: &mut Records, asked: bool) -> (u64, Records) {
        let epoch = self.epoch.close();
        let mut all = std::mem::take(kept);
        for shard in &self.shards {
            if !planted(Canary::PinsIgnored) {
                shard.pins.wait(epoch);
            }
            let staged = std::mem::take(&mut shard.staged.lock()[(epoch % 2) as usize]);
            self.bytes.add(lane(), -(staged.payload() as i64));
            all.pieces.extend(staged.pieces);
            all.count += staged.count;
            all.paid += staged.paid;
            all.sums += staged.sums;
        }
        if all.paid == 0 && !asked {
            std::mem::swap(kept, &mut all);
        }
        (epoch, all)
    }
}
