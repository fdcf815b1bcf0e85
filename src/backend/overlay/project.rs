//! Size limits by project quotas: each volume's project id and its limit.
//!
//! The id is in an attribute of the volume's own directory, which no pod can reach. It is never
//! read from content: a file's owner may change its project (`FS_IOC_FSSETXATTR`), even through
//! overlay. Ids are random, so a tenant cannot guess those of others. A layer keeps its volume's
//! project, but the limit ends when the volume's directory is deleted.

use std::collections::HashMap;

use crate::backend::error::Result;
use crate::backend::types::Limit;
use crate::model::layout::{LAYERS, TOP, VOLUMES};
use crate::sys::{self, Dir, Xattrs as _};

/// The project of a volume's directory, in decimal. An attribute is as durable as the directory's
/// name, whereas a file without fsync may be empty after a power cut.
const PROJECT: &str = "trusted.baggageclaim.project";
/// Set on `volumes/` once it has no volume whose project is recorded in its content only.
const RECORDED: &str = "trusted.baggageclaim.projects-recorded";

/// Smaller ids are for named projects (`/etc/projid`).
const LOWEST: u32 = 1 << 16;

/// The project quotas of one pool.
#[derive(Debug)]
pub(super) struct Projects {
    /// Why limits are not enforced, if so.
    no_quota: Option<String>,
}

impl Projects {
    /// Finds out whether limits are enforced, and records the projects of older volumes.
    pub(super) fn of(pool: &Dir) -> Self {
        if let Err(error) = record_older(pool) {
            tracing::warn!(%error, "cannot change the size limits of an older version's volumes");
        }
        Self {
            no_quota: why_no_quota(pool),
        }
    }

    pub(super) fn why_no_limits(&self) -> Option<&str> {
        self.no_quota.as_deref()
    }

    /// Limits the content of a new `top/`.
    ///
    /// The volume's directory itself is in no project. It holds the driver's records, and xfs
    /// reports a full project as a full disk (ENOSPC).
    pub(super) fn limit(&self, volume: &Dir, bytes: Option<u64>) -> Result<Limit> {
        let Some(bytes) = bytes else {
            return Ok(Limit::None);
        };
        if let Some(why) = &self.no_quota {
            return Ok(Limit::Unenforced(why.clone()));
        }
        let project = unused(volume)?;
        volume.set_xattr(PROJECT, project.to_string().as_bytes())?;
        volume.open_beneath(TOP)?.set_project(project)?;
        volume.set_project_limit(project, bytes)?;
        Ok(Limit::Enforced)
    }

    /// Puts a new work directory into the project of `top/`. Overlay renames between the two, and a
    /// rename across projects fails with EXDEV, which breaks copy-up and deletion. A pod may have
    /// changed the project of `top/`, so that is reset.
    ///
    /// A volume of an older version may have no recorded project. Then the work directory gets that
    /// of `top/`, which affects only where this volume's own files count.
    pub(super) fn enter(&self, volume: &Dir, work: &str) -> Result<()> {
        let recorded = recorded(volume)?;
        if recorded.is_none() && self.no_quota.is_some() {
            return Ok(());
        }
        let top = volume.open_beneath(TOP)?;
        let project = match recorded {
            Some(project) => {
                top.set_project(project)?;
                project
            }
            None => top.project()?,
        };
        if project != 0 {
            volume.open_beneath(work)?.set_project(project)?;
        }
        Ok(())
    }

    /// Mounts a volume of this size limit while the limit is lifted. The kernel makes directories
    /// in `work.N`, which count. At the limit xfs refuses them, and the overlay becomes read-only.
    /// No pod can write meanwhile: nothing is attached yet. If the driver is killed meanwhile, the
    /// next mount sets the limit.
    pub(super) fn without_limit<T>(
        &self,
        volume: &Dir,
        limit: Option<u64>,
        mount: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let (Some(project), Some(limit)) = (self.ends_with(volume), limit) else {
            return mount();
        };
        volume.set_project_limit(project, 0)?;
        let mounted = mount();
        volume.set_project_limit(project, limit)?;
        mounted
    }

