//! The store over simulated devices.

mod damage;
mod gaps;
mod interrupted;
mod killed;
mod large;
mod load;
mod memory;
mod moment;
mod power_cut;
mod pressure;
mod room;
mod salvage;
mod trim;
mod unread;
mod world;
