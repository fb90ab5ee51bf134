//! `sheaf bench`: turns options into those of a suite, and its report into text, JSON or HTML.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bench::contract::Report;
use bench::target::{self, Storage, Target};
use bench::{
    array, cache, checkpoint, files, fsync, fxmark, ior, list, pool, reap, recovery, remove, scale,
    tx, written,
};
use device::Latency;

use crate::args::Written;
use crate::args::{
    Bench, BenchArray, BenchCache, BenchCheckpoint, BenchIor, BenchOptions, BenchOutput, BenchReap,
    BenchRecovery, BenchTx, Files, Fsync, Fxmark, List, Mtime, Pool, Remove, Scale, Suite,
    SyncedOptions, Varmail,
};
use crate::failure::{Failure, Outcome};
use crate::{mount_command, output, progress, spared};

pub fn run(args: &Bench) -> Outcome {
    match &args.suite {
        Suite::Fxmark(args) => fxmark(args),
        Suite::Array(args) => array(args),
        Suite::Checkpoint(args) => checkpoint(args),
        Suite::Files(args) => files(args),
        Suite::Fsync(args) => fsync(args),
        Suite::Ior(args) => ior(args),
        Suite::List(args) => list(args),
        Suite::Mtime(args) => mtime(args),
        Suite::Cache(args) => page_cache(args),
        Suite::Pool(args) => pool(args),
        Suite::Reap(args) => reap(args),
        Suite::Recovery(args) => recovery(args),
        Suite::Remove(args) => remove(args),
        Suite::Scale(args) => scale(args),
        Suite::Tx(args) => tx(args),
        Suite::Varmail(args) => varmail(args),
        Suite::Written(args) => written(args),
    }
}

fn fxmark(args: &Fxmark) -> Outcome {
    let threads = match args.threads.is_empty() {
        true => target::default_threads(),
        false => args.threads.clone(),
    };
    let options = fxmark::Options {
        workloads: fxmark::select(&args.workload)?,
        threads,
        time: seconds(args.seconds)?,
        runs: args.common.runs,
        pools: args.pool.clone(),
        operations: args.operations,
        against: against(&args.common.against, &target::AGAINST)?,
        storage: storage(&args.common),
        sheaf: this_program()?,
        memory: memory(args.cache_size)?,
        relative: args.relative,
    };
    show(&args.common.output, |tell| Ok(fxmark::run(&options, tell)?))
}

fn array(args: &BenchArray) -> Outcome {
    let devices = match args.devices.is_empty() {
        true => array::default_devices(args.device.len()),
        false => args.devices.clone(),
    };
    let count = devices.iter().copied().max().unwrap_or(1) as u64;
    // Nobody else can be on files themselves or devices of this process; names that the user gave are told to be left out.
    let files = args.dir.is_some() && !args.on_loop;
    let default: &[&str] = match args.latency.is_some() || files {
        true => &[],
        false => &array::AGAINST,
    };
    let options = array::Options {
        devices,
        depth: args.depth,
        threads: args.threads,
        time: seconds(args.seconds)?,
        runs: args.runs,
        bytes: args.size,
        against: against(&args.against, default)?,
        storage: match (&args.dir, args.on_loop) {
            _ if !args.device.is_empty() => Storage::Devices(args.device.clone()),
            (Some(dir), false) => Storage::Dir(dir.clone()),
            (dir, _) => Storage::Loops(dir.clone(), count),
        },
        latency: args.latency.map(Duration::from_micros),
        reap: args.reap,
        memory: memory(args.cache_size)?,
    };
    show(&args.output, |tell| Ok(array::run(&options, tell)?))
}

fn checkpoint(args: &BenchCheckpoint) -> Outcome {
    let options = checkpoint::Options {
        workers: args.workers.clone(),
        threads: args.threads,
        journal: args.journal_size,
        devices: args.devices,
        latency: Latency {
            service: Duration::from_micros(args.latency),
            flush: Duration::from_micros(args.flush),
            depth: args.depth,
        },
        runs: args.runs,
        against: match args.against.is_empty() {
            true => None,
            false => Some(target::parse_against(&args.against)?),
        },
        storage: match &args.dir {
            Some(dir) => Storage::Dir(dir.clone()),
            None => Storage::Memory,
        },
        memory: memory(Some(args.cache_size))?,
    };
    let suite = |tell: &dyn Fn(&str)| Ok(checkpoint::run(&options, tell)?);
    show(&args.output, suite)
}

