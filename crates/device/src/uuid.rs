//! UUIDs as text.

use std::io;

/// The usual form: `8-4-4-4-12` lower-case hexadecimal digits.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (i, byte) in uuid.iter().enumerate() {
        if matches!(i, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// Parses the usual form, in either case, with or without dashes.
pub fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let mut digits = text.chars().filter(|c| *c != '-');
    let mut uuid = [0u8; 16];
    for byte in &mut uuid {
        let high = digits.next()?.to_digit(16)?;
        let low = digits.next()?.to_digit(16)?;
        *byte = (high << 4 | low) as u8;
    }
    digits.next().is_none().then_some(uuid)
}

/// A new random UUID (version 4).
///
/// # Errors
/// The kernel gives no random bytes.
pub fn new_uuid() -> io::Result<[u8; 16]> {
    let mut uuid = base::rng::entropy()?;
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    Ok(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_survives_the_way_through_text() {
        let uuid = new_uuid().unwrap();
        let text = uuid_text(&uuid);
        assert_eq!(text.len(), 36);
        assert_eq!(parse_uuid(&text), Some(uuid));
        assert_eq!(parse_uuid(&text.to_uppercase()), Some(uuid));
        assert_eq!(parse_uuid(&text[1..]), None);
        assert_eq!(parse_uuid("ä"), None);
    }
}
