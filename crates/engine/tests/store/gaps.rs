//! A device does not return a sector of the journal's ring.

use crate::damage::{ARRAY_START, SECTOR, batches, cut_after_syncs, looked_at};
use crate::world::{World, create};
use device::sim::{Odds, Times};
use engine::{Error, Object, SalvageError, Severity};
use format::journal::BatchHeader;
use zerocopy::FromBytes;

/// The sector that has this byte goes bad: it is not returned until it is written.
fn fail(world: &World, place: u64) {
    let array = world.array();
    let device = &world.devices[0];
    device.set_odds(Odds {
        latent_error: 1,
        ..Odds::default()
    });
    let start = (place - ARRAY_START) / SECTOR as u64 * SECTOR as u64;
    array.read(start, &mut [0; SECTOR]).unwrap_err();
    device.set_odds(Odds::default());
}

/// How many nodes of [`cut_after_syncs`] there are: the first ones.
fn nodes(world: &World) -> usize {
    let (_, nodes) = world.verify();
    let mut numbers: Vec<u64> = nodes.values().map(|node| node.0[0]).collect();
    numbers.sort_unstable();
    assert!(numbers.iter().copied().eq(0..numbers.len() as u64));
    numbers.len()
}

/// What a read-only mount finds wrong.
fn found(world: &World) -> Vec<Object> {
    let (findings, _) = world.verify();
    let errors = findings
        .into_iter()
        .filter(|f| f.severity == Severity::Error);
    errors.map(|finding| finding.object).collect()
}

/// Where the batch ends that begins there.
fn end_of(world: &World, place: u64) -> u64 {
    let mut bytes = [0; BatchHeader::SIZE];
    world.devices[0].peek(place, &mut bytes);
    let header = BatchHeader::read_from_bytes(&bytes).unwrap();
    let len = BatchHeader::SIZE as u64 + u64::from(header.len.get());
    place + len.next_multiple_of(SECTOR as u64)
}

fn hash(world: &World) -> u64 {
    world.devices[0].contents_hash()
}

/// Makes what a repair makes of a store without data; returns what it says of the journal.
fn repair(world: &World) -> Vec<String> {
    let mut salvage = world.salvage().unwrap();
    let losses: Vec<_> = salvage.losses().to_vec();
    for loss in &losses {
        assert!(loss.object == Object::Journal && loss.lost && !loss.kept);
    }
    salvage.set_space(|_| Vec::new(), |_| false).unwrap();
    salvage.publish().unwrap();
    losses.into_iter().map(|loss| loss.what).collect()
}

/// The store is used, the power goes, and what was synced is there.
fn goes_on(world: &mut World, context: &str) {
    let before = world.check(context).len();
    let open = |world: &World| {
        let opened = world.open();
        opened.unwrap_or_else(|error| panic!("{context}: {error}"))
    };
    // Twice: once it has written nothing to the journal.
    drop(open(world));
    world.switch.cut_now();
    world.switch.restore();
    let store = open(world);
    let nid = create(&store, vec![3; 100]).unwrap();
    store.sync().unwrap();
    drop(store);
    world.switch.cut_now();
    // What was not written is as bad as before.
    world.switch.restore();
    let store = open(world);
    assert_eq!(store.get(nid).unwrap().into_read().unwrap().0, [3; 100]);
    store.close().unwrap();
    assert_eq!(world.check(context).len(), before + 1);
}

/// Where the next batch would be, and what follows that.
const BEHIND: [u64; 4] = [0, 512, 4096, 700 << 10];

/// It was read before anything else, by mounts, read-only ones too, and by repairs: none could be made any more, for bytes that mean nothing.
#[test]
fn of_an_empty_journal_no_sector_is_needed() {
    for behind in BEHIND {
        let mut world = cut_after_syncs(81, 3);
        world.open().unwrap().close().unwrap();
        let (last, _) = *batches(&world).last().unwrap();
        fail(&world, end_of(&world, last) + behind);
        let context = format!("a sector {behind} bytes behind the end");
        assert_eq!(nodes(&world), 3, "{context}");
        let before = hash(&world);
        assert_eq!(world.salvage().unwrap().losses().len(), 0, "{context}");
        assert_eq!(hash(&world), before);
        goes_on(&mut world, &context);
    }
}

