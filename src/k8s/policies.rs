//! The cache policies of the cluster, the controller's side: `CachePolicy` objects are read, those
//! of a namespace are put together, and the nodes get them. Each object's condition `RulesValid`
//! says whether all its rules and size limits have effect.
//!
//! Nothing is sent before all objects are read: until then the nodes keep the policies that they
//! have. They do not wait for the conditions, which are written meanwhile.
//!
//! It needs `get`, `list` and `watch` on `cachepolicies` and `namespaces`, and `patch` on
//! `cachepolicies/status`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::APIResourceList;
use kube::core::PartialObjectMeta;
use kube::{Client, Resource as _, ResourceExt as _};
use tokio::sync::watch;

use super::conditions;
use super::watched::{Namespaces, Watched};
use crate::api::{CachePolicy, CachePolicyStatus, LabelOperator, NamespaceSelector, PolicyRule};
use crate::hub;
use crate::model::{NamePattern, NamespacePolicy, Rule, Tenant, parse_bytes};
use crate::sys::on_thread;

/// How long changes are gathered, and how often the controller looks without one.
const GATHER: Duration = Duration::from_millis(100);
const LOOK: Duration = Duration::from_secs(60);
/// How many rules the policies of a namespace may have together. Each selector is compared with all
/// namespaces, and one that selects none adds nothing to the length.
const MOST_RULES: usize = 1000;
/// The condition. Others of the same object are not ours.
const RULES_VALID: &str = "RulesValid";
/// Why a namespace is closed whose policies are not too long.
const UNREADABLE: &str = "a rule of a CachePolicy of the namespace has a name that cannot be read";
/// What [`NamespacePolicy::closed`] does.
const CLOSED: &str = "none of the namespace's rules and size limits count: no pod may commit there, \
                      and no other namespace may read";

/// The labels of all namespaces.
type Labels = BTreeMap<String, BTreeMap<String, String>>;

/// Keeps the nodes' policies up to date, until it is dropped.
pub async fn keep(
    client: Client,
    policies: Watched<CachePolicy>,
    namespaces: Namespaces,
    catalog: hub::Handle,
) {
    let (judged, to_say) = watch::channel(Judged::default());
    let keeper = Keeper {
        client: client.clone(),
        catalog,
        policies,
        namespaces,
        judged,
        last: None,
    };
    tokio::join!(keeper.run(), say(client, to_say));
}

/// Objects, and what is wrong with each.
type Judged = Arc<Vec<(Arc<CachePolicy>, Vec<String>)>>;

/// Writes the conditions that are other ones, of the objects as they were last judged.
async fn say(client: Client, mut judged: watch::Receiver<Judged>) {
    while judged.changed().await.is_ok() {
        let all = Judged::clone(&judged.borrow_and_update());
        let now = conditions::now();
        let news = all.iter().filter_map(|(object, problems)| {
            let status = status_of(object, problems, &now);
            let is_news = object.status.as_ref() != Some(&status);
            is_news.then(|| (Arc::clone(object), status))
        });
        let news = news.collect();
        conditions::write_all(&client, news).await;
    }
}

/// Whether the API server lists the kinds of the group, and there is no such kind. Every other
/// answer leaves it open.
fn lists_none(listed: kube::Result<APIResourceList>) -> bool {
    let (group, plural) = (CachePolicy::api_version(&()), CachePolicy::plural(&()));
    listed.is_ok_and(|listed| {
        listed.group_version == group
            && !listed.resources.is_empty()
            && listed.resources.iter().all(|kind| kind.name != plural)
    })
}

struct Keeper {
    client: Client,
    catalog: hub::Handle,
    policies: Watched<CachePolicy>,
    namespaces: Namespaces,
    /// For [`say`]. Each look sends, changed or not, so a write that failed is tried again.
    judged: watch::Sender<Judged>,
    /// What was compiled last, and what was wrong with each object.
    last: Option<(Input, Vec<Vec<String>>)>,
}

impl Keeper {
    async fn run(mut self) {
        let (mut policies, mut namespaces) = (self.policies.changes(), self.namespaces.changes());
        loop {
            policies.mark_unchanged();
            namespaces.mark_unchanged();
            self.step().await;
            tokio::select! {
                _ = policies.changed() => tokio::time::sleep(GATHER).await,
                _ = namespaces.changed() => tokio::time::sleep(GATHER).await,
                () = tokio::time::sleep(LOOK) => {}
            }
        }
    }

