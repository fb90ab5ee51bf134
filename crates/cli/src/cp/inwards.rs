//! From the host to inside.

use std::collections::{HashMap, HashSet};
use std::fs::{self as host, File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use fs::{Attr, Ino, OpenFile};
use rustix::fs::{Mode, OFlags, SeekFrom, major, minor, seek};
use rustix::io::Errno;

use super::attributes::{Held, HostFile};
use super::folders::{Entered, Folder, Folders, Identity, Name, id};
use super::{Copy, Links, Moment, folders, just_made, not_a_folder, not_followed, shown_inside};
use crate::failure::Failure;
use crate::offline::{PIECE, bytes, join, last_name, parent};
use crate::output::shown;

/// What is not written of a sparse file if it is all zeros.
const BLOCK: usize = 4096;

pub struct Inwards<'a> {
    copy: &'a Copy<'a>,
    host: Folders,
    /// What has several names on the host, and its copy.
    linked: HashMap<Identity, Ino>,
    /// What this command has made and is no folder.
    made: HashSet<Ino>,
}

/// Where a copy goes.
enum Spot {
    /// A name in a folder; what a symbolic link there leads to counts where the user has named it.
    Name(Ino, Links),
    /// A folder that is there: what is in the source goes into it.
    Folder(Ino),
}

/// Something to copy, and where to.
struct Item {
    from: Name,
    meta: Metadata,
    to: Spot,
    /// All of the path inside.
    path: Vec<u8>,
}

impl Item {
    fn failed(&self, error: &io::Error) -> Failure {
        Failure::io(shown(&self.from.path), error)
    }

    fn replaced(&self) -> Failure {
        self.failed(&folders::replaced())
    }
}

/// A folder whose copy gets what is kept of it after all that is in it.
struct Unfinished {
    folder: Rc<Folder>,
    path: PathBuf,
    meta: Metadata,
    made: Ino,
}

/// A name in a folder, and the path that it ends.
#[derive(Clone, Copy)]
struct Place<'p> {
    folder: Ino,
    path: &'p [u8],
}

impl<'p> Place<'p> {
    fn name(self) -> &'p [u8] {
        last_name(self.path)
    }

    fn failed(self, error: fs::Error) -> Failure {
        Failure::from(error).at(shown_inside(self.path))
    }
}

impl<'a> Inwards<'a> {
    pub fn new(copy: &'a Copy<'a>) -> Self {
        Inwards {
            copy,
            host: Folders::default(),
            linked: HashMap::new(),
            made: HashSet::new(),
        }
    }

    pub fn copy(&mut self, from: &Path, to: &[u8]) -> Result<(), Failure> {
        let meta = match self.copy.recursive {
            true => host::symlink_metadata(from),
            false => host::metadata(from),
        };
        let meta = meta.map_err(|e| Failure::io(shown(from), &e))?;
        let (to, path) = self.place(from, &meta, to)?;
        let item = Item {
            from: Name::given(from.to_owned()),
            meta,
            to,
            path,
        };
        let (mut waiting, mut folders) = (vec![item], Vec::new());
        while let Some(item) = waiting.pop() {
            let done = match item.meta.is_dir() {
                true => self.folder(item, &mut waiting, &mut folders),
                false => self.one(&item),
            };
            self.copy.tell_of(done);
        }
        // The deepest first, and all after what is in them, so that their times stay.
        for folder in folders.into_iter().rev() {
            self.copy.tell_of(self.finish_folder(&folder));
        }
        Ok(())
    }

    /// Where a source goes to that the user has named, and by what path.
    fn place(&self, from: &Path, meta: &Metadata, to: &[u8]) -> Result<(Spot, Vec<u8>), Failure> {
        let found = self.copy.offline.fs.resolve(to);
        if let Ok(attr) = &found
            && attr.is_dir()
        {
            return Ok(match last_name(bytes(from)) {
                b"" | b"." | b".." => (Spot::Folder(attr.ino), to.to_vec()),
                name => (Spot::Name(attr.ino, Links::Refused), join(to, name)),
            });
        }
        if self.copy.several {
            return Err(not_a_folder(shown_inside(to)));
        }
        match found {
            Err(fs::Error::NotFound) if to.ends_with(b"/") && !meta.is_dir() => {
                return Err(not_a_folder(shown_inside(to)));
            }
            Ok(_) | Err(fs::Error::NotFound) => {}
            Err(error) => return Err(Failure::from(error).at(shown_inside(to))),
        }
        let folder = self.copy.offline.find(parent(to))?;
        Ok((Spot::Name(folder.ino, Links::Followed), to.to_vec()))
    }

