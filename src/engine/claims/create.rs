//! Creates and deletes claims. A new claim is empty, or a clone of a snapshot or of another claim.
//!
//! Creation is one index transaction: the claim's directory is made when it is first mounted.
//! Deletion is a transaction and then a rename. Clones and snapshots keep the layers.

use std::path::Path;
use std::sync::Arc;

use tokio::time::Instant;

use super::data_dir::{self, is_held_open};
use super::entries::VolumeEntry;
use super::freeze::{self, Freezing, Moment};
use super::lookup::{self, refuse_full, refuse_too_large};
use super::types::CreateClaim;
use crate::engine::error::{Context, Error, Result};
use crate::engine::failpoint::{Point, point};
use crate::engine::guard::{self, Guard};
use crate::engine::layers;
use crate::engine::pins::Pins;
use crate::engine::shared::Inner;
use crate::engine::state::State;
use crate::engine::threads::Pool;
use crate::engine::writeback_failure;
use crate::model::{
    ClaimSource, LayerId, MutableParameters, OwnerView, PersistentVolume, RootAttributes,
    SnapshotId, VolumeId, layout,
};
use crate::store::Change;

/// Makes a claim, or finds the one that an earlier request of the same name made.
pub(super) async fn create(inner: Arc<Inner>, request: CreateClaim) -> Result<PersistentVolume> {
    let id = lookup::id_of(lookup::CLAIM, &request.name);
    let until = guard::deadline();
    let guard = Guard::take(&inner, &id, until).await?;
    if let Some(claim) = made_before(&inner, &id) {
        return repeated(claim, &request);
    }
    match request.source.clone() {
        None => {
            let content = Content::kept(&[], OwnerView::default(), 0);
            insert(&inner, id, request, content, guard).await
        }
        Some(ClaimSource::Snapshot(snapshot)) => {
            let content = Content::of_snapshot(&inner, &snapshot)?;
            insert(&inner, id, request, content, guard).await
        }
        Some(ClaimSource::Claim(source)) => clone(&inner, id, request, source, until).await,
    }
}

/// The claim that an earlier request made.
pub(super) fn made_before(inner: &Inner, id: &VolumeId) -> Option<PersistentVolume> {
    let state = inner.state.lock();
    state.claims.get(id).map(|held| held.claim.clone())
}

/// The claim that a repeated request finds, if it is the same request.
pub(super) fn repeated(claim: PersistentVolume, request: &CreateClaim) -> Result<PersistentVolume> {
    let too_small = claim.capacity < request.required_bytes;
    let too_large = request
        .limit_bytes
        .is_some_and(|limit| claim.capacity > limit);
    let what = if claim.source != request.source {
        "source"
    } else if claim.parameters != request.parameters {
        "parameters"
    } else if !fits(&claim, request.mutable) {
        "mutable_parameters"
    } else if too_small || too_large {
        "capacity"
    } else {
        return Ok(claim);
    };
    Err(Error::Exists {
        name: request.name.clone(),
        what,
    })
}

/// Whether a repeated request brings what the claim has, or what it was made with: the provisioner
/// repeats the request that made it, whatever ControllerModifyVolume changed meanwhile. Records of
/// older versions do not tell the first parameters.
fn fits(claim: &PersistentVolume, mutable: MutableParameters) -> bool {
    mutable == claim.mutable || claim.made_with.is_none_or(|made_with| mutable == made_with)
}

/// What a new claim starts from. Its layers stay until the claim refers to them.
pub(super) struct Content {
    pub(super) layers: Vec<LayerId>,
    pub(super) view: OwnerView,
    /// The capacity of the clone's source.
    pub(super) size: u64,
    _pins: Option<Pins>,
}

impl Content {
    /// Layers that the caller keeps.
    pub(super) fn kept(layers: &[LayerId], view: OwnerView, size: u64) -> Self {
        Self {
            layers: layers.to_vec(),
            view,
            size,
            _pins: None,
        }
    }

    fn of_snapshot(inner: &Arc<Inner>, id: &SnapshotId) -> Result<Self> {
        let mut pins = Pins::none(inner);
        let mut state = inner.state.lock();
        let snapshot = state.claims.snapshots().get(id).cloned();
        let snapshot = snapshot.ok_or_else(|| Error::NoSuchSnapshot(id.to_string()))?;
        pins.add(&mut state, &snapshot.layers);
        drop(state);
        Ok(Self {
            layers: snapshot.layers,
            view: snapshot.view,
            size: snapshot.size,
            _pins: Some(pins),
        })
    }
}

