//! What somebody does to folders while they are copied.

use std::fs as host;
use std::os::unix::fs::{MetadataExt, symlink};

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
        let path = |path: &str| match path.starts_with(':') {
            true => PathBuf::from(path),
            false => self.path(path),
        };
        let done = Cell::new(false);
        let at = |seen: &Path| {
            if let Some((folder, then)) = meanwhile
                && seen == self.path(folder)
                && !done.replace(true)
            {
                then(self);
            }
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
        let ended = run_with(&args, &at).unwrap();
        assert_eq!(done.get(), meanwhile.is_some());
        assert_eq!(ended, if done.get() { OPERATIONAL } else { 0 });
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
