//! Large writes, one behind the other.

use super::*;
use crate::data::stream::Streams;
use base::atomic::{AtomicBool, Ordering};
use base::sync::{Mutex, rank};
use base::thread;
use device::sim::Times as Strikes;

const MIB: u64 = 1 << 20;
/// What goes through the cache first.
const RUN: u64 = 4 * MIB;

/// A world, mounted, with a file of so many MiB on its devices, and nothing of it dirty or vouched for.
fn with_file(mib: u64) -> (World, Mounted, Ino, Vec<u8>) {
    let world = World::new(1, 96, 8192);
    let m = world.mount();
    let ino = m.make();
    let content = pattern(2, (mib * MIB) as usize);
    let file = m.open(ino);
    m.write(&file, 0, &content);
    m.files.fsync(&file, false).unwrap();
    m.commit_more();
    drop(file);
    (world, m, ino, content)
}

/// Writes in requests of so many bytes; returns the bytes of them that went past the cache.
fn write_in(m: &Mounted, file: &OpenFile, content: &mut [u8], range: Range<u64>, by: u64) -> u64 {
    let before = m.files.streamed_bytes();
    let mut at = range.start;
    while at < range.end {
        let end = (at + by).min(range.end);
        let data = &mut content[at as usize..end as usize];
        data.iter_mut().for_each(|byte| *byte ^= 0x5A);
        m.write(file, at, data);
        at = end;
    }
    m.files.streamed_bytes() - before
}

#[test]
fn a_long_run_goes_past_the_cache_and_is_seen_by_all() {
    let (mut world, m, ino, mut content) = with_file(24);
    let file = m.open(ino);
    let past = write_in(&m, &file, &mut content, 0..24 * MIB, MIB);
    assert_eq!(past, 24 * MIB - RUN);
    assert_eq!(m.files.dirty_pages() as u64, RUN / PAGE);
    assert!(m.contents(ino) == content);
    // All of it again, over what is cached by now.
    let again = write_in(&m, &file, &mut content, 0..24 * MIB, MIB);
    assert_eq!(again, 24 * MIB - RUN);
    assert!(m.contents(ino) == content);
    m.files.fsync(&file, true).unwrap();
    drop(file);
    world.switch.cut_now();
    drop(m);
    world.restart(&mut Rng::new(3));
    let m = world.mount();
    assert!(m.contents(ino) == content, "what was synced is there");
    m.check(ino);
}

#[test]
fn what_is_no_run_goes_through_the_cache() {
    let (_world, m, ino, mut content) = with_file(24);
    let file = m.open(ino);
    let mut write = |range: Range<u64>, by| write_in(&m, &file, &mut content, range, by);
    assert_eq!(write(0..24 * MIB, 128 << 10), 0, "requests are small");
    assert_eq!(write(0..24 * MIB, 8 * MIB), 0, "requests are large");
    assert_eq!(write(PAGE / 2..20 * MIB, MIB), 0, "no whole pages");
    // A jump ends the run, and another one begins.
    assert_eq!(write(0..RUN, MIB), 0);
    assert_eq!(write(RUN + MIB..RUN + 2 * MIB, MIB), 0);
    assert_eq!(write(RUN + 2 * MIB..2 * RUN + MIB, MIB), 0);
    assert_eq!(write(2 * RUN + MIB..2 * RUN + 2 * MIB, MIB), MIB);
    assert!(m.contents(ino) == content);
}

#[test]
fn new_space_is_written_past_the_cache_too() {
    let (mut world, m, ino, mut content) = with_file(9);
    let file = m.open(ino);
    content.resize(20 << 20, 0);
    let past = write_in(&m, &file, &mut content, 0..20 * MIB, MIB);
    assert_eq!(past, 20 * MIB - RUN);
    assert_eq!(m.files.dirty_pages() as u64, RUN / PAGE);
    assert!(m.contents(ino) == content);
    // A hole, and what is behind it.
    content.resize(40 << 20, 0);
    assert_eq!(
        write_in(&m, &file, &mut content, 24 * MIB..34 * MIB, MIB),
        10 * MIB - RUN
    );
    assert!(m.contents(ino) == content[..34 << 20]);
    content.truncate(34 << 20);
    m.files.fsync(&file, true).unwrap();
    drop(file);
    world.switch.cut_now();
    drop(m);
    world.restart(&mut Rng::new(3));
    let m = world.mount();
    assert!(m.contents(ino) == content, "what was synced is there");
    m.check(ino);
}

