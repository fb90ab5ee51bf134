//! Atomic writes of open files.

use crate::world::World;
use base::rng::Rng;
use fs::{Caller, Error, FileSystem, Ino, OpenFile, ROOT, Value};
use std::sync::Arc;

const PAGE: usize = 4096;

fn make(fs: &FileSystem, name: &[u8], data: &[u8]) -> Arc<OpenFile> {
    let made = fs.create(&Caller::root(), ROOT, name, 0o644, libc::O_RDWR);
    let (_, file) = made.unwrap();
    if !data.is_empty() {
        assert_eq!(fs.write(&file, 0, data).unwrap(), data.len());
    }
    file
}

fn contents(fs: &FileSystem, ino: Ino) -> Vec<u8> {
    let file = fs.open_file(ino, libc::O_RDONLY).unwrap();
    let mut buf = vec![0; fs.getattr(ino).unwrap().size as usize];
    assert_eq!(fs.read(&file, 0, &mut buf).unwrap(), buf.len());
    buf
}

fn free(fs: &FileSystem) -> u64 {
    fs.statfs().blocks_available
}

fn counted(fs: &FileSystem) -> [f64; 3] {
    ["started", "committed", "aborted"].map(|event| {
        let label = Some(("event", event.to_owned()));
        let all = fs.metrics();
        let of = |metric: &&fs::Metric| {
            metric.name == "sheaf_atomic_writes_total" && metric.label == label
        };
        match all.iter().find(of).expect("it is listed").value {
            Value::Counter(value) => value,
            other => panic!("{other:?}"),
        }
    })
}

/// What all of them had in memory was bounded by 256 MiB, however little the file system may take.
#[test]
fn what_all_have_staged_is_a_share_of_the_memory() {
    let mut world = World::new(9, 64 << 20, 1);
    world.options = world.options.clone().with_memory(64 << 20);
    let most = world.options.atomic_bytes.unwrap();
    assert!(most <= 8 << 20);
    let fs = world.open();
    let files = [make(&fs, b"a", b""), make(&fs, b"b", b"")];
    let mut writes = files
        .each_ref()
        .map(|file| fs.atomic_write(&Caller::root(), file).unwrap());
    let half = vec![1; most / 2 / PAGE * PAGE];
    for write in &mut writes {
        write.write(0, &half).unwrap();
    }
    let [first, second] = &mut writes;
    let more = second.write(half.len() as u64, &[2; 3 * PAGE]);
    assert!(matches!(more, Err(Error::TransactionTooLarge)), "{more:?}");
    first.write(0, &half).unwrap();
    let [first, mut second] = writes;
    drop(first);
    second.write(half.len() as u64, &[2; 3 * PAGE]).unwrap();
    second.commit().unwrap();
    assert_eq!(fs.getattr(files[0].ino()).unwrap().size, 0);
    assert_eq!(contents(&fs, files[1].ino()).len(), half.len() + 3 * PAGE);
}

#[test]
fn a_commit_survives_a_cut_whole_and_what_was_only_staged_leaves_nothing() {
    let mut world = World::new(2, 32 << 20, 1);
    let fs = world.open();
    let file = make(&fs, b"f", &[1; 3 * PAGE]);
    fs.fsync(&file, false).unwrap();
    let ino = file.ino();
    let mut write = fs.atomic_write(&Caller::root(), &file).unwrap();
    write.write(100, &[2; 10]).unwrap();
    write.write(5 * PAGE as u64, &[3; PAGE]).unwrap();
    assert_eq!(contents(&fs, ino), [1; 3 * PAGE], "nobody else sees it");
    let mut seen = vec![9; 8 * PAGE];
    let len = write.read(&file, 0, &mut seen).unwrap();
    assert_eq!(len, 6 * PAGE);
    let mut model = vec![1; 3 * PAGE];
    model[100..110].fill(2);
    model.resize(5 * PAGE, 0);
    model.resize(6 * PAGE, 3);
    assert!(seen[..len] == model);
    // Others' bytes beside the staged ones stay.
    fs.write(&file, 50, &[7; 10]).unwrap();
    model[50..60].fill(7);
    write.commit().unwrap();
    assert!(contents(&fs, ino) == model);
    let mut lost = fs.atomic_write(&Caller::root(), &file).unwrap();
    lost.write(0, &[8; 2 * PAGE]).unwrap();
    assert_eq!(counted(&fs), [2.0, 1.0, 0.0]);
    drop((lost, file));
    assert_eq!(counted(&fs), [2.0, 1.0, 1.0]);
    world.switch.cut_now();
    drop(fs);
    world.restart(&mut Rng::new(3));
    let fs = world.open();
    assert!(contents(&fs, ino) == model);
    world.check();
}

