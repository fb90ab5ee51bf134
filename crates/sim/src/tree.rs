//! A plain model of names, links and attributes: everything that changes by one journal record.

use crate::op::Op;
use crate::times::Stamp;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The model's own name for a file, directory or link; never used twice.
pub type Id = u32;

/// The directory that a model begins with.
pub const TOP: Id = 0;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    File,
    Dir,
    Link(Vec<u8>),
    /// A device, pipe or socket: its type among the bits of the mode, and its device number.
    Special(u32, u32),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thing {
    pub kind: Kind,
    pub nlink: u32,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub xattrs: BTreeMap<String, Arc<Vec<u8>>>,
    pub names: BTreeMap<String, Id>,
    pub parent: Id,
    /// When names in a directory last changed; of all else, when it was made; or what it was set
    /// to.
    pub mtime: Stamp,
    /// When names or attributes of it last changed.
    pub ctime: Stamp,
}

impl Thing {
    fn new(kind: Kind, parent: Id, now: Stamp) -> Thing {
        let (nlink, mode) = match kind {
            Kind::File | Kind::Special(..) => (1, 0o644),
            Kind::Dir => (2, 0o755),
            Kind::Link(_) => (1, 0o777),
        };
        Thing {
            kind,
            nlink,
            mode,
            uid: 0,
            gid: 0,
            xattrs: BTreeMap::new(),
            names: BTreeMap::new(),
            parent,
            mtime: now,
            ctime: now,
        }
    }

    pub fn is_dir(&self) -> bool {
        self.kind == Kind::Dir
    }
}

/// Cheap to copy: things are shared until changed.
#[derive(Clone, Debug)]
pub struct Tree {
    pub things: BTreeMap<Id, Arc<Thing>>,
    next: Id,
    /// When the last operation began.
    pub began: Stamp,
}

/// An errno where there is no result.
pub type Outcome<T> = Result<T, i32>;

/// What an operation on names and attributes did to the model.
#[derive(Clone, Debug, Default)]
pub struct Change {
    /// Nothing changed, so nothing is logged.
    pub idle: bool,
    /// Those whose names or attributes changed.
    pub touched: Vec<Id>,
    /// The one that came into being.
    pub created: Option<Id>,
    /// The files that took others' places, written back before: two of an exchange.
    pub replacers: Vec<Id>,
    /// Those that a transaction made, in order, and the files whose content it changed.
    pub made: Vec<Id>,
    pub written: Vec<Id>,
    /// The atomic write that it staged something in, by its number.
    pub staged: Option<u64>,
}

impl Tree {
    pub fn new() -> Tree {
        Tree {
            things: BTreeMap::from([(TOP, Arc::new(Thing::new(Kind::Dir, TOP, 0)))]),
            next: TOP + 1,
            began: 0,
        }
    }

    pub fn at(&self, id: Id) -> &Thing {
        &self.things[&id]
    }

    pub fn at_mut(&mut self, id: Id) -> &mut Thing {
        Arc::make_mut(self.things.get_mut(&id).expect("the thing exists"))
    }

    /// The thing at a path.
    pub fn resolve(&self, path: &str) -> Outcome<Id> {
        let mut at = TOP;
        for name in path.split('/').filter(|n| !n.is_empty()) {
            if !self.at(at).is_dir() {
                return Err(libc::ENOTDIR);
            }
            at = *self.at(at).names.get(name).ok_or(libc::ENOENT)?;
        }
        Ok(at)
    }

    /// The regular file at a path, if one is there.
    pub fn file(&self, path: &str) -> Option<Id> {
        let id = self.resolve(path).ok()?;
        (self.at(id).kind == Kind::File).then_some(id)
    }

