//! The system calls std has no safe form of, each wrapped once.

use std::ffi::CStr;
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::abi;

fn check(result: libc::c_int) -> Result<libc::c_int> {
    if result < 0 {
        Err(Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Makes the fresh /dev/fuse descriptor `fresh` serve the connection of `mounted`.
pub fn fuse_clone(fresh: BorrowedFd<'_>, mounted: BorrowedFd<'_>) -> Result<()> {
    let source: u32 = mounted.as_raw_fd() as u32;
    // SAFETY: the ioctl reads one u32 through the pointer, which outlives the call.
    check(unsafe {
        libc::ioctl(
            fresh.as_raw_fd(),
            abi::DEV_IOC_CLONE as libc::Ioctl,
            &raw const source,
        )
    })
    .map(drop)
}

/// Reads of what was opened with `O_NONBLOCK` wait from now on.
pub fn wait_in_reads(fd: BorrowedFd<'_>) -> Result<()> {
    // SAFETY: no pointers; only the open file's own flags change.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, 0) })?;
    Ok(())
}

/// Whether a task is one of a process, as tgkill(2) says without a signal. Not, where it cannot be told: the process is another user's, or out of sight.
pub fn is_of_process(task: u32, process: u32) -> bool {
    let none: libc::c_int = 0;
    // SAFETY: the call takes three numbers; no signal is sent for 0.
    unsafe { libc::syscall(libc::SYS_tgkill, process, task, none) == 0 }
}

/// The size of an ioctl's argument, as its number has it.
fn ioctl_size(command: u32) -> usize {
    (command >> 16 & 0x3fff) as usize
}

/// ioctl(2) that fills one plain value.
pub fn ioctl_u32(fd: BorrowedFd<'_>, command: u32) -> Result<u32> {
    let mut value: u32 = 0;
    if ioctl_size(command) != size_of_val(&value) {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the command is encoded as _IOR of four bytes, checked above: no more are written
    // through the pointer, which outlives the call.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::Ioctl::from(command), &raw mut value) })?;
    Ok(value)
}

/// The ioctl FITRIM, `_IOWR('X', 121, struct fstrim_range)`, with start, length and smallest run in bytes. Returns the bytes
/// discarded.
pub fn ioctl_trim(fd: BorrowedFd<'_>, mut range: [u64; 3]) -> Result<u64> {
    const FITRIM: libc::Ioctl = 0xc018_5879;
    // SAFETY: FITRIM reads and writes three 64-bit values, which `range` holds and which
    // outlive the call.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), FITRIM, range.as_mut_ptr()) })?;
    Ok(range[1])
}

/// ioctl(2) with a message that is read and written. Its size is the one in `command`.
pub fn ioctl_message(fd: BorrowedFd<'_>, command: u32, message: &mut [u8]) -> Result<()> {
    if message.len() != ioctl_size(command) {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the command is encoded as _IOWR of exactly the slice's length, checked above, and
    // the slice outlives the call.
    check(unsafe {
        libc::ioctl(
            fd.as_raw_fd(),
            libc::Ioctl::from(command),
            message.as_mut_ptr(),
        )
    })
    .map(drop)
}

pub fn mount(
    source: &CStr,
    target: &CStr,
    kind: &CStr,
    flags: libc::c_ulong,
    data: &CStr,
) -> Result<()> {
    // SAFETY: all pointers are strings ended by zero that outlive the call.
    check(unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            kind.as_ptr(),
            flags,
            data.as_ptr().cast(),
        )
    })
    .map(drop)
}

pub fn umount(target: &CStr, flags: libc::c_int) -> Result<()> {
    // SAFETY: the pointer is a string ended by zero that outlives the call.
    check(unsafe { libc::umount2(target.as_ptr(), flags) }).map(drop)
}

/// Asks the file system at `path` for its statistics; unlike attributes, these are never
/// answered by the kernel alone.
pub fn probe(path: &CStr) -> Result<()> {
    // SAFETY: statfs is plain data for which zero is valid.
    let mut statistics: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path ends with zero, the structure is live; both outlive the call.
    check(unsafe { libc::statfs(path.as_ptr(), &raw mut statistics) }).map(drop)
}

/// Effective user and group of this process.
pub fn effective_ids() -> (u32, u32) {
    // SAFETY: neither call has arguments, and neither can fail.
    unsafe { (libc::geteuid(), libc::getegid()) }
}

/// Real user and group of this process.
pub fn real_ids() -> (u32, u32) {
    // SAFETY: neither call has arguments, and neither can fail.
    unsafe { (libc::getuid(), libc::getgid()) }
}

/// From `linux/prctl.h`.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Bytes of the kernel's pages.
pub fn page_size() -> usize {
    // SAFETY: takes no pointers.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).expect("POSIX has a page size")
}

/// Tells the kernel that the calling thread, and the threads it starts, write back what
/// others allocate: their own allocations must not wait for write-back, or both wait forever.
pub fn set_io_flusher() -> Result<()> {
    // SAFETY: this prctl takes numbers only.
    check(unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) }).map(drop)
}

/// Where the signal handler writes, and the other end. Never closed, so that a handler that
/// runs late cannot write into somebody else's descriptor.
static SIGNAL_PIPE: OnceLock<(UnixStream, UnixStream)> = OnceLock::new();

/// Signals are forwarded now.
static FORWARDING: AtomicBool = AtomicBool::new(false);

/// Passes the signal's number on as one byte: a handler may do little more than write(2).
extern "C" fn forward_signal(signal: libc::c_int) {
    let byte = signal as u8;
    // `new` filled the pipe before it installed this handler.
    let Some((sender, _)) = SIGNAL_PIPE.get() else {
        return;
    };
    let fd = sender.as_raw_fd();
    // SAFETY: write(2) is safe in a signal handler; the pointer names one live byte. errno,
    // which the interrupted code may be about to read, is put back.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        libc::write(fd, (&raw const byte).cast(), 1);
        *errno = before;
    }
}

