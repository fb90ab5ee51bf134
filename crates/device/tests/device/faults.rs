//! Everything but power cuts that a simulated device does wrong.

use base::clock::Clock;
use base::rng::Rng;
use device::sim::{FaultKind, Keep, Odds, PowerSwitch, SECTOR, SimDevice, Survival, Times};
use device::{BlockDevice, Durability, Operation, Request};
use std::collections::BTreeSet;
use std::time::Duration;

const PAGE: u64 = 4096;

/// A device whose first pages hold their numbers, durably.
fn numbered(seed: u64) -> std::sync::Arc<SimDevice> {
    let device = SimDevice::new(1 << 20, seed);
    for page in 0..16 {
        let bytes = [page as u8 + 1; PAGE as usize];
        device.poke(page * PAGE, &bytes);
    }
    device
}

fn first_byte(device: &SimDevice, page: u64) -> u8 {
    let mut byte = [0];
    device.peek(page * PAGE, &mut byte);
    byte[0]
}

#[test]
fn a_lost_write_is_reported_as_good_and_leaves_the_old_bytes() {
    let device = numbered(1);
    device.lose_writes(Times::Next(1), Some(0..PAGE));
    device.write(PAGE, &[9; 4096], Durability::Durable).unwrap();
    device.write(0, &[9; 4096], Durability::Durable).unwrap();
    assert_eq!((first_byte(&device, 0), first_byte(&device, 1)), (1, 9));
    assert_eq!(device.struck().len(), 1);
    assert_eq!(device.struck()[0].kind, FaultKind::Lost);
    device.write(0, &[9; 4096], Durability::Durable).unwrap();
    assert_eq!(first_byte(&device, 0), 9);
}

#[test]
fn a_misdirected_write_lands_on_other_data() {
    for seed in 0..20 {
        let device = numbered(seed);
        device.misdirect_writes(Times::Next(1), None);
        device.write(0, &[99; 4096], Durability::Volatile).unwrap();
        assert_eq!(first_byte(&device, 0), 1);
        let struck = device.struck();
        assert_eq!(struck[0].kind, FaultKind::Lost);
        assert_eq!(struck[1].kind, FaultKind::Overwritten);
        assert_eq!(first_byte(&device, struck[1].range.start / PAGE), 99);
    }
}

#[test]
fn bits_rot_where_there_is_data() {
    let device = SimDevice::new(1 << 20, 1);
    let mut rng = Rng::new(5);
    assert_eq!(device.rot(&mut rng), None);
    device.poke(8 * PAGE, &[7; 512]);
    let before = device.contents_hash();
    assert_eq!(device.rot(&mut rng), Some(8 * PAGE..8 * PAGE + 512));
    assert_ne!(device.contents_hash(), before);
}

#[test]
fn a_latent_error_stays_until_its_sector_is_written() {
    let device = numbered(3);
    let odds = Odds {
        latent_error: 1,
        ..Odds::default()
    };
    let mut page = [0; 4096];
    device.set_odds(odds);
    assert!(device.read(0, &mut page).is_err());
    device.set_odds(Odds::default());
    assert!(device.read(0, &mut page).is_err());
    assert!(device.read(PAGE, &mut page).is_ok());
    device.write(0, &page, Durability::Volatile).unwrap();
    assert!(device.read(0, &mut page).is_ok());
}

#[test]
fn faults_strike_about_as_often_as_asked() {
    let device = numbered(11);
    let odds = Odds {
        read_error: 4,
        write_error: 4,
        flush_error: 4,
        ..Odds::default()
    };
    device.set_odds(odds);
    let mut page = [0; 4096];
    let failed = |times: &mut dyn FnMut() -> bool| (0..400).filter(|_| times()).count();
    let counts = [
        failed(&mut || device.read(0, &mut page).is_err()),
        failed(&mut || device.write(0, &[1; 4096], Durability::Volatile).is_err()),
        failed(&mut || device.flush().is_err()),
    ];
    assert!(counts.iter().all(|c| (60..140).contains(c)), "{counts:?}");
    device.heal();
    assert!(device.flush().is_ok());
}

#[test]
fn a_stuck_device_answers_when_it_is_released() {
    let device = numbered(4);
    device.stick();
    let answers = base::thread::parallel(2, |i| {
        if i == 0 {
            while device.waiting() == 0 {
                base::thread::yield_now();
            }
            device.release();
            return 0;
        }
        let mut page = [0; 4096];
        device.read(0, &mut page).unwrap();
        page[0]
    });
    assert_eq!(answers[1], 1);
}

#[test]
fn a_device_that_is_gone_fails_everything() {
    let device = numbered(5);
    device.vanish_after(2);
    let mut page = [0; 4096];
    device.read(0, &mut page).unwrap();
    device.write(0, &page, Durability::Volatile).unwrap();
    let gone = |result: std::io::Result<()>| {
        let error = result.expect_err("the device is gone");
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
    };
    gone(device.flush());
    gone(device.read(0, &mut page));
    gone(device.discard(0, 4096));
    // What it held when it went is there again after the machine restarts.
    let back = device.restart_with(Survival::None, &mut Rng::new(1));
    assert_eq!(first_byte(&back, 0), 1);
}

#[test]
fn a_slow_device_takes_its_time() {
    let clock = Clock::manual(0);
    let device = numbered(6);
    device.slow_down(Duration::from_millis(30), Some(clock.clone()));
    device.flush().unwrap();
    device.flush().unwrap();
    assert_eq!(clock.monotonic_ns(), 60_000_000);
}

