//! The collector of all tenants, for a process that runs all the time. When a tenant was collected
//! last is known from its lease, so a restart, a second process and `baggageclaim shared gc` save
//! each other's work. One collection is in `collect`.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::collect::{Collected, Collector};
use super::error::{Error, Result};
use super::keys::Keys;
use super::record::ObjectId;
use super::store::Store;
use crate::model::{Tenant, Timestamp};
use crate::telemetry::metrics::{ConstCounter, Gauge, Registry};

/// Each tenant is collected once in this time.
const EVERY: Duration = Duration::from_hours(24);
/// How often the leases are looked at.
const LOOK: Duration = Duration::from_hours(1);

/// Collects until it is dropped. A request that hangs then is left to the end of the process.
#[derive(Debug)]
pub struct Periodic {
    figures: Arc<Figures>,
    /// Its end tells the thread to stop.
    _stop: Sender<()>,
}

/// Counts since the start.
#[derive(Debug, Default)]
struct Figures {
    collections: AtomicU64,
    failures: AtomicU64,
    deleted: AtomicU64,
    deleted_bytes: AtomicU64,
    /// Seconds since 1970; 0: none yet.
    succeeded: AtomicU64,
}

impl Periodic {
    /// Starts the thread that collects.
    pub fn start(store: Store) -> io::Result<Self> {
        Self::every(store, EVERY, LOOK)
    }

    fn every(store: Store, every: Duration, look: Duration) -> io::Result<Self> {
        let figures = Arc::<Figures>::default();
        let (stop, stopped) = channel();
        let job = Job {
            store,
            every,
            stopped,
            figures: Arc::clone(&figures),
        };
        let thread = std::thread::Builder::new().name("shared-collect".to_owned());
        thread.spawn(move || job.run(look))?;
        Ok(Self {
            figures,
            _stop: stop,
        })
    }

    /// Adds its metrics.
    pub fn register(&self, registry: &mut Registry) {
        let value = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        let figures = &self.figures;
        for (name, help, figure) in [
            (
                "collector_collections",
                "Namespaces of the shared tier whose garbage was collected",
                &figures.collections,
            ),
            (
                "collector_failures",
                "Collections of the shared tier that failed, and are tried again",
                &figures.failures,
            ),
            (
                "collector_deleted",
                "Manifests and layers that were deleted from the shared tier",
                &figures.deleted,
            ),
            (
                "collector_deleted_bytes",
                "Their bytes",
                &figures.deleted_bytes,
            ),
        ] {
            registry.register(name, help, ConstCounter::new(value(figure)));
        }
        let succeeded = Gauge::<i64>::default();
        succeeded.set(i64::try_from(value(&figures.succeeded)).unwrap_or(i64::MAX));
        let help = "When the garbage of all namespaces was last found collected, Unix time";
        registry.register("collector_last_success_seconds", help, succeeded);
    }
}

struct Job {
    store: Store,
    every: Duration,
    stopped: Receiver<()>,
    figures: Arc<Figures>,
}

/// The wall clock.
fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let millis = since.map_or(0, |since| since.as_millis());
    Timestamp(u64::try_from(millis).unwrap_or(u64::MAX))
}

impl Job {
    fn run(&self, look: Duration) {
        loop {
            match self.round() {
                Ok(()) => {
                    let seconds = now().0 / 1000;
                    self.figures.succeeded.store(seconds, Ordering::Relaxed);
                }
                Err(Error::Stopped) => return,
                Err(error) => {
                    add(&self.figures.failures, 1);
                    tracing::warn!(tier = %self.store, %error,
                        "the garbage of the shared tier could not be collected; retrying");
                }
            }
            match self.stopped.recv_timeout(look) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn is_stopped(&self) -> bool {
        self.stopped.try_recv() == Err(TryRecvError::Disconnected)
    }

    /// Collects each tenant that is due. A tenant that fails does not keep the others from it. The
    /// error is the last one.
    fn round(&self) -> Result<()> {
        let mut result = Ok(());
        for tenant in self.store.tenants()? {
            if self.is_stopped() {
                return Err(Error::Stopped);
            }
            match self.collect(&tenant) {
                Ok(Some(done)) => {
                    add(&self.figures.collections, 1);
                    tracing::info!(
                        %tenant, names = done.names, layers = done.layers, bytes = done.bytes,
                        expired = done.expired, marked = done.condemned, deleted = done.deleted,
                        "collected the garbage of the shared tier"
                    );
                }
                // Another collector works on it.
                Ok(None) | Err(Error::Leased { .. }) => {}
                Err(error @ Error::Stopped) => return Err(error),
                Err(error) => result = Err(error),
            }
        }
        result
    }

    /// `None`: it is not due.
    fn collect(&self, tenant: &Tenant) -> Result<Option<Collected>> {
        let now = now();
        match self.store.modified(&Keys::new(tenant).lease()) {
            Ok(last) if now.since(last) < self.every => return Ok(None),
            // It never was.
            Ok(_) | Err(Error::Missing { .. }) => {}
            Err(error) => return Err(error),
        }
        let mut id = [0; 16];
        getrandom::fill(&mut id).expect("Linux has had getrandom(2) since 3.17");
        let id = ObjectId::from_bits(u128::from_le_bytes(id));
        let stop = || self.is_stopped();
        let done = Collector::new(&self.store, tenant, id).run(now, &stop)?;
        add(&self.figures.deleted, done.deleted);
        add(&self.figures.deleted_bytes, done.deleted_bytes);
        Ok(Some(done))
    }
}

fn add(figure: &AtomicU64, more: u64) {
    figure.fetch_add(more, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::{Times, Url, look};
    use crate::telemetry::metrics;

    /// Waits until `is_true`, since the thread tells no one.
    fn eventually(what: &str, is_true: impl Fn() -> bool) {
        let began = std::time::Instant::now();
        while !is_true() {
            assert!(began.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn each_tenant_is_collected_once_in_the_interval_by_any_process() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let url: Url = format!("file://{}", directory.path().display())
            .parse()
            .expect("a URL");
        let store = url.open(runtime.handle().clone(), Times::default());
        let store = store.expect("the directory is there");
        for tenant in ["one", "two"] {
            let (tenant, name) = (
                tenant.parse().expect("a label"),
                "task-cache/x".parse().expect("a reference"),
            );
            let id = ObjectId::from_bits(1);
            crate::shared::clear(&store, &tenant, &name, id, now()).expect("a record");
            assert!(look(&store, &tenant, &name).expect("look").is_some());
        }
        let two: Tenant = "two".parse().expect("a label");
        Collector::new(&store, &two, ObjectId::from_bits(2))
            .run(now(), &|| false)
            .expect("collected by another");
        let tick = Duration::from_millis(10);
        let collector = Periodic::every(store.clone(), EVERY, tick).expect("a thread");
        let value = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        let figures = &collector.figures;
        eventually("a round", || value(&figures.succeeded) > 0);
        assert_eq!(value(&figures.collections), 1, "the other is not due");
        drop(collector);
        // With a short interval both are due again and again.
        let collector = Periodic::every(store, Duration::ZERO, tick).expect("a thread");
        let figures = Arc::clone(&collector.figures);
        eventually("both twice", || value(&figures.collections) >= 4);
        assert_eq!(value(&figures.failures), 0);
        let mut registry = metrics::registry();
        collector.register(&mut registry);
        metrics::assert_documented(&registry, "collector_");
        drop(collector);
        eventually("the thread ends", || Arc::strong_count(&figures) == 1);
        drop(directory);
    }
}