/// Signals arrive as bytes on a socket instead of ending the process, whichever thread
/// they hit. What was before comes back on drop.
#[derive(Debug)]
pub struct ForwardedSignals {
    before: Vec<(libc::c_int, libc::sigaction)>,
}

impl ForwardedSignals {
    /// `None` when signals are forwarded already, for another mount of this process.
    pub fn new(signals: &[libc::c_int]) -> Result<Option<(Self, UnixStream)>> {
        if FORWARDING.swap(true, Ordering::AcqRel) {
            return Ok(None);
        }
        let mut forwarded = ForwardedSignals {
            before: Vec::with_capacity(signals.len()),
        };
        if SIGNAL_PIPE.get().is_none() {
            let (sender, receiver) = UnixStream::pair()?;
            // A full socket must not block the handler.
            sender.set_nonblocking(true)?;
            // Only the one who set `FORWARDING` comes here.
            SIGNAL_PIPE.get_or_init(|| (sender, receiver));
        }
        let Some((_, receiver)) = SIGNAL_PIPE.get() else {
            return Ok(None);
        };
        let receiver = receiver.try_clone()?;
        // What the last one left is not for this one.
        while take_signal(&receiver)?.is_some() {}
        for &signal in signals {
            // SAFETY: sigaction is plain data for which zero is valid.
            let (mut action, mut old): (libc::sigaction, libc::sigaction) =
                unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
            let handler: extern "C" fn(libc::c_int) = forward_signal;
            action.sa_sigaction = handler as libc::sighandler_t;
            action.sa_flags = libc::SA_RESTART;
            // SAFETY: both pointers are to live structures; the handler has the form that
            // sa_flags without SA_SIGINFO ask for and is async-signal-safe.
            check(unsafe { libc::sigaction(signal, &raw const action, &raw mut old) })?;
            forwarded.before.push((signal, old));
        }
        Ok(Some((forwarded, receiver)))
    }
}

impl Drop for ForwardedSignals {
    fn drop(&mut self) {
        for (signal, old) in &self.before {
            // SAFETY: `old` is what sigaction returned in `new`.
            unsafe { libc::sigaction(*signal, &raw const *old, std::ptr::null_mut()) };
        }
        FORWARDING.store(false, Ordering::Release);
    }
}

/// The next signal that was forwarded, if one was.
pub fn take_signal(receiver: &UnixStream) -> Result<Option<libc::c_int>> {
    let mut byte = 0u8;
    let fd = receiver.as_raw_fd();
    // SAFETY: the pointer names one live byte.
    let received = unsafe { libc::recv(fd, (&raw mut byte).cast(), 1, libc::MSG_DONTWAIT) };
    match check(received as libc::c_int) {
        Ok(0) => Err(std::io::ErrorKind::UnexpectedEof.into()),
        Ok(_) => Ok(Some(byte.into())),
        Err(error) => match error.kind() {
            std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted => Ok(None),
            _ => Err(error),
        },
    }
}

