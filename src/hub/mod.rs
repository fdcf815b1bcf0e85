//! The catalog of a cluster over the network: each node tells the controller what it has, and asks
//! where content is. `docs/catalog.md` says what is guaranteed, `proto/hub.proto` is the protocol.
//!
//! ```text
//! engine names ─▶ node ─▶ TLS, pinned key ─▶ serve ─────▶ Catalog
//! peer::client ─▶ node ─▶ Find ────────────▶ questions ─▶ Catalog
//! k8s, admin ─▶ handle ─▶ chain, policies, budgets,
//!     generations, rollbacks ─▶ serve ─▶ node ─▶ engine
//! ```
//!
//! `catalog` decides, without I/O. This module has the streams and the clocks.

mod asked;
mod budgets;
mod chain;
mod figures;
mod find;
mod generations;
mod handle;
mod limits;
mod messages;
mod node;
mod policies;
mod questions;
mod rollbacks;
mod serve;
mod service;

pub use asked::{Generation, RollbackRefusal};
pub use budgets::Used;
pub use chain::ClearOrder;
pub use figures::Figures;
pub use generations::Generations;
pub use handle::Handle;
pub use limits::USAGE;
pub use node::Node;
pub use rollbacks::RollbackOrder;
pub use service::{Hub, ServeError};
