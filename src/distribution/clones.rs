//! Clones of volumes of other nodes: a snapshot that a peer has becomes a persistent volume here.
//! The layers come as those of an artifact do (`fetch`).
//!
//! One run for a volume at a time. It goes on when its caller gives up, and the next caller joins
//! it. Its result waits for a caller. It ends with the distribution, when it is stopped, when its
//! volume is not wanted any more, or when a person must act; a node that does not answer is waited
//! for.

use std::collections::HashMap;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use super::context::{Context, value};
use super::fetch::try_layer;
use super::peers::{Frozen, NoSnapshot, Peers};
use super::roster::AskedClone;
use super::work::Workers;
use crate::archive::toc::Table;
use crate::engine::claims::{CreateClaim, ReceiveClaim};
use crate::engine::{Error, LayerPlace, ReceiveError, ReceiveLayer, Result};
use crate::model::{NodeId, PersistentVolume, Tenant, VolumeId, readable_bytes};
use crate::shared;

/// How many volumes are fetched at once.
const AT_ONCE: usize = 4;
/// The pause before a node that prepares its snapshot, or does not answer, is asked again.
const PAUSE: Duration = Duration::from_secs(1);
/// After how many such pauses a run that waits asks whether its volume is still wanted.
const ASKS: u32 = 30;
/// How long a node may be away in the middle of a layer. What came is given up then.
const AWAY: Duration = Duration::from_secs(120);
/// How long a result waits for a caller.
const KEPT: Duration = Duration::from_secs(600);

/// Whether a volume is still to be made, asked just before it is. `None`: not known now.
pub type IsWanted = Arc<dyn Fn() -> BoxFuture<'static, Option<bool>> + Send + Sync>;

/// A volume that is to be made of a snapshot of another node.
#[derive(Clone)]
pub struct CloneRequest {
    /// The claim.
    pub claim: CreateClaim,
    /// The volume, and the snapshot that it is made of.
    pub asked: AskedClone,
    /// The node with the snapshot.
    pub node: NodeId,
    /// Whether it is still to be made.
    pub wanted: IsWanted,
}

impl CloneRequest {
    /// Whether both make the same volume, perhaps for two objects of its name.
    fn is_same(&self, other: &Self) -> bool {
        (&self.claim, &self.asked, &self.node) == (&other.claim, &other.asked, &other.node)
    }
}

impl fmt::Debug for CloneRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AskedClone { volume, snapshot } = &self.asked;
        write!(f, "{volume} of {snapshot} of {}", self.node.as_str())
    }
}

/// How far a clone is.
#[derive(Debug)]
pub enum Cloned {
    /// It is there.
    Made(Box<PersistentVolume>),
    /// Nothing is left of it.
    Failed(Arc<Error>),
    /// It runs. What it does, in words.
    Runs(String),
}

type Outcome = std::result::Result<Box<PersistentVolume>, Arc<Error>>;

/// Makes clones.
#[derive(Debug)]
pub(super) struct Cloner {
    context: Arc<Context>,
    workers: Workers,
    runs: Mutex<HashMap<VolumeId, Arc<Run>>>,
}

/// A clone that is being made, or that waits for its caller.
#[derive(Debug)]
struct Run {
    /// As its last caller asked for it.
    request: Mutex<CloneRequest>,
    stop: CancellationToken,
    /// What it waits for, in words. Empty: content comes.
    waits: Mutex<String>,
    bytes: AtomicU64,
    of: AtomicU64,
    done: watch::Sender<Option<(Instant, Outcome)>>,
}

impl Run {
    fn new(request: CloneRequest) -> Self {
        Self {
            request: Mutex::new(request),
            stop: CancellationToken::new(),
            waits: Mutex::new("that node is asked".to_owned()),
            bytes: AtomicU64::new(0),
            of: AtomicU64::new(0),
            done: watch::Sender::new(None),
        }
    }

