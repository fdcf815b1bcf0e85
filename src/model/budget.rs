//! Budgets of a namespace over all nodes: what a node reports about its unused content, and the
//! point in time before which unused content goes. Pure.

use super::name::CacheKind;
use super::time::Timestamp;

/// The most buckets that a node reports for a namespace.
pub const MAX_BUCKETS: usize = 32;

/// Unused content, as a node sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unused {
    /// When it was last used, in the cluster's time.
    pub last_used: Timestamp,
    /// Its size.
    pub bytes: u64,
}

/// Unused content that was last used before a point in time, and not before that of the bucket in
/// front.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bucket {
    /// The point in time.
    pub last_used_before: Timestamp,
    /// Bytes in this bucket.
    pub bytes: u64,
    /// Artifacts in this bucket.
    pub artifacts: u64,
}

/// What a namespace uses on one node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NamespaceUsage {
    /// All bytes, those in use too.
    pub bytes: u64,
    /// All artifacts.
    pub artifacts: u64,
    /// The unused part, oldest first.
    pub unused: Vec<Bucket>,
    /// The stamp of its oldest name. 0: it has no names.
    pub oldest: Timestamp,
    /// The highest fence that the node had applied before it counted this.
    pub fence: u64,
}

impl NamespaceUsage {
    /// Whether a node with this content may have something to evict for a cut-off. Content was last
    /// used when it was made, or later.
    #[must_use]
    pub fn is_concerned(&self, cut: &CutOff) -> bool {
        !self.unused.is_empty() && self.oldest < cut.latest()
    }
}

/// The buckets of a node's unused content, oldest first. Each holds about one part in
/// [`MAX_BUCKETS`] of the bytes or of the artifacts, so a cut-off takes little more than it must.
#[must_use]
pub fn buckets(mut unused: Vec<Unused>) -> Vec<Bucket> {
    unused.sort_unstable_by_key(|content| content.last_used);
    let parts = MAX_BUCKETS as u64 / 2;
    let all_bytes: u64 = unused.iter().map(|content| content.bytes).sum();
    let (most_bytes, most) = (
        all_bytes.div_ceil(parts).max(1),
        (unused.len() as u64).div_ceil(parts).max(1),
    );
    let mut buckets: Vec<Bucket> = Vec::new();
    for Unused { last_used, bytes } in unused {
        let before = Timestamp(last_used.0.saturating_add(1));
        match buckets.last_mut() {
            // Content of one millisecond goes together.
            Some(last)
                if (last.bytes < most_bytes && last.artifacts < most)
                    || last.last_used_before == before =>
            {
                last.last_used_before = before;
                last.bytes = last.bytes.saturating_add(bytes);
                last.artifacts += 1;
            }
            _ => buckets.push(Bucket {
                last_used_before: before,
                bytes,
                artifacts: 1,
            }),
        }
    }
    buckets
}

/// The limits of a namespace over all nodes. `None`: no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Bytes.
    pub bytes: Option<u64>,
    /// Artifacts.
    pub artifacts: Option<u64>,
    /// The longest time in milliseconds that a task cache stays without use.
    pub task_caches_ttl: Option<u64>,
    /// The same of a resource cache.
    pub resource_caches_ttl: Option<u64>,
    /// The longest time in milliseconds that an output stays.
    pub outputs_ttl: Option<u64>,
}

