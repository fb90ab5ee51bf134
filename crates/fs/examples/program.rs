//! A program that has its files in an array, without a mount: an event log, and a state that changes in one step with it.
//!
//!     cargo run --release -p sheaf-fs --example program -- a.img b.img
//!
//! Makes the images if there is nothing at these paths. Each run adds an event, and reads all of them back.

use fs::{Array, Caller, FileSystem, FsOptions, MkfsOptions, OpenOptions, ROOT, Request};
use fs::{Geometry, GeometryOptions, create_image, entropy, new_uuid, open_devices};
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

const IMAGE_BYTES: u64 = 256 << 20;

const USAGE: &str = "usage: program IMAGE...
Adds an event to the log in an array of 1 to 16 image files, and prints all events.
Makes the images, 256 MiB each, if there is none of them yet.";

fn main() -> ExitCode {
    let images: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    if images.is_empty() {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    }
    match made_and_run(&images, b"the program ran; ") {
        Ok(events) => {
            println!("{}", String::from_utf8_lossy(&events));
            ExitCode::SUCCESS
        }
        // Errors of the library name the device and the remedy.
        Err(error) => {
            eprintln!("program: {error}");
            ExitCode::FAILURE
        }
    }
}

fn made_and_run(images: &[PathBuf], event: &[u8]) -> Result<Vec<u8>, Box<dyn Error>> {
    if !images.iter().any(|image| image.exists()) {
        make(images)?;
    }
    run(images, event)
}

/// What `sheaf mkfs` does.
fn make(images: &[PathBuf]) -> Result<(), Box<dyn Error>> {
    for image in images {
        create_image(image, IMAGE_BYTES)?;
    }
    let devices = open_devices(images, &OpenOptions::default())?;
    let sizes: Vec<u64> = devices.iter().map(|device| device.bytes()).collect();
    let geometry = Geometry::plan(&sizes, GeometryOptions::default())?;
    let array = Array::create(devices, geometry, "events", new_uuid()?, entropy()?)?;
    let array = Arc::new(array);
    FileSystem::mkfs(&array, &MkfsOptions::default())?;
    // Last: what was interrupted before does not open.
    array.write_labels()?;
    Ok(())
}

/// Adds an event, and returns all there are.
fn run(images: &[PathBuf], event: &[u8]) -> Result<Vec<u8>, Box<dyn Error>> {
    let devices = open_devices(images, &OpenOptions::default())?;
    let array = Arc::new(Array::assemble(devices, false)?);
    // 512 MiB for all that the library takes. A crash of the last run is recovered from here.
    let options = FsOptions::default().with_memory(512 << 20);
    let fs = FileSystem::open(array, options)?;
    let who = Caller::root();

    // By path, as open(2) does it. An event is durable when fsync returns: one write and one flush of the devices.
    let flags = libc::O_RDWR | libc::O_CREAT;
    let (_, log) = fs.open_path(&who, ROOT, b"/events", flags, 0o644)?;
    let (at, len) = fs.append(&log, event)?;
    fs.fsync(&log, true)?;

    // Two files in one step: after a crash, and for whoever looks meanwhile, both are changed or neither is.
    fs.transact(&who, |tx| {
        let length = (at + len as u64).to_string();
        for name in [&b"length"[..], b"length.copy"] {
            let ino = match tx.lookup(ROOT, name) {
                Ok(ino) => ino,
                Err(fs::Error::NotFound) => tx.create(ROOT, name, 0o644)?,
                Err(error) => return Err(error),
            };
            tx.truncate(ino, 0)?;
            tx.write(ino, 0, length.as_bytes())?;
        }
        Ok(())
    })?;

    // Many reads at a time, by one thread. `read_future` has the same for executors.
    let mut context = fs.io_context(32)?;
    let end = at + len as u64;
    // Buffers of the context's own cost the kernel less than others.
    let buffers = context.buffers(4096, end.div_ceil(4096) as usize)?;
    let mut requests: Vec<(u64, Request)> = (0..end)
        .step_by(4096)
        .zip(buffers)
        .map(|(offset, buf)| {
            let file = Arc::clone(&log);
            (offset, Request::Read { file, offset, buf })
        })
        .collect();
    let (mut events, mut completions) = (vec![0; end as usize], Vec::new());
    while !requests.is_empty() || context.in_flight() > 0 {
        context.submit_and_wait(&mut requests, 1, &mut completions, None);
        for done in completions.drain(..) {
            let from = done.offset as usize;
            let len = done.result?.min(events.len() - from);
            events[from..from + len].copy_from_slice(&done.buf[..len]);
        }
    }

    // Everything goes to the devices, and the next open has nothing to recover.
    drop((context, log));
    fs.close()?;
    Ok(events)
}

#[test]
fn events_stay() {
    let folder = tempfile::tempdir().unwrap();
    let images = ["a.img", "b.img"].map(|name| folder.path().join(name));
    let mut all = Vec::new();
    for event in [&b"first"[..], &[2; 10_000], b"third"] {
        all.extend_from_slice(event);
        assert_eq!(made_and_run(&images, event).unwrap(), all);
    }
    // In words, not as the library's own structures.
    let error = made_and_run(&images[..1], b"fourth").unwrap_err();
    assert!(
        error.to_string().contains("is missing (of 2 devices"),
        "{error}"
    );
}
