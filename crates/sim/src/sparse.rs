//! Metadata that grew and shrank gives its chunks to data, while it changes and until the power goes.
//!
//! Files with large attributes take a part of a small array, and nearly all of them are removed: a little is live in each
//! chunk of metadata. Then one thread writes until the disk is full, for which chunks are emptied; another changes what is
//! left of the files, and syncs it; and the store's own threads make checkpoints, in an order that a seed decides.
//! Whatever was synced is there after the power went, and `fsck` finds nothing. If it stayed, data got nearly all that was
//! free before there were any files.

use crate::world::{Image, Machine, Shape};
use base::rng::Rng;
use base::{sched, thread};
use device::sim::{PowerSwitch, Survival};
use format::BLOCK_SIZE;
use fs::{Caller, Error, FileSystem, Ino, OpenFile, ROOT};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Files that are made, and one of how many stays.
const FILES: u64 = 6000;
const STAYS: u64 = 150;
/// Attributes of a file, in bytes.
const VALUE: usize = 1800;
const NAME: &[u8] = b"user.value";
/// Bytes of one write.
const WRITE: usize = 16 * BLOCK_SIZE;
/// Writes of the devices until the power goes, or those of checkpoint records, at most.
const UNTIL: u64 = 2500;
const LABELS: u64 = 60;

/// What is changed: a file's attribute has the number of the change.
struct Kept {
    file: Ino,
    begun: AtomicU64,
    synced: AtomicU64,
}

/// What the threads share.
struct Scene {
    kept: Vec<Kept>,
    data: Ino,
    /// Bytes of `data` that were written, and synced.
    written: AtomicU64,
    synced: AtomicU64,
    full: AtomicBool,
}

/// One run; an error says what was not as it must be.
pub fn run(seed: u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let mut shape = Shape::small(rng.range(1, 4));
    let store = &mut shape.options.store;
    store.background = true;
    store.workers = rng.range(1, 4) as usize;
    store.shards = rng.range(1, 4) as usize;
    // Few segments need be free for a checkpoint: most chunks can go.
    store.dirty_bytes = Some(128 << 10);
    let machine = Machine::new(&Image::format(&shape)?, seed);
    let when = rng.below(4);
    let (until, labels) = (rng.below(UNTIL), rng.below(LABELS));
    let scene = sched::run("sparse", seed, &machine.clock, || {
        let fs = machine.open().map_err(text)?;
        let free = fs.store().space().free_blocks;
        let scene = set_up(&fs).map_err(text)?;
        match when {
            0 => {}
            1 => machine.switch.cut_after(until),
            _ => {
                let switch = Arc::clone(&machine.switch);
                let cut = move || switch.cut_now();
                machine.tap.interpose_at_label(labels, Box::new(cut));
            }
        }
        let worked = thread::parallel(2, |me| match me {
            0 => fill(&fs, &scene),
            _ => change(&fs, &scene, &mut Rng::new(seed)),
        });
        for outcome in worked {
            passed(&machine.switch, outcome)?;
        }
        if !machine.switch.is_cut() {
            let blocks = scene.written.load(Ordering::Relaxed) / BLOCK_SIZE as u64;
            if blocks < free / 10 * 8 {
                return Err(format!("data got {blocks} of {free} blocks"));
            }
            machine.switch.cut_now();
        }
        match fs.close() {
            Ok(()) => Err("a file system closes without power".to_owned()),
            Err(_) => Ok(scene),
        }
    })?;
    let now_ns = machine.now_ns();
    let crashed = machine.cut(*rng.pick(&Survival::ALL), &mut rng);
    let machine = Machine::after(&shape, crashed, now_ns);
    machine.fsck()?;
    let fs = machine.open().map_err(text)?;
    check(&fs, &scene)?;
    fs.close().map_err(text)?;
    machine.fsck()
}

fn text(error: Error) -> String {
    error.to_string()
}

/// What fails without power is right.
fn passed(switch: &PowerSwitch, outcome: Result<(), Error>) -> Result<(), String> {
    match outcome {
        Err(_) if switch.is_cut() => Ok(()),
        outcome => outcome.map_err(text),
    }
}

fn make(fs: &FileSystem, name: &str) -> Result<Ino, Error> {
    let mode = libc::S_IFREG | 0o644;
    Ok(fs
        .mknod(&Caller::root(), ROOT, name.as_bytes(), mode, 0)?
        .ino)
}

