//! Fences: orders to clear names on every node of a cluster, whenever a node learns of them.
//! What a fence covers, how fences form a chain, and what a node does with one. Pure.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::name::{CacheKind, Name, Tenant};
use super::time::Timestamp;

/// The names that a fence covers.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Coverage {
    /// All names of a namespace.
    Namespace(Tenant),
    /// One name.
    Name(Name),
    /// The caches of one kind whose key has this prefix.
    Prefix {
        /// The namespace.
        tenant: Tenant,
        /// The kind.
        kind: CacheKind,
        /// The first bytes of the key.
        prefix: Box<str>,
    },
}

impl Coverage {
    /// The namespace of all covered names.
    #[must_use]
    pub fn tenant(&self) -> &Tenant {
        match self {
            Self::Namespace(tenant) | Self::Prefix { tenant, .. } => tenant,
            Self::Name(name) => &name.tenant,
        }
    }

    /// Whether it covers this name.
    #[must_use]
    pub fn covers(&self, name: &Name) -> bool {
        if *self.tenant() != name.tenant {
            return false;
        }
        match self {
            Self::Namespace(_) => true,
            Self::Name(covered) => covered.reference == name.reference,
            Self::Prefix { kind, prefix, .. } => match name.reference.cache() {
                Some((of, key)) => of == *kind && key.as_str().starts_with(&**prefix),
                None => false,
            },
        }
    }
}

/// An order to clear names. Content of a covered name is cleared if its own number is lower: the
/// highest number that its maker's node had applied when its volume was published.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Fence {
    /// Its number. Later fences have higher numbers.
    pub number: u64,
    /// The number of its predecessor in the chain; 0: it is the first one.
    pub previous: u64,
    /// A random number. After an older etcd was put back, two fences may agree in all the rest.
    pub id: u64,
    /// The names.
    pub covers: Coverage,
    /// The ids of earlier fences that this one stands for, because some nodes cannot apply them
    /// ([`Fences::owed_to`]).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repeats: Vec<u64>,
}

/// An order to clear, before it is a fence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Clear {
    /// The names.
    pub covers: Coverage,
    /// The ids of the fences that it repeats. Empty: a user's order.
    pub repeats: Vec<u64>,
}

impl From<Coverage> for Clear {
    fn from(covers: Coverage) -> Self {
        Self {
            covers,
            repeats: Vec::new(),
        }
    }
}

impl Clear {
    /// Adds an order, to one for the same names if there is one. For few orders.
    pub fn add_to(self, orders: &mut Vec<Self>) {
        match orders.iter_mut().find(|order| order.covers == self.covers) {
            Some(order) => {
                let new = self.repeats.into_iter();
                let new: Vec<u64> = new.filter(|id| !order.repeats.contains(id)).collect();
                order.repeats.extend(new);
            }
            None => orders.push(self),
        }
    }
}

impl Fence {
    /// The name of its object. The API server accepts a name once, so a fence has at most one
    /// successor, and two controllers build one chain.
    #[must_use]
    pub fn object_name(&self) -> String {
        format!("after-{:020}", self.previous)
    }

    /// Whether a node clears a name or a volume when it takes this step. `number` is the content's.
    #[must_use]
    pub fn clears(&self, step: FenceStep, name: &Name, number: u64) -> bool {
        match step {
            FenceStep::Missed => true,
            FenceStep::Apply => number < self.number && self.covers.covers(name),
            FenceStep::Known | FenceStep::Rejoin => false,
        }
    }
}

/// What a node does with a fence that it receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FenceStep {
    /// Nothing: it was applied.
    Known,
    /// In one transaction, drop covered names, mark covered volumes as not to be committed, and
    /// store the fence.
    Apply,
    /// The same with all names and all volumes: fences before this one are lost to this node.
    Missed,
    /// Open the stream again. The chain was set back, and the controller must see this node's
    /// fences.
    Rejoin,
}

