//! Tests that do not apply, each with its reason: `xtask/exclusions.toml`.

use std::collections::BTreeMap;

use crate::Fallible;

/// Per suite: test name → why it does not apply.
#[derive(Default)]
pub struct Exclusions(BTreeMap<String, BTreeMap<String, String>>);

impl Exclusions {
    pub fn load() -> Fallible<Self> {
        let text = include_str!("../exclusions.toml");
        toml::from_str(text)
            .map(Exclusions)
            .map_err(|e| format!("xtask/exclusions.toml: {e}"))
    }

    /// Why `test` of `suite` does not apply, or nothing when it does.
    pub fn reason(&self, suite: &str, test: &str) -> Option<&str> {
        self.0.get(suite)?.get(test).map(String::as_str)
    }
}
