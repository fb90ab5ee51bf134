//! Files of a file system that is not mounted, as users get at them: cp, cat, ls and rm.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};
use tempfile::TempDir;

use crate::Ran;

const OPERATIONAL: i32 = 8;
const USAGE: i32 = 16;

/// An array of one image, in a folder of its own.
pub struct Array {
    pub dir: TempDir,
}

impl Array {
    pub fn made() -> Self {
        let array = Array {
            dir: TempDir::new().unwrap(),
        };
        let image = array.path("a.img");
        run(sheaf().args(["mkfs", "--size", "64M"]).arg(image)).succeeds();
        array
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn on(&self, command: &str, args: &[impl AsRef<OsStr>]) -> Ran {
        let image = self.path("a.img");
        run(sheaf().args([command, "-d"]).arg(image).args(args))
    }

    /// Copies from within the folder of the image.
    pub fn cp(&self, args: &[&str]) -> Ran {
        let command = [&["cp", "-d", "a.img"], args].concat();
        run(sheaf().args(command).current_dir(self.dir.path()))
    }

    pub fn is_sound(&self) {
        run(sheaf().arg("fsck").arg(self.path("a.img"))).succeeds();
    }
}

/// The program, with a umask that is in no doubt.
pub fn sheaf() -> Command {
    let mut command = Command::new("sh");
    let program = env!("CARGO_BIN_EXE_sheaf");
    command.args(["-c", "umask 027; exec \"$0\" \"$@\"", program]);
    command
}

pub fn run(command: &mut Command) -> Ran {
    Ran(command.output().unwrap())
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn set_times(path: &Path, (atime, mtime): ((i64, i64), (i64, i64))) {
    let spec = |(tv_sec, tv_nsec)| Timespec { tv_sec, tv_nsec };
    let times = Timestamps {
        last_access: spec(atime),
        last_modification: spec(mtime),
    };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

fn set_attribute(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::lsetxattr(path, name, value, XattrFlags::empty()).unwrap();
}

fn attributes(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut names = vec![0; 65_536];
    let len = rustix::fs::llistxattr(path, &mut names[..]).unwrap();
    let names = String::from_utf8(names[..len].to_vec()).unwrap();
    let mut found = BTreeMap::new();
    for name in names.split_terminator('\0') {
        let mut value = vec![0; 65_536];
        let len = rustix::fs::lgetxattr(path, name, &mut value[..]).unwrap();
        value.truncate(len);
        found.insert(name.to_owned(), value);
    }
    found
}

pub fn look(path: &Path) -> Metadata {
    fs::symlink_metadata(path).unwrap()
}

/// All that `cp -a` keeps of something, as text.
fn facts(path: &Path) -> String {
    let meta = look(path);
    let links = if meta.is_dir() { 0 } else { meta.nlink() };
    let content = match meta.file_type() {
        kind if kind.is_file() => fs::read(path).unwrap(),
        kind if kind.is_symlink() => fs::read_link(path)
            .unwrap()
            .into_os_string()
            .into_encoded_bytes(),
        _ => Vec::new(),
    };
    let atime = match meta.is_file() {
        true => (meta.atime(), meta.atime_nsec()),
        // Who looks, we among them, changes it.
        false => (0, 0),
    };
    format!(
        "{:o} {}:{} links {links} device {} times {atime:?} {}.{} {:?} {content:?}",
        meta.mode(),
        meta.uid(),
        meta.gid(),
        meta.rdev(),
        meta.mtime(),
        meta.mtime_nsec(),
        attributes(path),
    )
}

/// An access list with an entry for user 1234.
fn access_list() -> Vec<u8> {
    let none = u32::MAX;
    let entries: [(u16, u16, u32); 5] = [
        (1, 7, none),
        (2, 7, 1234),
        (4, 5, none),
        (16, 7, none),
        (32, 0, none),
    ];
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, rights, id) in entries {
        list.extend_from_slice(&tag.to_le_bytes());
        list.extend_from_slice(&rights.to_le_bytes());
        list.extend_from_slice(&id.to_le_bytes());
    }
    list
}

/// A copy of a home had no owners, no times, no set-id bits, no attributes, and each hard link as a file of its own.
#[test]
fn an_archive_keeps_all_there_is_of_a_tree_in_both_directions() {
    let array = Array::made();
    let tree = array.path("tree");
    fs::create_dir_all(tree.join("inner/private")).unwrap();
    let (program, link, fifo) = (tree.join("program"), tree.join("link"), tree.join("fifo"));
    fs::write(&program, "program").unwrap();
    fs::hard_link(&program, tree.join("inner/again")).unwrap();
    fs::write(tree.join("inner/private/secret"), "secret").unwrap();
    symlink("nowhere", &link).unwrap();
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::from_raw_mode(0o640), 0).unwrap();
    set_attribute(&program, "user.kind", b"of some kind");
    set_attribute(&tree.join("inner"), "user.large", &[7; 3000]);
    if is_root() {
        chown(&program, Some(1234), Some(2345)).unwrap();
        chown(tree.join("inner"), Some(1234), None).unwrap();
        lchown(&link, Some(1), Some(2)).unwrap();
        let device = rustix::fs::makedev(8, 300);
        let (kind, mode) = (FileType::BlockDevice, Mode::from_raw_mode(0o660));
        rustix::fs::mknodat(CWD, tree.join("device"), kind, mode, device).unwrap();
        set_attribute(&program, "trusted.kept", b"by root");
        for path in [&program, &link, &fifo] {
            set_attribute(path, "security.kept", b"by root");
        }
        set_attribute(
            &tree.join("inner"),
            "system.posix_acl_default",
            &access_list(),
        );
        set_attribute(
            &tree.join("inner/private/secret"),
            "system.posix_acl_access",
            &access_list(),
        );
        // cap_net_raw, as setcap(8) gives it.
        let words: [u32; 5] = [0x0200_0001, 1 << 13, 0, 0, 0];
        set_attribute(
            &program,
            "security.capability",
            &words.map(u32::to_le_bytes).concat(),
        );
    }
    set_mode(&program, 0o4755);
    set_mode(&tree.join("inner/private"), 0o2500);
    set_mode(&tree.join("inner"), 0o1777);
    let times = ((1_000_000_000, 123_456_789), (-5, 987_654_321));
    let names = [
        "link",
        "fifo",
        "program",
        "inner/private/secret",
        "inner/private",
        "inner",
        ".",
    ];
    for name in names {
        set_times(&tree.join(name), times);
    }
    let before: Vec<String> = names.map(|name| facts(&tree.join(name))).to_vec();
    // Reading it has changed when it was read.
    set_times(&program, times);
    set_times(&tree.join("inner/private/secret"), times);
    array.cp(&["-a", "tree", ":/"]).succeeds();
    array.is_sound();
    array.cp(&["-a", ":/tree", "out"]).succeeds();
    let out = array.path("out");
    for (name, before) in names.iter().zip(&before) {
        assert_eq!(&facts(&out.join(name)), before, "{name}");
    }
    assert_eq!(
        look(&out.join("program")).ino(),
        look(&out.join("inner/again")).ino()
    );
    if is_root() {
        assert_eq!(
            facts(&out.join("device")).split(" times").next(),
            facts(&tree.join("device")).split(" times").next()
        );
    }
    for name in names {
        set_times(&out.join(name), times);
    }
    // Once more over what is there, in both directions: nothing else becomes of it, and the links stay links.
    array.cp(&["-a", "out/.", ":/tree"]).succeeds();
    array.cp(&["-a", ":/tree", "out/.."]).succeeds();
    array.cp(&["-r", "-p", "-a", ":/tree/.", "out"]).succeeds();
    for (name, before) in names.iter().zip(&before).take(4) {
        assert_eq!(&facts(&out.join(name)), before, "{name}");
    }
    array.is_sound();
}

/// What a new file gets from its folder is no part of the original.
#[test]
fn an_archive_has_no_access_list_that_the_original_has_not() {
    let array = Array::made();
    let list = access_list();
    for folder in ["plain", "plain/inner", "listed"] {
        fs::create_dir(array.path(folder)).unwrap();
    }
    fs::write(array.path("plain/file"), "file").unwrap();
    set_mode(&array.path("plain/file"), 0o640);
    set_attribute(&array.path("listed"), "system.posix_acl_default", &list);
    array.cp(&["-a", "listed", ":/"]).succeeds();
    array.cp(&["-a", "plain", ":/listed"]).succeeds();
    array.cp(&["-a", ":/listed/plain", "listed"]).succeeds();
    for name in ["listed/plain", "listed/plain/inner", "listed/plain/file"] {
        assert!(attributes(&array.path(name)).is_empty(), "{name}");
    }
    assert_eq!(look(&array.path("listed/plain/file")).mode() & 0o777, 0o640);
}

/// As with cp(1): a set-id bit in a copy would be for another owner.
#[test]
fn a_plain_copy_has_the_rights_that_the_umask_leaves_and_nothing_else() {
    let array = Array::made();
    let tree = array.path("tree");
    fs::create_dir(&tree).unwrap();
    let program = tree.join("program");
    fs::write(&program, "program").unwrap();
    fs::hard_link(&program, tree.join("again")).unwrap();
    set_attribute(&program, "user.kind", b"of some kind");
    set_mode(&program, 0o4755);
    set_times(&program, ((1, 2), (3, 4)));
    rustix::fs::mknodat(CWD, tree.join("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    let fifo = "tree/fifo is a special file; to make one like it give --archive";
    array
        .cp(&["-r", "tree", ":/"])
        .exits(OPERATIONAL)
        .says(fifo);
    array
        .on("ls", &["-l", "/tree"])
        .succeeds()
        .says("-rwxr-x---    1");
    array.cp(&["-a", "tree/fifo", ":/tree/"]).succeeds();
    array.cp(&["-a", "tree/program", ":/tree/"]).succeeds();
    array
        .cp(&["-r", ":/tree", "out"])
        .exits(OPERATIONAL)
        .says(&format!("/{fifo}"));
    for name in ["program", "again"] {
        let found = look(&array.path("out").join(name));
        assert_eq!((found.mode() & 0o7777, found.nlink()), (0o750, 1), "{name}");
        assert!(found.mtime() > 1_000_000, "{name}");
        assert!(attributes(&array.path("out").join(name)).is_empty());
    }
    assert_eq!(look(&array.path("out")).mode() & 0o777, 0o750);
    // What is there keeps its own.
    set_mode(&array.path("out/again"), 0o604);
    array.cp(&[":/tree/program", "out/again"]).succeeds();
    assert_eq!(look(&array.path("out/again")).mode() & 0o7777, 0o604);
}

/// It was written out as a terabyte of zeros.
#[test]
fn holes_stay_holes_in_both_directions() {
    const TIB: u64 = 1 << 40;
    let array = Array::made();
    let file = File::create(array.path("sparse")).unwrap();
    let pieces: [(u64, &[u8]); 3] = [
        (5, b"first"),
        (TIB / 2, &[7; 10_000]),
        (TIB - (1 << 30), b"last"),
    ];
    for (at, piece) in pieces {
        file.write_all_at(piece, at).unwrap();
    }
    file.set_len(TIB).unwrap();
    File::create(array.path("empty"))
        .unwrap()
        .set_len(TIB)
        .unwrap();
    fs::write(array.path("small"), [0; 100]).unwrap();
    // What a host says is data, that has holes nevertheless.
    let zeros = File::create(array.path("zeros")).unwrap();
    zeros.write_all_at(&vec![0; 4 << 20], 0).unwrap();
    zeros.set_len(TIB).unwrap();
    array
        .cp(&["sparse", "empty", "small", "zeros", ":/"])
        .succeeds();
    array.is_sound();
    fs::create_dir(array.path("out")).unwrap();
    array
        .cp(&[":/sparse", ":/empty", ":/small", ":/zeros", "out"])
        .succeeds();
    let out = File::open(array.path("out/sparse")).unwrap();
    for (at, piece) in pieces {
        let mut found = vec![0; piece.len()];
        out.read_exact_at(&mut found, at).unwrap();
        assert_eq!(found, piece);
    }
    for name in ["out/sparse", "out/empty", "out/zeros"] {
        let found = look(&array.path(name));
        assert_eq!(found.len(), TIB);
        assert!(found.blocks() * 512 < 1 << 20, "{name}: {}", found.blocks());
    }
    assert_eq!(fs::read(array.path("out/small")).unwrap(), [0; 100]);
}

/// A file of /proc says that it is empty.
#[test]
fn what_has_content_and_no_length_is_copied() {
    let array = Array::made();
    array.cp(&["/proc/version", ":/"]).succeeds();
    let content = fs::read_to_string("/proc/version").unwrap();
    assert_eq!(array.on("cat", &["/version"]).output(), content);
}

/// One name that is missing, or of the wrong kind, left the rest uncopied.
#[test]
fn what_cannot_be_copied_is_named_and_the_rest_is_copied() {
    let array = Array::made();
    for name in ["one", "two"] {
        fs::write(array.path(name), name).unwrap();
    }
    array
        .cp(&["one", "none", "two", ":/"])
        .exits(OPERATIONAL)
        .says("none: No such file");
    fs::create_dir_all(array.path("out/one")).unwrap();
    array
        .cp(&[":/one", ":/none", ":/two", "out"])
        .exits(OPERATIONAL)
        .says("out/one: Is a directory")
        .says("/none: no such file");
    assert_eq!(fs::read(array.path("out/two")).unwrap(), b"two");
    // Wrong calls do nothing at all.
    array.cp(&["one", ":/two", ":/"]).exits(USAGE);
}

/// The slash says that a folder is meant; the copy took the place of the file.
#[test]
fn a_target_with_a_slash_is_a_folder() {
    let array = Array::made();
    fs::create_dir(array.path("folder")).unwrap();
    fs::write(array.path("file"), "file").unwrap();
    fs::write(array.path("other"), "other").unwrap();
    array.cp(&["file", ":/file"]).succeeds();
    for to in [":/file/", ":/none/"] {
        let refused = array.cp(&["other", to]).exits(OPERATIONAL);
        refused.says(&format!("{}: not a directory", &to[1..]));
    }
    for to in ["other/", "none/"] {
        let refused = array.cp(&[":/file", to]).exits(OPERATIONAL);
        refused.says(&format!("{to}: not a directory"));
    }
    assert_eq!(array.on("cat", &["/file"]).succeeds().output(), "file");
    assert_eq!(fs::read(array.path("other")).unwrap(), b"other");
    array.cp(&["-r", "folder", ":/new/"]).succeeds();
    array.cp(&["-r", ":/new", "new/"]).succeeds();
    assert!(array.path("new").is_dir());
}

#[test]
fn a_source_that_is_a_link_is_followed_unless_trees_are_copied() {
    let array = Array::made();
    fs::write(array.path("file"), "file").unwrap();
    symlink("file", array.path("link")).unwrap();
    array.cp(&["-p", "link", ":/copy"]).succeeds();
    array.cp(&["-r", "file", "link", ":/"]).succeeds();
    let listed = array.on("ls", &["-l", "/"]).succeeds().says("link -> file");
    assert!(!listed.output().contains("copy ->"), "{listed}");
    array.cp(&[":/link", "followed"]).succeeds();
    array.cp(&["-a", ":/link", "kept"]).succeeds();
    assert_eq!(fs::read(array.path("followed")).unwrap(), b"file");
    assert!(!look(&array.path("followed")).is_symlink());
    assert!(look(&array.path("kept")).is_symlink());
    // A link that the user names as the target is written through.
    fs::write(array.path("file"), "newer").unwrap();
    array.cp(&["file", ":/link"]).succeeds();
    assert_eq!(array.on("cat", &["/file"]).succeeds().output(), "newer");
}

/// Whoever is not root is told of no owner, as with cp(1), but of attributes that he may not set.
#[test]
fn what_cannot_be_kept_is_told() {
    if !is_root() {
        return base::skip("root");
    }
    let array = Array::made();
    let file = array.path("file");
    fs::write(&file, "file").unwrap();
    set_attribute(&file, "trusted.kept", b"by root");
    set_mode(&file, 0o6755);
    array.cp(&["-p", "file", ":/"]).succeeds();
    let (dir, out) = (array.dir.path(), array.path("out"));
    fs::create_dir(&out).unwrap();
    for path in [dir, &out, &array.path("a.img")] {
        chown(path, Some(1234), Some(1234)).unwrap();
    }
    let program = array.path("sheaf");
    fs::copy(env!("CARGO_BIN_EXE_sheaf"), &program).unwrap();
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid=1234", "--regid=1234", "--clear-groups"])
        .arg(program)
        .args(["cp", "-p", "-d", "a.img", ":/file", "out"])
        .current_dir(dir);
    run(&mut command)
        .exits(OPERATIONAL)
        .says("out/file: trusted.kept not kept: ");
    let found = look(&out.join("file"));
    assert_eq!((found.uid(), found.mode() & 0o7777), (1234, 0o755));
}

/// The first path that was missing ended the command, and what was behind it was neither printed nor removed.
#[test]
fn a_missing_path_keeps_the_others_from_nothing() {
    let array = Array::made();
    for name in ["one", "two"] {
        fs::write(array.path(name), name).unwrap();
    }
    array.cp(&["one", "two", ":/"]).succeeds();
    let missing = "/none: no such file";
    let paths = ["/one", "/none", "/two"];
    let cat = array.on("cat", &paths).exits(OPERATIONAL).says(missing);
    assert_eq!(cat.output(), "onetwo");
    let ls = array.on("ls", &paths).exits(OPERATIONAL).says(missing);
    assert_eq!(ls.output(), "/one\n/two\n");
    array
        .on("rm", &paths)
        .exits(OPERATIONAL)
        .says(missing)
        .says("2 files and 0 folders removed");
    assert_eq!(array.on("ls", &["/"]).succeeds().output(), "");
    let failed = array
        .on("rm", &["--json", "/one", "/two"])
        .exits(OPERATIONAL);
    let failed: serde_json::Value = serde_json::from_str(&failed.output()).unwrap();
    let reasons = failed["error"].as_str().unwrap();
    assert!(reasons.contains("/one: no") && reasons.contains("/two: no"));
}

/// The link went, though its name with a slash is that of the folder; and of ".." it was said that the folder is not empty.
#[test]
fn nothing_is_removed_by_a_path_that_means_something_else() {
    let array = Array::made();
    fs::create_dir(array.path("folder")).unwrap();
    fs::write(array.path("folder/file"), "file").unwrap();
    symlink("folder", array.path("link")).unwrap();
    array.cp(&["-r", "folder", "link", ":/"]).succeeds();
    for path in ["/link/", "/folder/file/"] {
        let refused = format!("{path}: not a directory");
        array.on("rm", &[path]).exits(OPERATIONAL).says(&refused);
        array
            .on("rm", &["-r", path])
            .exits(OPERATIONAL)
            .says(&refused);
    }
    for path in ["..", ".", "/folder/..", "/folder/./"] {
        array
            .on("rm", &["-r", "/link", path])
            .exits(USAGE)
            .says(&format!("{path}: a path that ends in . or .."));
    }
    array.on("cat", &["/link/file"]).succeeds().says("file");
    array.on("rm", &["-r", "/folder/", "/link"]).succeeds();
}
