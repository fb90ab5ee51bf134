//! Batches of what no operation pays for.

use super::*;
use crate::Extent;
use crate::ahead::Ahead;
use crate::batches::{self, UNDER_WAY, Walk, read_run};
use base::atomic::AtomicBool;
use device::sim::{SimDevice, Times};
use device::{BlockDevice, Request};
use format::Block;
use format::checkpoint::CheckpointRecord;
use format::geometry::GeometryOptions;
use format::journal::{Action, parse_records, put_entry, seal_record};
use format::table::FIRST_FS_KIND;

const SIZE: u64 = 64 << 20;
const FIRST: Anchor = Anchor {
    position: 0,
    sequence: 1,
    previous_crc: 0,
};

fn journal() -> Journal {
    journal_on(&[SimDevice::new(SIZE, 1)])
}

fn journal_on(devices: &[Arc<SimDevice>]) -> Journal {
    let dynamic = |device: &Arc<SimDevice>| Arc::clone(device) as Arc<dyn BlockDevice>;
    journal_of(devices.iter().map(dynamic).collect())
}

fn journal_of(devices: Vec<Arc<dyn BlockDevice>>) -> Journal {
    let geometry = Geometry::plan(&vec![SIZE; devices.len()], GeometryOptions::default()).unwrap();
    let array = Array::create(devices, geometry, "test", [7; 16], [9; 16]).unwrap();
    let options = StoreOptions {
        shards: 2,
        workers: 1,
        ..StoreOptions::default()
    };
    let resume = Resume {
        anchor: FIRST,
        epoch: 1,
        mount_id: 1,
        checkpoint_sequence: 0,
    };
    let pool = Arc::new(Pool::start("test", 0).unwrap());
    Journal::new(Arc::new(array), pool, &options, resume)
}

/// A record of one change of node `nid`, with `len` bytes in it.
fn record(nid: u64, version: u64, action: Action, len: usize) -> Vec<u8> {
    let mut record = vec![0; RECORD_HEAD_MAX];
    put_entry(&mut record, nid, version, action, FIRST_FS_KIND, |out| {
        out.resize(out.len() + len, 1);
    });
    seal_record(&mut record).to_vec()
}

/// An operation merges into a node, and leaves its fold to a checkpoint; false: there is no room.
fn merge(journal: &Journal, nid: u64, len: usize) -> bool {
    let Some(mut credit) = journal.try_credit(0) else {
        return false;
    };
    journal.owe_fold(Some(&mut credit));
    let pin = journal.pin(0);
    journal.stage(
        &pin,
        &record(nid, 1, Action::Merge, len),
        Vec::new(),
        credit,
    );
    true
}

fn fold(journal: &Journal, nid: u64) {
    journal.stage_fold(&journal.pin(1), &record(nid, 2, Action::Fold, 0));
}

fn commit(journal: &Journal) {
    journal.commit_through(journal.epoch()).unwrap();
}

/// As somebody does who leads a commit.
fn close(journal: &Journal) -> Batch<'_> {
    journal.close_epoch(&mut journal.gather.lock(), false, journal.commits.place())
}

fn batches(journal: &Journal) -> u64 {
    journal.stats.batches.load(Ordering::Relaxed)
}

/// What recovery reads: the nids of merges and folds, batch by batch.
fn replayed(journal: &Journal) -> Vec<Vec<(u64, Action)>> {
    let mut record = CheckpointRecord::zeroed();
    record.uuid = journal.uuid;
    record.mount_id = U64::new(journal.mount_id);
    record.anchor_sequence = U64::new(FIRST.sequence);
    let run = read_run(&journal.array, &record).unwrap();
    // Each says that the one before it was durable.
    assert!(run.loss.is_none() || run.doubt.is_some());
    let mut all = Vec::new();
    run.for_each(&journal.array, &record, |batch| {
        all.push(changes_of(&batch));
        Ok(())
    })
    .unwrap();
    let gap = run.doubt.is_some().then_some(run.end);
    for window in [1, 2, 7, 64, 512].map(|blocks| blocks * BLOCK_SIZE) {
        let (ahead, at) = read_ahead(journal, &record, window);
        assert_eq!((&ahead, at), (&all, gap), "{window}");
    }
    all
}

