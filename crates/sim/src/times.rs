//! What the times of files, directories and links may be.
//!
//! The model does not know to the nanosecond when an operation stamped something, but operations
//! do not overlap in time: a stamp is known as the moment at which its operation began, and what
//! is found lies between that and the beginning of the next. What was read after a recovery is
//! known exactly; it is no operation's beginning.
//!
//! Directories and links: both times change with names and attributes, in the same record, so
//! that they are exactly those of the prefix that survived.
//!
//! Files: `ctime` as far as names and attributes changed it is in their records too. Content
//! sets both times in memory. They are logged later, by themselves or with the next record, so
//! that a crash may leave those of an earlier change of content. But:
//!
//! 1. What a `sync` found is durable.
//! 2. A size never comes without the times of what made it so.
//! 3. Nothing of a later operation is there when an earlier one on names is not.
//! 4. `ctime` is the newer one of the change that `mtime` comes from and of the last change of
//!    names and attributes.
//! 5. An `mtime` that was set is no change of content: it is there exactly with the operation that
//!    set it, and then nothing older is.

/// When an operation began, in nanoseconds, or a time that was found after a recovery.
pub type Stamp = u64;

/// The beginnings of all operations since all was known, in order.
#[derive(Clone, Debug, Default)]
pub struct Beginnings(Vec<Stamp>);

impl Beginnings {
    pub fn push(&mut self, at: Stamp) {
        debug_assert!(self.0.last().is_none_or(|last| *last < at));
        self.0.push(at);
    }

    /// Whether what is stamped so may show as this.
    fn shows(&self, stamp: Stamp, found: u64) -> bool {
        match self.0.binary_search(&stamp) {
            Ok(index) => {
                let next = self.0.get(index + 1).copied().unwrap_or(u64::MAX);
                (stamp..next).contains(&found)
            }
            Err(_) => found == stamp,
        }
    }
}

/// The times that an inode shows, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Shown {
    pub mtime: u64,
    pub ctime: u64,
}

impl Shown {
    /// Compares with the only times that are right.
    pub fn is(&self, mtime: Stamp, ctime: Stamp, when: &Beginnings) -> Result<(), String> {
        if !when.shows(mtime, self.mtime) {
            return Err(wrong("mtime", self.mtime, mtime));
        }
        match when.shows(ctime, self.ctime) {
            true => Ok(()),
            false => Err(wrong("ctime", self.ctime, ctime)),
        }
    }
}

fn wrong(name: &str, found: u64, due: Stamp) -> String {
    format!("{name} {found} where that of the operation at {due} is due")
}

#[derive(Clone, Copy, Debug)]
struct Changed {
    at: Stamp,
    /// What `mtime` is from then on.
    mtime: Stamp,
    /// It was set by an operation on attributes.
    set: bool,
    /// The file's size from then on, in bytes.
    size: u64,
}

impl Changed {
    fn content(at: Stamp, size: u64) -> Changed {
        Changed {
            at,
            mtime: at,
            set: false,
            size,
        }
    }
}

/// When a file's content changed since its times were last durable; what was durable is first.
#[derive(Clone, Debug)]
pub struct Changes(Vec<Changed>);

impl Changes {
    pub fn new(at: Stamp, size: u64) -> Changes {
        Changes(vec![Changed::content(at, size)])
    }

    pub fn push(&mut self, at: Stamp, size: u64) {
        self.0.push(Changed::content(at, size));
    }

    /// `mtime` is set to this, or to now, by the operation that begins at `at`.
    pub fn set(&mut self, at: Stamp, mtime: Option<Stamp>) {
        self.0.push(Changed {
            at,
            mtime: mtime.unwrap_or(at),
            set: true,
            size: self.last().size,
        });
    }

    fn last(&self) -> &Changed {
        self.0.last().expect("a file was made once")
    }

    /// The operation that began at `at` failed half-way: whether it stamped the file, and the
    /// size that it left.
    pub fn failed(&mut self, at: Stamp, stamped: bool, size: u64) {
        let before = self.0.iter().rev().find(|c| c.at != at).copied();
        for change in self.0.iter_mut().filter(|c| c.at == at) {
            let size = change.size;
            *change = match before.filter(|_| !stamped) {
                Some(before) => Changed { size, ..before },
                None => Changed::content(at, size),
            };
        }
        self.0.last_mut().expect("a file was made once").size = size;
    }

    /// The first of the changes that can have made the file as large as this. Write-back logs
    /// a growing file's size bit by bit.
    fn first_with(&self, size: u64) -> usize {
        let mut before = self.0[0].size;
        let made = self.0.iter().position(|change| {
            let (least, most) = (before.min(change.size), before.max(change.size));
            before = change.size;
            (least..=most).contains(&size)
        });
        made.unwrap_or(0)
    }

