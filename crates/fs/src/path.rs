//! Paths: names that are looked up one after the other.
//!
//! Invariants:
//! 1. A name is looked up in what the name before it refers to, be it "..": the generation tells that from what got its
//!    number later. Who finds something else, or nothing, begins again, as often as that is another thing each time.
//! 2. A directory is locked no longer than a look-up of one name takes, and before the next one is locked. So a path is not one
//!    atomic step: names in it may change meanwhile, as POSIX has it.

use crate::Error;
use crate::api::{Attr, Ino, ROOT};
use crate::content::{Body, Inode, Link};
use crate::dir::{self, Wanted, is_dot};
use crate::directory::At;
use crate::filesystem::FileSystem;
use crate::namespace::{Looks, between_steps, live_dir};

/// Symbolic links followed in one path.
pub(crate) const LINKS_FOLLOWED: u32 = 40;

/// Where a path begins.
#[derive(Clone, Copy)]
struct Start<'d> {
    at: At<'d>,
    /// Of the inode there, if a name referred to it.
    generation: Option<u64>,
}

enum End {
    Found(Attr),
    /// What a name refers to is gone, and something else may have its number.
    Lost(Lost),
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Lost {
    /// The directory that the name is in.
    dir: Ino,
    /// What it refers to: its number, and its generation if that is known.
    named: (Ino, Option<u64>),
}

impl FileSystem {
    /// Follows a path from the root; see [`FileSystem::stat_at`].
    ///
    /// # Errors
    /// Those of [`FileSystem::stat_at`].
    pub fn resolve(&self, path: &[u8]) -> Result<Attr, Error> {
        self.stat_at(ROOT, path)
    }

    /// What `stat` shows of what a path leads to from a directory, or from the root if it begins with a slash. Symbolic links
    /// are followed, the last one too; a path without a name leads to where it begins.
    ///
    /// # Errors
    /// Those of [`FileSystem::lookup`]; [`Error::TooManySymlinks`].
    pub fn stat_at<'d>(&self, from: impl Into<At<'d>>, path: &[u8]) -> Result<Attr, Error> {
        let start = Start {
            at: from.into(),
            generation: None,
        };
        let mut looks = Looks::default();
        loop {
            match self.follow(start, path, 0)? {
                End::Found(attr) => return Ok(attr),
                End::Lost(lost) if looks.are_over(lost) => return Err(self.dangling(lost.dir)),
                End::Lost(_) => {}
            }
        }
    }

    fn follow(&self, start: Start<'_>, path: &[u8], links: u32) -> Result<End, Error> {
        let (mut here, mut names) = (start, Names(path));
        if path.first() == Some(&b'/') {
            here = ROOT.into();
        }
        let mut before = here;
        let mut begins = true;
        loop {
            between_steps();
            let lost = End::Lost(Lost {
                dir: before.at.ino(),
                named: (here.at.ino(), here.generation),
            });
            let mut rest = names;
            let name = rest.next();
            let wanted = match name {
                Some(name) if !is_dot(name) => Some(self.wanted(name)?),
                _ => None,
            };
            if let Some(wanted) = wanted
                && let Some(link) = self.glance(here.at, here.generation, wanted)
            {
                (before, here, begins, names) = (here, Start::of(&link), false, rest);
                continue;
            }
            if names.0.is_empty()
                && let Some(ino) = here.at.number()
                && let Some(attr) = self.glance_attr(ino, here.generation)
                && (begins || !attr.is_symlink())
            {
                return Ok(End::Found(attr));
            }
            let node = match self.dir_inode(here.at) {
                Ok(node) => node,
                Err(Error::Stale(_)) if !begins || links > 0 => return Ok(lost),
                Err(error) => return Err(error),
            };
            let inode = node.inode()?;
            if here.generation.is_some_and(|own| own != inode.generation) {
                return Ok(lost);
            }
            if inode.is_symlink() && !begins {
                let path = joined(inode, names)?;
                drop(node);
                if links == LINKS_FOLLOWED {
                    return Err(Error::TooManySymlinks);
                }
                match self.touch_atime(here.at.ino()) {
                    Err(Error::Stale(_)) => return Ok(lost),
                    other => other?,
                }
                return self.follow(before, &path, links + 1);
            }
            let Some(name) = name else {
                // A slash at the end of a path is a look into a directory.
                if !names.0.is_empty() && !begins && !inode.is_dir() {
                    return Err(Error::NotADirectory);
                }
                return Ok(End::Found(self.show(here.at.ino(), inode)));
            };
            let dir = live_dir(inode)?;
            let next = match wanted {
                Some(wanted) => {
                    Start::of(&dir::find(&self.store, dir, wanted)?.ok_or(Error::NotFound)?)
                }
                None if name == b"." => here,
                None => match self.look_above(node, Start::above) {
                    Err(Error::Stale(_)) => return Ok(lost),
                    above => above?,
                },
            };
            (before, here, begins, names) = (here, next, false, rest);
        }
    }

