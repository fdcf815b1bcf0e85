//! Budgets and times to live of whole namespaces: what each namespace uses on this node, and
//! eviction by the controller's orders. `model::CutOff` decides what goes, `reap` when.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use super::artifacts::Sealed;
use super::error::Result;
use super::remove::remove;
use super::shared::Inner;
use super::state::State;
use crate::model::{
    Artifact, ArtifactId, Evictable, LayerId, Limit, NamespaceUsage, NodeId, Tenant, Timestamp,
    Unused, buckets,
};

/// What each namespace uses. One pass over all artifacts, which releases the state now and then: a
/// fork that is made meanwhile may count as unused. Eviction looks again.
pub(super) fn usage(inner: &Inner) -> BTreeMap<Tenant, NamespaceUsage> {
    let (fence, in_use) = {
        let state = inner.state.lock();
        (state.fences.newest(), state.artifacts_in_use())
    };
    let node = inner.config.node.as_ref();
    let mut tenants: HashMap<Tenant, Counted> = HashMap::new();
    inner.look_at_artifacts(|state, sealed| {
        let artifact = &sealed.artifact;
        let is_used = in_use.contains(&artifact.id);
        // Garbage goes with the next round.
        if !sealed.durable || (!is_used && state.catalog.is_superseded(artifact)) {
            return;
        }
        if !tenants.contains_key(&artifact.tenant) {
            tenants.insert(artifact.tenant.clone(), Counted::default());
        }
        if let Some(counted) = tenants.get_mut(&artifact.tenant) {
            counted.add(state, artifact, is_used, node);
        }
    });
    let counted = tenants.into_iter();
    counted
        .map(|(tenant, counted)| (tenant, counted.told(fence)))
        .collect()
}

/// The last use of content. What is in use is used last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum LastUse {
    At(Timestamp, ArtifactId),
    Now,
}

/// What was counted of a namespace.
#[derive(Debug, Default)]
struct Counted {
    artifacts: u64,
    oldest: Option<Timestamp>,
    /// The unused artifacts, with the bytes that go with each.
    unused: BTreeMap<(Timestamp, ArtifactId), u64>,
    /// The size of each layer, and the last use of the artifacts that stack it. It goes with the
    /// last of them.
    layers: HashMap<LayerId, (u64, LastUse)>,
}

impl Counted {
    fn add(&mut self, state: &State, artifact: &Artifact, is_used: bool, node: Option<&NodeId>) {
        self.artifacts += 1;
        if state.catalog.is_named(artifact) {
            let began = Some(began(artifact, node));
            self.oldest = self.oldest.min(began).or(began);
        }
        let last_use = if is_used {
            LastUse::Now
        } else {
            self.unused.insert((artifact.last_used, artifact.id), 0);
            LastUse::At(artifact.last_used, artifact.id)
        };
        for layer in &artifact.layers {
            // One that is not measured yet counts later.
            let bytes = state.catalog.usage(layer).unwrap_or_default().bytes;
            let entry = self.layers.entry(*layer).or_insert((bytes, last_use));
            entry.1 = entry.1.max(last_use);
        }
    }

    fn told(mut self, fence: u64) -> NamespaceUsage {
        let mut all = 0_u64;
        for (bytes, last_use) in self.layers.into_values() {
            all = all.saturating_add(bytes);
            if let LastUse::At(time, artifact) = last_use
                && let Some(goes) = self.unused.get_mut(&(time, artifact))
            {
                *goes = goes.saturating_add(bytes);
            }
        }
        let unused = self.unused.into_iter();
        let unused = unused.map(|((last_used, _), bytes)| Unused { last_used, bytes });
        NamespaceUsage {
            bytes: all,
            artifacts: self.artifacts,
            unused: buckets(unused.collect()),
            oldest: self.oldest.unwrap_or_default(),
            fence,
        }
    }
}

/// Since when the namespace has this content: its stamp. Another cluster may have put content into
/// the shared tier, long before the namespace was made here. Then its last use counts.
fn began(artifact: &Artifact, node: Option<&NodeId>) -> Timestamp {
    let maker = artifact.made_by.as_ref().and_then(|it| it.node.as_ref());
    if artifact.sharing.number.is_some() && (maker.is_none() || maker != node) {
        artifact.last_used
    } else {
        artifact.created
    }
}

/// Evicts what the controller's orders name: a step of a round. Returns how many artifacts went. An
/// order that fails is not kept: the controller repeats it.
pub(super) fn cut_off(inner: &Arc<Inner>) -> Result<usize> {
    let orders = inner.collector.take_cut_offs();
    if orders.is_empty() {
        return Ok(0);
    }
    let in_use = inner.state.lock().artifacts_in_use();
    let (mut expired, mut beyond) = (Vec::new(), Vec::new());
    inner.look_at_artifacts(|_, sealed| {
        let order = orders.get(&sealed.artifact.tenant);
        match order.and_then(|order| order.evicts(&evictable(sealed, &in_use))) {
            Some(Limit::Ttl) => expired.push(sealed.artifact.id),
            Some(Limit::Budget) => beyond.push(sealed.artifact.id),
            None => {}
        }
    });
    let mut all = 0;
    for (ids, limit) in [(expired, Limit::Ttl), (beyond, Limit::Budget)] {
        if ids.is_empty() {
            continue;
        }
        let removed = remove(inner, &ids)?;
        inner
            .counters()
            .evicted(Some(limit), removed.artifacts, removed.bytes);
        all += removed.artifacts;
    }
    Ok(all)
}

/// Content that is not durable yet is about to be: it stays.
fn evictable(sealed: &Sealed, in_use: &HashSet<ArtifactId>) -> Evictable {
    let artifact = &sealed.artifact;
    Evictable {
        cache: artifact.reference.cache().map(|(kind, _)| kind),
        in_use: !sealed.durable || in_use.contains(&artifact.id),
        last_used: artifact.last_used,
        sealed: artifact.created,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::artifacts::tests::made;
    use crate::model::{Maker, Pod, Sharing};

    #[test]
    fn content_of_another_cluster_counts_from_its_last_use_here() {
        let here = NodeId::new("here").expect("a node");
        let made_on = |node: Option<&str>, number| {
            let pod = Pod {
                uid: "uid".parse().expect("a uid"),
                name: "pod".to_owned(),
                service_account: None,
            };
            let node = node.map(|node| NodeId::new(node).expect("a node"));
            Artifact {
                created: Timestamp(5),
                last_used: Timestamp(9),
                made_by: Some(Box::new(Maker::new(pod, Vec::new(), node))),
                sharing: Sharing {
                    number,
                    ..Sharing::default()
                },
                ..made(1, &[1])
            }
        };
        for (node, number, expected) in [
            (Some("here"), None, 5),
            (Some("here"), Some(1), 5),
            (Some("there"), None, 5),
            (Some("there"), Some(1), 9),
            (None, Some(1), 9),
        ] {
            let artifact = made_on(node, number);
            assert_eq!(began(&artifact, Some(&here)), Timestamp(expected));
        }
    }
}
