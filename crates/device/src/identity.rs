//! UUID and name of an array, and how they change over all its labels though that be cut off anywhere.
//!
//! A label is *of an identity*: a UUID and a name. While it changes a label also has the former one.
//!
//! Invariants:
//! 1. A change writes labels one after the other, each durably, in two rounds: in the first all copies of all labels come to say the new identity and the former one,
//!    in the second the new one alone. The second begins when the first has ended.
//! 2. So whenever that is cut off, labels are of the former identity or name it, or are of the new one: no label that is of the former one alone stands beside one that
//!    does not name it. Opening takes the new one as soon as a label says it, whatever the others say: the same devices make the same array.
//! 3. An array that was opened between writes labels that name the former identity, as long as it has not seen both copies of all labels say
//!    the new one; any one of them may be written alone. The mounts after a change that was cut off thus end it. What was seen is flushed before any label is written:
//!    who was cut off may have left it in a cache.
//! 4. Checkpoint records and batches keep the UUID that they were made with ([`Label::metadata_uuid`]): a change needs no journal that is empty, and
//!    none of them is written.
//!
//! A copy of an array is told from the original by its UUID alone, whichever of them got a new one: they have the same key, and the same UUID in their metadata. What lies
//! on a device that has lost its label may be taken for the other's ([`Incomplete`](crate::Incomplete)), as with any copy.

use crate::array::Array;
use crate::error::Error;
use crate::labels::Found;
use format::geometry::Geometry;
use format::label::{Identity, Label};
use format::{U16, U64};
use zerocopy::IntoBytes;

/// True when two labels describe the same array: what it is called, the device and the mount aside.
pub(crate) fn same_array(a: &Label, b: &Label) -> bool {
    let plain = |label: &Label| {
        let mut copy = *label;
        copy.device_index = U16::new(0);
        copy.mount_id = U64::new(0);
        let uuid = copy.metadata_uuid();
        copy.set_identity(
            Identity {
                uuid,
                name: [0; 64],
            },
            None,
        );
        copy.seal();
        copy
    };
    plain(a).as_bytes() == plain(b).as_bytes()
}

/// The same, and they call it the same.
pub(crate) fn same_label(a: &Label, b: &Label) -> bool {
    a.identity() == b.identity() && same_array(a, b)
}

/// True when they do, or one of them has what the other one calls it as its former name.
pub(crate) fn is_kin(a: &Label, b: &Label) -> bool {
    let became = |old: &Label, new: &Label| new.former() == Some(old.identity());
    same_array(a, b) && (a.identity() == b.identity() || became(a, b) || became(b, a))
}

/// What two labels differ in that are not kin, in words.
pub(crate) fn disagreement(a: &Label, b: &Label) -> &'static str {
    if same_array(a, b) {
        return "what the array is called";
    }
    match (Geometry::from_label(a), Geometry::from_label(b)) {
        (Ok(a), Ok(b)) if a == b => "when the array was made, or its features",
        _ => "the array's geometry",
    }
}

/// What a label is of, beside these: the new identity, if it is of the former one.
pub(crate) fn resolved<'a>(label: &Label, beside: impl IntoIterator<Item = &'a Label>) -> Identity {
    let became = |new: &&Label| new.former() == Some(label.identity()) && same_array(label, new);
    let new = beside.into_iter().find(became);
    new.map_or(label.identity(), Label::identity)
}

/// The label of an array whose devices have these, and whether all copies say the same. All of them are of one identity ([`resolved`]).
/// `complete`: they are all devices.
pub(crate) fn agreed<'a>(
    found: impl Iterator<Item = &'a Found> + Clone,
    first: &Label,
    complete: bool,
) -> (Label, bool) {
    let labels = found.clone().map(|found| &found.label);
    let now = resolved(first, labels.clone());
    let says = |label: &Label| label.identity() == now;
    let seen = |found: &Found| says(&found.label) && found.other.as_ref().is_some_and(says);
    let ended = complete && found.clone().all(seen);
    let named = labels
        .clone()
        .find(|label| says(label) && label.former().is_some());
    let former = named.and_then(Label::former).filter(|_| !ended);
    let mut label = *first;
    label.set_identity(now, former);
    let is_as = |other: &Label| says(other) && other.former() == former;
    let settled = found
        .clone()
        .all(|found| is_as(&found.label) && found.other.as_ref().is_some_and(is_as));
    (label, settled)
}

impl Array {
    /// By what it is called.
    pub fn identity(&self) -> Identity {
        self.label.identity()
    }

    /// Whether labels may say still what it was called before: a change was cut off. Mounts end it, and a further change does.
    pub fn is_changing(&self) -> bool {
        self.label.former().is_some()
    }

    /// Calls the array otherwise, in all labels, durably; label copies that were damaged are good then. Cut off, it leaves an array that opens as what it was, or as this.
    /// For who has the devices to himself.
    ///
    /// # Errors
    /// [`Error::InUse`] while somebody [writes](Self::writer) to one of the devices. Those of the devices: what was written until then is as if it had been cut off.
    pub fn with_identity(mut self, new: Identity) -> Result<Array, Error> {
        if self.read_only {
            return Err(Error::ReadOnly);
        }
        let _writer = self.writer()?;
        let old = self.identity();
        // Invariant 3.
        self.mark_all_unflushed();
        self.flush()?;
        // What was cut off before is not to be met again in the middle of this.
        if !self.settled || self.is_changing() {
            self.call(old, self.label.former())?;
            self.call(old, None)?;
        }
        if new != old {
            self.call(new, Some(old))?;
            self.call(new, None)?;
        }
        self.settled = true;
        self.repairs.clear();
        Ok(self)
    }

    /// One round.
    fn call(&mut self, now: Identity, former: Option<Identity>) -> Result<(), Error> {
        self.label.set_identity(now, former);
        let mut members = 0..self.members.len();
        members.try_for_each(|index| self.write_label(index, self.age(index)))
    }
}
