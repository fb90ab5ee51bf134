//! What is asked of files: whose they are, at which places, how, and in requests of which size.

use base::rng::Rng;

use super::{Options, PAGE};
use crate::Error;

/// Whose files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// One file, of which each thread has a part; at random places all of it.
    Shared,
    /// One file, of which the threads take requests in turn.
    Strided,
    /// Each thread has one.
    Apart,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Random,
    Sequential,
}

/// How a side is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Buffered,
    /// Past the cache.
    Direct,
    /// Likewise, with several requests of each thread in flight.
    Aio,
    /// Through the cache, with several requests of each thread in flight.
    AioBuffered,
}

impl Way {
    pub const ALL: [Way; 4] = [Way::Buffered, Way::Direct, Way::Aio, Way::AioBuffered];

    pub fn name(self) -> &'static str {
        match self {
            Way::Buffered => "buffered",
            Way::Direct => "direct",
            Way::Aio => "aio",
            Way::AioBuffered => "aio-buffered",
        }
    }

    pub fn is_buffered(self) -> bool {
        matches!(self, Way::Buffered | Way::AioBuffered)
    }

    /// Requests of a thread at a time.
    pub fn depth(self, options: &Options) -> usize {
        match self {
            Way::Buffered | Way::Direct => 1,
            Way::Aio | Way::AioBuffered => options.depth,
        }
    }

    /// Requests of parts of pages go through a cache wherever they are sent.
    pub fn takes(self, request: u64) -> bool {
        self.is_buffered() || request.is_multiple_of(PAGE)
    }
}

/// Names that the user gives, and what they stand for.
fn select<T: Copy>(names: &[String], all: &[(&str, T)], what: &str) -> Result<Vec<T>, Error> {
    let find = |name: &String| {
        let found = all.iter().find(|(known, _)| *known == name.trim());
        found.map(|(_, value)| *value).ok_or_else(|| {
            let known: Vec<&str> = all.iter().map(|(known, _)| *known).collect();
            let known = known.join(", ");
            Error::Usage(format!("{what} takes {known}, and no '{name}'"))
        })
    };
    names.iter().map(find).collect()
}

pub fn select_layouts(names: &[String]) -> Result<Vec<Layout>, Error> {
    let all = [Layout::Shared, Layout::Strided, Layout::Apart];
    select(
        names,
        &all.map(|layout| (layout.name(), layout)),
        "--layout",
    )
}

pub fn select_accesses(names: &[String]) -> Result<Vec<Access>, Error> {
    let all = [Access::Random, Access::Sequential];
    select(
        names,
        &all.map(|access| (access.name(), access)),
        "--access",
    )
}

pub fn select_ways(names: &[String]) -> Result<Vec<Way>, Error> {
    select(names, &Way::ALL.map(|way| (way.name(), way)), "--way")
}

impl Layout {
    fn name(self) -> &'static str {
        match self {
            Layout::Shared => "shared",
            Layout::Strided => "strided",
            Layout::Apart => "apart",
        }
    }
}

impl Access {
    fn name(self) -> &'static str {
        match self {
            Access::Random => "random",
            Access::Sequential => "sequential",
        }
    }

    /// Bytes of a request where the user does not say.
    pub fn request(self) -> u64 {
        match self {
            Access::Random => PAGE,
            Access::Sequential => 1 << 20,
        }
    }
}

/// What is done to the files, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    Read,
    Overwrite,
    /// They are removed, and others written that take the place.
    WriteNew,
}

impl Deed {
    pub fn writes(self) -> bool {
        self != Deed::Read
    }
}

/// Which files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    pub layout: Layout,
    pub access: Access,
    pub request: u64,
    pub threads: usize,
}

impl Kind {
    pub fn name(self, deed: Deed) -> String {
        let (layout, access) = (self.layout.name(), self.access.name());
        let what = match deed {
            Deed::Read => "read",
            Deed::Overwrite => "write",
            Deed::WriteNew => "write of new files",
        };
        let request = match self.request {
            bytes if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
            bytes if bytes >= 1 << 10 => format!("{} KiB", bytes >> 10),
            bytes => format!("{bytes} B"),
        };
        format!("{layout} {access} {what}, {request}")
    }

