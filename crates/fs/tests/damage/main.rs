//! Damaged images: whatever rots on the devices, the file system says so or makes up for it.
//! Never a panic, never another name or another byte than what was written.
//!
//! File data carries no checksum, so its blocks are left alone here.
//!
//! `SHEAF_FULL=1` makes 10,000 random corruptions, and so does a release build.

mod images;
mod interrupted;
mod older;
mod repair;
mod unfinished;

use base::rng::Rng;
use device::sim::SimDevice;
use engine::Object;
use format::inode::{FIRST_ORPHANS, ORPHAN_DIRECTORIES};
use format::item::{ItemHeader, ItemKind};
use format::label::TAIL_BLOCKS;
use format::{BLOCK_SIZE, Nid};
use fs::content::TreeId;
use fs::{Caller, FileSystem, ROOT};
use images::*;
use std::sync::Arc;

fn random_damage(image: &Image, seed: u64, count: u64) {
    let mut rng = Rng::new(seed);
    let mut reported = 0;
    for i in 0..count {
        let devices = image.devices();
        let (index, block) = *rng.pick(&image.targets);
        let what = corrupt(&devices[index], block, image, &mut rng);
        let context = format!("seed {seed}, {i}: {what} of device {index}");
        reported += image.check(&devices, rng.one_in(4), &context) as u64;
    }
    // Most of what is not zero is in use, or this test damages nothing.
    assert!(reported * 10 > count, "{reported} of {count} were noticed");
}

#[test]
fn an_undamaged_image_is_sound() {
    for image in [clean_image(), dirty_image()] {
        let devices = image.devices();
        assert!(image.targets.len() > 100);
        assert!(!image.check(&devices, true, "undamaged"));
        let report = fsck(&devices);
        assert!(report.is_sound() && !report.refuses_writes);
    }
}

#[test]
fn random_damage_of_a_clean_image_is_reported_and_contained() {
    random_damage(&clean_image(), seed(1), if full() { 5000 } else { 150 });
}

#[test]
fn random_damage_of_a_dirty_image_is_reported_and_contained() {
    random_damage(&dirty_image(), seed(2), if full() { 5000 } else { 150 });
}

#[test]
fn a_node_that_replay_needs_is_lost_alone() {
    let image = dirty_image();
    let devices = image.devices();
    let ino = {
        let fs = open(&devices, true).unwrap();
        fs.resolve(b"/fs").unwrap().ino
    };
    for (index, byte, header) in items(&image) {
        if header.kind == ItemKind::Node as u8 && header.id.get() == ino.0 {
            devices[index].poke(byte + ItemHeader::SIZE as u64 + 1, &[0xA5]);
        }
    }
    assert!(image.check(&devices, true, "a directory that the journal changes"));
    let report = fsck(&devices);
    let found = report
        .findings
        .iter()
        .find(|f| f.object == Object::Node(ino));
    let found = found.expect("the directory is reported");
    assert_eq!(found.path.as_deref(), Some("/fs"));
    assert!(found.what.contains("journal"), "{found}");
    // To write would be to forget what the journal holds of it.
    assert!(report.refuses_writes);
    assert!(open(&devices, false).is_err());
}

#[test]
fn a_damaged_list_of_unlinked_inodes_keeps_nobody_out() {
    let image = clean_image();
    let devices = image.devices();
    let lists = FIRST_ORPHANS..FIRST_ORPHANS + ORPHAN_DIRECTORIES;
    let mut damaged = 0;
    for (index, byte, nid, _) in nodes(&image) {
        if lists.contains(&nid.0) {
            devices[index].poke(byte + ItemHeader::SIZE as u64 + 1, &[0xA5]);
            damaged += 1;
        }
    }
    assert!(damaged > 0);
    let fs = open(&devices, false).unwrap();
    let found = fs.resolve(b"/many/file number 7").unwrap();
    assert_eq!(found.size, 21);
    let who = Caller::root();
    let made = fs.create(&who, ROOT, b"new", 0o600, libc::O_RDWR);
    let (_, file) = made.unwrap();
    fs.write(&file, 0, b"new").unwrap();
    fs.fsync(&file, false).unwrap();
    drop(file);
    fs.close().unwrap();
    assert!(!fsck(&devices).is_sound());
}

