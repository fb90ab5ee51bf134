//! Names in a transaction: what they mean with what was staged, and the steps that change them.

use super::commit::gone;
use super::{Gets, INODE_DIRTY, INODE_LOGGED, Staged, Step, Transaction};
use crate::Error;
use crate::acl::DEFAULT;
use crate::ancestry::Cycle;
use crate::api::{Ino, ROOT, SetAttr};
use crate::content::Link;
use crate::content::inode::SYMLINK_MAX;
use crate::dir::is_dot;
use crate::filesystem::LINK_MAX;
use crate::namespace::Draft;
use crate::rename::{RENAME_EXCHANGE, RENAME_NOREPLACE, check_dots};
use crate::tx::content::Content;
use std::collections::BTreeMap;

/// What a name refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub ino: Ino,
    pub generation: u64,
    pub kind: u8,
}

impl From<&Link> for Target {
    fn from(link: &Link) -> Target {
        Target {
            ino: link.nid,
            generation: link.generation,
            kind: link.kind,
        }
    }
}

/// A name that the transaction has looked at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    /// What it meant before the transaction. In a directory that this makes, nothing.
    pub before: Option<Target>,
    pub now: Option<Target>,
}

impl<'fs> Transaction<'fs> {
    /// What a name refers to. The transaction relies on that, or on the name's absence, from then on.
    pub fn lookup(&mut self, dir: Ino, name: &[u8]) -> Result<Ino, Error> {
        Ok(self.named(dir, name)?.ok_or(Error::NotFound)?.ino)
    }

    /// Names of a directory, with what they refer to and its type as in `d_type`; "." and ".." left out. The
    /// transaction relies on all of it from then on.
    pub fn list(&mut self, dir: Ino) -> Result<Vec<(Vec<u8>, Ino, u8)>, Error> {
        self.directory(dir)?;
        self.look(dir)?;
        let mut all = BTreeMap::new();
        if self.inodes[&dir].fresh.is_none() {
            let listed = self.fs.readdir(dir, 0, &mut |entry| {
                if !is_dot(entry.name) {
                    all.insert(entry.name.to_vec(), (entry.ino, entry.kind));
                }
                true
            });
            listed.map_err(gone)?;
        }
        for (name, entry) in self.names.get(&dir).into_iter().flatten() {
            match entry.now {
                Some(target) => drop(all.insert(name.to_vec(), (target.ino, target.kind))),
                None => drop(all.remove(&name[..])),
            }
        }
        let flat = |(name, (ino, kind))| (name, ino, kind);
        Ok(all.into_iter().map(flat).collect())
    }

    /// Makes a regular file, whose number is good within the transaction, and after its commit.
    pub fn create(&mut self, dir: Ino, name: &[u8], mode: u32) -> Result<Ino, Error> {
        self.make(dir, name, libc::S_IFREG | (mode & 0o7777), 0, &[])
    }

    /// Makes a directory, likewise.
    pub fn mkdir(&mut self, dir: Ino, name: &[u8], mode: u32) -> Result<Ino, Error> {
        self.make(dir, name, libc::S_IFDIR | (mode & 0o1777), 0, &[])
    }

    /// Makes a symbolic link, likewise.
    pub fn symlink(&mut self, dir: Ino, name: &[u8], target: &[u8]) -> Result<Ino, Error> {
        if target.is_empty() {
            return Err(Error::NotFound);
        }
        if target.len() > SYMLINK_MAX {
            return Err(Error::NameTooLong);
        }
        if target.contains(&0) {
            return Err(Error::Invalid("a target with a zero byte"));
        }
        self.make(dir, name, libc::S_IFLNK | 0o777, 0, target)
    }

