//! Space that transactions take, and what they hold at most.

use crate::world::World;
use crate::{WHO, after_a_cut, begin, contents, make, names, pattern};
use fs::{Error, FileSystem, Ino, ROOT, SetAttr};

#[test]
fn space_that_is_short_is_found_when_it_is_staged() {
    let world = World::new(1, 64 << 20, 8);
    let fs = world.open();
    let old = make(&fs, b"old", &pattern(1, 1 << 20));
    fs.sync().unwrap();
    let mut tx = begin(&fs);
    let chunk = pattern(2, 1 << 20);
    let mut at = 0;
    let outcome = loop {
        match tx.write(old.ino, at, &chunk) {
            Ok(()) => at += chunk.len() as u64,
            Err(error) => break error,
        }
    };
    assert!(matches!(outcome, Error::NoSpace) && at > 16 << 20);
    // What was staged before that is all there is, and has its room.
    tx.commit().unwrap();
    let found = contents(&fs, old.ino);
    assert_eq!(found.len() as u64, at);
    assert!(found.chunks(chunk.len()).all(|part| part == chunk));
    // One call that took a part before it failed: there is nothing to commit, for the reason that it failed.
    let nothing = SetAttr {
        size: Some(0),
        ..SetAttr::default()
    };
    fs.setattr(&WHO(), old.ino, &nothing).unwrap();
    fs.sync().unwrap();
    let mut tx = begin(&fs);
    let much = pattern(3, 64 << 20);
    assert!(matches!(tx.write(old.ino, 0, &much), Err(Error::NoSpace)));
    assert!(matches!(tx.commit(), Err(Error::NoSpace)));
    assert_eq!(fs.getattr(old.ino).unwrap().size, 0);
    fs.close().unwrap();
    world.check();
}

#[test]
fn what_is_written_again_or_cut_takes_no_more_space() {
    let world = World::new(1, 64 << 20, 9);
    let fs = world.open();
    let file = make(&fs, b"file", &pattern(1, 100_000));
    fs.sync().unwrap();
    let mut tx = begin(&fs);
    // Each time more than is kept in memory.
    for round in 0..12 {
        tx.write(file.ino, 0, &pattern(round, 12 << 20)).unwrap();
    }
    for round in 0..12 {
        tx.write(file.ino, 0, &pattern(round, 12 << 20)).unwrap();
        tx.truncate(file.ino, 5).unwrap();
    }
    // As many cuts as promised all blocks, were each to take one.
    for size in 0..16 << 10 {
        tx.truncate(file.ino, size % 3).unwrap();
    }
    let last = pattern(99, 12 << 20);
    tx.write(file.ino, 0, &last).unwrap();
    tx.commit().unwrap();
    assert!(contents(&fs, file.ino) == last);
    fs.close().unwrap();
    world.check();
}

/// Names are made until there is room for no more, and data is written until there is no room for that.
fn fill(fs: &FileSystem, dir: Ino, large: Ino, round: usize) -> usize {
    let mut made = 0;
    loop {
        let name = format!("{round}{made:0200}");
        match fs.symlink(&WHO(), dir, name.as_bytes(), &[b'x'; 900]) {
            Ok(_) => made += 1,
            Err(Error::NoSpace) => break,
            Err(error) => panic!("{error}"),
        }
    }
    let file = fs.open_file(large, libc::O_RDWR).unwrap();
    let mut at = fs.getattr(large).unwrap().size;
    for len in [1 << 20, 4096] {
        let piece = pattern(2, len);
        while let Ok(written) = fs.write(&file, at, &piece) {
            at += written as u64;
        }
    }
    made
}

