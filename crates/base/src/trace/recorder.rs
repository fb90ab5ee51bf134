//! The recorder of one thread.
//!
//! 1. Nothing is recorded on a thread between `stop`, or `pause`, and the next `start`.
//! 2. An event's time is taken when what it tells of is done, and before the event is stored: the
//!    time from one event to the next holds the storing of one event, which a caller can measure.
//! 3. Recording allocates only when more than the announced number of events come.

use std::cell::{Cell, RefCell};

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A lock was taken exclusively.
    LockExclusive,
    LockShared,
    /// The same without a word of the lock written.
    LockEntered,
    /// The lock of the event before was free, and would not have been waited for.
    Tried,
    Unlock,
    /// An atomic was looked at.
    Read,
    /// An atomic was changed, or a count of references.
    Write,
    /// A counted value of `line` bytes was put at this address: what was there before is gone.
    Born,
    /// `line` bytes from this address on are asked for, to be read.
    Ahead,
    /// The same, to be changed.
    AheadToChange,
    /// A device is waited for; it moves `value` bytes.
    DeviceBegin,
    /// Meanwhile the thread had `value` nanoseconds of processor time.
    DeviceEnd,
    /// A part of a longer job begins.
    Mark,
    /// The parts are done; one thread goes on.
    Joined,
    /// The thread has had `value` nanoseconds of processor time. What passed since the event before went into asking.
    Processor,
    /// Of whoever records.
    Note,
}

/// One event.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// When; see [`ticks`].
    pub tick: u64,
    /// Of the lock, the atomic or the count; what `kind` says otherwise.
    pub address: usize,
    /// Name of a lock's rank, of a counted type, of a part; file of an atomic's use.
    pub name: &'static str,
    /// Line in that file; 0: `name` is no file. Without either, what `kind` says.
    pub line: u32,
    pub kind: Kind,
}

thread_local! {
    static ON: Cell<bool> = const { Cell::new(false) };
    static EVENTS: RefCell<Vec<Event>> = const { RefCell::new(Vec::new()) };
    static CPU: Cell<Option<usize>> = const { Cell::new(None) };
}

/// A time in units of the processor's own counter.
#[inline(always)]
pub fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction, and it touches no memory.
    return unsafe { core::arch::x86_64::_rdtsc() };
    #[cfg(not(target_arch = "x86_64"))]
    {
        use std::sync::OnceLock;
        use std::time::Instant;
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }
}

/// Records what this thread does from now on; room for `expected` events is taken at once.
pub fn start(expected: usize) {
    reserve(expected);
    ON.set(true);
}

/// Takes room for so many events, if there is not as much.
pub fn reserve(expected: usize) {
    EVENTS.with_borrow_mut(|events| {
        let missing = expected.saturating_sub(events.capacity() - events.len());
        if missing > 0 {
            // The pages are made now, not when the first event meets them.
            let len = events.len();
            let blank = Event {
                tick: 0,
                address: 0,
                name: "",
                line: 0,
                kind: Kind::Note,
            };
            events.resize(len + expected, blank);
            events.truncate(len);
        }
    });
}

/// Records nothing until the next [`start`], which goes on with what there is.
pub fn pause() {
    ON.set(false);
}

/// Ends recording and returns the events since the last `stop`.
pub fn stop() -> Vec<Event> {
    ON.set(false);
    EVENTS.take()
}

/// Has [`crate::thread::current_cpu`] of this thread be this, or what the machine says.
pub fn set_cpu(cpu: Option<usize>) {
    CPU.set(cpu);
}

/// What [`set_cpu`] set.
#[inline]
pub fn cpu() -> Option<usize> {
    CPU.get()
}

/// This thread records.
#[inline]
pub(super) fn recording() -> bool {
    ON.get()
}

/// Stores an event if this thread records.
#[inline]
pub fn record(kind: Kind, address: usize, name: &'static str, line: u32) {
    if !recording() {
        return;
    }
    let tick = ticks();
    // A destructor that runs while the thread ends finds no list any more.
    let _ = EVENTS.try_with(|events| {
        events.borrow_mut().push(Event {
            tick,
            address,
            name,
            line,
            kind,
        });
    });
}
