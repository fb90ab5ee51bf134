//! The geometry and the devices agree.

use crate::fixture::{Sims, UNEQUAL, create, noise, plan};
use device::sim::SimDevice;
use device::{AlignedBuf, Array, BlockDevice, Durability, Error, Io, Topology};
use format::geometry::Piece;
use format::label::{HEAD_BLOCKS, TAIL_BLOCKS};
use proptest::prelude::*;
use std::sync::Arc;

/// A length of one stripe unit or a few around a border between zones or stripes.
fn range() -> impl Strategy<Value = (u64, usize)> {
    let anchor = prop_oneof![
        Just(0u64),
        Just(5119),
        Just(11_263),
        Just(14_300),
        0..14_000u64
    ];
    (anchor, 0..64u64, 1..400usize).prop_map(|(block, sector, sectors)| {
        let byte = block * 4096 + sector * 512;
        (byte, sectors * 512)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn pieces_cover_a_range_once_and_stay_inside_the_data_area(
        sizes in prop::collection::vec((4u64 << 20)..(96 << 20), 1..6),
        stripe in 12u32..18,
        at in 0.0f64..1.0,
        sectors in 1usize..2000,
    ) {
        let mut sizes: Vec<u64> = sizes.iter().map(|s| s / 4096 * 4096).collect();
        sizes[0] += 64 << 20;
        let g = plan(&sizes, 1 << stripe);
        let total = g.total_blocks() * 4096;
        let len = sectors * 512;
        let byte = (((total - len as u64) as f64 * at) as u64) / 512 * 512;
        let mut covered = 0;
        let mut pieces: Vec<Piece> = Vec::new();
        g.pieces(byte, len, |p| {
            covered += p.len;
            pieces.push(p);
        });
        prop_assert_eq!(covered, len);
        for (i, p) in pieces.iter().enumerate() {
            prop_assert!(p.offset >= HEAD_BLOCKS * 4096);
            prop_assert!(p.offset + p.len as u64 <= sizes[p.device] - TAIL_BLOCKS * 4096);
            for q in &pieces[..i] {
                let apart = p.device != q.device
                    || p.offset + p.len as u64 <= q.offset
                    || q.offset + q.len as u64 <= p.offset;
                prop_assert!(apart, "{:?} and {:?} overlap", p, q);
            }
        }
    }

    #[test]
    fn what_is_written_is_read_and_lies_where_the_geometry_says(
        writes in prop::collection::vec(range(), 1..12),
        seed in any::<u64>(),
        stripe in 12u32..18,
    ) {
        let sims = Sims::new(&UNEQUAL, seed);
        let array = create(sims.members(), 1 << stripe);
        let limit = array.bytes();
        let mut model: Vec<(u64, Vec<u8>)> = Vec::new();
        for (i, (byte, len)) in writes.into_iter().enumerate() {
            let data = noise(seed ^ i as u64, len);
            let done = array.write(byte, &data, Durability::Volatile);
            if byte + len as u64 > limit {
                prop_assert!(matches!(done, Err(Error::OutOfRange { .. })), "{done:?}");
                continue;
            }
            done.unwrap();
            model.push((byte, data));
        }
        for (i, (byte, data)) in model.iter().enumerate() {
            let mut read = vec![0; data.len()];
            array.read(*byte, &mut read).unwrap();
            let mut expected = data.clone();
            for (later, bytes) in &model[i + 1..] {
                overlay(*byte, &mut expected, *later, bytes);
            }
            prop_assert_eq!(&read, &expected);
            let mut at = 0;
            array.geometry().pieces(*byte, data.len(), |p| {
                let mut raw = vec![0; p.len];
                sims.devices[p.device].peek(p.offset, &mut raw);
                assert_eq!(raw, expected[at..at + p.len]);
                at += p.len;
            });
        }
    }
}

/// Copies what of `bytes` at `from` lies within `target` at `start`.
fn overlay(start: u64, target: &mut [u8], from: u64, bytes: &[u8]) {
    for (i, byte) in bytes.iter().enumerate() {
        if let Some(at) = (from + i as u64).checked_sub(start)
            && let Some(place) = target.get_mut(at as usize)
        {
            *place = *byte;
        }
    }
}

#[test]
fn a_batch_runs_over_all_devices_and_names_the_first_failure() {
    let sims = Sims::new(&UNEQUAL, 1);
    let array = create(sims.members(), 4096);
    let data = AlignedBuf::from_slice(&noise(1, 6 * 4096));
    sims.devices[1].fail_writes(device::sim::Times::Always, None);
    let mut batch: Vec<Io<'_>> = (0..6)
        .map(|i| Io::Write {
            byte: i as u64 * 4096,
            buf: &data[i * 4096..(i + 1) * 4096],
            durability: Durability::Volatile,
        })
        .collect();
    let error = array.execute(&mut batch).unwrap_err();
    // Block 1 is the first on device 1.
    assert!(
        matches!(&error, Error::Io { device, operation: "write", offset: 65_536, len: 4096, .. }
            if device == "sim2"),
        "{error}"
    );
    assert_eq!(error.raw_os_error(), Some(5));
    // The others were attempted: the writes to devices 0 and 2 are there.
    for block in [0u64, 2, 3, 5] {
        let mut read = vec![0; 4096];
        array.read(block * 4096, &mut read).unwrap();
        assert_eq!(read, data[block as usize * 4096..][..4096]);
    }
    let stats = array.stats();
    assert_eq!(stats.devices[1].errors, 2);
    assert_eq!(stats.devices[0].backend, "simulated");
}

#[test]
fn addresses_out_of_range_or_off_alignment_are_refused_before_any_io() {
    let sims = Sims::new(&UNEQUAL, 1);
    let array = create(sims.members(), 4096);
    let before = sims.switch.operations();
    let mut buf = vec![0; 1024];
    let limit = array.bytes();
    for byte in [limit, limit - 512, u64::MAX - 511] {
        let error = array.read(byte, &mut buf).unwrap_err();
        assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
    }
    let error = array.read(100, &mut buf).unwrap_err();
    assert!(matches!(error, Error::Misaligned { .. }), "{error}");
    let error = array.read(512, &mut buf[..100]).unwrap_err();
    assert!(matches!(error, Error::Misaligned { .. }), "{error}");
    assert_eq!(sims.switch.operations(), before);
    array.read(0, &mut []).unwrap();
}

#[test]
fn a_slot_is_on_two_devices_and_one_copy_is_enough() {
    let sims = Sims::new(&UNEQUAL, 1);
    let array = create(sims.members(), 4096);
    for slot in 0..2 {
        let block = noise(slot as u64, 4096);
        array.write_slot(slot, &block).unwrap();
        for copy in 0..2 {
            assert_eq!(array.read_slot(slot, copy).unwrap()[..], block[..]);
        }
        let mut raw = vec![0; 4096];
        sims.devices[0].peek((1 + slot as u64) * 4096, &mut raw);
        assert_eq!(raw, block);
        sims.devices[1].peek(UNEQUAL[1] - (3 - slot as u64) * 4096, &mut raw);
        assert_eq!(raw, block);
    }
    assert!(array.write_slot(0, &[0; 512]).is_err());
    assert!(matches!(
        array.read_slot(2, 0),
        Err(Error::NoSlot { slot: 2, copy: 0 })
    ));
    // Durable at once, without a flush.
    assert_eq!(sims.devices[0].volatile_bytes(), 0);
    assert_eq!(sims.devices[1].volatile_bytes(), 0);
}

#[test]
fn a_read_only_array_changes_nothing() {
    let sims = Sims::new(&UNEQUAL, 1);
    create(sims.members(), 4096).write_labels().unwrap();
    let array = device::Array::assemble(sims.members(), true).unwrap();
    let before: Vec<_> = sims.devices.iter().map(|d| d.snapshot()).collect();
    assert!(array.read_only());
    let refused = array.write(0, &[1; 512], Durability::Durable);
    assert!(matches!(refused, Err(Error::ReadOnly)));
    assert!(matches!(
        array.write_slot(0, &[1; 4096]),
        Err(Error::ReadOnly)
    ));
    assert!(matches!(array.discard(0, 4096), Err(Error::ReadOnly)));
    assert!(matches!(array.write_labels(), Err(Error::ReadOnly)));
    let operations = sims.switch.operations();
    array.flush().unwrap();
    assert_eq!(sims.switch.operations(), operations);
    let after: Vec<_> = sims.devices.iter().map(|d| d.snapshot()).collect();
    assert_eq!(before, after);
}

#[test]
fn a_discarded_range_leaves_its_neighbours_alone() {
    let sims = Sims::new(&UNEQUAL, 3);
    let array = create(sims.members(), 128 << 10);
    let data = noise(9, 8 << 20);
    array.write(0, &data, Durability::Volatile).unwrap();
    array.flush().unwrap();
    array.discard(1 << 20, 4 << 20).unwrap();
    let mut read = vec![0; data.len()];
    array.read(0, &mut read).unwrap();
    assert_eq!(read[..1 << 20], data[..1 << 20]);
    assert_eq!(read[5 << 20..], data[5 << 20..]);
    assert!(array.bytes() < 1 << 30);
    array.discard(0, array.bytes()).unwrap();
}

/// Two file systems, or one and its repair, would write where the other does.
#[test]
fn one_at_a_time_writes_to_an_array() {
    let array = Arc::new(create(Sims::new(&UNEQUAL, 4).members(), 128 << 10));
    let writer = array.writer().unwrap();
    assert!(matches!(array.writer(), Err(Error::InUse { .. })));
    drop(writer);
    drop(array.writer().unwrap());
    array.writer().unwrap();
}

/// Only the array knew, not its devices.
#[test]
fn one_at_a_time_writes_to_devices_whatever_arrays_they_are_in() {
    let sims = Sims::new(&UNEQUAL, 5);
    let array = create(sims.members(), 128 << 10);
    array.write_labels().unwrap();
    let in_use = |done: Result<(), Error>, by: &str| match done {
        Err(Error::InUse { device }) => assert_eq!(device, by),
        other => panic!("{other:?}"),
    };
    let others = || {
        Topology::ALL.map(|topology| {
            let devices = topology.over(sims.members()).unwrap();
            Array::assemble(devices, false).unwrap()
        })
    };
    let writer = array.writer().unwrap();
    let before: Vec<_> = sims.devices.iter().map(|d| d.snapshot()).collect();
    for other in others() {
        in_use(other.writer().map(drop), "sim5");
        in_use(other.write_labels(), "sim5");
        let same = other.identity();
        in_use(other.with_identity(same).map(drop), "sim5");
    }
    let members = sims.members();
    let made = Array::create(members, plan(&UNEQUAL, 4096), "other", [1; 16], [7; 16]);
    in_use(made.map(drop), "sim5");
    let after: Vec<_> = sims.devices.iter().map(|d| d.snapshot()).collect();
    assert_eq!(before, after);
    drop(writer);
    // Who cannot have all has none.
    let fourth = SimDevice::new(40 << 20, 8);
    let last: Vec<Arc<dyn BlockDevice>> = vec![fourth, Arc::clone(&sims.devices[2]) as _];
    let writer = create(last, 4096).writer().unwrap();
    in_use(array.writer().map(drop), "sim7");
    in_use(array.writer().map(drop), "sim7");
    drop(writer);
    array.writer().unwrap();
}