/// As after any other rewrite of a file that was cut to nothing.
#[test]
fn a_file_that_is_written_anew_as_a_whole_is_old_or_new_after_a_crash() {
    for synced in [false, true] {
        let (mut world, m, ino, mut content) = with_file(12);
        let file = m.open(ino);
        m.files.truncate(ino, 0).unwrap();
        assert!(file.state.meta.lock().replaced);
        let mut new = pattern(9, 12 << 20);
        let past = write_in(&m, &file, &mut new, 0..12 * MIB, MIB);
        assert_eq!(past, 0);
        assert!(m.contents(ino) == new);
        if synced {
            m.files.fsync(&file, true).unwrap();
            // What follows has nothing to be kept together with.
            new.resize(14 << 20, 0);
            let past = write_in(&m, &file, &mut new, 12 * MIB..14 * MIB, MIB);
            assert_eq!(past, 2 * MIB);
            m.files.fsync(&file, true).unwrap();
            content = new;
        }
        drop(file);
        world.switch.cut_now();
        drop(m);
        world.restart(&mut Rng::new(3));
        let m = world.mount();
        assert!(m.contents(ino) == content, "synced: {synced}");
        m.check(ino);
    }
}

/// Who waits for slow devices now and then does not wait for what is dirty of the file besides.
#[test]
fn slow_devices_are_not_tried_with_much_that_lies_before() {
    let (_world, m, ino, mut content) = with_file(1);
    let file = m.open(ino);
    content.resize(90 << 20, 0);
    let slow = || {
        for _ in 0..200 {
            m.files.streams.note(1 << 20, 10_000_000);
        }
    };
    slow();
    let before = m.files.streamed_bytes();
    let past = write_in(&m, &file, &mut content, MIB..17 * MIB, MIB);
    assert_eq!(past, 0);
    assert_eq!(m.files.streamed_bytes(), before);
    m.files.fsync(&file, true).unwrap();
    // The next request but four is a probe.
    while !m.files.streams.is_probe() {}
    for _ in 0..59 {
        m.files.streams.is_probe();
    }
    let past = write_in(&m, &file, &mut content, 17 * MIB..30 * MIB, MIB);
    assert_eq!(past, MIB);
    assert!(m.contents(ino) == content[..30 << 20]);
}

#[test]
fn a_stream_ends_where_the_space_does() {
    let world = World::new(1, 64, 8192);
    let m = world.mount();
    let ino = m.make();
    let file = m.open(ino);
    let data = pattern(4, MIB as usize);
    let mut written = 0;
    let full = loop {
        match m.files.write(&file, written, &data) {
            Ok(more) => written += more as u64,
            Err(error) => break error,
        }
        assert!(written < 64 * MIB, "it holds more than there is");
    };
    assert!(matches!(full, Error::NoSpace), "{full}");
    assert!(m.files.streamed_bytes() > 16 * MIB);
    assert!(written > 24 * MIB, "{written}");
    assert_eq!(file.state.size(), written);
    let content = m.contents(ino);
    let mut pieces = content.chunks(MIB as usize);
    assert!(pieces.all(|piece| piece == &data[..piece.len()]));
    m.files.fsync(&file, true).unwrap();
    m.check(ino);
}

#[test]
fn beside_small_syncs_streams_keep_the_pace() {
    let (_world, m, ino, mut content) = with_file(12);
    m.files.fsync(&m.open(m.make()), false).unwrap();
    m.files.pace.note_sync(m.files.now_ns());
    let file = m.open(ino);
    assert_eq!(write_in(&m, &file, &mut content, 0..12 * MIB, MIB), 0);
}

#[test]
fn memory_at_any_address_is_written() {
    let (_world, m, ino, mut content) = with_file(10);
    let file = m.open(ino);
    write_in(&m, &file, &mut content, 0..RUN, MIB);
    let mut shifted = vec![0; MIB as usize + 1];
    for (at, first) in [(RUN, 0), (RUN + MIB, 1)] {
        let data = pattern(at, MIB as usize);
        shifted[first..first + data.len()].copy_from_slice(&data);
        m.write(&file, at, &shifted[first..first + data.len()]);
        content[at as usize..][..data.len()].copy_from_slice(&data);
    }
    assert_eq!(m.files.streamed_bytes(), 2 * MIB);
    assert!(m.contents(ino) == content);
}

#[test]
fn what_a_device_refuses_stays_in_the_cache() {
    let (world, m, ino, mut content) = with_file(10);
    let file = m.open(ino);
    write_in(&m, &file, &mut content, 0..RUN, MIB);
    m.files.fsync(&file, true).unwrap();
    for device in &world.devices {
        device.fail_writes(Strikes::Always, None);
    }
    let past = write_in(&m, &file, &mut content, RUN..RUN + MIB, MIB);
    assert_eq!(past, 0, "none of it counts as written");
    assert_eq!(m.files.dirty_pages() as u64, MIB / PAGE);
    let other = m.open(ino);
    m.files.fsync(&other, true).unwrap_err();
    for device in &world.devices {
        device.fail_writes(Strikes::Next(0), None);
    }
    assert!(m.contents(ino) == content);
    let _ = m.files.fsync(&other, true);
    assert_eq!(m.files.dirty_pages(), 0, "a later try has written it");
    assert!(m.contents(ino) == content);
}

