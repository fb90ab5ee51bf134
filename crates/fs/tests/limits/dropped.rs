//! What a program must look at. Each of these lines is one that the compiler warns of; the build of the tests would fail if it did not.

use crate::create;
use crate::machine::World;
use fs::{Caller, ROOT};

#[test]
fn what_says_whether_anything_was_done_is_not_dropped_without_a_warning() {
    let world = World::new(1, 64 << 20, 1);
    let fs = world.open();
    let (who, names) = (Caller::root(), [b"a", b"b"]);
    let file = create(&fs, b"file", libc::O_RDWR);
    let mut context = fs.io_context(1).unwrap();
    #[expect(unused_must_use)]
    fs.create_many(&who, ROOT, &names, 0o644);
    #[expect(unused_must_use)]
    fs.stat_many(ROOT, &names);
    #[expect(unused_must_use)]
    fs.unlink_many(&who, ROOT, &names);
    #[expect(unused_must_use)]
    fs.transaction(&who).unwrap();
    #[expect(unused_must_use)]
    fs.atomic_write(&who, &file).unwrap();
    #[expect(unused_must_use)]
    context.submit(&mut Vec::new());
}
