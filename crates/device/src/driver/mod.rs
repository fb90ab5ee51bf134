//! Devices with a thread of their own, the *driver*, which alone submits to them and reaps: the topology per-device.
//!
//! ```text
//! callers, owners of flights ── letters ──► Mail ──► IoThread ── parts ──► the device's queue
//!            ▲                                          │
//!            └───────────────── Returns ◄───────────────┘
//! ```
//!
//! 1. Who sends a part has it back once, done or failed, whatever becomes of the device's code: nobody is told by a part that is
//!    lost. A call does not go away, by return or by panic, before it has all of its parts: their memory is borrowed ([`Call`]).
//! 2. Nothing grows with use: [`Mail`] is bounded, the driver has [`DEPTH`](io_thread::DEPTH) parts in hand at most, and a call or an
//!    owner has back what it sent.
//! 3. What is not urgent takes half of the driver's hands at most, and its turn among what is ([`mail`], invariant 3). A flush and a
//!    durable write are urgent whoever asks.
//! 4. The driver holds no lock but for a look, and waits for nobody but its device and its mail: so whoever waits for it may hold
//!    any lock but a leaf.
//! 5. A driver waits for its device, and whoever waits for a driver waits for that, by the device's policy ([`crate::reap`]). Without anything in
//!    hand both sleep.
//! 6. A driver ends when its device is given up, after it has done what it has: who has flights keeps the device.

mod io_thread;
mod mail;
mod place;
mod queue;
mod returns;
#[cfg(test)]
mod tests;

use crate::block::{BlockDevice, DeviceInfo, Durability, Operation, Request};
use crate::buf::{self, Loans};
use crate::error::Error;
use crate::queue::{Bell, DeviceQueue, Ended, Kind, Part};
use crate::reap::{Class, Group, Reaped, Reaper, Reaping, Source, Times};
use crate::topology::{Topology, Urgency};
use base::atomic::AtomicBool;
use base::clock;
use base::sync::{Mutex, rank};
use base::thread::{self, JoinHandle};
use io_thread::IoThread;
use mail::{Mail, Waiter};
use queue::DrivenQueue;
use returns::Returns;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Gives each device a driver.
pub(crate) fn drive(
    devices: Vec<Arc<dyn BlockDevice>>,
) -> Result<Vec<Arc<dyn BlockDevice>>, Error> {
    let nodes: Vec<Option<usize>> = devices.iter().map(|d| d.info().numa_node).collect();
    let places = place::places(&nodes, &place::cpus());
    let driven = devices.into_iter().zip(places).map(|(device, cpu)| {
        let driven = Driven::start(device, cpu).map_err(|source| Error::Threads {
            source: Arc::new(source),
        })?;
        Ok(Arc::new(driven) as Arc<dyn BlockDevice>)
    });
    driven.collect()
}

/// A part on its way to a driver.
#[derive(Debug)]
struct Sent {
    part: Part,
    to: Arc<Returns<Ended>>,
}

/// Parts of one owner that it wants an early end of.
struct Cancel {
    of: Arc<Returns<Ended>>,
    users: Vec<u64>,
}

/// What a driver and those who send to it share.
struct Shared {
    mail: Mail<Sent, Arc<Bell>>,
    bell: Arc<Bell>,
    /// Each part is in it once at most.
    cancels: Mutex<Vec<Cancel>>,
}

impl Waiter for Arc<Bell> {
    fn is(&self, other: &Arc<Bell>) -> bool {
        Arc::ptr_eq(self, other)
    }
}

/// A device with a driver; see the module's head.
struct Driven {
    below: Arc<dyn BlockDevice>,
    shared: Arc<Shared>,
    /// Of those who wait for the driver.
    reaper: Reaper,
    thread: Option<JoinHandle>,
}

impl Driven {
    fn start(below: Arc<dyn BlockDevice>, cpu: Option<usize>) -> io::Result<Driven> {
        let shared = Arc::new(Shared {
            mail: Mail::new(mail::LETTERS),
            bell: Arc::new(Bell::new()),
            cancels: Mutex::new(rank::LEAF, Vec::new()),
        });
        let queue = Arc::clone(&below).queue(&shared.bell);
        let driver = Arc::clone(&shared);
        let thread = thread::spawn("sheaf-driver", move || {
            if let Some(cpu) = cpu
                && let Err(error) = thread::pin(cpu)
            {
                tracing::debug!(%error, cpu, "a driver stays where it is");
            }
            IoThread::new(driver, queue).live();
        })?;
        let policy = match thread::cpu_count() {
            // That is the driver's, while its callers wait.
            1 => Reaping::Interrupt,
            _ => below.info().reap,
        };
        Ok(Driven {
            reaper: Reaper::new(policy),
            below,
            shared,
            thread: Some(thread),
        })
    }
}

impl Drop for Driven {
    fn drop(&mut self) {
        self.shared.mail.close();
        self.shared.bell.ring();
        if let Some(thread) = self.thread.take() {
            thread.join_unless_it_is_ours();
        }
    }
}

impl BlockDevice for Driven {
    fn name(&self) -> &str {
        self.below.name()
    }

    fn bytes(&self) -> u64 {
        self.below.bytes()
    }

    fn logical_block(&self) -> u32 {
        self.below.logical_block()
    }

    fn physical_block(&self) -> u32 {
        self.below.physical_block()
    }

    fn take_smaller_blocks(&self, bytes: u32) -> io::Result<()> {
        self.below.take_smaller_blocks(bytes)
    }

