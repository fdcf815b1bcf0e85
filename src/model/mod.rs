//! The product's terms as types: pure values and pure decisions.
//!
//! Values are valid once constructed: ids are safe as path components, keys are within their
//! limits, attributes match their type. No I/O, clock, async or protobuf, and no other module.

mod artifact;
mod attributes;
mod budget;
mod class;
mod clock;
mod digest;
mod fence;
mod id;
mod key_index;
pub mod layout;
mod name;
mod origin;
mod persistent_volume;
mod place;
mod policy;
mod quantity;
mod rights;
mod root;
mod time;
mod usage;
mod volume;

pub use artifact::{
    Artifact, Candidate, Digests, FLATTEN_ABOVE_LAYERS, LayerRecord, Maker, Sharing, evict,
    flatten_plan, garbage, takes_name,
};
pub(crate) use artifact::{is_false, is_zero};
pub use attributes::{
    AttributeError, Commit, DEFAULT_OUTPUT_TTL, Freshness, KUBELET, Keep, Share, VolumeKind,
    VolumeSpec,
};
pub use budget::{
    Bucket, CutOff, Evictable, Limit, Limits, MAX_BUCKETS, NamespaceUsage, Unused, buckets, excess,
    smaller_limit,
};
pub use class::ParameterError;
pub use clock::{ClusterClock, MAX_AHEAD_MS, MAX_ROUND_TRIP_MS, Unmeasured, counted};
pub use digest::{DigestError, Sha256, hex};
pub use fence::{Clear, Coverage, Fence, FenceStep, Fences};
pub use id::{ArtifactId, IdError, LayerId, VolumeId};
pub use key_index::KeyIndex;
pub use name::{ArtifactName, CacheKey, CacheKind, Name, NameError, NameKind, Reference, Tenant};
pub use origin::{Origin, RestoreKey, TenantOrigin};
pub use persistent_volume::{
    Attachment, ClaimParameters, ClaimRecord, ClaimSource, ClaimTarget, LiveClone, MountCapability,
    MutableChange, MutableParameters, OwnerView, PersistentVolume, Snapshot, SnapshotGroup,
    SnapshotId, Ttl,
};
pub use place::{
    DRIVER_NAME, Elsewhere, NODE_LABEL, Node, NodeId, NodeIdError, Placed, Requirement, Topology,
};
pub use policy::{NamePattern, NamespacePolicy, PatternError, Rule};
pub use quantity::{parse_bytes, quantity, readable_bytes};
pub use rights::{CommitRight, Policies};
pub use root::RootAttributes;
pub use time::{Timestamp, readable_age};
pub use usage::Usage;
pub use volume::{Outcome, Pod, PodUid, SealPlan, VolumeRecord};
