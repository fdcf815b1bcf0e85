//! Clocks of nodes that are ten minutes wrong, in both directions: the order of commits is still
//! their order in the cluster.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use baggageclaim::kubelet_double::{Kubelet, Pod};

use crate::common::{Fs, require_lab, skip};
use crate::driver::{Process, kubelet};
use crate::eventually;
use crate::peers::{asked, hub, is_told, knows, object, peer, publish, unpublish};
use crate::plane::ControlPlane;

/// The library that moves a program's clock.
fn library() -> Option<PathBuf> {
    let directories = fs::read_dir("/usr/lib").expect("list");
    let libraries = directories.map(|entry| {
        let entry = entry.expect("an entry");
        entry.path().join("faketime/libfaketime.so.1")
    });
    libraries.into_iter().find(|library| library.exists())
}

/// A node and its kubelet.
struct Node {
    name: &'static str,
    kubelet: Kubelet,
}

/// A name: its pod's volume, and what kubelet says of it.
struct Name {
    reference: &'static str,
    volume: &'static str,
    written: &'static [(&'static str, &'static str)],
    read: &'static [(&'static str, &'static str)],
}

const NAMES: [Name; 3] = [
    Name {
        reference: "artifact/built",
        volume: "{type: output, name: built}",
        written: &[("type", "output"), ("name", "built"), ("commit", "always")],
        read: &[("type", "input"), ("from", "artifact/built")],
    },
    Name {
        reference: "task-cache/go",
        volume: "{type: task-cache, key: go}",
        written: &[("type", "task-cache"), ("key", "go"), ("commit", "always")],
        read: &[("type", "task-cache"), ("key", "go"), ("commit", "never")],
    },
    Name {
        reference: "resource-cache/git",
        volume: "{type: resource-cache, key: git}",
        written: &[
            ("type", "resource-cache"),
            ("key", "git"),
            ("commit", "on-marker"),
        ],
        read: &[
            ("type", "resource-cache"),
            ("key", "git"),
            ("commit", "never"),
        ],
    },
];

impl Node {
    fn pod(&self, plane: &ControlPlane, name: &Name, what: &str) -> Pod {
        let key = name.reference.replace('/', "-");
        let pod = format!("{what}-{key}-{}", self.name);
        let volume = if what == "reads" && name.reference.starts_with("artifact") {
            "{type: input, from: artifact/built}"
        } else {
            name.volume
        };
        let uid = object(plane, "ci", &pod, self.name, volume);
        self.kubelet.pod_with_uid("ci", &pod, uid)
    }

    /// What a new pod reads.
    async fn reads(&self, plane: &ControlPlane, name: &Name) -> String {
        let pod = self.pod(plane, name, "reads");
        let target = publish(&pod, name.read).await;
        let text = fs::read_to_string(target.join("text")).unwrap_or_default();
        unpublish(&pod).await;
        text
    }
}

/// How many minutes a node's clock is ahead, as the last line of its log tells.
fn minutes_ahead(node: &Process) -> i64 {
    let log = node.log();
    let last = log.lines().last().expect("a line");
    let time = last.split(' ').next().expect("a word");
    let time = humantime::parse_rfc3339(time).expect("a time");
    let minutes = |apart: Duration| i64::try_from((apart.as_secs() + 30) / 60).expect("few");
    match time.duration_since(SystemTime::now()) {
        Ok(ahead) => minutes(ahead),
        Err(behind) => -minutes(behind.duration()),
    }
}

#[tokio::test]
async fn with_clocks_that_are_ten_minutes_wrong_the_last_commit_is_the_newest() {
    let Some(library) = library() else {
        return skip("no libfaketime: make deps installs it");
    };
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    plane.kubectl(&["create", "namespace", "ci"]);
    let controller = hub(&plane);
    let pools = [lab.dir("one"), lab.dir("two"), lab.dir("three")];
    let (mut processes, mut nodes) = (Vec::new(), Vec::new());
    let names = ["node-1", "node-2", "node-3"];
    for ((name, pool), offset) in names.into_iter().zip(&pools).zip(["+10m", "-10m", "+0"]) {
        let node = format!("{{apiVersion: v1, kind: Node, metadata: {{name: {name}}}}}");
        plane.apply(name, &node);
        let mut process = peer(&plane, name, pool);
        process.restart_at(&library, offset);
        let kubelet = kubelet(&plane, name, &process).await;
        processes.push(process);
        nodes.push(Node { name, kubelet });
    }
    for pool in &pools {
        knows(pool, 2).await;
        is_told(pool, true).await;
    }
    let ahead: Vec<i64> = processes.iter().map(minutes_ahead).collect();
    assert_eq!(
        ahead,
        [10, -10, 0],
        "the clocks are not what they should be"
    );

    for name in &NAMES {
        // Both begin before either has committed. The one whose clock is ahead commits first.
        let mut pods = Vec::new();
        for node in &nodes[..2] {
            let pod = node.pod(&plane, name, "writes");
            let target = publish(&pod, name.written).await;
            fs::write(target.join("text"), node.name).expect("write");
            fs::write(target.join(".baggageclaim-commit"), "").expect("write");
            pods.push(pod);
        }
        for (pod, node) in pods.iter().zip(&nodes) {
            unpublish(pod).await;
            eventually("the controller has heard of it", async || {
                let verb = ["explain", name.reference, "--namespace=ci"];
                let explained = asked(&controller, &verb);
                let mut holders = explained["nodes"].as_array().expect("a list").iter();
                holders.any(|holder| holder["node"] == node.name && holder["state"] != "coming")
            })
            .await;
        }
        let is_resource = name.reference.starts_with("resource");
        let newest = if is_resource { "node-1" } else { "node-2" };
        assert_eq!(
            nodes[2].reads(&plane, name).await,
            newest,
            "{}",
            name.reference
        );
    }
    // The older output is gone, and the node reads the newer one.
    eventually("node 1 has lost the output's name", async || {
        let explained = asked(
            &controller,
            &["explain", NAMES[0].reference, "--namespace=ci"],
        );
        let mut holders = explained["nodes"].as_array().expect("a list").iter();
        holders.all(|holder| holder["node"] != "node-1")
    })
    .await;
    assert_eq!(nodes[0].reads(&plane, &NAMES[0]).await, "node-2");
}
