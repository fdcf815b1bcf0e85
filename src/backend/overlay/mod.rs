//! Copy-on-write by overlayfs: a volume is an upper directory over a stack of immutable layers.
//!
//! `top/` is the upper directory; each mount gets a new work directory `work.N/`. A seal renames
//! `top/` once no process can write to it. A volume without parent that is never sealed (`scratch`)
//! is a bind mount of `top/`: docker-in-docker needs a plain directory (overlay on overlay:
//! EINVAL).
//!
//! | file | content |
//! |---|---|
//! | `root` | the attributes of a new volume's root directory |
//! | `assemble` | the system calls that mount an overlay, by either mount API |
//! | `lowers` | the layers below |
//! | `work` | the work directories |
//! | `project` | size limits |
//! | `idmapped` | swapped owners, and layers in a private mount namespace |
//! | `self_test` | the features that are tried on a pool before overlay is chosen |

mod assemble;
mod idmapped;
mod lowers;
mod project;
mod root;
mod self_test;
mod work;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use serde::{Deserialize, Serialize};

use self::assemble::{How, Parts, assemble, takes_descriptors};
use self::idmapped::{Owners, Views};
use self::lowers::Lowers;
use self::project::Projects;
use self::work::{delete_frame, next_work, was_mounted};
use super::error::{Error, Result};
use super::method::Backend;
use super::types::{BackendKind, Freeze, Limit, Start};
use crate::model::Usage;
use crate::model::layout::{EMPTY, FS, LAYERS, TOP};
use crate::model::{LayerId, RootAttributes, VolumeId};
use crate::sys::{self, Dir, Errno, FsContext, MountEntry, PrivateMountNs, Space, UnmountWatches};
use crate::tree::{self, Stop};

/// How overlays are mounted. Production uses both (Linux 5.10 to 6.12, and newer).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MountApi {
    /// `fsopen`, with one call per layer. Used if directories can be descriptors (Linux 6.13).
    Descriptors,
    /// Layers in one string (Linux 5.10, which has `volatile`): by `fsopen` up to 255 bytes, else
    /// by mount(2) in a private mount namespace.
    Classic,
}

impl std::fmt::Display for MountApi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Descriptors => "descriptors",
            Self::Classic => "classic",
        })
    }
}

/// The prefix of our mounts' source in the kernel's mount table.
const SOURCE_PREFIX: &str = "baggageclaim:";
/// How many of a label's last characters follow. Every reader of the table pays for each one.
const SOURCE_LENGTH: usize = 16;

/// The overlay backend of one pool.
#[derive(Debug)]
pub struct Overlay {
    layers: Dir,
    empty: Dir,
    /// A second, detached mount of `empty`. [`Overlay::in_use`] needs a work directory on another
    /// mount than the upper directory. It stays empty.
    elsewhere: OwnedFd,
    watches: UnmountWatches,
    api: MountApi,
    views: Views,
    projects: Projects,
}

impl Overlay {
    /// Opens the backend on `pool`, which has the directories `layers`, `empty` and `incoming`.
    /// First tries every feature that the backend needs, through `api`, and cleans up.
    pub fn open(pool: &Dir, api: MountApi) -> Result<Self> {
        let overlay = Self::open_untested(pool, api)?;
        self_test::run(&overlay, pool)?;
        Ok(overlay)
    }

    /// Opens it without trying, on a pool that had this backend. Writes nothing.
    pub(super) fn open_untested(pool: &Dir, api: MountApi) -> Result<Self> {
        let empty = pool.open_beneath(EMPTY)?;
        if api == MountApi::Descriptors {
            takes_descriptors(&empty)?;
        }
        let elsewhere = sys::clone_tree(&empty)?;
        Ok(Self {
            layers: pool.open_beneath(LAYERS)?,
            empty,
            elsewhere,
            watches: UnmountWatches::default(),
            api,
            views: Views::new(
                pool.try_clone()?,
                PrivateMountNs::new()?,
                api == MountApi::Classic,
            ),
            projects: Projects::of(pool),
        })
    }

