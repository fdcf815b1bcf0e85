//! The names of a pool's directories and files. `docs/on-disk.md` describes their content. Only
//! names; `store` and `engine` create and remove the files.

/// The pool's format version, backend and id.
pub const POOL_JSON: &str = "pool.json";
/// The lock file of the process that owns the pool.
pub const LOCK: &str = "lock";
/// The socket of the driver's admin service.
pub const ADMIN_SOCKET: &str = "admin.sock";
/// The index of durable state.
pub const INDEX: &str = "index.redb";
/// The policies of all namespaces of the cluster.
pub const POLICIES_JSON: &str = "policies.json";
/// Volumes in use, one directory each.
pub const VOLUMES: &str = "volumes";
/// Volumes that will be sealed, after their pod ended.
pub const PENDING: &str = "pending";
/// Immutable content, one directory each.
pub const LAYERS: &str = "layers";
/// Content that is being received or made. Deleted at start.
pub const INCOMING: &str = "incoming";
/// Directories that older versions prepared for future volumes. Deleted at start.
pub const SPARES: &str = "spares";
/// Content that will be deleted.
pub const TRASH: &str = "trash";
/// The lower directory of an overlay without a parent.
pub const EMPTY: &str = "empty";
/// Allocated space that is freed when the disk is full.
pub const RESERVE: &str = "reserve";
/// In a volume: its record.
pub const VOLUME_JSON: &str = "volume.json";
/// In a layer: its record, under this name once the index durably refers to it.
pub const LAYER_JSON: &str = "layer.json";
/// In a layer that is being sealed: its future record.
pub const SEALING_JSON: &str = "sealing.json";
/// In a layer: its table of contents, in the format of `docs/layer-format.md`.
pub const TABLE: &str = "table";
/// In a layer, and in a volume of a backend without a top: the content.
pub const FS: &str = "fs";
/// In a volume of the overlay backend: the writable top.
pub const TOP: &str = "top";
/// In a volume of the overlay backend: the prefix of its work directories, `work.1`, `work.2`, …
pub const WORK_PREFIX: &str = "work.";
/// The file that a step creates in its volume's root to request a commit (`commit: on-marker`).
pub const COMMIT_MARKER: &str = ".baggageclaim-commit";
/// In a claim's volume: the state of this boot.
pub const CLAIM_JSON: &str = "claim.json";
/// In a claim's volume: the prefix of a name that contains the layer its content moves to.
pub const FREEZING_PREFIX: &str = "freezing.";
/// In a claim's volume: the disk failed to write back data, so its content may have lost bytes.
pub const DAMAGED: &str = "damaged";
/// No file has this name: the marker of content that is sealed without one.
pub const NO_MARKER: &str = "";
