//! Data that outlives pods: resource caches, task caches, outputs, and pipelines of them. The
//! pipelines are those of `examples/`, unchanged.

use std::fs::File;

use crate::stage::Stage;
use crate::step::Step;

pub(super) fn pipeline_of_pods(stage: &Stage) {
    let build = |number: usize| {
        stage.apply("../../../examples/pipeline/pods/1-get.yaml");
        stage.succeeded("get");
        stage.apply("../../../examples/pipeline/pods/2-build.yaml");
        stage.succeeded("build-amd64");
        stage.succeeded("build-arm64");
        stage.apply("../../../examples/pipeline/pods/3-test.yaml");
        stage.succeeded("test");
        assert_eq!(
            stage.logs("test"),
            "hello from amd64\nhello from arm64\n",
            "build {number}"
        );
        (stage.logs("get"), stage.logs("build-amd64"))
    };
    assert_eq!(
        build(1),
        ("fetching\n".into(), "the cache holds 0 objects\n".into())
    );
    // Everybody is told what became of what he made.
    stage.event(
        "build-amd64",
        &[
            "artifact/hello-amd64",
            "task-cache/hello/amd64",
            "committed",
        ],
    );
    stage.clear();
    stage.settled();
    assert_eq!(
        build(2),
        (
            "the sources are there already\n".into(),
            "the cache holds 1 objects\n".into()
        )
    );
}

pub(super) fn pipeline_of_jobs(stage: &Stage) {
    for (file, step) in [("1-get", "get"), ("2-build", "build"), ("3-test", "test")] {
        stage.apply(&format!("../../../examples/pipeline/jobs/{file}.yaml"));
        stage.kubectl(&[
            "wait",
            "--for=condition=complete",
            "job",
            "--selector",
            &format!("step={step}"),
            "--timeout=120s",
        ]);
    }
    assert_eq!(
        stage.kubectl(&["logs", "job/test"]),
        "hello from amd64\nhello from arm64\n"
    );
}

/// The event on a volume whose pod was deleted while it ran.
const DELETED: &str = "deleted before it had ended";

pub(super) fn task_cache(stage: &Stage) {
    // A step that adds a line to its cache, shows it, and ends as it is told.
    let step = |name: &str, then: &str| {
        stage.apply_with("task-cache.yaml", &[("NAME", name), ("THEN", then)]);
    };
    let content = |name: &str| stage.logs(name);

    step("first", "exit 0");
    stage.succeeded("first");
    assert_eq!(content("first"), "first\n");
    stage.event("first", &["task-cache/steps", "is committed"]);

    step("fails", "exit 1");
    stage.failed("fails");
    assert_eq!(content("fails"), "first\nfails\n");
    stage.event("fails", &["task-cache/steps is not committed"]);

    stage.apply("failing-job.yaml");
    stage.kubectl(&[
        "wait",
        "--for=condition=failed",
        "job/job",
        "--timeout=120s",
    ]);
    let job = stage.only_pod("job-name=job");
    assert_eq!(content(&job), "first\njob\n");
    let verdict = "task-cache/steps is not committed: container step exited with 3";
    stage.event(&job, &[verdict]);

    // It is ready when its line is there.
    step("deleted", "exec sleep 1000");
    stage.ready("deleted");
    assert_eq!(content("deleted"), "first\ndeleted\n");
    stage.delete("pod/deleted");
    stage.event("deleted", &["task-cache/steps is not committed", DELETED]);
    stage.settled();

    step("last", "exit 0");
    stage.succeeded("last");
    assert_eq!(content("last"), "first\nlast\n");
}

pub(super) fn deleted_maker(stage: &Stage) {
    let then = "exec sleep 1000";
    stage.apply_with("maker.yaml", &[("NAME", "made"), ("THEN", then)]);
    stage.ready("made");
    stage.delete("pod/made");
    for kind in ["artifact", "task-cache", "resource-cache"] {
        let verdict = format!("{kind}/made is not committed");
        stage.event("made", &[&verdict, DELETED]);
    }
    stage.settled();
    assert!(stage.artifacts().is_empty(), "{:?}", stage.artifacts());
    // The next pod finds nothing (the maker ensures that), and is the first.
    let text = stage.make("made");
    stage.hold(&[("resource-cache/made", "text", &text)]);
}

pub(super) fn waiting_for_input(stage: &Stage) {
    let mut maker = Step::runs(stage, "maker");
    maker.works();
    let comes = |name: &str, why: &str| {
        let from = "artifact/maker";
        stage.apply_with("reader.yaml", &[("NAME", name), ("FROM", from)]);
        stage.event(name, &["waiting up to ", from, why]);
    };
    comes("early", "pod maker is still making it");
    // Its step is over, but not all that writes there.
    let output = stage.volume_from_outside(maker.uid(), "out").join("more");
    let held = File::options().append(true).open(&output);
    let held = held.unwrap_or_else(|error| panic!("{}: {error}", output.display()));
    maker.told_to_end();
    stage.succeeded("maker");
    comes("late", "a process of pod maker still holds it open");
    assert!(!stage.artifacts().contains(&"artifact/maker".to_owned()));
    drop(held);
    for name in ["early", "late"] {
        stage.succeeded(name);
        assert_eq!(
            stage.logs(name),
            "==> ./begun <==\nbegun\n\n==> ./more <==\n1\n"
        );
        // It waited, and was not refused and tried again. Kubelet tells things in their order.
        stage.event(name, &["ontainer started"]);
        assert_eq!(stage.warnings(name), [""; 0]);
    }
    maker.ended();
}
