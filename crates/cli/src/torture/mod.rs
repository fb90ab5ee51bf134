//! `sheaf torture`: several writers on a real mount, SIGKILL to its daemon at random moments, and
//! a look at what is left. Nothing that was synced may be lost, nothing half-done may be seen,
//! and fsck must find nothing; before recovery, after it, and when recovery itself was killed.
//!
//! [`workload`] is one writer, [`model`] what its folder may look like after a crash,
//! [`array`](mod@array) the array that is tortured.
//!
//! The seed fixes what is drawn: operations, sizes, contents, and when the daemon is killed. How many steps
//! that allows, and what the kill then meets, is up to the machine, and so is what a draw comes to afterwards.
//!
//! A kill ends whatever hangs. So in some rounds every writer must have ended a step shortly before it. What the run itself does on the mount, to make a
//! writer's folder and to read what is left, has the same limit, after which the daemon is killed ([`guarded`]). An unmount has none: nobody knows how much it has to write.

mod array;
mod model;
mod workload;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use base::clock::Clock;
use base::rng::Rng;
use base::sync::{Mutex, rank};
use indicatif::ProgressBar;
use serde::Serialize;

use crate::args::Torture;
use crate::devices::pause;
use crate::failure::{Failure, OPERATIONAL, Outcome};
use crate::{demo, logging, mount_command, output, progress};

use array::Array;
use workload::Writer;

const WRITERS: usize = 4;
/// Complaints about more kills than this end the run.
const PATIENCE: usize = 5;
const LOST: u8 = 4;

/// The result as `--json` shows it.
#[derive(Serialize)]
struct Shown {
    seed: u64,
    seconds: f64,
    kills: u32,
    operations: u64,
    /// Those of them that made something durable.
    syncs: u64,
    /// 0: nothing that was synced is lost; 4: something is, or the array is damaged.
    exit_code: u8,
    complaints: Vec<Complaint>,
    /// The folder with the images, where something is wrong or it was to be kept.
    kept: Option<String>,
}

#[derive(Serialize)]
struct Complaint {
    /// After which kill, from 1.
    kill: u32,
    what: String,
}

pub fn run(args: &Torture) -> Outcome {
    logging::start(logging::Target::Terminal)?;
    if let Some(reason) = demo::why_not() {
        return Err(Failure::new(reason));
    }
    mount_command::check_options(&args.options)?;
    let seed = args.seed.map_or_else(any_seed, Ok)?;
    if !args.json {
        output::unheard(output::line(format!("Seed {seed}: {}", again(args, seed))))?;
    }
    let mut array = Array::make(&args.dir, &args.options)?;
    let mut run = Run::new(args, seed, &array);
    run.begin(&mut array)?;
    run.go(args, &mut array);
    let syncs = run.writers.iter().map(|w| w.lock().syncs).sum();
    if run.complaints.is_empty() {
        check_tried(syncs)?;
    }
    let exit_code = match run.complaints.is_empty() {
        true => 0,
        false => LOST,
    };
    let kept = (args.keep || exit_code != 0).then(|| array.keep(seed).display().to_string());
    let shown = Shown {
        seed,
        seconds: run.seconds(),
        kills: run.kills,
        operations: run.operations.load(Ordering::Relaxed),
        syncs,
        exit_code,
        complaints: run.complaints,
        kept,
    };
    let told = match args.json {
        true => output::json(&shown),
        false => output::print(text(&shown)),
    };
    let untold = match exit_code {
        0 => OPERATIONAL,
        lost => lost,
    };
    output::verdict(told, exit_code, untold)
}

/// The command that draws the same.
fn again(args: &Torture, seed: u64) -> String {
    let mut command = format!("sheaf torture {} --seed {seed}", args.dir.display());
    match args.kills {
        Some(kills) => command += &format!(" --kills {kills}"),
        None => command += &format!(" --seconds {}", args.seconds),
    }
    command += &format!(" --step-limit {}", args.step_limit);
    for options in &args.options {
        command += &format!(" -o {options}");
    }
    command + " draws the same; what comes of it depends on the machine, too"
}

/// Where nothing was made durable nothing could be lost.
fn check_tried(syncs: u64) -> Result<(), Failure> {
    match syncs {
        0 => Err(Failure::new(
            "nothing was synced before a kill, so nothing was tested; give it more --seconds",
        )),
        _ => Ok(()),
    }
}

