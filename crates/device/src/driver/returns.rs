//! What comes back to one sender. Checked by `model/`.
//!
//! 1. What was put here is taken once.
//! 2. A sender that sleeps until a number is here is woken by the one that makes it so many; one that is awake looks, and nobody wakes it;
//!    one that has a bell looks, and goes by the bell, which is rung after each that is put here.

use crate::queue::Bell;
use base::sync::{Condvar, Mutex, rank};
use std::sync::Arc;
use std::time::Duration;

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Returns<T> {
    state: Mutex<State<T>>,
    all: Condvar,
    bell: Option<Arc<Bell>>,
}

#[derive(Debug)]
struct State<T> {
    here: Vec<T>,
    /// Worth to be woken for; 0: nobody waits.
    awaited: usize,
}

impl<T> Returns<T> {
    /// For a sender that waits, or one that goes by a bell.
    pub fn new(bell: Option<Arc<Bell>>) -> Returns<T> {
        let state = State {
            here: Vec::new(),
            awaited: 0,
        };
        Returns {
            state: Mutex::new(rank::LEAF, state),
            all: Condvar::new(),
            bell,
        }
    }

    /// Puts something here; a bell is rung by [`ring`](Returns::ring).
    pub fn put(&self, items: impl IntoIterator<Item = T>) {
        let mut state = self.state.lock();
        state.here.extend(items);
        let enough = state.awaited > 0 && state.here.len() >= state.awaited;
        drop(state);
        if enough {
            self.all.notify_all();
        }
    }

    pub fn ring(&self) {
        if let Some(bell) = &self.bell {
            bell.ring();
        }
    }

    /// Waits until so many are here, and takes them.
    pub fn wait(&self, count: usize, into: &mut Vec<T>) {
        self.sleep(count, None);
        self.take(into);
    }

    /// Sleeps until so many are here; or not quite so long, if there is an end to the patience.
    pub fn sleep(&self, count: usize, patience: Option<Duration>) {
        let mut state = self.state.lock();
        state.awaited = count;
        while state.here.len() < count {
            match patience {
                None => self.all.wait(&mut state),
                Some(time) => {
                    self.all.wait_for(&mut state, time);
                    break;
                }
            }
        }
        state.awaited = 0;
    }

    pub fn has(&self, count: usize) -> bool {
        self.state.lock().here.len() >= count
    }

    pub fn take(&self, into: &mut Vec<T>) {
        into.append(&mut self.state.lock().here);
    }

    pub fn is_empty(&self) -> bool {
        self.state.lock().here.is_empty()
    }
}
