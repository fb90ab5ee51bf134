//! What POSIX and Linux promise and the foreign suites do not look at.

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags, Timespec,
    Timestamps, XattrFlags,
};
use rustix::io::Errno;

use super::workload::{O_DSYNC, O_SYNC};
use super::{Context, script};
use crate::Fallible;
use crate::report::Suite;
use crate::world::World;

type Check = Result<(), Box<dyn Error>>;

type Named = (&'static str, fn(&Path) -> Check);

const CHECKS: &[Named] = &[
    ("O_TMPFILE", tmpfile),
    ("rename flags", rename_flags),
    ("rename replaces", rename_replaces),
    ("fallocate", fallocate),
    ("SEEK_DATA and SEEK_HOLE", seek_data),
    ("names of 255 bytes", long_names),
    ("extended attributes", attributes),
    ("O_APPEND", append),
    ("flock", flock),
    ("copy_file_range", copy_range),
    ("readdir under change", readdir_under_change),
    ("unlinked open file", unlinked),
    ("timestamps", timestamps),
    ("O_DIRECT beside buffered", direct),
    ("O_SYNC and O_DSYNC", synchronous),
    ("special files", special_files),
    ("many links", many_links),
    ("statfs", statfs),
    ("truncate", truncate),
];

/// Only where the file system under test is Sheaf: others have lower limits.
const OWN_CHECKS: &[Named] = &[
    ("attribute of 64 KiB", large_attribute),
    ("file of 2^63-1 bytes", largest_file),
];

/// ACLs with inheritance and mask, sticky and setgid folders, loss of setuid bits.
const PERMISSIONS: &str = r#"
umask 022
mkdir acl
setfacl -m u:tests:rwx,d:u:tests:rwX,d:g::r-x,d:m::rwx acl
mkdir acl/sub
touch acl/file
getfacl -c acl/sub | grep -qx 'user:tests:rwx'
getfacl -c acl/sub | grep -qx 'default:user:tests:rwx'
getfacl -cs acl/file | grep -qx 'user:tests:rwx.*#effective:rw-'
runuser -u tests -- sh -c 'echo text > acl/file && cat acl/file > /dev/null'
! runuser -u nobody -- sh -c 'echo text > acl/file' 2> /dev/null
chmod g-w acl/file
! runuser -u tests -- sh -c 'echo text > acl/file' 2> /dev/null
setfacl -b acl/file
test "$(getfacl -c acl/file | grep -c user:)" = 1

mkdir -m 1777 sticky
touch sticky/file
! runuser -u tests -- rm -f sticky/file 2> /dev/null
runuser -u tests -- touch sticky/own
runuser -u tests -- rm sticky/own

mkdir setgid
chgrp tests setgid
chmod 2775 setgid
touch setgid/file
mkdir setgid/sub
test "$(stat -c %G setgid/file)" = tests
test "$(stat -c %G:%A setgid/sub)" = tests:drwxr-sr-x

cp /bin/true suid
chmod 6777 suid
runuser -u tests -- sh -c 'echo text >> suid'
test "$(stat -c %a suid)" = 777
chmod 6777 suid
chown tests suid
test "$(stat -c %a suid)" = 777
chmod 6777 suid
runuser -u nobody -- truncate -s 10 suid
test "$(stat -c %a suid)" = 777
"#;

const BEFORE_REMOUNT: &str = r#"
mkdir -p kept/a/b
seq 100000 > kept/numbers
ln kept/numbers kept/a/link
ln -s ../numbers kept/a/symlink
mkfifo kept/fifo
mknod kept/null c 1 3
setfattr -n user.colour -v green kept/numbers
setfattr -n trusted.secret -v hidden kept/numbers
setfacl -m u:tests:r kept/numbers
touch -d '1999-12-31 23:59:59.123456789 UTC' kept/a/b
truncate -s 1G kept/sparse
printf end >> kept/sparse
for i in $(seq 2000); do echo "$i" > "kept/a/b/file$i"; done
touch -d '1999-12-31 23:59:59.123456789 UTC' kept/a/b
"#;

const AFTER_REMOUNT: &str = r#"
seq 100000 | cmp - kept/numbers
test "$(stat -c %h kept/numbers)" = 2
test kept/numbers -ef kept/a/link
test "$(readlink kept/a/symlink)" = ../numbers
test -p kept/fifo
test "$(stat -c %t:%T kept/null)" = 1:3
test "$(getfattr --only-values -n user.colour kept/numbers)" = green
test "$(getfattr --only-values -n trusted.secret kept/numbers)" = hidden
getfacl -c kept/numbers | grep -qx 'user:tests:r--'
test "$(TZ=UTC stat -c %y kept/a/b)" = '1999-12-31 23:59:59.123456789 +0000'
test "$(stat -c %s kept/sparse)" = 1073741827
test "$(tail -c 3 kept/sparse)" = end
test "$(ls kept/a/b | wc -l)" = 2000
for i in $(seq 1 97 2000); do test "$(cat "kept/a/b/file$i")" = "$i"; done
"#;

pub fn run(_: &Context, world: &mut World, suite: &mut Suite) -> Fallible<()> {
    let own = if world.is_external() { &[] } else { OWN_CHECKS };
    for (number, (name, check)) in CHECKS.iter().chain(own).enumerate() {
        let dir = world.mnt.join(format!("check{number}"));
        fs::create_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        suite.check(name, check(&dir));
    }
    let permissions = script("posix-permissions", &world.mnt, PERMISSIONS, 60);
    suite.check("permissions", permissions);
    let before = script("posix-before-remount", &world.mnt, BEFORE_REMOUNT, 60);
    suite.check("before remount", before);
    world.umount()?;
    suite.check("fsck", world.fsck());
    world.mount_with("ro")?;
    let after = script("posix-after-remount", &world.mnt, AFTER_REMOUNT, 60);
    suite.check("after remount, read-only", after);
    if !world.is_external() {
        suite.check("read-only refuses", read_only(&world.mnt));
    }
    world.umount()?;
    world.mount()?;
    let after = script("posix-after-remount", &world.mnt, AFTER_REMOUNT, 60);
    suite.check("after remount, read-write", after);
    Ok(())
}

/// An error that names the expectation unless it holds.
fn expect(holds: bool, what: &str) -> Check {
    match holds {
        true => Ok(()),
        false => Err(what.into()),
    }
}

fn expect_errno<T>(result: Result<T, Errno>, errno: Errno) -> Check {
    match result {
        Err(e) if e == errno => Ok(()),
        Err(e) => Err(format!("expected {errno}, got {e}").into()),
        Ok(_) => Err(format!("expected {errno}, got success").into()),
    }
}

fn open_new(path: &Path) -> std::io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)
}

