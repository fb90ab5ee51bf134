//! Devices with threads of their own: calls and flights over them.

use crate::fixture::{Sims, create, noise};
use base::clock::Clock;
use base::rng::Rng;
use base::sync::{Condvar, Mutex, rank};
use base::thread;
use device::sim::Times;
use device::{
    AlignedBuf, Array, Backend, BlockDevice, Durability, Error, Flight, Io, Kind, Latency,
    LatencyDevice, OpenOptions, Operation, Queues, Reaping, Request, Run, Topology, Unhurried,
    create_image, open_devices,
};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const SIZES: [u64; 3] = [24 << 20, 24 << 20, 24 << 20];
const STRIPE: u64 = 4096;
const PAGE: usize = 4096;

fn driven(devices: Vec<Arc<dyn BlockDevice>>) -> Arc<Array> {
    let array = create(Topology::PerDevice.over(devices).unwrap(), STRIPE);
    assert_eq!(array.topology(), Topology::PerDevice);
    Arc::new(array)
}

fn over_files(backend: Backend) -> Option<(tempfile::TempDir, Vec<Arc<dyn BlockDevice>>)> {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = (0..3).map(|i| dir.path().join(i.to_string())).collect();
    for (path, bytes) in paths.iter().zip(SIZES) {
        create_image(path, bytes).unwrap();
    }
    let options = OpenOptions {
        backend,
        topology: Topology::PerDevice,
        ..OpenOptions::default()
    };
    match open_devices(&paths, &options) {
        Ok(devices) => Some((dir, devices)),
        // This machine may forbid it.
        Err(Error::NoIoUring { .. }) => {
            base::skip("io_uring");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// What somebody does on a device before it does what it is asked.
struct Hooked<F> {
    below: Arc<dyn BlockDevice>,
    hook: F,
}

impl<F: Fn(&Operation<'_>) + Send + Sync + 'static> BlockDevice for Hooked<F> {
    device::described_by!(below);
    fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        for request in requests.iter() {
            (self.hook)(&request.operation);
        }
        self.below.run(requests, meanwhile);
    }
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.below.discard(offset, len)
    }
}

/// A driver over the first of some simulated devices, with a hook between.
fn hooked(
    sims: &Sims,
    hook: impl Fn(&Operation<'_>) + Send + Sync + 'static,
) -> Arc<dyn BlockDevice> {
    let below = sims.members().remove(0);
    let devices: Vec<Arc<dyn BlockDevice>> = vec![Arc::new(Hooked { below, hook })];
    Topology::PerDevice.over(devices).unwrap().remove(0)
}

/// Batches of many shapes by several threads at once, calls and flights: what is written is read.
fn check(array: &Arc<Array>) {
    const AREA: u64 = 4 << 20;
    thread::parallel(4, |me| {
        let mut rng = Rng::new(me as u64);
        let base = me as u64 * AREA;
        let mut queues = Queues::new(array, 8, 4).unwrap();
        for round in 0..20 {
            let content = noise(100 * me as u64 + round, AREA as usize / 4);
            // Of a few large ones, or more of them than one letter holds.
            let piece = PAGE << rng.below(6);
            let mut writes: Vec<Io<'_>> = content
                .chunks(piece)
                .enumerate()
                .map(|(i, buf)| Io::Write {
                    byte: base + (i * piece) as u64,
                    buf,
                    durability: Durability::Volatile,
                })
                .collect();
            match rng.one_in(2) {
                true => {
                    let _unhurried = Unhurried::begin();
                    array.execute(&mut writes).unwrap();
                }
                false => array.execute(&mut writes).unwrap(),
            }
            if rng.one_in(4) {
                array.flush().unwrap();
            }
            let flight = Flight {
                kind: Kind::Read,
                memory: AlignedBuf::zeroed(content.len()),
                tag: round,
            };
            let run = Run {
                byte: base,
                at: 0,
                len: content.len(),
            };
            queues.submit(flight, &[run]).unwrap();
            queues.ring();
            let mut back = AlignedBuf::zeroed(content.len());
            array.read(base, &mut back).unwrap();
            assert!(back[..] == content[..]);
            let mut landed = Vec::new();
            while landed.is_empty() {
                queues.wait(None, None);
                queues.reap(&mut landed);
            }
            let landed = landed.remove(0);
            landed.result.unwrap();
            assert!(landed.memory[..] == content[..]);
        }
    });
}

#[test]
fn what_many_threads_write_they_read_by_whatever_reaches_the_devices() {
    for backend in [Backend::IoUring, Backend::Threads] {
        if let Some((_dir, devices)) = over_files(backend) {
            check(&Arc::new(create(devices, STRIPE)));
        }
    }
    check(&driven(Sims::new(&SIZES, 1).members()));
}

#[test]
fn an_array_is_closed_and_opened_again_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    create_image(&path, SIZES[0]).unwrap();
    let options = OpenOptions {
        topology: Topology::PerDevice,
        ..OpenOptions::default()
    };
    for _ in 0..20 {
        let devices = open_devices(std::slice::from_ref(&path), &options).unwrap();
        assert_eq!(devices[0].info().topology, Topology::PerDevice);
        devices[0].flush().unwrap();
    }
}

#[test]
fn errors_are_told_to_whoever_sent_what_failed() {
    let sims = Sims::new(&SIZES, 2);
    let array = driven(sims.members());
    let page = AlignedBuf::zeroed(PAGE);
    sims.devices[0].fail_writes(Times::Always, None);
    let mut failed = 0;
    for i in 0..30 {
        let byte = (8 << 20) + i * PAGE as u64;
        let mut device = 0;
        let geometry = array.geometry();
        geometry.pieces(byte, PAGE, |piece| device = piece.device);
        let written = array.write(byte, &page, Durability::Volatile);
        assert_eq!(written.is_err(), device == 0);
        failed += u32::from(written.is_err());
    }
    assert_eq!(failed, 10);
    sims.devices[0].heal();
    sims.devices[1].fail_flushes(Times::Next(1));
    assert!(matches!(array.flush(), Err(Error::Flush { .. })));
    array.flush().unwrap();
}

#[test]
fn the_code_of_a_device_that_panics_fails_what_it_had_and_goes_on() {
    let sims = Sims::new(&SIZES[..1], 3);
    let panics = |operation: &Operation<'_>| {
        assert!(operation.offset() != 4096, "on purpose");
    };
    let device = hooked(&sims, panics);
    let latency = Latency {
        service: Duration::from_micros(10),
        flush: Duration::from_micros(10),
        depth: 4,
    };
    let below: Arc<dyn BlockDevice> = Arc::new(Hooked {
        below: sims.members().remove(0),
        hook: panics,
    });
    let slow = LatencyDevice::new(below, latency, Clock::manual(1));
    let slow: Vec<Arc<dyn BlockDevice>> = vec![Arc::new(slow)];
    let slow = Topology::PerDevice.over(slow).unwrap().remove(0);
    for device in [device, slow] {
        for round in 0..50 {
            let mut page = AlignedBuf::from_slice(&[round; PAGE]);
            assert!(device.read(4096, &mut page).is_err());
            let written = device.write(8192, &page, Durability::Volatile);
            written.unwrap();
            let mut back = AlignedBuf::zeroed(PAGE);
            device.read(8192, &mut back).unwrap();
            assert!(back[..] == page[..]);
        }
    }
}

/// The part was in nobody's hands, and the flight's memory lent for ever.
#[test]
fn a_flight_on_a_slow_device_whose_code_panics_fails_and_the_next_one_lands() {
    let sims = Sims::new(&SIZES, 5);
    let panics = Arc::new(base::atomic::AtomicBool::new(false));
    let hook = {
        let panics = Arc::clone(&panics);
        move |_: &Operation<'_>| {
            let panics = panics.swap(false, base::atomic::Ordering::SeqCst);
            assert!(!panics, "on purpose");
        }
    };
    let latency = Latency {
        service: Duration::from_micros(10),
        flush: Duration::from_micros(10),
        depth: 4,
    };
    let slow = |below| {
        let hook = hook.clone();
        let below: Arc<dyn BlockDevice> = Arc::new(Hooked { below, hook });
        let slow = LatencyDevice::new(below, latency, Clock::manual(1));
        Arc::new(slow) as Arc<dyn BlockDevice>
    };
    let slow = sims.members().into_iter().map(slow).collect();
    let array = Arc::new(create(slow, STRIPE));
    let mut queues = Queues::new(&array, 4, 4).unwrap();
    for panic in [true, false, true, false] {
        let flight = Flight {
            kind: Kind::Read,
            memory: AlignedBuf::zeroed(PAGE),
            tag: 7,
        };
        let run = Run {
            byte: 1 << 20,
            at: 0,
            len: PAGE,
        };
        panics.store(panic, base::atomic::Ordering::SeqCst);
        let started = || {
            queues.submit(flight, &[run]).unwrap();
            queues.ring();
        };
        let started = std::panic::catch_unwind(std::panic::AssertUnwindSafe(started));
        assert_eq!(started.is_err(), panic);
        assert_eq!(queues.in_flight(), 1);
        let mut landed = Vec::new();
        while landed.is_empty() {
            queues.wait(None, None);
            queues.reap(&mut landed);
        }
        assert_eq!(landed[0].result.is_err(), panic);
        assert_eq!(landed[0].tag, 7);
    }
}

