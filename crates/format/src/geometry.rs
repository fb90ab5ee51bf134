//! Where things are: devices into zones, logical space into journal and chunks.

use crate::checkpoint::SPACE_WORDS_MAX;
use crate::item::PAYLOAD_MAX;
use crate::label::{HEAD_BLOCKS, Label, TAIL_BLOCKS, ZoneEntry};
use crate::{BLOCK_SIZE, Block, Damage, MAX_DEVICES, U32, U64};

/// The smallest array, in bytes over all devices.
pub const MIN_ARRAY_BYTES: u64 = 64 << 20;
/// The smallest member device, in bytes.
pub const MIN_DEVICE_BYTES: u64 = 4 << 20;
pub const MIN_JOURNAL_BYTES: u64 = 4 << 20;
/// Sizes of a member device in blocks that a label may state; the bound keeps byte addresses
/// of the whole array below 2^63.
const DEVICE_BLOCKS: std::ops::RangeInclusive<u64> = HEAD_BLOCKS + TAIL_BLOCKS..=1 << 46;

/// A range of logical space striped over `devices`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zone {
    pub logical_start: u64,
    pub blocks: u64,
    pub device_start: u64,
    /// Member device indices, ascending.
    pub devices: Vec<usize>,
}

/// Chunks of large arrays are larger, so that the space tables describe them and have room for their metadata.
const LARGE_ARRAY_BYTES: u64 = 64 << 40;
/// Chunks of a new array, at most: the rest of the space tables is for segments.
const PLANNED_CHUNKS_MAX: u64 = SPACE_WORDS_MAX / 4 * 3;
/// An item fits a segment several times.
const MIN_SEGMENT_BYTES: u64 = 64 << 10;

/// The array's geometry, as every label of it states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    pub device_blocks: Vec<u64>,
    pub stripe_blocks: u32,
    pub journal_align: u32,
    pub zones: Vec<Zone>,
    pub journal_start: Block,
    pub journal_blocks: u64,
    pub chunk_start: Block,
    pub chunk_blocks: u32,
    pub chunk_count: u32,
    pub segment_blocks: u32,
}

/// The stripe unit unless mkfs is told another: what a device takes as one request, and a request of 1 MiB gives four devices at once.
const STRIPE_BYTES: u64 = 256 << 10;

/// What mkfs may be told; `None` chooses by size.
#[derive(Clone, Copy, Debug, Default)]
pub struct GeometryOptions {
    pub stripe_bytes: Option<u64>,
    pub journal_bytes: Option<u64>,
    /// Largest physical block of the devices, in bytes (512 to 4096): a power cut in a write of less may damage what lies beside it.
    pub journal_align: Option<u32>,
}

/// A contiguous piece of one device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub device: usize,
    pub offset: u64,
    pub len: usize,
}

