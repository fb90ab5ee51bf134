//! What POSIX and Linux promise and the foreign suites do not look at.

mod data;
mod names;

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::path::Path;

use rustix::io::Errno;

use super::{Context, script};
use crate::Fallible;
use crate::report::Suite;
use crate::world::World;

type Check = Result<(), Box<dyn Error>>;

type Named = (&'static str, fn(&Path) -> Check);

const CHECKS: &[Named] = &[
    ("O_TMPFILE", names::tmpfile),
    ("rename flags", names::rename_flags),
    ("rename replaces", names::rename_replaces),
    ("fallocate", data::fallocate),
    ("SEEK_DATA and SEEK_HOLE", data::seek_data),
    ("names of 255 bytes", names::long_names),
    ("extended attributes", names::attributes),
    ("O_APPEND", data::append),
    ("flock", data::flock),
    ("copy_file_range", data::copy_range),
    ("readdir under change", names::readdir_under_change),
    ("unlinked open file", data::unlinked),
    ("timestamps", names::timestamps),
    ("O_DIRECT beside buffered", data::direct),
    ("O_SYNC and O_DSYNC", data::synchronous),
    ("special files", names::special_files),
    ("many links", names::many_links),
    ("statfs", data::statfs),
    ("truncate", data::truncate),
    ("removed folder", names::removed_folder),
];

/// Only where the file system under test is Sheaf: others have lower limits, and coarser times.
const OWN_CHECKS: &[Named] = &[
    ("ctime of who looks", names::ctime_of_who_looks),
    ("attribute of 64 KiB", names::large_attribute),
    ("file of 2^63-1 bytes", data::largest_file),
    ("beyond 2^63-1 bytes", data::beyond_the_largest_file),
    (
        "O_TMPFILE in a removed folder",
        names::tmpfile_in_removed_folder,
    ),
];

/// ACLs with inheritance and mask, sticky and setgid folders, loss of setuid bits.
const PERMISSIONS: &str = r#"
# Fails if the command does not: of what begins with an exclamation mark the shell takes no notice.
not() { if "$@"; then echo "did not fail: $*"; exit 1; fi; }
umask 022
mkdir acl
setfacl -m u:tests:rwx,d:u:tests:rwX,d:g::r-x,d:m::rwx acl
mkdir acl/sub
touch acl/file
getfacl -c acl/sub | grep -qx 'user:tests:rwx'
getfacl -c acl/sub | grep -qx 'default:user:tests:rwx'
getfacl -cs acl/file | grep -qx 'user:tests:rwx.*#effective:rw-'
runuser -u tests -- sh -c 'echo text > acl/file && cat acl/file > /dev/null'
not runuser -u nobody -- sh -c 'echo text > acl/file'
chmod g-w acl/file
not runuser -u tests -- sh -c 'echo text > acl/file'
setfacl -b acl/file
test "$(getfacl -c acl/file | grep -c user:)" = 1

mkdir -m 1777 sticky
touch sticky/file
not runuser -u tests -- rm -f sticky/file
runuser -u tests -- touch sticky/own
runuser -u tests -- rm sticky/own

mkdir setgid
chgrp tests setgid
chmod 2775 setgid
touch setgid/file
mkdir setgid/sub
test "$(stat -c %G setgid/file)" = tests
test "$(stat -c %G:%A setgid/sub)" = tests:drwxr-sr-x

cp /bin/true suid
chmod 6777 suid
runuser -u tests -- sh -c 'echo text >> suid'
test "$(stat -c %a suid)" = 777
chmod 6777 suid
chown tests suid
test "$(stat -c %a suid)" = 777
chmod 6777 suid
runuser -u nobody -- truncate -s 10 suid
test "$(stat -c %a suid)" = 777
for how in "-l 4096" "-p -l 4096" "-z -l 4096"; do
    chmod 6777 suid
    runuser -u nobody -- fallocate $how suid
    test "$(stat -c %a suid)" = 777
done
chmod 6777 suid
runuser -u nobody -- xfs_io -c "copy_range -l 4096 acl/file" suid
test "$(stat -c %a suid)" = 777
"#;

const BEFORE_REMOUNT: &str = r#"
mkdir -p kept/a/b
seq 100000 > kept/numbers
ln kept/numbers kept/a/link
ln -s ../numbers kept/a/symlink
mkfifo kept/fifo
mknod kept/null c 1 3
setfattr -n user.colour -v green kept/numbers
setfattr -n trusted.secret -v hidden kept/numbers
setfacl -m u:tests:r kept/numbers
touch -d '1999-12-31 23:59:59.123456789 UTC' kept/a/b
truncate -s 1G kept/sparse
printf end >> kept/sparse
for i in $(seq 2000); do echo "$i" > "kept/a/b/file$i"; done
touch -d '1999-12-31 23:59:59.123456789 UTC' kept/a/b
"#;

const AFTER_REMOUNT: &str = r#"
seq 100000 | cmp - kept/numbers
test "$(stat -c %h kept/numbers)" = 2
test kept/numbers -ef kept/a/link
test "$(readlink kept/a/symlink)" = ../numbers
test -p kept/fifo
test "$(stat -c %t:%T kept/null)" = 1:3
test "$(getfattr --only-values -n user.colour kept/numbers)" = green
test "$(getfattr --only-values -n trusted.secret kept/numbers)" = hidden
getfacl -c kept/numbers | grep -qx 'user:tests:r--'
test "$(TZ=UTC stat -c %y kept/a/b)" = '1999-12-31 23:59:59.123456789 +0000'
test "$(stat -c %s kept/sparse)" = 1073741827
test "$(tail -c 3 kept/sparse)" = end
test "$(ls kept/a/b | wc -l)" = 2000
for i in $(seq 1 97 2000); do test "$(cat "kept/a/b/file$i")" = "$i"; done
"#;

pub fn run(_: &Context, world: &mut World, suite: &mut Suite) -> Fallible<()> {
    let own = if world.is_external() { &[] } else { OWN_CHECKS };
    for (number, (name, check)) in CHECKS.iter().chain(own).enumerate() {
        let dir = world.mnt.join(format!("check{number}"));
        fs::create_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        suite.check(name, check(&dir));
    }
    let permissions = script("posix-permissions", &world.mnt, PERMISSIONS, 60);
    suite.check("permissions", permissions);
    let before = script("posix-before-remount", &world.mnt, BEFORE_REMOUNT, 60);
    suite.check("before remount", before);
    world.umount()?;
    suite.check("fsck", world.fsck());
    world.mount_with("ro")?;
    let after = script("posix-after-remount", &world.mnt, AFTER_REMOUNT, 60);
    suite.check("after remount, read-only", after);
    if !world.is_external() {
        suite.check("read-only refuses", names::read_only(&world.mnt));
    }
    world.umount()?;
    world.mount()?;
    let after = script("posix-after-remount", &world.mnt, AFTER_REMOUNT, 60);
    suite.check("after remount, read-write", after);
    if !world.is_external() {
        synchronous_writes_are_durable(world, suite)?;
    }
    Ok(())
}

/// What is written with O_SYNC or O_DSYNC is there though the daemon dies at once; what is not, is lost, so that
/// it was not something else that made all of it durable.
fn synchronous_writes_are_durable(world: &mut World, suite: &mut Suite) -> Fallible<()> {
    world.umount()?;
    world.mount_with("write_back=3600,commit=3600,checkpoint=3600")?;
    let dir = world.mnt.join("durable");
    let lost = dir.join("lost");
    let written = fs::create_dir(&dir)
        .map_err(Into::into)
        .and_then(|()| data::write_synchronously(&dir))
        .and_then(|()| Ok(fs::write(&lost, "lost")?));
    world.kill_daemon()?;
    world.mount()?;
    let kept = written
        .and_then(|()| data::synchronous_writes_are_there(&dir))
        .and_then(|()| expect(!lost.exists(), "what nobody synced is lost"));
    suite.check("O_SYNC and O_DSYNC are durable", kept);
    Ok(())
}

/// An error that names the expectation unless it holds.
fn expect(holds: bool, what: &str) -> Check {
    match holds {
        true => Ok(()),
        false => Err(what.into()),
    }
}

fn expect_errno<T>(result: Result<T, Errno>, errno: Errno) -> Check {
    match result {
        Err(e) if e == errno => Ok(()),
        Err(e) => Err(format!("expected {errno}, got {e}").into()),
        Ok(_) => Err(format!("expected {errno}, got success").into()),
    }
}

fn open_new(path: &Path) -> std::io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)
}
