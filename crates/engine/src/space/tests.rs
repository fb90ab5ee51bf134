//! Chunks and blocks that change hands, without a store.

use super::*;
use format::geometry::GeometryOptions;

#[test]
fn data_takes_what_is_scattered_before_what_is_kept_for_checkpoints() {
    let geometry = Geometry::plan(&[256 << 20], GeometryOptions::default()).unwrap();
    let count = geometry.chunk_count as usize;
    let mut states = vec![ChunkState::Meta; count];
    // One nearly full, and seven free ones: six are kept, and of the reserve one is left.
    states[0] = ChunkState::Data(10);
    states[1..8].fill(ChunkState::Free);
    let space = Space::new(&geometry, 2, states, 2);
    space.keep(6);
    assert!(space.try_promise(10));
    assert!(!space.try_promise(1));
    let sources = || next(&space);
    assert!(matches!(sources(), Source::Load(0)));
    space.keep(0);
    assert!(matches!(sources(), Source::Convert(1)));
}

/// One data chunk without data, not loaded; the others hold metadata.
fn one_empty_chunk() -> Space {
    let geometry = Geometry::plan(&[256 << 20], GeometryOptions::default()).unwrap();
    let mut states = vec![ChunkState::Meta; geometry.chunk_count as usize];
    states[0] = ChunkState::Data(geometry.chunk_blocks);
    Space::new(&geometry, 2, states, 0)
}

/// For who begins to search.
fn next(space: &Space) -> Source {
    space.next_source(0, &Tried::default())
}

fn no_words(space: &Space) -> Vec<u64> {
    vec![0; space.geometry.chunk_blocks as usize / 64]
}

#[test]
fn a_discard_takes_what_promises_do_without() {
    let mut space = one_empty_chunk();
    let blocks = space.geometry.chunk_blocks;
    space.loaded(0, &no_words(&space));
    let len = blocks / 2;
    let rest = |start| space.extent(0, start, blocks - start);
    // The promise is for one block more than half of the chunk.
    assert!(space.try_promise(len as u64 + 1));
    assert_eq!(space.take_run(0, 0..blocks, 1), None);
    assert_eq!(space.take_run(0, len..blocks, 1), None);
    space.unpromise(1);
    assert_eq!(space.take_run(0, len..blocks, u64::from(len) + 1), None);
    assert_eq!(space.take_run(0, len..blocks, 1), Some((rest(len), blocks)));
    assert_eq!(space.take_run(0, blocks..blocks, 1), None);
    space.give(rest(len));
    space.unpromise(len as u64);

    // As much as a free chunk has.
    space = Space::new(&space.geometry, 2, vec![ChunkState::Free; 2], 1);
    assert!(space.try_promise(blocks as u64));
    assert!(!space.take_free_chunk(0));
    space.unpromise(1);
    assert!(!space.take_free_chunk(0));
    space.unpromise(blocks as u64 - 1);
    assert!(space.take_free_chunk(0) && !space.take_free_chunk(0));
}

#[test]
fn a_map_that_is_read_late_brings_no_retired_chunk_back() {
    let space = one_empty_chunk();
    assert!(matches!(next(&space), Source::Load(0)));
    space.loaded(0, &no_words(&space));
    assert_eq!(space.take_empty_chunks(64), [0]);
    let before = space.unpromised();
    space.loaded(0, &no_words(&space));
    assert_eq!(space.unpromised(), before);
    assert!(matches!(next(&space), Source::None));
    // Its map stayed.
    space.unretired(0);
    space.loaded(0, &no_words(&space));
    assert!(matches!(next(&space), Source::Loaded));
}

/// What a mount finds empty, or what is emptied before anybody takes from it.
#[test]
fn empty_chunks_that_are_not_loaded_are_retired_from_where_the_next_search_begins() {
    let geometry = Geometry::plan(&[256 << 20], GeometryOptions::default()).unwrap();
    let blocks = geometry.chunk_blocks;
    let mut states = vec![ChunkState::Meta; geometry.chunk_count as usize];
    states[..4].fill(ChunkState::Data(blocks));
    states[1] = ChunkState::Data(blocks - 5);
    let space = Space::new(&geometry, 2, states, 0);
    space.load_from(3);
    assert_eq!(space.take_empty_chunks(2), [3, 0]);
    // A map that was read before that.
    space.loaded(0, &no_words(&space));
    assert_eq!(space.unpromised(), 2 * i64::from(blocks) - 5);
    space.give(space.extent(1, 0, 5));
    assert_eq!(space.take_empty_chunks(64), [1, 2]);
    assert_eq!(space.unpromised(), 0);
    space.unretired(2);
    assert!(space.try_promise(1));
    assert!(space.take_empty_chunks(64).is_empty());
}

