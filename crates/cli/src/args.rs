//! Every command and option: help, man pages and completions come from here.

mod bench;
pub mod helpers;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

pub use bench::*;

use crate::size;

/// Threads that remove a tree at most.
const JOBS_MAX: i64 = engine::THREADS_MAX as i64;

#[derive(Parser, Debug)]
#[command(
    name = "sheaf",
    version,
    about = "Binds SSDs into one crash-safe file system",
    long_about = "Binds SSDs into one crash-safe file system that lives in user space.\n\n\
        Devices are block devices or image files. Where a command takes the devices of a \
        file system, one of them is enough if the others lie beside it or are block devices \
        of this machine; UUID=… and LABEL=… find them all by scanning the labels of this \
        machine's block devices, not of image files, which are to be named.",
    after_help = "Exit status: 0 success, 1 errors corrected, 4 errors left, 8 operational \
        error, 16 usage error.",
    propagate_version = true,
    subcommand_required = true,
    arg_required_else_help = true
)]
pub struct Sheaf {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand, Debug)]
pub enum Command {
    Mkfs(Mkfs),
    Mount(Mount),
    Umount(Umount),
    Fsck(Fsck),
    Info(Info),
    Label(Label),
    Ls(Ls),
    Cat(Cat),
    Cp(Cp),
    Rm(Rm),
    Trim(Trim),
    Checkpoint(Checkpoint),
    Scrub(Scrub),
    Demo(Demo),
    Torture(Torture),
    Bench(Bench),
    Man(Man),
    Completions(Completions),
}

/// Make a file system on devices or image files
///
/// Refuses a device that is in use, and without --force one with a file system, volume or partition table that it knows,
/// and an image file with any data at its beginning or end. Labels are
/// written last: an interrupted mkfs leaves nothing that mounts.
#[derive(Args, Debug)]
pub struct Mkfs {
    /// Block devices or image files, 1 to 16, of any sizes
    #[arg(required = true, num_args = 1..)]
    pub devices: Vec<PathBuf>,
    /// Name of the file system, for LABEL=; at most 64 bytes of UTF-8
    #[arg(short = 'L', long, default_value = "")]
    pub label: String,
    /// Bytes that go to one device before the next one's turn: a power of two from 4K to 16M, 256K by default
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub stripe_unit: Option<u64>,
    /// Size of the journal, from 4M to a quarter of all devices together; by default a 64th of these, rounded up to a power of two, and at most 1G
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub journal_size: Option<u64>,
    /// Create image files of this size each where nothing exists
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub size: Option<u64>,
    /// UUID of the file system instead of a random one
    #[arg(short = 'U', long, value_name = "UUID")]
    pub uuid: Option<String>,
    /// Overwrite whatever the devices hold
    #[arg(short, long)]
    pub force: bool,
    /// Do not discard (TRIM) the devices first
    #[arg(short = 'K', long)]
    pub no_discard: bool,
    /// Print nothing on success
    #[arg(short, long)]
    pub quiet: bool,
    /// Print the result as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Mount a file system
///
/// Returns when the mount is usable; a daemon then serves it until it is unmounted. A mount
/// whose daemon died is cleaned away first.
#[derive(Args, Debug, Default)]
pub struct Mount {
    /// The devices (also separated by ':', or UUID=… or LABEL=…), then the mount point
    #[arg(required = true, num_args = 2.., value_name = "DEVICE... MOUNTPOINT")]
    pub devices_and_mountpoint: Vec<PathBuf>,
    /// Options separated by commas: ro, noatime, relatime, strictatime, nodiratime, nodev,
    /// nosuid, noexec, nosymfollow, sync, dirsync, allow_other (root's default), noallow_other, default_permissions, xattr, noxattr, discard,
    /// cache_size=SIZE (8M at least), commit=SECONDS, checkpoint=SECONDS, checkpoint_workers=N,
    /// write_back=SECONDS, pre_clean=on|off, mtime_persist=TIME (as 1s, 10ms, 0), workers=N, io=auto|uring|threads,
    /// topology=per-core|per-device, reap=interrupt|poll|lazy, reap_ring=ordinary|iopoll,
    /// fuse_io=auto|dev|uring, max_read=BYTES, fsname=NAME, metrics=SOCKET|LOOPBACK:PORT,
    /// device_timeout=SECONDS (to wait for devices that are not there yet; 0, but 10 from fstab and mount(8))
    #[arg(
        short = 'o',
        long = "options",
        value_name = "OPTIONS",
        verbatim_doc_comment
    )]
    pub options: Vec<String>,
    /// Memory that the daemon may take, 8M at least, as -o cache_size=
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub cache_size: Option<u64>,
    /// Mount read-only, as -o ro
    #[arg(short, long)]
    pub read_only: bool,
    /// Serve the mount from this process instead of a daemon
    ///
    /// Prints a line when the mount is usable, and tells systemd (Type=notify). Messages go to standard error; those that nobody reads in time are lost, and counted.
    #[arg(short, long)]
    pub foreground: bool,
    /// Append messages to this file, or pipe that somebody reads, instead of the system log
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    /// Write the daemon's process id to this file once the mount is usable, in place of an older one
    #[arg(long, value_name = "FILE")]
    pub pid_file: Option<PathBuf>,
    /// Without a device that is not there nothing is mounted, and that is no failure: what `nofail` means to mount(8)
    #[arg(long, hide = true)]
    pub may_be_absent: bool,
    /// The daemon's side of a mount: the word to its parent goes to standard output
    #[arg(long, hide = true)]
    pub daemon: bool,
    /// Unmount and end when this process has ended: for a benchmark's mount
    #[arg(long, value_name = "PID", hide = true)]
    pub end_with: Option<u32>,
}

