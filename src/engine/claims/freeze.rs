//! Freezing: turns the content of claims at one moment into stacks of layers, from which a snapshot
//! or a clone is made.
//!
//! A claim that was not mounted since its last freeze is a stack already. Otherwise its private
//! content becomes a layer: by a rename where it is not mounted (overlay), by a snapshot (btrfs),
//! by a copy. Several claims are frozen first and committed together: one `syncfs`, one index
//! transaction. If a step before that transaction fails, everything is undone, here or at the next
//! start; `docs/on-disk.md` has the table.

use std::sync::Arc;

use parking_lot::MutexGuard;

use super::data_dir::{self, is_held_open};
use super::entries::Problem;
use super::lookup::{DAMAGED, held_open, refuse_broken};
use crate::backend;
use crate::engine::error::{Context, Error, Result};
use crate::engine::failpoint::{Point, point};
use crate::engine::guard::Guard;
use crate::engine::layers;
use crate::engine::pins::Pins;
use crate::engine::shared::Inner;
use crate::engine::state::State;
use crate::engine::threads::Pool;
use crate::engine::transaction::Transaction;
use crate::engine::types::Measured;
use crate::model::{
    LayerId, LayerRecord, LiveClone, PersistentVolume, Timestamp, VolumeId, layout,
};
use crate::store::{self, Change};
use crate::sys::{self, Dir, Errno};

/// One claim's content at one moment.
#[derive(Debug)]
pub(super) struct Frozen {
    /// The claim, as it was.
    pub(super) claim: PersistentVolume,
    /// Its content, newest first.
    pub(super) stack: Vec<LayerId>,
    /// The layer that was made of its private content.
    layer: Option<LayerId>,
    /// Whether the content moved there, so that the claim stacks it from now on.
    moved: bool,
}

/// Claims that are frozen; dropped without [`Freezing::commit`] they are as they were.
#[derive(Debug)]
pub(super) struct Freezing {
    pub(super) inner: Arc<Inner>,
    pub(super) frozen: Vec<Frozen>,
    /// When the freeze began; it counts as the claims' last use. A later time would be wrong:
    /// content that was last used before a write-back began, and is not mounted, is on the disk
    /// after it.
    since: Timestamp,
    pins: Pins,
    ended: bool,
    /// The last field, so that it is dropped last: undoing a freeze needs the guards.
    guards: Vec<Guard>,
}

/// The moment whose content the freeze captures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Moment {
    /// One moment if the backend can; otherwise as the claim's class says.
    AsItCan,
    /// The same moment for all claims, or the freeze fails.
    One,
}

/// Freezes claims, for which the caller has the guards; nothing is durable yet.
pub(super) async fn freeze(
    inner: &Arc<Inner>,
    guards: Vec<Guard>,
    ids: Vec<VolumeId>,
    moment: Moment,
) -> Result<Freezing> {
    let long = grows_with_the_tree(inner, &ids);
    let engine = inner.clone();
    let job = move || {
        let mut freezing = Freezing {
            since: engine.now(),
            pins: Pins::none(&engine),
            inner: engine,
            frozen: Vec::new(),
            ended: false,
            guards,
        };
        if moment == Moment::One {
            freezing.refuse_several_moments(&ids)?;
        }
        for id in &ids {
            if let Err(error) = freezing.add(id) {
                freezing.take_back();
                return Err(error);
            }
        }
        Ok(freezing)
    };
    let pool = if long { Pool::Copies } else { Pool::Calls };
    let frozen = inner.threads.run(pool, job).await?;
    inner.ask_for_room_after(&frozen);
    frozen
}

/// Whether content is copied. A claim that is refused is refused at once.
fn grows_with_the_tree(inner: &Inner, ids: &[VolumeId]) -> bool {
    if inner.backend.has_snapshots() {
        return false;
    }
    let state = inner.state.lock();
    let mut claims = ids.iter().filter_map(|id| state.claims.get(id));
    claims.any(|held| {
        if held.mounts.is_empty() {
            !inner.backend.stacks()
        } else {
            held.claim.parameters.live_clone == LiveClone::Copy
        }
    })
}

