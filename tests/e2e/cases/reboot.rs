//! The node is switched off and on: no process or mount is left, its disks keep their data, and the
//! same pods return. The machine below stays on; `make guests` tests the loss of unwritten data.

use crate::cluster::eventually;
use crate::stage::{Stage, items};

pub(super) fn reboot(stage: &Stage) {
    let made = stage.make("made");
    // One that is started again wherever it was, and one that is not.
    stage.apply("rebooted.yaml");
    let name = stage.only_pod("app=rebooted");
    stage.ready(&name);
    let uid = stage.uid(&name);
    let first = stage.logs(&name);
    assert!(
        first.contains("can't open '/scratch/text'") && first.ends_with(&made.repeat(2)),
        "{first}"
    );
    stage.apply_with("long-step.yaml", &[("NAME", "once")]);
    stage.ready("once");
    let booted = boot(stage);
    let claimed: Vec<_> = volumes(stage);
    assert_eq!(claimed.len(), 7, "{claimed:?}");

    stage.cluster.script(&["reboot"]);
    eventually("the node tells of a new boot", || {
        (boot(stage) != booted).then_some(())
    });
    stage.cluster.driver_ready();

    // The same pod, by its uid, so its volumes have the same ids; what it had written in them is of
    // another boot.
    stage.until("pods", &name, "started again", |pod| {
        let statuses = pod["status"]["containerStatuses"].as_array();
        let restarts = statuses.into_iter().flatten();
        restarts
            .filter_map(|status| status["restartCount"].as_u64())
            .sum::<u64>()
            > 0
    });
    stage.ready(&name);
    assert_eq!(stage.uid(&name), uid);
    assert_eq!(stage.logs(&name), first);
    assert_eq!(
        stage.exec(&name, "cat /scratch/text /input/text /cache/text"),
        "changed\n".repeat(3)
    );
    // A pod that does not start again is over, and the content of its volumes is unknown.
    stage.failed("once");
    for lost in ["artifact/once", "task-cache/long-step"] {
        stage.event(
            "once",
            &[
                lost,
                "the node was rebooted, or the pool's filesystem unmounted, before it was sealed",
            ],
        );
    }
    eventually("its volumes are gone", || {
        (volumes(stage).len() == 4).then_some(())
    });

    // Earlier seals are whole.
    stage.hold(
        &["artifact/made", "task-cache/made", "resource-cache/made"]
            .map(|reference| (reference, "text", &*made)),
    );
    // And what is written now counts again.
    stage.kubectl(&["delete", "deployment", "rebooted", "--wait"]);
    stage.gone(&name);
    stage.settled();
    assert_eq!(
        stage.artifacts(),
        [
            "artifact/made",
            "artifact/rebooted",
            "resource-cache/made",
            "task-cache/made"
        ]
    );
    stage.hold(
        &["artifact/rebooted", "task-cache/made"].map(|reference| (reference, "text", "changed\n")),
    );
}

/// The node's boot id.
fn boot(stage: &Stage) -> String {
    let nodes = stage.cluster.get(&["nodes"]);
    let mut boots = items(&nodes).map(|node| &node["status"]["nodeInfo"]["bootID"]);
    boots
        .next()
        .and_then(|boot| boot.as_str())
        .expect("one node")
        .to_owned()
}

/// The ids of all volumes.
fn volumes(stage: &Stage) -> Vec<String> {
    let volumes = stage.list("volumes");
    let ids = volumes.iter().filter_map(|volume| volume["id"].as_str());
    ids.map(str::to_owned).collect()
}
