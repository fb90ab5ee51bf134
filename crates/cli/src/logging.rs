//! Where messages go: standard error, a file, or the system log: by its socket, or where nobody listens at that, as in a container or early at
//! system start, by the kernel's log.
//!
//! Who serves a mount waits for nobody who keeps messages: a log that is stuck must not stop the file system, for requests are answered after what is
//! said of them. What does not fit is lost. A pipe takes a piece where poll(2) says that it has room; a terminal says so and then lets the writer wait for room for all of it: that is opened anew, so that
//! nobody waits for longer than it takes to see that it is stuck.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::failure::Failure;
use crate::output::tell;
use crate::spared;

/// The variable that chooses what is logged, as `tracing` filters are written.
const VARIABLE: &str = "SHEAF_LOG";
const SYSTEM_LOG: &str = "/dev/log";
const KERNEL_LOG: &str = "/dev/kmsg";
/// Of a longer message the kernel takes nothing.
const KERNEL_LOG_BYTES: usize = 900;
/// The facility "daemon" of syslog(3).
const FACILITY: u8 = 3 << 3;

/// Bytes of a message that are written at a time: so many a pipe has room for where poll(2) says that it has any.
const PIECE: usize = 4096;

/// Where to.
pub enum Target<'a> {
    /// Warnings and worse of a command that the user waits for.
    Terminal,
    /// The same of one that serves a mount.
    Foreground,
    File(&'a Path),
    /// syslog and the journal, or the kernel's log; where there is none of them standard error, as long as somebody is there to read it.
    System,
}

/// Sends all messages there from now on; once per process. Returns the file that they go to, if it is one that has a name.
pub fn start(target: Target<'_>) -> Result<Option<Arc<File>>, Failure> {
    let mut named = None;
    let default = match target {
        Target::Terminal | Target::Foreground => "warn",
        _ => "info",
    };
    let filter = EnvFilter::try_from_env(VARIABLE).unwrap_or_else(|_| EnvFilter::new(default));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_target(false)
        // What cannot be written would be told on standard error, which may be what cannot be written, by a panic.
        .log_internal_errors(false);
    // A second start keeps the first target, which is what is wanted.
    let _ = match target {
        Target::Terminal => builder.without_time().with_writer(io::stderr).try_init(),
        Target::Foreground => match Apart::terminal() {
            Some(terminal) => {
                let builder = builder.without_time();
                builder.with_writer(move || terminal.unwaited()).try_init()
            }
            None => builder.without_time().with_writer(unwaited).try_init(),
        },
        Target::File(path) => {
            let file = open(path)?;
            named = Some(Arc::clone(&file));
            match Apart::of_file(&file) {
                Some(apart) => builder.with_writer(move || apart.unwaited()).try_init(),
                None => builder.with_writer(file).try_init(),
            }
        }
        Target::System => match SystemLog::open(Path::new(SYSTEM_LOG), Path::new(KERNEL_LOG)) {
            Ok(log) => builder
                .without_time()
                .with_level(false)
                .with_writer(log)
                .try_init(),
            Err(_) => {
                // The terminal that waits for the daemon is there until the mount is usable.
                tell(NO_LOG);
                builder
                    .with_max_level(Level::WARN)
                    .with_writer(unwaited)
                    .try_init()
            }
        },
    };
    Ok(named)
}

fn open(path: &Path) -> Result<Arc<File>, Failure> {
    spared::check("--log", path)?;
    let opened = OpenOptions::new()
        .append(true)
        .create(true)
        // A terminal does not become the daemon's, and for whoever reads a pipe nobody waits.
        .custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK)
        .open(path);
    opened.map(Arc::new).map_err(|error| {
        let failure = Failure::io(path.display(), &error);
        let is_pipe = || std::fs::metadata(path).is_ok_and(|of| of.file_type().is_fifo());
        match error.raw_os_error() == Some(libc::ENXIO) && is_pipe() {
            true => failure.after("nobody reads this pipe: start its reader first, or give a file"),
            false => failure,
        }
    })
}

const NO_LOG: &str = "sheaf: no system log here: messages of the daemon are lost once the mount is usable; give --log FILE";

/// What somebody may have to read before it takes more, opened once more for this process alone: so `O_NONBLOCK` changes it for nobody else, such as a shell its terminal.
#[derive(Clone)]
struct Apart(Arc<File>);

impl Apart {
    fn of(open: BorrowedFd<'_>) -> io::Result<Apart> {
        let path = format!("/proc/self/fd/{}", open.as_raw_fd());
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = OpenOptions::new()
            .append(true)
            .custom_flags(flags)
            .open(path)?;
        Ok(Apart(Arc::new(file)))
    }

