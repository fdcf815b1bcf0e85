//! A node that dies between two requests of an upload or a fetch: the tier fails from then on, and
//! the next start has another connection. `tests/distribution_driver.rs` kills real processes.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baggageclaim::model::Outcome;
use baggageclaim::shared::{Store, verify};
use baggageclaim::sys::Dir;

use crate::common::bench::{Ground, eventually, names};
use crate::common::skip;
use crate::failing::Fault;
use crate::nodes::{Node, Shared, apart, require, tenant, text, write};

/// More requests than an upload or a fetch makes.
const MOST: u64 = 20;
/// Not armed.
const NEVER: u64 = u64::MAX / 2;

/// Counts requests, and loses the answer of one and all that come after it.
#[derive(Clone, Default)]
struct Cut {
    seen: Arc<AtomicU64>,
    at: Arc<AtomicU64>,
}

impl Cut {
    fn store(&self, tier: &Shared) -> Store {
        self.at.store(NEVER, Ordering::SeqCst);
        let cut = self.clone();
        tier.failing(move |_, _| {
            let seen = cut.seen.fetch_add(1, Ordering::SeqCst);
            match seen.cmp(&cut.at.load(Ordering::SeqCst)) {
                std::cmp::Ordering::Less => Fault::None,
                std::cmp::Ordering::Equal => Fault::LostAnswer,
                std::cmp::Ordering::Greater => Fault::Status(500),
            }
        })
    }

    /// So many requests from now on are answered.
    fn after(&self, requests: u64) {
        let at = self.seen.load(Ordering::SeqCst) + requests;
        self.at.store(at, Ordering::SeqCst);
    }

    fn has_happened(&self) -> bool {
        self.seen.load(Ordering::SeqCst) > self.at.load(Ordering::SeqCst)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_is_cut_after_any_request_is_done_by_the_next_start() {
    let tier = Shared::file();
    let reader = require!(Node::new(&tier.store).await);
    let mut bench = match Ground::ALL[0].bench().await {
        Ok(bench) => bench,
        Err(reason) => return skip(&reason),
    };
    for requests in 0..MOST {
        let key = format!("key-{requests}");
        let attributes = [("type", "task-cache"), ("key", &*key)];
        let volume = format!("t-{requests}");
        let cut = Cut::default();
        let node = Node::start(bench, &cut.store(&tier), |_| {});
        node.publish(&volume, &attributes).await;
        write(&node.bench.target(&volume), &key);
        cut.after(requests);
        node.end(&volume, Outcome::Succeeded).await;
        let uploads = || node.distribution.metrics().uploads;
        eventually(&key, || cut.has_happened() || uploads() == 1).await;
        let is_whole = uploads() == 1 && !cut.has_happened();
        let bench_of = node.stop().await.restart().await;
        let node = Node::start(bench_of, &tier.store, |_| {});
        node.shared().await;
        assert_eq!(reader.sees(&volume, &attributes).await, text(&key));
        bench = node.stop().await;
        if is_whole {
            assert!(requests >= 5, "{requests} requests are a whole upload");
            let temporary = Dir::open(&std::env::temp_dir()).expect("a directory");
            let look = || verify(&tier.store, &tenant("ci"), &temporary, &|_| {}, &|| false);
            let found = apart(look).expect("it can be read");
            assert!(found.damage.is_empty(), "{:?}", found.damage);
            bench.finish().await;
            return reader.finish().await;
        }
    }
    panic!("no upload is whole");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_that_is_cut_after_any_request_leaves_nothing_and_is_done_by_the_next_start() {
    let tier = Shared::file();
    let maker = require!(Node::new(&tier.store).await);
    let mut bench = match Ground::ALL[0].bench().await {
        Ok(bench) => bench,
        Err(reason) => return skip(&reason),
    };
    for requests in 0..MOST {
        let key = format!("key-{requests}");
        let attributes = [("type", "resource-cache"), ("key", &*key)];
        let volume = format!("r-{requests}");
        maker.share(&volume, &attributes, &key).await;
        let cut = Cut::default();
        let store = cut.store(&tier);
        cut.after(requests);
        let node = Node::start(bench, &store, |settings| {
            settings.fetch_wait = Duration::from_secs(2);
        });
        let seen = node.sees(&volume, &attributes).await;
        let is_whole = !cut.has_happened();
        assert!(
            seen == text(&key) || (seen.is_none() && !is_whole),
            "{seen:?}"
        );
        let bench_of = node.stop().await.restart().await;
        assert_eq!(names(&bench_of.pool().join("incoming")), [""; 0]);
        let node = Node::start(bench_of, &tier.store, |_| {});
        let again = format!("{volume}-again");
        assert_eq!(node.sees(&again, &attributes).await, text(&key));
        bench = node.stop().await;
        if is_whole {
            assert!(requests >= 3, "{requests} requests are a whole fetch");
            let layers = fs::read_dir(bench.pool().join("layers")).expect("list");
            assert!(
                layers.count() as u64 > requests,
                "each fetch left its layer"
            );
            bench.finish().await;
            return maker.finish().await;
        }
    }
    panic!("no fetch is whole");
}
