//! `sheaf ls`: folders of a file system that is not mounted.

use std::io::{self, BufWriter, Write};

use fs::Attr;
use serde::Serialize;

use crate::args::Ls;
use crate::failure::{Failure, OPERATIONAL, Outcome};
use crate::offline::{Offline, bytes, inside, join};
use crate::output::{self, harmless};

/// One entry as `--json` shows it, one per line.
#[derive(Serialize)]
struct Shown<'a> {
    path: String,
    inode: u64,
    kind: &'static str,
    mode: u32,
    links: u32,
    uid: u32,
    gid: u32,
    size: u64,
    /// Seconds since 1970.
    mtime: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<&'a str>,
}

pub fn run(args: &Ls) -> Outcome {
    let offline = Offline::open(&args.source.devices, true)?;
    let mut out = BufWriter::new(io::stdout().lock());
    let mut listing = Listing {
        args,
        offline: &offline,
        out: &mut out,
    };
    let mut code = 0;
    for path in &args.paths {
        match listing.path(inside(path).unwrap_or(bytes(path))) {
            Ok(()) => {}
            // The others are listed all the same, as by ls(1), unless nobody reads that.
            Err(failure) if failure.message().is_some() => {
                failure.tell();
                code = OPERATIONAL;
            }
            Err(failure) => return Err(failure),
        }
    }
    out.flush().map_err(|e| output::failed(&e))?;
    drop(out);
    offline.close()?;
    Ok(code)
}

struct Listing<'a> {
    args: &'a Ls,
    offline: &'a Offline,
    out: &'a mut dyn Write,
}

impl Listing<'_> {
    fn path(&mut self, path: &[u8]) -> Result<(), Failure> {
        let attr = self.offline.find(path)?;
        match attr.is_dir() {
            true => self.folder(path, attr),
            false => self.entry(path, path, &attr),
        }
    }

    /// Lists a folder, and with `-R` those in it, without recursion on the stack.
    fn folder(&mut self, path: &[u8], attr: Attr) -> Result<(), Failure> {
        let mut waiting = vec![(path.to_vec(), attr.ino)];
        while let Some((path, ino)) = waiting.pop() {
            if self.args.recursive && !self.args.json {
                self.text(&format!("{}:\n", harmless(&path)))?;
            }
            let mut folders = Vec::new();
            for entry in self.offline.list(&path, ino)? {
                let inside = join(&path, &entry.name);
                self.entry(&inside, &entry.name, &entry.attr)?;
                if self.args.recursive && entry.attr.is_dir() {
                    folders.push((inside, entry.attr.ino));
                }
            }
            waiting.extend(folders.into_iter().rev());
        }
        Ok(())
    }

    fn entry(&mut self, path: &[u8], name: &[u8], attr: &Attr) -> Result<(), Failure> {
        let target = match kind(attr.mode) {
            ("symlink", _) => Some(harmless(&self.offline.fs.readlink(attr.ino)?)),
            _ => None,
        };
        if self.args.json {
            let shown = Shown {
                path: String::from_utf8_lossy(path).into_owned(),
                inode: attr.ino.0,
                kind: kind(attr.mode).0,
                mode: attr.mode & 0o7777,
                links: attr.nlink,
                uid: attr.uid,
                gid: attr.gid,
                size: attr.size,
                mtime: attr.mtime.sec(),
                target: target.as_deref(),
            };
            let line = serde_json::to_string(&shown).map_err(|e| Failure::new(e.to_string()))?;
            return self.text(&format!("{line}\n"));
        }
        if !self.args.long {
            return self.text(&format!("{}\n", harmless(name)));
        }
        let arrow = target.map(|t| format!(" -> {t}")).unwrap_or_default();
        self.text(&format!(
            "{} {:4} {:5} {:5} {:12} {} {}{arrow}\n",
            mode_text(attr.mode),
            attr.nlink,
            attr.uid,
            attr.gid,
            attr.size,
            date(attr.mtime.sec()),
            harmless(name),
        ))
    }

    fn text(&mut self, text: &str) -> Result<(), Failure> {
        self.out
            .write_all(text.as_bytes())
            .map_err(|e| output::failed(&e))
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
