//! The watch over the pods of this node: one list, then every change. This file keeps it alive, and knows
//! nothing of what pods mean.
//!
//! After an interruption of any length it goes on from the last resource version, as long as the API server
//! has the history: only so does it learn the end of a pod that is gone. It lists again if the API server
//! has forgotten that version (410), or was restored to an earlier state.
//!
//! A watch counts when it was granted and has lived for a while. A watch that was refused, or cut before
//! that, is a failure, and a pause follows.
//!
//! Why not the watcher of kube-runtime: to decide that a pod is gone unseen, one must know when the watch
//! was started again, which it does not tell. It has no time limit for a list or the start of a watch, so an
//! API server that loses its power then blocks it for ever. And why not `Api::watch`, on which it is built:
//! it ignores the status of the answer, so a refusal looks like a watch, and the page of a proxy like events.

use std::future::Future;
use std::time::{Duration, Instant};

use http_body_util::{BodyExt as _, Collected, Limited};
use k8s_openapi::api::core::v1::Pod as ApiPod;
use kube::Client;
use kube::api::{Api, ApiResource, ListParams, WatchEvent, WatchParams};
use kube::client::Body;
use kube::core::{Request, Status};
use tokio::sync::{mpsc, watch};

use super::client::Patience;
use super::pod::{Pod, cut};

/// How long a list may take, or the begin of a watch, and how long one watch is: less than the API server remembers what
/// happened even when much does (75 s), so that a watch that died unheard can go on. It is that of rounds, within these limits.
const ROUNDS: u32 = 6;
const SHORTEST: Duration = Duration::from_secs(3);
const LONGEST: Duration = Duration::from_secs(60);
/// How much later than it should an API server may end a watch.
const LATE: Duration = Duration::from_secs(5);
/// How long a watch is given to tell what came before it was begun: the API server has it at hand. One that is over sooner was
/// none. Less than the shortest that is asked for, so that none is over sooner because it was asked to be.
const TO_CATCH_UP: Duration = Duration::from_secs(2);
/// How much is read of what refuses a watch, and how much of that is repeated where it is no [`Status`]. It may be a proxy's page.
const MOST_SAID: usize = 64 * 1024;
const MOST_REPEATED: usize = 200;

/// What the watch reports.
pub(super) enum Event {
    /// All pods of this node, as a list has them.
    Listed(Vec<Pod>),
    /// The watch that began at this moment runs. All that had happened before was reported before this event.
    CaughtUp(Instant),
    Changed(Pod),
    Deleted(Pod),
    /// It failed, and tries again.
    Failed(Error),
}

/// Why the watch was interrupted.
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
    #[error("the watch over pods: it was granted, and over after {after:?}")]
    Brief { after: Duration },
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
pub(super) struct Watch {
    client: Client,
    pods: Api<Pod>,
    /// Somewhere: what is asked for there is only the newest version.
    somewhere: Api<Pod>,
    selector: String,
    limit: Duration,
    /// A caller needs the reports of a watch that began after this moment.
    doubted: watch::Receiver<Option<Instant>>,
    told: mpsc::Sender<Event>,
    patience: Patience,
    /// The last that was told.
    version: Option<String>,
    /// Whether something went wrong since.
    failed: bool,
}

