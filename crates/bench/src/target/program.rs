//! Running the programs that set a file system up.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::Error;

/// Where programs of the system lie that an ordinary PATH may leave out.
const SYSTEM_DIRS: [&str; 2] = ["/usr/sbin", "/sbin"];

/// A program of the system.
pub fn system(name: &str) -> Command {
    let found = SYSTEM_DIRS.map(|dir| Path::new(dir).join(name));
    match found.into_iter().find(|path| path.is_file()) {
        Some(path) => Command::new(path),
        None => Command::new(name),
    }
}

/// Whether there is a program of this name.
pub fn exists(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(SYSTEM_DIRS.map(Into::into))
        .any(|dir| dir.join(name).is_file())
}

/// Runs a program to its end; what it says is shown only when it fails.
pub fn run(command: &mut Command) -> Result<(), Error> {
    output(command).map(drop)
}

/// The same; what it printed.
pub fn output(command: &mut Command) -> Result<Vec<u8>, Error> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|e| Error::io(Path::new(&program), e))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = [output.stdout, output.stderr].concat();
    Err(Error::Program {
        program,
        status: output.status.to_string(),
        output: String::from_utf8_lossy(&said).trim().to_owned(),
    })
}
