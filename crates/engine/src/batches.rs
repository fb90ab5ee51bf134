//! Reading the journal: the unbroken run of batches in its ring that recovery replays.
//!
//! A batch that vouches for data (`vouched.rs`) is part of the run only if that data is on the devices, or if a batch, of the run or behind it,
//! or the checkpoint says that the batch was durable: then the data was, and may have changed since.
//!
//! Of data that a device does not return, though it is asked several times, nobody knows whether it is there. The batch may have been
//! acknowledged, so it is not left out; and it may never have been whole, and the blocks hold what was there before, so nobody says that
//! it was durable. It is part of the run, and [`Run::unread`] has what could not be read: who wants to write anything
//! does not begin (`recovery.rs`), a store that is open read-only shows what the batch says, and tells who verifies it; and a repair,
//! which somebody has asked for who can be told, keeps what the batch says and names the files.
//!
//! Nor does anybody know what lies in a gap of the ring (`ring_reader.rs`). What that means depends on the place:
//!
//! 1. Where the batch is expected that follows the run's last one, or in the middle of what its header says, there may be one that was
//!    acknowledged. The run ends there, and [`Run::doubt`] says so; what follows from it is as with unread data, but a repair gives up
//!    what may lie there, and says so.
//! 2. No batch can be there if the record says that the journal was empty when the last mount ended: the next one has its record before its
//!    first batch.
//! 3. Elsewhere behind the end a gap says nothing, as a batch that was lost says nothing. What is looked for there is proof that the batch at
//!    the end was durable, which by itself says that it was not: while each device returns what it has acknowledged, or an error, there is none.
//! 4. If there is such proof outside of gaps, or if images depend on the batch in a gap, then what was acknowledged is not returned, and that is a
//!    loss (R9). A repair does nothing then: the device may return it tomorrow.
//!
//! Whoever writes behind the end does so behind the gaps there ([`Run::goes_on`]): what it writes could not be read, and the next recovery would
//! have a doubt by 1 where nothing was ever written.

use crate::commit::PIPELINE;
use crate::error::Error;
use crate::journal::Anchor;
use crate::recovery::damaged;
use crate::ring_reader::{Gaps, Records, RingReader, WINDOW, begun_checksum, read_often};
use crate::store::STAGING_MAX;
use base::canary::{Canary, planted};
use device::{AlignedBuf, Array};
use format::checkpoint::CheckpointRecord;
use format::journal::{Action, BatchHeader, DataSum, parse_records};
use format::{
    BLOCK_SIZE, Block, COUNTER_FOUND_MAX, COUNTER_MAX, Damage, Nid, checksum, checksum_joined,
};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;

/// How far behind the run's end batches that prove a loss are looked for. Whoever began to gather a batch after the
/// first lost one was durable says so in it; before that one there are, with the lost one, no more than are under way at once.
const LOOK_AHEAD: u64 = UNDER_WAY * BATCH_MAX;
/// Those that may gather only while fewer than [`PIPELINE`] are under way, and one of a checkpoint, which does not ask
/// ([`Journal::close_and_commit`](crate::journal::Journal::close_and_commit)).
pub(crate) const UNDER_WAY: u64 = PIPELINE + 1;
/// Bytes of a batch, at most: operations wait for a commit at twice what may be staged; as much again is for what several of them
/// stage at that moment, for the lag of the sum they look at, and for padding.
const BATCH_MAX: u64 = 4 * STAGING_MAX as u64;

/// A batch read from the ring.
pub(crate) struct Batch {
    pub header: BatchHeader,
    pub records: Records,
}

impl Batch {
    pub fn is_whole(&self, array: &Array) -> bool {
        checksum(begun_checksum(array, &self.header), &self.records) == self.header.crc.get()
    }
}

/// The unbroken run of batches from a record's anchor. The batches themselves may be more than
/// memory has room for.
pub(crate) struct Run {
    pub start: Anchor,
    pub end: Anchor,
    pub next_epoch: u64,
    /// Where it ends depends on data: its last batches vouch for some, or the one behind it does for what is not there.
    pub unconfirmed: bool,
    /// The data that its end rests on: who wants the same end again keeps it.
    pub vouched: Vec<DataSum>,
    /// Data for which its last batches vouch, and of which nobody knows whether it is there.
    pub unread: Vec<Unread>,
    /// A device does not return what lies where the next batch would be: nobody knows whether there is one.
    pub doubt: Option<device::Error>,
    /// What devices do not return behind its end.
    pub gaps: Gaps,
    /// Something behind its end is lost, and what says so (R9).
    pub loss: Option<Damage>,
}

