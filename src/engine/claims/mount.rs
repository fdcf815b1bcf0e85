//! Persistent volumes at paths: staged, published, unpublished, unstaged.
//!
//! All mounts of a volume have one superblock: the first is made from its content, each other is a
//! bind of one that exists. A staging path is the caller's, and stays. The record names a path
//! before the volume is mounted there.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::data_dir::{self, is_held_open};
use super::entries::{ClaimMount, Problem};
use super::lookup::refuse_broken;
use super::types::MountClaim;
use crate::engine::error::{Context, Error, Result};
use crate::engine::failpoint::{Point, point};
use crate::engine::guard::{self, Guard};
use crate::engine::mounts;
use crate::engine::shared::Inner;
use crate::engine::target::Target;
use crate::engine::threads::Pool;
use crate::model::{MountCapability, PersistentVolume, VolumeId};
use crate::sys::{self, Dir};

/// The bits that a pod's fsGroup adds to the root's mode.
const GROUP_BITS: u32 = 0o2070;

/// Mounts a claim; repeatable.
pub(super) async fn mount(inner: &Arc<Inner>, request: MountClaim) -> Result<()> {
    let guard = Guard::take_to_leave(inner, &request.claim, guard::deadline()).await?;
    let has_parent = {
        let state = inner.state.lock();
        let held = state.claims.get(&request.claim);
        held.is_some_and(|held| held.mounts.is_empty() && !held.claim.layers.is_empty())
    };
    let mut pool = inner.pool_for_content(has_parent);
    if pool == Pool::Forks {
        let claim = request.claim.clone();
        let look = move |inner: &Arc<Inner>| data_dir::has_content(inner, &claim);
        if inner.run(Pool::Calls, look).await? {
            pool = Pool::Calls;
        }
    }
    let job = move |inner: &Arc<Inner>| {
        let may_begin = inner.refuse_late(pool);
        let mounted = may_begin.and_then(|()| mount_now(inner, &request));
        inner.ask_for_room_after(&mounted);
        drop(guard);
        mounted
    };
    inner.run(pool, job).await
}

/// The claim, as an operation that mounts it finds it.
struct ClaimView {
    claim: PersistentVolume,
    mounts: HashMap<PathBuf, ClaimMount>,
    /// Why its limit does not hold.
    limit_unenforced: Option<String>,
}

fn known(inner: &Inner, id: &VolumeId) -> Result<ClaimView> {
    let state = inner.state.lock();
    let Some(held) = state.claims.get(id) else {
        // The index may have it.
        state.health.refuse_degraded()?;
        return Err(Error::ClaimNotHere(id.to_string()));
    };
    refuse_broken(held)?;
    Ok(ClaimView {
        claim: held.claim.clone(),
        mounts: held.mounts.clone(),
        limit_unenforced: held.limit_unenforced.clone(),
    })
}

fn mount_now(inner: &Inner, request: &MountClaim) -> Result<()> {
    let mut known = known(inner, &request.claim)?;
    let target = Target::open_for_mount(&request.target)?;
    if let Some(there) = known.mounts.get(&request.target)
        && mounts::shows(&target, there.id)
    {
        return match difference(there, request) {
            None => Ok(()),
            Some(what) => Err(Error::Different {
                volume: request.claim.clone(),
                what,
            }),
        };
    }
    // Not before: kubelet repeats its calls for live mounts after a restart of its own.
    inner.refuse_degraded()?;
    // Mounts that another program unmounted are forgotten.
    known
        .mounts
        .retain(|path, mount| *path != request.target && mounts::may_be_mounted(path, mount.id));
    refuse_second_place(request, &known.mounts)?;
    let first = first(request, &known.mounts)?;
    let (dir, mount) = match first {
        Some(path) => {
            let dir = inner.volume_dir(&request.claim)?;
            (dir, mounts::bind(&path, request.read_only)?)
        }
        None => mount_first(inner, &mut known, request.read_only)?,
    };
    point(Point::ClaimMounted);
    if let Some(group) = request.mount_group.filter(|_| !request.read_only) {
        give_beyond_limit(inner, &dir, &known.claim, || give_to_group(&mount, group))?;
    }
    attach(inner, request, &target, &dir, &known, &mount)
}

/// The part of a repeated request that differs from the first, in the words of an error message
/// (CSI specification, "NodePublishVolume": with other arguments for the same target path it is
/// ALREADY_EXISTS).
///
/// The group of a staging path may differ: kubelet stages a volume once for the pods of all groups,
/// and after a restart of its own again for the pod that it meets first. Each pod has its group
/// from its publish.
fn difference(there: &ClaimMount, request: &MountClaim) -> Option<&'static str> {
    if there.read_only != request.read_only {
        return Some("readonly");
    }
    let asked = there.asked?;
    if asked.multiple_targets != request.multiple_targets {
        Some("access mode")
    } else if !there.staging && asked.mount_group != request.mount_group {
        Some("volume_mount_group (fsGroup)")
    } else {
        None
    }
}

