//! Where volumes are mounted: what the kernel's mount table says of the targets in their records.
//! What is mounted where by this process, and how, belongs to `publish` and `claims/mount`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::error::Result;
use super::shared::Inner;
use super::target::{Found, Target};
use crate::model::VolumeId;
use crate::sys::MountEntry;

/// Where the volume is mounted, of the places where it is recorded to be.
pub(super) fn find_mounts(
    inner: &Inner,
    mounts: &[MountEntry],
    id: &VolumeId,
    label: &str,
    targets: &[&Path],
) -> Result<HashMap<PathBuf, u64>> {
    let mut found = HashMap::new();
    for &path in targets {
        // Kubelet's path may lead over a symlink; the table has it resolved.
        let resolved = path.parent().and_then(|parent| parent.canonicalize().ok());
        let resolved = resolved
            .zip(path.file_name())
            .map(|(parent, name)| parent.join(name));
        let resolved = resolved.unwrap_or_else(|| path.to_owned());
        let topmost = mounts
            .iter()
            .rev()
            .find(|mount| mount.mount_point == resolved);
        if !topmost.is_some_and(|mount| inner.backend.shows(mount, id, label)) {
            continue;
        }
        if let Some(target) = Target::open(path)?
            && let Ok(Found::Mount(point)) = target.look()
        {
            found.insert(path.to_owned(), point.id);
        }
    }
    Ok(found)
}
