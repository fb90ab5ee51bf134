//! What a folder may look like after a crash.
//!
//! The model owns, per name, every thing that may be found there, and per file every content
//! it may have. Invariants:
//! 1. The first possibility is what was durable at the last sync; the last is what a program
//!    sees now. A possibility is noted before the system call that brings it about.
//! 2. A sync that returned leaves exactly one possibility: [`Model::folder_synced`],
//!    [`Model::file_synced`].
//! 3. Every file's content begins with its identity, which never changes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Bytes at the beginning of each file that hold its identity.
pub const HEADER: usize = 8;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Thing {
    Absent,
    Folder,
    Symlink(String),
    File(u64),
    /// A file whose content does not matter: it was about to be renamed.
    AnyFile,
}

/// The contents that a file may have.
#[derive(Debug)]
struct Contents {
    versions: Vec<Arc<Vec<u8>>>,
    /// All of it is durable.
    synced: bool,
    /// Where it was created, until that is durable.
    first_name: Option<String>,
    /// Only whole versions may be found: the file was truncated and written anew.
    whole: bool,
    /// Durable under some name and not removed since: it must be found.
    must_exist: bool,
    /// It has, or had since the last sync, more than one name.
    linked: bool,
}

/// What was found at a name.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    Folder,
    Symlink(String),
    File(Vec<u8>),
}

#[derive(Debug, Default)]
pub struct Model {
    names: BTreeMap<String, Vec<Thing>>,
    files: BTreeMap<u64, Contents>,
    next_id: u64,
}

impl Model {
    /// A model of what exists now, all of it durable.
    pub fn of(found: BTreeMap<String, Found>, next_id: u64) -> Self {
        let mut model = Model {
            next_id,
            ..Model::default()
        };
        for (name, thing) in found {
            let thing = match thing {
                Found::Folder => Thing::Folder,
                Found::Symlink(target) => Thing::Symlink(target),
                Found::File(bytes) => {
                    let id = identity(&bytes).unwrap_or_else(|| model.fresh_id());
                    let linked = model.files.contains_key(&id);
                    let contents = Contents {
                        versions: vec![Arc::new(bytes)],
                        synced: true,
                        first_name: None,
                        whole: false,
                        must_exist: true,
                        linked,
                    };
                    model.files.insert(id, contents);
                    Thing::File(id)
                }
            };
            model.names.insert(name, vec![thing]);
        }
        model
    }

    pub fn next_id(&self) -> u64 {
        self.next_id
    }

    fn fresh_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// An identity for a file to be created.
    pub fn new_file(&mut self) -> u64 {
        self.fresh_id()
    }

    /// A new, empty file comes to `name`, where nothing is.
    pub fn create(&mut self, name: &str, id: u64) {
        let contents = Contents {
            versions: vec![Arc::default()],
            synced: false,
            first_name: Some(name.to_owned()),
            whole: false,
            must_exist: false,
            linked: false,
        };
        self.files.insert(id, contents);
        self.put(name, Thing::File(id));
    }

    /// What a program sees at `name` now.
    pub fn now(&self, name: &str) -> &Thing {
        self.names
            .get(name)
            .and_then(|things| things.last())
            .unwrap_or(&Thing::Absent)
    }

    /// The names where something is now, and what.
    pub fn present(&self) -> Vec<(String, Thing)> {
        self.names
            .keys()
            .map(|name| (name.clone(), self.now(name).clone()))
            .filter(|(_, thing)| *thing != Thing::Absent)
            .collect()
    }

    /// `thing` comes to `name`, or what is there goes.
    pub fn put(&mut self, name: &str, thing: Thing) {
        if let Thing::File(id) = *self.now(name) {
            self.file(id).must_exist = false;
        }
        self.names
            .entry(name.to_owned())
            .or_insert_with(|| vec![Thing::Absent])
            .push(thing);
    }

    /// `from` moves to `to`, over whatever is there.
    pub fn rename(&mut self, from: &str, to: &str) {
        let thing = self.now(from).clone();
        let must_exist = match thing {
            Thing::File(id) => self.file(id).must_exist,
            _ => false,
        };
        self.put(to, thing.clone());
        self.put(from, Thing::Absent);
        if let Thing::File(id) = thing {
            self.file(id).must_exist = must_exist;
        }
    }

    /// The new, unsynced file `from` is about to take the place of `to`, where it may be
    /// found only with its whole content.
    pub fn replace(&mut self, from: &str, to: &str) {
        let Thing::File(id) = *self.now(from) else {
            panic!("only a file replaces another");
        };
        self.put(to, Thing::File(id));
        self.names.insert(
            from.to_owned(),
            vec![Thing::Absent, Thing::AnyFile, Thing::Absent],
        );
        let last = self.content(id);
        self.file(id).versions = vec![last];
    }

    /// `name` becomes one more link of file `id`.
    pub fn link(&mut self, id: u64, name: &str) {
        self.put(name, Thing::File(id));
        self.file(id).linked = true;
    }