/// Against a plain vector.
#[test]
fn reads_see_what_was_staged_over_what_the_file_holds() {
    let world = World::new(1, 64 << 20, 2);
    let fs = world.open();
    let mut rng = Rng::new(11);
    for round in 0..60 {
        let mut model: Vec<u8> = (0..rng.below(20_000)).map(|i| (i % 251) as u8).collect();
        let file = make(&fs, format!("f{round}").as_bytes(), &model);
        let mut write = fs.atomic_write(&Caller::root(), &file).unwrap();
        for step in 0..rng.range(1, 8) {
            if rng.one_in(4) {
                let size = rng.below(24_000);
                write.truncate(size).unwrap();
                model.resize(size as usize, 0);
            } else {
                let (at, len) = (rng.below(20_000), rng.range(1, 9000));
                write
                    .write(at, &vec![100 + step as u8; len as usize])
                    .unwrap();
                let end = (at + len) as usize;
                model.resize(model.len().max(end), 0);
                model[at as usize..end].fill(100 + step as u8);
            }
            let base = fs.getattr(file.ino()).unwrap().size;
            assert_eq!(write.size(base), model.len() as u64);
            let from = rng.below(25_000) as usize;
            let mut seen = vec![9; rng.range(1, 10_000) as usize];
            let len = write.read(&file, from as u64, &mut seen).unwrap();
            let wanted = &model[from.min(model.len())..];
            let wanted = &wanted[..wanted.len().min(seen.len())];
            assert!(seen[..len] == *wanted, "round {round} step {step}");
        }
        write.commit().unwrap();
        assert!(contents(&fs, file.ino()) == model, "round {round}");
    }
    drop(fs);
    world.check();
}

#[test]
fn what_is_more_than_memory_may_hold_is_refused_and_space_comes_back() {
    let world = World::new(1, 64 << 20, 2);
    let fs = world.open();
    let file = make(&fs, b"f", &[1; PAGE]);
    fs.sync().unwrap();
    let before = free(&fs);
    let mut write = fs.atomic_write(&Caller::root(), &file).unwrap();
    let chunk = vec![5; 1 << 20];
    let mut staged = 0;
    let error = loop {
        match write.write(staged, &chunk) {
            Ok(()) => staged += chunk.len() as u64,
            Err(error) => break error,
        }
    };
    assert!(
        matches!(error, Error::NoSpace | Error::TransactionTooLarge),
        "{error}"
    );
    assert!(free(&fs) < before);
    drop(write);
    assert_eq!(free(&fs), before);
    // More than is written at once under the file's locks.
    let mut write = fs.atomic_write(&Caller::root(), &file).unwrap();
    for at in 0..12 {
        write.write(at << 20, &chunk).unwrap();
    }
    write.commit().unwrap();
    assert!(contents(&fs, file.ino()) == vec![5; 12 << 20]);
    drop((file, fs));
    world.check();
}

/// A full array could not be emptied so.
#[test]
fn a_cut_is_staged_without_a_free_block() {
    let world = World::new(1, 64 << 20, 2);
    let fs = world.open();
    let file = make(&fs, b"f", &[1; 9 * PAGE]);
    let filler = make(&fs, b"filler", &[]);
    fs.sync().unwrap();
    let mut at = 0;
    for piece in [1 << 20, PAGE] {
        while fs
            .write(&filler, at, &vec![7; piece])
            .is_ok_and(|len| len > 0)
        {
            at = fs.getattr(filler.ino()).unwrap().size;
        }
    }
    let mut write = fs.atomic_write(&Caller::root(), &file).unwrap();
    let grown = write.truncate(20 * PAGE as u64);
    assert!(matches!(grown, Err(Error::NoSpace)), "{grown:?}");
    write.truncate(4 * PAGE as u64 + 10).unwrap();
    write.commit().unwrap();
    assert!(contents(&fs, file.ino()) == vec![1; 4 * PAGE + 10]);
    drop((file, filler, fs));
    world.check();
}

