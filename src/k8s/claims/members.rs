//! The nodes of the cluster as the hub asks for them: who has which key, in which zone a node is,
//! and which nodes report what they have.

use std::collections::BTreeSet;

use futures_util::FutureExt as _;
use kube::ResourceExt;

use super::cluster::Cluster;
use crate::distribution::roster::Members;
use crate::k8s::peers::{named, published};
use crate::model::{NodeId, Sha256};

/// The zone of a node, as cloud providers set it.
const ZONE: &str = "topology.kubernetes.io/zone";

impl Members for Cluster {
    fn named(&self, key: &Sha256) -> Option<NodeId> {
        named(&self.seen_pools.all(), key)
    }

    fn key(&self, node: &NodeId) -> Option<Sha256> {
        let pool = self.seen_pools.get(node.as_str())?;
        published(&pool).map(|peer| peer.key)
    }

    fn zone(&self, node: &NodeId) -> String {
        let node = self.seen_nodes.get(node.as_str());
        node.map(|node| zone_of(&*node)).unwrap_or_default()
    }

    fn expected(&self) -> Option<BTreeSet<String>> {
        let is_listed = self.ready().now_or_never().is_some();
        let pools = self.seen_pools.all();
        let peers = pools.iter().filter_map(|pool| published(pool));
        let names = peers.map(|peer| peer.name.as_str().to_owned());
        // The account of a node that was deleted will not come.
        let there = names.filter(|node| self.seen_nodes.get(node).is_some());
        is_listed.then(|| there.collect())
    }
}

/// The zone in a node's labels; empty: not known.
fn zone_of(node: &impl ResourceExt) -> String {
    node.labels().get(ZONE).cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Node;

    use super::*;

    #[test]
    fn the_zone_of_a_node_is_its_well_known_label() {
        let node = |labels: serde_json::Value| -> Node {
            let metadata = serde_json::json!({"name": "node-1", "labels": labels});
            serde_json::from_value(serde_json::json!({"metadata": metadata})).expect("a node")
        };
        let labels = serde_json::json!({
            "topology.kubernetes.io/zone": "east-1a",
            "topology.kubernetes.io/region": "east",
        });
        assert_eq!(zone_of(&node(labels)), "east-1a");
        let labels = serde_json::json!({"topology.kubernetes.io/region": "east"});
        assert_eq!(zone_of(&node(labels)), "");
        assert_eq!(zone_of(&node(serde_json::Value::Null)), "");
    }
}
