//! The stages of place and counts: directories that must exist, what has no name, loops, link
//! counts, the lists of unlinked inodes, nodes that nobody owns.

use super::super::contents::is_orphan_directory;
use super::super::state::{CLAIMED, INODE, LISTED, OWNED, TRUNCATING, UNLINKED};
use super::ActionKind;
use super::collect::Collected;
use super::rounds::Round;
use crate::Error;
use crate::api::ROOT;
use crate::content::entry::list_len;
use crate::content::inode::INLINE_ORPHANS_MAX;
use crate::content::{Body, FsNode, Inode, Name, Orphan};
use crate::dir::NameHash;
use format::Nid;
use format::dir::COLLISION_BITS;
use format::inode::{FIRST_ORPHANS, ORPHAN_DIRECTORIES, OrphanEntry};
use std::collections::{BTreeSet, HashSet};

const FOUND: &[u8] = b"lost+found";

/// A directory's names, to which others are added.
struct Names<'h> {
    hash: &'h NameHash,
    list: Vec<Name>,
    keys: HashSet<u64>,
    texts: HashSet<Box<[u8]>>,
}

impl<'h> Names<'h> {
    fn new(list: Vec<Name>, hash: &'h NameHash) -> Names<'h> {
        Names {
            keys: list.iter().map(|name| name.key).collect(),
            texts: list.iter().map(|name| Box::from(&*name.name)).collect(),
            hash,
            list,
        }
    }

    /// Adds a name for an inode, with something behind it if the name is taken; returns it.
    fn add(&mut self, wanted: &[u8], nid: Nid, inode: &Inode) -> String {
        let mut text = wanted.to_vec();
        let mut more = 0;
        loop {
            let first = self.hash.first_key(&text);
            let mut keys = first..first + (1 << COLLISION_BITS);
            let free = keys.find(|key| !self.keys.contains(key));
            if let (Some(key), false) = (free, self.texts.contains(&text[..])) {
                self.keys.insert(key);
                self.texts.insert(text.as_slice().into());
                self.list.push(Name {
                    key,
                    nid,
                    generation: inode.generation,
                    kind: inode.dirent_kind(),
                    name: text.as_slice().into(),
                });
                return String::from_utf8_lossy(&text).into_owned();
            }
            more += 1;
            text = [wanted, format!("~{more}").as_bytes()].concat();
        }
    }

    /// All of them, in order.
    fn sorted(mut self) -> Vec<Name> {
        self.list.sort_unstable_by_key(|name| name.key);
        self.list
    }
}

impl Round<'_> {
    /// The root and the directories of unlinked inodes exist, and are inodes.
    pub fn required(&mut self) -> Result<(), Error> {
        let orphans = (0..ORPHAN_DIRECTORIES).map(|i| Nid(FIRST_ORPHANS + i));
        for nid in [ROOT].into_iter().chain(orphans) {
            if matches!(self.load(nid)?, Some(FsNode::Inode(inode)) if nid == ROOT || inode.is_dir())
            {
                continue;
            }
            let generation = self.salvage.next_version(nid)?;
            let (mode, body) = match nid {
                ROOT => (0o755, Body::Entries(Box::default())),
                _ => (0, Body::Orphans(Vec::new())),
            };
            let mut inode = Inode::new(libc::S_IFDIR | mode, generation, self.now);
            inode.body = body;
            if nid == ROOT {
                inode.parent = ROOT;
                self.act(
                    ActionKind::Created,
                    nid,
                    true,
                    "the root directory was made anew",
                );
                self.actions.name(ROOT, "/");
            } else {
                self.act(
                    ActionKind::Created,
                    nid,
                    false,
                    "a list of unlinked inodes was made",
                );
            }
            self.put(nid, FsNode::Inode(inode))?;
        }
        Ok(())
    }

