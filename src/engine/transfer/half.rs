//! New layers on their way to an artifact or to a persistent volume: in `incoming/`, then in
//! `layers/`, then in the index. An artifact is visible before the index has it. Imports and
//! content of other nodes share the way; its table is in `import`.

use std::collections::HashSet;
use std::sync::Arc;

use crate::engine::error::{Context, Error, Result};
use crate::engine::failpoint::{Point, point};
use crate::engine::layers;
use crate::engine::pins::Pins;
use crate::engine::shared::Inner;
use crate::engine::state::State;
use crate::engine::transaction::{Transaction, entries};
use crate::model::{Artifact, LayerId, LayerRecord, Timestamp, VolumeId};
use crate::store::{self, Change};
use crate::sys::{self, Dir};

/// A layer that is being made. If it is dropped before the index names it, it is discarded.
pub(super) struct Half<'a> {
    inner: &'a Inner,
    pub(super) id: LayerId,
    /// `None`: the layer is no longer kept for this transfer.
    pins: Option<Pins>,
    placed: bool,
    done: bool,
}

impl<'a> Half<'a> {
    /// Makes `incoming/<id>`.
    pub(super) fn make(inner: &'a Arc<Inner>) -> Result<(Self, Dir)> {
        let id = LayerId::from_bits(sys::random());
        let half = Self::of(inner, id);
        let dir = inner.dirs.incoming.make_dir(id.to_string(), 0o700);
        let dir = dir.context("make a directory for a new layer")?;
        Ok((half, dir))
    }

    /// Opens `incoming/<id>`, which an earlier transfer left.
    pub(super) fn again(inner: &'a Arc<Inner>, id: LayerId) -> Result<(Self, Dir)> {
        let half = Self::of(inner, id);
        let dir = inner.dirs.incoming.open_beneath(id.to_string());
        let dir = dir.context("open a new layer's directory")?;
        Ok((half, dir))
    }

    fn of(inner: &'a Arc<Inner>, id: LayerId) -> Self {
        let mut pins = Pins::none(inner);
        pins.add(&mut inner.state.lock(), &[id]);
        Self {
            inner,
            id,
            pins: Some(pins),
            placed: false,
            done: false,
        }
    }

    /// Leaves it in `incoming/`, for a later transfer.
    pub(super) fn leave(mut self) {
        self.done = true;
    }

    /// Records in the layer's directory what the layer will belong to, for a rebuilt index: to an
    /// artifact, of which it is the newest layer, or to a persistent volume.
    pub(super) fn record(
        &self,
        dir: &Dir,
        artifact: Option<&Artifact>,
        claim: Option<&VolumeId>,
    ) -> Result<()> {
        let record = LayerRecord::of(self.id, artifact.cloned(), claim.cloned());
        store::write_sealing(dir, &record).context("write the layer's record")
    }

    /// Puts it where layers are. Nothing names it there.
    pub(super) fn place(&mut self) -> Result<()> {
        let (dirs, name) = (&self.inner.dirs, self.id.to_string());
        dirs.incoming
            .rename(&name, &dirs.layers, &name)
            .context("put the new layer in its place")?;
        self.placed = true;
        Ok(())
    }
}

impl Drop for Half<'_> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        if self.placed {
            drop(self.pins.take());
            // It may have been forked already: then it is deleted with the last fork.
            layers::trash_unreferenced(self.inner, &[self.id]);
        } else {
            let name = self.id.to_string();
            let incoming = &self.inner.dirs.incoming;
            if let Err(error) = self.inner.throw_away(incoming, name.as_ref()) {
                tracing::error!(layer = %self.id, %error,
                    "an incomplete layer could not be moved to trash/; it stays until the next \
                     start");
            }
        }
        self.inner.wake_reaper();
    }
}

/// An artifact that is visible and not durable. If it is dropped as such, it disappears, and the
/// name shows what it showed before. Its forks keep the layers.
struct Shown<'a> {
    inner: &'a Inner,
    artifact: Artifact,
    durable: bool,
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        if !self.durable {
            let mut state = self.inner.state.lock();
            state.catalog.remove_artifact(self.artifact.id);
            drop(state);
            layers::trash_unreferenced(self.inner, &self.artifact.layers);
        }
        self.inner.state.notify();
    }
}

/// Makes an artifact of placed layers visible under its name, and then durable. As after a seal,
/// volumes can be forks of it at once. Returns whether it got the name then.
///
/// `began`: when the first layer was made. `describe` returns the artifact, or refuses it, under
/// the lock under which it becomes visible.
pub(super) fn enter(
    inner: &Inner,
    halves: Vec<Half<'_>>,
    began: Timestamp,
    describe: impl FnOnce(&State) -> Result<Artifact>,
) -> Result<bool> {
    let (mut shown, is_owner) = {
        let mut state = inner.state.lock();
        state.write_back.refuse_tainted_since(began)?;
        let artifact = describe(&state)?;
        let is_owner = state.catalog.add_artifact(artifact.clone());
        let shown = Shown {
            inner,
            artifact,
            durable: false,
        };
        (shown, is_owner)
    };
    inner.state.notify();
    point(Point::EntryShown);
    let id = shown.artifact.id;
    let alone = HashSet::from([id]);
    let decide = |state: &State| {
        let sealed = state.catalog.get(&id);
        // A failed write-back took it away.
        let sealed = sealed.ok_or(Error::WritebackFailed)?;
        let names = state.catalog.names_of(&alone);
        Ok((entries([&sealed.artifact], &names), names))
    };
    let known = |state: &mut State, names| {
        state.catalog.indexed(&alone, names);
        state.catalog.set_durable(&id, true);
    };
    settle(inner, halves, began, decide, known)?;
    shown.durable = true;
    Ok(is_owner)
}

/// Makes placed layers durable, and then what stacks them, in the index.
///
/// `began`: when the first layer was made. `decide` returns the changes of the index, or refuses.
/// `known` enters what these changes say into the state.
pub(super) fn settle<T>(
    inner: &Inner,
    mut halves: Vec<Half<'_>>,
    began: Timestamp,
    decide: impl FnOnce(&State) -> Result<(Vec<Change>, T)>,
    known: impl FnOnce(&mut State, T),
) -> Result<()> {
    let syncing = inner.durability.lock();
    inner.sync(&syncing)?;
    point(Point::EntrySynced);
    let named_as_indexed = inner.durability.lock_names();
    let (changes, what) = {
        let state = inner.state.lock();
        state.write_back.refuse_tainted_since(began)?;
        decide(&state)?
    };
    match inner.transact(&changes) {
        Transaction::Committed => {}
        Transaction::RolledBack(error) => return Err(error),
        Transaction::InDoubt(error) => {
            // The index may name them: the next start knows.
            for half in &mut halves {
                half.done = true;
            }
            return Err(error);
        }
    }
    known(&mut inner.state.lock(), what);
    drop(named_as_indexed);
    drop(syncing);
    point(Point::EntryIndexed);
    for half in &mut halves {
        half.done = true;
        if let Err(error) = layers::confirm(inner, half.id) {
            // It is tried again when the layer is measured.
            tracing::warn!(layer = %half.id, %error,
                "the layer could not be confirmed: an index rebuilt now would not include it");
        }
    }
    point(Point::EntryConfirmed);
    Ok(())
}
