//! What a thread keeps of each device from one call to the next.
//!
//! 1. What was taken is the taker's until it is kept again: a call that begins another one on the same device meanwhile finds nothing,
//!    and both may keep what they have.
//! 2. A place stays when what it has is taken, so that a call of a known device writes to no line that threads share. Places of devices
//!    that are gone are given up when there is a new one.

use std::sync::{Arc, Weak};

/// See the module's head.
pub(crate) struct Kept<T>(Vec<(Weak<()>, Option<T>)>);

impl<T> Kept<T> {
    pub const fn new() -> Kept<T> {
        Kept(Vec::new())
    }

    /// What is kept of the device that `id` distinguishes.
    pub fn take(&mut self, id: &Arc<()>) -> Option<T> {
        self.places(id).find_map(Option::take)
    }

    pub fn keep(&mut self, id: &Arc<()>, value: T) {
        if let Some(place) = self.places(id).find(|place| place.is_none()) {
            *place = Some(value);
            return;
        }
        self.0.retain(|(id, _)| id.strong_count() > 0);
        self.0.push((Arc::downgrade(id), Some(value)));
    }

    fn places(&mut self, id: &Arc<()>) -> impl Iterator<Item = &mut Option<T>> {
        let of = Arc::as_ptr(id);
        let mine = move |(id, _): &&mut (Weak<()>, Option<T>)| std::ptr::eq(id.as_ptr(), of);
        self.0.iter_mut().filter(mine).map(|(_, place)| place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_device_has_its_own_and_whoever_takes_has_it_alone() {
        let (a, b) = (Arc::new(()), Arc::new(()));
        let mut kept = Kept::new();
        assert_eq!(kept.take(&a), None);
        kept.keep(&a, 1);
        kept.keep(&b, 2);
        assert_eq!((kept.take(&b), kept.take(&b)), (Some(2), None));
        // Two calls at a time.
        assert_eq!(kept.take(&a), Some(1));
        kept.keep(&a, 3);
        kept.keep(&a, 1);
        let both = [kept.take(&a), kept.take(&a)];
        assert!(both == [Some(3), Some(1)], "{both:?}");
        assert_eq!(kept.take(&a), None);
        kept.keep(&a, 4);
        assert_eq!(kept.0.len(), 3);
        // Of devices that are gone nothing is kept.
        drop((a, b));
        let c = Arc::new(());
        kept.keep(&c, 5);
        assert_eq!((kept.0.len(), kept.take(&c)), (1, Some(5)));
    }
}
