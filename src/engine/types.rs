//! Requests to the engine, its answers, and the rows of its lists. Plain values only: other modules
//! here use them, and higher tiers format them.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::backend::{BackendKind, Usage};
use crate::model::{
    ArtifactId, Digests, LayerId, Maker, Name, Pod, Reference, Sha256, Sharing, Tenant,
    TenantOrigin, Timestamp, VolumeId, VolumeSpec,
};

/// What kubelet asks for in `NodePublishVolume`, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishRequest {
    /// The volume's id.
    pub volume: VolumeId,
    /// Where it is wanted; absolute. The last component is made here, its parent exists.
    pub target: PathBuf,
    /// Whose it is.
    pub tenant: Tenant,
    /// Which pod's.
    pub pod: Pod,
    /// What the pod says of it.
    pub spec: VolumeSpec,
    /// Whether the pod may only read it.
    pub read_only: bool,
    /// Whether the access mode allows several targets. The volume of a pod has one all the same.
    pub multiple_targets: bool,
    /// The number in the shared tier of the name that it commits to. `None`: the tier was not
    /// asked.
    pub base: Option<u64>,
    /// The number of the name's last clear in the shared tier. 0: none is known.
    pub cleared: u64,
    /// Whether its content may leave this node: `share`, after the node's default.
    pub share: bool,
    /// The content that was fetched for it. `None`: nothing was.
    pub fetched: Option<Box<FetchedContent>>,
    /// How long its call has waited for content of other nodes. The wait of an input goes on from
    /// there.
    pub waited: Duration,
}

/// Content that was fetched for a volume. The volume may start from newer content all the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchedContent {
    /// The artifact.
    pub artifact: ArtifactId,
    /// Where it was.
    pub source: ContentSource,
    /// The same as a message says it, with the names of the peers.
    pub from: String,
    /// The bytes of its files.
    pub bytes: u64,
}

/// A layer that is to be received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveLayer {
    /// The digest of its table of contents.
    pub digest: Sha256,
    /// How many bytes of the pool it needs while it comes, at least.
    pub bytes: u64,
}

/// The tables of contents of an artifact that is to be uploaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tables {
    /// All are made.
    Made,
    /// The background job makes them.
    Coming,
    /// The pool has no space for them. They are made once it has.
    NoSpace,
    /// One could not be made. It is tried again later.
    Failed,
}

/// Where content was when a volume needed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentSource {
    /// On this node.
    Local,
    /// On another node.
    Peer,
    /// In the shared tier alone.
    Shared,
}

impl ContentSource {
    /// The word for it: the label `source` of metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Peer => "peer",
            Self::Shared => "shared",
        }
    }
}

impl PublishRequest {
    /// The name of this reference in the namespace of the volume: what it is committed as.
    #[must_use]
    pub fn name(&self, reference: &Reference) -> Name {
        Name {
            tenant: self.tenant.clone(),
            reference: reference.clone(),
        }
    }

    /// The name that an input reads: in the namespace of the volume, or in the one that its pod
    /// names.
    #[must_use]
    pub fn source(&self, from: &Reference) -> Name {
        let other = self.spec.from_namespace.as_ref();
        Name {
            tenant: other.unwrap_or(&self.tenant).clone(),
            reference: from.clone(),
        }
    }

    /// What it may start from, in the order in which it is tried.
    #[must_use]
    pub fn origins(&self) -> Vec<TenantOrigin> {
        self.spec.origins(&self.tenant)
    }
}

#[cfg(test)]
impl PublishRequest {
    /// An input whose content does not exist: nothing is mounted for it.
    pub(crate) fn of_nothing(volume: &str) -> Self {
        let attributes = [("type", "input"), ("from", "artifact/none")];
        let attributes = attributes.map(|(key, value)| (key.to_owned(), value.to_owned()));
        Self {
            volume: volume.parse().expect("an id"),
            target: "/target".into(),
            tenant: "ci".parse().expect("a tenant"),
            pod: Pod {
                uid: "uid".parse().expect("a uid"),
                name: "pod".to_owned(),
                service_account: None,
            },
            spec: VolumeSpec::parse(&attributes.into()).expect("attributes"),
            read_only: false,
            multiple_targets: false,
            base: None,
            cleared: 0,
            share: true,
            fetched: None,
            waited: Duration::ZERO,
        }
    }
}

/// The content on this node that a name points at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalArtifact {
    /// Its id.
    pub id: ArtifactId,
    /// What is known of it in the shared tier.
    pub sharing: Sharing,
    /// The newest fence that its node knew when its volume was forked; 0: none.
    pub fence: u64,
    /// When it was sealed.
    pub created: Timestamp,
    /// Whether it would survive a power cut.
    pub durable: bool,
}

/// What a publish did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// What it is a fork of, as it was found: for a task cache, `key` or one of the restore keys.
    pub from: Option<Reference>,
    /// The artifact behind that name.
    pub parent: Option<ArtifactId>,
    /// How many layers it is mounted over.
    pub layers: usize,
    /// Whether it was published there already, and nothing was done.
    pub already: bool,
    /// How long it waited for its content.
    pub waited: Duration,
    /// Why its size limit does not hold.
    pub limit_unenforced: Option<String>,
}

/// The last measured size of a volume.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Measured {
    pub(super) usage: Option<Usage>,
    pub(super) at: Option<Instant>,
    pub(super) running: bool,
}