/// Unmount a file system
///
/// Returns when everything is on the devices and the daemon is gone. A mount whose daemon
/// died is cleaned away, and the exit status says that not everything may be written.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit status: 0 unmounted, and without --lazy and --force everything is on the devices; 8 not unmounted, or \
    not everything was written; 16 usage error."
)]
pub struct Umount {
    /// Detach the mount now, though it be in use or its daemon hang, and do not wait: the daemon
    /// writes everything back and ends when the last user has gone
    #[arg(short, long)]
    pub lazy: bool,
    /// As --lazy, and break the mount off: whoever still uses it gets errors
    #[arg(short, long)]
    pub force: bool,
    /// The mount point
    pub mountpoint: PathBuf,
}

/// Check a file system that is not mounted
///
/// Verifies labels, checkpoint, node table, every node's checksum, the directory tree, link
/// counts, extents against space maps, and segments. The journal a crash left is replayed in
/// memory. Nothing is written without --repair or --preen; a repair is made in memory, and
/// written in one step, so that an interruption leaves the array as it was, or repaired.
///
/// A device both copies of whose label are gone, by a partition table written to the wrong disk say, gets its label again by --relabel
/// with all devices of the file system named one by one, if the metadata on it proves that it is the missing device.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit status: 0 no errors, 1 errors corrected, 4 errors left, or with -n anything that would be \
    repaired, 8 operational error, 16 usage error; 8 is added to the others where the report cannot be written, or a repair fails once \
    it is written."
)]
pub struct Fsck {
    /// The devices (also separated by ':', or UUID=… or LABEL=…)
    #[arg(required = true, num_args = 1..)]
    pub devices: Vec<PathBuf>,
    /// Repair what is wrong; what cannot be saved is named, and what has lost its name comes to
    /// /lost+found
    #[arg(short = 'y', long)]
    pub repair: bool,
    /// Repair only if nothing is lost by it
    #[arg(short = 'p', long, conflicts_with = "repair")]
    pub preen: bool,
    /// Write the label again of a device that lost both copies; say it only of the device itself: an old copy or a backup of it
    /// cannot always be told from it, and would replace what was written since
    ///
    /// All devices are to be named one by one. Nothing else is repaired.
    #[arg(long, conflicts_with_all = ["repair", "preen", "quick"])]
    pub relabel: bool,
    /// Change nothing; with --repair, --preen or --relabel: show what would be done, and exit with 4 if that is anything
    #[arg(short = 'n', long)]
    pub dry_run: bool,
    /// As fsck(8) has it called: what nobody asked for by name is not done, which is to accept the state of a device that was put back to an old copy
    #[arg(long, hide = true)]
    pub unattended: bool,
    /// Check only that all devices are there and can be mounted, as at system start
    #[arg(long, conflicts_with_all = ["repair", "preen", "json"])]
    pub quick: bool,
    /// Print the findings as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Show what the devices hold, and in which state that is
///
/// The state is what labels, checkpoint records and the journal say, and nothing else is looked at: `clean`, `needs recovery` with what the next mount
/// replays of the journal, `damaged` where these keep the next mount from beginning, or, while somebody has the devices who may write, `mounted` or `in use`;
/// with the processes that have them open, where they are mounted, what the daemon says of errors since then (to root and its own user, if within two seconds), and damage that
/// the look finds. A mount can be refused for other damage though the state is clean: `sheaf fsck` looks at everything. Nothing is written.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit status: 0 whatever the state is, 8 where there is none to tell, as with a device missing or without a label, 16 usage error."
)]
pub struct Info {
    /// The devices, UUID=… or LABEL=…; without any, all Sheaf block devices of this machine are listed
    pub devices: Vec<PathBuf>,
    /// Print one JSON object; without devices, an array of them
    #[arg(long)]
    pub json: bool,
    /// Print keys for a udev rule
    #[arg(long, requires = "devices", conflicts_with = "json")]
    pub udev: bool,
    /// Show what the daemon of a mount has done since it was mounted
    ///
    /// Bytes and flushes by cause, operations, commits, checkpoints, delays, latencies of fsync, the
    /// cache and the devices. Needs root or the daemon's own user.
    #[arg(long, value_name = "MOUNTPOINT", conflicts_with_all = ["devices", "udev"])]
    pub live: Option<PathBuf>,
    /// As other calls of this program ask a daemon that may hang: its process and its metrics, from a session of its own
    #[arg(long, hide = true, requires = "live")]
    pub unwaited: bool,
}

