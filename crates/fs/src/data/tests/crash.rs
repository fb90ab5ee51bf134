use super::*;

/// Runs `work` with the power cut after a random number of operations, then mounts again.
fn crash(
    world: &mut World,
    rng: &mut Rng,
    operations: u64,
    work: impl FnOnce(&Mounted),
) -> Mounted {
    let m = world.mount();
    world.switch.cut_after(rng.below(operations));
    work(&m);
    world.switch.cut_now();
    drop(m);
    world.restart(rng);
    world.mount()
}

#[test]
fn what_was_synced_survives_a_power_cut() {
    for seed in 0..40 {
        let mut rng = Rng::new(seed);
        let mut world = World::new(seed, 64, 256);
        let ino = {
            let m = world.mount();
            let ino = m.make();
            m.close();
            ino
        };
        let mut synced: Vec<u8> = Vec::new();
        let mut current: Vec<u8> = Vec::new();
        let m = crash(&mut world, &mut rng.clone(), 60, |m| {
            let Ok(file) = m.files.open(&m.owners, ino, libc::O_RDWR) else {
                return;
            };
            for round in 0..30u64 {
                let at = rng.below(60_000) as usize;
                let data = pattern(seed * 100 + round, rng.below(20_000) as usize + 1);
                if m.files.write(&file, at as u64, &data).is_err() {
                    return;
                }
                if current.len() < at + data.len() {
                    current.resize(at + data.len(), 0);
                }
                current[at..at + data.len()].copy_from_slice(&data);
                if round % 4 == 3 {
                    if m.files.fsync(&file, rng.one_in(2)).is_err() {
                        return;
                    }
                    synced.clone_from(&current);
                }
            }
        });
        let found = m.contents(ino);
        m.check(ino);
        assert!(found.len() >= synced.len(), "seed {seed}");
        for (i, &byte) in found.iter().enumerate() {
            // Bytes written after the last sync may be old or new; a page tears by sector.
            let expected = [synced.get(i), current.get(i)];
            let zero = i >= synced.len() && byte == 0;
            assert!(
                zero || expected.contains(&Some(&byte)),
                "seed {seed}: byte {i} is {byte:#x}"
            );
        }
    }
}

#[test]
fn a_rewritten_file_is_old_or_new_after_a_power_cut() {
    let (mut old, mut new) = (0, 0);
    for seed in 0..60 {
        let mut rng = Rng::new(seed);
        let mut world = World::new(seed, 64, 1024);
        let first = pattern(1, rng.below(100_000) as usize + 1);
        let second = pattern(2, rng.below(100_000) as usize + 1);
        let ino = {
            let m = world.mount();
            let ino = m.make();
            let file = m.open(ino);
            m.write(&file, 0, &first);
            m.files.fsync(&file, false).unwrap();
            drop(file);
            m.close();
            ino
        };
        let clock = world.clock.clone();
        let m = crash(&mut world, &mut rng, 12, |m| {
            if let Ok(file) = m.files.open(&m.owners, ino, libc::O_RDWR) {
                let _ = m.files.truncate(ino, 0);
                for (i, part) in second.chunks(10_000).enumerate() {
                    let _ = m.files.write(&file, i as u64 * 10_000, part);
                }
            }
            clock.advance(Duration::from_secs(31));
            let _ = m.files.tick();
            let _ = m.store.sync();
        });
        let found = m.contents(ino);
        m.check(ino);
        match found {
            found if found == first => old += 1,
            found if found == second => new += 1,
            found => panic!("seed {seed}: {} bytes of neither", found.len()),
        }
    }
    assert!(old > 0 && new > 0, "{old} old, {new} new");
}

