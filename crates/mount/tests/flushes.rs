//! Programs that sync, more of them than a mount has workers, keep nobody else waiting.

mod common;
#[path = "common/world.rs"]
mod world;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use base::sync::{Condvar, Mutex, rank};
use common::pattern;
use device::{BlockDevice, Durability, Operation, Request};
use world::World;

const OPTIONS: &str = "workers=4";
/// That sync: many more than workers.
const PROGRAMS: usize = 40;
const BYTES: usize = 10_000;
/// Nothing takes so long that is not stuck.
const STUCK: Duration = Duration::from_secs(60);

/// What devices have to wait for before something is durable.
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn open(&self, is_open: bool) {
        *self.is_open.lock() = is_open;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let mut is_open = self.is_open.lock();
        while !*is_open {
            self.opened.wait(&mut is_open);
        }
    }
}

/// A device whose flushes and durable writes take as long as the test likes.
struct Slow {
    below: Arc<dyn BlockDevice>,
    gate: Arc<Gate>,
}

impl BlockDevice for Slow {
    device::described_by!(below);

    fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        let is_slow = |request: &Request<'_>| match &request.operation {
            Operation::Flush => true,
            Operation::Write { durability, .. } => *durability == Durability::Durable,
            Operation::Read { .. } => false,
        };
        if requests.iter().any(is_slow) {
            self.gate.pass();
        }
        self.below.run(requests, meanwhile);
    }

    fn discard(&self, offset: u64, len: u64) -> std::io::Result<()> {
        self.below.discard(offset, len)
    }
}

/// Where the kernel says how many requests of a mount are not answered.
fn unanswered_of(mountpoint: &Path) -> PathBuf {
    let device = fs::metadata(mountpoint).unwrap().dev();
    let number = u64::from(libc::major(device)) << 20 | u64::from(libc::minor(device));
    Path::new("/sys/fs/fuse/connections").join(format!("{number}/waiting"))
}

fn wait_for_unanswered(at: &Path, count: usize) {
    let now = || fs::read_to_string(at).unwrap().trim().parse::<usize>();
    let end = base::clock::now_ns() + STUCK.as_nanos() as u64;
    while now().unwrap() < count {
        assert!(
            base::clock::now_ns() < end,
            "programs have not come to wait"
        );
        base::thread::yield_now();
    }
}

/// More syncs than workers had all of them, and whoever looked a name up or read a file waited for the flush of a device.
#[test]
fn who_looks_up_and_reads_waits_for_no_flush_of_others() {
    let Some(world) = World::new() else { return };
    let gate = Arc::new(Gate {
        is_open: Mutex::new(rank::LEAF, true),
        opened: Condvar::new(),
    });
    let mounted = world.mount_over(OPTIONS, |below| {
        let gate = Arc::clone(&gate);
        Arc::new(Slow { below, gate })
    });
    let unanswered = unanswered_of(&mounted.at);
    if !unanswered.exists() {
        base::skip("the control file system of FUSE");
        return mounted.end();
    }
    fs::create_dir(mounted.path("folder")).unwrap();
    let files: Vec<File> = (0..PROGRAMS)
        .map(|n| File::create(mounted.path(&format!("{n}"))).unwrap())
        .collect();
    gate.open(false);
    let (tell, ended) = mpsc::channel();
    let mut threads = Vec::new();
    for (n, mut file) in files.into_iter().enumerate() {
        let (tell, folder) = (tell.clone(), mounted.path("folder"));
        let program = move || {
            file.write_all(&pattern(BYTES, n as u64)).unwrap();
            match n % 4 {
                0 => File::open(folder).unwrap().sync_all().unwrap(),
                _ => file.sync_all().unwrap(),
            }
            drop(file);
            tell.send("synced").unwrap();
        };
        threads.push(base::thread::spawn("syncs", program).unwrap());
    }
    // Of the folder one sync comes at a time.
    wait_for_unanswered(&unanswered, PROGRAMS - PROGRAMS / 4 + 1);

    let other = mounted.path("other");
    let program = move || {
        assert!(!other.exists());
        fs::write(&other, "content").unwrap();
        assert_eq!(fs::read(&other).unwrap(), b"content");
        tell.send("served").unwrap();
    };
    threads.push(base::thread::spawn("reads", program).unwrap());
    let first = ended.recv_timeout(STUCK);
    gate.open(true);
    assert_eq!(first, Ok("served"), "while nothing is synced");
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
    let synced = ended.iter().filter(|what| *what == "synced");
    assert_eq!(synced.count(), PROGRAMS);
    mounted.end();
    let mounted = world.mount(OPTIONS);
    for n in 0..PROGRAMS {
        let content = fs::read(mounted.path(&format!("{n}"))).unwrap();
        assert!(content == pattern(BYTES, n as u64), "file {n}");
    }
    mounted.end();
}
