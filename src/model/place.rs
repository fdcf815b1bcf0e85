//! Topology: nodes, their labels, and where a new volume should be. Chooses the possible nodes and
//! their order from values alone.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::digest::hex;

/// The driver's name in Kubernetes.
pub const DRIVER_NAME: &str = "baggageclaim.csi.concourse-ci.org";

/// The label with the node's name. Only this node has the content of its volumes.
pub const NODE_LABEL: &str = "topology.baggageclaim.csi.concourse-ci.org/node";

/// A node's CSI id.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NodeId(String);

/// Why a string is not a node id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a node id has 1 to 256 bytes and no control characters")]
pub struct NodeIdError;

impl NodeId {
    /// Checks a node id: at most 256 bytes (`NodeGetInfoResponse.node_id`), no control characters.
    pub fn new(text: impl Into<String>) -> Result<Self, NodeIdError> {
        let text = text.into();
        let fits = (1..=256).contains(&text.len()) && !text.chars().any(char::is_control);
        if fits {
            Ok(Self(text))
        } else {
            Err(NodeIdError)
        }
    }

    /// The id.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for NodeId {
    type Error = NodeIdError;

    fn try_from(text: String) -> Result<Self, NodeIdError> {
        Self::new(text)
    }
}

impl From<NodeId> for String {
    fn from(id: NodeId) -> Self {
        id.0
    }
}

/// Labels: those of a node, or those that a node must have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology(pub BTreeMap<String, String>);

impl Topology {
    /// Whether these labels include all of those. Keys are compared without case.
    #[must_use]
    pub fn is_in(&self, wanted: &Self) -> bool {
        wanted.0.iter().all(|(key, value)| {
            let mut ours = self.0.iter();
            ours.any(|(our_key, ours)| our_key.eq_ignore_ascii_case(key) && ours == value)
        })
    }
}

/// For messages. It is truncated: a hostile one must not fill the log.
impl fmt::Display for Topology {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cut = |text: &str| text.chars().take(128).collect::<String>();
        out.write_str("{")?;
        for (index, (key, value)) in self.0.iter().take(4).enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            write!(out, "{comma}{}: {}", cut(key), cut(value))?;
        }
        out.write_str("}")
    }
}

/// A node. Its content is accessible only there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its id.
    pub id: NodeId,
    /// The node's labels.
    pub topology: Topology,
}

impl Node {
    /// A node with the label that says where its volumes are. A volume stays there, also if the
    /// pool gets another backend.
    #[must_use]
    pub fn place(id: &NodeId) -> Self {
        let label = (NODE_LABEL.to_owned(), label_value(id));
        Self {
            id: id.clone(),
            topology: Topology([label].into()),
        }
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

/// A value and its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed<T> {
    /// The value.
    pub what: T,
    /// Its node.
    pub node: Arc<Node>,
}

/// Where a new volume should be (CSI specification, `TopologyRequirement`). Default: anywhere.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Requirement {
    /// It must be in one of these; empty: anywhere.
    pub requisite: Vec<Topology>,
    /// It should be in one of these, the first one best.
    pub preferred: Vec<Topology>,
}

impl Requirement {
    /// The first preferred place, if it is one node: the one that the scheduler chose for a pod.
    #[must_use]
    pub fn selected(&self) -> Option<&Topology> {
        let first = self.preferred.first()?;
        let names_node = |key: &String| key.eq_ignore_ascii_case(NODE_LABEL);
        first.0.keys().any(names_node).then_some(first)
    }
}

/// Why no node is possible: the requested and the possible topologies.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("accessibility_requirements ask for {wanted}, and this can be on {possible} only")]
pub struct Elsewhere {
    wanted: String,
    possible: String,
}

impl Requirement {
    /// The nodes that are possible, the best first, at least one. For a clone or snapshot the
    /// caller passes only its source's node.
    ///
    /// A preference for another node is no error: "the SP MAY choose from the list of all possible
    /// topologies".
    pub fn choose<'a>(
        &self,
        among: impl IntoIterator<Item = &'a Arc<Node>>,
    ) -> Result<Vec<&'a Arc<Node>>, Elsewhere> {
        let place = |wanted: &[Topology], node: &Node| {
            let mut wanted = wanted.iter();
            wanted.position(|wanted| node.topology.is_in(wanted))
        };
        let among: Vec<&Arc<Node>> = among.into_iter().collect();
        let is_allowed = |node: &&&Arc<Node>| {
            self.requisite.is_empty() || place(&self.requisite, node).is_some()
        };
        let mut chosen: Vec<&Arc<Node>> = among.iter().filter(is_allowed).copied().collect();
        if chosen.is_empty() {
            return Err(Elsewhere {
                wanted: one_of(self.requisite.iter()).unwrap_or_else(|| "any node".to_owned()),
                possible: one_of(among.iter().map(|node| &node.topology))
                    .unwrap_or_else(|| "no node".to_owned()),
            });
        }
        let rank = |wanted: &[Topology], node| place(wanted, node).unwrap_or(wanted.len());
        chosen.sort_by_key(|node| (rank(&self.preferred, node), rank(&self.requisite, node)));
        Ok(chosen)
    }
}

