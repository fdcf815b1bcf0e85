//! What namespaces use on the nodes, and what the nodes must evict for the limits of a namespace.
//! `model::Limits` decides.
//!
//! A node counts from the end of its account on. A node without a stream counts as long as its
//! entries do; then nothing on the other nodes goes for content that no pod can get.

use std::collections::BTreeMap;

use crate::model::{Coverage, CutOff, Limits, NamespaceUsage, Tenant, Timestamp};

use super::entry::{Session, SessionId};
use super::state::Catalog;

/// The most namespaces of one node that are kept.
pub const MOST_NAMESPACES: usize = 10_000;

/// A namespace and its limits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Within {
    /// Bytes on all nodes.
    pub bytes: u64,
    /// Artifacts on all nodes; a copy counts.
    pub artifacts: u64,
    /// What the nodes must evict.
    pub cut_off: CutOff,
    /// The streams of the nodes that may have such content.
    pub sessions: Vec<SessionId>,
}

impl Session {
    /// What it has reported, if that is all.
    fn account(&self, namespace: &Tenant) -> Option<&NamespaceUsage> {
        let is_complete = self.account_since.is_none();
        self.usage.get(namespace).filter(|_| is_complete)
    }
}

impl Catalog {
    /// A node has reported what a namespace uses there. Without artifacts, it uses nothing.
    /// `false`: the node has too many namespaces.
    pub fn used(&mut self, id: SessionId, namespace: Tenant, usage: NamespaceUsage) -> bool {
        let Some(session) = self.sessions.get_mut(&id) else {
            return true;
        };
        if usage.artifacts == 0 {
            session.usage.remove(&namespace);
        } else {
            session.usage.insert(namespace, usage);
        }
        session.usage.len() <= MOST_NAMESPACES
    }

    /// What a namespace uses on all nodes, and what they must evict for its limits. `time` is the
    /// cluster's time.
    #[must_use]
    pub fn within(&self, namespace: &Tenant, limits: &Limits, time: Timestamp) -> Within {
        let accounts = self.sessions.iter();
        let accounts: Vec<(SessionId, &Session, &NamespaceUsage)> = accounts
            .filter_map(|(id, session)| Some((*id, session, session.account(namespace)?)))
            .collect();
        let usage = || accounts.iter().map(|(_, _, usage)| *usage);
        let cut_off = limits.cut_off(usage(), time);
        let concerned = accounts
            .iter()
            .filter(|(_, session, usage)| session.lost.is_none() && usage.is_concerned(&cut_off));
        Within {
            bytes: usage().fold(0, |sum, it| sum.saturating_add(it.bytes)),
            artifacts: usage().fold(0, |sum, it| sum.saturating_add(it.artifacts)),
            sessions: concerned.map(|(id, ..)| *id).collect(),
            cut_off,
        }
    }

