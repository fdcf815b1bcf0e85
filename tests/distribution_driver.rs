//! Two drivers as processes with one shared tier: content that one commits reaches the other, the
//! end of a driver uploads what waits, and a tier that is not there keeps no pod from its content.
//! `distribution/identity.rs`: where a driver gets its credentials.

#![expect(
    clippy::disallowed_types,
    reason = "the binary is run as people run it"
)]

mod common;

#[path = "distribution/identity.rs"]
mod identity;
#[path = "shared/server.rs"]
#[expect(dead_code, reason = "these tests use a part of it")]
mod server;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use baggageclaim::kubelet_double::{Kubelet, PublishOptions};
use common::bench::eventually;
use common::process::{NodeProcess, PATIENCE};
use common::{Fs, Lab, require_lab};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use tonic::{Code, Status};

/// A message of the log.
const SHARED: &str = "uploaded to the shared tier";

fn tier() -> (TempDir, String) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let url = format!("file://{}", directory.path().display());
    (directory, url)
}

fn ask(node: &NodeProcess, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baggageclaim"));
    command.env("BAGGAGECLAIM_POOL", &node.pool).args(arguments);
    command.output().expect("the binary runs")
}

/// The answer of a verb, as JSON.
fn json(node: &NodeProcess, arguments: &[&str]) -> Value {
    let output = ask(node, &[arguments, &["-o", "json"]].concat());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Runs a step with the task cache `go`, and commits it: returns what it found in the file `runs`,
/// and leaves its own text there.
async fn step(kubelet: &Kubelet, name: &str, leaves: &[u8]) -> Option<Vec<u8>> {
    run(kubelet, name, "always", leaves).await
}

/// The same with another rule for the commit.
async fn run(kubelet: &Kubelet, name: &str, commit: &str, leaves: &[u8]) -> Option<Vec<u8>> {
    let attributes = [("type", "task-cache"), ("key", "go"), ("commit", commit)];
    let pod = kubelet.pod("ci", name);
    let published = pod.publish("cache", attributes, PublishOptions::default());
    let published = published.await.expect("publish");
    let file = published.target.join("runs");
    let found = fs::read(&file).ok();
    fs::write(&file, leaves).expect("write");
    pod.unpublish("cache").await.expect("unpublish");
    pod.remove().expect("remove the pod's directory");
    found
}

/// Runs steps that commit nothing until one finds this. A node that has the cache itself asks the
/// tier for a newer one, and uses its own after 200 ms. A busy machine may take longer.
async fn finds(kubelet: &Kubelet, name: &str, expected: Option<&[u8]>) {
    let deadline = Instant::now() + PATIENCE;
    for turn in 0.. {
        let found = run(kubelet, &format!("{name}-{turn}"), "on-marker", b"").await;
        if found.as_deref() == expected {
            return;
        }
        assert!(Instant::now() < deadline, "{name}: {found:?}");
    }
}

fn end(lab: Lab) {
    assert_eq!(lab.close(), [""; 0].map(std::path::PathBuf::from));
}

#[tokio::test]
async fn what_one_node_commits_the_other_one_forks_until_it_is_destroyed() {
    let (one, two) = (require_lab!(Fs::Ext4), require_lab!(Fs::Ext4));
    let (_tier, url) = tier();
    let (first, second) = (
        NodeProcess::start(&one, &["--shared", &url]),
        NodeProcess::start(&two, &["--shared", &url]),
    );
    let (here, there) = (first.kubelet().await, second.kubelet().await);
    assert_eq!(step(&here, "one", b"first").await, None);
    first.logged(SHARED, 1).await;
    let made = json(&first, &["artifacts"]);
    assert_eq!(made[0]["shared"], "yes", "{made}");
    // The other node has none of it: it comes from the tier, under the same id.
    assert_eq!(
        step(&there, "two", b"second").await.as_deref(),
        Some(&b"first"[..])
    );
    second.logged(SHARED, 1).await;
    // Both have the cache now, and the first one has the older commit.
    finds(&here, "newer", Some(b"second")).await;
    assert_eq!(
        step(&here, "three", b"third").await.as_deref(),
        Some(&b"second"[..])
    );
    first.logged(SHARED, 2).await;
    let status = json(&second, &["status"]);
    assert_eq!(status["shared"]["url"], url);
    assert_eq!(status["shared"]["permanentError"], Value::Null);
    assert_eq!(status["shared"]["uploadsWaiting"], 0);
    // The dry run names what is here, and what would happen in the tier.
    for (name, is_here) in [("task-cache/go", true), ("task-cache/og", false)] {
        let tried = ask(&first, &["destroy", name, "-n", "ci", "--dry-run"]);
        assert!(tried.status.success(), "{tried:?}");
        let said = String::from_utf8_lossy(&tried.stdout);
        assert!(said.contains("cleared in the shared tier"), "{said}");
        assert_eq!(said.contains("is not on this node"), !is_here, "{said}");
        assert_eq!(
            said.contains("would be deleted: artifact"),
            is_here,
            "{said}"
        );
    }
    // A name that is destroyed on one node shows nothing on any.
    let destroyed = ask(&first, &["destroy", "task-cache/go", "-n", "ci"]);
    assert!(destroyed.status.success(), "{destroyed:?}");
    let mistaken = ask(&first, &["destroy", "task-cache/og", "-n", "ci"]);
    assert!(!mistaken.status.success(), "{mistaken:?}");
    let error = String::from_utf8_lossy(&mistaken.stderr);
    assert!(error.contains("task-cache/og"), "{error}");
    assert_eq!(run(&here, "four", "on-marker", b"").await, None);
    finds(&there, "five", None).await;
    for node in [first, second] {
        node.terminate().await;
    }
    end(one);
    end(two);
}

#[tokio::test]
async fn a_driver_that_is_told_to_end_uploads_what_waits_and_serves_meanwhile() {
    let (one, two) = (require_lab!(Fs::Ext4), require_lab!(Fs::Ext4));
    let (_tier, url) = tier();
    // The content takes seconds to upload, and a moment to be committed.
    let flags = ["--shared", &url, "--shared-bandwidth", "512Ki"];
    let first = NodeProcess::start(&one, &flags);
    let here = first.kubelet().await;
    let mut content = vec![0; 2 << 20];
    getrandom::fill(&mut content).expect("random bytes");
    step(&here, "one", &content).await;
    first.logged("\"message\":\"sealed\"", 1).await;
    first.signal(Signal::TERM);
    first.logged("told to end", 1).await;
    // Kubelet does not wait for an upload.
    let pod = here.pod("ci", "late");
    let scratch = pod.publish("work", [("type", "scratch")], PublishOptions::default());
    scratch.await.expect("publish while it uploads");
    pod.unpublish("work").await.expect("unpublish");
    let (code, log) = first.ended().await;
    assert_eq!(code, Some(0), "{log}");
    let drained = log.lines().filter(|line| line.contains("\"left\":0"));
    assert_eq!(drained.count(), 1, "{log}");
    drop(here);

    let second = NodeProcess::start(&two, &["--shared", &url]);
    let there = second.kubelet().await;
    assert_eq!(step(&there, "two", b"").await, Some(content));
    second.terminate().await;
    end(one);
    end(two);
}

/// Waits for a random part of this time, so that a kill comes at another moment each time.
async fn a_moment(most: Duration) {
    let part = f64::from(getrandom::u32().expect("random bytes")) / f64::from(u32::MAX);
    tokio::time::sleep(most.mul_f64(part)).await;
}

/// Fails unless this verb succeeds.
fn passes(arguments: &[&str]) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baggageclaim"));
    let output = command.args(arguments).output().expect("the binary runs");
    assert!(output.status.success(), "{arguments:?}: {output:?}");
}

