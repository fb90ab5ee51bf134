//! Labels that are gone, both copies: what is said of them, whose are written again, and whose are not.

use std::fs::{self, File};
use std::mem::offset_of;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use format::label::Label;
use tempfile::TempDir;
use zerocopy::IntoBytes;

use crate::{Ran, sparse};

const CORRECTED: i32 = 1;
const UNCORRECTED: i32 = 4;
const OPERATIONAL: i32 = 8;
const USAGE: i32 = 16;

const DEVICE: u64 = 64 << 20;
const BLOCK: u64 = 4096;
/// Both copies of a label.
const COPIES: [u64; 2] = [0, DEVICE - BLOCK];

/// Three image files in a folder of their own, with a large file and many small ones.
struct Array {
    dir: TempDir,
    images: Vec<PathBuf>,
    /// How many small ones.
    files: usize,
}

fn sheaf(arguments: &[&str], paths: &[PathBuf]) -> Ran {
    crate::sheaf(arguments, &[], paths)
}

/// Bytes without a pattern.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 7u64;
    let next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
        (state >> 33) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

impl Array {
    fn made() -> Self {
        Array::with(3000)
    }

    /// So many small files: their metadata and the journal fill stripe units of all devices.
    fn with(files: usize) -> Self {
        let dir = TempDir::new().unwrap();
        let images: Vec<PathBuf> = ["a", "b", "c"].map(|name| dir.path().join(name)).into();
        sheaf(&["mkfs", "--quiet", "--size", "64M"], &images).exits(0);
        let array = Array { dir, images, files };
        let (who, mounted) = (::fs::Caller::root(), array.mounted(false));
        let tree = mounted.mkdir(&who, ::fs::ROOT, b"tree", 0o755).unwrap();
        for (name, content) in array.tree() {
            let made = mounted.create(&who, tree.ino, name.as_bytes(), 0o644, libc::O_RDWR);
            let (_, file) = made.unwrap();
            mounted.write(&file, 0, &content).unwrap();
            mounted.close_file(file);
        }
        mounted.close().unwrap();
        array
    }

    /// The names in the folder "tree", and what they are of.
    fn tree(&self) -> impl Iterator<Item = (String, Vec<u8>)> {
        let small = |i| (format!("a small file, number {i}"), noise(i % 300));
        let large = ("large".to_owned(), noise(3 << 20));
        std::iter::once(large).chain((0..self.files).map(small))
    }

    /// In this process. Nothing is written but by syncs and the close.
    fn mounted(&self, read_only: bool) -> Arc<::fs::FileSystem> {
        let options = device::OpenOptions::default();
        let devices = device::open_when_free(&self.images, &options).unwrap();
        let assembled = device::Array::assemble(devices, read_only).unwrap();
        let options = ::fs::FsOptions::default();
        let options = match read_only {
            true => options.read_only(),
            false => options.without_threads(::fs::Clock::real()),
        };
        ::fs::FileSystem::open(Arc::new(assembled), options).unwrap()
    }

    fn image(&self, index: usize) -> File {
        let options = File::options().read(true).write(true).to_owned();
        options.open(&self.images[index]).unwrap()
    }

    /// What `sgdisk --zap-all` does to it, or the like.
    fn lose_label(&self, index: usize) {
        for at in COPIES {
            self.image(index).write_all_at(&[0; 4096], at).unwrap();
        }
    }

    fn bytes(&self) -> Vec<Vec<u8>> {
        self.images
            .iter()
            .map(|i| sparse::read(i).unwrap())
            .collect()
    }

    fn fsck(&self, options: &[&str]) -> Ran {
        sheaf(&[&["fsck"], options].concat(), &self.images)
    }

    /// Sound, and every file as it was written.
    fn check(&self) {
        self.fsck(&[]).exits(0).says("no errors");
        let (who, mounted) = (::fs::Caller::root(), self.mounted(true));
        let mut names = 0;
        let mut count = |_: ::fs::DirEntry<'_>| {
            names += 1;
            true
        };
        let tree = mounted.resolve(b"/tree").unwrap();
        mounted.readdir(tree.ino, 0, &mut count).unwrap();
        // With "." and "..".
        assert_eq!(names, self.files + 3);
        for (name, content) in self.tree() {
            let opened = mounted.open_path(&who, tree.ino, name.as_bytes(), libc::O_RDONLY, 0);
            let (attr, file) = opened.unwrap();
            let mut found = vec![0; content.len()];
            assert_eq!(mounted.read(&file, 0, &mut found).unwrap(), content.len());
            assert!(
                attr.size == content.len() as u64 && found == content,
                "{name}"
            );
            mounted.close_file(file);
        }
        mounted.close().unwrap();
    }

    /// Refused, with these words, and nothing written.
    fn refuses(&self, words: &str) {
        let before = self.bytes();
        self.fsck(&["--relabel"]).exits(UNCORRECTED).says(words);
        assert!(self.bytes() == before, "it wrote");
    }
}

