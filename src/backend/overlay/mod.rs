//! Copy-on-write by overlayfs: a volume is an empty directory over a stack of immutable ones.
//!
//! A volume's `top/` takes what is written, each mount brings its own `work.N/`, and sealing is a rename of `top/`,
//! once nothing can write to it any more. What may never be sealed and has no parent (`scratch`) is `top/` itself,
//! bind-mounted: overlay on overlay is EINVAL, so docker-in-docker needs a plain directory.
//!
//! | file | says |
//! |---|---|
//! | `root` | what the root directory of a new volume looks like |
//! | `assemble` | how an overlay is put together, by either mount API |
//! | `project` | what bounds a volume's size |
//! | `view` | how owners are swapped, and how layers become reachable in a private namespace |
//! | `trial` | what must work on a pool before it is believed to |

mod assemble;
mod project;
mod root;
mod trial;
mod view;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use self::assemble::{How, Parts, STRING_LAYERS, assemble};
use self::project::Projects;
use self::view::{Owners, Views};
use super::{Backend, BackendKind, Error, Freeze, Limit, Result, Start, Stop, Usage};
use crate::model::layout::{EMPTY, FS, LAYERS, TOP, VOLUME_JSON, WORK_PREFIX};
use crate::model::{LayerId, RootAttributes, VolumeId};
use crate::sys::{self, Dir, Errno, FsContext, MountEntry, Room, Space, UnmountWatches};
use crate::tree;

/// How overlays are mounted. Both are main paths: production runs Linux 5.10 to 6.12 and newer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MountApi {
    /// `fsopen`, each layer set for itself (where directories are taken by descriptor, too: Linux 6.13).
    Descriptors,
    /// Layers as text (any kernel that has `volatile`: 5.10): through `fsopen` while they fit into 255 bytes, else by
    /// mount(2) in a private namespace.
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

/// What the source of all our mounts begins with in the kernel's mount table.
const SOURCE_PREFIX: &str = "baggageclaim:";
/// How much of a label follows: the end of it, where ids differ. Everybody who reads the table pays for each character.
const SOURCE_LENGTH: usize = 16;

/// The top of a volume to be, and an overlay configured with it and its first work directory, in which only the layers and the
/// name are missing.
#[derive(Debug)]
pub(super) struct Prepared {
    top: Dir,
    context: Option<FsContext>,
    /// The newest layer's content, which both `create` and `mount` need: from the one to the other.
    newest: Mutex<Option<Dir>>,
}

/// The overlay backend of one pool.
#[derive(Debug)]
pub struct Overlay {
    layers: Dir,
    empty: Dir,
    /// A second, detached mount of `empty`: the work directory of [`Overlay::in_use`], which must lie on another mount than
    /// the top it asks about. Shows no files and holds none.
    elsewhere: OwnedFd,
    watches: UnmountWatches,
    api: MountApi,
    views: Views,
    projects: Projects,
}

impl Overlay {
    /// The backend on `pool`, which has the directories `layers`, `empty` and `incoming`, if overlay truly works there
    /// through `api`: everything that the backend relies upon is tried once, and leaves nothing behind.
    pub fn open(pool: &Dir, api: MountApi) -> Result<Self> {
        let empty = pool.open_beneath(EMPTY)?;
        let elsewhere = sys::clone_tree(&empty)?;
        let overlay = Self {
            layers: pool.open_beneath(LAYERS)?,
            empty,
            elsewhere,
            watches: UnmountWatches::default(),
            api,
            views: Views::new(pool.try_clone()?, Room::new()?, api == MountApi::Classic),
            projects: Projects::of(pool),
        };
        trial::run(&overlay, pool)?;
        Ok(overlay)
    }

    /// Which mount API it uses.
    #[must_use]
    pub fn api(&self) -> MountApi {
        self.api
    }