fn files(args: &Files) -> Outcome {
    let options = files::Options {
        count: args.count,
        threads: args.threads,
        runs: args.common.runs,
        against: against(&args.common.against, &target::AGAINST)?,
        storage: storage(&args.common).shared(),
        sheaf: this_program()?,
        options: args.options.clone(),
    };
    show(&args.common.output, |tell| Ok(files::run(&options, tell)?))
}

fn fsync(args: &Fsync) -> Outcome {
    let options = fsync::Options {
        kinds: fsync::select(&args.workload)?,
        threads: args.threads.clone(),
        ..synced(&args.synced)?
    };
    show(&args.synced.common.output, |tell| {
        Ok(fsync::run(&options, tell)?)
    })
}

fn varmail(args: &Varmail) -> Outcome {
    let options = fsync::Options {
        threads: args.threads.clone(),
        ..synced(&args.synced)?
    };
    show(&args.synced.common.output, |tell| {
        Ok(fsync::run_varmail(&options, tell)?)
    })
}

fn mtime(args: &Mtime) -> Outcome {
    let options = synced(&args.synced)?;
    show(&args.synced.common.output, |tell| {
        Ok(fsync::run_mtime(&options, tell)?)
    })
}

/// Options of suites about small writes that are synced.
fn synced(args: &SyncedOptions) -> Result<fsync::Options, Failure> {
    let common = &args.common;
    // Nobody else can be on devices of this process; the names that the user gave are looked at, and told to be left out.
    let default: &[&str] = match args.latency {
        Some(_) => &[],
        None => &fsync::AGAINST,
    };
    Ok(fsync::Options {
        kinds: Vec::new(),
        threads: vec![1],
        time: seconds(args.seconds)?,
        runs: common.runs,
        against: against(&common.against, default)?,
        storage: storage(common),
        slow: args.latency.map(|service| {
            let latency = Latency {
                service: Duration::from_micros(service),
                flush: Duration::from_micros(args.flush.unwrap_or(service)),
                depth: args.depth,
            };
            (latency, args.devices)
        }),
        reap: args.reap,
        memory: memory(args.cache_size)?,
    })
}

fn ior(args: &BenchIor) -> Outcome {
    let against = against(&args.common.against, &ior::AGAINST)?;
    let devices = match args.common.device.len() {
        0 => args.devices,
        given => given,
    };
    let options = ior::Options {
        layouts: ior::select_layouts(&args.layout)?,
        accesses: ior::select_accesses(&args.access)?,
        ways: ior::select_ways(&args.way)?,
        requests: args.request.clone(),
        threads: args.threads.clone(),
        devices,
        depth: args.depth,
        bytes: args.size,
        time: seconds(args.seconds)?,
        runs: args.common.runs,
        storage: match storage(&args.common) {
            // File systems of the kernel share block devices with Sheaf.
            Storage::Loop(dir) => Storage::Loops(dir, devices as u64),
            Storage::Dir(dir) if !against.is_empty() => Storage::Loops(Some(dir), devices as u64),
            Storage::Memory if !against.is_empty() => Storage::Loops(None, devices as u64),
            other => other,
        },
        against,
        memory: memory(args.cache_size)?,
    };
    show(&args.common.output, |tell| Ok(ior::run(&options, tell)?))
}

fn list(args: &List) -> Outcome {
    let options = list::Options {
        count: args.count,
        runs: args.common.runs,
        against: against(&args.common.against, &target::AGAINST)?,
        storage: storage(&args.common).shared(),
        sheaf: this_program()?,
        options: args.options.clone(),
    };
    show(&args.common.output, |tell| Ok(list::run(&options, tell)?))
}

