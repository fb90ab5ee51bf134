//! A connection to a database: statements in text, and ones that are prepared once.

use std::ffi::{CStr, CString};
use std::marker::PhantomData;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::{self, NonNull};

use libsqlite3_sys as ffi;

use crate::{Fallible, context};

/// How long a connection waits for one that holds a lock, in milliseconds.
const PATIENCE_MS: i32 = 10_000;

/// How SQLite makes transactions whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Journal {
    /// A file beside the database, unless the file system can write atomically.
    Rollback,
    /// A log beside the database.
    Wal,
}

impl Journal {
    fn name(self) -> &'static str {
        match self {
            Journal::Rollback => "delete",
            Journal::Wal => "wal",
        }
    }
}

/// A connection, used by one thread at a time.
#[derive(Debug)]
pub struct Database(NonNull<ffi::sqlite3>);

// SAFETY: SQLite is built to be used by many threads, and a connection may go from one to another.
unsafe impl Send for Database {}

impl Database {
    /// Opens a database, and makes it if there is none. Commits are durable (`synchronous=FULL`).
    pub fn open(path: &Path, journal: Journal) -> Fallible<Database> {
        let name = context(CString::new(path.as_os_str().as_bytes()), path.display())?;
        let mut raw = ptr::null_mut();
        let flags = ffi::SQLITE_OPEN_READWRITE | ffi::SQLITE_OPEN_CREATE;
        // SAFETY: the name ends with zero and outlives the call; the connection is put where the pointer shows.
        let code = unsafe { ffi::sqlite3_open_v2(name.as_ptr(), &raw mut raw, flags, ptr::null()) };
        let raw = NonNull::new(raw).ok_or("no memory for a connection")?;
        let database = Database(raw);
        database.check(code, &format!("open {}", path.display()))?;
        // SAFETY: the connection is open.
        unsafe { ffi::sqlite3_busy_timeout(raw.as_ptr(), PATIENCE_MS) };
        let set = database.text(&format!("PRAGMA journal_mode={}", journal.name()))?;
        if set != journal.name() {
            return Err(format!("the journal is {set:?}, not {:?}", journal.name()));
        }
        database.execute("PRAGMA synchronous=FULL")?;
        Ok(database)
    }

    fn check(&self, code: i32, what: &str) -> Fallible<()> {
        match code {
            ffi::SQLITE_OK | ffi::SQLITE_ROW | ffi::SQLITE_DONE => Ok(()),
            _ => {
                // SAFETY: the message lives until the next call with this connection, and is copied before.
                let message = unsafe { CStr::from_ptr(ffi::sqlite3_errmsg(self.0.as_ptr())) };
                // SAFETY: the connection is open.
                let extended = unsafe { ffi::sqlite3_extended_errcode(self.0.as_ptr()) };
                Err(format!(
                    "{what}: {} ({extended})",
                    message.to_string_lossy()
                ))
            }
        }
    }

    /// Runs statements that give nothing back.
    pub fn execute(&self, sql: &str) -> Fallible<()> {
        let text = context(CString::new(sql), sql)?;
        // SAFETY: the text ends with zero and outlives the call; nothing is called back.
        let code = unsafe {
            ffi::sqlite3_exec(
                self.0.as_ptr(),
                text.as_ptr(),
                None,
                ptr::null_mut(),
                ptr::null_mut(),
            )
        };
        self.check(code, sql)
    }

    /// The first column of the first row.
    pub fn text(&self, sql: &str) -> Fallible<String> {
        let mut statement = self.prepare(sql)?;
        match statement.step()? {
            true => Ok(statement.column_text(0)),
            false => Err(format!("{sql}: no row")),
        }
    }

    /// The same of a number.
    pub fn number(&self, sql: &str) -> Fallible<i64> {
        let mut statement = self.prepare(sql)?;
        match statement.step()? {
            true => Ok(statement.column(0)),
            false => Err(format!("{sql}: no row")),
        }
    }

    pub fn prepare(&self, sql: &str) -> Fallible<Statement<'_>> {
        let text = context(CString::new(sql), sql)?;
        let mut raw = ptr::null_mut();
        // SAFETY: the text ends with zero and outlives the call; the statement is put where the pointer shows.
        let code = unsafe {
            ffi::sqlite3_prepare_v2(
                self.0.as_ptr(),
                text.as_ptr(),
                -1,
                &raw mut raw,
                ptr::null_mut(),
            )
        };
        self.check(code, sql)?;
        let raw = NonNull::new(raw).ok_or_else(|| format!("{sql}: no statement"))?;
        Ok(Statement {
            raw,
            database: self,
            _not_shared: PhantomData,
        })
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // SAFETY: all statements are gone, for they borrow the connection.
        unsafe { ffi::sqlite3_close(self.0.as_ptr()) };
    }
}

/// A statement of a connection.
#[derive(Debug)]
pub struct Statement<'d> {
    raw: NonNull<ffi::sqlite3_stmt>,
    database: &'d Database,
    _not_shared: PhantomData<*const ()>,
}

impl Statement<'_> {
    /// Sets a parameter, from 1 on, to a number.
    pub fn bind(&mut self, parameter: i32, value: i64) -> Fallible<()> {
        // SAFETY: the statement is alive.
        let code = unsafe { ffi::sqlite3_bind_int64(self.raw.as_ptr(), parameter, value) };
        self.database.check(code, "bind")
    }

    /// Sets a parameter to bytes, which are copied.
    pub fn bind_bytes(&mut self, parameter: i32, value: &[u8]) -> Fallible<()> {
        let len = context(i32::try_from(value.len()), "bind")?;
        // SAFETY: the bytes outlive the call, which copies them.
        let code = unsafe {
            ffi::sqlite3_bind_blob(
                self.raw.as_ptr(),
                parameter,
                value.as_ptr().cast(),
                len,
                ffi::SQLITE_TRANSIENT(),
            )
        };
        self.database.check(code, "bind")
    }

    /// Goes on to the next row; false after the last.
    pub fn step(&mut self) -> Fallible<bool> {
        // SAFETY: the statement is alive.
        let code = unsafe { ffi::sqlite3_step(self.raw.as_ptr()) };
        self.database.check(code, "step")?;
        Ok(code == ffi::SQLITE_ROW)
    }

    /// Runs it to its end, and makes it ready to be run again.
    pub fn run(&mut self) -> Fallible<()> {
        while self.step()? {}
        // SAFETY: the statement is alive. What it returns was told by the last step.
        unsafe { ffi::sqlite3_reset(self.raw.as_ptr()) };
        Ok(())
    }

    pub fn column(&self, column: i32) -> i64 {
        // SAFETY: the statement has a row; a column that it does not have is 0.
        unsafe { ffi::sqlite3_column_int64(self.raw.as_ptr(), column) }
    }

    pub fn column_bytes(&self, column: i32) -> Vec<u8> {
        // SAFETY: the pointer is good for as many bytes until the next call with this statement.
        unsafe {
            let bytes = ffi::sqlite3_column_blob(self.raw.as_ptr(), column).cast::<u8>();
            let len = ffi::sqlite3_column_bytes(self.raw.as_ptr(), column);
            match bytes.is_null() {
                true => Vec::new(),
                false => std::slice::from_raw_parts(bytes, len as usize).to_vec(),
            }
        }
    }

    fn column_text(&self, column: i32) -> String {
        String::from_utf8_lossy(&self.column_bytes(column)).into_owned()
    }
}

impl Drop for Statement<'_> {
    fn drop(&mut self) {
        // SAFETY: it is not used any more.
        unsafe { ffi::sqlite3_finalize(self.raw.as_ptr()) };
    }
}
