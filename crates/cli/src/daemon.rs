//! A process that outlives the command: the program starts itself again in a session of its
//! own and waits for one word from it. No fork of a process that has threads. What somebody ended while it waited is not begun later.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::failure::{Failure, OPERATIONAL, Outcome};
use crate::output;

/// The word that the daemon says when it is ready.
const READY: &str = "ready";

/// The descriptors before it are every program's.
const FIRST_OWN: u32 = 3;
/// A pid file is not longer: any number of a process, and white space.
const PID_BYTES_MAX: u64 = 20;
/// Names to try for a file that is written beside its place.
const NAMES: u32 = 100;

/// Starts this program with `arguments` as a daemon. Returns when it is ready, or with its
/// exit code; it tells on standard error why it failed. What it says before is passed on.
///
/// Of the descriptors of this process it has the three that every program has, and those that `arguments` name: a lock or a pipe of the caller's
/// must not last as long as the mount.
pub fn start(arguments: &[OsString]) -> Outcome {
    if let Err(error) = keep_open(&named_descriptors(arguments)) {
        tracing::warn!("the daemon keeps open what its caller had open: {error}");
    }
    let mut child = myself()
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| not_started(&e))?;
    if let Some(stdout) = child.stdout.take() {
        for said in BufReader::new(stdout).lines() {
            let said = said.map_err(|e| Failure::new(format!("cannot hear the daemon: {e}")))?;
            if said == READY {
                return Ok(0);
            }
            // Whether or not anybody reads it, the daemon goes on.
            if let Err(failure) = output::line(said) {
                tracing::debug!("nobody hears the daemon: {}", output::why(&failure));
            }
        }
    }
    let status = child
        .wait()
        .map_err(|e| Failure::new(format!("cannot wait for the daemon: {e}")))?;
    match status.code() {
        Some(0) => Err(Failure::new("the daemon ended before the mount was usable")),
        Some(code) => Err(Failure::silent(u8::try_from(code).unwrap_or(OPERATIONAL))),
        None => Err(Failure::new(format!(
            "the daemon died before the mount was usable ({status})"
        ))),
    }
}

fn not_started(error: &io::Error) -> Failure {
    let failure = Failure::new(format!("cannot start the daemon: {error}"));
    match Path::new("/proc/self").exists() {
        true => failure,
        false => failure.after("/proc has to be mounted (`mount -t proc proc /proc`)"),
    }
}

/// Of the descriptors of this process programs that are started later have those of every program.
pub fn keep_nothing_open() -> io::Result<()> {
    keep_open(&BTreeSet::new())
}

fn keep_open(named: &BTreeSet<u32>) -> io::Result<()> {
    let mut unnamed = between(named).into_iter();
    unnamed.try_for_each(base::sys::close_on_exec)
}

/// Descriptors that are named as files, as a shell names what a program is to read or write: `--log=/dev/fd/63`.
fn named_descriptors(arguments: &[OsString]) -> BTreeSet<u32> {
    let mut named = BTreeSet::new();
    for argument in arguments {
        let text = argument.to_string_lossy();
        for folder in ["/dev/fd/", "/proc/self/fd/"] {
            for (_, number) in text
                .match_indices(folder)
                .map(|(at, _)| text.split_at(at + folder.len()))
            {
                let digits = number.find(|c: char| !c.is_ascii_digit());
                named.extend(number[..digits.unwrap_or(number.len())].parse::<u32>());
            }
        }
    }
    named
}

/// The numbers of all descriptors but these and those of every program.
fn between(kept: &BTreeSet<u32>) -> Vec<RangeInclusive<u32>> {
    let mut ranges = Vec::new();
    let mut first = FIRST_OWN;
    for &number in kept.range(FIRST_OWN..u32::MAX) {
        if first < number {
            ranges.push(first..=number - 1);
        }
        first = number + 1;
    }
    ranges.push(first..=u32::MAX);
    ranges
}

/// This program again, under its own name where it still lies there.
pub fn myself() -> Command {
    match std::env::current_exe() {
        Ok(path) if path.exists() => Command::new(path),
        _ => Command::new("/proc/self/exe"),
    }
}

/// In the daemon, first thing: leaves the terminal's session, so that neither its signals
/// nor its end are ours.
pub fn detach() -> Result<(), Failure> {
    rustix::process::setsid().map_err(|e| Failure::new(format!("cannot start a session: {e}")))?;
    Ok(())
}

/// In the daemon, before it is of use: fails if the command that waits for it has ended. Whoever ended that takes it for not mounted.
pub fn check_awaited() -> Result<(), Failure> {
    let out = io::stdout();
    let mut polled = [PollFd::new(&out, PollFlags::empty())];
    let looked = poll(&mut polled, Some(&Timespec::default()));
    match looked.is_ok() && polled[0].revents().contains(PollFlags::ERR) {
        true => Err(Failure::new(
            "nothing is mounted: the command that was to say so has been ended; call it again",
        )),
        false => Ok(()),
    }
}

/// In the daemon, once it is of use: lets go of what it inherited, and tells the parent. A log that is a file gets the last words of a daemon that
/// dies: those of a thread without room on its stack, say, go to standard error.
pub fn ready(log: Option<&File>) -> io::Result<()> {
    let mut out = io::stdout();
    let null = OpenOptions::new().read(true).write(true).open("/dev/null");
    // Whoever hears the word finds nothing of theirs held any more, where there is a descriptor left to say it by.
    // Whether somebody hears it or not, what was inherited goes.
    match out.as_fd().try_clone_to_owned() {
        Ok(parent) => {
            let gone = null.and_then(|null| let_go(&null, log));
            let told = writeln!(File::from(parent), "{READY}");
            gone.and(told)
        }
        Err(_) => {
            let told = writeln!(out, "{READY}").and_then(|()| out.flush());
            null.and_then(|null| let_go(&null, log)).and(told)
        }
    }
}

