//! Publish, once more: a volume that exists is asked for again.
//!
//! Kubelet repeats a call whose answer it did not get, and after a restart of its own the calls for
//! live volumes. A repeated call finds its mount and does nothing, so it may while the engine is
//! degraded. A mount that vanished is made again, also at another target. A second target beside a
//! mounted one is refused: kubelet names one target for each volume of a pod.

use std::os::fd::AsFd;
use std::time::Duration;

use super::error::{Context, Error, Result};
use super::failpoint::{Point, point};
use super::mounts;
use super::shared::Inner;
use super::target::Target;
use super::types::{PublishRequest, Published};
use crate::model::VolumeRecord;
use crate::store;
use crate::sys;

/// Publishes a volume that exists. A failure here never touches a mount that is alive.
pub(super) fn publish_again(inner: &Inner, request: &PublishRequest) -> Result<Published> {
    let (record, mount) = {
        let state = inner.state.lock();
        let volume = state.volumes.live(&request.volume);
        // Its first publish failed between our look and our turn: the caller asks again.
        let volume = volume.filter(|volume| volume.is_made());
        let volume = volume.ok_or_else(|| Error::Busy(request.volume.clone()))?;
        (volume.record.clone(), volume.mount())
    };
    let different = |what| Error::Different {
        volume: request.volume.clone(),
        what,
    };
    if let Some(what) = difference(&record, request) {
        return Err(different(what));
    }
    let mut published = Published {
        from: None,
        parent: record.parent,
        layers: record.layers.len(),
        already: true,
        waited: Duration::ZERO,
        limit_unenforced: record.limit_unenforced.clone(),
    };
    let target = Target::open_for_mount(&request.target)?;
    if let Some(mount) = mount {
        if record.targets.contains(&request.target) && mounts::shows(&target, mount) {
            let mode = record.multiple_targets;
            return if mode.is_none_or(|mode| mode == request.multiple_targets) {
                Ok(published)
            } else {
                Err(different("access mode"))
            };
        }
        let mut others = record
            .targets
            .iter()
            .filter(|path| **path != request.target);
        if let Some(elsewhere) = others.find(|path| mounts::may_be_mounted(path, mount)) {
            return Err(Error::PublishedElsewhere {
                volume: request.volume.clone(),
                target: elsewhere.clone(),
                why: "the volume of a pod has",
            });
        }
    }
    inner.refuse_degraded()?;
    published.already = false;
    mount_again(inner, request, &target, record)?;
    Ok(published)
}

/// Mounts a volume that is mounted nowhere, and that no process holds.
fn mount_again(
    inner: &Inner,
    request: &PublishRequest,
    target: &Target<'_>,
    record: VolumeRecord,
) -> Result<()> {
    let dir = inner.volume_dir(&record.id)?;
    let in_use = inner.backend.in_use(&dir);
    if in_use.context("ask whether the volume is in use")? {
        // A process of the pod, or a copy in another namespace, holds the detached mount.
        return Err(Error::HeldOpen(record.id));
    }
    let record = VolumeRecord {
        mounted_as: None,
        multiple_targets: Some(request.multiple_targets),
        targets: vec![request.target.clone()],
        ..record
    };
    let start = mounts::start(&record);
    let mount = mounts::mount(inner, &dir, record.label(), &start, record.read_only)?;
    let mount_id = sys::mount_point(mount.as_fd()).context("look at the new mount")?;
    mounts::attach(inner, &record.id, target, &mount, || {
        store::write_volume(&dir, &record, true).context("write the volume's record")?;
        point(Point::PublishAgainRecorded);
        Ok(())
    })?;
    point(Point::PublishAgainAttached);
    inner.state.lock().volumes.mounted(record, mount_id.id);
    Ok(())
}

/// The part of a repeated request that differs from the first, in the words of an error message.
fn difference(record: &VolumeRecord, request: &PublishRequest) -> Option<&'static str> {
    if record.tenant != request.tenant || record.pod.uid != request.pod.uid {
        Some("pod")
    } else if record.spec.kind != request.spec.kind
        || record.spec.from_namespace != request.spec.from_namespace
    {
        Some("type or content")
    } else if record.spec.root != request.spec.root {
        Some("owner, group or mode")
    } else if record.spec.size_limit != request.spec.size_limit {
        Some("sizeLimit")
    } else if record.read_only != request.read_only {
        Some("readOnly")
    } else {
        None
    }
}
