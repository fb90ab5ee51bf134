//! Damaged images: whatever rots on the devices, the file system says so or makes up for it.
//! Never a panic, never another name or another byte than what was written.
//!
//! File data carries no checksum, so its blocks are left alone here.
//!
//! `SHEAF_FULL=1` makes 10,000 random corruptions, and so does a release build.

use base::clock::Clock;
use base::rng::Rng;
use device::sim::{SimDevice, Snapshot};
use device::{Array, BlockDevice};
use engine::Object;
use format::geometry::{Geometry, GeometryOptions};
use format::item::{self, ItemHeader, ItemKind};
use format::label::{HEAD_BLOCKS, TAIL_BLOCKS};
use format::{BLOCK_SIZE, Nid};
use fs::content::{Body, FileExtent, FsNode};
use fs::fsck::{FsckOptions, Report};
use fs::{Caller, FileSystem, FsOptions, MkfsOptions, ROOT};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const BLOCK: u64 = BLOCK_SIZE as u64;
const DEVICE_BYTES: u64 = 40 << 20;
const DEVICES: usize = 2;
/// Files created and synced one by one before the power goes.
const JOURNALED: usize = 30;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Thing {
    Dir,
    File(Vec<u8>),
    Link(Vec<u8>),
}

/// What was written, by path; and the attributes.
#[derive(Clone, Debug, Default)]
struct Model {
    things: BTreeMap<Vec<u8>, Thing>,
    attributes: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// The contents of all devices at one moment.
struct Image {
    devices: Vec<Snapshot>,
    model: Model,
    /// The last batch of the journal cannot be told from one that the power cut tore: what it
    /// made may be missing without a word.
    last: Option<Vec<u8>>,
    /// Blocks with something in them, by device, that are not file data, labels or slots.
    targets: Vec<(usize, u64)>,
}

fn full() -> bool {
    !cfg!(debug_assertions) || std::env::var("SHEAF_FULL").is_ok_and(|v| v == "1")
}

/// `SHEAF_SEED` chooses other damage.
fn seed(default: u64) -> u64 {
    let given = std::env::var("SHEAF_SEED").ok();
    given.and_then(|s| s.parse().ok()).unwrap_or(default)
}

fn clock() -> Clock {
    Clock::manual(1_700_000_000_000_000_000)
}

fn handles(devices: &[Arc<SimDevice>]) -> Vec<Arc<dyn BlockDevice>> {
    let handle = |d: &Arc<SimDevice>| Arc::clone(d) as Arc<dyn BlockDevice>;
    devices.iter().map(handle).collect()
}

fn assemble(devices: &[Arc<SimDevice>], read_only: bool) -> Result<Arc<Array>, device::Error> {
    Array::assemble(handles(devices), read_only).map(Arc::new)
}

fn options(read_only: bool) -> FsOptions {
    let mut options = FsOptions::default().without_threads(clock());
    options.store.workers = 1;
    options.store.shards = 1;
    options.store.node_cache_bytes = 1 << 20;
    options.data.cache_bytes = 1 << 20;
    match read_only {
        true => options.read_only(),
        false => options,
    }
}

fn open(devices: &[Arc<SimDevice>], read_only: bool) -> Result<Arc<FileSystem>, fs::Error> {
    let array = assemble(devices, read_only).map_err(engine::Error::from)?;
    FileSystem::open(array, options(read_only))
}

fn fsck(devices: &[Arc<SimDevice>]) -> Report {
    let options = FsckOptions {
        cache_bytes: 1 << 20,
        workers: 1,
        hash_mask: None,
    };
    fs::fsck::fsck(assemble(devices, true).unwrap(), &options, &|_| {}).unwrap()
}

impl Model {
    fn add(&mut self, fs: &FileSystem, path: &str, thing: Thing) -> Nid {
        let who = Caller::root();
        let (parent, name) = path.rsplit_once('/').unwrap();
        let dir = fs.resolve(parent.as_bytes()).unwrap().ino;
        let name = name.as_bytes();
        let ino = match &thing {
            Thing::Dir => fs.mkdir(&who, dir, name, 0o755).unwrap().ino,
            Thing::Link(target) => fs.symlink(&who, dir, name, target).unwrap().ino,
            Thing::File(bytes) => {
                let (attr, file) = fs.create(&who, dir, name, 0o644, libc::O_RDWR).unwrap();
                let mut at = 0;
                while at < bytes.len() {
                    at += fs.write(&file, at as u64, &bytes[at..]).unwrap();
                }
                drop(file);
                fs.forget(attr.ino, 1);
                attr.ino
            }
        };
        self.things.insert(path.into(), thing);
        ino
    }

