//! Devices that lie, and what of that the file system cannot notice.
//!
//! A lie is a write that was reported as good and was lost, or went to another place, or bits that
//! rotted. Whatever carries a checksum is noticed, or made up for by a copy. Left are:
//!
//! 1. File data: a page of a file may hold anything if a lie touched its block. Pages are told by
//!    where the file has them when it is looked at, and by where it had them when the lie was
//!    told, since a page that was read into memory may have moved since.
//! 2. The journal's tail: batches may be missing in silence if each of them was hurt and so was
//!    every later one. The last ones are hurt, too, by a lie about data for which they vouch.
//!
//! Lies are an excuse for errors and for what `fsck` finds, unless there were none but such as harm nobody: about data of files for which no
//! batch vouches, and about an end of a device where the other copies of what is there are good.

use crate::faults::rot_end;
use crate::look::Found;
use crate::oracle::Oracle;
use crate::tree::{Id, Kind};
use crate::world::Machine;
use base::rng::Rng;
use device::sim::FaultKind;
use engine::Extent;
use format::BLOCK_SIZE;
use format::geometry::Geometry;
use format::label::{HEAD_BLOCKS, TAIL_BLOCKS};
use fs::content::{Body, FileExtent};
use fs::{FileSystem, Ino};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Pages of a file, by number.
pub type Pages = BTreeSet<u64>;

/// Pages that are not held against the file system.
#[derive(Clone, Debug, Default)]
pub struct Spared {
    /// By the number of the thing that was found.
    pub found: BTreeMap<usize, Pages>,
    /// By the model's name for the file.
    pub known: BTreeMap<Id, Pages>,
}

impl Spared {
    pub fn has(&self, id: Id, index: usize, page: u64) -> bool {
        let listed = |pages: Option<&Pages>| pages.is_some_and(|pages| pages.contains(&page));
        listed(self.found.get(&index)) || listed(self.known.get(&id))
    }
}

/// An operation that wrote batches to the journal.
#[derive(Debug)]
struct Written {
    /// What was known before it.
    before: Oracle,
    hurt: bool,
}

/// What devices have lied about since all was last known.
#[derive(Debug, Default)]
pub struct Lies {
    /// Devices, and bytes on them.
    places: Vec<(usize, Range<u64>)>,
    /// Faults of each device that were taken note of.
    noted: BTreeMap<usize, usize>,
    pages: BTreeMap<Id, Pages>,
    written: Vec<Written>,
    /// Ends of devices with copies of labels and checkpoint records that a lie touched, ever: the number of the device, and whether it is the last.
    ends: BTreeSet<(usize, bool)>,
    /// A lie touched something else than those and data of files, or data that the journal rests on.
    elsewhere: bool,
    /// A lie was told, now or before all was last known.
    ever: bool,
}

/// What is made of what is found on devices that lie.
#[derive(Debug)]
pub enum Judged {
    /// It is as it should be.
    Right(Box<Oracle>, BTreeMap<Id, usize>),
    /// The journal's tail is missing.
    Shorter,
}

impl Lies {
    pub fn ever(&self) -> bool {
        self.ever
    }

