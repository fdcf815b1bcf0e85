//! What all parts of the engine share: its configuration and [`Inner`], the one struct that each of them is given.
//! A part that one module alone uses belongs in that module; what works on a subsystem belongs there.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::backoff::Setbacks;
use super::clock::Clock;
use super::counters::Counters;
use super::error::{Context, Result};
use super::gc_cycles::Rounds;
use super::notice::Notices;
use super::pool;
use super::prewarm::Spares;
use super::state::State;
use super::table_digests::TableDigests;
use super::teardown_queue::TeardownQueue;
use super::threads::Threads;
use super::trash::Trash;
use crate::backend::{Backend, BackendKind, MountApi};
use crate::model::{LayerId, PodUid, VolumeId};
use crate::store::{Index, PoolDirs, PoolIdentity};
use crate::sys::{self, Dir, Errno, UnmountWatches};

/// How long others wait for the thread for walks because of one walk.
pub(super) const SHARE: Duration = Duration::from_secs(10);

/// What others know of the pods whose volumes are here. The engine asks while it seals, so an answer waits for nothing.
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
    /// Whether btrfs's simple quotas may be switched on for the whole filesystem when a volume has a limit.
    pub btrfs_quota: bool,
    /// How many threads run the system calls of RPCs.
    pub threads: usize,
    /// How long a publish waits for content that is known to be coming.
    pub input_wait: Duration,
    /// How long a finished volume waits for its pod's outcome before it is thrown away.
    pub outcome_wait: Duration,
    /// How long a process may hold a finished volume open before its pod's people are told.
    pub held_wait: Duration,
    /// How long a seal that is a copy finds no room for it, while caches are evicted, before the volume is thrown away. (Where a seal is
    /// no copy it needs a few blocks, and waits for them as long as it takes.)
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
    /// How long the index may not know that an artifact was used, before it is told for that alone: what a crash forgets of it.
    pub uses_unwritten: Duration,
    /// Bytes kept in reserve for the day the disk is full; at most a sixteenth of the pool.
    pub reserve: u64,
    /// Where people's notices go; `None`: nowhere.
    pub notices: Option<Notices>,
    /// Who knows more of pods than a publish tells; `None`: nobody.
    pub pods: Option<Arc<dyn Pods>>,
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
            reserve: 64 << 20,
            notices: None,
            pods: None,
        }
    }
}