/// Show or change the label and the UUID of a file system
///
/// Without options both are shown, though it be mounted. A change takes a file system that is not mounted, with all its devices; it need not
/// have been unmounted cleanly. Cut off at any point it leaves a file system that opens as what it was or as what it was to be, by either
/// name, and the next mounts, or the same command again, end it.
///
/// A copy of all devices, a snapshot say, can have a UUID of its own and be mounted beside the original: name its devices one by one. Lines of
/// /etc/fstab and the like that have the old label or UUID are to be changed by hand.
#[derive(Args, Debug)]
pub struct Label {
    /// The devices (also separated by ':', or UUID=… or LABEL=…)
    #[arg(required = true, num_args = 1..)]
    pub devices: Vec<PathBuf>,
    /// The new label, for LABEL=; '' for none
    #[arg(short = 'L', long, value_name = "LABEL")]
    pub label: Option<String>,
    /// The new UUID, or `random`
    #[arg(short = 'U', long, value_name = "UUID")]
    pub uuid: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// List a folder of a file system that is not mounted
///
/// As with cat and cp, a path inside the file system is written ':/home'; here, where all are
/// inside, the ':' may be left out.
#[derive(Args, Debug)]
pub struct Ls {
    #[command(flatten)]
    pub source: Source,
    /// Paths inside the file system
    #[arg(default_value = "/")]
    pub paths: Vec<PathBuf>,
    /// Show mode, links, owner, size and time, too
    #[arg(short, long)]
    pub long: bool,
    /// List folders inside folders
    #[arg(short = 'R', long)]
    pub recursive: bool,
    /// Print one JSON object per entry, and per error of what has none; the bytes of what is not UTF-8 are there in hexadecimal, too
    #[arg(long)]
    pub json: bool,
}

/// Print files of a file system that is not mounted
///
/// As with ls and cp, a path inside the file system is written ':/home/list.txt'; here, where
/// all are inside, the ':' may be left out.
#[derive(Args, Debug)]
pub struct Cat {
    #[command(flatten)]
    pub source: Source,
    /// Paths inside the file system
    #[arg(required = true)]
    pub paths: Vec<PathBuf>,
}

/// Copy files out of, or into, a file system that is not mounted
///
/// Paths inside the file system are written with a leading ':', those of the host without, as
/// in `sheaf cp -d a.img :/home/list.txt .`; the last path is the target.
///
/// As with cp(1), contents and permission bits without set-id bits, less the umask, are copied, and a file that is there already keeps its
/// own mode; owner, times, extended attributes and hard links are kept with --preserve. Holes of sparse files stay holes. Symbolic links are
/// followed where they are named as a source without --recursive, or as the target; those in folders are copied as links. Fifos, sockets
/// and device nodes are copied with --archive only. Never kept are the time of the last change of attributes, that of birth, flags
/// of chattr(1), and which parts of a hole are preallocated. The devices of the file system itself are
/// neither overwritten nor copied, whatever name or loop device leads to them (the disk of a partition is not known as such), and nothing is that the same command has made. What cannot be copied or kept is named, the rest is copied, and the exit status is 8.
#[derive(Args, Debug)]
pub struct Cp {
    #[command(flatten)]
    pub source: Source,
    /// Copy folders with everything in them, and symbolic links as links
    #[arg(short, long)]
    pub recursive: bool,
    /// Keep the mode with set-id bits, owner and group (on the host if root copies), times of access
    /// and modification, extended attributes with access control lists, and hard links within what is copied
    #[arg(short, long)]
    pub preserve: bool,
    /// Copy a tree with all that is kept: --recursive and --preserve, and special files
    #[arg(short, long)]
    pub archive: bool,
    /// Sources, then the target
    #[arg(required = true, num_args = 2..)]
    pub paths: Vec<PathBuf>,
}

/// Remove files from a file system that is not mounted
///
/// Folders go with everything in them, by many threads at once. Each file goes as a whole or
/// not at all; an interruption leaves those that were not removed yet. As with ls and cat, the
/// ':' of a path inside the file system may be left out.
#[derive(Args, Debug)]
pub struct Rm {
    #[command(flatten)]
    pub source: Source,
    /// Remove folders with everything in them
    #[arg(short, long)]
    pub recursive: bool,
    /// Threads at work; the number of CPUs by default, and 64 at most
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=JOBS_MAX))]
    pub jobs: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Paths inside the file system
    #[arg(required = true)]
    pub paths: Vec<PathBuf>,
}

