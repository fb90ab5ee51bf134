use super::*;
use base::limited::MOST;
use device::sim::Times as Strikes;
use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, Subscriber, span};

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

#[test]
fn a_failed_write_is_reported_by_every_fsync_until_the_file_is_reopened() {
    let world = World::new(20, 64, 64);
    let m = world.mount();
    let (ino, other) = (m.make(), m.make());
    let (file, innocent) = (m.open(ino), m.open(other));
    m.write(&file, 0, &pattern(1, 20_000));
    m.files.fsync(&file, false).unwrap();
    m.commit_more();
    m.write(&file, 0, &pattern(2, 20_000));
    for device in &world.devices {
        device.fail_writes(Strikes::Always, None);
    }
    assert_eq!(m.files.fsync(&file, false).unwrap_err().errno(), libc::EIO);
    for device in &world.devices {
        device.heal();
    }
    assert_eq!(m.files.fsync(&file, false).unwrap_err().errno(), libc::EIO);
    assert_eq!(m.files.flush(&file).unwrap_err().errno(), libc::EIO);
    m.write(&innocent, 0, b"fine");
    m.files.fsync(&innocent, false).unwrap();
    let again = m.open(ino);
    m.files.fsync(&again, false).unwrap();
    assert_eq!(m.contents(ino), pattern(2, 20_000), "the pages were kept");
    assert_eq!(m.files.fsync(&file, false).unwrap_err().errno(), libc::EIO);
}

#[test]
fn data_that_cannot_be_written_is_given_up_at_the_last_close_and_not_silently() {
    let world = World::new(21, 64, 64);
    let m = world.mount();
    let before = m.free_blocks();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &pattern(1, 20_000));
    for device in &world.devices {
        device.fail_writes(Strikes::Always, None);
    }
    assert!(m.files.write_back(ino).is_err());
    drop(file);
    for device in &world.devices {
        device.heal();
    }
    assert_eq!(m.size(ino), 0);
    assert_eq!(m.free_blocks(), before);
    let file = m.open(ino);
    assert_eq!(
        m.files.fsync(&file, false).unwrap_err().errno(),
        libc::EIO,
        "nobody was told yet"
    );
    drop(file);
    m.files.fsync(&m.open(ino), false).unwrap();
}

/// Who only looked at it was the last to close it, and took it along.
#[test]
fn what_was_done_can_be_read_again_and_again_once_the_store_has_failed() {
    let world = World::new(28, 64, 64);
    let m = world.mount();
    let (ino, written) = (m.make(), pattern(1, 20_000));
    m.commit_more();
    let file = m.open(ino);
    m.write(&file, 0, &written);
    for device in &world.devices {
        device.fail_writes(Strikes::Always, None);
    }
    assert!(m.files.fsync(&file, false).is_err());
    assert!(m.store.failed().is_some());
    for device in &world.devices {
        device.heal();
    }
    drop(file);
    for _ in 0..3 {
        assert_eq!(m.contents(ino), written);
        assert!(m.files.fsync(&m.open(ino), false).is_err());
    }
}

#[test]
fn a_failed_flush_is_latched_on_the_files_it_concerns() {
    let world = World::new(22, 64, 64);
    let m = world.mount();
    let (ino, other) = (m.make(), m.make());
    let (file, bystander) = (m.open(ino), m.open(other));
    for f in [&file, &bystander] {
        m.write(f, 0, &pattern(1, 73 * 4096));
        // Whole pages: nothing of it is logged.
        m.files.fsync(f, false).unwrap();
        m.commit_more();
        m.write(f, 0, &pattern(2, 73 * 4096));
        m.files.write_back(f.ino()).unwrap();
    }
    for device in &world.devices {
        device.fail_flushes(Strikes::Next(1));
    }
    assert_eq!(m.files.fsync(&file, false).unwrap_err().errno(), libc::EIO);
    assert_eq!(m.files.fsync(&file, false).unwrap_err().errno(), libc::EIO);
    assert_eq!(
        m.files.fsync(&bystander, false).unwrap_err().errno(),
        libc::EIO,
        "its data was in the same device's cache"
    );
    m.files.fsync(&m.open(ino), false).unwrap();
}

