//! What all parts of the engine share: its configuration and [`Inner`], the one struct that each of
//! them is given. State that only one module uses belongs in that module. Code that works on one
//! subsystem belongs in the module of that subsystem.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::clock::{Clock, uptime};
use super::collector::Collector;
use super::counters::Counters;
use super::durability::Durability;
use super::error::{Context, Result};
use super::lifetime::Lifetime;
use super::notice::{NotCommitted, Notice, Notices, What};
use super::policies::KeptPolicies;
use super::pool::{self, Origin};
use super::space::SpaceRequests;
use super::state::{State, Watched};
use super::teardowns::Teardowns;
use super::threads::{Pool, ThreadPools};
use crate::backend::{Backend, BackendKind, MountApi};
use crate::model::{LayerId, NodeId, Pod, PodUid, Tenant, Timestamp, VolumeId, VolumeRecord};
use crate::store::{Index, PoolDirs};
use crate::sys::{self, Dir, Errno};

/// How long others wait for the thread for walks because of one walk.
pub(super) const SHARE: Duration = Duration::from_secs(10);

/// What others know of the pods whose volumes are here. The engine asks while it seals, so an
/// answer waits for nothing.
pub trait Pods: std::fmt::Debug + Send + Sync {
    /// The images of a pod's containers; none where they are not known.
    fn images(&self, pod: &PodUid) -> Vec<String>;
}

/// How an engine is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// The pool's directory; made when it is missing (its parent is not).
    pub pool: PathBuf,
    /// The backend to use; `None`: the pool's, or for a new pool the best that works there.
    pub backend: Option<BackendKind>,
    /// The mount API to use; `None`: the newest that works.
    pub mount_api: Option<MountApi>,
    /// Whether btrfs's simple quotas may be switched on for the whole filesystem when a volume has
    /// a limit.
    pub btrfs_quota: bool,
    /// How many threads run the system calls of RPCs.
    pub threads: usize,
    /// How long a publish waits for content that is known to be coming.
    pub input_wait: Duration,
    /// How long a finished volume waits for its pod's outcome before it is discarded.
    pub outcome_wait: Duration,
    /// How long a process may hold a finished volume open before the pod gets a `HeldOpen` event.
    pub held_wait: Duration,
    /// If a seal is a copy: how long it waits for space, while caches are evicted, before the
    /// volume is discarded. (Other seals need only a few blocks, and wait without a limit.)
    pub room_wait: Duration,
    /// Percent of the pool's bytes or inodes in use above which unused artifacts are evicted …
    pub high_watermark: u8,
    /// … down to this.
    pub low_watermark: u8,
    /// How often garbage is looked for when nothing else asks for it.
    pub reap_interval: Duration,
    /// How long after the start index and directories are compared without being asked …
    pub first_check: Duration,
    /// … and how often from then on.
    pub check_interval: Duration,
    /// How long the index may lack an artifact's last use before it is written for that alone. A
    /// crash forgets at most this much.
    pub uses_unwritten: Duration,
    /// How long after the boot this machine's clock may be wrong, since NTP has not corrected it.
    /// Until then nothing expires, unless the controller has told the time. The controller has as
    /// long for that after each start of the driver.
    pub clock_settles: Duration,
    /// Bytes kept in reserve for the day the disk is full; at most a sixteenth of the pool.
    pub reserve: u64,
    /// Whether imported content may leave this node. A publish says so of its own content.
    pub share: bool,
    /// The name of this node, for the origin of its artifacts; `None`: it has none.
    pub node: Option<NodeId>,
    /// Where people's notices go; `None`: nowhere.
    pub notices: Option<Notices>,
    /// Whether a controller tells this node the cache policies of the cluster. Commits wait for the
    /// first ones.
    pub policies: bool,
    /// The source of facts about pods that a publish does not carry; `None`: there is none.
    pub pods: Option<Arc<dyn Pods>>,
}

#[cfg(test)]
impl Config {
    /// A pool in this folder that copies: without privileges, on every filesystem.
    pub(crate) fn of_copies(folder: &Path) -> Self {
        let mut config = Self::new(folder.join("pool"));
        config.backend = Some(crate::backend::BackendKind::Copy);
        config
    }
}

