//! Man pages and shell completions, from the same definitions as the help; what mount options mean, from the table of the README.

use std::fs;
use std::path::Path;

use clap::CommandFactory;

use crate::args::{Completions, Man, Sheaf, helpers};
use crate::failure::{Failure, Outcome};
use crate::output;

/// The helper name that is just another one of a command.
const ALIAS: (&str, &str) = ("mkfs.sheaf", "mkfs");

/// Where mount options are explained, once.
const README: &str = include_str!("../../../README.md");

/// Section 8 of the manual: sheaf(8), sheaf-mkfs(8) and so on, and the helper names.
pub fn man(args: &Man) -> Outcome {
    fs::create_dir_all(&args.dir).map_err(|e| Failure::io(args.dir.display(), &e))?;
    let mut sheaf = Sheaf::command();
    sheaf.build();
    pages(&args.dir, "sheaf", "sheaf", sheaf)?;
    let (alias, command) = ALIAS;
    let text = format!(".so man8/sheaf-{command}.8\n");
    write(&args.dir, alias, text.as_bytes())?;
    for helper in helpers::pages() {
        let name = helper.get_name().to_owned();
        page(&args.dir, &name, helper)?;
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
    if name == "sheaf-mount" {
        text.extend(mount_options().into_bytes());
    }
    write(dir, name, &text)
}

/// The table of mount options as a section of a page.
fn mount_options() -> String {
    let (_, below) = README
        .split_once("\n### Mount options\n")
        .unwrap_or_default();
    let rows = below.lines().skip_while(|line| !line.starts_with("|---"));
    let rows = rows.skip(1).take_while(|line| line.starts_with('|'));
    let mut section =
        String::from(".SH \"MOUNT OPTIONS\"\nFrom the README of Sheaf, which says more.\n");
    for row in rows {
        // A bar within a cell is written so.
        let row = row.replace("\\|", "\0");
        let cells = row.trim_matches('|').split('|');
        let cells: Vec<String> = cells.map(|cell| roff(&cell.replace('\0', "|"))).collect();
        if let [option, meaning, default] = &cells[..] {
            section += &format!(".TP\n{option}\n{meaning}.\nDefault: {default}.\n");
        }
    }
    section
}

/// Without what only leads elsewhere in the README or its documents: a link in parentheses, and words of what is below.
fn without_references(markdown: &str) -> String {
    let mut text = markdown.replace(" (see below)", "").replace(" (below)", "");
    while let Some(start) = text.find(" ([")
        && let Some(len) = text[start..].find("))")
    {
        text.replace_range(start..start + len + 2, "");
    }
    text
}

/// A line of the README in the language of man pages: code is bold, and of links the words are left.
fn roff(markdown: &str) -> String {
    let (mut text, mut is_code) = (String::new(), false);
    let markdown = without_references(markdown);
    let mut rest = markdown.trim();
    while let Some(character) = rest.chars().next() {
        rest = &rest[character.len_utf8()..];
        match character {
            '`' => {
                is_code = !is_code;
                text += if is_code { "\\fB" } else { "\\fR" };
            }
            '-' => text += "\\-",
            '\\' => text += "\\e",
            '[' => {}
            ']' if rest.starts_with('(') => {
                rest = rest.split_once(')').map_or("", |(_, after)| after)
            }
            other => text.push(other),
        }
    }
    // At the beginning of a line these would be commands.
    match text.starts_with(['.', '\'']) {
        true => format!("\\&{text}"),
        false => text,
    }
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

    /// They were those of `sheaf mount` and `sheaf fsck`, which have other options and other codes.
    #[test]
    fn helper_names_have_pages_of_their_own() {
        let dir = tempfile::tempdir().unwrap();
        man(&Man {
            dir: dir.path().to_owned(),
        })
        .unwrap();
        let page = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        let (mount, fsck) = (page("mount.sheaf.8"), page("fsck.sheaf.8"));
        assert!(
            mount.contains("Fake") && mount.contains("32 not mounted"),
            "{mount}"
        );
        assert!(
            fsck.contains("\\-\\-preen") || fsck.contains("--preen"),
            "{fsck}"
        );
        assert!(!fsck.contains(".so ") && !mount.contains(".so "));
        assert!(page("mkfs.sheaf.8").starts_with(".so "));
    }

    #[test]
    fn definitions_are_consistent() {
        Sheaf::command().debug_assert();
    }

    /// The manual named the options, and said nothing of what they do.
    #[test]
    fn the_manual_explains_mount_options() {
        let section = mount_options();
        assert!(section.contains(".TP\n\\fBcommit=SECONDS\\fR\nunsynced operations"));
        assert!(section.contains("\n\\fBio=auto|uring|threads\\fR\n"));
        assert!(section.contains("Default: \\fBsheaf\\fR.\n"), "{section}");
        assert!(section.matches(".TP\n").count() >= 19);
        assert!(!section.contains("](") && !section.contains('`'));
        // Words that were a link, and led nowhere.
        for dead in ["ranges)", "what is known", "what that means", "below)"] {
            assert!(!section.contains(dead), "{dead}");
        }
        assert_eq!(
            roff("`a-b` of [the text](docs/x.md#y) \\"),
            "\\fBa\\-b\\fR of the text \\e"
        );
        assert_eq!(roff(".x"), "\\&.x");
    }
}