/// Which file system a command without a mount works on.
#[derive(Args, Debug)]
pub struct Source {
    /// Its devices (also separated by ':', or UUID=… or LABEL=…)
    #[arg(short, long = "device", required = true, value_name = "DEVICE")]
    pub devices: Vec<PathBuf>,
}

/// Discard (TRIM) the free space of a mounted file system
///
/// All of it, or that in a range of the linear address space, which is as long as the file system is large (the size that df(1) shows): the
/// chunks of the array in their order (`sheaf info` shows how large they are), each of them striped over the devices of its zone. It is that of
/// fstrim(8), too, and has nothing to do with where a single device has its data.
#[derive(Args, Debug)]
pub struct Trim {
    /// Where the range begins
    #[arg(short, long, value_name = "SIZE", default_value = "0", value_parser = size::parse)]
    pub offset: u64,
    /// How long the range is; without it, up to the end
    #[arg(short, long, value_name = "SIZE", value_parser = size::parse)]
    pub length: Option<u64>,
    /// Leave runs of free space alone that are shorter, as far as they are in the range
    #[arg(short, long, value_name = "SIZE", default_value = "0", value_parser = size::parse)]
    pub minimum: u64,
    /// The mount point
    pub mountpoint: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Write home all that a mounted file system has written and changed
///
/// Returns when a mount after a crash would have nothing to apply of what was done before. It may still count a
/// batch and its records as replayed, by which the checkpoint itself noted what it had merged in directories: they change no
/// node. Work goes on meanwhile. Needs root or the daemon's own user.
#[derive(Args, Debug)]
pub struct Checkpoint {
    /// The mount point
    pub mountpoint: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Verify the metadata of a mounted file system
///
/// Reads all metadata from the devices while the file system is in use, and verifies it:
/// labels, checkpoint slots, space tables, node table, and the checksum of every node. Changes
/// nothing. It is the metadata of the last checkpoint: call `sheaf checkpoint` before, and that is all
/// that was changed until then. Interrupted, it goes on where it was when it is called again. File contents have no
/// checksums and are not read; fsck, on an unmounted file system, verifies relations as well.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit status: 0 no errors, 4 errors found, 8 operational error, 16 usage \
    error."
)]
pub struct Scrub {
    /// The mount point
    pub mountpoint: PathBuf,
    /// Read at most this much in a second, from 64K up
    #[arg(long, value_name = "SIZE", value_parser = size::parse_rate)]
    pub rate: Option<u64>,
    /// Begin anew, though an earlier scrub was interrupted
    #[arg(long)]
    pub restart: bool,
    /// Where the position of an interrupted scrub is kept; if it is not given /var/lib/sheaf, as far as that can be written
    #[arg(long, value_name = "FOLDER")]
    pub state: Option<PathBuf>,
    /// Print the findings as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Show what Sheaf does: an array of four devices survives the death of its daemon
///
/// Makes a four-device array in a temporary folder, mounts it, copies a tree of thousands of
/// files, verifies checksums, kills the daemon while a writer is running, mounts again,
/// verifies that everything synced is there, and runs fsck. Without the right to mount it
/// does the same in-process.
#[derive(Args, Debug)]
pub struct Demo {
    /// Where to put the devices' files, instead of the system's temporary folder
    #[arg(long, value_name = "FOLDER")]
    pub dir: Option<PathBuf>,
    /// The tree to copy, instead of this project's sources and the toolchain's library
    #[arg(long, value_name = "FOLDER")]
    pub tree: Option<PathBuf>,
    /// Work in-process even where mounting is possible
    #[arg(long)]
    pub no_mount: bool,
    /// Leave the devices' files in place
    #[arg(long)]
    pub keep: bool,
    /// The part that is killed, where there is no mount
    #[arg(long, hide = true)]
    pub victim: bool,
}

/// Kill a file system's daemon over and over, and check that nothing synced is lost
///
/// Makes a four-device array of (sparse) image files in a folder, mounts it, lets several
/// writers create, overwrite, append, truncate, rename, link and sync files, kills the daemon
/// with SIGKILL at random moments, mounts again, and compares what is there with what was
/// synced; fsck must find nothing. Recovery is killed as well. What an interrupted run leaves is
/// removed by the next.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit status: 0 nothing is lost, 4 something is (images and log are \
    kept), 8 the run could not begin, 16 usage error."
)]
pub struct Torture {
    /// The folder for the images, which take up to 3 GiB, and a log
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// How long
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    pub seconds: u64,
    /// Stop after this many kills instead of after a time
    #[arg(
        long,
        value_name = "COUNT",
        conflicts_with = "seconds",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub kills: Option<u32>,
    /// Draw the same operations, contents and times as an earlier run, which printed this; how far they get depends on the machine
    #[arg(long)]
    pub seed: Option<u64>,
    /// How many seconds a writer may take for one operation before that is a failure, and as many the making of its folder and the look at what it left
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub step_limit: u64,
    /// Mount with these options
    #[arg(short = 'o', long = "options", value_name = "OPTIONS")]
    pub options: Vec<String>,
    /// Leave images and log in place in any case
    #[arg(long)]
    pub keep: bool,
    /// Print the result as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Write man pages
#[derive(Args, Debug)]
pub struct Man {
    /// The folder to write them to
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    pub dir: PathBuf,
}

/// Print completions for a shell
#[derive(Args, Debug)]
pub struct Completions {
    /// The shell
    pub shell: clap_complete::Shell,
}
