//! The btrfs backend: volumes are subvolumes, forks are snapshots, layers read-only snapshots.
//!
//! A snapshot is exact despite concurrent writes, so a seal needs no freeze. (Making the subvolume
//! itself read-only would not stop processes that have files open.) Nothing tells who holds the
//! volume, so [`Backend::in_use`] answers no and [`Backend::freeze`] yes. Before a seal,
//! [`Backend::writers`] walks the tree for files that are open for writing, so that none is half
//! written. A pod can create subvolumes in its volume without privilege. A snapshot shows them as
//! empty directories, so such a volume is refused.
//!
//! Limits are simple quotas (Linux 6.7). They charge an extent to the subvolume that wrote it,
//! which is what the volume itself adds. The limit is on a level 1 group around the volume;
//! subvolumes nested in it join by themselves. Quotas affect the whole filesystem, which others may
//! share. They set an incompatible feature (`simple_quota` in `/sys/fs/btrfs/<uuid>/features`) for
//! good: no kernel before 6.7 can mount it again. So the driver enables them only with permission,
//! for the first limit.
//!
//! A fork is one transaction commit (1 to 8 ms), whatever the tree's size; so is a seal's snapshot.

use std::os::fd::OwnedFd;
use std::path::Path;

use crate::backend::bind_volume::{self, BindVolumes, FS_NEW};
use crate::backend::error::{Error, Result};
use crate::backend::method::Backend;
use crate::backend::types::{BackendKind, Limit, Start};
use crate::model::Usage;
use crate::model::layout::{FS, LAYER_JSON};
use crate::model::{LayerId, VolumeId};
use crate::sys::{
    self, Dir, Errno, FileKind, MountEntry, NestedSubvolume, QuotaGroup, Quotas, Space,
};
use crate::tree::{self, Stop};

/// The btrfs backend of one pool.
#[derive(Debug)]
pub struct Btrfs {
    pool: Dir,
    volumes: BindVolumes,
    /// Whether the driver may enable simple quotas.
    may_switch_on: bool,
}

impl Btrfs {
    /// Opens the backend on `pool`, if it is on btrfs; `layers` must exist. Changes nothing.
    ///
    /// `quotas`: the driver may enable simple quotas on the filesystem, permanently, once a volume
    /// has a limit and quotas are off. Data from before that is never counted.
    pub fn open(pool: &Dir, quotas: bool) -> Result<Self> {
        let space = pool.space()?;
        if space.magic != Space::BTRFS {
            let name = space.filesystem().unwrap_or("another filesystem");
            return Err(Error::Unsupported {
                what: "the btrfs backend",
                why: format!("it lies on {name}"),
            });
        }
        Ok(Self {
            pool: pool.try_clone()?,
            volumes: BindVolumes::of(pool)?,
            may_switch_on: quotas,
        })
    }

    /// Whether the filesystem counts what each volume writes. Asked each time, because an
    /// administrator may enable or disable quotas.
    fn counts(&self) -> bool {
        matches!(self.pool.quotas(), Ok(Quotas::Simple))
    }

    /// Makes limits work if possible; if not, returns the reason.
    fn enforce(&self) -> Result<Option<String>> {
        Ok(match self.pool.quotas()? {
            Quotas::Simple => None,
            Quotas::Full => Some(
                "full quotas (qgroups) are enabled on this btrfs and are too slow; disable them, \
                 then enable simple quotas"
                    .to_owned(),
            ),
            Quotas::Off if !self.may_switch_on => Some(
                "simple quotas are off on this btrfs; --btrfs-quota lets the driver switch them on"
                    .to_owned(),
            ),
            Quotas::Off => match self.pool.enable_simple_quotas() {
                Ok(()) => None,
                Err(error) if error.is(Errno::EINVAL) => Some(
                    "this kernel has no simple quotas (they need Linux 6.7 or newer)".to_owned(),
                ),
                Err(error) => Some(error.to_string()),
            },
        })
    }