/// The power goes, and of the last batch a sector is not returned. Nobody knows whether it was whole, and acknowledged, or not.
#[test]
fn a_batch_that_is_not_returned_is_neither_there_nor_not_there() {
    for sector in [0, 7, 15] {
        let mut world = cut_after_syncs(82, 4);
        let (last, _) = *batches(&world).last().unwrap();
        fail(&world, last + sector * SECTOR as u64);
        let before = hash(&world);
        for _ in 0..2 {
            let Err(Error::Unread(error)) = world.open() else {
                panic!("sector {sector}");
            };
            assert!(matches!(*error, device::Error::Io { .. }));
        }
        assert_eq!(nodes(&world), 3);
        assert!(looked_at(&world).unread().is_some());
        assert_eq!(found(&world), [Object::Journal]);
        assert_eq!(hash(&world), before, "nothing was written");
        world.devices[0].heal();
        assert_eq!((nodes(&world), found(&world)), (4, Vec::new()));

        fail(&world, last + sector * SECTOR as u64);
        let said = repair(&world);
        assert!(
            said.len() == 1 && said[0].contains("cannot be read"),
            "{said:?}"
        );
        assert_eq!((nodes(&world), found(&world)), (3, Vec::new()));
        goes_on(&mut world, "after the repair");
    }
}

/// A look said that the next mount replays, which was refused.
#[test]
fn a_look_tells_of_a_sector_at_the_runs_end() {
    let world = cut_after_syncs(87, 4);
    let refused = |world: &World| engine::standing(&world.array()).unwrap().refused;
    assert_eq!(refused(&world), None);
    let (last, _) = *batches(&world).last().unwrap();
    fail(&world, end_of(&world, last));
    assert!(matches!(world.open(), Err(Error::Unread(_))));
    let told = refused(&world).unwrap_or_default();
    assert!(told.contains("cannot be read"), "{told:?}");
    world.devices[0].heal();
    assert_eq!(refused(&world), None);
    world.open().unwrap().close().unwrap();
}

/// Nothing lies there that anybody was told of: while a batch is on its way none behind it counts.
#[test]
fn behind_the_end_of_the_run_a_sector_says_nothing() {
    for behind in [512, 4096, 700 << 10] {
        let mut world = cut_after_syncs(83, 4);
        let (last, _) = *batches(&world).last().unwrap();
        fail(&world, end_of(&world, last) + behind);
        let context = format!("a sector {behind} bytes behind the end");
        assert_eq!(nodes(&world), 4, "{context}");
        assert_eq!(world.salvage().unwrap().losses().len(), 0, "{context}");
        goes_on(&mut world, &context);
    }
}

/// A later batch says that the one which is not returned was durable.
#[test]
fn a_batch_that_was_durable_and_is_not_returned_is_a_loss() {
    for sector in [0, 7] {
        let world = cut_after_syncs(84, 4);
        let batches = batches(&world);
        let (place, _) = batches[batches.len() - 2];
        fail(&world, place + sector * SECTOR as u64);
        let before = hash(&world);
        match world.open() {
            Err(Error::Damaged(damage)) => {
                let told = damage.to_string();
                assert!(
                    told.contains("was durable") && told.contains("failed"),
                    "{told}"
                );
            }
            other => panic!("{:?}", other.map(drop)),
        }
        match world.salvage() {
            Err(SalvageError::Unreadable(why)) => assert!(why.contains("was durable"), "{why}"),
            other => panic!("{:?}", other.map(drop)),
        }
        assert_eq!(hash(&world), before, "nothing was written");
        world.devices[0].heal();
        assert_eq!((nodes(&world), found(&world)), (4, Vec::new()));
    }
}

/// A device that fails for a moment has all of it.
#[test]
fn a_sector_that_is_returned_when_it_is_asked_for_again_is_no_gap() {
    for times in 1..4 {
        let world = cut_after_syncs(85, 4);
        let (last, _) = *batches(&world).last().unwrap();
        let sector = last..last + SECTOR as u64;
        world.devices[0].fail_reads(Times::Next(times), Some(sector));
        let store = world.open().unwrap();
        assert_eq!(world.devices[0].struck().len() as u64, times);
        store.close().unwrap();
        assert_eq!(nodes(&world), 4);
    }
}

/// Without any record nothing says what of the journal is needed.
#[test]
fn without_a_record_all_of_the_journal_is_needed() {
    let world = cut_after_syncs(86, 3);
    let (first, _) = batches(&world)[0];
    for slot in 0..2 {
        let zeros = vec![0; format::BLOCK_SIZE];
        world.array().write_slot(slot, &zeros).unwrap();
    }
    fail(&world, first);
    let opened = world.salvage();
    assert!(matches!(opened, Err(SalvageError::Unreadable(_))));
}
