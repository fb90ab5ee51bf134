//! The store's own threads: one commits what nobody syncs, one makes checkpoints.

use crate::content::Content;
use crate::error::Error;
use crate::store::{Control, Store};
use base::atomic::Ordering;
use base::sync::{Condvar, Mutex};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::time::Duration;

type Shared = Arc<(Mutex<Control>, Condvar)>;

/// A store that was not closed: its threads, which may be this one, hold nothing of it while they wait, and end when they are told.
impl<C: Content> Drop for Store<C> {
    fn drop(&mut self) {
        self.stop_threads();
    }
}

impl<C: Content> Store<C> {
    pub(crate) fn start_threads(self: &Arc<Self>) -> Result<(), Error> {
        let interval = self.options.commit_interval;
        self.start(
            "sheaf-commit",
            interval,
            |control| std::mem::take(&mut control.commit_wanted),
            |store| {
                if store.journal.outstanding() || store.space.pending_blocks() > 0 {
                    store.commit_through(store.epoch())?;
                }
                // What is freed can be given out then, an overwrite does not have to do it, and rot of data that was
                // synced long ago cannot be taken for a batch that was never whole.
                store.confirm_all()
            },
        )?;
        let interval = self.options.checkpoint_interval;
        let asked = Arc::clone(&self.checkpoint_asked);
        let due = move |control: &mut Control| {
            let wanted = std::mem::take(&mut control.checkpoint_wanted);
            if wanted {
                asked.store(false, Ordering::Relaxed);
            }
            wanted
        };
        self.start("sheaf-checkpoint", interval, due, |store| {
            if store.dirty.any() {
                store.checkpoint_now()?;
            }
            store.answer_checkpoint();
            store.release_retired();
            Ok(())
        })
    }

    /// Runs `work` every `interval`, or at once when `due` says so. The threads share one
    /// condition, so being woken means nothing by itself.
    pub(crate) fn start(
        self: &Arc<Self>,
        name: &str,
        interval: Duration,
        due: impl Fn(&mut Control) -> bool + Send + 'static,
        work: impl Fn(&Store<C>) -> Result<(), Error> + Send + 'static,
    ) -> Result<(), Error> {
        let shared: Shared = Arc::clone(&self.control);
        let store: Weak<Self> = Arc::downgrade(self);
        let clock = self.options.clock.clone();
        let body = move || {
            loop {
                let stop = {
                    let (control, wake) = &*shared;
                    let mut control = control.lock();
                    let began = clock.monotonic_ns();
                    let mut left = interval;
                    while !control.stop && !due(&mut control) && !left.is_zero() {
                        if wake.wait_for(&mut control, left) {
                            break;
                        }
                        let passed = clock.monotonic_ns().saturating_sub(began);
                        left = interval.saturating_sub(Duration::from_nanos(passed));
                    }
                    control.stop
                };
                if stop {
                    return;
                }
                let Some(store) = store.upgrade() else { return };
                match catch_unwind(AssertUnwindSafe(|| work(&store))) {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => {
                        tracing::error!("{error}");
                        if store.failed().is_some() {
                            // Latched; whoever changes or syncs next is told.
                            return;
                        }
                    }
                    Err(_) => {
                        // Nobody else does what it did.
                        store.latch("a thread of the store panicked");
                        return;
                    }
                }
            }
        };
        let handle = base::thread::spawn(name, body).map_err(|e| Error::Thread(Arc::new(e)))?;
        self.threads.lock().push(handle);
        Ok(())
    }

    /// Stops the threads, makes everything durable and leaves a clean checkpoint. Operations that have begun are waited for, and
    /// part of it; others fail. The store changes no more, whatever the outcome, and nothing is written to the devices, nor discarded. Calling it again waits for
    /// that, and returns the same.
    ///
    /// # Errors
    /// What keeps the store from being made durable: then what was synced, and no more, is there after the next open.
    pub fn close(&self) -> Result<(), Error> {
        self.close_with(|| {})
    }