#[test]
fn one_run_yields_many_crash_states() {
    let device = numbered(7);
    let switch = PowerSwitch::new();
    let mut rng = Rng::new(1);
    let mut states = BTreeSet::from([device.contents_hash()]);
    for page in 0..4 {
        let bytes = [page as u8 + 50; PAGE as usize];
        device
            .write(page * PAGE, &bytes, Durability::Volatile)
            .unwrap();
        for _ in 0..50 {
            let crashed = device.fork_crash(Survival::Mixed, &mut rng, &switch);
            assert_eq!(crashed.volatile_bytes(), 0);
            states.insert(crashed.contents_hash());
        }
    }
    assert!(states.len() > 100, "{} states", states.len());
    assert_eq!(device.cached_writes().len(), 4);
    // The original lost nothing by it.
    assert_eq!(first_byte(&device, 3), 53);
    let second_only = device.fork_crash_keeping(&switch, |number, range| {
        assert_eq!(range.start, number as u64 * PAGE);
        match number {
            1 => Keep::All,
            2 => Keep::First(1),
            _ => Keep::Nothing,
        }
    });
    let mut pages = [0; 4 * PAGE as usize];
    second_only.peek(0, &mut pages);
    let at = |byte: usize| pages[byte];
    let page = PAGE as usize;
    assert_eq!(
        (at(0), at(page), at(2 * page), at(3 * page)),
        (1, 51, 52, 4)
    );
    assert_eq!(at(2 * page + SECTOR), 3);
}

#[test]
fn a_batch_under_way_may_survive_a_fork_in_part() {
    let device = numbered(8);
    let (one, two) = ([70; 4096], [71; 4096]);
    let write = |offset, buf| Operation::Write {
        offset,
        buf,
        durability: Durability::Durable,
    };
    let mut batch = [
        Request::new(write(0, &one), 0),
        Request::new(write(PAGE, &two), 1),
    ];
    let switch = PowerSwitch::new();
    let during = device.fork_during(&batch, &switch);
    let crashed = during.fork_crash_keeping(&switch, |number, _| match number {
        1 => Keep::All,
        _ => Keep::Nothing,
    });
    assert_eq!((first_byte(&crashed, 0), first_byte(&crashed, 1)), (1, 71));
    device.run(&mut batch, None);
    assert_eq!((first_byte(&device, 0), first_byte(&device, 1)), (70, 71));
}

/// Both copies of a checkpoint record are written in one batch: a cut can tear both.
#[test]
fn a_cut_catches_all_of_a_batch_that_has_not_completed() {
    let switch = PowerSwitch::new();
    let devices = [
        SimDevice::on_switch(1 << 20, 1, &switch),
        SimDevice::on_switch(1 << 20, 2, &switch),
    ];
    switch.cut_after(0);
    let bytes = [5; 4096];
    let write = || Operation::Write {
        offset: 0,
        buf: &bytes,
        durability: Durability::Durable,
    };
    let mut batches = [
        [Request::new(write(), 0), Request::new(Operation::Flush, 1)],
        [Request::new(write(), 0), Request::new(Operation::Flush, 1)],
    ];
    let [first, second] = &mut batches;
    devices[0].run(first, Some(&mut || devices[1].run(second, None)));
    assert!(batches.iter().flatten().all(|r| r.error.is_some()));
    assert!(devices.iter().all(|d| d.volatile_bytes() == 4096));
    // The next batch starts without power.
    assert!(devices[0].write(0, &bytes, Durability::Durable).is_err());
    assert_eq!(devices[0].volatile_bytes(), 4096);
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let run = |seed: u64, byte: u8| {
        let device = SimDevice::new(1 << 20, seed);
        device.set_odds(Odds {
            read_error: 5,
            latent_error: 20,
            write_error: 5,
            flush_error: 3,
            rot: 5,
            misdirected: 5,
            lost: 5,
        });
        let mut rng = Rng::new(9);
        let mut page = [0; 4096];
        for _ in 0..200 {
            // Outcomes are part of the trace.
            let at = rng.below(16) * PAGE;
            let _ = match rng.below(4) {
                0 => device.read(at, &mut page),
                1 => device.flush(),
                _ => device.write(at, &[byte; 4096], Durability::Volatile),
            };
        }
        (device.trace_hash(), device.contents_hash())
    };
    assert_eq!(run(1, 1), run(1, 1));
    assert_ne!(run(1, 1).0, run(2, 1).0);
    assert_ne!(run(1, 1).0, run(1, 2).0);
}

#[test]
fn the_nth_operation_of_several_devices_fails() {
    let switch = PowerSwitch::new();
    let devices = [1, 2].map(|seed| SimDevice::on_switch(1 << 20, seed, &switch));
    switch.fail_after(3, Times::Next(1));
    let outcomes: Vec<bool> = (0..6).map(|i| devices[i % 2].flush().is_ok()).collect();
    assert_eq!(outcomes, [true, true, true, false, true, true]);
    switch.fail_after(1, Times::Always);
    let outcomes: Vec<bool> = (0..6).map(|i| devices[i % 2].flush().is_ok()).collect();
    assert_eq!(outcomes, [true, false, false, false, false, false]);
    switch.restore();
    assert!(devices[0].flush().is_ok());
}