/// Its commit was too large, and staging it was not: SQLite takes up a journal then.
#[test]
fn what_a_commit_would_be_too_large_for_is_not_staged() {
    let world = World::new(1, 64 << 20, 2);
    let fs = world.open();
    let file = make(&fs, b"f", &[1; PAGE]);
    fs.sync().unwrap();
    let mut write = fs.atomic_write(&Caller::root(), &file).unwrap();
    // A byte of each other page, in no order.
    let at = |i: u64| (i * 5003 % 16_384) * 2 * PAGE as u64;
    let mut staged = 0;
    while write.write(at(staged), &[2]).is_ok() {
        staged += 1;
        assert!(staged < 16_384, "that many do not fit");
    }
    let refused = write.write(at(staged), &[2]);
    assert!(
        matches!(refused, Err(Error::TransactionTooLarge)),
        "{refused:?}"
    );
    // What makes no piece more is taken, and what makes one of three.
    write.write(at(0), &[3; 100]).unwrap();
    write.write(at(0), &[3; 3 * PAGE]).unwrap();
    write.commit().unwrap();
    let all = contents(&fs, file.ino());
    for i in 1..staged {
        let at = at(i) as usize;
        assert_eq!(all[at], if at < 3 * PAGE { 3 } else { 2 }, "{i}");
    }
    drop((file, fs));
    world.check();
}

