//! A session that is over has let go of everything.

mod toy;

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mount::abi::{InHeader, InitIn, init, opcode};
use mount::dispatch::Reply;
use mount::session::{Config, serve};
use mount::transport::{Channel, Handler, Transport};
use zerocopy::IntoBytes;

/// A kernel that says INIT, and then that it is over, through channels that take their time to close.
struct ShortMount {
    channels: AtomicUsize,
    _held: Arc<()>,
}

struct SlowToClose {
    first: bool,
}

impl Transport for ShortMount {
    type Channel = SlowToClose;

    fn channel(&self, _queue: usize) -> std::io::Result<SlowToClose> {
        let first = self.channels.fetch_add(1, Ordering::Relaxed) == 0;
        Ok(SlowToClose { first })
    }
}

impl Channel for SlowToClose {
    fn serve_one(&mut self, handler: &mut Handler<'_>) -> std::io::Result<bool> {
        if self.first {
            handler(&init_message(), &mut [], &mut Nobody);
        }
        Ok(self.first)
    }
}

impl Drop for SlowToClose {
    fn drop(&mut self) {
        let clock = base::clock::Clock::real();
        clock.sleep_until(clock.monotonic_ns() + 20_000_000);
    }
}

struct Nobody;

impl Reply for Nobody {
    fn send(&mut self, _: &[IoSlice<'_>]) -> std::io::Result<bool> {
        Ok(true)
    }
}

fn init_message() -> Vec<u8> {
    let input = InitIn {
        major: 7,
        minor: 38,
        max_readahead: 131_072,
        flags: init::BIG_WRITES as u32,
    };
    let header = InHeader {
        len: (size_of::<InHeader>() + size_of::<InitIn>() + 48) as u32,
        opcode: opcode::INIT,
        unique: 2,
        ..Default::default()
    };
    [header.as_bytes(), input.as_bytes(), &[0; 48]].concat()
}

#[test]
fn nothing_of_a_session_is_held_when_it_is_over() {
    let held = Arc::new(());
    let transport = ShortMount {
        channels: AtomicUsize::new(0),
        _held: Arc::clone(&held),
    };
    let config = Config {
        workers_max: 4,
        workers_idle: 4,
        ..Config::default()
    };
    serve(transport, toy::Toy::default(), &config, || {}).unwrap();
    assert_eq!(Arc::strong_count(&held), 1);
}
