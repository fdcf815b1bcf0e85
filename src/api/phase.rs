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
    /// It was Ready, and is not in the node's pool any more, or its node was given up.
    Lost,
    /// The data is deleted. The controller deletes the object.
    Gone,
}

/// The code in the status of what is Lost with its node.
const NODE_GONE: &str = "NodeGone";

/// Why the node could not do what `spec` says, or why the data is Lost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Refusal {
    /// The gRPC code, such as FAILED_PRECONDITION; NodeGone: the node was given up
    pub code: String,
    /// What happened and what to do
    pub message: String,
}

impl Refusal {
    /// The name of a gRPC code, and the reason.
    #[must_use]
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self {
            code: code.to_owned(),
            message: message.into(),
        }
    }

    /// What the controller says in the status of an object whose node was given up.
    #[must_use]
    pub fn node_gone(node: &str) -> Self {
        Self {
            code: NODE_GONE.to_owned(),
            message: format!(
                "node {node}, which has the data, was deleted from the cluster; the data can be \
                 used again when a node of this name is back with the same disk"
            ),
        }
    }
}

/// Whether a status says that the object is Lost with its node, which was given up and has not
/// answered since.
pub(super) fn is_node_gone(status: Option<(Phase, Option<&Refusal>)>) -> bool {
    let is_it = |error: &Refusal| error.code == NODE_GONE;
    matches!(status, Some((Phase::Lost, Some(error))) if is_it(error))
}
