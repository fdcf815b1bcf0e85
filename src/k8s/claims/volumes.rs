//! Creates, deletes and changes volumes by orders to their nodes.
//! The steps come from `decide`.

use std::sync::Arc;

use kube::ResourceExt as _;
use serde_json::{Value, json};
use tokio::time::Instant;
use tonic::Code;

use super::cluster::{Cluster, TO_MAKE, deadline, late, node_named};
use super::decide::{self, Aim, Asked, Candidate, Change, Creation, Deletion, Field, refusal};
use super::objects::Objects;
use super::order::Order;
use super::{lists, temporary};
use crate::api::{Fetch, Mutable, Phase, Volume, VolumeSpec, Wanted, number};
use crate::engine::claims::{CreateClaim, claim_id};
use crate::engine::{Error, Result};
use crate::k8s::watched::Watched;
use crate::model::{ClaimSource, Node, NodeId, PersistentVolume, Placed, Requirement, VolumeId};

/// The name of a node's volume in its engine. Two nodes may both have one for a CSI name, for a
/// moment: an attempt that was abandoned, and the one that replaces it.
pub(in crate::k8s) fn name_on(node: &str, name: &str) -> String {
    format!("{name}@{node}")
}

fn object(request: &CreateClaim, node: &Node) -> Volume {
    let node_name = node.id.as_str().to_owned();
    let id = claim_id(&name_on(&node_name, &request.name));
    let mutable = Mutable::from(request.mutable);
    Volume::new(
        id.as_str(),
        VolumeSpec {
            name: request.name.clone(),
            node_name,
            parameters: request.parameters.into(),
            made_with: mutable,
            source: request.source.as_ref().map(Into::into),
            fetch: None,
            wanted: Wanted::Present,
            capacity: number(request.required_bytes),
            limit: request.limit_bytes.map(number).unwrap_or_default(),
            mutable,
        },
    )
}

pub(super) fn absent() -> Value {
    json!({ "wanted": Wanted::Absent })
}

impl Cluster {
    pub(super) async fn create_volume(
        &self,
        request: &CreateClaim,
        at: &Requirement,
    ) -> Result<Placed<PersistentVolume>> {
        // One id for the name, whichever node gets it.
        let _alone = self.running.take(claim_id(&request.name))?;
        let time_up = Instant::now() + TO_MAKE;
        let until = deadline();
        let mut passed_over: Vec<NodeId> = Vec::new();
        loop {
            let volumes = self.volumes.select("spec.name", &request.name).await?;
            let mut candidates = self.candidates();
            if !passed_over.is_empty() {
                let passed = |it: &Candidate| passed_over.contains(&it.node.id);
                let others = candidates.iter().map(|candidate| Candidate {
                    takes_pods: candidate.takes_pods && !passed(candidate),
                    ..candidate.clone()
                });
                candidates = others.collect();
            }
            let asked = Asked {
                request,
                at,
                candidates: &candidates,
                source: self.node_of_source(request, &volumes).await?,
                overdue: Instant::now() >= time_up,
            };
            match asked.next(&volumes)? {
                Creation::Done(volume) => return lists::volume(volume),
                Creation::Make(node) => {
                    if asked.may_pass_over(&node) && !self.takes_pods(&node.id).await? {
                        passed_over.push(node.id.clone());
                    } else {
                        let order = self.first_order(request, &node).await?;
                        self.make_order(order, asked.source.as_deref()).await?;
                    }
                }
                Creation::Wait(volume) => answered(&self.seen_volumes, volume, time_up).await,
                Creation::Abandon(volume) => drop(self.abandon(volume).await?),
                Creation::Withdraw(volume, error) => {
                    if self.volumes.remove(volume).await? {
                        self.end_temporary_of(volume).await;
                        return Err(error);
                    }
                }
            }
            // Each step met a change by another writer.
            if Instant::now() >= until {
                return Err(refusal(
                    Code::Aborted,
                    "the volume is still being made; try again".to_owned(),
                ));
            }
        }
    }

