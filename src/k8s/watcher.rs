//! The watch over this node's pods: one list in pages, then changes, with its retries. It does not
//! interpret pods.
//!
//! It resumes at its last version after any outage, because only this reports the end of a pod that
//! is gone. It lists again if the API server has dropped the version (410), or was restored to an
//! earlier state and would never reach it.
//!
//! A watch counts once it was granted and has run for a while. If it is refused, or ends before it
//! has caught up, that is a failure, and a pause follows.
//!
//! kube-runtime's watcher does not suffice. A decision that a pod is gone unobserved needs the time
//! at which the watch began, which it does not expose. It has no timeout for a list or for the
//! start of a watch: an API server that loses power meanwhile blocks it. It builds on `Api::watch`,
//! which ignores the HTTP status: a refusal looks like a watch, a proxy's page like a bad event.

use std::collections::HashSet;
use std::future::Future;
use std::time::{Duration, Instant};

use futures_util::stream::{BoxStream, StreamExt as _, TryStreamExt as _};
use http_body_util::{BodyExt as _, Collected, Limited};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, ListParams, ResourceExt as _, WatchEvent, WatchParams};
use kube::client::Body;
use kube::core::{Request, Status};
use tokio::sync::{mpsc, watch};
use tokio_util::codec::{FramedRead, LinesCodec, LinesCodecError};
use tokio_util::io::StreamReader;

use super::client::LONGEST_WATCH;
use super::pod::cut;
use crate::link::Backoff;

/// The timeout of a list and of a watch's start, and the length of a watch, in rounds.
const ROUNDS: u32 = 6;
const SHORTEST: Duration = Duration::from_secs(3);
/// How much later than requested an API server may end a watch.
const LATE: Duration = Duration::from_secs(5);
/// The catch-up time: how long a new watch gets to report earlier events, which the API server has
/// in memory. A watch that ends sooner does not count. Shorter than any requested watch.
const TO_CATCH_UP: Duration = Duration::from_secs(2);
/// How many bytes of a refusal are read, and quoted if it is no [`Status`] but a proxy's page.
const MOST_SAID: usize = 64 * 1024;
const MOST_REPEATED: usize = 200;
/// How many pods of a list are in memory as the API server has them. A pod has up to 1.5 MiB, and
/// ended pods stay: the pods of one namespace could fill the memory of the driver.
const PAGE: u32 = 25;

/// A report of the watch.
pub(super) enum Event {
    /// A list is complete. It has the pods with these uids; each was `Changed` before.
    Listed(HashSet<String>),
    /// The watch that began at this moment has reported all earlier events.
    CaughtUp(Instant),
    Changed(Pod),
    Deleted(Pod),
    /// It failed and retries.
    Failed(Error),
}

/// The lines of an answer, as they arrive.
type Lines = BoxStream<'static, Result<String, LinesCodecError>>;

/// Why the watch failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("{operation}: {error}")]
    Refused {
        operation: &'static str,
        #[source]
        error: Box<kube::Error>,
    },
    #[error("{operation}: no answer within {after:?}")]
    Silent {
        operation: &'static str,
        after: Duration,
    },
    #[error("the watch over pods: it was granted, and ended after {after:?}")]
    Brief { after: Duration },
    #[error("an answer without a resourceVersion")]
    NoVersion,
}

impl Error {
    fn refused(operation: &'static str, error: kube::Error) -> Self {
        let error = Box::new(error);
        Self::Refused { operation, error }
    }

    /// The API server's status code, if it refused.
    pub(super) fn code(&self) -> Option<u16> {
        let Self::Refused { error, .. } = self else {
            return None;
        };
        match error.as_ref() {
            kube::Error::Api(status) => Some(status.code),
            _ => None,
        }
    }
}

/// The watch. [`Watch::run`] runs it.
pub(super) struct Watch {
    client: Client,
    pods: Api<Pod>,
    /// Any namespace, to ask for the newest version.
    somewhere: Api<Pod>,
    selector: String,
    limit: Duration,
    /// A decision needs a watch that began after this moment.
    doubted: watch::Receiver<Option<Instant>>,
    told: mpsc::Sender<Event>,
    backoff: Backoff,
    /// The last version that was received.
    version: Option<String>,
    /// Whether the last step failed.
    failed: bool,
}

