//! Queries: lists, statistics, and the state of the engine.
//!
//! Queries only read, and walk no tree: sizes are measured on the thread for walks.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::error::{Context, Error, Result};
use super::shared::Inner;
use super::state::State;
use super::target::{Found, Target};
use super::threads::Pool;
use super::types::{ArtifactRow, Measured, Status, VolumeRow, VolumeStats};
use super::volumes::Volume;
use crate::model::{Tenant, VolumeId, VolumeSpec};

/// How old a measurement may be before it is made again.
const MEASURED_FOR: Duration = Duration::from_secs(60);
/// How many volumes wait to be measured at most because of a list: measurements of layers wait
/// behind them.
const MEASURED_TOGETHER: usize = 16;

impl Measured {
    fn is_old(&self) -> bool {
        self.at.is_none_or(|at| at.elapsed() > MEASURED_FOR)
    }
}

fn row(volume: &Volume) -> VolumeRow {
    let record = &volume.record;
    let targets = volume
        .mount()
        .map_or_else(Vec::new, |_| record.targets.clone());
    VolumeRow {
        id: record.id.clone(),
        tenant: record.tenant.clone(),
        pod: record.pod.clone(),
        spec: VolumeSpec {
            size_limit: record.size_limit(),
            ..record.spec.clone()
        },
        parent: record.parent,
        layers: record.layers.len(),
        state: volume.state(),
        read_only: record.read_only,
        targets,
        created: record.created,
        usage: volume.measured.usage,
        limit_unenforced: record.limit_unenforced.clone(),
    }
}

/// The volumes, by tenant and id; those that leave included.
pub(super) fn volumes(state: &State, tenant: Option<&Tenant>) -> Vec<VolumeRow> {
    let all = state.volumes.all();
    let seen = all.filter(|volume| tenant.is_none_or(|tenant| volume.record.tenant == *tenant));
    let mut rows: Vec<_> = seen.map(row).collect();
    rows.sort_by(|a, b| (&a.tenant, &a.id, a.created).cmp(&(&b.tenant, &b.id, b.created)));
    rows
}

/// The artifacts, by tenant and name.
pub(super) fn artifacts(inner: &Inner, tenant: Option<&Tenant>) -> Vec<ArtifactRow> {
    let state = inner.state.lock();
    let table = |layer| inner.collector.tables.get(layer);
    let refused = |layer| inner.collector.tables.is_refused(layer);
    let forks = state.volumes.fork_counts();
    let seen = state
        .catalog
        .artifacts()
        .values()
        .filter(|sealed| tenant.is_none_or(|t| sealed.artifact.tenant == *t));
    let mut rows: Vec<_> = seen
        .map(|sealed| {
            let artifact = &sealed.artifact;
            ArtifactRow {
                id: artifact.id,
                tenant: artifact.tenant.clone(),
                name: state
                    .catalog
                    .is_named(artifact)
                    .then(|| artifact.reference.clone()),
                reference: artifact.reference.clone(),
                layers: artifact.layers.len(),
                usage: state.catalog.usage_of(&artifact.layers),
                created: artifact.created,
                last_used: artifact.last_used,
                expires: artifact.expires(),
                in_use_by: forks.get(&artifact.id).copied().unwrap_or(0),
                durable: sealed.durable,
                sharing: artifact.sharing,
                made_by: artifact.made_by.as_deref().cloned(),
                digests: artifact.digests,
                tables: artifact.layers.iter().map(table).collect(),
                is_too_large: artifact.layers.iter().any(refused),
            }
        })
        .collect();
    rows.sort_by(|a, b| (&a.tenant, &a.name, a.created).cmp(&(&b.tenant, &b.name, b.created)));
    rows
}

/// What a published volume uses.
pub(super) async fn stats(
    inner: &Arc<Inner>,
    volume: &VolumeId,
    path: &Path,
) -> Result<VolumeStats> {
    let absent = || Error::NotPublished {
        volume: volume.to_string(),
        path: path.to_owned(),
    };
    let (usage, limit, measure, mount) = {
        let mut state = inner.state.lock();
        let (measured, mount, limit) = find(&mut state, volume, path).ok_or_else(absent)?;
        let measure = measured.is_old() && !measured.running;
        measured.running |= measure;
        (measured.usage, limit, measure, mount)
    };
    if measure {
        measure_soon(inner, volume.clone());
    }
    let target = path.to_owned();
    let job = move |inner: &Arc<Inner>| {
        let found = Target::open(&target)?
            .map(|target| target.look())
            .transpose()?;
        let there = matches!(found, Some(Found::Mount(point)) if point.id == mount);
        there
            .then(|| inner.dirs.root.space().context("ask for the pool's room"))
            .transpose()
    };
    let space = inner.run(Pool::Calls, job).await?.ok_or_else(absent)?;
    let used = usage.map_or(0, |usage| usage.bytes);
    let total_bytes = limit.unwrap_or(space.bytes);
    let available_bytes = limit.map_or(space.bytes_available, |limit| {
        limit.saturating_sub(used).min(space.bytes_available)
    });
    Ok(VolumeStats {
        usage,
        total_bytes,
        available_bytes,
        total_inodes: space.inodes,
        available_inodes: space.inodes_free,
    })
}

