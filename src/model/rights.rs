//! Decisions by the cache policies: who may commit content under a name, who may read it, and the
//! size limit of a volume that gives none. Pure. The order of rules does not matter. `policy` has
//! the rules.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::name::{CacheKey, Name, NameKind, Reference, Tenant};
use super::policy::{NamePattern, NamespacePolicy, Rule};
use super::volume::{SealPlan, VolumeRecord};

/// Places of rules in [`NamespacePolicy::rules`].
type Places = Vec<usize>;

/// The policy of a namespace, with an index of its rules: a decision looks at the patterns that fit
/// a name, not at all of them.
#[derive(Debug)]
struct Indexed {
    policy: NamespacePolicy,
    exact: HashMap<(NameKind, Box<str>), Places>,
    /// By length, so that a name is compared with one prefix of each length.
    prefixes: BTreeMap<(NameKind, usize), HashMap<Box<str>, Places>>,
}

impl Indexed {
    fn new(policy: NamespacePolicy) -> Self {
        let (mut exact, mut prefixes) = (HashMap::new(), BTreeMap::new());
        for (place, rule) in policy.rules.iter().enumerate() {
            for NamePattern {
                kind,
                text,
                is_prefix,
            } in &rule.names
            {
                let places: &mut Places = if *is_prefix {
                    let length: &mut HashMap<_, _> =
                        prefixes.entry((*kind, text.len())).or_default();
                    length.entry(text.clone()).or_default()
                } else {
                    exact.entry((*kind, text.clone())).or_default()
                };
                // A rule may have a pattern twice.
                if places.last() != Some(&place) {
                    places.push(place);
                }
            }
        }
        Self {
            policy,
            exact,
            prefixes,
        }
    }

    /// The rules that select this name.
    fn selecting<'a>(&'a self, reference: &'a Reference) -> impl Iterator<Item = &'a Rule> {
        let (kind, text) = (reference.kind(), reference.key());
        let exact = self.exact.get(&(kind, text.into())).into_iter();
        let exact = exact.flat_map(|places| self.rules(places));
        exact.chain(self.covering(kind, text))
    }

    /// The rules with a pattern with a `*` that fits all names that begin with this text.
    fn covering<'a>(&'a self, kind: NameKind, text: &'a str) -> impl Iterator<Item = &'a Rule> {
        let lengths = self.prefixes.range((kind, 0)..=(kind, text.len()));
        // A length may end within a character; then no prefix of this length fits.
        let places = lengths.filter_map(|((_, length), it)| it.get(text.get(..*length)?));
        places.flat_map(|places| self.rules(places))
    }

    fn rules<'a>(&'a self, places: &'a [usize]) -> impl Iterator<Item = &'a Rule> {
        places
            .iter()
            .filter_map(|place| self.policy.rules.get(*place))
    }

    /// Whether a pod with this service account may commit content under this name. Without a rule
    /// that lists accounts, every pod of the namespace may.
    fn may_commit(&self, reference: &Reference, account: Option<&str>) -> bool {
        let mut is_listed = false;
        for accounts in self
            .selecting(reference)
            .filter_map(|it| it.commit.as_ref())
        {
            if account.is_some_and(|account| accounts.contains(account)) {
                return true;
            }
            is_listed = true;
        }
        !is_listed
    }

    /// Whether pods of this other namespace may read all task caches whose key begins so: a rule's
    /// pattern covers them.
    fn may_read_all(&self, prefix: &CacheKey, reader: &Tenant) -> bool {
        let mut rights = self.covering(NameKind::TaskCache, prefix.as_str());
        rights.any(|it| it.read.contains(reader))
    }

    /// Whether pods of this other namespace may read content of this name.
    fn may_read(&self, reference: &Reference, reader: &Tenant) -> bool {
        self.selecting(reference).any(|it| it.read.contains(reader))
    }
}

/// The answer to a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommitRight {
    /// The content gets the name.
    Allowed,
    /// The content is discarded, and the pod runs to its end.
    NotAllowed,
    /// The policies are not known yet: the decision waits, as for a late outcome.
    Unknown,
}

/// The policies of all namespaces, as a node knows them. Cheap to change: the namespaces are
/// shared.
#[derive(Debug, Clone, Default)]
pub struct Policies(Option<HashMap<Tenant, Arc<Indexed>>>);

impl Policies {
    /// These policies. A namespace without a policy may be missing. [`Policies::default`] is a node
    /// that never had any.
    #[must_use]
    pub fn known(policies: impl IntoIterator<Item = (Tenant, NamespacePolicy)>) -> Self {
        let mut known = Self(Some(HashMap::new()));
        for (tenant, policy) in policies {
            known.put(tenant, policy);
        }
        known
    }