    /// A detached mount of `volume` over the content of these layers (newest first).
    fn mount_over(
        &self,
        volume: &Dir,
        label: &str,
        lowers: &Lowers<'_>,
        start: &Start<'_>,
        read_only: bool,
    ) -> Result<OwnedFd> {
        let owners = self.owners(lowers, start)?;
        let source = format!("{SOURCE_PREFIX}{}", shortened(label));
        let work = self.make_work(volume)?;
        let in_mount_ns = self.api == MountApi::Classic && lowers.need_mount_ns();
        let attempt = |work: &str| -> Result<OwnedFd> {
            let view = self.views.of(owners, in_mount_ns)?;
            let view = view.as_ref();
            let volume_seen;
            let volume = match view {
                None => volume,
                Some(view) => {
                    volume_seen = self.views.find(view, volume)?;
                    &volume_seen
                }
            };
            let mut lowers = lowers.open(self, view)?;
            if lowers.is_empty() {
                lowers.push(match view {
                    None => self.empty.try_clone()?,
                    Some(view) => view.root().open_beneath(EMPTY)?,
                });
            }
            let parts = Parts {
                source: &source,
                lowers: &lowers,
                top: &volume.open_beneath(TOP)?,
                work: &volume.open_beneath(work)?,
                volatile: !start.durable,
                read_only,
            };
            let how = match (view.and_then(idmapped::View::mount_ns), self.api) {
                (Some(mount_ns), _) => How::MountCall(mount_ns),
                (None, MountApi::Descriptors) => How::Descriptors,
                (None, MountApi::Classic) => How::Strings,
            };
            Ok(assemble(&parts, how).map_err(|error| error.of(volume.path()))?)
        };
        let mounted =
            self.projects
                .without_limit(volume, start.size_limit, || match attempt(&work) {
                    // Linux 6.13 and 6.14 take no layer from a detached clone: attach them from
                    // now on.
                    Err(Error::System(error))
                        if error.is(Errno::EINVAL)
                            && !owners.are_as_they_are()
                            && self.views.attach_from_now_on() =>
                    {
                        attempt(&self.make_work(volume)?)
                    }
                    result => result,
                });
        match mounted {
            Err(Error::System(error)) if error.is(Errno::EINVAL) && !owners.are_as_they_are() => {
                Err(idmapped::unsupported(&error))
            }
            Ok(mount) if !read_only => writable(mount, volume),
            result => result,
        }
    }

    /// The swap of owners that gives the root the owner of `start.root`.
    fn owners(&self, lowers: &Lowers<'_>, start: &Start<'_>) -> Result<Owners> {
        let wanted: &RootAttributes = &start.root;
        if (wanted.uid, wanted.gid) == (None, None) {
            return Ok(Owners::as_they_are());
        }
        let Some(newest) = lowers.newest(self)? else {
            return Ok(Owners::as_they_are());
        };
        let (uid, gid) = match start.owner {
            Some(owner) => owner,
            None => newest.stat_self().map(|root| (root.st_uid, root.st_gid))?,
        };
        Ok(Owners::swapping((uid, wanted.uid), (gid, wanted.gid)))
    }

    /// Makes the next work directory of a volume.
    fn make_work(&self, volume: &Dir) -> Result<String> {
        let work = next_work(volume)?;
        self.projects.enter(volume, &work)?;
        Ok(work)
    }
}

/// The part of a label that the mount table shows.
fn shortened(label: &str) -> &str {
    let start = label.len().saturating_sub(SOURCE_LENGTH);
    label.get(start..).unwrap_or(label)
}

/// Fails if a mount is read-only by the kernel's decision. Without space for its own directory in
/// `work.N`, the kernel mounts read-only and reports that in its log only.
fn writable(mount: OwnedFd, volume: &Dir) -> Result<OwnedFd> {
    let is_read_only = |stat: rustix::io::Result<rustix::fs::StatFs>| {
        // ST_RDONLY of statfs(2), the first bit.
        stat.map(|stat| stat.f_flags & 1 != 0)
            .map_err(|errno| volume.error("fstatfs", "", errno))
    };
    if !is_read_only(rustix::fs::fstatfs(&mount))? {
        return Ok(mount);
    }
    let why = if is_read_only(rustix::fs::fstatfs(volume))? {
        Errno::EROFS
    } else {
        Errno::ENOSPC
    };
    Err(volume.error("fsmount", "", why).into())
}

