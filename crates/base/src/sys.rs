//! Minimal wrappers of system calls that the standard library does not offer: each one
//! call, with safe arguments and an [`io::Result`].

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// `ioctl` request numbers that the `libc` crate does not name (x86, ARM, RISC-V encoding).
const BLKROSET: libc::c_ulong = 0x125D;
const BLKROGET: libc::c_ulong = 0x125E;
const BLKSSZGET: libc::c_ulong = 0x1268;
const BLKDISCARD: libc::c_ulong = 0x1277;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
/// The loop device is let go when the last descriptor of it is closed.
const LO_FLAGS_AUTOCLEAR: u32 = 4;
/// Free loop devices that others may take before us.
const LOOP_TRIES: u32 = 64;

/// Writes at `offset` with data-sync semantics (`RWF_DSYNC`): when it returns, the bytes
/// written are durable. May write less than asked.
pub fn pwrite_dsync(file: &File, buf: &[u8], offset: u64) -> io::Result<usize> {
    let vector = libc::iovec {
        iov_base: buf.as_ptr().cast_mut().cast(),
        iov_len: buf.len(),
    };
    let offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: one iovec that names `buf`, which outlives the call; the kernel only reads it.
    let n = unsafe { libc::pwritev2(file.as_raw_fd(), &vector, 1, offset, libc::RWF_DSYNC) };
    if n < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(n as usize)
}

/// Gives a file's range back to its file system; it reads as zeros afterwards.
pub fn punch_hole(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let range = |n: u64| i64::try_from(n).map_err(|_| io::ErrorKind::InvalidInput);
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: no memory is passed.
    check(unsafe { libc::fallocate(file.as_raw_fd(), mode, range(offset)?, range(len)?) })
}

/// Tells a block device that a range holds nothing of value.
pub fn discard_blocks(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let range = [offset, len];
    // SAFETY: BLKDISCARD reads two u64, which `range` is.
    check(unsafe { libc::ioctl(file.as_raw_fd(), BLKDISCARD as _, range.as_ptr()) })
}

/// A block device's logical block size in bytes.
pub fn logical_block_size(file: &File) -> io::Result<u32> {
    let mut size: libc::c_int = 0;
    // SAFETY: BLKSSZGET writes one int, which `size` is.
    check(unsafe { libc::ioctl(file.as_raw_fd(), BLKSSZGET as _, &raw mut size) })?;
    u32::try_from(size).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
}

/// Whether the kernel takes no writes to a block device, which it lets us open for them all the same.
pub fn is_write_protected(file: &File) -> io::Result<bool> {
    let mut protected: libc::c_int = 0;
    // SAFETY: BLKROGET writes one int, which `protected` is.
    check(unsafe { libc::ioctl(file.as_raw_fd(), BLKROGET as _, &raw mut protected) })?;
    Ok(protected != 0)
}

/// The alignment of offsets that direct I/O on `file` needs, in bytes; 0 when the file
/// cannot be read directly; `None` when the kernel does not say.
pub fn direct_io_offset_align(file: &File) -> Option<u32> {
    // SAFETY: an all-zero statx is a valid value of that plain structure.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: an empty path with AT_EMPTY_PATH names the descriptor; `stat` is writable.
    let done = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut stat,
        )
    };
    (done == 0 && stat.stx_mask & libc::STATX_DIOALIGN != 0).then_some(stat.stx_dio_offset_align)
}

/// Has what is read and written by all descriptors of this opening go through the page cache from now on. What else was
/// asked for as it was opened stays.
pub fn end_direct_io(file: &File) -> io::Result<()> {
    // SAFETY: no memory is passed.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    check(flags)?;
    // SAFETY: no memory is passed.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_DIRECT) })
}

/// What `LOOP_CONFIGURE` reads (linux/loop.h).
#[repr(C)]
struct LoopConfig {
    descriptor: u32,
    block_size: u32,
    /// Numbers of devices and inodes, and the offset and limit within the file: all unset.
    numbers: [u64; 5],
    number: u32,
    encryption: [u32; 2],
    flags: u32,
    names: [u8; 64 + 64 + 32],
    initial: [u64; 2],
    reserved: [u64; 8],
}

