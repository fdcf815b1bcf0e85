//! How copy-on-write is done on one pool: the [`Backend`] trait, its three implementations, and the probe that picks.
//!
//! A backend knows the content of volumes and layers: how a top is made, mounted, frozen, sealed, flattened,
//! measured and deleted. It does not know of tenants, names, records, outcomes or CSI; the engine decides *whether*
//! and *when*, a backend knows only *how*. All its methods block, and are called on the engine's own threads.
//!
//! | | volume | layer | mount | seal |
//! |---|---|---|---|---|
//! | overlay | `top/`, `work.N/` | `fs/` (a plain diff) | an overlay of its own | freeze, rename `top` |
//! | btrfs | `fs` (subvolume) | `fs` (read-only snapshot) | bind | `snapshot -r`, once no file is written |
//! | copy | `fs/` | `fs/` | bind | the same; copy, by reflink where it can |

mod btrfs;
mod copy;
mod look;
mod overlay;
mod plain;
mod probe;

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};

pub use self::btrfs::Btrfs;
pub use self::copy::Copy;
pub use self::overlay::{MountApi, Overlay};
pub use self::probe::{Attempt, Chosen, Facts, Wanted, choose};
use crate::model::layout::FS;
use crate::model::{Claim, LayerId, VolumeId, VolumeKind, VolumeRecord};
pub use crate::model::{RootAttributes, Usage};
use crate::sys::{self, Dir};
use crate::tree;
pub use crate::tree::Stop;

/// Which way of copy-on-write a pool uses; fixed when the pool is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackendKind {
    /// overlayfs over plain directories.
    Overlay,
    /// btrfs subvolumes and snapshots.
    Btrfs,
    /// Copies: reflinks where the filesystem has them, bytes where not.
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

/// Why a backend could not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error(transparent)]
    System(#[from] sys::Error),
    /// This kernel or filesystem cannot do it at all; trying again is of no use.
    #[error("{what} is not possible on this pool: {why}")]
    Unsupported {
        /// What was asked for, in the user's words.
        what: &'static str,
        /// What is missing.
        why: String,
    },
    /// There is no room for the bytes of a copy; none was copied.
    #[error("a copy takes {needs} bytes, and {free} of the pool's {total} are free")]
    NoRoom {
        /// How many bytes it takes at least.
        needs: u64,
        /// How many are free.
        free: u64,
        /// How many there are in all.
        total: u64,
    },
    /// It was told to stop. What is done by then is done, and a repetition goes on from there.
    #[error("it was stopped before it was done")]
    Stopped,
    /// The content cannot become a layer: the path within the volume, and the reason.
    #[error("the content cannot be sealed: {path}: {why}")]
    Refused {
        /// The offending entry, relative to the volume's root, as it may be shown ([`sys::printable`]).
        path: String,
        /// What is wrong with it.
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

/// A result of this room.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a volume starts from and what bounds it.
#[derive(Debug, Clone, Copy)]
pub struct Start<'a> {
    /// The layers of its parent artifact, newest first; empty: it starts empty.
    pub layers: &'a [LayerId],
    /// What its root directory looks like.
    pub root: RootAttributes,
    /// The most bytes it may hold of its own.
    pub size_limit: Option<u64>,
    /// Whether it may ever be sealed. What may not (`scratch`) can be a plain directory.
    pub sealable: bool,
    /// The owner and group on disk that `root`'s are swapped with; `None`: those of the newest layer's root.
    pub owner: Option<(u32, u32)>,
    /// Whether files must survive a power cut once fsynced (claims); ephemeral volumes do without.
    pub durable: bool,
    /// What [`Backend::prepare`] made in the volume's directory, if it was called: for its first `create` and `mount`, which
    /// then have less to do. Only where `size_limit` is `None`.
    pub prepared: Option<&'a Prepared>,
}

impl<'a> Start<'a> {
    /// What the volume of this record starts from. Only `scratch` is never sealed and nobody's view.
    #[must_use]
    pub fn of(record: &'a VolumeRecord) -> Self {
        Self {
            layers: &record.layers,
            root: record.spec.root,
            size_limit: record.spec.size_limit,
            sealable: record.spec.kind != VolumeKind::Scratch,
            owner: None,
            durable: false,
            prepared: None,
        }
    }

    /// What a view of these layers starts from, as they are.
    #[must_use]
    pub fn of_layers(layers: &'a [LayerId]) -> Self {
        Self {
            layers,
            root: RootAttributes::default(),
            size_limit: None,
            sealable: true,
            owner: None,
            durable: false,
            prepared: None,
        }
    }

    /// The same, where this was made beforehand.
    #[must_use]
    pub fn with(self, prepared: Option<&'a Prepared>) -> Self {
        Self { prepared, ..self }
    }

    /// What the next new top of a claim starts from, and how the claim is mounted.
    #[must_use]
    pub fn of_claim(claim: &'a Claim) -> Self {
        Self {
            layers: &claim.layers,
            root: claim.root(),
            size_limit: claim.limit(),
            sealable: true,
            owner: Some(claim.owners_on_disk()),
            durable: true,
            prepared: None,
        }
    }
}

/// What a backend made of a volume before anybody asked for one, kept open. Only the backend that made it looks into it.
#[derive(Debug)]
pub struct Prepared(overlay::Prepared);

/// Whether a size limit holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// None was asked for.
    None,
    /// The filesystem enforces it.
    Enforced,
    /// It was asked for and cannot be enforced here, because of this.
    Unenforced(String),
}

