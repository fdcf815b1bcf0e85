//! The engine: fork, seal, publish, unpublish, commit, destroy, list, recover, collect garbage.
//!
//! The engine decides *whether* and *when* something is done. A backend knows *how*. The store
//! persists it. The engine knows nothing of CSI, gRPC or Kubernetes.
//!
//! # State
//!
//! Every module gets [`Inner`]: one subsystem a field. `state` is what is known in memory, in parts
//! that keep their fields private: `volumes`, `catalog`, `claims`, `pinned`, `write_back`,
//! `health`, `fences`, `policies`. Who refers to which layer is computed from them, in `state`, and
//! never stored. The other subsystems are `durability`, `collector`, `space`, `teardown`,
//! `threads`, `lifetime` and `policies`, the record of the policies in the pool.
//!
//! # Locking
//!
//! - One [`Guard`] per volume: at most one operation runs on it. A second caller is told at once
//!   ([`Error::Busy`]), or waits if the first is a chore of the driver's own.
//! - `state`: one mutex, never held across a system call.
//! - `collector.lock`: held while artifacts are removed from the index, or their entries rewritten.
//!   A comparison holds it while it reads memory and the names of layers. It is never held across a
//!   walk. But a layer that leaves its place may be read for its table of contents: then the holder
//!   waits until that ends, at most ten seconds (`table_digests`).
//! - `durability.lock_names`: held from the look at the names in memory until the index has them.
//!   So the last writer of a name is its owner. Taken after the collector, before the state.
//! - `durability.lock`: held from `syncfs` until the index names the synced content. The kernel
//!   reports a failed write-back once, to the first caller. Taken before the collector and the
//!   names.
//!
//! # Threads
//!
//! Nothing that blocks runs on the async runtime: each slow kind of work has a pool of its own
//! (`threads`) and delays only work of its kind. A queued job runs to its end, also when its caller
//! goes away.
//!
//! # Modules
//!
//! From the ground up; `ENGINE_TIERS` in `tests/architecture.rs` says which may use which.
//!
//! | modules | what is in them |
//! |---|---|
//! | `types`, `error`, `notice`, `counters` | values, errors, news and metrics for callers |
//! | `clock`, `lifetime`, `threads`, `backoff`, `target` | parts that know no engine |
//! | `pool`, `pool_scan` | the pool's identity, its trash, its directories |
//! | `lifecycle` | the states of a volume, and what follows from what is observed |
//! | `volumes`, `catalog`, `artifacts`, `health`, `durability`, `state` | what is known in memory |
//! | `collector`, `rounds`, `trash`, `teardowns` | what waits for background work |
//! | `parts`, `table_digests` | partial layers of failed fetches; known tables of contents |
//! | `shared` | [`Inner`], which all modules below get |
//! | `guard`, `pins` | what an operation holds: its volume, the layers that must stay |
//! | `layers`, `mounts`, `pending`, `policies`, `space` | helpers of many operations |
//! | `transaction`, `writeback_failure`, `fences` | the index; a failed write-back; clears |
//! | `publish`, `republish`, `hit` | the beginning of a volume |
//! | `unpublish`, `teardown`, `quiesce`, `seal`, `commit` | its end |
//! | [`claims`] | persistent volumes, clones, snapshots |
//! | `transfer` | content from and to archives, other nodes and the shared tier |
//! | `reap` | garbage collection, and the order of its steps |
//! | `remove`, `evict`, `budgets`, `purge`, `measure`, `flatten` | these steps |
//! | `tables` | tables of contents |
//! | `open`, `recover`, `orphans`, `rebuild` | the start, and what an earlier process left |
//! | `fsck`, `fsck_input`, `scrub` | the comparison of index and directories |
//! | `query`, `outcome`, `metrics` | questions, and outcomes of pods |
//! | this file, `cluster`, `sharing`, `claims::facade` | the methods of [`Engine`] |

