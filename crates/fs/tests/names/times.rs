//! Stamps: as coarse as ticks, exact where somebody looked, and in order.

use crate::world::World;
use base::clock::{Clock, Timestamp};
use base::rng::Rng;
use fs::{Attr, Caller, FileSystem, Ino, OpenFile, ROOT, SetAttr};
use std::sync::Arc;
use std::time::Duration;

const TICK: Duration = Duration::from_millis(4);
/// Less than that: many steps of it are within one tick.
const STEP: Duration = Duration::from_micros(1);

/// A world with ticks, and what is mounted there.
struct Ticking {
    world: World,
    fs: Arc<FileSystem>,
}

impl std::ops::Deref for Ticking {
    type Target = FileSystem;
    fn deref(&self) -> &FileSystem {
        &self.fs
    }
}

impl Ticking {
    fn new() -> Ticking {
        let mut world = World::new(2, 32 << 20, 5);
        world.clock = Clock::manual_with_ticks(1_700_000_100_000_000_000, TICK);
        world.options = world.options.without_threads(world.clock.clone());
        let fs = world.open();
        Ticking { world, fs }
    }

    /// To the next tick.
    fn tick(&self) {
        self.world.clock.advance(TICK);
    }

    fn stat(&self, ino: Ino) -> Attr {
        self.world.clock.advance(STEP);
        self.getattr(ino).unwrap()
    }

    fn file(&self, name: &[u8]) -> Ino {
        let made = self.create(&Caller::root(), ROOT, name, 0o644, libc::O_RDWR);
        made.unwrap().0.ino
    }

    fn write(&self, ino: Ino, byte: u8) {
        let file = self.open_file(ino, libc::O_RDWR).unwrap();
        self.fs.write(&file, 0, &[byte; 100]).unwrap();
    }
}

fn chmod(mode: u32) -> SetAttr {
    SetAttr {
        mode: Some(mode),
        ..SetAttr::default()
    }
}

fn times(attr: &Attr) -> (Timestamp, Timestamp) {
    (attr.mtime, attr.ctime)
}

#[test]
fn what_is_changed_after_a_look_has_newer_times() {
    let m = Ticking::new();
    let who = Caller::root();
    let (a, dir) = (
        m.file(b"a"),
        m.mkdir(&who, ROOT, b"dir", 0o755).unwrap().ino,
    );
    type Change<'a> = (&'a str, Ino, bool, &'a dyn Fn());
    let changes: [Change<'_>; 9] = [
        ("write", a, true, &|| m.write(a, 1)),
        ("truncate", a, true, &|| {
            let set = SetAttr {
                size: Some(10),
                ..SetAttr::default()
            };
            m.setattr(&who, a, &set).unwrap();
        }),
        ("chmod", a, false, &|| {
            m.setattr(&who, a, &chmod(0o600)).unwrap();
        }),
        ("setxattr", a, false, &|| {
            m.setxattr(&who, a, b"user.x", b"1", 0).unwrap()
        }),
        ("link", a, false, &|| {
            m.link(&who, a, dir, b"b").unwrap();
        }),
        ("a new name", dir, true, &|| {
            m.mkdir(&who, dir, b"c", 0o755).unwrap();
        }),
        ("rename", dir, true, &|| {
            m.rename(&who, dir, b"c", dir, b"d", 0).unwrap()
        }),
        ("rmdir", dir, true, &|| m.rmdir(&who, dir, b"d").unwrap()),
        ("unlink", a, false, &|| m.unlink(&who, dir, b"b").unwrap()),
    ];
    for (what, ino, content, change) in &changes {
        // What other looks saw does not count.
        m.stat(ROOT);
        let before = m.stat(*ino);
        change();
        let after = m.stat(*ino);
        assert!(after.ctime > before.ctime, "{what}");
        assert_eq!(after.mtime > before.mtime, *content, "{what}");
    }
}

