//! Times and change cookies, on a clock with ticks: a few files and a directory that are changed, looked at, synced,
//! and lost in power cuts, in an order that a seed decides. The run plays the timers itself, exactly when they are due.
//!
//! What must hold, of what is shown while the power is on:
//!
//! 1. A time is that of the tick in which its change began, or later, and not after its end.
//! 2. What was changed since somebody looked has newer times; what was not has the same.
//! 3. Of two changes, whatever they are of, the later one has no older time.
//! 4. A cookie is greater than the one before if there was a change in between, and else the same.
//!
//! And of what a power cut leaves:
//!
//! 5. A time is one that there was. It is no older than that of a change which the timers, or a sync, must have
//!    made durable: of content after the interval for times and that of commits, of all else after the latter.
//! 6. Cookies are greater than any that were handed out before.
//!
//! Apart from that ([`crowd`]): whoever looks at a directory which others change finds the same count of directories in it as
//! long as he finds the same time; and a power cut after a sync changes neither.

use crate::look::{list, shown};
use crate::times::Shown;
use crate::world::{Crashed, Image, Machine, Shape};
use base::rng::Rng;
use base::{sched, thread};
use device::sim::Survival;
use fs::{Caller, FileSystem, Ino, OpenFile, ROOT, SetAttr};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

const TICK_NS: u64 = 4_000_000;
/// Stamps are told apart by so many nanoseconds where the clock is not.
const SLACK_NS: u64 = 1_000;
const FILES: usize = 3;
const STEPS: u64 = 120;
/// How often the file system looks after files at least.
const PERIOD: Duration = Duration::from_secs(1);

fn ns(duration: Duration) -> u64 {
    duration.as_nanos() as u64
}

/// A change of something, by the time of its operation.
#[derive(Clone, Copy, Debug)]
struct Change {
    began: u64,
    ended: u64,
    content: bool,
    /// After a sync, or a recovery.
    durable: bool,
}

impl Change {
    /// The earliest stamp it may have.
    fn first(&self) -> u64 {
        self.began / TICK_NS * TICK_NS
    }

    fn may_show(&self, time: u64) -> bool {
        (self.first()..=self.ended + SLACK_NS).contains(&time)
    }
}

/// A file or the directory.
struct Thing {
    name: String,
    ino: Ino,
    /// Of a file.
    open: Option<Arc<OpenFile>>,
    /// Since all was known; the first is what was found then.
    changes: Vec<Change>,
    found: Shown,
    /// What was shown last, after so many changes.
    shown: Option<(Shown, usize)>,
    cookie: Option<(u64, usize)>,
}

impl Thing {
    fn new(name: String, ino: Ino, open: Option<Arc<OpenFile>>, found: Shown) -> Thing {
        Thing {
            name,
            ino,
            open,
            changes: Vec::new(),
            found,
            shown: None,
            cookie: None,
        }
    }

    /// The newest change, of content or of any kind.
    fn newest(&self, content: bool) -> Option<&Change> {
        let mut changes = self.changes.iter().rev();
        changes.find(|change| change.content || !content)
    }

    fn check(&self, time: u64, content: bool, found: u64) -> Result<(), String> {
        let right = match self.newest(content) {
            Some(change) => change.may_show(time),
            None => time == found,
        };
        match right {
            true => Ok(()),
            false => Err(format!(
                "{}: shows {time}, {:?}",
                self.name,
                self.newest(content)
            )),
        }
    }

    /// Rules 1 and 2.
    fn look(&mut self, now: Shown) -> Result<(), String> {
        self.check(now.mtime, true, self.found.mtime)?;
        self.check(now.ctime, false, self.found.ctime)?;
        if let Some((before, at)) = self.shown {
            let since = &self.changes[at..];
            let (any, content) = (!since.is_empty(), since.iter().any(|c| c.content));
            let newer = |now: u64, before: u64, changed| match changed {
                true => now > before,
                false => now == before,
            };
            if !newer(now.mtime, before.mtime, content) || !newer(now.ctime, before.ctime, any) {
                return Err(format!(
                    "{}: showed {before:?}, then {now:?} after {since:?}",
                    self.name
                ));
            }
        }
        self.shown = Some((now, self.changes.len()));
        Ok(())
    }

