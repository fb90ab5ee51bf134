//! Images of a file system with a real tree, and ways to damage them.

use base::clock::Clock;
use base::rng::Rng;
use device::sim::{SimDevice, Snapshot};
use device::{Array, BlockDevice};
use format::geometry::{Geometry, GeometryOptions};
use format::item::{self, ItemHeader, ItemKind};
use format::label::{HEAD_BLOCKS, TAIL_BLOCKS};
use format::{BLOCK_SIZE, Nid};
use fs::content::{Body, FileExtent, FsNode, TreeId};
use fs::fsck::{FsckOptions, Report};
use fs::{Caller, FileSystem, FsOptions, MkfsOptions, ROOT};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub const BLOCK: u64 = BLOCK_SIZE as u64;
pub const DEVICE_BYTES: u64 = 40 << 20;
pub const DEVICES: usize = 2;
/// Files created and synced one by one before the power goes.
pub const JOURNALED: usize = 30;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Thing {
    Dir,
    File(Vec<u8>),
    Link(Vec<u8>),
}

/// What was written, by path; and the attributes.
#[derive(Clone, Debug, Default)]
pub struct Model {
    pub things: BTreeMap<Vec<u8>, Thing>,
    pub attributes: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// The contents of all devices at one moment.
pub struct Image {
    pub devices: Vec<Snapshot>,
    pub model: Model,
    /// The last batch of the journal cannot be told from one that the power cut tore: what it
    /// made may be missing without a word.
    pub last: Option<Vec<u8>>,
    /// Blocks with something in them, by device, that are not file data, labels or slots.
    pub targets: Vec<(usize, u64)>,
}

pub fn full() -> bool {
    let asked = number("SHEAF_FULL");
    assert!(asked.is_none_or(|n| n == 1), "SHEAF_FULL is 1 or not set");
    !cfg!(debug_assertions) || asked.is_some()
}

/// `SHEAF_SEED` chooses other damage.
pub fn seed(default: u64) -> u64 {
    number("SHEAF_SEED").unwrap_or(default)
}

/// What a variable says, if it is set.
pub fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    let number = text.parse();
    Some(number.unwrap_or_else(|_| panic!("{name}: {text:?} is no number")))
}

pub fn clock() -> Clock {
    Clock::manual(1_700_000_000_000_000_000)
}

pub fn handles(devices: &[Arc<SimDevice>]) -> Vec<Arc<dyn BlockDevice>> {
    let handle = |d: &Arc<SimDevice>| Arc::clone(d) as Arc<dyn BlockDevice>;
    devices.iter().map(handle).collect()
}

pub fn assemble(devices: &[Arc<SimDevice>], read_only: bool) -> Result<Arc<Array>, device::Error> {
    Array::assemble(handles(devices), read_only).map(Arc::new)
}

