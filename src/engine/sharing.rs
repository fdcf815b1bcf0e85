//! The methods of [`Engine`] for the shared tier: the content of this node under a name, the
//! artifacts that wait for their upload, and the tier's answer about each. The caller decides where
//! the tier is, and when it is asked.

use std::sync::Arc;

use parking_lot::MutexGuard;

use super::artifacts::Sealed;
use super::error::{Context, Result};
use super::failpoint::{Point, point};
use super::shared::Inner;
use super::state::State;
use super::threads::Pool;
use super::transfer::{self, OpenArtifact};
use super::types::{LocalArtifact, PublishRequest, Tables};
use super::{Engine, layers, remove};
use crate::model::{
    Artifact, ArtifactId, CacheKey, LayerId, Name, Reference, Sha256, Sharing, Tenant, VolumeKind,
};
use crate::store::{self, Change};

impl LocalArtifact {
    fn of(sealed: &Sealed) -> Self {
        Self {
            id: sealed.artifact.id,
            sharing: sealed.artifact.sharing,
            fence: sealed.artifact.fence,
            created: sealed.artifact.created,
            durable: sealed.durable,
        }
    }
}

impl Engine {
    /// The content on this node that a name points at.
    #[must_use]
    pub fn local(&self, tenant: &Tenant, reference: &Reference) -> Option<LocalArtifact> {
        let (tenant, reference) = (tenant.clone(), reference.clone());
        let state = self.inner.state.lock();
        let owner = state.catalog.owner(&Name { tenant, reference });
        owner.map(LocalArtifact::of)
    }

    /// The layers of the content on this node that a name points at.
    #[must_use]
    pub fn layers_of(&self, tenant: &Tenant, reference: &Reference) -> Vec<LayerId> {
        let (tenant, reference) = (tenant.clone(), reference.clone());
        let state = self.inner.state.lock();
        let owner = state.catalog.owner(&Name { tenant, reference });
        owner.map_or(Vec::new(), |sealed| sealed.artifact.layers.clone())
    }

    /// The name and the content of the newest commit on this node of all task caches whose key
    /// begins so.
    #[must_use]
    pub fn newest(&self, tenant: &Tenant, prefix: &CacheKey) -> Option<(Name, LocalArtifact)> {
        let state = self.inner.state.lock();
        let sealed = state.catalog.newest(tenant, prefix)?;
        Some((sealed.artifact.name(), LocalArtifact::of(sealed)))
    }

    /// Whether a volume on this node will become the input that is wanted.
    #[must_use]
    pub fn is_coming(&self, request: &PublishRequest) -> bool {
        let VolumeKind::Input { from } = &request.spec.kind else {
            return false;
        };
        let state = self.inner.state.lock();
        let readable = state.readable(request, request.source(from));
        let coming = readable.and_then(|name| state.coming(&name, &request.pod.uid));
        coming.is_some()
    }

    /// The artifacts that are to be uploaded, newest first.
    #[must_use]
    pub fn to_share(&self) -> Vec<Artifact> {
        let mut wanted = Vec::new();
        self.each_to_share(|artifact, _| wanted.push(artifact.clone()));
        wanted.sort_by_key(|artifact| std::cmp::Reverse((artifact.created, artifact.id)));
        wanted
    }

    /// Looks at the artifacts that are to be uploaded, in no order, and at the tables of contents
    /// of their layers. `look` must be quick, and must not call the engine: the state is locked.
    pub fn each_to_share(&self, mut look: impl FnMut(&Artifact, Tables)) {
        let tables = &self.inner.collector.tables;
        let has_space = transfer::shortage(&self.inner).is_none();
        self.inner.look_at_artifacts(|state, sealed| {
            let artifact = &sealed.artifact;
            let is_wanted = sealed.durable && artifact.sharing.is_wanted();
            let is_wanted = is_wanted && state.catalog.is_named(artifact);
            // What can have no table never leaves this node.
            let is_refused = |layer| tables.is_refused(layer);
            if is_wanted && !artifact.layers.iter().any(is_refused) {
                look(artifact, tables.of(&artifact.layers, has_space));
            }
        });
    }

    /// Waits until [`Engine::to_share`] or [`Engine::open_layers`] may have a new answer. For one
    /// caller: a change that happened before the call wakes it, too.
    pub async fn content_changed(&self) {
        self.inner.collector.tables.content_changed().await;
    }

    /// Opens an artifact layer by layer. `None`: it is gone, a layer has no table of contents yet,
    /// or the record of its newest layer says that the tier is not to get it. Blocks.
    pub fn open_layers(&self, id: ArtifactId) -> Result<Option<OpenArtifact>> {
        let inner = &self.inner;
        // It keeps the layers.
        let Some(open) = transfer::open_layers(inner, id)? else {
            return Ok(None);
        };
        let one_at_a_time = inner.collector.lock();
        let is_wanted = {
            let state = inner.state.lock();
            let sealed = state.catalog.get(&id);
            sealed.is_some_and(|sealed| sealed.artifact.sharing.is_wanted())
        };
        let recorded = recorded(inner, &open.artifact)?;
        let is_damage_forgotten = !open.artifact.sharing.damaged;
        let says_more = |recorded: &Sharing| {
            is_wanted && !recorded.is_wanted() || is_damage_forgotten && recorded.damaged
        };
        let Some(recorded) = recorded.filter(says_more) else {
            return Ok(Some(open));
        };
        // An older version of this driver has written the artifact into the index.
        let recall = |sharing: &mut Sharing| {
            sharing.never |= recorded.never;
            sharing.damaged |= recorded.damaged;
            sharing.refused |= recorded.refused;
            sharing.number = sharing.number.max(recorded.number);
        };
        enter(inner, id, recall, &one_at_a_time)?;
        Ok(None)
    }