    pub fn content(&self, id: u64) -> Arc<Vec<u8>> {
        let last = self.files[&id].versions.last();
        Arc::clone(last.expect("a file has a content"))
    }

    /// Whether all that was written to the file is durable.
    pub fn is_synced(&self, id: u64) -> bool {
        self.files[&id].synced
    }

    /// Whether the file was rewritten since the last sync.
    pub fn is_rewritten(&self, id: u64) -> bool {
        self.files[&id].whole
    }

    /// The file's content is about to become `bytes`.
    pub fn write(&mut self, id: u64, bytes: Vec<u8>) {
        let contents = self.file(id);
        contents.versions.push(Arc::new(bytes));
        contents.synced = false;
    }

    /// The file, all of it durable, is about to be truncated and written anew.
    pub fn rewrite(&mut self, id: u64, bytes: Vec<u8>) {
        self.write(id, bytes);
        self.file(id).whole = true;
    }

    /// fsync or fdatasync of the file returned. It makes a new file's first name durable, too.
    pub fn file_synced(&mut self, id: u64) {
        let contents = self.file(id);
        let last = contents.versions.pop().expect("a file has a content");
        contents.versions = vec![last];
        contents.synced = true;
        contents.whole = false;
        let Some(name) = contents.first_name.take() else {
            return;
        };
        if let Some(things) = self.names.get_mut(&name)
            && things[..] == [Thing::Absent, Thing::File(id)]
        {
            *things = vec![Thing::File(id)];
            self.file(id).must_exist = true;
        }
    }

    /// fsync of the folder returned.
    pub fn folder_synced(&mut self) {
        let mut present = BTreeMap::new();
        for things in self.names.values_mut() {
            let last = things.pop().expect("a name has a possibility");
            if let Thing::File(id) = last {
                *present.entry(id).or_insert(0) += 1;
            }
            *things = vec![last];
        }
        self.names.retain(|_, things| things[..] != [Thing::Absent]);
        self.files.retain(|id, _| present.contains_key(id));
        for (id, contents) in &mut self.files {
            contents.must_exist = true;
            contents.first_name = None;
            contents.linked = present[id] > 1;
        }
    }

    fn file(&mut self, id: u64) -> &mut Contents {
        self.files.get_mut(&id).expect("the file is known")
    }

    /// Everything in `found` that cannot be there, and everything that is missing.
    pub fn complaints(&self, found: &BTreeMap<String, Found>) -> Vec<String> {
        let mut complaints = Vec::new();
        let names: BTreeSet<&String> = self.names.keys().chain(found.keys()).collect();
        for name in names {
            let absent = [Thing::Absent];
            let possible = self.names.get(name).map_or(&absent[..], |t| &t[..]);
            let here = found.get(name);
            if !possible.iter().any(|thing| self.matches(thing, here)) {
                complaints.push(self.explain(name, possible, here));
            }
        }
        let mut sightings: BTreeMap<u64, Vec<&String>> = BTreeMap::new();
        for (name, here) in found {
            if let Found::File(bytes) = here
                && let Some(id) = identity(bytes)
            {
                sightings.entry(id).or_default().push(name);
            }
        }
        for (id, contents) in &self.files {
            match sightings.get(id) {
                None if contents.must_exist && contents.is_recognisable(*id) => {
                    complaints.push(format!("file {id} was durable and is gone"));
                }
                Some(names) if names.len() > 1 && !contents.linked => {
                    complaints.push(format!("file {id} is at {names:?} at once"));
                }
                _ => {}
            }
        }
        complaints
    }

    fn matches(&self, thing: &Thing, found: Option<&Found>) -> bool {
        match (thing, found) {
            (Thing::Absent, None) => true,
            (Thing::Folder, Some(Found::Folder)) => true,
            (Thing::Symlink(target), Some(Found::Symlink(other))) => target == other,
            (Thing::File(id), Some(Found::File(bytes))) => self
                .files
                .get(id)
                .is_some_and(|contents| contents.allow(bytes)),
            (Thing::AnyFile, Some(Found::File(_))) => true,
            _ => false,
        }
    }

    fn explain(&self, name: &str, possible: &[Thing], found: Option<&Found>) -> String {
        let here = match found {
            None => "nothing".to_owned(),
            Some(Found::File(bytes)) => {
                format!("file {:?} of {} bytes", identity(bytes), bytes.len())
            }
            Some(other) => format!("{other:?}"),
        };
        let mut text = format!("{name}: found {here}; possible are {possible:?}");
        for thing in possible {
            if let Thing::File(id) = thing
                && let Some(contents) = self.files.get(id)
            {
                let sizes: Vec<usize> = contents.versions.iter().map(|v| v.len()).collect();
                text += &format!("; file {id} has sizes {sizes:?}, whole: {}", contents.whole);
                if let Some(Found::File(bytes)) = found {
                    text += &format!(", {}", contents.first_difference(bytes));
                }
            }
        }
        text
    }
}

