//! fsx: random operations on one file, every read compared with what must be there.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::Context;
use crate::report::Suite;
use crate::world::World;
use crate::{Fallible, packages, process};

pub const NAME: &str = "fsx";
const OPERATIONS: &str = "45000";
const SEEDS: [u64; 3] = [1, 20, 300];
/// For all runs together.
const LIMIT: Duration = Duration::from_secs(900);

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

/// How fsx opens its file.
struct Way {
    name: &'static str,
    config: PathBuf,
    /// Preloaded.
    shim: Option<PathBuf>,
}

impl Way {
    fn new(dir: &Path, name: &'static str, shim: Option<PathBuf>) -> Fallible<Way> {
        let config = dir.join(format!("fsx-{name}.toml"));
        let align = if shim.is_some() { 512 } else { 1 };
        std::fs::write(&config, configuration(align))
            .map_err(|e| format!("{}: {e}", config.display()))?;
        Ok(Way { name, config, shim })
    }
}

pub fn run(_: &Context, world: &mut World, suite: &mut Suite) -> Fallible<()> {
    let dir = world.side_dir();
    let mut ways = vec![Way::new(dir, "buffered", None)?];
    match cfg!(target_arch = "x86_64") {
        true => ways.push(Way::new(dir, "direct", Some(build_direct_shim(dir)?))?),
        false => suite.exclude(
            "direct",
            "the library that opens its file with O_DIRECT knows the system calls of x86-64 alone",
        ),
    }
    let world = &*world;
    // All side by side, as programs would use one mount.
    std::thread::scope(|scope| {
        let mut started = Vec::new();
        for way in &ways {
            for seed in SEEDS {
                let name = format!("fsx-{}-{seed}", way.name);
                let log = name.clone();
                started.push((name, scope.spawn(move || one_run(world, &log, seed, way))));
            }
        }
        for (name, run) in started {
            suite.check(&name, run.join().unwrap_or(Err("panicked".to_owned()))?);
        }
        Ok(())
    })
}

fn one_run(world: &World, name: &str, seed: u64, way: &Way) -> Fallible<Fallible<()>> {
    let file = world.mnt.join(name);
    let mut command = Command::new(packages::tool("fsx"));
    command
        .args(["-N", OPERATIONS, "-S", &seed.to_string(), "-f"])
        .arg(&way.config)
        .arg("-P")
        .arg(world.side_dir())
        .arg(&file);
    let mark = world.side_dir().join(format!("{name}.direct"));
    // An earlier run's would do for this one.
    if let Err(error) = fs::remove_file(&mark)
        && error.kind() != ErrorKind::NotFound
    {
        return Err(format!("{}: {error}", mark.display()));
    }
    if let Some(shim) = &way.shim {
        command.env("LD_PRELOAD", shim);
        command.env("ODIRECT_PATH", &file);
        command.env("ODIRECT_MARK", &mark);
    }
    let outcome = process::run(name, &mut command, LIMIT)?;
    Ok(outcome
        .check("fsx")
        .and_then(|()| match way.shim.is_some() && !mark.exists() {
            true => Err(
                "the library that is preloaded opened no file with O_DIRECT: all went through the cache"
                    .to_owned(),
            ),
            false => Ok(()),
        }))
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
