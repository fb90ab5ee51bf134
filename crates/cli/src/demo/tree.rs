//! The tree that the demo copies: real files of this machine, in bounds, with checksums.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use bench::interrupt;

use super::at;
use crate::failure::Failure;

const FILES_MOST: usize = 6000;
const BYTES_MOST: u64 = 400 << 20;
const FILE_BYTES_MOST: u64 = 64 << 20;
/// Where there is neither source nor toolchain.
const FALLBACKS: [&str; 3] = ["/usr/share", "/usr/include", "/usr/lib"];

pub struct TreeFile {
    /// On the host.
    pub source: PathBuf,
    /// Inside the copy.
    pub name: PathBuf,
    pub bytes: u64,
    pub checksum: u32,
}

#[derive(Default)]
pub struct Tree {
    pub files: Vec<TreeFile>,
}

impl Tree {
    /// The files of `root`, or of this project's sources and the toolchain.
    pub fn find(root: Option<&Path>) -> Result<Self, Failure> {
        let mut tree = Tree::default();
        match root {
            Some(root) => tree.add("tree", root)?,
            None => {
                let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
                tree.add("sources", &sources)?;
                if let Some(toolchain) = toolchain() {
                    for (name, part) in [("lib", "lib"), ("share", "share"), ("etc", "etc")] {
                        tree.add(name, &toolchain.join(part))?;
                    }
                }
                for (number, fallback) in FALLBACKS.iter().enumerate() {
                    if tree.files.len() < FILES_MOST / 2 {
                        tree.add(&format!("machine{number}"), Path::new(fallback))?;
                    }
                }
            }
        }
        match tree.files.is_empty() {
            true => Err(Failure::new(
                "found no file to copy; name a folder with --tree",
            )),
            false => Ok(tree),
        }
    }

    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.bytes).sum()
    }

    /// The folders of the copy, parents first.
    pub fn folders(&self) -> Vec<PathBuf> {
        let mut folders: Vec<PathBuf> = self
            .files
            .iter()
            .flat_map(|f| f.name.ancestors().skip(1))
            .filter(|f| !f.as_os_str().is_empty())
            .map(Path::to_owned)
            .collect();
        folders.sort();
        folders.dedup();
        folders
    }

    /// Adds the regular files under `root`, as far as the bounds allow. What cannot be read
    /// is not for us.
    fn add(&mut self, name: &str, root: &Path) -> Result<(), Failure> {
        let mut bytes = self.bytes();
        let mut waiting = vec![(root.to_owned(), PathBuf::from(name))];
        while let Some((host, inside)) = waiting.pop() {
            let Ok(entries) = fs::read_dir(&host) else {
                continue;
            };
            let mut entries: Vec<_> = entries.filter_map(Result::ok).collect();
            entries.sort_by_key(|e| e.file_name());
            for entry in entries {
                interrupt::check()?;
                let (source, name) = (entry.path(), inside.join(entry.file_name()));
                let Ok(meta) = entry.metadata() else {
                    continue;
                };
                if meta.is_dir() && entry.file_name() != "target" {
                    waiting.push((source, name));
                } else if meta.is_file() && meta.len() <= FILE_BYTES_MOST {
                    if self.files.len() >= FILES_MOST || bytes + meta.len() > BYTES_MOST {
                        return Ok(());
                    }
                    let Ok((length, checksum)) = checksum(&source) else {
                        continue;
                    };
                    bytes += length;
                    self.files.push(TreeFile {
                        source,
                        name,
                        bytes: length,
                        checksum,
                    });
                }
            }
        }
        Ok(())
    }
}

/// Length and CRC-32C of a file.
pub fn checksum(path: &Path) -> Result<(u64, u32), Failure> {
    let mut file = File::open(path).map_err(at(path))?;
    let mut buffer = vec![0; 1 << 18];
    let (mut bytes, mut sum) = (0, 0);
    loop {
        let read = file.read(&mut buffer).map_err(at(path))?;
        if read == 0 {
            return Ok((bytes, sum));
        }
        bytes += read as u64;
        sum = format::checksum(sum, &buffer[..read]);
    }
}

/// The toolchain's folder, where there is one.
fn toolchain() -> Option<PathBuf> {
    let output = Command::new("rustc")
        .args(["--print", "sysroot"])
        .stderr(Stdio::null())
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    let path = String::from_utf8(output.stdout).ok()?;
    Some(PathBuf::from(path.trim()))
}