/// The result of closing a pin.
enum Closed {
    /// It was the last reference to the filesystem.
    Last,
    /// Other references remain; the descriptor becomes readable when they are gone.
    Held(OwnedFd),
    /// Unknown.
    Unwatched,
}

/// A volume's pin, if it is an overlay's; a bind mount's end cannot be watched.
fn of_overlay(volume: &Dir, pin: Option<OwnedFd>) -> Result<Option<Dir>> {
    let Some(pin) = pin.map(|pin| Dir::from_fd(pin, volume.path())) else {
        return Ok(None);
    };
    let is_overlay = pin.space()?.magic == Space::OVERLAY;
    Ok(is_overlay.then_some(pin))
}

/// Whether the volume is `top/` itself rather than an overlay.
fn is_plain(start: &Start<'_>) -> bool {
    !start.sealable && start.layers.is_empty()
}

impl Backend for Overlay {
    fn kind(&self) -> BackendKind {
        BackendKind::Overlay
    }

    fn write_back_error(&self, mount: BorrowedFd<'_>, start: &Start<'_>) -> Option<sys::Error> {
        // After a write-back error, every fsync in an existing volatile overlay fails. On its root
        // that check is all that fsync does. On other filesystems it would wait for the disk.
        if is_plain(start) || start.durable {
            return None;
        }
        let error = sys::sync_root(mount).err()?;
        (!error.is_of_this_process()).then_some(error)
    }

    fn create(&self, volume: &Dir, start: &Start<'_>) -> Result<Limit> {
        let parent = Lowers::Layers(start.layers).newest(self)?;
        root::make(volume, parent.as_ref(), &start.root)?;
        self.projects.limit(volume, start.size_limit)
    }

    fn mount(
        &self,
        volume: &Dir,
        label: &str,
        start: &Start<'_>,
        read_only: bool,
    ) -> Result<OwnedFd> {
        if is_plain(start) {
            return Ok(sys::bind(&volume.open_beneath(TOP)?, read_only)?);
        }
        let lowers = Lowers::Layers(start.layers);
        self.mount_over(volume, label, &lowers, start, read_only)
    }

    fn shows(&self, mount: &MountEntry, id: &VolumeId, label: &str) -> bool {
        if mount.filesystem == "overlay" {
            let source = mount.source.to_str();
            let shown = source.and_then(|source| source.strip_prefix(SOURCE_PREFIX));
            // Older versions show the whole label.
            return shown.is_some_and(|shown| shown == shortened(label) || shown == label);
        }
        // A bind mount has no source of its own, but a root: `…/<id>/top`.
        mount.root.ends_with(Path::new(id.as_str()).join(TOP))
    }

    fn in_use(&self, volume: &Dir) -> Result<bool> {
        use std::os::fd::AsRawFd;
        let top = match volume.open_if_there(TOP)? {
            // An empty first work directory: it never was an overlay's upper directory. Then the
            // kernel is not asked: its answer costs a line in its log. On a serial console that
            // line blocks all mounts for milliseconds.
            Some(_) if !was_mounted(volume)? => return Ok(false),
            Some(top) => top,
            // Sealed: the kernel knows the directory by inode, not by name.
            None => match volume.open_if_there(FS)? {
                Some(top) => top,
                None => return Ok(false),
            },
        };
        // With index=on the kernel first refuses an upper directory of another overlay (EBUSY),
        // then a work directory on another mount (EINVAL). So it never mounts or writes anything.
        // All kernels take strings, but only newer ones know `lowerdir+`.
        let context = FsContext::open("overlay")?;
        let path = |fd: &dyn AsFd| format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
        context.string("lowerdir", &path(&self.empty))?;
        context.string("upperdir", &path(&top))?;
        context.string("workdir", &path(&self.elsewhere))?;
        context.string("index", "on")?;
        match context.create() {
            // Before Linux 6.5 a read-only upper directory was refused by EINVAL, too, and earlier.
            Err(error) if error.is(Errno::EINVAL) && top.is_read_only()? => {
                Err(volume.error("fsopen overlay", TOP, Errno::EROFS).into())
            }
            Err(error) if error.is(Errno::EINVAL) => Ok(false),
            Err(error) if !error.is(Errno::EBUSY) => Err(error.of(volume.path()).into()),
            _ => Ok(true),
        }
    }

