fn main() {
    use sim::explore::*;
    use std::sync::Arc;
    let clock = base::clock::Clock::real();
    let base =
        Arc::new(Base::new(&sim::world::Shape::small(2), &sim::sequences::set_up()).unwrap());
    println!("base {} ms", clock.monotonic_ns() / 1000000);
    let seen = Arc::new(Seen::default());
    let plan = sim::sequences::Plan::new(1);
    println!("{} singles {} pairs", plan.singles(), plan.pairs());
    let mut ex = Explorer::new(base, seen.clone(), Effort::USUAL);
    let n: usize = std::env::args().nth(1).map_or(300, |a| a.parse().unwrap());
    let from: usize = std::env::args().nth(2).map_or(0, |a| a.parse().unwrap());
    let mut bad = 0;
    for i in from..from + n {
        if let Err(f) = ex.explore(&plan.sequence(i)) {
            println!("sequence {i}:\n{f}");
            bad += 1;
            if bad > 5 {
                break;
            }
        }
    }
    println!(
        "{} states {} looks, {} ms",
        seen.states(),
        ex.looked_at,
        clock.monotonic_ns() / 1000000
    );
}
