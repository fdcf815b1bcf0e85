//! Standalone drivers as processes, with keys and a list as a person makes them.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use baggageclaim::kubelet_double::{Kubelet, PublishOptions};
use serde_json::Value;
use tonic::Code;

use crate::common::bench::{eventually, soon};
use crate::common::peer_keys::PeerKeys;
use crate::common::process::PATIENCE;
use crate::common::{Fs, Lab, Snapshot, assert_same, require_lab};

const BINARY: &str = env!("CARGO_BIN_EXE_baggageclaim");

pub(crate) fn verb(arguments: &[&str]) -> Output {
    let output = Command::new(BINARY).args(arguments).output();
    output.expect("the binary runs")
}

/// The answer of a verb, as JSON.
pub(crate) fn json(pool: &Path, arguments: &[&str]) -> Value {
    let pool = pool.to_str().expect("text");
    let output = verb(&[arguments, &["-o", "json", "--pool", pool]].concat());
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// A port that is free at this moment, at an address of this process: other programs that take any
/// free port are at 127.0.0.1.
fn address() -> String {
    let [.., high, low] = std::process::id().to_be_bytes();
    let listener = TcpListener::bind((Ipv4Addr::new(127, 77, high, low), 0)).expect("bind");
    listener.local_addr().expect("an address").to_string()
}

/// A driver, killed in `Drop`.
pub(crate) struct Driver {
    child: Child,
    pub(crate) pool: PathBuf,
    pub(crate) kubelet: Kubelet,
}

impl Driver {
    async fn start(lab: &Lab, keys: &PeerKeys, index: usize, more: &[&str]) -> Self {
        Self::start_by(Command::new(BINARY), lab, keys, index, more).await
    }

    /// One that is started by this command.
    pub(crate) async fn start_by(
        mut command: Command,
        lab: &Lab,
        keys: &PeerKeys,
        index: usize,
        more: &[&str],
    ) -> Self {
        let (pool, socket) = (lab.path().join("pool"), lab.run_dir().join("csi.sock"));
        let child = command
            .args([
                "standalone",
                "--end-with-parent",
                "--grace",
                "5s",
                "--node-id",
            ])
            .arg(format!("node-{index}"))
            .arg("--pool")
            .arg(&pool)
            .arg("--socket")
            .arg(&socket)
            .args(keys.arguments(&format!("node-{index}")))
            .args(more)
            .stderr(Stdio::inherit())
            .spawn()
            .expect("the binary runs");
        let kubelet = Kubelet::connect_when_ready(&socket, lab.kubelet_dir(), PATIENCE).await;
        Self {
            child,
            pool,
            kubelet: kubelet.expect("the driver becomes ready"),
        }
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}

/// The keys of the nodes at these addresses: `node-0` and so on.
pub(crate) fn keys(addresses: impl IntoIterator<Item = String>) -> PeerKeys {
    let addresses = addresses.into_iter().enumerate();
    let nodes = addresses.map(|(index, address)| (format!("node-{index}"), address));
    PeerKeys::new(Path::new(BINARY), nodes.collect())
}

/// Those of two nodes on this machine.
fn two_keys() -> PeerKeys {
    keys([address(), address()])
}

/// Publishes a volume of a pod; returns its path.
pub(crate) async fn publish(driver: &Driver, pod: &str, attributes: &[(&str, &str)]) -> PathBuf {
    let pod = driver.kubelet.pod_with_uid("ci", pod, format!("uid-{pod}"));
    let attributes = attributes.iter().copied();
    let published = pod.publish("work", attributes, PublishOptions::default());
    published.await.expect("publish").target
}

pub(crate) async fn unpublish(driver: &Driver, pod: &str) {
    let pod = driver.kubelet.pod_with_uid("ci", pod, format!("uid-{pod}"));
    pod.unpublish("work").await.expect("unpublish");
    pod.remove().expect("remove the pod's directory");
}

pub(crate) const OUTPUT: [(&str, &str); 3] =
    [("type", "output"), ("name", "built"), ("commit", "always")];
pub(crate) const INPUT: [(&str, &str); 2] = [("type", "input"), ("from", "artifact/built")];

pub(crate) fn end(lab: Lab) {
    assert_eq!(lab.close(), [""; 0].map(PathBuf::from));
}

/// The figures of peers, once a fetch has ended: a pod uses content before that.
async fn fetched_once(pool: &Path) -> Value {
    let peers = || json(pool, &["status"])["peers"].take();
    eventually("the fetch ends", || peers()["fetches"] != 0).await;
    let peers = peers();
    assert_eq!(peers["fetches"], 1, "{peers}");
    peers
}

#[tokio::test]
async fn what_one_machine_makes_the_other_one_mounts_byte_by_byte() {
    let (one, two) = (require_lab!(Fs::Ext4), require_lab!(Fs::Ext4));
    let keys = two_keys();
    let first = Driver::start(&one, &keys, 0, &[]).await;
    let second = Driver::start(&two, &keys, 1, &[]).await;
    let made = publish(&first, "makes", &OUTPUT).await;
    fs::create_dir(made.join("tree")).expect("mkdir");
    crate::nodes::odd(&made.join("tree"));
    let before = Snapshot::of(&made.join("tree"));
    unpublish(&first, "makes").await;
    let read = publish(&second, "reads", &INPUT).await;
    assert_same(&before, &Snapshot::of(&read.join("tree")));
    // A write there is a write there alone.
    fs::write(read.join("more"), "more").expect("write");
    unpublish(&second, "reads").await;
    let again = publish(&first, "again", &INPUT).await;
    assert!(!again.join("more").exists());
    unpublish(&first, "again").await;
    assert_eq!(fetched_once(&second.pool).await["peers"], 1);
    assert_eq!(json(&first.pool, &["status"])["peers"]["refused"], 0);
    for driver in [first, second] {
        driver.kill();
    }
    end(one);
    end(two);
}

#[tokio::test]
async fn restore_keys_with_and_without_a_star_work_in_one_list_and_after_a_restart() {
    let one = require_lab!(Fs::Ext4);
    let keys = two_keys();
    let step = async |driver: &Driver, pod: &str, key: &str, restore_keys: &str| {
        let cache = [
            ("type", "task-cache"),
            ("key", key),
            ("commit", "always"),
            ("restoreKeys", restore_keys),
        ];
        let given = if restore_keys.is_empty() {
            &cache[..3]
        } else {
            &cache
        };
        let target = publish(driver, pod, given).await;
        let found = fs::read_to_string(target.join("by")).ok();
        fs::write(target.join("by"), key).expect("write");
        unpublish(driver, pod).await;
        let pool = driver.pool.clone();
        eventually("it is committed", || {
            let all = json(&pool, &["artifacts"]);
            let reference = format!("task-cache/{key}");
            let mut all = all.as_array().expect("a list").iter();
            all.any(|row| row["name"] == *reference || row["reference"] == *reference)
        })
        .await;
        found
    };
    let first = Driver::start(&one, &keys, 0, &[]).await;
    assert_eq!(step(&first, "p1", "main-1", "").await, None);
    assert_eq!(step(&first, "p2", "main", "").await, None);
    assert_eq!(step(&first, "p3", "main-2", "").await, None);
    // A list of whole keys, as before, and one with both.
    let found = step(&first, "p4", "pr-1", "none, main-1").await;
    assert_eq!(found.as_deref(), Some("main-1"));
    let found = step(&first, "p5", "pr-2", "none-*, main-*, main").await;
    assert_eq!(found.as_deref(), Some("main-2"));
    first.kill();
    let first = Driver::start(&one, &keys, 0, &[]).await;
    let found = step(&first, "p6", "pr-3", "main-*").await;
    assert_eq!(found.as_deref(), Some("main-2"));
    let found = step(&first, "p7", "pr-4", "pr-*").await;
    assert_eq!(found.as_deref(), Some("pr-3"));
    // A star alone would be every cache of the namespace.
    let pod = first.kubelet.pod_with_uid("ci", "p8", "uid-p8".to_owned());
    let wrong = [
        ("type", "task-cache"),
        ("key", "k"),
        ("restoreKeys", "main, *"),
    ];
    let refused = pod.publish("work", wrong, PublishOptions::default()).await;
    let status = refused.expect_err("it is refused");
    assert!(
        status.to_string().contains("must not be `*` alone"),
        "{status}"
    );
    first.kill();
    end(one);
}

/// Two drivers. The first has an output with this content, and sends 2 MiB a second. The second is
/// fetching it for a pod of this name, whose call ends here.
async fn fetching(labs: [&Lab; 2], keys: &PeerKeys, content: &[u8], pod: &str) -> [Driver; 2] {
    let first = Driver::start(labs[0], keys, 0, &["--peer-bandwidth", "2Mi"]).await;
    let made = publish(&first, "makes", &OUTPUT).await;
    fs::write(made.join("random"), content).expect("write");
    unpublish(&first, "makes").await;
    let second = Driver::start(labs[1], keys, 1, &[]).await;
    let bytes = u64::try_from(content.len()).ok();
    let is_fetching = eventually("it is being fetched", || {
        let volumes = json(&second.pool, &["volumes"]);
        volumes[0]["fetch"]["of"].as_u64() == bytes
    });
    tokio::select! {
        _ = publish(&second, pod, &INPUT) => panic!("it came faster than it may"),
        () = is_fetching => {}
    }
    [first, second]
}

#[tokio::test]
async fn the_fetch_of_a_pod_that_is_deleted_goes_on_for_the_next_pod() {
    const BYTES: usize = 12 << 20;
    let (one, two) = (require_lab!(Fs::Ext4), require_lab!(Fs::Ext4));
    let keys = two_keys();
    let content = crate::nodes::random(BYTES);
    let [first, second] = fetching([&one, &two], &keys, &content, "deleted").await;
    let pool = second.pool.clone();
    // Kubelet has cancelled the call, and repeats this one until it succeeds.
    let pod = second.kubelet.pod_with_uid("ci", "deleted", "uid-deleted");
    let unpublished = async {
        while let Err(status) = pod.unpublish("work").await {
            assert_eq!(status.code(), Code::Aborted, "{status}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    soon("the volume is unpublished", unpublished).await;
    let target = pod.target("work");
    pod.remove().expect("remove the pod's directory");
    assert_eq!(
        json(&pool, &["artifacts"]),
        Value::Array(Vec::new()),
        "it still comes"
    );
    assert_eq!(json(&pool, &["volumes"]), Value::Array(Vec::new()));
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("read");
    assert!(!mounts.contains(target.to_str().expect("text")), "{mounts}");

    let read = publish(&second, "next", &INPUT).await;
    assert!(fs::read(read.join("random")).expect("read") == content);
    let peers = fetched_once(&pool).await;
    let received = peers["receivedBytes"].as_u64().expect("a number");
    let whole = u64::try_from(BYTES).expect("small");
    assert!((whole..whole + (1 << 20)).contains(&received), "{peers}");
    unpublish(&second, "next").await;
    assert_eq!(
        fs::read_dir(pool.join("incoming")).expect("list").count(),
        0
    );
    for driver in [first, second] {
        driver.kill();
    }
    end(one);
    end(two);
}

#[tokio::test]
async fn a_receiver_that_is_killed_leaves_nothing_and_fetches_again() {
    let (one, two) = (require_lab!(Fs::Ext4), require_lab!(Fs::Ext4));
    let keys = two_keys();
    let content = crate::nodes::random(3 << 20);
    let [first, second] = fetching([&one, &two], &keys, &content, "reads").await;
    let pool = second.pool.clone();
    second.kill();
    let halves = || {
        let entries = fs::read_dir(pool.join("incoming")).expect("list");
        entries.count()
    };
    assert_eq!(halves(), 1, "the half that came");
    let second = Driver::start(&two, &keys, 1, &[]).await;
    assert_eq!(halves(), 0, "it was swept");
    assert_eq!(json(&pool, &["artifacts"]), Value::Array(Vec::new()));
    assert_eq!(json(&pool, &["volumes"]), Value::Array(Vec::new()));
    let read = publish(&second, "reads", &INPUT).await;
    assert!(fs::read(read.join("random")).expect("read") == content);
    // All of it came again, once.
    let peers = fetched_once(&pool).await;
    let received = peers["receivedBytes"].as_u64().expect("a number");
    assert!(received > 3 << 20 && received < 4 << 20, "{peers}");
    unpublish(&second, "reads").await;
    for driver in [first, second] {
        driver.kill();
    }
    for lab in [&one, &two] {
        let pool = lab.path().join("pool");
        let checked = verb(&["check", "--pool", pool.to_str().expect("text")]);
        assert!(checked.status.success(), "{checked:?}");
    }
    end(one);
    end(two);
}