    /// The same. `last` is called when no operation is left, and none begins any more: what it says of all of them in the user's words stays
    /// true, and checkpoints have these from then on.
    pub fn close_with(&self, last: impl FnOnce()) -> Result<(), Error> {
        let mut ended = self.ended.lock();
        if let Some(outcome) = &*ended {
            return outcome.clone();
        }
        let outcome = self.end(last);
        if let Err(error) = &outcome
            && self.failed().is_none()
        {
            self.latch(&format!("it could not be closed: {error}"));
        }
        self.come_to_rest();
        *ended = Some(outcome.clone());
        outcome
    }

    /// Whether the store has ended well: all that was not refused is durable. Waits for an end that has begun, so the caller holds nothing that an operation or a
    /// checkpoint may wait for.
    pub fn has_ended_well(&self) -> bool {
        self.ending.load(Ordering::SeqCst) && matches!(&*self.ended.lock(), Some(Ok(())))
    }

    /// What others have begun to write or discard beside the end is over when this returns, and nothing of the kind begins any more: the journal has failed, if only
    /// by the last checkpoint.
    fn come_to_rest(&self) {
        if self.options.read_only {
            return;
        }
        debug_assert!(self.failed().is_some());
        self.at_rest.store(true, Ordering::SeqCst);
        // Each holds its lock while it writes, and has not seen the failure if it has the lock now.
        drop(self.checkpoint_state.lock());
        drop(self.trimming.lock());
        self.space.await_release();
        self.journal.await_batches();
    }

    fn stop_threads(&self) {
        let (control, wake) = &*self.control;
        control.lock().stop = true;
        wake.notify_all();
    }

    fn end(&self, last: impl FnOnce()) -> Result<(), Error> {
        self.stop_threads();
        let handles = std::mem::take(&mut *self.threads.lock());
        for handle in handles {
            if handle.join().is_err() {
                self.latch("a thread of the store panicked");
            }
        }
        if self.options.read_only {
            return Ok(());
        }
        self.ending.store(true, Ordering::SeqCst);
        // Ring, invariant 5.
        let mut spins = 0;
        while self.journal.has_credits() {
            base::thread::spin(&mut spins);
        }
        last();
        self.sync()?;
        self.closing_checkpoint()
    }
}

#[cfg(test)]
mod tests {
    use crate::error::Error;
    use crate::new_data::NewData;
    use crate::op::Need;
    use crate::store::StoreOptions;
    use crate::testing::{Bytes, TestStore, create, format, options};
    use base::atomic::{AtomicBool, AtomicU64, Ordering};
    use base::clock::Clock;
    use device::AlignedBuf;
    use device::sim::SimDevice;
    use format::BLOCK_SIZE;
    use std::sync::Arc;
    use std::time::Duration;

    /// Runs on a thread of its own, which notes that it has come to an end.
    fn aside(work: impl FnOnce() + Send + 'static) -> (base::thread::JoinHandle, Arc<AtomicBool>) {
        let over = Arc::new(AtomicBool::new(false));
        let tells = Arc::clone(&over);
        let work = move || {
            work();
            tells.store(true, Ordering::SeqCst);
        };
        (base::thread::spawn("aside", work).unwrap(), over)
    }

    /// What others had begun to write came to the devices later.
    #[test]
    fn nothing_is_on_its_way_to_the_devices_when_a_store_has_ended_badly() {
        let works: [fn(&TestStore); 2] =
            [|store| drop(store.sync()), |store| drop(store.checkpoint())];
        for work in works {
            let device = SimDevice::new(64 << 20, 1);
            let (store, _) = TestStore::open(format(Arc::clone(&device) as _), options()).unwrap();
            create(&store, 1000);
            device.stick();
            let working = Arc::clone(&store);
            let (others, _) = aside(move || work(&working));
            while device.waiting() == 0 {
                base::thread::yield_now();
            }
            store.latch("a test");
            let (closing, under) = (Arc::clone(&store), Arc::clone(&device));
            let left = Arc::new(AtomicU64::new(u64::MAX));
            let counts = Arc::clone(&left);
            let (closing, over) = aside(move || {
                drop(closing.close());
                counts.store(under.waiting(), Ordering::SeqCst);
            });
            for _ in 0..1000 {
                base::thread::yield_now();
            }
            assert!(!over.load(Ordering::SeqCst));
            device.release();
            others.join().unwrap();
            closing.join().unwrap();
            assert_eq!(left.load(Ordering::SeqCst), 0);
        }
    }

