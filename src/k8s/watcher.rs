//! The watch over this node's pods: one list, and from there on whatever happens. Here is how it is kept alive, and nothing of
//! what pods mean.
//!
//! It goes on from the last that it heard, however long nobody answered, as long as the API server remembers: the end of a pod
//! that is gone is told in this way only. It lists anew where the API server has forgotten (410), or was put back to an earlier
//! state, of which it would never hear again.
//!
//! Why not the watcher of kube-runtime: whether a pod is gone unseen can be decided only by who knows when the watch was begun
//! anew, and that one does not tell; it has no limit of time for a list or for the begin of a watch, and an API server that
//! loses its power after it has accepted one answers never.

use std::future::Future;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use kube::Client;
use kube::api::{Api, ApiResource, ListParams, WatchEvent, WatchParams};
use tokio::sync::{Notify, mpsc};

use super::client::Patience;
use super::pod::Pod;

/// How long a list may take, or the begin of a watch, and how long one watch is: less than the API server remembers what
/// happened even when much does (75 s), so that a watch that died unheard can go on. It is that of rounds, within these limits.
const ROUNDS: u32 = 6;
const SHORTEST: Duration = Duration::from_secs(2);
const LONGEST: Duration = Duration::from_secs(60);
/// How much later than it should an API server may end a watch.
const LATE: Duration = Duration::from_secs(5);
/// A watch that is over so soon was none: somebody ends them all, and would be asked without a pause.
const BRIEF: Duration = Duration::from_secs(1);

/// What it tells.
pub(super) enum Event {
    /// All pods of this node, as they are.
    Listed(Vec<Pod>),
    /// Since this moment it goes on from the last that it told; what came in between follows.
    Begun(Instant),
    Changed(Pod),
    Deleted(Pod),
    /// It tries again.
    Failed(Error),
}

/// Why it does not go on.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("{doing}: {error}")]
    Refused {
        doing: &'static str,
        #[source]
        error: Box<kube::Error>,
    },
    #[error("{doing}: no answer within {after:?}")]
    Silent {
        doing: &'static str,
        after: Duration,
    },
    #[error("an answer without a resourceVersion")]
    NoVersion,
}

impl Error {
    fn refused(doing: &'static str, error: kube::Error) -> Self {
        let error = Box::new(error);
        Self::Refused { doing, error }
    }

    /// With what the API server refused it, if it was one that did.
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

/// The watch; it runs where [`Watch::run`] does.
pub(super) struct Watch<'a> {
    pods: Api<Pod>,
    /// Somewhere: what is asked for there is only the newest version.
    somewhere: Api<Pod>,
    selector: String,
    limit: Duration,
    /// Somebody has to know that it lives.
    doubted: &'a Notify,
    told: mpsc::Sender<Event>,
    patience: Patience,
    /// The last that was told.
    version: Option<String>,
    /// Whether something went wrong since.
    failed: bool,
}

impl<'a> Watch<'a> {
    /// Over the pods of `node`. Whoever notifies `doubted` has it begun anew at once, from where it is.
    pub(super) fn new(
        client: &Client,
        node: &str,
        look_again: Duration,
        doubted: &'a Notify,
        told: mpsc::Sender<Event>,
    ) -> Self {
        let kind = ApiResource::erase::<ApiPod>(&());
        Self {
            pods: Api::all_with(client.clone(), &kind),
            somewhere: Api::namespaced_with(client.clone(), "default", &kind),
            selector: format!("spec.nodeName={node}"),
            limit: look_again.saturating_mul(ROUNDS).clamp(SHORTEST, LONGEST),
            doubted,
            told,
            patience: Patience::new(),
            version: None,
            failed: false,
        }
    }

    /// Watches until nobody listens any more.
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
        let which = ListParams::default().fields(&self.selector);
        let list = self.pods.list(&which);
        let list = self.within("the list of pods", list).await?;
        let version = list.metadata.resource_version;
        self.version = Some(
            version
                .filter(|it| !it.is_empty())
                .ok_or(Error::NoVersion)?,
        );
        self.tell(Event::Listed(list.items)).await;
        Ok(())
    }

    /// One watch, from this version on, until it ends.
    async fn follow(&mut self, version: String) -> Result<(), Error> {
        // It is kept whatever becomes of this watch, but for an answer that says that it is of no use any more.
        self.version = Some(version.clone());
        if self.failed && self.is_put_back(&version).await? {
            tracing::warn!(
                "the API server was put back to an earlier state: the pods are listed anew"
            );
            self.version = None;
            return Ok(());
        }
        let doing = "the watch over pods";
        let seconds = u32::try_from(self.limit.as_secs()).unwrap_or(u32::MAX);
        let which = WatchParams::default()
            .fields(&self.selector)
            .timeout(seconds);
        let begun = self.within(doing, self.pods.watch(&which, &version)).await;
        let mut events = self.unless_forgotten(begun)?.boxed();
        let since = Instant::now();
        self.tell(Event::Begun(since)).await;
        let silence = self.limit + LATE;
        loop {
            let event = tokio::select! {
                biased;
                event = tokio::time::timeout(silence, events.next()) => event,
                () = self.doubted.notified() => return Ok(()),
            };
            let Ok(event) = event else {
                let after = silence;
                return Err(Error::Silent { doing, after });
            };
            let Some(event) = event else { break };
            if let Err(kube::Error::SerdeError(error)) = &event {
                // What becomes of that pod is asked for by name; asked again, the watch would say the same again.
                tracing::warn!(%error, "the watch over pods tells of something that is not understood");
                continue;
            }
            let event = event.map_err(|error| Error::refused(doing, error));
            match self.unless_forgotten(event)? {
                WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                    self.pass_on(pod, Event::Changed).await?;
                }
                WatchEvent::Deleted(pod) => self.pass_on(pod, Event::Deleted).await?,
                WatchEvent::Bookmark(mark) => self.note(Some(mark.metadata.resource_version))?,
                WatchEvent::Error(status) => {
                    let error = kube::Error::Api(status.boxed());
                    self.unless_forgotten(Err(Error::refused(doing, error)))?;
                }
            }
        }
        if since.elapsed() < BRIEF {
            self.pause().await;
        }
        Ok(())
    }

    /// Whether the API server has not come as far yet as it once was. Only one that was restored from a backup has not.
    async fn is_put_back(&self, version: &str) -> Result<bool, Error> {
        // What the list holds does not matter. With a name it is one read to the API server, and not one of all pods.
        let which = ListParams::default().fields("metadata.name=none");
        let list = self.somewhere.list(&which);
        let list = self.within("the newest version of pods", list).await?;
        let now = list.metadata.resource_version.unwrap_or_default();
        // They are numbers that grow; where they are not, nobody can say.
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

    /// The same; and where it is the answer that what came after the version is forgotten, so is the version.
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
        doing: &'static str,
        asking: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, Error> {
        let after = self.limit;
        match tokio::time::timeout(after, asking).await {
            Ok(answer) => answer.map_err(|error| Error::refused(doing, error)),
            Err(_) => Err(Error::Silent { doing, after }),
        }
    }

    async fn pause(&mut self) {
        tokio::time::sleep(self.patience.after_failure(Instant::now())).await;
    }

    /// That nobody listens is seen where the next step begins.
    async fn tell(&self, event: Event) {
        let _ = self.told.send(event).await;
    }
}