/// The flush that fsync of one file asks for fails, and with it goes what another had written to
/// fresh blocks. A later flush succeeds all the same, so the record that names those blocks was
/// committed, and fsync of the other file returned as if nothing had happened.
#[test]
fn a_failed_flush_stops_the_commit_of_data_that_it_may_have_lost() {
    let world = World::new(24, 64, 64);
    let m = world.mount();
    let (ino, other) = (m.make(), m.make());
    let (file, fresh) = (m.open(ino), m.open(other));
    m.write(&file, 0, &pattern(1, 20_000));
    m.files.fsync(&file, false).unwrap();
    m.commit_more();
    m.write(&fresh, 0, &pattern(2, 20_000));
    m.files.write_back(other).unwrap();
    m.write(&file, 0, &pattern(3, 20_000));
    m.files.write_back(ino).unwrap();
    for device in &world.devices {
        device.fail_flushes(Strikes::Next(1));
    }
    assert!(m.files.fsync(&file, false).is_err());
    assert!(m.files.fsync(&fresh, false).is_err());
    assert!(m.store.read_only());
}

/// A flush that somebody else asked for fails, and the next one succeeds: fsync of a file that
/// wrote in place before must not take that for a good sign.
#[test]
fn a_flush_that_failed_for_somebody_else_is_no_secret() {
    let world = World::new(25, 64, 64);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &pattern(1, 20_000));
    m.files.fsync(&file, false).unwrap();
    m.write(&file, 0, &pattern(2, 20_000));
    m.files.write_back(ino).unwrap();
    for device in &world.devices {
        device.fail_flushes(Strikes::Next(1));
    }
    assert!(m.store.flush().is_err());
    assert_eq!(m.files.fsync(&file, false).unwrap_err().errno(), libc::EIO);
    assert!(!m.store.read_only(), "no record named what is lost");
}

/// As before, and then the file is written again, in place: what it remembers is from before the first of its writes that nobody
/// has flushed, and not from before the last.
#[test]
fn a_write_after_a_flush_that_failed_does_not_hide_it() {
    let world = World::new(27, 64, 64);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &pattern(1, 20_480));
    m.files.write_back_all().unwrap();
    m.store.sync().unwrap();
    let write_home = |page: u64| {
        m.write(&file, page * PAGE, &pattern(page, 4096));
        m.files.write_back(ino).unwrap();
    };
    write_home(1);
    for device in &world.devices {
        device.fail_flushes(Strikes::Next(1));
    }
    assert!(m.store.flush().is_err());
    for device in &world.devices {
        device.heal();
    }
    write_home(3);
    assert_eq!(m.files.fsync(&file, true).unwrap_err().errno(), libc::EIO);
    assert!(!m.store.read_only(), "no record named what is lost");
}

/// A flush fails after a file's data was written to new blocks and before their record: no record waits, so the store goes on, but
/// what the record would name may be lost.
#[test]
fn blocks_are_not_logged_over_a_flush_that_failed_since_they_were_written() {
    let world = World::new(28, 64, 64);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &pattern(1, 20_480));
    let pages: Vec<u64> = (0..5).collect();
    let layout = m.files.lay_out(&file.state, &pages, false).unwrap();
    m.store.sync().unwrap();
    m.store.array().mark_all_unflushed();
    for device in &world.devices {
        device.fail_flushes(Strikes::Next(1));
    }
    assert!(m.store.flush().is_err() && !m.store.read_only());
    for device in &world.devices {
        device.heal();
    }
    let logged = m.files.log_stored(&file.state, layout, 20_480);
    assert_eq!(logged.unwrap_err().errno(), libc::EIO);
    assert_eq!(m.inode(ino).size, 0);
    m.files.fsync(&file, false).unwrap();
    assert_eq!(m.contents(ino), pattern(1, 20_480));
}

