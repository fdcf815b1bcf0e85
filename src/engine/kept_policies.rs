//! What `policies` remembers between two calls: which policies are in the pool, and what it said.
//! The locks here order its steps; the policies that count are in the state.

use std::sync::{OnceLock, Weak};

use parking_lot::Mutex;

use crate::model::Policies;

/// Of one engine.
#[derive(Debug, Default)]
pub(super) struct KeptPolicies {
    /// Held while the policies are changed.
    pub(super) change: Mutex<()>,
    /// Held while they are written to the pool.
    pub(super) file: tokio::sync::Mutex<FileState>,
    /// It was said that commits wait for the policies.
    pub(super) missing: OnceLock<()>,
}

/// What is known of the file in the pool.
#[derive(Debug, Default)]
pub(super) struct FileState {
    /// The policies that this process wrote last.
    pub(super) policies: Weak<Policies>,
    /// The last write failed, which was said.
    pub(super) is_failing: bool,
}
