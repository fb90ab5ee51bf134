//! `sheaf ls`: folders of a file system that is not mounted.

use std::io::{self, BufWriter, Write};

use fs::Attr;
use serde::Serialize;

use crate::args::Ls;
use crate::failure::{Failed, Failure, OPERATIONAL, Outcome};
use crate::offline::{Named, Offline, bytes, inside, join, named};
use crate::output::{self, harmless};

/// One entry as `--json` shows it, one per line.
#[derive(Serialize)]
struct Shown<'a> {
    path: String,
    /// All bytes of a path that is not UTF-8, in hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    path_bytes: Option<String>,
    inode: u64,
    kind: &'static str,
    /// Not those of an inode that cannot be read.
    #[serde(flatten)]
    attributes: Option<Attributes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
    /// As `path_bytes`.
    #[serde(skip_serializing_if = "Option::is_none")]
    target_bytes: Option<String>,
    /// Why something is not shown.
    #[serde(flatten)]
    failed: Option<Failed<'a>>,
}

#[derive(Serialize)]
struct Attributes {
    mode: u32,
    links: u32,
    uid: u32,
    gid: u32,
    size: u64,
    /// Seconds since 1970.
    mtime: i64,
}

pub fn run(args: &Ls) -> Outcome {
    let offline = Offline::open(&args.source.devices, true)?;
    let mut out = BufWriter::new(io::stdout().lock());
    let mut listing = Listing {
        args,
        offline: &offline,
        out: &mut out,
        code: 0,
    };
    for path in &args.paths {
        listing.path(inside(path).unwrap_or(bytes(path)))?;
    }
    let code = listing.code;
    out.flush().map_err(|e| output::failed(&e))?;
    drop(out);
    offline.close()?;
    Ok(code)
}

/// What is listed, as far as it can be read: what fails is told, and the rest listed all the same, as by ls(1). A method fails if
/// nobody reads that.
struct Listing<'a> {
    args: &'a Ls,
    offline: &'a Offline,
    out: &'a mut dyn Write,
    code: u8,
}

impl Listing<'_> {
    fn path(&mut self, path: &[u8]) -> Result<(), Failure> {
        match self.offline.find(path) {
            Ok(attr) if attr.is_dir() => self.folder(path, attr),
            Ok(attr) => {
                let itself = Named {
                    name: path.to_vec(),
                    ino: attr.ino,
                    mode: attr.mode,
                };
                self.entry(path, &itself, Ok(attr))
            }
            Err(failure) => self.failed(&failure),
        }
    }

    /// Lists a folder, and with `-R` those in it, without recursion on the stack.
    fn folder(&mut self, path: &[u8], attr: Attr) -> Result<(), Failure> {
        let mut waiting = vec![(path.to_vec(), attr.ino)];
        while let Some((path, ino)) = waiting.pop() {
            if self.args.recursive && !self.args.json {
                self.text(&format!("{}:\n", harmless(&path)))?;
            }
            let (mut folders, mut lost) = (Vec::new(), Vec::new());
            let names = self.offline.names(&path, ino, |why| lost.push(why));
            for failure in &lost {
                self.failed(failure)?;
            }
            for entry in names {
                let inside = join(&path, &entry.name);
                let attr = self.offline.look(&path, ino, &entry.name);
                if self.args.recursive && attr.as_ref().is_ok_and(Attr::is_dir) {
                    folders.push((inside.clone(), entry.ino));
                }
                self.entry(&inside, &entry, attr)?;
            }
            waiting.extend(folders.into_iter().rev());
        }
        Ok(())
    }

    fn entry(
        &mut self,
        path: &[u8],
        entry: &Named,
        attr: Result<Attr, Failure>,
    ) -> Result<(), Failure> {
        let (attr, mut why, mut target) = match attr {
            Ok(attr) => (Some(attr), None, None),
            Err(failure) => (None, Some(failure), None),
        };
        if let Some(link) = attr.filter(|attr| kind(attr.mode).0 == "symlink") {
            match self.offline.fs.readlink(link.ino) {
                Ok(to) => target = Some(to),
                Err(error) => why = Some(named(path, error)),
            }
        }
        if let Some(failure) = &why {
            self.tell(failure);
        }
        match (self.args.json, self.args.long) {
            (true, _) => self.object(&Shown {
                path: lossy(path),
                path_bytes: beyond_utf8(path),
                inode: entry.ino.0,
                kind: kind(entry.mode).0,
                attributes: attr.map(|attr| Attributes {
                    mode: attr.mode & 0o7777,
                    links: attr.nlink,
                    uid: attr.uid,
                    gid: attr.gid,
                    size: attr.size,
                    mtime: attr.mtime.sec(),
                }),
                target: target.as_deref().map(lossy),
                target_bytes: target.as_deref().and_then(beyond_utf8),
                failed: why.as_ref().and_then(Failure::shown),
            }),
            (_, false) => self.text(&format!("{}\n", harmless(&entry.name))),
            (_, true) => {
                let arrow = target.map(|to| format!(" -> {}", harmless(&to)));
                let arrow = arrow.unwrap_or_default();
                let start = long_start(entry, attr);
                self.text(&format!("{start} {}{arrow}\n", harmless(&entry.name)))
            }
        }
    }

    /// Tells of a failure after which the rest is listed.
    fn tell(&mut self, failure: &Failure) {
        failure.tell();
        self.code = OPERATIONAL;
    }

    /// The same of what has no entry to tell it with.
    fn failed(&mut self, failure: &Failure) -> Result<(), Failure> {
        self.tell(failure);
        match failure.shown() {
            Some(failed) if self.args.json => self.object(&failed),
            _ => Ok(()),
        }
    }

    fn object(&mut self, object: &impl Serialize) -> Result<(), Failure> {
        let line = serde_json::to_string(object).map_err(|e| Failure::new(e.to_string()))?;
        self.text(&format!("{line}\n"))
    }

    fn text(&mut self, text: &str) -> Result<(), Failure> {
        self.out
            .write_all(text.as_bytes())
            .map_err(|e| output::failed(&e))
    }
}

