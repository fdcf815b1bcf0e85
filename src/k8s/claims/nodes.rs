//! Nodes that are gone: their Node object is missing for `--node-grace`.
//!
//! Such a node is given up. Its objects go that order a deletion, or that were never Ready, and its
//! `Pool` goes last. Objects of Ready volumes stay, since a PersistentVolume may name them: if the
//! disk comes back, they work again. They are marked until then, since the state that they show is
//! the node's last answer. DeleteVolume and DeleteSnapshot of them succeed.
//!
//! No state says that a node was given up: it has neither a Node nor a `Pool`, both read live. So
//! a restart, or a second controller, changes nothing. A node that is only NotReady has both.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use k8s_openapi::api::core::v1::Node as ApiNode;
use kube::{Resource, ResourceExt as _};
use tokio::time::Instant;
use tonic::Code;

use super::cluster::Cluster;
use super::decide::refusal;
use super::objects::failed;
use crate::api::{NODE_GONE, Phase, Wanted};
use crate::engine::{Error, Result};
use crate::model::NodeId;

/// The shortest and the longest time between two looks.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));

/// Whether an object goes with its node: its data was to be deleted, or never existed for anyone.
pub(in crate::k8s) fn goes(wanted: Wanted, phase: Option<Phase>) -> bool {
    wanted == Wanted::Absent || !matches!(phase, Some(Phase::Ready | Phase::Lost))
}

impl Cluster {
    /// Gives up nodes that are missing for `grace`.
    pub(super) async fn give_up_forever(&self, grace: Duration) {
        self.ready().await;
        let pause = (grace / 4).clamp(PAUSES.0, PAUSES.1);
        let mut since: HashMap<String, Instant> = HashMap::new();
        loop {
            let now = Instant::now();
            let missing = self.missing_nodes().into_iter();
            since = missing
                .map(|node| {
                    let first = since.get(&node).copied().unwrap_or(now);
                    (node, first)
                })
                .collect();
            let due = since.iter();
            let due = due.filter(|(_, first)| now.duration_since(**first) >= grace);
            let due: Vec<String> = due.map(|(node, _)| node.clone()).collect();
            for node in due {
                match self.give_up(&node).await {
                    // If something is made for it again, its time begins again.
                    Ok(()) => drop(since.remove(&node)),
                    Err(error) => {
                        tracing::warn!(%node, %error,
                            "the node is gone, but could not be given up; retrying");
                    }
                }
            }
            if let Err(error) = self.unmark_nodes_back().await {
                tracing::warn!(%error, "objects of nodes that are back stay marked; retrying");
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Removes the mark from objects whose node is back.
    async fn unmark_nodes_back(&self) -> Result<()> {
        let is_back = |node: &str| self.seen_nodes.get(node).is_some();
        let mut failure = None;
        for volume in self.seen_volumes.all() {
            if is_marked(&*volume) && is_back(&volume.spec.node_name) {
                let name = volume.name_any();
                let unmarked = self.volumes.annotate(&name, NODE_GONE, None).await;
                failure = unmarked.err().or(failure);
            }
        }
        for snapshot in self.seen_snapshots.all() {
            if is_marked(&*snapshot) && is_back(&snapshot.spec.node_name) {
                let name = snapshot.name_any();
                let unmarked = self.snapshots.annotate(&name, NODE_GONE, None).await;
                failure = unmarked.err().or(failure);
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// The nodes that have something to give up, and no Node object.
    fn missing_nodes(&self) -> BTreeSet<String> {
        let mut nodes: BTreeSet<String> = BTreeSet::new();
        for volume in self.seen_volumes.all() {
            if goes(volume.spec.wanted, volume.phase()) {
                nodes.insert(volume.spec.node_name.clone());
            }
        }
        for snapshot in self.seen_snapshots.all() {
            if goes(snapshot.spec.wanted, snapshot.phase()) {
                nodes.insert(snapshot.spec.node_name.clone());
            }
        }
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
        // A mark that cannot be written keeps no node.
        let mut failure = None;
        // Each is deleted as it was read, or stays: a node that is back may have written to it.
        for volume in &volumes {
            if goes(volume.spec.wanted, volume.phase()) {
                self.volumes.remove(volume).await?;
            } else if !is_marked(volume) {
                let name = volume.name_any();
                let marked = self.volumes.annotate(&name, NODE_GONE, MARK).await;
                failure = marked.err().or(failure);
            }
        }
        for snapshot in &snapshots {
            if goes(snapshot.spec.wanted, snapshot.phase()) {
                self.snapshots.remove(snapshot).await?;
            } else if !is_marked(snapshot) {
                let name = snapshot.name_any();
                let marked = self.snapshots.annotate(&name, NODE_GONE, MARK).await;
                failure = marked.err().or(failure);
            }
        }
        if let Some(pool) = pool
            && self.pools.remove(&pool).await?
        {
            self.counters.given_up.inc();
            tracing::warn!(%node,
                "the Node object was missing for --node-grace: the node is given up; volumes with \
                 a PersistentVolume are kept in case its disk returns");
        }
        failure.map_or(Ok(()), Err)
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

/// The value of the mark, as the tables of kubectl show it.
const MARK: Option<&str> = Some("true");

fn is_marked<K: Resource>(object: &K) -> bool {
    object.annotations().contains_key(NODE_GONE)
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

/// The error for a source on a node that was given up.
pub(in crate::k8s) fn given_up(source: &str, node: &str) -> Error {
    let message = format!(
        "the source {source} is on node {node}, which was deleted from the cluster; it can be \
         copied again when the node is back with its disk"
    );
    refusal(Code::FailedPrecondition, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_persistent_volume_may_name_stays() {
        use Phase::{Failed, Gone, Lost, Ready};
        for phase in [Some(Ready), Some(Lost)] {
            assert!(!goes(Wanted::Present, phase) && !goes(Wanted::Kept, phase));
            assert!(goes(Wanted::Absent, phase));
        }
        for phase in [None, Some(Failed), Some(Gone)] {
            for wanted in [Wanted::Present, Wanted::Kept, Wanted::Absent] {
                assert!(goes(wanted, phase));
            }
        }
    }
}
