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
use crate::api::{MOST_NAMED, Pool, Snapshot, bytes};
use crate::engine::Result;

/// How long a node names the same orphans: a minute, and as long again for a late report.
const TURN: Duration = Duration::from_secs(120);
/// The most turns that are waited for: a node may report a wrong count.
const MOST_TURNS: u32 = 200;

/// The snapshots that were looked for in vain, and the reports of the nodes that name only some of
/// their orphans.
#[derive(Debug, Default)]
pub(super) struct Sought {
    snapshots: HashMap<String, Search>,
    /// Those that their node has deleted since their last call, and when their object went.
    gone: HashMap<String, Instant>,
    reports: HashMap<String, Reports>,
}

/// A snapshot that is looked for.
#[derive(Debug)]
struct Search {
    since: Instant,
    /// The last call.
    last: Instant,
    /// The order to delete it, if it was named between two calls.
    order: Option<Snapshot>,
}

/// The reports of a node that came without a long pause.
#[derive(Debug)]
struct Reports {
    version: Option<String>,
    since: Instant,
    last: Instant,
}

impl Sought {
    /// Notes what nodes report now: remembers the orders for the snapshots that they name.
    pub(super) fn note<P: Borrow<Pool>>(
        &mut self,
        named: impl Fn(&str) -> Option<Snapshot>,
        pools: &[P],
        now: Instant,
    ) {
        self.note_reports(pools, now);
        // Of one that is deleted no more, or elsewhere, no call comes.
        let is_asked_for = |one: &Search| now < one.last + TURN * MOST_TURNS;
        self.gone.retain(|_, at| now < *at + TURN * MOST_TURNS);
        self.snapshots.retain(|_, one| is_asked_for(one));
        for (id, one) in &mut self.snapshots {
            if let Some(named) = named(id) {
                one.order = Some(named);
            }
        }
    }

    /// The object of a snapshot or a group went, since its node has deleted the data. The next call
    /// has nothing to look for.
    pub(super) fn note_gone(&mut self, id: &str, now: Instant) {
        self.gone.insert(id.to_owned(), now);
    }

    /// It may be taken again.
    pub(super) fn note_taken(&mut self, id: &str) {
        self.gone.remove(id);
    }

