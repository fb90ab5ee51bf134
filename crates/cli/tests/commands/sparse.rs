//! Image files as a whole, of which most are holes: only what is in them is read and written.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

/// No hole of less is made.
const PIECE: usize = 64 << 10;

/// All bytes of a file.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut bytes = vec![0; len as usize];
    let mut from = 0;
    while from < len {
        let start = match seek(&file, SeekFrom::Data(from)) {
            Err(Errno::NXIO) => break,
            found => found?,
        };
        from = seek(&file, SeekFrom::Hole(start))?;
        file.read_exact_at(&mut bytes[start as usize..from as usize], start)?;
    }
    Ok(bytes)
}

/// Has the file be of these bytes, with holes where they are zeros.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let file = File::create(path)?;
    file.set_len(bytes.len() as u64)?;
    for (i, piece) in bytes.chunks(PIECE).enumerate() {
        if piece != &[0; PIECE][..piece.len()] {
            file.write_all_at(piece, (i * PIECE) as u64)?;
        }
    }
    Ok(())
}
