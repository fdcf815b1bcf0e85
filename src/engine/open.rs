//! Open: takes a directory as a pool, or creates the pool; chooses the backend; reads the index.
//!
//! These steps need no engine yet: the lock, the format, and the error message for the person who
//! starts the driver. `recover` later handles what an earlier process left.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::clock::Clock;
use super::error::{Context, Error, Result};
use super::failpoint::{Point, point};
use super::pool::{Origin, boot_id};
use super::pool_scan::needs_index;
use super::shared::Config;
use crate::backend::{self, Backend, BackendKind, Chosen, Wanted};
use crate::model::{Fences, LayerId, layout};
use crate::store::{self, Contents, Index, PoolDirs, PoolIdentity};
use crate::sys::{self, Dir, Errno};
use crate::tree;

/// A pool, opened but not yet recovered.
pub(super) struct Opened {
    pub(super) origin: Origin,
    pub(super) dirs: PoolDirs,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) index: Index,
    pub(super) contents: Contents,
    /// The filesystem has lost a write, and this process is the first to learn of it.
    pub(super) lost: Option<sys::Error>,
}

/// Opens the pool, or makes it. Blocks.
pub(super) fn open(config: &Config) -> Result<Opened> {
    let path = &config.pool;
    let of_pool = |error| Error::of_pool(path, error);
    let dirs = PoolDirs::open(path).map_err(of_pool)?;
    point(Point::OpenLocked);
    let known = dirs.identity().map_err(of_pool)?;
    let is_new = known.is_none();
    let kind = if let Some(identity) = &known {
        Some(kept_backend(path, identity, config.backend)?)
    } else {
        nothing_is_there(path, &dirs)?;
        config.backend
    };
    sweep(&dirs)?;
    point(Point::OpenSwept);
    let wanted = Wanted {
        kind,
        api: config.mount_api,
        btrfs_quota: config.btrfs_quota,
        untested: false,
    };
    let (chosen, lost) = choose_backend(&dirs, wanted, !is_new);
    let chosen = chosen.map_err(|error| match error {
        backend::Error::System(error) => of_pool(error.into()),
        error => wrong(path, error.to_string()),
    })?;
    let identity = match known {
        Some(identity) => identity,
        None => found(&dirs, chosen.kind).map_err(of_pool)?,
    };
    let needs_index = needs_index(Some(&dirs.layers), Some(&dirs.volumes))?;
    let (index, mut contents) = open_index(&dirs, needs_index).map_err(of_pool)?;
    if is_new {
        contents.fences = Fences::of_new_pool();
    }
    point(Point::OpenIndexed);
    tracing::info!(pool = %path.display(), backend = %chosen.kind, reason = %chosen.reason,
        "pool opened");
    Ok(Opened {
        origin: Origin {
            boot: boot_id()?,
            superblock: sys::superblock(&dirs.root),
            identity,
            reason: chosen.reason,
        },
        dirs,
        backend: chosen.backend,
        index,
        contents,
        lost,
    })
}

/// A pool that cannot be opened.
#[derive(Debug, Clone, Copy)]
pub struct ClosedPool {
    /// Its backend, as far as it says which.
    pub backend: Option<BackendKind>,
}

fn wrong(path: &Path, problem: String) -> Error {
    Error::Pool {
        path: path.to_owned(),
        problem,
    }
}

/// The backend of a pool that exists; it is an error to want another.
fn kept_backend(
    path: &Path,
    identity: &PoolIdentity,
    wanted: Option<BackendKind>,
) -> Result<BackendKind> {
    let made_with = &identity.backend;
    let Ok(kind) = serde_json::from_value(made_with.clone().into()) else {
        let problem = format!("it was made with backend {made_with:?}, which is unknown");
        return Err(wrong(path, problem));
    };
    match wanted {
        Some(wanted) if wanted != kind => Err(wrong(
            path,
            format!(
                "it was made with backend {kind}, and {wanted} is asked for; a pool keeps its \
                 backend: use another directory"
            ),
        )),
        _ => Ok(kind),
    }
}

/// What is known of a pool that cannot be opened; `None`: there is none.
pub(super) fn look(pool: &Path) -> Option<ClosedPool> {
    let root = match Dir::open(pool) {
        Err(error) if error.is(Errno::ENOENT) || error.is(Errno::ENOTDIR) => return None,
        root => root.ok(),
    };
    // A disk that fails, or a damaged filesystem, hides whether there is one.
    let is_new = |root: &Dir| is_new(root).unwrap_or(false);
    if root.as_ref().is_some_and(is_new) {
        return None;
    }
    let backend = root.as_ref().and_then(PoolIdentity::read_backend);
    let backend = backend.and_then(|name| serde_json::from_value(name.into()).ok());
    Some(ClosedPool { backend })
}