#[test]
fn a_caller_that_panics_while_its_batch_is_under_way_waits_for_it() {
    let sims = Sims::new(&SIZES, 4);
    let device = Topology::PerDevice.over(sims.members()).unwrap().remove(0);
    let page = AlignedBuf::from_slice(&[7; PAGE]);
    for _ in 0..20 {
        let batch = || {
            let write = |i: u64| Operation::Write {
                offset: i * 4096,
                buf: &page,
                durability: Durability::Volatile,
            };
            let mut requests: Vec<Request<'_>> =
                (0..100).map(|i| Request::new(write(i), 0)).collect();
            device.run(&mut requests, Some(&mut || panic!("on purpose")));
        };
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(batch)).is_err());
    }
    let mut back = AlignedBuf::zeroed(PAGE);
    device.read(99 * 4096, &mut back).unwrap();
    assert!(back[..] == page[..]);
}

/// A gate that a device stands at while it is shut, and what came to it since.
struct Gate {
    state: Mutex<(bool, Vec<u64>)>,
    opened: Condvar,
}

impl Gate {
    fn new() -> Arc<Gate> {
        Arc::new(Gate {
            state: Mutex::new(rank::LEAF, (true, Vec::new())),
            opened: Condvar::new(),
        })
    }

    fn pass(&self, offset: u64) {
        let mut state = self.state.lock();
        state.1.push(offset);
        self.opened.notify_all();
        while !state.0 {
            self.opened.wait(&mut state);
        }
    }

