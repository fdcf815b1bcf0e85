//! Rules of cache policies: which service accounts may commit which names of a namespace, and which
//! other namespaces may read them. Pure decisions; their order does not matter.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::str::FromStr;

use super::name::{Name, NameError, Reference, Tenant};

/// Names that a rule selects: `task-cache/main`, or `task-cache/main-*`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NamePattern {
    kind: NameKind,
    text: Box<str>,
    is_prefix: bool,
}

/// Why a text is no pattern.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// The kind is unknown.
    #[error("must begin with artifact/, resource-cache/ or task-cache/")]
    Kind,
    /// `*` is not at the end.
    #[error("may have one `*`, at its end")]
    Star,
    /// The part before `*`, or all of it, is no name.
    #[error("the name {0}")]
    Name(#[from] NameError),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum NameKind {
    Artifact,
    ResourceCache,
    TaskCache,
}

/// The kind and the name in it.
fn parts(reference: &Reference) -> (NameKind, &str) {
    match reference {
        Reference::Artifact(name) => (NameKind::Artifact, name.as_str()),
        Reference::ResourceCache(key) => (NameKind::ResourceCache, key.as_str()),
        Reference::TaskCache(key) => (NameKind::TaskCache, key.as_str()),
    }
}

impl FromStr for NamePattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        let (kind, name) = text.split_once('/').ok_or(PatternError::Kind)?;
        let kind = match kind {
            "artifact" => NameKind::Artifact,
            "resource-cache" => NameKind::ResourceCache,
            "task-cache" => NameKind::TaskCache,
            _ => return Err(PatternError::Kind),
        };
        let (name, is_prefix) = match name.strip_suffix('*') {
            Some(prefix) => (prefix, true),
            None => (name, false),
        };
        if name.contains('*') {
            return Err(PatternError::Star);
        }
        // The beginning of a label may end with `-`; a letter completes it.
        let whole = if is_prefix {
            text.replace('*', "x")
        } else {
            text.to_owned()
        };
        // The longest prefix is as long as the longest name, without the letter.
        match whole.parse::<Reference>() {
            Err(NameError::TooLong(length, most)) if is_prefix && length == most + 1 => {}
            parsed => drop(parsed?),
        }
        Ok(Self {
            kind,
            text: name.into(),
            is_prefix,
        })
    }
}

/// One rule of a policy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rule {
    /// The names that it selects.
    pub names: Vec<NamePattern>,
    /// The service accounts that may commit them. Empty: none. `None`: the rule says nothing about
    /// commits.
    pub commit: Option<BTreeSet<String>>,
    /// Other namespaces that may read them. Selectors of namespaces are resolved before.
    pub read: BTreeSet<Tenant>,
}

/// What all rules with one pattern grant together.
#[derive(Debug, Clone, Default)]
struct Grant {
    /// Service accounts, if any rule lists some.
    commit: Option<BTreeSet<String>>,
    read: BTreeSet<Tenant>,
}

impl Grant {
    fn add(&mut self, rule: &Rule) {
        if let Some(accounts) = &rule.commit {
            let ours = self.commit.get_or_insert_default();
            ours.extend(accounts.iter().cloned());
        }
        self.read.extend(rule.read.iter().cloned());
    }
}

/// The rules of all policies of a namespace. A decision looks at the patterns that fit a name, not
/// at all of them.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    exact: HashMap<(NameKind, Box<str>), Grant>,
    /// By length, so that a name is compared with one prefix of each length.
    prefixes: BTreeMap<(NameKind, usize), HashMap<Box<str>, Grant>>,
}

