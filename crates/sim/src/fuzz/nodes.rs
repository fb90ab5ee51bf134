//! Node contents: buckets against a map, and any delta on any node.

use base::clock::Timestamp;
use engine::Content;
use format::item::PAYLOAD_MAX;
use format::{Block, Nid};
use fs::content::entry::Value;
use fs::content::{Body, Child, Delta, FileExtent, FsNode, Inode, Name, NameList, Orphan, Xattr};
use std::collections::BTreeMap;

/// Each four bytes are one change of a bucket.
pub fn check_bucket(input: &[u8]) {
    let mut bucket = FsNode::Bucket(NameList::default());
    let mut model: BTreeMap<u64, (u64, usize)> = BTreeMap::new();
    for step in input.chunks_exact(4).take(2000) {
        let key = (step[1] as u64) << 7 | (step[2] & 3) as u64;
        let len = 1 + step[3] as usize % 255;
        let nid = 64 + step[2] as u64;
        let (delta, allowed) = match step[0] % 8 {
            0..=3 => {
                let name = Name {
                    key,
                    nid: Nid(nid),
                    generation: 1,
                    kind: libc::DT_REG,
                    name: vec![b'a' + step[3] % 26; len].as_slice().into(),
                };
                (Delta::InsertName(name), !model.contains_key(&key))
            }
            4 | 5 => (Delta::RemoveName(key), model.contains_key(&key)),
            6 => {
                let delta = Delta::Retarget {
                    key,
                    nid: Nid(nid),
                    generation: 2,
                    kind: libc::DT_DIR,
                };
                (delta, model.contains_key(&key))
            }
            _ => (Delta::DropFrom(key << 3), true),
        };
        // The file system splits a bucket long before it outgrows a node.
        if matches!(delta, Delta::InsertName(_)) && encoded(&bucket).len() > PAYLOAD_MAX / 2 {
            continue;
        }
        assert_eq!(bucket.change(&delta).is_ok(), allowed, "{delta:?}");
        if allowed {
            match &delta {
                Delta::InsertName(name) => {
                    model.insert(key, (name.nid.0, name.name.len()));
                }
                Delta::RemoveName(_) => {
                    model.remove(&key);
                }
                Delta::Retarget { nid, .. } => {
                    model.entry(key).and_modify(|(to, _)| *to = nid.0);
                }
                _ => {
                    model.split_off(&(key << 3));
                }
            }
        }
        let names = bucket.bucket().expect("it is a bucket").iter();
        let found: Vec<_> = names.map(|n| (n.key, (n.nid.0, n.name.len()))).collect();
        assert_eq!(found, model.clone().into_iter().collect::<Vec<_>>());
    }
    same_as_image(&bucket);
}

/// The first byte chooses a node; each of the others that follow begins a delta of that length.
pub fn check_delta(input: &[u8]) {
    let Some((first, mut rest)) = input.split_first() else {
        return;
    };
    let samples = samples();
    let mut node = samples[*first as usize % samples.len()].clone();
    for _ in 0..200 {
        let Some((len, after)) = rest.split_first() else {
            break;
        };
        let (bytes, after) = after.split_at((*len as usize).min(after.len()));
        rest = after;
        let Ok(delta) = FsNode::decode_delta(node.kind(), bytes) else {
            continue;
        };
        let mut again = Vec::new();
        FsNode::encode_delta(&delta, &mut again);
        let decoded = FsNode::decode_delta(node.kind(), &again);
        assert_eq!(decoded.as_ref().ok(), Some(&delta), "as it was encoded");
        let mut twin = node.clone();
        let mut changed = node.clone();
        let outcomes = (changed.change(&delta).is_ok(), twin.change(&delta).is_ok());
        assert_eq!(outcomes.0, outcomes.1);
        assert_eq!(changed, twin, "a delta has one outcome");
        if outcomes.0 && encoded(&changed).len() <= PAYLOAD_MAX {
            same_as_image(&changed);
            node = changed;
        }
    }
}

fn encoded(node: &FsNode) -> Vec<u8> {
    let mut bytes = Vec::new();
    node.encode(&mut bytes);
    bytes
}

fn same_as_image(node: &FsNode) {
    let image = encoded(node);
    let decoded = FsNode::decode(node.kind(), &image);
    assert_eq!(decoded.as_ref().ok(), Some(node), "{decoded:?}");
}

fn samples() -> Vec<FsNode> {
    let name = |key: u64| Name {
        key: key << 7,
        nid: Nid(64 + key),
        generation: 3,
        kind: libc::DT_REG,
        name: vec![b'n'; 1 + key as usize].as_slice().into(),
    };
    let extent = |page: u64| FileExtent {
        page: page * 4,
        block: Block(1000 + page * 8),
        len: 3,
        written: page.is_multiple_of(2),
    };
    let xattr = |key: u64| Xattr {
        key: key << 7,
        name: b"user.name".as_slice().into(),
        value: Value::Here(vec![7; key as usize].into()),
    };
    let child = |key: u64| Child {
        key: key * 100,
        nid: Nid(70 + key),
    };
    let orphan = |nid: u64| Orphan {
        nid: Nid(64 + nid),
        generation: 1,
    };
    let inode = |mode: u32, body: Option<Body>| {
        let now = Timestamp::new(9, 9);
        let mut inode = Inode::new(mode | 0o644, 1, now);
        if let Some(body) = body {
            inode.body = body;
        }
        FsNode::Inode(inode)
    };
    vec![
        inode(libc::S_IFREG, None),
        inode(libc::S_IFREG, Some(Body::Inline(vec![5; 300]))),
        inode(
            libc::S_IFREG,
            Some(Body::Extents((0..9).map(extent).collect())),
        ),
        inode(libc::S_IFDIR, None),
        inode(
            libc::S_IFDIR,
            Some(Body::Entries(Box::new(
                (0..5).map(name).collect::<Vec<_>>().into(),
            ))),
        ),
        inode(
            libc::S_IFDIR,
            Some(Body::Orphans((0..5).map(orphan).collect())),
        ),
        FsNode::Bucket((0..20).map(name).collect::<Vec<_>>().into()),
        FsNode::Extents((0..20).map(extent).collect()),
        FsNode::Xattrs((0..6).map(xattr).collect()),
        FsNode::Index((0..6).map(child).collect()),
        FsNode::Orphans((0..6).map(orphan).collect()),
        FsNode::Value(vec![1; 100]),
    ]
}
