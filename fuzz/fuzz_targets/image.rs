#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| sim::fuzz::Target::Image.check(input));
