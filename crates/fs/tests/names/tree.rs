//! A plain model of a tree of names.

use fs::{Ino, ROOT};
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    File,
    Dir,
    Link,
}

#[derive(Clone, Debug)]
pub struct Thing {
    pub kind: Kind,
    pub nlink: u32,
    pub names: BTreeMap<Vec<u8>, Ino>,
    pub parent: Ino,
}

#[derive(Clone, Debug)]
pub struct Model {
    pub things: BTreeMap<Ino, Thing>,
}

pub type Outcome<T> = Result<T, i32>;

pub fn thing(kind: Kind, parent: Ino) -> Thing {
    Thing {
        kind,
        nlink: if kind == Kind::Dir { 2 } else { 1 },
        names: BTreeMap::new(),
        parent,
    }
}

impl Model {
    pub fn new() -> Model {
        Model {
            things: BTreeMap::from([(ROOT, thing(Kind::Dir, ROOT))]),
        }
    }

    pub fn at(&mut self, ino: Ino) -> &mut Thing {
        self.things.get_mut(&ino).unwrap()
    }

    pub fn find(&self, dir: Ino, name: &[u8]) -> Option<Ino> {
        self.things[&dir].names.get(name).copied()
    }

    pub fn can_add(&self, dir: Ino, name: &[u8]) -> Outcome<()> {
        match self.find(dir, name) {
            Some(_) => Err(libc::EEXIST),
            None => Ok(()),
        }
    }

    pub fn add(&mut self, dir: Ino, name: &[u8], ino: Ino, kind: Kind) {
        self.things.insert(ino, thing(kind, dir));
        self.at(dir).names.insert(name.to_vec(), ino);
        self.at(dir).nlink += (kind == Kind::Dir) as u32;
    }

    pub fn link(&mut self, ino: Ino, dir: Ino, name: &[u8]) -> Outcome<()> {
        if self.things[&ino].kind == Kind::Dir {
            return Err(libc::EPERM);
        }
        self.can_add(dir, name)?;
        self.at(dir).names.insert(name.to_vec(), ino);
        self.at(ino).nlink += 1;
        Ok(())
    }

    pub fn drop_link(&mut self, ino: Ino, parent: Ino) {
        if self.things[&ino].kind == Kind::Dir {
            self.at(parent).nlink -= 1;
            self.things.remove(&ino);
        } else {
            self.at(ino).nlink -= 1;
            if self.things[&ino].nlink == 0 {
                self.things.remove(&ino);
            }
        }
    }

    pub fn remove(&mut self, dir: Ino, name: &[u8], directory: bool) -> Outcome<()> {
        let ino = self.find(dir, name).ok_or(libc::ENOENT)?;
        match (directory, self.things[&ino].kind == Kind::Dir) {
            (true, false) => return Err(libc::ENOTDIR),
            (false, true) => return Err(libc::EISDIR),
            (true, true) if !self.things[&ino].names.is_empty() => return Err(libc::ENOTEMPTY),
            _ => {}
        }
        self.at(dir).names.remove(name);
        self.drop_link(ino, dir);
        Ok(())
    }

    pub fn is_above(&self, upper: Ino, mut lower: Ino) -> bool {
        while lower != upper && lower != ROOT {
            lower = self.things[&lower].parent;
        }
        lower == upper
    }

    pub fn rename(
        &mut self,
        (from, name): (Ino, &[u8]),
        (to, new_name): (Ino, &[u8]),
        flags: u32,
    ) -> Outcome<()> {
        let source = self.find(from, name).ok_or(libc::ENOENT)?;
        let target = self.find(to, new_name);
        let exchange = flags == fs::RENAME_EXCHANGE;
        match target {
            None if exchange => return Err(libc::ENOENT),
            Some(_) if flags == fs::RENAME_NOREPLACE => return Err(libc::EEXIST),
            Some(target) if target == source => return Ok(()),
            _ => {}
        }
        let is_dir = |ino: Ino| self.things[&ino].kind == Kind::Dir;
        if from != to && is_dir(source) && self.is_above(source, to) {
            return Err(libc::EINVAL);
        }
        if let Some(target) = target
            && from != to
            && is_dir(target)
            && (exchange || is_dir(source))
            && self.is_above(target, from)
        {
            return Err(if exchange {
                libc::EINVAL
            } else {
                libc::ENOTEMPTY
            });
        }
        if exchange {
            let target = target.unwrap();
            let (up, down) = (is_dir(source) as u32, is_dir(target) as u32);
            self.at(from).names.insert(name.to_vec(), target);
            self.at(to).names.insert(new_name.to_vec(), source);
            self.at(from).nlink = self.at(from).nlink + down - up;
            self.at(to).nlink = self.at(to).nlink + up - down;
            self.at(source).parent = to;
            self.at(target).parent = from;
            return Ok(());
        }
        if let Some(target) = target {
            match (is_dir(source), is_dir(target)) {
                (true, false) => return Err(libc::ENOTDIR),
                (false, true) => return Err(libc::EISDIR),
                (true, true) if !self.things[&target].names.is_empty() => {
                    return Err(libc::ENOTEMPTY);
                }
                _ => {}
            }
        }
        let up = is_dir(source) as u32;
        if let Some(target) = target {
            self.drop_link(target, to);
        }
        self.at(from).names.remove(name);
        self.at(to).names.insert(new_name.to_vec(), source);
        self.at(from).nlink -= up;
        self.at(to).nlink += up;
        self.at(source).parent = to;
        Ok(())
    }
}
