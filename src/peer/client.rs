//! The client: questions to the other nodes, about names for pods and about snapshots for volumes.
//! `held` is what a node has, as a source of content.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::counters::Counters;
use super::messages;
use super::source::PeerSource;
use crate::distribution::roster::{AskedClone, Directory, Located, Peer, Reader, Roster};
use crate::distribution::{Frozen, Holding, NoSnapshot, Patience, PeerAnswer, PeerFigures, Peers};
use crate::link::{Key, connect};
use crate::model::{ArtifactId, CacheKey, Name, NodeId, Sha256, Tenant};
use crate::proto::peer::v1 as wire;
use wire::get_artifact_response::State;
use wire::peer_client::PeerClient;

/// How long a peer may send nothing before the next one takes its place.
pub(super) const SILENT: Duration = Duration::from_secs(5);
/// How long a peer that did not answer in time is not asked again.
const AWAY: Duration = Duration::from_secs(5);
/// How long a peer has to tell what it has of a snapshot: it opens all tables first.
const SNAPSHOT: Duration = Duration::from_secs(30);
/// The largest message of a peer: a chunk of content, or a description of an artifact's layers.
const MOST_ANSWER: usize = 512 << 10;
/// How many answers wait for the pod that asked.
const HOLDINGS: usize = 16;
/// The least time that a peer has to answer, however long its place was looked for.
const TO_ANSWER: Duration = Duration::from_secs(1);
/// The shortest and the longest pause before a peer whose content is coming is asked again. In
/// between it is a tenth of the time since the first question.
const SHORTEST: Duration = Duration::from_millis(5);
const COMING: Duration = Duration::from_millis(500);
/// How many questions of this node the controller holds at once, at most: half of the calls that it
/// takes from one connection. The others are answered at once, and repeated.
const HELD: usize = 128;
/// A connection that is not used for so long is closed. A question to all nodes of a large cluster
/// makes thousands of them, at both ends.
const UNUSED: Duration = Duration::from_secs(60);
/// How many artifacts that peers had damaged are remembered.
const REMEMBERED: usize = 4096;

/// The other nodes, as the distribution asks them.
#[derive(Debug)]
pub(super) struct Client {
    key: Key,
    roster: Arc<dyn Roster>,
    /// Which of the peers have content, if something knows that.
    directory: Option<Arc<dyn Directory>>,
    counters: Arc<Counters>,
    runtime: Handle,
    /// By key and address: a peer that moved gets a new connection. `close_unused` removes them.
    nodes: Mutex<HashMap<(Sha256, String), Arc<Node>>>,
    /// The artifacts that did not match their digests, each with the key of the peer.
    damaged: Mutex<HashSet<(Sha256, ArtifactId)>>,
    /// Places of questions that the controller holds.
    held: Semaphore,
}

/// The connection to another node.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) name: NodeId,
    pub(super) key: Sha256,
    channel: Channel,
    pub(super) counters: Arc<Counters>,
    pub(super) runtime: Handle,
    /// Until then it is not asked.
    away: Mutex<Option<Instant>>,
    /// Whether its last answer was none: the log says so once.
    failing: AtomicBool,
    /// Whether it was looked up since `close_unused` ran last.
    was_used: AtomicBool,
}

impl Client {
    /// Must be called in a tokio runtime.
    pub(super) fn new(
        key: Key,
        roster: Arc<dyn Roster>,
        directory: Option<Arc<dyn Directory>>,
        counters: Arc<Counters>,
    ) -> Arc<Self> {
        Arc::new(Self {
            key,
            roster,
            directory,
            counters,
            runtime: Handle::current(),
            nodes: Mutex::default(),
            damaged: Mutex::default(),
            held: Semaphore::new(HELD),
        })
    }

    /// The peers that may have the content of a name, the best one first. Peers that make it are
    /// told.
    async fn holders(&self, asked: &Question, wait: Duration) -> Vec<Peer> {
        let Question { name, sender, .. } = asked;
        let located = match &self.directory {
            Some(directory) => directory.locate(name, wait).await,
            None => Located::Unknown,
        };
        if located != Located::Unknown {
            self.counters.figures.lock().located += 1;
        }
        let mut peers = self.roster.peers(&name.tenant);
        match located {
            Located::Unknown => peers,
            Located::Nothing => Vec::new(),
            Located::Coming(makers) => {
                for maker in makers {
                    // Without a receiver the answer came too late.
                    let _late = sender.send(PeerAnswer::Makes(maker)).await;
                }
                Vec::new()
            }
            Located::At(holders) => {
                let place = |peer: &Peer| holders.iter().position(|node| *node == peer.name);
                if peers.iter().any(|peer| place(peer).is_some()) {
                    peers.retain(|peer| place(peer).is_some());
                    peers.sort_by_key(place);
                }
                // Else this node does not know the holders yet, and asks all.
                peers
            }
        }
    }

