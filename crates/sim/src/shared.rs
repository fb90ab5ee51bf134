//! Several threads in one file: writes of one page and of several, through the cache and past it, that overlap, beside reads,
//! write-back, syncs, cuts and growth, in an order that a seed decides. Some of what goes past the cache is to be durable when it has ended.
//! Some of that, and some syncs, are handed to a context, and asked for later. Some are atomic writes, staged long before they are committed, or dropped. Pages lose their blocks meanwhile, or have
//! some that hold nothing, so that what goes past the cache fills them.
//!
//! Each write has a value of its own, which fills all of it, in units of half a page; a punched unit has that of the first write, 0, which
//! is none. What is known of a unit is which writes were over before another began:
//!
//! 1. nobody sees a write of a unit that another had superseded before the read began: one that began after its end, and was over,
//!    or had been seen by a read that was over;
//! 2. nobody sees a write in part: not one of its units with what was written definitely before it in another, and of two writes that
//!    both cover two units not one in each;
//! 3. what a guard of a page showed when it was taken it shows as long as it lives;
//! 4. at the end the power goes: each sector has what some write made it that was not superseded when the last sync of the file
//!    began or was handed over, or an atomic or durable write of it that has ended, and `fsck` finds nothing. Of an atomic write nothing is there, or all that later ones
//!    have left.

use crate::world::{Image, Machine, Shape, Watch};
use base::rng::Rng;
use base::sync::{Mutex, rank};
use base::{sched, thread};
use device::sim::{PowerSwitch, Survival};
use device::{AlignedBuf, Topology};
use format::BLOCK_SIZE;
use fs::{
    AtomicWrite, Caller, Completion, Error, FileSystem, Ino, IoContext, OpenFile, PageGuard, ROOT,
    Request,
};
use std::ops::Range;
use std::sync::Arc;

const TASKS: usize = 3;
/// Operations of each thread.
const STEPS: u64 = 60;
const UNIT: usize = BLOCK_SIZE / 2;
/// Units of the file that all write; behind them it grows and is cut.
const UNITS: usize = 32;
const NEVER: u64 = u64::MAX;
/// Requests of each thread.
const IN_FLIGHT: usize = 4;