    /// A batch that changes nothing but confirms others was written beside the last checkpoint, and could come to the devices after the end.
    #[test]
    fn nothing_is_confirmed_by_a_batch_while_a_store_ends() {
        let array = format(SimDevice::new(64 << 20, 1));
        let (store, _) = TestStore::open(array, options()).unwrap();
        let mut promise = store.promise(1).unwrap();
        let reservation = store.reserve(&mut promise, 1, None).unwrap();
        let fresh = store.reserve_nid().unwrap();
        let mut op = store.begin(Need::Grow).unwrap();
        let slot = op.create(fresh, Bytes::of(1000));
        let blocks = op.take(reservation);
        let memory = AlignedBuf::from_slice(&[7; BLOCK_SIZE]);
        op.vouch(slot, NewData::new(blocks, Arc::new(memory), 0));
        op.commit();
        drop(promise);
        store.sync().unwrap();
        assert!(store.is_vouched(blocks));
        store.ending.store(true, Ordering::SeqCst);
        let batches = store.journal_batches();
        let confirmed = store.confirm(blocks);
        assert!(matches!(confirmed, Err(Error::ReadOnly)), "{confirmed:?}");
        assert!(!store.journal.outstanding() && store.journal_batches() == batches);
        store.close().unwrap();
    }

    /// They slept on until their next turn, and there were more of them with each store that was opened and dropped.
    #[test]
    fn threads_of_a_store_that_was_dropped_do_not_sleep_on() {
        let array = format(SimDevice::new(64 << 20, 1));
        let threads = StoreOptions {
            background: true,
            commit_interval: Duration::from_secs(20),
            checkpoint_interval: Duration::from_secs(20),
            ..options()
        };
        let (store, _) = TestStore::open(array, threads).unwrap();
        let handles = std::mem::take(&mut *store.threads.lock());
        assert_eq!(handles.len(), 2);
        let clock = Clock::real();
        let dropped = clock.monotonic_ns();
        drop(store);
        for handle in handles {
            handle.join().unwrap();
        }
        let passed = Duration::from_nanos(clock.monotonic_ns() - dropped);
        assert!(passed < Duration::from_secs(15), "{passed:?}");
    }

    /// They were there while operations were under way, and a checkpoint could say that the mount had ended cleanly before it had.
    #[test]
    fn the_last_words_are_said_when_no_operation_is_left() {
        let array = format(SimDevice::new(64 << 20, 1));
        let (store, _) = TestStore::open(array, options()).unwrap();
        let op = store.begin(Need::Grow).unwrap();
        let said = Arc::new(AtomicBool::new(false));
        let (closing, saying) = (Arc::clone(&store), Arc::clone(&said));
        let close = move || {
            let say = || {
                closing.set_user_words([7; 8]);
                saying.store(true, Ordering::SeqCst);
            };
            closing.close_with(say).unwrap();
        };
        let closing = base::thread::spawn("closing", close).unwrap();
        while !store.ending.load(Ordering::SeqCst) {
            base::thread::yield_now();
        }
        for _ in 0..1000 {
            base::thread::yield_now();
        }
        assert!(!said.load(Ordering::SeqCst));
        store.checkpoint().unwrap();
        op.commit();
        closing.join().unwrap();
        assert!(said.load(Ordering::SeqCst));
        assert_eq!(store.user_words(), [7; 8]);
    }
}