    /// A report of a node that names some of its orphans names others than the one before. So it
    /// is another version of the `Pool`.
    fn note_reports<P: Borrow<Pool>>(&mut self, pools: &[P], now: Instant) {
        let mut before = std::mem::take(&mut self.reports);
        for pool in pools.iter().map(Borrow::borrow) {
            if to_name_all(pool).is_zero() {
                continue;
            }
            let (name, version) = (pool.name_any(), pool.resource_version());
            let mut reports = before.remove(&name).unwrap_or_else(|| Reports {
                version: version.clone(),
                since: now,
                last: now,
            });
            if reports.version != version {
                if now > reports.last + TURN {
                    reports.since = now;
                }
                (reports.version, reports.last) = (version, now);
            }
            self.reports.insert(name, reports);
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
        self.note_reports(pools, now);
        if named.is_none() && self.gone.contains_key(id) {
            return Ok(None);
        }
        let one = self.snapshots.entry(id.to_owned());
        let one = one.or_insert(Search {
            since: now,
            last: now,
            order: None,
        });
        one.last = now;
        let (since, order) = (one.since, named.or(one.order.take()));
        // A node that is cut off names none, however long that takes.
        let has_named_all = |pool: &Pool| {
            let reports = self.reports.get(&pool.name_any());
            reports.is_none_or(|it| since.max(it.since) + to_name_all(pool) <= it.last)
        };
        let unknown = pools.iter().find(|pool| !has_named_all(pool));
        if let (None, Some(pool)) = (&order, unknown) {
            let message = format!(
                "node {} has more orphans than its Pool names at a time; snapshot {id} may be one \
                 of them; try again",
                pool.name_any()
            );
            return Err(refusal(Code::Unavailable, message));
        }
        self.snapshots.remove(id);
        Ok(order)
    }
}

/// How long a node takes until it has named all of its snapshots; zero: it names all at once.
fn to_name_all(pool: &Pool) -> Duration {
    let Some(status) = &pool.status else {
        return Duration::ZERO;
    };
    let orphans = &status.orphans;
    let named = orphans.snapshots.len() as u64;
    // The count is that of volumes and snapshots.
    let most = bytes(orphans.count).saturating_sub(orphans.volumes.len() as u64);
    if named < MOST_NAMED as u64 || most <= named {
        return Duration::ZERO;
    }
    let turns = u32::try_from(most / named + 1);
    TURN * turns.map_or(MOST_TURNS, |turns| turns.min(MOST_TURNS))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::api::{
        Mutable, OrphanSnapshot, OrphanVolume, Orphans, Parameters, PoolSpec, PoolStatus,
        SnapshotSpec, Wanted,
    };
    use crate::server::code_of;

    /// A node that has so many orphans, and names as many snapshots as fit.
    pub(in crate::k8s::claims) fn pool(count: i64) -> Pool {
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
                snapshots: (0..MOST_NAMED).map(|it| orphan(&it.to_string())).collect(),
                ..Orphans::default()
            },
            ..PoolStatus::default()
        });
        pool
    }

    fn order() -> Snapshot {
        let spec = SnapshotSpec {
            name: "c".to_owned(),
            node_name: "node-1".to_owned(),
            sources: Vec::new(),
            group: false,
            wanted: Wanted::Absent,
        };
        Snapshot::new("c", spec)
    }

    /// The node reports each minute, up to this one.
    fn reports(
        sought: &mut Sought,
        began: Instant,
        minutes: std::ops::RangeInclusive<u32>,
    ) -> Pool {
        let mut pool = pool(200);
        for minute in minutes {
            pool.metadata.resource_version = Some(minute.to_string());
            let now = began + TURN / 2 * minute;
            sought.note(|_| None, std::slice::from_ref(&pool), now);
        }
        pool
    }

    #[test]
    fn a_snapshot_is_gone_when_all_orphans_were_named_since_it_is_looked_for() {
        let (mut sought, began) = (Sought::default(), Instant::now());
        let order = Some(order());
        let (all, some) = ([pool(100)], [pool(200)]);
        let found = sought.find("c", None, &all, began);
        assert_eq!(found.expect("all are named"), None);
        let found = sought.find("c", order.clone(), &some, began);
        assert_eq!(found.expect("it is named"), order);
        // Some are named, and never this one.
        let early = sought.find("c", None, &some, began);
        let early = early.expect_err("it may be one of the others");
        assert_eq!(code_of(&early), Code::Unavailable);
        let last = reports(&mut sought, began, 1..=6);
        let found = sought.find("c", None, &[last], began + 3 * TURN);
        assert_eq!(found.expect("all were named"), None);
        // It is named between two calls.
        assert!(sought.find("c", None, &some, began).is_err());
        sought.note(|id| order.clone().filter(|_| id == "c"), &some, began);
        sought.note(|_| None, &some, began);
        let found = sought.find("c", None, &some, began);
        assert_eq!(found.expect("it was named"), order);
    }

    #[test]
    fn a_node_that_is_cut_off_names_nothing_however_long_that_is() {
        let (mut sought, began) = (Sought::default(), Instant::now());
        let stale = reports(&mut sought, began, 0..=0);
        let stale = [stale];
        for later in [0, 3, 50] {
            let unknown = sought.find("c", None, &stale, began + later * TURN);
            assert_eq!(code_of(&unknown.expect_err("unknown")), Code::Unavailable);
        }
        // It is back, and begins again.
        let back = reports(&mut sought, began, 101..=101);
        let unknown = sought.find("c", None, &[back], began + 51 * TURN);
        assert_eq!(code_of(&unknown.expect_err("unknown")), Code::Unavailable);
        let last = reports(&mut sought, began, 102..=107);
        let found = sought.find("c", None, &[last], began + 54 * TURN);
        assert_eq!(found.expect("all were named"), None);
    }

    #[test]
    fn volumes_do_not_count_among_the_snapshots_that_are_named() {
        let mut pool = pool(30_200);
        assert_eq!(to_name_all(&pool), TURN * MOST_TURNS);
        let status = pool.status.as_mut().expect("a status");
        let volume = OrphanVolume {
            id: "v".to_owned(),
            name: "v".to_owned(),
            parameters: Parameters::default(),
            made_with: Mutable::default(),
            source: None,
            capacity: 0,
            mutable: Mutable::default(),
        };
        status.orphans.volumes = vec![volume; 30_000];
        assert_eq!(to_name_all(&pool), TURN * 3);
        let status = pool.status.as_mut().expect("a status");
        // More volumes than it names may be all of the others.
        status.orphans.volumes.truncate(MOST_NAMED);
        status.orphans.snapshots.pop();
        assert!(to_name_all(&pool).is_zero());
    }

    #[test]
    fn a_snapshot_whose_object_went_with_its_data_is_not_looked_for() {
        let (mut sought, began) = (Sought::default(), Instant::now());
        let (some, order) = ([pool(200)], Some(order()));
        sought.note_gone("c", began);
        for _retry in 0..2 {
            let found = sought.find("c", None, &some, began);
            assert_eq!(found.expect("it is gone"), None);
        }
        // An older etcd was put back, and its node has it.
        let found = sought.find("c", order.clone(), &some, began);
        assert_eq!(found.expect("it is named"), order);
        sought.note_taken("c");
        assert!(sought.find("c", None, &some, began).is_err());
        sought.note_gone("c", began);
        sought.note(|_| None, &some, began + TURN * MOST_TURNS);
        assert!(sought.find("c", None, &some, began).is_err());
    }

    #[test]
    fn a_snapshot_that_is_looked_for_no_more_is_forgotten() {
        let (mut sought, began) = (Sought::default(), Instant::now());
        let some = [pool(200)];
        assert!(sought.find("c", None, &some, began).is_err());
        let longest = TURN * MOST_TURNS;
        let find = |sought: &mut Sought, now| sought.find("c", None, &some, now).is_err();
        sought.note(|_| None, &some, began + longest / 2);
        assert!(find(&mut sought, began + longest / 2));
        sought.note(|_| Some(order()), &some, began + longest);
        assert_eq!(sought.snapshots.len(), 1);
        sought.note(|_| Some(order()), &some, began + longest / 2 * 3);
        assert_eq!(sought.snapshots.len(), 0);
    }
}
