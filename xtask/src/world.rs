//! The array that the mounted suites run on: four image files of unequal size, their daemon
//! and their mount point; or, for comparison, a folder of any other file system.
//!
//! Invariants: (1) whatever happens, dropping a `World` leaves no mount and no daemon
//! behind; (2) nothing here waits without a limit.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};

use crate::{Fallible, process};

/// Where images in memory are, and how much must be free there.
const MEMORY: &str = "/dev/shm";
const MEMORY_FREE: u64 = 2 << 30;
const IMAGE_SIZES: [&str; 4] = ["1536M", "1536M", "2G", "1G"];
/// How long mount, umount and mkfs may take.
const LIMIT: Duration = Duration::from_secs(90);
const FSCK_LIMIT: Duration = Duration::from_secs(300);

pub struct World {
    name: String,
    sheaf: PathBuf,
    options: Option<String>,
    dir: PathBuf,
    /// Where the file system under test is mounted; the suites work here.
    pub mnt: PathBuf,
    images: Vec<PathBuf>,
    sizes: Vec<String>,
    /// The folder belongs to somebody else: no mkfs, mount, umount or fsck.
    external: bool,
    keep: bool,
}

impl World {
    /// A fresh array, not yet made.
    pub fn new(name: &str, sheaf: &Path, options: Option<String>, keep: bool) -> Fallible<Self> {
        let dir = process::work_dir().join(name);
        let mnt = dir.join("mnt");
        let world = World {
            name: name.to_owned(),
            sheaf: sheaf.to_owned(),
            options,
            images: (0..IMAGE_SIZES.len())
                .map(|i| dir.join(format!("device{i}.img")))
                .collect(),
            sizes: IMAGE_SIZES.map(str::to_owned).to_vec(),
            dir,
            mnt,
            external: false,
            keep,
        };
        world.take_down();
        if world.dir.exists() {
            fs::remove_dir_all(&world.dir).map_err(|e| format!("{}: {e}", world.dir.display()))?;
        }
        fs::create_dir_all(&world.mnt).map_err(|e| format!("{}: {e}", world.mnt.display()))?;
        Ok(world)
    }

    /// Another array, not yet made, used in the same way.
    pub fn sibling(&self, name: &str) -> Fallible<Self> {
        World::new(name, &self.sheaf, self.options.clone(), self.keep)
    }

    /// A folder inside `path`, which some other file system holds.
    pub fn external(name: &str, path: &Path) -> Fallible<Self> {
        let dir = process::work_dir().join(name);
        fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let mnt = path.join(format!("sheaf-suite-{name}"));
        if mnt.exists() {
            fs::remove_dir_all(&mnt).map_err(|e| format!("{}: {e}", mnt.display()))?;
        }
        fs::create_dir(&mnt).map_err(|e| format!("{}: {e}", mnt.display()))?;
        Ok(World {
            name: name.to_owned(),
            sheaf: PathBuf::new(),
            options: None,
            dir,
            mnt,
            images: Vec::new(),
            sizes: Vec::new(),
            external: true,
            keep: false,
        })
    }

    /// Other images than the usual four; before `mkfs`.
    pub fn set_sizes(&mut self, sizes: &[String]) {
        self.images = (0..sizes.len())
            .map(|i| self.dir.join(format!("device{i}.img")))
            .collect();
        self.sizes = sizes.to_vec();
    }

    /// Has its images in memory, if there is room, for who waits for their disk all the time and looks at nothing of it; before
    /// `mkfs`. The suite writes little.
    pub fn in_memory(&mut self) {
        let free = rustix::fs::statvfs(MEMORY).map_or(0, |found| found.f_bavail * found.f_frsize);
        if !self.external && free >= MEMORY_FREE {
            let image = |at| PathBuf::from(format!("{MEMORY}/sheaf-{}-{at}.img", self.name));
            self.images = (0..self.sizes.len()).map(image).collect();
            self.remove_images();
        }
    }

    /// What cannot be removed stays for the next run, which removes it first.
    fn remove_images(&self) {
        for image in &self.images {
            let _ = fs::remove_file(image);
        }
    }

    pub fn is_external(&self) -> bool {
        self.external
    }

    /// The program under test.
    pub fn sheaf(&self) -> &Path {
        &self.sheaf
    }

    /// A folder outside the file system under test.
    pub fn side_dir(&self) -> &Path {
        &self.dir
    }

    /// Makes the images and the file system on them.
    pub fn mkfs(&self) -> Fallible<()> {
        if self.external {
            return Ok(());
        }
        for (image, size) in self.images.iter().zip(&self.sizes) {
            let mut truncate = Command::new("truncate");
            truncate.arg("--size").arg(size).arg(image);
            self.run("truncate", &mut truncate, LIMIT)?;
        }
        let mut mkfs = self.command("mkfs");
        mkfs.args(["--label", "suite"]).args(&self.images);
        self.run("mkfs", &mut mkfs, LIMIT)
    }

    /// Mounts as a user does: returns when the mount is usable, the daemon in the background.
    pub fn mount(&self) -> Fallible<()> {
        self.mount_with("rw")
    }

    /// Mounts with one more option.
    pub fn mount_with(&self, option: &str) -> Fallible<()> {
        if self.external {
            return Ok(());
        }
        let mut mount = self.command("mount");
        mount
            .args(&self.images)
            .arg(&self.mnt)
            .arg("--pid-file")
            .arg(self.pid_file())
            .arg("--log")
            .arg(self.daemon_log())
            .args(["-o", option]);
        self.add_options(&mut mount);
        self.run("mount", &mut mount, LIMIT)
    }