/// Makes a claim of content that is durable already.
async fn insert(
    inner: &Arc<Inner>,
    id: VolumeId,
    request: CreateClaim,
    content: Content,
    guard: Guard,
) -> Result<PersistentVolume> {
    let job = move |inner: &Arc<Inner>| {
        if let Some(ClaimSource::Snapshot(snapshot)) = &request.source {
            data_dir::refuse_lost(inner, snapshot, &content.layers)?;
        } else {
            refuse_full(inner, request.required_bytes)?;
        }
        let claim = describe(inner, id, request, &content)?;
        let made = inner.transact(&[Change::PutClaim(claim.clone())]);
        made.result()?;
        point(Point::ClaimIndexed);
        enter(&mut inner.state.lock(), claim.clone());
        drop((guard, content));
        Ok(claim)
    };
    let made = inner.run(Pool::Calls, job).await;
    inner.ask_for_room_after(&made);
    made
}

/// Creates a clone of another claim's content at this moment.
async fn clone(
    inner: &Arc<Inner>,
    id: VolumeId,
    request: CreateClaim,
    source: VolumeId,
    until: Instant,
) -> Result<PersistentVolume> {
    // Looked at before anything is frozen: a request that cannot be met costs nothing.
    let known = lookup::claim(inner, &source)?;
    capacity(&request, known.capacity)?;
    let guard = Guard::take(inner, &source, until).await?;
    let freezing = freeze::freeze(inner, vec![guard], vec![source], Moment::AsItCan);
    let freezing: Freezing = freezing.await?;
    let Some(frozen) = freezing.frozen.first() else {
        return Err(Error::ShuttingDown);
    };
    let content = Content::kept(&frozen.stack, frozen.claim.view, frozen.claim.capacity);
    let job = move |inner: &Arc<Inner>| describe(inner, id, request, &content);
    let claim = inner.run(Pool::Calls, job).await?;
    let changes = vec![Change::PutClaim(claim.clone())];
    let made = claim.clone();
    freezing.commit(changes, |state| enter(state, made)).await?;
    Ok(claim)
}

/// Enters a new claim.
pub(super) fn enter(state: &mut State, claim: PersistentVolume) {
    state.claims.insert(VolumeEntry::new(claim));
}

/// The claim that a request asks for, in whose place nothing is. Its first mount makes the rest.
pub(super) fn describe(
    inner: &Inner,
    id: VolumeId,
    request: CreateClaim,
    content: &Content,
) -> Result<PersistentVolume> {
    data_dir::put_aside(inner, &id)?;
    let mut capacity = capacity(&request, content.size)?;
    refuse_too_large(inner, capacity)?;
    // "At most" alone is a size, too. It may exceed the pool's.
    if capacity == 0 {
        capacity = request.limit_bytes.unwrap_or(0);
    }
    let now = inner.now();
    Ok(PersistentVolume {
        id,
        view: view(inner, content, &request.parameters.root)?,
        name: request.name,
        created: now,
        last_used: now,
        capacity,
        parameters: request.parameters,
        mutable: request.mutable,
        made_with: Some(request.mutable),
        source: request.source,
        layers: content.layers.clone(),
        made: false,
        attached: Vec::new(),
    })
}

/// How many bytes the claim gets.
pub(super) fn capacity(request: &CreateClaim, source: u64) -> Result<u64> {
    let required = request.required_bytes;
    if required > 0 && required < source {
        return Err(Error::OutOfRange {
            wanted: required,
            why: format!("its source has {source}"),
        });
    }
    let capacity = required.max(source);
    match request.limit_bytes {
        Some(limit) if capacity > limit => Err(Error::OutOfRange {
            wanted: capacity,
            why: format!("at most {limit} are allowed"),
        }),
        _ => Ok(capacity),
    }
}

/// How the owners of a clone are shown: as its class says, else as in its source.
fn view(inner: &Inner, content: &Content, wanted: &RootAttributes) -> Result<OwnerView> {
    let Some(newest) = content.layers.first() else {
        // It is made with these owners.
        return Ok(OwnerView::default());
    };
    let as_before = |wanted: Option<u32>, pair: Option<(u32, u32)>| {
        wanted.is_none_or(|wanted| pair.is_some_and(|(_, seen)| seen == wanted))
    };
    let mut view = content.view;
    if as_before(wanted.uid, view.uid) && as_before(wanted.gid, view.gid) {
        return Ok(view);
    }
    let path = Path::new(&newest.to_string()).join(layout::FS);
    let root = inner.dirs.layers.open_beneath(path);
    let root = root
        .and_then(|root| root.stat_self())
        .context("look at a layer")?;
    if !as_before(wanted.uid, view.uid) {
        view.uid = wanted.uid.map(|seen| (root.st_uid, seen));
    }
    if !as_before(wanted.gid, view.gid) {
        view.gid = wanted.gid.map(|seen| (root.st_gid, seen));
    }
    Ok(view)
}

