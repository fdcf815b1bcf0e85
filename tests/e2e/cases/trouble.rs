//! Faults around a running pod that must not affect it. In each case a pod has its volumes, the
//! fault occurs, and the pod continues. Then it ends, and its data is kept.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::PathBuf;
use std::time::SystemTime;

use crate::cluster::{Cluster, eventually};
use crate::env::Env;
use crate::step::Step;

/// A pod that starts now has its volumes.
fn new_step_starts<'a>(env: &'a Env, name: &'a str) -> Step<'a> {
    let mut step = Step::runs(env, name);
    step.works();
    step
}

pub(super) fn driver_killed(env: &Env) {
    let mut before = Step::runs(env, "before");
    env.cluster.kill_driver();
    // There is none now.
    before.works();
    env.cluster.driver_ready();
    before.works();
    let after = new_step_starts(env, "after");
    before.ends();
    after.ends();
}

pub(super) fn kubelet_restarted(env: &Env) {
    let mut before = Step::runs(env, "before");
    drop(env.cluster.without("kubelet"));
    // It publishes everything again and needs a new registration; a new pod starts only after both.
    let after = new_step_starts(env, "after");
    before.works();
    before.ends();
    after.ends();
}

/// A file that lies where a volume is to be mounted. It goes with this, also in a case that fails:
/// else the pod could not go.
struct Obstacle(PathBuf);

impl Drop for Obstacle {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// A pod for which the driver refuses the volume `scratch`, so that kubelet asks for it again and
/// again, until what is returned is dropped.
fn refused(env: &Env, name: &str, from: &str) -> Obstacle {
    let pod = Env::filled("consumer.yaml", &[("NAME", name), ("FROM", from)]);
    // Kubelet hears of it only when the obstacle is there. And it asks the API server for nothing,
    // which may be gone in a moment.
    let gated =
        "spec:\n  automountServiceAccountToken: false\n  schedulingGates: [{name: e2e/obstacle}]\n";
    env.apply_text(&pod.replacen("spec:\n", gated, 1));
    let target = env.volume_from_outside(&env.uid(name), "scratch");
    let obstacle = Obstacle(target.join("obstacle"));
    // Directories of pods that kubelet does not know it takes away as long as they are empty.
    eventually("there is something in the way", || {
        fs::create_dir_all(&target).ok()?;
        fs::write(&obstacle.0, "").ok()
    });
    let open = r#"[{"op": "remove", "path": "/spec/schedulingGates"}]"#;
    env.kubectl(&["patch", "pod", name, "--type=json", "--patch", open]);
    env.event(name, &["is a directory that is not empty"]);
    obstacle
}

/// The driver's message when the API lacks it.
const REFUSED: &str = "kubelet did not register the driver";

#[expect(
    clippy::too_many_lines,
    reason = "one outage, in the order in which it happens"
)]
pub(super) fn api_server_away(env: &Env) {
    let running = Step::runs(env, "running");
    // Marked content is kept without a query, and another pod waits for it.
    let then = "until [ -e /cache-unmarked/end ]; do sleep 0.1; done";
    env.apply_with("marker.yaml", &[("NAME", "marks"), ("THEN", then)]);
    env.ready("marks");
    let from = "artifact/marks";
    env.apply_with("consumer.yaml", &[("NAME", "waits"), ("FROM", from)]);
    env.event("waits", &[from, "pod marks is still making it"]);
    let obstacle = refused(env, "refused", from);
    let [marks, waits, refused] = ["marks", "waits", "refused"].map(|pod| env.uid(pod));

    let begin = SystemTime::now();
    let away = env.cluster.without("kube-apiserver");
    // The outcome cannot be queried, so nothing is committed and nothing is discarded.
    running.told_to_end();
    let wait_for_outcome = || {
        let volumes = env.list("volumes");
        let waiting = volumes
            .iter()
            .filter(|volume| volume["state"] == "awaiting-outcome");
        waiting.count()
    };
    let both_wait = || (wait_for_outcome() == 2).then_some(());
    eventually("its volumes wait for an outcome", both_wait);
    assert!(env.artifacts().is_empty(), "{:?}", env.artifacts());
    // A pod gets its volumes and starts: one volume was requested before, one is requested again.
    drop(obstacle);
    env.touch_from_outside(&marks, "cache-unmarked", "end");
    for pod in [&waits, &refused] {
        let copied = env.volume_from_outside(pod, "scratch").join("file");
        eventually("what is marked has reached who waits for it", || {
            fs::read_to_string(&copied)
                .is_ok_and(|text| text == "marks\n")
                .then_some(())
        });
    }
    let marked = ["artifact/marks", "task-cache/marks"];
    assert_eq!(env.artifacts(), marked);
    // The next driver knows what this one knew, and mounts stay. (Kubelet has no calls for it
    // before it can enter it in the API.)
    env.cluster.replace_driver();
    env.cluster.driver_answers();
    assert_eq!(env.artifacts(), marked);
    // It waits again once it has found out again that it lacks the outcome.
    eventually("its volumes wait for an outcome again", both_wait);
    for pod in [&waits, &refused] {
        assert_eq!(env.mounted(pod), ["in", "scratch"]);
        env.touch_from_outside(pod, "scratch", "end");
    }
    eventually("kubelet has refused it", || {
        env.cluster.has_logged(REFUSED).then_some(())
    });
    drop(away);

    eventually("the API server answers", || {
        let ready = env
            .cluster
            .kubectl(&["get", "--raw=/readyz"])
            .output()
            .expect("kubectl starts");
        ready.status.success().then_some(())
    });
    running.ended();
    for pod in ["marks", "waits", "refused"] {
        env.succeeded(pod);
    }
    for pod in ["waits", "refused"] {
        assert_eq!(env.logs(pod), "marks\n");
    }
    env.hold(&marked.map(|reference| (reference, "file", "marks\n")));
    // It is an event, not an alert: the driver did not fail.
    let broken = "the watch over pods is broken";
    // The API server was away when that one was killed, and may not know yet which it was.
    let last = eventually("the log of the driver that was killed", || {
        let last = env.cluster.last_driver_log(begin);
        last.contains(broken).then_some(last)
    });
    let log = env.cluster.driver_log(begin);
    let alarming = |log: &str| -> Vec<String> {
        let lines = log.lines().filter(|line| line.contains("\"ERROR\""));
        lines.map(str::to_owned).collect()
    };
    assert_eq!(alarming(&last), [""; 0]);
    assert!(log.contains(broken), "{log}");
    // But by kubelet, perhaps, once: it may be a moment later than the driver to hear that the API
    // server is back.
    let late = alarming(&log);
    assert!(late.len() <= 1, "{late:#?}");
    let is_late = |line: &String| line.contains(REFUSED) && line.contains("offering it again");
    assert!(late.iter().all(is_late), "{late:#?}");
    // The next one was refused by kubelet, which is said once, however often it was offered; and is
    // registered now. Whether it heard of the API server itself before that depends on how long
    // that took to come up: it is offered now and then in any case.
    let warned = |line: &&str| line.contains("\"WARN\"") && line.contains(REFUSED);
    assert_eq!(log.lines().filter(warned).count(), 1, "{log}");
    let at = |what: &str| log.find(what).unwrap_or_else(|| panic!("{what}: {log}"));
    assert!(at(REFUSED) < at("registered with kubelet"), "{log}");
}

