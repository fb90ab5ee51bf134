//! Deliberate breakages, to prove that the simulator finds them.
//!
//! A canary is one wrong line of code, chosen by name. In builds without the feature
//! `simulate` [`planted`] is the constant `false` and the wrong lines do not exist in the
//! binary. With it, a thread plants at most one canary for itself and the threads it starts.

/// One breakage. Each names the rule of the design that it breaks, where there is one.
macro_rules! canaries {
    ($($(#[doc = $doc:literal])* $name:ident => $text:literal,)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Canary {
            $($(#[doc = $doc])* $name,)*
        }

        impl Canary {
            /// Every canary there is.
            pub const ALL: &[Canary] = &[$(Canary::$name,)*];

            /// Name on command lines and in reports.
            pub fn name(self) -> &'static str {
                match self {
                    $(Canary::$name => $text,)*
                }
            }
        }
    };
}

canaries! {
    /// A commit's batch is written without flushing the data it names first (R14).
    SkipPreflush => "skip-preflush",
    /// A batch is written without data-sync semantics: a commit is acknowledged before it is
    /// durable.
    BatchNotDurable => "batch-not-durable",
}

impl Canary {
    pub fn from_name(name: &str) -> Option<Canary> {
        Canary::ALL.iter().copied().find(|c| c.name() == name)
    }
}

#[cfg(feature = "simulate")]
mod switch {
    use super::Canary;
    use std::cell::Cell;

    thread_local! {
        static PLANTED: Cell<Option<Canary>> = const { Cell::new(None) };
    }

    /// Whether the caller is to do the wrong thing.
    #[inline]
    pub fn planted(canary: Canary) -> bool {
        PLANTED.get() == Some(canary)
    }

    /// Plants a canary, or none, for the calling thread and those it starts from now on.
    pub fn plant(canary: Option<Canary>) {
        PLANTED.set(canary);
    }

    /// What a new thread inherits.
    pub(crate) fn current() -> Option<Canary> {
        PLANTED.get()
    }
}

#[cfg(feature = "simulate")]
pub(crate) use switch::current;
#[cfg(feature = "simulate")]
pub use switch::{plant, planted};

/// Whether the caller is to do the wrong thing: never, in a build that serves users.
#[cfg(not(feature = "simulate"))]
#[inline(always)]
pub const fn planted(_: Canary) -> bool {
    false
}
