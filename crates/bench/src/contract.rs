//! What every suite reports: rows, the bars computed from them, and the machine. `--json`
//! prints one [`Report`].

use serde::Serialize;
use serde_json::{Map, Value};

/// One suite's results.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub suite: &'static str,
    pub version: &'static str,
    /// What the program was called with, for who measures it again; empty where it was no program.
    pub arguments: Vec<String>,
    pub machine: Machine,
    pub rows: Vec<Row>,
    pub checks: Vec<Check>,
    /// What a reader has to know besides, in sentences: how sides were made, who was left out and why.
    pub notes: Vec<String>,
}

/// Where it ran.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    pub cpu: String,
    /// CPUs that this process may use.
    pub cores: usize,
    pub kernel: String,
    /// Tasks that ran or wanted to: the mean of the minute before the suite began, and of its last minute, its own included.
    pub load_start: Option<f64>,
    pub load_end: Option<f64>,
}

/// The load average of the last minute.
pub fn load_average() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    text.split_whitespace().next()?.parse().ok()
}

/// One target's figures in one workload, over all runs.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub name: String,
    pub target: String,
    pub threads: usize,
    /// Of median, min and max.
    pub unit: &'static str,
    pub median: f64,
    pub min: f64,
    pub max: f64,
    pub runs: usize,
    /// What else there is to say; keys end with their unit where they have one.
    pub extra: Map<String, Value>,
}

/// The key of `extra` that has the rates, turn by turn.
const RATES: &str = "rates";

impl Row {
    /// Keeps the rates of all turns, so that [`quotients`](Row::quotients) finds them.
    pub fn note_rates(extra: &mut Map<String, Value>, rates: impl IntoIterator<Item = f64>) {
        extra.insert(RATES.to_owned(), rates.into_iter().collect());
    }

    fn rates(&self) -> Option<Vec<f64>> {
        let rates = self.extra.get(RATES)?.as_array()?;
        rates.iter().map(Value::as_f64).collect()
    }

    /// This row's rate divided by another's of the same report: the median, the least and the most of the turns, each side of a quotient in the
    /// same turn. A machine and a disk change from minute to minute by more than what two medians are compared for.
    pub fn quotients(&self, other: &Row) -> Spread {
        match (self.rates(), other.rates()) {
            (Some(own), Some(others)) if own.len() == others.len() => {
                let turns = own.iter().zip(&others);
                Spread::of(turns.map(|(own, other)| own / other))
            }
            _ => Spread::of([self.median / other.median]),
        }
    }

    /// A row of what this one's rate is of a floor's, with these of its other figures.
    pub fn beside_floor(&self, floor: &Row, keys: &[&str]) -> Row {
        let Spread { median, min, max } = self.quotients(floor);
        let kept = |key: &&str| Some((key.to_string(), self.extra.get(*key)?.clone()));
        Row {
            name: format!("{}, beside the floor", self.name),
            target: self.target.clone(),
            threads: self.threads,
            unit: "of the floor",
            median,
            min,
            max,
            runs: self.runs,
            extra: keys.iter().filter_map(kept).collect(),
        }
    }

    /// It compares others, or was not measured here: no throughput.
    pub fn is_quotient(&self) -> bool {
        self.unit.starts_with("of the ")
    }
}

/// A bar, and whether this run holds it.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    pub name: String,
    /// The median, where turns were judged one by one.
    pub value: f64,
    /// Of the turns, where there were several.
    #[serde(flatten)]
    pub turns: Option<Turns>,
    pub op: Comparison,
    pub bar: f64,
    pub ok: bool,
    /// Why it neither holds nor is missed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub doubt: Option<&'static str>,
}

/// What a check's value was in single turns.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Turns {
    pub min: f64,
    pub max: f64,
    /// The bar lies between them: another run may judge otherwise.
    pub undecided: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Comparison {
    #[serde(rename = ">=")]
    AtLeast,
    #[serde(rename = "<=")]
    AtMost,
}

impl Comparison {
    pub fn symbol(self) -> &'static str {
        match self {
            Comparison::AtLeast => ">=",
            Comparison::AtMost => "<=",
        }
    }
}

impl Check {
    /// A value that is no number, or has no end, does not hold any bar: a side that did nothing is none to be faster than.
    pub fn new(
        name: impl Into<String>,
        value: impl Into<Spread>,
        op: Comparison,
        bar: f64,
    ) -> Check {
        let Spread { median, min, max } = value.into();
        let value = median;
        let beside = match op {
            Comparison::AtLeast => value >= bar,
            Comparison::AtMost => value <= bar,
        };
        let ok = beside && value.is_finite();
        let turns = Turns {
            min,
            max,
            undecided: min < bar && bar < max,
        };
        Check {
            name: name.into(),
            value,
            turns: (min < max).then_some(turns),
            op,
            bar,
            ok,
            doubt: None,
        }
    }

