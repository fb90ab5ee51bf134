//! Paths for findings: up from each inode by the directories that name it, then one look
//! through each of those directories.

use super::Check;
use super::state::{CLAIMED, INODE};
use crate::Error;
use crate::api::ROOT;
use crate::content::Name;
use crate::list;
use engine::{Finding, Object};
use format::Nid;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Levels that a path is followed up.
const DEPTH_MAX: usize = 4096;
/// Nodes that get a path; a report of more damage names what it found first.
const NODES_MAX: usize = 2000;

/// Paths of the nodes in findings, as far as they are known. A node that belongs to an inode
/// has that inode's path.
pub fn resolve(check: &Check<'_>, findings: &[Finding]) -> BTreeMap<Nid, String> {
    let nodes: BTreeSet<Nid> = findings
        .iter()
        .filter_map(|f| match f.object {
            Object::Node(nid) => Some(nid),
            _ => None,
        })
        .take(NODES_MAX)
        .collect();
    let mut ways: Vec<(Nid, Vec<Nid>)> = Vec::new();
    let mut wanted: BTreeMap<Nid, BTreeSet<Nid>> = BTreeMap::new();
    for nid in nodes {
        if let Some(way) = way_up(check, nid) {
            for pair in way.windows(2) {
                wanted.entry(pair[1]).or_default().insert(pair[0]);
            }
            ways.push((nid, way));
        }
    }
    let mut names: HashMap<(Nid, Nid), String> = HashMap::new();
    for (dir, children) in wanted {
        // A directory that cannot be read names nothing; it has a finding of its own.
        if let Err(error) = scan(check, dir, children, &mut names) {
            tracing::debug!("no paths below inode {dir}: {error}");
        }
    }
    let mut paths = BTreeMap::new();
    for (nid, way) in ways {
        let steps: Option<Vec<&str>> = way
            .windows(2)
            .rev()
            .map(|pair| names.get(&(pair[1], pair[0])).map(String::as_str))
            .collect();
        if let Some(steps) = steps {
            paths.insert(nid, format!("/{}", steps.join("/")));
        }
    }
    paths
}

/// The inode of a node and the directories above it, up to the root.
fn way_up(check: &Check<'_>, nid: Nid) -> Option<Vec<Nid>> {
    let mut way = vec![nid];
    // What some tree claims and is no inode belongs to the inode above it.
    let facts = check.inodes.get(nid)?;
    if nid != ROOT && facts.is(CLAIMED) && !facts.is(INODE) {
        way[0] = facts.above;
    }
    while *way.last()? != ROOT {
        let above = check.inodes.get(*way.last()?)?.above;
        if way.len() >= DEPTH_MAX || above == Nid(0) || way.contains(&above) {
            return None;
        }
        way.push(above);
    }
    Some(way)
}

/// Looks for the names of some inodes in a directory.
fn scan(
    check: &Check<'_>,
    dir: Nid,
    mut children: BTreeSet<Nid>,
    names: &mut HashMap<(Nid, Nid), String>,
) -> Result<(), Error> {
    let node = check.store.get(dir)?.into_read()?;
    let inode = node.inode()?;
    let mut from = Some(0);
    while let Some(key) = from {
        let (run, next) = list::run_from::<Name>(&check.store, inode, key)?;
        for name in run {
            if children.remove(&name.nid) {
                let text = String::from_utf8_lossy(&name.name).into_owned();
                names.insert((dir, name.nid), text);
            }
        }
        if children.is_empty() {
            break;
        }
        from = next;
    }
    Ok(())
}