    fn make(
        &mut self,
        dir: Ino,
        name: &[u8],
        mode: u32,
        rdev: u32,
        body: &[u8],
    ) -> Result<Ino, Error> {
        if is_dot(name) || self.named(dir, name)?.is_some() {
            return Err(Error::Exists);
        }
        let fs = self.fs;
        let parent = &self.inodes[&dir];
        let default = match (parent.fresh.is_some(), mode & libc::S_IFMT) {
            (_, libc::S_IFLNK) => None,
            (true, _) => fs.attribute(&parent.model, DEFAULT)?,
            // As it is now: what the model refers to may be gone.
            (false, _) => {
                let node = fs.inode(dir).map_err(gone)?;
                fs.attribute(node.inode()?, DEFAULT)?
            }
        };
        // It gets an access list by that, and a directory this one besides.
        let is_dir = mode & libc::S_IFMT == libc::S_IFDIR;
        let lists = default.as_ref().map_or(0, Vec::len) << u32::from(is_dir);
        self.grow(
            INODE_LOGGED + 2 * name.len() + body.len() + lists * 9 / 8,
            INODE_DIRTY + 2 * (body.len() + lists),
        )?;
        let fresh = fs.store.reserve_nid()?;
        let ino = fresh.nid();
        let draft = Draft { mode, rdev, body };
        if self.inodes.contains_key(&ino) || self.names.contains_key(&ino) {
            // It was another inode's, which this transaction knows.
            return Err(gone(Error::Stale(ino)));
        }
        let parent = &self.inodes[&dir];
        let drafted = fs.draft_with(&self.who, &parent.model, &draft, fresh.version(), default);
        let (mut model, lists) = drafted?;
        let gets = Gets::new(&model, &lists);
        lists.put_in(&mut model);
        if model.is_dir() {
            model.parent = dir;
        }
        let target = Target {
            ino,
            generation: model.generation,
            kind: model.dirent_kind(),
        };
        let staged = Staged {
            generation: model.generation,
            model: Box::new(model),
            set: SetAttr::default(),
            fresh: Some(fresh),
            gets,
            has_looked: false,
            content: Content::empty(),
            handle: None,
            known: None,
            looked: None,
            xattrs: BTreeMap::new(),
            loses_capability: false,
            unlinked: false,
            has_besides: true,
            is_stripped: false,
        };
        self.inodes.insert(ino, staged);
        self.mean(dir, name, Some(target));
        self.step(Step::Make {
            dir,
            name: name.into(),
            ino,
            mode,
            rdev,
            body: body.into(),
        })?;
        Ok(ino)
    }

    /// Gives an inode one more name. Directories have only one.
    pub fn link(&mut self, ino: Ino, dir: Ino, name: &[u8]) -> Result<(), Error> {
        let inode = self.inode(ino)?;
        if inode.model.is_dir() {
            return Err(Error::NotPermitted);
        }
        if inode.model.nlink >= LINK_MAX {
            self.look_at_model(ino)?;
            return Err(Error::TooManyLinks);
        }
        if is_dot(name) || self.named(dir, name)?.is_some() {
            return Err(Error::Exists);
        }
        self.grow(2 * name.len(), INODE_DIRTY)?;
        let staged = self.inode(ino)?;
        staged.model.nlink += 1;
        let target = Target {
            ino,
            generation: staged.generation,
            kind: staged.model.dirent_kind(),
        };
        self.mean(dir, name, Some(target));
        self.step(Step::Link {
            ino,
            dir,
            name: name.into(),
        })
    }

    /// Removes a name of something that is not a directory.
    pub fn unlink(&mut self, dir: Ino, name: &[u8]) -> Result<(), Error> {
        match is_dot(name) {
            true => Err(Error::IsADirectory),
            false => self.remove(dir, name, false),
        }
    }

    /// Removes an empty directory.
    pub fn rmdir(&mut self, dir: Ino, name: &[u8]) -> Result<(), Error> {
        match name {
            b"." => Err(Error::Invalid("\".\" cannot be removed")),
            b".." => Err(Error::NotEmpty),
            _ => self.remove(dir, name, true),
        }
    }

