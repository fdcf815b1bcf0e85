//! How many requests a commit, a fetch and a publish make: a storage charges for each, and each
//! takes a round trip. docs/share-content.md promises these numbers.

use std::mem;
use std::sync::Arc;

use baggageclaim::shared::Store;
use parking_lot::Mutex;

use crate::failing::Fault;
use crate::nodes::{INPUT, Node, OUTPUT, RESOURCE, Shared, TASK, require, text};

/// The requests of a node, each with the kind of its object.
struct Requests(Arc<Mutex<Vec<String>>>);

impl Requests {
    fn of(tier: &Shared) -> (Store, Self) {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let all = Arc::clone(&seen);
        let store = tier.failing(move |op, path| {
            // Below `some/prefix/v1/ci`.
            let kind = path.split('/').nth(4).unwrap_or_default();
            all.lock().push(format!("{op:?} {kind}").to_lowercase());
            Fault::None
        });
        (store, Self(seen))
    }

    /// Those since the last call, in order.
    fn since(&self) -> Vec<String> {
        mem::take(&mut *self.0.lock())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn commits_fetches_and_publishes_make_the_requests_that_the_docs_promise() {
    // Commits over commits need conditional writes.
    let tier = require!(Shared::s3());
    let (store, requests) = Requests::of(&tier);
    let a = require!(Node::new(&store).await);
    // The first operation in a namespace reads its format.
    a.share("first", &RESOURCE, "other").await;
    requests.since();

    assert_eq!(a.sees("t", &TASK).await, None);
    assert_eq!(requests.since(), ["get names"]);
    a.share("u", &TASK, "one").await;
    let made = requests.since();
    assert_eq!(made.len(), 1 + 5, "{made:?}");
    // This node wrote the record, and needs no manifest of its own content.
    for volume in ["own", "again"] {
        assert_eq!(a.sees(volume, &TASK).await, text("one"));
        assert_eq!(requests.since(), ["get names"], "{volume}");
    }
    a.share("v", &TASK, "two").await;
    assert_eq!(
        requests.since(),
        [
            "get names",
            "get names",
            "get manifests",
            "put layers",
            "put manifests",
            "replace names"
        ]
    );
    a.share("o", &OUTPUT, "built").await;
    assert_eq!(requests.since().len(), 1 + 5);
    for attributes in [&INPUT, &RESOURCE] {
        assert!(a.sees("local", attributes).await.is_some());
        assert_eq!(requests.since(), [""; 0]);
    }

    let (store, requests) = Requests::of(&tier);
    let b = require!(Node::new(&store).await);
    assert_eq!(b.sees("first", &RESOURCE).await, text("other"));
    let first = requests.since();
    assert_eq!(first.len(), 4, "with the format: {first:?}");
    assert_eq!(b.sees("i", &INPUT).await, text("built"));
    assert_eq!(
        requests.since(),
        ["get names", "get manifests", "get layers"]
    );
    // The layers of both commits.
    assert_eq!(b.sees("t", &TASK).await, text("two"));
    let fetched = requests.since();
    assert_eq!(fetched.len(), 4, "{fetched:?}");
    assert_eq!(b.sees("again", &TASK).await, text("two"));
    assert_eq!(requests.since(), ["get names"]);
    a.finish().await;
    b.finish().await;
}