/// Each page lies in a leaf of extents of its own, or nearly so: its commit changes all of these, which nobody had counted, and was refused when SQLite
/// had staged everything, and had no journal that it had synced.
#[test]
fn scattered_pages_of_a_file_in_pieces_are_refused_when_they_are_staged_or_not_at_all() {
    const PAGES: u64 = 40_960;
    let mut world = World::new(4, 64 << 20, 1);
    world.options = world.options.clone().with_memory(8 << 20);
    let fs = world.open();
    let file = make(&fs, b"f", b"");
    for first in 0..2 {
        for page in (first..PAGES).step_by(2) {
            let at = page * PAGE as u64;
            assert_eq!(fs.write(&file, at, &[1; PAGE]).unwrap(), PAGE);
        }
        fs.sync().unwrap();
    }
    let mut refused = 0;
    for (round, count) in [20, 150, 40, 60, 80, 100].into_iter().enumerate() {
        let mut write = fs.atomic_write(&Caller::root(), &file).unwrap();
        let mut staged = Vec::new();
        let value = 2 + round as u8;
        for i in 0..count {
            let page = i * (PAGES / count);
            match write.write(page * PAGE as u64 + 7, &[value; 10]) {
                Ok(()) => staged.push(page),
                Err(Error::TransactionTooLarge) => refused += 1,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(staged.len() >= 20, "{}", staged.len());
        write.commit().unwrap();
        let mut seen = [0; 10];
        for page in staged {
            fs.read(&file, page * PAGE as u64 + 7, &mut seen).unwrap();
            assert_eq!(seen, [value; 10], "{page}");
        }
    }
    assert!(refused > 0);
    // As many that are neighbours reach one leaf or two.
    let mut write = fs.atomic_write(&Caller::root(), &file).unwrap();
    for page in 0..200 {
        write.write(page * 2 * PAGE as u64, &[99; PAGE]).unwrap();
    }
    write.commit().unwrap();
    drop((file, fs));
    world.check();
}

#[test]
fn a_cut_to_the_size_frees_what_is_allocated_behind_it() {
    let world = World::new(1, 64 << 20, 2);
    let fs = world.open();
    let file = make(&fs, b"f", &[1; 9 * PAGE]);
    fs.sync().unwrap();
    let before = fs.getattr(file.ino()).unwrap().blocks;
    fs.fallocate(&file, libc::FALLOC_FL_KEEP_SIZE, 0, 1 << 20)
        .unwrap();
    assert!(fs.getattr(file.ino()).unwrap().blocks > before);
    let mut write = fs.atomic_write(&Caller::root(), &file).unwrap();
    write.truncate(9 * PAGE as u64).unwrap();
    write.commit().unwrap();
    assert_eq!(fs.getattr(file.ino()).unwrap().blocks, before);
    assert!(contents(&fs, file.ino()) == vec![1; 9 * PAGE]);
    drop((file, fs));
    world.check();
}

#[test]
fn what_is_cut_again_counts_no_more() {
    let world = World::new(1, 64 << 20, 2);
    let fs = world.open();
    let file = make(&fs, b"f", &[1; PAGE]);
    fs.sync().unwrap();
    let before = free(&fs);
    let mut write = fs.atomic_write(&Caller::root(), &file).unwrap();
    let mut promised = None;
    // Ten times what there is room for, and more than all may stage.
    for _ in 0..30 {
        write.write(0, &vec![5; 10 << 20]).unwrap();
        assert_eq!(*promised.get_or_insert(free(&fs)), free(&fs));
        write.truncate(0).unwrap();
    }
    // Every other byte of a page, in no order.
    let mut model = vec![0; PAGE];
    for n in 0..PAGE / 2 {
        let at = n * 2 * 1021 % PAGE;
        write.write(at as u64, &[7]).unwrap();
        model[at] = 7;
    }
    write.truncate(PAGE as u64).unwrap();
    write.commit().unwrap();
    assert!(contents(&fs, file.ino()) == model);
    fs.sync().unwrap();
    assert_eq!(free(&fs), before);
    drop((file, fs));
    world.check();
}

#[test]
fn who_may_not_write_or_has_no_name_cannot() {
    let world = World::new(1, 64 << 20, 2);
    let fs = world.open();
    let file = make(&fs, b"f", &[1; PAGE]);
    let reader = fs.open_file(file.ino(), libc::O_RDONLY).unwrap();
    let root = Caller::root();
    assert!(matches!(
        fs.atomic_write(&root, &reader),
        Err(Error::BadHandle)
    ));
    let mut write = fs.atomic_write(&root, &file).unwrap();
    write.write(0, &[2; 10]).unwrap();
    fs.unlink(&root, ROOT, b"f").unwrap();
    write.truncate(5).unwrap();
    assert!(matches!(write.commit(), Err(Error::Stale(_))));
    assert!(matches!(
        fs.atomic_write(&root, &file),
        Err(Error::Stale(_))
    ));
    drop((file, reader, fs));
    world.check();
}

/// It keeps no handle: its file may be gone, and the number another's, of whatever kind.
#[test]
fn a_file_whose_number_is_anothers_by_now_is_stale() {
    let world = World::new(1, 64 << 20, 2);
    let fs = world.open();
    let root = Caller::root();
    let makes: [fn(&FileSystem, &[u8]) -> Ino; 3] = [
        |fs, name| fs.symlink(&Caller::root(), ROOT, name, b"to").unwrap().ino,
        |fs, name| fs.mkdir(&Caller::root(), ROOT, name, 0o755).unwrap().ino,
        |fs, name| make(fs, name, &[1; 10]).ino(),
    ];
    for (kind, make_other) in makes.iter().enumerate() {
        let name = format!("f{kind}");
        let file = make(&fs, name.as_bytes(), &[1; PAGE]);
        let ino = file.ino();
        let mut write = fs.atomic_write(&root, &file).unwrap();
        write.write(0, &[2; 10]).unwrap();
        drop(file);
        fs.unlink(&root, ROOT, name.as_bytes()).unwrap();
        fs.sync().unwrap();
        // Of a file that is gone it tells nothing yet.
        write.truncate(5).unwrap();
        let number_is_used = |n| make_other(&fs, format!("other {kind} {n}").as_bytes()) == ino;
        assert!((0..10_000).any(number_is_used), "numbers are used again");
        write.truncate(100).unwrap();
        let outcome = write.commit();
        assert!(
            matches!(outcome, Err(Error::Stale(stale)) if stale == ino),
            "{outcome:?}"
        );
    }
    drop(fs);
    world.check();
}

/// It showed what was staged over the bytes of the other.
#[test]
fn what_is_staged_is_not_read_by_a_handle_of_another_file() {
    let world = World::new(1, 64 << 20, 3);
    let fs = world.open();
    let root = Caller::root();
    let (file, other) = (make(&fs, b"a", &[1; 100]), make(&fs, b"b", &[2; 100]));
    let ino = file.ino();
    let mut write = fs.atomic_write(&root, &file).unwrap();
    write.write(0, b"new").unwrap();
    let read = |handle: &OpenFile| write.read(handle, 0, &mut [0; 6]);
    assert!(matches!(read(&other), Err(Error::Invalid(_))));
    assert_eq!(read(&file).unwrap(), 6);
    assert_eq!(
        read(&fs.open_file(ino, libc::O_RDONLY).unwrap()).unwrap(),
        6
    );
    // One that has the number by now is another file.
    drop((file, other));
    fs.unlink(&root, ROOT, b"a").unwrap();
    fs.sync().unwrap();
    let number_is_used = |n| make(&fs, format!("{n}").as_bytes(), &[3; 10]).ino() == ino;
    assert!((0..10_000).any(number_is_used), "numbers are used again");
    let later = fs.open_file(ino, libc::O_RDONLY).unwrap();
    assert!(matches!(read(&later), Err(Error::Invalid(_))));
}