    fn remove(&mut self, dir: Ino, name: &[u8], directory: bool) -> Result<(), Error> {
        let target = self.named(dir, name)?.ok_or(Error::NotFound)?;
        let is_dir = self.meant(target)?.model.is_dir();
        match (directory, is_dir) {
            (true, false) => return Err(Error::NotADirectory),
            (false, true) => return Err(Error::IsADirectory),
            (true, true) => self.check_empty(target.ino)?,
            (false, false) => {}
        }
        self.expect(name.len(), INODE_DIRTY)?;
        self.lose_link(target.ino);
        self.mean(dir, name, None);
        self.step(Step::Remove {
            dir,
            name: name.into(),
            victim: target.ino,
            directory,
        })
    }

    /// An inode has a name less. What was staged of its content is of no use to anybody if that was the last one, but to who has
    /// it open.
    fn lose_link(&mut self, ino: Ino) {
        if let Some(staged) = self.inodes.get_mut(&ino) {
            let model = &mut staged.model;
            model.nlink = match model.is_dir() {
                true => 0,
                false => model.nlink.saturating_sub(1),
            };
            // Others may have taken its other names away when this commits.
            staged.unlinked = true;
        }
    }

    /// Renames; `flags`: [`RENAME_NOREPLACE`] or [`RENAME_EXCHANGE`].
    pub fn rename(
        &mut self,
        dir: Ino,
        name: &[u8],
        new_dir: Ino,
        new_name: &[u8],
        flags: u32,
    ) -> Result<(), Error> {
        let (exchange, keep) = (flags & RENAME_EXCHANGE != 0, flags & RENAME_NOREPLACE != 0);
        if flags & !(RENAME_EXCHANGE | RENAME_NOREPLACE) != 0 || (exchange && keep) {
            return Err(Error::Invalid("unknown rename flags"));
        }
        check_dots(name, new_name, keep)?;
        let source = self.named(dir, name)?.ok_or(Error::NotFound)?;
        let target = self.named(new_dir, new_name)?;
        match target {
            None if exchange => return Err(Error::NotFound),
            Some(_) if keep => return Err(Error::Exists),
            Some(target) if target.ino == source.ino => return Ok(()),
            _ => {}
        }
        let up = self.meant(source)?.model.is_dir();
        let down = match target {
            Some(target) => self.meant(target)?.model.is_dir(),
            None => false,
        };
        if dir != new_dir {
            self.check_moves((source, up), (target, down), (dir, new_dir), exchange)?;
        }
        let displaced = target.filter(|_| !exchange);
        if let Some(target) = displaced {
            match (up, down) {
                (true, false) => return Err(Error::NotADirectory),
                (false, true) => return Err(Error::IsADirectory),
                (true, true) => self.check_empty(target.ino)?,
                (false, false) => {}
            }
        }
        let (logged, dirty) = (2 * name.len() + 2 * new_name.len(), 2 * INODE_DIRTY);
        match target {
            Some(_) => self.expect(logged, dirty)?,
            None => self.grow(logged, dirty)?,
        }
        if let Some(target) = displaced {
            self.lose_link(target.ino);
        }
        self.mean(dir, name, target.filter(|_| exchange));
        self.mean(new_dir, new_name, Some(source));
        let mut moved = |ino: Ino, parent| {
            if let Some(staged) = self.inodes.get_mut(&ino) {
                staged.model.parent = parent;
            }
        };
        if up {
            moved(source.ino, new_dir);
        }
        if let (Some(target), true, true) = (target, exchange, down) {
            moved(target.ino, dir);
        }
        self.step(Step::Rename {
            from: (dir, name.into()),
            to: (new_dir, new_name.into()),
            source: source.ino,
            target: target.map(|target| target.ino),
            exchange,
        })
    }

    /// Refuses to move a directory below itself.
    fn check_moves(
        &mut self,
        (source, up): (Target, bool),
        (target, down): (Option<Target>, bool),
        (from, to): (Ino, Ino),
        exchange: bool,
    ) -> Result<(), Error> {
        let inside = Error::Invalid("a directory cannot move into itself");
        if up && self.relies_on_above(source.ino, to)? {
            return Err(inside);
        }
        match target {
            Some(target)
                if down && (up || exchange) && self.relies_on_above(target.ino, from)? =>
            {
                Err(match exchange {
                    true => inside,
                    false => Error::NotEmpty,
                })
            }
            _ => Ok(()),
        }
    }