    /// A detached mount of `volume` over these layers' content (newest first).
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
        let fresh = start.prepared.map(|prepared| &prepared.0);
        let work = match fresh {
            Some(_) => FIRST_WORK.to_owned(),
            None => self.make_work(volume)?,
        };
        let in_room = self.api == MountApi::Classic && lowers.need_room();
        let attempt = |work: &str| -> Result<OwnedFd> {
            let view = self.views.of(owners, in_room)?;
            let view = view.as_deref();
            let volume_seen;
            let volume = match view {
                None => volume,
                Some(view) => {
                    volume_seen = self.views.find(view, volume)?;
                    &volume_seen
                }
            };
            let newest = match view {
                None => fresh.and_then(|fresh| fresh.newest.lock().take()),
                Some(_) => None,
            };
            let mut lowers = lowers.open(self, view, newest)?;
            if lowers.is_empty() {
                lowers.push(match view {
                    None => self.empty.try_clone()?,
                    Some(view) => view.root().open_beneath(EMPTY)?,
                });
            }
            let ready = fresh.and_then(|fresh| fresh.context.as_ref());
            if let (None, Some(context), false) = (view, ready, start.durable) {
                let mounted = assemble::finish(context, &source, &lowers, read_only);
                return Ok(mounted.map_err(|error| error.of(volume.path()))?);
            }
            let parts = Parts {
                source: &source,
                lowers: &lowers,
                top: &volume.open_beneath(TOP)?,
                work: &volume.open_beneath(work)?,
                volatile: !start.durable,
                read_only,
            };
            let how = match (view.and_then(view::View::room), self.api) {
                (Some(room), _) => How::Classic(room),
                (None, MountApi::Descriptors) => How::Descriptors,
                (None, MountApi::Classic) => How::Strings,
            };
            Ok(assemble(&parts, how).map_err(|error| error.of(volume.path()))?)
        };
        let mounted = match attempt(&work) {
            // Linux 6.13 and 6.14 take no layer that lies in a detached clone: attach the clones from now on.
            Err(Error::System(error))
                if error.is(Errno::EINVAL)
                    && !owners.are_as_they_are()
                    && self.views.attach_from_now_on() =>
            {
                attempt(&self.make_work(volume)?)
            }
            result => result,
        };
        match mounted {
            Err(Error::System(error)) if error.is(Errno::EINVAL) && !owners.are_as_they_are() => {
                Err(view::unsupported(&error))
            }
            Ok(mount) if !read_only => writable(mount, volume),
            result => result,
        }
    }

    /// How the owners of the content have to be seen for the root to be `start.root`'s.
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