    /// Standard error, if it is a terminal.
    fn terminal() -> Option<Apart> {
        let stderr = io::stderr();
        let is_one = stderr.is_terminal();
        // It may be another user's: then as if it were a pipe.
        is_one.then(|| Apart::of(stderr.as_fd()).ok()).flatten()
    }

    /// A log that is a terminal or a pipe.
    fn of_file(file: &File) -> Option<Apart> {
        let is_pipe = file.metadata().is_ok_and(|of| of.file_type().is_fifo());
        let waits = is_pipe || file.is_terminal();
        waits.then(|| Apart::of(file.as_fd()).ok()).flatten()
    }

    fn unwaited(&self) -> Unwaited<Apart> {
        static LOST: AtomicU64 = AtomicU64::new(0);
        Unwaited {
            to: self.clone(),
            lost: &LOST,
        }
    }
}

impl AsFd for Apart {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Write for Apart {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        (&*self.0).write(text)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Standard error, or a log, whether or not anybody reads it.
struct Unwaited<W> {
    to: W,
    /// Messages that did not fit since the last one that did.
    lost: &'static AtomicU64,
}

fn unwaited() -> Unwaited<io::StderrLock<'static>> {
    static LOST: AtomicU64 = AtomicU64::new(0);
    Unwaited {
        // One thread at a time, or each would count on the same room.
        to: io::stderr().lock(),
        lost: &LOST,
    }
}

/// A terminal has no room for a moment while another thread, or program, writes to it. Longer than that nobody waits, and not again before something was read.
const PATIENCE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 10_000_000,
};
/// For a piece of a message that somebody else is always before.
const TRIES: usize = 10;

fn has_room(to: BorrowedFd<'_>, patience: &Timespec) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(to, PollFlags::OUT)];
    poll(&mut polled, Some(patience)).is_ok() && polled[0].revents().contains(PollFlags::OUT)
}

impl<W: Write + AsFd> Unwaited<W> {
    /// Whether all of it was written: a part of it may have found room.
    fn put(&mut self, text: &[u8], patience: &Timespec) -> bool {
        let mut pieces = text.chunks(PIECE);
        pieces.all(|piece| self.put_piece(piece, patience))
    }

    fn put_piece(&mut self, mut piece: &[u8], patience: &Timespec) -> bool {
        for _ in 0..TRIES {
            if piece.is_empty() {
                return true;
            }
            if !has_room(self.to.as_fd(), patience) {
                return false;
            }
            match self.to.write(piece) {
                Ok(written) => piece = &piece[written..],
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(_) => return false,
            }
        }
        piece.is_empty()
    }
}

impl<W: Write + AsFd> Write for Unwaited<W> {
    /// Takes a message, which is dealt with then.
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let before = self.lost.swap(0, Ordering::Relaxed);
        let note = match before {
            0 => String::new(),
            n => format!("{n} messages before this one are lost: nobody read them in time\n"),
        };
        // Who has read nothing keeps nobody waiting a second time.
        let patience = match before {
            0 => PATIENCE,
            _ => Timespec::default(),
        };
        if !self.put(note.as_bytes(), &patience) {
            self.lost.fetch_add(before + 1, Ordering::Relaxed);
        } else if !self.put(text, &patience) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct SystemLog {
    log: Arc<Log>,
}

/// Whoever keeps messages.
enum Log {
    Socket(UnixDatagram),
    Kernel(File),
}

/// One message on its way; a message is one datagram, or one write.
struct Message {
    log: Arc<Log>,
    head: String,
}

impl SystemLog {
    /// By the socket, or else by the kernel's log. The error is that of the latter.
    fn open(socket: &Path, kernel: &Path) -> io::Result<Self> {
        let log = match SystemLog::connect(socket) {
            Ok(socket) => Log::Socket(socket),
            Err(_) => Log::Kernel(OpenOptions::new().write(true).open(kernel)?),
        };
        Ok(SystemLog { log: Arc::new(log) })
    }

    fn connect(path: &Path) -> io::Result<UnixDatagram> {
        let socket = UnixDatagram::unbound()?;
        socket.connect(path)?;
        // A stuck log must not stop the file system: what does not fit is lost.
        socket.set_nonblocking(true)?;
        Ok(socket)
    }

    fn message(&self, severity: u8) -> Message {
        Message {
            log: Arc::clone(&self.log),
            head: format!("<{}>sheaf[{}]: ", FACILITY | severity, std::process::id()),
        }
    }
}

impl<'a> MakeWriter<'a> for SystemLog {
    type Writer = Message;

