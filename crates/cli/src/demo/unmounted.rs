//! The demo without a mount: another process of this program opens the array, writes, and is
//! killed.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use base::clock::Clock;
use bench::interrupt;
use fs::ROOT;

use super::tree::Tree;
use super::{Stage, child_failed, record};
use crate::args::Demo;
use crate::daemon::myself;
use crate::failure::{Failure, Outcome};
use crate::offline::{Offline, bytes, named};
use crate::output;

/// How long the victim writes before it is killed, in nanoseconds.
const WRITING_NS: u64 = 2_000_000_000;

pub struct Unmounted {
    devices: Vec<PathBuf>,
    open: Option<Offline>,
}

impl Unmounted {
    pub fn new(devices: &[PathBuf]) -> Self {
        Unmounted {
            devices: devices.to_vec(),
            open: None,
        }
    }

    fn opened(&mut self) -> Result<&Offline, Failure> {
        let offline = match self.open.take() {
            Some(offline) => offline,
            None => Offline::open(&self.devices, false)?,
        };
        Ok(self.open.insert(offline))
    }
}

impl Stage for Unmounted {
    fn copy(&mut self, tree: &Tree) -> Result<(), Failure> {
        let offline = self.opened()?;
        let mut folders = std::collections::HashMap::from([(PathBuf::new(), ROOT)]);
        let inside = |folders: &std::collections::HashMap<PathBuf, fs::Ino>, path: &Path| {
            let parent = path.parent().unwrap_or(Path::new(""));
            folders.get(parent).copied().unwrap_or(ROOT)
        };
        for folder in tree.folders() {
            let parent = inside(&folders, &folder);
            let made = offline.make_folder(parent, last(&folder), 0o755)?;
            folders.insert(folder, made);
        }
        for file in &tree.files {
            interrupt::check()?;
            let source = std::fs::read(&file.source).map_err(super::at(&file.source))?;
            let mut rest = &source[..];
            let parent = inside(&folders, &file.name);
            offline.write(parent, last(&file.name), 0o644, |buffer| {
                let count = rest.len().min(buffer.len());
                buffer[..count].copy_from_slice(&rest[..count]);
                rest = &rest[count..];
                Ok(count)
            })?;
        }
        Ok(offline.fs.sync()?)
    }

    fn verify(&mut self, tree: &Tree) -> Result<(), Failure> {
        let offline = self.opened()?;
        for file in &tree.files {
            interrupt::check()?;
            let path = bytes(&file.name);
            let attr = offline.find(path)?;
            let (mut length, mut sum) = (0, 0);
            offline.read(path, attr.ino, |piece| {
                length += piece.len() as u64;
                sum = format::checksum(sum, piece);
                Ok(())
            })?;
            if (length, sum) != (file.bytes, file.checksum) {
                let name = file.name.display();
                return Err(Failure::new(format!("{name} differs from its source")));
            }
        }
        Ok(())
    }

    fn write_and_kill(&mut self) -> Result<u64, Failure> {
        self.finish()?;
        let list = std::env::join_paths(&self.devices)
            .map_err(|e| Failure::new(format!("the devices' paths: {e}")))?;
        let mut child = myself()
            .args(["demo", "--victim", "--tree"])
            .arg(list)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| Failure::new(format!("cannot start the writer: {e}")))?;
        let mut synced = 0;
        let clock = Clock::real();
        if let Some(stdout) = child.stdout.take() {
            for line in BufReader::new(stdout).lines() {
                let line = line.map_err(|e| Failure::new(format!("the writer: {e}")))?;
                synced = line.parse().unwrap_or(synced);
                if clock.monotonic_ns() > WRITING_NS {
                    break;
                }
            }
        }
        child
            .kill()
            .map_err(|e| Failure::new(format!("cannot kill the writer: {e}")))?;
        let status = child
            .wait()
            .map_err(|e| Failure::new(format!("cannot wait for the writer: {e}")))?;
        match status.code() {
            None => Ok(synced),
            Some(_) => Err(child_failed("the writer", status)),
        }
    }

    fn reopen_and_count(&mut self) -> Result<u64, Failure> {
        let offline = self.opened()?;
        let path = record::FILE.as_bytes();
        let attr = offline.find(path)?;
        let mut all = Vec::new();
        offline.read(path, attr.ino, |piece| {
            all.extend_from_slice(piece);
            Ok(())
        })?;
        record::count(&all)
    }

    fn finish(&mut self) -> Result<(), Failure> {
        match self.open.take() {
            Some(offline) => offline.close(),
            None => Ok(()),
        }
    }
}

/// The process that is killed: appends records, syncs each, and prints how many.
pub fn victim(args: &Demo) -> Outcome {
    let list = args.tree.as_ref().map(|p| p.as_os_str().to_owned());
    let devices: Vec<PathBuf> = std::env::split_paths(&list.unwrap_or_default()).collect();
    let offline = Offline::open(&devices, false)?;
    let name = record::FILE.as_bytes();
    let ino = offline.write(ROOT, name, 0o644, |_| Ok(0))?;
    let flags = libc::O_RDWR | libc::O_APPEND;
    let failed = |e| named(name, e);
    let file = offline.fs.open_file(ino, flags).map_err(failed)?;
    for number in 0.. {
        offline
            .fs
            .write(&file, number * record::BYTES as u64, &record::make(number))
            .map_err(failed)?;
        offline.fs.fsync(&file, true).map_err(failed)?;
        output::line(number + 1)?;
    }
    offline.close()?;
    Ok(0)
}

fn last(path: &Path) -> &[u8] {
    path.file_name().map_or(b"", |name| bytes(Path::new(name)))
}
