//! What becomes of transfers in flight where the process has few descriptors, or little memory that may be locked.

use crate::fixture::{CLAIMS, create, noise};
use device::{
    AlignedBuf, Array, Backend, Durability, Error, Flight, Io, Kind, OpenOptions, Queues, Run,
    Topology, create_image, open_devices,
};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Barrier};

/// Says to a test that it is in the child that it has started.
const IN_CHILD: &str = "SHEAF_TEST_OF_SCARCITY";
const SIZES: [u64; 3] = [24 << 20; 3];
const LEN: usize = 16 << 10;

/// Runs the test in a child with such a limit; the child is told that it is one.
fn in_child(test: &str, program: &[&str], limit: &str) {
    let script = format!("ulimit {limit} && exec \"$0\" \"$@\"");
    let words = program.iter().copied().chain(["sh", "-c", &script]);
    let words: Vec<&str> = words.collect();
    let mut child = Command::new(words[0]);
    child
        .args(&words[1..])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(IN_CHILD, "yes")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let claims = CLAIMS.lock();
    let child = child.spawn();
    drop(claims);
    let out = match child.and_then(Child::wait_with_output) {
        Ok(out) => out,
        Err(error) => {
            return base::skip(&format!("{} ({error})", words[0]));
        }
    };
    let told = String::from_utf8_lossy(&out.stdout);
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(
        out.status.success() && told.contains("1 passed"),
        "{told}\n{errors}"
    );
}

/// Arrays on files by io_uring, in either submission topology; none where this machine has none.
fn arrays(mut with: impl FnMut(&Arc<Array>)) {
    for topology in Topology::ALL {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<_> = (0..SIZES.len())
            .map(|i| dir.path().join(i.to_string()))
            .collect();
        for (path, bytes) in paths.iter().zip(SIZES) {
            create_image(path, bytes).unwrap();
        }
        let options = OpenOptions {
            backend: Backend::IoUring,
            topology,
            ..OpenOptions::default()
        };
        match open_devices(&paths, &options) {
            Ok(devices) => with(&Arc::new(create(devices, 4096))),
            Err(Error::NoIoUring { .. }) => base::skip("io_uring"),
            Err(error) => panic!("{error}"),
        }
    }
}

fn land(queues: &mut Queues, count: usize) -> Vec<AlignedBuf> {
    let mut landed = Vec::new();
    while queues.in_flight() > 0 {
        queues.wait(None, None);
        queues.reap(&mut landed);
    }
    assert_eq!(landed.len(), count);
    landed.sort_by_key(|landed| landed.tag);
    let memory = landed.into_iter().map(|landed| {
        landed.result.unwrap();
        landed.memory
    });
    memory.collect()
}

/// Many flights write, many read what was written.
fn fly(array: &Arc<Array>, flights: usize, depth: usize) {
    let mut queues = Queues::new(array, flights, depth).unwrap();
    let bytes = |tag: usize| AlignedBuf::from_slice(&noise(tag as u64, LEN));
    for kind in [Kind::Write(Durability::Volatile), Kind::Read] {
        // There may be no room to lock these: then they are like others.
        let mut memory = queues.buffers(LEN, flights).unwrap().into_iter();
        for tag in 0..flights {
            let mut memory = memory.next().unwrap();
            if kind != Kind::Read {
                memory.copy_from_slice(&bytes(tag));
            }
            let run = Run {
                byte: (tag * LEN) as u64,
                at: 0,
                len: LEN,
            };
            let flight = Flight {
                kind,
                memory,
                tag: tag as u64,
            };
            queues.submit(flight, &[run]).unwrap();
        }
        queues.ring();
        for (tag, memory) in land(&mut queues, flights).into_iter().enumerate() {
            assert!(*memory == *bytes(tag), "{kind:?} {tag}");
        }
    }
}

/// Calls that wait went on, by calls without a ring, and whoever wanted queues got an error.
#[test]
fn what_is_in_flight_lands_without_a_descriptor_for_a_ring() {
    if std::env::var_os(IN_CHILD).is_none() {
        let test = "scarce::what_is_in_flight_lands_without_a_descriptor_for_a_ring";
        return in_child(test, &[], "-n 200");
    }
    arrays(|array| {
        let mut taken = Vec::new();
        while let Ok(file) = File::open("/dev/null") {
            taken.push(file);
        }
        fly(array, 128, 64);
        drop(taken);
        // And on a ring.
        fly(array, 128, 64);
    });
}

/// A ring of all the entries or none was what there was: 64 KiB are locked by fewer than these need, and by some users' defaults.
#[test]
fn what_is_in_flight_lands_with_little_memory_that_may_be_locked() {
    if std::env::var_os(IN_CHILD).is_none() {
        let test = "scarce::what_is_in_flight_lands_with_little_memory_that_may_be_locked";
        let words = [
            "setpriv",
            "--inh-caps=-ipc_lock",
            "--bounding-set=-ipc_lock",
        ];
        let is_root = std::fs::metadata("/proc/self").unwrap().uid() == 0;
        // Who may lock whatever memory is not limited.
        let program = if is_root { &words[..] } else { &[] };
        return in_child(test, program, "-l 64");
    }
    arrays(|array| fly(array, 512, 256));
}

/// Each thread kept a ring for each device, and the program had no descriptor left.
#[test]
fn threads_leave_the_program_most_of_its_descriptors() {
    const THREADS: usize = 60;
    if std::env::var_os(IN_CHILD).is_none() {
        let test = "scarce::threads_leave_the_program_most_of_its_descriptors";
        return in_child(test, &[], "-n 256");
    }
    let open = || {
        let all = std::fs::read_dir("/proc/self/fd").ok()?;
        let targets = all.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        Some(
            targets
                .filter(|target| target.ends_with("anon_inode:[io_uring]"))
                .count(),
        )
    };
    arrays(|array| {
        let bytes = noise(1, 16 * LEN);
        array.write(0, &bytes, Durability::Volatile).unwrap();
        let (all, seen) = (Barrier::new(THREADS), Barrier::new(THREADS));
        base::thread::parallel(THREADS, |thread| {
            let mut rounds = 0;
            let mut read = || {
                let mut found = vec![0; bytes.len()];
                let parts = found.chunks_mut(LEN).zip((0..).step_by(LEN));
                let mut ios: Vec<_> = parts.map(|(buf, byte)| Io::Read { byte, buf }).collect();
                array.execute(&mut ios).unwrap();
                rounds += 1;
                assert!(found == bytes, "{rounds}");
            };
            read();
            all.wait();
            let rings = if thread == 0 { open() } else { Some(1) };
            seen.wait();
            let rings = rings.expect("descriptors are left");
            assert!((1..=64).contains(&rings), "{rings} rings");
            (0..10).for_each(|_| read());
        });
    });
}
