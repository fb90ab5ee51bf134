//! Contents of files: holes, appends, direct and synchronous writes, locks.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::{Check, expect, expect_errno, open_new};

/// As open(2) has them; OFlags cannot tell the two apart.
const O_DSYNC: i32 = 0o10_000;
const O_SYNC: i32 = 0o4_010_000;

pub fn fallocate(dir: &Path) -> Check {
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

pub fn seek_data(dir: &Path) -> Check {
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

pub fn largest_file(dir: &Path) -> Check {
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

/// What ends there is done up to there, and what begins there is refused, as by tmpfs, which has the same limit.
pub fn beyond_the_largest_file(dir: &Path) -> Check {
    const END: u64 = i64::MAX as u64;
    let path = dir.join("file");
    let mut file = open_new(&path)?;
    let from = open_new(&dir.join("from"))?;
    from.write_all_at(&[7; 100], 0)?;
    let size_is = |size| -> Check {
        let now = file.metadata()?.len();
        expect(now == size, &format!("{size} bytes: there are {now}"))
    };
    let keep = FallocateFlags::KEEP_SIZE;
    let modes = [
        FallocateFlags::empty(),
        FallocateFlags::ZERO_RANGE,
        keep,
        keep | FallocateFlags::ZERO_RANGE,
        keep | FallocateFlags::PUNCH_HOLE,
    ];
    for mode in modes {
        let beyond = rustix::fs::fallocate(&file, mode, END - 1, 2);
        expect_errno(beyond, Errno::FBIG)?;
        size_is(0)?;
    }
    rustix::fs::fallocate(&file, FallocateFlags::empty(), END - 1, 1)?;
    size_is(END)?;
    file.set_len(0)?;

    let copy = |mut to| rustix::fs::copy_file_range(&from, Some(&mut 0), &file, Some(&mut to), 100);
    expect_errno(copy(END), Errno::FBIG)?;
    size_is(0)?;
    expect(copy(END - 10)? == 10, "a copy comes as far as it can")?;
    size_is(END)?;

    // By a handle of its own each time: the kernel refuses what its position says before it looks for the end.
    let append = || {
        let fd = rustix::fs::open(&path, OFlags::APPEND | OFlags::WRONLY, Mode::empty())?;
        rustix::io::write(&fd, &[8; 100])
    };
    expect_errno(append(), Errno::FBIG)?;
    file.set_len(END - 10)?;
    expect(append()? == 10, "an append comes as far as it can")?;
    size_is(END)?;
    let mut last = [0; 11];
    file.read_exact_at(&mut last, END - 11)?;
    expect(last[0] == 0 && last[1..] == [8; 10], "it has its content")?;

    expect_errno(rustix::io::pwrite(&file, b"x", END), Errno::INVAL)?;
    expect(file.seek(SeekFrom::End(0))? == END, "the end is reached")?;
    expect(
        file.seek(SeekFrom::Current(1)).is_err(),
        "and nothing behind it",
    )?;
    file.sync_all()?;
    Ok(file.set_len(0)?)
}

pub fn append(dir: &Path) -> Check {
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

pub fn flock(dir: &Path) -> Check {
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

pub fn copy_range(dir: &Path) -> Check {
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

pub fn unlinked(dir: &Path) -> Check {
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

/// A part of `room` that begins at a multiple of 4 KiB.
fn aligned(room: &mut [u8], length: usize) -> &mut [u8] {
    let skip = room.as_ptr().align_offset(4096);
    &mut room[skip..skip + length]
}

pub fn direct(dir: &Path) -> Check {
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

pub fn synchronous(dir: &Path) -> Check {
    write_synchronously(dir)?;
    synchronous_writes_are_there(dir)
}

const SYNCHRONOUS: [(&str, i32); 2] = [("sync", O_SYNC), ("dsync", O_DSYNC)];

/// With names that are durable before.
pub fn write_synchronously(dir: &Path) -> Check {
    for (name, flag) in SYNCHRONOUS {
        let path = dir.join(name);
        open_new(&path)?.sync_all()?;
        File::open(dir)?.sync_all()?;
        let mut options = OpenOptions::new();
        let mut file = options.write(true).custom_flags(flag).open(&path)?;
        (0..50).try_for_each(|i| file.write_all(&[i; 700]))?;
    }
    Ok(())
}

pub fn synchronous_writes_are_there(dir: &Path) -> Check {
    let wanted: Vec<u8> = (0..50).flat_map(|i| [i; 700]).collect();
    for (name, _) in SYNCHRONOUS {
        let text = fs::read(dir.join(name))?;
        let what = format!("{name}: all is there; there are {} bytes", text.len());
        expect(text == wanted, &what)?;
    }
    Ok(())
}

pub fn statfs(dir: &Path) -> Check {
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

pub fn truncate(dir: &Path) -> Check {
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
