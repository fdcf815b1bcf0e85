//! Publish: from a request to a mount at its target.
//!
//! The path of one call. No step's cost grows with the size of the tree: make the mount point, make
//! the volume's directory and content, write its record, mount it detached, attach it. If a step
//! fails, the earlier steps are undone in reverse order. The next start handles a publish that a
//! crash interrupted (`recover`). A publish that finds no space waits for a round of garbage
//! collection and begins again.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::error::{Context, Error, Result};
use super::failpoint::{Point, point};
use super::guard::{self, Guard};
use super::hit::Hit;
use super::lifecycle::Observation;
use super::notice::What;
use super::shared::Inner;
use super::state::{Resolution, State};
use super::target::Target;
use super::threads::Pool;
use super::types::{PublishRequest, Published};
use super::{mounts, republish};
use crate::model::{
    ArtifactId, LayerId, Reference, SealPlan, Sharing, VolumeKind, VolumeRecord, layout,
};
use crate::store;
use crate::sys::{self, Dir, Errno, Space};

/// How long a publish that found the pool full goes on making space, while there is something to
/// evict. Kubelet gives a call two minutes.
const ROOM_WAIT: Duration = Duration::from_secs(10);

/// A publish whose volume is known to start from this.
struct Plan {
    record: VolumeRecord,
    from: Option<Reference>,
    hit: Option<Hit>,
    waited: Duration,
}

/// Publishes a volume; waits for its content if that is about to be sealed.
pub(super) async fn publish(inner: &Arc<Inner>, request: PublishRequest) -> Result<Published> {
    if let VolumeKind::Import { .. } = request.spec.kind {
        let why = "this version makes no volumes from archives or images yet".to_owned();
        return Err(Error::Unsupported {
            what: "type import".to_owned(),
            why,
        });
    }
    let request = Arc::new(request);
    let mut guard = Guard::take_to_leave(inner, &request.volume, guard::deadline()).await?;
    let started = Instant::now();
    let mut full_since = None;
    let mut last = false;
    let result = loop {
        let gone = inner.collector.rounds.gone();
        let plan = plan(inner, &request, started).await?;
        let (result, held) = attempt(inner, &request, plan, guard).await?;
        let Some(held) = held else { break result };
        if last {
            // A copy asked before. From now on its source could be evicted for it.
            if !matches!(&result, Err(Error::Full(shortage)) if shortage.needs > 0) {
                inner.ask_for_room_after(&result);
            }
            break result;
        }
        guard = held;
        let since = *full_since.get_or_insert_with(Instant::now);
        last = !make_room(inner, &result, since, gone).await;
    };
    if result.as_ref().is_err_and(Error::is_lost_write) {
        // The kernel mounts no volatile overlay over a disk with a write-back error until a process
        // has read that error. A seal would read it, but without a publish there is no seal.
        let sync = |inner: &Arc<Inner>| inner.sync(&inner.durability.lock());
        if let Err(error) = inner.run(Pool::Syncs, sync).await {
            tracing::warn!(%error, "a publish failed because the disk failed to write back data");
        }
    }
    result
}

/// Does what is planned. A failure because the pool is full comes with the guard of the volume, for
/// another attempt.
async fn attempt(
    inner: &Arc<Inner>,
    request: &Arc<PublishRequest>,
    plan: Option<Plan>,
    guard: Guard,
) -> Result<(Result<Published>, Option<Guard>)> {
    let request = request.clone();
    let has_parent = (plan.as_ref()).is_some_and(|plan| !plan.record.layers.is_empty());
    let pool = inner.pool_for_content(has_parent);
    let job = move |inner: &Arc<Inner>| {
        let result = match plan {
            Some(plan) => {
                let may_begin = inner.refuse_late(pool);
                may_begin.and_then(|()| publish_new(inner, &request, plan))
            }
            None => republish::publish_again(inner, &request),
        };
        // Otherwise released before the answer: the caller may go on with this volume at once.
        let guard = matches!(result, Err(Error::Full(_))).then_some(guard);
        Ok((result, guard))
    };
    inner.run(pool, job).await
}

/// Waits for a round of garbage collection. So a publish that found no space does not fail while
/// others fill the pool faster than it is emptied. Returns whether it may wait again after one more
/// attempt. It may not if nothing was evicted or deleted since `gone` was counted, if it has waited
/// for long, or if the engine closes.
async fn make_room(
    inner: &Arc<Inner>,
    failed: &Result<Published>,
    since: Instant,
    gone: u64,
) -> bool {
    let left = ROOM_WAIT.saturating_sub(since.elapsed());
    let round = tokio::time::timeout(left, inner.collector.rounds.next());
    inner.ask_for_room_after(failed);
    let waited = tokio::select! {
        waited = round => waited.is_ok(),
        _refusal = inner.state.when(|state| state.health.refuse_changes().err()) => false,
    };
    // btrfs frees space later, at the end of a transaction or in the background. Cycle after cycle
    // would evict everything.
    let comes_back_later = || {
        let space = inner.dirs.root.space();
        space.is_ok_and(|space| space.magic == Space::BTRFS)
    };
    waited && !comes_back_later() && inner.collector.rounds.gone() > gone
}

