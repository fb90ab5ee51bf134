//! `sheaf demo`, as the README has it: on a mount, and in-process.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::Context;
use crate::report::Suite;
use crate::world::World;
use crate::{Fallible, process};

pub fn run(_: &Context, world: &mut World, suite: &mut Suite) -> Fallible<()> {
    if world.is_external() {
        suite.exclude("all", "makes an array of its own");
        return Ok(());
    }
    suite.check("mounted", demo(world, "Mounted", &[])?);
    let sources = process::source_dir().join("crates");
    let unmounted: [&Path; 3] = ["--no-mount".as_ref(), "--tree".as_ref(), &sources];
    suite.check("in-process", demo(world, "In-process", &unmounted)?);
    Ok(())
}

/// It succeeds, works in the way that `stage` names, and leaves nothing behind.
fn demo(world: &World, stage: &str, more: &[&Path]) -> Fallible<Fallible<()>> {
    let dir = world.side_dir().join(format!("demo-{stage}"));
    std::fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut demo = Command::new(world.sheaf());
    demo.args(["demo", "--dir"]).arg(&dir).args(more);
    let log = format!("demo-{stage}");
    let outcome = process::run(&log, &mut demo, Duration::from_secs(300))?;
    let left = std::fs::read_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    Ok(outcome.check("sheaf demo").and_then(|()| {
        let tells = |word: &str| outcome.output.contains(word);
        match (tells(stage) && tells("Done"), left.count()) {
            (true, 0) => Ok(()),
            (true, _) => Err("something is left behind".to_owned()),
            (false, _) => Err(process::tail(&outcome.output, 20)),
        }
    }))
}
