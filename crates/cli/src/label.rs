//! `sheaf label`: shows what a file system is called, and changes it.

use std::path::PathBuf;

use device::{Array, new_uuid};
use format::label::Identity;
use serde::Serialize;

use crate::args::Label;
use crate::devices::{self, Access};
use crate::failure::{Failure, Outcome};
use crate::mkfs::given_uuid;
use crate::output;

#[derive(Serialize)]
struct Called {
    uuid: String,
    label: String,
    /// The names in labels that have not come to say it yet, because a change was cut off.
    unfinished: bool,
    /// What it was called before this command changed it.
    #[serde(skip_serializing_if = "Option::is_none")]
    former: Option<Former>,
}

#[derive(Serialize)]
struct Former {
    uuid: String,
    label: String,
}

pub fn run(args: &Label) -> Outcome {
    let paths = devices::find(&args.devices)?;
    if args.label.is_none() && args.uuid.is_none() {
        return show(args, &paths);
    }
    let label = args.label.as_deref().map(device::name_bytes).transpose()?;
    let uuid = match args.uuid.as_deref() {
        None => None,
        Some("random") => Some(new_uuid().map_err(Failure::of)?),
        Some(text) => Some(given_uuid(text)?),
    };
    let devices = devices::claim(&paths, Access::default())?;
    let array = Array::assemble(devices, false)?;
    // Their old state would be called as the array is then, and the latest one as nothing that is there.
    let outdated = engine::outdated(&array);
    if !outdated.is_empty() {
        return Err(Failure::new(engine::outdated_text(&array, &outdated)));
    }
    let old = array.identity();
    let former = Former {
        uuid: device::uuid_text(&array.uuid()),
        label: device::label_name(array.label()),
    };
    let new = Identity {
        uuid: uuid.unwrap_or(old.uuid),
        name: label.unwrap_or(old.name),
    };
    let array = array.with_identity(new).map_err(|error| {
        Failure::from(error).after(
            "the file system is called as before, or as was asked for, and opens by either; repeat the command",
        )
    })?;
    let told = tell(args, &array, Some(former));
    told.map_err(|failure| failure.after("labels are written"))?;
    Ok(0)
}

fn show(args: &Label, paths: &[PathBuf]) -> Outcome {
    let array = devices::look(paths, Access::default())?;
    tell(args, &array, None)?;
    Ok(0)
}

fn tell(args: &Label, array: &Array, former: Option<Former>) -> Result<(), Failure> {
    let called = Called {
        uuid: device::uuid_text(&array.uuid()),
        label: device::label_name(array.label()),
        unfinished: array.is_changing(),
        former,
    };
    if args.json {
        return output::json(&called);
    }
    let mut text = format!(
        "UUID          {}\nLabel         {}\n",
        called.uuid, called.label
    );
    if called.unfinished {
        text += "Unfinished    a change was cut off; the next mounts end it, or `sheaf label` with the label or UUID it is to have\n";
    }
    output::print(text)
}