    /// Orders the deletion of a volume that is not made in time, or never will be. `false`: another
    /// writer was faster.
    async fn abandon(&self, volume: &Volume) -> Result<bool> {
        let named = self.persistent.read(&volume.spec.name).await?;
        decide::check_abandon(volume, named.as_ref().map(|named| &*named.id))?;
        Ok(self.volumes.write(volume, absent()).await?.is_some())
    }

    /// Makes the object of an order. For a clone on another node than its source's, the snapshot
    /// that it is made of comes first.
    async fn make_order(&self, mut order: Volume, source: Option<&Node>) -> Result<()> {
        let id = order.metadata.name.clone().unwrap_or_default();
        let spec = &order.spec;
        let elsewhere = source.filter(|source| source.id.as_str() != spec.node_name);
        let mut hold = None;
        if let (Some(node), Some(source), Wanted::Present) = (elsewhere, &spec.source, spec.wanted)
        {
            let invalid = |_| Error::NoSuchClaim(source.name.clone());
            let snapshot = match ClaimSource::try_from(source).map_err(invalid)? {
                ClaimSource::Snapshot(snapshot) => snapshot,
                ClaimSource::Claim(volume) => {
                    // Until the object exists, nothing else says that the snapshot is needed.
                    hold = Some(self.running.take(id.parse().map_err(invalid)?)?);
                    let name = temporary::name_for(&id);
                    let anywhere = Requirement::default();
                    let taken = self.take_snapshot(&name, volume.as_str(), &anywhere);
                    taken.await?.what.id
                }
            };
            order.spec.fetch = Some(Fetch {
                node_name: node.id.as_str().to_owned(),
                snapshot: snapshot.to_string(),
            });
        }
        // If another controller made it meanwhile, the next look finds it.
        self.volumes.make(&order).await?;
        drop(hold);
        Ok(())
    }

    /// The order for a volume without an object. If a PersistentVolume of its name exists, the
    /// volume was Ready once, and is never made again.
    async fn first_order(&self, request: &CreateClaim, node: &Node) -> Result<Volume> {
        let Some(named) = self.persistent.read(&request.name).await? else {
            return Ok(object(request, node));
        };
        let node = named.node_name(&self.candidates());
        let mut order = object(request, &node_named(&node));
        if order.metadata.name.as_ref() != Some(&named.id) {
            let message = format!(
                "PersistentVolume {:?} exists, and names volume {}, which was not provisioned for \
                 it",
                named.name, named.id
            );
            return Err(refusal(Code::AlreadyExists, message));
        }
        order.spec.wanted = Wanted::Kept;
        Ok(order)
    }

    /// The node of a clone's source. An attempt that has begun keeps it, also when its source is
    /// deleted meanwhile.
    async fn node_of_source(
        &self,
        request: &CreateClaim,
        volumes: &[Volume],
    ) -> Result<Option<Arc<Node>>> {
        let Some(source) = &request.source else {
            return Ok(None);
        };
        let mut volumes = volumes.iter();
        let begun = volumes.find(|volume| volume.spec.wanted != Wanted::Absent);
        let node = match (begun, source) {
            (Some(begun), _) => match &begun.spec.fetch {
                Some(fetch) => fetch.node_name.clone(),
                None => begun.spec.node_name.clone(),
            },
            (None, ClaimSource::Claim(id)) => {
                let volume = self.wanted_volume(id.as_str()).await?;
                decide::check_source(&volume)?;
                volume.spec.node_name
            }
            (None, ClaimSource::Snapshot(id)) => {
                let snapshot = self.snapshot_with(id.as_str()).await?;
                decide::check_snapshot(&snapshot)?;
                snapshot.spec.node_name
            }
        };
        // With all labels, if it has a pool.
        let candidates = self.candidates();
        let known = candidates
            .iter()
            .find(|candidate| candidate.node.id.as_str() == node);
        if let Some(known) = known {
            return Ok(Some(known.node.clone()));
        }
        // A volume that was made of it needs it no more.
        if let Some(begun) = begun.filter(|it| it.phase() == Some(Phase::Ready)) {
            return Ok(Some(node_named(&begun.spec.node_name)));
        }
        if !self.is_given_up(&node).await? {
            return Ok(Some(node_named(&node)));
        }
        if let Some(begun) = begun.filter(|it| decide::lacks_content(it))
            && !self.abandon(begun).await?
        {
            let message = "the volume has changed meanwhile; try again".to_owned();
            return Err(refusal(Code::Aborted, message));
        }
        let (ClaimSource::Claim(id) | ClaimSource::Snapshot(id)) = source;
        Err(decide::given_up(id.as_str(), &node))
    }