    /// Of quantiles: one that is left out for want of samples is neither fast nor slow.
    pub fn of_samples(mut self) -> Check {
        if self.value.is_nan() {
            self.doubt = Some("too few samples");
        }
        self
    }

    /// It does not hold, whatever its value: that proves nothing.
    pub fn doubted(mut self, why: &'static str) -> Check {
        if self.ok {
            self.ok = false;
            self.doubt = Some(why);
        }
        self
    }
}

impl Check {
    /// For people.
    pub fn verdict(&self) -> String {
        let verdict = match self.doubt {
            Some(why) => why,
            None if self.ok => "holds",
            None => "missed",
        };
        match self.turns {
            Some(turns) if turns.undecided => format!("{verdict}, undecided"),
            _ => verdict.to_owned(),
        }
    }

    /// The value, and those of single turns, for people.
    pub fn figures(&self) -> String {
        match self.turns {
            Some(Turns { min, max, .. }) => format!("{:.2} ({min:.2} to {max:.2})", self.value),
            None => format!("{:.2}", self.value),
        }
    }
}

/// The middle and the ends of what the runs of one target measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

/// One value.
impl From<f64> for Spread {
    fn from(value: f64) -> Spread {
        Spread {
            median: value,
            min: value,
            max: value,
        }
    }
}

impl Spread {
    /// Of an even number of values the median is the mean of the middle two; of none all is 0.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Spread {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (Some(&min), Some(&max)) = (values.first(), values.last()) else {
            return Spread {
                median: 0.0,
                min: 0.0,
                max: 0.0,
            };
        };
        let middle = values.len() / 2;
        let median = match values.len() % 2 {
            1 => values[middle],
            _ => (values[middle - 1] + values[middle]) / 2.0,
        };
        Spread { median, min, max }
    }
}

impl Report {
    pub fn new(suite: &'static str, rows: Vec<Row>, checks: Vec<Check>) -> Report {
        Report {
            suite,
            version: env!("CARGO_PKG_VERSION"),
            arguments: Vec::new(),
            machine: Machine::here(),
            rows,
            checks,
            notes: Vec::new(),
        }
    }

    pub fn with_notes(mut self, notes: impl IntoIterator<Item = String>) -> Report {
        self.notes.extend(notes);
        self
    }

    /// The same, of a program that was called with these arguments when the load average was that.
    pub fn called(mut self, arguments: Vec<String>, load: Option<f64>) -> Report {
        self.arguments = arguments;
        self.machine.load_start = load;
        self
    }

    /// The one object that `--json` prints.
    pub fn json(&self) -> String {
        // Only keys that are not strings and failing writers make this an error.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }
}

impl Machine {
    /// What else it did, for people.
    pub fn load(&self) -> String {
        let load = |load: Option<f64>| load.map_or("?".to_owned(), |load| format!("{load:.1}"));
        let (start, end) = (load(self.load_start), load(self.load_end));
        format!("load average {start} at the start, {end} at the end")
    }

