//! How the driver finds a pod's outcome if its phase is not enough: annotations, and markers in
//! volumes. `docs/events.md` has the rules.

use crate::stage::Stage;

/// A pod in which steps are exec'ed, one that leaves its name in the cache and in the output.
fn worker(stage: &Stage, name: &str) {
    stage.apply_with("worker.yaml", &[("NAME", name)]);
    stage.ready(name);
    stage.exec(name, &format!("echo {name} > /work/file"));
    stage.exec(
        name,
        "cp /work/file /out/file && cat /work/file >> /cache/steps",
    );
}

pub(super) fn annotation(stage: &Stage) {
    worker(stage, "good");
    stage.tell_outcome("good", "succeeded");
    stage.delete("pod/good");
    stage.event("good", &["artifact/good is committed"]);
    stage.event("good", &["task-cache/worker is committed"]);

    worker(stage, "bad");
    stage.tell_outcome("bad", "failed");
    stage.delete("pod/bad");
    for reference in ["artifact/bad", "task-cache/worker"] {
        let verdict = format!("{reference} is not committed");
        stage.event("bad", &[&verdict, "the annotation"]);
    }

    // It was deleted while it ran, so no outcome is reported.
    worker(stage, "cancelled");
    stage.delete("pod/cancelled");
    stage.event(
        "cancelled",
        &[
            "artifact/cancelled is not committed",
            "deleted before it had ended",
        ],
    );

    // A mistake is told, and can be mended.
    worker(stage, "mended");
    stage.tell_outcome("mended", "success");
    stage.event("mended", &["\"success\"", "succeeded or failed"]);
    stage.tell_outcome("mended", "succeeded");
    stage.delete("pod/mended");
    stage.event("mended", &["artifact/mended is committed"]);

    // The first word counts.
    worker(stage, "late");
    stage.tell_outcome("late", "failed");
    stage.tell_outcome("late", "succeeded");
    stage.delete("pod/late");
    stage.event("late", &["artifact/late is not committed"]);

    stage.settled();
    assert_eq!(
        stage.artifacts(),
        ["artifact/good", "artifact/mended", "task-cache/worker"]
    );
    stage.hold(&[
        ("artifact/good", "file", "good\n"),
        ("artifact/mended", "file", "mended\n"),
        ("task-cache/worker", "steps", "good\nmended\n"),
    ]);
}

pub(super) fn outcome_container(stage: &Stage) {
    for (name, then, verdict) in [
        ("good", "exit 0", "artifact/good is committed"),
        ("bad", "exit 3", "container step exited with 3"),
    ] {
        stage.apply_with("outcome-container.yaml", &[("NAME", name), ("THEN", then)]);
        stage.until("pods", name, "left by its step", |pod| {
            let statuses = pod["status"]["containerStatuses"].as_array();
            let mut statuses = statuses.into_iter().flatten();
            statuses
                .any(|status| status["name"] == "step" && !status["state"]["terminated"].is_null())
        });
        // The helper runs until the pod is deleted, which as such would be no success.
        stage.exec_in(name, "helper", "true");
        stage.delete(&format!("pod/{name}"));
        stage.event(name, &[verdict]);
    }
    stage.settled();
    assert_eq!(stage.artifacts(), ["artifact/good"]);
    stage.hold(&[("artifact/good", "file", "good\n")]);
}

pub(super) fn marker(stage: &Stage) {
    let marked = ["succeeds", "fails", "deleted"];
    for name in marked {
        let then = match name {
            "succeeds" => "exit 0",
            "fails" => "exit 1",
            _ => "exec sleep 1000",
        };
        stage.apply_with("marker.yaml", &[("NAME", name), ("THEN", then)]);
    }
    stage.ready("deleted");
    stage.delete("pod/deleted");
    stage.succeeded("succeeds");
    stage.failed("fails");
    for name in marked {
        stage.event(name, &[&format!("artifact/{name} is committed")]);
        let verdict = format!("task-cache/{name}-unmarked is not committed");
        stage.event(name, &[&verdict, ".baggageclaim-commit"]);
    }
    stage.settled();
    let mut expected: Vec<String> = ["artifact", "task-cache"]
        .into_iter()
        .flat_map(|kind| marked.map(|name| format!("{kind}/{name}")))
        .collect();
    expected.sort();
    assert_eq!(stage.artifacts(), expected);
    // The marker is not part of it.
    stage.hold(&[
        ("artifact/succeeds", "file", "succeeds\n"),
        ("task-cache/succeeds", "file", "succeeds\n"),
        ("artifact/fails", "file", "fails\n"),
        ("task-cache/fails", "file", "fails\n"),
        ("artifact/deleted", "file", "deleted\n"),
        ("task-cache/deleted", "file", "deleted\n"),
    ]);
}
