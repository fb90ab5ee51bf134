//! What lies leave behind, noted as they are told while threads work.
//!
//! Where a file's pages are cannot be asked in the middle of other threads' operations, so a lie
//! is known by its traces instead of its place:
//!
//! 1. The sectors that it touched, as they are after it, in the device's cache and durably. A file
//!    that shows such a sector, or some of its bytes among its own, shows a lie: nothing but the
//!    blocks of files can, since all else carries checksums. Whoever looks may see such sectors where the cache has what was written,
//!    clean: both may be there from then on ([`History::observe`](super::ledger::History::observe)).
//! 2. The batches of the journal that it hurt: themselves, or data for which they vouch. Recovery misses them in silence only if none that
//!    came later is whole; one that is tells what was durable when it was made, which is as long
//!    before it was written as batches are on their way together.

use crate::content::SECTOR;
use crate::lies::meets;
use crate::world::{Machine, Watch};
use base::sched;
use base::sync::{Mutex, rank};
use device::sim::{FaultKind, SimDevice};
use engine::Extent;
use format::geometry::Geometry;
use format::journal::{Action, BATCH_MAGIC, BatchHeader, DataSum, parse_records};
use std::ops::Range;
use std::sync::Arc;
use zerocopy::FromBytes;

/// More batches than are ever on their way at once, so that of two that are this far apart the
/// later one was made after the earlier was written.
const APART: usize = 8;

/// The head of a batch, as it was sent to a device.
#[derive(Debug)]
struct Head {
    device: usize,
    range: Range<u64>,
    hurt: bool,
    /// What it vouches for; `None`: that cannot be told.
    vouches: Option<Vec<Extent>>,
}

#[derive(Debug, Default)]
struct Notes {
    /// Faults of each device that were taken note of.
    noted: Vec<usize>,
    traces: Vec<[u8; SECTOR]>,
    heads: Vec<Head>,
    /// Places of lies outside of the journal.
    outside: Vec<(usize, Range<u64>)>,
    /// Heads still to come of which one may be that of a batch whose rest was lost before.
    hurt_ahead: usize,
    ever: bool,
}

#[derive(Debug)]
pub(super) struct Deceit {
    devices: Vec<Arc<SimDevice>>,
    /// Where the journal is on each device.
    ring: Vec<Vec<Range<u64>>>,
    geometry: Geometry,
    notes: Mutex<Notes>,
}

impl Deceit {
    /// Takes note of all that a machine's devices lie about from now on.
    pub fn watch(machine: &Machine) -> Arc<Deceit> {
        let geometry = machine.shape.geometry();
        let mut ring = vec![Vec::new(); machine.devices.len()];
        let (start, len) = (geometry.journal_start.byte(), geometry.journal_bytes());
        geometry.pieces(start, len as usize, |piece| {
            ring[piece.device].push(piece.offset..piece.offset + piece.len as u64);
        });
        let noted = machine.devices.iter().map(|d| d.struck().len()).collect();
        let deceit = Arc::new(Deceit {
            devices: machine.devices.clone(),
            ring,
            geometry,
            notes: Mutex::new(
                rank::LEAF,
                Notes {
                    noted,
                    ..Notes::default()
                },
            ),
        });
        machine.tap.watch(Arc::clone(&deceit) as Arc<dyn Watch>);
        deceit
    }

    fn in_ring(&self, device: usize, range: &Range<u64>) -> bool {
        let mut ring = self.ring[device].iter();
        ring.any(|part| part.start < range.end && range.start < part.end)
    }

    /// Takes note of what devices have lied about since the last time. No other thread runs
    /// meanwhile, so that the traces are those of the lies.
    pub fn look(&self) {
        sched::quietly(|| {
            for (index, device) in self.devices.iter().enumerate() {
                let struck = device.struck();
                let noted = std::mem::replace(&mut self.notes.lock().noted[index], struck.len());
                let told = [FaultKind::Rot, FaultKind::Lost, FaultKind::Overwritten];
                let lies = struck[noted..].iter();
                for lie in lies.filter(|lie| told.contains(&lie.kind)) {
                    let traces = traces(device, &lie.range);
                    let in_ring = self.in_ring(index, &lie.range);
                    let notes = &mut *self.notes.lock();
                    notes.ever = true;
                    notes.traces.extend(traces);
                    match in_ring {
                        true => notes.hurt(index, &lie.range, lie.kind),
                        false => {
                            let place = [(index, lie.range.clone())];
                            // Those before are confirmed.
                            let last = notes.heads.len().saturating_sub(APART);
                            let heads = notes.heads[last..].iter_mut();
                            heads.for_each(|h| h.hurt |= h.rests_on(&self.geometry, &place));
                            notes.outside.extend(place);
                        }
                    }
                }
            }
        });
    }

    /// A lie was told.
    pub fn ever(&self) -> bool {
        self.notes.lock().ever
    }

    /// Batches that were sent to the journal so far.
    pub fn mark(&self) -> usize {
        self.notes.lock().heads.len()
    }

