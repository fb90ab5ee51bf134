//! `sheaf mount`: opens the array, mounts, and serves until the mount ends.
//!
//! The command starts itself again as a daemon ([`crate::daemon`]) and returns when that
//! says it is ready; with `--foreground` it serves the mount itself.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base::cgroup;
use base::sys::memory_bytes;
use device::{Array, Backend, ReapRing, Reaping, Topology};
use fs::{FileSystem, FsOptions};
use mount::metrics::{Endpoint, FuseWay, MetricsServer};
use mount::{DeviceClaim, MountOptions};

use crate::args::Mount;
use crate::daemon::PidFile;
use crate::devices::{self, Access};
use crate::failure::{Failure, Outcome};
use crate::{arrival, daemon, helper, logging, output, size, spared, umount};

pub fn run(args: &Mount) -> Outcome {
    if args.daemon {
        return serve(args);
    }
    // What is wrong with the options is better said before there is a daemon. Waiting is better done then,
    // too: who gives up ends this process.
    let settings = Settings::parse(args)?;
    let (given, _) = places(args)?;
    arrival::wait(given, settings.device_timeout);
    if args.may_be_absent
        && let Some(absent) = arrival::absent(given)
    {
        absent
            .after("nothing is mounted, which is no failure with nofail")
            .tell();
        return Ok(0);
    }
    match args.foreground {
        true => serve(args),
        false => daemon::start(&daemon_arguments()?),
    }
}

/// Whether a mount with these options could be written to.
pub fn check_options(options: &[String]) -> Result<(), Failure> {
    let settings = Settings::parse(&Mount {
        options: options.to_vec(),
        ..Mount::default()
    })?;
    match settings.mount.read_only {
        true => Err(Failure::usage("nothing can be written with -o ro")),
        false => Ok(()),
    }
}

/// This call's arguments, and one that makes it the daemon.
fn daemon_arguments() -> Result<Vec<OsString>, Failure> {
    let mut arguments = helper::translate(std::env::args_os().collect())?;
    arguments.remove(0);
    arguments.insert(1, OsString::from("--daemon"));
    Ok(arguments)
}

/// What the options say.
struct Settings {
    mount: MountOptions,
    fs: FsOptions,
    access: Access,
    metrics: Option<Endpoint>,
    /// How long to wait for devices that are not there yet.
    device_timeout: Duration,
    /// Bytes that the buffers of workers may take beyond the limit of memory, as somebody asked for so many.
    beyond_limit: usize,
    /// Bytes of memory that `cache_size` allows.
    limit: usize,
}

impl Settings {
    fn parse(args: &Mount) -> Result<Self, Failure> {
        let mut fs = FsOptions::default();
        let mut access = Access::default();
        let mut metrics = None;
        let mut device_timeout = Duration::ZERO;
        let mut caches = Caches::default();
        let mut problem = None;
        let text = args.options.join(",");
        let mut mount = MountOptions::parse_with(&text, &mut |name, value| {
            let known = caches.take(name, value).and_then(|known| match known {
                true => Ok(true),
                false if name == "metrics" => take_metrics(&mut metrics, value),
                false if name == "device_timeout" => {
                    device_timeout = seconds(name, value.unwrap_or_default())?;
                    Ok(true)
                }
                false => take_option(&mut fs, &mut access, name, value),
            });
            Ok(known.unwrap_or_else(|failure| {
                problem.get_or_insert(failure);
                true
            }))
        })?;
        if let Some(problem) = problem {
            return Err(problem);
        }
        mount.read_only |= args.read_only;
        if let Some(bytes) = args.cache_size {
            caches.limit(bytes)?;
        }
        let limit = caches.bytes();
        fs = fs.with_memory(limit);
        let beyond_limit = mount.limit_workers(limit / 8);
        fs.data.atime = match mount.atime {
            mount::AtimePolicy::Relative => fs::AtimePolicy::Relative,
            mount::AtimePolicy::Never => fs::AtimePolicy::Never,
            mount::AtimePolicy::Always => fs::AtimePolicy::Always,
        };
        fs.data.directory_atime = !mount.no_diratime;
        if mount.read_only {
            fs = fs.read_only();
        }
        Ok(Settings {
            mount,
            fs,
            access,
            metrics,
            device_timeout,
            beyond_limit,
            limit,
        })
    }
}

/// Memory for contents and metadata together.
#[derive(Default)]
struct Caches {
    total: Option<u64>,
}