    /// An operation is over. If it wrote to the journal, `wrote` has what was known before it,
    /// and whether it failed.
    pub fn after(
        &mut self,
        machine: &Machine,
        fs: Option<&FileSystem>,
        inos: &BTreeMap<Id, Ino>,
        wrote: Option<(Oracle, bool)>,
    ) {
        let first = self.places.len();
        let (mut lost, mut damaged) = (false, false);
        let vouched = fs.map(|fs| fs.store().vouched());
        for (index, device) in machine.devices.iter().enumerate() {
            let struck = device.struck();
            let noted = self.noted.insert(index, struck.len()).unwrap_or(0);
            for lie in &struck[noted.min(struck.len())..] {
                let journal = machine.in_journal(index, &lie.range);
                let geometry = machine.shape.geometry();
                let meets = |run: &Extent| meets(&geometry, *run, index, &lie.range);
                // Without a file system to ask, the power went in this operation.
                let rests = !journal && vouched.as_ref().is_none_or(|runs| runs.iter().any(meets));
                match lie.kind {
                    FaultKind::Lost => lost |= journal,
                    FaultKind::Overwritten | FaultKind::Rot => damaged |= journal,
                    _ => continue,
                }
                damaged |= rests;
                match end_of(&geometry, index, &lie.range) {
                    // A label that is old and good is taken for what it says, and its device for one that was left behind.
                    Some(false) if matches!(lie.kind, FaultKind::Lost) => self.elsewhere = true,
                    Some(last) => drop(self.ends.insert((index, last))),
                    None if journal || rests => self.elsewhere = true,
                    None => {}
                }
                self.places.push((index, lie.range.clone()));
            }
        }
        if let Some((before, failed)) = wrote {
            let hurt = lost || failed;
            self.written.push(Written { before, hurt });
        }
        if damaged {
            // Which batch is hurt is not known; the last one cannot be told from one that the
            // power cut off.
            let from = self.written.len().saturating_sub(LAST_BATCHES);
            self.written[from..].iter_mut().for_each(|w| w.hurt = true);
        }
        if self.places.len() == first {
            return;
        }
        self.ever = true;
        let Some(fs) = fs else {
            self.elsewhere = true;
            return;
        };
        let geometry = machine.shape.geometry();
        let files: BTreeSet<Ino> = inos.values().copied().collect();
        self.elsewhere |= self.places[first..].iter().any(|(device, range)| {
            end_of(&geometry, *device, range).is_none()
                && !is_in_files(machine, fs, &files, *device, range)
        });
        for (id, ino) in inos {
            let pages = pages_in(machine, fs, *ino, &self.places[first..]);
            if !pages.is_empty() {
                self.pages.entry(*id).or_default().extend(pages);
            }
        }
    }

    /// Whether an array of so many devices must open and be sound, whatever they have lied about.
    pub fn are_harmless(&self, devices: usize) -> bool {
        let hurt = |device, last| self.ends.contains(&(device, last));
        let labels = (0..devices).all(|device| !(hurt(device, false) && hurt(device, true)));
        // Copies of records are on the first two devices.
        let records = !(hurt(0, false) && hurt(1.min(devices - 1), true));
        !self.elsewhere && labels && records
    }

    /// Bits rot at one end of a device while the power is off, unless that harmed somebody.
    pub fn rot_end(&mut self, machine: &Machine, rng: &mut Rng) {
        let devices = machine.devices.len();
        let end = (rng.below(devices as u64) as usize, rng.one_in(2));
        let fresh = self.ends.insert(end);
        if self.are_harmless(devices) {
            self.ever = true;
            rot_end(&machine.devices[end.0], end.1, rng);
        } else if fresh {
            self.ends.remove(&end);
        }
    }

    fn spared(&self, machine: &Machine, fs: &FileSystem, found: &Found) -> Spared {
        let files = found.things.iter().enumerate();
        let files = files.filter(|(_, thing)| thing.kind == Kind::File);
        Spared {
            found: files
                .map(|(index, thing)| (index, pages_in(machine, fs, thing.ino, &self.places)))
                .collect(),
            known: self.pages.clone(),
        }
    }

    /// Compares what is found with what may be left.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn judge(
        &self,
        machine: &Machine,
        fs: &FileSystem,
        found: &Found,
        oracle: &Oracle,
    ) -> Result<Judged, String> {
        let spared = self.spared(machine, fs, found);
        match oracle.check_but(found, &spared) {
            Ok((oracle, pairs)) => Ok(Judged::Right(Box::new(oracle), pairs)),
            Err(what) => {
                let tail = self.written.iter().rev().take_while(|w| w.hurt);
                match tail.into_iter().any(|w| w.before.allows_names(found)) {
                    true => Ok(Judged::Shorter),
                    false if self.ever => Err(format!("a lie goes unnoticed: {what}")),
                    false => Err(what),
                }
            }
        }
    }

    /// All is known again: what was hurt has been looked at.
    pub fn forget(&mut self) {
        *self = Lies {
            ever: self.ever,
            ends: std::mem::take(&mut self.ends),
            ..Lies::default()
        };
    }
}

