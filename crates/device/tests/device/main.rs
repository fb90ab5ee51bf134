//! The array on files, on loop devices and on simulated devices.

mod arrays;
mod drivers;
mod faults;
mod files;
mod fixture;
mod flights;
mod flushes;
mod identities;
mod labels;
mod power;
mod scarce;
mod vectored;