fn changes_of(batch: &batches::Batch) -> Vec<(u64, Action)> {
    let mut changes = Vec::new();
    parse_records(&batch.records, |entries| {
        changes.extend(entries.iter().map(|entry| (entry.nid, entry.action)));
        Ok(())
    })
    .unwrap();
    changes
}

/// The same run by windows of any size: batches lie in one, in two, around the ring's end, or have no room in any. And where a batch is expected
/// of which a device does not return all.
fn read_ahead(
    journal: &Journal,
    record: &CheckpointRecord,
    most: usize,
) -> (Vec<Vec<(u64, Action)>>, Option<Anchor>) {
    let mut walk = Walk::begin(&journal.array, record).unwrap();
    let mut ahead = Ahead::by_windows(&journal.array, record, FIRST, most);
    let mut all = Vec::new();
    loop {
        let found = ahead.find().unwrap();
        let nothing = found.is_empty();
        for found in found {
            assert_eq!(walk.next.sequence, found.at.sequence);
            let whole = found.batch.is_whole(&journal.array);
            if !whole || !walk.take(&found.batch.header, found.after, || Ok(Vec::new())) {
                ahead.end();
                break;
            }
            all.push(changes_of(&found.batch));
        }
        ahead.reclaim();
        match ahead.fetch() {
            Some(mut fetch) => {
                fetch.run(&journal.array);
                ahead.fetched(fetch);
            }
            None if nothing => return (all, ahead.gap().map(|(at, _)| at)),
            None => {}
        }
    }
}

/// Batches of a few bytes each, which no operation paid for, once went round a full ring and over what a checkpoint
/// still needed.
#[test]
fn commits_between_the_folds_of_a_checkpoint_do_not_overrun_a_full_ring() {
    const DIRECTORIES: u64 = 200;
    let journal = journal();
    for nid in 0..DIRECTORIES {
        assert!(merge(&journal, nid, 10));
    }
    commit(&journal);
    let mut full = DIRECTORIES;
    while merge(&journal, full, 100 << 10) {
        commit(&journal);
        full += 1;
    }
    let before = batches(&journal);
    for nid in 0..full {
        fold(&journal, nid);
        commit(&journal);
    }
    assert_eq!(journal.durable_epoch() + 1, journal.epoch());
    let (epoch, end) = journal.close_and_commit().unwrap();
    assert_eq!(epoch, journal.durable_epoch());
    assert!(
        end.position <= journal.ring.size(),
        "a batch overruns what is needed"
    );
    assert_eq!(batches(&journal), before + 1);
    let replayed = replayed(&journal).concat();
    let of = |action| {
        replayed
            .iter()
            .filter(move |one| one.1 == action)
            .map(|one| one.0)
    };
    assert!(of(Action::Merge).eq(0..full) && of(Action::Fold).eq(0..full));
}

#[test]
fn a_fold_is_in_the_next_batch_that_is_paid_for() {
    let journal = journal();
    assert!(merge(&journal, 1, 10) && merge(&journal, 2, 10));
    commit(&journal);
    for nid in [1, 2] {
        fold(&journal, nid);
        let epoch = journal.epoch();
        commit(&journal);
        assert_eq!(journal.durable_epoch(), epoch);
        assert_eq!(batches(&journal), 1);
    }
    assert!(merge(&journal, 3, 10));
    commit(&journal);
    fold(&journal, 3);
    journal.close_and_commit().unwrap();
    let (merge, fold) = (|nid| (nid, Action::Merge), |nid| (nid, Action::Fold));
    let expected = [
        vec![merge(1), merge(2)],
        vec![fold(1), fold(2), merge(3)],
        vec![fold(3)],
    ];
    assert_eq!(replayed(&journal), expected);
    journal.ring.take_back();
    assert!(!journal.outstanding());
    assert_eq!(journal.ring.used(), 3 * 4096 + SLACK.batches);
}

