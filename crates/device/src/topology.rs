//! Who submits to a device and reaps from it: a value, chosen when devices are opened.

use crate::block::BlockDevice;
use crate::driver;
use crate::error::Error;
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;

/// How transfers reach their device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Topology {
    /// The calling thread submits to and reaps from rings of its own.
    #[default]
    PerCore,
    /// A thread for each device owns the device's ring; callers hand it batches through a bounded queue.
    PerDevice,
}

impl Topology {
    pub const ALL: [Topology; 2] = [Topology::PerCore, Topology::PerDevice];

    pub fn name(self) -> &'static str {
        match self {
            Topology::PerCore => "per-core",
            Topology::PerDevice => "per-device",
        }
    }

    /// The one that is called so.
    pub fn parse(name: &str) -> Option<Topology> {
        Topology::ALL.into_iter().find(|t| t.name() == name)
    }

    /// The devices, reached so.
    ///
    /// # Errors
    /// The system starts no thread for one of them.
    pub fn over(
        self,
        devices: Vec<Arc<dyn BlockDevice>>,
    ) -> Result<Vec<Arc<dyn BlockDevice>>, Error> {
        match self {
            Topology::PerCore => Ok(devices),
            Topology::PerDevice => driver::drive(devices),
        }
    }
}

/// How soon a batch is wanted, where devices have threads of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// Somebody waits for it.
    #[default]
    High,
    /// Nobody does, as a rule: it goes when nothing else is there, and in its turn when there always is.
    Low,
}

thread_local! {
    static URGENCY: Cell<Urgency> = const { Cell::new(Urgency::High) };
}

impl Urgency {
    /// Of what the calling thread does now.
    pub fn of_caller() -> Urgency {
        URGENCY.get()
    }
}

/// What the calling thread reads and writes is nobody's to wait for, until this is dropped. Flushes and durable writes are all the
/// same as everybody's.
#[derive(Debug)]
pub struct Unhurried {
    _until: Until,
}

impl Unhurried {
    pub fn begin() -> Unhurried {
        Unhurried {
            _until: Until::begin(Urgency::Low),
        }
    }
}

/// Others wait for what the calling thread reads and writes until this is dropped, though it is [`Unhurried`] otherwise.
#[derive(Debug)]
pub struct Hurried {
    _until: Until,
}

impl Hurried {
    pub fn begin() -> Hurried {
        Hurried {
            _until: Until::begin(Urgency::High),
        }
    }
}

/// The calling thread's urgency is another one until this is dropped, by the same thread.
#[derive(Debug)]
struct Until {
    before: Urgency,
    _of_this_thread: PhantomData<*const ()>,
}

impl Until {
    fn begin(urgency: Urgency) -> Until {
        Until {
            before: URGENCY.replace(urgency),
            _of_this_thread: PhantomData,
        }
    }
}

impl Drop for Until {
    fn drop(&mut self) {
        URGENCY.set(self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topologies_are_found_by_their_names() {
        for topology in Topology::ALL {
            assert_eq!(Topology::parse(topology.name()), Some(topology));
        }
        assert_eq!(Topology::parse("per-moon"), None);
    }

    #[test]
    fn work_is_unhurried_until_it_is_over() {
        assert_eq!(Urgency::of_caller(), Urgency::High);
        let outer = Unhurried::begin();
        drop(Unhurried::begin());
        assert_eq!(Urgency::of_caller(), Urgency::Low);
        let within = Hurried::begin();
        assert_eq!(Urgency::of_caller(), Urgency::High);
        drop(within);
        assert_eq!(Urgency::of_caller(), Urgency::Low);
        drop(outer);
        assert_eq!(Urgency::of_caller(), Urgency::High);
    }
}