/// One run; an error says what was not as it must be.
pub fn run(seed: u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let mut shape = Shape::small(rng.range(1, 3));
    // Little but writes over what is there, and syncs.
    let plain = rng.one_in(4);
    // So few that pages come and go all the time, or so many that none goes.
    let frames = if plain { 16 } else { *rng.pick(&[16, 32, 256]) };
    shape.options.data.cache_bytes = frames * BLOCK_SIZE;
    // And beside them threads that commit, write back and read ahead.
    shape.options.store.background = plain || rng.one_in(4);
    // With few dirty pages a set is crowded then, and cleaned.
    shape.tight = plain || rng.one_in(2);
    let mut fortune = Rng::new(seed ^ 0x70B0_1067);
    if fortune.one_in(3) {
        shape.topology = Topology::PerDevice;
        shape.plain = fortune.one_in(2);
    }
    let machine = Machine::new(&Image::format(&shape)?, seed);
    let (cut, resizes) = (rng.one_in(3), rng.one_in(2));
    let after = rng.below(400);
    let at_syncs = !cut && fortune.one_in(2);
    let ledger = Mutex::new(rank::LEDGER, Ledger::new());
    let switch = Arc::clone(&machine.switch);
    if plain || rng.one_in(2) {
        let late = Late(Mutex::new(rank::LEAF, Rng::new(seed)));
        machine.tap.watch(Arc::new(late));
    }
    let ino = sched::run("one file", seed, &machine.clock, || {
        let fs = machine.open().map_err(text)?;
        let ino = prepare(&fs, &ledger).map_err(text)?;
        if !resizes {
            scatter(&fs, ino, fortune.below(16)).map_err(text)?;
        }
        if cut {
            switch.cut_after(after);
        }
        let worked = thread::parallel(TASKS, |me| {
            let open = |flags| fs.open_file(ino, flags).map_err(text);
            let work = || {
                let mut task = Task {
                    me,
                    fs: &fs,
                    ino,
                    ledger: &ledger,
                    file: open(libc::O_RDWR)?,
                    past: open(libc::O_RDWR | libc::O_DIRECT)?,
                    durable: open(libc::O_RDWR | libc::O_DIRECT | libc::O_DSYNC)?,
                    scanned: open(libc::O_RDONLY)?,
                    scan_at: 0,
                    rng: Rng::new(seed ^ (me as u64 + 1)),
                    resizes,
                    plain,
                    context: fs.io_context(IN_FLIGHT as u32).map_err(text)?,
                    in_flight: Vec::new(),
                    guards: Vec::new(),
                    staged: None,
                    switch: at_syncs.then(|| Arc::clone(&switch)),
                };
                let steps = if plain { STEPS / 3 } else { STEPS };
                (0..steps).try_for_each(|_| task.step())?;
                task.look_at_guards()?;
                match task.rng.one_in(2) {
                    true => task.complete(IN_FLIGHT),
                    // They have to be done all the same, and nobody is told.
                    false => Ok(()),
                }
            };
            match work() {
                // What a read has found wrong counts nevertheless.
                Err(Trouble::Failed(_)) if switch.is_cut() => Ok(()),
                Err(Trouble::Failed(what) | Trouble::Wrong(what)) => Err(what),
                Ok(()) => Ok(()),
            }
        });
        let mut worked = worked.into_iter().collect::<Result<(), String>>();
        if worked.is_ok() && !switch.is_cut() {
            let covered = ledger.lock().floors(0..UNITS);
            match fs.fsync_inode(ino, true) {
                Ok(()) => ledger.lock().synced(0..UNITS, &covered),
                Err(_) if switch.is_cut() => {}
                Err(error) => worked = Err(format!("fsync: {error}")),
            }
        }
        switch.cut_now();
        let closed = fs.close();
        worked?;
        match closed {
            Ok(()) => Err("a file system closes without power".to_owned()),
            Err(_) => Ok(ino),
        }
    })?;
    let now_ns = machine.now_ns();
    let crashed = machine.cut(*rng.pick(&Survival::ALL), &mut rng);
    let machine = Machine::after(&shape, crashed, now_ns);
    machine.fsck()?;
    let fs = machine.open().map_err(|e| e.to_string())?;
    left(&fs, ino, &ledger)?;
    fs.close().map_err(|e| format!("close: {e}"))
}

/// Devices that begin to write long after they were told to, and that have read, and say so much later.
struct Late(Mutex<Rng>);

impl Late {
    fn dawdle(&self) {
        let turns = {
            let mut rng = self.0.lock();
            rng.below(100) * rng.below(2)
        };
        (0..turns).for_each(|_| thread::yield_now());
    }
}

impl Watch for Late {
    fn before(&self, _: usize, _: u64, _: &[u8]) {
        self.dawdle();
    }

    fn after(&self) {}

    fn after_read(&self) {
        self.dawdle();
    }
}

fn text(error: Error) -> Trouble {
    Trouble::Failed(error.to_string())
}

enum Trouble {
    /// An operation failed.
    Failed(String),
    /// A read found what cannot be.
    Wrong(String),
}

impl From<Trouble> for String {
    fn from(trouble: Trouble) -> String {
        match trouble {
            Trouble::Failed(what) | Trouble::Wrong(what) => what,
        }
    }
}

/// A write; its number is its value.
struct Write {
    units: Range<usize>,
    began: u64,
    ended: u64,
    is_atomic: bool,
    /// It was a punch: its units have the value 0.
    is_punch: bool,
}

