//! Content that is evicted while it is sent, damaged content, and the shared tier beside peers.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use baggageclaim::engine::ContentSource;
use baggageclaim::link;
use baggageclaim::model::Outcome;
use baggageclaim::proto::peer::v1 as wire;
use tonic::Code;
use wire::peer_client::PeerClient;

use crate::common::bench::eventually;
use crate::common::disk::fill;
use crate::nodes::{INPUT, Node, OUTPUT, RESOURCE, TASK, name, peers, random, read, text, write};

#[tokio::test]
async fn content_that_is_deleted_while_it_is_sent_still_arrives() {
    let a = Node::with("a", |start| start.bandwidth = Some(2 << 20)).await;
    let (Some(a), Some(b)) = (a, Node::new("b").await) else {
        return;
    };
    a.knows(&b);
    b.knows(&a);
    let made = random(3 << 20);
    a.commits("made", &TASK, |target| {
        fs::write(target.join("random"), &made).expect("write");
    })
    .await;
    let reads = b.publish("read", &TASK);
    let deletes = async {
        eventually("it is being sent", || b.figures().received_bytes > 64 << 10).await;
        let [fetch] = &b.distribution.fetching()[..] else {
            panic!("one fetch runs");
        };
        assert_eq!(fetch.from.as_deref(), Some("peer a"));
        assert_eq!((a.figures().sending, b.figures().sending), (1, 0));
        a.forget("task-cache/go").await;
        let left = name("task-cache/go");
        assert!(
            a.bench
                .engine
                .local(&left.tenant, &left.reference)
                .is_none()
        );
        assert_eq!(b.distribution.fetching().len(), 1, "it still runs");
    };
    tokio::join!(reads, deletes);
    let read = fs::read(b.bench.target("read").join("random"));
    assert!(read.expect("read") == made);
    b.end("read", Outcome::Failed).await;
    a.finish().await;
    b.finish().await;
}

#[tokio::test]
async fn a_holder_above_its_high_watermark_gives_what_is_in_use_there() {
    let a = Node::with("a", |start| start.high_watermark = Some(0)).await;
    let (Some(a), Some(b)) = (a, Node::new("b").await) else {
        return;
    };
    a.knows(&b);
    b.knows(&a);
    a.publish("made", &OUTPUT).await;
    write(&a.bench.target("made"), "made on a full node");
    // The input is there before the content is, so it cannot be evicted.
    tokio::join!(
        a.publish("in-use", &INPUT),
        a.end("made", Outcome::Succeeded)
    );
    b.publish("read", &INPUT).await;
    assert_eq!(
        read(&b.bench.target("read")),
        read(&a.bench.target("in-use"))
    );
    b.end("read", Outcome::Failed).await;
    a.end("in-use", Outcome::Failed).await;
    a.finish().await;
    b.finish().await;
}

/// The file of this content in the pool's layers.
fn find(dir: &Path, content: &[u8]) -> Option<PathBuf> {
    for entry in fs::read_dir(dir).expect("list") {
        let path = entry.expect("list").path();
        if path.is_dir() {
            if let Some(found) = find(&path, content) {
                return Some(found);
            }
        } else if path.is_file() && fs::read(&path).is_ok_and(|it| it == content) {
            return Some(path);
        }
    }
    None
}

#[tokio::test]
async fn damaged_content_is_refused_reported_and_taken_from_another_holder() {
    let [a, b, c] = peers!("a", "b", "c");
    let made = random(300 << 10);
    a.commits("made", &OUTPUT, |target| {
        fs::write(target.join("random"), &made).expect("write");
    })
    .await;
    c.publish("copy", &INPUT).await;
    damage(&a, &made);
    // Only the damaged holder: nothing wrong becomes visible.
    let alone = Node::with("d", |start| {
        start.settings.input_wait = std::time::Duration::from_secs(1);
    });
    let Some(d) = alone.await else { return };
    a.knows(&d);
    d.knows(&a);
    d.try_publish("read", &INPUT)
        .await
        .expect_err("it is damaged");
    assert!(d.bench.engine.artifacts(None).is_empty());
    let damaged = || (d.figures().damaged, a.figures().damaged);
    eventually("both know", || damaged() == (1, 1)).await;
    let marked = a.bench.artifact("artifact/built").expect("it is there");
    assert!(marked.sharing.damaged, "{marked:?}");
    // The holder offers it no more, and the other one's copy is whole.
    b.publish("read", &INPUT).await;
    let read = fs::read(b.bench.target("read").join("random"));
    assert!(read.expect("read") == made);
    assert_eq!(b.figures().damaged, 0);
    b.end("read", Outcome::Failed).await;
    c.end("copy", Outcome::Failed).await;
    // The damage was made on purpose: the pool is not checked.
    for node in [a, b, c, d] {
        node.finish().await;
    }
}

