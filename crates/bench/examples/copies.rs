//! What a copy of a page takes, by the C library and by `base::moves`, where it lies so many bytes further in its page than what it is of.
//!
//!     copies [BYTES]
//!
//! Both lie in the processor's caches, if they fit there; the least of [`RUNS`] runs, in nanoseconds.

use std::error::Error;
use std::hint::black_box;

use base::clock::Clock;
use base::moves;

const PAGE: usize = 4096;
const RUNS: usize = 5;
/// Bytes of a run.
const COPIED: usize = 80 << 20;
/// Where in their pages copies begin.
const PLACES: [usize; 12] = [0, 1, 8, 16, 31, 32, 48, 64, 512, 2048, 4080, 4095];

fn main() -> Result<(), Box<dyn Error>> {
    let bytes = match std::env::args().nth(1) {
        Some(bytes) => bytes.parse::<usize>()?.max(1),
        None => PAGE,
    };
    let room = bytes.next_multiple_of(PAGE) + 2 * PAGE;
    let (source, mut target) = (vec![1; room], vec![0; room]);
    let source = &source[source.as_ptr().align_offset(PAGE)..][..bytes];
    let first = target.as_ptr().align_offset(PAGE);
    let clock = Clock::real();
    println!("{bytes} bytes; place, C library, moves::copy");
    for place in PLACES {
        let target = &mut target[first + place..][..bytes];
        let library = least(&clock, bytes, || {
            black_box(&mut *target).copy_from_slice(black_box(source))
        });
        let moves = least(&clock, bytes, || {
            moves::copy(black_box(source), black_box(&mut *target))
        });
        println!("{place:5} {library:8.0} {moves:8.0}");
    }
    Ok(())
}

/// Nanoseconds of one call.
fn least(clock: &Clock, bytes: usize, mut copy: impl FnMut()) -> f64 {
    let copies = (COPIED / bytes).max(1);
    let run = |_| {
        let start = clock.monotonic_ns();
        (0..copies).for_each(|_| copy());
        (clock.monotonic_ns() - start) as f64 / copies as f64
    };
    (0..RUNS).map(run).fold(f64::INFINITY, f64::min)
}