/// All that came behind it in its list was kept, and the blocks of that.
#[test]
fn a_damaged_leaf_of_a_list_of_unlinked_inodes_keeps_only_what_is_in_it() {
    const HELD: usize = 600;
    const PAGES: usize = 4;
    let devices = make(&[DEVICE_BYTES; DEVICES]);
    let fs = open(&devices, false).unwrap();
    let space = |fs: &FileSystem| {
        fs.sync().unwrap();
        fs.store().checkpoint().unwrap();
        fs.store().checkpoint().unwrap();
        let space = fs.store().space();
        (space.nodes, space.free_blocks)
    };
    let before = space(&fs);
    let (mut held, mut others) = (Vec::new(), Vec::new());
    while held.len() < HELD {
        let made = fs.tmpfile(&Caller::root(), ROOT, 0o600, libc::O_RDWR);
        let (attr, file) = made.unwrap();
        if attr.ino.0 % ORPHAN_DIRECTORIES > 0 {
            others.push(file);
            continue;
        }
        fs.write(&file, 0, &[1; PAGES * BLOCK_SIZE]).unwrap();
        held.push(file);
    }
    drop(others);
    let node = |nid| fs.store().get(nid).unwrap().into_read().unwrap();
    let leaves: Vec<Nid> = {
        let list = node(Nid(FIRST_ORPHANS));
        let root = list.inode().unwrap().root(TreeId::Body).unwrap();
        assert_eq!(root.depth, 0);
        root.children.iter().map(|child| child.nid).collect()
    };
    assert!(leaves.len() > 2, "{leaves:?}");
    let kept = node(leaves[0]).orphans().unwrap().len() as u64;
    space(&fs);
    let cut: Vec<_> = devices.iter().map(|d| d.clone_state(1)).collect();
    drop((held, fs));
    let image = image(&cut, Model::default(), None);
    let devices = image.devices();
    for (index, byte, nid, _) in nodes(&image) {
        if nid == leaves[0] {
            devices[index].poke(byte + ItemHeader::SIZE as u64 + 1, &[0xA5]);
        }
    }
    let fs = open(&devices, false).unwrap();
    let after = space(&fs);
    // The leaf, and the space maps of their data.
    let besides = (after.0 - before.0).checked_sub(kept);
    assert!(
        besides.is_some_and(|n| (1..4).contains(&n)),
        "{besides:?} nodes besides"
    );
    let taken = before.1 - after.1;
    let data = kept * PAGES as u64;
    assert!(
        (data..data + 64).contains(&taken),
        "{taken} blocks, not {data}"
    );
    fs.close().unwrap();
}

/// Sets every byte of a block to another value in turn.
fn each_byte(device: &SimDevice, block: u64, mut each: impl FnMut(usize)) {
    let mut original = vec![0; BLOCK_SIZE];
    device.peek(block * BLOCK, &mut original);
    for at in 0..BLOCK_SIZE {
        let mut bytes = original.clone();
        bytes[at] ^= 1 << (at % 8);
        device.poke(block * BLOCK, &bytes);
        each(at);
    }
    device.poke(block * BLOCK, &original);
}

#[test]
fn every_byte_of_a_label_may_rot() {
    let image = clean_image();
    let devices = image.devices();
    let sound = assemble(&devices, true).unwrap();
    for device in 0..DEVICES {
        let last = DEVICE_BYTES / BLOCK - 1;
        for (copy, block) in [(0, 0), (1, last)] {
            each_byte(&devices[device], block, |at| {
                let context = format!("byte {at} of copy {copy} on device {device}");
                let array = assemble(&devices, true).unwrap_or_else(|e| panic!("{context}: {e}"));
                assert_eq!(array.geometry(), sound.geometry(), "{context}");
                assert_eq!(array.label().uuid, sound.label().uuid, "{context}");
                let [repair] = array.label_repairs() else {
                    panic!("{context}: {:?}", array.label_repairs());
                };
                assert_eq!((repair.device, repair.copy), (device, copy), "{context}");
                if at % 1000 == 7 {
                    let report = fsck(&devices);
                    let object = Object::Label { device, copy };
                    assert_eq!(report.findings.len(), 1, "{context}");
                    assert_eq!(report.findings[0].object, object, "{context}");
                    assert!(report.is_sound());
                }
            });
        }
    }
}

