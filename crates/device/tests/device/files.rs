//! Arrays on files and loop devices, with both backends.

use crate::fixture::{CLAIMS, UNEQUAL, create, noise};
use device::{
    AlignedBuf, Array, ArrayId, Backend, Durability, Error, Io, Occupied, OpenOptions, Reaping,
    claim, companions, create_image, find_members, open_devices, probe, scan,
};
use format::label::Label;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;
use zerocopy::{FromBytes, IntoBytes};

pub struct Images {
    pub dir: TempDir,
    pub paths: Vec<PathBuf>,
}

impl Images {
    pub fn new(sizes: &[u64]) -> Images {
        let dir = TempDir::new().unwrap();
        let paths: Vec<PathBuf> = (0..sizes.len())
            .map(|i| dir.path().join(format!("{}.img", (b'a' + i as u8) as char)))
            .collect();
        for (path, &bytes) in paths.iter().zip(sizes) {
            create_image(path, bytes).unwrap();
        }
        Images { dir, paths }
    }

    pub fn create(&self, options: &OpenOptions) -> Array {
        create(open_devices(&self.paths, options).unwrap(), 64 << 10)
    }
}

fn backend(backend: Backend, direct: bool) -> OpenOptions {
    OpenOptions {
        backend,
        direct,
        ..OpenOptions::default()
    }
}

/// Every combination that this machine has; io_uring may be blocked.
fn combinations() -> Vec<OpenOptions> {
    let probe = Images::new(&[4096]);
    [Backend::IoUring, Backend::Threads]
        .into_iter()
        .flat_map(|b| [true, false].map(|direct| backend(b, direct)))
        .flat_map(|options| Reaping::ALL.map(|reap| OpenOptions { reap, ..options }))
        .filter(|options| options.backend == Backend::IoUring || options.reap == Reaping::Interrupt)
        .filter(|options| {
            !matches!(
                open_devices(&probe.paths, options),
                Err(Error::NoIoUring { .. })
            )
        })
        .collect()
}

#[test]
fn contents_survive_closing_and_opening_in_any_order_with_any_backend() {
    for options in combinations() {
        let mut images = Images::new(&UNEQUAL);
        let array = images.create(&options);
        array.write_labels().unwrap();
        // Over 64 requests a device, across zones, aligned in memory and not.
        let data = AlignedBuf::from_slice(&noise(1, 24 << 20));
        let shifted = noise(2, (1 << 20) + 24);
        let far = array.bytes() - (1 << 20);
        array
            .execute(&mut [
                Io::Write {
                    byte: 512,
                    buf: &data,
                    durability: Durability::Volatile,
                },
                Io::Write {
                    byte: far,
                    buf: &shifted[24..],
                    durability: Durability::Durable,
                },
            ])
            .unwrap();
        array.flush().unwrap();
        drop(array);
        images.paths.reverse();
        let array = Array::assemble(open_devices(&images.paths, &options).unwrap(), false).unwrap();
        assert!(array.label_repairs().is_empty());
        assert_eq!(
            array.device_names()[0],
            images.paths[2].display().to_string()
        );
        let mut aligned = AlignedBuf::zeroed(24 << 20);
        let mut odd = vec![0; (1 << 20) + 3];
        array
            .execute(&mut [
                Io::Read {
                    byte: 512,
                    buf: &mut aligned,
                },
                Io::Read {
                    byte: far,
                    buf: &mut odd[3..],
                },
            ])
            .unwrap();
        assert!(aligned[..] == data[..], "{options:?}");
        assert!(odd[3..] == shifted[24..], "{options:?}");
    }
}

