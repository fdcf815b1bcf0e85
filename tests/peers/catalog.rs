//! A controller that knows which node has what: nodes report to it over real connections, and ask it
//! before they ask peers.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use baggageclaim::catalog::Answer;
use baggageclaim::distribution::roster::{Controller, Members, Overview};
use baggageclaim::engine::notice::What;
use baggageclaim::hub::{self, Figures};
use baggageclaim::model::{Name, NodeId, Outcome, Sha256};
use baggageclaim::server::Drain;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::common::bench::{NEVER, eventually};
use crate::nodes::{INPUT, Node, OUTPUT, RESOURCE, TASK, introduce, name, text};

/// The nodes that a controller knows, each with its key.
#[derive(Debug, Default)]
struct Nodes(Mutex<Vec<(NodeId, Sha256)>>);

impl Members for Nodes {
    fn named(&self, key: &Sha256) -> Option<NodeId> {
        let nodes = self.0.lock();
        let found = nodes.iter().find(|(_, it)| it == key);
        found.map(|(node, _)| node.clone())
    }

    fn zone(&self, _node: &NodeId) -> String {
        String::new()
    }

    fn expected(&self) -> Option<BTreeSet<String>> {
        let nodes = self.0.lock();
        Some(
            nodes
                .iter()
                .map(|(node, _)| node.as_str().to_owned())
                .collect(),
        )
    }
}

/// A controller, and where the nodes find it. It can be started again.
struct Hub {
    nodes: Arc<Nodes>,
    place: watch::Sender<Option<Controller>>,
    runs: Option<(Drain, JoinHandle<()>)>,
    figures: Arc<dyn Fn() -> Figures>,
    overview: Option<Arc<dyn Overview>>,
    find: Arc<Find>,
}

type Find = dyn Fn(Vec<Name>, Duration) -> Option<Answer>;

impl Hub {
    async fn start() -> Self {
        let mut hub = Self {
            nodes: Arc::default(),
            place: watch::Sender::new(None),
            runs: None,
            figures: Arc::new(Figures::default),
            overview: None,
            find: Arc::new(|_, _| None),
        };
        hub.begin().await;
        hub
    }

    /// A new process of the controller: it has another port and another key, and knows nothing.
    async fn begin(&mut self) {
        let listen = "127.0.0.1:0".parse().expect("an address");
        let hub = hub::Hub::open(listen, self.nodes.clone()).await;
        let hub = hub.expect("it is bound");
        let controller = Controller {
            address: hub.address().expect("an address").to_string(),
            key: hub.key(),
        };
        self.figures = Arc::new(hub.figures());
        self.overview = Some(hub.overview());
        self.find = Arc::new(hub.finder());
        let drain = Drain::new(Duration::from_secs(10));
        let served = hub.serve(drain.clone());
        let serving = tokio::spawn(async { served.await.expect("it serves") });
        self.runs = Some((drain, serving));
        self.place.send_replace(Some(controller));
    }

    async fn end(&mut self) {
        let (drain, serving) = self.runs.take().expect("it runs");
        drain.close();
        serving.await.expect("it ends");
    }

    /// Nodes that know each other, and that this controller knows. All have a stream.
    async fn nodes(&self, names: &[&str]) -> Option<Vec<Node>> {
        let mut nodes = Vec::new();
        for name in names {
            let controller = self.place.subscribe();
            let node = Node::with(name, |start| start.controller = Some(controller)).await?;
            let known = (node.id.clone(), node.key.name());
            self.nodes.0.lock().push(known);
            nodes.push(node);
        }
        introduce(&nodes);
        self.has_all(&nodes).await;
        Some(nodes)
    }

    async fn has_all(&self, nodes: &[Node]) {
        eventually("all nodes have a stream", || {
            let are_told = nodes.iter().all(|node| node.peers().is_told());
            are_told && (self.figures)().nodes == nodes.len() as u64
        })
        .await;
    }

    async fn knows(&self, names: u64) {
        eventually("the controller knows the names", || {
            (self.figures)().names == names
        })
        .await;
    }
}

async fn finish(hub: Hub, nodes: Vec<Node>) {
    for node in nodes {
        node.finish().await;
    }
    let mut hub = hub;
    hub.end().await;
}

/// A controller, and nodes with a stream to it; the test is skipped if this machine cannot make
/// them.
macro_rules! cluster {
    ($($id:literal),+) => {{
        let hub = Hub::start().await;
        let Some(nodes) = hub.nodes(&[$($id),+]).await else {
            return;
        };
        (hub, nodes)
    }};
}