#[tokio::test]
async fn a_holder_that_lacks_a_part_of_a_layer_says_so_and_offers_it_no_more() {
    let [a, b, c] = peers!("a", "b", "c");
    let made = random(300 << 10);
    a.commits("made", &OUTPUT, |target| {
        fs::write(target.join("random"), &made).expect("write");
    })
    .await;
    c.publish("copy", &INPUT).await;
    let file = find(&a.bench.pool().join("layers"), &made).expect("it is there");
    let file = fs::File::options().write(true).open(file).expect("open");
    file.set_len(1000).expect("cut");
    // It may ask the whole holder first. Then it fetches nothing of the other one.
    b.publish("read", &INPUT).await;
    let read = fs::read(b.bench.target("read").join("random"));
    assert!(read.expect("read") == made);
    let alone = Node::with("d", |start| {
        start.settings.input_wait = std::time::Duration::from_secs(1);
    });
    let Some(d) = alone.await else { return };
    a.knows(&d);
    d.knows(&a);
    d.try_publish("read", &INPUT).await.expect_err("it is cut");
    eventually("it is marked", || a.figures().damaged == 1).await;
    let marked = a.bench.artifact("artifact/built").expect("it is there");
    assert!(marked.sharing.damaged, "{marked:?}");
    b.end("read", Outcome::Failed).await;
    c.end("copy", Outcome::Failed).await;
    // The damage was made on purpose: the pool is not checked.
    for node in [a, b, c, d] {
        node.finish().await;
    }
}

/// Writes over a file of this content in the pool's layers. The table was made before.
fn damage(node: &Node, content: &[u8]) {
    let file = find(&node.bench.pool().join("layers"), content).expect("it is there");
    let file = fs::File::options().write(true).open(file).expect("open");
    file.write_all_at(b"damage", 1000).expect("write");
}

#[tokio::test]
async fn a_report_marks_all_artifacts_of_the_layer_though_its_sender_goes() {
    let [a, b] = peers!("a", "b");
    let other = [
        ("type", "task-cache"),
        ("key", "other"),
        ("restoreKeys", "go"),
    ];
    a.commit("made", &TASK, "below").await;
    a.commit("stacked", &other, "above").await;
    a.commit("apart", &RESOURCE, "apart").await;
    let channel = link::connect(&b.key, a.key.name(), a.address.to_string());
    let mut client = PeerClient::new(channel.expect("TLS"));
    let ask = Some(wire::Ask {
        tenant: "ci".to_owned(),
        reference: "task-cache/go".to_owned(),
        pod: "p".to_owned(),
        pod_uid: "p".to_owned(),
        pod_namespace: String::new(),
        clone: None,
    });
    let found = loop {
        let request = wire::GetArtifactRequest { ask: ask.clone() };
        let answer = client.get_artifact(request).await.expect("an answer");
        if let Some(artifact) = answer.into_inner().artifact {
            break artifact;
        }
        a.bench.engine.content_changed().await;
    };
    let report = wire::ReportDamageRequest {
        ask,
        artifact: found.id,
        layer: found.layers[0].digest.clone(),
        cause: "on purpose".to_owned(),
    };
    let gate = a.known.gate.write().await;
    let checks = a.known.checks.load(Ordering::SeqCst);
    let mut sender = client.clone();
    tokio::select! {
        answer = sender.report_damage(report) => panic!("{answer:?}"),
        () = eventually("it has arrived", || a.known.checks.load(Ordering::SeqCst) > checks) => {}
    }
    // What is sent later on a connection arrives later.
    let later = client.get_artifact(wire::GetArtifactRequest { ask: None });
    let refused = later.await.expect_err("it names nothing").code();
    assert_eq!(refused, Code::InvalidArgument);
    drop(gate);
    let marked = |reference| {
        let row = a.bench.artifact(reference).expect("it is there");
        row.sharing.damaged
    };
    eventually("both are marked", || {
        marked("task-cache/go") && marked("task-cache/other")
    })
    .await;
    assert!(!marked("resource-cache/git"), "it has another layer");
    assert_eq!(b.sees("read", &other).await, None);
    assert_eq!(b.sees("others", &RESOURCE).await, text("apart"));
    a.finish().await;
    b.finish().await;
}

/// Commits a task cache of so many files of 256 KiB, from `10` on.
async fn commits_files(node: &Node, count: usize) -> BTreeMap<String, Vec<u8>> {
    let made: BTreeMap<String, Vec<u8>> = (10..10 + count)
        .map(|file| (file.to_string(), random(256 << 10)))
        .collect();
    node.commits("made", &TASK, |target| {
        for (name, bytes) in &made {
            fs::write(target.join(name), bytes).expect("write");
        }
    })
    .await;
    made
}