struct Ledger {
    now: u64,
    writes: Vec<Write>,
    /// Of each unit the newest beginning of a write that is over, or was seen: what had ended before that is superseded.
    floors: Vec<u64>,
    /// The floors when the last sync of the file began.
    durable: Vec<u64>,
}

impl Ledger {
    fn new() -> Ledger {
        Ledger {
            now: 0,
            writes: Vec::new(),
            floors: vec![0; UNITS],
            durable: vec![0; UNITS],
        }
    }

    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// A write begins; returns its value.
    fn begin(&mut self, units: Range<usize>) -> usize {
        let began = self.tick();
        self.writes.push(Write {
            units,
            began,
            ended: NEVER,
            is_atomic: false,
            is_punch: false,
        });
        self.writes.len() - 1
    }

    /// A punch begins, as a write; returns its number.
    fn begin_punch(&mut self, units: Range<usize>) -> usize {
        let number = self.begin(units);
        self.writes[number].is_punch = true;
        number
    }

    /// A value for an atomic write: nobody may see it yet.
    fn stage(&mut self) -> usize {
        self.writes.push(Write {
            units: 0..0,
            began: NEVER,
            ended: NEVER,
            is_atomic: true,
            is_punch: false,
        });
        self.writes.len() - 1
    }

    /// Its commit begins.
    fn begin_commit(&mut self, value: usize, units: Range<usize>) {
        let began = self.tick();
        let write = &mut self.writes[value];
        (write.units, write.began) = (units, began);
    }

    /// It has ended, and is durable.
    fn committed(&mut self, value: usize) {
        self.end(value);
        let (units, began) = (self.writes[value].units.clone(), self.writes[value].began);
        let floors = vec![began; units.len()];
        self.synced(units, &floors);
    }

    /// After a cut: where one unit shows an atomic write, no unit of that shows what had ended before it.
    fn check_whole(&self, found: &[(usize, u64)]) -> Result<(), String> {
        let write = |value: u64| &self.writes[value as usize];
        let atomic = found.iter().filter(|(_, value)| write(*value).is_atomic);
        for (_, value) in atomic {
            let (units, began) = (&write(*value).units, write(*value).began);
            let older = |(unit, other): &&(usize, u64)| {
                units.contains(unit) && *other != 0 && write(*other).ended < began
            };
            if let Some((unit, other)) = found.iter().find(older) {
                return Err(format!(
                    "unit {unit} has {other}, where atomic write {value} is there in part"
                ));
            }
        }
        Ok(())
    }

    fn end(&mut self, value: usize) {
        let now = self.tick();
        self.writes[value].ended = now;
        self.seen(self.writes[value].units.clone(), value);
    }

    fn seen(&mut self, units: Range<usize>, value: usize) {
        let began = self.writes[value].began;
        for floor in &mut self.floors[units] {
            *floor = began.max(*floor);
        }
    }

    fn floors(&self, units: Range<usize>) -> Vec<u64> {
        self.floors[units].to_vec()
    }

    fn synced(&mut self, units: Range<usize>, floors: &[u64]) {
        for (durable, floor) in self.durable[units].iter_mut().zip(floors) {
            *durable = (*floor).max(*durable);
        }
    }

    /// Whether the unit has this value by a write of it that is not superseded.
    fn known(&self, unit: usize, value: u64, floor: u64) -> Result<(), String> {
        let mut writes = self.of(unit, value).peekable();
        if writes.peek().is_none() {
            return Err(format!("unit {unit} has {value}, which nobody wrote there"));
        }
        match writes.any(|write| write.ended >= floor) {
            true => Ok(()),
            false => Err(format!("unit {unit} has {value}, which was superseded")),
        }
    }

    /// What may have given a unit this value: one write, or the first and all punches.
    fn of(&self, unit: usize, value: u64) -> impl Iterator<Item = &Write> {
        let written = self.writes.get(value as usize);
        let written = written.filter(|write| !write.is_punch);
        let punches = (self.writes.iter()).filter(move |write| write.is_punch && value == 0);
        let all = written.into_iter().chain(punches);
        all.filter(move |write| write.units.contains(&unit))
    }

