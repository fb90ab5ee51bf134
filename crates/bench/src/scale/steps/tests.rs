//! What recordings become, by recordings that are written down.

use super::*;

fn event(tick: u64, kind: Kind, address: usize, name: &'static str) -> Event {
    Event {
        tick,
        address,
        name,
        line: 0,
        kind,
    }
}

fn span(owner: Owner, events: Vec<Event>) -> Span {
    let begin = events.first().map_or(0, |event| event.tick - 10);
    let end = events.last().map_or(0, |event| event.tick + 10);
    Span {
        owner,
        begin,
        events,
        end,
    }
}

const PLAIN: Scale = Scale {
    ns_per_tick: 1.0,
    event_ns: 0.0,
};

#[test]
fn lines_of_one_thread_vanish_and_those_of_two_stay() {
    use Kind::*;
    let of = |thread, own, at: u64| {
        let events = vec![
            event(at + 10, Write, own, "own"),
            event(at + 20, Write, 0x1000, "common"),
            event(at + 30, Read, 0x2000, "read only"),
        ];
        span(Owner::Thread(thread), events)
    };
    let trace = steps(&[of(0, 0x3000, 0), of(1, 0x4000, 100)], 2, &[2], PLAIN);
    let expected = vec![Step::Compute(20_000), Step::Write(0), Step::Compute(20_000)];
    assert_eq!(trace.threads, [vec![expected.clone()], vec![expected]]);
    assert_eq!(trace.lines.len(), 1);
    assert_eq!(
        (trace.lines[0].name.as_str(), trace.lines[0].writes),
        ("common", 2)
    );
}

#[test]
fn two_locks_on_one_line_share_the_line_and_no_lock() {
    use Kind::*;
    let of = |thread: usize, at: u64| {
        let lock = 0x1000 + 8 * thread;
        let events = vec![
            event(at + 10, LockExclusive, lock, "lease"),
            event(at + 30, Unlock, lock, ""),
        ];
        span(Owner::Thread(thread), events)
    };
    let trace = steps(&[of(0, 0), of(1, 100)], 2, &[2], PLAIN);
    assert!(trace.locks.is_empty());
    let step = &trace.threads[0][0];
    assert!(matches!(step[1], Step::Write(0)) && matches!(step[3], Step::Write(0)));
}

#[test]
fn who_makes_a_lock_does_not_wait_for_it() {
    use Kind::*;
    let of = |thread, at: u64, born: bool| {
        let mut events = vec![
            event(at + 20, LockExclusive, 0x1010, "leaf"),
            event(at + 30, Unlock, 0x1010, ""),
        ];
        if born {
            let mut birth = event(at + 10, Born, 0x1000, "");
            birth.line = 64;
            events.insert(0, birth);
        }
        span(Owner::Thread(thread), events)
    };
    let trace = steps(&[of(0, 0, true), of(1, 100, false)], 2, &[2], PLAIN);
    let own = Step::Own { lock: 0, line: 0 };
    assert_eq!((trace.threads[0][0][1], trace.threads[0][0][3]), (own, own));
    assert!(matches!(trace.threads[1][0][1], Step::Lock { .. }));
}

#[test]
fn what_is_put_in_an_old_place_is_something_else() {
    use Kind::*;
    let of = |thread, at: u64, born: bool| {
        let mut events = vec![event(at + 20, Write, 0x1000, "count")];
        if born {
            let mut birth = event(at + 10, Born, 0x1000, "");
            birth.line = 64;
            events.insert(0, birth);
        }
        span(Owner::Thread(thread), events)
    };
    assert!(
        steps(&[of(0, 0, false), of(1, 100, true)], 2, &[2], PLAIN)
            .lines
            .is_empty()
    );
    assert_eq!(
        steps(&[of(0, 0, true), of(1, 100, false)], 2, &[2], PLAIN)
            .lines
            .len(),
        1
    );
}