fn any_seed() -> Result<u64, Failure> {
    let [a, b, c, d, ..] = base::rng::entropy().map_err(Failure::of)?;
    // Short enough to type.
    Ok(u64::from(u32::from_le_bytes([a, b, c, d])))
}

fn text(shown: &Shown) -> String {
    let mut text = String::new();
    for complaint in &shown.complaints {
        text += &format!("after kill {}: {}\n", complaint.kill, complaint.what);
    }
    text += &format!(
        "{} kills, {} operations, {} of them durable, in {:.0} s: ",
        shown.kills, shown.operations, shown.syncs, shown.seconds
    );
    text += match shown.exit_code {
        0 => "nothing that was synced is lost, fsck finds no error\n",
        _ => "THERE IS LOSS OR DAMAGE\n",
    };
    if let Some(kept) = &shown.kept {
        text += &format!("images and the daemon's log are in {kept}\n");
    }
    text
}

struct Run {
    rng: Rng,
    clock: Clock,
    /// In seconds.
    step_limit: u64,
    /// Each is locked by the thread that it is, for as long as that writes.
    writers: Vec<Mutex<Writer>>,
    progress: Progress,
    /// Steps that did something.
    operations: AtomicU64,
    kills: u32,
    complaints: Vec<Complaint>,
    bar: ProgressBar,
}

impl Run {
    fn new(args: &Torture, seed: u64, array: &Array) -> Self {
        let mut rng = Rng::new(seed);
        let writer = |i: usize| Writer::new(array.mnt().join(format!("writer{i}")), rng.next_u64());
        let writers = (0..WRITERS).map(writer);
        Run {
            writers: writers.map(|w| Mutex::new(rank::LEAF, w)).collect(),
            rng,
            clock: Clock::real(),
            step_limit: args.step_limit,
            progress: Progress::default(),
            operations: AtomicU64::new(0),
            kills: 0,
            complaints: Vec::new(),
            bar: progress::bar("Seconds:", args.kills.map_or(args.seconds, |_| 0)),
        }
    }

    fn seconds(&self) -> f64 {
        self.clock.monotonic_ns() as f64 / 1e9
    }

    /// Mounts for the first time. What fails here is no loss: there is nothing to lose yet.
    fn begin(&self, array: &mut Array) -> Result<(), Failure> {
        self.mount(array)
            .map_err(|failure| match array.log_tail().as_str() {
                "" => failure,
                log => failure.after("the daemon's log:").followed_by(log),
            })
    }

    /// With the writers' folders in it.
    fn mount(&self, array: &mut Array) -> Result<(), Failure> {
        array.start()?;
        self.writers.iter().try_for_each(|writer| {
            let what = "preparing a writer's folder";
            let prepared = self.guarded(array, what, || writer.lock().prepare())?;
            prepared.map_err(|e| Failure::io("preparing the writers' folders", &e))
        })
    }

    /// Does that on the mount, within the limit for a step.
    fn guarded<T: Send>(
        &self,
        array: &Array,
        what: &str,
        work: impl Fn() -> T + Sync,
    ) -> Result<T, Failure> {
        guarded(&self.clock, self.step_limit, what, work, || {
            array.signal_kill()
        })
    }

    /// Kills until the time is over, or the count reached, or there are too many complaints. It is mounted.
    fn go(&mut self, args: &Torture, array: &mut Array) {
        loop {
            let over = match args.kills {
                Some(kills) => self.kills >= kills,
                None => self.seconds() >= args.seconds as f64,
            };
            if over || self.complaints.len() >= PATIENCE {
                break;
            }
            self.bar.set_position(self.seconds() as u64);
            self.bar
                .set_message(format!("{} kills. Seconds:", self.kills));
            let mounted = match self.kills {
                0 => Ok(()),
                _ => self.mount(array),
            };
            self.kills += 1;
            let checked = mounted.and_then(|()| self.write_and_kill(array));
            let checked = checked.and_then(|()| self.after_kill(array));
            let (what, fatal) = match checked {
                Ok(complaints) => (complaints, false),
                Err(failure) => {
                    let why = failure.message().unwrap_or("failed").to_owned();
                    (vec![format!("{why}\n{}", array.log_tail())], true)
                }
            };
            let kill = self.kills;
            self.complaints
                .extend(what.into_iter().map(|what| Complaint { kill, what }));
            if fatal {
                break;
            }
        }
        self.bar.finish_and_clear();
    }

