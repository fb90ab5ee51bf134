//! How many rings the threads of the process have for calls that wait. Each takes a descriptor, of which a process has few, and most are the program's.
//!
//! 1. A thread keeps its ring behind its call only while all of them take a [`KEPT`] part of the descriptors at most, and makes one only while they take twice
//!    that with it; for a single request, which is not worth a ring that goes with it, no more than that. Who may make none does by calls what he would do on it.
//! 2. After the kernel had none to give it is not asked for [`REST_NS`].

use super::is_lack;
use base::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::io;

/// Of the descriptors.
const KEPT: usize = 4;
/// So long a lack lasts, as far as anybody knows.
const REST_NS: u64 = 1_000_000_000;

/// See the module's head.
pub(super) struct Bound {
    rings: AtomicUsize,
    /// As many as may be kept, as whoever made one found.
    kept_max: AtomicUsize,
    rests_until_ns: AtomicU64,
}

/// A ring that counts until it is dropped, itself first.
pub(super) struct Counted<'b, R> {
    pub ring: R,
    place: Place<'b>,
}

struct Place<'b>(&'b Bound);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.rings.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Bound {
    pub const fn new() -> Bound {
        Bound {
            rings: AtomicUsize::new(0),
            kept_max: AtomicUsize::new(0),
            rests_until_ns: AtomicU64::new(0),
        }
    }

    /// Makes a ring, of a process that may have so many descriptors; one that may not stay only for `many` requests.
    ///
    /// # Errors
    /// There are as many as there may be, or the kernel has none to give.
    pub fn make<R>(
        &self,
        (now_ns, descriptors): (u64, u64),
        many: bool,
        make: impl FnOnce() -> io::Result<R>,
    ) -> io::Result<Counted<'_, R>> {
        if now_ns < self.rests_until_ns.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let kept_max = usize::try_from(descriptors).unwrap_or(usize::MAX) / KEPT;
        self.kept_max.store(kept_max, Ordering::Relaxed);
        let before = self.rings.fetch_add(1, Ordering::Relaxed);
        let place = Place(self);
        let most = if many { 2 * kept_max } else { kept_max };
        if before >= most {
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        let ring = make().inspect_err(|error| {
            if is_lack(error) {
                let until = now_ns.saturating_add(REST_NS);
                self.rests_until_ns.store(until, Ordering::Relaxed);
            }
        })?;
        Ok(Counted { ring, place })
    }
}

impl<R> Counted<'_, R> {
    /// Whether it may be kept behind a call.
    pub fn may_stay(&self) -> bool {
        let Bound {
            rings, kept_max, ..
        } = self.place.0;
        rings.load(Ordering::Relaxed) <= kept_max.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_the_descriptors_is_kept_and_half_of_them_used() {
        let bound = Bound::new();
        let make = |many| bound.make((0, 16), many, || Ok(()));
        let refused = |many| make(many).is_err_and(|e| e.raw_os_error() == Some(libc::EMFILE));
        let mut rings: Vec<_> = (0..4).map(|_| make(false).unwrap()).collect();
        // One that would go with a single request.
        assert!(refused(false) && rings.iter().all(Counted::may_stay));
        rings.extend((4..8).map(|_| make(true).unwrap()));
        assert!(refused(true));
        // Whoever is done first gives up his own.
        while let Some(ring) = rings.pop_if(|ring| !ring.may_stay()) {
            drop(ring);
        }
        assert_eq!((rings.len(), bound.rings.load(Ordering::Relaxed)), (4, 4));
        // The process may have more by now.
        let more = bound.make((0, 100), false, || Ok(())).unwrap();
        assert!(more.may_stay());
        drop((rings, more));
        assert_eq!(bound.rings.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn where_the_kernel_had_none_to_give_it_is_asked_again_a_while_later() {
        let bound = Bound::new();
        let asked = std::cell::Cell::new(0);
        let make = |now_ns, error: Option<i32>| {
            let made = bound.make((now_ns, 1024), true, || {
                asked.set(asked.get() + 1);
                error.map_or(Ok(()), |number| Err(io::Error::from_raw_os_error(number)))
            });
            made.is_ok()
        };
        // What is no lack tells nothing of the next one.
        assert!(!make(5, Some(libc::EINVAL)) && make(5, None));
        assert!(!make(7, Some(libc::EMFILE)));
        assert_eq!(asked.get(), 3);
        assert!(!make(8, None) && !make(REST_NS + 6, None));
        assert_eq!(asked.get(), 3);
        assert!(make(REST_NS + 7, None));
        assert_eq!(bound.rings.load(Ordering::Relaxed), 0);
    }
}