/// A free loop device over `image`, with its default block size: its path, and a descriptor of
/// it. It is let go when that and all others of it are closed, however the process ends.
pub fn attach_loop(image: &File) -> io::Result<(PathBuf, File)> {
    let open = |path: &Path| File::options().read(true).write(true).open(path);
    let control = open(Path::new("/dev/loop-control"))?;
    let config = LoopConfig {
        descriptor: image.as_raw_fd() as u32,
        block_size: 0,
        numbers: [0; 5],
        number: 0,
        encryption: [0; 2],
        flags: LO_FLAGS_AUTOCLEAR,
        names: [0; 160],
        initial: [0; 2],
        reserved: [0; 8],
    };
    for _ in 0..LOOP_TRIES {
        // SAFETY: no memory is passed.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE as _) };
        check(number.min(0))?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = open(&path)?;
        // SAFETY: LOOP_CONFIGURE reads one such structure, which outlives the call.
        let done =
            unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE as _, &raw const config) };
        match check(done) {
            Ok(()) => {
                take_writes(&device)?;
                return Ok((path, device));
            }
            // Somebody else took it first.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::from_raw_os_error(libc::EBUSY))
}

/// Ends what `blockdev --setro` began: a loop device stays read-only when another file is attached to it.
fn take_writes(device: &File) -> io::Result<()> {
    if !is_write_protected(device)? {
        return Ok(());
    }
    let read_only: libc::c_int = 0;
    // SAFETY: BLKROSET reads one int, which `read_only` is.
    check(unsafe { libc::ioctl(device.as_raw_fd(), BLKROSET as _, &raw const read_only) })
}

/// Makes `target`'s descriptor number refer to `replacement`'s open file, at once; what it
/// referred to before is closed.
pub fn replace_descriptor(target: &File, replacement: OwnedFd) -> io::Result<()> {
    // SAFETY: both descriptors are open and owned; `target` keeps owning its number.
    check(unsafe { libc::dup3(replacement.as_raw_fd(), target.as_raw_fd(), libc::O_CLOEXEC) })
}

/// Keeps open descriptors of these numbers out of the programs that this process starts from now on.
pub fn close_on_exec(numbers: RangeInclusive<u32>) -> io::Result<()> {
    let (first, last) = numbers.into_inner();
    let flags = libc::CLOSE_RANGE_CLOEXEC;
    // SAFETY: no memory is passed, and nothing is closed in this process.
    let done = unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) };
    check(done as libc::c_int)
}

/// A descriptor that is readable once somebody has signalled, until it is cleared.
#[derive(Debug)]
pub struct EventFd(File);

impl EventFd {
    pub fn new() -> io::Result<EventFd> {
        // SAFETY: no memory is passed.
        let number = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        check(number)?;
        // SAFETY: the kernel has just made it, and nobody else knows of it.
        Ok(EventFd(unsafe { File::from_raw_fd(number) }))
    }

    pub fn signal(&self) {
        // Refused only when nobody has cleared it for 2^64 - 1 signals: it is readable then.
        let done = (&self.0).write(&1u64.to_ne_bytes());
        debug_assert!(done.is_ok());
    }

    pub fn clear(&self) {
        let mut count = [0; 8];
        // Refused when there was no signal; one that comes at this moment may stay.
        let done = (&self.0).read(&mut count);
        debug_assert!(done.map_or_else(|e| e.kind() == io::ErrorKind::WouldBlock, |n| n == 8));
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Locks the whole of `file` for as long as it is open, shared or exclusively; false: somebody
/// else's lock is in the way. The lock belongs to the open file and not to the process
/// (`F_OFD_SETLK`), and has nothing to do with flock's, which udev takes on devices. It needs a
/// file that is open for reading, and an exclusive one a file that is open for writing.
pub fn try_lock_open_file(file: &File, exclusive: bool) -> io::Result<bool> {
    // SAFETY: the structure is plain data for which zero is valid: from the start to the end.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = if exclusive {
        libc::F_WRLCK
    } else {
        libc::F_RDLCK
    } as libc::c_short;
    // SAFETY: the pointer names one live structure, which the kernel only reads.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
    match check(done) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Sets the C library's allocator up for a process that has a limit on its memory; before the
/// process has threads. Large buffers go back to the system when they are freed: by default
/// the first ones that are freed teach the allocator to keep those that follow among small
/// objects, which then hold their pages. And there are no more than `heaps` heaps; the default,
/// eight for each CPU, strands what is free in one and wanted in another.
#[cfg(target_env = "gnu")]
pub fn bound_allocator(heaps: usize) -> io::Result<()> {
    let heaps = libc::c_int::try_from(heaps.max(1)).unwrap_or(libc::c_int::MAX);
    for (parameter, value) in [
        (libc::M_ARENA_MAX, heaps),
        (libc::M_MMAP_THRESHOLD, 128 << 10),
        (libc::M_TRIM_THRESHOLD, 1 << 20),
    ] {
        // SAFETY: no memory is passed; the call takes the allocator's own lock.
        if unsafe { libc::mallopt(parameter, value) } == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
    }
    Ok(())
}

/// Other C libraries have nothing to set.
#[cfg(not(target_env = "gnu"))]
pub fn bound_allocator(_heaps: usize) -> io::Result<()> {
    Ok(())
}

/// Descriptors that the process may have now.
pub fn descriptors_max() -> u64 {
    descriptor_limits().map_or(u64::MAX, |limits| limits.rlim_cur)
}

/// Lets the process have as many descriptors as it may let itself have.
pub fn raise_descriptors_max() -> io::Result<()> {
    let mut limits = descriptor_limits()?;
    limits.rlim_cur = limits.rlim_max;
    // SAFETY: the call reads one structure of this kind, which `limits` is.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limits) })
}

fn descriptor_limits() -> io::Result<libc::rlimit> {
    let mut limits = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the call writes one structure of this kind, which `limits` is.
    check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limits) })?;
    Ok(limits)
}

