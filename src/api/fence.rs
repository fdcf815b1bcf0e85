//! `Fence`: an order to clear names on all nodes. Only the controller makes it, by create alone.
//! Its name holds its predecessor, so a fence has one successor.

#![expect(
    unreachable_pub,
    reason = "kube's derive makes a public item in a module of its own"
)]

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::{self, Coverage, Name, Reference};

/// The kind of a name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub enum NameKind {
    /// An output.
    Artifact,
    /// A resource cache.
    ResourceCache,
    /// A task cache.
    #[default]
    TaskCache,
}

impl From<model::NameKind> for NameKind {
    fn from(kind: model::NameKind) -> Self {
        match kind {
            model::NameKind::Artifact => Self::Artifact,
            model::NameKind::ResourceCache => Self::ResourceCache,
            model::NameKind::TaskCache => Self::TaskCache,
        }
    }
}

impl From<NameKind> for model::NameKind {
    fn from(kind: NameKind) -> Self {
        match kind {
            NameKind::Artifact => Self::Artifact,
            NameKind::ResourceCache => Self::ResourceCache,
            NameKind::TaskCache => Self::TaskCache,
        }
    }
}

/// An order to clear names on all nodes.
#[derive(Debug, Clone, PartialEq, Eq, CustomResource, KubeSchema, Serialize, Deserialize)]
#[kube(
    group = "baggageclaim.concourse-ci.org",
    version = "v1alpha1",
    kind = "Fence",
    plural = "fences",
    category = "baggageclaim",
    derive = "PartialEq",
    doc = "An order to clear names on all nodes. The controller makes it, and deletes it after 7 days once all nodes have applied it.",
    printcolumn = r#"{"name":"Namespace","type":"string","jsonPath":".spec.namespace","description":"The namespace of the names"}"#,
    printcolumn = r#"{"name":"Kind","type":"string","jsonPath":".spec.kind","description":"The kind of the names; empty: all of the namespace"}"#,
    printcolumn = r#"{"name":"Key","type":"string","jsonPath":".spec.key","description":"The one name"}"#,
    printcolumn = r#"{"name":"Prefix","type":"string","jsonPath":".spec.prefix","description":"The beginning of the keys"}"#,
    printcolumn = r#"{"name":"Number","type":"integer","jsonPath":".spec.number","priority":1}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = ("self == oldSelf", "a Fence is immutable"))]
pub struct FenceSpec {
    /// Its number. Later fences have higher numbers
    #[schemars(range(min = 1))]
    pub number: i64,
    /// The number of its predecessor; 0: it is the first one
    #[schemars(range(min = 0))]
    pub previous: i64,
    /// A random number, in hexadecimal digits
    #[schemars(length(min = 16, max = 16))]
    pub id: String,
    /// The namespace of the names
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// The kind of the names; without one: all names of the namespace
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<NameKind>,
    /// The one key, or the name of the output
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub key: Option<String>,
    /// The beginning of the keys of caches
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub prefix: Option<String>,
    /// The ids of earlier fences that this one stands for, after an older etcd was put back
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1000), inner(length(min = 16, max = 16)))]
    pub repeats: Vec<String>,
}

/// The beginning of the names of fences that are in the chain.
pub const OF_CHAIN: &str = "after-";

fn id(id: u64) -> String {
    format!("{id:016x}")
}

fn number(id: &str) -> Result<u64, String> {
    u64::from_str_radix(id, 16).map_err(|_| format!("{id:?} is no id"))
}

impl From<&model::Fence> for Fence {
    fn from(fence: &model::Fence) -> Self {
        let (kind, key, prefix) = match &fence.covers {
            Coverage::Namespace(_) => (None, None, None),
            Coverage::Name(name) => {
                let (kind, key) = (name.reference.kind(), name.reference.key());
                (Some(kind), Some(key.to_owned()), None)
            }
            Coverage::Prefix { kind, prefix, .. } => {
                (Some((*kind).into()), None, Some(prefix.to_string()))
            }
        };
        let spec = FenceSpec {
            number: super::convert::number(fence.number),
            previous: super::convert::number(fence.previous),
            id: id(fence.id),
            namespace: fence.covers.tenant().to_string(),
            kind: kind.map(NameKind::from),
            key,
            prefix,
            repeats: fence.repeats.iter().copied().map(id).collect(),
        };
        Self::new(&fence.object_name(), spec)
    }
}

