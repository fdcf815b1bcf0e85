//! The limits of namespaces: `CachePolicy` objects, read for the catalog, and their status.
//!
//! Each look takes what the nodes have reported, and orders them to evict again what exceeds a
//! limit. So nothing is remembered, and an order that is lost does no harm.
//!
//! It needs `get`, `list` and `watch` on `cachepolicies`, and `patch` on their status.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, ResourceExt as _};
use parking_lot::Mutex;
use serde_json::json;
use tokio::time::MissedTickBehavior;

use crate::api::{CachePolicy, CachePolicySpec, CachePolicyStatus, PolicyCondition, number};
use crate::distribution::roster::{Budgets, Used};
use crate::model::{Limits, Tenant, parse_bytes, quantity};
use crate::telemetry::metrics::{EncodeLabelSet, Family, Gauge, Registry};

/// How often the controller looks in the time in which a node reports once.
const LOOKS: u32 = 4;
/// Our conditions. An object has others, too.
const VALID: &str = "Valid";
const OVER_BUDGET: &str = "OverBudget";
/// The most namespaces that the metrics name: those that use most.
const MOST_SHOWN: usize = 100;

/// What namespaces with a policy use, for metrics. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Figures(Arc<Mutex<Vec<(Tenant, Limits, Used)>>>);

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfNamespace {
    namespace: String,
}

impl Figures {
    fn set(&self, mut all: Vec<(Tenant, Limits, Used)>) {
        all.sort_by_key(|(_, _, used)| std::cmp::Reverse(used.bytes));
        all.truncate(MOST_SHOWN);
        *self.0.lock() = all;
    }

    /// Adds them to the controller's metrics.
    pub fn register(&self, registry: &mut Registry) {
        let all = self.0.lock();
        let mut gauges = |name, help, value: fn(&Limits, &Used) -> Option<u64>| {
            let family = Family::<OfNamespace, Gauge>::default();
            for (namespace, limits, used) in &*all {
                let namespace = namespace.to_string();
                if let Some(value) = value(limits, used) {
                    let gauge = family.get_or_create(&OfNamespace { namespace });
                    gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
                }
            }
            registry.register(name, help, family);
        };
        gauges(
            "namespace_used_bytes",
            "Bytes that a namespace with a policy uses on all nodes",
            |_, used| Some(used.bytes),
        );
        gauges(
            "namespace_used_artifacts",
            "Artifacts that a namespace with a policy has on all nodes, each copy counted",
            |_, used| Some(used.artifacts),
        );
        gauges(
            "namespace_budget_bytes",
            "Bytes that a namespace may use on all nodes",
            |limits, _| limits.bytes,
        );
        gauges(
            "namespace_budget_artifacts",
            "Artifacts that a namespace may have on all nodes",
            |limits, _| limits.artifacts,
        );
        gauges(
            "namespace_over_budget",
            "Whether content in use alone exceeds the budget of a namespace",
            |_, used| Some(used.over_budget.into()),
        );
    }
}

/// Keeps namespaces within their limits, until it is dropped. The nodes report once in `every`.
pub async fn keep(client: Client, budgets: Arc<dyn Budgets>, every: Duration, figures: Figures) {
    let (policies, writer) = reflector::store();
    let all: Api<CachePolicy> = Api::all(client.clone());
    let events = watcher(all, watcher::Config::default()).default_backoff();
    let watch = reflector::reflector(writer, events).for_each(|event| {
        if let Err(error) = event {
            tracing::warn!(%error, "the watch over CachePolicies failed; retrying");
        }
        std::future::ready(())
    });
    let keeper = Keeper {
        client,
        policies,
        budgets,
        every,
        figures,
        written: HashMap::new(),
    };
    tokio::join!(watch, keeper.run());
}

struct Keeper {
    client: Client,
    policies: Store<CachePolicy>,
    budgets: Arc<dyn Budgets>,
    every: Duration,
    figures: Figures,
    /// When the status of each policy was written, by its uid, and for which generation.
    written: HashMap<String, (Instant, Option<i64>)>,
}

