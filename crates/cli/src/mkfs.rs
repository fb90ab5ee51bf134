//! `sheaf mkfs`: claims the devices, checks what is there, discards, makes the array and an empty file system,
//! and writes the labels last.

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::slice;
use std::sync::Arc;

use bench::interrupt;
use device::{Array, BlockDevice, OpenOptions};
use format::geometry::{Geometry, GeometryOptions, MIN_ARRAY_BYTES, MIN_DEVICE_BYTES};
use serde::Serialize;

use crate::args::Mkfs;
use crate::failure::{Failure, Outcome};
use crate::{devices, output, progress, size};

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
    // From here on a signal ends it by an error, and the images go again.
    interrupt::catch()?;
    let made = make(args)?;
    let told = if args.json {
        output::json(&made)
    } else if args.quiet {
        Ok(())
    } else {
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
        ))
    };
    told.map_err(|failure| failure.after("the file system is made"))?;
    Ok(0)
}

/// A device or image of the command, claimed until this is dropped.
struct Claim<'a> {
    path: &'a Path,
    device: Arc<dyn BlockDevice>,
    /// Which file it is, if it was created here.
    created: Option<Metadata>,
    /// What it held when it was claimed. Of what is overwritten by force it is not asked.
    found: Option<&'static str>,
}

/// What the command has of what it names.
#[derive(Default)]
struct Claims<'a> {
    all: Vec<Claim<'a>>,
    /// An image that was created here and is not claimed, as long as that is so.
    unclaimed: Option<(&'a PathBuf, Metadata)>,
}

impl Claims<'_> {
    /// Removes the images that were created here.
    fn remove_created(self) {
        self.all.iter().for_each(remove_created);
        // It may be that they had all the descriptors that there are, and the next one needs some.
        drop(self.all);
        let Some((path, created)) = self.unclaimed else {
            return;
        };
        match claim(path, Some(created), false) {
            Ok(claims) => claims.iter().for_each(remove_created),
            // Somebody else has it.
            Err(failure) if failure.is_of_device_in_use() => {}
            Err(failure) => tracing::warn!(
                "{}: created, and not removed: {}",
                path.display(),
                failure.message().unwrap_or_default()
            ),
        }
    }
}

/// Makes the file system; an image file that was created here goes again on failure, and, where signals are caught, when one comes.
pub fn make(args: &Mkfs) -> Result<Made, Failure> {
    let uuid = match &args.uuid {
        None => device::new_uuid().map_err(Failure::of)?,
        Some(text) => given_uuid(text)?,
    };
    check_paths(args)?;
    check_size(args)?;
    let mut claims = Claims::default();
    let result = claim_all(args, &mut claims).and_then(|()| make_on(args, uuid, &claims.all));
    if result.is_err() {
        claims.remove_created();
    }
    result
}

/// A UUID that tells the file system from others.
pub fn given_uuid(text: &str) -> Result<[u8; 16], Failure> {
    match device::parse_uuid(text) {
        None => Err(Failure::usage(format!("'{text}' is not a UUID"))),
        Some(nil) if nil == [0; 16] => Err(Failure::usage(
            "the UUID of zeros stands for none; give another one",
        )),
        Some(uuid) => Ok(uuid),
    }
}

/// Whether the other commands, given the same words, would open the same devices.
fn check_paths(args: &Mkfs) -> Result<(), Failure> {
    devices::check_count(&args.devices)?;
    match args.devices.iter().find(|path| devices::is_tag(path)) {
        Some(tag) => Err(Failure::usage(format!(
            "{0} names a file system that is there, not a device to make one on; for a file of that name write ./{0}",
            tag.display()
        ))),
        None => Ok(()),
    }
}

/// Claims the devices one after the other, and creates the image files that do not exist, where a size is given. What another process
/// does to one of them it does before its claim, or finds it in use.
fn claim_all<'a>(args: &'a Mkfs, claims: &mut Claims<'a>) -> Result<(), Failure> {
    for (before, path) in args.devices.iter().enumerate() {
        interrupt::check()?;
        let created = create_image(args, path)?;
        claims.unclaimed = created.clone().map(|created| (path, created));
        device::check_distinct(&args.devices[..=before])?;
        claims.all.append(&mut claim(path, created, args.force)?);
        claims.unclaimed = None;
    }
    Ok(())
}

/// Claims one device or image, and looks at what it holds.
fn claim(
    path: &PathBuf,
    created: Option<Metadata>,
    force: bool,
) -> Result<Vec<Claim<'_>>, Failure> {
    let devices = device::open_devices(slice::from_ref(path), &OpenOptions::default())?;
    let mut claims = Vec::new();
    for device in devices {
        let found = match force && created.is_none() {
            true => None,
            false => found_on(path, device.as_ref())?,
        };
        let created = created.clone();
        claims.push(Claim {
            path,
            device,
            created,
            found,
        });
    }
    Ok(claims)
}

