//! Commits by many concurrent callers, in a pool of few and in a pool of many artifacts: the number
//! of artifacts must not affect the cost of a commit.

use std::fs;
use std::sync::Mutex;

use crate::cases::{Bench, CALLERS, make_sealed, micros};
use crate::driver::{Caller, Driver, prepare, remove};
use crate::table::{Goal, median};

/// Artifacts of the small pool.
const FEW: usize = 100;

/// One call in this many is slower than the reported slow call.
const SLOW: usize = 100;

/// The result of all callers in one turn.
struct Turn {
    /// Commits per second, until the last is durable.
    rate: f64,
    /// The time of a slow call, in microseconds.
    slow: f64,
}

impl Bench<'_> {
    pub async fn commits(&mut self) {
        let many = self.plan.crowd;
        let mut drivers = Vec::new();
        for (pool, count) in [("few", FEW), ("crowd", many)] {
            Driver::start(self.lab, pool).await.stop();
            make_sealed(&self.lab.path().join(pool), count);
            let driver = Driver::start(self.lab, pool).await;
            drivers.push((driver, Vec::new(), Vec::new()));
        }
        for round in 0..self.plan.rounds {
            for (driver, rates, slow) in &mut drivers {
                let turn = self.committing(driver, round).await;
                rates.push(turn.rate);
                slow.push(turn.slow);
            }
        }
        let mut figures = drivers.into_iter().map(|(driver, rates, slow)| {
            driver.stop();
            (median(rates), median(slow))
        });
        let (few, slow_few) = figures.next().expect("the first");
        let (crowd, slow_crowd) = figures.next().expect("the second");
        let name = format!("commits, {CALLERS} callers, in a pool of {many} artifacts");
        self.row(&name, "/s", crowd, Some(few), Goal::Share(1.0 / 1.2));
        let name = format!("their slowest calls of {SLOW}, against a pool of {FEW}");
        let goal = Goal::Ratio(1.5);
        self.row(&name, "us", slow_crowd, Some(slow_few), goal);
    }

    /// One turn: each caller commits to its own cache, repeatedly.
    async fn committing(&self, driver: &mut Driver, round: usize) -> Turn {
        let took = Mutex::new(Vec::new());
        let callers: Vec<(Caller, _, String)> = (0..CALLERS)
            .map(|number| {
                let pod = driver.pod();
                prepare(&pod);
                (driver.caller(), pod, format!("commits-{round}-{number}"))
            })
            .collect();
        let pods: Vec<_> = callers.iter().map(|(_, pod, _)| pod.clone()).collect();
        let (commits, began) = self.all_at_once(callers.into_iter(), |(caller, pod, key)| {
            let cache = [
                ("type", "task-cache"),
                ("key", key.as_str()),
                ("commit", "always"),
            ];
            let published = caller.publish(pod, &cache);
            fs::write(pod.target("v").join("file"), b"content\n").expect("a file");
            let unpublished = caller.unpublish(pod);
            let mut took = took.lock().expect("no caller panicked");
            took.extend([micros(published), micros(unpublished)]);
        });
        for pod in &pods {
            driver.settled(pod).await;
        }
        let seconds = began.elapsed().as_secs_f64();
        pods.iter().for_each(remove);
        driver.reap().await;
        let mut took = took.into_inner().expect("no caller panicked");
        took.sort_by(f64::total_cmp);
        Turn {
            rate: f64::from(commits) / seconds,
            slow: took[took.len() - 1 - took.len() / SLOW],
        }
    }
}
