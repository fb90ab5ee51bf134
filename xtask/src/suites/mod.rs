//! The suites of `cargo xtask test`, in the order in which they run.

mod cargo;
mod demo;
mod fsx;
mod full;
mod fuzz;
mod kill;
mod memory;
mod mounting;
mod pjdfstest;
mod posix;
mod programs;
mod stress;
mod units;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::exclusions::Exclusions;
use crate::report::{self, Suite};
use crate::world::World;
use crate::{Fallible, TestArgs, docs, packages, process, source};

/// What a suite on a mount is given.
pub struct Context<'a> {
    pub args: &'a TestArgs,
    pub exclusions: &'a Exclusions,
}

type Plain = fn(&TestArgs, &mut Suite) -> Fallible<()>;
type Mounted = fn(&Context, &mut World, &mut Suite) -> Fallible<()>;

const PLAIN: &[(&str, Plain)] = &[
    ("fmt", |_, suite| cargo::fmt(suite)),
    ("clippy", |_, suite| cargo::clippy(suite)),
    ("edges", |_, suite| source::run(suite)),
    ("docs", |_, suite| {
        suite.check("docs/format.md", docs::run(true));
        Ok(())
    }),
    ("contrib", |_, suite| units::run(suite)),
    ("unit", cargo::unit_tests),
    ("sim", |_, suite| crate::simulate::suite(suite)),
    ("fuzz", fuzz::run),
];

/// Suites by the way in which requests come from the kernel.
const MOUNTED: &[(&str, Option<FuseIo>, Mounted)] = &[
    ("posix", Some(FuseIo::Dev), posix::run),
    ("posix-uring", Some(FuseIo::Uring), posix::run),
    ("mount", None, mounting::run),
    ("demo", None, demo::run),
    ("pjdfstest", Some(FuseIo::Dev), pjdfstest::run),
    ("pjdfstest-uring", Some(FuseIo::Uring), pjdfstest::run),
    (fsx::NAME, None, fsx::run),
    ("programs", None, programs::run),
    ("fio", Some(FuseIo::Dev), stress::fio),
    ("fio-uring", Some(FuseIo::Uring), stress::fio),
    ("stress", Some(FuseIo::Dev), stress::stress_ng),
    ("dbench", Some(FuseIo::Dev), stress::dbench),
    ("full", Some(FuseIo::Dev), full::run),
    ("full-uring", Some(FuseIo::Uring), full::run),
    ("memory", None, memory::run),
    ("kill", None, kill::run),
];

/// See `-o fuse_io`; a suite that names none has what a mount chooses by itself.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FuseIo {
    Dev,
    Uring,
}

impl FuseIo {
    fn option(self) -> &'static str {
        match self {
            FuseIo::Dev => "fuse_io=dev",
            FuseIo::Uring => "fuse_io=uring",
        }
    }
}

/// FUSE over io_uring, offered by the kernel as long as this lives, if it can be.
struct Offer {
    parameter: PathBuf,
    before: Option<String>,
}

impl Offer {
    fn make() -> Offer {
        // The module may not be there before its device is opened.
        if let Err(error) = std::fs::File::open("/dev/fuse") {
            eprintln!("/dev/fuse: {error}");
        }
        Offer::of(Path::new("/sys/module/fuse/parameters/enable_uring"))
    }

    /// A write may succeed and change nothing.
    fn of(parameter: &Path) -> Offer {
        let read = || std::fs::read_to_string(parameter).ok();
        let before = read().filter(|_| std::fs::write(parameter, "Y").is_ok());
        Offer {
            parameter: parameter.to_owned(),
            before: before.filter(|_| read().is_some_and(|now| now.trim() == "Y")),
        }
    }

    fn holds(&self) -> bool {
        self.before.is_some()
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        if let Some(before) = &self.before
            && let Err(error) = std::fs::write(&self.parameter, before.trim())
        {
            eprintln!("{} stays as it is: {error}", self.parameter.display());
        }
    }
}

/// The suites that were asked for, in their order.
struct Chosen {
    plain: Vec<&'static (&'static str, Plain)>,
    mounted: Vec<&'static (&'static str, Option<FuseIo>, Mounted)>,
}