    /// Source files as they lie in this project.
    fn copy(&mut self, fs: &FileSystem, from: &std::path::Path, to: &str) {
        self.add(fs, to, Thing::Dir);
        let mut entries: Vec<_> = std::fs::read_dir(from).unwrap().flatten().collect();
        entries.sort_by_key(|e| e.file_name());
        for entry in entries {
            let path = format!("{to}/{}", entry.file_name().to_string_lossy());
            if entry.path().is_dir() {
                self.copy(fs, &entry.path(), &path);
            } else {
                let bytes = std::fs::read(entry.path()).unwrap();
                self.add(fs, &path, Thing::File(bytes));
            }
        }
    }

    fn names_in(&self, dir: &[u8]) -> BTreeSet<Vec<u8>> {
        let prefix = match dir {
            b"/" => b"/".to_vec(),
            _ => [dir, b"/"].concat(),
        };
        let below = self
            .things
            .keys()
            .filter_map(|p| p.strip_prefix(&prefix[..]));
        below
            .filter(|rest| !rest.is_empty() && !rest.contains(&b'/'))
            .map(<[u8]>::to_vec)
            .collect()
    }

    /// Compares everything that can be read with what was written. Returns what cannot be
    /// read; anything that is not as written is a failure.
    fn compare(&self, fs: &FileSystem, last: Option<&Vec<u8>>, context: &str) -> Vec<String> {
        let mut lost = Vec::new();
        let mut note = |what: String, error: fs::Error| {
            assert_eq!(error.errno(), libc::EIO, "{context}: {what}: {error}");
            lost.push(format!("{what}: {error}"));
        };
        let dirs = self.things.iter().filter(|(_, t)| **t == Thing::Dir);
        for dir in dirs.map(|(p, _)| p.as_slice()).chain([&b"/"[..]]) {
            let mut names = BTreeSet::new();
            let listed = fs.resolve(dir).and_then(|attr| {
                fs.readdir(attr.ino, 0, &mut |entry| {
                    if entry.name != b"." && entry.name != b".." {
                        assert!(names.insert(entry.name.to_vec()), "{context}");
                    }
                    assert!(names.len() < 5000, "{context}: endless listing");
                    true
                })
            });
            match listed {
                Err(error) => note(format!("{dir:?}"), error),
                Ok(()) => {
                    let mut expected = self.names_in(dir);
                    if names != expected
                        && let Some(last) = last
                        && let Some(name) = last.strip_prefix(&[dir, b"/"].concat()[..])
                    {
                        expected.remove(name);
                    }
                    assert_eq!(names, expected, "{context}: names in {dir:?}");
                }
            }
        }
        for (path, thing) in &self.things {
            match self.look(fs, path, thing, context) {
                Err(fs::Error::NotFound) if last == Some(path) => {}
                Err(error) => note(String::from_utf8_lossy(path).into_owned(), error),
                Ok(()) => {}
            }
        }
        for (path, value) in &self.attributes {
            let found = fs
                .resolve(path)
                .and_then(|attr| fs.getxattr(attr.ino, b"user.mark"));
            match found {
                Ok(found) => assert_eq!(&found, value, "{context}: attribute of {path:?}"),
                Err(error) => note(format!("attribute of {path:?}"), error),
            }
        }
        lost
    }

