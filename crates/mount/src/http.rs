//! As much of HTTP as it takes to answer a scrape.
//!
//! Whoever connects is a stranger. Nothing that strangers send, or fail to send, costs the daemon
//! more than this, or keeps it from ending:
//!
//! 1. One connection is served at a time, for [`REQUEST_TIME`] at most. [`HEAD_MAX`] bytes of its
//!    request are kept, a body is never waited for, and one answer ends it.
//! 2. Every wait ends when the server is dropped.
//! 3. No error ends the thread: without descriptors for a connection it tries again.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use base::clock::Clock;
use base::thread::JoinHandle;

use crate::sys::{self, Wanted};

const REQUEST_TIME: Duration = Duration::from_secs(5);
const HEAD_MAX: usize = 4096;
/// Bytes of a body that came with the head are taken in before the connection is closed, or the
/// kernel would break it off and the answer might be lost.
const BODY_MAX: usize = 64 << 10;
/// After an error of accept(2), and how often such errors are logged at most.
const RETRY: Duration = Duration::from_millis(100);
const LOGGED_EVERY: Duration = Duration::from_secs(60);

/// What is sent back.
pub(crate) struct Answer {
    /// Code and reason.
    pub status: &'static str,
    pub kind: &'static str,
    pub body: String,
}

impl Answer {
    /// One line about what is wrong.
    pub fn refusal(status: &'static str, line: &str) -> Answer {
        Answer {
            status,
            kind: "text/plain; charset=utf-8",
            body: format!("{line}\n"),
        }
    }
}

/// A socket that connections arrive at.
pub(crate) trait Listener: AsFd + Send + 'static {
    fn next(&self) -> io::Result<Box<dyn Stream>>;
}

/// A connection that does not block.
pub(crate) trait Stream: Read + Write + AsFd {
    /// Nothing more will be written.
    fn finish(&self) -> io::Result<()>;
}

impl Listener for TcpListener {
    fn next(&self) -> io::Result<Box<dyn Stream>> {
        let (stream, _) = self.accept()?;
        stream.set_nonblocking(true)?;
        Ok(Box::new(stream))
    }
}

impl Listener for UnixListener {
    fn next(&self) -> io::Result<Box<dyn Stream>> {
        let (stream, _) = self.accept()?;
        stream.set_nonblocking(true)?;
        Ok(Box::new(stream))
    }
}

impl Stream for TcpStream {
    fn finish(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }
}

impl Stream for UnixStream {
    fn finish(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }
}

/// Answers requests on a thread of its own until it is dropped.
pub(crate) struct Server {
    /// Its end, when dropped, ends the thread.
    end: Option<UnixStream>,
    thread: Option<JoinHandle>,
}

impl Server {
    /// `listener` must not block; `answer` is given the path that is asked for.
    pub fn start(
        name: &str,
        listener: impl Listener,
        answer: impl Fn(&str) -> Answer + Send + 'static,
    ) -> io::Result<Server> {
        let (end, ended) = UnixStream::pair()?;
        let body = move || serve(&listener, &ended, &answer);
        Ok(Server {
            end: Some(end),
            thread: Some(base::thread::spawn(name, body)?),
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that served metrics panicked");
        }
    }
}

fn serve(listener: &dyn Listener, ended: &UnixStream, answer: &dyn Fn(&str) -> Answer) {
    let clock = Clock::real();
    let mut quiet_until = 0;
    loop {
        let waited = sys::wait_for(listener.as_fd(), Wanted::Read, ended.as_fd(), None);
        let accepted = match waited {
            Ok((_, true)) => return,
            Ok(_) => listener.next(),
            Err(error) => Err(error),
        };
        let error = match accepted {
            Ok(stream) => {
                let mut connection = Connection {
                    stream,
                    ended,
                    clock: &clock,
                    deadline: clock.monotonic_ns() + REQUEST_TIME.as_nanos() as u64,
                };
                if let Err(error) = connection.serve(answer) {
                    tracing::debug!(%error, "a connection that asked for metrics");
                }
                continue;
            }
            Err(error) => error,
        };
        if passes(&error) || error.kind() == ErrorKind::ConnectionAborted {
            continue;
        }
        let now = clock.monotonic_ns();
        if now >= quiet_until {
            tracing::warn!(%error, "a connection that asks for metrics is not accepted yet");
            quiet_until = now + LOGGED_EVERY.as_nanos() as u64;
        }
        let waited = sys::wait_for(ended.as_fd(), Wanted::Read, ended.as_fd(), Some(RETRY));
        if waited.is_ok_and(|(_, over)| over) {
            return;
        }
    }
}

/// Whether an error only says to try again.
fn passes(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

struct Connection<'a> {
    stream: Box<dyn Stream>,
    ended: &'a UnixStream,
    clock: &'a Clock,
    /// By the clock, in nanoseconds.
    deadline: u64,
}

impl Connection<'_> {
    fn serve(&mut self, answer: &dyn Fn(&str) -> Answer) -> io::Result<()> {
        let head = self.head()?;
        let (answer, with_body) = match head.as_deref().map(asked) {
            None => (
                Answer::refusal("431 Request Header Fields Too Large", "That is too long."),
                true,
            ),
            Some(Ok((path, with_body))) => (answer(path), with_body),
            Some(Err(refusal)) => (refusal, true),
        };
        let Answer { status, kind, body } = answer;
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        self.write(head.as_bytes())?;
        if with_body {
            self.write(body.as_bytes())?;
        }
        self.stream.finish()?;
        self.take_rest()
    }

