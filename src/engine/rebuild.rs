//! Rebuilds a lost index from the records beside the layers, and detects that it is missing. Code
//! that reads a whole pool to compare it belongs in `fsck`.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use super::error::{Context, Error, Result};
use super::failpoint::{Point, point};
use super::pool_scan::entries;
use super::types::Rebuilt;
use crate::model::{
    Artifact, ArtifactId, Fences, LayerId, Name, PersistentVolume, layout, takes_name,
};
use crate::store::{self, Change, Index, NewIndex, PoolDirs, PoolView};
use crate::sys::Dir;

/// Rebuilds the index of a pool that no driver has open, from the records beside the layers. The
/// old one is kept beside it ([`NewIndex`]).
pub(super) fn rebuild(path: &Path) -> Result<Rebuilt> {
    let dirs = PoolDirs::open_existing(path).map_err(|error| Error::of_pool(path, error))?;
    let (mut rebuilt, changes) = plan(&dirs.root, Some(&dirs.layers), Some(&dirs.volumes))?;
    let kept = replace(&dirs.root, &changes).map_err(|error| Error::of_pool(path, error))?;
    rebuilt.kept = kept;
    Ok(rebuilt)
}

/// What a rebuild would make. Writes nothing.
pub(super) fn preview(path: &Path) -> Result<Rebuilt> {
    let view = PoolView::open(path).map_err(|error| Error::of_pool(path, error))?;
    let (rebuilt, _) = plan(&view.root, view.layers.as_ref(), view.volumes.as_ref())?;
    Ok(rebuilt)
}

/// Whether a rebuild would replace an index of which nothing is lost.
pub(super) fn has_readable_index(path: &Path) -> Result<bool> {
    let view = PoolView::open(path).map_err(|error| Error::of_pool(path, error))?;
    Index::is_readable(&view.root).map_err(|error| Error::of_pool(path, error))
}

/// What the new index names, and the changes that make it of an empty one.
///
/// The new index names only content that was durable. A layer without `layer.json` was being
/// sealed: the next start completes its seal from `pending/`, or discards it. Claims are found by
/// the records in their directories: those that were mounted since they were created, or since they
/// were last cloned or snapshotted. Fences come from the old index, if it can be read. What only
/// the index knew is lost: last uses, deletions of names while their content was in use, all other
/// claims, snapshots.
fn plan(root: &Dir, layers: Option<&Dir>, volumes: Option<&Dir>) -> Result<(Rebuilt, Vec<Change>)> {
    let mut artifacts: HashMap<ArtifactId, Artifact> = HashMap::new();
    let mut whole = HashSet::new();
    let mut records = Vec::new();
    let mut of_claims = Vec::new();
    for (dir, name) in entries(layers)? {
        let layer = match dir.open_beneath(&name) {
            Err(error) if error.is_no_directory() => continue,
            layer => layer.context("open a layer")?,
        };
        if layer.has(layout::FS).context("look at a layer")?
            && let Ok(record) = store::read_layer(&layer).context("read a layer's record")?
            && Path::new(&record.id.to_string()) == name
        {
            whole.insert(record.id);
            // Of a claim or snapshot, or merged for some.
            if record.artifact.is_none() {
                of_claims.push(record.id);
            }
            records.push(record);
        }
    }
    for artifact in records.into_iter().filter_map(|record| record.artifact) {
        // A merged layer describes the same artifact as the layers that it replaced. The shorter
        // stack is the newer one.
        let known = artifacts.get(&artifact.id);
        let newer = known.is_none_or(|known| artifact.layers.len() < known.layers.len());
        if newer && artifact.layers.iter().all(|layer| whole.contains(layer)) {
            artifacts.insert(artifact.id, artifact);
        }
    }
    // The old index may still say what was cleared. An interrupted rebuild has moved it.
    let old = Index::read_only(root).or_else(|_| store::read_replaced_index(root));
    let fences = old.map_or_else(|_| Fences::default(), |old| old.fences);
    let is_cleared = |artifact: &Artifact| artifact.fence < fences.least(&artifact.name());
    let mut holders: HashMap<Name, &Artifact> = HashMap::new();
    for artifact in artifacts.values().filter(|artifact| !is_cleared(artifact)) {
        let holder = holders.entry(artifact.name()).or_insert(artifact);
        if takes_name(artifact, holder) {
            *holder = artifact;
        }
    }
    let named = holders
        .into_iter()
        .map(|(name, artifact)| Change::PutName(name, artifact.id));
    let (claims, unreadable) = claims(volumes)?;
    let stacks = artifacts.values().map(|artifact| &artifact.layers);
    let stacks = stacks.chain(claims.iter().map(|claim| &claim.layers));
    let referenced: HashSet<LayerId> = stacks.flatten().copied().collect();
    of_claims.retain(|layer| !referenced.contains(layer));
    of_claims.sort_unstable();
    let rebuilt = Rebuilt {
        artifacts: artifacts.len(),
        claims: claims.len(),
        nameless: of_claims,
        unreadable,
        kept: None,
    };
    let changes: Vec<Change> = artifacts
        .values()
        .cloned()
        .map(Change::PutArtifact)
        .chain(named)
        .chain(claims.into_iter().map(Change::PutClaim))
        .chain(fences.all().cloned().map(Change::PutFence))
        .chain([
            Change::ForgetFences(fences.forgotten()),
            Change::MissFences(fences.missed()),
        ])
        .collect();
    Ok((rebuilt, changes))
}

fn replace(root: &Dir, changes: &[Change]) -> store::Result<Option<PathBuf>> {
    let index = NewIndex::make(root, changes)?;
    point(Point::RebuildMade);
    let kept = index.clear_place()?;
    point(Point::RebuildCleared);
    index.take_place()?;
    point(Point::RebuildPlaced);
    Ok(kept)
}

/// The claims with a readable record, and the directories of claims with an unreadable one. The
/// next start reports a claim with missing layers, and keeps it.
fn claims(volumes: Option<&Dir>) -> Result<(Vec<PersistentVolume>, Vec<PathBuf>)> {
    let (mut claims, mut unreadable) = (Vec::new(), Vec::new());
    for (dir, name) in entries(volumes)? {
        let dir = match dir.open_beneath(&name) {
            Err(error) if error.is_no_directory() => continue,
            dir => dir.context("open a volume's directory")?,
        };
        match store::read_claim(&dir).context("read a volume's record")? {
            Ok(record) if Path::new(record.claim.id.as_str()) == name => claims.push(record.claim),
            // A volume of a pod.
            Err(store::Unreadable::Missing) => {}
            _ => unreadable.push(name),
        }
    }
    Ok((claims, unreadable))
}