/// Writes of a part of the new content that went past the cache, or home at once, took the old content away: a crash left a file that was
/// empty, or had that part.
#[test]
fn a_part_of_new_content_takes_no_old_content_away() {
    let old = pattern(1, 1 << 20);
    let new = pattern(2, 1 << 20);
    type Start<'a> = (&'a str, &'a dyn Fn(&Mounted, Ino, &[u8]));
    let half = 100 * PAGE as usize;
    let starts: [Start<'_>; 7] = [
        ("a direct write", &|m, ino, new| {
            m.write(&m.open_direct(ino), 0, &new[..half]);
        }),
        ("one that is no whole page", &|m, ino, new| {
            m.write(&m.open_direct(ino), 0, &new[..half - 100]);
        }),
        ("a direct append", &|m, ino, new| {
            let file = m.open_direct(ino);
            assert_eq!(m.files.append(&file, &new[..half]).unwrap(), (0, half));
        }),
        ("one of several parts", &|m, ino, new| {
            let parts = [&new[..half / 2], &new[half / 2..half]].map(std::io::IoSlice::new);
            let file = m.open_direct(ino);
            // It is too much for one piece of memory then.
            base::tight::set(true);
            let written = m.files.write_vectored(&file, 0, &parts);
            base::tight::set(false);
            assert_eq!(written.unwrap(), half);
        }),
        ("a hint", &|m, ino, new| {
            let file = m.open(ino);
            m.write(&file, 0, &new[..half]);
            m.files.write_range(&file, 0..u64::MAX, false).unwrap();
            m.files.tick().unwrap();
        }),
        ("one that is waited for", &|m, ino, new| {
            let file = m.open(ino);
            m.write(&file, 0, &new[..half]);
            m.files.write_range(&file, 0..u64::MAX, true).unwrap();
        }),
        ("advice", &|m, ino, new| {
            let file = m.open(ino);
            m.write(&file, 0, &new[..half]);
            let advised = m.files.advise(&file, 0..half as u64, Advice::DontNeed);
            advised.unwrap();
            m.files.tick().unwrap();
        }),
    ];
    for (what, start) in starts {
        for whole in [false, true] {
            let mut rng = Rng::new(7);
            let mut world = World::new(7, 64, 2048);
            let m = world.mount();
            let ino = m.make();
            let file = m.open(ino);
            m.write(&file, 0, &old);
            m.files.fsync(&file, false).unwrap();
            m.files.truncate(ino, 0).unwrap();
            start(&m, ino, &new);
            assert_eq!(m.contents(ino), new[..m.size(ino) as usize], "{what}");
            if whole {
                m.write(&m.open_direct(ino), 0, &new);
                m.files.fsync(&file, false).unwrap();
            }
            m.store.sync().unwrap();
            drop(file);
            world.switch.cut_now();
            drop(m);
            world.restart(&mut rng);
            let m = world.mount();
            m.check(ino);
            let left = m.contents(ino);
            assert!(
                left == *if whole { &new } else { &old },
                "{what}: {} bytes",
                left.len()
            );
        }
    }
}

/// New content that is too much to be kept together goes past the cache again.
#[test]
fn direct_writes_of_much_new_content_need_no_cache() {
    let world = World::new(8, 256, 2048);
    let m = world.mount();
    let ino = m.make();
    let file = m.open_direct(ino);
    m.write(&file, 0, &pattern(1, 1 << 20));
    m.files.fsync(&file, false).unwrap();
    m.files.truncate(ino, 0).unwrap();
    let new = pattern(2, 64 << 20);
    m.write(&file, PAGE, &new);
    assert!(!m.files.pages.is_dirty(file.state.key));
    drop(file);
    let found = m.contents(ino);
    assert!(found[..PAGE as usize].iter().all(|b| *b == 0) && found[PAGE as usize..] == new);
    m.check(ino);
    m.close();
}

#[test]
fn an_interrupted_truncate_is_finished_after_a_power_cut() {
    let mut interrupted = 0;
    for seed in 0..12 {
        let mut rng = Rng::new(seed);
        let mut world = World::new(seed, 64, 4096);
        let (ino, before) = {
            let m = world.mount();
            let before = m.free_blocks();
            let ino = m.make();
            let file = m.open(ino);
            for i in 0..3000u64 {
                m.write(&file, i * 2 * PAGE, b"x");
            }
            m.files.fsync(&file, false).unwrap();
            drop(file);
            m.close();
            (ino, before)
        };
        let m = crash(&mut world, &mut rng, 6, |m| {
            let (Ok(node), Ok(state)) = (m.store.get(ino), m.files.use_file(ino)) else {
                return;
            };
            let _ = m.files.test_begin_chain(&state, 5 * PAGE);
            let _ = m.store.sync();
            drop(state);
            let _ = m.files.finish_chain(&node);
            let _ = m.store.sync();
        });
        let node = m.store.get(ino).unwrap();
        interrupted += m.inode(ino).seldom.pending_truncate.is_some() as u32;
        m.files.finish_chain(&node).unwrap();
        let inode = m.inode(ino);
        assert_eq!(inode.seldom.pending_truncate, None);
        if inode.size == 5 * PAGE {
            assert_eq!(m.check(ino), 3);
        } else {
            assert_eq!(m.check(ino), 3000);
        }
        m.delete(ino);
        assert_eq!(m.free_blocks(), before, "seed {seed}");
    }
    assert!(interrupted > 0);
}