    /// The machine that this process runs on, at the end of a suite.
    pub fn here() -> Machine {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = info.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == "model name").then(|| value.trim().to_owned())
        });
        let name = rustix::system::uname();
        Machine {
            cpu: model.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cores: base::thread::cpu_count(),
            kernel: name.release().to_string_lossy().into_owned(),
            load_start: None,
            load_end: load_average(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(values: &[f64]) -> (f64, f64, f64) {
        let spread = Spread::of(values.iter().copied());
        (spread.median, spread.min, spread.max)
    }

    #[test]
    fn medians_of_odd_even_and_no_values() {
        assert_eq!(spread(&[3.0, 1.0, 2.0]), (2.0, 1.0, 3.0));
        assert_eq!(spread(&[4.0, 1.0, 2.0, 3.0]), (2.5, 1.0, 4.0));
        assert_eq!(spread(&[7.0]), (7.0, 7.0, 7.0));
        assert_eq!(spread(&[]), (0.0, 0.0, 0.0));
    }

    #[test]
    fn a_check_without_a_number_does_not_hold() {
        assert!(Check::new("a", 6.0, Comparison::AtLeast, 6.0).ok);
        assert!(!Check::new("a", 5.9, Comparison::AtLeast, 6.0).ok);
        assert!(Check::new("a", 1.0, Comparison::AtMost, 2.0).ok);
        assert!(!Check::new("a", f64::NAN, Comparison::AtLeast, 0.0).ok);
        assert!(!Check::new("a", f64::NAN, Comparison::AtMost, 0.0).ok);
        let sampled = Check::new("a", f64::NAN, Comparison::AtMost, 0.0).of_samples();
        assert!(!sampled.ok && sampled.verdict() == "too few samples");
        assert!(!Check::new("a", 1.0 / 0.0, Comparison::AtLeast, 6.0).ok);
        assert!(!Check::new("a", -1.0 / 0.0, Comparison::AtMost, 6.0).ok);
    }

    fn row(target: &str, rates: &[f64]) -> Row {
        let Spread { median, min, max } = Spread::of(rates.iter().copied());
        let mut extra = Map::new();
        Row::note_rates(&mut extra, rates.iter().copied());
        Row {
            name: "MWCL".to_owned(),
            target: target.to_owned(),
            threads: 1,
            unit: "ops/s",
            median,
            min,
            max,
            runs: rates.len(),
            extra,
        }
    }

    #[test]
    fn sides_are_compared_turn_by_turn() {
        let own = row("sheaf", &[950.0, 1880.0, 470.0]);
        let other = row("raw", &[1000.0, 2000.0, 500.0]);
        assert!((own.quotients(&other).median - 0.94).abs() < 1e-9);
        // A side that had fewer turns, by the medians.
        let other = row("raw", &[1000.0, 2000.0]);
        assert!((own.quotients(&other).median - 950.0 / 1500.0).abs() < 1e-9);
    }

    #[test]
    fn a_bar_between_the_turns_is_undecided_whatever_the_median_says() {
        let own = row("sheaf", &[950.0, 1880.0, 520.0]);
        let other = row("raw", &[1000.0, 2000.0, 500.0]);
        let judged = |bar| Check::new("a", own.quotients(&other), Comparison::AtLeast, bar);
        let check = judged(1.0);
        assert_eq!(check.verdict(), "missed, undecided");
        assert_eq!(check.figures(), "0.95 (0.94 to 1.04)");
        assert_eq!(judged(0.945).verdict(), "holds, undecided");
        assert_eq!(judged(0.9).verdict(), "holds");
        assert_eq!(judged(1.1).verdict(), "missed");
        let value = serde_json::to_value(&check).unwrap();
        assert_eq!(
            (&value["undecided"], &value["min"]),
            (&true.into(), &0.94.into())
        );
        // Without turns there is nothing to be undecided between.
        let check = Check::new("a", 0.95, Comparison::AtLeast, 1.0);
        assert_eq!(
            (check.verdict(), check.figures()),
            ("missed".into(), "0.95".into())
        );
    }

    #[test]
    fn json_has_the_shape_of_the_contract() {
        let mut extra = Map::new();
        extra.insert("pool".to_owned(), Value::from(1000));
        let row = Row {
            name: "MWCL".to_owned(),
            target: "sheaf".to_owned(),
            threads: 1,
            unit: "ops/s",
            median: 2.0,
            min: 1.0,
            max: 3.0,
            runs: 5,
            extra,
        };
        let check = Check::new("MWCL/1 vs best kernel", 7.0, Comparison::AtLeast, 6.0);
        let report = Report::new("fxmark", vec![row], vec![check]);
        let report = report.called(vec!["bench".to_owned()], Some(1.5));
        assert!(
            report
                .machine
                .load()
                .starts_with("load average 1.5 at the start")
        );
        let text = report.json();
        let value: Value = serde_json::from_str(&text).unwrap();
        let keys = |value: &Value| -> Vec<String> {
            let mut keys: Vec<String> = value.as_object().unwrap().keys().cloned().collect();
            keys.sort();
            keys
        };
        assert_eq!(
            keys(&value),
            [
                "arguments",
                "checks",
                "machine",
                "notes",
                "rows",
                "suite",
                "version"
            ]
        );
        assert_eq!(value["arguments"][0], "bench");
        let machine = ["cores", "cpu", "kernel", "load_end", "load_start"];
        assert_eq!(keys(&value["machine"]), machine);
        let row = &value["rows"][0];
        assert_eq!(
            keys(row),
            [
                "extra", "max", "median", "min", "name", "runs", "target", "threads", "unit"
            ]
        );
        assert_eq!(row["extra"]["pool"], 1000);
        let check = &value["checks"][0];
        assert_eq!(keys(check), ["bar", "name", "ok", "op", "value"]);
        assert_eq!(check["op"], ">=");
        assert_eq!(check["ok"], true);
    }
}