    fn waits(&self, why: impl Into<String>) {
        *self.waits.lock() = why.into();
    }

    /// Asks the last caller: the object of an earlier one may be gone, and another one in its
    /// place.
    fn is_wanted(&self) -> BoxFuture<'static, Option<bool>> {
        let wanted = Arc::clone(&self.request.lock().wanted);
        wanted()
    }

    /// In words that change seldom: each change is written to the API server.
    fn progress(&self) -> String {
        let from = self.request.lock().node.clone();
        let from = from.as_str();
        let waits = self.waits.lock();
        if !waits.is_empty() {
            return format!("its content is to come from node {from}: {waits}");
        }
        let (bytes, of) = (value(&self.bytes), value(&self.of).max(1));
        let tenths = (bytes.min(of) * 10 / of) * 10;
        let of = readable_bytes(of);
        format!("its content is being fetched from node {from}: {tenths} % of {of}")
    }

    fn is_old(&self) -> bool {
        let done = self.done.borrow();
        done.as_ref().is_some_and(|(at, _)| at.elapsed() >= KEPT)
    }
}

impl Cloner {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self {
            workers: context.workers("clone-fetch", AT_ONCE),
            runs: Mutex::default(),
            context,
        }
    }

    /// Begins a clone or joins the run, and waits so long for its end.
    pub(super) async fn make(self: &Arc<Self>, request: CloneRequest, wait: Duration) -> Cloned {
        let id = request.asked.volume.clone();
        let run = self.runs.lock().get(&id).cloned();
        if run.is_some_and(|run| !run.request.lock().is_same(&request)) {
            self.stop(&id).await;
        }
        let run = self.run(request);
        let mut done = run.done.subscribe();
        let ended = tokio::time::timeout(wait, done.wait_for(Option::is_some)).await;
        let ended = ended.ok().and_then(|seen| seen.ok()?.clone());
        let Some((_, outcome)) = ended else {
            return Cloned::Runs(run.progress());
        };
        self.runs.lock().remove(&id);
        match outcome {
            Ok(made) => Cloned::Made(made),
            Err(error) => Cloned::Failed(error),
        }
    }

    /// Ends the run for a volume, if there is one. What came of it is gone after that, or the
    /// volume is there.
    pub(super) async fn stop(&self, volume: &VolumeId) {
        let run = self.runs.lock().get(volume).cloned();
        if let Some(run) = run {
            run.stop.cancel();
            let mut done = run.done.subscribe();
            // The sender is in `run`.
            let _ended = done.wait_for(Option::is_some).await;
            self.runs.lock().remove(volume);
        }
    }

    /// The run that there is, or a new one.
    fn run(self: &Arc<Self>, request: CloneRequest) -> Arc<Run> {
        let mut runs = self.runs.lock();
        if let Some(run) = runs.get(&request.asked.volume) {
            *run.request.lock() = request;
            return Arc::clone(run);
        }
        runs.retain(|_, run| !run.is_old());
        let run = Arc::new(Run::new(request.clone()));
        runs.insert(request.asked.volume.clone(), Arc::clone(&run));
        let (cloner, ours) = (Arc::clone(self), Arc::clone(&run));
        self.context.tasks.spawn(async move {
            let name = format!("{request:?}");
            let made = AssertUnwindSafe(cloner.clone_now(request, &ours)).catch_unwind();
            // Callers wait for its end, also after a panic.
            let outcome = made.await.unwrap_or(Err(Error::Defect));
            let mut counters = cloner.context.counters.lock();
            let counted = counters.fetches.of_volumes();
            match &outcome {
                Ok(_) => {
                    counted.artifacts += 1;
                    counted.bytes += value(&ours.bytes);
                }
                Err(error) => {
                    counted.failures += 1;
                    tracing::warn!(%error, "a volume was not cloned: {name}");
                }
            }
            drop(counters);
            let outcome = outcome.map(Box::new).map_err(Arc::new);
            ours.done.send_replace(Some((Instant::now(), outcome)));
        });
        run
    }

    async fn clone_now(
        self: &Arc<Self>,
        request: CloneRequest,
        run: &Arc<Run>,
    ) -> Result<PersistentVolume> {
        let Some(peers) = self.context.peers.clone() else {
            return Err(refused(
                Code::ResourceExhausted,
                "this node is no peer of the others, so no volume can be cloned from another node",
            ));
        };
        let ends = || async {
            tokio::select! {
                () = run.stop.cancelled() => {}
                () = self.context.stop.cancelled() => {}
            }
        };
        let frozen = tokio::select! {
            frozen = self.frozen(&*peers, &request, run) => frozen?,
            () = ends() => return Err(Error::ShuttingDown),
        };
        run.waits("it waits for other fetches to end");
        let free = tokio::select! {
            free = self.workers.free() => free.ok_or(Error::ShuttingDown)?,
            () = ends() => return Err(Error::ShuttingDown),
        };
        let (this, ours) = (Arc::clone(self), Arc::clone(run));
        let call = move || this.receive(&*peers, &request, &frozen, &ours);
        let received = self.workers.run_on(free, call).await;
        received.unwrap_or(Err(Error::ShuttingDown))
    }

    /// Asks the node until it gives the snapshot, or never will.
    async fn frozen(&self, peers: &dyn Peers, request: &CloneRequest, run: &Run) -> Result<Frozen> {
        let mut rounds = (0..ASKS).cycle();
        loop {
            let is_due = rounds.next() == Some(0);
            let (why, asks) = match peers.snapshot(&request.node, &request.asked).await {
                Ok(frozen) => return Ok(frozen),
                Err(NoSnapshot::Gone) => {
                    return Err(Error::NoSuchSnapshot(request.asked.snapshot.to_string()));
                }
                Err(NoSnapshot::Never(why)) => return Err(refused(Code::FailedPrecondition, why)),
                Err(NoSnapshot::Refused(why)) => (why, true),
                Err(NoSnapshot::NotYet(why)) => (why, is_due),
            };
            if asks && run.is_wanted().await == Some(false) {
                return Err(unwanted(request));
            }
            run.waits(why);
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Receives all layers that this node lacks, and makes the volume. Blocks.
    fn receive(
        &self,
        peers: &dyn Peers,
        request: &CloneRequest,
        frozen: &Frozen,
        run: &Run,
    ) -> Result<PersistentVolume> {
        let layers = frozen.layers.iter().map(|layer| ReceiveLayer {
            digest: layer.digest,
            bytes: layer.space(),
        });
        let receive = ReceiveClaim {
            claim: request.claim.clone(),
            layers: layers.collect(),
            view: frozen.view,
            size: frozen.size,
        };
        run.waits("");
        let mut is_first = true;
        let make = |index: usize, place: &LayerPlace<'_>| {
            if std::mem::take(&mut is_first) {
                // The older layers are on this node.
                let missing = shared::content_of(&frozen.layers[..=index]);
                run.of.store(missing, Ordering::Relaxed);
            }
            self.layer(peers, request, frozen, index, place, run)
        };
        let may_enter = || {
            while !run.stop.is_cancelled() {
                match self.context.block_on(run.is_wanted()) {
                    Some(true) => return Ok(()),
                    Some(false) => break,
                    None => run.waits("the API server does not say whether it is still to be made"),
                }
                if !self.context.sleep(PAUSE) {
                    return Err(Error::ShuttingDown);
                }
            }
            Err(unwanted(request))
        };
        let engine = &self.context.engine;
        let received = engine.receive_claim(receive, &run.bytes, make, may_enter);
        let volume = received.map_err(|failure| error_of(request, failure))?;
        tracing::info!(volume = %volume.id, bytes = value(&run.bytes),
            "a volume was cloned from node {}", request.node.as_str());
        Ok(volume)
    }

    /// Fetches one layer. A node that restarts meanwhile has another key and address; the layer
    /// goes on where it ended.
    fn layer(
        &self,
        peers: &dyn Peers,
        request: &CloneRequest,
        frozen: &Frozen,
        index: usize,
        place: &LayerPlace<'_>,
        run: &Run,
    ) -> shared::Result<Arc<Table>> {
        let layer = &frozen.layers[index];
        let stop = || run.stop.is_cancelled() || (place.stop)();
        let place = &LayerPlace {
            stop: &stop,
            ..*place
        };
        let moved = AtomicU64::new(0);
        let mut source = Arc::clone(&frozen.source);
        let mut failed: Option<Instant> = None;
        loop {
            let before = value(&run.bytes);
            let sources = [&*source];
            let wanted = (&of_no_tenant(), layer);
            let error = match try_layer(&self.context, &sources, wanted, place, &moved, false) {
                Ok(fetched) => return Ok(fetched.table),
                Err(error) => error,
            };
            if value(&run.bytes) > before {
                failed = None;
            }
            let since = *failed.get_or_insert_with(Instant::now);
            let may_return = matches!(
                error,
                shared::Error::Away { .. }
                    | shared::Error::SlowDown { .. }
                    | shared::Error::Permanent { .. }
                    | shared::Error::Missing { .. }
            );
            if !may_return || since.elapsed() >= AWAY || stop() || !self.context.sleep(PAUSE) {
                return Err(error);
            }
            let again = peers.snapshot(&request.node, &request.asked);
            match self.context.block_on(again) {
                Ok(again) if again.layers.contains(layer) => source = again.source,
                // A node may merge layers: then they have other tables. The next try asks for them.
                Ok(_) => {
                    return Err(shared::Error::Away {
                        object: format!("layer {}", layer.digest),
                        cause: "that node has merged the layers of the snapshot".to_owned(),
                    });
                }
                Err(NoSnapshot::Gone | NoSnapshot::Never(_)) => return Err(error),
                Err(NoSnapshot::Refused(_) | NoSnapshot::NotYet(_)) => {}
            }
        }
    }
}