/// As before, and then the file grows. Its record took what had been overwritten before for
/// flushed by the commit, so fsync returned as if nothing had happened.
#[test]
fn a_record_does_not_hide_a_flush_that_failed_before_it() {
    let world = World::new(26, 64, 64);
    let m = world.mount();
    let file = m.open(m.make());
    m.write(&file, 0, &pattern(1, 20_000));
    m.files.fsync(&file, false).unwrap();
    m.write(&file, 0, &pattern(2, 20_000));
    m.files.write_back(file.ino()).unwrap();
    for device in &world.devices {
        device.fail_flushes(Strikes::Next(1));
    }
    assert!(m.store.flush().is_err());
    m.write(&file, 20_000, &pattern(3, 20_000));
    assert_eq!(m.files.fsync(&file, false).unwrap_err().errno(), libc::EIO);
    assert!(!m.store.read_only(), "no record named what is lost");
}

/// A flush went on while a file it was for was deleted, and its nid given to another that wrote in
/// place as well. The end of the flush took that one off the list, so when the next flush failed
/// the new file was not told: its fsync after that returned as if nothing had happened.
#[test]
fn a_deleted_file_takes_no_other_off_the_list_of_those_to_flush() {
    let world = World::new(27, 64, 64);
    let m = world.mount();
    let overwritten = || {
        let file = m.open(m.make());
        m.write(&file, 0, &pattern(1, 20_000));
        m.files.fsync(&file, false).unwrap();
        m.write(&file, 0, &pattern(2, 20_000));
        m.files.write_back(file.ino()).unwrap();
        file
    };
    let old = overwritten();
    let (ino, deleted) = (old.ino(), old.state.clone());
    drop(old);
    m.delete(ino);
    let new = overwritten();
    assert_eq!(new.ino(), ino, "the nid is used again");
    let other = overwritten();
    m.files.forget_unflushed(&deleted);
    for device in &world.devices {
        device.fail_flushes(Strikes::Next(1));
    }
    assert!(m.files.fsync(&other, false).is_err());
    assert_eq!(m.files.fsync(&new, false).unwrap_err().errno(), libc::EIO);
}

/// Of the kernel's write and flush in one it is not known which of them failed. If it was the flush, what another file had
/// written in place went with it, and a later flush that succeeds says nothing of that. Nor does it tell that the write fails again, as a link
/// that was reset fails both: such a file was told that all is well.
#[test]
fn a_durable_write_that_fails_may_have_been_the_flush_of_others() {
    for times in [Strikes::Next(1), Strikes::Always] {
        let world = World::new(28, 64, 64);
        let m = world.mount();
        let (file, other) = (m.open(m.make()), m.open(m.make()));
        for f in [&file, &other] {
            m.write(f, 0, &pattern(1, 20_000));
            m.files.fsync(f, false).unwrap();
            m.write(f, 0, &pattern(2, 4096));
        }
        m.files.write_back(other.ino()).unwrap();
        for device in &world.devices {
            device.fail_writes(times, None);
        }
        assert_eq!(m.files.fsync(&file, false).unwrap_err().errno(), libc::EIO);
        for device in &world.devices {
            device.heal();
        }
        assert_eq!(m.files.fsync(&other, false).unwrap_err().errno(), libc::EIO);
        assert!(!m.store.read_only(), "no record named what is lost");
        let again = m.open(file.ino());
        m.files.fsync(&again, false).unwrap();
    }
}

/// Flips a byte in every image of an extent leaf that the devices hold.
fn damage_extent_leaves(world: &World) -> usize {
    use format::item::{ITEM_ALIGN, ItemHeader, ItemKind};
    use zerocopy::FromBytes;
    let mut damaged = 0;
    let seed = world.devices[0].checksum_seed();
    for device in &world.devices {
        let mut buf = vec![0; 32 << 20];
        device.peek(0, &mut buf);
        for at in (0..buf.len() - ItemHeader::SIZE).step_by(ITEM_ALIGN) {
            let (header, _) = ItemHeader::read_from_prefix(&buf[at..]).unwrap();
            let leaf = header.kind == ItemKind::Node as u8
                && header.node_kind == format::inode::KIND_EXTENTS
                && format::item::decode(seed, &buf[at..]).is_ok();
            if leaf {
                let byte = at + ItemHeader::SIZE + 8;
                device.poke(byte as u64, &[!buf[byte]]);
                damaged += 1;
            }
        }
    }
    damaged
}

