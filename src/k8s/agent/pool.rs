//! Publishes the node's `Pool`: what the controller chooses nodes by, and the claims that no object
//! names. A `Pool` that was deleted is made again.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::reflector::Store;
use kube::{Api, Client};
use serde_json::json;

use super::health::{self, Health};
use super::{Error, names};
use crate::api::{
    self, MOST_NAMED, OrphanSnapshot, OrphanVolume, Orphans, Pool, PoolPeer, PoolSpec, PoolState,
    PoolStatus, Volume, number,
};
use crate::distribution::Away;
use crate::distribution::roster::Directory;
use crate::engine::claims::SnapshotFilter;
use crate::engine::{self, Engine};
use crate::k8s::client::has_code;
use crate::model::{Node, PersistentVolume, Snapshot, SnapshotId};

/// How often orphans are looked for. They are reported at once, since a claim may wait for them.
const LOOK: Duration = Duration::from_secs(3);
/// How often the pool's state and room are looked at. That it takes no changes, or takes them
/// again, is reported at once.
const LOOK_AT_POOL: Duration = Duration::from_secs(15);
/// The time between two reports otherwise. Each makes the `Pool` again if it was deleted.
const REPORT: Duration = Duration::from_secs(60);
/// How long a report may take. Until it ends, no other problem of the pool is reported.
const WRITE: Duration = Duration::from_secs(30);
/// The steps in which the free space is reported.
const STEPS: u64 = 16;
/// How many snapshots of orphan groups are named at once, each with its source: 400 KB.
const MOST_MEMBERS: usize = 5000;
/// How many peers are named that did not answer.
const MOST_AWAY: usize = 20;

/// This node as a peer.
#[derive(Debug)]
pub struct Peering {
    /// Where the others reach it.
    pub place: PoolPeer,
    /// Its connection to the controller.
    pub directory: Arc<dyn Directory>,
    /// The others that did not answer it lately.
    pub away: Arc<Away>,
}

impl Peering {
    fn away(&self) -> Vec<String> {
        let mut away = self.away.names(Instant::now());
        away.truncate(MOST_AWAY);
        away
    }
}

/// What is reported at once of the node as a peer. Which peers are away may change often.
fn reached(status: &PoolStatus) -> Option<(&str, &str, bool, bool)> {
    let peer = status.peer.as_ref()?;
    let is_any_away = !peer.away.is_empty();
    Some((&peer.address, &peer.key, peer.catalog, is_any_away))
}

/// The objects that the watches have seen.
pub(super) struct Seen {
    pub(super) volumes: Store<Volume>,
    pub(super) snapshots: Store<api::Snapshot>,
}

/// Publishes the pool, at first and when it changes.
pub(super) async fn publish(
    client: Client,
    engine: Engine,
    node: Node,
    pool: String,
    peer: Option<Peering>,
    seen: Seen,
) {
    let pools: Api<Pool> = Api::all(client);
    // Without both lists, every claim would look like an orphan.
    let _ = seen.volumes.wait_until_ready().await;
    let _ = seen.snapshots.wait_until_ready().await;
    let mut written: Option<(PoolStatus, Instant)> = None;
    let mut found: Option<(Health, Instant)> = None;
    let mut turn = 0;
    loop {
        let next = async {
            let is_due = written
                .as_ref()
                .is_none_or(|(_, at)| at.elapsed() >= REPORT);
            // A report that was not written is made again, so that each turn names its part.
            let this_turn = turn + usize::from(is_due);
            let health = match found.take() {
                Some((health, at)) if at.elapsed() < LOOK_AT_POOL => (health, at),
                _ => (health::look(&engine).await?, Instant::now()),
            };
            let (health, _) = found.insert(health);
            let status = look(
                &engine,
                health,
                &node,
                &pool,
                peer.as_ref(),
                &seen,
                this_turn,
            )?;
            let is_known = written.as_ref();
            let is_known = is_known.is_some_and(|(before, _)| {
                before.orphans == status.orphans
                    && reached(before) == reached(&status)
                    && takes_changes(before) == takes_changes(&status)
            });
            if is_due || !is_known {
                let writing = write(&pools, node.id.as_str(), &status);
                let written_in_time = tokio::time::timeout(WRITE, writing).await;
                written_in_time.map_err(|_| Error::Silent(WRITE))??;
                written = Some((status, Instant::now()));
                turn = this_turn;
            }
            Ok::<_, Error>(())
        };
        if let Err(error) = next.await {
            tracing::warn!(%error, "the Pool object of this node could not be updated; retrying");
        }
        tokio::time::sleep(LOOK).await;
    }
}

fn takes_changes(status: &PoolStatus) -> bool {
    status.state != Some(PoolState::NotReady)
}