fn tmpfile(dir: &Path) -> Check {
    let fd = rustix::fs::open(dir, OFlags::TMPFILE | OFlags::RDWR, Mode::from(0o640))?;
    let mut file = File::from(fd);
    file.write_all(b"nameless")?;
    expect(file.metadata()?.nlink() == 0, "a nameless file has no link")?;
    expect(fs::read_dir(dir)?.count() == 0, "the folder is empty")?;
    let proc = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    rustix::fs::linkat(CWD, proc, CWD, dir.join("named"), AtFlags::SYMLINK_FOLLOW)?;
    expect(
        fs::read(dir.join("named"))? == b"nameless",
        "the content stays",
    )?;
    expect(file.metadata()?.nlink() == 1, "one link")?;
    let exclusive = OFlags::TMPFILE | OFlags::RDWR | OFlags::EXCL;
    let fd = rustix::fs::open(dir, exclusive, Mode::from(0o600))?;
    let proc = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
    let linked = rustix::fs::linkat(CWD, proc, CWD, dir.join("no"), AtFlags::SYMLINK_FOLLOW);
    expect_errno(linked, Errno::NOENT)
}

fn rename_flags(dir: &Path) -> Check {
    let (a, b, c) = (dir.join("a"), dir.join("b"), dir.join("c"));
    fs::write(&a, "a")?;
    fs::create_dir(&b)?;
    fs::write(b.join("inside"), "")?;
    let rename = |x: &Path, y: &Path, flags| rustix::fs::renameat_with(CWD, x, CWD, y, flags);
    expect_errno(rename(&a, &b, RenameFlags::NOREPLACE), Errno::EXIST)?;
    rename(&a, &c, RenameFlags::NOREPLACE)?;
    rename(&c, &b, RenameFlags::EXCHANGE)?;
    expect(fs::read(&b)? == b"a", "the file took the folder's place")?;
    expect(
        c.join("inside").exists(),
        "the folder took the file's place",
    )?;
    expect(
        fs::metadata(dir)?.nlink() == 3,
        "the parent counts one folder",
    )?;
    expect_errno(rename(&b, &a, RenameFlags::EXCHANGE), Errno::NOENT)
}

