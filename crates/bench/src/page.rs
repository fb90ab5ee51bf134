//! A page of memory that begins where pages do, as a program that cares for speed has it: where a copy begins in its page decides on some processors
//! what it takes (`base::moves`), and no side may have luck with it.

/// Bytes that data workloads move at once.
pub const PAGE: usize = 4096;

/// What is read into, or written.
#[repr(C, align(4096))]
pub struct Page(pub [u8; PAGE]);

const _: () = assert!(align_of::<Page>() == PAGE && size_of::<Page>() == PAGE);

/// A page to write.
pub static FILLED: Page = Page([0x5a; PAGE]);

impl Page {
    pub fn of(byte: u8) -> Box<Page> {
        Box::new(Page([byte; PAGE]))
    }
}
