//! What `base` has, as far as the model-checked parts use it, over the model checker's threads,
//! locks and atomics.

pub mod atomic {
    //! The checker's atomics. It treats sequentially consistent accesses as acquire and release
    //! only, so what makes them more is added: a full fence between a sequentially consistent
    //! write of a thread and its next sequentially consistent read.

    pub use loom::sync::atomic::Ordering;
    pub use loom::sync::atomic::fence;
    use std::cell::Cell;
    use std::ops::{Deref, DerefMut};

    loom::thread_local! {
        /// The thread has written so since its last fence.
        static WROTE: Cell<bool> = Cell::new(false);
    }

    fn before_read(order: Ordering) {
        if order == Ordering::SeqCst && WROTE.with(|wrote| wrote.replace(false)) {
            fence(Ordering::SeqCst);
        }
    }

    fn after_write(order: Ordering) {
        if order == Ordering::SeqCst {
            WROTE.with(|wrote| wrote.set(true));
        }
    }

    macro_rules! atomic {
        ($name:ident, $int:ty) => {
            #[derive(Debug)]
            pub struct $name(loom::sync::atomic::$name);

            impl Default for $name {
                fn default() -> Self {
                    $name::new(0)
                }
            }

            impl $name {
                pub fn new(value: $int) -> Self {
                    $name(loom::sync::atomic::$name::new(value))
                }

                pub fn load(&self, order: Ordering) -> $int {
                    before_read(order);
                    self.0.load(order)
                }

                pub fn store(&self, value: $int, order: Ordering) {
                    self.0.store(value, order);
                    after_write(order);
                }

                pub fn swap(&self, value: $int, order: Ordering) -> $int {
                    let old = self.0.swap(value, order);
                    after_write(order);
                    old
                }

                pub fn compare_exchange(
                    &self,
                    current: $int,
                    new: $int,
                    success: Ordering,
                    failure: Ordering,
                ) -> Result<$int, $int> {
                    let result = self.0.compare_exchange(current, new, success, failure);
                    if result.is_ok() {
                        after_write(success);
                    }
                    result
                }

                pub fn fetch_add(&self, value: $int, order: Ordering) -> $int {
                    let old = self.0.fetch_add(value, order);
                    after_write(order);
                    old
                }

                pub fn fetch_sub(&self, value: $int, order: Ordering) -> $int {
                    let old = self.0.fetch_sub(value, order);
                    after_write(order);
                    old
                }

                pub fn fetch_and(&self, value: $int, order: Ordering) -> $int {
                    let old = self.0.fetch_and(value, order);
                    after_write(order);
                    old
                }

                pub fn fetch_or(&self, value: $int, order: Ordering) -> $int {
                    let old = self.0.fetch_or(value, order);
                    after_write(order);
                    old
                }

                pub fn fetch_max(&self, value: $int, order: Ordering) -> $int {
                    let old = self.0.fetch_max(value, order);
                    after_write(order);
                    old
                }
            }
        };
    }

    atomic!(AtomicI64, i64);
    atomic!(AtomicU32, u32);
    atomic!(AtomicU64, u64);
    atomic!(AtomicUsize, usize);

    pub mod of_locks {
        pub use super::{AtomicBool, AtomicU32};
    }

    /// Of who alone changes it.
    pub fn add_alone(number: &AtomicI64, value: i64) -> i64 {
        let now = number.load(Ordering::Relaxed) + value;
        number.store(now, Ordering::Relaxed);
        now
    }

    #[derive(Debug)]
    pub struct AtomicBool(loom::sync::atomic::AtomicBool);

    impl AtomicBool {
        pub fn new(value: bool) -> Self {
            AtomicBool(loom::sync::atomic::AtomicBool::new(value))
        }

        pub fn load(&self, order: Ordering) -> bool {
            before_read(order);
            self.0.load(order)
        }

        pub fn store(&self, value: bool, order: Ordering) {
            self.0.store(value, order);
            after_write(order);
        }

        pub fn swap(&self, value: bool, order: Ordering) -> bool {
            let old = self.0.swap(value, order);
            after_write(order);
            old
        }

        pub fn compare_exchange(
            &self,
            current: bool,
            new: bool,
            success: Ordering,
            failure: Ordering,
        ) -> Result<bool, bool> {
            let result = self.0.compare_exchange(current, new, success, failure);
            if result.is_ok() {
                after_write(success);
            }
            result
        }

        pub fn get_mut(&mut self) -> Value<'_> {
            let value = self.load(Ordering::Relaxed);
            Value(self, value)
        }
    }

    /// What a boolean of which nobody else knows holds.
    pub struct Value<'a>(&'a mut AtomicBool, bool);

    impl Deref for Value<'_> {
        type Target = bool;
        fn deref(&self) -> &bool {
            &self.1
        }
    }

    impl DerefMut for Value<'_> {
        fn deref_mut(&mut self) -> &mut bool {
            &mut self.1
        }
    }

    impl Drop for Value<'_> {
        fn drop(&mut self) {
            let value = self.1;
            self.0.store(value, Ordering::Relaxed);
        }
    }
}

pub mod canary {
    //! No breakage is planted; to see a model fail, the part itself is changed.

    #[derive(Clone, Copy, Debug)]
    pub enum Canary {
        DataReadEarly,
        DirectUnderHome,
        DurableOutOfOrder,
        FloorNotRaised,
        GenerationIgnored,
        LookForgotten,
        LookNotSeen,
        NoCredits,
        PinsIgnored,
        RangeIgnored,
        StoresUnseen,
        TallyPartForgotten,
        VersionUnchecked,
        VouchedOverwritten,
    }

    pub fn planted(_: Canary) -> bool {
        false
    }
}

