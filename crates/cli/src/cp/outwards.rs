//! From inside to the host.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs::{self as host, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{
    DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink,
};
use std::path::{Path, PathBuf};

use fs::{Attr, Ino};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

use super::attributes::HostFile;
use super::{Copy, Links, just_made, not_a_folder, not_followed, shown_inside};
use crate::failure::Failure;
use crate::offline::{Named, PIECE, bytes, join, last_name, named};
use crate::output::{harmless, shown};

pub struct Outwards<'a> {
    copy: &'a Copy<'a>,
    /// Where what has several names was copied to.
    linked: HashMap<Ino, PathBuf>,
    /// What this command has made and is no folder, by device and inode: a host may take several names for one.
    made: HashSet<(u64, u64)>,
}

/// Something to copy, and where to.
struct Item {
    from: Vec<u8>,
    attr: Attr,
    to: PathBuf,
    links: Links,
}

fn failed(to: &Path, error: &io::Error) -> Failure {
    Failure::io(shown(to), error)
}

impl<'a> Outwards<'a> {
    pub fn new(copy: &'a Copy<'a>) -> Self {
        Outwards {
            copy,
            linked: HashMap::new(),
            made: HashSet::new(),
        }
    }

    pub fn copy(&mut self, from: &[u8], to: &Path) -> Result<(), Failure> {
        let offline = self.copy.offline;
        let attr = match self.copy.recursive {
            true => offline.find_itself(from)?,
            false => offline.find(from)?,
        };
        let (to, links) = self.place(from, &attr, to)?;
        let item = Item {
            from: from.to_vec(),
            attr,
            to,
            links,
        };
        let (mut waiting, mut folders) = (vec![item], Vec::new());
        while let Some(item) = waiting.pop() {
            let done = match item.attr.is_dir() {
                true => self.folder(item, &mut waiting, &mut folders),
                false => self.one(&item),
            };
            self.copy.tell_of(done);
        }
        // The deepest first: one that its owner may not enter is entered no more, and its times stay.
        for (to, attr) in folders.into_iter().rev() {
            self.copy.tell_of(self.finish_folder(&to, &attr));
        }
        Ok(())
    }

    /// Where a source goes to that the user has named.
    fn place(&self, from: &[u8], attr: &Attr, to: &Path) -> Result<(PathBuf, Links), Failure> {
        let found = host::metadata(to);
        let is_folder = found.as_ref().is_ok_and(|found| found.is_dir());
        if is_folder {
            return Ok(match last_name(from) {
                // What these lead to has no name to take over: only what is in it is copied.
                b"" | b"." | b".." => (to.to_owned(), Links::Refused),
                name => (to.join(OsStr::from_bytes(name)), Links::Refused),
            });
        }
        if self.copy.several {
            return Err(not_a_folder(shown(to)));
        }
        let is_missing = found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        if bytes(to).ends_with(b"/") && !(is_missing && attr.is_dir()) {
            return Err(not_a_folder(shown(to)));
        }
        Ok((to.to_owned(), Links::Followed))
    }

    fn folder(
        &mut self,
        item: Item,
        waiting: &mut Vec<Item>,
        folders: &mut Vec<(PathBuf, Attr)>,
    ) -> Result<(), Failure> {
        let Item { from, attr, to, .. } = item;
        self.copy.refuse_folder(harmless(&from))?;
        let offline = self.copy.offline;
        let names = offline.names(&from, attr.ino, |lost| self.copy.tell_of(Err(lost)));
        if make_folder(&to)? || self.copy.keeps {
            folders.push((to.clone(), attr));
        }
        for Named { name, .. } in names {
            match offline.look(&from, attr.ino, &name) {
                Ok(attr) => waiting.push(Item {
                    from: join(&from, &name),
                    attr,
                    to: to.join(OsString::from_vec(name)),
                    links: Links::Refused,
                }),
                Err(failure) => self.copy.tell_of(Err(failure)),
            }
        }
        Ok(())
    }