    fn memory_align(&self) -> usize {
        self.below.memory_align()
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            topology: Topology::PerDevice,
            ..self.below.info()
        }
    }

    fn has_writer(&self) -> &AtomicBool {
        self.below.has_writer()
    }

    fn has_cache(&self) -> bool {
        self.below.has_cache()
    }

    fn run(&self, requests: &mut [Request<'_>], meanwhile: Option<&mut dyn FnMut()>) {
        let urgency = match requests.iter().any(|r| must_not_wait(&r.operation)) {
            true => Urgency::High,
            false => Urgency::of_caller(),
        };
        let returns = take_returns();
        let mut times = self.reaper.take();
        let class = Class::of_operations(requests.iter().map(|request| &request.operation));
        let group = self.reaper.begin(&mut times, class);
        buf::scope(|loans| {
            let mut call = Call {
                errors: Vec::with_capacity(requests.len()),
                sent: 0,
                ended: Vec::new(),
                returns: &returns,
                loans,
                waits: (&self.reaper, &mut times, group),
            };
            call.send(&self.shared, urgency, requests);
            if let Some(meanwhile) = meanwhile {
                meanwhile();
            }
        });
        self.reaper.keep(times);
        keep_returns(returns);
    }

    fn queue(self: Arc<Self>, bell: &Arc<Bell>) -> DeviceQueue {
        DeviceQueue::alone(DrivenQueue::new(self, Arc::clone(bell)))
    }

    fn reaped(&self) -> Option<Reaped> {
        let waits = self.reaper.reaped();
        Some(match self.below.reaped() {
            // It knows how long its transfers take.
            Some(mut all) => {
                all.add_waits(waits);
                all
            }
            None => waits,
        })
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.below.discard(offset, len)
    }

    fn release_claim(&self) -> io::Result<()> {
        self.below.release_claim()
    }
}

/// Whether somebody waits for it, whoever asks (invariant 3).
fn must_not_wait(operation: &Operation<'_>) -> bool {
    match operation {
        Operation::Flush => true,
        Operation::Write { durability, .. } => *durability == Durability::Durable,
        Operation::Read { .. } => false,
    }
}

thread_local! {
    /// Of calls that are over; one that has begun others meanwhile needs several.
    static RETURNS: RefCell<Vec<Arc<Returns<Ended>>>> = const { RefCell::new(Vec::new()) };
}

fn take_returns() -> Arc<Returns<Ended>> {
    let kept = RETURNS.try_with(|kept| kept.borrow_mut().pop());
    match kept {
        Ok(Some(returns)) => returns,
        // While a thread ends its table is gone.
        Ok(None) | Err(_) => Arc::new(Returns::new(None)),
    }
}

fn keep_returns(returns: Arc<Returns<Ended>>) {
    let kept = RETURNS.try_with(move |kept| kept.borrow_mut().push(returns));
    tracing::trace!(kept = kept.is_ok(), "returns");
}

/// One call of [`Driven::run`] (invariant 1).
struct Call<'r, 'b> {
    /// Where each part that was sent tells its error; a part's mark is its place here.
    errors: Vec<&'b mut Option<io::Error>>,
    sent: usize,
    ended: Vec<Ended>,
    returns: &'r Arc<Returns<Ended>>,
    loans: &'r mut Loans<'b>,
    waits: (&'r Reaper, &'r mut Times, Group),
}

impl<'b> Call<'_, 'b> {
    /// Sends all but what has failed before.
    fn send(&mut self, shared: &Shared, urgency: Urgency, requests: &'b mut [Request<'_>]) {
        let mut rest = requests.iter_mut().filter(|r| r.error.is_none()).peekable();
        while rest.peek().is_some() {
            let mut letter =
                VecDeque::with_capacity(mail::PARTS.min(rest.size_hint().1.unwrap_or(1)));
            for request in rest.by_ref().take(mail::PARTS) {
                let part = Part::lent(request, &mut self.errors, self.loans);
                let to = Arc::clone(self.returns);
                letter.push_back(Sent { part, to });
            }
            self.sent += letter.len();
            shared.mail.send(urgency, letter);
            shared.bell.ring();
        }
    }
}

impl Drop for Call<'_, '_> {
    /// Waits for all that was sent.
    fn drop(&mut self) {
        if self.sent > 0 {
            let (reaper, times, group) = &mut self.waits;
            let mut back = Back {
                returns: self.returns,
                count: self.sent,
            };
            reaper.wait(times, *group, &mut back);
            self.returns.wait(self.sent, &mut self.ended);
        }
        for Ended { part, result } in self.ended.drain(..) {
            *self.errors[part.user as usize] = result.err();
            if part.kind != Kind::Flush {
                self.loans.give_back(part.segment);
            }
        }
    }
}

/// All that a call has sent, as something to wait for.
struct Back<'a> {
    returns: &'a Returns<Ended>,
    count: usize,
}

impl Source for Back<'_> {
    fn is_there(&mut self) -> bool {
        self.returns.has(self.count)
    }

    fn sleep(&mut self, until: Option<u64>) {
        self.returns.sleep(self.count, until.map(left));
    }

    fn pause(&mut self) {
        thread::yield_now();
    }
}

/// How long it is until that moment of [`clock::now_ns`], for a sleep that shall end then.
fn left(until: u64) -> Duration {
    clock::exact_timers();
    Duration::from_nanos(until.saturating_sub(clock::now_ns()))
}
