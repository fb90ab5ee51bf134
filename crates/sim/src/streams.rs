//! A program writes a file in streams, which return before the devices have what was written, and does whatever else programs do to files; beside it
//! somebody else looks into the file. Blocks held something before, and the power goes at the end.
//!
//! Nobody finds but what the file had when the look began or got meanwhile; after the cut each page is what it was at the last sync or has become
//! since, and never what its blocks held before.

use crate::world::{Image, Machine, Shape};
use base::rng::Rng;
use base::sched;
use base::sync::{Mutex, rank};
use base::thread;
use device::sim::Survival;
use fs::{Caller, Error, FileSystem, Ino, OpenFile, ROOT};
use std::sync::Arc;

const PAGE: u64 = 4096;
/// Of the file at most.
const PAGES: u64 = 256;
/// Steps of the program.
const STEPS: usize = 40;
/// What blocks held before.
const STALE: u64 = 0x5E;

/// What each page has been since the last sync, the newest last; 0: nothing.
struct Ledger {
    pages: Vec<Vec<u64>>,
    /// How many each page has been before.
    gone: Vec<usize>,
    size: u64,
    words: u64,
}

impl Ledger {
    fn now(&self, page: u64) -> u64 {
        *self.pages[page as usize].last().unwrap_or(&0)
    }

    /// How many words each page has had so far.
    fn had(&self) -> Vec<usize> {
        let pages = self.pages.iter().zip(&self.gone);
        pages.map(|(page, gone)| page.len() + gone).collect()
    }

    /// Who looked when a page had had so many may see one of these; the last of them may have been on its way then.
    fn since(&self, page: usize, had: usize) -> &[u64] {
        &self.pages[page][had.saturating_sub(2).saturating_sub(self.gone[page])..]
    }

    fn put(&mut self, page: u64, word: u64) {
        self.pages[page as usize].push(word);
    }

    fn synced(&mut self) {
        for (page, gone) in self.pages.iter_mut().zip(&mut self.gone) {
            *gone += page.len() - 1;
            page.drain(..page.len() - 1);
        }
    }
}

struct Streams<'a> {
    fs: &'a FileSystem,
    ino: Ino,
    ledger: Mutex<Ledger>,
}

fn text(error: Error) -> String {
    error.to_string()
}

fn words(word: u64, pages: u64) -> Vec<u8> {
    word.to_le_bytes().repeat((pages * PAGE / 8) as usize)
}

/// The word that a page is full of.
fn word_of(page: &[u8]) -> Result<u64, String> {
    let first = page
        .first_chunk()
        .map_or(0, |word| u64::from_le_bytes(*word));
    match page
        .chunks(8)
        .all(|chunk| chunk == &first.to_le_bytes()[..chunk.len()])
    {
        true => Ok(first),
        false => Err(format!(
            "a page begins with {first:#x}, and goes on otherwise"
        )),
    }
}