#[test]
fn what_a_few_operations_touch_is_something_else_next_time() {
    use Kind::*;
    let of = |at: u64, file: usize, lock: usize| {
        let events = vec![
            event(at + 10, Write, 0x1000, "lasting"),
            event(at + 20, LockExclusive, lock, "file"),
            event(at + 30, Write, file, "count"),
            event(at + 40, Unlock, lock, ""),
        ];
        span(Owner::Thread(0), events)
    };
    // Two files that share a line, then others.
    let mut spans: Vec<Span> = (0..PASSING as u64 + 1)
        .map(|i| {
            of(
                i * 100,
                0x2000 + (i as usize).max(1) * 64,
                0x8000 + i as usize * 64,
            )
        })
        .collect();
    let job = (0x1000..0x9000).step_by(64);
    let job = job
        .zip(10_000..)
        .map(|(place, at)| event(at, Write, place, "job"));
    spans.push(span(Owner::Job(0), job.collect()));
    let trace = steps(&spans, 1, &[9], PLAIN);
    let anew = |operation: usize| {
        let steps = trace.threads[0][operation].iter();
        let anew = steps.filter(|step| matches!(step, Step::Anew(_)));
        anew.count()
    };
    // The line of its lock, that of its count unless the file before had it; not the one that lasts.
    let expected: Vec<usize> = (0..=PASSING).map(|i| if i == 1 { 1 } else { 2 }).collect();
    assert_eq!((0..=PASSING).map(anew).collect::<Vec<_>>(), expected);
    assert!(matches!(
        trace.threads[0][0][..2],
        [Step::Anew(_), Step::Anew(_)]
    ));
}

#[test]
fn what_is_asked_for_ahead_are_the_lines_and_locks_that_are_known() {
    use Kind::*;
    let operation = span(
        Owner::Thread(0),
        vec![
            event(10, Write, 0x1000, "count"),
            event(20, LockExclusive, 0x1040, "node"),
            event(30, Unlock, 0x1040, ""),
        ],
    );
    let mut ask = event(110, AheadToChange, 0x1000, "");
    ask.line = 256;
    let job = span(
        Owner::Job(0),
        vec![
            ask,
            event(120, LockShared, 0x1040, "node"),
            event(130, Unlock, 0x1040, ""),
            event(140, Read, 0x1000, "count"),
        ],
    );
    let trace = steps(&[operation, job], 1, &[1], PLAIN);
    let steps = trace.jobs[0].stages[0].serial.iter();
    let asked: Vec<_> = steps
        .filter(|step| matches!(step, Step::Ahead { .. } | Step::AheadLock(_)))
        .collect();
    let line = |line| Step::Ahead { line, write: true };
    assert_eq!(asked, [&line(0), &line(1), &Step::AheadLock(0)]);
}

#[test]
fn pauses_count_as_what_is_usual_and_events_cost_nothing() {
    use Kind::*;
    let of = |thread, at: u64, length: u64| {
        let events = vec![
            event(at + 10, Write, 0x1000, "a"),
            event(at + 10 + length, Write, 0x1000, "b"),
        ];
        span(Owner::Thread(thread), events)
    };
    let scale = Scale {
        ns_per_tick: 1.0,
        event_ns: 5.0,
    };
    let spans = [of(0, 0, 45), of(1, 100, 1_000_000)];
    let trace = steps(&spans, 2, &[2], scale);
    assert_eq!(trace.interruptions, 1);
    assert_eq!(trace.threads[0][0], trace.threads[1][0]);
    assert_eq!(trace.threads[1][0][2], Step::Compute(40_000));
}

