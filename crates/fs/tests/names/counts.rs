//! Metrics, against what the devices did.

use crate::world::World;
use fs::{Caller, Error, FileSystem, ROOT, Value};

fn sum(fs: &FileSystem, name: &str) -> u64 {
    let metrics = fs.metrics();
    let of_name = metrics.iter().filter(|metric| metric.name == name);
    let values = of_name.map(|metric| match metric.value {
        Value::Counter(value) => value as u64,
        _ => panic!("{name} is no counter"),
    });
    values.sum()
}

/// Counters by cause and those of the devices that together count the same. On one device, no transfer is split.
const PAIRS: [(&str, &str); 3] = [
    (
        "sheaf_written_bytes_total",
        "sheaf_device_written_bytes_total",
    ),
    ("sheaf_flushes_total", "sheaf_device_flushes_total"),
    (
        "sheaf_durable_writes_total",
        "sheaf_device_durable_writes_total",
    ),
];

#[test]
fn causes_make_up_all_that_the_devices_did() {
    let world = World::new(1, 64 << 20, 6);
    let fs = world.open();
    let now = || PAIRS.map(|(causes, devices)| (sum(&fs, causes), sum(&fs, devices)));
    let before = now();
    for i in 0..300u32 {
        let name = format!("f{i}");
        let made = fs.create(&Caller::root(), ROOT, name.as_bytes(), 0o644, libc::O_RDWR);
        let (_, file) = made.unwrap();
        fs.write(&file, 0, &vec![i as u8; 20_000]).unwrap();
        if i % 3 == 0 {
            fs.fsync(&file, false).unwrap();
            fs.write(&file, 4096, &[7; 4096]).unwrap();
            fs.fsync(&file, true).unwrap();
            // In two places, which a flush follows.
            fs.write(&file, 0, &[8; 100]).unwrap();
            fs.write(&file, 12_288, &[8; 100]).unwrap();
            fs.fsync(&file, true).unwrap();
            fs.write(&file, 20_000, &[9; 100]).unwrap();
            fs.fsync(&file, true).unwrap();
        }
        if i % 100 == 99 {
            fs.sync().unwrap();
            fs.store().checkpoint().unwrap();
        }
    }
    let after = now();
    for ((pair, before), after) in PAIRS.iter().zip(before).zip(after) {
        let (causes, devices) = (after.0 - before.0, after.1 - before.1);
        assert!(causes > 0, "{}", pair.0);
        assert_eq!(causes, devices, "{}", pair.0);
    }
    fs.close().unwrap();
}

/// As a sync, the hint that a range will be synced asks nothing of a file system that takes no changes.
#[test]
fn a_hint_on_a_file_system_that_is_only_read_is_fine() {
    let mut world = World::new(1, 64 << 20, 7);
    let fs = world.open();
    let made = fs.create(&Caller::root(), ROOT, b"f", 0o644, libc::O_RDWR);
    let (attr, file) = made.unwrap();
    fs.write(&file, 0, &[1; 9000]).unwrap();
    drop(file);
    fs.close().unwrap();
    drop(fs);
    world.options = world.options.read_only();
    let fs = world.open();
    let file = fs.open_file(attr.ino, libc::O_RDONLY).unwrap();
    fs.write_range(&file, 0, 9000, true).unwrap();
    fs.write_range(&file, 0, 9000, false).unwrap();
    fs.fsync(&file, false).unwrap();
}

/// It answered with the number of the last one, while all that a crash had left was still in the journal.
#[test]
fn a_checkpoint_of_a_file_system_that_is_only_read_is_refused() {
    let mut world = World::new(1, 64 << 20, 7);
    let fs = world.open();
    fs.mkdir(&Caller::root(), ROOT, b"dir", 0o755).unwrap();
    fs.sync().unwrap();
    // As in a crash.
    drop(fs);
    let writable = world.options.clone();
    world.options = writable.clone().read_only();
    let fs = world.open();
    assert!(!fs.recovery().clean);
    assert!(matches!(fs.checkpoint(), Err(Error::ReadOnly)));
    drop(fs);
    world.options = writable;
    let fs = world.open();
    assert!(!fs.recovery().clean);
    fs.checkpoint().unwrap();
    fs.close().unwrap();
}
