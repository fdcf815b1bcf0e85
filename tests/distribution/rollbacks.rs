//! An earlier generation that is committed once more, where a tier has newer content of the name.

use baggageclaim::engine::RollbackOrder;
use baggageclaim::model::{ArtifactId, Name, Outcome, Timestamp};

use crate::nodes::{INPUT, Node, OUTPUT, TASK, reference, require, tenant, text, two_nodes};

/// What a rollback on a node knows of the name in the tier.
#[derive(Debug, Clone, Copy)]
enum Knows {
    Number,
    /// The tier was away.
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
        Knows::Number => a.distribution.base(&name.tenant, &name.reference).await,
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