    /// Limits the bytes that a subvolume itself adds. Idempotent: a crash may interrupt it.
    fn limit(&self, fs: &Dir, bytes: u64) -> Result<Limit> {
        let id = fs.subvolume_id()?;
        let group = QuotaGroup::around_subvolume(id);
        done_already(self.pool.set_quota_group(group, true))?;
        let of_subvolume = QuotaGroup::of_subvolume(id);
        let members = self.pool.related_quota_groups(group)?;
        if !members.contains(&of_subvolume) {
            // Subvolumes that are nested later join by themselves.
            self.add_nested(id, group)?;
            done_already(self.pool.assign_quota_group(of_subvolume, group, true))?;
            // Those that a pod created meanwhile.
            self.add_nested(id, group)?;
        }
        self.pool.limit_quota_group(group, Some(bytes))?;
        Ok(Limit::Enforced)
    }

    /// Adds all subvolumes that are nested in this one to a quota group.
    fn add_nested(&self, id: u64, group: QuotaGroup) -> Result<()> {
        let mut unvisited = vec![id];
        while let Some(within) = unvisited.pop() {
            let mut from = 0;
            while let Some(nested) = self.pool.nested_subvolume(within, from)? {
                let member = QuotaGroup::of_subvolume(nested.id);
                done_already(self.pool.assign_quota_group(member, group, true))?;
                unvisited.push(nested.id);
                from = nested.id + 1;
            }
        }
        Ok(())
    }

    /// Changes a volume that its pod no longer uses. A subvolume at its limit refuses every change
    /// of its own metadata (EDQUOT). Then the limit is removed first.
    fn change<T>(&self, fs: &Dir, change: impl Fn() -> sys::Result<T>) -> Result<T> {
        match change() {
            Err(error) if error.is(Errno::EDQUOT) => {
                self.lift_limit(QuotaGroup::around_subvolume(fs.subvolume_id()?))?;
                Ok(change()?)
            }
            result => Ok(result?),
        }
    }

    /// Fails if a subvolume is nested in `fs`, and names it.
    fn refuse_nested(fs: &Dir) -> Result<()> {
        let id = fs.subvolume_id()?;
        match fs.nested_subvolume(id, 0)? {
            None => Ok(()),
            Some(nested) => Err(Error::Refused {
                path: sys::printable(fs.path_of_nested(id, &nested).display()),
                why: "it is a nested btrfs subvolume, which a snapshot leaves empty".to_owned(),
            }),
        }
    }

    /// Destroys a subvolume and all that are nested in it, each one after those in it.
    fn destroy(&self, id: u64) -> Result<()> {
        self.destroy_until(id, &|| false)
    }

    /// Like `destroy`, but `stop` may end it between two subvolumes. There may be any number of
    /// nested ones, so each is destroyed as soon as it is found: a retry goes on from there.
    fn destroy_until(&self, id: u64, stop: Stop<'_>) -> Result<()> {
        let group = QuotaGroup::around_subvolume(id);
        self.lift_limit(group)?;
        // The nested ones from the outermost inwards, and from which id the next one is searched.
        let mut way: Vec<NestedSubvolume> = Vec::new();
        let mut from = 0;
        loop {
            let within = way.last().map_or(id, |nested| nested.id);
            if let Some(nested) = self.pool.nested_subvolume(within, from)? {
                way.push(nested);
                from = 0;
                continue;
            }
            let Some(empty) = way.pop() else {
                break;
            };
            self.destroy_nested(way.last().map_or(id, |nested| nested.id), &empty)?;
            from = empty.id + 1;
            if stop() {
                return Err(Error::Stopped);
            }
        }
        match self.pool.destroy_subvolume(id) {
            // A concurrent or repeated deletion.
            Err(error) if error.is(Errno::ENOENT) => {}
            result => result?,
        }
        self.forget_group(group);
        Ok(())
    }

    /// Destroys a subvolume with no other one in it.
    fn destroy_nested(&self, within: u64, nested: &NestedSubvolume) -> Result<()> {
        match self.pool.destroy_nested_subvolume(within, nested) {
            // A concurrent or repeated deletion.
            Err(error) if matches!(error.errno(), Errno::ENOENT | Errno::ESTALE) => Ok(()),
            // A pod can make subvolumes read-only, and then nothing in them can be destroyed. Nor
            // can a subvolume with `chattr +i` on its root, or on the directory that holds it.
            Err(error) if matches!(error.errno(), Errno::EROFS | Errno::EPERM) => {
                let subvolume = self.pool.open_subvolume(within)?;
                subvolume.set_subvolume_read_only(false)?;
                let directory = self.pool.open_directory_of(within, nested)?;
                directory.clear_guard_flags()?;
                self.pool.open_subvolume(nested.id)?.unguard_subvolume()?;
                Ok(self.pool.destroy_nested_subvolume(within, nested)?)
            }
            result => Ok(result?),
        }
    }

