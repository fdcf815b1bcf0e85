//! A tier for tests, nodes that use it, and layers that go up and down.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baggageclaim::archive::toc::{Holder, Patience, Table, scan};
use baggageclaim::archive::{Limits, Progress};
use baggageclaim::model::{ArtifactId, Reference, Tenant, Timestamp};
use baggageclaim::shared::{
    Bucket, Commit, Committed, Destination, Fetched, LayerRef, ObjectId, Publication, Result,
    Source, Store, Times, Upload, Url, decide, fetch,
};
use baggageclaim::sys::Dir;
use object_store::ObjectStore;
use tokio::runtime::Runtime;

use crate::common::{Lab, Snapshot, skip};
use crate::failing::{Failing, Fault, Op};
use crate::server::Server;

pub(crate) fn never() -> bool {
    false
}

pub(crate) fn tenant() -> Tenant {
    "ci".parse().expect("a label")
}

pub(crate) fn reference(text: &str) -> Reference {
    text.parse().expect("a reference")
}

/// Ids that no other test of this process has.
pub(crate) fn fresh() -> u128 {
    static LAST: AtomicU64 = AtomicU64::new(1);
    u128::from(LAST.fetch_add(1, Ordering::Relaxed))
}

pub(crate) fn id() -> ObjectId {
    ObjectId::from_bits(fresh())
}

pub(crate) const NOW: Timestamp = Timestamp(1_700_000_000_000);

/// Short waits: a test that fails on purpose does not take minutes.
pub(crate) const TIMES: Times = Times {
    request: Duration::from_secs(20),
    transfer: Duration::from_secs(20),
    retries: 2,
    pause: Duration::from_millis(1),
    publish: baggageclaim::shared::decide::PUBLISH_WITHIN,
};

/// A tier.
pub(crate) struct Tier {
    pub(crate) store: Store,
    pub(crate) objects: Arc<dyn ObjectStore>,
    /// Where its objects are files.
    pub(crate) files: PathBuf,
    pub(crate) server: Option<Server>,
    pub(crate) runtime: Arc<Runtime>,
}

pub(crate) fn runtime() -> Arc<Runtime> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    Arc::new(runtime.expect("a runtime"))
}

impl Tier {
    /// A directory.
    pub(crate) fn file() -> Self {
        let files = tempfile::tempdir().expect("a directory").keep();
        let url: Url = format!("file://{}", files.display())
            .parse()
            .expect("a URL");
        let runtime = runtime();
        let store = url.open(runtime.handle().clone(), TIMES).expect("open");
        let objects = object_store::local::LocalFileSystem::new_with_prefix(&files).expect("open");
        Self {
            store,
            objects: Arc::new(objects),
            files,
            server: None,
            runtime,
        }
    }

    /// A bucket of the real server, if it can be built.
    pub(crate) fn s3() -> Option<Self> {
        let server = match Server::start() {
            Ok(server) => server,
            Err(reason) => {
                skip(reason);
                return None;
            }
        };
        let (runtime, objects) = (runtime(), server.store());
        let name = "s3://bucket/some/prefix";
        let handle = runtime.handle().clone();
        let store = Store::new(Arc::clone(&objects), "some/prefix", name, handle, TIMES);
        Some(Self {
            store,
            objects,
            files: server.bucket().join("some/prefix"),
            server: Some(server),
            runtime,
        })
    }

    pub(crate) fn both() -> Vec<Self> {
        let mut tiers = vec![Self::file()];
        tiers.extend(Self::s3());
        tiers
    }

    /// The same tier through a store that fails. Only for a tier on the server, or one without
    /// conditions.
    pub(crate) fn failing(
        &self,
        plan: impl Fn(Op, &str) -> Fault + Send + Sync + 'static,
    ) -> (Store, Arc<AtomicU64>) {
        let failing = Failing::new(Arc::clone(&self.objects), plan);
        let requests = Arc::clone(&failing.requests);
        let prefix = if self.server.is_some() {
            "some/prefix"
        } else {
            ""
        };
        let handle = self.runtime.handle().clone();
        let store = Store::new(Arc::new(failing), prefix, "test://failing", handle, TIMES);
        (store, requests)
    }
}

impl Drop for Tier {
    fn drop(&mut self) {
        if self.server.is_none() {
            let _removed = std::fs::remove_dir_all(&self.files);
        }
    }
}

pub(crate) fn open(path: &Path) -> Dir {
    Dir::open(path).expect("open")
}

/// A layer of a node, ready to be sent.
pub(crate) struct Held {
    pub(crate) table: Arc<Table>,
    pub(crate) holder: Holder,
}

pub(crate) fn hold(lab: &Lab, layer: &Path) -> Held {
    let path = lab.dir("tables").join(format!("{}", fresh()));
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path);
    let file = file.expect("create");
    let temporary = open(&lab.dir("temporary"));
    let root = open(layer);
    scan(&root, &file, true, &temporary, &Progress::default(), &never).expect("scan");
    let table = Table::open(file, None, &temporary, Limits::default(), &never).expect("table");
    let holder = Holder::new(Arc::clone(&table), &root).expect("holder");
    Held { table, holder }
}

pub(crate) fn commit(name: &str, layers: Vec<LayerRef>) -> Commit {
    Commit {
        reference: reference(name),
        artifact: ArtifactId::from_bits(fresh()),
        layers,
        made: NOW,
        made_by: None,
        writer: decide::Writer::default(),
        ttl_seconds: None,
        fence: 0,
    }
}

/// Small parts, so that a layer of a test has some.
pub(crate) fn small_parts() -> Upload<'static> {
    Upload {
        part: 5 << 20,
        ..Upload::default()
    }
}

/// Publishes these layers, newest first, under a name.
pub(crate) fn publish(store: &Store, name: &str, layers: &[&Held]) -> Result<Committed> {
    let mut publication = Publication::begin(store, &tenant(), id())?;
    publication.look(&reference(name), NOW)?;
    let layers: Result<Vec<LayerRef>> = layers
        .iter()
        .map(|held| publication.layer((&held.table, &held.holder), small_parts(), &never))
        .collect();
    publication.commit(commit(name, layers?), NOW)
}

pub(crate) fn down(
    lab: &Lab,
    sources: &[&dyn Source],
    layer: &LayerRef,
    into: &Path,
) -> Result<Fetched> {
    let (into, temporary) = (open(into), open(&lab.dir("temporary")));
    let destination = Destination {
        into: &into,
        temporary: &temporary,
        limits: Limits::default(),
        devices: true,
        patience: Patience(Duration::from_secs(60)),
        moved: &std::sync::atomic::AtomicU64::new(0),
        progress: &AtomicU64::new(0),
        replaces_slow: false,
    };
    fetch(sources, &tenant(), layer, destination, &never)
}

pub(crate) fn bucket(store: &Store) -> Bucket {
    Bucket::new(store.clone())
}

/// A layer as a table keeps it: without sockets, and of trusted attributes only what makes a
/// directory opaque.
pub(crate) fn shown(tree: &Path) -> Snapshot {
    let mut snapshot = Snapshot::of(tree);
    snapshot.entries.retain(|_, entry| entry.kind != 's');
    for entry in snapshot.entries.values_mut() {
        let kept = |name: &[u8]| !name.starts_with(b"trusted.") || name.ends_with(b".opaque");
        entry.xattrs.retain(|name, _| kept(name));
        // A deletion has no attributes in a table.
        if entry.device == Some((0, 0)) {
            entry.mtime = (0, 0);
        }
    }
    snapshot
}
