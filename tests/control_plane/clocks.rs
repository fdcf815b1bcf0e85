//! Clocks of nodes that are wrong. If they are ten minutes wrong, the order of commits is still
//! their order in the cluster. A jump of a clock deletes nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use baggageclaim::kubelet_double::{Kubelet, Pod};
use serde_json::Value;

use crate::common::{Fs, require_lab, skip};
use crate::driver::{Process, kubelet};
use crate::eventually;
use crate::peers::{self, asked, hub, is_told, knows, object, peer, publish, told, unpublish};
use crate::plane::ControlPlane;

/// The clocks of the driver and of the test are read at different moments.
const SECOND: Duration = Duration::from_secs(1);

/// The library that moves a program's clock.
fn library() -> Option<PathBuf> {
    let directories = fs::read_dir("/usr/lib").expect("list");
    let libraries = directories.map(|entry| {
        let entry = entry.expect("an entry");
        entry.path().join("faketime/libfaketime.so.1")
    });
    libraries.into_iter().find(|library| library.exists())
}

/// That library, and an API server with the namespace `ci`. `None`: there is none here, and the test
/// says so.
async fn start() -> Option<(PathBuf, ControlPlane)> {
    let Some(library) = library() else {
        skip("no libfaketime: make deps installs it");
        return None;
    };
    let plane = ControlPlane::start().await?;
    plane.kubectl(&["create", "namespace", "ci"]);
    Some((library, plane))
}

/// Sets the clock of a process that was started with this file.
fn set(file: &Path, offset: &str) {
    // The process reads all of the file, or the one before.
    let new = file.with_extension("new");
    fs::write(&new, offset).expect("write");
    fs::rename(&new, file).expect("rename");
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
    /// A pod commits the node's name.
    async fn commits(&self, plane: &ControlPlane, name: &Name) {
        let pod = self.pod(plane, name, "writes");
        let target = publish(&pod, name.written).await;
        fs::write(target.join("text"), self.name).expect("write");
        unpublish(&pod).await;
    }

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
    let Some((library, plane)) = start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let controller = hub(&plane);
    let pools = [lab.dir("one"), lab.dir("two"), lab.dir("three")];
    let (mut processes, mut nodes) = (Vec::new(), Vec::new());
    let names = ["node-1", "node-2", "node-3"];
    for ((name, pool), offset) in names.into_iter().zip(&pools).zip(["+10m", "-10m", "+0"]) {
        let node = format!("{{apiVersion: v1, kind: Node, metadata: {{name: {name}}}}}");
        plane.apply(name, &node);
        let mut process = peer(&plane, name, pool);
        let file = lab.dir("clocks").join(name);
        set(&file, offset);
        process.restart_by(&library, &file);
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

/// The rows of a node's artifacts, once so many are durable.
async fn durable(pool: &Path, count: usize) -> Vec<Value> {
    let rows = || told(pool, "artifacts").as_array().expect("a list").clone();
    eventually("all are durable", async || {
        let rows = rows();
        rows.len() == count && rows.iter().all(|one| one["durable"] == true)
    })
    .await;
    rows()
}

#[tokio::test]
async fn a_clock_that_jumps_ahead_deletes_nothing_and_dates_nothing() {
    let Some((library, plane)) = start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    peers::nodes(&plane, 2);
    let _controller = hub(&plane);
    let pools = [lab.dir("one"), lab.dir("two")];
    let clock = lab.dir("clocks").join("node-1");
    set(&clock, "+0");
    let mut one = peer(&plane, "node-1", &pools[0]);
    one.restart_by(&library, &clock);
    let two = peer(&plane, "node-2", &pools[1]);
    let mut nodes = Vec::new();
    for (name, process) in [("node-1", &one), ("node-2", &two)] {
        let kubelet = kubelet(&plane, name, process).await;
        nodes.push(Node { name, kubelet });
    }
    for pool in &pools {
        knows(pool, 1).await;
        is_told(pool, true).await;
    }
    let [output, cache, _] = &NAMES;
    nodes[0].commits(&plane, output).await;
    durable(&pools[0], 1).await;

    // Longer than the default ttl of an output.
    set(&clock, "+13h");
    is_told(&pools[0], false).await;
    assert_eq!(minutes_ahead(&one), 13 * 60, "{}", one.tail());
    let why = "the controller's time is more than 30 minutes away from this machine's";
    assert!(one.log().contains(why), "{}", one.tail());
    let reaped = told(&pools[0], "reap");
    assert_eq!(reaped["expired"], 0, "{reaped}");
    nodes[0].commits(&plane, cache).await;
    for row in durable(&pools[0], 2).await {
        let created = row["created"].as_str().expect("a time");
        let created = humantime::parse_rfc3339(created).expect("a time");
        assert!(created < SystemTime::now() + SECOND, "{row}");
    }

    set(&clock, "+0");
    is_told(&pools[0], true).await;
    for name in [output, cache] {
        assert_eq!(nodes[1].reads(&plane, name).await, "node-1");
    }
}
