//! The models. Each has been made to fail by breaking the part on purpose; how is said with it.

mod changed;
mod device;
mod drivers;
mod journal;
mod latches;
mod marks;
mod ranges;
mod readers;
mod space;
mod stamps;
mod tags;
mod tallies;
mod vouched;

/// Checks a model under all schedules with at most this many interruptions of threads that could
/// have gone on.
fn check(interruptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(interruptions);
    builder.check(model);
}
