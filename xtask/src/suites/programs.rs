//! Programs that people run: git, cargo, sqlite with a write-ahead log, tar.

use super::{Context, script};
use crate::report::Suite;
use crate::world::World;
use crate::{Fallible, process};

/// Clones this project (or, where it lies in no repository, a copy of its sources).
const GIT: &str = r#"
export GIT_CONFIG_COUNT=3
export GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
export GIT_CONFIG_KEY_1=user.name GIT_CONFIG_VALUE_1=Tester
export GIT_CONFIG_KEY_2=user.email GIT_CONFIG_VALUE_2=tester@localhost
if git -C "$SOURCE" rev-parse --git-dir > /dev/null 2>&1; then
    git clone --no-hardlinks "$SOURCE" clone
else
    mkdir clone
    cp -r "$SOURCE/crates" "$SOURCE/xtask" clone
    git -C clone init
    git -C clone add .
    git -C clone commit -m 'All files'
fi
cd clone
git fsck --full --strict
test -z "$(git status --porcelain)"
git checkout -q -b other
for i in $(seq 50); do
    echo "$i" >> numbers
    git add numbers
    git commit -q -m "Number $i"
done
git gc -q --aggressive --prune=now
git fsck --full
git checkout -q -
git worktree add -q ../second other
test "$(wc -l < ../second/numbers)" = 50
git -C ../second status
"#;

const CARGO: &str = r#"
unset CARGO_TARGET_DIR
mkdir -p crate/src
cat > crate/Cargo.toml <<'EOF'
[package]
name = "small"
version = "0.1.0"
edition = "2024"
[workspace]
EOF
echo 'pub fn answer() -> u32 { 42 }' > crate/src/lib.rs
echo 'fn main() { println!("{}", small::answer()); }' > crate/src/main.rs
cd crate
cargo build --offline
test "$(target/debug/small)" = 42
echo 'pub fn answer() -> u32 { 43 }' > src/lib.rs
cargo build --offline --release
test "$(target/release/small)" = 43
cargo build --offline
test "$(cargo run -q --offline)" = 43
"#;

const SQLITE: &str = r#"
test "$(sqlite3 db 'PRAGMA journal_mode=WAL;')" = wal
sqlite3 db 'CREATE TABLE t(id INTEGER PRIMARY KEY, word TEXT, bytes BLOB); CREATE INDEX i ON t(word);'
fill() {
    sqlite3 -cmd '.timeout 60000' db "
        BEGIN IMMEDIATE;
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000)
        INSERT INTO t(word, bytes) SELECT '$1-' || i, randomblob(100 + i % 400) FROM n;
        COMMIT;"
}
for round in 1 2 3 4 5; do
    fill "a$round" & first=$!
    fill "b$round" & second=$!
    sqlite3 -cmd '.timeout 60000' db 'SELECT count(*) FROM t;' > /dev/null
    wait $first
    wait $second
done
test "$(sqlite3 db 'SELECT count(*) FROM t;')" = 20000
for i in $(seq 100); do
    sqlite3 -cmd '.timeout 60000' db "UPDATE t SET word = 'u$i' WHERE id = $i;"
done
sqlite3 db 'PRAGMA wal_checkpoint(TRUNCATE);'
test "$(sqlite3 db 'PRAGMA integrity_check;')" = ok
sqlite3 db 'DELETE FROM t WHERE id % 2 = 0; VACUUM;'
test "$(sqlite3 db 'PRAGMA integrity_check;')" = ok
test "$(sqlite3 db 'SELECT count(*) FROM t;')" = 10000
"#;

/// At most 3,000 files and 200 MB of the toolchain, there and back.
const TAR: &str = r#"
cd "$(rustc --print sysroot)"
find lib share etc -type f -size -32M -printf '%s %p\n' 2> /dev/null | sort -k 2 |
    awk '{ sum += $1; if (sum <= 200e6 && NR <= 3000) print $2 }' > "$SIDE/files"
test "$(wc -l < "$SIDE/files")" -gt 20
tar -cf "$MNT/original.tar" -T "$SIDE/files"
xargs -d '\n' sha256sum < "$SIDE/files" > "$SIDE/sums"
mkdir "$MNT/unpacked"
cd "$MNT/unpacked"
tar -xf ../original.tar
sha256sum --quiet --check "$SIDE/sums"
tar -cf ../again.tar -T "$SIDE/files"
tar -df ../again.tar
mkdir ../twice
tar -xf ../again.tar -C ../twice
diff -r . ../twice
rm -r ../twice ../unpacked
"#;

/// Buffered writes, mappings and truncation seen through several descriptors and links.
const COREUTILS: &str = r#"
mkdir tree
for i in $(seq 300); do echo "$i" > "tree/file$i"; ln "tree/file$i" "tree/link$i"; done
cp -a tree copy
diff -r tree copy
test "$(stat -c %h copy/file7)" = 2
mv copy moved
find moved -name 'link*' -delete
test "$(ls moved | wc -l)" = 300
dd if=/dev/urandom of=big bs=1M count=32 status=none
cp --sparse=always big big2
cmp big big2
truncate -s 10T sparse
test "$(stat -c %s sparse)" = 10995116277760
test "$(du -k sparse | cut -f1)" -lt 64
rm -rf tree moved big big2 sparse
"#;

pub fn run(_: &Context, world: &mut World, suite: &mut Suite) -> Fallible<()> {
    let settings = format!(
        "export SOURCE='{}' MNT='{}' SIDE='{}'\n",
        process::source_dir().display(),
        world.mnt.display(),
        world.side_dir().display()
    );
    let scripts = [
        ("git", GIT, 300),
        ("cargo", CARGO, 300),
        ("sqlite", SQLITE, 300),
        ("tar", TAR, 300),
        ("coreutils", COREUTILS, 120),
    ];
    for (name, text, seconds) in scripts {
        let text = format!("{settings}{text}");
        let result = script(&format!("program-{name}"), &world.mnt, &text, seconds);
        suite.check(name, result);
    }
    Ok(())
}