#[test]
fn a_file_with_a_damaged_tree_is_read_as_far_as_possible_and_can_be_deleted() {
    let mut world = World::new(23, 64, 2048);
    let m = world.mount();
    let (ino, other) = (m.make(), m.make());
    for ino in [ino, other] {
        let file = m.open(ino);
        m.write(&file, 0, &pattern(1, 10_000));
        if ino != other {
            (0..2000u64).for_each(|i| m.write(&file, i * 2 * PAGE, b"x"));
        }
    }
    m.close();
    assert!(damage_extent_leaves(&world) > 0);
    world.options.read_ahead = 0;
    let m = world.mount();
    let file = m.open(ino);
    let mut buf = [0; 10];
    let mut failed = 0;
    for i in 0..2000u64 {
        match m.files.read(&file, i * 2 * PAGE, &mut buf) {
            Ok(_) => assert_eq!(buf[0], b'x', "no silent zeros"),
            Err(error) => {
                assert_eq!(error.errno(), libc::EIO);
                failed += 1;
            }
        }
    }
    assert!(failed > 0);
    drop(file);
    assert_eq!(m.contents(other), pattern(1, 10_000));
    m.delete(ino);
    m.close();
}

#[test]
fn a_file_that_could_not_be_cut_keeps_its_size() {
    // The smaller size was shown but not logged: a sync that succeeded did not make it durable, and a
    // crash brought the larger one back.
    let mut world = World::new(27, 256, 4096);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    let pages = 6_000;
    for page in (0..pages).step_by(2) {
        m.write(&file, page * PAGE, &pattern(page, 100));
    }
    m.files.fsync(&file, false).unwrap();
    let whole = m.contents(ino);
    drop(file);
    m.close();
    let m = world.mount();
    let file = m.open(ino);
    // The page that the cut would end in is in memory.
    assert_eq!(m.files.read(&file, 6 * PAGE, &mut [0; 100]).unwrap(), 100);
    for device in &world.devices {
        device.fail_reads(Strikes::Always, None);
    }
    m.files.truncate(ino, 6 * PAGE + 9).unwrap_err();
    for device in &world.devices {
        device.heal();
    }
    assert_eq!(m.contents(ino), whole);
    m.files.fsync(&file, false).unwrap();
    // What was written and not synced is gone with the pages, and its writer is told.
    m.write(&file, 0, &pattern(0, 100));
    m.write(&file, 8 * PAGE, &pattern(9, 100));
    for device in &world.devices {
        device.fail_reads(Strikes::Always, None);
    }
    m.store.checkpoint().unwrap();
    m.files.truncate(ino, 7 * PAGE + 9).unwrap_err();
    for device in &world.devices {
        device.heal();
    }
    assert_eq!(m.files.fsync(&file, false).unwrap_err().errno(), libc::EIO);
    assert_eq!(m.contents(ino), whole);
    drop((file, m));
    world.restart(&mut Rng::new(3));
    let m = world.mount();
    assert_eq!(m.contents(ino), whole);
    m.files.truncate(ino, 7 * PAGE + 9).unwrap();
    m.close();
    world.mount().check(ino);
}

/// It showed, behind its logged end, what its last block had held when the file was longer.
#[test]
fn a_file_that_could_not_be_cut_shows_nothing_behind_its_end() {
    let world = World::new(30, 256, 4096);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    let last = 6_000;
    for page in (0..last).step_by(2) {
        m.write(&file, page * PAGE, &pattern(page, 100));
    }
    m.write(&file, last * PAGE, &pattern(last, PAGE as usize));
    m.files.fsync(&file, false).unwrap();
    m.files.truncate(ino, last * PAGE + 10).unwrap();
    m.files.fsync(&file, false).unwrap();
    let whole = m.contents(ino);
    drop(file);
    m.close();
    let m = world.mount();
    let file = m.open(ino);
    m.write(&file, last * PAGE + 10, &[7; 2000]);
    for device in &world.devices {
        device.fail_reads(Strikes::Always, None);
    }
    m.files.truncate(ino, 7 * PAGE + 9).unwrap_err();
    for device in &world.devices {
        device.heal();
    }
    assert_eq!(m.contents(ino), whole);
    assert_eq!(m.files.fsync(&file, false).unwrap_err().errno(), libc::EIO);
    m.write(&file, last * PAGE + 100, &[7]);
    let contents = m.contents(ino);
    assert!(contents[whole.len()..][..90].iter().all(|&b| b == 0));
}