mod artifacts;
mod backoff;
mod budgets;
mod catalog;
pub mod claims;
mod clock;
mod cluster;
mod collector;
mod commit;
mod counters;
mod durability;
mod error;
mod evict;
pub mod failpoint;
mod fences;
mod flatten;
mod fsck;
mod fsck_input;
mod guard;
mod health;
mod hit;
mod layers;
mod lifecycle;
mod lifetime;
mod measure;
mod metrics;
mod mounts;
mod multiset;
mod name_changes;
pub mod notice;
mod open;
mod orphans;
mod outcome;
mod parts;
mod pending;
mod pins;
mod policies;
mod pool;
mod pool_scan;
mod publish;
mod purge;
mod query;
mod quiesce;
mod reap;
mod rebuild;
mod recover;
mod remove;
mod republish;
mod rounds;
mod scrub;
mod seal;
mod shared;
mod sharing;
mod space;
mod state;
mod table_digests;
mod tables;
mod target;
mod teardown;
mod teardowns;
mod threads;
mod transaction;
mod transfer;
mod trash;
mod types;
mod unpublish;
mod volumes;
mod writeback_failure;

use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use cluster::{NameState, NameWatch, NamedContent};
pub use counters::Counters;
pub use error::{Error, Result, Shortage};
pub use metrics::Metrics;
pub use notice::{Notice, Notices};
pub use open::ClosedPool;
pub use shared::{Config, Pods};
pub use transfer::{
    Export, Exported, ImportRequest, Imported, LayerPlace, OpenArtifact, OpenLayer, OpenSnapshot,
    Opened, ReceiveError, ReceiveRequest, Received, RollbackOrder, Source, View,
};
pub use types::{
    ArtifactRow, Awaited, ContentSource, FetchedContent, Finding, LocalArtifact, OutcomeReport,
    PublishRequest, Published, Reaped, Rebuilt, ReceiveLayer, Status, Tables, VolumeRow,
    VolumeState, VolumeStats,
};

use crate::archive::{Codec, Progress};
use crate::backend::BackendKind;
use crate::model::{ArtifactId, Name, Outcome, PodUid, Reference, Tenant, VolumeId};
use crate::store::Contents;
use crate::sys;

use error::Context;
use pool::boot_id;
use recover::Recovered;
use shared::Inner;
use threads::Pool;
use transaction::Transaction;

/// One pool, in the care of this process. Cheap to clone: clones share it.
#[derive(Debug, Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

/// Recovers what an earlier process left, and notes a write-back error that no process has noted.
async fn take_up(
    inner: &Arc<Inner>,
    contents: Contents,
    lost: Option<sys::Error>,
) -> Result<Recovered> {
    let job = move |inner: &Arc<Inner>| {
        let recovered = recover::recover(inner, contents)?;
        match lost {
            Some(lost) => writeback_failure::taint(inner, &lost),
            None => writeback_failure::finish_taint(inner)?,
        }
        writeback_failure::note_unnoted(inner);
        if !recovered.changes.is_empty() {
            match inner.transact(&recovered.changes) {
                // Each start finds the same changes. A pod that filled the disk can only end if
                // the driver starts.
                Transaction::RolledBack(error @ Error::Full(_)) => tracing::warn!(%error,
                    "the index keeps entries of what is gone until a start that finds space"),
                transaction => transaction.result()?,
            }
            failpoint::point(failpoint::Point::RecoverIndexed);
        }
        let _made_later_if_not_now = inner.keep_reserve();
        Ok(recovered)
    };
    inner.run(Pool::Calls, job).await
}