    async fn step(&mut self) {
        let are_known =
            self.namespaces.is_listed() && (self.policies.is_listed() || self.is_undefined().await);
        if !are_known {
            return;
        }
        let input = Input::new(self.policies.all(), &self.namespaces.all());
        let objects = input.objects.clone();
        if let Err(error) = self.compile_news(input).await {
            tracing::warn!(%error, "the cache policies could not be put together yet; retrying");
            return;
        }
        let problems = self.last.iter().flat_map(|(_, problems)| problems.clone());
        let judged = objects.into_iter().zip(problems).collect();
        self.judged.send_replace(Arc::new(judged));
    }

    /// Compiles the policies if they are other ones, on a thread of its own: many rules with
    /// selectors, in a cluster of many namespaces, take seconds.
    async fn compile_news(&mut self, input: Input) -> std::io::Result<()> {
        if self.last.as_ref().is_some_and(|(last, _)| *last == input) {
            return Ok(());
        }
        let compiled = on_thread("policies", move || {
            let compiled = compile(&input.objects, &input.labels);
            (input, compiled)
        });
        let (input, Compiled { policies, problems }) = compiled.await?;
        self.catalog.set_policies(policies);
        self.last = Some((input, problems));
        Ok(())
    }

    /// Whether the kind is not defined at the API server. Then there is no policy.
    async fn is_undefined(&self) -> bool {
        self.policies.is_not_found() && {
            let group = CachePolicy::api_version(&());
            lists_none(self.client.list_api_group_resources(&group).await)
        }
    }
}

/// What [`compile`] reads. Two are equal if that is, whatever else the objects say.
struct Input {
    /// In the order of their namespaces and names.
    objects: Vec<Arc<CachePolicy>>,
    labels: Labels,
}

impl Input {
    fn new(
        mut objects: Vec<Arc<CachePolicy>>,
        namespaces: &[Arc<PartialObjectMeta<Namespace>>],
    ) -> Self {
        objects.sort_by_cached_key(|it| (it.namespace(), it.name_any()));
        let labels = namespaces.iter();
        let labels = labels.map(|it| (it.name_any(), it.labels().clone()));
        Self {
            objects,
            labels: labels.collect(),
        }
    }
}

impl PartialEq for Input {
    fn eq(&self, other: &Self) -> bool {
        let same = |(one, other): (&Arc<CachePolicy>, &Arc<CachePolicy>)| {
            one.metadata.namespace == other.metadata.namespace && one.spec == other.spec
        };
        self.labels == other.labels
            && self.objects.len() == other.objects.len()
            && self.objects.iter().zip(&other.objects).all(same)
    }
}

/// The status that an object should have.
fn status_of(object: &CachePolicy, problems: &[String], now: &str) -> CachePolicyStatus {
    let (reason, message) = if problems.is_empty() {
        ("Valid", "all rules have effect".to_owned())
    } else {
        ("Invalid", problems.join("; "))
    };
    let is_valid = problems.is_empty();
    let valid = conditions::condition(object, RULES_VALID, is_valid, reason, &message, now);
    let mut status = object.status.clone().unwrap_or_default();
    conditions::set(&mut status.conditions, valid);
    status
}

/// The policies of all namespaces, and what is wrong with each object, in the order of the objects.
struct Compiled {
    policies: BTreeMap<Tenant, NamespacePolicy>,
    problems: Vec<Vec<String>>,
}

fn compile(objects: &[Arc<CachePolicy>], namespaces: &Labels) -> Compiled {
    let mut all: BTreeMap<Tenant, Together> = BTreeMap::new();
    let tenant = |object: &CachePolicy| object.namespace().unwrap_or_default().parse::<Tenant>();
    let mut problems = Vec::new();
    for object in objects {
        let mut together = tenant(object).map(|tenant| all.entry(tenant).or_default());
        if let Ok(together) = &mut together {
            together.count(object.spec.rules.len());
        }
        // Each rule may select all namespaces: what is too large is not expanded further.
        if together.as_ref().is_ok_and(|it| it.is_too_large()) {
            problems.push(Vec::new());
            continue;
        }
        let (policy, problem) = of_object(object, namespaces);
        problems.push(problem);
        if let Ok(together) = together {
            together.add(policy);
        }
    }
    for (object, problems) in objects.iter().zip(&mut problems) {
        let together = tenant(object).ok().and_then(|tenant| all.get(&tenant));
        if let Some(why) = together.and_then(|it| it.closed.as_ref()) {
            // A long message is cut at its end.
            problems.insert(0, format!("{why}, so {CLOSED}"));
        }
    }
    let policies = all.into_iter().map(|(tenant, together)| {
        let policy = match together.closed {
            None => together.policy,
            Some(_) => NamespacePolicy::closed(),
        };
        (tenant, policy)
    });
    let policies = policies.filter(|(_, policy)| *policy != NamespacePolicy::default());
    Compiled {
        policies: policies.collect(),
        problems,
    }
}