impl Watch {
    /// A watch over the pods of `node`. If it began before the moment in `doubted`, it restarts at
    /// its current version once it has caught up.
    pub(super) fn new(
        client: &Client,
        node: &str,
        look_again: Duration,
        doubted: watch::Receiver<Option<Instant>>,
        told: mpsc::Sender<Event>,
    ) -> Self {
        Self {
            client: client.clone(),
            pods: Api::all(client.clone()),
            somewhere: Api::namespaced(client.clone(), "default"),
            selector: format!("spec.nodeName={node}"),
            limit: look_again
                .saturating_mul(ROUNDS)
                .clamp(SHORTEST, LONGEST_WATCH),
            doubted,
            told,
            backoff: Backoff::default(),
            version: None,
            failed: false,
        }
    }

    /// Runs until the receiver is gone.
    pub(super) async fn run(mut self) {
        while !self.told.is_closed() {
            let done = match self.version.take() {
                None => self.list().await,
                Some(version) => self.follow(version).await,
            };
            self.failed = done.is_err();
            if let Err(error) = done {
                self.tell(Event::Failed(error)).await;
                self.pause().await;
            }
        }
    }

    async fn list(&mut self) -> Result<(), Error> {
        let mut which = ListParams::default().fields(&self.selector).limit(PAGE);
        let mut uids = HashSet::new();
        let mut version = None;
        loop {
            let page = self.pods.list(&which);
            let page = self.within("the list of pods", page).await?;
            // All pages show the pods at the version of the first.
            version = version.or(page.metadata.resource_version);
            for pod in page.items {
                uids.extend(pod.uid());
                self.tell(Event::Changed(pod)).await;
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => which = which.continue_token(&token),
                None => break,
            }
        }
        self.note(version)?;
        self.tell(Event::Listed(uids)).await;
        Ok(())
    }

