//! Whose data a device holds: signatures of file systems, volume managers and partition
//! tables, so that mkfs does not overwrite them unasked and a label is not taken from a
//! device that somebody else has formatted since.

use crate::block::BlockDevice;
use crate::buf::AlignedBuf;
use crate::file;
use format::label::LABEL_MAGIC;
use std::path::Path;

/// A signature found on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signature {
    pub name: &'static str,
    /// Byte offset of the magic.
    pub offset: u64,
}

/// Where a magic lies.
#[derive(Clone, Copy)]
enum At {
    Start(u64),
    /// Bytes back from the end of the device, rounded down to this unit first.
    End {
        back: u64,
        unit: u64,
    },
}

struct Magic {
    name: &'static str,
    at: At,
    bytes: &'static [u8],
}

const fn start(name: &'static str, offset: u64, bytes: &'static [u8]) -> Magic {
    Magic {
        name,
        at: At::Start(offset),
        bytes,
    }
}

const fn end(name: &'static str, back: u64, unit: u64, bytes: &'static [u8]) -> Magic {
    Magic {
        name,
        at: At::End { back, unit },
        bytes,
    }
}

const MD: &[u8] = b"\xfc\x4e\x2b\xa9";
const ZFS: &[u8] = b"\x0c\xb1\xba\x00\x00\x00\x00\x00";
const OCFS2: &[u8] = b"OCFSV2";
/// Within a superblock of UFS.
const UFS_MAGIC_AT: u64 = 1372;
/// DRBD's metadata are the last 4 KiB, and its magic, of version 8 (closed or not) or 9, is 60 bytes from their start.
const DRBD_BACK: u64 = 4096 - 60;

