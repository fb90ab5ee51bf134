//! Reading without a copy: what guards show is what a read brings, and stays that.

use super::*;
use crate::data::PageGuard;

fn bytes(guards: &[PageGuard]) -> Vec<u8> {
    guards.iter().flat_map(|guard| guard.to_vec()).collect()
}

/// Guards of a range, as many as can be had, against a read of it.
fn check(m: &Mounted, file: &OpenFile, offset: u64, len: usize) -> Vec<PageGuard> {
    let mut read = vec![0; len];
    let count = m.files.read(file, offset, &mut read).unwrap();
    let guards = m.files.read_guards(file, offset, len as u64).unwrap();
    assert_eq!(bytes(&guards), read[..count], "{offset} {len}");
    let mut at = offset;
    for guard in &guards {
        assert_eq!(guard.offset(), at);
        at += guard.len() as u64;
    }
    guards
}

/// In the inode, as a logged tail, in blocks, in holes and behind the end; in memory and not.
#[test]
fn guards_show_what_a_read_brings_wherever_that_lies() {
    let world = World::new(3, 64, 1024);
    let m = world.mount();
    let inos: Vec<Ino> = (0..4).map(|_| m.make()).collect();
    let lens = [40, 3 * PAGE as usize + 17, 12 * PAGE as usize, 0];
    for (seed, (ino, len)) in inos.iter().zip(lens).enumerate() {
        let file = m.open(*ino);
        m.write(&file, 0, &pattern(seed as u64, len));
        m.files.fsync(&file, true).unwrap();
        if seed == 2 {
            m.write(&file, 40 * PAGE, b"behind a hole");
        }
    }
    let look = |m: &Mounted| {
        for ino in &inos {
            let file = m.open(*ino);
            for (offset, len) in [
                (0, 1),
                (0, 4096),
                (5, 4096),
                (8190, 3),
                (4096, 9000),
                (39 * PAGE + 5, 20_000),
                (1 << 40, 10),
            ] {
                check(m, &file, offset, len);
            }
            assert!(
                m.files
                    .read_guards(&file, u64::MAX - 3, 9)
                    .unwrap()
                    .is_empty()
            );
            assert!(m.files.read_guards(&file, 0, 0).unwrap().is_empty());
            let past = m.files.open(&m.owners, *ino, libc::O_RDWR | libc::O_DIRECT);
            assert!(
                m.files
                    .read_guards(&past.unwrap(), 0, 9)
                    .unwrap()
                    .is_empty()
            );
        }
    };
    look(&m);
    m.close();
    let m = world.mount();
    look(&m);
    m.close();
}

/// Whatever is done to the file, and when all that is left is the guard.
#[test]
fn guards_keep_what_they_show() {
    let world = World::new(4, 64, 16);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    let past = m.files.open(&m.owners, ino, libc::O_RDWR | libc::O_DIRECT);
    let past = past.unwrap();
    const SHOWN: u64 = 2 * PAGE;
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let elsewhere = || {
        (10..60).for_each(|page| m.write(&file, page * PAGE, &[5; PAGE as usize]));
    };
    let changes: [&dyn Fn(); 7] = [
        &|| m.write(&file, 100, b"over"),
        &|| m.write(&file, 0, &[3; 3 * PAGE as usize]),
        &|| m.write(&past, 0, &[4; 2 * PAGE as usize]),
        &|| m.files.truncate(ino, 10).unwrap(),
        &|| m.files.fallocate(&file, punch, 0, SHOWN).unwrap(),
        &|| m.files.write_back_all().unwrap(),
        &elsewhere,
    ];
    let mut kept = Vec::new();
    for (seed, change) in (0..).zip(changes) {
        let content = pattern(seed, SHOWN as usize);
        m.write(&file, 0, &content);
        if seed % 2 == 0 {
            m.files.write_back_all().unwrap();
        }
        let guards = m.files.read_guards(&file, 0, SHOWN).unwrap();
        assert_eq!(bytes(&guards), content);
        change();
        assert_eq!(bytes(&guards), content, "change {seed}");
        let mut now = vec![0; SHOWN as usize];
        let len = m.files.read(&file, 0, &mut now).unwrap();
        assert_eq!(now[..len] == content, seed > 4, "change {seed} is seen");
        drop(guards);
    }
    m.write(&file, 0, &pattern(9, SHOWN as usize));
    kept.extend(m.files.read_guards(&file, 0, SHOWN).unwrap());
    drop((file, past));
    m.delete(ino);
    m.close();
    assert_eq!(bytes(&kept), pattern(9, SHOWN as usize));
}

/// As many as there may be; the rest is read as ever, and so is what is written meanwhile.
#[test]
fn guards_are_few_and_hold_up_nobody() {
    let world = World::new(5, 64, 64);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    let content = pattern(1, 32 * PAGE as usize);
    m.write(&file, 0, &content);
    let guards = m.files.read_guards(&file, 0, 32 * PAGE).unwrap();
    assert!((1..32).contains(&guards.len()));
    assert_eq!(bytes(&guards), content[..guards.len() * PAGE as usize]);
    let behind = guards.len() as u64 * PAGE;
    assert!(m.files.read_guards(&file, behind, PAGE).unwrap().is_empty());
    for round in 0..3 {
        let content = pattern(round + 2, 200 * PAGE as usize);
        m.write(&file, 0, &content);
        m.files.write_back_all().unwrap();
        assert_eq!(m.contents(ino), content);
    }
    assert_eq!(bytes(&guards), content[..behind as usize]);
    drop(guards);
    assert_eq!(m.files.read_guards(&file, behind, PAGE).unwrap().len(), 1);
    m.close();
}

/// What was loaded for the range's end had pushed out its beginning, and no page got a guard.
#[test]
fn guards_of_a_long_range_that_is_not_cached_are_as_many_as_may_be() {
    let content = pattern(4, 2 << 20);
    for frames in [16, 64, 128, 256, 512, 1024, 8192] {
        let world = World::new(6, 64, frames);
        let m = world.mount();
        let ino = m.make();
        m.write(&m.open(ino), 0, &content);
        m.close();
        let m = world.mount();
        let file = m.open(ino);
        let most = m.files.pages.guards_left();
        let mut at = 0;
        while at < content.len() {
            let guards = m.files.read_guards(&file, at as u64, 1 << 20).unwrap();
            assert!((1..=most).contains(&guards.len()));
            assert!(at > 0 || guards.len() == most, "{frames}: {}", guards.len());
            let shown = bytes(&guards);
            assert_eq!(shown, content[at..at + shown.len()]);
            at += shown.len();
        }
        // While somebody has them all, nothing is loaded for others.
        let guards = m.files.read_guards(&file, 0, 1 << 20).unwrap();
        assert_eq!((guards.len(), m.files.pages.guards_left()), (most, 0));
        let inserted = || m.files.page_counters().inserted;
        let before = inserted();
        for page in most as u64..512 {
            let more = m.files.read_guards(&file, page * PAGE, PAGE).unwrap();
            assert!(more.is_empty());
        }
        assert_eq!(inserted(), before);
    }
}
