//! The server: what this node gives to its peers. For each call it finds out which peer calls, and
//! whether that peer may have this content. `proto/peer.proto` has the protocol.

use std::cell::RefCell;
use std::io::{self, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::Stream;
use tokio::runtime::Handle;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::counters::{Counters, Sends};
use super::lease::Leases;
use super::messages;
use super::sent::Sent;
use super::speed::Speed;
use crate::archive;
use crate::archive::toc::{Packing, Want};
use crate::distribution::roster::{Access, Asked, Refusal, Roster};
use crate::distribution::{Pace, PlacesOfEach};
use crate::engine::{Engine, OpenArtifact, OpenSnapshot};
use crate::link::{Refusals, Who};
use crate::model::{ArtifactId, NodeId, Sha256, SnapshotId};
use crate::proto::peer::v1 as wire;
use crate::server::Drain;
use wire::get_artifact_response::State;
use wire::get_layer_request::Part;

/// How many streams are sent at once, and how many of them to one peer.
const SERVES: u32 = 8;
const TO_ONE: usize = SERVES as usize / 2;
/// How many artifacts are opened at once, and how many of them for one peer.
const OPENS: u32 = 4;
const OPENS_OF_ONE: usize = OPENS as usize / 2;
/// How many reports of damage of one peer are looked at, at once.
const REPORTS: usize = 4;
/// How long a stream waits for its turn. The peer asks another holder after that.
const TURN: Duration = Duration::from_secs(2);
/// How long a peer may read nothing before its stream ends: it holds a lease.
const UNREAD: Duration = Duration::from_secs(30);
/// Bytes of a message, and how many messages wait to be sent.
const CHUNK: usize = 256 << 10;
const WAITING: usize = 4;
/// The level of zstd where the link is slower than the compression.
const LEVEL: i32 = 1;

pub(super) type Chunks = Pin<Box<dyn Stream<Item = Result<wire::Chunk, Status>> + Send>>;

/// The service.
#[derive(Debug, Clone)]
pub(super) struct Service(pub(super) Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) engine: Engine,
    roster: Arc<dyn Roster>,
    pub(super) access: Arc<dyn Access>,
    pub(super) leases: Arc<Leases<ArtifactId, OpenArtifact>>,
    pub(super) snapshots: Arc<Leases<SnapshotId, OpenSnapshot>>,
    pace: Pace,
    pub(super) counters: Arc<Counters>,
    pub(super) refusals: Refusals,
    strangers: Refusals,
    drain: Drain,
    serves: Arc<Semaphore>,
    to_one: PlacesOfEach<NodeId>,
    opens: Arc<Semaphore>,
    opens_of_one: PlacesOfEach<NodeId>,
    reports: PlacesOfEach<NodeId>,
}

impl Service {
    pub(super) fn new(
        engine: Engine,
        roster: Arc<dyn Roster>,
        access: Arc<dyn Access>,
        pace: Pace,
        counters: Arc<Counters>,
        drain: Drain,
    ) -> Self {
        Self(Arc::new(Inner {
            engine,
            roster,
            access,
            leases: Arc::default(),
            snapshots: Arc::default(),
            pace,
            counters,
            refusals: Refusals::of_peers(),
            strangers: Refusals::of_strangers(),
            drain,
            serves: Arc::new(Semaphore::new(SERVES as usize)),
            to_one: PlacesOfEach::new(TO_ONE),
            opens: Arc::new(Semaphore::new(OPENS as usize)),
            opens_of_one: PlacesOfEach::new(OPENS_OF_ONE),
            reports: PlacesOfEach::new(REPORTS),
        }))
    }

    /// Refuses a call of a stranger.
    pub(super) fn admit_caller(&self, request: Request<()>) -> Result<Request<()>, Status> {
        self.0.caller(&request).map(|_| request)
    }