    /// Looks a name up in a directory that is in memory and holds its names itself, as most do, if it has this generation.
    /// `None`: nothing is known.
    #[inline]
    pub(crate) fn glance(
        &self,
        dir: At<'_>,
        generation: Option<u64>,
        name: Wanted<'_>,
    ) -> Option<Link> {
        self.store.glance(dir.number()?, |node| {
            let inode = node.inode().ok()?;
            match &inode.body {
                Body::Entries(list) if generation.is_none_or(|own| own == inode.generation) => {
                    live_dir(inode).ok()?;
                    dir::pick(list, name)
                }
                _ => None,
            }
        })
    }
}

impl Start<'_> {
    /// Where a name leads to.
    fn of(link: &Link) -> Self {
        Start {
            at: link.nid.into(),
            generation: Some(link.generation),
        }
    }
}

impl Start<'_> {
    /// At a directory that is there.
    fn above(ino: Ino, dir: &Inode) -> Self {
        Start {
            at: ino.into(),
            generation: Some(dir.generation),
        }
    }
}

impl From<Ino> for Start<'_> {
    fn from(ino: Ino) -> Self {
        Start {
            at: ino.into(),
            generation: None,
        }
    }
}

/// The path that goes on where a symbolic link leads to.
#[cold]
fn joined(link: &Inode, rest: Names<'_>) -> Result<Vec<u8>, Error> {
    match &link.body {
        // What is left of the path begins with a slash.
        Body::Inline(target) => Ok([target, rest.0].concat()),
        _ => Err(Error::Invalid("not a symbolic link")),
    }
}

/// The names in a path that are left.
#[derive(Clone, Copy)]
struct Names<'p>(&'p [u8]);

