//! `Snapshot`: a snapshot, or a group of snapshots of one moment, on one node.
//! The order of the controller, and the answer of the node.

#![expect(
    unreachable_pub,
    reason = "kube's derive makes a public item in a module of its own"
)]

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::phase::{Phase, Refusal, Wanted, is_node_gone};

/// A snapshot or a group of snapshots on one node. The controller of the driver makes it for
/// CreateSnapshot and CreateVolumeGroupSnapshot. Deleting this object deletes no data.
#[derive(Debug, Clone, PartialEq, Eq, CustomResource, KubeSchema, Serialize, Deserialize)]
#[kube(
    group = "baggageclaim.concourse-ci.org",
    version = "v1alpha1",
    kind = "Snapshot",
    plural = "snapshots",
    category = "baggageclaim",
    status = "SnapshotStatus",
    derive = "PartialEq",
    doc = "A snapshot or a group of snapshots on one node. Deleting this object deletes no data.",
    selectable = ".spec.nodeName",
    printcolumn = r#"{"name":"Request","type":"string","jsonPath":".spec.name","description":"The name in CreateSnapshot"}"#,
    printcolumn = r#"{"name":"Node","type":"string","jsonPath":".spec.nodeName","description":"The node with the data"}"#,
    printcolumn = r#"{"name":"Wanted","type":"string","jsonPath":".spec.wanted","description":"The order of the controller"}"#,
    printcolumn = r#"{"name":"State","type":"string","jsonPath":".status.phase","description":"The answer of the node; Lost: the data is not in its pool, or the node was deleted"}"#,
    printcolumn = r#"{"name":"Bytes","type":"integer","jsonPath":".status.members[0].size","description":"The least size of a volume that is restored from it, or from the first member of a group"}"#,
    printcolumn = r#"{"name":"Source","type":"string","jsonPath":".spec.sources[*]","description":"The volumes"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"Reason","type":"string","jsonPath":".status.error.message","description":"Why the node could not do it, or why the data is Lost"}"#
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = ("self.name == oldSelf.name && self.nodeName == oldSelf.nodeName", "name and nodeName are immutable"),
    validation = ("self.sources == oldSelf.sources && self.group == oldSelf.group", "sources and group are immutable"),
    validation = ("oldSelf.wanted != 'Absent' || self.wanted == 'Absent'", "Absent is final"),
)]
pub struct SnapshotSpec {
    /// The name in CreateSnapshot or CreateVolumeGroupSnapshot
    #[schemars(length(min = 1, max = 128))]
    pub name: String,
    /// The node with the data
    #[schemars(length(min = 1, max = 253))]
    pub node_name: String,
    /// The names of the Volumes
    #[schemars(length(min = 1, max = 1000), inner(length(min = 1, max = 128)))]
    pub sources: Vec<String>,
    /// Whether it is a group
    #[serde(default)]
    pub group: bool,
    /// The order of the controller
    pub wanted: Wanted,
}

/// What the node has done with a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotStatus {
    /// The generation of `spec` that this answers
    pub observed_generation: i64,
    /// The state
    pub phase: Phase,
    /// The id of the pool that has or had the data, from its pool.json; empty: none is known
    pub pool: String,
    /// When it was taken
    #[serde(default)]
    pub created: Option<String>,
    /// The snapshots: one, or those of the group
    #[serde(default)]
    pub members: Vec<Member>,
    /// Why the node could not do what `spec` of that generation says, or why the data is Lost
    #[serde(default)]
    pub error: Option<Refusal>,
}

/// A snapshot of one volume.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Member {
    /// The id of the snapshot
    pub id: String,
    /// The name of the Volume
    pub source: String,
    /// The least bytes of a volume that is restored from it
    pub size: i64,
}

impl Snapshot {
    /// The node's answer to the present `spec`; `None`: it has not answered yet.
    #[must_use]
    pub fn answer(&self) -> Option<&SnapshotStatus> {
        let status = self.status.as_ref()?;
        let is_current = Some(status.observed_generation) == self.metadata.generation;
        is_current.then_some(status)
    }

    /// The last state that the node reported, or Lost if it was given up.
    #[must_use]
    pub fn phase(&self) -> Option<Phase> {
        self.status.as_ref().map(|status| status.phase)
    }

    /// Whether it is Lost with its node, which was given up and has not answered since.
    #[must_use]
    pub fn is_node_gone(&self) -> bool {
        let status = self.status.as_ref();
        is_node_gone(status.map(|status| (status.phase, status.error.as_ref())))
    }
}
