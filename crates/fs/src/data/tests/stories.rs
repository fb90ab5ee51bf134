use super::*;
use crate::data::meta::MetaLock;
use crate::data::table::Usage;
use crate::data::tail::How;
use crate::data::writeback::Take;
use crate::orphan::OrphanSet;
use crate::times::Stamp;

#[test]
fn a_small_file_lives_in_its_inode_until_it_grows() {
    let world = World::new(1, 64, 64);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, b"hello");
    m.files.fsync(&file, false).unwrap();
    assert!(matches!(&m.inode(ino).body, Body::Inline(bytes) if bytes == b"hello"));
    assert_eq!(m.check(ino), 0);
    m.write(&file, 5000, b"world");
    m.files.fsync(&file, false).unwrap();
    assert_eq!(m.check(ino), 2);
    let mut expected = b"hello".to_vec();
    expected.resize(5000, 0);
    expected.extend_from_slice(b"world");
    assert_eq!(m.contents(ino), expected);
    drop(file);
    m.close();
    let m = world.mount();
    assert_eq!(m.contents(ino), expected);
}

#[test]
fn data_survives_a_remount_byte_for_byte() {
    let world = World::new(2, 64, 256);
    let m = world.mount();
    let ino = m.make();
    let data = pattern(5, 3_000_001);
    {
        let file = m.open(ino);
        m.write(&file, 0, &data);
    }
    assert_eq!(m.contents(ino), data);
    m.close();
    let m = world.mount();
    assert_eq!(m.contents(ino), data);
    m.check(ino);
}

#[test]
fn a_file_reaches_to_the_largest_offset() {
    let world = World::new(3, 64, 64);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    let last = i64::MAX as u64 - 3;
    m.write(&file, last, b"end");
    assert!(matches!(
        m.files.write(&file, i64::MAX as u64, b"x"),
        Err(Error::FileTooLarge)
    ));
    m.write(&file, 1 << 40, b"middle");
    m.files.fsync(&file, false).unwrap();
    m.check(ino);
    let mut buf = [1u8; 8];
    assert_eq!(m.files.read(&file, last - 2, &mut buf).unwrap(), 5);
    assert_eq!(&buf[..5], b"\0\0end");
    assert_eq!(m.files.seek(&file, 0, libc::SEEK_DATA).unwrap(), 1 << 40);
    assert_eq!(
        m.files.seek(&file, 1 << 40, libc::SEEK_HOLE).unwrap(),
        (1 << 40) + 4096
    );
    m.files.truncate(ino, 7).unwrap();
    assert_eq!(m.check(ino), 0);
    assert_eq!(m.contents(ino), [0; 7]);
}

#[test]
fn a_fragmented_file_has_a_tree_and_gives_everything_back() {
    let mut world = World::new(4, 128, 2048);
    world.options.cache_bytes = 16 << 20;
    let m = world.mount();
    let before = m.free_blocks();
    let ino = m.make();
    {
        let file = m.open(ino);
        // Every other page, from both ends towards the middle: no two extents join.
        for i in 0..2000u64 {
            m.write(&file, i * 2 * PAGE, &i.to_le_bytes());
            m.write(&file, (8000 - i * 2) * PAGE, &i.to_le_bytes());
            if i % 300 == 0 {
                m.files.fsync(&file, false).unwrap();
            }
        }
        m.files.fsync(&file, false).unwrap();
    }
    assert!(m.check(ino) >= 3999);
    assert!(matches!(m.inode(ino).body, Body::Tree(_)));
    let file = m.open(ino);
    for i in 0..2000u64 {
        let mut buf = [0; 8];
        m.files.read(&file, i * 2 * PAGE, &mut buf).unwrap();
        assert_eq!(u64::from_le_bytes(buf), i);
    }
    drop(file);
    m.files.truncate(ino, 3001 * PAGE + 5).unwrap();
    let left = m.check(ino);
    assert!((1500..1502).contains(&left), "{left}");
    assert_eq!(m.inode(ino).seldom.pending_truncate, None);
    m.delete(ino);
    assert_eq!(m.free_blocks(), before);
    m.close();
    let m = world.mount();
    assert_eq!(m.free_blocks(), before);
}

