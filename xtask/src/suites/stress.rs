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
        suite.check(name, outcome.check("stress-ng"));
    }
    Ok(())
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