/// One command on the wrong disk, and the whole array was lost: nothing wrote the label again, and the advice was to run mkfs.
#[test]
fn a_lost_label_is_told_and_written_again() {
    let array = Array::made();
    for index in 0..3 {
        let sound = array.bytes();
        array.lose_label(index);
        let lost = array.bytes();
        array
            .fsck(&[])
            .exits(OPERATIONAL)
            .says("both copies of the label are gone")
            .says("carry labels of file system")
            .says(&format!("device {index} of 3"))
            .says("Do not run mkfs: `sheaf fsck --relabel ");
        let told = array.fsck(&["--json"]).exits(OPERATIONAL).json();
        assert!(told["error"].as_str().unwrap().contains("fsck --relabel"));
        for option in ["--repair", "--preen"] {
            for options in [&[option][..], &[option, "-n"]] {
                array
                    .fsck(options)
                    .exits(OPERATIONAL)
                    .says("`sheaf fsck --relabel ")
                    .says("not a copy of it");
            }
        }
        assert!(array.bytes() == lost, "it wrote");
        array
            .fsck(&["--relabel", "-n"])
            .exits(UNCORRECTED)
            .says("would be repaired: label");
        assert!(array.bytes() == lost, "it wrote");
        let report = array.fsck(&["--relabel", "--json"]).exits(CORRECTED).json();
        assert_eq!(report["repaired"], true);
        assert_eq!(report["actions"][0]["kind"], "label");
        assert!(array.bytes() == sound);
        array.check();
    }
}

/// As another user of such a file system meets it.
#[test]
fn an_array_with_a_label_written_again_mounts() {
    let array = Array::with(30);
    let mountpoint = array.dir.path().join("mnt");
    fs::create_dir(&mountpoint).unwrap();
    array.lose_label(1);
    let mount = || {
        let output = Command::new(env!("CARGO_BIN_EXE_sheaf"))
            .arg("mount")
            .args(&array.images)
            .arg(&mountpoint)
            .output();
        Ran(output.unwrap())
    };
    mount().exits(OPERATIONAL).says("`sheaf fsck --relabel ");
    array.fsck(&["--relabel"]).exits(CORRECTED);
    if !Path::new("/dev/fuse").exists() || !is_root() {
        return base::skip("mounts");
    }
    mount().exits(0);
    let large = fs::read(mountpoint.join("tree/large"));
    sheaf(&["umount"], std::slice::from_ref(&mountpoint)).exits(0);
    assert!(large.unwrap() == noise(3 << 20));
    array.check();
}

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

#[test]
fn a_disk_that_is_another_gets_no_label() {
    let array = Array::made();
    let sound = array.bytes();
    // Blank.
    File::create(&array.images[1])
        .unwrap()
        .set_len(DEVICE)
        .unwrap();
    array.refuses("nothing proves that it is the missing device");
    sparse::write(&array.images[1], &sound[1]).unwrap();
    // A copy of another member.
    for (copied, index) in [(0, 1), (1, 0), (2, 0)] {
        sparse::write(&array.images[index], &sound[copied]).unwrap();
        array.lose_label(index);
        array.refuses("nothing proves that it is the missing device");
        sparse::write(&array.images[index], &sound[index]).unwrap();
    }
    // Of another file system, made in the same way.
    let other = Array::made();
    for (index, (own, others)) in array.images.iter().zip(&other.images).enumerate() {
        other.lose_label(index);
        sparse::write(own, &sparse::read(others).unwrap()).unwrap();
        array.refuses("nothing proves that it is the missing device");
        sparse::write(own, &sound[index]).unwrap();
    }
    // Smaller than it was.
    let mut smaller = sound[1][..DEVICE as usize - 4096].to_vec();
    smaller[..4096].fill(0);
    sparse::write(&array.images[1], &smaller).unwrap();
    array.refuses("are smaller than the missing devices");
    sparse::write(&array.images[1], &sound[1]).unwrap();
    array.check();
}