/// Waits until one of two descriptors is readable; which are.
pub fn wait_readable(first: BorrowedFd<'_>, second: BorrowedFd<'_>) -> Result<(bool, bool)> {
    loop {
        let (one, two) = wait_for(first, Wanted::Read, second, None)?;
        if one || two {
            return Ok((one, two));
        }
    }
}

/// What a descriptor is wanted for.
#[derive(Clone, Copy, Debug)]
pub enum Wanted {
    Read,
    Write,
}

/// Waits until `first` can be used as wanted, or `second` is readable, or the time is over; says
/// which of the two it was, and may say neither before the time is over.
pub fn wait_for(
    first: BorrowedFd<'_>,
    wanted: Wanted,
    second: BorrowedFd<'_>,
    timeout: Option<Duration>,
) -> Result<(bool, bool)> {
    let pollfd = |fd: BorrowedFd<'_>, events| libc::pollfd {
        fd: fd.as_raw_fd(),
        events,
        revents: 0,
    };
    let events = match wanted {
        Wanted::Read => libc::POLLIN,
        Wanted::Write => libc::POLLOUT,
    };
    let mut fds = [pollfd(first, events), pollfd(second, libc::POLLIN)];
    let ms = timeout.map_or(-1, |time| {
        time.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128) as i32
    });
    // SAFETY: the pointer and count name the array, which outlives the call.
    match check(unsafe { libc::poll(fds.as_mut_ptr(), 2, ms) }) {
        Err(error) if error.raw_os_error() != Some(libc::EINTR) => Err(error),
        _ => Ok((fds[0].revents != 0, fds[1].revents != 0)),
    }
}

/// Waits until a descriptor can be read without waiting, or has failed.
pub fn wait_for_input(fd: BorrowedFd<'_>) -> Result<()> {
    while wait_for(fd, Wanted::Read, fd, None)? == (false, false) {}
    Ok(())
}

/// Whether a descriptor has something to be read now.
pub fn has_input(fd: BorrowedFd<'_>) -> bool {
    look(fd, libc::POLLIN) & libc::POLLIN != 0
}

/// Whether a descriptor is of no use any more: of /dev/fuse, whether its connection is gone.
pub fn has_failed(fd: BorrowedFd<'_>) -> bool {
    look(fd, 0) & libc::POLLERR != 0
}

/// What poll(2) says of a descriptor without waiting.
fn look(fd: BorrowedFd<'_>, events: libc::c_short) -> libc::c_short {
    let mut pollfd = libc::pollfd {
        fd: fd.as_raw_fd(),
        events,
        revents: 0,
    };
    // SAFETY: the pointer names one entry, which outlives the call.
    match unsafe { libc::poll(&raw mut pollfd, 1, 0) } {
        1 => pollfd.revents,
        _ => 0,
    }
}

/// Has reads of a descriptor fail where they would wait.
pub fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<()> {
    // SAFETY: the call takes numbers only.
    let flags = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) })?;
    // SAFETY: as above.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) })?;
    Ok(())
}

/// Sends SIGTERM to this process.
pub fn ask_to_end() {
    // SAFETY: the calls take numbers only.
    unsafe { libc::kill(libc::getpid(), libc::SIGTERM) };
}

/// The number of the calling thread among all tasks of its namespace.
pub fn thread_id() -> u32 {
    // SAFETY: the call takes nothing.
    unsafe { libc::gettid() as u32 }
}

