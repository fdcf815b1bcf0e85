//! The controller and the API server are away in turn, and both at once. Pods whose content is on
//! their node start and end, and what they commit is on all nodes when the others are back.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use baggageclaim::kubelet_double::Kubelet;
use rustix::process::Signal;

use crate::common::{Fs, require_lab};
use crate::eventually;
use crate::peers::{Pair, is_told, object, publish, told, unpublish};
use crate::plane::ControlPlane;

/// Files by their path, each with all its bytes.
type Tree = BTreeMap<String, Vec<u8>>;

fn read(at: &Path) -> Tree {
    let mut tree = Tree::new();
    let mut directories = vec![at.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).expect("list") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                directories.push(path);
                continue;
            }
            let name = path.strip_prefix(at).expect("below it");
            let bytes = fs::read(&path).expect("read");
            tree.insert(name.display().to_string(), bytes);
        }
    }
    tree
}

fn write(at: &Path, tree: &Tree) {
    for (name, bytes) in tree {
        let path = at.join(name);
        fs::create_dir_all(path.parent().expect("it has one")).expect("mkdir");
        fs::write(path, bytes).expect("write");
    }
}

/// A node with its cache, of which each round makes the next version.
struct Node<'a> {
    number: usize,
    kubelet: &'a Kubelet,
    cache: Tree,
    outputs: BTreeMap<String, Tree>,
}

impl Node<'_> {
    fn key(&self) -> String {
        format!("cache-{}", self.number)
    }

    /// A pod changes the cache, and another one makes an output.
    async fn round(&mut self, round: &str) {
        let key = self.key();
        let always = ("commit", "always");
        let attributes = [("type", "task-cache"), ("key", &*key), always];
        let pod = self.kubelet.pod("ci", &format!("cache-{round}"));
        let target = publish(&pod, &attributes).await;
        assert_eq!(read(&target), self.cache, "node {}, {round}", self.number);
        let changed = Tree::from([
            ("newest".to_owned(), round.as_bytes().to_vec()),
            (format!("of/{round}"), vec![7; 50_000]),
        ]);
        write(&target, &changed);
        self.cache.extend(changed);
        unpublish(&pod).await;

        let name = format!("output-{}-{round}", self.number);
        let attributes = [("type", "output"), ("name", &*name), always];
        let pod = self.kubelet.pod("ci", &format!("output-{round}"));
        let target = publish(&pod, &attributes).await;
        assert_eq!(read(&target), Tree::new(), "node {}, {round}", self.number);
        let made = Tree::from([(format!("made/{round}"), vec![9; 50_000])]);
        write(&target, &made);
        unpublish(&pod).await;
        self.outputs.insert(name, made);
    }

    /// What it has made, as the pods of another node find it.
    async fn is_found(&self, plane: &ControlPlane, other: &Kubelet, node: &str) {
        let key = self.key();
        let cache = format!("{{type: task-cache, key: {key}}}");
        let uid = object(plane, "ci", &key, node, &cache);
        let pod = other.pod_with_uid("ci", &key, uid);
        let attributes = [("type", "task-cache"), ("key", &*key), ("commit", "never")];
        let target = publish(&pod, &attributes).await;
        assert_eq!(
            read(&target),
            self.cache,
            "the cache of node {}",
            self.number
        );
        unpublish(&pod).await;
        for (name, made) in &self.outputs {
            let from = format!("artifact/{name}");
            let uid = object(
                plane,
                "ci",
                name,
                node,
                &format!("{{type: input, from: {from}}}"),
            );
            let pod = other.pod_with_uid("ci", name, uid);
            let target = publish(&pod, &[("type", "input"), ("from", &from)]).await;
            assert_eq!(&read(&target), made, "{name}");
            unpublish(&pod).await;
        }
    }
}

/// Pods of both nodes run. None waits for what is away.
async fn run(nodes: &mut [Node<'_>; 2], round: &str) {
    let [one, two] = nodes;
    let both = async { tokio::join!(one.round(round), two.round(round)) };
    let both = tokio::time::timeout(Duration::from_secs(30), both).await;
    assert!(both.is_ok(), "the pods do not start and end: {round}");
}

#[tokio::test]
async fn what_pods_commit_while_the_control_plane_is_away_in_turn_is_on_all_nodes_afterwards() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    plane.kubectl(&["create", "namespace", "ci"]);
    let Pair {
        mut controller,
        pools,
        nodes: _running,
        kubelets: [kubelet_one, kubelet_two],
    } = Pair::start(&plane, &lab).await;
    let mut of_nodes = [(1, &kubelet_one), (2, &kubelet_two)].map(|(number, kubelet)| Node {
        number,
        kubelet,
        cache: Tree::new(),
        outputs: BTreeMap::new(),
    });
    run(&mut of_nodes, "all-there").await;

    controller.kill();
    for pool in &pools {
        is_told(pool, false).await;
    }
    run(&mut of_nodes, "no-controller").await;

    controller.start();
    for pool in &pools {
        is_told(pool, true).await;
    }
    plane.signal_server(Signal::STOP);
    run(&mut of_nodes, "no-server").await;

    controller.kill();
    for pool in &pools {
        is_told(pool, false).await;
    }
    run(&mut of_nodes, "alone").await;

    plane.signal_server(Signal::CONT);
    controller.start();
    for pool in &pools {
        is_told(pool, true).await;
        eventually("all is durable", async || {
            let listed = told(pool, "artifacts");
            let listed = listed.as_array().expect("a list");
            listed.len() == 5 && listed.iter().all(|one| one["durable"] == true)
        })
        .await;
    }
    let [of_one, of_two] = &of_nodes;
    of_one.is_found(&plane, &kubelet_two, "node-2").await;
    of_two.is_found(&plane, &kubelet_one, "node-1").await;
}
