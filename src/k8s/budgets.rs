//! The limits of namespaces: `CachePolicy` objects, read for the catalog, and their status.
//!
//! Each look takes what the nodes have reported, and orders them to evict again what exceeds a
//! limit. So no order is remembered, and one that is lost does no harm. Then it writes the statuses
//! that are news, each at most once in the time of a report, and waits for no write for long.
//!
//! The limits of the shared tier are given to its collector in this process (`shared::periodic`),
//! which knows what each namespace has there.
//!
//! It needs `get`, `list` and `watch` on `cachepolicies`, and `patch` on their status.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::{Client, ResourceExt as _};
use parking_lot::Mutex;
use tokio::time::MissedTickBehavior;

use super::conditions;
use super::watched::Watched;
use crate::api::{self, CachePolicy, CachePolicySpec, CachePolicyStatus, number};
use crate::hub::{self, Used};
use crate::model::{Limits, Tenant, parse_bytes, quantity};
use crate::shared::{self, TierUse};
use crate::telemetry::metrics::{EncodeLabelSet, Family, Gauge, Registry};

/// How often the controller looks in the time in which a node reports once.
const LOOKS: u32 = 4;
/// Our conditions. An object has others, too.
const VALID: &str = "Valid";
const OVER_BUDGET: &str = "OverBudget";
const SHARED_OVER_BUDGET: &str = "SharedOverBudget";
/// The most namespaces that the metrics name: those that use most.
const MOST_SHOWN: usize = 100;

/// What namespaces with a policy use, for metrics. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Figures(Arc<Mutex<Vec<(Tenant, NamespaceUse)>>>);

/// What is known of a namespace with a policy.
#[derive(Debug, Clone, Copy, Default)]
struct NamespaceUse {
    limits: Limits,
    /// What it uses on all nodes.
    used: Used,
    /// Its budget in the shared tier, if it has one that has effect.
    shared: Option<shared::Budget>,
    /// What it has there; `None`: not known yet.
    kept: Option<TierUse>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfNamespace {
    namespace: String,
}

impl Figures {
    fn set(&self, all: &BTreeMap<Tenant, NamespaceUse>) {
        let mut most: Vec<(&Tenant, &NamespaceUse)> = all.iter().collect();
        most.sort_by_key(|(_, known)| std::cmp::Reverse(known.used.bytes));
        most.truncate(MOST_SHOWN);
        let most = most.into_iter();
        let most = most.map(|(tenant, known)| (tenant.clone(), *known));
        *self.0.lock() = most.collect();
    }

    /// Adds them to the controller's metrics.
    pub fn register(&self, registry: &mut Registry) {
        let all = self.0.lock();
        let mut gauges = |name, help, value: fn(&NamespaceUse) -> Option<u64>| {
            let family = Family::<OfNamespace, Gauge>::default();
            for (namespace, known) in &*all {
                let namespace = namespace.to_string();
                if let Some(value) = value(known) {
                    let gauge = family.get_or_create(&OfNamespace { namespace });
                    gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
                }
            }
            registry.register(name, help, family);
        };
        gauges(
            "namespace_used_bytes",
            "Bytes that a namespace with a policy uses on all nodes",
            |known| Some(known.used.bytes),
        );
        gauges(
            "namespace_used_artifacts",
            "Artifacts that a namespace with a policy has on all nodes, each copy counted",
            |known| Some(known.used.artifacts),
        );
        gauges(
            "namespace_budget_bytes",
            "Bytes that a namespace may use on all nodes",
            |known| known.limits.bytes,
        );
        gauges(
            "namespace_budget_artifacts",
            "Artifacts that a namespace may have on all nodes",
            |known| known.limits.artifacts,
        );
        gauges(
            "namespace_over_budget",
            "Whether content in use alone exceeds the budget of a namespace",
            |known| Some(known.used.over_budget.into()),
        );
        gauges(
            "namespace_shared_used_bytes",
            "Bytes that the names of a namespace with a sharedBudget show in the shared tier",
            |known| known.kept.map(|kept| kept.bytes),
        );
        gauges(
            "namespace_shared_used_artifacts",
            "Names with content of a namespace with a sharedBudget in the shared tier",
            |known| known.kept.map(|kept| kept.artifacts),
        );
        gauges(
            "namespace_shared_budget_bytes",
            "Bytes that a namespace may have in the shared tier",
            |known| known.shared.and_then(|budget| budget.bytes),
        );
        gauges(
            "namespace_shared_budget_artifacts",
            "Artifacts that a namespace may have in the shared tier",
            |known| known.shared.and_then(|budget| budget.artifacts),
        );
        gauges(
            "namespace_shared_over_budget",
            "Whether recent content alone exceeds the sharedBudget of a namespace",
            |known| known.kept.map(|kept| kept.over_budget.into()),
        );
    }
}

/// When the status of each policy was written, by its uid, and for which generation.
type Written = HashMap<String, (Instant, Option<i64>)>;

/// Keeps namespaces within their limits.
#[derive(Debug)]
pub struct Keeper {
    /// The policies of all namespaces.
    pub policies: Watched<CachePolicy>,
    /// What the nodes report, and where they get orders.
    pub catalog: hub::Handle,
    /// How often a node reports.
    pub every: Duration,
    /// Get what the namespaces use.
    pub figures: Figures,
    /// The collector of the shared tier, if this process runs it.
    pub tier: Option<shared::Budgets>,
}

impl Keeper {
    /// Runs until it is dropped. `client` writes the statuses.
    pub async fn run(self, client: Client) {
        self.policies.listed().await;
        let mut written = Written::new();
        let mut looks = tokio::time::interval(self.every / LOOKS);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            looks.tick().await;
            self.look(&client, &mut written).await;
        }
    }

