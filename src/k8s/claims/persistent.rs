//! The PersistentVolumes of the driver: the relevant parts of one, and a watch over all.
//!
//! The watch chooses candidates. A decision that deletes or makes anything reads live.

use std::fmt;

use futures_util::{FutureExt as _, Stream};
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume as ApiVolume};
use kube::runtime::reflector::{self, Store, store::Writer};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, ResourceExt as _};

use super::objects::failed;
use crate::engine::Result;
use crate::model::NODE_LABEL;

/// The facts in a PersistentVolume of the driver.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::k8s) struct Named {
    pub(in crate::k8s) name: String,
    /// The volume's id.
    pub(in crate::k8s) id: String,
    /// The value of the node's label in its affinity.
    pub(in crate::k8s) node: Option<String>,
    /// The claim that it is bound to.
    pub(in crate::k8s) claim: Option<ObjectReference>,
    /// Whether its claim is gone and DeleteVolume is to come, or running.
    pub(in crate::k8s) is_ending: bool,
}

impl Named {
    /// The relevant parts; `None`: it is of another driver.
    pub(in crate::k8s) fn of(volume: &ApiVolume, driver: &str) -> Option<Self> {
        let spec = volume.spec.as_ref()?;
        let csi = spec.csi.as_ref()?;
        if csi.driver != driver {
            return None;
        }
        let phase = volume.status.as_ref().and_then(|it| it.phase.as_deref());
        let is_released = matches!(phase, Some("Released" | "Failed"));
        let policy = spec.persistent_volume_reclaim_policy.as_deref();
        Some(Self {
            name: volume.name_any(),
            id: csi.volume_handle.clone(),
            node: node_label(volume),
            claim: spec.claim_ref.clone().filter(|_| phase == Some("Bound")),
            is_ending: is_released && policy == Some("Delete"),
        })
    }
}

/// The node's label in the affinity.
fn node_label(volume: &ApiVolume) -> Option<String> {
    let affinity = volume.spec.as_ref()?.node_affinity.as_ref()?;
    let terms = &affinity.required.as_ref()?.node_selector_terms;
    let expressions = terms.iter().filter_map(|it| it.match_expressions.as_ref());
    let mut nodes = expressions.flatten().filter(|one| one.key == NODE_LABEL);
    nodes.next()?.values.as_ref()?.first().cloned()
}

/// The PersistentVolumes that the watch has seen, and live reads.
pub(super) struct Persistent {
    pub(super) api: Api<ApiVolume>,
    driver: &'static str,
    store: Store<ApiVolume>,
}

impl fmt::Debug for Persistent {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Persistent").finish_non_exhaustive()
    }
}

impl Persistent {
    pub(super) fn new(api: Api<ApiVolume>, driver: &'static str) -> (Self, Writer<ApiVolume>) {
        let (store, writer) = reflector::store();
        let seen = Self { api, driver, store };
        (seen, writer)
    }

    /// Watches: each PersistentVolume that is there, was made or was changed.
    pub(super) fn follow(
        &self,
        writer: Writer<ApiVolume>,
    ) -> impl Stream<Item = watcher::Result<ApiVolume>> + Send + 'static {
        let events = watcher(self.api.clone(), watcher::Config::default());
        let events = events.default_backoff();
        // Nothing reads who wrote which field.
        let events = events.modify(|volume| volume.metadata.managed_fields = None);
        events.reflect(writer).touched_objects()
    }

    /// All of the driver; `None`: they are not listed yet.
    pub(super) fn all(&self) -> Option<Vec<Named>> {
        self.store.wait_until_ready().now_or_never()?.ok()?;
        let all = self.store.state();
        let ours = all.iter().filter_map(|one| Named::of(one, self.driver));
        Some(ours.collect())
    }

    /// The PersistentVolume of a name as the API server has it now.
    pub(super) async fn read(&self, name: &str) -> Result<Option<Named>> {
        let found = self.api.get_opt(name).await;
        let found = found.map_err(|error| failed(&error))?;
        Ok(found.and_then(|one| Named::of(&one, self.driver)))
    }

    /// The PersistentVolume that names a volume, as the API server has it now.
    pub(super) async fn naming(&self, id: &str) -> Result<Option<Named>> {
        let all = self.api.list(&kube::api::ListParams::default()).await;
        let all = all.map_err(|error| failed(&error))?;
        let mut ours = all.iter().filter_map(|one| Named::of(one, self.driver));
        Ok(ours.find(|one| one.id == id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(status: &str) -> Option<Named> {
        let text = format!(
            "{{metadata: {{name: pv}}, status: {{phase: {status}}}, spec: {{\
             persistentVolumeReclaimPolicy: Delete, claimRef: {{name: claim, namespace: ci}}, \
             csi: {{driver: ours, volumeHandle: vol-1}}, nodeAffinity: {{required: \
             {{nodeSelectorTerms: [{{matchExpressions: [{{key: {NODE_LABEL}, operator: In, \
             values: [node-1]}}]}}]}}}}}}}}"
        );
        Named::of(&serde_saphyr::from_str(&text).expect("YAML"), "ours")
    }

    #[test]
    fn a_persistent_volume_says_its_node_its_claim_and_whether_it_ends() {
        let bound = read("Bound").expect("ours");
        assert_eq!((bound.name.as_str(), bound.id.as_str()), ("pv", "vol-1"));
        assert_eq!(bound.node.as_deref(), Some("node-1"));
        let claim = bound.claim.expect("bound");
        assert_eq!(claim.name.as_deref(), Some("claim"));
        assert!(!bound.is_ending);
        let released = read("Released").expect("ours");
        assert!(released.is_ending && released.claim.is_none());
        assert_eq!(Named::of(&ApiVolume::default(), "ours"), None);
    }
}
