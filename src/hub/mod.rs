//! The catalog of a cluster over the network: each node tells the controller what it has, and asks
//! where content is. `docs/catalog.md` says what is guaranteed, `proto/hub.proto` is the protocol.
//!
//! ```text
//! engine names ─▶ node ─▶ TLS, pinned key ─▶ serve ─────▶ Catalog
//! peer::client ─▶ node ─▶ Find ────────────▶ questions ─▶ Catalog
//! k8s ─▶ chain, policies, budgets ─▶ serve ─▶ node ─▶ engine
//! ```
//!
//! `catalog` decides, without I/O. This module has the streams and the clocks.

mod budgets;
mod chain;
mod figures;
mod find;
mod messages;
mod node;
mod overview;
mod policies;
mod questions;
mod serve;

pub use budgets::Budgets;
pub use chain::Chain;
pub use figures::Figures;
pub use node::Node;
pub use policies::PolicyBook;
pub use serve::{Hub, ServeError};

use std::time::Duration;

/// The largest message of either side.
const MOST_MESSAGE: usize = 1 << 20;
/// The largest Hello, which has the node's fences: those of a week, some 100 bytes each.
const MOST_HELLO: usize = 16 << 20;
/// How often a node measures the controller's time.
const BEAT: Duration = Duration::from_secs(10);
/// How often a node reports what namespaces use, if the controller wants nothing else.
pub const USAGE: Duration = Duration::from_secs(60);
/// The most entries in a report that is sent. The controller keeps a buffer of the size of the
/// largest message for each node: with 800 entries, 1,000 nodes take 50 MiB more.
const SENT_ENTRIES: usize = 100;
/// The most entries in a report that is read: older nodes send so many.
const MOST_ENTRIES: usize = 2_000;