fn rename_replaces(dir: &Path) -> Check {
    let (a, b) = (dir.join("a"), dir.join("b"));
    fs::write(&a, "new")?;
    fs::write(&b, "old")?;
    let mut old = File::open(&b)?;
    fs::rename(&a, &b)?;
    expect(fs::read(&b)? == b"new", "the new content is there")?;
    let mut text = String::new();
    old.read_to_string(&mut text)?;
    expect(text == "old", "an open file keeps its content")?;
    fs::create_dir_all(dir.join("outer/inner"))?;
    let into_itself = rustix::fs::rename(dir.join("outer"), dir.join("outer/inner/x"));
    expect_errno(into_itself, Errno::INVAL)
}

fn fallocate(dir: &Path) -> Check {
    let file = open_new(&dir.join("file"))?;
    file.write_all_at(&[7; 65536], 0)?;
    rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 65536, 1 << 20)?;
    expect(file.metadata()?.len() == 65536, "KEEP_SIZE keeps the size")?;
    expect(
        file.metadata()?.blocks() * 512 >= 65536 + (1 << 20),
        "space is allocated",
    )?;
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 1000, 10000)?;
    rustix::fs::fallocate(&file, FallocateFlags::ZERO_RANGE, 20000, 10000)?;
    let mut all = vec![0; 65536];
    file.read_exact_at(&mut all, 0)?;
    let zero = |i: usize| (1000..11000).contains(&i) || (20000..30000).contains(&i);
    let right = all
        .iter()
        .enumerate()
        .all(|(i, &b)| b == if zero(i) { 0 } else { 7 });
    expect(right, "exactly the punched and zeroed ranges read as zeros")?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 100_000)?;
    expect(
        file.metadata()?.len() == 100_000,
        "plain fallocate grows the file",
    )
}

fn seek_data(dir: &Path) -> Check {
    const MIB: u64 = 1 << 20;
    let mut file = open_new(&dir.join("file"))?;
    file.write_all_at(&[1; 4096], MIB)?;
    file.set_len(3 * MIB)?;
    file.sync_all()?;
    let mut seek = |from| rustix::fs::seek(&mut file, from);
    expect(
        seek(rustix::fs::SeekFrom::Data(0))? == MIB,
        "data begins at 1 MiB",
    )?;
    expect(seek(rustix::fs::SeekFrom::Hole(0))? == 0, "a hole is at 0")?;
    let hole = seek(rustix::fs::SeekFrom::Hole(MIB))?;
    expect(hole == MIB + 4096, "the second hole follows the data")?;
    expect_errno(seek(rustix::fs::SeekFrom::Data(2 * MIB)), Errno::NXIO)?;
    expect_errno(seek(rustix::fs::SeekFrom::Hole(3 * MIB)), Errno::NXIO)?;
    file.seek(SeekFrom::End(-1))?;
    let mut last = [9];
    file.read_exact(&mut last)?;
    expect(last == [0], "holes read as zeros")
}

fn long_names(dir: &Path) -> Check {
    for letter in ["x", "é", "漢"] {
        let name = letter.repeat(255 / letter.len());
        fs::write(dir.join(&name), &name)?;
        expect(
            fs::read(dir.join(&name))? == name.as_bytes(),
            "the file is found",
        )?;
        let listed = fs::read_dir(dir)?.any(|e| e.is_ok_and(|e| e.file_name() == *name));
        expect(listed, "the name is listed")?;
    }
    let created = rustix::fs::open(
        dir.join("y".repeat(256)),
        OFlags::CREATE | OFlags::RDWR,
        Mode::from(0o600),
    );
    expect_errno(created, Errno::NAMETOOLONG)
}

