//! The seam to the Controller service: claims, on whichever node they are.
//!
//! [`Claims`] says where each of them is, and its implementation decides where a new one goes.
//! In one process that is [`OneNode`]: the engine of this node, and no other. In a cluster it is
//! `k8s::claims`: custom resources that ask the engine of the right node.

use std::sync::Arc;

use super::types::{Capacity, ClaimUse, CreateClaim, Group, Page, SnapshotFilter};
use crate::engine::Engine;
use crate::engine::error::{Error, Result};
use crate::model::{
    Attachment, MutableChange, Node, PersistentVolume, Placed, Requirement, Snapshot, SnapshotId,
    Topology, VolumeId,
};

/// Claims and snapshots, each on one node. What is said of a method of the same name of [`Engine`]
/// holds here too.
#[async_trait::async_trait]
pub trait Claims: std::fmt::Debug + Send + Sync + 'static {
    /// Makes a claim: a clone where its source is, an empty one on the best of the nodes that may
    /// have it and can ([`Requirement::choose`]). One that is there already stays where it is.
    /// `Error::Elsewhere` when `at` does not allow that node, `Error::ExistsElsewhere` when it is
    /// there already (CSI specification, "CreateVolume Errors": it is incompatible with the
    /// request's `accessibility_requirements`).
    async fn create_claim(
        &self,
        request: CreateClaim,
        at: &Requirement,
    ) -> Result<Placed<PersistentVolume>>;
    /// Deletes a claim.
    async fn delete_claim(&self, id: &str) -> Result<()>;
    /// A claim.
    async fn claim(&self, id: &str) -> Result<Placed<PersistentVolume>>;
    /// Claims of all nodes after `after`, at most `most`.
    async fn claims(
        &self,
        after: Option<&VolumeId>,
        most: usize,
    ) -> Result<Page<Placed<PersistentVolume>>>;
    /// How a claim is used and how it is.
    async fn claim_use(&self, id: &str) -> Result<ClaimUse>;
    /// Makes a claim larger.
    async fn expand_claim(
        &self,
        id: &str,
        required: u64,
        limit: Option<u64>,
    ) -> Result<PersistentVolume>;
    /// Changes what may be changed; what is not named stays.
    async fn modify_claim(&self, id: &str, mutable: MutableChange) -> Result<PersistentVolume>;
    /// Notes an attachment. `Error::NoSuchNode` when the node is unknown.
    async fn attach_claim(&self, id: &str, attachment: Attachment) -> Result<()>;
    /// Forgets an attachment.
    async fn detach_claim(&self, id: &str, node: Option<&str>) -> Result<()>;
    /// Takes a snapshot, where its source is. `Error::Elsewhere` when `at` does not allow that
    /// node.
    async fn create_snapshot(
        &self,
        name: &str,
        source: &str,
        at: &Requirement,
    ) -> Result<Placed<Snapshot>>;
    /// Deletes a snapshot.
    async fn delete_snapshot(&self, id: &str) -> Result<()>;
    /// Snapshots of all nodes after `after`, at most `most`.
    async fn snapshots(
        &self,
        filter: &SnapshotFilter,
        after: Option<&SnapshotId>,
        most: usize,
    ) -> Result<Page<Placed<Snapshot>>>;
    /// Takes snapshots of several claims at one instant. `Error::Unsupported` when they are not all
    /// on one node.
    async fn create_group(&self, name: &str, sources: &[String]) -> Result<Placed<Group>>;
    /// Deletes a group and its snapshots.
    async fn delete_group(&self, id: &str) -> Result<()>;
    /// A group and its snapshots.
    async fn group(&self, id: &str) -> Result<Placed<Group>>;
    /// How much new claims may take on all nodes that carry these labels: together, and the largest
    /// on any of them.
    async fn capacity(&self, within: &Topology) -> Result<Capacity>;
}

/// The claims of one engine, all on its node.
#[derive(Debug)]
pub struct OneNode {
    engine: Engine,
    node: Arc<Node>,
}

