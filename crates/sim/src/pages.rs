//! Several threads overwrite and read the pages of one file, in an order that a seed decides: of a few pages that stay cached, or
//! of more than the cache holds, so that frames go from one page to another while somebody copies out of them.
//!
//! Each page always consists of one pair of bytes, over and over: its number, and how often anything was written. So whoever
//! reads knows that it has one page, as it was at one moment. After that everything is home, and `fsck` finds nothing.

use crate::world::{Image, Machine, Shape};
use base::rng::Rng;
use base::{sched, thread};
use format::BLOCK_SIZE;
use fs::{Caller, Error, FileSystem, OpenFile, ROOT};

const TASKS: usize = 3;
/// Operations of each thread.
const STEPS: u64 = 60;
/// Pages that the cache holds.
const FRAMES: usize = 32;
/// Pages of the file.
const PAGES: [u64; 2] = [2, 48];

/// One run; an error says what was not as it must be.
pub fn run(seed: u64) -> Result<(), String> {
    let mut shape = Shape::small(1);
    shape.options.store.shards = 2;
    shape.options.data.cache_bytes = FRAMES * BLOCK_SIZE;
    let machine = Machine::new(&Image::format(&shape)?, seed);
    let text = |error: Error| error.to_string();
    sched::run("pages", seed, &machine.clock, || {
        let fs = machine.open().map_err(text)?;
        let mode = libc::S_IFREG | 0o644;
        let made = fs.mknod(&Caller::root(), ROOT, b"pages", mode, 0);
        let file = fs.open_file(made.map_err(text)?.ino, libc::O_RDWR);
        let file = file.map_err(text)?;
        let pages = *Rng::new(seed).pick(&PAGES);
        for page in 0..pages {
            write(&fs, &file, page, 0).map_err(text)?;
        }
        fs.sync().map_err(text)?;
        let worked = thread::parallel(TASKS, |me| {
            let mut rng = Rng::new(seed ^ (me as u64 + 1));
            (0..STEPS).try_for_each(|step| work(&fs, &file, &mut rng, (pages, step)))
        });
        worked.into_iter().collect::<Result<(), String>>()?;
        drop(file);
        fs.close().map_err(text)
    })?;
    machine.fsck()
}

fn work(
    fs: &FileSystem,
    file: &OpenFile,
    rng: &mut Rng,
    (pages, step): (u64, u64),
) -> Result<(), String> {
    let page = rng.below(pages);
    let done = match rng.below(20) {
        0 => fs.tick(),
        1 => fs.fsync(file, true),
        2..=9 => write(fs, file, page, step as u8),
        _ => return read(fs, file, page, 1 + rng.below(2)),
    };
    done.map_err(|error| error.to_string())
}

fn write(fs: &FileSystem, file: &OpenFile, page: u64, what: u8) -> Result<(), Error> {
    let content = [page as u8, what].repeat(BLOCK_SIZE / 2);
    fs.write(file, page * BLOCK_SIZE as u64, &content).map(drop)
}

fn read(fs: &FileSystem, file: &OpenFile, page: u64, most: u64) -> Result<(), String> {
    let mut bytes = vec![0; most as usize * BLOCK_SIZE];
    let len = fs.read(file, page * BLOCK_SIZE as u64, &mut bytes);
    let len = len.map_err(|error| error.to_string())?;
    for (number, content) in (page..).zip(bytes[..len].chunks(BLOCK_SIZE)) {
        if content.chunks(2).any(|pair| *pair != content[..2]) {
            return Err(format!("page {number} has parts of two writes"));
        }
        if content[0] != number as u8 {
            return Err(format!(
                "page {number} has what was written to page {}",
                content[0]
            ));
        }
    }
    Ok(())
}