/// A cut stopped half way, and the file grew: whoever finished the cut freed what had been added.
#[test]
fn what_is_added_behind_an_unfinished_cut_stays() {
    for remounted in [false, true] {
        let world = World::new(28, 64, 4096);
        let mut m = world.mount();
        let ino = m.make();
        let file = m.open(ino);
        (0..2000).for_each(|i| m.write(&file, i * 2 * PAGE, b"x"));
        m.files.fsync(&file, false).unwrap();
        let mut bytes = m.contents(ino);
        bytes.truncate(4 * PAGE as usize);
        drop(file);
        m.close();
        m = world.mount();
        let mut file = m.open(ino);
        m.files.test_begin_chain(&file.state, 4 * PAGE).unwrap();
        file.state.meta.lock().size = 4 * PAGE;
        if remounted {
            drop(file);
            m.close();
            m = world.mount();
            file = m.open(ino);
        }
        // It need not wait for that.
        m.write(&file, 0, b"y");
        bytes[0] = b'y';
        assert!(m.inode(ino).seldom.pending_truncate.is_some());
        m.write(&file, 4 * PAGE, &[7; 20_000]);
        bytes.extend([7; 20_000]);
        m.files.fsync(&file, false).unwrap();
        m.files.finish_chain(&m.store.get(ino).unwrap()).unwrap();
        drop(file);
        m.close();
        let m = world.mount();
        assert_eq!(m.contents(ino), bytes);
        m.check(ino);
    }
}

/// With a cut still pending a file was neither cut to nothing nor marked as being replaced.
#[test]
fn a_file_with_a_pending_cut_is_cut_to_nothing() {
    let world = World::new(29, 64, 256);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    m.write(&file, 0, &pattern(1, 40_000));
    m.files.fsync(&file, false).unwrap();
    m.files.test_begin_chain(&file.state, 5 * PAGE).unwrap();
    {
        let mut meta = file.state.meta.lock();
        (meta.size, meta.cutting) = (5 * PAGE, false);
    }
    m.files.truncate(ino, 0).unwrap();
    m.files.fsync(&file, false).unwrap();
    drop(file);
    m.close();
    let m = world.mount();
    assert_eq!((m.size(ino), m.check(ino)), (0, 0));
}

/// A file of many extents, home, in memory with the leaf of its first page and that of page `at`, which both are dirty.
fn dirty_in_two_leaves(world: &World, at: u64) -> (Mounted, Arc<OpenFile>) {
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    for page in 0..3000 {
        m.write(&file, page * 2 * PAGE, &[1; PAGE as usize]);
    }
    m.files.fsync(&file, false).unwrap();
    drop(file);
    m.close();
    let m = world.mount();
    let file = m.open(ino);
    for page in [0, at] {
        m.write(&file, page * PAGE, &[2; PAGE as usize]);
    }
    (m, file)
}

fn first_byte(m: &Mounted, file: &OpenFile, page: u64) -> u8 {
    let mut buf = [0xEE; PAGE as usize];
    assert_eq!(m.files.read(file, page * PAGE, &mut buf).unwrap(), 4096);
    assert!(buf.iter().all(|byte| *byte == buf[0]));
    buf[0]
}

/// What had been written was thrown away, and what the blocks held before came back, though every fsync succeeded.
#[test]
fn a_punch_that_fails_half_way_takes_no_page_whose_block_stays() {
    let at = 5000;
    let mut world = World::new(31, 128, 4096);
    let (m, file) = dirty_in_two_leaves(&world, at);
    // In the cache, clean.
    assert_eq!(first_byte(&m, &file, 2), 1);
    for device in &world.devices {
        device.fail_reads(Strikes::Always, None);
    }
    m.files.fallocate(&file, PUNCH, 0, 6000 * PAGE).unwrap_err();
    for device in &world.devices {
        device.heal();
    }
    let look = |m: &Mounted, file: &OpenFile| [0, 2, at].map(|page| first_byte(m, file, page));
    assert_eq!(look(&m, &file), [0, 0, 2]);
    m.files.fsync(&file, false).unwrap();
    assert_eq!(look(&m, &file), [0, 0, 2]);
    let ino = file.ino();
    drop((file, m));
    world.restart(&mut Rng::new(31));
    let m = world.mount();
    let file = m.open(ino);
    assert_eq!(look(&m, &file), [0, 0, 2]);
    m.files.fallocate(&file, PUNCH, 0, 6000 * PAGE).unwrap();
    assert_eq!(look(&m, &file), [0, 0, 0]);
    assert_eq!((m.check(ino), m.files.dirty_pages()), (0, 0));
    drop(file);
    m.close();
}

