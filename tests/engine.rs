//! The engine on real filesystems, asked as the room above asks it: what a pod writes comes back where it should and
//! nowhere else, and nothing is left behind.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use baggageclaim::engine::{Config, Engine, Error, PublishRequest, Published};
use baggageclaim::model::{Outcome, Pod, PodUid, VolumeId, VolumeSpec};
use common::{Fs, Lab, require_lab};

/// An engine on a filesystem of its own, and a place for targets.
struct Bench {
    lab: Lab,
    targets: PathBuf,
    engine: Engine,
}

impl Bench {
    async fn new(lab: Lab) -> Self {
        Self::with(lab, |_| {}).await
    }

    async fn with(lab: Lab, change: impl FnOnce(&mut Config)) -> Self {
        let targets = lab.kubelet_dir();
        let mut config = Config::new(lab.path().join("pool"));
        config.outcome_wait = Duration::from_secs(5);
        config.input_wait = Duration::from_secs(5);
        change(&mut config);
        let engine = Engine::open(config).await.expect("the engine opens");
        Self {
            lab,
            targets,
            engine,
        }
    }

    fn target(&self, volume: &str) -> PathBuf {
        self.targets.join(volume)
    }

    fn request(&self, pod: &str, volume: &str, attributes: &[(&str, &str)]) -> PublishRequest {
        request(&self.target(volume), "ci", pod, volume, attributes)
    }

    async fn publish(
        &self,
        pod: &str,
        volume: &str,
        attributes: &[(&str, &str)],
    ) -> (PathBuf, Published) {
        let request = self.request(pod, volume, attributes);
        let target = request.target.clone();
        let published = self
            .engine
            .publish(request)
            .await
            .unwrap_or_else(|error| panic!("{volume}: {error}"));
        (target, published)
    }

    async fn unpublish(&self, volume: &str) {
        self.engine
            .unpublish(volume, &self.target(volume))
            .await
            .expect("unpublish");
        assert!(!self.target(volume).exists(), "the target is gone");
    }

    async fn outcome(&self, pod: &str, outcome: Outcome) -> usize {
        let pod: PodUid = pod.parse().expect("uid");
        self.engine
            .report_outcome(&pod, outcome)
            .await
            .expect("outcome")
    }

    /// Ends the engine in order, and makes sure that nothing is left of what it served.
    async fn finish(self) {
        self.engine.settled().await;
        self.engine.reap().await.expect("reap");
        assert_eq!(self.engine.check().await.expect("check"), []);
        self.engine.shutdown().await;
        let pool = self.lab.path().join("pool");
        for directory in ["volumes", "pending", "incoming", "trash"] {
            let left: Vec<_> = fs::read_dir(pool.join(directory)).expect("read").collect();
            assert!(left.is_empty(), "{directory}: {left:?}");
        }
        drop(self.engine);
        assert_eq!(self.lab.close(), Vec::<PathBuf>::new(), "mounts left over");
    }
}

fn request(
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
        },
        spec: VolumeSpec::parse(&attributes).expect("attributes"),
        read_only: false,
        multiple_targets: false,
    }
}

const TASK: &[(&str, &str)] = &[("type", "task-cache"), ("key", "k")];

#[tokio::test(flavor = "multi_thread")]
async fn a_task_cache_comes_back_when_its_pod_succeeded_and_only_then() {
    for fs in [Fs::Ext4, Fs::XfsReflink, Fs::Btrfs, Fs::Tmpfs] {
        let bench = Bench::new(require_lab!(fs)).await;
        let (target, published) = bench.publish("pod-1", "v1", TASK).await;
        assert_eq!(published.parent, None);
        fs::write(target.join("file"), "one").expect("write");
        bench.unpublish("v1").await;
        bench.outcome("pod-1", Outcome::Succeeded).await;
        bench.engine.settled().await;

        let (target, published) = bench.publish("pod-2", "v2", TASK).await;
        assert!(published.parent.is_some(), "{}: a fork", fs.name());
        assert_eq!(
            fs::read_to_string(target.join("file")).expect("read"),
            "one"
        );
        fs::write(target.join("file"), "two").expect("write");
        bench.outcome("pod-2", Outcome::Failed).await;
        bench.unpublish("v2").await;
        bench.engine.settled().await;

        let (target, _) = bench.publish("pod-3", "v3", TASK).await;
        assert_eq!(
            fs::read_to_string(target.join("file")).expect("read"),
            "one",
            "a failed pod commits nothing"
        );
        bench.unpublish("v3").await;
        bench.outcome("pod-3", Outcome::Failed).await;
        bench.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_engine_on_the_same_pool_is_refused() {
    let bench = Bench::new(require_lab!(Fs::Ext4)).await;
    let error = Engine::open(Config::new(bench.lab.path().join("pool")))
        .await
        .expect_err("owned");
    assert!(
        matches!(&error, Error::Pool { .. })
            && error.to_string().contains("in use by another process"),
        "{error}"
    );
    bench.finish().await;
}
