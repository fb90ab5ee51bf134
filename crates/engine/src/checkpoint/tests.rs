//! What comes between the steps of a checkpoint.

use crate::Visitor;
use crate::finding::{Findings, Severity};
use crate::new_data::NewData;
use crate::op::Need;
use crate::space::Extent;
use crate::store::StoreOptions;
use crate::testing::{Bytes, TestStore, create, format, options};
use base::rng::Rng;
use base::sync::{Mutex, rank};
use device::sim::{PowerSwitch, SimDevice, Times};
use device::{AlignedBuf, Array, BlockDevice, Operation, Request};
use format::label::HEAD_BLOCKS;
use format::{BLOCK_SIZE, Nid};
use std::sync::Arc;
use std::sync::mpsc::channel;

const SIZE: u64 = 64 << 20;

type Hook = Box<dyn FnOnce() + Send>;

/// Calls back, once each, when data or metadata is to be written, and when a checkpoint's record has been.
struct Tap {
    device: Arc<SimDevice>,
    written: Mutex<Option<Hook>>,
    committed: Mutex<Option<Hook>>,
}

impl Tap {
    fn take(hook: &Mutex<Option<Hook>>) {
        let hook = hook.lock().take();
        if let Some(hook) = hook {
            hook();
        }
    }
}

impl BlockDevice for Tap {
    device::described_by!(device);

    /// A flush that a hook asks for while a record is written does not wait for that.
    fn has_cache(&self) -> bool {
        false
    }

    fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        let head = (HEAD_BLOCKS as usize * BLOCK_SIZE) as u64;
        let labels = requests.iter().any(
            |request| matches!(request.operation, Operation::Write { offset, .. } if offset < head),
        );
        let writes = requests
            .iter()
            .any(|request| matches!(request.operation, Operation::Write { .. }));
        if writes && !labels {
            Tap::take(&self.written);
        }
        self.device.run(requests, meanwhile);
        if labels {
            Tap::take(&self.committed);
        }
    }

    fn discard(&self, offset: u64, len: u64) -> std::io::Result<()> {
        self.device.discard(offset, len)
    }
}

fn allocate(store: &TestStore, blocks: u32) -> Extent {
    let mut promise = store.promise(blocks as u64).unwrap();
    let reservation = store.reserve(&mut promise, blocks, None).unwrap();
    let mut op = store.begin(Need::Reclaim).unwrap();
    let extent = op.take(reservation);
    op.commit();
    extent
}

fn free(store: &TestStore, extent: Extent) {
    let mut op = store.begin(Need::Reclaim).unwrap();
    op.free(extent).unwrap();
    op.commit();
}

struct Nothing;

impl Visitor<Bytes> for Nothing {
    fn node(&self, _: Nid, _: u64, _: &Bytes) {}
}

/// While a checkpoint wrote images, another thread began one, deleted the map of a data chunk without data, and
/// waited for the first; a commit made that durable. The chunk was free, the first checkpoint took it for its
/// segments, and its table named the map in it still: the checker called the image damaged.
#[test]
fn no_chunk_becomes_free_while_a_checkpoint_runs() {
    let switch = PowerSwitch::new();
    let device = SimDevice::on_switch(SIZE, 1, &switch);
    let tap = Arc::new(Tap {
        device: Arc::clone(&device),
        written: Mutex::new(rank::LEAF, None),
        committed: Mutex::new(rank::LEAF, None),
    });
    let array = format(Arc::clone(&tap) as Arc<dyn BlockDevice>);
    let chunk_blocks = array.geometry().chunk_blocks;
    let (store, _) = TestStore::open(array, options()).unwrap();

    // Three data chunks; the first one is free again, below the others.
    let data: Vec<Extent> = (0..3).map(|_| allocate(&store, chunk_blocks)).collect();
    free(&store, data[0]);
    store.sync().unwrap();
    store.checkpoint().unwrap();
    store.checkpoint().unwrap();
    create(&store, 1000);
    // Nothing is left for the journal: what the checkpoint writes first is an image.
    store.sync().unwrap();

    let (others, done) = channel();
    let during = Arc::clone(&store);
    let emptied = data[1];
    let hook = move || {
        let store = during;
        free(&store, emptied);
        store.sync().unwrap();
        // There is room for segments in free chunks only, and only one of them is: the lowest.
        let (_, free_chunks) = store.space.unloaded_and_free();
        let kept = free_chunks[0];
        let taken = store.space.take_free_chunks(free_chunks.len() - 1);
        assert!(taken.iter().all(|chunk| *chunk > kept));
        store.segments.use_up();
        let second = Arc::clone(&store);
        let second = base::thread::spawn("second", move || drop(second.checkpoint())).unwrap();
        // It cannot be seen whether a thread waits. If it may retire the chunk it has done so after this.
        for _ in 0..20_000 {
            if !store.retired.lock().is_empty() {
                break;
            }
            base::thread::yield_now();
        }
        store.sync().unwrap();
        store.release_retired();
        others.send(second).unwrap();
    };
    *tap.written.lock() = Some(Box::new(move || {
        // On a thread of its own: whoever writes may hold locks.
        let hook = base::thread::spawn("during", hook).unwrap();
        hook.join().unwrap();
    }));
    let power = Arc::clone(&switch);
    *tap.committed.lock() = Some(Box::new(move || power.cut_now()));
    store.make_checkpoint(false).unwrap();
    done.recv().unwrap().join().unwrap();
    drop(store);

    switch.restore();
    let device = device.restart(&mut Rng::new(1));
    let array = Array::assemble(vec![device as Arc<dyn BlockDevice>], true).unwrap();
    let read_only = StoreOptions {
        read_only: true,
        ..options()
    };
    let (store, _) = TestStore::open(Arc::new(array), read_only).unwrap();
    let findings = Findings::new();
    store.verify(&Nothing, &findings, &|_, _| {});
    let (found, _) = findings.take();
    let bad: Vec<_> = found
        .iter()
        .filter(|one| one.severity > Severity::Notice)
        .collect();
    assert!(bad.is_empty(), "{bad:?}");
}