    /// The stamp of the oldest name of each namespace that has names. A node that has not applied
    /// the last fence of the whole namespace says nothing of it: those names are about to go.
    #[must_use]
    pub fn oldest(&self) -> BTreeMap<Tenant, Timestamp> {
        let mut cleared: BTreeMap<&Tenant, u64> = BTreeMap::new();
        for fence in self.fences.all() {
            if let Coverage::Namespace(tenant) = &fence.covers {
                let last = cleared.entry(tenant).or_default();
                *last = fence.number.max(*last);
            }
        }
        let mut oldest: BTreeMap<Tenant, Timestamp> = BTreeMap::new();
        let complete = self.sessions.values();
        let complete = complete.filter(|session| session.account_since.is_none());
        for (namespace, usage) in complete.flat_map(|session| &session.usage) {
            let is_cleared = cleared.get(namespace).is_some_and(|it| *it > usage.fence);
            if usage.oldest == Timestamp(0) || is_cleared {
                continue;
            }
            match oldest.get_mut(namespace) {
                Some(known) => *known = usage.oldest.min(*known),
                None => drop(oldest.insert(namespace.clone(), usage.oldest)),
            }
        }
        oldest
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{Hello, KEEP, Report};
    use crate::model::{Bucket, Fence, Fences};

    const NOW: Timestamp = Timestamp(1_000_000);

    fn ci() -> Tenant {
        "ci".parse().expect("a label")
    }

    /// So many artifacts of 10 bytes, each last used at its number, all unused.
    fn usage(artifacts: u64) -> NamespaceUsage {
        let unused = (1..=artifacts).map(|number| Bucket {
            last_used_before: Timestamp(number + 1),
            bytes: 10,
            artifacts: 1,
        });
        NamespaceUsage {
            bytes: 10 * artifacts,
            artifacts,
            unused: unused.collect(),
            oldest: Timestamp(1),
            fence: 0,
        }
    }

    fn hello(catalog: &mut Catalog, node: &str, attempt: u64, now: Timestamp) -> SessionId {
        let hello = Hello {
            node,
            zone: "",
            attempt,
            fences: &Fences::default(),
        };
        catalog.hello(&hello, now).expect("a session")
    }

    fn complete(catalog: &mut Catalog, session: SessionId, now: Timestamp) {
        let report = Report {
            complete: true,
            ..Report::default()
        };
        catalog.report(session, &report, now, now);
    }

    fn attach(catalog: &mut Catalog, node: &str, attempt: u64, artifacts: u64) -> SessionId {
        let session = hello(catalog, node, attempt, NOW);
        assert!(catalog.used(session, ci(), usage(artifacts)));
        complete(catalog, session, NOW);
        session
    }

    fn limits(bytes: u64) -> Limits {
        Limits {
            bytes: Some(bytes),
            ..Limits::default()
        }
    }

    #[test]
    fn the_last_complete_account_of_each_node_counts_once() {
        let mut catalog = Catalog::new(Fences::default(), NOW);
        let one = attach(&mut catalog, "one", 1, 10);
        let two = attach(&mut catalog, "two", 1, 2);
        let within = catalog.within(&ci(), &limits(110), NOW);
        assert_eq!((within.bytes, within.artifacts), (120, 12));
        // Both have the oldest content.
        assert_eq!(within.cut_off.unused_before, Timestamp(2));
        assert_eq!(within.sessions, [one, two]);
        assert!(!within.cut_off.over_budget);
        let within = catalog.within(&ci(), &limits(120), NOW);
        assert_eq!((within.cut_off, within.sessions), Default::default());

        let again = hello(&mut catalog, "one", 2, NOW);
        catalog.used(again, ci(), usage(1));
        let bytes = |catalog: &Catalog| catalog.within(&ci(), &limits(0), NOW).bytes;
        assert_eq!(bytes(&catalog), 120);
        complete(&mut catalog, again, NOW);
        assert_eq!(bytes(&catalog), 30);
        catalog.used(again, ci(), NamespaceUsage::default());
        assert_eq!(bytes(&catalog), 20);

        // Without a stream it counts for a while, and gets no orders.
        catalog.lost(two, NOW);
        let within = catalog.within(&ci(), &limits(0), NOW);
        assert_eq!((within.bytes, within.sessions), (20, Vec::new()));
        catalog.tick(NOW.after(KEEP).after(std::time::Duration::from_millis(1)));
        assert_eq!(bytes(&catalog), 0);
        assert!(catalog.used(two, ci(), usage(1)), "a late report");
        assert_eq!(bytes(&catalog), 0);
    }

    #[test]
    fn names_that_a_fence_is_about_to_clear_have_no_age() {
        let mut catalog = Catalog::new(Fences::default(), NOW);
        let one = attach(&mut catalog, "one", 1, 1);
        let two = attach(&mut catalog, "two", 1, 1);
        let oldest = |catalog: &Catalog| catalog.oldest().get(&ci()).copied();
        let report = |catalog: &mut Catalog, session, stamp, fence| {
            let usage = NamespaceUsage {
                oldest: Timestamp(stamp),
                fence,
                ..usage(1)
            };
            catalog.used(session, ci(), usage);
        };
        report(&mut catalog, two, 7, 0);
        assert_eq!(oldest(&catalog), Some(Timestamp(1)));
        catalog.fence(Fence {
            number: 5,
            previous: 0,
            id: 1,
            covers: Coverage::Namespace(ci()),
            repeats: Vec::new(),
        });
        assert_eq!(oldest(&catalog), None);
        report(&mut catalog, one, 9, 5);
        assert_eq!(oldest(&catalog), Some(Timestamp(9)));
        report(&mut catalog, one, 0, 5);
        report(&mut catalog, two, 8, 6);
        assert_eq!(oldest(&catalog), Some(Timestamp(8)));
    }

    #[test]
    fn a_node_has_a_limited_number_of_namespaces() {
        let mut catalog = Catalog::new(Fences::default(), NOW);
        let session = hello(&mut catalog, "one", 1, NOW);
        for number in 0..MOST_NAMESPACES {
            let namespace = format!("ci-{number}").parse().expect("a label");
            assert!(catalog.used(session, namespace, usage(1)));
        }
        assert!(!catalog.used(session, ci(), usage(1)));
    }
}
