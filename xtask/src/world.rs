//! The array that the mounted suites run on: four image files of unequal size, their daemon
//! and their mount point; or, for comparison, a folder of any other file system.
//!
//! Invariants: (1) whatever happens, dropping a `World` leaves no mount, no loop device and no daemon
//! behind, and a new one takes away those of a run that was killed; (2) nothing here waits without a
//! limit; (3) no folder is removed in which something is mounted.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
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
/// How often mounts are taken away, a tenth of a second apart.
const RELEASES: u32 = 10;
/// In so many looks in a row nothing is mounted before that is believed of a folder that a daemon may be about to mount in.
const CLEAN_LOOKS: u32 = 4;
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
            refuse_mounts(&world.dir)?;
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
            // What cannot be taken away is the next run's to report.
            if refuse_mounts(&self.dir).is_ok() {
                let _ = fs::remove_dir_all(&self.dir);
            }
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

    /// Invariant 1, also of what scripts have mounted below the folder, and of a run that was killed.
    fn take_down(&self) {
        if self.external {
            return;
        }
        release(&self.dir);
        if let Ok(text) = fs::read_to_string(self.pid_file()) {
            kill_daemon(text.trim(), &self.sheaf);
            let _ = fs::remove_file(self.pid_file());
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

/// Takes away all mounts below `dir`, and the loop devices of files there. Connections to Sheaf's daemons are
/// aborted first: nobody waits for one that hangs, and it ends.
pub fn release(dir: &Path) {
    release_pausing(dir, || std::thread::sleep(Duration::from_millis(100)));
}

fn release_pausing(dir: &Path, mut pause: impl FnMut()) {
    // As the kernel names it; a folder that is not there has nothing mounted.
    let Ok(dir) = fs::canonicalize(dir) else {
        return;
    };
    // A daemon whose starter was killed may be about to mount.
    let wanted = match may_have_daemon(&dir) {
        true => CLEAN_LOOKS,
        false => 1,
    };
    let mut clean = 0;
    for _ in 0..RELEASES {
        let mounts = mounts();
        let below: Vec<&Mount> = mounts.iter().filter(|m| m.at.starts_with(&dir)).collect();
        detach(&below);
        detach_loops(&dir);
        clean = match refuse_mounts(&dir).is_ok() {
            true => clean + 1,
            false => 0,
        };
        if clean == wanted {
            return;
        }
        pause();
    }
}

/// Whether something of a daemon lies in the folder: the number of its process, or an image.
fn may_have_daemon(dir: &Path) -> bool {
    let mut names = fs::read_dir(dir).into_iter().flatten().flatten();
    names.any(|entry| {
        let path = entry.path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        matches!(extension, Some("pid" | "img"))
    })
}

/// In the order in which they were mounted.
fn detach(mounts: &[&Mount]) {
    for number in mounts.iter().filter_map(|mount| mount.connection()) {
        // Gone already when the daemon has ended.
        let _ = fs::write(format!("/sys/fs/fuse/connections/{number}/abort"), "1");
    }
    for mount in mounts.iter().rev() {
        let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
        // One that was mounted on another has gone with that.
        let _ = unmount(&mount.at, flags);
    }
}

fn detach_loops(dir: &Path) {
    for device in loop_devices(dir) {
        let detached = Command::new("losetup").arg("-d").arg(&device).status();
        if !detached.is_ok_and(|status| status.success()) {
            eprintln!("xtask: cannot detach {}", device.display());
        }
    }
}

/// Who removes a folder would remove what is mounted in it.
pub fn refuse_mounts(dir: &Path) -> Fallible<()> {
    let Ok(real) = fs::canonicalize(dir) else {
        return Ok(());
    };
    match mounts().iter().find(|m| m.at.starts_with(&real)) {
        None => Ok(()),
        Some(mount) => Err(format!(
            "{} is still mounted; unmount it (umount --lazy)",
            mount.at.display()
        )),
    }
}

/// The loop devices of files below `dir`.
fn loop_devices(dir: &Path) -> Vec<PathBuf> {
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let shown = devices.filter(|device| {
        let file = fs::read_to_string(device.path().join("loop/backing_file"));
        file.is_ok_and(|file| Path::new(file.trim_end()).starts_with(dir))
    });
    shown
        .map(|device| Path::new("/dev").join(device.file_name()))
        .collect()
}

/// Whether something is mounted exactly here. What is there is not asked: it may be dead, or hang.
pub fn is_mounted(dir: &Path) -> bool {
    let (Some(parent), Some(name)) = (dir.parent(), dir.file_name()) else {
        return false;
    };
    fs::canonicalize(parent).is_ok_and(|parent| {
        let at = parent.join(name);
        mounts().iter().any(|m| m.at == at)
    })
}

/// A line of the kernel's table of mounts.
struct Mount {
    at: PathBuf,
    /// (major, minor)
    device: (u32, u32),
    fs_type: String,
}

impl Mount {
    /// The number of Sheaf's FUSE connection, which is the device's number as the kernel has it.
    fn connection(&self) -> Option<u32> {
        let (major, minor) = self.device;
        matches!(self.fs_type.as_str(), "fuse.sheaf" | "fuseblk.sheaf")
            .then_some(major << 20 | minor)
    }

    fn parse(line: &str) -> Option<Mount> {
        let fields: Vec<&str> = line.split(' ').collect();
        let dash = fields.iter().position(|&f| f == "-")?;
        let (major, minor) = fields.get(2)?.split_once(':')?;
        Some(Mount {
            at: unescaped(fields.get(4)?),
            device: (major.parse().ok()?, minor.parse().ok()?),
            fs_type: (*fields.get(dash + 1)?).to_owned(),
        })
    }
}

/// In the order in which they were mounted.
fn mounts() -> Vec<Mount> {
    let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let table = String::from_utf8_lossy(&table);
    table.lines().filter_map(Mount::parse).collect()
}

/// A path of that table, in which blanks and backslashes are octal.
fn unescaped(text: &str) -> PathBuf {
    let mut parts = text.split('\\');
    let mut path = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let code = part.get(..3).and_then(|c| u8::from_str_radix(c, 8).ok());
        path.extend(code);
        path.extend(part.get(3..).unwrap_or_default().as_bytes());
    }
    PathBuf::from(OsString::from_vec(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A world's folder as a run has left it that was killed, removed with the value.
    struct Leftovers(PathBuf);

    impl Leftovers {
        fn new(name: &str) -> Self {
            let dir = process::work_dir().join(name);
            fs::create_dir_all(dir.join("script/my mnt")).unwrap();
            Leftovers(dir)
        }
    }

    impl Drop for Leftovers {
        fn drop(&mut self) {
            release(&self.0);
            if refuse_mounts(&self.0).is_ok() {
                let _ = fs::remove_dir_all(&self.0);
            }
        }
    }

    /// Each run deleted what was mounted there, and then could not go on.
    #[test]
    fn what_is_left_mounted_below_a_world_is_detached_and_keeps_its_files() {
        if !crate::packages::is_root() {
            return base::skip("root");
        }
        let name = format!("leftovers-{}", std::process::id());
        let left = Leftovers::new(&name);
        let elsewhere = Leftovers::new(&format!("{name}-elsewhere"));
        let letter = elsewhere.0.join("letter");
        fs::write(&letter, "mine").unwrap();
        // With a space in its name; twice, one over the other.
        let at = left.0.join("script/my mnt");
        for _ in 0..2 {
            rustix::mount::mount_bind(&elsewhere.0, &at).unwrap();
        }
        assert!(is_mounted(&at) && refuse_mounts(&left.0).is_err());
        let world = World::new(&name, Path::new("sheaf"), None, false);
        assert_eq!(fs::read_to_string(&letter).unwrap(), "mine");
        assert!(!is_mounted(&at) && !at.exists());
        drop(world.unwrap());
    }

    /// A daemon that mounted just after the first look was missed, and the folder could not be removed.
    #[test]
    fn what_is_mounted_shortly_after_the_first_look_is_taken_away() {
        if !crate::packages::is_root() {
            return base::skip("root");
        }
        let left = Leftovers::new(&format!("late-{}", std::process::id()));
        let at = left.0.join("script/my mnt");
        let mut pauses = 0;
        release_pausing(&left.0, || pauses += 1);
        assert_eq!(pauses, 0, "nothing of a daemon is there");
        fs::write(left.0.join("device0.img"), "").unwrap();
        release_pausing(&left.0, || {
            pauses += 1;
            if pauses == 1 {
                rustix::mount::mount_bind(&left.0, &at).unwrap();
                assert!(is_mounted(&at));
            }
        });
        assert!(
            pauses == CLEAN_LOOKS - 1 || pauses == CLEAN_LOOKS,
            "{pauses}"
        );
        assert!(!is_mounted(&at));
    }

    #[test]
    fn the_table_of_mounts_is_read() {
        let line = r"97 31 7:3 / /a\040b\134c rw,nosuid shared:1 - fuseblk.sheaf /dev/loop3 rw";
        let mount = Mount::parse(line).unwrap();
        assert_eq!(mount.at, Path::new(r"/a b\c"));
        assert_eq!(mount.connection(), Some(7 << 20 | 3));
        let other = Mount::parse("97 31 0:52 / /a rw - fuse.sshfs me rw").unwrap();
        assert_eq!(other.connection(), None);
        assert!(Mount::parse("97 31").is_none());
    }
}
