use crate::args::Trim;
use crate::failure::{Failure, Outcome};
pub fn run(_args: &Trim) -> Outcome {
    Err(Failure::new("later"))
}
