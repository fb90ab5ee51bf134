//! What calls and options do at the ends of their ranges: nothing panics, hangs, or takes memory out of proportion.

mod dropped;
#[path = "../aio/machine.rs"]
mod machine;
mod options;
mod vectored;

use fs::{Caller, FileSystem, OpenFile, ROOT};
use std::sync::Arc;

fn create(fs: &FileSystem, name: &[u8], flags: i32) -> Arc<OpenFile> {
    let made = fs.create(&Caller::root(), ROOT, name, 0o644, flags);
    made.unwrap().1
}