impl Engine {
    /// Opens the pool, makes it when it is new, and recovers what an earlier process left.
    /// Must run in a tokio runtime.
    pub async fn open(config: Config) -> Result<Self> {
        let opened = async move {
            let opened = open::open(&config)?;
            Ok::<_, Error>((config, opened))
        };
        let opened = sys::apart("open", opened).await;
        let (config, pool) = opened.unwrap_or(Err(Error::Defect))?;
        let (inner, sealed) =
            Inner::start(config, pool.origin, pool.dirs, pool.backend, pool.index)?;
        let recovered = take_up(&inner, pool.contents, pool.lost).await?;
        let lifetime = &inner.lifetime;
        lifetime.spawn(commit::commit_loop(inner.clone(), sealed));
        lifetime.spawn(transaction::await_index(inner.clone()));
        lifetime.spawn(reap::reap_loop(inner.clone()));
        lifetime.spawn(reap::walk_loop(inner.clone()));
        lifetime.spawn(reap::merge_loop(inner.clone()));
        lifetime.spawn(scrub::watch_loop(inner.clone()));
        lifetime.spawn(tables::table_loop(inner.clone()));
        for (layer, below) in recovered.read {
            quiesce::keep_while_held(&inner, layer, below, None);
        }
        for left in recovered.leaving {
            teardown::begin_soon(&inner, left);
        }
        inner.wake_reaper();
        Ok(Self { inner })
    }

    /// Makes a volume's content if it has none, and mounts it at its target. Idempotent. A call
    /// that has begun is finished, also when the caller goes away.
    pub async fn publish(&self, request: PublishRequest) -> Result<Published> {
        let (kind, began) = (request.spec.kind.type_name(), Instant::now());
        let published = publish::publish(&self.inner, request).await;
        let counters = self.inner.counters();
        match &published {
            Ok(published) if !published.already => counters.published(kind, began.elapsed()),
            Err(Error::NoSuchContent(_) | Error::Coming { .. }) => counters.missed(kind),
            _ => {}
        }
        published
    }

    /// Detaches what is mounted at `target`, removes the mount point, and records the volume's seal
    /// intent. Also for unknown volumes; `volume` need not be an id. A persistent volume is
    /// unmounted and stays.
    pub async fn unpublish(&self, volume: &str, target: &Path) -> Result<()> {
        if self.has_claim(volume) {
            return self.unmount_claim(volume, target, false).await;
        }
        unpublish::unpublish(&self.inner, volume, target).await
    }

    /// What a published volume uses. Never walks: starts a measurement when the last one is old.
    pub async fn stats(&self, volume: &VolumeId, path: &Path) -> Result<VolumeStats> {
        query::stats(&self.inner, volume, path).await
    }

    /// Reports how a pod's work ended, and returns what follows for its volumes. The first report
    /// wins.
    pub async fn report_outcome(&self, pod: &PodUid, outcome: Outcome) -> Result<OutcomeReport> {
        outcome::report(&self.inner, pod, outcome).await
    }

    /// The pods whose outcome decides about a volume that exists, and was not told yet; each once.
    #[must_use]
    pub fn awaited_outcomes(&self) -> Vec<Awaited> {
        outcome::awaited(&self.inner)
    }

    /// How many notices were dropped, because the channel was full.
    #[must_use]
    pub fn lost_notices(&self) -> u64 {
        let notices = &self.inner.config.notices;
        notices.as_ref().map_or(0, Notices::lost)
    }

    /// The volumes, by tenant and id.
    #[must_use]
    pub fn volumes(&self, tenant: Option<&Tenant>) -> Vec<VolumeRow> {
        query::volumes(&self.inner.state.lock(), tenant)
    }

    /// Has sizes of volumes found out that are not known, or not of late: some, in the background.
    pub fn measure_volumes(&self) {
        query::measure_some(&self.inner);
    }

    /// The artifacts, by tenant and name; caches are the rows whose name is one.
    #[must_use]
    pub fn artifacts(&self, tenant: Option<&Tenant>) -> Vec<ArtifactRow> {
        query::artifacts(&self.inner, tenant)
    }

    /// Deletes the artifact of this name. `InUse`: a volume is a fork of it. A cache loses its name
    /// at once, and its content with its last fork.
    pub async fn destroy(&self, tenant: &Tenant, reference: &Reference) -> Result<()> {
        remove::destroy(
            &self.inner,
            Name {
                tenant: tenant.clone(),
                reference: reference.clone(),
            },
        )
        .await
    }

    /// Collects garbage now, and returns when all that can be deleted is.
    pub async fn reap(&self) -> Result<Reaped> {
        self.inner.refuse_degraded()?;
        reap::reap(&self.inner).await
    }