#[tokio::test]
async fn a_miss_asks_only_the_node_that_has_the_content() {
    let (hub, nodes) = cluster!("a", "b", "c", "d");
    let (a, b) = (&nodes[0], &nodes[1]);
    // Nobody has it, and no peer is asked.
    assert_eq!(b.sees("none", &TASK).await, None);
    assert_eq!((b.figures().questions, b.figures().located), (0, 1));
    for (made, read, names) in [
        (&OUTPUT, &INPUT, 1),
        (&RESOURCE, &RESOURCE, 3),
        (&TASK, &TASK, 5),
    ] {
        let kind = read[0].1;
        a.commit(&format!("{kind}-made"), made, kind).await;
        let reference = match read[0] {
            ("type", "input") => read[1].1.to_owned(),
            _ => format!("{kind}/{}", read[1].1),
        };
        // A name is known before its content is: it is coming.
        let is_found = || {
            matches!(
                (hub.find)(vec![name(&reference)], NEVER),
                Some(Answer::Found(_))
            )
        };
        eventually("the content is found", is_found).await;
        hub.knows(names).await;
        let asked = b.figures().questions;
        assert_eq!(b.sees(&format!("{kind}-read"), read).await, text(kind));
        assert_eq!(
            b.figures().questions,
            asked + 1,
            "{kind}: one peer is asked"
        );
        // The copy is reported, too.
        hub.knows(names + 1).await;
    }
    // What is deleted is not there any more.
    for node in [a, b] {
        node.forget("task-cache/go").await;
    }
    hub.knows(4).await;
    let asked = nodes[2].figures().questions;
    assert_eq!(nodes[2].sees("gone", &TASK).await, None);
    assert_eq!(nodes[2].figures().questions, asked);
    finish(hub, nodes).await;
}

#[tokio::test]
async fn the_controller_itself_finds_the_nodes_and_learns_the_size() {
    let (hub, nodes) = cluster!("a", "b");
    let find = || (hub.find)(vec![name(INPUT[1].1)], NEVER).expect("it is not busy");
    let asked = (hub.figures)().questions;
    assert_eq!(find(), Answer::Nothing);
    nodes[1].commit("made", &OUTPUT, "made").await;
    let bytes = || match find() {
        Answer::Found(found) => {
            let holders: Vec<&str> = found.holders.iter().map(AsRef::as_ref).collect();
            assert_eq!(holders, ["b"]);
            Some(found.bytes)
        }
        _ => None,
    };
    eventually("it is found", || bytes().is_some()).await;
    // It is measured only now.
    nodes[1].bench.engine.reap().await.expect("measured");
    eventually("its size is known", || bytes() > Some(0)).await;
    assert_eq!((hub.figures)().questions, asked, "no node has asked");
    finish(hub, nodes).await;
}

#[tokio::test]
async fn content_that_may_not_leave_its_node_is_not_reported() {
    let (hub, nodes) = cluster!("a", "b");
    let (a, b) = (&nodes[0], &nodes[1]);
    let [kind, key] = TASK;
    let private = [kind, key, ("share", "never")];
    a.commit("private", &private, "private").await;
    a.commit("public", &OUTPUT, "public").await;
    hub.knows(1).await;
    assert_eq!(b.sees("read", &TASK).await, None);
    assert_eq!(b.figures().questions, 0);
    finish(hub, nodes).await;
}

#[tokio::test]
async fn an_input_that_waits_is_told_when_its_content_is_made() {
    let (hub, nodes) = cluster!("a", "b", "c");
    let (a, b) = (&nodes[0], &nodes[1]);
    let read = b.sees("read", &INPUT);
    let made = async {
        eventually("the question waits", || (hub.figures)().waiting == 1).await;
        assert_eq!(b.figures().questions, 0);
        a.commit("made", &OUTPUT, "made elsewhere").await;
    };
    let (seen, ()) = tokio::join!(read, made);
    assert_eq!(seen, text("made elsewhere"));
    assert_eq!(b.figures().questions, 1, "only the holder was asked");
    finish(hub, nodes).await;
}

