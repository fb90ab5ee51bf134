//! `sheaf bench`: the suites and their options.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use device::Reaping;

use crate::size;

/// Measure this machine, beside other file systems in the same run
///
/// Each suite sets up what it compares with, lets the sides take turns, and takes everything
/// down again, also when it is interrupted. A kill (SIGKILL) leaves a folder, named sheaf-bench- and its process id, in the
/// temporary folder, /dev/shm or --dir, and in the latter two image files in it. Mounting needs root: what
/// compares with file systems of the kernel does, but not with `--against none`; files, list and tx always mount, and fsync, mtime and varmail have a loop
/// device, unless `--latency` puts them on devices in memory.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit status: 0 all sides ran, whether or not the bars hold; 8 a side could \
    not run; 16 usage error.",
    subcommand_required = true,
    arg_required_else_help = true
)]
pub struct Bench {
    #[command(subcommand)]
    pub suite: Suite,
}

#[derive(Subcommand, Debug)]
pub enum Suite {
    Fxmark(Fxmark),
    Array(BenchArray),
    Cache(BenchCache),
    Ior(BenchIor),
    Checkpoint(BenchCheckpoint),
    Files(Files),
    Fsync(Fsync),
    List(List),
    Mtime(Mtime),
    Pool(Pool),
    Reap(BenchReap),
    Recovery(BenchRecovery),
    Remove(Remove),
    Scale(Scale),
    Tx(BenchTx),
    Varmail(Varmail),
    Written(Written),
}

/// The same with others for suites that take others.
macro_rules! against {
    ($default:literal, $takes:literal) => {
        concat!(
            "File systems to compare with, separated by commas, instead of ",
            $default,
            ": ext4, ext4-lazytime, ext4-fast_commit, xfs, f2fs",
            $takes,
            "; or none"
        )
    };
}

const ANY: &str = against!(
    "ext4,xfs",
    ", btrfs, btrfs-raid0, tmpfs, sheaf-mount, paths of folders"
);
const ON_DEVICES: &str = against!("ext4,xfs", ", btrfs, btrfs-raid0");
/// A mount of btrfs does not tell its device.
const COUNTED: &str = against!("ext4,xfs", "");
const WITH_RAID: &str = against!("ext4,xfs,btrfs-raid0", ", btrfs, btrfs-raid0");
const ON_LOOPS: &str = concat!(
    against!("ext4,xfs,btrfs-raid0", ", btrfs, btrfs-raid0"),
    ". On loop devices and those that are given: btrfs-raid0 where several are measured, the others where one is"
);
const ON_A_LOOP: &str = concat!(
    against!("ext4,xfs", ", btrfs, btrfs-raid0"),
    ". On a loop device over a file on a disk, beside Sheaf on it. Needs root; without, nobody takes part by default"
);
const DURABLE: &str = against!(
    "ext4,ext4-lazytime,ext4-fast_commit,xfs",
    ", btrfs, btrfs-raid0"
);
const EXT4: &str = against!("ext4", ", btrfs, btrfs-raid0, tmpfs");

/// What all suites take.
#[derive(Args, Debug)]
pub struct BenchOptions {
    /// File systems to compare with, separated by commas, instead of ext4,xfs: ext4, ext4-lazytime, ext4-fast_commit, xfs, f2fs,
    /// btrfs, btrfs-raid0, tmpfs; or none
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub against: Vec<String>,
    /// How often each side runs; the median counts
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    pub runs: usize,
    /// Put image files in a new folder in this one, instead of in memory; fsync, mtime, tx and varmail have theirs on a disk in any
    /// case, in /var/tmp
    #[arg(long, value_name = "FOLDER", conflicts_with = "device")]
    pub dir: Option<PathBuf>,
    /// Use these block devices, which must hold nothing known and be used by nobody: each side in turn makes its file
    /// system on them, over that of the one before, a kernel file system on the first, or on all if it is one that spreads; all
    /// content is lost
    #[arg(long, value_name = "DEVICE", num_args = 1..)]
    pub device: Vec<PathBuf>,
    /// Have all sides on one loop device over an image file (ior: on as many as --devices says), in turn, instead of Sheaf on image
    /// files and only kernel file systems on a loop device; as files, fsync, list, mtime, tx and varmail always do. Needs root
    #[arg(long = "loop", conflicts_with = "device")]
    pub on_loop: bool,
    #[command(flatten)]
    pub output: BenchOutput,
}