/// Whoever names a suite gets it, or is told why not; and there is one at least.
fn choose(args: &TestArgs) -> Fallible<Chosen> {
    let is_plain = |name: &str| PLAIN.iter().any(|(n, _)| *n == name);
    let mounted = |name: &str| MOUNTED.iter().find(|(n, ..)| *n == name);
    for name in &args.only {
        let left_out = match mounted(name) {
            None if !is_plain(name) => return Err(unknown(name)),
            None => args
                .against
                .is_some()
                .then_some("--against leaves out, which has suites on a mount alone"),
            Some(_) if args.quick => Some("--quick leaves out, which has none on a mount"),
            Some((_, Some(FuseIo::Uring), _)) if args.against.is_some() => {
                Some("--against leaves out, where it is the same as without -uring")
            }
            Some(_) => None,
        };
        if let Some(why) = left_out {
            return Err(format!("--only names the suite {name}, which {why}"));
        }
    }
    if args.quick && args.against.is_some() {
        return Err(
            "--quick has no suite on a mount, and --against no other: nothing is left".to_owned(),
        );
    }
    let asked = |name: &str| args.only.is_empty() || args.only.iter().any(|n| n == name);
    let plain = PLAIN
        .iter()
        .filter(|(name, _)| asked(name) && args.against.is_none());
    let mounted = MOUNTED.iter().filter(|(name, fuse_io, _)| {
        let again = *fuse_io == Some(FuseIo::Uring) && args.against.is_some();
        asked(name) && !args.quick && !again
    });
    Ok(Chosen {
        plain: plain.collect(),
        mounted: mounted.collect(),
    })
}

fn unknown(name: &str) -> String {
    let plain = PLAIN.iter().map(|(n, _)| *n);
    let names: Vec<_> = plain.chain(MOUNTED.iter().map(|(n, ..)| *n)).collect();
    format!("there is no suite {name}; there are: {}", names.join(" "))
}

/// Runs the chosen suites and prints the summary. True when something passed and nothing failed.
pub fn run(args: &TestArgs) -> Fallible<bool> {
    let chosen = choose(args)?;
    let mut done = Vec::new();
    for (name, body) in chosen.plain {
        done.push(run_plain(name, *body, args)?);
    }
    if !chosen.mounted.is_empty() {
        run_mounted(args, &chosen.mounted, &mut done)?;
    }
    Ok(report::summary(&done))
}

fn run_plain(name: &str, body: Plain, args: &TestArgs) -> Fallible<Suite> {
    let mut suite = Suite::new(name);
    let result = body(args, &mut suite);
    close(suite, result)
}

fn run_mounted(
    args: &TestArgs,
    chosen: &[&(&str, Option<FuseIo>, Mounted)],
    done: &mut Vec<Suite>,
) -> Fallible<()> {
    packages::require_mount_rights()?;
    packages::install_packages()?;
    packages::install_tools()?;
    packages::make_test_user()?;
    let exclusions = Exclusions::load()?;
    let context = Context {
        args,
        exclusions: &exclusions,
    };
    let sheaf = match (&args.sheaf, &args.against) {
        // Scripts run it in folders of their own.
        (Some(path), _) => path
            .canonicalize()
            .map_err(|e| format!("{}: {e}", path.display()))?,
        (None, Some(_)) => PathBuf::new(),
        (None, None) => cargo::build_release()?,
    };
    let offer = Offer::make();
    for (name, fuse_io, body) in chosen {
        if *fuse_io == Some(FuseIo::Uring) && !offer.holds() {
            let mut suite = Suite::new(name);
            suite.exclude(name, "this kernel does not offer FUSE over io_uring");
            done.push(close(suite, Ok(()))?);
        } else {
            done.push(run_on_mount(name, *fuse_io, *body, &context, &sheaf)?);
        }
    }
    Ok(())
}

/// One suite on an array of its own, which is checked afterwards.
fn run_on_mount(
    name: &str,
    fuse_io: Option<FuseIo>,
    body: Mounted,
    context: &Context,
    sheaf: &Path,
) -> Fallible<Suite> {
    let mut suite = Suite::new(name);
    let args = context.args;
    let mut world = match &args.against {
        Some(path) => World::external(name, path)?,
        None => {
            let own = fuse_io.map(|io| io.option().to_owned());
            let options: Vec<String> = own.into_iter().chain(args.options.clone()).collect();
            let options = (!options.is_empty()).then(|| options.join(","));
            World::new(name, sheaf, options, args.keep)?
        }
    };
    if name == fsx::NAME {
        world.in_memory();
    }
    let result = (|| {
        world.mkfs()?;
        world.mount()?;
        body(context, &mut world, &mut suite)?;
        world.umount()
    })();
    if result.is_ok() && !world.is_external() {
        suite.check("fsck afterwards", world.fsck());
    }
    if suite.failed == 0 && result.is_ok() {
        world.discard();
    } else if !world.is_external() {
        println!("  daemon's last words:\n{}", world.daemon_log_tail());
    }
    close(suite, result)
}

/// A suite that could not go on counts as one more failure, and one that has counted nothing fails; an interruption ends the run.
fn close(mut suite: Suite, result: Fallible<()>) -> Fallible<Suite> {
    if process::interrupted() {
        return Err("interrupted".to_owned());
    }
    if let Err(error) = result {
        suite.fail(format!("cannot go on: {error}"));
    }
    if suite.passed + suite.failed + suite.excluded == 0 {
        suite.fail("nothing was tested".to_owned());
    }
    suite.finish();
    Ok(suite)
}