/// The volume or claim that is mounted at a path: its size, its mount, its enforced limit.
fn find<'a>(
    state: &'a mut State,
    volume: &VolumeId,
    path: &Path,
) -> Option<(&'a mut Measured, u64, Option<u64>)> {
    if let Some(held) = state.claims.get_mut(volume) {
        let mount = held.mounts.get(path)?.id;
        let limit = held
            .claim
            .limit()
            .filter(|_| held.limit_unenforced.is_none());
        return Some((&mut held.measured, mount, limit));
    }
    let volume = state.volumes.live_mut(volume)?;
    let mount = volume.mount()?;
    let record = &volume.record;
    if !record.targets.iter().any(|target| target == path) {
        return None;
    }
    let limit = record.size_limit();
    let limit = limit.filter(|_| record.limit_unenforced.is_none());
    Some((&mut volume.measured, mount, limit))
}

/// Has some of the volumes measured whose size is not known, or old: first those that were never
/// measured.
pub(super) fn measure_some(inner: &Arc<Inner>) {
    let chosen: Vec<VolumeId> = {
        let mut state = inner.state.lock();
        let volumes = state
            .volumes
            .all_live_mut()
            .filter(|volume| volume.is_made());
        let (running, mut waiting): (Vec<_>, Vec<_>) = volumes
            .map(|volume| (&volume.record.id, &mut volume.measured))
            .filter(|(_, measured)| measured.running || measured.is_old())
            .partition(|(_, measured)| measured.running);
        waiting.sort_by_key(|(_, measured)| measured.at);
        waiting.truncate(MEASURED_TOGETHER.saturating_sub(running.len()));
        let chosen = waiting.into_iter().map(|(id, measured)| {
            measured.running = true;
            id.clone()
        });
        chosen.collect()
    };
    for volume in chosen {
        measure_soon(inner, volume);
    }
}

fn measure_soon(inner: &Arc<Inner>, volume: VolumeId) {
    let engine = inner.clone();
    let job = move || measure_volume(&engine, &volume);
    drop(inner.threads.run(Pool::Walks, job));
}

fn measure_volume(inner: &Inner, volume: &VolumeId) {
    let usage = inner
        .dirs
        .volumes
        .open_beneath(volume)
        .context("open the volume's directory")
        .and_then(|dir| {
            inner
                .backend
                .usage(&dir, &inner.patience())
                .context("measure the volume")
        });
    if let Err(error) = &usage {
        tracing::debug!(volume.id = %volume, %error, "could not be measured");
    }
    let mut state = inner.state.lock();
    let state = &mut *state;
    let inline = state
        .volumes
        .live_mut(volume)
        .map(|volume| &mut volume.measured);
    let claim = state.claims.get_mut(volume).map(|held| &mut held.measured);
    if let Some(measured) = inline.or(claim) {
        measured.running = false;
        measured.at = Some(Instant::now());
        measured.usage = usage.ok().or(measured.usage);
    }
}

/// The engine as a whole.
pub(super) fn status(inner: &Inner) -> Result<Status> {
    let space = inner.dirs.root.space().context("ask for the pool's room")?;
    let state = inner.state.lock();
    Ok(Status {
        pool: inner.dirs.root.path().to_owned(),
        pool_id: inner.origin().identity.id.clone(),
        backend: inner.backend.kind(),
        reason: inner.origin().reason.clone(),
        total_bytes: space.bytes,
        available_bytes: space.bytes_available,
        total_inodes: space.inodes,
        available_inodes: space.inodes_free,
        volumes: state.volumes.all_live().count(),
        artifacts: state.catalog.artifacts().len(),
        caches: state
            .catalog
            .names()
            .filter(|(name, _)| name.reference.cache().is_some())
            .count(),
        seals_pending: state.volumes.seals().count(),
        damaged: state.volumes.orphans(),
    })
}