    /// Rule 5; `due` says whether a change must be there.
    fn recovered(&self, now: Shown, due: impl Fn(&Change) -> bool) -> Result<(), String> {
        for (time, content, found) in [
            (now.mtime, true, self.found.mtime),
            (now.ctime, false, self.found.ctime),
        ] {
            let mut changes = self.changes.iter().filter(|c| c.content || !content);
            let known = time == found || changes.clone().any(|c| c.may_show(time));
            if !known {
                return Err(format!("{}: nothing was changed at {time}", self.name));
            }
            if let Some(missing) = changes.rfind(|c| due(c))
                && time < missing.first()
            {
                return Err(format!(
                    "{}: a time of {time}, where {missing:?} is durable",
                    self.name
                ));
            }
        }
        Ok(())
    }
}

struct World {
    machine: Machine,
    fs: Arc<FileSystem>,
    rng: Rng,
    things: Vec<Thing>,
    interval: Duration,
    commit: Duration,
    next_look: u64,
    next_commit: u64,
    /// All timers that were due by then have done their work.
    healthy: u64,
    /// Names in the directory.
    names: u64,
}

type Failed = String;

/// One run; an error says what was not as it must be.
pub fn run(seed: u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let interval = Duration::from_millis(*rng.pick(&[1000, 1000, 10, 1, 0]));
    let mut shape = Shape::small(2);
    shape.tick = Duration::from_nanos(TICK_NS);
    shape.options.data.mtime_persist = interval;
    let machine = Machine::new(&Image::format(&shape)?, seed);
    let fs = machine.open().map_err(|e| e.to_string())?;
    let now = machine.now_ns();
    let mut world = World {
        fs,
        rng,
        things: Vec::new(),
        interval,
        commit: shape.options.store.commit_interval,
        next_look: now,
        next_commit: now,
        healthy: now,
        names: 0,
        machine,
    };
    world.prepare().map_err(|e| e.to_string())?;
    for _ in 0..3 {
        let soon = world.rng.one_in(2);
        let steps = world.rng.range(10, STEPS);
        for step in 0..steps {
            if soon && step + 4 > steps {
                let after = world.rng.below(6);
                world.machine.switch.cut_after(after);
            }
            match world.step() {
                Ok(()) => {}
                Err(_) if world.machine.switch.is_cut() => break,
                Err(what) => return Err(what),
            }
        }
        world = world.crash(&shape)?;
    }
    Ok(())
}

impl World {
    fn prepare(&mut self) -> Result<(), fs::Error> {
        for i in 0..FILES {
            let name = format!("f{i}");
            let made = self
                .fs
                .create(&Caller::root(), ROOT, name.as_bytes(), 0o644, libc::O_RDWR);
            let (attr, open) = made?;
            self.fs.write(&open, 0, &[0; 8192])?;
            self.things
                .push(Thing::new(name, attr.ino, Some(open), shown(&attr)));
        }
        let dir = self.fs.mkdir(&Caller::root(), ROOT, b"d", 0o755)?;
        self.things
            .push(Thing::new("d".into(), dir.ino, None, shown(&dir)));
        self.fs.sync()?;
        for thing in &mut self.things {
            thing.found = shown(&self.fs.getattr(thing.ino)?);
        }
        Ok(())
    }

