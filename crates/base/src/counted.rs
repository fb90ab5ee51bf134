//! Counted references without weak ones, which whoever has all there are counts by plain stores.
//!
//! Why: the standard library's have a second count for weak references, which is changed, or locked, when the last reference goes and whenever
//! somebody asks whether he has the only one. Here he looks at one count; and two references that are in the same hands are made, or become one,
//! without an atomic change.
//!
//! Invariants:
//! 1. `count` is the number of [`Counted`]s of a place. A place goes with the last of them.
//! 2. A reference is made only from another one that is there. So who has as many as `count` says, by `&mut` or for good, has them all: nobody else
//!    looks at the value, nor changes the count, until he gives one away. He has seen, by the load, what those did who had others before.

#[cfg(feature = "trace")]
use crate::trace;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering, fence};

/// More references than this are none that are counted: some are forgotten again and again.
const MOST: usize = isize::MAX as usize;

#[repr(C)]
struct Place<T> {
    count: AtomicUsize,
    value: T,
}

/// A counted reference. See the module's head.
pub struct Counted<T> {
    place: NonNull<Place<T>>,
    /// Dropping one may drop the value.
    _owns: PhantomData<Place<T>>,
}

// SAFETY: as of the standard library's: the value is shared among threads, and dropped by any of them; the count is atomic.
unsafe impl<T: Sync + Send> Send for Counted<T> {}
// SAFETY: as above.
unsafe impl<T: Sync + Send> Sync for Counted<T> {}

impl<T> Counted<T> {
    pub fn new(value: T) -> Counted<T> {
        Counted::<T>::filled(Counted::room(), || value)
    }

    /// A place of its own for a value.
    pub(crate) fn room() -> Counted<MaybeUninit<T>> {
        let layout = Layout::new::<Place<MaybeUninit<T>>>();
        // SAFETY: the layout has a size: the count's at least.
        let place = unsafe { alloc(layout) }.cast::<Place<MaybeUninit<T>>>();
        let Some(place) = NonNull::new(place) else {
            handle_alloc_error(layout)
        };
        // SAFETY: it was just made, of this layout. A value that may be missing needs no first one.
        unsafe { (&raw mut (*place.as_ptr()).count).write(AtomicUsize::new(1)) };
        #[cfg(feature = "trace")]
        trace::born_at(place.as_ptr().addr(), layout.size());
        Counted {
            place,
            _owns: PhantomData,
        }
    }

    /// Makes a value in a place that has none.
    #[inline]
    pub(crate) fn filled(
        mut room: Counted<MaybeUninit<T>>,
        value: impl FnOnce() -> T,
    ) -> Counted<T> {
        let none = Counted::only(&mut room).expect("nobody else refers to what has no value");
        none.write(value());
        let place = room.place.cast();
        std::mem::forget(room);
        // The place has a value now. A value that may be missing has the size and alignment of one that is there.
        Counted {
            place,
            _owns: PhantomData,
        }
    }

    /// Drops a reference, and the value if it was the last one: then its place is left.
    pub(crate) fn emptied(mut self) -> Option<Counted<MaybeUninit<T>>> {
        let value = std::ptr::from_mut(Counted::only(&mut self)?);
        let place = self.place.cast();
        std::mem::forget(self);
        // SAFETY: it is the only reference (2), and is not used as one to a value any more. If dropping panics the place is leaked.
        unsafe { std::ptr::drop_in_place(value) };
        Some(Counted {
            place,
            _owns: PhantomData,
        })
    }

    fn count(&self) -> &AtomicUsize {
        // SAFETY: the place is there as long as this reference is (1).
        unsafe { &(*self.place.as_ptr()).count }
    }

    /// The references there are, as far as one thread can tell while others make and drop some. With it he sees what those did who
    /// dropped theirs.
    pub fn references(this: &Self) -> usize {
        this.count().load(Ordering::Acquire)
    }

    pub fn ptr_eq(this: &Self, other: &Self) -> bool {
        this.place == other.place
    }

    pub fn as_ptr(this: &Self) -> *const T {
        std::ptr::from_ref(&**this)
    }

    /// The value, if this is the only reference.
    pub fn only(this: &mut Self) -> Option<&mut T> {
        // SAFETY: all references there are are this one, which is borrowed (2).
        (Counted::references(this) == 1).then(|| unsafe { &mut (*this.place.as_ptr()).value })
    }

    /// Another reference. Of the only one there is no atomic change.
    pub fn twin(this: &mut Self) -> Self {
        if Counted::references(this) != 1 {
            return this.clone();
        }
        // Nobody else knows the place (2).
        this.count().store(2, Ordering::Relaxed);
        #[cfg(feature = "trace")]
        trace::counted::<T>(this.count());
        Counted {
            place: this.place,
            _owns: PhantomData,
        }
    }

