//! SIGKILL to the daemon at random moments under several writers, then mount again: nothing
//! that was synced may be lost, nothing half-done may be seen, and fsck must find nothing. It is
//! `sheaf torture`, as users have it, that does all this.

use std::process::Command;
use std::time::Duration;

use super::Context;
use crate::report::Suite;
use crate::world::World;
use crate::{Fallible, process};

pub fn run(context: &Context, world: &mut World, suite: &mut Suite) -> Fallible<()> {
    if world.is_external() {
        suite.exclude("all", "makes an array of its own");
        return Ok(());
    }
    let kills = context.args.kills;
    let mut torture = Command::new(world.sheaf());
    torture
        .args(["torture", "--json"])
        .args(["--kills", &kills.to_string()])
        .args(["--seed", &context.args.seed.to_string()])
        .arg(world.side_dir());
    if let Some(options) = &context.args.options {
        torture.args(["-o", options]);
    }
    let limit = Duration::from_secs(120 + 10 * u64::from(kills));
    let outcome = process::run("torture", &mut torture, limit)?;
    let result: serde_json::Value =
        serde_json::from_str(&outcome.output).map_err(|_| process::tail(&outcome.output, 30))?;
    let complaints = result["complaints"].as_array().cloned();
    for complaint in complaints.ok_or("sheaf torture reports nothing")? {
        let what = complaint["what"].as_str().unwrap_or_default();
        suite.fail(format!("kill {}: {what}", complaint["kill"]));
    }
    let done = result["kills"].as_u64().unwrap_or(0);
    match done == u64::from(kills) {
        true if suite.failed == 0 => suite.passed += kills as usize,
        true => {}
        false => suite.fail(format!("only {done} of {kills} kills")),
    }
    suite.check("sheaf torture", outcome.check("sheaf torture"));
    println!(
        "  {done} kills, {} operations, {} syncs",
        result["operations"], result["syncs"]
    );
    Ok(())
}
