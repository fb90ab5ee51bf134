//! A file system in memory: the protocol layer under test needs something to serve.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use base::clock::{Clock, Timestamp};
use base::sync::{Mutex, rank};
use mount::abi::{ROOT_ID, fopen};
use mount::dirent::DirectoryReply;
use mount::ops::*;

/// Files are small here, whatever garbage asks for.
const SIZE_MAX: u64 = 1 << 26;

const VALID: Duration = Duration::from_secs(3600);

#[derive(Default)]
struct Node {
    mode: u32,
    nlink: u32,
    uid: u32,
    gid: u32,
    rdev: u32,
    parent: u64,
    data: Vec<u8>,
    /// Name to (position, node).
    entries: BTreeMap<Vec<u8>, (u64, u64)>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    atime: Timestamp,
    mtime: Timestamp,
    ctime: Timestamp,
    lookups: u64,
    open: u64,
}

struct State {
    nodes: HashMap<u64, Node>,
    next: u64,
    position: u64,
}

pub struct Toy {
    clock: Clock,
    state: Mutex<State>,
}

impl Default for Toy {
    fn default() -> Self {
        let root = Node {
            mode: libc::S_IFDIR | 0o755,
            nlink: 2,
            parent: ROOT_ID,
            lookups: 1,
            ..Node::default()
        };
        Toy {
            clock: Clock::real(),
            state: Mutex::new(
                rank::LEAF,
                State {
                    nodes: HashMap::from([(ROOT_ID, root)]),
                    next: ROOT_ID + 1,
                    position: 2,
                },
            ),
        }
    }
}

fn fail<T>(errno: i32) -> Result<T> {
    Err(Errno(errno))
}

impl State {
    fn node(&mut self, id: u64) -> Result<&mut Node> {
        self.nodes.get_mut(&id).ok_or(Errno(libc::ESTALE))
    }

    fn child(&mut self, parent: u64, name: &[u8]) -> Result<u64> {
        let entry = self.node(parent)?.entries.get(name);
        entry.map(|e| e.1).ok_or(Errno(libc::ENOENT))
    }

    fn attributes(&mut self, id: u64) -> Result<Attributes> {
        let n = self.node(id)?;
        Ok(Attributes {
            ino: id,
            size: n.data.len() as u64,
            blocks: n.data.len().div_ceil(512) as u64,
            atime: n.atime,
            mtime: n.mtime,
            ctime: n.ctime,
            btime: n.ctime,
            mode: n.mode,
            nlink: n.nlink,
            uid: n.uid,
            gid: n.gid,
            rdev: n.rdev,
            blksize: 4096,
            valid: VALID,
        })
    }

    fn entry(&mut self, id: u64) -> Result<Entry> {
        self.node(id)?.lookups += 1;
        Ok(Entry {
            node: id,
            generation: 1,
            attributes: self.attributes(id)?,
            valid: VALID,
        })
    }

    fn insert(&mut self, parent: u64, name: &[u8], id: u64) -> Result<()> {
        let position = self.position;
        self.position += 1;
        let entries = &mut self.node(parent)?.entries;
        entries.insert(name.to_vec(), (position, id));
        Ok(())
    }

    fn reap(&mut self, id: u64) {
        if let Some(n) = self.nodes.get(&id)
            && n.nlink == 0
            && n.lookups == 0
            && n.open == 0
        {
            self.nodes.remove(&id);
        }
    }
}

impl Toy {
    fn make(&self, ctx: &Context, parent: u64, mode: u32, rdev: u32) -> Result<(u64, Node)> {
        let mut state = self.state.lock();
        let id = state.next;
        state.next += 1;
        let now = self.clock.now();
        let node = Node {
            mode,
            nlink: 1 + u32::from(mode & libc::S_IFMT == libc::S_IFDIR),
            uid: ctx.uid,
            gid: ctx.gid,
            rdev,
            parent,
            atime: now,
            mtime: now,
            ctime: now,
            ..Node::default()
        };
        Ok((id, node))
    }

    fn add(
        &self,
        ctx: &Context,
        parent: u64,
        name: &[u8],
        new: &NewNode,
        data: &[u8],
    ) -> Result<Entry> {
        let (id, mut node) = self.make(ctx, parent, new.mode & !new.umask, new.rdev)?;
        node.data = data.to_vec();
        let mut state = self.state.lock();
        if state.child(parent, name).is_ok() {
            return fail(libc::EEXIST);
        }
        state.nodes.insert(id, node);
        state.insert(parent, name, id)?;
        state.entry(id)
    }

    fn remove(&self, parent: u64, name: &[u8]) -> Result<()> {
        let mut state = self.state.lock();
        let id = state.child(parent, name)?;
        if !state.node(id)?.entries.is_empty() {
            return fail(libc::ENOTEMPTY);
        }
        state.node(parent)?.entries.remove(name);
        let node = state.node(id)?;
        let links = 1 + u32::from(node.mode & libc::S_IFMT == libc::S_IFDIR);
        node.nlink = node.nlink.saturating_sub(links);
        state.reap(id);
        Ok(())
    }
}