/// What suites of small writes that are synced take.
#[derive(Args, Debug)]
pub struct SyncedOptions {
    /// Time of one measurement
    #[arg(long, default_value_t = 2.0, allow_negative_numbers = true)]
    pub seconds: f64,
    /// Measure on devices in memory instead that take so many microseconds to read or write up to 128 KiB: Sheaf
    /// and the devices themselves, without file systems of the kernel. Needs no root
    #[arg(long, value_name = "MICROSECONDS", conflicts_with_all = ["dir", "device", "on_loop"])]
    pub latency: Option<u64>,
    /// Microseconds that a flush of these takes, instead of as many as --latency
    #[arg(long, value_name = "MICROSECONDS", requires = "latency")]
    pub flush: Option<u64>,
    /// Requests that each of them serves at a time
    #[arg(long, value_name = "COUNT", default_value_t = 32, requires = "latency")]
    pub depth: usize,
    /// Number of these devices
    #[arg(long, value_name = "COUNT", default_value_t = 4, requires = "latency")]
    pub devices: usize,
    /// How Sheaf waits for devices: interrupt, poll or lazy
    #[arg(long, value_name = "POLICY", default_value = "interrupt", value_parser = reaping)]
    pub reap: Reaping,
    /// Memory that Sheaf may take, instead of a quarter and at most 1 GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub cache_size: Option<u64>,
    #[command(flatten)]
    pub common: BenchOptions,
}

fn reaping(name: &str) -> Result<Reaping, String> {
    let all = || Reaping::ALL.map(Reaping::name).join(", ");
    Reaping::parse(name).ok_or_else(|| format!("give one of {}", all()))
}

/// How a suite's report is shown.
#[derive(Args, Debug)]
pub struct BenchOutput {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Write a report with plots, too
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// Metadata and data operations by many threads: the workloads of FxMark
///
/// Compares Sheaf in this process with other file systems, each freshly made for each window:
/// kernel file systems on loop devices over image files in memory, with root; or what is mounted
/// at a path. Each measurement ends with a sync and an unmount, which are not in the throughput;
/// what the machine did up to their ends for each operation is in --json.
#[derive(Args, Debug)]
#[command(mut_arg("against", |arg| arg.help(ANY)))]
pub struct Fxmark {
    /// Workloads, separated by commas, instead of all: MWCL, MWCM, MWUL, MWUM, MWRL, MWRM, MRPL,
    /// MRPM, MRPH, MRDL, MRDM, DWAL, DWOL, DWOM, DWSL, DWTL, DRBL, DRBM, DRBH
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub workload: Vec<String>,
    /// Numbers of threads, separated by commas, instead of 1 and its doubles up to the number of CPUs
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub threads: Vec<usize>,
    /// Longest time of one measurement
    #[arg(long, default_value_t = 2.0, allow_negative_numbers = true)]
    pub seconds: f64,
    /// Files or pages that a measurement has prepared, or may make, by all threads together;
    /// it ends when they are used up. From 100; several sizes, separated by commas, are measured in turn
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "200000"
    )]
    pub pool: Vec<u64>,
    /// End a measurement when a thread has done its share of so many operations, too
    #[arg(long, value_name = "COUNT")]
    pub operations: Option<u64>,
    /// Keep directories open, and make all calls but truncate relative to them, on all sides
    #[arg(long)]
    pub relative: bool,
    /// Memory that Sheaf may take in this process, instead of a quarter and at most 1 GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub cache_size: Option<u64>,
    #[command(flatten)]
    pub common: BenchOptions,
}

/// Whether operations notice checkpoints, and what many checkpoint threads do for them
///
/// Files made until ten times as much is logged as the journal holds, by Sheaf in this process on slow devices in memory,
/// beside a journal that holds all of it and beside what the devices take for the same bytes; as root on a loop device, too, beside
/// file systems of the kernel.
#[derive(Args, Debug)]
#[command(mut_arg("against", |arg| arg.help(ON_A_LOOP)))]
pub struct BenchCheckpoint {
    /// Numbers of checkpoint threads, separated by commas
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,2,4,8"
    )]
    pub workers: Vec<usize>,
    /// Threads that make files
    #[arg(long, value_name = "COUNT", default_value_t = 2)]
    pub threads: usize,
    /// Size of the journal
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "64M")]
    pub journal_size: u64,
    /// Number of devices
    #[arg(long, value_name = "COUNT", default_value_t = 4)]
    pub devices: usize,
    /// Microseconds that a device takes to read or write up to 128 KiB
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 100)]
    pub latency: u64,
    /// Microseconds that a flush takes
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 100)]
    pub flush: u64,
    /// Requests that a device serves at a time
    #[arg(long, value_name = "COUNT", default_value_t = 32)]
    pub depth: usize,
    /// How often each runs; the median counts
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    pub runs: usize,
    /// File systems of the kernel, separated by commas
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub against: Vec<String>,
    /// Put that file in this folder, instead of in /var/tmp
    #[arg(long, value_name = "FOLDER")]
    pub dir: Option<PathBuf>,
    /// Memory that Sheaf may take
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "4G")]
    pub cache_size: u64,
    #[command(flatten)]
    pub output: BenchOutput,
}