/// The names of a namespace that a kind and a key, or a prefix, cover.
pub(super) fn coverage(
    namespace: &str,
    kind: Option<NameKind>,
    key: Option<&str>,
    prefix: Option<&str>,
) -> Result<Coverage, String> {
    let tenant = namespace.parse();
    let tenant: model::Tenant = tenant.map_err(|error| format!("namespace {error}"))?;
    let kind = kind.map(model::NameKind::from);
    let cache = kind.and_then(model::NameKind::cache);
    match (kind, cache, key, prefix) {
        (None, _, None, None) => Ok(Coverage::Namespace(tenant)),
        (Some(kind), _, Some(key), None) => {
            let reference = Reference::new(kind, key);
            let reference = reference.map_err(|error| format!("key {error}"))?;
            Ok(Coverage::Name(Name { tenant, reference }))
        }
        (_, Some(kind), None, Some(prefix)) => Ok(Coverage::Prefix {
            tenant,
            kind,
            prefix: prefix.into(),
        }),
        _ => Err("a key, or a prefix of caches, belongs to a kind".to_owned()),
    }
}

impl Fence {
    /// The fence. The error says what is wrong with the object.
    pub fn fence(&self) -> Result<model::Fence, String> {
        let spec = &self.spec;
        let (key, prefix) = (spec.key.as_deref(), spec.prefix.as_deref());
        let repeats = spec.repeats.iter().map(|id| number(id));
        let fence = model::Fence {
            number: super::convert::bytes(spec.number),
            previous: super::convert::bytes(spec.previous),
            id: number(&spec.id)?,
            covers: coverage(&spec.namespace, spec.kind, key, prefix)?,
            repeats: repeats.collect::<Result<_, _>>()?,
        };
        if self.metadata.name.as_deref() != Some(&fence.object_name()) {
            return Err("its name is not that of its predecessor".to_owned());
        }
        if fence.number <= fence.previous {
            return Err("its number does not follow its predecessor".to_owned());
        }
        Ok(fence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fence_is_read_as_it_was_made_and_others_are_refused() {
        let tenant: model::Tenant = "ci".parse().expect("a label");
        let name = |reference: &str| Name {
            tenant: tenant.clone(),
            reference: reference.parse().expect("a reference"),
        };
        let made = |covers| model::Fence {
            number: 9,
            previous: 5,
            id: u64::MAX - 1,
            covers,
            repeats: vec![1, u64::MAX],
        };
        for covers in [
            Coverage::Namespace(tenant.clone()),
            Coverage::Name(name("artifact/a")),
            Coverage::Name(name("resource-cache/a/b")),
            Coverage::Name(name("task-cache/a")),
            Coverage::Prefix {
                tenant: tenant.clone(),
                kind: model::CacheKind::Task,
                prefix: "".into(),
            },
        ] {
            let fence = made(covers);
            let object = Fence::from(&fence);
            assert_eq!(object.metadata.name, Some(fence.object_name()));
            let text = serde_json::to_string(&object).expect("JSON");
            let object: Fence = serde_json::from_str(&text).expect("the same");
            assert_eq!(object.fence(), Ok(fence));
        }
        let good = Fence::from(&made(Coverage::Name(name("artifact/a"))));
        let wrong = |change: fn(&mut FenceSpec)| {
            let mut object = good.clone();
            change(&mut object.spec);
            object.fence().expect_err("it is refused");
        };
        wrong(|spec| spec.kind = None);
        wrong(|spec| spec.prefix = Some("x".to_owned()));
        wrong(|spec| spec.id = "x".to_owned());
        wrong(|spec| spec.previous = 4);
        wrong(|spec| spec.number = 5);
        wrong(|spec| spec.namespace = "A".to_owned());
    }
}
