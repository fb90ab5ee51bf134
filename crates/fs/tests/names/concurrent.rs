//! Many threads on the same directories.

use crate::world::{World, list};
use base::rng::Rng;
use fs::content::TreeId;
use fs::{Caller, Error, FileSystem, Ino, ROOT};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

fn touch(fs: &FileSystem, dir: Ino, name: &str) {
    fs.mknod(&Caller::root(), dir, name.as_bytes(), libc::S_IFREG, 0)
        .unwrap();
}

/// Names that exist all the time are listed exactly once, however others come and go.
#[test]
fn a_listing_misses_and_repeats_nothing_that_stays() {
    let world = World::new(1, 128 << 20, 1);
    let fs = world.open();
    let dir = fs.mkdir(&Caller::root(), ROOT, b"d", 0o755).unwrap().ino;
    for i in 0..2000 {
        touch(&fs, dir, &format!("stays-{i}"));
    }
    let done = AtomicBool::new(false);
    base::thread::parallel(3, |i| {
        let mut rng = Rng::new(i as u64);
        if i == 0 {
            for _ in 0..30 {
                let found = list(&fs, dir, rng.range(1, 300) as usize);
                let stays: Vec<_> = found
                    .iter()
                    .filter(|(n, _)| n.starts_with(b"stays"))
                    .collect();
                let unique: HashSet<_> = stays.iter().map(|(n, _)| n).collect();
                assert_eq!((stays.len(), unique.len()), (2000, 2000));
            }
            done.store(true, Ordering::Relaxed);
            return;
        }
        let mut round = 0;
        while !done.load(Ordering::Relaxed) {
            round += 1;
            for n in 0..200 {
                touch(&fs, dir, &format!("goes-{i}-{round}-{n}"));
            }
            for n in 0..200 {
                let name = format!("goes-{i}-{round}-{n}");
                fs.unlink(&Caller::root(), dir, name.as_bytes()).unwrap();
            }
        }
    });
    assert_eq!(list(&fs, dir, 100).len(), 2000);
    fs.close().unwrap();
}