    /// One watch from this version until it ends.
    async fn follow(&mut self, version: String) -> Result<(), Error> {
        // Keep it whatever happens to this watch, unless an answer says that it has expired.
        self.version = Some(version.clone());
        if self.failed && self.is_put_back(&version).await? {
            tracing::warn!(
                "the API server was restored to an earlier state: listing the pods again"
            );
            self.version = None;
            return Ok(());
        }
        let operation = "the watch over pods";
        let begun = self.within(operation, self.begin(&version)).await;
        let mut lines = self.unless_forgotten(begun)?;
        let since = Instant::now();
        let catching_up = tokio::time::sleep(TO_CATCH_UP);
        let mut catching_up = std::pin::pin!(catching_up);
        let mut caught_up = false;
        let mut doubted = self.doubted.clone();
        let silence = self.limit + LATE;
        loop {
            let line = tokio::select! {
                // Events go first, so that all are reported before it has caught up.
                biased;
                line = lines.next() => line,
                () = &mut catching_up, if !caught_up => {
                    caught_up = true;
                    self.tell(Event::CaughtUp(since)).await;
                    continue;
                }
                // Only then: repeated doubts would otherwise never let a watch catch up.
                () = is_doubted(&mut doubted, since), if caught_up => return Ok(()),
                () = tokio::time::sleep(silence) => {
                    let after = silence;
                    return Err(Error::Silent { operation, after });
                }
            };
            let Some(line) = line else {
                break;
            };
            let failed = |error| {
                let error = std::io::Error::other(error);
                Error::refused(operation, kube::Error::ReadEvents(error))
            };
            let event = match serde_json::from_str(&line.map_err(failed)?) {
                Ok(event) => event,
                // A line may be empty. The last one may be cut: the next watch sends it again.
                Err(error) if error.is_eof() => continue,
                Err(error) => {
                    // That pod will be asked for by name. A new watch would send the same event.
                    tracing::warn!(%error,
                        "the watch over pods sent an event that cannot be parsed");
                    continue;
                }
            };
            match event {
                WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                    self.pass_on(pod, Event::Changed).await?;
                }
                WatchEvent::Deleted(pod) => self.pass_on(pod, Event::Deleted).await?,
                WatchEvent::Bookmark(mark) => self.note(Some(mark.metadata.resource_version))?,
                WatchEvent::Error(status) => {
                    let error = kube::Error::Api(status.boxed());
                    self.unless_forgotten(Err(Error::refused(operation, error)))?;
                }
            }
        }
        if caught_up {
            return Ok(());
        }
        let after = since.elapsed();
        Err(Error::Brief { after })
    }

    /// Starts a watch. It is one only if the HTTP status says so.
    async fn begin(&self, version: &str) -> kube::Result<Lines> {
        let seconds = u32::try_from(self.limit.as_secs()).unwrap_or(u32::MAX);
        let which = WatchParams::default()
            .fields(&self.selector)
            .timeout(seconds);
        let request = Request::new(self.pods.resource_url())
            .watch(&which, version)
            .map_err(kube::Error::BuildRequest)?;
        let answer = self.client.send(request.map(Body::from)).await?;
        let code = answer.status();
        if code.is_success() {
            let bytes = answer.into_body().into_data_stream();
            let bytes = StreamReader::new(bytes.map_err(std::io::Error::other));
            return Ok(FramedRead::new(bytes, LinesCodec::new()).boxed());
        }
        let said = Limited::new(answer.into_body(), MOST_SAID).collect().await;
        let said = said.map(Collected::to_bytes).unwrap_or_default();
        let status = serde_json::from_slice(&said).unwrap_or_else(|_| {
            let said = String::from_utf8_lossy(&said);
            Status::failure(cut(said.trim(), MOST_REPEATED), &code.to_string())
        });
        // The answer's status code counts, because some bodies have none.
        Err(kube::Error::Api(status.with_code(code.as_u16()).boxed()))
    }

    /// Whether the API server's version is older than before, as after a restore from a backup.
    async fn is_put_back(&self, version: &str) -> Result<bool, Error> {
        // The result does not matter. With a name, this reads one object and not all pods.
        let which = ListParams::default().fields("metadata.name=none");
        let list = self.somewhere.list(&which);
        let list = self.within("the newest version of pods", list).await?;
        let now = list.metadata.resource_version.unwrap_or_default();
        // Versions are growing numbers. If not, the answer is unknown.
        let (now, then) = (now.parse::<u64>(), version.parse::<u64>());
        Ok(matches!((now, then), (Ok(now), Ok(then)) if now < then))
    }

    async fn pass_on(&mut self, pod: Pod, event: fn(Pod) -> Event) -> Result<(), Error> {
        let version = pod.metadata.resource_version.clone();
        self.tell(event(pod)).await;
        self.note(version)
    }

    fn note(&mut self, version: Option<String>) -> Result<(), Error> {
        self.version = version.filter(|version| !version.is_empty());
        self.version.as_ref().map(|_| ()).ok_or(Error::NoVersion)
    }

    /// Returns the answer. Drops the version if the API server says that it has expired (410).
    fn unless_forgotten<T>(&mut self, answer: Result<T, Error>) -> Result<T, Error> {
        if let Err(error) = &answer
            && error.code() == Some(410)
        {
            self.version = None;
        }
        answer
    }

    async fn within<T>(
        &self,
        operation: &'static str,
        asking: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, Error> {
        let after = self.limit;
        match tokio::time::timeout(after, asking).await {
            Ok(answer) => answer.map_err(|error| Error::refused(operation, error)),
            Err(_) => Err(Error::Silent { operation, after }),
        }
    }

    async fn pause(&mut self) {
        tokio::time::sleep(self.backoff.after_failure(Instant::now())).await;
    }

    /// The next step notices that the receiver is gone.
    async fn tell(&self, event: Event) {
        let _ = self.told.send(event).await;
    }
}

/// Returns when a decision needs a watch that began later than this one.
async fn is_doubted(doubted: &mut watch::Receiver<Option<Instant>>, since: Instant) {
    let later = |moment: &Option<Instant>| moment.is_some_and(|moment| moment > since);
    if doubted.wait_for(later).await.is_err() {
        // No sender is left.
        std::future::pending::<()>().await;
    }
}