impl Freezing {
    /// Makes durable what was frozen, and `changes` with it: all or nothing. `enter` enters them
    /// into the state.
    pub(super) async fn commit(
        self,
        changes: Vec<Change>,
        enter: impl FnOnce(&mut State) + Send + 'static,
    ) -> Result<()> {
        let engine = self.inner.clone();
        let made = self.layers().next().is_some();
        let pool = if made { Pool::Syncs } else { Pool::Calls };
        let frozen = engine
            .threads
            .run(pool, move || self.commit_now(changes, enter));
        let frozen = frozen.await?;
        engine.ask_for_room_after(&frozen);
        let frozen = frozen?;
        if made {
            // The caller need not wait for it. If no job is taken any more, the next start does it.
            drop(engine.threads.run(Pool::Calls, move || frozen.tidy()));
        }
        Ok(())
    }

    /// Whether the disk may have lost bytes of the frozen content, before or since the freeze
    /// began.
    fn is_tainted(&self, state: &State) -> bool {
        let made = self.frozen.iter().filter(|frozen| frozen.layer.is_some());
        let mut held = made.filter_map(|frozen| state.claims.get(&frozen.claim.id));
        state
            .write_back
            .tainted_until()
            .is_some_and(|until| until >= self.since)
            || held.any(|held| held.damaged)
    }

    /// Returns the work that is left. Only the next operation on one of these volumes waits for it.
    fn commit_now(mut self, changes: Vec<Change>, enter: impl FnOnce(&mut State)) -> Result<Self> {
        match self.make_durable(changes) {
            Transaction::Committed => self.ended = true,
            Transaction::RolledBack(error) => {
                self.take_back();
                return Err(error);
            }
            Transaction::InDoubt(error) => {
                self.ended = true;
                return Err(error);
            }
        }
        point(Point::FreezeIndexed);
        {
            let mut state = self.inner.state.lock();
            self.restack(&mut state);
            enter(&mut state);
        }
        // A layer that no claim stacks may be deleted as soon as the answer is there.
        self.confirm(|frozen| !frozen.moved);
        // Not kept any longer than that.
        self.pins = Pins::none(&self.inner);
        for guard in &self.guards {
            guard.becomes_a_chore();
        }
        Ok(self)
    }

    /// First the content, then the index that names it.
    fn make_durable(&self, changes: Vec<Change>) -> Transaction {
        let inner = &self.inner;
        // Held until the index names it: no other caller learns of a failed write-back meanwhile.
        let made = self.layers().next().is_some();
        let syncing = made.then(|| inner.durability.lock());
        if let Some(syncing) = &syncing {
            if let Err(error) = self.write_back(syncing) {
                return Transaction::RolledBack(error);
            }
            point(Point::FreezeSynced);
        }
        let moved = self
            .moved()
            .map(|frozen| Change::PutClaim(frozen.now(self.since)));
        let all: Vec<Change> = moved.chain(changes).collect();
        inner.transact(&all)
    }

    /// Makes the content durable.
    fn write_back(&self, syncing: &MutexGuard<'_, ()>) -> Result<()> {
        let inner = &self.inner;
        inner.sync(syncing)?;
        // Another caller got the error for what was frozen here. It marked that before it released
        // the lock.
        if self.is_tainted(&inner.state.lock()) {
            let error = inner.dirs.root.error("syncfs", "", Errno::EIO);
            return Err(error).context("write back the pool's data");
        }
        Ok(())
    }