impl Streams<'_> {
    fn open(&self) -> Result<Arc<OpenFile>, String> {
        self.fs.open_file(self.ino, libc::O_RDWR).map_err(text)
    }

    /// One step of the program that alone changes the file.
    fn step(&self, file: &mut Arc<OpenFile>, rng: &mut Rng) -> Result<(), String> {
        let size = self.ledger.lock().size;
        match rng.below(13) {
            0 => {
                *file = self.open()?;
            }
            1 => {
                self.fs.fsync(file, false).map_err(text)?;
                self.ledger.lock().synced();
            }
            2 => {
                self.fs.sync().map_err(text)?;
                self.ledger.lock().synced();
            }
            3 => self.cut(rng.below(size / PAGE + 1))?,
            4 => {
                let found = self.fs.getattr(self.ino).map_err(text)?.size;
                if found != size {
                    return Err(format!("the file has {found} bytes, not {size}"));
                }
            }
            5 if size > 0 => self.look(file, rng, true)?,
            // Not large enough for a stream.
            6 if size < PAGES * PAGE => self.write(file, size / PAGE, 1)?,
            7 if size > 0 => self.write(file, rng.below(size / PAGE), 1)?,
            8 => self.fs.tick().map_err(text)?,
            // What is logged so far, whatever it is.
            9 => self.fs.store().sync().map_err(|error| error.to_string())?,
            10 if size > 0 => self.stream(file, rng.below(size / PAGE), rng)?,
            _ => self.stream(file, size / PAGE, rng)?,
        }
        Ok(())
    }

    /// Several requests, one behind the other.
    fn stream(&self, file: &OpenFile, mut page: u64, rng: &mut Rng) -> Result<(), String> {
        let pages = rng.range(2, 6);
        for _ in 0..rng.range(1, 6) {
            if page + pages > PAGES {
                return Ok(());
            }
            self.write(file, page, pages)?;
            page += pages;
            if rng.one_in(4) {
                self.look(file, rng, true)?;
            }
        }
        Ok(())
    }

    fn write(&self, file: &OpenFile, page: u64, pages: u64) -> Result<(), String> {
        let word = {
            let mut ledger = self.ledger.lock();
            ledger.words += 1;
            let word = ledger.words << 8;
            (page..page + pages).for_each(|page| ledger.put(page, word));
            word
        };
        let data = words(word, pages);
        let written = self.fs.write(file, page * PAGE, &data).map_err(text)?;
        if written != data.len() {
            return Err(format!("{written} bytes of {} are written", data.len()));
        }
        let mut ledger = self.ledger.lock();
        ledger.size = ledger.size.max((page + pages) * PAGE);
        Ok(())
    }

    fn cut(&self, page: u64) -> Result<(), String> {
        (page..PAGES).for_each(|page| self.ledger.lock().put(page, 0));
        self.fs
            .truncate(&Caller::root(), self.ino, page * PAGE)
            .map_err(text)?;
        self.ledger.lock().size = page * PAGE;
        Ok(())
    }

    /// Reads some pages. `still`: nobody changes the file meanwhile.
    fn look(&self, file: &OpenFile, rng: &mut Rng, still: bool) -> Result<(), String> {
        let page = rng.below(PAGES);
        let mut buf = vec![0; (rng.range(1, 6) * PAGE) as usize];
        let had = self.ledger.lock().had();
        let len = self.fs.read(file, page * PAGE, &mut buf).map_err(text)?;
        let ledger = self.ledger.lock();
        let size = ledger.size;
        let whole = len == buf.len().min(size.saturating_sub(page * PAGE) as usize);
        if still && !whole {
            return Err(format!(
                "{len} bytes of page {page} are read, of a file of {size}"
            ));
        }
        for (page, bytes) in (page..).zip(buf[..len].chunks(PAGE as usize)) {
            let (found, now) = (word_of(bytes)?, [ledger.now(page)]);
            let may_be = match still {
                true => &now,
                false => ledger.since(page as usize, had[page as usize]),
            };
            if !may_be.contains(&found) {
                return Err(format!("page {page} has {found:#x}, not {may_be:x?}"));
            }
        }
        Ok(())
    }

    /// After the cut.
    fn check(&self, fs: &FileSystem) -> Result<(), String> {
        let file = fs.open_file(self.ino, libc::O_RDONLY).map_err(text)?;
        let mut buf = vec![0; PAGE as usize];
        let size = fs.getattr(self.ino).map_err(text)?.size;
        for page in 0..PAGES {
            let len = fs.read(&file, page * PAGE, &mut buf).map_err(text)?;
            buf[len..].fill(0);
            let ledger = self.ledger.lock();
            let known = &ledger.pages[page as usize];
            // Of a write that was not synced any sector may have come.
            for sector in buf.chunks(512) {
                let found = word_of(sector)?;
                // There never was a hole.
                if found == 0 && page < size / PAGE {
                    return Err(format!(
                        "after the cut page {page} of {size} bytes is a hole"
                    ));
                }
                if !known.contains(&found) {
                    return Err(format!(
                        "after the cut page {page} has {found:#x}, not {known:x?}"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Fills what is free with something, and frees it again.
fn make_stale(fs: &FileSystem) -> Result<(), String> {
    let made = fs.create(&Caller::root(), ROOT, b"stale", 0o644, libc::O_RDWR);
    let file = made.map_err(text)?.1;
    let (data, mut at) = (words(STALE, 64), 0);
    loop {
        match fs.write(&file, at, &data) {
            Ok(len) => at += len as u64,
            Err(Error::NoSpace) => break,
            Err(error) => return Err(text(error)),
        }
    }
    fs.sync().map_err(text)?;
    drop(file);
    fs.unlink(&Caller::root(), ROOT, b"stale").map_err(text)?;
    fs.sync().map_err(text)
}

/// One run; an error says what was not as it must be.
pub fn run(seed: u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let mut shape = Shape::small(rng.range(1, 3));
    shape.options.store.background = true;
    shape.tight = true;
    shape.options.data.cache_bytes = rng.range(128, 512) as usize * PAGE as usize;
    let machine = Machine::new(&Image::format(&shape)?, seed);
    let streams = sched::run("streams", seed, &machine.clock, || {
        let fs = machine.open().map_err(text)?;
        make_stale(&fs)?;
        let made = fs.create(&Caller::root(), ROOT, b"file", 0o644, libc::O_RDWR);
        let ino = made.map_err(text)?.0.ino;
        fs.sync().map_err(text)?;
        let ledger = Ledger {
            pages: vec![vec![0]; PAGES as usize],
            gone: vec![0; PAGES as usize],
            size: 0,
            words: 0,
        };
        let streams = Streams {
            fs: &fs,
            ino,
            ledger: Mutex::new(rank::LEDGER, ledger),
        };
        let worked = thread::parallel(2, |me| {
            let mut rng = Rng::new(seed ^ (me as u64 + 1));
            let mut file = streams.open()?;
            match me {
                0 => (0..STEPS).try_for_each(|_| streams.step(&mut file, &mut rng)),
                _ => (0..STEPS / 2).try_for_each(|_| streams.look(&file, &mut rng, false)),
            }
        });
        let worked = worked.into_iter().collect::<Result<(), String>>();
        let closes = worked.is_err() || rng.one_in(4);
        if closes {
            let closed = fs.close().map_err(text);
            worked.and(closed)?;
            streams.ledger.lock().synced();
        }
        let now_ns = machine.now_ns();
        let crashed = machine.cut(*rng.pick(&Survival::ALL), &mut rng);
        // Of what goes from now on nothing gets anywhere: its threads end.
        if !closes {
            drop(fs.close());
        }
        Ok::<_, String>((crashed, now_ns, ino, streams.ledger.into_inner()))
    });
    let (crashed, now_ns, ino, ledger) = streams?;
    let machine = Machine::after(&shape, crashed, now_ns);
    let fs = machine.open().map_err(text)?;
    let streams = Streams {
        fs: &fs,
        ino,
        ledger: Mutex::new(rank::LEDGER, ledger),
    };
    streams.check(&fs)?;
    fs.close().map_err(text)?;
    machine.fsck()
}

#[cfg(test)]
mod tests {
    use base::canary::{Canary, plant};

    fn found_with(canary: Canary) -> Option<String> {
        plant(Some(canary));
        let found = (0..200).find_map(|seed| super::run(seed).err());
        plant(None);
        found
    }

    #[test]
    fn what_streams_wrote_is_there_for_all_and_never_what_its_blocks_held() {
        (0..20).for_each(|seed| super::run(seed).unwrap());
        // What is behind a piece that is not ended may be durable without it.
        for (canary, signs) in [
            (Canary::PiecesNotEnded, &["has 0x", "is a hole"][..]),
            (Canary::PieceLoggedEarly, &["has 0x"]),
        ] {
            let found = found_with(canary);
            let found = found.unwrap_or_else(|| panic!("{} is not found", canary.name()));
            let is_sign = signs.iter().any(|sign| found.contains(sign));
            assert!(is_sign, "{}: {found}", canary.name());
        }
    }
}