    /// Waits until so many have come.
    fn come(&self, count: usize) {
        let mut state = self.state.lock();
        while state.1.len() < count {
            self.opened.wait(&mut state);
        }
    }

    fn shut(&self) {
        *self.state.lock() = (false, Vec::new());
    }

    fn open(&self) {
        self.state.lock().0 = true;
        self.opened.notify_all();
    }

    fn seen(&self) -> Vec<u64> {
        self.state.lock().1.clone()
    }
}

#[test]
fn a_flush_and_a_durable_write_go_before_what_nobody_waits_for() {
    let sims = Sims::new(&[72 << 20], 5);
    let gate = Gate::new();
    let at = Arc::clone(&gate);
    let device = hooked(&sims, move |operation| at.pass(operation.offset()));
    let array = Arc::new(create(vec![Arc::clone(&device)], STRIPE));
    gate.shut();
    let mut queues = Queues::new(&array, 20, 20).unwrap();
    let mut start = |tag: u64| {
        let flight = Flight {
            kind: Kind::Read,
            memory: AlignedBuf::zeroed(PAGE),
            tag,
        };
        let run = Run {
            byte: tag * STRIPE,
            at: 0,
            len: PAGE,
        };
        queues.submit(flight, &[run]).unwrap();
        queues.ring();
    };
    start(0);
    // The driver is at the gate: the rest waits in its mail.
    gate.come(1);
    {
        let _unhurried = Unhurried::begin();
        (1..20).for_each(start);
        let page = AlignedBuf::zeroed(PAGE);
        let write = Operation::Write {
            offset: 71 << 20,
            buf: &page,
            durability: Durability::Durable,
        };
        let mut requests = [Request::new(write, 0), Request::new(Operation::Flush, 0)];
        device.run(&mut requests, Some(&mut || gate.open()));
        assert!(requests.iter().all(|request| request.error.is_none()));
    }
    let mut landed = Vec::new();
    while landed.len() < 20 {
        queues.wait(None, None);
        queues.reap(&mut landed);
    }
    let seen = gate.seen();
    assert_eq!((seen.len(), seen[1], seen[2]), (22, 71 << 20, 0));
}