/// Decides what the volume starts from and pins that; `None`: the volume exists already. Waits for
/// content that is about to be sealed.
async fn plan(
    inner: &Arc<Inner>,
    request: &PublishRequest,
    started: Instant,
) -> Result<Option<Plan>> {
    let state = match decide(inner, &mut inner.state.lock(), request, started)? {
        Decision::Planned(plan) => return Ok(plan),
        Decision::Coming(state) => state,
    };
    tracing::info!(volume.id = %request.volume, %state,
        "waiting for content that is being made or sealed");
    let reference = || asked(request);
    inner.say_of(&request.tenant, &request.pod, || What::WaitingForInput {
        reference: reference(),
        state: state.clone(),
        at_most: inner.config.input_wait,
    });
    let _wait = inner.counters().wait(request.spec.kind.type_name());
    let mut last = state;
    let decided = inner
        .state
        .when(|state| match decide(inner, state, request, started) {
            Ok(Decision::Coming(state)) => {
                last = state;
                None
            }
            Ok(Decision::Planned(plan)) => Some(Ok(plan)),
            Err(error) => Some(Err(error)),
        });
    let waited = request.waited + started.elapsed();
    let left = inner.config.input_wait.saturating_sub(waited);
    let decided = tokio::time::timeout(left, decided).await;
    decided.unwrap_or_else(|_| {
        Err(Error::Coming {
            reference: reference(),
            state: last,
            waited: inner.config.input_wait,
        })
    })
}

/// The name of content that is waited for, or is missing: that of an input.
fn asked(request: &PublishRequest) -> Reference {
    let asked = request.spec.kind.asks_for();
    asked.expect("only an input needs content, and it asks for a name")
}

/// The known facts about a volume that is to be published.
#[expect(
    clippy::large_enum_variant,
    reason = "there is one at a time, and it is taken apart at once"
)]
enum Decision {
    /// What is to be done; `None`: the volume exists already.
    Planned(Option<Plan>),
    /// Its content is about to be sealed; how far that is.
    Coming(String),
}

fn decide(
    inner: &Arc<Inner>,
    state: &mut State,
    request: &PublishRequest,
    started: Instant,
) -> Result<Decision> {
    state.health.refuse_closing()?;
    if state.volumes.live(&request.volume).is_some() {
        return Ok(Decision::Planned(None));
    }
    state.health.refuse_degraded()?;
    if state.claims.contains(&request.volume) {
        return Err(Error::Different {
            volume: request.volume.clone(),
            what: "kind: it is a claim",
        });
    }
    let from = match state.resolve(request) {
        Resolution::Missing => {
            return Err(Error::NoSuchContent(request.source(&asked(request))));
        }
        Resolution::Coming(state) => return Ok(Decision::Coming(state)),
        Resolution::Empty => None,
        Resolution::Fork(reference, parent, layers) => Some((reference, parent, layers)),
    };
    let plan = pin(inner, state, request, from, started);
    Ok(Decision::Planned(Some(plan)))
}

/// Enters a new volume into the state, which pins its parent's layers from here on.
fn pin(
    inner: &Inner,
    state: &mut State,
    request: &PublishRequest,
    from: Option<(Reference, ArtifactId, Vec<LayerId>)>,
    started: Instant,
) -> Plan {
    let (from, parent, layers) = match from {
        Some((reference, parent, layers)) => (Some(reference), Some(parent), layers),
        None => (None, None, Vec::new()),
    };
    let now = inner.now();
    if let Some(id) = parent.filter(|id| state.catalog.touch(*id, now)) {
        state.volumes.want(&request.volume, id);
    }
    let sealed = parent.and_then(|id| state.catalog.get(&id));
    let hit = from.as_ref().zip(sealed);
    let hit = hit.map(|(from, sealed)| Hit::of(inner, state, request, from, &sealed.artifact));
    let record = VolumeRecord {
        format: VolumeRecord::FORMAT,
        id: request.volume.clone(),
        boot: inner.boot().to_owned(),
        superblock: inner.origin().superblock,
        created: now,
        tenant: request.tenant.clone(),
        pod: request.pod.clone(),
        spec: request.spec.clone(),
        read_only: request.read_only,
        parent,
        layers,
        seal: seal_plan(state, request, parent, from.as_ref()),
        policy_limit: policy_limit(state, request),
        limit_unenforced: None,
        mounted_as: None,
        multiple_targets: Some(request.multiple_targets),
        targets: vec![request.target.clone()],
    };
    state.volumes.prepare(record.clone());
    Plan {
        record,
        from,
        hit,
        waited: started.elapsed(),
    }
}

