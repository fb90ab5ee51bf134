//! Man pages and shell completions, from the same definitions as the help.

use std::fs;
use std::path::Path;

use clap::CommandFactory;

use crate::args::{Completions, Man, Sheaf};
use crate::failure::{Failure, Outcome};
use crate::output;

/// Helper names and the command that each one is.
const HELPERS: &[(&str, &str)] = &[
    ("mkfs.sheaf", "mkfs"),
    ("mount.sheaf", "mount"),
    ("fsck.sheaf", "fsck"),
];

/// Section 8 of the manual: sheaf(8), sheaf-mkfs(8) and so on, and the helper names.
pub fn man(args: &Man) -> Outcome {
    fs::create_dir_all(&args.dir).map_err(|e| Failure::io(args.dir.display(), &e))?;
    let mut sheaf = Sheaf::command();
    sheaf.build();
    pages(&args.dir, "sheaf", "sheaf", sheaf)?;
    for (helper, command) in HELPERS {
        let text = format!(".so man8/sheaf-{command}.8\n");
        write(&args.dir, helper, text.as_bytes())?;
    }
    Ok(0)
}

/// A page for a command, and one for each command below it, as sheaf-bench-fxmark(8).
fn pages(dir: &Path, name: &str, call: &str, command: clap::Command) -> Result<(), Failure> {
    for below in command.get_subcommands().filter(|c| !c.is_hide_set()) {
        let word = below.get_name();
        if word != "help" {
            let (name, call) = (format!("{name}-{word}"), format!("{call} {word}"));
            pages(dir, &name, &call, below.clone())?;
        }
    }
    let command = command.display_name(name.to_owned());
    page(dir, name, command.bin_name(call.to_owned()))
}

fn page(dir: &Path, name: &str, command: clap::Command) -> Result<(), Failure> {
    let mut text = Vec::new();
    clap_mangen::Man::new(command)
        .title(name.to_uppercase())
        .section("8")
        .manual("Sheaf")
        .render(&mut text)
        .map_err(|e| Failure::io(name, &e))?;
    write(dir, name, &text)
}

fn write(dir: &Path, name: &str, text: &[u8]) -> Result<(), Failure> {
    let path = dir.join(format!("{name}.8"));
    fs::write(&path, text).map_err(|e| Failure::io(path.display(), &e))
}

pub fn completions(args: &Completions) -> Outcome {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Sheaf::command(), "sheaf", &mut text);
    output::print(text)?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_are_consistent() {
        Sheaf::command().debug_assert();
    }
}
