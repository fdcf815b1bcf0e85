//! `Volume`: one persistent volume on one node.
//! The order of the controller, and the answer of the node.

#![expect(
    unreachable_pub,
    reason = "kube's derive makes a public item in a module of its own"
)]

use kube::{CustomResource, KubeSchema, ResourceExt as _};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};

use super::phase::{Phase, Refusal, Wanted, is_node_gone};

/// The annotation of a `Volume` that a PersistentVolume has named at some time.
pub const BOUND: &str = "baggageclaim.concourse-ci.org/bound";

/// A persistent volume on one node. The controller of the driver makes it for CreateVolume; the
/// driver on the node makes and deletes the data. Deleting this object deletes no data.
#[derive(Debug, Clone, PartialEq, Eq, CustomResource, KubeSchema, Serialize, Deserialize)]
#[kube(
    group = "baggageclaim.concourse-ci.org",
    version = "v1alpha1",
    kind = "Volume",
    plural = "volumes",
    category = "baggageclaim",
    status = "VolumeStatus",
    derive = "PartialEq",
    doc = "A persistent volume on one node. Deleting this object deletes no data.",
    selectable = ".spec.nodeName",
    selectable = ".spec.name",
    printcolumn = r#"{"name":"PV","type":"string","jsonPath":".spec.name","description":"The PersistentVolume"}"#,
    printcolumn = r#"{"name":"Node","type":"string","jsonPath":".spec.nodeName","description":"The node with the data"}"#,
    printcolumn = r#"{"name":"Wanted","type":"string","jsonPath":".spec.wanted","description":"The order of the controller"}"#,
    printcolumn = r#"{"name":"State","type":"string","jsonPath":".status.phase","description":"The answer of the node; Lost: the data is not in its pool, or the node was deleted"}"#,
    printcolumn = r#"{"name":"Bytes","type":"integer","jsonPath":".status.capacity","description":"The capacity; 0: no limit"}"#,
    printcolumn = r#"{"name":"Source","type":"string","jsonPath":".spec.source.name","description":"The volume or snapshot that it is a clone of","priority":1}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"Reason","type":"string","jsonPath":".status.error.message","description":"Why the node could not do it, or why the data is Lost"}"#
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = ("self.name == oldSelf.name && self.nodeName == oldSelf.nodeName", "name and nodeName are immutable"),
    validation = ("self.parameters == oldSelf.parameters && self.madeWith == oldSelf.madeWith && self.limit == oldSelf.limit", "parameters, madeWith and limit are immutable"),
    validation = ("has(self.source) == has(oldSelf.source) && (!has(self.source) || self.source == oldSelf.source)", "source is immutable"),
    validation = ("has(self.fetch) == has(oldSelf.fetch) && (!has(self.fetch) || self.fetch == oldSelf.fetch)", "fetch is immutable"),
    validation = ("oldSelf.wanted != 'Absent' || self.wanted == 'Absent'", "Absent is final"),
)]
pub struct VolumeSpec {
    /// The name in CreateVolume, which is the name of the PersistentVolume
    #[schemars(length(min = 1, max = 128))]
    pub name: String,
    /// The node with the data
    #[schemars(length(min = 1, max = 253))]
    pub node_name: String,
    /// What the StorageClass says
    #[serde(default)]
    pub parameters: Parameters,
    /// What the VolumeAttributesClass said when the volume was made
    #[serde(default)]
    pub made_with: Mutable,
    /// What it is a clone of; absent: it begins empty
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Source>,
    /// Where the content of a clone is fetched from; absent: its source is on this node
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetch: Option<Fetch>,
    /// The order of the controller
    pub wanted: Wanted,
    /// At least that many bytes; 0: no limit
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub capacity: i64,
    /// At most that many bytes when it is made; 0: no limit
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub limit: i64,
    /// What the VolumeAttributesClass says now
    #[serde(default)]
    pub mutable: Mutable,
}

