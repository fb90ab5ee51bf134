//! Where messages go: standard error, a file, or the system log by its socket.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::Arc;

use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::failure::Failure;

/// The variable that chooses what is logged, as `tracing` filters are written.
const VARIABLE: &str = "SHEAF_LOG";
const SYSTEM_LOG: &str = "/dev/log";
/// The facility "daemon" of syslog(3).
const FACILITY: u8 = 3 << 3;

/// Where to.
pub enum Target<'a> {
    /// Warnings and worse of a command that the user waits for.
    Terminal,
    File(&'a Path),
    /// syslog and the journal; standard error where there is neither.
    System,
}

/// Sends all messages there from now on; once per process.
pub fn start(target: Target<'_>) -> Result<(), Failure> {
    let default = match target {
        Target::Terminal => "warn",
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
        Target::File(path) => builder.with_writer(open(path)?).try_init(),
        Target::System => match SystemLog::connect() {
            Ok(log) => builder
                .without_time()
                .with_level(false)
                .with_writer(log)
                .try_init(),
            // The terminal that waits for the daemon wants to hear of trouble only.
            Err(_) => builder
                .with_max_level(Level::WARN)
                .with_writer(io::stderr)
                .try_init(),
        },
    };
    Ok(())
}

fn open(path: &Path) -> Result<Arc<File>, Failure> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .open(path)
        .map(Arc::new)
        .map_err(|e| Failure::io(path.display(), &e))
}

struct SystemLog {
    socket: Arc<UnixDatagram>,
}

/// One message on its way; a message is one datagram.
struct Message {
    socket: Arc<UnixDatagram>,
    head: String,
}

impl SystemLog {
    fn connect() -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.connect(SYSTEM_LOG)?;
        // A stuck log must not stop the file system: what does not fit is lost.
        socket.set_nonblocking(true)?;
        Ok(SystemLog {
            socket: Arc::new(socket),
        })
    }

    fn message(&self, severity: u8) -> Message {
        Message {
            socket: Arc::clone(&self.socket),
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
        let _ = send(&self.socket, &message, Path::new(SYSTEM_LOG));
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
