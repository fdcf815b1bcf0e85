//! `Cache`: a handle by which a user clears caches of a namespace on all nodes. Its deletion is the
//! order.

#![expect(
    unreachable_pub,
    reason = "kube's derive makes a public item in a module of its own"
)]

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use super::fence::{NameKind, coverage};
use crate::model::Coverage;

/// Caches of a namespace. Deleting this object clears them on all nodes.
#[derive(Debug, Clone, PartialEq, Eq, CustomResource, KubeSchema, Serialize, Deserialize)]
#[kube(
    group = "baggageclaim.concourse-ci.org",
    version = "v1alpha1",
    kind = "Cache",
    plural = "caches",
    category = "baggageclaim",
    namespaced,
    derive = "PartialEq",
    doc = "Caches of a namespace. Deleting this object clears them on all nodes.",
    printcolumn = r#"{"name":"Kind","type":"string","jsonPath":".spec.kind"}"#,
    printcolumn = r#"{"name":"Key","type":"string","jsonPath":".spec.key","description":"The one cache"}"#,
    printcolumn = r#"{"name":"Prefix","type":"string","jsonPath":".spec.prefix","description":"The beginning of the keys"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = ("self == oldSelf", "a Cache is immutable"),
    validation = ("has(self.key) != has(self.prefix)", "a Cache has a key or a prefix"),
    validation = ("self.kind != 'Artifact'", "an output is no cache"),
)]
pub struct CacheSpec {
    /// `TaskCache` or `ResourceCache`
    #[serde(default)]
    pub kind: NameKind,
    /// The key of one cache
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub key: Option<String>,
    /// The beginning of the keys of many
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub prefix: Option<String>,
}

impl Cache {
    /// The names that it stands for. The error says what is wrong with the object.
    pub fn covers(&self) -> Result<Coverage, String> {
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        let (key, prefix) = (self.spec.key.as_deref(), self.spec.prefix.as_deref());
        coverage(namespace, Some(self.spec.kind), key, prefix)
    }
}
