//! Repair: whatever is damaged, afterwards the check finds nothing, what could be read before can
//! be read still, what is lost is named, and a power cut at any moment changes none of that.
//!
//! `SHEAF_IMAGES=N` repairs N randomly damaged images, `SHEAF_SEED` chooses others,
//! `SHEAF_IMAGE=I` repeats one of them.

use crate::images::*;
use base::rng::Rng;
use device::sim::{PowerSwitch, SimDevice, Times};
use engine::Object;
use format::checkpoint::CheckpointRecord;
use format::item::{ItemHeader, ItemKind};
use format::journal::BatchHeader;
use format::label::{HEAD_BLOCKS, TAIL_BLOCKS};
use format::{BLOCK_SIZE, COUNTER_MAX, Nid, U64};
use fs::FileSystem;
use fs::content::{Body, FsNode};
use fs::fsck::FsckOptions;
use fs::fsck::repair::{Action, ActionKind, Outcome, RepairOptions, RepairReport, repair};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use zerocopy::IntoBytes;

fn count(default: u64) -> u64 {
    number("SHEAF_IMAGES").unwrap_or(default)
}

pub fn repair_options(dry_run: bool) -> RepairOptions {
    RepairOptions {
        check: FsckOptions {
            cache_bytes: 1 << 20,
            workers: 1,
            hash_mask: None,
        },
        dry_run,
        lossless: false,
        clock: clock(),
    }
}

pub fn try_repair(devices: &[Arc<SimDevice>], dry_run: bool) -> Result<RepairReport, fs::Error> {
    let array = assemble(devices, dry_run).map_err(engine::Error::from)?;
    repair(&array, &repair_options(dry_run), &|_| {})
}

/// Every path with what is there; everything must be readable.
pub fn walk(fs: &FileSystem, context: &str) -> BTreeMap<Vec<u8>, Thing> {
    let mut found = BTreeMap::new();
    let mut todo = vec![(Vec::new(), fs::ROOT)];
    while let Some((path, dir)) = todo.pop() {
        let mut names = Vec::new();
        let listed = fs.readdir(dir, 0, &mut |entry| {
            if entry.name != b"." && entry.name != b".." {
                names.push((entry.name.to_vec(), entry.ino));
            }
            true
        });
        listed.unwrap_or_else(|e| panic!("{context}: {path:?}: {e}"));
        for (name, ino) in names {
            let path = [&path[..], b"/", &name].concat();
            let thing = thing_of(fs, ino);
            let thing = thing.unwrap_or_else(|e| panic!("{context}: {path:?}: {e}"));
            if thing == Thing::Dir {
                todo.push((path.clone(), ino));
            }
            let marks = fs
                .listxattr(ino)
                .and_then(|_| fs.getxattr(ino, b"user.mark"));
            match marks {
                Ok(_) | Err(fs::Error::NoAttribute) => {}
                Err(error) => panic!("{context}: attributes of {path:?}: {error}"),
            }
            assert!(found.insert(path, thing).is_none(), "{context}");
        }
    }
    found
}

fn thing_of(fs: &FileSystem, ino: Nid) -> Result<Thing, fs::Error> {
    let attr = fs.getattr(ino)?;
    Ok(match attr.mode & libc::S_IFMT {
        libc::S_IFDIR => Thing::Dir,
        libc::S_IFLNK => Thing::Link(fs.readlink(ino)?),
        libc::S_IFREG => {
            let file = fs.open_file(ino, libc::O_RDONLY)?;
            // A forged size is anything; what is compared is no longer than this.
            let mut bytes = vec![0; (attr.size as usize).min(8 << 20)];
            let mut at = 0;
            while at < bytes.len() {
                match fs.read(&file, at as u64, &mut bytes[at..])? {
                    0 => break,
                    n => at += n,
                }
            }
            Thing::File(bytes)
        }
        _ => Thing::File(Vec::new()),
    })
}

/// Paths that can be read, and are as they were written; `None`: it does not even open.
fn readable(image: &Image, devices: &[Arc<SimDevice>]) -> Option<BTreeSet<Vec<u8>>> {
    let fs = open(devices, true).ok()?;
    let whole = |path: &[u8], thing: &Thing| {
        let at = path.iter().rposition(|b| *b == b'/').unwrap();
        let dir = fs.resolve(&path[..at]).ok()?;
        let attr = fs.lookup(dir.ino, &path[at + 1..]).ok()?;
        (thing_of(&fs, attr.ino).ok()? == *thing).then_some(())
    };
    let things = image.model.things.iter();
    let whole = things.filter(|(path, thing)| whole(path, thing).is_some());
    Some(whole.map(|(path, _)| path.clone()).collect())
}