impl Watch {
    /// Over the pods of `node`. Where it was begun before the moment in `doubted`, it is begun anew, from where it is, as soon as it
    /// has caught up.
    pub(super) fn new(
        client: &Client,
        node: &str,
        look_again: Duration,
        doubted: watch::Receiver<Option<Instant>>,
        told: mpsc::Sender<Event>,
    ) -> Self {
        let kind = ApiResource::erase::<ApiPod>(&());
        Self {
            client: client.clone(),
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

    /// Watches until the receiver is gone.
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
                "the API server was restored to an earlier state; the pods are listed again"
            );
            self.version = None;
            return Ok(());
        }
        let doing = "the watch over pods";
        let begun = self.within(doing, self.begin(&version)).await;
        let mut lines = self.unless_forgotten(begun)?;
        let since = Instant::now();
        let catching_up = tokio::time::sleep(TO_CATCH_UP);
        let mut catching_up = std::pin::pin!(catching_up);
        let mut caught_up = false;
        let mut doubted = self.doubted.clone();
        let silence = self.limit + LATE;
        loop {
            let line = tokio::select! {
                // What there is to hear goes first, so that all of it was told when it has caught up.
                biased;
                line = lines.next() => line,
                () = &mut catching_up, if !caught_up => {
                    caught_up = true;
                    self.tell(Event::CaughtUp(since)).await;
                    continue;
                }
                // Not sooner: who doubts again and again would never hear one to the end of what it has to say.
                () = is_doubted(&mut doubted, since), if caught_up => return Ok(()),
                () = tokio::time::sleep(silence) => {
                    let after = silence;
                    return Err(Error::Silent { doing, after });
                }
            };
            let Some(line) = line.map_err(|error| Error::refused(doing, error))? else {
                break;
            };
            let event = match serde_json::from_slice(&line) {
                Ok(event) => event,
                Err(_) if line.trim_ascii().is_empty() => continue,
                Err(error) => {
                    // What becomes of that pod is asked for by name; asked again, the watch would say the same again.
                    tracing::warn!(%error, "the watch over pods reported an event that cannot be parsed");
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
                    self.unless_forgotten(Err(Error::refused(doing, error)))?;
                }
            }
        }
        if caught_up {
            return Ok(());
        }
        let after = since.elapsed();
        Err(Error::Brief { after })
    }

    /// Begins a watch, which is what it is only where the answer's status says so.
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
            return Ok(Lines::of(answer.into_body()));
        }
        let said = Limited::new(answer.into_body(), MOST_SAID).collect().await;
        let said = said.map(Collected::to_bytes).unwrap_or_default();
        let status = serde_json::from_slice(&said).unwrap_or_else(|_| {
            let said = String::from_utf8_lossy(&said);
            Status::failure(cut(said.trim(), MOST_REPEATED), &code.to_string())
        });
        // That of the answer counts, whatever is said in it: some say none.
        Err(kube::Error::Api(status.with_code(code.as_u16()).boxed()))
    }

    /// Whether the API server has not come as far yet as it once was. Only one that was restored from a backup has not.
    async fn is_put_back(&self, version: &str) -> Result<bool, Error> {
        // What the list holds does not matter. With a name it is one read to the API server, and not one of all pods.
        let which = ListParams::default().fields("metadata.name=none");
        let list = self.somewhere.list(&which);
        let list = self.within("the newest version of pods", list).await?;
        let now = list.metadata.resource_version.unwrap_or_default();
        // They are growing numbers; otherwise they cannot be compared.
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

    /// The next step notices that the receiver is gone.
    async fn tell(&self, event: Event) {
        let _ = self.told.send(event).await;
    }
}

/// Ready when a caller needs the reports of a watch that began later than this one.
async fn is_doubted(doubted: &mut watch::Receiver<Option<Instant>>, since: Instant) {
    let later = |moment: &Option<Instant>| moment.is_some_and(|moment| moment > since);
    if doubted.wait_for(later).await.is_err() {
        // The sender is gone, so no caller is left.
        std::future::pending::<()>().await;
    }
}

/// The lines of an answer, as they come.
struct Lines {
    body: Body,
    /// What came and is no line yet.
    begun: Vec<u8>,
    /// So much of it has no end of a line in it.
    searched: usize,
}

impl Lines {
    fn of(body: Body) -> Self {
        Self {
            body,
            begun: Vec::new(),
            searched: 0,
        }
    }

    /// The next; `None`: there is none any more. What was begun and not ended is dropped with the answer: the next watch tells it again.
    /// Nothing is lost where this is not awaited to its end.
    async fn next(&mut self) -> kube::Result<Option<Vec<u8>>> {
        loop {
            let unsearched = self.begun.iter().skip(self.searched);
            if let Some(end) = unsearched.copied().position(|byte| byte == b'\n') {
                let rest = self.begun.split_off(self.searched + end + 1);
                self.searched = 0;
                return Ok(Some(std::mem::replace(&mut self.begun, rest)));
            }
            self.searched = self.begun.len();
            let Some(frame) = self.body.frame().await else {
                return Ok(None);
            };
            // What is no data are the headers after the end, of which there are none.
            if let Ok(data) = frame?.into_data() {
                self.begun.extend_from_slice(&data);
            }
        }
    }
}