impl Rules {
    /// Builds the index.
    #[must_use]
    pub fn new<'a>(rules: impl IntoIterator<Item = &'a Rule>) -> Self {
        let mut index = Self::default();
        for rule in rules {
            for NamePattern {
                kind,
                text,
                is_prefix,
            } in &rule.names
            {
                let grant = if *is_prefix {
                    let length = index.prefixes.entry((*kind, text.len())).or_default();
                    length.entry(text.clone()).or_default()
                } else {
                    index.exact.entry((*kind, text.clone())).or_default()
                };
                grant.add(rule);
            }
        }
        index
    }

    /// The grants of the rules that select this name.
    fn selecting(&self, reference: &Reference) -> impl Iterator<Item = &Grant> {
        let (kind, text) = parts(reference);
        let exact = self.exact.get(&(kind, text.into()));
        let lengths = self.prefixes.range((kind, 0)..=(kind, text.len()));
        // A length may end within a character; then no prefix of this length fits.
        let prefixes =
            lengths.filter_map(move |((_, length), prefixes)| prefixes.get(text.get(..*length)?));
        exact.into_iter().chain(prefixes)
    }

    /// Whether a pod with this service account may commit content under this name. Without a rule
    /// that lists accounts, every pod of the namespace may.
    #[must_use]
    pub fn may_commit(&self, reference: &Reference, account: Option<&str>) -> bool {
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

    /// Whether pods of this other namespace may read content of this name.
    #[must_use]
    pub fn may_read(&self, reference: &Reference, reader: &Tenant) -> bool {
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

/// The policies of all namespaces, as a node knows them.
#[derive(Debug, Clone, Default)]
pub struct Policies(Option<HashMap<Tenant, Rules>>);

impl Policies {
    /// These policies. A namespace without rules may be missing. [`Policies::default`] is a node
    /// that never had any.
    #[must_use]
    pub fn known(rules: HashMap<Tenant, Rules>) -> Self {
        Self(Some(rules))
    }

    /// Whether a pod of the name's namespace may commit content under this name.
    #[must_use]
    pub fn commit(&self, name: &Name, account: Option<&str>) -> CommitRight {
        let Some(rules) = &self.0 else {
            return CommitRight::Unknown;
        };
        match rules.get(&name.tenant) {
            Some(rules) if !rules.may_commit(&name.reference, account) => CommitRight::NotAllowed,
            _ => CommitRight::Allowed,
        }
    }

    /// Whether a pod of this namespace may read content of this name. Its own namespace always
    /// may; another one only by a known rule.
    #[must_use]
    pub fn may_read(&self, name: &Name, reader: &Tenant) -> bool {
        let of_tenant = || self.0.as_ref()?.get(&name.tenant);
        *reader == name.tenant
            || of_tenant().is_some_and(|rules| rules.may_read(&name.reference, reader))
    }
}

#[cfg(test)]
mod tests {
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

    fn reference(text: &str) -> Reference {
        text.parse().expect(text)
    }

    #[test]
    fn a_star_may_stand_at_the_end_only() {
        let longest = format!("task-cache/{}*", "k".repeat(256));
        for good in [
            "artifact/a",
            "artifact/a-*",
            "task-cache/*",
            "resource-cache/a/b*",
            &longest,
        ] {
            good.parse::<NamePattern>().expect(good);
        }
        for (bad, error) in [
            ("main", PatternError::Kind),
            ("*", PatternError::Kind),
            ("cache/a", PatternError::Kind),
            ("task-cache/a*b", PatternError::Star),
            ("task-cache/a**", PatternError::Star),
            ("task-cache/", PatternError::Name(NameError::Empty)),
            ("artifact/A*", PatternError::Name(NameError::NotALabel)),
        ] {
            assert_eq!(bad.parse::<NamePattern>(), Err(error), "{bad}");
        }
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
            let index = Rules::new(turned);
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
    fn prefixes_and_names_of_many_bytes_a_character_meet() {
        let index = Rules::new(&[rule(&["task-cache/ü*", "task-cache/a*"], Some(&[]), &[])]);
        for (key, expected) in [("ü", false), ("über", false), ("鍵", true), ("a鍵", false)] {
            let name = reference(&format!("task-cache/{key}"));
            assert_eq!(index.may_commit(&name, None), expected, "{key}");
        }
    }

    /// A rule for each row of the matrix. The pod has the account `release`.
    fn policy(row: &str, names: &[&str]) -> Policies {
        let listing = match row {
            "no policy" => return Policies::known(HashMap::new()),
            "selected" => rule(names, None, &[]),
            "listed" => rule(names, Some(&["release"]), &["other"]),
            _ => rule(names, Some(&["nightly"]), &["another"]),
        };
        Policies::known([(tenant("ci"), Rules::new(&[listing]))].into())
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
    #[ignore = "a measurement, printed: cargo test --release --lib policy -- --ignored --nocapture"]
    fn cost_of_a_decision_with_a_thousand_policies() {
        let rules: Vec<Rule> = (0..1_000)
            .map(|n| {
                let prefix = format!("task-cache/{}-{n}-*", "b".repeat(n % 60));
                let name = format!("task-cache/branch-{n}");
                rule(&[&prefix, &name], Some(&["release"]), &["pr"])
            })
            .collect();
        let policies = Policies::known([(tenant("ci"), Rules::new(&rules))].into());
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
