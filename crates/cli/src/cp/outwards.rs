//! From inside to the host.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{self as host, File, Metadata, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use fs::{Attr, Ino};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, linkat, makedev, mkdirat, mknodat, symlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;

use super::attributes::{Held, HostFile};
use super::folders::{Entered, Folder, Folders, Identity, Name, id, path_to};
use super::{Copy, Links, Moment, folders, just_made, not_a_folder, not_followed, shown_inside};
use crate::failure::Failure;
use crate::offline::{Named, PIECE, bytes, join, last_name, named};
use crate::output::{harmless, shown};

pub struct Outwards<'a> {
    copy: &'a Copy<'a>,
    host: Folders,
    /// Where what has several names was copied to, and what was made there.
    linked: HashMap<Ino, (Rc<Name>, Identity)>,
    /// What this command has made and is no folder: a host may take several names for one.
    made: HashSet<Identity>,
    /// The folders that were entered for the source that is being copied.
    entered: HashSet<Identity>,
}

/// Something to copy, and where to.
struct Item {
    from: Vec<u8>,
    attr: Attr,
    to: Rc<Name>,
    links: Links,
}

impl Item {
    fn failed(&self, error: &io::Error) -> Failure {
        failed(&self.to.path, error)
    }
}

/// A folder that gets its permissions, and what else is kept, after all that is in it.
struct Unfinished {
    folder: Rc<Folder>,
    path: PathBuf,
    attr: Attr,
}

fn failed(to: &Path, error: &io::Error) -> Failure {
    Failure::io(shown(to), error)
}