/// Deletes a claim that is not in use. An id that no claim has counts as deleted.
pub(super) async fn delete(inner: Arc<Inner>, id: String) -> Result<()> {
    let Ok(id) = id.parse::<VolumeId>() else {
        return Ok(());
    };
    // First: what is being made is not known yet, and would appear after the answer.
    let guard = Guard::take(&inner, &id, guard::deadline()).await?;
    if !inner.state.lock().claims.contains(&id) {
        return Ok(());
    }
    let job = move |inner: &Arc<Inner>| {
        let deleted = delete_now(inner, &id);
        drop(guard);
        deleted
    };
    inner.run(Pool::Calls, job).await?;
    inner.wake_reaper();
    Ok(())
}

/// Deletes a claim for which the caller has the guard: from the index, then from its place, then
/// what it alone stacked.
pub(super) fn delete_now(inner: &Arc<Inner>, id: &VolumeId) -> Result<()> {
    let Some(unused) = inner.state.lock().claims.get(id).map(refuse_used) else {
        return Ok(());
    };
    unused?;
    if is_held_open(inner, id)? {
        return Err(lookup::held_open(id));
    }
    // What the index names stays in its place.
    let mut pins = Pins::none(inner);
    let (removed, tainted) = {
        let mut state = inner.state.lock();
        let removed = state.claims.remove(id);
        if let Some(held) = &removed {
            pins.add(&mut state, &held.claim.layers);
        }
        (removed, state.write_back.tainted_until())
    };
    let Some(held) = removed else {
        return Ok(());
    };
    let removed = inner.transact(&[Change::RemoveClaim(id.clone())]);
    if let Err(error) = removed.result() {
        let since = {
            let mut state = inner.state.lock();
            state.claims.insert(held);
            state.write_back.tainted_until()
        };
        if since != tainted {
            // It was not there when the others were marked.
            writeback_failure::taint_claim(inner, id);
        }
        return Err(error);
    }
    point(Point::ClaimUnindexed);
    if let Err(error) = data_dir::put_aside(inner, id) {
        tracing::error!(volume.id = %id, %error,
            "the volume is deleted, but its data could not be moved to trash/: the data stays \
             until the next start, and no volume of this name can be created before that");
    }
    point(Point::ClaimTrashed);
    tracing::info!(volume.id = %id, name = held.claim.name, "volume deleted");
    drop(pins);
    layers::trash_unreferenced(inner, &held.claim.layers);
    Ok(())
}

/// Refuses a claim that is in use.
fn refuse_used(held: &VolumeEntry) -> Result<()> {
    let used = |how| {
        Err(Error::ClaimInUse {
            claim: held.claim.id.clone(),
            how,
        })
    };
    if let Some(target) = held.mounts.keys().min() {
        return used(format!("mounted at {}; unmount it first", target.display()));
    }
    if let Some(attached) = held.claim.attached.first() {
        return used(format!(
            "attached to node {}; detach it first",
            attached.node
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ClaimParameters, Timestamp};

    #[test]
    fn what_an_older_version_made_is_not_compared_by_what_it_was_made_with() {
        let ttl = |seconds| MutableParameters {
            size_limit: None,
            ttl_seconds: Some(seconds),
        };
        let claim = PersistentVolume {
            id: lookup::id_of(lookup::CLAIM, "c"),
            name: "c".to_owned(),
            created: Timestamp(1),
            last_used: Timestamp(1),
            capacity: 0,
            parameters: ClaimParameters::default(),
            mutable: ttl(2),
            made_with: Some(ttl(1)),
            source: None,
            layers: Vec::new(),
            made: false,
            view: OwnerView::default(),
            attached: Vec::new(),
        };
        let mut record = serde_json::to_value(&claim).expect("a record");
        let known: PersistentVolume = serde_json::from_value(record.clone()).expect("read again");
        assert_eq!(known, claim);
        let fields = record.as_object_mut().expect("an object");
        fields.remove("madeWith").expect("its name on disk");
        let older: PersistentVolume = serde_json::from_value(record).expect("read all the same");
        assert_eq!(older.made_with, None);
        for (seconds, same) in [(1, true), (2, true), (3, false)] {
            let request = CreateClaim {
                mutable: ttl(seconds),
                ..CreateClaim::empty("c")
            };
            assert_eq!(repeated(known.clone(), &request).is_ok(), same, "{seconds}");
            repeated(older.clone(), &request).expect("its request is not known");
        }
    }
}
