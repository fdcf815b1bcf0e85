//! What the controller orders of a `Volume` or a `Snapshot`, and what its node has done: the words
//! that both kinds share.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the controller orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Wanted {
    /// Make it once. Once it was Ready, it is never made again.
    Present,
    /// It exists. Never make it.
    Kept,
    /// Delete the data. This is final.
    Absent,
}

/// What the node has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Phase {
    /// It exists.
    Ready,
    /// Its content is being fetched from another node, and it does not exist yet.
    Fetching,
    /// It was not made, and nothing is left of it.
    Failed,
    /// It was Ready, and is not in the node's pool any more.
    Lost,
    /// The data is deleted. The controller deletes the object.
    Gone,
}

/// Why the node could not do what `spec` says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Refusal {
    /// The gRPC code, such as FAILED_PRECONDITION
    pub code: String,
    /// What happened and what to do
    pub message: String,
}
