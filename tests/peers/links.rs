//! Links that are cut, and holders that vanish or hang in the middle.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use crate::nodes::{INPUT, Link, Node, OUTPUT, RESOURCE, TASK, peers, random, read, text};

/// The longest frame of files below 1 MiB, and its record.
const FRAME: u64 = (1 << 20) + (64 << 10);

fn content(node: &Node, volume: &str) -> Vec<u8> {
    fs::read(node.bench.target(volume).join("random")).expect("read")
}

/// What a cut is tried on: several frames, so that all of it twice is more than one frame.
fn files() -> BTreeMap<String, Vec<u8>> {
    let large = (0..8).map(|file| (format!("large-{file}"), random(256 << 10)));
    let small = (0..200).map(|file| (format!("small-{file}"), random(2 << 10)));
    large.chain(small).collect()
}

#[tokio::test]
async fn cut_at_each_of_100_offsets_no_byte_is_wrong_and_at_most_one_frame_comes_twice() {
    let [a, b] = peers!("a", "b");
    let link = Link::to(&a).await;
    b.knows_at(&a, link.address, a.key.name(), None);
    let made = files();
    a.commits("made", &OUTPUT, |target| {
        for (name, bytes) in &made {
            fs::write(target.join(name), bytes).expect("write");
        }
    })
    .await;
    let fetch = async |round: usize| {
        let (passed, received) = (link.passed(), b.figures().received_bytes);
        let volume = format!("v{round}");
        b.publish(&volume, &INPUT).await;
        assert!(read(&b.bench.target(&volume)) == made, "round {round}");
        b.end(&volume, baggageclaim::model::Outcome::Failed).await;
        b.forget("artifact/built").await;
        (
            link.passed() - passed,
            b.figures().received_bytes - received,
        )
    };
    fetch(0).await;
    // Without the first handshake.
    let (whole, needed) = fetch(1).await;
    assert!(needed > 2 * FRAME, "{needed} bytes are too few frames");
    for round in 0..100 {
        // TLS can need a few bytes less another time.
        link.cut_after(whole * round / 101);
        let (_, received) = fetch(usize::try_from(round).expect("small") + 2).await;
        assert!(link.was_met(), "round {round}: the link was not cut");
        let more = received.saturating_sub(needed);
        assert!(more <= FRAME, "round {round}: {more} bytes came twice");
    }
    a.finish().await;
    b.finish().await;
}

#[tokio::test]
async fn the_next_holder_gives_the_rest_when_one_vanishes_or_hangs_mid_frame() {
    let [a, b, c] = peers!("a", "b", "c");
    for (kind, hangs) in [("vanishes", false), ("hangs", true)] {
        let name = format!("out-{kind}");
        let output = [("type", "output"), ("name", &*name)];
        let from = format!("artifact/{name}");
        let input = [("type", "input"), ("from", &*from)];
        let made = random(3 << 20);
        a.commits(&format!("{kind}-made"), &output, |target| {
            fs::write(target.join("random"), &made).expect("write");
        })
        .await;
        // The second holder has it from the first one.
        c.publish(&format!("{kind}-copy"), &input).await;
        let link = Link::to(&a).await;
        b.known_forgets();
        b.knows_at(&a, link.address, a.key.name(), None);
        let middle = 1 << 20;
        if hangs {
            link.hangs_after(middle);
        } else {
            link.ends_after(middle);
        }
        let other = Link::to(&c).await;
        b.knows_at(&c, other.address, c.key.name(), None);
        let before = b.figures().received_bytes;
        b.publish(&format!("{kind}-read"), &input).await;
        assert!(content(&b, &format!("{kind}-read")) == made);
        let received = b.figures().received_bytes - before;
        assert!(received < (3 << 20) + FRAME, "{kind}: {received}");
        assert!(link.was_met() && other.passed() > 1 << 20, "{kind}");
        for (node, volume) in [(&b, "read"), (&c, "copy")] {
            let volume = format!("{kind}-{volume}");
            node.end(&volume, baggageclaim::model::Outcome::Failed)
                .await;
        }
    }
    for node in [a, b, c] {
        node.finish().await;
    }
}

#[tokio::test]
async fn a_peer_that_hangs_is_waited_for_once_in_a_fetch_of_many_layers() {
    let [a, b, c] = peers!("a", "b", "c");
    for layer in 0..6 {
        a.commits(&format!("made-{layer}"), &TASK, |target| {
            fs::write(target.join(format!("random-{layer}")), random(64 << 10)).expect("write");
        })
        .await;
    }
    c.publish("copy", &TASK).await;
    let link = Link::to(&a).await;
    b.known_forgets();
    b.knows_at(&a, link.address, a.key.name(), None);
    b.knows(&c);
    link.hangs_after(32 << 10);
    let began = std::time::Instant::now();
    b.publish("read", &TASK).await;
    let took = began.elapsed();
    assert!(link.was_met(), "{} bytes", link.passed());
    assert!(read(&b.bench.target("read")) == read(&c.bench.target("copy")));
    // It is silent for 5 s, and there are six layers.
    assert!(took < Duration::from_secs(10), "{took:?}");
    for (node, volume) in [(&b, "read"), (&c, "copy")] {
        node.end(volume, baggageclaim::model::Outcome::Failed).await;
    }
    for node in [a, b, c] {
        node.finish().await;
    }
}

#[tokio::test]
async fn a_peer_that_hangs_keeps_no_pod_from_content_here() {
    let Some(a) = Node::new("a").await else {
        return;
    };
    let b = Node::with("b", |start| {
        start.settings.ask = Duration::from_millis(500);
        start.settings.fresh_wait = Duration::from_millis(200);
        start.settings.input_wait = Duration::from_secs(1);
    });
    let Some(b) = b.await else { return };
    a.knows(&b);
    let link = Link::to(&a).await;
    link.hangs_after(0);
    for (made, read) in [(&OUTPUT, &INPUT), (&RESOURCE, &RESOURCE), (&TASK, &TASK)] {
        let kind = read[0].1;
        b.commit(&format!("{kind}-made"), made, kind).await;
        b.knows_at(&a, link.address, a.key.name(), None);
        let asked = b.figures().questions;
        assert_eq!(b.sees(&format!("{kind}-here"), read).await, text(kind));
        assert_eq!(b.figures().questions, asked, "{kind}: a peer was asked");
        b.known_forgets();
    }
    b.knows_at(&a, link.address, a.key.name(), None);
    let other = [("type", "task-cache"), ("key", "other")];
    assert_eq!(b.sees("miss", &other).await, None);
    crate::common::bench::eventually("it is known to hang", || b.figures().questions_failed == 1)
        .await;
    a.finish().await;
    b.finish().await;
}
