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
            let file = m.open(ino);
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
            {
                let file = m.open(ino);
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
            let node = m.store.get(ino).unwrap();
            let state = m.files.use_file(ino).unwrap();
            let _ = m.files.test_begin_chain(&state, 5 * PAGE);
            let _ = m.store.sync();
            drop(state);
            let _ = m.files.finish_chain(&node);
            let _ = m.store.sync();
        });
        let node = m.store.get(ino).unwrap();
        interrupted += m.inode(ino).pending_truncate.is_some() as u32;
        m.files.finish_chain(&node).unwrap();
        let inode = m.inode(ino);
        assert_eq!(inode.pending_truncate, None);
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