/// The policies of a namespace so far. Those that are too large are dropped.
#[derive(Default)]
struct Together {
    policy: NamespacePolicy,
    /// How many rules its objects have.
    rules: usize,
    /// At least their length as JSON.
    bytes: usize,
    /// Why they cannot be used, if they cannot.
    closed: Option<String>,
}

impl Together {
    fn is_too_large(&self) -> bool {
        self.rules > MOST_RULES || self.bytes > NamespacePolicy::MOST_BYTES
    }

    /// Counts the rules of one more object, before they are expanded.
    fn count(&mut self, rules: usize) {
        self.rules = self.rules.saturating_add(rules);
        if self.is_too_large() {
            self.policy = NamespacePolicy::default();
            self.closed.get_or_insert_with(|| {
                format!("the policies of the namespace have more than {MOST_RULES} rules together")
            });
        }
    }

    /// Adds the policy of one more object. Without one, its names would be open, or other rules
    /// would decide about them.
    fn add(&mut self, policy: Option<NamespacePolicy>) {
        if policy.is_none() {
            self.closed = Some(UNREADABLE.to_owned());
        }
        let policy = policy.unwrap_or_default();
        self.bytes = self.bytes.saturating_add(length(&policy));
        self.policy.add(policy);
        if self.is_too_large() {
            // Together they are shorter than one by one.
            self.bytes = length(&self.policy);
        }
        if self.is_too_large() {
            self.policy = NamespacePolicy::default();
            self.closed.get_or_insert_with(|| {
                format!(
                    "the policies of the namespace have more than {} bytes together, with the \
                     namespaces that they select",
                    NamespacePolicy::MOST_BYTES
                )
            });
        }
    }
}

/// The length of a policy as JSON.
fn length(policy: &NamespacePolicy) -> usize {
    serde_json::to_vec(policy).map_or(usize::MAX, |bytes| bytes.len())
}

/// What an object says to the nodes, and what is wrong with it. The definition of the kind refuses
/// most of that. `None`: the names of a rule are not known, so the namespace is closed.
fn of_object(object: &CachePolicy, namespaces: &Labels) -> (Option<NamespacePolicy>, Vec<String>) {
    let mut problems = Vec::new();
    let spec = &object.spec;
    let mut bytes = |field: &str, text: Option<&String>| {
        let text = text?;
        let bytes = parse_bytes(text).filter(|bytes| *bytes > 0);
        if bytes.is_none() {
            problems.push(format!("{field}: {text:?} is not a positive quantity"));
        }
        bytes
    };
    let limits = spec.size_limit.as_ref();
    let cache_limit = bytes("sizeLimit.caches", limits.and_then(|it| it.caches.as_ref()));
    let output_limit = bytes(
        "sizeLimit.outputs",
        limits.and_then(|it| it.outputs.as_ref()),
    );
    let rules = spec.rules.iter().enumerate();
    let rules = rules.map(|(number, rule)| {
        let mut wrong = |why: String| problems.push(format!("rules[{number}].{why}"));
        of_rule(rule, namespaces, &mut wrong)
    });
    // All of them are looked at.
    let rules: Vec<Option<Rule>> = rules.collect();
    let rules: Option<Vec<Rule>> = rules.into_iter().collect();
    let policy = rules.map(|rules| NamespacePolicy {
        rules,
        cache_limit,
        output_limit,
    });
    (policy, problems)
}

