//! Transfers between runs of an array and memory in many pieces.

use crate::fixture::{Sims, UNEQUAL, create, noise};
use base::rng::Rng;
use device::sim::Times;
use device::{
    AlignedBuf, Array, Backend, Durability, Error, OpenOptions, Scattered, Shared, create_image,
    open_devices,
};
use std::path::PathBuf;

const PAGE: usize = 4096;
const BYTES: usize = 4 << 20;

/// Runs of pages, apart from each other, and for each page where in memory it goes: nowhere in order.
fn runs(rng: &mut Rng) -> Vec<(u64, Vec<usize>)> {
    let mut places: Vec<usize> = (0..BYTES / PAGE).collect();
    for i in (1..places.len()).rev() {
        places.swap(i, rng.below(i as u64 + 1) as usize);
    }
    let (mut runs, mut at) = (Vec::new(), 0);
    while !places.is_empty() {
        at += rng.below(40);
        let len = (1 + rng.below(700) as usize).min(places.len());
        let mut mine = places.split_off(places.len() - len);
        if rng.one_in(2) {
            // Neighbours in memory, too.
            mine.sort_unstable();
        }
        runs.push((at * PAGE as u64, mine));
        at += len as u64;
    }
    runs
}

fn read(array: &Array, runs: &[(u64, Vec<usize>)], memory: &mut [u8]) -> Result<(), Error> {
    let mut pieces: Vec<Option<Shared<'_>>> = memory
        .chunks_mut(PAGE)
        .map(|page| Some(Shared::of(page)))
        .collect();
    let runs = runs.iter().map(|(byte, places)| Scattered {
        byte: *byte,
        memory: places
            .iter()
            .map(|&at| pieces[at].take().unwrap())
            .collect(),
    });
    array.read_scattered(runs.collect())
}

fn check(array: &Array, seed: u64) {
    let mut rng = Rng::new(seed);
    let content = noise(seed, 3 * BYTES);
    array.write(0, &content, Durability::Volatile).unwrap();
    for _ in 0..10 {
        let runs = runs(&mut rng);
        let mut memory = AlignedBuf::zeroed(BYTES);
        let before: u64 = array.stats().devices.iter().map(|d| d.read_bytes).sum();
        read(array, &runs, &mut memory).unwrap();
        let after: u64 = array.stats().devices.iter().map(|d| d.read_bytes).sum();
        assert_eq!(after - before, BYTES as u64);
        for (byte, places) in &runs {
            for (place, at) in places.iter().zip((*byte as usize..).step_by(PAGE)) {
                let got = &memory[place * PAGE..(place + 1) * PAGE];
                assert!(got == &content[at..at + PAGE], "{at}");
            }
        }
    }
    let mut memory = AlignedBuf::zeroed(BYTES);
    let outside = [(array.bytes() - PAGE as u64, vec![0, 1])];
    let refused = read(array, &outside, &mut memory);
    assert!(
        matches!(refused, Err(Error::OutOfRange { .. })),
        "{refused:?}"
    );
    read(array, &[], &mut memory).unwrap();
}

fn on_files(backend: Backend) {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = (0..UNEQUAL.len())
        .map(|i| dir.path().join(format!("device{i}")))
        .collect();
    for (path, bytes) in paths.iter().zip(UNEQUAL) {
        create_image(path, bytes).unwrap();
    }
    let options = OpenOptions {
        backend,
        ..OpenOptions::default()
    };
    let array = create(open_devices(&paths, &options).unwrap(), 1 << 16);
    check(&array, 5);
    // A transfer that is cut short, and an error that is told once.
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(&paths[1])
        .unwrap();
    file.set_len(1 << 20).unwrap();
    let mut memory = AlignedBuf::zeroed(BYTES);
    let all = [(0, (0..BYTES / PAGE).collect())];
    let errors = |array: &Array| array.stats().devices.iter().map(|d| d.errors).sum::<u64>();
    let before = errors(&array);
    let failed = read(&array, &all, &mut memory);
    let Err(Error::Io { device, .. }) = failed else {
        panic!("{failed:?}");
    };
    assert!(device.ends_with("device1") && errors(&array) > before);
}

#[test]
fn memory_in_many_pieces_is_filled_by_whatever_reaches_the_device() {
    on_files(Backend::Threads);
    on_files(Backend::Auto);
    check(&create(Sims::new(&UNEQUAL, 3).members(), 1 << 14), 6);
}

#[test]
fn a_piece_that_cannot_be_read_is_an_error_and_the_others_are_there() {
    let sims = Sims::new(&UNEQUAL, 4);
    let array = create(sims.members(), 1 << 14);
    let content = noise(4, BYTES);
    array.write(0, &content, Durability::Volatile).unwrap();
    sims.devices[1].fail_reads(Times::Always, None);
    let mut memory = AlignedBuf::zeroed(BYTES);
    let all = [(0, (0..BYTES / PAGE).collect())];
    let failed = read(&array, &all, &mut memory);
    assert!(matches!(failed, Err(Error::Io { .. })), "{failed:?}");
    let good = memory
        .chunks(PAGE)
        .zip(content.chunks(PAGE))
        .filter(|(a, b)| a == b);
    assert!(good.count() > BYTES / PAGE / 2);
    sims.devices[1].heal();
    read(&array, &all, &mut memory).unwrap();
    assert!(memory[..] == content[..]);
}
