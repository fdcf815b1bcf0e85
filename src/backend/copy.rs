//! The backend for pools that can do neither overlay nor snapshots. Volumes are directories; forks
//! are copies, by reflink if the filesystem can.
//!
//! A fork walks the tree once and, without reflinks, copies its bytes. A seal always copies too: a
//! directory that a pod has seen never becomes a layer. For no error or event tells when a bind
//! mount of a plain directory is gone, and a remaining private copy of the mount could still write.
//! Hence [`Backend::in_use`] answers no and [`Backend::freeze`] yes. Before a seal,
//! [`Backend::writers`] checks for files that are open for writing. A write during the copy may be
//! in it or not, but cannot change the copy later.

use std::os::fd::OwnedFd;
use std::path::Path;

use crate::backend::bind_volume::{self, BindVolumes, FS_NEW};
use crate::backend::error::{Error, Result};
use crate::backend::method::Backend;
use crate::backend::types::{BackendKind, Limit, Start};
use crate::model::Usage;
use crate::model::layout::{FS, INCOMING};
use crate::model::{LayerId, VolumeId};
use crate::sys::{Dir, Errno, MountEntry};
use crate::tree::Stop;
use crate::tree::{self, Marks, Method};

const NO_LIMITS: &str = "the copy backend cannot enforce them";

/// The copy backend of one pool.
#[derive(Debug)]
pub struct Copy {
    volumes: BindVolumes,
}

impl Copy {
    /// Opens the backend on `pool`, which has the directories `layers` and `incoming`. Works on
    /// every filesystem that has RENAME_NOREPLACE.
    pub fn open(pool: &Dir) -> Result<Self> {
        try_rename(&pool.open_beneath(INCOMING)?)?;
        Self::open_untested(pool)
    }

    /// Opens it without trying, on a pool that had this backend.
    pub(super) fn open_untested(pool: &Dir) -> Result<Self> {
        Ok(Self {
            volumes: BindVolumes::of(pool)?,
        })
    }
}

/// Tries RENAME_NOREPLACE, on which every change of state relies. (Other backends always have it.)
fn try_rename(incoming: &Dir) -> Result<()> {
    const NAMES: [&str; 2] = ["rename-trial", "rename-trial-done"];
    for name in NAMES {
        tree::delete(incoming, Path::new(name), &|| false)?;
    }
    incoming.create_dir(NAMES[0], 0o700)?;
    match incoming.rename(NAMES[0], incoming, NAMES[1]) {
        Ok(()) => Ok(incoming.remove_dir(NAMES[1])?),
        Err(error) => {
            // Reports the first error; the next start sweeps the remains.
            let _ = incoming.remove_dir(NAMES[0]);
            Err(if error.is(Errno::EINVAL) {
                Error::Unsupported {
                    what: "the copy backend",
                    why: "the filesystem cannot rename without replacing (RENAME_NOREPLACE), \
                          as NFS cannot"
                        .to_owned(),
                }
            } else {
                error.into()
            })
        }
    }
}

impl Backend for Copy {
    fn kind(&self) -> BackendKind {
        BackendKind::Copy
    }

    fn create(&self, volume: &Dir, start: &Start<'_>) -> Result<Limit> {
        let fs = volume.make_dir(FS, 0o700)?;
        let parent = self.volumes.parent(start.layers)?;
        if let Some(parent) = &parent {
            tree::copy(parent, &fs, Method::Reflink, Marks::Refuse)?;
            // In a persistent volume it is content.
            if !start.durable {
                bind_volume::forget_marker(&fs)?;
            }
        }
        bind_volume::apply_root(&fs, &start.root, parent.is_some())?;
        self.set_limit(volume, start.size_limit)
    }

    fn mount(
        &self,
        volume: &Dir,
        _label: &str,
        start: &Start<'_>,
        read_only: bool,
    ) -> Result<OwnedFd> {
        self.volumes.mount(volume, start, read_only)
    }

    fn shows(&self, mount: &MountEntry, id: &VolumeId, _label: &str) -> bool {
        self.volumes.shows(mount, id)
    }

    fn writers(&self, volume: &Dir, stop: Stop<'_>) -> Result<bool> {
        Ok(tree::writers(&volume.open_beneath(FS)?, stop)?)
    }

    fn has_marker(&self, volume: &Dir, name: &str) -> Result<bool> {
        Ok(volume.open_beneath(FS)?.has_file(name)?)
    }

    fn seal(&self, volume: &Dir, layer: &Dir, marker: &str) -> Result<()> {
        if layer.has(FS)? {
            return Ok(());
        }
        let fs = volume.open_beneath(FS)?;
        // The remains of an interrupted seal.
        tree::delete(layer, Path::new(FS_NEW), &|| false)?;
        let new = layer.make_dir(FS_NEW, 0o700)?;
        let result = tree::copy(&fs, &new, Method::Reflink, Marks::Refuse).and_then(|_| {
            if new.has_file(marker)? {
                let times = tree::times_of(&new.stat_self()?);
                new.remove_file(marker)?;
                new.set_times(&times)?;
            }
            Ok(())
        });
        if let Err(error) = result {
            // Reports the first error; a retry or the layer's deletion removes the remains.
            let _ = tree::delete(layer, Path::new(FS_NEW), &|| false);
            return Err(error.into());
        }
        Ok(layer.rename(FS_NEW, layer, FS)?)
    }

    fn copy(&self, volume: &Dir, layer: &Dir) -> Result<()> {
        let fs = volume.open_beneath(FS)?;
        let to = layer.make_dir(FS, 0o700)?;
        tree::copy(&fs, &to, Method::Reflink, Marks::Refuse)?;
        Ok(())
    }

    fn has_content(&self, volume: &Dir) -> Result<bool> {
        Ok(volume.has(FS)?)
    }

    fn why_no_limits(&self) -> Option<String> {
        Some(NO_LIMITS.to_owned())
    }

    fn set_limit(&self, _volume: &Dir, bytes: Option<u64>) -> Result<Limit> {
        Ok(match bytes {
            None => Limit::None,
            Some(_) => Limit::Unenforced(NO_LIMITS.to_owned()),
        })
    }

    fn content(&self, _scratch: &Dir, _label: &str, layers: &[LayerId]) -> Result<OwnedFd> {
        self.volumes.content(layers)
    }

    fn usage(&self, dir: &Dir, stop: Stop<'_>) -> Result<Usage> {
        match dir.open_if_there(FS)? {
            Some(fs) => Ok(tree::usage(&fs, stop)?),
            None => Ok(Usage::default()),
        }
    }

    fn delete(&self, trash: &Dir, name: &Path, stop: Stop<'_>) -> Result<()> {
        Ok(tree::delete(trash, name, stop)?)
    }
}
