mod tally;

use super::*;
use base::clock::Timestamp;
use base::rng::Rng;
use format::{Block, Nid};

fn name(key: u64, text: &str) -> Name {
    Name {
        key,
        nid: Nid(key + 100),
        generation: 3,
        kind: libc::DT_REG,
        name: text.as_bytes().into(),
    }
}

fn extent(page: u64, block: u64, len: u32) -> FileExtent {
    FileExtent {
        page,
        block: Block(block),
        len,
        written: true,
    }
}

fn now() -> Timestamp {
    Timestamp::new(-5, 7)
}

fn deltas() -> Vec<Delta> {
    let xattr = |value| Xattr {
        key: 8,
        name: b"user.x".as_slice().into(),
        value,
    };
    let child = Child {
        key: 0,
        nid: Nid(70),
    };
    let root = Root {
        depth: 1,
        children: vec![child],
    };
    vec![
        Delta::Attrs(AttrChange::default()),
        Delta::Attrs(AttrChange {
            mode: Some(0o100644),
            uid: Some(1),
            gid: Some(2),
            nlink: Some(3),
            flags: Some(4),
            size: Some(5),
            blocks: Some(6),
            atime: Some(now()),
            mtime: Some(now()),
            ctime: Some(now()),
            parent: Some(Nid(9)),
            pending_truncate: Some(None),
        }),
        Delta::Body(Body::Extents(vec![extent(1, 2, 3)])),
        Delta::Body(Body::Tree(root.clone())),
        Delta::InlineWrite {
            offset: 3,
            data: b"abc".to_vec(),
        },
        Delta::InlineLen(2),
        Delta::Tail {
            page: 9,
            len: 4096,
            offset: 4000,
            data: vec![7; 96],
        },
        Delta::EndTail,
        Delta::InsertName(name(5, "a")),
        Delta::RemoveName(5),
        Delta::Retarget {
            key: 5,
            nid: Nid(6),
            generation: 7,
            kind: 8,
        },
        Delta::Extents {
            start: 0,
            end: 10,
            with: vec![extent(1, 2, 3)],
        },
        Delta::InsertOrphan(Orphan {
            nid: Nid(70),
            generation: 1,
        }),
        Delta::RemoveOrphan(Nid(70)),
        Delta::SetXattr(xattr(Value::Here(b"value".as_slice().into()))),
        Delta::SetXattr(xattr(Value::Nodes {
            len: 20_000,
            nids: [Nid(80), Nid(81)].into(),
        })),
        Delta::RemoveXattr(8),
        Delta::DropFrom(9),
        Delta::InsertChild {
            tree: TreeId::Xattrs,
            child,
        },
        Delta::RemoveChild {
            tree: TreeId::Body,
            key: 0,
        },
        Delta::SetRoot {
            tree: TreeId::Xattrs,
            root,
        },
        Delta::InlineXattrs(vec![xattr(Value::Here(Box::default()))]),
        Delta::Lower(3),
        Delta::Tally(Tally {
            names: -2,
            subdirs: 1,
            time: now(),
        }),
    ]
}