impl Config {
    /// The defaults, for a pool.
    #[must_use]
    pub fn new(pool: impl Into<PathBuf>) -> Self {
        Self {
            pool: pool.into(),
            backend: None,
            mount_api: None,
            btrfs_quota: false,
            threads: 4,
            input_wait: Duration::from_secs(90),
            outcome_wait: Duration::from_secs(60 * 60),
            held_wait: Duration::from_secs(60),
            room_wait: Duration::from_secs(10 * 60),
            high_watermark: 85,
            low_watermark: 70,
            reap_interval: Duration::from_secs(60),
            first_check: Duration::from_secs(5 * 60),
            check_interval: Duration::from_secs(24 * 60 * 60),
            uses_unwritten: Duration::from_secs(10 * 60),
            clock_settles: Duration::from_secs(10 * 60),
            reserve: 64 << 20,
            share: true,
            node: None,
            notices: None,
            policies: false,
            pods: None,
        }
    }
}

/// What the parts of the engine share: one subsystem a field, and each keeps its state to itself.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) config: Config,
    pub(super) state: Watched<State>,
    pub(super) index: Index,
    pub(super) durability: Durability,
    pub(super) space: SpaceRequests,
    pub(super) collector: Collector,
    pub(super) teardown: Teardowns,
    pub(super) threads: ThreadPools,
    pub(super) lifetime: Lifetime,
    /// What is known of the policies in the pool.
    pub(super) policies: KeptPolicies,
    pub(super) backend: Arc<dyn Backend>,
    origin: Origin,
    counters: Counters,
    clock: Clock,
    /// Last: with it goes the pool's lock, and until then no other process may find something of
    /// the pool open.
    pub(super) dirs: Arc<PoolDirs>,
}

impl Inner {
    /// With the queue of seals that the commit loop reads. Must be called in a tokio runtime.
    pub(super) fn start(
        config: Config,
        origin: Origin,
        dirs: PoolDirs,
        backend: Arc<dyn Backend>,
        index: Index,
    ) -> Result<(Arc<Self>, mpsc::UnboundedReceiver<LayerId>)> {
        let dirs = Arc::new(dirs);
        let lifetime = Lifetime::begin();
        let (durability, sealed) = Durability::new();
        // In a cluster, the controller has so long to tell the time, from this start on.
        let since = if config.policies {
            uptime()
        } else {
            Duration::ZERO
        };
        let clock = Clock::new(since.saturating_add(config.clock_settles));
        let inner = Self {
            threads: ThreadPools::start(config.threads)?,
            config,
            state: Watched::default(),
            index,
            durability,
            space: SpaceRequests::default(),
            collector: Collector::default(),
            teardown: Teardowns::default(),
            lifetime,
            policies: KeptPolicies::default(),
            backend,
            origin,
            counters: Counters::default(),
            clock,
            dirs,
        };
        Ok((Arc::new(inner), sealed))
    }

    /// Runs a job on the threads of one kind of work. It runs to its end, also when the caller goes
    /// away.
    pub(super) async fn run<T: Send + 'static>(
        self: &Arc<Self>,
        pool: Pool,
        job: impl FnOnce(&Arc<Self>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let engine = self.clone();
        self.threads.run(pool, move || job(&engine)).await?
    }

    /// The threads that make a volume's content. A copy of its parent may take minutes, and no
    /// unmount waits for it.
    pub(super) fn pool_for_content(&self, has_parent: bool) -> Pool {
        if has_parent && self.backend.copies() {
            Pool::Forks
        } else {
            Pool::Calls
        }
    }

    /// Refuses a copy that waited behind others, if the engine ends meanwhile.
    pub(super) fn refuse_late(&self, pool: Pool) -> Result<()> {
        if pool == Pool::Forks {
            self.state.lock().health.refuse_closing()?;
        }
        Ok(())
    }

