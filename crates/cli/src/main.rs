//! The `sheaf` program: makes, mounts, checks and reads Sheaf file systems.
//!
//! One module per command; [`args`] holds all definitions of commands and options, from
//! which help, man pages and completions come. Deliberately absent: any knowledge of how a
//! file system works.

mod args;
mod arrival;
mod bench_command;
mod cat;
mod cp;
mod daemon;
mod demo;
mod devices;
mod documents;
mod failure;
mod fsck;
mod helper;
mod info;
mod label;
mod live;
mod logging;
mod ls;
mod mkfs;
mod mount_command;
mod offline;
mod output;
mod progress;
mod relabel;
mod rm;
mod scrub;
mod size;
mod spared;
mod state;
mod torture;
mod trim;
mod umount;
mod users;

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use args::{Command, Sheaf};
use clap::Parser;
use failure::{Failed, Failure, Outcome, USAGE};

#[global_allocator]
static HEAP: heap::Heap = heap::Heap;

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    // Else an image file that may not grow ends it, without a word and with what was begun left there.
    if let Err(error) = base::sys::survive_file_size_limit() {
        output::tell(format!(
            "sheaf: a limit on the size of files would end it: {error}"
        ));
    }
    let name = helper::called_as(&arguments);
    let code = called(arguments);
    ExitCode::from(helper::exit_code(&name, code))
}

fn called(arguments: Vec<OsString>) -> u8 {
    let json = wants_json(&arguments);
    let arguments = match helper::translate(arguments) {
        Ok(arguments) => arguments,
        Err(failure) => return report(&failure, json),
    };
    let sheaf = match Sheaf::try_parse_from(&arguments) {
        Ok(sheaf) => sheaf,
        Err(error) => return refuse_usage(&error, json),
    };
    match run(sheaf) {
        Ok(code) => code,
        Err(failure) => report(&failure, json),
    }
}

/// Whether `--json` is among the options.
fn wants_json(arguments: &[OsString]) -> bool {
    let mut options = arguments.iter().take_while(|argument| *argument != "--");
    options.any(|argument| argument == "--json")
}

/// Each command's exit code, or why it failed.
fn run(sheaf: Sheaf) -> Outcome {
    match sheaf.command {
        Command::Mkfs(args) => mkfs::run(&args),
        Command::Mount(args) => mount_command::run(&args),
        Command::Umount(args) => umount::run(&args),
        Command::Fsck(args) => fsck::run(&args),
        Command::Info(args) => info::run(&args),
        Command::Label(args) => label::run(&args),
        Command::Ls(args) => ls::run(&args),
        Command::Cat(args) => cat::run(&args),
        Command::Cp(args) => cp::run(&args),
        Command::Rm(args) => rm::run(&args),
        Command::Trim(args) => trim::run(&args),
        Command::Checkpoint(args) => live::checkpoint(&args),
        Command::Scrub(args) => scrub::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Torture(args) => torture::run(&args),
        Command::Bench(args) => bench_command::run(&args),
        Command::Man(args) => documents::man(&args),
        Command::Completions(args) => documents::completions(&args),
    }
}

/// Help and version go to standard output and are a success; the rest is a usage error.
fn refuse_usage(error: &clap::Error, json: bool) -> u8 {
    let printed = error.print().and_then(|()| io::stdout().flush());
    if !error.use_stderr() {
        // A closed pipe is no reason to complain.
        return printed.map_or_else(|e| report(&output::failed(&e), json), |()| 0);
    }
    if json {
        let text = error.to_string();
        // What follows is how to call it.
        let what = text.split("\n\nUsage:").next().unwrap_or(&text);
        show_failure(&Failed {
            error: what.strip_prefix("error: ").unwrap_or(what).trim(),
            exit_code: USAGE,
        });
    }
    USAGE
}

fn report(failure: &Failure, json: bool) -> u8 {
    failure.tell();
    if let (true, Some(failed)) = (json, failure.shown()) {
        show_failure(&failed);
    }
    failure.code()
}

fn show_failure(failed: &Failed<'_>) {
    // Nobody reads it: the exit code tells.
    let _ = output::json_line(failed);
}