#[test]
fn both_copies_of_a_label_lost_is_a_clean_error() {
    let image = clean_image();
    let devices = image.devices();
    for block in [0, DEVICE_BYTES / BLOCK - 1] {
        devices[1].poke(block * BLOCK + 100, &[0xEE; 4]);
    }
    let error = assemble(&devices, true).unwrap_err();
    assert!(matches!(error, device::Error::LabelLost(_)), "{error}");
}

#[test]
fn every_byte_of_a_checkpoint_slot_may_rot() {
    let image = dirty_image();
    let devices = image.devices();
    let tail = DEVICE_BYTES / BLOCK - TAIL_BLOCKS + 13;
    for slot in 0..2usize {
        for (copy, device, block) in [(0, 0, 1 + slot as u64), (1, 1, tail + slot as u64)] {
            each_byte(&devices[device], block, |at| {
                let context = format!("byte {at} of slot {slot}, copy {copy}");
                if at % 16 == 3 || full() {
                    let fs = open(&devices, true).unwrap_or_else(|e| panic!("{context}: {e}"));
                    let damaged = &fs.recovery().damaged_copies;
                    assert_eq!(damaged.len(), 1, "{context}: {damaged:?}");
                    assert_eq!((damaged[0].0, damaged[0].1), (slot, copy), "{context}");
                    assert_eq!(fs.recovery().batches as usize, JOURNALED + 1, "{context}");
                }
                if at % 500 == 7 {
                    let report = fsck(&devices);
                    let object = Object::Slot { slot, copy };
                    assert_eq!(report.findings.len(), 1, "{context}");
                    assert_eq!(report.findings[0].object, object, "{context}");
                    assert!(!image.check(&devices, false, &context));
                }
            });
        }
    }
}

/// Node images with right checksums and wrong contents, as a broken program would write them:
/// nobody can tell what is right then, but nothing may panic or hang.
#[test]
fn forged_nodes_cause_no_panic() {
    let image = clean_image();
    let count = if full() { 3000 } else { 100 };
    let mut rng = Rng::new(seed(3));
    let nodes = nodes(&image);
    assert!(nodes.len() > 100);
    for _ in 0..count {
        let devices = image.devices();
        for _ in 0..1 + rng.below(3) {
            forge(&devices, &nodes, &mut rng);
        }
        forged(&image.model, &devices);
    }
}

fn forged(model: &Model, devices: &[Arc<SimDevice>]) {
    fsck(devices);
    let Ok(fs) = open(devices, false) else { return };
    let who = Caller::root();
    let mut buf = vec![0; 20_000];
    for path in model.things.keys().rev() {
        let at = path.iter().rposition(|b| *b == b'/').unwrap();
        let (parent, name) = (&path[..at], &path[at + 1..]);
        let Ok(dir) = fs.resolve(parent) else {
            continue;
        };
        let Ok(attr) = fs.lookup(dir.ino, name) else {
            continue;
        };
        let mut left = 2000;
        let listed = fs.readdir(attr.ino, 0, &mut |_| {
            left -= 1;
            left > 0
        });
        drop(listed);
        let mut left = 2000;
        let listed = fs.readdir_around(attr.ino, &mut |_| {
            left -= 1;
            left > 0
        });
        drop(listed);
        drop(fs.listxattr(attr.ino));
        drop(fs.getxattr(attr.ino, b"user.mark"));
        drop(fs.setxattr(&who, attr.ino, b"user.mark", &buf[..3000], 0));
        drop(fs.readlink(attr.ino));
        if let Ok(file) = fs.open_file(attr.ino, libc::O_RDWR) {
            drop(fs.read(&file, 0, &mut buf));
            drop(fs.read(&file, attr.size.saturating_sub(100), &mut buf));
            drop(fs.seek(&file, 0, libc::SEEK_HOLE));
            drop(fs.write(&file, 5000, &buf));
            drop(fs.truncate(&who, attr.ino, 4000));
        }
        drop(fs.rename(&who, dir.ino, name, ROOT, b"moved", 0));
        drop(fs.unlink(&who, ROOT, b"moved"));
        drop(fs.rmdir(&who, ROOT, b"moved"));
    }
    drop(fs.sync());
    drop(fs.store().checkpoint());
    drop(fs.close());
    drop(fs);
    fsck(devices);
}
