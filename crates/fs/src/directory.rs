//! Directory handles: calls relative to an open directory, in the style of `openat`.
//!
//! Every call that takes a directory takes its number or a handle ([`At`]). With a number each call
//! looks the directory's node up in the node cache, which all cores share; a handle found it once.
//!
//! Invariants:
//! 1. A handle's node stays in memory, and a changed node is changed in place: what a handle refers to is
//!    the newest version of its directory for as long as that exists.
//! 2. A handle counts as a reference to its inode from before the look at the inode that made it. So a
//!    directory that is removed while a handle is there becomes an orphan, and neither it nor its number
//!    goes before the last handle does.

use crate::Error;
use crate::api::{Attr, Ino};
use crate::content::FsNode;
use crate::data::OpenFile;
use crate::filesystem::FileSystem;
use crate::namespace::live_dir;
use crate::open::check_flags;
use engine::{Node, NodeLock, NodeRead};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// Looks at one name, or path, that may find it referring to something else each time.
pub(crate) const LOOKS: u32 = 100;

/// An open directory, for calls relative to it: [`FileSystem::create`], `lookup`, `unlink`, `rename` and all others
/// that take a directory take `&Dir`. What a thread does through handles of its own, in directories that
/// no other thread uses, meets other threads nowhere on the way to the directory.
///
/// A directory that is removed stays what the handle refers to, as POSIX has it: it can be stat'ed
/// (with no links), lists no names, and whatever looks for a name in it or makes one fails with
/// [`Error::NotFound`]. It never becomes another directory, whatever gets its number later.
///
/// Dropping the last handle of a removed directory deletes it, which takes locks and may wait for the journal: it
/// must not happen within a callback of [`FileSystem::readdir`] or [`FileSystem::walk`]. A handle keeps the
/// file system's memory; it must be dropped before [`FileSystem::close`], or what it keeps goes at the next open.
pub struct Dir {
    fs: Arc<FileSystem>,
    node: Node<FsNode>,
    generation: u64,
}

impl Dir {
    /// Its inode number.
    pub fn ino(&self) -> Ino {
        self.node.nid()
    }

    /// Tells it from other inodes that had, or will have, its number.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// What `stat` shows of the directory itself.
    ///
    /// # Errors
    /// None but those of a damaged directory.
    pub fn stat(&self) -> Result<Attr, Error> {
        let node = self.node.read()?;
        Ok(self.fs.show(self.ino(), node.inode()?))
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        self.fs.forget(self.ino(), 1);
    }
}

impl fmt::Debug for Dir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dir")
            .field("ino", &self.ino())
            .finish_non_exhaustive()
    }
}

/// The directory that a call is about: by its number or by a handle.
#[derive(Clone, Copy, Debug)]
pub struct At<'d> {
    ino: Ino,
    handle: Option<&'d Dir>,
}

impl At<'_> {
    /// The directory's number.
    pub fn ino(&self) -> Ino {
        self.ino
    }

    /// Its number, if that is all there is.
    pub(crate) fn number(&self) -> Option<Ino> {
        match self.handle {
            None => Some(self.ino),
            Some(_) => None,
        }
    }
}

impl From<Ino> for At<'_> {
    fn from(ino: Ino) -> Self {
        At { ino, handle: None }
    }
}

impl<'d> From<&'d Dir> for At<'d> {
    fn from(dir: &'d Dir) -> Self {
        At {
            ino: dir.ino(),
            handle: Some(dir),
        }
    }
}

/// A directory's node, looked up now or by a handle.
pub(crate) enum DirNode<'d> {
    Found(Node<FsNode>),
    Held(&'d Node<FsNode>),
}

impl DirNode<'_> {
    /// For who locks it last.
    pub(crate) fn given(self) -> Node<FsNode> {
        match self {
            DirNode::Found(node) => node,
            DirNode::Held(node) => node.clone(),
        }
    }
}

impl Deref for DirNode<'_> {
    type Target = Node<FsNode>;

    fn deref(&self) -> &Node<FsNode> {
        match self {
            DirNode::Found(node) => node,
            DirNode::Held(node) => node,
        }
    }
}

/// A directory that a call of several steps stays in: given by its number it is referred to until this goes, as by a handle
/// (invariant 2), so that it is the same one in all of them.
pub(crate) struct Stay<'f> {
    fs: &'f FileSystem,
    ino: Option<Ino>,
}

impl Drop for Stay<'_> {
    fn drop(&mut self) {
        if let Some(ino) = self.ino {
            self.fs.forget(ino, 1);
        }
    }
}

/// What a directory's number or handle leads to is an inode.
#[inline]
pub(crate) fn dir_of<N: NodeLock<FsNode>>(node: N) -> Result<N, Error> {
    match &*node {
        FsNode::Inode(_) => Ok(node),
        _ => Err(Error::Stale(node.nid())),
    }
}