/// `None`: one of its names cannot be read.
fn of_rule(rule: &PolicyRule, namespaces: &Labels, wrong: &mut impl FnMut(String)) -> Option<Rule> {
    let mut names: Vec<NamePattern> = Vec::new();
    for name in &rule.names {
        match name.parse() {
            Ok(pattern) => names.push(pattern),
            Err(error) => wrong(format!("names: {name:?} {error}")),
        }
    }
    let mut read = BTreeSet::new();
    let listed = rule.read.as_ref();
    for namespace in listed.map_or(&[][..], |it| &it.namespaces) {
        match namespace.parse::<Tenant>() {
            Ok(tenant) => drop(read.insert(tenant)),
            Err(error) => wrong(format!("read.namespaces: {namespace:?} {error}")),
        }
    }
    if let Some(selector) = listed.and_then(|it| it.namespace_selector.as_ref()) {
        if let Some(why) = problem_of(selector) {
            wrong(format!("read.namespaceSelector: {why}"));
        } else {
            let selected = namespaces.iter().filter(|(_, it)| selects(selector, it));
            read.extend(selected.filter_map(|(name, _)| name.parse::<Tenant>().ok()));
        }
    }
    let commit = rule.commit.as_ref();
    (names.len() == rule.names.len()).then(|| Rule {
        names,
        commit: commit.map(|it| it.service_accounts.iter().cloned().collect()),
        read,
    })
}

/// Why a selector selects nothing.
fn problem_of(selector: &NamespaceSelector) -> Option<String> {
    let mut all = selector.match_expressions.iter();
    let wrong = all.find(|it| {
        let needs_values = matches!(it.operator, LabelOperator::In | LabelOperator::NotIn);
        needs_values == it.values.is_empty()
    })?;
    let (key, operator) = (&wrong.key, wrong.operator);
    Some(format!(
        "{operator:?} of label {key:?}: In and NotIn have values, Exists and DoesNotExist have none"
    ))
}