#[test]
fn who_sends_more_than_there_is_room_for_waits_and_all_of_it_is_done() {
    let sims = Sims::new(&[72 << 20], 6);
    let gate = Gate::new();
    let at = Arc::clone(&gate);
    let device = hooked(&sims, move |operation| at.pass(operation.offset()));
    let array = Arc::new(create(vec![Arc::clone(&device)], STRIPE));
    gate.shut();
    // Of parts, more than the mail and the driver hold together.
    let many = 10_000;
    let flights = 6000;
    let mut queues = Queues::new(&array, flights, flights).unwrap();
    for tag in 0..flights as u64 {
        let flight = Flight {
            kind: Kind::Read,
            memory: AlignedBuf::zeroed(512),
            tag,
        };
        let run = Run {
            byte: tag * 512,
            at: 0,
            len: 512,
        };
        queues.submit(flight, &[run]).unwrap();
    }
    queues.ring();
    let sender = {
        let device = Arc::clone(&device);
        let body = move || {
            let mut bufs: Vec<AlignedBuf> = (0..many).map(|_| AlignedBuf::zeroed(512)).collect();
            let reads = bufs.iter_mut().enumerate().map(|(i, buf)| Operation::Read {
                offset: i as u64 * 512,
                buf,
            });
            let mut requests: Vec<Request<'_>> = reads.map(|read| Request::new(read, 0)).collect();
            device.run(&mut requests, None);
            assert!(requests.iter().all(|request| request.error.is_none()));
        };
        thread::spawn("sender", body).unwrap()
    };
    gate.open();
    let mut landed = Vec::new();
    while landed.len() < flights {
        queues.wait(None, None);
        queues.reap(&mut landed);
    }
    assert!(landed.iter().all(|flight| flight.result.is_ok()));
    sender.join().unwrap();
    assert_eq!(gate.seen().len(), many + flights);
}

#[test]
fn what_nobody_waits_for_is_done_beside_what_is_always_wanted() {
    let sims = Sims::new(&SIZES[..1], 7);
    let device = Topology::PerDevice.over(sims.members()).unwrap().remove(0);
    let done = Arc::new(Mutex::new(rank::LEAF, false));
    let busy: Vec<_> = (0..3)
        .map(|i| {
            let (device, done) = (Arc::clone(&device), Arc::clone(&done));
            let body = move || {
                let mut bufs: Vec<AlignedBuf> = (0..64).map(|_| AlignedBuf::zeroed(512)).collect();
                while !*done.lock() {
                    let reads = bufs.iter_mut().map(|buf| Operation::Read {
                        offset: i * 512,
                        buf,
                    });
                    let mut requests: Vec<Request<'_>> =
                        reads.map(|read| Request::new(read, 0)).collect();
                    device.run(&mut requests, None);
                }
            };
            thread::spawn("busy", body).unwrap()
        })
        .collect();
    {
        let _unhurried = Unhurried::begin();
        for i in 0..50 {
            let page = AlignedBuf::from_slice(&[i; PAGE]);
            device.write(0, &page, Durability::Volatile).unwrap();
        }
    }
    *done.lock() = true;
    for thread in busy {
        thread.join().unwrap();
    }
}

#[test]
fn a_device_that_does_not_answer_holds_up_its_own_alone() {
    let sims = Sims::new(&SIZES, 8);
    let array = driven(sims.members());
    let place = |device: usize| {
        let all = (0..100).map(|i| (8 << 20) + i * STRIPE);
        all.into_iter()
            .find(|&byte| {
                let mut found = 0;
                let geometry = array.geometry();
                geometry.pieces(byte, PAGE, |piece| found = piece.device);
                found == device
            })
            .unwrap()
    };
    let page = AlignedBuf::from_slice(&[3; PAGE]);
    sims.devices[1].stick();
    let stuck = {
        let (array, page, byte) = (Arc::clone(&array), page.clone(), place(1));
        let body = move || array.write(byte, &page, Durability::Volatile).unwrap();
        thread::spawn("stuck", body).unwrap()
    };
    for device in [0, 2] {
        let mut back = AlignedBuf::zeroed(PAGE);
        array
            .write(place(device), &page, Durability::Durable)
            .unwrap();
        array.read(place(device), &mut back).unwrap();
        assert!(back[..] == page[..]);
    }
    // Flights on it can be given up, in its hands or not.
    let mut queues = Queues::new(&array, 10, 4).unwrap();
    let ids: Vec<_> = (0..10)
        .map(|tag| {
            let flight = Flight {
                kind: Kind::Read,
                memory: AlignedBuf::zeroed(PAGE),
                tag,
            };
            let run = Run {
                byte: place(1),
                at: 0,
                len: PAGE,
            };
            queues.submit(flight, &[run]).unwrap()
        })
        .collect();
    queues.ring();
    for id in ids.into_iter().skip(1) {
        queues.cancel(id);
    }
    let mut landed = Vec::new();
    while landed.len() < 9 {
        queues.wait(None, None);
        queues.reap(&mut landed);
    }
    assert!(
        landed
            .iter()
            .all(|flight| flight.result.is_err() && flight.tag > 0)
    );
    sims.devices[1].release();
    stuck.join().unwrap();
    while landed.len() < 10 {
        queues.wait(None, None);
        queues.reap(&mut landed);
    }
    assert!(landed[9].result.is_ok());
}