/// The bytes of a file that holds nothing but its own mark, from `offset` on.
fn marked(key: (Ino, u64), offset: u64, len: usize) -> Vec<u8> {
    let mut mark = [0u8; 16];
    mark[..8].copy_from_slice(&(key.0.0 | 0x8080_8080_8080_8080).to_le_bytes());
    mark[8..].copy_from_slice(&(key.1 | 0x8080_8080_8080_8080).to_le_bytes());
    (offset..offset + len as u64)
        .map(|i| mark[i as usize % 16])
        .collect()
}

fn churn(m: &Mounted, rng: &mut Rng, inos: &mut Vec<Ino>) -> Result<(), Error> {
    for _ in 0..120 {
        if inos.len() < 5 {
            let fresh = m.store.reserve_nid()?;
            let ino = fresh.nid();
            let mut op = m.store.begin(Need::Grow)?;
            let inode = Inode::new(libc::S_IFREG | 0o644, fresh.version(), m.files.now());
            op.create(fresh, FsNode::Inode(inode));
            op.commit();
            inos.push(ino);
        }
        let index = rng.below(inos.len() as u64) as usize;
        let ino = inos[index];
        let direct = if rng.one_in(3) { libc::O_DIRECT } else { 0 };
        let file = m.files.open(&m.owners, ino, libc::O_RDWR | direct)?;
        let generation = file.state.key.generation;
        let (mut at, mut len) = (rng.below(120_000), rng.below(60_000) + 1);
        if rng.one_in(2) {
            (at, len) = (at / PAGE * PAGE, len.next_multiple_of(PAGE));
        }
        let outcome = match rng.below(10) {
            0..=3 => {
                let data = marked((ino, generation), at, len as usize);
                m.files.write(&file, at, &data).map(|_| ())
            }
            4 => m.files.truncate(ino, if rng.one_in(2) { 0 } else { at }),
            5 => {
                let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                m.files.fallocate(&file, punch, at, len)
            }
            6 => m.files.fallocate(&file, 0, at, len),
            7 => m.files.fsync(&file, true),
            8 => {
                drop(file);
                inos.remove(index);
                m.files.release_data(ino)?;
                let node = m.store.get(ino)?;
                let mut op = m.store.begin(Need::Reclaim)?;
                let slot = op.lock(&node)?;
                op.delete(slot);
                op.commit();
                Ok(())
            }
            _ => m.store.checkpoint().map_err(Error::from),
        };
        match outcome {
            Ok(()) | Err(Error::NoSpace) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[test]
fn no_file_ever_shows_the_old_bytes_of_another() {
    let mut cuts = 0;
    for seed in 0..40 {
        let mut rng = Rng::new(seed);
        let mut world = World::new(seed, 64, 64);
        let mut inos = Vec::new();
        let filler = {
            // Little is left free, so that freed blocks are soon used again.
            let m = world.mount();
            let filler = m.make();
            let file = m.open(filler);
            let blocks = m.free_blocks() - 300;
            let keep = libc::FALLOC_FL_KEEP_SIZE;
            m.files.fallocate(&file, keep, 0, blocks * PAGE).unwrap();
            drop(file);
            m.close();
            filler
        };
        for _ in 0..3 {
            let mut inner = rng.clone();
            let mut used = inos.clone();
            let m = crash(&mut world, &mut rng, 400, |m| {
                cuts += churn(m, &mut inner, &mut used).is_err() as u32;
            });
            rng = inner;
            inos = used;
            inos.retain(|ino| m.store.get(*ino).is_ok_and(|node| node.read().is_ok()));
            m.check(filler);
            for ino in &inos {
                m.check(*ino);
                let generation = m.inode(*ino).generation;
                let found = m.contents(*ino);
                let expected = marked((*ino, generation), 0, found.len());
                let foreign = found
                    .iter()
                    .zip(&expected)
                    .position(|(f, e)| f != e && *f != 0);
                assert_eq!(foreign, None, "seed {seed}: inode {ino}");
            }
            m.close();
        }
    }
    assert!(cuts > 20, "only {cuts} runs were cut");
}