    fn finish_folder(&self, to: &Path, attr: &Attr) -> Result<(), Failure> {
        let folder = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
            .open(to)
            .map_err(|e| failed(to, &e))?;
        if self.copy.keeps {
            let file = HostFile {
                path: to,
                open: Some(&folder),
            };
            self.copy.keep_outwards(attr, &file);
            return Ok(());
        }
        folder
            .set_permissions(Permissions::from_mode(self.copy.mode_of_new(attr.mode)))
            .map_err(|e| failed(to, &e))
    }

    /// Copies what is no folder.
    fn one(&mut self, item: &Item) -> Result<(), Failure> {
        if let Some(there) = identity(&item.to)
            && self.made.contains(&there)
        {
            return Err(just_made(shown(&item.to), shown_inside(&item.from)));
        }
        let has_names = self.copy.keeps && item.attr.nlink > 1;
        if has_names && let Some(first) = self.linked.get(&item.attr.ino) {
            return self.link(first, &item.to);
        }
        match item.attr.mode & libc::S_IFMT {
            libc::S_IFREG => self.regular(item)?,
            libc::S_IFLNK => self.symlink(item)?,
            _ => self.special(item)?,
        }
        if has_names {
            self.linked.insert(item.attr.ino, item.to.clone());
        }
        self.made.extend(identity(&item.to));
        self.copy.bar.inc(1);
        Ok(())
    }

    fn regular(&self, item: &Item) -> Result<(), Failure> {
        let failed = |e: io::Error| failed(&item.to, &e);
        if self.copy.keeps && item.links == Links::Refused {
            self.part_from_links(&item.to)?;
        }
        let (mut file, is_new) = self.open_file(&item.to, item.links)?;
        // What is no file, the terminal for example, keeps all it has.
        if !file.metadata().map_err(failed)?.is_file() {
            return self.copy.offline.read(&item.from, item.attr.ino, |piece| {
                file.write_all(piece).map_err(failed)
            });
        }
        if self.copy.keeps {
            file.set_permissions(Permissions::from_mode(0o600))
                .map_err(failed)?;
        }
        let copied = self.content(item, &file);
        // Whatever is there of it: who asked for the copy may read that.
        match (self.copy.keeps, is_new) {
            (true, _) => {
                let file = HostFile {
                    path: &item.to,
                    open: Some(&file),
                };
                self.copy.keep_outwards(&item.attr, &file);
            }
            (false, true) => file
                .set_permissions(Permissions::from_mode(
                    self.copy.mode_of_new(item.attr.mode),
                ))
                .map_err(failed)?,
            (false, false) => {}
        }
        copied
    }

