//! Preloaded into fsx: opens the file named by `ODIRECT_PATH` with O_DIRECT and passes its
//! reads and writes through a buffer aligned as O_DIRECT asks. Makes the file named by
//! `ODIRECT_MARK` once it has done so.

use std::cell::UnsafeCell;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;

const O_DIRECT: c_int = 0o40000;
const O_CREAT_WRONLY: c_int = 0o101;
const SYS_CLOSE: i64 = 3;
const SYS_PREAD64: i64 = 17;
const SYS_PWRITE64: i64 = 18;
const SYS_OPENAT: i64 = 257;
const AT_FDCWD: c_int = -100;
const ROOM: usize = 2 << 20;

unsafe extern "C" {
    fn syscall(number: i64, ...) -> i64;
}

#[repr(align(4096))]
struct Aligned(UnsafeCell<[u8; ROOM]>);

// SAFETY: fsx is single-threaded, so nobody else uses the buffer during a call.
unsafe impl Sync for Aligned {}

static BUFFER: Aligned = Aligned(UnsafeCell::new([0; ROOM]));

fn variable(name: &str) -> Option<CString> {
    let value = std::env::var_os(name)?;
    CString::new(OsStr::as_bytes(&value)).ok()
}

fn chosen() -> Option<&'static [u8]> {
    static PATH: OnceLock<Option<CString>> = OnceLock::new();
    let path = PATH.get_or_init(|| variable("ODIRECT_PATH")).as_ref();
    path.map(|path| path.to_bytes())
}

/// Says that a file was opened with O_DIRECT: a run without one would test the cache once more.
fn mark() {
    let Some(path) = variable("ODIRECT_MARK") else {
        return;
    };
    // SAFETY: the path is a C string, and what is closed was opened here.
    unsafe {
        let fd = syscall(SYS_OPENAT, AT_FDCWD, path.as_ptr(), O_CREAT_WRONLY, 0o644);
        syscall(SYS_CLOSE, fd);
    }
}

/// # Safety
/// As open(2): `path` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn open64(path: *const c_char, flags: c_int, mode: u32) -> c_int {
    // SAFETY: the caller passes a C string.
    let name = unsafe { CStr::from_ptr(path) }.to_bytes();
    let extra = if Some(name) == chosen() { O_DIRECT } else { 0 };
    // SAFETY: openat with the caller's own arguments.
    let fd = unsafe { syscall(SYS_OPENAT, AT_FDCWD, path, flags | extra, mode) as c_int };
    if fd >= 0 && extra != 0 {
        mark();
    }
    fd
}

/// # Safety
/// As open(2): `path` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: u32) -> c_int {
    // SAFETY: same contract.
    unsafe { open64(path, flags, mode) }
}

/// # Safety
/// As pread(2): `buffer` has room for `count` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pread64(fd: c_int, buffer: *mut c_void, count: usize, at: i64) -> isize {
    assert!(count <= ROOM);
    let room = BUFFER.0.get().cast::<u8>();
    // SAFETY: `room` holds ROOM >= count bytes and nobody else uses it.
    let got = unsafe { syscall(SYS_PREAD64, fd, room, count, at) } as isize;
    if got > 0 {
        // SAFETY: both buffers hold `got` bytes and do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(room, buffer.cast(), got as usize) };
    }
    got
}

/// # Safety
/// As pread(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pread(fd: c_int, buffer: *mut c_void, count: usize, at: i64) -> isize {
    // SAFETY: same contract.
    unsafe { pread64(fd, buffer, count, at) }
}

/// # Safety
/// As pwrite(2): `buffer` holds `count` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwrite64(
    fd: c_int,
    buffer: *const c_void,
    count: usize,
    at: i64,
) -> isize {
    assert!(count <= ROOM);
    let room = BUFFER.0.get().cast::<u8>();
    // SAFETY: both buffers hold `count` bytes and do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(buffer.cast(), room, count) };
    // SAFETY: `room` holds `count` bytes.
    unsafe { syscall(SYS_PWRITE64, fd, room, count, at) as isize }
}

/// # Safety
/// As pwrite(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwrite(fd: c_int, buffer: *const c_void, count: usize, at: i64) -> isize {
    // SAFETY: same contract.
    unsafe { pwrite64(fd, buffer, count, at) }
}