/// Operations whose batches one damaged place in the journal may concern.
const LAST_BATCHES: usize = 2;

/// Whether some of a run of blocks is in this range of a device.
pub fn meets(geometry: &Geometry, run: Extent, device: usize, range: &Range<u64>) -> bool {
    let mut met = false;
    geometry.pieces(run.block.byte(), run.len as usize * BLOCK_SIZE, |piece| {
        let end = piece.offset + piece.len as u64;
        met |= piece.device == device && piece.offset < range.end && range.start < end;
    });
    met
}

/// Whether a range of bytes is in the first blocks of a device (false) or the last (true), where no file is.
fn end_of(geometry: &Geometry, device: usize, range: &Range<u64>) -> Option<bool> {
    let block = BLOCK_SIZE as u64;
    let tail = (geometry.device_blocks[device] - TAIL_BLOCKS) * block;
    match range {
        range if range.end <= HEAD_BLOCKS * block => Some(false),
        range if range.start >= tail => Some(true),
        _ => None,
    }
}

/// Whether all of a range of bytes holds data of files.
fn is_in_files(
    machine: &Machine,
    fs: &FileSystem,
    files: &BTreeSet<Ino>,
    device: usize,
    range: &Range<u64>,
) -> bool {
    let geometry = machine.shape.geometry();
    let mut found = 0;
    for extent in files
        .iter()
        .flat_map(|ino| extents(fs, *ino).unwrap_or_default())
    {
        let len = extent.len as usize * BLOCK_SIZE;
        geometry.pieces(extent.block.byte(), len, |piece| {
            let (start, end) = (piece.offset, piece.offset + piece.len as u64);
            if piece.device == device {
                let shared = range.end.min(end).saturating_sub(range.start.max(start));
                found += shared;
            }
        });
    }
    found == range.end - range.start
}

/// Pages of a file whose blocks lie in one of the places. A file that cannot be read has none:
/// that is noticed elsewhere.
fn pages_in(machine: &Machine, fs: &FileSystem, ino: Ino, places: &[(usize, Range<u64>)]) -> Pages {
    let mut pages = Pages::new();
    if places.is_empty() {
        return pages;
    }
    let geometry = machine.shape.geometry();
    for extent in extents(fs, ino).unwrap_or_default() {
        let mut at = 0;
        let len = extent.len as usize * BLOCK_SIZE;
        geometry.pieces(extent.block.byte(), len, |piece| {
            for (device, range) in places {
                let start = range.start.max(piece.offset);
                let end = range.end.min(piece.offset + piece.len as u64);
                if *device == piece.device && start < end {
                    let page =
                        |byte: u64| extent.page + (at + byte - piece.offset) / BLOCK_SIZE as u64;
                    pages.extend(page(start)..=page(end - 1));
                }
            }
            at += piece.len as u64;
        });
    }
    pages
}

/// Where a file's pages are.
pub fn extents(fs: &FileSystem, ino: Ino) -> Result<Vec<FileExtent>, fs::Error> {
    let store = fs.store();
    let content = store.get(ino)?.into_read()?;
    let mut all = Vec::new();
    match &content.inode()?.body {
        Body::Extents(list) => all.extend(list),
        Body::Tree(root) if content.inode()?.is_file() => {
            fs::tree::walk(store, root, 0, |content, _| {
                all.extend(content.extents()?);
                Ok(true)
            })?;
        }
        _ => {}
    }
    Ok(all)
}
