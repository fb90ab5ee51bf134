//! `sheaf trim`: asks the daemon of a mount to discard its free space.

use serde::Serialize;

use crate::args::Trim;
use crate::failure::Outcome;
use crate::{output, size};

#[derive(Serialize)]
struct Trimmed {
    mountpoint: String,
    /// Bytes.
    discarded: u64,
}

pub fn run(args: &Trim) -> Outcome {
    let discarded = mount::trim(&args.mountpoint)?;
    let mountpoint = args.mountpoint.display().to_string();
    match args.json {
        true => output::json(&Trimmed {
            mountpoint,
            discarded,
        })?,
        false => output::line(format!("{mountpoint}: {} discarded", size::text(discarded)))?,
    }
    Ok(0)
}