impl<'p> Names<'p> {
    #[inline]
    fn next(&mut self) -> Option<&'p [u8]> {
        let slash = |byte: &u8| *byte == b'/';
        let from = self.0.iter().position(|byte| !slash(byte))?;
        let path = &self.0[from..];
        let len = path.iter().position(slash).unwrap_or(path.len());
        let (name, rest) = path.split_at(len);
        self.0 = rest;
        Some(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Caller;
    use crate::namespace::meanwhile::{nobody_does, others_do};
    use crate::rename::tests::file_system;
    use engine::Need;
    use std::cell::Cell;
    use std::rc::Rc;
    use std::sync::Arc;

    /// Calls `look` beside others who, at this step of it, remove directory b and the one above it, a, and then make directories until one has
    /// the number that a had. Returns the attributes of a, too, and whether one has got it.
    fn while_both_go<T>(
        step: u32,
        look: impl FnOnce(&FileSystem, [Attr; 2]) -> T,
    ) -> (T, Attr, bool) {
        // What this thread's core gives back it gets again.
        base::thread::pin(base::thread::current_cpu()).unwrap();
        let (fs, who) = (file_system(), Caller::root());
        let above = fs.mkdir(&who, ROOT, b"a", 0o755).unwrap();
        let below = fs.mkdir(&who, above.ino, b"b", 0o755).unwrap();
        let (others, mut steps) = (Arc::clone(&fs), 0);
        let got = Rc::new(Cell::new(false));
        let has_it = Rc::clone(&got);
        others_do(move || {
            steps += 1;
            if steps != step {
                return;
            }
            others.rmdir(&who, above.ino, b"b").unwrap();
            others.rmdir(&who, ROOT, b"a").unwrap();
            for i in 0..500 {
                let name = format!("c{i}");
                let new = others.mkdir(&who, ROOT, name.as_bytes(), 0o755).unwrap();
                if new.ino == above.ino {
                    others.mkdir(&who, new.ino, b"x", 0o755).unwrap();
                    has_it.set(true);
                    return;
                }
            }
        });
        let seen = look(&fs, [below, above]);
        nobody_does();
        (seen, above, got.get())
    }

    /// The directory above went after its number had been read, and another one that got the number was looked into.
    #[test]
    fn what_is_above_a_directory_is_not_what_has_got_its_number() {
        let mut reused = Vec::new();
        for step in 1..6 {
            let (found, _, got) = while_both_go(step, |fs, _| fs.stat_at(ROOT, b"a/b/../x"));
            assert!(matches!(found, Err(Error::NotFound)), "{step}: {found:?}");
            reused.push(got);
        }
        // But while it is looked for above b.
        assert_eq!(reused, [true, true, true, false, true]);
        let (found, above, got) = while_both_go(1, |fs, [below, _]| fs.lookup(below.ino, b".."));
        let found = found.unwrap();
        assert!(!got, "while it is looked at nothing else gets its number");
        assert_eq!((found.ino, found.generation), (above.ino, above.generation));
    }

    /// After a hundred looks, each of which found another file gone, a healthy directory was called damaged.
    #[test]
    fn who_is_late_again_and_again_finds_no_damage() {
        let (fs, who) = (file_system(), Caller::root());
        let make = |name: &[u8]| fs.mknod(&who, ROOT, name, libc::S_IFREG | 0o644, 0);
        make(b"file").unwrap();
        type Look = fn(&FileSystem) -> Result<Attr, Error>;
        let looks: [Look; 2] = [
            |fs| fs.lookup(ROOT, b"file"),
            |fs| fs.stat_at(ROOT, b"file"),
        ];
        for look in looks {
            let (others, mut left) = (Arc::clone(&fs), 450);
            others_do(move || {
                if left > 0 {
                    left -= 1;
                    let new = others.mknod(&who, ROOT, b"new", libc::S_IFREG | 0o644, 0);
                    new.unwrap();
                    others.rename(&who, ROOT, b"new", ROOT, b"file", 0).unwrap();
                }
            });
            let found = look(&fs).unwrap();
            nobody_does();
            assert_eq!(found.ino, fs.lookup(ROOT, b"file").unwrap().ino);
        }
        // But a name that refers to nothing is damage.
        let node = fs.node(make(b"gone").unwrap().ino).unwrap();
        let mut op = fs.store.begin(Need::Reclaim).unwrap();
        let slot = op.lock(&node).unwrap();
        op.delete(slot);
        op.commit();
        for damaged in [
            fs.lookup(ROOT, b"gone").map(drop),
            fs.stat_at(ROOT, b"gone").map(drop),
            fs.unlink(&who, ROOT, b"gone"),
            fs.rename(&who, ROOT, b"gone", ROOT, b"file", 0),
        ] {
            let is_damage = matches!(damaged, Err(Error::Damaged { ino: ROOT, .. }));
            assert!(is_damage, "{damaged:?}");
        }
    }

    #[test]
    fn names_are_what_is_between_slashes() {
        let names = |path: &'static [u8]| {
            let mut names = Names(path);
            std::iter::from_fn(move || names.next()).collect::<Vec<_>>()
        };
        assert_eq!(
            names(b"//a/bc///.././d//"),
            [&b"a"[..], b"bc", b"..", b".", b"d"]
        );
        assert_eq!(names(b"a"), [b"a"]);
        assert!(names(b"").is_empty() && names(b"///").is_empty());
    }
}