/// Whatever block of whatever batch is not returned: those before it are read, and it is known that there may be one more.
#[test]
fn batches_before_a_gap_are_read() {
    let device = SimDevice::new(SIZE, 1);
    let journal = journal_on(&[Arc::clone(&device)]);
    let mut ends = vec![0];
    for (nid, len) in (0..).zip([10, 5000, 200 << 10, 100, 4 << 10, 70 << 10]) {
        assert!(merge(&journal, nid, len));
        commit(&journal);
        ends.push(journal.gather.lock().next.position);
    }
    let all = replayed(&journal);
    assert_eq!(all.len(), 6);
    let mut start = 0;
    let geometry = journal.array.geometry();
    geometry.pieces(journal.base, 1, |piece| start = piece.offset);
    let block = BLOCK_SIZE as u64;
    let within = |ends: &[u64]| (ends[0]..ends[1]).step_by(BLOCK_SIZE).collect::<Vec<_>>();
    for (before, blocks) in ends.windows(2).map(within).enumerate() {
        let some = [
            blocks[0],
            blocks[blocks.len() / 2],
            blocks[blocks.len() - 1],
        ];
        for at in some.map(|at| start + at) {
            device.fail_reads(Times::Always, Some(at..at + block));
            assert_eq!(replayed(&journal), all[..before], "{at}");
        }
    }
    // Behind the last one, and far behind it.
    for behind in [0, block, 1 << 20] {
        let at = start + ends[6] + behind;
        device.fail_reads(Times::Always, Some(at..at + block));
        assert_eq!(replayed(&journal), all);
    }
}

/// Whether the batch vouches for data is decided once: when that is not in order at that moment, because somebody else's is not flushed, the data is
/// flushed, though all is in order when the batch is written.
#[test]
fn data_that_a_batch_does_not_vouch_for_is_flushed_whatever_else_has_ended_by_then() {
    let device = SimDevice::new(SIZE, 1);
    let journal = journal_on(&[Arc::clone(&device)]);
    let array = &journal.array;
    array.flush().unwrap();
    let mine = array.geometry().chunk_block(0);
    let other = Block(mine.0 + 1);
    let bytes = AlignedBuf::from_slice(&[7; BLOCK_SIZE]);
    array
        .write(other.byte(), &bytes, Durability::Volatile)
        .unwrap();
    let credit = journal.try_credit(0).unwrap();
    let run = crate::Extent {
        block: mine,
        len: 1,
    };
    let new = NewData::new(run, Arc::new(AlignedBuf::from_slice(&bytes)), 0);
    let record = record(1, 1, Action::Create, 9);
    journal.stage(&journal.pin(0), &record, vec![new], credit);
    let batch = close(&journal);
    array.flush().unwrap();
    assert!(array.is_ordered());
    let flushes = journal.stats.flushes.load(Ordering::Relaxed);
    journal.write_batch(batch).unwrap();
    // Once for the data, and the batch is durable by itself.
    assert_eq!(journal.stats.flushes.load(Ordering::Relaxed), flushes + 1);
    assert_eq!(device.volatile_bytes(), 0);
    let mut there = AlignedBuf::zeroed(BLOCK_SIZE);
    array.read(mine.byte(), &mut there).unwrap();
    assert_eq!(there[..], bytes[..]);
    assert!(journal.vouched.newest().is_none());
}