    /// Ends leases that are not used any more, until the driver ends.
    pub(super) async fn expire(self) {
        loop {
            let again = self.0.leases.expire().min(self.0.snapshots.expire());
            tokio::select! {
                () = tokio::time::sleep_until(again) => {}
                () = self.0.drain.closing() => return,
            }
        }
    }

    /// Ends all leases, once the streams that run have seen that the driver ends: they hold content
    /// open.
    pub(super) async fn end(&self) {
        let inner = &self.0;
        let all = async {
            let _sent = inner.serves.acquire_many(SERVES).await;
            let _opened = inner.opens.acquire_many(OPENS).await;
        };
        if tokio::time::timeout(inner.drain.left(), all).await.is_err() {
            tracing::warn!("streams to peers do not end in time");
        }
        inner.leases.clear();
        inner.snapshots.clear();
    }
}

impl Inner {
    /// The peer that calls.
    pub(super) fn caller<T>(&self, request: &Request<T>) -> Result<(NodeId, Who), Status> {
        let who = request.extensions().get::<Who>().copied();
        let who = who.ok_or_else(|| Status::internal("a connection without a key"))?;
        let Some(peer) = self.roster.named(&who.key) else {
            self.counters.figures.lock().refused += 1;
            if self.strangers.is_news(who.key.to_string()) {
                tracing::warn!(address = %who.address, key = %who.key,
                    "refused: no peer has this key");
            }
            return Err(Status::permission_denied(
                "this node knows no peer that has your key",
            ));
        };
        Ok((peer, who))
    }

    /// A place among the openings for a peer, and one among all openings.
    pub(super) async fn place_to_open(
        &self,
        peer: &NodeId,
    ) -> Result<[OwnedSemaphorePermit; 2], Status> {
        let to_all = Arc::clone(&self.opens);
        let places = async {
            let one = self.opens_of_one.take(peer).await?;
            Ok::<_, AcquireError>([one, to_all.acquire_owned().await?])
        };
        let places = places.await;
        places.map_err(|_| Status::unavailable("the driver ends"))
    }

    /// What a peer asks for, if it may have this content.
    pub(super) async fn admit(
        &self,
        peer: &NodeId,
        who: Who,
        ask: Option<wire::Ask>,
    ) -> Result<Asked, Status> {
        let asked = messages::asked(ask).map_err(Status::invalid_argument)?;
        self.check(peer, who, &asked).await?;
        Ok(asked)
    }

    /// Whether a peer may have this content. A refusal is logged, once a minute for each peer,
    /// name, pod and reason.
    async fn check(&self, peer: &NodeId, who: Who, asked: &Asked) -> Result<(), Status> {
        // The newest policies that this node knows count, for each call.
        let checked = if self.engine.policies().may_read(&asked.name, &asked.reader) {
            self.access.check(peer, asked).await
        } else {
            let (tenant, reader) = (&asked.name.tenant, &asked.reader);
            let why = format!("no cache policy of namespace {tenant} lets {reader} read it");
            Err(Refusal::Denied(why))
        };
        checked.map_err(|refusal| {
            self.counters.figures.lock().refused += 1;
            let of = (peer.as_str(), &asked.name, &asked.pod.name);
            if self.refusals.is_news(format!("{of:?}: {refusal}")) {
                tracing::warn!(
                    peer = peer.as_str(), address = %who.address, tenant = %asked.name.tenant,
                    reference = %asked.name.reference, why = %refusal,
                    pod = crate::sys::printable(&asked.pod.name),
                    "refused: the peer may not have this content"
                );
            }
            status(refusal)
        })
    }

    /// The artifact of a request, opened.
    async fn sent_artifact(
        &self,
        peer: &NodeId,
        artifact: &str,
        asked: &Asked,
    ) -> Result<Sent, Status> {
        let id: ArtifactId = artifact
            .parse()
            .map_err(|_| Status::invalid_argument("artifact"))?;
        let open = self.open(peer, id).await?.ok_or_else(gone)?;
        // Content is given under the name that was checked, and under no other.
        let is_named = open.artifact.name() == asked.name;
        if !is_named || !open.artifact.sharing.may_leave() {
            return Err(gone());
        }
        Ok(Sent::Artifact(open))
    }

