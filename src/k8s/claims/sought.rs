//! Snapshots that DeleteSnapshot looks for among the orphans. A node names its orphans in turn, if
//! it has many. So a snapshot is gone only when each node has named all of its orphans since the
//! first call. Pure: no I/O, no clock.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::time::Duration;

use kube::ResourceExt as _;
use tokio::time::Instant;
use tonic::Code;

use super::decide::refusal;
use super::orphans::{orphan_snapshots, snapshot_order};
use crate::api::{Pool, Snapshot, Wanted, bytes};
use crate::engine::Result;

/// How long a node names the same orphans: a minute, and as long again for a late report.
const TURN: Duration = Duration::from_secs(120);
/// The most turns that are waited for: a node may report a wrong count.
const MOST_TURNS: u32 = 100;

/// The snapshots that were looked for in vain: since when, and the order to delete one that was
/// named meanwhile.
#[derive(Debug, Default)]
pub(super) struct Sought(HashMap<String, (Instant, Option<Snapshot>)>);

impl Sought {
    /// Remembers those that are named now.
    pub(super) fn note(&mut self, pools: &[impl Borrow<Pool>]) {
        for (id, (_, order)) in &mut self.0 {
            if let Some(named) = named(id, pools) {
                *order = Some(named);
            }
        }
    }

    /// The order to delete a snapshot or a group. `None`: no node has it.
    pub(super) fn find(
        &mut self,
        id: &str,
        pools: &[impl Borrow<Pool>],
        now: Instant,
    ) -> Result<Option<Snapshot>> {
        let (since, order) = self.0.entry(id.to_owned()).or_insert((now, None));
        let order = named(id, pools).or(order.take());
        let mut pools = pools.iter().map(|pool| -> &Pool { pool.borrow() });
        let unknown = pools.find(|pool| now < *since + to_name_all(pool));
        if let (None, Some(pool)) = (&order, unknown) {
            let message = format!(
                "node {} has more orphans than its Pool names at a time; snapshot {id} may be one \
                 of them; try again",
                pool.name_any()
            );
            return Err(refusal(Code::Unavailable, message));
        }
        self.0.remove(id);
        Ok(order)
    }
}

fn named(id: &str, pools: &[impl Borrow<Pool>]) -> Option<Snapshot> {
    pools.iter().find_map(|pool| {
        let pool: &Pool = pool.borrow();
        let orphan = orphan_snapshots(pool).iter().find(|one| one.id == id)?;
        snapshot_order(&pool.name_any(), orphan, Wanted::Absent)
    })
}

/// How long a node takes until it has named all of its orphans; zero: it names all at once.
fn to_name_all(pool: &Pool) -> Duration {
    let Some(status) = &pool.status else {
        return Duration::ZERO;
    };
    let orphans = &status.orphans;
    let named = (orphans.volumes.len() + orphans.snapshots.len()) as u64;
    let count = bytes(orphans.count);
    if count <= named {
        return Duration::ZERO;
    }
    let turns = u32::try_from(count / named.max(1) + 1);
    TURN * turns.map_or(MOST_TURNS, |turns| turns.min(MOST_TURNS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{OrphanSnapshot, Orphans, PoolSpec, PoolStatus};
    use crate::engine::claims::snapshot_id;
    use crate::server::code_of;

    /// A node that has so many orphans, and names some.
    fn pool(count: i64, names: &[&str]) -> Pool {
        let orphan = |name: &&str| OrphanSnapshot {
            id: snapshot_id(name).to_string(),
            name: (*name).to_owned(),
            sources: Vec::new(),
            members: Vec::new(),
            group: false,
        };
        let mut pool = Pool::new("node-1", PoolSpec {});
        pool.status = Some(PoolStatus {
            orphans: Orphans {
                count,
                snapshots: names.iter().map(orphan).collect(),
                ..Orphans::default()
            },
            ..PoolStatus::default()
        });
        pool
    }

    #[test]
    fn a_snapshot_is_gone_when_all_orphans_were_named_since_it_is_looked_for() {
        let (mut sought, began) = (Sought::default(), Instant::now());
        let id = snapshot_id("c").to_string();
        // All are named.
        let found = sought.find(&id, &[pool(1, &["a"])], began);
        assert_eq!(found.expect("known"), None);
        let found = sought.find(&id, &[pool(1, &["c"])], began);
        assert!(found.expect("known").is_some());
        // Some are named, and never this one.
        let some = [pool(4, &["a", "b"])];
        let early = sought.find(&id, &some, began).expect_err("not known");
        assert_eq!(code_of(&early), Code::Unavailable);
        let found = sought.find(&id, &some, began + 3 * TURN);
        assert_eq!(found.expect("known"), None);
        // It is named between two calls.
        assert!(sought.find(&id, &some, began).is_err());
        sought.note(&[pool(4, &["c", "d"])]);
        sought.note(&some);
        let order = sought.find(&id, &some, began).expect("known");
        let order = order.expect("it was named");
        assert_eq!((order.name_any(), order.spec.wanted), (id, Wanted::Absent));
    }
}