#[test]
fn what_nobody_looked_at_has_the_time_of_the_tick() {
    let m = Ticking::new();
    let who = Caller::root();
    m.tick();
    let (a, b) = (m.file(b"a"), m.file(b"b"));
    for i in 0..50 {
        m.write(a, i);
        m.world.clock.advance(STEP);
    }
    m.write(b, 1);
    m.unlink(&who, ROOT, b"b").unwrap();
    m.setattr(&who, a, &chmod(0o600)).unwrap();
    let (a, root) = (m.stat(a), m.stat(ROOT));
    let tick = m.world.clock.now_coarse();
    assert_eq!(times(&a), (tick, tick));
    assert_eq!(times(&root), (tick, tick));
}

#[test]
fn stamps_of_different_files_are_in_order() {
    let m = Ticking::new();
    let who = Caller::root();
    m.tick();
    let (a, b, c) = (m.file(b"a"), m.file(b"b"), m.file(b"c"));
    for i in 0..100 {
        m.stat(a);
        m.write(a, i);
        // Nobody looked at this one, so that its time is a coarse one.
        m.write(b, i);
        let (made, other) = (m.stat(a), m.stat(b));
        assert!(
            other.mtime >= made.mtime,
            "write {i} of b came after that of a"
        );
        m.setattr(&who, c, &chmod(0o600)).unwrap();
        assert!(m.stat(c).ctime >= other.mtime);
        if i % 10 == 0 {
            m.tick();
        }
    }
}

#[test]
fn a_clock_that_is_no_finer_still_tells_changes_apart() {
    let mut m = Ticking::new();
    let a = m.file(b"a");
    // Many changes while the clock moves by a few nanoseconds, then one that has stepped back by far.
    let mut last = m.getattr(a).unwrap().mtime;
    for i in 0..100 {
        m.write(a, i);
        let now = m.getattr(a).unwrap().mtime;
        assert!(now > last);
        last = now;
    }
    m.world.clock = Clock::manual_with_ticks(1_600_000_000_000_000_000, TICK);
    m.world.options = m
        .world
        .options
        .clone()
        .without_threads(m.world.clock.clone());
    m.fs.close().unwrap();
    m.world.devices = m.world.devices.iter().map(|d| d.reopen()).collect();
    m.fs = m.world.open();
    m.write(a, 1);
    let after = m.stat(a).mtime;
    assert_ne!(after, last);
    assert!(
        after.sec() < 1_600_000_010,
        "the machine's time, whatever the file had"
    );
}

#[test]
fn attributes_that_are_kept_are_a_look() {
    let m = Ticking::new();
    let keeper = Caller {
        keeps_attributes: true,
        ..Caller::root()
    };
    for (who, name) in [(keeper, b"kept"), (Caller::root(), b"lost")] {
        m.tick();
        let (made, file) = m.create(&who, ROOT, name, 0o644, libc::O_RDWR).unwrap();
        m.world.clock.advance(STEP);
        m.fs.write(&file, 0, b"x").unwrap();
        let written = m.stat(made.ino);
        assert_eq!(written.mtime > made.mtime, who.keeps_attributes);
        let set = m.setattr(&who, made.ino, &chmod(0o600)).unwrap();
        m.world.clock.advance(STEP);
        m.setattr(&who, made.ino, &chmod(0o640)).unwrap();
        assert_eq!(m.stat(made.ino).ctime > set.ctime, who.keeps_attributes);
    }
}

#[test]
fn a_look_at_what_was_read_again_counts() {
    let mut m = Ticking::new();
    let a = m.file(b"a");
    m.stat(a);
    m.write(a, 1);
    let before = m.stat(a);
    m.fs = m.world.remount(Arc::clone(&m.fs));
    assert_eq!(times(&m.stat(a)), times(&before));
    m.write(a, 2);
    assert!(m.stat(a).mtime > before.mtime);
}

