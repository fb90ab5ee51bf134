//! Damaged folders and inodes, without a mount: what can be read still is listed and copied, and the rest told.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use ::fs::{Caller, ROOT};
use format::inode::{KIND_BUCKET, KIND_INODE};
use format::item::{self, ITEM_ALIGN, ITEM_MAX, ItemHeader, ItemKind};
use format::label::Label;
use format::{BLOCK_SIZE, U64};
use zerocopy::IntoBytes;

use crate::states::open;
use crate::{Array, CORRECTED, OPERATIONAL, Ran, UNCORRECTED, sheaf};

/// Enough for a folder of many leaves.
const FILES: usize = 1300;
const FEW: usize = 100;

fn on(array: &Array, command: &str, rest: &[&str]) -> Ran {
    let first = array.images[0].to_str().unwrap();
    sheaf(&[command, "-d", first], rest, &[])
}

/// A file system with a folder of many files, and one of few; the second value is the path of what it was copied from.
fn filled() -> (Array, String) {
    let array = Array::made(1);
    let from = array.path("tree");
    for (folder, count) in [("many", FILES), ("few", FEW)] {
        fs::create_dir_all(from.join(folder)).unwrap();
        for i in 0..count {
            fs::write(from.join(folder).join(file(i)), text(folder, i)).unwrap();
        }
    }
    fs::create_dir(from.join("few/inner")).unwrap();
    fs::write(from.join("few/inner/last"), "last").unwrap();
    let from = from.to_str().unwrap().to_owned();
    on(&array, "cp", &["-a", &from, ":/"]).succeeds();
    (array, from)
}

fn file(i: usize) -> String {
    format!("file-{i:04}")
}

fn text(folder: &str, i: usize) -> String {
    format!("{i} of {folder}")
}

/// Everything that looked at such an array took all memory.
#[test]
fn labels_of_a_mount_that_cannot_be_are_told() {
    let array = Array::made(2);
    for path in &array.images {
        let image = File::options().read(true).write(true).open(path).unwrap();
        let last = image.metadata().unwrap().len() - BLOCK_SIZE as u64;
        for at in [0, last] {
            let mut block = vec![0; BLOCK_SIZE];
            image.read_exact_at(&mut block, at).unwrap();
            let mut label = Label::parse(&block).unwrap();
            label.mount_id = U64::new(u64::MAX);
            label.seal();
            image.write_all_at(label.as_bytes(), at).unwrap();
        }
    }
    let mount = [&array.images[..], &[array.dir.path().to_owned()]].concat();
    for ran in [
        sheaf(&["fsck"], &[], &array.images),
        sheaf(&["fsck", "--repair"], &[], &array.images),
        sheaf(&["info"], &[], &array.images),
        sheaf(&["mount"], &[], &mount),
        on(&array, "ls", &[]),
    ] {
        ran.exits(OPERATIONAL)
            .says("device0.img")
            .says("mount number out of range")
            .says("backup");
    }
}

/// Flips a byte in each image of a node that `is_it` recognizes by kind, nid and payload, up to `most` nodes, which are told.
fn flip(array: &Array, most: usize, is_it: impl Fn(u8, u64, &[u8]) -> bool) -> BTreeSet<u64> {
    let image = File::options().write(true).open(&array.images[0]).unwrap();
    let bytes = fs::read(&array.images[0]).unwrap();
    let seed = Label::parse(&bytes[..BLOCK_SIZE]).unwrap().checksum_seed();
    let mut flipped = BTreeSet::new();
    for at in (0..bytes.len()).step_by(ITEM_ALIGN) {
        let end = bytes.len().min(at + ITEM_MAX);
        let Ok((header, payload)) = item::decode(seed, &bytes[at..end]) else {
            continue;
        };
        let nid = header.id.get();
        let known = flipped.len() < most || flipped.contains(&nid);
        if header.kind == ItemKind::Node as u8 && known && is_it(header.node_kind, nid, payload) {
            flipped.insert(nid);
            let middle = ItemHeader::SIZE + payload.len() / 2;
            image
                .write_all_at(&[bytes[at + middle] ^ 1], (at + middle) as u64)
                .unwrap();
        }
    }
    assert_eq!(flipped.len(), most);
    flipped
}