#[test]
fn an_overwrite_needs_no_journal_commit() {
    let world = World::new(5, 64, 64);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &pattern(1, 40_960));
    m.files.fsync(&file, false).unwrap();
    m.commit_more();
    let durable = m.store.durable_epoch();
    for i in 0..10 {
        m.write(&file, i * 4096, &pattern(i, 4096));
        m.files.fsync(&file, false).unwrap();
    }
    assert_eq!(m.store.durable_epoch(), durable);
    // The new mtime shows at once, and is logged when the interval is over.
    let volatile = m.files.volatile(ino, m.inode(ino).generation).unwrap();
    assert!(volatile.times.mtime.unwrap() > m.inode(ino).mtime);
    world.clock.advance(Duration::from_secs(2));
    m.files.fsync(&file, false).unwrap();
    assert!(m.store.durable_epoch() > durable);
    assert_eq!(m.inode(ino).mtime, volatile.times.mtime.unwrap());
}

#[test]
fn a_full_disk_says_so_at_write_and_loses_nothing_accepted() {
    let world = World::new(6, 64, 1024);
    let m = world.mount();
    let before = m.free_blocks();
    let ino = m.make();
    let file = m.open(ino);
    let mut accepted = 0u64;
    let chunk = pattern(9, 300_000);
    loop {
        match m.files.write(&file, accepted, &chunk) {
            Ok(written) => accepted += written as u64,
            Err(error) => {
                assert!(matches!(error, Error::NoSpace), "{error}");
                break;
            }
        }
    }
    assert!(accepted > 20 << 20, "only {accepted} bytes fit");
    m.files.fsync(&file, false).unwrap();
    // Overwriting needs no space.
    m.write(&file, 4096, &[7; 10_000]);
    m.files.fsync(&file, false).unwrap();
    let mut buf = vec![0; chunk.len()];
    let last = accepted / chunk.len() as u64 * chunk.len() as u64;
    let n = m.files.read(&file, last, &mut buf).unwrap();
    assert_eq!(buf[..n], chunk[..n]);
    drop(file);
    m.check(ino);
    m.delete(ino);
    let after = m.free_blocks();
    assert_eq!(after, before);
    let again = m.make();
    let file = m.open(again);
    m.write(&file, 0, &pattern(1, 10 << 20));
    m.files.fsync(&file, false).unwrap();
}

#[test]
fn fallocate_reserves_punches_and_zeroes() {
    let world = World::new(7, 64, 64);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.files
        .fallocate(&file, libc::FALLOC_FL_KEEP_SIZE, 0, 100_000)
        .unwrap();
    assert_eq!((m.size(ino), m.check(ino)), (0, 25));
    m.files.fallocate(&file, 0, 0, 50_000).unwrap();
    assert_eq!(m.size(ino), 50_000);
    assert_eq!(m.contents(ino), vec![0; 50_000]);
    assert!(matches!(
        m.files.seek(&file, 0, libc::SEEK_DATA),
        Err(Error::NoSuchOffset)
    ));
    let mut expected = vec![0; 50_000];
    let data = pattern(3, 20_000);
    expected[10_000..30_000].copy_from_slice(&data);
    m.write(&file, 10_000, &data);
    m.files.fsync(&file, false).unwrap();
    assert_eq!(m.check(ino), 25, "the reserved blocks are used");
    assert_eq!(m.contents(ino), expected);
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    m.files.fallocate(&file, punch, 9_000, 10_000).unwrap();
    expected[9_000..19_000].fill(0);
    assert_eq!(m.contents(ino), expected);
    assert_eq!(m.check(ino), 24);
    m.files
        .fallocate(&file, libc::FALLOC_FL_ZERO_RANGE, 25_000, 40_000)
        .unwrap();
    expected.resize(65_000, 0);
    expected[25_000..].fill(0);
    assert_eq!(m.contents(ino), expected);
    assert_eq!(m.check(ino), 24);
    let collapse = libc::FALLOC_FL_COLLAPSE_RANGE;
    let error = m.files.fallocate(&file, collapse, 0, 4096).unwrap_err();
    assert_eq!(error.errno(), libc::EOPNOTSUPP);
}

#[test]
fn appends_of_many_threads_do_not_overlap() {
    let world = World::new(8, 64, 256);
    let m = world.mount();
    let ino = m.make();
    base::thread::parallel(4, |t| {
        let file = m
            .files
            .open(&m.owners, ino, libc::O_WRONLY | libc::O_APPEND)
            .unwrap();
        for _ in 0..200 {
            m.write(&file, 0, &[t as u8 + 1; 100]);
        }
    });
    let contents = m.contents(ino);
    assert_eq!(contents.len(), 4 * 200 * 100);
    for record in contents.chunks(100) {
        assert!(record.iter().all(|&b| b == record[0] && b != 0));
    }
}

