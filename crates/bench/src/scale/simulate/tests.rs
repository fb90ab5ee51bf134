use super::super::costs::ns;
use super::super::steps::{Job, Named, PRIVATE, Stage};
use super::lines::bit;
use super::*;

/// Costs that are easy to reckon with: one socket, nobody sleeps, nothing is protected.
const PLAIN: Costs = Costs {
    line: ns(100),
    far_line: ns(300),
    socket_cores: 128,
    spin: Time::MAX,
    wake: ns(5_000),
    wake_call: ns(1_000),
    protected_lines: 0,
    fills: 10,
    device_rate: 1e9,
};

fn machine(cpus: usize) -> Machine {
    Machine {
        costs: PLAIN,
        cpus,
        devices: Devices::Modelled,
    }
}

#[test]
fn lines_that_are_asked_for_come_at_once() {
    let trace = trace(2, &[Step::Compute(ns(1))], 3, 1);
    let machine = |fills| Machine {
        costs: Costs {
            fills,
            protected_lines: 2,
            ..PLAIN
        },
        ..machine(2)
    };
    let run = |machine: &Machine, ask: bool| {
        let mut run = Run::new(&trace, machine);
        run.lines.iter_mut().for_each(|line| line.sharers = bit(1));
        run.locks[0].fresh = bit(1);
        let mut now = 0;
        for line in 0..3 {
            now = if ask {
                run.ask_line(0, line, true, now)
            } else {
                now
            };
        }
        now = if ask {
            run.ask_protected(0, 0, now)
        } else {
            now
        };
        for line in 0..3 {
            now = run.touch(0, line, true, now, false);
        }
        now = run.protected(0, 0, false, now, false);
        // What is there costs nothing more.
        assert_eq!(run.touch(0, 0, true, now, false), now);
        assert_eq!(run.protected(0, 0, true, now, false), now);
        now
    };
    assert_eq!(run(&machine(10), false), ns(500));
    // All but what the lock's first line refers to.
    assert_eq!(run(&machine(10), true), ns(200));
    assert_eq!(run(&machine(4), true), ns(200));
    // Two at once: the third and fourth come after the first two.
    assert_eq!(run(&machine(2), true), ns(300));
    assert_eq!(run(&machine(1), true), ns(500));
}

#[test]
fn what_is_asked_for_while_another_changes_it_comes_again() {
    let trace = trace(2, &[Step::Compute(ns(1))], 0, 1);
    let machine = Machine {
        costs: Costs {
            protected_lines: 2,
            ..PLAIN
        },
        ..machine(2)
    };
    let mut run = Run::new(&trace, &machine);
    let lock = |run: &mut Run<'_>, thread, now| run.lock(thread, 0, PRIVATE, true, now, false);
    assert_eq!(lock(&mut run, 0, 0), Some(0));
    run.ask_protected(1, 0, ns(10));
    run.unlock(0, 0, PRIVATE, ns(500), false);
    assert_eq!(lock(&mut run, 1, ns(500)), Some(ns(700)));
}

#[test]
fn what_another_took_meanwhile_comes_again() {
    let (trace, machine) = (trace(2, &[Step::Compute(ns(1))], 1, 0), machine(2));
    let mut run = Run::new(&trace, &machine);
    run.lines[0].sharers = bit(1);
    assert_eq!(run.ask_line(0, 0, true, 0), 0);
    assert_eq!(run.touch(1, 0, true, ns(50), false), ns(200));
    assert_eq!(run.touch(0, 0, true, ns(300), false), ns(400));
}

#[test]
fn what_is_new_each_time_costs_no_transfer() {
    let operation = |anew: bool| {
        let anew = anew.then_some(Step::Anew(0));
        let steps = [Step::Write(0), Step::Compute(ns(100))];
        anew.into_iter().chain(steps).collect::<Vec<_>>()
    };
    let rate = |anew| simulate(&trace(2, &operation(anew), 1, 0), &machine(2)).rate;
    assert!((rate(true) / 2e7 - 1.0).abs() < 0.01);
    assert!(rate(false) < 1.1e7);
}

/// So many threads that repeat one operation, with this many lines and locks.
fn trace(threads: usize, operation: &[Step], lines: usize, locks: usize) -> Trace {
    Trace {
        threads: vec![vec![operation.to_vec()]; threads],
        counted: 200 * threads as u64,
        lines: vec![Named::default(); lines],
        locks: vec![Named::default(); locks],
        ..Trace::default()
    }
}

/// Operations a second.
fn rate(trace: &Trace, machine: &Machine) -> f64 {
    simulate(trace, machine).rate
}

fn close(value: f64, expected: f64) {
    let off = (value / expected - 1.0).abs();
    assert!(off < 0.02, "{value} and not {expected}");
}