    /// Compares index, records, directories and mounts; changes nothing. Empty: all is well.
    pub async fn check(&self) -> Result<Vec<Finding>> {
        self.inner.refuse_degraded()?;
        scrub::check(&self.inner).await
    }

    /// Compares the parts of a pool that no driver has open. Writes and repairs nothing.
    pub fn check_offline(pool: &Path) -> Result<Vec<Finding>> {
        fsck::check_offline(pool, &boot_id()?)
    }

    /// Rebuilds the index of a pool that no driver has open, from the records beside the layers and
    /// in the directories of persistent volumes. The old index is kept beside it.
    pub fn rebuild_index(pool: &Path) -> Result<Rebuilt> {
        rebuild::rebuild(pool)
    }

    /// What [`Self::rebuild_index`] would make. Writes nothing.
    pub fn preview_index(pool: &Path) -> Result<Rebuilt> {
        rebuild::preview(pool)
    }

    /// Whether the index of a pool that no driver has open can be read, or a newer version of the
    /// driver made it.
    pub fn has_readable_index(pool: &Path) -> Result<bool> {
        rebuild::has_readable_index(pool)
    }

    /// Waits until every retired volume is sealed durably or gone, except those whose outcome is
    /// not known or whose files a process holds open. A degraded or closing engine seals nothing
    /// more.
    pub async fn settled(&self) {
        // Not every change of state is signalled (a volume found to be held). This is a query,
        // not a decision.
        const LOOK_AGAIN: Duration = Duration::from_millis(20);
        let settled = || {
            self.inner.state.when(|state| {
                let mut retiring = state.volumes.all_retiring();
                let moves = retiring.any(|(_, volume)| volume.state() == VolumeState::Sealing);
                (!moves || self.inner.lifetime.is_stopping()).then_some(())
            })
        };
        while tokio::time::timeout(LOOK_AGAIN, settled()).await.is_err() {}
    }

    /// Which backend the pool has.
    #[must_use]
    pub fn backend(&self) -> BackendKind {
        self.inner.backend.kind()
    }

    /// What is known of a pool that cannot be opened; `None`: there is none.
    pub async fn look_offline(pool: &Path) -> Option<ClosedPool> {
        let pool = pool.to_owned();
        let look = async move { open::look(&pool) };
        sys::apart("look", look).await.ok().flatten()
    }

    /// Unmounts what is at `target`, and removes the mount point unless it is a staging path.
    /// Nothing more can be done for pods that end while the pool cannot be opened.
    pub async fn unmount_offline(target: &Path, staging: bool) -> Result<()> {
        let target = target.to_owned();
        let unmount = async move { mounts::detach(&target, staging).map(drop) };
        let unmounted = sys::apart("unmount", unmount).await;
        unmounted.unwrap_or(Err(Error::Defect))
    }

    /// The engine as a whole.
    pub async fn status(&self) -> Result<Status> {
        let status = |inner: &Arc<Inner>| query::status(inner);
        self.inner.run(Pool::Calls, status).await
    }

    /// Whether the pool takes changes: tries the smallest one. Waits while the disk does not
    /// answer, on one thread for all callers.
    pub async fn takes_writes(&self) -> Result<()> {
        self.inner.refuse_degraded()?;
        let one_at_a_time = self.inner.durability.probe().await;
        let job = move |inner: &Arc<Inner>| {
            let _one_at_a_time = one_at_a_time;
            inner
                .dirs
                .root
                .touch()
                .context("change something in the pool")
        };
        self.inner.run(Pool::Calls, job).await
    }

    /// What it has, in numbers. Looks at each artifact and name under the lock of the state.
    pub async fn metrics(&self) -> Result<Metrics> {
        self.inner.run(Pool::Calls, metrics::collect).await
    }

    /// Waits until the process must end, so that the next start reads the index whose content this
    /// engine does not know ([`Error::Degraded`]). Most engines wait for ever.
    pub async fn needs_restart(&self) {
        self.inner.lifetime.restart_asked().await;
    }

