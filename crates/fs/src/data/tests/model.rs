//! Random operations on a few files against vectors of bytes.

use super::*;

const FILES: usize = 3;
const SPAN: u64 = 400_000;

struct Model {
    inos: Vec<Ino>,
    bytes: Vec<Vec<u8>>,
}

fn write_model(bytes: &mut Vec<u8>, at: usize, data: &[u8]) {
    if bytes.len() < at + data.len() {
        bytes.resize(at + data.len(), 0);
    }
    bytes[at..at + data.len()].copy_from_slice(data);
}

fn zero_model(bytes: &mut [u8], from: u64, to: u64) {
    let len = bytes.len();
    bytes[(from as usize).min(len)..(to as usize).min(len)].fill(0);
}

/// One random operation on the file and on its model.
fn step(m: &Mounted, rng: &mut Rng, ino: Ino, bytes: &mut Vec<u8>) {
    let flags = match rng.below(6) {
        0 => libc::O_RDWR | libc::O_DIRECT,
        _ => libc::O_RDWR,
    };
    let file = m.files.open(&m.owners, ino, flags).unwrap();
    let small = rng.one_in(2);
    let span = if small { 6_000 } else { SPAN };
    let (mut at, mut len) = (rng.below(span), rng.below(span / 4) + 1);
    if rng.one_in(3) {
        (at, len) = (at / PAGE * PAGE, len.next_multiple_of(PAGE));
    }
    match rng.below(14) {
        0..=4 => {
            let data = pattern(rng.next_u64(), len as usize);
            m.write(&file, at, &data);
            write_model(bytes, at as usize, &data);
        }
        5 | 6 => {
            let mut buf = vec![0xEE; len as usize];
            let n = m.files.read(&file, at, &mut buf).unwrap();
            let end = bytes.len().min((at + len) as usize);
            let expected = bytes.get(at as usize..end.max(at as usize)).unwrap_or(&[]);
            assert!(buf[..n] == *expected, "read at {at} of {len}");
        }
        7 => {
            let size = match rng.below(4) {
                0 => 0,
                1 => rng.below(3_000),
                _ => at,
            };
            m.files.truncate(ino, size).unwrap();
            bytes.resize(size as usize, 0);
        }
        8 => {
            let keep = rng.one_in(2);
            let mode = if keep { libc::FALLOC_FL_KEEP_SIZE } else { 0 };
            m.files.fallocate(&file, mode, at, len).unwrap();
            if !keep && bytes.len() < (at + len) as usize {
                bytes.resize((at + len) as usize, 0);
            }
        }
        9 => {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            m.files.fallocate(&file, mode, at, len).unwrap();
            zero_model(bytes, at, at + len);
        }
        10 => {
            let keep = rng.one_in(2);
            let mode = libc::FALLOC_FL_ZERO_RANGE | (keep as i32 * libc::FALLOC_FL_KEEP_SIZE);
            m.files.fallocate(&file, mode, at, len).unwrap();
            if !keep && bytes.len() < (at + len) as usize {
                bytes.resize((at + len) as usize, 0);
            }
            zero_model(bytes, at, at + len);
        }
        11 => m.files.fsync(&file, rng.one_in(2)).unwrap(),
        12 => m.files.write_back(ino).unwrap(),
        _ => check_seek(m, &file, at, bytes),
    }
    assert_eq!(m.size(ino), bytes.len() as u64);
}

/// Whatever seek calls a hole reads as zeros.
fn check_seek(m: &Mounted, file: &OpenFile, at: u64, bytes: &[u8]) {
    match m.files.seek(file, at, libc::SEEK_DATA) {
        Ok(data) => {
            assert!(data >= at && data < bytes.len() as u64);
            assert!(bytes[at as usize..data as usize].iter().all(|&b| b == 0));
            let hole = m.files.seek(file, data, libc::SEEK_HOLE).unwrap();
            assert!(hole > data && hole <= bytes.len() as u64);
        }
        Err(_) => {
            let rest = bytes.get(at as usize..).unwrap_or(&[]);
            assert!(rest.iter().all(|&b| b == 0));
        }
    }
}

fn run(seed: u64, frames: usize, rounds: usize) {
    let world = World::new(seed, 64, frames);
    let mut rng = Rng::new(seed);
    let mut m = world.mount();
    let before = m.free_blocks();
    let mut model = Model {
        inos: (0..FILES).map(|_| m.make()).collect(),
        bytes: vec![Vec::new(); FILES],
    };
    for _ in 0..rounds {
        let which = rng.below(FILES as u64) as usize;
        step(&m, &mut rng, model.inos[which], &mut model.bytes[which]);
        if rng.one_in(10) {
            world.clock.advance(Duration::from_secs(rng.below(8)));
            m.files.tick().unwrap();
        }
        if rng.one_in(60) {
            m.close();
            m = world.mount();
        }
        if rng.one_in(15) {
            let ino = model.inos[which];
            assert!(m.contents(ino) == model.bytes[which], "contents of {ino}");
        }
    }
    m.close();
    let m = world.mount();
    for (ino, bytes) in model.inos.iter().zip(&model.bytes) {
        m.check(*ino);
        assert!(m.contents(*ino) == *bytes, "contents of {ino}");
    }
    for ino in model.inos {
        m.delete(ino);
    }
    assert_eq!(m.files.pages.dirty(), 0);
    assert_eq!(m.free_blocks(), before, "blocks leaked or were freed twice");
}

#[test]
fn files_agree_with_vectors_in_a_tiny_cache() {
    for seed in 0..12 {
        run(seed, 64, 300);
    }
}

#[test]
fn files_agree_with_vectors_in_a_roomy_cache() {
    for seed in 100..112 {
        run(seed, 2048, 300);
    }
}