    async fn look(&self, client: &Client, written: &mut Written) {
        let policies = self.policies.all();
        let mut known: BTreeMap<Tenant, NamespaceUse> = BTreeMap::new();
        for policy in &policies {
            if let Some(tenant) = tenant(policy) {
                let all = known.entry(tenant).or_default();
                all.limits = all.limits.and(limits_of(&policy.spec).0);
                let shared = shared_of(&policy.spec, self.tier.is_some()).0;
                all.shared = match (all.shared, shared) {
                    (Some(one), Some(other)) => Some(one.and(other)),
                    (one, other) => one.or(other),
                };
            }
        }
        if let Some(tier) = &self.tier {
            let budgets = known.iter();
            let budgets = budgets.filter_map(|(tenant, it)| Some((tenant.clone(), it.shared?)));
            tier.set(budgets.collect());
        }
        for (tenant, known) in &mut known {
            known.used = self.catalog.keep_within(tenant, &known.limits);
            let tier = self.tier.as_ref().filter(|_| known.shared.is_some());
            known.kept = tier.and_then(|tier| tier.kept(tenant));
        }
        self.figures.set(&known);
        written.retain(|uid, _| {
            let mut policies = policies.iter();
            policies.any(|policy| policy.metadata.uid.as_ref() == Some(uid))
        });
        let mut news = Vec::new();
        for policy in &policies {
            let known = tenant(policy).and_then(|tenant| known.get(&tenant));
            let status = known.and_then(|known| self.news(policy, known, written));
            news.extend(status.map(|status| (Arc::clone(policy), status)));
        }
        for policy in conditions::write_all(client, news).await {
            let of = policy.metadata.generation;
            let uid = policy.uid().unwrap_or_default();
            written.insert(uid, (Instant::now(), of));
        }
    }

    /// The status of a policy, if it is to be written: once in the time of a report, and at once
    /// for another specification.
    fn news(
        &self,
        policy: &CachePolicy,
        known: &NamespaceUse,
        written: &Written,
    ) -> Option<CachePolicyStatus> {
        let now = conditions::now();
        let mut status = status_of(policy, known, self.tier.is_some(), &now);
        if self.catalog.knows_all() {
            tell_used(policy, &mut status, known, &now);
        }
        let uid = policy.uid().unwrap_or_default();
        let generation = policy.metadata.generation;
        let is_recent = written
            .get(&uid)
            .is_some_and(|(at, of)| at.elapsed() < self.every && *of == generation);
        (!is_recent && is_news(policy.status.as_ref(), &status)).then_some(status)
    }
}

fn tenant(policy: &CachePolicy) -> Option<Tenant> {
    policy.namespace().and_then(|name| name.parse().ok())
}

