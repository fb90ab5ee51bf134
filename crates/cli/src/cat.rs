//! `sheaf cat`: files to standard output, without a mount.

use std::io::{self, Write};
use std::path::Path;

use crate::args::Cat;
use crate::failure::{Failure, OPERATIONAL, Outcome};
use crate::offline::{Offline, bytes, inside};
use crate::output;

pub fn run(args: &Cat) -> Outcome {
    let offline = Offline::open(&args.source.devices, true)?;
    let mut out = io::stdout().lock();
    let mut code = 0;
    for path in &args.paths {
        match print(&offline, path, &mut out) {
            Ok(()) => {}
            // The others are printed all the same, as by cat(1), unless nobody reads them.
            Err(failure) if failure.message().is_some() => {
                failure.tell();
                code = OPERATIONAL;
            }
            Err(failure) => return Err(failure),
        }
    }
    out.flush().map_err(|e| output::failed(&e))?;
    offline.close()?;
    Ok(code)
}

fn print(offline: &Offline, path: &Path, out: &mut impl Write) -> Result<(), Failure> {
    let path = inside(path).unwrap_or(bytes(path));
    let attr = offline.find(path)?;
    offline.read(path, attr.ino, |piece| {
        out.write_all(piece).map_err(|e| output::failed(&e))
    })
}
