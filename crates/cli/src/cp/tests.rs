//! What somebody does to folders while they are copied.

use std::cell::RefCell;
use std::fs as host;
use std::io;
use std::os::unix::fs::{MetadataExt, lchown, symlink};

use rustix::fs::{AtFlags, CWD, FileType, Timespec, Timestamps, makedev, mknodat, utimensat};
use rustix::process::geteuid;
use tempfile::TempDir;

use super::*;
use crate::args::Source;
use crate::mkfs;

/// What is done once, and after the look at which folder.
type Meanwhile = (&'static str, fn(&Host));

/// A folder of the host with an image, a tree to copy, and another folder that no copy has to do with.
struct Host(TempDir);

impl Host {
    fn new() -> Self {
        let host = Host(TempDir::new().unwrap());
        mkfs::make(&mkfs::small(vec![host.path("image")])).unwrap();
        host.tree("home/docs", "a document");
        host.tree("other", "a secret");
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn tree(&self, name: &str, content: &str) {
        host::create_dir_all(self.path(name).join("deep/deeper")).unwrap();
        for file in ["deep/deeper/file", "deep/file", "file"] {
            host::write(self.path(name).join(file), content).unwrap();
        }
        host::hard_link(
            self.path(name).join("file"),
            self.path(name).join("deep/same"),
        )
        .unwrap();
        symlink("file", self.path(name).join("link")).unwrap();
    }

    /// Copies all, or all that can be found after what somebody does.
    fn copy(&self, options: &str, from: &str, to: &str, meanwhile: Option<Meanwhile>) {
        let Some((folder, then)) = meanwhile else {
            return assert_eq!(self.copied(options, from, to, &|_, _| ()), 0);
        };
        let done = Cell::new(false);
        let ended = self.copied(options, from, to, &|moment, seen| {
            if moment == Moment::Looked && seen == self.path(folder) && !done.replace(true) {
                then(self);
            }
        });
        assert!(done.get());
        assert_eq!(ended, OPERATIONAL);
    }

    fn copied(&self, options: &str, from: &str, to: &str, seen: &dyn Fn(Moment, &Path)) -> u8 {
        let path = |path: &str| match path.starts_with(':') {
            true => PathBuf::from(path),
            false => self.path(path),
        };
        let args = Cp {
            source: Source {
                devices: vec![self.path("image")],
            },
            recursive: true,
            preserve: false,
            archive: options == "-a",
            paths: vec![path(from), path(to)],
        };
        run_with(&args, seen).unwrap()
    }

    /// All that a tree has, by path: kind and mode, owner, time of its change, and content.
    fn all(&self, name: &str) -> Vec<(PathBuf, u32, u64, i64, Vec<u8>)> {
        let (mut waiting, mut found) = (vec![self.path(name)], Vec::new());
        while let Some(path) = waiting.pop() {
            let meta = host::symlink_metadata(&path).unwrap();
            let content = match meta.is_file() {
                true => host::read(&path).unwrap(),
                false => Vec::new(),
            };
            if meta.is_dir() {
                waiting.extend(host::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
            }
            found.push((path, meta.mode(), meta.nlink(), meta.ctime_nsec(), content));
        }
        found.sort();
        found
    }

    /// Puts a link to the other folder in the place of one that is being copied.
    fn swap(&self) {
        host::rename(self.path("home/docs"), self.path("moved")).unwrap();
        symlink(self.path("other"), self.path("home/docs")).unwrap();
    }
}

/// Root that restored a backup wrote where the owner of a folder below the target had it write.
#[test]
fn a_folder_that_becomes_a_link_leads_no_copy_out_of_the_target() {
    for options in ["-r", "-a"] {
        let host = Host::new();
        host.copy("-a", "home", ":/", None);
        let before = host.all("other");
        host.copy(options, ":/home/.", "home", Some(("home/docs", Host::swap)));
        assert_eq!(host.all("other"), before, "{options}");
    }
}

/// Root that made a backup read what its owner may not.
#[test]
fn a_folder_that_becomes_a_link_leads_no_copy_out_of_the_source() {
    for options in ["-r", "-a"] {
        let host = Host::new();
        host.copy(options, "home", ":/", Some(("home/docs", Host::swap)));
        host::create_dir(host.path("copy")).unwrap();
        host.copy("-r", ":/home", "copy", None);
        let copied = host.all("copy");
        assert!(copied.len() > 2, "{copied:?}");
        assert!(copied.iter().all(|(.., content)| content != b"a secret"));
    }
}

/// What of something can be changed without opening it.
fn kept(path: &Path) -> Option<(u32, u32, u32, i64)> {
    let meta = host::symlink_metadata(path).ok()?;
    Some((meta.mode(), meta.uid(), meta.gid(), meta.mtime()))
}

fn names_of(path: &Path) -> u64 {
    host::symlink_metadata(path).unwrap().nlink()
}

fn fifo(path: &Path) -> io::Result<()> {
    let mode = Mode::from_raw_mode(0o604);
    Ok(mknodat(CWD, path, FileType::Fifo, mode, 0)?)
}

/// Only root makes these.
fn device(path: &Path, minor: u32) -> io::Result<()> {
    let (kind, mode) = (FileType::CharacterDevice, Mode::from_raw_mode(0o604));
    Ok(mknodat(CWD, path, kind, mode, makedev(1, minor))?)
}

/// The owner of a folder had root give him what is somebody else's, by another name of that.
#[test]
fn what_takes_the_place_of_something_just_made_keeps_what_it_has() {
    type Put = fn(&Host, &Path) -> io::Result<()>;
    let mut puts: Vec<(&str, Put)> = vec![
        ("link", |host, at| {
            host::hard_link(host.path("other/link"), at)
        }),
        ("link", |_, at| symlink("elsewhere", at)),
        ("link", |_, at| fifo(at)),
        ("link", |_, _| Ok(())),
        ("fifo", |host, at| {
            host::hard_link(host.path("other/fifo"), at)
        }),
        ("fifo", |_, at| symlink("file", at)),
        ("fifo", |_, at| host::write(at, "a file")),
    ];
    if geteuid().is_root() {
        puts.push(("fifo", |_, at| fifo(at).and(lchown(at, Some(1234), None))));
        puts.push(("null", |_, at| device(at, 5)));
    }
    for (number, (name, put)) in puts.into_iter().enumerate() {
        let host = Host::new();
        for folder in ["home/docs", "other"] {
            fifo(&host.path(folder).join("fifo")).unwrap();
            if geteuid().is_root() {
                device(&host.path(folder).join("null"), 3).unwrap();
            }
        }
        let long_ago = Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        };
        let times = Timestamps {
            last_access: long_ago,
            last_modification: long_ago,
        };
        let from = host.path("home/docs").join(name);
        utimensat(CWD, &from, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
        host.copy("-a", "home", ":/", None);

        let place = host.path("restored/docs").join(name);
        let found = RefCell::new(None);
        let ended = host.copied("-a", ":/home", "restored", &|moment, seen| {
            if moment == Moment::Made && seen == place {
                host::rename(&place, host.path("moved")).unwrap();
                put(&host, &place).unwrap();
                *found.borrow_mut() = Some(kept(&place));
            }
        });
        let found = found.into_inner().expect("the place was not made");
        assert_eq!(found, kept(&place), "{number}");
        assert_eq!(ended, OPERATIONAL, "{number}");
    }
}

/// The copy was one of what had come there since, with its attributes.
#[test]
fn a_link_that_is_replaced_after_the_look_is_not_copied() {
    for name in ["link", "fifo"] {
        let host = Host::new();
        fifo(&host.path("home/docs/fifo")).unwrap();
        let place = host.path("home/docs").join(name);
        let ended = host.copied("-a", "home", ":/", &|moment, seen| {
            if moment == Moment::Looked && seen == host.path("home/docs") {
                host::rename(&place, host.path("moved")).unwrap();
                host::hard_link(host.path("other/link"), &place).unwrap();
            }
        });
        host.copy("-a", ":/home", "copy", None);
        assert_eq!(kept(&host.path("copy/docs").join(name)), None, "{name}");
        assert_eq!(ended, OPERATIONAL, "{name}");
    }
}

/// A further name of a copy was one of whatever had the place of the first.
#[test]
fn a_further_name_is_one_of_what_was_copied() {
    let host = Host::new();
    for folder in ["home/one", "home/two"] {
        host::create_dir(host.path(folder)).unwrap();
    }
    host::write(host.path("home/one/same"), "of two names").unwrap();
    host::hard_link(host.path("home/one/same"), host.path("home/two/same")).unwrap();
    host.copy("-a", "home", ":/", None);
    host.copy("-a", ":/home", "whole", None);
    assert_eq!(names_of(&host.path("whole/one/same")), 2);

    let ended = host.copied("-a", ":/home", "restored", &|moment, seen| {
        for (one, another) in [("one", "two"), ("two", "one")] {
            let first = host.path("restored").join(another).join("same");
            let is_second = seen == host.path("restored").join(one);
            if moment == Moment::Looked && is_second && first.exists() {
                host::rename(&first, host.path("moved")).unwrap();
                host::hard_link(host.path("other/file"), &first).unwrap();
            }
        }
    });
    assert_eq!(host::read(host.path("moved")).unwrap(), b"of two names");
    // Its two names in that tree, and the one that was put there.
    assert_eq!(names_of(&host.path("other/file")), 3);
    assert_eq!(ended, OPERATIONAL);
}

/// Somebody's file was written over by another name, put there after the look whether there are several.
#[test]
fn a_file_that_gets_another_name_meanwhile_is_not_written_over() {
    let host = Host::new();
    host.copy("-a", "home", ":/", None);
    host.copy("-a", ":/home", "restored", None);
    let place = host.path("restored/docs/deep/deeper/file");
    let ended = host.copied("-a", ":/home/.", "restored", &|moment, seen| {
        if moment == Moment::Looked && seen == place {
            host::remove_file(&place).unwrap();
            host::hard_link(host.path("other/file"), &place).unwrap();
        }
    });
    assert_eq!(host::read(host.path("other/file")).unwrap(), b"a secret");
    assert_eq!(names_of(&host.path("other/file")), 3);
    assert_eq!(ended, OPERATIONAL);
}

/// A folder of somebody else's was filled, and given away with all that was in it.
#[test]
fn a_folder_that_takes_the_place_of_one_just_made_is_not_filled() {
    for options in ["-r", "-a"] {
        let host = Host::new();
        host.copy("-a", "home", ":/", None);
        let place = host.path("restored/docs");
        let found = RefCell::new(Vec::new());
        let ended = host.copied(options, ":/home", "restored", &|moment, seen| {
            if moment == Moment::Made && seen == place {
                host::rename(&place, host.path("moved")).unwrap();
                host::rename(host.path("other"), &place).unwrap();
                *found.borrow_mut() = host.all("restored/docs");
            }
        });
        assert_eq!(host.all("restored/docs"), found.into_inner(), "{options}");
        assert_eq!(ended, OPERATIONAL, "{options}");
    }
}

/// A folder that was the owner's alone while it was filled got what another one has, by whose name it was found again.
#[test]
fn a_folder_that_is_found_by_a_second_name_gets_nothing_of_that() {
    let host = Host::new();
    for folder in ["home/one", "home/two"] {
        host::create_dir(host.path(folder)).unwrap();
        host::write(host.path(folder).join("file"), folder).unwrap();
    }
    host.copy("-a", "home", ":/", None);
    let moved = RefCell::new(None);
    let ended = host.copied("-a", ":/home", "restored", &|moment, seen| {
        for (one, another) in [("one", "two"), ("two", "one")] {
            let [first, second] = [one, another].map(|name| host.path("restored").join(name));
            if moment == Moment::Looked && seen == first && moved.borrow().is_none() {
                host::rename(&first, &second).unwrap();
                *moved.borrow_mut() = Some(second);
            }
        }
    });
    let moved = moved.into_inner().expect("no folder was seen");
    assert_eq!(kept(&moved).unwrap().0 & 0o7777, 0o700);
    assert_eq!(ended, OPERATIONAL);
}
