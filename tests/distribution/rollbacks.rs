//! An earlier generation that is committed once more, where a tier has newer content of the name;
//! and content that an administrator puts under a name that was cleared.

use std::fs::File;
use std::time::Duration;

use baggageclaim::archive::Codec;
use baggageclaim::distribution::Settings;
use baggageclaim::engine::{ImportRequest, RollbackOrder, Source};
use baggageclaim::model::{ArtifactId, Name, Outcome, Timestamp};

use crate::failing::{Fault, Op};
use crate::nodes::{
    INPUT, Node, OUTPUT, Shared, TASK, reference, require, tenant, text, two_nodes,
};

/// What a rollback on a node knows of the name in the tier.
#[derive(Debug, Clone, Copy)]
enum Knows {
    Number,
    /// An earlier version did not insist on the tier's answer.
    Nothing,
}

#[tokio::test(flavor = "multi_thread")]
async fn other_nodes_get_what_was_rolled_back_from_the_tier() {
    let types = [
        (TASK, TASK, "task-cache/go"),
        (OUTPUT, INPUT, "artifact/built"),
    ];
    for (writer, reader, name) in types {
        for knows in [Knows::Number, Knows::Nothing] {
            rolled_back(writer, reader, name, knows).await;
        }
    }
}

async fn rolled_back(
    writer: [(&str, &str); 2],
    reader: [(&str, &str); 2],
    name: &str,
    knows: Knows,
) {
    let case = format!("{name}, {knows:?}");
    let (tier, a, b) = two_nodes!();
    let name = Name {
        tenant: tenant("ci"),
        reference: reference(name),
    };
    a.share("one", &writer, "good").await;
    let first = newest(&a, &name);
    // A long step keeps it.
    a.publish("long", &reader).await;
    a.share("two", &writer, "bad").await;
    assert_eq!(b.sees("before", &reader).await, text("bad"), "{case}");

    let base = match knows {
        Knows::Number => base(&a, &name).await,
        Knows::Nothing => None,
    };
    assert_eq!(base.is_some(), matches!(knows, Knows::Number), "{case}");
    let order = RollbackOrder {
        id: ArtifactId::from_bits(7),
        created: Timestamp(a.bench.engine.now().0 + 1),
        by: "jane".to_owned(),
    };
    let made = a
        .bench
        .engine
        .rollback(name.clone(), first, base, Some(order));
    assert_eq!(made.await.expect("rolled back"), ArtifactId::from_bits(7));
    a.shared().await;

    let c = require!(Node::new(&tier.store).await);
    assert_eq!(c.sees("cold", &reader).await, text("good"), "{case}");
    // A task cache asks for newer content; an input uses what is on its node.
    if writer == TASK {
        assert_eq!(b.sees("warm", &reader).await, text("good"), "{case}");
    }
    // It is the parent of what comes next, and that is newer.
    c.share("three", &writer, "better").await;
    let d = require!(Node::new(&tier.store).await);
    assert_eq!(d.sees("later", &reader).await, text("better"), "{case}");
    a.end("long", Outcome::Failed).await;
    for node in [a, b, c, d] {
        node.finish().await;
    }
}

/// The artifact that has the name on a node.
fn newest(node: &Node, name: &Name) -> ArtifactId {
    let rows = node.bench.engine.artifacts(None);
    let owner = rows
        .iter()
        .find(|row| row.name.is_some() && row.reference == name.reference);
    owner.expect("it is there").id
}

async fn base(node: &Node, name: &Name) -> Option<u64> {
    let base = node.distribution.base(&name.tenant, &name.reference);
    base.await.expect("the tier tells it")
}

/// The tier remembers a clear for weeks, and answers more slowly than a pod waits for it.
#[tokio::test(flavor = "multi_thread")]
async fn content_that_is_put_under_a_cleared_name_keeps_it_though_the_tier_is_slow() {
    // Commits over commits need conditional writes.
    let tier = require!(Shared::s3());
    let store = tier.failing(|op, _| match op {
        Op::Get => Fault::Slow(Duration::from_millis(300)),
        _ => Fault::None,
    });
    let short = |settings: &mut Settings| settings.fresh_wait = Duration::from_millis(50);
    let node = require!(Node::with(&store, short).await);
    let name = Name {
        tenant: tenant("ci"),
        reference: reference("task-cache/go"),
    };
    let engine = &node.bench.engine;
    node.share("one", &TASK, "good").await;
    let good = newest(&node, &name);
    let archive = node.bench.lab.path().join("archive");
    let export = engine.export(Source::Artifact(good)).await.expect("open");
    let file = File::create(&archive).expect("create");
    let packed = engine.pack(export, Codec::Plain, file, <_>::default());
    packed.await.expect("packed");
    // A long step keeps it.
    node.publish("long", &TASK).await;
    for is_import in [false, true] {
        let cleared = node.distribution.clear(&name.tenant, &name.reference).await;
        cleared.expect("clear");
        let destroyed = engine.destroy(&name.tenant, &name.reference).await;
        destroyed.expect("destroy");
        let base = base(&node, &name).await;
        let made = if is_import {
            let request = ImportRequest {
                tenant: name.tenant.clone(),
                reference: name.reference.clone(),
                digest: None,
                size: None,
                ttl: None,
                base,
            };
            let file = File::open(&archive).expect("open");
            let imported = engine.import(request, file, <_>::default(), || true).await;
            imported.expect("imported").artifact
        } else {
            let made = engine.rollback(name.clone(), good, base, None).await;
            made.expect("rolled back")
        };
        node.shared().await;
        assert_eq!(newest(&node, &name), made, "import: {is_import}");
        let record = tier.record("task-cache/go").expect("it stays");
        let shown = record.content().map(|(artifact, ..)| artifact);
        assert_eq!(shown, Some(made), "import: {is_import}");
        let volume = format!("next-{is_import}");
        assert_eq!(node.sees(&volume, &TASK).await, text("good"));
    }
    node.end("long", Outcome::Failed).await;
    node.finish().await;
}