    /// Claims whose content moved stack the new layer from now on. All claims count as used; for
    /// those whose content did not move, `maintenance` tells the index later.
    fn restack(&self, state: &mut State) {
        for frozen in &self.frozen {
            let Some(held) = state.claims.get_mut(&frozen.claim.id) else {
                continue;
            };
            if frozen.moved {
                held.claim = frozen.now(self.since);
                held.limit_unenforced = None;
                held.damaged = false;
                held.measured = Measured::default();
            } else {
                held.claim.last_used = self.since;
                held.used = true;
            }
        }
    }

    /// Confirms layers: their records say that the index names them.
    fn confirm(&self, which: impl Fn(&Frozen) -> bool) {
        let which = self.frozen.iter().filter(|frozen| which(frozen));
        for layer in which.filter_map(|frozen| frozen.layer) {
            if let Err(error) = layers::confirm(&self.inner, layer) {
                tracing::warn!(%layer, %error,
                    "the layer could not be confirmed: an index rebuilt now would not include it");
            }
        }
    }

    /// Confirms the layers that the claims stack, and removes the claims' old directories.
    fn tidy(self) {
        self.confirm(|frozen| frozen.moved);
        point(Point::FreezeConfirmed);
        for frozen in self.moved() {
            data_dir::clear(&self.inner, &frozen.claim.id);
        }
        point(Point::FreezeCleared);
    }

    /// The layers that were made.
    fn layers(&self) -> impl Iterator<Item = LayerId> {
        self.frozen.iter().filter_map(|frozen| frozen.layer)
    }

    fn moved(&self) -> impl Iterator<Item = &Frozen> {
        self.frozen.iter().filter(|frozen| frozen.moved)
    }

    /// The freeze could not be undone. The claims whose content moved cannot be used until the next
    /// start, and the moved content stays where it is.
    fn leave_as_it_is(&self, error: &Error) {
        let mut state = self.inner.state.lock();
        for layer in self.layers() {
            state.volumes.retain(layer, vec![layer]);
        }
        for frozen in self.moved() {
            if let Some(held) = state.claims.get_mut(&frozen.claim.id) {
                held.problem = Some(Problem::Broken(format!(
                    "a snapshot of it failed and could not be undone ({error}); restart the driver"
                )));
            }
        }
    }

    /// A group of snapshots shows one moment, or fails (CSI specification,
    /// "CreateVolumeGroupSnapshot"). Volumes have one moment while no pod writes to them. A single
    /// volume that is written to has one if the backend can take it whole. A copy that is made
    /// while pods write has none, whatever the class says.
    fn refuse_several_moments(&self, ids: &[VolumeId]) -> Result<()> {
        let state = self.inner.state.lock();
        let claims = ids.iter().filter_map(|id| state.claims.get(id));
        let mounted = claims.filter(|held| !held.mounts.is_empty()).count();
        let can_freeze_one = self.inner.backend.has_snapshots();
        if mounted <= usize::from(can_freeze_one) {
            return Ok(());
        }
        let why = if can_freeze_one {
            "each volume would have another moment; stop their pods first".to_owned()
        } else {
            let kind = self.inner.backend.kind();
            format!("the {kind} backend cannot freeze a volume under its pods; stop them first")
        };
        Err(Error::Unsupported {
            what: format!("a snapshot at one moment of a group with {mounted} mounted volume(s)"),
            why,
        })
    }

    /// Freezes one more claim.
    fn add(&mut self, id: &VolumeId) -> Result<()> {
        let inner = self.inner.clone();
        let (claim, mounted, damaged) = {
            let mut state = inner.state.lock();
            let held = state.claims.get(id);
            let held = held.ok_or_else(|| Error::NoSuchClaim(id.to_string()))?;
            refuse_broken(held)?;
            let found = (held.claim.clone(), !held.mounts.is_empty(), held.damaged);
            self.pins.add(&mut state, &found.0.layers);
            found
        };
        data_dir::refuse_lost(&inner, id, &claim.layers)?;
        let stack = claim.layers.clone();
        self.frozen.push(Frozen {
            claim,
            stack,
            layer: None,
            moved: false,
        });
        let Some(volume) = inner.volume_dir_if_there(id)? else {
            // Never mounted since it was made, cloned or last frozen.
            return Ok(());
        };
        let backend = &inner.backend;
        if !backend
            .has_content(&volume)
            .context("look at the volume's content")?
        {
            return Ok(());
        }
        if damaged {
            return Err(Error::ClaimInUse {
                claim: id.clone(),
                how: format!(
                    "{DAMAGED}; read it in a pod, and copy what is intact to a new volume"
                ),
            });
        }
        if backend.has_snapshots() || !(mounted || backend.stacks()) {
            return self.copy(&volume);
        }
        if mounted {
            return self.copy_live(&volume);
        }
        self.move_away(&volume)
    }

