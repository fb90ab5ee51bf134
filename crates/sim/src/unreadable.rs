//! A sector of a file's data that cannot be read any more, until it is written: reads of its page say so, and nothing else is any different.
//! And a read of anything that fails once: whoever meets it is told, or sees what there is.

use crate::drive::{Driver, write_all};
use crate::lies::extents;
use crate::look::{Amiss, Found, FoundThing, look_below, try_look};
use crate::op::Op;
use crate::world::{Image, Machine, Shape};
use base::rng::Rng;
use device::sim::{SECTOR, Survival, Times};
use format::BLOCK_SIZE;
use fs::{FileSystem, OpenFile, ROOT};
use std::sync::Arc;

/// Looks at a copy of a machine on which nothing is wrong, and which shows what was found, with one such sector. True: a read has met it.
pub fn look(
    machine: &Machine,
    shape: &Shape,
    found: &Found,
    rng: &mut Rng,
) -> Result<bool, String> {
    let copy = machine.point().crash(Survival::All, rng);
    let copy = Machine::after(shape, copy, machine.now_ns());
    let fs = copy.open().map_err(|e| format!("open: {e}"))?;
    let files = found.things.iter().filter(|thing| thing.content.is_some());
    let mut places = Vec::new();
    for thing in files {
        let all = extents(&fs, thing.ino).map_err(|e| format!("{}: {e}", thing.path))?;
        places.extend(all.into_iter().map(|extent| (thing, extent)));
    }
    if places.is_empty() {
        return Ok(false);
    }
    let (thing, extent) = rng.pick(&places);
    let nth = rng.below(extent.len as u64);
    let at = extent.block.byte() + nth * BLOCK_SIZE as u64;
    let sector = rng.below((BLOCK_SIZE / SECTOR) as u64) * SECTOR as u64;
    shape.geometry().pieces(at + sector, SECTOR, |piece| {
        copy.devices[piece.device].lose_sector(piece.offset);
    });
    let bad = extent.page + nth;
    let what = |what: String| format!("page {bad} of {} cannot be read: {what}", thing.path);
    let met = read_all(&fs, found, (thing, bad)).map_err(what)?;
    write_anew(&fs, thing, bad).map_err(what)?;
    fs.close().map_err(|e| what(format!("close: {e}")))?;
    copy.fsck().map_err(what)?;
    Ok(met)
}

/// Looks at another such copy, of which nothing is in memory, while one read fails. True: a call has told of it.
pub fn look_while_a_read_fails(
    machine: &Machine,
    shape: &Shape,
    found: &Found,
    rng: &mut Rng,
) -> Result<bool, String> {
    let copy = machine.point().crash(Survival::All, rng);
    let copy = Machine::after(shape, copy, machine.now_ns());
    let open = || copy.open().map_err(|e| format!("open: {e}"));
    // What recovery has brought up to date is in memory, and home by now.
    open()?.close().map_err(|e| format!("close: {e}"))?;
    let fs = open()?;
    copy.switch
        .fail_after(rng.below(READS), Times::Next(rng.range(1, 4)));
    match try_look(&fs, ROOT) {
        Err(Amiss::Failed(_)) => Ok(true),
        Err(Amiss::Wrong(what)) => Err(format!("while a read fails: {what}")),
        Ok(shown) if shown.things == found.things => Ok(false),
        Ok(shown) => Err(format!(
            "while a read fails the file system shows {shown}\nwhere there is {found}"
        )),
    }
}

/// One of so many reads fails, and up to two behind it, or none if there are fewer.
const READS: u64 = 60;
/// Names in a directory, more than come into memory when the file system opens.
const NAMES: usize = 400;
/// Looks at one machine.
const LOOKS: usize = 24;

