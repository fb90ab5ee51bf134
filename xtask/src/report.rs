//! What a suite found, and the summary at the end.

use std::time::Instant;

/// The tally of one suite.
pub struct Suite {
    pub name: String,
    pub passed: usize,
    pub failed: usize,
    pub excluded: usize,
    pub failures: Vec<String>,
    start: Instant,
    pub seconds: f64,
}

impl Suite {
    pub fn new(name: &str) -> Self {
        Suite {
            name: name.to_owned(),
            passed: 0,
            failed: 0,
            excluded: 0,
            failures: Vec::new(),
            start: Instant::now(),
            seconds: 0.0,
        }
    }

    /// Counts one test.
    pub fn check<E: std::fmt::Display>(&mut self, what: &str, result: Result<(), E>) {
        match result {
            Ok(()) => self.passed += 1,
            Err(error) => self.fail(format!("{what}: {error}")),
        }
    }

    pub fn fail(&mut self, message: String) {
        println!("  FAILED {}: {message}", self.name);
        self.failed += 1;
        self.failures.push(message);
    }

    pub fn exclude(&mut self, what: &str, reason: &str) {
        println!("  excluded {}: {what}: {reason}", self.name);
        self.excluded += 1;
    }

    pub fn finish(&mut self) {
        self.seconds = self.start.elapsed().as_secs_f64();
        println!("{}", self.line());
    }

    fn line(&self) -> String {
        format!(
            "{:12} {:5} passed {:4} failed {:4} excluded {:8.1} s",
            self.name, self.passed, self.failed, self.excluded, self.seconds
        )
    }
}

/// Prints every suite's line, the failures' first lines, and the totals. True when something passed and nothing failed.
pub fn summary(suites: &[Suite]) -> bool {
    println!("\nSummary");
    for suite in suites {
        println!("{}", suite.line());
    }
    for suite in suites {
        for failure in &suite.failures {
            let first = failure.lines().next().unwrap_or_default();
            println!("FAILED {}: {first}", suite.name);
        }
    }
    let passed: usize = suites.iter().map(|s| s.passed).sum();
    let failed: usize = suites.iter().map(|s| s.failed).sum();
    println!("{passed} passed, {failed} failed");
    if passed + failed == 0 {
        println!("FAILED: nothing was tested");
    }
    failed == 0 && passed > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_no_success() {
        assert!(!summary(&[]));
        let mut suite = Suite::new("a");
        suite.exclude("all", "not here");
        assert!(!summary(&[suite]));
        let mut suite = Suite::new("a");
        suite.check::<String>("one", Ok(()));
        assert!(summary(&[suite]));
        let mut suite = Suite::new("a");
        suite.check("one", Ok::<(), String>(()));
        suite.check("other", Err("wrong"));
        assert!(!summary(&[suite]));
    }
}
