//! What the types and functions of this crate tell the recorder.

use super::Waiting;
use super::recorder::{Kind, record, recording};
use crate::clock::thread_cpu_ns;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// A lock was taken.
#[inline]
pub fn locked(kind: Kind, address: usize, rank: &'static str, at: &Location<'static>) {
    match rank {
        // Its rank says nothing of it.
        "leaf" => record(kind, address, at.file(), at.line()),
        rank => record(kind, address, rank, 0),
    }
}

/// Whoever took the lock of the last event would not have waited for it.
#[inline]
pub fn tried() {
    record(Kind::Tried, 0, "", 0);
}

#[inline]
pub fn unlocked(address: usize) {
    record(Kind::Unlock, address, "", 0);
}

/// An atomic was looked at, or changed.
#[inline]
pub fn atomic<T>(atomic: &T, write: bool, at: &Location<'static>) {
    let kind = match write {
        true => Kind::Write,
        false => Kind::Read,
    };
    record(
        kind,
        std::ptr::from_ref(atomic).addr(),
        at.file(),
        at.line(),
    );
}

/// Memory is asked for before it is needed, to be read or changed.
#[inline]
pub fn ahead(start: *const u8, len: usize, change: bool) {
    let kind = match change {
        true => Kind::AheadToChange,
        false => Kind::Ahead,
    };
    record(kind, start.addr(), "", len as u32);
}

/// Where the counts of a value that an `Arc` holds are: two words before it, as the standard
/// library lays them out.
fn counts_of<T: ?Sized>(value: &T) -> usize {
    let counts = (2 * size_of::<usize>()).next_multiple_of(align_of_val(value).max(1));
    std::ptr::from_ref(value).cast::<u8>().addr() - counts
}

/// A value got counts and a place of its own.
pub fn born<T: ?Sized>(value: &T) {
    let place = counts_of(value);
    let end = std::ptr::from_ref(value).cast::<u8>().addr() + size_of_val(value);
    born_at(place, end - place);
}

/// Something got a place of its own, of so many bytes.
pub fn born_at(place: usize, len: usize) {
    record(Kind::Born, place, "", len as u32);
}

/// This count of references to a value of a type changes.
#[inline]
pub fn counted<T>(count: &AtomicUsize) {
    let count = std::ptr::from_ref(count).addr();
    record(Kind::Write, count, std::any::type_name::<T>(), 0);
}

/// The count of references to this value changes by one.
#[inline]
pub fn count_changed<T: ?Sized>(value: &T) {
    record(Kind::Write, counts_of(value), std::any::type_name::<T>(), 0);
}

/// Of the standard library's `Arc`: a reference was made from this one.
#[inline]
pub fn shared<T: ?Sized>(arc: &Arc<T>) {
    count_changed::<T>(arc);
}

/// Of the standard library's `Arc`: this reference is about to go.
#[inline]
pub fn unshared<T: ?Sized>(arc: &Arc<T>) {
    count_changed::<T>(arc);
}

/// The caller waits for a device that moves this many bytes, as long as the value lives.
pub fn device(bytes: impl FnOnce() -> u64) -> Waiting {
    if !recording() {
        return Waiting { cpu_ns: 0 };
    }
    record(Kind::DeviceBegin, bytes() as usize, "", 0);
    Waiting {
        cpu_ns: thread_cpu_ns(),
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if recording() {
            let spent = thread_cpu_ns().saturating_sub(self.cpu_ns);
            record(Kind::DeviceEnd, spent as usize, "", 0);
        }
    }
}

/// The caller begins a part of its work that several threads can share; parts of one stage have one name.
pub fn mark(stage: &'static str) {
    record(Kind::Mark, 0, stage, 0);
    processor();
}

/// All parts of a stage are done.
pub fn joined() {
    record(Kind::Joined, 0, "", 0);
    processor();
}

