//! Claims: volumes that outlive pods, their clones, snapshots, and groups of snapshots.
//!
//! [`Claims`] is the seam to the Controller service: in one process its implementation is the [`Engine`] itself; in a cluster
//! it will be custom resources that ask the engine of the right node. Nothing above it changes then.
//!
//! A claim is in the index from CreateVolume on; its directory, `volumes/<id>`, is made when it is first mounted, and
//! again when its content has become a layer (`freeze`). So a claim that no pod has written to since is its stack of
//! layers, and making, cloning and snapshotting it is one index transaction.
//!
//! | file | |
//! |---|---|
//! | `create` | claims come and go, empty or as clones |
//! | `change` | expand, modify, attach, detach |
//! | `snapshot` | snapshots and groups of them |
//! | `freeze` | the content of claims at one moment, durable together or not at all |
//! | `content` | the directory of a claim |
//! | `mount` | stage, publish, unpublish, unstage |
//! | `list` | pages, and how a claim is used |
//! | `tidy` | what is done now and then |
//! | `recover` | what a crash or a reboot has left |
//! | `hold` | what operations begin with |

mod change;
pub(super) mod content;
mod create;
mod freeze;
mod hold;
mod list;
mod mount;
pub(super) mod recover;
mod snapshot;
pub(super) mod tidy;

use std::future::Future;
use std::path::{Path, PathBuf};

use super::Engine;
use super::error::{Doing, Error, Result};
use crate::model::{
    Attachment, Claim, ClaimParameters, ClaimSource, MutableParameters, Snapshot, SnapshotGroup,
    SnapshotId, VolumeId,
};

/// What CreateVolume asks for, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateClaim {
    /// The name by which a repeated request is known.
    pub name: String,
    /// At least that many bytes.
    pub required_bytes: u64,
    /// At most that many; `None`: no bound.
    pub limit_bytes: Option<u64>,
    /// What its class says.
    pub parameters: ClaimParameters,
    /// What may be changed later.
    pub mutable: MutableParameters,
    /// What its first content comes from.
    pub source: Option<ClaimSource>,
}

/// Claims, or snapshots, in the order of their ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    /// What is on the page.
    pub items: Vec<T>,
    /// The id after which the next page begins; `None`: this is the last one.
    pub next: Option<VolumeId>,
}

/// Which snapshots to list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapshotFilter {
    /// Only those of this claim.
    pub source: Option<String>,
    /// Only this one.
    pub id: Option<String>,
}

/// Where a claim is in use on its node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClaimUse {
    /// Where it is mounted, staging paths included.
    pub targets: Vec<PathBuf>,
    /// Why it is not healthy, in words; empty: it is.
    pub problems: Vec<String>,
}

/// A mount of a claim: NodeStageVolume and NodePublishVolume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountClaim {
    /// Which claim.
    pub claim: VolumeId,
    /// Where; the last component is made here if it is not there. A staging path exists already.
    pub target: PathBuf,
    /// Whether it is the staging path: that is made by the caller, and stays when it is unmounted.
    pub staging: bool,
    /// For a publish: the staging path of which it is a bind.
    pub staged_at: Option<PathBuf>,
    /// Whether the pod may only read.
    pub read_only: bool,
    /// Whether it may be published at several targets at once.
    pub multiple_targets: bool,
    /// The pod's fsGroup.
    pub mount_group: Option<u32>,
}

/// What a Controller service needs of whoever holds the claims.
#[async_trait::async_trait]
pub trait Claims: std::fmt::Debug + Send + Sync + 'static {
    /// Makes a claim, empty or a clone; the same request again gives the same claim, another one of that name
    /// `Error::Exists`.
    async fn create_claim(&self, request: CreateClaim) -> Result<Claim>;
    /// Deletes a claim; what is not there is deleted. Clones and snapshots stay whole. `Error::ClaimInUse` when it
    /// is mounted, held open or attached.
    async fn delete_claim(&self, id: &str) -> Result<()>;
    /// A claim.
    async fn claim(&self, id: &str) -> Result<Claim>;
    /// Claims after `after`, at most `most`.
    async fn claims(&self, after: Option<&VolumeId>, most: usize) -> Result<Page<Claim>>;
    /// How a claim is used and how it is.
    async fn claim_use(&self, id: &str) -> Result<ClaimUse>;
    /// Makes a claim larger; smaller is Ok and changes nothing.
    async fn expand_claim(&self, id: &str, required: u64, limit: Option<u64>) -> Result<Claim>;
    /// Changes what may be changed; what is not named stays.
    async fn modify_claim(&self, id: &str, mutable: MutableParameters) -> Result<Claim>;
    /// Notes an attachment; the same again is Ok, another one on that node `Error::Different`.
    async fn attach_claim(&self, id: &str, attachment: Attachment) -> Result<()>;
    /// Forgets an attachment; `None`: all. What is not there is forgotten.
    async fn detach_claim(&self, id: &str, node: Option<&str>) -> Result<()>;
    /// Takes a snapshot; the same name and source again gives the same, another source `Error::Exists`.
    async fn create_snapshot(&self, name: &str, source: &str) -> Result<Snapshot>;
    /// Deletes a snapshot; what is not there is deleted. `Error::Unsupported` for one of a group.
    async fn delete_snapshot(&self, id: &str) -> Result<()>;
    /// Snapshots after `after`, at most `most`.
    async fn snapshots(
        &self,
        filter: &SnapshotFilter,
        after: Option<&SnapshotId>,
        most: usize,
    ) -> Result<Page<Snapshot>>;
    /// Takes snapshots of several claims at one instant.
    async fn create_group(
        &self,
        name: &str,
        sources: &[String],
    ) -> Result<(SnapshotGroup, Vec<Snapshot>)>;
    /// Deletes a group and its snapshots; what is not there is deleted.
    async fn delete_group(&self, id: &str) -> Result<()>;
    /// A group and its snapshots.
    async fn group(&self, id: &str) -> Result<(SnapshotGroup, Vec<Snapshot>)>;
    /// Bytes that new claims may still take, and the largest one of them.
    async fn capacity(&self) -> Result<u64>;
}

