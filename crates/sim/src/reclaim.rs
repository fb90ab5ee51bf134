//! Several threads change metadata until the journal has been filled several times over, beside the store's own threads, in
//! an order that a seed decides.
//!
//! Checkpoints are asked for in time: nobody stops until a checkpoint has been made. Whether, and by how much,
//! operations are slowed down is not looked at, as virtual time jumps: a test of the store does that. Then the power goes: whatever was changed before the
//! last sync is there, and `fsck` finds nothing.

use crate::world::{Image, Machine, Shape};
use base::rng::Rng;
use base::{sched, thread};
use device::sim::Survival;
use fs::{Caller, FileSystem, Ino, ROOT};

const TASKS: usize = 2;
/// Logged by all, in journals.
const JOURNALS: u64 = 4;
/// Of one change, in bytes.
const VALUE: usize = 1800;
const NAME: &[u8] = b"user.value";

/// One run; an error says what was not as it must be.
pub fn run(seed: u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let mut shape = Shape::small(2);
    let store = &mut shape.options.store;
    store.background = true;
    store.workers = rng.range(1, 4) as usize;
    store.shards = rng.range(1, 4) as usize;
    let journal = shape.geometry().journal_bytes();
    let machine = Machine::new(&Image::format(&shape)?, seed);
    let changes = JOURNALS * journal / VALUE as u64 / TASKS as u64;
    let files = sched::run("reclaim", seed, &machine.clock, || {
        let fs = machine.open().map_err(|e| e.to_string())?;
        let files = (0..TASKS).map(|me| make(&fs, me)).collect::<Result<_, _>>();
        let files: Vec<Ino> = files?;
        let began = fs.store().counters();
        let worked = thread::parallel(TASKS, |me| {
            (0..changes).try_for_each(|change| set(&fs, files[me], change))
        });
        worked.into_iter().collect::<Result<(), String>>()?;
        let done = fs.store().counters();
        fs.sync().map_err(|e| format!("sync: {e}"))?;
        machine.switch.cut_now();
        if fs.close().is_ok() {
            return Err("a file system closes without power".to_owned());
        }
        let checkpoints = done.checkpoints.count - began.checkpoints.count;
        if checkpoints < JOURNALS - 1 {
            return Err(format!("{checkpoints} checkpoints for {JOURNALS} journals"));
        }
        let stalled = done.stalled.count - began.stalled.count;
        match stalled {
            0 => Ok(files),
            _ => Err(format!("{stalled} operations waited for a checkpoint")),
        }
    })?;
    let now_ns = machine.now_ns();
    let crashed = machine.cut(*rng.pick(&Survival::ALL), &mut rng);
    let machine = Machine::after(&shape, crashed, now_ns);
    machine.fsck()?;
    let fs = machine.open().map_err(|e| e.to_string())?;
    for file in files {
        let found = fs
            .getxattr(file, NAME)
            .map_err(|e| format!("getxattr: {e}"))?;
        if found != value(changes - 1) {
            return Err("a change that was synced is not there".to_owned());
        }
    }
    fs.close().map_err(|e| format!("close: {e}"))?;
    machine.fsck()
}

fn make(fs: &FileSystem, me: usize) -> Result<Ino, String> {
    let name = format!("file{me}");
    let made = fs.mknod(
        &Caller::root(),
        ROOT,
        name.as_bytes(),
        libc::S_IFREG | 0o644,
        0,
    );
    Ok(made.map_err(|e| format!("create: {e}"))?.ino)
}

fn value(change: u64) -> Vec<u8> {
    let mut value = vec![change as u8; VALUE];
    value[..8].copy_from_slice(&change.to_le_bytes());
    value
}

fn set(fs: &FileSystem, file: Ino, change: u64) -> Result<(), String> {
    let set = fs.setxattr(&Caller::root(), file, NAME, &value(change), 0);
    set.map_err(|e| format!("setxattr: {e}"))
}

#[cfg(test)]
mod tests {
    use base::canary::{Canary, plant};

    #[test]
    fn nobody_stops_for_a_checkpoint_unless_nobody_asks_for_one() {
        (0..4).for_each(|seed| super::run(seed).unwrap());
        plant(Some(Canary::PaceIgnored));
        let found = super::run(0);
        plant(None);
        assert!(found.unwrap_err().contains("waited for a checkpoint"));
    }
}
