//! Makes the layers of what is received, each in a directory of `incoming/`. Once all are made they
//! get into their places. If one cannot be made, what came is kept as a [`Part`] for the next
//! fetch.
//!
//! Where an artifact is a stack, each layer has a directory. Elsewhere all layers are applied to
//! one tree, in one directory.

use std::cell::Cell;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::half::Half;
use super::space::{self, Gate};
use super::wanted::{LayerPlace, Owner, ReceiveError, ReceiveRequest};
use crate::archive::toc::Table;
use crate::archive::{self, Limits};
use crate::engine::error::{Context, Error};
use crate::engine::failpoint::{Point, point};
use crate::engine::parts::Part;
use crate::engine::shared::Inner;
use crate::engine::state::State;
use crate::engine::table_digests::DIGEST;
use crate::engine::types::ReceiveLayer;
use crate::model::{Artifact, Digests, LayerId, Sha256, Tenant, Timestamp, counted, layout};
use crate::sys::{self, Dir, Xattrs};
use crate::tree;

/// Where a layer of a stack is made in its directory.
const PART: &str = "part";

const MAKE: &str = "make a place for a layer";
const FINISH: &str = "complete a layer";

/// A directory in `incoming/` in which layers are made. It is deleted if this is dropped.
pub(super) struct Made<'a> {
    half: Half<'a>,
    dir: Dir,
    pub(super) part: Part,
    /// Whether it must not be used again.
    is_spoilt: bool,
}

impl<'a> Made<'a> {
    fn begin(inner: &'a Arc<Inner>) -> Result<Self, Error> {
        let (half, dir) = Half::make(inner)?;
        let part = Part {
            digests: Vec::new(),
            id: half.id,
            filling: None,
            bytes: 0,
            began: inner.now(),
            last: Instant::now(),
        };
        Ok(Self {
            half,
            dir,
            part,
            is_spoilt: false,
        })
    }

    /// What an earlier fetch left.
    fn again(inner: &'a Arc<Inner>, part: Part) -> Result<Self, Error> {
        let (half, dir) = Half::again(inner, part.id)?;
        Ok(Self {
            half,
            dir,
            part,
            is_spoilt: false,
        })
    }

    /// How many of its layers are whole, from the oldest on.
    fn whole(&self) -> usize {
        self.part.digests.len() - usize::from(self.part.filling.is_some())
    }
}

/// Takes what earlier fetches left of these layers, which are newest first.
pub(super) fn take<'a>(
    inner: &'a Arc<Inner>,
    owner: Owner<'_>,
    missing: &[ReceiveLayer],
) -> Vec<Made<'a>> {
    // Clones of volumes begin again: their layers belong to no tenant.
    let Owner::Artifact(request) = owner else {
        return Vec::new();
    };
    let tenant = &request.name.tenant;
    let kept = &inner.collector.parts;
    let digests: Vec<Sha256> = missing.iter().rev().map(|it| it.digest).collect();
    let taken: Vec<Part> = if inner.backend.stacks() {
        let each = digests.iter();
        each.filter_map(|digest| kept.take(tenant, |part| part.digests == [*digest]))
            .collect()
    } else {
        let whole = kept.take(tenant, |part| digests.starts_with(&part.digests));
        whole.into_iter().collect()
    };
    let mut all = Vec::new();
    for part in taken {
        let (id, began) = (part.id, part.began);
        let made = match Made::again(inner, part) {
            Ok(made) => made,
            Err(error) => {
                tracing::warn!(layer = %id, %error,
                    "a partial layer of a failed fetch cannot be opened: the layer is fetched \
                     again");
                continue;
            }
        };
        // A write-back failed since: it may have lost bytes.
        let is_tainted = inner.state.lock().write_back.is_tainted_since(began);
        if !is_tainted {
            all.push(made);
        }
    }
    all
}

