//! The heart: fork, seal, publish, unpublish, commit, destroy, list, recover, reap.
//!
//! It decides *whether* and *when*; a backend knows *how*, the store remembers. It knows nothing of CSI, gRPC or Kubernetes.

mod error;
mod types;

use std::path::{Path, PathBuf};
use std::time::Duration;

pub use error::{Error, Result};
pub use types::{
    ArtifactRow, Finding, PublishRequest, Published, Reaped, Status, VolumeRow, VolumeState,
    VolumeStats,
};

use crate::backend::BackendKind;
use crate::model::{Outcome, PodUid, Reference, Tenant, VolumeId};

/// How an engine is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// The pool's directory; made when it is missing (its parent is not).
    pub pool: PathBuf,
    /// The backend to use; `None`: the best that works on the pool.
    pub backend: Option<BackendKind>,
    /// How long a publish waits for content that is known to be coming.
    pub input_wait: Duration,
    /// How long a finished volume waits for its pod's outcome before it is thrown away.
    pub outcome_wait: Duration,
    /// Percent of the pool's bytes or inodes in use above which unused artifacts are evicted …
    pub high_watermark: u8,
    /// … down to this.
    pub low_watermark: u8,
    /// How often garbage is looked for when nothing else asks for it.
    pub reap_interval: Duration,
    /// Bytes kept in reserve for the day the disk is full.
    pub reserve: u64,
}

impl Config {
    /// The defaults, for a pool.
    #[must_use]
    pub fn new(pool: impl Into<PathBuf>) -> Self {
        Self {
            pool: pool.into(),
            backend: None,
            input_wait: Duration::from_secs(90),
            outcome_wait: Duration::from_secs(60 * 60),
            high_watermark: 85,
            low_watermark: 70,
            reap_interval: Duration::from_secs(60),
            reserve: 64 << 20,
        }
    }
}

/// One pool, in the care of this process. Cheap to clone: clones share it.
#[derive(Debug, Clone)]
pub struct Engine {}

#[expect(clippy::unused_async, reason = "bodies follow")]
impl Engine {
    /// Opens the pool, makes it when it is new, and recovers what an earlier process left. Must run in a tokio runtime.
    pub async fn open(_config: Config) -> Result<Self> {
        Err(Error::ShuttingDown)
    }

    /// Makes a volume's content if need be and mounts it at its target. Repeatable. Once begun it is finished, also
    /// when the caller goes away.
    pub async fn publish(&self, _request: PublishRequest) -> Result<Published> {
        Err(Error::ShuttingDown)
    }

    /// Detaches whatever is mounted at `target`, removes the mount point, and promises the volume's seal. Also for
    /// volumes that nobody has heard of; `volume` need not even be an id.
    pub async fn unpublish(&self, _volume: &str, _target: &Path) -> Result<()> {
        Err(Error::ShuttingDown)
    }

    /// What a published volume uses. Never walks: starts a measurement when the last one is old.
    pub async fn stats(&self, _volume: &VolumeId, _path: &Path) -> Result<VolumeStats> {
        Err(Error::ShuttingDown)
    }

    /// Says how a pod's work ended; returns for how many of its volumes that was news. The first word counts.
    pub async fn report_outcome(&self, _pod: &PodUid, _outcome: Outcome) -> Result<usize> {
        Err(Error::ShuttingDown)
    }

    /// The volumes, by tenant and id.
    #[must_use]
    pub fn volumes(&self, _tenant: Option<&Tenant>) -> Vec<VolumeRow> {
        Vec::new()
    }

    /// The artifacts, by tenant and name; caches are the rows whose name is one.
    #[must_use]
    pub fn artifacts(&self, _tenant: Option<&Tenant>) -> Vec<ArtifactRow> {
        Vec::new()
    }

    /// Deletes what has this name; `InUse` when a volume is a fork of it, unless it is a cache: then the name goes now
    /// and the content when its last fork does.
    pub async fn destroy(&self, _tenant: &Tenant, _reference: &Reference) -> Result<()> {
        Err(Error::ShuttingDown)
    }

    /// Collects garbage now, and returns when all that can be deleted is.
    pub async fn reap(&self) -> Result<Reaped> {
        Err(Error::ShuttingDown)
    }

    /// Compares index, records, directories and mounts; changes nothing. Empty: all is well.
    pub async fn check(&self) -> Result<Vec<Finding>> {
        Err(Error::ShuttingDown)
    }

    /// Waits until every seal whose outcome is known and whose content is free is durable (or was given up).
    pub async fn settled(&self) {}

    /// The engine as a whole.
    pub async fn status(&self) -> Result<Status> {
        Err(Error::ShuttingDown)
    }

    /// Ends: running operations finish, background work stops at its next safe point. Mounts stay.
    pub async fn shutdown(&self) {}
}