fn set_up(fs: &FileSystem) -> Result<Scene, Error> {
    let data = make(fs, "data")?;
    let mut kept = Vec::new();
    for number in 0..FILES {
        let file = make(fs, &number.to_string())?;
        set(fs, file, 0)?;
        if number % STAYS == 0 {
            kept.push(Kept {
                file,
                begun: AtomicU64::new(0),
                synced: AtomicU64::new(0),
            });
        }
    }
    for number in (0..FILES).filter(|number| number % STAYS != 0) {
        fs.unlink(&Caller::root(), ROOT, number.to_string().as_bytes())?;
    }
    fs.sync()?;
    Ok(Scene {
        kept,
        data,
        written: AtomicU64::new(0),
        synced: AtomicU64::new(0),
        full: AtomicBool::new(false),
    })
}

/// Writes until there is no room, and syncs now and then.
fn fill(fs: &FileSystem, scene: &Scene) -> Result<(), Error> {
    let outcome = write_all(fs, scene);
    scene.full.store(true, Ordering::Relaxed);
    outcome
}

fn write_all(fs: &FileSystem, scene: &Scene) -> Result<(), Error> {
    let file = fs.open_file(scene.data, libc::O_RDWR)?;
    let mut at = 0;
    let sync = |at| {
        fs.fsync(&file, false)?;
        scene.synced.store(at, Ordering::Relaxed);
        Ok::<_, Error>(())
    };
    loop {
        match fs.write(&file, at, &pattern(at)) {
            Ok(written) => at += written as u64,
            Err(Error::NoSpace) => break,
            Err(error) => return Err(error),
        }
        scene.written.store(at, Ordering::Relaxed);
        if at % (8 * WRITE as u64) == 0 {
            sync(at)?;
        }
    }
    sync(at)
}

/// Changes the files that are left, and syncs each change, until the disk is full.
fn change(fs: &FileSystem, scene: &Scene, rng: &mut Rng) -> Result<(), Error> {
    while !scene.full.load(Ordering::Relaxed) {
        let one = rng.pick(&scene.kept);
        let number = one.begun.load(Ordering::Relaxed) + 1;
        one.begun.store(number, Ordering::Relaxed);
        match set(fs, one.file, number) {
            // Others have all the room for the moment: the value stays what it was.
            Err(Error::NoSpace) => {
                one.begun.store(number - 1, Ordering::Relaxed);
                continue;
            }
            outcome => outcome?,
        }
        fs.fsync_inode(one.file, false)?;
        one.synced.store(number, Ordering::Relaxed);
    }
    Ok(())
}

fn check(fs: &Arc<FileSystem>, scene: &Scene) -> Result<(), String> {
    for (i, one) in scene.kept.iter().enumerate() {
        let found = fs.getxattr(one.file, NAME).map_err(text)?;
        let number = u64::from_le_bytes(found[..8].try_into().expect("eight bytes"));
        let may = one.synced.load(Ordering::Relaxed)..=one.begun.load(Ordering::Relaxed);
        if !may.contains(&number) || found != value(number) {
            return Err(format!("file {i} has change {number}, not one of {may:?}"));
        }
    }
    let synced = scene.synced.load(Ordering::Relaxed);
    let file = fs.open_file(scene.data, libc::O_RDONLY).map_err(text)?;
    read_back(fs, &file, synced)
}

fn read_back(fs: &FileSystem, file: &OpenFile, synced: u64) -> Result<(), String> {
    let mut found = vec![0; WRITE];
    for at in (0..synced).step_by(WRITE) {
        let len = fs.read(file, at, &mut found).map_err(text)?;
        let len = len.min((synced - at) as usize);
        if len < WRITE.min((synced - at) as usize) || found[..len] != pattern(at)[..len] {
            return Err(format!("data at {at} is not what was synced"));
        }
    }
    Ok(())
}

/// What is written at a place.
fn pattern(at: u64) -> Vec<u8> {
    let mut bytes = vec![(at / WRITE as u64) as u8; WRITE];
    let pages = bytes.chunks_exact_mut(BLOCK_SIZE);
    for (page, bytes) in (at / BLOCK_SIZE as u64..).zip(pages) {
        bytes[..8].copy_from_slice(&page.to_le_bytes());
    }
    bytes
}

fn value(number: u64) -> Vec<u8> {
    let mut value = vec![number as u8; VALUE];
    value[..8].copy_from_slice(&number.to_le_bytes());
    value
}

fn set(fs: &FileSystem, file: Ino, number: u64) -> Result<(), Error> {
    fs.setxattr(&Caller::root(), file, NAME, &value(number), 0)
}