/// It wrote the file's other pages home first; when that failed, those in the hole were gone, and their blocks were not.
#[test]
fn a_punch_needs_no_device_that_takes_writes() {
    let world = World::new(32, 128, 4096);
    let m = world.mount();
    let file = m.open(m.make());
    m.write(&file, 0, &[1; 64 * PAGE as usize]);
    m.files.fsync(&file, false).unwrap();
    m.commit_more();
    m.write(&file, 0, &[2; 70 * PAGE as usize]);
    for device in &world.devices {
        device.fail_writes(Strikes::Always, None);
    }
    m.files.fallocate(&file, PUNCH, 0, 32 * PAGE).unwrap();
    m.files
        .fallocate(&file, PUNCH, 60 * PAGE, 7 * PAGE)
        .unwrap();
    for device in &world.devices {
        device.heal();
    }
    let look = |m: &Mounted, file: &OpenFile| {
        [0, 31, 32, 59, 60, 66, 67, 69].map(|page| first_byte(m, file, page))
    };
    assert_eq!(look(&m, &file), [0, 0, 2, 2, 0, 0, 2, 2]);
    m.files.fsync(&file, false).unwrap();
    let ino = file.ino();
    drop(file);
    assert_eq!(m.check(ino), 31);
    m.close();
    let m = world.mount();
    assert_eq!(look(&m, &m.open(ino)), [0, 0, 2, 2, 0, 0, 2, 2]);
}

/// What could not be written, neither kept in a full cache nor put to its block, made the file longer by zeros, and an fsync made them stay.
#[test]
fn a_write_that_failed_makes_no_file_longer() {
    let mut world = World::new(33, 64, 16);
    let m = world.mount();
    let others: Vec<_> = (0..40).map(|_| m.open(m.make())).collect();
    let ino = m.make();
    let file = m.open(ino);
    for device in &world.devices {
        device.fail_writes(Strikes::Always, None);
    }
    for other in &others {
        // As many as the cache takes.
        let _ = m.files.write(other, 0, &[1; PAGE as usize]);
    }
    let error = m.files.write(&file, 0, &[2; PAGE as usize]).unwrap_err();
    assert_eq!(error.errno(), libc::EIO);
    assert_eq!((m.size(ino), file.state.meta.lock().promised), (0, 0));
    for device in &world.devices {
        device.heal();
    }
    m.files.fsync(&m.open(ino), false).unwrap();
    assert_eq!(m.inode(ino).size, 0);
    // The same, and it succeeds.
    m.write(&file, 0, &[3; PAGE as usize]);
    assert_eq!(m.size(ino), PAGE);
    m.files.fsync(&m.open(ino), false).unwrap();
    drop((others, file, m));
    world.restart(&mut Rng::new(33));
    let m = world.mount();
    assert_eq!(m.contents(ino), [3; PAGE as usize]);
}

/// It kept nothing in its inode any more, where who has a small file can write over it on a full disk.
#[test]
fn a_small_file_stays_in_its_inode_when_it_gets_no_blocks() {
    let world = World::new(34, 64, 64);
    let m = world.mount();
    let ino = m.make();
    let file = m.open_direct(ino);
    let small = |seed| {
        let buffered = m.open(ino);
        m.write(&buffered, 0, &pattern(seed, 100));
        m.files.fsync(&buffered, false).unwrap();
        assert!(m.contents(ino) == pattern(seed, 100));
        assert_eq!(m.inode(ino).body, Body::Inline(pattern(seed, 100)));
    };
    small(1);
    let written = || m.files.counts().data_bytes.load(Ordering::Relaxed);
    let before = written();
    let error = m.files.fallocate(&file, 0, 0, 1 << 40).unwrap_err();
    assert_eq!(error.errno(), libc::ENOSPC);
    assert_eq!(written(), before, "nothing is moved out");
    small(2);
    for device in &world.devices {
        device.fail_writes(Strikes::Always, None);
    }
    let page = [3; PAGE as usize];
    assert!(m.files.write(&file, 0, &page).is_err());
    assert!(m.files.write(&file, PAGE, &page).is_err());
    let halves = page.split_at(1000);
    let halves = [halves.0, halves.1].map(std::io::IoSlice::new);
    assert!(m.files.write_vectored(&file, PAGE, &halves).is_err());
    for device in &world.devices {
        device.heal();
    }
    assert_eq!(m.files.fsync(&file, false).unwrap_err().errno(), libc::EIO);
    small(4);
}

