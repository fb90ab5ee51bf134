//! Mail by itself; what it does beside other threads `model/` checks.

use super::mail::{Left, Mail, PARTS, Room, SHARE, Waiter};
use crate::topology::Urgency;
use std::collections::VecDeque;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Who(u32);

impl Waiter for Who {
    fn is(&self, other: &Who) -> bool {
        self == other
    }
}

const AMPLE: Room = Room {
    all: 1000,
    low: 1000,
};

fn take(mail: &Mail<u32, Who>, room: Room) -> (Vec<u32>, Left) {
    let mut taken = VecDeque::new();
    let left = mail.take(room, &mut taken, &mut Vec::new());
    (taken.into_iter().map(|(_, part)| part).collect(), left)
}

#[test]
fn what_is_urgent_goes_first_and_the_rest_in_its_turn() {
    let mail = Mail::new(64);
    for i in 0..10 {
        mail.send(Urgency::Low, [100 + 2 * i, 101 + 2 * i].into());
        mail.send(Urgency::High, [i].into());
    }
    let (taken, left) = take(&mail, AMPLE);
    let turns = [0, 1, 2, 3, 100, 101, 4, 5, 6, 7, 102, 103, 8, 9];
    assert_eq!(taken[..14], turns);
    assert_eq!((taken.len(), left.empty, left.closed), (30, true, false));
}

#[test]
fn what_is_not_urgent_moves_under_endless_urgent_letters_with_little_room() {
    let mail = Mail::new(4);
    mail.send(Urgency::Low, [100, 101].into());
    let room = Room { all: 1, low: 1 };
    let (mut low, mut steps) = (0, 0);
    while low < 2 {
        mail.send(Urgency::High, [7].into());
        let (taken, _) = take(&mail, room);
        low += taken.iter().filter(|part| **part >= 100).count();
        steps += 1;
        assert!(steps <= SHARE + 2);
    }
    assert_eq!(take(&mail, room).0, [7]);
    // Whole letters count on both sides, however little is taken at a time.
    let mail = Mail::new(64);
    mail.send(Urgency::Low, (100..100 + PARTS as u32).collect());
    (0..2 * SHARE).for_each(|_| mail.send(Urgency::High, (0..PARTS as u32).collect()));
    let taken: Vec<u32> = (0..(SHARE as usize + 1) * PARTS)
        .map(|_| take(&mail, room).0[0])
        .collect();
    assert_eq!(taken.iter().filter(|part| **part >= 100).count(), PARTS);
    // What has no room of its own keeps nobody from going.
    let mail = Mail::new(4);
    mail.send(Urgency::Low, [100].into());
    for _ in 0..10 {
        mail.send(Urgency::High, [7].into());
        assert_eq!(take(&mail, Room { all: 8, low: 0 }).0, [7]);
    }
}

#[test]
fn mail_is_bounded_and_who_was_refused_is_told_once() {
    let mail = Mail::new(2);
    let who = Who(1);
    for i in 0..2 {
        mail.try_send(Urgency::High, [i, i].into(), &who).unwrap();
    }
    for _ in 0..3 {
        let back = mail.try_send(Urgency::High, [9].into(), &who);
        assert_eq!(back, Err([9].into()));
    }
    mail.try_send(Urgency::Low, [5].into(), &who).unwrap();
    assert!(mail.will_tell(&who) && !mail.will_tell(&Who(2)));
    let (mut taken, mut told) = (VecDeque::new(), Vec::new());
    // Half a letter makes no room.
    mail.take(Room { all: 1, low: 1 }, &mut taken, &mut told);
    assert!(told.is_empty() && mail.will_tell(&who));
    mail.take(Room { all: 1, low: 1 }, &mut taken, &mut told);
    assert_eq!(told, std::slice::from_ref(&who));
    assert!(!mail.will_tell(&who));
    mail.try_send(Urgency::High, [9].into(), &who).unwrap();
    assert_eq!(take(&mail, AMPLE).0, [1, 1, 9, 5]);
}

#[test]
fn who_sends_too_much_waits_until_there_is_room() {
    let mail = std::sync::Arc::new(Mail::<u32, Who>::new(1));
    let sender = std::sync::Arc::clone(&mail);
    let sends = move || (0..100).for_each(|i| sender.send(Urgency::High, [i].into()));
    let sends = base::thread::spawn("sends", sends).unwrap();
    let mut all = Vec::new();
    while all.len() < 100 {
        let (taken, _) = take(&mail, AMPLE);
        assert!(taken.len() <= 1);
        all.extend(taken);
        base::thread::yield_now();
    }
    sends.join().unwrap();
    assert!(all.is_sorted());
}

#[test]
fn what_is_withdrawn_is_not_taken() {
    let mail = Mail::new(4);
    mail.send(Urgency::Low, [1, 2, 3].into());
    mail.send(Urgency::High, [4].into());
    assert_eq!(mail.withdraw(|part| part % 2 == 0), [4, 2]);
    mail.close();
    let (taken, left) = take(&mail, AMPLE);
    assert_eq!(taken, [1, 3]);
    assert!(left.empty && left.closed);
}