    fn freeze(&self, volume: &Dir, pin: Option<OwnedFd>) -> Result<Freeze> {
        // A bind mount's filesystem is the pool's: never make *that* read-only.
        let Some(pin) = of_overlay(volume, pin)? else {
            return self.unpinned(volume);
        };
        let context = FsContext::pick(pin.as_fd()).map_err(|error| error.of(volume.path()))?;
        let result = context.flag("ro").and_then(|()| context.reconfigure());
        // The context references the superblock like the pin.
        drop(context);
        let busy = match result {
            Ok(()) => false,
            Err(error) if error.is(Errno::EBUSY) => true,
            Err(error) => return Err(error.of(volume.path()).into()),
        };
        let answer = if busy { Freeze::Busy } else { Freeze::Held };
        Ok(match self.close(pin)? {
            Closed::Last => Freeze::Frozen,
            Closed::Held(watch) => answer(Some(watch)),
            // The caller asks again.
            Closed::Unwatched => answer(None),
        })
    }

    fn let_go(&self, volume: &Dir, pin: Option<OwnedFd>) -> Result<Freeze> {
        let Some(pin) = of_overlay(volume, pin)? else {
            return self.unpinned(volume);
        };
        match self.close(pin)? {
            Closed::Last => Ok(Freeze::Frozen),
            Closed::Held(watch) => Ok(Freeze::Busy(Some(watch))),
            Closed::Unwatched => self.unpinned(volume),
        }
    }

    fn has_marker(&self, volume: &Dir, name: &str) -> Result<bool> {
        match volume.open_if_there(TOP)? {
            Some(top) => Ok(top.has_file(name)?),
            None => Ok(false),
        }
    }

    fn seal(&self, volume: &Dir, layer: &Dir, marker: &str) -> Result<()> {
        let Some(top) = volume.open_if_there(TOP)? else {
            if layer.has(FS)? {
                return Ok(());
            }
            return Err(volume.error("openat2", TOP, Errno::ENOENT).into());
        };
        // Before Linux 5.15 overlayfs sets the flags of a pod's `chattr +i` on `top` itself.
        top.clear_guard_flags()?;
        if top.has_file(marker)? {
            let times = tree::times_of(&top.stat_self()?);
            top.node(marker)?.clear_guard_flags()?;
            top.remove_file(marker)?;
            top.set_times(&times)?;
        }
        Ok(volume.rename(TOP, layer, FS)?)
    }

    fn copy(&self, volume: &Dir, layer: &Dir) -> Result<()> {
        let top = volume.open_beneath(TOP)?;
        // Overlay's deletion marks mean the same in a layer.
        let to = layer.make_dir(FS, 0o700)?;
        tree::copy(&top, &to, tree::Method::Reflink, tree::Marks::Keep)?;
        Ok(())
    }

    fn has_content(&self, volume: &Dir) -> Result<bool> {
        Ok(volume.has(TOP)?)
    }

    fn why_no_limits(&self) -> Option<String> {
        self.projects.why_no_limits().map(str::to_owned)
    }

    fn set_limit(&self, volume: &Dir, bytes: Option<u64>) -> Result<Limit> {
        self.projects.change(volume, bytes)
    }

    fn unseal(&self, layer: &Dir, volume: &Dir) -> Result<()> {
        Ok(layer.rename(FS, volume, TOP)?)
    }

    fn stacks(&self) -> bool {
        true
    }

    fn content(&self, scratch: &Dir, label: &str, layers: &[LayerId]) -> Result<OwnedFd> {
        let start = Start::of_layers(layers);
        self.create(scratch, &start)?;
        self.mount(scratch, label, &start, true)
    }

    fn flatten(&self, layers: &[LayerId], into: &Dir, bottom: bool, stop: Stop<'_>) -> Result<()> {
        let layers = Lowers::Layers(layers).open(self, None)?;
        Ok(tree::flatten(&layers, into, bottom, stop)?)
    }