impl VolumeSpec {
    /// An empty volume without parameters and limits.
    #[must_use]
    pub fn empty(name: impl Into<String>, node_name: impl Into<String>, wanted: Wanted) -> Self {
        Self {
            name: name.into(),
            node_name: node_name.into(),
            parameters: Parameters::default(),
            made_with: Mutable::default(),
            source: None,
            fetch: None,
            wanted,
            capacity: 0,
            limit: 0,
            mutable: Mutable::default(),
        }
    }
}

/// The parameters of a StorageClass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Parameters {
    /// The owner of the root directory
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub uid: Option<i64>,
    /// The group of the root directory
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub gid: Option<i64>,
    /// The permission bits of the root directory, as a decimal number
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub mode: Option<i64>,
    /// Whether the volume is copied for a clone while pods write to it
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub live_clone: bool,
    /// Whether a clone may be made on another node than its source's
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub clone_elsewhere: bool,
}

/// The parameters of a VolumeAttributesClass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Mutable {
    /// The most bytes of its own content
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub size_limit: Option<i64>,
    /// How many seconds after its last use garbage collection may delete it; absent: never
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub ttl_seconds: Option<i64>,
}

/// Writes a parameter that is absent as null.
fn with_nulls<S: Serializer>(mutable: &Mutable, to: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct WithNulls {
        size_limit: Option<i64>,
        ttl_seconds: Option<i64>,
    }
    let Mutable {
        size_limit,
        ttl_seconds,
    } = *mutable;
    let all = WithNulls {
        size_limit,
        ttl_seconds,
    };
    all.serialize(to)
}

/// What a volume is a clone of.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Source {
    /// The kind of the object
    pub kind: SourceKind,
    /// The name of the object
    #[schemars(length(min = 1, max = 128))]
    pub name: String,
}

/// The snapshot that a clone on another node is made of.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Fetch {
    /// The node with the snapshot
    #[schemars(length(min = 1, max = 253))]
    pub node_name: String,
    /// The snapshot, or the member of a group
    #[schemars(length(min = 1, max = 128))]
    pub snapshot: String,
}

/// The kind of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub enum SourceKind {
    /// A snapshot, or a member of a group.
    Snapshot,
    /// Another volume.
    Volume,
}

/// What the node has done with a volume.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeStatus {
    /// The generation of `spec` that this answers
    pub observed_generation: i64,
    /// The state
    pub phase: Phase,
    /// The id of the pool that has or had the data, from its pool.json; empty: none is known
    pub pool: String,
    /// The capacity in bytes; 0: no limit
    #[serde(default)]
    pub capacity: i64,
    /// The parameters that apply now
    // Without one it is written as null: else a merge would keep the last one. The default in the
    // definition has no nulls.
    #[serde(default, serialize_with = "with_nulls")]
    #[schemars(extend("default" = {}))]
    pub mutable: Mutable,
    /// Why the node could not do what `spec` of that generation says, or why the data is Lost
    #[serde(default)]
    pub error: Option<Refusal>,
}

impl Volume {
    /// The node's answer to the present `spec`; `None`: it has not answered yet.
    #[must_use]
    pub fn answer(&self) -> Option<&VolumeStatus> {
        let status = self.status.as_ref()?;
        let is_current = Some(status.observed_generation) == self.metadata.generation;
        let is_final = status.phase != Phase::Fetching;
        (is_current && is_final).then_some(status)
    }

    /// The last state that the node reported, or Lost if it was given up.
    #[must_use]
    pub fn phase(&self) -> Option<Phase> {
        self.status.as_ref().map(|status| status.phase)
    }

    /// Whether it was Ready at some time, so that it is never made again. An object that comes from
    /// a backup has no status, but keeps its annotations.
    #[must_use]
    pub fn was_ready(&self) -> bool {
        matches!(self.phase(), Some(Phase::Ready | Phase::Lost))
            || self.spec.wanted == Wanted::Kept
            || self.annotations().contains_key(BOUND)
    }

    /// Whether it is Lost with its node, which was given up and has not answered since.
    #[must_use]
    pub fn is_node_gone(&self) -> bool {
        let status = self.status.as_ref();
        is_node_gone(status.map(|status| (status.phase, status.error.as_ref())))
    }
}