/// A claim whose access mode allows one place is published in one.
fn refuse_second_place(request: &MountClaim, mounts: &HashMap<PathBuf, ClaimMount>) -> Result<()> {
    if request.staging || request.multiple_targets {
        return Ok(());
    }
    match mounts.iter().find(|(_, mount)| !mount.staging) {
        None => Ok(()),
        Some((elsewhere, _)) => Err(Error::PublishedElsewhere {
            volume: request.claim.clone(),
            target: elsewhere.clone(),
            why: "its access mode allows",
        }),
    }
}

/// The path whose mount the new one is a bind of: the staging path, or else any. A bind has its own
/// mode.
fn first(request: &MountClaim, mounts: &HashMap<PathBuf, ClaimMount>) -> Result<Option<PathBuf>> {
    if let Some(staged) = &request.staged_at
        && !mounts.contains_key(staged)
    {
        return Err(Error::Target {
            path: staged.clone(),
            problem: format!(
                "volume {} is not staged there; stage it first",
                request.claim
            ),
        });
    }
    if let Some(staged) = &request.staged_at {
        // It was staged so that no pod writes, and a publish does not change that.
        if mounts[staged].read_only && !request.read_only {
            return Err(Error::Different {
                volume: request.claim.clone(),
                what: "readonly",
            });
        }
        return Ok(Some(staged.clone()));
    }
    Ok(mounts.keys().min().cloned())
}

/// The first mount of a volume that is mounted nowhere. Makes its content if there is none.
fn mount_first(inner: &Inner, known: &mut ClaimView, read_only: bool) -> Result<(Dir, OwnedFd)> {
    let id = &known.claim.id;
    if is_held_open(inner, id)? {
        // A pod that was deleted by force may still write.
        return Err(Error::HeldOpen(id.clone()));
    }
    let dir = if let Some(dir) = data_dir::find(inner, &known.claim)? {
        dir
    } else {
        let (dir, limit_unenforced) = data_dir::make(inner, &known.claim)?;
        known.limit_unenforced = limit_unenforced;
        dir
    };
    let start = mounts::start_of_claim(&known.claim);
    let mount = mounts::mount(inner, &dir, id.as_str(), &start, false)?;
    if !read_only {
        return Ok((dir, mount));
    }
    // Only this mount is read-only: the superblock stays writable for others.
    let mount = sys::confined(mount, true).context("make the mount read-only")?;
    Ok((dir, mount))
}

/// Gives the root directory to the pod's fsGroup, if it is not the group's yet.
fn give_to_group(mount: &OwnedFd, group: u32) -> Result<()> {
    let pin = mount
        .try_clone()
        .map_err(|error| sys::Error::new("dup", "", error));
    let pin = Dir::from_fd(pin.context("open the volume")?, "");
    let root = pin.open_beneath(".").context("open the volume")?;
    let found = root.stat_self().context("look at the volume's root")?;
    if found.st_gid != group {
        root.set_owner(None, Some(group))
            .context("give the volume to the pod's group")?;
    }
    if found.st_gid != group || found.st_mode & GROUP_BITS != GROUP_BITS {
        root.set_mode(found.st_mode & 0o7777 | GROUP_BITS)
            .context("give the volume to the pod's group")?;
    }
    Ok(())
}

/// Gives the volume to a group. At the limit, btrfs refuses that, too. Then the limit is lifted
/// meanwhile. If the driver is killed before it is set again, the next start sets it.
fn give_beyond_limit(
    inner: &Inner,
    dir: &Dir,
    claim: &PersistentVolume,
    give: impl Fn() -> Result<()>,
) -> Result<()> {
    let given = give();
    if claim.limit().is_none() || !matches!(given, Err(Error::Full(_))) {
        return given;
    }
    let limit = |bytes| {
        let limited = inner.backend.set_limit(dir, bytes);
        limited.context("change the volume's limit")
    };
    limit(None)?;
    let given = give();
    limit(claim.limit())?;
    given
}

