//! What goes wrong around a pod while it runs, and must not reach it.
//! In each a pod has its volumes, something happens, and the pod goes on; then it ends, and what it made is kept.

use crate::cluster::{eventually, succeed};
use crate::stage::Stage;

/// A pod that runs until it is told to end (a file in its scratch volume), with a cache and an output.
fn step_runs(stage: &Stage, name: &str) {
    stage.apply_with("long-step.yaml", &[("NAME", name)]);
    stage.ready(name);
}

/// Its volumes are as they were, before and after.
fn step_works(stage: &Stage, name: &str) {
    stage.exec(
        name,
        "cat /cache/begun /out/begun && echo more >> /out/more && mount | grep -c ' /cache '",
    );
}

/// It ends well, and its output is sealed with what it wrote all the time.
fn step_ends(stage: &Stage, name: &str) {
    stage.exec(name, "touch /scratch/end");
    stage.succeeded(name);
    stage.sealed(&format!("artifact/{name}"));
    let reader = format!("{name}-reader");
    stage.apply_with(
        "reader.yaml",
        &[("NAME", &reader), ("FROM", &format!("artifact/{name}"))],
    );
    stage.succeeded(&reader);
    assert!(
        stage.logs(&reader).contains("begun"),
        "{}",
        stage.logs(&reader)
    );
}

/// A pod that starts now has its volumes.
fn new_step_starts(stage: &Stage, name: &str) {
    step_runs(stage, name);
    step_works(stage, name);
}

pub(super) fn driver_killed(stage: &Stage) {
    step_runs(stage, "before");
    let killed = stage.cluster.driver_process();
    succeed(std::process::Command::new("kill").args(["-KILL", &killed.to_string()]));
    step_works(stage, "before");
    // kubelet starts the container again.
    eventually("there is a new driver", || {
        stage
            .cluster
            .driver(&["status"])
            .status
            .success()
            .then_some(())
    });
    assert_ne!(stage.cluster.driver_process(), killed);
    stage.cluster.driver_ready();
    step_works(stage, "before");
    new_step_starts(stage, "after");
    step_ends(stage, "before");
    step_ends(stage, "after");
}

pub(super) fn driver_upgraded(stage: &Stage) {
    step_runs(stage, "before");
    let old = stage.cluster.driver_process();
    succeed(&mut stage.cluster.kubectl(&[
        "rollout",
        "restart",
        "--namespace=baggageclaim",
        "daemonset/baggageclaim-node",
    ]));
    // A pod that comes in the middle of it waits, and then starts.
    stage.apply_with("long-step.yaml", &[("NAME", "meanwhile")]);
    stage.cluster.driver_ready();
    assert_ne!(stage.cluster.driver_process(), old);
    stage.ready("meanwhile");
    step_works(stage, "meanwhile");
    step_works(stage, "before");
    step_ends(stage, "before");
    step_ends(stage, "meanwhile");
}

pub(super) fn kubelet_restarted(stage: &Stage) {
    step_runs(stage, "before");
    drop(stage.cluster.without("kubelet"));
    // It publishes everything again, and has to be registered with anew; a new pod starts only when both are done.
    new_step_starts(stage, "after");
    step_works(stage, "before");
    step_ends(stage, "before");
    step_ends(stage, "after");
}

pub(super) fn api_server_away(stage: &Stage) {
    step_runs(stage, "running");
    let pod = stage.get("pod/running");
    let uid = pod["metadata"]["uid"].as_str().expect("a uid");
    let away = stage.cluster.without("kube-apiserver");
    // Nobody can be asked how it ended, so nothing is committed, and nothing thrown away.
    stage.touch_from_outside(uid, "scratch", "end");
    eventually("its volumes wait for an outcome", || {
        let volumes = stage.list("volumes");
        volumes
            .iter()
            .any(|volume| volume["state"] == "awaiting-outcome")
            .then_some(())
    });
    assert!(stage.list("artifacts").is_empty());
    drop(away);
    eventually("the API server answers", || {
        let ready = stage
            .cluster
            .kubectl(&["get", "--raw=/readyz"])
            .output()
            .expect("kubectl starts");
        ready.status.success().then_some(())
    });
    stage.succeeded("running");
    stage.sealed("artifact/running");
}