fn attributes(dir: &Path) -> Check {
    let path = dir.join("file");
    fs::write(&path, "")?;
    let mut room = vec![0; 4096];
    for name in ["user.a", "trusted.b", "security.c"] {
        rustix::fs::setxattr(&path, name, b"one", XattrFlags::CREATE)?;
        let again = rustix::fs::setxattr(&path, name, b"two", XattrFlags::CREATE);
        expect_errno(again, Errno::EXIST)?;
        rustix::fs::setxattr(&path, name, b"three", XattrFlags::REPLACE)?;
        let length = rustix::fs::getxattr(&path, name, &mut room[..])?;
        expect(&room[..length] == b"three", "the value was replaced")?;
    }
    for i in 0..50 {
        let value = vec![i as u8; 20 + i % 7];
        rustix::fs::setxattr(&path, format!("user.n{i}"), &value, XattrFlags::empty())?;
    }
    let length = rustix::fs::listxattr(&path, &mut room[..])?;
    let names = room[..length]
        .split(|&b| b == 0)
        .filter(|n| n.starts_with(b"user.n"));
    expect(names.count() == 50, "all names are listed")?;
    for i in 0..50 {
        rustix::fs::removexattr(&path, format!("user.n{i}"))?;
    }
    expect_errno(rustix::fs::removexattr(&path, "user.n1"), Errno::NODATA)?;
    let missing = rustix::fs::setxattr(&path, "user.n1", b"", XattrFlags::REPLACE);
    expect_errno(missing, Errno::NODATA)?;
    let mut small = [0; 2];
    expect_errno(
        rustix::fs::getxattr(&path, "user.a", &mut small[..]),
        Errno::RANGE,
    )
}

fn large_attribute(dir: &Path) -> Check {
    let path = dir.join("file");
    fs::write(&path, "")?;
    let value: Vec<u8> = (0..65536u32).map(|i| (i / 7) as u8).collect();
    rustix::fs::setxattr(&path, "user.large", &value, XattrFlags::empty())?;
    rustix::fs::setxattr(&path, "user.small", b"small", XattrFlags::empty())?;
    let mut room = vec![0; 65536];
    let length = rustix::fs::getxattr(&path, "user.large", &mut room[..])?;
    expect(room[..length] == value, "64 KiB come back")?;
    rustix::fs::removexattr(&path, "user.large")?;
    let length = rustix::fs::getxattr(&path, "user.small", &mut room[..])?;
    expect(&room[..length] == b"small", "the other attribute stays")
}

fn largest_file(dir: &Path) -> Check {
    const END: u64 = i64::MAX as u64;
    let file = open_new(&dir.join("file"))?;
    file.set_len(END)?;
    expect(file.metadata()?.len() == END, "the size is 2^63-1")?;
    file.write_all_at(b"z", END - 5000)?;
    file.sync_all()?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, END - 5000)?;
    expect(byte == *b"z", "a byte near the end comes back")?;
    file.set_len(0)?;
    Ok(())
}

fn append(dir: &Path) -> Check {
    let path = dir.join("file");
    fs::write(&path, "")?;
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4u8)
            .map(|writer| {
                let path = &path;
                scope.spawn(move || -> std::io::Result<()> {
                    let mut file = OpenOptions::new().append(true).open(path)?;
                    (0..500).try_for_each(|_| file.write_all(&[b'a' + writer; 100]))
                })
            })
            .collect();
        writers
            .into_iter()
            .try_for_each(|w| w.join().unwrap_or(Err(ErrorKind::Other.into())))
    })?;
    let text = fs::read(&path)?;
    expect(text.len() == 200_000, "no append is lost")?;
    let whole = text
        .chunks(100)
        .all(|record| record.iter().all(|&b| b == record[0]));
    expect(whole, "appends do not mix")
}

fn flock(dir: &Path) -> Check {
    let path = dir.join("file");
    let (a, b) = (open_new(&path)?, File::open(&path)?);
    rustix::fs::flock(&a, FlockOperation::LockExclusive)?;
    let second = rustix::fs::flock(&b, FlockOperation::NonBlockingLockShared);
    expect_errno(second, Errno::WOULDBLOCK)?;
    rustix::fs::flock(&a, FlockOperation::LockShared)?;
    rustix::fs::flock(&b, FlockOperation::NonBlockingLockShared)?;
    let upgrade = rustix::fs::flock(&a, FlockOperation::NonBlockingLockExclusive);
    expect_errno(upgrade, Errno::WOULDBLOCK)?;
    drop(b);
    rustix::fs::flock(&a, FlockOperation::NonBlockingLockExclusive)?;
    Ok(())
}

