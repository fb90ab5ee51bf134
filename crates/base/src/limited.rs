//! What users can have the daemon say in its log, as often as they like: so much of it a second, and how much was left out.

use std::time::Duration;

use crate::clock::ns_of;
use crate::sync::{Mutex, rank};

/// Messages of one kind in [`EACH`].
pub const MOST: u32 = 10;
const EACH: Duration = Duration::from_secs(1);

/// Messages of one kind.
#[derive(Debug)]
pub struct Limited(Mutex<Said>);

#[derive(Debug)]
struct Said {
    /// When they are counted anew.
    until_ns: u64,
    count: u32,
    left_out: u64,
}

impl Default for Limited {
    fn default() -> Limited {
        Limited::new()
    }
}

impl Limited {
    pub const fn new() -> Limited {
        Limited(Mutex::new(
            rank::LEAF,
            Said {
                until_ns: 0,
                count: 0,
                left_out: 0,
            },
        ))
    }

    /// Whether another one may be said now, and if so, how many were left out before it.
    pub fn may_say(&self, now_ns: u64) -> Option<u64> {
        let mut said = self.0.lock();
        if now_ns >= said.until_ns {
            said.until_ns = now_ns + ns_of(EACH);
            said.count = 0;
        }
        if said.count == MOST {
            said.left_out += 1;
            return None;
        }
        said.count += 1;
        Some(std::mem::take(&mut said.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that read a damaged file in a loop filled the log.
    #[test]
    fn only_so_many_messages_a_second_are_said_and_the_others_are_counted() {
        let limited = Limited::new();
        let second = ns_of(EACH);
        let said = |at: u64| {
            (0..100)
                .filter_map(|_| limited.may_say(at))
                .collect::<Vec<_>>()
        };
        assert_eq!(said(5), [0; MOST as usize]);
        assert_eq!(said(4 + second), []);
        let later = said(5 + second);
        assert_eq!(later.len(), MOST as usize);
        assert_eq!(later.iter().sum::<u64>(), 200 - u64::from(MOST));
        assert_eq!(later[0], 200 - u64::from(MOST), "the next one tells");
    }
}
