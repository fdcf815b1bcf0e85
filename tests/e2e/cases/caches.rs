//! What outlives pods: resource caches, task caches, outputs, and pipelines that are made of them.
//! The pipelines are those of `examples/`, applied as they are.

use crate::stage::Stage;

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
    stage.event("fails", &["task-cache/steps", "is not committed"]);

    step("deleted", "exec sleep 1000");
    stage.ready("deleted");
    stage.delete("pod/deleted");
    stage.settled();

    step("last", "exit 0");
    stage.succeeded("last");
    assert_eq!(content("last"), "first\nlast\n");
}
