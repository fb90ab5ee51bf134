//! What was accepted on a full array keeps its room while devices fail and others look for some.

use super::*;
use base::atomic::{AtomicBool, Ordering};
use base::sched;
use base::thread;
use device::sim::Times as Strikes;
use device::{Operation, Request};
use std::io;

const MIB: u64 = 1 << 20;
/// What the bytes of writes that fail begin with.
const MARK: [u8; 16] = *b"fails if armed..";

/// A device that fails writes that begin with a marked page, while it is armed.
struct Refusing {
    below: Arc<SimDevice>,
    armed: Arc<AtomicBool>,
}

impl BlockDevice for Refusing {
    device::described_by!(below);

    fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        self.below.run(requests, meanwhile);
        if !self.armed.load(Ordering::SeqCst) {
            return;
        }
        for request in requests {
            if let Operation::Write { buf, .. } = &request.operation
                && buf.starts_with(&MARK)
            {
                request.error = Some(io::Error::from_raw_os_error(libc::EIO));
            }
        }
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.below.discard(offset, len)
    }
}

/// Pages that all begin with the mark.
fn marked(seed: u64, pages: u64) -> Vec<u8> {
    let mut bytes = pattern(seed, (pages * PAGE) as usize);
    for page in bytes.chunks_mut(BLOCK_SIZE) {
        page[..MARK.len()].copy_from_slice(&MARK);
    }
    bytes
}

/// A mounted world whose devices refuse what is marked, while armed.
fn refusing(world: &World) -> (Mounted, Arc<AtomicBool>) {
    let armed = Arc::new(AtomicBool::new(false));
    let refusing = |below: &Arc<SimDevice>| {
        let (below, armed) = (Arc::clone(below), Arc::clone(&armed));
        Arc::new(Refusing { below, armed }) as Arc<dyn BlockDevice>
    };
    let m = world.mount_on(world.devices.iter().map(refusing).collect());
    (m, armed)
}

/// A new file takes all blocks but so many, which lie in so many runs.
fn take_all_but(m: &Mounted, runs: u64, run: u64) {
    let filler = m.open(m.make());
    let (mut at, mut step) = (0, 256);
    let kept = libc::FALLOC_FL_KEEP_SIZE;
    while step > 0 {
        match m.files.fallocate(&filler, kept, at, step * PAGE) {
            Ok(()) => at += step * PAGE,
            Err(Error::NoSpace) => step /= 2,
            Err(error) => panic!("{error}"),
        }
    }
    let punch = libc::FALLOC_FL_PUNCH_HOLE | kept;
    for i in 0..runs {
        let from = (2 * i + 1) * run * PAGE;
        m.files.fallocate(&filler, punch, from, run * PAGE).unwrap();
    }
    m.store.sync().unwrap();
    drop(m.files.promise(runs * run).unwrap());
    assert!(m.files.promise(runs * run + 1).is_err());
}

/// Takes all the room there is.
fn take_room<'m>(m: &'m Mounted, held: &mut Vec<Promised<'m>>) {
    while let Ok(promise) = m.files.promise(1) {
        held.push(promise);
    }
}

/// Files' pages are on their way to a device that refuses them while somebody else takes whatever room there is.
/// `failing` ends when they have been refused. Those that are dirty then have a block promised each.
fn beside_others(
    world: &World,
    (m, armed): (&Mounted, &AtomicBool),
    seed: u64,
    (files, failing): (&[&Arc<OpenFile>], impl Fn() + Sync),
) {
    let mut before = Vec::new();
    take_room(m, &mut before);
    armed.store(true, Ordering::SeqCst);
    let held = sched::run(&format!("seed {seed}"), seed, &world.clock, || {
        let over = AtomicBool::new(false);
        thread::parallel(2, |t| {
            let mut held = Vec::new();
            if t == 0 {
                failing();
                over.store(true, Ordering::SeqCst);
            }
            // Who looks whether there is any is quicker than who asks for some in vain.
            let mut seen = m.store.space().free_blocks;
            while t > 0 && !over.load(Ordering::SeqCst) {
                let free = m.store.space().free_blocks;
                if free > seen {
                    take_room(m, &mut held);
                }
                seen = m.store.space().free_blocks.min(free);
                thread::yield_now();
            }
            held
        })
    });
    armed.store(false, Ordering::SeqCst);
    for file in files {
        let promised = file.state.meta.lock().promised;
        let needed = m.files.pages.promised(file.state.key);
        assert!(needed > 0);
        assert_eq!(promised, needed, "seed {seed}: room is another's");
    }
    drop((held, before));
}

/// All of a file gets home once devices work.
fn gets_home(m: &Mounted, file: &OpenFile, bytes: &[u8], seed: u64) {
    let home = m.files.flush_file(&file.state);
    home.unwrap_or_else(|e| panic!("seed {seed}: what was accepted has no room: {e}"));
    assert_eq!(m.files.pages.dirty(), 0, "seed {seed}");
    assert!(m.contents(file.ino()) == bytes, "seed {seed}");
    m.check(file.ino());
}

const SEEDS: u64 = 100;