    /// A place among the streams of a peer, and one among all streams. A peer that reads next to
    /// nothing, on purpose or not, must not keep the others from content for hours.
    async fn turn(&self, peer: &NodeId) -> Result<[OwnedSemaphorePermit; 2], Status> {
        let to_all = Arc::clone(&self.serves);
        let turn = async {
            let one = self.to_one.take(peer).await?;
            Ok::<_, AcquireError>([one, to_all.acquire_owned().await?])
        };
        if let Ok(Ok(places)) = tokio::time::timeout(TURN, turn).await {
            return Ok(places);
        }
        self.counters.figures.lock().busy += 1;
        let why = "this node sends as many streams as it may, to all peers or to this one";
        Err(Status::resource_exhausted(why))
    }

    /// Opens an artifact, on a thread that may block, and keeps it.
    async fn open(
        &self,
        peer: &NodeId,
        id: ArtifactId,
    ) -> Result<Option<Arc<OpenArtifact>>, Status> {
        if let Some(open) = self.leases.get(&id) {
            return Ok(Some(open));
        }
        let places = self.place_to_open(peer).await?;
        if let Some(open) = self.leases.get(&id) {
            return Ok(Some(open));
        }
        let (engine, leases) = (self.engine.clone(), Arc::clone(&self.leases));
        let opened = apart("peer-open", places, move || {
            let open = engine.open_layers(id)?;
            Ok::<_, crate::engine::Error>(open.map(|open| leases.keep(id, open)))
        });
        let opened = opened.await?;
        opened.map_err(|error| {
            tracing::warn!(artifact = %id, %error, "an artifact cannot be opened for a peer");
            Status::unavailable("the artifact cannot be opened")
        })
    }
}

/// The peer asked for what is not, or not any more, here.
pub(super) fn gone() -> Status {
    Status::not_found("this node does not have that layer under that name")
}

/// The gRPC status for a refusal.
pub(super) fn status(refusal: Refusal) -> Status {
    match refusal {
        Refusal::Denied(why) => Status::permission_denied(why),
        Refusal::Unknown(why) => Status::unavailable(why),
    }
}

/// Runs a call that blocks on a thread of its own, which holds the places.
pub(super) async fn apart<T: Send + 'static>(
    name: &str,
    places: [OwnedSemaphorePermit; 2],
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Status> {
    let (answer, answered) = oneshot::channel();
    let thread = std::thread::Builder::new().name(name.to_owned());
    let started = thread.spawn(move || {
        let _places = places;
        drop(answer.send(call()));
    });
    started.map_err(|error| Status::unavailable(format!("no thread can be started: {error}")))?;
    // A panic was printed where it happened.
    answered
        .await
        .map_err(|_| Status::internal("a defect of the peer; see its log"))
}