/// Time stands still, so that every stamp but the first of a look is made by the look before it.
#[test]
fn a_directory_is_as_its_time_says_whoever_changes_it() {
    let m = Ticking::new();
    let dir = m.mkdir(&Caller::root(), ROOT, b"dir", 0o755).unwrap().ino;
    // More than an inode holds, so that who changes names shares the directory.
    for name in 0..300 {
        let name = format!("before {name}");
        m.mknod(
            &Caller::root(),
            dir,
            name.as_bytes(),
            libc::S_IFREG | 0o644,
            0,
        )
        .unwrap();
    }
    let wrong = base::thread::parallel(3, |thread| {
        let name = format!("of thread {thread}");
        let name = name.as_bytes();
        let mut known = std::collections::HashMap::new();
        let mut wrong = 0;
        for _ in 0..2000 {
            if thread < 2 {
                m.mkdir(&Caller::root(), dir, name, 0o755).unwrap();
                m.rmdir(&Caller::root(), dir, name).unwrap();
                continue;
            }
            let attr = m.getattr(dir).unwrap();
            let first = *known.entry(times(&attr)).or_insert(attr.nlink);
            wrong += u32::from(first != attr.nlink);
        }
        wrong
    });
    assert_eq!(wrong, [0; 3], "another count, the same time");
}

impl Ticking {
    /// The same with times persisted so.
    fn persisting(interval: Duration) -> Ticking {
        let mut m = Ticking::new();
        m.fs.close().unwrap();
        m.world.devices = m.world.devices.iter().map(|d| d.reopen()).collect();
        m.world.options.data.mtime_persist = interval;
        m.fs = m.world.open();
        m
    }

    /// The power goes, and comes back.
    fn crash(&mut self) {
        self.world.switch.cut_now();
        assert!(self.fs.close().is_err());
        self.world.restart(&mut Rng::new(7));
        self.fs = self.world.open();
    }

    /// A file of one page that is durable, times and all.
    fn durable_file(&self, name: &[u8]) -> Arc<OpenFile> {
        let made = self.create(&Caller::root(), ROOT, name, 0o644, libc::O_RDWR);
        let file = made.unwrap().1;
        self.overwrite(&file, 0);
        self.fs.sync().unwrap();
        self.tick();
        file
    }

    /// Writes over the file and syncs it: nothing is logged for that.
    fn overwrite(&self, file: &OpenFile, byte: u8) {
        self.fs.write(file, 0, &[byte; 4096]).unwrap();
        self.fs.fsync(file, false).unwrap();
    }
}

/// A step of the threads that there would be: one looks after files, one commits.
fn background(m: &Ticking, commit: bool) {
    m.fs.tick().unwrap();
    if commit {
        m.store().commit_through(m.store().epoch()).unwrap();
    }
}

#[test]
fn times_of_what_is_only_overwritten_are_durable_after_the_interval_and_that_of_commits() {
    let mut m = Ticking::persisting(Duration::from_secs(1));
    let file = m.durable_file(b"f");
    let ino = file.ino();
    // The file is written over all the time; the timer looks once a second.
    let (mut before, mut newest) = (m.stat(ino).mtime, m.stat(ino).mtime);
    for i in 0..50 {
        m.overwrite(&file, i);
        newest = m.stat(ino).mtime;
        m.world.clock.advance(Duration::from_millis(100));
        if i % 10 == 9 {
            background(&m, true);
            before = newest;
        }
    }
    m.overwrite(&file, 99);
    newest = newest.max(m.stat(ino).mtime);
    drop(file);
    m.crash();
    let left = m.stat(ino).mtime;
    assert!(
        before <= left && left <= newest,
        "{before:?} {left:?} {newest:?}"
    );
}

/// A cut to the size that the file has, and a range that is allocated already, log nothing by themselves; but nothing was written over.
#[test]
fn what_changes_nothing_of_a_file_has_its_time_synced_all_the_same() {
    type Change = fn(&Ticking, &Arc<OpenFile>);
    let changes: [(&str, Change); 4] = [
        ("cut", |m, file| {
            m.truncate(&Caller::root(), file.ino(), 4096).unwrap();
        }),
        ("allocated", |m, file| {
            m.fs.fallocate(file, 0, 0, 4096).unwrap();
        }),
        ("punched", |m, file| {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            m.fs.fallocate(file, mode, 1 << 20, 4096).unwrap();
        }),
        ("logged by the timer", |m, file| {
            m.truncate(&Caller::root(), file.ino(), 4096).unwrap();
            m.world.clock.advance(Duration::from_secs(1));
            background(m, false);
        }),
    ];
    for (what, change) in changes {
        let mut m = Ticking::persisting(Duration::from_secs(1));
        let file = m.durable_file(b"f");
        // The first sync after a while logs the times; what follows is synced just after that.
        m.overwrite(&file, 1);
        m.tick();
        change(&m, &file);
        let shown = m.stat(file.ino());
        m.fs.fsync(&file, false).unwrap();
        let batches = m.store().journal_batches();
        m.fs.fsync(&file, false).unwrap();
        assert_eq!(m.store().journal_batches(), batches, "{what}: once");
        let ino = file.ino();
        drop(file);
        m.crash();
        assert_eq!(times(&m.stat(ino)), times(&shown), "{what}");
    }
}