impl Run {
    /// Reads the run once more, batch by batch.
    pub fn for_each(
        &self,
        array: &Array,
        record: &CheckpointRecord,
        mut each: impl FnMut(Batch) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut ring = RingReader::new(array);
        let mut next = self.start;
        while next.sequence < self.end.sequence {
            let (batch, after) = match read_batch(&mut ring, array, record, next)? {
                Next::Batch(batch, after) => (batch, after),
                Next::Gap(error) => return Err(error.into()),
                Next::Nothing => {
                    let what = format!("batch {} reads differently the second time", next.sequence);
                    return Err(damaged("journal", what));
                }
            };
            each(batch)?;
            next = after;
        }
        Ok(())
    }

    /// Where who writes behind the run begins, of another mount: behind what is not returned there.
    pub fn goes_on(&self, array: &Array) -> Anchor {
        let geometry = array.geometry();
        let (ring, align) = (geometry.journal_bytes(), geometry.journal_align as u64);
        Anchor {
            position: self.gaps.behind(ring, self.end.position, align),
            ..self.end
        }
    }
}

/// Reads batches from the anchor while each is the exact successor of the one before, and
/// checks the end against everything that says how far the journal must reach (R9).
pub(crate) fn read_run(array: &Array, record: &CheckpointRecord) -> Result<Run, Error> {
    let mut ring = RingReader::new(array);
    let mut walk = Walk::begin(array, record)?;
    loop {
        match read_batch(&mut ring, array, record, walk.next)? {
            Next::Batch(batch, after) => {
                if !walk.take(&batch.header, after, || sums_of(&batch.records)) {
                    break;
                }
            }
            Next::Gap(error) => {
                walk.gap(walk.next, error);
                break;
            }
            Next::Nothing => break,
        }
    }
    walk.end()
}

/// Goes through a run's batches, and decides where it ends and whether something is lost.
pub(crate) struct Walk<'a> {
    array: &'a Array,
    record: &'a CheckpointRecord,
    pub start: Anchor,
    /// Where the next batch is.
    pub next: Anchor,
    /// The newest epoch so far.
    last_epoch: u64,
    loss: Option<Damage>,
    /// Where a batch was expected that lies in a gap, and why.
    gap: Option<(Anchor, device::Error)>,
    /// Batches of which nothing says that they were durable.
    vouching: VecDeque<Vouching>,
}

