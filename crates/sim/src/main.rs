//! `sheaf-sim`: crashes the file system in simulation, and says what that found.

use base::canary::Canary;
use clap::{Parser, Subcommand};
use sim::all::{self, Extent};
use sim::canaries;
use sim::explore::Seen;
use sim::run::{self, Budget};
use sim::sequences::Plan;
use sim::threads;
use std::process::ExitCode;
use std::sync::Arc;

#[derive(Parser)]
#[command(name = "sheaf-sim", about = "Crashes the file system in simulation")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Every short sequence of operations, cut at every I/O
    Exhaustive {
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        #[arg(long, default_value_t = 1)]
        workers: usize,
        /// Number of the first sequence
        #[arg(long, default_value_t = 0)]
        first: usize,
        #[arg(long)]
        canary: Option<String>,
    },
    /// Long random runs, with faults
    Random {
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        #[arg(long, default_value_t = 1)]
        workers: usize,
        #[arg(long, default_value_t = 0)]
        first: u64,
        #[arg(long)]
        canary: Option<String>,
    },
    /// Every mode in turn, and the canaries: the whole answer to whether crashes are safe
    All {
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
    },
    /// Scenarios that aim at one mechanism each
    Aimed {
        #[arg(long, default_value_t = 10)]
        seconds: u64,
        #[arg(long)]
        canary: Option<String>,
    },
    /// Plants each canary and searches for it
    Canaries {
        /// For each canary and mode
        #[arg(long, default_value_t = 20)]
        seconds: u64,
        #[arg(long, default_value_t = 2)]
        workers: usize,
        /// Only these; all when none is named
        names: Vec<String>,
    },
    /// Several threads at once, in an order that each seed decides
    Threads {
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        #[arg(long, default_value_t = 0)]
        first: u64,
        #[arg(long)]
        canary: Option<String>,
    },
    /// Runs what went wrong again
    Replay {
        #[command(subcommand)]
        what: Replay,
        #[arg(long, global = true)]
        canary: Option<String>,
    },
}

#[derive(Subcommand)]
enum Replay {
    /// A sequence of the exhaustive mode
    Sequence { number: usize },
    /// A seed of the threaded mode
    Threads {
        seed: u64,
        #[arg(long, default_value_t = 3)]
        tasks: usize,
        #[arg(long, default_value_t = 4)]
        cycles: u64,
        #[arg(long, default_value_t = 400)]
        steps: u64,
    },
    /// A seed of the random mode
    Random {
        seed: u64,
        /// Run these steps instead of the seed's own; separated by semicolons
        #[arg(long)]
        steps: Option<String>,
        /// Print the steps
        #[arg(long)]
        verbose: bool,
    },
}

fn canary(name: Option<String>) -> Result<Option<Canary>, String> {
    let find = |name: String| Canary::from_name(&name).ok_or_else(|| format!("no canary {name}"));
    name.map(find).transpose()
}

