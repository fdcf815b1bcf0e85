//! The input and output of the distribution: settings, the answer to `status`, and plain counters.
//! `admin`, `http` and `cli` decide how they are shown.

use std::num::NonZeroU64;
use std::time::Duration;

use super::peers::PeerFigures;
use crate::engine::Notices;
use crate::model::{Reference, Tenant, Timestamp};

/// How content is taken to and from the tier.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Whether content is shared if its volume does not say. The caller of `bring` applies it, too:
    /// `PublishRequest::share` is the volume's attribute, or else this.
    pub share: bool,
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
    /// Artifacts that were fetched.
    pub fetches: u64,
    /// Plain bytes of content that came.
    pub fetched_bytes: u64,
    /// Fetches that failed.
    pub fetch_failures: u64,
    /// Questions about names.
    pub questions: u64,
    /// Questions that the tier answered with an error, or not at all.
    pub questions_failed: u64,
    /// Caches that began empty, and inputs that waited in vain.
    pub misses: u64,
    /// Damaged objects that were reported to the other nodes.
    pub damage_reported: u64,
    /// Whether an error lasts until a person changes something, and nothing succeeded since.
    pub permanent_error: bool,
    /// Whether there is a shared tier.
    pub has_tier: bool,
    /// Artifacts that were fetched from peers, among `fetches`.
    pub peer_fetches: u64,
    /// Their plain bytes, among `fetched_bytes`.
    pub peer_fetched_bytes: u64,
    /// The counters of peers; `None`: there are none.
    pub peers: Option<PeerFigures>,
}