#[test]
fn a_disk_that_was_enlarged_gets_its_label_again() {
    let array = Array::made();
    let larger = [&array.bytes()[1][..], &[0; 4096]].concat();
    sparse::write(&array.images[1], &larger).unwrap();
    array.lose_label(1);
    array.fsck(&["--relabel"]).exits(CORRECTED);
    array.check();
}

/// The smallest arrays have all of their metadata on one device.
#[test]
fn a_disk_with_nothing_that_can_be_verified_gets_no_label() {
    let array = Array::with(0);
    array.lose_label(2);
    array.refuses("file data has no checksums");
}

#[test]
fn a_label_of_which_most_is_left_needs_no_other_proof() {
    let array = Array::with(0);
    let sound = array.bytes();
    for index in 0..3 {
        for at in COPIES {
            let mut byte = [0];
            let image = array.image(index);
            image.read_exact_at(&mut byte, at + 200).unwrap();
            image.write_all_at(&[byte[0] ^ 4], at + 200).unwrap();
        }
        array.fsck(&["--relabel"]).exits(CORRECTED);
        assert!(array.bytes() == sound);
    }
    // But it is no proof for another place.
    let mut copy = sound[0].clone();
    for at in COPIES {
        copy[at as usize + 200] ^= 4;
    }
    sparse::write(&array.images[2], &copy).unwrap();
    array.refuses("what is left of their labels says otherwise");
}

/// An empty partition table, as `sgdisk --clear` writes it, at both ends.
fn clear(image: &File, first_entry: u8) {
    let mut head = [0; 5 * 4096];
    head[446 + 4] = 0xee;
    head[510..512].copy_from_slice(b"\x55\xaa");
    head[512..520].copy_from_slice(b"EFI PART");
    head[1024] = first_entry;
    let mut tail = [0; 33 * 512];
    tail[32 * 512..32 * 512 + 8].copy_from_slice(b"EFI PART");
    tail[0] = first_entry;
    image.write_all_at(&head, 0).unwrap();
    image.write_all_at(&tail, DEVICE - 33 * 512).unwrap();
}

#[test]
fn what_somebody_else_may_want_is_not_written_over() {
    let array = Array::made();
    let sound = array.bytes();
    array.lose_label(1);
    array.image(1).write_all_at(b"XFSB", 0).unwrap();
    array.refuses("wipefs");
    sparse::write(&array.images[1], &sound[1]).unwrap();
    clear(&array.image(1), 7);
    array.refuses("wipefs");
    sparse::write(&array.images[1], &sound[1]).unwrap();
    for index in 0..3 {
        // A table without a partition is what the mistake was; it takes checkpoint slots with it.
        clear(&array.image(index), 0);
        array
            .fsck(&["--relabel"])
            .exits(CORRECTED)
            .says("all errors corrected");
        // The copies of the slots.
        array.fsck(&["--repair"]);
        array.check();
    }
    // Since then checkpoints were made: what was there before is an old copy.
    sparse::write(&array.images[1], &sound[1]).unwrap();
    array.lose_label(1);
    array.refuses("it is an old copy");
}

#[test]
fn an_interrupted_repair_is_repeated() {
    let array = Array::made();
    let sound = array.bytes();
    // The last block comes first. With it no label is lost, and a copy of it is for a repair.
    array.image(1).write_all_at(&[0; 4096], 0).unwrap();
    let half = array.bytes();
    array.fsck(&["--relabel"]).exits(0).says("no errors");
    assert!(array.bytes() == half, "it wrote");
    array.fsck(&["--repair"]).exits(CORRECTED);
    // But for the mount, which a repair is one of, and with it the checksum.
    let plain = |label: &[u8]| {
        let mut label = label.to_vec();
        label[offset_of!(Label, crc)..][..4].fill(0);
        label[offset_of!(Label, mount_id)..][..8].fill(0);
        label
    };
    let now = sparse::read(&array.images[1]).unwrap();
    assert!(plain(&now[..4096]) == plain(&sound[1][..4096]));
    assert!(now[..4096] == now[COPIES[1] as usize..][..4096]);
    // Beside a partition table a label in the last block does not speak for a device.
    clear(&array.image(1), 0);
    let last = &now[COPIES[1] as usize..];
    array.image(1).write_all_at(last, COPIES[1]).unwrap();
    array.fsck(&["--relabel"]).exits(CORRECTED);
    array.check();
}