#[tokio::test]
async fn an_output_that_is_being_made_is_known_to_be_coming_until_its_step_fails() {
    let (hub, mut nodes) = cluster!("a", "b");
    let a = &nodes[0];
    a.publish("fails", &OUTPUT).await;
    a.publish("cache", &TASK).await;
    a.publish("private", &[OUTPUT[0], ("name", "x"), ("share", "never")])
        .await;
    hub.knows(2).await;
    a.end("fails", Outcome::Failed).await;
    a.end("cache", Outcome::Failed).await;
    a.end("private", Outcome::Failed).await;
    hub.knows(0).await;

    a.publish("maker", &OUTPUT).await;
    crate::nodes::write(&a.bench.target("maker"), "made elsewhere");
    hub.knows(1).await;
    let read = nodes[1].sees("read", &INPUT);
    let made = async {
        eventually("the question waits", || (hub.figures)().waiting == 1).await;
        nodes[0].end("maker", Outcome::Succeeded).await;
    };
    let (seen, ()) = tokio::join!(read, made);
    assert_eq!(seen, text("made elsewhere"));
    assert_eq!(nodes[1].figures().questions, 1, "only the holder was asked");
    let told = nodes[1].heard().into_iter().find_map(|what| match what {
        What::WaitingForInput { state, .. } => Some(state),
        _ => None,
    });
    assert_eq!(told, text("a step on node a is making it"));
    finish(hub, nodes).await;
}

#[tokio::test]
async fn people_see_the_caches_of_all_nodes_and_who_has_a_name() {
    let (hub, nodes) = cluster!("a", "b");
    let (a, b) = (&nodes[0], &nodes[1]);
    a.commit("task", &TASK, "task").await;
    a.commit("output", &OUTPUT, "output").await;
    hub.knows(2).await;
    assert_eq!(b.sees("copy", &TASK).await, text("task"));
    b.publish("resource", &RESOURCE).await;
    hub.knows(4).await;

    let overview = hub.overview.clone().expect("it runs");
    let part = overview.caches(None, None);
    assert_eq!(part.next, None);
    let mut caches: Vec<(String, bool, Vec<&str>)> = part
        .caches
        .iter()
        .map(|it| {
            let nodes = it.nodes.iter().map(|node| &**node).collect();
            (it.name.reference.to_string(), it.content.is_some(), nodes)
        })
        .collect();
    caches.sort();
    let expected = [
        ("resource-cache/git".to_owned(), false, vec!["b"]),
        ("task-cache/go".to_owned(), true, vec!["a", "b"]),
    ];
    assert_eq!(caches, expected);

    let explained = overview.explain(&name("artifact/built"));
    let [of] = &explained.nodes[..] else {
        panic!("{explained:?}");
    };
    assert!(of.is_current && !of.is_away && &*of.node == "a");
    b.end("resource", Outcome::Failed).await;
    hub.knows(3).await;
    assert_eq!(overview.caches(None, None).caches.len(), 1);
    drop(overview);
    finish(hub, nodes).await;
}

#[tokio::test]
async fn what_a_node_makes_is_reported_again_to_a_new_controller() {
    let (mut hub, nodes) = cluster!("a", "b");
    nodes[0].publish("maker", &OUTPUT).await;
    hub.knows(1).await;
    hub.end().await;
    hub.begin().await;
    hub.has_all(&nodes).await;
    hub.knows(1).await;
    nodes[0].end("maker", Outcome::Succeeded).await;
    assert!(nodes[1].sees("read", &INPUT).await.is_none(), "it is empty");
    hub.knows(2).await;
    finish(hub, nodes).await;
}

#[tokio::test]
async fn an_output_that_another_node_makes_again_is_the_newest_everywhere() {
    let (hub, nodes) = cluster!("a", "b", "c");
    let (a, b, c) = (&nodes[0], &nodes[1], &nodes[2]);
    a.commit("first", &OUTPUT, "first").await;
    hub.knows(1).await;
    assert_eq!(c.sees("copy", &INPUT).await, text("first"));
    hub.knows(2).await;
    // A pod that reads the older content keeps it.
    a.publish("reader", &INPUT).await;
    b.commit("second", &OUTPUT, "second").await;
    let name = name(INPUT[1].1);
    let has = |node: &Node| {
        let local = node.bench.engine.local(&name.tenant, &name.reference);
        local.is_some()
    };
    eventually("the older content loses the name", || !has(a) && !has(c)).await;
    hub.knows(1).await;
    assert!(has(b));
    let kept = std::fs::read_to_string(a.bench.target("reader").join("text"));
    assert_eq!(kept.ok(), text("first"));
    a.end("reader", Outcome::Succeeded).await;
    for (node, volume) in [(a, "a"), (b, "b"), (c, "c")] {
        assert_eq!(node.sees(volume, &INPUT).await, text("second"), "{volume}");
    }
    // The copies are as new as the original, so nothing moves any more.
    hub.knows(3).await;
    assert!((hub.figures)().superseded >= 2, "one order for each node");
    finish(hub, nodes).await;
}