/// What the parts of the engine share.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) config: Config,
    /// The kernel's boot id: what is ephemeral is of one boot.
    pub(super) boot: String,
    /// And of one mount of the pool's filesystem, where the kernel tells which.
    pub(super) superblock: Option<u64>,
    pub(super) identity: PoolIdentity,
    /// Why this backend.
    pub(super) reason: String,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) index: Index,
    pub(super) counters: Counters,
    /// Held by who tries whether the disk answers.
    pub(super) looking: Arc<tokio::sync::Mutex<()>>,
    pub(super) clock: Clock,
    pub(super) state: Mutex<State>,
    /// Something in the state changed that somebody may be waiting for.
    pub(super) changed: Notify,
    pub(super) calls: Threads,
    pub(super) spares: Spares,
    pub(super) seals: Threads,
    pub(super) freezes: Threads,
    pub(super) teardown: TeardownQueue,
    /// Places for what is unmounted and not put away yet.
    pub(super) pins: Arc<Semaphore>,
    /// Of what claims had mounted.
    pub(super) watches: UnmountWatches,
    pub(super) closes: Threads,
    pub(super) room: Threads,
    pub(super) deletes: Threads,
    pub(super) walks: Threads,
    pub(super) looks: Threads,
    pub(super) transfers: Threads,
    pub(super) syncs: Threads,
    pub(super) commits: mpsc::UnboundedSender<LayerId>,
    pub(super) reaper: Notify,
    /// Something may be there to be measured or merged.
    pub(super) walker: Notify,
    pub(super) rounds: Rounds,
    pub(super) trash: Trash,
    /// The layers that are being merged; none: none are, or the merge is to stop, since nobody but it needs them any more.
    pub(super) merging: Mutex<HashSet<LayerId>>,
    /// Stacks whose merge failed.
    pub(super) unmerged: Setbacks<Vec<LayerId>>,
    /// The lowest layers of stacks whose merge was stopped, for the time that it took.
    pub(super) slow: Setbacks<LayerId>,
    /// Layers that could not be confirmed or measured.
    pub(super) unmeasured: Setbacks<LayerId>,
    pub(super) tables: TableDigests,
    /// Held by the one seal that copies for another time, since it found no room.
    pub(super) copying: tokio::sync::Mutex<()>,
    /// Of calls that found no room, how many bytes each needs at once; 0: some blocks, or nobody knows.
    pub(super) asked: Mutex<Vec<u64>>,
    /// Something waits for room, or may: whenever some comes free the reaper looks.
    pub(super) short: AtomicBool,
    /// Every layer that the index names says so.
    pub(super) confirmed: AtomicBool,
    pub(super) collector: Mutex<()>,
    pub(super) naming: Mutex<()>,
    /// Held from a `syncfs` until the index names what it made durable.
    pub(super) syncing: Mutex<()>,
    pub(super) stop: CancellationToken,
    /// The engine was degraded, and the next start would not be.
    pub(super) restart: CancellationToken,
    pub(super) tasks: TaskTracker,
    /// Where tasks run that a job starts.
    pub(super) runtime: tokio::runtime::Handle,
    /// Last: with it goes the pool's lock, and until then nobody else may find something of the pool open.
    pub(super) dirs: Arc<PoolDirs>,
}

impl Inner {
    /// 128 random bits.
    #[expect(
        clippy::unused_self,
        reason = "where randomness comes from is the engine's affair"
    )]
    pub(super) fn random(&self) -> u128 {
        pool::random()
    }

    /// Moves a directory into the trash, under a name of its own.
    pub(super) fn throw_away(&self, from: &Dir, name: &Path) -> sys::Result<LayerId> {
        pool::throw_away(&self.dirs, from, name)
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

    /// Ends all threads when they have done what they were given, and closes what is open. Blocks.
    pub(super) fn put_away(&self) {
        for threads in [
            &self.calls,
            &self.seals,
            &self.freezes,
            &self.closes,
            &self.syncs,
            &self.room,
            &self.deletes,
            &self.walks,
            &self.looks,
            &self.transfers,
        ] {
            threads.finish();
        }
        self.spares.finish();
        self.index.close();
    }

    /// How long a walk may take whose length somebody else decides, who may be hostile: until the engine stops, or others have
    /// waited for the thread long enough. It is repeated later.
    pub(super) fn patience(&self) -> impl Fn() -> bool + '_ {
        self.patience_of(SHARE)
    }

    /// The same, of so long.
    pub(super) fn patience_of(&self, share: Duration) -> impl Fn() -> bool + '_ {
        let began = Instant::now();
        move || self.stop.is_cancelled() || began.elapsed() > share
    }

    /// Makes garbage collection run soon.
    pub(super) fn wake_reaper(&self) {
        self.reaper.notify_one();
    }

    /// Waits until what is looked for is found in the state. Looked for may be what is told of (`changed`): the end of a call or chore, a
    /// mount that was closed, how a pod ended, what became durable or was doomed, and that the engine closes.
    pub(super) async fn when<T>(&self, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        loop {
            // Asked for before the look: a change in between is not missed.
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let found = look(&mut self.state.lock());
            if let Some(found) = found {
                return found;
            }
            changed.await;
        }
    }

    /// Starts a task that the shutdown waits for; also from a thread that is not the runtime's.
    pub(super) fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.tasks.spawn_on(task, &self.runtime)
    }
}