    /// Everything has a name that leads to it.
    pub fn place(&mut self) -> Result<(), Error> {
        let mut strays = Vec::new();
        self.check.inodes.each(|nid, facts| {
            if !facts.is(INODE) || nid == ROOT || is_orphan_directory(nid) {
                return;
            }
            let unlinked = facts.is(UNLINKED) && !self.nids.contains(&nid);
            if !Self::is_named(&facts) && !unlinked {
                strays.push(nid);
            }
        });
        let mut found = Vec::new();
        for nid in strays {
            let Some(FsNode::Inode(inode)) = self.load(nid)? else {
                continue;
            };
            // What was unlinked stays so, except a directory with something in it.
            if inode.nlink > 0 || (inode.is_dir() && inode.size > 0) {
                found.push((nid, inode));
            }
        }
        // A loop through one of those ends when that is attached.
        let cycles: BTreeSet<Nid> = match found.is_empty() {
            true => self.check.cycles.lock().iter().copied().collect(),
            false => BTreeSet::new(),
        };
        for nid in cycles {
            if let Some(parent) = self.facts(nid).map(|facts| facts.above) {
                self.cut_name(parent, nid)?;
            }
            // It may have been its own parent.
            if let Some(FsNode::Inode(inode)) = self.load(nid)? {
                found.push((nid, inode));
            }
        }
        match found.is_empty() {
            true => Ok(()),
            false => self.attach_strays(found),
        }
    }

    /// Takes all names of an inode out of a directory.
    fn cut_name(&mut self, dir: Nid, nid: Nid) -> Result<(), Error> {
        let Some(FsNode::Inode(mut inode)) = self.load(dir)? else {
            return Ok(());
        };
        let mut names = self.names_of(dir, &inode)?;
        names.retain(|name| name.nid != nid);
        self.set_names(dir, &mut inode, names)
    }

    /// Gives a sound directory other names, which are in order.
    fn set_names(&mut self, dir: Nid, inode: &mut Inode, names: Vec<Name>) -> Result<(), Error> {
        let found = match &inode.body {
            Body::Tree(root) => self.collect::<Name>(dir, root, true)?,
            _ => Collected::of_list(Vec::new()),
        };
        self.put_names(inode, &found, &names)?;
        self.put(dir, FsNode::Inode(inode.clone()))
    }

    fn attach_strays(&mut self, found: Vec<(Nid, Inode)>) -> Result<(), Error> {
        let (home, home_name) = self.lost_and_found()?;
        let Some(FsNode::Inode(mut inode)) = self.load(home)? else {
            return Ok(());
        };
        let mut names = Names::new(self.names_of(home, &inode)?, self.hash);
        for (nid, mut stray) in found {
            if nid == home {
                continue;
            }
            let text = names.add(nid.to_string().as_bytes(), nid, &stray);
            if stray.is_dir() {
                stray.parent = home;
                stray.nlink = stray.nlink.max(2);
                self.put(nid, FsNode::Inode(stray))?;
            }
            let path = format!("/{home_name}/{text}");
            self.actions.name(nid, &path);
            let what = "it had no name, and has this one";
            self.act_at(ActionKind::Found, nid, Some(path), false, what);
        }
        self.set_names(home, &mut inode, names.sorted())
    }

    /// The directory for what has no name, and its name in the root; made when there is none.
    fn lost_and_found(&mut self) -> Result<(Nid, String), Error> {
        let Some(FsNode::Inode(mut root)) = self.load(ROOT)? else {
            let damage = format::Damage::new("root directory", "is not there");
            return Err(Error::Damage(damage));
        };
        let names = self.names_of(ROOT, &root)?;
        let usable = |name: &&Name| {
            let text = &*name.name;
            let ours = text == FOUND
                || text
                    .strip_prefix(FOUND)
                    .is_some_and(|t| t.starts_with(b"~"));
            ours && name.kind == libc::DT_DIR
        };
        if let Some(name) = names.iter().find(usable) {
            let text = String::from_utf8_lossy(&name.name).into_owned();
            return Ok((name.nid, text));
        }
        let (nid, generation) = self.salvage.fresh()?;
        let mut inode = Inode::new(libc::S_IFDIR | 0o700, generation, self.now);
        inode.parent = ROOT;
        let mut names = Names::new(names, self.hash);
        let text = names.add(FOUND, nid, &inode);
        self.put(nid, FsNode::Inode(inode))?;
        // It is whatever the image says, until counts are mended.
        root.nlink = root.nlink.saturating_add(1);
        self.set_names(ROOT, &mut root, names.sorted())?;
        let path = Some(format!("/{text}"));
        let what = "made for what has no name";
        self.act_at(ActionKind::Created, nid, path, false, what);
        Ok((nid, text))
    }

