//! Hash tables whose order of iteration is the same in every run, so that nothing that
//! follows from it makes a simulation unrepeatable. Keys are our own numbers, never chosen by
//! a stranger: for names there is the keyed hash of the directory.

use std::hash::{BuildHasherDefault, DefaultHasher};

pub type HashMap<K, V> = std::collections::HashMap<K, V, BuildHasherDefault<DefaultHasher>>;
pub type HashSet<K> = std::collections::HashSet<K, BuildHasherDefault<DefaultHasher>>;
