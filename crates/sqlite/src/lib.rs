//! SQLite on a Sheaf mount: built so that it commits by atomic writes of its database, in place of a journal, where the file system knows
//! them.
//!
//! For tests and measurements alone: nothing of Sheaf depends on it. [`database`] is as much
//! of SQLite as these need; [`ledger`] is a database whose rows tell whether any is missing or half there; [`kills`] kills who writes
//! it, and the daemon below it.

pub mod database;
pub mod kills;
pub mod ledger;
pub mod served;

/// What went wrong, in words for whoever runs the program.
pub type Fallible<T> = Result<T, String>;

/// Puts what was tried before what went wrong.
pub(crate) fn context<T, E: std::fmt::Display>(
    result: Result<T, E>,
    what: impl std::fmt::Display,
) -> Fallible<T> {
    result.map_err(|error| format!("{what}: {error}"))
}