    /// What is done to them: new files are written from their beginning on, by one thread each.
    pub fn deeds(self) -> &'static [Deed] {
        let apart = self.files() == self.threads;
        match self.access == Access::Sequential && apart {
            true => &[Deed::Read, Deed::Overwrite, Deed::WriteNew],
            false => &[Deed::Read, Deed::Overwrite],
        }
    }

    pub fn files(self) -> usize {
        match self.layout {
            Layout::Shared | Layout::Strided => 1,
            Layout::Apart => self.threads,
        }
    }

    /// Requests that a thread's part of all files holds.
    pub fn units(self, options: &Options) -> u64 {
        options.bytes / self.threads as u64 / self.request
    }

    /// Bytes of each file.
    pub fn file_bytes(self, options: &Options) -> u64 {
        let parts = (self.threads / self.files()) as u64;
        self.units(options) * self.request * parts
    }
}

/// The places of one thread's requests.
pub struct Walk {
    kind: Kind,
    thread: u64,
    /// Of a thread.
    units: u64,
    next: u64,
    /// It ends when as many were made as there are.
    once: bool,
    places: Rng,
}

impl Walk {
    pub fn new(kind: Kind, options: &Options, thread: usize, once: bool) -> Walk {
        Walk {
            kind,
            thread: thread as u64,
            units: kind.units(options),
            next: 0,
            once,
            places: Rng::new(thread as u64),
        }
    }
}

impl Iterator for Walk {
    /// A file, and the offset in it.
    type Item = (usize, u64);

    fn next(&mut self) -> Option<(usize, u64)> {
        if self.once && self.next == self.units {
            return None;
        }
        let (kind, threads, thread) = (self.kind, self.kind.threads as u64, self.thread);
        let in_turn = self.next % self.units;
        self.next += 1;
        let (file, unit) = match (kind.layout, kind.access) {
            (Layout::Apart, Access::Random) => (thread, self.places.below(self.units)),
            (Layout::Apart, Access::Sequential) => (thread, in_turn),
            (_, Access::Random) => (0, self.places.below(self.units * threads)),
            (Layout::Shared, Access::Sequential) => (0, thread * self.units + in_turn),
            (Layout::Strided, Access::Sequential) => (0, in_turn * threads + thread),
        };
        Some((file as usize, unit * kind.request))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::options;
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    #[test]
    fn threads_in_turn_reach_every_request_once() {
        let options = options(Path::new("/"));
        for layout in [Layout::Shared, Layout::Strided, Layout::Apart] {
            let kind = Kind {
                layout,
                access: Access::Sequential,
                request: 1 << 16,
                threads: 4,
            };
            let walks = (0..4).flat_map(|thread| Walk::new(kind, &options, thread, true));
            let places: Vec<(usize, u64)> = walks.collect();
            let distinct: BTreeSet<_> = places.iter().copied().collect();
            assert_eq!((places.len(), distinct.len()), (128, 128), "{layout:?}");
            let last = places.iter().map(|(_, at)| at + kind.request).max();
            assert_eq!(last, Some(kind.file_bytes(&options)));
            let files = places.iter().map(|(file, _)| file).collect::<BTreeSet<_>>();
            assert_eq!(files.len(), kind.files());
        }
    }

    #[test]
    fn random_places_are_within_the_files_and_those_that_are_not_cached_have_no_end() {
        let options = options(Path::new("/"));
        for layout in [Layout::Shared, Layout::Apart] {
            let kind = Kind {
                layout,
                access: Access::Random,
                request: 4096,
                threads: 2,
            };
            let end = kind.file_bytes(&options);
            let walk = Walk::new(kind, &options, 1, false).take(5000);
            assert!(walk.into_iter().all(|(file, at)| {
                at % 4096 == 0 && at < end && file == if layout == Layout::Apart { 1 } else { 0 }
            }));
            let once = Walk::new(kind, &options, 1, true);
            assert_eq!(once.count() as u64, kind.units(&options));
        }
    }
}