/// The last close of another handle has logged the very time, and left the commit to others.
#[test]
fn a_change_within_the_tick_in_which_its_time_was_logged_is_synced() {
    let mut m = Ticking::persisting(Duration::from_secs(1));
    let file = m.durable_file(b"f");
    let ino = file.ino();
    m.overwrite(&file, 1);
    m.tick();
    let direct = m.open_file(ino, libc::O_RDWR | libc::O_DIRECT).unwrap();
    m.fs.write(&direct, 0, &[2; 4096]).unwrap();
    drop(direct);
    m.truncate(&Caller::root(), ino, 4096).unwrap();
    m.fs.fsync(&file, false).unwrap();
    let shown = m.getattr(ino).unwrap();
    drop(file);
    m.crash();
    assert_eq!(times(&m.stat(ino)), times(&shown));
}

#[test]
fn a_short_interval_needs_no_other_commit() {
    for interval in [Duration::from_millis(1), Duration::from_millis(10)] {
        let mut m = Ticking::persisting(interval);
        let file = m.durable_file(b"f");
        // The first fsync finds that times were not logged for long; the second finds that they were just now.
        m.overwrite(&file, 1);
        m.overwrite(&file, 2);
        let shown = m.stat(file.ino()).mtime;
        m.world.clock.advance(Duration::from_millis(500));
        background(&m, false);
        m.crash();
        assert_eq!(m.stat(file.ino()).mtime, shown);
    }
}

#[test]
fn without_an_interval_each_fsync_makes_times_durable() {
    let mut m = Ticking::persisting(Duration::ZERO);
    let file = m.durable_file(b"f");
    for i in 0..5 {
        m.overwrite(&file, i);
        let shown = m.stat(file.ino());
        let batches = m.store().journal_batches();
        m.overwrite(&file, i);
        assert_eq!(m.store().journal_batches(), batches + 1);
        let last = m.stat(file.ino());
        assert!(last.mtime > shown.mtime);
        if i == 4 {
            m.crash();
            assert_eq!(times(&m.stat(file.ino())), times(&last));
        }
    }
}

#[test]
fn without_an_interval_times_that_a_close_has_logged_are_durable_after_fsync() {
    let mut m = Ticking::persisting(Duration::ZERO);
    let file = m.durable_file(b"f");
    let other = m.open_file(file.ino(), libc::O_RDWR).unwrap();
    m.fs.write(&file, 0, &[1; 4096]).unwrap();
    m.fs.fsync(&file, true).unwrap();
    // It logs the times, and leaves the commit to others.
    drop(other);
    let shown = m.stat(file.ino());
    let batches = m.store().journal_batches();
    m.fs.fsync(&file, true).unwrap();
    assert_eq!(m.store().journal_batches(), batches, "data alone");
    m.fs.fsync(&file, false).unwrap();
    m.fs.fsync(&file, false).unwrap();
    assert_eq!(m.store().journal_batches(), batches + 1, "once");
    m.crash();
    assert_eq!(times(&m.stat(file.ino())), times(&shown));
}

#[test]
fn a_look_between_overwrites_makes_no_fsync_commit() {
    let m = Ticking::persisting(Duration::from_secs(1));
    let file = m.durable_file(b"f");
    m.overwrite(&file, 1);
    let batches = m.store().journal_batches();
    let mut last = m.stat(file.ino()).mtime;
    for i in 0..100 {
        m.overwrite(&file, i);
        let now = m.stat(file.ino()).mtime;
        assert!(now > last);
        last = now;
    }
    assert_eq!(m.store().journal_batches(), batches);
}