fn nodes() -> Vec<FsNode> {
    let mut dir = Inode::new(libc::S_IFDIR | 0o755, 1, now());
    dir.body = Body::Entries(Box::new(vec![name(1, "one"), name(2, "two")].into()));
    let mut file = Inode::new(libc::S_IFREG | 0o644, 1, now());
    file.body = Body::Extents(vec![extent(0, 50, 2), extent(7, 60, 1)]);
    file.seldom.pending_truncate = Some(99);
    let mut large = file.clone();
    large.seldom.xattr_root = Some(Root {
        depth: 0,
        children: vec![Child {
            key: 0,
            nid: Nid(88),
        }],
    });
    let small = Inode::new(libc::S_IFREG | 0o644, 1, now());
    let mut log = file.clone();
    log.tail = Some(Box::new(Tail {
        page: 3,
        bytes: b"logged".repeat(50),
    }));
    // Nothing is as usual.
    let at = |sec| Timestamp::new(sec, 1);
    let mut odd = Inode::new(libc::S_IFCHR | 0o7777, 1 << 40, at(1 << 40));
    (odd.uid, odd.gid, odd.nlink) = (1000, u32::MAX, 0);
    (odd.seldom.rdev, odd.seldom.flags, odd.size) = (7, 9, inode::SIZE_MAX);
    (odd.blocks, odd.parent) = (inode::BLOCKS_MAX, Nid(u64::MAX));
    (odd.atime, odd.mtime, odd.ctime) = (at(1), at(-1), at(i64::MAX));
    odd.seldom.pending_truncate = Some(u64::MAX);
    odd.seldom.xattrs = vec![Xattr {
        key: 8,
        name: b"user.x".as_slice().into(),
        value: Value::Here(b"value".as_slice().into()),
    }];
    let far = Name {
        key: format::dir::KEY_LIMIT - 1,
        nid: Nid(u64::MAX),
        generation: u64::MAX,
        kind: format::dir::ENTRY_TYPE,
        name: vec![b'n'; 255].as_slice().into(),
    };
    let near = Name {
        key: 1 << format::dir::COLLISION_BITS,
        generation: 1,
        ..name(0, "n")
    };
    vec![
        FsNode::Inode(odd),
        FsNode::Bucket(vec![near, far].into()),
        FsNode::Inode(dir),
        FsNode::Inode(file),
        FsNode::Inode(large),
        FsNode::Inode(small),
        FsNode::Inode(log),
        FsNode::Index(vec![Child {
            key: 3,
            nid: Nid(4),
        }]),
        FsNode::Bucket(vec![name(1, "one")].into()),
        FsNode::Extents(vec![extent(0, 50, 2)]),
        FsNode::Xattrs(vec![]),
        FsNode::Value(b"bytes".to_vec()),
        FsNode::Orphans(vec![Orphan {
            nid: Nid(4),
            generation: 2,
        }]),
    ]
}

#[test]
fn deltas_survive_a_round_trip() {
    for delta in deltas() {
        let mut bytes = Vec::new();
        delta.encode(&mut bytes);
        assert_eq!(Delta::decode(&bytes).unwrap(), delta);
    }
}

#[test]
fn nodes_survive_a_round_trip() {
    for node in nodes() {
        let mut bytes = Vec::new();
        node.encode(&mut bytes);
        assert_eq!(FsNode::decode(node.kind(), &bytes).unwrap(), node);
    }
}

/// A journal could make what no image can hold: the change was taken, the next checkpoint wrote
/// the node, and from then on it could not be read. Found by libFuzzer.
#[test]
fn deltas_make_nothing_that_an_image_cannot_hold() {
    let child = Child {
        key: 0,
        nid: Nid(70),
    };
    for tree in [TreeId::Body, TreeId::Xattrs] {
        let deep = |depth| {
            let children = vec![child];
            let root = Root { depth, children };
            let mut bytes = Vec::new();
            Delta::SetRoot { tree, root }.encode(&mut bytes);
            Delta::decode(&bytes)
        };
        assert!(deep(inode::DEPTH_MAX).is_ok());
        assert!(deep(inode::DEPTH_MAX + 1).is_err(), "{tree:?}");
    }
    let xattr = |key| Xattr {
        key,
        name: b"user.x".as_slice().into(),
        value: Value::Here(vec![1; 200].into()),
    };
    let mut file = FsNode::Inode(Inode::new(libc::S_IFREG | 0o644, 1, now()));
    assert!(file.clone().change(&Delta::SetXattr(xattr(1))).is_ok());
    let many = Delta::InlineXattrs((1..4).map(xattr).collect());
    assert!(file.clone().change(&many).is_err());
    let each = (1..4).map(|key| file.change(&Delta::SetXattr(xattr(key))).is_ok());
    assert_eq!(each.collect::<Vec<_>>(), [true, true, false]);
}

/// A tail is within a page of a file that has extents, or there is none.
#[test]
fn a_tail_is_a_page_beside_extents() {
    let tail = |page, len, offset, data: &[u8]| Delta::Tail {
        page,
        len,
        offset,
        data: data.to_vec(),
    };
    let mut file = Inode::new(libc::S_IFREG | 0o644, 1, now());
    file.body = Body::Extents(Vec::new());
    let mut node = FsNode::Inode(file);
    assert!(node.clone().change(&Delta::EndTail).is_err());
    node.change(&tail(5, 3, 0, b"abc")).unwrap();
    node.change(&tail(5, 8, 6, b"gh")).unwrap();
    let bytes = |node: &FsNode| node.inode().unwrap().tail.as_ref().map(|t| t.bytes.clone());
    assert_eq!(bytes(&node).unwrap(), b"abc\0\0\0gh");
    node.change(&tail(5, 2, 0, b"")).unwrap();
    assert_eq!(bytes(&node).unwrap(), b"ab");
    assert!(node.clone().change(&tail(6, 2, 0, b"")).is_err());
    assert!(node.clone().change(&tail(5, 2, 1, b"xx")).is_err());
    assert!(node.clone().change(&tail(5, 4097, 0, b"")).is_err());
    assert!(node.clone().change(&tail(1 << 60, 1, 0, b"")).is_err());
    let root = Root {
        depth: 0,
        children: vec![Child {
            key: 0,
            nid: Nid(70),
        }],
    };
    node.change(&Delta::Body(Body::Tree(root))).unwrap();
    assert_eq!(bytes(&node).unwrap(), b"ab");
    let mut image = Vec::new();
    node.encode(&mut image);
    node.change(&Delta::Body(Body::Inline(vec![1]))).unwrap();
    assert_eq!(bytes(&node), None);
    assert!(node.change(&tail(0, 1, 0, b"x")).is_err());
    // The same image with an inline body is refused.
    image[2] = format::inode::BODY_INLINE;
    assert!(FsNode::decode(KIND_INODE, &image).is_err());
}