#[tonic::async_trait]
impl wire::peer_server::Peer for Service {
    async fn get_artifact(
        &self,
        request: Request<wire::GetArtifactRequest>,
    ) -> Result<Response<wire::GetArtifactResponse>, Status> {
        let inner = &self.0;
        let (peer, who) = inner.caller(&request)?;
        let ask = request.into_inner().ask;
        if let Some(clone) = ask.as_ref().and_then(|ask| ask.clone.as_ref()) {
            let asked = inner.admit_clone(&peer, who, clone).await?;
            return inner.get_snapshot(&peer, &asked).await;
        }
        let asked = messages::asked(ask).map_err(Status::invalid_argument)?;
        let answer = |state: State, artifact| {
            let state = state.into();
            let snapshot = None;
            Ok(Response::new(wire::GetArtifactResponse {
                state,
                artifact,
                snapshot,
            }))
        };
        let name = &asked.name;
        let local = || {
            let local = inner.engine.local(&name.tenant, &name.reference);
            local.filter(|it| it.sharing.may_leave())
        };
        // Without the controller all nodes are asked. Only those that have the content look up the
        // pod in the API server.
        if local().is_none() {
            return answer(State::Nothing, None);
        }
        inner.check(&peer, who, &asked).await?;
        // The check may have taken long.
        let Some(local) = local() else {
            return answer(State::Nothing, None);
        };
        if !local.durable {
            return answer(State::Coming, None);
        }
        let Some(open) = inner.open(&peer, local.id).await? else {
            let is_coming = inner.engine.can_leave(local.id);
            let state = if is_coming {
                State::Coming
            } else {
                State::Nothing
            };
            return answer(state, None);
        };
        // Opening it may have shown that it must stay.
        if !open.artifact.sharing.may_leave() {
            inner.leases.end(&local.id);
            return answer(State::Nothing, None);
        }
        inner.counters.figures.lock().offered += 1;
        tracing::debug!(peer = peer.as_str(), tenant = %name.tenant, reference = %name.reference,
            artifact = %local.id, pod = asked.pod.name, "offered to a peer");
        answer(State::Here, Some(messages::artifact(&open)))
    }

    type GetLayerStream = Chunks;

    async fn get_layer(
        &self,
        request: Request<wire::GetLayerRequest>,
    ) -> Result<Response<Chunks>, Status> {
        let inner = &self.0;
        let (peer, who) = inner.caller(&request)?;
        let request = request.into_inner();
        let clone = request.ask.as_ref().and_then(|ask| ask.clone.as_ref());
        let content = if let Some(clone) = clone {
            let asked = inner.admit_clone(&peer, who, clone).await?;
            inner.sent_snapshot(&peer, &asked).await?
        } else {
            let asked = inner.admit(&peer, who, request.ask.clone()).await?;
            inner
                .sent_artifact(&peer, &request.artifact, &asked)
                .await?
        };
        let digest = messages::digest(&request.layer).map_err(Status::invalid_argument)?;
        let wants = match request.part {
            Some(Part::Table(_)) => None,
            Some(Part::Content(content)) => {
                Some(messages::wanted(&content.wants).map_err(Status::invalid_argument)?)
            }
            None => return Err(Status::invalid_argument("part is missing")),
        };
        let is_it = |sha256: [u8; 32]| sha256 == digest.0;
        let layers = content.layers().iter();
        let mut layers = layers.map(|layer| layer.table.digest().sha256);
        let place = layers.position(is_it).ok_or_else(gone)?;
        let places = inner.turn(&peer).await?;
        let (sender, receiver) = mpsc::channel(WAITING);
        let sending = Sending {
            service: self.clone(),
            content,
            place,
            digest,
            peer,
            sender,
            runtime: Handle::current(),
            began: Instant::now(),
            speed: RefCell::default(),
        };
        let sends = Sends::begin(&inner.counters);
        let thread = std::thread::Builder::new().name("peer-serve".to_owned());
        let started = thread.spawn(move || {
            let _held = (places, sends);
            sending.run(wants.as_deref());
        });
        started
            .map_err(|error| Status::unavailable(format!("no thread can be started: {error}")))?;
        let chunks: Chunks = Box::pin(ReceiverStream::new(receiver));
        Ok(Response::new(chunks))
    }

    async fn report_damage(
        &self,
        request: Request<wire::ReportDamageRequest>,
    ) -> Result<Response<wire::ReportDamageResponse>, Status> {
        let inner = Arc::clone(&self.0);
        let (peer, who) = inner.caller(&request)?;
        let place = inner.reports.take(&peer).await;
        let place = place.map_err(|_| Status::unavailable("the driver ends"))?;
        // A report runs to its end, also when the peer goes away.
        let report = tokio::spawn(async move {
            let _place = place;
            inner.report_damage(&peer, who, request.into_inner()).await
        });
        let reported = report.await;
        reported.map_err(|_| Status::internal("a defect of the peer; see its log"))?
    }
}