    fn look(
        &self,
        fs: &FileSystem,
        path: &[u8],
        thing: &Thing,
        context: &str,
    ) -> Result<(), fs::Error> {
        let (parent, name) = path.split_at(path.iter().rposition(|b| *b == b'/').unwrap());
        let dir = fs.resolve(parent)?.ino;
        let attr = fs.lookup(dir, &name[1..])?;
        let found = match attr.mode & libc::S_IFMT {
            libc::S_IFDIR => Thing::Dir,
            libc::S_IFLNK => Thing::Link(fs.readlink(attr.ino)?),
            _ => {
                let file = fs.open_file(attr.ino, libc::O_RDONLY)?;
                let mut bytes = vec![0; attr.size as usize + 1];
                let mut at = 0;
                loop {
                    match fs.read(&file, at as u64, &mut bytes[at..])? {
                        0 => break,
                        n => at += n,
                    }
                }
                bytes.truncate(at);
                Thing::File(bytes)
            }
        };
        assert!(
            found == *thing,
            "{context}: {} differs",
            String::from_utf8_lossy(path)
        );
        Ok(())
    }
}

/// A file system with a real tree, many names, attributes and a fragmented file.
fn build() -> (Vec<Arc<SimDevice>>, Model) {
    let devices: Vec<_> = (0..DEVICES as u64)
        .map(|i| SimDevice::new(DEVICE_BYTES, i))
        .collect();
    let geometry = Geometry::plan(&[DEVICE_BYTES; DEVICES], GeometryOptions::default()).unwrap();
    let array = Array::create(handles(&devices), geometry, "test", [7; 16], [9; 16]).unwrap();
    let array = Arc::new(array);
    let mkfs = MkfsOptions {
        clock: clock(),
        ..MkfsOptions::default()
    };
    FileSystem::mkfs(&array, &mkfs).unwrap();
    array.write_labels().unwrap();
    let fs = open(&devices, false).unwrap();
    let mut model = Model::default();
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    model.copy(&fs, &here.join("src"), "/fs");
    model.copy(&fs, &here.join("../format/src"), "/format");
    model.add(&fs, "/link", Thing::Link(b"format/lib.rs".to_vec()));
    model.add(&fs, "/many", Thing::Dir);
    for i in 0..400usize {
        let content = vec![i as u8; i * 3];
        model.add(&fs, &format!("/many/file number {i}"), Thing::File(content));
    }
    for (path, len) in [
        ("/link", 0),
        ("/fs/lib.rs", 40),
        ("/fs", 5000),
        ("/many", 40_000),
    ] {
        if len > 0 {
            let value = vec![len as u8; len];
            let ino = fs.resolve(path.as_bytes()).unwrap().ino;
            fs.setxattr(&Caller::root(), ino, b"user.mark", &value, 0)
                .unwrap();
            model.attributes.insert(path.into(), value);
        }
    }
    let ino = model.add(&fs, "/fragments", Thing::File(Vec::new()));
    let file = fs.open_file(ino, libc::O_RDWR).unwrap();
    let mut content = vec![0; 800 * 8192];
    for i in 0..800 {
        content[i * 8192..][..4096].fill(i as u8 | 1);
        fs.write(&file, i as u64 * 8192, &[i as u8 | 1; 4096])
            .unwrap();
    }
    content.truncate(799 * 8192 + 4096);
    model
        .things
        .insert(b"/fragments".to_vec(), Thing::File(content));
    drop(file);
    fs.close().unwrap();
    (devices, model)
}

/// Blocks of file data, by device and block of the device.
fn data_blocks(fs: &FileSystem, geometry: &Geometry) -> BTreeSet<(usize, u64)> {
    let mut extents: Vec<FileExtent> = Vec::new();
    for nid in 1..16_384 {
        let Ok(node) = fs.store().get(Nid(nid)).and_then(|n| n.read()) else {
            continue;
        };
        match &*node {
            FsNode::Inode(inode) => {
                if let Body::Extents(list) = &inode.body {
                    extents.extend_from_slice(list);
                }
            }
            FsNode::Extents(list) => extents.extend_from_slice(list),
            _ => {}
        }
    }
    let mut blocks = BTreeSet::new();
    for extent in extents {
        for i in 0..extent.len as u64 {
            geometry.pieces(extent.block.byte() + i * BLOCK, BLOCK_SIZE, |piece| {
                blocks.insert((piece.device, piece.offset / BLOCK));
            });
        }
    }
    blocks
}

fn image(devices: &[Arc<SimDevice>], model: Model, last: Option<Vec<u8>>) -> Image {
    let array = assemble(devices, true).unwrap();
    let fs = open(devices, true).unwrap();
    let data = data_blocks(&fs, array.geometry());
    let mut targets = Vec::new();
    let mut block = vec![0; BLOCK_SIZE];
    for (index, device) in devices.iter().enumerate() {
        for number in HEAD_BLOCKS..DEVICE_BYTES / BLOCK - TAIL_BLOCKS {
            device.peek(number * BLOCK, &mut block);
            if block.iter().any(|b| *b != 0) && !data.contains(&(index, number)) {
                targets.push((index, number));
            }
        }
    }
    Image {
        devices: devices.iter().map(|d| d.snapshot()).collect(),
        model,
        last,
        targets,
    }
}

fn clean_image() -> Image {
    let (devices, model) = build();
    image(&devices, model, None)
}

/// The power went while the journal held what it alone knows.
fn dirty_image() -> Image {
    let (devices, mut model) = build();
    let fs = open(&devices, false).unwrap();
    model.add(&fs, "/journal", Thing::Dir);
    model.add(
        &fs,
        "/fs/extra",
        Thing::File(b"beside what is checkpointed".to_vec()),
    );
    fs.sync().unwrap();
    let mut last = String::new();
    for i in 0..JOURNALED {
        last = format!("/journal/{i}");
        model.add(&fs, &last, Thing::File(format!("content {i}").into_bytes()));
        fs.sync().unwrap();
    }
    let copies: Vec<_> = devices.iter().map(|d| d.clone_state(1)).collect();
    image(&copies, model, Some(last.into_bytes()))
}

impl Image {
    fn devices(&self) -> Vec<Arc<SimDevice>> {
        let device = |(i, snapshot): (u64, &Snapshot)| {
            let device = SimDevice::new(DEVICE_BYTES, i);
            device.restore(snapshot);
            device
        };
        (0..).zip(&self.devices).map(device).collect()
    }