#[test]
fn what_was_staged_commits_though_others_have_filled_the_array_since() {
    let mut world = World::new(1, 64 << 20, 31);
    let fs = world.open();
    let large = make(&fs, b"large", b"").ino;
    let dir = fs.mkdir(&WHO(), ROOT, b"dir", 0o755).unwrap().ino;
    // Some that commit, and some that do not.
    let staged: Vec<_> = (0..4)
        .map(|n| {
            let mut tx = begin(&fs);
            let own = tx.mkdir(ROOT, format!("tx{n}").as_bytes(), 0o755).unwrap();
            for i in 0..300 {
                let name = format!("{i:0100}");
                let file = tx.create(own, name.as_bytes(), 0o644).unwrap();
                tx.setxattr(file, b"user.a", &[n; 300], 0).unwrap();
                tx.write(file, 0, &pattern(i, 100)).unwrap();
            }
            (own, tx)
        })
        .collect();
    let made = fill(&fs, dir, large, 1);
    assert!(made > 100, "{made}");
    for (n, (own, tx)) in staged.into_iter().enumerate() {
        if n % 2 == 1 {
            drop(tx);
            assert!(fs.getattr(own).is_err());
            continue;
        }
        tx.commit().unwrap();
        assert_eq!(names(&fs, own).len(), 300);
    }
    // What the others had promised is there for all again.
    let more = fill(&fs, dir, large, 2);
    assert!(more > 0, "{more}");
    let fs = world.remount(fs);
    fs.unlink(&WHO(), ROOT, b"large").unwrap();
    fs.close().unwrap();
    world.check();
}

#[test]
fn a_full_array_is_emptied_by_transactions_that_cut_files() {
    let mut world = World::new(1, 64 << 20, 22);
    let fs = world.open();
    let sizes = [0, 8192, 5000];
    let files = [&b"a"[..], b"b", b"c"].map(|name| make(&fs, name, &pattern(1, 20_000)).ino);
    let large = make(&fs, b"large", b"").ino;
    let file = fs.open_file(large, libc::O_RDWR).unwrap();
    let mut at = 0;
    for len in [1 << 20, 4096] {
        let piece = pattern(2, len);
        while let Ok(written) = fs.write(&file, at, &piece) {
            at += written as u64;
        }
    }
    fs.sync().unwrap();
    drop(file);
    let more = begin(&fs).truncate(large, at + 1);
    assert!(matches!(more, Err(Error::NoSpace)), "{more:?}");
    let mut tx = begin(&fs);
    for (ino, size) in files.into_iter().zip(sizes) {
        tx.truncate(ino, size).unwrap();
    }
    tx.commit().unwrap();
    for (ino, size) in files.into_iter().zip(sizes) {
        assert!(contents(&fs, ino) == pattern(1, 20_000)[..size as usize]);
    }
    let mut tx = begin(&fs);
    tx.truncate(large, 0).unwrap();
    tx.commit().unwrap();
    fs.sync().unwrap();
    // What is freed can be written, by what cuts it first as well.
    let mut tx = begin(&fs);
    tx.truncate(large, 0).unwrap();
    tx.write(large, 100, &pattern(3, 1 << 20)).unwrap();
    tx.commit().unwrap();
    let fs = world.remount(fs);
    assert_eq!(fs.getattr(large).unwrap().size, 100 + (1 << 20));
    fs.close().unwrap();
    world.check();
}

/// A cut within a page that was in its block already took another block for it.
#[test]
fn a_cut_of_what_was_staged_takes_no_block_of_a_full_array() {
    let mut world = World::new(2, 64 << 20, 23);
    let fs = world.open();
    let (before, staged) = (pattern(1, 3 << 20), pattern(2, 20 << 20));
    let old = make(&fs, b"old", &before).ino;
    fs.sync().unwrap();
    let mut tx = begin(&fs);
    let new = tx.create(ROOT, b"new", 0o644).unwrap();
    tx.write(new, 0, &staged).unwrap();
    tx.write(old, 0, &staged).unwrap();
    let full = make(&fs, b"full", b"").ino;
    let file = fs.open_file(full, libc::O_RDWR).unwrap();
    let mut at = 0;
    for len in [1 << 20, 4096] {
        let piece = pattern(3, len);
        while let Ok(written) = fs.write(&file, at, &piece) {
            at += written as u64;
        }
    }
    drop(file);
    // Each in a page that is in a block, and in the page of the last one.
    for size in [(13 << 20) + 4095, (9 << 20) + 5, (9 << 20) + 4_u64] {
        for ino in [new, old] {
            tx.truncate(ino, size).unwrap();
            assert_eq!(tx.getattr(ino).unwrap().size, size);
        }
    }
    let end = (9 << 20) + 4;
    // What is added again reads as zeros, before the commit and after it.
    let grown = end + 3000;
    for ino in [new, old] {
        tx.truncate(ino, grown as u64).unwrap();
        let mut tail = vec![1; 4000];
        let len = tx.read(ino, end as u64 - 1000, &mut tail).unwrap();
        assert_eq!(len, 4000);
        assert!(tail[..1000] == staged[end - 1000..end] && tail[1000..].iter().all(|b| *b == 0));
    }
    tx.commit().unwrap();
    let fs = world.remount(fs);
    for ino in [new, old] {
        let found = contents(&fs, ino);
        assert_eq!(found.len(), grown);
        assert!(found[..end] == staged[..end] && found[end..].iter().all(|b| *b == 0));
    }
    fs.close().unwrap();
    world.check();
}

