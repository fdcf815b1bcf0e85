//! What goes wrong around a pod while it runs, and must not reach it.
//! In each a pod has its volumes, something happens, and the pod goes on; then it ends, and what it made is kept.

use std::fs::File;
use std::io::Write as _;
use std::time::SystemTime;

use crate::cluster::{Cluster, eventually, succeed};
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
    step_ended(stage, name);
}

fn step_ended(stage: &Stage, name: &str) {
    stage.succeeded(name);
    stage.sealed(&format!("artifact/{name}"));
    let content = stage.read(&format!("artifact/{name}"));
    assert!(content.contains("begun"), "{content}");
}

/// A pod that starts now has its volumes.
fn new_step_starts(stage: &Stage, name: &str) {
    step_runs(stage, name);
    step_works(stage, name);
}

pub(super) fn driver_killed(stage: &Stage) {
    step_runs(stage, "before");
    stage.cluster.kill_driver();
    // There is none now.
    step_works(stage, "before");
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
    let uid = stage.uid("running");
    let begin = SystemTime::now();
    let away = stage.cluster.without("kube-apiserver");
    // Nobody can be asked how it ended, so nothing is committed, and nothing thrown away.
    stage.touch_from_outside(&uid, "scratch", "end");
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
    // It is said, and nobody is alarmed: it is no failure of the driver's.
    let log = stage.cluster.driver_log(begin);
    let alarming = |line: &&str| line.contains("\"ERROR\"");
    assert_eq!(log.lines().find(alarming), None, "{log}");
    assert!(log.contains("the watch over pods is broken"), "{log}");
}

/// How many pods there are while the driver is killed again and again.
const PODS: usize = 12;

pub(super) fn driver_killed_again_and_again(stage: &Stage) {
    stage.make("made");
    // A third of them succeeds, a third fails, and a third is deleted.
    let pods: Vec<String> = (0..PODS).map(|number| format!("pod-{number}")).collect();
    let manifests: Vec<String> = pods
        .iter()
        .enumerate()
        .map(|(number, name)| {
            let then = if number % 3 == 1 { "exit 1" } else { "exit 0" };
            Stage::filled("killed.yaml", &[("NAME", name), ("THEN", then)])
        })
        .collect();
    // Each has three volumes. A volume has a directory from the first moment of its publish to the last of its unpublish.
    let published = |cluster: &Cluster| cluster.in_pool("volumes").len();
    stage.apply_text(&manifests.join("---\n"));
    for least in [6, 24] {
        stage
            .cluster
            .kill_driver_when("more volumes are published", |cluster| {
                published(cluster) >= least
            });
    }
    for pod in &pods {
        stage.ready(pod);
    }

    let uids: Vec<String> = pods.iter().map(|pod| stage.uid(pod)).collect();
    for (uid, number) in uids.iter().zip(0..) {
        if number % 3 != 2 {
            stage.touch_from_outside(uid, "scratch", "end");
        }
    }
    let deleted = pods.iter().skip(2).step_by(3).map(String::as_str);
    let delete = ["delete", "pods", "--wait=false"];
    stage.kubectl(&delete.into_iter().chain(deleted).collect::<Vec<_>>());
    for most in [28, 8] {
        stage
            .cluster
            .kill_driver_when("more volumes are unpublished", |cluster| {
                published(cluster) <= most
            });
    }
    for pods in pods.chunks(3) {
        stage.succeeded(&pods[0]);
        stage.failed(&pods[1]);
    }
    stage.cluster.driver_ready();
    stage.settled();
    let sealed = stage.artifacts();
    let outputs = pods.iter().step_by(3);
    let mut expected: Vec<String> = outputs.map(|pod| format!("artifact/{pod}")).collect();
    expected
        .extend(["artifact", "resource-cache", "task-cache"].map(|kind| format!("{kind}/made")));
    expected.sort();
    assert_eq!(sealed, expected);
    let texts: Vec<(String, String)> = pods
        .iter()
        .step_by(3)
        .map(|pod| (format!("artifact/{pod}"), format!("{pod}\n")))
        .collect();
    let holding: Vec<(&str, &str, &str)> = texts
        .iter()
        .map(|(reference, text)| (&**reference, "text", &**text))
        .collect();
    stage.hold(&holding);
}

pub(super) fn containerd_restarted(stage: &Stage) {
    step_runs(stage, "before");
    step_runs(stage, "meanwhile");
    let uid = stage.uid("meanwhile");
    let away = stage.cluster.without("containerd");
    // A container's process is no child of it, and neither is who waits for its end.
    stage.touch_from_outside(&uid, "scratch", "end");
    drop(away);
    new_step_starts(stage, "after");
    step_works(stage, "before");
    step_ended(stage, "meanwhile");
    step_ends(stage, "before");
    step_ends(stage, "after");
}

pub(super) fn force_deleted(stage: &Stage) {
    let force = |pod: &str| {
        stage.kubectl(&["delete", "pod", pod, "--force", "--grace-period=0"]);
    };
    // Its step writes all the time, in all of them.
    stage.apply_with("writes.yaml", &[("NAME", "writes")]);
    stage.ready("writes");
    force("writes");
    stage.settled();

    // Something that is none of the pod's processes has a file open, and goes on writing when the pod is gone.
    step_runs(stage, "held");
    let uid = stage.uid("held");
    let held = stage.volume_from_outside(&uid, "out").join("held");
    let mut held =
        File::create(&held).unwrap_or_else(|error| panic!("{}: {error}", held.display()));
    force("held");
    let states = || -> Vec<String> {
        let volumes = stage.list("volumes");
        let states = volumes.iter().filter_map(|volume| volume["state"].as_str());
        states.map(str::to_owned).collect()
    };
    eventually("the pod's directory is gone, and one volume waits", || {
        let gone = !stage.cluster.pod_directories().contains(&uid);
        (gone && states().len() == 1).then_some(())
    });
    held.write_all(b"still").expect("nobody has taken it away");
    assert_eq!(states(), ["in-use"]);
    drop(held);
    stage.settled();
    assert!(stage.artifacts().is_empty(), "{:?}", stage.artifacts());
}