    /// Opens, checks and reads everything; returns whether damage was reported.
    fn check(&self, devices: &[Arc<SimDevice>], writable: bool, context: &str) -> bool {
        let report = fsck(devices);
        let sound = report.is_sound();
        let lost = match open(devices, true) {
            Ok(fs) => self.model.compare(&fs, self.last.as_ref(), context),
            Err(error) => {
                assert!(
                    !sound,
                    "{context}: does not open ({error}), and fsck found nothing"
                );
                return true;
            }
        };
        assert!(
            lost.is_empty() || !sound,
            "{context}: {lost:?} cannot be read, and fsck found {:?}",
            report.findings
        );
        if writable {
            self.write(devices, context);
        }
        !sound
    }

    /// Uses the damaged file system as if nothing had happened.
    fn write(&self, devices: &[Arc<SimDevice>], context: &str) {
        let Ok(fs) = open(devices, false) else { return };
        self.model.compare(&fs, self.last.as_ref(), context);
        let who = Caller::root();
        for (path, thing) in &self.model.things {
            let at = path.iter().rposition(|b| *b == b'/').unwrap();
            let Ok(dir) = fs.resolve(&path[..at]) else {
                continue;
            };
            let name = &path[at + 1..];
            if *thing == Thing::Dir {
                let made = fs.create(&who, dir.ino, b"new", 0o644, libc::O_RDWR);
                if let Ok((_, file)) = made {
                    drop(fs.write(&file, 0, &[1; 10_000]));
                }
                continue;
            }
            if path.len() % 3 == 0 {
                drop(fs.rename(&who, dir.ino, name, ROOT, name, 0));
            } else if path.len() % 3 == 1 {
                drop(fs.unlink(&who, dir.ino, name));
            }
        }
        drop(fs.sync());
        drop(fs.store().checkpoint());
        drop(fs.close());
        drop(fs);
        fsck(devices);
    }
}

/// Damages one place of a device.
fn corrupt(device: &SimDevice, block: u64, image: &Image, rng: &mut Rng) -> String {
    let mut bytes = vec![0; BLOCK_SIZE];
    device.peek(block * BLOCK, &mut bytes);
    let at = rng.below(BLOCK) as usize;
    let sector = at / 512 * 512;
    let kind = rng.below(7);
    match kind {
        0 => bytes[at] ^= 1 << rng.below(8),
        1 => bytes[at] = bytes[at].wrapping_add(1 + rng.below(255) as u8),
        2 => bytes[sector..sector + 512].fill(0),
        3 => rng.fill(&mut bytes[sector..sector + 512]),
        4 => bytes.fill(0),
        5 => {
            let end = (at + 16).min(BLOCK_SIZE);
            rng.fill(&mut bytes[at..end]);
        }
        _ => {
            // Another block was written here.
            let (other, number) = *rng.pick(&image.targets);
            let source = SimDevice::new(DEVICE_BYTES, 0);
            source.restore(&image.devices[other]);
            source.peek(number * BLOCK, &mut bytes);
        }
    }
    device.poke(block * BLOCK, &bytes);
    format!("corruption {kind} of block {block} at {at}")
}

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
        assert!(fsck(&devices).is_sound());
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

/// Every valid item in the blocks that may be damaged: device, byte and header.
fn items(image: &Image) -> Vec<(usize, u64, ItemHeader)> {
    let devices = image.devices();
    let mut found = Vec::new();
    // An item begins in its block and may end in a later one.
    let mut bytes = vec![0; BLOCK_SIZE + item::ITEM_MAX];
    for &(index, block) in &image.targets {
        devices[index].peek(block * BLOCK, &mut bytes);
        for at in (0..BLOCK_SIZE).step_by(item::ITEM_ALIGN) {
            if let Ok((header, _)) = item::decode(&bytes[at..]) {
                found.push((index, block * BLOCK + at as u64, header));
            }
        }
    }
    found
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
    assert!(open(&devices, false).is_err());
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
    assert!(
        matches!(error, device::Error::LabelDamaged { .. }),
        "{error}"
    );
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
    let nodes = items(&image).into_iter();
    let nodes = nodes.filter(|(_, _, header)| header.kind == ItemKind::Node as u8);
    let images: Vec<_> = nodes
        .map(|(index, offset, header)| (index, offset, header.len.get() as usize))
        .collect();
    assert!(images.len() > 100);
    for _ in 0..count {
        let devices = image.devices();
        for _ in 0..1 + rng.below(3) {
            let (index, offset, len) = *rng.pick(&images);
            let mut bytes = vec![0; ItemHeader::SIZE + len];
            devices[index].peek(offset, &mut bytes);
            for _ in 0..1 + rng.below(4) {
                let at = ItemHeader::SIZE + rng.below(len.max(1) as u64) as usize;
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = *rng.pick(&[0, 1, 0xFF, *byte ^ 1, byte.wrapping_add(1), 0x80]);
                }
            }
            let crc = format::checksum(0, &bytes[4..]);
            bytes[..4].copy_from_slice(&crc.to_le_bytes());
            devices[index].poke(offset, &bytes);
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
