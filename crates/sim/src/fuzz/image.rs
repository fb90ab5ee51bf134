//! A small file system whose image is damaged.

use super::sealed::{self, Sealed};
use base::clock::Clock;
use device::sim::{SECTOR, SimDevice, Snapshot};
use device::{Array, BlockDevice};
use format::checksum;
use format::geometry::{Geometry, GeometryOptions};
use format::item::{self, ItemHeader, ItemKind};
use fs::fsck::FsckOptions;
use fs::{Caller, Error, FileSystem, FsOptions, Ino, MkfsOptions, ROOT};
use std::sync::{Arc, OnceLock};

const BYTES: u64 = 64 << 20;
/// Names that a walk looks at, at most: a damaged directory may be its own child.
const WALK_MAX: usize = 500;

/// The image that inputs damage, and what of it holds anything.
pub struct Image {
    snapshot: Snapshot,
    /// Byte offsets of sectors with data.
    sectors: Vec<u64>,
    /// Byte offsets and payload lengths of node images.
    nodes: Vec<(u64, usize)>,
    /// What checksums of items begin with.
    seed: u32,
    /// What else holds a checksum.
    pub sealed: Vec<Sealed>,
}

/// Made once; every input starts from it.
pub fn image() -> &'static Image {
    static IMAGE: OnceLock<Image> = OnceLock::new();
    IMAGE.get_or_init(|| Image::make().expect("healthy devices make an image"))
}

pub fn options() -> FsOptions {
    let mut options =
        FsOptions::default().without_threads(Clock::manual(1_700_000_000_000_000_000));
    options.data.cache_bytes = 256 << 10;
    options.store.node_cache_bytes = 1 << 20;
    (options.store.workers, options.store.shards) = (1, 1);
    options
}

fn handles(device: &Arc<SimDevice>) -> Vec<Arc<dyn BlockDevice>> {
    vec![Arc::clone(device) as Arc<dyn BlockDevice>]
}

pub fn assemble(device: &Arc<SimDevice>, read_only: bool) -> Result<Arc<Array>, Error> {
    let array = Array::assemble(handles(device), read_only);
    Ok(Arc::new(array.map_err(engine::Error::from)?))
}

impl Image {
    fn make() -> Result<Image, Error> {
        let device = SimDevice::new(BYTES, 1);
        let plan = Geometry::plan(&[BYTES], GeometryOptions::default())?;
        let made = Array::create(handles(&device), plan, "fuzz", [7; 16], [9; 16]);
        let array = Arc::new(made.map_err(engine::Error::from)?);
        let mkfs = MkfsOptions {
            clock: Clock::manual(1),
            ..MkfsOptions::default()
        };
        FileSystem::mkfs(&array, &mkfs)?;
        array.write_labels().map_err(engine::Error::from)?;
        let fs = FileSystem::open(array, options())?;
        populate(&fs)?;
        fs.close()?;
        drop(fs);
        Ok(scan(&device))
    }

    /// A device with this image.
    pub fn device(&self) -> Arc<SimDevice> {
        let device = SimDevice::new(BYTES, 1);
        device.restore(&self.snapshot);
        device
    }
}

/// One of everything.
fn populate(fs: &FileSystem) -> Result<(), Error> {
    let root = Caller::root();
    let dir = fs.mkdir(&root, ROOT, b"dir", 0o755)?.ino;
    for i in 0..120 {
        let name = format!("name-{i:03}-{}", "x".repeat(i % 40));
        let (_, file) = fs.create(&root, dir, name.as_bytes(), 0o644, libc::O_RDWR)?;
        fs.write(&file, 0, &vec![i as u8; i * 37])?;
    }
    let (attr, file) = fs.create(&root, ROOT, b"file", 0o600, libc::O_RDWR)?;
    for i in 0..40 {
        fs.write(&file, i * 3 * 4096, &[i as u8; 4096])?;
    }
    fs.setxattr(&root, attr.ino, b"user.small", b"value", 0)?;
    fs.setxattr(&root, attr.ino, b"user.large", &[3; 20_000], 0)?;
    fs.symlink(&root, ROOT, b"link", b"dir/name-000-")?;
    fs.link(&root, attr.ino, dir, b"second-name")?;
    fs.sync()
}

fn scan(device: &SimDevice) -> Image {
    let (mut sectors, mut nodes, mut items) = (Vec::new(), Vec::new(), Vec::new());
    const WINDOW: usize = 1 << 20;
    let seed = device.checksum_seed();
    let mut bytes = vec![0; WINDOW + item::ITEM_MAX];
    for start in (0..BYTES).step_by(WINDOW) {
        let len = bytes.len().min((BYTES - start) as usize);
        device.peek(start, &mut bytes[..len]);
        for at in (0..WINDOW).step_by(SECTOR) {
            let sector = &bytes[at..at + SECTOR];
            if sector.iter().all(|b| *b == 0) {
                continue;
            }
            sectors.push(start + at as u64);
            for within in (at..at + SECTOR).step_by(item::ITEM_ALIGN) {
                if let Ok((header, payload)) = item::decode(seed, &bytes[within..len]) {
                    let place = start + within as u64;
                    match header.kind == ItemKind::Node as u8 {
                        true => nodes.push((place, payload.len())),
                        false => items.push(place),
                    }
                }
            }
        }
    }
    Image {
        snapshot: device.snapshot(),
        sectors,
        nodes,
        seed,
        sealed: sealed::find(device, seed, &items),
    }
}