/// An action names this path, or a directory above it.
fn is_named(actions: &[Action], path: &[u8]) -> bool {
    let text = String::from_utf8_lossy(path);
    actions.iter().any(|action| {
        action.path.as_deref().is_some_and(|named| {
            named == text || named == "/" || text.starts_with(&format!("{named}/"))
        })
    })
}

/// Part of the journal or of the table, or both copies of a record, are gone, so nobody knows
/// the names.
fn lost_without_names(actions: &[Action]) -> bool {
    actions.iter().any(|action| {
        action.what.contains("what came after the other is lost")
            || action.lost
                && matches!(
                    action.object,
                    Object::Journal
                        | Object::LeafPage(_)
                        | Object::RegionPage(_)
                        | Object::Table
                        | Object::Store
                )
    })
}

/// What became of the files of one image.
#[derive(Debug, Default)]
struct Tally {
    images: u64,
    sound: u64,
    repaired: u64,
    kept: u64,
    found: u64,
    changed: u64,
    lost: u64,
    cuts: u64,
}

impl Tally {
    /// Of many images a good part had to be repaired, and where power was cut, also within a repair.
    fn check(&self, cuts: bool) {
        if number("SHEAF_IMAGE").is_some() {
            return;
        }
        let (repaired, cut) = match cuts {
            // What a repair that was cut off has mended is sound.
            true => (self.images / 10, self.images / 3),
            false => (self.images / 3, 0),
        };
        assert!(self.repaired > repaired, "{self:?}");
        assert!(self.cuts > cut || !cuts, "{self:?}");
        assert!(self.kept > 0, "{self:?}");
    }
}

struct Trial<'t> {
    image: &'t Image,
    /// Nodes were changed with right checksums: what they say is taken for true.
    forged: bool,
    context: String,
}

impl Trial<'_> {
    /// Everything that must hold after a repair.
    fn check(
        &self,
        devices: &[Arc<SimDevice>],
        before: Option<&BTreeSet<Vec<u8>>>,
        report: &RepairReport,
        tally: &mut Tally,
    ) {
        let context = &self.context;
        let after = fsck(devices);
        assert_eq!(after.findings, [], "{context}: {:#?}", report.actions);
        let fs = open(devices, false).unwrap_or_else(|e| panic!("{context}: {e}"));
        let now = walk(&fs, context);
        let elsewhere: BTreeSet<&Thing> = now
            .iter()
            .filter(|(path, _)| path.starts_with(b"/lost+found/"))
            .map(|(_, thing)| thing)
            .collect();
        for (path, thing) in &self.image.model.things {
            let shown = String::from_utf8_lossy(path);
            let named = is_named(&report.actions, path);
            let whole_before = before.is_some_and(|before| before.contains(path));
            if now.get(path) == Some(thing) {
                tally.kept += 1;
                continue;
            }
            let found = *thing != Thing::Dir && elsewhere.contains(thing);
            assert!(
                !whole_before || (self.forged && named),
                "{context}: {shown} could be read before; {:#?}",
                report.actions
            );
            if found {
                tally.found += 1;
                continue;
            }
            let last = self.image.last.as_ref() == Some(path);
            assert!(
                named || last || self.forged || lost_without_names(&report.actions),
                "{context}: {shown} is {}, and not named: {:#?}",
                match now.contains_key(path) {
                    true => "changed",
                    false => "lost",
                },
                report.actions
            );
            match now.contains_key(path) {
                true => tally.changed += 1,
                false => tally.lost += 1,
            }
        }
        for path in now.keys() {
            let known = self.image.model.things.contains_key(path)
                || path.starts_with(b"/lost+found")
                || self.forged;
            assert!(known, "{context}: {path:?} came from nowhere");
        }
        let who = fs::Caller::root();
        match fs.mkdir(&who, fs::ROOT, b"after", 0o755) {
            Ok(_) => fs.rmdir(&who, fs::ROOT, b"after").unwrap(),
            // A forged extent can have all that was free.
            Err(fs::Error::NoSpace) if self.forged => {}
            Err(error) => panic!("{context}: {error}: {:#?}", report.actions),
        }
        fs.close().unwrap();
        drop(fs);
        assert_eq!(fsck(devices).findings, [], "{context}: after use");
    }

    /// Repairs, with or without power cuts on the way, and checks what comes out.
    fn run(&self, devices: Vec<Arc<SimDevice>>, cuts: bool, rng: &mut Rng, tally: &mut Tally) {
        let context = &self.context;
        let before = readable(self.image, &devices);
        tally.images += 1;
        let switch = PowerSwitch::new();
        let mut devices: Vec<Arc<SimDevice>> = match cuts {
            true => devices.iter().map(|d| d.fork(&switch)).collect(),
            false => devices,
        };
        let planned = match cuts || rng.one_in(8) {
            true => Some(try_repair(&devices, true).unwrap()),
            false => None,
        };
        let decided = switch.operations();
        let ends = if cuts { operations(&devices) } else { 0 };
        while cuts && rng.one_in(2) {
            // Most of the time while it writes.
            let from = if rng.one_in(4) { 0 } else { decided };
            switch.restore();
            switch.cut_after(from + rng.below((ends - from).max(1)));
            // Whether it came to its end, nobody knows.
            drop(try_repair(&devices, false));
            tally.cuts += switch.is_cut() as u64;
            switch.cut_now();
            devices = devices.iter().map(|d| d.restart(rng)).collect();
            switch.restore();
            let after = readable(self.image, &devices);
            if let (Some(before), Some(after)) = (&before, &after) {
                assert!(
                    self.forged || after.is_superset(before),
                    "{context}: after a cut"
                );
            }
        }
        let mut report = try_repair(&devices, false).unwrap_or_else(|e| panic!("{context}: {e}"));
        let refused = matches!(report.outcome, Outcome::Refused { .. });
        assert!(
            !refused,
            "{context}: {:?}: {:#?}",
            report.outcome, report.actions
        );
        if let Some(planned) = planned {
            let text = |r: &RepairReport| -> Vec<String> {
                r.actions.iter().map(ToString::to_string).collect()
            };
            match cuts {
                // An interrupted one may have done it, and nobody saw its report.
                true => report.actions.extend(planned.actions),
                false => assert_eq!(text(&planned), text(&report), "{context}: what was planned"),
            }
        }
        match report.outcome {
            Outcome::Sound => tally.sound += 1,
            _ => tally.repaired += 1,
        }
        self.check(&devices, before.as_ref(), &report, tally);
        let again = try_repair(&devices, false).unwrap();
        assert_eq!(
            again.outcome,
            Outcome::Sound,
            "{context}: {:#?}",
            again.actions
        );
    }
}

