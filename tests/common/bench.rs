//! An engine on its own filesystem, called as the CSI services call it: for engine tests.
//!
//! [`Bench`] has short methods to publish, unpublish and report outcomes. It waits for events
//! instead of sleeping, and checks at its end that nothing is left over. [`Ground`] is a backend on
//! a filesystem that supports it.

use std::collections::BTreeMap;
use std::fs;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use baggageclaim::backend::BackendKind;
use baggageclaim::engine::claims::{CreateClaim, MountClaim};
use baggageclaim::engine::{
    ArtifactRow, Config, Engine, Error, OutcomeReport, PublishRequest, Published, VolumeRow,
    VolumeState,
};
use baggageclaim::model::{
    ClaimParameters, MutableParameters, Outcome, PersistentVolume, Pod, PodUid, VolumeId,
    VolumeSpec,
};
use baggageclaim::store::PoolDirs;

use super::{Fs, Lab};

/// The timeout of a wait. No test depends on its value.
pub const NEVER: Duration = Duration::from_secs(60);

/// A backend, and a filesystem that supports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ground(pub BackendKind, pub Fs);

impl Ground {
    /// Every backend once.
    pub const ALL: [Ground; 3] = [
        Ground(BackendKind::Overlay, Fs::Ext4),
        Ground(BackendKind::Btrfs, Fs::Btrfs),
        Ground(BackendKind::Copy, Fs::XfsReflink),
    ];

    /// A name for messages.
    pub fn name(self) -> String {
        format!("{} on {}", self.0, self.1.name())
    }

    /// A bench on it.
    pub async fn bench(self) -> Result<Bench, String> {
        self.bench_with(|_| {}).await
    }

    /// A bench on it, with another configuration.
    pub async fn bench_with(self, change: impl FnOnce(&mut Config)) -> Result<Bench, String> {
        let lab = Lab::try_new(self.1)?;
        Ok(Bench::with(lab, |config| {
            config.backend = Some(self.0);
            change(config);
        })
        .await)
    }
}

/// Whether a fork on this filesystem (`ext4`, `tmpfs`) may have another owner than its parent.
pub fn maps_owners(backend: BackendKind, filesystem: &str) -> bool {
    let by_backend = match (backend, filesystem) {
        (BackendKind::Overlay, _) => super::kernel_is(5, 19),
        (_, "btrfs") => super::kernel_is(5, 15),
        _ => super::kernel_is(5, 12),
    };
    by_backend && (filesystem != "tmpfs" || super::kernel_is(6, 3))
}

/// An engine on its own filesystem, and a directory for targets.
#[derive(Debug)]
pub struct Bench {
    pub lab: Lab,
    pub targets: PathBuf,
    pub engine: Engine,
    pub config: Config,
}

impl Bench {
    pub async fn new(lab: Lab) -> Self {
        Self::with(lab, |_| {}).await
    }

    pub async fn with(lab: Lab, change: impl FnOnce(&mut Config)) -> Self {
        let targets = lab.kubelet_dir();
        let mut config = Config::new(lab.path().join("pool"));
        // Chance must not decide a test.
        config.outcome_wait = Duration::from_secs(3600);
        config.input_wait = Duration::from_secs(3600);
        config.reap_interval = Duration::from_secs(3600);
        config.clock_settles = Duration::ZERO;
        config.reserve = 0;
        config.btrfs_quota = true;
        change(&mut config);
        let engine = Engine::open(config.clone())
            .await
            .expect("the engine opens");
        Self {
            lab,
            targets,
            engine,
            config,
        }
    }

    pub fn pool(&self) -> PathBuf {
        self.config.pool.clone()
    }

    pub fn target(&self, volume: &str) -> PathBuf {
        self.targets.join(volume)
    }

    pub fn request(&self, pod: &str, volume: &str, attributes: &[(&str, &str)]) -> PublishRequest {
        request(&self.target(volume), "ci", pod, volume, attributes)
    }

    /// Publishes a volume; returns its path.
    pub async fn publish(
        &self,
        pod: &str,
        volume: &str,
        attributes: &[(&str, &str)],
    ) -> (PathBuf, Published) {
        let deadline = Instant::now() + NEVER;
        let published = loop {
            match self.try_publish(pod, volume, attributes).await {
                // A program that another test starts holds copies of our descriptors until it
                // execs, those of a mount that vanished too. Kubelet asks again.
                Err(Error::HeldOpen(_)) if Instant::now() < deadline => {
                    tokio::time::sleep(Duration::from_millis(3)).await;
                }
                result => break result.unwrap_or_else(|error| panic!("{volume}: {error}")),
            }
        };
        (self.target(volume), published)
    }