    fn make_writer(&'a self) -> Message {
        self.message(6)
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Message {
        self.message(match *meta.level() {
            Level::ERROR => 3,
            Level::WARN => 4,
            Level::INFO => 6,
            _ => 7,
        })
    }
}

/// Sends to a socket's other end, and to the one that is there now if that has gone.
fn send(socket: &UnixDatagram, message: &[u8], to: &Path) -> io::Result<usize> {
    match socket.send(message) {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
            socket.connect(to)?;
            socket.send(message)
        }
        sent => sent,
    }
}

impl Write for Message {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let message = [self.head.as_bytes(), text.trim_ascii_end()].concat();
        // Whether the log hears it or not, the message is dealt with.
        let _ = match &*self.log {
            Log::Socket(socket) => send(socket, &message, Path::new(SYSTEM_LOG)),
            Log::Kernel(kernel) => {
                let len = message.len().min(KERNEL_LOG_BYTES);
                (&mut &*kernel).write(&message[..len])
            }
        };
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_finds_no_room_is_lost_and_counted() {
        static LOST: AtomicU64 = AtomicU64::new(0);
        let (mut reader, to) = io::pipe().unwrap();
        let mut log = Unwaited { to, lost: &LOST };
        let line = [b"x".repeat(99), b"\n".to_vec()].concat();
        let mut taken = 0;
        while LOST.load(Ordering::Relaxed) == 0 {
            log.write_all(&line).unwrap();
            taken += 1;
        }
        log.write_all(&line).unwrap();
        // Longer than any pipe.
        log.write_all(&[b'y'; 1 << 21]).unwrap();
        assert_eq!(LOST.load(Ordering::Relaxed), 3);
        let mut heard = vec![0; (taken - 1) * line.len()];
        io::Read::read_exact(&mut reader, &mut heard).unwrap();
        log.write_all(b"last\n").unwrap();
        drop(log);
        let mut heard = String::new();
        io::Read::read_to_string(&mut reader, &mut heard).unwrap();
        assert_eq!(
            heard,
            "3 messages before this one are lost: nobody read them in time\nlast\n"
        );
        assert_eq!(LOST.load(Ordering::Relaxed), 0);
    }

    /// The system log may be another process than when this one began.
    #[test]
    fn messages_reach_the_log_that_is_there_now() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let heard = |log: &UnixDatagram| {
            let mut message = [0; 16];
            let len = log.recv(&mut message).unwrap();
            message[..len].to_vec()
        };
        let log = UnixDatagram::bind(&path).unwrap();
        let socket = UnixDatagram::unbound().unwrap();
        socket.connect(&path).unwrap();
        send(&socket, b"first", &path).unwrap();
        assert_eq!(heard(&log), b"first");
        drop(log);
        send(&socket, b"nobody hears it", &path).unwrap_err();
        std::fs::remove_file(&path).unwrap();
        let log = UnixDatagram::bind(&path).unwrap();
        send(&socket, b"second", &path).unwrap();
        assert_eq!(heard(&log), b"second");
    }

    /// In a container nobody listens at the socket, and all messages were lost without a word.
    #[test]
    fn without_a_system_log_messages_go_to_the_kernels() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, kernel) = (dir.path().join("log"), dir.path().join("kmsg"));
        assert!(SystemLog::open(&socket, &kernel).is_err());
        assert!(!kernel.exists(), "it made one");
        std::fs::write(&kernel, "").unwrap();
        let log = SystemLog::open(&socket, &kernel).unwrap();
        let say = |log: &SystemLog, text: &str| log.message(4).write_all(text.as_bytes()).unwrap();
        say(&log, "first\n");
        let head = format!("<28>sheaf[{}]: ", std::process::id());
        assert_eq!(
            std::fs::read_to_string(&kernel).unwrap(),
            format!("{head}first")
        );
        // The kernel takes none that is longer.
        say(&log, &"x".repeat(5000));
        let len = std::fs::metadata(&kernel).unwrap().len() as usize;
        assert_eq!(len, head.len() + "first".len() + KERNEL_LOG_BYTES);
        // Where somebody listens that is who hears it.
        let ear = UnixDatagram::bind(&socket).unwrap();
        let log = SystemLog::open(&socket, &kernel).unwrap();
        say(&log, "second");
        let mut message = [0; 100];
        let len = ear.recv(&mut message).unwrap();
        assert_eq!(&message[..len], format!("{head}second").as_bytes());
    }
}
