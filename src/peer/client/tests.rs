//! The client without an engine: how it asks many peers, when it closes connections, and how often
//! it asks a peer that makes the content.

use std::sync::atomic::AtomicU64;

use futures_util::future::join_all;
use tokio::net::TcpListener;
use tonic::{Request, Response};
use wire::peer_server::{Peer as Service, PeerServer};

use super::*;
use crate::link;
use crate::model::Pod;
use crate::server::Drain;

/// How long a [`Making`] takes to answer, as over a long way.
const TRIP: Duration = Duration::from_millis(20);

/// Peers that do not answer. It counts the searches for a key.
#[derive(Debug)]
struct Listed {
    peers: Vec<Peer>,
    searches: AtomicU64,
}

impl Listed {
    fn new(count: u16) -> Arc<Self> {
        let peer = |number: u16| {
            let mut key = [0; 32];
            key[..2].copy_from_slice(&number.to_be_bytes());
            Peer {
                name: NodeId::new(format!("node-{number}")).expect("a name"),
                // No process listens there.
                address: "127.0.0.1:1".to_owned(),
                key: Sha256(key),
            }
        };
        Self::of((0..count).map(peer).collect())
    }

    fn of(peers: Vec<Peer>) -> Arc<Self> {
        let searches = AtomicU64::new(0);
        Arc::new(Self { peers, searches })
    }
}

impl Roster for Listed {
    fn peers(&self, _tenant: &Tenant) -> Vec<Peer> {
        self.peers.clone()
    }

    fn count(&self) -> u64 {
        self.peers.len() as u64
    }

    fn named(&self, key: &Sha256) -> Option<NodeId> {
        self.searches.fetch_add(1, Ordering::Relaxed);
        let found = self.peers.iter().find(|peer| peer.key == *key);
        found.map(|peer| peer.name.clone())
    }

    fn peer(&self, name: &NodeId) -> Option<Peer> {
        let found = self.peers.iter().find(|peer| peer.name == *name);
        found.cloned()
    }
}

fn client_of(roster: &Arc<Listed>) -> Arc<Client> {
    let key = Key::generate().expect("a key");
    Client::new(key, roster.clone(), None, Arc::default())
}

/// Asks all peers for content, and waits until each has answered or failed, or time is up.
async fn asks(client: &Arc<Client>, within: Duration) {
    let tenant: Tenant = "ci".parse().expect("a label");
    let name = Name {
        tenant: tenant.clone(),
        reference: "task-cache/go".parse().expect("a reference"),
    };
    let pod = Pod {
        uid: "pod".parse().expect("a uid"),
        name: "pod".to_owned(),
        service_account: None,
    };
    let reader = Reader { tenant, pod };
    let asking = Asking(Arc::clone(client));
    let mut told = asking.find(&name, &reader, within, Patience::Now);
    assert!(told.recv().await.is_none(), "no peer has it");
}

#[tokio::test]
async fn a_question_to_all_nodes_of_a_large_cluster_is_linear_and_leaves_no_connection() {
    let roster = Listed::new(1_000);
    let client = client_of(&roster);
    asks(&client, Duration::from_secs(30)).await;
    assert_eq!(client.counters.figures.lock().questions, 1_000);
    let searches = roster.searches.load(Ordering::Relaxed);
    assert!(searches <= 1_000, "{searches} searches of the roster");

    // A minute later all were used, two minutes later none, except the one of a fetch.
    assert!(client.close_unused());
    assert_eq!(client.nodes.lock().len(), 1_000);
    let fetch = client.named(&roster.peers[7].name).expect("it is known");
    assert!(client.close_unused() && client.close_unused());
    assert_eq!(client.nodes.lock().len(), 1);
    drop(fetch);
    assert!(!client.close_unused());
    // It is asked again over a new connection.
    client.named(&roster.peers[7].name).expect("it is known");
    assert_eq!(client.nodes.lock().len(), 1);
}

#[tokio::test]
async fn damage_is_remembered_longer_than_a_connection() {
    let roster = Listed::new(2);
    let client = client_of(&roster);
    let artifact: ArtifactId = "0123456789abcdef0123456789abcdef".parse().expect("an id");
    let [first, second] = [0, 1].map(|number: usize| roster.peers[number].key);
    client.remember_damaged(first, artifact);
    assert!(client.is_damaged(first, artifact));
    assert!(!client.is_damaged(second, artifact), "another peer has it");
    client.named(&roster.peers[0].name).expect("it is known");
    while client.close_unused() {}
    assert!(client.is_damaged(first, artifact));
}

/// A peer whose content is always coming. It counts the questions.
#[derive(Debug, Clone, Default)]
struct Making(Arc<AtomicU64>);

#[tonic::async_trait]
impl Service for Making {
    async fn get_artifact(
        &self,
        _: Request<wire::GetArtifactRequest>,
    ) -> Result<Response<wire::GetArtifactResponse>, Status> {
        self.0.fetch_add(1, Ordering::Relaxed);
        sleep(TRIP).await;
        Ok(Response::new(wire::GetArtifactResponse {
            state: State::Coming.into(),
            ..wire::GetArtifactResponse::default()
        }))
    }

    type GetLayerStream = tokio_stream::Pending<Result<wire::Chunk, Status>>;

    async fn get_layer(
        &self,
        _: Request<wire::GetLayerRequest>,
    ) -> Result<Response<Self::GetLayerStream>, Status> {
        Err(Status::not_found("it is coming"))
    }

    async fn report_damage(
        &self,
        _: Request<wire::ReportDamageRequest>,
    ) -> Result<Response<wire::ReportDamageResponse>, Status> {
        Err(Status::not_found("it is coming"))
    }
}

impl Making {
    async fn serve(&self) -> Peer {
        let key = Key::generate().expect("a key");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let drain = Drain::new(Duration::ZERO);
        let links = link::accept(&key, listener, Arc::new(|_| true), drain).expect("TLS");
        let calls = PeerServer::new(self.clone());
        let served = tonic::transport::Server::builder().serve_with_incoming(calls, links);
        tokio::spawn(served);
        Peer {
            name: NodeId::new("making").expect("a name"),
            address,
            key: key.name(),
        }
    }
}

#[tokio::test]
async fn a_peer_whose_content_is_coming_is_asked_at_longer_intervals_and_is_not_away() {
    let making = Making::default();
    let peer = making.serve().await;
    let asked = || making.0.load(Ordering::Relaxed);
    let client = client_of(&Listed::of(vec![peer.clone()]));
    asks(&client, Duration::from_secs(2)).await;
    assert!((2..=25).contains(&asked()), "{} questions in 2 s", asked());

    // Some of these end while an answer is on its way.
    let rounds = (0..50).map(|round| {
        let peer = peer.clone();
        async move {
            let client = client_of(&Listed::of(vec![peer.clone()]));
            asks(&client, Duration::from_millis(2_000 + 2 * round)).await;
            let node = client.named(&peer.name).expect("it is known");
            assert!(!node.is_away(), "round {round}");
        }
    });
    join_all(rounds).await;
}