    pub async fn try_publish(
        &self,
        pod: &str,
        volume: &str,
        attributes: &[(&str, &str)],
    ) -> Result<Published, Error> {
        self.engine
            .publish(self.request(pod, volume, attributes))
            .await
    }

    pub async fn unpublish(&self, volume: &str) {
        self.engine
            .unpublish(volume, &self.target(volume))
            .await
            .unwrap_or_else(|error| panic!("unpublish {volume}: {error}"));
        assert!(!self.target(volume).exists(), "the target is gone");
    }

    /// Reports an outcome; returns for how many volumes it is new.
    pub async fn outcome(&self, pod: &str, outcome: Outcome) -> usize {
        self.told(pod, outcome).await.news
    }

    pub async fn told(&self, pod: &str, outcome: Outcome) -> OutcomeReport {
        let pod: PodUid = pod.parse().expect("uid");
        let told = self.engine.report_outcome(&pod, outcome).await;
        told.unwrap_or_else(|error| panic!("outcome of {pod}: {error}"))
    }

    /// A whole step: publishes, runs `work`, unpublishes, reports success, waits for the seal.
    pub async fn step<T>(
        &self,
        volume: &str,
        attributes: &[(&str, &str)],
        work: impl FnOnce(&Path) -> T,
    ) -> T {
        let pod = format!("pod-{volume}");
        let (target, _) = self.publish(&pod, volume, attributes).await;
        let result = work(&target);
        self.outcome(&pod, Outcome::Succeeded).await;
        self.unpublish(volume).await;
        self.quiet().await;
        result
    }

    /// Reads one file through a new fork that commits nothing; `None` if it is missing.
    pub async fn look(
        &self,
        volume: &str,
        attributes: &[(&str, &str)],
        file: &str,
    ) -> Option<String> {
        let pod = format!("looking-{volume}");
        let (target, _) = self.publish(&pod, volume, attributes).await;
        let content = fs::read_to_string(target.join(file)).ok();
        self.outcome(&pod, Outcome::Failed).await;
        self.unpublish(volume).await;
        self.quiet().await;
        content
    }

    pub fn row(&self, volume: &str) -> Option<VolumeRow> {
        let mut rows = self.engine.volumes(None).into_iter();
        rows.find(|row| row.id.as_str() == volume)
    }

    /// The artifact that has this name.
    pub fn artifact(&self, name: &str) -> Option<ArtifactRow> {
        let mut rows = self.engine.artifacts(None).into_iter();
        rows.find(|row| {
            row.name
                .as_ref()
                .is_some_and(|found| found.to_string() == name)
        })
    }

    /// Waits until all unpublished volumes are sealed or deleted, except those without an outcome.
    ///
    /// Unlike [`Engine::settled`] it waits for volumes that are still open: a child process of
    /// another test holds copies of all our descriptors until its exec.
    pub async fn quiet(&self) {
        eventually("everything that left is sealed or gone", || {
            let rows = self.engine.volumes(None);
            !rows
                .iter()
                .any(|row| matches!(row.state, VolumeState::Sealing | VolumeState::InUse))
        })
        .await;
    }

    /// Shuts the engine down and opens the pool again.
    pub async fn restart(self) -> Self {
        self.restart_after(|_| {}).await
    }

    /// Shuts the engine down, changes the pool, and opens it again.
    pub async fn restart_after(self, change: impl FnOnce(&Path)) -> Self {
        let Self {
            lab,
            targets,
            engine,
            config,
        } = self;
        engine.shutdown().await;
        drop(engine);
        let pool = config.pool.clone();
        // Callers whose calls just ended may hold it a moment longer.
        eventually("the pool is let go", || PoolDirs::open(&pool).is_ok()).await;
        change(&pool);
        let engine = open_again(&config).await;
        Self {
            lab,
            targets,
            engine,
            config,
        }
    }

    /// Checks that index, directories and mounts agree.
    pub async fn assert_whole(&self) {
        assert_eq!(self.engine.check().await.expect("check"), []);
    }

