//! The chain of `Fence` objects: reads it for the catalog, and makes the next one.
//!
//! A fence is made by create alone. Its name holds its predecessor, so two controllers build one
//! chain: the one that loses reads the other's fence and tries the next name. `fences` has the
//! rules for objects that cannot be read, and for those that are deleted.

use std::collections::{BTreeMap, BTreeSet};

use kube::api::{ApiResource, DynamicObject, PostParams};
use kube::{Api, Client};
use tokio::sync::Mutex;

use super::fences::{Error, Listed, failed};
use crate::api;
use crate::hub;
use crate::k8s::client::{first_page, has_code, page_after};
use crate::model::{Clear, Fence, Fences};

/// How many fences one can repeat (deploy/crds).
const MOST_REPEATS: usize = 1000;
/// How often a fence is tried whose place in the chain another controller takes.
const ATTEMPTS: usize = 20;

/// Reads and makes fences. Several tasks use it. One of them at a time reads or makes, so that no
/// list is older than what is known.
pub(super) struct Fencer {
    pub(super) fences: Api<api::Fence>,
    /// The Fence objects. Each is parsed alone: one that cannot be read does not hide the others.
    unread: Api<DynamicObject>,
    pub(super) catalog: hub::Handle,
    seen: Mutex<Seen>,
}

/// What this process has seen of the objects.
#[derive(Default)]
struct Seen {
    /// The names of those that cannot be read.
    malformed: BTreeSet<String>,
    is_loaded: bool,
}

impl Fencer {
    pub(super) fn new(client: Client, catalog: hub::Handle) -> Self {
        let kind = ApiResource::erase::<api::Fence>(&());
        Self {
            fences: Api::all(client.clone()),
            unread: Api::all_with(client, &kind),
            catalog,
            seen: Mutex::default(),
        }
    }

    /// Tells the catalog which fences there are.
    pub(super) async fn read(&self) -> Result<Vec<api::Fence>, Error> {
        let mut seen = self.seen.lock().await;
        self.read_once(&mut seen).await
    }

    async fn read_once(&self, seen: &mut Seen) -> Result<Vec<api::Fence>, Error> {
        let listed = Listed::new(self.list().await?);
        self.say_malformed(seen, &listed.malformed);
        listed.check()?;
        let oldest = listed.oldest();
        let mut fences = Fences::default();
        fences.forget(oldest);
        for fence in &listed.fences {
            fences.insert(fence.clone());
        }
        let known = self.catalog.fences();
        let is_lost = |fence: &Fence| fence.number > oldest && !fences.knows(fence);
        if !seen.is_loaded || known.all().any(is_lost) {
            if seen.is_loaded {
                tracing::warn!("Fences are gone from the API server: asking all nodes for theirs");
            }
            self.catalog.load_fences(fences);
            seen.is_loaded = true;
        } else {
            self.catalog.forget_fences(oldest);
            for fence in listed.fences {
                self.catalog.learn_fence(fence);
            }
        }
        Ok(listed.objects)
    }

    async fn list(&self) -> Result<Vec<DynamicObject>, Error> {
        let mut all = Vec::new();
        let mut next = Some(first_page());
        while let Some(params) = next {
            // Also 404 is a failure: with an empty list, all fences would count as lost, and nodes
            // would clear their names a second time.
            let page = self.unread.list(&params).await;
            let page = page.map_err(failed("list Fences"))?;
            next = page_after(&page);
            all.extend(page);
        }
        Ok(all)
    }

    fn say_malformed(&self, seen: &mut Seen, malformed: &BTreeMap<String, String>) {
        for (name, why) in malformed {
            if !seen.malformed.contains(name) {
                tracing::error!(
                    name,
                    why,
                    "a Fence cannot be read: no name is cleared for it, and \
                    if its name begins with `after-`, none for later ones; delete it, and then \
                    clear once more what it should have cleared"
                );
            }
        }
        seen.malformed = malformed.keys().cloned().collect();
        self.catalog.set_malformed_fences(malformed.len());
    }