/// What a volume uses and could use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolumeStats {
    /// Its own content, as it was last measured; `None` before the first measurement.
    pub usage: Option<Usage>,
    /// Bytes: its size limit where that is enforced, else the pool's.
    pub total_bytes: u64,
    /// Bytes that can still be written.
    pub available_bytes: u64,
    /// Inodes of the pool; 0 where the filesystem makes them as needed.
    pub total_inodes: u64,
    /// Inodes that can still be made.
    pub available_inodes: u64,
}

/// How far a volume is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeState {
    /// Being made, or waiting for its content.
    Preparing,
    /// Mounted at its target.
    Published,
    /// Not mounted, though its pod may come for it again.
    Unpublished,
    /// Its pod is done with it. The pod's outcome, or the cluster's policies, are not known yet.
    AwaitingOutcome,
    /// Its pod is done with it, and a process still holds its files open.
    InUse,
    /// Being sealed.
    Sealing,
}

/// A volume, for lists.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(
    missing_docs,
    reason = "the names are the meaning; `model::VolumeRecord` has the long words"
)]
pub struct VolumeRow {
    pub id: VolumeId,
    pub tenant: Tenant,
    pub pod: Pod,
    pub spec: VolumeSpec,
    pub parent: Option<ArtifactId>,
    pub layers: usize,
    pub state: VolumeState,
    pub read_only: bool,
    pub targets: Vec<PathBuf>,
    pub created: Timestamp,
    pub usage: Option<Usage>,
    pub limit_unenforced: Option<String>,
}

/// The effect of an outcome on the pod's volumes. All zero: the pod has no volumes here that wait
/// for one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OutcomeReport {
    /// For how many it was news.
    pub news: usize,
    /// How many others had been told the same.
    pub same: usize,
    /// How many had been told the other, which counts.
    pub other: usize,
}

/// A pod whose outcome is awaited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Awaited {
    /// Its namespace.
    pub tenant: Tenant,
    /// Its uid and name.
    pub pod: Pod,
    /// Whether a volume of it was unpublished already, and its seal waits for the outcome alone.
    pub unpublished: bool,
}

/// An artifact, for lists.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(
    missing_docs,
    reason = "the names are the meaning; `model::Artifact` has the long words"
)]
pub struct ArtifactRow {
    pub id: ArtifactId,
    pub tenant: Tenant,
    /// Its name; `None` when the name has moved on to newer content.
    pub name: Option<Reference>,
    /// The name under which it was sealed.
    pub reference: Reference,
    pub layers: usize,
    /// The size of its layers together; `None` while one is not measured yet.
    pub usage: Option<Usage>,
    pub created: Timestamp,
    pub last_used: Timestamp,
    pub expires: Option<Timestamp>,
    /// How many volumes are forks of it.
    pub in_use_by: usize,
    /// Whether it would survive a power cut.
    pub durable: bool,
    /// What is known of it in the shared tier.
    pub sharing: Sharing,
    /// Its creator; `None`: an older version made it, which did not record that.
    pub made_by: Option<Maker>,
    /// The digests of its content that are known.
    pub digests: Digests,
    /// The digests of its layers' tables of contents, newest layer first; `None`: not made yet.
    pub tables: Vec<Option<Sha256>>,
    /// Whether a layer exceeds a limit of tables of contents: the artifact cannot leave the node.
    pub is_too_large: bool,
}

/// What a round of garbage collection did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reaped {
    /// Artifacts that had expired or had no name any more.
    pub expired: usize,
    /// Artifacts that went to make room, or for a limit of their namespace.
    pub evicted: usize,
    /// Directories deleted from the trash.
    pub deleted: usize,
    /// Directories that a process still holds open.
    pub held: usize,
    /// Stacks merged.
    pub flattened: usize,
}

/// Something that index and directories disagree about.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Finding {
    /// What kind of disagreement, a word that programs may compare: `missing-layer`,
    /// `unknown-layer`, ….
    pub kind: &'static str,
    /// Where, relative to the pool.
    pub path: PathBuf,
    /// What it means.
    pub detail: String,
}

/// What a rebuilt index names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rebuilt {
    /// How many artifacts.
    pub artifacts: usize,
    /// How many claims.
    pub claims: usize,
    /// Layers of claims and snapshots that only the old index knew. The next start deletes them.
    pub nameless: Vec<LayerId>,
    /// Directories of claims whose records cannot be read. The next start deletes them, too.
    pub unreadable: Vec<PathBuf>,
    /// Where the old index is kept. `None`: there was none, or nothing was replaced.
    pub kept: Option<PathBuf>,
}

/// The engine as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the meaning")]
pub struct Status {
    pub pool: PathBuf,
    pub pool_id: String,
    pub backend: BackendKind,
    /// Why this backend.
    pub reason: String,
    pub total_bytes: u64,
    pub available_bytes: u64,
    pub total_inodes: u64,
    pub available_inodes: u64,
    pub volumes: usize,
    pub artifacts: usize,
    pub caches: usize,
    /// Volumes whose seal is promised and not yet durable.
    pub seals_pending: usize,
    /// Volumes whose records the start found damaged, and which a pod may be using. On a backend
    /// whose volumes need their layers, nothing that was sealed before this start is deleted until
    /// the next one.
    pub damaged: usize,
}
