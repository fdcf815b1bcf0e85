//! The whole of csi-sanity against the plugins of a cluster: the controller's socket, and the
//! socket of the one node. It skips what `standalone` skips without its options, and nothing else.

use crate::common::{Fs, require_lab, skip};
use crate::driver::{client, controller, kubelet_dir, node};
use crate::plane::ControlPlane;
use crate::report::WITHOUT_OPTIONS;
use crate::tool::{Target, tool};
use crate::{await_pools, volumes};

#[tokio::test(flavor = "multi_thread")]
async fn csi_sanity_passes_over_both_sockets() {
    let Some(plane) = ControlPlane::start().await else {
        return;
    };
    let lab = require_lab!(Fs::Ext4);
    let tool = match tool() {
        Ok(tool) => tool,
        Err(reason) => return skip(reason),
    };
    let controller = controller(&plane);
    let one = node(&plane, "node-1", &lab.dir("one"));
    one.ready().await;
    await_pools(&client(&controller).await, 1).await;

    let report = plane.directory.path().join("report.json");
    let target = Target {
        node: &one.socket,
        controller: Some(&controller.socket),
        pods: &kubelet_dir(&plane, "node-1"),
        report: &report,
    };
    #[expect(
        clippy::disallowed_methods,
        reason = "a test waits for a program; the rule is for the driver"
    )]
    let report = tokio::task::block_in_place(|| target.ask_all(tool));
    let log = || format!("controller:\n{}\nnode:\n{}", controller.tail(), one.tail());
    report.must_be_whole("a cluster", WITHOUT_OPTIONS, &log);
    assert!(volumes(&plane).await.is_empty(), "volumes are left");
}
