//! The API server of the simulation: conditional writes, and a log of changes that each watch reads
//! at its own pace. It can be put back to an older state.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::api::{OrphanSnapshot, OrphanVolume, Phase, Refusal, Snapshot, Volume, Wanted};
use crate::k8s::claims::order::Order;

/// Each change of an object of a kind, in order; `None`: deleted.
type Log<K> = Vec<(String, Option<K>)>;

/// The orphans that a node has reported last.
#[derive(Clone, Default)]
pub(super) struct Reported {
    pub(super) volumes: Vec<OrphanVolume>,
    pub(super) snapshots: Vec<OrphanSnapshot>,
}

/// What a backup has.
#[derive(Clone, Default)]
pub(super) struct Stored {
    pub(super) volumes: BTreeMap<String, Volume>,
    pub(super) snapshots: BTreeMap<String, Snapshot>,
    pub(super) pools: BTreeMap<String, Reported>,
    pub(super) nodes: BTreeSet<String>,
}

/// The API server.
#[derive(Default)]
pub(super) struct Server {
    pub(super) now: Stored,
    version: u64,
    volumes: Log<Volume>,
    snapshots: Log<Snapshot>,
}

/// A kind of objects that are orders to nodes.
pub(super) trait Kind: Order {
    fn stored(stored: &mut Stored) -> &mut BTreeMap<String, Self>;
    fn log(server: &mut Server) -> &mut Log<Self>;
    fn changes(server: &Server) -> &Log<Self>;
    /// Orders that its data is deleted.
    fn order_absent(&mut self);
    /// Says that it is Lost with its node.
    fn lose(&mut self);
}

macro_rules! kind {
    ($kind:ty, $field:ident) => {
        impl Kind for $kind {
            fn stored(stored: &mut Stored) -> &mut BTreeMap<String, Self> {
                &mut stored.$field
            }
            fn log(server: &mut Server) -> &mut Log<Self> {
                &mut server.$field
            }
            fn changes(server: &Server) -> &Log<Self> {
                &server.$field
            }
            fn order_absent(&mut self) {
                self.spec.wanted = Wanted::Absent;
            }
            fn lose(&mut self) {
                let status = self.status.as_mut().expect("it was Ready");
                status.phase = Phase::Lost;
                status.error = Some(Refusal::node_gone(&self.spec.node_name));
            }
        }
    };
}

kind!(Volume, volumes);
kind!(Snapshot, snapshots);

/// The name of an object.
fn name<K: Kind>(object: &K) -> String {
    object.meta().name.clone().expect("a name")
}

/// Applies a merge patch (RFC 7386), as the API server does: null deletes a field, and a field that
/// the patch does not name stays.
fn merge(object: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *object = patch.clone();
        return;
    };
    if !object.is_object() {
        *object = json!({});
    }
    for (name, value) in patch {
        if value.is_null() {
            object.as_object_mut().expect("an object").remove(name);
        } else {
            merge(&mut object[name], value);
        }
    }
}

impl Server {
    fn put<K: Kind>(&mut self, mut object: K) {
        self.version += 1;
        let name = name(&object);
        object.meta_mut().resource_version = Some(self.version.to_string());
        K::log(self).push((name.clone(), Some(object.clone())));
        K::stored(&mut self.now).insert(name, object);
    }

    pub(super) fn create<K: Kind>(&mut self, mut object: K) {
        if !K::stored(&mut self.now).contains_key(&name(&object)) {
            object.meta_mut().generation = Some(1);
            object.meta_mut().uid = Some(format!("uid-{}", self.version));
            self.put(object);
        }
    }

    /// The stored object, if it is still the one that was read.
    fn unchanged<K: Kind>(&mut self, read: &K) -> Option<K> {
        let stored = K::stored(&mut self.now).get(&name(read))?;
        let is_same = stored.meta().resource_version == read.meta().resource_version;
        is_same.then(|| stored.clone())
    }

