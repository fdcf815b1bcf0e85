//! The words of the product as types: pure values and pure decisions.
//!
//! What is here cannot be wrong once it exists: ids that are safe as path components, keys within their bounds,
//! attributes that fit their type. No I/O, no clock, no async, no protobuf, and no `use` of any other module.

mod artifact;
mod attributes;
mod claim;
mod class;
mod id;
pub mod layout;
mod name;
mod place;
mod quantity;
mod root;
mod time;
mod usage;
mod volume;

pub use artifact::{
    Artifact, Candidate, FLATTEN_ABOVE_LAYERS, LayerRecord, Maker, evict, flatten_plan, garbage,
    takes_name,
};
pub use attributes::{AttributeError, Commit, DEFAULT_OUTPUT_TTL, Keep, VolumeKind, VolumeSpec};
pub use claim::{
    Attachment, Claim, ClaimParameters, ClaimRecord, ClaimSource, ClaimTarget, LiveClone,
    MountCapability, MutableChange, MutableParameters, OwnerView, Snapshot, SnapshotGroup,
    SnapshotId, Ttl,
};
pub use class::ParameterError;
pub use id::{ArtifactId, IdError, LayerId, VolumeId};
pub use name::{ArtifactName, CacheKey, CacheKind, Name, NameError, Reference, Tenant};
pub use place::{Elsewhere, Node, NodeId, NodeIdError, Placed, Requirement, Topology};
pub use quantity::parse_bytes;
pub use root::RootAttributes;
pub use time::Timestamp;
pub use usage::Usage;
pub use volume::{Outcome, Pod, PodUid, SealPlan, VolumeRecord};