/// Operations that a repair takes.
fn operations(devices: &[Arc<SimDevice>]) -> u64 {
    let switch = PowerSwitch::new();
    let copies: Vec<_> = devices.iter().map(|d| d.fork(&switch)).collect();
    try_repair(&copies, false).unwrap();
    switch.operations()
}

/// Flips a bit in an item of some kind.
pub fn hit(image: &Image, devices: &[Arc<SimDevice>], rng: &mut Rng) -> String {
    let items = items(image);
    let kind = *rng.pick(&[
        ItemKind::Node,
        ItemKind::TableLeaf,
        ItemKind::TableRegion,
        ItemKind::TableMap,
        ItemKind::SpacePage,
        ItemKind::SpaceRoot,
    ]);
    let mut of_kind = items.iter().filter(|(_, _, h)| h.kind == kind as u8);
    let total = of_kind.clone().count() as u64;
    let Some((index, offset, header)) = of_kind.nth(rng.below(total.max(1)) as usize) else {
        return format!("no {kind:?}");
    };
    let at = offset + rng.below(ItemHeader::SIZE as u64 + header.len.get() as u64);
    flip(&devices[*index], at, rng);
    format!("{kind:?} {} hit", header.id)
}

fn flip(device: &SimDevice, at: u64, rng: &mut Rng) {
    let mut byte = [0];
    device.peek(at, &mut byte);
    device.poke(at, &[byte[0] ^ 1 << rng.below(8)]);
}

/// Places of label and slot copies: device and block.
pub fn copies() -> [(usize, u64); 8] {
    let (last, tail) = (
        DEVICE_BYTES / BLOCK - 1,
        DEVICE_BYTES / BLOCK - TAIL_BLOCKS + 13,
    );
    [
        (0, 0),
        (0, last),
        (1, 0),
        (1, last),
        (0, 1),
        (0, 2),
        (1, tail),
        (1, tail + 1),
    ]
}