#[test]
fn readers_writers_and_write_back_run_together() {
    let world = World::new(9, 64, 128);
    let m = world.mount();
    let inos: Vec<Ino> = (0..3).map(|_| m.make()).collect();
    base::thread::parallel(4, |t| {
        if t == 3 {
            for _ in 0..100 {
                m.files.write_back_all().unwrap();
                world.clock.advance(Duration::from_secs(6));
                m.files.tick().unwrap();
            }
            return;
        }
        let file = m.open(inos[t]);
        let mut model = vec![0u8; 200_000];
        let mut rng = Rng::new(t as u64);
        for round in 0..400u64 {
            let at = rng.below(190_000) as usize;
            let len = rng.below(9_000) as usize + 1;
            if round % 3 == 2 {
                let mut buf = vec![0; len];
                let n = m.files.read(&file, at as u64, &mut buf).unwrap();
                assert_eq!(buf[..n], model[at..at + n]);
            } else {
                let data = pattern(round, len);
                m.write(&file, at as u64, &data);
                model[at..at + len].copy_from_slice(&data);
            }
            if rng.one_in(20) {
                m.files.fsync(&file, true).unwrap();
            }
        }
    });
    for ino in inos {
        m.files.write_back(ino).unwrap();
        m.check(ino);
    }
}

#[test]
fn copy_range_copies_and_refuses_overlap() {
    let world = World::new(10, 64, 64);
    let m = world.mount();
    let (a, b) = (m.make(), m.make());
    let (from, to) = (m.open(a), m.open(b));
    let data = pattern(4, 2_500_000);
    m.write(&from, 0, &data);
    let copied = m.files.copy_range(&from, 1000, &to, 5, 3_000_000).unwrap();
    assert_eq!(copied, 2_499_000);
    assert_eq!(m.contents(b)[5..], data[1000..]);
    let error = m.files.copy_range(&from, 0, &from, 10, 100).unwrap_err();
    assert_eq!(error.errno(), libc::EINVAL);
}

/// What lies behind the end of the file is not copied, so it overlaps nothing.
#[test]
fn copy_range_within_a_file_ends_where_the_file_did() {
    let world = World::new(12, 64, 64);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    let data = pattern(5, 100_000);
    m.write(&file, 0, &data);
    let copy = |from, to, len| m.files.copy_range(&file, from, &file, to, len);
    assert_eq!(copy(90_000, 0, u64::MAX).unwrap(), 10_000);
    assert_eq!(copy(0, 100_000, u64::MAX).unwrap(), 100_000);
    assert_eq!(m.size(ino), 200_000);
    let contents = m.contents(ino);
    assert_eq!(contents[..10_000], data[90_000..]);
    assert_eq!(contents[10_000..100_000], data[10_000..]);
    assert_eq!(contents[100_000..], contents[..100_000]);
    assert_eq!(copy(200_000, 0, 10).unwrap(), 0);
    assert_eq!(
        copy(0, 199_999, u64::MAX).unwrap_err().errno(),
        libc::EINVAL
    );
    assert_eq!(
        copy(199_998, 199_997, 100).unwrap_err().errno(),
        libc::EINVAL
    );
}

#[test]
fn a_hole_in_a_full_array_needs_no_room() {
    let world = World::new(13, 64, 64);
    let m = world.mount();
    let (small, large) = (m.make(), m.make());
    m.write(&m.open(small), 0, &pattern(6, 100));
    m.write(&m.open(large), 0, &pattern(7, 20 * PAGE as usize));
    m.close();
    let m = world.mount();
    let files = [small, large].map(|ino| m.open(ino));
    m.write(&files[1], 0, &pattern(8, 25 * PAGE as usize));
    let ballast = m.open(m.make());
    let mut at = 0;
    while let Ok(written) = m.files.write(&ballast, at, &[9; 64 * PAGE as usize]) {
        at += written as u64;
    }
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    for file in &files {
        m.files.fallocate(file, punch, 0, 22 * PAGE).unwrap();
    }
    let mut wanted = vec![0; 22 * PAGE as usize];
    wanted.extend(&pattern(8, 25 * PAGE as usize)[wanted.len()..]);
    assert_eq!(
        (m.contents(small), m.contents(large)),
        (vec![0; 100], wanted.clone())
    );
    drop((files, ballast));
    m.close();
    let m = world.mount();
    assert_eq!(
        (m.contents(small), m.contents(large)),
        (vec![0; 100], wanted)
    );
    assert_eq!((m.check(small), m.check(large)), (0, 3));
}