impl Limits {
    /// The smaller of each: what two policies of a namespace allow together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            bytes: smaller_limit(self.bytes, other.bytes),
            artifacts: smaller_limit(self.artifacts, other.artifacts),
            task_caches_ttl: smaller_limit(self.task_caches_ttl, other.task_caches_ttl),
            resource_caches_ttl: smaller_limit(self.resource_caches_ttl, other.resource_caches_ttl),
            outputs_ttl: smaller_limit(self.outputs_ttl, other.outputs_ttl),
        }
    }

    /// What the nodes must evict. Above a budget: so much that 95 % of it are left.
    #[must_use]
    pub fn cut_off<'a>(
        &self,
        nodes: impl IntoIterator<Item = &'a NamespaceUsage>,
        now: Timestamp,
    ) -> CutOff {
        let (mut bytes, mut artifacts, mut unused) = (0_u64, 0_u64, Vec::new());
        for node in nodes {
            bytes = bytes.saturating_add(node.bytes);
            artifacts = artifacts.saturating_add(node.artifacts);
            unused.extend_from_slice(&node.unused);
        }
        let sum = |of: fn(&Bucket) -> u64| {
            let each = unused.iter().map(of);
            each.fold(0, u64::saturating_add)
        };
        let (unused_bytes, unused_artifacts) = (sum(|it| it.bytes), sum(|it| it.artifacts));
        let exceeds = |used: u64, unused: u64, limit: Option<u64>| {
            limit.is_some_and(|limit| used.saturating_sub(unused) > limit)
        };
        let over_budget = exceeds(bytes, unused_bytes, self.bytes)
            || exceeds(artifacts, unused_artifacts, self.artifacts);
        let mut need_bytes = excess(bytes, self.bytes);
        let mut need = excess(artifacts, self.artifacts);
        unused.sort_unstable_by_key(|bucket| bucket.last_used_before);
        let mut unused_before = Timestamp(0);
        for bucket in unused {
            if need_bytes == 0 && need == 0 {
                break;
            }
            unused_before = bucket.last_used_before;
            need_bytes = need_bytes.saturating_sub(bucket.bytes);
            need = need.saturating_sub(bucket.artifacts);
        }
        let before = |ttl: Option<u64>| Timestamp(ttl.map_or(0, |ttl| now.0.saturating_sub(ttl)));
        CutOff {
            unused_before,
            task_caches_before: before(self.task_caches_ttl),
            resource_caches_before: before(self.resource_caches_ttl),
            outputs_before: before(self.outputs_ttl),
            over_budget,
        }
    }
}

/// The limit that satisfies both of two policies. `None`: no limit.
#[must_use]
pub fn smaller_limit(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    one.into_iter().chain(other).min()
}

/// How much must go, if there is more than the limit: so much that 95 % of it are left.
#[must_use]
pub fn excess(used: u64, limit: Option<u64>) -> u64 {
    match limit {
        Some(limit) if used > limit => used - (limit - limit / 20),
        _ => 0,
    }
}

/// Points in time of the cluster. They are absolute, so a repeated or late one does no harm. 0
/// evicts nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CutOff {
    /// Content goes that was last used before this.
    pub unused_before: Timestamp,
    /// Task caches go that were last used before this.
    pub task_caches_before: Timestamp,
    /// Resource caches go that were last used before this.
    pub resource_caches_before: Timestamp,
    /// Outputs go that were sealed before this.
    pub outputs_before: Timestamp,
    /// Content in use alone exceeds the budget.
    pub over_budget: bool,
}

/// Why content is evicted for its namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// Its time to live is over.
    Ttl,
    /// The namespace exceeds its budget.
    Budget,
}

/// Content that a node may evict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Evictable {
    /// Its kind, if it is a cache; else it is an output.
    pub cache: Option<CacheKind>,
    /// Whether a volume is a fork of it.
    pub in_use: bool,
    /// When it was last used.
    pub last_used: Timestamp,
    /// When it was sealed.
    pub sealed: Timestamp,
}

impl CutOff {
    /// Why this content goes; `None`: it stays. Content in use stays.
    #[must_use]
    pub fn evicts(&self, content: &Evictable) -> Option<Limit> {
        let is_expired = match content.cache {
            Some(CacheKind::Task) => content.last_used < self.task_caches_before,
            Some(CacheKind::Resource) => content.last_used < self.resource_caches_before,
            None => content.sealed < self.outputs_before,
        };
        if content.in_use {
            None
        } else if is_expired {
            Some(Limit::Ttl)
        } else {
            (content.last_used < self.unused_before).then_some(Limit::Budget)
        }
    }