#[tokio::test]
async fn kills_at_any_moment_of_an_upload_or_a_fetch_lose_nothing_and_leave_nothing() {
    const ROUNDS: usize = 10;
    let (one, two) = (require_lab!(Fs::Ext4), require_lab!(Fs::Ext4));
    let three = require_lab!(Fs::Ext4);
    let (_tier, url) = tier();
    let mut generations: Vec<Vec<u8>> = Vec::new();
    for round in 0..ROUNDS {
        let maker = NodeProcess::start(&one, &["--shared", &url, "--shared-bandwidth", "8Mi"]);
        let here = maker.kubelet().await;
        let mut content = vec![0; 1 << 20];
        getrandom::fill(&mut content).expect("random bytes");
        let found = step(&here, &format!("maker-{round}"), &content).await;
        assert_eq!(found.as_ref(), generations.last(), "round {round}");
        generations.push(content);
        a_moment(Duration::from_millis(250)).await;
        maker.kill().await;

        let reader = NodeProcess::start(&two, &["--shared", &url]);
        let there = reader.kubelet().await;
        // The pod of the killed driver ends.
        let pod = |round: usize| there.pod_with_uid("ci", "reader", format!("reader-{round}"));
        if let Some(round) = round.checked_sub(1) {
            pod(round).unpublish("cache").await.expect("unpublish");
            pod(round).remove().expect("remove the pod's directory");
        }
        let attributes = [("type", "task-cache"), ("key", "go"), ("commit", "never")];
        let reads = async {
            let pod = pod(round);
            let published = pod.publish("cache", attributes, PublishOptions::default());
            let found = fs::read(published.await.expect("publish").target.join("runs")).ok();
            assert!(found.is_none_or(|found| generations.contains(&found)));
        };
        tokio::select! {
            () = reads => {}
            () = a_moment(Duration::from_millis(60)) => {}
        }
        reader.kill().await;
    }
    // The last commit reaches the tier, and from there a node that has nothing.
    let maker = NodeProcess::start(&one, &["--shared", &url]);
    drop(maker.kubelet().await);
    maker.terminate().await;
    let reader = NodeProcess::start(&two, &["--shared", &url]);
    let there = reader.kubelet().await;
    let last = there.pod_with_uid("ci", "reader", format!("reader-{}", ROUNDS - 1));
    last.unpublish("cache").await.expect("unpublish");
    last.remove().expect("remove the pod's directory");
    reader.terminate().await;
    let patient = ["--shared", &url, "--ask", "30s", "--fetch-wait", "60s"];
    let fresh = NodeProcess::start(&three, &patient);
    let found = step(&fresh.kubelet().await, "last", b"").await;
    assert_eq!(found.as_ref(), generations.last());
    fresh.terminate().await;
    passes(&["shared", "verify", "--shared", &url, "-n", "ci"]);
    for lab in [one, two, three] {
        let pool = lab.path().join("pool");
        passes(&["check", "--pool", pool.to_str().expect("text")]);
        end(lab);
    }
}