/// Nobody was told of it, and who recovered would have to ask for data that may be unreadable.
#[test]
fn a_batch_whose_data_cannot_be_written_is_taken_back() {
    let device = SimDevice::new(SIZE, 1);
    let journal = journal_on(&[Arc::clone(&device)]);
    journal.array.flush().unwrap();
    let block = journal.array.geometry().chunk_block(0);
    let run = crate::Extent { block, len: 1 };
    let stage = |byte: u8| {
        let new = NewData::new(
            run,
            Arc::new(AlignedBuf::from_slice(&[byte; BLOCK_SIZE])),
            0,
        );
        let credit = journal.try_credit(0).unwrap();
        let record = record(1, 1, Action::Create, 9);
        journal.stage(&journal.pin(0), &record, vec![new], credit);
        close(&journal)
    };
    let (good, bad) = (stage(1), stage(2));
    let there = |position: u64| {
        let mut head = AlignedBuf::zeroed(BLOCK_SIZE);
        journal
            .array
            .read(journal.base + position, &mut head)
            .unwrap();
        head[..4] == BATCH_MAGIC.to_le_bytes()
    };
    let places = [good.position, bad.position];
    // Once is no reason: it is written again.
    let mut data = 0..0;
    let geometry = journal.array.geometry();
    geometry.pieces(block.byte(), BLOCK_SIZE, |piece| {
        data = piece.offset..piece.offset + BLOCK_SIZE as u64;
    });
    device.fail_writes(Times::Next(1), Some(data.clone()));
    journal.write_batch(good).unwrap();
    assert_eq!(places.map(there), [true, false]);
    assert!(
        journal
            .vouched
            .waiting_in(run)
            .iter()
            .all(|new| new.bytes()[0] == 2)
    );
    device.fail_writes(Times::Always, Some(data.clone()));
    journal.write_batch(bad).unwrap_err();
    assert_eq!(places.map(there), [true, false]);
    // Who reads gets what was accepted.
    assert_eq!(journal.vouched.waiting_in(run).len(), 1);
    journal.failed().unwrap();
}

/// A record of data in this block, which its batch vouches for, in a batch that is about to be written.
fn vouching(journal: &Journal, block: Block) -> Batch<'_> {
    let bytes = AlignedBuf::from_slice(&[7; BLOCK_SIZE]);
    let run = crate::Extent { block, len: 1 };
    let new = NewData::new(run, Arc::new(bytes), 0);
    let credit = journal.try_credit(0).unwrap();
    let record = record(1, 1, Action::Create, 9);
    journal.stage(&journal.pin(0), &record, vec![new], credit);
    let batch = close(journal);
    assert_eq!(batch.flush, Flush::With);
    batch
}

fn is_in_ring(journal: &Journal, position: u64) -> bool {
    let mut head = AlignedBuf::zeroed(BLOCK_SIZE);
    let read = journal.array.read(journal.base + position, &mut head);
    read.unwrap();
    head[..4] == BATCH_MAGIC.to_le_bytes()
}

/// The flush behind it may have lost its data, or itself, and nobody was told of it.
#[test]
fn a_batch_whose_flush_fails_is_taken_back() {
    let device = SimDevice::new(SIZE, 1);
    let journal = journal_on(&[Arc::clone(&device)]);
    journal.array.flush().unwrap();
    let batch = vouching(&journal, journal.array.geometry().chunk_block(0));
    let position = batch.position;
    device.fail_flushes(Times::Next(1));
    journal.write_batch(batch).unwrap_err();
    assert!(!is_in_ring(&journal, position));
    journal.failed().unwrap();
}

/// Another one's flush fails while a batch is written with its data, which may be lost by that: that the batch's own flush
/// succeeds says nothing of it.
#[test]
fn a_batch_does_not_outlive_a_flush_that_fails_while_it_is_written_with_its_data() {
    let device = SimDevice::new(SIZE, 1);
    let journal = journal_on(&[Arc::clone(&device)]);
    journal.array.flush().unwrap();
    let batch = vouching(&journal, journal.array.geometry().chunk_block(0));
    let position = batch.position;
    let batch = Mutex::new(rank::LEAF, Some(batch));
    device.stick();
    base::thread::parallel(2, |thread| {
        if thread == 0 {
            let batch = batch.lock().take().unwrap();
            journal.write_batch(batch).unwrap_err();
            return;
        }
        while device.waiting() == 0 {
            base::thread::yield_now();
        }
        journal.array.count_failed_flush();
        device.release();
    });
    assert!(!is_in_ring(&journal, position));
    journal.failed().unwrap();
}