    /// The claim that was frozen last.
    fn last(&mut self) -> &mut Frozen {
        self.frozen.last_mut().expect("`add` has just pushed one")
    }

    fn copy_live(&mut self, volume: &Dir) -> Result<()> {
        let claim = &self.last().claim;
        if claim.parameters.live_clone == LiveClone::Copy {
            return self.copy(volume);
        }
        Err(Error::Unsupported {
            what: format!(
                "a snapshot or clone of volume {} while it is mounted",
                claim.id
            ),
            why: format!(
                "the {} backend cannot freeze it under its pods; stop them first, or set \
                 `liveClone: copy` in its class",
                self.inner.backend.kind()
            ),
        })
    }

    /// Makes the layer's directory. It is pinned from here on.
    fn make_layer(&mut self) -> Result<Dir> {
        let inner = self.inner.clone();
        let layer = LayerId::from_bits(sys::random());
        self.pins.add(&mut inner.state.lock(), &[layer]);
        let frozen = self.last();
        frozen.layer = Some(layer);
        let record = LayerRecord::of(layer, None, Some(frozen.claim.id.clone()));
        let dir = inner.dirs.layers.make_dir(layer.to_string(), 0o700);
        let dir = dir.context("make a layer")?;
        store::write_sealing(&dir, &record).context("write a layer's record")?;
        point(Point::FreezeLayerMade);
        Ok(dir)
    }

    /// The claim goes on with its content; the layer is a copy, or a snapshot, of it.
    fn copy(&mut self, volume: &Dir) -> Result<()> {
        let layer = self.make_layer()?;
        let copied = self.inner.backend.copy(volume, &layer);
        copied
            .map_err(refused)
            .context("copy the volume's content")?;
        point(Point::FreezeContentMoved);
        let stacks = self.inner.backend.stacks();
        let frozen = self.last();
        let below = if stacks {
            frozen.stack.clone()
        } else {
            Vec::new()
        };
        frozen.stack = frozen.layer.into_iter().chain(below).collect();
        Ok(())
    }

    /// The claim's content becomes the layer, and the claim goes on with a new top above it.
    fn move_away(&mut self, volume: &Dir) -> Result<()> {
        let inner = self.inner.clone();
        let id = self.last().claim.id.clone();
        if is_held_open(&inner, &id)? {
            // A pod that was deleted by force still writes.
            return Err(held_open(&id));
        }
        // Chosen first: a name is in order with the renames after a power cut, the content of a
        // file is not.
        let layer = self.make_layer()?;
        let marker = marker(self.last().layer);
        volume
            .create_dir(&marker, 0o700)
            .context("note the layer that the content moves to")?;
        point(Point::FreezeMarked);
        self.last().moved = true;
        inner
            .backend
            .seal(volume, &layer, layout::NO_MARKER)
            .context("freeze the volume's content")?;
        point(Point::FreezeContentMoved);
        let frozen = self.last();
        frozen.stack = frozen
            .layer
            .into_iter()
            .chain(frozen.stack.clone())
            .collect();
        Ok(())
    }
}

impl Frozen {
    /// The claim as it is when its content has moved, for what was begun then.
    fn now(&self, used: Timestamp) -> PersistentVolume {
        PersistentVolume {
            layers: self.stack.clone(),
            made: true,
            last_used: used,
            ..self.claim.clone()
        }
    }
}

