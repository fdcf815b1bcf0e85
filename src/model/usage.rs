//! The disk usage of content.
//!
//! From a walk or from the filesystem. For display and eviction, never for correctness.

use serde::{Deserialize, Serialize};

/// Disk usage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Bytes allocated (`st_blocks`), hard links counted once.
    pub bytes: u64,
    /// Names that are not directories.
    pub files: u64,
    /// Directories, including the root.
    pub directories: u64,
}

impl Usage {
    /// The sum of both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            files: self.files.saturating_add(other.files),
            directories: self.directories.saturating_add(other.directories),
        }
    }
}
