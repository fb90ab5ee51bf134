//! Breaks the file system on purpose, one canary after the other, and looks whether the
//! simulator notices.

use crate::run::VIOLATED;
use base::canary::{Canary, Needs};
use base::clock::Clock;
use base::sync::{Mutex, rank};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

/// How a canary fared.
#[derive(Clone, Debug)]
pub struct Verdict {
    pub canary: Canary,
    /// What shows it again, as arguments of this program; `None`: it survived.
    pub caught: Option<String>,
    /// What that took.
    pub seconds: f64,
}

/// Where a canary is looked for first.
enum Place {
    /// An aimed scenario, alone.
    Scenario(&'static str),
    /// Another mode, from this seed on: one that has shown it, for some show in few. It goes on to later ones, so that a seed that does no longer costs time alone.
    Seeds(&'static str, &'static str),
}
use Place::{Scenario, Seeds};

/// Where a canary shows soonest. What does not show there is looked for everywhere else.
fn place(canary: Canary) -> Place {
    use Canary::*;
    match canary {
        SkipPreflush
        | DataUnchecked
        | VouchedOverwritten
        | DataReadEarly
        | BatchNotDurable
        | HalfRecord
        | VersionReset
        | DirtyNodeForgotten
        | CheckpointUnflushed
        | BothSlots
        | ChunkStateStale
        | NoClosingCheckpoint
        | LabelsAfterRecord
        | TornBatchAccepted
        | GenerationIgnored
        | FirstDeviceFlushed
        | FsyncUncommitted
        | OverwriteUnflushed
        | SizeBeforeData
        | TailNotZeroed
        | TailEndedEarly
        | TailOutlived
        | OrphanIntentDropped
        | ReplaceBeforeData
        | ExchangeBeforeData
        | AncestryUnchecked
        | FullDirectoryRemoved
        | TransactionInParts
        | TransactionWrittenOver => Scenario("classics"),
        TailBeforeRecord => Scenario("interposed"),
        VersionGapAccepted => Scenario("forged"),
        StaleBatchAccepted => Scenario("stale"),
        FailedFlushForgotten | LossUntold => Scenario("untold"),
        FlushBesideUnseen | BatchBesideUnseen => Scenario("beside"),
        FloorNotRaised | LookForgotten | TimesNotPersisted | CookiesGoOn => Scenario("stamps"),
        LookNotSeen | MergesInLogOrder => Scenario("directory-times"),
        MergesNotFolded | IndexNotLowered | ShapeIgnored | MergesReplayedTwice
        | ImagesAheadOfLog | ReadersNotAwaited | TallyPartForgotten | GoneNodeHeld => {
            Scenario("crowd")
        }
        AheadPastCut | LoadPublishedEarly | StreamUnasked => Scenario("scans"),
        PiecesNotEnded | PieceLoggedEarly => Scenario("streams"),
        ChangeNotedLate => Scenario("noticed"),
        VersionUnchecked => Scenario("pages"),
        DurableOutOfOrder | PinsIgnored | PaceIgnored => Scenario("reclaim"),
        FlightsNotAwaited => Scenario("flights"),
        CleanedTooEarly | GuardOverwritten | RangeIgnored | StoresUnseen | DirectUnderHome
        | FlushUnderWayCovers | LoadUndoomed | FlightUnnoted | FilledBeforeWritten
        | FlightKeptLate | SyncJoined => Scenario("one-file"),
        TransactionUnchecked | TransactionMergedEarly | TransactionNotUndone | ReadersConflict => {
            Scenario("transactions")
        }
        AtomicInParts | AtomicNotAwaited | AtomicPromiseKept => Scenario("atomic-writes"),
        RenameUnlocked => Scenario("crossing-moves"),
        SilentTruncation => Scenario("rot"),
        FailedBatchIgnored | PromiseLeaked => Scenario("failing"),
        NoCredits => Scenario("flood"),
        FailedWriteIgnored => Scenario("atomic-errors"),
        LeafLeftOut => Scenario("failing-reads"),
        FullWriteZeroes | FullTakenForFailure => Scenario("full"),
        SmallBatches | BlocksReusedEarly => Seeds("random", "0"),
        SecondCopyIgnored => Seeds("random", "11"),
        SegmentReusedEarly => Seeds("random", "55"),
        DirectoryUncommitted => Seeds("threads", "0"),
        NameNotRechecked => Seeds("threads", "168"),
    }
}

/// Searches for a canary one after the other, the likeliest first: arguments of this program.
fn searches(canary: Canary) -> Vec<Vec<&'static str>> {
    let modes: &[&str] = match canary.needs() {
        Needs::Nothing | Needs::Cut => &["aimed", "random", "threads", "exhaustive"],
        Needs::Fault => &["aimed", "random", "threads"],
        Needs::Threads => &["aimed", "threads", "random"],
        Needs::Forgery => &["aimed"],
    };
    let first = match place(canary) {
        Scenario(name) => vec!["aimed", "--only", name],
        Seeds(mode, first) => vec![mode, "--first", first],
    };
    let others = modes.iter().map(|mode| vec![*mode]);
    [vec![first], others.collect()].concat()
}