    /// Whether the node has ever had policies. That there are none is knowledge, too.
    #[must_use]
    pub fn are_known(&self) -> bool {
        self.0.is_some()
    }

    /// Replaces the policy of a namespace. One that says nothing is removed. Nothing changes while
    /// the others are not known.
    pub fn put(&mut self, tenant: Tenant, policy: NamespacePolicy) {
        let Some(all) = &mut self.0 else { return };
        if policy == NamespacePolicy::default() {
            all.remove(&tenant);
        } else {
            all.insert(tenant, Arc::new(Indexed::new(policy)));
        }
    }

    /// The policies, by namespace; `None`: they are not known.
    #[must_use]
    pub fn all(&self) -> Option<BTreeMap<&Tenant, &NamespacePolicy>> {
        let all = self.0.as_ref()?.iter();
        Some(all.map(|(tenant, it)| (tenant, &it.policy)).collect())
    }

    fn of(&self, tenant: &Tenant) -> Option<&Indexed> {
        self.0.as_ref()?.get(tenant).map(Arc::as_ref)
    }

    /// Whether a pod of the name's namespace may commit content under this name.
    #[must_use]
    pub fn commit(&self, name: &Name, account: Option<&str>) -> CommitRight {
        if !self.are_known() {
            return CommitRight::Unknown;
        }
        match self.of(&name.tenant) {
            Some(it) if !it.may_commit(&name.reference, account) => CommitRight::NotAllowed,
            _ => CommitRight::Allowed,
        }
    }

    /// Whether a volume may be committed as its plan says.
    #[must_use]
    pub fn commit_of(&self, plan: &SealPlan, record: &VolumeRecord) -> CommitRight {
        let account = record.pod.service_account.as_deref();
        self.commit(&plan.name(&record.tenant), account)
    }

    /// Whether a rule selects this name.
    #[must_use]
    pub fn select(&self, name: &Name) -> bool {
        let indexed = self.of(&name.tenant);
        indexed.is_some_and(|it| it.selecting(&name.reference).next().is_some())
    }

    /// Whether a pod of this namespace may read content of this name. Its own namespace always
    /// may; another one only by a known rule.
    #[must_use]
    pub fn may_read(&self, name: &Name, reader: &Tenant) -> bool {
        let by_rule = |it: &Indexed| it.may_read(&name.reference, reader);
        *reader == name.tenant || self.of(&name.tenant).is_some_and(by_rule)
    }

    /// Whether a pod of the namespace `reader` may read all task caches of `owner` whose key begins
    /// so. Where some of them are not for it, the pattern finds none: the answer would tell of
    /// them.
    #[must_use]
    pub fn may_read_all(&self, owner: &Tenant, prefix: &CacheKey, reader: &Tenant) -> bool {
        let by_rule = |it: &Indexed| it.may_read_all(prefix, reader);
        reader == owner || self.of(owner).is_some_and(by_rule)
    }

