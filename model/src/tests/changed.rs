//! Leaves of the node table that changed: those who mark nodes, a checkpoint that begins, and who looks what it may evict.

use super::check;
use crate::changed::ChangedLeaves;
use base::atomic::{AtomicBool, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use loom::sync::Mutex;
use loom::thread::spawn;
use std::sync::Arc;

const NO_PANIC: &str = "no thread of a model panics";

/// As `Store::mark_dirty` and `Store::take_dirty` have it: a node is in the list of those that changed before its leaf is marked, and a checkpoint
/// takes the leaves before it takes the list.
struct Nodes {
    leaves: ChangedLeaves,
    /// Nodes, by their numbers, and the leaf of each.
    list: Mutex<Vec<(usize, u64)>>,
    marked: [AtomicBool; 2],
    /// The checkpoint that took the node has set its entry.
    entered: [AtomicBool; 2],
}

impl Nodes {
    fn new() -> Arc<Nodes> {
        let no = || [AtomicBool::new(false), AtomicBool::new(false)];
        Arc::new(Nodes {
            leaves: ChangedLeaves::with_words(2),
            list: Mutex::new(Vec::new()),
            marked: no(),
            entered: no(),
        })
    }

    fn mark(&self, node: usize, leaf: u64) -> bool {
        self.list.lock().expect(NO_PANIC).push((node, leaf));
        let first = self.leaves.add(leaf);
        self.marked[node].store(true, Release);
        first
    }

    /// Returns how many leaves it got.
    fn checkpoint(&self) -> u64 {
        let leaves = self.leaves.begin();
        let taken = std::mem::take(&mut *self.list.lock().expect(NO_PANIC));
        for (node, _) in taken {
            self.entered[node].store(true, Relaxed);
        }
        self.leaves.entered();
        leaves
    }

    /// Who is about to evict the leaf of a marked node finds it kept, unless its entry is set.
    fn look(&self, node: usize, leaf: u64) {
        if self.marked[node].load(Acquire) && !self.leaves.keeps(leaf) {
            let entered = self.entered[node].load(Relaxed);
            assert!(entered, "the leaf of a node that changed may go");
        }
    }
}

/// The leaf of a node that changed is kept until its entry is set, while a checkpoint begins and ends; and what that one did not
/// take is the next one's.
///
/// Found when broken: `begin` that clears `next` before it sets `running`, with a relaxed `fetch_and`, or that clears the whole word; `keeps` that looks at
/// `running` first; relaxed looks; a list that is taken before the leaves, or that gets the node after its leaf is marked; entries that
/// are set after `entered`.
#[test]
fn the_leaf_of_a_changed_node_is_kept_until_its_entry_is_set() {
    for leaves in [[3, 3], [3, 5], [3, 70]] {
        check(3, move || {
            let nodes = Nodes::new();
            nodes.mark(0, leaves[0]);
            let marker = {
                let nodes = Arc::clone(&nodes);
                spawn(move || nodes.mark(1, leaves[1]))
            };
            let checkpoint = {
                let nodes = Arc::clone(&nodes);
                spawn(move || nodes.checkpoint())
            };
            nodes.look(0, leaves[0]);
            nodes.look(1, leaves[1]);
            marker.join().expect(NO_PANIC);
            checkpoint.join().expect(NO_PANIC);
            for (node, leaf) in leaves.into_iter().enumerate() {
                let entered = nodes.entered[node].load(Relaxed);
                assert!(entered || nodes.leaves.has(leaf), "no checkpoint's");
            }
        });
    }
}

/// A leaf counts once for each checkpoint that gets it, whoever marks nodes of it at once; and a checkpoint that begins after a node was
/// marked gets its leaf, also if somebody else had marked that.
///
/// Found when broken: a word that is marked as used after it has a bit, or by a store; a relaxed `fetch_or` of the bit; `begin` that clears the whole word;
/// `add` that says of each that it was the first.
#[test]
fn a_leaf_counts_once_for_the_checkpoint_that_gets_it() {
    for leaves in [[3, 3], [3, 5], [3, 70]] {
        check(3, move || {
            let nodes = Nodes::new();
            let marker = {
                let nodes = Arc::clone(&nodes);
                spawn(move || u64::from(nodes.mark(1, leaves[1])))
            };
            let mut first = u64::from(nodes.mark(0, leaves[0]));
            let begun = nodes.checkpoint();
            assert!(begun > 0, "a leaf in use is not found");
            first += marker.join().expect(NO_PANIC);
            assert_eq!(first, begun + nodes.checkpoint());
            assert!(leaves.iter().all(|leaf| !nodes.leaves.keeps(*leaf)));
        });
    }
}
