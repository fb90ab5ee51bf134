//! A Sheaf file system in an image file, and a process that serves it.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use ::fs::fsck::{FsckOptions, fsck};
use ::fs::{FileSystem, FsOptions, MkfsOptions};
use device::Array;
use format::geometry::{Geometry, GeometryOptions};
use mount::MountOptions;

use crate::{Fallible, context};

const IMAGE_BYTES: u64 = 1 << 30;
/// What the process says when its mount is usable.
const READY: &str = "ready";

/// An image, a folder to mount it at, and the program that serves it ([`serve`]).
#[derive(Debug)]
pub struct Served {
    program: PathBuf,
    image: PathBuf,
    at: PathBuf,
    daemon: Option<Child>,
}

fn devices(image: &Path) -> Fallible<Vec<Arc<dyn device::BlockDevice>>> {
    let opened = device::open_when_free(&[image.to_owned()], &device::OpenOptions::default());
    context(opened, image.display())
}

/// Serves an image until it is unmounted, and says when it is mounted: what the process does.
pub fn serve(image: &Path, at: &Path) -> Fallible<()> {
    let array = context(Array::assemble(devices(image)?, false), "assemble")?;
    let fs = context(
        FileSystem::open(Arc::new(array), FsOptions::default()),
        "open",
    )?;
    let options = MountOptions::default();
    let ready = |_| {
        let mut out = std::io::stdout();
        // Whoever started this has gone if that fails.
        let _ = writeln!(out, "{READY}").and_then(|()| out.flush());
    };
    let mounted = mount::mount(Arc::clone(&fs), at, &options, None, None, ready);
    context(mounted, "mount")?;
    context(fs.close(), "close")
}

impl Served {
    /// Makes a file system in `folder`; `program serve IMAGE MOUNTPOINT` shall serve it.
    pub fn make(program: &Path, folder: &Path) -> Fallible<Served> {
        let (image, at) = (folder.join("sheaf.img"), folder.join("mnt"));
        context(device::create_image(&image, IMAGE_BYTES), image.display())?;
        context(fs::create_dir(&at), at.display())?;
        let geometry = context(
            Geometry::plan(&[IMAGE_BYTES], GeometryOptions::default()),
            "geometry",
        )?;
        let array = Array::create(devices(&image)?, geometry, "sqlite", [7; 16], [9; 16]);
        let array = Arc::new(context(array, "mkfs")?);
        context(FileSystem::mkfs(&array, &MkfsOptions::default()), "mkfs")?;
        context(array.write_labels(), "mkfs")?;
        Ok(Served {
            program: program.to_owned(),
            image,
            at,
            daemon: None,
        })
    }

    pub fn at(&self) -> &Path {
        &self.at
    }

    /// Starts the process, and waits for the mount.
    pub fn mount(&mut self) -> Fallible<()> {
        let mut command = Command::new(&self.program);
        command.arg("serve").arg(&self.image).arg(&self.at);
        let mut daemon = context(command.stdout(Stdio::piped()).spawn(), "start the daemon")?;
        let out = daemon.stdout.take().ok_or("the daemon has no output")?;
        self.daemon = Some(daemon);
        let mut line = String::new();
        context(BufReader::new(out).read_line(&mut line), "the daemon")?;
        match line.trim_end() == READY {
            true => Ok(()),
            false => Err("the daemon ended before it was mounted".to_owned()),
        }
    }

    /// SIGKILL to the process; the mount is dead until [`clean_up`](Self::clean_up).
    pub fn kill(&mut self) -> Fallible<()> {
        let Some(mut daemon) = self.daemon.take() else {
            return Err("there is no daemon to kill".to_owned());
        };
        context(daemon.kill(), "kill the daemon")?;
        context(daemon.wait(), "wait for the daemon").map(drop)
    }

    /// Takes away what a dead daemon left.
    pub fn clean_up(&self) -> Fallible<()> {
        context(mount::clean_up(&self.at), "clean up")
    }

    /// Unmounts, and looks for damage.
    pub fn unmount(&mut self) -> Fallible<()> {
        context(mount::unmount(&self.at, &|_| {}), "unmount")?;
        if let Some(mut daemon) = self.daemon.take() {
            let status = context(daemon.wait(), "wait for the daemon")?;
            if !status.success() {
                return Err(format!("the daemon ended with {status}"));
            }
        }
        self.check()
    }

    /// Looks for damage in what is not mounted.
    pub fn check(&self) -> Fallible<()> {
        let array = context(Array::assemble(devices(&self.image)?, true), "fsck")?;
        let report = fsck(Arc::new(array), &FsckOptions::default(), &|_| {});
        let report = context(report, "fsck")?;
        match report.findings.first() {
            None => Ok(()),
            Some(finding) => Err(format!(
                "fsck: {finding}, and {} more",
                report.findings.len() - 1
            )),
        }
    }

    /// How many atomic writes the daemon has committed.
    pub fn commits(&self) -> Fallible<u64> {
        let live = context(mount::Live::new(&self.at), "ask the daemon")?;
        let text = context(live.metrics(), "ask the daemon")?;
        let name = "sheaf_atomic_writes_total{event=\"committed\"} ";
        let value = text.lines().find_map(|line| line.strip_prefix(name));
        let value = value.and_then(|value| value.parse().ok());
        value.ok_or_else(|| "the daemon does not count atomic writes".to_owned())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            // A test has failed: what goes wrong now does not matter any more.
            let _ = mount::unmount_now(&self.at, mount::Insist::Lazy);
            let _ = daemon.kill();
            let _ = daemon.wait();
            let _ = mount::clean_up(&self.at);
        }
    }
}
