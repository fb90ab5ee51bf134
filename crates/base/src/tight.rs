//! Structures that simulation builds can make small, so that a few entries make what otherwise
//! takes millions: deep trees, and splits all the time. In builds without the feature `simulate`
//! [`limit`] is the usual limit.

#[cfg(feature = "simulate")]
thread_local! {
    static TIGHT: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// The usual limit, or the small one where the calling thread was told so.
#[inline(always)]
pub fn limit(usual: usize, _small: usize) -> usize {
    #[cfg(feature = "simulate")]
    if TIGHT.get() {
        return _small;
    }
    usual
}

/// Chooses for the calling thread and those it starts from now on.
#[cfg(feature = "simulate")]
pub fn set(tight: bool) {
    TIGHT.set(tight);
}

/// What a new thread inherits.
#[cfg(feature = "simulate")]
pub(crate) fn current() -> bool {
    TIGHT.get()
}
