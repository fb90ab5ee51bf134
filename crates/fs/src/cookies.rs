//! Change cookies: of each inode a number that grows with every change of the inode, or of a file's content, that
//! somebody could tell from the one before, and that no crash brings back. Who keeps what it read beside the cookie
//! that it got before reading, has it fresh as long as the cookie stays the same.
//!
//! A cookie is made of the inode's ctime, so that operations pay nothing for it:
//!
//! ```text
//! cookie = base + (ctime - start  if start < ctime <= floor,  else 0)
//! ```
//!
//! `floor` is the newest stamp handed out ([`Times`]); `base`, `start` and `limit` are in each checkpoint record,
//! and so is the mount that ended cleanly with them. Times are in nanoseconds.
//!
//! Invariants:
//! 1. A cookie is handed out only while it is below a `limit` that is durable; if it is not, a checkpoint comes
//!    first, with a limit that lies a day ahead.
//! 2. Every stamp made in a mount is newer than `start`; and, as long as mounts end cleanly and the clock does not step
//!    back between them, newer than all stamps of the mounts before: then `base` and `start` stay as they are.
//!    Otherwise a new series begins: `base` becomes the durable limit, `start` the time of the opening.
//! 3. A record that names the mount which ended cleanly has `limit` above all cookies handed out, and is written
//!    when all content is written back and all times are logged, and no operation is left that could change anything.
//!
//! So, of one inode:
//!
//! - *Within a mount* cookies never fall, and a change after a look makes them grow. The change has a newer ctime than the
//!   look (times, invariant 2), and a ctime between `start` and `floor` stays there, since the floor only grows. A
//!   ctime beyond the floor is none of this mount's: it was made while the clock was wrong, and counts 0. As the
//!   floor passes it the cookie grows without a change, which is harmless; a change before that has a stamp between
//!   `start` and `floor`, which counts more than 0. Nobody can set ctime.
//! - *Across a clean end* the same holds, because the series goes on with the same numbers and newer stamps; what did not
//!   change has its cookie still, its ctime being in its inode (3).
//! - *Across a crash*, whatever of content and times came to the devices: all cookies handed out were below the
//!   durable limit (1), and the new series begins there (2). That the last mount did not end is known
//!   by the number of this one, which every opening makes durable before anything else is written (R8).

use crate::Error;
use crate::api::Ino;
use crate::content::FsNode;
use crate::filesystem::FileSystem;
use crate::times::Times;
use base::canary::{Canary, planted};
use base::clock::Timestamp;
use base::sync::{Mutex, rank};
use engine::{Store, USER_WORDS};

/// How far ahead of a cookie that is handed out the durable limit is put, in nanoseconds: a day.
const AHEAD: u64 = 24 * 3600 * 1_000_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Series {
    base: u64,
    start: i64,
    /// 0: none was ever handed out.
    limit: u64,
    /// No stamp beyond this counts: in a read-only mount, which cannot make a limit durable.
    most: i64,
}

impl Series {
    /// The series of a mount with this number that opens at `now`, by the words of the newest record.
    fn open(words: [u64; USER_WORDS], mount: u64, now: i64, read_only: bool) -> Series {
        let [base, start, limit, ended, ..] = words;
        let start = start as i64;
        let fresh = now.saturating_sub(1);
        let newest = start.saturating_add_unsigned(limit.saturating_sub(base).saturating_sub(1));
        let ended = ended.checked_add(1) == Some(mount) && newest <= now;
        match limit {
            // Below anything that a mount which can change something begins with.
            0 if read_only => Series::constant(1),
            0 => Series::new(now.max(1) as u64, fresh, 0),
            _ if ended || planted(Canary::CookiesGoOn) => Series {
                most: if read_only { newest } else { i64::MAX },
                ..Series::new(base, start, limit)
            },
            _ if read_only => Series::constant(limit),
            _ => Series::new(limit, fresh, limit),
        }
    }

    fn new(base: u64, start: i64, limit: u64) -> Series {
        let most = i64::MAX;
        Series {
            base,
            start,
            limit,
            most,
        }
    }

    /// Every inode has this one.
    fn constant(cookie: u64) -> Series {
        Series {
            most: i64::MIN,
            ..Series::new(cookie, 0, cookie)
        }
    }

    fn cookie(&self, ctime: i64, floor: i64) -> u64 {
        let counts = self.start < ctime && ctime <= floor.min(self.most);
        let ahead = match counts {
            true => ctime.abs_diff(self.start),
            false => 0,
        };
        // Some hundred years, or as many thousand crashes, from now.
        self.base.saturating_add(ahead)
    }