    fn usage(&self, dir: &Dir, stop: Stop<'_>) -> Result<Usage> {
        let content = match dir.open_if_there(TOP)? {
            Some(top) => top,
            None => dir.open_beneath(FS)?,
        };
        Ok(tree::usage(&content, stop)?)
    }

    fn delete(&self, trash: &Dir, name: &Path, stop: Stop<'_>) -> Result<()> {
        // An error here recurs in the full deletion below, which reports it.
        if self.delete_untouched(trash, name).unwrap_or(false) {
            return Ok(());
        }
        let dir = trash.open_if_there(name).ok().flatten();
        let project = dir.and_then(|dir| self.projects.ends_with(&dir));
        tree::delete(trash, name, stop)?;
        Projects::unlimit(trash, project);
        Ok(())
    }

    fn delete_untouched(&self, trash: &Dir, name: &Path) -> Result<bool> {
        let Some(dir) = trash.open_if_there(name)? else {
            return Ok(true);
        };
        let project = self.projects.ends_with(&dir);
        let is_deleted = delete_frame(trash, name, &dir).is_ok();
        if is_deleted {
            Projects::unlimit(trash, project);
        }
        Ok(is_deleted)
    }
}

impl Overlay {
    /// Closes a pin.
    fn close(&self, pin: Dir) -> Result<Closed> {
        let watch = match self.watches.watch(pin.as_fd()) {
            Ok(watch) => watch,
            // The number of watches per user is limited.
            Err(error)
                if matches!(error.errno(), Errno::EMFILE | Errno::ENFILE | Errno::ENOSPC) =>
            {
                return Ok(Closed::Unwatched);
            }
            Err(error) => return Err(error.into()),
        };
        drop(pin);
        // If no other reference was left, the watch has fired already.
        Ok(match watch.has_fired() {
            Ok(()) => Closed::Last,
            Err(watch) => Closed::Held(watch),
        })
    }

    /// The state of a volume whose mount this process does not hold.
    fn unpinned(&self, volume: &Dir) -> Result<Freeze> {
        Ok(if self.in_use(volume)? {
            Freeze::Busy(None)
        } else {
            Freeze::Frozen
        })
    }
}

#[cfg(test)]
mod tests {
    use super::lowers::layer_fs;
    use super::*;
    use crate::model::RootAttributes;
    use crate::model::layout::INCOMING;

    /// The fallback for Linux 6.13 and 6.14 works on newer kernels too.
    #[test]
    fn swapped_owners_work_with_attached_clones_too() {
        if !sys::is_root_or_skip() {
            return;
        }
        let folder = tempfile::tempdir().expect("a temporary folder");
        let pool = Dir::open(folder.path()).expect("it opens");
        let layer = LayerId::from_bits(1);
        for name in [LAYERS, EMPTY, INCOMING, "volume"] {
            pool.create_dir(name, 0o700).expect(name);
        }
        std::fs::create_dir_all(folder.path().join(LAYERS).join(layer_fs(&layer))).expect("layer");
        let overlay = match Overlay::open(&pool, MountApi::Descriptors) {
            Ok(overlay) => overlay,
            Err(error) => return sys::skip(&error),
        };
        let layers = [layer];
        let start = Start {
            layers: &layers,
            root: RootAttributes {
                uid: Some(1000),
                ..RootAttributes::default()
            },
            size_limit: None,
            sealable: true,
            owner: None,
            durable: false,
        };
        let volume = pool.open_beneath("volume").expect("volume");
        overlay.create(&volume, &start).expect("create");
        let owner = |mount: OwnedFd| Dir::from_fd(mount, "").stat_self().expect("stat").st_uid;
        assert_eq!(
            owner(
                overlay
                    .mount(&volume, "v", &start, false)
                    .expect("detached")
            ),
            1000
        );
        assert!(overlay.views.attach_from_now_on());
        assert!(!overlay.views.attach_from_now_on());
        assert_eq!(
            owner(
                overlay
                    .mount(&volume, "v", &start, false)
                    .expect("attached")
            ),
            1000
        );
    }
}
