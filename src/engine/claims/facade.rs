//! The methods of [`Engine`] for claims and snapshots. Each method checks its arguments and calls
//! the module that does the work.

use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::receive::ReceiveClaim;
use super::types::{Capacity, ClaimUse, CreateClaim, Group, MountClaim, Page, SnapshotFilter};
use super::{change, create, list, lookup, mount, receive, snapshot};
use crate::archive::toc::Table;
use crate::engine::Engine;
use crate::engine::error::{Context, Error, Result};
use crate::engine::shared::Inner;
use crate::engine::space;
use crate::engine::threads::Pool;
use crate::engine::transfer::{self, LayerPlace, Opened, ReceiveError};
use crate::model::{Attachment, MutableChange, PersistentVolume, Snapshot, SnapshotId, VolumeId};

/// Claims as objects: what a Controller service needs of the node that they are on.
impl Engine {
    /// Creates a claim, empty or as a clone. A repeated request returns the same claim; another
    /// request with that name fails with [`Error::Exists`].
    pub async fn create_claim(&self, request: CreateClaim) -> Result<PersistentVolume> {
        self.finish(create::create(self.inner.clone(), request))
            .await
    }

    /// Makes a claim of a snapshot of another node. `make` makes one layer, as in
    /// [`Engine::receive`]. `may_enter` is asked once all content is here, and just before the
    /// claim appears. The claim becomes whole and durable, or nothing. Blocks. Two calls for one
    /// claim at once are not allowed.
    pub fn receive_claim<E>(
        &self,
        request: ReceiveClaim,
        progress: &AtomicU64,
        make: impl FnMut(usize, &LayerPlace<'_>) -> std::result::Result<Arc<Table>, E>,
        may_enter: impl FnOnce() -> Result<()>,
    ) -> std::result::Result<PersistentVolume, ReceiveError<E>> {
        self.inner.refuse_degraded()?;
        let received = receive::receive(&self.inner, request, progress, make, may_enter);
        transfer::finish(&self.inner, received)
    }

    /// Opens a snapshot layer by layer, to be sent to another node. Blocks.
    pub fn open_snapshot(&self, id: &SnapshotId) -> Result<Opened> {
        transfer::open_snapshot(&self.inner, id)
    }

    /// Whether an earlier request made a claim of that name.
    #[must_use]
    pub fn has_claim_named(&self, name: &str) -> bool {
        let id = lookup::id_of(lookup::CLAIM, name);
        self.inner.state.lock().claims.contains(&id)
    }

    /// Deletes a claim; succeeds if there is none. Clones and snapshots stay whole. Fails with
    /// [`Error::ClaimInUse`] if it is mounted, held open or attached.
    pub async fn delete_claim(&self, id: &str) -> Result<()> {
        self.finish(create::delete(self.inner.clone(), id.to_owned()))
            .await
    }

    /// Waits until the `ttl` of claims has deleted them. One call at a time; between two calls,
    /// none is missed.
    pub async fn claims_expired(&self) {
        self.inner.collector.expired.notified().await;
    }

    /// A claim.
    pub fn claim(&self, id: &str) -> Result<PersistentVolume> {
        lookup::claim(&self.inner, &lookup::parse(id)?)
    }

    /// Claims after `after`, at most `most`.
    #[must_use]
    pub fn claims(&self, after: Option<&VolumeId>, most: usize) -> Page<PersistentVolume> {
        list::claims(&self.inner.state.lock(), after, most)
    }

    /// How a claim is used and how it is.
    pub async fn claim_use(&self, id: &str) -> Result<ClaimUse> {
        let id = lookup::parse(id)?;
        let job = move |inner: &Arc<Inner>| list::claim_use(inner, &id);
        self.inner.run(Pool::Calls, job).await
    }

    /// Makes a claim larger; smaller is Ok and changes nothing. [`Error::OutOfRange`] for more than
    /// the pool, or than `limit`.
    pub async fn expand_claim(
        &self,
        id: &str,
        required: u64,
        limit: Option<u64>,
    ) -> Result<PersistentVolume> {
        let id = lookup::parse(id)?;
        self.finish(change::expand(self.inner.clone(), id, required, limit))
            .await
    }

    /// Changes mutable parameters. Those that the request does not name keep their values.
    pub async fn modify_claim(&self, id: &str, mutable: MutableChange) -> Result<PersistentVolume> {
        let id = lookup::parse(id)?;
        self.finish(change::modify(self.inner.clone(), id, mutable))
            .await
    }

    /// Records an attachment. A repeated request succeeds; a different one for that node fails with
    /// [`Error::Exists`].
    pub async fn attach_claim(&self, id: &str, attachment: Attachment) -> Result<()> {
        let id = lookup::parse(id)?;
        self.finish(change::attach(self.inner.clone(), id, attachment))
            .await
    }

    /// Removes an attachment; `None`: all of them. Succeeds if there is none.
    pub async fn detach_claim(&self, id: &str, node: Option<&str>) -> Result<()> {
        let node = node.map(str::to_owned);
        self.finish(change::detach(self.inner.clone(), id.to_owned(), node))
            .await
    }

    /// Takes a snapshot. A repeated name and source returns the same snapshot; another source fails
    /// with [`Error::Exists`].
    pub async fn create_snapshot(&self, name: &str, source: &str) -> Result<Snapshot> {
        let (name, source) = (name.to_owned(), source.to_owned());
        self.finish(snapshot::create(self.inner.clone(), name, source))
            .await
    }

    /// Deletes a snapshot; succeeds if there is none. Fails with [`Error::OfGroup`] for a member of
    /// a group.
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
        let page = list::snapshots(&self.inner.state.lock(), filter, after, most);
        Ok(page)
    }

