//! How much memory the control groups of this process let it have (cgroups(7)).

use std::fs;
use std::path::{Component, Path, PathBuf};

/// Where the hierarchies are mounted.
const ROOT: &str = "/sys/fs/cgroup";

/// Bytes of memory that this process may have: the machine's, or fewer, if a control group that it is in has a limit.
pub fn memory_bytes() -> u64 {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limit = memory_limit(Path::new(ROOT), &groups);
    crate::sys::memory_bytes().min(limit.unwrap_or(u64::MAX))
}

/// The least limit of these groups (as `/proc/self/cgroup` names them) and those above. Of version 2 `memory.high` is one, too: beyond it a process
/// hardly gets on. Without a limit version 1 tells one that no machine reaches.
fn memory_limit(root: &Path, groups: &str) -> Option<u64> {
    let mut least: Option<u64> = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let (hierarchy, files): (PathBuf, &[&str]) = match controllers {
            "" => (root.to_owned(), &["memory.max", "memory.high"]),
            list if list.split(',').any(|name| name == "memory") => {
                (root.join("memory"), &["memory.limit_in_bytes"])
            }
            _ => continue,
        };
        // In a container the path may be the host's, which is not there: then the container's group is what is mounted.
        for group in upwards(&hierarchy, path) {
            for file in files {
                let told = fs::read_to_string(group.join(file)).ok();
                let limit = told.and_then(|told| told.trim().parse().ok());
                least = least.into_iter().chain(limit).min();
            }
        }
    }
    least
}

/// The folder of a group, and of each one above it.
fn upwards(hierarchy: &Path, path: &str) -> Vec<PathBuf> {
    let mut group = hierarchy.to_owned();
    let mut all = vec![group.clone()];
    for part in Path::new(path).components() {
        // `..` is what lies above all that this process sees.
        if let Component::Normal(name) = part {
            group.push(name);
            all.push(group.clone());
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A made-up `/sys/fs/cgroup`.
    struct Root(tempfile::TempDir);

    impl Root {
        fn new(files: &[(&str, &str)]) -> Root {
            let root = Root(tempfile::tempdir().unwrap());
            for (path, text) in files {
                let path = root.0.path().join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, format!("{text}\n")).unwrap();
            }
            root
        }

        fn limit(&self, groups: &str) -> Option<u64> {
            memory_limit(self.0.path(), groups)
        }
    }

    /// Only the machine's memory was looked at, a quarter of which was more than a container might have in all.
    #[test]
    fn the_least_limit_of_a_group_and_those_above_counts() {
        let root = Root::new(&[
            ("system.slice/memory.max", "max"),
            ("system.slice/memory.high", "max"),
            ("system.slice/a.service/memory.max", "209715200"),
            ("system.slice/a.service/memory.high", "max"),
            ("system.slice/a.service/inner/memory.max", "900000000"),
            ("system.slice/a.service/inner/memory.high", "150000000"),
        ]);
        assert_eq!(root.limit("0::/system.slice\n"), None);
        assert_eq!(
            root.limit("0::/system.slice/a.service\n"),
            Some(209_715_200)
        );
        let inner = "0::/system.slice/a.service/inner\n";
        assert_eq!(root.limit(inner), Some(150_000_000));
        assert_eq!(root.limit("0::/system.slice/b.service\n"), None);
        assert_eq!(root.limit(""), None);
        assert_eq!(root.limit("0::\nnonsense\n"), None);
    }

    #[test]
    fn within_a_container_its_group_is_the_root() {
        let root = Root::new(&[("memory.max", "209715200"), ("memory.high", "max")]);
        for path in ["/", "/docker/0123", "/../../other"] {
            assert_eq!(root.limit(&format!("0::{path}\n")), Some(209_715_200));
        }
    }

    #[test]
    fn of_version_1_the_memory_controller_is_asked() {
        let root = Root::new(&[
            ("memory/memory.limit_in_bytes", "9223372036854771712"),
            ("memory/docker/memory.limit_in_bytes", "300000000"),
            ("memory/docker/0123/memory.limit_in_bytes", "400000000"),
            ("cpu/docker/0123/memory.limit_in_bytes", "5"),
        ]);
        let groups = "9:name=systemd:/docker/0123\n4:cpu,cpuacct:/docker/0123\n3:memory:/docker/0123\n0::/\n";
        assert_eq!(root.limit(groups), Some(300_000_000));
        let beyond = root.limit("3:memory:/\n");
        assert_eq!(beyond, Some(9_223_372_036_854_771_712));
    }

    #[test]
    fn it_is_no_more_than_the_machine_has() {
        let own = memory_bytes();
        assert!(own > 0 && own <= crate::sys::memory_bytes());
    }
}