#[async_trait::async_trait]
impl Claims for Engine {
    async fn create_claim(&self, request: CreateClaim) -> Result<Claim> {
        self.finish(create::create(self.inner.clone(), request))
            .await
    }

    async fn delete_claim(&self, id: &str) -> Result<()> {
        self.finish(create::delete(self.inner.clone(), id.to_owned()))
            .await
    }

    async fn claim(&self, id: &str) -> Result<Claim> {
        hold::claim(&self.inner, &hold::parse(id)?)
    }

    async fn claims(&self, after: Option<&VolumeId>, most: usize) -> Result<Page<Claim>> {
        Ok(list::claims(&self.inner.state.lock(), after, most))
    }

    async fn claim_use(&self, id: &str) -> Result<ClaimUse> {
        let (inner, id) = (self.inner.clone(), hold::parse(id)?);
        self.inner
            .calls
            .run(move || list::claim_use(&inner, &id))
            .await?
    }

    async fn expand_claim(&self, id: &str, required: u64, limit: Option<u64>) -> Result<Claim> {
        let id = hold::parse(id)?;
        self.finish(change::expand(self.inner.clone(), id, required, limit))
            .await
    }

    async fn modify_claim(&self, id: &str, mutable: MutableParameters) -> Result<Claim> {
        let id = hold::parse(id)?;
        self.finish(change::modify(self.inner.clone(), id, mutable))
            .await
    }

    async fn attach_claim(&self, id: &str, attachment: Attachment) -> Result<()> {
        let id = hold::parse(id)?;
        self.finish(change::attach(self.inner.clone(), id, attachment))
            .await
    }

    async fn detach_claim(&self, id: &str, node: Option<&str>) -> Result<()> {
        let node = node.map(str::to_owned);
        self.finish(change::detach(self.inner.clone(), id.to_owned(), node))
            .await
    }

    async fn create_snapshot(&self, name: &str, source: &str) -> Result<Snapshot> {
        let (name, source) = (name.to_owned(), source.to_owned());
        self.finish(snapshot::create(self.inner.clone(), name, source))
            .await
    }

    async fn delete_snapshot(&self, id: &str) -> Result<()> {
        self.finish(snapshot::delete(self.inner.clone(), id.to_owned()))
            .await
    }

    async fn snapshots(
        &self,
        filter: &SnapshotFilter,
        after: Option<&SnapshotId>,
        most: usize,
    ) -> Result<Page<Snapshot>> {
        list::snapshots(&self.inner.state.lock(), filter, after, most)
    }

    async fn create_group(
        &self,
        name: &str,
        sources: &[String],
    ) -> Result<(SnapshotGroup, Vec<Snapshot>)> {
        let (name, sources) = (name.to_owned(), sources.to_vec());
        self.finish(snapshot::create_group(self.inner.clone(), name, sources))
            .await
    }

    async fn delete_group(&self, id: &str) -> Result<()> {
        self.finish(snapshot::delete_group(self.inner.clone(), id.to_owned()))
            .await
    }

    async fn group(&self, id: &str) -> Result<(SnapshotGroup, Vec<Snapshot>)> {
        snapshot::group(&self.inner.state.lock(), id)
    }

    async fn capacity(&self) -> Result<u64> {
        let inner = self.inner.clone();
        let space = self.inner.calls.run(move || inner.dirs.root.space());
        let space = space.await?.doing("ask for the pool's room")?;
        Ok(space.bytes_available)
    }
}

impl Engine {
    /// Mounts a claim (NodeStageVolume, NodePublishVolume). Repeatable.
    pub async fn mount_claim(&self, request: MountClaim) -> Result<()> {
        mount::mount(&self.inner, request).await
    }

    /// Unmounts what is at `target` (NodeUnpublishVolume, NodeUnstageVolume), also of claims that nobody has heard of.
    /// The claim stays. A staging path itself stays too.
    pub async fn unmount_claim(&self, claim: &str, target: &Path, staging: bool) -> Result<()> {
        mount::unmount(&self.inner, claim, target, staging).await
    }

    /// Whether there is a claim of this id.
    #[must_use]
    pub fn has_claim(&self, id: &str) -> bool {
        let id: Option<VolumeId> = id.parse().ok();
        let state = self.inner.state.lock();
        id.is_some_and(|id| state.claims.contains_key(&id))
    }

    /// An operation of several steps that runs to its end, also when its caller goes away. When the thread that serves the call ends it
    /// is dropped between two steps, which takes it back.
    async fn finish<T: Send + 'static>(
        &self,
        operation: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let running = self.inner.spawn_here(operation);
        running.await.unwrap_or(Err(Error::ShuttingDown))
    }
}
