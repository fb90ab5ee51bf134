//! Linux AIO (`io_submit(2)`): transfers between files and memory that the queue owns.
//!
//! For measurements beside programs that use this interface; Sheaf itself does not.
//!
//! 1. A slot is idle or in flight. While it is in flight the kernel alone uses its memory; [`Queue::memory`] refuses it.
//! 2. There are as many places in the kernel's context as slots, and a slot is in flight once at most: the kernel
//!    has room for whatever is submitted.
//! 3. A queue that is dropped waits for what is in flight before its memory goes.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

const PAGE: usize = 4096;
/// `IOCB_CMD_PREAD` and `IOCB_CMD_PWRITE`.
const READ: u16 = 0;
const WRITE: u16 = 1;

#[derive(Clone)]
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

/// `struct iocb` of linux/aio_abi.h; little-endian machines only have these halves in this order.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Control {
    data: u64,
    #[cfg(target_endian = "little")]
    key: u32,
    flags_of_transfer: u32,
    #[cfg(target_endian = "big")]
    key: u32,
    operation: u16,
    priority: i16,
    descriptor: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event: u32,
}

const _: () = assert!(size_of::<Control>() == 64);

/// `struct io_event`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Event {
    data: u64,
    object: u64,
    result: i64,
    more: i64,
}

/// How a transfer ended: its slot, and the bytes moved.
pub type Ended = (usize, io::Result<usize>);

/// Transfers on some files; see the module's head.
pub struct Queue {
    context: libc::c_ulong,
    files: Vec<File>,
    /// Of all slots, one after the other. Never looked at but through its address.
    pages: Vec<Page>,
    slot_pages: usize,
    controls: Vec<Control>,
    busy: Vec<bool>,
    /// Slots that are started and not submitted.
    queued: Vec<usize>,
    in_flight: usize,
    events: Vec<Event>,
    enters: u64,
}

