//! The catalog: which nodes of the cluster have the content of a name, which content is newest, and
//! whether some is coming.
//!
//! It is the controller's soft state. The nodes are the truth: each reports over a stream, and
//! reports everything again in a new stream. A catalog is lost with its controller's process.
//!
//! Pure: no I/O, no clock, no async, and of this package only `model`. Times are parameters. `now`
//! is a clock of the controller that runs evenly: the cluster's time may jump when the controller
//! adopts it from a node, and then no wait must end early.
//!
//! `docs/catalog.md` states what a reader may rely on; `tests/catalog/simulation.rs` tries to break
//! it.
//!
//! - `apply`: what nodes say, and what follows from it.
//! - `find`: the answer for a name.
//! - `newest`: the newest of all task caches whose key begins in one way.
//! - `list`: what people ask for: all caches, and every node that has a name.
//! - `waiting`: questions that wait for another answer.
//! - `usage`: what namespaces use on the nodes, and what goes for their limits.
//! - `names`: the names of caches, and who committed them.
//! - `name`: names as digests. `packed`, `table`: entries in few bytes.

mod apply;
mod entry;
mod find;
mod list;
mod name;
mod names;
mod newest;
mod packed;
mod state;
mod table;
mod usage;
mod waiting;

pub use apply::{Changes, Hello, Report, Supersede, supersedes};
pub use entry::{Entry, SessionId, State, Version};
pub use find::{Answer, Asked, Found, MAX_HOLDERS};
pub use list::{Explained, Listed, OfNode, Part};
pub use name::NameHash;
pub use names::{Author, MAX_NAMED, ToldCache};
pub use newest::Newest;
pub use state::{Catalog, KEEP, MAX_INCOMPLETE};
pub use usage::{MOST_NAMESPACES, Within};
pub use waiting::WaitingQuestions;

#[cfg(test)]
mod tests;
