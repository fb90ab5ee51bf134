//! Every way into a mount and out of it: as a user through fusermount3, on block devices,
//! through mount(8), fstab and the helper names, when the last write-back fails, when signals come
//! meanwhile, when the daemon hangs or is in use elsewhere, and over and
//! over under load; a scrub of a mount, and its metrics; a benchmark on a block device; and an interrupted mkfs, which
//! must leave nothing that mounts.

use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use base::rng::Rng;
use rustix::process::{Pid, Signal, kill_process};

use super::Context;
use crate::process::Outcome;
use crate::report::Suite;
use crate::world::{self, World};
use crate::{Fallible, packages, process};

/// Before each script: its folder, empty, and what it leaves behind when it ends.
const BEGIN: &str = r#"
cd "$DIR"
clean() {
    jobs -p | xargs -r kill -9 2> /dev/null || true
    for mount in $(awk -v dir="$DIR/" 'index($5, dir) == 1 { print $5 }' /proc/self/mountinfo | tac); do
        umount -l "$mount" 2> /dev/null || fusermount3 -uz "$mount" || true
    done
    for image in "$DIR"/*.img; do
        losetup -j "$image" 2> /dev/null | cut -d : -f 1 | xargs -r -n 1 losetup -d || true
    done
}
trap clean EXIT
# A loop device over a file. What somebody had made read-only stays so when its next file comes.
attach() {
    local device
    device=$(losetup --find --show "$@")
    blockdev --setrw "$device"
    echo "$device"
}
# The command fails, and says this.
refused() {
    local words="$1"; shift
    if "$@" > said 2>&1; then echo "not refused: $*"; exit 1; fi
    cat said
    grep -q -- "$words" said
}
# Fails if the command does not: of what begins with an exclamation mark the shell takes no notice.
not() { if "$@"; then echo "did not fail: $*" >&2; exit 1; fi; }
# Whether a process runs: one that has ended may wait for somebody to ask how.
runs() { test -e "/proc/$1/exe"; }
mounted() { grep -q " $DIR/$1 " /proc/self/mountinfo; }
fill() {
    mkdir -p "$1/tree"
    for i in $(seq 200); do head -c $((i * 97)) /dev/urandom > "$1/tree/file$i"; done
    (cd "$1" && find tree -type f -exec sha256sum {} +) > sums
}
verify() { (cd "$1" && sha256sum --quiet --check "$DIR/sums"); }
"#;

/// Run as a user without any rights.
const USER: &str = r#"
"$SHEAF" mkfs -q --size 64M a.img b.img
mkdir mnt
"$SHEAF" mount a.img mnt
grep " $DIR/mnt .*fuse.sheaf" /proc/self/mountinfo | grep nosuid | grep -q nodev
test "$(stat -c %u mnt)" = "$(id -u)"
fill mnt
"$SHEAF" umount mnt
not mounted mnt
"$SHEAF" fsck a.img
"$SHEAF" mount a.img mnt --pid-file pid
verify mnt
# A busy mount stays, and whoever keeps it busy is named.
(cd mnt && exec sleep 60) & holder=$!
refused "in use by sleep" "$SHEAF" umount mnt
mounted mnt
kill $holder; wait $holder || true
# Who unmounts is not named, and keeps nothing busy.
(cd mnt && { "$SHEAF" umount . || true; }) > said 2>&1
grep "in use by .*(process" said
not grep "sheaf (process" said
(cd mnt && exec "$SHEAF" umount .)
not mounted mnt
"$SHEAF" mount a.img mnt --pid-file pid
# What a dead daemon leaves is cleaned away by the next mount.
sync -f mnt/tree/file1
kill -9 "$(cat pid)"
while test -e "/proc/$(cat pid)"; do :; done
"$SHEAF" mount a.img mnt
verify mnt
"$SHEAF" umount mnt
"$SHEAF" fsck a.img
refused "write access" "$SHEAF" mount a.img /
"#;

const USER_ALLOW_OTHER: &str = r#"
"$SHEAF" mkfs -q --force --size 64M a.img
mkdir -p mnt
refused allow_other "$SHEAF" mount a.img mnt -o allow_other
not mounted mnt
# The devices are free again.
"$SHEAF" mount a.img mnt
"$SHEAF" umount mnt
"#;

const FUSEBLK: &str = r#"
truncate -s 128M a.img b.img
a=$(attach a.img)
b=$(attach b.img)
mkdir mnt
"$SHEAF" mkfs -q $a $b
# Nothing but sync makes this durable before the daemon dies.
lazy="write_back=3600,commit=3600,checkpoint=3600"
"$SHEAF" mount $a $b mnt --pid-file pid -o $lazy
grep -q " $DIR/mnt .*fuseblk.sheaf" /proc/self/mountinfo
fill mnt
sync
kill -9 "$(cat pid)"
refused "daemon had died" "$SHEAF" umount mnt
not mounted mnt
"$SHEAF" fsck $a $b
"$SHEAF" mount $a $b mnt --pid-file pid
verify mnt
# Both devices are claimed: the first by the kernel, the second by the daemon.
mkdir other
for device in $a $b; do
    refused "in use" "$SHEAF" mkfs --force $device
    refused "in use" "$SHEAF" mount $device other
    refused "in use" "$SHEAF" fsck $device
    refused "" mkfs.ext4 -q $device
done
verify mnt
"$SHEAF" umount mnt
not mounted mnt
"$SHEAF" fsck $a $b
# A daemon that dies lets go of both.
"$SHEAF" mount $a $b mnt --pid-file pid
kill -9 "$(cat pid)"
"$SHEAF" mount $a $b mnt --pid-file pid
verify mnt
# But the kernel keeps the first for who has a file of the mount open: who that is can be told.
(cd mnt && exec sleep 60) & holder=$!
until test "$(readlink "/proc/$holder/cwd")" = "$DIR/mnt"; do sleep 0.1; done
kill -9 "$(cat pid)"
refused "files of it open, sleep (process $holder): end that" "$SHEAF" mount $a $b mnt
kill $holder; wait $holder || true
"$SHEAF" mount $a $b mnt
verify mnt
umount mnt
"$SHEAF" fsck $a $b
"#;

/// A loop device and the file behind it are one storage: who has one keeps others from the other.
const BOTH_NAMES: &str = r#"
truncate -s 128M a.img
a=$(attach a.img)
mkdir mnt other
refused "the same device" "$SHEAF" mkfs --force $a a.img
"$SHEAF" mkfs -q $a
for taken in $a a.img; do
    "$SHEAF" mount $taken mnt
    fill mnt
    for device in $a a.img; do
        refused "in use" "$SHEAF" mkfs --force $device
        refused "in use" "$SHEAF" mount $device other
        refused "in use" "$SHEAF" fsck $device
    done
    verify mnt
    rm -r mnt/tree
    "$SHEAF" umount mnt
done
"$SHEAF" fsck $a
"$SHEAF" fsck a.img
# Of a device that shows a part of the file the rest is somebody else's.
losetup -d $a
truncate -s 256M a.img
a=$(attach --sizelimit 128M a.img)
b=$(attach --offset 128M a.img)
"$SHEAF" mkfs -q --force $a $b
"$SHEAF" mount $a $b mnt
refused "in use" "$SHEAF" mkfs --force a.img
"$SHEAF" umount mnt
mkfs.ext4 -q $b
mount $b other
refused "which is also $b" "$SHEAF" mkfs --force a.img
umount other
"#;

/// Who names a file system once gets it by whatever names its devices have, but never with a copy of one.
const NAMED_ONCE: &str = r#"
truncate -s 128M a.img b.img other.img
a=$(attach a.img)
again=$(attach a.img)
b=$(attach b.img)
mkdir mnt
# A run that was killed may have left devices behind.
label=suite-once-$$
"$SHEAF" mkfs -q -L $label $a $b
uuid=$("$SHEAF" info --udev $a | sed -n s/^ID_FS_UUID=//p)
for name in LABEL=$label UUID=$uuid $a $again $b; do
    "$SHEAF" mount $name mnt
    fill mnt
    verify mnt
    rm -r mnt/tree
    "$SHEAF" umount mnt
    "$SHEAF" fsck $name
done
"$SHEAF" mount $a mnt
fill mnt
cp b.img copy.img
"$SHEAF" umount mnt
copy=$(attach copy.img)
for name in LABEL=$label UUID=$uuid $a; do
    for command in mount fsck; do
        at=""; test $command = fsck || at=mnt
        refused "one by one" "$SHEAF" $command $name $at
        grep "$b" said | grep -q "$copy"
    done
done
"$SHEAF" mount $a $b mnt
verify mnt
"$SHEAF" umount mnt
"$SHEAF" fsck $b
losetup -d $copy
other=$(attach other.img)
"$SHEAF" mkfs -q -L $label $other
refused "2 file systems are called" "$SHEAF" mount LABEL=$label mnt
grep "UUID=$uuid on " said | grep -q "$other"
"$SHEAF" mount UUID=$uuid mnt
verify mnt
"$SHEAF" umount mnt
"#;

/// The sides of a benchmark take turns on a device that holds nothing, and leave nothing on it.
const BENCH_DEVICE: &str = r#"
truncate -s 1G a.img
a=$(attach a.img)
bench() {
    "$SHEAF" bench fxmark --device $a --workload MWCL,MWUM --threads 1 --pool 1000 \
        --operations 1000 --runs 1 --seconds 60 --json "$@"
}
bench --against ext4,xfs > report
test "$(grep -c '"operations": 1000' report)" = 6
test "$(grep -c '"synced_written_bytes_per_op": [1-9]' report)" = 6
test "$(grep -c '"unmounted_us_per_op"' report)" = 6
test "$(grep -c '"io": ".*, direct"' report)" = 2
not blkid -p $a
refused "MiB are needed" bench --pool 10000000
mkfs.ext4 -q $a
refused "holds ext4" bench --against ext4
# One that is killed leaves no daemon, and nothing mounted in its folder.
export TMPDIR="$DIR"
"$SHEAF" bench files --against none --count 2000 --runs 1000 > killed 2>&1 & bench=$!
until daemon=$(pgrep -f -- "--daemon.*--end-with $bench"); do runs $bench; sleep 0.1; done
kill -9 $bench; wait $bench || true
for i in $(seq 200); do test -e "/proc/$daemon" || break; sleep 0.1; done
not test -e "/proc/$daemon"
rmdir "$DIR/sheaf-bench-$bench-0"
"#;

/// With mount.sheaf and so on in /sbin, as the README has it.
const HELPERS: &str = r#"
truncate -s 128M a.img b.img
a=$(attach a.img)
b=$(attach b.img)
mkdir mnt
# A run that was killed may have left devices behind.
label=suite-helpers-$$
mkfs -t sheaf -q -L $label $a $b
mount -t sheaf $a mnt
grep -q " $DIR/mnt .*fuseblk.sheaf" /proc/self/mountinfo
fill mnt
# umount(8) leaves it to umount.fuseblk.sheaf, which waits.
umount mnt
not mounted mnt
# Unless it is told not to.
mount -t sheaf $a mnt
(cd mnt && exec sleep 60) & holder=$!
timeout 20 umount -l mnt
if mounted mnt; then exit 1; fi
kill $holder; wait $holder || true
until "$SHEAF" fsck $a $b; do sleep 0.1; done
fsck -t sheaf -a $a
fsck.sheaf -f $a $b
# What the udev rule imports, and the links it makes.
eval "$("$SHEAF" info --udev $a)"
test "$ID_FS_TYPE" = sheaf
test "$ID_FS_LABEL_ENC" = $label
mkdir -p /dev/disk/by-uuid
link=/dev/disk/by-uuid/$ID_FS_UUID_ENC
ln -s $a "$link"
trap 'rm -f "$link"; clean' EXIT
echo "UUID=$ID_FS_UUID_ENC $DIR/mnt sheaf noatime,nofail 0 0" > fstab
mount -T fstab "$DIR/mnt"
grep " $DIR/mnt " /proc/self/mountinfo | grep -q noatime
verify mnt
umount mnt
echo "$a:$b $DIR/mnt sheaf ro 0 0" > fstab
mount -T fstab "$DIR/mnt"
verify mnt
refused "ead-only" touch mnt/new
umount mnt
mount -t sheaf LABEL=$label mnt 2> said || "$SHEAF" mount LABEL=$label mnt
verify mnt
umount mnt
refused frobnicate mount -t sheaf -o frobnicate $a mnt
# With one device missing sheaf mount fails at once, and mount(8) waits until it appears.
losetup -d $b
refused "missing" "$SHEAF" mount LABEL=$label mnt
mount.sheaf LABEL=$label mnt -o device_timeout=60 2> said & late=$!
until grep -q waiting said; do sleep 0.1; done
b=$(attach b.img)
wait $late
verify mnt
umount mnt
"#;

/// The images lie on a small disk that fills up before the last write-back.
const LAST_WRITE: &str = r#"
mkdir -p small mnt
mount -t tmpfs -o size=40m tmpfs small
truncate -s 128M small/a.img small/b.img
"$SHEAF" mkfs -q --no-discard small/a.img small/b.img
lazy="write_back=3600,commit=3600,checkpoint=3600"
"$SHEAF" mount small/a.img small/b.img mnt --log daemon.log -o $lazy
dd if=/dev/urandom of=mnt/big bs=1M count=8 status=none
dd if=/dev/zero of=small/filler bs=1M status=none 2> /dev/null || true
refused "not everything was written" "$SHEAF" umount mnt
not mounted mnt
grep -q ERROR daemon.log
# What was there before is sound.
rm small/filler
"$SHEAF" fsck small/a.img
"$SHEAF" mount small/a.img mnt
"$SHEAF" umount mnt
umount small
"#;

/// Each unmount right after a read and a write, each mount right after an unmount or a kill.
const AGAIN: &str = r#"
"$SHEAF" mkfs -q --size 64M a.img b.img
mkdir mnt
for i in $(seq "$ROUNDS"); do
    "$SHEAF" mount a.img mnt --pid-file pid
    test $i = 1 || test "$(cat mnt/file)" = $((i - 1))
    echo $i > mnt/file
    if test $((i % 3)) = 0; then
        sync mnt/file
        kill -9 "$(cat pid)"
        test $((i % 2)) = 0 || refused "daemon had died" "$SHEAF" umount mnt
    else
        cat mnt/file > /dev/null
        "$SHEAF" umount mnt
    fi
done
"$SHEAF" mount a.img mnt
"$SHEAF" umount mnt
"$SHEAF" fsck a.img
"#;

/// On a busy mount nothing is found; of a damaged image just what is damaged, again after the
/// scrub was killed half-way. Whether the file can still be read, and is damaged for good, depends
/// on whether its node was in memory: then the next checkpoint writes it anew.
const SCRUB: &str = r#"
scrub() { "$SHEAF" scrub mnt --state state "$@"; }
"$SHEAF" mkfs -q --size 256M a.img b.img
mkdir mnt
"$SHEAF" mount a.img mnt -o checkpoint=0.05,cache_size=16M
writers=
for writer in 1 2; do
    (
        rounds=0
        while ! test -e done; do
            mkdir "mnt/w$writer"
            for i in $(seq 300); do echo "$i" > "mnt/w$writer/f$i"; done
            rm -r "mnt/w$writer"
            rounds=$((rounds + 1))
        done
        echo "$rounds" > "rounds$writer"
    ) &
    writers="$writers $!"
done
for i in $(seq 20); do scrub | grep "no errors"; done
scrub --rate 64K --json | grep '"exit_code": 0'
touch done
for writer in $writers; do wait "$writer"; done
test "$(cat rounds1)" -gt 0
test "$(cat rounds2)" -gt 0
for i in $(seq 3000); do echo "text $i of the scrub suite" > "mnt/f$i"; done
"$SHEAF" umount mnt
"$SHEAF" mount a.img mnt -o checkpoint=3600
for image in a.img b.img; do
    for at in $(grep -abo "text 77 of the scrub suite" $image | cut -d : -f 1); do
        printf X | dd of=$image bs=1 seek=$at conv=notrunc status=none
    done
    sync $image
done
not scrub > said
grep -q "node .*checksum" said
test "$(grep -c '^error' said)" = 1
timeout -s KILL 2 "$SHEAF" scrub mnt --state state --rate 64K || true
test -e state/scrub-*.json
not scrub > said
grep -q continued said
grep -q "node .*checksum" said
not test -e state/scrub-*.json
test "$(cat mnt/f78)" = "text 78 of the scrub suite"
"$SHEAF" umount mnt
"#;

/// What a daemon counts while it serves, and a checkpoint of it: after that a crash leaves nothing to replay.
const LIVE: &str = r#"
"$SHEAF" mkfs -q --size 64M a.img b.img
mkdir mnt
refused "loopback" "$SHEAF" mount a.img mnt -o metrics=0.0.0.0:9100
touch taken
refused "cannot serve metrics" "$SHEAF" mount a.img mnt -o metrics="$DIR/taken"
not mounted mnt
"$SHEAF" mount a.img mnt --pid-file pid --log log -o checkpoint=3600,metrics="$DIR/metrics" > said 2>&1
# That mount was refused before anything happened.
not grep Recovered said
test "$(stat -c %a metrics)" = 600
for i in $(seq 20); do
    dd if=/dev/urandom of=mnt/file bs=64k count=1 conv=notrunc,fsync status=none
done
value() { "$SHEAF" info --live mnt | awk -v name="$1" '$1 == name { print $NF }'; }
test "$(value fsync_seconds_count)" = 20
"$SHEAF" info --live mnt | grep "^written_bytes_total cause=data .*[KM]iB"
"$SHEAF" info --live mnt | grep "^fsync_seconds quantile=0.99 .*s$"
"$SHEAF" info --live mnt --json | grep -A 1 '"name": "sheaf_fsync_seconds_count"' | grep '"value": 20'
perl -MIO::Socket::UNIX -e '
    my $socket = IO::Socket::UNIX->new(Peer => shift) or die "$!";
    print $socket "GET /metrics HTTP/1.0\r\n\r\n";
    print <$socket>;' "$DIR/metrics" > served
grep "^sheaf_fsync_seconds_count 20" served
# The same as the command shows, and nothing less.
grep -o "^sheaf_[a-z0-9_]*" served | sort -u > names
"$SHEAF" info --live mnt --json | grep -o '"name": "sheaf_[a-z0-9_]*' | cut -d '"' -f 4 | sort -u > shown
cmp names shown
before=$(value checkpoint_seconds_count)
"$SHEAF" checkpoint mnt --json | grep '"checkpoint": [0-9]'
test "$(value checkpoint_seconds_count)" = $((before + 1))
kill -9 "$(cat pid)"
"$SHEAF" mount a.img mnt --log log2 > told
grep "^Recovered .* s: 0 batches, 0 records" told
grep "Recovered .*: 0 batches, 0 records" log2
"$SHEAF" umount mnt
mkdir plain
refused "no Sheaf file system" "$SHEAF" checkpoint plain
refused "no Sheaf file system" "$SHEAF" info --live plain
"#;

/// However many signals come while the last write-back is under way, it is not cut short.
const SIGNALS: &str = r#"
"$SHEAF" mkfs -q --size 512M a.img b.img
mkdir mnt
lazy="write_back=3600,commit=3600,checkpoint=3600"
"$SHEAF" mount a.img mnt --foreground --log log -o $lazy > out & daemon=$!
until grep -q Mounted out; do sleep 0.1; done
fill mnt
head -c 200M /dev/urandom > mnt/tree/big
(cd mnt && sha256sum tree/big) >> sums
kill -TERM $daemon
while mounted mnt; do :; done
while kill -TERM $daemon 2> /dev/null; do kill -HUP $daemon 2> /dev/null || true; sleep 0.02; done
wait $daemon
"$SHEAF" fsck a.img
"$SHEAF" mount a.img mnt
verify mnt
"$SHEAF" umount mnt
"#;

/// Nor does the kernel let go of the only device while it is written to, and if it did, nobody
/// else would get it.
const SIGNALS_BLOCK_DEVICE: &str = r#"
truncate -s 1G a.img
a=$(attach a.img)
mkdir mnt other
"$SHEAF" mkfs -q $a
lazy="write_back=3600,commit=3600,checkpoint=3600"
"$SHEAF" mount $a mnt --pid-file pid --log log -o $lazy
pid=$(cat pid)
fill mnt
head -c 200M /dev/urandom > mnt/tree/big
(cd mnt && sha256sum tree/big) >> sums
"$SHEAF" umount mnt & unmounting=$!
while mounted mnt; do :; done
for signal in TERM TERM STOP; do kill -$signal $pid 2> /dev/null || true; sleep 0.05; done
while runs $pid && ! grep -q "^State:.*stopped" /proc/$pid/status; do sleep 0.01; done
# The file is there until all is written; the devices are let go of after that.
if test -e pid; then refused "in use" "$SHEAF" mount $a other; fi
kill -CONT $pid 2> /dev/null || true
wait $unmounting
"$SHEAF" fsck $a
"$SHEAF" mount $a mnt
verify mnt
"$SHEAF" umount mnt
"#;

/// A daemon that hangs, and a file system that is mounted elsewhere, too, keep nobody waiting.
const NOT_WAITED_FOR: &str = r#"
"$SHEAF" mkfs -q --size 64M a.img b.img
mkdir mnt other
for how in --lazy --force; do
    "$SHEAF" mount a.img mnt --pid-file pid
    pid=$(cat pid)
    test $how = --force || fill mnt
    kill -STOP $pid
    timeout 20 "$SHEAF" umount $how mnt
    kill -CONT $pid
    if mounted mnt; then exit 1; fi
    while runs $pid; do sleep 0.1; done
done
"$SHEAF" mount a.img mnt --pid-file pid
verify mnt
mount --bind mnt other
refused "still mounted at \"$DIR/other\"" timeout 60 "$SHEAF" umount mnt
if mounted mnt; then exit 1; fi
verify other
"$SHEAF" umount other
if runs "$(cat pid)"; then exit 1; fi
"$SHEAF" fsck a.img
"#;

pub fn run(context: &Context, world: &mut World, suite: &mut Suite) -> Fallible<()> {
    if world.is_external() {
        suite.exclude("all", "is about Sheaf's own mounts");
        return Ok(());
    }
    as_user(world, suite)?;
    suite.check("fuseblk", as_root(world, "fuseblk", FUSEBLK, &[]));
    let names = as_root(world, "names", BOTH_NAMES, &[]);
    suite.check("a loop device and its file", names);
    let once = as_root(world, "named-once", NAMED_ONCE, &[]);
    suite.check("a file system named once", once);
    let bench = as_root(world, "bench-device", BENCH_DEVICE, &[]);
    suite.check("a benchmark on a block device", bench);
    match HelperNames::install(world.sheaf()) {
        Ok(_names) => suite.check(
            "mount(8), fstab, fsck(8)",
            as_root(world, "helpers", HELPERS, &[]),
        ),
        Err(reason) => suite.exclude("mount(8), fstab, fsck(8)", &reason),
    }
    let last = as_root(world, "last-write", LAST_WRITE, &[]);
    suite.check("a failed last write-back is reported", last);
    let signals = as_root(world, "signals", SIGNALS, &[]);
    suite.check("signals during the last write-back", signals);
    let signals = as_root(world, "signals-device", SIGNALS_BLOCK_DEVICE, &[]);
    suite.check("signals during that of a block device", signals);
    let others = as_root(world, "not-waited-for", NOT_WAITED_FOR, &[]);
    suite.check("daemons that are not waited for", others);
    suite.check("scrub", as_root(world, "scrub", SCRUB, &[]));
    suite.check("live", as_root(world, "live", LIVE, &[]));
    let rounds = context.args.mounts.to_string();
    let again = as_root(world, "again", AGAIN, &[("ROUNDS", &rounds)]);
    suite.check(&format!("{rounds} mounts"), again);
    interrupted_mkfs(context, world, suite)
}

fn as_root(world: &World, name: &str, text: &str, more: &[(&str, &str)]) -> Fallible<()> {
    let dir = world.side_dir().join(name);
    std::fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut bash = script(text, world.sheaf(), &dir);
    bash.envs(more.iter().copied());
    run_script(name, &mut bash)
}

fn script(text: &str, sheaf: &Path, dir: &Path) -> Command {
    let mut bash = Command::new("bash");
    bash.arg("-c")
        .arg(format!("set -euo pipefail\n{BEGIN}{text}"))
        .env("SHEAF", sheaf)
        .env("DIR", dir)
        .env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin");
    bash
}

fn run_script(name: &str, bash: &mut Command) -> Fallible<()> {
    let log = format!("mount-{name}");
    process::run(&log, bash, Duration::from_secs(400))?.check("script")
}

/// As the user `tests`, who cannot get at this project's folder: in one of the user's own.
fn as_user(world: &World, suite: &mut Suite) -> Fallible<()> {
    let (uid, gid) = packages::test_user()?;
    let _open = OpenToAll::new(Path::new("/dev/fuse"))?;
    let home = UserHome::new(world.sheaf(), uid, gid)?;
    let run = |name: &str, text: &str| {
        let mut bash = script(text, &home.0.join("sheaf"), &home.0);
        bash.uid(uid).gid(gid).env("HOME", &home.0);
        run_script(name, &mut bash)
    };
    suite.check("as a user", run("user", USER));
    let conf = std::fs::read_to_string("/etc/fuse.conf").unwrap_or_default();
    match conf.lines().any(|line| line.trim() == "user_allow_other") {
        true => suite.exclude(
            "allow_other of a user",
            "permitted by /etc/fuse.conf of this machine",
        ),
        false => suite.check("allow_other of a user", run("other", USER_ALLOW_OTHER)),
    }
    Ok(())
}

/// A folder of the user's own, with a copy of the program; removed with the value.
struct UserHome(PathBuf);

impl UserHome {
    fn new(sheaf: &Path, uid: u32, gid: u32) -> Fallible<Self> {
        let dir = std::env::temp_dir().join(format!("sheaf-user-{}", std::process::id()));
        let at = |e: std::io::Error| format!("{}: {e}", dir.display());
        std::fs::create_dir(&dir).map_err(at)?;
        let home = UserHome(dir.clone());
        std::fs::copy(sheaf, dir.join("sheaf")).map_err(at)?;
        std::os::unix::fs::chown(&dir, Some(uid), Some(gid)).map_err(at)?;
        Ok(home)
    }
}

impl Drop for UserHome {
    fn drop(&mut self) {
        world::release(&self.0);
        // Left behind in the temporary folder when something in it is still mounted.
        if world::refuse_mounts(&self.0).is_ok() {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

/// Everybody may use a device, as udev has it where there is one; put back with the value.
struct OpenToAll {
    path: PathBuf,
    mode: u32,
}

impl OpenToAll {
    fn new(path: &Path) -> Fallible<Self> {
        let at = |e: std::io::Error| format!("{}: {e}", path.display());
        let meta = path.metadata().map_err(at)?;
        if !meta.file_type().is_char_device() {
            return Err(format!("{} is no device", path.display()));
        }
        let open = OpenToAll {
            path: path.to_owned(),
            mode: meta.mode() & 0o7777,
        };
        open.set(open.mode | 0o666).map_err(at)?;
        Ok(open)
    }

    fn set(&self, mode: u32) -> std::io::Result<()> {
        std::fs::set_permissions(&self.path, std::fs::Permissions::from_mode(mode))
    }
}

impl Drop for OpenToAll {
    fn drop(&mut self) {
        if let Err(error) = self.set(self.mode) {
            eprintln!("xtask: {}: {error}", self.path.display());
        }
    }
}

/// The names that mount(8), mkfs(8), fsck(8) and umount(8) look for; removed with the value.
struct HelperNames(Vec<PathBuf>);

impl HelperNames {
    const NAMES: [&str; 5] = [
        "mount.sheaf",
        "mkfs.sheaf",
        "fsck.sheaf",
        "umount.fuse.sheaf",
        "umount.fuseblk.sheaf",
    ];

    /// `Err`: why not.
    fn install(sheaf: &Path) -> Result<Self, String> {
        let sheaf = sheaf
            .canonicalize()
            .map_err(|e| format!("{}: {e}", sheaf.display()))?;
        let mut names = HelperNames(Vec::new());
        for name in Self::NAMES {
            let path = Path::new("/sbin").join(name);
            if std::fs::read_link(&path).is_ok_and(|to| to == sheaf || is_left(&to)) {
                let _ = std::fs::remove_file(&path);
            }
            symlink(&sheaf, &path).map_err(|e| format!("{}: {e}", path.display()))?;
            names.0.push(path);
        }
        Ok(names)
    }
}

/// Whether a helper's name leads to what cargo built in some checkout, or to nothing: a run that was
/// killed left it. An installed program is nobody's to remove.
fn is_left(program: &Path) -> bool {
    let mut folders = program.iter().rev().skip(1).take(3);
    !program.exists() || folders.any(|folder| folder == "target")
}

impl Drop for HelperNames {
    fn drop(&mut self) {
        for path in &self.0 {
            if let Err(error) = std::fs::remove_file(path) {
                eprintln!("xtask: {}: {error}", path.display());
            }
        }
    }
}

const MKFS_ROUNDS: u32 = 40;

/// What commands end with where errors are left, and where they could not do their work: no panic, and no other code.
const REFUSED: [i32; 2] = [4, 8];

/// mkfs ends by a signal at a random moment, on empty images or on ones that hold an older
/// file system. What opens afterwards must be one of the two, whole, and the rest must be refused in order.
fn interrupted_mkfs(context: &Context, world: &World, suite: &mut Suite) -> Fallible<()> {
    let victim = Victim::new(world)?;
    let mut rng = Rng::new(context.args.seed);
    let began = Instant::now();
    victim.make(None)?;
    let whole = began.elapsed();
    let mut died = 0;
    for round in 0..MKFS_ROUNDS {
        victim.prepare(round % 2 == 1)?;
        let after = whole.mul_f64(rng.below(1200) as f64 / 1000.0);
        let signal = *rng.pick(&[Signal::KILL, Signal::INT]);
        let status = victim.make(Some((after, signal)))?;
        died += u32::from(!status.success());
        let ended = match ended_by(status, signal) {
            true => Ok(()),
            false => Err(format!("mkfs: {status}")),
        };
        if let Err(error) = ended.and_then(|()| victim.check(status.success())) {
            let micros = after.as_micros();
            suite.fail(format!("mkfs, {signal:?} after {micros} us: {error}"));
        }
    }
    match died {
        0 => suite.fail("no mkfs was interrupted".to_owned()),
        _ => suite.check::<String>(&format!("{died} interrupted mkfs"), Ok(())),
    }
    Ok(())
}

/// Two images that mkfs is interrupted on.
struct Victim<'a> {
    sheaf: &'a Path,
    images: [PathBuf; 2],
    old: [PathBuf; 2],
}

impl<'a> Victim<'a> {
    fn new(world: &'a World) -> Fallible<Self> {
        let at = |name: &str| world.side_dir().join(name);
        let victim = Victim {
            sheaf: world.sheaf(),
            images: [at("mkfs0.img"), at("mkfs1.img")],
            old: [at("old0.img"), at("old1.img")],
        };
        let mut mkfs = Command::new(victim.sheaf);
        mkfs.args(["mkfs", "-q", "--size", "64M"]).args(&victim.old);
        process::run("mkfs-old", &mut mkfs, Duration::from_secs(60))?.check("mkfs")?;
        Ok(victim)
    }

    /// Images of zeros, or of an older file system.
    fn prepare(&self, old: bool) -> Fallible<()> {
        for (image, source) in self.images.iter().zip(&self.old) {
            let done = match old {
                true => std::fs::copy(source, image).map(drop),
                false => std::fs::File::create(image).and_then(|file| file.set_len(64 << 20)),
            };
            done.map_err(|e| format!("{}: {e}", image.display()))?;
        }
        Ok(())
    }

    fn make(&self, end: Option<(Duration, Signal)>) -> Fallible<ExitStatus> {
        let mut child = Command::new(self.sheaf)
            .args(["mkfs", "-q", "--force", "--size", "64M"])
            .args(&self.images)
            .stdin(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(|e| format!("mkfs: {e}"))?;
        if let Some((after, signal)) = end {
            std::thread::sleep(after);
            let pid = Pid::from_raw(child.id() as i32).ok_or("no process id")?;
            // It may have ended by itself.
            let _ = kill_process(pid, signal);
        }
        process::wait(&mut child, Duration::from_secs(60))?.ok_or("mkfs does not end".to_owned())
    }

    /// What opens is sound.
    fn check(&self, made: bool) -> Fallible<()> {
        let mut quick = Command::new(self.sheaf);
        quick.args(["fsck", "--quick"]).args(&self.images);
        let quick = process::run("mkfs-quick", &mut quick, Duration::from_secs(60))?;
        if !opens(&quick)? {
            return match made {
                true => quick.check("what mkfs made does not open"),
                false => Ok(()),
            };
        }
        let mut fsck = Command::new(self.sheaf);
        fsck.arg("fsck").args(&self.images);
        process::run("mkfs-fsck", &mut fsck, Duration::from_secs(60))?.check("opens, but fsck")
    }
}

/// Whether this is an end of a mkfs that such a signal may have met: it was too late, it killed, or it was caught.
fn ended_by(status: ExitStatus, signal: Signal) -> bool {
    status.success()
        || status.signal() == Some(signal.as_raw())
        || (signal == Signal::INT && status.code() == Some(REFUSED[1]))
}

/// Whether fsck opens the array. One that neither opens it nor refuses it has failed.
fn opens(fsck: &Outcome) -> Fallible<bool> {
    let code = fsck.status.and_then(|status| status.code());
    match code.is_some_and(|code| REFUSED.contains(&code)) {
        true => Ok(false),
        false => fsck.check("fsck --quick").map(|()| true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stand_in(script: &str, limit: Duration) -> Outcome {
        let mut sh = Command::new("sh");
        sh.args(["-c", script]);
        process::run("mkfs-stand-in", &mut sh, limit).unwrap()
    }

    /// A panic of fsck was taken for an array that does not open.
    #[test]
    fn who_refuses_an_array_says_so_by_its_exit_code() {
        let ended = |script| opens(&stand_in(script, Duration::from_secs(60)));
        assert_eq!(ended("exit 0"), Ok(true));
        assert_eq!(ended("exit 4"), Ok(false));
        assert_eq!(ended("exit 8"), Ok(false));
        for script in ["exit 1", "exit 16", "exit 101", "kill -SEGV $$"] {
            let error = ended(script).unwrap_err();
            assert!(error.contains("fsck --quick"), "{script}: {error}");
        }
        let hung = stand_in("exec sleep 60", Duration::from_millis(1));
        assert!(opens(&hung).unwrap_err().contains("its time limit"));
    }

    #[test]
    fn an_interrupted_mkfs_ends_by_the_signal_or_in_order() {
        let ended = |script, signal| {
            let outcome = stand_in(script, Duration::from_secs(60));
            ended_by(outcome.status.unwrap(), signal)
        };
        assert!(ended("exit 0", Signal::KILL));
        assert!(ended("kill -KILL $$", Signal::KILL));
        assert!(ended("kill -INT $$", Signal::INT));
        assert!(ended("exit 8", Signal::INT));
        assert!(!ended("exit 8", Signal::KILL));
        assert!(!ended("exit 101", Signal::INT));
        assert!(!ended("kill -SEGV $$", Signal::INT));
    }
}
