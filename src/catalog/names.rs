//! The names of caches: entries have digests only. People list them, and `newest` searches the keys
//! of task caches. Authors and last uses are for people only.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::{CacheKey, KeyIndex, Name, Reference, Tenant, Timestamp};

use super::entry::Version;
use super::name::NameHash;

/// The most names of caches that are kept. Keys that change with every build would fill the memory.
pub const MAX_NAMED: usize = 100_000;

/// What a node tells of a cache beside its entry. Its name also decides what the beginning of a key
/// finds (`newest`); the rest is for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToldCache {
    /// Its name.
    pub name: Name,
    /// Which content: [`Version::tie`] of its entry.
    pub tie: u32,
    /// Who committed this content; `None`: not known.
    pub author: Option<Box<Author>>,
    /// When the node last used it; 0: not known.
    pub used: Timestamp,
}

/// Who committed content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Author {
    /// The pod's service account.
    pub account: Option<Box<str>>,
    /// The pod.
    pub pod: Box<str>,
    /// Their node.
    pub node: Option<Box<str>>,
}

/// A cache by its name, with the facts for people.
#[derive(Debug)]
pub(super) struct Named {
    pub(super) name: Name,
    /// The author of the content that has this tie.
    pub(super) author: Option<(u32, Box<Author>)>,
    /// The last use on any node; 0: not known.
    pub(super) used: Timestamp,
}

/// The names of caches: entries have digests only.
#[derive(Debug, Default)]
pub(super) struct CacheNames {
    pub(super) all: BTreeMap<NameHash, Named>,
    /// The same names, of each namespace.
    of: BTreeMap<Tenant, BTreeSet<NameHash>>,
    /// The task caches among them that had content. A version may be higher than that of the
    /// content that counts now, never lower: `newest` lowers it.
    newest: KeyIndex<Version>,
}

impl CacheNames {
    /// The name of a cache, which is kept unless there are too many, and the namespace has the most
    /// of all. `current`: the content that counts now.
    pub(super) fn keep(
        &mut self,
        hash: NameHash,
        name: &Name,
        current: Option<Version>,
    ) -> Option<&mut Named> {
        if !self.all.contains_key(&hash) {
            if !self.make_space(&name.tenant) {
                return None;
            }
            self.of.entry(name.tenant.clone()).or_default().insert(hash);
        }
        if let (Some(version), Reference::TaskCache(key)) = (current, &name.reference)
            && self.newest.get(&name.tenant, key) < current
        {
            self.newest.set(&name.tenant, key, version);
        }
        let new = || Named {
            name: name.clone(),
            author: None,
            used: Timestamp::default(),
        };
        Some(self.all.entry(hash).or_insert_with(new))
    }

    /// Whether one more name of a namespace can be kept. If there are too many, the namespace with
    /// the most gives one, unless this one would then have as many. So one namespace cannot
    /// keep the names of all others out.
    fn make_space(&mut self, tenant: &Tenant) -> bool {
        if self.all.len() < MAX_NAMED {
            return true;
        }
        let own = self.of.get(tenant).map_or(0, BTreeSet::len);
        let most = self.of.values().max_by_key(|names| names.len());
        let given = most.filter(|names| own + 1 < names.len());
        let Some(given) = given.and_then(BTreeSet::first).copied() else {
            return false;
        };
        self.forget(&given);
        true
    }

    pub(super) fn forget(&mut self, hash: &NameHash) {
        if let Some(named) = self.all.remove(hash) {
            let tenant = &named.name.tenant;
            if let Some(names) = self.of.get_mut(tenant) {
                names.remove(hash);
                if names.is_empty() {
                    self.of.remove(tenant);
                }
            }
            self.lower(&named.name, None);
        }
    }

    /// Forgets the names that no node has.
    pub(super) fn retain(&mut self, is_there: impl Fn(NameHash) -> bool) {
        let gone = self.all.keys().filter(|hash| !is_there(**hash));
        let gone: Vec<NameHash> = gone.copied().collect();
        for hash in gone {
            self.forget(&hash);
        }
    }

    /// The key with the highest version of all that begin so.
    pub(super) fn newest(&self, tenant: &Tenant, prefix: &CacheKey) -> Option<(CacheKey, Version)> {
        let (key, version) = self.newest.newest(tenant, prefix)?;
        Some((key.clone(), version))
    }

    /// Corrects the version of a name; `None`: it has no content.
    pub(super) fn lower(&mut self, name: &Name, version: Option<Version>) {
        let Reference::TaskCache(key) = &name.reference else {
            return;
        };
        match version {
            Some(version) => self.newest.set(&name.tenant, key, version),
            None => self.newest.remove(&name.tenant, key),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_that_has_all_names_gives_some_to_others() {
        let mut names = CacheNames::default();
        let keep = |names: &mut CacheNames, tenant: &str, key: usize| {
            let name = Name {
                tenant: tenant.parse().expect("a label"),
                reference: format!("task-cache/main-{key}")
                    .parse()
                    .expect("a reference"),
            };
            let version = Version {
                stamp: Timestamp(key as u64),
                tie: 1,
            };
            names
                .keep(NameHash::of(&name), &name, Some(version))
                .is_some()
        };
        for key in 0..MAX_NAMED {
            assert!(keep(&mut names, "greedy", key));
        }
        assert!(!keep(&mut names, "greedy", MAX_NAMED), "it has the most");
        assert!(keep(&mut names, "other", 7));
        assert!(keep(&mut names, "other", 8));
        assert!(keep(&mut names, "other", 7), "it is known");
        assert_eq!(names.all.len(), MAX_NAMED);
        let prefix = "main-".parse().expect("a key");
        let newest = |tenant: &str| {
            let tenant: Tenant = tenant.parse().expect("a label");
            let found = names.newest(&tenant, &prefix);
            (
                found.map(|found| found.0.to_string()),
                names.of[&tenant].len(),
            )
        };
        assert_eq!(newest("other"), (Some("main-8".to_owned()), 2));
        assert_eq!(newest("greedy").1, MAX_NAMED - 2);
    }

    #[test]
    fn namespaces_with_equally_many_names_take_none_of_each_other() {
        let mut names = CacheNames::default();
        let name = |tenant: &str, key: usize| Name {
            tenant: tenant.parse().expect("a label"),
            reference: format!("resource-cache/{key}")
                .parse()
                .expect("a reference"),
        };
        for key in 0..MAX_NAMED / 2 {
            for tenant in ["a", "b"] {
                let name = name(tenant, key);
                assert!(names.keep(NameHash::of(&name), &name, None).is_some());
            }
        }
        for tenant in ["a", "b"] {
            let name = name(tenant, MAX_NAMED);
            assert!(names.keep(NameHash::of(&name), &name, None).is_none());
        }
        names.retain(|_| false);
        assert!(names.of.is_empty() && names.all.is_empty());
    }
}