    fn folder(
        &mut self,
        item: Item,
        waiting: &mut Vec<Item>,
        folders: &mut Vec<Unfinished>,
    ) -> Result<(), Failure> {
        self.copy.refuse_folder(shown(&item.from.path))?;
        let failed = |e: io::Error| item.failed(&e);
        let from = self.host.folder(&item.from).map_err(failed)?;
        let open = self.host.readable(&from).map_err(failed)?;
        // Of what is copied, whatever was there when its name was found.
        let meta = open.metadata().map_err(failed)?;
        let names = folders::names(open).map_err(failed)?;
        let made = match &item.to {
            Spot::Folder(ino) => *ino,
            Spot::Name(folder, _) => {
                let place = Place {
                    folder: *folder,
                    path: &item.path,
                };
                self.make_folder(place, &meta)?
            }
        };
        if self.copy.keeps {
            folders.push(Unfinished {
                folder: Rc::clone(&from),
                path: item.from.path.clone(),
                meta,
                made,
            });
        }
        for name in names {
            let path = join(&item.path, name.as_bytes());
            let name = Name::within(&from, &name);
            match self.host.enter(&name).and_then(|entered| entered.look()) {
                Ok(meta) => waiting.push(Item {
                    from: name,
                    meta,
                    to: Spot::Name(made, Links::Refused),
                    path,
                }),
                Err(error) => {
                    let failure = Failure::io(shown(&name.path), &error);
                    self.copy.tell_of(Err(failure));
                }
            }
        }
        (self.copy.seen)(Moment::Looked, &item.from.path);
        Ok(())
    }

    fn finish_folder(&self, from: &Unfinished) -> Result<(), Failure> {
        let folder = self.host.readable(&from.folder);
        let folder = folder.map_err(|e| Failure::io(shown(&from.path), &e))?;
        let file = HostFile {
            path: &from.path,
            held: Held::Open(&folder),
        };
        self.copy.keep_inwards(&file, &from.meta, from.made);
        Ok(())
    }

    /// The folder of this name in another one, made if it is not there.
    fn make_folder(&self, place: Place<'_>, meta: &Metadata) -> Result<Ino, Failure> {
        match self.existing(place)? {
            Some(attr) if attr.is_dir() => Ok(attr.ino),
            Some(attr) if attr.is_symlink() => Err(not_followed(shown_inside(place.path))),
            Some(_) => Err(not_a_folder(shown_inside(place.path))),
            None => {
                let (fs, mode) = (&self.copy.offline.fs, meta.mode() & 0o777);
                let made = fs.mkdir(&self.copy.who, place.folder, place.name(), mode);
                Ok(made.map_err(|e| place.failed(e))?.ino)
            }
        }
    }

    fn existing(&self, place: Place<'_>) -> Result<Option<Attr>, Failure> {
        match self.copy.offline.fs.lookup(place.folder, place.name()) {
            Err(fs::Error::NotFound) => Ok(None),
            found => found.map(Some).map_err(|e| place.failed(e)),
        }
    }

    /// Copies what is no folder.
    fn one(&mut self, item: &Item) -> Result<(), Failure> {
        let Spot::Name(folder, links) = item.to else {
            return Err(not_a_folder(shown(&item.from.path)));
        };
        let from = self.host.enter(&item.from).map_err(|e| item.failed(&e))?;
        let path = &item.path;
        let place = Place { folder, path };
        if let Some(there) = self.existing(place)?
            && self.made.contains(&there.ino)
        {
            return Err(just_made(shown_inside(path), shown(&item.from.path)));
        }
        let key = id(&item.meta);
        let has_names = self.copy.keeps && item.meta.nlink() > 1;
        if has_names && let Some(first) = self.linked.get(&key) {
            return self.link(*first, place);
        }
        let made = match item.meta.file_type() {
            kind if kind.is_file() => self.regular(item, &from, place, links)?,
            kind if kind.is_symlink() => self.symlink(item, &from, place)?,
            _ => self.special(item, &from, place)?,
        };
        if has_names {
            self.linked.insert(key, made);
        }
        self.made.insert(made);
        self.copy.bar.inc(1);
        Ok(())
    }

