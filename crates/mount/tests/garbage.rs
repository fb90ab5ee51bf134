//! Whatever bytes arrive, every request that expects an answer gets exactly one, well formed.

mod toy;

use std::io::IoSlice;

use base::rng::Rng;
use mount::abi::{InHeader, OutHeader, opcode};
use mount::dispatch::{Dispatcher, Reply};
use zerocopy::{FromBytes, IntoBytes};

/// Keeps the answers to one request.
#[derive(Default)]
struct Kept(Vec<Vec<u8>>);

impl Reply for Kept {
    fn send(&mut self, parts: &[IoSlice<'_>]) -> std::io::Result<bool> {
        let parts: Vec<&[u8]> = parts.iter().map(|part| &part[..]).collect();
        self.0.push(parts.concat());
        Ok(true)
    }
}

#[test]
fn every_request_gets_one_well_formed_answer() {
    let mut rng = Rng::new(0xf0_5e);
    let mut scratch = vec![0u8; 1 << 16];
    let dispatchers = [0, u64::MAX].map(|negotiated| Dispatcher {
        operations: toy::Toy::default(),
        negotiated,
        backlog: None,
    });
    for _ in 0..100_000 {
        let mut body = vec![0u8; rng.below(200) as usize];
        rng.fill(&mut body);
        // Few different small values, so that nodes, handles and names exist now and then.
        match rng.below(4) {
            0 => {}
            1 => body.iter_mut().for_each(|b| *b &= 0x41),
            2 => body.iter_mut().enumerate().for_each(|(i, b)| {
                *b = if i % 8 == 0 { *b % 4 } else { 0 };
            }),
            _ => {
                let names = body.len().saturating_sub(4);
                body[names..].iter_mut().for_each(|b| *b = b'a' + *b % 3);
                body.push(0);
            }
        }
        let header = InHeader {
            len: (size_of::<InHeader>() + body.len()) as u32,
            opcode: rng.below(56) as u32,
            unique: rng.next_u64(),
            nodeid: rng.below(5),
            total_extlen: if rng.one_in(20) {
                rng.below(30) as u16
            } else {
                0
            },
            ..Default::default()
        };
        let message = [header.as_bytes(), &body].concat();
        let cut = if rng.one_in(4) {
            rng.below(message.len() as u64) as usize
        } else {
            message.len()
        };
        let mut kept = Kept::default();
        let dispatcher = rng.pick(&dispatchers);
        dispatcher.handle(&message[..cut], &mut scratch, &mut kept);

        let answered = cut >= size_of::<InHeader>() && !opcode::has_no_reply(header.opcode);
        assert_eq!(
            kept.0.len(),
            usize::from(answered),
            "opcode {}",
            header.opcode
        );
        for answer in kept.0 {
            let (out, rest) = OutHeader::read_from_prefix(&answer).unwrap();
            assert_eq!(out.len as usize, answer.len());
            assert_eq!(out.unique, header.unique);
            assert!((-4095..=0).contains(&out.error), "{}", out.error);
            assert!(out.error == 0 || rest.is_empty());
        }
    }
}