/// Whether a directory has nothing of a pool.
fn is_new(root: &Dir) -> sys::Result<bool> {
    if root.has(layout::POOL_JSON)? {
        return Ok(false);
    }
    for place in [layout::LAYERS, layout::VOLUMES] {
        if let Some(dir) = root.open_if_there(place)?
            && !dir.entries()?.is_empty()
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A directory without `pool.json` must have no layers: their backend would be unknown.
fn nothing_is_there(path: &Path, dirs: &PoolDirs) -> Result<()> {
    if dirs.layers.entries().context("read layers/")?.is_empty() {
        return Ok(());
    }
    let problem = format!(
        "{} is missing and layers/ is not empty; restore it: \
         {{\"format\":{},\"id\":\"{:032x}\",\"backend\":\"…\"}} with the backend that created the \
         layers",
        layout::POOL_JSON,
        PoolIdentity::FORMAT,
        sys::random(),
    );
    Err(wrong(path, problem))
}

/// Gives the directory an identity: from here on it is a pool.
fn found(dirs: &PoolDirs, backend: BackendKind) -> store::Result<PoolIdentity> {
    let identity = PoolIdentity {
        format: PoolIdentity::FORMAT,
        id: format!("{:032x}", sys::random()),
        backend: backend.to_string(),
    };
    dirs.set_identity(&identity)?;
    point(Point::OpenFounded);
    Ok(identity)
}

/// Removes incomplete imports and fetches, and an incomplete reserve.
fn sweep(dirs: &PoolDirs) -> Result<()> {
    // Before anything needs room: as large as the reserve, and nothing else frees it.
    if let Err(error) = dirs.root.free_temporary(layout::RESERVE.as_ref()) {
        tracing::warn!(%error, "an incomplete reserve file could not be removed");
    }
    for entry in dirs.incoming.entries().context("read incoming/")? {
        let key = LayerId::from_bits(sys::random());
        let swept = dirs
            .incoming
            .rename(&entry.name, &dirs.trash, key.to_string());
        if let Err(error) = swept {
            // It does no harm: each import has a directory name of its own.
            tracing::error!(%error,
                "an incomplete import or fetch could not be moved to trash/; it stays until the \
                 next start");
        }
    }
    Ok(())
}

/// Tries the wanted backend. Also returns whether the filesystem has lost a write, if this process
/// is the first to learn of it.
fn choose_backend(
    dirs: &PoolDirs,
    wanted: Wanted,
    is_known: bool,
) -> (backend::Result<Chosen>, Option<sys::Error>) {
    let choose = || backend::choose(&dirs.root, wanted);
    let first = choose();
    if first.is_ok() {
        return (first, None);
    }
    // Overlayfs refuses to mount after a failed write-back that no process has been told of.
    let lost = dirs.root.sync_filesystem().err();
    if let Some(error) = &lost {
        remember_lost(dirs, error);
    }
    let second = if lost.is_some() { choose() } else { first };
    // A self-test takes some blocks and inodes. The start needs some, too, but fewer.
    let is_full = matches!(&second, Err(backend::Error::System(error)) if error.is_full());
    if is_full && is_known {
        free_some(dirs);
        let untested = true;
        return (
            backend::choose(&dirs.root, Wanted { untested, ..wanted }),
            lost,
        );
    }
    (second, lost)
}

/// Opens the index. That writes to its file, for which btrfs needs space.
fn open_index(dirs: &PoolDirs, is_needed: bool) -> store::Result<(Index, Contents)> {
    let open = || {
        if is_needed {
            Index::open_existing(&dirs.root)
        } else {
            Index::open(&dirs.root)
        }
    };
    match open() {
        Err(error) if error.is_full() => {
            free_some(dirs);
            open()
        }
        opened => opened,
    }
}

/// Frees the reserve, which exists for that. If that is not enough, it frees some of the garbage.
fn free_some(dirs: &PoolDirs) {
    const BYTES: u64 = 4 << 20;
    const INODES: u64 = 64;
    let is_enough = || {
        dirs.root.space().is_ok_and(|space| {
            let inodes = space.inodes == 0 || space.inodes_free >= INODES;
            space.bytes_available >= BYTES && inodes
        })
    };
    if dirs.root.remove_file(layout::RESERVE).is_ok() {
        point(Point::ReserveGivenBack);
    }
    if !is_enough() {
        let names = |place: &Dir| {
            let entries = place.entries().unwrap_or_default().into_iter();
            entries.map(|entry| PathBuf::from(entry.name))
        };
        // The top of a volume may still be held open: that is asked of the backend, later.
        let is_volume = |name: &PathBuf| dirs.trash.has(name.join(layout::VOLUME_JSON));
        let rubbish = names(&dirs.trash).filter(|name| is_volume(name).is_ok_and(|is| !is));
        for name in rubbish {
            if let Err(error) = tree::delete(&dirs.trash, &name, &is_enough) {
                tracing::debug!(name = %name.display(), %error,
                    "could not be deleted yet; retrying later");
            }
        }
    }
}

/// Writes down that what exists until now is not to be believed, before anything else can fail: the
/// kernel says it once, and this start may not come to where it is acted upon.
fn remember_lost(dirs: &PoolDirs, error: &sys::Error) {
    let clock = Clock::default();
    let written = boot_id().and_then(|boot| {
        let until = clock.now();
        let failure = store::WritebackFailure {
            boot,
            until,
            unfinished: true,
        };
        let write = || store::record_writeback_failure(&dirs.root, &failure);
        let written = match write() {
            // The reserve is made again by a round that finds room.
            Err(error) if error.is_full() && dirs.root.remove_file(layout::RESERVE).is_ok() => {
                write()
            }
            written => written,
        };
        written.context("write the record of a write-back error")
    });
    point(Point::WritebackFailureNoted);
    tracing::error!(%error, "the disk failed to write back data while no driver was running");
    if let Err(error) = written {
        tracing::error!(%error,
            "the write-back error could not be recorded in the pool; a restart of the driver \
             forgets it");
    }
}
