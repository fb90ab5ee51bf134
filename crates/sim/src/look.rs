//! What a file system shows: every name, attribute and byte of it.

use crate::times::Shown;
use crate::tree::{Id, Kind, TOP, Thing, Tree};
use base::clock::Timestamp;
use fs::{Attr, FileSystem, Ino, OpenFile, ROOT};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

#[derive(Clone, Debug, PartialEq)]
pub struct FoundThing {
    pub ino: Ino,
    pub kind: Kind,
    pub nlink: u32,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub xattrs: BTreeMap<String, Arc<Vec<u8>>>,
    pub names: BTreeMap<String, usize>,
    /// One of its paths.
    pub path: String,
    /// What a regular file holds.
    pub content: Option<Vec<u8>>,
    pub times: Shown,
}

/// Everything at and below one directory, which comes first.
#[derive(Clone, Debug)]
pub struct Found {
    pub things: Vec<FoundThing>,
    /// The time at which it was found, in nanoseconds.
    pub now_ns: u64,
}

/// Why what is shown is not known, or not right.
#[derive(Clone, Debug)]
pub enum Amiss {
    /// A call has failed.
    Failed(String),
    /// All calls have succeeded, and what they show cannot be.
    Wrong(String),
}

impl fmt::Display for Amiss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Amiss::Failed(what) | Amiss::Wrong(what)) = self;
        f.write_str(what)
    }
}

impl From<Amiss> for String {
    fn from(amiss: Amiss) -> String {
        amiss.to_string()
    }
}

/// All names of a directory but those that begin with a dot.
pub fn list(fs: &FileSystem, dir: Ino) -> Result<Vec<(Vec<u8>, Ino)>, fs::Error> {
    let mut names = Vec::new();
    fs.readdir_plus(dir, 0, &mut |entry| {
        // Names that begin with a dot are not part of any model.
        if !entry.name.starts_with(b".") {
            names.push((entry.name.to_vec(), entry.ino));
        }
        true
    })?;
    Ok(names)
}

/// Reads a whole file.
pub fn content(fs: &FileSystem, ino: Ino) -> Result<Vec<u8>, fs::Error> {
    let file = fs.open_file(ino, libc::O_RDONLY)?;
    content_of(fs, &file)
}

/// Reads a whole file that is open.
pub fn content_of(fs: &FileSystem, file: &OpenFile) -> Result<Vec<u8>, fs::Error> {
    let mut bytes = vec![0; fs.getattr(file.ino())?.size as usize + 1];
    let len = fs.read(file, 0, &mut bytes)?;
    bytes.truncate(len);
    Ok(bytes)
}

/// The times among a thing's attributes.
pub fn shown(attr: &Attr) -> Shown {
    let ns = |time: Timestamp| time.sec() as u64 * 1_000_000_000 + time.nsec() as u64;
    Shown {
        mtime: ns(attr.mtime),
        ctime: ns(attr.ctime),
    }
}