/// The bytes and artifacts of a budget. `problems` get what is wrong with the field.
fn budget_of(
    field: &str,
    budget: Option<&api::Budget>,
    problems: &mut Vec<String>,
) -> (Option<u64>, Option<u64>) {
    let storage = budget.and_then(|budget| budget.storage.as_deref());
    let bytes = storage.and_then(|text| {
        let bytes = parse_bytes(text);
        if bytes.is_none() {
            problems.push(format!(
                "{field}.storage: {text:?} is not a quantity such as 200Gi"
            ));
        }
        bytes
    });
    let artifacts = budget.and_then(|budget| budget.artifacts);
    let artifacts = artifacts.and_then(|count| {
        let fits = u64::try_from(count).ok();
        if fits.is_none() {
            problems.push(format!("{field}.artifacts: {count} is negative"));
        }
        fits
    });
    (bytes, artifacts)
}

/// The budget of the shared tier, and what is wrong with it. One without limits only has the
/// namespace counted.
fn shared_of(spec: &CachePolicySpec, has_tier: bool) -> (Option<shared::Budget>, Vec<String>) {
    let mut problems = Vec::new();
    let given = spec.shared_budget.as_ref();
    let (bytes, artifacts) = budget_of("sharedBudget", given, &mut problems);
    if given.is_some() && !has_tier {
        let problem =
            "sharedBudget: it has no effect, because the controller runs without --shared";
        problems.push(problem.to_owned());
    }
    let budget = given.filter(|_| has_tier);
    let budget = budget.map(|_| shared::Budget { bytes, artifacts });
    (budget, problems)
}

/// The limits of a policy, and what is wrong with it. The rest of the policy counts.
fn limits_of(spec: &CachePolicySpec) -> (Limits, Vec<String>) {
    let mut problems = Vec::new();
    let (bytes, artifacts) = budget_of("budget", spec.budget.as_ref(), &mut problems);
    let mut time = |field: &str, text: Option<&String>| {
        let text = text?;
        let parsed = humantime::parse_duration(text.trim()).ok();
        let parsed = parsed.filter(|time| !time.is_zero());
        if parsed.is_none() {
            problems.push(format!("ttl.{field}: {text:?} is not a time such as 14d"));
        }
        Some(u64::try_from(parsed?.as_millis()).unwrap_or(u64::MAX))
    };
    let ttl = spec.ttl.as_ref();
    let caches = time("caches", ttl.and_then(|ttl| ttl.caches.as_ref()));
    let task_caches = time("taskCaches", ttl.and_then(|ttl| ttl.task_caches.as_ref()));
    let of_resource = ttl.and_then(|ttl| ttl.resource_caches.as_ref());
    let resource_caches = time("resourceCaches", of_resource);
    let outputs_ttl = time("outputs", ttl.and_then(|ttl| ttl.outputs.as_ref()));
    let limits = Limits {
        bytes,
        artifacts,
        task_caches_ttl: task_caches.or(caches),
        resource_caches_ttl: resource_caches.or(caches),
        outputs_ttl,
    };
    (limits, problems)
}

/// The status that a policy should have, except for what the nodes report.
fn status_of(
    policy: &CachePolicy,
    known: &NamespaceUse,
    has_tier: bool,
    now: &str,
) -> CachePolicyStatus {
    let mut status = policy.status.clone().unwrap_or_default();
    let mut problems = limits_of(&policy.spec).1;
    problems.extend(shared_of(&policy.spec, has_tier).1);
    let is_valid = problems.is_empty();
    let reason = if is_valid { "Valid" } else { "Invalid" };
    let problems = problems.join("; ");
    let valid = conditions::condition(policy, VALID, is_valid, reason, &problems, now);
    conditions::set(&mut status.conditions, valid);
    let is_over = match (known.shared, known.kept) {
        (None, _) => {
            status.shared_used = None;
            None
        }
        // What is not known leaves what was written.
        (Some(_), None) => return status,
        (Some(budget), Some(kept)) => {
            status.shared_used = Some(used_of(kept.bytes, kept.artifacts));
            (budget != shared::Budget::default()).then_some(kept.over_budget)
        }
    };
    let why = "content of the last hour exceeds the sharedBudget; content that is older than an \
               hour goes";
    let why = ("RecentContent", why);
    tell_over_budget(policy, &mut status, SHARED_OVER_BUDGET, is_over, why, now);
    status
}

