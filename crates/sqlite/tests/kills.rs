//! SQLite on a mount is killed, and the daemon below it; see `sqlite::kills`.
//!
//! Needs /dev/fuse and root, or `fusermount3`; without them each test says so and passes.

use std::path::Path;

use sqlite::kills;

#[test]
fn no_committed_row_is_lost_and_no_journal_is_made() {
    if let Some(missing) = base::missing_for_mounts() {
        return base::skip(missing);
    }
    let folder = tempfile::tempdir().unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_sheaf-sqlite"));
    let outcome = kills::run(program, folder.path(), 12, 1).unwrap();
    assert_eq!(outcome.runs, 12);
    // Each run compares these; of a daemon that is killed the last commits are told to nobody.
    assert!(outcome.commits > 0 && outcome.rows > 0);
}
