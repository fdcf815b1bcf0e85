//! The words of the product as types: pure values and pure decisions.
//!
//! What is here cannot be wrong once it exists: ids that are safe as path components, keys within their bounds,
//! attributes that fit their type. No I/O, no clock, no async, no protobuf, and no `use` of any other room.

mod id;
pub mod layout;

pub use id::{ArtifactId, IdError, LayerId, VolumeId};
