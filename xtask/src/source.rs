//! Rules on the source tree: which crate may use which, and what only some may name.

use std::path::{Path, PathBuf};

use crate::{Fallible, process, report::Suite};

/// The layers, lowest first. A crate may use those before it.
const LAYERS: &[&str] = &["base", "format", "device", "engine", "fs"];
/// Crates at the top; only programs may use another of them.
const TOPS: &[&str] = &["mount", "sim", "bench", "heap", "cli", "sqlite"];
/// Nobody uses these.
const PROGRAMS: &[&str] = &["cli", "sqlite"];

/// Of unfinished work; it stands in comments.
const MARK: &str = "FIXME";

/// (text that must not occur, where it may nevertheless, why).
const RESERVED: &[(&str, &[&str], &str)] = &[
    ("std::thread", &["crates/base/"], "use base::thread"),
    ("thread::sleep", &["crates/base/"], "no sleeps"),
    ("std::time::Instant", &["crates/base/"], "use base::clock"),
    ("Instant::now", &["crates/base/"], "use base::clock"),
    ("SystemTime::now", &["crates/base/"], "use base::clock"),
    ("std::sync::Mutex", &["crates/base/"], "use base::sync"),
    ("std::sync::RwLock", &["crates/base/"], "use base::sync"),
    ("std::sync::Condvar", &["crates/base/"], "use base::sync"),
    ("parking_lot", &["crates/base/"], "use base::sync"),
    ("thread_rng", &["crates/base/"], "use base::rng"),
    ("todo!(", &[], "finish it"),
    ("unimplemented!(", &[], "finish it"),
    (MARK, &[], "finish it"),
    ("#[ignore", &[], "tests run or do not exist"),
    ("allow(dead_code", &[], "remove what is not used"),
    (
        "fn can_mount",
        &["crates/cli/tests/commands/untold"],
        "there is one, which notes a test that is skipped",
    ),
    ("allow(clippy::", &[], "heed the lint"),
    (
        "unsafe ",
        &[
            "crates/base/",
            "crates/device/src/uring",
            "crates/device/src/buf",
            "crates/engine/src/cache",
            "crates/engine/src/node/cache",
            "crates/heap/",
            "crates/mount/",
            "crates/sqlite/src/database",
        ],
        "unsafe code has few homes (CONTRIBUTING.md)",
    ),
];

pub fn run(suite: &mut Suite) -> Fallible<()> {
    let root = process::source_dir();
    let crates = root.join("crates");
    for dir in entries(&crates)? {
        let name = dir
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        suite.check(&format!("layer of {name}"), check_manifest(&name, &dir));
    }
    let mut files = Vec::new();
    rust_files(&crates, &mut files)?;
    for &(word, homes, remedy) in RESERVED {
        suite.check(
            &format!("only its home names `{word}`"),
            check_word(&root, &files, word, homes, remedy),
        );
    }
    Ok(())
}

/// The layers that a crate's manifest names and may not.
fn check_manifest(name: &str, dir: &Path) -> Fallible<()> {
    let path = dir.join("Cargo.toml");
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let manifest: toml::Table =
        toml::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?;
    for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
        let Some(used) = manifest.get(section).and_then(|s| s.as_table()) else {
            continue;
        };
        for dependency in used.keys() {
            let dependency = dependency.strip_prefix("sheaf-").unwrap_or(dependency);
            if !may_use(name, dependency) {
                return Err(format!("{name} must not use {dependency}"));
            }
        }
    }
    Ok(())
}

fn may_use(user: &str, used: &str) -> bool {
    let layer = |name: &str| LAYERS.iter().position(|&l| l == name);
    match (layer(user), layer(used), TOPS.contains(&used)) {
        (Some(user), Some(used), _) => used < user,
        (Some(_), None, used_is_top) => !used_is_top,
        (None, Some(_), _) => TOPS.contains(&user),
        (None, None, used_is_top) => {
            !used_is_top || PROGRAMS.contains(&user) && !PROGRAMS.contains(&used)
        }
    }
}

fn check_word(
    root: &Path,
    files: &[PathBuf],
    word: &str,
    homes: &[&str],
    remedy: &str,
) -> Fallible<()> {
    let mut found = Vec::new();
    for file in files {
        let name = file.strip_prefix(root).unwrap_or(file).to_string_lossy();
        if homes.iter().any(|home| name.starts_with(home)) {
            continue;
        }
        let text = std::fs::read_to_string(file).map_err(|e| format!("{name}: {e}"))?;
        for (number, line) in text.lines().enumerate() {
            if names(line, word) {
                found.push(format!("{name}:{}", number + 1));
            }
        }
    }
    match found.is_empty() {
        true => Ok(()),
        false => Err(format!("{remedy}: {}", found.join(" "))),
    }
}

/// Whether a line names a word that code must not; a comment may name what it is about.
fn names(line: &str, word: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    code.contains(word) || word == MARK && line.contains(word)
}

fn entries(dir: &Path) -> Fallible<Vec<PathBuf>> {
    let mut found = std::fs::read_dir(dir)
        .and_then(|entries| {
            entries
                .map(|e| e.map(|e| e.path()))
                .collect::<Result<Vec<_>, _>>()
        })
        .map_err(|e| format!("{}: {e}", dir.display()))?;
    found.sort();
    Ok(found)
}

fn rust_files(dir: &Path, found: &mut Vec<PathBuf>) -> Fallible<()> {
    for path in entries(dir)? {
        if path.is_dir() {
            rust_files(&path, found)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It was looked for where nobody writes it.
    #[test]
    fn unfinished_work_is_found_in_comments() {
        assert!(names("    // FIXME: what if it fails?", MARK));
        assert!(names("    let a = 1; /* FIXME */", MARK));
        assert!(names("    todo!() // later", "todo!("));
        assert!(!names("    // No todo!() here.", "todo!("));
        assert!(!names("    let a = 1; // fix", MARK));
    }

    #[test]
    fn arrows_point_one_way() {
        assert!(may_use("engine", "device"));
        assert!(may_use("cli", "mount"));
        assert!(may_use("mount", "fs"));
        assert!(may_use("fs", "libc"));
        assert!(!may_use("device", "engine"));
        assert!(!may_use("fs", "mount"));
        assert!(!may_use("mount", "cli"));
        assert!(may_use("bench", "fs"));
        assert!(may_use("cli", "bench"));
        assert!(!may_use("bench", "mount"));
        assert!(!may_use("fs", "bench"));
        assert!(may_use("sqlite", "mount"));
        assert!(!may_use("cli", "sqlite"));
        assert!(!may_use("base", "format"));
    }
}
