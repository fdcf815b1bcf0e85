//! Snapshots that DeleteSnapshot looks for among the orphans. A node names its orphans in turn, if
//! it has many. So a snapshot is gone only when each node has named all of its orphans since the
//! first call. Pure: no I/O, no clock.

use std::collections::HashMap;
use std::time::Duration;

use kube::ResourceExt as _;
use tokio::time::Instant;
use tonic::Code;

use super::decide::refusal;
use crate::api::{Pool, Snapshot, bytes};
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
    /// Remembers the orders for those that are named now.
    pub(super) fn note(&mut self, named: impl Fn(&str) -> Option<Snapshot>) {
        for (id, (_, order)) in &mut self.0 {
            if let Some(named) = named(id) {
                *order = Some(named);
            }
        }
    }

    /// The order to delete a snapshot or a group, given the one for what `pools` name. `None`: no
    /// node has it.
    pub(super) fn find(
        &mut self,
        id: &str,
        named: Option<Snapshot>,
        pools: &[Pool],
        now: Instant,
    ) -> Result<Option<Snapshot>> {
        let (since, order) = self.0.entry(id.to_owned()).or_insert((now, None));
        let order = named.or(order.take());
        let mut pools = pools.iter();
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
    use crate::api::{OrphanSnapshot, Orphans, PoolSpec, PoolStatus, SnapshotSpec, Wanted};
    use crate::server::code_of;

    /// A node that has so many orphans, and names two.
    fn pool(count: i64) -> Pool {
        let orphan = |id: &str| OrphanSnapshot {
            id: id.to_owned(),
            name: id.to_owned(),
            sources: Vec::new(),
            members: Vec::new(),
            group: false,
        };
        let mut pool = Pool::new("node-1", PoolSpec {});
        pool.status = Some(PoolStatus {
            orphans: Orphans {
                count,
                snapshots: ["a", "b"].map(orphan).into(),
                ..Orphans::default()
            },
            ..PoolStatus::default()
        });
        pool
    }

    #[test]
    fn a_snapshot_is_gone_when_all_orphans_were_named_since_it_is_looked_for() {
        let (mut sought, began) = (Sought::default(), Instant::now());
        let spec = SnapshotSpec {
            name: "c".to_owned(),
            node_name: "node-1".to_owned(),
            sources: Vec::new(),
            group: false,
            wanted: Wanted::Absent,
        };
        let order = Some(Snapshot::new("c", spec));
        let (all, some) = ([pool(2)], [pool(4)]);
        let found = sought.find("c", None, &all, began);
        assert_eq!(found.expect("all are named"), None);
        let found = sought.find("c", order.clone(), &some, began);
        assert_eq!(found.expect("it is named"), order);
        // Some are named, and never this one.
        let early = sought.find("c", None, &some, began);
        let early = early.expect_err("it may be one of the others");
        assert_eq!(code_of(&early), Code::Unavailable);
        let found = sought.find("c", None, &some, began + 3 * TURN);
        assert_eq!(found.expect("all were named"), None);
        // It is named between two calls.
        assert!(sought.find("c", None, &some, began).is_err());
        sought.note(|id| order.clone().filter(|_| id == "c"));
        sought.note(|_| None);
        let found = sought.find("c", None, &some, began);
        assert_eq!(found.expect("it was named"), order);
    }
}
