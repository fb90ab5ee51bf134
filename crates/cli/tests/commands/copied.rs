//! What cp neither overwrites nor takes for a file, how much of a file it copies, and what it calls it.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use crate::OPERATIONAL;
use crate::unmounted::{Array, is_root, look, run, sheaf};

const NO_FILE: &str = "is a device of this file system";

/// The image was emptied or replaced, with exit code 0.
#[test]
fn no_copy_takes_the_place_of_a_device_of_the_file_system() {
    let array = Array::made();
    let tree = array.path("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("a.img"), "content").unwrap();
    fs::hard_link(tree.join("a.img"), tree.join("twin")).unwrap();
    symlink("a.img", tree.join("link")).unwrap();
    array.cp(&["-a", "tree", ":/"]).succeeds();
    let before = fs::read(array.path("a.img")).unwrap();
    let inode = look(&array.path("a.img")).ino();
    let (out, links) = (array.path("out"), array.path("links"));
    for folder in [&out, &links] {
        fs::create_dir(folder).unwrap();
        fs::hard_link(array.path("a.img"), folder.join("a.img")).unwrap();
    }
    fs::hard_link(array.path("a.img"), out.join("twin")).unwrap();
    fs::hard_link(array.path("a.img"), links.join("link")).unwrap();
    symlink("a.img", array.path("to the image")).unwrap();
    for call in [
        &[":/tree/a.img", "a.img"][..],
        &[":/tree/a.img", "."],
        &[":/tree/a.img", "to the image"],
        &["-r", ":/tree/.", "out"],
        &["-a", ":/tree/.", "out"],
        &["-a", ":/tree/link", "links"],
    ] {
        array.cp(call).exits(OPERATIONAL).says(NO_FILE);
        for path in ["a.img", "out/a.img", "links/a.img", "links/link"] {
            assert_eq!(look(&array.path(path)).ino(), inode, "{path} {call:?}");
        }
    }
    assert!(fs::read(array.path("a.img")).unwrap() == before);
    // The rest was copied.
    assert!(out.join("link").is_symlink());
    array.is_sound();
}

/// It grew while it was read, until no space was left in it.
#[test]
fn no_device_of_the_file_system_is_copied_into_it() {
    let array = Array::made();
    fs::write(array.path("file"), "file").unwrap();
    fs::hard_link(array.path("a.img"), array.path("other name")).unwrap();
    array
        .cp(&["a.img", "other name", "file", ":/"])
        .exits(OPERATIONAL)
        .says(&format!("a.img {NO_FILE}"))
        .says(&format!("other name {NO_FILE}"));
    let listed = array.on("ls", &["/"]).succeeds();
    assert_eq!(listed.output(), "file\n");
    array.is_sound();
}

/// A loop device and the file behind it are one.
#[test]
fn a_loop_device_of_the_file_system_is_known_by_the_file_behind_it() {
    let array = Array::made();
    let image = array.path("a.img");
    let attached = File::options().read(true).write(true).open(&image);
    let attached = is_root().then(|| base::sys::attach_loop(&attached.unwrap()));
    let Some(Ok((device, _attached))) = attached else {
        return base::skip("loop devices");
    };
    fs::write(array.path("file"), "file").unwrap();
    let cp = |on: &Path, from: &str, to: &Path| {
        run(sheaf()
            .args(["cp", "-d"])
            .args([on, from.as_ref(), to])
            .current_dir(array.dir.path()))
    };
    cp(&device, "file", ":/".as_ref()).succeeds();
    for (on, to) in [(&device, &device), (&device, &image), (&image, &device)] {
        cp(on, ":/file", to).exits(OPERATIONAL).says(NO_FILE);
    }
    cp(&device, "a.img", ":/".as_ref())
        .exits(OPERATIONAL)
        .says(NO_FILE);
    run(sheaf().arg("fsck").arg(&device)).succeeds();
}

/// The second took the first one's place without a word, and a link to the first was one to the second.
#[test]
fn of_two_sources_with_one_name_none_takes_the_place_of_the_other() {
    let array = Array::made();
    for (folder, content) in [("x", "of x"), ("y", "of y")] {
        fs::create_dir_all(array.path(folder).join("d")).unwrap();
        fs::write(array.path(folder).join("f"), content).unwrap();
        fs::write(
            array.path(folder).join("d/only in").with_extension(folder),
            content,
        )
        .unwrap();
    }
    fs::hard_link(array.path("x/f"), array.path("x/g")).unwrap();
    symlink("f", array.path("x/l")).unwrap();
    symlink("elsewhere", array.path("y/l")).unwrap();
    array.cp(&["-a", "x", "y", ":/"]).succeeds();
    fs::create_dir(array.path("in")).unwrap();
    array.cp(&["-r", "in", ":/"]).succeeds();
    let twice = ["x/f", "x/l", "y/f", "y/l", "x/g"];
    let of = |side: &'static str| twice.map(|path| format!("{side}{path}"));
    let inwards = of("");
    let outwards = of(":/");
    let with = |sources: &[String; 5], to: &'static str| {
        let mut args = vec!["-a"];
        args.extend(sources.iter().map(String::as_str));
        args.push(to);
        array.cp(&args).exits(OPERATIONAL)
    };
    with(&inwards, ":/in")
        .says(":/in/f was just made")
        .says("with y/f")
        .says(":/in/l was just made");
    with(&outwards, "in")
        .says("in/f was just made")
        .says("with :/y/f")
        .says("in/l was just made");
    array.cp(&["-a", ":/in", "out"]).succeeds();
    for folder in ["in", "out"] {
        let there = |name: &str| array.path(folder).join(name);
        assert_eq!(fs::read(there("f")).unwrap(), b"of x");
        assert_eq!(fs::read(there("g")).unwrap(), b"of x");
        assert_eq!(look(&there("f")).ino(), look(&there("g")).ino());
        assert_eq!(fs::read_link(there("l")).unwrap(), Path::new("f"));
    }
    // Folders become one, and each command may overwrite what an earlier one has made.
    array.cp(&["-r", "x/d", "y/d", ":/in"]).succeeds();
    array.cp(&["-r", ":/x/d", ":/y/d", "in"]).succeeds();
    assert_eq!(fs::read_dir(array.path("in/d")).unwrap().count(), 2);
    array.cp(&["y/f", ":/in"]).succeeds();
    assert_eq!(array.on("cat", &["/in/f"]).output(), "of y");
    array.is_sound();
}

