//! Who may ask, and for what: wrong and unknown keys, and content of another tenant.

use std::sync::atomic::Ordering;

use baggageclaim::distribution::Patience;
use baggageclaim::distribution::roster::Reader;
use baggageclaim::link;
use baggageclaim::model::{Name, Pod, Sha256};
use baggageclaim::proto::peer::v1 as wire;
use tonic::Code;
use wire::peer_client::PeerClient;

use crate::common::bench::{NEVER, soon};
use crate::nodes::{INPUT, Node, OUTPUT, TASK, endless, name, peers, tenant, text};

fn pod(name: &str) -> Pod {
    Pod {
        uid: format!("pod-{name}").parse().expect("a uid"),
        name: name.to_owned(),
        service_account: None,
    }
}

#[tokio::test]
async fn a_server_with_another_key_is_not_asked() {
    let [a, b] = peers!("a", "b");
    a.commit("made", &TASK, "text").await;
    let other = Sha256([7; 32]);
    b.knows_at(&a, a.address, other, None);
    assert_eq!(b.sees("read", &TASK).await, None);
    assert_eq!((b.figures().questions_failed, a.figures().offered), (1, 0));
    b.knows(&a);
    assert_eq!(b.sees("again", &TASK).await, text("text"));
    a.finish().await;
    b.finish().await;
}

#[tokio::test]
async fn a_client_with_an_unknown_key_is_refused_and_counted() {
    let [a, b] = peers!("a", "b");
    a.commit("made", &TASK, "text").await;
    a.known_forgets();
    assert_eq!(b.sees("read", &TASK).await, None);
    let figures = a.figures();
    assert_eq!((figures.refused, figures.offered), (1, 0));
    a.finish().await;
    b.finish().await;
}

/// Many requests that never end must not fill the memory of a node.
#[tokio::test]
async fn a_client_with_an_unknown_key_is_refused_before_its_request_is_read() {
    let [a] = peers!("a");
    let stranger = link::Key::generate().expect("a key");
    let channel = link::connect(&stranger, a.key.name(), a.address.to_string());
    let get = "/baggageclaim.peer.v1.Peer/GetLayer";
    let refused = endless::<wire::GetLayerRequest>(channel.expect("TLS"), get).await;
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    a.finish().await;
}

/// A node that was taken over must not fill the memory of the others with connections.
#[tokio::test]
async fn a_node_has_so_many_connections_and_no_more() {
    let [a, b] = peers!("a", "b");
    let connect = async || {
        let channel = link::connect(&b.key, a.key.name(), a.address.to_string());
        let mut client = PeerClient::new(channel.expect("TLS"));
        let answer = client.get_artifact(wire::GetArtifactRequest { ask: None });
        let code = answer.await.expect_err("it asks for nothing").code();
        (client, code)
    };
    let mut open = Vec::new();
    for number in 0..16 {
        let (client, code) = connect().await;
        assert_eq!(code, Code::InvalidArgument, "{number}");
        open.push(client);
    }
    assert_ne!(connect().await.1, Code::InvalidArgument);
    // The end of one makes room.
    open.pop();
    let room = async { while connect().await.1 != Code::InvalidArgument {} };
    soon("there is room", room).await;
    a.finish().await;
    b.finish().await;
}

#[tokio::test]
async fn content_of_a_tenant_that_the_peer_may_not_read_is_refused() {
    let [a, b] = peers!("a", "b");
    a.commit("made", &OUTPUT, "text").await;
    a.knows_at(&b, b.address, b.key.name(), Some(vec![tenant("other")]));
    let asks = async |name: Name| {
        let reader = Reader {
            tenant: name.tenant.clone(),
            pod: pod("read"),
        };
        let mut found = b.peers().find(&name, &reader, NEVER, Patience::Now);
        found.recv().await
    };
    assert!(asks(name("artifact/built")).await.is_none());
    assert_eq!(a.figures().refused, 1);
    // The same name of the tenant that it may read is another one.
    let mut other = name("artifact/built");
    other.tenant = tenant("other");
    assert!(asks(other).await.is_none());
    assert_eq!((a.figures().refused, a.figures().offered), (1, 0));
    a.finish().await;
    b.finish().await;
}

/// Without the controller each node asks all others, and each look at a pod is a question to the
/// API server.
#[tokio::test]
async fn only_a_node_that_has_the_content_looks_up_the_pod() {
    let [a, b] = peers!("a", "b");
    let checks = || a.known.checks.load(Ordering::SeqCst);
    let never = [&OUTPUT[..], &[("share", "never")]].concat();
    a.commit("private", &never, "private").await;
    assert_eq!(b.sees("early", &TASK).await, None);
    let find = async |reference: &str| {
        let (name, pod) = (name(reference), pod("read"));
        let tenant = name.tenant.clone();
        let reader = Reader { tenant, pod };
        let mut found = b.peers().find(&name, &reader, NEVER, Patience::Now);
        found.recv().await.is_some()
    };
    assert!(!find("artifact/built").await, "it may not leave its node");
    assert!(b.figures().questions >= 2 && checks() == 0, "{}", checks());
    a.commit("made", &TASK, "text").await;
    assert!(find("task-cache/go").await);
    assert!(checks() > 0);
    a.finish().await;
    b.finish().await;
}