    /// The size limit in bytes of a volume that gives none and is committed under this name.
    #[must_use]
    pub fn size_limit(&self, name: &Name) -> Option<u64> {
        let policy = &self.of(&name.tenant)?.policy;
        match name.reference {
            Reference::Artifact(_) => policy.output_limit,
            Reference::ResourceCache(_) | Reference::TaskCache(_) => policy.cache_limit,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn tenant(name: &str) -> Tenant {
        name.parse().expect("a label")
    }

    fn rule(names: &[&str], commit: Option<&[&str]>, read: &[&str]) -> Rule {
        Rule {
            names: names.iter().map(|name| name.parse().expect(name)).collect(),
            commit: commit.map(|accounts| accounts.iter().map(ToString::to_string).collect()),
            read: read.iter().map(|name| tenant(name)).collect(),
        }
    }

    fn index(rules: impl IntoIterator<Item = Rule>) -> Indexed {
        Indexed::new(NamespacePolicy {
            rules: rules.into_iter().collect(),
            ..NamespacePolicy::default()
        })
    }

    fn reference(text: &str) -> Reference {
        text.parse().expect(text)
    }

    #[test]
    fn rules_are_a_union_in_any_order() {
        let rules = [
            rule(&["task-cache/main*"], Some(&["release"]), &[]),
            rule(&["task-cache/main"], Some(&["nightly"]), &["pr"]),
            // It says nothing about commits, so it opens none.
            rule(&["task-cache/*"], None, &["qa"]),
            rule(&["task-cache/frozen"], Some(&[]), &[]),
        ];
        for turn in 0..rules.len() {
            let turned = rules.iter().cycle().skip(turn).take(rules.len());
            let index = index(turned.cloned());
            for (name, account, expected) in [
                ("task-cache/main", Some("release"), true),
                ("task-cache/main", Some("nightly"), true),
                ("task-cache/main", Some("default"), false),
                ("task-cache/main", None, false),
                ("task-cache/main-2", Some("nightly"), false),
                ("task-cache/mai", Some("default"), true),
                ("task-cache/frozen", Some("release"), false),
                ("resource-cache/main", None, true),
            ] {
                let may = index.may_commit(&reference(name), account);
                assert_eq!(may, expected, "{name} {account:?}");
            }
            assert!(index.may_read(&reference("task-cache/main"), &tenant("pr")));
            assert!(!index.may_read(&reference("task-cache/main-2"), &tenant("pr")));
            assert!(index.may_read(&reference("task-cache/main-2"), &tenant("qa")));
            assert!(!index.may_read(&reference("artifact/main"), &tenant("qa")));
        }
    }

    #[test]
    fn all_keys_that_begin_so_are_read_only_by_a_pattern_that_covers_them() {
        let index = index([
            rule(&["task-cache/main-*"], None, &["pr"]),
            rule(&["task-cache/next-1"], None, &["pr"]),
            rule(&["resource-cache/*"], None, &["pr"]),
        ]);
        for (prefix, reader, expected) in [
            ("main-", "pr", true),
            ("main-2", "pr", true),
            ("main", "pr", false),
            ("next-1", "pr", false),
            ("other", "pr", false),
            ("main-", "qa", false),
        ] {
            let prefix: CacheKey = prefix.parse().expect("a key");
            let may = index.may_read_all(&prefix, &tenant(reader));
            assert_eq!(may, expected, "{prefix} {reader}");
        }
    }

    #[test]
    fn all_names_of_a_rule_share_its_accounts_and_readers() {
        let names: Vec<String> = (0..64).map(|it| format!("task-cache/{it}")).collect();
        let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
        names.extend(["task-cache/a*", "task-cache/0", "task-cache/0"]);
        let rules = [
            rule(&names, Some(&["release"]), &["pr"]),
            rule(&names, Some(&["nightly"]), &[]),
        ];
        let index = index(rules);
        let mut found = HashSet::new();
        for name in &names {
            let name = reference(&name.replace('*', "b"));
            let selecting: Vec<&Rule> = index.selecting(&name).collect();
            assert_eq!(selecting.len(), 2, "{name}");
            found.extend(selecting.into_iter().map(std::ptr::from_ref));
            assert!(index.may_commit(&name, Some("nightly")), "{name}");
        }
        assert_eq!(found.len(), 2, "one for each rule");
    }

    #[test]
    fn prefixes_and_names_of_many_bytes_a_character_meet() {
        let index = index([rule(&["task-cache/ü*", "task-cache/a*"], Some(&[]), &[])]);
        for (key, expected) in [("ü", false), ("über", false), ("鍵", true), ("a鍵", false)] {
            let name = reference(&format!("task-cache/{key}"));
            assert_eq!(index.may_commit(&name, None), expected, "{key}");
        }
    }

    /// A rule for each row of the matrix. The pod has the account `release`.
    fn policy(row: &str, names: &[&str]) -> Policies {
        let listing = match row {
            "no policy" => return Policies::known([]),
            "selected" => rule(names, None, &[]),
            "listed" => rule(names, Some(&["release"]), &["other"]),
            _ => rule(names, Some(&["nightly"]), &["another"]),
        };
        of_ci(vec![listing])
    }

    fn of_ci(rules: Vec<Rule>) -> Policies {
        let policy = NamespacePolicy {
            rules,
            ..NamespacePolicy::default()
        };
        Policies::known([(tenant("ci"), policy)])
    }

    /// What a pod with the account `release` in `reader` may: read content of `read` in the
    /// namespace `ci`, and then commit its fork in its own namespace.
    fn rights(policies: &Policies, reader: &str, read: &str, commit: Option<&str>) -> String {
        let name = |tenant: Tenant, text: &str| Name {
            tenant,
            reference: reference(text),
        };
        let reads = policies.may_read(&name(tenant("ci"), read), &tenant(reader));
        let commits =
            commit.map(|text| policies.commit(&name(tenant(reader), text), Some("release")));
        let commits = match commits {
            Some(CommitRight::Allowed) => "commits",
            Some(CommitRight::NotAllowed) => "discards",
            Some(CommitRight::Unknown) => "waits",
            None => "-",
        };
        format!("{} {commits}", if reads { "reads" } else { "misses" })
    }

    #[test]
    fn the_matrix_of_policies_kinds_namespaces_and_uses() {
        // Own key: read and committed. Restore key: read under another name than the one that is
        // committed, both under the policy. Input: only read.
        let cells: [(&str, &str, [&str; 3]); 8] = [
            (
                "no policy",
                "ci",
                ["reads commits", "reads commits", "reads -"],
            ),
            (
                "selected",
                "ci",
                ["reads commits", "reads commits", "reads -"],
            ),
            (
                "listed",
                "ci",
                ["reads commits", "reads commits", "reads -"],
            ),
            (
                "not listed",
                "ci",
                ["reads discards", "reads discards", "reads -"],
            ),
            // The other namespace has no policy of its own, so it commits there what it likes.
            (
                "no policy",
                "other",
                ["misses commits", "misses commits", "misses -"],
            ),
            (
                "selected",
                "other",
                ["misses commits", "misses commits", "misses -"],
            ),
            (
                "listed",
                "other",
                ["reads commits", "reads commits", "reads -"],
            ),
            (
                "not listed",
                "other",
                ["misses commits", "misses commits", "misses -"],
            ),
        ];
        for kind in ["resource-cache", "task-cache", "artifact"] {
            let [own, restore] = ["own", "restore"].map(|name| format!("{kind}/{name}"));
            for names in [vec![own.as_str(), &restore], vec![&*format!("{kind}/*")]] {
                for (row, reader, expected) in &cells {
                    let policies = policy(row, &names);
                    let found = [
                        rights(&policies, reader, &own, Some(&own)),
                        rights(&policies, reader, &restore, Some(&own)),
                        rights(&policies, reader, &own, None),
                    ];
                    assert_eq!(found, *expected, "{row} {kind} read from {reader}");
                }
            }
        }
        // A node that has never had policies reads its own namespace, and commits nothing.
        let unknown = Policies::default();
        assert_eq!(
            rights(&unknown, "ci", "task-cache/a", Some("task-cache/a")),
            "reads waits"
        );
        assert_eq!(rights(&unknown, "other", "task-cache/a", None), "misses -");
    }

    #[test]
    fn policies_of_one_namespace_hold_together_and_change_alone() {
        let mut both = NamespacePolicy {
            rules: vec![rule(&["task-cache/a"], Some(&["one"]), &[])],
            cache_limit: Some(5),
            output_limit: None,
        };
        both.add(NamespacePolicy {
            rules: vec![rule(&["task-cache/a"], Some(&["two"]), &[])],
            cache_limit: Some(3),
            output_limit: Some(9),
        });
        let name = |reference: &str| Name {
            tenant: tenant("ci"),
            reference: super::tests::reference(reference),
        };
        let mut policies = Policies::known([(tenant("ci"), both.clone())]);
        let cache = name("task-cache/a");
        for (account, expected) in [
            (Some("one"), CommitRight::Allowed),
            (Some("two"), CommitRight::Allowed),
            (Some("three"), CommitRight::NotAllowed),
            (None, CommitRight::NotAllowed),
        ] {
            assert_eq!(policies.commit(&cache, account), expected, "{account:?}");
        }
        assert!(policies.select(&cache) && !policies.select(&name("task-cache/b")));
        assert_eq!(policies.size_limit(&cache), Some(3));
        assert_eq!(policies.size_limit(&name("artifact/a")), Some(9));
        let text = serde_json::to_string(&policies.all()).expect("JSON");
        let again: HashMap<Tenant, NamespacePolicy> = serde_json::from_str(&text).expect("it");
        assert_eq!(again[&tenant("ci")], both);

        let before = policies.clone();
        policies.put(tenant("ci"), NamespacePolicy::closed());
        for kind in ["task-cache/a", "resource-cache/b", "artifact/c"] {
            let right = policies.commit(&name(kind), Some("one"));
            assert_eq!(right, CommitRight::NotAllowed, "{kind}");
        }
        policies.put(tenant("ci"), NamespacePolicy::default());
        assert_eq!(policies.commit(&cache, None), CommitRight::Allowed);
        assert_eq!(before.commit(&cache, None), CommitRight::NotAllowed);
        // A change of one namespace is not all that there is to know.
        let mut unknown = Policies::default();
        unknown.put(tenant("ci"), both);
        assert_eq!(unknown.commit(&cache, None), CommitRight::Unknown);
    }

    #[test]
    #[ignore = "a measurement, printed: cargo test --release --lib rights -- --ignored --nocapture"]
    fn cost_of_a_decision_with_a_thousand_policies() {
        let rules: Vec<Rule> = (0..1_000)
            .map(|n| {
                let prefix = format!("task-cache/{}-{n}-*", "b".repeat(n % 60));
                let name = format!("task-cache/branch-{n}");
                rule(&[&prefix, &name], Some(&["release"]), &["pr"])
            })
            .collect();
        let policies = of_ci(rules);
        let name = Name {
            tenant: tenant("ci"),
            reference: reference(&format!("task-cache/{}", "b".repeat(200))),
        };
        let began = std::time::Instant::now();
        for _ in 0..100_000 {
            assert_eq!(
                std::hint::black_box(&policies).commit(&name, Some("x")),
                CommitRight::Allowed
            );
        }
        println!("{} ns a decision", began.elapsed().as_nanos() / 100_000);
    }
}
