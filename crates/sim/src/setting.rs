//! What kind of run a seed makes: devices, sizes, and the trouble they are in.

use crate::world::Shape;
use base::rng::Rng;

/// What kind of trouble a run is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// None but power cuts.
    None,
    /// The array is nearly full.
    Full,
    /// Devices fail, and say so.
    Errors,
    /// Both.
    FullErrors,
    /// Bits of the journal rot.
    Rot,
    /// Devices lie: writes are lost or misdirected, and bits rot.
    Lies,
    /// Devices take their time, or are stuck for minutes.
    Slow,
}

impl Trouble {
    pub fn is_full(self) -> bool {
        matches!(self, Trouble::Full | Trouble::FullErrors)
    }

    /// Devices fail, and say so.
    pub fn has_errors(self) -> bool {
        matches!(self, Trouble::Errors | Trouble::FullErrors)
    }
}

/// What follows from a run's seed alone.
#[derive(Clone, Debug)]
pub struct Setting {
    pub shape: Shape,
    pub trouble: Trouble,
    /// Only syncs write back.
    pub calm: bool,
    /// So many free blocks a nearly full array has at first, about.
    pub room: u64,
    /// Names in use.
    pub names: u64,
    /// Most bytes of a write.
    pub largest: u64,
    pub cycles: u64,
    pub steps: u64,
}

impl Setting {
    pub fn of(seed: u64) -> Setting {
        let troubles = [
            Trouble::None,
            Trouble::None,
            Trouble::None,
            Trouble::Full,
            Trouble::Errors,
            Trouble::Errors,
            Trouble::Rot,
            Trouble::Lies,
            Trouble::Lies,
            Trouble::Slow,
        ];
        let mut rng = Rng::new(seed ^ 0x5E77_1465);
        let trouble = match *rng.pick(&troubles) {
            Trouble::Errors if Rng::new(seed ^ 0x0F00_E220).one_in(2) => Trouble::FullErrors,
            trouble => trouble,
        };
        Setting::with(seed, trouble)
    }

    pub fn with(seed: u64, trouble: Trouble) -> Setting {
        let mut rng = Rng::new(seed ^ 0x0005_E771);
        let mut shape = Shape::small(rng.range(1, 4));
        if rng.one_in(3) {
            shape.devices = vec![20 << 20, 36 << 20, 12 << 20];
        }
        shape.stripe = *rng.pick(&[4096, 16 << 10, 128 << 10]);
        shape.logical_block = *rng.pick(&[512, 512, 4096]);
        shape.physical_block = *Rng::new(seed ^ 0x0F00_B10C).pick(&[512, 4096]);
        if rng.one_in(3) {
            shape.age = 8192 - rng.below(120) as u32;
        }
        if rng.one_in(2) {
            // Few hashes: buckets split late, and names collide.
            shape.options.hash_mask = Some(0xF << 60);
        }
        shape.tight = Rng::new(seed ^ 0x0716_4117).one_in(3);
        let mut others = Rng::new(seed ^ 0x0CAC_4E00);
        shape.has_cache = !others.one_in(6);
        shape.options.store.discard = others.one_in(3);
        shape.forces_writes = Rng::new(seed ^ 0x0F0A_F1A6).one_in(2);
        let calm = rng.one_in(2) && trouble == Trouble::None;
        if !calm {
            let options = &mut shape.options;
            options.store.node_cache_bytes = *rng.pick(&[64 << 10, 256 << 10, 1 << 20]);
            options.store.dirty_bytes = Some(*rng.pick(&[64 << 10, 256 << 10]));
            options.data.cache_bytes = *rng.pick(&[128 << 10, 512 << 10]);
        }
        Setting {
            shape,
            trouble,
            calm,
            room: *Rng::new(seed ^ 0x0F00_400D).pick(&[400, 400, 60, 12, 0]),
            names: *rng.pick(&[5, 12, 60, 200]),
            largest: match calm {
                true => 20_000,
                false => *rng.pick(&[3000, 60_000, 200_000]),
            },
            cycles: rng.range(3, 8),
            steps: *rng.pick(&[30, 100, 400]),
        }
    }
}
