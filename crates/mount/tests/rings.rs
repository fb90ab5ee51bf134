//! Requests of a mount that come by io_uring, of CPUs that run only after the mount.
//!
//! Needs two CPUs, and `Y` in the parameter `enable_uring` of the module `fuse`: it is set meanwhile, as root.

mod common;
#[path = "common/world.rs"]
mod world;

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use common::pattern;
use mount::atomic_ioctl::{ABORT, START};
use mount::session::{Config, serve};
use mount::sheaf_ops::SheafOps;
use mount::transport::dev_fuse::DevFuse;
use mount::transport::uring::{self, Plan, RingFuse};
use mount::{Insist, mounting};
use world::World;

/// Nothing takes so long that is not stuck.
const STUCK: Duration = Duration::from_secs(60);
const ROUNDS: usize = 250;
const BYTES: usize = 256 << 10;
/// The one that comes later.
const CPU: u16 = 1;

fn ask(file: &File, command: u32) -> bool {
    // SAFETY: these commands take no argument.
    unsafe { libc::ioctl(file.as_raw_fd(), libc::Ioctl::from(command)) == 0 }
}

/// Has the kernel drop what it has cached of a file, as far as nobody has it locked.
fn forget(file: &File) {
    // SAFETY: no memory is involved.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

fn open(path: &Path) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap()
}

/// Reads a file again and again, so that its pages wait for requests most of the time.
fn read_on(path: &Path) {
    let (file, mut data) = (open(path), vec![0; BYTES]);
    for _ in 0..ROUNDS {
        forget(&file);
        file.read_exact_at(&mut data, 0).unwrap();
        assert!(data == pattern(BYTES, 1));
    }
}

/// The kernel offers rings as long as this lives, if it can.
struct Offered {
    before: Option<String>,
}

impl Offered {
    fn by_the_kernel() -> Offered {
        let before = match uring::is_enabled() {
            true => None,
            false => fs::read_to_string(uring::PARAMETER).ok(),
        };
        Offered {
            before: before.filter(|_| fs::write(uring::PARAMETER, "Y").is_ok()),
        }
    }
}

impl Drop for Offered {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            fs::write(uring::PARAMETER, before.trim()).unwrap();
        }
    }
}

/// Has the daemon drop its pages again and again.
fn abort_on(path: &Path) {
    let file = open(path);
    let mut begun = 0;
    for _ in 0..ROUNDS {
        begun += usize::from(ask(&file, START));
        assert!(ask(&file, ABORT));
    }
    assert!(begun > 0, "none has begun");
}

/// The one worker of such a CPU dropped a page that was locked until that worker had answered the next request.
#[test]
fn programs_on_a_cpu_that_came_later_are_served() {
    let at_work = |cpus: Vec<usize>| [0, usize::from(CPU)].iter().all(|cpu| cpus.contains(cpu));
    let _offered = Offered::by_the_kernel();
    if !uring::is_enabled() || !at_work(base::thread::allowed_cpus()) {
        return base::skip("FUSE over io_uring, and two CPUs");
    }
    let Some(world) = World::new() else { return };
    let by_rings = |fs, path: &Path, options: &_, ready: &dyn Fn(_)| {
        let config = Config::default();
        let plan = Plan::new(&config).unwrap().with_late(CPU);
        let mounted = mounting::mount(path, options, None)?;
        let transport = RingFuse::new(DevFuse::new(mounted.fd), plan);
        let operations = SheafOps::new(fs, options);
        serve(transport, operations, &config, || ready(mounted.unmounter))
    };
    let mounted = world.mount_by("", |device| device, by_rings);
    let path = mounted.path("file");
    fs::write(&path, pattern(BYTES, 1)).unwrap();
    let (tell, ended) = mpsc::channel();
    let programs: [fn(&Path); 3] = [read_on, read_on, abort_on];
    let threads = programs.map(|program| {
        let (tell, path) = (tell.clone(), path.clone());
        let pinned = move || {
            base::thread::pin(CPU.into()).unwrap();
            program(&path);
            tell.send(()).unwrap();
        };
        base::thread::spawn("late", pinned).unwrap()
    });
    let served = (0..threads.len()).all(|_| ended.recv_timeout(STUCK).is_ok());
    if !served {
        // Else not even this process could end.
        mounted.session.unmounter.unmount(Insist::Abort).unwrap();
    }
    let joined = threads.map(|thread| thread.join());
    assert!(served, "they wait for ever");
    joined.into_iter().for_each(|ended| ended.unwrap());
    mounted.end();
    let mounted = world.mount("");
    assert!(fs::read(path).unwrap() == pattern(BYTES, 1));
    mounted.end();
}