    /// Whether what was durable at this mark is there, or its loss is noticed.
    pub fn is_firm(&self, mark: usize) -> bool {
        let notes = self.notes.lock();
        let hurt = notes.heads.iter().position(|head| head.hurt);
        hurt.is_none_or(|first| first >= mark) || notes.is_whole_after(mark)
    }

    /// Whether batches at the journal's end may be missing although their writes had succeeded.
    pub fn tail_may_be_missing(&self) -> bool {
        let notes = self.notes.lock();
        let hurt = notes.heads.iter().rposition(|head| head.hurt);
        hurt.is_some_and(|last| !notes.is_whole_after(last))
    }

    /// Whether the bytes of a file's sector are those of a lie, but for some that `known` says
    /// were written there.
    pub fn explains(&self, sector: &[u8], known: impl Fn(usize, u8) -> bool) -> bool {
        let notes = self.notes.lock();
        notes.traces.iter().any(|trace| {
            let mut bytes = sector.iter().enumerate();
            bytes.all(|(j, byte)| trace[j] == *byte || known(j, *byte))
        })
    }
}

/// The sectors of a range, as reads see them and as they are durably.
fn traces(device: &SimDevice, range: &Range<u64>) -> Vec<[u8; SECTOR]> {
    let first = range.start / SECTOR as u64 * SECTOR as u64;
    let sectors = (first..range.end).step_by(SECTOR);
    let both = sectors.map(|at| {
        let (mut cached, mut durable) = ([0; SECTOR], [0; SECTOR]);
        device.peek(at, &mut cached);
        device.peek_durable(at, &mut durable);
        [cached, durable]
    });
    both.flatten().collect()
}

/// What a batch vouches for, if it is all there.
fn vouches(batch: &[u8]) -> Option<Vec<Extent>> {
    let (header, rest) = BatchHeader::read_from_prefix(batch).ok()?;
    if header.checked.get() == 0 {
        return Some(Vec::new());
    }
    let mut runs = Vec::new();
    let parsed = parse_records(rest.get(..header.len.get() as usize)?, |entries| {
        for entry in entries.iter().filter(|e| e.action == Action::Sum) {
            let sum = DataSum::decode(entry.body)?;
            runs.push(Extent {
                block: sum.block,
                len: sum.blocks,
            });
        }
        Ok(())
    });
    parsed.ok().map(|_| runs)
}

impl Head {
    fn rests_on(&self, geometry: &Geometry, places: &[(usize, Range<u64>)]) -> bool {
        let hit = |run: &Extent| {
            let mut places = places.iter();
            places.any(|(device, range)| meets(geometry, *run, *device, range))
        };
        match &self.vouches {
            Some(runs) => runs.iter().any(hit),
            None => !places.is_empty(),
        }
    }
}

impl Notes {
    /// A batch was written whole that is so much later that it tells of what was there before it,
    /// and so much earlier than the last that the cut did not catch it.
    fn is_whole_after(&self, number: usize) -> bool {
        let last = self.heads.len().saturating_sub(APART);
        let later = self.heads.get(number + APART..last).unwrap_or(&[]);
        later.iter().any(|head| !head.hurt)
    }

    /// Something in the ring is not what was written there.
    fn hurt(&mut self, device: usize, range: &Range<u64>, kind: FaultKind) {
        let first = match kind {
            FaultKind::Lost => {
                let mut heads = self.heads.iter();
                let written = heads.rposition(|h| h.device == device && h.range == *range);
                if let Some(batch) = written {
                    self.heads[batch].hurt = true;
                    return;
                }
                // The rest of one of the last batches; or of one of the next, whose head another device gets later.
                self.hurt_ahead = APART;
                self.heads.len().saturating_sub(APART)
            }
            // Of any batch.
            _ => 0,
        };
        self.heads[first..].iter_mut().for_each(|h| h.hurt = true);
    }
}

impl Watch for Deceit {
    fn before(&self, device: usize, offset: u64, bytes: &[u8]) {
        let range = offset..offset + bytes.len() as u64;
        // What is written anew is as it should be, or is told of again.
        let anew = |place: &(usize, Range<u64>)| {
            place.0 == device && range.start <= place.1.start && place.1.end <= range.end
        };
        self.notes.lock().outside.retain(|place| !anew(place));
        let head = BatchHeader::read_from_prefix(bytes);
        let head = head.is_ok_and(|(head, _)| head.magic.get() == BATCH_MAGIC);
        if head && self.in_ring(device, &range) {
            let mut head = Head {
                device,
                range,
                hurt: false,
                vouches: vouches(bytes),
            };
            let notes = &mut *self.notes.lock();
            head.hurt = notes.hurt_ahead > 0 || head.rests_on(&self.geometry, &notes.outside);
            notes.hurt_ahead = notes.hurt_ahead.saturating_sub(1);
            notes.heads.push(head);
        }
    }