/// How many pods there are while the driver is killed again and again.
const PODS: usize = 12;

pub(super) fn driver_killed_again_and_again(env: &Env) {
    env.make("made");
    // A third of them succeeds, a third fails, and a third is deleted.
    let pods: Vec<String> = (0..PODS).map(|number| format!("pod-{number}")).collect();
    let manifests: Vec<String> = pods
        .iter()
        .enumerate()
        .map(|(number, name)| {
            let then = if number % 3 == 1 { "exit 1" } else { "exit 0" };
            Env::filled("killed.yaml", &[("NAME", name), ("THEN", then)])
        })
        .collect();
    // Each has three volumes. A volume has a directory from the first moment of its publish to the
    // last of its unpublish.
    let published = |cluster: &Cluster| cluster.in_pool("volumes").len();
    env.apply_text(&manifests.join("---\n"));
    for least in [6, 24] {
        env.cluster
            .kill_driver_when("more volumes are published", |cluster| {
                published(cluster) >= least
            });
    }
    for pod in &pods {
        env.ready(pod);
    }

    let uids: Vec<String> = pods.iter().map(|pod| env.uid(pod)).collect();
    for (uid, number) in uids.iter().zip(0..) {
        if number % 3 != 2 {
            env.touch_from_outside(uid, "scratch", "end");
        }
    }
    let deleted = pods.iter().skip(2).step_by(3).map(String::as_str);
    let delete = ["delete", "pods", "--wait=false"];
    env.kubectl(&delete.into_iter().chain(deleted).collect::<Vec<_>>());
    for most in [28, 8] {
        env.cluster
            .kill_driver_when("more volumes are unpublished", |cluster| {
                published(cluster) <= most
            });
    }
    for pods in pods.chunks(3) {
        env.succeeded(&pods[0]);
        env.failed(&pods[1]);
    }
    env.cluster.driver_ready();
    env.settled();
    let sealed = env.artifacts();
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
    env.hold(&holding);
}

pub(super) fn containerd_restarted(env: &Env) {
    let mut before = Step::runs(env, "before");
    let meanwhile = Step::runs(env, "meanwhile");
    let away = env.cluster.without("containerd");
    // A container's process is no child of it, and neither is who waits for its end.
    meanwhile.told_to_end();
    drop(away);
    let after = new_step_starts(env, "after");
    before.works();
    meanwhile.ended();
    before.ends();
    after.ends();
}

pub(super) fn force_deleted(env: &Env) {
    let force = |pod: &str| {
        env.kubectl(&["delete", "pod", pod, "--force", "--grace-period=0"]);
    };
    // Its step writes all the time, in all of them.
    env.apply_with("writes.yaml", &[("NAME", "writes")]);
    env.ready("writes");
    force("writes");
    env.settled();

    // Something that is none of the pod's processes has a file open, and goes on writing when the
    // pod is gone.
    let uid = Step::runs(env, "held").uid().to_owned();
    let held = env.volume_from_outside(&uid, "out").join("held");
    let mut held =
        File::create(&held).unwrap_or_else(|error| panic!("{}: {error}", held.display()));
    force("held");
    let states = || -> Vec<String> {
        let volumes = env.list("volumes");
        let states = volumes.iter().filter_map(|volume| volume["state"].as_str());
        states.map(str::to_owned).collect()
    };
    eventually("the pod's directory is gone, and one volume waits", || {
        let gone = !env.cluster.pod_directories().contains(&uid);
        (gone && states().len() == 1).then_some(())
    });
    held.write_all(b"still").expect("the file is still there");
    assert_eq!(states(), ["in-use"]);
    drop(held);
    env.settled();
    assert!(env.artifacts().is_empty(), "{:?}", env.artifacts());
}