impl Caches {
    /// As the help of the option says.
    const LEAST: u64 = 8 << 20;
    /// Without an option not more than this, even where there is much memory: the kernel
    /// caches contents as well.
    const DEFAULT_MOST: u64 = 1 << 30;

    fn take(&mut self, name: &str, value: Option<&str>) -> Result<bool, Failure> {
        if name != "cache_size" {
            return Ok(false);
        }
        let value = value
            .ok_or_else(|| Failure::usage(format!("option {name} needs a size, as {name}=512M")))?;
        let bytes =
            size::parse(value).map_err(|why| Failure::usage(format!("{name}={value}: {why}")))?;
        self.limit(bytes)?;
        Ok(true)
    }

    fn limit(&mut self, bytes: u64) -> Result<(), Failure> {
        check_memory(bytes)?;
        if bytes > memory_bytes() {
            let all = size::text(memory_bytes());
            return Err(Failure::usage(format!(
                "cache_size is {}, and this machine has {all} of memory; half of that leaves room for all else",
                size::text(bytes)
            )));
        }
        self.total = Some(bytes);
        Ok(())
    }

    /// What was asked for; by default a quarter at most of the memory that this process may have.
    fn bytes(&self) -> usize {
        self.total.unwrap_or_else(default_memory) as usize
    }
}

/// Whether memory of this size is enough.
pub fn check_memory(bytes: u64) -> Result<(), Failure> {
    match bytes < Caches::LEAST {
        true => Err(Failure::usage(format!(
            "cache_size must be at least {}",
            size::text(Caches::LEAST)
        ))),
        false => Ok(()),
    }
}

/// Bytes of memory that Sheaf takes where nothing else is said.
pub fn default_memory() -> u64 {
    (cgroup::memory_bytes() / 4).clamp(Caches::LEAST, Caches::DEFAULT_MOST)
}

fn take_metrics(metrics: &mut Option<Endpoint>, value: Option<&str>) -> Result<bool, Failure> {
    let endpoint = value.and_then(Endpoint::parse).ok_or_else(|| {
        let value = value.unwrap_or_default();
        Failure::usage(format!(
            "metrics={value}: give a path from the root for a socket, or a loopback address with a port, as 127.0.0.1:9100"
        ))
    })?;
    *metrics = Some(endpoint);
    Ok(true)
}

/// Options that are neither the kernel's nor about caches.
fn take_option(
    fs: &mut FsOptions,
    access: &mut Access,
    name: &str,
    value: Option<&str>,
) -> Result<bool, Failure> {
    match (name, value) {
        ("discard", None) => fs.store.discard = true,
        ("nodiscard", None) => fs.store.discard = false,
        ("commit", Some(value)) => fs.store.commit_interval = period(name, value)?,
        ("checkpoint", Some(value)) => fs.store.checkpoint_interval = period(name, value)?,
        ("checkpoint_workers", Some(value)) => fs.store.workers = workers(name, value)?,
        ("write_back", Some(value)) => fs.data.write_back_age = seconds(name, value)?,
        ("pre_clean", Some(value)) => fs.data.pre_clean = on_or_off(name, value)?,
        ("mtime_persist", Some(value)) => fs.data.mtime_persist = interval(name, value)?,
        ("io", Some(value)) => access.backend = backend(name, value)?,
        ("topology", Some(value)) => access.topology = topology(name, value)?,
        ("reap_ring", Some(value)) => access.reap_ring = reap_ring(name, value)?,
        ("reap", Some(value)) => access.reap = reaping(name, value)?,
        _ => return Ok(false),
    }
    Ok(true)
}

fn on_or_off(name: &str, value: &str) -> Result<bool, Failure> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(Failure::usage(format!("{name}={value}: give on or off"))),
    }
}

fn backend(name: &str, value: &str) -> Result<Backend, Failure> {
    match value {
        "auto" => Ok(Backend::Auto),
        "uring" => Ok(Backend::IoUring),
        "threads" => Ok(Backend::Threads),
        _ => Err(Failure::usage(format!(
            "{name}={value}: give one of auto, uring, threads"
        ))),
    }
}

fn topology(name: &str, value: &str) -> Result<Topology, Failure> {
    Topology::parse(value).ok_or_else(|| {
        let names = Topology::ALL.map(Topology::name).join(" or ");
        Failure::usage(format!("{name}={value}: give {names}"))
    })
}