fn random_repairs(image: &Image, seed: u64, images: u64, cuts: bool) -> Tally {
    let nodes = nodes(image);
    let mut tally = Tally::default();
    let only = number("SHEAF_IMAGE");
    for i in only.map_or(0..images, |i| i..i + 1) {
        let mut rng = Rng::new(seed.wrapping_mul(1 << 32).wrapping_add(i));
        let devices = image.devices();
        let mut forged = false;
        let mut what = Vec::new();
        for _ in 0..1 + rng.below(3) {
            what.push(match rng.below(8) {
                0..=3 => {
                    let (index, block) = *rng.pick(&image.targets);
                    let done = corrupt(&devices[index], block, image, &mut rng);
                    format!("{done} of device {index}")
                }
                4 | 5 => hit(image, &devices, &mut rng),
                6 => {
                    forged = true;
                    forge(&devices, &nodes, &mut rng)
                }
                _ => {
                    // Two of a label would be the end of it.
                    let copies = copies();
                    let (device, block) = copies[rng.below(6) as usize + 2];
                    flip(&devices[device], block * BLOCK + rng.below(BLOCK), &mut rng);
                    format!("block {block} of device {device} hit")
                }
            });
        }
        if assemble(&devices, true).is_err() {
            continue;
        }
        let trial = Trial {
            image,
            forged,
            context: format!("seed {seed}, image {i}: {}", what.join("; ")),
        };
        trial.run(devices, cuts, &mut rng, &mut tally);
    }
    eprintln!("seed {seed}: {tally:?}");
    tally
}

/// Damages every image of a kind whose id is `wanted`, or all of them.
fn break_items(image: &Image, devices: &[Arc<SimDevice>], kind: ItemKind, wanted: Option<u64>) {
    for (index, offset, header) in items(image) {
        let this = wanted.is_none_or(|id| header.id.get() == id);
        if header.kind == kind as u8 && this {
            flip(&devices[index], offset + 40, &mut Rng::new(offset));
        }
    }
}

/// Repairs, checks everything, and returns the report and what became of the files.
fn repaired(image: &Image, devices: &[Arc<SimDevice>], context: &str) -> (RepairReport, Tally) {
    let before = readable(image, devices);
    let report = try_repair(devices, false).unwrap();
    assert_eq!(report.outcome, Outcome::Repaired, "{:#?}", report.actions);
    let mut tally = Tally::default();
    let trial = Trial {
        image,
        forged: false,
        context: context.into(),
    };
    trial.check(devices, before.as_ref(), &report, &mut tally);
    (report, tally)
}

type Damage<'d> = dyn Fn(&[Arc<SimDevice>]) + 'd;

/// What is derived, and what can be found by its checksum, is made anew: nothing is lost.
#[test]
fn no_file_is_lost_with_a_table() {
    for image in [clean_image(), dirty_image()] {
        lose_tables_of(&image);
    }
}

fn lose_tables_of(image: &Image) {
    let slots = |devices: &[Arc<SimDevice>]| {
        for (device, block) in &copies()[4..] {
            devices[*device].poke(block * BLOCK + 100, &[0xEE; 8]);
        }
    };
    let damages: [(&str, &Damage); 9] = [
        ("leaf page", &|d| {
            break_items(image, d, ItemKind::TableLeaf, Some(1))
        }),
        ("leaf pages", &|d| {
            break_items(image, d, ItemKind::TableLeaf, None)
        }),
        ("region page", &|d| {
            break_items(image, d, ItemKind::TableRegion, Some(0))
        }),
        ("map pages", &|d| {
            break_items(image, d, ItemKind::TableMap, None)
        }),
        ("space pages", &|d| {
            break_items(image, d, ItemKind::SpacePage, None)
        }),
        ("space root", &|d| {
            break_items(image, d, ItemKind::SpaceRoot, None)
        }),
        ("table and space", &|d| {
            break_items(image, d, ItemKind::TableRegion, None);
            break_items(image, d, ItemKind::SpaceRoot, None);
        }),
        ("space maps", &|d| {
            for chunk in 0..1000 {
                let nid = format::table::space_map_nid(chunk).0;
                break_items(image, d, ItemKind::Node, Some(nid));
            }
        }),
        ("checkpoint records", &slots),
    ];
    for (what, damage) in damages {
        let devices = image.devices();
        damage(&devices);
        let (report, tally) = repaired(image, &devices, what);
        let all = image.model.things.len() as u64;
        assert_eq!(tally.kept, all, "{what}: {tally:?}: {:#?}", report.actions);
        // What was found is what was there: its checksums say so.
        let certain = [
            "region page",
            "map pages",
            "space pages",
            "space root",
            "space maps",
        ];
        let nothing = !report.lost();
        assert!(
            nothing || !certain.contains(&what),
            "{what}: {:#?}",
            report.actions
        );
    }
}