/// All dirty pages behind one whose block cannot be written stayed in memory, and the last close dropped them.
#[test]
fn a_block_that_cannot_be_written_costs_its_own_page_and_no_other() {
    let world = World::new(36, 64, 4096);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    let (pages, bad) = (2010, 10);
    let overwrite = |turn: u8| {
        (bad..pages).for_each(|page| m.write(&file, page * PAGE, &[turn; PAGE as usize]));
    };
    m.write(&file, 0, &vec![1; (pages * PAGE) as usize]);
    m.files.write_back_all().unwrap();
    m.commit_more();
    let block = m.files.mapped(&file.state, bad..bad + 1).unwrap()[0].block;
    let geometry = m.store.array().geometry();
    geometry.pieces(block.byte(), BLOCK_SIZE, |piece| {
        let range = piece.offset..piece.offset + piece.len as u64;
        world.devices[piece.device].fail_writes(Strikes::Always, Some(range));
    });
    overwrite(2);
    // By write-back, whose failure nobody was told of, and by two syncs.
    assert!(m.files.write_back(ino).is_err());
    for _ in 0..2 {
        assert_eq!(m.files.fsync(&file, false).unwrap_err().errno(), libc::EIO);
        assert_eq!(m.files.dirty_pages(), 1);
    }
    // And by the last close. What makes the file longer needs a record, and is given up.
    overwrite(3);
    m.write(&file, pages * PAGE, &[3; 3 * PAGE as usize]);
    drop(file);
    assert_eq!((m.files.dirty_pages(), m.size(ino)), (0, pages * PAGE));
    for device in &world.devices {
        device.heal();
    }
    m.close();
    let m = world.mount();
    let file = m.open(ino);
    for page in (0..pages).filter(|page| *page != bad) {
        let turn = if page < bad { 1 } else { 3 };
        assert_eq!(first_byte(&m, &file, page), turn, "page {page}");
    }
    assert_eq!((m.size(ino), m.check(ino)), (pages * PAGE, pages));
}

/// Only the drop of a handle gave up: what failed later was tried once a second until the unmount, and failed each sync.
#[test]
fn data_of_a_closed_file_that_cannot_be_written_is_given_up_after_a_while_and_not_silently() {
    let world = World::new(37, 64, 64);
    let m = world.mount();
    let before = m.free_blocks();
    let (ino, opened) = (m.make(), m.make());
    m.commit_more();
    let gone = Arc::new(base::sync::Mutex::new(base::sync::rank::LEAF, Vec::new()));
    let told: Arc<crate::Gone> = {
        let gone = Arc::clone(&gone);
        Arc::new(move |ino| gone.lock().push(ino))
    };
    m.files.tell_gone(Arc::downgrade(&told));
    let file = m.open(opened);
    m.write(&m.open(ino), 0, &pattern(1, 20_000));
    m.write(&file, 0, &pattern(2, 20_000));
    for device in &world.devices {
        device.fail_writes(Strikes::Always, None);
    }
    let seconds = |seconds| {
        for _ in 0..seconds {
            world.clock.advance(Duration::from_secs(1));
            // It is latched on the files.
            let _ = m.files.tick();
        }
    };
    seconds(30);
    assert_eq!((m.files.dirty_pages(), m.size(ino)), (10, 20_000));
    assert_eq!(*gone.lock(), []);
    seconds(10);
    assert_eq!(*gone.lock(), [ino]);
    assert!(m.store.failed().is_none());
    assert_eq!((m.files.dirty_pages(), m.size(ino)), (5, 0));
    for device in &world.devices {
        device.heal();
    }
    let sync = || {
        let told = m.files.losses_told();
        m.files.write_back_all()?;
        m.store.sync()?;
        m.files.check_losses(told)
    };
    assert_eq!(sync().unwrap_err().errno(), libc::EIO);
    sync().unwrap();
    // Who has a file open keeps it.
    assert_eq!(m.contents(opened), pattern(2, 20_000));
    let again = m.open(ino);
    assert_eq!(m.files.fsync(&again, false).unwrap_err().errno(), libc::EIO);
    drop(again);
    m.files.fsync(&m.open(ino), false).unwrap();
    drop(file);
    assert_eq!(m.free_blocks(), before - 5);
}