impl Limit {
    /// Why it does not hold, if one was asked for and does not.
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
    /// Nobody writes, nobody can any more, and as far as the backend can know nobody looks either.
    Frozen,
    /// Nobody writes and nobody can any more: it may be sealed. But somebody still has it open or works in it, so what it
    /// shows must stay. The descriptor is as in `Busy`.
    Held(Option<OwnedFd>),
    /// Somebody holds it open. The descriptor, where there is one, becomes readable when the last holder is gone
    /// (inotify's IN_UNMOUNT); without one, ask again later.
    Busy(Option<OwnedFd>),
}

/// One way of copy-on-write, on one pool.
pub trait Backend: fmt::Debug + Send + Sync + 'static {
    /// Which one it is.
    fn kind(&self) -> BackendKind;

    /// Makes in the empty directory `volume` what every volume begins with that has no size limit, whatever it will be; `None`
    /// where there is no such thing. The directory may be renamed afterwards.
    fn prepare(&self, volume: &Dir) -> Result<Option<Prepared>> {
        let _ = volume;
        Ok(None)
    }

    /// Whether it pays to mount a volume before anybody asks for it, because putting a mount together is slow.
    fn mounts_beforehand(&self) -> bool {
        false
    }

    /// The write-back error that a mount remembers, of its filesystem and since it was made, whichever process was told of it: what was written
    /// through it may be lost, and no fsync in it succeeds any more. `start` is what it was made of. Does not wait for the disk.
    fn write_back_error(&self, mount: BorrowedFd<'_>, start: &Start<'_>) -> Option<sys::Error> {
        let _ = (mount, start);
        None
    }

    /// Whether `create` and `mount` take the same time whatever the size of the tree.
    fn is_instant(&self) -> bool;

    /// Makes a volume's content in the directory `volume`, which holds nothing yet but what was prepared. Nothing is mounted.
    ///
    /// O(1) for overlay and btrfs. The root's mode, owner, times, xattrs and ACL are the parent's, then `start.root`.
    /// After an error the caller throws the whole directory away.
    fn create(&self, volume: &Dir, start: &Start<'_>) -> Result<Limit>;

    /// A detached mount that shows the volume: private, `nosuid,nodev`, attached nowhere. The caller attaches it with
    /// `move_mount`, or reads and fills the volume through it.
    ///
    /// The mount is recognisable in the kernel's mount table by `label` ([`Backend::shows`]), which the kernel keeps with it for
    /// good. The caller knows that the volume is not in use: the kernel would accept one top in two mounts silently.
    fn mount(
        &self,
        volume: &Dir,
        label: &str,
        start: &Start<'_>,
        read_only: bool,
    ) -> Result<OwnedFd>;

    /// Whether a line of the kernel's mount table is a mount of this volume, which was mounted under this label.
    fn shows(&self, mount: &sys::MountEntry, id: &VolumeId, label: &str) -> bool;

    /// Whether a mount, an open file, a mapping or a working directory somewhere still holds the volume's top, or what became
    /// of it in a layer.
    /// Asked of a top whose end we did not see ourselves. Where the backend cannot know, `false`.
    fn in_use(&self, volume: &Dir) -> Result<bool>;

    /// Tries to make sure that the volume's content no longer changes, and finds out whether anybody still looks at it. `pin` is an `O_PATH` descriptor of the
    /// (detached) mount's root; it is closed here, which evicts the tree's dentries and so takes time.
    /// Without a pin the answer is `in_use`'s.
    fn freeze(&self, volume: &Dir, pin: Option<OwnedFd>) -> Result<Freeze>;

    /// What `freeze` does, of a volume that is thrown away: whether somebody writes to it is all one, it only must not be held.
    fn let_go(&self, volume: &Dir, pin: Option<OwnedFd>) -> Result<Freeze> {
        self.freeze(volume, pin)
    }

    /// Whether `in_use` and `freeze` know who holds a volume; else [`Backend::writers`] is asked before a seal.
    fn knows_holders(&self) -> bool {
        true
    }

    /// Whether a process may still write to what [`Backend::seal`] would take, because it has a file of it open for writing or mapped so.
    /// Walks the tree, as far as the first such file. [`Error::Refused`]: it could not be sealed anyway.
    fn writers(&self, volume: &Dir, stop: Stop<'_>) -> Result<bool> {
        let _ = (volume, stop);
        Ok(false)
    }

    /// Whether the volume's own content has a regular file of this name in its root, made since it was forked.
    fn has_marker(&self, volume: &Dir, name: &str) -> Result<bool>;

    /// Turns the volume's private content into `layer`'s `fs`, without the marker file; O(1) for overlay and btrfs, which grow with the tree
    /// only by what `writers` takes.
    ///
    /// Repeatable: when it was done already (a crash came after it), it is Ok. Nothing is synced here. What the layer
    /// stacks upon is [`Backend::stacks`]' word.
    fn seal(&self, volume: &Dir, layer: &Dir, marker: &str) -> Result<()>;

    /// Takes a seal back that moved the content: `layer`'s `fs` is the volume's private content again. Only where
    /// [`Backend::stacks`]; elsewhere a seal leaves the volume as it was.
    fn unseal(&self, layer: &Dir, volume: &Dir) -> Result<()>;

    /// Copies the volume's private content into `layer`'s `fs` as it is found, also while it is written to; the volume goes
    /// on. One moment of it only where the backend has snapshots. Grows with the size of the tree where it has not.
    fn copy(&self, volume: &Dir, layer: &Dir) -> Result<()>;

    /// Whether [`Backend::copy`] shows one moment, whatever is written meanwhile, and is O(1).
    fn has_snapshots(&self) -> bool;

    /// Whether the volume has private content that [`Backend::seal`] would take.
    fn has_content(&self, volume: &Dir) -> Result<bool>;

    /// Why size limits are not enforced on this pool as it is now; `None`: they are.
    fn why_no_limits(&self) -> Option<String>;

    /// Changes the most bytes that a volume may hold of its own.
    fn set_limit(&self, volume: &Dir, bytes: Option<u64>) -> Result<Limit>;

    /// Whether a sealed layer holds only what differs from its parents (overlay), so that an artifact is a stack.
    fn stacks(&self) -> bool;

    /// A view of what these layers show together, newest first: a detached mount, read-only, `nosuid,nodev`. `scratch` is an
    /// empty directory of the pool for what the view needs; the caller deletes it once the view is closed. `label` is as in
    /// [`Backend::mount`].
    fn content(&self, scratch: &Dir, label: &str, layers: &[LayerId]) -> Result<OwnedFd>;

    /// Makes in the empty directory `layer` a place for content from elsewhere, and opens it. [`Backend::received`] says that
    /// it is whole.
    fn receive(&self, layer: &Dir) -> Result<Dir> {
        layer.create_dir(plain::FS_NEW, 0o755)?;
        Ok(layer.open_beneath(plain::FS_NEW)?)
    }

    /// What was received becomes `layer`'s `fs`. Nothing is synced here. On an error the caller throws `layer` away.
    fn received(&self, layer: &Dir) -> Result<()> {
        Ok(layer.rename(plain::FS_NEW, layer, FS)?)
    }

    /// Merges adjacent layers, newest first, into `into`'s `fs` (made here), copying no data where links will do.
    /// `bottom`: the last one is the lowest of its stack, so marks of deletion need not be kept.
    ///
    /// Grows with the size of the trees. Ends early with [`Error::Stopped`]; after an error the caller throws `into` away.
    fn flatten(&self, layers: &[LayerId], into: &Dir, bottom: bool, stop: Stop<'_>) -> Result<()>;

    /// What a volume's private content, or a layer's, costs. Walks it: never on the path of an RPC, except where
    /// the filesystem itself counts.
    fn usage(&self, dir: &Dir, stop: Stop<'_>) -> Result<Usage>;

    /// Deletes the directory `name` of `trash` with all that a volume or layer of this backend can hold: no symlink is
    /// followed, no mount point crossed (EXDEV or EBUSY then), immutable flags are cleared, subvolumes are destroyed.
    ///
    /// A process that still has a directory of it open can make things in it faster than they are deleted: then it is
    /// ENOTEMPTY, or [`Error::Stopped`] once `stop` says so, and to be repeated later.
    fn delete(&self, trash: &Dir, name: &std::path::Path, stop: Stop<'_>) -> Result<()>;

    /// Deletes it at once if it is a volume in which nothing was written, or gone; if not it is left for [`Backend::delete`], perhaps not
    /// whole. Says which.
    fn delete_untouched(&self, trash: &Dir, name: &std::path::Path) -> Result<bool> {
        let _ = (trash, name);
        Ok(false)
    }
}
