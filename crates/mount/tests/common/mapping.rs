//! A shared mapping of a file, made by a process of its own.
//!
//! The mounts of these tests are served by threads of the process that tests. The kernel waits, with a process's memory map locked, until what a mapping of it
//! stored is written back: where it is unmapped, and in some faults. A server in that process may need the same lock meanwhile, and then both wait for ever.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

const STORE: usize = 1;
const LOAD: usize = 2;
const SYNC: usize = 3;

/// What is asked, where, and how many bytes of it: three words, and the bytes of a store. Each is answered when done, with the bytes of a load or one other.
type Request = [usize; 3];

/// A file's first bytes, mapped for reading and writing; unmapped when dropped. Nothing but its own process has the memory in view.
pub struct Mapping {
    process: libc::pid_t,
    line: UnixStream,
    len: usize,
}

impl Mapping {
    pub fn of(file: &File, len: usize) -> Mapping {
        let (line, end) = UnixStream::pair().unwrap();
        // SAFETY: the child has one thread, which calls nothing but what a signal handler may, and ends.
        let process = unsafe { libc::fork() };
        assert!(process >= 0, "{}", std::io::Error::last_os_error());
        if process == 0 {
            // SAFETY: as above; both descriptors are open.
            unsafe { serve(file.as_raw_fd(), end.as_raw_fd(), len) };
        }
        drop(end);
        let mut mapping = Mapping { process, line, len };
        mapping.answered();
        mapping
    }

    pub fn store(&mut self, at: usize, bytes: &[u8]) {
        self.ask([STORE, at, bytes.len()]);
        self.line.write_all(bytes).unwrap();
        self.answered();
    }

    pub fn load(&mut self, at: usize) -> u8 {
        self.ask([LOAD, at, 1]);
        self.answered()
    }

    /// msync(2) of all of it.
    pub fn sync(&mut self) {
        self.ask([SYNC, 0, self.len]);
        self.answered();
    }

    fn ask(&mut self, request: Request) {
        assert!(request[1] + request[2] <= self.len);
        let bytes = request.map(usize::to_ne_bytes);
        self.line.write_all(bytes.as_flattened()).unwrap();
    }

    fn answered(&mut self) -> u8 {
        let mut answer = [0];
        let heard = self.line.read_exact(&mut answer);
        heard.expect("its process has done it");
        answer[0]
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let _ = self.line.shutdown(std::net::Shutdown::Both);
        let mut status = 0;
        // SAFETY: a child of this process that nobody else waits for, and a number of ours.
        unsafe { libc::waitpid(self.process, &raw mut status, 0) };
        if !base::thread::panicking() {
            assert_eq!(status, 0, "the mapping's process fails");
        }
    }
}

/// Moves all of `len` bytes by calls of `part`, which say how many they moved.
///
/// # Safety
/// That of `part` for any part of the bytes.
unsafe fn all(at: *mut u8, len: usize, part: impl Fn(*mut libc::c_void, usize) -> isize) -> bool {
    let mut done = 0;
    while done < len {
        // SAFETY: within the bytes.
        let moved = part(unsafe { at.add(done) }.cast(), len - done);
        if moved <= 0 {
            return false;
        }
        done += moved as usize;
    }
    true
}

/// The process of a mapping, from the fork to its end.
///
/// # Safety
/// The two descriptors are open. The process is the caller's alone: all others are closed.
unsafe fn serve(file: RawFd, line: RawFd, len: usize) -> ! {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, of which all that follows stays within `len`; the rest of the memory is of this function.
    unsafe {
        let null = std::ptr::null_mut();
        let map = libc::mmap(null, len, protection, libc::MAP_SHARED, file, 0);
        // Files that tests have open keep their mounts busy.
        if map == libc::MAP_FAILED
            || libc::dup2(line, 0) != 0
            || libc::syscall(libc::SYS_close_range, 1, u32::MAX, 0) != 0
        {
            libc::_exit(1);
        }
        let read = |at: *mut libc::c_void, len| libc::read(0, at, len);
        let write = |at: *mut libc::c_void, len| libc::write(0, at, len);
        let mut answer = 0_u8;
        loop {
            if !all(&raw mut answer, 1, write) {
                libc::_exit(2);
            }
            let mut request: Request = [0; 3];
            if !all(request.as_mut_ptr().cast(), size_of::<Request>(), read) {
                break;
            }
            let [what, at, bytes] = request;
            let place = map.cast::<u8>().add(at);
            let done = match what {
                STORE => all(place, bytes, read),
                LOAD => {
                    answer = place.read_volatile();
                    true
                }
                SYNC => libc::msync(map, len, libc::MS_SYNC) == 0,
                _ => false,
            };
            if !done {
                libc::_exit(3);
            }
        }
        libc::_exit(libc::munmap(map, len));
    }
}