    /// Whether a directory is above another one, or is that. If so the transaction relies on it: a move is refused. If not, its commit looks again.
    fn relies_on_above(&mut self, upper: Ino, lower: Ino) -> Result<bool, Error> {
        let Some(between) = self.path_up(upper, lower)? else {
            return Ok(false);
        };
        for ino in between {
            self.inode(ino)?;
            self.look_at_model(ino)?;
        }
        // As they are since they were looked at.
        Ok(self.path_up(upper, lower)?.is_some())
    }

    /// The directories from one up to another one above it, without that.
    fn path_up(&self, upper: Ino, lower: Ino) -> Result<Option<Vec<Ino>>, Error> {
        let (mut at, mut path, mut cycle) = (lower, Vec::new(), Cycle::new());
        loop {
            if at == upper {
                return Ok(Some(path));
            }
            if at == ROOT {
                return Ok(None);
            }
            if cycle.closes_at(at) {
                // Of parents at several moments, some of them staged.
                let what = format!("the directories above {lower} move");
                return Err(Error::Conflict(what));
            }
            path.push(at);
            at = match self.inodes.get(&at) {
                Some(staged) => staged.model.parent,
                None => self.fs.inode(at).map_err(gone)?.inode()?.parent,
            };
        }
    }

    /// The inode that a name refers to.
    fn meant(&mut self, target: Target) -> Result<&mut Staged<'fs>, Error> {
        let staged = self.inode(target.ino)?;
        match staged.generation == target.generation {
            true => Ok(staged),
            // The name has come to refer to something else, or the transaction knew what had the number before.
            false => Err(gone(Error::Stale(target.ino))),
        }
    }

    /// What a name means now; remembers what it meant before.
    fn named(&mut self, dir: Ino, name: &[u8]) -> Result<Option<Target>, Error> {
        self.directory(dir)?;
        if let Some(entry) = self.names.get(&dir).and_then(|names| names.get(name)) {
            return Ok(entry.now);
        }
        let wanted = self.fs.wanted(name)?;
        let before = match self.inodes[&dir].fresh.is_some() {
            true => None,
            false => self.fs.find(dir.into(), wanted)?.as_ref().map(Target::from),
        };
        let now = before;
        let names = self.names.entry(dir).or_default();
        names.insert(name.into(), Entry { before, now });
        Ok(now)
    }

    fn mean(&mut self, dir: Ino, name: &[u8], target: Option<Target>) {
        if let Some(entry) = self.names.get_mut(&dir).and_then(|all| all.get_mut(name)) {
            entry.now = target;
        }
    }

    fn directory(&mut self, dir: Ino) -> Result<(), Error> {
        match self.inode(dir)?.model.is_dir() {
            true => Ok(()),
            false => Err(Error::NotADirectory),
        }
    }

    /// By how many names and subdirectories a directory grows.
    pub(super) fn names_gained(&self, dir: Ino) -> (i64, i32) {
        let mut gained = (0, 0);
        for entry in self.names.get(&dir).into_iter().flat_map(BTreeMap::values) {
            let is_dir = |target: Option<Target>| {
                target.is_some_and(|target| target.kind == libc::DT_DIR) as i32
            };
            gained.0 += i64::from(entry.now.is_some()) - i64::from(entry.before.is_some());
            gained.1 += is_dir(entry.now) - is_dir(entry.before);
        }
        gained
    }

    /// Fails if a directory has names. The transaction relies on that: on their absence the commit looks again.
    fn check_empty(&mut self, dir: Ino) -> Result<(), Error> {
        if self.has_names(dir)? {
            self.look(dir)?;
            // As it is since it was looked at.
            if self.has_names(dir)? {
                return Err(Error::NotEmpty);
            }
        }
        Ok(())
    }

    fn has_names(&self, dir: Ino) -> Result<bool, Error> {
        let before = match self.inodes[&dir].fresh.is_some() {
            true => 0,
            false => self.fs.inode(dir)?.inode()?.names() as i64,
        };
        Ok(before + self.names_gained(dir).0 > 0)
    }
}
