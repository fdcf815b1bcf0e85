//! `Cache`: a handle by which a user clears caches of a namespace on all nodes. Its deletion is the
//! order. The controller makes some, too: a mirror of the newest task caches, for people to see.

#![expect(
    unreachable_pub,
    reason = "kube's derive makes a public item in a module of its own"
)]

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::fence::{NameKind, coverage};
use crate::model::{CacheKey, Coverage};

/// The finalizer of a `Cache`. With it, a deletion is the order to clear.
pub const CLEAR: &str = "baggageclaim.concourse-ci.org/clear";

/// The label of a `Cache` that the controller has made, and deletes when it no longer shows it.
pub const MIRRORED: &str = "baggageclaim.concourse-ci.org/mirrored";

/// Caches of a namespace. Deleting this object clears them on all nodes.
#[derive(Debug, Clone, PartialEq, Eq, CustomResource, KubeSchema, Serialize, Deserialize)]
#[kube(
    group = "baggageclaim.concourse-ci.org",
    version = "v1alpha1",
    kind = "Cache",
    plural = "caches",
    category = "baggageclaim",
    namespaced,
    status = "CacheStatus",
    derive = "PartialEq",
    doc = "Caches of a namespace. Deleting this object clears them on all nodes.",
    printcolumn = r#"{"name":"Key","type":"string","jsonPath":".spec.key","description":"The one cache"}"#,
    printcolumn = r#"{"name":"Size","type":"string","jsonPath":".status.size","description":"The size of its newest content"}"#,
    printcolumn = r#"{"name":"Nodes","type":"integer","jsonPath":".status.nodes","description":"How many nodes have that content"}"#,
    printcolumn = r#"{"name":"Last Commit","type":"date","jsonPath":".status.newest.at"}"#,
    printcolumn = r#"{"name":"Author","type":"string","jsonPath":".status.newest.author","description":"The service account and the pod of the last commit"}"#,
    printcolumn = r#"{"name":"Last Use","type":"date","jsonPath":".status.lastUse","description":"Up to 10 minutes late"}"#,
    printcolumn = r#"{"name":"Prefix","type":"string","jsonPath":".spec.prefix","description":"The beginning of the keys","priority":1}"#,
    printcolumn = r#"{"name":"Kind","type":"string","jsonPath":".spec.kind","priority":1}"#,
    printcolumn = r#"{"name":"Node","type":"string","jsonPath":".status.newest.node","description":"The node of the last commit","priority":1}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = ("self == oldSelf", "a Cache is immutable"),
    validation = ("has(self.key) != has(self.prefix)", "a Cache has a key or a prefix"),
    validation = ("self.kind != 'Artifact'", "an output is no cache"),
    // The limits of the fields below count characters.
    validation = ("!has(self.key) || size(bytes(self.key)) <= 256", "a key has at most 256 bytes"),
    validation = (
        "!has(self.prefix) || size(bytes(self.prefix)) <= 256",
        "a prefix has at most 256 bytes"
    ),
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

/// What the controller's catalog has of one task cache. It may be late, and is not kept for
/// resource caches and prefixes.
// A merge keeps what is not written. So what is not known is written as null.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CacheStatus {
    /// The size of its newest content in bytes; without one it is not measured yet
    pub bytes: Option<i64>,
    /// The same for people, such as 700 MiB
    pub size: Option<String>,
    /// How many nodes have that content
    pub nodes: i64,
    /// The last commit
    pub newest: Option<CacheCommit>,
    /// When a pod last started from it or committed it, on any node; up to 10 minutes late
    pub last_use: Option<String>,
}

/// A commit of a cache.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct CacheCommit {
    /// When it was
    pub at: String,
    /// The node
    #[serde(default)]
    pub node: Option<String>,
    /// SERVICEACCOUNT/POD; the account is `-` if only the pod is known
    #[serde(default)]
    pub author: Option<String>,
}

impl Cache {
    /// Whether its deletion is an order to clear.
    #[must_use]
    pub fn orders(&self) -> bool {
        let finalizers = self.metadata.finalizers.iter().flatten();
        finalizers.into_iter().any(|it| it == CLEAR)
    }

    /// Whether the controller has made it.
    #[must_use]
    pub fn is_mirrored(&self) -> bool {
        let labels = self.metadata.labels.as_ref();
        labels.is_some_and(|labels| labels.contains_key(MIRRORED))
    }

    /// The key, if it stands for one task cache.
    #[must_use]
    pub fn task_key(&self) -> Option<&str> {
        let key = self.spec.key.as_deref();
        key.filter(|_| self.spec.kind == NameKind::TaskCache)
    }

    /// The names that it stands for. The error says what is wrong with the object.
    pub fn covers(&self) -> Result<Coverage, String> {
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        let (key, prefix) = (self.spec.key.as_deref(), self.spec.prefix.as_deref());
        if let Some(Err(error)) = prefix.map(str::parse::<CacheKey>) {
            return Err(format!("prefix {error}"));
        }
        coverage(namespace, Some(self.spec.kind), key, prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_no_longer_than_a_key_may_be() {
        let covers = |prefix: &str| {
            let spec = CacheSpec {
                kind: NameKind::TaskCache,
                key: None,
                prefix: Some(prefix.to_owned()),
            };
            let mut cache = Cache::new("c", spec);
            cache.metadata.namespace = Some("ci".to_owned());
            cache.covers()
        };
        assert!(covers(&"x".repeat(256)).is_ok());
        // 256 characters, and so the API server's limit of the length lets it pass.
        let why = covers(&"\u{1f600}".repeat(256)).expect_err("it is too long");
        assert_eq!(why, "prefix is 1024 bytes long, at most 256 are allowed");
    }
}
