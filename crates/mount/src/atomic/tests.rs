use super::*;
use crate::options::MountOptions;
use crate::sheaf_ops::SheafOps;
use crate::transport::Bell;
use format::geometry::{Geometry, GeometryOptions};
use std::io::IoSlice;
use std::sync::mpsc;

/// A kernel that has dropped pages when it is told to go on.
struct Slow {
    begun: mpsc::Sender<()>,
    goes_on: Mutex<mpsc::Receiver<()>>,
}

impl Bell for Slow {
    fn ring(&self, _: &[IoSlice<'_>]) -> std::io::Result<bool> {
        self.begun.send(()).unwrap();
        self.goes_on.lock().recv().unwrap();
        Ok(true)
    }
}

pub(crate) fn file_system(dir: &std::path::Path) -> Arc<FileSystem> {
    let image = dir.join("image");
    let bytes = 256 << 20;
    device::create_image(&image, bytes).unwrap();
    let devices = device::open_devices(&[image], &device::OpenOptions::default()).unwrap();
    let geometry = Geometry::plan(&[bytes], GeometryOptions::default()).unwrap();
    let array = device::Array::create(devices, geometry, "test", [7; 16], [9; 16]).unwrap();
    let array = Arc::new(array);
    FileSystem::mkfs(&array, &fs::MkfsOptions::default()).unwrap();
    FileSystem::open(array, fs::FsOptions::default()).unwrap()
}

/// A file with an atomic write that was aborted, and the kernel takes its time to drop pages.
struct Aborting {
    fs: Arc<FileSystem>,
    file: Arc<OpenFile>,
    node: NodeId,
    atomic: AtomicWrites,
    notifier: Notifier,
    /// The kernel is through with it.
    go_on: mpsc::Sender<()>,
    droppers: notify::Droppers,
    _dir: tempfile::TempDir,
}

const HANDLE: u64 = 1;

/// So many workers, one of them idle.
fn hands(most: usize) -> notify::Hands {
    let idle = Arc::new(AtomicUsize::new(1));
    notify::Hands { most, idle }
}

impl Aborting {
    fn by_one_of(workers: usize) -> Aborting {
        let dir = tempfile::tempdir().unwrap();
        let fs = file_system(dir.path());
        let who = Caller::root();
        let (attr, file) = (fs.create(&who, fs::ROOT, b"f", 0o600, libc::O_RDWR)).unwrap();
        let node = attr.ino.0;
        let (begun, begins) = mpsc::channel();
        let (go_on, goes_on) = mpsc::channel();
        let bell = Slow {
            begun,
            goes_on: Mutex::new(rank::LEAF, goes_on),
        };
        let notifier = Notifier::new(Some(Arc::new(bell)), hands(workers));
        let droppers = notifier.start().unwrap();
        let atomic = AtomicWrites::default();
        atomic.init(notifier.clone());
        start(&atomic, &fs, &file).unwrap();
        atomic.abort(&fs, node, HANDLE);
        begins.recv().unwrap();
        Aborting {
            fs,
            file,
            node,
            atomic,
            notifier,
            go_on,
            droppers,
            _dir: dir,
        }
    }

    fn end(self) {
        drop(self.droppers);
        drop(self.file);
        self.fs.close().unwrap();
    }
}

fn start(atomic: &AtomicWrites, fs: &Arc<FileSystem>, file: &OpenFile) -> Result<()> {
    let task = std::process::id();
    atomic.start(fs, (&Caller::root(), task), (file, HANDLE))
}

/// Who closed a descriptor while an abort was on its way had the answer at once, and with that its locks were free: whoever
/// had them next read what the kernel had still.
#[test]
fn a_close_waits_for_pages_that_are_being_dropped() {
    let aborting = Aborting::by_one_of(8);
    let (all, node) = (aborting.atomic.clone(), aborting.node);
    let fs = Arc::clone(&aborting.fs);
    let closed = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&closed);
    let closes = base::thread::spawn("closes", move || {
        all.flush(&fs, (node, HANDLE), std::process::id());
        told.store(true, Ordering::SeqCst);
    });
    while aborting.notifier.waiting() == 0 {
        assert!(!closed.load(Ordering::SeqCst), "it was answered at once");
        base::thread::yield_now();
    }
    aborting.go_on.send(()).unwrap();
    closes.unwrap().join().unwrap();
    assert!(aborting.atomic.of(node).is_none());
    aborting.atomic.check(HANDLE).unwrap();
    aborting.end();
}

