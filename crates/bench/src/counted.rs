//! What the processor and the kernel count of this process, as far as they do here.

use base::counter::{Instructions, SystemCalls};
use serde_json::{Map, Value};

use crate::contract::Spread;
use crate::runner::{Counts, Measured};

/// Of the calling thread, and of all that it, or they, start from then on: to be made before a file system is opened, so that
/// its threads count.
pub struct Counters {
    instructions: Option<Instructions>,
    calls: Option<SystemCalls>,
}

impl Counters {
    pub fn start() -> Counters {
        Counters {
            instructions: Instructions::count().ok(),
            calls: SystemCalls::count().ok(),
        }
    }

    pub fn read(&self) -> Counts {
        let instructions = self.instructions.as_ref();
        let calls = self.calls.as_ref();
        Counts {
            instructions: instructions.and_then(|counter| counter.read().ok()),
            calls: calls.and_then(|counter| counter.read().ok()),
            requests: None,
        }
    }

    /// What a report has to say about them.
    pub fn note() -> String {
        let counters = Counters::start();
        let found = counters.read();
        let kernel = counters.instructions.is_some_and(|i| i.with_kernel());
        let instructions = match (found.instructions, kernel) {
            (Some(_), true) => "instructions include the kernel's for this process",
            (Some(_), false) => "instructions are those in user space",
            (None, _) => "this machine counts no instructions",
        };
        let calls = match found.calls {
            Some(_) => "system calls are counted by the kernel's tracepoint",
            None => "system calls are not counted: the tracing file system is not there",
        };
        format!(
            "{instructions}; {calls}; CPU time is this process's, without threads of the kernel; the machine's, where the kernel \
             tells it, is that of all its CPUs, whatever else ran included"
        )
    }
}

/// Medians over the windows, each for an operation, into a row; nothing of what was not counted in all of them.
pub fn put(extra: &mut Map<String, Value>, windows: &[Measured]) {
    let mut put = |key: &str, get: &dyn Fn(&Measured) -> Option<f64>| {
        let each = |window: &Measured| Some(get(window)? / window.operations.max(1) as f64);
        let all: Option<Vec<f64>> = windows.iter().map(each).collect();
        if let Some(all) = all.filter(|all| !all.is_empty()) {
            extra.insert(key.to_owned(), Value::from(Spread::of(all).median));
        }
    };
    put("cpu_us_per_op", &|window| Some(window.cpu_seconds * 1e6));
    put("machine_us_per_op", &|window| {
        Some(window.ended.busy_seconds? * 1e6)
    });
    put("instructions_per_op", &|window| {
        window.counts.instructions.map(|count| count as f64)
    });
    put("calls_per_op", &|window| {
        window.counts.calls.map(|count| count as f64)
    });
    put("requests_per_op", &|window| {
        window.counts.requests.map(|count| count as f64)
    });
    Measured::put_seconds(extra, windows);
}