/// Data without a gap counts little, however much it is.
#[test]
fn a_gibibyte_is_one_step() {
    const STEP: usize = 16 << 20;
    let world = World::new(4, 384 << 20, 24);
    let fs = world.open();
    let step = pattern(1, STEP);
    let mut tx = begin(&fs);
    let ino = tx.create(ROOT, b"large", 0o644).unwrap();
    for at in (0..1 << 30).step_by(STEP) {
        tx.write(ino, at, &step).unwrap();
    }
    tx.commit().unwrap();
    let file = fs.open_file(ino, libc::O_RDONLY).unwrap();
    assert_eq!(fs.getattr(ino).unwrap().size, 1 << 30);
    let mut found = vec![0; STEP];
    for at in (0..1 << 30).step_by(8 * STEP) {
        assert_eq!(fs.read(&file, at, &mut found).unwrap(), STEP);
        assert!(found == step);
    }
    drop(file);
    fs.close().unwrap();
    world.check();
}

/// As documented; each run of pages counts.
#[test]
fn pages_that_are_scattered_are_counted() {
    let world = World::new(2, 128 << 20, 25);
    let fs = world.open();
    let ino = make(&fs, b"file", b"").ino;
    let page = pattern(1, 4096);
    let mut tx = begin(&fs);
    let mut pages = 0;
    let refused = loop {
        match tx.write(ino, pages * 8192, &page) {
            Ok(()) => pages += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, Error::TransactionTooLarge), "{refused}");
    assert!((9_000..10_000).contains(&pages), "{pages}");
    drop(tx);
    let mut tx = begin(&fs);
    for at in 0..9_000 {
        tx.write(ino, at * 8192, &page).unwrap();
    }
    tx.commit().unwrap();
    assert!(
        contents(&fs, ino)
            .chunks(8192)
            .all(|two| two[..4096] == page)
    );
    fs.close().unwrap();
    world.check();
}

/// All of it went into the inodes and so into the journal, which had been expected to take a run of pages for each: the commit was too large.
#[test]
fn ten_thousand_small_files_are_one_step() {
    let mut world = World::new(2, 512 << 20, 26);
    let fs = world.open();
    let dir = fs.mkdir(&WHO(), ROOT, b"dir", 0o755).unwrap().ino;
    for (number, count, len) in [(0, 10_000, 300), (1, 2_000, 2_048)] {
        let mut tx = begin(&fs);
        let own = tx
            .mkdir(dir, format!("{number}").as_bytes(), 0o755)
            .unwrap();
        for i in 0..count {
            let ino = tx.create(own, format!("{i}").as_bytes(), 0o644).unwrap();
            tx.write(ino, 0, &pattern(i, len)).unwrap();
        }
        tx.commit().unwrap();
    }
    // Over what is in the inodes, or in blocks.
    let own = fs.lookup(dir, b"1").unwrap().ino;
    let mut tx = begin(&fs);
    for i in 0..2_000 {
        let ino = tx.lookup(own, format!("{i}").as_bytes()).unwrap();
        match i % 4 {
            0 => tx.truncate(ino, 2_000).unwrap(),
            _ => tx.write(ino, 1_000, &pattern(i + 1, 1_000)).unwrap(),
        }
    }
    tx.commit().unwrap();
    let fs = after_a_cut(&mut world, fs);
    let dir = fs.lookup(ROOT, b"dir").unwrap().ino;
    for (number, count, len) in [(0, 10_000, 300), (1, 2_000, 2_048)] {
        let own = fs.lookup(dir, format!("{number}").as_bytes()).unwrap().ino;
        assert_eq!(names(&fs, own).len(), count);
        for i in (0..count as u64).step_by(97) {
            let ino = fs.lookup(own, format!("{i}").as_bytes()).unwrap().ino;
            let mut wanted = pattern(i, len);
            match (number, i % 4) {
                (0, _) => {}
                (_, 0) => wanted.truncate(2_000),
                _ => wanted[1_000..2_000].copy_from_slice(&pattern(i + 1, 1_000)),
            }
            assert!(contents(&fs, ino) == wanted, "{number} {i}");
        }
    }
    fs.close().unwrap();
    world.check();
}