/// Runs a shell script with `set -eu` in `dir`; the usual way to run a few programs.
pub fn script(log: &str, dir: &Path, text: &str, seconds: u64) -> Fallible<()> {
    let mut bash = Command::new("bash");
    bash.arg("-c")
        .arg(format!("set -euo pipefail\n{text}"))
        .current_dir(dir);
    process::run(log, &mut bash, Duration::from_secs(seconds))?.check("script")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: TestArgs,
    }

    fn chosen(words: &str) -> Fallible<Vec<&'static str>> {
        let cli = Cli::parse_from(["test"].into_iter().chain(words.split_whitespace()));
        let chosen = choose(&cli.args)?;
        let plain = chosen.plain.iter().map(|(name, _)| *name);
        Ok(plain
            .chain(chosen.mounted.iter().map(|(name, ..)| *name))
            .collect())
    }

    /// `--quick --only posix` was a success, and had tested nothing.
    #[test]
    fn a_suite_that_is_named_runs_or_is_refused() {
        let all = PLAIN.len() + MOUNTED.len();
        assert_eq!(chosen("").unwrap().len(), all);
        assert_eq!(chosen("--quick").unwrap().len(), PLAIN.len());
        assert_eq!(
            chosen("--only full,posix,fmt").unwrap(),
            ["fmt", "posix", "full"]
        );
        assert_eq!(chosen("--quick --only unit").unwrap(), ["unit"]);
        assert_eq!(chosen("--against /mnt --only full").unwrap(), ["full"]);
        let against = chosen("--against /mnt").unwrap();
        assert_eq!(against[..3], ["posix", "mount", "demo"]);
        assert!(!against.iter().any(|name| name.ends_with("-uring")));
        for (words, told) in [
            ("--only posx", "there is no suite posx"),
            ("--quick --only posix", "posix, which --quick leaves out"),
            ("--quick --only unit,posix", "posix, which --quick"),
            ("--against /mnt --only unit", "unit, which --against"),
            ("--against /mnt --only posix-uring", "posix-uring, which"),
            ("--against /mnt --quick", "nothing is left"),
        ] {
            let refused = chosen(words).unwrap_err();
            assert!(refused.contains(told), "{words}: {refused}");
        }
    }

    #[test]
    fn a_suite_that_counts_nothing_fails() {
        let suite = close(Suite::new("empty"), Ok(())).unwrap();
        assert_eq!((suite.failed, suite.passed), (1, 0));
        let mut suite = Suite::new("excluded");
        suite.exclude("all", "not here");
        assert_eq!(close(suite, Ok(())).unwrap().failed, 0);
    }

    #[test]
    fn an_offer_that_the_kernel_does_not_take_is_none() {
        let parameter = process::work_dir().join(format!("enable_uring-{}", std::process::id()));
        std::fs::create_dir_all(process::work_dir()).unwrap();
        std::fs::write(&parameter, "N\n").unwrap();
        let now = || std::fs::read_to_string(&parameter).unwrap();
        let offer = Offer::of(&parameter);
        assert!(offer.holds());
        assert_eq!(now(), "Y");
        drop(offer);
        assert_eq!(now(), "N");
        std::fs::remove_file(&parameter).unwrap();
        assert!(!Offer::of(&parameter).holds());
        // What is written there is not what is read.
        assert!(!Offer::of(Path::new("/dev/null")).holds());
    }

    /// One was missing, and nobody who was told the order of the others saw that.
    #[test]
    fn the_table_of_suites_has_all_of_them_in_their_order() {
        let text = std::fs::read_to_string(process::source_dir().join("CONTRIBUTING.md")).unwrap();
        let rows = text.lines().filter_map(|line| line.strip_prefix("| `"));
        let cells = rows.filter_map(|row| row.split_once(" |"));
        let told = cells.flat_map(|(names, _)| names.trim_end_matches('`').split("`, `"));
        let told: Vec<&str> = told.collect();
        let plain = PLAIN.iter().map(|(name, _)| *name);
        let all: Vec<&str> = plain
            .chain(MOUNTED.iter().map(|(name, ..)| *name))
            .collect();
        let is_repeat = |name: &&str| name.ends_with("-uring");
        let order = |names: &[&str], repeats: bool| -> Vec<String> {
            let names = names.iter().filter(|name| is_repeat(name) == repeats);
            names.map(|name| (*name).to_owned()).collect()
        };
        for repeats in [false, true] {
            assert_eq!(order(&told, repeats), order(&all, repeats));
        }
        for (before, repeat) in all
            .iter()
            .zip(&all[1..])
            .filter(|(_, name)| is_repeat(name))
        {
            assert_eq!(format!("{before}-uring"), *repeat);
        }
    }
}