/// It was filled up with zeros to a page.
#[test]
fn a_file_that_has_less_than_its_host_says_ends_where_it_ends() {
    let array = Array::made();
    let path = "/sys/kernel/mm/transparent_hugepage/enabled";
    let others = ["/sys/kernel/uevent_seqnum", "/sys/power/state"];
    let mut paths = std::iter::once(path).chain(others);
    let Some((path, content)) = paths.find_map(|path| Some((path, fs::read(path).ok()?))) else {
        return base::skip("file in /sys that is shorter than it says");
    };
    assert!(look(path.as_ref()).len() > content.len() as u64);
    array.cp(&[path, ":/told"]).succeeds();
    array.cp(&[":/told", "told"]).succeeds();
    assert_eq!(fs::read(array.path("told")).unwrap(), content);
}

/// It named the last component, and left open whose.
#[test]
fn what_cannot_be_made_inside_is_named_by_its_path_there() {
    let array = Array::made();
    for (tree, folder) in [("one", "a/b/f"), ("two", "a/b")] {
        fs::create_dir_all(array.path(tree).join(folder)).unwrap();
    }
    fs::write(array.path("two/a/b/f"), "f").unwrap();
    array.cp(&["-r", "one", ":/dp"]).succeeds();
    array
        .cp(&["-r", "two/.", ":/dp"])
        .exits(OPERATIONAL)
        .says("sheaf: :/dp/a/b/f: ");
    array.cp(&["-r", "two/.", ":/other"]).succeeds();
    array
        .cp(&["-r", "one/.", ":/other"])
        .exits(OPERATIONAL)
        .says("sheaf: :/other/a/b/f: not a directory");
}

/// What was behind the line break began as a message does.
#[test]
fn a_name_makes_no_messages() {
    let array = Array::made();
    let name = "name\nsheaf: forged";
    let said = "name\\nsheaf: forged";
    array.cp(&[name, ":/"]).exits(OPERATIONAL).says(said);
    array
        .cp(&[&format!(":/{name}"), "."])
        .exits(OPERATIONAL)
        .says(said);
    for command in ["cat", "ls", "rm"] {
        array.on(command, &[name]).exits(OPERATIONAL).says(said);
    }
    for command in ["info", "fsck"] {
        let ran = run(sheaf().arg(command).arg(array.path(name)));
        ran.exits(OPERATIONAL).says("name\\nsheaf");
    }
}

/// All of them were U+FFFD, and what a link says was what a terminal may be shown.
#[test]
fn names_and_targets_can_be_told_apart() {
    let array = Array::made();
    let tree = array.path("tree");
    fs::create_dir(&tree).unwrap();
    let names: [&[u8]; 4] = [b"\xff", b"\xfe", b"a\nb", b"a\\nb"];
    for name in names {
        symlink(OsStr::from_bytes(name), tree.join(OsStr::from_bytes(name))).unwrap();
    }
    array.cp(&["-a", "tree", ":/"]).succeeds();
    let plain = array.on("ls", &["/tree"]).succeeds().output();
    let mut plain: Vec<&str> = plain.lines().collect();
    plain.sort();
    assert_eq!(plain, ["\\xfe", "\\xff", "a\\\\nb", "a\\nb"]);
    let listed = array.on("ls", &["--json", "/tree"]).succeeds().output();
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    for name in names {
        let path = [b"/tree/", name].concat();
        let found = listed.lines().any(|line| {
            let entry: serde_json::Value = serde_json::from_str(line).unwrap();
            match std::str::from_utf8(name) {
                Ok(text) => {
                    entry["path"] == format!("/tree/{text}")
                        && entry["target"] == text
                        && entry.get("path_bytes").is_none()
                        && entry.get("target_bytes").is_none()
                }
                Err(_) => {
                    entry["path_bytes"] == hex(&path)
                        && entry["target_bytes"] == hex(name)
                        && entry["path"] == "/tree/\u{fffd}"
                }
            }
        });
        assert!(found, "{name:?}: {listed}");
    }
    let one = array.on("ls", &["--json", "/none"]).exits(OPERATIONAL);
    assert_eq!(one.output().lines().count(), 1);
    let none = PathBuf::from("/none.img");
    let failed = run(sheaf().args(["ls", "--json", "-d"]).arg(none).arg("/"));
    assert_eq!(failed.exits(OPERATIONAL).output().lines().count(), 1);
}