    /// The times are durable as they are.
    pub fn durable(&mut self) {
        self.0.drain(..self.0.len() - 1);
    }

    /// The size is durable.
    pub fn size_durable(&mut self) {
        let first = self.first_with(self.last().size);
        self.0.drain(..first);
    }

    /// Compares with what programs must see. `marked`: when names or attributes last changed.
    pub fn shows(&self, shown: &Shown, marked: Stamp, when: &Beginnings) -> Result<(), String> {
        let last = self.last();
        shown.is(last.mtime, last.at.max(marked), when)
    }

    /// Compares with what a crash may leave of a file that has this size now, when nothing
    /// that began at `end` or later is there.
    pub fn allows(
        &self,
        shown: &Shown,
        size: u64,
        marked: Stamp,
        end: Stamp,
        when: &Beginnings,
    ) -> Result<(), String> {
        let set = self
            .0
            .iter()
            .rposition(|change| change.set && change.at < end);
        let first = self.first_with(size).max(set.unwrap_or(0));
        let mut possible = self.0[first..].iter().filter(|change| change.at < end);
        let Some(change) = possible.find(|change| when.shows(change.mtime, shown.mtime)) else {
            return Err(format!(
                "mtime {} and {size} bytes, where the content changed {:?}",
                shown.mtime, self.0
            ));
        };
        shown.is(change.mtime, change.at.max(marked), when)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beginnings() -> Beginnings {
        let mut when = Beginnings::default();
        for at in [10, 20, 30, 40] {
            when.push(at);
        }
        when
    }

    fn shown(mtime: u64, ctime: u64) -> Shown {
        Shown { mtime, ctime }
    }

    #[test]
    fn a_stamp_lies_within_its_operation() {
        let when = beginnings();
        assert!(shown(12, 25).is(10, 20, &when).is_ok());
        assert!(shown(9, 25).is(10, 20, &when).is_err());
        assert!(shown(12, 30).is(10, 20, &when).is_err());
        // What was found is known exactly.
        assert!(shown(7, 25).is(7, 20, &when).is_ok());
        assert!(shown(8, 25).is(7, 20, &when).is_err());
    }

    #[test]
    fn a_size_never_comes_without_its_time() {
        let when = beginnings();
        let mut changes = Changes::new(7, 100);
        changes.push(10, 100);
        changes.push(20, 5000);
        let allows = |time: u64, size| changes.allows(&shown(time, time), size, 7, u64::MAX, &when);
        assert!(allows(7, 100).is_ok());
        assert!(allows(11, 100).is_ok());
        assert!(allows(21, 5000).is_ok());
        assert!(allows(11, 5000).is_err());
        assert!(allows(31, 5000).is_err());
    }

    #[test]
    fn times_do_not_come_before_earlier_names() {
        let when = beginnings();
        let mut changes = Changes::new(7, 100);
        changes.push(20, 100);
        let late = shown(21, 21);
        assert!(changes.allows(&late, 100, 7, 30, &when).is_ok());
        assert!(changes.allows(&late, 100, 7, 20, &when).is_err());
        // A change of attributes in between shows in ctime alone.
        assert!(changes.allows(&shown(7, 11), 100, 10, 20, &when).is_ok());
        assert!(changes.allows(&shown(7, 7), 100, 10, 20, &when).is_err());
    }

    #[test]
    fn a_time_that_was_set_comes_and_goes_with_its_operation() {
        let when = beginnings();
        let mut changes = Changes::new(7, 100);
        changes.push(10, 100);
        changes.set(20, Some(3));
        changes.push(30, 100);
        let allows = |mtime, ctime, marked, end| {
            changes.allows(&shown(mtime, ctime), 100, marked, end, &when)
        };
        // It is there.
        assert!(allows(3, 21, 20, 30).is_ok());
        assert!(allows(3, 21, 20, u64::MAX).is_ok());
        assert!(allows(31, 31, 20, u64::MAX).is_ok());
        assert!(allows(11, 21, 20, u64::MAX).is_err());
        assert!(allows(7, 21, 20, u64::MAX).is_err());
        assert!(allows(4, 21, 20, u64::MAX).is_err());
        // It is not.
        assert!(allows(11, 11, 7, 20).is_ok());
        assert!(allows(3, 7, 7, 20).is_err());
        assert!(changes.shows(&shown(33, 33), 20, &when).is_ok());
    }

    #[test]
    fn what_was_synced_stays() {
        let when = beginnings();
        let mut changes = Changes::new(7, 100);
        changes.push(10, 200);
        changes.push(20, 100);
        changes.size_durable();
        assert!(changes.allows(&shown(7, 7), 100, 7, 30, &when).is_ok());
        changes.durable();
        assert!(changes.allows(&shown(7, 7), 100, 7, 30, &when).is_err());
        assert!(changes.allows(&shown(22, 22), 100, 7, 30, &when).is_ok());
    }
}