    /// Link counts, lists of unlinked inodes, nodes without an owner.
    pub fn counts(&mut self) -> Result<(), Error> {
        for nid in self.nids.clone() {
            let Some(facts) = self.facts(nid) else {
                continue;
            };
            if facts.is(INODE) && !is_orphan_directory(nid) {
                self.mend_links(nid)?;
            }
        }
        let mut unowned = Vec::new();
        let mut orphans: Vec<Vec<Orphan>> = vec![Vec::new(); ORPHAN_DIRECTORIES as usize];
        let mut wrong: BTreeSet<usize> = BTreeSet::new();
        self.check.inodes.each(|nid, facts| {
            if facts.is(OWNED) && !facts.is(CLAIMED) {
                unowned.push(nid);
            }
            if !facts.is(INODE) || is_orphan_directory(nid) {
                return;
            }
            let home = (nid.0 % ORPHAN_DIRECTORIES) as usize;
            let nameless = facts.is(UNLINKED) && !Self::is_named(&facts);
            let belongs = nid != ROOT && (nameless || facts.is(TRUNCATING));
            if belongs {
                orphans[home].push(Orphan {
                    nid,
                    generation: facts.generation,
                });
            }
            if belongs != facts.is(LISTED) {
                wrong.insert(home);
            }
        });
        for (i, list) in orphans.into_iter().enumerate() {
            let nid = Nid(FIRST_ORPHANS + i as u64);
            if wrong.contains(&i) || self.nids.contains(&nid) {
                self.set_orphans(nid, list)?;
            }
        }
        for nid in unowned {
            self.act(
                ActionKind::Dropped,
                nid,
                false,
                "belongs to no inode; dropped",
            );
            self.delete(nid)?;
        }
        Ok(())
    }

    fn set_orphans(&mut self, nid: Nid, list: Vec<Orphan>) -> Result<(), Error> {
        let Some(FsNode::Inode(mut inode)) = self.load(nid)? else {
            return Ok(());
        };
        let (old, sound) = match &inode.body {
            Body::Tree(root) => {
                let found = self.collect::<Orphan>(nid, root, true)?;
                let same = found.sound && found.items == list;
                (found.nodes, same)
            }
            Body::Orphans(now) => (Vec::new(), *now == list),
            _ => (Vec::new(), false),
        };
        if sound {
            return Ok(());
        }
        inode.body = match list_len(&list) <= INLINE_ORPHANS_MAX * OrphanEntry::SIZE {
            true => Body::Orphans(list),
            false => Body::Tree(self.build(&list)?),
        };
        self.discard_nodes(&old)?;
        self.act(
            ActionKind::Orphans,
            nid,
            false,
            "a list of unlinked inodes was made anew",
        );
        self.put(nid, FsNode::Inode(inode))
    }

    fn mend_links(&mut self, nid: Nid) -> Result<(), Error> {
        let (Some(facts), Some(FsNode::Inode(mut inode))) = (self.facts(nid), self.load(nid)?)
        else {
            return Ok(());
        };
        let links = match inode.is_dir() {
            true if nid == ROOT || facts.is(CLAIMED) => {
                let names = self.names_of(nid, &inode)?;
                let below = names.iter().filter(|name| name.kind == libc::DT_DIR);
                2 + below.count() as u32
            }
            true => 0,
            false => facts.refs,
        };
        if links != inode.nlink {
            let what = format!("its link count was {}, and is {links}", inode.nlink);
            self.act(ActionKind::Links, nid, false, what);
            inode.nlink = links;
            self.put(nid, FsNode::Inode(inode))?;
        }
        Ok(())
    }
}
