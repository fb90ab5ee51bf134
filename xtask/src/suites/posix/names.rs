//! Names and what hangs on them: links, kinds of files, attributes, times.

use std::error::Error;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, Timespec, Timestamps, XattrFlags,
};
use rustix::io::Errno;

use super::{Check, expect, expect_errno, open_new};

pub fn tmpfile(dir: &Path) -> Check {
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

/// One that is open, and gone: removed, or replaced by a rename.
fn gone_folders(dir: &Path) -> Result<[OwnedFd; 2], Box<dyn Error>> {
    let open = |name| {
        let path = dir.join(name);
        fs::create_dir(&path)?;
        rustix::fs::open(&path, OFlags::DIRECTORY | OFlags::RDONLY, Mode::empty())
            .map_err(std::io::Error::from)
    };
    let gone = [open("removed")?, open("replaced")?];
    fs::remove_dir(dir.join("removed"))?;
    fs::create_dir(dir.join("other"))?;
    fs::rename(dir.join("other"), dir.join("replaced"))?;
    Ok(gone)
}

/// Nothing comes into a folder that is gone, but who has it open may use it.
pub fn removed_folder(dir: &Path) -> Check {
    let mode = Mode::from(0o700);
    File::create(dir.join("file"))?;
    fs::create_dir(dir.join("folder"))?;
    for gone in &gone_folders(dir)? {
        let create = OFlags::CREATE | OFlags::RDWR;
        let none = Errno::NOENT;
        expect_errno(rustix::fs::openat(gone, "x", create, mode), none)?;
        expect_errno(rustix::fs::mkdirat(gone, "x", mode), none)?;
        expect_errno(rustix::fs::symlinkat("target", gone, "x"), none)?;
        for (kind, device) in [
            (FileType::RegularFile, 0),
            (FileType::Fifo, 0),
            (FileType::CharacterDevice, rustix::fs::makedev(1, 3)),
        ] {
            let made = rustix::fs::mknodat(gone, "x", kind, mode, device);
            expect_errno(made, none)?;
        }
        let linked = rustix::fs::linkat(CWD, dir.join("file"), gone, "x", AtFlags::empty());
        expect_errno(linked, none)?;
        for name in ["file", "folder"] {
            let moved = rustix::fs::renameat(CWD, dir.join(name), gone, "x");
            expect_errno(moved, none)?;
        }
        let stat = rustix::fs::statat(gone, "x", AtFlags::empty());
        expect_errno(stat, none)?;
        let mut room = Vec::with_capacity(4096);
        let mut listing = rustix::fs::RawDir::new(gone, room.spare_capacity_mut());
        let first = listing.next().transpose();
        expect_errno(first.map(|entry| entry.is_some()), none)?;

        let above = rustix::fs::statat(gone, "..", AtFlags::empty())?;
        expect(
            above.st_ino == fs::metadata(dir)?.ino(),
            ".. is what it was",
        )?;
        rustix::fs::openat(gone, ".", OFlags::DIRECTORY, Mode::empty())?;
        rustix::fs::fsync(gone)?;
        rustix::fs::fchmod(gone, Mode::from(0o711))?;
        let at = Timespec {
            tv_sec: 7,
            tv_nsec: 8,
        };
        let times = Timestamps {
            last_access: at,
            last_modification: at,
        };
        rustix::fs::futimens(gone, &times)?;
        let stat = rustix::fs::fstat(gone)?;
        expect(stat.st_nlink == 0, "it has no link")?;
        expect(
            stat.st_mode & 0o7777 == 0o711 && (stat.st_mtime, stat.st_mtime_nsec) == (7, 8),
            "its attributes can be set",
        )?;
        rustix::fs::fsetxattr(gone, "user.a", b"value", XattrFlags::empty())?;
        let mut value = [0; 8];
        expect(
            rustix::fs::fgetxattr(gone, "user.a", &mut value[..])? == 5,
            "extended ones, too",
        )?;
        rustix::fs::fremovexattr(gone, "user.a")?;
    }
    expect(dir.join("file").exists(), "what was not moved stays")
}

/// ext4 says EPERM, and tmpfs makes the file.
pub fn tmpfile_in_removed_folder(dir: &Path) -> Check {
    for gone in &gone_folders(dir)? {
        let flags = OFlags::TMPFILE | OFlags::RDWR;
        let made = rustix::fs::openat(gone, ".", flags, Mode::from(0o600));
        expect_errno(made, Errno::NOENT)?;
    }
    Ok(())
}

pub fn rename_flags(dir: &Path) -> Check {
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

pub fn rename_replaces(dir: &Path) -> Check {
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

pub fn long_names(dir: &Path) -> Check {
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

pub fn attributes(dir: &Path) -> Check {
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

pub fn large_attribute(dir: &Path) -> Check {
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

/// A name that exists throughout a listing is listed exactly once.
pub fn readdir_under_change(dir: &Path) -> Check {
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

pub fn timestamps(dir: &Path) -> Check {
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
    expect(ctime(&later) >= ctime(&after), "nor does ctime go back")
}

fn ctime(stat: &fs::Metadata) -> (i64, i64) {
    (stat.ctime(), stat.ctime_nsec())
}

/// Times of what somebody has seen are exact (decision 0009).
pub fn ctime_of_who_looks(dir: &Path) -> Check {
    let path = dir.join("file");
    let file = open_new(&path)?;
    let mut before = file.metadata()?;
    for round in 0..100 {
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600 + round % 2))?;
        let after = file.metadata()?;
        expect(ctime(&after) > ctime(&before), "each chmod changes ctime")?;
        before = after;
    }
    Ok(())
}

pub fn special_files(dir: &Path) -> Check {
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

pub fn many_links(dir: &Path) -> Check {
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

pub fn read_only(mnt: &Path) -> Check {
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
