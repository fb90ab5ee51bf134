//! Files whose extents are in a tree that is damaged, or has wrong content.

use super::*;
use format::item::{ITEM_ALIGN, ItemHeader, ItemKind};
use zerocopy::FromBytes;

const PAGE: u64 = format::BLOCK_SIZE as u64;
/// Pages of the file, each mapped by itself: so many that they take five leaves.
const EXTENTS: u64 = 2600;

impl World {
    /// A file of single pages, each with a hole behind it.
    fn scattered(&self) -> Nid {
        self.change(|fs| {
            let made = fs.create(&root(), ROOT, b"leaves", 0o644, libc::O_RDWR);
            let (attr, file) = made.unwrap();
            for i in 0..EXTENTS {
                fs.write(&file, 2 * i * PAGE, &[7]).unwrap();
            }
            attr.ino
        })
    }

    /// Nodes of a file's tree with the keys that they begin at: leaves, and index nodes above them, if there are any.
    fn tree_of(&self, file: Nid) -> (Vec<Child>, Vec<Child>) {
        let Body::Tree(root) = self.inode(file).body else {
            panic!("a scattered file has a tree");
        };
        if root.depth == 0 {
            return (root.children, Vec::new());
        }
        assert_eq!(root.depth, 1);
        let leaves = self.change(|fs| {
            let below = |child: &Child| {
                let node = fs.store().get(child.nid).unwrap().into_read().unwrap();
                node.index().unwrap().to_vec()
            };
            root.children.iter().flat_map(below).collect()
        });
        (leaves, root.children)
    }

    /// Flips a byte in every image of a node.
    fn damage(&self, nid: Nid) {
        let mut all = vec![0; BYTES as usize];
        self.device.peek(0, &mut all);
        let (seed, mut damaged) = (self.device.checksum_seed(), 0);
        for at in (0..all.len() - ItemHeader::SIZE).step_by(ITEM_ALIGN) {
            let (header, _) = ItemHeader::read_from_prefix(&all[at..]).unwrap();
            let is_node = header.kind == ItemKind::Node as u8 && header.id.get() == nid.0;
            if is_node && format::item::decode(seed, &all[at..]).is_ok() {
                let byte = at + ItemHeader::SIZE;
                self.device.poke(byte as u64, &[!all[byte]]);
                damaged += 1;
            }
        }
        assert!(damaged > 0, "node {nid} has no image");
    }
}

/// What a page of the file begins with, or nothing if it cannot be read.
fn byte_of(fs: &FileSystem, file: &crate::OpenFile, page: u64) -> Option<u8> {
    let mut byte = [0xEE];
    match fs.read(file, page * PAGE, &mut byte) {
        Ok(1) => Some(byte[0]),
        Ok(read) => panic!("{read} bytes of page {page}"),
        Err(error) => {
            assert_eq!(error.errno(), libc::EIO, "{error}");
            None
        }
    }
}

/// The cut stayed pending, so that each append, and each mount, tried it again, in vain.
#[test]
fn a_cut_ends_where_it_meets_damage_and_the_file_grows_again() {
    for (deep, damaged) in [
        (false, 0),
        (false, 1),
        (false, 2),
        (false, 3),
        (true, 0),
        (true, 1),
    ] {
        base::tight::set(deep);
        let world = World::new();
        let file = world.scattered();
        let (leaves, index) = world.tree_of(file);
        assert!(leaves.len() > 3 && index.is_empty() != deep);
        let nodes = if deep { &index } else { &leaves };
        let (low, nid) = (nodes[damaged].key, nodes[damaged].nid);
        let high = nodes.get(damaged + 1).map_or(u64::MAX, |next| next.key);
        // In the middle of the second leaf.
        let cut = leaves[1].key + 100;
        let hidden = |page: u64| page < cut && (low..high).contains(&page);
        world.damage(nid);
        world.change(|fs| {
            fs.truncate(&root(), file, cut * PAGE).unwrap();
            let open = fs.open_file(file, libc::O_RDWR).unwrap();
            fs.append(&open, &[9; 10]).unwrap();
            fs.write(&open, (cut + 600) * PAGE, &[9]).unwrap();
            fs.fsync(&open, false).unwrap();
        });
        // Whoever opens the file system carries on cuts that are under way.
        world.change(|fs| {
            let open = fs.open_file(file, libc::O_RDONLY).unwrap();
            for page in 0..=cut + 600 {
                let there = match page {
                    page if hidden(page) => None,
                    page if page == cut || page == cut + 600 => Some(9),
                    page if page < cut && page.is_multiple_of(2) => Some(7),
                    _ => Some(0),
                };
                assert_eq!(byte_of(fs, &open, page), there, "page {page}");
            }
        });
        let inode = world.inode(file);
        assert_eq!(inode.seldom.pending_truncate, None);
        if low >= cut {
            assert_eq!(inode.blocks, cut.div_ceil(2) + 2);
        }
        let report = world.fsck();
        for finding in &report.findings {
            let known = match finding.object {
                Object::Node(node) if node == nid => true,
                Object::Node(node) if node == file => low < cut,
                _ => finding
                    .what
                    .contains("have lost their owner to the damage above"),
            };
            assert!(known, "unexpected: {finding}");
        }
        world.change(|fs| fs.unlink(&root(), ROOT, b"leaves").unwrap());
        world.repaired();
    }
    base::tight::set(false);
}

/// Such a mapping was a panic for who read across the border of the two leaves.
#[test]
fn a_leaf_that_maps_pages_of_another_one_is_an_error_for_who_reads_there() {
    let world = World::new();
    let file = world.scattered();
    let (leaves, _) = world.tree_of(file);
    let border = leaves[1].key;
    let last = world.change(|fs| {
        let leaf = fs.store().get(leaves[0].nid).unwrap().into_read().unwrap();
        *leaf.extents().unwrap().last().unwrap()
    });
    let longer = FileExtent { len: 7, ..last };
    let over = Delta::Extents {
        start: last.page,
        end: longer.end(),
        with: vec![longer],
    };
    world.edit(vec![(leaves[0].nid, over)]);
    world.change(|fs| {
        let open = fs.open_file(file, libc::O_RDWR).unwrap();
        let mut bytes = vec![0; 20 * PAGE as usize];
        for from in [last.page, border - 1] {
            let error = fs.read(&open, from * PAGE, &mut bytes).unwrap_err();
            assert_eq!(error.errno(), libc::EIO, "{error}");
        }
        assert_eq!(byte_of(fs, &open, last.page - 2), Some(7));
        assert_eq!(byte_of(fs, &open, last.page), None);
        assert_eq!(byte_of(fs, &open, border), Some(7));
        assert_eq!(byte_of(fs, &open, border + 1), Some(0));
    });
    let report = world.fsck();
    let named = |f: &Finding| {
        f.path.as_deref() == Some("/leaves") && f.what.contains("maps pages of another leaf")
    };
    assert!(report.findings.iter().any(named), "{:#?}", report.findings);
    world.exercise();
    world.repaired();
}
