//! fsx: random operations on one file, every read compared with what must be there.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::Context;
use crate::report::Suite;
use crate::world::World;
use crate::{Fallible, packages, process};

const OPERATIONS: &str = "100000";
const SEEDS: [u64; 3] = [1, 20, 300];

/// Everything fsx knows. `align` is 1 for buffered runs, a logical block for O_DIRECT. With
/// an alignment fsx itself stumbles over posix_fallocate (it asks for zero bytes).
fn configuration(align: u32) -> String {
    let fallocate = if align == 1 { 2 } else { 0 };
    format!(
        "flen = 524288\n\
         [opsize]\nmax = 65536\nmin = 0\nalign = {align}\n\
         [weights]\nclose_open = 1\nread = 10\nwrite = 10\nmapread = 6\nmapwrite = 2\n\
         invalidate = 1\ntruncate = 3\nfsync = 0.1\nfdatasync = 0.05\n\
         posix_fallocate = {fallocate}\n\
         punch_hole = 3\nsendfile = 2\nposix_fadvise = 1\ncopy_file_range = 2\n"
    )
}

pub fn run(_: &Context, world: &mut World, suite: &mut Suite) -> Fallible<()> {
    let direct = build_direct_shim(world.side_dir())?;
    // The two run side by side: most of their time is waiting for the devices.
    for seed in SEEDS {
        let (buffered, direct) = std::thread::scope(|scope| {
            let other = scope.spawn(|| one_run(world, seed, Some(&direct)));
            let buffered = one_run(world, seed, None);
            let direct = other.join();
            (buffered, direct.unwrap_or(Err("panicked".to_owned())))
        });
        suite.check(&format!("seed {seed}, buffered"), buffered?);
        suite.check(&format!("seed {seed}, O_DIRECT"), direct?);
    }
    Ok(())
}

fn one_run(world: &World, seed: u64, shim: Option<&Path>) -> Fallible<Fallible<()>> {
    let kind = if shim.is_some() { "direct" } else { "buffered" };
    let file = world.mnt.join(format!("fsx-{kind}-{seed}"));
    let side = world.side_dir();
    let config = side.join(format!("fsx-{kind}.toml"));
    let align = if shim.is_some() { 512 } else { 1 };
    std::fs::write(&config, configuration(align))
        .map_err(|e| format!("{}: {e}", config.display()))?;
    let mut command = Command::new(packages::tool("fsx"));
    command
        .args(["-N", OPERATIONS, "-S", &seed.to_string(), "-f"])
        .arg(&config)
        .arg("-P")
        .arg(side)
        .arg(&file);
    if let Some(shim) = shim {
        command.env("LD_PRELOAD", shim);
        command.env("ODIRECT_PATH", &file);
    }
    let log = format!("fsx-{kind}-{seed}");
    let outcome = process::run(&log, &mut command, Duration::from_secs(400))?;
    Ok(outcome.check("fsx"))
}

/// fsx has no option for O_DIRECT: a preloaded library opens its file so.
fn build_direct_shim(dir: &Path) -> Fallible<PathBuf> {
    let source = process::source_dir().join("xtask/shim/odirect.rs");
    let library = dir.join("libodirect.so");
    let mut rustc = Command::new("rustc");
    rustc
        .args(["--edition", "2024", "--crate-type", "cdylib", "-O", "-o"])
        .arg(&library)
        .arg(&source);
    process::run("odirect", &mut rustc, Duration::from_secs(60))?.check("rustc odirect.rs")?;
    Ok(library)
}
