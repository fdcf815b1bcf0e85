//! The client without an engine: how it treats many peers, and its connections.

use std::sync::atomic::AtomicU64;

use super::*;
use crate::model::Pod;

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
                name: NodeId::new(&format!("node-{number}")).expect("a name"),
                // No process listens there.
                address: "127.0.0.1:1".to_owned(),
                key: Sha256(key),
            }
        };
        Arc::new(Self {
            peers: (0..count).map(peer).collect(),
            searches: AtomicU64::new(0),
        })
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

/// Asks all peers for content, and waits until each has answered or failed.
async fn asks(client: &Arc<Client>) {
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
    let mut told = asking.find(&name, &reader, Duration::from_secs(30), Patience::Now);
    assert!(told.recv().await.is_none(), "no peer has it");
}

#[tokio::test]
async fn a_question_to_all_nodes_of_a_large_cluster_is_linear_and_leaves_no_connection() {
    let roster = Listed::new(1_000);
    let client = client_of(&roster);
    asks(&client).await;
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
