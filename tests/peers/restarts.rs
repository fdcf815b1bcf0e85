//! A controller that restarts again and again while three nodes commit and read one output: what a
//! reader may see then (docs/catalog.md).

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use baggageclaim::catalog::{Found, Version};
use baggageclaim::engine::Error;
use baggageclaim::model::{ArtifactId, Outcome, Timestamp};
use futures_util::future::join_all;
use parking_lot::Mutex;

use crate::catalog::{Find, Hub, finish};
use crate::common::bench::{NEVER, eventually};
use crate::nodes::{INPUT, Node, OUTPUT, name};

const RESTARTS: u64 = 5;
/// Reads of content of another node that each node makes with each controller.
const READS: u64 = 2;

/// The place of content in the order of commits.
fn version(created: Timestamp, artifact: ArtifactId) -> Version {
    let tie = u32::try_from(artifact.bits() >> 96).expect("32 bits");
    Version {
        stamp: created,
        tie,
    }
}

/// The output that a node has.
fn here(node: &Node) -> Option<Version> {
    let name = name(INPUT[1].1);
    let local = node.bench.engine.local(&name.tenant, &name.reference);
    local.map(|local| version(local.created, local.id))
}

/// What a controller knows of the output.
fn known(find: &Find) -> Option<Version> {
    let found = find(&[vec![name(INPUT[1].1).into()]], NEVER);
    let found: Option<Found> = found.expect("it is not busy").pop();
    found.map(|found| found.version)
}

/// A controller that all nodes have a stream to.
struct Connected {
    number: u64,
    find: Arc<Find>,
}

#[derive(Default)]
struct Load {
    /// `None` while the controller restarts.
    connected: Mutex<Option<Connected>>,
    is_over: AtomicBool,
    /// The texts that were committed or seen.
    texts: Mutex<BTreeMap<Version, String>>,
    /// For each node: its commits and reads, and its checked reads of other nodes' content.
    works: [AtomicU64; 3],
    checked: [AtomicU64; 3],
}

impl Load {
    /// The number of the controller, and what it knows.
    fn before(&self) -> Option<(u64, Option<Version>)> {
        let connected = self.connected.lock();
        let connected = connected.as_ref();
        connected.map(|connected| (connected.number, known(&*connected.find)))
    }

    fn note(&self, version: Version, text: &str) {
        let mut texts = self.texts.lock();
        let noted = texts.entry(version).or_insert_with(|| text.to_owned());
        assert_eq!(noted, text, "one version has two contents");
    }

    fn newest(&self) -> Version {
        let texts = self.texts.lock();
        *texts.last_key_value().expect("there is content").0
    }

    async fn runs(&self, index: usize, node: &Node) {
        let mut had: Option<Version> = None;
        for number in 0.. {
            if self.is_over.load(Ordering::SeqCst) {
                return;
            }
            let volume = format!("{index}-{number}");
            // Each node reads mostly what another one has made.
            if number % 3 == index {
                node.commit(&volume, &OUTPUT, &volume).await;
                had = had.max(here(node));
            } else {
                had = had.max(Some(self.reads((index, node), &volume, had).await));
            }
            self.works[index].fetch_add(1, Ordering::SeqCst);
        }
    }

    /// A pod reads the output. Its node had this content before.
    async fn reads(
        &self,
        (index, node): (usize, &Node),
        volume: &str,
        had: Option<Version>,
    ) -> Version {
        let (local, before) = (here(node), self.before());
        let published = loop {
            match node.try_publish(volume, &INPUT).await {
                Ok(published) => break published,
                // It lost its name between the fetch and the mount. Kubelet repeats the call.
                Err(Error::Coming { .. } | Error::NoSuchContent(_)) => {}
                Err(error) => panic!("{volume}: {error}"),
            }
        };
        let after = self.connected.lock().as_ref().map(|it| it.number);
        let parent = published.parent.expect("it reads content");
        let rows = node.bench.engine.artifacts(None);
        let row = rows.iter().find(|row| row.id == parent);
        let seen = version(row.expect("a volume uses it").created, parent);
        let text = fs::read_to_string(node.bench.target(volume).join("text"));
        self.note(seen, &text.expect("a whole commit"));
        // Only a node that was connected to one controller all the time is promised anything.
        if let Some((number, known)) = before
            && after == Some(number)
        {
            assert!(
                Some(seen) >= had,
                "older than what the node had: {seen:?}, {had:?}"
            );
            if local.is_none() {
                assert!(
                    Some(seen) >= known,
                    "older than what is known: {seen:?}, {known:?}"
                );
                self.checked[index].fetch_add(1, Ordering::SeqCst);
            }
        }
        node.end(volume, Outcome::Failed).await;
        seen
    }

    /// Each node has done this so many times more.
    async fn more(&self, what: &str, counts: &[AtomicU64; 3], times: u64) {
        let now = || counts.each_ref().map(|count| count.load(Ordering::SeqCst));
        let before = now();
        eventually(what, || {
            let mut counts = now().into_iter().zip(before);
            counts.all(|(now, before)| now >= before + times)
        })
        .await;
    }

    /// The controller knows all that was seen before, and pods are promised to see it.
    async fn connects(&self, hub: &Hub, number: u64) {
        let seen = self.newest();
        eventually("the controller knows what was seen", || {
            known(&*hub.find) >= Some(seen)
        })
        .await;
        let find = Arc::clone(&hub.find);
        *self.connected.lock() = Some(Connected { number, find });
    }
}

#[tokio::test]
async fn while_the_controller_restarts_under_load_no_reader_goes_back() {
    let mut hub = Hub::start().await;
    let Some(nodes) = hub.nodes(&["a", "b", "c"]).await else {
        return;
    };
    nodes[0].commit("first", &OUTPUT, "first").await;
    let load = Load::default();
    load.note(here(&nodes[0]).expect("it was made"), "first");
    hub.knows(1).await;
    let restarts = async {
        for number in 0..=RESTARTS {
            load.connects(&hub, number).await;
            load.more("all nodes read", &load.checked, READS).await;
            if number < RESTARTS {
                *load.connected.lock() = None;
                hub.end().await;
                load.more("all nodes work alone", &load.works, 1).await;
                hub.begin().await;
                hub.has_all(&nodes).await;
            }
        }
        load.is_over.store(true, Ordering::SeqCst);
    };
    let work = nodes.iter().enumerate();
    let work = join_all(work.map(|(index, node)| load.runs(index, node)));
    tokio::join!(restarts, work);

    // The newest content keeps the name everywhere, and older content loses it.
    let made = nodes.iter().filter_map(here).max();
    let newest = made.expect("a node has it").max(load.newest());
    eventually("older content loses the name", || {
        let mut all = nodes.iter().filter_map(here);
        all.all(|here| here == newest) && known(&*hub.find) == Some(newest)
    })
    .await;
    let mut texts = Vec::new();
    for node in &nodes {
        texts.push(node.sees("last", &INPUT).await.expect("it reads content"));
        assert_eq!(here(node), Some(newest), "{:?}", node.id);
    }
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    drop(load);
    finish(hub, nodes).await;
}