    fn after(&self) {
        self.look();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::ledger::History;
    use crate::world::{Image, Shape};
    use device::sim::Times;
    use device::{BlockDevice, Durability, Operation, Request};
    use format::BLOCK_SIZE;
    use zerocopy::{FromZeros, IntoBytes};

    fn machine() -> Machine {
        Machine::new(&Image::format(&Shape::small(1)).unwrap(), 1)
    }

    fn write(machine: &Machine, deceit: &Deceit, offset: u64, buf: &[u8]) {
        deceit.before(0, offset, buf);
        let operation = Operation::Write {
            offset,
            buf,
            durability: Durability::Durable,
        };
        machine.devices[0].run(&mut [Request::new(operation, 0)], None);
        deceit.after();
    }

    /// Writes that many batches, the first of them lost.
    fn batches(machine: &Machine, deceit: &Deceit, count: u64) {
        let mut head = BatchHeader::new_zeroed();
        head.magic.set(BATCH_MAGIC);
        let mut batch = [0; SECTOR];
        batch[..size_of::<BatchHeader>()].copy_from_slice(head.as_bytes());
        machine.devices[0].lose_writes(Times::Next(1), None);
        for number in 0..count {
            let at = deceit.ring[0][0].start + number * BLOCK_SIZE as u64;
            write(machine, deceit, at, &batch);
        }
    }

    #[test]
    fn a_lost_batch_is_missed_in_silence_only_at_the_end() {
        for (count, silent) in [
            (1, true),
            (2 * APART as u64, true),
            (2 * APART as u64 + 1, false),
        ] {
            let machine = machine();
            let deceit = Deceit::watch(&machine);
            assert!(deceit.is_firm(0) && !deceit.ever());
            batches(&machine, &deceit, count);
            assert!(deceit.ever() && deceit.mark() as u64 == count);
            assert_eq!(deceit.tail_may_be_missing(), silent, "{count}");
            assert!(deceit.is_firm(0));
            assert!(
                !deceit.is_firm(1) || count > 2 * APART as u64 + 1,
                "{count}"
            );
        }
    }

    /// The rest went to another device, and was lost before the head was sent: the batch counted as whole, and what was
    /// promised with it as firm.
    #[test]
    fn a_batch_whose_rest_was_lost_before_its_head_was_sent_is_hurt() {
        let machine = machine();
        let deceit = Deceit::watch(&machine);
        let at = deceit.ring[0][0].start;
        machine.devices[0].lose_writes(Times::Next(1), None);
        write(&machine, &deceit, at + BLOCK_SIZE as u64, &[3; SECTOR]);
        let mut head = BatchHeader::new_zeroed();
        head.magic.set(BATCH_MAGIC);
        let mut batch = [0; SECTOR];
        batch[..size_of::<BatchHeader>()].copy_from_slice(head.as_bytes());
        write(&machine, &deceit, at, &batch);
        assert!(deceit.ever() && deceit.mark() == 1);
        assert!(!deceit.is_firm(1) && deceit.tail_may_be_missing());
    }

    #[test]
    fn a_lie_explains_the_bytes_that_it_left_among_known_ones() {
        let machine = machine();
        let deceit = Deceit::watch(&machine);
        let at = machine.devices[0].bytes() / 2;
        write(&machine, &deceit, at, &[1; 2 * SECTOR]);
        machine.devices[0].lose_writes(Times::Next(1), None);
        write(&machine, &deceit, at + SECTOR as u64, &[2; SECTOR]);
        let nothing = |_: usize, _: u8| false;
        assert!(deceit.explains(&[1; SECTOR], nothing));
        assert!(!deceit.explains(&[2; SECTOR], nothing));
        let mut mixed = [1; SECTOR];
        mixed[7] = 3;
        assert!(!deceit.explains(&mixed, nothing));
        assert!(deceit.explains(&mixed, |j, byte| j == 7 && byte == 3));
    }

    /// A look past the cache showed zeros where a write was lost. The cache had what was written: that, with a later write over a part of
    /// it, was taken for what nobody had written.
    #[test]
    fn behind_a_look_that_showed_a_lie_there_may_be_what_the_cache_had() {
        let machine = machine();
        let deceit = Deceit::watch(&machine);
        let written = vec![1; 3 * SECTOR];
        let mut history = History::new(Vec::new());
        history.begin(written.clone(), 0..written.len());
        let at = machine.devices[0].bytes() / 2;
        machine.devices[0].lose_writes(Times::Next(1), None);
        write(&machine, &deceit, at, &written);
        let looked = vec![0; 3 * SECTOR];
        history.observe(looked.clone(), Some(&deceit)).unwrap();

        let end = SECTOR + SECTOR / 2;
        let over = |mut bytes: Vec<u8>| {
            bytes[..end].fill(2);
            bytes
        };
        history.begin(over(looked.clone()), 0..end);
        history.durable(history.versions.number(), None);
        let allows = |bytes: &[u8]| history.allows(bytes, Some(&deceit)).is_ok();
        assert!(allows(&over(looked)), "loaded anew");
        assert!(allows(&over(written.clone())), "written over in the cache");
        assert!(!allows(&written), "the later write is durable");
        let mut other = over(written);
        other[end] = 3;
        assert!(!allows(&other), "nobody wrote this");
    }
}
