//! `Pool`: what one node offers.
//! It has no order of the controller: the node writes all of it.

#![expect(
    unreachable_pub,
    reason = "kube's derive makes a public item in a module of its own"
)]

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::volume::{Mutable, Parameters, Source};

/// The pool of a node. The driver on the node makes it and keeps it up to date. Its name is the
/// name of the node.
#[derive(
    Debug, Clone, Default, PartialEq, Eq, CustomResource, KubeSchema, Serialize, Deserialize,
)]
#[kube(
    group = "baggageclaim.concourse-ci.org",
    version = "v1alpha1",
    kind = "Pool",
    plural = "pools",
    category = "baggageclaim",
    status = "PoolStatus",
    derive = "PartialEq",
    doc = "The pool of a node, as the driver on the node reports it. Its name is the node's.",
    printcolumn = r#"{"name":"Backend","type":"string","jsonPath":".status.topology.topology\\.baggageclaim\\.csi\\.concourse-ci\\.org/backend","description":"How copy-on-write is done"}"#,
    printcolumn = r#"{"name":"State","type":"string","jsonPath":".status.state","description":"What the driver last said of the pool"}"#,
    printcolumn = r#"{"name":"Bytes","type":"integer","jsonPath":".status.bytes","description":"The size of the pool"}"#,
    printcolumn = r#"{"name":"Available","type":"integer","jsonPath":".status.available","description":"What can be written, in steps of a sixteenth of the pool"}"#,
    printcolumn = r#"{"name":"Volumes","type":"integer","jsonPath":".status.volumes","description":"Persistent volumes in the pool"}"#,
    printcolumn = r#"{"name":"Orphans","type":"integer","jsonPath":".status.orphans.count","description":"Volumes and snapshots without an object"}"#,
    printcolumn = r#"{"name":"Catalog","type":"boolean","jsonPath":".status.peer.catalog","description":"Whether the controller hears what the node has; empty: it is no peer"}"#,
    printcolumn = r#"{"name":"Peers-Away","type":"string","jsonPath":".status.peer.away","description":"Other nodes that did not answer it lately"}"#,
    printcolumn = r#"{"name":"Peer","type":"string","jsonPath":".status.peer.address","description":"Where other nodes get content from it","priority":1}"#,
    printcolumn = r#"{"name":"Pool","type":"string","jsonPath":".status.pool","description":"The id of the pool","priority":1}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"Reason","type":"string","jsonPath":".status.reason","description":"Why it is not Ready"}"#
)]
pub struct PoolSpec {}

/// What a node has.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolStatus {
    /// The id of the pool, from its pool.json
    pub pool: String,
    /// The state of the pool; absent: an older driver wrote this
    #[serde(default)]
    pub state: Option<PoolState>,
    /// Why the state is not Ready, and what to do
    // Without one it is written as null: else a merge would keep the last one.
    #[serde(default)]
    pub reason: Option<String>,
    /// The labels of the node for the driver
    #[serde(default)]
    pub topology: BTreeMap<String, String>,
    /// The size of the pool
    #[serde(default)]
    pub bytes: i64,
    /// What can be written, in steps of a sixteenth of the pool
    #[serde(default)]
    pub available: i64,
    /// How many persistent volumes the pool has
    #[serde(default)]
    pub volumes: i64,
    /// Persistent volumes and snapshots in the pool that no object names
    #[serde(default)]
    pub orphans: Orphans,
    /// How other nodes reach this one for content, if it is a peer
    // Without one it is written as null: else a merge would keep the last one.
    #[serde(default)]
    pub peer: Option<PoolPeer>,
}

/// The state of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub enum PoolState {
    /// It takes volumes.
    Ready,
    /// Empty volumes are refused, or files cannot be made. What exists works.
    Full,
    /// It takes no changes, or does not answer.
    NotReady,
}

/// How other nodes reach a node for content.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct PoolPeer {
    /// IP:PORT
    pub address: String,
    /// The SHA-256 of its public key, as sha256:DIGITS
    pub key: String,
    /// Whether the controller hears what the node has
    #[serde(default)]
    pub catalog: bool,
    /// Other nodes that did not answer this one, in the last 10 minutes; at most 20
    #[serde(default)]
    pub away: Vec<String>,
}

/// How many orphans of a kind a node names at a time. Each report names the next ones, so that
/// orphans that nothing needs do not hide others.
pub const MOST_NAMED: usize = 100;

/// Data that no object names. The driver keeps it. The controller makes the object again for what a
/// PersistentVolume or a snapshot content names.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Orphans {
    /// How many there are; a group of snapshots counts as one
    pub count: i64,
    /// Volumes, at most 100 at a time
    #[serde(default)]
    pub volumes: Vec<OrphanVolume>,
    /// Snapshots and groups of snapshots, at most 100 at a time
    #[serde(default)]
    pub snapshots: Vec<OrphanSnapshot>,
}

/// A volume that no object names, as the node has it.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OrphanVolume {
    /// Its id
    pub id: String,
    /// The name in CreateVolume
    pub name: String,
    /// What the StorageClass said
    #[serde(default)]
    pub parameters: Parameters,
    /// What the VolumeAttributesClass said when the volume was made
    #[serde(default)]
    pub made_with: Mutable,
    /// What it is a clone of
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Source>,
    /// Its capacity in bytes; 0: no limit
    #[serde(default)]
    pub capacity: i64,
    /// The parameters that apply now
    #[serde(default)]
    pub mutable: Mutable,
}

/// A snapshot or a group of snapshots that no object names, as the node has it.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct OrphanSnapshot {
    /// Its id
    pub id: String,
    /// The name in CreateSnapshot or CreateVolumeGroupSnapshot
    pub name: String,
    /// The ids of the volumes
    pub sources: Vec<String>,
    /// The ids of the snapshots: its own, or those of the group
    pub members: Vec<String>,
    /// Whether it is a group
    #[serde(default)]
    pub group: bool,
}
