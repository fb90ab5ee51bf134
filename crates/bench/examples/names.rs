//! One kind of change of names in a file system in this process, by one thread.
//!
//!     names FOLDER create|stat|path|paths|unlink|rename|write COUNT [CONTROL ACKNOWLEDGE]
//!     names FOLDER create-many|stat-many|unlink-many COUNT [CONTROL ACKNOWLEDGE]
//!
//! As FxMark's MWCL, MWUL and MWRL have it: empty files are made in a directory, or unlinked from
//! it in the order in which they were made, or one file gets a new name again and again; `write`
//! makes files of 4 KiB, those with `-many` take 128 names in one call, `path` looks at a file five levels deep again and
//! again, as MRPL does, and `paths` at any of 32,768 such files, as MRPM does. What is counted ends with a sync of the file system; CONTROL and
//! ACKNOWLEDGE are the pipes of `perf stat --delay=-1 --control fifo:CONTROL,ACKNOWLEDGE`.

use std::error::Error;
use std::fs::{File, OpenOptions as Open};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;

use device::{Array, OpenOptions};
use format::geometry::{Geometry, GeometryOptions};
use fs::{Caller, FileSystem, FsOptions, Ino, MkfsOptions, ROOT};

/// Names of one call for many.
const MANY: usize = 128;

/// Names in a path.
const LEVELS: usize = 5;

/// Names in a directory of a tree.
const BRANCHES: u8 = 8;

const DEVICES: usize = 4;
const MEMORY: usize = 1 << 30;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, what, count, ..] = &arguments[..] else {
        return Err("names FOLDER CHANGE COUNT; see its source".into());
    };
    let count: u64 = count.parse()?;
    let mut gate = Gate::open(arguments.get(3), arguments.get(4))?;
    let fs = make(folder, count, MEMORY)?;
    let who = Caller::root();
    let dir = fs.mkdir(&who, ROOT, b"directory", 0o755)?.ino;
    match what.as_str() {
        "stat" | "stat-many" | "unlink" | "unlink-many" => create(&fs, dir, count, &[])?,
        "rename" => create(&fs, dir, 1, &[])?,
        "path" => {
            let below = |dir, _| Ok::<_, fs::Error>(fs.mkdir(&who, dir, b"0", 0o755)?.ino);
            let last = (2..LEVELS).try_fold(dir, below);
            fs.create(&who, last?, b"0", 0o644, libc::O_RDWR)?;
        }
        "paths" => tree(&fs, ROOT, LEVELS)?,
        _ => {}
    }
    fs.sync()?;

    gate.send("enable")?;
    match what.as_str() {
        "create" => create(&fs, dir, count, &[])?,
        "write" => create(&fs, dir, count, &[7; 4096])?,
        "unlink" => {
            for i in 0..count {
                fs.unlink(&who, dir, &name(i))?;
            }
        }
        "stat" => {
            for i in 0..count {
                fs.lookup(dir, &name(i))?;
            }
        }
        "path" => {
            for _ in 0..count {
                fs.stat_at(ROOT, b"directory/0/0/0/0")?;
            }
        }
        "paths" => {
            let mut rng = base::rng::Rng::new(1);
            for _ in 0..count {
                let mut path = *b"0/0/0/0/0";
                let names = path.iter_mut().step_by(2);
                names.for_each(|name| *name += rng.below(BRANCHES.into()) as u8);
                fs.stat_at(ROOT, &path)?;
            }
        }
        "create-many" => each_many(count, |names| fs.create_many(&who, dir, names, 0o644))?,
        "stat-many" => each_many(count, |names| fs.stat_many(dir, names))?,
        "unlink-many" => each_many(count, |names| fs.unlink_many(&who, dir, names))?,
        "rename" => {
            for i in 0..count {
                fs.rename(&who, dir, &name(i), dir, &name(i + 1), 0)?;
            }
        }
        _ => return Err("unknown kind of change".into()),
    }
    fs.sync()?;
    gate.send("disable")?;
    fs.close()?;
    Ok(())
}

/// A name of a fixed length, made by few instructions: what is counted is the file system.
fn name(mut i: u64) -> [u8; 12] {
    let mut name = *b"file-0000000";
    for digit in name[5..].iter_mut().rev() {
        *digit += (i % 10) as u8;
        i /= 10;
    }
    name
}

/// Makes a tree of so many levels, files at the last.
fn tree(fs: &FileSystem, dir: Ino, levels: usize) -> Result<(), fs::Error> {
    let who = Caller::root();
    for name in (0..BRANCHES).map(|i| [b'0' + i]) {
        match levels {
            1 => drop(fs.create(&who, dir, &name, 0o644, libc::O_RDWR)?),
            _ => tree(fs, fs.mkdir(&who, dir, &name, 0o755)?.ino, levels - 1)?,
        }
    }
    Ok(())
}

/// Hands all names to `call`, [`MANY`] at a time.
fn each_many<T>(
    count: u64,
    call: impl Fn(&[[u8; 12]]) -> Vec<Result<T, fs::Error>>,
) -> Result<(), fs::Error> {
    let names: Vec<[u8; 12]> = (0..count).map(name).collect();
    for names in names.chunks(MANY) {
        call(names)
            .into_iter()
            .try_for_each(|done| done.map(drop))?;
    }
    Ok(())
}

fn create(fs: &FileSystem, dir: Ino, count: u64, content: &[u8]) -> Result<(), fs::Error> {
    let who = Caller::root();
    for i in 0..count {
        let made = fs.create(&who, dir, &name(i), 0o644, libc::O_RDWR)?;
        if !content.is_empty() {
            fs.write(&made.1, 0, content)?;
        }
    }
    Ok(())
}

/// Switches the counting of `perf stat --delay=-1 --control fifo:CONTROL,ACKNOWLEDGE` on and
/// off; does nothing without the two pipes.
struct Gate(Option<(File, File)>);

impl Gate {
    fn open(
        control: Option<&String>,
        acknowledge: Option<&String>,
    ) -> Result<Gate, std::io::Error> {
        Ok(Gate(match (control, acknowledge) {
            (Some(control), Some(acknowledge)) => Some((
                Open::new().write(true).open(control)?,
                File::open(acknowledge)?,
            )),
            _ => None,
        }))
    }

    fn send(&mut self, command: &str) -> Result<(), std::io::Error> {
        let Some((control, acknowledge)) = &mut self.0 else {
            return Ok(());
        };
        writeln!(control, "{command}")?;
        // Five bytes: "ack", a newline, and a zero.
        acknowledge.read_exact(&mut [0; 5])
    }
}

/// A file system on image files in a folder, with room for so many files.
fn make(folder: &str, files: u64, memory: usize) -> Result<Arc<FileSystem>, Box<dyn Error>> {
    let bytes = (files * 1024).next_multiple_of(1 << 20) + (1 << 30);
    let mut paths = Vec::new();
    for i in 0..DEVICES {
        let path = PathBuf::from(folder).join(format!("device-{i}"));
        File::create(&path)?.set_len(bytes)?;
        paths.push(path);
    }
    let devices = device::open_devices(&paths, &OpenOptions::default())?;
    let sizes: Vec<u64> = devices.iter().map(|d| d.bytes()).collect();
    let geometry = Geometry::plan(&sizes, GeometryOptions::default())?;
    let array = Array::create(devices, geometry, "churn", device::new_uuid()?, [7; 16])?;
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
