//! Size limits by project quotas: which project a volume is, and what that may hold.
//!
//! A project's id stands in an attribute of the volume's own directory, which no pod can reach, and
//! is never read from content: the owner of a file may change its project (`FS_IOC_FSSETXATTR`),
//! through overlay too. Ids are random, so that no tenant can tell which are its neighbours'. The
//! id goes where the directory goes, and its limit ends with the directory, also where the content
//! has become a layer meanwhile.

use std::collections::HashMap;

use crate::backend::{Limit, Result};
use crate::model::layout::{TOP, VOLUMES};
use crate::sys::{self, Dir, Errno, Xattrs as _};

/// On a volume's directory: its project, in decimal. An attribute, since it is as durable as the
/// directory's name is: a file that was not fsynced may have a name and no content after a power
/// cut.
const PROJECT: &str = "trusted.baggageclaim.project";
/// On `volumes/`: no volume in there is from a version that kept the project in the content only.
const RECORDED: &str = "trusted.baggageclaim.projects-recorded";

/// Below are the projects that people give a name to (`/etc/projid`).
const LOWEST: u32 = 1 << 16;

/// The projects of one pool.
#[derive(Debug)]
pub(super) struct Projects {
    /// Why limits are not enforced, if they are not.
    no_quota: Option<String>,
}

impl Projects {
    /// Whether limits are enforced; and records the projects of an older version's volumes.
    pub(super) fn of(pool: &Dir) -> Self {
        if let Err(error) = record_older(pool) {
            tracing::warn!(%error, "size limits of volumes that an older version made cannot be changed");
        }
        Self {
            no_quota: pool.project_quota().err().map(|why| why.to_string()),
        }
    }

    pub(super) fn why_no_limits(&self) -> Option<&str> {
        self.no_quota.as_deref()
    }

    /// Limits what a new `top` may hold, with all that is made in it.
    ///
    /// The volume's directory itself is in no project: its records are the driver's, and xfs says
    /// of a project that is full what it says of a full disk.
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

    /// Puts a new work directory into the project of the top: what is moved between the two must not
    /// change its project, or copy-up, deletion and much else are EXDEV. A pod may have put the top
    /// elsewhere, so that goes back.
    ///
    /// Without a record (an older version has made the volume) the work directory follows the content:
    /// that decides only where this volume's own files count.
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

    /// Changes the limit of a volume that has a project.
    pub(super) fn change(&self, volume: &Dir, bytes: Option<u64>) -> Result<Limit> {
        const TOO_LATE: &str =
            "it was made without a limit, or by an older version, and files keep their project";
        if let Some(why) = &self.no_quota {
            return Ok(bytes.map_or(Limit::None, |_| Limit::Unenforced(why.clone())));
        }
        let Some(project) = recorded(volume)? else {
            return Ok(bytes.map_or(Limit::None, |_| Limit::Unenforced(TOO_LATE.to_owned())));
        };
        volume.set_project_limit(project, bytes.unwrap_or(0))?;
        Ok(bytes.map_or(Limit::None, |_| Limit::Enforced))
    }

    /// The project whose limit ends with this directory.
    pub(super) fn ends_with(&self, dir: &Dir) -> Option<u32> {
        match self.no_quota {
            None => recorded(dir).ok().flatten(),
            Some(_) => None,
        }
    }

    /// The filesystem keeps a record of every project that has a limit, also when it has nothing
    /// else.
    pub(super) fn unlimit(trash: &Dir, project: Option<u32>) {
        if let Some(project) = project
            && let Err(error) = trash.set_project_limit(project, 0)
        {
            tracing::debug!(%error, project, "the limit of what was deleted stays in the quota file");
        }
    }
}

/// A project that holds nothing and has no limit. A layer keeps the project of the volume that it
/// was, for as long as it lives.
fn unused(volume: &Dir) -> Result<u32> {
    loop {
        let mut bytes = [0; 4];
        getrandom::fill(&mut bytes).map_err(|_| volume.error("getrandom", "", Errno::EIO))?;
        let project = u32::from_ne_bytes(bytes);
        let is_free = match volume.project_usage(project) {
            Ok(usage) => (usage.inodes, usage.limit) == (0, 0),
            // Nothing is known of it.
            Err(_) => true,
        };
        // The last number stands for no project.
        if is_free && (LOWEST..u32::MAX).contains(&project) {
            return Ok(project);
        }
    }
}

/// The project that stands in a volume's record.
fn recorded(volume: &Dir) -> sys::Result<Option<u32>> {
    let bytes = volume.xattr(PROJECT)?;
    Ok(bytes.and_then(|bytes| std::str::from_utf8(&bytes).ok()?.parse().ok()))
}

/// Records the projects of volumes from a version that kept them in the content, once: then no
/// volume is from there any more. Where two volumes are in one project, a tenant has put its own
/// there. The content does not tell which, so neither is believed.
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
        // Some filesystems know of no projects.
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