/// A peer that was taken over asks for what it likes: by ids that it learned, under other names.
#[tokio::test]
#[expect(
    clippy::too_many_lines,
    reason = "one attack after the other on one pair of nodes"
)]
async fn a_layer_is_given_under_the_name_that_was_checked_and_no_other() {
    use baggageclaim::proto::peer::v1 as wire;
    let [a, b] = peers!("a", "b");
    a.commit("made", &OUTPUT, "secret").await;
    let row = a.bench.engine.artifacts(None).remove(0);
    let channel = link::connect(&b.key, a.key.name(), a.address.to_string());
    let mut client = wire::peer_client::PeerClient::new(channel.expect("TLS"));
    let ask = |tenant: &str, reference: &str| {
        Some(wire::Ask {
            tenant: tenant.to_owned(),
            reference: reference.to_owned(),
            pod: "p".to_owned(),
            pod_uid: "p".to_owned(),
            pod_namespace: String::new(),
            clone: None,
        })
    };
    let found = loop {
        let request = wire::GetArtifactRequest {
            ask: ask("ci", "artifact/built"),
        };
        let answer = client.get_artifact(request).await.expect("an answer");
        if let Some(artifact) = answer.into_inner().artifact {
            break artifact;
        }
        a.bench.engine.content_changed().await;
    };
    let layer = |ask, artifact: String, digest| wire::GetLayerRequest {
        ask,
        artifact,
        layer: digest,
        part: Some(wire::get_layer_request::Part::Table(wire::Table {})),
    };
    let digest = found.layers[0].digest.clone();
    let id = row.id.to_string();
    for (ask, id, digest, code) in [
        (
            ask("other", "artifact/built"),
            id.clone(),
            digest.clone(),
            Code::NotFound,
        ),
        (
            ask("ci", "artifact/other"),
            id.clone(),
            digest.clone(),
            Code::NotFound,
        ),
        (
            ask("ci", "artifact/built"),
            id.clone(),
            vec![1; 32],
            Code::NotFound,
        ),
        (
            ask("ci", "artifact/built"),
            id.clone(),
            vec![1; 3],
            Code::InvalidArgument,
        ),
        (
            ask("ci", "../x"),
            id.clone(),
            digest.clone(),
            Code::InvalidArgument,
        ),
        (
            ask("ci", "artifact/built"),
            "f".repeat(32),
            digest.clone(),
            Code::NotFound,
        ),
        (
            ask("ci", "artifact/built"),
            "../x".to_owned(),
            digest.clone(),
            Code::InvalidArgument,
        ),
        (None, id.clone(), digest.clone(), Code::InvalidArgument),
    ] {
        let request = layer(ask, id, digest);
        let refused = client.get_layer(request.clone()).await;
        let refused = refused.expect_err("it is refused");
        assert_eq!(refused.code(), code, "{request:?}: {refused}");
    }
    let request = layer(ask("ci", "artifact/built"), id, digest);
    let mut stream = client.get_layer(request).await.expect("given").into_inner();
    assert!(stream.message().await.expect("a chunk").is_some());
    drop((stream, client));
    a.finish().await;
    b.finish().await;
}

#[tokio::test]
async fn content_that_may_not_leave_its_node_is_not_offered() {
    let [a, b] = peers!("a", "b");
    let never = [&TASK[..], &[("share", "never")]].concat();
    a.commit("made", &never, "private").await;
    assert_eq!(b.sees("read", &TASK).await, None);
    assert_eq!(a.sees("here", &TASK).await, text("private"));
    a.finish().await;
    b.finish().await;
}

/// What is not here does not keep other content from coming.
#[tokio::test]
async fn an_input_of_another_namespace_is_not_found_there() {
    let Some(a) = Node::new("a").await else {
        return;
    };
    let b = Node::with("b", |start| {
        start.settings.input_wait = std::time::Duration::from_secs(3);
    });
    let Some(b) = b.await else { return };
    a.knows(&b);
    b.knows(&a);
    a.commit("made", &OUTPUT, "text").await;
    let mut request = b.bench.request("pod-x", "x", &INPUT);
    request.tenant = tenant("other");
    let brought = b.distribution.bring(&mut request).await;
    let error = brought.expect_err("it is of another namespace").to_string();
    assert!(error.contains("no peer has it"), "{error}");
    assert_eq!(a.figures().offered, 0);
    a.finish().await;
    b.finish().await;
}