    /// A volume that is not to be deleted.
    pub(super) async fn wanted_volume(&self, id: &str) -> Result<Volume> {
        let none = || Error::NoSuchClaim(id.to_owned());
        // A text that is not an id has no object, and cannot be part of a path.
        id.parse::<VolumeId>().map_err(|_| none())?;
        let Some(found) = self.volumes.get(id).await? else {
            let named = self.persistent.naming(id).await?;
            let named = named.filter(|named| !named.is_ending);
            return Err(decide::no_object(id, named.as_ref().map(|it| &*it.name)));
        };
        let wanted = Some(found).filter(|volume| volume.spec.wanted != Wanted::Absent);
        wanted.ok_or_else(none)
    }

    pub(super) async fn find_volume(&self, id: &str) -> Result<Placed<PersistentVolume>> {
        let volume = self.wanted_volume(id).await?;
        if volume.status.is_none() {
            return Err(decide::not_ready(&volume));
        }
        lists::volume(&volume)
    }

    pub(super) async fn delete_volume(&self, id: &str) -> Result<()> {
        let Ok(held) = id.parse::<VolumeId>() else {
            return Ok(());
        };
        let _alone = self.running.take(held)?;
        let until = deadline();
        loop {
            let Some(volume) = self.volumes.get(id).await? else {
                let Some(order) = self.order_without_object(id).await? else {
                    return Ok(());
                };
                self.check_only_ending(&order).await?;
                self.volumes.make(&order).await?;
                continue;
            };
            if volume.spec.wanted != Wanted::Absent {
                self.check_only_ending(&volume).await?;
            }
            let (volumes, seen) = (&self.volumes, &self.seen_volumes);
            let checked = async { Ok(()) };
            if self.delete(volumes, seen, &volume, until, checked).await? {
                return Ok(());
            }
        }
    }

    /// One step of a deletion. Before it is ordered, `check` may refuse it. `true`: it is done.
    pub(super) async fn delete<K: Order>(
        &self,
        objects: &Objects<K>,
        seen: &Watched<K>,
        object: &K,
        until: Instant,
        check: impl Future<Output = Result<()>>,
    ) -> Result<bool> {
        let node = object.node();
        match decide::delete(object.wanted(), object.reply()) {
            // If it was changed meanwhile, such as marked as bound, the caller looks again: the
            // sweep leaves the objects of running calls alone.
            Deletion::Done => return objects.remove(object).await,
            // The data is an orphan if the disk comes back.
            _ if self.is_given_up(node).await? => return objects.remove(object).await,
            Deletion::Order => {
                check.await?;
                objects.write(object, absent()).await?;
            }
            Deletion::Refused(error) => return Err(decide::of_node(node, &error)),
            Deletion::Wait if Instant::now() >= until => return Err(late(node)),
            Deletion::Wait => answered(seen, object, until).await,
        }
        Ok(false)
    }

    /// Refuses to delete a volume that another PersistentVolume than the deleted one names. The
    /// call does not name that one, but csi-provisioner makes it only for one that is Released and
    /// has the reclaim policy Delete. So any that is neither is another.
    async fn check_only_ending(&self, volume: &Volume) -> Result<()> {
        let id = volume.name_any();
        let Some(named) = self.persistent.keeping(&id, &volume.spec.name).await? else {
            return Ok(());
        };
        let message = format!(
            "the data of volume {id} stays, because PersistentVolume {:?} needs it. To delete the \
             other PersistentVolume only, set its persistentVolumeReclaimPolicy to Retain first",
            named.name
        );
        Err(refusal(Code::FailedPrecondition, message))
    }