/// Threads rename directories into one another at random; the tree stays a tree.
#[test]
fn renames_at_once_make_no_cycle() {
    let world = World::new(1, 128 << 20, 2);
    let fs = world.open();
    let who = Caller::root();
    let mut dirs = vec![ROOT];
    for i in 0..8 {
        let name = format!("d{i}");
        dirs.push(fs.mkdir(&who, ROOT, name.as_bytes(), 0o755).unwrap().ino);
    }
    // So that their numbers stay theirs.
    dirs.iter().for_each(|dir| fs.ref_inode(*dir));
    base::thread::parallel(4, |i| {
        let mut rng = Rng::new(100 + i as u64);
        for _ in 0..1500 {
            let (from, to) = (*rng.pick(&dirs), *rng.pick(&dirs));
            let (a, b) = (rng.below(8), rng.below(8));
            let flags = *rng.pick(&[0, fs::RENAME_NOREPLACE, fs::RENAME_EXCHANGE]);
            let (a, b) = (format!("d{a}"), format!("d{b}"));
            match fs.rename(&who, from, a.as_bytes(), to, b.as_bytes(), flags) {
                Ok(())
                | Err(Error::NotFound | Error::Exists | Error::NotEmpty | Error::Invalid(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }
    });
    dirs.iter().for_each(|dir| fs.forget(*dir, 1));
    // Every directory that is left is reached from the root exactly once.
    let (mut todo, mut seen) = (vec![ROOT], HashSet::new());
    while let Some(dir) = todo.pop() {
        assert!(seen.insert(dir));
        let children = list(&fs, dir, 10);
        assert_eq!(fs.getattr(dir).unwrap().nlink as usize, 2 + children.len());
        for (_, child) in children {
            assert_eq!(fs.lookup(child, b"..").unwrap().ino, dir);
            todo.push(child);
        }
    }
    fs.store().checkpoint().unwrap();
    assert_eq!(fs.store().space().nodes as usize, seen.len() + 16);
    fs.close().unwrap();
}

/// Links to one file come and go in several directories; its count is right in the end.
/// Who renames what another is just renaming to the same name finds nothing. Both were told that they had done it: each saw the file by both names, one after the other.
#[test]
fn of_two_who_rename_a_file_at_once_one_does() {
    const ROUNDS: usize = 3000;
    let world = World::new(4, 128 << 20, 2);
    let fs = world.open();
    let who = Caller::root();
    for others in [0, 500] {
        let dir = fs
            .mkdir(&who, ROOT, format!("d{others}").as_bytes(), 0o755)
            .unwrap()
            .ino;
        for i in 0..others {
            touch(&fs, dir, &format!("other-{i}"));
        }
        // What has begun, how often it was done or there was nothing to do, and how often both did it.
        let [round, done, nothing, wrong] = [(); 4].map(|()| AtomicUsize::new(0));
        let ended = |n: usize| done.load(Ordering::SeqCst) + nothing.load(Ordering::SeqCst) == n;
        base::thread::parallel(2, |thread| {
            for n in 1..=ROUNDS {
                if thread == 0 {
                    touch(&fs, dir, "job");
                    round.store(n, Ordering::SeqCst);
                }
                while round.load(Ordering::SeqCst) < n {
                    base::thread::yield_now();
                }
                match fs.rename(&who, dir, b"job", dir, b"taken", 0) {
                    Ok(()) => done.fetch_add(1, Ordering::SeqCst),
                    Err(Error::NotFound) => nothing.fetch_add(1, Ordering::SeqCst),
                    Err(_) => {
                        wrong.fetch_add(1, Ordering::SeqCst)
                            + nothing.fetch_add(1, Ordering::SeqCst)
                    }
                };
                if thread == 0 {
                    while !ended(2 * n) {
                        base::thread::yield_now();
                    }
                    if done.swap(n, Ordering::SeqCst) != n {
                        wrong.fetch_add(1, Ordering::SeqCst);
                        nothing.store(n, Ordering::SeqCst);
                    }
                    fs.unlink(&who, dir, b"taken").unwrap();
                }
            }
        });
        assert_eq!(wrong.into_inner(), 0);
        // Of two names that one file has for long both stay.
        touch(&fs, dir, "one");
        let one = fs.lookup(dir, b"one").unwrap().ino;
        fs.link(&who, one, dir, b"two").unwrap();
        fs.rename(&who, dir, b"one", dir, b"two", 0).unwrap();
        assert_eq!(fs.lookup(dir, b"one").unwrap().nlink, 2);
    }
    fs.close().unwrap();
}

/// However many others come before, an operation on names is tried as long as they do.
#[test]
fn whoever_others_come_before_is_not_refused() {
    const THREADS: usize = 24;
    let world = World::new(5, 128 << 20, 2);
    let fs = world.open();
    base::thread::parallel(THREADS, |thread| {
        let who = Caller::root();
        for _ in 0..100 {
            if thread == 0 {
                match fs.unlink(&who, ROOT, b"target") {
                    Ok(()) | Err(Error::NotFound) => {}
                    Err(error) => panic!("{error}"),
                }
                continue;
            }
            let name = format!("t{thread}");
            touch(&fs, ROOT, &name);
            fs.rename(&who, ROOT, name.as_bytes(), ROOT, b"target", 0)
                .unwrap();
        }
    });
    fs.close().unwrap();
}

#[test]
fn links_and_unlinks_at_once_keep_the_count() {
    let world = World::new(1, 128 << 20, 3);
    let fs = world.open();
    let who = Caller::root();
    let dirs: Vec<Ino> = (0..4)
        .map(|i| {
            let name = format!("d{i}");
            fs.mkdir(&who, ROOT, name.as_bytes(), 0o755).unwrap().ino
        })
        .collect();
    let file = fs.mknod(&who, ROOT, b"file", libc::S_IFREG, 0).unwrap().ino;
    base::thread::parallel(4, |i| {
        let mut rng = Rng::new(i as u64);
        for _ in 0..2000 {
            let name = format!("{}", rng.below(5));
            let (dir, other) = (*rng.pick(&dirs), *rng.pick(&dirs));
            let outcome = match rng.below(3) {
                0 => fs.link(&who, file, dir, name.as_bytes()).map(|_| ()),
                1 => fs.unlink(&who, dir, name.as_bytes()),
                _ => fs.rename(&who, dir, name.as_bytes(), other, b"0", 0),
            };
            match outcome {
                Ok(()) | Err(Error::Exists | Error::NotFound) => {}
                Err(error) => panic!("{error}"),
            }
        }
    });
    let links: usize = dirs.iter().map(|d| list(&fs, *d, 10).len()).sum();
    assert_eq!(fs.getattr(file).unwrap().nlink as usize, 1 + links);
    fs.close().unwrap();
}

/// Leaves that each index node right below a directory's root has.
fn leaves_of_index_nodes(fs: &FileSystem, dir: Ino) -> Vec<usize> {
    let node = |nid| fs.store().get(nid).unwrap().into_read().unwrap();
    let root = node(dir)
        .inode()
        .unwrap()
        .root(TreeId::Body)
        .unwrap()
        .clone();
    assert_eq!(root.depth, 1);
    let children = root.children.iter();
    children
        .map(|child| node(child.nid).index().unwrap().len())
        .collect()
}

#[test]
fn an_index_node_of_a_crowded_directory_is_split_in_eight() {
    const WORKERS: usize = 3;
    const NAMES: usize = 5000;
    let fs = World::new(1, 256 << 20, 1).open();
    let made = fs.mkdir(&Caller::root(), ROOT, b"shared", 0o755);
    let dir = made.unwrap().ino;
    let turns = AtomicUsize::new(0);
    base::thread::parallel(WORKERS, |worker| {
        for i in 0..NAMES {
            // In turn, so that it is crowded however they run.
            while turns.load(Ordering::Acquire) != i * WORKERS + worker {
                base::thread::yield_now();
            }
            touch(&fs, dir, &format!("{worker}-{i}"));
            turns.fetch_add(1, Ordering::Release);
        }
    });
    let leaves = leaves_of_index_nodes(&fs, dir);
    // Halves of one that is full would have 16 each at least.
    assert!(leaves.len() >= 8, "{leaves:?}");
    assert!(leaves.iter().all(|&n| (4..=32).contains(&n)), "{leaves:?}");
    assert!(leaves.iter().any(|&n| n < 16), "{leaves:?}");
    assert_eq!(list(&fs, dir, 1000).len(), WORKERS * NAMES);
    for i in 0..NAMES {
        let name = format!("{}-{i}", i % WORKERS);
        assert!(fs.lookup(dir, name.as_bytes()).is_ok());
    }
    fs.close().unwrap();
}

/// Step `k` of a worker: files are made in a directory of its own, moved to one that all
/// share, and removed there later.
fn work(fs: &FileSystem, worker: usize, own: Ino, shared: Ino, k: u64) -> Result<(), Error> {
    let who = Caller::root();
    let name = |k: u64| format!("{k}").into_bytes();
    let moved = |k: u64| format!("{worker}-{k}").into_bytes();
    match k % 4 {
        0 | 2 => fs
            .mknod(&who, own, &name(k), libc::S_IFREG | 0o600, 0)
            .map(|_| ()),
        1 => fs.rename(&who, own, &name(k - 1), shared, &moved(k - 1), 0),
        _ if k >= 43 => fs.unlink(&who, shared, &moved(k - 43)),
        _ => Ok(()),
    }
}

/// The names in both directories after `k` steps.
fn worked(worker: usize, k: u64) -> (HashSet<Vec<u8>>, HashSet<Vec<u8>>) {
    let (mut own, mut shared) = (HashSet::new(), HashSet::new());
    for k in 0..k {
        match k % 4 {
            0 | 2 => drop(own.insert(format!("{k}").into_bytes())),
            1 => {
                own.remove(format!("{}", k - 1).as_bytes());
                shared.insert(format!("{worker}-{}", k - 1).into_bytes());
            }
            _ if k >= 43 => drop(shared.remove(format!("{worker}-{}", k - 43).as_bytes())),
            _ => {}
        }
    }
    (own, shared)
}

/// The power goes while many threads work; each finds its names as after one of its steps, and
/// not before the last one it synced.
#[test]
fn a_power_cut_in_a_crowd_leaves_each_a_prefix_of_its_work() {
    const WORKERS: usize = 4;
    for seed in 1..=8 {
        let mut rng = Rng::new(seed);
        let mut world = World::new(2, 64 << 20, seed);
        world.options.store.background = seed % 2 == 0;
        let fs = world.open();
        let make = |name: String| {
            fs.mkdir(&Caller::root(), ROOT, name.as_bytes(), 0o755)
                .unwrap()
                .ino
        };
        let shared = make("shared".into());
        let own: Vec<Ino> = (0..WORKERS).map(|i| make(format!("{i}"))).collect();
        fs.sync().unwrap();
        let cut = world.switch.operations() + rng.below(200);
        world.switch.cut_after(cut);
        let outcomes = base::thread::parallel(WORKERS, |i| {
            let mut rng = Rng::new(seed * 100 + i as u64);
            let mut synced = 0;
            for k in 0..20_000 {
                if work(&fs, i, own[i], shared, k).is_err() {
                    return (synced, k + 1);
                }
                if rng.one_in(40) {
                    if fs.sync().is_err() {
                        return (synced, k + 1);
                    }
                    synced = k + 1;
                }
            }
            (synced, 20_000)
        });
        world.switch.cut_now();
        drop(fs);
        world.restart(&mut rng);
        let fs = world.open();
        let names = |dir| list(&fs, dir, 100).into_iter().map(|(name, _)| name);
        let all: HashSet<Vec<u8>> = names(shared).collect();
        for (i, (synced, last)) in outcomes.into_iter().enumerate() {
            let mine: HashSet<Vec<u8>> = names(own[i]).collect();
            let prefix = format!("{i}-").into_bytes();
            let moved: HashSet<_> = all
                .iter()
                .filter(|n| n.starts_with(&prefix))
                .cloned()
                .collect();
            // Names tell the step: two are made and one is moved in every four.
            let near = mine.len() as u64 * 4;
            let found = (synced.max(near.saturating_sub(8))..=last.min(near + 8))
                .find(|k| worked(i, *k) == (mine.clone(), moved.clone()));
            assert!(
                found.is_some(),
                "seed {seed}: worker {i} synced {synced} of {last} steps, has {} and {} names",
                mine.len(),
                moved.len()
            );
        }
        fs.close().unwrap();
    }
}