impl Operations for Toy {
    fn lookup(&self, _: &Context, parent: u64, name: &[u8]) -> Result<Entry> {
        let mut state = self.state.lock();
        let id = match name {
            b"." => parent,
            b".." => state.node(parent)?.parent,
            _ => state.child(parent, name)?,
        };
        state.entry(id)
    }

    fn forget(&self, node: u64, lookups: u64) {
        let mut state = self.state.lock();
        if let Ok(n) = state.node(node) {
            n.lookups = n.lookups.saturating_sub(lookups);
            state.reap(node);
        }
    }

    fn getattr(&self, _: &Context, node: u64, _: Option<u64>) -> Result<Attributes> {
        self.state.lock().attributes(node)
    }

    fn setattr(&self, _: &Context, node: u64, changes: &SetAttributes) -> Result<Attributes> {
        let mut state = self.state.lock();
        let now = self.clock.now();
        let n = state.node(node)?;
        if let Some(mode) = changes.mode {
            n.mode = (n.mode & libc::S_IFMT) | mode;
        }
        n.uid = changes.uid.unwrap_or(n.uid);
        n.gid = changes.gid.unwrap_or(n.gid);
        if let Some(size) = changes.size {
            if size > SIZE_MAX {
                return fail(libc::EFBIG);
            }
            n.data.resize(size as usize, 0);
            n.mtime = now;
        }
        for (time, slot) in [(changes.atime, &mut n.atime), (changes.mtime, &mut n.mtime)] {
            match time {
                Some(SetTime::Now) => *slot = now,
                Some(SetTime::At(at)) => *slot = at,
                None => {}
            }
        }
        n.ctime = now;
        state.attributes(node)
    }

    fn readlink(&self, _: &Context, node: u64) -> Result<Vec<u8>> {
        Ok(self.state.lock().node(node)?.data.clone())
    }

    fn symlink(&self, ctx: &Context, parent: u64, name: &[u8], target: &[u8]) -> Result<Entry> {
        let new = NewNode {
            mode: libc::S_IFLNK | 0o777,
            ..NewNode::default()
        };
        self.add(ctx, parent, name, &new, target)
    }

    fn mknod(&self, ctx: &Context, parent: u64, name: &[u8], new: &NewNode) -> Result<Entry> {
        self.add(ctx, parent, name, new, b"")
    }

    fn mkdir(&self, ctx: &Context, parent: u64, name: &[u8], new: &NewNode) -> Result<Entry> {
        self.add(ctx, parent, name, new, b"")
    }

    fn unlink(&self, _: &Context, parent: u64, name: &[u8]) -> Result<()> {
        self.remove(parent, name)
    }

    fn rmdir(&self, _: &Context, parent: u64, name: &[u8]) -> Result<()> {
        self.remove(parent, name)
    }

    fn rename(&self, _: &Context, from: (u64, &[u8]), to: (u64, &[u8]), flags: u32) -> Result<()> {
        let mut state = self.state.lock();
        let id = state.child(from.0, from.1)?;
        let target = state.child(to.0, to.1).ok();
        if flags & libc::RENAME_EXCHANGE != 0 {
            let other = target.ok_or(Errno(libc::ENOENT))?;
            state.insert(from.0, from.1, other)?;
            return state.insert(to.0, to.1, id);
        }
        if let Some(old) = target {
            if flags & libc::RENAME_NOREPLACE != 0 {
                return fail(libc::EEXIST);
            }
            let old_node = state.node(old)?;
            old_node.nlink = old_node.nlink.saturating_sub(1);
            state.reap(old);
        }
        state.node(from.0)?.entries.remove(from.1);
        state.insert(to.0, to.1, id)
    }

    fn link(&self, _: &Context, node: u64, parent: u64, name: &[u8]) -> Result<Entry> {
        let mut state = self.state.lock();
        state.node(node)?.nlink += 1;
        state.insert(parent, name, node)?;
        state.entry(node)
    }

    fn open(&self, _: &Context, node: u64, _: u32) -> Result<Opened> {
        let mut state = self.state.lock();
        let n = state.node(node)?;
        n.open += 1;
        Ok(Opened {
            handle: node,
            flags: fopen::KEEP_CACHE,
        })
    }

    fn create(
        &self,
        ctx: &Context,
        parent: u64,
        name: &[u8],
        new: &NewNode,
        flags: u32,
    ) -> Result<(Entry, Opened)> {
        let entry = self.add(ctx, parent, name, new, b"")?;
        Ok((entry, self.open(ctx, entry.node, flags)?))
    }

