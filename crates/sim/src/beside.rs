//! Somebody's flush fails beside what is durable by itself: the sync of a page that is written over, or the batch of a commit. The devices cannot force a
//! write, so each of these waits in the cache for a flush of its own, which succeeds although the one that failed has dropped it (R17).
//!
//! What holds: what a sync has promised is there after a power cut.

use crate::world::{Image, Machine, Shape};
use base::atomic::{AtomicBool, AtomicU64, Ordering};
use base::rng::Rng;
use base::{sched, thread};
use device::sim::{Survival, Times};
use fs::{Caller, Error, FileSystem, Ino, OpenFile, ROOT, SetAttr};
use std::sync::Arc;
use std::time::Duration;

const STEPS: u8 = 40;
const PAGE: usize = 4096;

/// What is promised, step by step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Promise {
    /// A page, by its own write.
    Page,
    /// A mode, by the batch that has its record.
    Mode,
}

struct Run<'a> {
    fs: &'a FileSystem,
    promise: Promise,
    file: Arc<OpenFile>,
    ino: Ino,
    /// That is being done.
    step: AtomicU64,
    /// The other one's flush has failed.
    over: AtomicBool,
}

impl Run<'_> {
    /// Returns the last step whose sync succeeded.
    fn promise(&self) -> u8 {
        let mut synced = 0;
        for step in 1..=STEPS {
            self.step.store(u64::from(step), Ordering::SeqCst);
            let changed = match self.promise {
                Promise::Page => self.fs.write(&self.file, 0, &[step; PAGE]).map(drop),
                Promise::Mode => {
                    let mode = SetAttr {
                        mode: Some(u32::from(step)),
                        ..SetAttr::default()
                    };
                    let set = self.fs.setattr(&Caller::root(), self.ino, &mode);
                    set.map(drop)
                }
            };
            let done = changed.and_then(|()| self.fs.fsync(&self.file, false));
            if done.is_err() {
                break;
            }
            synced = step;
            // What is written after the failure is no part of it.
            if self.over.load(Ordering::SeqCst) {
                break;
            }
        }
        self.step.store(u64::MAX, Ordering::SeqCst);
        synced
    }

    /// A flush that fails on each device, at some moment of some step.
    fn disturb(&self, machine: &Machine, rng: &mut Rng) {
        let at = rng.range(1, 8);
        while self.step.load(Ordering::SeqCst) < at {
            thread::yield_now();
        }
        sched::spend(Duration::from_micros(rng.below(200)));
        for device in &machine.devices {
            device.fail_flushes(Times::Next(1));
        }
        let store = self.fs.store();
        store.array().mark_all_unflushed();
        let flushed = store.flush();
        // Unless what was to be promised met it.
        debug_assert!(flushed.is_err() || store.array().flush_failures() > 0);
        self.over.store(true, Ordering::SeqCst);
    }
}

/// One run; an error says what was not as it must be.
pub fn run(seed: u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let mut shape = Shape::small(2);
    shape.options.store.shards = 2;
    shape.stripe = PAGE as u64;
    shape.forces_writes = false;
    shape.told_late = rng.one_in(2);
    // No record of its times comes along with what is overwritten.
    shape.options.data.mtime_persist = Duration::from_secs(3600);
    let promise = *rng.pick(&[Promise::Page, Promise::Mode]);
    let machine = Machine::new(&Image::format(&shape)?, seed);
    let text = |error: Error| error.to_string();
    let (ino, synced) = sched::run("beside a flush", seed, &machine.clock, || {
        let fs = machine.open().map_err(text)?;
        let make = |name: &[u8]| fs.create(&Caller::root(), ROOT, name, 0o644, libc::O_RDWR);
        if rng.one_in(2) {
            // What is written over is on the other device.
            let (_, pad) = make(b"pad").map_err(text)?;
            fs.write(&pad, 0, &[0; PAGE]).map_err(text)?;
            fs.fsync(&pad, false).map_err(text)?;
        }
        let (attr, file) = make(b"file").map_err(text)?;
        fs.write(&file, 0, &[0; PAGE]).map_err(text)?;
        fs.sync().map_err(text)?;
        let run = Run {
            fs: &fs,
            promise,
            file,
            ino: attr.ino,
            step: AtomicU64::new(0),
            over: AtomicBool::new(false),
        };
        for device in &machine.devices {
            device.slow_down(Duration::from_micros(rng.range(10, 60)), None);
        }
        let synced = thread::parallel(2, |me| match me {
            0 => run.promise(),
            _ => {
                run.disturb(&machine, &mut Rng::new(seed ^ 1));
                0
            }
        });
        machine.switch.cut_now();
        drop(run);
        // Without power.
        let closed = fs.close();
        debug_assert!(closed.is_err());
        Ok::<_, String>((attr.ino, synced[0]))
    })?;
    let crashed = machine.cut(Survival::None, &mut rng);
    let machine = Machine::after(&shape, crashed, machine.now_ns());
    let fs = machine.open().map_err(text)?;
    let oldest = match promise {
        Promise::Mode => fs.getattr(ino).map_err(text)?.mode & 0o777,
        Promise::Page => {
            let file = fs.open_file(ino, libc::O_RDONLY).map_err(text)?;
            let mut page = [0; PAGE];
            fs.read(&file, 0, &mut page).map_err(text)?;
            page.into_iter().min().map_or(0, u32::from)
        }
    };
    fs.close().map_err(text)?;
    drop(fs);
    machine.fsck()?;
    // Before the first step the mode is a larger number.
    let oldest = if oldest > u32::from(STEPS) { 0 } else { oldest };
    match oldest < u32::from(synced) {
        true => Err(format!(
            "{promise:?} {synced} was synced; after a cut it is {oldest}"
        )),
        false => Ok(()),
    }
}
