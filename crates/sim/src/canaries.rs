//! Breaks the file system on purpose, one canary after the other, and looks whether the
//! simulator notices.

use crate::run::Budget;
use base::canary::{Canary, Needs};
use base::sync::{Mutex, rank};
use std::process::{Command, Stdio};

/// How a canary fared.
#[derive(Clone, Debug)]
pub struct Verdict {
    pub canary: Canary,
    /// The mode that found it, and the seconds that took; `None`: it survived.
    pub caught: Option<(&'static str, u64)>,
}

/// The modes, in the order in which they are most likely to find a canary soon.
fn modes(canary: Canary) -> &'static [&'static str] {
    match canary {
        // Aimed scenarios have not met these in a minute.
        Canary::SegmentReusedEarly | Canary::BlocksReusedEarly | Canary::FailedWriteIgnored => {
            return &["random", "aimed", "threads"];
        }
        Canary::NameNotRechecked => return &["threads", "aimed", "random"],
        _ => {}
    }
    match canary.needs() {
        Needs::Nothing | Needs::Cut => &["aimed", "random", "threads", "exhaustive"],
        Needs::Fault => &["aimed", "random", "threads"],
        Needs::Threads => &["aimed", "threads", "random"],
        Needs::Forgery => &["aimed"],
    }
}

/// Plants each canary in a process of its own, since what it does may end that, and searches for
/// up to `seconds` in each mode.
pub fn hunt(canaries: &[Canary], workers: usize, seconds: u64) -> Result<Vec<Verdict>, String> {
    let program = std::env::current_exe().map_err(|e| format!("this program: {e}"))?;
    let todo = Mutex::new(rank::LEAF, canaries.to_vec());
    let search = |canary: Canary| -> Result<Verdict, String> {
        let budget = Budget::seconds(u64::from(u32::MAX));
        for mode in modes(canary) {
            let status = Command::new(&program)
                .args([mode, "--seconds", &seconds.to_string()])
                .args(["--canary", canary.name()])
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .map_err(|e| format!("{}: {e}", program.display()))?;
            if !status.success() {
                let caught = Some((*mode, budget.spent()));
                return Ok(Verdict { canary, caught });
            }
        }
        Ok(Verdict {
            canary,
            caught: None,
        })
    };
    let results = base::thread::parallel(workers, |_| {
        let mut verdicts = Vec::new();
        loop {
            let next = todo.lock().pop();
            let Some(canary) = next else {
                return Ok(verdicts);
            };
            let verdict = search(canary)?;
            match verdict.caught {
                Some((mode, spent)) => eprintln!("{}: {mode}, {spent} s", canary.name()),
                None => eprintln!("{}: survived", canary.name()),
            }
            verdicts.push(verdict);
        }
    });
    let lists: Vec<Vec<Verdict>> = results.into_iter().collect::<Result<_, String>>()?;
    Ok(lists.into_iter().flatten().collect())
}
