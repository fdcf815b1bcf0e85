//! Converts topologies and requirements from messages and to them. [`Requirement::choose`] decides
//! with them.

use crate::backend::BackendKind;
use crate::model::{Node, NodeId, Requirement, Topology};
use crate::proto::csi::v1 as csi;

/// The label with the backend of the node's pool.
const BACKEND_LABEL: &str = "topology.baggageclaim.csi.concourse-ci.org/backend";

/// A node with all its labels.
#[must_use]
pub fn node(id: &NodeId, backend: BackendKind) -> Node {
    let mut node = Node::place(id);
    let labels = &mut node.topology.0;
    labels.insert(BACKEND_LABEL.to_owned(), backend.to_string());
    node
}

/// A node's topology as a message.
pub(super) fn message(node: &Node) -> csi::Topology {
    csi::Topology {
        segments: node.topology.0.clone(),
    }
}

/// The requested labels; none means any node.
pub(super) fn topology(wanted: Option<csi::Topology>) -> Topology {
    Topology(wanted.map(|wanted| wanted.segments).unwrap_or_default())
}

/// The requested places; no requirement means any node.
pub(super) fn requirement(wanted: Option<csi::TopologyRequirement>) -> Requirement {
    let all = |topologies: Vec<csi::Topology>| {
        let topologies = topologies.into_iter();
        topologies.map(|one| topology(Some(one))).collect()
    };
    let wanted = wanted.unwrap_or_default();
    Requirement {
        requisite: all(wanted.requisite),
        preferred: all(wanted.preferred),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn it_tells_the_node_and_its_backend() {
        let id = NodeId::new("node-1").expect("an id");
        let seen = message(&node(&id, BackendKind::Overlay)).segments;
        let label = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let expected = BTreeMap::from([
            label(
                "topology.baggageclaim.csi.concourse-ci.org/backend",
                "overlay",
            ),
            label("topology.baggageclaim.csi.concourse-ci.org/node", "node-1"),
        ]);
        assert_eq!(seen, expected);
    }

    #[test]
    fn a_requirement_keeps_its_two_lists_and_their_order() {
        let one = |value: &str| csi::Topology {
            segments: [("key".to_owned(), value.to_owned())].into(),
        };
        let wanted = requirement(Some(csi::TopologyRequirement {
            requisite: vec![one("a"), one("b")],
            preferred: vec![one("b")],
        }));
        let values =
            |all: &[Topology]| -> String { all.iter().map(|one| one.0["key"].as_str()).collect() };
        assert_eq!(values(&wanted.requisite), "ab");
        assert_eq!(values(&wanted.preferred), "b");
        assert_eq!(requirement(None), Requirement::default());
        assert_eq!(topology(None), Topology::default());
    }
}