fn reaping(name: &str, value: &str) -> Result<Reaping, Failure> {
    Reaping::parse(value).ok_or_else(|| {
        let names = Reaping::ALL.map(Reaping::name).join(", ");
        Failure::usage(format!("{name}={value}: give one of {names}"))
    })
}

fn reap_ring(name: &str, value: &str) -> Result<ReapRing, Failure> {
    ReapRing::parse(value).ok_or_else(|| {
        let names = ReapRing::ALL.map(ReapRing::name).join(" or ");
        Failure::usage(format!("{name}={value}: give {names}"))
    })
}

/// The least time between two commits, or checkpoints, that nobody asks for.
const PERIOD_LEAST: Duration = Duration::from_millis(10);

fn seconds(name: &str, value: &str) -> Result<Duration, Failure> {
    value
        .parse::<f64>()
        .ok()
        .filter(|s| (0.0..=3600.0).contains(s))
        .map(Duration::from_secs_f64)
        .ok_or_else(|| {
            Failure::usage(format!(
                "{name}={value}: give a number of seconds up to 3600"
            ))
        })
}

/// How often a thread does something: not all the time.
fn period(name: &str, value: &str) -> Result<Duration, Failure> {
    let period = seconds(name, value)?;
    match period < PERIOD_LEAST {
        true => Err(Failure::usage(format!(
            "{name}={value}: give at least {} seconds",
            PERIOD_LEAST.as_secs_f64()
        ))),
        false => Ok(period),
    }
}

fn workers(name: &str, value: &str) -> Result<usize, Failure> {
    let workers = value.parse().ok();
    workers
        .filter(|n| (1..=engine::THREADS_MAX).contains(n))
        .ok_or_else(|| {
            let most = engine::THREADS_MAX;
            Failure::usage(format!("{name}={value}: give a number from 1 to {most}"))
        })
}

/// A time with its unit.
fn interval(name: &str, value: &str) -> Result<Duration, Failure> {
    let digits = value.find(|c: char| !c.is_ascii_digit());
    let (number, unit) = value.split_at(digits.unwrap_or(value.len()));
    let number: Option<u64> = number.parse().ok();
    let interval = number.and_then(|number| match (number, unit) {
        (0, "") => Some(Duration::ZERO),
        (_, "s") => Some(Duration::from_secs(number)),
        (_, "ms") => Some(Duration::from_millis(number)),
        _ => None,
    });
    interval
        .filter(|interval| *interval <= Duration::from_secs(3600))
        .ok_or_else(|| {
            Failure::usage(format!(
                "{name}={value}: give a whole number with its unit, up to 3600s, such as 1s or 10ms, or 0 for every fsync"
            ))
        })
}

/// How the line begins that says, in the foreground, that the mount is usable.
pub const USABLE: &str = "Mounted at";

/// Opens, mounts, and serves until the mount ends.
fn serve(args: &Mount) -> Outcome {
    let settings = Settings::parse(args)?;
    let (pid_file, log) = prepare_process(args, &settings)?;
    let (array, mountpoint) = open_devices(args, &settings)?;
    let outcome = mount::Outcome::new().map_err(|e| Failure::io("a pipe", &e))?;
    let outcome = Arc::new(outcome);
    let fs = open(&array, settings.fs)?;
    let way = FuseWay::default();
    let metrics = match before_it_is_usable(args, settings.metrics.as_ref(), &fs, &way) {
        Ok(metrics) => metrics,
        Err(failure) => {
            // Nothing happened: the next mount has nothing to recover.
            fs.close()?;
            return Err(failure);
        }
    };
    let mounting = Mounting {
        args,
        title: devices::title(&array),
        mountpoint,
        options: &settings.mount,
        pid_file,
        log,
        metrics,
        way,
    };
    let result = mounting.until_unmounted(&fs, &array, &outcome);
    // Last of all: whoever unmounted waits for this.
    let failure = result.as_ref().err();
    let message = failure.map(|failure| failure.message().unwrap_or("failed"));
    if let Err(error) = outcome.tell(message) {
        tracing::warn!("nobody hears how it ended: {error}");
    }
    result.map(|()| 0)
}

