//! What a file may hold after a crash.
//!
//! Invariants:
//! 1. The first version is what is certainly durable, or older than it by nothing: whatever a
//!    crash leaves is made of this version and of later ones.
//! 2. A *life* begins when a file is cut to nothing and rewritten. What a crash leaves is of one
//!    life: the old content or the new one, never some of each.
//! 3. While `pending` is there, nothing of the new life can have been logged.

use format::BLOCK_SIZE;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The unit of which a crash leaves one version or another, in bytes.
pub const SECTOR: usize = device::sim::SECTOR;

/// Pages up to which old content certainly hangs in the inode itself, whatever its extents: only
/// then does a cut to nothing wait for the new content.
const REPLACED_PAGES_MAX: usize = 15;

/// Versions of a file, oldest first, numbered from the first that there ever was. There always
/// is one.
#[derive(Clone, Debug)]
pub struct Versions<T> {
    /// Number of the first of `kept`.
    first: usize,
    kept: Vec<T>,
}

impl<T> Versions<T> {
    pub fn new(version: T) -> Versions<T> {
        Versions {
            first: 0,
            kept: vec![version],
        }
    }

    pub fn push(&mut self, version: T) {
        self.kept.push(version);
    }

    pub fn first(&self) -> &T {
        &self.kept[0]
    }

    pub fn last(&self) -> &T {
        self.kept.last().expect("a file has a version")
    }

    pub fn first_number(&self) -> usize {
        self.first
    }

    /// The number of the newest.
    pub fn number(&self) -> usize {
        self.first + self.kept.len() - 1
    }

    pub fn iter(&self) -> std::slice::Iter<'_, T> {
        self.kept.iter()
    }

    /// Those with this number or a larger one.
    pub fn from(&self, number: usize) -> impl Iterator<Item = &T> {
        self.kept.iter().skip(number.saturating_sub(self.first))
    }

    /// The numbered version and those after it are not there; false: neither is any before it.
    pub fn forget_from(&mut self, number: usize) -> bool {
        self.kept.truncate(number.saturating_sub(self.first));
        !self.kept.is_empty()
    }

    /// At least the numbered version is durable, or the newest.
    pub fn forget_before(&mut self, number: usize) {
        let number = number.clamp(self.first, self.number());
        self.kept.drain(..number - self.first);
        self.first = number;
    }
}

/// Checks what was found against the sizes that a file may have had, and sector by sector: `holds`
/// is given a sector's number and bytes, and says whether they can be there.
pub fn explain(
    found: &[u8],
    sizes: impl Iterator<Item = usize> + Clone,
    holds: impl Fn(usize, &[u8]) -> bool,
) -> Result<(), String> {
    let (Some(least), Some(most)) = (sizes.clone().min(), sizes.max()) else {
        return Err("no version is left".into());
    };
    if !(least..=most).contains(&found.len()) {
        return Err(format!(
            "{} bytes where {least} to {most} are possible",
            found.len()
        ));
    }
    for (i, sector) in found.chunks(SECTOR).enumerate() {
        if !holds(i, sector) {
            return Err(format!(
                "sector {i} of {} holds what nothing wrote there: {:02x?}…",
                found.len().div_ceil(SECTOR),
                &sector[..sector.len().min(16)],
            ));
        }
    }
    Ok(())
}

#[derive(Clone, Debug)]
struct Version {
    bytes: Arc<Vec<u8>>,
    life: u32,
    /// It cut the file: beyond its end it may have left zeros.
    cut: bool,
}

/// A version that was made behind others that are not there: what it wrote over blocks of before may be.
#[derive(Clone, Debug)]
struct Behind {
    version: Version,
    /// Pages that those others have moved to blocks of their own, where nobody finds them.
    moved: BTreeSet<u64>,
    /// Zeros may lie behind its end, or behind that of one that is not there.
    zeros: bool,
}

/// The contents of one file since it was last durable.
#[derive(Clone, Debug)]
pub struct History {
    versions: Versions<Version>,
    /// What may show of versions that are not among these; none of their sizes.
    behind: Vec<Behind>,
    /// Content in memory that replaces all of `versions` in one step later.
    pending: Option<Arc<Vec<u8>>>,
    life: u32,
}

impl History {
    /// A file with durable content.
    pub fn new(bytes: Vec<u8>) -> History {
        let version = Version {
            bytes: Arc::new(bytes),
            life: 0,
            cut: false,
        };
        History {
            versions: Versions::new(version),
            behind: Vec::new(),
            pending: None,
            life: 0,
        }
    }

    /// What a read shows now.
    pub fn now(&self) -> &Arc<Vec<u8>> {
        self.pending.as_ref().unwrap_or(&self.versions.last().bytes)
    }

