//! The commands that run one sequence or seed again. Each prints what happened, and returns
//! whether nothing went wrong.

use crate::canary;
use base::canary::Canary;
use clap::{Args, Subcommand};
use sim::sequences::Plan;
use sim::{run, threads};

#[derive(Args)]
pub struct Replay {
    #[command(subcommand)]
    what: What,
    #[arg(long, global = true, value_parser = canary)]
    canary: Option<Canary>,
}

#[derive(Subcommand)]
enum What {
    /// A sequence of the exhaustive mode
    Sequence { number: usize },
    /// A seed of the threaded mode
    Threads(Threads),
    /// A seed of the random mode
    Random(Random),
}

#[derive(Args)]
struct Threads {
    seed: u64,
    #[arg(long, default_value_t = 3)]
    tasks: usize,
    #[arg(long, default_value_t = 4)]
    cycles: u64,
    #[arg(long, default_value_t = 400)]
    steps: u64,
}

#[derive(Args)]
struct Random {
    seed: u64,
    /// Run these steps instead of the seed's own; separated by semicolons
    #[arg(long)]
    steps: Option<String>,
    /// Print the steps
    #[arg(long)]
    verbose: bool,
}

pub fn run(args: &Replay) -> Result<bool, String> {
    match &args.what {
        What::Sequence { number } => Ok(sequence(*number, args.canary)),
        What::Threads(seed) => Ok(threaded(seed, args.canary)),
        What::Random(seed) => random(seed, args.canary),
    }
}

fn sequence(number: usize, canary: Option<Canary>) -> bool {
    let plan = Plan::new(sim::all::PLAN_SEED);
    for op in plan.sequence(number) {
        println!("  {op}");
    }
    let outcome = run::replay_sequence(&plan, number, canary);
    match &outcome {
        Ok(()) => println!("nothing wrong"),
        Err(failure) => println!("{failure}"),
    }
    outcome.is_ok()
}

fn threaded(args: &Threads, canary: Option<Canary>) -> bool {
    base::canary::plant(canary);
    let plan = threads::Plan {
        seed: args.seed,
        tasks: args.tasks,
        cycles: args.cycles,
        steps: args.steps,
    };
    let outcome = threads::run(&plan, true);
    match &outcome {
        Ok(outcome) => println!("nothing wrong: {outcome:?}"),
        Err(failure) => println!("{failure}"),
    }
    outcome.is_ok()
}

fn random(args: &Random, canary: Option<Canary>) -> Result<bool, String> {
    let ran = run::replay_random(args.seed, args.steps.as_deref(), canary)?;
    if args.verbose {
        ran.steps.iter().for_each(|step| println!("  {step}"));
    }
    println!("{} steps, trace {:016x}", ran.steps.len(), ran.trace);
    if let Some(failure) = &ran.failure {
        println!("{failure}");
    }
    Ok(ran.failure.is_none())
}