/// Makes this process what serves a mount, and says what it will lack. Returns the pid file and the log, where they have names.
fn prepare_process(
    args: &Mount,
    settings: &Settings,
) -> Result<(Option<PidFile>, Option<Arc<File>>), Failure> {
    let (given, _) = places(args)?;
    for (option, path) in named_files(args) {
        spared::check(option, path)?;
        spared::check_beside_given(option, path, given)?;
    }
    // Where it is now: a daemon goes to the root folder.
    let pid_file = args.pid_file.as_deref().map(std::path::absolute);
    let pid_file = pid_file
        .transpose()
        .map_err(|e| Failure::io("the current folder", &e))?;
    if args.daemon {
        daemon::detach()?;
    }
    let log = start_logging(args)?;
    if let Some(process) = args.end_with {
        mount::end_with(process).map_err(|e| Failure::io(format!("process {process}"), &e))?;
    }
    let pid_file = match pid_file {
        Some(path) => Some(PidFile::prepare(&path)?),
        None => None,
    };
    heap::suit(settings.limit);
    if let Err(error) = base::sys::bound_allocator(base::thread::cpu_count()) {
        tracing::warn!("the allocator may keep more memory than cache_size says: {error}");
    }
    if let Err(error) = base::sys::raise_descriptors_max() {
        tracing::warn!("there may be too few descriptors for fast transfers: {error}");
    }
    if let (Some(workers), 1..) = (settings.mount.workers, settings.beyond_limit) {
        tracing::warn!(
            "workers={workers}: their buffers may take {} MiB more than cache_size says",
            settings.beyond_limit >> 20
        );
    }
    Ok((pid_file, log))
}

/// What is written outside the file system, with the options that name it.
fn named_files(args: &Mount) -> impl Iterator<Item = (&'static str, &Path)> {
    let files = [("--log", &args.log), ("--pid-file", &args.pid_file)];
    files
        .into_iter()
        .filter_map(|(option, path)| Some((option, path.as_deref()?)))
}

/// The array, and where it is to be mounted.
fn open_devices<'a>(
    args: &'a Mount,
    settings: &Settings,
) -> Result<(Arc<Array>, &'a Path), Failure> {
    let (given, mountpoint) = places(args)?;
    // Before the devices are opened: the kernel may hold the first for a mount that is dead.
    // Before anything is written, too: where nothing can be mounted a copy that was made of a device is still no old one.
    let users_of_dead = umount::users_of_dead(mountpoint);
    mount::check_mountpoint(mountpoint)?;
    let found = devices::find(given)?;
    // By the names that the user knows.
    device::check_distinct(&found)?;
    for (option, path) in named_files(args) {
        spared::check_beside(option, path, &found)?;
    }
    let paths = absolute(&found)?;
    // What was looked at may have been on a file system that hung.
    if args.daemon {
        daemon::check_awaited()?;
    }
    mount::become_io_flusher();
    mount::spare_from_oom_killer();
    let access = Access {
        read_only: settings.mount.read_only,
        instead: Some("to read only, mount it with `-o ro`"),
        ..settings.access
    };
    let array = devices::open(&paths, access).map_err(|failure| match users_of_dead {
        Some(users) if failure.is_of_device_in_use() => failure.after(format!(
            "the daemon of what was mounted at {} has died, and the kernel keeps the device for those who still have files of it open, {users}: end that \
             and try again",
            output::shown(mountpoint)
        )),
        _ => failure,
    })?;
    if array.reaping() != access.reap {
        tracing::warn!(
            "reap={} does not apply, threads sleep until a transfer ends: it needs io_uring, and with topology=per-device more than one CPU",
            access.reap.name()
        );
    }
    Ok((array, mountpoint))
}

/// What may still be refused of a file system that is open, and changes nothing of it.
fn before_it_is_usable(
    args: &Mount,
    metrics: Option<&Endpoint>,
    fs: &Arc<FileSystem>,
    way: &FuseWay,
) -> Result<Option<MetricsServer>, Failure> {
    // A recovery takes its time, too.
    if args.daemon {
        daemon::check_awaited()?;
    }
    let Some(endpoint) = metrics else {
        return Ok(None);
    };
    let (read, way) = (Arc::clone(fs), way.clone());
    let server = MetricsServer::start(endpoint, move || mount::metrics::of(&read, &way))?;
    Ok(Some(server))
}

/// All that a mount goes by.
struct Mounting<'a> {
    args: &'a Mount,
    /// How messages name the array.
    title: String,
    mountpoint: &'a Path,
    options: &'a MountOptions,
    pid_file: Option<PidFile>,
    log: Option<Arc<File>>,
    metrics: Option<MetricsServer>,
    way: FuseWay,
}