    /// The number of the newest version that may be on the devices.
    pub fn number(&self) -> usize {
        self.versions.number()
    }

    /// The content changes; `cut`: the file became shorter.
    pub fn change(&mut self, bytes: Vec<u8>, cut: bool) {
        match &mut self.pending {
            Some(pending) => *pending = Arc::new(bytes),
            None => self.push(Arc::new(bytes), cut),
        }
    }

    fn push(&mut self, bytes: Arc<Vec<u8>>, cut: bool) {
        self.versions.push(Version {
            bytes,
            life: self.life,
            cut,
        });
    }

    /// The file is cut to nothing. `strict`: nothing forces the cut to be logged before there is
    /// new content.
    pub fn cut_to_nothing(&mut self, strict: bool) {
        if let Some(pending) = &mut self.pending {
            *pending = Arc::default();
            return;
        }
        if self.versions.last().bytes.is_empty() {
            return;
        }
        let plain = |v: &Version| {
            let nothing = v.bytes.iter().all(|b| *b == 0) && !v.bytes.is_empty();
            !nothing && v.bytes.len() <= REPLACED_PAGES_MAX * 4096
        };
        let all_plain = (self.versions.iter()).all(|v| v.life != self.life || plain(v));
        if strict && all_plain {
            self.pending = Some(Arc::default());
        } else {
            self.push(Arc::default(), true);
        }
    }

    /// From here on what is in memory may be written back.
    pub fn write_back(&mut self) {
        if let Some(bytes) = self.pending.take() {
            self.life += 1;
            self.push(bytes, false);
        }
    }

    /// What is there now is durable.
    pub fn durable(&mut self) {
        self.write_back();
        self.versions.forget_before(self.number());
    }

    /// As it is once everything before the numbered version is gone.
    pub fn after(&self, number: usize) -> History {
        let mut copy = self.clone();
        copy.versions.forget_before(number);
        copy
    }

    /// As it is when the numbered versions, ascending, each of which is there as a whole or not at all, are not; `None`: then nothing can be. What
    /// others made later is logged behind them, so it is not there either, but for bytes in blocks that the file had before.
    pub fn without(&self, absent: &[usize]) -> Option<History> {
        let mut copy = self.clone();
        let Some(first) = absent.first().filter(|first| **first <= self.number()) else {
            return Some(copy);
        };
        copy.pending = None;
        if !copy.versions.forget_from(*first) {
            return None;
        }
        let (mut moved, mut zeros) = (BTreeSet::new(), false);
        let later = self.versions.from(*first);
        for ((number, version), before) in (*first..).zip(later).zip(self.versions.from(first - 1))
        {
            zeros |= version.cut || version.bytes.len() < before.bytes.len();
            if absent.contains(&number) {
                moved.extend(changed_pages(&before.bytes, &version.bytes));
                continue;
            }
            copy.behind.push(Behind {
                version: version.clone(),
                moved: moved.clone(),
                zeros,
            });
        }
        Some(copy)
    }

    /// The newest version never came to be.
    pub fn undo(&mut self) {
        let newest = self.versions.number();
        self.versions.forget_from(newest);
    }

    /// Whether a crash may leave this content. `Err` says what is wrong.
    pub fn allows(&self, found: &[u8]) -> Result<(), String> {
        self.allows_but(found, &|_| false)
    }

    /// As `allows`, but for the pages for which `spared` holds.
    pub fn allows_but(&self, found: &[u8], spared: &dyn Fn(u64) -> bool) -> Result<(), String> {
        let first = self.versions.first().life;
        let mut complaint = String::new();
        for life in first..=self.life {
            match self.life_allows(life, found, spared) {
                Ok(()) => return Ok(()),
                Err(what) => complaint = what,
            }
        }
        Err(complaint)
    }

    fn life_allows(
        &self,
        life: u32,
        found: &[u8],
        spared: &dyn Fn(u64) -> bool,
    ) -> Result<(), String> {
        let mine: Vec<&Version> = self.versions.iter().filter(|v| v.life == life).collect();
        // Since a cut, whoever writes the last page writes zeros behind the new end, and the old
        // size may still be the one that is durable.
        let since_cut = mine.iter().skip(1).position(|v| v.cut);
        let zeros_from = since_cut.map_or(usize::MAX, |index| index + 1);
        let sizes = mine.iter().map(|v| v.bytes.len());
        explain(found, sizes, |i, sector| {
            let holds = |(number, version): (usize, &&Version)| {
                version.holds(i * SECTOR, sector, number >= zeros_from)
            };
            let page = (i * SECTOR / BLOCK_SIZE) as u64;
            let written_over = |behind: &Behind| {
                behind.version.life == life
                    && !behind.moved.contains(&page)
                    && behind.version.holds(i * SECTOR, sector, behind.zeros)
            };
            mine.iter().enumerate().any(holds)
                || self.behind.iter().any(written_over)
                || spared(page)
        })
    }
}

