//! Claims: persistent volumes, their clones, snapshots, and groups of snapshots.
//!
//! An [`Engine`](super::Engine) holds those of its own pool and knows of no other node. The
//! Controller service talks to [`Claims`], which does (`placement`).
//!
//! A claim is in the index from CreateVolume on; its directory, `volumes/<id>`, is made when it is
//! first mounted, and again when its content has become a layer (`freeze`). So a claim that no pod
//! has written to since is its stack of layers, and making, cloning and snapshotting it is one
//! index transaction.
//!
//! | file | |
//! |---|---|
//! | `types` | requests and answers |
//! | `facade` | the methods of [`Engine`](super::Engine) |
//! | `create` | claims come and go, empty or as clones |
//! | `change` | expand, modify, attach, detach |
//! | `snapshot` | snapshots and groups of them |
//! | `freeze` | the content of claims at one moment, durable together or not at all |
//! | `entries` | what is known of them in memory |
//! | `data_dir` | the directory of a claim |
//! | `mount` | stage, publish, unpublish, unstage |
//! | `list` | pages, and how a claim is used |
//! | `placement` | the seam to the Controller service: claims, on whichever node they are |
//! | `maintenance` | periodic work: last uses, the end of a `ttl` |
//! | `recover` | what a crash or a reboot has left |
//! | `receive` | a volume of a snapshot of another node |
//! | `lookup` | what operations begin with |

mod change;
mod create;
pub(super) mod data_dir;
pub(super) mod entries;
mod facade;
mod freeze;
mod list;
mod lookup;
pub(super) mod maintenance;
mod mount;
mod placement;
mod receive;
pub(super) mod recover;
mod snapshot;
mod types;

pub use lookup::{claim_id, group_id, snapshot_id};
pub use placement::{Claims, OneNode};
pub use receive::ReceiveClaim;
pub use types::{Capacity, ClaimUse, CreateClaim, Group, MountClaim, Page, SnapshotFilter};