impl Keeper {
    async fn run(mut self) {
        if self.policies.wait_until_ready().await.is_err() {
            return;
        }
        let mut looks = tokio::time::interval(self.every / LOOKS);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            looks.tick().await;
            self.look().await;
        }
    }

    async fn look(&mut self) {
        let policies = self.policies.state();
        let mut limits: BTreeMap<Tenant, Limits> = BTreeMap::new();
        for policy in &policies {
            if let Some(tenant) = tenant(policy) {
                let all = limits.entry(tenant).or_default();
                *all = all.and(limits_of(&policy.spec).0);
            }
        }
        let used = limits.iter().map(|(tenant, limits)| {
            let used = self.budgets.keep_within(tenant, limits);
            (tenant.clone(), *limits, used)
        });
        let used: Vec<(Tenant, Limits, Used)> = used.collect();
        let known: HashMap<Tenant, (Limits, Used)> = used
            .iter()
            .map(|(tenant, limits, used)| (tenant.clone(), (*limits, *used)))
            .collect();
        self.figures.set(used);
        let is_incomplete = self.budgets.is_incomplete();
        self.written.retain(|uid, _| {
            let mut policies = policies.iter();
            policies.any(|policy| policy.metadata.uid.as_ref() == Some(uid))
        });
        for policy in &policies {
            let used = tenant(policy).and_then(|tenant| known.get(&tenant));
            let used = used.filter(|_| !is_incomplete);
            if let Err(error) = self.tell(policy, used).await {
                let (namespace, name) = (policy.namespace().unwrap_or_default(), policy.name_any());
                tracing::warn!(namespace, name, %error,
                    "the status of a CachePolicy could not be written; retrying");
            }
        }
    }

    /// Writes the status of a policy, if that is news: once in the time of a report, and at once for
    /// another specification.
    async fn tell(
        &mut self,
        policy: &CachePolicy,
        used: Option<&(Limits, Used)>,
    ) -> Result<(), kube::Error> {
        let now = Timestamp::from_second(Timestamp::now().as_second());
        let now = now.unwrap_or_default().to_string();
        let status = status_of(policy, used, &now);
        let uid = policy.uid().unwrap_or_default();
        let generation = policy.metadata.generation;
        let is_recent = self
            .written
            .get(&uid)
            .is_some_and(|(at, of)| at.elapsed() < self.every && *of == generation);
        if is_recent || !is_news(policy.status.as_ref(), &status) {
            return Ok(());
        }
        // Others write conditions, too, and a list is written as a whole.
        let patch = json!({
            "metadata": {"resourceVersion": policy.metadata.resource_version},
            "status": status,
        });
        let namespace = policy.namespace().unwrap_or_default();
        let policies: Api<CachePolicy> = Api::namespaced(self.client.clone(), &namespace);
        let (name, params) = (policy.name_any(), PatchParams::default());
        match policies
            .patch_status(&name, &params, &Patch::Merge(patch))
            .await
        {
            // It was deleted, or it is newer than the watch: the next look shows it.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            Err(error) => Err(error),
            Ok(_) => {
                self.written.insert(uid, (Instant::now(), generation));
                Ok(())
            }
        }
    }
}

fn tenant(policy: &CachePolicy) -> Option<Tenant> {
    policy.namespace().and_then(|name| name.parse().ok())
}

/// The limits of a policy, and what is wrong with it. The rest of the policy counts.
fn limits_of(spec: &CachePolicySpec) -> (Limits, Vec<String>) {
    let mut problems = Vec::new();
    let budget = spec.budget.as_ref();
    let storage = budget.and_then(|budget| budget.storage.as_deref());
    let bytes = storage.and_then(|text| {
        let bytes = parse_bytes(text);
        if bytes.is_none() {
            problems.push(format!(
                "budget.storage: {text:?} is not a quantity such as 200Gi"
            ));
        }
        bytes
    });
    let artifacts = budget.and_then(|budget| budget.artifacts);
    let artifacts = artifacts.and_then(|count| {
        let fits = u64::try_from(count).ok();
        if fits.is_none() {
            problems.push(format!("budget.artifacts: {count} is negative"));
        }
        fits
    });
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
    let caches_ttl = time("caches", ttl.and_then(|ttl| ttl.caches.as_ref()));
    let outputs_ttl = time("outputs", ttl.and_then(|ttl| ttl.outputs.as_ref()));
    if spec.shared_budget.is_some() {
        problems.push("sharedBudget: this version does not use it".to_owned());
    }
    let limits = Limits {
        bytes,
        artifacts,
        caches_ttl,
        outputs_ttl,
    };
    (limits, problems)
}

