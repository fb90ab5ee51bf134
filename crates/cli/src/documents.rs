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
    page(&args.dir, "sheaf", sheaf.clone())?;
    for command in sheaf.get_subcommands().filter(|c| !c.is_hide_set()) {
        if command.get_name() == "help" {
            continue;
        }
        let name = format!("sheaf-{}", command.get_name());
        let call = format!("sheaf {}", command.get_name());
        let command = command.clone().display_name(&name).bin_name(call);
        page(&args.dir, &name, command)?;
    }
    for (helper, command) in HELPERS {
        let text = format!(".so man8/sheaf-{command}.8\n");
        write(&args.dir, helper, text.as_bytes())?;
    }
    Ok(0)
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
