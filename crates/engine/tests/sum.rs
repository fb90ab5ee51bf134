//! A sum in parts, added to by many threads.

use engine::sum::Sum;

#[test]
fn nothing_added_is_lost_and_the_slack_is_kept() {
    let sum = Sum::new(4, 1000);
    // Two threads have parts of their own, each two of them; two share one with others.
    let lanes = [[0, 1], [2, 3], [1000, 1004], [1001, 1000]];
    base::thread::parallel(4, |thread| {
        let [some, other] = lanes[thread];
        let mut rng = base::rng::Rng::new(thread as u64);
        for _ in 0..10_000 {
            let lane = [some, other][rng.below(2) as usize];
            sum.add(lane, rng.below(100) as i64);
            sum.add(some, -(rng.below(90) as i64));
        }
        // Takes out what it added, within the slack.
        let mut rng = base::rng::Rng::new(thread as u64);
        for _ in 0..10_000 {
            rng.below(2);
            sum.add(some, -(rng.below(100) as i64));
            sum.add(other, rng.below(90) as i64);
        }
    });
    assert_eq!(sum.exact(), 0);
    assert!(sum.about().abs() < 1000, "{}", sum.about());
    sum.add(7, 2500);
    assert_eq!(sum.exact(), 2500);
    assert!((sum.about() - 2500).abs() < 1000, "{}", sum.about());
}