impl OneNode {
    /// The claims of this engine, which runs on this node.
    #[must_use]
    pub fn new(engine: Engine, node: Node) -> Self {
        let node = Arc::new(node);
        Self { engine, node }
    }

    fn here<T>(&self, what: T) -> Placed<T> {
        let node = self.node.clone();
        Placed { what, node }
    }

    fn all_here<T>(&self, page: Page<T>) -> Page<Placed<T>> {
        let items = page.items.into_iter();
        Page {
            items: items.map(|item| self.here(item)).collect(),
            next: page.next,
        }
    }
}

#[async_trait::async_trait]
impl Claims for OneNode {
    async fn create_claim(
        &self,
        request: CreateClaim,
        at: &Requirement,
    ) -> Result<Placed<PersistentVolume>> {
        match at.choose([&self.node]) {
            Ok(_) => Ok(self.here(self.engine.create_claim(request).await?)),
            Err(elsewhere) if self.engine.has_claim_named(&request.name) => {
                let name = request.name;
                Err(Error::ExistsElsewhere { name, elsewhere })
            }
            Err(elsewhere) => Err(elsewhere.into()),
        }
    }

    async fn delete_claim(&self, id: &str) -> Result<()> {
        self.engine.delete_claim(id).await
    }

    async fn claim(&self, id: &str) -> Result<Placed<PersistentVolume>> {
        Ok(self.here(self.engine.claim(id)?))
    }

    async fn claims(
        &self,
        after: Option<&VolumeId>,
        most: usize,
    ) -> Result<Page<Placed<PersistentVolume>>> {
        Ok(self.all_here(self.engine.claims(after, most)))
    }

    async fn claim_use(&self, id: &str) -> Result<ClaimUse> {
        self.engine.claim_use(id).await
    }

    async fn expand_claim(
        &self,
        id: &str,
        required: u64,
        limit: Option<u64>,
    ) -> Result<PersistentVolume> {
        self.engine.expand_claim(id, required, limit).await
    }

    async fn modify_claim(&self, id: &str, mutable: MutableChange) -> Result<PersistentVolume> {
        self.engine.modify_claim(id, mutable).await
    }

    async fn attach_claim(&self, id: &str, attachment: Attachment) -> Result<()> {
        if attachment.node != self.node.id.as_str() {
            return Err(Error::NoSuchNode(attachment.node));
        }
        self.engine.attach_claim(id, attachment).await
    }

    async fn detach_claim(&self, id: &str, node: Option<&str>) -> Result<()> {
        self.engine.detach_claim(id, node).await
    }

    async fn create_snapshot(
        &self,
        name: &str,
        source: &str,
        at: &Requirement,
    ) -> Result<Placed<Snapshot>> {
        at.choose([&self.node])?;
        Ok(self.here(self.engine.create_snapshot(name, source).await?))
    }

    async fn delete_snapshot(&self, id: &str) -> Result<()> {
        self.engine.delete_snapshot(id).await
    }

    async fn snapshots(
        &self,
        filter: &SnapshotFilter,
        after: Option<&SnapshotId>,
        most: usize,
    ) -> Result<Page<Placed<Snapshot>>> {
        Ok(self.all_here(self.engine.snapshots(filter, after, most)?))
    }

    async fn create_group(&self, name: &str, sources: &[String]) -> Result<Placed<Group>> {
        Ok(self.here(self.engine.create_group(name, sources).await?))
    }

    async fn delete_group(&self, id: &str) -> Result<()> {
        self.engine.delete_group(id).await
    }

    async fn group(&self, id: &str) -> Result<Placed<Group>> {
        Ok(self.here(self.engine.group(id)?))
    }

    async fn capacity(&self, within: &Topology) -> Result<Capacity> {
        if self.node.topology.is_in(within) {
            self.engine.capacity().await
        } else {
            Ok(Capacity::default())
        }
    }
}
