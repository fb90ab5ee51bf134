//! stress-ng, fio with verification, and dbench: Debian's packages, short runs.

use std::process::Command;
use std::time::Duration;

use super::Context;
use crate::report::Suite;
use crate::world::World;
use crate::{Fallible, process};

/// Each stressor of the class `filesystem`, one after the other, results verified.
pub fn stress_ng(context: &Context, world: &mut World, suite: &mut Suite) -> Fallible<()> {
    let mut list = Command::new("stress-ng");
    list.args(["--class", "filesystem?"]);
    let listed = process::run("stress-list", &mut list, Duration::from_secs(20))?.output;
    let stressors = listed
        .split_once("stressors:")
        .map(|(_, names)| names.split_whitespace().collect::<Vec<_>>())
        .filter(|names| names.len() > 20)
        .ok_or_else(|| format!("stress-ng lists no stressors: {listed}"))?;
    for name in stressors {
        if let Some(reason) = context.exclusions.reason("stress", name) {
            suite.exclude(name, reason);
            continue;
        }
        let mut command = Command::new("stress-ng");
        command
            .args(["--seed", "7", "--verify", "--timeout", "1s"])
            .args(["--hdd-bytes", "64M", "--iomix-bytes", "128M"])
            .args(["--fallocate-bytes", "64M", "--copy-file-bytes", "128M"])
            .arg("--temp-path")
            .arg(&world.mnt)
            .args([&format!("--{name}"), "1"]);
        let log = format!("stress-{name}");
        let outcome = process::run(&log, &mut command, Duration::from_secs(90))?;
        let passed = outcome.check("stress-ng");
        suite.check(name, passed.and_then(|()| whole(&outcome.output)));
    }
    Ok(())
}

/// What stress-ng says where a stressor did not do what it is for; by its exit status it is a success then.
const LEFT_OUT: [&str; 4] = [
    "skipping",
    "skipped",
    "aborted early",
    "No stress workers invoked",
];

/// A stressor that skips itself, or a part of what it does, has not passed.
fn whole(output: &str) -> Fallible<()> {
    // Newer versions always say how many were skipped.
    let none = |line: &str| line.ends_with("skipped: 0");
    let left_out = |line: &str| LEFT_OUT.iter().any(|words| line.contains(words));
    match output.lines().find(|line| left_out(line) && !none(line)) {
        Some(line) => Err(format!("left out: {line}")),
        None if output.contains(" successful run completed") => Ok(()),
        None => Err(format!("no run is told of\n{}", process::tail(output, 30))),
    }
}

/// (name, options): every way in which fio can write and read back.
const FIO_JOBS: &[(&str, &str)] = &[
    (
        "psync",
        "--ioengine=psync --rw=randwrite --bsrange=512-64k --fsync=64",
    ),
    (
        "psync-seq",
        "--ioengine=psync --rw=write --bs=1m --end_fsync=1",
    ),
    (
        "direct",
        "--ioengine=psync --rw=randwrite --bs=4k --direct=1",
    ),
    (
        "libaio",
        "--ioengine=libaio --rw=randwrite --bs=4k --direct=1 --iodepth=16",
    ),
    ("mmap", "--ioengine=mmap --rw=randwrite --bs=4k"),
    (
        "io_uring",
        "--ioengine=io_uring --rw=randwrite --bs=16k --iodepth=16",
    ),
    (
        "io_uring-direct",
        "--ioengine=io_uring --rw=randrw --bs=8k --direct=1 --iodepth=8",
    ),
    (
        "sync",
        "--ioengine=sync --rw=randwrite --bs=4k --sync=1 --io_size=4m",
    ),
];

pub fn fio(_: &Context, world: &mut World, suite: &mut Suite) -> Fallible<()> {
    for (name, options) in FIO_JOBS {
        let mut command = Command::new("fio");
        command
            .arg(format!("--name={name}"))
            .arg(format!("--directory={}", world.mnt.display()))
            .args(["--size=32m", "--numjobs=2", "--group_reporting"])
            .args([
                "--verify=crc32c",
                "--verify_fatal=1",
                "--verify_state_save=0",
            ])
            .args(["--do_verify=1", "--randseed=7", "--unlink=1"])
            .args(options.split(' '))
            .current_dir(world.side_dir());
        let log = format!("fio-{name}");
        let outcome = process::run(&log, &mut command, Duration::from_secs(180))?;
        suite.check(name, outcome.check("fio"));
    }
    Ok(())
}

pub fn dbench(_: &Context, world: &mut World, suite: &mut Suite) -> Fallible<()> {
    for (name, options) in [("dbench", "-t 10 4"), ("dbench -s", "-s -t 10 2")] {
        let mut command = Command::new("dbench");
        command.arg("-D").arg(&world.mnt).args(options.split(' '));
        let outcome = process::run("dbench", &mut command, Duration::from_secs(180))?;
        let result = outcome.check("dbench").and_then(|()| {
            match outcome.output.contains("Throughput") && !outcome.output.contains("ERROR") {
                true => Ok(()),
                false => Err(process::tail(&outcome.output, 20)),
            }
        });
        suite.check(name, result);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `fiemap`, which FUSE does not have, was among what had passed.
    #[test]
    fn a_stressor_that_skips_itself_has_not_passed() {
        let said = |words: &str| {
            let line = |text: &str| format!("stress-ng: info:  [838] {text}\n");
            let ended = line("successful run completed in 1.22s");
            whole(&(line("dispatching hogs: 1 verity") + &line(words) + &ended))
        };
        assert_eq!(said("verity: 42.00 rounds"), Ok(()));
        assert_eq!(said("skipped: 0"), Ok(()));
        for words in [
            "fiemap: FS_IOC_FIEMAP not supported on the file system, skipping stressor, filesystem type: fuse",
            "verity: verity is not supported on the file system or by the kernel, skipping stress test",
            "chattr: chattr not supported on filesystem, skipping stressor",
            "xattr stressor will be skipped, filesystem does not support xattr",
            "skipped: 1: verity (1)",
            "process [16065] (binderfs) aborted early, out of system resources",
        ] {
            let error = said(words).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        let none =
            "stress-ng: error: [838] No stress workers invoked (one or more were unsupported)\n";
        assert!(whole(none).unwrap_err().contains("No stress workers"));
        assert!(whole("").unwrap_err().contains("no run is told of"));
    }
}