/// Has a write beyond the limit on the size of files (`ulimit -f`) fail by `EFBIG`, where by default it ends the process. It is so in programs that this one starts, too.
pub fn survive_file_size_limit() -> io::Result<()> {
    // SAFETY: no memory is passed, and no code of ours is to run at a signal.
    match unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) } {
        libc::SIG_ERR => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Bytes of memory that the machine has; as many as there are numbers where the system does not say.
pub fn memory_bytes() -> u64 {
    // SAFETY: an all-zero structure is a valid value of it.
    let mut info: libc::sysinfo = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes one structure of this kind, which `info` is.
    match check(unsafe { libc::sysinfo(&raw mut info) }) {
        Ok(()) => info.totalram as u64 * u64::from(info.mem_unit.max(1)),
        Err(_) => u64::MAX,
    }
}

/// The nodes that have memory: one, where the system says nothing of them.
pub fn memory_nodes() -> &'static [usize] {
    static NODES: OnceLock<Vec<usize>> = OnceLock::new();
    NODES.get_or_init(|| {
        let told = std::fs::read_to_string("/sys/devices/system/node/has_memory");
        let nodes = told.ok().and_then(|list| numbers(list.trim()));
        nodes.filter(|n| !n.is_empty()).unwrap_or_else(|| vec![0])
    })
}

/// The numbers of a list such as `0-3,8`.
fn numbers(list: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        all.extend(first..=last);
    }
    Some(all)
}

/// Whether memory of this thread comes from where it is touched, as it does unless somebody has told the process otherwise.
pub fn memory_policy_is_usual() -> bool {
    let mut mode: libc::c_int = libc::MPOL_DEFAULT;
    let none = std::ptr::null_mut::<libc::c_ulong>();
    // SAFETY: the call writes one number, and no mask where it is given none.
    let done = unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, none, 0, none, 0) };
    done == 0 && mode == libc::MPOL_DEFAULT
}

/// Sets the size of the file at `path`, without opening it.
pub fn truncate(path: &Path, size: u64) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let size = i64::try_from(size).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the path is a string that ends with NUL and outlives the call.
    check(unsafe { libc::truncate(path.as_ptr(), size) })
}

/// Gives the calling thread, and the threads and processes that it starts from now on, a mount
/// table of their own: what they mount nobody else sees, and it ends with the last of them. What others unmount goes from this
/// table, too, where mounts are shared (`/` is, under systemd): else it would live on in it, with the devices below.
/// Needs the rights of root.
pub fn private_mounts() -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    // SAFETY: the strings are constants; a change of propagation reads none of the others.
    check(unsafe {
        libc::mount(
            c"none".as_ptr(),
            c"/".as_ptr(),
            std::ptr::null(),
            libc::MS_REC | libc::MS_SLAVE,
            std::ptr::null(),
        )
    })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_numbers_are_read() {
        assert_eq!(numbers("0"), Some(vec![0]));
        assert_eq!(numbers("0-2,5,8-9"), Some(vec![0, 1, 2, 5, 8, 9]));
        assert_eq!(numbers(""), None);
        assert_eq!(numbers("0-x"), None);
        assert!(!memory_nodes().is_empty());
    }
}