#[test]
fn many_threads_write_and_flush_at_once() {
    for options in combinations() {
        let images = Images::new(&UNEQUAL);
        let array = images.create(&options);
        base::thread::parallel(8, |thread| {
            for round in 0..20u64 {
                let byte = (thread as u64 * 20 + round) * (96 << 10);
                let data = noise(byte, 96 << 10);
                array.write(byte, &data, Durability::Volatile).unwrap();
                array.flush().unwrap();
                let mut read = AlignedBuf::zeroed(data.len());
                array.read(byte, &mut read).unwrap();
                assert!(read[..] == data[..]);
            }
        });
        let stats = array.stats();
        let flushes: u64 = stats.devices.iter().map(|d| d.flushes).sum();
        assert!(flushes > 0 && flushes <= 8 * 20 * 3, "{stats:?}");
        assert!(stats.devices.iter().all(|d| d.errors == 0), "{stats:?}");
        assert_eq!(array.flush_failures(), 0);
    }
}

#[test]
fn the_backend_is_reported() {
    let images = Images::new(&UNEQUAL);
    let devices = open_devices(&images.paths, &backend(Backend::Threads, true)).unwrap();
    let info = devices[0].info();
    assert_eq!(info.backend, "preadv2+pool");
    assert_eq!((info.kind, info.bytes), ("file", UNEQUAL[0]));
    assert_eq!(info.rotational, None);
}

#[test]
fn a_second_opener_is_told_that_the_image_is_in_use() {
    let images = Images::new(&UNEQUAL);
    let options = OpenOptions::default();
    let first = images.create(&options);
    first.write_labels().unwrap();
    let error = open_devices(&images.paths, &options).err().unwrap();
    assert!(matches!(&error, Error::InUse { device } if device.ends_with("a.img")));
    assert!(error.to_string().contains("in use"), "{error}");
    let read_only = OpenOptions {
        read_only: true,
        ..options
    };
    assert!(open_devices(&images.paths, &read_only).is_err());
    drop(first);
    // Readers share, and keep writers out.
    let reader = open_devices(&images.paths, &read_only).unwrap();
    let _second = open_devices(&images.paths, &read_only).unwrap();
    assert!(open_devices(&images.paths, &options).is_err());
    let array = Array::assemble(reader, true).unwrap();
    array.read(0, &mut [0; 512]).unwrap();
}

#[test]
fn a_thread_that_did_io_does_not_keep_a_closed_image_locked() {
    let images = Images::new(&UNEQUAL);
    for _ in 0..20 {
        let array = images.create(&OpenOptions::default());
        array.write(0, &[3; 4096], Durability::Durable).unwrap();
        array.flush().unwrap();
    }
}

#[test]
fn what_cannot_be_opened_is_named_with_the_remedy() {
    let images = Images::new(&[1 << 20]);
    let options = OpenOptions::default();
    let open = |path: &Path| {
        open_devices(&[path.to_owned()], &options)
            .err()
            .unwrap()
            .to_string()
    };
    let missing = open(&images.dir.path().join("none.img"));
    assert!(missing.contains("none.img") && missing.contains("check the path"));
    let directory = open(images.dir.path());
    assert!(directory.contains("neither a block device nor a regular file"));
    assert!(open(Path::new("/dev/null")).contains("neither"));
    let link = images.dir.path().join("link.img");
    std::os::unix::fs::symlink(&images.paths[0], &link).unwrap();
    let twice = open_devices(&[images.paths[0].clone(), link], &options).err();
    assert!(matches!(twice, Some(Error::GivenTwice { .. })));
    let again = create_image(&images.paths[0], 4096).unwrap_err();
    assert!(again.to_string().contains("a.img"), "{again}");
}

#[test]
fn a_file_that_shrank_behind_us_gives_an_error_with_device_and_offset() {
    for options in combinations() {
        let images = Images::new(&UNEQUAL);
        let array = images.create(&options);
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(&images.paths[2])
            .unwrap();
        file.set_len(1 << 20).unwrap();
        let mut buf = AlignedBuf::zeroed(12 << 20);
        let error = array.read(0, &mut buf).unwrap_err();
        assert!(
            matches!(&error, Error::Io { device, operation: "read", .. }
                if device.ends_with("c.img")),
            "{error}"
        );
    }
}