    fn regular(
        &self,
        item: &Item,
        from: &Entered<'_>,
        place: Place<'_>,
        links: Links,
    ) -> Result<Ino, Failure> {
        let (from, meta) = self.open_source(item, from)?;
        self.copy.refuse_device(shown(&item.from.path), &meta)?;
        let (ino, to) = self.open_copy(place, meta.mode(), links)?;
        let copied = self.content(item, place, (&from, &meta), &to);
        let flushed = self.copy.offline.fs.flush(&to);
        if self.copy.keeps {
            let file = HostFile {
                path: &item.from.path,
                held: Held::Open(&from),
            };
            self.copy.keep_inwards(&file, &meta, ino);
        }
        copied.and(flushed.map_err(|e| place.failed(e)))?;
        Ok(ino)
    }

    /// The file that was looked at, unless something else has taken its name.
    fn open_source(&self, item: &Item, from: &Entered<'_>) -> Result<(File, Metadata), Failure> {
        let failed = |e: io::Error| item.failed(&e);
        let mut flags = OFlags::RDONLY;
        if self.copy.recursive {
            flags |= OFlags::NOFOLLOW | OFlags::NONBLOCK;
        }
        let file = from.open(flags, Mode::empty()).map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        match id(&meta) == id(&item.meta) {
            true => Ok((file, meta)),
            false => Err(item.replaced()),
        }
    }

    /// The file that becomes a copy, empty.
    fn open_copy(
        &self,
        place: Place<'_>,
        mode: u32,
        links: Links,
    ) -> Result<(Ino, Arc<OpenFile>), Failure> {
        let fs = &self.copy.offline.fs;
        let (folder, name) = (place.folder, place.name());
        let failed = |e| place.failed(e);
        let found = match self.existing(place)? {
            Some(attr) if attr.is_symlink() && links == Links::Followed => {
                Some(fs.stat_at(folder, name).map_err(failed)?)
            }
            Some(attr) if attr.is_symlink() => return Err(not_followed(shown_inside(place.path))),
            // Its other names keep what they have.
            Some(attr) if self.copy.keeps && attr.nlink > 1 && !attr.is_dir() => {
                self.clear(place)?;
                None
            }
            found => found,
        };
        match found {
            Some(attr) => {
                let flags = libc::O_RDWR | libc::O_TRUNC;
                let opened = fs.open_file_as(&self.copy.who, attr.ino, flags);
                Ok((attr.ino, opened.map_err(failed)?))
            }
            None => {
                let flags = libc::O_RDWR;
                let made = fs.create(&self.copy.who, folder, name, mode & 0o777, flags);
                let (attr, file) = made.map_err(failed)?;
                Ok((attr.ino, file))
            }
        }
    }

