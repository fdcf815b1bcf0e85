//! The engine of one node, as the Controller service sees it: it has everything on its node and
//! makes nothing for others. The answers of many nodes are tested with the service.

use std::sync::Arc;

use baggageclaim::engine::Error;
use baggageclaim::engine::claims::{Capacity, Claims as _, OneNode, SnapshotFilter};
use baggageclaim::model::{Attachment, Node, NodeId, Requirement, Topology};

use super::bench::{Bench, OVERLAY, request};

fn labels(node: &str) -> Topology {
    Topology([("node".to_owned(), node.to_owned())].into())
}

fn required(node: &str) -> Requirement {
    Requirement {
        requisite: vec![labels(node)],
        preferred: vec![labels("other")],
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_that_one_engine_has_is_on_its_node_and_nothing_is_made_for_another() {
    let Some(bench) = Bench::new(OVERLAY).await else {
        return;
    };
    let here = Node {
        id: NodeId::new("here").expect("an id"),
        topology: labels("here"),
    };
    let node = Arc::new(here.clone());
    let claims = OneNode::new(bench.engine.clone(), here);
    let made = claims.create_claim(request("c"), &required("here")).await;
    let made = made.expect("made");
    assert_eq!(made.node, node);
    let refused = claims.create_claim(request("c"), &required("other")).await;
    assert!(
        matches!(refused, Err(Error::ExistsElsewhere { .. })),
        "{refused:?}"
    );
    let refused = claims
        .create_claim(request("another"), &required("other"))
        .await;
    assert!(matches!(refused, Err(Error::Elsewhere(_))), "{refused:?}");
    let id = made.what.id.as_str();
    let refused = claims.create_snapshot("s", id, &required("other")).await;
    assert!(matches!(refused, Err(Error::Elsewhere(_))), "{refused:?}");
    let taken = claims.create_snapshot("s", id, &required("here")).await;
    let taken = taken.expect("taken");
    assert_eq!(taken.node, node);

    // It has been used since it was made.
    let found = claims.claim(id).await.expect("there");
    assert_eq!((found.what.id.as_str(), &found.node), (id, &node));
    let page = claims.claims(None, 9).await.expect("a page");
    assert_eq!(page.items, [found]);
    let page = claims.snapshots(&SnapshotFilter::default(), None, 9).await;
    assert_eq!(page.expect("a page").items, [taken]);

    let attach = async |node: &str| {
        let attachment = Attachment {
            node: node.to_owned(),
            read_only: false,
            access_mode: 1,
        };
        claims.attach_claim(id, attachment).await
    };
    let refused = attach("other").await;
    assert!(matches!(refused, Err(Error::NoSuchNode(_))), "{refused:?}");
    attach("here").await.expect("attached");
    claims.detach_claim(id, None).await.expect("detached");

    let elsewhere = claims.capacity(&labels("other")).await.expect("numbers");
    assert_eq!(elsewhere, Capacity::default());
    let room = claims.capacity(&labels("here")).await.expect("numbers");
    let all = claims.capacity(&Topology::default()).await;
    assert_eq!(room.largest, all.expect("numbers").largest);
    assert!(room.largest > 0);
    drop(claims);
    bench.finish().await;
}