#[test]
fn of_several_lost_labels_each_is_proven() {
    let array = Array::made();
    let sound = array.bytes();
    array.lose_label(1);
    array.lose_label(2);
    array
        .fsck(&[])
        .exits(OPERATIONAL)
        .says("devices 1, 2 of 3")
        .says("Do not run mkfs");
    let swapped: Vec<PathBuf> = [2, 0, 1].map(|i| array.images[i].clone()).into();
    sheaf(&["fsck", "--relabel"], &swapped).exits(CORRECTED);
    assert!(array.bytes() == sound);
    // One of them is another disk.
    array.lose_label(1);
    File::create(&array.images[2])
        .unwrap()
        .set_len(DEVICE)
        .unwrap();
    array.refuses("proves");
}

#[test]
fn a_device_too_few_or_too_many_is_no_lost_label() {
    let array = Array::made();
    array.lose_label(1);
    let two = &array.images[..2];
    sheaf(&["fsck", "--relabel"], two)
        .exits(OPERATIONAL)
        .says("name all devices of this file system");
    let blank = array.dir.path().join("blank");
    File::create(&blank).unwrap().set_len(DEVICE).unwrap();
    let four = [&array.images[..], &[blank]].concat();
    sheaf(&["fsck", "--relabel"], &four)
        .exits(OPERATIONAL)
        .says("and no others");
}

#[test]
fn relabel_is_said_alone_and_of_devices_by_name() {
    let array = Array::with(0);
    for option in ["--repair", "--preen", "--quick"] {
        array.fsck(&["--relabel", option]).exits(USAGE);
    }
    sheaf(&["fsck", "--relabel", "LABEL=none"], &[])
        .exits(USAGE)
        .says("one by one");
    let before = array.bytes();
    array.fsck(&["--relabel"]).exits(0).says("no errors");
    assert!(array.bytes() == before, "it wrote");
}

/// Another image, in place of one, without a label.
fn put(array: &Array, index: usize, image: &[u8]) {
    sparse::write(&array.images[index], image).unwrap();
    array.lose_label(index);
}

impl Array {
    /// A file more, of so many bytes of noise, and a clean end.
    fn add(&self, name: &str, len: usize) {
        let file = self.dir.path().join(name);
        fs::write(&file, noise(len)).unwrap();
        let (a, file) = (self.images[0].to_str().unwrap(), file.to_str().unwrap());
        sheaf(&["cp", "-d", a, file, ":/"], &[]).exits(0);
    }

    /// The same devices, as they are now, in another place.
    fn copied(&self) -> Array {
        let dir = TempDir::new().unwrap();
        let images: Vec<PathBuf> = ["a", "b", "c"].map(|name| dir.path().join(name)).into();
        for (from, to) in self.images.iter().zip(&images) {
            sparse::write(to, &sparse::read(from).unwrap()).unwrap();
        }
        let files = self.files;
        Array { dir, images, files }
    }
}

/// It was taken for the device, and what was synced since was lost without a word.
#[test]
fn an_old_copy_gets_no_label() {
    let array = Array::made();
    let old = array.bytes();
    array.add("later", 5000);
    let sound = array.bytes();
    for index in [0, 1] {
        put(&array, index, &old[index]);
        array.refuses("it is an old copy");
        sparse::write(&array.images[index], &sound[index]).unwrap();
    }
    array.check();
}

/// The others were called otherwise, and it as well: its latest state was refused by everything then.
#[test]
fn nothing_is_called_otherwise_beside_an_old_copy() {
    let array = Array::with(0);
    let old = array.bytes();
    array.add("later", 5000);
    let sound = array.bytes();
    let label = |options: &[&str]| sheaf(&[&["label"], options].concat(), &array.images);
    for index in 0..3 {
        sparse::write(&array.images[index], &old[index]).unwrap();
        let before = array.bytes();
        for change in [["-L", "new"], ["-U", "random"]] {
            let name = array.images[index].to_str().unwrap();
            label(&change)
                .exits(OPERATIONAL)
                .says(&format!("{name} holds its state of mount"))
                .says("ttach the latest state of each device");
        }
        assert!(array.bytes() == before, "it wrote");
        label(&[]).exits(0);
        sparse::write(&array.images[index], &sound[index]).unwrap();
    }
    label(&["-L", "new"]).exits(0);
    // Put back to a copy from before that.
    sparse::write(&array.images[2], &sound[2]).unwrap();
    label(&[])
        .exits(OPERATIONAL)
        .says("disagree about what the array is called")
        .says_not("geometry");
}

