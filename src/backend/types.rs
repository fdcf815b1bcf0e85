//! The values that the engine and a backend exchange: the kind of a pool, how a volume starts,
//! limits, and the results of freezing. Only types are here, no work.

use std::fmt;
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use crate::model::{LayerId, RootAttributes};

/// The copy-on-write method of a pool; fixed when the pool is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackendKind {
    /// overlayfs over plain directories.
    Overlay,
    /// btrfs subvolumes and snapshots.
    Btrfs,
    /// Copies: by reflink if the filesystem can, else byte by byte.
    Copy,
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Overlay => "overlay",
            Self::Btrfs => "btrfs",
            Self::Copy => "copy",
        })
    }
}

/// The parameters that a volume is created and mounted with.
#[derive(Debug, Clone, Copy)]
pub struct Start<'a> {
    /// The layers of the parent artifact, newest first; none for an empty volume.
    pub layers: &'a [LayerId],
    /// The attributes of the root directory.
    pub root: RootAttributes,
    /// The maximum of bytes that the volume itself may add.
    pub size_limit: Option<u64>,
    /// Whether the volume may ever be sealed. If not (`scratch`), a plain directory will do.
    pub sealable: bool,
    /// The owner and group on disk to swap with `root`'s. `None`: those of the newest layer's root.
    pub owner: Option<(u32, u32)>,
    /// Whether fsynced files survive a power cut (claims). Ephemeral volumes do not need that.
    pub durable: bool,
}

impl<'a> Start<'a> {
    /// Starts a read-only view of these layers, with their root's own attributes.
    #[must_use]
    pub fn of_layers(layers: &'a [LayerId]) -> Self {
        Self {
            layers,
            root: RootAttributes::default(),
            size_limit: None,
            sealable: true,
            owner: None,
            durable: false,
        }
    }
}

/// Whether the filesystem enforces a size limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// The request has no limit.
    None,
    /// The filesystem enforces it.
    Enforced,
    /// The request has a limit that this pool cannot enforce, for this reason.
    Unenforced(String),
}

impl Limit {
    /// The reason why a requested limit is not enforced, if so.
    #[must_use]
    pub fn why_unenforced(self) -> Option<String> {
        match self {
            Self::Unenforced(why) => Some(why),
            Self::None | Self::Enforced => None,
        }
    }
}

/// Whether a volume's content can still change.
#[derive(Debug)]
pub enum Freeze {
    /// No process can write any more, and the backend knows of no process that still has it open.
    Frozen,
    /// No process can write any more, so it may be sealed. But a process still has it open or works
    /// in it, so the content that it sees must stay. The descriptor is as in `Busy`.
    Held(Option<OwnedFd>),
    /// A process holds it open. The descriptor, if any, becomes readable once the last holder is
    /// gone (inotify's IN_UNMOUNT). Without one, the caller asks again later.
    Busy(Option<OwnedFd>),
}
