//! The fuzz targets over their corpora and seeded mutations, on the compiler at hand.

use std::process::Command;
use std::time::Duration;

use crate::report::Suite;
use crate::{Fallible, TestArgs, process, simulate};

const TARGETS: &[&str] = &[
    "image",
    "journal_bytes",
    "journal_records",
    "bucket",
    "delta",
];

pub fn run(args: &TestArgs, suite: &mut Suite) -> Fallible<()> {
    let program = simulate::tested("sheaf-fuzz")?;
    for target in TARGETS {
        let mut command = Command::new(&program);
        command
            .args(["--target", target, "--seconds", &args.seconds.to_string()])
            .args(["--seed", &args.seed.to_string()]);
        // One input may be slow, and the corpus comes before the clock is looked at.
        let limit = Duration::from_secs(args.seconds + 120);
        let outcome = process::run(&format!("fuzz-{target}"), &mut command, limit)?;
        suite.check(target, outcome.check("sheaf-fuzz"));
    }
    Ok(())
}