fn page_cache(args: &BenchCache) -> Outcome {
    let options = cache::Options {
        parts: cache::Part::select(&args.parts)?,
        pages: args.pages,
        set: args.set,
        threads: args.threads.clone(),
        time: seconds(args.seconds)?,
        warm_up: seconds(args.warm_up)?,
        runs: args.common.runs,
        against: against(&args.common.against, &["ext4"])?,
        storage: storage(&args.common),
        memory: memory(args.cache_size)?,
    };
    show(&args.common.output, |tell| Ok(cache::run(&options, tell)?))
}

fn pool(args: &Pool) -> Outcome {
    let options = pool::Options {
        live: args.live.clone(),
        pairs: args.pairs,
        per_dir: args.per_folder,
        runs: args.common.runs,
        against: against(&args.common.against, &target::AGAINST)?,
        storage: storage(&args.common),
        memory: memory(args.cache_size)?,
    };
    show(&args.common.output, |tell| Ok(pool::run(&options, tell)?))
}

fn reap(args: &BenchReap) -> Outcome {
    let options = reap::Options {
        parts: reap::Part::select(&args.parts, args.dir.is_some(), args.device.is_some())?,
        time: seconds(args.seconds)?,
        runs: args.runs,
        dir: args.dir.clone(),
        device: args.device.clone(),
        depths: args.depth.clone(),
        overwrite: args.overwrite,
    };
    show(&args.output, |tell| Ok(reap::run(&options, tell)?))
}

fn recovery(args: &BenchRecovery) -> Outcome {
    let options = recovery::Options {
        journal: args.journal_size,
        files: args.files,
        threads: args.threads,
        runs: args.runs,
        storage: match &args.dir {
            Some(dir) => Storage::Dir(dir.clone()),
            None => Storage::Memory,
        },
        memory: memory(Some(args.cache_size))?,
    };
    let suite = |tell: &dyn Fn(&str)| Ok(recovery::run(&options, tell)?);
    show(&args.output, suite)
}

fn remove(args: &Remove) -> Outcome {
    let options = remove::Options {
        count: args.count,
        threads: args.threads,
        runs: args.common.runs,
        against: against(&args.common.against, &target::AGAINST)?,
        storage: storage(&args.common),
        memory: memory(args.cache_size)?,
    };
    show(&args.common.output, |tell| Ok(remove::run(&options, tell)?))
}

fn written(args: &Written) -> Outcome {
    let options = written::Options {
        checkpoints: args.checkpoints,
        most: args.most,
        per_folder: args.per_folder.clone(),
        runs: args.common.runs,
        against: against(&args.common.against, &target::AGAINST)?,
        storage: storage(&args.common),
        memory: memory(args.cache_size)?,
    };
    show(&args.common.output, |tell| {
        Ok(written::run(&options, tell)?)
    })
}

/// Memory for Sheaf in this process, by default what a mount takes; the allocator is one that suits it.
fn memory(asked: Option<u64>) -> Result<usize, Failure> {
    let bytes = asked.unwrap_or_else(mount_command::default_memory);
    mount_command::check_memory(bytes).map_err(|failure| failure.at("--cache-size"))?;
    heap::suit(bytes as usize);
    Ok(bytes as usize)
}

fn scale(args: &Scale) -> Outcome {
    let options = scale::Options {
        workloads: scale::select(&args.workload)?,
        cores: match args.cores.is_empty() {
            true => scale::default_cores(),
            false => args.cores.clone(),
        },
        runs: args.runs,
        pool: args.pool,
        storage: match &args.dir {
            Some(dir) => Storage::Dir(dir.clone()),
            None => Storage::Memory,
        },
        memory: memory(args.cache_size)?,
    };
    show(&args.output, |tell| Ok(scale::run(&options, tell)?))
}

fn tx(args: &BenchTx) -> Outcome {
    let sheaf = this_program()?;
    let options = tx::Options {
        shapes: match args.shape.is_empty() {
            true => tx::SHAPES.to_vec(),
            false => args.shape.iter().copied().flatten().collect(),
        },
        time: seconds(args.seconds)?,
        runs: args.common.runs,
        against: against(&args.common.against, &target::AGAINST)?,
        storage: storage(&args.common),
        sqlite: args
            .sqlite
            .clone()
            .or_else(|| beside(&sheaf, "sheaf-sqlite")),
        sheaf,
        memory: memory(args.cache_size)?,
    };
    show(&args.common.output, |tell| Ok(tx::run(&options, tell)?))
}