fn copy_range(dir: &Path) -> Check {
    let (from, to) = (open_new(&dir.join("from"))?, open_new(&dir.join("to"))?);
    let text: Vec<u8> = (0..300_000u32).map(|i| (i % 251) as u8).collect();
    from.write_all_at(&text, 0)?;
    let (mut at_from, mut at_to) = (1000, 77);
    while at_from < 299_000 {
        let left = (299_000 - at_from) as usize;
        let n =
            rustix::fs::copy_file_range(&from, Some(&mut at_from), &to, Some(&mut at_to), left)?;
        expect(n > 0, "the copy goes on")?;
    }
    let copied = fs::read(dir.join("to"))?;
    expect(copied.len() == 298_077, "the copy has its size")?;
    expect(
        copied[77..] == text[1000..299_000],
        "the copy has the content",
    )
}

/// A name that exists throughout a listing is listed exactly once.
fn readdir_under_change(dir: &Path) -> Check {
    for i in 0..5000 {
        File::create(dir.join(format!("stays{i}")))?;
    }
    let mut seen = vec![0; 5000];
    for (round, entry) in fs::read_dir(dir)?.enumerate() {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if let Some(number) = name.strip_prefix("stays") {
            seen[number.parse::<usize>()?] += 1;
        }
        if round % 5 == 0 {
            File::create(dir.join(format!("comes{round}")))?;
        }
        if round % 10 == 5 {
            fs::remove_file(dir.join(format!("comes{}", round - 5)))?;
        }
    }
    expect(
        seen.iter().all(|&n| n == 1),
        "each lasting name is listed once",
    )
}

fn unlinked(dir: &Path) -> Check {
    let path = dir.join("file");
    let file = open_new(&path)?;
    file.write_all_at(b"before", 0)?;
    fs::remove_file(&path)?;
    file.write_all_at(b"after", 6)?;
    let mut text = [0; 11];
    file.read_exact_at(&mut text, 0)?;
    expect(&text == b"beforeafter", "the file can be used on")?;
    expect(file.metadata()?.nlink() == 0, "it has no link")?;
    file.sync_all()?;
    file.set_len(3)?;
    expect(file.metadata()?.len() == 3, "it can be truncated")
}

fn timestamps(dir: &Path) -> Check {
    let path = dir.join("file");
    let file = open_new(&path)?;
    let at = |sec, nsec| Timespec {
        tv_sec: sec,
        tv_nsec: nsec,
    };
    for (sec, nsec) in [(0, 1), (-5, 999_999_999), (1 << 33, 123_456_789)] {
        let times = Timestamps {
            last_access: at(sec + 1, nsec),
            last_modification: at(sec, nsec),
        };
        rustix::fs::futimens(&file, &times)?;
        let stat = file.metadata()?;
        expect(
            stat.mtime() == sec && stat.mtime_nsec() == nsec,
            "mtime as set",
        )?;
        expect(stat.atime() == sec + 1, "atime as set")?;
    }
    let before = file.metadata()?;
    file.write_all_at(b"text", 0)?;
    let after = file.metadata()?;
    expect(after.mtime() < 1 << 33, "a write brings mtime to now")?;
    expect(after.ctime() >= before.ctime(), "ctime never goes back")?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    let later = file.metadata()?;
    expect(later.mtime() == after.mtime(), "chmod leaves mtime alone")?;
    let ctime = |m: &fs::Metadata| (m.ctime(), m.ctime_nsec());
    expect(ctime(&later) >= ctime(&after), "chmod changes ctime")
}

/// A part of `room` that begins at a multiple of 4 KiB.
fn aligned(room: &mut [u8], length: usize) -> &mut [u8] {
    let skip = room.as_ptr().align_offset(4096);
    &mut room[skip..skip + length]
}

fn direct(dir: &Path) -> Check {
    let path = dir.join("file");
    let buffered = open_new(&path)?;
    let direct = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(OFlags::DIRECT.bits() as i32)
        .open(&path)?;
    let mut room = vec![0; 65536 + 4096];
    let page = aligned(&mut room, 65536);
    for round in 1..20u8 {
        let at = u64::from(round % 5) * 16384;
        buffered.write_all_at(&[round; 65536], at)?;
        direct.read_exact_at(page, at)?;
        expect(
            page.iter().all(|&b| b == round),
            "O_DIRECT reads what was written buffered",
        )?;
        page.fill(round + 100);
        direct.write_all_at(page, at)?;
        let mut text = vec![0; 65536];
        buffered.read_exact_at(&mut text, at)?;
        let same = text.iter().all(|&b| b == round + 100);
        expect(same, "a buffered read gives what O_DIRECT wrote")?;
    }
    Ok(())
}

