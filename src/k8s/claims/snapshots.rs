//! Takes and deletes snapshots, and groups of snapshots, by orders to their nodes.
//! The steps come from `decide`.

use tokio::time::Instant;
use tonic::Code;

use super::cluster::{Cluster, deadline, late};
use super::contents::{self, Content};
use super::decide::{self, Taking, refusal};
use super::lists;
use super::volumes::answered;
use crate::api::{Phase, Snapshot, SnapshotSpec, Wanted};
use crate::engine::claims::{Group, snapshot_id};
use crate::engine::{Error, Result};
use crate::model::{self, Placed, Requirement, SnapshotId};

impl Cluster {
    pub(super) async fn take_snapshot(
        &self,
        name: &str,
        source: &str,
        at: &Requirement,
    ) -> Result<Placed<model::Snapshot>> {
        let id = snapshot_id(name);
        let sources = [source.to_owned()];
        let taken = self.take(id, name, &sources, false, at).await?;
        let (_, mut members) = taken.what;
        let what = members.pop().ok_or_else(|| unreadable(name))?;
        let node = taken.node;
        Ok(Placed { what, node })
    }

    pub(super) async fn take(
        &self,
        id: SnapshotId,
        name: &str,
        sources: &[String],
        group: bool,
        at: &Requirement,
    ) -> Result<Placed<Group>> {
        let _alone = self.running.take(id.clone())?;
        let until = deadline();
        loop {
            let Some(object) = self.snapshots.get(id.as_str()).await? else {
                let node_name = self.node_of_sources(sources, at).await?;
                let spec = SnapshotSpec {
                    name: name.to_owned(),
                    node_name,
                    sources: sources.to_vec(),
                    group,
                    wanted: Wanted::Present,
                };
                self.sought.lock().note_taken(id.as_str());
                // If another controller made it meanwhile, the next look finds it.
                self.snapshots
                    .make(&Snapshot::new(id.as_str(), spec))
                    .await?;
                continue;
            };
            match decide::take(&object, sources, group)? {
                Taking::Done => {
                    return lists::snapshots(&object).ok_or_else(|| unreadable(name));
                }
                Taking::Withdraw(error) => {
                    if self.snapshots.remove(&object).await? {
                        return Err(error);
                    }
                }
                Taking::Wait if Instant::now() >= until => {
                    return Err(late(&object.spec.node_name));
                }
                Taking::Wait => answered(&self.seen_snapshots, &object, until).await,
            }
        }
    }

    /// The one node of all sources.
    async fn node_of_sources(&self, sources: &[String], at: &Requirement) -> Result<String> {
        let mut found: Option<String> = None;
        for source in sources {
            let volume = self.wanted_volume(source).await?;
            decide::check_source(&volume)?;
            let node = volume.spec.node_name;
            if found.as_ref().is_some_and(|found| *found != node) {
                return Err(Error::Unsupported {
                    what: "a group of snapshots".to_owned(),
                    why: "its volumes are on several nodes".to_owned(),
                });
            }
            found = Some(node);
        }
        let node = found.ok_or_else(|| Error::NoSuchClaim(String::new()))?;
        let candidates = self.candidates();
        if let Some(candidate) = candidates
            .iter()
            .find(|candidate| candidate.node.id.as_str() == node)
        {
            at.choose([&candidate.node])?;
        } else {
            let source = sources.first().map_or("", String::as_str);
            self.refuse_given_up(source, &node).await?;
        }
        Ok(node)
    }

    /// The object with this snapshot: its own, or that of its group. It may be Lost.
    pub(super) async fn snapshot_with(&self, id: &str) -> Result<Snapshot> {
        let none = || Error::NoSuchSnapshot(id.to_owned());
        id.parse::<SnapshotId>().map_err(|_| none())?;
        let own = self.snapshots.get(id).await?;
        let is_there = |object: &Snapshot| {
            let members = object.status.iter().flat_map(|status| &status.members);
            object.spec.wanted != Wanted::Absent
                && matches!(object.phase(), Some(Phase::Ready | Phase::Lost))
                && members.into_iter().any(|member| member.id == id)
        };
        if let Some(own) = own.filter(is_there) {
            return Ok(own);
        }
        let seen = self.seen_snapshots.all();
        let group = seen.iter().find(|object| is_there(object));
        group.map(|group| (**group).clone()).ok_or_else(none)
    }

    pub(super) async fn drop_snapshot(&self, id: &str) -> Result<()> {
        match self.snapshot_with(id).await {
            Ok(object) if object.spec.group => {
                let group = object.metadata.name.unwrap_or_default();
                let (Ok(snapshot), Ok(group)) = (id.parse(), group.parse()) else {
                    return Ok(());
                };
                Err(Error::OfGroup { snapshot, group })
            }
            Ok(_) | Err(Error::NoSuchSnapshot(_)) => self.order_gone(id, false).await,
            Err(error) => Err(error),
        }
    }

    pub(super) async fn order_gone(&self, id: &str, group: bool) -> Result<()> {
        let Ok(held) = id.parse::<SnapshotId>() else {
            return Ok(());
        };
        let _alone = self.running.take(held)?;
        let until = deadline();
        loop {
            let Some(object) = self.snapshots.get(id).await? else {
                let Some(order) = self.orphan_snapshot(id).await? else {
                    return Ok(());
                };
                if order.spec.group != group {
                    return Ok(());
                }
                self.check_unnamed(id, group).await?;
                self.snapshots.make(&order).await?;
                continue;
            };
            if object.spec.group != group {
                return Ok(());
            }
            let (snapshots, seen) = (&self.snapshots, &self.seen_snapshots);
            let check = self.check_unnamed(id, group);
            if self.delete(snapshots, seen, &object, until, check).await? {
                // The answer may be lost.
                self.sought.lock().note_gone(id, Instant::now());
                return Ok(());
            }
        }
    }

    /// Refuses to delete a snapshot or a group while a content of its kind names it that is not
    /// being deleted. csi-snapshotter calls only for a content that is being deleted.
    pub(super) async fn check_unnamed(&self, id: &str, group: bool) -> Result<()> {
        let named = self.contents.named().await?;
        // The contents of a group's members are deleted after it.
        let is_its = |content: &&Content| !group || content.kind == contents::OF_GROUP;
        let Some(Content { kind, name }) = named.get(id).filter(is_its) else {
            return Ok(());
        };
        let message = format!(
            "the data of snapshot {id} stays, because {kind} {name:?} needs it. To delete the \
             other content only, set its deletionPolicy to Retain first"
        );
        Err(refusal(Code::FailedPrecondition, message))
    }

    pub(super) async fn find_group(&self, id: &str) -> Result<Placed<Group>> {
        let none = || Error::NoSuchSnapshot(id.to_owned());
        id.parse::<SnapshotId>().map_err(|_| none())?;
        let found = self.snapshots.get(id).await?.ok_or_else(none)?;
        let is_there = found.spec.group && found.spec.wanted != Wanted::Absent;
        let group = lists::snapshots(&found).filter(|_| is_there);
        group.ok_or_else(none)
    }
}

fn unreadable(name: &str) -> Error {
    let message = format!("the status of snapshot {name:?} cannot be read");
    refusal(Code::Internal, message)
}
