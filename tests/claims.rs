//! Claims in the engine, on real filesystems: created, cloned, snapshotted, mounted, recovered,
//! deleted. A write shows up where it was made and nowhere else, and nothing is left behind.
//!
//! | in `tests/claims/` | |
//! |---|---|
//! | `bench` | an engine, and pods that mount claims |
//! | `content` | the content of clones, snapshots, chains and groups |
//! | `elsewhere` | clones that come from another engine |
//! | `mounts` | staging and publishing, owners, durability |
//! | `nodes` | one engine as a node among others |
//! | `projects` | limits, if a tenant changes the project of its files |
//! | `records` | sizes, names, pages, attachments, time to live |
//! | `trouble` | races, restarts, interrupted operations, full disks |

#![expect(
    clippy::print_stderr,
    reason = "on which filesystem a test was when it failed, and how long things took, is said where the failure is said"
)]

mod common;

#[path = "claims/bench.rs"]
mod bench;
#[path = "claims/content.rs"]
mod content;
#[path = "claims/elsewhere.rs"]
mod elsewhere;
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