#[tokio::test]
async fn a_tier_that_does_not_exist_is_reported_and_keeps_no_pod_from_its_content() {
    let lab = require_lab!(Fs::Ext4);
    let (directory, url) = tier();
    drop(directory);
    let flags = ["--shared", &url, "--shared-drain", "1s"];
    let node = NodeProcess::start(&lab, &flags);
    let kubelet = node.kubelet().await;
    // Once, before there is any pod.
    node.logged("cannot be used until a person corrects this", 1)
        .await;
    assert_eq!(step(&kubelet, "one", b"first").await, None);
    node.logged("\"message\":\"sealed\"", 1).await;
    assert_eq!(
        step(&kubelet, "two", b"second").await.as_deref(),
        Some(&b"first"[..])
    );
    let status = json(&node, &["status"]);
    let error = status["shared"]["permanentError"]
        .as_str()
        .expect("an error");
    assert!(error.contains("cannot be used"), "{error}");
    // The first commit may be in the list still, without its name.
    let rows = json(&node, &["artifacts"]);
    let mut rows = rows.as_array().expect("a list").iter();
    assert!(rows.any(|row| row["shared"] == "waiting"), "{rows:?}");
    let mut stream = TcpStream::connect(node.http().await).expect("it listens");
    let request = b"GET /metrics HTTP/1.0\r\n\r\n";
    stream.write_all(request).expect("write");
    let mut metrics = String::new();
    stream.read_to_string(&mut metrics).expect("read");
    assert!(
        metrics.contains("\nbaggageclaim_shared_usable 0\n"),
        "{metrics}"
    );
    // Otherwise the content would come back from the tier.
    let destroyed = ask(&node, &["destroy", "task-cache/go", "-n", "ci"]);
    let error = String::from_utf8_lossy(&destroyed.stderr).into_owned();
    assert_eq!(destroyed.status.code(), Some(1), "{error}");
    assert!(
        error.contains("not cleared in the shared tier, and not deleted"),
        "{error}"
    );
    // Neither does content get a name that the tier may have cleared.
    let before = json(&node, &["artifacts"]);
    let rows = before.as_array().expect("a list").iter();
    let mut named = rows.filter(|row| row["reference"] == "task-cache/go");
    let id = named.next().expect("it has its name")["id"].as_str();
    let archive = lab.path().join("archive").display().to_string();
    let (id, name) = (id.expect("text"), "task-cache/go");
    let exported = ask(&node, &["export", id, "--output", &archive]);
    assert!(exported.status.success(), "{exported:?}");
    for arguments in [
        ["rollback", name, "--to", id, "-n", "ci"],
        ["import", &archive, "--as", name, "-n", "ci"],
    ] {
        let refused = ask(&node, &arguments);
        let error = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{error}");
        let told = "the shared tier does not tell whether the name was cleared";
        assert!(
            error.contains("is not changed") && error.contains(told),
            "{error}"
        );
    }
    let ids = |rows: &Value| -> Vec<Value> {
        let rows = rows.as_array().expect("a list").iter();
        rows.filter(|row| row["reference"] == name)
            .map(|row| row["id"].clone())
            .collect()
    };
    assert_eq!(ids(&json(&node, &["artifacts"])), ids(&before));
    assert!(!Path::new(url.trim_start_matches("file://")).exists());
    let log = node.terminate().await;
    // Once for each namespace and kind of access, and not for each pod.
    for access in ["Read", "Write"] {
        let words = [
            "cannot be used until",
            "\"tenant\":\"ci\"",
            &format!("\"{access}\""),
        ];
        let lines = log
            .lines()
            .filter(|line| words.iter().all(|word| line.contains(word)));
        assert_eq!(lines.count(), 1, "{access}: {log}");
    }
    end(lab);
}

