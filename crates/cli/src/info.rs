//! `sheaf info`: what devices hold, and how a file system on them is laid out.

use std::path::PathBuf;

use serde::Serialize;

use crate::args::Info;
use crate::devices;
use crate::failure::{Failure, Outcome};
use crate::state::{self, State};
use crate::{live, output, size};

/// One file system, sizes in bytes.
#[derive(Serialize)]
struct Described {
    uuid: String,
    label: String,
    format_version: u32,
    features: Vec<String>,
    created: i64,
    size: u64,
    stripe_unit: u64,
    journal_size: u64,
    chunk_size: u64,
    segment_size: u64,
    devices: Vec<Device>,
    zones: Vec<Zone>,
    damaged_label_copies: Vec<String>,
    state: State,
}

#[derive(Serialize)]
struct Device {
    path: String,
    kind: &'static str,
    size: u64,
    logical_block: u32,
    io: &'static str,
    direct: bool,
    rotational: Option<bool>,
}

#[derive(Serialize)]
struct Zone {
    size: u64,
    devices: Vec<usize>,
}

/// A device found by scanning.
#[derive(Serialize)]
struct Found {
    path: PathBuf,
    uuid: String,
    label: String,
    index: usize,
    of: usize,
    size: u64,
}

pub fn run(args: &Info) -> Outcome {
    if let Some(mountpoint) = &args.live {
        return match args.unwaited {
            true => live::answer(mountpoint),
            false => live::info(mountpoint, args.json),
        };
    }
    match (args.udev, args.devices.is_empty()) {
        (true, _) => for_udev(args),
        (false, true) => list_all(args),
        (false, false) => describe(args),
    }
}

/// The keys that udev's own rules have for other file systems; nothing for other devices.
fn for_udev(args: &Info) -> Outcome {
    for member in device::scan(None, &args.devices) {
        let (uuid, name) = (device::uuid_text(&member.uuid), encoded(&member.name));
        output::print(format!(
            "ID_FS_TYPE=sheaf\nID_FS_USAGE=filesystem\nID_FS_UUID={uuid}\nID_FS_UUID_ENC={uuid}\n"
        ))?;
        if !name.is_empty() {
            output::print(format!("ID_FS_LABEL={name}\nID_FS_LABEL_ENC={name}\n"))?;
        }
    }
    Ok(0)
}

/// A name as udev and libblkid write it, who look for the link by that: what could trouble a path or a shell
/// as `\x20`, and all beyond ASCII as it is.
fn encoded(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for c in name.chars() {
        let is_plain = !c.is_ascii() || c.is_ascii_alphanumeric() || "#+-.:=@_".contains(c);
        match is_plain {
            true => out.push(c),
            false => out += &format!("\\x{:02x}", u32::from(c)),
        }
    }
    out
}

fn list_all(args: &Info) -> Outcome {
    let candidates = device::candidates();
    let found: Vec<Found> = device::scan(None, &candidates)
        .into_iter()
        .map(|member| Found {
            uuid: device::uuid_text(&member.uuid),
            label: member.name,
            index: member.index,
            of: member.count,
            size: member.bytes,
            path: member.path,
        })
        .collect();
    // Nothing found is no news where there was no look.
    if found.is_empty()
        && let Some(refused) = devices::unreadable(&candidates)
    {
        return Err(Failure::new(refused));
    }
    if args.json {
        output::json(&found)?;
        return Ok(0);
    }
    if found.is_empty() {
        output::tell(
            "sheaf: no block device of this machine has a Sheaf label; image files are to be named",
        );
    }
    for device in &found {
        output::line(format!(
            "{}: UUID={} LABEL={:?} device {} of {}, {}",
            device.path.display(),
            device.uuid,
            device.label,
            device.index,
            device.of,
            size::text(device.size)
        ))?;
    }
    Ok(0)
}

fn describe(args: &Info) -> Outcome {
    let (array, state) = state::look(&devices::find(&args.devices)?)?;
    let described = description(&array, state);
    match args.json {
        true => output::json(&described)?,
        false => output::print(text(&described))?,
    }
    Ok(0)
}

fn description(array: &device::Array, state: State) -> Described {
    let (label, geometry) = (array.label(), array.geometry());
    let block = format::BLOCK_SIZE as u64;
    let repairs = array.label_repairs().iter();
    Described {
        uuid: device::uuid_text(&array.uuid()),
        label: device::label_name(label),
        format_version: label.version.get(),
        features: device::label_features(label),
        created: label.created.get(),
        size: geometry.total_blocks() * block,
        stripe_unit: u64::from(geometry.stripe_blocks) * block,
        journal_size: geometry.journal_bytes(),
        chunk_size: u64::from(geometry.chunk_blocks) * block,
        segment_size: geometry.segment_bytes() as u64,
        devices: array
            .devices()
            .map(|device| {
                let info = device.info();
                Device {
                    path: info.name,
                    kind: info.kind,
                    size: info.bytes,
                    logical_block: info.logical_block,
                    io: info.backend,
                    direct: info.direct,
                    rotational: info.rotational,
                }
            })
            .collect(),
        zones: geometry
            .zones
            .iter()
            .map(|zone| Zone {
                size: zone.blocks * block,
                devices: zone.devices.clone(),
            })
            .collect(),
        damaged_label_copies: repairs
            .map(|r| format!("device {}, copy {}: {}", r.device, r.copy, r.damage))
            .collect(),
        state,
    }
}

fn text(d: &Described) -> String {
    let features = match d.features.is_empty() {
        true => "none".to_owned(),
        false => d.features.join(", "),
    };
    let mut text = format!(
        "UUID          {}\nLabel         {}\n{}Format        version {}, features: {features}\n\
         Size          {}\nStripe unit   {}\nJournal       {}\nChunk         {}\nSegment       {}\n",
        d.uuid,
        output::harmless(d.label.as_bytes()),
        d.state.text(),
        d.format_version,
        size::text(d.size),
        size::text(d.stripe_unit),
        size::text(d.journal_size),
        size::text(d.chunk_size),
        size::text(d.segment_size),
    );
    for (number, device) in d.devices.iter().enumerate() {
        text += &format!(
            "Device {number:<6} {} ({}, {}, logical block {}, {}{}{})\n",
            device.path,
            device.kind,
            size::text(device.size),
            device.logical_block,
            device.io,
            if device.direct {
                ", direct"
            } else {
                ", through the page cache"
            },
            if device.rotational == Some(true) {
                ", rotating"
            } else {
                ""
            },
        );
    }
    for (number, zone) in d.zones.iter().enumerate() {
        let devices: Vec<String> = zone.devices.iter().map(usize::to_string).collect();
        text += &format!(
            "Zone {number:<8} {} over devices {}\n",
            size::text(zone.size),
            devices.join(", ")
        );
    }
    if !d.damaged_label_copies.is_empty() {
        text += "`sheaf fsck --repair` writes damaged labels again\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Letters beyond ASCII were written byte by byte, and no `LABEL=` of fstab found the link.
    #[test]
    fn labels_are_written_as_libblkid_writes_them() {
        for (name, written) in [
            ("data", "data"),
            ("a#+-.:=@_Z9", "a#+-.:=@_Z9"),
            ("café x", "café\\x20x"),
            ("数据/盘", "数据\\x2f盘"),
            ("a\nb\"\\$\u{7f}", "a\\x0ab\\x22\\x5c\\x24\\x7f"),
        ] {
            assert_eq!(encoded(name), written);
        }
    }
}