/// The magics, most specific first: the first hit names the device.
const MAGICS: &[Magic] = &[
    start("sheaf", 0, &LABEL_MAGIC),
    start("luks", 0, b"LUKS\xba\xbe"),
    start("LVM2", 512, b"LABELONE"),
    start("LVM2", 0, b"LABELONE"),
    start("LVM2", 1024, b"LABELONE"),
    start("LVM2", 1536, b"LABELONE"),
    start("md", 4096, MD),
    start("md", 0, MD),
    end("md", 8192, 4096, MD),
    end("md", 65536, 65536, MD),
    start("bcache", 0x1018, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca"),
    start("bcachefs", 0x1018, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9"),
    start("xfs", 0, b"XFSB"),
    start("btrfs", 0x10040, b"_BHRfS_M"),
    start("ext4", 0x438, b"\x53\xef"),
    start("f2fs", 0x400, b"\x10\x20\xf5\xf2"),
    start("erofs", 0x400, b"\xe2\xe1\xf5\xe0"),
    start("nilfs2", 0x406, b"\x34\x34"),
    start("squashfs", 0, b"hsqs"),
    start("swap", 4086, b"SWAPSPACE2"),
    start("swap", 4086, b"SWAP-SPACE"),
    start("ntfs", 3, b"NTFS    "),
    start("exfat", 3, b"EXFAT   "),
    start("bitlocker", 3, b"-FVE-FS-"),
    start("vfat", 0x52, b"FAT32   "),
    start("vfat", 0x36, b"FAT16   "),
    start("vfat", 0x36, b"FAT12   "),
    start("iso9660", 0x8001, b"CD001"),
    start("udf", 0x8001, b"BEA01"),
    start("jfs", 0x8000, b"JFS1"),
    start("reiserfs", 0x10034, b"ReIsEr"),
    start("reiserfs", 0x2034, b"ReIsErFs"),
    start("reiserfs", 0x2014, b"ReIsErFs"),
    start("reiser4", 0x10000, b"ReIsEr4"),
    start("ocfs2", 0x400, OCFS2),
    start("ocfs2", 0x800, OCFS2),
    start("ocfs2", 0x1000, OCFS2),
    start("ocfs2", 0x2000, OCFS2),
    start("ocfs", 0x2000, b"OracleCFS"),
    start("oracleasm", 32, b"ORCLDISK"),
    start("ufs", 0x2000 + UFS_MAGIC_AT, b"\x54\x19\x01\x00"),
    start("ufs", 0x2000 + UFS_MAGIC_AT, b"\x00\x01\x19\x54"),
    start("ufs", 0x10000 + UFS_MAGIC_AT, b"\x19\x01\x54\x19"),
    start("ufs", 0x10000 + UFS_MAGIC_AT, b"\x19\x54\x01\x19"),
    start("zonefs", 0, b"SFOZ"),
    start("gfs2", 0x10000, b"\x01\x16\x19\x70"),
    start("hfsplus", 0x400, b"H+\x00\x04"),
    start("hfsplus", 0x400, b"HX\x00\x05"),
    start("apfs", 0x20, b"NXSB"),
    start("ubifs", 0, b"\x31\x18\x10\x06"),
    start("bluestore", 0, b"bluestore block device"),
    start("dm-integrity", 0, b"integrt\0"),
    start("vdo", 0, b"dmvdo001"),
    end("intel raid", 1024, 512, b"Intel Raid ISM Cfg Sig. "),
    end("ddf raid", 512, 512, b"\xde\x11\xde\x11"),
    end("ddf raid", 512, 512, b"\x11\xde\x11\xde"),
    end("ddf raid", 257 * 512, 512, b"\xde\x11\xde\x11"),
    end("ddf raid", 257 * 512, 512, b"\x11\xde\x11\xde"),
    end("drbd", DRBD_BACK, 4096, b"\x83\x74\x02\x6b"),
    end("drbd", DRBD_BACK, 4096, b"\x83\x74\x02\x6c"),
    end("drbd", DRBD_BACK, 4096, b"\x83\x74\x02\x6d"),
    start("partition table (gpt)", 512, b"EFI PART"),
    start("partition table (gpt)", 4096, b"EFI PART"),
    end("partition table (gpt)", 512, 512, b"EFI PART"),
    end("partition table (gpt)", 4096, 4096, b"EFI PART"),
];

/// First byte and count of the 1 KiB uberblocks in ZFS's first label.
const ZFS_UBERBLOCKS: (u64, u64) = (128 << 10, 128);
const BLOCK: u64 = 4096;
/// Entries of a GPT, and bytes of each, as all who write one have it.
const GPT_ENTRIES: u64 = 128;
const GPT_ENTRY: u64 = 128;

/// Names what the device or image at `path` holds; `None` when nothing known is found or it
/// cannot be read. Reads only, and takes no lock.
pub fn probe(path: &Path) -> Option<&'static str> {
    let device = file::open_to_look(path, true).ok()?;
    let first = signatures(&device).into_iter().next()?;
    Some(first.name)
}

/// Every known signature on the device, the one that names it first. What cannot be read
/// has no signature.
pub fn signatures(device: &dyn BlockDevice) -> Vec<Signature> {
    let mut reader = Reader {
        device,
        block: None,
    };
    let mut hits = Vec::new();
    for magic in MAGICS {
        let Some(offset) = place(magic.at, device.bytes()) else {
            continue;
        };
        if reader.holds(offset, magic.bytes) {
            let name = match magic.name {
                "ext4" => reader.ext_name(),
                name => name,
            };
            hits.push(Signature { name, offset });
        }
    }
    let (first, count) = ZFS_UBERBLOCKS;
    for offset in (0..count).map(|i| first + i * 1024) {
        if reader.holds(offset, ZFS) {
            hits.push(Signature {
                name: "zfs",
                offset,
            });
        }
    }
    if hits.is_empty()
        && let Some(offset) = reader.minix()
    {
        hits.push(Signature {
            name: "minix",
            offset,
        });
    }
    if hits.is_empty() && reader.is_mbr() {
        hits.push(Signature {
            name: "partition table (dos)",
            offset: 510,
        });
    }
    hits
}

/// Whether a partition table on the device names a partition.
pub(crate) fn has_partitions(device: &dyn BlockDevice) -> bool {
    let mut reader = Reader {
        device,
        block: None,
    };
    // What protects a GPT from those who do not know it is none.
    const PROTECTIVE: u8 = 0xee;
    let signed = reader.holds(510, b"\x55\xaa");
    let entries = reader.bytes(446, 64).filter(|_| signed).unwrap_or(&[]);
    let used = |entry: &[u8]| !matches!(entry[4], 0 | PROTECTIVE);
    if entries.chunks_exact(16).any(used) {
        return true;
    }
    let mut tables = Vec::new();
    for sector in [512, 4096] {
        let end = device.bytes() / sector * sector;
        // Its entries follow the first header, and precede the last.
        let backup = end.checked_sub(sector + GPT_ENTRIES * GPT_ENTRY);
        tables.push((Some(sector), Some(2 * sector)));
        tables.push((end.checked_sub(sector), backup));
    }
    tables.into_iter().any(|(header, first)| {
        let (Some(header), Some(first)) = (header, first) else {
            return false;
        };
        let entry = |i| first + i * GPT_ENTRY;
        // The first part of an entry is what kind of partition it is; zero if it is none.
        reader.holds(header, b"EFI PART")
            && (0..GPT_ENTRIES).any(|i| {
                reader
                    .bytes(entry(i), 16)
                    .is_some_and(|kind| kind != [0; 16])
            })
    })
}

/// Bytes that can be read and written of the block at `offset`: fewer than 4 KiB of one in which the device ends, and
/// none beyond.
pub(crate) fn block_len(device: &dyn BlockDevice, offset: u64) -> usize {
    let unit = u64::from(device.logical_block());
    let end = device.bytes() / unit * unit;
    end.saturating_sub(offset).min(BLOCK) as usize
}

fn place(at: At, bytes: u64) -> Option<u64> {
    match at {
        At::Start(offset) => Some(offset),
        At::End { back, unit } => (bytes / unit * unit).checked_sub(back),
    }
}

/// Reads through one cached block.
struct Reader<'a> {
    device: &'a dyn BlockDevice,
    block: Option<(u64, AlignedBuf)>,
}

