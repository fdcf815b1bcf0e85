//! A tier, nodes that use it, and the steps of pods on these nodes.

use std::fs;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baggageclaim::distribution::{Distribution, Settings};
use baggageclaim::engine::notice::What;
use baggageclaim::engine::{Error, Notice, Notices, Published};
use baggageclaim::model::{Outcome, Reference, Tenant};
use baggageclaim::shared::{NameRecord, Store, Times, look};
use tokio::sync::mpsc;

use crate::common::bench::{Bench, Ground, NEVER, eventually};
use crate::failing::{Failing, Fault, Op};
use crate::tier::Tier;

pub(crate) const OUTPUT: [(&str, &str); 2] = [("type", "output"), ("name", "built")];
pub(crate) const INPUT: [(&str, &str); 2] = [("type", "input"), ("from", "artifact/built")];
pub(crate) const RESOURCE: [(&str, &str); 2] = [("type", "resource-cache"), ("key", "git")];
pub(crate) const TASK: [(&str, &str); 2] = [("type", "task-cache"), ("key", "go")];

/// Calls of the store block, and so does the end of its runtime.
pub(crate) fn apart<T: Send>(call: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(call).join().expect("no panic"))
}

pub(crate) fn reference(text: &str) -> Reference {
    text.parse().expect("a reference")
}

pub(crate) fn tenant(text: &str) -> Tenant {
    text.parse().expect("a label")
}

/// A tier that ends on a thread that may block.
pub(crate) struct Shared(Option<Tier>);

impl Shared {
    pub(crate) fn file() -> Self {
        Self(Some(apart(Tier::file)))
    }

    pub(crate) fn s3() -> Option<Self> {
        apart(Tier::s3).map(|tier| Self(Some(tier)))
    }

    /// The record of a name.
    pub(crate) fn record(&self, name: &str) -> Option<NameRecord> {
        let (tenant, name) = (tenant("ci"), reference(name));
        apart(|| look(&self.store, &tenant, &name)).expect("look")
    }

    /// The same tier through a store that fails, with short time limits.
    pub(crate) fn failing(
        &self,
        plan: impl Fn(Op, &str) -> Fault + Send + Sync + 'static,
    ) -> Store {
        let failing = Failing::new(Arc::clone(&self.objects), plan);
        let prefix = self.server.as_ref().map_or("", |_| "some/prefix");
        let times = Times {
            request: Duration::from_secs(3),
            transfer: Duration::from_secs(20),
            retries: 1,
            pause: Duration::from_millis(1),
            publish: baggageclaim::shared::decide::PUBLISH_WITHIN,
        };
        let handle = self.runtime.handle().clone();
        Store::new(Arc::new(failing), prefix, "test://failing", handle, times)
    }
}

impl Deref for Shared {
    type Target = Tier;

    fn deref(&self) -> &Tier {
        self.0.as_ref().expect("it is there until the end")
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let tier = self.0.take();
        apart(move || drop(tier));
    }
}

/// A node: an engine and its distribution.
pub(crate) struct Node {
    pub(crate) bench: Bench,
    pub(crate) distribution: Arc<Distribution>,
    notices: mpsc::Receiver<Notice>,
}

impl Node {
    pub(crate) async fn new(store: &Store) -> Option<Self> {
        Self::with(store, |_| {}).await
    }

    pub(crate) async fn on(ground: Ground, store: &Store) -> Option<Self> {
        Self::on_with(ground, store, |_| {}).await
    }

    pub(crate) async fn with(store: &Store, change: impl FnOnce(&mut Settings)) -> Option<Self> {
        Self::on_with(Ground::ALL[0], store, change).await
    }

    /// `None`: this machine cannot make one.
    pub(crate) async fn on_with(
        ground: Ground,
        store: &Store,
        change: impl FnOnce(&mut Settings),
    ) -> Option<Self> {
        match ground.bench().await {
            Ok(bench) => Some(Self::start(bench, store, change)),
            Err(reason) => {
                crate::common::skip(&reason);
                None
            }
        }
    }

    pub(crate) fn start(bench: Bench, store: &Store, change: impl FnOnce(&mut Settings)) -> Self {
        let (notices, heard) = Notices::channel(1000);
        let mut settings = Settings {
            // Chance must not decide a test.
            ask: NEVER,
            fetch_wait: NEVER,
            fresh_wait: NEVER,
            input_wait: NEVER,
            notices: Some(notices),
            ..Settings::default()
        };
        change(&mut settings);
        let engine = bench.engine.clone();
        Self {
            distribution: Distribution::start(engine, Some(store.clone()), None, settings),
            bench,
            notices: heard,
        }
    }

    /// Publishes a volume as the CSI service does.
    pub(crate) async fn try_publish(
        &self,
        volume: &str,
        attributes: &[(&str, &str)],
    ) -> Result<Published, Error> {
        self.try_publish_of("ci", volume, attributes).await
    }