impl Contents {
    /// Every content that it may have begins with its identity.
    fn is_recognisable(&self, id: u64) -> bool {
        self.versions.iter().all(|v| identity(v) == Some(id))
    }

    fn allow(&self, bytes: &[u8]) -> bool {
        if self.versions.iter().any(|v| ***v == *bytes) {
            return true;
        }
        !self.whole && self.size_fits(bytes.len()) && self.foreign_byte(bytes).is_none()
    }

    /// A write of many pages may have arrived in part, so a size between two versions fits.
    fn size_fits(&self, size: usize) -> bool {
        let mut sizes = self.versions.iter().map(|v| v.len());
        let first = sizes.next().unwrap_or(0);
        let (low, high) = sizes.fold((first, first), |(l, h), s| (l.min(s), h.max(s)));
        (low..=high).contains(&size)
    }

    /// The first byte that no version has at its place.
    fn foreign_byte(&self, bytes: &[u8]) -> Option<usize> {
        bytes
            .iter()
            .enumerate()
            .position(|(i, byte)| !self.versions.iter().any(|v| v.get(i).unwrap_or(&0) == byte))
    }

    fn first_difference(&self, bytes: &[u8]) -> String {
        match self.foreign_byte(bytes) {
            Some(at) => format!("byte {at} ({:#04x}) is in no version", bytes[at]),
            None => "every byte is in some version".to_owned(),
        }
    }
}

/// The identity at the beginning of a content.
pub fn identity(bytes: &[u8]) -> Option<u64> {
    let header = bytes.first_chunk::<HEADER>()?;
    Some(u64::from_le_bytes(*header)).filter(|&id| id != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(id: u64, rest: &[u8]) -> Vec<u8> {
        [&id.to_le_bytes()[..], rest].concat()
    }

    fn found(name: &str, bytes: Vec<u8>) -> BTreeMap<String, Found> {
        BTreeMap::from([(name.to_owned(), Found::File(bytes))])
    }

    impl Model {
        fn allows(&self, found: &BTreeMap<String, Found>) -> bool {
            self.complaints(found).is_empty()
        }
    }

    /// A model with one durable file `a` whose content is "old".
    fn one_file() -> (Model, u64) {
        let mut model = Model::default();
        let id = model.new_file();
        model.create("a", id);
        model.write(id, content(id, b"old"));
        model.file_synced(id);
        (model, id)
    }

    #[test]
    fn what_was_synced_must_be_there() {
        let (model, id) = one_file();
        assert!(model.allows(&found("a", content(id, b"old"))));
        assert!(!model.allows(&found("a", content(id, b"odd"))));
        assert!(!model.allows(&BTreeMap::new()));
    }

    #[test]
    fn an_unsynced_overwrite_may_be_there_in_part() {
        let (mut model, id) = one_file();
        model.write(id, content(id, b"newer"));
        for text in [&b"old"[..], b"newer", b"nld", b"nlw\0r"] {
            assert!(model.allows(&found("a", content(id, text))));
        }
        for text in [&b"xld"[..], b"newest", b""] {
            assert!(!model.allows(&found("a", content(id, text))));
        }
    }

    #[test]
    fn a_rewritten_file_is_whole() {
        let (mut model, id) = one_file();
        model.rewrite(id, content(id, b"newer"));
        assert!(model.allows(&found("a", content(id, b"old"))));
        assert!(model.allows(&found("a", content(id, b"newer"))));
        assert!(!model.allows(&found("a", content(id, b"new"))));
        assert!(!model.allows(&found("a", Vec::new())));
    }

    #[test]
    fn a_durable_name_may_show_an_empty_file_until_that_is_synced() {
        let mut model = Model::default();
        let id = model.new_file();
        model.create("a", id);
        model.write(id, content(id, b"text"));
        model.folder_synced();
        assert!(model.allows(&found("a", Vec::new())));
        assert!(!model.allows(&BTreeMap::new()));
    }

    #[test]
    fn a_replaced_file_is_old_or_new() {
        let (mut model, old) = one_file();
        let new = model.new_file();
        model.create("t", new);
        model.write(new, content(new, b"whole"));
        model.replace("t", "a");
        assert!(model.allows(&found("a", content(old, b"old"))));
        assert!(model.allows(&found("a", content(new, b"whole"))));
        assert!(!model.allows(&found("a", content(new, b"who"))));
        assert!(!model.allows(&BTreeMap::new()));
    }

    #[test]
    fn a_rename_leaves_one_name() {
        let (mut model, id) = one_file();
        model.rename("a", "b");
        let old = content(id, b"old");
        assert!(model.allows(&found("a", old.clone())));
        assert!(model.allows(&found("b", old.clone())));
        assert!(!model.allows(&BTreeMap::new()));
        let mut both = found("a", old.clone());
        both.insert("b".to_owned(), Found::File(old.clone()));
        assert!(!model.allows(&both));
        model.folder_synced();
        assert!(!model.allows(&found("a", old)));
    }
}
