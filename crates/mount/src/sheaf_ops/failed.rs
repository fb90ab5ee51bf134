//! Changes that fail after they were made, in whole or in part: halfway, or because they do not become durable.
//!
//! The kernel takes an error for a change that was not made, and keeps what it has cached: pages that are holes, sizes and modes that the file does not have. A store to such a
//! page would bring all of it back. So attributes go, whether something was changed or not, and so do the pages of bytes that may have changed. Others stay: what mappings have stored there the
//! kernel has not written back for the change, and where that finds no space it would be lost with the page.
//!
//! What was written without an error, and could not be brought to the devices afterwards, is given up when nobody has the file open any more, or has failed for long. Then the file is another one
//! than the kernel knows, which has no reason to ask.

use std::sync::Arc;

use fs::Ino;

use super::SheafOps;
use crate::notify::{Notifier, Pages};
use crate::ops::{Errno, NodeId, Result};

impl SheafOps {
    /// From now on attributes and pages of files of which something is given up are dropped soon after that. Whoever gives up may have submitted something, and
    /// has locks: it drops none itself, and waits for nothing.
    pub(super) fn forgets_what_goes(&self, notifier: &Notifier) {
        let notifier = notifier.clone();
        let gone = self
            .gone
            .get_or_init(|| Arc::new(move |ino: Ino| notifier.drop_outdated(Pages::all(ino.0))));
        self.fs.tell_gone(Arc::downgrade(gone));
    }

    /// What came of a change of a file: of these bytes, for which the kernel has written back what mappings had stored there, or of none, but of its size and what it takes.
    pub(super) fn or_forgotten<T>(
        &self,
        node: NodeId,
        bytes: Option<(u64, u64)>,
        changed: Result<T>,
    ) -> Result<T> {
        if let Err(error) = &changed
            && let Some(notifier) = self.notifier.get()
        {
            notifier.drop_attributes(node);
            // With these a change is refused before any byte is another.
            let is_refused = matches!(error.0, libc::EOPNOTSUPP | libc::ECANCELED);
            if let (Some((offset, length)), false) = (bytes, is_refused) {
                let bytes = offset..offset.saturating_add(length);
                notifier.drop_outdated_and_wait(Pages::unwritten(node, bytes));
            }
        }
        changed
    }

    /// What came of a change of attributes, and of the size if there is one. The kernel writes no page of the file back until that is answered: pages go after the answer.
    pub(super) fn or_attributes_forgotten<T>(
        &self,
        node: NodeId,
        size: Option<u64>,
        changed: Result<T>,
    ) -> Result<T> {
        if let Err(error) = changed {
            self.attributes_changed(node);
            // Without space nothing was cut, and it may be tried again before the answer.
            if let (Some(size), true) = (size, error != Errno::NOSPC) {
                let behind = size / PAGE * PAGE..u64::MAX;
                self.atomic.outdated(Pages::changed_past(node, behind));
            }
        }
        changed
    }
}

/// Of the kernel's cache.
const PAGE: u64 = 4096;
