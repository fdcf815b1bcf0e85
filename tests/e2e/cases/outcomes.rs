//! How the driver finds a pod's outcome if its phase is not enough: annotations, and markers in
//! volumes. `docs/events.md` has the rules.

use crate::env::Env;

/// A pod in which steps are exec'ed, one that leaves its name in the cache and in the output.
fn worker(env: &Env, name: &str) {
    env.apply_with("worker.yaml", &[("NAME", name)]);
    env.ready(name);
    env.exec(name, &format!("echo {name} > /work/file"));
    env.exec(
        name,
        "cp /work/file /out/file && cat /work/file >> /cache/steps",
    );
}

pub(super) fn annotation(env: &Env) {
    worker(env, "good");
    env.tell_outcome("good", "succeeded");
    env.delete("pod/good");
    env.event("good", &["artifact/good is committed"]);
    env.event("good", &["task-cache/worker is committed"]);

    worker(env, "bad");
    env.tell_outcome("bad", "failed");
    env.delete("pod/bad");
    for reference in ["artifact/bad", "task-cache/worker"] {
        let verdict = format!("{reference} is not committed");
        env.event("bad", &[&verdict, "the annotation"]);
    }

    // It was deleted while it ran, so no outcome is reported.
    worker(env, "cancelled");
    env.delete("pod/cancelled");
    env.event(
        "cancelled",
        &[
            "artifact/cancelled is not committed",
            "deleted before it had ended",
        ],
    );

    // A mistake is told, and can be mended.
    worker(env, "mended");
    env.tell_outcome("mended", "success");
    env.event("mended", &["\"success\"", "succeeded or failed"]);
    env.tell_outcome("mended", "succeeded");
    env.delete("pod/mended");
    env.event("mended", &["artifact/mended is committed"]);

    // The first word counts.
    worker(env, "late");
    env.tell_outcome("late", "failed");
    env.tell_outcome("late", "succeeded");
    env.delete("pod/late");
    env.event("late", &["artifact/late is not committed"]);

    env.settled();
    assert_eq!(
        env.artifacts(),
        ["artifact/good", "artifact/mended", "task-cache/worker"]
    );
    env.hold(&[
        ("artifact/good", "file", "good\n"),
        ("artifact/mended", "file", "mended\n"),
        ("task-cache/worker", "steps", "good\nmended\n"),
    ]);
}

pub(super) fn outcome_container(env: &Env) {
    for (name, then, verdict) in [
        ("good", "exit 0", "artifact/good is committed"),
        ("bad", "exit 3", "container step exited with 3"),
    ] {
        env.apply_with("outcome-container.yaml", &[("NAME", name), ("THEN", then)]);
        env.until("pods", name, "left by its step", |pod| {
            let statuses = pod["status"]["containerStatuses"].as_array();
            let mut statuses = statuses.into_iter().flatten();
            statuses
                .any(|status| status["name"] == "step" && !status["state"]["terminated"].is_null())
        });
        // The helper runs until the pod is deleted, which as such would be no success.
        env.exec_in(name, "helper", "true");
        env.delete(&format!("pod/{name}"));
        env.event(name, &[verdict]);
    }
    env.settled();
    assert_eq!(env.artifacts(), ["artifact/good"]);
    env.hold(&[("artifact/good", "file", "good\n")]);
}

pub(super) fn marker(env: &Env) {
    let marked = ["succeeds", "fails", "deleted"];
    for name in marked {
        let then = match name {
            "succeeds" => "exit 0",
            "fails" => "exit 1",
            _ => "exec sleep 1000",
        };
        env.apply_with("marker.yaml", &[("NAME", name), ("THEN", then)]);
    }
    env.ready("deleted");
    env.delete("pod/deleted");
    env.succeeded("succeeds");
    env.failed("fails");
    for name in marked {
        env.event(name, &[&format!("artifact/{name} is committed")]);
        let verdict = format!("task-cache/{name}-unmarked is not committed");
        env.event(name, &[&verdict, ".baggageclaim-commit"]);
    }
    env.settled();
    let mut expected: Vec<String> = ["artifact", "task-cache"]
        .into_iter()
        .flat_map(|kind| marked.map(|name| format!("{kind}/{name}")))
        .collect();
    expected.sort();
    assert_eq!(env.artifacts(), expected);
    // The marker is not part of it.
    env.hold(&[
        ("artifact/succeeds", "file", "succeeds\n"),
        ("task-cache/succeeds", "file", "succeeds\n"),
        ("artifact/fails", "file", "fails\n"),
        ("task-cache/fails", "file", "fails\n"),
        ("artifact/deleted", "file", "deleted\n"),
        ("task-cache/deleted", "file", "deleted\n"),
    ]);
}