    /// Asks peers at once, and sends the answers of those that have content.
    fn ask(self: &Arc<Self>, peers: Vec<Peer>, asked: &Question, until: Instant) {
        for (rank, peer) in peers.into_iter().enumerate() {
            let (asked, client) = (asked.clone(), Arc::clone(self));
            // It ends by itself, so that a peer that hangs is known as such.
            self.runtime.spawn(async move {
                let node = match client.node(&peer) {
                    Ok(node) => node,
                    Err(error) => {
                        let peer = peer.name.as_str();
                        tracing::error!(peer, %error, "a peer cannot be asked");
                        return;
                    }
                };
                if let Some(mut holding) = node.ask(&client, &asked, until).await {
                    holding.rank = rank;
                    // Without a receiver the answer came too late.
                    let _late = asked
                        .sender
                        .send(PeerAnswer::Holds(Box::new(holding)))
                        .await;
                }
            });
        }
    }

    /// The node of this name, with the key and the address that it has now. The error says why it
    /// cannot be asked.
    pub(super) fn named(self: &Arc<Self>, name: &NodeId) -> Result<Arc<Node>, String> {
        let peer = self.roster.peer(name);
        let peer = peer.ok_or_else(|| "this node knows no peer of that name now".to_owned())?;
        self.node(&peer).map_err(|error| error.to_string())
    }

    fn node(self: &Arc<Self>, peer: &Peer) -> Result<Arc<Node>, rustls::Error> {
        let id = (peer.key, peer.address.clone());
        if let Some(node) = self.nodes.lock().get(&id) {
            node.was_used.store(true, Ordering::Relaxed);
            return Ok(Arc::clone(node));
        }
        // A thread that fetches is outside the runtime, which a connection needs.
        let _inside = self.runtime.enter();
        let node = Arc::new(Node {
            name: peer.name.clone(),
            key: peer.key,
            channel: connect(&self.key, peer.key, peer.address.clone())?,
            counters: Arc::clone(&self.counters),
            runtime: self.runtime.clone(),
            away: Mutex::default(),
            failing: AtomicBool::new(false),
            was_used: AtomicBool::new(true),
        });
        let mut nodes = self.nodes.lock();
        if nodes.is_empty() {
            self.runtime.spawn(expire(Arc::downgrade(self)));
        }
        Ok(Arc::clone(nodes.entry(id).or_insert(node)))
    }

    /// Closes the connections that were not used since the last call. Whether some are left.
    fn close_unused(&self) -> bool {
        let mut nodes = self.nodes.lock();
        nodes.retain(|_, node| {
            node.was_used.swap(false, Ordering::Relaxed) || Arc::strong_count(node) > 1
        });
        !nodes.is_empty()
    }

    /// Remembers that content of a peer did not match its digests.
    pub(super) fn remember_damaged(&self, peer: Sha256, artifact: ArtifactId) {
        let mut damaged = self.damaged.lock();
        if damaged.len() >= REMEMBERED {
            damaged.clear();
        }
        damaged.insert((peer, artifact));
    }

    pub(super) fn is_damaged(&self, peer: Sha256, artifact: ArtifactId) -> bool {
        self.damaged.lock().contains(&(peer, artifact))
    }
}

/// Closes unused connections, until there are none.
async fn expire(client: Weak<Client>) {
    loop {
        sleep(UNUSED).await;
        if !client.upgrade().is_some_and(|client| client.close_unused()) {
            return;
        }
    }
}

/// A question about a name for a pod, and where the answers go.
#[derive(Debug, Clone)]
struct Question {
    name: Name,
    reader: Reader,
    sender: mpsc::Sender<PeerAnswer>,
}

/// The peers of this node, as the distribution asks them.
#[derive(Debug)]
pub(super) struct Asking(pub(super) Arc<Client>);