    /// Waits until the stream can be used. Fails when the time is up, or the server ends.
    fn ready(&self, wanted: Wanted) -> io::Result<()> {
        loop {
            let left = self.deadline.saturating_sub(self.clock.monotonic_ns());
            if left == 0 {
                return Err(ErrorKind::TimedOut.into());
            }
            let left = Some(Duration::from_nanos(left));
            match sys::wait_for(self.stream.as_fd(), wanted, self.ended.as_fd(), left)? {
                (_, true) => return Err(io::Error::other("the server ends")),
                (true, false) => return Ok(()),
                (false, false) => {}
            }
        }
    }

    /// The request's head, or what came before the other side fell silent for good; `None`:
    /// it is too long.
    fn head(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut head = Vec::new();
        let mut part = [0; 1024];
        while !has_end(&head) {
            if head.len() > HEAD_MAX {
                return Ok(None);
            }
            self.ready(Wanted::Read)?;
            match self.stream.read(&mut part) {
                Ok(0) => break,
                Ok(read) => head.extend_from_slice(&part[..read]),
                Err(error) if passes(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Some(head))
    }

    fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.ready(Wanted::Write)?;
            match self.stream.write(bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(error) if passes(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Takes what has arrived already, and does not wait.
    fn take_rest(&mut self) -> io::Result<()> {
        let mut part = [0; 4096];
        for _ in 0..BODY_MAX / part.len() {
            match self.stream.read(&mut part) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) if passes(&error) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn has_end(head: &[u8]) -> bool {
    [&b"\r\n\r\n"[..], b"\n\n"]
        .iter()
        .any(|end| head.windows(end.len()).any(|part| part == *end))
}

/// The path that a request asks for, and whether it wants more than the answer's head.
fn asked(head: &[u8]) -> Result<(&str, bool), Answer> {
    let line = head.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let words: Option<Vec<&str>> = std::str::from_utf8(line)
        .ok()
        .map(|line| line.split_ascii_whitespace().collect());
    match words.as_deref() {
        Some([method, target, version]) if version.starts_with("HTTP/") => {
            let path = target.split_once('?').map_or(*target, |(path, _)| path);
            match *method {
                "GET" => Ok((path, true)),
                "HEAD" => Ok((path, false)),
                _ => Err(Answer::refusal(
                    "405 Method Not Allowed",
                    "GET is answered.",
                )),
            }
        }
        _ => Err(Answer::refusal("400 Bad Request", "That is no request.")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::BorrowedFd;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A listener without a descriptor for the first connections.
    struct Exhausted {
        listener: UnixListener,
        failures: AtomicU32,
    }

    impl AsFd for Exhausted {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.listener.as_fd()
        }
    }

    impl Listener for Exhausted {
        fn next(&self) -> io::Result<Box<dyn Stream>> {
            let left = self.failures.load(Ordering::Relaxed);
            if left > 0 {
                self.failures.store(left - 1, Ordering::Relaxed);
                return Err(io::Error::from_raw_os_error(libc::EMFILE));
            }
            self.listener.next()
        }
    }

    #[test]
    fn connections_are_served_again_after_descriptors_ran_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = Exhausted {
            listener,
            failures: AtomicU32::new(3),
        };
        let server = Server::start("http", listener, |path| Answer::refusal("200 OK", path));
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.write_all(b"GET /a?b=c HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\n/a\n"));
        drop(server.unwrap());
    }

    #[test]
    fn requests_are_understood_or_refused() {
        let status = |head: &'static str| asked(head.as_bytes()).map_err(|refusal| refusal.status);
        assert_eq!(
            status("GET /metrics HTTP/1.0\r\n\r\n"),
            Ok(("/metrics", true))
        );
        assert_eq!(status("HEAD / HTTP/1.1\n\n"), Ok(("/", false)));
        assert_eq!(
            status("POST / HTTP/1.1\r\n\r\n"),
            Err("405 Method Not Allowed")
        );
        for bad in ["", "GET /", "GET / SSH", "GET / HTTP/1.1 x", "\r\n\r\n"] {
            assert_eq!(status(bad), Err("400 Bad Request"), "{bad}");
        }
    }
}