fn synchronous(dir: &Path) -> Check {
    for (name, flag) in [("sync", O_SYNC), ("dsync", O_DSYNC)] {
        let path = dir.join(name);
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .custom_flags(flag)
            .open(&path)?;
        (0..50).try_for_each(|i| file.write_all(&[i; 700]))?;
        expect(fs::metadata(&path)?.len() == 35_000, "all is written")?;
    }
    Ok(())
}

fn special_files(dir: &Path) -> Check {
    let kinds = [
        (FileType::Fifo, 0),
        (FileType::Socket, 0),
        (FileType::CharacterDevice, rustix::fs::makedev(1, 3)),
        (FileType::BlockDevice, rustix::fs::makedev(4000, 70_000)),
    ];
    for (kind, device) in kinds {
        let path = dir.join(format!("{kind:?}"));
        rustix::fs::mknodat(CWD, &path, kind, Mode::from(0o600), device)?;
        let stat = rustix::fs::lstat(&path)?;
        expect(
            FileType::from_raw_mode(stat.st_mode) == kind,
            "the kind is kept",
        )?;
        expect(stat.st_rdev == device, "the device number is kept")?;
    }
    for length in [1, 59, 60, 1000, 4095] {
        let target = "t".repeat(length);
        let path = dir.join(format!("link{length}"));
        symlink(&target, &path)?;
        expect(
            fs::read_link(&path)?.to_string_lossy() == target,
            "the target is kept",
        )?;
        expect(
            fs::symlink_metadata(&path)?.len() == length as u64,
            "its length too",
        )?;
    }
    Ok(())
}

fn many_links(dir: &Path) -> Check {
    let path = dir.join("file");
    fs::write(&path, "shared")?;
    for i in 0..1000 {
        fs::hard_link(&path, dir.join(format!("link{i}")))?;
    }
    expect(fs::metadata(&path)?.nlink() == 1001, "every link counts")?;
    for i in 0..1000 {
        fs::remove_file(dir.join(format!("link{i}")))?;
    }
    expect(fs::metadata(&path)?.nlink() == 1, "removed links do not")?;
    expect(fs::read_dir(dir)?.count() == 1, "one name is left")
}

fn statfs(dir: &Path) -> Check {
    const SIZE: u64 = 64 << 20;
    let free = || rustix::fs::statvfs(dir).map(|s| s.f_bfree * s.f_frsize);
    let before = free()?;
    let path = dir.join("file");
    let mut file = open_new(&path)?;
    (0..64).try_for_each(|i| file.write_all(&vec![i; 1 << 20]))?;
    file.sync_all()?;
    let full = free()?;
    expect(before - full >= SIZE * 9 / 10, "used space is reported")?;
    expect(before - full <= SIZE * 3 / 2, "and not much more than that")?;
    let stat = rustix::fs::statvfs(dir)?;
    expect(
        stat.f_namemax == 255 && stat.f_bavail <= stat.f_bfree,
        "figures make sense",
    )
}

fn truncate(dir: &Path) -> Check {
    let file = open_new(&dir.join("file"))?;
    file.write_all_at(&[5; 10_000], 0)?;
    file.set_len(5_000)?;
    file.set_len(10_000)?;
    let mut text = vec![1; 10_000];
    file.read_exact_at(&mut text, 0)?;
    expect(text[..5_000].iter().all(|&b| b == 5), "the head stays")?;
    expect(
        text[5_000..].iter().all(|&b| b == 0),
        "what was cut off stays away",
    )
}

fn read_only(mnt: &Path) -> Check {
    let create = rustix::fs::open(
        mnt.join("new"),
        OFlags::CREATE | OFlags::RDWR,
        Mode::from(0o600),
    );
    expect_errno(create, Errno::ROFS)?;
    expect_errno(rustix::fs::unlink(mnt.join("kept/numbers")), Errno::ROFS)?;
    expect_errno(
        rustix::fs::mkdir(mnt.join("dir"), Mode::from(0o700)),
        Errno::ROFS,
    )
}
