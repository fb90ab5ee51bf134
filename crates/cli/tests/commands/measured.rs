//! `sheaf bench`: what takes the program itself.

use std::path::Path;

use bench::target::{Place, Remedies, SheafMount, Side, Storage};
use tempfile::TempDir;

use crate::untold::can_mount;

/// The kernel kept it from the daemon: nothing was committed before a window, and what a commit takes was in no figure.
#[test]
fn a_sync_reaches_the_daemon_of_a_mount_on_image_files() {
    if !can_mount() {
        return;
    }
    let home = TempDir::new().unwrap();
    let storage = Storage::Dir(home.path().to_owned());
    let place = Place::new(&storage, 256 << 20, true, Remedies::less("--pool")).unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_sheaf"));
    // Nothing is committed by itself.
    let options = ["commit=3600,checkpoint=3600".to_owned()];
    let mount = SheafMount::make(program, &place, &options).unwrap();
    let side = mount.side().unwrap();
    for number in 0..100 {
        side.create(&side.root(), &format!("file{number}")).unwrap();
    }
    let commits = || mount.metric("sheaf_commit_seconds_count", None).unwrap();
    let before = commits();
    side.sync().unwrap();
    assert!(commits() > before);
    drop(side);
    mount.close().unwrap();
}