    /// A read of these units is over that began when the floors were these.
    fn read(&mut self, first: usize, values: &[u64], floors: &[u64]) -> Result<(), String> {
        let units = first..first + values.len();
        for ((unit, &value), &floor) in units.clone().zip(values).zip(floors) {
            self.known(unit, value, floor)?;
        }
        let write = |unit: usize| &self.writes[values[unit - first] as usize];
        for (a, b) in units
            .clone()
            .flat_map(|a| units.clone().map(move |b| (a, b)))
        {
            let (x, y) = (write(a), write(b));
            let differ = values[a - first] != values[b - first];
            let (is_punched, ended) = match values[b - first] {
                // The last that may have been.
                0 => (
                    true,
                    self.of(b, 0).map(|write| write.ended).max().unwrap_or(0),
                ),
                _ => (false, y.ended),
            };
            if values[a - first] == 0 {
                continue;
            }
            let older = x.units.contains(&b) && ended < x.began;
            let both = !is_punched && x.units.contains(&b) && y.units.contains(&a);
            if differ && (older || both) {
                let (x, y) = (values[a - first], values[b - first]);
                return Err(format!("units {a}, {b} have {x}, {y}: a write is torn"));
            }
        }
        for ((unit, &value), &floor) in units.zip(values).zip(floors) {
            let seen = self.of(unit, value).filter(|write| write.ended >= floor);
            let began = seen.map(|write| write.began).min().unwrap_or(0);
            self.floors[unit] = self.floors[unit].max(began);
        }
        Ok(())
    }
}

fn bytes_of(value: usize, units: usize) -> Vec<u8> {
    let words = units * UNIT / 8;
    (0..words)
        .flat_map(|_| (value as u64).to_le_bytes())
        .collect()
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    bytes.chunks_exact(8).map(word)
}

fn prepare(fs: &FileSystem, ledger: &Mutex<Ledger>) -> Result<Ino, Error> {
    let made = fs.mknod(&Caller::root(), ROOT, b"shared", libc::S_IFREG | 0o644, 0)?;
    let file = fs.open_file(made.ino, libc::O_RDWR)?;
    let value = ledger.lock().begin(0..UNITS);
    fs.write(&file, 0, &bytes_of(value, UNITS))?;
    fs.sync()?;
    let mut ledger = ledger.lock();
    ledger.end(value);
    let floors = ledger.floors(0..UNITS);
    ledger.synced(0..UNITS, &floors);
    Ok(made.ino)
}

/// Gives the file so many pieces behind what all write, so that a few more make a tree of them.
fn scatter(fs: &FileSystem, ino: Ino, pieces: u64) -> Result<(), Error> {
    let file = fs.open_file(ino, libc::O_RDWR)?;
    let first = (UNITS * UNIT) as u64;
    for piece in 0..pieces {
        fs.write(
            &file,
            first + (2 * piece + 1) * BLOCK_SIZE as u64,
            &[1; BLOCK_SIZE],
        )?;
    }
    fs.sync()
}

/// What the file has after the power went and came back.
fn left(fs: &FileSystem, ino: Ino, ledger: &Mutex<Ledger>) -> Result<(), String> {
    let file = fs.open_file(ino, libc::O_RDONLY).map_err(text)?;
    let mut bytes = vec![0; UNITS * UNIT];
    let len = fs.read(&file, 0, &mut bytes).map_err(text)?;
    if len != bytes.len() {
        return Err(format!("{len} bytes are left of the file"));
    }
    let ledger = ledger.lock();
    let mut found = Vec::new();
    for (unit, bytes) in bytes.chunks(UNIT).enumerate() {
        for sector in bytes.chunks(512) {
            let mut values = words(sector);
            let value = values.next().unwrap_or_default();
            if values.any(|other| other != value) {
                return Err(format!("a sector of unit {unit} is torn"));
            }
            let known = ledger.known(unit, value, ledger.durable[unit]);
            known.map_err(|what| format!("after the cut {what}"))?;
            found.push((unit, value));
        }
    }
    found.dedup();
    ledger.check_whole(&found)
}