/// A program that gave up and began anew was told that somebody else was at it.
#[test]
fn who_starts_anew_waits_for_pages_that_are_being_dropped() {
    let aborting = Aborting::by_one_of(8);
    base::thread::parallel(2, |part| match part {
        0 => start(&aborting.atomic, &aborting.fs, &aborting.file).unwrap(),
        _ => {
            while aborting.notifier.waiting() == 0 {
                base::thread::yield_now();
            }
            aborting.go_on.send(()).unwrap();
        }
    });
    let pending = aborting.atomic.of(aborting.node).unwrap();
    assert!(pending.is_of(HANDLE));
    aborting.end();
}

/// It may be the worker that the drop waits for.
#[test]
fn who_starts_anew_is_refused_if_the_last_workers_would_wait_for_each_other() {
    let aborting = Aborting::by_one_of(2);
    let refused = aborting.notifier.wait(Duration::ZERO, |_| {
        start(&aborting.atomic, &aborting.fs, &aborting.file)
    });
    assert!(matches!(refused, Err(Error::Busy)), "{refused:?}");
    aborting.go_on.send(()).unwrap();
    aborting.end();
}

/// What the kernel is told to drop.
struct Told(Mutex<Vec<crate::abi::NotifyInvalInodeOut>>);

impl Bell for Told {
    fn ring(&self, parts: &[IoSlice<'_>]) -> std::io::Result<bool> {
        use zerocopy::FromBytes;
        let message = crate::abi::NotifyInvalInodeOut::read_from_bytes(&parts[1]).unwrap();
        self.0.lock().push(message);
        Ok(true)
    }
}

/// A file, and a kernel that is told which pages to drop, by [`Notifier::drop_left`].
struct Telling {
    fs: Arc<FileSystem>,
    file: Arc<OpenFile>,
    node: NodeId,
    atomic: AtomicWrites,
    notifier: Notifier,
    bell: Arc<Told>,
    _dir: tempfile::TempDir,
}

impl Telling {
    fn new() -> Telling {
        let dir = tempfile::tempdir().unwrap();
        let fs = file_system(dir.path());
        let who = Caller::root();
        let (attr, file) = (fs.create(&who, fs::ROOT, b"f", 0o600, libc::O_RDWR)).unwrap();
        let bell = Arc::new(Told(Mutex::new(rank::LEAF, Vec::new())));
        let notifier = Notifier::new(Some(Arc::clone(&bell) as Arc<dyn Bell>), hands(8));
        let atomic = AtomicWrites::default();
        atomic.init(notifier.clone());
        Telling {
            fs,
            file,
            node: attr.ino.0,
            atomic,
            notifier,
            bell,
            _dir: dir,
        }
    }

    fn parts(
        &self,
    ) -> (
        &Arc<FileSystem>,
        &OpenFile,
        NodeId,
        &AtomicWrites,
        &Notifier,
    ) {
        let Telling { fs, file, .. } = self;
        (fs, file, self.node, &self.atomic, &self.notifier)
    }

    /// Since it was asked last.
    fn told(&self) -> Vec<(i64, i64)> {
        self.notifier.drop_left();
        let mut all = self.bell.0.lock();
        all.drain(..).map(|told| (told.off, told.len)).collect()
    }

