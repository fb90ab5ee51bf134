//! Listings of directories. A position in one is a key of the directory's list, and so stays what it is whatever is made and removed.

mod ahead;
#[cfg(test)]
mod tests;

pub(crate) use ahead::Ahead;

use crate::Error;
use crate::api::{DirEntry, Ino};
use crate::content::{Inode, Name};
use crate::directory::At;
use crate::filesystem::FileSystem;
use crate::list;
use base::canary::{Canary, planted};

/// readdir offsets below this belong to "." and "..".
const COOKIES: u64 = 2;
/// Inodes that a listing with attributes reads at once.
const INODES_AT_ONCE: usize = 64;

impl FileSystem {
    /// Lists a directory from offset `cookie` (0: the start; else an entry's `next`) until
    /// `each` returns false, which means that it did not take the entry. An entry that exists
    /// throughout is listed exactly once, whatever else changes. No lock is held in `each`.
    ///
    /// # Errors
    /// [`Error::NotADirectory`]; [`Error::Stale`] when nothing has the number any more, or something else has it than when the call began.
    pub fn readdir<'d>(
        &self,
        dir: impl Into<At<'d>>,
        cookie: u64,
        each: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<(), Error> {
        let dir = dir.into();
        let Some(generation) = self.list_dots(dir, cookie, each)? else {
            return Ok(());
        };
        let mut from = Some(cookie.saturating_sub(COOKIES));
        while let Some(key) = from {
            let (names, next) = self.names_from(dir, generation, key)?;
            if !names.iter().map(entry_of).all(&mut *each) {
                return Ok(());
            }
            from = next;
        }
        Ok(())
    }

    /// The same for who asks for the attributes of each entry as it is listed: their inodes are read
    /// into memory several at once, and those that the next call comes to while the caller is at other things.
    ///
    /// # Errors
    /// As for [`FileSystem::readdir`]; what is wrong with an entry's inode [`FileSystem::getattr`] tells.
    pub fn readdir_plus<'d>(
        &self,
        dir: impl Into<At<'d>>,
        cookie: u64,
        each: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<(), Error> {
        let dir = dir.into();
        let Some(generation) = self.list_dots(dir, cookie, each)? else {
            return Ok(());
        };
        let (ino, first) = (dir.ino(), cookie.saturating_sub(COOKIES));
        let (mut read, mut from) = (0, Some(first));
        while let Some(key) = from {
            let (names, next) = self.names_from(dir, generation, key)?;
            for names in names.chunks(INODES_AT_ONCE) {
                if let [head, .., tail] = names {
                    self.listings.wait_for(ino, head.key..tail.key + 1);
                }
                read += self.store.read_ahead(names.iter().map(|name| name.nid));
                if let Some(refused) = names.iter().find(|name| !each(entry_of(name))) {
                    self.listings.went_on(ino, first..refused.key, read > 0);
                    return Ok(());
                }
            }
            from = next;
        }
        Ok(())
    }

    /// Lists a damaged directory until `each` returns false: it is handed the names that can be found, and where something
    /// unreadable hides others, why they are hidden.
    ///
    /// # Errors
    /// As for [`FileSystem::readdir`], of the directory itself.
    pub fn readdir_around(
        &self,
        dir: Ino,
        each: &mut dyn FnMut(Result<DirEntry<'_>, Error>) -> bool,
    ) -> Result<(), Error> {
        let dots = self.list_dots(dir.into(), 0, &mut |entry| each(Ok(entry)))?;
        let Some(generation) = dots else {
            return Ok(());
        };
        let mut from = Some(0);
        while let Some(key) = from {
            let (found, next) = {
                let node = self.dir_inode(dir.into())?;
                let inode = begun_in(dir, generation, node.inode()?)?;
                match list::run_from::<Name>(&self.store, inode, key) {
                    Ok((names, next)) => (Ok(names), next),
                    Err(error) => {
                        let next = list::behind::<Name>(&self.store, inode, key);
                        (Err(error), next)
                    }
                }
            };
            let more = match found {
                Ok(names) => names.iter().all(|name| each(Ok(entry_of(name)))),
                Err(error) => each(Err(error)),
            };
            if !more {
                return Ok(());
            }
            from = next;
        }
        Ok(())
    }

    /// The directory's generation if the names come next: `each` took the entries in front of them that are not behind `cookie`.
    fn list_dots(
        &self,
        dir: At<'_>,
        cookie: u64,
        each: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<Option<u64>, Error> {
        let ino = dir.ino();
        let (parent, generation) = {
            let node = self.dir_inode(dir)?;
            let inode = node.inode()?;
            if !inode.is_dir() {
                return Err(Error::NotADirectory);
            }
            (inode.parent, inode.generation)
        };
        if cookie == 0 && self.files.options().directory_atime {
            self.touch_atime(ino)?;
        }
        let dots = [(ino, &b"."[..]), (parent, &b".."[..])];
        let dots = dots.into_iter().zip(1..);
        let mut dots = dots.skip(cookie.min(COOKIES) as usize);
        let all = dots.all(|((ino, name), next)| {
            let kind = libc::DT_DIR;
            each(DirEntry {
                ino,
                name,
                kind,
                next,
            })
        });
        Ok(all.then_some(generation))
    }

    /// Names from `key` on, to the end of one leaf, and where to go on.
    fn names_from(
        &self,
        dir: At<'_>,
        generation: u64,
        key: u64,
    ) -> Result<(Vec<Name>, Option<u64>), Error> {
        let node = self.dir_inode(dir)?;
        let inode = begun_in(dir.ino(), generation, node.inode()?)?;
        match list::run_from::<Name>(&self.store, inode, key) {
            Err(Error::Store(_)) if planted(Canary::LeafLeftOut) => {
                Ok((Vec::new(), list::behind::<Name>(&self.store, inode, key)))
            }
            names => names,
        }
    }
}

/// The inode of the directory that a listing began in, which may be removed by now, and not what else has its number then.
fn begun_in(dir: Ino, generation: u64, inode: &Inode) -> Result<&Inode, Error> {
    match inode.is_dir() && inode.generation == generation {
        true => Ok(inode),
        false => Err(Error::Stale(dir)),
    }
}

/// A name as a listing shows it.
pub(crate) fn entry_of(name: &Name) -> DirEntry<'_> {
    DirEntry {
        ino: name.nid,
        name: &name.name,
        kind: name.kind,
        next: name.key + 1 + COOKIES,
    }
}