    /// The order to delete a volume whose object is lost, or was deleted for another
    /// PersistentVolume. One that names it says where it is; without one, it is deleted.
    async fn order_without_object(&self, id: &str) -> Result<Option<Volume>> {
        let Some(named) = self.persistent.naming(id).await? else {
            return Ok(None);
        };
        let node = named.node_name(&self.candidates());
        let is_its_own = claim_id(&name_on(&node, &named.name)).as_str() == id;
        // A PersistentVolume that was written by hand may be wrong; the node's report is not.
        if !is_its_own && let Some(order) = self.orphan_volume(id).await? {
            return Ok(Some(order));
        }
        if !node.is_empty() && self.is_given_up(&node).await? {
            return Ok(None);
        }
        // No driver would ever answer the order.
        if node.is_empty() || (!is_its_own && self.pools.get(&node).await?.is_none()) {
            let message = format!(
                "volume {id} has no Volume object, and PersistentVolume {:?} names no node with a \
                 driver; add a nodeAffinity to the PersistentVolume, or delete it",
                named.name
            );
            return Err(refusal(Code::FailedPrecondition, message));
        }
        let spec = VolumeSpec::empty(named.name, node, Wanted::Absent);
        Ok(Some(Volume::new(id, spec)))
    }

    pub(super) async fn change_volume(&self, id: &str, aim: Aim) -> Result<PersistentVolume> {
        let none = || Error::NoSuchClaim(id.to_owned());
        let _alone = self.running.take(id.parse().map_err(|_| none())?)?;
        let until = deadline();
        loop {
            let volume = self.wanted_volume(id).await?;
            match decide::change(&volume, aim)? {
                Change::Done => return Ok(lists::volume(&volume)?.what),
                Change::Write(field) => drop(self.volumes.write(&volume, spec_of(field)).await?),
                Change::Restore(field, error) => {
                    let restored = self.volumes.write(&volume, spec_of(field)).await?;
                    if restored.is_some() {
                        return Err(error);
                    }
                }
                Change::Wait if Instant::now() >= until => {
                    return Err(late(&volume.spec.node_name));
                }
                Change::Wait => answered(&self.seen_volumes, &volume, until).await,
            }
        }
    }
}

/// Waits until the node has answered the order in this object, the object has changed otherwise, or
/// time is up. The caller looks again in each case.
pub(super) async fn answered<K: Order>(watched: &Watched<K>, object: &K, deadline: Instant) {
    let meta = object.meta();
    let name = meta.name.as_deref().unwrap_or_default();
    let is_over = |seen: &K| {
        let (uid, generation) = (&seen.meta().uid, seen.meta().generation);
        let is_answer = generation == meta.generation && seen.reply().is_some();
        // The watch may still show an earlier object of this name.
        *uid == meta.uid && (generation > meta.generation || is_answer)
    };
    watched.becomes(name, deadline, is_over).await;
}

fn spec_of(field: Field) -> Value {
    match field {
        Field::Capacity(capacity) => json!({ "capacity": capacity }),
        // Null removes a field that is not wanted any more.
        Field::Mutable(mutable) => json!({
            "mutable": {
                "sizeLimit": mutable.size_limit,
                "ttlSeconds": mutable.ttl_seconds,
            },
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::{StreamExt as _, stream};
    use kube::runtime::watcher::Event;

    use super::*;

    #[tokio::test]
    async fn an_earlier_object_of_the_same_name_is_no_answer() {
        let object = |uid: &str, generation| {
            let spec = VolumeSpec::empty("pvc-1".to_owned(), "node-1", Wanted::Present);
            let mut volume = Volume::new("vol-1", spec);
            volume.metadata.uid = Some(uid.to_owned());
            volume.metadata.generation = Some(generation);
            volume
        };
        let earlier = object("earlier", 3);
        let events = [Event::Init, Event::InitApply(earlier), Event::InitDone];
        let events = stream::iter(events).chain(stream::pending());
        let (seen, fill) = Watched::over(events.map(Ok));
        tokio::spawn(fill);
        seen.listed().await;
        let deadline = Instant::now() + Duration::from_millis(500);
        answered(&seen, &object("later", 1), deadline).await;
        assert!(Instant::now() >= deadline, "the caller asks in a loop");
    }
}