#[test]
fn times_ride_along_with_any_record_of_the_inode() {
    type Change<'a> = (&'a str, &'a dyn Fn(&Ticking, Ino));
    let who = Caller::root();
    let changes: [Change<'_>; 5] = [
        ("chmod", &|m, ino| {
            m.setattr(&who, ino, &chmod(0o600)).unwrap();
        }),
        ("setxattr", &|m, ino| {
            m.setxattr(&who, ino, b"user.x", b"1", 0).unwrap()
        }),
        ("link", &|m, ino| {
            m.link(&who, ino, ROOT, b"other").unwrap();
        }),
        ("rename", &|m, _| {
            m.rename(&who, ROOT, b"f", ROOT, b"g", 0).unwrap()
        }),
        ("append", &|m, ino| {
            let file = m.open_file(ino, libc::O_RDWR).unwrap();
            m.fs.write(&file, 4096, &[1; 4096]).unwrap();
            m.fs.fsync(&file, true).unwrap();
        }),
    ];
    for (what, change) in changes {
        let mut m = Ticking::persisting(Duration::from_secs(1000));
        let file = m.durable_file(b"f");
        m.overwrite(&file, 1);
        m.overwrite(&file, 2);
        let shown = m.stat(file.ino());
        change(&m, file.ino());
        m.store().commit_through(m.store().epoch()).unwrap();
        m.crash();
        let left = m.stat(file.ino());
        assert!(left.mtime >= shown.mtime, "{what}");
        assert!(left.ctime > shown.ctime, "{what}");
    }
}

#[test]
fn an_unmount_and_the_last_close_log_times() {
    let mut m = Ticking::persisting(Duration::from_secs(1000));
    let file = m.durable_file(b"f");
    let ino = file.ino();
    m.overwrite(&file, 1);
    m.overwrite(&file, 2);
    let shown = times(&m.stat(ino));
    m.fs = m.world.remount(Arc::clone(&m.fs));
    assert_eq!(times(&m.stat(ino)), shown);
    let file = m.open_file(ino, libc::O_RDWR).unwrap();
    m.overwrite(&file, 3);
    m.overwrite(&file, 4);
    let shown = times(&m.stat(ino));
    drop(file);
    m.store().commit_through(m.store().epoch()).unwrap();
    m.crash();
    assert_eq!(times(&m.stat(ino)), shown);
}

#[test]
fn a_cookie_grows_with_each_change_that_somebody_could_miss() {
    let mut m = Ticking::new();
    let file = m.durable_file(b"f");
    let (a, who) = (file.ino(), Caller::root());
    let mut last = m.change_cookie(a).unwrap();
    for i in 0..20 {
        assert_eq!(m.change_cookie(a).unwrap(), last);
        match i % 3 {
            0 => m.overwrite(&file, i),
            1 => _ = m.setattr(&who, a, &chmod(0o600 + u32::from(i))).unwrap(),
            _ => m.fs.write(&file, 0, &[i; 10]).map(drop).unwrap(),
        }
        let now = m.change_cookie(a).unwrap();
        assert!(now > last, "step {i}");
        last = now;
    }
    let root = m.change_cookie(ROOT).unwrap();
    drop(file);
    m.fs = m.world.remount(Arc::clone(&m.fs));
    assert_eq!(m.change_cookie(a).unwrap(), last, "nothing changed");
    assert_eq!(m.change_cookie(ROOT).unwrap(), root);
    m.write(a, 1);
    assert!(m.change_cookie(a).unwrap() > last);
}

#[test]
fn no_cookie_comes_again_after_a_crash() {
    let mut m = Ticking::persisting(Duration::from_secs(1000));
    let file = m.durable_file(b"f");
    let ino = file.ino();
    let mut newest = 0;
    for round in 0..4 {
        let file = m.open_file(ino, libc::O_RDWR).unwrap();
        for i in 0..5 {
            // Content that survives under a time that does not.
            m.overwrite(&file, i);
            let cookie = m.change_cookie(ino).unwrap();
            assert!(cookie > newest, "round {round}");
            newest = cookie;
        }
        if round == 2 {
            // The machine's clock is set back as well.
            m.world.clock = Clock::manual_with_ticks(1_600_000_000_000_000_000, TICK);
            m.world.options = m
                .world
                .options
                .clone()
                .without_threads(m.world.clock.clone());
        }
        m.crash();
        assert!(m.change_cookie(ino).unwrap() > newest);
        newest = m.change_cookie(ino).unwrap();
    }
    // A clean end that follows does not hide the crash.
    m.crash();
    m.fs = m.world.remount(Arc::clone(&m.fs));
    assert!(m.change_cookie(ino).unwrap() > newest);
}