impl<'a> Walk<'a> {
    pub fn begin(array: &'a Array, record: &'a CheckpointRecord) -> Result<Walk<'a>, Error> {
        let start = Anchor {
            position: record.anchor_position.get(),
            sequence: record.anchor_sequence.get(),
            previous_crc: record.anchor_checksum.get(),
        };
        let align = array.geometry().journal_align as u64;
        if !start.position.is_multiple_of(align) {
            return Err(damaged(
                "checkpoint record",
                "the journal anchor is not aligned",
            ));
        }
        Ok(Walk {
            array,
            record,
            start,
            next: start,
            last_epoch: record.epoch.get(),
            loss: None,
            gap: None,
            vouching: VecDeque::new(),
        })
    }

    /// Takes the next batch, which is whole, and behind which the one after it is; false: the run ends before it. `sums` are those
    /// of its data, and are asked for if it vouches for some.
    pub fn take(
        &mut self,
        header: &BatchHeader,
        after: Anchor,
        sums: impl FnOnce() -> Result<Vec<(Nid, DataSum)>, Damage>,
    ) -> bool {
        let old = header.epoch.get() <= self.last_epoch && !planted(Canary::StaleBatchAccepted);
        let ring = self.array.geometry().journal_bytes();
        if after.position - self.start.position > ring || old {
            return false;
        }
        if header.checkpoint_sequence.get() > self.record.sequence.get() {
            let record = self.record;
            self.loss.get_or_insert_with(|| lost_record(record, header));
        }
        let durable = header.durable_sequence.get();
        self.vouching.retain(|one| one.at.sequence > durable);
        if self.vouches(header) {
            match sums() {
                Ok(sums) => self.vouching.push_back(Vouching {
                    at: self.next,
                    epoch_before: self.last_epoch,
                    sums,
                }),
                Err(damage) => drop(self.loss.get_or_insert(damage)),
            }
        }
        self.last_epoch = header.epoch.get();
        self.next = after;
        true
    }

    /// The batch that is expected there lies in a gap. It matters if the run comes to it.
    pub fn gap(&mut self, at: Anchor, error: device::Error) {
        self.gap = Some((at, error));
    }

    /// Whether a batch counts only if data is there.
    pub fn vouches(&self, header: &BatchHeader) -> bool {
        header.checked.get() > 0 && header.sequence.get() >= self.record.image_sequence.get()
    }

    /// The number of the first batch of which is not known yet whether it counts.
    pub fn sure(&self) -> u64 {
        let first = self.vouching.front();
        first.map_or(self.next.sequence, |one| one.at.sequence)
    }

    /// The run, if no other batch follows.
    pub fn end(self) -> Result<Run, Error> {
        let (array, record) = (self.array, self.record);
        let (mut next, mut last_epoch, mut loss) = (self.next, self.last_epoch, self.loss);
        let mut ring = RingReader::new(array);
        let beyond = Beyond::look(&mut ring, array, record, next)?;
        let was_empty = record.clean.get() == 1 && next == self.start;
        let doubt = self.gap.filter(|(at, _)| *at == next && !was_empty);
        let doubt = doubt.map(|(_, error)| error);
        let (mut unconfirmed, mut unread, mut vouched) = (false, Vec::new(), Vec::new());
        let all: u64 = self.vouching.iter().map(|one| blocks_of(&one.sums)).sum();
        let is_possible = all <= UNDER_WAY * array.geometry().total_blocks();
        if !is_possible {
            let what = "its batches vouch for more data than can have been on its way";
            loss.get_or_insert_with(|| Damage::new("journal", what));
        }
        for one in self.vouching.into_iter().take_while(|_| is_possible) {
            let sure = one.at.sequence <= beyond.durable_sequence;
            let mut doubts = Vec::new();
            match all_there(array, &one.sums, &mut doubts) {
                Ok(true) if sure => {}
                Ok(true) => {
                    unconfirmed = true;
                    unread.append(&mut doubts);
                    vouched.extend(one.sums.into_iter().map(|(_, sum)| sum));
                }
                Ok(false) if planted(Canary::DataUnchecked) => {}
                Ok(false) if sure => {
                    // It changes only after a batch that said so was durable, and with that all before it.
                    let what = format!(
                        "batch {} was durable, and its data has changed since; batches behind it are lost",
                        one.at.sequence
                    );
                    loss.get_or_insert_with(|| Damage::new("journal", what));
                }
                Ok(false) => {
                    tracing::info!(
                        "batch {} was being written and is left out",
                        one.at.sequence
                    );
                    (next, last_epoch) = (one.at, one.epoch_before);
                    // Nor may anything come to take its place (recovery, invariant 2).
                    unconfirmed = true;
                    break;
                }
                Err(damage) => drop(loss.get_or_insert(damage)),
            }
        }
        let (image_epoch, image_sequence) = (record.image_epoch.get(), record.image_sequence.get());
        if next.sequence < image_sequence {
            let what = format!(
                "the journal ends before batch {}, but images depend on all before batch {}",
                next.sequence, record.image_sequence
            );
            loss.get_or_insert_with(|| Damage::new("journal", what));
        }
        if loss.is_none() && !planted(Canary::SilentTruncation) {
            loss = beyond.loss_behind(next);
        }
        if let (Some(loss), Some(error)) = (&mut loss, &doubt) {
            loss.what = format!("{}; {error}", loss.what);
        }
        Ok(Run {
            start: self.start,
            end: next,
            next_epoch: last_epoch.max(image_epoch) + 1,
            unconfirmed,
            vouched,
            unread,
            doubt,
            gaps: ring.into_gaps(),
            loss,
        })
    }
}

/// A batch that counts only if its data is there.
struct Vouching {
    at: Anchor,
    /// The newest epoch before it.
    epoch_before: u64,
    sums: Vec<(Nid, DataSum)>,
}

/// Data of a node that a device does not return.
#[derive(Clone, Debug)]
pub(crate) struct Unread {
    pub nid: Nid,
    pub error: device::Error,
}

impl fmt::Display for Unread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = &self.error;
        write!(
            f,
            "data that was synced last cannot be read, so nobody knows whether it is there: {error}"
        )
    }
}

