//! Lists of claims and snapshots in pages, and how one claim is used.
//!
//! In the order of ids: a page goes on where the last one ended, whatever came or went meanwhile.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::path::PathBuf;

use super::lookup;
use super::types::{ClaimUse, Page, SnapshotFilter};
use crate::engine::error::Result;
use crate::engine::shared::Inner;
use crate::engine::state::State;
use crate::engine::target::{Found, Target};
use crate::model::{PersistentVolume, Snapshot, VolumeId};

pub(super) fn claims(
    state: &State,
    after: Option<&VolumeId>,
    most: usize,
) -> Page<PersistentVolume> {
    page(state.claims.entries(), after, most, |held| {
        Some(held.claim.clone())
    })
}

pub(super) fn snapshots(
    state: &State,
    filter: &SnapshotFilter,
    after: Option<&VolumeId>,
    most: usize,
) -> Page<Snapshot> {
    let wanted = |snapshot: &Snapshot| {
        let of = filter.source.as_ref();
        let is = filter.id.as_ref();
        let wanted = of.is_none_or(|source| snapshot.source.as_str() == source)
            && is.is_none_or(|id| snapshot.id.as_str() == id);
        wanted.then(|| snapshot.clone())
    };
    page(state.claims.snapshots(), after, most, wanted)
}

fn page<K, T>(
    all: &BTreeMap<VolumeId, K>,
    after: Option<&VolumeId>,
    most: usize,
    wanted: impl Fn(&K) -> Option<T>,
) -> Page<T> {
    let from = after.map_or(Bound::Unbounded, Bound::Excluded);
    let rows = all.range::<VolumeId, _>((from, Bound::Unbounded));
    let mut rows = rows.filter_map(|(id, row)| Some((id, wanted(row)?)));
    let (mut items, mut last) = (Vec::new(), None);
    for (id, item) in rows.by_ref().take(most) {
        items.push(item);
        last = Some(id);
    }
    let next = rows.next().and(last).cloned();
    Page { items, next }
}

/// Where a claim is in use, and what is wrong with it.
pub(super) fn claim_use(inner: &Inner, id: &VolumeId) -> Result<ClaimUse> {
    let (mounts, mut problems) = {
        let state = inner.state.lock();
        let held = lookup::known(&state, id)?;
        let problem = held.problem.iter().map(|problem| problem.why().to_owned());
        let mut problems: Vec<String> = problem.collect();
        problems.extend(held.damaged.then(|| lookup::DAMAGED.to_owned()));
        let unbounded = |why| format!("the volume's size limit is not enforced: {why}");
        problems.extend(held.limit_unenforced.as_ref().map(unbounded));
        (held.mounts.clone(), problems)
    };
    for (path, mount) in &mounts {
        let found = Target::open(path)?.map(|target| target.look()).transpose();
        if !matches!(found, Ok(Some(Found::Mount(point))) if point.id == mount.id) {
            problems.push(format!(
                "it was mounted at {}, and is no longer mounted there",
                path.display()
            ));
        }
    }
    let mut targets: Vec<PathBuf> = mounts.into_keys().collect();
    targets.sort();
    problems.sort();
    Ok(ClaimUse { targets, problems })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_go_on_where_the_last_one_ended() {
        let id = |number: usize| format!("vol-{number:03}").parse::<VolumeId>().expect("id");
        let mut all: BTreeMap<VolumeId, usize> =
            (0..10).map(|number| (id(number), number)).collect();
        let page = |all: &BTreeMap<VolumeId, usize>, after: Option<&VolumeId>, most| {
            super::page(all, after, most, |number| Some(*number))
        };
        let first = page(&all, None, 4);
        assert_eq!(first.items, [0, 1, 2, 3]);
        // The row that the token names is gone, and a new one is where we were already.
        all.remove(&id(3));
        all.insert("vol-0000".parse().expect("id"), 99);
        let second = page(&all, first.next.as_ref(), 4);
        assert_eq!(second.items, [4, 5, 6, 7]);
        let third = page(&all, second.next.as_ref(), 4);
        assert_eq!((third.items, third.next), (vec![8, 9], None));
        assert_eq!(page(&all, None, 11).next, None);
        assert_eq!(page(&all, None, 10).next, None);
        assert!(page(&BTreeMap::new(), None, 5).items.is_empty());
    }
}
