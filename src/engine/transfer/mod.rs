//! Transfer: content leaves the pool as an archive (`export`) and enters it as one (`import`).
//!
//! Both run on threads of their own, at most four at a time: the content may be large, and the
//! other end slow. `archive` knows the format; the caller knows the other end. Content of other
//! nodes comes layer by layer (`receive`).
//!
//! | file | |
//! |---|---|
//! | `export` | a view of an artifact or volume, and its archive |
//! | `import` | an archive becomes an artifact |
//! | `open_layers` | an artifact or snapshot, open layer by layer for other nodes |
//! | `receive` | content of another node, from the request to the index |
//! | `wanted` | the request and the errors of `receive` |
//! | `making` | its layers are made in `incoming/`; partial ones are kept and deleted |
//! | `half` | the way of each new layer into the index |
//! | `rollback` | an earlier generation of a name again |
//! | `space` | space for what comes in |

mod export;
mod half;
mod import;
mod making;
mod open_layers;
mod receive;
mod rollback;
mod space;
mod wanted;

pub use export::{Export, Exported, Source, View};
pub(super) use export::{open, pack};
pub(super) use import::import;
pub use import::{ImportRequest, Imported};
pub(super) use making::{delete_old_parts, delete_parts};
pub use open_layers::{OpenArtifact, OpenLayer, OpenSnapshot, Opened};
pub(super) use open_layers::{RetainedLayers, open_layers, open_snapshot};
pub(super) use receive::{finish, receive, receive_layers, reuse_of_claims};
pub use rollback::RollbackOrder;
pub(super) use rollback::rollback;
pub(super) use space::shortage;
pub(super) use wanted::Owner;
pub use wanted::{LayerPlace, ReceiveError, ReceiveRequest, Received};
