//! Open files: the calls of [`FileSystem`] that read, write and sync. Each refuses handles of another file system, with
//! [`Error::Invalid`].

use crate::Error;
use crate::api::{Caller, Ino};
use crate::data::{Advice, OpenFile, PageGuard};
use crate::filesystem::FileSystem;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

impl FileSystem {
    /// Opens a regular file; `flags` are `O_*`. `O_TRUNC` cuts it first, and takes set-id
    /// privileges away as a write would. The access mode, `O_APPEND`, `O_DIRECT`, `O_DSYNC`, `O_SYNC` and `O_NOATIME` are the handle's; all
    /// other flags do nothing.
    pub fn open_file(&self, ino: Ino, flags: i32) -> Result<Arc<OpenFile>, Error> {
        let file = self.open_uncut(ino, flags)?;
        if flags & libc::O_TRUNC != 0 {
            // First, as it may fail: the content is there still then.
            self.kill_privileges(ino)?;
            self.truncate(&Caller::root(), ino, 0)?;
        }
        Ok(file)
    }

    /// The same on somebody's behalf: `O_TRUNC` leaves set-id bits to whom [`FileSystem::truncate`] leaves them, and capabilities to nobody.
    pub fn open_file_as(&self, who: &Caller, ino: Ino, flags: i32) -> Result<Arc<OpenFile>, Error> {
        let file = self.open_uncut(ino, flags)?;
        if flags & libc::O_TRUNC != 0 {
            self.lose_capabilities(ino)?;
            self.truncate(who, ino, 0)?;
        }
        Ok(file)
    }

    fn open_uncut(&self, ino: Ino, flags: i32) -> Result<Arc<OpenFile>, Error> {
        if self.read_only() && flags & libc::O_ACCMODE != libc::O_RDONLY {
            return Err(Error::ReadOnly);
        }
        self.files.open(&self.owners, ino, flags)
    }

    /// Ends the use of a handle that others may have, too. What is asked of a context or a future by it from now on fails with
    /// [`Error::BadHandle`]; reads of it that are in flight end early with [`Error::Cancelled`], where the kernel lets them; writes that were handed over,
    /// and what a thread is at, are done. The file itself is let go with the last of its handle's owners, as after a drop.
    pub fn close_file(&self, file: Arc<OpenFile>) {
        file.files().close_handle(&file);
    }

    /// Reads up to `buf.len()` bytes at `offset`; fewer only at the end of the file.
    ///
    /// # Errors
    /// [`Error::BadHandle`], of all calls that read, when the file was opened with `O_WRONLY`.
    pub fn read(&self, file: &OpenFile, offset: u64, buf: &mut [u8]) -> Result<usize, Error> {
        self.files.owning(file)?.read(file, offset, buf)
    }

    /// Whether somebody has the file open for reading and writing, as who stores to it through a shared mapping must.
    pub fn may_be_mapped(&self, ino: Ino) -> bool {
        self.files.may_be_mapped(ino)
    }

    /// Counts as a read through this handle of bytes that somebody else has in memory, such as the kernel. Says whether the access time was due for a change, and
    /// so was renewed; never through a handle with `O_NOATIME`.
    ///
    /// # Errors
    /// Those of reading the inode.
    pub fn note_read(&self, file: &OpenFile) -> Result<bool, Error> {
        self.files.owning(file)?.note_read(file)
    }

    /// Reads without a copy: guards of the cached pages that these bytes are in, in their order, which show what one
    /// [`read`](Self::read) would have brought, each write whole or not at all, and go on showing it whatever is done to the file. Pages that are not
    /// cached are read first, holes and what lies in the inode too.
    ///
    /// Fewer pages, or none, at the end of the file, beyond 256 pages, through a handle with `O_DIRECT`, of what is not cached through one
    /// with [`Advice::NoReuse`], and when too many pages have guards or the cache is too crowded: for what is missing ask `read`, which says whether there is more.
    pub fn read_guards(
        &self,
        file: &OpenFile,
        offset: u64,
        len: u64,
    ) -> Result<Vec<PageGuard>, Error> {
        self.files.owning(file)?.read_guards(file, offset, len)
    }

    /// Writes at `offset`, or at the end with `O_APPEND`; durable on return with `O_SYNC` or
    /// `O_DSYNC`. Returns fewer bytes than given only when space ran out, or a device failed, in the middle, or where the file came to the largest size, 2⁶³ − 1 bytes.
    ///
    /// # Errors
    /// [`Error::BadHandle`], of all calls that write, when the file was opened with `O_RDONLY`; [`Error::NoSpace`] and [`Error::FileTooLarge`], with nothing written;
    /// [`Error::ReadOnly`]. Through a handle with `O_SYNC` or `O_DSYNC` also those of [`fsync`](Self::fsync), and through one with `O_DIRECT` those of writing back what are no whole
    /// pages, or are appended, and then the bytes have been written: others
    /// see them, but a crash may take them. To make them durable write them again, to the same place: that is all right as often as needed, but a second append is
    /// there twice. So who appends and must know better what became of it appends through a handle without these flags, which tells where, and syncs then.
    pub fn write(&self, file: &OpenFile, offset: u64, data: &[u8]) -> Result<usize, Error> {
        self.files.owning(file)?.write(file, offset, data)
    }

