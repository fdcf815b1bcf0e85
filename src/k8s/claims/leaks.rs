//! Deletes volumes whose claim was given up: csi-provisioner does not record that a creation began,
//! so a `Volume` without a PersistentVolume may be all that is left of it.
//!
//! A volume that a PersistentVolume has ever named is never deleted here: it is marked, and the
//! mark stays. So the data of a retained volume outlives its PersistentVolume.
//!
//! Snapshots need no such sweep: csi-snapshotter has a VolumeSnapshotContent before it calls.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::runtime::reflector::store::Writer;
use kube::{Api, Client, ResourceExt as _};
use tokio::time::Instant;

use super::cluster::{Cluster, PAUSES};
use super::objects::failed;
use super::persistent::{ApiVolume, Named};
use super::since::Since;
use super::volumes::absent;
use crate::api::{BOUND, Volume, Wanted};
use crate::engine::Result;
use crate::engine::claims::claim_id;
use crate::k8s::client::{first_page, page_after};

/// How many volumes are marked at once: in a burst of claims, one after the other falls behind.
const MARKS: usize = 8;

/// What the API server says about claims, read for one decision.
#[derive(Debug, Default)]
pub(in crate::k8s) struct ApiClaims {
    /// The uids of all PersistentVolumeClaims.
    pub(in crate::k8s) claims: HashSet<String>,
    /// The PersistentVolumes of the driver: name and volume id.
    pub(in crate::k8s) persistent: BTreeMap<String, String>,
}

/// The uid of the claim that a volume was made for; `None`: its name does not tell.
fn claim_of(name: &str) -> Option<&str> {
    let uid = name.strip_prefix("pvc-")?;
    // With another length the name may hold a part of the uid only.
    let is_uid = uid.len() == 36
        && uid.char_indices().all(|(at, char)| match at {
            8 | 13 | 18 | 23 => char == '-',
            _ => char.is_ascii_hexdigit(),
        });
    is_uid.then_some(uid)
}

/// Whether a volume may be a leak: nothing says that a PersistentVolume has ever named it.
pub(in crate::k8s) fn is_suspect(volume: &Volume) -> bool {
    volume.spec.wanted == Wanted::Present
        && !volume.annotations().contains_key(BOUND)
        && claim_of(&volume.spec.name).is_some()
}

/// Whether a suspect is a leak: no PersistentVolume names it, and none ever will.
pub(in crate::k8s) fn is_leak(volume: &Volume, known: &ApiClaims) -> bool {
    let (id, name) = (volume.name_any(), &volume.spec.name);
    if !is_suspect(volume) || known.persistent.values().any(|named| *named == id) {
        return false;
    }
    // A PersistentVolume of this name has the volume of another attempt.
    let is_replaced = known.persistent.contains_key(name);
    let has_claim = claim_of(name).is_none_or(|uid| known.claims.contains(uid));
    is_replaced || !has_claim
}

impl Cluster {
    /// Marks volumes as soon as a PersistentVolume names them.
    pub(super) async fn mark_forever(&self, writer: Writer<ApiVolume>) {
        self.seen_volumes.listed().await;
        let touched = self.persistent.follow(writer);
        let marked = touched.for_each_concurrent(MARKS, |volume| async move {
            let volume = match &volume {
                Ok(volume) => volume,
                Err(error) => return self.counters.watch_failed("PersistentVolume", error),
            };
            if let Some(named) = Named::of(volume)
                && let Err(error) = self.mark(&named).await
            {
                // The next look marks it.
                tracing::warn!(%error, "a volume could not be marked as bound; retrying");
            }
        });
        marked.await;
    }

    /// Marks the volume of a PersistentVolume, if it has no mark.
    async fn mark(&self, named: &Named) -> Result<()> {
        let id = named.id.as_str();
        let is_marked = |volume: &Volume| volume.annotations().contains_key(BOUND);
        match self.seen_volumes.get(id) {
            Some(seen) if is_marked(&seen) => return Ok(()),
            // A text that is not an id has no object, and cannot be part of a path.
            None if id.parse::<crate::model::VolumeId>().is_err() => return Ok(()),
            // The watch can be late.
            None if self.volumes.get(id).await?.is_none() => return Ok(()),
            Some(_) | None => {}
        }
        self.volumes.annotate(id, BOUND).await
    }

