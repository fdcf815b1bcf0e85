//! The names of a pool's directories and files; what they hold is described in `docs/on-disk.md`.
//! Names only; higher tiers make and remove the files.

/// Format version, backend and id of the pool.
pub const POOL_JSON: &str = "pool.json";
/// Locked by the one process that owns the pool.
pub const LOCK: &str = "lock";
/// Where the running driver answers the admin verbs.
pub const ADMIN_SOCKET: &str = "admin.sock";
/// What is sealed.
pub const INDEX: &str = "index.redb";
/// Working copies, one directory each.
pub const VOLUMES: &str = "volumes";
/// Working copies whose seal is promised and not yet done.
pub const PENDING: &str = "pending";
/// Immutable content, one directory each.
pub const LAYERS: &str = "layers";
/// What is being received or made; swept at start.
pub const INCOMING: &str = "incoming";
/// Directories made beforehand, each to become a volume's; swept at start.
pub const SPARES: &str = "spares";
/// What is going to be deleted.
pub const TRASH: &str = "trash";
/// The lower of an overlay that has no parent.
pub const EMPTY: &str = "empty";
/// Bytes given back when the disk is full.
pub const RESERVE: &str = "reserve";
/// In a volume: its record.
pub const VOLUME_JSON: &str = "volume.json";
/// In a layer: the record from which the index can be rebuilt. It has this name only once the index names it, durably.
pub const LAYER_JSON: &str = "layer.json";
/// In a layer that is being sealed: what it is going to be.
pub const SEALING_JSON: &str = "sealing.json";
/// In a layer, and in a volume of the backends that need no top: the content.
pub const FS: &str = "fs";
/// In a volume of the overlay backend: the writable top.
pub const TOP: &str = "top";
/// In a volume of the overlay backend: the prefix of its work directories, `work.1`, `work.2`, …
pub const WORK_PREFIX: &str = "work.";
/// What a step makes in its volume's root to say "commit this" (`commit: on-marker`).
pub const COMMIT_MARKER: &str = ".baggageclaim-commit";
/// In a claim's volume: what is of this boot.
pub const CLAIM_JSON: &str = "claim.json";
/// In a claim's volume: the prefix of a name that says to which layer its content is moving.
pub const FREEZING_PREFIX: &str = "freezing.";
/// In a claim's volume: its content was there when the disk failed to write something back, and may have lost bytes.
pub const DAMAGED: &str = "damaged";
/// A name that no file has: the marker of what is sealed without one.
pub const NO_MARKER: &str = "";
