//! Atomics. All that several cores may touch name them by this path, so that `model/` can put a
//! model checker's in their place, and a build with the feature `trace` those that record.

pub use std::sync::atomic::{Ordering, fence};

/// What locks are made of: they are recorded as such.
pub mod of_locks {
    pub use std::sync::atomic::{AtomicBool, AtomicU32};
}

/// Adds to a number that no other thread changes, whoever looks at it, and returns what it comes to. That takes no locked instruction. Where what
/// threads share is recorded a thread may have another one's place for a moment, and it does.
#[inline]
#[cfg_attr(feature = "trace", track_caller)]
pub fn add_alone(number: &AtomicI64, value: i64) -> i64 {
    if cfg!(feature = "trace") {
        return number.fetch_add(value, Ordering::Relaxed) + value;
    }
    let now = number.load(Ordering::Relaxed) + value;
    number.store(now, Ordering::Relaxed);
    now
}

#[cfg(not(feature = "trace"))]
pub use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU32, AtomicU64, AtomicUsize};

#[cfg(feature = "trace")]
pub use traced::{AtomicBool, AtomicI64, AtomicU8, AtomicU32, AtomicU64, AtomicUsize};

#[cfg(feature = "trace")]
mod traced {
    use super::Ordering;
    use crate::trace;
    use std::panic::Location;

    macro_rules! atomic {
        ($name:ident, $value:ty, $($change:ident),*) => {
            #[derive(Debug, Default)]
            #[repr(transparent)]
            pub struct $name(std::sync::atomic::$name);

            impl $name {
                pub const fn new(value: $value) -> Self {
                    $name(std::sync::atomic::$name::new(value))
                }

                #[track_caller]
                pub fn load(&self, order: Ordering) -> $value {
                    let value = self.0.load(order);
                    trace::atomic(self, false, Location::caller());
                    value
                }

                #[track_caller]
                pub fn store(&self, value: $value, order: Ordering) {
                    self.0.store(value, order);
                    trace::atomic(self, true, Location::caller());
                }

                #[track_caller]
                pub fn compare_exchange(
                    &self,
                    current: $value,
                    new: $value,
                    success: Ordering,
                    failure: Ordering,
                ) -> Result<$value, $value> {
                    let outcome = self.0.compare_exchange(current, new, success, failure);
                    trace::atomic(self, true, Location::caller());
                    outcome
                }

                #[track_caller]
                pub fn compare_exchange_weak(
                    &self,
                    current: $value,
                    new: $value,
                    success: Ordering,
                    failure: Ordering,
                ) -> Result<$value, $value> {
                    let outcome = self.0.compare_exchange_weak(current, new, success, failure);
                    trace::atomic(self, true, Location::caller());
                    outcome
                }

                #[track_caller]
                pub fn fetch_update(
                    &self,
                    set: Ordering,
                    fetch: Ordering,
                    change: impl FnMut($value) -> Option<$value>,
                ) -> Result<$value, $value> {
                    let outcome = self.0.fetch_update(set, fetch, change);
                    trace::atomic(self, true, Location::caller());
                    outcome
                }

                pub fn get_mut(&mut self) -> &mut $value {
                    self.0.get_mut()
                }

                pub fn into_inner(self) -> $value {
                    self.0.into_inner()
                }

                $(
                    #[track_caller]
                    pub fn $change(&self, value: $value, order: Ordering) -> $value {
                        let before = self.0.$change(value, order);
                        trace::atomic(self, true, Location::caller());
                        before
                    }
                )*
            }
        };
    }

    macro_rules! numbers {
        ($($name:ident $value:ty),*) => {
            $(atomic!(
                $name, $value, swap, fetch_add, fetch_sub, fetch_and, fetch_or, fetch_xor,
                fetch_max, fetch_min
            );)*
        };
    }

    numbers!(AtomicI64 i64, AtomicU8 u8, AtomicU32 u32, AtomicU64 u64, AtomicUsize usize);
    atomic!(AtomicBool, bool, swap, fetch_and, fetch_or, fetch_xor);
}
