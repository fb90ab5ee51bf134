//! One writer: random operations in a folder of its own, each noted in the
//! model before it is done, and each sync noted after it returned.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use base::rng::Rng;

use super::model::{Found, HEADER, Model, Thing};

/// A writer keeps about this many names.
const NAMES: u64 = 60;

pub struct Writer {
    dir: PathBuf,
    rng: Rng,
    model: Model,
    /// For complaints: what was done last.
    pub last_steps: Vec<String>,
    /// How often something was noted there.
    noted: u64,
    /// How often something was made durable.
    pub syncs: u64,
}

impl Writer {
    pub fn new(dir: PathBuf, seed: u64) -> Self {
        Writer {
            dir,
            rng: Rng::new(seed),
            model: Model::default(),
            last_steps: Vec::new(),
            noted: 0,
            syncs: 0,
        }
    }

    /// Makes the writer's folder durable.
    pub fn prepare(&self) -> io::Result<()> {
        fs::create_dir_all(&self.dir)?;
        File::open(&self.dir)?.sync_all()?;
        match self.dir.parent() {
            Some(parent) => File::open(parent)?.sync_all(),
            None => Ok(()),
        }
    }

    /// One random operation; whether it did anything, for what was drawn may not be possible. An error leaves the
    /// model right: what was about to happen may have happened.
    pub fn step(&mut self) -> io::Result<bool> {
        let before = self.noted;
        self.any_operation()?;
        Ok(self.noted > before)
    }

    fn any_operation(&mut self) -> io::Result<()> {
        match self.rng.below(100) {
            0..22 => self.create(),
            22..36 => self.overwrite(),
            36..46 => self.append(),
            46..50 => self.overwrite_synchronously(),
            50..55 => self.truncate(),
            55..62 => self.rewrite(),
            62..70 => self.replace_by_rename(),
            70..78 => self.rename(),
            78..82 => self.link(),
            82..89 => self.unlink(),
            89..93 => self.make_or_remove_folder(),
            93..96 => self.symlink(),
            _ => self.sync_folder(),
        }
    }

    /// Reads the folder, compares it with the model, and starts a new model from what is there.
    pub fn verify(&mut self) -> io::Result<Vec<String>> {
        let found = read_folder(&self.dir)?;
        let mut complaints = self.model.complaints(&found);
        if !complaints.is_empty() {
            complaints.push(format!("last steps: {}", self.last_steps.join(", ")));
        }
        self.model = Model::of(found, self.model.next_id());
        self.last_steps.clear();
        Ok(complaints)
    }