/// They are neither looked at, nor take memory, until something of them is given back.
#[test]
fn full_chunks_are_out_of_the_way() {
    let geometry = Geometry::plan(&[256 << 20], GeometryOptions::default()).unwrap();
    let blocks = geometry.chunk_blocks;
    let mut states = vec![ChunkState::Meta; geometry.chunk_count as usize];
    states[..4].fill(ChunkState::Free);
    let space = Space::new(&geometry, 2, states, 0);
    assert!(space.try_promise(4 * u64::from(blocks)));
    let take = |want| space.take(0, want, None, &Tried::default());
    let memory = |chunk| {
        let space = Arc::clone(&space.chunks.lock().loaded[&chunk]);
        let bits = space.bits.lock();
        bits.available.len() * 64
    };
    for chunk in 0..4 {
        assert!(matches!(next(&space), Source::Convert(c) if c == chunk));
        space.converted(chunk);
        assert!(matches!(next(&space), Source::Loaded));
        assert_eq!(memory(chunk), blocks as usize);
        assert_eq!(take(blocks), Some(space.extent(chunk, 0, blocks)));
        assert_eq!((take(1), memory(chunk)), (None, 0));
    }
    assert!(matches!(next(&space), Source::None));
    assert!(space.chunks.lock().roomy.is_empty());
    let given = space.extent(2, 77, 5);
    space.give(given);
    assert!(matches!(next(&space), Source::Loaded));
    assert_eq!((take(8), memory(2)), (Some(given), 0));
    // Of one that was read, and is full, nothing is kept either.
    let full = one_empty_chunk();
    full.loaded(0, &vec![u64::MAX; blocks as usize / 64]);
    assert!(matches!(next(&full), Source::None));
    assert!(full.chunks.lock().roomy.is_empty());
    // What is freed as a whole is retired from there.
    (0..4).for_each(|chunk| space.give(space.extent(chunk, 0, blocks)));
    space.unpromise(4 * u64::from(blocks));
    drop(space.leases[0].lock().take());
    space.chunks.lock().leased.clear();
    assert_eq!(space.take_empty_chunks(64), [0, 1, 2, 3]);
    assert!(space.chunks.lock().roomy.is_empty());
}

/// Whoever has it in hand takes blocks of it without a look at the list.
#[test]
fn a_chunk_that_somebody_is_about_to_take_from_is_not_empty() {
    let space = one_empty_chunk();
    space.loaded(0, &no_words(&space));
    let in_hand = space.chunks.lock().loaded.get(&0).cloned();
    assert!(space.take_empty_chunks(64).is_empty());
    drop(in_hand);
    assert_eq!(space.take_empty_chunks(64), [0]);
}

#[test]
fn a_map_that_cannot_be_read_late_takes_no_chunk_from_others() {
    let space = one_empty_chunk();
    let blocks = space.unpromised();
    space.loaded(0, &no_words(&space));
    assert_eq!(space.unloadable(0..1), 0);
    assert_eq!(space.unpromised(), blocks);
    assert!(matches!(next(&space), Source::Loaded));
}

/// Each of eight maps is unreadable by itself: the next search tries those that this one did not come to.
#[test]
fn a_search_ends_after_a_few_maps_and_the_next_one_goes_on() {
    let geometry = Geometry::plan(&[256 << 20], GeometryOptions::default()).unwrap();
    let mut states = vec![ChunkState::Meta; geometry.chunk_count as usize];
    states[..8].fill(ChunkState::Data(10));
    let space = Space::new(&geometry, 2, states, 0);
    let before = space.unpromised();
    let search = || {
        let (mut tried, mut chunks) = (Tried::default(), Vec::new());
        while let Source::Load(chunk) = space.next_source(0, &tried) {
            space.load_from(chunk + 1);
            tried.loading(chunk..chunk + 1, Error::NoSpace);
            chunks.push(chunk);
        }
        assert!(tried.into_error().is_some());
        chunks
    };
    assert_eq!(search(), [0, 1, 2, 3]);
    assert_eq!(search(), [4, 5, 6, 7]);
    assert_eq!(search(), [0, 1, 2, 3]);
    assert_eq!(space.unpromised(), before);
}

#[test]
fn what_a_search_has_made_is_taken_from_though_much_was_tried_in_vain() {
    let geometry = Geometry::plan(&[256 << 20], GeometryOptions::default()).unwrap();
    let mut states = vec![ChunkState::Meta; geometry.chunk_count as usize];
    states[..5].fill(ChunkState::Data(geometry.chunk_blocks));
    states[5] = ChunkState::Free;
    let space = Space::new(&geometry, 2, states, 0);
    (0..5).for_each(|chunk| space.loaded(chunk, &no_words(&space)));
    let mut tried = Tried::default();
    for chunk in 0..4 {
        assert!(matches!(space.next_source(0, &tried), Source::Loaded));
        let taken = space.take(0, 8, None, &tried).unwrap();
        assert_eq!(taken, space.extent(chunk, 0, 8));
        space.give(taken);
        tried.changing(chunk, Error::NoSpace);
        assert_eq!(space.take(0, 8, None, &tried), None);
    }
    assert!(matches!(space.next_source(0, &tried), Source::Convert(5)));
    space.converted(5);
    tried.made(5);
    assert!(matches!(space.next_source(0, &tried), Source::Loaded));
    assert_eq!(space.take(0, 8, None, &tried), Some(space.extent(5, 0, 8)));
}

#[test]
fn nothing_is_taken_from_an_unusable_chunk_while_others_hold_blocks_of_it() {
    let space = one_empty_chunk();
    space.loaded(0, &no_words(&space));
    assert!(matches!(next(&space), Source::Loaded));
    assert!(space.try_promise(16));
    let held = [(); 2].map(|()| space.take(0, 8, None, &Tried::default()).unwrap());
    space.unusable(0);
    space.unpromise(16);
    assert_eq!(space.unpromised(), 0);
    space.give(held[0]);
    space.loaded(0, &no_words(&space));
    assert_eq!(space.unpromised(), 0);
    assert!(matches!(next(&space), Source::None));
}