#[test]
fn dirty_pages_go_home_in_the_background_when_they_are_old() {
    let world = World::new(11, 64, 64);
    let m = world.mount();
    let ino = m.make();
    drop(m.open(ino));
    {
        let file = m.open(ino);
        m.write(&file, 0, &pattern(1, 10_000));
    }
    m.files.tick().unwrap();
    assert_eq!(m.inode(ino).size, 0, "too young");
    world.clock.advance(Duration::from_secs(10));
    m.files.tick().unwrap();
    assert_eq!(m.inode(ino).size, 10_000);
    assert_eq!(m.files.pages.dirty(), 0);
    m.files.tick().unwrap();
    let none = |_: &_| panic!("nothing keeps the state");
    m.files.table.each_state(none);
}

#[test]
fn a_disk_full_of_fragments_can_be_emptied() {
    let world = World::new(12, 64, 1024);
    let m = world.mount();
    let before = m.free_blocks();
    let mut inos = Vec::new();
    let mut rng = Rng::new(1);
    'full: loop {
        let ino = m.make();
        inos.push(ino);
        let file = m.open(ino);
        for i in 0..3000u64 {
            let page = if rng.one_in(2) {
                i * 2
            } else {
                100_000 - i * 3
            };
            match m.files.write(&file, page * PAGE, &[1 + i as u8 % 200]) {
                Ok(_) => {}
                Err(error) => {
                    assert!(matches!(error, Error::NoSpace), "{error}");
                    break 'full;
                }
            }
            if rng.one_in(500) {
                m.files.write_back_all().unwrap();
                m.store.checkpoint().unwrap();
            }
        }
    }
    m.files.write_back_all().unwrap();
    m.store.checkpoint().unwrap();
    let mut blocks = 0;
    for ino in &inos {
        blocks += m.check(*ino);
    }
    assert!(blocks > 5_000, "{blocks} blocks fit");
    m.close();
    let m = world.mount();
    for ino in inos {
        m.delete(ino);
    }
    m.store.checkpoint().unwrap();
    // Metadata may hold fewer chunks than before, never more.
    let after = m.free_blocks();
    assert!(after >= before, "{after} of {before} blocks are free");
}

/// Whose last reference went.
struct Gone(Mutex<Vec<Ino>>);

impl LastReference for Gone {
    fn last_reference_gone(&self, ino: Ino) {
        self.0.lock().push(ino);
    }
}

/// A file was closed while write-back had its state in hand, and neither of the two noticed that
/// nobody referred to it any more: an unlinked one kept its space until the next mount.
#[test]
fn the_last_close_is_noticed_while_write_back_uses_the_file() {
    let world = World::new(14, 64, 64);
    let m = world.mount();
    let gone = Arc::new(Gone(Mutex::new(rank::LEAF, Vec::new())));
    let deleter: Weak<Gone> = Arc::downgrade(&gone);
    let orphans = Arc::new(OrphanSet::new());
    m.files.set_deleter(Arc::clone(&orphans), deleter);
    let ino = m.make();
    // One with a name is nobody's business.
    drop(m.open(ino));
    assert!(gone.0.lock().is_empty());
    orphans.add(ino);
    let (file, second) = (m.open(ino), m.open(ino));
    let used = m.files.use_active(ino).unwrap();
    drop(second);
    assert!(gone.0.lock().is_empty());
    drop(file);
    drop(used);
    assert_eq!(*gone.0.lock(), [ino]);
    assert_eq!(m.files.table.inos(), [], "and no state stays");
}

/// A file was deleted while write-back had its state in hand, and its nid went to another, which
/// was closed meanwhile. Whoever left last looked at the old state, so the new one stayed for ever.
#[test]
fn the_state_of_a_closed_file_goes_when_the_one_before_it_was_used_for_longer() {
    let world = World::new(15, 64, 64);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    let used = m.files.use_active(ino).unwrap();
    drop(file);
    m.delete(ino);
    assert_eq!(m.make(), ino, "the nid is used again");
    drop(m.open(ino));
    drop(used);
    assert_eq!(m.files.table.inos(), []);
}