#[test]
fn discarded_blocks_go_back_to_the_host() {
    use std::os::unix::fs::MetadataExt;
    let images = Images::new(&UNEQUAL);
    let array = images.create(&OpenOptions::default());
    array
        .write(0, &noise(1, 16 << 20), Durability::Volatile)
        .unwrap();
    array.flush().unwrap();
    let used = || -> u64 {
        let paths = images.paths.iter();
        paths
            .map(|p| std::fs::metadata(p).unwrap().blocks() * 512)
            .sum()
    };
    let before = used();
    array.discard(0, 16 << 20).unwrap();
    assert!(used() <= before - (15 << 20), "{before} {}", used());
}

#[test]
fn members_are_found_by_uuid_and_by_name() {
    let images = Images::new(&UNEQUAL);
    let array = images.create(&OpenOptions::default());
    let mut candidates = images.paths.clone();
    candidates.reverse();
    candidates.push(images.dir.path().join("none"));
    assert!(scan(None, &candidates).is_empty());
    array.write_labels().unwrap();
    // While it is in use, too.
    let uuid = device::uuid_text(&array.uuid());
    for id in [format!("UUID={uuid}"), "LABEL=test".to_owned()] {
        let id = ArrayId::parse(&id).unwrap();
        assert_eq!(find_members(&id, &candidates).unwrap(), images.paths);
    }
    let other = ArrayId::parse("LABEL=other").unwrap();
    let error = find_members(&other, &candidates).unwrap_err();
    assert!(error.to_string().contains("LABEL=other"), "{error}");
    assert_eq!(ArrayId::parse("/dev/sda"), None);
    // It was any file system without a name.
    for none in ["LABEL=", "LABEL=\"\"", "UUID=", "NAME=test"] {
        assert_eq!(ArrayId::parse(none), None, "{none}");
    }
    assert_eq!(probe(&images.paths[0]), Some("sheaf"));
}

fn refused_as_duplicate(found: Result<Vec<PathBuf>, Error>, twins: [&Path; 2]) {
    let error = found.unwrap_err();
    let named = |name: &str| twins.iter().any(|twin| *twin == Path::new(name));
    let Error::Duplicate { first, second, .. } = &error else {
        panic!("{error}");
    };
    assert!(first != second && named(first) && named(second), "{error}");
    assert!(error.to_string().contains("one by one"), "{error}");
}

/// Whichever of both came first by name was taken, and the real one's content was lost with the first write.
#[test]
fn nobody_chooses_between_a_device_and_its_copy() {
    let images = Images::new(&UNEQUAL);
    images
        .create(&OpenOptions::default())
        .write_labels()
        .unwrap();
    let [a, b, c] = [0, 1, 2].map(|i| images.paths[i].as_path());
    for name in ["0", "z"] {
        let copy = images.dir.path().join(name);
        std::fs::copy(c, &copy).unwrap();
        let mut candidates = images.paths.clone();
        candidates.push(copy.clone());
        candidates.sort();
        for named in [a, b] {
            refused_as_duplicate(companions(named, &candidates), [c, &copy]);
        }
        let by_name = ArrayId::parse("LABEL=test").unwrap();
        refused_as_duplicate(find_members(&by_name, &candidates), [c, &copy]);
        // Which of both is meant is not in doubt here.
        assert_eq!(companions(c, &candidates).unwrap(), images.paths);
        let with_copy = companions(&copy, &candidates).unwrap();
        assert_eq!(with_copy, [a, b, &copy]);
        std::fs::remove_file(copy).unwrap();
    }
}

#[test]
fn one_image_by_several_names_is_one_device() {
    let images = Images::new(&UNEQUAL);
    let array = images.create(&OpenOptions::default());
    array.write_labels().unwrap();
    drop(array);
    let mut candidates = images.paths.clone();
    let others = ["hard", "soft"].map(|name| images.dir.path().join(name));
    std::fs::hard_link(&images.paths[1], &others[0]).unwrap();
    std::os::unix::fs::symlink(&images.paths[2], &others[1]).unwrap();
    candidates.extend(others);
    let by_name = ArrayId::parse("LABEL=test").unwrap();
    assert_eq!(find_members(&by_name, &candidates).unwrap(), images.paths);
    let found = companions(&images.paths[0], &candidates).unwrap();
    assert_eq!(found, images.paths);
}