/// Each page had a write of its own then, and counted as a run of its own; for each all pages of the file were looked through.
#[test]
fn pages_that_follow_each_other_count_little_whatever_else_is_in_memory() {
    const PAGES: u64 = 300 << 8;
    let world = World::new(1, 512 << 20, 27);
    let fs = world.open();
    let mut tx = begin(&fs);
    // All that fits memory, and more parts of pages than fit it, which stay there.
    let first = tx.create(ROOT, b"first", 0o644).unwrap();
    tx.write(first, 0, &pattern(1, 8 << 20)).unwrap();
    for i in 0..3_000 {
        let ino = tx.create(ROOT, format!("{i}").as_bytes(), 0o644).unwrap();
        tx.write(ino, 0, b"small").unwrap();
    }
    let second = tx.create(ROOT, b"second", 0o644).unwrap();
    let mut page = [5; 4096];
    for number in 0..PAGES {
        page[..8].copy_from_slice(&number.to_le_bytes());
        tx.write(second, number * 4096, &page).unwrap();
    }
    tx.commit().unwrap();
    assert!(contents(&fs, first) == pattern(1, 8 << 20));
    let file = fs.open_file(second, libc::O_RDONLY).unwrap();
    for number in (0..PAGES).step_by(101) {
        let mut found = [0; 4096];
        assert_eq!(fs.read(&file, number * 4096, &mut found).unwrap(), 4096);
        page[..8].copy_from_slice(&number.to_le_bytes());
        assert!(found == page, "{number}");
    }
    drop(file);
    fs.close().unwrap();
    world.check();
}

/// A run of blocks stayed until the last page in it was written again.
#[test]
fn what_is_written_again_in_parts_takes_no_more_space() {
    const LEN: usize = 12 << 20;
    const PAGES: usize = LEN >> 12;
    let mut world = World::new(1, 64 << 20, 28);
    let fs = world.open();
    let ino = make(&fs, b"file", b"").ino;
    let mut tx = begin(&fs);
    let mut wanted = pattern(1, LEN);
    tx.write(ino, 0, &wanted).unwrap();
    for round in 0..20 {
        for page in (0..PAGES).filter(|page| page % 1024 != round) {
            let bytes = &mut wanted[page << 12..][..4096];
            bytes[..8].copy_from_slice(&(round as u64).to_le_bytes());
            tx.write(ino, (page << 12) as u64, bytes).unwrap();
        }
    }
    // The same by cuts that leave one page more of what was stored before.
    for round in 1..20 {
        let left = round << 20;
        tx.truncate(ino, (PAGES.min(left >> 12) << 12) as u64)
            .unwrap();
        if left < LEN {
            wanted[left..].copy_from_slice(&pattern(round as u64, LEN - left));
            tx.write(ino, left as u64, &wanted[left..]).unwrap();
        }
    }
    // Nor does it take any of a full array.
    let full = make(&fs, b"full", b"").ino;
    let file = fs.open_file(full, libc::O_RDWR).unwrap();
    let mut at = 0;
    for len in [1 << 20, 4096] {
        let piece = pattern(3, len);
        while let Ok(written) = fs.write(&file, at, &piece) {
            at += written as u64;
        }
    }
    drop(file);
    wanted = pattern(4, LEN);
    for page in (0..PAGES).rev() {
        let at = page << 12;
        tx.write(ino, at as u64, &wanted[at..at + 4096]).unwrap();
    }
    wanted[..LEN - 10].copy_from_slice(&pattern(5, LEN - 10));
    tx.write(ino, 0, &wanted[..LEN - 10]).unwrap();
    tx.commit().unwrap();
    let fs = after_a_cut(&mut world, fs);
    assert!(contents(&fs, ino) == wanted);
    fs.close().unwrap();
    world.check();
}