impl Geometry {
    /// Plans an array over devices of the given sizes (bytes).
    pub fn plan(device_bytes: &[u64], options: GeometryOptions) -> Result<Geometry, Damage> {
        let refuse = |what: String| Err(Damage::new("geometry", what));
        if device_bytes.is_empty() || device_bytes.len() > MAX_DEVICES {
            return refuse(format!(
                "an array has 1 to {MAX_DEVICES} devices, not {}",
                device_bytes.len()
            ));
        }
        let stripe = options.stripe_bytes.unwrap_or(STRIPE_BYTES);
        if !stripe.is_power_of_two() || !(4096..=(16 << 20)).contains(&stripe) {
            return refuse(format!(
                "stripe unit {stripe} is not a power of two from 4 KiB to 16 MiB"
            ));
        }
        if let Some(small) = device_bytes.iter().position(|&b| b < MIN_DEVICE_BYTES) {
            return refuse(format!(
                "device {small} has {} bytes; the smallest member has {MIN_DEVICE_BYTES}",
                device_bytes[small]
            ));
        }
        let stripe_blocks = stripe / BLOCK_SIZE as u64;
        let device_blocks: Vec<u64> = device_bytes.iter().map(|b| b / BLOCK_SIZE as u64).collect();
        let zones = plan_zones(&device_blocks, stripe_blocks);
        let total: u64 = zones.iter().map(|z| z.blocks).sum();
        let total_bytes = total * BLOCK_SIZE as u64;
        if device_bytes.iter().sum::<u64>() < MIN_ARRAY_BYTES {
            return refuse(format!(
                "the devices hold {} bytes in all; the smallest array has {MIN_ARRAY_BYTES}",
                device_bytes.iter().sum::<u64>()
            ));
        }
        let largest_chunk = match total_bytes > LARGE_ARRAY_BYTES {
            true => 256 << 20,
            false => 128 << 20,
        };
        let chunk_bytes = (total_bytes / 64)
            .next_power_of_two()
            .clamp(1 << 20, largest_chunk);
        let segment_bytes = match chunk_bytes {
            0x1000_0000.. => 2 << 20,
            0x100_0000.. => 1 << 20,
            _ => MIN_SEGMENT_BYTES,
        };
        let journal = options.journal_bytes.unwrap_or_else(|| {
            (total_bytes / 64)
                .next_power_of_two()
                .clamp(MIN_JOURNAL_BYTES, 1 << 30)
        });
        if journal < MIN_JOURNAL_BYTES || journal > total_bytes / 4 {
            return refuse(format!(
                "a journal of {journal} bytes is outside {MIN_JOURNAL_BYTES} to a quarter of the array ({})",
                total_bytes / 4
            ));
        }
        let journal_blocks = journal / BLOCK_SIZE as u64;
        let chunk_blocks = chunk_bytes / BLOCK_SIZE as u64;
        let chunk_count = (total - journal_blocks) / chunk_blocks;
        if chunk_count > PLANNED_CHUNKS_MAX {
            return refuse(format!(
                "the devices hold {total_bytes} bytes in all; the largest array has about {}",
                PLANNED_CHUNKS_MAX * chunk_bytes
            ));
        }
        Ok(Geometry {
            device_blocks,
            stripe_blocks: stripe_blocks as u32,
            journal_align: options.journal_align.unwrap_or(BLOCK_SIZE as u32),
            zones,
            journal_start: Block(0),
            journal_blocks,
            chunk_start: Block(journal_blocks),
            chunk_blocks: chunk_blocks as u32,
            chunk_count: u32::try_from(chunk_count)
                .map_err(|_| Damage::new("geometry", "too many chunks"))?,
            segment_blocks: (segment_bytes / BLOCK_SIZE as u64) as u32,
        })
    }

    /// Reads and checks the geometry in a label.
    pub fn from_label(label: &Label) -> Result<Geometry, Damage> {
        let damage = |what: &str| Damage::new("label geometry", what);
        let count = label.device_count.get() as usize;
        if count == 0 || count > MAX_DEVICES {
            return Err(damage("device count out of range"));
        }
        let sizes = label.device_blocks[..count].iter().map(|b| b.get());
        let stripe = label.stripe_blocks.get();
        if sizes.clone().any(|b| !DEVICE_BLOCKS.contains(&b)) || !stripe.is_power_of_two() {
            return Err(damage("device size or stripe unit out of range"));
        }
        // First block of each device that no zone has taken yet.
        let mut free = [HEAD_BLOCKS; MAX_DEVICES];
        let mut zones = Vec::new();
        let mut next = 0u64;
        for entry in label.zones.iter().take_while(|z| z.blocks.get() != 0) {
            let devices: Vec<usize> = (0..32)
                .filter(|i| entry.device_mask.get() >> i & 1 == 1)
                .collect();
            if devices.is_empty() || devices.iter().any(|&d| d >= count) {
                return Err(damage("zone names a device that is not there"));
            }
            if entry.logical_start.get() != next || entry.copies.get() != 1 {
                return Err(damage("zones do not follow each other"));
            }
            let zone = Zone {
                logical_start: next,
                blocks: entry.blocks.get(),
                device_start: entry.device_start.get(),
                devices,
            };
            if !zone
                .blocks
                .is_multiple_of(zone.devices.len() as u64 * stripe as u64)
            {
                return Err(damage("zone is not whole stripes"));
            }
            let per_device = zone.blocks / zone.devices.len() as u64;
            let end = zone.device_start.checked_add(per_device);
            for &d in &zone.devices {
                let limit = label.device_blocks[d].get() - TAIL_BLOCKS;
                match end {
                    Some(end) if zone.device_start >= free[d] && end <= limit => free[d] = end,
                    _ => return Err(damage("zone reaches past its device or into another zone")),
                }
            }
            next += zone.blocks;
            zones.push(zone);
        }
        let geometry = Geometry {
            device_blocks: label.device_blocks[..count]
                .iter()
                .map(|b| b.get())
                .collect(),
            stripe_blocks: label.stripe_blocks.get(),
            journal_align: label.journal_align.get(),
            zones,
            journal_start: Block(label.journal_start.get()),
            journal_blocks: label.journal_blocks.get(),
            chunk_start: Block(label.chunk_start.get()),
            chunk_blocks: label.chunk_blocks.get(),
            chunk_count: label.chunk_count.get(),
            segment_blocks: label.segment_blocks.get(),
        };
        geometry.check(next)?;
        Ok(geometry)
    }