/// Each five bytes are one damage: of any sector, or of a node, a label, a checkpoint record or a
/// page of a table whose checksum is right again.
pub fn check(input: &[u8]) {
    let image = image();
    let device = image.device();
    for damage in input.chunks_exact(5).take(64) {
        let number = u16::from_le_bytes([damage[1], damage[2]]) as usize;
        let (at, value) = (damage[3] as u64, damage[4]);
        match damage[0] % 8 {
            0 => {
                let sector = image.sectors[number % image.sectors.len()];
                device.poke(sector + at * 2, &[value]);
            }
            4 => {
                let at = at as usize | (damage[0] as usize >> 3) << 8;
                sealed::damage(&device, &image.sealed, number, at, value);
            }
            _ => {
                let (start, len) = image.nodes[number % image.nodes.len()];
                damage_node(&device, image.seed, (start, len), at, value);
            }
        }
    }
    // What is wrong may be found or not; nothing may panic over it, or go on for ever.
    let check = assemble(&device, true).and_then(|array| {
        let options = FsckOptions {
            cache_bytes: 1 << 20,
            workers: 1,
            hash_mask: None,
        };
        fs::fsck::fsck(array, &options, &|_| {})
    });
    let opened = assemble(&device, false).and_then(|array| FileSystem::open(array, options()));
    if let Ok(fs) = opened {
        use_everything(&fs);
    }
    drop(check);
}

fn damage_node(device: &SimDevice, seed: u32, (start, len): (u64, usize), at: u64, value: u8) {
    let mut bytes = vec![0; ItemHeader::SIZE + len];
    device.peek(start, &mut bytes);
    // Sixteen bytes at most of a long payload differ between neighbouring places.
    let place = (at as usize * len / 256).min(len.saturating_sub(1));
    if len > 0 {
        bytes[ItemHeader::SIZE + place] = value;
    }
    let crc = checksum(seed, &bytes[4..]);
    bytes[..4].copy_from_slice(&crc.to_le_bytes());
    device.poke(start, &bytes);
}

/// Looks at all there is, and changes some of it. Any error will do.
pub fn use_everything(fs: &FileSystem) {
    let mut todo = vec![ROOT];
    let mut seen = 0;
    while let Some(ino) = todo.pop() {
        seen += 1;
        if seen > WALK_MAX {
            break;
        }
        let Ok(attr) = fs.getattr(ino) else { continue };
        let _names = fs.listxattr(ino).is_ok() && fs.getxattr(ino, b"user.large").is_ok();
        match attr.mode & libc::S_IFMT {
            libc::S_IFDIR => todo.extend(children(fs, ino)),
            libc::S_IFLNK => drop(fs.readlink(ino)),
            libc::S_IFREG => drop(read_and_write(fs, ino, attr.size)),
            _ => {}
        }
    }
    let changed = change_names(fs);
    let synced = fs.sync();
    let closed = fs.close();
    // Whether they worked is the damage's business.
    drop((changed, synced, closed));
}

fn children(fs: &FileSystem, ino: Ino) -> Vec<Ino> {
    let mut found = Vec::new();
    let listed = fs.readdir(ino, 0, &mut |entry| {
        if entry.name != b"." && entry.name != b".." {
            found.push(entry.ino);
        }
        found.len() < WALK_MAX
    });
    drop(listed);
    found
}

fn read_and_write(fs: &FileSystem, ino: Ino, size: u64) -> Result<(), Error> {
    let file = fs.open_file(ino, libc::O_RDWR)?;
    let mut bytes = vec![0; 64 << 10];
    fs.read(&file, 0, &mut bytes)?;
    fs.read(&file, size.saturating_sub(5000), &mut bytes)?;
    fs.seek(&file, 0, libc::SEEK_HOLE)?;
    fs.write(&file, 4096, &bytes[..5000])?;
    fs.fsync(&file, false)
}

fn change_names(fs: &FileSystem) -> Result<(), Error> {
    let root = Caller::root();
    fs.create(&root, ROOT, b"new", 0o644, libc::O_RDWR)?;
    fs.rename(&root, ROOT, b"new", ROOT, b"link", 0)?;
    let dir = fs.lookup(ROOT, b"dir")?.ino;
    fs.unlink(&root, dir, b"second-name")?;
    fs.unlink(&root, ROOT, b"file")
}
