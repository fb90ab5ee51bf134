//! What comes back to one sender. Checked by `model/`.
//!
//! 1. What was put here is taken once.
//! 2. A sender that waits for a number is woken when so many are here; one that has a bell looks, and goes by the bell, which is
//!    rung after each that is put here.

use crate::queue::Bell;
use base::sync::{Condvar, Mutex, rank};
use std::sync::Arc;

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
        let mut state = self.state.lock();
        state.awaited = count;
        while state.here.len() < count {
            self.all.wait(&mut state);
        }
        state.awaited = 0;
        into.append(&mut state.here);
    }

    pub fn take(&self, into: &mut Vec<T>) {
        into.append(&mut self.state.lock().here);
    }

    pub fn is_empty(&self) -> bool {
        self.state.lock().here.is_empty()
    }
}