    fn check(&self, total: u64) -> Result<(), Damage> {
        let damage = |what: &str| Err(Damage::new("label geometry", what));
        if self.zones.is_empty() {
            return damage("no zones");
        }
        if !self.stripe_blocks.is_power_of_two()
            || !self.chunk_blocks.is_power_of_two()
            || !self.segment_blocks.is_power_of_two()
            || self.segment_blocks > self.chunk_blocks
            || (self.segment_bytes() as u64) < MIN_SEGMENT_BYTES
            || 4 + self.chunk_blocks as usize / 8 > PAYLOAD_MAX
            || !matches!(self.journal_align, 512 | 1024 | 2048 | 4096)
        {
            return damage("a unit is not a power of two in range");
        }
        let ring_end = self.journal_start.0.checked_add(self.journal_blocks);
        let chunk_end =
            (self.chunk_count as u64 * self.chunk_blocks as u64).checked_add(self.chunk_start.0);
        if ring_end != Some(self.chunk_start.0)
            || chunk_end.is_none_or(|e| e > total)
            || self.journal_blocks * (BLOCK_SIZE as u64) < MIN_JOURNAL_BYTES
            || self.chunk_count == 0
        {
            return damage("journal or chunks lie outside the array");
        }
        if self.meta_chunks_max() == 0 {
            return damage("more chunks than the space tables can describe");
        }
        Ok(())
    }

    /// Writes the geometry into a label.
    pub fn store(&self, label: &mut Label) {
        label.device_count = (self.device_blocks.len() as u16).into();
        label.stripe_blocks = U32::new(self.stripe_blocks);
        label.journal_align = U32::new(self.journal_align);
        label.chunk_blocks = U32::new(self.chunk_blocks);
        label.segment_blocks = U32::new(self.segment_blocks);
        label.chunk_count = U32::new(self.chunk_count);
        label.journal_start = U64::new(self.journal_start.0);
        label.journal_blocks = U64::new(self.journal_blocks);
        label.chunk_start = U64::new(self.chunk_start.0);
        for (slot, &blocks) in label.device_blocks.iter_mut().zip(&self.device_blocks) {
            *slot = U64::new(blocks);
        }
        for (slot, zone) in label.zones.iter_mut().zip(&self.zones) {
            *slot = ZoneEntry {
                logical_start: U64::new(zone.logical_start),
                blocks: U64::new(zone.blocks),
                device_start: U64::new(zone.device_start),
                device_mask: U32::new(zone.devices.iter().fold(0, |m, d| m | 1 << d)),
                copies: U32::new(1),
            };
        }
    }

    /// Logical blocks in all zones.
    pub fn total_blocks(&self) -> u64 {
        self.zones.iter().map(|z| z.blocks).sum()
    }

    /// Splits a logical byte range into device pieces, in logical order.
    /// The range must lie inside the array.
    pub fn pieces(&self, mut offset: u64, mut len: usize, mut each: impl FnMut(Piece)) {
        let stripe = self.stripe_blocks as u64 * BLOCK_SIZE as u64;
        while len > 0 {
            let block = offset / BLOCK_SIZE as u64;
            let zone = self
                .zones
                .iter()
                .rev()
                .find(|z| z.logical_start <= block)
                .expect("zone 0 starts at 0");
            let in_zone = offset - zone.logical_start * BLOCK_SIZE as u64;
            let zone_left = zone.blocks * BLOCK_SIZE as u64 - in_zone;
            assert!(zone_left > 0, "range inside the array");
            let width = zone.devices.len() as u64;
            let (unit, within) = (in_zone / stripe, in_zone % stripe);
            let take = (stripe - within).min(zone_left).min(len as u64) as usize;
            each(Piece {
                device: zone.devices[(unit % width) as usize],
                offset: zone.device_start * BLOCK_SIZE as u64 + unit / width * stripe + within,
                len: take,
            });
            offset += take as u64;
            len -= take;
        }
    }

    /// First block of a chunk.
    pub fn chunk_block(&self, chunk: u32) -> Block {
        Block(self.chunk_start.0 + chunk as u64 * self.chunk_blocks as u64)
    }

    /// The chunk that holds `block`, and the block's index in it.
    pub fn chunk_of(&self, block: Block) -> Option<(u32, u32)> {
        let offset = block.0.checked_sub(self.chunk_start.0)?;
        let chunk = offset / self.chunk_blocks as u64;
        (chunk < self.chunk_count as u64)
            .then(|| (chunk as u32, (offset % self.chunk_blocks as u64) as u32))
    }

