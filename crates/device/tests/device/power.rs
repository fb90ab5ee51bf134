//! The simulated device keeps its fault model.

use crate::fixture::noise;
use base::rng::Rng;
use device::sim::{PowerSwitch, SECTOR, SimDevice, Survival, Times};
use device::{BlockDevice, Durability};
use proptest::prelude::*;
use std::sync::Arc;

const SIZE: u64 = 64 * 512;

fn read(device: &SimDevice) -> Vec<u8> {
    let mut bytes = vec![0; device.bytes() as usize];
    device.peek(0, &mut bytes);
    bytes
}

#[derive(Clone, Debug)]
enum Step {
    Write {
        sector: u64,
        count: u64,
        durable: bool,
    },
    Flush,
    FailedFlush,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let write = (0..60u64, 1..5u64, any::<bool>());
    let step = prop_oneof![
        6 => write.prop_map(|(sector, count, durable)| Step::Write { sector, count, durable }),
        1 => Just(Step::Flush),
        1 => Just(Step::FailedFlush),
    ];
    prop::collection::vec(step, 1..40)
}

/// What the model allows for one sector: the writes' numbers that a reader may find after a
/// cut, 0 for the initial zeros; and the one a reader finds now.
#[derive(Clone, Debug)]
struct Allowed {
    after_cut: Vec<u8>,
    now: u8,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_cut_loses_or_tears_only_what_was_volatile(
        steps in steps(),
        seed in any::<u64>(),
        forces_writes in any::<bool>(),
    ) {
        let mut device = SimDevice::new(SIZE, seed);
        if !forces_writes {
            device = device.without_forced_writes();
        }
        let mut allowed = vec![Allowed { after_cut: vec![0], now: 0 }; (SIZE / 512) as usize];
        let mut number = 0u8;
        let mut failed = false;
        for step in steps {
            match step {
                Step::Write { sector, count, durable } => {
                    number += 1;
                    let bytes = vec![number; count as usize * SECTOR];
                    let durability =
                        if durable { Durability::Durable } else { Durability::Volatile };
                    device.write(sector * 512, &bytes, durability).unwrap();
                    for a in &mut allowed[sector as usize..(sector + count) as usize] {
                        a.now = number;
                        if durable {
                            a.after_cut = vec![number];
                        } else {
                            a.after_cut.push(number);
                        }
                    }
                }
                Step::Flush => {
                    device.flush().unwrap();
                    // After a failed flush a good one promises nothing for what was before.
                    if !failed {
                        allowed.iter_mut().for_each(|a| a.after_cut = vec![a.now]);
                    }
                }
                Step::FailedFlush => {
                    failed = true;
                    device.fail_flushes(Times::Next(1));
                    prop_assert!(device.flush().is_err());
                }
            }
        }
        for (bytes, a) in read(&device).chunks(SECTOR).zip(&allowed) {
            prop_assert!(bytes.iter().all(|&b| b == a.now));
        }
        let after = device.restart(&mut Rng::new(seed));
        for (bytes, a) in read(&after).chunks(SECTOR).zip(&allowed) {
            let found = bytes[0];
            prop_assert!(bytes.iter().all(|&b| b == found), "a sector is torn");
            prop_assert!(a.after_cut.contains(&found), "{} not in {:?}", found, a);
        }
        prop_assert_eq!(after.volatile_bytes(), 0);
    }
}

/// The flush behind it is one as others are: it may fail, and with it goes what others have written.
#[test]
fn a_durable_write_that_is_not_forced_is_a_write_and_a_flush() {
    let lost = (0..20).any(|seed| {
        let device = SimDevice::new(SIZE, seed).without_forced_writes();
        device.write(0, &[1; 512], Durability::Volatile).unwrap();
        device.fail_flushes(Times::Next(1));
        device
            .write(512, &[2; 512], Durability::Durable)
            .unwrap_err();
        device.write(1024, &[3; 512], Durability::Durable).unwrap();
        device.flush().unwrap();
        let bytes = read(&device.restart_with(Survival::None, &mut Rng::new(1)));
        assert_eq!(bytes[1024], 3);
        bytes[0] == 0
    });
    assert!(lost);
}

