//! Check: compares index, records, directories and mounts, and changes nothing. Code that inspects
//! the pool and reports belongs here; repair belongs in `rebuild`.

use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};

use super::error::{Context, Error, Result};
use super::failpoint::{Point, point};
use super::fsck_input::{self, Moving, Places};
use super::pool_scan::{Found, entries, look, names, needs_index};
use super::shared::Inner;
use super::table_digests::{Recorded, recorded};
use super::types::Finding;
use crate::model::{ArtifactId, LayerId, VolumeRecord, layout};
use crate::store::{self, Contents, Index, PoolView, is_replaced_index};
use crate::sys::{self, Dir, MountEntry};

/// What was found so far, and whether to go on.
struct Findings<'a> {
    all: Vec<Finding>,
    stopped: &'a dyn Fn() -> bool,
}

impl Findings<'_> {
    fn push(&mut self, finding: Finding) {
        self.all.push(finding);
    }

    /// The result for one path; `None`: the path cannot be read. That is a finding too and does not
    /// end fsck, since disks fail in single places.
    fn at<T>(&mut self, path: &Path, found: Result<T>) -> Result<Option<T>> {
        match found {
            Ok(found) => Ok(Some(found)),
            Err(Error::System { source, .. }) if !source.is_of_this_process() => {
                self.push(finding("unreadable", path, source.to_string()));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// A pool of many layers takes a while, and the end of the engine does not wait for it.
    fn go_on(&self) -> Result<()> {
        if (self.stopped)() {
            return Err(Error::ShuttingDown);
        }
        Ok(())
    }
}

/// Compares the pool of a running engine, until that stops.
///
/// The collector waits only while memory and the names in `layers/` are read. Otherwise the
/// collector could move a layer that memory still refers to. A layer that it moves later is not a
/// finding.
pub(super) fn check(inner: &Inner) -> Result<Vec<Finding>> {
    let places = Places::from(&*inner.dirs);
    let (named, moving, layers) = {
        let _one_at_a_time = inner.collector.lock();
        let (named, moving) = {
            let state = inner.state.lock();
            (fsck_input::named(&state), Moving::from(&*state))
        };
        (named, moving, layer_names(places)?)
    };
    point(Point::CheckListed);
    let stopped = || inner.lifetime.is_stopping();
    compare(places, inner.boot(), &named, &moving, &layers, &stopped)
}

fn layer_names(places: Places<'_>) -> Result<BTreeSet<PathBuf>> {
    places.layers.map_or_else(|| Ok(BTreeSet::new()), names)
}

/// Compares everything. `layers` are the names in `layers/`, read together with `named` and
/// `moving`.
fn compare(
    places: Places<'_>,
    boot: &str,
    named: &Contents,
    moving: &Moving,
    layers: &BTreeSet<PathBuf>,
    stopped: &dyn Fn() -> bool,
) -> Result<Vec<Finding>> {
    let mut findings = Findings {
        all: Vec::new(),
        stopped,
    };
    check_places(places, &mut findings);
    let mounts = sys::mount_table().context("read the mount table")?;
    let mut referenced = check_index(named, layers, &mut findings);
    if let Some(dir) = places.layers {
        check_confirmed(dir, &referenced, moving, &mut findings)?;
    }
    referenced.extend(&moving.needed);
    check_groups(named, &mut findings);
    let claims: HashSet<&str> = named.claims.iter().map(|claim| claim.id.as_str()).collect();
    if let Some(volumes) = places.volumes {
        check_claims(volumes, boot, &mounts, named, moving, &mut findings)?;
    }
    referenced.extend(check_volumes(
        places.volumes,
        boot,
        &mounts,
        &claims,
        moving,
        &mut findings,
    )?);
    referenced.extend(check_leaving(places, boot, moving, &mut findings)?);
    if let Some(dir) = places.layers {
        check_layers(dir, layers, &referenced, moving, &mut findings)?;
    }
    check_rest(places.root, &mut findings)?;
    let mut all = findings.all;
    all.retain(|finding| !has_left(places.root, finding));
    all.sort_by(|a, b| (&a.path, a.kind).cmp(&(&b.path, b.kind)));
    Ok(all)
}

/// Whether what was found there is gone. Then it was on its way out, and was seen half deleted.
fn has_left(root: &Dir, finding: &Finding) -> bool {
    let is_of_what_is_there = !finding.kind.starts_with("missing-");
    is_of_what_is_there && matches!(root.has(&finding.path), Ok(false))
}

fn finding(kind: &'static str, path: impl Into<PathBuf>, detail: impl Into<String>) -> Finding {
    Finding {
        kind,
        path: path.into(),
        detail: detail.into(),
    }
}

fn stray(path: PathBuf) -> Finding {
    finding(
        "unknown-name",
        path,
        "it is not a directory; the next start removes it",
    )
}

fn below(directory: &str, name: impl AsRef<Path>) -> PathBuf {
    Path::new(directory).join(name)
}

/// Directories that every pool has.
fn check_places(places: Places<'_>, findings: &mut Findings<'_>) {
    for (name, dir) in [
        (layout::VOLUMES, places.volumes),
        (layout::PENDING, places.pending),
        (layout::LAYERS, places.layers),
        (layout::TRASH, places.trash),
    ] {
        if dir.is_none() {
            let detail = "it is missing; the next start creates it empty";
            findings.push(finding("missing-directory", name, detail));
        }
    }
}

/// Finds artifacts with missing layers and names that point nowhere. Returns the layers that are
/// referred to.
fn check_index(
    named: &Contents,
    layers: &BTreeSet<PathBuf>,
    findings: &mut Findings<'_>,
) -> HashSet<LayerId> {
    let known: HashSet<ArtifactId> = named.artifacts.iter().map(|artifact| artifact.id).collect();
    for (name, id) in &named.names {
        if !known.contains(id) {
            let detail =
                format!("the name {name} points at artifact {id}, which the index does not have");
            findings.push(finding("dangling-name", layout::INDEX, detail));
        }
    }
    let mut referenced = HashSet::new();
    let artifacts = named.artifacts.iter().map(|artifact| {
        let owner = format!("{}, artifact {},", artifact.name(), artifact.id);
        (owner, &artifact.layers)
    });
    let claims = named.claims.iter();
    let claims = claims.map(|claim| (claim.id.to_string(), &claim.layers));
    let snapshots = named.snapshots.iter();
    let snapshots = snapshots.map(|snapshot| (snapshot.id.to_string(), &snapshot.layers));
    for (owner, stack) in artifacts.chain(claims).chain(snapshots) {
        for layer in stack {
            if referenced.insert(*layer) && !layers.contains(Path::new(&layer.to_string())) {
                let path = below(layout::LAYERS, layer.to_string());
                let detail = format!("{owner} needs this layer");
                findings.push(finding("missing-layer", path, detail));
            }
        }
    }
    referenced
}

/// Layers that the index names and whose records do not confirm it.
fn check_confirmed(
    dir: &Dir,
    named: &HashSet<LayerId>,
    moving: &Moving,
    findings: &mut Findings<'_>,
) -> Result<()> {
    let is_moving =
        |layer: &&LayerId| moving.leaving.contains(layer) || moving.pinned.contains(layer);
    for layer in named.iter().filter(|layer| !is_moving(layer)) {
        findings.go_on()?;
        let record = Path::new(&layer.to_string()).join(layout::SEALING_JSON);
        let is_there = match dir.has(&record) {
            Err(error) if error.is_of_this_process() => {
                return Err(error).context("look at a layer");
            }
            // Entries that are not layers, or are unreadable, are reported below.
            is_there => is_there.unwrap_or(false),
        };
        if is_there {
            let path = below(layout::LAYERS, layer.to_string());
            let detail = "it is not confirmed, so a rebuilt index would not include it; garbage \
                          collection confirms it";
            findings.push(finding("unconfirmed-layer", path, detail));
        }
    }
    Ok(())
}

/// The record of a volume, if it is readable and of this boot. Anything else is a finding.
fn record_of_this_boot(
    (dir, name): (&Dir, &Path),
    path: &Path,
    boot: &str,
    findings: &mut Findings<'_>,
) -> Result<Option<VolumeRecord>> {
    match look(dir, name)? {
        Found::Gone => {}
        Found::Stray => findings.push(stray(path.to_owned())),
        Found::Unreadable(error) => {
            findings.push(finding("unreadable", path, error.to_string()));
        }
        Found::Unrecorded(_, why) => {
            findings.push(finding("unreadable-volume", path, why.to_string()));
        }
        Found::Volume(_, record) if record.boot != boot => {
            let detail = "it is of another boot; the next start removes it";
            findings.push(finding("stale-volume", path, detail));
        }
        Found::Volume(_, record) => return Ok(Some(*record)),
    }
    Ok(None)
}

/// Volumes without a record that counts, and volumes whose mount is gone.
fn check_volumes(
    volumes: Option<&Dir>,
    boot: &str,
    mounts: &[MountEntry],
    claims: &HashSet<&str>,
    moving: &Moving,
    findings: &mut Findings<'_>,
) -> Result<HashSet<LayerId>> {
    let mut referenced = HashSet::new();
    for (volumes, name) in entries(volumes)? {
        findings.go_on()?;
        let left_out = |name: &str| moving.busy.contains(name) || claims.contains(name);
        if name.to_str().is_some_and(left_out) {
            continue;
        }
        let path = below(layout::VOLUMES, &name);
        let at = (volumes, name.as_path());
        let Some(record) = record_of_this_boot(at, &path, boot, findings)? else {
            continue;
        };
        // One target is enough: the record is not rewritten when a volume leaves one of several.
        let mounted = |target: &PathBuf| is_mounted(target, mounts);
        if !record.targets.iter().any(mounted) {
            let first = record.targets.first().map(PathBuf::as_path);
            check_targets(&path, first.into_iter(), mounts, findings);
        }
        referenced.extend(record.layers);
    }
    Ok(referenced)
}

/// Targets of a volume where nothing is mounted.
fn check_targets<'a>(
    volume: &Path,
    targets: impl Iterator<Item = &'a Path>,
    mounts: &[MountEntry],
    findings: &mut Findings<'_>,
) {
    for target in targets {
        if !is_mounted(target, mounts) {
            let detail = format!(
                "it is recorded as published at {}, where nothing is mounted",
                target.display()
            );
            findings.push(finding("unmounted-volume", volume, detail));
        }
    }
}

fn is_mounted(target: &Path, mounts: &[MountEntry]) -> bool {
    let parent = target.parent();
    let resolved = parent.and_then(|parent| parent.canonicalize().ok());
    let resolved = resolved
        .zip(target.file_name())
        .map(|(parent, name)| parent.join(name));
    let resolved = resolved.as_deref().unwrap_or(target);
    mounts.iter().any(|mount| mount.mount_point == *resolved)
}

/// Groups whose snapshots are gone.
fn check_groups(named: &Contents, findings: &mut Findings<'_>) {
    let known: HashSet<&str> = named
        .snapshots
        .iter()
        .map(|snapshot| snapshot.id.as_str())
        .collect();
    for group in &named.groups {
        for id in &group.snapshots {
            if !known.contains(id.as_str()) {
                let detail = format!(
                    "group {} has snapshot {id}, which the index does not have",
                    group.id
                );
                findings.push(finding("dangling-name", layout::INDEX, detail));
            }
        }
    }
}

/// Directories of claims: mounted where they say, and not on their way anywhere.
fn check_claims(
    volumes: &Dir,
    boot: &str,
    mounts: &[MountEntry],
    named: &Contents,
    moving: &Moving,
    findings: &mut Findings<'_>,
) -> Result<()> {
    for claim in &named.claims {
        findings.go_on()?;
        if moving.busy.contains(claim.id.as_str()) {
            continue;
        }
        let path = below(layout::VOLUMES, &claim.id);
        let dir = match volumes.open_beneath(&claim.id) {
            Err(error) if error.is(sys::Errno::ENOENT) => continue,
            Err(error) if error.is_no_directory() => {
                findings.push(stray(path));
                continue;
            }
            dir => dir.context("open a volume's directory"),
        };
        let Some(dir) = findings.at(&path, dir)? else {
            continue;
        };
        for name in findings.at(&path, names(&dir))?.unwrap_or_default() {
            if name
                .to_str()
                .is_some_and(|name| name.starts_with(layout::FREEZING_PREFIX))
            {
                let detail = "a snapshot or clone of it was interrupted; the next start undoes it";
                findings.push(finding("half-frozen-volume", path.join(name), detail));
            }
        }
        let record = store::read_claim(&dir).context("read a volume's record");
        let Some(record) = findings.at(&path, record)? else {
            continue;
        };
        match record {
            Err(error) => findings.push(finding("unreadable-volume", path, error.to_string())),
            Ok(record) if record.boot != boot => {}
            Ok(record) => {
                let targets = record.targets.iter().map(|target| target.path.as_path());
                check_targets(&path, targets, mounts, findings);
            }
        }
    }
    Ok(())
}

/// Seal intents that no task works on, and layers that the trash still refers to.
fn check_leaving(
    places: Places<'_>,
    boot: &str,
    moving: &Moving,
    findings: &mut Findings<'_>,
) -> Result<HashSet<LayerId>> {
    let mut referenced = HashSet::new();
    for (dir, name) in entries(places.pending)? {
        findings.go_on()?;
        let path = below(layout::PENDING, &name);
        let at = (dir, name.as_path());
        let Some(record) = record_of_this_boot(at, &path, boot, findings)? else {
            continue;
        };
        referenced.extend(record.layers);
        referenced.extend(record.seal.map(|plan| plan.layer));
    }
    for (dir, name) in entries(places.trash)? {
        findings.go_on()?;
        let held = name
            .to_str()
            .and_then(|name| name.parse().ok())
            .is_some_and(|key| moving.leaving.contains(&key));
        match look(dir, &name)? {
            Found::Unreadable(error) => {
                let path = below(layout::TRASH, &name);
                findings.push(finding("unreadable", path, error.to_string()));
            }
            Found::Volume(_, record) if held || record.boot == boot => {
                referenced.extend(record.layers);
            }
            _ => {}
        }
    }
    Ok(referenced)
}

/// Layers that nothing refers to, and layers that are not whole.
fn check_layers(
    dir: &Dir,
    layers: &BTreeSet<PathBuf>,
    referenced: &HashSet<LayerId>,
    moving: &Moving,
    findings: &mut Findings<'_>,
) -> Result<()> {
    for name in layers {
        findings.go_on()?;
        let path = below(layout::LAYERS, name);
        let Some(id) = name.to_str().and_then(|name| name.parse::<LayerId>().ok()) else {
            findings.push(finding(
                "unknown-name",
                path,
                "this is not the name of a layer",
            ));
            continue;
        };
        if moving.leaving.contains(&id) {
            continue;
        }
        if !referenced.contains(&id) {
            findings.push(finding(
                "unknown-layer",
                path,
                "no artifact and no volume refers to it",
            ));
            continue;
        }
        let layer = match dir.open_beneath(name) {
            Err(error) if error.is(sys::Errno::ENOENT) => continue,
            Err(error) if error.is_no_directory() => {
                findings.push(finding("empty-layer", path, "it is not a directory"));
                continue;
            }
            layer => layer.context("open a layer"),
        };
        let Some(layer) = findings.at(&path, layer)? else {
            continue;
        };
        let has_content = layer.has(layout::FS).context("look at a layer");
        if findings.at(&path, has_content)? == Some(false) {
            findings.push(finding(
                "empty-layer",
                path.clone(),
                "it has no fs/ directory",
            ));
        }
        let table = recorded(&layer).context("read a layer's table of contents");
        if findings.at(&path, table)? == Some(Recorded::Damaged) {
            let detail = "it is damaged; the next start makes it again";
            findings.push(finding("damaged-table", path.join(layout::TABLE), detail));
        }
        let record = store::read_sealing(&layer).context("read a layer's record");
        if let Some(Err(error)) = findings.at(&path, record)? {
            findings.push(finding("unreadable-layer", path, error.to_string()));
        }
    }
    Ok(())
}

/// Names in the pool's root that do not belong to the driver.
fn check_rest(root: &Dir, findings: &mut Findings<'_>) -> Result<()> {
    const KNOWN: &[&str] = &[
        layout::POOL_JSON,
        layout::LOCK,
        // Made by earlier versions and no longer read.
        "lock.pid",
        layout::INDEX,
        layout::VOLUMES,
        layout::PENDING,
        layout::LAYERS,
        layout::INCOMING,
        layout::SPARES,
        layout::TRASH,
        layout::EMPTY,
        layout::RESERVE,
        layout::POLICIES_JSON,
        "admin.sock",
        "doomed",
        "index.redb.new",
        // The filesystem's own, where the pool is its root.
        "lost+found",
    ];
    for name in names(root)? {
        // A temporary file that a crash left beside its target; the next write replaces it.
        let half_made = |known: &&str| name == Path::new(&format!(".{known}.new"));
        let is_known = |known| name == Path::new(known) || half_made(known);
        if !KNOWN.iter().any(is_known) && !is_replaced_index(name.as_os_str()) {
            findings.push(finding(
                "unknown-name",
                name,
                "it does not belong to a pool",
            ));
        }
    }
    Ok(())
}

/// Compares a pool that no driver has open, and changes no byte of it.
pub(super) fn check_offline(path: &Path, boot: &str) -> Result<Vec<Finding>> {
    let view = PoolView::open(path).map_err(|error| Error::of_pool(path, error))?;
    let has_index = Index::exists(&view.root)?;
    let contents = if has_index {
        Index::read_only(&view.root)?
    } else {
        Contents::default()
    };
    let places = Places::from(&view);
    let moving = Moving::default();
    let layers = layer_names(places)?;
    let mut findings = compare(places, boot, &contents, &moving, &layers, &|| false)?;
    if !has_index && needs_index(places.layers, places.volumes)? {
        let detail = "it is missing; `check --rebuild` builds a new one from the layers and the \
                      directories of persistent volumes";
        findings.insert(0, finding("missing-index", layout::INDEX, detail));
    }
    Ok(findings)
}

#[cfg(test)]
mod tests;