/// Places of both copies of the newest checkpoint record: device and block.
pub fn newest_record(image: &Image) -> [(usize, u64); 2] {
    let array = assemble(&image.devices(), true).unwrap();
    let sequence = |slot| {
        let block = array.read_slot(slot, 0).unwrap();
        let record = CheckpointRecord::parse(&block, &array.uuid());
        record.map_or(0, |record| record.sequence.get())
    };
    let newest = (sequence(1) > sequence(0)) as usize;
    [copies()[4 + newest], copies()[6 + newest]]
}

#[test]
fn a_lost_checkpoint_record_costs_at_most_what_the_journal_has_no_more() {
    let image = dirty_image();
    let devices = image.devices();
    for (device, block) in newest_record(&image) {
        devices[device].poke(block * BLOCK + 100, &[0xEE; 8]);
    }
    assert!(
        open(&devices, false).is_err(),
        "the journal names the lost record"
    );
    let (report, tally) = repaired(&image, &devices, "newest record");
    assert!(report.lost());
    assert!(
        tally.kept > image.model.things.len() as u64 / 2,
        "{tally:?}"
    );
}

/// Its number was taken, the next checkpoint's by nobody, and with that both slots were gone.
#[test]
fn a_forged_record_that_nothing_can_follow_is_none() {
    let image = clean_image();
    let devices = image.devices();
    let array = assemble(&devices, false).unwrap();
    let slot = |slot| {
        let block = array.read_slot(slot, 0).unwrap();
        CheckpointRecord::parse(&block, &array.uuid()).unwrap()
    };
    let (mut record, other) = (slot(0), slot(1));
    let older = record.sequence.get() < other.sequence.get();
    record.sequence = U64::new(COUNTER_MAX);
    record.seal();
    array.write_slot(0, record.as_bytes()).unwrap();
    drop(array);
    for _ in 0..2 {
        let fs = open(&devices, false).unwrap();
        if older {
            assert!(image.model.compare(&fs, None, "forged record").is_empty());
        }
        fs.close().unwrap();
    }
    assert_eq!(fsck(&devices).findings, []);
}

/// A device lost a checkpoint's record: nothing stands where one must, and nobody said so.
#[test]
fn an_empty_slot_is_noticed_once_there_must_be_a_record() {
    let image = clean_image();
    let devices = image.devices();
    let newest = newest_record(&image);
    let slots = copies().into_iter().skip(4);
    for (device, block) in slots.filter(|copy| !newest.contains(copy)) {
        devices[device].poke(block * BLOCK, &[0; BLOCK_SIZE]);
    }
    let report = fsck(&devices);
    assert!(report.is_sound());
    let slot = |finding: &fs::fsck::Finding| matches!(finding.object, Object::Slot { .. });
    assert_eq!(report.findings.len(), 2, "{:?}", report.findings);
    assert!(report.findings.iter().all(slot), "{:?}", report.findings);
    let (report, tally) = repaired(&image, &devices, "empty slot");
    assert!(!report.lost());
    assert_eq!(tally.kept, image.model.things.len() as u64);
}

/// All metadata of the last mount is lost but the record of its end. A repair that may lose nothing went back to the mount before.
#[test]
fn a_repair_that_may_lose_nothing_does_not_go_back_to_an_older_state() {
    let (devices, mut model) = build();
    let array = assemble(&devices, true).unwrap();
    let before = image(&devices, model.clone(), None);
    let fs = open(&devices, false).unwrap();
    model.add(&fs, "/later", Thing::Dir);
    for i in 0..300 {
        let content = format!("later {i}").into_bytes();
        model.add(&fs, &format!("/later/{i}"), Thing::File(content));
    }
    fs.close().unwrap();
    drop(fs);
    // The ring stays, as do labels and slots.
    let mut ring = BTreeSet::new();
    let geometry = array.geometry();
    for byte in (0..geometry.journal_bytes()).step_by(BLOCK_SIZE) {
        let start = geometry.journal_start.byte() + byte;
        geometry.pieces(start, BLOCK_SIZE, |piece| {
            ring.insert((piece.device, piece.offset / BLOCK));
        });
    }
    let mut bytes = vec![0; BLOCK_SIZE];
    for (index, old) in before.devices().iter().enumerate() {
        for number in HEAD_BLOCKS..DEVICE_BYTES / BLOCK - TAIL_BLOCKS {
            if !ring.contains(&(index, number)) {
                old.peek(number * BLOCK, &mut bytes);
                devices[index].poke(number * BLOCK, &bytes);
            }
        }
    }
    let lossless = RepairOptions {
        lossless: true,
        ..repair_options(false)
    };
    let hashes = || -> Vec<u64> { devices.iter().map(|d| d.contents_hash()).collect() };
    let damaged = hashes();
    let refused = repair(&assemble(&devices, false).unwrap(), &lossless, &|_| {}).unwrap();
    assert!(
        matches!(refused.outcome, Outcome::Refused { .. }),
        "{:#?}",
        refused.actions
    );
    assert_eq!(hashes(), damaged);
    let report = try_repair(&devices, false).unwrap();
    assert_eq!(report.outcome, Outcome::Repaired);
    assert!(report.lost());
    assert_eq!(fsck(&devices).findings, []);
    let fs = open(&devices, true).unwrap();
    assert!(
        before
            .model
            .compare(&fs, None, "the mount before")
            .is_empty()
    );
}