    fn end(self) {
        drop(self.file);
        self.fs.close().unwrap();
    }
}

/// Pages were dropped while a write of some was on its way, and one of these was read before it came.
#[test]
fn what_was_read_back_before_a_write_is_dropped_after_it() {
    let telling = Telling::new();
    let (fs, file, node, atomic, notifier) = telling.parts();
    let handle = 1;
    let told = || telling.told();
    let write_as = |page: u64, from_page_cache, flags: i32| {
        let span = Span {
            request: 3,
            handle,
            offset: page * PAGE,
            from_page_cache,
            open_flags: flags as u32,
            ..Span::default()
        };
        let written = atomic.write(fs, file, &span, &[1; 100]).unwrap();
        assert_eq!(written.unwrap(), 100);
        atomic.wrote(node);
    };
    let write = |page, from_page_cache| write_as(page, from_page_cache, 0);
    let abort = || {
        let task = (&Caller::root(), std::process::id());
        atomic.start(fs, task, (file, handle)).unwrap();
        atomic.abort(fs, node, handle);
        assert_eq!(told(), [(0, 0)]);
    };
    notifier.reads(node, 0..PAGE, 1);
    write(0, false);
    assert_eq!(told(), [], "nothing was dropped before");
    abort();
    notifier.reads(node, 3 * PAGE..4 * PAGE, 2);
    write(3, true);
    assert_eq!(told(), [], "it is written back, which keeps a page");
    write_as(2, false, libc::O_DIRECT);
    assert_eq!(told(), [], "others are on their way beside a direct write");
    write(3, false);
    assert_eq!(told(), [(3 * PAGE as i64, 100)]);
    // Whoever reads and writes a page in turn has it dropped no more.
    notifier.reads(node, 3 * PAGE..4 * PAGE, 2);
    write(3, false);
    assert_eq!(told(), []);
    abort();
    notifier.reads(node, 3 * PAGE..4 * PAGE, 2);
    write(2, false);
    write(3, false);
    assert_eq!(told(), [], "that was not on its way");
    telling.end();
}

/// A write that waited for longer than a second in the daemon left what was read before it in the kernel's memory.
#[test]
fn what_was_read_back_before_a_slow_write_is_dropped_after_it() {
    let telling = Telling::new();
    let (fs, file, node, atomic, notifier) = telling.parts();
    start(atomic, fs, file).unwrap();
    let pending = atomic.of(node).unwrap();
    let is_held = AtomicBool::new(false);
    base::thread::parallel(2, |part| match part {
        0 => {
            while !is_held.load(Ordering::SeqCst) {
                base::thread::yield_now();
            }
            let span = Span {
                request: 3,
                handle: HANDLE + 1,
                ..Span::default()
            };
            let written = atomic.write(fs, file, &span, &[1; 100]).unwrap();
            assert_eq!(written.unwrap(), 100);
        }
        _ => {
            // As by devices that are slow.
            let held = pending.state.lock();
            is_held.store(true, Ordering::SeqCst);
            while !notifier.is_written(node) {
                base::thread::yield_now();
            }
            notifier.drop_pages(Pages::all(node), Box::new(|| {}));
            notifier.drop_left();
            notifier.reads(node, 0..PAGE, 2);
            notifier.look_later(2 * crate::rereads::WINDOW_NS);
            drop(held);
        }
    });
    atomic.wrote(node);
    assert_eq!(telling.told(), [(0, 0), (0, 100)]);
    atomic.clear();
    telling.end();
}

#[test]
fn pages_that_were_staged_or_cut_are_found() {
    let mut gone = Gone {
        pages: vec![1, 2, 5],
        cut: None,
    };
    let found = |gone: &Gone| -> Vec<u64> { (0..9).filter(|&page| gone.has(page)).collect() };
    assert_eq!(found(&gone), [1, 2, 5]);
    gone.cut = Some(7 * PAGE);
    assert_eq!(found(&gone), [1, 2, 5, 7, 8]);
    gone.cut = Some(7 * PAGE - 1);
    assert_eq!(found(&gone), [1, 2, 5, 6, 7, 8]);
}

#[test]
fn of_files_too_many_to_remember_all_are_known() {
    let mut known = Known::default();
    known.add(5);
    assert!(known.has(5) && !known.has(6));
    (0..=KNOWN_MAX as u64).for_each(|node| known.add(node + 10));
    assert!(known.has(5) && known.has(6));
}

#[test]
fn numbers_are_those_that_the_kernel_makes() {
    let number =
        |direction: u32, size: u32, number: u32| direction << 30 | size << 16 | 0xf5 << 8 | number;
    assert_eq!(ioctl::START, number(0, 0, 1));
    assert_eq!(ioctl::COMMIT, number(0, 0, 2));
    assert_eq!(ioctl::ABORT, number(0, 0, 5));
    assert_eq!(ioctl::GET_FEATURES, number(2, 4, 12));
}

/// The kernel takes the size of such an answer whatever has happened meanwhile: it had the old one again, and an append went there.
#[test]
fn an_answer_that_began_before_a_commit_has_the_size_from_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let fs = file_system(dir.path());
    let who = Caller::root();
    let (attr, file) = (fs.create(&who, fs::ROOT, b"f", 0o600, libc::O_RDWR)).unwrap();
    let ops = SheafOps::new(Arc::clone(&fs), &MountOptions::default());
    let atomic = ops.atomic();
    start(atomic, &fs, &file).unwrap();
    let span = Span {
        handle: HANDLE,
        ..Span::default()
    };
    let written = atomic.write(&fs, &file, &span, &[1; 100]).unwrap();
    assert_eq!(written.unwrap(), 100);
    let began_with = atomic.of(attr.ino.0);
    let changed = fs.getattr(attr.ino).unwrap();
    atomic.commit(&fs, attr.ino.0, HANDLE).unwrap();
    assert_eq!(changed.size, 0);
    assert_eq!(ops.attributes_beside(&changed, began_with).size, 100);
    fs.close().unwrap();
}