    /// SIGKILL to the daemon that `mount` started; its mount stays behind.
    pub fn kill_daemon(&self) -> Fallible<()> {
        let text = fs::read_to_string(self.pid_file()).map_err(|e| format!("pid file: {e}"))?;
        let pid = text.trim().parse().ok().and_then(Pid::from_raw);
        let pid = pid.ok_or("the pid file holds no pid")?;
        kill_process(pid, Signal::KILL).map_err(|e| format!("kill: {e}"))?;
        let began = Instant::now();
        while Path::new(&format!("/proc/{}", text.trim())).exists() {
            if began.elapsed() > LIMIT {
                return Err("the daemon does not die".to_owned());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    pub fn umount(&mut self) -> Fallible<()> {
        if self.external {
            return Ok(());
        }
        let mut umount = self.command("umount");
        umount.arg(&self.mnt);
        self.run("umount", &mut umount, LIMIT)?;
        if is_mounted(&self.mnt) {
            return Err("umount succeeded but the mount is still there".to_owned());
        }
        Ok(())
    }

    /// Full check of the unmounted array; anything but "clean" is an error.
    pub fn fsck(&self) -> Fallible<()> {
        if self.external {
            return Ok(());
        }
        let mut fsck = self.command("fsck");
        fsck.args(&self.images);
        self.run("fsck", &mut fsck, FSCK_LIMIT)
    }

    /// The most memory that the daemon has used so far, in bytes.
    pub fn daemon_peak_bytes(&self) -> Option<u64> {
        let pid = fs::read_to_string(self.pid_file()).ok()?;
        let status = fs::read_to_string(format!("/proc/{}/status", pid.trim())).ok()?;
        let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
        let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(kib << 10)
    }

    pub fn daemon_log_tail(&self) -> String {
        let text = fs::read(self.daemon_log()).unwrap_or_default();
        process::tail(&String::from_utf8_lossy(&text), 20)
    }

    /// Removes the array's files, unless they are to be kept.
    pub fn discard(self) {
        if !self.keep && !self.external {
            self.take_down();
            self.remove_images();
            let _ = fs::remove_dir_all(&self.dir);
        }
    }

    fn pid_file(&self) -> PathBuf {
        self.dir.join("daemon.pid")
    }

    fn daemon_log(&self) -> PathBuf {
        self.dir.join("daemon.log")
    }

    fn command(&self, subcommand: &str) -> Command {
        let mut command = Command::new(&self.sheaf);
        command.arg(subcommand);
        command
    }

    fn add_options(&self, mount: &mut Command) {
        mount.args(["-o", "allow_other,default_permissions"]);
        if let Some(options) = &self.options {
            mount.args(["-o", options]);
        }
    }

    fn run(&self, what: &str, command: &mut Command, limit: Duration) -> Fallible<()> {
        process::run(&format!("{}-{what}", self.name), command, limit)?.check(what)
    }

    /// Invariant 1: detaches the mount, kills the daemon, aborts the connection.
    fn take_down(&self) {
        if self.external {
            return;
        }
        let connection = fuse_connection(&self.mnt);
        for _ in 0..4 {
            if !is_mounted(&self.mnt) {
                break;
            }
            if let Err(error) = unmount(&self.mnt, UnmountFlags::DETACH) {
                eprintln!("xtask: cannot unmount {}: {error}", self.mnt.display());
                break;
            }
        }
        if let Ok(text) = fs::read_to_string(self.pid_file()) {
            kill_daemon(text.trim(), &self.sheaf);
            let _ = fs::remove_file(self.pid_file());
        }
        if let Some(number) = connection {
            // Gone already when the daemon has ended.
            let _ = fs::write(format!("/sys/fs/fuse/connections/{number}/abort"), "1");
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.take_down();
        if self.external {
            // The folder is ours alone; what cannot be removed is the next run's to report.
            let _ = fs::remove_dir_all(&self.mnt);
        }
    }
}

/// Kills process `pid` if it still runs our program, and waits for it for up to ten seconds.
fn kill_daemon(pid: &str, program: &Path) {
    let Some(raw) = pid.parse().ok().and_then(Pid::from_raw) else {
        return;
    };
    let exe = format!("/proc/{pid}/exe");
    let runs = || fs::read_link(&exe).is_ok_and(|path| path.file_name() == program.file_name());
    let start = Instant::now();
    while runs() && start.elapsed() < Duration::from_secs(10) {
        // It may end between the look and the signal.
        let _ = kill_process(raw, Signal::KILL);
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether something is mounted exactly here.
pub fn is_mounted(dir: &Path) -> bool {
    mount_entry(dir).is_some()
}

/// The connection number of the FUSE mount at `dir`.
fn fuse_connection(dir: &Path) -> Option<u32> {
    let (device, fs_type) = mount_entry(dir)?;
    let (_, minor) = device.split_once(':')?;
    fs_type.starts_with("fuse").then(|| minor.parse().ok())?
}

/// (major:minor, type) of the last mount at `dir`.
fn mount_entry(dir: &Path) -> Option<(String, String)> {
    let text = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let wanted = dir.to_string_lossy().replace(' ', "\\040");
    text.lines().rev().find_map(|line| {
        let fields: Vec<&str> = line.split(' ').collect();
        let dash = fields.iter().position(|&f| f == "-")?;
        (fields.get(4) == Some(&wanted.as_str()))
            .then(|| (fields[2].to_owned(), fields[dash + 1].to_owned()))
    })
}