struct Task<'a> {
    me: usize,
    fs: &'a Arc<FileSystem>,
    ino: Ino,
    ledger: &'a Mutex<Ledger>,
    file: Arc<OpenFile>,
    past: Arc<OpenFile>,
    /// What is written through it is past the cache, and durable when it has ended.
    durable: Arc<OpenFile>,
    /// Through which it reads one piece behind the other, up to here.
    scanned: Arc<OpenFile>,
    scan_at: usize,
    rng: Rng,
    resizes: bool,
    plain: bool,
    context: IoContext,
    in_flight: Vec<InFlight>,
    /// With what they showed.
    guards: Vec<(PageGuard, Vec<u8>)>,
    /// An atomic write, its value and its units.
    staged: Option<(AtomicWrite, usize, Range<usize>)>,
    /// The power may go when a sync that was handed over has ended.
    switch: Option<Arc<PowerSwitch>>,
}

/// How a write goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Cached,
    Past,
    /// Past the cache as well.
    Durable,
}

/// A request of a task's.
enum InFlight {
    Write {
        value: usize,
        how: How,
    },
    Read {
        first: usize,
        floors: Vec<u64>,
    },
    /// With what was over when it was handed over.
    Sync {
        floors: Vec<u64>,
    },
}

impl Task<'_> {
    fn step(&mut self) -> Result<(), Trouble> {
        if self.plain && !self.rng.one_in(8) {
            return match self.me {
                0 if self.rng.one_in(4) => self.fly_and_sync(),
                0 => self.crowd_and_sync(),
                _ if self.rng.one_in(3) => self.read_guards(),
                _ if self.rng.one_in(2) => self.scan(),
                _ => self.read(),
            };
        }
        match self.rng.below(40) {
            38.. => self.sync_in_a_row(),
            34..38 => self.punch(),
            30..34 => self.write_atomically(),
            26..30 => self.scan(),
            20..24 => self.submit(),
            24..26 => self.complete(0),
            0..4 => self.write_past(),
            4..8 => self.write(6),
            8..10 => self.write(2),
            10..14 => self.read(),
            14..16 => self.read_guards(),
            16 => self.fs.fsync_inode(self.ino, true).map_err(text),
            17 => self.sync(),
            18 => self.fs.tick().map_err(text),
            _ => self.resize(),
        }
    }

    fn units(&mut self, most: usize) -> Range<usize> {
        let first = self.rng.below(UNITS as u64) as usize;
        let most = most.min(UNITS - first) as u64;
        first..first + 1 + self.rng.below(most) as usize
    }

    /// Stages an atomic write, or commits or drops the one that is staged.
    fn write_atomically(&mut self) -> Result<(), Trouble> {
        if let Some((write, value, units)) = self.staged.take() {
            if self.rng.one_in(5) {
                return Ok(());
            }
            self.ledger.lock().begin_commit(value, units);
            write.commit().map_err(text)?;
            self.ledger.lock().committed(value);
            return Ok(());
        }
        let units = match self.rng.one_in(8) {
            true => 0..UNITS,
            false => self.units(6),
        };
        let value = self.ledger.lock().stage();
        let bytes = bytes_of(value, units.len());
        let who = Caller::root();
        let mut write = self.fs.atomic_write(&who, &self.file).map_err(text)?;
        let middle = self.rng.below(bytes.len() as u64 / 8) as usize * 8;
        let at = (units.start * UNIT) as u64;
        let staged = write
            .write(at + middle as u64, &bytes[middle..])
            .and_then(|()| write.write(at, &bytes[..middle]))
            .and_then(|()| match self.resizes && self.rng.one_in(4) {
                true => write.truncate((UNITS * UNIT) as u64),
                false => Ok(()),
            });
        staged.map_err(text)?;
        self.staged = Some((write, value, units));
        Ok(())
    }

    fn write(&mut self, most: usize) -> Result<(), Trouble> {
        let units = self.units(most);
        let how = match self.rng.one_in(8) {
            true => self.past(),
            false => How::Cached,
        };
        self.write_units(units, how)
    }

    /// Whole pages.
    fn write_past(&mut self) -> Result<(), Trouble> {
        let units = self.units(6);
        let how = self.past();
        self.write_units(units.start / 2 * 2..units.end.next_multiple_of(2), how)
    }

    fn past(&mut self) -> How {
        match self.rng.one_in(4) {
            true => How::Durable,
            false => How::Past,
        }
    }

    fn file(&self, how: How) -> &Arc<OpenFile> {
        match how {
            How::Cached => &self.file,
            How::Past => &self.past,
            How::Durable => &self.durable,
        }
    }

    /// A write has ended as it should.
    fn ended(&self, value: usize, how: How) {
        let mut ledger = self.ledger.lock();
        match how {
            How::Durable => ledger.committed(value),
            How::Cached | How::Past => ledger.end(value),
        }
    }

    /// Whole pages lose their blocks; some get others, which hold nothing.
    fn punch(&mut self) -> Result<(), Trouble> {
        let units = self.units(8);
        let units = units.start / 2 * 2..units.end.next_multiple_of(2);
        let (at, len) = ((units.start * UNIT) as u64, (units.len() * UNIT) as u64);
        let number = self.ledger.lock().begin_punch(units);
        let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        self.fs.fallocate(&self.file, hole, at, len).map_err(text)?;
        self.ledger.lock().end(number);
        match self.rng.one_in(2) {
            true => self.fs.fallocate(&self.file, 0, at, len).map_err(text),
            false => Ok(()),
        }
    }

    fn write_units(&mut self, units: Range<usize>, how: How) -> Result<(), Trouble> {
        let value = self.ledger.lock().begin(units.clone());
        let bytes = bytes_of(value, units.len());
        let at = (units.start * UNIT) as u64;
        let written = self.fs.write(self.file(how), at, &bytes).map_err(text)?;
        // As far as it came when the power went.
        if written != bytes.len() {
            return Err(Trouble::Failed(format!("a write of {written} bytes")));
        }
        self.ended(value, how);
        Ok(())
    }

    /// Has a write, or several, land, and syncs: there is nothing else to make durable.
    fn fly_and_sync(&mut self) -> Result<(), Trouble> {
        self.sync()?;
        (0..IN_FLIGHT).try_for_each(|_| self.submit())?;
        self.complete(self.context.in_flight())?;
        self.sync()
    }

    /// Writes as much as is soon cleaned, and syncs beside that.
    fn crowd_and_sync(&mut self) -> Result<(), Trouble> {
        (0..8).try_for_each(|_| self.write(2))?;
        (0..self.rng.below(200)).for_each(|_| thread::yield_now());
        self.sync()
    }

    /// Reads, or writes whole pages past the cache, later.
    fn submit(&mut self) -> Result<(), Trouble> {
        if self.context.in_flight() == IN_FLIGHT {
            return self.complete(1);
        }
        let units = self.units(6);
        let (reads, past) = (self.rng.one_in(3), self.rng.one_in(2));
        let pages = units.start / 2 * 2..units.end.next_multiple_of(2);
        let (how, units) = match (reads, past) {
            (true, false) => (How::Cached, units),
            (true, true) => (How::Past, pages),
            _ => (self.past(), pages),
        };
        let (file, offset) = (Arc::clone(self.file(how)), (units.start * UNIT) as u64);
        let mut ledger = self.ledger.lock();
        let (what, request) = match reads {
            true => {
                let buf = AlignedBuf::zeroed(units.len() * UNIT);
                let (first, floors) = (units.start, ledger.floors(units));
                let what = InFlight::Read { first, floors };
                (what, Request::Read { file, offset, buf })
            }
            false => {
                let value = ledger.begin(units.clone());
                let buf = AlignedBuf::from_slice(&bytes_of(value, units.len()));
                let what = InFlight::Write { value, how };
                (what, Request::Write { file, offset, buf })
            }
        };
        drop(ledger);
        self.hand_over(what, request)
    }

    fn hand_over(&mut self, what: InFlight, request: Request) -> Result<(), Trouble> {
        self.in_flight.push(what);
        let user = self.in_flight.len() as u64 - 1;
        let taken = self.context.submit(&mut vec![(user, request)]);
        match taken {
            1 => Ok(()),
            _ => Err(Trouble::Wrong("a request is not taken".into())),
        }
    }

    /// Looks what has ended of that; so many have to.
    fn complete(&mut self, at_least: usize) -> Result<(), Trouble> {
        let mut ended = Vec::new();
        self.context.wait(at_least, &mut ended, None);
        ended.into_iter().try_for_each(|done| self.completed(done))
    }

    fn completed(&mut self, done: Completion) -> Result<(), Trouble> {
        let len = done.result.map_err(text)?;
        if len != done.buf.len() {
            return Err(Trouble::Failed(format!(
                "{len} bytes of {}",
                done.buf.len()
            )));
        }
        match &self.in_flight[done.user as usize] {
            InFlight::Write { value, how } => {
                self.ended(*value, *how);
                Ok(())
            }
            InFlight::Sync { floors } => {
                self.ledger.lock().synced(0..UNITS, floors);
                if let Some(switch) = &self.switch
                    && self.rng.one_in(4)
                {
                    switch.cut_now();
                }
                Ok(())
            }
            InFlight::Read { first, floors } => self.saw(*first, &done.buf, floors),
        }
    }

    fn read(&mut self) -> Result<(), Trouble> {
        let units = self.units(8);
        let file = match self.rng.one_in(3) {
            true => &self.past,
            false => &self.file,
        };
        self.read_units(file, units)
    }

    /// Goes on where the last one ended, which makes it a stream where limits are tight.
    fn scan(&mut self) -> Result<(), Trouble> {
        let last = (self.scan_at + 4 + 2 * self.rng.below(2) as usize).min(UNITS);
        let units = self.scan_at..last;
        self.scan_at = last % UNITS;
        self.read_units(&self.scanned, units)
    }

    fn read_units(&self, file: &OpenFile, units: Range<usize>) -> Result<(), Trouble> {
        let floors = self.ledger.lock().floors(units.clone());
        let mut bytes = vec![0xEE; units.len() * UNIT];
        let at = (units.start * UNIT) as u64;
        let len = self.fs.read(file, at, &mut bytes).map_err(text)?;
        let wrong = |what| Err(Trouble::Wrong(what));
        if len != bytes.len() {
            return wrong(format!("a read of {len} bytes"));
        }
        self.saw(units.start, &bytes, &floors)
    }

    /// Reads where the pages are, and keeps some of them for later steps.
    fn read_guards(&mut self) -> Result<(), Trouble> {
        self.look_at_guards()?;
        let units = self.units(8);
        let floors = self.ledger.lock().floors(units.clone());
        let (at, len) = ((units.start * UNIT) as u64, (units.len() * UNIT) as u64);
        let guards = self.fs.read_guards(&self.file, at, len).map_err(text)?;
        let bytes: Vec<u8> = guards.iter().flat_map(|guard| guard.to_vec()).collect();
        let units = bytes.len() / UNIT;
        self.saw((at as usize) / UNIT, &bytes, &floors[..units])?;
        let shown = guards.into_iter().map(|guard| {
            let bytes = guard.to_vec();
            (guard, bytes)
        });
        self.guards.extend(shown);
        self.look_at_guards()?;
        // There are few for all tasks.
        let kept = self.rng.below(3) as usize;
        self.guards.truncate(kept);
        Ok(())
    }

    fn look_at_guards(&self) -> Result<(), Trouble> {
        thread::yield_now();
        match self.guards.iter().find(|(guard, bytes)| **guard != **bytes) {
            None => Ok(()),
            Some((guard, _)) => Err(Trouble::Wrong(format!(
                "a guard of byte {} shows something else by now",
                guard.offset()
            ))),
        }
    }

    /// A read that began when the floors were these has brought these bytes.
    fn saw(&self, first: usize, bytes: &[u8], floors: &[u64]) -> Result<(), Trouble> {
        let mut values = Vec::new();
        for (unit, bytes) in (first..).zip(bytes.chunks(UNIT)) {
            let value = words(bytes).next().unwrap_or_default();
            if words(bytes).any(|other| other != value) {
                return Err(Trouble::Wrong(format!("unit {unit} is torn")));
            }
            values.push(value);
        }
        (self.ledger.lock().read(first, &values, floors)).map_err(Trouble::Wrong)
    }

    /// Half of the syncs are handed over, and end beside what comes next.
    fn sync(&mut self) -> Result<(), Trouble> {
        if self.rng.one_in(2) {
            return self.submit_sync();
        }
        let floors = self.ledger.lock().floors(0..UNITS);
        self.fs.fsync(&self.file, true).map_err(text)?;
        self.ledger.lock().synced(0..UNITS, &floors);
        Ok(())
    }

    fn submit_sync(&mut self) -> Result<(), Trouble> {
        if self.context.in_flight() == IN_FLIGHT {
            self.complete(1)?;
        }
        let floors = self.ledger.lock().floors(0..UNITS);
        let (file, data_only) = (Arc::clone(&self.file), self.rng.one_in(2));
        let request = Request::Fsync { file, data_only };
        self.hand_over(InFlight::Sync { floors }, request)
    }

    /// Writes while syncs are under way, and hands over others.
    fn sync_in_a_row(&mut self) -> Result<(), Trouble> {
        for _ in 0..IN_FLIGHT {
            self.submit_sync()?;
            let page = self.units(1).start / 2 * 2;
            self.write_units(page..page + 2, How::Past)?;
        }
        self.submit_sync()?;
        self.complete(self.context.in_flight())
    }

    /// The first task's alone: the file gets longer, or as short as it was.
    fn resize(&mut self) -> Result<(), Trouble> {
        if self.me > 0 || !self.resizes {
            return self.read();
        }
        let size = (UNITS * UNIT) as u64;
        let more = self.rng.below(5 * UNIT as u64);
        if self.rng.one_in(2) {
            let who = Caller::root();
            return self.fs.truncate(&who, self.ino, size + more).map_err(text);
        }
        let bytes = vec![0x77; more as usize + 1];
        self.fs
            .write(&self.file, size + more, &bytes)
            .map_err(text)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use base::canary::{Canary, plant};

    #[test]
    fn many_in_one_file_see_whole_writes() {
        for seed in 0..100 {
            super::run(seed).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
        }
    }

    #[test]
    fn what_holds_them_apart_is_needed() {
        let canaries = [
            Canary::RangeIgnored,
            Canary::StoresUnseen,
            Canary::DirectUnderHome,
            Canary::LoadUndoomed,
            Canary::FlightUnnoted,
            Canary::FlightKeptLate,
            Canary::CleanedTooEarly,
            Canary::GuardOverwritten,
            Canary::StreamUnasked,
            Canary::FilledBeforeWritten,
            Canary::SyncJoined,
        ];
        for canary in canaries {
            plant(Some(canary));
            let found = (0..500).find(|seed| super::run(*seed).is_err());
            plant(None);
            assert!(found.is_some(), "{canary:?}");
        }
    }
}