/// The fences that a node has applied, or that a controller knows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fences {
    /// Fences up to this number were deleted, because all nodes had applied them.
    forgotten: u64,
    newest: u64,
    /// The number of the last fence before which some were missed.
    missed: u64,
    /// The node has nothing from before: its pool was just made.
    is_new: bool,
    by_tenant: BTreeMap<Tenant, Vec<Fence>>,
}

impl Fences {
    /// Those of a pool that was just made. It misses nothing: fences that are forgotten by now were
    /// applied by all nodes whose content it can get.
    #[must_use]
    pub fn of_new_pool() -> Self {
        Self {
            is_new: true,
            ..Self::default()
        }
    }

    /// The highest number, 0 if there never was one. A node publishes volumes with this number.
    #[must_use]
    pub fn newest(&self) -> u64 {
        self.newest
    }

    /// All of them, in no special order.
    pub fn all(&self) -> impl Iterator<Item = &Fence> {
        self.by_tenant.values().flatten()
    }

    /// The namespaces with a fence.
    pub fn tenants(&self) -> impl Iterator<Item = &Tenant> {
        self.by_tenant.keys()
    }

    /// The highest number that covers this name. Content with a lower number must not be used.
    #[must_use]
    pub fn covering(&self, name: &Name) -> u64 {
        let fences = self.by_tenant.get(&name.tenant).into_iter().flatten();
        let covering = fences.filter(|fence| fence.covers.covers(name));
        covering.map(|fence| fence.number).max().unwrap_or(0)
    }

    /// The lowest number with which a volume of this node is committed under this name. After
    /// [`FenceStep::Missed`] no older volume is, whatever its name.
    #[must_use]
    pub fn least(&self, name: &Name) -> u64 {
        self.covering(name).max(self.missed)
    }