/// What a closed file's state was kept for is superseded by a change of its inode: the state goes with that, not with the next use.
#[test]
fn the_state_of_a_closed_file_goes_when_its_time_is_set() {
    let mut world = World::new(83, 64, 64);
    world.clock = Clock::manual(1_000_000_000_000_000_000);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    world.clock.advance(Duration::from_secs(1));
    assert!(m.files.note_read(&file).unwrap());
    drop(file);
    let has_state = || m.files.table.peek(ino).is_some();
    assert!(has_state(), "the time of the read is not logged yet");
    m.files.changed(ino, m.store.epoch());
    assert!(has_state(), "and a change of something else leaves it");
    assert_eq!(m.files.times_set(ino, true, false), None);
    m.files.changed(ino, m.store.epoch());
    assert!(!has_state() && !m.files.may_be_volatile(ino));
}

/// Who looks after a write took its time, and before its bytes are there, must not find the new content under that time.
#[test]
fn a_look_in_the_middle_of_a_write_does_not_hide_it() {
    let mut world = World::new(77, 64, 64);
    world.clock = Clock::manual_with_ticks(1_000_000_000_000_000_000, Duration::from_secs(60));
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &pattern(1, 100));
    let state = &file.state;
    let look = || m.look(ino);
    m.files.touch(state, 100).unwrap();
    let between = look();
    m.files.note_ahead(state);
    let after = look();
    assert!(after > between);
    // Nobody looked between these.
    m.files.touch(state, 100).unwrap();
    let stamped = state.meta.lock().stamped;
    m.files.note_ahead(state);
    assert_eq!(state.meta.lock().stamped, stamped);
}

impl Mounted {
    /// The mtime that a look at the file shows.
    fn look(&self, ino: Ino) -> Timestamp {
        let inode = self.inode(ino);
        let shown = (self.files).volatile_shown(ino, inode.generation, inode.ctime);
        let mtime = shown.and_then(|shown| shown.times.mtime);
        mtime.unwrap_or(inode.mtime)
    }
}

/// The content is then what it was before the write, under a time that was seen with what was written.
#[test]
fn who_looked_at_what_is_given_up_sees_that_it_is_gone() {
    let mut world = World::new(78, 64, 64);
    world.clock = Clock::manual_with_ticks(1_000_000_000_000_000_000, Duration::from_secs(60));
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &pattern(1, 20_000));
    for device in &world.devices {
        device.fail_writes(device::sim::Times::Always, None);
    }
    assert!(m.files.write_back(ino).is_err());
    let seen = m.look(ino);
    drop(file);
    assert_eq!(m.size(ino), 0);
    assert!(m.look(ino) > seen);
}

/// The file got a newer time, and was told of as lost, though all of it was in its inode: the page that was to go home from there could not be written.
#[test]
fn what_stays_in_the_inode_is_not_given_up() {
    let world = World::new(85, 64, 64);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &pattern(1, 2_900));
    m.files.fsync(&file, false).unwrap();
    let seen = m.look(ino);
    m.files.dirty_page(&file.state, 0).unwrap();
    for device in &world.devices {
        device.fail_writes(device::sim::Times::Always, None);
    }
    assert!(m.files.flush_file(&file.state).is_err());
    drop(file);
    for device in &world.devices {
        device.heal();
    }
    assert_eq!(m.files.table.inos(), []);
    assert_eq!(m.contents(ino), pattern(1, 2_900));
    assert_eq!(m.look(ino), seen);
    m.files.check_losses(0).unwrap();
    m.files.fsync(&m.open(ino), false).unwrap();
}

#[test]
fn what_fallocate_cannot_do_changes_no_time() {
    let world = World::new(79, 64, 64);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &pattern(1, 20_000));
    m.files.fsync(&file, false).unwrap();
    let seen = m.look(ino);
    let mode = libc::FALLOC_FL_COLLAPSE_RANGE;
    let refused = m.files.fallocate(&file, mode, 0, 4096).unwrap_err();
    assert_eq!(refused.errno(), libc::EOPNOTSUPP);
    assert_eq!(m.look(ino), seen);
}

/// A sync waits for what was there when it was called.
#[test]
fn what_is_appended_during_a_sync_is_left_to_the_next() {
    let world = World::new(80, 64, 64);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &pattern(1, 3 * 4096));
    let pass = m
        .files
        .flush_pass(&file.state, 0..2, How::Logged, Take::Dirty);
    assert_eq!(pass.unwrap(), None);
    assert_eq!(m.inode(ino).size, 2 * 4096);
    assert_eq!(m.files.pages.dirty_pages(file.state.key, 0..9, 9), [2]);
    // The rest of the file is a page, and would be logged.
    let pass = m
        .files
        .flush_pass(&file.state, 0..2, How::Logged, Take::Dirty);
    assert_eq!(pass.unwrap(), None);
    assert_eq!(m.inode(ino).size, 2 * 4096);
    m.files.fsync(&file, true).unwrap();
    assert_eq!(m.inode(ino).size, 3 * 4096);
}

