//! The input and output of the distribution: settings, the answer to `status`, and plain counters.
//! `admin`, `http` and `cli` decide how they are shown.

use std::num::NonZeroU64;
use std::time::Duration;

use super::peers::PeerFigures;
use super::sources::Sources;
use crate::engine::{ContentSource, Notices};
use crate::model::{Reference, Tenant, Timestamp};

/// How content is taken to and from the tier.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Whether content is shared if its volume does not say. The caller of `bring` applies it, too:
    /// `PublishRequest::share` is the volume's attribute, or else this.
    pub share: bool,
    /// Where content comes from that is not on this node.
    pub sources: Sources,
    /// How long a cache that is not on this node waits for the tier's answer.
    pub ask: Duration,
    /// How long a cache waits for its bytes.
    pub fetch_wait: Duration,
    /// How long a transfer may bring no byte while a pod waits that has older content here.
    pub stall: Duration,
    /// How long a task cache that is on this node, or an output, waits for the tier's answer.
    pub fresh_wait: Duration,
    /// How long an input waits for its content.
    pub input_wait: Duration,
    /// How often the tier is asked whether it still has an output or a resource cache of this node.
    pub check_every: Duration,
    /// How many parts of a layer are uploaded at once.
    pub uploads: usize,
    /// The most bytes per second that are uploaded. `None`: no limit.
    pub bandwidth: Option<NonZeroU64>,
    /// Where notices for the users of pods go. `None`: nowhere.
    pub notices: Option<Notices>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            share: true,
            sources: Sources::default(),
            ask: Duration::from_secs(2),
            fetch_wait: Duration::from_secs(90),
            stall: Duration::from_secs(5),
            fresh_wait: Duration::from_millis(200),
            input_wait: Duration::from_secs(90),
            check_every: Duration::from_hours(24),
            uploads: 3,
            bandwidth: None,
            notices: None,
        }
    }
}

/// The distribution at this moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// The tier, without the options of its URL.
    pub url: String,
    /// An error that lasts until a person changes something: no permission, no bucket. It may be
    /// one of a single namespace.
    pub permanent_error: Option<String>,
    /// The last error, and when it happened. An operation that succeeds later does not remove it.
    pub last_error: Option<(Timestamp, String)>,
    /// Artifacts that are not in the tier yet.
    pub uploads_waiting: u64,
    /// Their bytes on this node, at most: layers that the tier has are not uploaded again.
    pub bytes_waiting: u64,
    /// How many of them wait until the pool has space for their tables of contents.
    pub uploads_without_space: u64,
    /// The upload that runs.
    pub uploading: Option<Moving>,
    /// The fetches that run.
    pub fetching: Vec<Moving>,
}

/// Content on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moving {
    /// Its tenant.
    pub tenant: Tenant,
    /// Its reference.
    pub reference: Reference,
    /// The bytes that arrived: packed bytes of an upload, plain bytes of a fetch.
    pub bytes: u64,
    /// How many bytes there are: plain ones, without layers that need not be moved.
    pub of: u64,
    /// Where a fetch takes it from, in words. `None`: an upload.
    pub from: Option<String>,
    /// When it began.
    pub since: Timestamp,
}

/// The result of `drain`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Drained {
    /// Artifacts that were uploaded meanwhile.
    pub uploaded: u64,
    /// Artifacts that are still on this node only. The next start uploads them.
    pub left: u64,
}

/// The kinds of content that are fetched: those of names, in the order of
/// [`NameKind`](crate::model::NameKind), and then persistent volumes.
const KINDS: [&str; 4] = [
    "output",
    "resource-cache",
    "task-cache",
    "persistent-volume",
];
/// The place of persistent volumes among them.
const VOLUMES: usize = 3;
/// The places that it is fetched from.
const SOURCES: [ContentSource; 2] = [ContentSource::Peer, ContentSource::Shared];

/// The fetches of one kind of content from one source.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fetched {
    /// Artifacts that came.
    pub artifacts: u64,
    /// Bytes of their files, without layers that were on this node.
    pub bytes: u64,
    /// Fetches that failed.
    pub failures: u64,
}

/// Fetches, by kind of content and source.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fetches([[Fetched; SOURCES.len()]; KINDS.len()]);

impl Fetches {
    /// Those of this content's kind.
    pub(super) fn of(&mut self, reference: &Reference, source: ContentSource) -> &mut Fetched {
        let source = match source {
            // Content of this node is not fetched.
            ContentSource::Local | ContentSource::Peer => 0,
            ContentSource::Shared => 1,
        };
        &mut self.0[reference.kind() as usize][source]
    }

    /// Those of persistent volumes, which come from peers only.
    pub(super) fn of_volumes(&mut self) -> &mut Fetched {
        &mut self.0[VOLUMES][0]
    }

    /// All of them, with their kind and source.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, ContentSource, Fetched)> {
        let by_kind = KINDS.into_iter().zip(self.0);
        let all = by_kind.flat_map(|(kind, by_source)| {
            let by_source = SOURCES.into_iter().zip(by_source);
            by_source.map(move |(source, fetched)| (kind, source, fetched))
        });
        // Persistent volumes are not in the tier.
        all.filter(|(kind, source, _)| *kind != KINDS[VOLUMES] || *source != ContentSource::Shared)
    }

    /// The sum over all kinds of content from one source.
    #[must_use]
    pub fn from(&self, source: ContentSource) -> Fetched {
        self.sum(|it| it == source)
    }

    /// The sum of all.
    #[must_use]
    pub fn total(&self) -> Fetched {
        self.sum(|_| true)
    }

    fn sum(&self, counts: impl Fn(ContentSource) -> bool) -> Fetched {
        let counted = self.all().filter(|(_, source, _)| counts(*source));
        counted.fold(Fetched::default(), |sum, (_, _, more)| Fetched {
            artifacts: sum.artifacts + more.artifacts,
            bytes: sum.bytes + more.bytes,
            failures: sum.failures + more.failures,
        })
    }
}

/// Counters since the start, and gauges of this moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Metrics {
    /// Artifacts that are not in the tier yet.
    pub uploads_waiting: u64,
    /// Artifacts that were uploaded, or found in the tier.
    pub uploads: u64,
    /// Packed bytes of layers that were sent.
    pub uploaded_bytes: u64,
    /// Uploads that failed, and are tried again.
    pub upload_failures: u64,
    /// Artifacts that the tier refused: an older resource cache has the name, or it was cleared.
    pub uploads_refused: u64,
    /// Fetches that run.
    pub fetching: u64,
    /// Fetches that ended.
    pub fetches: Fetches,
    /// Questions about names.
    pub questions: u64,
    /// Questions that the tier answered with an error, or not at all.
    pub questions_failed: u64,
    /// Damaged objects that were reported to the other nodes.
    pub damage_reported: u64,
    /// Whether an error lasts until a person changes something, and nothing succeeded since.
    pub permanent_error: bool,
    /// Whether there is a shared tier.
    pub has_tier: bool,
    /// The counters of peers; `None`: there are none.
    pub peers: Option<PeerFigures>,
}