    /// Writes what there is between holes to an empty file.
    fn content(&self, item: &Item, file: &File) -> Result<(), Failure> {
        let fs = &self.copy.offline.fs;
        let unread = |e| named(&item.from, e);
        let unwritten = |e: io::Error| failed(&item.to, &e);
        let source = fs
            .open_file(item.attr.ino, libc::O_RDONLY)
            .map_err(unread)?;
        let mut buffer = vec![0; PIECE];
        let mut at = 0;
        'data: loop {
            at = match fs.seek(&source, at, libc::SEEK_DATA) {
                Err(fs::Error::NoSuchOffset) => break,
                found => found.map_err(unread)?,
            };
            let end = fs.seek(&source, at, libc::SEEK_HOLE).map_err(unread)?;
            while at < end {
                let len = (end - at).min(PIECE as u64) as usize;
                let read = fs.read(&source, at, &mut buffer[..len]).map_err(unread)?;
                if read == 0 {
                    break 'data;
                }
                file.write_all_at(&buffer[..read], at).map_err(unwritten)?;
                at += read as u64;
            }
        }
        file.set_len(item.attr.size).map_err(unwritten)
    }

    fn symlink(&self, item: &Item) -> Result<(), Failure> {
        let failed = |e: io::Error| failed(&item.to, &e);
        let target = self.copy.offline.fs.readlink(item.attr.ino);
        let target = target.map_err(|e| Failure::from(e).at(shown_inside(&item.from)))?;
        self.clear(&item.to)?;
        symlink(OsString::from_vec(target), &item.to).map_err(failed)?;
        self.keep_unopened(item);
        Ok(())
    }

    fn special(&self, item: &Item) -> Result<(), Failure> {
        self.copy.refuse_special(harmless(&item.from))?;
        let failed = |e: io::Error| failed(&item.to, &e);
        self.clear(&item.to)?;
        let (kind, mode) = (
            FileType::from_raw_mode(item.attr.mode),
            Mode::from_raw_mode(item.attr.mode & 0o7777),
        );
        // As the kernel has it in 32 bits.
        let rdev = item.attr.rdev;
        let (major, minor) = (rdev >> 8 & 0xfff, rdev & 0xff | rdev >> 12 & 0xf_ff00);
        mknodat(CWD, &item.to, kind, mode, makedev(major, minor)).map_err(|e| failed(e.into()))?;
        self.keep_unopened(item);
        Ok(())
    }

    fn keep_unopened(&self, item: &Item) {
        if self.copy.keeps {
            let file = HostFile {
                path: &item.to,
                open: None,
            };
            self.copy.keep_outwards(&item.attr, &file);
        }
    }

    /// Opens a file that becomes a copy, empty; only its owner may read a new one. Says whether it is new.
    fn open_file(&self, to: &Path, links: Links) -> Result<(File, bool), Failure> {
        let mut options = OpenOptions::new();
        options.write(true).mode(0o600);
        match options.clone().create_new(true).open(to) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return Ok((made.map_err(|e| failed(to, &e))?, true)),
        }
        if links == Links::Refused {
            // Nor is a fifo waited for that somebody has put there.
            options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        }
        let file = options.open(to).map_err(|e| match e.raw_os_error() {
            Some(libc::ELOOP) => not_followed(shown(to)),
            _ => failed(to, &e),
        })?;
        let found = file.metadata().map_err(|e| failed(to, &e))?;
        self.copy.refuse_device(shown(to), &found)?;
        match (found.is_file(), links) {
            // Emptied only now that it is known what it is.
            (true, _) => file.set_len(0).map_err(|e| failed(to, &e))?,
            (false, Links::Followed) => {}
            (false, Links::Refused) => {
                return Err(Failure::new(format!(
                    "{}: what is there is a special file; remove it first",
                    shown(to)
                )));
            }
        }
        Ok((file, false))
    }

    /// Removes what has the place of a copy and is no folder.
    fn clear(&self, to: &Path) -> Result<(), Failure> {
        let removed = match host::symlink_metadata(to) {
            Ok(found) => {
                self.copy.refuse_device(shown(to), &found)?;
                host::remove_file(to)
            }
            Err(error) => Err(error),
        };
        match removed {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(|e| failed(to, &e)),
        }
    }

    /// Removes a file that has other names: these keep what they have.
    fn part_from_links(&self, to: &Path) -> Result<(), Failure> {
        match host::symlink_metadata(to) {
            Ok(found) if found.is_file() && found.nlink() > 1 => self.clear(to),
            _ => Ok(()),
        }
    }

    /// One more name of a copy.
    fn link(&self, first: &Path, to: &Path) -> Result<(), Failure> {
        self.clear(to)?;
        host::hard_link(first, to).map_err(|e| failed(to, &e))
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let found = host::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

/// Makes a folder that only its owner may enter; false if there is one.
fn make_folder(to: &Path) -> Result<bool, Failure> {
    match host::DirBuilder::new().mode(0o700).create(to) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let found = host::symlink_metadata(to).map_err(|e| failed(to, &e))?;
            match found.file_type() {
                found if found.is_dir() => Ok(false),
                found if found.is_symlink() => Err(not_followed(shown(to))),
                _ => Err(not_a_folder(shown(to))),
            }
        }
        Err(error) => Err(failed(to, &error)),
    }
}
