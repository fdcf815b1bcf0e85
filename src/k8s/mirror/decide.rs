//! What the mirror writes: a pure function of the caches, the objects, and the limits. No clock and
//! no I/O.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use kube::ResourceExt as _;
use kube::api::ObjectMeta;

use crate::api::{CLEAR, Cache, CacheCommit, CacheSpec, CacheStatus, MIRRORED, NameKind, number};
use crate::catalog::{Author, Listed, NameHash};
use crate::model::{ArtifactName, Reference, Timestamp, readable_bytes};

/// The longest beginning of a key in the name of an object that cannot be the key.
const MOST_READABLE: usize = 40;

/// How many objects there may be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Of one namespace.
    pub(super) each: usize,
    /// In all.
    pub(super) all: usize,
}

/// A change of an object.
#[derive(Debug)]
pub(super) enum Write {
    /// Make it, and then tell its status.
    Create(Box<Cache>),
    /// Tell its status; `None`: there is no such cache.
    Tell {
        cache: Arc<Cache>,
        status: Option<CacheStatus>,
    },
    /// Delete one of ours, without clearing the cache.
    Remove(Arc<Cache>),
}

impl Write {
    pub(super) fn namespace(&self) -> &str {
        let cache = match self {
            Self::Create(cache) => &**cache,
            Self::Tell { cache, .. } | Self::Remove(cache) => cache,
        };
        namespace(cache)
    }
}

/// Whether the mirror may show a cache.
pub(super) fn is_shown(listed: &Listed) -> bool {
    matches!(listed.name.reference, Reference::TaskCache(_)) && listed.content.is_some()
}

/// The writes that bring the objects to what the catalog has, in their order. Namespaces take
/// turns, from the one after `last` on. So a namespace whose keys change all the time delays no
/// other.
pub(super) fn plan(
    listed: &[Listed],
    objects: &[Arc<Cache>],
    limits: Limits,
    last: &str,
) -> Vec<Write> {
    let listed: HashMap<(&str, &str), &Listed> = listed.iter().map(|it| (key(it), it)).collect();
    let wanted = newest(listed.values().copied(), limits);
    let mut of_namespace: BTreeMap<&str, Vec<&Arc<Cache>>> = BTreeMap::new();
    for namespace in wanted.keys() {
        of_namespace.entry(namespace).or_default();
    }
    for cache in objects {
        of_namespace
            .entry(namespace(cache))
            .or_default()
            .push(cache);
    }
    let none = Vec::new();
    let writes = of_namespace.iter().map(|(namespace, objects)| {
        let wanted = wanted.get(namespace).unwrap_or(&none);
        (*namespace, of_one(namespace, wanted, objects, &listed))
    });
    let (later, first): (Vec<_>, Vec<_>) = writes.partition(|(namespace, _)| *namespace <= last);
    let in_turn = first.into_iter().chain(later);
    rounds(in_turn.map(|(_, writes)| writes).collect())
}

/// The writes of one namespace. `wanted` are its newest caches, the newest first.
fn of_one(
    namespace: &str,
    wanted: &[&Listed],
    objects: &[&Arc<Cache>],
    listed: &HashMap<(&str, &str), &Listed>,
) -> Vec<Write> {
    let keys: HashSet<&str> = wanted.iter().map(|listed| key(listed).1).collect();
    let (mut removed, mut told) = (Vec::new(), Vec::new());
    for cache in objects {
        // A deletion is the business of `clears`.
        if cache.metadata.deletion_timestamp.is_some() {
            continue;
        }
        let is_wanted = cache.task_key().is_some_and(|key| keys.contains(key));
        if cache.is_mirrored() && !is_wanted {
            // One without the finalizer could not be deleted before. `clears` gives it back first.
            if cache.orders() {
                removed.push(Write::Remove(Arc::clone(cache)));
            }
            continue;
        }
        let listed = cache
            .task_key()
            .and_then(|key| listed.get(&(namespace, key)));
        let status = listed.map(|listed| status(listed));
        if cache.status != status {
            let cache = Arc::clone(cache);
            told.push(Write::Tell { cache, status });
        }
    }
    // Those that show the oldest commit have waited longest.
    for writes in [&mut removed, &mut told] {
        writes.sort_by_cached_key(|write| match write {
            Write::Tell { cache, .. } | Write::Remove(cache) => newest_at(cache),
            Write::Create(_) => None,
        });
    }
    let there: HashSet<&str> = objects.iter().filter_map(|it| it.task_key()).collect();
    let mut taken: HashSet<String> = objects.iter().map(|it| it.name_any()).collect();
    let missing = wanted.iter().filter(|it| !there.contains(key(it).1));
    let made = missing.filter_map(|listed| made(listed, &mut taken));
    let made = made.map(|cache| Write::Create(Box::new(cache)));
    rounds(vec![removed, made.collect(), told])
}