    /// Makes again what an older etcd has lost.
    pub(super) async fn mend(&self) -> Result<(), Error> {
        loop {
            // Asked while nothing else makes any: two tasks must not make the same again.
            let mut seen = self.seen.lock().await;
            let Some(clear) = self.catalog.owed().into_iter().next() else {
                return Ok(());
            };
            self.make_once(&mut seen, clear).await?;
        }
    }

    /// Makes a fence at the end of the chain. What it cannot repeat is still owed.
    pub(super) async fn make(&self, clear: Clear) -> Result<(), Error> {
        let mut seen = self.seen.lock().await;
        self.make_once(&mut seen, clear).await
    }

    async fn make_once(&self, seen: &mut Seen, mut clear: Clear) -> Result<(), Error> {
        if !seen.is_loaded {
            self.read_once(seen).await?;
        }
        clear.repeats.truncate(MOST_REPEATS);
        for _ in 0..ATTEMPTS {
            let fence = self.catalog.next_fence(clear.clone());
            let object = api::Fence::from(&fence);
            match self.fences.create(&PostParams::default(), &object).await {
                Ok(_) => {
                    tracing::info!(covers = ?fence.covers, number = fence.number,
                        "names are cleared in the cluster");
                    self.catalog.learn_fence(fence);
                    return Ok(());
                }
                // Another controller was faster, or an answer was lost.
                Err(error) if has_code(&error, 409) => {
                    self.read_once(seen).await?;
                }
                Err(error) => return Err(failed("make a Fence")(error)),
            }
        }
        Err(Error::Crowded)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::distribution::roster::NoNode;
    use crate::k8s::client::{client_of, list_of};
    use crate::model::Coverage;

    fn chain() -> [Fence; 2] {
        [(5, 0), (9, 5)].map(|(number, previous)| Fence {
            number,
            previous,
            id: number,
            covers: Coverage::Namespace("ci".parse().expect("a label")),
            repeats: Vec::new(),
        })
    }

    async fn fencer(client: Client) -> Fencer {
        let address = "127.0.0.1:0".parse().expect("an address");
        let hub = hub::Hub::open(address, Arc::new(NoNode), Duration::from_mins(1)).await;
        Fencer::new(client, hub.expect("it opens").handle())
    }

    #[tokio::test]
    async fn fences_are_read_in_small_pages() {
        let chain = chain();
        let objects = chain.clone().map(|fence| json!(api::Fence::from(&fence)));
        let client = client_of(move |request| {
            let query = request.uri().query().unwrap_or_default();
            assert!(query.contains("limit=100"), "{query}");
            let (object, next) = if query.contains("continue=more") {
                (&objects[1], "")
            } else {
                (&objects[0], "more")
            };
            Some((
                200,
                json!({"metadata": {"continue": next}, "items": [object]}),
            ))
        });
        let fencer = fencer(client).await;
        // The first look loads them, and the second one finds nothing new.
        for _ in 0..2 {
            let objects = fencer.read().await.expect("both pages");
            assert_eq!(objects.len(), 2);
            let known = fencer.catalog.fences();
            assert!(chain.iter().all(|fence| known.knows(fence)));
        }
    }

    #[tokio::test]
    async fn a_list_that_is_not_found_says_nothing_about_the_fences() {
        let chain = chain();
        let objects = chain.clone().map(|fence| json!(api::Fence::from(&fence)));
        let is_away = Arc::new(AtomicBool::new(true));
        let answer = Arc::clone(&is_away);
        let client = client_of(move |_| {
            Some(if answer.load(Ordering::Relaxed) {
                (404, json!({"kind": "Status", "code": 404}))
            } else {
                (200, list_of(&json!(objects)))
            })
        });
        let fencer = fencer(client).await;
        fencer.read().await.expect_err("no list");
        assert!(!fencer.catalog.knows_fences(), "nodes would be welcome");
        is_away.store(false, Ordering::Relaxed);
        fencer.read().await.expect("a list");
        is_away.store(true, Ordering::Relaxed);
        fencer.read().await.expect_err("no list");
        let known = fencer.catalog.fences();
        assert!(chain.iter().all(|fence| known.knows(fence)));
    }
}