/// How threads wait for devices: by interrupts, by polling, and by sleeping until a transfer is nearly done
///
/// On devices of this process that take a set time, with --dir on a file and with --device on that, beside fio where it is
/// installed.
#[derive(Args, Debug)]
pub struct BenchReap {
    /// Which of fixed, mix, step, stall, group, disk and device, instead of all; disk only with --dir, device only with --device
    #[arg(value_name = "PART")]
    pub parts: Vec<String>,
    /// Time of one measurement
    #[arg(long, default_value_t = 0.2, allow_negative_numbers = true)]
    pub seconds: f64,
    /// How often each side runs; the median counts
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    pub runs: usize,
    /// Have a file in a new folder in this one
    #[arg(long, value_name = "FOLDER")]
    pub dir: Option<PathBuf>,
    /// Measure this block device, or file, that is there already, too: it is only read from, unless --overwrite is given
    #[arg(long, value_name = "PATH")]
    pub device: Option<PathBuf>,
    /// How many reads of the --device are waited for together, separated by commas
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,8,32",
        requires = "device"
    )]
    pub depth: Vec<usize>,
    /// Write to the --device at random places, too: all that it holds is lost. Refuses one that is in use or holds something known
    #[arg(long, requires = "device")]
    pub overwrite: bool,
    #[command(flatten)]
    pub output: BenchOutput,
}

/// Transactions beside writes that are synced one after the other, and SQLite on a mount beside itself with a journal
///
/// All sides are on one loop device over a file in --dir (/var/tmp; a folder in memory takes the disk out of it), or on the --device, in turn, each on
/// a fresh file system. Needs root.
#[derive(Args, Debug)]
#[command(mut_arg("against", |arg| arg.help(ON_DEVICES)), mut_arg("shape", |arg| arg.help(shapes())))]
pub struct BenchTx {
    /// Transactions
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = shape)]
    pub shape: Vec<Option<(usize, usize)>>,
    /// Time of one measurement
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    pub seconds: f64,
    /// The program sheaf-sqlite (`cargo build --release --package sheaf-sqlite`), for what SQLite gains, instead of the one beside this program, if there is one
    #[arg(long, value_name = "PROGRAM")]
    pub sqlite: Option<PathBuf>,
    /// Memory that Sheaf may take, instead of a quarter and at most 1 GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub cache_size: Option<u64>,
    #[command(flatten)]
    pub common: BenchOptions,
}

/// What `--shape` takes.
fn shapes() -> String {
    let all = bench::tx::SHAPES.map(|(writes, files)| format!("{writes}/{files}"));
    let all = all.join(",");
    format!("Transactions, as WRITES/FILES separated by commas, instead of {all}; or none")
}

/// Writes and files of a transaction, or no transaction.
fn shape(text: &str) -> Result<Option<(usize, usize)>, String> {
    if text == "none" {
        return Ok(None);
    }
    let parts = text.split_once('/');
    let shape = parts.and_then(|(writes, files)| Some((writes.parse().ok()?, files.parse().ok()?)));
    match shape {
        Some(shape) => Ok(Some(shape)),
        None => Err("give WRITES/FILES, as 8/2".to_owned()),
    }
}

