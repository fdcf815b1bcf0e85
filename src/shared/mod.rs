//! The shared tier: content in object storage, so that it outlives its node and reaches every node.
//! `docs/shared-tier.md` is the layout and the protocol; this module is the code of both.
//!
//! ```text
//! url ─▶ store ─▶ object_store (S3, GCS, Azure) or file (a shared filesystem)
//! upload:  toc::Holder ─▶ frames, table, index ─▶ one object        (object, upload)
//! commit:  layers ─▶ manifest ─▶ name, by conditional writes        (commit, decide)
//! fetch:   name ─▶ manifest ─▶ table ─▶ ranges ─▶ toc::Receiver      (source, fetch)
//! collect: names, manifests, layers ─▶ markers ─▶ deletions    (collect, lease, retire, budget)
//! ```
//!
//! Every decision is a function without I/O in `decide` or `budget`; `tests/shared` runs those in a
//! simulation. Calls block: they belong on the driver's own threads, never on those of the async
//! runtime. Nothing here knows of volumes, pools or the engine.

mod budget;
mod client;
mod clock;
mod cluster_uid;
mod clusters;
mod collect;
mod commit;
pub mod decide;
mod download;
mod error;
mod fetch;
mod file;
mod flow;
mod keys;
mod lease;
mod object;
mod patient;
mod periodic;
mod record;
mod report;
mod retire;
mod source;
mod store;
mod upload;
mod url;

pub use budget::{Budget, RECENT, TierUse};
pub use clock::now;
pub use cluster_uid::ClusterUid;
pub use collect::{Collected, Collector, Uses};
pub use commit::{
    Commit, Committed, Publication, clear, look, report_damage, report_lost_manifest,
};
pub use error::{Error, Result};
pub use fetch::{Destination, Fetched, fetch};
pub use flow::Flow;
pub use keys::Keys;
pub use object::{Footer, Index};
pub use periodic::{Budgets, Catalog, Periodic};
pub use record::{
    FORMAT, LayerRef, Manifest, NameRecord, NameState, ObjectId, content_of, fresh_id,
};
pub use report::{Damage, Listed, Usage, Verified, list, usage, verify};
pub use source::{Bucket, Content, Found, Frames, Resolved, Source};
pub use store::{Item, Store, Times, Version};
pub use upload::{Upload, upload};
pub use url::{Url, UrlError};