/// What the standard library exits with after a panic, as of an assertion of the file system that is made before there is a scenario.
const PANICKED: i32 = 101;

/// Whether a search that ended so, and `said` that, has found the canary: one that could not be made has not.
fn is_caught(status: ExitStatus, said: &str) -> Result<bool, String> {
    match (status.code(), status.signal()) {
        (Some(0), _) => Ok(false),
        (Some(PANICKED), _) => Ok(true),
        (Some(code), _) if code == i32::from(VIOLATED) => Ok(true),
        // Whoever cannot go on, as when all threads wait, is aborted. Nobody else sends these.
        (_, Some(libc::SIGABRT | libc::SIGSEGV | libc::SIGBUS)) => Ok(true),
        _ => Err(format!("{status}: {said}")),
    }
}

/// Plants a canary in a process of its own, since what it does may end that, and makes each search
/// for up to `seconds`.
fn search(canary: Canary, seconds: u64) -> Result<Verdict, String> {
    let program = std::env::current_exe().map_err(|e| format!("this program: {e}"))?;
    let clock = Clock::real();
    let mut caught = None;
    for search in searches(canary) {
        let output = Command::new(&program)
            .args(&search)
            .args(["--seconds", &seconds.to_string()])
            .args(["--canary", canary.name()])
            .output()
            .map_err(|e| format!("{}: {e}", program.display()))?;
        let said = String::from_utf8_lossy(&output.stderr);
        if is_caught(output.status, said.trim_end())
            .map_err(|e| format!("{} of {}: {e}", search.join(" "), canary.name()))?
        {
            let text = String::from_utf8_lossy(&output.stdout);
            let replay = text.lines().find_map(|line| line.split_once(" -- "));
            // A process that is aborted says nothing.
            let replay = replay.map(|(_, arguments)| arguments.to_owned());
            caught = Some(replay.unwrap_or_else(|| search.join(" ")));
            break;
        }
    }
    Ok(Verdict {
        canary,
        caught,
        seconds: clock.monotonic_ns() as f64 / 1e9,
    })
}

/// Searches for each canary, for up to `seconds` in each way.
pub fn hunt(canaries: &[Canary], workers: usize, seconds: u64) -> Result<Vec<Verdict>, String> {
    let todo = Mutex::new(rank::LEAF, canaries.to_vec());
    let cpus = base::thread::allowed_cpus();
    let results = base::thread::parallel(workers, |worker| {
        // A process inherits it: two that run one thread at a time would choose the same CPU.
        if workers > 1 && !cpus.is_empty() {
            let cpu = cpus[worker % cpus.len()];
            base::thread::pin(cpu).map_err(|e| format!("CPU {cpu}: {e}"))?;
        }
        let mut verdicts = Vec::new();
        loop {
            let next = todo.lock().pop();
            let Some(canary) = next else {
                return Ok(verdicts);
            };
            let verdict = search(canary, seconds)?;
            let (name, seconds) = (canary.name(), verdict.seconds);
            match &verdict.caught {
                Some(caught) => eprintln!("{name}: {seconds:.1} s, {caught}"),
                None => eprintln!("{name}: survived, {seconds:.1} s"),
            }
            verdicts.push(verdict);
        }
    });
    let lists: Vec<Vec<Verdict>> = results.into_iter().collect::<Result<_, String>>()?;
    Ok(lists.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aimed;

    /// Any end but a good one counted as caught: also that of a search that had not begun.
    #[test]
    fn a_search_that_could_not_be_made_has_caught_nothing() {
        let exit = |code: i32| is_caught(ExitStatus::from_raw(code << 8), "");
        let killed = |signal: i32| is_caught(ExitStatus::from_raw(signal), "");
        assert_eq!(exit(0), Ok(false));
        for caught in [
            exit(i32::from(VIOLATED)),
            exit(PANICKED),
            killed(libc::SIGABRT),
        ] {
            assert_eq!(caught, Ok(true));
        }
        for failed in [exit(1), exit(2), killed(libc::SIGKILL)] {
            assert!(failed.is_err());
        }
    }

    #[test]
    fn canaries_are_looked_for_where_something_is() {
        for canary in Canary::ALL {
            if let Scenario(name) = place(*canary) {
                assert!(aimed::Scenario::from_name(name).is_some(), "{name}");
            }
        }
    }
}