/// The size limit that the policies of the namespace give a volume without one of its own.
fn policy_limit(state: &State, request: &PublishRequest) -> Option<u64> {
    let (reference, _) = request.spec.kind.committed_as()?;
    let by_policy = state.policies.size_limit(&request.name(&reference));
    by_policy.filter(|_| request.spec.size_limit.is_none())
}

/// What the volume's content will be sealed as, if ever.
fn seal_plan(
    state: &State,
    request: &PublishRequest,
    parent: Option<ArtifactId>,
    from: Option<&Reference>,
) -> Option<SealPlan> {
    let (reference, keep) = request.spec.kind.committed_as()?;
    // A resource cache that was found is complete. What a step changes in its view is not kept.
    let found_complete = reference.first_writer_wins() && from == Some(&reference);
    let never = keep.commit == crate::model::Commit::Never;
    if request.read_only || never || found_complete {
        return None;
    }
    let parent = parent.and_then(|id| state.catalog.get(&id));
    let is_own = parent.is_some_and(|sealed| sealed.artifact.tenant == request.tenant);
    let parent = parent.map(|sealed| sealed.artifact.sharing);
    // Content that follows a commit of its own name follows that commit's number, too. A clear of
    // the name in the shared tier is older or newer than that number.
    let of_name = parent.filter(|_| is_own && from == Some(&reference));
    let follows = of_name.and_then(|sharing| sharing.follows());
    // A step that began before a clear may have ended after the tier's answer. A commit of its
    // content is as old as that content, so the tier refuses it.
    let is_older = |sharing: Sharing| sharing.is_older_than_clear(request.cleared);
    let base = if of_name.is_some_and(is_older) {
        follows
    } else {
        request.base.max(follows)
    };
    // It holds content of its parent.
    let never_shared = !request.share || parent.is_some_and(|sharing| sharing.never);
    Some(SealPlan {
        artifact: ArtifactId::from_bits(sys::random()),
        layer: LayerId::from_bits(sys::random()),
        reference,
        keep,
        base,
        never_shared,
        fence: state.fences.newest(),
    })
}

/// Makes and mounts a volume that does not exist yet.
fn publish_new(inner: &Inner, request: &PublishRequest, plan: Plan) -> Result<Published> {
    let mut made = Made::default();
    let published = make_new(inner, request, plan, &mut made);
    if published.is_err() {
        take_back(inner, request, &made);
    }
    published
}

/// Everything that a publish has made on disk until now.
#[derive(Debug, Default)]
struct Made {
    target: bool,
    directory: bool,
}

fn make_new(
    inner: &Inner,
    request: &PublishRequest,
    plan: Plan,
    made: &mut Made,
) -> Result<Published> {
    let target = Target::open_for_mount(&request.target)?;
    made.target = target.make_beside(&inner.dirs.root)?;
    point(Point::PublishTargetMade);

    let mut record = plan.record;
    let dir = make_directory(inner, &record)?;
    made.directory = true;
    point(Point::PublishDirectoryMade);
    let mounted = make_content_and_mount(inner, &dir, &mut record);
    let (mount, mount_id) = mounted.map_err(|error| {
        let lost = plan.from.as_ref().zip(lost_layer(inner, &record));
        lost.map_or(error, |(reference, layer)| Error::LostContent {
            reference: reference.clone(),
            layer,
        })
    })?;
    point(Point::PublishMounted);
    target.attach(mount.as_fd())?;
    point(Point::PublishAttached);

    let published = Published {
        from: plan.from,
        parent: record.parent,
        layers: record.layers.len(),
        already: false,
        waited: plan.waited,
        limit_unenforced: record.limit_unenforced.clone(),
    };
    match plan.hit {
        Some(hit) => hit.tell(inner, &record),
        None => inner.counters().missed(record.spec.kind.type_name()),
    }
    inner.state.lock().volumes.mounted(record, mount_id);
    Ok(published)
}