impl Queue {
    /// A queue of `slots` transfers of up to `bytes` bytes each.
    ///
    /// # Errors
    /// The machine has no room for so many (`fs.aio-max-nr`), or no such interface.
    pub fn new(files: Vec<File>, slots: usize, bytes: usize) -> io::Result<Queue> {
        let places =
            libc::c_int::try_from(slots.max(1)).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: the call writes one context number.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, places, &raw mut context) };
        check(made)?;
        let slot_pages = bytes.div_ceil(PAGE).max(1);
        Ok(Queue {
            context,
            files,
            pages: vec![Page([0; PAGE]); slot_pages * slots],
            slot_pages,
            controls: vec![Control::default(); slots],
            busy: vec![false; slots],
            queued: Vec::with_capacity(slots),
            in_flight: 0,
            events: vec![Event::default(); slots],
            enters: 0,
        })
    }

    /// Bytes that a slot can hold.
    pub fn slot_bytes(&self) -> usize {
        self.slot_pages * PAGE
    }

    /// Calls of the kernel so far.
    pub fn enters(&self) -> u64 {
        self.enters
    }

    fn address(&mut self, slot: usize) -> *mut u8 {
        assert!(slot < self.busy.len(), "there is no slot {slot}");
        // SAFETY: the pages of all slots are one allocation, and there is such a slot.
        unsafe { self.pages.as_mut_ptr().add(slot * self.slot_pages).cast() }
    }

    /// A slot's memory: what was read, or what is to be written.
    ///
    /// # Panics
    /// The slot is in flight.
    pub fn memory(&mut self, slot: usize) -> &mut [u8] {
        assert!(!self.busy[slot], "slot {slot} is in flight");
        let (address, bytes) = (self.address(slot), self.slot_bytes());
        // SAFETY: the slot's pages are initialized, and an idle slot's nobody else uses (invariant 1).
        unsafe { std::slice::from_raw_parts_mut(address, bytes) }
    }

    /// Puts a transfer of `bytes` bytes between an idle slot and a file; [`wait`](Queue::wait) submits it.
    ///
    /// # Panics
    /// The slot is in flight or too small, or there is no such file.
    pub fn start(&mut self, slot: usize, file: usize, offset: u64, bytes: usize, write: bool) {
        assert!(!self.busy[slot], "slot {slot} is in flight");
        assert!(bytes <= self.slot_bytes(), "a slot is smaller");
        self.controls[slot] = Control {
            data: slot as u64,
            operation: if write { WRITE } else { READ },
            descriptor: self.files[file].as_raw_fd() as u32,
            buffer: self.address(slot) as u64,
            bytes: bytes as u64,
            offset: offset as i64,
            ..Control::default()
        };
        self.busy[slot] = true;
        self.queued.push(slot);
    }

    /// Submits what was started and waits until at least `least` transfers have ended, or all; adds those that have.
    ///
    /// # Errors
    /// The kernel refuses a transfer: its slot stays started.
    pub fn wait(&mut self, least: usize, ended: &mut Vec<Ended>) -> io::Result<()> {
        self.submit()?;
        self.collect(least, ended)
    }

    fn submit(&mut self) -> io::Result<()> {
        while !self.queued.is_empty() {
            let pointers: Vec<*mut Control> = self
                .queued
                .iter()
                .map(|&slot| &raw mut self.controls[slot])
                .collect();
            self.enters += 1;
            // SAFETY: each pointer names the request of a slot of its own; the kernel reads them during the call. Their
            // memory is the slots', which are busy from here on (invariants 1 and 3), and their files stay open as long.
            let taken = unsafe {
                libc::syscall(
                    libc::SYS_io_submit,
                    self.context,
                    pointers.len() as libc::c_long,
                    pointers.as_ptr(),
                )
            };
            match check(taken) {
                Ok(taken) => {
                    self.in_flight += taken;
                    self.queued.drain(..taken);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn collect(&mut self, least: usize, ended: &mut Vec<Ended>) -> io::Result<()> {
        let least = least.min(self.in_flight);
        let mut got = 0;
        while got < least {
            self.enters += 1;
            // SAFETY: the kernel writes at most as many events as there are, and no time limit is passed.
            let count = unsafe {
                libc::syscall(
                    libc::SYS_io_getevents,
                    self.context,
                    (least - got) as libc::c_long,
                    self.events.len() as libc::c_long,
                    self.events.as_mut_ptr(),
                    std::ptr::null_mut::<libc::timespec>(),
                )
            };
            let count = match check(count) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            for event in &self.events[..count] {
                let slot = event.data as usize;
                self.busy[slot] = false;
                let moved = usize::try_from(event.result)
                    .map_err(|_| io::Error::from_raw_os_error(-event.result as i32));
                ended.push((slot, moved));
            }
            self.in_flight -= count;
            got += count;
        }
        Ok(())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let mut ended = Vec::new();
        if let Err(error) = self.collect(self.in_flight, &mut ended) {
            // The kernel may still write to memory that would be given up now.
            eprintln!("io_getevents failed with I/O in flight: {error}");
            std::process::abort();
        }
        // SAFETY: the context is ours, and nothing is in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

fn check(result: libc::c_long) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn file() -> File {
        // Tests run beside each other.
        static FILES: AtomicU64 = AtomicU64::new(0);
        let number = FILES.fetch_add(1, Ordering::Relaxed);
        let name = format!("sheaf-aio-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let mut options = File::options();
        let options = options.read(true).write(true).create_new(true);
        let file = options.open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file
    }

    #[test]
    fn what_is_written_is_read_back_by_any_slot() {
        let mut queue = Queue::new(vec![file()], 4, 3 * PAGE - 5).unwrap();
        assert_eq!(queue.slot_bytes(), 3 * PAGE);
        let mut ended = Vec::new();
        for slot in 0..4 {
            queue.memory(slot).fill(slot as u8 + 1);
            queue.start(slot, 0, slot as u64 * PAGE as u64, PAGE, true);
        }
        queue.wait(4, &mut ended).unwrap();
        let mut slots: Vec<usize> = ended.iter().map(|(slot, _)| *slot).collect();
        slots.sort_unstable();
        assert_eq!(slots, [0, 1, 2, 3]);
        assert!(
            ended
                .iter()
                .all(|(_, moved)| *moved.as_ref().unwrap() == PAGE)
        );
        ended.clear();
        for slot in 0..4 {
            queue.start(slot, 0, (3 - slot) as u64 * PAGE as u64, PAGE, false);
        }
        queue.wait(usize::MAX, &mut ended).unwrap();
        assert_eq!(ended.len(), 4);
        for slot in 0..4 {
            assert!(
                queue.memory(slot)[..PAGE]
                    .iter()
                    .all(|&b| b == 4 - slot as u8)
            );
        }
        assert!(queue.enters() >= 4);
        // Nothing is in flight: nothing is waited for.
        queue.wait(1, &mut ended).unwrap();
    }

    #[test]
    fn the_end_of_a_file_is_a_short_transfer_and_a_queue_goes_with_transfers_in_flight() {
        let mut queue = Queue::new(vec![file()], 2, PAGE).unwrap();
        queue.start(0, 0, 0, 10, true);
        let mut ended = Vec::new();
        queue.wait(1, &mut ended).unwrap();
        queue.start(0, 0, 4, PAGE, false);
        queue.wait(1, &mut ended).unwrap();
        assert_eq!(*ended[1].1.as_ref().unwrap(), 6);
        queue.start(1, 0, 0, PAGE, true);
        queue.submit().unwrap();
    }

    #[test]
    #[should_panic(expected = "in flight")]
    fn a_slot_in_flight_is_nobody_elses() {
        let mut queue = Queue::new(vec![file()], 1, PAGE).unwrap();
        queue.start(0, 0, 0, PAGE, true);
        queue.memory(0);
    }
}
