//! Flights over every kind of device: what all of them keep, whatever is below.

use crate::fixture::{Sims, UUID, create, noise, plan};
use base::clock::Clock;
use base::rng::Rng;
use device::sim::Times;
use device::{
    AlignedBuf, Array, Backend, Bell, BlockDevice, Durability, Error, Flight, FlightId, Kind,
    Landed, Latency, LatencyDevice, OpenOptions, Operation, Queues, Reaping, Request, Run,
    Topology, create_image, open_devices,
};
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

const SIZES: [u64; 3] = [24 << 20, 24 << 20, 24 << 20];
const STRIPE: u64 = 4096;
const VOLATILE: Kind = Kind::Write(Durability::Volatile);

/// An array, and what goes when it does.
struct World {
    name: &'static str,
    array: Arc<Array>,
    _dir: Option<TempDir>,
}

/// A device that does not know of flights.
struct Plain(Arc<dyn BlockDevice>);

impl BlockDevice for Plain {
    device::described_by!(0);
    fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        self.0.run(requests, meanwhile);
    }
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.0.discard(offset, len)
    }
}

/// Files in a directory, and open.
type Opened = (TempDir, Vec<PathBuf>, Vec<Arc<dyn BlockDevice>>);

fn files(options: &OpenOptions) -> Option<Opened> {
    let dir = TempDir::new().unwrap();
    let paths: Vec<PathBuf> = (0..SIZES.len())
        .map(|i| dir.path().join(i.to_string()))
        .collect();
    for (path, bytes) in paths.iter().zip(SIZES) {
        create_image(path, bytes).unwrap();
    }
    match open_devices(&paths, options) {
        Ok(devices) => Some((dir, paths, devices)),
        // This machine may forbid it.
        Err(Error::NoIoUring { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

fn backend(backend: Backend, direct: bool) -> OpenOptions {
    OpenOptions {
        backend,
        direct,
        ..OpenOptions::default()
    }
}

fn reaped(reap: Reaping) -> OpenOptions {
    OpenOptions {
        reap,
        ..backend(Backend::IoUring, true)
    }
}

fn array(devices: Vec<Arc<dyn BlockDevice>>) -> Arc<Array> {
    Arc::new(create(devices, STRIPE))
}

fn worlds() -> Vec<World> {
    let mut worlds = Vec::new();
    let kinds = [
        ("io_uring", backend(Backend::IoUring, true)),
        ("io_uring, buffered", backend(Backend::IoUring, false)),
        ("io_uring, polled", reaped(Reaping::Poll)),
        ("io_uring, lazy", reaped(Reaping::Lazy)),
        ("threads", backend(Backend::Threads, true)),
    ];
    for (name, options) in kinds {
        let Some((dir, _, devices)) = files(&options) else {
            continue;
        };
        worlds.push(World {
            name,
            array: array(devices),
            _dir: Some(dir),
        });
    }
    let (dir, _, devices) = files(&OpenOptions::default()).unwrap();
    let latency = Latency {
        service: Duration::from_micros(100),
        flush: Duration::from_micros(100),
        depth: 4,
    };
    let clock = Clock::manual(1);
    let slow = |below| {
        let device = LatencyDevice::new(below, latency, clock.clone());
        Arc::new(device) as Arc<dyn BlockDevice>
    };
    worlds.push(World {
        name: "latency",
        array: array(devices.into_iter().map(slow).collect()),
        _dir: Some(dir),
    });
    for reap in Reaping::ALL {
        let (dir, _, devices) = files(&OpenOptions::default()).unwrap();
        let service = Duration::from_micros(30);
        let slow = |below| {
            let latency = Latency { service, ..latency };
            let device = LatencyDevice::new(below, latency, Clock::real()).reaping(reap);
            Arc::new(device) as Arc<dyn BlockDevice>
        };
        worlds.push(World {
            name: reap.name(),
            array: array(devices.into_iter().map(slow).collect()),
            _dir: Some(dir),
        });
    }
    let sims = Sims::new(&SIZES, 1);
    worlds.push(World {
        name: "simulated",
        array: array(sims.members()),
        _dir: None,
    });
    let plain = |device| Arc::new(Plain(device)) as Arc<dyn BlockDevice>;
    let sims = Sims::new(&SIZES, 2);
    worlds.push(World {
        name: "blocking",
        array: array(sims.members().into_iter().map(plain).collect()),
        _dir: None,
    });
    worlds.extend(driven_worlds());
    worlds
}

/// Devices with threads of their own.
fn driven_worlds() -> Vec<World> {
    let driven = |devices| array(Topology::PerDevice.over(devices).unwrap());
    let mut worlds = Vec::new();
    let kinds = [
        ("io_uring, driven", backend(Backend::IoUring, true)),
        ("io_uring, driven, polled", reaped(Reaping::Poll)),
        ("io_uring, driven, lazy", reaped(Reaping::Lazy)),
        ("threads, driven", backend(Backend::Threads, true)),
    ];
    for (name, options) in kinds {
        let Some((dir, _, devices)) = files(&options) else {
            continue;
        };
        worlds.push(World {
            name,
            array: driven(devices),
            _dir: Some(dir),
        });
    }
    let latency = Latency {
        service: Duration::from_micros(100),
        flush: Duration::from_micros(100),
        depth: 4,
    };
    let clock = Clock::manual(1);
    let slow = |below| {
        let device = LatencyDevice::new(below, latency, clock.clone());
        Arc::new(device) as Arc<dyn BlockDevice>
    };
    let sims = Sims::new(&SIZES, 5);
    worlds.push(World {
        name: "latency, driven",
        array: driven(sims.members().into_iter().map(slow).collect()),
        _dir: None,
    });
    let sims = Sims::new(&SIZES, 6);
    worlds.push(World {
        name: "simulated, driven",
        array: driven(sims.members()),
        _dir: None,
    });
    let plain = |device| Arc::new(Plain(device)) as Arc<dyn BlockDevice>;
    let sims = Sims::new(&SIZES, 7);
    worlds.push(World {
        name: "blocking, driven",
        array: driven(sims.members().into_iter().map(plain).collect()),
        _dir: None,
    });
    worlds
}

fn start(queues: &mut Queues, kind: Kind, tag: u64, memory: AlignedBuf, runs: &[Run]) -> FlightId {
    let flight = Flight { kind, memory, tag };
    match queues.submit(flight, runs) {
        Ok(id) => id,
        Err(refused) => panic!("{:?}", refused.error),
    }
}

/// Waits for all flights; by their tags.
fn land(queues: &mut Queues) -> BTreeMap<u64, Landed> {
    let mut landed = Vec::new();
    let mut all = BTreeMap::new();
    queues.ring();
    while queues.in_flight() > 0 {
        queues.wait(None, None);
        queues.reap(&mut landed);
        for flight in landed.drain(..) {
            assert!(all.insert(flight.tag, flight).is_none(), "landed twice");
        }
    }
    queues.reap(&mut landed);
    all.extend(landed.into_iter().map(|flight| (flight.tag, flight)));
    all
}

fn one(byte: u64, len: usize) -> [Run; 1] {
    [Run { byte, at: 0, len }]
}

#[test]
fn what_flights_write_flights_read_whatever_is_below() {
    for world in worlds() {
        let name = world.name;
        let before = world.array.stats();
        let mut queues = Queues::new(&world.array, 256, 4).unwrap();
        // One that goes over all devices, some small ones, and far more of them than a device works on at a time.
        let large = AlignedBuf::from_slice(&noise(1, 1 << 20));
        start(
            &mut queues,
            VOLATILE,
            1000,
            large.clone(),
            &one(8 << 20, 1 << 20),
        );
        let page = |i: u64| AlignedBuf::from_slice(&noise(i + 2, 4096));
        // Of memory that the kernel may have been told of, and other memory, in turn.
        let mut known = queues.buffers(4096, 100).unwrap();
        for i in 0..200 {
            let mut memory = page(i);
            if let Some(mut own) = known.pop().filter(|_| i % 2 == 0) {
                own.copy_from_slice(&memory);
                memory = own;
            }
            start(&mut queues, VOLATILE, i, memory, &one(i * 8192, 4096));
        }
        let written = land(&mut queues);
        assert_eq!(written.len(), 201, "{name}");
        assert!(
            written.values().all(|flight| flight.result.is_ok()),
            "{name}"
        );
        // Read back in another shape: two places far apart into the ends of one memory.
        let mut known = queues.buffers(16384, 50).unwrap();
        for i in 0..100 {
            let runs = [
                Run {
                    byte: (199 - i) * 8192,
                    at: 512,
                    len: 4096,
                },
                Run {
                    byte: (8 << 20) + i * 4096,
                    at: 8192,
                    len: 4096,
                },
            ];
            let memory = known.pop().unwrap_or_else(|| AlignedBuf::zeroed(16384));
            start(&mut queues, Kind::Read, i, memory, &runs);
        }
        for (i, flight) in land(&mut queues) {
            assert!(flight.result.is_ok(), "{name}");
            let mut expected = vec![0; 16384];
            expected[512..4608].copy_from_slice(&page(199 - i));
            let from = i as usize * 4096;
            expected[8192..12288].copy_from_slice(&large[from..from + 4096]);
            assert!(flight.memory[..] == expected[..], "{name}, flight {i}");
        }
        let mut back = AlignedBuf::zeroed(1 << 20);
        world.array.read(8 << 20, &mut back).unwrap();
        assert!(back[..] == large[..], "{name}");
        let after = world.array.stats();
        let sum = |of: fn(&device::DeviceStats) -> u64| {
            let all = |stats: &device::ArrayStats| stats.devices.iter().map(of).sum::<u64>();
            all(&after) - all(&before)
        };
        assert_eq!(sum(|d| d.writes), 200 + 256, "{name}");
        assert_eq!(sum(|d| d.written_bytes), 200 * 4096 + (1 << 20), "{name}");
        assert_eq!(sum(|d| d.read_bytes), 2 * 100 * 4096 + (1 << 20), "{name}");
        assert_eq!(sum(|d| d.errors), 0, "{name}");
    }
}

#[test]
fn what_makes_no_sense_is_given_back() {
    for world in worlds() {
        let mut queues = Queues::new(&world.array, 2, 4).unwrap();
        let end = world.array.bytes();
        let wrong = [
            vec![],
            vec![Run {
                byte: end,
                at: 0,
                len: 4096,
            }],
            vec![Run {
                byte: 100,
                at: 0,
                len: 4096,
            }],
            vec![Run {
                byte: 0,
                at: 100,
                len: 512,
            }],
            vec![Run {
                byte: 0,
                at: 4096,
                len: 512,
            }],
            vec![Run {
                byte: 0,
                at: 0,
                len: 0,
            }],
            vec![
                Run {
                    byte: 0,
                    at: 0,
                    len: 1024,
                },
                Run {
                    byte: 4096,
                    at: 512,
                    len: 512,
                },
            ],
        ];
        for runs in wrong {
            let flight = Flight {
                kind: Kind::Read,
                memory: AlignedBuf::zeroed(4096),
                tag: 1,
            };
            let refused = queues.submit(flight, &runs).unwrap_err();
            assert!(refused.error.is_some(), "{}: {runs:?}", world.name);
            assert_eq!(refused.flight.memory.len(), 4096);
        }
        for tag in 0..2 {
            start(
                &mut queues,
                Kind::Read,
                tag,
                AlignedBuf::zeroed(512),
                &one(0, 512),
            );
        }
        let flight = Flight {
            kind: Kind::Read,
            memory: AlignedBuf::zeroed(512),
            tag: 3,
        };
        let refused = queues.submit(flight, &one(0, 512)).unwrap_err();
        assert!(refused.error.is_none(), "there are as many as there may be");
        assert_eq!(land(&mut queues).len(), 2);
    }
}

#[test]
fn a_device_that_ends_too_early_fails_what_it_has_of_a_flight_and_nothing_else() {
    for options in [
        backend(Backend::IoUring, true),
        backend(Backend::Threads, true),
    ] {
        let Some((_dir, paths, devices)) = files(&options) else {
            continue;
        };
        let array = array(devices);
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(&paths[1])
            .unwrap();
        let cut = (12 << 20) + 4096;
        file.set_len(cut).unwrap();
        let mut queues = Queues::new(&array, 256, 8).unwrap();
        // Each block of a range that lies on all devices on both sides of the cut.
        let base = 30 << 20;
        for i in 0..250 {
            let byte = base + i * 64 * 1024;
            start(
                &mut queues,
                Kind::Read,
                i,
                AlignedBuf::zeroed(4096),
                &one(byte, 4096),
            );
        }
        let (mut good, mut bad) = (0, 0);
        for (i, flight) in land(&mut queues) {
            let mut pieces = Vec::new();
            let byte = base + i * 64 * 1024;
            array
                .geometry()
                .pieces(byte, 4096, |piece| pieces.push(piece));
            let gone = pieces[0].device == 1 && pieces[0].offset >= cut;
            assert_eq!(flight.result.is_err(), gone);
            match flight.result.map_err(|error| *error) {
                Ok(()) => good += 1,
                Err(Error::Io { device, offset, .. }) => {
                    bad += 1;
                    assert_eq!(
                        (device, offset),
                        (paths[1].display().to_string(), pieces[0].offset)
                    );
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert!(good > 100 && bad > 10, "{good} {bad}");
        // Over all devices: the first block that is not there is told.
        start(
            &mut queues,
            Kind::Read,
            1,
            AlignedBuf::zeroed(1 << 20),
            &one(40 << 20, 1 << 20),
        );
        let flight = land(&mut queues).remove(&1).unwrap();
        let mut lost = Vec::new();
        array.geometry().pieces(40 << 20, 1 << 20, |piece| {
            if piece.device == 1 && piece.offset >= cut {
                lost.push(piece.offset);
            }
        });
        assert!(
            matches!(flight.result.as_ref().map_err(|e| &**e), Err(Error::Io { offset, .. }) if *offset == lost[0]),
            "{:?}",
            flight.result
        );
    }
}

#[test]
fn what_is_in_flight_when_its_owner_goes_is_waited_for() {
    for world in worlds() {
        for round in 0..20 {
            let mut queues = Queues::new(&world.array, 64, 8).unwrap();
            for i in 0..64 {
                let (kind, memory) = match i % 2 {
                    0 => (Kind::Read, AlignedBuf::zeroed(8192)),
                    _ => (VOLATILE, AlignedBuf::from_slice(&[i as u8; 8192])),
                };
                start(&mut queues, kind, i, memory, &one(i * 8192, 8192));
            }
            match round % 3 {
                0 => {}
                1 => queues.ring(),
                _ => {
                    queues.ring();
                    queues.reap(&mut Vec::new());
                }
            }
        }
        let mut page = AlignedBuf::zeroed(8192);
        world.array.read(63 * 8192, &mut page).unwrap();
        assert!(
            page.iter().all(|&b| b == 63),
            "{}: a write was given up",
            world.name
        );
    }
}

#[test]
fn queues_go_on_in_another_thread_when_the_one_that_began_has_ended() {
    for world in worlds() {
        let data = AlignedBuf::from_slice(&noise(5, 1 << 20));
        world.array.write(0, &data, Durability::Volatile).unwrap();
        let (send, receive) = std::sync::mpsc::channel();
        let array = Arc::clone(&world.array);
        let begun = base::thread::spawn("begins", move || {
            let mut queues = Queues::new(&array, 256, 64).unwrap();
            for i in 0..256 {
                start(
                    &mut queues,
                    Kind::Read,
                    i,
                    AlignedBuf::zeroed(4096),
                    &one(i * 4096, 4096),
                );
            }
            queues.ring();
            send.send(queues).unwrap();
        });
        let mut queues = receive.recv().unwrap();
        begun.unwrap().join().unwrap();
        let landed = land(&mut queues);
        assert_eq!(landed.len(), 256);
        for (i, flight) in landed {
            assert!(flight.result.is_ok(), "{}: {:?}", world.name, flight.result);
            let at = i as usize * 4096;
            assert!(flight.memory[..] == data[at..at + 4096], "{}", world.name);
        }
    }
}

#[test]
fn a_stuck_device_keeps_its_own_flights_and_no_others() {
    let sims = Sims::new(&SIZES, 3);
    let array = array(sims.members());
    let mut queues = Queues::new(&array, 64, 4).unwrap();
    sims.devices[1].stick();
    let mut on_stuck = Vec::new();
    for i in 0..60u64 {
        let byte = (1 << 20) + i * STRIPE;
        let kind = if i % 4 == 3 { VOLATILE } else { Kind::Read };
        let id = start(
            &mut queues,
            kind,
            i,
            AlignedBuf::zeroed(4096),
            &one(byte, 4096),
        );
        let mut device = 0;
        array
            .geometry()
            .pieces(byte, 4096, |piece| device = piece.device);
        if device == 1 {
            on_stuck.push((i, id, kind));
        }
    }
    queues.ring();
    let mut landed = Vec::new();
    while queues.in_flight() > on_stuck.len() {
        queues.wait(None, None);
        queues.reap(&mut landed);
    }
    assert_eq!(landed.len(), 60 - on_stuck.len());
    assert!(
        landed
            .iter()
            .all(|l| on_stuck.iter().all(|(i, ..)| *i != l.tag))
    );
    // A read that is given up comes back at once, in the device's hands or not; a write does not.
    for (_, id, _) in &on_stuck {
        queues.cancel(*id);
        queues.cancel(*id);
    }
    let reads = on_stuck
        .iter()
        .filter(|(.., kind)| *kind == Kind::Read)
        .count();
    landed.clear();
    queues.reap(&mut landed);
    assert_eq!(landed.len(), reads);
    for flight in &landed {
        let Err(Error::Io { source, .. }) = flight.result.as_ref().map_err(|e| &**e) else {
            panic!("{:?}", flight.result);
        };
        assert_eq!(source.raw_os_error(), Some(libc::ECANCELED));
    }
    assert_eq!(queues.in_flight(), on_stuck.len() - reads);
    // Who waits is woken when the device answers.
    let device = Arc::clone(&sims.devices[1]);
    let released = base::thread::spawn("releases", move || device.release());
    assert_eq!(land(&mut queues).len(), on_stuck.len() - reads);
    released.unwrap().join().unwrap();
}

#[test]
fn a_write_counts_as_unflushed_before_it_has_landed() {
    let mut sims = Sims::new(&SIZES, 4);
    let array = array(sims.members());
    array.write_labels().unwrap();
    array.flush().unwrap();
    let flushes =
        |array: &Array| -> Vec<u64> { array.stats().devices.iter().map(|d| d.flushes).collect() };
    let before = flushes(&array);
    let mut queues = Queues::new(&array, 4, 4).unwrap();
    let page = AlignedBuf::from_slice(&[9; 4096]);
    start(&mut queues, VOLATILE, 1, page, &one(1 << 20, 4096));
    assert!(land(&mut queues)[&1].result.is_ok());
    let mut device = 0;
    array
        .geometry()
        .pieces(1 << 20, 4096, |piece| device = piece.device);
    assert!(!array.is_ordered());
    array.flush().unwrap();
    let mut expected = before;
    expected[device] += 1;
    assert_eq!(flushes(&array), expected);
    assert!(array.is_ordered());
    // One that fails may be there in part.
    sims.devices[device].fail_writes(Times::Next(1), None);
    let page = || AlignedBuf::from_slice(&[7; 4096]);
    start(&mut queues, VOLATILE, 2, page(), &one(1 << 20, 4096));
    assert!(land(&mut queues)[&2].result.is_err());
    assert!(!array.is_ordered());
    // One whose flush may fail, and take others with it, is no flight.
    let durable = Flight {
        kind: Kind::Write(Durability::Durable),
        memory: page(),
        tag: 3,
    };
    let refused = queues.submit(durable, &one(1 << 20, 4096)).unwrap_err();
    assert!(matches!(refused.error.as_deref(), Some(Error::NotInFlight)));
    drop(queues);
    sims.restart(&mut Rng::new(1));
}

#[test]
fn a_read_only_array_takes_no_writes() {
    let (_dir, paths, devices) = files(&OpenOptions::default()).unwrap();
    let sizes: Vec<u64> = devices.iter().map(|d| d.bytes()).collect();
    let made = Array::create(devices, plan(&sizes, STRIPE), "test", UUID, [7; 16]).unwrap();
    made.write_labels().unwrap();
    drop(made);
    let options = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    let array = Arc::new(Array::assemble(open_devices(&paths, &options).unwrap(), true).unwrap());
    let mut queues = Queues::new(&array, 4, 4).unwrap();
    let flight = Flight {
        kind: VOLATILE,
        memory: AlignedBuf::zeroed(4096),
        tag: 1,
    };
    let refused = queues.submit(flight, &one(0, 4096)).unwrap_err();
    assert!(matches!(refused.error.as_deref(), Some(Error::ReadOnly)));
    start(
        &mut queues,
        Kind::Read,
        1,
        AlignedBuf::zeroed(4096),
        &one(0, 4096),
    );
    assert!(land(&mut queues)[&1].result.is_ok());
}

#[test]
fn slow_devices_take_their_time_beside_each_other() {
    let (_dir, _, devices) = files(&OpenOptions::default()).unwrap();
    let clock = Clock::manual(1);
    let latency = Latency {
        service: Duration::from_millis(1),
        flush: Duration::from_millis(1),
        depth: 4,
    };
    let slow = |below| {
        let device = LatencyDevice::new(below, latency, clock.clone());
        Arc::new(device) as Arc<dyn BlockDevice>
    };
    let array = array(devices.into_iter().map(slow).collect());
    let mut queues = Queues::new(&array, 64, 4).unwrap();
    let start_ns = clock.monotonic_ns();
    // Eight on each of the three.
    for i in 0..24 {
        let byte = (1 << 20) + i * STRIPE;
        start(
            &mut queues,
            Kind::Read,
            i,
            AlignedBuf::zeroed(4096),
            &one(byte, 4096),
        );
    }
    assert_eq!(land(&mut queues).len(), 24);
    assert_eq!(clock.monotonic_ns() - start_ns, 2_000_000);
}

#[test]
fn whoever_waits_for_flights_hears_a_bell_too() {
    for world in worlds() {
        let mut queues = Queues::new(&world.array, 4, 4).unwrap();
        let bell: Arc<Bell> = Arc::clone(queues.bell());
        let rung = bell.rung();
        let other = base::thread::spawn("rings", move || bell.ring());
        // Nothing is in flight: only the bell can end this.
        queues.wait(Some(rung), None);
        other.unwrap().join().unwrap();
        assert!(queues.bell().rung() > rung);
        // Nothing at all can happen: no wait.
        queues.wait(None, None);
    }
}

/// Submits, cancels, fails, sticks, reaps and goes, at random: each flight lands once, with its own memory.
#[test]
fn no_flight_is_lost_or_landed_twice() {
    let (mut landed_all, mut cancelled, mut failed) = (0, 0, 0);
    for seed in 0..200 {
        let mut rng = Rng::new(seed);
        let sims = Sims::new(&SIZES, seed);
        let array = array(sims.members());
        let room = 1 + rng.below(40) as usize;
        let mut queues = Queues::new(&array, room, 1 + rng.below(8) as usize).unwrap();
        let mut flying: BTreeMap<u64, (FlightId, usize)> = BTreeMap::new();
        let (mut landed, mut next) = (Vec::new(), 0);
        for _ in 0..300 {
            let device = rng.pick(&sims.devices);
            match rng.below(16) {
                0 => device.stick(),
                1 => device.release(),
                2 => device.fail_reads(Times::Next(1), None),
                3 => device.fail_writes(Times::Next(1), None),
                4 | 5 => {
                    let ids: Vec<FlightId> = flying.values().map(|(id, _)| *id).collect();
                    if let Some(id) = (!ids.is_empty()).then(|| *rng.pick(&ids)) {
                        queues.cancel(id);
                    }
                }
                6..=9 => queues.reap(&mut landed),
                _ => {
                    let len = 4096 * (1 + rng.below(6) as usize);
                    let memory = match rng.one_in(4) {
                        true => queues.buffers(len, 1).unwrap().pop(),
                        false => None,
                    };
                    let kind = if rng.one_in(3) { VOLATILE } else { Kind::Read };
                    let flight = Flight {
                        kind,
                        memory: memory.unwrap_or_else(|| AlignedBuf::zeroed(len)),
                        tag: next,
                    };
                    let byte = rng.below(1000) * 4096;
                    match queues.submit(flight, &one(byte, len)) {
                        Ok(id) => {
                            flying.insert(next, (id, len));
                            next += 1;
                        }
                        Err(refused) => {
                            assert!(refused.error.is_none());
                            assert_eq!(refused.flight.memory.len(), len);
                        }
                    }
                    queues.ring();
                }
            }
            for flight in landed.drain(..) {
                let (_, len) = flying
                    .remove(&flight.tag)
                    .expect("in flight until it lands");
                assert_eq!(flight.memory.len(), len);
                landed_all += 1;
                if let Err(Error::Io { source, .. }) = flight.result.as_ref().map_err(|e| &**e) {
                    let given_up = source.raw_os_error() == Some(libc::ECANCELED);
                    cancelled += u32::from(given_up);
                    failed += u32::from(!given_up);
                }
            }
            assert_eq!(queues.in_flight(), flying.len());
        }
        for device in &sims.devices {
            device.heal();
        }
        if rng.one_in(2) {
            let rest = land(&mut queues);
            assert_eq!(rest.len(), flying.len());
        }
    }
    assert!(
        landed_all > 10_000 && cancelled > 500 && failed > 500,
        "{landed_all} {cancelled} {failed}"
    );
}

/// A wrapper that is asked what is done at once sees it as before.
#[test]
fn a_device_that_knows_no_flights_is_asked_in_batches() {
    struct Counting(Arc<dyn BlockDevice>, base::sync::Mutex<Vec<usize>>);
    impl BlockDevice for Counting {
        device::described_by!(0);
        fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
            let reads = |r: &&Request<'_>| matches!(r.operation, Operation::Read { .. });
            self.1.lock().push(requests.iter().filter(reads).count());
            self.0.run(requests, meanwhile);
        }
        fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
            self.0.discard(offset, len)
        }
    }
    let sims = Sims::new(&[72 << 20], 5);
    let device = Arc::new(Counting(
        sims.members().remove(0),
        base::sync::Mutex::new(base::sync::rank::LEAF, Vec::new()),
    ));
    let array = array(vec![Arc::clone(&device) as Arc<dyn BlockDevice>]);
    device.1.lock().clear();
    let mut queues = Queues::new(&array, 10, 4).unwrap();
    for i in 0..10 {
        start(
            &mut queues,
            Kind::Read,
            i,
            AlignedBuf::zeroed(4096),
            &one(i * 8192, 4096),
        );
    }
    assert_eq!(land(&mut queues).len(), 10);
    assert_eq!(*device.1.lock(), [4, 4, 2]);
}

/// The end of such a wait overflowed: a panic, or a wait that was over at once, again and again.
#[test]
fn a_wait_may_be_as_long_as_a_duration_tells() {
    for world in worlds() {
        let name = world.name;
        let mut queues = Queues::new(&world.array, 4, 4).unwrap();
        for patience in [Duration::MAX, Duration::from_nanos(u64::MAX)] {
            for tag in 0..4 {
                let memory = AlignedBuf::zeroed(256 << 10);
                start(&mut queues, Kind::Read, tag, memory, &one(0, 256 << 10));
            }
            let mut landed = Vec::new();
            while queues.in_flight() > 0 {
                queues.wait(None, Some(patience));
                queues.reap(&mut landed);
            }
            assert_eq!(landed.len(), 4, "{name}");
            assert!(landed.iter().all(|landed| landed.result.is_ok()), "{name}");
        }
    }
}