/// The array beside its devices: random 4 KiB transfers by io_uring, by Linux AIO, through Sheaf and through file systems of the kernel
///
/// On 1, 2, 4 and 8 loop devices over files in memory, or other numbers up to 16, in turn, with as many transfers in flight on each as --depth says, and one at a
/// time. File systems of the kernel have a large file on the same devices, past the cache. Needs root, but for --dir without --loop and for
/// --latency, where they are left out.
#[derive(Args, Debug)]
#[command(mut_arg("against", |arg| arg.help(ON_LOOPS)))]
pub struct BenchArray {
    /// Numbers of devices, 1 to 16, separated by commas, instead of 1,2,4,8 or up to those that are given
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub devices: Vec<usize>,
    /// Transfers in flight on each device
    #[arg(long, value_name = "COUNT", default_value_t = 32)]
    pub depth: usize,
    /// Threads that share them
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    pub threads: usize,
    /// Time of one measurement
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    pub seconds: f64,
    /// How often each side runs; the median counts
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    pub runs: usize,
    /// Size of each device; half of it is used. Where XFS or btrfs take part devices are larger, up to 320M or twice as large
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "128M")]
    pub size: u64,
    /// File systems of the kernel, separated by commas
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub against: Vec<String>,
    /// Measure on devices of this process instead that take so many microseconds for a transfer and serve --depth of
    /// them at a time
    #[arg(long, value_name = "MICROSECONDS", conflicts_with_all = ["dir", "device", "on_loop"])]
    pub latency: Option<u64>,
    /// How Sheaf waits for devices: interrupt, poll or lazy
    #[arg(long, value_name = "POLICY", default_value = "interrupt", value_parser = reaping)]
    pub reap: Reaping,
    /// Use files in a new folder in this one, without loop devices
    #[arg(long, value_name = "FOLDER", conflicts_with = "device")]
    pub dir: Option<PathBuf>,
    /// Have loop devices over the files of --dir
    #[arg(long = "loop", requires = "dir")]
    pub on_loop: bool,
    /// Use these block devices, which must hold nothing known and be used by nobody; all content is lost
    #[arg(long, value_name = "DEVICE", num_args = 1..)]
    pub device: Vec<PathBuf>,
    /// Memory that Sheaf may take, instead of a quarter and at most 1 GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub cache_size: Option<u64>,
    #[command(flatten)]
    pub output: BenchOutput,
}

/// Large files read and written by many threads, as IOR does it: one shared file, or one for each thread
///
/// By Sheaf in this process, by ext4 and XFS on one device, by btrfs as RAID-0 on all of them (plain calls, past the cache, and
/// past it by Linux AIO), and by io_uring on the devices themselves, in turn. Needs root unless --against is none.
#[derive(Args, Debug)]
#[command(mut_arg("against", |arg| arg.help(WITH_RAID)))]
pub struct BenchIor {
    /// Files, separated by commas: shared (each thread has a part of one), strided (the threads take requests of one in
    /// turn), apart
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "shared,apart"
    )]
    pub layout: Vec<String>,
    /// Places, separated by commas: random, sequential
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "random,sequential"
    )]
    pub access: Vec<String>,
    /// How the sides are asked, separated by commas: buffered, direct, aio, aio-buffered (through the cache, with several requests in flight)
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "buffered,direct,aio"
    )]
    pub way: Vec<String>,
    /// Sizes of requests, separated by commas, from 512 to 16M, instead of 4K at random places and 1M one after the other
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = size::parse)]
    pub request: Vec<u64>,
    /// Numbers of threads, separated by commas
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "2")]
    pub threads: Vec<usize>,
    /// Number of devices, unless they are given
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 4,
        conflicts_with = "device"
    )]
    pub devices: usize,
    /// Requests that each thread has in flight by AIO and by io_uring
    #[arg(long, value_name = "COUNT", default_value_t = 32)]
    pub depth: usize,
    /// Size of all files together
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "256M")]
    pub size: u64,
    /// Longest time of one measurement; what goes through a cache ends when all was read or written
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    pub seconds: f64,
    /// Memory that Sheaf may take, instead of a quarter and at most 1 GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub cache_size: Option<u64>,
    #[command(flatten)]
    pub common: BenchOptions,
}

/// Many small files on a mount of Sheaf, beside kernel file systems
///
/// Creates, lists, stats, reads and removes files of 1 KiB in folders of 1,000, with an unmount
/// and a mount after creating them. Needs root.
#[derive(Args, Debug)]
pub struct Files {
    /// How many files
    #[arg(long, default_value_t = 100_000)]
    pub count: u64,
    /// Threads that work at the same time, each in folders of its own
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Mount Sheaf with these options
    #[arg(short = 'o', long = "options", value_name = "OPTIONS")]
    pub options: Vec<String>,
    #[command(flatten)]
    pub common: BenchOptions,
}