    fn words(&self, ended: u64) -> [u64; USER_WORDS] {
        let mut words = [0; USER_WORDS];
        words[..4].copy_from_slice(&[self.base, self.start as u64, self.limit, ended]);
        words
    }
}

#[derive(Debug)]
pub(crate) struct Cookies(Mutex<Series>);

impl Cookies {
    pub fn open(store: &Store<FsNode>, times: &Times) -> Cookies {
        let (words, mount) = (store.user_words(), store.mount_number());
        let series = Series::open(words, mount, times.floor(), store.read_only());
        Cookies(Mutex::new(rank::COOKIES, series))
    }

    fn hand_out(&self, store: &Store<FsNode>, ctime: Timestamp, floor: i64) -> Result<u64, Error> {
        let mut series = self.0.lock();
        let cookie = series.cookie(ctime.ns(), floor);
        // Of a store that has failed the checkpoint tells.
        if cookie >= series.limit && !store.options().read_only {
            let ahead = Series {
                limit: cookie.saturating_add(AHEAD),
                ..*series
            };
            store.set_user_words(ahead.words(0));
            store.checkpoint()?;
            *series = ahead;
        }
        Ok(cookie)
    }

    /// All content is written back and all times are logged, and no operation is left: whichever checkpoint comes next has all
    /// changes of which a cookie was handed out (invariant 3).
    pub fn end(&self, store: &Store<FsNode>, floor: i64) {
        let mut series = self.0.lock();
        if series.limit == 0 {
            return;
        }
        // From here on one that is not below this takes a checkpoint that says the mount goes on.
        series.limit = series.cookie(floor, floor).saturating_add(1);
        store.set_user_words(series.words(store.mount_number()));
    }
}

impl FileSystem {
    /// A number that has grown if the inode, or the file's content, changed since it was last asked for: by a
    /// write, or any operation on names or attributes that changes `ctime`. It stays as it is across a clean unmount, and
    /// after a crash it is greater than before, whatever was lost. Reading times and content does not change it.
    ///
    /// The first one asked for after an opening, and then one a day, may wait for a checkpoint.
    ///
    /// # Errors
    /// Those of [`FileSystem::getattr`], and of the checkpoint.
    pub fn change_cookie(&self, ino: Ino) -> Result<u64, Error> {
        let attr = self.getattr(ino)?;
        self.cookies
            .hand_out(&self.store, attr.ctime, self.times.floor())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_700_000_000_000_000_000;

    #[test]
    fn a_clean_end_changes_no_cookie() {
        let first = Series::open([0; USER_WORDS], 5, NOW, false);
        let (old, new) = (NOW - 10, NOW + 77);
        assert_eq!(first.cookie(old, NOW + 100), NOW as u64);
        let (cookie, limit) = (
            first.cookie(new, NOW + 100),
            first.cookie(NOW + 100, NOW + 100) + 1,
        );
        let ended = Series { limit, ..first }.words(5);
        let next = Series::open(ended, 6, NOW + 200, false);
        assert_eq!(next.cookie(new, NOW + 300), cookie);
        assert!(next.cookie(NOW + 201, NOW + 300) >= limit);
        // Another mount came in between, or the clock stepped back: all are beyond the limit.
        for (mount, now) in [(7, NOW + 200), (6, NOW + 50), (6, NOW - 1_000_000)] {
            let next = Series::open(ended, mount, now, false);
            for ctime in [old, new, now, now + 1] {
                assert!(
                    next.cookie(ctime, now + 10) >= limit,
                    "{mount} {now} {ctime}"
                );
            }
            assert!(
                next.cookie(now, now) > next.cookie(now + 500, now),
                "not made here"
            );
        }
    }

    #[test]
    fn a_mount_that_cannot_write_hands_out_nothing_new() {
        let used = Series::new(100, NOW, 100 + AHEAD);
        for words in [used.words(0), used.words(8), [0; USER_WORDS]] {
            let read_only = Series::open(words, 9, NOW + 50, true);
            for ctime in [NOW - 5, NOW + 20, NOW + 70] {
                let cookie = read_only.cookie(ctime, NOW + 100);
                let later = Series::open(words, 10, NOW + 60, false);
                assert!(later.cookie(ctime, NOW + 65) >= cookie);
            }
        }
    }

    #[test]
    fn words_of_any_kind_are_no_panic() {
        for word in [0, 1, u64::MAX, u64::MAX / 2, i64::MIN as u64] {
            for other in [0, 1, u64::MAX] {
                let series = Series::open([word, other, word, other, 0, 0, 0, 0], 1, NOW, false);
                series.cookie(i64::MIN, i64::MAX);
                series.cookie(i64::MAX, i64::MAX);
            }
        }
    }
}
