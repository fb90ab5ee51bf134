//! Names, attributes and links on a simulated array.

mod attributes;
mod concurrent;
mod model;
mod namespace;
mod tree;
mod world;