impl Version {
    /// Whether this version explains the bytes at `at`. One that is shorter explains nothing,
    /// unless the file was cut: a size never comes before what it covers.
    fn holds(&self, at: usize, sector: &[u8], zeros_behind: bool) -> bool {
        let end = at + sector.len();
        if self.bytes.len() >= end {
            return self.bytes[at..end] == *sector;
        }
        if !zeros_behind {
            return false;
        }
        let kept = self.bytes.get(at..).unwrap_or_default();
        sector.starts_with(kept) && sector[kept.len()..].iter().all(|b| *b == 0)
    }
}

/// Pages up to the end of `after` that are not what they were, as far as bytes tell; behind the end of `before` there were zeros.
fn changed_pages<'a>(before: &'a [u8], after: &'a [u8]) -> impl Iterator<Item = u64> + 'a {
    let changed = move |(page, bytes): (usize, &[u8])| {
        let kept = before.get(page * BLOCK_SIZE..).unwrap_or_default();
        let (same, new) = bytes.split_at(kept.len().min(bytes.len()));
        (!kept.starts_with(same) || new.iter().any(|b| *b != 0)).then_some(page as u64)
    };
    let pages = after.chunks(BLOCK_SIZE).enumerate();
    pages.filter_map(changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_never_comes_before_its_bytes() {
        let mut history = History::new(vec![1; 1000]);
        history.change(vec![1; 3000], false);
        let mut found = vec![1; 3000];
        assert!(history.allows(&found).is_ok());
        found[2048..2560].fill(0);
        assert!(history.allows(&found).is_err());
    }

    #[test]
    fn behind_a_shorter_end_there_may_be_zeros_while_the_old_size_stands() {
        let mut history = History::new(vec![1; 3926]);
        history.change(vec![1; 2701], true);
        let mut longer = vec![1; 2701];
        longer.extend([2; 8]);
        history.change(longer.clone(), false);
        longer.resize(3926, 0);
        assert!(history.allows(&longer).is_ok());
        history.durable();
        assert!(history.allows(&longer).is_err());
    }

    /// What single calls had written behind a transaction that is not there excused all that the transaction itself had written.
    #[test]
    fn behind_a_transaction_that_is_not_there_only_blocks_of_before_are_written_over() {
        let (page, old) = (BLOCK_SIZE, vec![1; 3 * BLOCK_SIZE]);
        let mut history = History::new(old.clone());
        let mut transacted = old.clone();
        transacted[page..page + 100].fill(2);
        history.change(transacted.clone(), false);
        let mut over = transacted.clone();
        over[..10].fill(3);
        over[page + 1000..page + 1010].fill(3);
        over.resize(4 * BLOCK_SIZE, 3);
        history.change(over.clone(), false);
        assert!(history.allows(&over).is_ok());
        let left = history.without(&[1]).unwrap();
        assert!(left.allows(&old).is_ok());
        let mut found = old.clone();
        found[..10].fill(3);
        assert!(left.allows(&found).is_ok(), "this block was there before");
        assert!(left.allows(&over).is_err(), "its size comes later");
        assert!(left.allows(&transacted).is_err());
        found[page + 1000..page + 1010].fill(3);
        assert!(left.allows(&found).is_err(), "that block is not the file's");
        let mut longer = transacted;
        longer.truncate(2 * page + 5);
        history.change(longer, true);
        let left = history.without(&[1]).unwrap();
        let mut found = old;
        found[2 * page + 5..].fill(0);
        assert!(left.allows(&found).is_ok(), "zeros behind an end");
        assert!(left.allows(&found[..2 * page + 5]).is_err());
        assert!(history.without(&[0]).is_none());
    }

    #[test]
    fn a_rewritten_file_is_old_or_new() {
        let mut history = History::new(vec![1; 3000]);
        history.cut_to_nothing(true);
        history.change(vec![2; 2000], false);
        assert!(history.allows(&[1; 3000]).is_ok());
        assert!(
            history.allows(&[2; 2000]).is_err(),
            "nothing was written back"
        );
        history.write_back();
        assert!(history.allows(&[2; 2000]).is_ok());
        assert!(history.allows(&[]).is_err());
        let mut mixed = vec![2; 2000];
        mixed[..512].fill(1);
        assert!(history.allows(&mixed).is_err());
    }
}