fn stage(atomic: &AtomicWrites, fs: &FileSystem, file: &OpenFile, len: usize) {
    let span = Span {
        handle: HANDLE,
        ..Span::default()
    };
    let written = atomic.write(fs, file, &span, &vec![1; len]).unwrap();
    assert_eq!(written.unwrap(), len);
}

/// Between the end of the atomic write and the note of its size, a direct write of another handle that failed cut the file, or lengthened it, for good.
#[test]
fn there_is_no_moment_of_an_abort_in_which_the_kernel_is_taken_to_know_the_size() {
    let dir = tempfile::tempdir().unwrap();
    let fs = file_system(dir.path());
    let who = Caller::root();
    let (attr, file) = (fs.create(&who, fs::ROOT, b"f", 0o600, libc::O_RDWR)).unwrap();
    let node = attr.ino.0;
    let atomic = AtomicWrites::default();
    start(&atomic, &fs, &file).unwrap();
    stage(&atomic, &fs, &file, 100);
    let pending = atomic.of(node).unwrap();
    // The abort goes no further than to the tables.
    let tables = atomic.0.tables.lock();
    let (all, of, it) = (atomic.clone(), Arc::clone(&fs), Arc::clone(&pending));
    let aborts = base::thread::spawn("aborts", move || {
        all.abort_it(&of, &it);
    });
    while pending.is_staging() {
        base::thread::yield_now();
    }
    let knows = atomic.knows_size(&fs, node, Some(&pending));
    drop(tables);
    aborts.unwrap().join().unwrap();
    assert!(!knows && !atomic.knows_size(&fs, node, None));
    atomic.tells(node);
    assert!(atomic.knows_size(&fs, node, None));
    drop(file);
    fs.close().unwrap();
}

/// Who then cut the file by a handle opened with `O_DIRECT` was refused.
#[test]
fn only_another_size_than_the_file_has_misleads_the_kernel() {
    let dir = tempfile::tempdir().unwrap();
    let fs = file_system(dir.path());
    let who = Caller::root();
    let (attr, file) = (fs.create(&who, fs::ROOT, b"f", 0o600, libc::O_RDWR)).unwrap();
    let node = attr.ino.0;
    fs.write(&file, 0, &[2; 100]).unwrap();
    let atomic = AtomicWrites::default();
    let knows_after = |len: usize| {
        start(&atomic, &fs, &file).unwrap();
        stage(&atomic, &fs, &file, len);
        atomic.abort(&fs, node, HANDLE);
        let knows = atomic.knows_size(&fs, node, None);
        atomic.tells(node);
        knows
    };
    assert!(knows_after(50) && knows_after(100));
    assert!(!knows_after(101));
    // Which has no name when it is committed.
    start(&atomic, &fs, &file).unwrap();
    stage(&atomic, &fs, &file, 101);
    fs.unlink(&who, fs::ROOT, b"f").unwrap();
    assert!(atomic.commit(&fs, node, HANDLE).is_err());
    assert!(!atomic.knows_size(&fs, node, None));
    drop(file);
    fs.close().unwrap();
}

/// One that is not remembered was taken for a file whose size the kernel knows: a direct write that failed set it to what had been staged.
#[test]
fn of_files_too_many_to_remember_the_kernel_knows_no_size() {
    let dir = tempfile::tempdir().unwrap();
    let fs = file_system(dir.path());
    let atomic = AtomicWrites::default();
    for node in 0..KNOWN_MAX as u64 {
        atomic.mislead(node);
    }
    let others = KNOWN_MAX as u64 + 7;
    assert!(atomic.knows_size(&fs, others, None));
    atomic.mislead(others);
    assert!(!atomic.knows_size(&fs, others, None));
    // What is told of one says nothing of those that are not told apart.
    atomic.tells(others);
    assert!(!atomic.knows_size(&fs, others, None));
    atomic.clear();
    assert!(atomic.knows_size(&fs, others, None));
    fs.close().unwrap();
}

/// It was remembered for ever, and its number may be another file's.
#[test]
fn a_file_that_the_kernel_has_forgotten_before_its_pages_were_dropped_is_not_remembered() {
    let telling = Telling::new();
    let (fs, file, node, atomic, notifier) = telling.parts();
    let abort = || {
        start(atomic, fs, file).unwrap();
        stage(atomic, fs, file, 100);
        atomic.abort(fs, node, HANDLE);
        assert!(!atomic.knows_size(fs, node, None));
    };
    abort();
    atomic.tells(node);
    notifier.drop_left();
    assert!(!atomic.knows_size(fs, node, None), "that answer was old");
    abort();
    atomic.forgets(node);
    notifier.drop_left();
    assert!(atomic.knows_size(fs, node, None));
    telling.end();
}