/// The same, of a copy from after the last checkpoint, and of an array that ended without one.
#[test]
fn an_old_copy_of_an_array_in_use_gets_no_label_but_where_the_journal_ends() {
    let array = Array::made();
    let mounted = array.mounted(false);
    let who = ::fs::Caller::root();
    let add = |i: usize| {
        let name = format!("a file of which the journal says all, number {i}");
        let made = mounted.create(&who, ::fs::ROOT, name.as_bytes(), 0o644, libc::O_RDWR);
        let (_, file) = made.unwrap();
        mounted.write(&file, 0, &noise(100)).unwrap();
        mounted.fsync(&file, false).unwrap();
        mounted.close_file(file);
    };
    (0..10).for_each(add);
    let old = array.bytes();
    (10..400).for_each(add);
    let cut = array.copied();
    mounted.close().unwrap();
    let sound = cut.bytes();
    let mut taken = 0;
    for (index, old) in old.iter().enumerate() {
        if *old == sound[index] {
            continue;
        }
        put(&cut, index, old);
        let before = cut.bytes();
        match cut.fsck(&["--relabel"]).0.status.code() {
            Some(UNCORRECTED) => assert!(cut.bytes() == before, "it wrote"),
            // The journal's end lies on it alone, so that nothing is known of what came last.
            code => {
                assert_eq!(code, Some(CORRECTED));
                let found = numbers(&cut);
                assert!(found.iter().copied().eq(0..found.len()) && found.len() >= 10);
                taken += 1;
            }
        }
        sparse::write(&cut.images[index], &sound[index]).unwrap();
    }
    assert!(taken <= 1, "{taken} of 3");
    // The device itself gets it.
    for index in [0, 1] {
        cut.lose_label(index);
        cut.fsck(&["--relabel"]).exits(CORRECTED);
        assert!(cut.bytes() == sound);
    }
}

/// Which of the files that were added are there, in order.
fn numbers(array: &Array) -> Vec<usize> {
    let mounted = array.mounted(true);
    let mut found = Vec::new();
    mounted
        .readdir(::fs::ROOT, 0, &mut |entry| {
            let name = String::from_utf8_lossy(entry.name);
            let number = name.rsplit_once("number ").map(|(_, number)| number);
            found.extend(number.map(|number| number.parse::<usize>().unwrap()));
            true
        })
        .unwrap();
    mounted.close().unwrap();
    found.sort_unstable();
    found
}

/// Both went their own way after a copy of the whole array: the same UUID, and the same journal up to there.
#[test]
fn a_disk_of_a_clone_that_diverged_gets_no_label() {
    for more in [1, 2, 3] {
        let array = Array::made();
        let clone = array.copied();
        array.add("ours", 5000);
        (0..more).for_each(|i| clone.add(&format!("theirs {i}"), 7000));
        let (sound, theirs) = (array.bytes(), clone.bytes());
        for index in [0, 1] {
            put(&array, index, &theirs[index]);
            array.refuses("of another history of this file system");
            sparse::write(&array.images[index], &sound[index]).unwrap();
        }
        array.check();
    }
}

/// Made by the same commands within the same second, it had the same nodes and tables in the same places.
#[test]
fn a_disk_of_a_twin_gets_no_label() {
    for files in [0, 30, 3000] {
        let (array, twin) = (Array::with(files), Array::with(files));
        let sound = array.bytes();
        for (index, theirs) in twin.bytes().iter().enumerate() {
            put(&array, index, theirs);
            array.refuses("nothing proves that it is the missing device");
            // Without its records, too, which have the other UUID.
            clear(&array.image(index), 0);
            array.refuses("nothing proves that it is the missing device");
            sparse::write(&array.images[index], &sound[index]).unwrap();
        }
        array.check();
    }
}