/// Creates an image file if nothing is there.
fn create_image(args: &Mkfs, path: &Path) -> Result<Option<Metadata>, Failure> {
    if path.exists() {
        return Ok(None);
    }
    if let Ok(target) = std::fs::read_link(path) {
        return Err(Failure::new(format!(
            "{} is a symbolic link to {}, which is not there; name the file itself or remove the link",
            path.display(),
            target.display()
        )));
    }
    let bytes = args.size.ok_or_else(|| {
        Failure::usage(format!(
            "{} does not exist; to create an image file give --size",
            path.display()
        ))
    })?;
    match device::create_image(path, bytes) {
        Ok(created) => Ok(Some(created)),
        // Another process has created it meanwhile, and who claims it first has it.
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Removes an image that was created here and is nobody else's: the claim keeps others out, nobody had it between creation and claim, and the path
/// still leads to it.
fn remove_created(claim: &Claim<'_>) {
    let Some(created) = claim.created.as_ref().filter(|_| claim.found.is_none()) else {
        return;
    };
    let is_it = |now: Metadata| (now.dev(), now.ino()) == (created.dev(), created.ino());
    if !std::fs::symlink_metadata(claim.path).is_ok_and(is_it) {
        return;
    }
    if let Err(error) = std::fs::remove_file(claim.path) {
        tracing::warn!("{}: cannot remove: {error}", claim.path.display());
    }
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

/// Makes the file system on what is claimed. Before all of it is nothing has been written.
fn make_on(args: &Mkfs, uuid: [u8; 16], claims: &[Claim<'_>]) -> Result<Made, Failure> {
    if !args.force {
        claims.iter().try_for_each(refuse_used)?;
    }
    let devices: Vec<_> = claims.iter().map(|c| Arc::clone(&c.device)).collect();
    let geometry = plan(args, &devices)?;
    let key = base::rng::entropy().map_err(Failure::of)?;
    let create = || Array::create(devices.clone(), geometry.clone(), &args.label, uuid, key);
    // Wipes old labels, which must not outlive what they are the labels of: an interrupted
    // discard leaves nothing that mounts. Discarded blocks may read as anything, so once more.
    if !args.no_discard {
        create()?;
        discard(&devices)?;
    }
    let array = Arc::new(create()?);
    fs::FileSystem::mkfs(&array, &owner())?;
    interrupt::check()?;
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

fn refuse_used(claim: &Claim<'_>) -> Result<(), Failure> {
    match claim.found {
        None => Ok(()),
        Some(found) => Err(Failure::new(format!(
            "{} holds {found}; to overwrite it give --force",
            claim.path.display()
        ))),
    }
}

/// What a claimed device holds.
fn found_on(path: &Path, device: &dyn BlockDevice) -> Result<Option<&'static str>, Failure> {
    Ok(match device::signatures(device).first() {
        Some(signature) => Some(signature.name),
        None if holds_data(path)? => Some("data of an unknown kind"),
        None => None,
    })
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
        journal_align: device::journal_align(devices),
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
fn discard(devices: &[Arc<dyn BlockDevice>]) -> Result<(), Failure> {
    let bar = progress::bar("Discarding", devices.len() as u64);
    for device in devices {
        interrupt::check()?;
        if let Err(error) = device.discard(0, device.bytes()) {
            tracing::info!("{}: not discarded: {error}", device.name());
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(interrupt::check()?)
}

/// Arguments for small images, which are made where there are none.
#[cfg(test)]
pub fn small(devices: Vec<PathBuf>) -> Mkfs {
    Mkfs {
        devices,
        label: String::new(),
        stripe_unit: None,
        journal_size: None,
        size: Some(64 << 20),
        uuid: None,
        force: false,
        no_discard: true,
        quiet: true,
        json: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claimed(devices: &[PathBuf], then: impl FnOnce(&mut Vec<Claim<'_>>)) {
        let args = small(devices.to_vec());
        let mut claims = Claims::default();
        claim_all(&args, &mut claims).unwrap();
        then(&mut claims.all);
        claims.remove_created();
    }

    /// A mkfs that failed removed whatever lay at the paths of the images that it had created.
    #[test]
    fn only_an_image_that_is_nobody_elses_is_removed() {
        let home = tempfile::tempdir().unwrap();
        let images = ["a", "b", "c"].map(|name| home.path().join(name));
        let there = || images.each_ref().map(|image| image.exists());
        std::fs::write(&images[0], [0; 4096]).unwrap();
        claimed(&images, |claims| assert_eq!(claims.len(), 3));
        assert_eq!(there(), [true, false, false]);
        claimed(&images, |claims| {
            // Another one has made a file system before the claim, and one has put its own file there.
            claims[1].found = Some("sheaf");
            std::fs::rename(&images[0], &images[2]).unwrap();
        });
        assert_eq!(there(), [false, true, true]);
    }
}
