//! Copy-on-write on one pool: the [`Backend`] trait, three implementations, and their probe.
//!
//! A backend creates, mounts, freezes, seals, flattens, measures and deletes the content of volumes
//! and layers. It knows no tenants, names, records, outcomes or CSI. The engine decides *whether*
//! and *when*; a backend knows *how*. All methods block: call them on the engine's threads.
//!
//! | | volume | layer | mount | seal |
//! |---|---|---|---|---|
//! | overlay | `top/`, `work.N/` | `fs/` (a plain diff) | its own overlay | freeze, rename `top` |
//! | btrfs | `fs` (subvolume) | `fs` (read-only snapshot) | bind | `snapshot -r`, once unwritten |
//! | copy | `fs/` | `fs/` | bind | copy (reflink if possible), once unwritten |

mod bind_volume;
mod btrfs;
mod copy;
mod overlay;
mod probe;
mod root_attrs;

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};

pub use self::btrfs::Btrfs;
pub use self::copy::Copy;
pub use self::overlay::{MountApi, Overlay};
pub use self::probe::{Attempt, Chosen, Facts, Wanted, choose};
use crate::model::layout::FS;
use crate::model::{LayerId, PersistentVolume, VolumeId, VolumeKind, VolumeRecord};
pub use crate::model::{RootAttributes, Usage};
use crate::sys::{self, Dir};
use crate::tree;
pub use crate::tree::Stop;

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

/// Why a backend operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error(transparent)]
    System(#[from] sys::Error),
    /// This kernel or filesystem cannot do it at all; a retry does not help.
    #[error("{what} is not possible on this pool: {why}")]
    Unsupported {
        /// The requested operation, in the user's words.
        what: &'static str,
        /// The missing feature.
        why: String,
    },
    /// The pool has too little free space for the copy; no byte was copied.
    #[error("a copy takes {needs} bytes, and {free} of the pool's {total} are free")]
    NoRoom {
        /// The lower bound of the bytes that the copy takes.
        needs: u64,
        /// Free bytes.
        free: u64,
        /// The pool's size in bytes.
        total: u64,
    },
    /// `stop` ended the work. Completed work stays; a retry continues from there.
    #[error("stopped before it was complete; the next attempt continues")]
    Stopped,
    /// The content cannot become a layer.
    #[error("the content cannot be sealed: {path}: {why}")]
    Refused {
        /// The offending entry, relative to the volume's root, made printable ([`sys::printable`]).
        path: String,
        /// The reason.
        why: String,
    },
}

impl From<tree::Error> for Error {
    fn from(error: tree::Error) -> Self {
        match error {
            tree::Error::System(error) => Self::System(error),
            tree::Error::NoRoom { needs, free, total } => Self::NoRoom { needs, free, total },
            tree::Error::Stopped => Self::Stopped,
            tree::Error::Refused { path, why } => Self::Refused { path, why },
        }
    }
}