/// The newest caches of each namespace, the newest first. If they are too many in all, each
/// namespace has equally many.
fn newest<'a>(
    listed: impl Iterator<Item = &'a Listed>,
    limits: Limits,
) -> BTreeMap<&'a str, Vec<&'a Listed>> {
    let mut of_namespace: BTreeMap<&str, Vec<&Listed>> = BTreeMap::new();
    for listed in listed {
        of_namespace.entry(key(listed).0).or_default().push(listed);
    }
    let mut wanted = of_namespace;
    for caches in wanted.values_mut() {
        caches.sort_by_key(|listed| (std::cmp::Reverse(committed(listed)), key(listed).1));
        caches.truncate(limits.each);
    }
    let in_rounds = rounds(wanted.into_values().collect());
    let mut wanted: BTreeMap<&str, Vec<&Listed>> = BTreeMap::new();
    for listed in in_rounds.into_iter().take(limits.all) {
        wanted.entry(key(listed).0).or_default().push(listed);
    }
    wanted
}

/// The first of each list, then the second of each, and so on.
fn rounds<T>(lists: Vec<Vec<T>>) -> Vec<T> {
    let lists = lists.into_iter().map(|list| list.into_iter().enumerate());
    let mut all: Vec<(usize, T)> = lists.flatten().collect();
    // It keeps the order of lists.
    all.sort_by_key(|(place, _)| *place);
    all.into_iter().map(|(_, item)| item).collect()
}

fn namespace(cache: &Cache) -> &str {
    cache.metadata.namespace.as_deref().unwrap_or_default()
}

/// The namespace and the key of a cache.
fn key(listed: &Listed) -> (&str, &str) {
    let key = listed.name.reference.cache().map(|(_, key)| key.as_str());
    (listed.name.tenant.as_str(), key.unwrap_or_default())
}

fn committed(listed: &Listed) -> Timestamp {
    let content = listed.content.map(|content| content.version.stamp);
    content.unwrap_or_default()
}

fn newest_at(cache: &Cache) -> Option<String> {
    let newest = cache.status.as_ref()?.newest.as_ref()?;
    Some(newest.at.clone())
}

/// A new object for a cache; `None`: others have its names.
fn made(listed: &Listed, taken: &mut HashSet<String>) -> Option<Cache> {
    let (namespace, key) = key(listed);
    let mut names = object_names(listed).into_iter();
    let name = names.find(|name| !taken.contains(name))?;
    taken.insert(name.clone());
    let spec = CacheSpec {
        kind: NameKind::TaskCache,
        key: Some(key.to_owned()),
        prefix: None,
    };
    let mut cache = Cache::new(&name, spec);
    cache.metadata = ObjectMeta {
        name: Some(name),
        namespace: Some(namespace.to_owned()),
        finalizers: Some(vec![CLEAR.to_owned()]),
        labels: Some([(MIRRORED.to_owned(), "true".to_owned())].into()),
        ..ObjectMeta::default()
    };
    cache.status = Some(status(listed));
    Some(cache)
}

/// The names that an object may have, the better one first: the key if it is a DNS label; and a
/// readable beginning with a digest.
fn object_names(listed: &Listed) -> Vec<String> {
    let (_, key) = key(listed);
    let is_label = key.parse::<ArtifactName>().is_ok();
    let fits = |c: char| {
        let c = c.to_ascii_lowercase();
        let fits = c.is_ascii_lowercase() || c.is_ascii_digit();
        if fits { c } else { '-' }
    };
    let readable: String = key.chars().map(fits).take(MOST_READABLE).collect();
    let readable = readable.split('-').filter(|part| !part.is_empty());
    let readable = readable.collect::<Vec<_>>().join("-");
    let beginning = if readable.is_empty() {
        "cache"
    } else {
        &readable
    };
    let digest = NameHash::of(&listed.name).0;
    let digest = u64::from_be_bytes(digest.first_chunk().copied().unwrap_or_default());
    let hashed = format!("{beginning}-{:010x}", digest >> 24);
    let key = is_label.then(|| key.to_owned());
    key.into_iter().chain([hashed]).collect()
}

fn status(listed: &Listed) -> CacheStatus {
    let bytes = listed.content.map_or(0, |content| content.bytes);
    let author = listed.author.as_deref();
    CacheStatus {
        bytes: (bytes > 0).then(|| number(bytes)),
        size: (bytes > 0).then(|| readable_bytes(bytes)),
        nodes: i64::try_from(listed.nodes.len()).unwrap_or(i64::MAX),
        newest: Some(CacheCommit {
            at: time(committed(listed)),
            node: author.and_then(|it| it.node.as_deref()).map(str::to_owned),
            author: author.map(said),
        }),
        last_use: listed.used.map(time),
    }
}

fn said(author: &Author) -> String {
    format!(
        "{}/{}",
        author.account.as_deref().unwrap_or("-"),
        author.pod
    )
}

fn time(at: Timestamp) -> String {
    humantime::format_rfc3339_seconds(at.calendar()).to_string()
}

#[cfg(test)]
mod tests;