    /// Writes what there is between holes to an empty file.
    fn content(
        &self,
        item: &Item,
        place: Place<'_>,
        (from, meta): (&File, &Metadata),
        to: &OpenFile,
    ) -> Result<(), Failure> {
        let failed = |e: io::Error| item.failed(&e);
        let is_sparse = meta.blocks().saturating_mul(512) < meta.len();
        let mut buffer = vec![0; PIECE];
        let (mut at, mut written) = (0, 0);
        let mut ended = false;
        'data: while let Some((start, end)) = next_data(from, at, meta.len()).map_err(failed)? {
            at = start;
            while at < end {
                let len = (end - at).min(PIECE as u64) as usize;
                let read = from.read_at(&mut buffer[..len], at).map_err(failed)?;
                if read == 0 {
                    ended = true;
                    break 'data;
                }
                // Hosts that do not tell where holes are have them all the same.
                let step = if is_sparse { BLOCK } else { PIECE };
                for (i, piece) in buffer[..read].chunks(step).enumerate() {
                    if !is_sparse || piece.iter().any(|byte| *byte != 0) {
                        let from = at + (i * step) as u64;
                        self.write(place, to, from, piece)?;
                        written = from + piece.len() as u64;
                    }
                }
                at += read as u64;
            }
        }
        let len = match ended {
            // Whatever its host says of its length: files of /sys have less.
            true => at,
            // A hole is behind the data, and the file may be one that grows.
            false => from.metadata().map_err(failed)?.len().max(at),
        };
        match written < len {
            true => {
                let (fs, who) = (&self.copy.offline.fs, &self.copy.who);
                let cut = fs.truncate(who, to.ino(), len);
                cut.map_err(|e| place.failed(e))
            }
            false => Ok(()),
        }
    }

    fn write(&self, place: Place<'_>, to: &OpenFile, at: u64, piece: &[u8]) -> Result<(), Failure> {
        let mut done = 0;
        while done < piece.len() {
            let written = self
                .copy
                .offline
                .fs
                .write(to, at + done as u64, &piece[done..]);
            done += written.map_err(|e| place.failed(e))?;
        }
        Ok(())
    }

    fn symlink(&self, item: &Item, from: &Entered<'_>, place: Place<'_>) -> Result<Ino, Failure> {
        let from = self.locate_source(item, from)?;
        let target = folders::target(&from).map_err(|e| item.failed(&e))?;
        self.make_room(place)?;
        let made = self
            .copy
            .offline
            .fs
            .symlink(&self.copy.who, place.folder, place.name(), &target)
            .map_err(|e| place.failed(e))?;
        self.keep_unopened(item, &from, made.ino);
        Ok(made.ino)
    }

    fn special(&self, item: &Item, from: &Entered<'_>, place: Place<'_>) -> Result<Ino, Failure> {
        self.copy.refuse_special(shown(&item.from.path))?;
        let from = self.locate_source(item, from)?;
        self.make_room(place)?;
        // As the kernel has it in 32 bits.
        let rdev = item.meta.rdev();
        let (major, minor) = (major(rdev), minor(rdev));
        let rdev = (minor & 0xff) | (major & 0xfff) << 8 | (minor & 0xf_ff00) << 12;
        let made = self
            .copy
            .offline
            .fs
            .mknod(
                &self.copy.who,
                place.folder,
                place.name(),
                item.meta.mode(),
                rdev,
            )
            .map_err(|e| place.failed(e))?;
        self.keep_unopened(item, &from, made.ino);
        Ok(made.ino)
    }

    /// The link or special file that was looked at, unless something else has taken its name.
    fn locate_source(&self, item: &Item, from: &Entered<'_>) -> Result<File, Failure> {
        let failed = |e: io::Error| item.failed(&e);
        let file = from.locate().map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        match id(&meta) == id(&item.meta) {
            true => Ok(file),
            false => Err(item.replaced()),
        }
    }

    fn keep_unopened(&self, item: &Item, from: &File, made: Ino) {
        if self.copy.keeps {
            let file = HostFile {
                path: &item.from.path,
                held: Held::Located(from),
            };
            self.copy.keep_inwards(&file, &item.meta, made);
        }
    }

    /// Removes what has the place of a copy and is no folder.
    fn make_room(&self, place: Place<'_>) -> Result<(), Failure> {
        match self.existing(place)? {
            Some(_) => self.clear(place),
            None => Ok(()),
        }
    }

    fn clear(&self, place: Place<'_>) -> Result<(), Failure> {
        let fs = &self.copy.offline.fs;
        let removed = fs.unlink(&self.copy.who, place.folder, place.name());
        removed.map_err(|e| place.failed(e))
    }

    /// One more name of a copy.
    fn link(&self, first: Ino, place: Place<'_>) -> Result<(), Failure> {
        self.make_room(place)?;
        self.copy
            .offline
            .fs
            .link(&self.copy.who, first, place.folder, place.name())
            .map(|_| ())
            .map_err(|e| place.failed(e))
    }
}

/// The next piece with data at or after `at`; without an end where the host does not tell one.
fn next_data(file: &File, at: u64, len: u64) -> io::Result<Option<(u64, u64)>> {
    // Files of /proc have content and no length.
    if len == 0 {
        return Ok(Some((at, u64::MAX)));
    }
    let start = match seek(file, SeekFrom::Data(at)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some((at, u64::MAX))),
        Err(error) => return Err(error.into()),
    };
    match seek(file, SeekFrom::Hole(start)) {
        Ok(end) => Ok(Some((start, end))),
        // It was cut meanwhile.
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