fn look(
    engine: &Engine,
    health: &Health,
    node: &Node,
    pool: &str,
    peer: Option<&Peering>,
    seen: &Seen,
    turn: usize,
) -> Result<PoolStatus, Error> {
    let capacity = health.capacity;
    let claims = engine.claims(None, usize::MAX).items;
    let snapshots = engine.snapshots(&SnapshotFilter::default(), None, usize::MAX)?;
    // Read after the engine: the object comes first, and goes last.
    let (volumes, objects) = (names(&seen.volumes), names(&seen.snapshots));
    let lonely_claims = claims.iter();
    let lonely_claims: Vec<OrphanVolume> = lonely_claims
        .filter(|claim| !volumes.contains(claim.id.as_str()))
        .map(|claim| orphan(node, claim))
        .collect();
    let lonely_snapshots = orphan_snapshots(engine, &snapshots.items, &objects)?;
    let count = lonely_claims.len() + lonely_snapshots.len();
    let step = (capacity.largest / STEPS).max(1);
    Ok(PoolStatus {
        pool: pool.to_owned(),
        state: Some(health.state),
        reason: health.reason.clone(),
        topology: node.topology.0.clone(),
        bytes: number(capacity.largest),
        available: number(capacity.available / step * step),
        volumes: i64::try_from(claims.len()).unwrap_or(i64::MAX),
        orphans: Orphans {
            count: i64::try_from(count).unwrap_or(i64::MAX),
            volumes: some(lonely_claims, turn),
            snapshots: within_a_report(some(lonely_snapshots, turn)),
        },
        peer: peer.map(|peer| PoolPeer {
            catalog: peer.directory.is_connected(),
            away: peer.away(),
            ..peer.place.clone()
        }),
    })
}

/// The orphans that this turn names.
fn some<T>(mut all: Vec<T>, turn: usize) -> Vec<T> {
    if all.len() > MOST_NAMED {
        let first = (turn * MOST_NAMED) % all.len();
        all.rotate_left(first);
        all.truncate(MOST_NAMED);
    }
    all
}

/// As many of these as a Pool has room for, and one at least: etcd takes objects of 1.5 MiB. The
/// others are named when objects for these exist.
fn within_a_report(mut all: Vec<OrphanSnapshot>) -> Vec<OrphanSnapshot> {
    let mut members = 0;
    let fits = all.iter().take_while(|orphan| {
        members += orphan.members.len();
        members <= MOST_MEMBERS
    });
    let fits = fits.count().max(1);
    all.truncate(fits);
    all
}

fn orphan(node: &Node, claim: &PersistentVolume) -> OrphanVolume {
    // The engine's name ends with the node's, unless something else than an order made the volume.
    let name = claim.name.strip_suffix(node.id.as_str());
    let name = name.and_then(|name| name.strip_suffix('@'));
    OrphanVolume {
        id: claim.id.to_string(),
        name: name.unwrap_or(&claim.name).to_owned(),
        parameters: claim.parameters.into(),
        made_with: claim.made_with.unwrap_or(claim.mutable).into(),
        source: claim.source.as_ref().map(Into::into),
        capacity: number(claim.capacity),
        mutable: claim.mutable.into(),
    }
}

/// The snapshots without an object. Those of a group are one.
fn orphan_snapshots(
    engine: &Engine,
    all: &[Snapshot],
    objects: &HashSet<String>,
) -> Result<Vec<OrphanSnapshot>, Error> {
    let mut found: BTreeMap<SnapshotId, OrphanSnapshot> = BTreeMap::new();
    for snapshot in all {
        let id = snapshot.group.as_ref().unwrap_or(&snapshot.id);
        if objects.contains(id.as_str()) || found.contains_key(id) {
            continue;
        }
        let (name, members) = match &snapshot.group {
            None => (snapshot.name.clone(), vec![snapshot.clone()]),
            Some(group) => match engine.group(group.as_str()) {
                Ok((group, members)) => (group.name, members),
                // It was deleted meanwhile.
                Err(engine::Error::NoSuchSnapshot(_)) => continue,
                Err(error) => return Err(error.into()),
            },
        };
        let members = members.iter();
        let orphan = OrphanSnapshot {
            id: id.to_string(),
            name,
            sources: members.clone().map(|one| one.source.to_string()).collect(),
            members: members.map(|one| one.id.to_string()).collect(),
            group: snapshot.group.is_some(),
        };
        found.insert(id.clone(), orphan);
    }
    Ok(found.into_values().collect())
}

async fn write(pools: &Api<Pool>, name: &str, status: &PoolStatus) -> Result<(), Error> {
    let patch = Patch::Merge(json!({ "status": status }));
    let params = PatchParams::default();
    match pools.patch_status(name, &params, &patch).await {
        Err(error) if has_code(&error, 404) => {
            let pool = Pool::new(name, PoolSpec {});
            pools.create(&PostParams::default(), &pool).await?;
            pools.patch_status(name, &params, &patch).await?;
        }
        done => drop(done?),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_large_groups_fits_into_an_object() {
        let group = |members: usize| OrphanSnapshot {
            id: "group".to_owned(),
            name: "group".to_owned(),
            sources: vec!["vol".to_owned(); members],
            members: vec!["snap".to_owned(); members],
            group: true,
        };
        assert_eq!(within_a_report(vec![group(1000); 6]).len(), 5);
        assert_eq!(within_a_report(vec![group(9000); 2]).len(), 1);
        assert_eq!(within_a_report(vec![group(1); 100]).len(), 100);
        assert!(within_a_report(Vec::new()).is_empty());
    }

    #[test]
    fn every_orphan_is_named_in_some_turn() {
        let all: Vec<usize> = (0..250).collect();
        let named: HashSet<usize> = (0..5).flat_map(|turn| some(all.clone(), turn)).collect();
        assert_eq!(named.len(), 250);
        assert!((0..5).all(|turn| some(all.clone(), turn).len() == MOST_NAMED));
        assert_eq!(some(vec![1, 2], 7), [1, 2]);
    }
}
