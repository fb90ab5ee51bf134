//! SIGKILL to the daemon at random moments under several writers, then mount again: nothing
//! that was synced may be lost, nothing half-done may be seen, and fsck must find nothing.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use base::rng::Rng;

use super::Context;
use super::workload::Writer;
use crate::report::Suite;
use crate::world::World;
use crate::{Fallible, process};

const WRITERS: u64 = 4;
/// Complaints about more rounds than this end the suite.
const PATIENCE: usize = 5;

pub fn run(context: &Context, world: &mut World, suite: &mut Suite) -> Fallible<()> {
    // The other suites' way of mounting is not the one that can be killed.
    world.umount()?;
    let mut rng = Rng::new(context.args.seed);
    let mut writers: Vec<Writer> = (0..WRITERS)
        .map(|i| Writer::new(world.mnt.join(format!("writer{i}")), rng.next_u64()))
        .collect();
    let (mut steps, start) = (0, Instant::now());
    for round in 0..context.args.kills {
        steps += one_round(world, &mut writers, &mut rng)
            .map_err(|e| format!("kill {round}, seed {}: {e}", context.args.seed))?;
        let result = after_kill(world, &mut writers, &mut rng, round);
        suite.check(&format!("kill {round}, seed {}", context.args.seed), result);
        if suite.failed >= PATIENCE {
            return Err("too many failures".to_owned());
        }
        if round % 50 == 49 {
            let seconds = start.elapsed().as_secs_f64();
            println!("  {} kills, {steps} operations, {seconds:.0} s", round + 1);
        }
    }
    world.mount()
}

/// Mounts, lets the writers write, and kills the daemon. Returns the number of operations.
fn one_round(world: &mut World, writers: &mut [Writer], rng: &mut Rng) -> Fallible<u64> {
    start(world)?;
    for writer in writers.iter() {
        writer.prepare().map_err(|e| format!("preparing: {e}"))?;
    }
    let time = Duration::from_millis(rng.range(1, 600));
    let killed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let running: Vec<_> = writers
            .iter_mut()
            .map(|writer| scope.spawn(|| write_until_killed(writer, &killed)))
            .collect();
        let began = Instant::now();
        while began.elapsed() < time && running.iter().all(|w| !w.is_finished()) {
            std::thread::sleep(Duration::from_millis(1));
        }
        killed.store(true, Ordering::SeqCst);
        let death = kill(world);
        let mut steps = 0;
        for writer in running {
            steps += writer.join().map_err(|_| "a writer panicked")??;
        }
        death.map(|()| steps)
    })
}

fn start(world: &mut World) -> Fallible<()> {
    if world.is_external() {
        return Ok(());
    }
    world.start_foreground()?;
    world.await_ready()
}

fn kill(world: &mut World) -> Fallible<()> {
    if world.is_external() {
        return Ok(());
    }
    world.kill_foreground()
}

/// Steps until the flag is set; before that an error is a failure.
fn write_until_killed(writer: &mut Writer, killed: &AtomicBool) -> Fallible<u64> {
    let mut steps = 0;
    while !killed.load(Ordering::SeqCst) {
        match writer.step() {
            Ok(()) => steps += 1,
            Err(_) if killed.load(Ordering::SeqCst) => break,
            Err(error) => {
                return Err(format!(
                    "a writer got \"{error}\" before the kill; last steps: {}",
                    writer.last_steps.join(", ")
                ));
            }
        }
    }
    Ok(steps)
}

/// Checks the array after a kill: in turn fsck before recovery, a kill during recovery, and
/// always what is found, and fsck after a clean unmount.
fn after_kill(
    world: &mut World,
    writers: &mut [Writer],
    rng: &mut Rng,
    round: u32,
) -> Fallible<()> {
    if process::interrupted() {
        return Err("interrupted".to_owned());
    }
    if !world.is_external() {
        match round % 4 {
            0 => world.fsck().map_err(|e| format!("before recovery: {e}"))?,
            1 => world.umount().map_err(|e| format!("dead mount: {e}"))?,
            2 => {
                world.start_foreground()?;
                std::thread::sleep(Duration::from_millis(rng.below(60)));
                world.kill_foreground()?;
            }
            _ => {}
        }
    }
    start(world)?;
    let mut complaints = Vec::new();
    for (i, writer) in writers.iter_mut().enumerate() {
        let found: io::Result<Vec<String>> = writer.verify();
        match found {
            Ok(found) => complaints.extend(found.iter().map(|c| format!("writer {i}: {c}"))),
            Err(error) => complaints.push(format!("writer {i}: cannot read: {error}")),
        }
    }
    world.umount()?;
    world.fsck()?;
    match complaints.is_empty() {
        true => Ok(()),
        false => Err(complaints.join("\n    ")),
    }
}