/// Of an array that was made again with its UUID an old device may lie there still.
#[test]
fn companions_are_those_whose_labels_say_the_same() {
    let images = Images::new(&UNEQUAL);
    let make = || {
        let array = images.create(&OpenOptions::default());
        array.write_labels().unwrap();
    };
    make();
    let old = images.dir.path().join("0");
    std::fs::copy(&images.paths[1], &old).unwrap();
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&old)
        .unwrap();
    relabel(&file, UNEQUAL[1], |label| label.hash_key = [9; 16]);
    let mut candidates = images.paths.clone();
    candidates.insert(0, old.clone());
    let found = companions(&images.paths[0], &candidates).unwrap();
    assert_eq!(found, images.paths);
    // Where there is nothing else, it is not passed over: that labels disagree is told by who opens them.
    candidates.remove(2);
    let found = companions(&images.paths[0], &candidates).unwrap();
    let devices = open_devices(&found, &OpenOptions::default()).unwrap();
    let error = Array::assemble(devices, true).unwrap_err();
    assert!(matches!(error, Error::LabelsDisagree { .. }), "{error}");
}

/// Changes both copies of an image's label.
pub fn relabel(image: &std::fs::File, bytes: u64, change: impl Fn(&mut Label)) {
    let mut block = [0; 4096];
    image.read_exact_at(&mut block, 0).unwrap();
    let mut label = Label::read_from_bytes(&block).unwrap();
    change(&mut label);
    label.seal();
    for at in [0, bytes - 4096] {
        image.write_all_at(label.as_bytes(), at).unwrap();
    }
}