/// They stayed until the unmount, and who opened such a file was told of a loss that there was not.
#[test]
fn a_failure_that_a_later_try_made_good_leaves_nothing_behind() {
    let world = World::new(38, 64, 4096);
    let m = world.mount();
    let inos: Vec<Ino> = (0..20).map(|_| m.make()).collect();
    m.commit_more();
    let states = || m.files.table.inos().len();
    let before = states();
    for (seed, ino) in (0..).zip(&inos) {
        m.write(&m.open(*ino), 0, &pattern(seed, 20_000));
    }
    for device in &world.devices {
        device.fail_writes(Strikes::Always, None);
    }
    world.clock.advance(Duration::from_secs(6));
    assert!(m.files.tick().is_err());
    assert_eq!((m.files.dirty_pages(), states()), (100, before + 20));
    for device in &world.devices {
        device.heal();
    }
    world.clock.advance(Duration::from_secs(2));
    m.files.tick().unwrap();
    assert_eq!((m.files.dirty_pages(), states()), (0, before));
    let file = m.open(inos[0]);
    m.write(&file, 0, &pattern(30, 20_000));
    m.files.fsync(&file, false).unwrap();
    assert_eq!(m.contents(inos[1]), pattern(1, 20_000));
}

/// What the log is told meanwhile.
#[derive(Clone)]
struct Heard(Arc<Mutex<Vec<Line>>>);

#[derive(Clone, Default)]
struct Line {
    text: String,
    left_out: u64,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.text = format!("{value:?}");
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        assert_eq!(field.name(), "left_out");
        self.left_out = value;
    }
}

impl Subscriber for Heard {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        self.0.lock().push(line);
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// Each write to a full host told the log so three times: any user filled it.
#[test]
fn the_log_is_told_of_so_many_failed_writes_a_second_and_how_many_were_left_out() {
    let world = World::new(40, 64, 64);
    let m = world.mount();
    let inos: Vec<Ino> = (0..100).map(|_| m.make()).collect();
    m.commit_more();
    for device in &world.devices {
        device.fail_writes(Strikes::Always, None);
    }
    let heard = Heard(Arc::new(Mutex::new(rank::LEAF, Vec::new())));
    let lines = |seconds: u64| {
        world.clock.advance(Duration::from_secs(seconds));
        heard.0.lock().clear();
        for ino in &inos {
            let file = m.open(*ino);
            m.write(&file, 0, &pattern(1, 20_000));
            // And the close, which gives up.
            assert!(m.files.write_back(*ino).is_err());
        }
        heard.0.lock().clone()
    };
    tracing::subscriber::with_default(heard.clone(), || {
        for (seconds, most) in [(0, MOST as usize), (0, 0), (1, MOST as usize)] {
            let lines = lines(seconds);
            for (kind, each) in [("write-back of inode", 2), ("is given up", 1)] {
                let of_kind = lines.iter().filter(|line| line.text.contains(kind));
                let of_kind: Vec<&Line> = of_kind.collect();
                assert_eq!(of_kind.len(), most, "{kind}");
                // All but what was told of the two rounds before.
                let left_out = 2 * each * inos.len() as u64 - u64::from(MOST);
                let first = of_kind.first().map(|line| line.left_out);
                assert_eq!(first.unwrap_or(0), seconds * left_out, "{kind}");
            }
            assert!(lines.len() <= 3 * most);
        }
    });
}
