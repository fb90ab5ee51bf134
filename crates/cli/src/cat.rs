//! `sheaf cat`: files to standard output, without a mount.

use std::io::{self, Write};

use crate::args::Cat;
use crate::failure::Outcome;
use crate::offline::{Offline, bytes, inside};
use crate::output;

pub fn run(args: &Cat) -> Outcome {
    let offline = Offline::open(&args.source.devices, true)?;
    let mut out = io::stdout().lock();
    for path in &args.paths {
        let path = inside(path).unwrap_or(bytes(path));
        let attr = offline.find(path)?;
        offline.read(path, attr.ino, |piece| {
            out.write_all(piece).map_err(|e| output::failed(&e))
        })?;
    }
    out.flush().map_err(|e| output::failed(&e))?;
    offline.close()?;
    Ok(0)
}