#[test]
fn private_work_is_linear() {
    for threads in [1, 2, 40, 128] {
        let trace = trace(threads, &[Step::Compute(ns(1000))], 0, 0);
        close(rate(&trace, &machine(threads)), threads as f64 * 1e6);
    }
}

#[test]
fn one_lock_bounds_all_by_hold_and_hand_off() {
    let operation = [
        Step::Compute(ns(500)),
        Step::Lock {
            lock: 0,
            line: PRIVATE,
            exclusive: true,
            tried: false,
        },
        Step::Compute(ns(1000)),
        Step::Unlock {
            lock: 0,
            line: PRIVATE,
        },
    ];
    close(rate(&trace(1, &operation, 0, 1), &machine(1)), 1e9 / 1500.0);
    for threads in [4, 40] {
        let trace = trace(threads, &operation, 0, 1);
        // A hand-off is two lines.
        close(rate(&trace, &machine(threads)), 1e9 / 1200.0);
    }
    // Those that have waited too long are asleep. Who comes meanwhile has the lock.
    let mut sleepers = machine(40);
    sleepers.costs.spin = 0;
    let slept = rate(&trace(40, &operation, 0, 1), &sleepers);
    assert!((1e9 / 6000.0..1e9 / 1000.0).contains(&slept), "{slept}");
    // Of two, each finds the other asleep or gone: it sleeps through one hold, at least.
    let two = rate(&trace(2, &operation, 0, 1), &sleepers);
    assert!((1e9 / 3500.0..1e9 / 1000.0).contains(&two), "{two}");
}

#[test]
fn sharers_of_a_lock_do_not_wait_for_each_other() {
    let operation = [
        Step::Lock {
            lock: 0,
            line: PRIVATE,
            exclusive: false,
            tried: false,
        },
        Step::Compute(ns(1000)),
        Step::Unlock {
            lock: 0,
            line: PRIVATE,
        },
    ];
    close(rate(&trace(16, &operation, 0, 1), &machine(16)), 16e6);
}

#[test]
fn sharers_that_slept_behind_one_hold_are_all_woken_by_its_end() {
    let hold = |exclusive, time| {
        let (lock, line) = (0, PRIVATE);
        [
            Step::Compute(time),
            Step::Lock {
                lock,
                line,
                exclusive,
                tried: false,
            },
            Step::Compute(ns(1000)),
            Step::Unlock { lock, line },
        ]
    };
    let mut trace = trace(16, &hold(false, ns(1000)), 0, 1);
    let mut writer = hold(true, ns(100_000)).to_vec();
    writer.insert(2, Step::Compute(ns(9000)));
    trace.threads[0] = vec![writer];
    let mut sleepers = machine(16);
    sleepers.costs = Costs {
        spin: ns(3000),
        wake: ns(2500),
        wake_call: ns(1000),
        ..PLAIN
    };
    // In each 110 us or so 15 sharers lose 10 us and what it takes until their turn to be woken, 15 us at most. Each
    // sees some sharer in, so that none would be woken by the last to leave.
    let shared = rate(&trace, &sleepers);
    assert!((5.5e6..7.5e6).contains(&shared), "{shared}");
}

#[test]
fn a_line_that_all_write_is_handed_on_one_after_the_other() {
    let operation = [Step::Compute(ns(1000)), Step::Write(0)];
    close(rate(&trace(1, &operation, 1, 0), &machine(1)), 1e6);
    close(rate(&trace(2, &operation, 1, 0), &machine(2)), 2e9 / 1100.0);
    close(
        rate(&trace(64, &operation, 1, 0), &machine(64)),
        1e9 / 100.0,
    );
    // Over two sockets some transfers are far.
    let mut two = machine(64);
    two.costs.socket_cores = 32;
    let far = rate(&trace(64, &operation, 1, 0), &two);
    assert!((1e9 / 300.0..1e9 / 100.0).contains(&far), "{far}");
}

#[test]
fn a_line_that_all_read_costs_nothing_until_it_is_written() {
    let operation = [Step::Compute(ns(1000)), Step::Read(0)];
    let read = trace(32, &operation, 1, 0);
    close(rate(&read, &machine(32)), 32e6);
    let mut written = read.clone();
    written.threads[0] = vec![vec![Step::Compute(ns(1000)), Step::Write(0)]];
    let outcome = simulate(&written, &machine(32));
    assert!(outcome.rate < 31.9e6 * 0.95, "{}", outcome.rate);
    assert!(outcome.spent.transfers[0] > 0);
}