    /// The directory that holds a path's last name.
    pub fn parent_of<'p>(&self, path: &'p str) -> Outcome<(Id, &'p str)> {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        let dir = self.resolve(dir)?;
        match self.at(dir).is_dir() {
            true => Ok((dir, name)),
            false => Err(libc::ENOTDIR),
        }
    }

    fn find(&self, dir: Id, name: &str) -> Option<Id> {
        self.at(dir).names.get(name).copied()
    }

    /// Every path that there is, with what is at it.
    pub fn paths(&self) -> Vec<(String, Id)> {
        let mut found = Vec::new();
        let mut todo = vec![(String::new(), TOP)];
        while let Some((path, dir)) = todo.pop() {
            for (name, id) in &self.at(dir).names {
                let path = match path.as_str() {
                    "" => name.clone(),
                    above => format!("{above}/{name}"),
                };
                found.push((path.clone(), *id));
                if self.at(*id).is_dir() {
                    todo.push((path, *id));
                }
            }
        }
        found.sort();
        found
    }

    /// Applies an operation on names or attributes; the others change nothing here.
    pub fn apply(&mut self, op: &Op) -> Outcome<Change> {
        match op {
            Op::Create(path) => self.make(path, Kind::File),
            Op::TmpLink { path, .. } => self.make(path, Kind::File),
            Op::Mkdir(path) => self.make(path, Kind::Dir),
            Op::Symlink(path) => self.make(path, Kind::Link(link_target(path))),
            Op::Mknod(path, mode, rdev) => {
                self.make(path, Kind::Special(mode & libc::S_IFMT, *rdev))
            }
            Op::Link(from, to) => self.link(from, to),
            Op::Rename(from, to, flags) => self.rename(from, to, *flags),
            Op::Unlink(path) => self.remove(path, false),
            Op::Rmdir(path) => self.remove(path, true),
            Op::Chmod(path, mode) => self.mark(path, |thing| thing.mode = *mode),
            Op::Chown(path, uid, gid) => {
                self.mark(path, |thing| (thing.uid, thing.gid) = (*uid, *gid))
            }
            Op::SetTime(path, time) => {
                let time = time.unwrap_or(self.began);
                self.mark(path, |thing| thing.mtime = time)
            }
            Op::SetXattr { path, .. } | Op::RemoveXattr(path, _)
                if matches!(
                    self.at(self.resolve(path)?).kind,
                    Kind::Link(_) | Kind::Special(..)
                ) =>
            {
                // Users' attributes are for files and directories.
                Err(libc::EPERM)
            }
            Op::SetXattr {
                path,
                name,
                len,
                tag,
            } => self.mark(path, |thing| {
                let value = Arc::new(crate::op::pattern(*tag, 0, *len));
                thing.xattrs.insert(name.clone(), value);
            }),
            Op::RemoveXattr(path, name) => {
                let id = self.resolve(path)?;
                if !self.at(id).xattrs.contains_key(name) {
                    return Err(libc::ENODATA);
                }
                self.mark(path, |thing| drop(thing.xattrs.remove(name)))
            }
            _ => Ok(Change {
                idle: true,
                ..Change::default()
            }),
        }
    }

    /// Attributes, or a name, of it change now.
    fn marked(&mut self, id: Id) {
        let began = self.began;
        self.at_mut(id).ctime = began;
    }

    /// Names in a directory change now.
    fn named(&mut self, dir: Id) {
        let began = self.began;
        let dir = self.at_mut(dir);
        (dir.mtime, dir.ctime) = (began, began);
    }

    fn mark(&mut self, path: &str, change: impl FnOnce(&mut Thing)) -> Outcome<Change> {
        let id = self.resolve(path)?;
        change(self.at_mut(id));
        self.marked(id);
        Ok(Change {
            touched: vec![id],
            ..Change::default()
        })
    }

    fn make(&mut self, path: &str, kind: Kind) -> Outcome<Change> {
        let (dir, name) = self.parent_of(path)?;
        if self.find(dir, name).is_some() {
            return Err(libc::EEXIST);
        }
        let id = self.next;
        self.next += 1;
        let up = (kind == Kind::Dir) as u32;
        self.things
            .insert(id, Arc::new(Thing::new(kind, dir, self.began)));
        let parent = self.at_mut(dir);
        parent.names.insert(name.to_owned(), id);
        parent.nlink += up;
        self.named(dir);
        Ok(Change {
            touched: vec![dir, id],
            created: Some(id),
            ..Change::default()
        })
    }

    fn link(&mut self, from: &str, to: &str) -> Outcome<Change> {
        let id = self.resolve(from)?;
        let (dir, name) = self.parent_of(to)?;
        if self.at(id).is_dir() {
            return Err(libc::EPERM);
        }
        if self.find(dir, name).is_some() {
            return Err(libc::EEXIST);
        }
        self.at_mut(dir).names.insert(name.to_owned(), id);
        self.at_mut(id).nlink += 1;
        self.named(dir);
        self.marked(id);
        Ok(Change {
            touched: vec![dir, id],
            ..Change::default()
        })
    }

    fn drop_link(&mut self, id: Id, parent: Id) {
        if self.at(id).is_dir() {
            self.at_mut(parent).nlink -= 1;
            self.things.remove(&id);
        } else {
            self.at_mut(id).nlink -= 1;
            match self.at(id).nlink {
                0 => drop(self.things.remove(&id)),
                _ => self.marked(id),
            }
        }
    }

    fn remove(&mut self, path: &str, directory: bool) -> Outcome<Change> {
        let (dir, name) = self.parent_of(path)?;
        let id = self.find(dir, name).ok_or(libc::ENOENT)?;
        match (directory, self.at(id).is_dir()) {
            (true, false) => return Err(libc::ENOTDIR),
            (false, true) => return Err(libc::EISDIR),
            (true, true) if !self.at(id).names.is_empty() => return Err(libc::ENOTEMPTY),
            _ => {}
        }
        self.at_mut(dir).names.remove(name);
        self.drop_link(id, dir);
        self.named(dir);
        Ok(Change {
            touched: vec![dir, id],
            ..Change::default()
        })
    }

    fn is_above(&self, upper: Id, mut lower: Id) -> bool {
        while lower != upper && lower != TOP {
            lower = self.at(lower).parent;
        }
        lower == upper
    }

    fn rename(&mut self, from: &str, to: &str, flags: u32) -> Outcome<Change> {
        let (from, name) = self.parent_of(from)?;
        let (to, new_name) = self.parent_of(to)?;
        let source = self.find(from, name).ok_or(libc::ENOENT)?;
        let target = self.find(to, new_name);
        let exchange = flags == fs::RENAME_EXCHANGE;
        match target {
            None if exchange => return Err(libc::ENOENT),
            Some(_) if flags == fs::RENAME_NOREPLACE => return Err(libc::EEXIST),
            Some(target) if target == source => {
                return Ok(Change {
                    idle: true,
                    ..Change::default()
                });
            }
            _ => {}
        }
        let is_dir = |id: Id| self.at(id).is_dir();
        if from != to && is_dir(source) && self.is_above(source, to) {
            return Err(libc::EINVAL);
        }
        if let Some(target) = target
            && from != to
            && is_dir(target)
            && (exchange || is_dir(source))
            && self.is_above(target, from)
        {
            let below = [libc::ENOTEMPTY, libc::EINVAL];
            return Err(below[exchange as usize]);
        }
        let mut touched = vec![from, to, source];
        touched.extend(target);
        let replacers = match target {
            Some(target) if exchange => vec![source, target],
            Some(_) => vec![source],
            None => Vec::new(),
        };
        let is_file = |id: &Id| self.at(*id).kind == Kind::File;
        let change = Change {
            touched,
            replacers: replacers.into_iter().filter(is_file).collect(),
            ..Change::default()
        };
        match target {
            Some(target) if exchange => {
                self.exchange((from, name, source), (to, new_name, target));
                return Ok(change);
            }
            Some(target) => {
                match (is_dir(source), is_dir(target)) {
                    (true, false) => return Err(libc::ENOTDIR),
                    (false, true) => return Err(libc::EISDIR),
                    (true, true) if !self.at(target).names.is_empty() => {
                        return Err(libc::ENOTEMPTY);
                    }
                    _ => {}
                }
                self.drop_link(target, to);
            }
            None => {}
        }
        let up = self.at(source).is_dir() as u32;
        self.at_mut(from).names.remove(name);
        self.at_mut(to).names.insert(new_name.to_owned(), source);
        self.at_mut(from).nlink -= up;
        self.at_mut(to).nlink += up;
        self.at_mut(source).parent = to;
        self.named(from);
        self.named(to);
        self.marked(source);
        Ok(change)
    }

    fn exchange(&mut self, a: (Id, &str, Id), b: (Id, &str, Id)) {
        let (from, name, source) = a;
        let (to, new_name, target) = b;
        let (up, down) = (
            self.at(source).is_dir() as u32,
            self.at(target).is_dir() as u32,
        );
        self.at_mut(from).names.insert(name.to_owned(), target);
        self.at_mut(to).names.insert(new_name.to_owned(), source);
        let dir = self.at_mut(from);
        dir.nlink = dir.nlink + down - up;
        let dir = self.at_mut(to);
        dir.nlink = dir.nlink + up - down;
        self.at_mut(source).parent = to;
        self.at_mut(target).parent = from;
        self.named(from);
        self.named(to);
        self.marked(source);
        self.marked(target);
    }
}

impl Default for Tree {
    fn default() -> Self {
        Tree::new()
    }
}

/// Where the link made at a path points to.
pub fn link_target(path: &str) -> Vec<u8> {
    format!("somewhere/from/{path}").into_bytes()
}