    /// What it has done since it was opened.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        self.inner.counters()
    }

    /// Does the same as [`Engine::shutdown`], for a limited time: a disk may never answer. The next
    /// start does the rest, as after a `kill -9`.
    pub async fn shutdown_within(&self, at_most: Duration) {
        if tokio::time::timeout(at_most, self.shutdown()).await.is_ok() {
            return;
        }
        self.inner.lifetime.stop();
        let (operations, leaving) = {
            let state = self.inner.state.lock();
            let operations = state.volumes.busy().map(ToString::to_string);
            let leaving = state.volumes.all_retiring().count();
            (operations.collect::<Vec<_>>(), leaving)
        };
        tracing::warn!(
            operations = %operations.join(" "),
            leaving,
            "the grace period ended before the pool was closed: the operations and teardowns that \
             still run are left to the next start"
        );
    }

    /// Ends: running operations finish, background work stops at its next safe point, and the index
    /// is closed. Mounts stay. Takes as long as the disk needs, on a thread that others do not
    /// need.
    pub async fn shutdown(&self) {
        let inner = &self.inner;
        inner.state.lock().health.close();
        // Waiters see that the engine closes. They are notified once, before this call waits: a
        // loop that notifies would wake itself, and never let the others run.
        inner.state.notify();
        let none = inner
            .state
            .when(|state| state.volumes.busy().next().is_none().then_some(()));
        none.await;
        inner.lifetime.stop();
        inner.lifetime.ended().await;
        let job = |inner: &Arc<Inner>| {
            // After the last deletion and merge: written before, a deleted entry would come back.
            let _one_at_a_time = inner.collector.lock();
            let uses = claims::maintenance::uses(inner);
            if let Err(error) = inner.transact_with_unwritten(uses) {
                tracing::warn!(%error,
                    "the times at which artifacts and volumes were last used could not be saved");
            }
            Ok(())
        };
        if inner.run(Pool::Room, job).await.is_err() {
            tracing::debug!("closed twice");
        }
        let engine = inner.clone();
        let put_away = async move {
            engine.put_away();
            // After this signal, another engine may open the pool.
            drop(engine);
        };
        if let Err(error) = sys::apart("end", put_away).await {
            tracing::warn!(%error, "the pool could not be closed");
        }
    }
}

/// Export and import.
impl Engine {
    /// Opens the content of an artifact, or of a mounted volume, for reading. The content stays
    /// until the export is dropped.
    pub async fn export(&self, source: Source) -> Result<Export> {
        transfer::open(&self.inner, source).await
    }

    /// Writes the content as an archive to `out`, on a thread of the engine. An error leaves `out`
    /// incomplete.
    pub async fn pack(
        &self,
        export: Export,
        codec: Codec,
        out: impl Write + Send + 'static,
        progress: Arc<Progress>,
    ) -> Result<Exported> {
        transfer::pack(&self.inner, export, codec, out, progress).await
    }

    /// Makes an artifact of the archive from `input`, on a thread of the engine. It appears
    /// whole, or not at all, and is durable when this returns.
    ///
    /// `input` must return an error when its other end is gone. It must not wait any longer once
    /// `progress` says that the archive is refused ([`Progress::has_failed`]).
    ///
    /// `is_wanted` is asked once, right before the artifact gets its name. If its caller is gone by
    /// then, nothing is imported.
    pub async fn import(
        &self,
        request: ImportRequest,
        input: impl Read + Send + 'static,
        progress: Arc<Progress>,
        is_wanted: impl Fn() -> bool + Send + 'static,
    ) -> Result<Imported> {
        self.inner.refuse_degraded()?;
        transfer::import(&self.inner, request, input, progress, is_wanted).await
    }

    /// Commits an earlier artifact of a name once more; returns the id of the new one. `base`: the
    /// number of the name in the shared tier. `order`: that of the controller. `NoSuchName`: the
    /// name has no such artifact.
    pub async fn rollback(
        &self,
        name: Name,
        to: ArtifactId,
        base: Option<u64>,
        order: Option<RollbackOrder>,
    ) -> Result<ArtifactId> {
        self.inner.refuse_degraded()?;
        transfer::rollback(&self.inner, name, to, base, order).await
    }
}