/// A device that cannot force a write has the batch in its cache, where a flush of another's that fails may drop it before the flush behind it, which then
/// succeeds. The chain would end there, before all that is acknowledged later.
#[test]
fn a_batch_beside_whose_durable_write_a_flush_fails_is_not_acknowledged() {
    let device = SimDevice::new(SIZE, 1);
    let journal = journal_on(&[Arc::clone(&device)]);
    journal.array.flush().unwrap();
    assert!(merge(&journal, 1, 10));
    let batch = Mutex::new(rank::LEAF, Some(close(&journal)));
    device.stick();
    base::thread::parallel(2, |thread| {
        if thread == 0 {
            let batch = batch.lock().take().unwrap();
            journal.write_batch(batch).unwrap_err();
            return;
        }
        while device.waiting() == 0 {
            base::thread::yield_now();
        }
        journal.array.count_failed_flush();
        device.release();
    });
    journal.failed().unwrap();
    assert_eq!(journal.durable_epoch(), 0);
}

/// No record waits to be gathered, but one is on its way that may name what the flush has lost.
#[test]
fn a_flush_that_fails_beside_a_batch_under_way_is_not_forgiven() {
    let journal = journal();
    let credit = journal.try_credit(0).unwrap();
    let record = record(1, 1, Action::Create, 9);
    journal.stage(&journal.pin(0), &record, Vec::new(), credit);
    let batch = close(&journal);
    journal.array.count_failed_flush();
    assert!(!journal.outstanding());
    assert!(!journal.forgive_flush());
    journal.write_batch(batch).unwrap_err();
    journal.failed().unwrap();
}

/// One failure is told to all who shared the flush. Whoever judged it a second time took the operations of meanwhile for ones that rely on what it lost, and
/// the store turned read-only.
#[test]
fn a_failed_flush_that_is_forgiven_is_forgiven_to_all_who_share_it() {
    let journal = journal();
    journal.array.count_failed_flush();
    assert!(journal.forgive_flush());
    let credit = journal.try_credit(0).unwrap();
    assert!(journal.forgive_flush());
    journal.array.count_failed_flush();
    assert!(!journal.forgive_flush());
    journal.return_credit(credit);
    assert!(journal.forgive_flush());
}

/// Where something else is unflushed the data goes before the batch, and is tried as often.
#[test]
fn data_before_its_batch_is_written_again_too() {
    let device = SimDevice::new(SIZE, 1);
    let journal = journal_on(&[Arc::clone(&device)]);
    let block = journal.array.geometry().chunk_block(0);
    let run = crate::Extent { block, len: 1 };
    let page = AlignedBuf::from_slice(&[7; BLOCK_SIZE]);
    let other = block.byte() + BLOCK_SIZE as u64;
    journal
        .array
        .write(other, &page, Durability::Volatile)
        .unwrap();
    let new = NewData::new(run, Arc::new(AlignedBuf::from_slice(&[3; BLOCK_SIZE])), 0);
    let credit = journal.try_credit(0).unwrap();
    journal.stage(
        &journal.pin(0),
        &record(1, 1, Action::Create, 9),
        vec![new],
        credit,
    );
    let batch = close(&journal);
    assert_eq!(batch.flush, Flush::Before);
    let mut data = 0..0;
    let geometry = journal.array.geometry();
    geometry.pieces(block.byte(), BLOCK_SIZE, |piece| {
        data = piece.offset..piece.offset + BLOCK_SIZE as u64;
    });
    device.fail_writes(Times::Next(1), Some(data));
    journal.write_batch(batch).unwrap();
    let mut there = AlignedBuf::zeroed(BLOCK_SIZE);
    journal.array.read(block.byte(), &mut there).unwrap();
    assert_eq!(there[0], 3);
    assert!(journal.vouched.waiting_in(run).is_empty());
}

/// Whoever was there of late.
#[test]
fn who_is_alone_waits_for_nobody() {
    let device = SimDevice::new(SIZE, 1);
    let journal = journal_on(&[device]);
    journal.commits.expect(9);
    assert!(merge(&journal, 1, 10));
    commit(&journal);
    assert_eq!(batches(&journal), 1);
}

