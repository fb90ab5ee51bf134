//! The records that the demo's writer appends: each tells its number and has a checksum.

use crate::failure::Failure;

/// The file they go to.
pub const FILE: &str = "records";
/// An odd size, so that records straddle pages.
pub const BYTES: usize = 1000;

/// Record number `number`, from 0.
pub fn make(number: u64) -> [u8; BYTES] {
    let mut record = [0; BYTES];
    record[..8].copy_from_slice(&number.to_le_bytes());
    for (i, byte) in record[8..BYTES - 4].iter_mut().enumerate() {
        *byte = (number as usize * 31 + i * 7) as u8;
    }
    let sum = format::checksum(0, &record[..BYTES - 4]);
    record[BYTES - 4..].copy_from_slice(&sum.to_le_bytes());
    record
}

/// How many whole records `bytes` begins with. At most the last one, which was not synced,
/// may be there in part.
pub fn count(bytes: &[u8]) -> Result<u64, Failure> {
    let mut records = bytes.chunks_exact(BYTES).enumerate();
    match records.find(|(number, record)| **record != make(*number as u64)) {
        None => Ok((bytes.len() / BYTES) as u64),
        Some((number, _)) if number + 1 >= bytes.len() / BYTES => Ok(number as u64),
        Some((number, _)) => Err(Failure::new(format!(
            "record {number} is damaged although later ones are there"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_records_are_counted() {
        let mut bytes = [make(0), make(1), make(2)].concat();
        assert_eq!(count(&bytes).unwrap(), 3);
        assert_eq!(count(&bytes[..2500]).unwrap(), 2);
        bytes[2999] ^= 1;
        assert_eq!(count(&bytes).unwrap(), 2);
        bytes[0] ^= 1;
        assert!(count(&bytes).is_err());
    }
}