    /// Changes a durable artifact's state in the tier: in the index, in memory, and in the record
    /// of its newest layer. `false`: there is no such artifact. Blocks.
    pub fn set_sharing(&self, id: ArtifactId, change: impl FnOnce(&mut Sharing)) -> Result<bool> {
        let one_at_a_time = self.inner.collector.lock();
        enter(&self.inner, id, change, &one_at_a_time)
    }

    /// Marks an artifact as damaged because its layer with this table of contents is, and all other
    /// artifacts that stack this layer. Returns them all. The artifact itself gets its mark last:
    /// its mark says that the others have theirs, so a call after an error does the rest.
    pub async fn mark_damaged(&self, id: ArtifactId, table: Sha256) -> Result<Vec<ArtifactId>> {
        let job = move |inner: &Arc<Inner>| {
            let one_at_a_time = inner.collector.lock();
            let mut stacked = stacking(inner, id, table);
            stacked.sort_by_key(|(artifact, _)| *artifact == id);
            for (artifact, is_marked) in &stacked {
                if !is_marked {
                    let mark = |sharing: &mut Sharing| sharing.damaged = true;
                    enter(inner, *artifact, mark, &one_at_a_time)?;
                }
            }
            Ok(stacked.into_iter().map(|(artifact, _)| artifact).collect())
        };
        // It waits for the collector.
        self.inner.run(Pool::Room, job).await
    }

    /// Waits until a name shows this artifact. It may be content of another node that is not
    /// durable yet.
    pub async fn shows(&self, name: &Name, id: ArtifactId) {
        let shows = |state: &mut State| {
            let owner = state.catalog.owner(name);
            owner.filter(|it| it.artifact.id == id).map(|_| ())
        };
        self.inner.state.when(shows).await;
    }

    /// Takes a name from content that follows no number of the tier from `cleared` on: the tier
    /// cleared the name after that content began. Volumes that are forks of it keep it. `false`:
    /// there is no such content.
    pub async fn discard_cleared(&self, name: &Name, cleared: u64) -> Result<bool> {
        let began_before = move |artifact: &Artifact| artifact.sharing.is_older_than_clear(cleared);
        remove::discard(&self.inner, name, began_before).await
    }
}

fn enter(
    inner: &Inner,
    id: ArtifactId,
    change: impl FnOnce(&mut Sharing),
    _one_at_a_time: &MutexGuard<'_, ()>,
) -> Result<bool> {
    let artifact = {
        let state = inner.state.lock();
        let sealed = state.catalog.get(&id).filter(|sealed| sealed.durable);
        let Some(sealed) = sealed else {
            return Ok(false);
        };
        let mut artifact = sealed.artifact.clone();
        change(&mut artifact.sharing);
        artifact
    };
    let put = [Change::PutArtifact(artifact.clone())];
    inner.transact(&put).result()?;
    point(Point::SharingIndexed);
    let mut state = inner.state.lock();
    state.catalog.set_sharing(&id, artifact.sharing);
    drop(state);
    layers::note_sharing(inner, &artifact);
    point(Point::SharingNoted);
    Ok(true)
}

/// An artifact, and all others that stack its layer with this table of contents: the durable ones,
/// and whether each has a mark of damage.
fn stacking(inner: &Inner, id: ArtifactId, table: Sha256) -> Vec<(ArtifactId, bool)> {
    let damaged: Vec<LayerId> = {
        let state = inner.state.lock();
        let sealed = state.catalog.get(&id);
        let layers = sealed.map_or(Vec::new(), |sealed| sealed.artifact.layers.clone());
        let is_it = |layer: &LayerId| inner.collector.tables.get(layer) == Some(table);
        layers.into_iter().filter(is_it).collect()
    };
    let mut found = Vec::new();
    inner.look_at_artifacts(|_, sealed| {
        let artifact = &sealed.artifact;
        let has_it = artifact.layers.iter().any(|layer| damaged.contains(layer));
        if sealed.durable && (has_it || artifact.id == id) {
            found.push((artifact.id, artifact.sharing.damaged));
        }
    });
    found
}

/// What the record of an artifact's newest layer says of it, if that layer was made for it.
fn recorded(inner: &Inner, artifact: &Artifact) -> Result<Option<Sharing>> {
    let Some(newest) = artifact.layers.first() else {
        return Ok(None);
    };
    let layer = inner.layer_dir(*newest)?;
    let record = store::read_layer(&layer).context("read the layer's record")?;
    let recorded = record.ok().and_then(|record| record.artifact);
    let recorded = recorded.filter(|recorded| recorded.id == artifact.id);
    Ok(recorded.map(|recorded| recorded.sharing))
}
