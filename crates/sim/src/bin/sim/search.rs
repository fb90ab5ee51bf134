//! The commands that look for violations. Each prints what it found, and returns whether that is
//! nothing.

use crate::canary;
use base::canary::Canary;
use clap::Args;
use sim::aimed::{Plan, SCENARIOS, Scenario};
use sim::all::Extent;
use sim::explore::Seen;
use sim::run::{self, Budget, Search, Violation};
use sim::sequences;
use std::sync::Arc;

#[derive(Args)]
pub struct Limits {
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Number of the first sequence or seed
    #[arg(long, default_value_t = 0)]
    first: u64,
    #[arg(long, value_parser = canary)]
    canary: Option<Canary>,
}

#[derive(Args)]
pub struct Parallel {
    #[command(flatten)]
    limits: Limits,
    #[arg(long, default_value_t = 1)]
    workers: usize,
}

#[derive(Args)]
pub struct All {
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// Instead: every sequence of one and two operations, and so many seeds
    #[arg(long, value_name = "SEEDS", conflicts_with = "seconds")]
    complete: Option<u64>,
    #[arg(long, default_value_t = 2)]
    workers: usize,
    /// Seconds for each canary and mode; 0: no canaries
    #[arg(long, default_value_t = 20)]
    canary_seconds: u64,
    /// Number of the first sequence and seed
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct Aimed {
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Number of the first round, which decides on its randomness
    #[arg(long, default_value_t = 1)]
    round: u64,
    /// Nothing but this scenario
    #[arg(long, value_name = "SCENARIO", value_parser = scenario)]
    only: Option<&'static Scenario>,
    /// Tell how long each scenario takes
    #[arg(long)]
    verbose: bool,
    #[arg(long, value_parser = canary)]
    canary: Option<Canary>,
}

/// A scenario by its name on command lines.
fn scenario(name: &str) -> Result<&'static Scenario, String> {
    let names = || -> Vec<&str> { SCENARIOS.iter().map(|s| s.name).collect() };
    Scenario::from_name(name).ok_or_else(|| format!("there are: {}", names().join(" ")))
}

#[derive(Args)]
pub struct Canaries {
    /// For each canary and mode
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    #[arg(long, default_value_t = 2)]
    workers: usize,
    /// Only these; all when none is named
    #[arg(value_parser = canary)]
    names: Vec<Canary>,
}

pub fn exhaustive(args: &Parallel) -> Result<bool, String> {
    let search = args.search(5);
    let found = search.exhaustive(
        &sequences::Plan::new(sim::all::PLAN_SEED),
        args.limits.first as usize,
    )?;
    eprintln!();
    report(&search, "sequences", found.runs, &found.violations)
}

pub fn random(args: &Parallel) -> Result<bool, String> {
    let search = args.search(3);
    let found = search.random(args.limits.first);
    eprintln!();
    report(&search, "seeds", found.runs, &found.violations)
}

pub fn threads(args: &Limits) -> Result<bool, String> {
    let search = args.search(1, 1);
    let found = search.threads(args.first);
    report(&search, "seeds", found.runs, &found.violations)
}

pub fn aimed(args: &Aimed) -> bool {
    let seen = Arc::new(Seen::default());
    let plan = Plan {
        only: args.only,
        verbose: args.verbose,
        canary: args.canary,
    };
    let budget = Budget::seconds(args.seconds);
    let (rounds, found) = run::aimed(&budget, &seen, &plan, args.round);
    if let Some(violation) = &found {
        println!("{violation}");
    }
    println!("{rounds} rounds, {} states", seen.states());
    found.is_none()
}

pub fn canaries(args: &Canaries) -> Result<bool, String> {
    let chosen = match args.names.is_empty() {
        true => Canary::ALL,
        false => &args.names,
    };
    let verdicts = sim::canaries::hunt(chosen, args.workers, args.seconds)?;
    let survived = verdicts.iter().filter(|v| v.caught.is_none());
    let survived: Vec<&str> = survived.map(|v| v.canary.name()).collect();
    println!(
        "{} planted, {} caught; survived: {survived:?}",
        verdicts.len(),
        verdicts.len() - survived.len()
    );
    Ok(survived.is_empty())
}

pub fn all(args: &All) -> Result<bool, String> {
    let extent = match args.complete {
        Some(seeds) => Extent::Complete { seeds },
        None => Extent::Seconds(args.seconds),
    };
    let whole = sim::all::run(extent, args.workers, args.canary_seconds, args.first)?;
    for violation in &whole.violations {
        eprintln!("{violation}");
    }
    match args.json {
        true => println!("{}", whole.json()),
        false => println!("{whole}"),
    }
    Ok(whole.is_good())
}

impl Limits {
    /// A search that ends a worker after `most` violations.
    fn search(&self, workers: usize, most: usize) -> Search {
        Search {
            workers,
            budget: Budget::seconds(self.seconds),
            seen: Arc::default(),
            most,
            canary: self.canary,
        }
    }
}

impl Parallel {
    fn search(&self, most: usize) -> Search {
        self.limits.search(self.workers, most)
    }
}

fn report(
    search: &Search,
    what: &str,
    runs: u64,
    violations: &[Violation],
) -> Result<bool, String> {
    for violation in violations {
        println!("{violation}");
    }
    println!(
        "{runs} {what}, {} states, {} violations in {} s",
        search.seen.states(),
        violations.len(),
        search.budget.spent()
    );
    match runs == 0 && violations.is_empty() {
        true => Err("nothing was run".to_owned()),
        false => Ok(violations.is_empty()),
    }
}