    /// Both orders.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            unused_before: self.unused_before.max(other.unused_before),
            task_caches_before: self.task_caches_before.max(other.task_caches_before),
            resource_caches_before: self
                .resource_caches_before
                .max(other.resource_caches_before),
            outputs_before: self.outputs_before.max(other.outputs_before),
            over_budget: self.over_budget || other.over_budget,
        }
    }

    /// Content that was made at this time or later stays. 0: nothing goes.
    #[must_use]
    pub fn latest(&self) -> Timestamp {
        self.unused_before
            .max(self.task_caches_before)
            .max(self.resource_caches_before)
            .max(self.outputs_before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unused(times: impl IntoIterator<Item = u64>, bytes: u64) -> Vec<Unused> {
        let content = |time| Unused {
            last_used: Timestamp(time),
            bytes,
        };
        times.into_iter().map(content).collect()
    }

    fn usage(unused: Vec<Unused>, in_use: u64) -> NamespaceUsage {
        NamespaceUsage {
            bytes: in_use + unused.iter().map(|content| content.bytes).sum::<u64>(),
            artifacts: unused.len() as u64 + u64::from(in_use > 0),
            unused: buckets(unused),
            ..NamespaceUsage::default()
        }
    }

    fn bytes(limit: u64) -> Limits {
        Limits {
            bytes: Some(limit),
            ..Limits::default()
        }
    }

    #[test]
    fn buckets_are_few_and_hold_everything() {
        let odd = (0..5_000).map(|n| Unused {
            last_used: Timestamp(n * 7919 % 4_999),
            bytes: if n % 100 == 0 { 1 << 30 } else { n },
        });
        for unused in [
            unused([], 1),
            unused([5; 100], 1),
            unused(0..33, 0),
            unused(0..1_000, 10),
            odd.collect(),
        ] {
            let buckets = buckets(unused.clone());
            assert!(buckets.len() <= MAX_BUCKETS, "{}", buckets.len());
            let artifacts: u64 = buckets.iter().map(|bucket| bucket.artifacts).sum();
            assert_eq!(artifacts, unused.len() as u64);
            for bucket in &buckets {
                let is_before = |one: &&Unused| one.last_used < bucket.last_used_before;
                let real: u64 = unused.iter().filter(is_before).map(|one| one.bytes).sum();
                let front = buckets
                    .iter()
                    .take_while(|other| other.last_used_before <= bucket.last_used_before);
                assert_eq!(front.map(|bucket| bucket.bytes).sum::<u64>(), real);
            }
        }
    }

    #[test]
    fn the_cut_off_brings_a_namespace_to_its_budget_and_little_below() {
        let nodes = [
            usage(unused((0..1_000).map(|n| 3 * n), 10), 500),
            usage(unused((0..1_000).map(|n| 5 * n), 10), 0),
            usage(unused([], 10), 700),
        ];
        let used: u64 = nodes.iter().map(|node| node.bytes).sum();
        let cut = bytes(used * 2 / 3).cut_off(&nodes, Timestamp(0));
        assert!(!cut.over_budget);
        let goes = |step: u64| {
            (0..1_000)
                .filter(|n| step * n < cut.unused_before.0)
                .count()
        };
        let left = used - 10 * (goes(3) + goes(5)) as u64;
        let goal = used * 2 / 3 * 95 / 100;
        assert!(left <= goal && left >= goal * 85 / 100, "{left} {goal}");
        assert_eq!(bytes(used).cut_off(&nodes, Timestamp(0)), CutOff::default());
    }

    #[test]
    fn content_in_use_stays_even_if_it_alone_exceeds_the_budget() {
        let nodes = [usage(unused([1, 2, 3], 10), 1_000)];
        let cut = bytes(500).cut_off(&nodes, Timestamp(0));
        assert!(cut.over_budget);
        assert_eq!(cut.unused_before, Timestamp(4));
        let content = Evictable {
            cache: Some(CacheKind::Task),
            in_use: true,
            last_used: Timestamp(0),
            sealed: Timestamp(0),
        };
        assert_eq!(cut.evicts(&content), None);
        let content = Evictable {
            in_use: false,
            ..content
        };
        assert_eq!(cut.evicts(&content), Some(Limit::Budget));
        // What is in use fits, although 5 % less cannot be reached.
        let nodes = [usage(unused([1], 100), 490)];
        let cut = bytes(500).cut_off(&nodes, Timestamp(0));
        assert_eq!((cut.over_budget, cut.unused_before), (false, Timestamp(2)));
    }

    #[test]
    fn what_nodes_report_late_moves_no_cut_off_forward() {
        let all = |after: u64, step: u64| {
            let times = (1..1_000)
                .map(|n| n * step)
                .filter(move |time| *time >= after);
            usage(unused(times, 10), 0)
        };
        let before = [all(0, 3), all(0, 5)];
        let limits = bytes(12_000);
        let cut = limits.cut_off(&before, Timestamp(0)).unused_before;
        assert!(cut.0 > 0);
        // One node has evicted, and the report of the other one is old.
        for stale in 0..2 {
            let mut nodes = [all(cut.0, 3), all(cut.0, 5)];
            nodes[stale] = before[stale].clone();
            assert!(limits.cut_off(&nodes, Timestamp(0)).unused_before <= cut);
        }
        let nodes = [all(cut.0, 3), all(cut.0, 5)];
        assert_eq!(limits.cut_off(&nodes, Timestamp(0)), CutOff::default());
    }

    #[test]
    fn a_node_is_concerned_if_it_has_unused_content_from_before_a_cut_off() {
        let cut = CutOff {
            outputs_before: Timestamp(10),
            ..CutOff::default()
        };
        let made = |oldest, times: &[u64]| NamespaceUsage {
            oldest: Timestamp(oldest),
            ..usage(unused(times.iter().copied(), 1), 1)
        };
        assert!(made(9, &[20]).is_concerned(&cut));
        assert!(!made(10, &[20]).is_concerned(&cut));
        assert!(!made(9, &[]).is_concerned(&cut));
        assert!(!made(9, &[20]).is_concerned(&CutOff::default()));
    }

    #[test]
    fn artifacts_have_a_budget_too_and_the_smaller_limit_counts() {
        let nodes = [usage(unused(0..100, 1), 0)];
        let few = Limits {
            artifacts: Some(40),
            task_caches_ttl: Some(60),
            resource_caches_ttl: Some(90),
            ..Limits::default()
        };
        let both = few.and(Limits {
            artifacts: Some(80),
            outputs_ttl: Some(10),
            resource_caches_ttl: Some(70),
            ..bytes(1_000)
        });
        assert_eq!(both.artifacts, Some(40));
        let cut = both.cut_off(&nodes, Timestamp(200));
        assert!((62..=76).contains(&cut.unused_before.0), "{cut:?}");
        assert_eq!(cut.task_caches_before, Timestamp(140));
        assert_eq!(cut.resource_caches_before, Timestamp(130));
        assert_eq!(cut.outputs_before, Timestamp(190));
    }

    #[test]
    fn caches_expire_by_their_last_use_and_outputs_by_their_seal() {
        let cut = CutOff {
            task_caches_before: Timestamp(100),
            resource_caches_before: Timestamp(50),
            outputs_before: Timestamp(200),
            ..CutOff::default()
        };
        let (task, resource) = (Some(CacheKind::Task), Some(CacheKind::Resource));
        for (cache, last_used, sealed, expected) in [
            (task, 99, 300, Some(Limit::Ttl)),
            (task, 100, 0, None),
            (resource, 49, 300, Some(Limit::Ttl)),
            (resource, 50, 0, None),
            (None, 0, 200, None),
            (None, 300, 199, Some(Limit::Ttl)),
        ] {
            let content = Evictable {
                cache,
                in_use: false,
                last_used: Timestamp(last_used),
                sealed: Timestamp(sealed),
            };
            assert_eq!(cut.evicts(&content), expected, "{content:?}");
        }
    }
}
