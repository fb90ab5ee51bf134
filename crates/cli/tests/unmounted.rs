//! Files of a file system that is not mounted, as users get at them: cp, cat, ls and rm.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Output};

use tempfile::TempDir;

const OPERATIONAL: i32 = 8;
const USAGE: i32 = 16;

/// An array of one image, in a folder of its own.
struct Array {
    dir: TempDir,
}

impl Array {
    fn made() -> Self {
        let array = Array {
            dir: TempDir::new().unwrap(),
        };
        let image = array.path("a.img");
        run(sheaf().args(["mkfs", "--size", "64M"]).arg(image)).succeeds();
        array
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn on(&self, command: &str, args: &[impl AsRef<OsStr>]) -> Ran {
        let image = self.path("a.img");
        run(sheaf().args([command, "-d"]).arg(image).args(args))
    }

    /// Copies from within the folder of the image.
    fn cp(&self, args: &[&str]) -> Ran {
        let command = [&["cp", "-d", "a.img"], args].concat();
        run(sheaf().args(command).current_dir(self.dir.path()))
    }
}

/// What a call did.
struct Ran(Output);

impl Ran {
    fn exits(self, code: i32) -> Self {
        assert_eq!(self.0.status.code(), Some(code), "{self}");
        self
    }

    fn succeeds(self) -> Self {
        self.exits(0)
    }

    fn says(self, words: &str) -> Self {
        assert!(self.to_string().contains(words), "no '{words}' in: {self}");
        self
    }

    fn output(&self) -> String {
        String::from_utf8(self.0.stdout.clone()).unwrap()
    }
}

impl std::fmt::Display for Ran {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        write!(f, "{}{}", text(&self.0.stdout), text(&self.0.stderr))
    }
}

/// The program, with a umask that is in no doubt.
fn sheaf() -> Command {
    let mut command = Command::new("sh");
    let program = env!("CARGO_BIN_EXE_sheaf");
    command.args(["-c", "umask 027; exec \"$0\" \"$@\"", program]);
    command
}

fn run(command: &mut Command) -> Ran {
    Ran(command.output().unwrap())
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