#[test]
fn devices_are_no_processor_time_and_jobs_are_cut_at_marks() {
    use Kind::*;
    let events = vec![
        event(100, DeviceBegin, 4096, ""),
        event(600, DeviceEnd, 0, ""),
        event(610, Mark, 0, "capture"),
        event(630, Mark, 0, "capture"),
        event(650, Joined, 0, ""),
        event(680, Mark, 0, "enter"),
        event(690, Mark, 0, "release"),
        event(700, Mark, 0, "release"),
        event(720, Joined, 0, ""),
    ];
    let mut job = span(Owner::Job(0), events);
    job.end = 760;
    let trace = steps(&[job], 0, &[1], PLAIN);
    let device = Step::Device {
        bytes: 4096,
        here: 500_000,
    };
    let compute = |times: &[u64]| -> Vec<Vec<Step>> {
        let part = |time: &u64| vec![Step::Compute(time * 1000)];
        times.iter().map(part).collect()
    };
    let stage = |name, serial: &[u64], parts| Stage {
        name,
        serial: compute(serial).concat(),
        parts: compute(parts),
    };
    let mut stages = vec![
        stage("capture", &[10, 10], &[20, 20]),
        stage("enter", &[30], &[10]),
        stage("release", &[], &[10, 20]),
        stage("", &[40], &[]),
    ];
    stages[0].serial.insert(1, device);
    assert_eq!(trace.jobs, [Job { cycle: 1, stages }]);
}

#[test]
fn a_job_takes_no_longer_than_the_processor_worked() {
    use Kind::*;
    let events = vec![
        event(100, Processor, 5000, ""),
        event(300, Born, 0, ""),
        event(1000, Mark, 0, "capture"),
        event(1500, Processor, 5100, ""),
        event(1540, DeviceBegin, 4096, ""),
        event(1840, DeviceEnd, 250, ""),
        event(2840, Joined, 0, ""),
        event(2900, Processor, 5400, ""),
        event(2910, Born, 0, ""),
        event(3000, Processor, 5490, ""),
    ];
    let mut job = span(Owner::Job(0), events);
    (job.begin, job.end) = (100, 3000);
    let trace = steps(&[job], 0, &[1], PLAIN);
    let stages = &trace.jobs[0].stages;
    // One piece had 900 that were no more than 100, the next 40 and 1000 that were no more than 50.
    assert_eq!(stages[0].serial, [Step::Compute(100_000)]);
    let device = Step::Device {
        bytes: 4096,
        here: 300_000,
    };
    let parts = [Step::Compute(25_000), device, Step::Compute(25_000)];
    assert_eq!(stages[0].parts, [parts]);
    assert_eq!(stages[1].serial, [Step::Compute(10_000)]);
}

#[test]
fn what_was_not_the_processors_is_taken_from_the_longest_pauses() {
    let shrunk = |pauses: &[f64], cpu_ns| {
        let mut raw: Vec<Raw> = pauses.iter().map(|ns| Raw::Compute(*ns)).collect();
        shrink(&mut raw, cpu_ns);
        let ns = |raw: &Raw| match raw {
            Raw::Compute(ns) => *ns,
            _ => unreachable!("nothing else was put in"),
        };
        raw.iter().map(ns).collect::<Vec<f64>>()
    };
    assert_eq!(shrunk(&[10.0, 900.0, 20.0], 80.0), [10.0, 50.0, 20.0]);
    assert_eq!(shrunk(&[50.0, 900.0, 20.0], 80.0), [30.0, 30.0, 20.0]);
    assert_eq!(shrunk(&[50.0, 90.0], 20.0), [10.0, 10.0]);
    assert_eq!(shrunk(&[5.0, 9.0], 14.0), [5.0, 9.0]);
    assert_eq!(shrunk(&[5.0, 9.0], 0.0), [0.0, 0.0]);
}

#[test]
fn what_storing_took_beyond_a_pause_is_taken_from_the_next_one() {
    use Kind::*;
    let scale = Scale {
        ns_per_tick: 1.0,
        event_ns: 15.0,
    };
    // Pauses of 10, 5, 70, 5 and 10.
    let of = |thread| {
        let events = [10, 15, 85, 90].map(|at| event(at, Write, 0x1000, "common"));
        span(Owner::Thread(thread), events.to_vec())
    };
    let trace = steps(&[of(0), of(1)], 2, &[2], scale);
    let compute = |step: &Step| match step {
        Step::Compute(time) => *time,
        _ => 0,
    };
    let times: Vec<Time> = trace.threads[0][0].iter().map(compute).collect();
    // Cut off at nothing each time they were 55, of 100 that passed, and five times 15.
    assert_eq!(times, [0, 0, 40_000, 0, 0]);
}
