//! Claims: volumes that outlive pods, their clones, snapshots, and groups of snapshots.
//!
//! An [`Engine`] holds those of its own pool and knows of no other node. The Controller service talks to [`Claims`], which
//! does (`nodes`).
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
//! | `nodes` | the seam to the Controller service: claims, on whichever node they are |
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
mod nodes;
pub(super) mod recover;
mod snapshot;
pub(super) mod tidy;

use std::future::Future;
use std::path::{Path, PathBuf};

use super::error::{Doing, Error, Result};
use super::{Engine, reap};
use crate::model::{
    Attachment, Claim, ClaimParameters, ClaimSource, MutableChange, MutableParameters, Snapshot,
    SnapshotGroup, SnapshotId, VolumeId,
};

pub use nodes::{Claims, OneNode};

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

/// A group, and its snapshots.
pub type Group = (SnapshotGroup, Vec<Snapshot>);

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

/// How much new claims may still take. Their sizes are limits and set nothing aside, so the two are not compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Bytes that can be written: those that are free, and those that eviction would free.
    pub available: u64,
    /// The size of the largest claim that can be made.
    pub largest: u64,
}

/// Claims as objects: what a Controller service needs of the node that they are on.
impl Engine {
    /// Makes a claim, empty or a clone; the same request again gives the same claim, another one of that name
    /// [`Error::Exists`].
    pub async fn create_claim(&self, request: CreateClaim) -> Result<Claim> {
        self.finish(create::create(self.inner.clone(), request))
            .await
    }

    /// Whether an earlier request made a claim of that name; not if nobody knows whether it did.
    #[must_use]
    pub fn has_claim_named(&self, name: &str) -> bool {
        create::has(&self.inner, name)
    }

    /// Deletes a claim; what is not there is deleted. Clones and snapshots stay whole. [`Error::ClaimInUse`] when it
    /// is mounted, held open or attached.
    pub async fn delete_claim(&self, id: &str) -> Result<()> {
        self.finish(create::delete(self.inner.clone(), id.to_owned()))
            .await
    }

    /// A claim.
    pub fn claim(&self, id: &str) -> Result<Claim> {
        hold::claim(&self.inner, &hold::parse(id)?)
    }

    /// Claims after `after`, at most `most`.
    #[must_use]
    pub fn claims(&self, after: Option<&VolumeId>, most: usize) -> Page<Claim> {
        list::claims(&self.inner.state.lock(), after, most)
    }

    /// How a claim is used and how it is.
    pub async fn claim_use(&self, id: &str) -> Result<ClaimUse> {
        let (inner, id) = (self.inner.clone(), hold::parse(id)?);
        self.inner
            .calls
            .run(move || list::claim_use(&inner, &id))
            .await?
    }

    /// Makes a claim larger; smaller is Ok and changes nothing. [`Error::OutOfRange`] for more than the pool, or than `limit`.
    pub async fn expand_claim(&self, id: &str, required: u64, limit: Option<u64>) -> Result<Claim> {
        let id = hold::parse(id)?;
        self.finish(change::expand(self.inner.clone(), id, required, limit))
            .await
    }

    /// Changes what may be changed; what is not named stays.
    pub async fn modify_claim(&self, id: &str, mutable: MutableChange) -> Result<Claim> {
        let id = hold::parse(id)?;
        self.finish(change::modify(self.inner.clone(), id, mutable))
            .await
    }

    /// Notes an attachment; the same again is Ok, another one on that node [`Error::Exists`].
    pub async fn attach_claim(&self, id: &str, attachment: Attachment) -> Result<()> {
        let id = hold::parse(id)?;
        self.finish(change::attach(self.inner.clone(), id, attachment))
            .await
    }

    /// Forgets an attachment; `None`: all. What is not there is forgotten.
    pub async fn detach_claim(&self, id: &str, node: Option<&str>) -> Result<()> {
        let node = node.map(str::to_owned);
        self.finish(change::detach(self.inner.clone(), id.to_owned(), node))
            .await
    }

    /// Takes a snapshot; the same name and source again gives the same, another source [`Error::Exists`].
    pub async fn create_snapshot(&self, name: &str, source: &str) -> Result<Snapshot> {
        let (name, source) = (name.to_owned(), source.to_owned());
        self.finish(snapshot::create(self.inner.clone(), name, source))
            .await
    }

    /// Deletes a snapshot; what is not there is deleted. [`Error::OfGroup`] for one of a group.
    pub async fn delete_snapshot(&self, id: &str) -> Result<()> {
        self.finish(snapshot::delete(self.inner.clone(), id.to_owned()))
            .await
    }

    /// Snapshots after `after`, at most `most`.
    pub fn snapshots(
        &self,
        filter: &SnapshotFilter,
        after: Option<&SnapshotId>,
        most: usize,
    ) -> Result<Page<Snapshot>> {
        list::snapshots(&self.inner.state.lock(), filter, after, most)
    }

    /// Takes snapshots of several claims at one instant; the same name and sources again gives the same, other sources
    /// [`Error::Exists`].
    pub async fn create_group(&self, name: &str, sources: &[String]) -> Result<Group> {
        let (name, sources) = (name.to_owned(), sources.to_vec());
        self.finish(snapshot::create_group(self.inner.clone(), name, sources))
            .await
    }

    /// Deletes a group and its snapshots; what is not there is deleted.
    pub async fn delete_group(&self, id: &str) -> Result<()> {
        self.finish(snapshot::delete_group(self.inner.clone(), id.to_owned()))
            .await
    }

    /// A group and its snapshots.
    pub fn group(&self, id: &str) -> Result<Group> {
        snapshot::group(&self.inner.state.lock(), id)
    }

    /// How much new claims may still take.
    pub async fn capacity(&self) -> Result<Capacity> {
        let inner = self.inner.clone();
        let job = move || {
            let space = inner.dirs.root.space().doing("ask for the pool's room")?;
            let free = space
                .bytes_available
                .saturating_add(reap::evictable(&inner, 0));
            Ok(Capacity {
                available: free.min(space.bytes),
                largest: space.bytes,
            })
        };
        self.inner.calls.run(job).await?
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

    /// Runs an operation of several steps to its end, also when its caller goes away.
    async fn finish<T: Send + 'static>(
        &self,
        operation: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let running = self.inner.spawn(operation);
        running.await.unwrap_or(Err(Error::ShuttingDown))
    }
}