#[test]
fn an_empty_file_takes_little_space() {
    let inode = Inode::new(libc::S_IFREG | 0o644, 1, Timestamp::new(1_763_000_000, 9));
    let mut bytes = Vec::new();
    FsNode::Inode(inode).encode(&mut bytes);
    assert_eq!(bytes.len(), 15);
    assert_eq!(format::item::padded_len(bytes.len()), 40);
}

/// Who says how an inode or a name is stored has said it here as well.
#[test]
fn images_are_as_long_as_they_are_said_to_be() {
    let mut head = 0;
    for node in nodes() {
        let mut bytes = Vec::new();
        node.encode(&mut bytes);
        match &node {
            FsNode::Inode(inode)
                if inode.seldom.xattrs.is_empty()
                    && inode.seldom.xattr_root.is_none()
                    && inode.tail.is_none() =>
            {
                let mut body = Vec::new();
                inode.body.encode(&mut body);
                head = head.max(bytes.len() - body.len());
            }
            // What a checkpoint will write of it is charged, its tail included.
            FsNode::Inode(inode) if inode.tail.is_some() => {
                assert!(inode.image_len() >= bytes.len());
            }
            FsNode::Bucket(names) => {
                assert_eq!(bytes.len(), names.encoded_len());
                let sum = |most: usize| names.iter().map(|n| n.name.len() + most).sum::<usize>();
                let bounds = sum(format::dir::ENTRY_MIN)..=sum(format::dir::ENTRY_MAX);
                assert!(bounds.contains(&bytes.len()));
            }
            _ => {}
        }
    }
    assert!((1..=format::inode::INODE_HEAD_MAX).contains(&head));
}

/// What says nothing, or says it at greater length, is refused: equal nodes have equal images.
#[test]
fn an_image_has_one_form() {
    let mut rng = Rng::new(12);
    for node in nodes() {
        let mut image = Vec::new();
        node.encode(&mut image);
        for _ in 0..4000 {
            let mut bytes = image.clone();
            if let Some(len) = (bytes.len() as u64).checked_sub(1) {
                bytes[rng.below(len + 1) as usize] = rng.next_u64() as u8;
            }
            if let Ok(other) = FsNode::decode(node.kind(), &bytes) {
                let mut again = Vec::new();
                other.encode(&mut again);
                assert_eq!(again, bytes, "{other:?}");
            }
        }
    }
}

#[test]
fn garbage_is_damage_or_harmless_never_a_panic() {
    let mut rng = Rng::new(11);
    let mut images: Vec<(u8, Vec<u8>)> = Vec::new();
    for node in nodes() {
        let mut bytes = Vec::new();
        node.encode(&mut bytes);
        images.push((node.kind(), bytes));
    }
    for _ in 0..20_000 {
        let (kind, mut bytes) = rng.pick(&images).clone();
        for _ in 0..rng.range(1, 4) {
            if !bytes.is_empty() {
                let at = rng.below(bytes.len() as u64) as usize;
                bytes[at] = rng.next_u64() as u8;
            }
        }
        bytes.truncate(rng.below(bytes.len() as u64 + 1) as usize + rng.below(2) as usize);
        let node = FsNode::decode(kind, &bytes);
        let mut delta = Vec::new();
        rng.pick(&deltas()).encode(&mut delta);
        let at = rng.below(delta.len() as u64) as usize;
        delta[at] = rng.next_u64() as u8;
        if let (Ok(mut node), Ok(delta)) = (node, Delta::decode(&delta)) {
            let mut twin = node.clone();
            assert_eq!(node.change(&delta), twin.change(&delta));
            assert_eq!(node, twin);
        }
    }
}

