//! Declares on-disk structures: size asserted, fields recorded for the documentation.

/// One field of an on-disk structure.
#[derive(Debug)]
pub struct FieldDoc {
    pub name: &'static str,
    pub ty: &'static str,
    pub offset: usize,
    pub size: usize,
    pub doc: &'static str,
}

/// One on-disk structure.
#[derive(Debug)]
pub struct StructDoc {
    pub name: &'static str,
    pub size: usize,
    pub doc: &'static str,
    pub fields: &'static [FieldDoc],
}

/// `layout! { /// doc \n pub struct Name: SIZE { /// doc \n pub field: Type, ... } }`
macro_rules! layout {
    ($(
        $(#[doc = $doc:expr])+
        pub struct $name:ident: $size:literal {
            $( $(#[doc = $fdoc:expr])+ pub $field:ident: $ty:ty, )+
        }
    )+) => { $(
        $(#[doc = $doc])+
        #[derive(
            Clone, Copy, Debug, zerocopy::FromBytes, zerocopy::IntoBytes,
            zerocopy::KnownLayout, zerocopy::Immutable, zerocopy::Unaligned,
        )]
        #[repr(C)]
        pub struct $name {
            $( $(#[doc = $fdoc])+ pub $field: $ty, )+
        }

        const _: () = assert!(core::mem::size_of::<$name>() == $size);

        impl $name {
            /// Size on disk, in bytes.
            pub const SIZE: usize = $size;
            /// This structure as `docs/format.md` shows it.
            pub const DOC: $crate::StructDoc = $crate::StructDoc {
                name: stringify!($name),
                size: $size,
                doc: concat!($($doc, "\n"),+),
                fields: &[ $( $crate::FieldDoc {
                    name: stringify!($field),
                    ty: stringify!($ty),
                    offset: core::mem::offset_of!($name, $field),
                    size: core::mem::size_of::<$ty>(),
                    doc: concat!($($fdoc, "\n"),+),
                }, )+ ],
            };

            /// All bytes zero.
            pub fn zeroed() -> Self {
                zerocopy::FromZeros::new_zeroed()
            }
        }
    )+ };
}

/// Every on-disk structure, in the order of `docs/format.md`.
pub fn tables() -> Vec<&'static StructDoc> {
    vec![
        &crate::label::Label::DOC,
        &crate::label::ZoneEntry::DOC,
        &crate::checkpoint::CheckpointRecord::DOC,
        &crate::item::ItemPointer::DOC,
        &crate::item::ItemHeader::DOC,
        &crate::table::NodeEntry::DOC,
        &crate::journal::BatchHeader::DOC,
        &crate::journal::RecordHeader::DOC,
        &crate::journal::EntryHeader::DOC,
        &crate::inode::InodeHeader::DOC,
        &crate::inode::Time::DOC,
        &crate::inode::TreeEntry::DOC,
        &crate::inode::OrphanEntry::DOC,
        &crate::dir::DirEntryHeader::DOC,
        &crate::extent::ExtentEntry::DOC,
        &crate::xattr::XattrHeader::DOC,
    ]
}
