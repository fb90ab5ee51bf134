//! Writing to standard output and standard error, which may be pipes that their readers close; names in what is written.

use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use serde::Serialize;

use crate::failure::{Failure, Outcome};

/// An output error as a failure; a closed pipe ends the program without a word.
pub fn failed(error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::silent(0),
        _ => Failure::io("standard output", error),
    }
}

/// As `told`; but to who goes on whether or not anybody reads it, a closed pipe is no failure.
pub fn unheard(told: Result<(), Failure>) -> Result<(), Failure> {
    match told {
        Err(failure) if failure.message().is_none() => Ok(()),
        told => told,
    }
}

/// The end of a command whose exit code is its result, once it has told it in words: a reader that has gone changes no
/// verdict, and with another output error it is the one for `untold`.
pub fn verdict(told: Result<(), Failure>, code: u8, untold: u8) -> Outcome {
    match unheard(told) {
        Ok(()) => Ok(code),
        Err(failure) => Err(failure.with_code(untold)),
    }
}

/// Why it was not heard, for the log.
pub fn why(unheard: &Failure) -> &str {
    unheard.message().unwrap_or("the reader has gone")
}

/// Prints text as it is.
pub fn print(text: impl AsRef<[u8]>) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_ref())
        .and_then(|()| out.flush())
        .map_err(|e| failed(&e))
}

/// Prints a line.
pub fn line(text: impl std::fmt::Display) -> Result<(), Failure> {
    print(format!("{text}\n"))
}

/// Prints one JSON value.
pub fn json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Failure::new(e.to_string()))?;
    line(text)
}

/// The same on one line, as a failure is shown wherever it is: some commands print a value on each.
pub fn json_line(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(value).map_err(|e| Failure::new(e.to_string()))?;
    line(text)
}

/// Tells the user a line on standard error. Whether or not anybody reads it, the command goes on.
pub fn tell(text: impl std::fmt::Display) {
    // There is nobody left to tell of a failure.
    let _ = io::stderr()
        .lock()
        .write_all(format!("{text}\n").as_bytes());
}

/// A name as text that cannot change a terminal's state, is of one line, and is no other name's: control characters,
/// backslashes and what is not UTF-8 are escaped.
pub fn harmless(name: &[u8]) -> String {
    let mut text = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character == '\\' || character.is_control() {
                true => text.extend(character.escape_debug()),
                false => text.push(character),
            }
        }
        text.extend(chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}")));
    }
    text
}

/// The same of a path of the host.
pub fn shown(path: &Path) -> String {
    harmless(path.as_os_str().as_bytes())
}

/// The same of words in which names may be, harmless already or not.
pub fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for character in text.chars() {
        match character.is_control() {
            true => line.extend(character.escape_debug()),
            false => line.push(character),
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_harmless_and_no_two_look_the_same() {
        let names: [(&[u8], &str); 7] = [
            (b"plain", "plain"),
            (b"a\nb", "a\\nb"),
            (b"a\\nb", "a\\\\nb"),
            (b"\x1b[2J", "\\u{1b}[2J"),
            (b"\xff", "\\xff"),
            (b"\\xff", "\\\\xff"),
            ("it's caf\u{e9}\u{85}".as_bytes(), "it's caf\u{e9}\\u{85}"),
        ];
        for (name, text) in names {
            assert_eq!(harmless(name), text);
            assert_eq!(one_line(text), text);
        }
        assert_eq!(one_line("a\\b\nc"), "a\\b\\nc");
    }
}