#[test]
fn a_damaged_batch_cuts_the_journal_there() {
    let image = dirty_image();
    let devices = image.devices();
    let half = format!("/journal/{}", JOURNALED / 2);
    // The record of a creation holds the name's bytes.
    let mut block = vec![0; BLOCK as usize];
    let text = format!("content {}", JOURNALED / 2);
    for (index, number) in &image.targets {
        devices[*index].peek(number * BLOCK, &mut block);
        let at = block.windows(text.len()).position(|w| w == text.as_bytes());
        if let (Some(at), true) = (at, block[..4] == *b"SHFJ") {
            flip(
                &devices[*index],
                number * BLOCK + at as u64,
                &mut Rng::new(1),
            );
        }
    }
    assert!(
        open(&devices, false).is_err(),
        "a later batch says that it was durable"
    );
    let (report, _) = repaired(&image, &devices, "batch");
    let cut = report.actions.iter().find(|a| a.object == Object::Journal);
    assert!(cut.unwrap().lost, "{:#?}", report.actions);
    let fs = open(&devices, true).unwrap();
    assert!(fs.resolve(half.as_bytes()).is_err());
    fs.resolve(b"/journal/1").unwrap();
    fs.resolve(b"/many/file number 7").unwrap();
}

/// The next mount's number was a sum that overflowed.
#[test]
fn a_forged_batch_that_nothing_can_follow_is_not_counted() {
    let image = dirty_image();
    for number in [COUNTER_MAX, u64::MAX] {
        let devices = image.devices();
        {
            let array = assemble(&devices, false).unwrap();
            let mut bytes = vec![0; BLOCK as usize];
            bytes[..4].copy_from_slice(b"SHFJ");
            bytes[16..32].copy_from_slice(&array.uuid());
            // Mount, sequence number, epoch.
            for at in [32, 40, 48] {
                bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
            }
            let crc = format::checksum(array.checksum_seed(), &bytes[8..BatchHeader::SIZE]);
            bytes[4..8].copy_from_slice(&crc.to_le_bytes());
            let geometry = array.geometry();
            let last = geometry.journal_start.byte() + geometry.journal_bytes() - BLOCK;
            let written = array.write(last, &bytes, device::Durability::Durable);
            written.unwrap();
        }
        let root = Some(fs::ROOT.0);
        break_items(&image, &devices, ItemKind::Node, root);
        let (report, tally) = repaired(&image, &devices, "forged batch");
        assert!(tally.found > 0, "{tally:?}: {:#?}", report.actions);
    }
}

/// A value of an attribute was taken for a batch of a later mount, and nothing opened any more.
#[test]
fn what_a_user_writes_is_no_batch() {
    let (devices, _) = build();
    let array = assemble(&devices, false).unwrap();
    let mut batch = vec![0; BatchHeader::SIZE];
    batch[..4].copy_from_slice(b"SHFJ");
    batch[16..32].copy_from_slice(&array.uuid());
    // Of mount 2^40, which names checkpoint 2^40.
    (batch[37], batch[69]) = (1, 1);
    let crc = format::checksum(0, &batch[8..]);
    batch[4..8].copy_from_slice(&crc.to_le_bytes());
    let geometry = array.geometry();
    let last = geometry.journal_start.byte() + geometry.journal_bytes() - BLOCK;
    batch.resize(BLOCK as usize, 0);
    let written = array.write(last, &batch, device::Durability::Durable);
    written.unwrap();
    drop(array);
    assert!(open(&devices, true).is_ok());
    assert!(fsck(&devices).is_sound());
}

