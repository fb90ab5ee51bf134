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

/// One field of a packed structure.
#[derive(Debug)]
pub struct PackedFieldDoc {
    pub name: &'static str,
    /// How it is stored; see `packed.rs`.
    pub form: &'static str,
    pub doc: &'static str,
}

/// A structure whose fields vary in length and follow each other without gaps.
#[derive(Debug)]
pub struct PackedDoc {
    pub name: &'static str,
    pub doc: &'static str,
    pub fields: &'static [PackedFieldDoc],
}

/// `packed! { /// doc \n Name { /// doc \n field: "form", ... } }` describes a packed structure; who encodes and
/// decodes it is checked by round trips.
macro_rules! packed {
    ($(
        $(#[doc = $doc:expr])+
        $name:ident {
            $( $(#[doc = $fdoc:expr])+ $field:ident: $form:literal, )+
        }
    )+) => { $(
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug)]
        pub struct $name;

        impl $name {
            /// This structure as `docs/format.md` shows it.
            pub const DOC: $crate::PackedDoc = $crate::PackedDoc {
                name: stringify!($name),
                doc: concat!($($doc, "\n"),+),
                fields: &[ $( $crate::PackedFieldDoc {
                    name: stringify!($field),
                    form: $form,
                    doc: concat!($($fdoc, "\n"),+),
                }, )+ ],
            };
        }
    )+ };
}

/// Every packed structure, in the order of `docs/format.md`.
pub fn packed_tables() -> Vec<&'static PackedDoc> {
    vec![
        &crate::table::LeafEntry::DOC,
        &crate::journal::Record::DOC,
        &crate::journal::RecordEntry::DOC,
        &crate::journal::DataChecksum::DOC,
        &crate::inode::PackedInode::DOC,
        &crate::dir::DirEntry::DOC,
    ]
}

/// Every on-disk structure, in the order of `docs/format.md`.
pub fn tables() -> Vec<&'static StructDoc> {
    vec![
        &crate::label::Label::DOC,
        &crate::label::ZoneEntry::DOC,
        &crate::checkpoint::CheckpointRecord::DOC,
        &crate::item::ItemPointer::DOC,
        &crate::item::ItemHeader::DOC,
        &crate::journal::BatchHeader::DOC,
        &crate::inode::Time::DOC,
        &crate::inode::TreeEntry::DOC,
        &crate::inode::OrphanEntry::DOC,
        &crate::extent::ExtentEntry::DOC,
        &crate::xattr::XattrHeader::DOC,
    ]
}
