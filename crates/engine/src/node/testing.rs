//! A node that takes memory and has no content.

use crate::content::Content;
use format::Damage;

#[derive(Clone)]
pub(super) struct Words<const LEADS: bool>;
pub(super) type Word = Words<false>;
/// To others.
pub(super) type Way = Words<true>;

impl<const LEADS: bool> Content for Words<LEADS> {
    type Delta = ();
    fn kind(&self) -> u8 {
        format::table::FIRST_FS_KIND
    }
    fn encode(&self, _: &mut Vec<u8>) {}
    fn decode(_: u8, _: &[u8]) -> Result<Self, Damage> {
        Ok(Words)
    }
    fn apply(&mut self, _: &()) -> Result<(), Damage> {
        Ok(())
    }
    fn encode_delta(_: &(), _: &mut Vec<u8>) {}
    fn decode_delta(_: u8, _: &[u8]) -> Result<(), Damage> {
        Ok(())
    }
    fn leads(&self) -> bool {
        LEADS
    }
    fn owned(_: u8) -> bool {
        false
    }
    fn memory(&self) -> usize {
        1000
    }
    fn image_len(&self) -> usize {
        0
    }
}