    /// Lets time pass, and what is due in it happen.
    fn pass(&mut self, span: u64) -> Result<(), Failed> {
        let end = self.machine.now_ns() + span;
        loop {
            let due = self.next_look.min(self.next_commit).min(end);
            let now = self.machine.now_ns();
            let gap = Duration::from_nanos(due.saturating_sub(now));
            self.machine.clock.advance(gap);
            if self.next_look <= due {
                self.next_look = due + ns((self.interval + self.commit).min(PERIOD));
                self.fs.tick().map_err(|e| e.to_string())?;
            }
            if self.next_commit <= due {
                self.next_commit = due + ns(self.commit);
                let store = self.fs.store();
                let committed = store.commit_through(store.epoch());
                committed.map_err(|e| e.to_string())?;
            }
            if due == end {
                self.healthy = end;
                return Ok(());
            }
        }
    }

    fn change(
        &mut self,
        of: &[(usize, bool)],
        work: impl FnOnce(&mut World) -> Result<(), fs::Error>,
    ) -> Result<(), Failed> {
        let began = self.machine.now_ns();
        let done = work(self);
        let ended = self.machine.now_ns();
        for (thing, content) in of {
            self.things[*thing].changes.push(Change {
                began,
                ended,
                content: *content,
                durable: false,
            });
        }
        done.map_err(|e| e.to_string())
    }

    fn step(&mut self) -> Result<(), Failed> {
        let span = match self.rng.below(8) {
            0 => 0,
            1..5 => self.rng.below(1_000_000),
            5..7 => self.rng.below(3 * TICK_NS),
            _ => self.rng.below(900_000_000),
        };
        self.pass(span)?;
        let file = self.rng.below(FILES as u64) as usize;
        match self.rng.below(20) {
            0..7 => self.overwrite(file),
            7..9 => self.fsync(file),
            9 => self.chmod(file),
            10..12 => self.name(),
            12..16 => {
                let thing = self.rng.below(FILES as u64 + 1) as usize;
                self.look(thing)
            }
            16 => self.look_at_all(),
            17..19 => {
                let thing = self.rng.below(FILES as u64 + 1) as usize;
                self.cookie(thing)
            }
            _ if self.rng.one_in(2) => self.sync(),
            _ => self.reopen(),
        }
    }

    fn overwrite(&mut self, file: usize) -> Result<(), Failed> {
        let page = self.rng.below(2) * 4096;
        let byte = self.rng.below(256) as u8;
        let open = self.things[file].open.clone().expect("files are open");
        self.change(&[(file, true)], |world| {
            world.fs.write(&open, page, &[byte; 4096]).map(drop)
        })
    }

    fn fsync(&mut self, file: usize) -> Result<(), Failed> {
        let open = self.things[file].open.clone().expect("files are open");
        self.fs.fsync(&open, false).map_err(|e| e.to_string())?;
        if self.interval.is_zero() {
            self.things[file]
                .changes
                .iter_mut()
                .for_each(|c| c.durable = true);
        }
        Ok(())
    }

    fn chmod(&mut self, file: usize) -> Result<(), Failed> {
        let mode = Some(0o600 + self.rng.below(64) as u32);
        let set = SetAttr {
            mode,
            ..SetAttr::default()
        };
        let ino = self.things[file].ino;
        self.change(&[(file, false)], |world| {
            world.fs.setattr(&Caller::root(), ino, &set).map(drop)
        })
    }

    /// The directory gains a name or loses one.
    fn name(&mut self) -> Result<(), Failed> {
        let dir = self.things[FILES].ino;
        let gone = self.names > 0 && self.rng.one_in(2);
        let number = match gone {
            true => self.names - 1,
            false => self.names,
        };
        let name = format!("n{number}");
        self.change(&[(FILES, true)], |world| match gone {
            true => {
                world.names -= 1;
                world.fs.unlink(&Caller::root(), dir, name.as_bytes())
            }
            false => {
                world.names += 1;
                let mode = libc::S_IFREG | 0o644;
                let made = world
                    .fs
                    .mknod(&Caller::root(), dir, name.as_bytes(), mode, 0);
                made.map(drop)
            }
        })
    }