impl Mounting<'_> {
    /// Mounts, serves, and closes the file system.
    fn until_unmounted(
        mut self,
        fs: &Arc<FileSystem>,
        array: &Arc<Array>,
        outcome: &Arc<mount::Outcome>,
    ) -> Result<(), Failure> {
        let title = &self.title;
        let mut claim = FirstDevice::of(array);
        let mut usable = false;
        let (served, signals) = mount::mount_holding_signals(
            Arc::clone(fs),
            self.mountpoint,
            self.options,
            claim.as_mut().map(|claim| claim as &mut dyn DeviceClaim),
            Some(Arc::clone(outcome)),
            self.way,
            |unmounter| {
                tracing::info!("{title} is mounted at {}", unmounter.mountpoint().display());
                let log = self.log.as_deref();
                announce(
                    self.args,
                    self.pid_file.as_mut(),
                    log,
                    unmounter.mountpoint(),
                );
                usable = true;
            },
        );
        // Kept to the end of the process: no signal is to cut short what follows.
        std::mem::forget(signals);
        drop(self.metrics);
        let closed = fs.close();
        drop(self.pid_file);
        let result = served
            .map_err(Failure::from)
            .and(closed.map_err(Failure::from));
        match &result {
            Ok(()) => tracing::info!("{title} is unmounted"),
            Err(failure) if usable => {
                tracing::error!("{title}: {}", failure.message().unwrap_or("failed"));
            }
            Err(_) => {}
        }
        result
    }
}

/// The devices, and the mount point.
fn places(args: &Mount) -> Result<(&[PathBuf], &Path), Failure> {
    args.devices_and_mountpoint
        .split_last()
        .map(|(mountpoint, given)| (given, mountpoint.as_path()))
        .ok_or_else(|| Failure::usage("no mount point given"))
}

fn start_logging(args: &Mount) -> Result<Option<Arc<File>>, Failure> {
    logging::start(match &args.log {
        Some(path) => logging::Target::File(path),
        None if args.daemon => logging::Target::System,
        None => logging::Target::Foreground,
    })
}

/// The daemon leaves its folder, so paths must not depend on it.
fn absolute(paths: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    paths
        .iter()
        .map(|path| std::fs::canonicalize(path).map_err(|e| Failure::io(path.display(), &e)))
        .collect()
}

fn open(array: &Arc<Array>, options: FsOptions) -> Result<Arc<FileSystem>, Failure> {
    for repair in array.label_repairs() {
        tracing::warn!(
            "device {}: label copy {} is damaged ({}); sheaf fsck --repair writes it again",
            repair.device,
            repair.copy,
            repair.damage
        );
    }
    let fs = FileSystem::open(Arc::clone(array), options);
    let fs = fs.map_err(|error| Failure::unopened(error, array))?;
    let report = fs.recovery();
    if !report.clean {
        let told = format!(
            "Recovered {} in {:.3} s: {} batches, {} records, {} nodes",
            devices::title(array),
            report.took.as_secs_f64(),
            report.batches,
            report.records,
            report.nodes
        );
        tracing::info!("{told}");
        // A daemon's parent passes it on.
        if let Err(failure) = output::line(told) {
            tracing::warn!(
                "nobody hears how long recovery took: {}",
                output::why(&failure)
            );
        }
    }
    Ok(fs)
}

/// Tells everybody who waits that the mount is usable.
fn announce(args: &Mount, pid_file: Option<&mut PidFile>, log: Option<&File>, mountpoint: &Path) {
    if let Some(pid_file) = pid_file {
        pid_file.publish();
    }
    if let Err(error) = daemon::notify_service_manager("READY=1") {
        tracing::warn!("cannot notify the service manager: {error}");
    }
    let told = match args.daemon {
        true => daemon::ready(log).map_err(|e| output::failed(&e)),
        false => output::line(format!("{USABLE} {}", mountpoint.display())),
    };
    if let Err(failure) = told {
        tracing::warn!(
            "nobody hears that the mount is usable: {}",
            output::why(&failure)
        );
    }
}

/// The claim on the array's first device, where that is a block device: handed over to the
/// kernel, so that sync(2) reaches the daemon.
struct FirstDevice {
    array: Arc<Array>,
    path: PathBuf,
    /// Our own claim again, where the kernel did not take it.
    claim: Option<File>,
}

impl FirstDevice {
    fn of(array: &Arc<Array>) -> Option<Self> {
        let path = PathBuf::from(array.device_names().into_iter().next()?);
        let kind = std::fs::metadata(&path).ok()?.file_type();
        kind.is_block_device().then(|| FirstDevice {
            array: Arc::clone(array),
            path,
            claim: None,
        })
    }
}

