//! Threads and CPU topology.

use std::thread::{Builder, JoinHandle};

/// Number of CPUs this process may run on; at least 1.
pub fn cpu_count() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// The CPU the caller runs on now; a hint, for choosing per-core structures.
pub fn current_cpu() -> usize {
    // SAFETY: sched_getcpu takes no arguments and touches no memory of ours.
    let cpu = unsafe { libc::sched_getcpu() };
    cpu.max(0) as usize
}

/// Starts a named thread. Failing to start one is an environment error the caller reports.
pub fn spawn<F>(name: &str, body: F) -> std::io::Result<JoinHandle<()>>
where
    F: FnOnce() + Send + 'static,
{
    Builder::new().name(name.to_owned()).spawn(body)
}

/// Runs `worker(i)` for `i` in `0..workers` at once and returns the results in order.
/// With one worker the caller's own thread does the work.
pub fn parallel<T: Send>(workers: usize, worker: impl Fn(usize) -> T + Sync) -> Vec<T> {
    if workers <= 1 {
        return vec![worker(0)];
    }
    let worker = &worker;
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..workers)
            .map(|i| scope.spawn(move || worker(i)))
            .collect();
        handles
            .into_iter()
            .map(|h| {
                h.join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect()
    })
}

/// Lets other runnable threads go first.
pub fn yield_now() {
    std::thread::yield_now();
}