#[test]
fn the_classes_of_survival_all_occur() {
    let written = noise(1, 16 * SECTOR);
    let outcome = |survival, seed| {
        let device = SimDevice::new(SIZE, 1);
        device.write(0, &written, Durability::Volatile).unwrap();
        let after = device.restart_with(survival, &mut Rng::new(seed));
        let bytes = read(&after);
        let kept: Vec<bool> = bytes
            .chunks(SECTOR)
            .zip(written.chunks(SECTOR))
            .map(|(found, wrote)| found == wrote)
            .collect();
        kept
    };
    let is_prefix = |kept: &[bool]| kept.is_sorted_by(|a, b| a >= b);
    assert!(outcome(Survival::None, 1).iter().all(|k| !k));
    assert!(outcome(Survival::All, 1).iter().all(|k| *k));
    let prefixes: Vec<_> = (0..20).map(|s| outcome(Survival::Prefix, s)).collect();
    assert!(prefixes.iter().all(|k| is_prefix(k)));
    assert!(prefixes.iter().any(|k| k != &prefixes[0]));
    assert!((0..20).any(|s| !is_prefix(&outcome(Survival::Subset, s))));
}

#[test]
fn writes_are_reordered() {
    let reordered = (0..200).any(|seed| {
        let device = SimDevice::new(SIZE, 1);
        device.write(0, &[1; 512], Durability::Volatile).unwrap();
        device.write(512, &[2; 512], Durability::Volatile).unwrap();
        let bytes = read(&device.restart(&mut Rng::new(seed)));
        bytes[0] == 0 && bytes[512] == 2
    });
    assert!(reordered);
}

#[test]
fn the_write_in_flight_at_the_cut_fails_and_may_be_there_in_part() {
    let (mut whole, mut none, mut part) = (0, 0, 0);
    for seed in 0..200 {
        let switch = PowerSwitch::new();
        let a = SimDevice::on_switch(SIZE, 1, &switch);
        let b = SimDevice::on_switch(SIZE, 2, &switch);
        switch.cut_after(2);
        a.write(0, &[1; 512], Durability::Durable).unwrap();
        b.write(0, &[1; 512], Durability::Durable).unwrap();
        assert!(a.write(0, &[2; 4096], Durability::Durable).is_err());
        assert!(switch.is_cut());
        assert!(b.read(0, &mut [0; 512]).is_err());
        assert!(b.flush().is_err());
        switch.restore();
        let mut rng = Rng::new(seed);
        let (a2, b2) = (a.restart(&mut rng), b.restart(&mut rng));
        assert_eq!(read(&b2)[..512], [1; 512]);
        let bytes = read(&a2);
        match bytes[..4096].chunks(512).filter(|s| s[0] == 2).count() {
            8 => whole += 1,
            0 => none += 1,
            _ => part += 1,
        }
        // The device of before the cut is out of service.
        assert!(a.write(0, &[3; 512], Durability::Durable).is_err());
        a2.write(0, &[3; 512], Durability::Durable).unwrap();
    }
    assert!(whole > 0 && none > 0 && part > 0, "{whole} {none} {part}");
}

#[test]
fn a_flush_in_flight_at_the_cut_promises_nothing() {
    let lost = (0..50).any(|seed| {
        let device = SimDevice::new(SIZE, 1);
        device.write(0, &[1; 512], Durability::Volatile).unwrap();
        device.switch().cut_after(0);
        assert!(device.flush().is_err());
        device.switch().restore();
        read(&device.restart(&mut Rng::new(seed)))[0] == 0
    });
    assert!(lost);
}

#[test]
fn injected_faults_strike_where_and_as_often_as_told() {
    let device = SimDevice::new(SIZE, 1);
    let mut buf = [0; 512];
    device.fail_reads(Times::Next(2), Some(512..1024));
    device.read(0, &mut buf).unwrap();
    assert!(device.read(512, &mut buf).is_err());
    assert!(device.read(0, &mut [0; 4096]).is_err());
    device.read(512, &mut buf).unwrap();
    device.fail_writes(Times::Always, None);
    for _ in 0..5 {
        assert!(device.write(0, &[1; 512], Durability::Durable).is_err());
    }
    device.heal();
    device.write(0, &[1; 512], Durability::Durable).unwrap();
    // A failed write is written in part, in whole sectors.
    device.fail_writes(Times::Next(1), None);
    assert!(device.write(0, &[2; 8192], Durability::Volatile).is_err());
    let sectors: Vec<u8> = read(&device)[..8192].chunks(512).map(|s| s[0]).collect();
    assert!(sectors.contains(&2) && sectors.iter().any(|&b| b != 2));
    assert!(device.write(100, &[1; 512], Durability::Volatile).is_err());
    assert!(device.read(SIZE, &mut buf).is_err());
    assert_eq!(device.io_count(), 13);
}