/// A loss is told if it is within what can be under way at once (`batches.rs`): one batch more than those who commit may have.
#[test]
fn a_checkpoints_batch_comes_on_top_of_the_pipeline() {
    const COMMITS: u64 = crate::commit::PIPELINE;
    let device = SimDevice::new(SIZE, 1);
    let journal = journal_on(&[Arc::clone(&device)]);
    journal.array.flush().unwrap();
    device.stick();
    base::thread::parallel(COMMITS as usize + 2, |thread| {
        let before = thread as u64;
        while device.waiting() < before {
            base::thread::yield_now();
        }
        let staged = before > COMMITS || merge(&journal, before, 10);
        assert!(staged);
        match before {
            0..COMMITS => commit(&journal),
            COMMITS => drop(journal.close_and_commit().unwrap()),
            _ => {
                assert_eq!(device.waiting(), UNDER_WAY);
                assert_eq!(journal.commits.durable_sequence(), 0);
                device.release();
            }
        }
    });
    assert_eq!(batches(&journal), UNDER_WAY);
}

/// Whoever led the batch may have yet to say that it is durable, when another one has confirmed it.
#[test]
fn what_is_confirmed_is_not_read_from_memory_any_more() {
    let vouched = Vouched::new(0);
    let run = Extent {
        block: Block(9),
        len: 1,
    };
    let new = |byte: u8| {
        let memory = Arc::new(AlignedBuf::from_slice(&[byte; BLOCK_SIZE]));
        NewData::new(run, memory, 0)
    };
    vouched.add(5, vec![new(1)]);
    vouched.add(6, vec![new(2)]);
    vouched.confirm(5);
    let waits = vouched.waiting_in(run);
    assert_eq!(
        waits.iter().map(|new| new.bytes()[0]).collect::<Vec<u8>>(),
        [2]
    );
    assert_eq!(vouched.newest_of(run), Some(6));
    vouched.written(5);
    vouched.written(6);
    assert!(vouched.waiting_in(run).is_empty() && vouched.has_room());
    assert!(!vouched.is_waiting());
    assert_eq!(vouched.newest_of(run), Some(6));
}

/// That what one batch names was flushed before it says nothing of those before that vouch for data.
#[test]
fn a_batch_that_vouches_for_nothing_confirms_no_other() {
    let vouched = Vouched::new(0);
    let run = |block| Extent {
        block: Block(block),
        len: 1,
    };
    for epoch in [5, 6, 7] {
        let memory = Arc::new(AlignedBuf::from_slice(&[epoch as u8; BLOCK_SIZE]));
        vouched.add(epoch, vec![NewData::new(run(epoch), memory, 0)]);
    }
    vouched.flushed(6);
    let newest = [5, 6, 7].map(|block| vouched.newest_of(run(block)));
    assert_eq!(newest, [Some(5), None, Some(7)]);
    let waiting = [5, 6, 7].map(|block| vouched.waiting_in(run(block)).len());
    assert_eq!(waiting, [1, 0, 1]);
    assert_eq!(vouched.settled(7), 4);
}

/// Whoever waited for it waited for ever.
#[test]
fn a_panic_of_who_gathers_is_told_to_those_who_wait() {
    let commits: Commits<&'static str> = Commits::new(5, 0, || "lost");
    let gathers = AtomicBool::new(false);
    base::thread::parallel(2, |thread| {
        if thread == 1 {
            while !gathers.load(Ordering::SeqCst) {
                base::thread::yield_now();
            }
            let other = commits.through(6, || 6, |_| None::<()>, |()| Ok(()));
            assert_eq!(other, Err("lost"));
            return;
        }
        panics(|| {
            let gather = |_| -> Option<()> {
                gathers.store(true, Ordering::SeqCst);
                (0..1000).for_each(|_| base::thread::yield_now());
                panic!("as a test wants it")
            };
            commits.through(6, || 6, gather, |()| Ok(()))
        });
        let told = commits.failed();
        // Else the other one would have no end.
        commits.fail("too late");
        assert_eq!(told, Some("lost"));
    });
}

