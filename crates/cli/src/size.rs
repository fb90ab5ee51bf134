//! Sizes as people write them: `64M`, `4GiB`, `1.5T`, plain bytes; and numbers of things.

const RATE_LEAST: u64 = 64 << 10;

/// Parses a size in bytes. Units are powers of 1,024, with or without `B` or `iB`; `kB`,
/// `MB` and so on count the same, as in mkfs of other file systems.
pub fn parse(text: &str) -> Result<u64, String> {
    let wrong = || format!("'{text}' is not a size; write it like 64M, 4GiB or 1048576");
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim().to_ascii_lowercase();
    let unit = unit
        .strip_suffix("ib")
        .or(unit.strip_suffix('b'))
        .unwrap_or(&unit);
    let shift = match unit {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        "p" => 50,
        _ => return Err(wrong()),
    };
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    if part.len() > 6 || (number.contains('.') && part.is_empty()) {
        return Err(wrong());
    }
    let whole: u64 = whole.parse().map_err(|_| wrong())?;
    let scale = 10u128.pow(part.len() as u32);
    let fraction: u128 = match part {
        "" => 0,
        part => part.parse().map_err(|_| wrong())?,
    };
    let bytes = ((u128::from(whole) * scale + fraction) << shift) / scale;
    u64::try_from(bytes)
        .map_err(|_| format!("{text} is more than can be counted here; at most 15P make sense"))
}

/// The same of bytes in a second, of which less would never come to an end.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    match parse(text)? {
        rate if rate < RATE_LEAST => Err(format!(
            "{text} in a second is too little to come to an end; give 64K or more, or none for no limit"
        )),
        rate => Ok(rate),
    }
}

/// A size in the largest unit that leaves at least one before the point.
pub fn text(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            return match unit {
                "B" => format!("{bytes} B"),
                _ => format!("{value:.1} {unit}"),
            };
        }
        value /= 1024.0;
    }
    format!("{value:.1} PiB")
}

/// So many of what has an ordinary plural.
pub fn counted(count: u64, one: &str) -> String {
    match count {
        1 => format!("1 {one}"),
        count => format!("{count} {one}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_understood() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64M", 64 << 20),
            ("64m", 64 << 20),
            ("4GiB", 4 << 30),
            ("4 GB", 4 << 30),
            ("1.5T", 3 << 39),
            ("512k", 512 << 10),
            ("100B", 100),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for text in ["", "M", "x", "-1", "1.", "1.2.3", "5Q", "99999999P", "1e3"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_in_a_fitting_unit() {
        assert_eq!(text(17), "17 B");
        assert_eq!(text(1536), "1.5 KiB");
        assert_eq!(text(4 << 30), "4.0 GiB");
    }
}
