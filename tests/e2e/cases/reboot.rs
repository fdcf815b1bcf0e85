//! The node is switched off and on: no process or mount is left, its disks keep their data, and the
//! same pods return. The machine below stays on; `make guests` tests the loss of unwritten data.

use crate::cluster::eventually;
use crate::env::{Env, items};

pub(super) fn reboot(env: &Env) {
    let made = env.make("made");
    // One that is started again wherever it was, and one that is not.
    env.apply("rebooted.yaml");
    let name = env.only_pod("app=rebooted");
    env.ready(&name);
    let uid = env.uid(&name);
    let first = env.logs(&name);
    assert!(
        first.contains("can't open '/scratch/text'") && first.ends_with(&made.repeat(2)),
        "{first}"
    );
    env.apply_with("long-step.yaml", &[("NAME", "once")]);
    env.ready("once");
    let booted = boot(env);
    let claimed: Vec<_> = volumes(env);
    assert_eq!(claimed.len(), 7, "{claimed:?}");

    env.cluster.script(&["reboot"]);
    eventually("the node tells of a new boot", || {
        (boot(env) != booted).then_some(())
    });
    env.cluster.driver_ready();

    // The same pod, by its uid, so its volumes have the same ids; what it had written in them is of
    // another boot.
    env.until("pods", &name, "started again", |pod| {
        let statuses = pod["status"]["containerStatuses"].as_array();
        let restarts = statuses.into_iter().flatten();
        restarts
            .filter_map(|status| status["restartCount"].as_u64())
            .sum::<u64>()
            > 0
    });
    env.ready(&name);
    assert_eq!(env.uid(&name), uid);
    assert_eq!(env.logs(&name), first);
    assert_eq!(
        env.exec(&name, "cat /scratch/text /input/text /cache/text"),
        "changed\n".repeat(3)
    );
    // A pod that does not start again is over, and the content of its volumes is unknown.
    env.failed("once");
    for lost in ["artifact/once", "task-cache/long-step"] {
        env.event(
            "once",
            &[
                lost,
                "the node was rebooted, or the pool's filesystem unmounted, before it was sealed",
            ],
        );
    }
    eventually("its volumes are gone", || {
        (volumes(env).len() == 4).then_some(())
    });

    // Earlier seals are whole.
    env.hold(
        &["artifact/made", "task-cache/made", "resource-cache/made"]
            .map(|reference| (reference, "text", &*made)),
    );
    // And what is written now counts again.
    env.kubectl(&["delete", "deployment", "rebooted", "--wait"]);
    env.gone(&name);
    env.settled();
    assert_eq!(
        env.artifacts(),
        [
            "artifact/made",
            "artifact/rebooted",
            "resource-cache/made",
            "task-cache/made"
        ]
    );
    env.hold(
        &["artifact/rebooted", "task-cache/made"].map(|reference| (reference, "text", "changed\n")),
    );
}

/// The node's boot id.
fn boot(env: &Env) -> String {
    let nodes = env.cluster.get(&["nodes"]);
    let mut boots = items(&nodes).map(|node| &node["status"]["nodeInfo"]["bootID"]);
    boots
        .next()
        .and_then(|boot| boot.as_str())
        .expect("one node")
        .to_owned()
}

/// The ids of all volumes.
fn volumes(env: &Env) -> Vec<String> {
    let volumes = env.list("volumes");
    let ids = volumes.iter().filter_map(|volume| volume["id"].as_str());
    ids.map(str::to_owned).collect()
}