/// What is to be told where [`Run::doubt`] has this error.
pub(crate) fn in_doubt(error: &device::Error) -> String {
    format!(
        "what follows its last batch cannot be read, so nobody knows whether something that was synced last is there: {error}"
    )
}

/// Blocks that these are of.
fn blocks_of(sums: &[(Nid, DataSum)]) -> u64 {
    sums.iter().map(|(_, sum)| u64::from(sum.blocks)).sum()
}

/// Whether data is there, but for what is `unread`; that gets nothing when something is not there: that is enough to know.
/// Of one batch, in which no block is twice.
pub(crate) fn all_there(
    array: &Array,
    sums: &[(Nid, DataSum)],
    unread: &mut Vec<Unread>,
) -> Result<bool, Damage> {
    let blocks = blocks_of(sums);
    if blocks > array.geometry().total_blocks() {
        let what = format!("a batch vouches for {blocks} blocks, which is more than there are");
        return Err(Damage::new("journal", what));
    }
    let mut refused = Vec::new();
    for (nid, sum) in sums {
        match data_is(array, sum)? {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(error) => refused.push(Unread { nid: *nid, error }),
        }
    }
    unread.append(&mut refused);
    Ok(true)
}

/// The checksums of data in a batch's records, and the nodes that it belongs to.
pub(crate) fn sums_of(records: &[u8]) -> Result<Vec<(Nid, DataSum)>, Damage> {
    let mut sums = Vec::new();
    parse_records(records, |entries| {
        for entry in entries.iter().filter(|e| e.action == Action::Sum) {
            sums.push((Nid(entry.nid), DataSum::decode(entry.body)?));
        }
        Ok(())
    })?;
    Ok(sums)
}

/// Whether blocks hold what was written to them, or why a device does not tell.
fn data_is(array: &Array, sum: &DataSum) -> Result<Result<bool, device::Error>, Damage> {
    let geometry = array.geometry();
    let last = Block(sum.block.0 + u64::from(sum.blocks) - 1);
    if geometry.chunk_of(sum.block).is_none() || geometry.chunk_of(last).is_none() {
        let what = format!(
            "vouches for {} blocks from {}, outside the data",
            sum.blocks, sum.block
        );
        return Err(Damage::new("journal", what));
    }
    let mut crc = 0;
    let mut buf = AlignedBuf::zeroed((sum.blocks as usize * BLOCK_SIZE).min(WINDOW as usize));
    let (mut at, end) = (
        sum.block.byte(),
        sum.block.byte() + u64::from(sum.blocks) * BLOCK_SIZE as u64,
    );
    while at < end {
        let len = (end - at).min(buf.len() as u64) as usize;
        if let Err(error) = read_often(array, at, &mut buf[..len]) {
            return Ok(Err(error));
        }
        crc = checksum(crc, &buf[..len]);
        at += len as u64;
    }
    Ok(Ok(crc == sum.crc))
}

/// What lies where a batch is expected.
enum Next {
    /// The one that must follow, and where the one after it is.
    Batch(Batch, Anchor),
    Nothing,
    /// Nobody knows: a device does not return all of it.
    Gap(device::Error),
}

fn read_batch(
    ring: &mut RingReader<'_>,
    array: &Array,
    record: &CheckpointRecord,
    at: Anchor,
) -> Result<Next, Error> {
    let header = ring.header(at.position)?;
    let header = header.filter(|header| follows(array, record, at, header));
    let len = header.map_or(0, |header| header.len.get() as u64);
    // The length is only as good as the checksum: much memory is taken for what passed it.
    let is_there = match header {
        Some(header) if len > WINDOW => ring.is_whole(at.position, &header)?,
        _ => true,
    };
    let records = match is_there {
        true => ring.records(at.position + BatchHeader::SIZE as u64, len)?,
        false => Records::default(),
    };
    if let Some(error) = ring.gap(at.position, BatchHeader::SIZE as u64 + len) {
        return Ok(Next::Gap(error));
    }
    let Some(header) = header.filter(|_| is_there) else {
        return Ok(Next::Nothing);
    };
    let crc = checksum(begun_checksum(array, &header), &records);
    if crc != header.crc.get() && !planted(Canary::TornBatchAccepted) {
        return Ok(Next::Nothing);
    }
    let after = after(array, at, &header);
    Ok(Next::Batch(Batch { header, records }, after))
}