    /// What this pool is, and in which boot.
    pub(super) fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The kernel's id of this boot: ephemeral content is of one boot.
    pub(super) fn boot(&self) -> &str {
        &self.origin.boot
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// A time to record: later than every time that was given or seen before. What only compares
    /// uses [`Inner::time`]: after a start, nothing is recorded before the clock is measured.
    pub(super) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// The cluster's time is this.
    pub(super) fn set_time(&self, time: Timestamp) {
        self.clock.set(time);
    }

    /// This machine's clock may be wrong.
    pub(super) fn doubt_time(&self) {
        self.clock.doubt();
    }

    /// The cluster's time, as the controller told it, or this machine's clock.
    pub(super) fn time(&self) -> Timestamp {
        self.clock.time()
    }

    /// The time by which content expires: 1970 while the time is not known well enough.
    pub(super) fn expiry_time(&self) -> Timestamp {
        self.clock.settled().unwrap_or_default()
    }

    /// A remembered time: the clock goes on after it.
    pub(super) fn saw(&self, time: Timestamp) {
        self.clock.seen(time);
    }

    /// Says something about a volume to its pod's users, if there is a receiver.
    pub(super) fn say(&self, record: &VolumeRecord, what: impl FnOnce() -> What) {
        self.say_of(&record.tenant, &record.pod, what);
    }

    /// The same where there is no record yet.
    pub(super) fn say_of(&self, tenant: &Tenant, pod: &Pod, what: impl FnOnce() -> What) {
        if let Some(notices) = &self.config.notices {
            notices.say(Notice {
                tenant: tenant.clone(),
                pod: pod.clone(),
                what: what(),
            });
        }
    }

    /// Says that a volume was not sealed.
    pub(super) fn say_not_committed(&self, record: &VolumeRecord, why: &NotCommitted) {
        let Some(plan) = &record.seal else { return };
        self.say(record, || What::NotCommitted {
            reference: plan.reference.clone(),
            why: why.clone(),
        });
    }

    /// Moves a directory into the trash, under a name of its own. The trash may need a block for
    /// one more name: on a full disk the reserve gives it.
    pub(super) fn throw_away(&self, from: &Dir, name: &Path) -> sys::Result<LayerId> {
        self.with_reserve(|| pool::throw_away(&self.dirs, from, name))
    }

    /// The same; what is not there is away.
    pub(super) fn throw_away_if_there(&self, from: &Dir, name: &Path) -> sys::Result<()> {
        match self.throw_away(from, name) {
            Err(error) if error.is(Errno::ENOENT) => Ok(()),
            result => result.map(drop),
        }
    }

    /// The directory of a volume or claim.
    pub(super) fn volume_dir(&self, id: &VolumeId) -> Result<Dir> {
        let dir = self.dirs.volumes.open_beneath(id);
        dir.context("open the volume's directory")
    }

    /// The same; `None`: it has none.
    pub(super) fn volume_dir_if_there(&self, id: &VolumeId) -> Result<Option<Dir>> {
        let dir = self.dirs.volumes.open_if_there(id);
        dir.context("open the volume's directory")
    }

    /// The directory of a layer.
    pub(super) fn layer_dir(&self, id: LayerId) -> Result<Dir> {
        let dir = self.dirs.layers.open_beneath(id.to_string());
        dir.context("open the layer's directory")
    }

    /// The same; `None`: it has none.
    pub(super) fn layer_dir_if_there(&self, id: LayerId) -> Result<Option<Dir>> {
        let dir = self.dirs.layers.open_if_there(id.to_string());
        dir.context("open the layer's directory")
    }

    /// Ends all threads when they have done what they were given, and closes what is open. Blocks.
    pub(super) fn put_away(&self) {
        self.threads.finish();
        self.index.close();
    }

    /// Bounds a walk over a tree that a pod made, which may be hostile. The walk ends when the
    /// engine stops or after [`SHARE`], because other work waits for its thread. It is repeated
    /// later.
    pub(super) fn patience(&self) -> impl Fn() -> bool + '_ {
        self.patience_of(SHARE)
    }

    /// Bounds a walk like [`Inner::patience`], by this share.
    pub(super) fn patience_of(&self, share: Duration) -> impl Fn() -> bool + '_ {
        let began = Instant::now();
        move || self.lifetime.is_stopping() || began.elapsed() > share
    }

    /// Makes garbage collection run soon.
    pub(super) fn wake_reaper(&self) {
        self.collector.reaper.notify_one();
    }
}