/// Whether a selector selects a namespace with these labels.
fn selects(selector: &NamespaceSelector, labels: &BTreeMap<String, String>) -> bool {
    let mut equal = selector.match_labels.iter();
    let mut required = selector.match_expressions.iter();
    equal.all(|(key, value)| labels.get(key) == Some(value))
        && required.all(|it| {
            let value = labels.get(&it.key);
            let is_listed = value.is_some_and(|value| it.values.contains(value));
            match it.operator {
                LabelOperator::In => is_listed,
                LabelOperator::NotIn => !is_listed,
                LabelOperator::Exists => value.is_some(),
                LabelOperator::DoesNotExist => value.is_none(),
            }
        })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::distribution::roster::NoNode;
    use crate::k8s::client::client_of;
    use crate::model::{CommitRight, Name, Policies};

    const NOW: &str = "2026-11-25T17:00:00Z";
    const LATER: &str = "2026-11-25T17:01:00Z";

    fn object(namespace: &str, spec: serde_json::Value) -> Arc<CachePolicy> {
        let spec = serde_json::from_value(spec).expect("a specification");
        let mut object = CachePolicy::new("policy", spec);
        object.metadata.namespace = Some(namespace.to_owned());
        object.metadata.generation = Some(3);
        Arc::new(object)
    }

    fn namespaces() -> Labels {
        let team = |team: &str| BTreeMap::from([("team".to_owned(), team.to_owned())]);
        [
            ("ci", BTreeMap::new()),
            ("pay-1", team("payments")),
            ("pay-2", team("payments")),
            ("shop", team("shop")),
        ]
        .map(|(name, labels)| (name.to_owned(), labels))
        .into()
    }

    fn tenant(name: &str) -> Tenant {
        name.parse().expect("a label")
    }

    fn name(reference: &str) -> Name {
        Name {
            tenant: tenant("ci"),
            reference: reference.parse().expect("a reference"),
        }
    }

    #[test]
    fn the_policies_of_a_namespace_are_put_together_and_selectors_resolved() {
        let all = [
            object(
                "ci",
                json!({
                    "sizeLimit": {"caches": "5Gi", "outputs": "2Gi"},
                    "rules": [{
                        "names": ["task-cache/main-*"],
                        "commit": {"serviceAccounts": ["release"]},
                        "read": {"namespaces": ["pr"],
                                 "namespaceSelector": {"matchLabels": {"team": "payments"}}},
                    }],
                }),
            ),
            object(
                "ci",
                json!({
                    "sizeLimit": {"caches": "1Gi"},
                    "rules": [{"names": ["task-cache/main-*"],
                               "commit": {"serviceAccounts": ["nightly"]}}],
                }),
            ),
            object("other", json!({"budget": {"storage": "1Gi"}})),
        ];
        let Compiled { policies, problems } = compile(&all, &namespaces());
        assert_eq!(problems, [const { Vec::<String>::new() }; 3]);
        assert_eq!(policies.len(), 1, "a budget is nothing for nodes");
        let policies = Policies::known(policies);
        let cache = name("task-cache/main-1");
        for (account, right) in [
            ("release", CommitRight::Allowed),
            ("nightly", CommitRight::Allowed),
            ("default", CommitRight::NotAllowed),
        ] {
            assert_eq!(policies.commit(&cache, Some(account)), right, "{account}");
        }
        for (reader, may) in [
            ("pr", true),
            ("pay-1", true),
            ("pay-2", true),
            ("shop", false),
        ] {
            assert_eq!(policies.may_read(&cache, &tenant(reader)), may, "{reader}");
        }
        assert_eq!(policies.size_limit(&cache), Some(1 << 30));
        assert_eq!(policies.size_limit(&name("artifact/a")), Some(2 << 30));
    }

    #[test]
    fn only_a_list_of_the_group_without_the_kind_says_that_there_are_no_policies() {
        const GROUP: &str = "baggageclaim.concourse-ci.org/v1alpha1";
        let list = |group: &str, kinds: &[&str]| {
            let kind = |name: &&str| {
                json!({"name": name, "singularName": "", "namespaced": true,
                                            "kind": "K", "verbs": []})
            };
            let kinds: Vec<_> = kinds.iter().map(kind).collect();
            let list = json!({"kind": "APIResourceList", "apiVersion": "v1",
                              "groupVersion": group, "resources": kinds});
            serde_json::from_value(list).expect("a list")
        };
        assert!(lists_none(Ok(list(GROUP, &["pools", "cachepolicies.x"]))));
        assert!(!lists_none(Ok(list(GROUP, &["pools", "cachepolicies"]))));
        assert!(!lists_none(Ok(list(GROUP, &[]))));
        assert!(!lists_none(Ok(list("v1", &["pods"]))));
        assert!(!lists_none(Ok(APIResourceList::default())));
        let not_found = kube::core::Status::failure("not found", "NotFound").with_code(404);
        assert!(!lists_none(Err(kube::Error::Api(not_found.boxed()))));
    }

    #[test]
    fn a_selector_is_that_of_kubernetes() {
        let selector = |it| serde_json::from_value::<NamespaceSelector>(it).expect("a selector");
        let expression = |operator: &str, values: &[&str]| {
            selector(json!({"matchExpressions":
                [{"key": "team", "operator": operator, "values": values}]}))
        };
        for (selector, expected) in [
            (selector(json!({})), &["ci", "pay-1", "pay-2", "shop"][..]),
            (expression("In", &["shop", "x"]), &["shop"]),
            (expression("NotIn", &["payments"]), &["ci", "shop"]),
            (expression("Exists", &[]), &["pay-1", "pay-2", "shop"]),
            (expression("DoesNotExist", &[]), &["ci"]),
        ] {
            assert_eq!(problem_of(&selector), None);
            let namespaces = namespaces();
            let selected = namespaces.iter().filter(|(_, it)| selects(&selector, it));
            let selected: Vec<&str> = selected.map(|(name, _)| name.as_str()).collect();
            assert_eq!(selected, expected);
        }
        for wrong in [expression("In", &[]), expression("Exists", &["x"])] {
            assert!(problem_of(&wrong).is_some());
        }
    }

    #[test]
    fn what_has_no_effect_is_said_and_what_is_too_large_closes_the_namespace() {
        let wrong = json!({
            "sizeLimit": {"caches": "0"},
            "rules": [{
                "names": ["task-cache/a*b", "task-cache/good"],
                "commit": {"serviceAccounts": []},
                "read": {"namespaces": ["A"], "namespaceSelector": {
                    "matchExpressions": [{"key": "team", "operator": "In"}]}},
            }],
        });
        let all = [object("ci", wrong)];
        let Compiled { policies, problems } = compile(&all, &namespaces());
        let said = problems[0].join("\n");
        for field in [
            "sizeLimit.caches",
            "names: \"task-cache/a*b\"",
            "read.namespaces",
            "In of",
        ] {
            assert!(said.contains(field), "{said}");
        }
        assert_eq!(policies[&tenant("ci")], NamespacePolicy::closed());
        // Whatever another object says.
        let open = json!({"rules": [{"names": ["task-cache/*"],
                                     "commit": {"serviceAccounts": ["x"]}}]});
        for both in [
            [all[0].clone(), object("ci", open.clone())],
            [object("ci", open.clone()), all[0].clone()],
        ] {
            let Compiled { policies, problems } = compile(&both, &namespaces());
            assert_eq!(policies[&tenant("ci")], NamespacePolicy::closed());
            for problems in problems {
                let why = format!("{UNREADABLE}, so {CLOSED}");
                assert_eq!(problems[0], why);
            }
        }

        let mut written = CachePolicy::clone(&all[0]);
        let first = status_of(&written, &problems[0], NOW);
        let [condition] = &first.conditions[..] else {
            panic!("{first:?}");
        };
        assert_eq!(
            (condition.status.as_str(), condition.observed_generation),
            ("False", 3)
        );
        written.status = Some(first.clone());
        assert_eq!(status_of(&written, &problems[0], LATER), first, "it stays");
        let fine = &status_of(&written, &[], LATER).conditions;
        assert_eq!(fine.len(), 1);
        assert_eq!(
            (&*fine[0].status, &*fine[0].last_transition_time),
            ("True", LATER)
        );

        let accounts: Vec<String> = (0..100)
            .map(|it| format!("{it}-{}", "a".repeat(240)))
            .collect();
        let rule = json!({"names": ["task-cache/x"], "commit": {"serviceAccounts": accounts}});
        let rules: Vec<_> = std::iter::repeat_n(rule, 30).collect();
        let all = [
            object("ci", json!({"rules": rules})),
            object("other", json!({"sizeLimit": {"caches": "1Gi"}})),
        ];
        let Compiled { policies, problems } = compile(&all, &namespaces());
        assert_eq!(policies[&tenant("ci")], NamespacePolicy::closed());
        assert!(problems[0][0].ends_with(CLOSED), "{problems:?}");
        assert!(problems[1].is_empty() && policies.contains_key(&tenant("other")));
    }

    #[tokio::test]
    async fn policies_are_compiled_on_another_thread_and_only_if_they_changed() {
        let client = client_of(|_| None);
        let address = "127.0.0.1:0".parse().expect("an address");
        let hub = hub::Hub::open(address, Arc::new(NoNode), LOOK).await;
        let (policies, _) = Watched::open(client.clone(), "CachePolicies");
        let (namespaces, _) = Namespaces::open(client.clone(), "namespaces");
        let mut keeper = Keeper {
            client,
            catalog: hub.expect("it opens").handle(),
            policies,
            namespaces,
            judged: watch::Sender::default(),
            last: None,
        };
        let labels: Labels = (0..2_000)
            .map(|it| (format!("namespace-{it}"), BTreeMap::new()))
            .collect();
        let rule = json!({"names": ["task-cache/x"], "read": {"namespaceSelector": {}}});
        let rules: Vec<_> = std::iter::repeat_n(rule, 10).collect();
        let input = |spec: serde_json::Value, status: Option<CachePolicyStatus>| {
            let mut object = CachePolicy::clone(&object("ci", spec));
            object.status = status;
            Input {
                objects: vec![Arc::new(object)],
                labels: labels.clone(),
            }
        };
        let many = json!({"rules": rules});
        let is_ready = async |keeper: &mut Keeper, input| {
            let compiling = std::pin::pin!(keeper.compile_news(input));
            futures_util::poll!(compiling).is_ready()
        };
        // The other thread may be faster than this one, but hardly each time.
        let mut gives_way = false;
        for _ in 0..10 {
            keeper.last = None;
            gives_way |= !is_ready(&mut keeper, input(many.clone(), None)).await;
        }
        assert!(gives_way, "it is compiled here");
        let done = keeper.compile_news(input(many.clone(), None)).await;
        done.expect("compiled");
        let changed = Some(CachePolicyStatus::default());
        let told = input(many.clone(), changed);
        // Without another thread, it is done at once.
        assert!(is_ready(&mut keeper, told).await, "nothing is new");
        let fewer = || input(json!({"rules": rules[1..]}), None);
        let mut moved = fewer();
        moved.labels.pop_first();
        for new in [fewer(), moved] {
            let (objects, labels) = (new.objects.clone(), new.labels.clone());
            keeper.compile_news(new).await.expect("compiled");
            let last = keeper.last.as_ref().map(|(last, _)| last);
            assert!(last == Some(&Input { objects, labels }));
        }
    }

    #[test]
    fn objects_of_a_namespace_that_is_too_large_already_are_not_expanded() {
        let namespaces: Labels = (0..500)
            .map(|it| (format!("namespace-{it}"), BTreeMap::new()))
            .collect();
        let rule = json!({"names": ["task-cache/x"], "read": {"namespaceSelector": {}}});
        let rules: Vec<_> = std::iter::repeat_n(rule, 100).collect();
        // A defect that only the expansion finds.
        let wrong = json!({"sizeLimit": {"caches": "0"}, "rules": rules});
        let mut all = vec![object("ci", wrong.clone()); 3];
        all.push(object("other", wrong));
        let Compiled { policies, problems } = compile(&all[..1], &namespaces);
        assert_eq!(policies[&tenant("ci")], NamespacePolicy::closed());
        assert_eq!(problems[0].len(), 2, "{problems:?}");
        let Compiled { policies, problems } = compile(&all, &namespaces);
        assert_eq!(policies[&tenant("ci")], NamespacePolicy::closed());
        let counts: Vec<usize> = problems.iter().map(Vec::len).collect();
        assert_eq!(counts, [2, 1, 1, 2], "{problems:?}");
        for problems in &problems {
            assert!(problems[0].ends_with(CLOSED), "{problems:?}");
        }
    }

    #[test]
    fn rules_that_select_no_namespace_count_too() {
        let never = json!([{"key": "team", "operator": "Exists"},
                           {"key": "team", "operator": "DoesNotExist"}]);
        let rule = json!({"names": ["task-cache/x"],
                          "read": {"namespaceSelector": {"matchExpressions": never}}});
        let of = |namespace: &str, rules: usize| {
            let rules: Vec<_> = std::iter::repeat_n(&rule, rules).collect();
            // A defect that only the expansion finds.
            object(
                namespace,
                json!({"sizeLimit": {"caches": "0"}, "rules": rules}),
            )
        };
        let mut all = vec![of("ci", 100); MOST_RULES / 100];
        all.push(of("other", 1));
        let Compiled { policies, .. } = compile(&all, &namespaces());
        assert_eq!(policies[&tenant("ci")].rules.len(), MOST_RULES);
        all.extend([of("ci", 1), of("ci", 100)]);
        let Compiled { policies, problems } = compile(&all, &namespaces());
        assert!(policies[&tenant("ci")] == NamespacePolicy::closed());
        assert_eq!(policies[&tenant("other")].rules.len(), 1);
        let [.., other, first, last] = &problems[..] else {
            panic!("{problems:?}");
        };
        assert_eq!(other.len(), 1, "{other:?}");
        assert_eq!(first, last);
        let [why] = &last[..] else {
            panic!("it is expanded: {last:?}");
        };
        assert!(why.contains("more than 1000 rules together"), "{why}");
    }

    #[test]
    fn many_small_objects_count_with_their_length_together() {
        // So long that the length of all ends before the number of rules does.
        let names: Vec<String> = (0..20)
            .map(|number| format!("task-cache/{number}-{}", "x".repeat(40)))
            .collect();
        let small = json!({"rules": [{"names": names}]});
        let policy = of_object(&object("ci", small.clone()), &namespaces()).0;
        let policy = policy.expect("it can be read");
        // Alone, each has the braces of a policy.
        let alone = length(&policy);
        let mut two = policy.clone();
        two.add(policy);
        let each = length(&two) - alone;
        assert!(each < alone);
        let fit = (NamespacePolicy::MOST_BYTES - alone) / each + 1;
        assert!(fit < MOST_RULES);
        let mut all = vec![object("ci", small); fit];
        assert_eq!(
            compile(&all, &namespaces()).policies[&tenant("ci")]
                .rules
                .len(),
            fit
        );
        all.push(all[0].clone());
        let Compiled { policies, .. } = compile(&all, &namespaces());
        assert_eq!(policies[&tenant("ci")], NamespacePolicy::closed());
    }

    #[test]
    fn the_braces_of_many_objects_do_not_count() {
        let small = json!({"sizeLimit": {"caches": "1Gi"}});
        let policy = of_object(&object("ci", small.clone()), &namespaces()).0;
        let alone = length(&policy.expect("it can be read"));
        let all = vec![object("ci", small); NamespacePolicy::MOST_BYTES / alone + 1];
        let Compiled { policies, .. } = compile(&all, &namespaces());
        assert_eq!(policies[&tenant("ci")].cache_limit, Some(1 << 30));
    }
}