/// A result of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

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
    /// The parameters of a recorded volume. Only `scratch` is never sealed.
    #[must_use]
    pub fn of(record: &'a VolumeRecord) -> Self {
        Self {
            layers: &record.layers,
            root: record.spec.root,
            size_limit: record.size_limit(),
            sealable: record.spec.kind != VolumeKind::Scratch,
            owner: None,
            durable: false,
        }
    }

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

    /// The parameters for a claim's mounts and for its next new upper directory.
    #[must_use]
    pub fn of_claim(claim: &'a PersistentVolume) -> Self {
        Self {
            layers: &claim.layers,
            root: claim.root(),
            size_limit: claim.limit(),
            sealable: true,
            owner: Some(claim.owners_on_disk()),
            durable: true,
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

/// Where a layer is made that another node sends.
#[derive(Debug)]
pub enum Receiving {
    /// The layer is stacked on others. It is made in overlayfs' form in the empty directory `into`.
    Stacked {
        /// The new layer.
        into: Dir,
        /// The layers below it, newest first. They are only read.
        below: Vec<Dir>,
    },
    /// A writable copy of all that is below. The layer is applied to it, and no mark stays in it.
    Onto(Dir),
}

/// A copy-on-write method, on one pool.
pub trait Backend: fmt::Debug + Send + Sync + 'static {
    /// The method.
    fn kind(&self) -> BackendKind;

    /// The write-back error that the mount's filesystem recorded since it was mounted, even if an
    /// fsync already reported it. Data written through the mount may be lost, and every later fsync
    /// in it fails. `start` is what the mount was made with. Does not wait for the disk.
    fn write_back_error(&self, mount: BorrowedFd<'_>, start: &Start<'_>) -> Option<sys::Error> {
        let _ = (mount, start);
        None
    }

    /// Creates a volume's content in the empty directory `volume`. Mounts nothing.
    ///
    /// O(1) for overlay and btrfs. The root gets the parent's mode, owner, times, xattrs and ACL,
    /// then `start.root`. After an error the caller deletes the whole directory.
    fn create(&self, volume: &Dir, start: &Start<'_>) -> Result<Limit>;

    /// A detached mount of the volume: private, `nosuid,nodev`. The caller attaches it with
    /// `move_mount`, or reads and fills the volume through it.
    ///
    /// [`Backend::shows`] recognises the mount in the kernel's mount table by `label`, which the
    /// kernel keeps for the mount's lifetime. The caller must know that the volume is not in use:
    /// the kernel silently accepts one upper directory in two mounts.
    fn mount(
        &self,
        volume: &Dir,
        label: &str,
        start: &Start<'_>,
        read_only: bool,
    ) -> Result<OwnedFd>;

    /// Whether a line of the mount table is a mount of this volume, made with this label.
    fn shows(&self, mount: &sys::MountEntry, id: &VolumeId, label: &str) -> bool;

    /// Whether a mount, open file, mapping or working directory still holds the upper directory, or
    /// the layer it became. Asked if the unmount was missed. `false` if the backend cannot know.
    fn in_use(&self, volume: &Dir) -> Result<bool> {
        let _ = volume;
        Ok(false)
    }

    /// Tries to make the volume immutable, and finds out whether a process still has it open. `pin`
    /// is an `O_PATH` descriptor of the (detached) mount's root. `freeze` closes it, which takes
    /// time: it evicts the tree's dentries. Without a pin the answer comes from `in_use`.
    fn freeze(&self, volume: &Dir, pin: Option<OwnedFd>) -> Result<Freeze> {
        let (_, _) = (volume, pin);
        Ok(Freeze::Frozen)
    }

    /// Like `freeze`, for a volume that is discarded: writers do not matter, only holders do.
    fn let_go(&self, volume: &Dir, pin: Option<OwnedFd>) -> Result<Freeze> {
        self.freeze(volume, pin)
    }

    /// Whether `in_use` and `freeze` know a volume's holders; if not, `writers` is asked before a
    /// seal.
    fn knows_holders(&self) -> bool {
        true
    }

    /// Whether a process has a file that [`Backend::seal`] would take open or mapped for writing.
    /// Walks up to the first such file. [`Error::Refused`]: sealing would fail anyway.
    fn writers(&self, volume: &Dir, stop: Stop<'_>) -> Result<bool> {
        let _ = (volume, stop);
        Ok(false)
    }

    /// Whether the volume's root has a regular file of this name that was made since the fork.
    fn has_marker(&self, volume: &Dir, name: &str) -> Result<bool>;

    /// Turns the volume's private content into `layer`'s `fs`, without the marker file. O(1) for
    /// overlay and btrfs, apart from the walk of `writers`.
    ///
    /// Idempotent: `Ok` if an earlier call completed before a crash. Syncs nothing.
    /// [`Backend::stacks`] says whether the layer needs its parents.
    fn seal(&self, volume: &Dir, layer: &Dir, marker: &str) -> Result<()>;

    /// Undoes a seal that moved the content: `layer`'s `fs` is the volume's content again. Only if
    /// [`Backend::stacks`]; other backends' seals leave the volume as it is.
    fn unseal(&self, layer: &Dir, volume: &Dir) -> Result<()>;

    /// Copies the volume's private content into `layer`'s `fs`, even while a pod writes to it.
    /// Shows one moment only if the backend has snapshots; otherwise its cost grows with the tree.
    fn copy(&self, volume: &Dir, layer: &Dir) -> Result<()>;

    /// Whether [`Backend::copy`] is O(1) and shows one moment despite concurrent writes.
    fn has_snapshots(&self) -> bool;

    /// Whether the volume has private content that [`Backend::seal`] would take.
    fn has_content(&self, volume: &Dir) -> Result<bool>;

    /// Why this pool does not enforce size limits at present; `None` if it does.
    fn why_no_limits(&self) -> Option<String>;

    /// Changes the maximum of bytes that the volume itself may add.
    fn set_limit(&self, volume: &Dir, bytes: Option<u64>) -> Result<Limit>;

    /// Whether a layer holds only its difference from its parents, so that an artifact is a stack.
    fn stacks(&self) -> bool;

    /// A view of the merged content of these layers, newest first: a detached mount, read-only,
    /// `nosuid,nodev`. `scratch` is an empty directory of the pool for the view's own files; the
    /// caller deletes it after it closed the view. `label` is as in [`Backend::mount`].
    fn content(&self, scratch: &Dir, label: &str, layers: &[LayerId]) -> Result<OwnedFd>;

    /// Makes a directory for imported content in the empty directory `layer`, and opens it. The
    /// caller calls [`Backend::received`] when the content is complete.
    fn receive(&self, layer: &Dir) -> Result<Dir> {
        layer.create_dir(bind_volume::FS_NEW, 0o755)?;
        Ok(layer.open_beneath(bind_volume::FS_NEW)?)
    }

    /// Makes a place for a layer that comes from another node and belongs on `below`, newest first,
    /// in the empty directory `layer`. The caller makes or applies the layer there, then calls
    /// [`Backend::received`].
    ///
    /// O(1) for overlay and btrfs. The copy backend copies all that is below.
    fn receive_layer(&self, layer: &Dir, below: &[LayerId]) -> Result<Receiving>;

    /// Turns the received content into `layer`'s `fs`. Syncs nothing. After an error the caller
    /// deletes `layer`.
    fn received(&self, layer: &Dir) -> Result<()> {
        Ok(layer.rename(bind_volume::FS_NEW, layer, FS)?)
    }

    /// Merges adjacent layers, newest first, into a new `fs` of `into`, by hard links if possible.
    /// `bottom`: the last layer is the lowest of its stack, so deletion marks are dropped.
    ///
    /// The cost grows with the trees. Ends early with [`Error::Stopped`]. On error, delete `into`.
    fn flatten(&self, layers: &[LayerId], into: &Dir, bottom: bool, stop: Stop<'_>) -> Result<()>;

    /// The disk usage of a volume's private content, or of a layer. It walks the tree, so RPCs must
    /// not wait for it, unless the filesystem counts usage itself.
    fn usage(&self, dir: &Dir, stop: Stop<'_>) -> Result<Usage>;

    /// Deletes the directory `name` of `trash` with everything in it. It follows no symlink and
    /// crosses no mount point (EXDEV or EBUSY). It clears immutable flags and destroys subvolumes.
    ///
    /// Fails with ENOTEMPTY if a process keeps creating files in the tree, or with
    /// [`Error::Stopped`] once `stop` says so. The caller retries later.
    fn delete(&self, trash: &Dir, name: &std::path::Path, stop: Stop<'_>) -> Result<()>;

    /// Deletes `name` at once if no process wrote to that volume; `true` if it is gone now.
    /// Otherwise it is left, perhaps in part, to [`Backend::delete`].
    fn delete_untouched(&self, trash: &Dir, name: &std::path::Path) -> Result<bool> {
        let _ = (trash, name);
        Ok(false)
    }
}