/// A peer gives a snapshot for a volume, whatever namespace its claim is in.
fn of_no_tenant() -> Tenant {
    "volumes".parse().expect("it is a DNS label")
}

fn refused(code: Code, message: impl Into<String>) -> Error {
    Error::Remote {
        code: code.into(),
        message: message.into(),
    }
}

fn unwanted(request: &CloneRequest) -> Error {
    let volume = &request.asked.volume;
    let why = format!("volume {volume} is not to be made any more");
    refused(Code::Aborted, why)
}

/// The engine's error for a clone that was not received. A temporary error is one after which the
/// clone is tried again.
fn error_of(request: &CloneRequest, failure: ReceiveError<shared::Error>) -> Error {
    let AskedClone { snapshot, .. } = &request.asked;
    let why = failure.to_string();
    let source = match failure {
        ReceiveError::Engine(error) => return error,
        ReceiveError::Taken(_) => return Error::Defect,
        ReceiveError::Layer { source, .. } => source,
    };
    let node = request.node.as_str();
    match source {
        shared::Error::Missing { .. } => Error::NoSuchSnapshot(snapshot.to_string()),
        shared::Error::Layer(source) => Error::Archive {
            operation: "receive a volume of another node",
            source,
        },
        shared::Error::Corrupt { .. } => refused(
            Code::FailedPrecondition,
            format!("snapshot {snapshot} is damaged on node {node}: {why}"),
        ),
        shared::Error::Stopped => Error::ShuttingDown,
        _ => refused(
            Code::Unavailable,
            format!("the content of snapshot {snapshot} did not come from node {node}: {why}"),
        ),
    }
}

#[cfg(test)]
mod tests;