/// Only the label is written, and the rest is for a repair.
#[test]
fn other_damage_is_left_to_a_repair() {
    let array = Array::made();
    // Names in nodes, behind the journal, on another device than the one without a label.
    let image = sparse::read(&array.images[0]).unwrap();
    let options = device::OpenOptions::default();
    let devices = device::open_when_free(&array.images, &options).unwrap();
    let assembled = device::Array::assemble(devices, true).unwrap();
    let geometry = assembled.geometry();
    let journal = geometry.journal_start.byte() + geometry.journal_bytes();
    let behind = journal as usize / 3 + (1 << 20);
    drop(assembled);
    for (i, block) in image.chunks(4096).enumerate().skip(behind / 4096) {
        let name = b"a small file, number";
        let names = |at: &usize| block[*at..].starts_with(name);
        let in_use = block.iter().any(|byte| *byte != 0);
        for at in (0..block.len()).filter(|at| in_use && names(at)) {
            let at = (i * 4096 + at) as u64;
            array.image(0).write_all_at(b"A", at).unwrap();
        }
    }
    array.lose_label(1);
    let lost = array.bytes();
    array
        .fsck(&["--relabel", "-n"])
        .exits(UNCORRECTED)
        .says("and nothing else");
    assert!(array.bytes() == lost, "it wrote");
    let ran = array.fsck(&["--relabel"]).exits(UNCORRECTED);
    let ran = ran.says("repaired: label of device 1");
    ran.says("`sheaf fsck --repair` corrects what can be corrected");
    for (index, bytes) in array.bytes().iter().enumerate() {
        let blocks = bytes.chunks(4096).zip(lost[index].chunks(4096));
        for (i, (now, before)) in blocks.enumerate() {
            let label = index == 1 && COPIES.contains(&(i as u64 * BLOCK));
            assert!(label || now == before, "block {i} of device {index}");
        }
    }
    array.fsck(&["--repair"]).exits(CORRECTED);
}

/// Of an array of one device that somebody took for swap nobody said that it was one, but to run mkfs.
#[test]
fn a_second_label_below_another_owners_signature_is_told_and_serves_once_that_is_gone() {
    let dir = TempDir::new().unwrap();
    let images = vec![dir.path().join("a")];
    sheaf(&["mkfs", "--quiet", "--size", "64M"], &images).exits(0);
    let file = dir.path().join("file");
    fs::write(&file, noise(100_000)).unwrap();
    let (a, from) = (images[0].to_str().unwrap(), file.to_str().unwrap());
    sheaf(&["cp", "-d", a, from, ":/"], &[]).exits(0);
    let image = File::options().write(true).open(&images[0]).unwrap();
    let mut swap = [0; 4096];
    swap[4086..].copy_from_slice(b"SWAPSPACE2");
    image.write_all_at(&swap, 0).unwrap();
    for command in [&["fsck"][..], &["fsck", "--repair"], &["ls", "-d"]] {
        sheaf(command, &images)
            .exits(OPERATIONAL)
            .says("holds swap")
            .says("device 0 of 1 of file system")
            .says("do not run mkfs")
            .says(&format!("`wipefs --all {a}`"))
            .says_not("make a file system");
    }
    // As that does.
    image.write_all_at(&[0; 10], 4086).unwrap();
    sheaf(&["fsck", "--repair"], &images).exits(CORRECTED);
    sheaf(&["fsck"], &images).exits(0).says("1 file");
    let back = dir.path().join("back");
    let to = back.to_str().unwrap();
    sheaf(&["cp", "-d", a, ":/file", to], &[]).exits(0);
    assert!(fs::read(back).unwrap() == noise(100_000));
}

/// They change a terminal's state, and were printed as they are.
#[test]
fn what_controls_terminals_in_a_forged_label_is_escaped() {
    let array = Array::with(0);
    for (index, image) in array.images.iter().enumerate() {
        for at in COPIES {
            let mut block = [0; 4096];
            array.image(index).read_exact_at(&mut block, at).unwrap();
            let mut label = Label::parse(&block).unwrap();
            label.name[..6].copy_from_slice(b"a\x1b[2Jb");
            label.seal();
            let written = array.image(index).write_all_at(label.as_bytes(), at);
            written.unwrap_or_else(|error| panic!("{}: {error}", image.display()));
        }
    }
    let ran = sheaf(&["info"], &array.images).exits(0);
    let ran = ran.says("a\\u{1b}[2Jb");
    assert!(!ran.to_string().contains('\x1b'), "{ran}");
}