impl FileSystem {
    /// Opens the directory with this number.
    ///
    /// # Errors
    /// [`Error::NotADirectory`]; [`Error::NotFound`] when it was removed, or [`Error::Stale`] when nothing has the
    /// number any more.
    pub fn open_dir(self: &Arc<Self>, ino: Ino) -> Result<Dir, Error> {
        // Neither waits for other nodes nor finds what is not there; and a number without an inode
        // must not be counted.
        let node = self.node(ino)?;
        self.ref_inode(ino);
        // From here on the handle gives the reference back, whatever happens.
        let mut dir = Dir {
            fs: Arc::clone(self),
            node,
            generation: 0,
        };
        dir.generation = {
            let content = dir.node.read()?;
            match &*content {
                FsNode::Inode(inode) => live_dir(inode)?.generation,
                _ => return Err(Error::Stale(ino)),
            }
        };
        Ok(dir)
    }

    /// Opens the directory that a name refers to; "." and ".." as well.
    ///
    /// # Errors
    /// Those of [`FileSystem::lookup`]; [`Error::NotADirectory`]; [`Error::Busy`] when others rename faster than this
    /// looks.
    pub fn open_dir_at<'d>(
        self: &Arc<Self>,
        parent: impl Into<At<'d>>,
        name: &[u8],
    ) -> Result<Dir, Error> {
        let parent = parent.into();
        for _ in 0..LOOKS {
            let attr = self.lookup(parent, name)?;
            if let Some(dir) = self.open_found_dir(&attr)? {
                return Ok(dir);
            }
        }
        Err(Error::Busy)
    }

    /// Opens a directory that a look-up found. `None`: it was removed since, and perhaps its number reused.
    pub(crate) fn open_found_dir(self: &Arc<Self>, found: &Attr) -> Result<Option<Dir>, Error> {
        match self.open_dir(found.ino) {
            Ok(dir) => Ok((dir.generation == found.generation).then_some(dir)),
            Err(Error::NotADirectory) if !found.is_dir() => Err(Error::NotADirectory),
            Err(Error::Stale(_) | Error::NotFound | Error::NotADirectory) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Opens the regular file that a name refers to, and tells its attributes; `flags` as for
    /// [`FileSystem::open_file`], and with those refused that [`FileSystem::open_path`] refuses. A symbolic link is not followed.
    ///
    /// # Errors
    /// Those of [`FileSystem::lookup`] and [`FileSystem::open_file`]; [`Error::Busy`] when others rename faster than
    /// this looks.
    pub fn open_at<'d>(
        &self,
        parent: impl Into<At<'d>>,
        name: &[u8],
        flags: i32,
    ) -> Result<(Attr, Arc<OpenFile>), Error> {
        check_flags(flags)?;
        let parent = parent.into();
        for _ in 0..LOOKS {
            let attr = self.lookup(parent, name)?;
            if flags & libc::O_DIRECTORY != 0 && !attr.is_dir() {
                return Err(Error::NotADirectory);
            }
            if let Some(opened) = self.open_found(&attr, |ino| self.open_file(ino, flags))? {
                return Ok(opened);
            }
        }
        Err(Error::Busy)
    }

    /// Opens a file that a look-up found. `None`: it is gone, and perhaps its number reused.
    pub(crate) fn open_found(
        &self,
        found: &Attr,
        open: impl Fn(Ino) -> Result<Arc<OpenFile>, Error>,
    ) -> Result<Option<(Attr, Arc<OpenFile>)>, Error> {
        // While we refer to it the number is not reused, and so stays what it is found to be.
        self.ref_inode(found.ino);
        let opened = self.open_same(found, open);
        self.forget(found.ino, 1);
        match opened {
            Err(Error::Stale(_)) => Ok(None),
            other => other,
        }
    }

    /// Opens an inode if it is still the one that a look-up found; the caller refers to the number.
    fn open_same(
        &self,
        found: &Attr,
        open: impl Fn(Ino) -> Result<Arc<OpenFile>, Error>,
    ) -> Result<Option<(Attr, Arc<OpenFile>)>, Error> {
        let same = |attr: &Attr| attr.generation == found.generation;
        if !same(&self.getattr(found.ino)?) {
            return Ok(None);
        }
        let file = open(found.ino)?;
        let attr = self.getattr(found.ino)?;
        Ok(same(&attr).then_some((attr, file)))
    }

    /// Stays in the directory that a call is about until what this returns is dropped, without locks.
    ///
    /// # Errors
    /// As for [`FileSystem::open_dir`].
    pub(crate) fn stay_in(&self, at: At<'_>) -> Result<Stay<'_>, Error> {
        let node = self.dir_node(at)?;
        // From here on the reference is given back, whatever happens.
        let stay = Stay {
            fs: self,
            ino: at.number().inspect(|ino| self.ref_inode(*ino)),
        };
        live_dir(dir_of(node.read()?)?.inode()?)?;
        Ok(stay)
    }

    /// The node of the directory that a call is about.
    #[inline]
    pub(crate) fn dir_node<'d>(&self, at: At<'d>) -> Result<DirNode<'d>, Error> {
        match at.handle {
            None => Ok(DirNode::Found(self.node(at.ino)?)),
            Some(dir) if std::ptr::eq(&*dir.fs, self) => Ok(DirNode::Held(&dir.node)),
            Some(_) => Err(Error::Invalid("a directory of another file system")),
        }
    }

    /// The inode of the directory that a call is about, locked shared.
    #[inline]
    pub(crate) fn dir_inode(&self, at: At<'_>) -> Result<NodeRead<FsNode>, Error> {
        dir_of(self.dir_node(at)?.given().into_read()?)
    }
}
