//! Files that are cut while writes of theirs are in flight, and nobody asks for these; then their blocks are another file's.
//!
//! Nobody finds in a file what was written to another; at the end the power goes, and `fsck` finds nothing.

use crate::world::{Image, Machine, Shape};
use base::rng::Rng;
use device::AlignedBuf;
use device::sim::Survival;
use format::BLOCK_SIZE;
use fs::{Caller, Error, FileSystem, Ino, IoContext, ROOT, Request};
use std::sync::Arc;

/// Of the file that is cut, in pages.
const PAGES: u64 = 400;
const ROUNDS: u64 = 4;
const CUT: u8 = 0xC0;
const FLOWN: u8 = 0xF1;
const OTHER: u8 = 0x0F;
const DIRECT: i32 = libc::O_RDWR | libc::O_DIRECT;

/// One run; an error says what was not as it must be.
pub fn run(seed: u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let shape = Shape::small(rng.range(1, 3));
    let machine = Machine::new(&Image::format(&shape)?, seed);
    let fs = machine.open().map_err(text)?;
    let mut contexts = [(); 2].map(|()| fs.io_context(PAGES as u32));
    for round in 0..ROUNDS {
        let [first, second] = &mut contexts;
        let context = if rng.one_in(2) { first } else { second };
        let context = context.as_mut().map_err(|error| error.to_string())?;
        let cut = make(&fs, &format!("cut{round}"))?;
        fill(&fs, cut, PAGES, CUT)?;
        fly(&fs, cut, context, &mut rng).map_err(text)?;
        let size = rng.below(PAGES) * BLOCK_SIZE as u64;
        fs.truncate(&Caller::root(), cut, size).map_err(text)?;
        fs.sync().map_err(text)?;
        let other = make(&fs, &format!("other{round}"))?;
        fill(&fs, other, u64::MAX, OTHER)?;
        let mut done = Vec::new();
        context.wait(usize::MAX, &mut done, None);
        for done in done {
            done.result.map_err(text)?;
        }
        look(&fs, cut, FLOWN)?;
        look(&fs, other, OTHER)?;
        if round + 1 < ROUNDS {
            let name = format!("other{round}");
            let gone = fs.unlink(&Caller::root(), ROOT, name.as_bytes());
            gone.map_err(text)?;
            fs.sync().map_err(text)?;
        }
    }
    drop(contexts);
    let now_ns = machine.now_ns();
    let crashed = machine.cut(*rng.pick(&Survival::ALL), &mut rng);
    drop(fs);
    Machine::after(&shape, crashed, now_ns).fsck()
}

fn text(error: Error) -> String {
    error.to_string()
}

fn make(fs: &FileSystem, name: &str) -> Result<Ino, String> {
    let mode = libc::S_IFREG | 0o644;
    let made = fs.mknod(&Caller::root(), ROOT, name.as_bytes(), mode, 0);
    Ok(made.map_err(text)?.ino)
}

/// Writes so many pages, or as many as there is room for.
fn fill(fs: &FileSystem, ino: Ino, pages: u64, what: u8) -> Result<(), String> {
    let file = fs.open_file(ino, libc::O_RDWR).map_err(text)?;
    let bytes = vec![what; 64 * BLOCK_SIZE];
    let (mut at, end) = (0, pages.saturating_mul(BLOCK_SIZE as u64));
    while at < end {
        let len = bytes.len().min((end - at) as usize);
        match fs.write(&file, at, &bytes[..len]) {
            Ok(written) => at += written as u64,
            Err(Error::NoSpace) if end == u64::MAX => break,
            Err(error) => return Err(text(error)),
        }
    }
    fs.sync().map_err(text)
}

/// Hands out writes over the whole file, and asks for some of them, or for none.
fn fly(fs: &FileSystem, ino: Ino, context: &mut IoContext, rng: &mut Rng) -> Result<(), Error> {
    let file = fs.open_file(ino, DIRECT)?;
    let mut at = 0;
    while at < PAGES {
        let pages = rng.range(1, 5).min(PAGES - at);
        let request = Request::Write {
            file: Arc::clone(&file),
            offset: at * BLOCK_SIZE as u64,
            buf: AlignedBuf::from_slice(&vec![FLOWN; pages as usize * BLOCK_SIZE]),
        };
        let taken = context.submit(&mut vec![(at, request)]);
        assert_eq!(taken, 1, "the context has room for all of a file");
        at += pages;
    }
    let mut done = Vec::new();
    context.wait(rng.below(50) as usize, &mut done, None);
    done.into_iter().try_for_each(|done| done.result.map(drop))
}

/// The file consists of that.
fn look(fs: &FileSystem, ino: Ino, what: u8) -> Result<(), String> {
    let file = fs.open_file(ino, DIRECT).map_err(text)?;
    let mut bytes = AlignedBuf::zeroed(64 * BLOCK_SIZE);
    let mut at = 0;
    loop {
        let len = fs.read(&file, at, &mut bytes).map_err(text)?;
        if let Some(odd) = bytes[..len].iter().find(|b| **b != what) {
            return Err(format!("a file of {what:#x} has {odd:#x} beyond {at}"));
        }
        if len == 0 {
            return Ok(());
        }
        at += len as u64;
    }
}

#[cfg(test)]
mod tests {
    use base::canary::{Canary, plant};

    #[test]
    fn what_is_in_flight_lands_before_a_cut() {
        (0..3).for_each(|seed| super::run(seed).unwrap());
        plant(Some(Canary::FlightsNotAwaited));
        let found = (0..4).find_map(|seed| super::run(seed).err());
        plant(None);
        assert!(found.unwrap().contains("a file of 0xf has 0xf1"));
    }
}