    /// Takes snapshots of several claims at one instant. A repeated name and sources returns the
    /// same group; other sources fail with [`Error::Exists`].
    pub async fn create_group(&self, name: &str, sources: &[String]) -> Result<Group> {
        let (name, sources) = (name.to_owned(), sources.to_vec());
        self.finish(snapshot::create_group(self.inner.clone(), name, sources))
            .await
    }

    /// Deletes a group and its snapshots; succeeds if there is none.
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
        let job = move |inner: &Arc<Inner>| {
            let space = inner.dirs.root.space().context("ask for the pool's room")?;
            let free = space
                .bytes_available
                .saturating_add(space::evictable(inner, 0));
            Ok(Capacity {
                available: free.min(space.bytes),
                largest: space.bytes,
            })
        };
        self.inner.run(Pool::Calls, job).await
    }
}

impl Engine {
    /// Mounts a claim (NodeStageVolume, NodePublishVolume). Repeatable.
    pub async fn mount_claim(&self, request: MountClaim) -> Result<()> {
        mount::mount(&self.inner, request).await
    }

    /// Unmounts what is at `target` (NodeUnpublishVolume, NodeUnstageVolume), also of claims that
    /// are unknown. The claim stays. A staging path itself stays too.
    pub async fn unmount_claim(&self, claim: &str, target: &Path, staging: bool) -> Result<()> {
        mount::unmount(&self.inner, claim, target, staging).await
    }

    /// Whether there is a claim of this id.
    #[must_use]
    pub fn has_claim(&self, id: &str) -> bool {
        let id: Option<VolumeId> = id.parse().ok();
        let state = self.inner.state.lock();
        id.is_some_and(|id| state.claims.contains(&id))
    }

    /// An operation of several steps that runs to its end, also when its caller goes away. When the
    /// thread that serves the call ends it is dropped between two steps, which takes it back.
    async fn finish<T: Send + 'static>(
        &self,
        operation: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let running = self.inner.lifetime.spawn(operation);
        running.await.unwrap_or(Err(Error::ShuttingDown))
    }
}
