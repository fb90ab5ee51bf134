use std::path::PathBuf;

use fs::{FileSystem, FsOptions};

use crate::args::Fsck;
use crate::devices::{self, Access};
use crate::failure::Outcome;

pub fn run(args: &Fsck) -> Outcome {
    let paths: Vec<PathBuf> = devices::find(&args.devices)?;
    let access = Access {
        read_only: true,
        ..Access::default()
    };
    let fs = FileSystem::open(
        devices::open(&paths, access)?,
        FsOptions::default().read_only(),
    )?;
    fs.close()?;
    Ok(0)
}
