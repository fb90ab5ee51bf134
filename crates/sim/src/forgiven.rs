//! A flush of somebody else's fails, behind one write after the other, while two files go home and a checkpoint is made. Where no record waits
//! for a commit that is forgiven, and the file system goes on: but what was written before it may be lost, whatever later flushes say, and
//! nothing that is durable may rest on it (R17).

use crate::drive::{Driver, Stop};
use crate::explore::Base;
use crate::op::{Op, parse_list};
use crate::world::{Machine, Watch};
use base::rng::Rng;
use base::sync::{Mutex, rank};
use base::thread::JoinHandle;
use device::sim::{SimDevice, Survival, Times};
use fs::FileSystem;
use std::sync::{Arc, Weak};

/// Nothing here is one write and durable by itself: a flush waits until it is known how such a one has ended ([`crate::beside`] has those).
const SEQUENCES: &[&str] = &[
    // Over what they have, and behind it; and new files, which go in a group.
    "write A/foo 0 20000 1; write A/bar 0 20000 2; sync; write A/foo 0 9000 3; write A/bar end 9000 4; tick 6000; checkpoint; fsync A/foo; fsync A/bar; sync",
    "create foo; write foo 0 9000 1; create bar; write bar 0 9000 2; sync; create B/foo; write B/foo 0 4096 3; create B/bar; write B/bar 0 4096 4; tick 6000; sync; chmod A 448; checkpoint; fsync B/foo; fsync B/bar",
    // One is rewritten, and the other one takes its name.
    "write A/foo 0 20000 1; write A/bar 0 20000 2; sync; rewrite A/foo 30000 3; write A/bar 4096 9000 4; tick 6000; rename A/bar A/foo 0; sync; checkpoint; fsync A/foo",
];

/// Somebody whose flush fails right behind the write that comes after `left` others, before whoever wrote goes on.
struct Somebody {
    left: Mutex<Option<u64>>,
    /// Whoever flushes: that ends after a durable write beside it.
    flushing: Mutex<Option<JoinHandle>>,
    devices: Vec<Arc<SimDevice>>,
    fs: Weak<FileSystem>,
}

impl Watch for Somebody {
    fn before(&self, _: usize, _: u64, _: &[u8]) {}

    fn after(&self) {
        {
            let mut left = self.left.lock();
            match &mut *left {
                None => return,
                Some(0) => *left = None,
                Some(more) => {
                    *more -= 1;
                    return;
                }
            }
        }
        let Some(fs) = self.fs.upgrade() else { return };
        for device in &self.devices {
            device.fail_flushes(Times::Next(1));
        }
        let failures = fs.store().array().flush_failures();
        let by_then = failures + self.devices.len() as u64;
        let theirs = Arc::clone(&fs);
        let flush = move || {
            theirs.store().array().mark_all_unflushed();
            let flushed = theirs.store().flush();
            debug_assert!(flushed.is_err(), "it fails on every device");
        };
        // On a thread of its own: whoever writes may hold locks.
        let thread = base::thread::spawn("somebody", flush);
        while thread.is_ok() && fs.store().array().flush_failures() < by_then {
            base::thread::yield_now();
        }
        *self.flushing.lock() = thread.ok();
    }
}

/// Each of the sequences, with a failure at each write.
pub fn run(base: &Base, seed: u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    for text in SEQUENCES {
        let ops = parse_list(text)?;
        let mut writes = 0;
        let told =
            |writes: u64, what| format!("{text}: a flush fails behind write {writes}: {what}");
        while fails_at(base, &ops, writes, &mut rng).map_err(|what| told(writes, what))? {
            writes += 1;
        }
    }
    Ok(())
}

/// False: there are no more writes than that.
fn fails_at(base: &Base, ops: &[Op], writes: u64, rng: &mut Rng) -> Result<bool, String> {
    let mut driver = base.driver(rng.next_u64())?;
    driver.faulty = true;
    let somebody = Arc::new(Somebody {
        left: Mutex::new(rank::LEAF, Some(writes)),
        flushing: Mutex::new(rank::LEAF, None),
        devices: driver.machine.devices.clone(),
        fs: Arc::downgrade(driver.fs()),
    });
    let machine = Arc::clone(&driver.machine);
    machine.tap.watch(Arc::clone(&somebody) as Arc<dyn Watch>);
    for op in ops {
        match driver.run(op) {
            Ok(()) => {}
            Err(Stop::Violation(what)) => return Err(what),
            Err(Stop::Environment(_)) if driver.fs().store().failed().is_some() => break,
            Err(Stop::Environment(_)) => {}
        }
    }
    let flushing = somebody.flushing.lock().take();
    let flushed = flushing.map_or(Ok(()), JoinHandle::join);
    flushed.map_err(|_| "a flush that fails panics")?;
    let crashed = machine.cut(*rng.pick(&Survival::ALL), rng);
    let after = Machine::after(base.shape(), crashed, machine.now_ns());
    Driver::recover(after, &driver.oracle)?.machine.fsck()?;
    let failed = somebody.left.lock().is_none();
    Ok(failed)
}