    /// The number of the last fence before which this node missed some; 0: there was none.
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.missed
    }

    /// The number up to which fences are forgotten.
    #[must_use]
    pub fn forgotten(&self) -> u64 {
        self.forgotten
    }

    fn set(&self) -> HashSet<&Fence> {
        self.all().collect()
    }

    /// Whether this fence is here.
    #[must_use]
    pub fn knows(&self, fence: &Fence) -> bool {
        let of_tenant = self.by_tenant.get(fence.covers.tenant());
        of_tenant.is_some_and(|fences| fences.contains(fence))
    }

    /// The next fence. `nodes` is the highest number that any node is known to have applied: even
    /// after an older etcd was put back, these nodes apply the new fence.
    #[must_use]
    pub fn next(&self, clear: Clear, now: Timestamp, nodes: u64, id: u64) -> Fence {
        Fence {
            id,
            number: now.0.max(self.newest.max(nodes).saturating_add(1)),
            previous: self.newest,
            covers: clear.covers,
            repeats: clear.repeats,
        }
    }

    /// What a node with these fences does with one that it receives.
    #[must_use]
    pub fn step(&self, fence: &Fence) -> FenceStep {
        if self.knows(fence) {
            FenceStep::Known
        } else if fence.number <= self.newest {
            FenceStep::Rejoin
        } else if fence.previous > self.newest && !self.is_new {
            FenceStep::Missed
        } else {
            FenceStep::Apply
        }
    }

    /// Remembers a fence.
    pub fn insert(&mut self, fence: Fence) {
        if !self.knows(&fence) {
            self.is_new = false;
            self.newest = self.newest.max(fence.number);
            let tenant = fence.covers.tenant().clone();
            self.by_tenant.entry(tenant).or_default().push(fence);
        }
    }

    /// Remembers that a fence of this number was applied, which may be forgotten by now.
    pub fn note_applied(&mut self, number: u64) {
        self.newest = self.newest.max(number);
    }

    /// Remembers that fences before this number were missed.
    pub fn miss(&mut self, number: u64) {
        self.missed = self.missed.max(number);
    }

    /// Forgets the fences up to this number, which all nodes have applied.
    pub fn forget(&mut self, up_to: u64) {
        self.forgotten = self.forgotten.max(up_to);
        self.newest = self.newest.max(up_to);
        self.by_tenant.retain(|_, fences| {
            fences.retain(|fence| fence.number > up_to);
            !fences.is_empty()
        });
    }

    /// What the controller must fence once more, above all known numbers, before it counts this
    /// node's content. Empty unless an older etcd was put back. Then the chain lacks fences that
    /// the node has applied, or has fences below the node's number that the node does not know.
    #[must_use]
    pub fn owed_to(&self, node: &Self) -> Vec<Clear> {
        // A node that was taken over may send very many.
        let (ours, theirs) = (self.set(), node.set());
        let is_lost = |fence: &&Fence| fence.number > self.forgotten && !ours.contains(*fence);
        let lost = node.all().filter(is_lost);
        // The node does not tell those that it has forgotten. It had applied them.
        let is_told = |fence: &&Fence| fence.number > node.forgotten;
        let is_passed = |fence: &&Fence| fence.number <= node.newest && !theirs.contains(*fence);
        // A higher number is not enough: the other fence may be the older one.
        let counts = |by: &&Fence| by.number > node.newest || theirs.contains(*by);
        let repeats = self.all().filter(counts).flat_map(|by| &by.repeats);
        let repeated: HashSet<u64> = repeats.copied().collect();
        let mut places: HashMap<&Coverage, usize> = HashMap::new();
        let mut owed: Vec<Clear> = Vec::new();
        for fence in lost.chain(self.all().filter(is_told).filter(is_passed)) {
            if repeated.contains(&fence.id) {
                continue;
            }
            let place = *places.entry(&fence.covers).or_insert(owed.len());
            match owed.get_mut(place) {
                Some(clear) if clear.repeats.contains(&fence.id) => {}
                Some(clear) => clear.repeats.push(fence.id),
                None => owed.push(Clear {
                    covers: fence.covers.clone(),
                    repeats: vec![fence.id],
                }),
            }
        }
        owed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        Name {
            tenant: "ci".parse().expect("a label"),
            reference: text.parse().expect("a reference"),
        }
    }

    fn prefix(prefix: &str) -> Coverage {
        Coverage::Prefix {
            tenant: "ci".parse().expect("a label"),
            kind: CacheKind::Task,
            prefix: prefix.into(),
        }
    }

    fn fence(number: u64, previous: u64, covers: Coverage) -> Fence {
        Fence {
            number,
            previous,
            id: number,
            covers,
            repeats: Vec::new(),
        }
    }

    #[test]
    fn a_fence_covers_a_name_a_prefix_or_a_namespace() {
        let other = Name {
            tenant: "other".parse().expect("a label"),
            ..name("task-cache/pr-1")
        };
        let all = Coverage::Namespace("ci".parse().expect("a label"));
        for (covers, text, expected) in [
            (&all, "artifact/a", true),
            (&all, "task-cache/pr-1", true),
            (&prefix("pr-"), "task-cache/pr-1", true),
            (&prefix("pr-"), "task-cache/pr-", true),
            (&prefix("pr-"), "task-cache/pr", false),
            (&prefix("pr-"), "resource-cache/pr-1", false),
            (&prefix("pr-"), "artifact/pr-1", false),
            (&prefix(""), "task-cache/main", true),
            (&Coverage::Name(name("task-cache/a")), "task-cache/a", true),
            (
                &Coverage::Name(name("task-cache/a")),
                "task-cache/ab",
                false,
            ),
            (
                &Coverage::Name(name("task-cache/a")),
                "resource-cache/a",
                false,
            ),
        ] {
            assert_eq!(covers.covers(&name(text)), expected, "{covers:?} {text}");
            assert!(!covers.covers(&other));
        }
    }

    #[test]
    fn numbers_only_grow_and_the_name_of_the_object_holds_the_predecessor() {
        let mut chain = Fences::default();
        for (now, nodes, number) in [(100, 0, 100), (50, 0, 101), (300, 0, 300), (300, 900, 901)] {
            let next = chain.next(prefix("").into(), Timestamp(now), nodes, number);
            assert_eq!((next.number, next.previous), (number, chain.newest()));
            chain.insert(next);
        }
        let next = chain.next(prefix("").into(), Timestamp(1_795_400_000_123), 0, 1);
        assert_eq!(next.object_name(), "after-00000000000000000901");
    }

    #[test]
    fn a_node_applies_each_fence_once_and_knows_when_it_missed_one() {
        let mut node = Fences::default();
        let [first, second] = [fence(5, 0, prefix("a")), fence(9, 5, prefix("b"))];
        assert_eq!(node.step(&second), FenceStep::Missed);
        assert_eq!(node.step(&first), FenceStep::Apply);
        node.insert(first.clone());
        assert_eq!(node.step(&first), FenceStep::Known);
        let other = Fence {
            id: 77,
            ..first.clone()
        };
        assert_eq!(node.step(&other), FenceStep::Rejoin);
        assert_eq!(node.step(&second), FenceStep::Apply);
        assert_eq!(node.covering(&name("task-cache/ab")), 5);
        assert!(first.clears(FenceStep::Apply, &name("task-cache/ab"), 4));
        assert!(!first.clears(FenceStep::Apply, &name("task-cache/ab"), 5));
        assert!(first.clears(FenceStep::Missed, &name("artifact/x"), 9));

        let mut new = Fences::of_new_pool();
        assert_eq!(new.step(&second), FenceStep::Apply);
        new.insert(second.clone());
        let third = fence(30, 20, prefix("c"));
        assert_eq!(new.step(&third), FenceStep::Missed);

        let mut away = Fences::default();
        away.insert(second.clone());
        assert_eq!(away.newest(), 9);
        assert_eq!(away.step(&first), FenceStep::Rejoin);
    }

    #[test]
    fn a_chain_that_was_set_back_owes_the_nodes_what_it_lost() {
        let old = [fence(5, 0, prefix("a")), fence(9, 5, prefix("b"))];
        let mut node = Fences::default();
        for fence in &old {
            node.insert(fence.clone());
        }
        let mut chain = Fences::default();
        chain.insert(old[0].clone());
        // A fence with a number that the node has passed.
        let low = fence(8, 5, prefix("c"));
        chain.insert(low.clone());
        assert_eq!(node.step(&low), FenceStep::Rejoin);
        let owed = chain.owed_to(&node);
        let again = |letter: &str, id| Clear {
            covers: prefix(letter),
            repeats: vec![id],
        };
        assert_eq!(owed, [again("b", 9), again("c", 8)]);
        for (clear, id) in owed.into_iter().zip(100..) {
            let next = chain.next(clear, Timestamp(0), node.newest(), id);
            assert_eq!(node.step(&next), FenceStep::Apply);
            chain.insert(next.clone());
            node.insert(next);
        }
        assert_eq!(chain.owed_to(&node), []);
        assert_eq!(chain.owed_to(&Fences::default()), []);
    }

    #[test]
    fn forgotten_fences_cover_nothing_and_are_not_owed() {
        let first = fence(5, 0, prefix("a"));
        let mut node = Fences::default();
        node.insert(first.clone());
        let mut chain = node.clone();
        chain.forget(5);
        assert_eq!((chain.newest(), chain.all().count()), (5, 0));
        assert_eq!(chain.covering(&name("task-cache/a")), 0);
        assert_eq!(chain.owed_to(&node), []);
        // A node that left out its oldest fences had applied them.
        let mut whole = Fences::default();
        whole.insert(first.clone());
        let mut newer = Fences::default();
        newer.forget(5);
        assert_eq!(whole.owed_to(&newer), []);
        let owed = Fences::default().owed_to(&node);
        assert_eq!(
            (&owed[0].covers, &owed[0].repeats[..]),
            (&first.covers, &[5][..])
        );
    }
}
