//! `sheaf mkfs`: checks what is there, discards, makes the array and an empty file system,
//! and writes the labels last.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use device::{Array, BlockDevice, OpenOptions};
use format::geometry::{Geometry, GeometryOptions, MIN_ARRAY_BYTES, MIN_DEVICE_BYTES};
use serde::Serialize;

use crate::args::Mkfs;
use crate::failure::{Failure, Outcome};
use crate::{output, progress, size};

/// What was made.
#[derive(Debug, Serialize)]
pub struct Made {
    pub uuid: String,
    pub label: String,
    pub devices: Vec<String>,
    /// In bytes, as the other sizes.
    pub size: u64,
    pub stripe_unit: u64,
    pub journal_size: u64,
}

pub fn run(args: &Mkfs) -> Outcome {
    let made = make(args)?;
    if args.json {
        output::json(&made)?;
    } else if !args.quiet {
        let name = match made.label.is_empty() {
            true => String::new(),
            false => format!(" \"{}\"", made.label),
        };
        output::line(format!(
            "Made file system{name} {} of {} on {} device{}: stripe unit {}, journal {}",
            made.uuid,
            size::text(made.size),
            made.devices.len(),
            if made.devices.len() == 1 { "" } else { "s" },
            size::text(made.stripe_unit),
            size::text(made.journal_size),
        ))?;
    }
    Ok(0)
}

/// Makes the file system; an image file that was created here goes again on failure.
pub fn make(args: &Mkfs) -> Result<Made, Failure> {
    let mut created = Vec::new();
    let result = create_images(args, &mut created).and_then(|()| make_on(args));
    if result.is_err() {
        for image in &created {
            if let Err(error) = std::fs::remove_file(image) {
                tracing::warn!("{}: cannot remove: {error}", image.display());
            }
        }
    }
    result
}

/// Creates the image files that do not exist, where a size is given, and tells which.
fn create_images(args: &Mkfs, created: &mut Vec<PathBuf>) -> Result<(), Failure> {
    check_size(args)?;
    for path in &args.devices {
        if path.exists() {
            continue;
        }
        let bytes = args.size.ok_or_else(|| {
            Failure::new(format!(
                "{} does not exist; to create an image file give --size",
                path.display()
            ))
        })?;
        device::create_image(path, bytes)?;
        created.push(path.clone());
    }
    Ok(())
}

/// Whether images of the size that is given are enough for a file system.
fn check_size(args: &Mkfs) -> Result<(), Failure> {
    let Some(bytes) = args
        .size
        .filter(|_| !args.devices.iter().any(|path| path.exists()))
    else {
        return Ok(());
    };
    let all = bytes.saturating_mul(args.devices.len() as u64);
    match bytes < MIN_DEVICE_BYTES || all < MIN_ARRAY_BYTES {
        true => Err(Failure::usage(format!(
            "--size {}: {}",
            size::text(bytes),
            least()
        ))),
        false => Ok(()),
    }
}

/// What devices must have.
fn least() -> String {
    format!(
        "each device needs {} or more, all together {} or more",
        size::text(MIN_DEVICE_BYTES),
        size::text(MIN_ARRAY_BYTES)
    )
}

fn make_on(args: &Mkfs) -> Result<Made, Failure> {
    let uuid = match &args.uuid {
        None => device::new_uuid(),
        Some(text) => device::parse_uuid(text)
            .ok_or_else(|| Failure::usage(format!("'{text}' is not a UUID")))?,
    };
    if !args.force {
        for path in &args.devices {
            refuse_used(path)?;
        }
    }
    let devices = device::open_devices(&args.devices, &OpenOptions::default())?;
    let geometry = plan(args, &devices)?;
    let key = base::rng::entropy();
    let create = || Array::create(devices.clone(), geometry.clone(), &args.label, uuid, key);
    // Wipes old labels, which must not outlive what they are the labels of: an interrupted
    // discard leaves nothing that mounts. Discarded blocks may read as anything, so once more.
    if !args.no_discard {
        create()?;
        discard(&devices);
    }
    let array = Arc::new(create()?);
    fs::FileSystem::mkfs(&array, &owner())?;
    array.write_labels()?;
    let geometry = array.geometry();
    Ok(Made {
        uuid: device::uuid_text(&uuid),
        label: args.label.clone(),
        devices: array.device_names(),
        size: geometry.total_blocks() * format::BLOCK_SIZE as u64,
        stripe_unit: u64::from(geometry.stripe_blocks) * format::BLOCK_SIZE as u64,
        journal_size: geometry.journal_bytes(),
    })
}

