//! Progress of long work on a terminal; silence elsewhere.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar that counts to `total`, or a spinner where the total is 0.
pub fn bar(what: &str, total: u64) -> ProgressBar {
    let bar = match total {
        0 => ProgressBar::new_spinner(),
        total => ProgressBar::new(total),
    };
    let template = match total {
        0 => "{msg} {pos} {elapsed}",
        _ => "{msg} [{bar:30}] {pos}/{len} {eta}",
    };
    // The templates are constants; the default style does, too.
    let style = ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ");
    bar.set_style(style);
    bar.set_message(what.to_owned());
    bar
}
