//! A controller that knows which node has what: nodes report to it over real connections, and ask
//! it before they ask peers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baggageclaim::catalog::Found;
use baggageclaim::distribution::roster::{Controller, Members};
use baggageclaim::engine::notice::What;
use baggageclaim::hub::{self, Figures, Handle};
use baggageclaim::model::{
    Clear, Coverage, Fence, Fences, NamespacePolicy, NodeId, Outcome, Rule, Sha256, Tenant,
    TenantOrigin,
};
use baggageclaim::server::Drain;
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::common::bench::{NEVER, eventually};
use crate::common::log::Log;
use crate::nodes::{
    INPUT, Node, OUTPUT, RESOURCE, TASK, endless, finish_all, introduce, name, text,
};

/// The nodes that a controller knows, each with its key.
#[derive(Debug, Default)]
pub(crate) struct Nodes(pub(crate) Mutex<Vec<(NodeId, Sha256)>>);

impl Members for Nodes {
    fn named(&self, key: &Sha256) -> Option<NodeId> {
        let nodes = self.0.lock();
        let found = nodes.iter().find(|(_, it)| it == key);
        found.map(|(node, _)| node.clone())
    }

    fn key(&self, node: &NodeId) -> Option<Sha256> {
        let nodes = self.0.lock();
        let found = nodes.iter().find(|(it, _)| it == node);
        found.map(|(_, key)| *key)
    }