/// One of two file systems with one name was called foreign, and the user was told to leave it out who had not named it.
#[test]
fn file_systems_with_one_name_are_told_apart_by_uuid() {
    let both = [Images::new(&UNEQUAL), Images::new(&UNEQUAL)];
    let mut candidates = Vec::new();
    for (i, images) in both.iter().enumerate() {
        drop({
            let array = images.create(&OpenOptions::default());
            array.write_labels().unwrap();
            array
        });
        for (path, bytes) in images.paths.iter().zip(UNEQUAL) {
            let file = std::fs::File::options().read(true).write(true).open(path);
            relabel(&file.unwrap(), bytes, |label| label.uuid[0] = i as u8);
            candidates.push(path.clone());
        }
    }
    let by_name = ArrayId::parse("LABEL=test").unwrap();
    let error = find_members(&by_name, &candidates).unwrap_err();
    assert!(matches!(error, Error::SameName { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("2 file systems are called \"test\""),
        "{text}"
    );
    for (images, beginning) in both.iter().zip(["UUID=00", "UUID=01"]) {
        assert!(text.contains(beginning), "{text}");
        for path in &images.paths {
            assert!(text.contains(path.to_str().unwrap()), "{text}");
        }
        let uuid = scan(None, &images.paths)[0].uuid;
        let found = find_members(&ArrayId::Uuid(uuid), &candidates).unwrap();
        assert_eq!(found, images.paths);
    }
}

#[test]
fn a_claim_keeps_others_out_and_writes_nothing() {
    let _claims = CLAIMS.lock();
    let images = Images::new(&UNEQUAL);
    let before = std::fs::read(&images.paths[1]).unwrap();
    let options = OpenOptions::default();
    let in_use = |error| matches!(error, Some(Error::InUse { .. }));
    let held = open_devices(&images.paths[1..2], &options).unwrap();
    assert!(in_use(claim(&images.paths).err()));
    drop(held);
    // Nothing is left of one that failed.
    let all = claim(&images.paths).unwrap();
    for path in &images.paths {
        let path = std::slice::from_ref(path);
        assert!(in_use(open_devices(path, &options).err()));
        assert!(in_use(claim(path).err()));
    }
    drop(all);
    let twice = [&images.paths[0], &images.paths[0]].map(Clone::clone);
    assert!(matches!(claim(&twice), Err(Error::GivenTwice { .. })));
    assert!(claim(&images.paths).is_ok());
    assert!(std::fs::read(&images.paths[1]).unwrap() == before);
}

/// Who named a file system once was told to name each device once.
#[test]
fn loop_devices_over_one_image_are_one_device() {
    let _claims = CLAIMS.lock();
    let images = Images::new(&UNEQUAL);
    images
        .create(&OpenOptions::default())
        .write_labels()
        .unwrap();
    let [a, b, c] = &images.paths[..] else {
        panic!("{:?}", images.paths)
    };
    // The third begins as the first does, and shows less.
    let attached = [
        Loop::attach_part(a, 0, UNEQUAL[0] / 2),
        Loop::attach(a),
        Loop::attach(a),
        Loop::attach(b),
        Loop::attach(c),
    ];
    let [Some(short), Some(first), Some(twin), Some(b), Some(c)] = &attached else {
        return base::skip("loop devices for a user without root");
    };
    let candidates = [short, first, twin, b, c].map(|device| device.0.clone());
    let by_name = ArrayId::parse("LABEL=test").unwrap();
    for found in [
        find_members(&by_name, &candidates).unwrap(),
        companions(&b.0, &candidates).unwrap(),
    ] {
        assert!(found[0] == first.0 || found[0] == twin.0, "{found:?}");
        let devices = open_devices(&found, &OpenOptions::default()).unwrap();
        assert_eq!(
            Array::assemble(devices, false).unwrap().devices().count(),
            3
        );
    }
}

#[test]
fn other_owners_are_recognised_and_wiped_by_mkfs() {
    let minix = |magic_at: usize, magic: [u8; 2]| {
        let mut superblock = vec![0; 32];
        // As many inodes as one block of their map has bits for, or fewer, and blocks of 1 KiB.
        superblock[..2].copy_from_slice(&[0x20, 0x20]);
        for at in [4, 6, 8] {
            superblock[at..at + 2].copy_from_slice(&[1, 1]);
        }
        superblock[28..30].copy_from_slice(&[0, 4]);
        superblock[magic_at..magic_at + 2].copy_from_slice(&magic);
        superblock
    };
    let minix = [
        minix(16, [0x8f, 0x13]),
        minix(16, [0x24, 0x68]),
        minix(24, [0x5a, 0x4d]),
    ];
    let end = 64 << 20;
    let cases: &[(&str, u64, &[u8])] = &[
        ("ext2", 0x438, b"\x53\xef"),
        ("xfs", 0, b"XFSB"),
        ("btrfs", 0x10040, b"_BHRfS_M"),
        ("swap", 4086, b"SWAPSPACE2"),
        ("partition table (gpt)", 512, b"EFI PART"),
        ("LVM2", 512, b"LABELONE"),
        ("md", 4096, b"\xfc\x4e\x2b\xa9"),
        ("luks", 0, b"LUKS\xba\xbe"),
        ("f2fs", 1024, b"\x10\x20\xf5\xf2"),
        ("vfat", 0x52, b"FAT32   "),
        ("ntfs", 3, b"NTFS    "),
        ("zfs", (128 << 10) + 3072, b"\x0c\xb1\xba\0\0\0\0\0"),
        ("udf", 32769, b"BEA01"),
        ("ocfs2", 8192, b"OCFSV2"),
        ("ocfs2", 1024, b"OCFSV2"),
        ("reiserfs", 8192 + 0x34, b"ReIsErFs"),
        ("reiser4", 65536, b"ReIsEr4"),
        ("oracleasm", 32, b"ORCLDISK"),
        ("ufs", 9564, b"\x54\x19\x01\x00"),
        ("ufs", 66908, b"\x19\x01\x54\x19"),
        ("zonefs", 0, b"SFOZ"),
        ("minix", 1024, &minix[0]),
        ("minix", 1024, &minix[1]),
        ("minix", 1024, &minix[2]),
        ("bluestore", 0, b"bluestore block device"),
        ("intel raid", end - 1024, b"Intel Raid ISM Cfg Sig. 1.3.00"),
        ("ddf raid", end - 512, b"\xde\x11\xde\x11"),
        ("ddf raid", end - 257 * 512, b"\xde\x11\xde\x11"),
        ("drbd", end - 4096 + 60, b"\x83\x74\x02\x6b"),
        ("drbd", end - 4096 + 60, b"\x83\x74\x02\x6d"),
    ];
    for &(name, offset, magic) in cases {
        let images = Images::new(&[64 << 20]);
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(&images.paths[0])
            .unwrap();
        file.write_all_at(magic, offset).unwrap();
        assert_eq!(probe(&images.paths[0]), Some(name));
        let devices = open_devices(&images.paths, &OpenOptions::default()).unwrap();
        let error = Array::assemble(devices, true).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
        drop(images.create(&OpenOptions::default()));
        assert_eq!(probe(&images.paths[0]), None, "{name}");
    }
    let empty = Images::new(&[64 << 20]);
    assert_eq!(probe(&empty.paths[0]), None);
    // Two bytes alone are nobody's.
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(&empty.paths[0]);
    file.unwrap().write_all_at(b"\x7f\x13", 1040).unwrap();
    assert_eq!(probe(&empty.paths[0]), None);
    assert_eq!(probe(Path::new("/nonexistent")), None);
}

/// A loop device over a file; `None` where the machine does not let us make one.
struct Loop(PathBuf);

impl Loop {
    fn attach(image: &Path) -> Option<Loop> {
        Loop::attach_part(image, 0, 0)
    }

    /// Over so many bytes from there; 0: to the end.
    fn attach_part(image: &Path, offset: u64, limit: u64) -> Option<Loop> {
        let out = Command::new("losetup")
            .args(["--find", "--show"])
            .arg(format!("--offset={offset}"))
            .arg(format!("--sizelimit={limit}"))
            .arg(image)
            .output()
            .ok()?;
        let path = String::from_utf8(out.stdout).ok()?;
        if !out.status.success() {
            return None;
        }
        let attached = Loop(PathBuf::from(path.trim()));
        // A test that was killed may have left it read-only; it stays so when its next file comes.
        set_writable(&attached.0, true);
        Some(attached)
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let done = Command::new("losetup")
            .arg("--detach")
            .arg(&self.0)
            .status();
        assert!(done.is_ok_and(|s| s.success()));
    }
}

#[test]
fn a_block_device_is_claimed_until_the_claim_is_released() {
    let _claims = CLAIMS.lock();
    let images = Images::new(&[64 << 20]);
    let Some(disk) = Loop::attach(&images.paths[0]) else {
        return base::skip("loop devices for a user without root");
    };
    let paths = [disk.0.clone()];
    let options = OpenOptions::default();
    let array = create(open_devices(&paths, &options).unwrap(), 64 << 10);
    array.write_labels().unwrap();
    let info = array.devices().next().unwrap().info();
    assert_eq!(info.kind, "block device");
    assert!(info.rotational.is_some());
    let error = open_devices(&paths, &options).err().unwrap();
    assert!(matches!(error, Error::InUse { .. }), "{error}");

    array.release_claim(0).unwrap();
    array.verify_label(0).unwrap();
    let data = noise(4, 1 << 20);
    array.write(0, &data, Durability::Volatile).unwrap();
    array.flush().unwrap();
    let mut read = vec![0; data.len()];
    array.read(0, &mut read).unwrap();
    assert!(read == data);
    // The kernel can claim it now; nobody else gets it even when the kernel has let go.
    let claim = || {
        let mut options = std::fs::File::options();
        options.read(true).custom_flags(libc::O_EXCL).open(&disk.0)
    };
    let kernel = claim().unwrap();
    assert!(claim().is_err());
    drop(kernel);
    for read_only in [false, true] {
        let options = OpenOptions {
            read_only,
            ..options
        };
        let error = open_devices(&paths, &options).err().unwrap();
        assert!(matches!(error, Error::InUse { .. }), "{error}");
    }

    // Somebody else's label in the meantime is noticed.
    let zeros = AlignedBuf::zeroed(64 << 10);
    let device = array.devices().next().unwrap();
    device.write(0, &zeros, Durability::Durable).unwrap();
    device
        .write((64 << 20) - (64 << 10), &zeros, Durability::Durable)
        .unwrap();
    assert!(array.verify_label(0).is_err());
    assert!(array.discard(0, 1 << 20).is_ok());
    drop(array);
    open_devices(&paths, &options).unwrap();
}

/// It was opened for writing, and the first write failed: after what others had been told was durable, or was wiped.
#[test]
fn a_block_device_that_takes_no_writes_is_opened_to_read_and_not_to_write() {
    let _claims = CLAIMS.lock();
    let images = Images::new(&[64 << 20; 2]);
    let (Some(disk), Some(protected)) = (
        Loop::attach(&images.paths[0]),
        Loop::attach(&images.paths[1]),
    ) else {
        return base::skip("loop devices for a user without root");
    };
    let paths = [disk.0.clone(), protected.0.clone()];
    let array = create(
        open_devices(&paths, &OpenOptions::default()).unwrap(),
        64 << 10,
    );
    array.write_labels().unwrap();
    drop(array);
    set_writable(&protected.0, false);
    for exclusive in [true, false] {
        let options = OpenOptions {
            exclusive,
            ..OpenOptions::default()
        };
        let error = open_devices(&paths, &options).err().unwrap();
        assert_eq!(error.raw_os_error(), Some(libc::EROFS), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("blockdev --setrw") && !text.contains("mount"),
            "{text}"
        );
        assert!(text.starts_with(protected.0.to_str().unwrap()), "{text}");
        let read_only = OpenOptions {
            read_only: true,
            ..options
        };
        let devices = open_devices(&paths, &read_only).unwrap();
        let array = Array::assemble(devices, true).unwrap();
        array.read(0, &mut [0; 512]).unwrap();
    }
    set_writable(&protected.0, true);
    open_devices(&paths, &OpenOptions::default()).unwrap();
}

/// Tests that were stopped between left loop devices behind that no later test could write to.
#[test]
fn a_loop_device_left_read_only_takes_writes_with_its_next_file() {
    let _claims = CLAIMS.lock();
    let images = Images::new(&[1 << 20]);
    let mut options = std::fs::File::options();
    let image = options.read(true).write(true).open(&images.paths[0]);
    let image = image.unwrap();
    // Somebody else may take the one that was let go.
    for _ in 0..16 {
        let Ok((first, attached)) = base::sys::attach_loop(&image) else {
            return base::skip("loop devices for a user without root");
        };
        set_writable(&first, false);
        assert!(base::sys::is_write_protected(&attached).unwrap());
        drop(attached);
        let (second, attached) = base::sys::attach_loop(&image).unwrap();
        assert!(!base::sys::is_write_protected(&attached).unwrap());
        if first == second {
            return;
        }
    }
    panic!("no device was given out twice");
}

fn set_writable(device: &Path, writable: bool) {
    let option = if writable { "--setrw" } else { "--setro" };
    let done = Command::new("blockdev").arg(option).arg(device).status();
    assert!(done.unwrap().success());
}

/// A file and loop devices over it are one by any name; what shares none of the bytes is another.
#[test]
fn what_devices_lie_on_is_known_by_its_other_names() {
    let _claims = CLAIMS.lock();
    let images = Images::new(&[64 << 20, 64 << 20]);
    let [image, other] = &images.paths[..] else {
        panic!("{:?}", images.paths)
    };
    let look = |path: &Path| std::fs::metadata(path).unwrap();
    let link = image.with_extension("link");
    std::fs::hard_link(image, &link).unwrap();
    let occupied = Occupied::by(std::slice::from_ref(image)).unwrap();
    assert!(occupied.has(&look(image)) && occupied.has(&look(&link)));
    assert!(!occupied.has(&look(other)) && !occupied.has(&look(Path::new("/dev/null"))));
    let (Some(device), Some(part)) = (Loop::attach(image), Loop::attach_part(image, 1 << 20, 0))
    else {
        return base::skip("loop devices for a user without root");
    };
    assert!(occupied.has(&look(&device.0)) && occupied.has(&look(&part.0)));
    let occupied = Occupied::by(std::slice::from_ref(&part.0)).unwrap();
    assert!(occupied.has(&look(&device.0)) && occupied.has(&look(image)));
    assert!(!occupied.has(&look(other)));
}

/// Each of two was taken for a device of its own, and what one had was destroyed by the other.
#[test]
fn loop_devices_over_the_same_bytes_are_one_storage() {
    let _claims = CLAIMS.lock();
    let images = Images::new(&[64 << 20]);
    let image = &images.paths[0];
    // The second is the first's twin, the third lies within both, the last beside all of them.
    let parts = [(1, 0), (1, 0), (16, 16), (0, 1)];
    let attached = parts.map(|(mib, limit)| Loop::attach_part(image, mib << 20, limit << 20));
    let [Some(first), Some(twin), Some(within), Some(beside)] = &attached else {
        return base::skip("loop devices for a user without root");
    };
    let options = OpenOptions::default();
    let read_only = OpenOptions {
        read_only: true,
        ..options
    };
    let open = |paths: &[&PathBuf], options: &OpenOptions| {
        let paths: Vec<PathBuf> = paths.iter().map(|&path| path.clone()).collect();
        open_devices(&paths, options)
    };
    for both in [[&first.0, &twin.0], [&within.0, &twin.0], [&first.0, image]] {
        let twice = open(&both, &options).err();
        assert!(matches!(twice, Some(Error::GivenTwice { .. })), "{both:?}");
    }
    for (one, others) in [
        (&first.0, [&twin.0, &within.0, image]),
        (&within.0, [&first.0, &twin.0, image]),
        (image, [&first.0, &twin.0, &beside.0]),
    ] {
        for (mine, theirs) in [
            (options, options),
            (options, read_only),
            (read_only, options),
        ] {
            if mine.read_only && one == image {
                // Of a file that is only read other parts may be written, as others may share it.
                continue;
            }
            let opened = open(&[one], &mine).unwrap();
            for other in others {
                let error = open(&[other], &theirs).err();
                let refused = matches!(error, Some(Error::InUse { .. }));
                assert!(refused, "{one:?} {other:?} {error:?}");
            }
            drop(opened);
        }
    }
    // Parts that share nothing are devices of their own.
    let apart = open(&[&first.0, &beside.0], &options).unwrap();
    assert_eq!(apart.len(), 2);
    drop(apart);
    let _first = open(&[&within.0], &options).unwrap();
    open(&[&beside.0], &options).unwrap();
    // Who comes later finds it in use as well.
    let late = Loop::attach_part(image, 20 << 20, 0).unwrap();
    let error = open(&[&late.0], &options).err();
    assert!(matches!(error, Some(Error::InUse { .. })), "{error:?}");
}

/// A child that the program forks would take from its parent what is in flight.
#[test]
fn rings_do_not_follow_into_a_child() {
    // Whether there are rings, and all of them stay behind.
    let stay_behind = || {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (mut rings, mut of_ring) = (0, false);
        for line in maps.lines() {
            of_ring |= line.ends_with("anon_inode:[io_uring]");
            if let Some(flags) = line.strip_prefix("VmFlags:")
                && std::mem::take(&mut of_ring)
            {
                rings += 1;
                if !flags.split(' ').any(|flag| flag == "dc") {
                    return false;
                }
            }
        }
        rings > 0
    };
    let images = Images::new(&UNEQUAL);
    let on_rings = |options: &OpenOptions| options.backend == Backend::IoUring;
    for options in combinations().into_iter().filter(on_rings) {
        let array = images.create(&options);
        array.write_labels().unwrap();
        // Another test may be making one at this moment.
        assert!((0..1000).any(|_| stay_behind()), "{options:?}");
    }
}