impl Reader<'_> {
    /// `len` bytes at `offset`, which must not cross a block.
    fn bytes(&mut self, offset: u64, len: usize) -> Option<&[u8]> {
        let block = offset / BLOCK;
        if self.block.as_ref().is_none_or(|(b, _)| *b != block) {
            self.block = None;
            let len = block_len(self.device, block.checked_mul(BLOCK)?);
            if len == 0 {
                return None;
            }
            let mut buf = AlignedBuf::zeroed(len);
            self.device.read(block * BLOCK, &mut buf).ok()?;
            self.block = Some((block, buf));
        }
        let (_, buf) = self.block.as_ref()?;
        let within = (offset % BLOCK) as usize;
        buf.get(within..within + len)
    }

    fn holds(&mut self, offset: u64, magic: &[u8]) -> bool {
        self.bytes(offset, magic.len()) == Some(magic)
    }

    fn le32(&mut self, offset: u64) -> u32 {
        let bytes = self.bytes(offset, 4).and_then(|b| b.try_into().ok());
        bytes.map_or(0, u32::from_le_bytes)
    }

    /// ext2, ext3 or ext4, by the superblock's feature words.
    fn ext_name(&mut self) -> &'static str {
        const HAS_JOURNAL: u32 = 0x4;
        const EXTENTS_64BIT_FLEX: u32 = 0x40 | 0x80 | 0x200;
        let compatible = self.le32(0x45c);
        let incompatible = self.le32(0x460);
        if incompatible & EXTENTS_64BIT_FLEX != 0 {
            "ext4"
        } else if compatible & HAS_JOURNAL != 0 {
            "ext3"
        } else {
            "ext2"
        }
    }

    /// Where the magic of a minix file system is, which is short: what is beside it must make sense, too.
    fn minix(&mut self) -> Option<u64> {
        const SUPERBLOCK: u64 = 1024;
        const BITS: u32 = 8 * 1024;
        let block = self.bytes(SUPERBLOCK, 32)?;
        let orders = [u16::from_le_bytes, u16::from_be_bytes];
        orders.into_iter().find_map(|order| {
            let word = |at: usize| order([block[at], block[at + 1]]);
            // Of versions 1 and 2, and of version 3.
            let (at, inode_maps, zone_maps, fits) = match (word(16), word(24)) {
                (0x137f | 0x138f | 0x2468 | 0x2478, _) => {
                    let fits = u32::from(word(0)) < u32::from(word(4)) * BITS;
                    (16, word(4), word(6), fits)
                }
                (_, 0x4d5a) => {
                    let fits = word(28) >= 1024 && word(28).is_power_of_two();
                    (24, word(6), word(8), fits)
                }
                _ => return None,
            };
            (inode_maps != 0 && zone_maps != 0 && fits).then_some(SUPERBLOCK + at)
        })
    }

    /// A boot signature, and four entries whose status byte is one that exists, at least one
    /// of them in use.
    fn is_mbr(&mut self) -> bool {
        if !self.holds(510, b"\x55\xaa") {
            return false;
        }
        let Some(entries) = self.bytes(446, 64) else {
            return false;
        };
        let valid = entries.chunks(16).all(|e| matches!(e[0], 0 | 0x80));
        valid && entries.chunks(16).any(|e| e[4] != 0)
    }
}