/// Adds what all nodes report together.
fn tell_used(
    policy: &CachePolicy,
    status: &mut CachePolicyStatus,
    known: &NamespaceUse,
    now: &str,
) {
    let NamespaceUse { limits, used, .. } = known;
    status.used = Some(used_of(used.bytes, used.artifacts));
    let is_limited = limits.bytes.is_some() || limits.artifacts.is_some();
    let is_over = is_limited.then_some(used.over_budget);
    let why = "volumes use more content of the namespace than the budget allows; it goes when \
               their pods end";
    tell_over_budget(
        policy,
        status,
        OVER_BUDGET,
        is_over,
        ("ContentInUse", why),
        now,
    );
}

/// Adds whether a budget is exceeded, and if so, why: reason and message. `None`: there is none.
fn tell_over_budget(
    policy: &CachePolicy,
    status: &mut CachePolicyStatus,
    of: &str,
    is_over: Option<bool>,
    why: (&str, &str),
    now: &str,
) {
    let Some(is_over) = is_over else {
        status.conditions.retain(|one| one.of != of);
        return;
    };
    let (reason, message) = if is_over { why } else { ("WithinBudget", "") };
    let condition = conditions::condition(policy, of, is_over, reason, message, now);
    conditions::set(&mut status.conditions, condition);
}

fn used_of(bytes: u64, artifacts: u64) -> api::Used {
    api::Used {
        storage: quantity(bytes),
        artifacts: number(artifacts),
    }
}

/// Whether a status says something else than the one before. The number of artifacts changes with
/// every commit: a percent of it is no news.
fn is_news(old: Option<&CachePolicyStatus>, new: &CachePolicyStatus) -> bool {
    let Some(old) = old else {
        return true;
    };
    let is_other = |old: &Option<api::Used>, new: &Option<api::Used>| match (old, new) {
        (Some(old), Some(new)) => {
            let difference = old.artifacts.abs_diff(new.artifacts);
            old.storage != new.storage || difference > old.artifacts.unsigned_abs() / 100
        }
        (old, new) => old != new,
    };
    is_other(&old.used, &new.used)
        || is_other(&old.shared_used, &new.shared_used)
        || old.conditions != new.conditions
}

#[cfg(test)]
mod tests {
    use futures_util::stream;
    use serde_json::json;

    use super::*;
    use crate::distribution::roster::NoNode;
    use crate::server::Drain;
    use crate::telemetry::metrics;

    const NOW: &str = "2026-11-25T17:00:00Z";
    const LATER: &str = "2026-11-25T17:01:00Z";

    fn policy(spec: serde_json::Value) -> CachePolicy {
        let spec = serde_json::from_value(spec).expect("a specification");
        let mut policy = CachePolicy::new("policy", spec);
        policy.metadata.namespace = Some("ci".to_owned());
        policy.metadata.generation = Some(1);
        policy
    }

    fn used(bytes: u64, artifacts: u64, over_budget: bool) -> Used {
        Used {
            bytes,
            artifacts,
            over_budget,
        }
    }

    #[test]
    fn a_wrong_value_is_reported_and_the_others_count() {
        let all = json!({
            "budget": {"storage": "200Gi", "artifacts": 20},
            "ttl": {"caches": "14d", "outputs": "1d 12h"},
        });
        let hour = 3_600_000;
        let expected = Limits {
            bytes: Some(200 << 30),
            artifacts: Some(20),
            task_caches_ttl: Some(14 * 24 * hour),
            resource_caches_ttl: Some(14 * 24 * hour),
            outputs_ttl: Some(36 * hour),
        };
        assert_eq!(limits_of(&policy(all).spec), (expected, Vec::new()));
        let of_kinds = |ttl: serde_json::Value| {
            let limits = limits_of(&policy(json!({"ttl": ttl})).spec).0;
            let hours = |ttl: Option<u64>| ttl.map(|ttl| ttl / hour);
            (
                hours(limits.task_caches_ttl),
                hours(limits.resource_caches_ttl),
            )
        };
        let both = json!({"caches": "3h", "taskCaches": "5h", "resourceCaches": "1h"});
        assert_eq!(of_kinds(both), (Some(5), Some(1)));
        let one = json!({"caches": "3h", "resourceCaches": "7h"});
        assert_eq!(of_kinds(one), (Some(3), Some(7)));
        assert_eq!(of_kinds(json!({"taskCaches": "5h"})), (Some(5), None));
        // A value that cannot be read does not let content stay for ever.
        let wrong = json!({"caches": "3h", "taskCaches": "0s"});
        assert_eq!(of_kinds(wrong), (Some(3), Some(3)));
        assert_eq!(limits_of(&policy(json!({})).spec).0, Limits::default());
        let wrong = json!({
            "budget": {"storage": "99999999999Ei", "artifacts": 20},
            "ttl": {"caches": "0s", "outputs": "1h"},
            "sharedBudget": {"storage": "much", "artifacts": -1},
        });
        let policy = policy(wrong);
        let (limits, problems) = limits_of(&policy.spec);
        let expected = Limits {
            artifacts: Some(20),
            outputs_ttl: Some(hour),
            ..Limits::default()
        };
        assert_eq!(limits, expected);
        assert_eq!(problems.len(), 2);
        let known = NamespaceUse {
            limits,
            ..NamespaceUse::default()
        };
        let status = status_of(&policy, &known, true, NOW);
        let [valid] = &status.conditions[..] else {
            panic!("{status:?}");
        };
        assert_eq!((&*valid.of, &*valid.status), ("Valid", "False"));
        assert!(valid.message.contains("budget.storage: \"99999999999Ei\""));
        assert!(valid.message.contains("ttl.caches: \"0s\""));
        assert!(valid.message.contains("sharedBudget.storage: \"much\""));
        assert!(valid.message.contains("sharedBudget.artifacts: -1"));
    }

