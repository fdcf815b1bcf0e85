//! The names of caches: entries have digests only. People list them, and `newest` searches the keys
//! of task caches. Authors and last uses are for people only.

use std::collections::BTreeMap;

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
    /// The task caches among them that had content. A version may be higher than that of the
    /// content that counts now, never lower: `newest` lowers it.
    newest: KeyIndex<Version>,
}

impl CacheNames {
    /// The name of a cache, which is kept unless there are too many. `current`: the content that
    /// counts now.
    pub(super) fn keep(
        &mut self,
        hash: NameHash,
        name: &Name,
        current: Option<Version>,
    ) -> Option<&mut Named> {
        if self.all.len() >= MAX_NAMED && !self.all.contains_key(&hash) {
            return None;
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

    pub(super) fn forget(&mut self, hash: &NameHash) {
        if let Some(named) = self.all.remove(hash) {
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
