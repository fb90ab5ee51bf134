//! Counted references whose counts are recorded; see [`crate::trace`]. As much of the standard
//! library's as is used.

use crate::trace;
use std::ops::Deref;

/// Of the standard library's size and layout.
#[derive(Debug)]
#[repr(transparent)]
pub struct Arc<T: ?Sized>(std::sync::Arc<T>);

impl<T> Arc<T> {
    pub fn new(value: T) -> Self {
        let arc = std::sync::Arc::new(value);
        trace::born::<T>(&arc);
        Arc(arc)
    }
}

impl<T: ?Sized> Arc<T> {
    pub fn ptr_eq(this: &Self, other: &Self) -> bool {
        std::sync::Arc::ptr_eq(&this.0, &other.0)
    }

    pub fn as_ptr(this: &Self) -> *const T {
        std::sync::Arc::as_ptr(&this.0)
    }

    pub fn strong_count(this: &Self) -> usize {
        std::sync::Arc::strong_count(&this.0)
    }
}

impl<T: ?Sized> Clone for Arc<T> {
    fn clone(&self) -> Self {
        trace::shared(&self.0);
        Arc(std::sync::Arc::clone(&self.0))
    }
}

impl<T: ?Sized> Drop for Arc<T> {
    fn drop(&mut self) {
        trace::unshared(&self.0);
    }
}

impl<T: ?Sized> Deref for Arc<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}