    #[test]
    fn what_is_in_the_shared_tier_is_told_while_there_is_a_budget() {
        let mut policy = policy(json!({"sharedBudget": {"storage": "1Gi"}}));
        let (budget, problems) = shared_of(&policy.spec, true);
        let expected = shared::Budget {
            bytes: Some(1 << 30),
            artifacts: None,
        };
        assert_eq!((budget, problems), (Some(expected), Vec::new()));
        let known = |shared, kept: Option<(u64, u64, bool)>| NamespaceUse {
            shared,
            kept: kept.map(|(bytes, artifacts, over_budget)| TierUse {
                bytes,
                artifacts,
                over_budget,
            }),
            ..NamespaceUse::default()
        };
        let of = |status: &CachePolicyStatus, of: &str| {
            let condition = status.conditions.iter().find(|one| one.of == of);
            condition.map(|one| one.status.clone())
        };
        let now = |policy: &CachePolicy, known: &NamespaceUse| status_of(policy, known, true, NOW);
        let unknown = now(&policy, &known(budget, None));
        assert_eq!((&unknown.shared_used, unknown.conditions.len()), (&None, 1));
        let within = now(&policy, &known(budget, Some((20 << 20, 3, false))));
        let used = within.shared_used.clone().expect("it is told");
        assert_eq!((&*used.storage, used.artifacts), ("20Mi", 3));
        assert_eq!(of(&within, SHARED_OVER_BUDGET).as_deref(), Some("False"));
        assert!(is_news(Some(&unknown), &within));
        policy.status = Some(within.clone());
        assert_eq!(now(&policy, &known(budget, None)), within);
        let over = now(&policy, &known(budget, Some((2 << 30, 3, true))));
        assert_eq!(of(&over, SHARED_OVER_BUDGET).as_deref(), Some("True"));
        assert!(is_news(Some(&within), &over));
        // Without limits it is only counted.
        let only = Some(shared::Budget::default());
        let only = now(&policy, &known(only, Some((20 << 20, 3, false))));
        assert_eq!(
            (&only.shared_used, only.conditions.len()),
            (&within.shared_used, 1)
        );
        // A controller without a tier does not know it.
        let (none, problems) = shared_of(&policy.spec, false);
        assert!(none.is_none() && problems.len() == 1);
        let without = status_of(&policy, &known(None, None), false, NOW);
        assert_eq!((&without.shared_used, without.conditions.len()), (&None, 1));
        assert_eq!(of(&without, VALID).as_deref(), Some("False"));
        assert!(without.conditions[0].message.contains("--shared"));
    }