/// The name that says in a claim's directory to which layer its content goes.
fn marker(layer: Option<LayerId>) -> String {
    let layer = layer.map(|layer| layer.to_string()).unwrap_or_default();
    format!("{}{layer}", layout::FREEZING_PREFIX)
}

/// The content cannot become a layer. This is not a failure of the driver.
fn refused(error: backend::Error) -> backend::Error {
    match error {
        backend::Error::Refused { path, why } => backend::Error::Unsupported {
            what: "a snapshot or clone of this volume",
            why: format!("{path}: {why}"),
        },
        error => error,
    }
}

/// Undoes a freeze that is not in the index, at once or after a crash: moved content returns to the
/// claim.
pub(super) fn return_content(inner: &Inner, volume: &Dir, layer: LayerId) -> Result<()> {
    if let Some(dir) = inner.layer_dir_if_there(layer)? {
        let moved = dir.has(layout::FS).context("look at a layer")?;
        let backend = &inner.backend;
        if moved
            && !backend
                .has_content(volume)
                .context("look at the volume's content")?
        {
            backend
                .unseal(&dir, volume)
                .context("undo a snapshot or clone")?;
            point(Point::RecoverContentBack);
        }
    }
    match volume.remove_dir(marker(Some(layer))) {
        Err(error) if !error.is(Errno::ENOENT) => Err(error).context("undo a snapshot or clone"),
        _ => Ok(()),
    }
}

/// The layer that a claim's directory says its content was going to.
pub(super) fn going_to(volume: &Dir) -> Result<Option<LayerId>> {
    let entries = volume.entries().context("read a volume's directory")?;
    let mut layers = entries.iter().filter_map(|entry| {
        let name = entry.name.to_str()?;
        name.strip_prefix(layout::FREEZING_PREFIX)?.parse().ok()
    });
    Ok(layers.next())
}

impl Freezing {
    /// Puts the claims back as they were. Only renames.
    fn take_back(&mut self) {
        if !std::mem::replace(&mut self.ended, true) {
            self.undo();
        }
    }

    fn undo(&mut self) {
        let inner = self.inner.clone();
        let mut failed = None;
        for frozen in self.frozen.iter().rev() {
            let Some(layer) = frozen.layer else { continue };
            let id = &frozen.claim.id;
            let back = if frozen.moved {
                let volume = inner.volume_dir(id);
                volume.and_then(|volume| return_content(&inner, &volume, layer))
            } else {
                Ok(())
            };
            let back = back.and_then(|()| {
                let thrown =
                    inner.throw_away_if_there(&inner.dirs.layers, layer.to_string().as_ref());
                thrown.context("move a layer to trash/")
            });
            if let Err(error) = back {
                tracing::error!(volume.id = %id, %error,
                    "a failed snapshot or clone could not be undone; the volume cannot be used \
                     until the driver restarts");
                failed.get_or_insert(error);
            }
        }
        if let Some(error) = failed {
            self.leave_as_it_is(&error);
        }
    }
}

impl Drop for Freezing {
    /// Takes it back on a thread for calls, since this may be one of the runtime's. A caller who
    /// comes for one of the claims waits for that.
    fn drop(&mut self) {
        if self.ended || self.layers().next().is_none() {
            return;
        }
        for guard in &self.guards {
            guard.becomes_a_chore();
        }
        let mut left = Self {
            inner: self.inner.clone(),
            frozen: std::mem::take(&mut self.frozen),
            since: self.since,
            pins: std::mem::replace(&mut self.pins, Pins::none(&self.inner)),
            // Where no job is taken any more, it is left to the next start.
            ended: true,
            guards: std::mem::take(&mut self.guards),
        };
        drop(self.inner.threads.run(Pool::Calls, move || left.undo()));
    }
}

#[cfg(test)]
mod tests;