impl<'a> Outwards<'a> {
    pub fn new(copy: &'a Copy<'a>) -> Self {
        Outwards {
            copy,
            host: Folders::default(),
            linked: HashMap::new(),
            made: HashSet::new(),
            entered: HashSet::new(),
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
            to: Rc::new(Name::given(to)),
            links,
        };
        self.entered.clear();
        let (mut waiting, mut folders) = (vec![item], Vec::new());
        while let Some(item) = waiting.pop() {
            let done = match item.attr.is_dir() {
                true => self.folder(item, &mut waiting, &mut folders),
                false => self.one(&item),
            };
            self.copy.tell_of(done);
        }
        // The deepest first: one that its owner may not enter is entered no more, and its times stay.
        for folder in folders.into_iter().rev() {
            self.copy.tell_of(self.finish_folder(&folder));
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
        folders: &mut Vec<Unfinished>,
    ) -> Result<(), Failure> {
        let Item { from, attr, to, .. } = item;
        self.copy.refuse_folder(harmless(&from))?;
        let offline = self.copy.offline;
        let names = offline.names(&from, attr.ino, |lost| self.copy.tell_of(Err(lost)));
        let (folder, is_new) = self.make_folder(&to)?;
        // One that is met again, by another name, gets what it was entered for first and nothing else: somebody may have renamed it.
        let is_first = self.entered.insert(folder.id);
        let keeps = is_new || self.copy.keeps;
        if keeps && !is_first {
            self.copy.tell_of(Err(Failure::new(format!(
                "{}: a folder that was copied to before has come there meanwhile; it does not get what {} has",
                shown(&to.path),
                shown_inside(&from)
            ))));
        }
        if keeps && is_first {
            folders.push(Unfinished {
                folder: Rc::clone(&folder),
                path: to.path.clone(),
                attr,
            });
        }
        for Named { name, .. } in names {
            match offline.look(&from, attr.ino, &name) {
                Ok(attr) => waiting.push(Item {
                    from: join(&from, &name),
                    attr,
                    to: Rc::new(Name::within(&folder, OsStr::from_bytes(&name))),
                    links: Links::Refused,
                }),
                Err(failure) => self.copy.tell_of(Err(failure)),
            }
        }
        (self.copy.seen)(Moment::Looked, &to.path);
        Ok(())
    }

    fn finish_folder(&self, to: &Unfinished) -> Result<(), Failure> {
        let failed = |e: io::Error| failed(&to.path, &e);
        let folder = self.host.readable(&to.folder).map_err(failed)?;
        if self.copy.keeps {
            let file = HostFile {
                path: &to.path,
                held: Held::Open(&folder),
            };
            self.copy.keep_outwards(&to.attr, &file);
            return Ok(());
        }
        let mode = self.copy.mode_of_new(to.attr.mode);
        folder
            .set_permissions(Permissions::from_mode(mode))
            .map_err(failed)
    }

    /// Copies what is no folder.
    fn one(&mut self, item: &Item) -> Result<(), Failure> {
        let to = self.host.enter(&item.to).map_err(|e| item.failed(&e))?;
        if let Some(there) = to.identity()
            && self.made.contains(&there)
        {
            return Err(just_made(shown(&item.to.path), shown_inside(&item.from)));
        }
        let has_names = self.copy.keeps && item.attr.nlink > 1;
        if has_names && let Some((first, made)) = self.linked.get(&item.attr.ino) {
            return self.link(first, *made, item, &to);
        }
        let made = match item.attr.mode & libc::S_IFMT {
            libc::S_IFREG => self.regular(item, &to)?,
            libc::S_IFLNK => self.symlink(item, &to)?,
            _ => self.special(item, &to)?,
        };
        if has_names {
            let name = Rc::clone(&item.to);
            self.linked.insert(item.attr.ino, (name, made));
        }
        self.made.insert(made);
        self.copy.bar.inc(1);
        Ok(())
    }

    fn regular(&self, item: &Item, to: &Entered<'_>) -> Result<Identity, Failure> {
        let failed = |e: io::Error| item.failed(&e);
        if self.copy.keeps && item.links == Links::Refused {
            self.part_from_links(item, to)?;
        }
        let (mut file, is_new) = self.open_file(item, to)?;
        let found = file.metadata().map_err(failed)?;
        // What is no file, the terminal for example, keeps all it has.
        if !found.is_file() {
            let read = self.copy.offline.read(&item.from, item.attr.ino, |piece| {
                file.write_all(piece).map_err(failed)
            });
            return read.map(|()| id(&found));
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
                    path: &item.to.path,
                    held: Held::Open(&file),
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
        copied.map(|()| id(&found))
    }

    /// Writes what there is between holes to an empty file.
    fn content(&self, item: &Item, file: &File) -> Result<(), Failure> {
        let fs = &self.copy.offline.fs;
        let unread = |e| named(&item.from, e);
        let unwritten = |e: io::Error| item.failed(&e);
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

    fn symlink(&self, item: &Item, to: &Entered<'_>) -> Result<Identity, Failure> {
        let target = self.copy.offline.fs.readlink(item.attr.ino);
        let target = target.map_err(|e| Failure::from(e).at(shown_inside(&item.from)))?;
        self.clear(item, to)?;
        let (folder, name) = to.at();
        symlinkat(&target[..], folder, name).map_err(|e| item.failed(&e.into()))?;
        self.keep_made(item, to, |link, _| Ok(folders::target(link)? == target))
    }

    fn special(&self, item: &Item, to: &Entered<'_>) -> Result<Identity, Failure> {
        self.copy.refuse_special(harmless(&item.from))?;
        self.clear(item, to)?;
        let kind = FileType::from_raw_mode(item.attr.mode);
        // As the kernel has it in 32 bits.
        let rdev = item.attr.rdev;
        let (major, minor) = (rdev >> 8 & 0xfff, rdev & 0xff | rdev >> 12 & 0xf_ff00);
        let device = makedev(major, minor);
        let (folder, name) = to.at();
        let mode = Mode::from_raw_mode(0o600);
        mknodat(folder, name, kind, mode, device).map_err(|e| item.failed(&e.into()))?;
        self.keep_made(item, to, |_, meta| {
            let is_device = matches!(kind, FileType::CharacterDevice | FileType::BlockDevice);
            Ok(!is_device || meta.rdev() == device)
        })
    }

    /// Gives a link or special file that was just made what the original has, if it is still at its name: what who owns the folder
    /// has put there, another name of somebody's file perhaps, gets nothing.
    fn keep_made(
        &self,
        item: &Item,
        to: &Entered<'_>,
        is_alike: impl FnOnce(&File, &Metadata) -> io::Result<bool>,
    ) -> Result<Identity, Failure> {
        (self.copy.seen)(Moment::Made, &item.to.path);
        let failed = |e: io::Error| item.failed(&e);
        let made = to.locate().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => failed(folders::replaced()),
            _ => failed(error),
        })?;
        let meta = made.metadata().map_err(failed)?;
        if !self.copy.keeps {
            return Ok(id(&meta));
        }
        let is_of_kind = (meta.mode() ^ item.attr.mode) & libc::S_IFMT == 0;
        if !is_of_kind || meta.nlink() != 1 || !is_alike(&made, &meta).map_err(failed)? {
            return Err(failed(folders::replaced()));
        }
        // Who is not root can give nothing to what is another's.
        let (owner, maker) = (meta.uid(), geteuid());
        if maker.is_root() && owner != maker.as_raw() {
            return Err(Failure::new(format!(
                "{}: made by root, it belongs to user {owner}: somebody has replaced it meanwhile, or its file system gives files owners of its own; \
                 no attributes are kept",
                shown(&item.to.path)
            )));
        }
        let file = HostFile {
            path: &item.to.path,
            held: Held::Located(&made),
        };
        self.copy.keep_outwards(&item.attr, &file);
        Ok(id(&meta))
    }

    /// Opens a file that becomes a copy, empty; only its owner may read a new one. Says whether it is new.
    fn open_file(&self, item: &Item, to: &Entered<'_>) -> Result<(File, bool), Failure> {
        let path = &item.to.path;
        let failed = |e: io::Error| item.failed(&e);
        let mut flags = OFlags::WRONLY;
        match to.open(
            flags | OFlags::CREATE | OFlags::EXCL,
            Mode::from_raw_mode(0o600),
        ) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return Ok((made.map_err(failed)?, true)),
        }
        (self.copy.seen)(Moment::Looked, path);
        if item.links == Links::Refused {
            // Nor is a fifo waited for that somebody has put there.
            flags |= OFlags::NOFOLLOW | OFlags::NONBLOCK;
        }
        let file = to
            .open(flags, Mode::empty())
            .map_err(|e| match e.raw_os_error() {
                Some(libc::ELOOP) => not_followed(shown(path)),
                _ => failed(e),
            })?;
        let found = file.metadata().map_err(failed)?;
        self.copy.refuse_device(shown(path), &found)?;
        match (found.is_file(), item.links) {
            // It had one when `part_from_links` looked.
            (true, Links::Refused) if self.copy.keeps && found.nlink() > 1 => {
                return Err(failed(folders::replaced()));
            }
            // Emptied only now that it is known what it is.
            (true, _) => file.set_len(0).map_err(failed)?,
            (false, Links::Followed) => {}
            (false, Links::Refused) => {
                return Err(Failure::new(format!(
                    "{}: what is there is a special file; remove it first",
                    shown(path)
                )));
            }
        }
        Ok((file, false))
    }

