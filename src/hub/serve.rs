//! The controller's side: the streams of the nodes, their messages, and the passing of time. It
//! finds out which node calls from the key of the connection, and passes on what the catalog
//! decides. `service` has the address and the calls. Parts of what a stream carries have files of
//! their own: `chain`, `policies`, `budgets`, `generations`, `rollbacks`.
//! Calls of `Find` are in `questions`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Status, Streaming};

use super::asked::{Generation, Questions, RollbackRefusal};
use super::figures::Figures;
use super::limits::MOST_ENTRIES;
use super::messages;
use super::policies::PolicySet;
use crate::catalog::{
    Answer, Catalog, Changes, Hello, MAX_INCOMPLETE, SessionId, WaitingQuestions,
};
use crate::distribution::roster::Members;
use crate::link::{Refusals, Who};
use crate::model::{ClusterClock, Fence, Fences, NodeId, Sha256, Timestamp};
use crate::proto::hub::v1 as wire;
use wire::from_node::Kind as From;
use wire::to_node::Kind as To;

/// How many messages may wait for a node that does not read. More, and its stream ends.
pub(super) const WAITING: usize = 1024;
/// How far ahead of this controller's clock the number of a fence may be.
const AHEAD: Duration = Duration::from_hours(24);

/// A message that waits for a node. One that goes to many nodes is shared until it is sent.
pub(super) type Order = Result<Arc<wire::ToNode>, Status>;

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) members: Arc<dyn Members>,
    pub(super) state: Mutex<State>,
    /// Tells that fences became known, or are owed.
    pub(super) chain: watch::Sender<()>,
    /// The wall clock at the start, and when that was: together a clock that runs evenly.
    began: (Timestamp, Instant),
    /// The end of all streams.
    pub(super) ends: CancellationToken,
    /// Calls with a key that is no node's.
    strangers: Refusals,
    pub(super) questions: AtomicU64,
    superseded: AtomicU64,
    /// The least time between two reports of what a namespace uses.
    pub(super) usage: Duration,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) catalog: Catalog,
    pub(super) held: WaitingQuestions<oneshot::Sender<Answer>>,
    pub(super) clock: ClusterClock,
    pub(super) streams: BTreeMap<SessionId, Way>,
    /// The fences of the API server are known.
    pub(super) is_loaded: bool,
    /// Fences that the streams get when nothing is owed.
    pub(super) unsent: Vec<Fence>,
    /// The cache policies, once they are known.
    pub(super) policies: Option<PolicySet>,
    /// Fence objects that cannot be read.
    pub(super) malformed: usize,
    /// Questions of people that wait for nodes.
    pub(super) questions: Questions<Vec<Generation>>,
    /// Rollbacks that wait for nodes.
    pub(super) rollbacks: Questions<Result<(), RollbackRefusal>>,
}

/// The way to a node.
#[derive(Debug)]
pub(super) struct Way {
    pub(super) node: NodeId,
    pub(super) key: Sha256,
    pub(super) orders: mpsc::Sender<Order>,
    pub(super) ends: CancellationToken,
    /// It has got the fences that it lacked.
    pub(super) is_welcome: bool,
    /// The highest fence that it has applied.
    pub(super) applied: u64,
}

impl Inner {
    pub(super) fn new(members: Arc<dyn Members>, usage: Duration) -> Self {
        let began = (Timestamp::from(SystemTime::now()), Instant::now());
        Self {
            members,
            state: Mutex::new(State {
                catalog: Catalog::new(Fences::default(), began.0),
                held: WaitingQuestions::default(),
                clock: ClusterClock::default(),
                streams: BTreeMap::new(),
                is_loaded: false,
                unsent: Vec::new(),
                policies: None,
                malformed: 0,
                questions: Questions::default(),
                rollbacks: Questions::default(),
            }),
            chain: watch::Sender::new(()),
            began,
            ends: CancellationToken::new(),
            strangers: Refusals::of_strangers(),
            questions: AtomicU64::new(0),
            superseded: AtomicU64::new(0),
            usage,
        }
    }

    pub(super) fn now(&self) -> Timestamp {
        self.began.0.after(self.began.1.elapsed())
    }

    pub(super) fn figures(&self) -> Figures {
        let state = self.state.lock();
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        let fences = state.catalog.fences();
        let applied = state.streams.values().map(|stream| stream.applied);
        let by_all = applied.min().unwrap_or(u64::MAX);
        let waiting = fences.all().filter(|fence| fence.number > by_all);
        // A number begins with the time. The newest fence always stays.
        let old = fences.all().map(|fence| fence.number);
        let oldest = old.filter(|number| *number < fences.newest()).min();
        let time = state.clock.time(self.now());
        let oldest = oldest.map(|number| time.since(Timestamp(number)));
        Figures {
            fences_oldest_seconds: oldest.unwrap_or_default().as_secs(),
            fences: count(fences.all().count()),
            fences_waiting: count(waiting.count()),
            fences_malformed: count(state.malformed),
            nodes: count(state.streams.len()),
            names: count(state.catalog.len() - state.catalog.coming()),
            coming: count(state.catalog.coming()),
            questions: self.questions.load(Ordering::Relaxed),
            waiting: count(state.held.len()),
            superseded: self.superseded.load(Ordering::Relaxed),
        }
    }

