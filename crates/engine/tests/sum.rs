//! A sum in parts, added to by many threads.

use engine::sum::Sum;

#[test]
fn nothing_added_is_lost_and_the_slack_is_kept() {
    let sum = Sum::new(4, 1000);
    base::thread::parallel(4, |shard| {
        let mut rng = base::rng::Rng::new(shard as u64);
        for _ in 0..10_000 {
            sum.add(shard + rng.below(2) as usize, rng.below(100) as i64);
            sum.add(shard, -(rng.below(90) as i64));
        }
        // Takes out what it added, within the slack.
        let mut rng = base::rng::Rng::new(shard as u64);
        for _ in 0..10_000 {
            rng.below(2);
            sum.add(shard, -(rng.below(100) as i64));
            sum.add(shard, rng.below(90) as i64);
        }
    });
    assert_eq!(sum.exact(), 0);
    assert!(sum.about().abs() < 1000, "{}", sum.about());
    sum.add(7, 2500);
    assert_eq!(sum.exact(), 2500);
    assert!((sum.about() - 2500).abs() < 1000, "{}", sum.about());
}