    /// Lets the writers write, and kills the daemon. In the first round, and each third from there, they must be
    /// seen to get on.
    fn write_and_kill(&mut self, array: &mut Array) -> Result<(), Failure> {
        let time = Duration::from_millis(self.rng.range(1, 600));
        let limit = (self.kills % 3 == 1).then(|| Duration::from_secs(self.step_limit));
        let over = AtomicBool::new(false);
        let results = base::thread::parallel(WRITERS + 1, |role| match self.writers.get(role) {
            Some(writer) => self.write_until(role, &mut writer.lock(), &over),
            None => {
                let end = self.clock.monotonic_ns() + time.as_nanos() as u64;
                wait_until(&self.clock, end, || over.load(Ordering::SeqCst));
                let stuck = limit.and_then(|limit| {
                    let failed = || over.load(Ordering::SeqCst);
                    self.progress.stuck(&self.clock, limit, failed)
                });
                over.store(true, Ordering::SeqCst);
                array.signal_kill()?;
                stuck.map_or(Ok(()), Err)
            }
        });
        let reaped = array.reap_killed();
        results.into_iter().collect::<Result<(), Failure>>()?;
        reaped
    }

    /// Steps until the flag is set; an error before that is a failure.
    fn write_until(
        &self,
        role: usize,
        writer: &mut Writer,
        over: &AtomicBool,
    ) -> Result<(), Failure> {
        while !over.load(Ordering::SeqCst) {
            let before = writer.syncs;
            match writer.step() {
                Ok(did_something) => {
                    let did = u64::from(did_something);
                    self.operations.fetch_add(did, Ordering::Relaxed);
                    self.progress.note(role, writer.syncs - before);
                }
                Err(_) if over.load(Ordering::SeqCst) => break,
                Err(error) => {
                    over.store(true, Ordering::SeqCst);
                    return Err(Failure::new(format!(
                        "a writer got \"{error}\" before the kill; last steps: {}",
                        writer.last_steps.join(", ")
                    )));
                }
            }
        }
        Ok(())
    }

    /// Checks the array after a kill: in turn fsck before recovery, the dead mount unmounted, a
    /// kill during recovery; and always what is found, and fsck after a clean unmount.
    fn after_kill(&mut self, array: &mut Array) -> Result<Vec<String>, Failure> {
        let mut complaints = Vec::new();
        match self.kills % 4 {
            1 => complaints.extend(array.fsck("before recovery")?),
            2 => array.unmount_dead()?,
            3 => {
                array.start_without_waiting()?;
                pause(Duration::from_millis(self.rng.below(60)));
                array.signal_kill()?;
                array.reap_killed()?;
            }
            _ => {}
        }
        array.start()?;
        for (i, writer) in self.writers.iter().enumerate() {
            let what = format!("reading what writer {i} left");
            match self.guarded(array, &what, || writer.lock().verify())? {
                Ok(found) => complaints.extend(found.iter().map(|c| format!("writer {i}: {c}"))),
                Err(error) => complaints.push(format!("writer {i}: cannot read: {error}")),
            }
        }
        array.unmount()?;
        complaints.extend(array.fsck("after recovery")?);
        Ok(complaints)
    }
}

/// What the writers have done so far.
#[derive(Default)]
struct Progress {
    /// Steps that each has ended.
    steps: [AtomicU64; WRITERS],
    syncs: AtomicU64,
}

impl Progress {
    fn note(&self, writer: usize, syncs: u64) {
        self.syncs.fetch_add(syncs, Ordering::SeqCst);
        self.steps[writer].fetch_add(1, Ordering::SeqCst);
    }

    /// Waits until every writer has ended another step, and something was synced; a failure if that takes too long.
    /// A writer's own failure ends the wait.
    fn stuck(&self, clock: &Clock, limit: Duration, failed: impl Fn() -> bool) -> Option<Failure> {
        let steps = || self.steps.each_ref().map(|s| s.load(Ordering::SeqCst));
        let before = steps();
        let behind = || {
            let now = steps();
            let writers = (0..WRITERS).filter(|&i| now[i] == before[i]);
            writers.map(|i| i.to_string()).collect::<Vec<_>>()
        };
        let is_done = || behind().is_empty() && self.syncs.load(Ordering::SeqCst) > 0;
        let end = clock.monotonic_ns() + limit.as_nanos() as u64;
        wait_until(clock, end, || failed() || is_done());
        if failed() || is_done() {
            return None;
        }
        let seconds = limit.as_secs();
        Some(Failure::new(match &behind()[..] {
            [] => format!("no sync has ended after {seconds} s"),
            stuck => format!(
                "writers hang: {} ended no step in {seconds} s (see --step-limit)",
                stuck.join(", ")
            ),
        }))
    }
}

