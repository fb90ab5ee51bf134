//! Between steps of one call others come in.

use super::meanwhile::others_do_once_told;
use super::*;
use crate::api::ROOT;
use crate::content::TreeId;
use crate::rename::tests::file_system;
use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;

/// Without a level of index nodes and with one.
const NAMES: [usize; 2] = [2000, 16_000];
/// Those of them that calls are about.
const ASKED: usize = 20;

fn name(i: usize) -> Vec<u8> {
    format!("a name of some length {i}").into_bytes()
}

fn names(range: Range<usize>) -> Vec<Vec<u8>> {
    range.map(name).collect()
}

fn make(fs: &FileSystem, dir: Ino, range: Range<usize>) {
    let (who, mode) = (Caller::root(), libc::S_IFREG | 0o644);
    for i in range {
        fs.mknod(&who, dir, &name(i), mode, 0).unwrap();
    }
}

fn remove(fs: &FileSystem, dir: Ino, range: Range<usize>) {
    range.for_each(|i| fs.unlink(&Caller::root(), dir, &name(i)).unwrap());
}

/// Names move to other leaves.
fn split(fs: &FileSystem, dir: Ino, count: usize) {
    make(fs, dir, count..3 * count);
}

/// Leaves go.
fn shrink(fs: &FileSystem, dir: Ino, count: usize) {
    remove(fs, dir, ASKED..count);
}

/// Leaves go, and other nodes get their numbers.
fn replace(fs: &FileSystem, dir: Ino, count: usize) {
    remove(fs, dir, ASKED..count);
    let elsewhere = fs.mkdir(&Caller::root(), ROOT, b"elsewhere", 0o755);
    make(fs, elsewhere.unwrap().ino, 0..count);
}

/// All leaves go, and there are others.
fn renew(fs: &FileSystem, dir: Ino, count: usize) {
    remove(fs, dir, 0..count);
    make(fs, dir, 0..ASKED);
    make(fs, dir, count..2 * count);
}

/// A name is where it belongs though leaves change after that was told.
#[test]
fn who_is_told_where_a_leaf_is_finds_what_has_become_of_it() {
    type Others = fn(&FileSystem, Ino, usize);
    type Call = fn(&FileSystem, Ino, usize);
    let calls: [Call; 6] = [
        |fs, dir, count| make(fs, dir, 4 * count..4 * count + 1),
        |fs, dir, _| remove(fs, dir, 2..3),
        |fs, dir, _| remove(fs, dir, 7..8),
        |fs, dir, count| {
            let (old, new) = (name(0), name(4 * count));
            fs.rename(&Caller::root(), dir, &old, dir, &new, 0).unwrap();
        },
        |fs, dir, count| {
            let made = names(4 * count..4 * count + ASKED);
            let made = fs.create_many(&Caller::root(), dir, &made, 0o644);
            assert!(made.iter().all(Result::is_ok));
        },
        |fs, dir, _| {
            let seen = fs.stat_many(dir, &names(0..ASKED));
            assert!(seen.iter().all(Result::is_ok));
        },
    ];
    let others: [Others; 4] = [split, shrink, replace, renew];
    for (depth, count) in NAMES.into_iter().enumerate() {
        for (other, call) in others.into_iter().flat_map(|o| calls.map(|c| (o, c))) {
            let fs = file_system();
            let dir = fs.mkdir(&Caller::root(), ROOT, b"d", 0o755).unwrap().ino;
            make(&fs, dir, 0..count);
            let root_depth = |inode: &Inode| inode.root(TreeId::Body).unwrap().depth;
            let now = root_depth(fs.inode(dir).unwrap().inode().unwrap());
            assert_eq!(usize::from(now), depth);
            let (others, done) = (Arc::clone(&fs), Rc::new(Cell::new(false)));
            let noted = Rc::clone(&done);
            others_do_once_told(move || {
                other(&others, dir, count);
                noted.set(true);
            });
            call(&fs, dir, count);
            assert!(done.get());
            let (mut listed, mut found) = (0, 0);
            fs.readdir(dir, 0, &mut |entry| {
                if !is_dot(entry.name) {
                    listed += 1;
                    found += usize::from(fs.lookup(dir, entry.name).is_ok());
                }
                true
            })
            .unwrap();
            let names = fs.inode(dir).unwrap().inode().unwrap().names();
            assert_eq!((found, names), (listed, listed as u64));
            fs.close().unwrap();
        }
    }
}

/// That of a file in use took the orphan directory for itself, beside all others who take a last name.
#[test]
fn one_of_several_names_goes_without_the_orphan_directory() {
    let (fs, who) = (file_system(), Caller::root());
    let (attr, file) = fs.create(&who, ROOT, b"a", 0o644, libc::O_RDWR).unwrap();
    fs.link(&who, attr.ino, ROOT, b"b").unwrap();
    let orphans = fs.orphan_node(attr.ino).unwrap();
    let held = orphans.read().unwrap();
    let (done, told) = std::sync::mpsc::channel();
    let other = {
        let fs = Arc::clone(&fs);
        let unlinked = move || done.send(fs.unlink(&who, ROOT, b"b")).unwrap();
        base::thread::spawn("unlinks", unlinked).unwrap()
    };
    let outcome = told.recv_timeout(std::time::Duration::from_secs(20));
    drop(held);
    other.join().unwrap();
    outcome.expect("it waits for nobody").unwrap();
    assert_eq!(fs.getattr(attr.ino).unwrap().nlink, 1);
    // The last one does need it.
    fs.unlink(&Caller::root(), ROOT, b"a").unwrap();
    assert_eq!(fs.getattr(attr.ino).unwrap().nlink, 0);
    drop(file);
    assert!(matches!(fs.getattr(attr.ino), Err(Error::Stale(_))));
}
