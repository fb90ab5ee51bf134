//! `sheaf cp`: files out of and into a file system that is not mounted.
//!
//! 1. No symbolic link is followed but what the user names: the target, and without `--recursive` a source. What lies at a place
//!    below them may have come from anybody, who may change it meanwhile (`folders` has how places are reached).
//! 2. Nobody can read more of a copy that is made than of the original, while it is made, too: files and folders are the
//!    owner's alone until they have their permissions, folders after all that is in them.
//! 3. What cannot be copied or kept is told, and the rest is copied.
//! 4. The devices of the file system are neither written, removed nor read as files, whatever name or loop device leads to them; a disk is not known by its partitions.

mod attributes;
mod folders;
mod inwards;
mod outwards;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::path::{Path, PathBuf};

use fs::Caller;
use indicatif::ProgressBar;
use rustix::fs::Mode;

use crate::args::Cp;
use crate::failure::{Failure, OPERATIONAL, Outcome};
use crate::offline::{Offline, inside};
use crate::output::harmless;
use crate::progress;
use inwards::Inwards;
use outwards::Outwards;

/// A path of one of the two sides.
enum Place {
    Host(PathBuf),
    Inside(Vec<u8>),
}

impl Place {
    fn parse(path: &Path) -> Self {
        match inside(path) {
            Some(inside) => Place::Inside(inside.to_vec()),
            None => Place::Host(path.to_owned()),
        }
    }

    fn host(self) -> Option<PathBuf> {
        match self {
            Place::Host(path) => Some(path),
            Place::Inside(_) => None,
        }
    }

    fn inside(self) -> Option<Vec<u8>> {
        match self {
            Place::Inside(path) => Some(path),
            Place::Host(_) => None,
        }
    }
}

/// All sources of one side, and the target on the other.
enum Way {
    Outwards(Vec<Vec<u8>>, PathBuf),
    Inwards(Vec<PathBuf>, Vec<u8>),
}

impl Way {
    fn parse(paths: &[PathBuf]) -> Result<Self, Failure> {
        let (target, sources) = paths
            .split_last()
            .ok_or_else(|| Failure::usage("no target given"))?;
        let all_inside = paths.iter().all(|path| inside(path).is_some());
        let sources = sources.iter().map(|path| Place::parse(path));
        let way = match Place::parse(target) {
            Place::Host(to) => {
                let from: Option<_> = sources.map(Place::inside).collect();
                from.map(|from| Way::Outwards(from, to))
            }
            Place::Inside(to) => {
                let from: Option<_> = sources.map(Place::host).collect();
                from.map(|from| Way::Inwards(from, to))
            }
        };
        way.ok_or_else(|| {
            Failure::usage(match all_inside {
                true => "all paths are inside the file system: the other side, sources or target, must be on the host",
                false => "one side must be inside the file system: write its paths, all of them, with a leading ':'",
            })
        })
    }
}

pub fn run(args: &Cp) -> Outcome {
    run_with(args, &|_, _| ())
}

/// When somebody may change what is on the host.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// A folder, or a file that is to be written over, was looked at, and what is in it not yet.
    Looked,
    /// A folder, a link or a special file was made, and has nothing yet but its name.
    Made,
}

/// Tells `seen` of each such moment, and of what has it.
fn run_with(args: &Cp, seen: &dyn Fn(Moment, &Path)) -> Outcome {
    let way = Way::parse(&args.paths)?;
    let offline = Offline::open(&args.source.devices, matches!(way, Way::Outwards(..)))?;
    // From here on modes of what is made are given in full.
    let umask = rustix::process::umask(Mode::empty()).as_raw_mode();
    let copy = Copy {
        who: Caller {
            umask,
            ..offline.who
        },
        offline: &offline,
        recursive: args.recursive || args.archive,
        keeps: args.preserve || args.archive,
        several: args.paths.len() > 2,
        bar: progress::bar("Files copied:", 0),
        is_incomplete: Cell::new(false),
        seen,
    };
    match way {
        Way::Outwards(from, to) => {
            let mut outwards = Outwards::new(&copy);
            for from in from {
                copy.tell_of(outwards.copy(&from, &to));
            }
        }
        Way::Inwards(from, to) => {
            let mut inwards = Inwards::new(&copy);
            for from in from {
                copy.tell_of(inwards.copy(&from, &to));
            }
        }
    }
    copy.bar.finish_and_clear();
    let is_incomplete = copy.is_incomplete.get();
    // What was copied beside a failure is kept, so the file system is closed either way.
    offline.close()?;
    Ok(if is_incomplete { OPERATIONAL } else { 0 })
}

/// What becomes of a symbolic link in the place of a copy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Links {
    Followed,
    Refused,
}

/// How this command copies.
struct Copy<'a> {
    offline: &'a Offline,
    /// Who makes what is made inside.
    who: Caller,
    recursive: bool,
    /// Attributes and hard links are kept.
    keeps: bool,
    several: bool,
    bar: ProgressBar,
    /// Something was not copied, or not kept.
    is_incomplete: Cell<bool>,
    seen: &'a dyn Fn(Moment, &Path),
}

impl Copy<'_> {
    /// Tells what went wrong with something, after which the others are copied.
    fn tell_of(&self, result: Result<(), Failure>) {
        if let Err(failure) = result {
            self.is_incomplete.set(true);
            self.bar.suspend(|| failure.tell());
        }
    }

    /// The permission bits of something made without `--preserve`.
    fn mode_of_new(&self, mode: u32) -> u32 {
        mode & 0o777 & !self.who.umask
    }

    fn refuse_folder(&self, name: impl std::fmt::Display) -> Result<(), Failure> {
        match self.recursive {
            true => Ok(()),
            false => Err(Failure::new(format!(
                "{name} is a folder; to copy it give --recursive"
            ))),
        }
    }

    /// What is a device of this file system is in use by this command.
    fn refuse_device(
        &self,
        name: impl std::fmt::Display,
        meta: &std::fs::Metadata,
    ) -> Result<(), Failure> {
        match self.offline.occupied.has(meta) {
            true => Err(Failure::new(format!(
                "{name} is a device of this file system: it is neither overwritten nor copied"
            ))),
            false => Ok(()),
        }
    }

    /// Fifos, sockets and devices are made anew, and never read.
    fn refuse_special(&self, name: impl std::fmt::Display) -> Result<(), Failure> {
        match self.recursive && self.keeps {
            true => Ok(()),
            false => Err(Failure::new(format!(
                "{name} is a special file; to make one like it give --archive"
            ))),
        }
    }
}

/// A path inside the file system, as it is written to cp.
fn shown_inside(path: &[u8]) -> String {
    format!(":{}", harmless(path))
}

/// As cp(1) refuses it, for one of both would be lost, and what is linked to it be another file's.
fn just_made(to: impl std::fmt::Display, from: impl std::fmt::Display) -> Failure {
    Failure::new(format!(
        "{to} was just made by this command and is not overwritten with {from}; copy that to another name"
    ))
}

fn not_followed(name: impl std::fmt::Display) -> Failure {
    Failure::new(format!(
        "{name}: it is a symbolic link, which is not followed; remove it first"
    ))
}

fn not_a_folder(name: impl std::fmt::Display) -> Failure {
    Failure::new(format!("{name}: not a directory"))
}