    /// The value, if these two are all references to it.
    pub fn only_two<'a>(one: &'a mut Self, other: &'a mut Self) -> Option<&'a mut T> {
        let all = Counted::ptr_eq(one, other) && Counted::references(one) == 2;
        // SAFETY: both are borrowed, and there is no third (2).
        all.then(|| unsafe { &mut (*one.place.as_ptr()).value })
    }

    /// Drops `other`; if both are all that there are, without an atomic change.
    pub fn absorb(this: &mut Self, other: Self) {
        if Counted::ptr_eq(this, &other) && Counted::references(this) == 2 {
            // Nobody else knows the place (2).
            this.count().store(1, Ordering::Relaxed);
            #[cfg(feature = "trace")]
            trace::counted::<T>(this.count());
            std::mem::forget(other);
        }
    }

    /// Of the last reference.
    #[inline(never)]
    fn free(place: NonNull<Place<T>>) {
        // SAFETY: nobody refers to it any more (1), and it was made by `room`, whose layout is the same.
        unsafe {
            std::ptr::drop_in_place(&raw mut (*place.as_ptr()).value);
            dealloc(place.as_ptr().cast(), Layout::new::<Place<T>>());
        }
    }
}

impl<T> Clone for Counted<T> {
    #[inline]
    fn clone(&self) -> Self {
        #[cfg(feature = "trace")]
        trace::counted::<T>(self.count());
        // As with the standard library's: who has a reference may give another one away without an order of its own.
        if self.count().fetch_add(1, Ordering::Relaxed) > MOST {
            std::process::abort();
        }
        Counted {
            place: self.place,
            _owns: PhantomData,
        }
    }
}

impl<T> Drop for Counted<T> {
    #[inline]
    fn drop(&mut self) {
        #[cfg(feature = "trace")]
        trace::counted::<T>(self.count());
        if Counted::references(self) != 1 {
            if self.count().fetch_sub(1, Ordering::Release) != 1 {
                return;
            }
            // What those did who had others comes before the end of the value.
            fence(Ordering::Acquire);
        }
        Counted::free(self.place);
    }
}

impl<T> Deref for Counted<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the value is there as long as this reference is (1), and nobody has it alone meanwhile (2).
        unsafe { &(*self.place.as_ptr()).value }
    }
}

impl<T: fmt::Debug> fmt::Debug for Counted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::sync::{Mutex, rank};

    /// Counts the values there are.
    #[derive(Debug)]
    pub(crate) struct Alive<'a>(&'a AtomicUsize, pub(crate) u64);

    impl<'a> Alive<'a> {
        pub(crate) fn new(alive: &'a AtomicUsize, value: u64) -> Alive<'a> {
            alive.fetch_add(1, Ordering::Relaxed);
            Alive(alive, value)
        }
    }

    impl Drop for Alive<'_> {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_value_goes_with_its_last_reference() {
        let alive = AtomicUsize::new(0);
        let mut first = Counted::new(Alive::new(&alive, 7));
        let mut second = Counted::twin(&mut first);
        let third = Counted::twin(&mut second);
        assert_eq!((Counted::references(&first), third.1), (3, 7));
        assert!(Counted::only_two(&mut first, &mut second).is_none());
        drop(third);
        Counted::only_two(&mut first, &mut second).unwrap().1 = 8;
        Counted::absorb(&mut second, first);
        assert_eq!((Counted::references(&second), second.1), (1, 8));
        // Of another value: it is dropped, no more.
        Counted::absorb(&mut second, Counted::new(Alive::new(&alive, 9)));
        assert_eq!(alive.load(Ordering::Relaxed), 1);
        let mut other = Counted::new(Alive::new(&alive, 10));
        let (mut fourth, _fifth) = (Counted::twin(&mut second), Counted::twin(&mut other));
        assert!(Counted::only_two(&mut other, &mut fourth).is_none());
        drop((second, fourth));
        assert_eq!(alive.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn who_has_both_references_that_are_left_sees_what_others_have_done() {
        let alive = AtomicUsize::new(0);
        let rounds = if cfg!(miri) { 30 } else { 20_000 };
        let table = Mutex::new(rank::LEAF, None::<Counted<Alive<'_>>>);
        let ended = AtomicUsize::new(0);
        crate::thread::parallel(2, |thread| match thread {
            0 => {
                for i in 0..rounds {
                    let mut own = Counted::new(Alive::new(&alive, i));
                    *table.lock() = Some(Counted::twin(&mut own));
                    loop {
                        let mut table = table.lock();
                        let theirs = table.as_mut().unwrap();
                        if let Some(value) = Counted::only_two(theirs, &mut own) {
                            value.1 += 1;
                            Counted::absorb(&mut own, table.take().unwrap());
                            break;
                        }
                    }
                    assert_eq!((Counted::references(&own), own.1), (1, i + 1));
                }
                ended.store(1, Ordering::Relaxed);
            }
            _ => {
                while ended.load(Ordering::Relaxed) == 0 {
                    let found = table.lock().clone();
                    assert!(found.is_none_or(|found| found.1 < rounds));
                }
            }
        });
        assert_eq!(alive.load(Ordering::Relaxed), 0);
    }
}