    fn tmpfile(
        &self,
        ctx: &Context,
        parent: u64,
        new: &NewNode,
        flags: u32,
    ) -> Result<(Entry, Opened)> {
        let (id, mut node) = self.make(ctx, parent, new.mode & !new.umask, 0)?;
        node.nlink = 0;
        let entry = {
            let mut state = self.state.lock();
            state.nodes.insert(id, node);
            state.entry(id)?
        };
        Ok((entry, self.open(ctx, id, flags)?))
    }

    fn read(&self, _: &Context, node: u64, span: &Span, out: &mut [u8]) -> Result<usize> {
        let mut state = self.state.lock();
        let data = &state.node(node)?.data;
        let data = data.get(span.offset as usize..).unwrap_or(&[]);
        let n = data.len().min(out.len());
        out[..n].copy_from_slice(&data[..n]);
        Ok(n)
    }

    fn write(&self, _: &Context, node: u64, span: &Span, data: &[u8]) -> Result<usize> {
        let mut state = self.state.lock();
        let n = state.node(node)?;
        if span.offset > SIZE_MAX {
            return fail(libc::EFBIG);
        }
        let end = span.offset as usize + data.len();
        if n.data.len() < end {
            n.data.resize(end, 0);
        }
        n.data[span.offset as usize..end].copy_from_slice(data);
        n.mtime = self.clock.now();
        Ok(data.len())
    }

    fn release(&self, node: u64, _: u64) {
        let mut state = self.state.lock();
        if let Ok(n) = state.node(node) {
            n.open = n.open.saturating_sub(1);
            state.reap(node);
        }
    }

    fn fsync(&self, _: &Context, _: u64, _: u64, _: bool) -> Result<()> {
        Ok(())
    }

    fn readdir(
        &self,
        _: &Context,
        node: u64,
        offset: u64,
        reply: &mut DirectoryReply<'_>,
    ) -> Result<()> {
        let mut state = self.state.lock();
        let dir = state.node(node)?;
        let mut rows: Vec<(u64, u64, Vec<u8>)> = dir
            .entries
            .iter()
            .map(|(name, &(position, id))| (position, id, name.clone()))
            .collect();
        rows.extend([(0, node, b".".to_vec()), (1, dir.parent, b"..".to_vec())]);
        rows.sort();
        for (position, id, name) in rows {
            if position < offset {
                continue;
            }
            if !reply.has_room(name.len()) {
                break;
            }
            if reply.wants_attributes() && position > 1 {
                reply.add_with(&state.entry(id)?, &name, position + 1);
            } else {
                let mode = state.node(id)?.mode;
                reply.add(id, mode, &name, position + 1);
            }
        }
        Ok(())
    }

    fn fsyncdir(&self, _: &Context, _: u64, _: bool) -> Result<()> {
        Ok(())
    }

    fn statfs(&self, _: &Context, _: u64) -> Result<Statistics> {
        Ok(Statistics {
            blocks: 1 << 20,
            blocks_free: 1 << 19,
            blocks_available: 1 << 19,
            block_size: 4096,
            fragment_size: 4096,
            name_max: 255,
            ..Statistics::default()
        })
    }

    fn syncfs(&self, _: &Context) -> Result<()> {
        Ok(())
    }

    fn setxattr(
        &self,
        _: &Context,
        node: u64,
        name: &[u8],
        value: &[u8],
        flags: u32,
        _: bool,
    ) -> Result<()> {
        let mut state = self.state.lock();
        let xattrs = &mut state.node(node)?.xattrs;
        if flags & libc::XATTR_CREATE as u32 != 0 && xattrs.contains_key(name) {
            return fail(libc::EEXIST);
        }
        xattrs.insert(name.to_vec(), value.to_vec());
        Ok(())
    }

    fn getxattr(&self, _: &Context, node: u64, name: &[u8]) -> Result<Vec<u8>> {
        let mut state = self.state.lock();
        let value = state.node(node)?.xattrs.get(name).cloned();
        value.ok_or(Errno(libc::ENODATA))
    }

    fn listxattr(&self, _: &Context, node: u64) -> Result<Vec<u8>> {
        let mut state = self.state.lock();
        let names = state.node(node)?.xattrs.keys();
        Ok(names.flat_map(|k| [k.as_slice(), b"\0"].concat()).collect())
    }

    fn removexattr(&self, _: &Context, node: u64, name: &[u8]) -> Result<()> {
        let mut state = self.state.lock();
        let removed = state.node(node)?.xattrs.remove(name);
        removed.map(drop).ok_or(Errno(libc::ENODATA))
    }

    fn fallocate(&self, _: &Context, _: u64, _: u64, _: u32, _: u64, _: u64) -> Result<()> {
        fail(libc::EOPNOTSUPP)
    }

    fn lseek(&self, _: &Context, _: u64, _: u64, _: u64, _: u32) -> Result<u64> {
        fail(libc::ENXIO)
    }
}