pub fn options(read_only: bool) -> FsOptions {
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

pub fn open(devices: &[Arc<SimDevice>], read_only: bool) -> Result<Arc<FileSystem>, fs::Error> {
    let array = assemble(devices, read_only).map_err(engine::Error::from)?;
    FileSystem::open(array, options(read_only))
}

pub fn fsck(devices: &[Arc<SimDevice>]) -> Report {
    let options = FsckOptions {
        cache_bytes: 1 << 20,
        workers: 1,
        hash_mask: None,
    };
    fs::fsck::fsck(assemble(devices, true).unwrap(), &options, &|_| {}).unwrap()
}

impl Model {
    pub fn add(&mut self, fs: &FileSystem, path: &str, thing: Thing) -> Nid {
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

    /// A file of every other page, so many of them, which lie where the rest leaves room.
    pub fn add_fragments(&mut self, fs: &FileSystem, pages: usize) {
        let ino = self.add(fs, "/fragments", Thing::File(Vec::new()));
        let file = fs.open_file(ino, libc::O_RDWR).unwrap();
        let mut content = vec![0; (2 * pages - 1) * BLOCK_SIZE];
        for (i, page) in content.chunks_mut(2 * BLOCK_SIZE).enumerate() {
            page[..BLOCK_SIZE].fill(i as u8 | 1);
            let at = (2 * i * BLOCK_SIZE) as u64;
            fs.write(&file, at, &page[..BLOCK_SIZE]).unwrap();
        }
        let thing = Thing::File(content);
        self.things.insert(b"/fragments".to_vec(), thing);
    }

    /// Source files as they lie in this project.
    pub fn copy(&mut self, fs: &FileSystem, from: &std::path::Path, to: &str) {
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

    pub fn names_in(&self, dir: &[u8]) -> BTreeSet<Vec<u8>> {
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
    pub fn compare(&self, fs: &FileSystem, last: Option<&Vec<u8>>, context: &str) -> Vec<String> {
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
            if let Ok(attr) = fs.resolve(dir) {
                self.around(fs, dir, attr.ino, listed.is_ok().then_some(&names), context);
            }
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

    /// Lists what can be found in a directory: what was written, and all of it but for what is hidden. Nothing is, and it is
    /// `whole`, where that was listed.
    fn around(
        &self,
        fs: &FileSystem,
        dir: &[u8],
        ino: Nid,
        whole: Option<&BTreeSet<Vec<u8>>>,
        context: &str,
    ) {
        let (mut names, mut hidden) = (BTreeSet::new(), 0);
        let listed = fs.readdir_around(ino, &mut |entry| {
            match entry {
                Ok(entry) if entry.name == b"." || entry.name == b".." => {}
                Ok(entry) => assert!(names.insert(entry.name.to_vec()), "{context}"),
                Err(error) => {
                    assert_eq!(error.errno(), libc::EIO, "{context}: {error}");
                    hidden += 1;
                }
            }
            assert!(names.len() + hidden < 5000, "{context}: endless listing");
            true
        });
        if let Some(whole) = whole {
            assert!(listed.is_ok() && hidden == 0, "{context}");
            assert_eq!(&names, whole, "{context}: names in {dir:?}");
        }
        let written = self.names_in(dir);
        assert!(names.is_subset(&written), "{context}: names in {dir:?}");
        for name in written.difference(&names) {
            let found = fs.lookup(ino, name);
            assert!(
                found.is_err(),
                "{context}: {name:?} in {dir:?} is not listed"
            );
        }
    }

    pub fn look(
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

/// An empty file system on devices of so many bytes.
pub fn make(bytes: &[u64]) -> Vec<Arc<SimDevice>> {
    let device = |(seed, bytes): (u64, &u64)| SimDevice::new(*bytes, seed);
    let devices: Vec<_> = (0..).zip(bytes).map(device).collect();
    let geometry = Geometry::plan(bytes, GeometryOptions::default()).unwrap();
    let array = Array::create(handles(&devices), geometry, "test", [7; 16], [9; 16]).unwrap();
    let array = Arc::new(array);
    let mkfs = MkfsOptions {
        clock: clock(),
        ..MkfsOptions::default()
    };
    FileSystem::mkfs(&array, &mkfs).unwrap();
    array.write_labels().unwrap();
    devices
}

/// A file system with a real tree, many names, attributes and a fragmented file.
pub fn build() -> (Vec<Arc<SimDevice>>, Model) {
    let devices = make(&[DEVICE_BYTES; DEVICES]);
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
    model.add_fragments(&fs, 800);
    fs.close().unwrap();
    (devices, model)
}

/// Blocks of file data, by device and block of the device.
pub fn data_blocks(fs: &FileSystem, geometry: &Geometry) -> BTreeSet<(usize, u64)> {
    let mut extents: Vec<FileExtent> = Vec::new();
    for nid in 1..16_384 {
        let Ok(node) = fs.store().get(Nid(nid)).and_then(|n| n.into_read()) else {
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

pub fn image(devices: &[Arc<SimDevice>], model: Model, last: Option<Vec<u8>>) -> Image {
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

pub fn clean_image() -> Image {
    let (devices, model) = build();
    image(&devices, model, None)
}

/// The power went while the journal held what it alone knows.
pub fn dirty_image() -> Image {
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
    pub fn devices(&self) -> Vec<Arc<SimDevice>> {
        let device = |(i, snapshot): (u64, &Snapshot)| {
            let device = SimDevice::new(DEVICE_BYTES, i);
            device.restore(snapshot);
            device
        };
        (0..).zip(&self.devices).map(device).collect()
    }

    /// Opens, checks and reads everything; returns whether damage was reported.
    pub fn check(&self, devices: &[Arc<SimDevice>], writable: bool, context: &str) -> bool {
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
    pub fn write(&self, devices: &[Arc<SimDevice>], context: &str) {
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
pub fn corrupt(device: &SimDevice, block: u64, image: &Image, rng: &mut Rng) -> String {
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

/// Every valid item in the blocks that may be damaged: device, byte and header.
pub fn items(image: &Image) -> Vec<(usize, u64, ItemHeader)> {
    let devices = image.devices();
    let seed = devices[0].checksum_seed();
    let mut found = Vec::new();
    // An item begins in its block and may end in a later one.
    let mut bytes = vec![0; BLOCK_SIZE + item::ITEM_MAX];
    for &(index, block) in &image.targets {
        devices[index].peek(block * BLOCK, &mut bytes);
        for at in (0..BLOCK_SIZE).step_by(item::ITEM_ALIGN) {
            if let Ok((header, _)) = item::decode(seed, &bytes[at..]) {
                found.push((index, block * BLOCK + at as u64, header));
            }
        }
    }
    found
}

/// Node images: device, byte, nid and payload length.
pub fn nodes(image: &Image) -> Vec<(usize, u64, Nid, usize)> {
    let nodes = items(image).into_iter();
    nodes
        .filter(|(_, _, header)| header.kind == ItemKind::Node as u8)
        .map(|(index, offset, header)| {
            let len = header.len.get() as usize;
            (index, offset, Nid(header.id.get()), len)
        })
        .collect()
}

/// The first bucket of a directory.
pub fn bucket(image: &Image, dir: &[u8]) -> Nid {
    let fs = open(&image.devices(), true).unwrap();
    let ino = fs.resolve(dir).unwrap().ino;
    let node = fs.store().get(ino).unwrap().into_read().unwrap();
    let root = node.inode().unwrap().root(TreeId::Body).unwrap();
    assert_eq!(root.depth, 0);
    root.children[0].nid
}

/// Damages every image of a node.
pub fn rot(devices: &[Arc<SimDevice>], nodes: &[(usize, u64, Nid, usize)], rotten: Nid) {
    for (index, byte, nid, _) in nodes {
        if *nid == rotten {
            devices[*index].poke(byte + ItemHeader::SIZE as u64 + 1, &[0xA5]);
        }
    }
}

/// Changes a few bytes of a node and makes the checksum right again.
pub fn forge(
    devices: &[Arc<SimDevice>],
    nodes: &[(usize, u64, Nid, usize)],
    rng: &mut Rng,
) -> String {
    let (index, offset, nid, len) = *rng.pick(nodes);
    let seed = devices[index].checksum_seed();
    let mut bytes = vec![0; ItemHeader::SIZE + len];
    devices[index].peek(offset, &mut bytes);
    let mut changed = Vec::new();
    for _ in 0..1 + rng.below(4) {
        let at = ItemHeader::SIZE + rng.below(len.max(1) as u64) as usize;
        if let Some(byte) = bytes.get_mut(at) {
            *byte = *rng.pick(&[0, 1, 0xFF, *byte ^ 1, byte.wrapping_add(1), 0x80]);
            changed.push((at - ItemHeader::SIZE, *byte));
        }
    }
    let crc = format::checksum(seed, &bytes[4..]);
    bytes[..4].copy_from_slice(&crc.to_le_bytes());
    devices[index].poke(offset, &bytes);
    format!("node {nid} forged at {changed:?}")
}