    /// Removes what has the place of a copy and is no folder.
    fn clear(&self, item: &Item, to: &Entered<'_>) -> Result<(), Failure> {
        let removed = match to.look() {
            Ok(found) => {
                self.copy.refuse_device(shown(&item.to.path), &found)?;
                to.remove()
            }
            Err(error) => Err(error),
        };
        match removed {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(|e| item.failed(&e)),
        }
    }

    /// Removes a file that has other names: these keep what they have.
    fn part_from_links(&self, item: &Item, to: &Entered<'_>) -> Result<(), Failure> {
        match to.look() {
            Ok(found) if found.is_file() && found.nlink() > 1 => self.clear(item, to),
            _ => Ok(()),
        }
    }

    /// One more name of a copy, if that still has its first one.
    fn link(
        &self,
        first: &Name,
        made: Identity,
        item: &Item,
        to: &Entered<'_>,
    ) -> Result<(), Failure> {
        let failed = |e: io::Error| failed(&first.path, &e);
        let copy = self.host.enter(first).and_then(|first| first.locate());
        let copy = copy.map_err(failed)?;
        if id(&copy.metadata().map_err(failed)?) != made {
            return Err(Failure::new(format!(
                "{} is no further name of {}: {}",
                shown(&item.to.path),
                shown(&first.path),
                folders::replaced()
            )));
        }
        self.clear(item, to)?;
        let (folder, name) = to.at();
        let linked = match linkat(CWD, path_to(&copy), folder, name, AtFlags::SYMLINK_FOLLOW) {
            // No /proc.
            Err(Errno::NOENT) => linkat(&copy, "", folder, name, AtFlags::EMPTY_PATH),
            done => done,
        };
        linked.map_err(|e| item.failed(&e.into()))
    }

    fn is_empty(&self, folder: &Rc<Folder>) -> io::Result<bool> {
        let open = self.host.readable(folder)?;
        Ok(folders::names(open)?.is_empty())
    }

    /// Makes a folder that only its owner may enter, if there is none, and enters it. Says whether it is new. One that is there already is
    /// copied into as by cp(1), whoever has put it there.
    fn make_folder(&self, to: &Name) -> Result<(Rc<Folder>, bool), Failure> {
        let failed = |e: io::Error| failed(&to.path, &e);
        let place = self.host.enter(to).map_err(failed)?;
        let (above, name) = place.at();
        let is_new = match mkdirat(above, name, Mode::RWXU) {
            Ok(()) => {
                (self.copy.seen)(Moment::Made, &to.path);
                true
            }
            Err(Errno::EXIST) => false,
            Err(error) => return Err(failed(error.into())),
        };
        let entered = self.host.folder(to);
        let entered = entered.map_err(|error| match place.look() {
            Ok(found) if found.is_symlink() => not_followed(shown(&to.path)),
            Ok(found) if !found.is_dir() => not_a_folder(shown(&to.path)),
            _ => failed(error),
        })?;
        // Nobody else can have put anything into one that was made.
        if is_new && !self.is_empty(&entered).map_err(failed)? {
            return Err(failed(folders::replaced()));
        }
        Ok((entered, is_new))
    }
}