#[tokio::test]
async fn an_unpublish_does_not_overtake_a_publish_that_waits_for_the_tier() {
    const INPUT: [(&str, &str); 2] = [("type", "input"), ("from", "artifact/none")];
    let lab = require_lab!(Fs::Ext4);
    let (_tier, url) = tier();
    let node = NodeProcess::start(&lab, &["--shared", &url]);
    let pod = node.kubelet().await.pod("ci", "waits");
    let waiting = pod.clone();
    let publish = tokio::spawn(async move {
        let published = waiting.publish("in", INPUT, PublishOptions::default());
        published.await.map(drop)
    });
    eventually("it waits", || {
        json(&node, &["volumes"])[0]["id"] == pod.volume_id("in")
    })
    .await;
    let unpublished = pod.unpublish("in").await;
    assert!(is_aborted(&unpublished), "{unpublished:?}");
    let again = pod.republish("in", INPUT, PublishOptions::default()).await;
    assert!(is_aborted(&again), "{again:?}");
    assert!(!publish.is_finished());
    // Kubelet gives up, and unpublishes until that succeeds.
    publish.abort();
    let unpublished = loop {
        let unpublished = pod.unpublish("in").await;
        if !is_aborted(&unpublished) {
            break unpublished;
        }
    };
    unpublished.expect("unpublish");
    pod.remove().expect("remove the pod's directory");
    node.terminate().await;
    end(lab);
}

fn is_aborted<T>(answer: &Result<T, Status>) -> bool {
    let status = answer.as_ref().err();
    status.is_some_and(|status| status.code() == Code::Aborted)
}