/// One run: a directory of many leaves, looked at again and again while reads fail.
pub fn run(seed: u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let mut shape = Shape::small(rng.range(1, 3));
    shape.tight = true;
    let mut driver = Driver::fresh(Machine::new(&Image::format(&shape)?, seed), true)?;
    let names = (0..NAMES).map(|i| Op::Create(format!("name{i:060}")));
    for op in names.chain([Op::Remount]) {
        driver.run(&op).map_err(|stop| format!("{stop:?}"))?;
    }
    let found = look_below(driver.fs(), ROOT)?;
    let mut told = 0;
    for _ in 0..LOOKS {
        let failed = look_while_a_read_fails(&driver.machine, &shape, &found, &mut rng)?;
        told += usize::from(failed);
    }
    match told {
        0 => Err("no read has failed".into()),
        _ => Ok(()),
    }
}

fn open(fs: &FileSystem, thing: &FoundThing) -> Result<Arc<OpenFile>, String> {
    let file = fs.open_file(thing.ino, libc::O_RDWR);
    file.map_err(|e| format!("{}: {e}", thing.path))
}

fn page_of(bytes: &[u8], page: u64) -> &[u8] {
    let start = (page as usize * BLOCK_SIZE).min(bytes.len());
    &bytes[start..(start + BLOCK_SIZE).min(bytes.len())]
}

/// Reads all files page by page. Of what memory or the journal has the device is not asked.
fn read_all(fs: &FileSystem, found: &Found, bad: (&FoundThing, u64)) -> Result<bool, String> {
    let mut met = false;
    for thing in &found.things {
        let Some(bytes) = &thing.content else {
            continue;
        };
        let file = open(fs, thing)?;
        for page in 0..bytes.len().div_ceil(BLOCK_SIZE) as u64 {
            let mut read = vec![0; BLOCK_SIZE];
            match fs.read(&file, page * BLOCK_SIZE as u64, &mut read) {
                Ok(len) if read[..len] == *page_of(bytes, page) => {}
                Ok(_) => {
                    return Err(format!(
                        "page {page} of {} reads as something else",
                        thing.path
                    ));
                }
                Err(error)
                    if error.errno() == libc::EIO && (thing.ino, page) == (bad.0.ino, bad.1) =>
                {
                    met = true;
                }
                Err(error) => return Err(format!("page {page} of {}: {error}", thing.path)),
            }
        }
    }
    Ok(met)
}

/// Written as a whole, the page is good again.
fn write_anew(fs: &FileSystem, thing: &FoundThing, page: u64) -> Result<(), String> {
    let bytes = thing.content.as_deref().unwrap_or_default();
    let anew: Vec<u8> = page_of(bytes, page).iter().map(|byte| !byte).collect();
    if anew.len() < BLOCK_SIZE {
        return Ok(());
    }
    let at = page * BLOCK_SIZE as u64;
    let file = open(fs, thing)?;
    let written = write_all(fs, &file, at, &anew, false).and_then(|()| fs.fsync(&file, false));
    written.map_err(|e| format!("writing it anew: {e}"))?;
    let mut read = vec![0; BLOCK_SIZE];
    match fs.read(&file, at, &mut read) {
        Ok(len) if read[..len] == anew => Ok(()),
        Ok(_) => Err("written anew, it reads as something else".into()),
        Err(error) => Err(format!("written anew: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::canary::{Canary, plant};

    #[test]
    fn one_page_says_that_it_cannot_be_read() {
        let shape = Shape::small(2);
        let image = Image::format(&shape).unwrap();
        let mut driver = Driver::fresh(Machine::new(&image, 1), true).unwrap();
        let write = "write f 0 70000 1".parse().unwrap();
        for op in [Op::Create("f".into()), write, Op::Remount] {
            driver.run(&op).unwrap();
        }
        let found = look_below(driver.fs(), ROOT).unwrap();
        let met = (0..8)
            .filter(|seed| look(&driver.machine, &shape, &found, &mut Rng::new(*seed)).unwrap());
        assert!(met.count() > 4);
    }

    /// Any error was excused where devices fail, also one that told of names which a listing had left out in silence.
    #[test]
    fn names_that_a_listing_leaves_out_are_missed() {
        run(1).unwrap();
        plant(Some(Canary::LeafLeftOut));
        let outcome = run(1);
        plant(None);
        assert!(outcome.is_err());
    }
}
