//! Telling the kernel that what it has cached of a file is not so any more.
//!
//! The kernel takes such a message only when it has locked the pages that it drops, and a locked page may wait for an answer of this very
//! process. Invariants:
//! 1. Nobody sends one who holds a lock that a request may wait for.
//! 2. At most half of the workers wait in one: the others serve what those pages wait for. What comes beyond that is left to
//!    who is at it already ([`Notifier::drop_pages`]).

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;

use base::sync::{Mutex, rank};
use zerocopy::IntoBytes;

use crate::abi;
use crate::ops::NodeId;
use crate::transport::Bell;

/// What follows the drop of a file's pages.
type Then = Box<dyn FnOnce() + Send>;

/// See the module's head. Its copies are one.
#[derive(Clone)]
pub struct Notifier(Arc<Inner>);

struct Inner {
    bell: Option<Arc<dyn Bell>>,
    /// Workers that may wait at a time.
    most: usize,
    turns: Mutex<Turns>,
}

#[derive(Default)]
struct Turns {
    waiting: usize,
    /// Left to those who wait.
    left: VecDeque<(NodeId, Then)>,
}

impl std::fmt::Debug for Notifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Notifier").finish_non_exhaustive()
    }
}

impl Notifier {
    /// For a session with so many workers.
    pub fn new(bell: Option<Arc<dyn Bell>>, workers: usize) -> Notifier {
        Notifier(Arc::new(Inner {
            bell,
            most: (workers / 2).max(1),
            turns: Mutex::new(rank::LEAF, Turns::default()),
        }))
    }

    /// The kernel asks for attributes of a file anew, and takes no answer to what it has asked before this. Waits for nothing.
    pub fn drop_attributes(&self, node: NodeId) {
        self.send(node, -1);
    }

    /// The kernel drops all that it has cached of a file; then does `then`. This is so when the call returns, unless half of the workers are at
    /// others: then soon.
    pub fn drop_pages(&self, node: NodeId, then: Then) {
        let mut next = Some((node, then));
        {
            let mut turns = self.0.turns.lock();
            if turns.waiting == self.0.most {
                turns.left.extend(next);
                return;
            }
            turns.waiting += 1;
        }
        while let Some((node, then)) = next {
            self.send(node, 0);
            then();
            let mut turns = self.0.turns.lock();
            next = turns.left.pop_front();
            if next.is_none() {
                turns.waiting -= 1;
            }
        }
    }

    fn send(&self, node: NodeId, off: i64) {
        let Some(bell) = &self.0.bell else { return };
        let message = abi::NotifyInvalInodeOut {
            ino: node,
            off,
            len: 0,
        };
        let header = abi::OutHeader {
            len: (size_of::<abi::OutHeader>() + size_of_val(&message)) as u32,
            error: abi::NOTIFY_INVAL_INODE,
            unique: 0,
        };
        let parts = [
            IoSlice::new(header.as_bytes()),
            IoSlice::new(message.as_bytes()),
        ];
        if let Err(error) = bell.ring(&parts) {
            tracing::error!(node, %error, "the kernel keeps what it has cached of a file");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Weak;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Asks, while it is rung, for three drops more.
    #[derive(Default)]
    struct Nested {
        notifier: Later,
        rung: AtomicUsize,
    }

    type Later = std::sync::OnceLock<Weak<Inner>>;

    impl Bell for Nested {
        fn ring(&self, parts: &[IoSlice<'_>]) -> std::io::Result<bool> {
            let bytes: usize = parts.iter().map(|part| part.len()).sum();
            assert_eq!(bytes, 40);
            let rung = self.rung.fetch_add(1, Ordering::Relaxed);
            let notifier = self.notifier.get().and_then(Weak::upgrade);
            if let (0, Some(inner)) = (rung, notifier) {
                (0..3).for_each(|n| Notifier(Arc::clone(&inner)).drop_pages(n, Box::new(|| {})));
                assert_eq!(
                    self.rung.load(Ordering::Relaxed),
                    1,
                    "they are left to the first"
                );
            }
            Ok(true)
        }
    }

    #[test]
    fn what_comes_while_as_many_wait_as_may_is_done_by_one_of_them() {
        let bell = Arc::new(Nested::default());
        let notifier = Notifier::new(Some(Arc::clone(&bell) as Arc<dyn Bell>), 2);
        bell.notifier.set(Arc::downgrade(&notifier.0)).unwrap();
        notifier.drop_pages(7, Box::new(|| {}));
        assert_eq!(bell.rung.load(Ordering::Relaxed), 4);
        assert_eq!(notifier.0.turns.lock().waiting, 0);
        notifier.drop_pages(7, Box::new(|| {}));
        assert_eq!(bell.rung.load(Ordering::Relaxed), 5);
    }
}
