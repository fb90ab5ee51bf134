//! What holds a checksum and is no node: labels, checkpoint records, and pages of tables. A
//! damage of one makes its checksum right again, and so those of what points at it, up to the
//! record: only then is what it says looked at.

use device::BlockDevice;
use device::sim::SimDevice;
use format::BLOCK_SIZE;
use format::checkpoint::CheckpointRecord;
use format::checksum;
use format::item::{self, ItemHeader, ItemKind};
use format::label::Label;
use std::mem::offset_of;

/// One of them, with where it stands in the image.
pub struct Sealed {
    /// Byte offset on the device.
    at: u64,
    /// In bytes, a header included.
    len: usize,
    form: Form,
    /// What the checksum of a page begins with.
    seed: u32,
    /// What points at it, and where in that its checksum is.
    parents: Vec<(usize, usize)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Label,
    Record,
    Page,
}

impl Form {
    /// Where the checksum is, and from where on bytes are damaged.
    fn offsets(self) -> (usize, usize) {
        match self {
            Form::Label => (offset_of!(Label, crc), 0),
            Form::Record => (offset_of!(CheckpointRecord, crc), 0),
            Form::Page => (offset_of!(ItemHeader, crc), ItemHeader::SIZE),
        }
    }

    fn checksum(self, seed: u32, bytes: &[u8]) -> u32 {
        let (crc, _) = self.offsets();
        match self {
            Form::Page => checksum(seed, &bytes[crc + 4..]),
            Form::Label | Form::Record => {
                let mut copy = bytes.to_vec();
                copy[crc..crc + 4].fill(0);
                checksum(0, &copy)
            }
        }
    }
}

fn read(device: &SimDevice, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    device.peek(at, &mut bytes);
    bytes
}

/// All of them in an image. `items` are the byte offsets of its items.
pub fn find(device: &SimDevice, seed: u32, items: &[u64]) -> Vec<Sealed> {
    let mut found = Vec::new();
    let mut add = |at, len, form| {
        found.push(Sealed {
            at,
            len,
            form,
            seed,
            parents: Vec::new(),
        })
    };
    for at in (0..device.bytes()).step_by(BLOCK_SIZE) {
        let block = read(device, at, BLOCK_SIZE);
        let label = Label::parse(&block).ok();
        if label.is_some() {
            add(at, BLOCK_SIZE, Form::Label);
        }
        if block.starts_with(&format::checkpoint::CHECKPOINT_MAGIC) {
            add(at, BLOCK_SIZE, Form::Record);
        }
    }
    for at in items {
        let bytes = read(device, *at, item::ITEM_MAX);
        if let Ok((header, payload)) = item::decode(seed, &bytes)
            && header.kind != ItemKind::Node as u8
        {
            add(*at, ItemHeader::SIZE + payload.len(), Form::Page);
        }
    }
    find_parents(device, &mut found);
    found
}

/// Pointers at a page hold its checksum.
fn find_parents(device: &SimDevice, found: &mut [Sealed]) {
    let all: Vec<_> = found.iter().map(|s| read(device, s.at, s.len)).collect();
    for (child, bytes) in found.iter_mut().zip(&all) {
        if child.form != Form::Page {
            continue;
        }
        for (parent, pointers) in all.iter().enumerate() {
            let words = pointers.chunks_exact(8).enumerate();
            let same = words.filter(|(_, word)| word[..4] == bytes[..4]);
            // The first word of a page is its own checksum and no pointer.
            child
                .parents
                .extend(same.filter(|(i, _)| *i > 0).map(|(i, _)| (parent, i * 8)));
        }
    }
}

/// Puts `value` at the place `at` of the one with this number.
pub fn damage(device: &SimDevice, all: &[Sealed], number: usize, at: usize, value: u8) {
    let sealed = &all[number % all.len()];
    let (_, first) = sealed.form.offsets();
    if first < sealed.len {
        let at = first + at % (sealed.len - first);
        change(device, all, sealed, at, &[value]);
    }
}

fn change(device: &SimDevice, all: &[Sealed], sealed: &Sealed, at: usize, with: &[u8]) {
    let mut bytes = read(device, sealed.at, sealed.len);
    bytes[at..at + with.len()].copy_from_slice(with);
    let crc = sealed.form.checksum(sealed.seed, &bytes).to_le_bytes();
    let (place, _) = sealed.form.offsets();
    bytes[place..place + 4].copy_from_slice(&crc);
    device.poke(sealed.at, &bytes);
    for (parent, place) in &sealed.parents {
        change(device, all, &all[*parent], *place, &crc);
    }
}

#[cfg(test)]
mod tests {
    use super::super::image::{assemble, image, options};
    use super::*;
    use fs::FileSystem;

    /// Whether the image opens once this byte of everything sealed is what `value` makes of it.
    fn opens(at: usize, value: impl Fn(u8) -> u8) -> bool {
        let image = image();
        let device = image.device();
        for (number, sealed) in image.sealed.iter().enumerate() {
            let place = sealed.form.offsets().1 + at;
            let before = read(&device, sealed.at + place as u64, 1)[0];
            damage(&device, &image.sealed, number, at, value(before));
        }
        let opened = assemble(&device, false).and_then(|array| FileSystem::open(array, options()));
        opened.is_ok()
    }

    /// What is only sealed again is as good as before: all that holds a checksum is found, with
    /// what points at it.
    #[test]
    fn checksums_are_right_again_up_to_the_record() {
        let image = image();
        let pages = || image.sealed.iter().filter(|s| s.form == Form::Page);
        assert!(image.sealed.len() >= pages().count() + 4);
        // Nothing points at the pages that a later checkpoint replaced.
        let used = pages().filter(|page| !page.parents.is_empty());
        assert!(used.count() >= 5, "two pages of spaces, three of nodes");
        assert!(opens(200, |byte| byte));
        assert!(
            !opens(0, |byte| !byte),
            "a pointer, or the first byte of a magic"
        );
    }
}