    /// Orders the deletion of leaks that are older than `grace`.
    pub(super) async fn find_leaks_forever(&self, grace: Duration) {
        self.seen_volumes.listed().await;
        let pause = (grace / 4).clamp(PAUSES.0, PAUSES.1);
        let mut since = Since::default();
        loop {
            let now = Instant::now();
            let suspects = self.seen_volumes.all();
            let suspects = suspects.iter().filter(|volume| is_suspect(volume));
            // A new object of the same name is another suspect.
            since.look(suspects.filter_map(|volume| volume.uid()), now);
            let is_due = |volume: &Volume| {
                let uid = volume.uid();
                uid.is_some_and(|uid| since.is_due(&uid, now, grace))
            };
            if let Err(error) = self.delete_leaks(is_due).await {
                tracing::warn!(%error,
                    "volumes whose claims were given up could not be deleted; retrying");
            }
            tokio::time::sleep(pause).await;
        }
    }

    async fn delete_leaks(&self, is_due: impl Fn(&Volume) -> bool) -> Result<()> {
        let mut due = Vec::new();
        for seen in self.seen_volumes.all() {
            // A volume whose call runs is not given up.
            if is_suspect(&seen)
                && is_due(&seen)
                && let Ok(hold) = self.running.take(claim_id(&seen.spec.name))
                && let Some(volume) = self.volumes.get(&seen.name_any()).await?
                && volume.uid() == seen.uid()
            {
                due.push((volume, hold));
            }
        }
        if due.is_empty() {
            return Ok(());
        }
        let known = self.known().await?;
        // A volume that cannot be written does not keep the others from being deleted.
        let mut failure = None;
        for (volume, _hold) in due {
            if !is_leak(&volume, &known) {
                continue;
            }
            // A mark that was set meanwhile makes this fail.
            match self.volumes.write(&volume, absent()).await {
                Ok(None) => {}
                Ok(Some(_)) => {
                    self.counters.leaks.inc();
                    let (id, node) = (volume.name_any(), &volume.spec.node_name);
                    let name = &volume.spec.name;
                    tracing::info!(volume = %id, %name, %node,
                        "the volume's claim was given up: deleting the volume");
                }
                Err(error) => drop(failure.get_or_insert(error)),
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Reads claims and PersistentVolumes live, and marks the volumes that these name.
    async fn known(&self) -> Result<ApiClaims> {
        // Claims first: a claim that is gone now gets no PersistentVolume later.
        let claims = uids_of_claims(&self.client).await?;
        let named = self.persistent.list().await?;
        for named in &named {
            if let Err(error) = self.mark(named).await {
                // This look does not delete it: the list names it. The next look marks it.
                tracing::warn!(%error, "a volume could not be marked as bound; retrying");
            }
        }
        let named = named.into_iter().map(|named| (named.name, named.id));
        Ok(ApiClaims {
            claims,
            persistent: named.collect(),
        })
    }
}

/// The uids of all PersistentVolumeClaims, read live.
async fn uids_of_claims(client: &Client) -> Result<HashSet<String>> {
    let claims: Api<PersistentVolumeClaim> = Api::all(client.clone());
    let mut uids = HashSet::new();
    let mut next = Some(first_page());
    while let Some(params) = next {
        let page = claims.list_metadata(&params).await;
        let page = page.map_err(|error| failed(&error))?;
        uids.extend(page.iter().filter_map(kube::ResourceExt::uid));
        next = page_after(&page);
    }
    Ok(uids)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::k8s::client::client_of;

    #[tokio::test]
    async fn claims_are_read_in_small_pages() {
        let client = client_of(|request| {
            let query = request.uri().query().unwrap_or_default();
            assert!(query.contains("limit=100"), "{query}");
            let (uid, next) = if query.contains("continue=more") {
                ("2", "")
            } else {
                ("1", "more")
            };
            let claim = json!({"metadata": {"name": "c", "namespace": "ci", "uid": uid}});
            Some((
                200,
                json!({"metadata": {"continue": next}, "items": [claim]}),
            ))
        });
        let uids = uids_of_claims(&client).await.expect("both pages");
        assert_eq!(uids, HashSet::from(["1", "2"].map(str::to_owned)));
    }

    #[test]
    fn only_names_with_a_whole_uid_tell_the_claim() {
        let uid = "3f0c9a52-5a3e-4c1b-9d5e-0123456789ab";
        assert_eq!(claim_of(&format!("pvc-{uid}")), Some(uid));
        for name in ["pvc-1", "pvc-3f0c9a525a3e", &format!("other-{uid}"), uid] {
            assert_eq!(claim_of(name), None, "{name}");
        }
    }
}
