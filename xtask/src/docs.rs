//! Writes the generated parts of `docs/format.md`: its version, and the byte tables of every on-disk structure.

use std::fmt::Write as _;

use crate::{Fallible, process};

const BEGIN: &str = "<!-- byte tables: written by `cargo xtask docs` -->";
const END: &str = "<!-- end of byte tables -->";

/// Brings `docs/format.md` up to date, or with `check` fails when it is not.
pub fn run(check: bool) -> Fallible<()> {
    let path = process::source_dir().join("docs/format.md");
    let old = std::fs::read_to_string(&path).map_err(|e| format!("docs/format.md: {e}"))?;
    let new = with_version(&replace(&old, &tables())?);
    if old == new {
        return Ok(());
    }
    if check {
        return Err(
            "docs/format.md does not match the structures in crates/format: run `cargo xtask docs`"
                .to_owned(),
        );
    }
    std::fs::write(&path, new).map_err(|e| format!("docs/format.md: {e}"))
}

/// `text` with the format's version in its title.
fn with_version(text: &str) -> String {
    let rest = text.split_once('\n').map_or("", |(_, rest)| rest);
    format!(
        "# The disk format, version {}\n{rest}",
        format::FORMAT_VERSION
    )
}

/// `text` with everything between the two marks replaced.
fn replace(text: &str, tables: &str) -> Fallible<String> {
    let missing = || format!("docs/format.md lacks the line {BEGIN} or {END}");
    let (before, rest) = text.split_once(BEGIN).ok_or_else(missing)?;
    let (_, after) = rest.split_once(END).ok_or_else(missing)?;
    Ok(format!("{before}{BEGIN}\n\n{tables}{END}{after}"))
}

fn tables() -> String {
    let mut out = String::new();
    for table in format::tables() {
        let _ = writeln!(
            out,
            "### {} ({} bytes)\n\n{}\n",
            table.name,
            table.size,
            prose(table.doc)
        );
        out.push_str("| offset | size | type | field | meaning |\n|---:|---:|---|---|---|\n");
        for field in table.fields {
            let ty = field.ty.replace(' ', "");
            let _ = writeln!(
                out,
                "| {} | {} | `{ty}` | `{}` | {} |",
                field.offset,
                field.size,
                field.name,
                prose(field.doc).replace('|', "\\|").replace('\n', " ")
            );
        }
        out.push('\n');
    }
    out.push_str(PACKED);
    for table in format::packed_tables() {
        let _ = writeln!(out, "### {} (packed)\n\n{}\n", table.name, prose(table.doc));
        out.push_str("| type | field | meaning |\n|---|---|---|\n");
        for field in table.fields {
            let doc = prose(field.doc).replace('|', "\\|").replace('\n', " ");
            let _ = writeln!(out, "| {} | `{}` | {doc} |", field.form, field.name);
        }
        out.push('\n');
    }
    out
}

const PACKED: &str = "\
## Packed structures

Their fields follow each other without gaps. A *number* has seven bits in each byte, the lowest first; all bytes
but the last have their highest bit set. A *time* is one 64-bit word, seconds since 1970 above 30 bits of nanoseconds, if it is
one from 1970 to 2514; else that word has all bits set, and a `Time` follows. Only the shortest form is read. A number n with a
sign is the number 2n, or -2n - 1 if it is below 0.

";

/// A doc comment as text: the space after `///` and empty ends removed.
fn prose(doc: &str) -> String {
    doc.lines()
        .map(str::trim)
        .collect::<Vec<_>>()
        .join("\n")
        .trim()
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replacing_twice_changes_nothing() {
        let text = format!("intro\n{BEGIN}\nold\n{END}\noutro\n");
        let once = replace(&text, "new\n\n").unwrap();
        assert_eq!(replace(&once, "new\n\n").unwrap(), once);
        assert!(once.starts_with("intro\n") && once.ends_with("outro\n"));
    }

    #[test]
    fn a_document_without_marks_is_refused() {
        assert!(replace("text", "tables").is_err());
    }
}
