//! Many small files: created, listed, stat'ed, read and removed on a Sheaf mount and, in the
//! same run and taking turns, on ext4 and XFS on loop devices over files of the same size.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Args;
use rustix::mount::{UnmountFlags, unmount};
use serde::Serialize;

use crate::world::{World, is_mounted};
use crate::{Fallible, packages, process, suites};

const FILES_PER_FOLDER: u64 = 1000;
const CONTENT: [u8; 1024] = [0x5a; 1024];
const LIMIT: Duration = Duration::from_secs(120);
const PHASES: [&str; 6] = ["create", "remount", "list", "stat", "read", "remove"];

#[derive(Args, Clone)]
pub struct BenchArgs {
    /// How many files of 1 KiB
    #[arg(long, default_value_t = 1_000_000)]
    count: u64,
    /// Kernel file systems to compare with
    #[arg(long, value_delimiter = ',', default_value = "ext4,xfs")]
    against: Vec<String>,
    /// Threads that work at the same time, each in folders of its own
    #[arg(long, default_value_t = 2)]
    threads: u64,
    /// How often each side runs
    #[arg(long, default_value_t = 3)]
    runs: u32,
    /// Size of each side's storage in GiB
    #[arg(long, default_value_t = 8)]
    gib: u64,
    /// Use this sheaf binary instead of building one
    #[arg(long, value_name = "FILE")]
    sheaf: Option<PathBuf>,
    /// More mount options for Sheaf
    #[arg(short = 'o', value_name = "OPTIONS")]
    options: Option<String>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    name: &'static str,
    target: String,
    threads: u64,
    unit: &'static str,
    median: f64,
    min: f64,
    max: f64,
    runs: u32,
}

#[derive(Serialize)]
struct Machine {
    cpu: String,
    cores: usize,
    kernel: String,
}

#[derive(Serialize)]
struct Report {
    suite: &'static str,
    version: &'static str,
    machine: Machine,
    count: u64,
    /// The most memory that Sheaf's daemon used in any run, in bytes.
    daemon_peak: u64,
    rows: Vec<Row>,
}

/// One file system that takes part; `None` is Sheaf.
struct Side {
    name: String,
    kernel: Option<String>,
    /// Per phase, the seconds of each run.
    seconds: Vec<Vec<f64>>,
}

pub fn run(args: &BenchArgs) -> Fallible<()> {
    packages::require_mount_rights()?;
    packages::install_packages()?;
    let sheaf = match &args.sheaf {
        Some(path) => path.clone(),
        None => suites::build_release()?,
    };
    let kernels = args.against.iter().map(|name| Some(name.clone()));
    let mut sides: Vec<Side> = std::iter::once(None)
        .chain(kernels)
        .map(|kernel| Side {
            name: kernel.clone().unwrap_or_else(|| "sheaf-mount".to_owned()),
            kernel,
            seconds: vec![Vec::new(); PHASES.len()],
        })
        .collect();
    let mut daemon_peak = 0;
    for run in 0..args.runs {
        for side in &mut sides {
            eprintln!("run {} of {}: {}", run + 1, args.runs, side.name);
            let seconds = match &side.kernel {
                None => on_sheaf(args, &sheaf, &mut daemon_peak)?,
                Some(kernel) => on_kernel(args, kernel)?,
            };
            for (all, one) in side.seconds.iter_mut().zip(seconds) {
                all.push(one);
            }
        }
    }
    print(&report(args, &sides, daemon_peak), args.json)
}

fn on_sheaf(args: &BenchArgs, sheaf: &Path, peak: &mut u64) -> Fallible<Vec<f64>> {
    let mut world = World::new("bench-files", sheaf, args.options.clone(), false)?;
    world.set_sizes(&vec![format!("{}M", args.gib * 256); 4]);
    world.mkfs()?;
    world.mount()?;
    let mnt = world.mnt.clone();
    let mut before = None;
    let result = phases(&mnt, args, || {
        before = world.daemon_peak_bytes();
        world.remount()
    })?;
    *peak = (*peak).max(before.max(world.daemon_peak_bytes()).unwrap_or(0));
    world.umount()?;
    world.discard();
    Ok(result)
}

/// A loop mount that goes away with the value.
struct LoopMount {
    dir: PathBuf,
    image: PathBuf,
    mnt: PathBuf,
}

impl LoopMount {
    fn new(kernel: &str, gib: u64) -> Fallible<Self> {
        let dir = process::work_dir().join(format!("bench-files-{kernel}"));
        let side = LoopMount {
            image: dir.join("image"),
            mnt: dir.join("mnt"),
            dir,
        };
        fs::create_dir_all(&side.mnt).map_err(|e| format!("{}: {e}", side.mnt.display()))?;
        let file = File::create(&side.image).and_then(|f| f.set_len(gib << 30));
        file.map_err(|e| format!("{}: {e}", side.image.display()))?;
        let mut mkfs = Command::new(format!("mkfs.{kernel}"));
        mkfs.arg("-q");
        if kernel == "ext4" {
            // As many inodes as files are wanted, and no work left for after the mount.
            mkfs.args(["-F", "-i", "2048", "-E", "lazy_itable_init=0"]);
        }
        mkfs.arg(&side.image);
        process::run("bench-mkfs", &mut mkfs, LIMIT)?.check("mkfs")?;
        side.mount()?;
        Ok(side)
    }

    fn mount(&self) -> Fallible<()> {
        let mut losetup = Command::new("mount");
        losetup.args(["-o", "loop"]).arg(&self.image).arg(&self.mnt);
        process::run("bench-mount", &mut losetup, LIMIT)?.check("mount")
    }

    fn remount(&self) -> Fallible<()> {
        unmount(&self.mnt, UnmountFlags::empty()).map_err(|e| format!("umount: {e}"))?;
        self.mount()
    }
}

