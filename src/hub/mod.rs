//! The catalog of a cluster over the network: each node tells the controller what it has, and asks
//! where content is. `docs/catalog.md` says what is guaranteed, `proto/hub.proto` is the protocol.
//!
//! ```text
//! engine names ─▶ node ─▶ TLS, pinned key ─▶ serve ─────▶ Catalog
//! peer::client ─▶ node ─▶ Find ────────────▶ questions ─▶ Catalog
//! k8s ─▶ chain, policies, budgets ─▶ serve ─▶ node ─▶ engine
//! admin ─▶ overview ─▶ generations ─▶ serve ─▶ node ─▶ engine
//! k8s ─▶ overview ─▶ rollbacks ─▶ serve ─▶ node ─▶ engine
//! ```
//!
//! `catalog` decides, without I/O. This module has the streams and the clocks.

mod asked;
mod budgets;
mod chain;
mod figures;
mod find;
mod generations;
mod limits;
mod messages;
mod node;
mod overview;
mod policies;
mod questions;
mod rollbacks;
mod serve;
mod service;

pub use budgets::Budgets;
pub use chain::Chain;
pub use figures::Figures;
pub use limits::USAGE;
pub use node::Node;
pub use policies::PolicyBook;
pub use service::{Hub, ServeError};
