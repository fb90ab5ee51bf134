//! `sheaf-fuzz`: the fuzz targets without libFuzzer.

use clap::Parser;
use sim::fuzz::{self, Target};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Run fuzz targets over their corpora and seeded mutations of them
#[derive(Parser)]
#[command(name = "sheaf-fuzz")]
struct Cli {
    /// Seconds for mutations of each target's corpus
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Seed of the mutations
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only this target
    #[arg(long)]
    target: Option<String>,
    /// Run this one input
    #[arg(long, requires = "target")]
    input: Option<PathBuf>,
    /// The folder of corpora
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus"))]
    corpus: PathBuf,
}

fn execute(cli: &Cli) -> Result<bool, String> {
    let chosen = match &cli.target {
        None => Target::ALL.to_vec(),
        Some(name) => vec![Target::from_name(name).ok_or(format!("no target {name}"))?],
    };
    if let Some(path) = &cli.input {
        let input = std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
        chosen[0].check(&input);
        return Ok(true);
    }
    let mut good = true;
    for target in chosen {
        let corpus = fuzz::corpus(&cli.corpus, target)
            .map_err(|e| format!("corpus of {}: {e}", target.name()))?;
        let time = Duration::from_secs(cli.seconds);
        let outcome = fuzz::run(target, &corpus, cli.seed, time);
        let (inputs, mutations) = (outcome.inputs, outcome.mutations);
        println!(
            "{}: {inputs} inputs, {mutations} of them mutations",
            target.name()
        );
        if inputs == mutations && outcome.found.is_none() {
            return Err(format!("the corpus of {} is empty", target.name()));
        }
        if let Some(found) = outcome.found {
            good = false;
            let path = std::env::temp_dir().join(format!("sheaf-fuzz-{}", target.name()));
            std::fs::write(&path, &found.input).map_err(|e| format!("{}: {e}", path.display()))?;
            println!("{}: {}", target.name(), found.what);
            let (name, path) = (target.name(), path.display());
            println!("replay: sheaf-fuzz --target {name} --input {path}");
        }
    }
    Ok(good)
}

fn main() -> ExitCode {
    match execute(&Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(what) => {
            eprintln!("sheaf-fuzz: {what}");
            ExitCode::FAILURE
        }
    }
}