    /// Removes a volume's limit: at its limit, even unlink and destroying nested ones is EDQUOT.
    fn lift_limit(&self, group: QuotaGroup) -> Result<()> {
        if self.counts() && self.pool.quota_group_usage(group)?.is_some() {
            self.pool.limit_quota_group(group, None)?;
        }
        Ok(())
    }

    /// Removes a deleted subvolume's level 1 group. Errors are ignored: it takes a few 100 bytes.
    fn forget_group(&self, group: QuotaGroup) {
        if !self.counts() {
            return;
        }
        let Ok(members) = self.pool.related_quota_groups(group) else {
            return;
        };
        for member in members {
            let _ = self.pool.assign_quota_group(member, group, false);
        }
        let _ = self.pool.set_quota_group(group, false);
    }
}

/// The result of a step that an earlier call may have done.
fn done_already(result: sys::Result<()>) -> sys::Result<()> {
    match result {
        Err(error) if error.is(Errno::EEXIST) => Ok(()),
        result => result,
    }
}

impl Backend for Btrfs {
    fn kind(&self) -> BackendKind {
        BackendKind::Btrfs
    }

    fn create(&self, volume: &Dir, start: &Start<'_>) -> Result<Limit> {
        let parent = self.volumes.parent(start.layers)?;
        // Before any content exists: quotas do not count content from before they were enabled.
        let limit = match start.size_limit {
            None => None,
            Some(bytes) => Some((bytes, self.enforce()?)),
        };
        match &parent {
            Some(parent) => volume.create_snapshot(FS, parent, false)?,
            None => volume.create_subvolume(FS)?,
        }
        let fs = volume.open_beneath(FS)?;
        // The parent's author must not decide which attributes this root may get.
        fs.clear_guard_flags()?;
        // In a persistent volume it is content.
        if parent.is_some() && !start.durable {
            bind_volume::forget_marker(&fs)?;
        }
        bind_volume::apply_root(&fs, &start.root, parent.is_some())?;
        // Last: a small limit refuses the changes above, too.
        Ok(match limit {
            None => Limit::None,
            Some((_, Some(why))) => Limit::Unenforced(why),
            Some((bytes, None)) => self.limit(&fs, bytes)?,
        })
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
        let fs = volume.open_beneath(FS)?;
        // A pod can create any number of nested subvolumes at once, and the walk would visit each.
        Self::refuse_nested(&fs)?;
        Ok(tree::writers(&fs, stop)?)
    }

    fn has_marker(&self, volume: &Dir, name: &str) -> Result<bool> {
        Ok(volume.open_beneath(FS)?.has_file(name)?)
    }

    fn seal(&self, volume: &Dir, layer: &Dir, marker: &str) -> Result<()> {
        if layer.has(FS)? {
            return Ok(());
        }
        let fs = volume.open_beneath(FS)?;
        // The remains of an interrupted seal; nothing refers to them.
        if layer.has(FS_NEW)? {
            let left = layer.open_beneath(FS_NEW)?;
            left.unguard_subvolume()?;
            self.destroy(left.subvolume_id()?)?;
        }
        Self::refuse_nested(&fs)?;
        let times = if fs.has_file(marker)? {
            Some(tree::times_of(&fs.stat_self()?))
        } else {
            None
        };
        self.change(&fs, || {
            // The pod can make its volume read-only, and the marker could not be removed.
            fs.set_subvolume_read_only(false)?;
            // A layer with `chattr +i` on its root could never be deleted.
            fs.clear_guard_flags()?;
            let Some(times) = &times else { return Ok(()) };
            if fs.has_file(marker)? {
                fs.node(marker)?.clear_guard_flags()?;
                fs.remove_file(marker)?;
            }
            fs.set_times(times)
        })?;
        self.copy(volume, layer)
    }

