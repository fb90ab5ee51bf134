//! Requests that wait for a device in threads of the pool, and others that need no device.

use super::*;
use base::thread::{JoinHandle, spawn, yield_now};

fn append(file: &Arc<OpenFile>) -> Request {
    Request::Append {
        file: Arc::clone(file),
        buf: AlignedBuf::zeroed(100),
    }
}

fn write(file: &Arc<OpenFile>, offset: usize, bytes: &[u8]) -> Request {
    Request::Write {
        file: Arc::clone(file),
        offset: offset as u64,
        buf: AlignedBuf::from_slice(bytes),
    }
}

/// A small file that needs no device for the next bytes at its end.
fn small(fs: &Arc<FileSystem>) -> Arc<OpenFile> {
    let file = fs.open_file(make(fs, b"small"), libc::O_RDWR).unwrap();
    fs.append(&file, &[1; 100]).unwrap();
    file
}

/// Whether a request of a context of its own ends while no device answers.
fn ends(fs: &Arc<FileSystem>, request: Request) -> bool {
    let (mut context, mut out) = (fs.io_context(1).unwrap(), Vec::new());
    submit(&mut context, 0, request);
    context.wait(1, &mut out, Some(Duration::from_secs(10)));
    let ended = !out.is_empty();
    // Where it has not ended, dropping the context would wait for it.
    if !ended {
        std::mem::forget(context);
    }
    ended
}

fn stick(world: &World) {
    world.devices.iter().for_each(|device| device.stick());
}

fn release(world: &World) {
    world.devices.iter().for_each(|device| device.release());
}

/// Reads in order wait for devices, and had the threads of what needs none.
#[test]
fn an_append_is_done_beside_any_number_of_reads_in_order_that_wait() {
    let mut world = world(31);
    let fs = world.open();
    let bytes = noise(31, 256 * PAGE);
    let (fs, ino) = cold(&mut world, fs, b"file", &bytes);
    let (file, other) = (fs.open_file(ino, libc::O_RDONLY).unwrap(), small(&fs));
    stick(&world);
    let mut context = fs.io_context(256).unwrap();
    for page in 0..64 {
        submit(&mut context, page, read(&file, page * PAGE as u64, PAGE));
    }
    let large = noise(1, 32 * PAGE).len();
    for number in 64..128 {
        submit(&mut context, number, read(&file, 64 * PAGE as u64, large));
    }
    let ended = ends(&fs, append(&other));
    release(&world);
    assert!(ended, "it waits for reads of another file");
    for (number, done) in finish(&mut context) {
        let at = number.min(64) as usize * PAGE;
        assert!(done.buf[..] == bytes[at..at + done.buf.len()], "{number}");
    }
}

/// Files that are written back, each by a thread that has begun to.
fn written_back(
    fs: &Arc<FileSystem>,
    world: &World,
    count: u8,
) -> (Vec<Arc<OpenFile>>, Vec<JoinHandle>) {
    let filled = |n: u8| {
        let file = fs.open_file(make(fs, &[b'A' + n]), libc::O_RDWR).unwrap();
        fs.write(&file, 0, &noise(n.into(), 64 * PAGE)).unwrap();
        fs.fsync(&file, true).unwrap();
        fs.write(&file, 0, &noise(n.into(), 48 * PAGE)).unwrap();
        file
    };
    let files: Vec<_> = (0..count).map(filled).collect();
    stick(world);
    let waiting = || world.devices.iter().map(|d| d.waiting()).sum::<u64>();
    let mut threads = Vec::new();
    for file in &files {
        let (fs, file, before) = (Arc::clone(fs), Arc::clone(file), waiting());
        let sync = move || fs.fsync(&file, true).unwrap();
        threads.push(spawn("syncs", sync).unwrap());
        while waiting() == before {
            yield_now();
        }
    }
    (files, threads)
}

/// Each waited for the file's lock, in the threads of all others.
#[test]
fn writes_to_files_that_are_written_back_hold_up_none_to_another_file() {
    for count in [1, 20] {
        let world = World::new(2, 96 << 20, 32);
        let fs = world.open();
        let other = small(&fs);
        let (files, threads) = written_back(&fs, &world, count);
        let mut context = fs.io_context(2000).unwrap();
        let mut number = 0;
        for file in files.iter().cycle().take(40.max(files.len() * 2)) {
            submit(&mut context, number, append(file));
            // Of several pages, and such that make the file longer.
            submit(&mut context, number + 1, write(file, 100, &[3; 2 * PAGE]));
            submit(&mut context, number + 2, write(file, 100 * PAGE, &[4; 10]));
            number += 3;
        }
        let ended = ends(&fs, append(&other));
        let longer = ended && ends(&fs, write(&other, 2000, &[5; 100]));
        release(&world);
        assert!(
            (ended, longer) == (true, true),
            "{count}: it waits for another file"
        );
        for thread in threads {
            thread.join().unwrap();
        }
        for (number, done) in finish(&mut context) {
            assert!(done.result.is_ok(), "{number}");
        }
    }
}

/// Where a file's page is was looked up by who handed the write over, though it was on a device: nothing else of his went on.
#[test]
fn who_hands_over_a_write_does_not_wait_for_the_files_mapping() {
    for by_future in [false, true] {
        let mut world = world(33);
        let fs = world.open();
        let small = small(&fs).ino();
        let file = fs.open_file(make(&fs, b"file"), libc::O_RDWR).unwrap();
        // More extents than are beside the inode on a device.
        for number in 0..1000 {
            let at = 2 * number * PAGE as u64;
            fs.write(&file, at, &[number as u8; PAGE]).unwrap();
        }
        let ino = file.ino();
        drop(file);
        let fs = world.remount(fs);
        let file = fs.open_file(ino, libc::O_RDWR).unwrap();
        let small = fs.open_file(small, libc::O_RDWR).unwrap();
        fs.read(&small, 0, &mut [0; 100]).unwrap();
        stick(&world);
        let (tell, told) = mpsc::channel();
        let theirs = (Arc::clone(&fs), Arc::clone(&file));
        let hands_over = move || {
            let (fs, file) = theirs;
            if by_future {
                let page = AlignedBuf::from_slice(&[7; PAGE]);
                let mut written = pin!(fs.write_future(&file, 0, page));
                assert!(
                    written
                        .as_mut()
                        .poll(&mut Context::from_waker(Waker::noop()))
                        .is_pending()
                );
                // Of what the cache has.
                let read = fs.read_future(&small, 0, AlignedBuf::zeroed(100));
                let (_, len) = block_on(read);
                tell.send(len.unwrap()).unwrap();
                return assert_eq!(block_on(written).1.unwrap(), PAGE);
            }
            let mut context = fs.io_context(2).unwrap();
            submit(&mut context, 0, write(&file, 0, &[7; PAGE]));
            tell.send(100).unwrap();
            finish(&mut context).remove(&0).unwrap().result.unwrap();
        };
        let thread = spawn("hands over", hands_over).unwrap();
        let told = told.recv_timeout(Duration::from_secs(10));
        release(&world);
        assert_eq!(told.ok(), Some(100), "by a future: {by_future}");
        thread.join().unwrap();
        let mut bytes = [0; PAGE];
        fs.read(&file, 0, &mut bytes).unwrap();
        assert!(bytes == [7; PAGE]);
    }
}
