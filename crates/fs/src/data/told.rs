//! What users can have the log told of data that cannot be written, as often as they like: so much of each kind a second (of each file the latched failure tells).

use base::limited::Limited;

pub(super) struct Told {
    /// A batch of a file's failed.
    pub failed: Limited,
    /// Whoever had it written goes on.
    pub passed: Limited,
    /// What a file had unwritten is given up.
    pub given_up: Limited,
    /// What was written past the cache is lost.
    pub lost: Limited,
    /// A write goes through the cache.
    pub through_cache: Limited,
}

impl Told {
    pub const fn new() -> Told {
        Told {
            failed: Limited::new(),
            passed: Limited::new(),
            given_up: Limited::new(),
            lost: Limited::new(),
            through_cache: Limited::new(),
        }
    }
}