#[test]
fn what_replay_needs_and_is_damaged_no_longer_keeps_the_rest_from_opening() {
    let image = dirty_image();
    let devices = image.devices();
    let ino = open(&devices, true).unwrap().resolve(b"/fs").unwrap().ino;
    break_items(&image, &devices, ItemKind::Node, Some(ino.0));
    assert!(open(&devices, false).is_err());
    let (report, tally) = repaired(&image, &devices, "replay");
    assert!(tally.found > 5, "{tally:?}");
    let dropped = report
        .actions
        .iter()
        .find(|a| a.object == Object::Node(ino));
    assert_eq!(dropped.unwrap().path.as_deref(), Some("/fs"));
}

/// While these sectors of 512 bytes cannot be read nothing is repaired, nor written.
fn is_left_alone_without(devices: &[Arc<SimDevice>], sectors: &[(usize, u64)]) {
    let hashes = || -> Vec<u64> { devices.iter().map(|d| d.contents_hash()).collect() };
    let before = hashes();
    for (index, offset) in sectors {
        let start = offset / 512 * 512;
        devices[*index].fail_reads(Times::Always, Some(start..start + 512));
    }
    let report = try_repair(devices, false).unwrap();
    let Outcome::Refused { remedy, .. } = &report.outcome else {
        panic!("{:?}: {:#?}", report.outcome, report.actions);
    };
    assert!(remedy.contains("ddrescue"), "{remedy}");
    assert_eq!(hashes(), before);
    devices.iter().for_each(|device| device.heal());
}

/// A bad sector is another matter than bad bytes: they may be read tomorrow.
#[test]
fn what_a_device_does_not_return_is_not_given_up() {
    let image = clean_image();
    let (index, offset, _, _) = nodes(&image)[20];
    let devices = image.devices();
    is_left_alone_without(&devices, &[(index, offset)]);
    assert_eq!(try_repair(&devices, false).unwrap().outcome, Outcome::Sound);
}

/// The repair went back to the record before, and gave up all that came after it.
#[test]
fn a_newest_record_that_cannot_be_read_now_is_not_given_up() {
    let image = dirty_image();
    let devices = image.devices();
    let sectors = newest_record(&image).map(|(device, block)| (device, block * BLOCK));
    is_left_alone_without(&devices, &sectors);
    let report = try_repair(&devices, false).unwrap();
    assert_eq!(report.outcome, Outcome::Sound, "{:#?}", report.actions);
}

/// The power goes after a sync for whose data the journal vouches, and a device does not return some of that. Nobody knows whether it
/// is what was synced: no mount says so, and a repair tells it and gives nothing up.
#[test]
fn synced_data_that_a_device_does_not_return_is_named_and_kept() {
    let (devices, mut model) = build();
    let fs = open(&devices, false).unwrap();
    let content = vec![7; 5 * BLOCK_SIZE];
    let ino = model.add(&fs, "/fs/synced", Thing::File(content));
    fs.fsync_inode(ino, true).unwrap();
    let inode = fs.store().get(ino).unwrap();
    let blocks = match &*inode.read().unwrap() {
        FsNode::Inode(inode) => match &inode.body {
            Body::Extents(list) => list[0].block,
            other => panic!("{other:?}"),
        },
        _ => panic!("no inode"),
    };
    let copies: Vec<_> = devices.iter().map(|d| d.clone_state(1)).collect();
    let image = image(&copies, model, None);
    let array = assemble(&image.devices(), true).unwrap();
    let mut place = None;
    let geometry = array.geometry();
    geometry.pieces(blocks.byte(), BLOCK_SIZE, |piece| {
        place = Some((piece.device, piece.offset));
    });
    let (index, offset) = place.unwrap();
    let devices = image.devices();
    devices[index].fail_reads(Times::Always, Some(offset..offset + 512));
    let opened = open(&devices, false).map(|_| ());
    assert!(matches!(
        opened,
        Err(fs::Error::Store(engine::Error::Unread(_)))
    ));
    assert_eq!(
        open(&devices, true)
            .unwrap()
            .resolve(b"/fs/synced")
            .unwrap()
            .ino,
        ino
    );
    let report = try_repair(&devices, false).unwrap();
    assert_eq!(report.outcome, Outcome::Repaired, "{:#?}", report.actions);
    let [action] = &report.actions[..] else {
        panic!("{:#?}", report.actions);
    };
    assert_eq!(action.kind, ActionKind::Doubtful);
    assert_eq!(action.path.as_deref(), Some("/fs/synced"));
    assert!(action.lost && report.lost());
    let fs = open(&devices, false).unwrap();
    let lost = image.model.compare(&fs, None, "unreadable");
    assert_eq!(lost.len(), 1, "{lost:?}");
    drop(fs);
    devices.iter().for_each(|d| d.heal());
    let fs = open(&devices, false).unwrap();
    assert!(image.model.compare(&fs, None, "readable again").is_empty());
}

