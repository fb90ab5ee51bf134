//! What to do at one moment of a wait. Pure.

use super::costs::Costs;

/// A wait of so many times the cost of a wake blocks: polling would gain next to nothing.
const LONG: u64 = 500;

/// What to do now; times are those of the clock by which it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// Sleep in the kernel until it is there.
    Block,
    /// Sleep until then, or until it is there; then ask again.
    Sleep { until: u64 },
    /// Look, until then; then block.
    Spin { until: u64 },
}

pub(super) fn is_long(costs: &Costs, prediction: u64) -> bool {
    prediction >= LONG * costs.wake_ns
}

/// Of what should be there at `finish`: who sleeps is awake `margin` before that, and nobody spins more than `grace` past it.
pub(super) fn plan(costs: &Costs, finish: u64, margin: u64, grace: u64, now: u64) -> Plan {
    let (awake, end) = (finish.saturating_sub(margin), finish + grace);
    if now >= end {
        return Plan::Block;
    }
    match awake > now + costs.shortest_ns {
        true => Plan::Sleep { until: awake },
        false => Plan::Spin { until: end },
    }
}