    /// A node `east-1` is in the zone `east`.
    fn zone(&self, node: &NodeId) -> String {
        let zone = node.as_str().split_once('-').map(|(zone, _)| zone);
        zone.unwrap_or_default().to_owned()
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
pub(crate) struct Hub {
    /// The fences of the API server.
    api: Vec<Fence>,
    handle: Option<Handle>,
    usage: Duration,
    pub(crate) nodes: Arc<Nodes>,
    pub(crate) place: watch::Sender<Option<Controller>>,
    runs: Option<(Drain, JoinHandle<()>)>,
    pub(crate) figures: Arc<dyn Fn() -> Figures>,
    pub(crate) find: Arc<Find>,
}

pub(crate) type Find = dyn Fn(&[Vec<TenantOrigin>], Duration) -> Option<Vec<Found>>;

impl Hub {
    pub(crate) async fn start() -> Self {
        Self::with_usage(hub::USAGE).await
    }

    /// One whose nodes report so often what namespaces use.
    pub(crate) async fn with_usage(usage: Duration) -> Self {
        let mut hub = Self {
            api: Vec::new(),
            handle: None,
            usage,
            nodes: Arc::default(),
            place: watch::Sender::new(None),
            runs: None,
            figures: Arc::new(Figures::default),
            find: Arc::new(|_, _| None),
        };
        hub.begin().await;
        hub
    }

    /// A new process of the controller: it has another port and another key, and knows nothing.
    pub(crate) async fn begin(&mut self) {
        let listen = "127.0.0.1:0".parse().expect("an address");
        let hub = hub::Hub::open(listen, self.nodes.clone(), self.usage).await;
        let hub = hub.expect("it is bound");
        let controller = Controller {
            address: hub.address().expect("an address").to_string(),
            key: hub.key(),
        };
        let handle = hub.handle();
        self.handle = Some(handle.clone());
        self.load();
        self.find = Arc::new(handle.finder());
        self.figures = Arc::new(move || handle.figures());
        let drain = Drain::new(Duration::from_secs(10));
        let served = hub.serve(drain.clone());
        let serving = tokio::spawn(async { served.await.expect("it serves") });
        self.runs = Some((drain, serving));
        self.place.send_replace(Some(controller));
    }

    /// The controller has read these policies.
    pub(crate) fn set_policies(&self, policies: &BTreeMap<Tenant, NamespacePolicy>) {
        self.handle().set_policies(policies.clone());
    }

    pub(crate) fn handle(&self) -> &Handle {
        self.handle.as_ref().expect("it runs")
    }

    /// The controller reads the API server's fences.
    fn load(&self) {
        let mut fences = Fences::default();
        let previous = self.api.iter().map(|fence| fence.previous);
        fences.forget(previous.min().unwrap_or(0));
        for fence in &self.api {
            fences.insert(fence.clone());
        }
        self.handle().load_fences(fences);
    }

    /// A fence is made at the API server, and the controller hears of it.
    pub(crate) fn clear(&mut self, clear: impl Into<Clear>) -> Fence {
        let fence = self.handle().next_fence(clear.into());
        self.api.push(fence.clone());
        self.handle().learn_fence(fence.clone());
        fence
    }

    /// All nodes with a stream have applied this fence.
    pub(crate) async fn is_applied(&self, fence: &Fence, nodes: usize) {
        eventually("the fence is applied", || {
            let applied = self.handle().applied_fences();
            applied.len() == nodes && applied.values().all(|it| *it >= fence.number)
        })
        .await;
    }

    pub(crate) async fn end(&mut self) {
        let (drain, serving) = self.runs.take().expect("it runs");
        drain.close();
        serving.await.expect("it ends");
    }

    /// Nodes that know each other, and that this controller knows. All have a stream.
    pub(crate) async fn nodes(&self, names: &[&str]) -> Option<Vec<Node>> {
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

    pub(crate) async fn has_all(&self, nodes: &[Node]) {
        eventually("all nodes have a stream", || {
            let are_told = nodes.iter().all(|node| node.peers().is_told());
            are_told && (self.figures)().nodes == nodes.len() as u64
        })
        .await;
    }

    /// Whether it knows a node with content of this name.
    pub(crate) fn finds(&self, reference: &str) -> bool {
        let found = (self.find)(&[vec![name(reference).into()]], NEVER);
        found.is_some_and(|found| !found.is_empty())
    }

    async fn knows_coming(&self, names: u64) {
        eventually("the controller knows what is coming", || {
            (self.figures)().coming == names
        })
        .await;
    }

    pub(crate) async fn knows(&self, names: u64) {
        eventually("the controller knows the names", || {
            (self.figures)().names == names
        })
        .await;
    }
}

pub(crate) async fn finish(hub: Hub, nodes: Vec<Node>) {
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

pub(crate) async fn have_policies(nodes: &[Node], expected: &BTreeMap<Tenant, NamespacePolicy>) {
    let expected: BTreeMap<_, _> = expected.iter().collect();
    eventually("the nodes have the policies", || {
        let mut nodes = nodes.iter();
        nodes.all(|node| node.bench.engine.policies().all() == Some(expected.clone()))
    })
    .await;
}

#[tokio::test]
async fn nodes_get_all_policies_and_then_each_change_and_keep_them_without_a_controller() {
    let (mut hub, nodes) = cluster!("a", "b");
    let tenant = |name: &str| name.parse::<Tenant>().expect("a label");
    let closed = NamespacePolicy::closed;
    // The streams have begun: the controller reads the policies later.
    let mut policies = BTreeMap::from([(tenant("ci"), closed()), (tenant("qa"), closed())]);
    hub.set_policies(&policies);
    have_policies(&nodes, &policies).await;
    policies.remove(&tenant("qa"));
    policies.insert(tenant("new"), closed());
    hub.set_policies(&policies);
    have_policies(&nodes, &policies).await;

    // Another process of the controller. Until it knows the policies, those of before count.
    hub.end().await;
    hub.begin().await;
    hub.has_all(&nodes).await;
    have_policies(&nodes, &policies).await;
    let fewer = BTreeMap::from([(tenant("qa"), closed())]);
    hub.set_policies(&fewer);
    have_policies(&nodes, &fewer).await;
    // Here it knows them before the streams begin.
    hub.end().await;
    hub.begin().await;
    hub.set_policies(&BTreeMap::new());
    hub.has_all(&nodes).await;
    have_policies(&nodes, &BTreeMap::new()).await;
    finish(hub, nodes).await;
}

#[tokio::test]
async fn a_change_of_very_many_policies_ends_no_stream_and_leaves_exactly_the_new_ones() {
    let (hub, nodes) = cluster!("a", "b");
    let policy = |accounts: usize| {
        let accounts = (0..accounts).map(|number| format!("account-{number}"));
        let rule = Rule {
            names: vec!["task-cache/*".parse().expect("a pattern")],
            commit: Some(accounts.collect()),
            read: BTreeSet::new(),
        };
        NamespacePolicy {
            rules: vec![rule],
            ..NamespacePolicy::default()
        }
    };
    let names = |numbers: std::ops::Range<usize>, accounts| {
        let all = numbers.map(|number| (format!("ci-{number}"), policy(accounts)));
        let all = all.map(|(name, policy)| (name.parse::<Tenant>().expect("a label"), policy));
        all.collect::<BTreeMap<_, _>>()
    };
    let change = async |policies: &BTreeMap<Tenant, NamespacePolicy>| {
        hub.set_policies(policies);
        let expected: BTreeMap<_, _> = policies.iter().collect();
        eventually("the nodes have the policies", || {
            // A node whose stream has ended waits before it begins another one.
            assert_eq!((hub.figures)().nodes, 2, "a stream has ended");
            let mut nodes = nodes.iter();
            nodes.all(|node| node.bench.engine.policies().all() == Some(expected.clone()))
        })
        .await;
    };
    let mut policies = names(0..1_500, 20);
    change(&policies).await;
    // Most go, some stay, and many come: far more than the messages that wait for a node.
    policies = names(1_400..1_500, 20);
    policies.extend(names(1_500..3_000, 21));
    change(&policies).await;
    // All change.
    policies = names(1_400..3_000, 22);
    hub.set_policies(&policies);
    // The next change comes before a node has read the last one.
    policies.remove(&"ci-1400".parse().expect("a label"));
    change(&policies).await;
    finish(hub, nodes).await;
}

#[tokio::test]
async fn a_pod_reads_over_nodes_what_the_policy_of_another_namespace_lets_it() {
    let (hub, nodes) = cluster!("a", "b");
    let (a, b) = (&nodes[0], &nodes[1]);
    a.commit("made", &TASK, "content").await;
    hub.knows(1).await;
    let rule = |readers: &[&str]| Rule {
        names: vec!["task-cache/*".parse().expect("a pattern")],
        commit: None,
        read: readers
            .iter()
            .map(|it| it.parse().expect("a label"))
            .collect(),
    };
    let ci: Tenant = "ci".parse().expect("a label");
    let sees = async |volume: &str| {
        let attributes = [&TASK[..], &[("fromNamespace", "ci")]].concat();
        let mut request = b.bench.request(volume, volume, &attributes);
        request.tenant = "other".parse().expect("a label");
        b.distribution.bring(&mut request).await.expect("it starts");
        b.bench.engine.publish(request).await.expect("published");
        let text = std::fs::read_to_string(b.bench.target(volume).join("text")).ok();
        b.bench.outcome(volume, Outcome::Failed).await;
        b.bench.unpublish(volume).await;
        b.bench.quiet().await;
        text
    };
    for (number, (readers, expected)) in [
        (&[][..], None),
        (&["another"][..], None),
        (&["other"][..], Some("content")),
        // The copy that this node has now is not read either.
        (&["another"][..], None),
    ]
    .into_iter()
    .enumerate()
    {
        let policy = NamespacePolicy {
            rules: vec![rule(readers)],
            ..NamespacePolicy::default()
        };
        let policies = BTreeMap::from([(ci.clone(), policy)]);
        hub.set_policies(&policies);
        have_policies(&nodes, &policies).await;
        let text = sees(&format!("reader-{number}")).await;
        assert_eq!(text.as_deref(), expected, "{readers:?}");
    }
    // A node that asks all the same is refused by the holder.
    let refused = a.figures().refused;
    b.forget("task-cache/go").await;
    let open = BTreeMap::from([(
        ci.clone(),
        NamespacePolicy {
            rules: vec![rule(&["other"])],
            ..NamespacePolicy::default()
        },
    )]);
    b.bench
        .engine
        .change_policies(|policies| {
            *policies = baggageclaim::model::Policies::known(open);
        })
        .await;
    assert_eq!(sees("taken-over").await, None);
    assert_eq!(a.figures().refused, refused + 1);
    finish(hub, nodes).await;
}

#[tokio::test]
async fn a_miss_asks_only_the_node_that_has_the_content() {
    let (hub, nodes) = cluster!("a", "b", "c", "d");
    let (a, b) = (&nodes[0], &nodes[1]);
    // No node has it, and no peer is asked.
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
        eventually("the content is found", || hub.finds(&reference)).await;
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
async fn a_restore_key_with_a_star_finds_the_last_commit_of_all_nodes() {
    let (hub, mut nodes) = cluster!("a", "b", "c");
    let key = |key: &'static str| [("type", "task-cache"), ("key", key)];
    nodes[0].commit("one", &key("main-1"), "main-1").await;
    nodes[1].commit("two", &key("main-2"), "main-2").await;
    nodes[0].commit("three", &key("other"), "other").await;
    hub.knows(3).await;
    let restores = |keys: &'static str| [TASK[0], TASK[1], ("restoreKeys", keys)];
    let new = restores("x-*, main-*, other");
    // The node with older content of such a key starts from that: it asks no other node.
    assert_eq!(nodes[0].sees("here", &new).await, text("main-1"));
    assert_eq!(nodes[0].figures().questions, 0);
    let c = &mut nodes[2];
    c.heard();
    assert_eq!(c.sees("there", &new).await, text("main-2"));
    // The content has its own name, and the event tells it.
    let [hit] = &c.hits()[..] else {
        panic!("one hit is told");
    };
    assert_eq!(hit.reference, name("task-cache/main-2").reference);
    assert_eq!(hit.instead_of, Some(name("task-cache/go").reference));
    assert_eq!(hit.fetched_from.as_deref(), Some("peer b"));
    assert!(c.bench.artifact("task-cache/main-2").is_some());
    assert!(c.bench.artifact("task-cache/go").is_none());
    hub.knows(4).await;
    // Names that no restore key means are not asked for, and what is missing is not, either.
    let asked = c.figures().questions;
    assert_eq!(c.sees("none", &restores("x-*, y-*")).await, None);
    assert_eq!(c.figures().questions, asked);
    // A commit goes to the pod's own key.
    c.commit("writes", &new, "own").await;
    hub.knows(5).await;
    assert_eq!(nodes[1].sees("own", &TASK).await, text("own"));
    // A deleted key is found no more: the next one is.
    for node in &nodes {
        if node.bench.artifact("task-cache/main-2").is_some() {
            node.forget("task-cache/main-2").await;
        }
        if node.bench.artifact("task-cache/go").is_some() {
            node.forget("task-cache/go").await;
        }
    }
    hub.knows(2).await;
    assert_eq!(nodes[1].sees("next", &new).await, text("main-1"));
    finish(hub, nodes).await;
}

#[tokio::test]
async fn without_a_controller_a_restore_key_with_a_star_finds_what_is_on_the_node() {
    let Some(a) = Node::new("a").await else {
        return;
    };
    let Some(b) = Node::new("b").await else {
        return;
    };
    let nodes = [a, b];
    introduce(&nodes);
    let key = |key: &'static str| [("type", "task-cache"), ("key", key)];
    nodes[0].commit("one", &key("main-1"), "main-1").await;
    nodes[0].commit("two", &key("main"), "main").await;
    let new = [TASK[0], TASK[1], ("restoreKeys", "main-*, main")];
    assert_eq!(nodes[0].sees("here", &new).await, text("main-1"));
    // Peers are asked for whole names only.
    assert_eq!(nodes[1].sees("there", &new).await, text("main"));
    assert_eq!(nodes[1].sees("exact", &key("main-1")).await, text("main-1"));
    assert_eq!(nodes[1].sees("again", &new).await, text("main-1"));
    for node in nodes {
        node.finish().await;
    }
}

#[tokio::test]
async fn the_controller_itself_finds_the_nodes_and_learns_the_size() {
    let (hub, nodes) = cluster!("a", "b");
    let find = || {
        let found = (hub.find)(&[vec![name(INPUT[1].1).into()]], NEVER);
        found.expect("it is not busy").pop()
    };
    let asked = (hub.figures)().questions;
    assert_eq!(find(), None);
    nodes[1].commit("made", &OUTPUT, "made").await;
    let bytes = || {
        find().map(|found| {
            let holders: Vec<&str> = found.holders.iter().map(AsRef::as_ref).collect();
            assert_eq!(holders, ["b"]);
            found.bytes
        })
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

/// The calls of a connection are limited. Later questions must not wait for those that are held:
/// they would be asked of all nodes.
#[tokio::test]
async fn very_many_inputs_that_wait_delay_no_other_question() {
    const INPUTS: u64 = 400;
    let (hub, nodes) = cluster!("a", "b", "c");
    let (a, b) = (&nodes[0], &nodes[1]);
    a.commit("made", &TASK, "made elsewhere").await;
    hub.knows(1).await;
    let reads = (0..INPUTS).map(async |number| {
        let (volume, from) = (format!("input-{number}"), format!("artifact/{number}"));
        let input = [("type", "input"), ("from", from.as_str())];
        b.sees(&volume, &input).await
    });
    let others = async {
        let asked = || b.figures().located;
        eventually("all inputs have asked twice", || asked() >= 2 * INPUTS).await;
        let held = (hub.figures)().waiting;
        assert!(held <= 128, "{held}");
        assert_eq!(b.sees("read", &TASK).await, text("made elsewhere"));
        assert_eq!(b.figures().questions, 1, "only the holder was asked");
    };
    tokio::select! {
        _ = join_all(reads) => panic!("no input is there"),
        () = others => {}
    }
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
    hub.knows_coming(2).await;
    a.end("fails", Outcome::Failed).await;
    a.end("cache", Outcome::Failed).await;
    a.end("private", Outcome::Failed).await;
    hub.knows_coming(0).await;

    a.publish("maker", &OUTPUT).await;
    crate::nodes::write(&a.bench.target("maker"), "made elsewhere");
    hub.knows_coming(1).await;
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

/// Only an input waits for what another node makes.
#[tokio::test]
async fn a_cache_that_another_node_makes_starts_empty_and_does_not_wait() {
    let (hub, nodes) = cluster!("a", "b");
    let (a, b) = (&nodes[0], &nodes[1]);
    for (cache, kind) in [(&RESOURCE, "resource"), (&TASK, "task")] {
        let maker = format!("{kind}-maker");
        a.publish(&maker, cache).await;
        crate::nodes::write(&a.bench.target(&maker), kind);
        hub.knows_coming(1).await;
        let began = Instant::now();
        assert_eq!(b.sees(&format!("{kind}-early"), cache).await, None);
        // The node would wait as long as this for an answer or a transfer.
        let took = began.elapsed();
        assert!(took < NEVER / 2, "{kind}: {took:?}");
        assert_eq!(b.figures().questions, 0, "{kind}: no peer is asked");
        hub.knows_coming(1).await;
        a.end(&maker, Outcome::Succeeded).await;
        hub.knows_coming(0).await;
    }
    hub.knows(2).await;
    for (cache, kind) in [(&RESOURCE, "resource"), (&TASK, "task")] {
        let late = b.sees(&format!("{kind}-late"), cache).await;
        assert_eq!(late, text(kind));
    }
    finish(hub, nodes).await;
}

/// By name alone, `east-1` comes first.
#[tokio::test]
async fn of_two_holders_the_one_in_the_zone_of_the_reader_is_asked_first() {
    let (hub, mut nodes) = cluster!("east-1", "east-2", "west-1", "west-2");
    nodes[0].commit("made", &OUTPUT, "made").await;
    hub.knows(1).await;
    assert_eq!(nodes[2].sees("copy", &INPUT).await, text("made"));
    hub.knows(2).await;
    for (reader, holder, other, names) in [(3, 2, 0, 3), (1, 0, 2, 4)] {
        let sent = |node: usize| nodes[node].figures().sent_bytes;
        let (of_holder, of_other) = (sent(holder), sent(other));
        assert_eq!(nodes[reader].sees("read", &INPUT).await, text("made"));
        eventually("the holder has sent it", || sent(holder) > of_holder).await;
        assert_eq!(sent(other), of_other, "{:?}", nodes[reader].id);
        let [hit] = &nodes[reader].hits()[..] else {
            panic!("one hit is told");
        };
        // The message names all holders; the first is the one that is asked first.
        let from = hit.fetched_from.as_deref().expect("it was fetched");
        let first = from.split([' ', ',']).nth(1);
        assert_eq!(first, Some(nodes[holder].id.as_str()), "{from}");
        hub.knows(names).await;
    }
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
    hub.knows(3).await;
    hub.knows_coming(1).await;

    let handle = hub.handle();
    let part = handle.caches(None, None);
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

    let explained = handle.explain(&name("artifact/built"));
    let [of] = &explained.nodes[..] else {
        panic!("{explained:?}");
    };
    assert!(of.is_current && !of.is_away && &*of.node == "a");
    b.end("resource", Outcome::Failed).await;
    hub.knows_coming(0).await;
    assert_eq!(handle.caches(None, None).caches.len(), 1);
    finish(hub, nodes).await;
}

#[tokio::test]
async fn what_a_node_makes_is_reported_again_to_a_new_controller() {
    let (mut hub, nodes) = cluster!("a", "b");
    nodes[0].publish("maker", &OUTPUT).await;
    hub.knows_coming(1).await;
    hub.end().await;
    hub.begin().await;
    hub.has_all(&nodes).await;
    hub.knows_coming(1).await;
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
    for (made, kind) in [
        (&OUTPUT, "output"),
        (&RESOURCE, "resource"),
        (&TASK, "task"),
    ] {
        a.commit(kind, made, kind).await;
    }
    let other = [("type", "task-cache"), ("key", "other")];
    c.commit("other", &other, "other").await;
    hub.knows(4).await;
    hub.end().await;
    eventually("the streams end", || {
        nodes.iter().all(|node| !node.peers().is_told())
    })
    .await;
    for (read, kind) in [(&INPUT, "output"), (&RESOURCE, "resource"), (&TASK, "task")] {
        let asked = b.figures().questions + 2;
        let alone = b.sees(&format!("{kind}-alone"), read).await;
        assert_eq!(alone, text(kind));
        assert_eq!(b.figures().questions, asked, "{kind}: both peers are asked");
        // Content here needs no one.
        let here = b.sees(&format!("{kind}-here"), read).await;
        assert_eq!(here, text(kind));
        assert_eq!(b.figures().questions, asked, "{kind}");
    }
    hub.begin().await;
    hub.has_all(&nodes).await;
    hub.knows(7).await;
    let asked = b.figures().questions;
    assert_eq!(b.sees("told", &other).await, text("other"));
    assert_eq!(b.figures().questions, asked + 1, "only the holder is asked");
    finish(hub, nodes).await;
}

fn task() -> Coverage {
    Coverage::Name(name("task-cache/go"))
}

#[tokio::test]
async fn a_clear_reaches_all_nodes_and_no_writer_from_before_brings_content_back() {
    let (mut hub, nodes) = cluster!("a", "b", "c");
    let (a, b, c) = (&nodes[0], &nodes[1], &nodes[2]);
    a.commit("made", &TASK, "old").await;
    a.commit("other", &RESOURCE, "kept").await;
    hub.knows(2).await;
    assert_eq!(b.sees("copy", &TASK).await, text("old"));
    hub.knows(3).await;
    // Forks of it run on the node of the content, on one with a copy, and empty on a third one.
    for node in [a, b] {
        node.publish("writer", &TASK).await;
    }
    c.publish("writer", &[TASK[0], TASK[1], ("restoreKeys", "none")])
        .await;
    hub.knows(4).await;
    let fence = hub.clear(task());
    hub.is_applied(&fence, 3).await;
    hub.knows(1).await;
    for node in &nodes {
        let is_new = node.sees("after", &TASK).await;
        assert_eq!(is_new, None, "{:?}", node.id);
    }
    for node in &nodes {
        crate::nodes::write(&node.bench.target("writer"), "old");
        node.end("writer", Outcome::Succeeded).await;
        for reader in &nodes {
            assert_eq!(reader.sees("still", &TASK).await, None, "{:?}", reader.id);
        }
    }
    hub.knows(1).await;
    c.commit("new", &TASK, "new").await;
    hub.knows(2).await;
    assert_eq!(a.sees("new", &TASK).await, text("new"));
    assert_eq!(b.sees("other", &RESOURCE).await, text("kept"));
    // The next one clears what followed the first.
    let fence = hub.clear(Coverage::Namespace(name("task-cache/go").tenant));
    hub.is_applied(&fence, 3).await;
    hub.knows(0).await;
    for node in &nodes {
        assert_eq!(node.sees("last", &RESOURCE).await, None);
    }
    finish(hub, nodes).await;
}

#[tokio::test]
async fn what_a_node_commits_while_it_is_away_is_cleared_before_it_counts() {
    let (mut hub, mut nodes) = cluster!("a");
    // This node finds the controller by itself.
    let place = watch::Sender::new(hub.place.borrow().clone());
    let away = place.subscribe();
    let Some(b) = Node::with("b", |start| start.controller = Some(away)).await else {
        return;
    };
    let known = (b.id.clone(), b.key.name());
    hub.nodes.0.lock().push(known);
    nodes.push(b);
    introduce(&nodes);
    hub.has_all(&nodes).await;
    let (a, b) = (&nodes[0], &nodes[1]);
    b.commit("before", &TASK, "before").await;
    b.publish("writer", &TASK).await;
    hub.knows(1).await;
    place.send_replace(None);
    eventually("the stream ends", || (hub.figures)().nodes == 1).await;
    let fence = hub.clear(task());
    hub.is_applied(&fence, 1).await;
    // What it has reported does not count any more, and what it has is refused.
    assert_eq!(a.sees("one", &TASK).await, None);
    assert_eq!(
        b.sees("here", &TASK).await,
        text("before"),
        "it does not know"
    );
    crate::nodes::write(&b.bench.target("writer"), "while away");
    b.end("writer", Outcome::Succeeded).await;
    assert_eq!(a.sees("two", &TASK).await, None);
    b.publish("runs", &TASK).await;
    // It comes back. Its other content counts.
    b.commit("other", &RESOURCE, "other").await;
    place.send_replace(hub.place.borrow().clone());
    hub.has_all(&nodes).await;
    hub.is_applied(&fence, 2).await;
    hub.knows(1).await;
    b.end("runs", Outcome::Succeeded).await;
    for node in [a, b] {
        assert_eq!(node.sees("three", &TASK).await, None);
        assert_eq!(node.sees("four", &RESOURCE).await, text("other"));
    }
    finish(hub, nodes).await;
}

/// Without a controller, all peers are asked. One of them has not heard of the clear.
#[tokio::test]
async fn cleared_content_of_a_peer_is_not_fetched() {
    let (mut hub, nodes) = cluster!("a", "b");
    let (a, b) = (&nodes[0], &nodes[1]);
    let fence = hub.clear(task());
    hub.is_applied(&fence, 2).await;
    b.commit("made", &TASK, "made").await;
    b.commit("built", &OUTPUT, "built").await;
    hub.knows(2).await;
    hub.end().await;
    eventually("the streams end", || {
        nodes.iter().all(|node| !node.peers().is_told())
    })
    .await;
    assert_eq!(a.sees("one", &TASK).await, text("made"));
    // This node alone has heard of them.
    let previous = fence.number;
    let covers = Coverage::Namespace(name("task-cache/go").tenant);
    let later = Fence {
        number: previous + 1,
        previous,
        covers,
        ..fence
    };
    let applied = a.bench.engine.apply_fences(vec![later]).await;
    assert!(applied.expect("it is applied"));
    let asked = a.figures().questions;
    assert_eq!(a.sees("two", &TASK).await, None);
    assert_eq!(a.figures().questions, asked + 1, "it was offered");
    finish_all(nodes).await;
}

#[tokio::test]
async fn a_new_controller_sends_what_a_node_lacks_and_a_deleted_fence_clears_all() {
    let (mut hub, nodes) = cluster!("a", "b");
    let (a, b) = (&nodes[0], &nodes[1]);
    let first = hub.clear(task());
    hub.is_applied(&first, 2).await;
    a.commit("made", &TASK, "made").await;
    a.commit("other", &RESOURCE, "other").await;
    hub.knows(2).await;
    hub.end().await;
    // Two fences are made by another controller, and no node has heard of them.
    for _ in 0..2 {
        let previous = hub.api.last().expect("there is one").number;
        let next = Fence {
            number: previous + 10,
            previous,
            covers: task(),
            ..first.clone()
        };
        hub.api.push(next);
    }
    hub.begin().await;
    hub.has_all(&nodes).await;
    let last = hub.api[2].clone();
    hub.is_applied(&last, 2).await;
    hub.knows(1).await;
    assert_eq!(b.sees("one", &TASK).await, None);
    assert_eq!(b.sees("two", &RESOURCE).await, text("other"));
    hub.knows(2).await;
    hub.end().await;
    // The nodes are away for so long that a fence is deleted which they have not applied.
    let Some(fence) = hub.api.last().cloned() else {
        return;
    };
    hub.api = vec![Fence {
        number: fence.number + 20,
        previous: fence.number + 10,
        ..fence
    }];
    hub.begin().await;
    hub.has_all(&nodes).await;
    hub.knows(0).await;
    assert_eq!(b.sees("three", &RESOURCE).await, None);
    let fences = a.bench.engine.fences();
    assert_eq!(fences.forgotten(), hub.api[0].previous);
    finish(hub, nodes).await;
}

/// A stream may live for months. Else the node's next Hello would have all fences of that time.
#[tokio::test]
async fn a_node_forgets_a_deleted_fence_while_its_stream_goes_on() {
    let (mut hub, nodes) = cluster!("a", "b");
    let [deleted, kept] = [(), ()].map(|()| hub.clear(task()));
    hub.is_applied(&kept, 2).await;
    hub.handle().forget_fences(deleted.number);
    eventually("the nodes have forgotten it", || {
        nodes.iter().all(|node| {
            let fences = node.bench.engine.fences();
            fences.forgotten() == deleted.number && fences.all().eq([&kept])
        })
    })
    .await;
    // They apply later ones.
    let last = hub.clear(task());
    hub.is_applied(&last, 2).await;
    finish(hub, nodes).await;
}

#[tokio::test]
async fn after_an_older_etcd_what_nodes_have_cleared_is_cleared_again() {
    let (mut hub, nodes) = cluster!("a", "b");
    let (a, b) = (&nodes[0], &nodes[1]);
    let lost = hub.clear(task());
    hub.is_applied(&lost, 2).await;
    b.commit("made", &TASK, "made").await;
    hub.knows(1).await;
    hub.end().await;
    hub.api.clear();
    hub.begin().await;
    // No node's account begins before it is repeated.
    let handle = hub.handle().clone();
    let mut changes = handle.owed_changes();
    while handle.owed().is_empty() {
        changes.changed().await.expect("it runs");
    }
    assert!(handle.applied_fences().is_empty());
    let owed = handle.owed();
    assert_eq!((owed.len(), &owed[0].covers), (1, &lost.covers));
    assert_eq!(owed[0].repeats, [lost.id]);
    let again = hub.clear(owed[0].clone());
    assert!(again.number > lost.number);
    assert!(handle.owed().is_empty());
    hub.has_all(&nodes).await;
    hub.is_applied(&again, 2).await;
    assert_eq!(a.sees("gone", &TASK).await, None);
    // The chain was set back once more, while the controller runs.
    hub.api.clear();
    hub.load();
    while handle.owed().is_empty() {
        changes.changed().await.expect("it runs");
    }
    while let Some(owed) = handle.owed().first().cloned() {
        hub.clear(owed);
    }
    hub.has_all(&nodes).await;
    b.commit("new", &TASK, "new").await;
    hub.knows(1).await;
    assert_eq!(a.sees("new", &TASK).await, text("new"));
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

/// Any pod may reach the port of the controller where no NetworkPolicy holds.
#[tokio::test]
async fn strangers_do_not_fill_the_log_of_the_controller() {
    use baggageclaim::link;
    use baggageclaim::proto::hub::v1 as wire;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    let (log, _guard) = Log::begin();
    let mut hub = Hub::start().await;
    let place = hub.place.borrow().clone().expect("it runs");
    for _ in 0..40 {
        let stranger = link::Key::generate().expect("a key");
        let channel = link::connect(&stranger, place.key, place.address.clone());
        let mut client = wire::hub_client::HubClient::new(channel.expect("TLS"));
        for _ in 0..25 {
            let refused = client.find(wire::FindRequest::default()).await;
            let code = refused.expect_err("it is no node").code();
            assert_eq!(code, tonic::Code::PermissionDenied);
        }
    }
    let lines = log.count("no Pool of a node has this key");
    assert!((1..=20).contains(&lines), "{lines} lines of 1,000 calls");

    for _ in 0..100 {
        let mut stream = tokio::net::TcpStream::connect(&place.address).await;
        let stream = stream.as_mut().expect("it listens");
        stream
            .write_all(b"GET / HTTP/1.1\r\n\r\n")
            .await
            .expect("sent");
        // An error is an end, too.
        let _end = stream.read_to_end(&mut Vec::new()).await;
    }
    eventually("it is logged", || log.says("a node's handshake failed")).await;
    let lines = log.count("a node's handshake failed");
    assert!(lines <= 20, "{lines} lines of 100 connections");
    hub.end().await;
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
        prefix: false,
    };
    let stranger = link::Key::generate().expect("a key");
    let refused = client(&stranger).find(question.clone()).await;
    assert_eq!(refused.expect_err("refused").code(), Code::PermissionDenied);
    let refused = client(&stranger).attach(tokio_stream::pending()).await;
    assert_eq!(refused.expect_err("refused").code(), Code::PermissionDenied);
    let channel = link::connect(&stranger, place.key, place.address.clone());
    let find = "/baggageclaim.hub.v1.Hub/Find";
    let refused = endless::<wire::FindRequest>(channel.expect("TLS"), find).await;
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");

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

    // It uses up the numbers of fences.
    let hello = wire::Hello {
        node: "b".to_owned(),
        attempt: u64::MAX,
        applied: 1 << 61,
        ..wire::Hello::default()
    };
    let hello = wire::FromNode {
        kind: Some(Kind::Hello(hello)),
    };
    let lies = client_of_b.attach(tokio_stream::iter([hello])).await;
    let mut answers = lies.expect("the key is known").into_inner();
    let refused = tokio::time::timeout(NEVER, answers.message()).await;
    let refused = refused.expect("soon").expect_err("refused");
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert_eq!((hub.figures)().nodes, 2);
    assert!(nodes[0].peers().is_told());
    finish(hub, nodes).await;
}