/// Replacing extents agrees with a page-by-page model.
#[test]
fn replaced_extents_map_each_page_as_a_plain_array_would() {
    let mut rng = Rng::new(5);
    for _ in 0..200 {
        let mut list = Vec::new();
        let mut model: Vec<Option<u64>> = vec![None; 64];
        for step in 0..40u64 {
            let start = rng.below(60);
            let end = rng.range(start, 64) + 1;
            let mut with = Vec::new();
            let mut page = start + rng.below(3);
            while page < end && rng.below(4) > 0 {
                let len = (rng.below(6) + 1).min(end - page);
                let block = if rng.one_in(2) {
                    1000 + page
                } else {
                    step * 1000 + page * 3
                };
                with.push(extent(page, block, len as u32));
                page += len + rng.below(3);
            }
            entry::replace_extents(&mut list, start, end, &with).unwrap();
            model[start as usize..end as usize].fill(None);
            for e in &with {
                for i in 0..e.len as u64 {
                    model[(e.page + i) as usize] = Some(e.block.0 + i);
                }
            }
            let mut seen: Vec<Option<u64>> = vec![None; 64];
            for e in &list {
                for i in 0..e.len as u64 {
                    assert_eq!(seen[(e.page + i) as usize].replace(e.block.0 + i), None);
                }
            }
            assert_eq!(seen, model, "{list:?}");
            assert!(list.windows(2).all(|w| w[0].end() <= w[1].page));
        }
    }
}

#[test]
fn the_successor_of_a_removed_first_child_covers_its_range() {
    let mut list: Vec<Child> = [0, 10, 20].map(|key| Child { key, nid: Nid(key) }).into();
    entry::remove_child(&mut list, 0).unwrap();
    assert_eq!(
        list[0],
        Child {
            key: 0,
            nid: Nid(10)
        }
    );
    assert_eq!(entry::child_for(&list, 15), Some(0));
    assert_eq!(entry::child_for(&list, 20), Some(1));
}

#[test]
fn what_is_merged_shows_at_once_and_is_in_the_image_once_settled() {
    use engine::Content;
    let mut dir = Inode::new(libc::S_IFDIR | 0o755, 1, now());
    (dir.size, dir.nlink) = (10, 4);
    let mut node = FsNode::Inode(dir);
    let image = |node: &FsNode| {
        let mut out = Vec::new();
        FsNode::encode(node, &mut out);
        out
    };
    let before = image(&node);
    let at = |sec| Timestamp::new(sec, 0);
    let tally = |names, subdirs, sec| {
        Delta::Tally(Tally {
            names,
            subdirs,
            time: at(sec),
        })
    };
    // The later one comes first: merges have no order.
    let merged = |first, taken| Ok(engine::Merged { first, taken });
    assert_eq!(node.merge(&tally(3, 1, 200)), merged(true, true));
    assert_eq!(node.merge(&tally(-1, -2, 100)), merged(false, true));
    assert!(Content::pending(&node));
    assert_eq!(image(&node), before);
    let inode = node.inode().unwrap();
    assert_eq!((inode.names(), inode.dir_links()), (12, 3));
    assert_eq!(
        (inode.counts().mtime, inode.counts().ctime),
        (at(200), at(200))
    );
    node.settle();
    assert!(!Content::pending(&node));
    let inode = node.inode().unwrap();
    assert_eq!((inode.size, inode.nlink), (12, 3));
    assert_eq!((inode.mtime, inode.ctime), (at(200), at(200)));
    let mut replayed = FsNode::decode(KIND_INODE, &before).unwrap();
    for delta in [tally(-1, -2, 100), tally(3, 1, 200)] {
        replayed.change(&delta).unwrap();
    }
    assert_eq!(image(&replayed), image(&node));
}

#[test]
fn only_directories_take_merged_counts() {
    use engine::Content;
    let file = FsNode::Inode(Inode::new(libc::S_IFREG | 0o644, 1, now()));
    let tally = Delta::Tally(Tally {
        names: 1,
        subdirs: 0,
        time: now(),
    });
    assert!(file.merge(&tally).is_err());
    assert!(!file.merges());
    let dir = FsNode::Inode(Inode::new(libc::S_IFDIR | 0o755, 1, now()));
    assert!(dir.merge(&Delta::Lower(1)).is_err());
    assert!(!dir.merges(), "its names are in the inode itself");
}