fn lossy(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

/// The bytes of what no JSON string can be, as two digits each.
fn beyond_utf8(name: &[u8]) -> Option<String> {
    let hex = |name: &[u8]| name.iter().map(|byte| format!("{byte:02x}")).collect();
    std::str::from_utf8(name).is_err().then(|| hex(name))
}

/// What `--long` shows in front of a name; of an inode that cannot be read as ls(1) does.
fn long_start(entry: &Named, attr: Option<Attr>) -> String {
    match attr {
        Some(attr) => format!(
            "{} {:4} {:5} {:5} {:12} {}",
            mode_text(attr.mode),
            attr.nlink,
            attr.uid,
            attr.gid,
            attr.size,
            date(attr.mtime.sec()),
        ),
        None => format!(
            "{}????????? {:>4} {:>5} {:>5} {:>12} {:>19}",
            kind(entry.mode).1,
            '?',
            '?',
            '?',
            '?',
            '?'
        ),
    }
}

/// The file type's name and letter.
fn kind(mode: u32) -> (&'static str, char) {
    match mode & libc::S_IFMT {
        libc::S_IFDIR => ("folder", 'd'),
        libc::S_IFLNK => ("symlink", 'l'),
        libc::S_IFIFO => ("fifo", 'p'),
        libc::S_IFSOCK => ("socket", 's'),
        libc::S_IFCHR => ("character device", 'c'),
        libc::S_IFBLK => ("block device", 'b'),
        _ => ("file", '-'),
    }
}

/// As ls(1) shows it: `drwxr-xr-x`.
fn mode_text(mode: u32) -> String {
    let mut text = String::from(kind(mode).1);
    for (shift, special, letter) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let bits = mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (bits & 1 != 0, mode & special != 0) {
            (true, true) => letter,
            (false, true) => letter.to_ascii_uppercase(),
            (true, false) => 'x',
            (false, false) => '-',
        });
    }
    text
}

/// A date in UTC, `2024-02-29 12:34:56`, by the proleptic Gregorian calendar.
fn date(seconds: i64) -> String {
    let (days, rest) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Days since 1 March of the year 0; years then end with their leap day.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = (shifted_month + 2) % 12 + 1;
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02}",
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right() {
        assert_eq!(date(0), "1970-01-01 00:00:00");
        assert_eq!(date(951_827_696), "2000-02-29 12:34:56");
        assert_eq!(date(-1), "1969-12-31 23:59:59");
        assert_eq!(date(4_102_444_800), "2100-01-01 00:00:00");
    }

    #[test]
    fn modes_look_as_in_ls() {
        assert_eq!(mode_text(libc::S_IFDIR | 0o1777), "drwxrwxrwt");
        assert_eq!(mode_text(libc::S_IFREG | 0o4750), "-rwsr-x---");
        assert_eq!(mode_text(libc::S_IFREG | 0o2640), "-rw-r-S---");
    }
}