    fn look(&mut self, thing: usize) -> Result<(), Failed> {
        let attr = self.fs.getattr(self.things[thing].ino);
        let attr = attr.map_err(|e| e.to_string())?;
        self.things[thing].look(shown(&attr))
    }

    /// Rule 3, of the newest changes of all.
    fn look_at_all(&mut self) -> Result<(), Failed> {
        let mut stamps = Vec::new();
        for i in 0..self.things.len() {
            self.look(i)?;
            let thing = &self.things[i];
            let (shown, _) = thing.shown.expect("just shown");
            for (content, time) in [(true, shown.mtime), (false, shown.ctime)] {
                stamps.extend(thing.newest(content).map(|change| (*change, time)));
            }
        }
        for (first, time) in &stamps {
            let later = stamps
                .iter()
                .filter(|(other, _)| other.began >= first.ended);
            if let Some((other, younger)) = later.clone().find(|(_, other)| other < time) {
                return Err(format!(
                    "{other:?} came after {first:?}, and shows {younger}, which is before {time}"
                ));
            }
        }
        Ok(())
    }

    /// Rule 4.
    fn cookie(&mut self, thing: usize) -> Result<(), Failed> {
        let cookie = self.fs.change_cookie(self.things[thing].ino);
        let cookie = cookie.map_err(|e| e.to_string())?;
        let thing = &mut self.things[thing];
        if let Some((before, at)) = thing.cookie {
            let right = match thing.changes.len() > at {
                true => cookie > before,
                false => cookie == before,
            };
            if !right {
                let since = &thing.changes[at..];
                let name = &thing.name;
                return Err(format!(
                    "{name}: cookie {before}, then {cookie} after {since:?}"
                ));
            }
        }
        // To be asked is to be looked at.
        thing.cookie = Some((cookie, thing.changes.len()));
        Ok(())
    }

    fn all_durable(&mut self) {
        let changes = self.things.iter_mut().flat_map(|thing| &mut thing.changes);
        changes.for_each(|change| change.durable = true);
    }

    fn sync(&mut self) -> Result<(), Failed> {
        self.fs.sync().map_err(|e| e.to_string())?;
        self.all_durable();
        Ok(())
    }

    /// A clean end, and on: nothing changes by that.
    fn reopen(&mut self) -> Result<(), Failed> {
        self.things.iter_mut().for_each(|thing| thing.open = None);
        self.fs.close().map_err(|e| e.to_string())?;
        self.all_durable();
        let devices = self.machine.devices.iter();
        self.machine.devices = devices.map(|device| device.reopen()).collect();
        self.fs = self.machine.open().map_err(|e| e.to_string())?;
        self.open_files()?;
        self.look_at_all()
    }

    fn open_files(&mut self) -> Result<(), Failed> {
        for thing in &mut self.things[..FILES] {
            let open = self.fs.open_file(thing.ino, libc::O_RDWR);
            thing.open = Some(open.map_err(|e| e.to_string())?);
        }
        Ok(())
    }

    /// The power goes and comes back; rules 5 and 6.
    fn crash(mut self, shape: &Shape) -> Result<World, String> {
        self.things.iter_mut().for_each(|thing| thing.open = None);
        let crashed = self.power_off();
        let away = self.rng.below(10_000_000);
        let now = self.machine.now_ns() + away;
        self.machine = Machine::after(shape, crashed, now);
        let text = |error: fs::Error| format!("recovery: {error}");
        self.fs = self.machine.open().map_err(text)?;
        let (healthy, interval, commit) = (self.healthy, ns(self.interval), ns(self.commit));
        for i in 0..self.things.len() {
            let ino = self.things[i].ino;
            let found = shown(&self.fs.getattr(ino).map_err(text)?);
            let cookie = self.fs.change_cookie(ino).map_err(text)?;
            let thing = &mut self.things[i];
            let due = |change: &Change| {
                // A directory's times are in the records of its names.
                let coarse = change.content && i < FILES;
                let wait = commit + if coarse { interval } else { 0 };
                change.durable || change.ended + wait <= healthy
            };
            thing.recovered(found, due)?;
            if let Some((before, _)) = thing.cookie
                && cookie <= before
            {
                let name = &thing.name;
                return Err(format!(
                    "{name}: cookie {before} before a crash, {cookie} after it"
                ));
            }
            (thing.found, thing.shown) = (found, None);
            thing.changes.clear();
            thing.cookie = Some((cookie, 0));
        }
        self.names = list(&self.fs, self.things[FILES].ino).map_err(text)?.len() as u64;
        (self.next_look, self.next_commit) = (now, now);
        self.healthy = now;
        self.open_files()?;
        Ok(self)
    }

