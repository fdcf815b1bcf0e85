//! Volumes whose claim was given up, and those that must stay.

use std::collections::BTreeSet;

use baggageclaim::api::{BOUND, Phase};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::calls::{create, request};
use crate::common::{Fs, require_lab};
use crate::driver::{client, controller_with, node};
use crate::objects::{claim, persistent};
use crate::plane::ControlPlane;
use crate::standard::held;
use crate::{await_pools, eventually, volumes};

#[tokio::test]
async fn a_volume_whose_claim_was_given_up_is_deleted_and_no_other() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let port = crate::plane::free_port();
    let http = format!("--http=127.0.0.1:{port}");
    let controller = controller_with(&plane, &["--leak-grace=2s", &http]);
    let mut one = node(&plane, "node-1", &lab.dir("one"));
    let mut client = client(&controller).await;
    await_pools(&client, 1).await;
    let mut make = async |name: &str| {
        let made = create(&mut client, request(name, None, None)).await;
        made.expect("made").0
    };
    let retained_name = claim(&plane, "retained");
    let retained = make(&retained_name).await;
    let named_name = claim(&plane, "named");
    let named = make(&named_name).await;
    let pending = make(&claim(&plane, "pending")).await;
    let other = make("not-of-a-claim").await;
    let given_up = make(&claim(&plane, "given-up")).await;

    // A PersistentVolume that was deleted by hand: its data stays.
    persistent(&plane, &retained_name, &retained, "retained", "Retain");
    persistent(&plane, &named_name, &named, "named", "Retain");
    let marked = async || {
        let volumes = volumes(&plane).await;
        let marked = volumes.iter().filter(|volume| {
            let marks = volume.metadata.annotations.as_ref();
            marks.is_some_and(|marks| marks.contains_key(BOUND))
        });
        marked.count() == 2
    };
    eventually("volumes with a PersistentVolume are marked", marked).await;
    plane.delete("pv", &retained_name);
    plane.delete("pvc", "retained");
    plane.delete("pvc", "named");

    plane.delete("pvc", "given-up");
    let is_gone = async || {
        let volumes = volumes(&plane).await;
        let gone = Some(&given_up);
        !volumes.iter().any(|one| one.metadata.name.as_ref() == gone)
    };
    eventually("the volume that was given up is deleted", is_gone).await;
    let left = volumes(&plane).await;
    let is_ready = |phase| phase == Some(Phase::Ready);
    assert!(left.iter().all(|one| is_ready(one.phase())), "{left:?}");
    check_metrics(port).await;
    one.kill();
    let held = held(&lab.dir("one")).await;
    assert_eq!(held, BTreeSet::from([retained, named, pending, other]));
}

/// The metrics page of a controller.
pub(crate) async fn metrics(port: u16) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port))
        .await
        .expect("it listens");
    let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    stream.write_all(request).await.expect("sent");
    let mut page = String::new();
    stream.read_to_string(&mut page).await.expect("read");
    page
}

/// The controller's metrics are those of the page, and count what was done.
async fn check_metrics(port: u16) {
    let page = metrics(port).await;
    for line in [
        // No Node object was made in this test.
        "baggageclaim_cluster_volumes{state=\"node_gone\"} 4",
        "baggageclaim_cluster_volumes{state=\"ready\"} 0",
        "baggageclaim_cluster_volumes{state=\"lost\"} 0",
        "baggageclaim_cluster_nodes{state=\"missing\"} 1",
        "baggageclaim_cluster_leaks_deleted_total 1",
        "baggageclaim_cluster_orders_waiting 0",
    ] {
        assert!(page.lines().any(|found| found == line), "{line}\n{page}");
    }
    let documented = include_str!("../../docs/metrics.md").lines();
    let documented = documented.filter_map(|line| line.strip_prefix("| `baggageclaim_cluster_"));
    let documented = documented.filter_map(|name| name.split(['`', '{']).next());
    let documented: BTreeSet<&str> = documented
        .map(|name| name.trim_end_matches("_total"))
        .collect();
    let types = page.lines().filter_map(|line| {
        let name = line.strip_prefix("# TYPE baggageclaim_cluster_")?;
        name.split(' ').next()
    });
    assert_eq!(types.collect::<BTreeSet<&str>>(), documented);
}