/// What is logged may settle only times that are those it has, not the same set again.
#[test]
fn a_time_that_is_set_while_it_is_logged_does_not_hide_a_later_write() {
    let mut world = World::new(81, 64, 64);
    world.clock = Clock::manual_with_ticks(1_000_000_000_000_000_000, Duration::from_secs(60));
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &pattern(1, 100));
    let logged = file.state.meta.lock().times;
    let _ = m.files.times_set(ino, false, true);
    m.write(&file, 0, &pattern(2, 100));
    let stamped = file.state.meta.lock().times.mtime;
    assert_eq!(stamped, logged.mtime, "within a tick");
    file.state.meta.lock().logged_times(logged);
    assert_eq!(file.state.meta.lock().times.mtime, stamped);
}

/// Pages of a range are home after the hint, at once or when the background thread has come round; nothing else is.
#[test]
fn a_range_is_written_ahead_of_its_sync() {
    let world = World::new(82, 64, 64);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &pattern(1, 8 * 4096));
    m.files.fsync(&file, true).unwrap();
    m.write(&file, 0, &pattern(2, 8 * 4096));
    let dirty = || m.files.pages.dirty_pages(file.state.key, 0..9, 9);
    m.files.write_range(&file, 4096..3 * 4096, true).unwrap();
    assert_eq!(dirty(), [0, 3, 4, 5, 6, 7]);
    m.files
        .write_range(&file, 4 * 4096 + 1..5 * 4096 + 1, false)
        .unwrap();
    assert_eq!(dirty(), [0, 3, 4, 5, 6, 7], "it is a hint");
    m.files.tick().unwrap();
    assert_eq!(dirty(), [0, 3, 6, 7]);
    m.files
        .write_range(&file, 9 * 4096..u64::MAX, true)
        .unwrap();
    m.files.write_range(&file, 5..5, true).unwrap();
    assert_eq!(dirty(), [0, 3, 6, 7]);
    m.files.fsync(&file, true).unwrap();
    assert_eq!(dirty(), []);
    assert_eq!(m.contents(ino), pattern(2, 8 * 4096));
}

#[test]
fn a_range_that_cannot_be_written_is_told() {
    let world = World::new(83, 64, 64);
    let m = world.mount();
    let file = m.open(m.make());
    m.write(&file, 0, &pattern(1, 20_000));
    for device in &world.devices {
        device.fail_writes(device::sim::Times::Next(9), None);
    }
    let wait = m.files.write_range(&file, 0..9000, true);
    assert_eq!(wait.unwrap_err().errno(), libc::EIO);
    let hint = m.files.write_range(&file, 0..9000, false);
    assert_eq!(
        hint.unwrap_err().errno(),
        libc::EIO,
        "told until it is opened again"
    );
}

#[test]
fn a_new_file_is_opened_as_it_was_made_unless_somebody_came_first() {
    let world = World::new(96, 64, 256);
    let m = world.mount();
    let shown = Stamp::from(m.files.now());
    let make = || {
        let fresh = m.store.reserve_nid().unwrap();
        let (ino, generation) = (fresh.nid(), fresh.version());
        let inode = Inode::new(libc::S_IFREG | 0o644, generation, m.files.now());
        let mut op = m.store.begin(Need::Grow).unwrap();
        let slot = op.create(fresh, FsNode::Inode(inode));
        let (node, mut entered) = (op.node(slot), None);
        let epoch = op.commit_noting(|epoch| {
            let new = (epoch, 0, shown);
            entered = (m.files).enter_new(node, generation, libc::O_RDWR, new);
        });
        (ino, entered.unwrap(), epoch)
    };
    let open = |entered| Files::handle(&m.owners, entered);
    let (ino, entered, epoch) = make();
    let file = open(entered);
    assert!(m.store.durable_epoch() < epoch);
    m.files.fsync(&file, false).unwrap();
    assert!(m.store.durable_epoch() >= epoch, "a sync is for its record");
    m.write(&file, 0, &[6; 5000]);
    let generation = m.inode(ino).generation;
    let times = m.files.volatile(ino, generation).unwrap().times;
    assert!(Stamp::from(times.mtime.unwrap()) > shown);

    let (ino, entered, _) = make();
    m.write(&m.open(ino), 0, &[7; 5000]);
    let file = open(entered);
    assert_eq!((m.size(ino), m.contents(ino)), (5000, vec![7; 5000]));
    m.write(&file, 5000, &[8]);
    assert_eq!(m.size(ino), 5001);
}

