//! Claims in the engine, on real filesystems: made, cloned, snapshotted, mounted, recovered, deleted; what was written is
//! where it was written and nowhere else, and nothing is left behind.
//!
//! | in `tests/claims/` | |
//! |---|---|
//! | `bench` | an engine, and pods that mount claims |
//! | `content` | clones, snapshots, chains, groups: what is in them |
//! | `mounts` | staging and publishing, owners, durability |
//! | `nodes` | one engine as a node among others |
//! | `projects` | limits, where a tenant changes what its files are counted for |
//! | `records` | sizes, names, pages, attachments, time to live |
//! | `trouble` | races, restarts, cut short operations, full disks |

#![expect(
    clippy::print_stderr,
    reason = "on which filesystem a test was when it failed, and how long things took, is said where the failure is said"
)]

mod common;

#[path = "claims/bench.rs"]
mod bench;
#[path = "claims/content.rs"]
mod content;
#[path = "claims/mounts.rs"]
mod mounts;
#[path = "claims/nodes.rs"]
mod nodes;
#[path = "claims/projects.rs"]
mod projects;
#[path = "claims/records.rs"]
mod records;
#[path = "claims/slow.rs"]
mod slow;
#[path = "claims/trouble.rs"]
mod trouble;