    /// The node that calls.
    pub(super) fn caller<T>(&self, request: &Request<T>) -> Result<(NodeId, Sha256), Status> {
        let who = request.extensions().get::<Who>().copied();
        let who = who.ok_or_else(|| Status::internal("a connection without a key"))?;
        let node = self.members.named(&who.key);
        node.map(|node| (node, who.key)).ok_or_else(|| {
            // A node's Pool may be newer than what the watch has seen. The node tries again.
            if self.strangers.is_news(who.key.to_string()) {
                tracing::warn!(address = %who.address, key = %who.key,
                    "refused: no Pool of a node has this key");
            }
            Status::permission_denied("no Pool has your key")
        })
    }

    /// Does what follows from a change of the catalog.
    pub(super) fn follow(&self, state: &mut State, changes: &Changes, now: Timestamp) {
        for order in &changes.supersede {
            self.superseded.fetch_add(1, Ordering::Relaxed);
            state.send(order.session, messages::supersede(order));
        }
        for (asker, answer) in state.held.changed(&state.catalog, changes, now) {
            // The asker may have given up.
            let _late = asker.send(answer);
        }
    }

    pub(super) fn tick(&self) {
        // Nothing waits for a node that is gone, and nothing counts on what it has.
        self.end_withdrawn();
        let (now, expected) = (self.now(), self.members.expected());
        let mut state = self.state.lock();
        if let Some(expected) = expected {
            let changes = state.catalog.expect(expected, now);
            self.follow(&mut state, &changes, now);
        }
        let changes = state.catalog.tick(now);
        self.follow(&mut state, &changes, now);
        state.held.retain(|asker| !asker.is_closed());
        state.questions.forget();
        state.rollbacks.forget();
    }

    /// Ends the streams of nodes whose Pool was deleted, or has another key now. The keys are
    /// looked up without the lock, and by the name of the node, since there may be many.
    fn end_withdrawn(&self) {
        let state = self.state.lock();
        let streams = state.streams.values();
        let streams: Vec<(Sha256, NodeId, CancellationToken)> = streams
            .map(|it| (it.key, it.node.clone(), it.ends.clone()))
            .collect();
        drop(state);
        for (key, node, ends) in streams {
            if self.members.key(&node) != Some(key) {
                ends.cancel();
            }
        }
    }

    fn lost(&self, session: SessionId) {
        let now = self.now();
        let mut state = self.state.lock();
        state.streams.remove(&session);
        let changes = state.catalog.lost(session, now);
        self.follow(&mut state, &changes, now);
    }
}

impl Way {
    /// Sends an order to the node. The stream of one that does not read ends: it reports again.
    fn send(&self, order: Arc<wire::ToNode>) {
        if self.orders.try_send(Ok(order)).is_err() {
            self.ends.cancel();
        }
    }
}

impl State {
    /// Sends an order to a node.
    pub(super) fn send(&self, session: SessionId, order: impl Into<Arc<wire::ToNode>>) {
        if let Some(stream) = self.streams.get(&session) {
            stream.send(order.into());
        }
    }

    /// Sends an order to all nodes that have got the fences that they lacked.
    pub(super) fn send_all(&self, order: impl Into<Arc<wire::ToNode>>) {
        let order = order.into();
        for stream in self.streams.values().filter(|it| it.is_welcome) {
            stream.send(Arc::clone(&order));
        }
    }
}

/// A stream of a node, until it ends.
pub(super) struct Attached {
    pub(super) inner: Arc<Inner>,
    pub(super) node: NodeId,
    key: Sha256,
    pub(super) orders: mpsc::Sender<Order>,
    ends: CancellationToken,
    pub(super) session: Option<SessionId>,
}

impl Attached {
    pub(super) fn new(
        inner: Arc<Inner>,
        node: NodeId,
        key: Sha256,
        orders: mpsc::Sender<Order>,
    ) -> Self {
        let ends = inner.ends.child_token();
        Self {
            inner,
            node,
            key,
            orders,
            ends,
            session: None,
        }
    }

    pub(super) async fn run(mut self, mut messages: Streaming<wire::FromNode>) {
        let (ends, orders) = (self.ends.clone(), self.orders.clone());
        let all = async {
            while let Some(message) = messages.message().await? {
                self.heard(message).await?;
            }
            Ok::<_, Status>(())
        };
        let why = tokio::select! {
            ended = all => ended,
            () = ends.cancelled() => Err(Status::aborted("the stream was closed")),
            () = orders.closed() => Ok(()),
        };
        let node = self.node.as_str();
        match why {
            Ok(()) => tracing::info!(node, "the node's stream ended"),
            Err(status) => {
                tracing::info!(node, why = status.message(), "the node's stream ended");
                // It may be cut already.
                let _cut = self.orders.try_send(Err(status));
            }
        }
        if let Some(session) = self.session {
            self.inner.lost(session);
        }
    }