#[test]
fn new_space_that_a_device_refuses_stays_in_the_cache() {
    let (world, m, ino, mut content) = with_file(10);
    let file = m.open(ino);
    write_in(&m, &file, &mut content, 0..10 * MIB, MIB);
    m.files.fsync(&file, true).unwrap();
    for device in &world.devices {
        device.fail_writes(Strikes::Always, None);
    }
    content.resize(11 << 20, 0);
    let past = write_in(&m, &file, &mut content, 10 * MIB..11 * MIB, MIB);
    assert_eq!(past, 0, "none of it counts as written");
    assert_eq!(m.files.dirty_pages() as u64, MIB / PAGE);
    assert!(m.contents(ino) == content);
    for device in &world.devices {
        device.fail_writes(Strikes::Next(0), None);
    }
    m.files.fsync(&file, true).unwrap();
    assert_eq!(m.files.dirty_pages(), 0);
    assert!(m.contents(ino) == content);
    m.check(ino);
}

#[test]
fn devices_that_take_long_are_asked_now_and_then() {
    let streams = Streams::default();
    let note = |ns, times| (0..times).for_each(|_| streams.note(1 << 20, ns));
    let past = |of: u64| {
        (0..of)
            .filter(|_| !streams.is_slow() || streams.is_probe())
            .count()
    };
    note(200_000, 10);
    assert_eq!(past(100), 100);
    // One that was held up for a second changes nothing.
    note(1_000_000_000, 1);
    assert_eq!(past(100), 100);
    note(5_000_000, 30);
    assert_eq!(past(128), 2);
    note(200_000, 30);
    assert_eq!(past(100), 100);
}

/// Reads in requests of so many bytes; returns the bytes of them that went past the cache.
fn read_in(m: &Mounted, file: &OpenFile, content: &[u8], range: Range<u64>, by: u64) -> u64 {
    let before = m.files.streamed_read_bytes();
    let mut at = range.start;
    while at < range.end {
        let end = (at + by).min(range.end);
        let mut buf = vec![0xEE; (end - at) as usize];
        assert_eq!(m.files.read(file, at, &mut buf).unwrap(), buf.len());
        assert!(buf == content[at as usize..end as usize], "at {at}");
        at = end;
    }
    m.files.streamed_read_bytes() - before
}

/// Mounted with a cache that has not room for the file's 24 MiB.
fn with_large_file() -> (World, Mounted, Ino, Vec<u8>) {
    let mut world = World::new(1, 96, 4096);
    // Pieces of streams are a part of that.
    world.options.read_ahead = MIB;
    world.options.cache_bytes = 4096 * BLOCK_SIZE * 2;
    let m = world.mount();
    let ino = m.make();
    let content = pattern(2, 48 << 20);
    let file = m.open(ino);
    m.write(&file, 0, &content);
    m.files.fsync(&file, false).unwrap();
    m.commit_more();
    m.files.pages.invalidate(file.state.key, 0..u64::MAX);
    drop(file);
    (world, m, ino, content)
}

#[test]
fn a_file_larger_than_the_cache_is_read_past_it() {
    let (_world, m, ino, content) = with_large_file();
    let file = m.open(ino);
    let past = read_in(&m, &file, &content, 0..48 * MIB, 256 << 10);
    assert!((45 * MIB..=46 * MIB).contains(&past), "{past}");
    drop(file);
    // What is cached leaves the stream where it is, and what is dirty is read from there.
    let file = m.open(ino);
    let mut content = content;
    let read = read_in(&m, &file, &content, 0..20 * MIB, 256 << 10);
    assert!(read >= 10 * MIB, "{read}");
    let other = m.open(ino);
    for at in [20 * MIB + PAGE, 21 * MIB, 24 * MIB + 100] {
        let data = pattern(at, 5000);
        m.write(&other, at, &data);
        content[at as usize..][..data.len()].copy_from_slice(&data);
    }
    read_in(&m, &file, &content, 20 * MIB..48 * MIB, 256 << 10);
}

