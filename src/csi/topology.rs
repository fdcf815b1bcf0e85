//! Converts topologies and requirements from messages and to them. [`Requirement::choose`] decides
//! with them.

use std::collections::BTreeMap;

use sha2::{Digest as _, Sha256};

use crate::backend::BackendKind;
use crate::model::{NODE_LABEL, Node, NodeId, Requirement, Topology, hex};
use crate::proto::csi::v1 as csi;

/// The label with the backend of the node's pool.
const BACKEND_LABEL: &str = "topology.baggageclaim.csi.concourse-ci.org/backend";

/// A node with all its labels.
#[must_use]
pub fn node(id: &NodeId, backend: BackendKind) -> Node {
    Node {
        id: id.clone(),
        topology: Topology(BTreeMap::from([
            (NODE_LABEL.to_owned(), label_value(id)),
            (BACKEND_LABEL.to_owned(), backend.to_string()),
        ])),
    }
}

/// A node with the label that says where its volumes are. A volume stays there, also if the pool
/// gets another backend.
#[must_use]
pub fn place(id: &NodeId) -> Node {
    Node {
        id: id.clone(),
        topology: Topology(BTreeMap::from([(NODE_LABEL.to_owned(), label_value(id))])),
    }
}

/// A node's id as a label's value: at most 63 letters, digits, `-`, `_` and `.`, with a letter or
/// digit at both ends. Another id, such as a name of 253 bytes, becomes the beginning of its
/// sha256.
fn label_value(id: &NodeId) -> String {
    let inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let outer = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = id.as_str().as_bytes();
    if bytes.len() <= 63
        && bytes.iter().copied().all(inner)
        && outer(bytes.first())
        && outer(bytes.last())
    {
        id.as_str().to_owned()
    } else {
        hex(&Sha256::digest(bytes)[..16])
    }
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
    fn a_node_that_is_no_label_still_has_a_topology() {
        let value = |text: &str| label_value(&NodeId::new(text).expect(text));
        assert_eq!(value("ip-10-0-0-1.internal"), "ip-10-0-0-1.internal");
        for odd in ["-node", "node.", "knöten", &"n".repeat(64)] {
            let value = value(odd);
            assert_eq!(value.len(), 32, "{odd}: {value}");
            assert!(value.bytes().all(|b| b.is_ascii_hexdigit()), "{value}");
        }
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