    #[test]
    fn a_status_is_written_when_it_is_news() {
        let mut policy = policy(json!({"budget": {"storage": "1Gi"}}));
        let limits = limits_of(&policy.spec).0;
        let told = |policy: &CachePolicy, used: Option<Used>, now: &str| {
            let known = NamespaceUse {
                limits,
                used: used.unwrap_or_default(),
                ..NamespaceUse::default()
            };
            let mut status = status_of(policy, &known, false, now);
            if used.is_some() {
                tell_used(policy, &mut status, &known, now);
            }
            status
        };
        let first = told(&policy, Some(used(20 << 20, 500, false)), NOW);
        assert!(is_news(None, &first));
        assert_eq!(first.used.as_ref().expect("it is told").storage, "20Mi");
        policy.status = Some(first.clone());
        let now = |policy: &CachePolicy, used: Used| {
            let status = told(policy, Some(used), LATER);
            (is_news(policy.status.as_ref(), &status), status)
        };
        assert!(!now(&policy, used((20 << 20) + 5, 505, false)).0);
        assert!(now(&policy, used(20 << 20, 506, false)).0);
        assert!(now(&policy, used(21 << 20, 500, false)).0);
        let (is_news_now, over) = now(&policy, used(20 << 20, 500, true));
        assert!(is_news_now);
        let times = over.conditions.iter();
        let times: Vec<(&str, &str)> = times
            .map(|one| (&*one.of, &*one.last_transition_time))
            .collect();
        assert_eq!(times, [(VALID, NOW), (OVER_BUDGET, LATER)]);
        // A condition of another part of the controller stays.
        let mut other = first.conditions[0].clone();
        other.of = "Other".to_owned();
        let mut with_other = policy.clone();
        let status = with_other.status.as_mut().expect("it has one");
        status.conditions.insert(0, other.clone());
        for used in [None, Some(used(20 << 20, 500, false))] {
            let status = told(&with_other, used, LATER);
            assert!(status.conditions.contains(&other));
            assert!(!is_news(with_other.status.as_ref(), &status));
        }
        // What is not known leaves what was written.
        let unknown = told(&policy, None, LATER);
        assert_eq!(
            (unknown.used.clone(), unknown.conditions.len()),
            (first.used, 2)
        );
        assert!(!is_news(policy.status.as_ref(), &unknown));
        policy.metadata.generation = Some(2);
        let unknown = told(&policy, None, LATER);
        assert!(is_news(policy.status.as_ref(), &unknown));
    }

    #[tokio::test]
    async fn a_controller_without_nodes_does_not_say_what_is_used() {
        let address = "127.0.0.1:0".parse().expect("an address");
        let hub = hub::Hub::open(address, Arc::new(NoNode), hub::USAGE).await;
        let hub = hub.expect("a port");
        let keeper = Keeper {
            policies: Watched::over(stream::pending()).0,
            catalog: hub.handle(),
            every: hub::USAGE,
            figures: Figures::default(),
            tier: None,
        };
        tokio::spawn(hub.serve(Drain::new(hub::USAGE)));
        let complete = async {
            while keeper.catalog.is_incomplete() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let complete = tokio::time::timeout(Duration::from_secs(30), complete).await;
        complete.expect("no node is awaited");
        let mut policy = policy(json!({"budget": {"storage": "1Gi"}}));
        let known = NamespaceUse::default();
        let mut status = status_of(&policy, &known, false, NOW);
        status.used = Some(used_of(20 << 20, 500));
        policy.status = Some(status);
        // Another controller has the nodes, and has written this.
        assert_eq!(keeper.news(&policy, &known, &Written::new()), None);
    }

    #[test]
    fn the_page_of_metrics_names_the_namespaces_that_use_most() {
        let figures = Figures::default();
        let limits = Limits {
            bytes: Some(1),
            artifacts: Some(2),
            ..Limits::default()
        };
        let all = (0..200).map(|number: u64| {
            let tenant = format!("ci-{number}").parse().expect("a label");
            let known = NamespaceUse {
                limits,
                used: used(number, 1, false),
                shared: Some(shared::Budget {
                    bytes: Some(7),
                    artifacts: Some(8),
                }),
                kept: Some(TierUse::default()),
            };
            (tenant, known)
        });
        figures.set(&all.collect());
        let mut registry = metrics::registry();
        figures.register(&mut registry);
        let text = metrics::encode(&registry);
        let series = "baggageclaim_namespace_used_bytes{namespace=\"ci-";
        let shown = text.lines().filter(|line| line.starts_with(series));
        assert_eq!(shown.count(), MOST_SHOWN);
        assert!(text.contains("namespace=\"ci-199\"} 199"), "{text}");
        metrics::assert_documented(&registry, "namespace_");
    }
}