fn seconds(seconds: f64) -> Result<Duration, Failure> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| Failure::usage(format!("{seconds} is no number of seconds")))
}

/// Whom the user wants to compare with, or these.
fn against(names: &[String], default: &[&str]) -> Result<Vec<Target>, Failure> {
    let default = || default.iter().map(|&name| name.to_owned()).collect();
    let names: Vec<String> = match names.is_empty() {
        true => default(),
        false => names.to_vec(),
    };
    Ok(target::parse_against(&names)?)
}

fn storage(options: &BenchOptions) -> Storage {
    let storage = match (&options.dir, options.device.is_empty()) {
        (Some(dir), _) => Storage::Dir(dir.clone()),
        (None, false) => Storage::Devices(options.device.clone()),
        (None, true) => Storage::Memory,
    };
    match options.on_loop {
        true => storage.shared(),
        false => storage,
    }
}

/// To mount with the same program that measures.
fn this_program() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(|e| Failure::io("the path of this program", &e))
}

/// A program in the same folder as this one, if it is there.
fn beside(program: &Path, name: &str) -> Option<PathBuf> {
    let other = program.with_file_name(name);
    other.is_file().then_some(other)
}

/// Runs a suite, saying on a terminal what it is at, and shows what it reports.
fn show(
    options: &BenchOutput,
    suite: impl FnOnce(&dyn Fn(&str)) -> Result<Report, Failure>,
) -> Outcome {
    let page = options.html.as_deref().map(Page::open).transpose()?;
    let load = bench::contract::load_average();
    let spinner = progress::bar("", 0);
    let report = suite(&|text| {
        spinner.set_message(text.to_owned());
        spinner.inc(1);
    });
    spinner.finish_and_clear();
    let arguments = std::env::args_os().skip(1);
    let arguments = arguments.map(|argument| argument.to_string_lossy().into_owned());
    let report = report?.called(arguments.collect(), load);
    let written = match page {
        Some(page) => page.write(&bench::html::render(&report)),
        None => Ok(()),
    };
    // What was measured is shown in any case; but of two JSON objects nobody could read one.
    match options.json {
        true => written.and_then(|()| output::json(&report))?,
        false => output::print(bench::text::render(&report)).and(written)?,
    }
    Ok(0)
}

/// The file that a report with plots goes to. It is opened before anything is measured, keeps what it has until there is
/// a report, and goes again if it was made in vain.
struct Page {
    path: PathBuf,
    file: File,
    made: bool,
}

impl Page {
    fn open(path: &Path) -> Result<Page, Failure> {
        spared::check("--html", path)?;
        let made = File::options().write(true).create_new(true).open(path);
        let (file, made) = match made {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => (
                File::options()
                    .write(true)
                    .create(true)
                    .truncate(false)
                    .open(path),
                false,
            ),
            made => (made, true),
        };
        let file = file.map_err(|e| Failure::io(format!("--html {}", path.display()), &e))?;
        Ok(Page {
            path: path.to_owned(),
            file,
            made,
        })
    }

    fn write(mut self, text: &str) -> Result<(), Failure> {
        let mut write = || {
            if self.file.metadata()?.is_file() {
                self.file.set_len(0)?;
            }
            self.file.write_all(text.as_bytes())
        };
        write().map_err(|e| Failure::io(self.path.display(), &e))?;
        self.made = false;
        Ok(())
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        if self.made
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!("{}: not removed: {error}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_beside_this_one_is_found_if_it_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let sheaf = folder.path().join("sheaf");
        assert_eq!(beside(&sheaf, "sheaf-sqlite"), None);
        let other = folder.path().join("sheaf-sqlite");
        std::fs::create_dir(&other).unwrap();
        assert_eq!(beside(&sheaf, "sheaf-sqlite"), None);
        std::fs::remove_dir(&other).unwrap();
        std::fs::write(&other, "").unwrap();
        assert_eq!(beside(&sheaf, "sheaf-sqlite"), Some(other));
    }
}