/// The status that a policy should have. `used`: the limits of its namespace, and what the
/// namespace uses; `None`: not known now, so what was written stays.
fn status_of(policy: &CachePolicy, used: Option<&(Limits, Used)>, now: &str) -> CachePolicyStatus {
    let old = policy.status.as_ref();
    let condition = |of: &str, is_true: bool, reason: &str, message: String| {
        let status = if is_true { "True" } else { "False" };
        let mut before = old.iter().flat_map(|old| &old.conditions);
        let before = before.find(|one| one.of == of && one.status == status);
        PolicyCondition {
            of: of.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message,
            last_transition_time: before
                .map_or(now, |one| &one.last_transition_time)
                .to_owned(),
            observed_generation: policy.metadata.generation.unwrap_or_default(),
        }
    };
    let problems = limits_of(&policy.spec).1;
    let is_valid = problems.is_empty();
    let reason = if is_valid { "Valid" } else { "Invalid" };
    let mut conditions = vec![condition(VALID, is_valid, reason, problems.join("; "))];
    let has_budget = |limits: &Limits| limits.bytes.is_some() || limits.artifacts.is_some();
    if let Some((_, used)) = used.filter(|(limits, _)| has_budget(limits)) {
        conditions.push(if used.over_budget {
            let message = "volumes use more content of the namespace than the budget allows; it \
                           goes when their pods end";
            condition(OVER_BUDGET, true, "ContentInUse", message.to_owned())
        } else {
            condition(OVER_BUDGET, false, "WithinBudget", String::new())
        });
    }
    let is_kept = |one: &&PolicyCondition| match &*one.of {
        VALID => false,
        OVER_BUDGET => used.is_none(),
        _ => true,
    };
    let kept = old.iter().flat_map(|old| &old.conditions).filter(is_kept);
    conditions.extend(kept.cloned());
    let told = used.map(|(_, used)| crate::api::Used {
        storage: quantity(used.bytes),
        artifacts: number(used.artifacts),
    });
    CachePolicyStatus {
        used: told.or_else(|| old.and_then(|old| old.used.clone())),
        conditions,
    }
}

/// Whether a status says something else than the one before. The number of artifacts changes with
/// every commit: a percent of it is no news.
fn is_news(old: Option<&CachePolicyStatus>, new: &CachePolicyStatus) -> bool {
    let Some(old) = old else {
        return true;
    };
    let are_used = match (&old.used, &new.used) {
        (Some(old), Some(new)) => {
            let difference = old.artifacts.abs_diff(new.artifacts);
            old.storage != new.storage || difference > old.artifacts.unsigned_abs() / 100
        }
        (old, new) => old != new,
    };
    let is_known = |one: &PolicyCondition| old.conditions.contains(one);
    are_used || old.conditions.len() != new.conditions.len() || !new.conditions.iter().all(is_known)
}

#[cfg(test)]
mod tests {
    use super::*;
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
            caches_ttl: Some(14 * 24 * hour),
            outputs_ttl: Some(36 * hour),
        };
        assert_eq!(limits_of(&policy(all).spec), (expected, Vec::new()));
        assert_eq!(limits_of(&policy(json!({})).spec).0, Limits::default());
        let wrong = json!({
            "budget": {"storage": "99999999999Ei", "artifacts": 20},
            "ttl": {"caches": "0s", "outputs": "1h"},
            "sharedBudget": {"storage": "1Gi"},
        });
        let policy = policy(wrong);
        let (limits, problems) = limits_of(&policy.spec);
        let expected = Limits {
            artifacts: Some(20),
            outputs_ttl: Some(hour),
            ..Limits::default()
        };
        assert_eq!(limits, expected);
        assert_eq!(problems.len(), 3);
        let status = status_of(&policy, None, NOW);
        let [valid] = &status.conditions[..] else {
            panic!("{status:?}");
        };
        assert_eq!((&*valid.of, &*valid.status), ("Valid", "False"));
        assert!(valid.message.contains("budget.storage: \"99999999999Ei\""));
        assert!(valid.message.contains("ttl.caches: \"0s\""));
    }

    #[test]
    fn a_status_is_written_when_it_is_news() {
        let mut policy = policy(json!({"budget": {"storage": "1Gi"}}));
        let limits = limits_of(&policy.spec).0;
        let first = status_of(&policy, Some(&(limits, used(20 << 20, 500, false))), NOW);
        assert!(is_news(None, &first));
        assert_eq!(first.used.as_ref().expect("it is told").storage, "20Mi");
        policy.status = Some(first.clone());
        let now = |policy: &CachePolicy, used: Used| {
            let status = status_of(policy, Some(&(limits, used)), LATER);
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
        for used in [None, Some(&(limits, used(20 << 20, 500, false)))] {
            let status = status_of(&with_other, used, LATER);
            assert!(status.conditions.contains(&other));
            assert!(!is_news(with_other.status.as_ref(), &status));
        }
        // What is not known leaves what was written.
        let unknown = status_of(&policy, None, LATER);
        assert_eq!(
            (unknown.used.clone(), unknown.conditions.len()),
            (first.used, 2)
        );
        assert!(!is_news(policy.status.as_ref(), &unknown));
        policy.metadata.generation = Some(2);
        let unknown = status_of(&policy, None, LATER);
        assert!(is_news(policy.status.as_ref(), &unknown));
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
            (tenant, limits, used(number, 1, false))
        });
        figures.set(all.collect());
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