    async fn heard(&mut self, message: wire::FromNode) -> Result<(), Status> {
        match message.kind {
            Some(From::Beat(beat)) => {
                let answer = self.beat(beat);
                let sent = self.orders.send(Ok(answer.into())).await;
                sent.map_err(|_| Status::cancelled("the node is gone"))
            }
            Some(From::Hello(hello)) => self.hello(&hello).await,
            Some(From::Report(report)) => self.report(&report),
            Some(From::Applied(applied)) => self.applied(applied.fence),
            Some(From::Usage(usage)) => self.usage(&usage),
            Some(From::Generations(answer)) => self.generations(answer),
            Some(From::RolledBack(answer)) => self.rolled_back(answer),
            // Of a later version.
            None => Ok(()),
        }
    }

    fn beat(&self, beat: wire::Beat) -> wire::ToNode {
        let now = self.inner.now();
        let mut state = self.inner.state.lock();
        // Only a controller that begins continues the time of the one before.
        if beat.time > 0 && now.since(self.inner.began.0) <= MAX_INCOMPLETE {
            state.clock.adopt(Timestamp(beat.time), now);
        }
        let time = state.clock.time(now).0;
        let sent = beat.sent;
        messages::to_node(To::Beat(wire::Beat { sent, time }))
    }

    async fn hello(&mut self, hello: &wire::Hello) -> Result<(), Status> {
        let fences = messages::fences_of(hello).map_err(Status::invalid_argument)?;
        self.fences_are_loaded().await;
        let session = self.begin(hello, &fences)?;
        self.welcome(session, fences.newest()).await?;
        tracing::info!(
            node = self.node.as_str(),
            version = crate::sys::printable(&hello.version),
            "a node's stream began"
        );
        Ok(())
    }

    fn begin(&mut self, hello: &wire::Hello, fences: &Fences) -> Result<SessionId, Status> {
        if self.session.is_some() || hello.node != self.node.as_str() {
            return Err(Status::invalid_argument(
                "a stream begins with one Hello of the node whose key it uses",
            ));
        }
        let zone = self.inner.members.zone(&self.node);
        let now = self.inner.now();
        let mut state = self.inner.state.lock();
        // The next fence gets a higher number. A node that lies must not use up all numbers.
        let newest = state
            .catalog
            .fences()
            .newest()
            .max(state.clock.time(now).after(AHEAD).0);
        if fences.newest() > newest {
            return Err(Status::failed_precondition(format!(
                "it has applied fence {}, which is more than a day ahead of this controller's \
                 clock; compare the clocks",
                fences.newest()
            )));
        }
        let first = Hello {
            node: self.node.as_str(),
            zone: &zone,
            attempt: hello.attempt,
            fences,
        };
        let session = state.catalog.hello(&first, now);
        let session = session.ok_or_else(|| Status::aborted("a later stream began"))?;
        self.session = Some(session);
        for earlier in state.streams.values() {
            if earlier.node == self.node {
                earlier.ends.cancel();
            }
        }
        let stream = Way {
            node: self.node.clone(),
            key: self.key,
            orders: self.orders.clone(),
            ends: self.ends.clone(),
            is_welcome: false,
            applied: fences.newest(),
        };
        state.streams.insert(session, stream);
        drop(state);
        // Its fences may show that the chain was set back.
        self.inner.chain.send_replace(());
        Ok(session)
    }

    fn applied(&self, fence: u64) -> Result<(), Status> {
        let number = messages::applied(fence).map_err(Status::invalid_argument)?;
        let mut state = self.inner.state.lock();
        let State {
            catalog, streams, ..
        } = &mut *state;
        let stream = self.session.and_then(|it| streams.get_mut(&it));
        let stream = stream.ok_or_else(|| Status::invalid_argument("Hello comes first"))?;
        if number > catalog.fences().newest().max(stream.applied) {
            return Err(Status::invalid_argument("it was sent no such fence"));
        }
        stream.applied = stream.applied.max(number);
        catalog.fence_applied(number);
        Ok(())
    }

    fn report(&self, report: &wire::Report) -> Result<(), Status> {
        let session = self.session;
        let session = session.ok_or_else(|| Status::invalid_argument("Hello comes first"))?;
        if report.put.len() + report.drop.len() > MOST_ENTRIES {
            return Err(Status::invalid_argument("the report has too many entries"));
        }
        let report = messages::report(report).map_err(Status::invalid_argument)?;
        let now = self.inner.now();
        let mut state = self.inner.state.lock();
        let time = state.clock.time(now);
        let changes = state.catalog.report(session, &report, now, time);
        self.inner.follow(&mut state, &changes, now);
        Ok(())
    }
}