#[test]
fn a_good_flush_after_a_failed_one_may_lose_what_came_before_both() {
    let (mut kept, mut lost) = (0, 0);
    for seed in 0..50 {
        let device = SimDevice::new(SIZE, seed);
        device.write(0, &[1; 512], Durability::Volatile).unwrap();
        device.fail_flushes(Times::Next(1));
        assert!(device.flush().is_err());
        device.write(512, &[2; 512], Durability::Volatile).unwrap();
        device.flush().unwrap();
        let bytes = read(&device.restart_with(Survival::None, &mut Rng::new(seed)));
        assert_eq!(bytes[512], 2);
        match bytes[0] {
            1 => kept += 1,
            _ => lost += 1,
        }
    }
    assert!(kept > 0 && lost > 0, "{kept} {lost}");
}

#[test]
fn bit_rot_is_seen_now_and_after_a_cut() {
    let device = SimDevice::new(SIZE, 1);
    device.write(0, &[7; 4096], Durability::Volatile).unwrap();
    device.corrupt(1000, 8, &mut Rng::new(5));
    let now = read(&device);
    assert_ne!(now[..4096], [7; 4096]);
    assert!(now[..1000].iter().all(|&b| b == 7));
    assert!(now[1008..4096].iter().all(|&b| b == 7));
    device.flush().unwrap();
    assert_eq!(read(&device.restart(&mut Rng::new(1))), now);
}

#[test]
fn a_killed_process_finds_everything_it_wrote() {
    let device = SimDevice::new(SIZE, 1);
    device.write(0, &[7; 4096], Durability::Volatile).unwrap();
    let again = device.reopen();
    assert_eq!(read(&again)[..4096], [7; 4096]);
    assert_eq!(again.volatile_bytes(), 4096);
    assert!(device.flush().is_err());
    let copy = again.clone_state(2);
    assert_eq!(read(&copy)[..4096], [0; 4096], "a copy has what is durable");
}

#[test]
fn the_same_seeds_give_the_same_history() {
    let run = || {
        let device = SimDevice::new(1 << 30, 42);
        let mut rng = Rng::new(7);
        for _ in 0..300 {
            let at = rng.below(1 << 18) * 4096;
            let data = noise(rng.next_u64(), 512 * rng.range(1, 20) as usize);
            if rng.one_in(30) {
                device.fail_writes(Times::Next(1), None);
            }
            let durability = match rng.one_in(4) {
                true => Durability::Durable,
                false => Durability::Volatile,
            };
            let wrote = device.write(at, &data, durability);
            if wrote.is_err() || rng.one_in(20) {
                device.flush().unwrap();
            }
            device.discard(rng.below(1 << 18) * 4096, 4096).unwrap();
        }
        let after: Arc<SimDevice> = device.restart(&mut rng);
        (after.snapshot(), rng.next_u64())
    };
    assert!(run() == run());
}

#[test]
fn a_fork_is_the_device_as_it_runs_and_lives_its_own_life() {
    let device = SimDevice::new(1 << 20, 1);
    device.write(0, &[1; 4096], Durability::Volatile).unwrap();
    let fork = device.fork(&PowerSwitch::new());
    assert_eq!(fork.volatile_bytes(), 4096);
    assert_eq!(fork.contents_hash(), device.contents_hash());
    fork.write(4096, &[2; 4096], Durability::Volatile).unwrap();
    let mut byte = [9];
    device.peek(4096, &mut byte);
    assert_eq!(byte, [0]);
    let (lost, kept) = (
        fork.restart_with(Survival::None, &mut Rng::new(1)),
        device.restart_with(Survival::All, &mut Rng::new(1)),
    );
    assert_eq!(
        lost.contents_hash(),
        SimDevice::new(1 << 20, 7).contents_hash()
    );
    assert_ne!(kept.contents_hash(), lost.contents_hash());
}

/// Of 4,096 bytes a device may read what it is not asked to write, and write all of it.
#[test]
fn a_cut_damages_what_shares_a_physical_block_with_what_was_in_flight() {
    let hurt = |physical, second: u64, survival, seed| {
        let device = SimDevice::new(SIZE, 1).with_physical_block(physical);
        let (first, then) = (noise(1, 3 * SECTOR), noise(2, SECTOR));
        device.write(0, &first, Durability::Durable).unwrap();
        // Durable, but the power goes.
        device.switch().cut_after(0);
        let written = device.write(second, &then, Durability::Durable);
        written.unwrap_err();
        device.switch().restore();
        let bytes = read(&device.restart_with(survival, &mut Rng::new(seed)));
        bytes[..3 * SECTOR] != first
    };
    let any = |physical, second, survival| (0..20).any(|s| hurt(physical, second, survival, s));
    for torn in [Survival::Subset, Survival::Prefix] {
        assert!(any(4096, 1536, torn));
        assert!(!any(512, 1536, torn));
        assert!(!any(4096, 4096, torn));
    }
    assert!(!any(4096, 1536, Survival::None));
    assert!(!any(4096, 1536, Survival::All));
}