#[test]
fn the_state_of_a_file_is_used_while_an_operation_holds_its_inode() {
    let world = World::new(97, 64, 256);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &[5; 5000]);
    let mut op = m.store.begin(Need::Reclaim).unwrap();
    op.lock(&file.state.node).unwrap();
    let state = m.files.use_active(ino).unwrap();
    assert_eq!(state.size(), file.state.size());
}

#[test]
fn it_is_told_as_long_as_somebody_has_a_file_open_for_reading_and_writing() {
    let world = World::new(98, 64, 256);
    let m = world.mount();
    let ino = m.make();
    let read = m.files.open(&m.owners, ino, libc::O_RDONLY).unwrap();
    assert!(!m.files.may_be_mapped(ino));
    let (first, second) = (m.open(ino), m.open(ino));
    drop(first);
    assert!(m.files.may_be_mapped(ino));
    // Its state stays, for what it writes.
    m.write(&second, 0, &[1; 5000]);
    drop(second);
    assert!(!m.files.may_be_mapped(ino));
    drop(read);
    assert!(!m.files.may_be_mapped(ino) && m.files.table.inos() == [ino]);
    m.files.write_back_all().unwrap();
    assert_eq!(m.files.table.inos(), []);
}

/// Who closes a file that nobody else uses takes no lock of its state.
#[test]
fn states_go_with_the_last_of_those_who_come_and_go_at_once() {
    let world = World::new(99, 64, 256);
    let m = world.mount();
    let inos = [m.make(), m.make()];
    base::thread::parallel(4, |thread| {
        for i in 0..500_usize {
            let ino = inos[i % 2];
            match thread {
                0 => m.write(&m.open(ino), 0, &[i as u8; 100]),
                1 => drop(m.files.use_active(ino)),
                2 if i % 100 == 0 => m.files.write_back_all().unwrap(),
                _ => {
                    let file = m.open(ino);
                    assert!(m.files.table.inos().contains(&ino));
                    drop(file);
                }
            }
        }
    });
    m.files.write_back_all().unwrap();
    assert_eq!(m.files.table.inos(), []);
    assert!(inos.iter().all(|ino| !m.files.may_be_mapped(*ino)));
    assert_eq!(m.contents(inos[1]), [499_usize as u8; 100]);
}

/// Somebody looked at a file that was deleted before he opened it, and its number is another's by now: that one keeps its state.
#[test]
fn who_comes_too_late_does_not_take_the_state_of_a_later_file() {
    let world = World::new(84, 64, 64);
    let m = world.mount();
    let ino = m.make();
    let generation = m.inode(ino).generation;
    m.delete(ino);
    assert_eq!(m.make(), ino, "the nid is used again");
    let file = m.open(ino);
    m.write(&file, 0, &pattern(1, 9000));
    for usage in [Usage::Operation, Usage::Handle { both: true }] {
        let key = FileKey {
            nid: ino,
            generation,
        };
        let node = || m.store.get(ino).unwrap();
        assert!(m.files.table.enter(key, usage, node, |_| {}).is_none());
    }
    m.files.write_back_all().unwrap();
    assert_eq!(m.inode(ino).size, 9000);
}

#[test]
fn who_only_looks_under_the_lock_writes_nothing_that_others_see() {
    let lock = MetaLock::new(format::Nid(9));
    lock.lock().size = 5;
    assert_eq!(lock.size(), 5);
    // As it would never be: told apart from what is written anew.
    lock.shown.size.store(6, Ordering::Relaxed);
    assert_eq!(lock.lock().size, 5);
    assert_eq!(lock.size(), 6);
    lock.lock().dead = true;
    assert!(lock.size() == 5 && lock.is_dead());
}

/// Its new content is half there: it went home once a quarter of the cache was dirty, by whomever.
#[test]
fn an_open_file_that_is_being_replaced_goes_home_when_half_of_the_cache_is_dirty_and_not_before() {
    let world = World::new(71, 64, 256);
    let m = world.mount();
    let (ino, other) = (m.make(), m.make());
    let (file, noise) = (m.open(ino), m.open(other));
    m.write(&file, 0, &pattern(1, 20 * BLOCK_SIZE));
    m.files.write_back_all().unwrap();
    m.files.truncate(ino, 0).unwrap();
    m.write(&file, 0, &pattern(2, 10 * BLOCK_SIZE));
    let is_replaced = || file.state.meta.lock().replaced;
    m.write(&noise, 0, &pattern(3, 80 * BLOCK_SIZE));
    m.files.tick().unwrap();
    assert!(is_replaced(), "a third is dirty");
    // The tick has written that back.
    m.write(&noise, 0, &pattern(4, 100 * BLOCK_SIZE));
    m.write(
        &noise,
        100 * BLOCK_SIZE as u64,
        &pattern(5, 40 * BLOCK_SIZE),
    );
    m.files.tick().unwrap();
    assert!(!is_replaced(), "more than half of it");
}

