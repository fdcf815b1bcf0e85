//! The chain of `Fence` objects, as a list of the API server shows it: which can be read, which may
//! be deleted, and whether one has cleared a namespace. Also the error of the parts that read and
//! make them. No I/O: `clears` reads and makes the objects, and `births` reads what it compares.
//!
//! A Fence that cannot be read in its place of the chain stops the chain: no later fence can be
//! made, and nodes that miss one clear all they have. One outside of the chain was made by no
//! controller, and is left out. Both are told in the log and in a metric.
//!
//! The oldest fence is deleted after a week, when all nodes have applied it that have a Node object
//! and a `Pool` with a peer. Other nodes get no fences: such a node misses them, and drops its
//! content if it ever becomes a peer. The newest fence stays.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt as _;
use kube::api::DynamicObject;

use crate::api;
use crate::model::{Coverage, Fence, Tenant};

/// How long a fence stays at least.
const KEEP: Duration = Duration::from_hours(7 * 24);

/// Why the fences could not be read or made.
#[derive(Debug, thiserror::Error)]
pub(in crate::k8s) enum Error {
    #[error("{what}: {source}")]
    Api {
        what: &'static str,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("Fence {name} is malformed: {why}; delete it, and clear once more")]
    Malformed { name: String, why: String },
    #[error("another controller makes fences all the time")]
    Crowded,
    #[error("the API server's clock is not known: {0}")]
    Time(String),
    #[error("the shared tier: {0}")]
    Tier(#[from] crate::shared::Error),
    #[error("no thread for a request to the shared tier: {0}")]
    Thread(#[source] std::io::Error),
}

pub(in crate::k8s) fn failed(what: &'static str) -> impl FnOnce(kube::Error) -> Error {
    move |source| Error::Api {
        what,
        source: Box::new(source),
    }
}

/// The fences of the API server.
#[derive(Debug, Default)]
pub(super) struct Listed {
    /// Those that can be read, as objects.
    pub(super) objects: Vec<api::Fence>,
    /// What these say, by their numbers.
    pub(super) fences: Vec<Fence>,
    /// The others: their names, and why.
    pub(super) malformed: BTreeMap<String, String>,
}

impl Listed {
    pub(super) fn new(all: Vec<DynamicObject>) -> Self {
        let mut listed = Self::default();
        for object in all {
            let name = object.name_any();
            let object = object.try_parse::<api::Fence>();
            let read = object.map_err(|error| error.to_string());
            let read = read.and_then(|object| Ok((object.fence()?, object)));
            match read {
                Ok((fence, object)) => {
                    listed.fences.push(fence);
                    listed.objects.push(object);
                }
                Err(why) => drop(listed.malformed.insert(name, why)),
            }
        }
        listed.fences.sort_by_key(|fence| fence.number);
        listed
    }

    /// The number up to which the fences are deleted.
    pub(super) fn oldest(&self) -> u64 {
        let previous = self.fences.iter().map(|fence| fence.previous);
        previous.min().unwrap_or(0)
    }

    /// Fails if one cannot be read that has a place in the chain.
    pub(super) fn check(&self) -> Result<(), Error> {
        let mut malformed = self.malformed.iter();
        match malformed.find(|(name, _)| name.starts_with(api::fence::OF_CHAIN)) {
            Some((name, why)) => Err(Error::Malformed {
                name: name.clone(),
                why: why.clone(),
            }),
            None => Ok(()),
        }
    }
}

/// The oldest fence, if it may go: there is a later one, it is old enough, and all these nodes have
/// applied it.
pub(super) fn may_go<'a>(
    objects: &'a [api::Fence],
    applied: &BTreeMap<String, u64>,
    pools: &BTreeSet<String>,
    now: i64,
) -> Option<&'a api::Fence> {
    let oldest = objects.iter().min_by_key(|object| object.spec.number)?;
    let made = oldest.metadata.creation_timestamp.as_ref()?;
    let age = now.saturating_sub(made.0.as_second());
    let number = api::bytes(oldest.spec.number);
    let has_applied = |node: &String| applied.get(node).is_some_and(|it| *it >= number);
    let is_done = pools.iter().all(has_applied);
    let is_old = u64::try_from(age).is_ok_and(|age| age >= KEEP.as_secs());
    (objects.len() > 1 && is_old && is_done).then_some(oldest)
}

/// Whether another controller has cleared a namespace since the one of this name that is there now
/// was made. One that repeats others clears only on the nodes that lack those.
pub(super) fn is_cleared_since(objects: &[api::Fence], tenant: &Tenant, born: Timestamp) -> bool {
    let whole = Coverage::Namespace(tenant.clone());
    let later = objects.iter().filter(|object| {
        let made = object.metadata.creation_timestamp.as_ref();
        made.is_some_and(|made| made.0 > born)
    });
    let mut later = later.filter_map(|object| object.fence().ok());
    later.any(|fence| fence.covers == whole && fence.repeats.is_empty())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;

    const MADE: i64 = 1_795_400_000;
    const WEEK: i64 = 7 * 24 * 3600;

    fn object(number: u64, previous: u64) -> api::Fence {
        let fence = Fence {
            number,
            previous,
            id: number,
            covers: Coverage::Namespace("ci".parse().expect("a label")),
            repeats: Vec::new(),
        };
        let mut object = api::Fence::from(&fence);
        let made = k8s_openapi::jiff::Timestamp::from_second(MADE).expect("a time");
        object.metadata.creation_timestamp = Some(Time(made));
        object
    }

    #[test]
    fn the_oldest_fence_goes_when_it_is_old_and_all_nodes_have_applied_it() {
        let two = [object(9, 5), object(5, 2)];
        let applied = |one, two| {
            let nodes = [("one", one), ("two", two)];
            BTreeMap::from(nodes.map(|(node, number)| (node.to_owned(), number)))
        };
        let pools = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        let both: BTreeSet<String> = pools(&["one", "two"]);
        let goes = |objects: &[api::Fence], applied: &BTreeMap<_, _>, pools: &_, age| {
            let oldest = may_go(objects, applied, pools, MADE + age);
            oldest.map(|object| object.spec.number)
        };
        assert_eq!(goes(&two, &applied(5, 9), &both, WEEK), Some(5));
        assert_eq!(goes(&two, &applied(5, 9), &both, WEEK - 1), None);
        assert_eq!(goes(&two, &applied(4, 9), &both, WEEK), None);
        let away = pools(&["one", "two", "away"]);
        assert_eq!(goes(&two, &applied(9, 9), &away, WEEK), None);
        // The newest one stays: without it, no node could know that it missed something.
        assert_eq!(goes(&two[..1], &applied(9, 9), &both, 9 * WEEK), None);
        assert_eq!(goes(&[], &applied(9, 9), &both, WEEK), None);
    }

    #[test]
    fn a_fence_after_the_birth_of_a_namespace_has_cleared_the_one_before() {
        let (fence, born) = (object(9, 5), |age| {
            Timestamp::from_second(MADE - age).expect("a time")
        });
        let ci: Tenant = "ci".parse().expect("a label");
        let of = std::slice::from_ref(&fence);
        assert!(is_cleared_since(of, &ci, born(1)));
        // It may have been made before the namespace.
        assert!(!is_cleared_since(of, &ci, born(0)));
        let other = "other".parse().expect("a label");
        assert!(!is_cleared_since(of, &other, born(1)));
        let mut repeats = fence.clone();
        repeats.spec.repeats = vec!["0000000000000005".to_owned()];
        assert!(!is_cleared_since(&[repeats], &ci, born(1)));
    }

    #[test]
    fn the_chain_is_read_in_its_order_and_ends_where_an_object_of_it_is_wrong() {
        let read = |objects: &[api::Fence]| {
            let dynamic = |object: &api::Fence| {
                let object = serde_json::to_value(object).expect("JSON");
                serde_json::from_value(object).expect("an object")
            };
            Listed::new(objects.iter().map(dynamic).collect())
        };
        let listed = read(&[object(9, 5), object(5, 2)]);
        let numbers: Vec<u64> = listed.fences.iter().map(|fence| fence.number).collect();
        assert_eq!((listed.oldest(), &numbers[..]), (2, &[5, 9][..]));
        assert_eq!(read(&[]).oldest(), 0);
        let mut wrong = object(9, 5);
        wrong.spec.id = "x".to_owned();
        let gap = read(&[object(5, 2), wrong.clone()]);
        assert!(matches!(gap.check(), Err(Error::Malformed { .. })));
        assert_eq!(gap.malformed.len(), 1);
        // By hand: no controller gives such a name, and no fence follows it.
        wrong.metadata.name = Some("clear-all".to_owned());
        let by_hand = read(&[object(5, 2), wrong]);
        assert!(by_hand.check().is_ok());
        assert_eq!((by_hand.fences.len(), by_hand.malformed.len()), (1, 1));
        // Of a later version.
        let mut later = serde_json::to_value(object(9, 5)).expect("JSON");
        later["spec"]["kind"] = "Later".into();
        let later = serde_json::from_value(later).expect("an object");
        assert!(Listed::new(vec![later]).check().is_err());
    }
}
