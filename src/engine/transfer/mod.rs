//! Transfer: content leaves the pool as an archive (`export`) and enters it as one (`import`).
//!
//! Both run on threads of their own, at most four at a time: the content may be large, and the
//! other end slow. `archive` knows the format; the caller knows the other end.

mod export;
mod half;
mod import;
mod in_use;
mod making;
mod open_layers;
mod parts;
mod receive;
mod rollback;
mod space;
mod wanted;

pub use export::{Export, Exported, Source, View};
pub(super) use export::{open, pack};
pub(super) use import::import;
pub use import::{ImportRequest, Imported};
pub use open_layers::{OpenArtifact, OpenLayer, OpenSnapshot, Opened};
pub(super) use open_layers::{RetainedLayers, open_layers, open_snapshot};
pub(super) use parts::{delete_all, delete_old};
pub(super) use receive::{finish, receive, receive_layers, reuse_of_claims};
pub(super) use rollback::rollback;
pub use rollback::{RollbackOrder, RolledBack};
pub(super) use space::shortage;
pub(super) use wanted::Owner;
pub use wanted::{LayerPlace, ReceiveError, ReceiveRequest, Received};
