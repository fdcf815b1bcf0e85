//! Nodes that are gone: their Node object is missing for `--node-grace`.
//!
//! Such a node is given up. Its objects go that order a deletion, or that were never Ready, and its
//! `Pool` goes last. Objects of Ready volumes stay, since a PersistentVolume may name them. Their
//! status becomes Lost. If the disk comes back, the node reports them Ready again, as after any
//! other loss. DeleteVolume and DeleteSnapshot of them succeed.
//!
//! Whether a call may go on without the node is read live: it was given up if it has neither a Node
//! nor a `Pool`. So a restart, or a second controller, changes nothing. A node that is only
//! NotReady has both.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node as ApiNode;
use kube::ResourceExt as _;
use serde_json::json;
use tokio::time::Instant;

use super::cluster::Cluster;
use super::decide::given_up;
use super::objects::{Objects, failed};
use super::order::Order;
use super::since::Since;
use crate::api::{Phase, Refusal};
use crate::engine::Result;
use crate::model::NodeId;

/// The shortest and the longest time between two looks.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));

impl Cluster {
    /// Gives up nodes that are missing for `grace`.
    pub(super) async fn give_up_forever(&self, grace: Duration) {
        self.ready().await;
        let pause = (grace / 4).clamp(PAUSES.0, PAUSES.1);
        let mut missing = Since::default();
        loop {
            let (nodes, now) = (self.missing_nodes(), Instant::now());
            missing.look(nodes.iter().cloned(), now);
            // A node whose objects were changed while it was given up is due again at once.
            for node in nodes.iter().filter(|it| missing.is_due(it, now, grace)) {
                if let Err(error) = self.give_up(node).await {
                    tracing::warn!(%node, %error,
                        "the node is gone, but could not be given up; retrying");
                }
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// The nodes that have something to give up, and no Node object.
    fn missing_nodes(&self) -> BTreeSet<String> {
        let volumes = self.seen_volumes.all();
        let volumes = volumes.iter().filter(|one| one.is_left());
        let mut nodes: BTreeSet<String> = volumes.map(|one| one.node().to_owned()).collect();
        let snapshots = self.seen_snapshots.all();
        let snapshots = snapshots.iter().filter(|one| one.is_left());
        nodes.extend(snapshots.map(|one| one.node().to_owned()));
        nodes.extend(self.seen_pools.all().iter().map(|pool| pool.name_any()));
        nodes.retain(|node| self.seen_nodes.get(node).is_none());
        nodes
    }

    /// Whether there is a Node object now.
    async fn has_node(&self, node: &str) -> Result<bool> {
        let found = self.nodes.get_metadata_opt(node).await;
        Ok(found.map_err(|error| failed(&error))?.is_some())
    }

    /// Whether pods can start on a node now. It is read live: the watch has metadata only.
    pub(super) async fn takes_pods(&self, node: &NodeId) -> Result<bool> {
        let found = self.nodes.get_opt(node.as_str()).await;
        let found = found.map_err(|error| failed(&error))?;
        Ok(found.is_some_and(|node| is_ready(&node)))
    }

    async fn give_up(&self, node: &str) -> Result<()> {
        let pool = self.pools.get(node).await?;
        // The Node is read last: only objects that were read while it was missing are deleted.
        let volumes = self.volumes.select("spec.nodeName", node).await?;
        let snapshots = self.snapshots.select("spec.nodeName", node).await?;
        if self.has_node(node).await? {
            return Ok(());
        }
        let volumes = give_up_all(&self.volumes, &volumes).await?;
        let snapshots = give_up_all(&self.snapshots, &snapshots).await?;
        if let Some(pool) = pool
            && self.pools.remove(&pool).await?
        {
            self.counters.given_up.inc();
            tracing::warn!(%node,
                "the Node object was missing for --node-grace: the node is given up; volumes with \
                 a PersistentVolume are kept in case its disk returns");
        }
        volumes.and(snapshots)
    }

    /// Whether a node was given up, read live: nothing will answer an order for it.
    pub(super) async fn is_given_up(&self, node: &str) -> Result<bool> {
        // The watches decide only that a node is there.
        if self.seen_nodes.get(node).is_some() {
            return Ok(false);
        }
        Ok(self.pools.get(node).await?.is_none() && !self.has_node(node).await?)
    }

    /// Refuses a source on a node that was given up.
    pub(super) async fn refuse_given_up(&self, source: &str, node: &str) -> Result<()> {
        if self.is_given_up(node).await? {
            return Err(given_up(source, node));
        }
        Ok(())
    }
}

/// Deletes objects of a node that is given up, or says that they are Lost. Each as it was read, or
/// not at all: a node that is back may have written to it. A status that cannot be written keeps no
/// node: its error is the inner one.
async fn give_up_all<K: Order>(objects: &Objects<K>, all: &[K]) -> Result<Result<()>> {
    let mut done = Ok(());
    for object in all.iter().filter(|object| object.is_left()) {
        if object.goes() {
            objects.remove(object).await?;
        } else {
            let lost = json!({
                "phase": Phase::Lost,
                "error": Refusal::node_gone(object.node()),
            });
            done = done.and(objects.write_status(object, lost).await);
        }
    }
    Ok(done)
}

/// Whether a node is Ready and not cordoned.
fn is_ready(node: &ApiNode) -> bool {
    let is_cordoned = node.spec.as_ref().and_then(|spec| spec.unschedulable);
    let status = node.status.as_ref();
    let mut conditions = status
        .into_iter()
        .flat_map(|it| it.conditions.iter().flatten());
    let is_ready = conditions.any(|it| it.type_ == "Ready" && it.status == "True");
    is_ready && is_cordoned != Some(true)
}
