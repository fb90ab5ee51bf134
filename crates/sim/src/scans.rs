//! Readers go through a file from front to end, so that threads read ahead of them, or streams past the cache, beside a writer that cuts it and lets it
//! grow again, in an order that a seed decides. The cache holds a part of the file.
//!
//! There is one writer, and a page has one word all over, so a reader knows what it may find: what the page had when the
//! read began, or got before it ended.

use crate::world::{Image, Machine, Shape};
use base::rng::Rng;
use base::{sched, thread};
use fs::{Caller, FileSystem, OpenFile, ROOT, SetAttr};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const PAGE: u64 = 4096;
const PAGES: u64 = 96;
/// Pages that are never cut off.
const KEPT: u64 = 24;
/// Readers and the writer.
const TASKS: usize = 3;

/// What the writer has done to each page: it has zeros where this is odd, and else that many times the same word.
struct Ledger {
    begun: Vec<AtomicU64>,
    ended: Vec<AtomicU64>,
}

impl Ledger {
    fn new() -> Ledger {
        let pages = || (0..PAGES).map(|_| AtomicU64::new(2)).collect();
        Ledger {
            begun: pages(),
            ended: pages(),
        }
    }

    /// `change` makes these pages hold a word, or zeros, that they have not had.
    fn change(
        &self,
        pages: Range<u64>,
        zeros: bool,
        change: impl FnOnce(u64) -> Result<(), fs::Error>,
    ) -> Result<(), fs::Error> {
        let begun = &self.begun[pages.start as usize..pages.end as usize];
        let newest = begun.iter().map(|b| b.load(Ordering::SeqCst)).max();
        let next = (newest.unwrap_or(0) / 2 + 1) * 2 + u64::from(zeros);
        begun.iter().for_each(|b| b.store(next, Ordering::SeqCst));
        change(next)?;
        let ended = &self.ended[pages.start as usize..pages.end as usize];
        ended.iter().for_each(|e| e.store(next, Ordering::SeqCst));
        Ok(())
    }
}

struct Scans<'a> {
    fs: &'a FileSystem,
    file: Arc<OpenFile>,
    ledger: Ledger,
}

fn words(word: u64, pages: u64) -> Vec<u8> {
    word.to_le_bytes().repeat((pages * PAGE / 8) as usize)
}

impl Scans<'_> {
    fn write(&self, rng: &mut Rng) -> Result<(), fs::Error> {
        let resize = |size| {
            let set = SetAttr {
                size: Some(size),
                ..SetAttr::default()
            };
            self.fs.setattr(&Caller::root(), self.file.ino(), &set)
        };
        match rng.below(8) {
            0 => {
                let from = rng.range(KEPT, PAGES);
                self.ledger.change(from..PAGES, true, |_| {
                    resize(from * PAGE)?;
                    resize(PAGES * PAGE).map(drop)
                })
            }
            1 => self.fs.fsync(&self.file, false),
            2 => self.fs.sync(),
            _ => {
                let page = rng.below(PAGES);
                let pages = page..(page + 1 + rng.below(3)).min(PAGES);
                let len = pages.end - pages.start;
                self.ledger.change(pages, false, |word| {
                    let data = words(word, len);
                    self.fs.write(&self.file, page * PAGE, &data).map(drop)
                })
            }
        }
    }

    fn scan(&self, rng: &mut Rng) -> Result<(), String> {
        let said = |error: fs::Error| error.to_string();
        let opened = self.fs.open_file(self.file.ino(), libc::O_RDONLY);
        let file = opened.map_err(said)?;
        let pages = rng.range(1, 8);
        let mut buf = vec![0; (pages * PAGE) as usize];
        for first in (0..PAGES).step_by(pages as usize) {
            let ended = self.ledger.ended.iter();
            let ended: Vec<u64> = ended.map(|e| e.load(Ordering::SeqCst)).collect();
            let len = self.fs.read(&file, first * PAGE, &mut buf).map_err(said)?;
            for (page, bytes) in (first as usize..).zip(buf[..len].chunks_exact(PAGE as usize)) {
                let begun = self.ledger.begun[page].load(Ordering::SeqCst);
                let mut may_be = (ended[page]..=begun).map(|n| if n % 2 == 1 { 0 } else { n });
                if !may_be.any(|word| bytes == words(word, 1)) {
                    let old = ended[page];
                    return Err(format!("page {page} holds nothing of {old} to {begun}"));
                }
            }
        }
        Ok(())
    }
}

/// One run; an error says what was not as it must be.
pub fn run(seed: u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let mut shape = Shape::small(2);
    shape.options.store.background = true;
    // As streams.
    shape.tight = Rng::new(seed ^ 0x5C4E_A311).one_in(2);
    shape.options.data.cache_bytes = rng.range(48, 96) as usize * PAGE as usize;
    let machine = Machine::new(&Image::format(&shape)?, seed);
    let said = |error: fs::Error| error.to_string();
    sched::run("scans", seed, &machine.clock, || {
        let fs = machine.open().map_err(|e| e.to_string())?;
        let made = fs.create(&Caller::root(), ROOT, b"file", 0o644, libc::O_RDWR);
        let scans = Scans {
            fs: &fs,
            file: made.map_err(said)?.1,
            ledger: Ledger::new(),
        };
        fs.write(&scans.file, 0, &words(2, PAGES)).map_err(said)?;
        fs.sync().map_err(said)?;
        let worked = thread::parallel(TASKS, |me| {
            let mut rng = Rng::new(seed ^ (me as u64 + 1));
            match me {
                0 => (0..60).try_for_each(|_| scans.write(&mut rng).map_err(said)),
                _ => (0..4).try_for_each(|_| scans.scan(&mut rng)),
            }
        });
        drop(scans);
        let closed = fs.close().map_err(said);
        worked.into_iter().collect::<Result<(), String>>()?;
        closed
    })?;
    machine.fsck()
}

#[cfg(test)]
mod tests {
    use base::canary::{Canary, plant};

    fn found_with(canary: Canary) -> Option<String> {
        plant(Some(canary));
        let found = (0..400).find_map(|seed| super::run(seed).err());
        plant(None);
        found
    }

    #[test]
    fn what_is_read_ahead_is_what_the_file_has_unless_a_cut_passes_it_or_it_is_shown_before_it_came()
     {
        (0..10).for_each(|seed| super::run(seed).unwrap());
        for canary in [
            Canary::AheadPastCut,
            Canary::LoadPublishedEarly,
            Canary::StreamUnasked,
        ] {
            let found =
                found_with(canary).unwrap_or_else(|| panic!("{} is not found", canary.name()));
            assert!(found.contains("holds nothing of"), "{found}");
        }
    }
}