    /// Shuts the engine down, and checks that nothing of its volumes is left.
    pub async fn finish(self) {
        // A volume counts until its row is gone: only then does the trash get its layers.
        eventually("every volume has ended", || {
            self.engine.volumes(None).is_empty()
        })
        .await;
        // A child process of another test may hold deleted files until its exec.
        let deadline = Instant::now() + NEVER;
        while self.engine.reap().await.expect("reap").held > 0 {
            assert!(Instant::now() < deadline, "the trash is never empty");
            tokio::task::yield_now().await;
        }
        self.assert_whole().await;
        self.engine.shutdown().await;
        let pool = self.pool();
        for directory in ["volumes", "pending", "incoming", "trash"] {
            assert_eq!(names(&pool.join(directory)), [""; 0], "{directory}");
        }
        drop(self.engine);
        assert_eq!(self.lab.close(), Vec::<PathBuf>::new(), "mounts left over");
    }
}

/// Opens a pool whose engine was shut down. Its lock may be held a moment longer: by callers whose
/// calls just ended, and by child processes of other tests until their exec.
pub async fn open_again(config: &Config) -> Engine {
    let deadline = Instant::now() + NEVER;
    loop {
        match Engine::open(config.clone()).await {
            Err(error @ Error::PoolInUse { .. })
                if error.to_string().contains("in use by another process") =>
            {
                assert!(Instant::now() < deadline, "{error}");
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
            result => return result.expect("the engine opens again"),
        }
    }
}

/// The names in a directory, sorted.
pub fn names(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut names: Vec<String> = entries
        .map(|entry| {
            let name = entry.expect("an entry").file_name();
            name.into_encoded_bytes().escape_ascii().to_string()
        })
        .collect();
    names.sort();
    names
}

/// A request for an empty claim without limits.
pub fn empty_claim(name: &str) -> CreateClaim {
    CreateClaim {
        name: name.to_owned(),
        required_bytes: 0,
        limit_bytes: None,
        parameters: ClaimParameters::default(),
        mutable: MutableParameters::default(),
        source: None,
    }
}

/// A request for a claim at one path, writable and not staged.
pub fn mount_request(claim: &PersistentVolume, target: &Path) -> MountClaim {
    MountClaim {
        claim: claim.id.clone(),
        target: target.to_owned(),
        staging: false,
        staged_at: None,
        read_only: false,
        multiple_targets: false,
        mount_group: None,
    }
}

/// Waits until the condition holds.
pub async fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + NEVER;
    while !is_so() {
        assert!(Instant::now() < deadline, "never came: {what}");
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
}

/// Awaits a future that must complete soon.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(NEVER, future)
        .await
        .unwrap_or_else(|_| panic!("never came: {what}"))
}

/// Whether a future is still pending after one chance to make progress.
pub async fn waits<T>(future: &mut (impl Future<Output = T> + Unpin)) -> bool {
    tokio::time::timeout(Duration::ZERO, future).await.is_err()
}

pub fn request(
    target: &Path,
    tenant: &str,
    pod: &str,
    volume: &str,
    attributes: &[(&str, &str)],
) -> PublishRequest {
    let attributes: BTreeMap<String, String> = attributes
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect();
    PublishRequest {
        volume: volume.parse::<VolumeId>().expect("id"),
        target: target.to_owned(),
        tenant: tenant.parse().expect("tenant"),
        pod: Pod {
            uid: pod.parse().expect("uid"),
            name: pod.to_owned(),
            service_account: None,
        },
        spec: VolumeSpec::parse(&attributes).expect("attributes"),
        read_only: false,
        multiple_targets: false,
        base: None,
        cleared: 0,
        share: true,
        fetched: None,
        waited: Duration::ZERO,
    }
}

/// A [`Bench`] with overlay on ext4; skips the test with a message if this machine cannot make one.
macro_rules! require_bench {
    () => {
        $crate::common::require_bench!(|_| {})
    };
    ($change:expr) => {
        $crate::common::require_bench!(on $crate::common::bench::Ground::ALL[0], $change)
    };
    (on $ground:expr) => {
        $crate::common::require_bench!(on $ground, |_| {})
    };
    (on $ground:expr, $change:expr) => {
        match $ground.bench_with($change).await {
            Ok(bench) => bench,
            Err(reason) => {
                $crate::common::skip(&reason);
                return;
            }
        }
    };
}

pub(crate) use require_bench;