/// So many nanoseconds since the epoch.
pub fn timestamp(ns: u64) -> Timestamp {
    Timestamp::new((ns / 1_000_000_000) as i64, (ns % 1_000_000_000) as u32)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn thing(fs: &FileSystem, ino: Ino, path: String) -> Result<FoundThing, fs::Error> {
    let attr = fs.getattr(ino)?;
    let kind = match attr.mode & libc::S_IFMT {
        libc::S_IFDIR => Kind::Dir,
        libc::S_IFLNK => Kind::Link(fs.readlink(ino)?),
        libc::S_IFREG => Kind::File,
        special => Kind::Special(special, attr.rdev),
    };
    let mut xattrs = BTreeMap::new();
    for name in fs.listxattr(ino)?.split(|b| *b == 0) {
        if !name.is_empty() {
            xattrs.insert(text(name), Arc::new(fs.getxattr(ino, name)?));
        }
    }
    let content = match kind {
        Kind::File => Some(content(fs, ino)?),
        _ => None,
    };
    Ok(FoundThing {
        ino,
        kind,
        nlink: attr.nlink,
        mode: attr.mode & 0o7777,
        uid: attr.uid,
        gid: attr.gid,
        xattrs,
        names: BTreeMap::new(),
        path,
        content,
        times: shown(&attr),
    })
}

/// Looks at everything below the root.
///
/// # Errors
/// The first error that any call gives, with the path that it concerns.
pub fn look(fs: &FileSystem) -> Result<Found, String> {
    look_below(fs, ROOT)
}

pub fn look_below(fs: &FileSystem, top: Ino) -> Result<Found, String> {
    try_look(fs, top).map_err(|why| why.to_string())
}

/// As `look_below`, for who takes errors of calls for another thing than what is seen.
pub fn try_look(fs: &FileSystem, top: Ino) -> Result<Found, Amiss> {
    let failed = |what: &str, error: fs::Error| Amiss::Failed(format!("{what}: {error}"));
    let first = thing(fs, top, String::new()).map_err(|e| failed("the root", e))?;
    let mut found = Found {
        things: vec![first],
        now_ns: fs.clock().monotonic_ns(),
    };
    let mut known = BTreeMap::from([(top, 0)]);
    let mut todo = vec![0];
    while let Some(dir) = todo.pop() {
        let (ino, above) = (found.things[dir].ino, found.things[dir].path.clone());
        for (name, ino) in list(fs, ino).map_err(|e| failed(&above, e))? {
            let name = text(&name);
            let path = match above.as_str() {
                "" => name.clone(),
                above => format!("{above}/{name}"),
            };
            let index = match known.get(&ino) {
                Some(index) => *index,
                None => {
                    let thing = thing(fs, ino, path.clone()).map_err(|e| failed(&path, e))?;
                    found.things.push(thing);
                    known.insert(ino, found.things.len() - 1);
                    if found.things[known[&ino]].kind == Kind::Dir {
                        todo.push(known[&ino]);
                    }
                    known[&ino]
                }
            };
            let named = fs
                .lookup(found.things[dir].ino, name.as_bytes())
                .map_err(|error| match error {
                    fs::Error::NotFound => Amiss::Wrong(format!("{path}: listed, and not found")),
                    error => failed(&path, error),
                })?;
            if named.ino != ino {
                let named = named.ino;
                let what = format!("{path}: listed as inode {ino}, found as {named}");
                return Err(Amiss::Wrong(what));
            }
            found.things[dir].names.insert(name, index);
        }
    }
    Ok(found)
}

impl FoundThing {
    /// Bytes in a regular file.
    pub fn size(&self) -> u64 {
        self.content.as_ref().map_or(0, |bytes| bytes.len() as u64)
    }

    fn is(&self, thing: &Thing) -> bool {
        self.kind == thing.kind
            && self.nlink == thing.nlink
            && self.mode == thing.mode
            && (self.uid, self.gid) == (thing.uid, thing.gid)
            && self.xattrs == thing.xattrs
            && self.names.len() == thing.names.len()
    }
}

impl Found {
    /// If names, links and attributes are those of the model, which thing is which.
    pub fn matches(&self, tree: &Tree) -> Option<BTreeMap<Id, usize>> {
        let mut pairs = BTreeMap::from([(TOP, 0)]);
        let mut back = BTreeMap::from([(0, TOP)]);
        let mut todo = vec![(TOP, 0)];
        while let Some((id, index)) = todo.pop() {
            let (thing, found) = (tree.at(id), &self.things[index]);
            if !found.is(thing) {
                return None;
            }
            for ((name, id), (found_name, index)) in thing.names.iter().zip(&found.names) {
                if name != found_name {
                    return None;
                }
                match (pairs.get(id), back.get(index)) {
                    (None, None) => {
                        pairs.insert(*id, *index);
                        back.insert(*index, *id);
                        todo.push((*id, *index));
                    }
                    (Some(i), Some(t)) if i == index && t == id => {}
                    _ => return None,
                }
            }
        }
        Some(pairs)
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for thing in &self.things {
            let size = thing.content.as_ref().map_or(0, Vec::len);
            write!(
                f,
                "\n  /{} {} links {} mode {:o} owner {}:{} size {size} names {:?}",
                thing.path,
                what(&thing.kind),
                thing.nlink,
                thing.mode,
                thing.uid,
                thing.gid,
                thing.names.keys().collect::<Vec<_>>(),
            )?;
            xattrs(f, &thing.xattrs)?;
        }
        Ok(())
    }
}

fn what(kind: &Kind) -> String {
    match kind {
        Kind::File => "file".to_owned(),
        Kind::Dir => "dir".to_owned(),
        Kind::Link(_) => "link".to_owned(),
        Kind::Special(kind, rdev) => format!("special {kind:o} {rdev}"),
    }
}

fn xattrs(f: &mut dyn fmt::Write, all: &BTreeMap<String, Arc<Vec<u8>>>) -> fmt::Result {
    for (name, value) in all {
        let start = value.first().copied().unwrap_or_default();
        write!(f, " {name}={}×{start:02x}…", value.len())?;
    }
    Ok(())
}

/// A model's names and attributes as text.
pub fn describe(tree: &Tree) -> String {
    let mut text = String::new();
    let mut paths = tree.paths();
    paths.insert(0, (String::new(), TOP));
    for (path, id) in paths {
        let thing = tree.at(id);
        text.push_str(&format!(
            "\n  /{path} {} links {} mode {:o} owner {}:{} names {:?}",
            what(&thing.kind),
            thing.nlink,
            thing.mode,
            thing.uid,
            thing.gid,
            thing.names.keys().collect::<Vec<_>>(),
        ));
        // Writing to a string cannot fail.
        let written = xattrs(&mut text, &thing.xattrs);
        debug_assert!(written.is_ok());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Op;
    use crate::world::{Image, Machine, Shape};
    use fs::{Caller, SetAttr};

    /// Groups, and what is no file, directory or link, were not looked at.
    #[test]
    fn another_group_type_or_device_number_is_another_tree() {
        let image = Image::format(&Shape::small(1)).unwrap();
        let fs = Machine::new(&image, 1).open().unwrap();
        let who = Caller::root();
        let made = fs.mknod(&who, ROOT, b"null", libc::S_IFCHR | 0o644, 0x103);
        let set = SetAttr {
            gid: Some(7),
            ..SetAttr::default()
        };
        fs.setattr(&who, made.unwrap().ino, &set).unwrap();
        let found = look(&fs).unwrap();
        let is = |kind, rdev, gid| {
            let mut tree = Tree::new();
            for op in [
                Op::Mknod("null".into(), kind | 0o644, rdev),
                Op::Chown("null".into(), 0, gid),
            ] {
                tree.apply(&op).unwrap();
            }
            found.matches(&tree).is_some()
        };
        assert!(is(libc::S_IFCHR, 0x103, 7));
        assert!(!is(libc::S_IFCHR, 0x103, 0));
        assert!(!is(libc::S_IFCHR, 0x104, 7));
        assert!(!is(libc::S_IFBLK, 0x103, 7));
    }
}
