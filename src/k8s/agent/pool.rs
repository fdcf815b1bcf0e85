//! Publishes the node's `Pool`: what the controller chooses nodes by, and the claims that no object
//! names.

use std::time::Duration;

use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::reflector::Store;
use kube::{Api, Client};
use serde_json::json;

use super::{Error, names};
use crate::api::{Orphans, Pool, PoolSpec, PoolStatus, Snapshot, Volume, number};
use crate::engine::Engine;
use crate::engine::claims::SnapshotFilter;
use crate::model::Node;

/// How often the pool is looked at, and the least time between two writes.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// The same until the first report has arrived.
const SOON: Duration = Duration::from_secs(2);
/// The steps in which the free space is reported.
const STEPS: u64 = 16;
/// How many orphans are named.
const MOST_NAMED: usize = 100;

/// The objects that the watches have seen.
pub(super) struct Seen {
    pub(super) volumes: Store<Volume>,
    pub(super) snapshots: Store<Snapshot>,
}

/// Publishes the pool, at first and when it changes.
pub(super) async fn publish(client: Client, engine: Engine, node: Node, pool: String, seen: Seen) {
    let pools: Api<Pool> = Api::all(client);
    // Without both lists, every claim would look like an orphan.
    let _ = seen.volumes.wait_until_ready().await;
    let _ = seen.snapshots.wait_until_ready().await;
    let mut written: Option<PoolStatus> = None;
    loop {
        let next = async {
            let status = look(&engine, &node, &pool, &seen).await?;
            if written.as_ref() != Some(&status) {
                write(&pools, node.id.as_str(), &status).await?;
            }
            Ok::<_, Error>(status)
        };
        match next.await {
            Ok(status) => written = Some(status),
            Err(error) => tracing::warn!(%error, "the Pool of this node is not up to date"),
        }
        let pause = if written.is_some() { LOOK_AGAIN } else { SOON };
        tokio::time::sleep(pause).await;
    }
}

async fn look(engine: &Engine, node: &Node, pool: &str, seen: &Seen) -> Result<PoolStatus, Error> {
    let capacity = engine.capacity().await?;
    let claims = engine.claims(None, usize::MAX).items;
    let snapshots = engine.snapshots(&SnapshotFilter::default(), None, usize::MAX)?;
    // Read after the engine: the object comes first, and goes last.
    let (volumes, objects) = (names(&seen.volumes), names(&seen.snapshots));
    let lonely_claims = claims.iter().map(|claim| claim.id.as_str());
    let lonely_claims = lonely_claims.filter(|id| !volumes.contains(*id));
    let lonely_snapshots = snapshots.items.iter().filter(|snapshot| {
        let object = snapshot.group.as_ref().unwrap_or(&snapshot.id);
        !objects.contains(object.as_str())
    });
    let orphans: Vec<&str> = lonely_claims
        .chain(lonely_snapshots.map(|snapshot| snapshot.id.as_str()))
        .collect();
    let step = (capacity.largest / STEPS).max(1);
    Ok(PoolStatus {
        pool: pool.to_owned(),
        topology: node.topology.0.clone(),
        bytes: number(capacity.largest),
        available: number(capacity.available / step * step),
        volumes: i64::try_from(claims.len()).unwrap_or(i64::MAX),
        orphans: Orphans {
            count: i64::try_from(orphans.len()).unwrap_or(i64::MAX),
            ids: orphans
                .iter()
                .take(MOST_NAMED)
                .map(ToString::to_string)
                .collect(),
        },
    })
}

async fn write(pools: &Api<Pool>, name: &str, status: &PoolStatus) -> Result<(), Error> {
    let patch = Patch::Merge(json!({ "status": status }));
    let params = PatchParams::default();
    match pools.patch_status(name, &params, &patch).await {
        Err(kube::Error::Api(none)) if none.code == 404 => {
            let pool = Pool::new(name, PoolSpec {});
            pools.create(&PostParams::default(), &pool).await?;
            pools.patch_status(name, &params, &patch).await?;
        }
        done => drop(done?),
    }
    Ok(())
}