    /// As [`FileSystem::read`] into several parts of memory, one behind the other: one read, which sees each write whole or
    /// not at all. At most 2 GiB less a page, as readv(2). More than 16 MiB keep writers of the file out meanwhile.
    pub fn read_vectored(
        &self,
        file: &OpenFile,
        offset: u64,
        parts: &mut [IoSliceMut<'_>],
    ) -> Result<usize, Error> {
        self.files.owning(file)?.read_vectored(file, offset, parts)
    }

    /// As [`FileSystem::write`] of several parts of memory, one behind the other: one write, seen whole or not at all. At most
    /// 2 GiB less a page, as writev(2): the rest is not written. More than 16 MiB keep readers and writers of the file out meanwhile.
    pub fn write_vectored(
        &self,
        file: &OpenFile,
        offset: u64,
        parts: &[IoSlice<'_>],
    ) -> Result<usize, Error> {
        self.files.owning(file)?.write_vectored(file, offset, parts)
    }

    /// Writes at the end of the file, whether or not the handle has `O_APPEND`, and returns where that was and how much was written:
    /// of several that append at once each has a place of its own. Fewer bytes than given only when space ran out, or a device failed, or at the largest size.
    ///
    /// # Errors
    /// Those of [`write`](Self::write). If it is the sync of a handle with `O_SYNC` or `O_DSYNC` that fails, or the write-back of one with `O_DIRECT`, the bytes have been appended.
    pub fn append(&self, file: &OpenFile, data: &[u8]) -> Result<(u64, usize), Error> {
        self.files.owning(file)?.append(file, data)
    }

    /// Reports a failed write-back, as `close` does.
    pub fn flush(&self, file: &OpenFile) -> Result<(), Error> {
        self.files.owning(file)?.flush(file)
    }

    /// Makes a file durable: data and size, and unless `data_only` its times. One that meets the end of the file system waits for it, and succeeds if that
    /// [does](Self::close), as one does that comes later.
    pub fn fsync(&self, file: &OpenFile, data_only: bool) -> Result<(), Error> {
        self.files.owning(file)?.fsync(file, data_only)
    }

    /// A hint that a range of bytes will be synced soon, as `sync_file_range(2)`: begins to write its dirty pages in the
    /// background or, with `wait`, writes them before it returns. A later fsync then has only the rest to write. Nothing is
    /// durable by this call alone. A range that is empty or behind the end of the file is fine.
    ///
    /// # Errors
    /// [`Error::WriteFailed`] when data of the file could not be written since it was opened, as fsync does.
    pub fn write_range(
        &self,
        file: &OpenFile,
        offset: u64,
        len: u64,
        wait: bool,
    ) -> Result<(), Error> {
        let bytes = offset..offset.saturating_add(len);
        self.files.owning(file)?.write_range(file, bytes, wait)
    }

    /// Says how a file will be used: the handle from now on, or a range of bytes now ([`Advice`]). Waits for no device.
    ///
    /// # Errors
    /// [`Error::WriteFailed`] with [`Advice::DontNeed`], as [`write_range`](FileSystem::write_range).
    pub fn advise(
        &self,
        file: &OpenFile,
        offset: u64,
        len: u64,
        advice: Advice,
    ) -> Result<(), Error> {
        let bytes = offset..offset.saturating_add(len);
        self.files.owning(file)?.advise(file, bytes, advice)
    }

    /// As [`FileSystem::fsync`], for anything with an inode number, directories included.
    pub fn fsync_inode(&self, ino: Ino, data_only: bool) -> Result<(), Error> {
        self.files.fsync_inode(ino, data_only)
    }

    /// Allocates, punches or zeroes; `mode` as for the system call.
    pub fn fallocate(
        &self,
        file: &OpenFile,
        mode: i32,
        offset: u64,
        len: u64,
    ) -> Result<(), Error> {
        self.files.owning(file)?.fallocate(file, mode, offset, len)
    }

    /// The next data or hole from `offset` on; `whence` is `SEEK_DATA` or `SEEK_HOLE`.
    pub fn seek(&self, file: &OpenFile, offset: u64, whence: i32) -> Result<u64, Error> {
        self.files.owning(file)?.seek(file, offset, whence)
    }

    /// Copies a range between files; returns the bytes copied, fewer than asked for at the end of the file that is read, or when space ran out, or a
    /// device failed, in the middle.
    pub fn copy_range(
        &self,
        from: &OpenFile,
        from_offset: u64,
        to: &OpenFile,
        to_offset: u64,
        len: u64,
    ) -> Result<u64, Error> {
        let files = self.files.owning(from)?.owning(to)?;
        files.copy_range(from, from_offset, to, to_offset, len)
    }

    /// Sets a file's size; what is added reads as zeros. Of a caller without privileges set-id bits and capabilities go first.
    pub fn truncate(&self, who: &Caller, ino: Ino, size: u64) -> Result<(), Error> {
        if !who.privileged {
            // First, as before a write: no crash leaves them to other content.
            self.files.check_size(size)?;
            self.lose_privileges(ino, |group| who.is_in(group))?;
        }
        self.files.truncate(ino, size)
    }

    /// Takes set-user-ID, set-group-ID and file capabilities away, as a change of content by
    /// an unprivileged caller does. Costs one shared lock when there is nothing to take.
    pub fn kill_privileges(&self, ino: Ino) -> Result<(), Error> {
        self.lose_privileges(ino, |_| true)
    }
}