/// Whoever completed a later one waited for ever.
#[test]
fn a_batch_that_is_never_complete_fails_those_behind_it() {
    let commits: Commits<&'static str> = Commits::new(5, 0, || "lost");
    let first = commits.place().issue(6, Some(1));
    let second = commits.place().issue(7, Some(2));
    drop(first);
    assert_eq!(commits.failed(), Some("lost"));
    assert_eq!(commits.complete(second, Ok(())), Err("lost"));
    assert_eq!(commits.durable_epoch(), 5);
    assert!(commits.idle());
}

/// A device whose code panics once, if that is wanted.
struct Panicking {
    device: Arc<SimDevice>,
    wanted: AtomicBool,
}

impl BlockDevice for Panicking {
    device::described_by!(device);

    fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        let wanted = self.wanted.swap(false, Ordering::SeqCst);
        assert!(!wanted, "as a test wants it");
        self.device.run(requests, meanwhile);
    }

    fn discard(&self, offset: u64, len: u64) -> std::io::Result<()> {
        self.device.discard(offset, len)
    }
}

fn panics<T>(work: impl FnOnce() -> T) {
    let work = std::panic::AssertUnwindSafe(work);
    assert!(std::panic::catch_unwind(work).is_err());
}

fn check_panicked(journal: &Journal) {
    let failed = journal.failed().expect("a panic is a failure");
    assert!(failed.to_string().contains("panicked"), "{failed}");
    assert!(journal.commit_through(journal.epoch()).is_err());
    assert!(journal.close_and_commit().is_err());
}

#[test]
fn a_panic_while_a_batch_is_written_fails_all_commits() {
    let device = Arc::new(Panicking {
        device: SimDevice::new(SIZE, 1),
        wanted: AtomicBool::new(false),
    });
    let journal = journal_of(vec![Arc::clone(&device) as Arc<dyn BlockDevice>]);
    journal.array.flush().unwrap();
    assert!(merge(&journal, 1, 10));
    device.wanted.store(true, Ordering::SeqCst);
    panics(|| commit(&journal));
    check_panicked(&journal);
    assert_eq!(journal.durable_epoch(), 0);
}

/// What it had taken was gone, and the next batch, of a checkpoint, said that it is durable.
#[test]
fn a_panic_while_an_epoch_is_gathered_fails_all_commits() {
    for by_checkpoint in [false, true] {
        let journal = journal();
        let record = record(1, 1, Action::Apply, RECORD_MAX / 2);
        let pin = journal.pin(0);
        for _ in 0..journal.ring.size() / record.len() as u64 + 1 {
            journal.staging.push(&pin, &record, 0, true);
        }
        drop(pin);
        // Builds without checks tell it as an error.
        let gather = || match by_checkpoint {
            true => drop(journal.close_and_commit().unwrap()),
            false => commit(&journal),
        };
        panics(gather);
        match cfg!(debug_assertions) {
            true => check_panicked(&journal),
            false => assert!(journal.failed().is_some()),
        }
        assert_eq!(journal.durable_epoch(), 0);
    }
}

/// Whoever panics in an operation of several records has staged some of them, and fails before the pin goes.
#[test]
fn what_was_staged_of_an_operation_that_failed_is_not_written() {
    let journal = journal();
    base::thread::parallel(2, |thread| {
        if thread == 1 {
            while !journal.staging.has_records() {
                base::thread::yield_now();
            }
            assert!(journal.commit_through(1).is_err());
            return;
        }
        let pin = journal.pin(0);
        let record = record(1, 1, Action::Apply, 10);
        journal.staging.push(&pin, &record, 0, true);
        while journal.epoch() == 1 {
            base::thread::yield_now();
        }
        journal.fail(Error::Failed("half of it is staged".into()));
        drop(pin);
    });
    assert_eq!(batches(&journal), 0);
}
