//! The [`Backend`] trait: what every copy-on-write method can do, and the answers of a method that
//! needs nothing special.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use super::bind_volume;
use super::error::{Error, Result};
use super::types::{BackendKind, Freeze, Limit, Start};
use crate::model::layout::FS;
use crate::model::{LayerId, Usage, VolumeId};
use crate::sys::{self, Dir};
use crate::tree::Stop;

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
    fn unseal(&self, layer: &Dir, volume: &Dir) -> Result<()> {
        let (_, _) = (layer, volume);
        Ok(())
    }

    /// Copies the volume's private content into `layer`'s `fs`, even while a pod writes to it.
    /// Shows one moment only if the backend has snapshots; otherwise its cost grows with the tree.
    fn copy(&self, volume: &Dir, layer: &Dir) -> Result<()>;

    /// Whether [`Backend::copy`] is O(1) and shows one moment despite concurrent writes.
    fn has_snapshots(&self) -> bool {
        false
    }

    /// Whether each fork and each layer is a copy of a whole tree: its time grows with the tree.
    fn copies(&self) -> bool {
        !self.stacks() && !self.has_snapshots()
    }

    /// Whether the volume has private content that [`Backend::seal`] would take.
    fn has_content(&self, volume: &Dir) -> Result<bool>;

    /// Why this pool does not enforce size limits at present; `None` if it does.
    fn why_no_limits(&self) -> Option<String>;

    /// Changes the maximum of bytes that the volume itself may add.
    fn set_limit(&self, volume: &Dir, bytes: Option<u64>) -> Result<Limit>;

    /// Whether a layer holds only its difference from its parents, so that an artifact is a stack.
    /// Then each volume has a superblock of its own, and `in_use` and `freeze` know its holders.
    /// Elsewhere `writers` is asked before a seal.
    fn stacks(&self) -> bool {
        false
    }

    /// A view of the merged content of these layers, newest first: a detached mount, read-only,
    /// `nosuid,nodev`. `scratch` is an empty directory of the pool for the view's own files; the
    /// caller deletes it after it closed the view. `label` is as in [`Backend::mount`].
    fn content(&self, scratch: &Dir, label: &str, layers: &[LayerId]) -> Result<OwnedFd>;

    /// Makes a directory for imported content in the empty directory `layer`, and opens it. The
    /// caller calls [`Backend::received`] when the content is complete.
    fn receive(&self, layer: &Dir) -> Result<Dir> {
        Ok(layer.make_dir(bind_volume::FS_NEW, 0o755)?)
    }

    /// Opens again what [`Backend::receive`] made in `layer`.
    fn reopen_received(&self, layer: &Dir) -> Result<Dir> {
        Ok(layer.open_beneath(bind_volume::FS_NEW)?)
    }

    /// Turns the received content into `layer`'s `fs`. Syncs nothing. After an error the caller
    /// deletes `layer`.
    fn received(&self, layer: &Dir) -> Result<()> {
        Ok(layer.rename(bind_volume::FS_NEW, layer, FS)?)
    }

    /// Merges adjacent layers, newest first, into a new `fs` of `into`, by hard links if possible.
    /// `bottom`: the last layer is the lowest of its stack, so deletion marks are dropped.
    ///
    /// The cost grows with the trees. Ends early with [`Error::Stopped`]. On error, delete `into`.
    fn flatten(&self, layers: &[LayerId], into: &Dir, bottom: bool, stop: Stop<'_>) -> Result<()> {
        let (_, _, _, _) = (layers, into, bottom, stop);
        Err(Error::Unsupported {
            what: "flattening",
            why: "each layer is complete without its parents".to_owned(),
        })
    }

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
