//! `Rollback`: an order of a user to put earlier content of a name back, on all nodes. The right to
//! create it is one of its own. The controller carries it out once, and says so in its status.

#![expect(
    unreachable_pub,
    reason = "kube's derive makes a public item in a module of its own"
)]

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::fence::{NameKind, coverage};
use crate::model::{Coverage, Name};

/// An order to put earlier content of a name back.
#[derive(Debug, Clone, PartialEq, Eq, CustomResource, KubeSchema, Serialize, Deserialize)]
#[kube(
    group = "baggageclaim.concourse-ci.org",
    version = "v1alpha1",
    kind = "Rollback",
    plural = "rollbacks",
    category = "baggageclaim",
    namespaced,
    status = "RollbackStatus",
    derive = "PartialEq",
    doc = "An order to put earlier content of a task cache or an output back. The controller carries it out once, and deletes it after 7 days.",
    printcolumn = r#"{"name":"Key","type":"string","jsonPath":".spec.key","description":"The key of the task cache, or the name of the output"}"#,
    printcolumn = r#"{"name":"To","type":"string","jsonPath":".spec.to","description":"The generation"}"#,
    printcolumn = r#"{"name":"By","type":"string","jsonPath":".spec.by","description":"The user"}"#,
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#,
    printcolumn = r#"{"name":"Node","type":"string","jsonPath":".status.node","description":"The node that carries it out"}"#,
    printcolumn = r#"{"name":"Message","type":"string","jsonPath":".status.message","priority":1}"#,
    printcolumn = r#"{"name":"Kind","type":"string","jsonPath":".spec.kind","priority":1}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = ("self == oldSelf", "a Rollback is immutable"),
    validation = ("self.kind != 'ResourceCache'", "a resource cache keeps its first content"),
)]
pub struct RollbackSpec {
    /// `TaskCache` or `Artifact`
    #[serde(default)]
    pub kind: NameKind,
    /// The key of the task cache, or the name of the output
    #[schemars(length(min = 1, max = 256))]
    pub key: String,
    /// The id of the generation, or its first digits
    #[schemars(length(min = 4, max = 32), regex(pattern = r"^[0-9a-f]+$"))]
    pub to: String,
    /// The name of the user who creates this object, as the API server knows it
    #[schemars(length(min = 1, max = 1024))]
    pub by: String,
}

/// How far the order is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RollbackPhase {
    /// No node that has the generation has been found yet.
    #[default]
    Waiting,
    /// A node is told to carry it out.
    Ordered,
    /// The name has the content of the generation.
    Done,
    /// Nothing was changed, as far as the controller knows. It does not try again.
    Failed,
}

/// What the controller has done. With the phase `Ordered`, `node`, `generation` and `stamp` stay: a
/// repeated order has the same effect as the first one. Only `node` changes, if it has lost the
/// generation.
// A merge keeps what is not written. So what is not known is written as null.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RollbackStatus {
    /// How far it is
    pub phase: RollbackPhase,
    /// The node that carries it out
    pub node: Option<String>,
    /// The whole id of the generation
    pub generation: Option<String>,
    /// When the new commit counts as made: milliseconds since 1970, in the cluster's time
    pub stamp: Option<i64>,
    /// The id of the new artifact
    pub artifact: Option<String>,
    /// What happened, and what to do
    pub message: Option<String>,
}

impl Rollback {
    /// The name that it is about. The error says what is wrong with the object.
    pub fn name(&self) -> Result<Name, String> {
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        let (kind, key) = (self.spec.kind, self.spec.key.as_str());
        match coverage(namespace, Some(kind), Some(key), None)? {
            Coverage::Name(name) if !name.reference.first_writer_wins() => Ok(name),
            _ => Err("a resource cache keeps its first content".to_owned()),
        }
    }

    /// How far it is.
    #[must_use]
    pub fn phase(&self) -> RollbackPhase {
        let status = self.status.as_ref();
        status.map(|status| status.phase).unwrap_or_default()
    }

    /// Whether nothing more happens.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        matches!(self.phase(), RollbackPhase::Done | RollbackPhase::Failed)
    }
}