fn execute(command: Command) -> Result<bool, String> {
    match command {
        Command::Exhaustive {
            seconds,
            workers,
            first,
            canary: name,
        } => {
            let seen = Arc::new(Seen::default());
            let budget = Budget::seconds(seconds);
            let plan = Plan::new(all::PLAN_SEED);
            let planted = canary(name)?;
            let done = run::exhaustive(&plan, first, workers, &budget, &seen, 5, planted)?;
            eprintln!();
            for violation in &done.violations {
                println!("{}\n{}", violation.replay, violation.failure);
            }
            println!(
                "{} sequences, {} states, {} violations in {} s",
                done.sequences,
                seen.states(),
                done.violations.len(),
                budget.spent()
            );
            Ok(done.violations.is_empty())
        }
        Command::Random {
            seconds,
            workers,
            first,
            canary: name,
        } => {
            let seen = Arc::new(Seen::default());
            let budget = Budget::seconds(seconds);
            let planted = canary(name)?;
            let done = run::random(first, workers, &budget, &seen, 3, planted);
            eprintln!();
            for violation in &done.violations {
                println!("{}\n{}", violation.replay, violation.failure);
            }
            println!(
                "{} seeds, {} states, {} violations in {} s",
                done.seeds,
                seen.states(),
                done.violations.len(),
                budget.spent()
            );
            Ok(done.violations.is_empty())
        }
        Command::All {
            seconds,
            complete,
            workers,
            canary_seconds,
            first,
            json,
        } => {
            let extent = match complete {
                Some(seeds) => Extent::Complete { seeds },
                None => Extent::Seconds(seconds),
            };
            let whole = all::run(extent, workers, canary_seconds, first)?;
            for violation in &whole.violations {
                eprintln!("{}\n{}", violation.replay, violation.failure);
            }
            match json {
                true => println!("{}", whole.json()),
                false => println!("{whole}"),
            }
            Ok(whole.is_good())
        }
        Command::Aimed {
            seconds,
            canary: name,
        } => {
            let seen = Arc::new(Seen::default());
            let (rounds, found) = run::aimed(&Budget::seconds(seconds), &seen, canary(name)?);
            if let Some(failure) = &found {
                println!("cargo run -p sheaf-sim -- aimed\n{failure}");
            }
            println!("{rounds} rounds, {} states", seen.states());
            Ok(found.is_none())
        }
        Command::Canaries {
            seconds,
            workers,
            names,
        } => {
            let named = names.into_iter().map(|name| canary(Some(name)));
            let named: Vec<Option<Canary>> = named.collect::<Result<_, String>>()?;
            let mut chosen: Vec<Canary> = named.into_iter().flatten().collect();
            if chosen.is_empty() {
                chosen = Canary::ALL.to_vec();
            }
            let verdicts = canaries::hunt(&chosen, workers, seconds)?;
            let survived = verdicts.iter().filter(|v| v.caught.is_none());
            let survived: Vec<&str> = survived.map(|v| v.canary.name()).collect();
            println!(
                "{} planted, {} caught; survived: {survived:?}",
                verdicts.len(),
                verdicts.len() - survived.len()
            );
            Ok(survived.is_empty())
        }
        Command::Threads {
            seconds,
            first,
            canary: name,
        } => {
            let seen = Arc::new(Seen::default());
            let budget = Budget::seconds(seconds);
            let done = run::threads(first, &budget, &seen, 1, canary(name)?);
            for violation in &done.violations {
                println!("{}\n{}", violation.replay, violation.failure);
            }
            println!(
                "{} seeds, {} states, {} violations in {} s",
                done.seeds,
                seen.states(),
                done.violations.len(),
                budget.spent()
            );
            Ok(done.violations.is_empty())
        }
        Command::Replay {
            what:
                Replay::Threads {
                    seed,
                    tasks,
                    cycles,
                    steps,
                },
            canary: name,
        } => {
            base::canary::plant(canary(name)?);
            let plan = threads::Plan {
                seed,
                tasks,
                cycles,
                steps,
            };
            match threads::run(&plan, true) {
                Ok(outcome) => println!("nothing wrong: {outcome:?}"),
                Err(failure) => {
                    println!("{failure}");
                    return Ok(false);
                }
            }
            Ok(true)
        }
        Command::Replay {
            what:
                Replay::Random {
                    seed,
                    steps,
                    verbose,
                },
            canary: name,
        } => {
            let ran = run::replay_random(seed, steps.as_deref(), canary(name)?)?;
            if verbose {
                ran.steps.iter().for_each(|step| println!("  {step}"));
            }
            println!("{} steps, trace {:016x}", ran.steps.len(), ran.trace);
            if let Some(failure) = &ran.failure {
                println!("{failure}");
            }
            Ok(ran.failure.is_none())
        }
        Command::Replay {
            what: Replay::Sequence { number },
            canary: name,
        } => {
            let planted = canary(name)?;
            let plan = Plan::new(all::PLAN_SEED);
            for op in plan.sequence(number) {
                println!("  {op}");
            }
            match run::replay_sequence(&plan, number, planted) {
                Ok(()) => {
                    println!("nothing wrong");
                    Ok(true)
                }
                Err(failure) => {
                    println!("{failure}");
                    Ok(false)
                }
            }
        }
    }
}

fn main() -> ExitCode {
    match execute(Cli::parse().command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(what) => {
            eprintln!("sheaf-sim: {what}");
            ExitCode::FAILURE
        }
    }
}
