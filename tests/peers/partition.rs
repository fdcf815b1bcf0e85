//! Standalone drivers in network namespaces of their own, on one switch. A port of the switch goes
//! down while a fetch runs: no packet passes, and no connection is told.

use std::cell::RefCell;
use std::fs;
use std::path::Path;

use baggageclaim::kubelet_double::PublishOptions;
use serde_json::Value;
use tonic::Code;

use crate::common::bench::eventually;
use crate::common::net::Namespace;
use crate::common::peer_keys::PeerKeys;
use crate::common::{Fs, Lab, require_lab};
use crate::drivers::{Driver, INPUT, OUTPUT, end, json, keys, publish, unpublish, verb};

/// The longest frame, and its record.
const FRAME: u64 = (1 << 20) + (64 << 10);
/// The content: files of this size, so that a part of them can have come.
const FILES: usize = 16;
const SIZE: usize = 512 << 10;

/// Nodes on one switch.
struct Net {
    switch: Namespace,
    nodes: Vec<Namespace>,
}

impl Net {
    fn new(nodes: usize) -> Self {
        let net = Self {
            switch: Namespace::new(),
            nodes: (0..nodes).map(|_| Namespace::new()).collect(),
        };
        net.switch.ip("link add switch type bridge");
        net.switch.ip("link set switch up");
        for (index, node) in net.nodes.iter().enumerate() {
            let pid = node.id();
            let add = format!("link add port{index} type veth peer name uplink netns {pid}");
            net.switch.ip(&add);
            net.switch
                .ip(&format!("link set port{index} master switch up"));
            node.ip(&format!(
                "address add {}/24 dev uplink",
                Self::address(index)
            ));
            node.ip("link set uplink up");
            node.ip("link set lo up");
        }
        net
    }

    fn address(index: usize) -> String {
        format!("10.99.0.{}", index + 1)
    }

    fn keys(&self) -> PeerKeys {
        keys((0..self.nodes.len()).map(|index| format!("{}:9810", Self::address(index))))
    }

    async fn start(&self, lab: &Lab, keys: &PeerKeys, index: usize) -> Driver {
        let command = self.nodes[index].command(env!("CARGO_BIN_EXE_baggageclaim"));
        let more = ["--peer-bandwidth=2Mi", "--input-wait=8s"];
        Driver::start_by(command, lab, keys, index, &more).await
    }

    fn port(&self, index: usize, state: &str) {
        self.switch.ip(&format!("link set port{index} {state}"));
    }
}

/// Makes an output.
async fn make(driver: &Driver, content: &[u8]) {
    let made = publish(driver, "makes", &OUTPUT).await;
    for (file, content) in content.chunks(SIZE).enumerate() {
        fs::write(made.join(file.to_string()), content).expect("write");
    }
    unpublish(driver, "makes").await;
}

/// What a volume shows.
fn shown(target: &Path) -> Vec<u8> {
    let files = (0..FILES).map(|file| target.join(file.to_string()));
    files
        .flat_map(|file| fs::read(file).expect("read"))
        .collect()
}

/// Waits until a part of it has come; returns the place that it comes from.
async fn comes(pool: &Path) -> String {
    let from = RefCell::new(String::new());
    eventually("a part of it has come", || {
        let volumes = json(pool, &["volumes"]);
        let fetch = &volumes[0]["fetch"];
        let is_part = fetch["bytes"].as_u64() > Some(0);
        if is_part {
            let place = fetch["from"].as_str().expect("a place");
            place.clone_into(&mut from.borrow_mut());
        }
        is_part
    })
    .await;
    from.into_inner()
}

/// Nothing of it is left on a node.
async fn is_clean(driver: Driver, lab: Lab) {
    let pool = driver.pool.clone();
    let incoming = || fs::read_dir(pool.join("incoming")).expect("list").count();
    eventually("nothing comes any more", || incoming() == 0).await;
    driver.kill();
    let checked = verb(&["check", "--pool", pool.to_str().expect("text")]);
    assert!(checked.status.success(), "{checked:?}");
    end(lab);
}

#[tokio::test]
async fn a_fetch_that_a_partition_stops_is_whole_when_the_partition_ends() {
    let (one, two) = (require_lab!(Fs::Ext4), require_lab!(Fs::Ext4));
    let net = Net::new(2);
    let keys = net.keys();
    let first = net.start(&one, &keys, 0).await;
    let second = net.start(&two, &keys, 1).await;
    let content = crate::nodes::random(FILES * SIZE);
    make(&first, &content).await;
    let pool = second.pool.clone();
    let pod = second.kubelet.pod_with_uid("ci", "reads", "uid-reads");
    let reads = pod.publish("work", INPUT, PublishOptions::default());
    let cut = async {
        comes(&pool).await;
        net.port(0, "down");
    };
    let (read, ()) = tokio::join!(reads, cut);
    let refused = read.expect_err("nothing can come");
    assert_eq!(refused.code(), Code::Aborted, "{refused}");
    // What is on a node needs no other one.
    let local = [("type", "input"), ("from", "artifact/local")];
    let made = [("type", "output"), ("name", "local"), ("commit", "always")];
    fs::write(publish(&second, "local", &made).await.join("file"), "here").expect("write");
    unpublish(&second, "local").await;
    assert!(
        publish(&second, "local", &local)
            .await
            .join("file")
            .exists()
    );
    unpublish(&second, "local").await;
    assert_eq!(json(&first.pool, &["volumes"]), Value::Array(Vec::new()));
    net.port(0, "up");
    // As kubelet does: again, until it is there.
    let read = loop {
        match pod.publish("work", INPUT, PublishOptions::default()).await {
            Ok(published) => break published.target,
            Err(error) => assert_eq!(error.code(), Code::Aborted, "{error}"),
        }
    };
    assert!(shown(&read) == content);
    unpublish(&second, "reads").await;
    is_clean(first, one).await;
    is_clean(second, two).await;
}

#[tokio::test]
async fn the_other_side_of_a_partition_gives_the_rest() {
    let (one, two, three) = (
        require_lab!(Fs::Ext4),
        require_lab!(Fs::Ext4),
        require_lab!(Fs::Ext4),
    );
    let net = Net::new(3);
    let keys = net.keys();
    let first = net.start(&one, &keys, 0).await;
    let second = net.start(&two, &keys, 1).await;
    let third = net.start(&three, &keys, 2).await;
    let content = crate::nodes::random(FILES * SIZE);
    make(&first, &content).await;
    publish(&second, "reads", &INPUT).await;
    let pool = third.pool.clone();
    let reads = publish(&third, "reads", &INPUT);
    let cut = async {
        let from = comes(&pool).await;
        net.port(usize::from(from.contains("node-1")), "down");
    };
    let (read, ()) = tokio::join!(reads, cut);
    assert!(shown(&read) == content);
    let received = json(&pool, &["status"])["peers"]["receivedBytes"].as_u64();
    let received = received.expect("a number");
    assert!(received < (FILES * SIZE) as u64 + FRAME, "{received}");
    for driver in [&second, &third] {
        unpublish(driver, "reads").await;
    }
    is_clean(first, one).await;
    is_clean(second, two).await;
    is_clean(third, three).await;
}