    fn power_off(&mut self) -> Crashed {
        let survival = *self.rng.pick(&Survival::ALL);
        self.machine.cut(survival, &mut self.rng)
    }
}

/// Two threads change a directory, a third one looks at it, in an order that the seed decides. Time stands almost
/// still, so that hardly a stamp is new but for looks. Of half of the seeds the power goes after a sync.
pub fn crowd(seed: u64) -> Result<(), String> {
    let mut shape = Shape::small(1);
    shape.tick = Duration::from_secs(3600);
    shape.tight = true;
    shape.options.store.shards = 2;
    let machine = Machine::new(&Image::format(&shape)?, seed);
    let text = |error: fs::Error| error.to_string();
    let cut = seed % 2 == 1;
    let (dir, found) = sched::run("a directory and its time", seed, &machine.clock, || {
        let fs = machine.open().map_err(text)?;
        let who = Caller::root();
        let dir = fs.mkdir(&who, ROOT, b"d", 0o755).map_err(text)?.ino;
        // More than an inode holds, so that who changes names shares the directory.
        for i in 0..40 {
            let name = format!("a name that is there all the time, {i}");
            let mode = libc::S_IFREG | 0o644;
            fs.mknod(&who, dir, name.as_bytes(), mode, 0)
                .map_err(text)?;
        }
        let worked = thread::parallel(3, |me| {
            let mut known: HashMap<Shown, u32> = HashMap::new();
            // A look is over sooner than a change; there are some between the last changes, too.
            for round in 0..if me < 2 { 30 } else { 300 } {
                let name = format!("{me}");
                if me < 2 {
                    match round % 2 {
                        0 => fs.mkdir(&who, dir, name.as_bytes(), 0o755).map(drop),
                        _ => fs.rmdir(&who, dir, name.as_bytes()),
                    }
                    .map_err(text)?;
                    continue;
                }
                let attr = fs.getattr(dir).map_err(text)?;
                if *known.entry(shown(&attr)).or_insert(attr.nlink) != attr.nlink {
                    let time = shown(&attr);
                    return Err(format!(
                        "another directory is in a directory, and still {time:?}"
                    ));
                }
            }
            Ok(())
        });
        worked.into_iter().collect::<Result<(), String>>()?;
        if cut {
            fs.sync().map_err(text)?;
        }
        let found = fs.getattr(dir).map_err(text)?;
        if cut {
            machine.switch.cut_now();
        }
        match fs.close() {
            Err(error) if !cut => Err(text(error)),
            Ok(()) if cut => Err("a file system closes without power".to_owned()),
            _ => Ok((dir, found)),
        }
    })?;
    if !cut {
        return Ok(());
    }
    let now_ns = machine.now_ns();
    let mut rng = Rng::new(seed);
    let crashed = machine.cut(*rng.pick(&Survival::ALL), &mut rng);
    let machine = Machine::after(&shape, crashed, now_ns);
    let fs = machine.open().map_err(text)?;
    let again = fs.getattr(dir).map_err(text)?;
    fs.close().map_err(text)?;
    match (shown(&again), again.nlink) == (shown(&found), found.nlink) {
        true => Ok(()),
        false => Err(format!(
            "{found:?}, though synced, is {again:?} after a power cut"
        )),
    }
}
