//! Where drivers run: near their devices, and apart from each other.

use base::thread;

/// A CPU of this process, and the NUMA node that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cpu {
    pub number: usize,
    pub node: Option<usize>,
}

/// The CPUs that this process may use.
pub(super) fn cpus() -> Vec<Cpu> {
    let cpu = |number| Cpu {
        number,
        node: thread::numa_node(number),
    };
    thread::allowed_cpus().into_iter().map(cpu).collect()
}

/// A CPU for each device's driver, of the device's node if that is known and has one, on which the fewest others are. `None`: where the
/// system likes, as for all of them if they are more than the CPUs, or if there is one CPU.
pub(super) fn places(nodes: &[Option<usize>], cpus: &[Cpu]) -> Vec<Option<usize>> {
    if cpus.len() <= 1 || nodes.len() > cpus.len() {
        return vec![None; nodes.len()];
    }
    let mut drivers = vec![0; cpus.len()];
    let place = |node: &Option<usize>| {
        let near = |at: &usize| node.is_some() && cpus[*at].node == *node;
        let of_all = 0..cpus.len();
        let place = of_all.clone().filter(near).min_by_key(|&at| drivers[at]);
        let place = place.or_else(|| of_all.min_by_key(|&at| drivers[at]))?;
        drivers[place] += 1;
        Some(cpus[place].number)
    };
    nodes.iter().map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_nodes() -> Vec<Cpu> {
        let cpu = |number| Cpu {
            number,
            node: Some(number / 4),
        };
        (0..8).map(cpu).collect()
    }

    #[test]
    fn drivers_are_near_their_devices_and_apart() {
        let places = places(&[Some(1), Some(0), Some(1), None, None], &two_nodes());
        assert_eq!(places, [4, 0, 5, 1, 2].map(Some));
    }

    #[test]
    fn a_crowded_node_has_several_on_a_cpu() {
        let places = places(&[Some(1); 6], &two_nodes());
        assert_eq!(places, [4, 5, 6, 7, 4, 5].map(Some));
    }

    #[test]
    fn a_node_without_cpus_of_ours_is_any() {
        assert_eq!(places(&[Some(7)], &two_nodes()), [Some(0)]);
    }

    #[test]
    fn nobody_is_pinned_where_there_is_no_room() {
        assert_eq!(places(&[None; 9], &two_nodes()), [None; 9]);
        assert_eq!(places(&[None], &two_nodes()[..1]), [None]);
        assert_eq!(places(&[None], &[]), [None]);
    }

    #[test]
    fn this_process_may_use_some_cpus() {
        assert!(!cpus().is_empty());
    }
}