/// That of an earlier rewrite, through the same handle, counted on: the next one went home in its middle, over the old content.
#[test]
fn each_replacement_has_its_own_time() {
    let world = World::new(72, 64, 256);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &pattern(1, 20 * BLOCK_SIZE));
    m.files.write_back_all().unwrap();
    for round in 0..3 {
        m.files.truncate(ino, 0).unwrap();
        m.write(&file, 0, &pattern(2 + round, 10 * BLOCK_SIZE));
        m.files.fsync(&file, false).unwrap();
        world.clock.advance(Duration::from_secs(26));
        m.files.tick().unwrap();
        m.files.truncate(ino, 0).unwrap();
        m.write(&file, 0, &pattern(7, 5 * BLOCK_SIZE));
        m.files.tick().unwrap();
        assert!(file.state.meta.lock().replaced, "round {round}");
        world.clock.advance(Duration::from_secs(26));
        m.files.tick().unwrap();
        assert!(!file.state.meta.lock().replaced, "round {round}");
    }
}

/// The old content was under the time of the new one, which a crash had taken: `make` would take it for that.
#[test]
fn a_time_is_not_logged_before_the_content_that_it_is_of() {
    for (grows, set) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut world = World::new(73, 64, 256);
        let m = world.mount();
        let ino = m.make();
        let file = m.open(ino);
        m.write(&file, 0, &pattern(1, 20 * BLOCK_SIZE));
        m.files.fsync(&file, false).unwrap();
        m.store.sync().unwrap();
        let before = m.inode(ino).mtime;
        world.clock.advance(Duration::from_secs(1));
        match grows {
            true => m.write(&file, 20 * BLOCK_SIZE as u64, &pattern(2, 5_000)),
            false => {
                m.files.truncate(ino, 0).unwrap();
                m.write(&file, 0, &pattern(2, 5_000));
            }
        }
        drop(file);
        if set {
            // As a change of the mode does.
            assert_eq!(m.files.times_set(ino, false, false), None);
        }
        world.clock.advance(Duration::from_secs(2));
        m.files.tick().unwrap();
        m.store.sync().unwrap();
        let logged = m.inode(ino);
        assert_eq!(
            (logged.size, logged.mtime),
            (20 * BLOCK_SIZE as u64, before)
        );
        drop(m);
        world.restart(&mut Rng::new(1));
        let m = world.mount();
        assert_eq!(m.inode(ino).mtime, before);
        assert_eq!(m.contents(ino), pattern(1, 20 * BLOCK_SIZE));
    }
}

/// It was skipped for him, and what he had written over was durable under an older time.
#[test]
fn who_syncs_has_the_times_logged_though_somebody_makes_the_file_longer() {
    let world = World::new(74, 64, 256);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &pattern(1, 20 * BLOCK_SIZE));
    m.files.fsync(&file, false).unwrap();
    world.clock.advance(Duration::from_secs(1));
    m.write(&file, 0, &pattern(2, BLOCK_SIZE));
    m.files.write_back(ino).unwrap();
    m.write(&file, 20 * BLOCK_SIZE as u64, &pattern(3, 5_000));
    let shown = file.state.meta.lock().times.mtime.unwrap();
    m.files.persist_times(&file.state).unwrap();
    assert_eq!(m.inode(ino).mtime, shown);
}

#[test]
fn a_clock_that_was_set_back_is_noticed_until_it_has_caught_up() {
    let world = World::new(40, 64, 64);
    let m = world.mount();
    let minute = Duration::from_secs(60);
    m.make();
    assert_eq!(m.files.set_back(), None);
    world.clock.advance(minute);
    m.make();
    // Exact stamps may be ahead of the clock by a little.
    world.clock.set_back(Duration::from_millis(900));
    assert_eq!(m.files.set_back(), None);
    world.clock.set_back(minute);
    assert!(m.files.set_back().is_some_and(|by| by > minute));
    world.clock.advance(minute);
    assert_eq!(m.files.set_back(), None);
}