    /// The same, of a pod in this namespace.
    pub(crate) async fn try_publish_of(
        &self,
        namespace: &str,
        volume: &str,
        attributes: &[(&str, &str)],
    ) -> Result<Published, Error> {
        let pod = format!("pod-{volume}");
        let mut request = self.bench.request(&pod, volume, attributes);
        request.tenant = tenant(namespace);
        request.share = !attributes.contains(&("share", "never"));
        self.distribution.bring(&mut request).await?;
        self.bench.engine.publish(request).await
    }

    pub(crate) async fn publish(&self, volume: &str, attributes: &[(&str, &str)]) -> Published {
        let published = self.try_publish(volume, attributes).await;
        published.unwrap_or_else(|error| panic!("{volume}: {error}"))
    }

    pub(crate) async fn end(&self, volume: &str, outcome: Outcome) {
        self.bench.outcome(&format!("pod-{volume}"), outcome).await;
        self.bench.unpublish(volume).await;
        self.bench.quiet().await;
    }

    /// A step that writes this text into its volume, and succeeds.
    pub(crate) async fn commit(&self, volume: &str, attributes: &[(&str, &str)], text: &str) {
        self.publish(volume, attributes).await;
        write(&self.bench.target(volume), text);
        self.end(volume, Outcome::Succeeded).await;
    }

    /// The same, until the tier has it.
    pub(crate) async fn share(&self, volume: &str, attributes: &[(&str, &str)], text: &str) {
        self.commit(volume, attributes, text).await;
        self.shared().await;
    }

    /// Waits until all that can be uploaded is.
    pub(crate) async fn shared(&self) {
        eventually("all is durable", || {
            let rows = self.bench.engine.artifacts(None);
            rows.iter().all(|row| row.durable)
        })
        .await;
        let drained = self.distribution.drain(NEVER).await;
        assert_eq!(drained.left, 0);
        // The counters and the events of an upload follow its entry in the index.
        let is_told = || self.distribution.status().uploading.is_none();
        eventually("the last upload is told", is_told).await;
    }

    /// The text that a new volume starts with; `None`: it starts empty.
    pub(crate) async fn sees(&self, volume: &str, attributes: &[(&str, &str)]) -> Option<String> {
        self.publish(volume, attributes).await;
        let text = fs::read_to_string(self.bench.target(volume).join("text")).ok();
        self.end(volume, Outcome::Failed).await;
        text
    }

    /// The same of an input that may take longer than one call waits: asked for again, as kubelet
    /// does.
    pub(crate) async fn sees_at_last(
        &self,
        volume: &str,
        input: &[(&str, &str)],
    ) -> Option<String> {
        let deadline = Instant::now() + NEVER;
        while let Err(error) = self.try_publish(volume, input).await {
            let is_coming = matches!(error, Error::Coming { .. });
            assert!(is_coming && Instant::now() < deadline, "{volume}: {error}");
        }
        self.sees(volume, input).await
    }

    /// How many artifacts were fetched.
    pub(crate) fn fetches(&self) -> u64 {
        self.distribution.metrics().fetches.total().artifacts
    }

    pub(crate) fn questions(&self) -> u64 {
        self.distribution.metrics().questions
    }

    pub(crate) fn heard(&mut self) -> Vec<What> {
        let next = || self.notices.try_recv().ok();
        std::iter::from_fn(next).map(|notice| notice.what).collect()
    }

    /// Ends the distribution, and returns the bench.
    pub(crate) async fn stop(self) -> Bench {
        self.distribution.stop().await;
        self.bench
    }

    pub(crate) async fn finish(self) {
        self.stop().await.finish().await;
    }
}

/// The text that a test expects to see.
#[expect(
    clippy::unnecessary_wraps,
    reason = "it is compared with what may be missing"
)]
pub(crate) fn text(text: &str) -> Option<String> {
    Some(text.to_owned())
}

pub(crate) fn write(target: &Path, text: &str) {
    fs::write(target.join("text"), text).expect("write");
}

/// A tier and two nodes that use it; the test is skipped if this machine cannot.
macro_rules! two_nodes {
    () => {{
        let ground = $crate::common::bench::Ground::ALL[0];
        $crate::nodes::two_nodes!(on [ground; 2])
    }};
    (on $grounds:expr) => {{
        let tier = $crate::nodes::Shared::file();
        let [one, other] = $grounds;
        let (Some(a), Some(b)) = (
            $crate::nodes::Node::on(one, &tier.store).await,
            $crate::nodes::Node::on(other, &tier.store).await,
        ) else {
            return;
        };
        (tier, a, b)
    }};
}

/// What an option has; the test ends if that is nothing, since it was skipped with a message.
macro_rules! require {
    ($made:expr) => {
        match $made {
            Some(made) => made,
            None => return,
        }
    };
}

pub(crate) use {require, two_nodes};
