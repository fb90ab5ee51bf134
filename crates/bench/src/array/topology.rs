//! Which submission topology suits these devices: what both did in the same run, side by side.
//!
//! The faster one, by the geometric mean of the quotients of medians over all workloads; where that is within the
//! noise of the runs, the one that takes less processor time.

use device::Topology;
use serde_json::Value;

use crate::contract::Row;

/// What both did in one workload, per-device by per-core.
#[derive(Clone, Copy, Debug)]
struct Beside {
    rate: f64,
    cpu: Option<f64>,
    /// Half of what the runs of the less steady side spread over.
    noise: f64,
}

/// All workloads with one number of devices.
struct Verdict {
    members: u64,
    rate: f64,
    cpu: Option<f64>,
    noise: f64,
}

fn topology(row: &Row) -> Option<Topology> {
    Topology::parse(row.extra.get("topology")?.as_str()?)
}

fn members(row: &Row) -> Option<u64> {
    row.extra.get("members")?.as_u64()
}

/// A sentence for each number of devices; rows of the topology that it recommends say so, too.
pub(super) fn recommend(rows: &mut [Row]) -> Vec<String> {
    let mut counts: Vec<u64> = rows.iter().filter_map(members).collect();
    counts.dedup();
    let verdicts: Vec<Verdict> = counts
        .into_iter()
        .filter_map(|count| Verdict::of(rows, count))
        .collect();
    for verdict in &verdicts {
        for row in rows.iter_mut() {
            if let Some(topology) = topology(row)
                && members(row) == Some(verdict.members)
            {
                let chosen = topology == verdict.choice();
                row.extra
                    .insert("recommended".to_owned(), Value::from(chosen));
            }
        }
    }
    verdicts.iter().map(Verdict::text).collect()
}

impl Verdict {
    fn of(rows: &[Row], count: u64) -> Option<Verdict> {
        let of = |topology_of: Topology| {
            let mine =
                move |row: &&Row| members(row) == Some(count) && topology(row) == Some(topology_of);
            rows.iter().filter(mine)
        };
        let suffix = format!("-{}", Topology::PerDevice.name());
        let pairs = of(Topology::PerDevice).filter_map(|device| {
            let target = device.target.strip_suffix(&suffix)?;
            let same = |row: &&Row| row.name == device.name && row.target == target;
            Some(Beside::of(device, of(Topology::PerCore).find(same)?))
        });
        Verdict::over(count, &pairs.collect::<Vec<_>>())
    }

    fn over(members: u64, pairs: &[Beside]) -> Option<Verdict> {
        let cpu: Vec<f64> = pairs.iter().filter_map(|pair| pair.cpu).collect();
        let noise: f64 = pairs.iter().map(|pair| pair.noise).sum();
        Some(Verdict {
            members,
            rate: geometric_mean(pairs.iter().map(|pair| pair.rate))?,
            cpu: geometric_mean(cpu.into_iter()),
            noise: noise / pairs.len() as f64,
        })
    }

    fn choice(&self) -> Topology {
        let prefers_device = match self.is_tie() {
            true => self.cpu.is_some_and(|cpu| cpu < 1.0),
            false => self.rate > 1.0,
        };
        match prefers_device {
            true => Topology::PerDevice,
            false => Topology::PerCore,
        }
    }

    fn is_tie(&self) -> bool {
        self.rate.ln().abs() <= self.noise
    }

    fn text(&self) -> String {
        let devices = match self.members {
            1 => "1 device".to_owned(),
            more => format!("{more} devices"),
        };
        let cpu = self.cpu.map_or(String::new(), |cpu| {
            format!(" with {cpu:.2} times its processor time for each")
        });
        let tie = match self.is_tie() {
            true => format!(", within the noise of {:.0} %", 100.0 * self.noise),
            false => String::new(),
        };
        format!(
            "recommended with {devices}: topology={}; per-device has {:.2} times the transfers of per-core{cpu}{tie}",
            self.choice().name(),
            self.rate
        )
    }
}

impl Beside {
    fn of(device: &Row, core: &Row) -> Beside {
        let cpu = |row: &Row| row.extra.get("cpu_us_per_op").and_then(Value::as_f64);
        let spread = |row: &Row| (row.max - row.min) / row.median / 2.0;
        Beside {
            rate: device.median / core.median,
            cpu: cpu(device)
                .zip(cpu(core))
                .map(|(device, core)| device / core),
            noise: spread(device).max(spread(core)),
        }
    }
}

/// `None` of nothing, or of what is no quotient.
fn geometric_mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| {
        (sum + value.ln(), count + 1)
    });
    let mean = (sum / f64::from(count)).exp();
    (count > 0 && mean.is_finite()).then_some(mean)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Map;

    fn row(target: &str, topology: Topology, median: f64, spread: f64, cpu: f64) -> Row {
        let extra: Map<String, Value> = [
            ("members".to_owned(), Value::from(2)),
            ("topology".to_owned(), Value::from(topology.name())),
            ("cpu_us_per_op".to_owned(), Value::from(cpu)),
        ]
        .into_iter()
        .collect();
        Row {
            name: "random read".to_owned(),
            target: target.to_owned(),
            threads: 1,
            unit: "transfers/s",
            median,
            min: median - spread,
            max: median + spread,
            runs: 3,
            extra,
        }
    }

    fn choice(device: (f64, f64), core: (f64, f64), spread: f64) -> (Topology, String) {
        let mut rows = vec![
            row("sheaf-array", Topology::PerCore, core.0, spread, core.1),
            row(
                "sheaf-array-per-device",
                Topology::PerDevice,
                device.0,
                spread,
                device.1,
            ),
        ];
        let text = recommend(&mut rows).remove(0);
        let chosen = rows.iter().find(|row| row.extra["recommended"] == true);
        (topology(chosen.unwrap()).unwrap(), text)
    }

    #[test]
    fn the_faster_topology_is_recommended_whatever_it_costs() {
        let (device, text) = choice((150.0, 9.0), (100.0, 1.0), 2.0);
        assert_eq!(device, Topology::PerDevice);
        assert!(
            text.starts_with(
                "recommended with 2 devices: topology=per-device; per-device has 1.50"
            )
        );
        assert_eq!(choice((80.0, 1.0), (100.0, 9.0), 2.0).0, Topology::PerCore);
    }

    #[test]
    fn of_two_that_are_as_fast_the_cheaper_is_recommended() {
        let (device, text) = choice((98.0, 1.0), (100.0, 2.0), 5.0);
        assert_eq!(device, Topology::PerDevice);
        assert!(text.contains("within the noise"), "{text}");
        assert_eq!(choice((102.0, 3.0), (100.0, 2.0), 5.0).0, Topology::PerCore);
    }

    #[test]
    fn without_both_nothing_is_recommended() {
        let mut rows = vec![row("sheaf-array", Topology::PerCore, 1.0, 0.0, 1.0)];
        assert!(recommend(&mut rows).is_empty());
    }
}