/// A store on a device that calls back.
fn tapped() -> (Arc<SimDevice>, Arc<Tap>, Arc<TestStore>) {
    let device = SimDevice::new(SIZE, 1);
    let tap = Arc::new(Tap {
        device: Arc::clone(&device),
        written: Mutex::new(rank::LEAF, None),
        committed: Mutex::new(rank::LEAF, None),
    });
    let array = format(Arc::clone(&tap) as Arc<dyn BlockDevice>);
    let (store, _) = TestStore::open(array, options()).unwrap();
    (device, tap, store)
}

/// Has a thread of its own do this: whoever writes may hold locks.
fn beside(work: impl FnOnce() + Send + 'static) -> Hook {
    Box::new(move || {
        let hook = base::thread::spawn("during", work).unwrap();
        hook.join().unwrap();
    })
}

/// Somebody else's flush fails while images are written, and with it they may be lost. No record waits for a commit, so the
/// store goes on; that the checkpoint's own flush succeeds later says nothing of them.
#[test]
fn a_checkpoint_ends_with_an_error_if_a_flush_of_others_failed_while_it_was_written() {
    let (device, tap, store) = tapped();
    create(&store, 1000);
    store.sync().unwrap();
    let during = Arc::clone(&store);
    *tap.written.lock() = Some(beside(move || {
        during.array.mark_all_unflushed();
        device.fail_flushes(Times::Next(1));
        during.flush().unwrap_err();
        assert!(during.failed().is_none(), "nothing waits for a commit");
    }));
    store.make_checkpoint(false).unwrap_err();
    assert!(tap.written.lock().is_none() && store.failed().is_some());
}

/// A batch that vouches for data is durable when the checkpoint's record has just been written, which says nothing of that
/// batch: recovery looks for the data, which must not be written over before another batch confirms it.
#[test]
fn a_checkpoint_confirms_no_batch_behind_its_images() {
    let (_, tap, store) = tapped();
    create(&store, 1000);
    store.sync().unwrap();
    let mut promise = store.promise(1).unwrap();
    let kept = store.reserve(&mut promise, 1, None).unwrap().keep();
    drop(promise);
    store.sync().unwrap();
    let blocks = kept.extent;
    let during = Arc::clone(&store);
    *tap.committed.lock() = Some(beside(move || {
        let fresh = during.reserve_nid().unwrap();
        let mut op = during.begin(Need::Grow).unwrap();
        let slot = op.create(fresh, Bytes::of(1000));
        op.take(during.adopt_reservation(kept));
        let memory = AlignedBuf::from_slice(&[7; BLOCK_SIZE]);
        op.vouch(slot, NewData::new(blocks, Arc::new(memory), 0));
        let epoch = op.commit();
        during.commit_through(epoch).unwrap();
        assert!(during.is_vouched(blocks));
    }));
    store.make_checkpoint(false).unwrap();
    assert!(tap.committed.lock().is_none() && store.is_vouched(blocks));
    store.confirm(blocks).unwrap();
    assert!(!store.is_vouched(blocks));
}

/// Its deletion may not survive: then the chunk has the map and what that says is allocated again.
#[test]
fn a_chunk_whose_map_is_deleted_is_nobodys_until_that_is_durable() {
    let (_, _, store) = tapped();
    let chunk_blocks = store.array.geometry().chunk_blocks;
    let data: Vec<Extent> = (0..3).map(|_| allocate(&store, chunk_blocks)).collect();
    store.sync().unwrap();
    let (chunk, _) = store.array.geometry().chunk_of(data[0].block).unwrap();
    free(&store, data[0]);
    store.sync().unwrap();
    store.retire_chunks(&store.checkpoint_state.lock());
    assert_eq!(store.retired.lock().len(), 1);
    store.release_retired();
    let is_free = || store.space.unloaded_and_free().1.contains(&chunk);
    assert!(!is_free(), "its deletion waits for a commit");
    store.sync().unwrap();
    store.release_retired();
    assert!(is_free());
}

/// Until the new record is there the old one reaches what they hold.
#[test]
fn chunks_that_metadata_leaves_are_free_only_after_the_checkpoints_record() {
    let (_, tap, store) = tapped();
    let nids: Vec<Nid> = (0..200).map(|_| create(&store, 15_000)).collect();
    store.make_checkpoint(false).unwrap();
    for nid in nids {
        let node = store.get(nid).unwrap();
        let mut op = store.begin(Need::Reclaim).unwrap();
        let slot = op.lock(&node).unwrap();
        op.delete(slot);
        op.commit();
    }
    let free_chunks = |store: &TestStore| store.space.unloaded_and_free().1;
    let mut released = 0;
    for _ in 0..4 {
        let before = free_chunks(&store);
        let seen = Arc::new(Mutex::new(rank::LEAF, None));
        let (during, found) = (Arc::clone(&store), Arc::clone(&seen));
        *tap.written.lock() = Some(beside(move || {
            let free = free_chunks(&during);
            *found.lock() = Some(free);
        }));
        store.make_checkpoint(false).unwrap();
        let free = seen.lock().take().unwrap();
        assert!(free.iter().all(|chunk| before.contains(chunk)), "{free:?}");
        let after = free_chunks(&store);
        released += after.iter().filter(|one| !before.contains(one)).count();
    }
    assert!(released > 0);
}