/// Small writes made durable, beside what the device charges for a write and a flush
///
/// Overwrites with and without a look at the file's times, appends of 100 bytes, new files, and overwrites beside a large
/// writer, each synced; by Sheaf in this process, by kernel file systems and on the device itself, in turn on one
/// loop device over a file on a disk. Needs root unless --latency is given.
#[derive(Args, Debug)]
#[command(mut_arg("against", |arg| arg.help(DURABLE)))]
pub struct Fsync {
    /// Workloads, separated by commas, instead of all: overwrite, overwrite-stat, append, create, competing
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub workload: Vec<String>,
    /// Numbers of threads that create, separated by commas
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,2,8,32"
    )]
    pub threads: Vec<usize>,
    #[command(flatten)]
    pub synced: SyncedOptions,
}

/// What overwrites cost that are synced, as times are persisted more or less coarsely
///
/// By Sheaf with times persisted at each sync, after 1 ms, 10 ms and 1 s; beside file systems of the kernel and the
/// device itself, with and without a look at the times between write and sync. --device takes one device. Needs root unless --latency is given.
#[derive(Args, Debug)]
#[command(mut_arg("against", |arg| arg.help(DURABLE)))]
pub struct Mtime {
    #[command(flatten)]
    pub synced: SyncedOptions,
}

/// A mail server: files of one folder made, appended to, read and removed by many threads, each change synced
///
/// Rounds as filebench has them, on a loop device over a file on a disk; beside what their syncs take on the device itself, with no
/// file system. --device takes one device. Needs root unless --latency is given.
#[derive(Args, Debug)]
#[command(mut_arg("against", |arg| arg.help(DURABLE)))]
pub struct Varmail {
    /// Numbers of threads, separated by commas
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,16"
    )]
    pub threads: Vec<usize>,
    #[command(flatten)]
    pub synced: SyncedOptions,
}

/// One folder with many entries: listed and stat'ed
///
/// Makes empty files in one folder of a mount, and lists it with all attributes, cold: after an unmount and a mount. By
/// readdir and stat, and by `ls -lU`, which reads two extended attributes of each file besides. Needs root.
#[derive(Args, Debug)]
pub struct List {
    /// How many files
    #[arg(long, default_value_t = 1_000_000)]
    pub count: u64,
    /// Mount Sheaf with these options
    #[arg(short = 'o', long = "options", value_name = "OPTIONS")]
    pub options: Vec<String>,
    #[command(flatten)]
    pub common: BenchOptions,
}

/// What the page cache finds under a few loads, beside other rules of what leaves it, and what a cached page costs
///
/// Found: reads of each hundred whose page is cached, by counting, without any time. Cost: pages of one file that is cached
/// whole, read and overwritten by Sheaf in this process and by kernel file systems. Steady: overwrites at random places of a file much
/// larger than the cache, on devices of this process that take a set time for each request, one of which stalls half of the time; through
/// the cache, with pre-cleaning and without, and past it. Their data is in memory or in --dir, with --device and --loop, too. Needs root unless --against is none.
#[derive(Args, Debug)]
#[command(mut_arg("against", |arg| arg.help(EXT4)))]
pub struct BenchCache {
    /// What is measured, of found, cost and steady, separated by commas
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "found,cost,steady"
    )]
    pub parts: Vec<String>,
    /// Pages that the cache holds where it is counted what it finds, from 256 to 4194304
    #[arg(long, value_name = "COUNT", default_value_t = 16_384)]
    pub pages: u64,
    /// Size of the file that is cached whole
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "256M")]
    pub set: u64,
    /// Numbers of threads, separated by commas
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1,2"
    )]
    pub threads: Vec<usize>,
    /// Time of one measurement
    #[arg(long, default_value_t = 0.5, allow_negative_numbers = true)]
    pub seconds: f64,
    /// Seconds for which the file that is cached whole is read before anything of it is timed, on each side
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 3.0,
        allow_negative_numbers = true
    )]
    pub warm_up: f64,
    /// Memory that Sheaf may take, instead of a quarter and at most 1 GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub cache_size: Option<u64>,
    #[command(flatten)]
    pub common: BenchOptions,
}