/// A device that takes a while for each transfer, with a driver.
fn slow(policy: Reaping) -> Arc<dyn BlockDevice> {
    let latency = Latency {
        service: Duration::from_micros(100),
        flush: Duration::from_micros(100),
        depth: 4,
    };
    let below = Sims::new(&[72 << 20], 1).members().remove(0);
    let device = LatencyDevice::new(below, latency, Clock::real()).reaping(policy);
    let mut driven = Topology::PerDevice.over(vec![Arc::new(device)]).unwrap();
    driven.remove(0)
}

/// Callers slept until the driver's message came, and a driver of such a device slept, whatever the policy.
#[test]
fn callers_of_a_driver_and_the_driver_wait_by_the_policy() {
    const CALLS: u64 = 64;
    if thread::cpu_count() == 1 {
        // Callers sleep there.
        return base::skip("second CPU");
    }
    for policy in Reaping::ALL {
        let device = slow(policy);
        let mut page = AlignedBuf::zeroed(PAGE);
        for _ in 0..CALLS / 2 {
            device.read(0, &mut page).unwrap();
            device.flush().unwrap();
        }
        let reaped = device.reaped().unwrap();
        // Each call and each part of the driver's, at least once.
        assert!(reaped.waits >= 2 * CALLS, "{reaped:?}");
        // A transfer that two wait for is one.
        assert!(reaped.timed <= CALLS + 16, "{reaped:?}");
        match policy {
            Reaping::Interrupt => assert_eq!((reaped.spins, reaped.sleeps), (0, 0)),
            Reaping::Poll => assert_eq!((reaped.caught, reaped.blocked), (reaped.waits, 0)),
            Reaping::Lazy => assert!(reaped.sleeps + reaped.spins > 0, "{reaped:?}"),
        }
    }
}

#[test]
fn who_has_flights_with_a_driver_waits_by_the_policy_and_sleeps_without_any() {
    if thread::cpu_count() == 1 {
        // Callers sleep there.
        return base::skip("second CPU");
    }
    for policy in Reaping::ALL {
        let device = slow(policy);
        let array = Arc::new(create(vec![Arc::clone(&device)], STRIPE));
        let before = device.reaped().unwrap();
        let mut queues = Queues::new(&array, 4, 4).unwrap();
        let mut landed = Vec::new();
        for tag in 0..64 {
            let flight = Flight {
                kind: Kind::Read,
                memory: AlignedBuf::zeroed(PAGE),
                tag,
            };
            let run = Run {
                byte: 0,
                at: 0,
                len: PAGE,
            };
            queues.submit(flight, &[run]).unwrap();
            queues.ring();
            while landed.len() as u64 <= tag {
                queues.wait(None, None);
                queues.reap(&mut landed);
            }
        }
        assert!(landed.iter().all(|flight| flight.result.is_ok()));
        let reaped = device.reaped().unwrap().since(before);
        assert!(reaped.waits > 0, "{reaped:?}");
        match policy {
            Reaping::Interrupt => assert_eq!((reaped.spins, reaped.sleeps), (0, 0)),
            Reaping::Poll => assert!(reaped.caught > 64 && reaped.blocked == 0, "{reaped:?}"),
            Reaping::Lazy => assert!(reaped.sleeps + reaped.spins > 0, "{reaped:?}"),
        }
        // Nobody looks for what is not there: a wait that ends because of its owner's patience is none for the device.
        let before = device.reaped().unwrap().waits;
        queues.wait(Some(queues.bell().rung()), Some(Duration::from_millis(1)));
        assert_eq!(device.reaped().unwrap().waits, before);
    }
}
