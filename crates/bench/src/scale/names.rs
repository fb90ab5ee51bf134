//! What a line or a lock is called in the list of work: the rank of a lock, the type of what is
//! counted, else the field that the code names where it was used.

use std::path::Path;

use base::trace::{Event, Kind};

/// Where something was touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Site {
    name: &'static str,
    /// 0: `name` is no file.
    line: u32,
    lock: bool,
}

impl Site {
    pub fn of(event: &Event) -> Site {
        Site {
            name: event.name,
            line: match event.kind {
                Kind::Born => 0,
                _ => event.line,
            },
            lock: matches!(
                event.kind,
                Kind::LockExclusive | Kind::LockShared | Kind::LockEntered
            ),
        }
    }

    pub fn name(&self) -> String {
        let what = match (self.line, self.lock) {
            (0, true) => return format!("lock: {}", self.name),
            (0, false) if self.name.contains('<') || self.name.contains("::") => {
                return format!("references: {}", counted(self.name));
            }
            (0, false) => return self.name.to_owned(),
            (_, true) => "lock: ",
            (_, false) => "",
        };
        let file = self.name.replace("crates/", "").replace("/src/", "/");
        match source_line(self.name, self.line).as_deref().and_then(field) {
            Some(field) => format!("{what}{file}: {field}"),
            None => format!("{what}{file}:{}", self.line),
        }
    }
}

/// A type's name without the paths; of a node's cell that alone.
fn counted(name: &str) -> String {
    if name.contains("node::State<") {
        return "node".to_owned();
    }
    let last = name.split('<').next().unwrap_or(name);
    last.rsplit("::").next().unwrap_or(last).to_owned()
}

/// A build that records is made from a checkout; where that is gone, names are line numbers.
fn source_line(file: &str, line: u32) -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2)?;
    let text = std::fs::read_to_string(root.join(file)).ok()?;
    let before = text.lines().take(line as usize);
    // A chain of calls may have begun on an earlier line.
    let last: Vec<&str> = before.collect();
    let from = last.len().saturating_sub(3);
    Some(last[from..].iter().map(|line| line.trim()).collect())
}

/// The name before the last call of a lock's or an atomic's method.
fn field(code: &str) -> Option<String> {
    const CALLS: [&str; 12] = [
        ".fetch_",
        ".load(",
        ".store(",
        ".swap(",
        ".compare_",
        ".lock(",
        ".try_lock(",
        ".read(",
        ".write(",
        ".try_read(",
        ".try_write(",
        ".with_borrow",
    ];
    let end = CALLS.iter().filter_map(|call| code.rfind(call)).max()?;
    let mut name = code[..end].trim_end();
    // An index, or a call's arguments, belongs to the name before it.
    while let Some(close) = name.chars().last().filter(|c| matches!(c, ')' | ']')) {
        let open = if close == ')' { '(' } else { '[' };
        name = &name[..name.rfind(open)?];
    }
    let begin = name
        .rfind(|c: char| !(c.is_alphanumeric() || c == '_'))
        .map_or(0, |at| at + 1);
    let name = &name[begin..];
    (!name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_before_the_call() {
        let found = |code| field(code).unwrap_or_default();
        assert_eq!(
            found("self.floor.fetch_max(ns, Ordering::Relaxed)"),
            "floor"
        );
        assert_eq!(
            found("pins.of(epoch).fetch_add(1, Ordering::SeqCst);"),
            "of"
        );
        assert_eq!(found("self.words[w].fetch_or(1 << bit, AcqRel)"), "words");
        assert_eq!(
            found("let x = self.outstanding.fetch_add(a)"),
            "outstanding"
        );
        assert_eq!(found("nothing here"), "");
    }

    #[test]
    fn types_are_named_without_their_paths() {
        assert_eq!(counted("fs::data::Files"), "Files");
        assert_eq!(
            counted("base::sync::RwLock<engine::node::State<fs::FsNode>, engine::node::H>"),
            "node"
        );
    }
}