#[tokio::test]
async fn without_a_controller_all_peers_are_asked_and_a_new_one_is_found() {
    let (mut hub, nodes) = cluster!("a", "b", "c");
    let (a, b, c) = (&nodes[0], &nodes[1], &nodes[2]);
    a.commit("made", &OUTPUT, "one").await;
    c.commit("cache", &TASK, "two").await;
    hub.knows(2).await;
    hub.end().await;
    eventually("the streams end", || {
        nodes.iter().all(|node| !node.peers().is_told())
    })
    .await;
    assert_eq!(b.sees("alone", &INPUT).await, text("one"));
    assert_eq!(b.figures().questions, 2, "both peers are asked");
    // Content here needs no one.
    assert_eq!(b.sees("here", &INPUT).await, text("one"));
    assert_eq!(b.figures().questions, 2);
    hub.begin().await;
    hub.has_all(&nodes).await;
    hub.knows(3).await;
    assert_eq!(b.sees("told", &TASK).await, text("two"));
    assert_eq!(b.figures().questions, 3, "only the holder is asked");
    finish(hub, nodes).await;
}

/// A node is expected that never comes: the controller does not know whether there is content.
#[tokio::test]
async fn while_accounts_are_missing_an_input_asks_all_peers() {
    let mut hub = Hub::start().await;
    let away = (NodeId::new("away").expect("a name"), Sha256([7; 32]));
    hub.nodes.0.lock().push(away);
    // The first process of the controller has heard all others.
    let Some(nodes) = hub.nodes(&["a", "b"]).await else {
        return;
    };
    let (a, b) = (&nodes[0], &nodes[1]);
    assert_eq!(b.sees("none", &TASK).await, None);
    assert_eq!((b.figures().located, b.figures().questions), (0, 1));
    let read = b.sees("read", &INPUT);
    let made = async {
        eventually("the input asks", || b.figures().questions > 1).await;
        a.commit("made", &OUTPUT, "made elsewhere").await;
    };
    let (seen, ()) = tokio::join!(read, made);
    assert_eq!(seen, text("made elsewhere"));
    hub.end().await;
    hub.begin().await;
    hub.has_all(&nodes).await;
    finish(hub, nodes).await;
}

/// A node that was taken over has a key that no Pool names, or says that it is another node.
#[tokio::test]
async fn a_key_that_is_no_nodes_gets_no_stream() {
    use baggageclaim::link;
    use baggageclaim::proto::hub::v1 as wire;
    use tonic::Code;
    use wire::from_node::Kind;
    use wire::hub_client::HubClient;

    let (hub, nodes) = cluster!("a", "b");
    let place = hub.place.borrow().clone().expect("it runs");
    let client = |key: &link::Key| {
        let channel = link::connect(key, place.key, place.address.clone());
        HubClient::new(channel.expect("TLS"))
    };
    let question = wire::FindRequest {
        tenant: "ci".to_owned(),
        kind: wire::Kind::TaskCache.into(),
        keys: vec!["go".to_owned()],
        wait_ms: 0,
    };
    let stranger = link::Key::generate().expect("a key");
    let refused = client(&stranger).find(question.clone()).await;
    assert_eq!(refused.expect_err("refused").code(), Code::PermissionDenied);
    let refused = client(&stranger).attach(tokio_stream::pending()).await;
    assert_eq!(refused.expect_err("refused").code(), Code::PermissionDenied);

    // Node b says that it is node a: the stream of a stays.
    let hello = wire::Hello {
        node: "a".to_owned(),
        attempt: u64::MAX,
        ..wire::Hello::default()
    };
    let hello = wire::FromNode {
        kind: Some(Kind::Hello(hello)),
    };
    let mut client_of_b = client(&nodes[1].key);
    let forged = client_of_b.attach(tokio_stream::iter([hello])).await;
    let mut answers = forged.expect("the key is known").into_inner();
    let refused = tokio::time::timeout(NEVER, answers.message()).await;
    let refused = refused.expect("soon").expect_err("refused");
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert_eq!((hub.figures)().nodes, 2);
    assert!(nodes[0].peers().is_told());
    finish(hub, nodes).await;
}