/// Layers on their way. `'a` is the engine's, `'j` that of the call.
pub(super) struct Job<'a, 'j, M> {
    pub(super) inner: &'a Arc<Inner>,
    pub(super) owner: Owner<'j>,
    pub(super) wanted: &'j [ReceiveLayer],
    pub(super) progress: &'j AtomicU64,
    pub(super) gate: Gate<'j>,
    pub(super) make: M,
    /// What earlier fetches left.
    pub(super) taken: Vec<Made<'a>>,
    /// What is whole by now, oldest first.
    pub(super) made: Vec<Made<'a>>,
    pub(super) placed: Placed<'a>,
}

/// Layers in their places. Those that came are discarded if this is dropped.
pub(in crate::engine) struct Placed<'a> {
    /// All, newest first.
    pub(in crate::engine) layers: Vec<LayerId>,
    /// How many of them were here already.
    pub(in crate::engine) reused: usize,
    /// Bytes of the others that an earlier fetch brought.
    pub(super) kept: u64,
    pub(super) halves: Vec<Half<'a>>,
    /// The digests of the tables that were kept.
    pub(super) tables: Vec<(LayerId, Sha256)>,
    /// When the oldest byte came.
    pub(super) began: Timestamp,
}

impl<'a, M, E> Job<'a, '_, M>
where
    M: FnMut(usize, &LayerPlace<'_>) -> Result<Arc<Table>, E>,
{
    /// Makes so many layers, which are the newest ones.
    pub(super) fn run(mut self, missing: usize) -> Result<Placed<'a>, ReceiveError<E>> {
        match self.all(missing) {
            Ok(()) => {}
            Err(error @ ReceiveError::Layer { .. }) => {
                self.keep();
                return Err(error);
            }
            // What it left is not known, or there is no space for it.
            Err(error) => return Err(error),
        }
        let made = std::mem::take(&mut self.made);
        let newest = made.len();
        for (count, made) in (1..).zip(made) {
            self.placed.began = self.placed.began.min(made.part.began);
            self.place(made.half, &made.dir, count == newest)?;
        }
        Ok(self.placed)
    }

    fn all(&mut self, missing: usize) -> Result<(), ReceiveError<E>> {
        if !self.inner.backend.stacks() {
            return if missing == 0 { Ok(()) } else { self.whole() };
        }
        for layer in (0..missing).rev() {
            self.stacked(layer)?;
        }
        Ok(())
    }

    /// Keeps what came for the next fetch.
    fn keep(&mut self) {
        let Owner::Artifact(request) = self.owner else {
            return;
        };
        let all = self.made.drain(..).chain(self.taken.drain(..));
        // Without a byte there is nothing to keep. The others are deleted.
        for Made { half, part, .. } in all.filter(|it| it.part.bytes > 0 && !it.is_spoilt) {
            half.leave();
            keep_part(self.inner, request.name.tenant.clone(), part);
        }
    }

    /// Makes a layer of a stack.
    fn stacked(&mut self, layer: usize) -> Result<(), ReceiveError<E>> {
        let digest = self.wanted[layer].digest;
        let mut taken = self.taken.iter();
        let taken = taken.position(|it| it.part.digests == [digest]);
        let mut made = if let Some(taken) = taken {
            self.taken.swap_remove(taken)
        } else {
            let mut made = Made::begin(self.inner)?;
            made.part.digests.push(digest);
            made.part.filling = Some(PART.to_owned());
            made
        };
        if made.part.filling.is_some() {
            made.dir.ensure_dir(PART, 0o700).context(MAKE)?;
            let part = made.dir.open_beneath(PART).context(MAKE)?;
            point(Point::ReceiveMade);
            let table = match self.fill(layer, &part, &mut made) {
                Ok(table) => table,
                Err(error) => {
                    self.made.push(made);
                    return Err(error);
                }
            };
            let dir = &made.dir;
            // A layer of a stacking backend is a directory in overlayfs' form.
            part.rename(layout::FS, dir, layout::FS).context(FINISH)?;
            remove(dir, PART)?;
            point(Point::ReceiveFilled);
            write_table(dir, &table).context("keep a layer's table of contents")?;
            point(Point::ReceiveTabled);
            made.part.filling = None;
        }
        self.placed.tables.push((made.half.id, digest));
        self.made.push(made);
        Ok(())
    }

    /// Makes one layer of all, where a layer is a whole tree. Its table is another one.
    fn whole(&mut self) -> Result<(), ReceiveError<E>> {
        let backend = &self.inner.backend;
        let (mut made, tree) = if let Some(made) = self.taken.pop() {
            let tree = backend.reopen_received(&made.dir).context(MAKE)?;
            (made, tree)
        } else {
            let made = Made::begin(self.inner)?;
            let tree = backend.receive(&made.dir).context(MAKE)?;
            (made, tree)
        };
        point(Point::ReceiveMade);
        for layer in (0..self.wanted.len()).rev().skip(made.whole()) {
            if let Err(error) = self.apply(layer, &tree, &mut made) {
                self.made.push(made);
                return Err(error);
            }
        }
        self.inner.backend.received(&made.dir).context(FINISH)?;
        point(Point::ReceiveFilled);
        self.made.push(made);
        Ok(())
    }

    /// Makes a layer in a directory of `tree`, since a rename does not leave a subvolume, and
    /// applies it.
    fn apply(
        &mut self,
        layer: usize,
        tree: &Dir,
        made: &mut Made<'_>,
    ) -> Result<(), ReceiveError<E>> {
        let name = if let Some(name) = made.part.filling.clone() {
            name
        } else {
            // No layer can guess the name: the directory must not be a part of the layer.
            let name = format!(".layer-{:032x}", sys::random());
            tree.create_dir(&name, 0o700).context(MAKE)?;
            made.part.digests.push(self.wanted[layer].digest);
            made.part.filling.insert(name).clone()
        };
        let whole = format!("{name}.fs");
        let part = tree.open_beneath(&name).context(MAKE)?;
        // Directories would inherit it.
        part.remove_xattr("system.posix_acl_default")
            .context(MAKE)?;
        self.fill(layer, &part, made)?;
        part.rename(layout::FS, tree, &whole).context(FINISH)?;
        remove(tree, &name)?;
        let stop = || self.gate.stops();
        let applied = tree::apply(tree, whole.as_ref(), &stop);
        if let Some(error) = self.gate.why() {
            return Err(error.into());
        }
        applied.map_err(archive::Error::from).context(FINISH)?;
        made.part.filling = None;
        Ok(())
    }

    /// Has a layer made in `into`, and checks that it is the requested layer.
    fn fill(
        &mut self,
        layer: usize,
        into: &Dir,
        made: &mut Made<'_>,
    ) -> Result<Arc<Table>, ReceiveError<E>> {
        let stop = || self.gate.stops();
        let is_spoilt = Cell::new(false);
        let place = LayerPlace {
            into,
            temporary: &made.dir,
            // The same on all nodes: a smaller pool has no smaller ones, since a file with holes
            // needs less space than its size.
            limits: Limits::default(),
            stop: &stop,
            progress: self.progress,
            is_spoilt: &is_spoilt,
        };
        let before = self.progress.load(Ordering::Relaxed);
        let filled = (self.make)(layer, &place);
        made.is_spoilt = is_spoilt.get();
        let came = self.progress.load(Ordering::Relaxed).saturating_sub(before);
        if came > 0 {
            made.part.bytes += came;
            made.part.last = Instant::now();
        }
        match filled {
            Ok(table) if table.digest().sha256 == self.wanted[layer].digest.0 => Ok(table),
            Ok(_) => Err(Error::Defect.into()),
            Err(source) => {
                let shortage = self.gate.why().or_else(|| space::shortage(self.inner));
                Err(match shortage {
                    Some(error) => error.into(),
                    None if self.inner.lifetime.is_stopping() => Error::ShuttingDown.into(),
                    None => ReceiveError::Layer { layer, source },
                })
            }
        }
    }

    /// Records a layer and puts it in its place. The record of the newest one has the artifact.
    fn place(
        &mut self,
        mut half: Half<'a>,
        dir: &Dir,
        is_newest: bool,
    ) -> Result<(), ReceiveError<E>> {
        self.placed.layers.insert(0, half.id);
        match self.owner {
            Owner::Artifact(request) if is_newest => {
                let state = self.inner.state.lock();
                let artifact = describe(self.inner, &state, request, &self.placed.layers);
                drop(state);
                half.record(dir, Some(&artifact), None)?;
            }
            Owner::Artifact(_) => half.record(dir, None, None)?,
            Owner::Claim(claim) => half.record(dir, None, Some(claim))?,
        }
        point(Point::ReceiveRecorded);
        half.place()?;
        point(Point::ReceivePlaced);
        self.placed.halves.push(half);
        Ok(())
    }
}

