//! `sheaf bench`: what takes the program itself.

use std::path::Path;

use bench::target::{Place, Remedies, SheafMount, Side, Storage};
use tempfile::TempDir;

use crate::untold::can_mount;
use crate::{USAGE, sheaf};

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

/// The file systems that the help of a suite offers.
fn offered(suite: &str) -> Vec<String> {
    let help = sheaf(&["bench", suite, "--help"], &[], &[]).succeeds();
    let help = String::from_utf8_lossy(&help.0.stdout).into_owned();
    let words: Vec<&str> = help.split_whitespace().collect();
    let words = words.join(" ");
    let (_, text) = words.split_once("--against <LIST>").unwrap();
    let (_, list) = text.split_once(": ").unwrap();
    let (list, _) = list.split_once("; or none").unwrap();
    let names = list.split(", ").filter(|name| !name.contains(' '));
    names.map(str::to_owned).collect()
}

/// Two names that were offered were refused.
#[test]
fn whom_the_help_offers_to_compare_with_nobody_refuses() {
    for suite in [
        "array",
        "cache",
        "checkpoint",
        "files",
        "fsync",
        "fxmark",
        "ior",
        "list",
        "mtime",
        "pool",
        "remove",
        "tx",
        "varmail",
        "written",
    ] {
        let offered = offered(suite);
        assert!(offered.len() >= 5, "{suite}: {offered:?}");
        for name in offered {
            // It ends where there is nothing to measure on.
            let nowhere: &[&str] = match suite {
                "checkpoint" => &["--dir", "/no/such/folder"],
                // What it finds needs no device.
                "cache" => &["--parts", "cost", "--device", "/no/such/device"],
                _ => &["--device", "/no/such/device"],
            };
            let ran = sheaf(&["bench", suite, "--against", &name], nowhere, &[]);
            let said = String::from_utf8_lossy(&ran.0.stderr).into_owned();
            let code = ran.0.status.code();
            assert!(
                code.is_some_and(|code| code != 0 && code != USAGE),
                "{suite} {name}: {said}"
            );
        }
    }
}

/// `--loop` was taken, and nothing was on a loop device.
#[test]
fn devices_of_this_process_are_no_loop_devices() {
    for suite in ["fsync", "mtime", "varmail", "array"] {
        let short = &["--seconds", "0.001", "--runs", "1"];
        sheaf(&["bench", suite, "--latency", "1", "--loop"], short, &[]).exits(USAGE);
    }
}

/// One was left out.
#[test]
fn the_help_has_the_transactions_that_are_measured() {
    let help = sheaf(&["bench", "tx", "--help"], &[], &[]).succeeds();
    for (writes, files) in bench::tx::SHAPES {
        let shape = format!("{writes}/{files}");
        assert!(
            String::from_utf8_lossy(&help.0.stdout).contains(&shape),
            "{shape}"
        );
    }
}
