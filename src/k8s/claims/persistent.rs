//! The PersistentVolumes of the driver: the relevant parts of one, and a watch over all.
//!
//! The watch chooses candidates. A decision that deletes or makes anything reads live. Live lists
//! are read in pages and one after the other, since the lists of many calls at once take too much
//! memory. Each page has a time limit, because other calls wait for the list.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::{Stream, TryStreamExt as _};
use k8s_openapi::api::core::v1::{
    ObjectReference, PersistentVolume, PersistentVolumeStatus, VolumeNodeAffinity,
};
use kube::api::ObjectMeta;
use kube::runtime::reflector::{self, Store, store::Writer};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Resource, ResourceExt as _};
use serde::Deserialize;
use tokio::sync::{Mutex, watch};
use tokio::time::timeout;
use tonic::Code;

use super::decide::{Candidate, refusal};
use super::objects::failed;
use crate::engine::Result;
use crate::k8s::client::{first_page, page_after, watch_config};
use crate::model::{DRIVER_NAME, NODE_LABEL};

/// How long the API server has for a page. The client's own limit is minutes.
const ANSWER: Duration = Duration::from_secs(15);

/// What is read of a PersistentVolume. All of its fields would take several KiB of memory each,
/// since the type has room for the source of every other driver.
#[derive(Debug, Clone, Default, Resource, Deserialize)]
#[resource(inherit = "PersistentVolume")]
pub(super) struct ApiVolume {
    metadata: ObjectMeta,
    spec: Option<ApiSpec>,
    status: Option<PersistentVolumeStatus>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ApiSpec {
    claim_ref: Option<ObjectReference>,
    csi: Option<ApiSource>,
    node_affinity: Option<VolumeNodeAffinity>,
    persistent_volume_reclaim_policy: Option<String>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ApiSource {
    driver: String,
    volume_handle: String,
}

impl ApiVolume {
    /// The id of the volume that it names.
    fn handle(&self) -> Option<&str> {
        Some(&self.spec.as_ref()?.csi.as_ref()?.volume_handle)
    }
}

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
    pub(super) fn of(volume: &ApiVolume) -> Option<Self> {
        let spec = volume.spec.as_ref()?;
        let csi = spec.csi.as_ref()?;
        if csi.driver != DRIVER_NAME {
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

    /// The name of its node. The label is another text than the name if the name is long.
    pub(super) fn node_name(&self, candidates: &[Candidate]) -> String {
        let label = self.node.clone().unwrap_or_default();
        let is_its = |it: &&Candidate| it.node.topology.0.get(NODE_LABEL) == Some(&label);
        let candidate = candidates.iter().find(is_its);
        candidate.map_or(label, |it| it.node.id.as_str().to_owned())
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
    api: Api<ApiVolume>,
    store: Store<ApiVolume>,
    /// Whether the watch has listed all. The store itself wakes only the last task that waits.
    is_listed: watch::Sender<bool>,
    /// Held while all are listed.
    listing: Mutex<()>,
}

impl Persistent {
    pub(super) fn new(api: Api<ApiVolume>) -> (Self, Writer<ApiVolume>) {
        let (store, writer) = reflector::store();
        let seen = Self {
            api,
            store,
            is_listed: watch::Sender::new(false),
            listing: Mutex::default(),
        };
        (seen, writer)
    }

    /// Watches: each PersistentVolume that is there, was made or was changed.
    pub(super) fn follow(
        &self,
        writer: Writer<ApiVolume>,
    ) -> impl Stream<Item = watcher::Result<ApiVolume>> + Send + 'static {
        let events = watcher(self.api.clone(), watch_config());
        let events = events.default_backoff();
        // Nothing reads who wrote which field, nor the rest of the metadata.
        let events = events.modify(|volume| {
            let meta = &mut volume.metadata;
            *meta = ObjectMeta {
                name: meta.name.take(),
                uid: meta.uid.take(),
                resource_version: meta.resource_version.take(),
                ..ObjectMeta::default()
            };
        });
        let is_listed = self.is_listed.clone();
        let events = events.reflect(writer).inspect_ok(move |event| {
            if matches!(event, watcher::Event::InitDone) {
                is_listed.send_replace(true);
            }
        });
        events.touched_objects()
    }

    /// All of the driver; `None`: they are not listed yet. If several name one volume, the last of
    /// them is one that keeps it.
    pub(super) fn all(&self) -> Option<Vec<Named>> {
        let is_listed = *self.is_listed.borrow();
        let all = is_listed.then(|| self.store.state())?;
        let ours = all.iter().filter_map(|one| Named::of(one));
        let mut ours: Vec<Named> = ours.collect();
        ours.sort_by_key(|one| (!one.is_ending, one.claim.is_some()));
        Some(ours)
    }

    /// The PersistentVolume of a name as the API server has it now.
    pub(super) async fn read(&self, name: &str) -> Result<Option<Named>> {
        let found = self.api.get_opt(name).await;
        let found = found.map_err(|error| failed(&error))?;
        Ok(found.and_then(|one| Named::of(&one)))
    }

    /// The PersistentVolume that names a volume, as the API server has it now. The watch says which
    /// one to read; if it shows none, all are listed.
    pub(super) async fn naming(&self, id: &str) -> Result<Option<Named>> {
        let names_it = |one: &ApiVolume| Named::of(one).is_some_and(|it| it.id == id);
        if let Some(seen) = self.store.find(names_it)
            && let Some(now) = self.read(&seen.name_any()).await?
            && now.id == id
        {
            return Ok(Some(now));
        }
        let all = self.list().await?;
        Ok(all.into_iter().find(|one| one.id == id))
    }

    /// A PersistentVolume that keeps a volume's data: it names the volume, and nothing is about to
    /// delete the volume for it. The one that the volume was provisioned for, `provisioned_for`, is
    /// always read. The watch chooses the others: a list for each deletion would take too long.
    pub(super) async fn keeping(&self, id: &str, provisioned_for: &str) -> Result<Option<Named>> {
        let mut is_listed = self.is_listed.subscribe();
        let listed = timeout(ANSWER, is_listed.wait_for(|is_listed| *is_listed)).await;
        if !listed.is_ok_and(|listed| listed.is_ok()) {
            let message = "the PersistentVolumes are not listed yet; try again";
            return Err(refusal(Code::Unavailable, message.to_owned()));
        }
        let seen = self.store.state();
        let seen = seen.iter().filter(|one| one.handle() == Some(id));
        let names: BTreeSet<String> = seen.map(|one| one.name_any()).collect();
        let others = names.iter().map(String::as_str);
        let others = others.filter(|name| *name != provisioned_for);
        for name in std::iter::once(provisioned_for).chain(others) {
            if let Some(now) = self.read(name).await?
                && now.id == id
                && !now.is_ending
            {
                return Ok(Some(now));
            }
        }
        Ok(None)
    }

    /// All of the driver, as the API server has them now.
    pub(super) async fn list(&self) -> Result<Vec<Named>> {
        let _one_at_a_time = self.listing.lock().await;
        let mut all = Vec::new();
        let mut next = Some(first_page());
        while let Some(params) = next {
            let page = timeout(ANSWER, self.api.list(&params)).await;
            let late = |_| {
                let message = "the API server does not list the PersistentVolumes in time";
                refusal(Code::Unavailable, message.to_owned())
            };
            let page = page.map_err(late)?.map_err(|error| failed(&error))?;
            all.extend(page.iter().filter_map(Named::of));
            next = page_after(&page);
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures_util::StreamExt as _;
    use futures_util::future::join_all;
    use serde_json::json;

    use super::*;
    use crate::k8s::client::{client_of, is_watch, list_of};
    use crate::model::{Node, NodeId, Topology};

    fn read(status: &str) -> Option<Named> {
        let text = format!(
            "{{metadata: {{name: pv}}, status: {{phase: {status}}}, spec: {{\
             persistentVolumeReclaimPolicy: Delete, claimRef: {{name: claim, namespace: ci}}, \
             csi: {{driver: {DRIVER_NAME}, volumeHandle: vol-1}}, nodeAffinity: {{required: \
             {{nodeSelectorTerms: [{{matchExpressions: [{{key: {NODE_LABEL}, operator: In, \
             values: [node-1]}}]}}]}}}}}}}}"
        );
        Named::of(&serde_saphyr::from_str(&text).expect("YAML"))
    }

    #[tokio::test]
    async fn all_deletions_that_wait_for_the_first_list_go_on_with_it() {
        let client = client_of(|request| {
            let is_list = request.uri().path().ends_with("/persistentvolumes");
            match is_list {
                true if is_watch(request) => None,
                true => Some((200, list_of(&json!([])))),
                false => Some((
                    404,
                    json!({"kind": "Status", "code": 404, "reason": "NotFound"}),
                )),
            }
        });
        let (persistent, writer) = Persistent::new(Api::all(client));
        let persistent = Arc::new(persistent);
        let deletions = (0..3).map(|_| {
            let persistent = Arc::clone(&persistent);
            tokio::spawn(async move { persistent.keeping("vol-1", "pv").await })
        });
        let deletions = join_all(deletions);
        tokio::task::yield_now().await;
        assert!(persistent.all().is_none(), "nothing is listed yet");
        let watch = tokio::spawn(persistent.follow(writer).for_each(|_| async {}));
        let deletions = timeout(ANSWER / 3, deletions).await;
        for done in deletions.expect("each is woken") {
            let keeping = done.expect("no panic").expect("it is listed");
            assert_eq!(keeping, None);
        }
        watch.abort();
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
        assert_eq!(Named::of(&ApiVolume::default()), None);
    }

    #[test]
    fn the_node_of_a_persistent_volume_is_found_by_the_label_of_nodes_only() {
        let place = |name: &str, node: &str, backend: &str| {
            let labels = [(NODE_LABEL, node), ("example.org/backend", backend)];
            let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
            Candidate {
                node: Arc::new(Node {
                    id: NodeId::new(name).expect("an id"),
                    topology: Topology(labels.into()),
                }),
                bytes: 0,
                available: 0,
                peer: false,
                takes_pods: true,
            }
        };
        let long = "n".repeat(253);
        let candidates = [
            place("another", "another", "overlay"),
            place("overlay", "overlay", "btrfs"),
            place(&long, "0123abcd", "copy"),
        ];
        let mut named = read("Bound").expect("ours");
        for (label, node) in [
            ("overlay", "overlay"),
            ("0123abcd", &*long),
            ("copy", "copy"),
        ] {
            named.node = Some(label.to_owned());
            assert_eq!(named.node_name(&candidates), node);
        }
    }
}