/// Whether this is the header of the batch that must be at `at`, if its checksum is right.
pub(crate) fn follows(
    array: &Array,
    record: &CheckpointRecord,
    at: Anchor,
    header: &BatchHeader,
) -> bool {
    let stale = header.mount_id != record.mount_id || header.previous_crc.get() != at.previous_crc;
    let len = BatchHeader::SIZE as u64 + header.len.get() as u64;
    header.is_countable(COUNTER_MAX)
        && (!stale || planted(Canary::StaleBatchAccepted))
        && header.sequence.get() == at.sequence
        && len <= array.geometry().journal_bytes()
}

/// Where the batch behind one is.
pub(crate) fn after(array: &Array, at: Anchor, header: &BatchHeader) -> Anchor {
    let align = array.geometry().journal_align as u64;
    let size = BatchHeader::SIZE as u64 + header.len.get() as u64;
    Anchor {
        position: at.position + size.next_multiple_of(align),
        sequence: at.sequence + 1,
        previous_crc: header.crc.get(),
    }
}

fn lost_record(record: &CheckpointRecord, batch: &BatchHeader) -> Damage {
    Damage::new(
        "checkpoint",
        format!(
            "record {} is lost: the journal names it, and the newest found is {}",
            batch.checkpoint_sequence, record.sequence
        ),
    )
}

/// The headers at ring positions, in order, whose batches are whole. None is longer than the ring.
///
/// What users have logged can look like headers, a thousand of them, each of a batch as long as the ring. Their checksums
/// are out of reach, but whoever follows each to its end reads for minutes; and whoever gives up at some point
/// can miss the one batch that proves a loss. So all bytes are read once: of the checksum up to a batch's first record and
/// the one up to its end, what lies between follows.
pub(crate) fn whole(
    ring: &mut RingReader<'_>,
    found: Vec<(u64, BatchHeader)>,
) -> Result<Vec<(u64, BatchHeader)>, Error> {
    let records = |position: u64, header: &BatchHeader| {
        let start = position + BatchHeader::SIZE as u64;
        (start, start + header.len.get() as u64)
    };
    let bounds = found
        .iter()
        .map(|(position, header)| records(*position, header));
    let mut sums: BTreeMap<u64, u32> = bounds
        .flat_map(|(start, end)| [(start, 0), (end, 0)])
        .collect();
    let mut before = (sums.keys().next().copied().unwrap_or(0), 0);
    for (position, sum) in &mut sums {
        *sum = ring.checksum(before.1, before.0, position - before.0)?;
        before = (*position, *sum);
    }
    let mut whole = Vec::new();
    for (position, header) in found {
        let (start, end) = records(position, &header);
        let records = checksum_joined(sums[&start], sums[&end], end - start);
        let crc = checksum_joined(ring.begun_checksum(&header), records, end - start);
        if crc == header.crc.get() && ring.gap(position, end - position).is_none() {
            whole.push((position, header));
        }
    }
    Ok(whole)
}

/// Headers in the ring that are in memory at a time: what users have logged can look like one in each sector.
const HEADERS: usize = 1 << 16;

/// The whole batches that lie in the ring, in order of their places, but for what only looks like one and lies within another. None has a counter above `most`.
/// Returns what devices do not return of the ring: there may be more in it.
pub(crate) fn each_whole(
    array: &Array,
    most: u64,
    mut found: impl FnMut(u64, BatchHeader),
) -> Result<Gaps, Error> {
    let mut ring = RingReader::new(array);
    let align = array.geometry().journal_align as u64;
    let size = |header: &BatchHeader| BatchHeader::SIZE as u64 + header.len.get() as u64;
    let (mut offset, mut behind) = (0, 0);
    while offset < ring.size {
        let mut looked_at = Vec::new();
        while offset + BatchHeader::SIZE as u64 <= ring.size && looked_at.len() < HEADERS {
            if let Some(header) = ring.header(offset)?
                && header.is_countable(most)
                && size(&header) <= ring.size
            {
                looked_at.push((offset, header));
            }
            offset += align;
        }
        if looked_at.is_empty() {
            break;
        }
        for (at, header) in whole(&mut ring, looked_at)? {
            if at >= behind {
                found(at, header);
                behind = at + size(&header).next_multiple_of(align);
            }
        }
        offset = offset.max(behind);
    }
    Ok(ring.into_gaps())
}