fn has(payload: &[u8], name: &str) -> bool {
    payload.windows(name.len()).any(|w| w == name.as_bytes())
}

/// Damages leaves of the large folder.
fn damage_leaves(array: &Array, most: usize) {
    flip(array, most, |kind, _, payload| {
        kind == KIND_BUCKET && has(payload, "file-")
    });
}

/// Damages the inode of something, by its number.
fn damage_inode(array: &Array, path: &str) {
    let (folder, name) = path.rsplit_once('/').unwrap();
    let listed = on(array, "ls", &["--json", folder]).succeeds().output();
    let entries = listed.lines().map(json);
    let mut entries = entries.filter(|entry| entry["path"] == format!("{folder}/{name}"));
    let inode = entries.next().unwrap()["inode"].as_u64().unwrap();
    flip(array, 1, |kind, nid, _| kind == KIND_INODE && nid == inode);
}

fn json(line: &str) -> serde_json::Value {
    serde_json::from_str(line).unwrap()
}

fn errors(ran: &Ran) -> Vec<String> {
    let told = String::from_utf8(ran.0.stderr.clone()).unwrap();
    told.lines().map(str::to_owned).collect()
}

/// One leaf of thirteen or more cost all names.
#[test]
fn of_a_damaged_folder_all_other_names_are_listed_and_copied() {
    for leaves in [1, 3] {
        let (array, _) = filled();
        damage_leaves(&array, leaves);
        sheaf(&["fsck"], &[], &array.images).exits(UNCORRECTED);
        let listed = on(&array, "ls", &["/tree/many"]).exits(OPERATIONAL);
        let told = errors(&listed);
        assert_eq!(told.len(), leaves, "{told:?}");
        assert!(told.iter().all(|line| line.contains("/tree/many")));
        let listed: Vec<String> = listed.output().lines().map(str::to_owned).collect();
        // A leaf has 2,560 bytes, and each of these names takes 19 at least.
        let least = FILES - leaves * (2560 / 19);
        assert!(
            (least..FILES).contains(&listed.len()),
            "{} names",
            listed.len()
        );
        assert!(listed.is_sorted_by(|a, b| a < b));

        let to = array.path("rescued");
        let copied = on(&array, "cp", &["-a", ":/tree", to.to_str().unwrap()]);
        assert_eq!(errors(&copied.exits(OPERATIONAL)).len(), leaves);
        let mut names: Vec<String> = fs::read_dir(to.join("many"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, listed);
        for name in names {
            let i = name["file-".len()..].parse().unwrap();
            let content = fs::read_to_string(to.join("many").join(&name)).unwrap();
            assert_eq!(content, text("many", i));
        }
        assert_eq!(fs::read_dir(to.join("few")).unwrap().count(), FEW + 1);
    }
}

/// It was listed as empty, and with `-R` nothing behind it.
#[test]
fn an_inode_that_cannot_be_read_is_listed_by_its_name() {
    let (array, _) = filled();
    damage_inode(&array, "/tree/few/file-0042");
    let plain = on(&array, "ls", &["/tree/few"]).exits(OPERATIONAL);
    assert_eq!(plain.output().lines().count(), FEW + 1);
    let told = errors(&plain);
    assert!(
        told.len() == 1 && told[0].contains("/tree/few/file-0042"),
        "{told:?}"
    );

    let long = on(&array, "ls", &["-l", "/tree/few"]).exits(OPERATIONAL);
    let lines: Vec<String> = long.output().lines().map(str::to_owned).collect();
    let widths: BTreeSet<usize> = lines
        .iter()
        .map(|line| line.find("file-").map_or(0, |at| at))
        .collect();
    // Those of the files, and none in the line of the folder.
    assert_eq!(widths.len(), 2, "{widths:?}");
    let unknown = lines
        .iter()
        .find(|line| line.ends_with("file-0042"))
        .unwrap();
    assert!(unknown.starts_with("-????????? "), "{unknown}");

    on(&array, "ls", &["-R", "/tree"])
        .exits(OPERATIONAL)
        .says("/tree/few/inner:\nlast\n")
        .says("/tree/many:\n")
        .says(&file(FILES - 1));

    let objects = on(&array, "ls", &["--json", "/tree/few"]).exits(OPERATIONAL);
    let objects: Vec<_> = objects.output().lines().map(json).collect();
    assert_eq!(objects.len(), FEW + 1);
    for entry in &objects {
        let damaged = entry["path"] == "/tree/few/file-0042";
        assert_eq!(entry["error"].is_string(), damaged, "{entry}");
        assert_eq!(entry["mode"].is_null(), damaged, "{entry}");
        assert_eq!(entry["exit_code"] == OPERATIONAL, damaged, "{entry}");
    }
}

#[test]
fn what_ls_does_not_find_is_json_where_that_was_asked_for() {
    let (array, _) = filled();
    let ran = on(&array, "ls", &["--json", "/nope", "/tree"]).exits(OPERATIONAL);
    let objects: Vec<_> = ran.output().lines().map(json).collect();
    let [failed, few, many] = &objects[..] else {
        panic!("{objects:?}");
    };
    assert_eq!(failed["exit_code"], OPERATIONAL);
    assert!(failed["error"].as_str().unwrap().contains("/nope"));
    assert_eq!([&few["path"], &many["path"]], ["/tree/few", "/tree/many"]);
    damage_leaves(&array, 1);
    let ran = on(&array, "ls", &["--json", "/tree/many"]).exits(OPERATIONAL);
    let objects: Vec<_> = ran.output().lines().map(json).collect();
    let failed = objects.iter().filter(|object| object["error"].is_string());
    assert_eq!(failed.count(), 1);
    // How many names are in a leaf is by a key that differs.
    assert!(objects.len() > FILES / 2);
}

/// It said how many records the next mount would write, which there is none of.
#[test]
fn what_does_not_open_is_promised_no_mount() {
    let array = Array::made(1);
    let image = File::options().write(true).open(&array.images[0]).unwrap();
    let end = image.metadata().unwrap().len();
    // Both slots, and their copies.
    for at in [4096, end - 3 * 4096] {
        image.write_all_at(&[0xa5; 2 * 4096], at).unwrap();
    }
    sheaf(&["fsck"], &[], &array.images)
        .exits(UNCORRECTED)
        .says("fatal: ")
        .says_not("next mount");
}

/// At system start all was well, and then every mount that may write was refused.
#[test]
fn a_quick_check_tells_what_the_journal_cannot_be_replayed_on() {
    let array = Array::made(1);
    let who = Caller::root();
    let fs = open(&array);
    let folder = fs.mkdir(&who, ROOT, b"folder", 0o755).unwrap().ino;
    fs.close().unwrap();
    drop(fs);
    let fs = open(&array);
    fs.mkdir(&who, folder, b"inner", 0o755).unwrap();
    fs.sync().unwrap();
    // As a crash leaves it.
    drop(fs);
    let quick = || sheaf(&["fsck", "--quick"], &[], &array.images);
    quick().succeeds();
    flip(&array, 1, |kind, nid, _| {
        kind == KIND_INODE && nid == folder.0
    });
    on(&array, "rm", &["/none"])
        .exits(OPERATIONAL)
        .says(&format!("node {folder}"));
    quick()
        .exits(UNCORRECTED)
        .says(&format!("node {folder}"))
        .says("--repair");
    sheaf(&["fsck", "--repair"], &[], &array.images).exits(CORRECTED);
    quick().succeeds();
}