fn one_of<'a>(all: impl ExactSizeIterator<Item = &'a Topology>) -> Option<String> {
    let more = all.len().saturating_sub(3);
    let first: Vec<String> = all.take(3).map(Topology::to_string).collect();
    let first = Some(first.join(" or ")).filter(|first| !first.is_empty())?;
    Some(match more {
        0 => first,
        more => format!("{first} or {more} more"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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

    fn topology(labels: &[(&str, &str)]) -> Topology {
        let label = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        Topology(labels.iter().map(label).collect())
    }

    fn node(name: &str, backend: &str) -> Arc<Node> {
        Arc::new(Node {
            id: NodeId::new(name).expect("an id"),
            topology: topology(&[("node", name), ("backend", backend)]),
        })
    }

    fn nodes() -> [Arc<Node>; 3] {
        [node("a", "btrfs"), node("b", "btrfs"), node("c", "copy")]
    }

    fn chosen(requisite: &[&Topology], preferred: &[&Topology]) -> Result<String, Elsewhere> {
        let own = |all: &[&Topology]| all.iter().copied().cloned().collect();
        let requirement = Requirement {
            requisite: own(requisite),
            preferred: own(preferred),
        };
        let nodes = nodes();
        let chosen = requirement.choose(&nodes)?;
        Ok(chosen.iter().map(|node| node.id.as_str()).collect())
    }

    #[test]
    fn node_ids_keep_to_the_specification() {
        assert_eq!(NodeId::new("node-1").expect("ok").as_str(), "node-1");
        NodeId::new("n".repeat(256)).expect("256 bytes are allowed");
        for bad in [String::new(), "n".repeat(257), "a\nb".to_owned()] {
            assert_eq!(NodeId::new(bad), Err(NodeIdError));
        }
    }

    #[test]
    fn what_is_preferred_comes_first_and_what_is_requisite_must_be() {
        let [a, b, c] = ["a", "b", "c"].map(|name| topology(&[("node", name)]));
        let [btrfs, copy] = ["btrfs", "copy"].map(|name| topology(&[("backend", name)]));
        let both = topology(&[("backend", "copy"), ("node", "b")]);
        let nowhere = topology(&[("zone", "z")]);
        let any = Topology::default();
        let shouted = topology(&[("NODE", "b")]);
        let cases: [(&[&Topology], &[&Topology], &str); 12] = [
            (&[], &[], "abc"),
            (&[], &[&c, &b], "cba"),
            (&[], &[&copy], "cab"),
            (&[], &[&nowhere], "abc"),
            (&[&b, &a], &[], "ba"),
            (&[&a, &b, &c], &[&c], "cab"),
            (&[&btrfs], &[&c, &b], "ba"),
            (&[&nowhere, &c], &[], "c"),
            (&[&any], &[], "abc"),
            (&[&shouted], &[], "b"),
            (&[&copy, &btrfs], &[], "cab"),
            (&[&both, &a], &[&both], "a"),
        ];
        for (requisite, preferred, expected) in cases {
            let chosen = chosen(requisite, preferred);
            assert_eq!(
                chosen.as_deref(),
                Ok(expected),
                "{requisite:?} {preferred:?}"
            );
        }
        for requisite in [nowhere, both, topology(&[("node", "B")])] {
            let none = chosen(&[&requisite], &[&b]);
            none.expect_err(&requisite.to_string());
        }
    }

    #[test]
    fn what_can_be_nowhere_says_where_it_is_wanted_and_where_it_could_be() {
        let many: Vec<Topology> = (0..5)
            .map(|n| topology(&[("node", &format!("x{n}"))]))
            .collect();
        let why = chosen(&many.iter().collect::<Vec<_>>(), &[])
            .expect_err("elsewhere")
            .to_string();
        assert_eq!(
            why,
            "accessibility_requirements ask for {node: x0} or {node: x1} or {node: x2} or 2 more, \
             and this can be on {backend: btrfs, node: a} or {backend: btrfs, node: b} or \
             {backend: copy, node: c} only"
        );
        let error = Requirement::default().choose(&[]).expect_err("no node");
        let error = error.to_string();
        assert!(error.contains("for any node") && error.ends_with("on no node only"));
        let long = topology(&[("node", &"n".repeat(1000))]);
        assert!(long.to_string().len() < 200);
    }
}
