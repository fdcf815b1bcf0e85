//! Nodes that share content through a tier: engines on filesystems of their own, and a directory or
//! a real S3 server between them.
//!
//! | in `tests/distribution/` | |
//! |---|---|
//! | `nodes` | nodes, and steps on them |
//! | `types` | each type of volume, and where its content is |
//! | `clears` | cleared names, refused commits, `share: never`, tenants |
//! | `requests` | how many requests each operation makes |
//! | `trouble` | a tier that is away, hangs, refuses, was wiped, or holds damaged objects |
//! | `cuts` | a node that dies between two requests |
//! | `full` | a pool that fills up |
//! | `rollbacks` | earlier generations that are committed once more |
//! | `uploads` | the queue: drain, restart, a commit during an upload, many callers of one fetch |
//!
//! The tier, the server and the store that fails are those of `tests/shared`.

#![expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the server is a process; a test does in the plain way what the product does safely"
)]

mod common;

#[path = "distribution/clears.rs"]
mod clears;
#[path = "distribution/cuts.rs"]
mod cuts;
#[path = "shared/failing.rs"]
#[expect(dead_code, reason = "these tests use a part of it")]
mod failing;
#[path = "distribution/full.rs"]
mod full;
#[path = "distribution/nodes.rs"]
mod nodes;
#[path = "distribution/requests.rs"]
mod requests;
#[path = "distribution/rollbacks.rs"]
mod rollbacks;
#[path = "shared/server.rs"]
mod server;
#[path = "shared/tier.rs"]
#[expect(dead_code, reason = "these tests use a part of it")]
mod tier;
#[path = "distribution/trouble.rs"]
mod trouble;
#[path = "distribution/types.rs"]
mod types;
#[path = "distribution/uploads.rs"]
mod uploads;