    pub fn segments_per_chunk(&self) -> u32 {
        self.chunk_blocks / self.segment_blocks
    }

    /// Meta chunks that the space tables can describe.
    pub fn meta_chunks_max(&self) -> u64 {
        let words = SPACE_WORDS_MAX.saturating_sub(self.chunk_count as u64);
        words / self.segments_per_chunk() as u64
    }

    pub fn segment_bytes(&self) -> usize {
        self.segment_blocks as usize * BLOCK_SIZE
    }

    pub fn chunk_bytes(&self) -> u64 {
        self.chunk_blocks as u64 * BLOCK_SIZE as u64
    }

    pub fn journal_bytes(&self) -> u64 {
        self.journal_blocks * BLOCK_SIZE as u64
    }
}

/// One zone per distinct device size: each stripes over the devices that reach that far.
fn plan_zones(device_blocks: &[u64], stripe_blocks: u64) -> Vec<Zone> {
    let usable: Vec<u64> = device_blocks
        .iter()
        .map(|b| (b - HEAD_BLOCKS - TAIL_BLOCKS) / stripe_blocks * stripe_blocks)
        .collect();
    let mut heights = usable.clone();
    heights.sort_unstable();
    heights.dedup();
    let (mut zones, mut logical_start, mut floor) = (Vec::new(), 0, 0);
    for height in heights {
        let devices: Vec<usize> = (0..usable.len()).filter(|&d| usable[d] >= height).collect();
        let blocks = (height - floor) * devices.len() as u64;
        if blocks > 0 {
            zones.push(Zone {
                logical_start,
                blocks,
                device_start: HEAD_BLOCKS + floor,
                devices,
            });
        }
        logical_start += blocks;
        floor = height;
    }
    zones
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unequal_devices_give_zones_that_cover_each_block_once() {
        let sizes = [40 << 20, 64 << 20, 64 << 20, 100 << 20];
        let g = Geometry::plan(&sizes, GeometryOptions::default()).unwrap();
        assert_eq!(g.zones.len(), 3);
        let mut seen = std::collections::HashSet::new();
        for block in 0..g.total_blocks() {
            g.pieces(block * 4096, 4096, |p| {
                assert_eq!(p.len, 4096);
                assert!(p.offset >= HEAD_BLOCKS * 4096);
                assert!(p.offset + 4096 <= sizes[p.device] - TAIL_BLOCKS * 4096);
                assert!(seen.insert((p.device, p.offset)));
            });
        }
        let mut label = Label::zeroed();
        g.store(&mut label);
        assert_eq!(Geometry::from_label(&label).unwrap(), g);
    }

    #[test]
    fn the_space_tables_describe_a_large_array_and_its_metadata() {
        for (devices, tib) in [(16, 4), (4, 16), (5, 16), (16, 8), (13, 16), (16, 16)] {
            let g = Geometry::plan(&vec![tib << 40; devices], GeometryOptions::default()).unwrap();
            let meta = g.meta_chunks_max() * g.chunk_bytes();
            assert!(meta >= 1 << 40, "{g:?}");
            let map = 4 + g.chunk_blocks as usize / 8;
            assert!(map <= PAYLOAD_MAX);
            let mut label = Label::zeroed();
            g.store(&mut label);
            assert_eq!(Geometry::from_label(&label).unwrap(), g);
        }
        let refused = Geometry::plan(&[32 << 40; 16], GeometryOptions::default()).unwrap_err();
        assert!(
            refused.to_string().contains("the largest array"),
            "{refused}"
        );
    }

    #[test]
    fn sizes_that_nothing_fits_are_damage() {
        let g = Geometry::plan(&[64 << 30], GeometryOptions::default()).unwrap();
        let total = g.total_blocks();
        assert_eq!(g.check(total), Ok(()));
        let bad = |change: fn(&mut Geometry)| {
            let mut bad = g.clone();
            change(&mut bad);
            bad.check(u64::MAX).is_err()
        };
        // An item would reach into the next segment, a space map would be larger than an image, and the
        // states of all chunks take more memory than there is.
        assert!(bad(|g| g.segment_blocks = 1));
        assert!(bad(|g| g.chunk_blocks = 1 << 17));
        assert!(bad(|g| g.chunk_count = u32::MAX));
        assert!(bad(
            |g| (g.chunk_count, g.segment_blocks) = (SPACE_WORDS_MAX as u32, 16)
        ));
    }

    #[test]
    fn the_smallest_array_has_room_for_chunks() {
        let g = Geometry::plan(&[64 << 20], GeometryOptions::default()).unwrap();
        assert!(g.chunk_count >= 32, "{g:?}");
    }
}