pub mod sync {
    //! Locks without ranks: their order is checked by the debug builds of the real ones.

    use crate::atomic::{AtomicBool, Ordering};
    use std::ops::{Deref, DerefMut};
    use std::time::Duration;

    pub mod rank {
        #[derive(Clone, Copy, Debug)]
        pub struct Rank;

        pub const COMMIT_STATE: Rank = Rank;
        pub const DEVICE_FLUSH: Rank = Rank;
        pub const DEVICE_STATE: Rank = Rank;
        pub const FILE_IO: Rank = Rank;
        pub const FILE_RANGES: Rank = Rank;
        pub const FILE_STATE: Rank = Rank;
        pub const GATHER: Rank = Rank;
        pub const LEAF: Rank = Rank;
        pub const STAGING: Rank = Rank;
        pub const TALLY: Rank = Rank;
    }

    use rank::Rank;

    pub fn assert_none_held_from(_: Rank) {}

    #[derive(Debug)]
    pub struct Mutex<T>(loom::sync::Mutex<T>);

    /// A lock, too; how it waits has a model of its own.
    pub type Latch<T> = Mutex<T>;

    /// Knows its lock, to take it again after a bounded wait.
    #[derive(Debug)]
    pub struct MutexGuard<'a, T>(
        Option<loom::sync::MutexGuard<'a, T>>,
        &'a loom::sync::Mutex<T>,
    );

    const NO_PANIC: &str = "no thread of a model panics";
    const WAITING: &str = "a guard is given away only during a wait";

    impl<T> Mutex<T> {
        pub fn new(_: Rank, value: T) -> Self {
            Mutex(loom::sync::Mutex::new(value))
        }

        pub fn keyed(rank: Rank, _: u64, value: T) -> Self {
            Self::new(rank, value)
        }

        pub fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().expect(NO_PANIC)), &self.0)
        }

        pub fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().expect(NO_PANIC)
        }

        pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            let guard = self.0.try_lock().ok()?;
            Some(MutexGuard(Some(guard), &self.0))
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            self.0.as_ref().expect(WAITING)
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().expect(WAITING)
        }
    }

    /// The checker sees who finds it set; making what is in it takes no step.
    #[derive(Debug)]
    pub struct OnceLock<T> {
        value: std::sync::OnceLock<T>,
        set: AtomicBool,
    }

    impl<T> OnceLock<T> {
        pub fn new() -> OnceLock<T> {
            OnceLock {
                value: std::sync::OnceLock::new(),
                set: AtomicBool::new(false),
            }
        }

        pub fn get(&self) -> Option<&T> {
            match self.set.load(Ordering::Acquire) {
                true => self.value.get(),
                false => None,
            }
        }

        pub fn get_mut(&mut self) -> Option<&mut T> {
            self.value.get_mut()
        }

        pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
            let value = self.value.get_or_init(make);
            self.set.swap(true, Ordering::AcqRel);
            value
        }
    }

    impl<T> Default for OnceLock<T> {
        fn default() -> OnceLock<T> {
            OnceLock::new()
        }
    }

    #[derive(Debug, Default)]
    pub struct Condvar(loom::sync::Condvar);

    impl Condvar {
        pub fn new() -> Condvar {
            Condvar(loom::sync::Condvar::new())
        }

        pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            let inner = guard.0.take().expect(WAITING);
            guard.0 = Some(self.0.wait(inner).expect(NO_PANIC));
        }

        /// Time is up at once: others run, and nobody relies on being woken.
        pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _: Duration) -> bool {
            drop(guard.0.take());
            loom::thread::yield_now();
            guard.0 = Some(guard.1.lock().expect(NO_PANIC));
            true
        }

        pub fn notify_one(&self) {
            self.0.notify_one();
        }

        pub fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}

pub mod clock {
    /// Nanoseconds since the epoch.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
    pub struct Timestamp(i64);

    impl Timestamp {
        pub fn ns(self) -> i64 {
            self.0
        }

        pub fn from_ns(ns: i64) -> Timestamp {
            Timestamp(ns)
        }
    }

    /// No time passes.
    #[derive(Debug)]
    pub struct Clock;

    impl Clock {
        pub fn real() -> Clock {
            Clock
        }

        pub fn monotonic_ns(&self) -> u64 {
            0
        }

        pub fn now(&self) -> Timestamp {
            Timestamp(10)
        }

        pub fn now_coarse(&self) -> Timestamp {
            self.now()
        }
    }
}

pub mod thread {
    use std::cell::Cell;

    loom::thread_local! {
        static LANE: Cell<usize> = Cell::new(0);
    }

    /// What the thread has said ([`set_lane`]); else it is the first.
    pub fn lane() -> usize {
        LANE.with(Cell::get)
    }

    /// No other thread of the model has this lane.
    pub fn set_lane(lane: usize) {
        LANE.with(|own| own.set(lane));
    }

    /// The checker must know that a loop waits for another thread.
    pub fn spin(_: &mut u32) {
        loom::thread::yield_now();
    }
}

pub mod tight {
    /// Nothing is made small.
    pub fn limit(usual: usize, _: usize) -> usize {
        usual
    }
}

pub mod sched {
    pub fn point() {}
}

pub mod sys {
    //! There is no kernel here.

    use std::io;
    use std::os::fd::{AsRawFd, RawFd};

    #[derive(Debug)]
    pub struct EventFd;

    impl EventFd {
        pub fn new() -> io::Result<EventFd> {
            Err(io::ErrorKind::Unsupported.into())
        }

        pub fn signal(&self) {}

        pub fn clear(&self) {}
    }

    impl AsRawFd for EventFd {
        fn as_raw_fd(&self) -> RawFd {
            -1
        }
    }
}