impl DeviceClaim for FirstDevice {
    fn path(&self) -> &Path {
        &self.path
    }

    fn release(&mut self) -> io::Result<()> {
        self.array.release_claim(0).map_err(io::Error::other)
    }

    fn settle(&mut self, kernel_holds: bool) -> io::Result<()> {
        if !kernel_holds {
            let claim = File::options()
                .read(true)
                .custom_flags(libc::O_EXCL)
                .open(&self.path)?;
            self.claim = Some(claim);
        }
        self.array.verify_label(0).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(options: &str) -> Result<Settings, Failure> {
        Settings::parse(&Mount {
            options: vec![options.to_owned()],
            ..Mount::default()
        })
    }

    #[test]
    fn options_reach_their_places() {
        let settings = settings(
            "noatime,nodiratime,discard,cache_size=96M,commit=0.5,checkpoint_workers=3,io=threads,topology=per-device,reap=lazy,reap_ring=iopoll",
        )
        .unwrap();
        assert_eq!(settings.fs.data.cache_bytes, 30 << 20);
        assert_eq!(settings.fs.store.node_cache_bytes, 20 << 20);
        assert_eq!(settings.mount.workers, Some(6));
        assert_eq!(settings.beyond_limit, 0);
        assert_eq!(settings.fs.store.workers, 3);
        assert!(settings.fs.store.discard);
        assert_eq!(
            settings.fs.store.commit_interval,
            Duration::from_millis(500)
        );
        assert_eq!(settings.access.backend, Backend::Threads);
        assert_eq!(settings.access.topology, Topology::PerDevice);
        assert_eq!(settings.access.reap, Reaping::Lazy);
        assert_eq!(settings.access.reap_ring, ReapRing::Iopoll);
        assert_eq!(settings.fs.data.atime, fs::AtimePolicy::Never);
        assert!(!settings.fs.data.directory_atime);
    }

    #[test]
    fn workers_beyond_the_limit_of_memory_are_counted() {
        let workers = |options| settings(options).unwrap().beyond_limit;
        assert_eq!(workers("cache_size=64M,workers=4"), 0);
        // An eighth of what the program leaves of these has room for a few.
        assert_eq!(workers("cache_size=64M,workers=64"), 60 * (2 << 20));
        assert_eq!(workers("cache_size=8G,workers=64"), 0);
    }

    #[test]
    fn wrong_options_are_named() {
        for (options, word) in [
            ("cache_size", "cache_size"),
            ("cache_size=1K", "at least"),
            ("cache_size=much", "cache_size=much: "),
            ("commit=soon", "commit=soon"),
            ("commit=0", "at least 0.01 seconds"),
            ("checkpoint=0.001", "at least 0.01 seconds"),
            ("checkpoint_workers=0", "from 1 to 64"),
            ("checkpoint_workers=65", "from 1 to 64"),
            ("io=floppy", "io=floppy: give one of auto, uring, threads"),
            ("pre_clean=maybe", "pre_clean=maybe: give on or off"),
            ("workers=1", "from 2 to 1024"),
            ("max_read=512", "from 4096 to 1048576"),
            ("topology=flat", "per-core or per-device"),
            ("device_timeout", "device_timeout="),
            ("device_timeout=10min", "number of seconds"),
            ("reap=never", "interrupt, poll, lazy"),
            ("reap_ring=fast", "ordinary or iopoll"),
        ] {
            let failure = settings(options).err().unwrap();
            assert_eq!(failure.code(), crate::failure::USAGE);
            assert!(failure.message().unwrap().contains(word), "{failure:?}");
        }
    }

    #[test]
    fn times_are_persisted_as_said() {
        for (text, ms) in [("1s", 1000), ("10ms", 10), ("1ms", 1), ("0", 0), ("0s", 0)] {
            let settings = settings(&format!("mtime_persist={text}")).unwrap();
            assert_eq!(settings.fs.data.mtime_persist, Duration::from_millis(ms));
        }
        for wrong in ["1", "10us", "ms", "-1s", "1.5s", "9999s", ""] {
            let failure = settings(&format!("mtime_persist={wrong}")).err().unwrap();
            let message = failure.message().unwrap();
            assert!(message.contains("such as 1s or 10ms, or 0"), "{message}");
            assert!(message.contains("whole number"), "{message}");
        }
        assert!(settings("mtime_persist_interval=1").is_err());
    }
}