#[test]
fn a_full_array_can_be_repaired() {
    let (devices, model) = build();
    let fs = open(&devices, false).unwrap();
    let who = fs::Caller::root();
    let (_, file) = fs
        .create(&who, fs::ROOT, b"all", 0o644, libc::O_RDWR)
        .unwrap();
    let piece = vec![0x77; 1 << 20];
    let mut at = 0;
    let full = loop {
        match fs.write(&file, at, &piece) {
            Ok(n) => at += n as u64,
            Err(error) => break error,
        }
        if at.is_multiple_of(8 << 20)
            && let Err(error) = fs.fsync(&file, false)
        {
            break error;
        }
    };
    assert_eq!(full.errno(), libc::ENOSPC, "{full}");
    drop(file);
    let make = |i: u32| {
        let name = format!("{i:0200}");
        let regular = libc::S_IFREG | 0o644;
        fs.mknod(&who, fs::ROOT, name.as_bytes(), regular, 0)
    };
    let full = (0..20_000).find_map(|i| make(i).err());
    assert_eq!(full.expect("some name does not fit").errno(), libc::ENOSPC);
    fs.close().unwrap();
    drop(fs);
    let full = image(&devices, model, None);
    let devices = full.devices();
    let many = open(&devices, true).unwrap().resolve(b"/many").unwrap().ino;
    break_items(&full, &devices, ItemKind::Node, Some(many.0));
    break_items(&full, &devices, ItemKind::TableLeaf, Some(2));
    let before = readable(&full, &devices);
    let report = try_repair(&devices, false).unwrap();
    assert_eq!(report.outcome, Outcome::Repaired, "{:#?}", report.actions);
    assert_eq!(fsck(&devices).findings, []);
    assert!(before.is_some());
    let fs = open(&devices, false).unwrap();
    let found = fs.resolve(b"/lost+found").unwrap();
    assert!(found.size >= 300, "{found:?}");
}

/// Only some findings are kept, here a few; and so many in each round were mended, in as many rounds as there may be. Names of a million lost files in as many
/// folders were too much, and the repair refused.
#[test]
fn more_is_mended_than_findings_are_kept_of() {
    const FOLDERS: u64 = 600;
    let devices = make(&[DEVICE_BYTES; DEVICES]);
    let fs = open(&devices, false).unwrap();
    let mut model = Model::default();
    let mut lost = BTreeSet::new();
    for i in 0..FOLDERS {
        model.add(&fs, &format!("/{i}"), Thing::Dir);
        let path = format!("/{i}/lost");
        lost.insert(model.add(&fs, &path, Thing::File(vec![1; 10])));
    }
    fs.close().unwrap();
    let image = image(&devices, model, None);
    let devices = image.devices();
    for (index, offset, nid, _) in nodes(&image) {
        if lost.contains(&nid) {
            devices[index].poke(offset + 40, &[0xEE; 4]);
        }
    }
    base::tight::set(true);
    let report = try_repair(&devices, false);
    base::tight::set(false);
    let report = report.unwrap();
    assert_eq!(report.outcome, Outcome::Repaired, "{:#?}", report.actions);
    assert!(report.before.findings.len() < 64);
    assert_eq!(fsck(&devices).findings, []);
    let fs = open(&devices, false).unwrap();
    assert_eq!(walk(&fs, "mended").len() as u64, FOLDERS);
}

#[test]
fn random_damage_of_a_clean_image_is_repaired() {
    random_repairs(&clean_image(), seed(11), count(120) / 4, false).check(false);
}

#[test]
fn random_damage_of_a_dirty_image_is_repaired() {
    random_repairs(&dirty_image(), seed(12), count(120) / 4, false).check(false);
}

#[test]
fn a_power_cut_during_a_repair_of_a_clean_image_is_harmless() {
    random_repairs(&clean_image(), seed(13), count(120) / 4, true).check(true);
}

#[test]
fn a_power_cut_during_a_repair_of_a_dirty_image_is_harmless() {
    random_repairs(&dirty_image(), seed(14), count(120) / 4, true).check(true);
}
