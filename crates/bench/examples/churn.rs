//! Creates and unlinks spread evenly over all directories of a file system in this process,
//! with a given number of live files: what one pair costs as the number grows.
//!
//!     churn FOLDER LIVE PAIRS [FILES_PER_DIRECTORY [MEMORY_MIB [CONTROL ACKNOWLEDGE]]]
//!
//! A first tenth of the pairs is not measured: it brings the store into the state that the
//! rest keeps. CONTROL and ACKNOWLEDGE are the pipes of `perf stat --delay=-1 --control
//! fifo:CONTROL,ACKNOWLEDGE`, which then counts the measured pairs alone, with what the store's
//! threads do meanwhile and a last checkpoint.

use std::error::Error;
use std::fs::{File, OpenOptions as Open};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;

use base::clock::{Clock, process_cpu_ns};
use base::rng::Rng;
use device::{Array, OpenOptions};
use format::geometry::{Geometry, GeometryOptions};
use fs::{Caller, FileSystem, FsOptions, Ino, MkfsOptions, ROOT};

const DEVICES: usize = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: Option<u64>| -> Result<u64, Box<dyn Error>> {
        match (arguments.get(i), default) {
            (Some(text), _) => Ok(text.parse()?),
            (None, Some(default)) => Ok(default),
            (None, None) => Err("churn FOLDER LIVE PAIRS [...]; see its source".into()),
        }
    };
    let (live, pairs) = (number(1, None)?, number(2, None)?);
    let per_dir = number(3, Some(100))?;
    let memory = number(4, Some(2048))? << 20;
    let mut gate = match (arguments.get(5), arguments.get(6)) {
        (Some(control), Some(acknowledge)) => Some(Gate {
            control: Open::new().write(true).open(control)?,
            acknowledge: File::open(acknowledge)?,
        }),
        _ => None,
    };
    let fs = make(&arguments[0], live, memory as usize)?;
    let mut churn = Churn::fill(&fs, live, per_dir)?;
    fs.sync()?;
    churn.run(pairs / 10)?;
    fs.store().checkpoint()?;

    gate.as_mut().map_or(Ok(()), |gate| gate.send("enable"))?;
    let clock = Clock::real();
    let (begin, cpu) = (clock.monotonic_ns(), process_cpu_ns());
    churn.run(pairs)?;
    fs.store().checkpoint()?;
    let (ns, cpu) = (clock.monotonic_ns() - begin, process_cpu_ns() - cpu);
    gate.as_mut().map_or(Ok(()), |gate| gate.send("disable"))?;

    println!(
        "{live} live files, {per_dir} to a directory: {pairs} pairs, {} ns a pair, {} ns of CPU time",
        ns / pairs,
        cpu / pairs
    );
    fs.close()?;
    Ok(())
}

/// Switches the counting of `perf stat` on and off.
struct Gate {
    control: File,
    acknowledge: File,
}

impl Gate {
    fn send(&mut self, command: &str) -> Result<(), std::io::Error> {
        writeln!(self.control, "{command}")?;
        // Five bytes: "ack", a newline, and a zero.
        self.acknowledge.read_exact(&mut [0; 5])
    }
}

fn make(folder: &str, live: u64, memory: usize) -> Result<Arc<FileSystem>, Box<dyn Error>> {
    let bytes = (live * 1024).next_multiple_of(1 << 20) + (1 << 30);
    let mut paths = Vec::new();
    for i in 0..DEVICES {
        let path = PathBuf::from(folder).join(format!("device-{i}"));
        File::create(&path)?.set_len(bytes)?;
        paths.push(path);
    }
    let devices = device::open_devices(&paths, &OpenOptions::default())?;
    let sizes: Vec<u64> = devices.iter().map(|d| d.bytes()).collect();
    let geometry = Geometry::plan(&sizes, GeometryOptions::default())?;
    let array = Array::create(devices, geometry, "churn", device::new_uuid(), [7; 16])?;
    let array = Arc::new(array);
    FileSystem::mkfs(&array, &MkfsOptions::default())?;
    array.write_labels()?;
    drop(array);
    let opened = device::open_devices(&paths, &OpenOptions::default())?;
    let array = Arc::new(Array::assemble(opened, false)?);
    Ok(FileSystem::open(
        array,
        FsOptions::default().with_memory(memory),
    )?)
}

/// The live files: each place belongs to a directory, and holds a file of some number.
struct Churn<'f> {
    fs: &'f FileSystem,
    directories: Vec<Ino>,
    per_dir: u64,
    places: Vec<u32>,
    next: u32,
    rng: Rng,
}

impl<'f> Churn<'f> {
    fn fill(fs: &'f FileSystem, live: u64, per_dir: u64) -> Result<Self, Box<dyn Error>> {
        let who = Caller::root();
        let mut directories = Vec::new();
        for i in 0..live.div_ceil(per_dir) {
            // A level between keeps the root small.
            let name = format!("{}", i / 1000);
            if i % 1000 == 0 {
                fs.mkdir(&who, ROOT, name.as_bytes(), 0o755)?;
            }
            let above = fs.lookup(ROOT, name.as_bytes())?.ino;
            let made = fs.mkdir(&who, above, format!("{}", i % 1000).as_bytes(), 0o755)?;
            directories.push(made.ino);
        }
        let mut churn = Churn {
            fs,
            directories,
            per_dir,
            places: Vec::new(),
            next: 0,
            rng: Rng::new(1),
        };
        for place in 0..live as usize {
            churn.places.push(0);
            churn.create(place)?;
        }
        Ok(churn)
    }

    fn directory(&self, place: usize) -> Ino {
        self.directories[place / self.per_dir as usize]
    }

    fn create(&mut self, place: usize) -> Result<(), fs::Error> {
        self.next += 1;
        self.places[place] = self.next;
        let (dir, name) = (self.directory(place), format!("file-{}", self.next));
        let who = Caller::root();
        self.fs
            .create(&who, dir, name.as_bytes(), 0o644, libc::O_RDWR)?;
        Ok(())
    }

    /// Unlinks any file, and makes one where the last one was unlinked.
    fn run(&mut self, pairs: u64) -> Result<(), fs::Error> {
        let mut free = None;
        for _ in 0..pairs {
            let place = self.rng.below(self.places.len() as u64) as usize;
            if free == Some(place) {
                continue;
            }
            let name = format!("file-{}", self.places[place]);
            let who = Caller::root();
            self.fs
                .unlink(&who, self.directory(place), name.as_bytes())?;
            if let Some(place) = free.replace(place) {
                self.create(place)?;
            }
        }
        match free {
            Some(place) => self.create(place),
            None => Ok(()),
        }
    }
}