#[test]
fn pages_that_a_device_refuses_keep_their_room() {
    for seed in 0..SEEDS {
        let world = World::new(300, 64, 256);
        let (m, armed) = refusing(&world);
        let (ino, bytes) = (m.make(), marked(1, 20));
        take_all_but(&m, 20, 1);
        let file = m.open(ino);
        m.write(&file, 0, &bytes);
        beside_others(
            &world,
            (&m, &armed),
            seed,
            (&[&file], || {
                assert!(m.files.flush_file(&file.state).is_err());
            }),
        );
        gets_home(&m, &file, &bytes, seed);
    }
}

#[test]
fn pages_of_small_files_that_go_together_keep_their_room() {
    for seed in 0..SEEDS {
        let world = World::new(301, 64, 256);
        let (m, armed) = refusing(&world);
        let inos: Vec<Ino> = (0..8).map(|_| m.make()).collect();
        take_all_but(&m, 16, 1);
        let files: Vec<_> = inos.iter().map(|&ino| m.open(ino)).collect();
        for (i, file) in files.iter().enumerate() {
            m.write(file, 0, &marked(i as u64, 2));
        }
        beside_others(
            &world,
            (&m, &armed),
            seed,
            (&files.iter().collect::<Vec<_>>(), || {
                assert!(m.files.write_back_all().is_err());
            }),
        );
        m.files.write_back_all().unwrap();
        for (i, file) in files.iter().enumerate() {
            gets_home(&m, file, &marked(i as u64, 2), seed);
        }
    }
}

#[test]
fn new_content_of_a_cut_file_keeps_its_room() {
    for seed in 0..SEEDS {
        let world = World::new(302, 64, 256);
        let (m, armed) = refusing(&world);
        let (ino, bytes) = (m.make(), marked(2, 20));
        let file = m.open(ino);
        m.write(&file, 0, &pattern(1, 20 * BLOCK_SIZE));
        m.files.write_back_all().unwrap();
        take_all_but(&m, 20, 1);
        m.files.truncate(ino, 0).unwrap();
        m.write(&file, 0, &bytes);
        assert!(file.state.meta.lock().replaced);
        beside_others(
            &world,
            (&m, &armed),
            seed,
            (&[&file], || {
                assert!(m.files.flush_file(&file.state).is_err());
            }),
        );
        gets_home(&m, &file, &bytes, seed);
    }
}

/// The blocks are written, and then a flush fails before their record is begun.
#[test]
fn pages_whose_record_is_not_logged_keep_their_room() {
    for seed in 0..SEEDS {
        let world = World::new(303, 64, 256);
        let (m, armed) = refusing(&world);
        let (ino, bytes) = (m.make(), pattern(1, 20 * BLOCK_SIZE));
        take_all_but(&m, 20, 1);
        let file = m.open(ino);
        m.write(&file, 0, &bytes);
        let pages: Vec<u64> = (0..20).collect();
        let layout = m.files.lay_out(&file.state, &pages, false).unwrap();
        m.store.sync().unwrap();
        m.store.array().mark_all_unflushed();
        for device in &world.devices {
            device.fail_flushes(Strikes::Next(1));
        }
        assert!(m.store.flush().is_err() && !m.store.read_only());
        for device in &world.devices {
            device.heal();
        }
        let layout = Mutex::new(rank::LEAF, Some(layout));
        beside_others(
            &world,
            (&m, &armed),
            seed,
            (&[&file], || {
                let layout = layout.lock().take().unwrap();
                let _turn = file.state.flusher.lock();
                let _shared = m.files.lock_ended(&file.state);
                assert!(m.files.log_stored(&file.state, layout, 20 * PAGE).is_err());
            }),
        );
        gets_home(&m, &file, &bytes, seed);
    }
}

/// What a stream has written goes through the cache when it is refused, and has the room there that it was accepted for.
#[test]
fn what_a_stream_has_written_keeps_its_room() {
    for seed in 0..SEEDS / 10 {
        let world = World::new(304, 96, 32_768);
        let (m, armed) = refusing(&world);
        let ino = m.make();
        let mut bytes = pattern(1, 4 * MIB as usize);
        m.write(&m.open(ino), 0, &bytes);
        m.files.write_back_all().unwrap();
        m.commit_more();
        // A run, which makes it a stream.
        let file = m.open(ino);
        for (at, request) in (0..).step_by(MIB as usize).zip(bytes.chunks(MIB as usize)) {
            m.write(&file, at, request);
        }
        m.files.fsync(&file, false).unwrap();
        let more = marked(2, MIB / PAGE);
        take_all_but(&m, 1, MIB / PAGE);
        let before = m.files.behind_bytes();
        armed.store(true, Ordering::SeqCst);
        m.write(&file, 4 * MIB, &more);
        bytes.extend_from_slice(&more);
        assert_eq!(m.files.behind_bytes() - before, MIB);
        beside_others(
            &world,
            (&m, &armed),
            seed,
            (&[&file], || {
                // Whoever looks ends the pieces.
                let mut first = [0; 16];
                assert_eq!(m.files.read(&file, 4 * MIB, &mut first).unwrap(), 16);
                assert_eq!(first, MARK);
            }),
        );
        gets_home(&m, &file, &bytes, seed);
    }
}
