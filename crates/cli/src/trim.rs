//! `sheaf trim`: asks the daemon of a mount to discard its free space.

use mount::TrimRange;
use serde::Serialize;

use crate::args::Trim;
use crate::failure::{Failure, Outcome, USAGE};
use crate::output::shown;
use crate::{output, size};

#[derive(Serialize)]
struct Trimmed {
    mountpoint: String,
    /// Bytes.
    discarded: u64,
}

pub fn run(args: &Trim) -> Outcome {
    let range = TrimRange {
        start: args.offset,
        len: args.length.unwrap_or(u64::MAX),
        least: args.minimum,
    };
    let root = mount::root_of(&args.mountpoint)?;
    let discarded = mount::trim(&root, range).map_err(|error| match &error {
        mount::Error::Trim { error: cause, .. } if cause.raw_os_error() == Some(libc::EINVAL) => {
            Failure::from(error).with_code(USAGE).after(
                "the range begins behind the end of the file system, or has less than a block of 4096 bytes",
            )
        }
        _ => error.into(),
    })?;
    let mountpoint = shown(&root);
    match args.json {
        true => output::json(&Trimmed {
            mountpoint,
            discarded,
        })?,
        false => output::line(format!("{mountpoint}: {} discarded", size::text(discarded)))?,
    }
    Ok(0)
}