/// Tells what processor time the thread has had. What it takes to ask for that is before the event.
pub fn processor() {
    if recording() {
        record(Kind::Processor, thread_cpu_ns() as usize, "", 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::atomic::{AtomicU64, Ordering};
    use crate::sync::{Handle, Mutex, RwLock, rank};
    use crate::trace::{Event, start, stop};

    fn kinds(events: &[Event]) -> Vec<Kind> {
        events.iter().map(|event| event.kind).collect()
    }

    #[test]
    fn types_are_as_large_as_without_recording() {
        assert_eq!(size_of::<AtomicU64>(), 8);
        assert_eq!(
            size_of::<crate::sync::Arc<u64>>(),
            size_of::<std::sync::Arc<u64>>()
        );
    }

    #[test]
    fn an_operation_is_recorded_in_order() {
        let (lock, count) = (Mutex::new(rank::INODE, 0), AtomicU64::new(0));
        count.fetch_add(1, Ordering::Relaxed);
        start(100);
        {
            let mut held = lock.lock();
            *held += 1;
            count.fetch_add(1, Ordering::Relaxed);
            count.load(Ordering::Relaxed);
        }
        let events = stop();
        count.fetch_add(1, Ordering::Relaxed);
        use Kind::*;
        assert_eq!(kinds(&events), [LockExclusive, Write, Read, Unlock]);
        assert_eq!(events[0].address, events[3].address);
        assert_eq!((events[0].name, events[0].line), (rank::INODE.name(), 0));
        assert_eq!(events[1].address, std::ptr::from_ref(&count).addr());
        assert_eq!(
            (events[1].name, events[2].line),
            (file!(), events[1].line + 1)
        );
        assert!(events.is_sorted_by_key(|event| event.tick));
        assert!(stop().is_empty());
    }

    #[test]
    fn guards_of_all_kinds_and_counts_of_references_are_recorded() {
        use Kind::*;
        let leaf = Mutex::new(rank::LEAF, ());
        start(100);
        let lock = crate::sync::Arc::new(RwLock::new(rank::INODE, 1));
        drop(lock.read());
        drop(lock.write());
        let handle = Handle::common(lock);
        drop(handle.clone().read_owned());
        drop(handle.write_owned());
        drop(leaf.try_lock());
        let lock = RwLock::new(rank::INODE, 1);
        drop(lock.try_read());
        let events = stop();
        // Readers and writers look at the one word that says whether readers are apart.
        let expected = [
            &[Born][..],
            &[Read, LockShared, Unlock],
            &[LockExclusive, Read, Unlock],
            &[Write, Read, LockShared, Unlock, Write],
            &[LockExclusive, Read, Unlock, Write],
            &[LockExclusive, Unlock],
            &[LockShared, Tried, Unlock],
        ];
        assert_eq!(kinds(&events), expected.concat());
        assert_eq!(events[0].address, events[7].address);
        assert!(events[16].name.ends_with("hooks.rs") && events[16].line > 0);
    }

    /// It was recorded like a lock that is waited for. Under the lock that goes with looks, replays of that could wait for each other.
    #[test]
    fn who_looks_without_a_lock_would_not_have_waited_for_it() {
        let lock = RwLock::new(rank::INODE, 1);
        drop(lock.read());
        start(100);
        // SAFETY: nobody else knows of the lock.
        let looked = unsafe { lock.look() }.is_some_and(|look| *look == 1);
        let events = stop();
        assert!(looked);
        use Kind::*;
        assert!(kinds(&events).ends_with(&[LockEntered, Tried, Unlock]));
    }

    #[test]
    fn counts_lie_where_the_library_puts_them() {
        #[repr(align(128))]
        struct Wide(#[expect(dead_code)] u8);
        fn strong<T>(arc: &Arc<T>) -> usize {
            let counts = counts_of::<T>(arc);
            // SAFETY: the address of the value's own count, which lives as long as `arc`.
            unsafe { *std::ptr::with_exposed_provenance::<usize>(counts) }
        }
        let narrow = Arc::new(1u8);
        let wide = Arc::new(Wide(1));
        let _more = (Arc::clone(&narrow), Arc::clone(&wide), Arc::clone(&wide));
        let _exposed = (
            Arc::as_ptr(&narrow).expose_provenance(),
            Arc::as_ptr(&wide).expose_provenance(),
        );
        assert_eq!((strong(&narrow), strong(&wide)), (2, 3));
    }
}