/// One stream. It holds the content.
struct Sending {
    service: Service,
    content: Sent,
    place: usize,
    digest: Sha256,
    peer: NodeId,
    sender: mpsc::Sender<Result<wire::Chunk, Status>>,
    runtime: Handle,
    began: Instant,
    speed: RefCell<Speed>,
}

impl Sending {
    /// Sends, on a thread that may block.
    fn run(self, wants: Option<&[Want]>) {
        let inner = &self.service.0;
        let layer = &self.content.layers()[self.place];
        let mut out = Output {
            sending: &self,
            buffer: Vec::with_capacity(CHUNK),
        };
        let stop = || inner.drain.has_begun() || self.sender.is_closed();
        let sent = match wants {
            None => layer.table.write_to(&mut out),
            Some(wants) => {
                let packing = Packing {
                    level: LEVEL,
                    is_awaited: &|| self.is_awaited(),
                    // The peer does.
                    verifies: false,
                };
                let all = &mut |_| Ok(true);
                let sent = layer.holder.send(wants, &mut out, packing, all, &stop);
                sent.map(drop)
            }
        };
        let flushed = sent.and_then(|()| out.flush().map_err(archive::Error::Write));
        match flushed {
            Ok(()) => inner.counters.figures.lock().sent += 1,
            Err(error) => {
                tracing::debug!(peer = self.peer.as_str(), content = %self.content,
                    layer = %self.digest, %error, "a stream to a peer ended early");
                let status = match error {
                    // It would fail each time: the peer goes on to the next holder.
                    archive::Error::Shrunk { .. } | archive::Error::Damaged { .. } => {
                        inner.found_damaged(&self.content, self.digest, &error, &self.runtime);
                        gone()
                    }
                    // It may be the peer that ended it, or the driver.
                    error => Status::unavailable(error.to_string()),
                };
                let told = self.sender.send(Err(status));
                let _told = self
                    .runtime
                    .block_on(async { tokio::time::timeout(TURN, told).await });
            }
        }
    }

    /// Whether the link takes content faster than this thread compresses it: it is a fast one, or
    /// has taken most of the last frame while the next one was read.
    fn is_awaited(&self) -> bool {
        let is_fast = self.speed.borrow().is_fast() || self.sender.capacity() > WAITING / 2;
        is_fast && !self.service.0.pace.has_limit()
    }

    fn send(&self, data: Vec<u8>) -> io::Result<()> {
        let inner = &self.service.0;
        let length = data.len();
        let data = data.into();
        let pause = inner.pace.take(length, Instant::now());
        let chunk = Ok(wire::Chunk { data });
        self.runtime.block_on(async {
            if !pause.is_zero() {
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = self.sender.closed() => {}
                    () = inner.drain.begun() => {}
                }
            }
            let send = tokio::time::timeout(UNREAD, self.sender.send(chunk));
            match send.await {
                Ok(Ok(())) => Ok(()),
                Ok(Err(_)) => Err(io::Error::other("the peer reads no more")),
                Err(_) => Err(io::Error::other("the peer read nothing for 30 seconds")),
            }
        })?;
        let mut speed = self.speed.borrow_mut();
        speed.went(length as u64, self.began.elapsed());
        inner.counters.figures.lock().sent_bytes += length as u64;
        self.content.renew(inner);
        Ok(())
    }
}

/// Bytes become messages.
struct Output<'a> {
    sending: &'a Sending,
    buffer: Vec<u8>,
}

impl Write for Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(CHUNK - self.buffer.len());
        self.buffer.extend(&bytes[..taken]);
        if self.buffer.len() == CHUNK {
            self.flush()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let data = std::mem::replace(&mut self.buffer, Vec::with_capacity(CHUNK));
        self.sending.send(data)
    }
}