/// The artifact as it will be here. Its layers are not among what decides about its name.
pub(super) fn describe(
    inner: &Inner,
    state: &State,
    request: &ReceiveRequest,
    layers: &[LayerId],
) -> Artifact {
    let now = inner.now();
    // A copy keeps its time, so that all nodes agree which content is newest. The clock of another
    // node may be far ahead.
    let mut created = counted(request.created, inner.time());
    inner.saw(created);
    let holder = state.catalog.owner(&request.name);
    let holder = holder.map(|holder| &holder.artifact);
    if let Some(holder) = holder
        && !request.name.reference.first_writer_wins()
        && holder
            .sharing
            .number
            .is_some_and(|number| Some(number) < request.sharing.number)
    {
        // The tier has numbered both, so clocks do not matter.
        created = created.max(Timestamp(holder.created.0 + 1));
    }
    Artifact {
        id: request.artifact,
        tenant: request.name.tenant.clone(),
        reference: request.name.reference.clone(),
        layers: layers.to_vec(),
        created,
        ttl_seconds: request.ttl.map(|ttl| ttl.as_secs()),
        last_used: now,
        made_by: request.made_by.clone(),
        digests: Digests::default(),
        sharing: request.sharing,
        // No fence that this node does not know protects content from the next one.
        fence: request.fence.min(state.fences.newest()),
    }
}