/// Takes back what a failed publish made.
fn take_back(inner: &Inner, request: &PublishRequest, made: &Made) {
    let volume = &request.volume;
    if made.target {
        let target = Target::open(&request.target);
        let removed = target.and_then(|target| target.map_or(Ok(()), |target| target.remove()));
        if let Err(error) = removed {
            tracing::error!(volume.id = %volume, %error,
                "a publish failed, and its target could not be removed");
        }
    }
    if made.directory
        && let Err(error) = inner.throw_away(&inner.dirs.volumes, volume.as_ref())
    {
        tracing::error!(volume.id = %volume, %error,
            "a publish failed, and the volume's directory could not be moved to trash/");
    }
    // Last: until here the parent's layers must stay.
    let mut state = inner.state.lock();
    state.volumes.observe(volume, Observation::PublishFailed);
    drop(state);
    // Callers that wait for content of this volume wait for nothing.
    inner.state.notify();
}

/// The first layer of a volume that is missing or has no content: another program deleted it. Only
/// looked for after a failure.
fn lost_layer(inner: &Inner, record: &VolumeRecord) -> Option<LayerId> {
    let is_lost = |layer: &&LayerId| {
        let content = Path::new(&layer.to_string()).join(layout::FS);
        matches!(inner.dirs.layers.has(content), Ok(false))
    };
    record.layers.iter().find(is_lost).copied()
}

/// Makes `volumes/<id>`. An unknown entry of that name is no volume, and goes to the trash.
fn make_directory(inner: &Inner, record: &VolumeRecord) -> Result<Dir> {
    let volumes = &inner.dirs.volumes;
    let create = || volumes.create_dir(&record.id, 0o700);
    let created = match create() {
        Err(error) if error.is(Errno::EEXIST) => inner
            .throw_away(volumes, record.id.as_ref())
            .and_then(|_| create()),
        created => created,
    };
    created.context("make the volume's directory")?;
    let dir = volumes.open_beneath(&record.id).inspect_err(|_| {
        // The first error is the one to tell; a directory that stays is swept at the next start.
        let _ = volumes.remove_dir(&record.id);
    });
    dir.context("open the volume's directory")
}

/// Makes the volume's content, its record, and a detached mount of it. Returns the mount and its
/// id.
fn make_content_and_mount(
    inner: &Inner,
    dir: &Dir,
    record: &mut VolumeRecord,
) -> Result<(OwnedFd, u64)> {
    let limit = inner
        .backend
        .create(dir, &mounts::start(record))
        .context("make the volume's content")?;
    if let Some(why) = limit.why_unenforced() {
        tracing::warn!(volume.id = %record.id, %why, "sizeLimit is not enforced");
        inner.say(record, || What::SizeLimitNotEnforced { why: why.clone() });
        record.limit_unenforced = Some(why);
    }
    point(Point::PublishContentMade);
    store::write_volume(dir, record, false).context("write the volume's record")?;
    point(Point::PublishRecorded);
    let start = mounts::start(record);
    let mount = mounts::mount(inner, dir, record.label(), &start, record.read_only)?;
    let point = sys::mount_point(mount.as_fd()).context("look at the new mount")?;
    Ok((mount, point.id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::archive::Progress;
    use crate::engine::transfer::ImportRequest;
    use crate::engine::{Config, Engine};
    use crate::sys;

    #[tokio::test]
    async fn a_fork_that_is_a_copy_delays_no_other_call() {
        if !sys::is_root_or_skip() {
            return;
        }
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut config = Config::of_copies(folder.path());
        config.threads = 1;
        let engine = Engine::open(config).await.expect("it opens");
        let import = ImportRequest {
            tenant: "ci".parse().expect("a tenant"),
            reference: "artifact/none".parse().expect("a reference"),
            digest: None,
            size: None,
            ttl: None,
            base: None,
        };
        let archive = std::io::Cursor::new(vec![0; 1024]);
        let imported = engine.import(import, archive, Arc::new(Progress::default()), || true);
        imported.await.expect("imported");

        let publish = |volume: &str| {
            let request = PublishRequest {
                target: folder.path().join(volume),
                ..PublishRequest::of_nothing(volume)
            };
            let engine = engine.clone();
            tokio::spawn(async move { engine.publish(request).await })
        };
        let unpublish = async |volume: &str| {
            let unpublished = engine.unpublish(volume, &folder.path().join(volume)).await;
            unpublished.expect("unpublished");
        };
        publish("first").await.expect("it ran").expect("published");
        let hold = engine.hold(Pool::Forks);
        let mut second = publish("second");
        let waits = tokio::time::timeout(Duration::from_millis(200), &mut second).await;
        waits.expect_err("all threads for forks are busy");
        unpublish("first").await;
        drop(hold);
        second.await.expect("it ran").expect("published");
        unpublish("second").await;
        engine.shutdown().await;
    }
}
