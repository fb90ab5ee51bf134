//! Names, attributes and links on a simulated array.

mod attributes;
mod closing;
mod concurrent;
mod counts;
mod damage;
mod full;
mod handles;
mod many;
mod model;
mod namespace;
mod overfull;
mod paths;
mod shape;
mod small;
mod times;
mod tree;
mod walk;
mod world;
