//! `sheaf info --live` and `sheaf checkpoint`: what the daemon of a mount says and does while it serves.

use std::collections::BTreeMap;
use std::path::Path;

use base::clock::Clock;
use mount::Live;
use serde::Serialize;

use crate::args::Checkpoint;
use crate::failure::{Failure, Outcome};
use crate::users::Health;
use crate::{daemon, output, size};

/// One value as `--json` shows it. Names and units are those of the metrics that a mount serves.
#[derive(Debug, PartialEq, Serialize)]
struct Sample {
    name: String,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    labels: BTreeMap<String, String>,
    value: f64,
}

#[derive(Serialize)]
struct Shown {
    mountpoint: String,
    metrics: Vec<Sample>,
}

#[derive(Serialize)]
struct Done {
    mountpoint: String,
    /// Each checkpoint has the next number.
    checkpoint: u64,
    seconds: f64,
}

/// Shows what the daemon counted since the mount.
pub fn info(mountpoint: &Path, json: bool) -> Outcome {
    let text = Live::new(mountpoint)?.metrics()?;
    let metrics: Vec<Sample> = text.lines().filter_map(Sample::parse).collect();
    let mountpoint = mountpoint.display().to_string();
    match json {
        true => output::json(&Shown {
            mountpoint,
            metrics,
        })?,
        false => output::print(table(&metrics))?,
    }
    Ok(0)
}

/// Prints the number of the daemon's process, and then its metrics, for another call of this program, which does not wait longer than it likes and may have
/// ended when the answer comes.
pub fn answer(mountpoint: &Path) -> Outcome {
    daemon::detach()?;
    let live = Live::new(mountpoint)?;
    output::line(live.daemon()?)?;
    output::print(live.metrics()?)?;
    Ok(0)
}

/// What metrics say of errors since the mount; nothing if there are none.
pub fn health(metrics: &str) -> Option<Health> {
    let (mut failed, mut device_errors) = (None, BTreeMap::new());
    for sample in metrics.lines().filter_map(Sample::parse) {
        match sample.name.as_str() {
            "sheaf_failed" => failed = Some(sample.value != 0.0),
            "sheaf_device_errors_total" => {
                let device = sample.labels.get("device").cloned().unwrap_or_default();
                device_errors.insert(device, sample.value as u64);
            }
            _ => {}
        }
    }
    Some(Health {
        failed: failed?,
        device_errors,
    })
}

pub fn checkpoint(args: &Checkpoint) -> Outcome {
    let clock = Clock::real();
    let checkpoint = Live::new(&args.mountpoint)?.checkpoint();
    let checkpoint = checkpoint.map_err(|error| match &error {
        mount::Error::Ask { error, .. } if error.raw_os_error() == Some(libc::EROFS) => {
            Failure::new(format!(
                "{} is read-only, mounted so or since an error, which its log has: nothing is written to its devices",
                output::shown(&args.mountpoint)
            ))
        }
        _ => error.into(),
    })?;
    let seconds = clock.monotonic_ns() as f64 / 1e9;
    let mountpoint = args.mountpoint.display().to_string();
    match args.json {
        true => output::json(&Done {
            mountpoint,
            checkpoint,
            seconds,
        })?,
        false => output::line(format!(
            "{mountpoint}: checkpoint {checkpoint} in {}",
            time(seconds)
        ))?,
    }
    Ok(0)
}

impl Sample {
    /// A line of the text format of Prometheus; none for a comment.
    fn parse(line: &str) -> Option<Sample> {
        if line.starts_with('#') {
            return None;
        }
        let (what, value) = line.rsplit_once(' ')?;
        let value = value.parse().ok()?;
        let (name, labels) = match what.split_once('{') {
            Some((name, labels)) => (name, labels_of(labels.strip_suffix('}')?)?),
            None => (what, BTreeMap::new()),
        };
        let name = name.to_owned();
        Some(Sample {
            name,
            labels,
            value,
        })
    }

    /// The value with its unit, as people read it.
    fn text(&self) -> String {
        let unit_of = |unit: &str| self.name.contains(&format!("_{unit}"));
        match self.value {
            count if self.name.ends_with("_count") => format!("{count}"),
            bytes if unit_of("bytes") => size::text(bytes as u64),
            seconds if unit_of("seconds") => time(seconds),
            number => format!("{number}"),
        }
    }
}

/// One label, whose value may hold what is escaped in it.
fn labels_of(text: &str) -> Option<BTreeMap<String, String>> {
    let (label, quoted) = text.split_once('=')?;
    let value = quoted.strip_prefix('"')?.strip_suffix('"')?;
    let (mut plain, mut characters) = (String::new(), value.chars());
    while let Some(character) = characters.next() {
        plain.push(match character {
            '\\' => match characters.next()? {
                'n' => '\n',
                other => other,
            },
            other => other,
        });
    }
    Some(BTreeMap::from([(label.to_owned(), plain)]))
}

fn time(seconds: f64) -> String {
    match seconds {
        0.0 => "0 s".to_owned(),
        short if short < 1e-3 => format!("{:.1} µs", short * 1e6),
        medium if medium < 1.0 => format!("{:.1} ms", medium * 1e3),
        long => format!("{long:.1} s"),
    }
}

fn table(metrics: &[Sample]) -> String {
    let name = |sample: &Sample| {
        let name = sample.name.strip_prefix("sheaf_").unwrap_or(&sample.name);
        let labels = sample.labels.iter();
        let labels =
            labels.map(|(label, of)| format!(" {label}={}", output::harmless(of.as_bytes())));
        format!("{name}{}", labels.collect::<String>())
    };
    let names: Vec<String> = metrics.iter().map(name).collect();
    let width = names.iter().map(|name| name.chars().count()).max();
    let width = width.unwrap_or(0);
    let rows = names.iter().zip(metrics);
    rows.map(|(name, sample)| format!("{name:width$}  {}\n", sample.text()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_metrics_are_understood() {
        let text = "# HELP a_total What.\n# TYPE a_total counter\n\
            a_total{device=\"/dev/a b\\\"\\\\\"} 3\nsheaf_b_seconds{quantile=\"0.5\"} 0.00025\nsheaf_free_bytes 2097152\n";
        let samples: Vec<Sample> = text.lines().filter_map(Sample::parse).collect();
        assert_eq!(samples.len(), 3);
        assert_eq!(samples[0].labels["device"], "/dev/a b\"\\");
        let shown = table(&samples);
        let rows: Vec<&str> = shown.lines().collect();
        assert!(rows[0].starts_with("a_total device=") && rows[0].ends_with(" 3"));
        assert!(rows[1].starts_with("b_seconds quantile=0.5") && rows[1].ends_with("250.0 µs"));
        assert!(rows[2].ends_with("  2.0 MiB"), "{shown}");
        assert_eq!(Sample::parse("a_total{device=x} 3"), None);
        assert_eq!(Sample::parse("a_total"), None);
    }
}