#[async_trait]
impl Peers for Asking {
    fn find(
        &self,
        name: &Name,
        reader: &Reader,
        within: Duration,
        patience: Patience,
    ) -> mpsc::Receiver<PeerAnswer> {
        let (sender, told) = mpsc::channel(HOLDINGS);
        let asked = Question {
            name: name.clone(),
            reader: reader.clone(),
            sender,
        };
        let client = Arc::clone(&self.0);
        self.0.runtime.spawn(async move {
            let until = Instant::now() + within;
            let place = match patience {
                Patience::Waits => client.held.try_acquire().ok(),
                Patience::Now => None,
            };
            // So much time is left to ask peers.
            let longest = within.saturating_sub(TO_ANSWER);
            let wait = place.as_ref().map_or(Duration::ZERO, |_| longest);
            let holders = client.holders(&asked, wait);
            // A controller that hangs leaves time to ask all peers.
            let limit = if wait.is_zero() {
                within / 2
            } else {
                wait + TO_ANSWER / 2
            };
            let peers = match timeout(limit, holders).await {
                Ok(peers) => peers,
                Err(_) => client.roster.peers(&asked.name.tenant),
            };
            drop(place);
            client.ask(peers, &asked, until.max(Instant::now() + TO_ANSWER));
        });
        told
    }

    async fn newest(&self, tenant: &Tenant, prefix: &CacheKey) -> Option<CacheKey> {
        let directory = self.0.directory.as_ref()?;
        directory.newest(tenant, prefix).await
    }

    async fn snapshot(&self, node: &NodeId, asked: &AskedClone) -> Result<Frozen, NoSnapshot> {
        let name = node.as_str();
        let Some(peer) = self.0.roster.peer(node) else {
            let why = format!("node {name} is no peer; it has no address in its Pool");
            return Err(NoSnapshot::NotYet(why));
        };
        let node = self.0.node(&peer);
        let node = node.map_err(|error| NoSnapshot::Never(format!("node {name}: {error}")))?;
        node.ask_snapshot(&self.0, asked).await
    }

    fn is_told(&self) -> bool {
        let directory = self.0.directory.as_ref();
        directory.is_some_and(|directory| directory.is_connected())
    }

    fn figures(&self) -> PeerFigures {
        let client = &self.0;
        PeerFigures {
            peers: client.roster.count(),
            connected: self.is_told(),
            ..*client.counters.figures.lock()
        }
    }
}

impl Node {
    pub(super) fn client(&self) -> PeerClient<Channel> {
        PeerClient::new(self.channel.clone()).max_decoding_message_size(MOST_ANSWER)
    }

    fn is_away(&self) -> bool {
        self.away.lock().is_some_and(|until| Instant::now() < until)
    }

    /// Notes whether the peer answered, for people.
    fn answered(&self, has_answered: bool) {
        let now = std::time::Instant::now();
        self.counters.away.note(&self.name, has_answered, now);
    }

    fn failed(&self, name: &Name, error: &dyn std::fmt::Display) {
        self.counters.figures.lock().questions_failed += 1;
        let is_known = self.failing.swap(true, Ordering::Relaxed);
        let peer = self.name.as_str();
        let (tenant, reference) = (&name.tenant, &name.reference);
        if is_known {
            tracing::debug!(peer, %tenant, %reference, %error, "a peer did not answer");
        } else {
            tracing::warn!(peer, %tenant, %reference, %error, "a peer did not answer");
        }
    }

    /// What the peer has under a name. Content that is coming is waited for.
    async fn ask(&self, client: &Arc<Client>, asked: &Question, until: Instant) -> Option<Holding> {
        let Question {
            name,
            reader,
            sender,
        } = asked;
        if self.is_away() {
            return None;
        }
        self.counters.figures.lock().questions += 1;
        let began = Instant::now();
        let mut has_answered = false;
        loop {
            let request = wire::GetArtifactRequest {
                ask: Some(messages::ask(name, reader)),
            };
            let mut peer = self.client();
            let answer = timeout_at(until, peer.get_artifact(request)).await;
            let Ok(answer) = answer else {
                // Its content is still coming, and the time of the question is over.
                if has_answered {
                    return None;
                }
                *self.away.lock() = Some(Instant::now() + AWAY);
                self.answered(false);
                self.failed(name, &"no answer in time");
                return None;
            };
            let answer = match answer {
                Ok(answer) => answer.into_inner(),
                Err(status) => {
                    self.answered(is_an_answer(&status));
                    self.failed(name, &say(&status));
                    return None;
                }
            };
            *self.away.lock() = None;
            self.answered(true);
            if self.failing.swap(false, Ordering::Relaxed) {
                tracing::info!(peer = self.name.as_str(), "the peer answers again");
            }
            match answer.state() {
                State::Nothing => return None,
                State::Here => return self.holding(client, asked, answer.artifact),
                State::Coming => has_answered = true,
            }
            let pause = (began.elapsed() / 10).clamp(SHORTEST, COMING);
            if sender.is_closed() || Instant::now() + pause >= until {
                return None;
            }
            sleep(pause).await;
        }
    }