#[tokio::test]
async fn a_partial_layer_that_is_at_fault_is_not_taken_again() {
    let [a, b, c] = peers!("a", "b", "c");
    let made = commits_files(&a, 10).await;
    c.publish("copy", &TASK).await;
    damage(&a, &made["19"]);
    b.known_forgets();
    b.knows(&a);
    let seen = async |volume: &str| {
        b.publish(volume, &TASK).await;
        let seen = read(&b.bench.target(volume));
        b.end(volume, Outcome::Failed).await;
        seen
    };
    assert!(seen("early").await.is_empty(), "the last file is damaged");
    let incoming = fs::read_dir(b.bench.pool().join("incoming")).expect("list");
    let parts: Vec<PathBuf> = incoming.map(|part| part.expect("list").path()).collect();
    let [part] = &parts[..] else {
        panic!("one part is kept: {parts:?}");
    };
    // Its list of pieces says that it is another layer.
    let done = fs::File::options().write(true).open(part.join("part/done"));
    let done = done.expect("open");
    done.write_all_at(&[7; 32], 0).expect("write");
    b.known_forgets();
    b.knows(&c);
    assert!(seen("broken").await.is_empty(), "it cannot be continued");
    assert!(!part.exists(), "it is deleted");
    assert!(seen("late").await == made);
    c.end("copy", Outcome::Failed).await;
    // The damage was made on purpose: the pool is not checked.
    for node in [a, b, c] {
        node.finish().await;
    }
}

#[tokio::test]
async fn a_fetch_that_is_given_up_goes_on_and_the_next_pod_joins_it() {
    let a = Node::with("a", |start| start.bandwidth = Some(2 << 20)).await;
    let b = Node::with("b", |start| {
        start.settings.fetch_wait = std::time::Duration::from_millis(300);
    });
    let (Some(a), Some(mut b)) = (a, b.await) else {
        return;
    };
    a.knows(&b);
    b.knows(&a);
    a.commits("made", &TASK, |target| {
        write(target, "made");
        fs::write(target.join("random"), random(4 << 20)).expect("write");
    })
    .await;
    assert_eq!(b.sees("early", &TASK).await, None);
    let why = b.heard().into_iter().find_map(|what| match what {
        baggageclaim::engine::notice::What::NotFetched { from, why, .. } => Some((from, why)),
        _ => None,
    });
    let (from, why) = why.expect("the pod is told");
    assert!(
        from == "peer a" && why.contains("from peer a"),
        "{from}: {why}"
    );
    // No pod waits long enough for all of it. A fetch that had not begun is given up with its pod,
    // so several pods may come before one finds the content.
    let mut pods = 0..300;
    loop {
        let pod = pods.next().expect("it comes");
        if b.sees(&format!("late-{pod}"), &TASK).await == text("made") {
            break;
        }
    }
    b.has_fetched(ContentSource::Peer, 1).await;
    let fetches = b.fetches(ContentSource::Peer);
    assert_eq!((fetches.artifacts, fetches.failures), (1, 0));
    a.finish().await;
    b.finish().await;
}

#[tokio::test]
async fn a_disk_that_fills_up_mid_fetch_leaves_no_part_and_the_next_pod_gets_the_content() {
    let a = Node::with("a", |start| start.bandwidth = Some(2 << 20)).await;
    let (Some(a), Some(mut b)) = (a, Node::new("b").await) else {
        return;
    };
    a.knows(&b);
    b.knows(&a);
    // Less than what comes between two looks at the space: a write meets the full disk.
    let made = commits_files(&a, 16).await;
    let incoming = b.bench.pool().join("incoming");
    let filler = b.bench.lab.path().join("filler");
    let fills = async {
        eventually("half of it came", || {
            let fetching = b.distribution.fetching();
            fetching.first().is_some_and(|it| it.bytes >= 2 << 20)
        })
        .await;
        assert_eq!(fs::read_dir(&incoming).expect("list").count(), 1);
        fill(&filler);
    };
    tokio::join!(b.publish("full", &TASK), fills);
    assert!(read(&b.bench.target("full")).is_empty(), "it starts empty");
    let why = b.heard().into_iter().find_map(|what| match what {
        baggageclaim::engine::notice::What::NotFetched { why, .. } => Some(why),
        _ => None,
    });
    let why = why.expect("the pod is told");
    assert!(why.contains("bytes are free"), "{why}");
    assert!(b.bench.engine.artifacts(None).is_empty());
    // A failed write is an error of the disk: what came before it is not used, either.
    assert_eq!(fs::read_dir(&incoming).expect("list").count(), 0);
    assert_eq!(b.fetches(ContentSource::Peer).failures, 1);
    fs::remove_file(&filler).expect("make room");
    b.end("full", Outcome::Failed).await;

    b.publish("late", &TASK).await;
    assert!(read(&b.bench.target("late")) == made);
    b.end("late", Outcome::Failed).await;
    a.finish().await;
    b.finish().await;
}