    /// Changes the limit of a volume that has a project.
    pub(super) fn change(&self, volume: &Dir, bytes: Option<u64>) -> Result<Limit> {
        const TOO_LATE: &str =
            "it was created without a limit, or by an older version, and files keep their project";
        if let Some(why) = &self.no_quota {
            return Ok(bytes.map_or(Limit::None, |_| Limit::Unenforced(why.clone())));
        }
        let Some(project) = recorded(volume)? else {
            return Ok(bytes.map_or(Limit::None, |_| Limit::Unenforced(TOO_LATE.to_owned())));
        };
        volume.set_project_limit(project, bytes.unwrap_or(0))?;
        Ok(bytes.map_or(Limit::None, |_| Limit::Enforced))
    }

    /// The project whose limit holds as long as this directory exists.
    pub(super) fn ends_with(&self, dir: &Dir) -> Option<u32> {
        match self.no_quota {
            None => recorded(dir).ok().flatten(),
            Some(_) => None,
        }
    }

    /// Removes the limit, because the quota file keeps an entry for each project with a limit.
    pub(super) fn unlimit(trash: &Dir, project: Option<u32>) {
        if let Some(project) = project
            && let Err(error) = trash.set_project_limit(project, 0)
        {
            tracing::debug!(%error, project, "the quota file keeps the limit of a deleted project");
        }
    }
}

/// Why the limits of projects cannot be used. If `layers/` is in a project, as one that limits the
/// pool as a whole, each layer inherits it. Then no content of another project can be moved there.
fn why_no_quota(pool: &Dir) -> Option<String> {
    let of_layers = pool
        .open_beneath(LAYERS)
        .and_then(|layers| layers.project());
    match of_layers {
        // Some filesystems have no projects.
        Ok(0) | Err(_) => pool.project_quota().err().map(|why| why.to_string()),
        Ok(project) => Some(format!(
            "the pool is in project {project}, and a file is in one project only: give the pool a \
             filesystem of its own"
        )),
    }
}

/// A random project without content or limit. (A layer keeps its volume's project for life.)
fn unused(volume: &Dir) -> Result<u32> {
    loop {
        let project = u32::from_ne_bytes(sys::random_bytes());
        let is_free = match volume.project_usage(project) {
            Ok(usage) => (usage.inodes, usage.limit) == (0, 0),
            // The quota file has no entry for it.
            Err(_) => true,
        };
        // `u32::MAX` means "no project".
        if is_free && (LOWEST..u32::MAX).contains(&project) {
            return Ok(project);
        }
    }
}

/// The recorded project of a volume's directory.
fn recorded(volume: &Dir) -> sys::Result<Option<u32>> {
    let bytes = volume.xattr(PROJECT)?;
    Ok(bytes.and_then(|bytes| std::str::from_utf8(&bytes).ok()?.parse().ok()))
}

/// Records once the projects that an older version kept in the content. If two volumes share one, a
/// tenant changed its own. The content cannot tell which, so neither is recorded.
fn record_older(pool: &Dir) -> sys::Result<()> {
    let Some(volumes) = pool.open_if_there(VOLUMES)? else {
        return Ok(());
    };
    if volumes.xattr(RECORDED)?.is_some() {
        return Ok(());
    }
    let mut found: HashMap<u32, Vec<Dir>> = HashMap::new();
    for entry in volumes.entries()? {
        let Ok(volume) = volumes.open_beneath(&entry.name) else {
            continue;
        };
        // Some filesystems have no projects.
        let project = volume.open_beneath(TOP).and_then(|top| top.project());
        if let Some(project) = project.ok().filter(|project| *project != 0) {
            found.entry(project).or_default().push(volume);
        }
    }
    for (project, claimants) in found {
        if let [volume] = &claimants[..] {
            volume.set_xattr(PROJECT, project.to_string().as_bytes())?;
        }
    }
    volumes.set_xattr(RECORDED, b"")
}