#[test]
fn sharers_keep_nobody_out_who_wants_a_lock_alone() {
    // Seven threads always share the lock, in turns that overlap; the eighth wants it alone.
    let of = |exclusive| {
        [
            Step::Lock {
                lock: 0,
                line: PRIVATE,
                exclusive,
                tried: false,
            },
            Step::Compute(ns(1000)),
            Step::Unlock {
                lock: 0,
                line: PRIVATE,
            },
        ]
    };
    let mut shared = trace(8, &of(false), 0, 1);
    shared.threads[7] = vec![of(true).to_vec()];
    let outcome = simulate(&shared, &machine(8));
    // A turn of those who share and one of the other, each with its hand-off.
    close(outcome.rate, 8e9 / 2_400.0);
}

#[test]
fn who_tries_a_lock_lets_go_of_what_it_holds_before_it_waits() {
    let lock = |lock, tried: bool| Step::Lock {
        lock,
        line: PRIVATE,
        exclusive: !tried,
        tried,
    };
    let unlock = |lock| Step::Unlock {
        lock,
        line: PRIVATE,
    };
    let work = Step::Compute(ns(1000));
    // One takes the locks in one order, the other in the other, but for its trying.
    let mut both = trace(
        2,
        &[lock(0, false), work, lock(1, true), unlock(1), unlock(0)],
        0,
        2,
    );
    both.threads[1] = vec![vec![
        lock(1, false),
        work,
        lock(0, false),
        unlock(0),
        unlock(1),
    ]];
    assert!(rate(&both, &machine(2)) > 0.5e6);
}

#[test]
fn the_background_takes_cores_and_holds_operations_up() {
    // 100 operations of 1 µs make 100 µs of work that one thread does.
    let mut busy = trace(1, &[Step::Compute(ns(1000))], 0, 0);
    let job = |cycle, serial, parts| Job {
        cycle,
        stages: vec![Stage {
            serial,
            parts,
            ..Stage::default()
        }],
    };
    let work = |cycle, ns_all| job(cycle, vec![Step::Compute(ns(ns_all))], Vec::new());
    busy.jobs = vec![work(100, 100_000)];
    // On one core both take turns; with another core neither waits.
    close(rate(&busy, &machine(1)), 0.5e6);
    close(rate(&busy, &machine(2)), 1e6);
    // Eight cores make work for eight threads, but one does it all.
    let mut many = trace(8, &[Step::Compute(ns(1000))], 0, 0);
    many.jobs = vec![work(800, 800_000)];
    close(rate(&many, &machine(8)), 1e6);
    // As much, of which a job does a quarter.
    many.jobs.push(work(200, 50_000));
    close(rate(&many, &machine(8)), 1e6);
    many.jobs[0].stages[0].serial.clear();
    many.jobs[1] = work(200, 200_000);
    close(rate(&many, &machine(8)), 1e6);
    // In parts it is spread, and only takes its share.
    let parts = vec![vec![Step::Compute(ns(1000))]; 800];
    many.jobs = vec![job(800, Vec::new(), parts.clone())];
    close(rate(&many, &machine(8)), 4e6);
    // The same in stages, one of which has work for three threads only.
    let few = parts[..3].to_vec();
    let stage = |parts: &[Vec<Step>]| job(800, Vec::new(), parts.to_vec()).stages;
    let stages = [stage(&parts[..400]), stage(&few), stage(&parts[403..])].concat();
    many.jobs = vec![Job { cycle: 800, stages }];
    close(rate(&many, &machine(8)), 4e6);
}

/// An operation was later by that time only once it was done, so that nobody waited for a lock that it held.
#[test]
fn who_holds_a_lock_when_the_background_takes_its_core_keeps_others_waiting() {
    let operation = [
        Step::Lock {
            lock: 0,
            line: PRIVATE,
            exclusive: true,
            tried: false,
        },
        Step::Compute(ns(1_000)),
        Step::Unlock {
            lock: 0,
            line: PRIVATE,
        },
    ];
    let without = trace(2, &operation, 0, 1);
    let stage = Stage {
        serial: vec![Step::Compute(ns(1_000)); 400],
        ..Stage::default()
    };
    let job = Job {
        cycle: 1000,
        stages: vec![stage],
    };
    let with = Trace {
        jobs: vec![job],
        ..without.clone()
    };
    let machine = machine(2);
    let (alone, beside) = (rate(&without, &machine), rate(&with, &machine));
    // Half of 400 us of a cycle of 1.2 ms: on the other core somebody waits.
    close(alone / beside, 1.17);
}

#[test]
fn devices_bound_what_makes_bytes_for_them() {
    let mut writing = trace(16, &[Step::Compute(ns(1000))], 0, 0);
    // 1000 bytes an operation, at 1 GB/s.
    let device = Step::Device {
        bytes: 1_600_000,
        here: 0,
    };
    writing.jobs = vec![Job {
        cycle: 1600,
        stages: vec![Stage {
            serial: vec![device],
            ..Stage::default()
        }],
    }];
    let outcome = simulate(&writing, &machine(16));
    close(outcome.rate, 1e6);
    close(outcome.device_busy, 1.0);
}
