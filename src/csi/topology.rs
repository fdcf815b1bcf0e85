//! Where a volume is: on one node, and where requests want it to be.
//!
//! CSI specification, `TopologyRequirement`: one of `requisite` must hold, `preferred` is a wish. A volume of this driver
//! is reachable from its own node only, so the answer to a requirement is yes or RESOURCE_EXHAUSTED with the reason.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::NodeId;
use super::status::Failure;
use crate::backend::BackendKind;
use crate::proto::csi::v1 as csi;

/// The prefix of the topology's keys.
const PREFIX: &str = "topology.baggageclaim.csi.concourse-ci.org";

/// One node, by the labels that it carries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Topology(BTreeMap<String, String>);

impl Topology {
    pub(super) fn of(node: &NodeId, backend: BackendKind) -> Self {
        Self(BTreeMap::from([
            (format!("{PREFIX}/node"), node.topology_value()),
            (format!("{PREFIX}/backend"), backend.to_string()),
        ]))
    }

    /// As a message.
    pub(super) fn message(&self) -> csi::Topology {
        csi::Topology {
            segments: self.0.clone(),
        }
    }

    /// Whether the node is one of those that carry these labels. Keys are the same in whatever case.
    pub(super) fn is_in(&self, wanted: &csi::Topology) -> bool {
        wanted.segments.iter().all(|(key, value)| {
            let mut ours = self.0.iter();
            ours.any(|(our_key, ours)| our_key.eq_ignore_ascii_case(key) && ours == value)
        })
    }

    /// Whether something new may be made here. Where nothing is requisite, a preference for another place is no reason to
    /// refuse (specification: "the SP MAY choose from the list of all possible topologies").
    pub(super) fn satisfies(
        &self,
        requirement: Option<&csi::TopologyRequirement>,
    ) -> Result<(), Failure> {
        let Some(requirement) = requirement else {
            return Ok(());
        };
        let requisite = &requirement.requisite;
        if requisite.is_empty() || requisite.iter().any(|wanted| self.is_in(wanted)) {
            return Ok(());
        }
        let wanted: Vec<String> = requisite
            .iter()
            .take(3)
            .map(|wanted| words(&wanted.segments))
            .collect();
        let more = requisite.len() - wanted.len();
        let more = if more > 0 {
            format!(" or {more} more")
        } else {
            String::new()
        };
        Err(Failure::Elsewhere(format!(
            "accessibility_requirements ask for {}{more}, and what is made here can be reached from {} only",
            wanted.join(" or "),
            words(&self.0)
        )))
    }
}

/// Segments for a message: a hostile one must not fill the log.
fn words(segments: &BTreeMap<String, String>) -> String {
    let mut text = String::from("{");
    for (index, (key, value)) in segments.iter().take(4).enumerate() {
        let comma = if index > 0 { ", " } else { "" };
        let cut = |text: &str| text.chars().take(128).collect::<String>();
        let _ = write!(text, "{comma}{}: {}", cut(key), cut(value));
    }
    text.push('}');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here() -> Topology {
        let node = NodeId::new("node-1").expect("an id");
        Topology::of(&node, BackendKind::Overlay)
    }

    fn topology(segments: &[(&str, &str)]) -> csi::Topology {
        csi::Topology {
            segments: segments
                .iter()
                .map(|(key, value)| (format!("{PREFIX}/{key}"), (*value).to_owned()))
                .collect(),
        }
    }

    #[test]
    fn it_tells_the_node_and_its_backend() {
        let seen: Vec<(String, String)> = here().message().segments.into_iter().collect();
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(
            seen,
            [
                pair(
                    "topology.baggageclaim.csi.concourse-ci.org/backend",
                    "overlay"
                ),
                pair("topology.baggageclaim.csi.concourse-ci.org/node", "node-1"),
            ]
        );
    }

    #[test]
    fn one_requisite_place_is_enough_and_a_preferred_one_is_a_wish() {
        let elsewhere = topology(&[("node", "node-2")]);
        let cases = [
            (vec![], vec![], true),
            (vec![], vec![elsewhere.clone()], true),
            (vec![here().message()], vec![], true),
            (
                vec![elsewhere.clone(), topology(&[("node", "node-1")])],
                vec![elsewhere.clone()],
                true,
            ),
            (vec![topology(&[("NODE", "node-1")])], vec![], true),
            (vec![topology(&[])], vec![], true),
            (vec![elsewhere.clone()], vec![], false),
            (vec![topology(&[("node", "NODE-1")])], vec![], false),
            (
                vec![topology(&[("node", "node-1"), ("backend", "btrfs")])],
                vec![],
                false,
            ),
            (vec![topology(&[("zone", "z1")])], vec![], false),
        ];
        for (requisite, preferred, expected) in cases {
            let requirement = csi::TopologyRequirement {
                requisite,
                preferred,
            };
            let satisfied = here().satisfies(Some(&requirement)).is_ok();
            assert_eq!(satisfied, expected, "{requirement:?}");
        }
        assert!(here().satisfies(None).is_ok());
    }

    #[test]
    fn what_cannot_be_is_exhausted_with_a_reason() {
        let requirement = csi::TopologyRequirement {
            requisite: vec![topology(&[("node", "node-2")]); 5],
            preferred: Vec::new(),
        };
        let failure = here().satisfies(Some(&requirement)).expect_err("elsewhere");
        let status = tonic::Status::from(failure);
        assert_eq!(status.code(), tonic::Code::ResourceExhausted);
        let message = status.message();
        assert!(message.contains("org/node: node-2} or 2 more"), "{message}");
        assert!(message.contains("org/node: node-1} only"), "{message}");
    }
}