/// A descriptor that becomes readable when process `pid` ends.
pub fn pidfd_open(pid: u32) -> Result<OwnedFd> {
    // SAFETY: the call takes numbers only.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) };
    let fd = check(fd as libc::c_int)?;
    // SAFETY: the kernel just made this descriptor for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Listens at a path where nobody but this process's user can connect, from the first moment on: the file has the mode that the socket has as it is bound, less the umask.
pub fn listen_privately(path: &Path) -> Result<UnixListener> {
    let bytes = path.as_os_str().as_bytes();
    // SAFETY: sockaddr_un is plain data for which zero is valid.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    // One byte is left for the zero at the end.
    if bytes.is_empty() || bytes.contains(&0) || bytes.len() >= address.sun_path.len() {
        let what = "a socket's path has 1 to 107 bytes, none of them zero";
        return Err(Error::new(std::io::ErrorKind::InvalidInput, what));
    }
    for (to, &from) in address.sun_path.iter_mut().zip(bytes) {
        *to = from as libc::c_char;
    }
    // SAFETY: the call takes numbers only.
    let fd =
        check(unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: the kernel just made this descriptor for us alone.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the call takes numbers only.
    check(unsafe { libc::fchmod(fd, 0o600) })?;
    let len = size_of_val(&address) as libc::socklen_t;
    // SAFETY: the pointer and length name the structure, which outlives the call.
    check(unsafe { libc::bind(fd, (&raw const address).cast(), len) })?;
    // SAFETY: the call takes numbers only.
    check(unsafe { libc::listen(fd, libc::SOMAXCONN) })?;
    Ok(UnixListener::from(socket))
}

/// Receives one descriptor over a socket; `None` when the other side sent none.
pub fn receive_fd(socket: &UnixStream) -> Result<Option<OwnedFd>> {
    let mut byte = 0u8;
    let mut part = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    // Aligned for the header; far larger than the 24 bytes that one descriptor needs.
    let mut control = [0u64; 16];
    // SAFETY: msghdr is plain data for which zero is valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    let received = loop {
        // SAFETY: the message names `part` and `control`, which outlive the call.
        let n =
            unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
        if n >= 0 {
            break n;
        }
        let error = Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINTR) {
            return Err(error);
        }
    };
    if received == 0 {
        return Ok(None);
    }
    // SAFETY: the kernel filled `control` and set its length; CMSG_FIRSTHDR returns null or a
    // header within it, and a descriptor follows a header of this type and length.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if header.is_null()
            || (*header).cmsg_level != libc::SOL_SOCKET
            || (*header).cmsg_type != libc::SCM_RIGHTS
            || ((*header).cmsg_len as usize) < libc::CMSG_LEN(size_of::<i32>() as u32) as usize
        {
            return Ok(None);
        }
        let fd: i32 = libc::CMSG_DATA(header).cast::<i32>().read_unaligned();
        Ok(Some(OwnedFd::from_raw_fd(fd)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    const FITRIM: u32 = 0xc018_5879;

    #[test]
    fn an_ioctl_that_would_fill_more_than_there_is_is_refused() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let refused = |result: Result<()>| result.unwrap_err().kind();
        let number = ioctl_u32(reader.as_fd(), FITRIM).map(drop);
        assert_eq!(refused(number), std::io::ErrorKind::InvalidInput);
        let message = ioctl_message(reader.as_fd(), FITRIM, &mut [0; 8]);
        assert_eq!(refused(message), std::io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_descriptor_that_failed_is_told_from_one_that_is_idle() {
        let (reader, writer) = std::io::pipe().unwrap();
        assert!(!has_failed(writer.as_fd()) && !has_input(reader.as_fd()));
        drop(reader);
        assert!(has_failed(writer.as_fd()));
    }

    /// It was for everybody whom the umask let in until its mode was set.
    #[test]
    fn a_socket_is_its_user_s_alone_as_soon_as_it_is_there() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        let listener = listen_privately(&path).unwrap();
        assert_eq!(mode(), 0o600);
        let _client = UnixStream::connect(&path).unwrap();
        listener.accept().unwrap();
        let taken = listen_privately(&path).unwrap_err();
        assert_eq!(taken.kind(), std::io::ErrorKind::AddrInUse);
        // Of any other the umask decides.
        std::fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        assert_ne!(mode(), 0o600, "this test shows nothing");
        let long = folder.path().join("x".repeat(200));
        assert!(listen_privately(&long).is_err());
    }

    /// A daemon that was told three times to end, and began another mount, ended that one.
    #[test]
    fn signals_that_nobody_took_are_not_for_the_next_watch() {
        let watched = &[libc::SIGTERM];
        let (forwarded, receiver) = ForwardedSignals::new(watched).unwrap().unwrap();
        for _ in 0..3 {
            // SAFETY: the call takes a number only.
            unsafe { libc::raise(libc::SIGTERM) };
        }
        assert_eq!(take_signal(&receiver).unwrap(), Some(libc::SIGTERM));
        drop((forwarded, receiver));
        let (_forwarded, receiver) = ForwardedSignals::new(watched).unwrap().unwrap();
        assert_eq!(take_signal(&receiver).unwrap(), None);
    }
}