/// Does that, which hangs if the daemon does. After so many seconds the daemon is killed, with which all that hangs there ends.
fn guarded<T: Send>(
    clock: &Clock,
    seconds: u64,
    what: &str,
    work: impl Fn() -> T + Sync,
    kill: impl Fn() -> Result<(), Failure> + Sync,
) -> Result<T, Failure> {
    let is_over = AtomicBool::new(false);
    let end = clock.monotonic_ns() + Duration::from_secs(seconds).as_nanos() as u64;
    let results = base::thread::parallel(2, |role| match role {
        0 => {
            let done = work();
            is_over.store(true, Ordering::SeqCst);
            Ok(Some(done))
        }
        _ => {
            wait_until(clock, end, || is_over.load(Ordering::SeqCst));
            if is_over.load(Ordering::SeqCst) {
                return Ok(None);
            }
            kill()?;
            Err(Failure::new(format!(
                "{what} hangs: it has not ended in {seconds} s (see --step-limit)"
            )))
        }
    });
    let done = results.into_iter().collect::<Result<Vec<_>, Failure>>()?;
    let done = done.into_iter().flatten().next();
    done.ok_or_else(|| Failure::new(format!("{what}: nothing came of it")))
}

/// Waits until that time, but no longer than `is_over` is false.
fn wait_until(clock: &Clock, end: u64, is_over: impl Fn() -> bool) {
    while !is_over() {
        let left = end.saturating_sub(clock.monotonic_ns());
        if left == 0 {
            return;
        }
        pause(Duration::from_nanos(left.min(2_000_000)));
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Torture,
    }

    /// Without its options the command was another.
    #[test]
    fn the_command_that_draws_the_same_has_all_options() {
        for words in [
            "/array --seed 7 --seconds 5 --step-limit 30 -o cache_size=1M -o noatime,ro",
            "/array --seed 7 --kills 3 --step-limit 9",
        ] {
            let line = ["torture"].into_iter().chain(words.split(' '));
            let args = Cli::parse_from(line).args;
            assert!(again(&args, 7).contains(&format!("sheaf torture {words} draws")));
        }
    }

    #[test]
    fn a_run_that_synced_nothing_is_no_success() {
        assert!(check_tried(0).is_err());
        assert!(check_tried(1).is_ok());
    }

    /// A daemon that hung while a writer's folder was made, or read after the kill, was waited for without end.
    #[test]
    fn what_hangs_on_the_mount_is_ended_by_a_kill() {
        let clock = Clock::real();
        let is_killed = AtomicBool::new(false);
        let killed = || is_killed.load(Ordering::SeqCst);
        let hang = || wait_until(&clock, u64::MAX, killed);
        let kill = || {
            is_killed.store(true, Ordering::SeqCst);
            Ok(())
        };
        assert_eq!(guarded(&clock, 60, "it", || 7, kill).ok(), Some(7));
        assert!(!killed());
        let failed = guarded(&clock, 1, "reading", hang, kill).unwrap_err();
        assert!(killed());
        let message = failed.message().unwrap();
        assert!(message.starts_with("reading hangs: it has not ended in 1 s"));
    }

    #[test]
    fn a_writer_that_ends_no_step_is_stuck() {
        let clock = Clock::real();
        let soon = Duration::from_millis(20);
        let progress = Progress::default();
        let message =
            |failure: Option<Failure>| failure.and_then(|f| f.message().map(str::to_owned));
        let stuck = message(progress.stuck(&clock, soon, || false)).unwrap();
        assert!(stuck.contains("0, 1, 2, 3 ended no step"), "{stuck}");
        // It has failed, and says why itself.
        assert!(progress.stuck(&clock, soon, || true).is_none());
        let results = base::thread::parallel(2, |role| match role {
            0 => message(progress.stuck(&clock, Duration::from_millis(200), || false)),
            _ => {
                // Steps of before do not count.
                let end = clock.monotonic_ns() + 50_000_000;
                wait_until(&clock, end, || false);
                for writer in [0, 1, 3] {
                    progress.note(writer, 1);
                }
                None
            }
        });
        let stuck = results[0].as_ref().unwrap();
        assert!(stuck.contains("hang: 2 ended"), "{stuck}");
    }
}