#[test]
fn the_end_of_a_file_ends_no_run_and_a_seat_forgets_what_another_file_taught() {
    let (_world, m, ino, mut content) = with_large_file();
    let file = m.open(ino);
    let careful = || m.files.readers.careful();
    read_in(&m, &file, &content, 0..48 * MIB, 256 << 10);
    let mut long = vec![0; 256 << 10];
    assert_eq!(m.files.read(&file, 48 * MIB, &mut long).unwrap(), 0);
    assert_eq!(careful(), 0);
    drop(file);
    // Something that is on its way changes: pieces are looked at page by page.
    let file = m.open(ino);
    read_in(&m, &file, &content, 0..20 * MIB, 256 << 10);
    let other = m.open(ino);
    let data = pattern(3, 5000);
    let at = 20 * MIB + 100;
    m.write(&other, at, &data);
    content[at as usize..][..data.len()].copy_from_slice(&data);
    read_in(&m, &file, &content, 20 * MIB..24 * MIB, 256 << 10);
    assert!(careful() > 0);
    drop((file, other));
    let file = m.open(ino);
    read_in(&m, &file, &content, 0..20 * MIB, 256 << 10);
    assert_eq!(careful(), 0);
}

#[test]
fn a_file_that_the_cache_keeps_is_read_through_it() {
    let (_world, m, ino, content) = with_file(24);
    let file = m.open(ino);
    assert_eq!(read_in(&m, &file, &content, 0..24 * MIB, MIB), 0);
    // Unless nobody will read it again.
    let file = m.open(ino);
    m.files.pages.invalidate(file.state.key, 0..u64::MAX);
    m.files.advise(&file, 0..0, Advice::NoReuse).unwrap();
    let past = read_in(&m, &file, &content, 0..24 * MIB, 256 << 10);
    assert!(past >= 10 * MIB, "{past}");
}

#[test]
fn a_stream_sees_what_is_cut_and_written_past_the_cache_meanwhile() {
    let (_world, m, ino, mut content) = with_large_file();
    let file = m.open(ino);
    let read = read_in(&m, &file, &content, 0..16 * MIB, 128 << 10);
    assert!(read >= 7 * MIB, "{read}");
    let past = m.files.open(&m.owners, ino, libc::O_RDWR | libc::O_DIRECT);
    let past = past.unwrap();
    let at = 16 * MIB + 64 * PAGE;
    let data = pattern(77, 1 << 20);
    m.write(&past, at, &data);
    content[at as usize..][..data.len()].copy_from_slice(&data);
    read_in(&m, &file, &content, 16 * MIB..20 * MIB, 128 << 10);
    m.files.truncate(ino, 21 * MIB).unwrap();
    read_in(&m, &file, &content, 20 * MIB..21 * MIB, 128 << 10);
    let mut none = [0; 65536];
    assert_eq!(m.files.read(&file, 21 * MIB, &mut none).unwrap(), 0);
}

#[test]
fn a_stream_that_meets_an_error_tells_it_and_goes_on() {
    let (world, m, ino, content) = with_large_file();
    let file = m.open(ino);
    read_in(&m, &file, &content, 0..16 * MIB, 256 << 10);
    for device in &world.devices {
        device.fail_reads(Strikes::Always, None);
    }
    let mut buf = vec![0; 256 << 10];
    let mut at = 16 * MIB;
    // What is there already may be handed out.
    let told = loop {
        match m.files.read(&file, at, &mut buf) {
            Ok(len) => at += len as u64,
            Err(error) => break error,
        }
        assert!(at < 24 * MIB, "nothing fails");
    };
    assert_eq!(told.errno(), libc::EIO, "{told}");
    for device in &world.devices {
        device.fail_reads(Strikes::Next(0), None);
    }
    read_in(&m, &file, &content, at..48 * MIB, 256 << 10);
}

#[test]
fn seats_are_given_up_by_who_closes() {
    let (_world, m, ino, content) = with_large_file();
    for _ in 0..20 {
        let file = m.open(ino);
        // What the one before had on its way has to end first.
        let read = read_in(&m, &file, &content, 0..24 * MIB, 256 << 10);
        assert!(read >= 8 * MIB, "{read}");
    }
}

/// Whoever looks for a free seat has each of them locked for a moment. A handle that was closed in that moment kept its own, with all that it had
/// brought, until somebody wanted one a second later.
#[test]
fn a_seat_that_somebody_looks_at_is_given_up_too() {
    let (_world, m, ino, content) = with_large_file();
    let file = m.open(ino);
    assert!(read_in(&m, &file, &content, 0..24 * MIB, 256 << 10) > 0);
    assert_eq!(m.files.readers.taken(), 1);
    let (looked_at, closing) = (AtomicBool::new(false), AtomicBool::new(false));
    let file = Mutex::new(rank::LEAF, Some(file));
    thread::parallel(2, |t| {
        if t == 1 {
            let looking = m.files.readers.look_at_all();
            looked_at.store(true, Ordering::SeqCst);
            while !closing.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            (0..2000).for_each(|_| thread::yield_now());
            drop(looking);
            return;
        }
        while !looked_at.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        let mine = file.lock().take();
        closing.store(true, Ordering::SeqCst);
        drop(mine);
    });
    assert_eq!(m.files.readers.taken(), 0);
}