/// Writes the target down, attaches the mount there, and takes both back if that fails.
fn attach(
    inner: &Inner,
    request: &MountClaim,
    target: &Target<'_>,
    dir: &Dir,
    known: &ClaimView,
    mount: &OwnedFd,
) -> Result<()> {
    let id = sys::mount_point(mount.as_fd())
        .context("look at the new mount")?
        .id;
    let used = inner.now();
    let here = ClaimMount {
        id,
        staging: request.staging,
        read_only: request.read_only,
        asked: Some(MountCapability {
            multiple_targets: request.multiple_targets,
            mount_group: request.mount_group,
        }),
    };
    let record = |claim: &PersistentVolume, mounts: &HashMap<PathBuf, ClaimMount>| {
        data_dir::new_record(inner, claim, mounts, known.limit_unenforced.clone())
    };
    let claim = PersistentVolume {
        last_used: used,
        ..known.claim.clone()
    };
    let mut all = known.mounts.clone();
    all.insert(request.target.clone(), here);
    let attached = mounts::attach(inner, &request.claim, target, mount, || {
        data_dir::write(dir, &record(&claim, &all))?;
        point(Point::ClaimRecorded);
        Ok(())
    });
    if let Err(error) = attached {
        data_dir::correct(inner, &record(&known.claim, &known.mounts));
        return Err(error);
    }
    point(Point::ClaimAttached);
    let mut state = inner.state.lock();
    if let Some(held) = state.claims.get_mut(&request.claim) {
        held.mounts = all;
        held.busy_layers = Some(claim.layers);
        held.claim.last_used = used;
        held.used = true;
        held.limit_unenforced.clone_from(&known.limit_unenforced);
    }
    Ok(())
}

/// Unmounts whatever is at a path; the claim stays.
pub(super) async fn unmount(
    inner: &Arc<Inner>,
    claim: &str,
    path: &Path,
    staging: bool,
) -> Result<()> {
    let claim: Option<VolumeId> = claim.parse().ok();
    let guard = match &claim {
        Some(claim) => Some(Guard::take_to_leave(inner, claim, guard::deadline()).await?),
        None => None,
    };
    let path = path.to_owned();
    let job = move |inner: &Arc<Inner>| unmount_now(inner, claim.as_ref(), &path, staging, guard);
    inner.run(Pool::Calls, job).await
}

fn unmount_now(
    inner: &Arc<Inner>,
    claim: Option<&VolumeId>,
    path: &Path,
    staging: bool,
    guard: Option<Guard>,
) -> Result<()> {
    let mut pins = mounts::detach(path, staging)?;
    let Some(claim) = claim else {
        return Ok(());
    };
    let left = {
        let mut state = inner.state.lock();
        let Some(held) = state.claims.get_mut(claim) else {
            return Ok(());
        };
        let mounted = held.mounts.remove(path);
        if mounted.is_none() && pins.is_empty() {
            return Ok(());
        }
        let ours = mounted.and_then(|mounted| {
            let mut pins = pins.iter();
            pins.position(|(point, _)| point.unique && point.id == mounted.id)
        });
        held.claim.last_used = inner.now();
        held.used = true;
        if held.mounts.is_empty() {
            held.problem
                .take_if(|problem| matches!(problem, Problem::Unrecorded(_)));
        }
        let record = (!held.is_unrecorded()).then(|| data_dir::record(inner, held));
        (held.mounts.is_empty(), record, ours)
    };
    let (last, record, ours) = left;
    let ours = ours.map(|at| pins.swap_remove(at).1);
    let others: Vec<OwnedFd> = pins.into_iter().map(|(_, pin)| pin).collect();
    if let Some(guard) = &guard {
        guard.becomes_a_chore();
    }
    let (engine, claim) = (inner.clone(), claim.clone());
    // Slow: the new record replaces one that the disk may be writing. The end of the last mount
    // evicts the dentries of the tree and writes back the whole pool. The next caller waits for it.
    let job = move || {
        let _until_then = guard;
        // The modes of its other mounts may be unknown, and must not be written down as known.
        if let Some(record) = record {
            data_dir::correct(&engine, &record);
        }
        drop(others);
        if last {
            let_go(&engine, &claim, ours);
        } else {
            // Before the guard: the next unmount asks whether a process holds the volume.
            drop(ours);
        }
    };
    drop(inner.threads.run(Pool::Closes, job));
    Ok(())
}

/// Closes our last descriptor of a volume's mount, and finds out whether a process has another.
fn let_go(inner: &Inner, claim: &VolumeId, pin: Option<OwnedFd>) {
    // All its mounts have one superblock: once that is gone, no process holds a file of it.
    let watch = pin
        .as_ref()
        .map(|pin| inner.teardown.watches.watch(pin.as_fd()));
    drop(pin);
    let watch = watch.and_then(Result::ok);
    let gone = watch.is_some_and(|watch| watch.has_fired().is_ok());
    let free = gone || matches!(is_held_open(inner, claim), Ok(false));
    let mut state = inner.state.lock();
    if let Some(held) = state.claims.get_mut(claim)
        && free
        && held.mounts.is_empty()
    {
        held.is_let_go(inner.now());
    }
}