    /// Orders the deletion of an object's data, unless it was changed. Whether it is ordered now.
    pub(super) fn order_absent<K: Kind>(&mut self, read: &K) -> bool {
        let Some(mut object) = self.unchanged(read) else {
            return false;
        };
        object.order_absent();
        let meta = object.meta_mut();
        meta.generation = meta.generation.map(|number| number + 1);
        self.put(object);
        true
    }

    /// Writes the status of an object as a merge patch, unless it was changed.
    pub(super) fn report<K: Kind>(&mut self, read: &K, write: impl FnOnce(&mut K)) {
        if let Some(mut object) = self.unchanged(read) {
            let mut merged = json!(object);
            write(&mut object);
            let patch = json!({ "status": json!(object)["status"] });
            merge(&mut merged, &patch);
            self.put::<K>(serde_json::from_value(merged).expect("an object of the kind"));
        }
    }

    /// Deletes an object, unless it was changed. Whether it is gone.
    pub(super) fn remove<K: Kind>(&mut self, read: &K) -> bool {
        let name = name(read);
        if self.unchanged(read).is_some() {
            K::stored(&mut self.now).remove(&name);
            K::log(self).push((name.clone(), None));
        }
        !K::stored(&mut self.now).contains_key(&name)
    }

    /// Deletes each object that a condition holds for.
    pub(super) fn remove_all<K: Kind>(&mut self, which: impl Fn(&K) -> bool) {
        let all = K::stored(&mut self.now).values();
        let which: Vec<K> = all.filter(|one| which(one)).cloned().collect();
        for object in which {
            self.remove(&object);
        }
    }

    /// Gives up the objects of a node.
    pub(super) fn give_up_all<K: Kind>(&mut self, node: &str) {
        self.remove_all(|one: &K| one.node() == node && one.goes());
        let left = K::stored(&mut self.now).values();
        let left = left.filter(|one| one.node() == node && one.is_left());
        let left: Vec<K> = left.cloned().collect();
        for object in left {
            self.report(&object, K::lose);
        }
    }

    fn sweep_kind<K: Kind>(&mut self) {
        self.remove_all(K::is_deleted);
    }

    pub(super) fn sweep(&mut self) {
        self.sweep_kind::<Volume>();
        self.sweep_kind::<Snapshot>();
    }

    /// Whether nothing will answer an order for a node.
    pub(super) fn is_given_up(&self, node: &str) -> bool {
        !self.now.nodes.contains(node) && !self.now.pools.contains_key(node)
    }
}

/// A node's watch of its objects of a kind.
pub(super) struct Watch<K> {
    /// How much of the log it has seen.
    seen: usize,
    pub(super) cache: BTreeMap<String, K>,
    pub(super) queue: BTreeSet<String>,
}

impl<K> Default for Watch<K> {
    fn default() -> Self {
        Self {
            seen: 0,
            cache: BTreeMap::new(),
            queue: BTreeSet::new(),
        }
    }
}

impl<K: Kind> Watch<K> {
    /// A start: everything is listed.
    pub(super) fn restart(&mut self, server: &mut Server, node: &str) {
        let ours = K::stored(&mut server.now).iter();
        let ours = ours.filter(|(_, object)| object.node() == node);
        self.cache = ours
            .map(|(name, object)| (name.clone(), object.clone()))
            .collect();
        self.queue = self.cache.keys().cloned().collect();
        self.seen = K::changes(server).len();
    }

    /// Takes the next event.
    pub(super) fn see(&mut self, server: &Server, node: &str) {
        let Some((name, object)) = K::changes(server).get(self.seen) else {
            return;
        };
        self.seen += 1;
        match object {
            Some(object) if object.node() == node => {
                self.cache.insert(name.clone(), object.clone());
                self.queue.insert(name.clone());
            }
            Some(_) => {}
            None => drop(self.cache.remove(name)),
        }
    }

    /// The next object that a job is due for.
    pub(super) fn next(&mut self) -> Option<K> {
        let name = self.queue.pop_first()?;
        self.cache.get(&name).cloned()
    }
}