impl Drop for LoopMount {
    fn drop(&mut self) {
        if is_mounted(&self.mnt)
            && let Err(error) = unmount(&self.mnt, UnmountFlags::DETACH)
        {
            eprintln!("xtask: cannot unmount {}: {error}", self.mnt.display());
        }
        // The next run makes it anew.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn on_kernel(args: &BenchArgs, kernel: &str) -> Fallible<Vec<f64>> {
    let side = LoopMount::new(kernel, args.gib)?;
    phases(&side.mnt, args, || side.remount())
}

/// Runs the phases with `remount` between writing and reading: it brings everything to the
/// devices, on image files too, where sync(2) does not reach a FUSE daemon, and makes reads cold.
fn phases(
    mnt: &Path,
    args: &BenchArgs,
    remount: impl FnOnce() -> Fallible<()>,
) -> Fallible<Vec<f64>> {
    let folders = args.count.div_ceil(FILES_PER_FOLDER);
    let mut seconds = Vec::new();
    let mut timed = |body: &(dyn Fn(&Path) -> std::io::Result<u64> + Sync)| {
        let start = Instant::now();
        let files = in_folders(mnt, folders, args.threads, body)?;
        seconds.push(start.elapsed().as_secs_f64());
        match files == folders * FILES_PER_FOLDER {
            true => Ok(()),
            false => Err(format!("{files} files instead of {}", args.count)),
        }
    };
    timed(&create)?;
    let start = Instant::now();
    remount()?;
    let remounted = start.elapsed().as_secs_f64();
    timed(&list)?;
    timed(&stat)?;
    timed(&read)?;
    timed(&remove)?;
    seconds.insert(1, remounted);
    Ok(seconds)
}

/// Calls `body` for every folder, from `threads` threads; sums the files it reports.
fn in_folders(
    mnt: &Path,
    folders: u64,
    threads: u64,
    body: &(dyn Fn(&Path) -> std::io::Result<u64> + Sync),
) -> Fallible<u64> {
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|thread| {
                scope.spawn(move || {
                    let mut files = 0;
                    for folder in (thread..folders).step_by(threads as usize) {
                        if process::interrupted() {
                            return Err("interrupted".to_owned());
                        }
                        let dir = mnt.join(format!("{folder:06}"));
                        files += body(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
                    }
                    Ok(files)
                })
            })
            .collect();
        running
            .into_iter()
            .map(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?)
            .sum()
    })
}

fn names(dir: &Path) -> impl Iterator<Item = PathBuf> {
    (0..FILES_PER_FOLDER).map(move |i| dir.join(format!("file{i:03}")))
}

fn create(dir: &Path) -> std::io::Result<u64> {
    fs::create_dir(dir)?;
    for path in names(dir) {
        File::create_new(path)?.write_all(&CONTENT)?;
    }
    Ok(FILES_PER_FOLDER)
}

fn list(dir: &Path) -> std::io::Result<u64> {
    fs::read_dir(dir)?.try_fold(0, |sum, entry| entry.map(|_| sum + 1))
}

fn stat(dir: &Path) -> std::io::Result<u64> {
    let mut found = 0;
    for path in names(dir) {
        found += u64::from(fs::symlink_metadata(path)?.size() == CONTENT.len() as u64);
    }
    Ok(found)
}

fn read(dir: &Path) -> std::io::Result<u64> {
    let mut found = 0;
    for path in names(dir) {
        found += u64::from(fs::read(path)? == CONTENT);
    }
    Ok(found)
}

fn remove(dir: &Path) -> std::io::Result<u64> {
    for path in names(dir) {
        fs::remove_file(path)?;
    }
    fs::remove_dir(dir)?;
    Ok(FILES_PER_FOLDER)
}

fn report(args: &BenchArgs, sides: &[Side], daemon_peak: u64) -> Report {
    let mut rows = Vec::new();
    for (phase, name) in PHASES.iter().enumerate() {
        for side in sides {
            let mut rates: Vec<f64> = side.seconds[phase]
                .iter()
                .map(|seconds| args.count as f64 / seconds.max(1e-6))
                .collect();
            rates.sort_by(f64::total_cmp);
            rows.push(Row {
                name,
                target: side.name.clone(),
                threads: args.threads,
                unit: "files/s",
                median: rates[rates.len() / 2],
                min: rates[0],
                max: rates[rates.len() - 1],
                runs: args.runs,
            });
        }
    }
    Report {
        suite: "files",
        version: env!("CARGO_PKG_VERSION"),
        machine: machine(),
        count: args.count,
        daemon_peak,
        rows,
    }
}

fn machine() -> Machine {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == "model name").then(|| value.trim().to_owned())
    });
    Machine {
        cpu: model.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
        cores: std::thread::available_parallelism().map_or(1, |n| n.get()),
        kernel: rustix::system::uname()
            .release()
            .to_string_lossy()
            .into_owned(),
    }
}

fn print(report: &Report, json: bool) -> Fallible<()> {
    if json {
        let text = serde_json::to_string_pretty(report).map_err(|e| e.to_string())?;
        println!("{text}");
        return Ok(());
    }
    let machine = &report.machine;
    println!(
        "{} files of 1 KiB; {}, {} cores, Linux {}; daemon's peak memory {} MiB",
        report.count,
        machine.cpu,
        machine.cores,
        machine.kernel,
        report.daemon_peak >> 20
    );
    println!("\n| phase | file system | files/s, median | min | max |\n|---|---|---:|---:|---:|");
    for row in &report.rows {
        println!(
            "| {} | {} | {:.0} | {:.0} | {:.0} |",
            row.name, row.target, row.median, row.min, row.max
        );
    }
    Ok(())
}