/// What batches behind the last one of the chain say: of which some may be whole, though one before them is not.
struct Beyond {
    /// The newest batch that one of them names as durable.
    durable_sequence: u64,
    /// One of them names a checkpoint that is not there.
    lost_record: Option<Damage>,
}

impl Beyond {
    fn look(
        ring: &mut RingReader<'_>,
        array: &Array,
        record: &CheckpointRecord,
        end: Anchor,
    ) -> Result<Beyond, Error> {
        let align = array.geometry().journal_align as u64;
        let limit = LOOK_AHEAD.min(ring.size - (end.position - record.anchor_position.get()));
        let mut found = Vec::new();
        let mut offset = 0;
        while offset + BatchHeader::SIZE as u64 <= limit {
            let position = end.position + offset;
            offset += align;
            let Some(header) = ring.header(position)? else {
                continue;
            };
            let later = header.mount_id == record.mount_id && header.sequence.get() > end.sequence;
            // A mount goes on here only after its first checkpoint was durable. How many mounts later does not matter: a
            // device may have lost more than one record.
            let newer = header.mount_id.get() > record.mount_id.get();
            let fits = BatchHeader::SIZE as u64 + header.len.get() as u64 <= ring.size;
            if (later || newer) && header.is_countable(COUNTER_FOUND_MAX) && fits {
                found.push((position, header));
            }
        }
        let mut beyond = Beyond {
            durable_sequence: 0,
            lost_record: None,
        };
        // The header's checksum covers the records too; a torn batch proves nothing.
        for (_, header) in whole(ring, found)? {
            if header.checkpoint_sequence.get() > record.sequence.get() {
                let lost = || lost_record(record, &header);
                beyond.lost_record.get_or_insert_with(lost);
            }
            let durable = header.durable_sequence.get();
            beyond.durable_sequence = beyond.durable_sequence.max(durable);
        }
        Ok(beyond)
    }

    /// A run that ends too early is a loss, not a crash.
    fn loss_behind(self, end: Anchor) -> Option<Damage> {
        let (durable, sequence) = (self.durable_sequence, end.sequence);
        self.lost_record.or_else(|| {
            let what = format!(
                "the journal ends before batch {sequence}, but batch {durable} was durable"
            );
            (durable >= sequence).then(|| Damage::new("journal", what))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recovery::{RecoveryReport, newest_record};
    use crate::testing;
    use device::BlockDevice;
    use device::sim::SimDevice;
    use std::sync::Arc;

    /// Of a whole array of zeros, again and again, whose checksum anybody knows: looking at all of it took as long as somebody liked.
    #[test]
    fn a_journal_that_vouches_for_more_data_than_there_is_is_damaged() {
        let array = testing::format(SimDevice::new(64 << 20, 1) as Arc<dyn BlockDevice>);
        let mut blocks = 0..array.geometry().total_blocks();
        let chunk = |block: &u64| array.geometry().chunk_of(Block(*block)).is_some();
        let (first, last) = (blocks.find(chunk).unwrap(), blocks.rfind(chunk).unwrap());
        let count = (last - first).min(1024) as usize;
        let sum = DataSum {
            block: Block(first),
            blocks: count as u32,
            crc: checksum(0, &vec![0; count * BLOCK_SIZE]),
        };
        let often = array.geometry().total_blocks() as usize / count;
        let sums = |times: usize| vec![(Nid(1), sum); times];
        let mut unread = Vec::new();
        assert_eq!(all_there(&array, &sums(often), &mut unread), Ok(true));
        let refused = all_there(&array, &sums(often + 1), &mut unread).unwrap_err();
        assert!(
            refused.to_string().contains("more than there are"),
            "{refused}"
        );

        // A few at a time, in many batches.
        let record = newest_record(&array, &mut RecoveryReport::default()).unwrap();
        for (batches, is_possible) in [(UNDER_WAY, true), (UNDER_WAY + 1, false)] {
            let mut walk = Walk::begin(&array, &record).unwrap();
            for _ in 0..batches {
                walk.vouching.push_back(Vouching {
                    at: walk.next,
                    epoch_before: walk.last_epoch,
                    sums: sums(often),
                });
            }
            let loss = walk.end().unwrap().loss.map(|loss| loss.to_string());
            let told = loss.is_some_and(|loss| loss.contains("on its way"));
            assert_eq!(told, !is_possible);
        }
    }
}