/// Creates and unlinks, spread over all folders, as the number of files grows
///
/// Time, and instructions where the processor counts them, of a pair of an unlink and a create, by one thread of
/// this process. Needs root unless --against is none.
#[derive(Args, Debug)]
pub struct Pool {
    /// Numbers of files there are all the time, separated by commas; up to 10000000 take some GiB
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "10000,100000,1000000"
    )]
    pub live: Vec<u64>,
    /// Pairs that are measured; a tenth as many come before
    #[arg(long, value_name = "COUNT", default_value_t = 300_000)]
    pub pairs: u64,
    /// Files in a folder
    #[arg(long, value_name = "COUNT", default_value_t = 100)]
    pub per_folder: u64,
    /// Memory that Sheaf may take, instead of a quarter and at most 1 GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub cache_size: Option<u64>,
    #[command(flatten)]
    pub common: BenchOptions,
}

/// How long a file system takes to open that was cut off with a full journal
///
/// Files are made, and unlinked once there are enough, until so much is logged, without a checkpoint. Sheaf in this process, on
/// image files. Needs no root.
#[derive(Args, Debug)]
pub struct BenchRecovery {
    /// Bytes that the journal holds
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "1G")]
    pub journal_size: u64,
    /// Files there are then, about
    #[arg(long, value_name = "COUNT", default_value_t = 200_000)]
    pub files: u64,
    /// Threads that make files
    #[arg(long, value_name = "COUNT", default_value_t = 2)]
    pub threads: usize,
    /// How often; the median counts
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    pub runs: usize,
    /// Memory that Sheaf may take
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "4G")]
    pub cache_size: u64,
    /// Put image files in a new folder in this one, instead of in memory
    #[arg(long, value_name = "FOLDER")]
    pub dir: Option<PathBuf>,
    #[command(flatten)]
    pub output: BenchOutput,
}

/// A tree of many files removed: by Sheaf in this process in parallel, elsewhere by `rm -rf`
///
/// The files are empty, in folders of 1,000. Needs root unless --against is none.
#[derive(Args, Debug)]
pub struct Remove {
    /// How many files
    #[arg(long, default_value_t = 1_000_000)]
    pub count: u64,
    /// Threads that remove at the same time
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Memory that Sheaf may take, instead of a quarter and at most 1 GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub cache_size: Option<u64>,
    #[command(flatten)]
    pub common: BenchOptions,
}

/// Bytes that reach the devices for each created file
///
/// Everything counts, over some checkpoints of Sheaf; a kernel file system makes as many files between two syncs.
/// Needs root unless --against is none.
#[derive(Args, Debug)]
#[command(mut_arg("against", |arg| arg.help(COUNTED)))]
pub struct Written {
    /// Checkpoints of Sheaf that the window takes, 3 to 1000; it makes them when it needs them
    #[arg(long, value_name = "COUNT", default_value_t = 3)]
    pub checkpoints: u64,
    /// Most files for that, and for the first checkpoint, which is not counted
    #[arg(long, value_name = "COUNT", default_value_t = 3_000_000)]
    pub most: u64,
    /// Numbers of files in a folder, separated by commas
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "1000,1000000"
    )]
    pub per_folder: Vec<u64>,
    /// Memory that Sheaf may take, instead of a quarter and at most 1 GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub cache_size: Option<u64>,
    #[command(flatten)]
    pub common: BenchOptions,
}

/// A model of many cores: what operations of Sheaf in this process would do on up to 128
///
/// Records the locks and cache lines that operations touch, replays that on simulated cores, and
/// compares the model with what one and two threads are measured to do, and with a store that has
/// one lock for all. Works in a build that records only: cargo run --release --features trace -- bench
/// scale, in a checkout. Needs no root.
#[derive(Args, Debug)]
pub struct Scale {
    /// Workloads, separated by commas, instead of MWCL, MWUL, MWCM-empty, MWUM, MWRL, MRPL
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub workload: Vec<String>,
    /// Numbers of cores, separated by commas, instead of 1 to 128
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub cores: Vec<usize>,
    /// How often one and two threads are measured, and each number of cores recorded; of the latter the fastest counts
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    pub runs: usize,
    /// Files that each thread has, or makes, when one and two threads are measured
    #[arg(long, value_name = "COUNT", default_value_t = 100_000)]
    pub pool: u64,
    /// Memory that Sheaf may take, instead of a quarter and at most 1 GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub cache_size: Option<u64>,
    /// Put image files in a new folder in this one, instead of in memory
    #[arg(long, value_name = "FOLDER")]
    pub dir: Option<PathBuf>,
    #[command(flatten)]
    pub output: BenchOutput,
}
