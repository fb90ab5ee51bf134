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