/// What is promised then is the order of changes, and that cookies grow; the times themselves are right again after the next mount.
#[test]
fn times_stand_still_while_a_clock_that_was_set_back_has_not_caught_up() {
    let hour = Duration::from_secs(3600);
    let mut m = Ticking::new();
    let (a, b) = (m.file(b"a"), m.file(b"b"));
    m.write(a, 1);
    let mut last = m.stat(a).mtime;
    let right = last;
    m.world.clock.set_back(hour);
    for i in 0..5 {
        for ino in [a, b] {
            let cookie = m.change_cookie(ino).unwrap();
            m.write(ino, i);
            assert!(m.change_cookie(ino).unwrap() > cookie);
            let now = m.stat(ino).mtime;
            assert!(now >= last && now.ns() - right.ns() < 1_000_000_000);
            last = now;
        }
        m.world.clock.advance(Duration::from_secs(60));
    }
    m.fs = m.world.remount(Arc::clone(&m.fs));
    m.write(b, 9);
    assert!(m.stat(b).mtime.ns() < right.ns() - hour.as_nanos() as i64 / 2);
    let cookie = m.change_cookie(a).unwrap();
    m.write(a, 9);
    assert!(m.change_cookie(a).unwrap() > cookie);
}

/// The machine's clock was ahead when a large directory was changed: who changed it next waited until the time had come.
#[test]
fn a_directory_of_a_time_to_come_can_be_changed() {
    let mut m = Ticking::new();
    let who = Caller::root();
    let dir = m.mkdir(&who, ROOT, b"dir", 0o755).unwrap().ino;
    let name = |i: u32| format!("a name of some length {i}").into_bytes();
    let make = |m: &Ticking, i| m.create(&who, dir, &name(i), 0o644, libc::O_RDWR).unwrap();
    for i in 0..200 {
        make(&m, i);
    }
    let ahead = m.stat(dir).ctime;
    m.world.clock = Clock::manual_with_ticks(1_600_000_000_000_000_000, TICK);
    m.world.options = m
        .world
        .options
        .clone()
        .without_threads(m.world.clock.clone());
    m.fs = m.world.remount(Arc::clone(&m.fs));
    let mut seen = vec![times(&m.stat(dir))];
    assert_eq!(seen[0].1, ahead);
    for i in 0..20 {
        match i % 3 {
            0 => drop(make(&m, 200 + i)),
            1 => m.unlink(&who, dir, &name(i)).unwrap(),
            _ => m
                .rename(&who, dir, &name(i), dir, &name(300 + i), 0)
                .unwrap(),
        }
        let now = times(&m.getattr(dir).unwrap());
        assert!(now.1 < ahead && !seen.contains(&now), "change {i}");
        seen.push(now);
    }
    assert!(seen[1..].is_sorted());
}

#[test]
fn who_never_asks_for_cookies_pays_for_none() {
    let m = Ticking::new();
    let file = m.durable_file(b"f");
    let checkpoints = m.store().newest_checkpoint();
    for i in 0..10 {
        m.overwrite(&file, i);
    }
    assert_eq!(m.store().newest_checkpoint(), checkpoints);
    m.change_cookie(file.ino()).unwrap();
    assert_eq!(m.store().newest_checkpoint(), checkpoints + 1);
    for i in 0..10 {
        m.overwrite(&file, i);
        m.change_cookie(file.ino()).unwrap();
    }
    assert_eq!(m.store().newest_checkpoint(), checkpoints + 1);
    m.world.clock.advance(Duration::from_secs(25 * 3600));
    m.overwrite(&file, 1);
    m.change_cookie(file.ino()).unwrap();
    assert_eq!(m.store().newest_checkpoint(), checkpoints + 2);
}