/// Who makes the file system owns its root folder.
fn owner() -> fs::MkfsOptions {
    fs::MkfsOptions {
        uid: rustix::process::getuid().as_raw(),
        gid: rustix::process::getgid().as_raw(),
        ..fs::MkfsOptions::default()
    }
}

fn refuse_used(path: &Path) -> Result<(), Failure> {
    let found = match device::probe(path) {
        None if holds_data(path)? => "data of an unknown kind",
        None => return Ok(()),
        Some(found) => found,
    };
    Err(Failure::new(format!(
        "{} holds {found}; to overwrite it give --force",
        path.display()
    )))
}

/// How much is looked at of each end of an image file that has no known signature.
const LOOKED_AT: u64 = 1 << 20;

/// Whether a regular file has anything but zeros at its beginning or end. What a device holds whose blocks were given
/// back says nothing.
fn holds_data(path: &Path) -> Result<bool, Failure> {
    let failed = |e: std::io::Error| Failure::io(path.display(), &e);
    let meta = std::fs::metadata(path).map_err(failed)?;
    if !meta.is_file() {
        return Ok(false);
    }
    let file = File::open(path).map_err(failed)?;
    let mut ends = vec![0; LOOKED_AT.min(meta.len()) as usize];
    for offset in [0, meta.len() - ends.len() as u64] {
        file.read_exact_at(&mut ends, offset).map_err(failed)?;
        if ends.iter().any(|&byte| byte != 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn plan(args: &Mkfs, devices: &[Arc<dyn BlockDevice>]) -> Result<Geometry, Failure> {
    let sizes: Vec<u64> = devices.iter().map(|d| d.bytes()).collect();
    let small = devices.iter().find(|d| d.bytes() < MIN_DEVICE_BYTES);
    let all = sizes.iter().sum::<u64>();
    if small.is_some() || all < MIN_ARRAY_BYTES {
        let (name, has) = match small {
            Some(device) => (device.name(), device.bytes()),
            None => ("the array", all),
        };
        return Err(Failure::new(format!(
            "{name} has {}; {} (--size makes image files of a size)",
            size::text(has),
            least()
        )));
    }
    let options = GeometryOptions {
        stripe_bytes: args.stripe_unit,
        journal_bytes: args.journal_size,
        journal_align: devices.iter().map(|d| d.logical_block()).max(),
    };
    Geometry::plan(&sizes, options).map_err(|error| {
        let given = [
            (
                "--stripe-unit",
                args.stripe_unit,
                GeometryOptions {
                    stripe_bytes: None,
                    ..options
                },
            ),
            (
                "--journal-size",
                args.journal_size,
                GeometryOptions {
                    journal_bytes: None,
                    ..options
                },
            ),
        ];
        // It is that option's fault if it works without.
        let without = |rest: &GeometryOptions| Geometry::plan(&sizes, *rest).is_ok();
        let mut given = given.iter().filter(|(_, value, _)| value.is_some());
        match given.find(|(_, _, rest)| without(rest)) {
            Some((option, ..)) => Failure::usage(format!("{option}: {error}")),
            None => error.into(),
        }
    })
}

/// Tells the devices that all they hold is worthless. One that cannot only stays slower.
fn discard(devices: &[Arc<dyn BlockDevice>]) {
    let bar = progress::bar("Discarding", devices.len() as u64);
    for device in devices {
        if let Err(error) = device.discard(0, device.bytes()) {
            tracing::info!("{}: not discarded: {error}", device.name());
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
}