/// Deletes a directory that is no longer needed.
fn remove(dir: &Dir, name: &str) -> Result<(), Error> {
    let deleted = tree::delete(dir, name.as_ref(), &|| false);
    deleted.map_err(archive::Error::from).context(FINISH)
}

/// Keeps a layer's table beside its content, as the background job would make it.
fn write_table(layer: &Dir, table: &Table) -> archive::Result<()> {
    let mut file = File::from(layer.create_file(layout::TABLE)?);
    table.write_to(&mut file)?;
    let digest = Sha256(table.digest().sha256).to_string();
    layer
        .node(layout::TABLE)?
        .set_xattr(DIGEST, digest.as_bytes())?;
    Ok(())
}

/// Keeps a part for the next fetch.
fn keep_part(inner: &Inner, tenant: Tenant, part: Part) {
    tracing::debug!(layer = %part.id, bytes = part.bytes, "what came is kept for the next fetch");
    let gone = inner.collector.parts.keep(tenant, part);
    delete(inner, &gone);
}

/// Deletes the parts that are too old.
pub(in crate::engine) fn delete_old_parts(inner: &Inner) {
    delete(inner, &inner.collector.parts.old(Instant::now()));
}

/// Deletes all parts. Returns how many.
pub(in crate::engine) fn delete_parts(inner: &Inner) -> usize {
    let all = inner.collector.parts.all();
    delete(inner, &all);
    all.len()
}

fn delete(inner: &Inner, parts: &[Part]) {
    for part in parts {
        let name = part.id.to_string();
        if let Err(error) = inner.throw_away(&inner.dirs.incoming, name.as_ref()) {
            tracing::error!(layer = %part.id, %error,
                "an incomplete layer could not be moved to trash/; it stays until the next start");
        }
    }
}