    /// What the peer has of a snapshot.
    async fn ask_snapshot(
        &self,
        client: &Arc<Client>,
        asked: &AskedClone,
    ) -> Result<Frozen, NoSnapshot> {
        self.counters.figures.lock().questions += 1;
        let ask = messages::ask_clone(asked);
        let request = wire::GetArtifactRequest {
            ask: Some(ask.clone()),
        };
        let mut asking = self.client();
        let answer = timeout(SNAPSHOT, asking.get_artifact(request)).await;
        let peer = self.name.as_str();
        let failed = |why: NoSnapshot| {
            self.counters.figures.lock().questions_failed += 1;
            Err(why)
        };
        let answer = match answer {
            Err(_) => return failed(NoSnapshot::NotYet(format!("node {peer} does not answer"))),
            Ok(Err(status)) => {
                let why = format!("node {peer}: {}", say(&status));
                // It may not know the key of this node yet, or the volume.
                return failed(match status.code() {
                    Code::FailedPrecondition => NoSnapshot::Never(why),
                    Code::PermissionDenied => NoSnapshot::Refused(why),
                    Code::InvalidArgument => {
                        NoSnapshot::Never(format!("{why}; its driver may be of an older version"))
                    }
                    _ => NoSnapshot::NotYet(why),
                });
            }
            Ok(Ok(answer)) => answer.into_inner(),
        };
        match answer.state() {
            State::Nothing => Err(NoSnapshot::Gone),
            State::Coming => Err(NoSnapshot::NotYet(format!(
                "node {peer} reads the snapshot, to make its tables of contents; its log says what \
                 hinders it"
            ))),
            State::Here => {
                let held = PeerSource {
                    client: Arc::clone(client),
                    node: self.name.clone(),
                    artifact: None,
                    ask,
                };
                let snapshot = answer.snapshot.as_ref();
                let snapshot = snapshot.ok_or_else(|| "snapshot is missing".to_owned());
                let frozen = snapshot.and_then(|it| messages::frozen(it, Arc::new(held)));
                frozen.map_err(|why| {
                    NoSnapshot::Never(format!("the answer of node {peer} is refused: {why}"))
                })
            }
        }
    }

    fn holding(
        &self,
        client: &Arc<Client>,
        Question { name, reader, .. }: &Question,
        artifact: Option<wire::Artifact>,
    ) -> Option<Holding> {
        let found = messages::found(name, artifact.unwrap_or_default());
        let (found, sharing) = match found {
            Ok(found) => found,
            Err(why) => {
                self.failed(name, &format!("its answer is refused: {why}"));
                return None;
            }
        };
        let artifact = found.manifest.artifact;
        if client.is_damaged(self.key, artifact) {
            return None;
        }
        Some(Holding {
            node: self.name.as_str().to_owned(),
            rank: 0,
            found,
            sharing,
            source: Arc::new(PeerSource {
                client: Arc::clone(client),
                node: self.name.clone(),
                artifact: Some(artifact),
                ask: messages::ask(name, reader),
            }),
        })
    }
}

/// Whether a peer has sent this error. Others come from the connection.
fn is_an_answer(status: &Status) -> bool {
    !matches!(
        status.code(),
        Code::Unavailable | Code::Unknown | Code::Cancelled | Code::DeadlineExceeded
    )
}

/// An error of a call as a message shows it.
pub(super) fn say(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        text = error.to_string();
        cause = error.source();
    }
    let text: String = text.chars().take(300).collect();
    let code = crate::server::code_name(status.code());
    format!("{code}: {}", crate::sys::printable(&text))
}

#[cfg(test)]
mod tests;