/// Of the caller's folder, and of the descriptors that every program has.
fn let_go(null: &File, log: Option<&File>) -> io::Result<()> {
    rustix::stdio::dup2_stdin(null)?;
    rustix::stdio::dup2_stdout(null)?;
    rustix::stdio::dup2_stderr(log.unwrap_or(null))?;
    rustix::process::chdir("/")?;
    Ok(())
}

/// Tells systemd, where it asked to be told.
pub fn notify_service_manager(state: &str) -> io::Result<()> {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else {
        return Ok(());
    };
    let address = match path.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(&path)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address)?;
    Ok(())
}

/// A file with our process id: written beside its place at first, so that who cannot write it knows that before anything is mounted, and no reader
/// sees half of it.
#[derive(Debug)]
pub struct PidFile {
    path: PathBuf,
    written: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
    is_published: bool,
}

impl PidFile {
    /// Written, but not at its place.
    pub fn prepare(path: &Path) -> Result<PidFile, Failure> {
        let refused = |error: &io::Error| {
            let path = path.display();
            Failure::new(format!("the pid file {path} cannot be written: {error}"))
        };
        check_replaceable(path)?;
        let (mut out, written) = create_beside(path).map_err(|error| refused(&error))?;
        let meta = out.metadata().map_err(|error| refused(&error))?;
        let file = PidFile {
            path: path.to_owned(),
            written,
            identity: (meta.dev(), meta.ino()),
            is_published: false,
        };
        writeln!(out, "{}", std::process::id()).map_err(|error| refused(&error))?;
        Ok(file)
    }

    /// At its place.
    pub fn publish(&mut self) {
        // It may have been put there since.
        if let Err(failure) = check_replaceable(&self.path) {
            tracing::warn!("{}", failure.message().unwrap_or_default());
            return;
        }
        match std::fs::rename(&self.written, &self.path) {
            Ok(()) => self.is_published = true,
            Err(error) => tracing::warn!("{}: {error}", self.path.display()),
        }
    }
}

/// Fails if something is at the place of a pid file that is none: it would be gone.
fn check_replaceable(path: &Path) -> Result<(), Failure> {
    let at = path.display();
    let is_one = match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Ok(meta) if meta.is_file() && meta.len() <= PID_BYTES_MAX => {
            std::fs::read(path).map(|text| {
                let mut text = text.iter();
                // Zeros are what a power loss may leave of one.
                text.all(|byte| *byte == 0 || byte.is_ascii_digit() || byte.is_ascii_whitespace())
            })
        }
        looked => looked.map(|_| false),
    };
    match is_one {
        Ok(true) => Ok(()),
        Ok(false) => Err(Failure::usage(format!(
            "the pid file {at} cannot be written: what is there is no pid file (empty, or a number), and stays as it is: name another file for \
             --pid-file, whose value may have been forgotten"
        ))),
        Err(error) => Err(Failure::new(format!(
            "the pid file {at} cannot be written: {error}"
        ))),
    }
}

/// A new file in the folder of `path`, under a name that nothing there has.
fn create_beside(path: &Path) -> io::Result<(File, PathBuf)> {
    let mut taken = io::ErrorKind::AlreadyExists.into();
    for i in 0..NAMES {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{}-{i}.new", std::process::id()));
        match File::create_new(&name) {
            Ok(file) => return Ok((file, name.into())),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => taken = error,
            Err(error) => return Err(error),
        }
    }
    Err(taken)
}

impl Drop for PidFile {
    fn drop(&mut self) {
        let path = match self.is_published {
            true => &self.path,
            false => &self.written,
        };
        // What else is at its place is another daemon's.
        let there = std::fs::symlink_metadata(path);
        if there.is_ok_and(|meta| (meta.dev(), meta.ino()) != self.identity) {
            return;
        }
        if let Err(error) = std::fs::remove_file(path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("{}: {error}", path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It took the file of a daemon that had taken its place.
    #[test]
    fn a_pid_file_that_another_daemon_has_replaced_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pid");
        let mut first = PidFile::prepare(&path).unwrap();
        first.publish();
        let mut second = PidFile::prepare(&path).unwrap();
        second.publish();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
        drop(PidFile::prepare(&path).unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    /// What the user had put there meanwhile was gone.
    #[test]
    fn a_pid_file_takes_no_place_that_is_another_files_by_now() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pid");
        let mut file = PidFile::prepare(&path).unwrap();
        std::fs::write(&path, "a letter").unwrap();
        file.publish();
        drop(file);
        assert_eq!(std::fs::read(&path).unwrap(), b"a letter");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn descriptors_that_arguments_name_are_kept() {
        let arguments = [
            "mount",
            "--log=/dev/fd/63",
            "/dev/fd/5:/proc/self/fd/4",
            "/dev/fd/1",
            "/dev/fd/x",
        ];
        let named = named_descriptors(&arguments.map(OsString::from));
        assert_eq!(Vec::from_iter(named.clone()), [1, 4, 5, 63]);
        assert_eq!(between(&named), [3..=3, 6..=62, 64..=u32::MAX]);
        assert_eq!(between(&BTreeSet::new()), [3..=u32::MAX]);
    }
}