/// The content that a volume is a view of, newest first: layers of the pool, or, in the trial, any directories.
enum Lowers<'a> {
    Layers(&'a [LayerId]),
    /// Of the trial: paths beneath the pool, and whether to mount in a room if text is what is used.
    Trial(&'a Dir, &'a [&'a str], bool),
}

impl Lowers<'_> {
    /// Whether they are too many for the options of `fsconfig`.
    fn need_room(&self) -> bool {
        match self {
            Self::Layers(ids) => ids.len() > STRING_LAYERS,
            Self::Trial(.., in_room) => *in_room,
        }
    }

    fn newest(&self, overlay: &Overlay) -> Result<Option<Dir>> {
        Ok(match self {
            Self::Layers([newest, ..]) => Some(overlay.layers.open_beneath(layer_fs(newest))?),
            Self::Trial(pool, [newest, ..], _) => Some(pool.open_beneath(newest)?),
            Self::Layers([]) | Self::Trial(_, [], _) => None,
        })
    }

    /// All of them, of which the newest may be open already.
    fn open(
        &self,
        overlay: &Overlay,
        view: Option<&view::View>,
        newest: Option<Dir>,
    ) -> Result<Vec<Dir>> {
        let opened: sys::Result<Vec<Dir>> = match self {
            Self::Layers(ids) => {
                let layers = view.map_or(&overlay.layers, view::View::layers);
                let missing = &ids[usize::from(newest.is_some()).min(ids.len())..];
                let open = |id| layers.open_beneath(layer_fs(id));
                let newest = newest.into_iter().map(Ok);
                newest.chain(missing.iter().map(open)).collect()
            }
            Self::Trial(pool, paths, _) => {
                let pool = view.map_or(*pool, view::View::root);
                paths.iter().map(|path| pool.open_beneath(path)).collect()
            }
        };
        Ok(opened?)
    }
}

/// What the mount table shows of a label.
fn shortened(label: &str) -> &str {
    let start = label.len().saturating_sub(SOURCE_LENGTH);
    label.get(start..).unwrap_or(label)
}

fn layer_fs(id: &LayerId) -> String {
    format!("{id}/{FS}")
}

/// Where there is no room for the kernel's own directory in `work.N` it says so in its log only, and mounts read-only.
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

/// The work directory that everything has which ever was an overlay.
const FIRST_WORK: &str = "work.1";

/// The directories of a volume in which nothing was written, the innermost first.
const FRAME: [&str; 5] = [
    "work.1/work/incompat/volatile",
    "work.1/work/incompat",
    "work.1/work",
    FIRST_WORK,
    TOP,
];

/// And the one file there, which the kernel makes for a `volatile` overlay.
const DIRTY: &str = "work.1/work/incompat/volatile/dirty";

/// Deletes a volume in which nothing is left but its frame and its record; what has more in it is an error, and stays.
///
/// To find all this directory by directory takes six times the calls. What is below `work.1` is the kernel's, and no pod can reach
/// it, so a path leads nowhere else.
fn delete_frame(trash: &Dir, name: &Path, volume: &Dir) -> sys::Result<()> {
    let unless_gone = |result: sys::Result<()>| match result {
        Err(error) if error.is(Errno::ENOENT) => Ok(()),
        result => result,
    };
    unless_gone(volume.remove_file(DIRTY))?;
    for dir in FRAME {
        unless_gone(volume.remove_dir(dir))?;
    }
    unless_gone(volume.remove_file(VOLUME_JSON))?;
    trash.remove_dir(name)
}

/// What came of closing a pin.
enum Closed {
    /// Nothing else held the filesystem.
    Last,
    /// Something does; this tells when it no longer does.
    Held(OwnedFd),
    /// That is not known.
    Unwatched,
}

/// A volume's pin, if it is one of an overlay; of another the end cannot be seen.
fn of_overlay(volume: &Dir, pin: Option<OwnedFd>) -> Result<Option<Dir>> {
    let Some(pin) = pin.map(|pin| Dir::from_fd(pin, volume.path())) else {
        return Ok(None);
    };
    let is_overlay = pin.space()?.magic == Space::OVERLAY;
    Ok(is_overlay.then_some(pin))
}

/// Whether this ever was an overlay: each mount makes a directory of its own in the work directory.
fn was_mounted(volume: &Dir) -> Result<bool> {
    Ok(match volume.open_if_there(FIRST_WORK)? {
        Some(work) => work.has("work")?,
        None => false,
    })
}

/// Makes the next `work.N` of a volume: the marker of a volatile mount stays even after a clean end, and the next mount on
/// that directory is EINVAL. A first mount costs exactly one mkdir.
fn next_work(volume: &Dir) -> Result<String> {
    let mut number = 1_u32;
    loop {
        let name = format!("{WORK_PREFIX}{number}");
        if volume.ensure_dir(&name, 0o700)? {
            return Ok(name);
        }
        number += 1;
    }
}

/// Whether a volume is `top/` itself rather than an overlay.
fn is_plain(start: &Start<'_>) -> bool {
    !start.sealable && start.layers.is_empty()
}

impl Backend for Overlay {
    fn kind(&self) -> BackendKind {
        BackendKind::Overlay
    }

    fn prepare(&self, volume: &Dir) -> Result<Option<super::Prepared>> {
        let top = root::prepare(volume)?;
        volume.create_dir(FIRST_WORK, 0o700)?;
        let work = volume.open_beneath(FIRST_WORK)?;
        let context = match self.api {
            MountApi::Descriptors => Some(assemble::begin(&top, &work, true)?),
            MountApi::Classic => None,
        };
        Ok(Some(super::Prepared(Prepared {
            top,
            context,
            newest: Mutex::default(),
        })))
    }

    fn mounts_beforehand(&self) -> bool {
        true
    }

    fn write_back_error(&self, mount: BorrowedFd<'_>, start: &Start<'_>) -> Option<sys::Error> {
        // After a write-back has failed every fsync fails in a volatile overlay that was there before. On a directory of one it
        // is that question and nothing else; on what is no overlay it would wait for the disk.
        if is_plain(start) || start.durable {
            return None;
        }
        let error = sys::sync_root(mount).err()?;
        (!error.is_of_this_process()).then_some(error)
    }

    fn is_instant(&self) -> bool {
        true
    }

    fn create(&self, volume: &Dir, start: &Start<'_>) -> Result<Limit> {
        let parent = Lowers::Layers(start.layers).newest(self)?;
        if let Some(super::Prepared(prepared)) = start.prepared {
            root::dress(&prepared.top, parent.as_ref(), &start.root)?;
            *prepared.newest.lock() = parent;
            return Ok(Limit::None);
        }
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
            return Ok(match start.prepared {
                Some(super::Prepared(prepared)) => sys::bind(&prepared.top, read_only)?,
                None => sys::bind(&volume.open_beneath(TOP)?, read_only)?,
            });
        }
        let lowers = Lowers::Layers(start.layers);
        self.mount_over(volume, label, &lowers, start, read_only)
    }

    fn shows(&self, mount: &MountEntry, id: &VolumeId, label: &str) -> bool {
        if mount.filesystem == "overlay" {
            let source = mount.source.to_str();
            let shown = source.and_then(|source| source.strip_prefix(SOURCE_PREFIX));
            // Versions before showed all of it.
            return shown.is_some_and(|shown| shown == shortened(label) || shown == label);
        }
        // A bind has no source of its own, but a root: the plain directory, `…/<id>/top`.
        mount.root.ends_with(Path::new(id.as_str()).join(TOP))
    }

    fn in_use(&self, volume: &Dir) -> Result<bool> {
        use std::os::fd::AsRawFd;
        let top = match volume.open_if_there(TOP)? {
            // Where the kernel has made nothing in the first work directory, this never was an overlay's top, and the kernel
            // need not be asked: its answer costs a line in its log, which on a serial console is milliseconds in which nothing
            // else is mounted.
            Some(_) if !was_mounted(volume)? => return Ok(false),
            Some(top) => top,
            // Sealed: the kernel knows the directory, not its name.
            None => match volume.open_if_there(FS)? {
                Some(top) => top,
                None => return Ok(false),
            },
        };
        // With index=on the kernel refuses a top that another overlay holds (EBUSY) before it finds out that the work
        // directory lies on another mount (EINVAL). So nothing is ever mounted or written. As strings, which all
        // kernels take; `lowerdir` rather than `lowerdir+`, which only newer ones know.
        let context = FsContext::open("overlay")?;
        let path = |fd: &dyn AsFd| format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
        context.string("lowerdir", &path(&self.empty))?;
        context.string("upperdir", &path(&top))?;
        context.string("workdir", &path(&self.elsewhere))?;
        context.string("index", "on")?;
        Ok(!matches!(context.create(), Err(error) if error.is(Errno::EINVAL)))
    }

    fn freeze(&self, volume: &Dir, pin: Option<OwnedFd>) -> Result<Freeze> {
        // Of a bind mount the filesystem is the pool's own: making *that* read-only would be the end of everything.
        let Some(pin) = of_overlay(volume, pin)? else {
            return self.unpinned(volume);
        };
        let context = FsContext::pick(pin.as_fd()).map_err(|error| error.of(volume.path()))?;
        let result = context.flag("ro").and_then(|()| context.reconfigure());
        // The context holds the superblock as the pin does.
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
        if top.has_file(marker)? {
            let times = tree::times_of(&top.stat_self()?);
            top.remove_file(marker)?;
            top.set_times(&times)?;
        }
        Ok(volume.rename(TOP, layer, FS)?)
    }

    fn copy(&self, volume: &Dir, layer: &Dir) -> Result<()> {
        let top = volume.open_beneath(TOP)?;
        layer.create_dir(FS, 0o700)?;
        // What overlay says in there of deletions holds in a layer just as well.
        let to = layer.open_beneath(FS)?;
        tree::copy(&top, &to, tree::Method::Reflink, tree::Marks::Keep)?.tell(&to);
        Ok(())
    }

    fn has_snapshots(&self) -> bool {
        false
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
        let layers = Lowers::Layers(layers).open(self, None, None)?;
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
        // Whatever hinders that, hinders this too, and says what it is.
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
            // There is a limit on watches per user.
            Err(error)
                if matches!(error.errno(), Errno::EMFILE | Errno::ENFILE | Errno::ENOSPC) =>
            {
                return Ok(Closed::Unwatched);
            }
            Err(error) => return Err(error.into()),
        };
        drop(pin);
        // Ours was the last hold, or became it when the last writer went: then the watch has fired already.
        Ok(match watch.has_fired() {
            Ok(()) => Closed::Last,
            Err(watch) => Closed::Held(watch),
        })
    }

    /// What is known of a volume of which we hold no mount.
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
    use super::*;
    use crate::model::RootAttributes;
    use crate::model::layout::INCOMING;

    /// What Linux 6.13 and 6.14 need cannot be met on a newer kernel, but it can be done there.
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
            prepared: None,
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
