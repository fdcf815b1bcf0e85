//! The objects by which users, the controller and the nodes talk through the API server.
//! `deploy/crds/` is generated from these types (`make crds`).
//!
//! | objects | for | `spec` by | `status` by |
//! |---|---|---|---|
//! | [`Volume`], [`Snapshot`] | orders to nodes | controller | node |
//! | [`Pool`] | what a node offers | node | node |
//! | [`Fence`] | clears on all nodes | controller | none |
//! | [`Cache`] | a handle to clear caches | users and controller (mirror) | controller |
//! | [`Rollback`] | an order to put earlier content back | users | controller |
//! | [`CachePolicy`] | limits and rights of a namespace | users | controller |
//!
//! When the controller gives a node up, it writes into the status of its objects that they are
//! Lost. That is its only write of an answer.
//!
//! Deletion of an object deletes data only for a [`Cache`]. Otherwise only [`Wanted::Absent`] does.
//!
//! Types and their conversions only; `k8s` decides what happens with them.

pub mod cache;
mod convert;
pub mod fence;
mod phase;
pub mod policy;
pub mod pool;
pub mod rollback;
pub mod snapshot;
pub mod volume;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;

pub use cache::{CLEAR, Cache, CacheCommit, CacheSpec, CacheStatus, MIRRORED};
pub use convert::{bytes, number};
pub use fence::{Fence, FenceSpec, NameKind};
pub use phase::{Phase, Refusal, Wanted};
pub use policy::{
    Budget, CachePolicy, CachePolicySpec, CachePolicyStatus, CommitRule, LabelOperator,
    LabelRequirement, NamespaceSelector, PolicyCondition, PolicyRule, ReadRule, SizeLimit, Ttl,
    Used,
};
pub use pool::{
    MOST_NAMED, OrphanSnapshot, OrphanVolume, Orphans, Pool, PoolPeer, PoolSpec, PoolState,
    PoolStatus,
};
pub use rollback::{Rollback, RollbackPhase, RollbackSpec, RollbackStatus};
pub use snapshot::{Member, Snapshot, SnapshotSpec, SnapshotStatus};
pub use volume::{
    BOUND, Fetch, Mutable, Parameters, Source, SourceKind, Volume, VolumeSpec, VolumeStatus,
};

/// The API group.
pub const GROUP: &str = "baggageclaim.concourse-ci.org";

/// The definitions of all kinds, in the order of their names.
#[must_use]
pub fn definitions() -> Vec<CustomResourceDefinition> {
    vec![
        Cache::crd(),
        CachePolicy::crd(),
        Fence::crd(),
        Pool::crd(),
        Rollback::crd(),
        Snapshot::crd(),
        Volume::crd(),
    ]
}

/// The definitions as one YAML stream.
#[must_use]
pub fn definitions_text() -> String {
    let header = "# Generated from src/api by `make crds`. Do not edit.\n";
    let documents = definitions().into_iter().map(|definition| {
        let text = serde_saphyr::to_string(&definition);
        format!(
            "---\n{}",
            text.expect("types of strings and numbers are YAML")
        )
    });
    std::iter::once(header.to_owned())
        .chain(documents)
        .collect()
}

#[cfg(test)]
mod tests {
    use kube::CustomResourceExt;
    use kube::core::object::HasStatus;
    use serde::Serialize;
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;

    /// The fields of a schema that an object lacks, and those of the objects within it.
    fn lacking(schema: &Value, object: &Value) -> Vec<String> {
        let (Some(fields), Some(object)) = (schema["properties"].as_object(), object.as_object())
        else {
            return Vec::new();
        };
        let within = fields.iter().flat_map(|(name, schema)| {
            let Some(value) = object.get(name) else {
                return vec![name.clone()];
            };
            let within = lacking(schema, value).into_iter();
            within.map(|field| format!("{name}.{field}")).collect()
        });
        within.collect()
    }

    /// A merge patch keeps each field that it does not write.
    fn writes_all_fields<K>(barest: Value)
    where
        K: CustomResourceExt + HasStatus<Status: Serialize + DeserializeOwned>,
    {
        let status: K::Status = serde_json::from_value(barest).expect("a status");
        let written = serde_json::to_value(status).expect("JSON");
        let definition = serde_json::to_value(K::crd()).expect("JSON");
        let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        let schema = &schema["properties"]["status"];
        assert!(schema["properties"].is_object(), "{schema}");
        let lacking = lacking(schema, &written);
        assert!(lacking.is_empty(), "{} lacks {lacking:?}", K::crd_name());
    }

    #[test]
    fn a_status_leaves_nothing_of_the_one_that_it_is_merged_into() {
        let answer = json!({"observedGeneration": 1, "phase": "Ready", "pool": "p"});
        writes_all_fields::<Volume>(answer.clone());
        writes_all_fields::<Snapshot>(answer);
        let peer = json!({"address": "10.0.0.1:1", "key": "sha256:1"});
        writes_all_fields::<Pool>(json!({"pool": "p", "peer": peer}));
        writes_all_fields::<Cache>(json!({"newest": {"at": "2026-11-25T17:00:00Z"}}));
        writes_all_fields::<Rollback>(json!({}));
        writes_all_fields::<CachePolicy>(json!({}));
    }

    #[test]
    fn the_definitions_in_deploy_are_those_of_the_types() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/crds/crds.yaml");
        let text = std::fs::read_to_string(path).expect("deploy/crds/crds.yaml");
        assert!(text == definitions_text(), "run `make crds`");
    }

    #[test]
    fn every_object_can_be_written_and_read_again() {
        let volume = Volume::new(
            "vol-1",
            VolumeSpec {
                name: "pvc-1".to_owned(),
                node_name: "node-1".to_owned(),
                parameters: Parameters::default(),
                made_with: Mutable::default(),
                source: Some(Source {
                    kind: SourceKind::Snapshot,
                    name: "snap-1".to_owned(),
                }),
                fetch: Some(Fetch {
                    node_name: "node-2".to_owned(),
                    snapshot: "snap-1".to_owned(),
                }),
                wanted: Wanted::Present,
                capacity: 1,
                limit: 0,
                mutable: Mutable::default(),
            },
        );
        let text = serde_json::to_string(&volume).expect("JSON");
        assert_eq!(
            serde_json::from_str::<Volume>(&text).expect("the same"),
            volume
        );
        // Fields with defaults may be absent: a person writes less than the controller.
        let short = r#"{"metadata": {"name": "vol-1"}, "apiVersion": "x", "kind": "Volume",
            "spec": {"name": "pvc-1", "nodeName": "node-1", "wanted": "Kept"}}"#;
        let short: Volume = serde_json::from_str(short).expect("complete");
        assert_eq!(short.spec.wanted, Wanted::Kept);
    }
}
