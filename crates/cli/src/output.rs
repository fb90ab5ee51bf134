//! Writing to standard output and standard error, which may be pipes that their readers close.

use std::io::{self, Write};

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

/// Tells the user a line on standard error. Whether or not anybody reads it, the command goes on.
pub fn tell(text: impl std::fmt::Display) {
    // There is nobody left to tell of a failure.
    let _ = io::stderr()
        .lock()
        .write_all(format!("{text}\n").as_bytes());
}

/// Text that cannot change a terminal's state: control characters are escaped.
pub fn harmless(name: &[u8]) -> String {
    let text = String::from_utf8_lossy(name);
    match text.chars().any(char::is_control) {
        true => text.escape_debug().to_string(),
        false => text.into_owned(),
    }
}
