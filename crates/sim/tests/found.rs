//! What the simulator found, each told as a story of its own.

use base::rng::Rng;
use device::sim::Survival;
use sim::drive::Driver;
use sim::op::Op;
use sim::world::{Image, Machine, Shape};

/// Both copies of a checkpoint slot are written at once, so that one power cut tore both. The
/// checkpoint had not happened, the other slot served, and recovery was right; but fsck called
/// the torn slot an error.
#[test]
fn a_cut_in_the_middle_of_the_checkpoint_record_is_no_damage() {
    let image = Image::format(&Shape::small(2)).unwrap();
    let mut driver = Driver::fresh(Machine::new(&image, 1), true).unwrap();
    driver.machine.tap.collect(true);
    driver.run(&Op::Create("foo".into())).unwrap();
    driver.run(&Op::Checkpoint).unwrap();
    let mut rng = Rng::new(1);
    for point in driver.machine.tap.take() {
        for _ in 0..20 {
            let crashed = point.crash(Survival::Subset, &mut rng);
            let machine = Machine::after(&Shape::small(2), crashed, driver.machine.now_ns());
            machine.fsck().unwrap();
        }
    }
}

/// Records that change a file's size went out before its times were set: after a truncate and an
/// fsync, a crash left the new size under the old mtime, and so did a write that was written
/// back before it had ended. Programs that look at mtime took the file for unchanged.
#[test]
fn a_new_size_is_never_durable_under_an_old_mtime() {
    let image = Image::format(&Shape::small(2)).unwrap();
    let mut driver = Driver::fresh(Machine::new(&image, 1), true).unwrap();
    let write = "write foo 0 20000 1".parse().unwrap();
    driver.run(&Op::Create("foo".into())).unwrap();
    driver.run(&write).unwrap();
    driver.run(&Op::Sync).unwrap();
    for size in [5000, 4096, 100] {
        driver.run(&Op::Truncate("foo".into(), size)).unwrap();
        driver.run(&Op::Fsync("foo".into())).unwrap();
        let crashed = driver
            .machine
            .point()
            .crash(Survival::None, &mut Rng::new(1));
        let machine = Machine::after(&Shape::small(2), crashed, driver.machine.now_ns());
        let found = Driver::recover(machine, &driver.oracle).unwrap();
        let shown = |driver: &Driver| {
            let ino = driver.fs().lookup(fs::ROOT, b"foo").unwrap().ino;
            driver.fs().getattr(ino).unwrap().mtime
        };
        assert_eq!(shown(&found), shown(&driver), "cut to {size} bytes");
    }
}
