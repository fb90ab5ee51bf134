//! In which state an array is: clean, to be recovered, damaged or in use, and by whom.
//!
//! Invariant: nothing is written, and while an array is in use by somebody who may write what lies on the devices is said to be in use, and
//! no more: it changes under who looks.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use device::{Array, Error, OpenOptions};
use engine::Standing;
use serde::Serialize;

use crate::devices::{self, Access};
use crate::failure::Failure;
use crate::output::{one_line, shown};
use crate::size;
use crate::users::{User, Users};

/// Another command that looks has the devices for a moment.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// The last mount ended with everything on the devices, as record and journal say. Of damage elsewhere nothing is known.
    Clean,
    /// It did not: the next mount replays the journal.
    NeedsRecovery,
    /// What was looked at has the next mount refused.
    Damaged,
    /// Somebody has the devices who may write.
    InUse,
}

/// What the next mount replays.
#[derive(Debug, Serialize)]
pub struct Journal {
    batches: u64,
    records: u64,
    bytes: u64,
}

#[derive(Debug, Serialize)]
pub struct Checkpoint {
    /// Each checkpoint has the next number, and each mount for writing.
    number: u64,
    mount: u64,
    /// Seconds since the epoch.
    time: u64,
}

#[derive(Debug, Serialize)]
pub struct State {
    status: Status,
    /// Nothing of an array that is in use or damaged.
    journal: Option<Journal>,
    last_checkpoint: Option<Checkpoint>,
    /// Processes that have devices open, as far as they can be seen.
    used_by: Vec<User>,
    mounted_at: Vec<String>,
    /// Whether an error has made the mounted file system read-only; nothing where its daemon was not asked or does not answer.
    failed: Option<bool>,
    /// Requests that failed since the mount, by device.
    device_errors: Option<BTreeMap<String, u64>>,
    /// Damage that a look finds; a check finds more.
    damage: Vec<String>,
}

/// Opens an array for a look, and tells its state.
pub fn look(paths: &[PathBuf]) -> Result<(Arc<Array>, State), Failure> {
    let users = Users::of(paths);
    let tries = if users.mounted_at.is_empty() {
        TRIES
    } else {
        1
    };
    for tried in 1..=tries {
        let options = OpenOptions {
            read_only: true,
            ..OpenOptions::default()
        };
        match device::open_devices(paths, &options) {
            Ok(claimed) => {
                let array = Arc::new(Array::assemble(claimed, true)?);
                let standing = engine::standing(&array);
                let state = State::of(&array, Some(standing), &users);
                return Ok((array, state));
            }
            Err(Error::InUse { .. }) if tried < tries => devices::pause(PAUSE),
            Err(Error::InUse { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let access = Access {
        read_only: true,
        ..Access::default()
    };
    let array = devices::look(paths, access)?;
    let state = State::of(&array, None, &users);
    Ok((array, state))
}

impl State {
    /// `standing`: what lies on the devices, if nobody changes that.
    fn of(
        array: &Array,
        standing: Option<Result<Standing, engine::Error>>,
        users: &Users,
    ) -> State {
        let health = users.health();
        let mut state = State {
            status: Status::InUse,
            journal: None,
            last_checkpoint: None,
            used_by: users.processes.clone(),
            mounted_at: users.mounted_at.iter().map(|at| shown(at)).collect(),
            failed: health.as_ref().map(|health| health.failed),
            device_errors: health.map(|health| health.device_errors),
            damage: Vec::new(),
        };
        for repair in array.label_repairs() {
            let (device, copy) = (&array.device_names()[repair.device], repair.copy);
            let damage = &repair.damage;
            state.damage.push(format!(
                "label of {device}, copy {copy}: {damage}; the other copy serves"
            ));
        }
        match standing {
            None => {}
            Some(Ok(standing)) => state.add(standing),
            Some(Err(error)) => {
                state.status = Status::Damaged;
                state.damage.push(error.to_string());
            }
        }
        state
    }

    fn add(&mut self, standing: Standing) {
        for (slot, copy, why) in &standing.damaged_copies {
            let damage =
                format!("checkpoint record, slot {slot}, copy {copy}: {why}; another one serves");
            self.damage.push(damage);
        }
        self.last_checkpoint = Some(Checkpoint {
            number: standing.checkpoint,
            mount: standing.mount,
            time: standing.time,
        });
        self.journal = Some(Journal {
            batches: standing.batches,
            records: standing.records,
            bytes: standing.bytes,
        });
        self.status = match (standing.refused, standing.clean) {
            (Some(refused), _) => {
                self.journal = None;
                self.damage.push(refused);
                Status::Damaged
            }
            (None, true) => Status::Clean,
            (None, false) => Status::NeedsRecovery,
        };
    }

    /// Lines for people.
    pub fn text(&self) -> String {
        let status = match (self.status, &self.journal) {
            (Status::Clean, _) => "clean".to_owned(),
            (Status::NeedsRecovery, Some(journal)) if journal.batches > 0 => format!(
                "needs recovery: the next mount replays {} in {} of the journal, {}",
                size::counted(journal.records, "record"),
                batches(journal.batches),
                size::text(journal.bytes)
            ),
            (Status::NeedsRecovery, _) => {
                "needs recovery: not unmounted cleanly, nothing to replay".to_owned()
            }
            (Status::Damaged, _) => {
                "damaged: not mounted before a repair (`sheaf fsck`)".to_owned()
            }
            (Status::InUse, _) if self.mounted_at.is_empty() => "in use".to_owned(),
            (Status::InUse, _) => "mounted".to_owned(),
        };
        let mut text = format!("State         {status}\n");
        for user in &self.used_by {
            text += &format!("Used by       {} (process {})\n", user.name, user.process);
        }
        if self.status == Status::InUse && self.used_by.is_empty() {
            text += "Used by       no process that can be seen: the kernel's, or another user's\n";
        }
        for at in &self.mounted_at {
            text += &format!("Mounted at    {at}\n");
        }
        if self.failed == Some(true) {
            text +=
                "Failed        an error has made the file system read-only; its log says which\n";
        }
        for (device, errors) in self.device_errors.iter().flatten() {
            if *errors > 0 {
                let requests = size::counted(*errors, "request");
                text += &format!("Errors        {device}: {requests} failed since the mount\n");
            }
        }
        for damage in &self.damage {
            text += &format!("Damage        {}\n", one_line(damage));
        }
        text
    }
}

fn batches(count: u64) -> String {
    match count {
        1 => "1 batch".to_owned(),
        count => format!("{count} batches"),
    }
}
