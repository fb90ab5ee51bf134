use super::*;
use device::sim::Times as Strikes;

#[test]
fn a_failed_write_is_reported_by_every_fsync_until_the_file_is_reopened() {
    let world = World::new(20, 64, 64);
    let m = world.mount();
    let (ino, other) = (m.make(), m.make());
    let (file, innocent) = (m.open(ino), m.open(other));
    m.write(&file, 0, &pattern(1, 20_000));
    m.files.fsync(&file, false).unwrap();
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

#[test]
fn a_failed_flush_is_latched_on_the_files_it_concerns() {
    let world = World::new(22, 64, 64);
    let m = world.mount();
    let (ino, other) = (m.make(), m.make());
    let (file, bystander) = (m.open(ino), m.open(other));
    for f in [&file, &bystander] {
        m.write(f, 0, &pattern(1, 300_000));
        m.files.fsync(f, false).unwrap();
        m.write(f, 0, &pattern(2, 300_000));
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