    fn note(&mut self, step: String) {
        if self.last_steps.len() == 40 {
            self.last_steps.remove(0);
        }
        self.last_steps.push(step);
        self.noted += 1;
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn any_name(&mut self) -> String {
        format!("n{}", self.rng.below(NAMES))
    }

    fn any_file(&mut self) -> Option<(String, u64)> {
        let files: Vec<(String, u64)> = self
            .model
            .present()
            .into_iter()
            .filter_map(|(name, thing)| match thing {
                Thing::File(id) => Some((name, id)),
                _ => None,
            })
            .collect();
        (!files.is_empty()).then(|| self.rng.pick(&files).clone())
    }

    /// A file that the next step may change in part.
    fn any_plain_file(&mut self) -> Option<(String, u64)> {
        self.any_file()
            .filter(|(_, id)| !self.model.is_rewritten(*id))
    }

    /// Mostly small sizes, now and then many pages.
    fn any_size(&mut self) -> usize {
        let limit = *self
            .rng
            .pick(&[200, 200, 3000, 5000, 20_000, 70_000, 300_000]);
        self.rng.range(1, limit) as usize
    }

    fn content(&mut self, id: u64) -> Vec<u8> {
        let mut bytes = vec![0; HEADER + self.any_size()];
        self.rng.fill(&mut bytes);
        bytes[..HEADER].copy_from_slice(&id.to_le_bytes());
        bytes
    }

    fn open(&self, name: &str) -> io::Result<File> {
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(self.path(name))
    }

    fn sync(&mut self, file: &File, id: u64, name: &str) -> io::Result<()> {
        self.note(format!("sync {name}"));
        match self.rng.one_in(2) {
            true => file.sync_all()?,
            false => file.sync_data()?,
        }
        self.model.file_synced(id);
        self.syncs += 1;
        Ok(())
    }

    fn maybe_sync(&mut self, file: &File, id: u64, name: &str) -> io::Result<()> {
        match self.rng.one_in(2) {
            true => self.sync(file, id, name),
            false => Ok(()),
        }
    }

    fn create(&mut self) -> io::Result<()> {
        let name = self.any_name();
        if *self.model.now(&name) != Thing::Absent {
            return Ok(());
        }
        let id = self.model.new_file();
        let bytes = self.content(id);
        self.note(format!("create {name}={id} {}", bytes.len()));
        self.model.create(&name, id);
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(self.path(&name))?;
        self.model.write(id, bytes.clone());
        file.write_all(&bytes)?;
        self.maybe_sync(&file, id, &name)
    }

    fn overwrite(&mut self) -> io::Result<()> {
        let Some((name, id)) = self.any_plain_file() else {
            return Ok(());
        };
        let file = self.open(&name)?;
        for _ in 0..self.rng.range(1, 4) {
            let mut bytes = self.model.content(id).to_vec();
            if bytes.len() <= HEADER + 1 {
                return Ok(());
            }
            let from = self.rng.range(HEADER as u64, bytes.len() as u64) as usize;
            let to = (from + self.any_size()).min(bytes.len());
            self.note(format!("overwrite {name} {from}..{to}"));
            self.rng.fill(&mut bytes[from..to]);
            self.model.write(id, bytes.clone());
            file.write_all_at(&bytes[from..to], from as u64)?;
        }
        self.maybe_sync(&file, id, &name)
    }

    fn append(&mut self) -> io::Result<()> {
        let Some((name, id)) = self.any_plain_file() else {
            return Ok(());
        };
        let mut bytes = self.model.content(id).to_vec();
        if bytes.len() < HEADER || bytes.len() > 1 << 20 {
            return Ok(());
        }
        let old = bytes.len();
        bytes.resize(old + self.any_size(), 0);
        self.rng.fill(&mut bytes[old..]);
        self.note(format!("append {name} {old}..{}", bytes.len()));
        self.model.write(id, bytes.clone());
        let mut file = OpenOptions::new().append(true).open(self.path(&name))?;
        file.write_all(&bytes[old..])?;
        self.maybe_sync(&file, id, &name)
    }

    /// With O_DSYNC the write itself is the sync, of a file that has nothing else unsynced.
    fn overwrite_synchronously(&mut self) -> io::Result<()> {
        let Some((name, id)) = self.any_file() else {
            return Ok(());
        };
        let mut bytes = self.model.content(id).to_vec();
        if !self.model.is_synced(id) || bytes.len() < HEADER + 16 {
            return Ok(());
        }
        let from = self.rng.range(HEADER as u64, bytes.len() as u64 - 1) as usize;
        let to = (from + 1000).min(bytes.len());
        self.note(format!("O_DSYNC {name} {from}..{to}"));
        self.rng.fill(&mut bytes[from..to]);
        self.model.write(id, bytes.clone());
        let file = OpenOptions::new()
            .write(true)
            .custom_flags(libc::O_DSYNC)
            .open(self.path(&name))?;
        file.write_all_at(&bytes[from..to], from as u64)?;
        self.model.file_synced(id);
        self.syncs += 1;
        Ok(())
    }

    fn truncate(&mut self) -> io::Result<()> {
        let Some((name, id)) = self.any_plain_file() else {
            return Ok(());
        };
        let mut bytes = self.model.content(id).to_vec();
        if bytes.len() <= HEADER {
            return Ok(());
        }
        let size = self.rng.range(HEADER as u64, bytes.len() as u64 + 5000) as usize;
        self.note(format!("truncate {name} {size}"));
        bytes.resize(size, 0);
        self.model.write(id, bytes);
        let file = self.open(&name)?;
        file.set_len(size as u64)?;
        self.maybe_sync(&file, id, &name)
    }

    /// Truncates a durable file and writes it anew, without a sync.
    fn rewrite(&mut self) -> io::Result<()> {
        let Some((name, id)) = self.any_file() else {
            return Ok(());
        };
        if !self.model.is_synced(id) || self.model.content(id).len() < HEADER {
            return Ok(());
        }
        let bytes = self.content(id);
        self.note(format!("rewrite {name} {}", bytes.len()));
        self.model.rewrite(id, bytes.clone());
        let mut file = OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(self.path(&name))?;
        file.write_all(&bytes)?;
        self.maybe_sync(&file, id, &name)
    }

    /// Writes a new file and renames it over a durable one, without a sync.
    fn replace_by_rename(&mut self) -> io::Result<()> {
        let Some((name, old)) = self.any_file() else {
            return Ok(());
        };
        if !self.model.is_synced(old) {
            return Ok(());
        }
        let id = self.model.new_file();
        let bytes = self.content(id);
        let temporary = format!("temporary{id}");
        self.note(format!("replace {name} by {id} {}", bytes.len()));
        self.model.create(&temporary, id);
        let mut file = File::create_new(self.path(&temporary))?;
        self.model.write(id, bytes.clone());
        file.write_all(&bytes)?;
        drop(file);
        self.model.replace(&temporary, &name);
        fs::rename(self.path(&temporary), self.path(&name))?;
        match self.rng.one_in(3) {
            true => self.sync_folder(),
            false => Ok(()),
        }
    }

    fn rename(&mut self) -> io::Result<()> {
        let Some((from, id)) = self.any_file() else {
            return Ok(());
        };
        let to = self.any_name();
        // Renaming one link of a file over another does nothing.
        if self.model.now(&to) != &Thing::Absent || !self.model.is_synced(id) {
            return Ok(());
        }
        self.note(format!("rename {from} {to}"));
        self.model.rename(&from, &to);
        fs::rename(self.path(&from), self.path(&to))?;
        match self.rng.one_in(3) {
            true => self.sync_folder(),
            false => Ok(()),
        }
    }

    fn link(&mut self) -> io::Result<()> {
        let Some((from, id)) = self.any_file() else {
            return Ok(());
        };
        let to = self.any_name();
        if self.model.now(&to) != &Thing::Absent {
            return Ok(());
        }
        self.note(format!("link {from} {to}"));
        self.model.link(id, &to);
        fs::hard_link(self.path(&from), self.path(&to))
    }

    fn unlink(&mut self) -> io::Result<()> {
        let Some((name, _)) = self.any_file() else {
            return Ok(());
        };
        self.note(format!("unlink {name}"));
        self.model.put(&name, Thing::Absent);
        fs::remove_file(self.path(&name))?;
        match self.rng.one_in(3) {
            true => self.sync_folder(),
            false => Ok(()),
        }
    }

    fn make_or_remove_folder(&mut self) -> io::Result<()> {
        let name = format!("d{}", self.rng.below(8));
        self.note(format!("folder {name}"));
        match self.model.now(&name) {
            Thing::Absent => {
                self.model.put(&name, Thing::Folder);
                fs::create_dir(self.path(&name))
            }
            _ => {
                self.model.put(&name, Thing::Absent);
                fs::remove_dir(self.path(&name))
            }
        }
    }

    fn symlink(&mut self) -> io::Result<()> {
        let name = format!("s{}", self.rng.below(8));
        self.note(format!("symlink {name}"));
        if *self.model.now(&name) != Thing::Absent {
            self.model.put(&name, Thing::Absent);
            return fs::remove_file(self.path(&name));
        }
        let target = "t".repeat(self.rng.range(1, 3000) as usize);
        self.model.put(&name, Thing::Symlink(target.clone()));
        symlink(target, self.path(&name))
    }

    fn sync_folder(&mut self) -> io::Result<()> {
        self.note("sync folder".to_owned());
        File::open(&self.dir)?.sync_all()?;
        self.model.folder_synced();
        self.syncs += 1;
        Ok(())
    }
}

fn read_folder(dir: &Path) -> io::Result<BTreeMap<String, Found>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let kind = entry.file_type()?;
        let thing = if kind.is_dir() {
            Found::Folder
        } else if kind.is_symlink() {
            Found::Symlink(fs::read_link(entry.path())?.to_string_lossy().into_owned())
        } else {
            Found::File(fs::read(entry.path())?)
        };
        found.insert(name, thing);
    }
    Ok(found)
}