    fn copy(&self, volume: &Dir, layer: &Dir) -> Result<()> {
        let fs = volume.open_beneath(FS)?;
        Self::refuse_nested(&fs)?;
        layer.create_snapshot(FS_NEW, &fs, true)?;
        // A process with the volume's root open may do `chattr +i` until now. A flagged subvolume
        // can be neither renamed nor destroyed.
        layer.open_beneath(FS_NEW)?.unguard_subvolume()?;
        // A subvolume that was created meanwhile would be an empty directory in the snapshot.
        if let Err(error) = Self::refuse_nested(&fs) {
            self.destroy(layer.open_beneath(FS_NEW)?.subvolume_id()?)?;
            return Err(error);
        }
        Ok(layer.rename(FS_NEW, layer, FS)?)
    }

    fn has_snapshots(&self) -> bool {
        true
    }

    fn has_content(&self, volume: &Dir) -> Result<bool> {
        Ok(volume.has(FS)?)
    }

    fn why_no_limits(&self) -> Option<String> {
        match self.pool.quotas() {
            Ok(Quotas::Simple) => None,
            Ok(Quotas::Off) if self.may_switch_on => {
                Some("simple quotas are off until a volume needs them".to_owned())
            }
            _ => Some("the filesystem has no simple quotas".to_owned()),
        }
    }

    fn set_limit(&self, volume: &Dir, bytes: Option<u64>) -> Result<Limit> {
        let fs = volume.open_beneath(FS)?;
        let Some(bytes) = bytes else {
            self.lift_limit(QuotaGroup::around_subvolume(fs.subvolume_id()?))?;
            return Ok(Limit::None);
        };
        match self.enforce()? {
            Some(why) => Ok(Limit::Unenforced(why)),
            None => self.limit(&fs, bytes),
        }
    }

    fn content(&self, _scratch: &Dir, _label: &str, layers: &[LayerId]) -> Result<OwnedFd> {
        self.volumes.content(layers)
    }

    fn receive(&self, layer: &Dir) -> Result<Dir> {
        layer.create_subvolume(FS_NEW)?;
        Ok(layer.open_beneath(FS_NEW)?)
    }

    fn received(&self, layer: &Dir) -> Result<()> {
        let new = layer.open_beneath(FS_NEW)?;
        layer.create_snapshot(FS, &new, true)?;
        self.destroy(new.subvolume_id()?)
    }

    /// Counts files and directories by a walk. If the filesystem counts bytes, they are what the
    /// subvolume wrote (as of its last write-back); otherwise all bytes seen, shared or not.
    fn usage(&self, dir: &Dir, stop: Stop<'_>) -> Result<Usage> {
        let Some(fs) = dir.open_if_there(FS)? else {
            return Ok(Usage::default());
        };
        let mut usage = tree::usage(&fs, stop)?;
        // A layer's bytes were charged to the deleted volume that wrote them. The walk includes the
        // parents' bytes; with too much, eviction only stops early and measures again.
        if self.counts() && !dir.has(LAYER_JSON)? {
            let id = fs.subvolume_id()?;
            // The group of a limit counts nested subvolumes, too.
            let limited = self
                .pool
                .quota_group_usage(QuotaGroup::around_subvolume(id))?;
            let counted = match limited {
                Some(bytes) => Some(bytes),
                None => self.pool.quota_group_usage(QuotaGroup::of_subvolume(id))?,
            };
            usage.bytes = counted.unwrap_or(usage.bytes);
        }
        Ok(usage)
    }

    fn delete(&self, trash: &Dir, name: &Path, stop: Stop<'_>) -> Result<()> {
        let stat = trash.stat_if_there(name)?;
        if stat.is_none_or(|stat| FileKind::of_mode(stat.st_mode) != FileKind::Directory) {
            return Ok(tree::delete(trash, name, stop)?);
        }
        let dir = trash.open_beneath(name)?;
        if dir.is_subvolume()? {
            return self.destroy_until(dir.subvolume_id()?, stop);
        }
        for entry in dir.entries()? {
            if entry.kind == Some(FileKind::Directory) {
                let below = dir.open_beneath(&entry.name)?;
                if below.is_subvolume()? {
                    // With `chattr +i` on its root, destroying it fails with EPERM.
                    self.change(&below, || below.unguard_subvolume())?;
                    self.destroy_until(below.subvolume_id()?, stop)?;
                }
            }
        }
        Ok(tree::delete(trash, name, stop)?)
    }
}
