//! Content straight from node to node: engines on filesystems of their own, which are peers over
//! 127.0.0.1 with keys of their own, and two drivers as processes.
//!
//! | in `tests/peers/` | |
//! |---|---|
//! | `nodes` | nodes that are peers, steps on them, and a link that can be cut or hang |
//! | `types` | each type of volume, and where its content is; tenants; many pods |
//! | `identity` | wrong and unknown keys, content that a peer may not have |
//! | `links` | a link that is cut at each of 100 offsets, holders that vanish or hang |
//! | `limits` | more at once than a node fetches and sends |
//! | `resume` | fetches that go on where they ended |
//! | `trouble` | content that is evicted while it is sent, damaged content, the tier beside peers |
//! | `slow` | a holder that sends a few bytes a second |
//! | `sources` | the order of peers and the tier, sources that are left out, and clears of both |
//! | `catalog` | a controller that knows which node has what, and is away for a while |
//! | `restarts` | a controller that restarts again and again while nodes commit and read |
//! | `clears` | names that are cleared while steps write, in 100 of 100 clears |
//! | `generations` | the list of a name's generations on all nodes, for a user |
//! | `rights` | how long a publish takes that may not read |
//! | `budgets` | limits of a namespace over all nodes, and nodes that are gone |
//! | `drivers` | two standalone drivers; one of them is killed while it fetches |
//! | `partition` | standalone drivers in network namespaces, and a partition while a fetch runs |

#![expect(
    clippy::disallowed_types,
    reason = "the binary is run as people run it"
)]

mod common;

#[path = "peers/budgets.rs"]
mod budgets;
#[path = "peers/catalog.rs"]
mod catalog;
#[path = "peers/clears.rs"]
mod clears;
#[path = "peers/drivers.rs"]
mod drivers;
#[path = "peers/generations.rs"]
mod generations;
#[path = "peers/identity.rs"]
mod identity;
#[path = "peers/limits.rs"]
mod limits;
#[path = "peers/links.rs"]
mod links;
#[path = "peers/nodes.rs"]
mod nodes;
#[path = "peers/partition.rs"]
mod partition;
#[path = "peers/restarts.rs"]
mod restarts;
#[path = "peers/resume.rs"]
mod resume;
#[path = "peers/rights.rs"]
mod rights;
#[path = "peers/slow.rs"]
mod slow;
#[path = "peers/sources.rs"]
mod sources;
#[path = "peers/trouble.rs"]
mod trouble;
#[path = "peers/types.rs"]
mod types;
